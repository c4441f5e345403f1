"""Requests to an API server, with the official client, against a small HTTP server with prepared responses."""

import base64
import hashlib
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import namedtuple
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from websocket import WebSocket

from clustertool.engines.kubernetes.cluster_api import AlreadyExists, ClusterApi
from clustertool.engines.kubernetes.pod_channel import PodChannel, exit_code
from clustertool.errors import AuthError, ConfigError, NotFound, PreflightError, Unreachable
from tests.kubernetes.kubeconfigs import kubeconfig

Place = namedtuple("Place", "context namespace", defaults=("", ""))
POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "labels": {"clustertool/job": "j1"}}}


def status(code, message="", reason=""):
    return code, {"kind": "Status", "status": "Failure", "code": code, "message": message, "reason": reason}


class Answers:
    """The server. answers: for each request in turn (status, object or bytes, headers); seen: (method, path, body, headers)."""

    def __init__(self, port=0):
        self.answers, self.seen = [], []
        mine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                mine.seen.append((self.command, self.path, json.loads(body) if body else None, dict(self.headers)))
                if "/exec?" in self.path:
                    mine.exec(self)
                    return
                found = mine.answers.pop(0) if mine.answers else (404, {})
                if found == "cut":
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                code, content, headers = (*found, {})[:3]
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(code)
                for name, value in {"Content-Length": len(data), **headers}.items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()

    def exec(self, handler):
        """Echo stdin in capitals to stdout until `exit N`."""
        key = handler.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        handler.send_response(101)
        for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept)):
            handler.send_header(name, value)
        handler.send_header("Sec-WebSocket-Protocol", "v5.channel.k8s.io")
        handler.end_headers()
        handler.close_connection = True
        read = handler.rfile.read
        while True:
            first, second = read(2)
            size = second & 0x7F
            if size > 125:
                size = struct.unpack(">H" if size == 126 else ">Q", read(2 if size == 126 else 8))[0]
            mask, data = read(4), read(size)
            data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
            if first & 0x0F != 2 or data[:1] != b"\0":
                continue
            if data[1:6] == b"exit ":
                cause = {"reason": "ExitCode", "message": data[6:].decode()}
                end = {"status": "Failure", "details": {"causes": [cause]}}
                handler.wfile.write(frame(b"\2the end\n") + frame(b"\3" + json.dumps(end).encode()))
                return
            handler.wfile.write(frame(b"\1" + data[1:].upper()))

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def frame(data):
    size = bytes([len(data)]) if len(data) < 126 else b"\x7e" + struct.pack(">H", len(data))
    return b"\x82" + size + data


def config(folder, port, user=None):
    return str(
        kubeconfig(folder / "kubeconfig", f"http://127.0.0.1:{port}", user or {"token": "s3cret"}, namespace="team")
    )


@pytest.fixture
def server(tmp_path, monkeypatch):
    server = Answers()
    monkeypatch.setenv("KUBECONFIG", config(tmp_path, server.port))
    yield server
    server.close()


def test_objects_are_read_in_the_namespace_of_the_context(server):
    server.answers = [(200, POD), (404, {}), (200, {"items": [{"metadata": {"name": "b"}}], "metadata": {}})]
    api = ClusterApi(Place())
    assert (api.get("Pod", "a"), api.get("Job", "b")) == (POD, None)
    assert [one["kind"] for one in api.list_objects("JobSet", {"clustertool/job": "x"})] == ["JobSet"]
    paths = [path for _, path, _, _ in server.seen]
    assert paths[:2] == ["/api/v1/namespaces/team/pods/a", "/apis/batch/v1/namespaces/team/jobs/b"]
    assert paths[2].startswith(
        "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets?labelSelector=clustertool%2Fjob%3Dx"
    )
    headers = {name.lower(): value for name, value in server.seen[0][3].items()}
    assert headers["authorization"] == "Bearer s3cret"
    assert "team" not in ClusterApi(Place("", "other")).namespace


@pytest.mark.parametrize("code", [429, 503])
def test_a_busy_server_is_asked_again_after_the_time_that_it_names(server, code):
    server.answers = [(code, {}, {"Retry-After": "1"}), (200, POD)]
    began = time.monotonic()
    assert ClusterApi(Place()).get("Pod", "a") == POD
    assert time.monotonic() - began >= 1.0
    assert len(server.seen) == 2


def test_a_server_that_is_away_is_waited_for(server, tmp_path):
    server.close()
    notes, back = [], []
    timer = threading.Timer(4.0, lambda: back.append(Answers(server.port)) or back[0].answers.append((200, POD)))
    timer.start()
    try:
        end, found = time.monotonic() + 30, None
        api = ClusterApi(Place(), notes.append)
        while found is None and time.monotonic() < end:  # the answer is prepared a moment after the port is there
            found = api.get("Pod", "a")
    finally:
        timer.join()
        for one in back:
            one.close()
        server.close = lambda: None
    assert found == POD
    assert len(notes) == 1
    assert "waiting for the API server" in notes[0]


def test_a_wait_ends_with_ctrl_c(server, monkeypatch):
    server.answers = [status(503, "later")] * 50
    began = time.monotonic()

    def check():
        if time.monotonic() - began > 1:
            raise Unreachable("interrupted")

    with pytest.raises(Unreachable, match="interrupted"):
        ClusterApi(Place(), check=check).get("Pod", "a")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("answer", "error", "code", "text"),
    [
        (status(401, "Unauthorized"), AuthError, 77, "refuses the credentials of one"),
        (
            status(403, 'pods is forbidden: User "ann" cannot create resource "pods"'),
            AuthError,
            77,
            "may not create pods a",
        ),
        (
            status(403, 'pods "a" is forbidden: exceeded quota: gpus, requested: 8'),
            PreflightError,
            69,
            "exceeded quota: gpus",
        ),
        (status(409, 'pods "a" already exists', "AlreadyExists"), AlreadyExists, 69, "already exists"),
        (status(422, "spec.containers[0].image: Required value"), ConfigError, 78, "spec.containers"),
        (
            status(
                400, 'Pod in version "v1" cannot be handled as a Pod: strict decoding error: unknown field "spec.x"'
            ),
            ConfigError,
            78,
            'the manifest is not right: unknown field "spec.x"',
        ),
        (status(400, "a\nb"), ConfigError, 78, "not right: a b"),
        (status(400, 'admission webhook "a" does not support dry run'), PreflightError, 69, "dry run"),
        (status(404, 'namespaces "team" not found'), PreflightError, 69, "namespaces"),
        ((200, b"<html>"), PreflightError, 69, "no object in JSON"),
    ],
)
def test_a_refusal_names_what_is_wrong(server, answer, error, code, text):
    server.answers = [answer]
    with pytest.raises(error, match=text.replace("[", r"\[")) as caught:
        ClusterApi(Place()).create(POD)
    assert caught.value.code == code
    assert len(server.seen) == 1
    assert "s3cret" not in str(caught.value)


def test_an_object_whose_creation_was_not_confirmed_is_that_of_the_job(server):
    server.answers = ["cut", status(409, "already exists"), (200, POD)]
    assert ClusterApi(Place()).create(POD) == POD
    other = {**POD, "metadata": {"name": "a", "labels": {"clustertool/job": "j2"}}}
    server.answers = ["cut", status(409, "already exists"), (200, other)]
    with pytest.raises(AlreadyExists):
        ClusterApi(Place()).create(POD)


def test_a_deletion_names_the_one_object(server):
    server.answers = [(200, {}), (404, {}), status(409, "uid")]
    api = ClusterApi(Place())
    assert [api.delete("Job", "a", uid="u1"), api.delete("Job", "a"), api.delete("Job", "a", uid="u2")] == [
        True,
        False,
        False,
    ]
    body = server.seen[0][2]
    assert (body["propagationPolicy"], body["preconditions"]) == ("Foreground", {"uid": "u1"})


def test_a_watch_that_has_expired_lists_again(server):
    changed = {"type": "MODIFIED", "object": {"metadata": {"name": "a", "resourceVersion": "7"}}}
    expired = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
    server.answers = [
        (200, {"items": [], "metadata": {"resourceVersion": "5"}}),
        (200, json.dumps(changed).encode() + b"\n"),
        (200, json.dumps(expired).encode() + b"\n"),
        (200, {"items": [POD], "metadata": {"resourceVersion": "9"}}),
    ]
    watch = ClusterApi(Place()).watch("Pod")
    events = [next(watch) for _ in range(3)]
    assert [event for event, _ in events] == ["LISTED", "MODIFIED", "LISTED"]
    assert "resourceVersion=5" in server.seen[1][1]
    assert "resourceVersion=7" in server.seen[2][1]


def test_rights_and_user_are_asked_of_the_server(server):
    server.answers = [(201, {"status": {"allowed": True}}), (201, {"status": {"userInfo": {"username": "ann"}}})]
    api = ClusterApi(Place())
    assert api.allowed("create", "", "pods", "exec")
    wanted = {"namespace": "team", "verb": "create", "group": "", "resource": "pods", "subresource": "exec"}
    assert server.seen[0][2]["spec"]["resourceAttributes"] == wanted
    assert api.user() == "ann"
    server.answers = [(404, {})]
    assert ClusterApi(Place()).user() == "one"


def test_a_log_comes_in_pieces(server):
    server.answers = [(200, b"x" * 300_000), status(404, "no pod")]
    api = ClusterApi(Place())
    pieces = list(api.log("a", tail=5, limit=9))
    assert sum(map(len, pieces)) == 300_000
    assert max(map(len, pieces)) <= 65536
    assert "container=clustertool&tailLines=5&limitBytes=9" in server.seen[0][1]
    with pytest.raises(NotFound):
        list(api.log("a"))


def test_a_program_in_a_pod_has_stdin_stdout_stderr_and_an_exit_code(server):
    channel = ClusterApi(Place()).channel("a", ["python3", "-c", "a b&c"])
    channel.settimeout(20)
    sent = b"abc" * 100_000
    threading.Thread(target=channel.sendall, args=(sent,), daemon=True).start()
    found = b""
    while len(found) < len(sent):
        found += channel.recv(1 << 16)
    assert found == sent.upper()
    channel.sendall(b"exit 7")
    assert channel.status_event.wait(20)
    assert (channel.exit_status, channel.recv(10), channel.recv_stderr(100)) == (7, b"", b"the end\n")
    with pytest.raises(OSError, match="ended with 7"):
        channel.sendall(b"more")
    channel.close()
    assert "command=python3&command=-c&command=a+b%26c&stdin=true" in server.seen[0][1]


def test_the_kubeconfig_is_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="there is no kubeconfig"):
        ClusterApi(Place()).get("Pod", "a")
    monkeypatch.setenv("KUBECONFIG", config(tmp_path, 1))
    with pytest.raises(ConfigError, match="no context 'two'"):
        ClusterApi(Place("two")).get("Pod", "a")
    plugin = {
        "exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "/none/login", "interactiveMode": "Never"}
    }
    monkeypatch.setenv("KUBECONFIG", config(tmp_path, 1, plugin))
    with pytest.raises(AuthError, match="no credentials for the user one"):
        ClusterApi(Place()).get("Pod", "a")


def test_without_the_client_the_error_names_the_extra():
    code = """
import sys
sys.modules["kubernetes"] = sys.modules["urllib3"] = None
from collections import namedtuple
from clustertool.engines.kubernetes.cluster_api import ClusterApi
try:
    ClusterApi(namedtuple("P", "context namespace")("", "")).get("Pod", "a")
except Exception as error:
    print(type(error).__name__, error.fix)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "ConfigError pip install 'clustertool[kubernetes]'\n"


def test_the_table_of_engines_and_verbs_does_not_import_the_client():
    code = "import sys, clustertool.cli.verb_table, clustertool.engines.base; print('kubernetes' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.fixture
def ends():
    """A channel, and the other end of its connection, which is that of the server."""
    ours, theirs = socket.socketpair()
    websocket = WebSocket()
    websocket.sock = ours
    websocket.handshake_response = SimpleNamespace(subprotocol="v5.channel.k8s.io")
    channel = PodChannel(websocket)
    channel.settimeout(20)
    yield channel, theirs
    channel.close()
    theirs.close()


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_messages_are_taken_out_of_any_pieces(ends, size):
    channel, server = ends
    in_two = b"\x02\x02\1a" + b"\x89\x01p" + b"\x80\x01b"  # a message in two frames, with a ping between them
    data = frame(b"\1" + b"x" * 200) + in_two
    for at in range(0, len(data), size):
        server.sendall(data[at : at + size])
    found = b""
    while len(found) < 202:
        found += channel.recv(1000)
    assert found == b"x" * 200 + b"ab"
    server.settimeout(20)
    first, masked = server.recv(2)
    assert (first, masked) == (0x8A, 0x81), "the ping was not answered"


@pytest.mark.parametrize(
    "wrong", [b"\x82\xff" + b"\xff" * 20, b"\xf2\x00", b"\x8b\x00", b"\x82\x7f" + bytes(4) + b"\2\0\0\1a"]
)
def test_a_frame_that_is_not_valid_or_too_large_ends_the_channel(ends, wrong):
    channel, server = ends
    server.sendall(wrong)
    assert channel.status_event.wait(20)
    assert channel.recv_stderr(100).startswith(b"the connection to the pod broke: ")
    assert channel.exit_status == -1


def test_a_reader_that_is_slow_holds_up_an_endless_log(ends):
    """The channel keeps a bounded part of it, and what it sends goes out meanwhile."""
    channel, server = ends
    piece, server_sent = frame(b"\1" + b"x" * 60_000), 0
    server.settimeout(2)
    with pytest.raises(TimeoutError):
        while True:
            server.sendall(piece)
            server_sent += 60_000
    assert 4 << 20 < server_sent < 20 << 20
    channel.sendall(b"stdin")
    assert server.recv(2) == b"\x82\x86"
    channel.settimeout(0.1)
    with pytest.raises(TimeoutError):
        channel.recv_stderr(1)
    found = 0
    while found < server_sent:
        found += len(channel.recv(1 << 20))


def test_the_final_status_is_read_as_input_of_others():
    assert exit_code(b'{"status": "Success"}') == (0, "")
    assert exit_code(b'{"status": "Failure", "message": "no such file"}') == (126, "no such file")
    for wrong in (b"", b"[]", b"null", b'{"details": {"causes": [{"reason": "ExitCode", "message": "x"}]}}'):
        assert exit_code(wrong)[0] == 126
