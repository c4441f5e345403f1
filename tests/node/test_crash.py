"""What is on the disk when the machine crashes: a release as a whole or not at all, and how a job ended."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertool.errors import DispatchError
from clustertool.model.dispatch import manifest
from clustertool.node.storage.release_store import Store, unpack
from tests.lab.lab import compiler
from tests.node.conftest import Disk
from tests.node.harness import Bench, Node, alive, until
from tests.node.test_relay import COUNT, SIZE, Relays, Shipment, relays  # noqa: F401 - a fixture


def whole(root: Path, ship: Shipment, target: Path) -> bool:
    """The store below `root` has the release, and its files are right."""
    store = Store(str(root))
    if not store.has(ship.release):
        return False
    target.mkdir()
    unpack(store, ship.release, str(target))
    return (target / "big").read_bytes() == b"".join(ship.data[:-1]) and (target / "sm\nall").read_bytes() == b"small\n"


def test_a_release_that_was_reported_survives(disk: Disk, bench: Bench, relays: Any, tmp_path: Path) -> None:  # noqa: F811
    """Also one whose pieces came partly with a dispatch that was interrupted."""
    one: Relays = relays(1)
    root = disk.path / "root"
    one.nodes[0].root.symlink_to(root)
    root.mkdir(0o700)
    one.shipment.fill(Store(str(root)), range(1, 4))
    assert not (disk.crash() / "root").exists(), "the test sees what is in memory only"
    one.start().send(0, *range(COUNT + 2))
    one.says(0, "done")
    assert whole(disk.crash() / "root", one.shipment, tmp_path / "copy")


def test_a_patched_release_survives(disk: Disk, bench: Bench) -> None:
    node = bench.nodes(1, root=disk.path / "root")[0]
    (disk.path / "root").mkdir(0o700)
    old, new = Shipment(), Shipment()
    store = Store(str(node.root))
    old.fill(store, range(1, COUNT + 2))
    store.complete(old.release, old.text)
    os.sync()
    small = b"large\n"
    new.data[-1], new.names[-1] = small, manifest.name_of(small)
    new.text = old.text.replace(old.names[-1].encode(), new.names[-1].encode())
    new.release = "2" * 32
    request = {
        "release": new.release,
        "base": old.release,
        "steps": manifest.delta(old.text, new.text),
        "groups": None,
        "manifest": manifest.name_of(new.text),
        "pieces": {new.names[-1]: base64.b64encode(small).decode()},
    }
    assert node.ask("patch", **request)["have"]
    store = Store(str(disk.crash() / "root"))
    assert store.has(new.release) and not store.missing({new.names[-1]: len(small)})
    assert store.read(new.names[-1]) == small and store.manifest(new.release) == new.text


def test_how_a_job_ended_survives(disk: Disk, bench: Bench) -> None:
    (disk.path / "root").mkdir(0o700)
    job = bench.run(bench.nodes(1, root=disk.path / "root"), "exit 3")
    job.ended()
    job.gone()
    events = disk.crash() / "root" / job.dir().name / ".clustertool/events.jsonl"
    found = [json.loads(line) for line in events.read_text().splitlines()]
    assert [event["type"] for event in found][-1] == "ended" and {event.get("code") for event in found} >= {3}


# -- a disk that is slow, and one without locks --------------------------------------------------------------------------


@pytest.fixture
def node(bench: Bench, tmp_path: Path) -> Callable[..., Node]:
    """node(NO_LOCKS="1") -> a node with such a disk."""
    if not compiler():
        pytest.skip("needs a C compiler")
    made, source = tmp_path / "disk.so", Path(__file__).with_name("disk.c")
    subprocess.run([compiler(), "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", str(made), str(source), "-ldl"], check=True)
    return lambda **env: bench.nodes(1, env={"LD_PRELOAD": str(made), **env})[0]


def test_a_slow_disk_delays_no_other_node(node: Callable[..., Node], bench: Bench, tmp_path: Path) -> None:
    """What a node has it passes on before it is on its disk; the laptop is not left without news, and `done` comes last."""
    slow, quick = node(SYNC_GATE=str(tmp_path / "gate")), bench.nodes(1)[0]
    two = Relays([slow, quick], Shipment()).start().meet()
    two.send(0, *range(COUNT + 2))
    two.says(1, "done")
    while not two.messages[0].empty():
        assert two.messages[0].get()["type"] != "relay-done"
    two.says(0, "got")
    assert not Store(str(slow.root)).has(two.shipment.release)
    (tmp_path / "gate").touch()
    two.says(0, "done")
    assert Store(str(slow.root)).has(two.shipment.release)


def test_a_slow_disk_delays_no_verdict(node: Callable[..., Node], bench: Bench, tmp_path: Path) -> None:
    """The supervisor waits for the disk when all else is over."""
    gate = tmp_path / "gate"
    gate.touch()
    job = bench.run([node(SYNC_GATE=str(gate))], "until [ -e go ]; do sleep 0.05; done")
    until(lambda: (job.dir() / "log/workerlog.0").exists(), "the rank runs")
    gate.unlink()
    (job.dir() / "go").touch()
    job.ended()
    supervisor = job.process("supervisor")
    assert alive(supervisor)
    gate.touch()
    job.gone()


def test_old_releases_go_without_locks_too(node: Callable[..., Node]) -> None:
    """But young pieces stay: another dispatch may count on them."""
    one = node(NO_LOCKS="1")
    store = Store(str(one.root))
    ships = [Shipment(2, seed) for seed in range(1, 7)]
    for age, ship in enumerate(ships[:5]):
        ship.fill(store, range(1, 4))
        store.complete(ship.release, ship.text)
        os.utime(Path(store.releases, ship.release), (age, age))
    os.utime(Path(store.top, ships[0].names[0]), (1, 1))
    relays_ = Relays([one], ships[5]).start()
    relays_.send(0, *range(4))
    relays_.says(0, "done")
    one.ask("unrelay")
    assert [store.has(ship.release) for ship in ships] == [False] * 2 + [True] * 4
    assert not store.missing({ships[1].names[0]: SIZE}) and store.missing({ships[0].names[0]: SIZE})


# -- what is damaged all the same ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"", b"[\n", b'[\n["p",1]\n]\n', b"{}", b"\xff\n]\n"])
def test_a_damaged_manifest_is_removed_by_the_dispatch_that_needs_it(bench: Bench, tmp_path: Path, text: bytes) -> None:
    """So the next dispatch sends the release again; and it does not keep others from being pruned."""
    store, ship = Store(str(bench.nodes(1)[0].root)), Shipment(2)
    ship.fill(store, range(1, 4))
    Path(store.releases, ship.release).write_bytes(text)
    (tmp_path / "copy").mkdir()
    with pytest.raises(DispatchError, match="damaged"):
        unpack(store, ship.release, str(tmp_path / "copy"))
    assert not store.has(ship.release)
    Path(store.releases, ship.release).write_bytes(text)
    others = [Shipment(2, seed) for seed in range(2, 7)]
    for other in others:
        other.fill(store, range(1, 4))
        store.complete(other.release, other.text)
    os.utime(Path(store.releases, others[0].release), (1, 1))
    store.prune()
    store.prune()
    assert sorted(os.listdir(store.releases)) == sorted([*(other.release for other in others[1:]), "lock"])
    assert set(os.listdir(store.top)) == {name for other in others[1:] for name in other.names}


@pytest.mark.parametrize("text", [b"", b"[\n"])
def test_a_node_does_not_claim_a_release_whose_manifest_is_torn(bench: Bench, text: bytes) -> None:
    node = bench.nodes(1)[0]
    store, ship = Store(str(node.root)), Shipment(2)
    ship.fill(store, range(1, 4))
    store.complete(ship.release, ship.text)
    assert node.probe()["releases"] == [ship.release]
    Path(store.releases, ship.release).write_bytes(text)
    assert node.probe()["releases"] == []


def test_a_small_file_with_wrong_bytes_is_found_when_it_is_used(bench: Bench, tmp_path: Path) -> None:
    """Of the right size, that is: `dispatch --verify` finds the same in large files."""
    store, ship = Store(str(bench.nodes(1)[0].root)), Shipment(2)
    ship.fill(store, range(1, 4))
    store.complete(ship.release, ship.text)
    Path(store.top, ship.names[-1]).write_bytes(b"SMALL\n")
    (tmp_path / "copy").mkdir()
    with pytest.raises(DispatchError, match="damaged"):
        unpack(store, ship.release, str(tmp_path / "copy"))
    assert not store.has(ship.release)
    assert store.missing(dict.fromkeys(ship.names[:2], SIZE) | {ship.names[-1]: 6}) == [ship.names[-1]]
