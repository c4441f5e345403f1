"""Relays on real nodes: pieces go from one to another, whatever strangers, liars, dead sources and full disks do."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import select
import signal
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertool.errors import ClustertoolError, DispatchError
from clustertool.fleet import identity
from clustertool.model.dispatch import manifest, topology
from clustertool.model.dispatch.fetch_scheduler import IDLE
from clustertool.model.wire.frames import encode
from clustertool.node.storage.release_store import Store, unpack
from clustertool.node.system import tls_link
from tests.node.harness import Bench, Node, alive, pids, read, sample, until

SIZE = 100_000
COUNT = 8


class Shipment:
    """Some random pieces, and the manifest of one file made of them and of one small file."""

    def __init__(self, count: int = COUNT, seed: int = 1, size: int = SIZE) -> None:
        rng = random.Random(seed)
        small = b"small\n"
        self.data = [rng.randbytes(size) for _ in range(count)] + [small]
        self.names = [manifest.name_of(data) for data in self.data]
        rows: list[manifest.Row] = [["d", "empty", 0o755, 10**18], ["l", "link", "big"]]
        rows += [["f", "big", 0o640, 10**18, size * count, ""], *(["c", name, size] for name in self.names[:-1])]
        rows += [["p", self.names[-1], len(small), ""], ["s", "sm\nall", 0o600, 10**18, 0, len(small)]]
        self.text = manifest.text_of(rows)
        self.name = manifest.name_of(self.text)
        self.release = f"{seed:032x}"

    def piece(self, number: int) -> bytes:
        return self.data[number - 1] if number else zlib.compress(self.text)

    def fill(self, store: Store, numbers: Any) -> None:
        for number in numbers:
            store.add(self.names[number - 1], self.data[number - 1])


class Relays:
    """Relays of some nodes, ordered as the laptop does it. `words` of each, as they come."""

    def __init__(self, nodes: list[Node], shipment: Shipment) -> None:
        self.nodes, self.shipment = nodes, shipment
        self.certificate, self.key = identity.certificate()
        self.messages: list[queue.Queue[dict[str, Any]]] = [queue.Queue() for _ in nodes]
        self.ports = [0] * len(nodes)

    def start(self, *which: int, **more: Any) -> Relays:
        for i in which or range(len(self.nodes)):
            self.nodes[i].client.agent.on_relay = lambda _, message, i=i: self.messages[i].put(message)  # type: ignore[misc]
            size, count = len(self.shipment.text), len(self.shipment.names) + 1
            order = {"release": self.shipment.release, "manifest": self.shipment.name, "groups": None, "helper": False}
            order.update(size=size, count=count)
            secret = {
                "certificate": self.certificate,
                "key": self.key,
                "address": self.nodes[i].host.address,
                "report": 0.25,
            }
            self.nodes[i].ask("relay", **{**order, **secret, **more})
            self.ports[i] = self.says(i, "ready")["port"]
        return self

    def meet(self, peers: list[tuple[str, int]] | None = None, first: int | None = None) -> Relays:
        """They know one another, or these peers. `first`: only so many, for the others are not there yet."""
        found = peers or [(node.host.address, port) for node, port in zip(self.nodes[:first], self.ports)]
        for me, node in enumerate(self.nodes[:first]):
            if self.ports[me]:
                some = [found[other] for other in topology.sources(len(found), me)]
                node.client.agent.send_to_relay(
                    {"type": "relay-sources", "sources": some, "degree": topology.degree(len(found))}
                )
        return self

    def send(self, i: int, *numbers: int, data: bytes = b"") -> None:
        for number in numbers:
            self.nodes[i].client.agent.send_to_relay(
                {"type": "relay-piece", "piece": number}, data or self.shipment.piece(number)
            )

    def says(self, i: int, what: str) -> dict[str, Any]:
        while True:
            message = self.messages[i].get(timeout=60)
            type = message["type"]
            assert type == f"relay-{what}" or type not in ("relay-failed", "relay-gone"), message
            if type == f"relay-{what}":
                return message

    def pid(self, i: int) -> int:
        agent = self.nodes[i].client.pid
        every = (pid for pid in pids() if read(f"/proc/{pid}/comm") == b"ct-relay\n")
        return next(pid for pid in every if (sample(pid) or [0, 0, 0])[2] == agent)

    def whole(self, i: int) -> bool:
        """The node has the release, and what it makes of it is the workspace."""
        target = self.nodes[i].root / "copy"
        target.mkdir()
        unpack(Store(str(self.nodes[i].root)), self.shipment.release, str(target))
        good = (target / "big").read_bytes() == b"".join(self.shipment.data[:-1])
        return good and (target / "sm\nall").read_bytes() == b"small\n" and os.readlink(target / "link") == "big"


@pytest.fixture
def relays(bench: Bench) -> Iterator[Any]:
    made: list[Relays] = []

    def make(count: int, shipment: Shipment | None = None) -> Relays:
        made.append(Relays(bench.nodes(count), shipment or Shipment()))
        return made[-1]

    yield make
    for one in made:
        for node in one.nodes:
            for client in node.clients:
                client.close()
    until(
        lambda: not [pid for pid in pids() if read(f"/proc/{pid}/comm") == b"ct-relay\n" and _mine(pid, bench)],
        "relays end",
    )


def _mine(pid: int, bench: Bench) -> bool:
    return str(bench.tmp).encode() in read(f"/proc/{pid}/environ")


def listens(address: str, port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex((address, port)) == 0


def test_what_one_has_all_get(relays: Any) -> None:
    """The manifest too goes from node to node; each node's release is there at the end, and no port is."""
    four = relays(4).start().meet()
    four.send(0, *range(COUNT + 2))
    between = 0
    for i in range(4):
        between += four.says(i, "done")["peers"]
        assert four.whole(i)
    for i in range(4):
        four.nodes[i].ask("unrelay")
        assert not listens(four.nodes[i].host.address, four.ports[i])


def test_pieces_flow_on_while_others_are_still_to_come(relays: Any) -> None:
    two = relays(2).start().meet()
    two.send(0, 0, 1, 2, 3)
    store = Store(str(two.nodes[1].root))
    until(lambda: set(os.listdir(store.top)) >= set(two.shipment.names[:3]), "three pieces are at the other node")
    assert not store.has(two.shipment.release)
    two.send(1, *range(4, COUNT + 2))
    two.says(0, "done")
    two.says(1, "done")


def test_nodes_that_met_first_soon_have_what_the_others_got(relays: Any) -> None:
    """They had enough sources in one another, but turn to new ones; else they would stand still until they searched for more.

    That takes IDLE seconds. Else the pieces need little more than the manifest needed, which shows how busy the machine is.
    """
    eight = relays(8).start()
    began = time.monotonic()
    eight.meet(first=4).send(0, 0)
    for i in range(4):
        eight.says(i, "lacks")
    eight.meet()
    for i in range(4, 8):
        eight.says(i, "lacks")
    manifest_took, began = time.monotonic() - began, time.monotonic()
    eight.send(7, *range(1, COUNT + 2))
    for i in range(8):
        eight.says(i, "done")
    assert time.monotonic() - began < 0.75 * IDLE + 2 * manifest_took


def test_a_good_source_is_kept_as_long_as_those_of_a_newer_list_do_not_answer(relays: Any) -> None:
    two = relays(2).start().meet()
    two.send(0, 0)
    two.says(1, "lacks")
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.create_server(("127.0.0.1", 0)) as dumb:
        silent = [sock.getsockname() for sock in (mute, dumb)]
        good = (two.nodes[0].host.address, two.ports[0])
        began = time.monotonic()
        two.nodes[1].client.agent.send_to_relay({"type": "relay-sources", "sources": [*silent, good], "degree": 2})
        two.send(0, *range(1, COUNT + 2))
        two.says(1, "done")
        assert time.monotonic() - began < IDLE, "it stood still until it looked for more sources"


def test_what_is_there_already_is_not_fetched(relays: Any) -> None:
    """An interrupted dispatch, or an older release: pieces by the same name are used, half-written ones are not."""
    one = relays(1)
    store = Store(str(one.nodes[0].root))
    one.shipment.fill(store, [1, 2, 4])
    Path(store.top, one.shipment.names[4]).write_bytes(b"torn")
    one.start().meet().send(0, 0)
    lacks = one.says(0, "lacks")
    assert topology.numbers(lacks["lacks"], COUNT + 2) == {3, *range(5, COUNT + 2)}
    one.send(0, *topology.numbers(lacks["lacks"], COUNT + 2))
    one.says(0, "done")
    assert one.whole(0)


def test_a_helper_serves_and_a_node_takes_only_its_groups(relays: Any) -> None:
    two = relays(2)
    store = Store(str(two.nodes[0].root))
    two.shipment.fill(store, range(1, COUNT + 2))
    store.complete(two.shipment.release, two.shipment.text)
    two.start(0, helper=True).start(1).meet()
    two.says(1, "done")
    assert two.whole(1)


def test_a_source_that_dies_is_replaced(relays: Any) -> None:
    """Three have everything; two of them are killed as soon as the fourth has begun."""
    four = relays(4, Shipment(60)).start(0, 1, 2)
    for i in range(3):
        four.shipment.fill(Store(str(four.nodes[i].root)), range(1, 62))
        four.send(i, 0)
        four.says(i, "done")
    four.start(3).meet()
    four.send(3, 0)
    four.says(3, "lacks")
    os.kill(four.pid(0), signal.SIGKILL)
    os.kill(four.pid(1), signal.SIGSTOP)
    try:
        four.says(3, "done")
        assert four.whole(3)
    finally:
        os.kill(four.pid(1), signal.SIGCONT)


def test_pieces_that_somebody_took_away_come_from_another(relays: Any) -> None:
    """Who has reported that it has them, and cannot read them any more, is left by its takers and lives on."""
    three = relays(3).start(0, 1)
    for i in range(2):
        three.shipment.fill(Store(str(three.nodes[i].root)), range(1, COUNT + 2))
        three.send(i, 0)
        three.says(i, "done")
    for path in Path(Store(str(three.nodes[0].root)).top).iterdir():
        path.unlink()
    three.start(2).meet()
    three.send(2, 0)
    three.says(2, "done")
    assert three.whole(2) and three.pid(0)
    assert not [message for message in three.messages[0].queue if message["type"] in ("relay-failed", "relay-gone")]


def test_a_relay_that_dies_is_reported(relays: Any) -> None:
    one = relays(1).start()
    os.kill(one.pid(0), signal.SIGKILL)
    one.says(0, "gone")
    assert one.nodes[0].ask("jobs") is not None, "the agent goes on"


def test_gone_with_the_agent(relays: Any) -> None:
    """A laptop that is closed, an agent that is killed: nothing listens any more."""
    two = relays(2).start().meet()
    found = [sample(two.pid(i)) for i in range(2)]
    two.nodes[0].client.kill()
    two.nodes[1].client.close()
    for one in found:
        assert one
        until(lambda one=one: not alive(one[0]), "the relay ends")


def test_a_piece_never_is_in_memory_as_a_whole(relays: Any) -> None:
    """Neither in who gets it nor in who passes it on."""
    three = relays(3, Shipment(4, size=16 << 20)).start().meet()
    three.send(0, 0)
    for i in (1, 2):
        three.says(i, "lacks")
    before = [_peak(three.pid(i)) for i in (1, 2)]
    three.send(0, *range(1, 6))
    for i in range(3):
        three.says(i, "done")
    grown = [_peak(three.pid(i)) - old for i, old in zip((1, 2), before)]
    assert max(grown) < 4000, f"kB more: {grown}"
    assert all(three.whole(i) for i in range(3))


def _peak(pid: int) -> int:
    """kB of memory of its own and shared, at most."""
    return next(int(line.split()[1]) for line in read(f"/proc/{pid}/status").splitlines() if line.startswith(b"VmHWM"))


class Liar:
    """A node with the right certificate that has everything, and all of it wrong.

    slow: no manifest, and it takes its time. half: a file with half a piece, after which it is gone. mixed: each lie is
    followed at once by what is true.
    """

    def __init__(self, relays: Relays, slow: bool = False, half: Path | None = None, mixed: bool = False) -> None:
        self._slow = slow
        self._half = half
        self._true = relays.shipment.piece if mixed else None
        self._context = tls_link.context(relays.certificate, relays.key, server=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.asked = 0
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(sock,), daemon=True))
                self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            peer = tls_link.TlsLink(sock, self._context, True, 1 << 20)
            while True:
                select.select([peer], [peer] if peer.wants_write else [], [], 0.05)
                secure = peer.secure
                for header in peer.turn():
                    self.asked += 1
                    time.sleep(0.2 * self._slow)
                    if self._half:
                        self._send_half(peer, self._half, header["piece"])
                    peer.send({"type": "piece", "piece": header["piece"]}, b"lies" * 25_000)
                    for number in range(1, COUNT + 2) if self._true else ():
                        peer.send({"type": "piece", "piece": number}, self._true(number))
                if peer.secure and not secure:
                    peer.send({"type": "have", "have": topology.bits(range(self._slow, COUNT + 2))})

    def _send_half(self, peer: tls_link.TlsLink, half: Path, number: int) -> None:
        peer.send_file({"type": "piece", "piece": number}, os.open(half, os.O_RDONLY), 2 * half.stat().st_size)
        with contextlib.suppress(ConnectionError):
            while True:
                peer.turn()  # until the file ends
        time.sleep(1)
        raise ConnectionError

    def close(self) -> None:
        self._listener.close()


@contextlib.contextmanager
def among(honest: Relays, **how: Any) -> Iterator[Liar]:
    """The relays are started, and know one another and a liar."""
    liar = Liar(honest, **how)
    try:
        honest.start()
        right = [(node.host.address, port) for node, port in zip(honest.nodes, honest.ports)]
        honest.meet([*right, ("127.0.0.1", liar.port)])
        yield liar
    finally:
        liar.close()


def test_a_false_source_wastes_time_and_nothing_else(relays: Any) -> None:
    two = relays(2)
    with among(two) as liar:
        until(lambda: liar.asked, "the liar is asked")
        two.send(0, *range(COUNT + 2))
        for i in range(2):
            two.says(i, "done")
            assert two.whole(i)


def test_a_lie_that_comes_when_all_else_is_there_is_made_good_by_another_source(relays: Any) -> None:
    """What was asked of the liar had been taken from the list of what the honest source is to be asked for."""
    two = relays(2)
    with among(two, slow=True) as liar:
        two.send(0, 0)  # the manifest: without it nothing is asked for
        until(lambda: liar.asked, "the liar is asked")
        two.send(0, *range(1, COUNT + 2))
        start = time.monotonic()
        two.says(1, "done")
        assert two.whole(1) and time.monotonic() - start < 20


def test_half_a_piece_leaves_nothing(relays: Any, tmp_path: Path) -> None:
    """A source that ends in the middle of one: the piece comes from elsewhere, and no file of the half stays."""
    two = relays(2, Shipment(size=3 * SIZE))
    half = tmp_path / "half"
    half.write_bytes(os.urandom(3 * SIZE // 2))
    with among(two, slow=True, half=half):
        two.send(0, 0)
        top = Path(Store(str(two.nodes[1].root)).top)
        until(lambda: list(top.glob("*.part")), "half a piece is there")
        two.send(0, *range(1, COUNT + 2))
        two.says(1, "done")
        assert two.whole(1)
        until(lambda: not list(top.glob("*.part")), "the half is gone")


def test_what_a_liar_says_behind_a_lie_is_not_listened_to(relays: Any) -> None:
    """Its connection is closed by then, and its other pieces are dropped: that is no disk that fails."""
    two = relays(2)
    with among(two, slow=True, mixed=True) as liar:
        two.send(1, 0)
        until(lambda: liar.asked, "the liar is asked")
        time.sleep(1)
        two.send(1, *range(1, COUNT + 2))
        two.says(1, "done")
        assert two.whole(1)


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1])
def test_a_piece_of_another_size_is_not_kept(relays: Any, size: int) -> None:
    one = relays(1).start().meet()
    one.send(0, 0)
    one.says(0, "lacks")
    one.send(0, 3, data=(one.shipment.data[2] * 2)[:size])
    assert one.says(0, "wrong")["piece"] == 3
    assert not list(Path(Store(str(one.nodes[0].root)).top).iterdir())


def test_a_piece_of_the_laptop_that_came_wrong_is_reported(relays: Any) -> None:
    one = relays(1).start().meet()
    one.send(0, 0)
    one.says(0, "lacks")
    one.send(0, 3, data=b"wrong")
    assert one.says(0, "wrong")["piece"] == 3
    one.send(0, *range(1, COUNT + 2))
    one.says(0, "done")


def test_strangers(relays: Any) -> None:
    """They come in numbers and stay, say nothing, garbage or HTTP, and knock with another certificate or none.

    Pieces flow all the same, and none of them gets a byte of one.
    """
    two = relays(2).start()
    address = (two.nodes[0].host.address, two.ports[0])
    open_connections = [socket.create_connection(address) for _ in range(60)]
    try:
        for number, sock in enumerate(open_connections):
            with contextlib.suppress(OSError):
                if number % 3:
                    sock.sendall(os.urandom(5000) if number % 3 == 1 else b"GET / HTTP/1.0\r\n\r\n")
        got = [knock(address, own) for own in (identity.certificate(), None)]
        two.meet().send(0, *range(COUNT + 2))
        two.says(0, "done")
        two.says(1, "done")
        assert not any(got)
    finally:
        for sock in open_connections:
            sock.close()


def knock(address: tuple[str, int], identity_: tuple[str, str] | None) -> bytes:
    """What a TLS client without the right certificate gets out of it."""
    if identity_:
        context = tls_link.context(*identity_, server=False)
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with (
        contextlib.suppress(OSError),
        socket.create_connection(address, 10) as plain,
        context.wrap_socket(plain) as sock,
    ):
        sock.sendall(encode({"type": "get", "piece": 1}))
        return sock.recv(100)
    return b""


def test_it_listens_at_its_own_address_only(relays: Any) -> None:
    one = relays(1).start()
    assert listens(one.nodes[0].host.address, one.ports[0])
    assert not listens("127.0.0.250", one.ports[0])


def test_behind_an_address_that_is_not_the_machines_own(relays: Any) -> None:
    """Of a machine in a cloud ssh knows the public address, which its network translates."""
    two = relays(2).start(address="203.0.113.7").meet()
    two.send(0, *range(COUNT + 2))
    two.says(1, "done")
    assert two.whole(1)


def test_a_source_with_another_certificate_is_no_source(relays: Any) -> None:
    two = relays(2).start(0)
    two.certificate, two.key = identity.certificate()
    two.start(1).meet()
    two.send(1, *range(COUNT + 2))
    two.says(1, "done")
    message = until(lambda: (message := two.says(0, "idle"))["why"] and message)
    assert message["live"] == 0 and "CERTIFICATE_VERIFY_FAILED" in message["why"][0]


def test_a_connection_that_stays_open_does_not_keep_a_relay(relays: Any) -> None:
    one = relays(1).start()
    with socket.create_connection((one.nodes[0].host.address, one.ports[0])):
        start = time.monotonic()
        one.nodes[0].ask("unrelay")
        assert time.monotonic() - start < 20
        assert not listens(one.nodes[0].host.address, one.ports[0])


def test_a_node_that_reaches_no_other_reports_why(relays: Any) -> None:
    one = relays(1).start()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        one.meet([(one.nodes[0].host.address, one.ports[0]), closed.getsockname()])
        message = one.says(0, "idle")
        while not message["why"]:
            message = one.says(0, "idle")
    assert message["live"] == 0 and "Connection refused" in message["why"][0] and "127.0.0.1" in message["why"][0]
    one.send(0, *range(COUNT + 2))
    one.says(0, "done")


def test_a_full_disk_is_reported_by_name(relays: Any, small_disk: Path) -> None:
    one = relays(1, Shipment(30))
    one.nodes[0].root.rmdir() if one.nodes[0].root.exists() else None
    one.nodes[0].root.symlink_to(small_disk)
    one.start().meet().send(0, *range(30))
    message = until(lambda: (w := one.messages[0].get(timeout=60))["type"] == "relay-failed" and w)
    assert "No space left on device" in message["what"] and "room" in message["fix"]
    assert not Store(str(one.nodes[0].root)).has(one.shipment.release)


# -- patches and old releases -------------------------------------------------------------------------------------------


def test_a_patch(bench: Bench) -> None:
    import base64

    node, old, new = bench.nodes(1)[0], Shipment(), Shipment()
    new.text = old.text.replace(b'"sm\\nall"', b'"renamed"')
    new.name, new.release = manifest.name_of(new.text), "2" * 32
    request = {
        "release": new.release,
        "base": old.release,
        "steps": manifest.delta(old.text, new.text),
        "manifest": new.name,
        "groups": None,
        "pieces": {},
    }
    assert not node.ask("patch", **request)["have"], "the base is not there"
    store = Store(str(node.root))
    old.fill(store, range(1, COUNT + 1))
    store.complete(old.release, old.text)
    assert not node.ask("patch", **request)["have"], "a piece is missing"
    wrong = {old.names[-1]: base64.b64encode(b"wrong!").decode()}
    assert not node.ask("patch", **{**request, "pieces": wrong})["have"]
    assert not node.ask("patch", **{**request, "manifest": "0" * 64})["have"]
    assert not node.ask("patch", **{**request, "steps": [[0, 10**9]]})["have"]
    assert not store.has(new.release)
    right = {old.names[-1]: base64.b64encode(b"small\n").decode()}
    assert node.ask("patch", **{**request, "pieces": right})["have"]
    assert store.manifest(new.release) == new.text


def test_old_releases_go_with_what_only_they_had(bench: Bench) -> None:
    node = bench.nodes(1)[0]
    store = Store(str(node.root))
    ships = [Shipment(2, seed) for seed in range(1, 7)]
    for age, ship in enumerate(ships):
        ship.fill(store, range(1, 4))
        store.complete(ship.release, ship.text)
        os.utime(Path(store.releases, ship.release), (age, age))
    with store.used():
        store.prune()
        assert all(store.has(ship.release) for ship in ships), "somebody is fetching"
    store.prune()
    assert [store.has(ship.release) for ship in ships] == [False] * 2 + [True] * 4
    assert set(os.listdir(store.top)) == {name for ship in ships[2:] for name in ship.names}


def test_half_written_pieces_without_an_owner_are_removed(bench: Bench) -> None:
    """A relay that was killed with -9 leaves them; those of another one, maybe on another machine, are left alone."""
    store, ship = Store(str(bench.nodes(1)[0].root)), Shipment(2)
    ship.fill(store, range(1, 3))
    store.complete(ship.release, ship.text)
    old, young = Path(store.top, f"{'0' * 64}.1.part"), Path(store.top, f"{'0' * 64}.2.part")
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    with store.used():
        store.prune()
        assert old.exists(), "somebody is fetching"
    store.prune()
    assert set(os.listdir(store.top)) == {young.name, *ship.names[:2]} and store.has(ship.release)


def test_a_damaged_release_is_forgotten(bench: Bench, tmp_path: Path) -> None:
    """And so the next dispatch repairs it."""
    node, ship = bench.nodes(1)[0], Shipment(2)
    store = Store(str(node.root))
    ship.fill(store, range(1, 4))
    store.complete(ship.release, ship.text)
    os.truncate(Path(store.top, ship.names[0]), 5)
    (tmp_path / "copy").mkdir()
    with pytest.raises(DispatchError, match="damaged"):
        unpack(store, ship.release, str(tmp_path / "copy"))
    assert not store.has(ship.release)
    assert store.missing(dict.fromkeys(ship.names[:2], SIZE)) == [ship.names[0]]


@pytest.mark.parametrize("path", ["../out", "/out", "a/../../out"])
def test_a_manifest_names_nothing_outside(bench: Bench, tmp_path: Path, path: str) -> None:
    store = Store(str(bench.nodes(1)[0].root))
    store.complete("bad", manifest.text_of([["p", "", 0, ""], ["s", path, 0o600, 0, 0, 0]]))
    (tmp_path / "a").mkdir()
    (tmp_path / "copy").mkdir()
    with pytest.raises(ClustertoolError, match="outside"):
        unpack(store, "bad", str(tmp_path / "copy"))
    assert not (tmp_path / "out").exists()
