"""A client of etcd's JSON gateway (/v3/ of etcd 3.4 and later), with the standard library only.

A call tries each server once, beginning with the one that answered last. It ends in time, also if a server sends one byte a
second. What a server sends is untrusted.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import time
from base64 import b64decode, b64encode
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple
from urllib.parse import urlsplit

from clustertool.node.system.process_clock import boottime

_PORT = 2379
_MAX_BODY = 1 << 20
_LONGEST = 200  # characters of a server's text in a message
_BROKEN = (http.client.HTTPException, OSError, ValueError)
# Codes of gRPC with which another server would answer alike: invalid argument, not found, denied, failed precondition.
_FINAL = (3, 5, 7, 9)
_UNAUTHENTICATED = 16
# Texts for requests whose token is missing or too old; the codes of some are those of other errors.
_TOKEN_TEXTS = ("invalid auth token", "user name is empty", "revision of auth store is old")
_NO_AUTHENTICATION = "authentication is not enabled"
_NO_LEASE = "requested lease not found"

Json = Dict[str, object]


class EtcdError(Exception):
    """The error of a request to etcd, whose text states the server and what happened.

    `final`: the server has refused the request itself, so no other server is tried.
    """

    def __init__(self, text: str, final: bool = False) -> None:
        super().__init__(text)
        self.final = final


class EtcdAccess(NamedTuple):
    """The way to the servers of etcd. urls: https://host:port, http://host:port or etcd://host:port.

    user: "" for none. ca: certificates in PEM that sign those of the servers; "" for the system's.
    """

    urls: Tuple[str, ...]
    user: str = ""
    password: str = ""
    ca: str = ""


class KeyValue(NamedTuple):
    """A key's value, and the revisions at which it was created and written."""

    value: bytes
    created: int
    written: int


class Put(NamedTuple):
    """A key to write, with its value and its lease, 0 for none."""

    key: str
    value: bytes
    lease: int = 0


class Unchanged(NamedTuple):
    """A condition of a change: the key was written at this revision last, or created at it. 0: there is no such key."""

    key: str
    revision: int
    created: bool = False


class _Server(NamedTuple):
    """The URL of a server, and its parts."""

    url: str
    host: str
    port: int
    tls: bool


class EtcdClient:
    """A connection to one of several servers of etcd. The constructor raises EtcdError for a wrong URL or CA.

    `patience`: seconds for a TCP connection, and for the rest of a request. sent_at: when the request was sent whose answer
    came last, by CLOCK_BOOTTIME. cluster: the id of the servers' cluster, once it is known.
    """

    def __init__(self, access: EtcdAccess, patience: Tuple[float, float]) -> None:
        self.sent_at = 0.0
        self._access, self._patience = access, patience
        self._servers = [_parse_url(url) for url in access.urls]
        if not self._servers:
            raise EtcdError("no URL of etcd is given")
        self._tls = _create_context(access.ca) if any(server.tls for server in self._servers) else None
        self._token: Optional[str] = None if access.user else ""
        self._connection: Optional[http.client.HTTPConnection] = None
        self.cluster = ""

    def read(self, *keys: str) -> List[Optional[KeyValue]]:
        """Read the keys at one moment, by a linearizable read; return the KeyValue of each, None for a key that is not there.

        Raises EtcdError if no server answers.
        """
        ranges = [{"request_range": {"key": _text64(key)}} for key in keys]
        answer = self._call("kv/txn", {"success": ranges})
        return [_read_pair(one, "response_range") for one in _read_objects(answer, "responses", len(keys))]

    def change(self, unchanged: Sequence[Unchanged], puts: Sequence[Put]) -> bool:
        """Write keys at one moment if all conditions are met. False: one of them is not.

        Raises EtcdError if no server answers.
        """
        done = [{"request_put": {"key": _text64(p.key), "value": _bytes64(p.value), "lease": p.lease}} for p in puts]
        answer = self._call("kv/txn", {"compare": [_build_condition(one) for one in unchanged], "success": done})
        succeeded = answer.get("succeeded", False)
        if type(succeeded) is not bool:
            raise EtcdError(f"{self._servers[0].url}: an answer that is not valid", True)
        return succeeded

    def grant(self, seconds: int) -> int:
        """Create a lease for `seconds`, and return its id. etcd may keep it for longer, never for less."""
        answer = self._call("lease/grant", {"TTL": seconds})
        number = _read_number(answer, "ID")
        if number <= 0 or _read_number(answer, "TTL") < seconds:
            raise EtcdError(f"{self._servers[0].url}: a lease that is shorter than requested", True)
        return number

    def renew(self, lease: int) -> bool:
        """Renew a lease. False: it has ended."""
        result = self._call("lease/keepalive", {"ID": lease}).get("result")
        return isinstance(result, dict) and _read_number(result, "TTL") > 0

    def revoke(self, lease: int) -> None:
        """End a lease now; its keys are removed. One that has ended before is no error."""
        try:
            self._call("lease/revoke", {"ID": lease})
        except EtcdError as error:
            if _NO_LEASE not in str(error):
                raise

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._connection:
            self._connection.close()
        self._connection = None

    def _call(self, path: str, message: Mapping[str, object]) -> Json:
        """Send a request to the servers in turn, and return the first answer.

        Raises EtcdError with the problems of all, or a final one.
        """
        problems = []
        for _ in self._servers:
            try:
                return self._call_authorized(path, message)
            except EtcdError as error:
                if error.final:
                    raise
                problems.append(str(error))
            self.close()
            self._servers = [*self._servers[1:], self._servers[0]]
        raise EtcdError("; ".join(problems))

    def _call_authorized(self, path: str, message: Mapping[str, object]) -> Json:
        """Send a request to the first server, with a token, and return its answer.

        If the server refuses an older token, repeat that once with a new one. Without a token, one is requested before.
        """
        known = self._token is not None
        try:
            self._authenticate()
            return self._exchange(path, message)
        except _TokenError:
            if not known or not self._access.user:
                raise
        self._token = None
        self._authenticate()
        return self._exchange(path, message)

    def _authenticate(self) -> None:
        """Get a token from the first server, if there is none: "" if etcd has no authentication. Raises EtcdError."""
        if self._token is not None:
            return
        try:
            names = {"name": self._access.user, "password": self._access.password}
            token = self._exchange("auth/authenticate", names).get("token")
        except EtcdError as error:
            if _NO_AUTHENTICATION not in str(error):
                raise
            token = ""
        if not isinstance(token, str) or not token.isascii() or not (token == "" or token.isprintable()):
            raise EtcdError(f"{self._servers[0].url}: a token that is not valid", True)
        self._token = token

    def _exchange(self, path: str, message: Mapping[str, object]) -> Json:
        """Send a request to the first server, and return its answer; connect once more if an open connection was closed.

        Raises EtcdError for a failed connection, an answer that is an error, and a server of another cluster.
        """
        server, body = self._servers[0], json.dumps(message).encode()
        kept = self._connection is not None
        end = time.monotonic() + self._patience[1]
        try:
            try:
                status, data, sent_at = self._request(server, path, body, end)
            except (http.client.RemoteDisconnected, ConnectionError):
                if not kept:
                    raise
                self.close()
                status, data, sent_at = self._request(server, path, body, end)
            answer = _parse_answer(data, status)
        except ssl.SSLCertVerificationError as error:
            text = f"{server.url}: its certificate is not accepted: {error.verify_message}"
            raise self._close_with_error(text) from None
        except _BROKEN as error:
            raise self._close_with_error(f"{server.url}: {_describe_failure(error)}") from None
        _require_success(server.url, answer, status)
        self._require_cluster(server.url, answer)
        self.sent_at = sent_at
        return answer

    def _close_with_error(self, text: str) -> EtcdError:
        """Close the connection, and create the error with this text."""
        self.close()
        return EtcdError(text)

    def _require_cluster(self, url: str, answer: Json) -> None:
        """Raise EtcdError if the answer is from another cluster than the answers before: each numbers epochs on its own."""
        result = answer.get("result")
        header = (result if isinstance(result, dict) else answer).get("header")
        cluster = str(header.get("cluster_id", "")) if isinstance(header, dict) else ""
        if cluster and self.cluster and cluster != self.cluster:
            raise self._close_with_error(f"{url}: this server belongs to another cluster of etcd")
        self.cluster = self.cluster or cluster

    def _request(self, server: _Server, path: str, body: bytes, end: float) -> Tuple[int, bytes, float]:
        """Send a request, and return status, body, and when it was sent. end: by when it must be over, by time.monotonic()."""
        if self._connection is None:
            self._connection = http.client.HTTPConnection(server.host, server.port)
            self._connection.sock = self._connect(server, end)
        self._connection.sock.end = end  # type: ignore[union-attr]
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = self._token
        sent_at = boottime()
        self._connection.request("POST", f"/v3/{path}", body, headers)
        response = self._connection.getresponse()
        data = response.read(_MAX_BODY + 1)
        if len(data) > _MAX_BODY:
            raise ValueError(f"an answer of more than {_MAX_BODY} bytes")
        if response.will_close:
            self.close()
        return response.status, data, sent_at

    def _connect(self, server: _Server, end: float) -> _TimedSocket:
        """Connect to the server, with TLS for https, until `end` at the latest, by time.monotonic()."""
        with contextlib.ExitStack() as stack:
            raw = socket.create_connection((server.host, server.port), self._patience[0])
            link = _TimedSocket(fileno=raw.detach())
            stack.callback(link.close)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if server.tls and self._tls:
                link.settimeout(max(0.01, end - time.monotonic()))
                link = self._tls.wrap_socket(link, server_hostname=server.host)  # type: ignore[assignment]
            stack.pop_all()
        return link


class _TokenError(EtcdError):
    """The error for a token of a request that is missing or not valid any more."""


class _TimedSocket(socket.socket):
    """A socket whose calls end at `end`, by time.monotonic(): http.client has a limit for each call only."""

    end = 0.0

    def recv_into(self, *args: Any) -> int:
        """Receive as socket.recv_into(), until `end` at the latest."""
        self._set_timeout()
        return super().recv_into(*args)

    def sendall(self, *args: Any) -> None:
        """Send as socket.sendall(), until `end` at the latest."""
        self._set_timeout()
        super().sendall(*args)

    def _set_timeout(self) -> None:
        """Set the timeout to the time until `end`. Raises socket.timeout if none is left."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise socket.timeout("timed out")
        self.settimeout(left)


class _TimedTls(_TimedSocket, ssl.SSLSocket):
    """A _TimedSocket with TLS."""


def _parse_url(url: str) -> _Server:
    """Parse the URL of a server. Raises EtcdError for another text."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or _PORT
    except ValueError:
        host, port = None, 0
    if not host or parts.scheme not in ("https", "http", "etcd") or parts.username or parts.path.strip("/"):
        raise EtcdError(f"{url!r} is no URL of etcd: write https://HOST:{_PORT}", True)
    return _Server(url, host, port, parts.scheme == "https")


def _create_context(ca: str) -> ssl.SSLContext:
    """Create the TLS context. With a CA, only certificates that it has signed are accepted. Raises EtcdError for a wrong CA."""
    try:
        made = ssl.create_default_context(cadata=ca or None)
    except (ssl.SSLError, ValueError):
        raise EtcdError("the CA of etcd is no certificate in PEM form", True) from None
    made.minimum_version, made.sslsocket_class = ssl.TLSVersion.TLSv1_2, _TimedTls
    return made


def _parse_answer(data: bytes, status: int) -> Json:
    """Parse the JSON object of an answer. Raises ValueError if it is none. status: of HTTP."""
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(data)
        if isinstance(answer, dict):
            return answer
    if status == 404:
        raise ValueError("no JSON gateway is there (HTTP 404): start etcd 3.4 or later with --enable-grpc-gateway")
    raise ValueError(f"an answer that is not etcd's (HTTP {status})")


def _require_success(url: str, answer: Json, status: int) -> None:
    """Raise EtcdError for an answer that is an error, _TokenError if a new token may help. status: of HTTP.

    Errors of a stream are one object deeper.
    """
    inner = answer.get("error")
    error = inner if isinstance(inner, dict) else answer
    if status == 200 and inner is None:
        return
    text = str(error.get("message") or error.get("error") or f"HTTP {status}")
    code = error.get("code", error.get("grpc_code"))
    clean = "".join(char if char.isprintable() else "?" for char in text[:_LONGEST])
    if code == _UNAUTHENTICATED or any(part in clean for part in _TOKEN_TEXTS):
        raise _TokenError(f"{url}: {clean}", True)
    raise EtcdError(f"{url}: {clean}", code in _FINAL)


def _describe_failure(error: BaseException) -> str:
    """Describe an error of a connection in at most 200 printable characters."""
    if isinstance(error, socket.timeout):
        return "no answer in time"
    if isinstance(error, http.client.RemoteDisconnected):
        return "the server closed the connection"
    text = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
    return "".join(char if char.isprintable() else "?" for char in text[:_LONGEST])


def _build_condition(one: Unchanged) -> Json:
    """Build the JSON of a condition."""
    target, field = ("CREATE", "create_revision") if one.created else ("MOD", "mod_revision")
    return {"key": _text64(one.key), "target": target, "result": "EQUAL", field: one.revision}


def _read_pair(response: Mapping[str, object], kind: str) -> Optional[KeyValue]:
    """Return the first key and value in a response of this kind, None if it has none. Raises EtcdError if it is not valid."""
    found = response.get(kind)
    pairs = _read_objects(found, "kvs") if isinstance(found, dict) else []
    if not pairs:
        return None
    pair = pairs[0]
    value: Any = pair.get("value", "")
    try:
        data = b64decode(value, validate=True)
    except (TypeError, ValueError):
        raise EtcdError("an answer of etcd with a value that is not valid", True) from None
    return KeyValue(data, *(_read_number(pair, name) for name in ("create_revision", "mod_revision")))


def _read_objects(answer: Mapping[str, object], name: str, count: int = -1) -> List[Json]:
    """Return the list of objects in a field, [] without the field.

    Raises EtcdError for another value. count: how many there must be, -1: any.
    """
    found = answer.get(name, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found) or count not in (-1, len(found)):
        raise EtcdError(f"an answer of etcd whose {name} are not valid", True)
    return found


def _read_number(answer: Mapping[str, object], name: str) -> int:
    """Return a number of 64 bits, which the gateway writes as a text; 0 if the field is missing.

    Raises EtcdError for another value.
    """
    value = answer.get(name, 0)
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
        return int(value)
    if type(value) is int and 0 <= value < 1 << 63:
        return value
    raise EtcdError(f"an answer of etcd whose {name} is no number", True)


def _text64(text: str) -> str:
    """Encode a text in base64."""
    return _bytes64(text.encode())


def _bytes64(data: bytes) -> str:
    """Encode bytes in base64."""
    return b64encode(data).decode()
