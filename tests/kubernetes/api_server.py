"""A Kubernetes API server of the tests: TLS, tokens, rights, watches, logs, and programs in pods over a websocket.

with ApiServer(PlainPods(tmp_path)) as server:
    server.kubeconfig(tmp_path / "kubeconfig")     # of the user "tester", who may do everything
    server.rights["ann"] = role["rules"]           # of a Role; None: everything
    server.away(20)                                # connections are refused
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import trustme
from aiohttp import WSMsgType, web

from clustertool.model.kubernetes.api_objects import KINDS, ObjectKind
from tests.kubernetes.api_store import ApiError, Obj, Store
from tests.kubernetes.containers import Container, Runtime
from tests.kubernetes.controllers import Controllers
from tests.kubernetes.kubeconfigs import kubeconfig

ADDRESS = "127.0.0.1"
CHANNELS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR, STATUS, CLOSE = 0, 1, 2, 3, 255
METHODS = {"create": "POST", "delete": "DELETE"}  # else GET
LARGEST = 3 << 20  # bytes of a request
POLL = 0.1
Answer = Callable[[web.Request, str, str, str], Awaitable[web.StreamResponse]]


class ApiServer(contextlib.AbstractContextManager):
    """users: token -> name. requests: (verb, resource, name) of all so far; the verb of a dry
    run is "validate". busy: (verb, resource) of those that get 429."""

    def __init__(self, runtime: Runtime, **nodes: int) -> None:
        self.users: dict[str, str] = {}
        self.rights: dict[str, Any] = {}
        self.add_user("tester")
        self.requests: list[tuple[str, str, str]] = []
        self.busy: set[tuple[str, str]] = set()
        self.store, self.runtime = Store(), runtime
        self.controllers = Controllers(self.store, runtime, **nodes)
        self.authority = trustme.CA()
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert(ADDRESS).configure_cert(self.tls)
        self.loop, self.port = asyncio.new_event_loop(), 0
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.runner = web.AppRunner(self._application(), handler_cancellation=True, shutdown_timeout=0.1)
        self._do(self.runner.setup())
        self._do(self._listen())

    def __exit__(self, *_: object) -> None:
        self._do(self.runner.cleanup())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)
        self.controllers.close()
        assert not self.controllers.errors, self.controllers.errors

    def kubeconfig(self, path: Path, user: str = "tester") -> Path:
        """The token of a user that is not known is wrong."""
        address, authority = f"https://{ADDRESS}:{self.port}", self.authority.cert_pem.bytes()
        return kubeconfig(path, address, {"token": f"token-of-{user}"}, authority)

    def add_user(self, name: str, rules: Any = None) -> None:
        self.users[f"token-of-{name}"], self.rights[name] = name, rules

    def allowed(self, user: str, verb: str, group: str, resource: str) -> bool:
        rules = self.rights[user]
        return rules is None or any(
            verb in rule["verbs"] and group in rule["apiGroups"] and resource in rule["resources"] for rule in rules
        )

    def away(self, seconds: float) -> None:
        """Break all connections, and refuse new ones for so long."""
        self._do(self._leave(seconds))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    async def _listen(self) -> None:
        self.site = web.TCPSite(self.runner, ADDRESS, self.port, ssl_context=self.tls)
        await self.site.start()
        self.port = self.runner.addresses[0][1]

    async def _leave(self, seconds: float) -> None:
        await self.site.stop()
        for connection in list(self.runner.server.connections):
            connection.transport.abort()
        self.loop.call_later(seconds, lambda: self.loop.create_task(self._listen()))

    # -- requests

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._checked], client_max_size=LARGEST)
        app.router.add_get("/{top:api|apis}", self._groups)
        app.router.add_get("/api/{version}", self._resources)
        app.router.add_get("/apis/{group}/{version}", self._resources)
        app.router.add_post("/apis/{group}/v1/{review:selfsubject(access)?reviews}", self._review)
        for kind in KINDS.values():
            for verb in ("list", "create"):
                self._add(app, kind.path("{namespace}"), kind, verb, self._objects)
            for verb in ("get", "delete"):
                self._add(app, kind.path("{namespace}", "{name}"), kind, verb, self._objects)
        for sub, answer in (("/log", self._log), ("/exec", self._exec)):
            self._add(app, KINDS["Pod"].path("{namespace}", "{name}") + sub, KINDS["Pod"], "get", answer, sub)
        return app

    def _add(self, app: web.Application, path: str, kind: ObjectKind, verb: str, answer: Answer, sub: str = "") -> None:
        """A route for users that have the right to this verb of the kind."""

        async def allowed(request: web.Request) -> web.StreamResponse:
            user, at = self._user(request), request.match_info
            namespace, name = at.get("namespace", ""), at.get("name", "")
            watch = verb == "list" and request.query.get("watch") in ("1", "true")
            did, resource = "watch" if watch else verb, kind.plural + sub
            self._note("validate" if "dryRun" in request.query else did, resource, name)
            for need in (did, "create") if sub == "/exec" else (did,):
                if not self.allowed(user, need, kind.group, resource):
                    what = f'cannot {need} resource "{resource}" in API group "{kind.group}"'
                    where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
                    text = f'{kind.resource} is forbidden: User "{user}" {what} {where}'
                    raise ApiError(403, "Forbidden", text)
            return await (self._watch if watch else answer)(request, kind.name, namespace, name)

        app.router.add_route(METHODS.get(verb, "GET"), path, allowed)

    @web.middleware
    async def _checked(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            self._user(request)
            return await handler(request)
        except ApiError as error:
            return web.json_response(error.body, status=error.code, headers=error.headers)
        except web.HTTPError as error:  # no route, or too large
            return web.json_response(ApiError(error.status, error.reason, error.reason).body, status=error.status)

    def _user(self, request: web.Request) -> str:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.users:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        return self.users[token]

    def _note(self, verb: str, resource: str, name: str = "") -> None:
        self.requests.append((verb, resource, name))
        if (verb, resource) in self.busy:
            raise ApiError(429, "TooManyRequests", "too many requests, try again later", {"Retry-After": "1"})

    async def _groups(self, request: web.Request) -> web.StreamResponse:
        if request.match_info["top"] == "api":
            return web.json_response({"kind": "APIVersions", "versions": ["v1"]})
        groups = []
        for version in sorted({kind.version for kind in KINDS.values() if kind.group}):
            one = {"groupVersion": version, "version": version.partition("/")[2]}
            groups.append({"name": version.partition("/")[0], "versions": [one], "preferredVersion": one})
        return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})

    async def _resources(self, request: web.Request) -> web.StreamResponse:
        version, verbs = "/".join(request.match_info.values()), ["create", "delete", "get", "list", "watch"]
        rows = [
            {"name": kind.plural, "kind": kind.name, "namespaced": kind.namespaced, "verbs": verbs}
            for kind in KINDS.values()
            if kind.version == version
        ]
        return web.json_response({"kind": "APIResourceList", "groupVersion": version, "resources": rows})

    async def _review(self, request: web.Request) -> web.StreamResponse:
        body, user = await request.json(), self._user(request)
        self._note("create", request.match_info["review"])
        if request.match_info["review"] == "selfsubjectreviews":
            return web.json_response({**body, "status": {"userInfo": {"username": user}}}, status=201)
        asked = body["spec"]["resourceAttributes"]
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        good = self.allowed(user, asked["verb"], asked.get("group", ""), resource)
        return web.json_response({**body, "status": {"allowed": good}}, status=201)

    # -- objects

    async def _objects(self, request: web.Request, kind: str, namespace: str, name: str) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        if request.method == "POST":
            strict, dry = request.query.get("fieldValidation") == "Strict", request.query.get("dryRun") == "All"
            return web.json_response(self.store.create(kind, namespace, body, strict, dry), status=201)
        if request.method == "DELETE":
            return web.json_response(self.store.delete(kind, namespace, name, {**request.query, **body}))
        if name:
            return web.json_response(self.store.get(kind, namespace, name))
        with self.store.changed:
            items, version = self.store.list(kind, namespace, *_selectors(request)), str(self.store.version)
        if "as=PartialObjectMetadataList" in request.headers.get("Accept", ""):
            items = [{"metadata": one["metadata"]} for one in items]
        about = {"kind": f"{kind}List", "apiVersion": KINDS[kind].version, "metadata": {"resourceVersion": version}}
        return web.json_response({**about, "items": items})

    async def _watch(self, request: web.Request, kind: str, namespace: str, name: str) -> web.StreamResponse:
        end = time.monotonic() + float(request.query.get("timeoutSeconds", 1800))
        version = int(request.query["resourceVersion"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})

        async def send(type_: str, obj: Obj) -> None:
            await response.write(json.dumps({"type": type_, "object": obj}).encode() + b"\n")

        await response.prepare(request)
        try:
            while time.monotonic() < end:
                version, events = self.store.since(version, kind, namespace, *_selectors(request))
                for event in events:
                    await send(*event)
                await asyncio.sleep(POLL)
            if request.query.get("allowWatchBookmarks"):
                await send("BOOKMARK", {"kind": kind, "metadata": {"resourceVersion": str(version)}})
        except ApiError as error:
            await send("ERROR", error.body)
        return response

    # -- containers

    async def _log(self, request: web.Request, kind: str, namespace: str, name: str) -> web.StreamResponse:
        container = self._container(namespace, name)
        if container is None:
            raise ApiError(400, "BadRequest", f'container in pod "{name}" is waiting to start: ContainerCreating')
        with container.log.open("rb") as log:
            lines = log.readlines()
        first = max(0, len(lines) - int(request.query.get("tailLines", len(lines))))
        body = b"".join(lines[first:])
        return web.Response(body=body[: int(request.query.get("limitBytes", len(body)))], content_type="text/plain")

    def _container(self, namespace: str, name: str) -> Container | None:
        """None before it has started."""
        pod = self.store.get("Pod", namespace, name)
        if pod["spec"].get("nodeName") in self.controllers.lost:
            raise ApiError(500, "InternalError", "Get containerLogs: dial tcp 10.0.0.1:10250: no route to host")
        return self.controllers.containers.get(pod["metadata"]["uid"])

    async def _exec(self, request: web.Request, kind: str, namespace: str, name: str) -> web.StreamResponse:
        container = self._container(namespace, name)
        if container is None or container.poll() is not None:
            raise ApiError(500, "InternalError", f"container not found in pod {name}")
        channel = web.WebSocketResponse(protocols=CHANNELS, max_msg_size=0)
        await channel.prepare(request)
        argv, options = container.exec(request.query.getall("command"))
        process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, **options)
        typing = asyncio.create_task(_pass_on(channel, process))
        try:
            await asyncio.gather(_show(channel, STDOUT, process.stdout), _show(channel, STDERR, process.stderr))
            status = json.dumps(_status(await process.wait())).encode()
            await channel.send_bytes(bytes([STATUS]) + status)
            await channel.close()
        finally:
            typing.cancel()
            if process.returncode is None:
                process.kill()
        return channel


async def _pass_on(channel: web.WebSocketResponse, process: Process) -> None:
    """What the client sends is the program's stdin."""
    async for message in channel:
        raw = message.data.encode() if message.type is WSMsgType.TEXT else message.data
        number, data = raw[0], raw[1:]
        if number == STDIN:
            process.stdin.write(data)
            await process.stdin.drain()
        elif (number, data) == (CLOSE, bytes([STDIN])):
            process.stdin.close()


async def _show(channel: web.WebSocketResponse, number: int, stream: asyncio.StreamReader) -> None:
    while data := await stream.read(1 << 15):
        await channel.send_bytes(bytes([number]) + data)


def _status(code: int) -> Obj:
    """The final status of a program."""
    if not code:
        return {"status": "Success"}
    cause = {"reason": "ExitCode", "message": str(code if code > 0 else 128 - code)}
    return {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]}}


def _selectors(request: web.Request) -> tuple[str, str]:
    return request.query.get("labelSelector", ""), request.query.get("fieldSelector", "")
