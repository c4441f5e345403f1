"""What stands in on nodes for modules of the standard library does what they do, as far as it goes; further, it is they."""

from __future__ import annotations

import contextlib as real_contextlib
import hashlib as real_hashlib
import json as real_json
import math
import os
import signal as real_signal
import socket as real_socket
import ssl as real_ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from clustertool.fleet.identity import certificate
from clustertool.light import collections, contextlib, hashlib, json, signal, socket, ssl, typing
from clustertool.node.system import tls_link

VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1 << 70,
    0.1,
    -2.5e300,
    "",
    'a"\\b\n\x00\u20ac\U0001f600\udcff',
    [],
    {},
    [[], {}, [1, [2]]],
    {"a": {"b": [1.0, None, "x"]}, "": False},
    {1: 2, None: 3, False: 4, 1.5: 5},
    (1, (2,)),
]
TEXTS = [
    "",
    " ",
    "{",
    '{"a"}',
    "[1,]",
    "1 2",
    "nul",
    "NaN",
    '"\x00"',
    "[" * 10,
    "]",
    "\ufeff1",
    "01",
    "{1:2}",
    '"\\ud800"',
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_json_writes_the_same(value: Any) -> None:
    for given in ({}, {"separators": (",", ":")}):
        text = json.dumps(value, **given)
        assert text == real_json.dumps(value, **given)
        for form in (text, text.encode(), bytearray(text.encode()), f" \n{text}\t\r"):
            assert json.loads(form) == real_json.loads(form)
    assert type(json.loads(json.dumps(value))) is type(real_json.loads(real_json.dumps(value)))


def test_json_refuses_the_same() -> None:
    for text in TEXTS:
        try:
            wanted = real_json.loads(text)
        except ValueError:
            with pytest.raises(ValueError):
                json.loads(text)
        else:
            assert json.loads(text) == wanted or math.isnan(wanted)
    for value in (object(), {1, 2}, {(1, 2): 3}, b"x"):
        with pytest.raises(TypeError):
            json.dumps(value)
    round_about: list[Any] = []
    round_about.append(round_about)
    with pytest.raises(ValueError):
        json.dumps(round_about)
    assert json.dumps([1]) == "[1]", "one that failed leaves nothing behind"
    assert math.isinf(json.loads(json.dumps(-math.inf))) and json.JSONDecodeError is real_json.JSONDecodeError


@pytest.mark.parametrize("text", ["{", '{"a"}', "1 2", "nul", '"\x01"'])
def test_json_refuses_before_json_is_there(text: str) -> None:
    """The C code raises errors of a module that may not be imported yet."""
    code = (
        "import sys; from clustertool.light import json; assert 'json' not in sys.modules\n"
        "try: json.loads(sys.argv[1])\n"
        "except ValueError as error: print(type(error).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True, check=True)
    assert done.stdout == "JSONDecodeError\n"


def test_another_python_has_no_json_of_c() -> None:
    code = (
        "import sys; sys.modules['_json'] = None; from clustertool.light import json; import json as real;"
        "assert json.loads is real.loads and json.dumps is real.dumps"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_suppress() -> None:
    with contextlib.suppress(KeyError, OSError):
        raise FileNotFoundError
    with pytest.raises(ValueError), contextlib.suppress(KeyError):
        raise ValueError
    with contextlib.suppress(KeyError):
        """Nothing happens."""
    assert contextlib.ExitStack is real_contextlib.ExitStack


def once(seen: list[str]) -> Iterator[int]:
    try:
        yield 7
    except KeyError:
        seen.append("caught")
    except LookupError as error:
        raise ValueError from error
    finally:
        seen.append("over")


def stops() -> Iterator[int]:
    yield 1
    raise StopIteration  # PEP 479 makes a RuntimeError of it


def twice() -> Iterator[int]:
    yield 1
    yield 2


@pytest.mark.parametrize("made", [contextlib.contextmanager, real_contextlib.contextmanager], ids=["light", "real"])
def test_context_managers(made: Callable[..., Any]) -> None:
    """The real one beside ours: the same tests hold for both."""
    seen: list[str] = []
    with made(once)(seen) as given:
        assert given == 7 and not seen
    with made(once)(seen=seen):
        raise KeyError
    assert seen == ["over", "caught", "over"]
    same = [(kind, kind) for kind in (OSError, StopIteration, RuntimeError, KeyboardInterrupt)]
    for raised, comes in (*same, (IndexError, ValueError)):
        with pytest.raises(comes) as caught, made(once)(seen):
            raise raised("x")
        assert caught.type is comes
    for bad in (twice, stops):
        with pytest.raises(RuntimeError), made(bad)():
            """It does not end here."""


def test_signals() -> None:
    for name in "SIGHUP SIGTERM SIGKILL SIGCHLD SIGPIPE SIGXFSZ SIG_DFL SIG_IGN".split():
        assert getattr(signal, name) == getattr(real_signal, name)
    before = real_signal.getsignal(real_signal.SIGUSR1)
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        real_signal.signal(real_signal.SIGUSR1, before)
    assert seen == [real_signal.SIGUSR1]
    assert signal.Signals(9).name == "SIGKILL"


def test_sockets() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        with real_socket.create_connection(door.getsockname()) as client:
            sock, address = door.accept()
            with sock:
                assert address == client.getsockname()
                sock.sendall(b"x")
                assert client.recv(10) == b"x"
                assert not os.get_inheritable(sock.fileno())
        assert sock.fileno() == -1
    assert door.fileno() == -1
    for family, kind in ((socket.AF_UNIX, socket.SOCK_STREAM), (socket.AF_UNIX, socket.SOCK_SEQPACKET)):
        one, other = socket.socketpair(family, kind)
        with one, other:
            assert (one.family, one.type) == (family, kind)
            one.send(b"y")
            assert other.recv(5) == b"y"
    assert socket.create_connection is real_socket.create_connection


KINDS = {"light": ssl, "real": real_ssl}
MINE, OTHER = certificate(), certificate()


def context(kind: str, pair: tuple[str, str], server: bool) -> Any:
    """By the very function that nodes use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tls_link, "ssl", KINDS[kind])
        return tls_link.context(*pair, server)


def handshake(server: Any, client: Any) -> tuple[Any, Any, list[Exception]]:
    """Both ends of a pair, and what they refused."""
    ends = []
    for one, ctx, side in zip(real_socket.socketpair(), (server, client), (True, False)):
        one.setblocking(False)
        ends.append(ctx.wrap_socket(one, server_side=side, do_handshake_on_connect=False))
    refused: list[Exception] = []
    for _ in range(20):
        for end in ends:
            try:
                end.do_handshake()
                end.recv(1)  # a client of TLS 1.3 hears only now that it is refused
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                continue
            except OSError as error:
                refused.append(error)
    return ends[0], ends[1], refused


@pytest.mark.parametrize("server", KINDS)
@pytest.mark.parametrize("client", KINDS)
def test_tls(server: str, client: str) -> None:
    """Each with each: what is said arrives, nothing is there where nothing was said, an end is an end."""
    one, other, refused = handshake(context(server, MINE, True), context(client, MINE, False))
    assert not refused
    for sender, receiver in ((one, other), (other, one)):
        with pytest.raises(ssl.SSLWantReadError):
            receiver.recv(10)
        assert sender.send(memoryview(b"hello")) == 5
        there = bytearray(9)
        assert (receiver.recv(3), receiver.recv_into(memoryview(there)[1:])) == (b"hel", 2)
        assert there == b"\0lo" + bytes(6)
    one.send(b"last")
    assert one.fileno() >= 0
    one.close()
    assert (other.recv(100), other.recv(100), other.recv_into(bytearray(5))) == (b"last", b"", 0)
    other.close()
    assert other.fileno() == -1


@pytest.mark.parametrize("server", KINDS)
@pytest.mark.parametrize("client", KINDS)
def test_tls_takes_members_only(server: str, client: str) -> None:
    for mine, theirs in ((MINE, OTHER), (OTHER, MINE)):
        one, other, refused = handshake(context(server, mine, True), context(client, theirs, False))
        assert any("certificate verify failed" in str(error) for error in refused)
    bare = KINDS[client].SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    assert (bare.verify_mode, bare.check_hostname) == (ssl.CERT_REQUIRED, True), (
        "what nobody has said is the careful way"
    )
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    one, other, refused = handshake(context(server, MINE, True), bare)
    assert any("did not return a certificate" in str(error) for error in refused), "nor one without any"


def test_contexts_are_as_careful() -> None:
    for server in (True, False):
        ours, theirs = (context(kind, MINE, server) for kind in KINDS)
        for name in ("options", "verify_mode", "verify_flags", "check_hostname", "minimum_version", "maximum_version"):
            assert int(getattr(ours, name)) == int(getattr(theirs, name)), name
        assert [cipher["name"] for cipher in ours.get_ciphers()] == [cipher["name"] for cipher in theirs.get_ciphers()]


def test_another_python_has_no_ssl_of_c_that_we_know() -> None:
    code = (
        "import ssl as real; real._ssl._SSLContext = object; from clustertool.light import ssl;"
        "assert ssl.SSLContext is real.SSLContext and ssl.SSLWantReadError is real.SSLWantReadError"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hashlib() -> None:
    for data in (b"", b"abc", bytearray(1 << 20)):
        assert hashlib.sha256(data).hexdigest() == real_hashlib.sha256(data).hexdigest()
    assert hashlib.md5 is real_hashlib.md5


def test_collections() -> None:
    assert collections.deque([1, 2]).popleft() == 1
    assert collections.Counter("aa")["a"] == 2


class Point(typing.NamedTuple):
    x: int
    y: int = 2

    def sum(self) -> int:
        return self.x + self.y


def test_named_tuples() -> None:
    one = Point(1)
    assert one == (1, 2) == Point(1, 2) == Point(x=1) and (one.x, one.y) == (1, 2)
    assert Point(y=5, x=1).sum() == 6 and Point(1, y=7).sum() == 8
    assert repr(one) == "Point(x=1, y=2)"
    assert one._replace(x=4) == (4, 2) and one._asdict() == {"x": 1, "y": 2}
    assert {one: 1}[Point(1)] == 1 and isinstance(one, tuple)
    first, second = one
    assert (first, second) == (1, 2)
    wrong: list[tuple[Any, dict[str, Any]]] = [((), {}), ((1, 2, 3), {}), ((1,), {"x": 1}), ((1,), {"z": 1})]
    for values, named in wrong:
        with pytest.raises(TypeError, match="Point has the fields x, y"):
            Point(*values, **named)
    with pytest.raises(AttributeError):
        one.x = 5  # type: ignore[misc]
    assert typing.Dict[str, typing.Optional[typing.Tuple[int, ...]]] and not typing.TYPE_CHECKING
