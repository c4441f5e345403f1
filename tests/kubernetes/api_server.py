"""A Kubernetes API server of the tests: TLS, tokens, rights, watches, logs, and programs in pods over a websocket.

with ApiServer(PlainPods(tmp_path)) as server:
    server.kubeconfig(tmp_path / "kubeconfig")     # of the user "tester", who may do everything
    server.rights["ann"] = role["rules"]           # of a Role; None: everything
    server.away(20)                                # connections are refused
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import os
import select
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Message, Ping, TextMessage
from wsproto.utilities import generate_accept_token

from clustertool.engines.kubernetes.api.object_kinds import KINDS
from tests.kubernetes.api_store import ApiError, Obj, Store, now
from tests.kubernetes.controllers import Controllers, Runtime

VERSION = {"major": "1", "minor": "34", "gitVersion": "v1.34.0", "platform": "linux/amd64"}
CHANNELS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
ADDRESS = "127.0.0.1"
REVIEWS = ("selfsubjectaccessreviews", "selfsubjectreviews")


class ApiServer:
    """users: token -> name. requests: (verb, resource, name) of all so far. throttle: that many requests get 429."""

    def __init__(self, runtime: Runtime, sockets: list[socket.socket] | None = None, **nodes: int) -> None:
        self.users, self.rights = {"token-of-tester": "tester"}, {"tester": None}  # type: dict[str, str], dict[str, Any]
        self.kinds = dict(KINDS)
        self.requests: list[tuple[str, str, str]] = []
        self.throttle = 0
        self.gone = threading.Event()  # no connection is accepted
        self.ended = False
        self.connections: set[socket.socket] = set()
        self.store, self.runtime = Store(), runtime
        self.controllers = Controllers(self.store, runtime, **nodes)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ca = _certificate(self.context)
        self.sockets = sockets or [socket.create_server((ADDRESS, 0))]
        self.servers = [self._serve(one) for one in self.sockets]

    def __enter__(self) -> ApiServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True
        for server in self.servers:
            server.shutdown()
            server.server_close()
        self._cut()
        self.controllers.close()
        assert not self.controllers.errors, self.controllers.errors

    def url(self, number: int = 0) -> str:
        return "https://{}:{}".format(*self.sockets[number].getsockname())

    def kubeconfig(self, path: Path, user: str = "tester", namespace: str = "default", number: int = 0) -> Path:
        token = next((token for token, name in self.users.items() if name == user), "wrong")
        cluster = {"server": self.url(number), "certificate-authority-data": base64.b64encode(self.ca).decode()}
        context = {"cluster": "lab", "user": user, "namespace": namespace}
        text = {"apiVersion": "v1", "kind": "Config", "current-context": "lab", "preferences": {}}
        lists = {
            "clusters": [{"name": "lab", "cluster": cluster}],
            "contexts": [{"name": "lab", "context": context}],
            "users": [{"name": user, "user": {"token": token}}],
        }
        path.write_text(json.dumps({**text, **lists}))
        path.chmod(0o600)
        return path

    def add_user(self, name: str, rules: Any = None) -> None:
        self.users[f"token-of-{name}"], self.rights[name] = name, rules

    def away(self, seconds: float) -> None:
        """End all connections, and accept none for so long."""
        self.gone.set()
        self._cut()
        threading.Timer(seconds, self.gone.clear).start()

    def allowed(self, user: str, verb: str, group: str, resource: str) -> bool:
        rules = self.rights.get(user, ())
        return rules is None or any(
            (verb in r["verbs"] or "*" in r["verbs"]) and group in r["apiGroups"] and resource in r["resources"]
            for r in rules
        )

    def _cut(self) -> None:
        for connection in list(self.connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def _serve(self, listener: socket.socket) -> ThreadingHTTPServer:
        owner = self

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def verify_request(self, request: Any, address: Any) -> bool:
                return not owner.gone.is_set()

            def finish_request(self, request: Any, address: Any) -> None:
                try:
                    with owner.context.wrap_socket(request, server_side=True) as connection:
                        owner.connections.add(connection)
                        try:
                            Handler(connection, address, self)
                        finally:
                            owner.connections.discard(connection)
                except OSError:
                    return

            def handle_error(self, request: Any, address: Any) -> None:
                return

        class Handler(_Handler):
            api = owner

        server = Server(listener.getsockname(), Handler, bind_and_activate=False)
        server.socket.close()
        server.socket = listener
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server


class _Handler(BaseHTTPRequestHandler):
    api: ApiServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        return

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self.query = parse_qs(url.query, keep_blank_values=True)
        try:
            if self.api.throttle > 0:
                self.api.throttle -= 1
                text = "too many requests, please try again later"
                raise ApiError(429, "TooManyRequests", text, headers={"Retry-After": "1"})
            user = self.api.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
            if user is None:
                raise ApiError(401, "Unauthorized", "Unauthorized")
            self._route(user, url.path.strip("/").split("/"), json.loads(body) if body else {})
        except ApiError as error:
            self._send(error.body, error.code, error.headers)
        except (BrokenPipeError, ConnectionError, ssl.SSLError):
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _any

    def _one(self, name: str) -> str:
        return self.query.get(name, [""])[0]

    def _send(self, body: Any, code: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        for key, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def _route(self, user: str, parts: list[str], body: Obj) -> None:
        api, method = self.api, self.command
        if parts == ["version"]:
            self._send(VERSION)
            return
        if parts[0] not in ("api", "apis") or len(parts) < (3 if parts[0] == "api" else 4):
            self._discover(parts)
            return
        version = parts[1] if parts[0] == "api" else "/".join(parts[1:3])
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        if rest[0] in REVIEWS:
            self._review(user, rest[0], body)
            return
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        plural, name, sub = [*rest, "", ""][:3]
        kind = next((k for k in api.kinds.values() if (k.version, k.plural) == (version, plural)), None)
        if kind is None:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        watch = self._one("watch") in ("1", "true")
        verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete" if name else "deletecollection"}
        did = verb.get(method) or ("get" if name else "watch" if watch else "list")
        api.requests.append((did, plural + f"/{sub}" * bool(sub), name))
        for need in (did, "create") if sub == "exec" else (did,):
            if not api.allowed(user, need, kind.group, plural + f"/{sub}" * bool(sub)):
                named = f' "{name}"' if name else ""
                what = f'cannot {need} resource "{plural}{f"/{sub}" * bool(sub)}" in API group "{kind.group}"'
                where = f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
                text = f'{kind.resource}{named} is forbidden: User "{user}" {what}{where}'
                raise ApiError(403, "Forbidden", text, details={"kind": plural, "group": kind.group})
        store, selectors = api.store, (self._one("labelSelector"), self._one("fieldSelector"))
        if sub == "log":
            self._log(store.get("Pod", namespace, name))
        elif sub == "exec":
            self._exec(store.get("Pod", namespace, name))
        elif method == "GET" and name:
            self._send(store.get(kind.name, namespace, name))
        elif watch:
            self._watch(kind.name, namespace, *selectors)
        elif method == "GET":
            with store.changed:
                items, at = store.list(kind.name, namespace, *selectors), str(store.version)
            meta = {"resourceVersion": at}
            self._send({"kind": f"{kind.name}List", "apiVersion": version, "metadata": meta, "items": items})
        elif method == "POST":
            self._send(store.create(kind.name, namespace, body, dry=bool(self._one("dryRun"))), 201)
        elif method == "DELETE":
            for one in ("gracePeriodSeconds", "propagationPolicy"):
                if self._one(one):
                    body[one] = self._one(one)
            every = [name] if name else [o["metadata"]["name"] for o in store.list(kind.name, namespace, *selectors)]
            left = [store.delete(kind.name, namespace, one, body) for one in every]
            self._send(left[0] if name else {"kind": "Status", "apiVersion": "v1", "status": "Success"})
        else:
            self._change(kind.name, namespace, name, sub, body)

    def _change(self, kind: str, namespace: str, name: str, sub: str, body: Obj) -> None:
        def change(obj: Obj) -> None:
            at = (body.get("metadata") or {}).get("resourceVersion")
            if at and at != obj["metadata"]["resourceVersion"]:
                text = f'Operation cannot be fulfilled on {kind} "{name}": the object has been modified'
                raise ApiError(409, "Conflict", text)
            if self.command == "PATCH":
                _merge(obj, body)
            else:
                kept = {} if sub == "status" or "status" not in obj else {"status": obj["status"]}
                obj.update({**body, **kept})

        self.api.store.get(kind, namespace, name)
        self._send(self.api.store.update(kind, namespace, name, change))

    def _discover(self, parts: list[str]) -> None:
        kinds = self.api.kinds.values()
        versions = sorted({kind.version for kind in kinds} | {"authorization.k8s.io/v1"} - {"v1"})
        if parts == ["api"]:
            self._send({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})
        elif parts == ["apis"]:
            groups = []
            for version in versions:
                if "/" in version:
                    one = {"groupVersion": version, "version": version.partition("/")[2]}
                    groups.append({"name": version.partition("/")[0], "versions": [one], "preferredVersion": one})
            self._send({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        elif "/".join(parts[1:]) in versions or parts == ["api", "v1"]:
            version = "/".join(parts[1:])
            verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
            rows = []
            for k in kinds:
                if k.version == version:
                    row = {"name": k.plural, "singularName": k.name.lower(), "namespaced": k.namespaced, "kind": k.name}
                    rows.append({**row, "verbs": verbs})
            self._send({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": rows})
        else:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")

    def _review(self, user: str, which: str, body: Obj) -> None:
        if which == "selfsubjectreviews":
            self._send({**body, "status": {"userInfo": {"username": user, "groups": []}}}, 201)
            return
        asked = body["spec"]["resourceAttributes"]
        resource = asked.get("resource", "") + (f"/{asked['subresource']}" if asked.get("subresource") else "")
        good = self.api.allowed(user, asked.get("verb", ""), asked.get("group", ""), resource)
        self._send({**body, "status": {"allowed": good}}, 201)

    # -- streams

    def _here(self) -> bool:
        """Whether the client and this server are still there."""
        readable = select.select([self.connection], [], [], 0)[0]
        return not (self.api.ended or (readable and not self.connection.recv(1)))

    def _chunks(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _watch(self, kind: str, namespace: str, labels: str, fields: str) -> None:
        store, end = self.api.store, time.monotonic() + float(self._one("timeoutSeconds") or 1800)
        version = int(self._one("resourceVersion") or 0)
        self._chunks("application/json")
        if not version:
            with store.changed:
                found, version = store.list(kind, namespace, labels, fields), store.version
            for obj in found:
                self._chunk(json.dumps({"type": "ADDED", "object": obj}).encode() + b"\n")
        wait = lambda: time.monotonic() < end and self._here()  # noqa: E731
        marked = time.monotonic()
        for type_, obj in store.watch(kind, namespace, labels, fields, version, wait):
            if not type_ and self._one("allowWatchBookmarks") and time.monotonic() > marked + 5:
                marked, type_ = time.monotonic(), "BOOKMARK"
                obj = {"kind": kind, "metadata": {"resourceVersion": str(store.version)}}
            if type_:
                self._chunk(json.dumps({"type": type_, "object": obj}).encode() + b"\n")
        self._chunk(b"")

    def _log(self, pod: Obj) -> None:
        name, file = pod["metadata"]["name"], self._container(pod)
        if file is None:
            container = pod["spec"]["containers"][0]["name"]
            text = f'container "{container}" in pod "{name}" is waiting to start: ContainerCreating'
            raise ApiError(400, "BadRequest", text)
        self._chunks("text/plain")
        left = int(self._one("limitBytes") or 1 << 40)
        for line in self._lines(pod, file.log):
            self._chunk(line[:left])
            left -= len(line)
            if left <= 0:
                break
        self._chunk(b"")

    def _lines(self, pod: Obj, path: Path) -> Iterator[bytes]:
        """Lines of a log with time stamps in front, as the request wants them."""
        since = self._one("sinceTime")
        if self._one("sinceSeconds"):
            since = now(-int(self._one("sinceSeconds")))
        stamps, follow = self._one("timestamps") == "true", self._one("follow") == "true"
        with path.open("rb") as log:
            if self._one("tailLines"):
                lines = log.read().splitlines(keepends=True)
                keep = int(self._one("tailLines"))
                log.seek(sum(map(len, lines[: max(len(lines) - keep, 0)])))
            while True:
                over = self._container(pod).poll() is not None  # type: ignore[union-attr]
                while line := log.readline():
                    if not line.endswith(b"\n"):
                        log.seek(-len(line), os.SEEK_CUR)
                        break
                    stamp, _, text = line.partition(b" ")
                    if stamp.decode()[:19] >= since[:19]:
                        yield line if stamps else text
                if over or not follow or not self._here():
                    return
                time.sleep(0.05)

    def _container(self, pod: Obj) -> Any:
        if pod["spec"].get("nodeName") in self.api.controllers.lost:
            raise ApiError(500, "InternalError", "Get containerLogs: dial tcp 10.0.0.1:10250: no route to host")
        return self.api.controllers.containers.get(pod["metadata"]["uid"])

    def _exec(self, pod: Obj) -> None:
        container = self._container(pod)
        if container is None or container.poll() is not None:
            name = pod["spec"]["containers"][0]["name"]
            raise ApiError(500, "InternalError", f'container not found ("{name}")')
        offered = [one.strip() for one in self.headers.get("Sec-WebSocket-Protocol", "").split(",")]
        protocol = next(one for one in CHANNELS if one in offered)
        accept = generate_accept_token(self.headers["Sec-WebSocket-Key"].encode()).decode()
        self.send_response(101)
        for key, value in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept)):
            self.send_header(key, value)
        self.send_header("Sec-WebSocket-Protocol", protocol)
        self.end_headers()
        self.close_connection = True
        try:
            process = container.exec(self.query["command"])
        except FileNotFoundError as error:
            text = f'error executing command in container: exec: "{error.filename}": executable file not found in $PATH'
            status = ApiError(500, "InternalError", text).body
            self._frame(Connection(ConnectionType.SERVER), 3, json.dumps(status).encode())
            return
        with process:
            try:
                self._stream(process, protocol)
            finally:
                process.kill()

    def _frame(self, socket_: Connection, channel: int, data: bytes) -> None:
        self.connection.sendall(socket_.send(BytesMessage(data=bytes([channel]) + data)))

    def _stream(self, process: subprocess.Popen[bytes], protocol: str) -> None:
        """Pass on data in one thread, as TLS demands, until the program and its streams have ended."""
        assert process.stdin and process.stdout and process.stderr
        web, stdin, pending = Connection(ConnectionType.SERVER), process.stdin, bytearray()
        streams = {process.stdout: 1, process.stderr: 2}
        os.set_blocking(stdin.fileno(), False)
        closing = False
        while streams:
            reads: list[Any] = [*streams, *([self.connection] if len(pending) < 1 << 20 else [])]
            ready, writable, _ = select.select(reads, [stdin] if pending else [], [], 0.5)
            if self.api.ended:
                return
            if self.connection in ready or self.connection.pending():
                data = self.connection.recv(1 << 16)
                web.receive_data(data or None)
                for event in web.events() if data else [CloseConnection(code=1000)]:
                    if isinstance(event, CloseConnection):
                        return
                    if isinstance(event, Ping):
                        self.connection.sendall(web.send(event.response()))
                    if isinstance(event, Message):
                        raw = event.data.encode() if isinstance(event, TextMessage) else bytes(event.data)
                        if not hasattr(self, "channel"):
                            self.channel, raw = raw[0], raw[1:]
                        if self.channel == 0:
                            pending += raw
                        closing = closing or (self.channel == 255 and raw == b"\0" and protocol == CHANNELS[0])
                        if event.message_finished:
                            del self.channel
            if writable:
                try:
                    del pending[: os.write(stdin.fileno(), pending)]
                except BrokenPipeError:
                    pending.clear()
            if closing and not pending and not stdin.closed:
                stdin.close()
            for stream in [one for one in streams if one in ready]:
                if data := os.read(stream.fileno(), 1 << 15):
                    self._frame(web, streams[stream], data)
                else:
                    del streams[stream]
        code = process.wait()
        body: Obj = {"metadata": {}, "status": "Success"}
        if code:
            causes = {"causes": [{"reason": "ExitCode", "message": str(code if code > 0 else 128 - code)}]}
            text = f"command terminated with non-zero exit code: exit status {code}"
            body = {
                "metadata": {},
                "status": "Failure",
                "reason": "NonZeroExitCode",
                "message": text,
                "details": causes,
            }
        self._frame(web, 3, json.dumps(body).encode())
        self.connection.sendall(web.send(CloseConnection(code=1000)))


def _merge(obj: Obj, patch: Obj) -> None:
    for key, value in patch.items():
        if value is None:
            obj.pop(key, None)
        elif isinstance(value, dict) and isinstance(obj.get(key), dict):
            _merge(obj[key], value)
        else:
            obj[key] = value


def _certificate(context: ssl.SSLContext) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "lab")])
    today = datetime.datetime.now(datetime.timezone.utc)
    day = datetime.timedelta(days=1)
    places = [x509.IPAddress(ipaddress.ip_address(one)) for one in (ADDRESS, "10.77.254.1")]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - day)
        .not_valid_after(today + day)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(places), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    with tempfile.NamedTemporaryFile() as file:
        file.write(pem + key.private_bytes(*encoding))
        file.flush()
        context.load_cert_chain(file.name)
    return pem
