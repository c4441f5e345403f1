"""This module uses the API server for one command: objects are plain dicts, through the connections of the official client.

A response of 429 or 5xx is repeated, and a server that is away is waited for, for _PATIENCE seconds. What it refuses is
raised at once. The models of the client are not used: their import takes longer than a request.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from clustertool.engines.kubernetes.kube_credentials import KubeCredentials
from clustertool.engines.kubernetes.pod_channel import PodChannel
from clustertool.errors import AuthError, ClustertoolError, ConfigError, NotFound, PreflightError, Unreachable
from clustertool.model.kubernetes.api_objects import KINDS, Manifest, ObjectKind, fields, items, text
from clustertool.model.kubernetes.kubernetes_settings import KubernetesSettings
from clustertool.model.kubernetes.object_names import job_label
from clustertool.model.kubernetes.pod_reasons import CONTAINER
from clustertool.ssh.parallel import each

try:
    import urllib3
    from kubernetes.stream.ws_client import WSClient
    from urllib3.exceptions import HTTPError, NameResolutionError, SSLError
    from websocket import WebSocketException
except ImportError:  # the extra is not installed, see kube_credentials.py
    urllib3 = None  # type: ignore[assignment]

_PATIENCE = 30.0  # seconds
_SLOW = 3.0  # seconds without an answer after which the user gets to know what is waited for
_PAUSES = (0.2, 0.5, 1.0, 2.0)  # seconds before each further attempt; the last one again and again
_CONNECT, _READ = 10.0, 30.0  # seconds of one attempt
_MOST = 64 << 20  # bytes of a response
_PAGE = 500  # objects of a response to a list
_CHUNK = 64 << 10
_WATCH = 240  # seconds after which the server ends a watch, and it is begun again
_LONGEST_LINE = 8 << 20
_ANY = "application/json, */*"
_METADATA = f"application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1, {_ANY}"
_STRICT = {"fieldValidation": "Strict"}  # an unknown field is an error; before Kubernetes 1.25 it is left out
_PROTOCOLS = "v5.channel.k8s.io,v4.channel.k8s.io"
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_WHOAMI = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
_REPEATED = (429, 500, 502, 503, 504)  # a later attempt may succeed
_EXPIRED = 410  # the version of a list is too old: list again
_LONGEST = 600  # characters of a message that are shown
_NO_DRY_RUN = "does not support dry run"  # an admission webhook: it checks objects that are created only
_FORM = re.compile(r"(?:strict decoding error: |cannot be handled as an? \w+: )+(.*)", re.DOTALL)
_RIGHTS = "an administrator grants it: docs/kubernetes.md has the Role"


class AlreadyExists(PreflightError):
    """The error for an object whose name is taken."""


class Expired(PreflightError):
    """The error for a watch whose first version is too old."""


@dataclass(frozen=True)
class ApiRequest:
    """A request to the API server.

    resource: as in rights, for messages. namespace: "" where the path has none. accept: the form of the answer.
    """

    verb: str
    resource: str
    path: str
    name: str = ""
    namespace: str = ""
    query: Mapping[str, object] = field(default_factory=dict)
    body: Manifest | None = None
    accept: str = _ANY

    @property
    def method(self) -> str:
        return {"create": "POST", "delete": "DELETE"}.get(self.verb, "GET")

    @property
    def has_manifest(self) -> bool:
        """Whether an object is sent that the user's settings shape, and not a review of rights."""
        return self.verb == "create" and self.body is not None and bool(self.name)

    @property
    def text(self) -> str:
        """The request as messages name it: verb, resource, name, namespace."""
        inside = f" in the namespace {self.namespace}" if self.namespace else ""
        return f"{self.verb} {self.resource}{f' {self.name}' if self.name else ''}{inside}"


class ClusterApi:
    """The client of the API server for one command. Nothing is read or connected before the first use.

    May be used by several threads.
    """

    def __init__(
        self,
        settings: KubernetesSettings,
        note: Callable[[str], None] = lambda text: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare a client of the API server, without a request. settings: have the context and the namespace.

        note: gets a message while a server that is away is waited for. check: raises what ends the command; both are called
        in the thread of this constructor only.
        """
        self._settings, self._note, self._check = settings, note, check
        self._thread, self._lock = threading.get_ident(), threading.Lock()
        self._known: KubeCredentials | None = None
        self._user = ""
        self._connected = self._noted = False
        self._patient = 0

    # -- the namespace and the user

    @property
    def credentials(self) -> KubeCredentials:
        """The credentials of the kubeconfig, which is read at the first use. Raises the errors of KubeCredentials()."""
        with self._lock:
            if self._known is None:
                self._known = KubeCredentials(self._settings.context)
            return self._known

    @property
    def namespace(self) -> str:
        """The namespace of the settings, else that of the kubeconfig's context, else "default"."""
        return self._settings.namespace or self.credentials.namespace or "default"

    @property
    def where(self) -> str:
        """The context and the host of the server, for messages."""
        return self.credentials.where

    def user(self) -> str:
        """Return the user's name by which the server knows it (asked once).

        If the server cannot state it, that of the kubeconfig. Raises Unreachable, and AuthError if no request has succeeded
        yet.
        """
        if not self._user:
            review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
            request = ApiRequest("create", "selfsubjectreviews.authentication.k8s.io", _WHOAMI, body=review)
            found: object = ""
            try:
                answer = self._request_object(request)
                found = (answer.get("status") or {}).get("userInfo", {}).get("username", "")
            except (NotFound, PreflightError) as error:  # the server is older than 1.28
                if isinstance(error, Unreachable):
                    raise
            except AuthError:
                if not self._connected:
                    raise
            self._user = str(found or self.credentials.user)
        return self._user

    def allowed(self, verb: str, group: str, resource: str, subresource: str = "") -> bool:
        """Ask the server whether this user may use a verb on a resource in the namespace, and return the answer.

        group: the API group of the resource, "" for the core. Raises ClustertoolError if the server does not answer.
        """
        wanted = {"namespace": self.namespace, "verb": verb, "group": group, "resource": resource}
        if subresource:
            wanted["subresource"] = subresource
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": wanted},
        }
        request = ApiRequest("create", "selfsubjectaccessreviews.authorization.k8s.io", _REVIEWS, body=body)
        answer = self._request_object(request)
        return bool((answer.get("status") or {}).get("allowed"))

    # -- objects

    def get(self, kind: str, name: str) -> Manifest | None:
        """Read an object of a kind by its name, in the namespace if the kind has one; None if there is none."""
        with contextlib.suppress(NotFound):
            return self._request_object(self._request("get", KINDS[kind], name))
        return None

    def list_objects(
        self, kind: str, labels: Mapping[str, str] | None = None, fields: str = "", whole: bool = True
    ) -> list[Manifest]:
        """List the objects of a kind with these labels, in the namespace if the kind has one.

        [] if the server does not have the kind. fields: a field selector. whole: False: only their metadata, since a Secret may
        have 1 MiB.
        """
        return self._list_pages(KINDS[kind], labels or {}, fields, _ANY if whole else _METADATA)[0]

    def resource_names(self, kind: str) -> tuple[str, ...]:
        """List the names of all resources that the server has in the API version of this kind.

        Raises NotFound if the server does not have the kind.
        """
        found = KINDS[kind]
        answer = self._request_object(ApiRequest("get", found.version, found.top))
        names = tuple(str(one.get("name")) for one in answer.get("resources") or [])
        if found.plural not in names:
            raise NotFound(f"the API server has no {found.plural} in {found.version}", "", self.where)
        return names

    def create(self, manifest: Manifest) -> Manifest:
        """Create an object in the namespace, and return it as the server has it.

        If an attempt was lost and the name is taken then, an object of the same job counts as created. Raises AlreadyExists for
        a name that is taken, ConfigError for a wrong field, AuthError without the right, Unreachable without an answer, and
        PreflightError for another refusal.
        """
        lost = False

        def unsure() -> None:
            nonlocal lost
            lost = True  # the attempt before may have created it

        try:
            return self._post(manifest, _STRICT, unsure)
        except AlreadyExists:
            present = self.get(manifest["kind"], str(manifest["metadata"]["name"])) if lost else None
            if present is not None and job_label(present) and job_label(present) == job_label(manifest):
                return present
            raise

    def validate(self, manifest: Manifest) -> None:
        """Have the server check a manifest without creating an object (dry run). Raises ConfigError with each wrong field.

        Ignores other refusals (a right, a quota, a name that is taken) and a missing answer. Only create() raises those.
        """
        with contextlib.suppress(AuthError, NotFound, PreflightError):
            self._post(manifest, {**_STRICT, "dryRun": "All"})

    def delete(self, kind: str, name: str, uid: str = "", grace: int | None = None) -> bool:
        """Start the deletion of an object and of what it owns; return False if it is not there, or has another uid.

        uid: delete only the object with this uid, and not a later one of the same name. grace: seconds between TERM and KILL of
        a pod, None for its own.
        """
        found = KINDS[kind]
        policy = "Foreground" if found.foreground else "Background"
        body: Manifest = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": policy}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            self._request_object(self._request("delete", found, name, body=body))
        except (NotFound, AlreadyExists):  # the latter is a conflict: another one has this name
            return False
        return True

    def watch(self, kind: str, labels: Mapping[str, str] | None = None) -> Iterator[tuple[str, Manifest]]:
        """Yield the changes of a kind's objects without an end: (ADDED, MODIFIED or DELETED, object).

        A broken watch is begun again. First, and if its version has expired, list all objects: ("LISTED", {"items": [...]})
        replaces all earlier ones. Raises the refusal of the server.
        """
        found, selected, version = KINDS[kind], labels or {}, ""
        while True:
            if not version:
                items, version = self._list_pages(found, selected, "")
                yield "LISTED", {"items": items}
            try:
                for event, changed in self._watch_once(found, selected, version):
                    version = str(changed["metadata"].get("resourceVersion", version))
                    if event != "BOOKMARK":
                        yield event, changed
            except Expired:
                version = ""

    def log(self, pod: str, *, tail: int | None = None, limit: int = 0) -> Iterator[bytes]:
        """Yield the log of the job's container of a pod in pieces of bytes.

        tail: how many of its last lines; None: all. limit: of bytes; 0: none. Raises NotFound if the pod is gone, another
        refusal of the server, and Unreachable if the connection breaks or a piece takes longer than 30 s.
        """
        query: dict[str, object] = {"container": CONTAINER}
        if tail is not None:
            query["tailLines"] = tail
        if limit:
            query["limitBytes"] = limit
        path = f"{KINDS['Pod'].path(self.namespace, pod)}/log"
        return self._stream(ApiRequest("get", "pods/log", path, pod, self.namespace, query), _READ)

    def channel(self, pod: str, argv: Sequence[str]) -> PodChannel:
        """Run a program in the pod's container, and return the channel to its stdin, stdout and stderr.

        Raises the refusal of the server, such as NotFound for the pod or AuthError, and Unreachable if the connection fails.
        """
        query = [("container", CONTAINER), *(("command", one) for one in argv)]
        query += [(name, "true") for name in ("stdin", "stdout", "stderr")]
        path = f"{KINDS['Pod'].path(self.namespace, pod)}/exec"
        request = ApiRequest("create", "pods/exec", path, pod, self.namespace)
        known = self.credentials
        url = f"{known.host}{request.path}?{urlencode(query)}".replace("http", "ws", 1)
        headers = {name.lower(): value for name, value in known.headers().items()}
        headers["sec-websocket-protocol"] = _PROTOCOLS
        try:
            return PodChannel(WSClient(known.configuration, url, headers, capture_all=False).sock)
        except (WebSocketException, OSError) as error:
            status, body = getattr(error, "status_code", 0), getattr(error, "resp_body", None) or b""
            if status:
                answer = body if isinstance(body, bytes) else str(body).encode()
                raise self._refusal(int(status), answer, request) from None
            fix = "is the pod running? kubectl describe pod shows it"
            raise Unreachable(f"no channel to the pod {pod}: {error}", fix, known.where) from None

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """Return a context manager in which Ctrl+C does not interrupt requests, for the undoing of what was begun."""
        self._patient += 1
        try:
            yield
        finally:
            self._patient -= 1

    # -- requests

    def _request(self, verb: str, kind: ObjectKind, name: str = "", **more: Any) -> ApiRequest:
        """Build a request about one object of a kind, or about all of them (name "")."""
        path = kind.path(self.namespace, "" if verb == "create" else name)
        return ApiRequest(verb, kind.resource, path, name, self.namespace if kind.namespaced else "", **more)

    def _post(
        self, manifest: Manifest, query: Mapping[str, object], failed: Callable[[], None] = lambda: None
    ) -> Manifest:
        """Send the request that creates an object, and return the answer, the object as the server has it.

        failed: called before an attempt is repeated.
        """
        name = str(manifest["metadata"]["name"])
        request = self._request("create", KINDS[manifest["kind"]], name, query=query, body=manifest)
        return self._request_object(request, failed)

    def _list_pages(
        self, kind: ObjectKind, labels: Mapping[str, str], fields: str, accept: str = _ANY
    ) -> tuple[list[Manifest], str]:
        """List the objects of a kind page by page; return them, and the version of the list. [] and "" without the kind."""
        start, items = "", list[Manifest]()
        while True:
            query = {**_selectors(labels, fields), "limit": _PAGE, **({"continue": start} if start else {})}
            try:
                page = self._request_object(self._request("list", kind, query=query, accept=accept))
            except NotFound:
                return [], ""
            except Expired:  # the list has changed too much between two pages
                items, start = [], ""
                continue
            items += [{**one, "apiVersion": kind.version, "kind": kind.name} for one in page.get("items") or []]
            about = page.get("metadata") or {}
            start = str(about.get("continue") or "")
            if not start:
                return items, str(about.get("resourceVersion") or "")

    def _watch_once(self, kind: ObjectKind, labels: Mapping[str, str], version: str) -> Iterator[tuple[str, Manifest]]:
        """Yield the events of one watch, (type, object), with bookmarks, until it ends or breaks.

        Raises Expired if the version is too old, other refusals of the server, and PreflightError for a line that is no JSON or
        has more than 8 MiB.
        """
        query = {**_selectors(labels, ""), "watch": "true", "allowWatchBookmarks": "true"}
        query.update(resourceVersion=version, timeoutSeconds=_WATCH)
        request, rest = self._request("watch", kind, query=query), b""
        with contextlib.suppress(Unreachable):  # it is begun again from the last version
            for piece in self._stream(request, _WATCH + _READ):
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > _LONGEST_LINE:
                    raise PreflightError("the API server sends a line that does not end", "", self.where)
                for line in filter(None, lines):
                    event = _parse_object(line, self.where)
                    changed = event.get("object") or {}
                    if event.get("type") == "ERROR":
                        raise self._refusal(int(changed.get("code") or 500), json.dumps(changed).encode(), request)
                    yield str(event.get("type")), changed

    def _stream(self, request: ApiRequest, read: float) -> Iterator[bytes]:
        """Send a request, and yield the pieces of the response as they come. read: seconds to wait for a piece.

        Closes the response at the end. Raises the errors of _send_with_retries(), and Unreachable if the response breaks.
        """
        response = self._send_with_retries(request, read)
        try:
            yield from response.stream(_CHUNK, decode_content=True)
        except HTTPError as error:
            raise self._unreachable(error) from None
        finally:
            response.close()
            response.release_conn()

    def _request_object(self, request: ApiRequest, failed: Callable[[], None] = lambda: None) -> Manifest:
        """Send a request, and parse the response as an object. failed: called before an attempt is repeated.

        Raises the refusal of the server, Unreachable without a whole response, and PreflightError for one that has more than 64
        MiB or is no JSON object.
        """
        response = self._send_with_retries(request, _READ, failed)
        try:
            data = response.read(_MOST + 1)
        except HTTPError as error:
            raise self._unreachable(error) from None
        finally:
            response.release_conn()
        if len(data) > _MOST:
            raise PreflightError(f"the answer to {request.text} is larger than {_MOST >> 20} MiB", "", self.where)
        return _parse_object(data, self.where)

    def _send_with_retries(
        self, request: ApiRequest, read: float, failed: Callable[[], None] = lambda: None
    ) -> urllib3.BaseHTTPResponse:
        """Send a request, repeat it after passing errors for up to 30 s, and return the first successful response unread.

        Passing are 429, 500, 502, 503, 504, and no response (_may_return). failed: called before an attempt is repeated. Raises
        another refusal of the server at once, else the last error, and what the caller's check raises.
        """
        began, attempt = time.monotonic(), 0
        while True:
            pause = _PAUSES[min(attempt, len(_PAUSES) - 1)] * random.uniform(0.8, 1.2)
            try:
                response = self._send_once(request, read)
                self._connected = True
                if response.status < 300:
                    return response
                error = self._refusal(response.status, response.read(_CHUNK), request)
                response.release_conn()
                if response.status not in _REPEATED:
                    raise error
                pause = max(pause, min(_retry_after(response.headers), _PATIENCE / 2))
            except HTTPError as broken:
                error = self._unreachable(broken)
                if not self._may_return(broken):
                    raise error from None
            left = began + _PATIENCE - time.monotonic()
            if left < pause:
                raise error
            failed()
            self._wait_for_retry(pause, time.monotonic() - began, error)
            attempt += 1

    def _send_once(self, request: ApiRequest, read: float) -> urllib3.BaseHTTPResponse:
        """Send a request once, with the credentials, and return the response, whatever its status, unread.

        Raises HTTPError if no response comes. In the thread of the constructor, but not within patiently(), the caller's check
        is called meanwhile, and can end the wait.
        """
        known = self.credentials
        url = f"{known.host}{request.path}{'?' if request.query else ''}{urlencode(request.query)}"
        data = json.dumps(request.body).encode() if request.body is not None else None

        def send(_: str) -> urllib3.BaseHTTPResponse | HTTPError:
            headers = {"Accept": request.accept, "User-Agent": "clustertool", **known.headers()}
            if data is not None:
                headers["Content-Type"] = "application/json"
            timeout = urllib3.Timeout(connect=_CONNECT, read=read)
            try:
                response: urllib3.BaseHTTPResponse = known.pool.request(
                    request.method,
                    url,
                    body=data,
                    headers=headers,
                    timeout=timeout,
                    preload_content=False,
                    retries=False,
                )
                return response
            except HTTPError as error:
                return error

        if threading.get_ident() == self._thread and not self._patient:
            found = each([url], send, check=self._check).all()[0]
        else:
            found = send(url)
        if isinstance(found, HTTPError):
            raise found
        return found

    def _refusal(self, status: int, body: bytes, request: ApiRequest) -> ClustertoolError:
        """Build the error for a response that is no success (see refusal), with the user's name as far as it is known."""
        return refusal(status, body, request, self._user or self.credentials.user, self.where)

    def _may_return(self, error: HTTPError) -> bool:
        """Return whether a later attempt can succeed: not after a wrong certificate, or an unknown name at first."""
        if isinstance(error, SSLError) and "CERTIFICATE" in str(error).upper():
            return False
        return self._connected or not isinstance(error, NameResolutionError)

    def _wait_for_retry(self, pause: float, waited: float, error: ClustertoolError) -> None:
        """Wait `pause` seconds, with the caller's check; print once, after 3 s in total, what the wait is for."""
        mine = threading.get_ident() == self._thread
        if mine and waited + pause > _SLOW and not self._noted:
            self._noted = True
            self._note(f"waiting for the API server {self.where}: {error.what}")
        end = time.monotonic() + pause
        while time.monotonic() < end:
            if mine and not self._patient:
                self._check()
            time.sleep(min(0.05, max(0.0, end - time.monotonic())))

    def _unreachable(self, error: HTTPError) -> Unreachable:
        """Build the error for a server that does not answer."""
        text = str(getattr(error, "reason", "") or error)
        why = text.rpartition(": ")[2] if "object at 0x" in text else text
        fix = "is it running, and does a way lead there? kubectl get --raw /version tests it"
        if isinstance(error, SSLError):
            fix = "correct certificate-authority of this cluster in the kubeconfig"
        return Unreachable(f"the API server does not answer: {why[:300]}", fix, self.where)


def _selectors(labels: Mapping[str, str], fields: str) -> dict[str, object]:
    """Build the query parameters labelSelector, of `labels`, and fieldSelector, of `fields`; each is left out if empty."""
    query: dict[str, object] = {}
    if labels:
        query["labelSelector"] = ",".join(f"{name}={value}" for name, value in labels.items())
    if fields:
        query["fieldSelector"] = fields
    return query


def _retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds in the header Retry-After; 0.0 without them."""
    value = headers.get("Retry-After", "")
    return float(value) if value.isdecimal() and len(value) < 6 else 0.0


def _parse_object(data: bytes, where: str) -> Manifest:
    """Parse an answer of the server. Raises PreflightError if it is no JSON object. where: see ClusterApi.where."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(data)
        if isinstance(found, dict):
            return found
    raise PreflightError("the answer is no object in JSON", "is this the address of an API server?", where)


def refusal(status: int, body: bytes, request: ApiRequest, user: str, where: str) -> ClustertoolError:
    """Build the error for a response that is no success, with the user, the request and the server's message.

    401 and 403 are AuthError, a quota PreflightError, 400 and 422 for a manifest ConfigError, 404 NotFound (of a creation
    PreflightError), 409 AlreadyExists, 410 Expired, and others PreflightError. body: a Status object in JSON, or any text of a
    proxy. user: "" if it is not known. where: see ClusterApi.where.
    """
    answer = _parse_status(body)
    message = _one_line(str(answer.get("message", ""))) or _one_line(body.decode(errors="replace"))
    if status == 401:
        fix = "log in again, or correct the user of this context: kubectl config view --minify"
        return AuthError(f"the API server refuses the credentials of {user or 'this context'}", fix, where)
    if status == 403 and "exceeded quota" in message:
        return PreflightError(message, "ask for less in KUBERNETES, or wait until other jobs have ended", where)
    if status == 403:
        # A refusal that does not name the user comes from an admission controller: PodSecurity, LimitRange, a webhook.
        fix = _RIGHTS if "User" in message or not message else f"correct KUBERNETES in conf.py, or {_RIGHTS}"
        what = f"{user or 'this user'} may not {request.text}" + (f": {message}" if message else "")
        return AuthError(what, fix, where)
    if request.has_manifest and status in (400, 422) and _NO_DRY_RUN not in message:
        fix = "correct KUBERNETES in conf.py, [kubernetes] in job.toml, or pod_template"
        return ConfigError(f"the manifest is not right: {_wrong_fields(answer) or message}", fix, where)
    what = f"cannot {request.text}: {message or 'not found'}"
    if status == 404 and request.verb == "create":
        return PreflightError(what, "is the namespace there, and is the resource definition installed?", where)
    if status == 404:
        return NotFound(what, "", where)
    if status == 409:
        return AlreadyExists(f"cannot {request.text}: {message}", "choose another --job-id, or stop that job", where)
    if status == _EXPIRED:
        return Expired(f"cannot {request.text}: {message}", "try again", where)
    fix = "try again later" if status in _REPEATED else "is this the address of an API server?"
    return PreflightError(f"cannot {request.text}: HTTP {status}: {message}", fix, where)


def _parse_status(body: bytes) -> Mapping[str, object]:
    """Parse a Status object; {} for any other text."""
    with contextlib.suppress(PreflightError):
        return _parse_object(body, "")
    return {}


def _wrong_fields(answer: Mapping[str, object]) -> str:
    """Build the text about the wrong fields of a manifest from the causes or the message of the server's answer.

    "" without any.
    """
    listed = [one for one in items(fields(answer, "details"), "causes") if text(one, "field")]
    if listed:
        return _one_line("; ".join(f"{text(one, 'field')}: {text(one, 'message')}" for one in listed))
    form = _FORM.search(str(answer.get("message", "")))
    return _one_line(form[1]) if form else ""


def _one_line(text: str) -> str:
    """Return the text as one line of at most 600 characters."""
    clean = "".join(char if char.isprintable() else " " for char in text[: 4 * _LONGEST])
    return " ".join(clean.split())[:_LONGEST]
