"""Images on the way to nodes: pulled by each, or sent by the laptop once. They are real images of podman and docker."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from clustertool.model.config.job import Options
from tests import containers, docker_daemon
from tests.cli import Done, LabSite, until
from tests.containers import IMAGE, podman
from tests.lab.lab import HOME, LAPTOP
from tests.lab.test_join_machines import by_join

MIB = 1 << 20


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o644
    archive.addfile(entry, io.BytesIO(data))


class Laptop:
    """podman of the laptop, with a store of its own in the laptop's home."""

    def __init__(self, site: LabSite, folder: Path) -> None:
        self.site, self.folder = site, folder
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/store"\nrunroot = "{folder}/run"\n'
        )
        (folder / "containers.conf").write_text(containers.SETTINGS)
        self.env = {
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "CONTAINERS_CONF": str(folder / "containers.conf"),
        }

    def podman(self, *args: object) -> str:
        done = subprocess.run(
            ["podman", *map(str, args)], env={**os.environ, **self.env}, text=True, capture_output=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def make_image(self, tar: Path, *layers: int, name: str = IMAGE) -> str:
        """The image of tests with layers of so many MiB that cannot be compressed on top of it; its id."""
        files = [tar]
        for number, size in enumerate(layers):
            files.append(self.folder / f"layer{number}-{size}.tar")
            if not files[-1].exists():
                with tarfile.open(files[-1], "w") as layer:
                    _add(layer, f"data{number}", os.urandom(size * MIB))
        digests = [f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files]
        machine = platform.machine()
        config = {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine),
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": digests},
        }
        names = [f"{number}.tar" for number in range(len(files))]
        manifest = [{"Config": "config.json", "RepoTags": [f"localhost/{name}"], "Layers": names}]
        with tarfile.open(self.folder / "archive.tar", "w") as archive:
            for entry, found in (("config.json", config), ("manifest.json", manifest)):
                _add(archive, entry, json.dumps(found).encode())
            for entry, file in zip(names, files):
                archive.add(file, entry)
        self.podman("load", "--quiet", "--input", self.folder / "archive.tar")
        return self.podman("image", "inspect", "--format", "{{.Id}}", name)

    def inv(self, *args: object, **options: object) -> Done:
        return self.site.inv(*args, env=self.env, **options)

    def start(self, *args: object):
        return self.site.start(*args, env=self.env)


@pytest.fixture
def nodes(site: Callable[..., LabSite], tmp_path: Path, container_image: Path) -> Callable[..., tuple[LabSite, Laptop]]:
    """nodes(3): a site whose nodes can run containers, and podman of the laptop."""

    def make(count: int, special: dict[int, dict[str, object]] | None = None, **keys: object) -> tuple[LabSite, Laptop]:
        folder = tmp_path / "laptop-podman"
        folder.mkdir()
        special = special or {}
        lab = {n: containers.container_node(tmp_path / f"etc{n}", **special.get(n, {})) for n in range(count)}
        made = site(count, nodes=lab)
        made.workspace(train_py="print(1)")
        made.conf(IMAGE_FROM="laptop", CONTAINER={"image": IMAGE, "runtime": "podman"}, **keys)
        return made, Laptop(made, folder)

    return make


def ids(site: LabSite) -> list[str]:
    """The image's id on each node, "" where it is not."""
    return [ids_of(site, node) for node in range(site.count)]


def ids_of(site: LabSite, node: int, name: str = IMAGE) -> str:
    """The same of one node, of the image with this name."""
    lines = podman(site, node, "images", "--no-trunc", "--format", "{{.ID}} {{.Repository}}:{{.Tag}}").splitlines()
    return next((one.split()[0].partition(":")[2] for one in lines if one.endswith(f"/{name}")), "")


def no_rest(site: LabSite) -> None:
    """No process but sshd, and no file of an image that is not complete."""
    until(lambda: not site.all_processes(), 60.0, lambda: f"these to end: {site.all_processes()}")
    left = [path for node in range(site.count) for path in site.root(node).glob(".clustertool/images/*")]
    assert not left


def forget(site: LabSite, node: int, image: str) -> None:
    """Remove an image from a node, and all that the tool keeps there, with the pieces of the image."""
    podman(site, node, "rmi", "--force", image)
    shutil.rmtree(site.root(node))


RANK = ("--script", "ls -d /data0", "--all-ranks")


def test_the_laptop_sends_an_image_once_and_a_changed_layer_alone(nodes, container_image: Path) -> None:
    """Two nodes get it over the uplink once; one has another image of this name before. Later only the new layer is sent, and
    then nothing at all. Ranks run the image of the laptop, also with pull = never.
    """
    two, laptop = nodes(2)
    two.conf(IMAGE_FROM="laptop", CONTAINER=containers.settings())
    first = laptop.make_image(container_image, 6)
    containers.put_image(two, container_image, nodes=[1])
    assert ids_of(two, 1) not in ("", first)
    done = laptop.inv("dispatch", "-w", "job", "--json", timeout=240).ends(0)
    assert ids(two) == [first] * 2
    assert done.json["images"] == {f"node{node}": first for node in range(2)}
    assert "image: load: 2 nodes done in" in done.err
    assert [line for line in done.err.splitlines() if "over the uplink" in line]
    no_rest(two)

    before = two.lab.sent()
    second = laptop.make_image(container_image, 6, 3)
    done = laptop.inv("run", "-w", "job", *RANK, timeout=240).ends(0)
    assert done.out.count("] /data0") == 2, done
    assert ids(two) == [second] * 2 and second != first
    sent = two.lab.sent() - before
    assert 3 * MIB < sent < 6 * MIB, "the layer of 6 MiB is in the stores"
    containers.no_containers(two)
    no_rest(two)

    before = two.lab.sent()
    again = laptop.inv("run", "-w", "job", *RANK, timeout=240).ends(0)
    assert "image:" not in again.out + again.err
    assert two.lab.sent() - before < MIB


@pytest.mark.chaos
def test_a_job_runs_the_image_that_was_sent_for_it(nodes, container_image: Path) -> None:
    """Nodes have an older image of the same name, and one has none: status names the new one, which all ranks have."""
    two, laptop = nodes(2)
    two.conf(IMAGE_FROM="laptop", CONTAINER=containers.settings(pull="missing"))
    job = two.workspace("train")
    (job / "job.toml").write_text('[trainer]\ncommand = ["ls", "/"]\n')
    laptop.make_image(container_image)
    for layers in ((), (1,)):
        newest = laptop.make_image(container_image, *layers)
        laptop.inv("run", "-w", "train", "--all-ranks", timeout=240).ends(0)
        assert ids(two) == [newest] * 2
        log = two.inv("logs", "--all-ranks").ends(0).out
        assert log.count("data0") == 2 * len(layers)
        found = two.inv("status", "--json").ends(0).json["container"]
        assert (found["image"], found["runtime"]) == (IMAGE, "podman")
        assert found["digest"].startswith("sha256:") and "," not in found["digest"]
        assert f"image:    {IMAGE} ({found['digest']}), podman" in two.inv("status").ends(0).out
        assert two.inv("report", "--json", "--to", "report.html").ends(0).json["container"] == found
        assert found["digest"] in (two.folder / "report.html").read_text()
        podman(two, 1, "rmi", "--force", IMAGE) if not layers else None


# -- from a registry


@contextlib.contextmanager
def registry(site: LabSite, laptop: Laptop, etc: Path, *login: str, name: str = "train") -> Iterator[str]:
    """The image of the laptop in a registry there, which all nodes may use without TLS: its address."""
    port = 5000
    address = f"{LAPTOP}:{port}"
    laptop.podman("push", "--quiet", "--compress", IMAGE, f"dir:{laptop.folder}/registry-{name}")
    folder = laptop.folder / "registry"
    folder.mkdir(exist_ok=True)
    (laptop.folder / f"registry-{name}").rename(folder / name)
    for conf in etc.glob("etc*/containers/registries.conf"):
        conf.write_text(f'[[registry]]\nlocation = "{address}"\ninsecure = true\n')
    argv = [sys.executable, str(Path(__file__).with_name("image_registry.py")), str(folder), str(port), *login]
    with site.lab.laptop(argv) as server:
        try:
            until(lambda: _listens(site, port))
            yield f"{address}/{name}:1"
        finally:
            server.kill()


def _listens(site: LabSite, port: int) -> bool:
    return f":{port} " in site.lab.run(["ss", "-Hltn"]).stdout


@pytest.mark.chaos
def test_each_node_pulls_an_image_and_at_most_eight_at_a_time(nodes, tmp_path: Path, container_image: Path) -> None:
    ten, laptop = nodes(10)
    id = laptop.make_image(container_image, 2)
    with registry(ten, laptop, tmp_path) as image:
        ten.conf(CONTAINER={"image": image, "runtime": "podman"})
        done = ten.inv("dispatch", "-w", "job", "--json", timeout=240).ends(0)
        assert done.json["images"] == {f"node{node}": id for node in range(10)}
        assert "image: pull: 10 nodes done in" in done.err
        times = [line.split() for line in (laptop.folder / "registry/log").read_text().splitlines()]
        begins, ends = [(float(begin), 1) for _, begin, _ in times], [(float(end), -1) for _, _, end in times]
        at_once = list(itertools.accumulate(change for _, change in sorted([*begins, *ends])))
        assert len({client for client, _, _ in times}) == 10
        assert 1 < max(at_once) <= 2 * 8, "two layers of each node"
        # What is there is not pulled again, unless that is wished.
        ten.inv("dispatch", "-w", "job", timeout=240).ends(0)
        assert len((laptop.folder / "registry/log").read_text().splitlines()) == len(times)
    never = ten.conf(CONTAINER={"image": "nowhere.invalid/x:1", "runtime": "podman", "pull": "never"})
    failed = never.inv("dispatch", "-w", "job", timeout=240).ends(69)
    assert "the image nowhere.invalid/x:1 is not there, and pull is" in failed.err


@pytest.mark.chaos
def test_a_private_registry_takes_the_login_of_the_runtime(nodes, tmp_path: Path, container_image: Path) -> None:
    """A node without a login is named. The password is in no output, and in no file of the tool."""
    two, laptop = nodes(2)
    id = laptop.make_image(container_image, 2)
    password = "Zk7-secret-word"
    with registry(two, laptop, tmp_path, "ann", password) as image:
        two.conf(CONTAINER={"image": image, "runtime": "podman"})
        podman(two, 0, "login", "--username", "ann", "--password", password, f"{LAPTOP}:5000")
        failed = two.inv("dispatch", "-w", "job", "--json", timeout=240)
        assert failed.code != 0 and "node1: podman pull:" in failed.err and "unauthorized" in failed.err.lower()
        assert "node0: " not in failed.err
        podman(two, 1, "login", "--username", "ann", "--password", password, f"{LAPTOP}:5000")
        done = two.inv("dispatch", "-w", "job", "--json", timeout=240).ends(0)
        assert done.json["images"] == {"node0": id, "node1": id}
    for text in (failed.out, failed.err, done.out, done.err):
        assert password not in text
    for node in range(2):
        for path in two.root(node).rglob("*"):
            assert not path.is_file() or password.encode() not in path.read_bytes()


# -- from the first node


def test_the_first_node_pulls_an_image_and_one_that_has_it_sends_it_to_the_others(
    nodes, tmp_path: Path, container_image: Path
) -> None:
    """The first node pulls what no node has; later another one sends it. The uplink carries its list of pieces only.

    That nodes cannot reach one another is an error of the node, and no transfer over the uplink.
    """
    two, laptop = nodes(2)
    id = laptop.make_image(container_image, 6)
    with registry(two, laptop, tmp_path) as image:
        two.conf(IMAGE_FROM="first", CONTAINER={"image": image, "runtime": "podman"})
        done = two.inv("dispatch", "-w", "job", "--json", timeout=240).ends(0)
        clients = {line.split()[0] for line in (laptop.folder / "registry/log").read_text().splitlines()}
    assert done.json["images"] == {f"node{node}": id for node in range(2)}
    assert clients == {two.lab.address(0)}

    two.conf(IMAGE_FROM="first", CONTAINER=containers.settings(image=image))
    forget(two, 0, image)
    before = two.lab.sent()
    done = two.inv("run", "-w", "job", *RANK, timeout=240).ends(0)
    assert two.lab.sent() - before < 2 * MIB
    assert done.out.count("] /data0") == 2, done
    assert [ids_of(two, node, "train:1") for node in range(2)] == [id] * 2
    assert re.search(r"image: node1 sends [6-9]", done.err) and "image: load: 1 node done" in done.err
    no_rest(two)
    containers.no_containers(two)

    forget(two, 1, image)
    two.lab.exec(1, ["ip", "route", "add", "unreachable", two.lab.address(0)])
    failed = two.inv("dispatch", "-w", "job", timeout=240).ends(74)
    assert "node1: it cannot connect to a node that has it" in failed.err
    no_rest(two)


@pytest.mark.chaos
def test_the_node_that_sends_an_image_is_lost(nodes, container_image: Path) -> None:
    two, laptop = nodes(2)
    id = laptop.make_image(container_image, 40)
    image = laptop.folder / "image.tar"
    laptop.podman("save", "--quiet", "--output", image, IMAGE)
    podman(two, 0, "load", "--quiet", stdin=image)
    two.conf(IMAGE_FROM="first", CONTAINER={"image": IMAGE, "runtime": "podman"})
    two.lab.shape(0, "20mbit")
    running = two.start("dispatch", "-w", "job")
    until(lambda: sum(path.stat().st_size for path in two.root(1).glob(".clustertool/pieces/*")) > 4 * MIB, 120.0)
    two.lab.crash(0)
    done = running.wait(120).ends(74)
    assert re.search(r"node1: (no node is left that has all of it|it cannot connect to a node that has it)", done.err)
    assert ids_of(two, 1) == ""
    two.lab.start(0)
    two.inv("dispatch", "-w", "job", timeout=240).ends(0)
    assert ids(two) == [id, id]
    no_rest(two)


# -- failures


def pulls(site: LabSite, node: int) -> list[int]:
    """Processes of podman that load an image there."""
    return [one.pid for one in site.lab.processes(node) if "podman" in one.argv[:1] or "pull" in one.argv]


def _size(path: Path) -> int:
    """0 for a file that has got its last name meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_ctrl_c_during_the_dispatch_of_an_image(nodes, container_image: Path) -> None:
    """Nothing stays but whole pieces, which are not sent again."""
    one, laptop = nodes(1)
    id = laptop.make_image(container_image, 12)
    one.lab.shape("uplink", "20mbit")
    running = laptop.start("dispatch", "-w", "job")
    until(lambda: sum(map(_size, one.root(0).glob(".clustertool/pieces/*"))) > 6 * MIB)
    running.signal(signal.SIGINT)
    running.wait(60).ends(130)
    no_rest(one)
    assert ids(one) == [""]
    one.lab.shape("uplink", None)
    before = one.lab.sent()
    laptop.inv("dispatch", "-w", "job", timeout=240).ends(0)
    assert ids(one) == [id]
    assert one.lab.sent() - before < 10 * MIB


@pytest.mark.chaos
def test_ctrl_c_while_nodes_load_an_image(nodes, container_image: Path) -> None:
    two, laptop = nodes(2)
    id = laptop.make_image(container_image, 150)
    running = laptop.start("dispatch", "-w", "job")
    until(lambda: all(pulls(two, node) for node in range(2)), 120.0)
    running.signal(signal.SIGINT)
    running.wait(60).ends(130)
    no_rest(two)
    assert ids(two) == ["", ""]
    laptop.inv("dispatch", "-w", "job", timeout=240).ends(0)
    assert ids(two) == [id, id]


@pytest.mark.chaos  # most of a minute
def test_a_node_that_is_lost_while_it_loads_an_image(nodes, container_image: Path) -> None:
    """It is named, the others have the image, and get nothing again when it is back."""
    two, laptop = nodes(2)
    id = laptop.make_image(container_image, 100)
    running = laptop.start("dispatch", "-w", "job")
    until(lambda: pulls(two, 1), 120.0)
    two.lab.crash(1)
    done = running.wait(120)
    assert done.code in (69, 74), done
    assert "node1: " in done.err and "image: load: 1 of 2 nodes" in done.err + done.out
    assert ids_of(two, 0) == id
    two.lab.start(1)
    half = list(two.root(1).glob(".clustertool/images/*.part"))
    until(lambda: all(time.time() - path.stat().st_mtime > 6 for path in half))
    again = laptop.inv("dispatch", "-w", "job", timeout=240).ends(0)
    assert ids(two) == [id, id] and "image: sending" in again.err
    no_rest(two)


def test_nodes_without_room_name_the_bytes(nodes, container_image: Path) -> None:
    """ROOT_DIR of node 0 and the store of node 1 are too small: before bytes are sent, and before they are loaded."""
    store = HOME / ".image-store"
    two, laptop = nodes(2, {0: {"disk": "8m"}})
    small = two.lab.exec(1, ["sh", "-c", f"mkdir -p {store} && mount -t tmpfs -o size=8m tmpfs {store}"])
    assert small.returncode == 0, small.stderr
    laptop.make_image(container_image, 12)
    failed = laptop.inv("dispatch", "-w", "job", timeout=240).ends(74)
    assert "node0: the files of the image need 28" in failed.err and "are free" in failed.err
    two.conf(HOSTS=["node1"], IMAGE_FROM="laptop", CONTAINER={"image": IMAGE, "runtime": "podman"})
    failed = laptop.inv("dispatch", "-w", "job", timeout=240).ends(74)
    assert f"node1: the image needs 16.5 MB in {store}, and 8" in failed.err
    no_rest(two)
    assert ids_of(two, 1) == ""


# -- docker


@pytest.mark.chaos
def test_docker_loads_an_image_of_podman_without_a_copy_on_the_disk(
    site: Callable[..., LabSite], tmp_path: Path, container_image: Path
) -> None:
    """The laptop has podman only. A node with docker reads an archive that is made while it is read."""
    two = site(2, nodes={node: docker_daemon.docker_node() for node in range(2)})
    docker_daemon.wait_for(two)
    folder = tmp_path / "laptop-podman"
    folder.mkdir()
    laptop = Laptop(two, folder)
    laptop.make_image(container_image, 6)
    two.workspace(train_py="print(1)")
    two.conf(IMAGE_FROM="laptop", CONTAINER={"image": IMAGE})
    done = laptop.inv("run", "-w", "job", *RANK, timeout=240).ends(0)
    assert done.out.count("] /data0") == 2, done
    assert "image: load: 2 nodes done in" in done.err
    assert [docker_daemon.docker(two, node, "images", "-q", IMAGE) != "" for node in range(2)] == [True, True]
    again = laptop.inv("run", "-w", "job", *RANK, timeout=240).ends(0)
    assert "image: load" not in again.err
    # From one node to the other one, which has lost it.
    docker_daemon.docker(two, 1, "rmi", "--force", IMAGE)
    two.conf(IMAGE_FROM="first", CONTAINER={"image": IMAGE})
    done = two.inv("run", "-w", "job", *RANK, timeout=240).ends(0)
    assert done.out.count("] /data0") == 2 and "image: node0 sends" in done.err, done
    left = [path for node in range(2) for path in two.root(node).glob(".clustertool/images/*")]
    assert not left


# -- how long it takes


@pytest.mark.chaos
def test_300_mb_to_eight_nodes_over_200_mbit(nodes, container_image: Path) -> None:
    """The uplink carries at most 1.1 times the image, in at most 1.5 times the time of one copy. The load counts apart."""
    eight, laptop = nodes(8)
    laptop.make_image(container_image, 300 * 10**6 // MIB)
    size = float(laptop.podman("image", "inspect", "--format", "{{.Size}}", IMAGE))
    eight.lab.shape("uplink", "200mbit")
    (one,) = laptop.folder.glob("layer0-*.tar")
    since = time.monotonic()
    rsync = ["rsync", "-e", "ssh -o BatchMode=yes -o StrictHostKeyChecking=no", str(one), "root@node0:copy"]
    assert eight.lab.run(rsync, timeout=240).returncode == 0
    copy = (time.monotonic() - since) * size / one.stat().st_size
    before = eight.lab.sent()
    done = laptop.inv("dispatch", "-w", "job", timeout=600).ends(0)
    sent = eight.lab.sent() - before
    lines = [*done.err.splitlines(), *done.out.splitlines()]
    moved = next(line for line in lines if " between nodes, 8 nodes ready in " in line)
    loaded = next(line for line in lines if "image: load: 8 nodes done" in line)
    print(f"image {size / 1e6:.1f} MB, sent {sent / 1e6:.1f} MB, one copy {copy:.1f} s, {moved}, {loaded}")
    found = re.search(r"ready in ([0-9.]+) s", moved)
    assert found is not None and float(found[1]) <= 1.5 * copy
    assert sent <= 1.1 * size
    assert len(set(ids(eight))) == 1


# -- machines that join: no laptop sends anything

_SILENT = """
import socket
server = socket.create_server(("0.0.0.0", 5001))
clients = []
while True:
    clients.append(server.accept())
"""


@pytest.mark.chaos
def test_machines_that_join_pull_the_image(nodes, tmp_path: Path, container_image: Path) -> None:
    """Only node1 lacks it. With "always" both pull it again; with "never" the job does not start."""
    two, laptop = nodes(2)
    id = laptop.make_image(container_image, 2)
    folder = two.workspace(train_sh="ls -d /data0; echo attempt\n")
    job = {"trainer": {"command": ["sh", "train.sh"]}}
    pulled = laptop.folder / "registry/log"

    def joined(name: str, image: str, pull: str) -> list[Any]:
        two.conf(CONTAINER={"image": image, "runtime": "podman", "pull": pull})
        return by_join(two, folder, name, Options(), job)

    with registry(two, laptop, tmp_path) as image:
        podman(two, 0, "pull", "--quiet", image)
        clients = len(pulled.read_text().splitlines())
        refused = joined("refused", image, "never")
        assert [one.returncode for one in refused] == [69, 69] and 'pull is \\"never\\"' in refused[0].stdout
        done = joined("first", image, "missing")
        assert [one.returncode for one in done] == [0, 0], [one.stdout + one.stderr for one in done]
        layers = [line.split()[0] for line in pulled.read_text().splitlines()[clients:]]
        assert len(set(layers)) == 1, "node1 alone pulls it"
        assert podman(two, 1, "images", "--no-trunc", "--format", "{{.ID}}").split() == [f"sha256:{id}"]
        for node in range(2):
            (made,) = [path for path in two.jobs(node) if path.name == "JOBfirst"]
            assert (made / f"log/workerlog.{node}").read_text() == "/data0\nattempt\n"
    # The registry has gone: "always" is an error of both nodes, and leaves nothing.
    gone = joined("gone", image, "always")
    assert {one.returncode for one in gone} == {74} and "podman pull" in gone[0].stdout
    no_rest(two)


def test_a_signal_ends_the_pull_of_a_machine_that_joins(nodes, tmp_path: Path, container_image: Path) -> None:
    """The registry accepts connections and never answers. No process of the runtime is left."""
    one, _ = nodes(1)
    folder = one.workspace(train_sh="true")
    registries = tmp_path / "etc0/containers/registries.conf"
    registries.write_text(f'[[registry]]\nlocation = "{LAPTOP}:5001"\ninsecure = true\n')
    one.conf(CONTAINER={"image": f"{LAPTOP}:5001/train:1", "runtime": "podman"})
    with one.lab.laptop([sys.executable, "-c", _SILENT]) as server, ThreadPoolExecutor() as pool:
        until(lambda: _listens(one, 5001))
        joining = pool.submit(by_join, one, folder, "ended", Options(), {"trainer": {"command": ["sh"]}})
        until(lambda: pulls(one, 0), 60.0)
        (pid,) = [p.pid for p in one.lab.processes(0) if Path(f"/proc/{p.pid}/comm").read_text() == "ct-join\n"]
        os.kill(pid, signal.SIGTERM)
        assert [done.returncode for done in joining.result(60)] == [143]
        server.kill()
    no_rest(one)
