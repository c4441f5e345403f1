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
from dataclasses import dataclass, replace
from typing import Protocol
from urllib.parse import urlencode

from clustertool.engines.kubernetes.kube_credentials import KubeCredentials
from clustertool.engines.kubernetes.pod_channel import PodChannel
from clustertool.errors import AuthError, ClustertoolError, ConfigError, NotFound, PreflightError, Unreachable
from clustertool.model.kubernetes.api_objects import KINDS, Manifest, ObjectKind, fields, items, text
from clustertool.model.kubernetes.object_names import JOB_LABEL
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
REPEATED = (429, 500, 502, 503, 504)  # a later attempt may succeed
GONE = 410  # the version of a list is too old: list again
_LONGEST = 600  # characters of a message that are shown
_NO_DRY_RUN = "does not support dry run"  # an admission webhook: it checks objects that are created only
_FORM = re.compile(r"(?:strict decoding error: |cannot be handled as an? \w+: )+(.*)", re.DOTALL)
_RIGHTS = "an administrator grants it: docs/kubernetes.md has the Role"


class ApiPlace(Protocol):
    """Of the settings: the context of the kubeconfig and the namespace, "" for the current ones."""

    @property
    def context(self) -> str: ...

    @property
    def namespace(self) -> str: ...


class ClusterApi:
    """Nothing is read or connected before the first use. May be used by several threads."""

    def __init__(
        self,
        place: ApiPlace,
        note: Callable[[str], None] = lambda text: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare a client of the API server, without a request.

        note: gets a message while a server that is away is waited for. check: raises what ends the command; both are called in
        the
        thread of this constructor only.
        """
        self._place, self._note, self._check = place, note, check
        self._thread, self._lock = threading.get_ident(), threading.Lock()
        self._known: KubeCredentials | None = None
        self._user = ""
        self._connected = self._noted = False
        self._patient = 0

    # -- the namespace and the user

    @property
    def credentials(self) -> KubeCredentials:
        """Raises ConfigError, AuthError."""
        with self._lock:
            if self._known is None:
                self._known = KubeCredentials(self._place.context)
            return self._known

    @property
    def namespace(self) -> str:
        return self._place.namespace or self.credentials.namespace or "default"

    @property
    def where(self) -> str:
        return self.credentials.where

    def user(self) -> str:
        """Ask for the user's name as the server knows it; that of the kubeconfig where the server has no answer."""
        if not self._user:
            review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
            asked = self._asked("create", "selfsubjectreviews.authentication.k8s.io", "", "")
            found: object = ""
            try:
                answer = self._json("POST", _WHOAMI, asked, body=review)
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
        """Check whether this user may do that in the namespace. Raises ClustertoolError if the server cannot be asked."""
        wanted = {"namespace": self.namespace, "verb": verb, "group": group, "resource": resource}
        if subresource:
            wanted["subresource"] = subresource
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": wanted},
        }
        asked = self._asked("create", "selfsubjectaccessreviews.authorization.k8s.io", "", "")
        answer = self._json("POST", _REVIEWS, asked, body=body)
        return bool((answer.get("status") or {}).get("allowed"))

    # -- objects

    def get(self, kind: str, name: str) -> Manifest | None:
        """Read an object, None if there is none."""
        found = KINDS[kind]
        with contextlib.suppress(NotFound):
            return self._json("GET", found.path(self.namespace, name), self._asked_of("get", found, name))
        return None

    def listed(
        self, kind: str, labels: Mapping[str, str] | None = None, fields: str = "", whole: bool = True
    ) -> list[Manifest]:
        """List the objects with these labels, in the namespace if the kind has one.

        [] where the server does not know the kind. fields: a field selector. whole: else their metadata are enough: a Secret
        may
        have 1 MiB.
        """
        return self._listed(KINDS[kind], labels or {}, fields, _ANY if whole else _METADATA)[0]

    def versions(self, kind: str) -> tuple[str, ...]:
        """List the resources that the server has in the version of this kind.

        Raises NotFound where it does not have the kind.
        """
        found = KINDS[kind]
        asked = self._asked("get", found.version, "", "")
        top = f"/apis/{found.version}" if found.group else f"/api/{found.version}"
        names = tuple(str(one.get("name")) for one in self._json("GET", top, asked).get("resources") or [])
        if found.plural not in names:
            raise NotFound(f"the API server has no {found.plural} in {found.version}", "", self.where)
        return names

    def create(self, manifest: Manifest) -> Manifest:
        """Create an object in the namespace.

        Raises AlreadyExists for a name that is taken, ConfigError for a wrong field, PreflightError, AuthError.
        """
        kind, name, lost = KINDS[manifest["kind"]], str(manifest["metadata"]["name"]), False

        def unsure(error: ClustertoolError) -> None:
            nonlocal lost
            lost = True  # the attempt before may have created it

        try:
            return self._post(kind, manifest, _STRICT, unsure)
        except AlreadyExists:
            present = self.get(kind.name, name) if lost else None
            if present is not None and _job_of(present) and _job_of(present) == _job_of(manifest):
                return present
            raise

    def validate(self, manifest: Manifest) -> None:
        """Let the API server check a manifest, without an object. Raises ConfigError with each wrong field.

        Only create() shows what else the server refuses: a right, a quota, a name that is taken.
        """
        with contextlib.suppress(AuthError, NotFound, PreflightError):
            self._post(KINDS[manifest["kind"]], manifest, {**_STRICT, "dryRun": "All"})

    def delete(self, kind: str, name: str, uid: str = "", grace: int | None = None) -> bool:
        """Begin to delete an object and what it owns; False if it is not there.

        uid: only that one, and not a later one of the same name. grace: seconds between TERM and KILL of a pod, None for its
        own.
        """
        found = KINDS[kind]
        body: Manifest = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground" if found.foreground else "Background",
        }
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            path, asked = found.path(self.namespace, name), self._asked_of("delete", found, name)
            self._json("DELETE", path, asked, body=body)
        except NotFound:
            return False
        except AlreadyExists:  # a conflict: another one has this name
            return False
        return True

    def watch(
        self, kind: str, labels: Mapping[str, str] | None = None, version: str = ""
    ) -> Iterator[tuple[str, Manifest]]:
        """Yield changes without an end: (ADDED, MODIFIED or DELETED, object).

        Without a version, and where it has expired, all objects are listed: ("LISTED", {"items": [...]}), which replaces
        what was known. A watch that breaks is begun again.
        """
        found, selected = KINDS[kind], labels or {}
        while True:
            if not version:
                items, version = self._listed(found, selected, "")
                yield "LISTED", {"items": items}
            try:
                for event, changed in self._watched(found, selected, version):
                    version = str(changed["metadata"].get("resourceVersion", version))
                    if event != "BOOKMARK":
                        yield event, changed
            except Expired:
                version = ""

    def log(
        self,
        pod: str,
        *,
        tail: int | None = None,
        since: str = "",
        follow: bool = False,
        timestamps: bool = False,
        limit: int = 0,
    ) -> Iterator[bytes]:
        """Yield the log of a pod's container in pieces. since: RFC 3339. limit: in bytes. Raises Unreachable if it breaks."""
        query: dict[str, object] = {"container": CONTAINER}
        given = {"tailLines": tail, "sinceTime": since, "limitBytes": limit}
        query.update({name: value for name, value in given.items() if value not in (None, "", 0) or value == tail == 0})
        query.update({name: "true" for name, value in (("follow", follow), ("timestamps", timestamps)) if value})
        path = f"{KINDS['Pod'].path(self.namespace, pod)}/log"
        asked = self._asked("get", "pods/log", pod, self.namespace)
        return self._pieces("GET", path, asked, query, None if follow else _READ)

    def channel(self, pod: str, argv: Sequence[str]) -> PodChannel:
        """Run a program in the pod's container, with stdin, stdout and stderr.

        Raises AuthError, NotFound, Unreachable with the reason of the server.
        """
        query = [("container", CONTAINER), *(("command", one) for one in argv)]
        query += [(name, "true") for name in ("stdin", "stdout", "stderr")]
        path = f"{KINDS['Pod'].path(self.namespace, pod)}/exec"
        asked = self._asked("create", "pods/exec", pod, self.namespace)
        known = self.credentials
        url = f"{known.host}{path}?{urlencode(query)}".replace("http", "ws", 1)
        headers = {name.lower(): value for name, value in known.headers().items()}
        headers["sec-websocket-protocol"] = _PROTOCOLS
        try:
            return PodChannel(WSClient(known.configuration, url, headers, capture_all=False).sock)
        except (WebSocketException, OSError) as error:
            status, body = getattr(error, "status_code", 0), getattr(error, "resp_body", None) or b""
            if status:
                raise refusal(int(status), body if isinstance(body, bytes) else str(body).encode(), asked) from None
            fix = "is the pod running? kubectl describe pod shows it"
            raise Unreachable(f"no channel to the pod {asked.name}: {error}", fix, asked.where) from None

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """Keep Ctrl+C from ending what is asked in this context: it undoes something."""
        self._patient += 1
        try:
            yield
        finally:
            self._patient -= 1

    # -- requests

    def _post(
        self,
        kind: ObjectKind,
        manifest: Manifest,
        query: Mapping[str, object],
        failed: Callable[[ClustertoolError], None] = lambda error: None,
    ) -> Manifest:
        asked = replace(self._asked_of("create", kind, str(manifest["metadata"]["name"])), manifest=True)
        return self._json("POST", kind.path(self.namespace), asked, query, manifest, failed)

    def _listed(
        self, kind: ObjectKind, labels: Mapping[str, str], fields: str, accept: str = _ANY
    ) -> tuple[list[Manifest], str]:
        """List the objects page by page, with the version of the list."""
        asked, start = self._asked_of("list", kind), ""
        items: list[Manifest] = []
        while True:
            query = {**_selectors(labels, fields), "limit": _PAGE, **({"continue": start} if start else {})}
            try:
                page = self._json("GET", kind.path(self.namespace), asked, query, accept=accept)
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

    def _watched(self, kind: ObjectKind, labels: Mapping[str, str], version: str) -> Iterator[tuple[str, Manifest]]:
        """Yield the changes of one watch, to its end. Raises Expired."""
        query = {**_selectors(labels, ""), "watch": "true", "allowWatchBookmarks": "true"}
        query.update(resourceVersion=version, timeoutSeconds=_WATCH)
        asked, rest = self._asked_of("watch", kind), b""
        pieces = self._pieces("GET", kind.path(self.namespace), asked, query, _WATCH + _READ)
        with contextlib.suppress(Unreachable):  # it is begun again from the last version
            for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > _LONGEST_LINE:
                    raise PreflightError("the API server sends a line that does not end", "", self.where)
                for line in filter(None, lines):
                    event = _object(line, self.where)
                    changed = event.get("object") or {}
                    if event.get("type") == "ERROR":
                        status = int(changed.get("code") or 500)
                        raise refusal(status, json.dumps(changed).encode(), asked)
                    yield str(event.get("type")), changed

    def _pieces(
        self, method: str, path: str, asked: Asked, query: Mapping[str, object], read: float | None
    ) -> Iterator[bytes]:
        """Yield a response as it comes."""
        response = self._response(method, path, asked, query, None, read)
        try:
            yield from response.stream(_CHUNK, decode_content=True)
        except HTTPError as error:
            raise self._away(error) from None
        finally:
            response.close()
            response.release_conn()

    def _json(
        self,
        method: str,
        path: str,
        asked: Asked,
        query: Mapping[str, object] | None = None,
        body: Manifest | None = None,
        failed: Callable[[ClustertoolError], None] = lambda error: None,
        accept: str = _ANY,
    ) -> Manifest:
        response = self._response(method, path, asked, query, body, _READ, failed, accept)
        try:
            data = response.read(_MOST + 1)
        except HTTPError as error:
            raise self._away(error) from None
        finally:
            response.release_conn()
        if len(data) > _MOST:
            raise PreflightError(f"the answer to {asked.text} is larger than {_MOST >> 20} MiB", "", self.where)
        return _object(data, self.where)

    def _response(
        self,
        method: str,
        path: str,
        asked: Asked,
        query: Mapping[str, object] | None,
        body: Manifest | None,
        read: float | None,
        failed: Callable[[ClustertoolError], None] = lambda error: None,
        accept: str = _ANY,
    ) -> urllib3.BaseHTTPResponse:
        """Send a request until a response is a success, and return it unread.

        failed: gets the errors of attempts that are repeated.
        """
        began, attempt = time.monotonic(), 0
        data = json.dumps(body).encode() if body is not None else None
        while True:
            pause = _PAUSES[min(attempt, len(_PAUSES) - 1)] * random.uniform(0.8, 1.2)
            try:
                response = self._attempt(method, path, query, data, read, accept)
                self._connected = True
                if response.status < 300:
                    return response
                error = refusal(response.status, response.read(_CHUNK), asked)
                response.release_conn()
                if response.status not in REPEATED:
                    raise error
                pause = max(pause, min(_retry_after(response.headers), _PATIENCE / 2))
            except HTTPError as broken:
                error = self._away(broken)
                if not self._may_return(broken):
                    raise error from None
            left = began + _PATIENCE - time.monotonic()
            if left < pause:
                raise error
            failed(error)
            self._wait(pause, time.monotonic() - began, error)
            attempt += 1

    def _attempt(
        self,
        method: str,
        path: str,
        query: Mapping[str, object] | None,
        data: bytes | None,
        read: float | None,
        accept: str,
    ) -> urllib3.BaseHTTPResponse:
        known = self.credentials
        url = f"{known.host}{path}{'?' if query else ''}{urlencode(query or {})}"

        def send(_: str) -> urllib3.BaseHTTPResponse | HTTPError:
            headers = {"Accept": accept, "User-Agent": "clustertool", **known.headers()}
            if data is not None:
                headers["Content-Type"] = "application/json"
            timeout = urllib3.Timeout(connect=_CONNECT, read=read)
            try:
                response: urllib3.BaseHTTPResponse = known.pool.request(
                    method, url, body=data, headers=headers, timeout=timeout, preload_content=False, retries=False
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

    def _may_return(self, error: HTTPError) -> bool:
        """Check whether a later attempt may reach the server."""
        if isinstance(error, SSLError) and "CERTIFICATE" in str(error).upper():
            return False
        return self._connected or not isinstance(error, NameResolutionError)

    def _wait(self, pause: float, waited: float, error: ClustertoolError) -> None:
        mine = threading.get_ident() == self._thread
        if mine and waited + pause > _SLOW and not self._noted:
            self._noted = True
            self._note(f"waiting for the API server {self.where}: {error.what}")
        end = time.monotonic() + pause
        while time.monotonic() < end:
            if mine and not self._patient:
                self._check()
            time.sleep(min(0.05, max(0.0, end - time.monotonic())))

    def _away(self, error: HTTPError) -> Unreachable:
        text = str(getattr(error, "reason", "") or error)
        why = text.rpartition(": ")[2] if "object at 0x" in text else text
        fix = "is it running, and does a way lead there? kubectl get --raw /version tests it"
        if isinstance(error, SSLError):
            fix = "correct certificate-authority of this cluster in the kubeconfig"
        return Unreachable(f"the API server does not answer: {why[:300]}", fix, self.where)

    def _asked_of(self, verb: str, kind: ObjectKind, name: str = "") -> Asked:
        return self._asked(verb, kind.resource, name, self.namespace if kind.namespaced else "")

    def _asked(self, verb: str, resource: str, name: str, namespace: str) -> Asked:
        known = self.credentials
        return Asked(verb, resource, name, namespace, self._user or known.user, known.where)


def _selectors(labels: Mapping[str, str], fields: str) -> dict[str, object]:
    query: dict[str, object] = {}
    if labels:
        query["labelSelector"] = ",".join(f"{name}={value}" for name, value in labels.items())
    if fields:
        query["fieldSelector"] = fields
    return query


def _job_of(manifest: Manifest) -> object:
    """Read the hash of the job, which each object has as a label."""
    return (manifest["metadata"].get("labels") or {}).get(JOB_LABEL)


def _retry_after(headers: Mapping[str, str]) -> float:
    value = headers.get("Retry-After", "")
    return float(value) if value.isdecimal() and len(value) < 6 else 0.0


def _object(data: bytes, where: str) -> Manifest:
    """Parse an answer. Raises PreflightError for what is no JSON object."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PreflightError("the answer is no object in JSON", "is this the address of an API server?", where)
    return found


class AlreadyExists(PreflightError):
    """An object of this name is there."""


class Expired(PreflightError):
    """The version from which a watch was to begin is too old."""


@dataclass(frozen=True)
class Asked:
    """A request, for messages. resource: as in rights. user: as far as it is known. manifest: the request has one."""

    verb: str
    resource: str
    name: str
    namespace: str
    user: str
    where: str
    manifest: bool = False

    @property
    def text(self) -> str:
        inside = f" in the namespace {self.namespace}" if self.namespace else ""
        return f"{self.verb} {self.resource}{f' {self.name}' if self.name else ''}{inside}"


def refusal(status: int, body: bytes, asked: Asked) -> ClustertoolError:
    """Convert a response that is no success to an error. body: a Status object in JSON, or any text of a proxy."""
    answer = _status(body)
    message = _shown(str(answer.get("message", ""))) or _shown(body.decode(errors="replace"))
    where = asked.where
    if status == 401:
        fix = "log in again, or correct the user of this context: kubectl config view --minify"
        return AuthError(f"the API server refuses the credentials of {asked.user or 'this context'}", fix, where)
    if status == 403 and "exceeded quota" in message:
        return PreflightError(message, "ask for less in KUBERNETES, or wait until other jobs have ended", where)
    if status == 403:
        # A refusal that does not name the user comes from an admission controller: PodSecurity, LimitRange, a webhook.
        fix = _RIGHTS if "User" in message or not message else f"correct KUBERNETES in conf.py, or {_RIGHTS}"
        what = f"{asked.user or 'this user'} may not {asked.text}" + (f": {message}" if message else "")
        return AuthError(what, fix, where)
    if status == 404 and asked.verb == "create":
        what = f"cannot {asked.text}: {message or 'not found'}"
        return PreflightError(what, "is the namespace there, and is the resource definition installed?", where)
    if status == 404:
        return NotFound(f"cannot {asked.text}: {message or 'not found'}", "", where)
    if status == 409:
        return AlreadyExists(f"cannot {asked.text}: {message}", "choose another --job-id, or stop that job", where)
    if status == GONE:
        return Expired(f"cannot {asked.text}: {message}", "try again", where)
    if asked.manifest and status in (400, 422) and _NO_DRY_RUN not in message:
        fix = "correct KUBERNETES in conf.py, [kubernetes] in job.toml, or pod_template"
        return ConfigError(f"the manifest is not right: {_wrong_fields(answer) or message}", fix, where)
    fix = "try again later" if status in REPEATED else "is this the address of an API server?"
    return PreflightError(f"cannot {asked.text}: HTTP {status}: {message}", fix, where)


def _status(body: bytes) -> Mapping[str, object]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _wrong_fields(answer: Mapping[str, object]) -> str:
    """Name the wrong fields of a manifest, with the reasons of the server, which lists them or has them in its message."""
    listed = [one for one in items(fields(answer, "details"), "causes") if text(one, "field")]
    if listed:
        return _shown("; ".join(f"{text(one, 'field')}: {text(one, 'message')}" for one in listed))
    form = _FORM.search(str(answer.get("message", "")))
    return _shown(form[1]) if form else ""


def _shown(text: str) -> str:
    clean = "".join(char if char.isprintable() else " " for char in text[: 4 * _LONGEST])
    return " ".join(clean.split())[:_LONGEST]
