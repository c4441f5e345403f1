"""Pods without an API server: each is a node of a lab, with a root folder, a process namespace and the files of a kubelet.

    pods = LabPods(lab(3), tmp_path)
    job = pods.job("train.py", workspace)      # the join file; fields of it may be changed
    started = pods.start(job)                  # [LabPod]: PID 1 is `python3 /etc/clustertool/bundle.pyz join`
    assert [pod.wait() for pod in started] == [0, 0, 0]

The image has Python and its libraries, and nothing else: no shell, no tar, no /etc/passwd.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clustertool import __version__
from clustertool.fleet import identity, node_bundle
from clustertool.fleet.dispatch.shipment import Shipment
from clustertool.fleet.dispatch.workspace import read_workspace
from clustertool.fleet.joining import join_bundle, join_process
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import Options, read_job
from clustertool.model.facts import Identity
from clustertool.model.joining.join_file import (
    JOIN_FILE,
    EngineSettings,
    JoinFile,
    MeetingPoint,
    OwnSettings,
    to_json,
)
from clustertool.model.kubernetes import pod_record
from clustertool.model.kubernetes.pod_record import LEDGER, PodEnd, PodRecord
from clustertool.model.paths import IN_POD, JobPaths
from clustertool.model.wire.frames import Decoder, encode
from clustertool.model.wire.messages import Request
from tests import proc_files
from tests.cli import until
from tests.forked import Forked
from tests.kubernetes import forked_pods
from tests.lab.lab import PATH, Lab
from tests.node_code import CACHE, add_compiled
from tests.sent_workspace import with_workspace

ROOT = "/clustertool"
VOLUME = "/clustertool-output"
PORT = 7190
SOON = 60.0
_LIBRARIES = ("/usr/lib", "/lib", "/lib64", "/usr/lib64")
_DEVICES = ("null", "zero", "random", "urandom")


_RECEIVE = """
import pickle, sys
sys.path.insert(0, "/etc/clustertool/bundle.pyz")
from clustertool.node.storage.release_store import Store
from clustertool.node.system import path_trust
path_trust.set_group("pod")
pieces, release, text = pickle.load(sys.stdin.buffer)
store = Store("/clustertool")
for name, data in pieces.items():
    assert store.add(name, data)
store.complete(release, text)
"""


class LabPod:
    """One pod on a node of a lab. `uid`: of its container. image: folders of this machine that its image has, too.

    code: the folder of this machine that is ~/.cache/clustertool in the pod, where agents keep their code; None: they have it
    in a new folder below /tmp, each of them.
    """

    image: tuple[str, ...] = ()
    code: Path | None = None
    fresh = False  # its first process is a new Python, and no fork

    def __init__(
        self,
        lab: Lab,
        node: int,
        folder: Path,
        bundle: bytes,
        env: Mapping[str, str],
        uid: int,
        files: Mapping[str, str],
        stdout: int | None,
        without: Sequence[str],
    ) -> None:
        self.lab, self.node, self.folder, self.uid = lab, node, folder, uid
        self.root = folder / "root"
        self._prepare(bundle)
        for path in without:
            self.at(path).rmdir()
        for path, text in files.items():
            self.at(path).parent.mkdir(parents=True, exist_ok=True)
            self.at(path).write_text(text)
        self.popen = self._launch(env, stdout)

    def _prepare(self, bundle: bytes) -> None:
        """The files of the image, of the volumes, and of the kubelet."""
        for path in ("proc", "dev/shm", "tmp", "etc", ROOT[1:], VOLUME[1:], "etc/clustertool/..data"):
            (self.root / path).mkdir(parents=True, exist_ok=True)
        for path in (*_LIBRARIES, sys.base_prefix, *self.image):
            self._place(path)
        for path in (ROOT, VOLUME):  # an emptyDir, and a volume
            (self.root / path[1:]).chmod(0o2777)
        (self.root / "tmp").chmod(0o1777)
        (self.root / "dev/shm").chmod(0o1777)
        for name in _DEVICES:
            (self.root / "dev" / name).touch()
        (self.root / "dev/fd").symlink_to("/proc/self/fd")
        self.at("dev/termination-log").touch()
        self.termination.touch()
        self.termination.chmod(0o666)
        secret = self.root / "etc/clustertool"
        (secret / "..data/bundle.pyz").write_bytes(bundle)
        (secret / "..data/bundle.pyz").chmod(0o444)
        (secret / "bundle.pyz").symlink_to("..data/bundle.pyz")
        secret.chmod(0o1777)
        hosts = "".join(f"{self.lab.address(n)} {host(n)}\n" for n in range(self.lab.n))
        (self.root / "etc/hosts").write_text(f"127.0.0.1 localhost\n{hosts}")

    def _place(self, path: str) -> None:
        """The same folder or link as on this machine, empty so far."""
        at = self.root / path[1:]
        at.parent.mkdir(parents=True, exist_ok=True)
        if os.path.islink(path):
            at.symlink_to(os.readlink(path))
        else:
            at.mkdir(exist_ok=True)

    def _launch(self, env: Mapping[str, str], stdout: int | None) -> subprocess.Popen[bytes] | Forked:
        root = str(self.root)
        binds = [path for path in (*_LIBRARIES, sys.base_prefix, *self.image) if not os.path.islink(path)]
        places = [(path, f"{root}{path}") for path in (*binds, *(f"/dev/{name}" for name in _DEVICES))]
        places.append((str(self.termination), f"{root}/dev/termination-log"))
        if self.code is not None:
            (self.root / CACHE).mkdir(parents=True)
            places.append((str(self.code), f"{root}/{CACHE}"))
        given = {"PATH": f"{sys.base_prefix}/bin", "HOME": "/", "IMAGE_WORD": "image", **env}
        with open(os.devnull, "rb") as null, self.out.open("wb") as out, self.err.open("wb") as err:
            to = out.fileno() if stdout is None else stdout
            streams = (null.fileno(), to, err.fileno() if stdout is None else to)
            if self.fresh or not forked_pods.can_fork(given):
                return self._launch_new(given, places, streams)
            request = {
                "machine": self.lab.boots[self.node].init,
                "hostname": pod_name(self.node),
                "root": root,
                "binds": places,
                "uid": self.uid,
                "env": given,
            }
            return forked_pods.start(request, streams)

    def _launch_new(
        self, env: Mapping[str, str], places: Sequence[tuple[str, str]], streams: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        """The same with a new Python."""
        root = str(self.root)
        python = [f"{sys.base_prefix}/bin/python3", forked_pods.BUNDLE, "join"]
        user = [f"--userspec={self.uid}:{self.uid}", "--groups="]
        given = [f"{name}={value}" for name, value in env.items()]
        lines = [
            f"hostname {pod_name(self.node)}",
            "set -e",
            *(f"mount --bind {source} {place}" for source, place in ((root, root), *places)),
            f"mount -t proc proc {root}/proc",
            shlex.join(["exec", "env", "-i", *given, shutil.which("chroot", path=PATH) or "", *user, root, *python]),
        ]
        enter = ["nsenter", "-t", str(self.lab.boots[self.node].init), "-i", "-n"]
        space = ["unshare", "-m", "-p", "-u", "--fork", "--kill-child=KILL", "--propagation", "private"]
        stdin, stdout, stderr = streams
        return subprocess.Popen(
            [*enter, *space, "sh", "-c", "\n".join(lines)],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={"PATH": PATH},
            cwd="/",
            start_new_session=True,
        )

    @property
    def out(self) -> Path:
        return self.folder / "stdout"

    @property
    def err(self) -> Path:
        return self.folder / "stderr"

    @property
    def termination(self) -> Path:
        return self.folder / "termination"

    def at(self, path: str) -> Path:
        """A path of the pod, as this machine sees it."""
        return self.root / path.lstrip("/")

    @property
    def first(self) -> int:
        """The pid of the pod's first process, as this machine sees it; 0 before it is there."""
        for line in _children(self.popen.pid):
            if Path(f"/proc/{line}/comm").read_text().strip() in ("ct-pod", "ct-join", "python3"):
                return line
        return 0

    def child(self, name: str) -> int:
        """The pid of a process below PID 1, by its name, as this machine sees it."""
        todo = [self.first]
        while todo and todo[0]:
            pid = todo.pop()
            todo += _children(pid)
            if proc_files.comm(pid) == name:
                return pid
        raise AssertionError(f"there is no process {name}: {self.shown}")

    def term(self) -> bool:
        """As the kubelet ends a pod. False: its first process has not begun, or has ended."""
        pid = self.first
        if pid:  # 0 would be the group of these tests
            os.kill(pid, signal.SIGTERM)
        return pid > 0

    def wait(self, seconds: float = SOON) -> int:
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"pod {self.node} goes on: {self.shown}") from None

    @property
    def shown(self) -> str:
        return f"{self.out.read_text(errors='replace')[-3000:]} {self.err.read_text(errors='replace')[-3000:]}"

    def says(self, text: str, seconds: float = SOON) -> None:
        """Wait for a text in the pod's log."""

        def output() -> bool:
            found = text in self.out.read_text(errors="replace")
            assert found or self.popen.poll() is None, f"it has ended: {self.shown}"
            return found

        until(output, seconds, lambda: f"{text}: {self.shown}")

    @property
    def record(self) -> PodRecord:
        return pod_record.decode(self.out.read_bytes().splitlines()[-1])

    @property
    def message(self) -> PodEnd:
        return pod_record.decode_message(self.termination.read_text())

    def logs(self) -> dict[tuple[str, int, int], bytes]:
        """The logs of the ranks, restored from the pod's log: by role, rank and attempt."""
        found: dict[tuple[str, int, int], bytes] = {}
        for row in self.out.read_bytes().split(b"\n"):
            line = pod_record.decode_line(row)
            if line is not None:
                key = (line.role, line.rank, line.attempt)
                found[key] = found.get(key, b"") + line.content
        return found

    @property
    def job_dir(self) -> Path:
        (found,) = self.at(ROOT).glob("JOB*")
        return found

    def _exec(self, *argv: str) -> list[str]:
        """The command that runs another one in the container, as `kubectl exec`."""
        space = ["nsenter", "-t", str(self.first), "-m", "-p", "-u", "-n", "-i"]
        user = ["chroot", f"--userspec={self.uid}:{self.uid}", "--groups=", str(self.root)]
        return [*space, *user, f"{sys.base_prefix}/bin/python3", *argv]

    def ask(self, *requests: Request[Any]) -> list[dict[str, Any]]:
        """The answers of an agent in the pod, which is started without a shell, and ends when all have come."""
        argv = self._exec("-ESs", "-c", node_bundle.FIRST, "clustertool-agent")
        hello = {"root_dir": ROOT, "root_group": IN_POD, "entry": pod_name(self.node)}
        return ask_agent(argv, hello, requests, {"PATH": PATH, "HOME": "/"})

    def children(self) -> list[int]:
        """Of PID 1, zombies too."""
        return _children(self.first)

    def leave_orphans(self, count: int) -> None:
        """Run a program in the container that ends before its children do, and end these then."""
        code = f"import os, time\nfor n in range({count}):\n if os.fork() == 0: time.sleep(600)\n"
        before = set(self.children())
        subprocess.run(self._exec("-c", code), env={"PATH": PATH}, check=True, timeout=SOON)
        until(lambda: len(self.children()) == len(before) + count, SOON, lambda: f"{self.children()}")
        for child in set(self.children()) - before:
            os.kill(child, signal.SIGKILL)

    def receive(self, folder: Path) -> None:
        """Put the release of a workspace into the store, as an agent in the pod does."""
        sent = read_workspace(folder)
        shipment = Shipment(sent, {})
        pieces = {piece.name: shipment.read(n) for n, piece in enumerate(shipment.pieces) if n}
        data = pickle.dumps((pieces, sent.release, shipment.text))
        done = subprocess.run(
            self._exec("-c", _RECEIVE), input=data, capture_output=True, env={"PATH": PATH}, timeout=SOON
        )
        assert done.returncode == 0, done.stderr

    def end(self) -> None:
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has no group yet
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.kill()
            self.popen.wait(SOON)


class FreshPod(LabPod):
    """The same with a new Python as its first process."""

    fresh = True


class PodmanPod(LabPod):
    """The same as a container of podman: its cgroup, capabilities and signals are those of a runtime."""

    memory = ""  # limit of the container

    def _launch(self, env: Mapping[str, str], stdout: int | None) -> subprocess.Popen[bytes]:
        self.run_root = tempfile.mkdtemp(prefix="ct-podman-", dir="/tmp")  # podman wants a short one
        self.name = f"ct-{os.getpid()}-{self.folder.name}"
        places = [path for path in (*_LIBRARIES, sys.base_prefix) if not os.path.islink(path)]
        mounts = {path: f"{path}:ro" for path in places}
        mounts.update({str(self.at(path)): path for path in (ROOT, VOLUME)})
        mounts.update(
            {str(self.at("etc/clustertool")): "/etc/clustertool:ro", str(self.termination): "/dev/termination-log"}
        )
        base = {"PATH": f"{sys.base_prefix}/bin", "HOME": "/", "IMAGE_WORD": "image", **env}
        options = [
            *(f"--volume={here}:{there}" for here, there in mounts.items()),
            *(f"--env={name}={value}" for name, value in base.items()),
            *self._hosts(),
            f"--user={self.uid}:{self.uid}",
            f"--hostname={pod_name(self.node)}",
            f"--name={self.name}",
            *([f"--memory={self.memory}", f"--memory-swap={self.memory}"] if self.memory else []),
        ]
        strict = ["--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=host"]
        argv = [f"{sys.base_prefix}/bin/python3", "/etc/clustertool/bundle.pyz", "join"]
        enter = ["nsenter", "-t", str(self.lab.boots[self.node].init), "-n"]
        conf = self.folder / "containers.conf"
        conf.write_text('[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\n')
        with self.out.open("wb") as out, self.err.open("wb") as err:
            return subprocess.Popen(
                [*enter, *self._podman("run", "--rm", *strict, *options, "--rootfs", str(self.root)), *argv],
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err,
                env={"PATH": PATH, "CONTAINERS_CONF": str(conf)},
                cwd="/",
                start_new_session=True,
            )

    def _hosts(self) -> list[str]:
        """The options that give the container the names of the others."""
        return [f"--add-host={host(n)}:{self.lab.address(n)}" for n in range(self.lab.n)]

    def _podman(self, *argv: str) -> list[str]:
        store = [f"--root={self.folder}/store", f"--runroot={self.run_root}", f"--tmpdir={self.folder}/tmp"]
        return ["podman", *store, "--storage-driver=vfs", "--runtime=runc", "--cgroup-manager=cgroupfs", *argv]

    def term(self) -> bool:
        os.kill(self.popen.pid, signal.SIGTERM)  # podman passes it on to PID 1
        return True

    def end(self) -> None:
        subprocess.run(
            self._podman("rm", "-f", "-t", "0", self.name), env={"PATH": PATH}, capture_output=True, timeout=SOON
        )
        super().end()
        shutil.rmtree(self.run_root)


_code_of_bundles: list[bytes] = []  # what all bundles have: to write it takes 0.15 s of CPU


def _without_join_file(bundle: bytes) -> bytes:
    file = io.BytesIO()
    file.write(bundle[: bundle.index(b"PK")])  # the line for the kernel, in front of the archive
    with zipfile.ZipFile(io.BytesIO(bundle)) as whole, zipfile.ZipFile(file, "w") as part:
        for member in whole.infolist():
            if member.filename != JOIN_FILE:
                part.writestr(member, whole.read(member))
    return file.getvalue()


class LabPods:
    """Makes pods on nodes of a lab, one on each of the first `count`, or of all."""

    def __init__(self, lab: Lab, tmp: Path, count: int = 0) -> None:
        self.lab, self.tmp, self.count = lab, tmp, count or lab.n
        self.pods: list[LabPod] = []
        self._numbers = iter(range(1000))

    def join(
        self,
        options: Options | None = None,
        *,
        job: str = "podjob",
        engine: EngineSettings | None = None,
        cluster: Mapping[str, Any] | None = None,
        toml: Mapping[str, Any] | None = None,
        own: OwnSettings | None = None,
        **fields: Any,
    ) -> JoinFile:
        given = {"device_kind": "cpu", "loss_timeout": 5.0, "grace": 3.0, "where": "this test", "root_dir": ROOT}
        known = Cluster((), **{**given, **(cluster or {})})
        owner = Identity(job, time.time(), "tester", identity.token(), *identity.certificate(), asked=job, name=job)
        join = JoinFile(
            version=__version__,
            code=join_process.digest(),
            identity=owner,
            cluster=known,
            job=read_job(known, toml or {}, options or Options()),
            nnodes=self.count,
            coordinator=MeetingPoint(host(0), PORT),
            join_timeout=60.0,
            names=tuple(map(pod_name, range(self.count))),
            engine="kubernetes",
            of_engine=engine or EngineSettings(),
            own=own or OwnSettings(),
        )
        return replace(join, **fields)

    def bundle(self, join: JoinFile, workspace: Path | None, inside: bool = True) -> bytes:
        """inside: the bundle has the workspace in it."""
        sent = read_workspace(workspace) if workspace is not None else None
        if not _code_of_bundles:
            _code_of_bundles.append(_without_join_file(add_compiled(join_bundle.content(join))))
        file = io.BytesIO(_code_of_bundles[0])
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr(JOIN_FILE, to_json(join if sent is None else with_workspace(join, sent)))
            if sent is not None and inside:
                join_bundle._add_workspace(archive, Shipment(sent, {}))
        return file.getvalue()

    def start(
        self,
        bundle: bytes,
        *,
        uid: int = 0,
        env: Mapping[str, str] | None = None,
        nodes: Sequence[int] | None = None,
        files: Mapping[str, str] | None = None,
        stdout: int | None = None,
        without: Sequence[str] = (),
        kind: type[LabPod] = LabPod,
    ) -> list[LabPod]:
        """files: of the image, by their paths. stdout: of PID 1; None: a file. without: folders it lacks."""
        started = []
        for node in range(self.count) if nodes is None else nodes:
            own = {
                "CLUSTERTOOL_FIRST_NODE": "0",
                "JOB_COMPLETION_INDEX": str(node),
                "POD_IP": self.lab.address(node),
                "KUBERNETES_SERVICE_HOST": "10.96.0.1",
                **(env or {}),
            }
            folder = self.tmp / f"pod{next(self._numbers)}"
            started.append(kind(self.lab, node, folder, bundle, own, uid, files or {}, stdout, without))
        self.pods += started
        return started

    def close(self) -> None:
        for pod in self.pods:
            pod.end()


def ask_agent(
    argv: Sequence[str], hello: Mapping[str, str], requests: Sequence[Request[Any]], env: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Start an agent by this command, and get its answers."""
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, env=dict(env)) as agent:
        assert agent.stdin and agent.stdout and agent.stderr
        start = node_bundle.LOADER + node_bundle.digest().encode() + node_bundle.with_size(json.dumps(hello).encode())
        agent.stdin.write(start)
        agent.stdin.flush()
        line = agent.stdout.readline()
        if line.startswith(b"need"):
            agent.stdin.write(node_bundle.packed(line.decode().strip()))
            agent.stdin.flush()
            line = agent.stdout.readline()
        assert line == b"ready\n", (line, agent.stderr.read())
        for number, request in enumerate(requests):
            agent.stdin.write(encode(request.header(number, time.time())))
        agent.stdin.flush()
        answers: dict[int, dict[str, Any]] = {}
        decoder = Decoder(max_payload=1 << 20)
        while len(answers) < len(requests):
            data = os.read(agent.stdout.fileno(), 1 << 16)
            assert data, agent.stderr.read()
            answers.update({header["re"]: header for header, _ in decoder.feed(data) if "re" in header})
        agent.stdin.close()
    return [answers[number] for number in range(len(requests))]


def restored(pod: LabPod, root: Path) -> Path:
    """The directory of the job below `root`, made of nothing but the log of the pod."""
    record = pod.record
    job = root / f"JOB{record.end.job}"
    ours = job / ".clustertool"
    (root / ".clustertool/jobs").mkdir(parents=True, mode=0o700)
    ours.mkdir(parents=True, mode=0o700)
    (ours / "marker").touch()
    for name, data in record.files.items():
        place = root / f".clustertool/jobs/{record.end.job}.json" if name == LEDGER else ours / name
        place.write_bytes(data)
    for (role, rank, attempt), data in pod.logs().items():
        log = job / JobPaths.log(role, rank, attempt)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(data)
    return job


def pod_name(node: int) -> str:
    return f"ct-podjob-{node}"


def host(node: int) -> str:
    return f"{pod_name(node)}.ct-podjob"


def workspace(folder: Path, **texts: str) -> Path:
    """A workspace of these files: train_py="..." is train.py."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def _children(pid: int) -> list[int]:
    def read() -> Iterator[int]:
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                yield from map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        except OSError:
            return

    return list(read())


Make = Callable[..., LabPods]
