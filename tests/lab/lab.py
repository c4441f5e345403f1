"""A cluster of namespaces on one machine: each node has its own network, processes, mounts, hostname and real sshd.

    with Lab(3, tmp_path / "lab") as lab:
        (work / "conf.py").write_text(lab.conf())
        lab.run([sys.executable, "-m", "invoke", "check"], cwd=work)      # on the laptop, in the laptop's network
        lab.crash(1)                                                      # silence, as if its power was cut
        lab.processes(0)                                                  # what runs there, seen from outside

Nothing has a name outside: namespaces live by the descriptors this process holds and by the nodes' own processes, which
die with this process. So labs run side by side, and a killed pytest leaves nothing behind.

Every node sees the machine's files, but has its own home, /tmp, /var/tmp, /run, /dev/shm, /etc/hosts, hostname, machine
id and boot id. Where the running Python or this project lies below one of those places, it is still there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tests import proc_files

REPO = Path(__file__).resolve().parents[2]
HOME = Path(pwd.getpwuid(0).pw_dir)  # where sshd starts root's sessions
PRIVATE = (HOME, Path("/tmp"), Path("/var/tmp"), Path("/run"), Path("/dev/shm"))
WIPED = ("run", "dev_shm")  # empty after a reboot
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USERS = Path("/run/home")  # empty after a reboot
FIRST_UID = 4001
LAPTOP = "10.77.255.1"
NOWHERE = "02:77:ff:ff:ff:ff"  # a hardware address that no machine has
WAIT = 60.0

_SSHD = """\
HostKey {etc}/host_key
AuthorizedKeysFile {keys}
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
PrintMotd no
PrintLastLog no
MaxStartups 4096
MaxSessions 4096
KexAlgorithms -sntrup*
Subsystem sftp internal-sftp
"""


class LabError(Exception):
    """The lab itself is broken; the message holds what the machine printed."""


@dataclass(frozen=True)
class Node:
    """What is special about one node."""

    hide: tuple[str, ...] = ()  # programs it does not have: ("rsync",)
    disk: str = ""  # the size of a file system of its own as ~/clustertool: "4m"
    hosts: tuple[str, ...] = ()  # lines that come first in its /etc/hosts: ("127.0.1.1 node0",)
    init: bool = False  # its first process is not its sshd, so that sshd may die and be started again
    users: tuple[str, ...] = ()  # next to root, who may log in by the same key; their homes are in USERS
    clock: int = 0  # seconds by which its clock is wrong, for all that comes in by ssh; needs a C compiler
    binds: tuple[tuple[Path, Path], ...] = ()  # (a path of this machine, where the node has it; it must exist there)
    commands: tuple[str, ...] = ()  # of a shell, as root, before its sshd starts
    sshd: tuple[str, ...] = ()  # last lines of its sshd_config
    cgroups: bool = False  # it has the machine's cgroups, which runtimes of containers need; without, it has none


class Process(NamedTuple):
    """A process of a node as this machine sees it; `pid` can be given to os.kill."""

    pid: int
    argv: tuple[str, ...]
    environ: dict[str, str]


class _Boot:
    """One life of a node, from power on to crash: its namespaces and its first process."""

    def __init__(self) -> None:
        self.net = _new_network()
        self.process: subprocess.Popen[bytes]
        self.pids = -1  # the process namespace, held so that its number means nothing else as long as we search for it
        self.init = 0


class Lab:
    """`n` nodes node0, node1, ... and a laptop on one switch. `nodes` tells what is special: {1: Node(hide=("rsync",))}.

    python: the Python of the nodes in conf(). Nodes have its folder if it is not this one.
    """

    def __init__(
        self,
        n: int,
        directory: Path,
        *,
        shared_home: bool = False,
        mutual_ssh: bool = False,
        acquainted: bool = False,
        nodes: Mapping[int, Node] | None = None,
        python: str = sys.executable,
    ) -> None:
        self.n = n
        self.python = python
        self.dir = directory.resolve()
        self.shared_home = shared_home
        self.mutual_ssh = mutual_ssh
        self.acquainted = (
            acquainted  # all know all hardware addresses: to ask for them, all namespaces have one table of 1024
        )
        self.special = dict(nodes or {})
        self.boots: dict[int, _Boot] = {}
        self.closed = False
        self.dir.mkdir(mode=0o755, parents=True)
        with contextlib.ExitStack() as broken:
            broken.callback(self.close)
            self._build()
            broken.pop_all()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- names and places

    def name(self, i: int) -> str:
        return f"node{i}"

    def address(self, i: int) -> str:
        return f"10.77.{i // 250}.{i % 250 + 1}"

    def home(self, i: int) -> Path:
        """Node i's home as this machine sees it."""
        return self._place("shared" if self.shared_home else self.name(i), HOME)

    def tmp(self, i: int) -> Path:
        """Node i's /tmp as this machine sees it."""
        return self._place(self.name(i), Path("/tmp"))

    @property
    def laptop_home(self) -> Path:
        """The laptop's home as this machine sees it; the laptop itself sees it at root's place."""
        return self._place("laptop", HOME)

    def conf(self, **keys: object) -> str:
        """The text of a conf.py: all nodes by name and their Python. None takes a key out."""
        values = {"HOSTS": [self.name(i) for i in range(self.n)], "USER": "root", "PYTHON": self.python, **keys}
        return "".join(f"{key} = {value!r}\n" for key, value in values.items() if value is not None)

    # -- commands

    def laptop(self, argv: Sequence[str], env: Mapping[str, str] | None = None, **popen: Any) -> subprocess.Popen[Any]:
        """Start a command in the laptop's network with the laptop's home. The process is the command itself.

        It dies with the thread that calls this (so that a killed pytest leaves nothing): call it from one that stays.
        """
        enter = [*_dies_with_us(), "nsenter", f"--net={_path(self.laptop_net)}", "unshare", "-m"]
        return subprocess.Popen(
            [*enter, "sh", str(self.laptop_init), *argv], env=self.laptop_environ(env or {}), **popen
        )

    @property
    def laptop_init(self) -> Path:
        """The script of sh that turns a new mount namespace into the laptop's, and then runs its arguments."""
        return self.dir / "laptop/etc/init"

    def laptop_environ(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment of a command on the laptop that gets the further variables `env`."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "SSH_"))}
        return {**kept, "HOME": str(HOME), "USER": "root", "LOGNAME": "root", **env}

    def run(self, argv: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 120, **popen: Any) -> Any:
        """Run a command on the laptop to its end -> CompletedProcess with its text."""
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        with self.laptop(argv, env, text=True, **{**options, **popen}) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            finally:
                process.kill()  # does nothing to one that has ended
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def exec(
        self, i: int, argv: Sequence[str], timeout: float = 60, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside node i, without ssh."""
        enter = ["nsenter", "-t", str(self.boots[i].init), "-m", "-u", "-i", "-n", "-p"]
        shell = ["env", "-i", f"PATH={PATH}", f"HOME={HOME}", "USER=root", "sh", "-c", 'cd && exec "$@"', "sh"]
        return subprocess.run([*enter, *shell, *argv], text=True, capture_output=True, timeout=timeout, **options)

    def start_on(
        self, i: int, argv: Sequence[str], cwd: Path, env: Mapping[str, str], **popen: Any
    ) -> subprocess.Popen[Any]:
        """Start a command inside node i, as its user types it there. The process is nsenter, the command is its child.

        cwd: as the node sees it. It dies with the thread that calls this, as a command on the laptop does.
        """
        enter = [*_dies_with_us(), "nsenter", "-t", str(self.boots[i].init), "-m", "-u", "-i", "-n", "-p"]
        given = [f"{name}={value}" for name, value in self.node_environ(env).items()]
        shell = [*_dies_with_us(), "env", "-i", *given, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd)]
        return subprocess.Popen([*enter, *shell, *argv], **popen)

    def node_environ(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment of a command that is typed on a node with the further variables `env`."""
        return {"PATH": PATH, "HOME": str(HOME), "USER": "root", "LOGNAME": "root", "LANG": "C.UTF-8", **env}

    def processes(self, i: int) -> list[Process]:
        """What lives on node i, its sshd included (but for an init of its own, and stubs); empty while it is down."""
        alone = i in self.boots and self.special.get(i, Node()).init
        found = self._inside(self.boots[i]) if i in self.boots else []
        left = [process for process in found if not (alone and process.pid == self.boots[i].init)]
        return [process for process in left if proc_files.comm(process.pid) != proc_files.STUB]

    def laptop_processes(self) -> list[Process]:
        """What the laptop runs now."""
        return _of_namespace("net", self.laptop_net)

    # -- power and cables

    def crash(self, i: int) -> None:
        """Cut the power: the cable is silent first, so no peer gets as much as a goodbye from its kernel."""
        boot = self.boots.pop(i)
        _ip(self.switch, f"link del p{i}")
        self._end([boot])

    def start(self, i: int) -> None:
        """Power on again: a new boot id, an empty /run and /dev/shm, the old home.

        Machines that still wait for its hardware address, which they asked for while it was off, ask again.
        """
        self._power_on([i])
        others = [boot.net for other, boot in self.boots.items() if other != i]
        for net in [] if self.acquainted else [self.laptop_net, *others]:
            _ip(net, f"neigh flush to {self.address(i)} dev eth0 nud incomplete")

    def cut(self, i: int) -> None:
        """Pull the cable. Everything on the node goes on."""
        _ip(self.switch, f"link set p{i} down")

    def heal(self, i: int) -> None:
        _ip(self.switch, f"link set p{i} up")

    def drop(self, senders: Iterable[int | str], receivers: Iterable[int | str]) -> None:
        """What `senders` send to `receivers` is lost without an error, until deliver() or a reboot; the other direction is not.

        Both: nodes, or "laptop". To a bridge an unknown hardware address is a broadcast, and no machine takes its frames.
        """
        self._neighbour(senders, receivers, "replace {} lladdr " + NOWHERE + " dev eth0 nud permanent")

    def deliver(self, senders: Iterable[int | str], receivers: Iterable[int | str]) -> None:
        self._neighbour(senders, receivers, "del {} dev eth0")

    def _neighbour(self, senders: Iterable[int | str], receivers: Iterable[int | str], command: str) -> None:
        assert not self.acquainted, "its nodes have permanent entries already"
        targets = {one: LAPTOP if one == "laptop" else self.address(int(one)) for one in receivers}
        for sender in senders:
            net = self.laptop_net if sender == "laptop" else self.boots[int(sender)].net
            _ip(net, *("neigh " + command.format(target) for one, target in targets.items() if one != sender))

    def freeze(self, i: int) -> None:
        """The node hangs: all its processes stand still, its kernel still answers."""
        deadline = time.monotonic() + WAIT
        while moving := [process.pid for process in self.processes(i) if proc_files.state(process.pid) not in "TtZX"]:
            if time.monotonic() > deadline:
                raise LabError(f"{self.name(i)} does not freeze: {moving}")
            for pid in moving:
                _signal(pid, signal.SIGSTOP)

    def thaw(self, i: int) -> None:
        for process in self.processes(i):
            _signal(process.pid, signal.SIGCONT)

    def kill_sshd(self, i: int) -> None:
        """Kill the node's sshd and all its sessions; needs Node(init=True). Everything else on the node goes on."""
        deadline = time.monotonic() + WAIT
        while left := [process.pid for process in self.processes(i) if proc_files.comm(process.pid).startswith("sshd")]:
            if time.monotonic() > deadline:
                raise LabError(f"sshd of {self.name(i)} does not die: {left}")
            for pid in left:
                _signal(pid, signal.SIGKILL)

    def start_sshd(self, i: int) -> None:
        config = shlex.quote(str(self.dir / self.name(i) / "etc/sshd_config"))
        started = self.exec(
            i, ["sh", "-c", f"setsid {shutil.which('sshd', path=PATH)} -D -r -e -f {config} >/dev/null 2>&1 &"]
        )
        deadline = time.monotonic() + WAIT
        while started.returncode or not _listens(self.boots[i].init):
            if started.returncode or time.monotonic() > deadline:
                raise LabError(f"sshd of {self.name(i)} does not start: {started.stderr}")
            time.sleep(0.01)

    def shape(self, i: int | str, rate: str | None) -> None:
        """Both directions of node i's cable, or of the laptop's ("uplink"), to a rate such as "100mbit"; None frees it."""
        net, port = (self.laptop_net, "pL") if i == "uplink" else (self.boots[int(i)].net, f"p{i}")
        for where, device in ((net, "eth0"), (self.switch, port)):
            _command(["nsenter", f"--net={_path(where)}", "tc", "qdisc", *_discipline(device, rate)])

    def sent(self) -> int:
        """Bytes that the laptop's interface has sent so far."""
        reported = _command(["nsenter", f"--net={_path(self.laptop_net)}", "ip", "-s", "-j", "link", "show", "eth0"])
        return int(json.loads(reported)[0]["stats64"]["tx"]["bytes"])

    # -- the end

    def close(self) -> None:
        """Remove everything, and prove it."""
        if self.closed:
            return
        self.closed = True
        left = self._end(self.boots.values(), (getattr(self, "laptop_net", -1), getattr(self, "switch", -1)))
        self._remove_cgroups()
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.dir) in line]
        assert not mounts, f"mounts are left (so {self.dir} was not removed): {mounts}"
        shutil.rmtree(self.dir)
        assert not left, f"processes are left: {left}"

    def _remove_cgroups(self) -> None:
        """Those of containers that were not removed before their node crashed. A container's id is in its store."""
        homes = {self.home(i) for i, special in self.special.items() if special.cgroups}
        stores = [
            path
            for home in homes
            for kind in ("overlay-containers", "containers")
            for path in home.glob(f".*/{kind}/*")
        ]
        names = {path.name for path in stores if path.is_dir()}
        if not names:
            return
        for path, _, _ in os.walk("/sys/fs/cgroup", topdown=False):
            if any(name in path for name in names):
                os.rmdir(path)

    # -- building

    def _build(self) -> None:
        self.switch, self.laptop_net = _new_network(), _new_network()
        self.key = _key_pair()
        self.host_keys = [_key_pair() for _ in range(self.n)]
        cable = f"link add pL type veth peer name eth0 netns {_path(self.laptop_net)}"
        _ip(
            self.switch,
            "link add lab type bridge forward_delay 0",
            "link set lab up",
            cable,
            "link set pL master lab up",
        )
        _ip(self.laptop_net, *_addresses(LAPTOP))
        self._make_laptop()
        for i in range(self.n):
            self._make_node(i)
        self._power_on(range(self.n))

    def _make_laptop(self) -> None:
        etc = self._etc("laptop")
        _write(etc / "hosts", self._hosts("laptop"))
        ssh = self.laptop_home / ".ssh"
        ssh.mkdir(mode=0o700, parents=True)
        self._give_keys(ssh)
        binds = [*self._covers("laptop", (HOME,), self.laptop_home), (etc / "hosts", Path("/etc/hosts"))]
        _write(etc / "init", "\n".join(["set -e", _mount(etc / "mounts", binds), 'cd "$(pwd -P)"', 'exec "$@"']) + "\n")

    def _make_node(self, i: int) -> None:
        name, special = self.name(i), self.special.get(i, Node())
        etc = self._etc(name)
        private, public = self.host_keys[i]
        _write(etc / "host_key", private)
        _write(etc / "host_key.pub", public)
        _write(etc / "authorized_keys", self.key[1] + "\n")
        keys = (
            "/run/authorized_keys" if special.users else etc / "authorized_keys"
        )  # who logs in must be able to read it
        config = _SSHD.format(etc=etc, keys=keys) + (_wrong_clock(etc, special.clock) if special.clock else "")
        config += "".join(f"{line}\n" for line in special.sshd)
        _write(etc / "sshd_config", config)
        _write(etc / "hosts", "".join(f"{line}\n" for line in special.hosts) + self._hosts(name))
        _write(etc / "hostname", name + "\n")
        _write(etc / "machine-id", uuid.uuid4().hex + "\n")
        _write(etc / "vmstat", "oom_kill 0\n")
        _write(etc / "net", "\n".join([*_addresses(self.address(i)), *self._neighbours(i)]) + "\n")
        ssh = self.home(i) / ".ssh"
        if self.mutual_ssh and not ssh.exists():
            ssh.mkdir(mode=0o700, parents=True)
            self._give_keys(ssh)
        _write(etc / "init", self._init(name, self.home(i), special))

    def _neighbours(self, i: int) -> list[str]:
        others = (j for j in range(self.n) if j != i and self.acquainted)
        return [f"neigh add {self.address(j)} lladdr {_mac(j)} dev eth0 nud permanent" for j in others]

    def _init(self, name: str, home: Path, special: Node) -> str:
        """The script that turns fresh namespaces into a node and then becomes its sshd."""
        etc = self.dir / name / "etc"
        binds = [
            (etc / "hosts", Path("/etc/hosts")),
            (etc / "hostname", Path("/etc/hostname")),
            (etc / "machine-id", Path("/etc/machine-id")),
            (etc / "boot_id", Path("/proc/sys/kernel/random/boot_id")),
        ]
        if not special.cgroups:  # another test's process that the kernel kills for memory is none of this node
            binds.append((etc / "vmstat", Path("/proc/vmstat")))
        locked = any(line.startswith("root:!") for line in Path("/etc/shadow").read_text().splitlines())
        if locked or special.users:  # a locked root could not log in
            binds += _accounts(etc, special.users)
        binds += special.binds
        binds = [bind for bind in binds if bind[1].exists()]
        hidden = []
        if special.hide:
            hidden = [_mount(etc / "binds", binds), *_without(self.dir / name / "hidden", special.hide)]
            binds = []
        lines = [
            "set -e",
            f"echo {name} >/proc/sys/kernel/hostname",
            *self._sys(name, special),
            f"ip -batch {shlex.quote(str(etc / 'net'))}",
            *hidden,
            _mount(etc / "mounts", [*binds, *self._covers(name, PRIVATE, home, etc)]),
        ]
        if special.disk:
            root_dir = f"{HOME}/clustertool"
            lines += [f"mkdir -p {root_dir}", f"mount -t tmpfs -o mode=700,size={special.disk} tmpfs {root_dir}"]
        for uid, user in enumerate(special.users, FIRST_UID):
            lines.append(f"mkdir -p {USERS} && install -d -m 700 -o {uid} -g {uid} {USERS / user}")
        if special.users:
            lines.append(f"install -m 644 {shlex.quote(str(etc / 'authorized_keys'))} /run/authorized_keys")
        lines += special.commands
        sshd = f"{shutil.which('sshd', path=PATH)} -D -r -e -f {shlex.quote(str(etc / 'sshd_config'))}"
        last = [f"{sshd} &", "exec sleep infinity"] if special.init else [f"exec {sshd}"]
        return "\n".join([*lines, *last]) + "\n"

    def _sys(self, name: str, special: Node) -> list[str]:
        """The sysfs of the node's network hides the machine's cgroups, which are moved there then."""
        sysfs = "mount -t sysfs sysfs /sys"
        if not special.cgroups:
            return [sysfs]
        kept = self.dir / name / "cgroups"
        kept.mkdir()
        place = shlex.quote(str(kept))
        return [f"mount --rbind /sys/fs/cgroup {place}", sysfs, f"mount --move {place} /sys/fs/cgroup"]

    def _covers(self, owner: str, places: Iterable[Path], home: Path, *more: Path) -> list[tuple[Path, Path]]:
        """(what, where) to bind, in order: first what must stay visible goes into the covers, then the covers over all."""
        python = [Path(self.python).parent] if self.python != sys.executable else []
        kept = _topmost([REPO, Path(sys.prefix), Path(sys.base_prefix), *python, *more])
        inner, outer = [], []
        for place in sorted(places, key=lambda place: place in self.dir.parents):  # what hides the covers goes last
            cover = home if place == HOME else self._place(owner, place)
            cover.mkdir(parents=True, exist_ok=True)
            cover.chmod(0o1777 if place.name in ("tmp", "shm") else 0o700 if place == HOME else 0o755)
            for path in kept:
                if place in path.parents:
                    (cover / path.relative_to(place)).mkdir(parents=True, exist_ok=True)
                    inner.append((path, cover / path.relative_to(place)))
            outer.append((cover, place))
        return inner + outer

    def _power_on(self, nodes: Iterable[int]) -> None:
        cables = []
        for i in nodes:
            boot = self.boots[i] = _Boot()
            cables.append(f"link add p{i} type veth peer name eth0 address {_mac(i)} netns {_path(boot.net)}")
            cables.append(f"link set p{i} master lab up")
        _ip(self.switch, *cables)
        for i in nodes:
            self.boots[i].process = self._launch(i, self.boots[i])
        for i in nodes:
            self._await(i, self.boots[i])

    def _launch(self, i: int, boot: _Boot) -> subprocess.Popen[bytes]:
        name = self.name(i)
        for wiped in WIPED:
            for path in (self.dir / name / wiped).iterdir():
                _remove(path)
        (self._place(name, Path("/run")) / "sshd").mkdir(mode=0o755)
        _write(self.dir / name / "etc/boot_id", f"{uuid.uuid4()}\n")
        enter = [
            "nsenter",
            f"--net={_path(boot.net)}",
            "unshare",
            "-m",
            "-p",
            "-u",
            "-i",
            "--mount-proc",
            "--kill-child=KILL",
        ]
        with (self.dir / name / "log").open("wb") as log:
            return subprocess.Popen(
                [*_dies_with_us(), *enter, "sh", str(self.dir / name / "etc/init")],
                cwd="/",
                env={"PATH": PATH},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _await(self, i: int, boot: _Boot) -> None:
        """Up is: its sshd has reported that port 22 listens. To read that from /proc takes 4 ms."""
        deadline, log = time.monotonic() + WAIT, self.dir / self.name(i) / "log"
        while b"Server listening on 0.0.0.0 port 22." not in (output := log.read_bytes()):
            if boot.process.poll() is not None or time.monotonic() > deadline:
                text = output.decode(errors="replace").strip()
                raise LabError(f"{self.name(i)} does not start: {text or 'it says nothing'}")
            time.sleep(0.002)
        boot.init = _child(boot.process.pid)
        boot.pids = os.open(f"/proc/{boot.init}/ns/pid", os.O_RDONLY)

    def _inside(self, boot: _Boot) -> list[Process]:
        return _of_namespace("pid", boot.pids) if boot.pids >= 0 else []

    def _end(self, boots: Collection[_Boot], networks: Iterable[int] = ()) -> list[Process]:
        """Kill the first processes of nodes, which take all others along; what is left of them (nothing, then).

        networks: descriptors of further namespaces, whose processes are killed too. All descriptors are closed.
        """
        for boot in boots:  # all at once, they need not wait for one another
            if hasattr(boot, "process"):
                _signal(boot.init or boot.process.pid, signal.SIGKILL)
        for boot in boots:
            if hasattr(boot, "process"):
                boot.process.wait(WAIT)
        networks = [*networks, *(boot.net for boot in boots)]
        descriptors = {"net": networks, "pid": [boot.pids for boot in boots]}
        namespaces = {kind: [one for one in found if one >= 0] for kind, found in descriptors.items()}
        left = _kill_all(lambda: _of_namespaces(namespaces))
        for descriptor in (one for found in namespaces.values() for one in found):
            os.close(descriptor)
        return left

    # -- small files

    def _place(self, owner: str, place: Path) -> Path:
        return self.dir / owner / ("home" if place == HOME else str(place)[1:].replace("/", "_"))

    def _etc(self, owner: str) -> Path:
        etc = self.dir / owner / "etc"
        etc.mkdir(parents=True)
        return etc

    def _hosts(self, name: str) -> str:
        nodes = "".join(f"{self.address(i)} {self.name(i)}\n" for i in range(self.n))
        return f"127.0.0.1 localhost\n{nodes}{LAPTOP} laptop\n"

    def _give_keys(self, ssh: Path) -> None:
        _write(ssh / "id_ed25519", self.key[0])
        _write(ssh / "id_ed25519.pub", self.key[1] + "\n")
        names = [f"{self.name(i)},{self.address(i)} {self.host_keys[i][1]}\n" for i in range(self.n)]
        _write(ssh / "known_hosts", "".join(names))


@functools.lru_cache(maxsize=1)
def why_not() -> str:
    """Why there can be no lab on this machine, "" if there can: found out by building one."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a lab of namespaces needs root on Linux"
    missing = [name for name in ("ip", "tc", "nsenter", "unshare", "setpriv", "ssh") if not shutil.which(name)]
    if missing or not shutil.which("sshd", path=PATH):
        return f"a lab needs {', '.join(missing or ['sshd'])}"
    base = Path(tempfile.mkdtemp(prefix="lab-probe-"))
    try:
        Lab(1, base / "lab").close()
    except (LabError, OSError) as error:
        return f"this machine permits no lab: {error}"
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return ""


def _accounts(etc: Path, users: Sequence[str]) -> list[tuple[Path, Path]]:
    """The machine's accounts and some more, none of them locked, as files to bind over its own."""
    numbered = list(enumerate(users, FIRST_UID))
    texts = {
        "passwd": Path("/etc/passwd").read_text()
        + "".join(f"{u}:x:{n}:{n}::{USERS / u}:/bin/sh\n" for n, u in numbered),
        "group": Path("/etc/group").read_text() + "".join(f"{u}:x:{n}:\n" for n, u in numbered),
        "shadow": "".join(f"{user}:*:19000:0:99999:7:::\n" for user in ("root", *users)),
    }
    for name, text in texts.items():
        _write(etc / name, text)
    return [(etc / name, Path("/etc") / name) for name in texts]


def compiler() -> str:
    """What makes a wrong clock, "" if this machine has none."""
    return shutil.which("cc") or shutil.which("gcc") or ""


def _wrong_clock(etc: Path, seconds: int) -> str:
    """Lines of sshd_config that put every session under a clock of its own."""
    made = etc / "clock.so"
    made.write_bytes(_compiled_clock())
    return f"SetEnv LD_PRELOAD={made} CLOCK_OFFSET={seconds}\n"


@functools.cache
def _compiled_clock() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, made = REPO / "tests/lab/clock.c", Path(folder) / "clock.so"
        _command([compiler() or "cc", "-shared", "-fPIC", "-O1", "-o", str(made), str(source), "-ldl"])
        return made.read_bytes()


# -- namespaces


def _new_network() -> int:
    """A network namespace as a descriptor. Only a thread that ends at once ever was inside."""
    found: list[int | OSError] = []

    def make() -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(0x40000000):  # CLONE_NEWNET
            found.append(OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET) is not permitted"))
        else:
            found.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def _path(descriptor: int) -> str:
    """A namespace of ours as other programs can open it."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _dies_with_us() -> list[str]:
    return ["setpriv", "--pdeathsig", "KILL"]


def _of_namespace(kind: str, descriptor: int) -> list[Process]:
    """The living processes of a namespace we hold (its number is that of no other process as long as we do)."""
    return _of_namespaces({kind: [descriptor]})


def _of_namespaces(namespaces: Mapping[str, Sequence[int]]) -> list[Process]:
    """The same of several ones, by kind. One pass through the processes of the machine takes 1 ms."""
    numbers = {
        kind: {os.fstat(descriptor).st_ino for descriptor in found} for kind, found in namespaces.items() if found
    }
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if any(os.stat(f"/proc/{name}/ns/{kind}").st_ino in numbers[kind] for kind in numbers):
                found.append(_process(int(name)))
        except (
            FileNotFoundError,
            ProcessLookupError,
            PermissionError,
        ):  # gone, or not even root's to read: not ours
            continue
    return [process for process in found if proc_files.living(process.pid)]


def _process(pid: int) -> Process:
    argv = Path(f"/proc/{pid}/cmdline").read_text(errors="surrogateescape").split("\0")[:-1]
    pairs = Path(f"/proc/{pid}/environ").read_text(errors="surrogateescape").split("\0")
    return Process(pid, tuple(argv), dict(pair.split("=", 1) for pair in pairs if "=" in pair))


def _child(pid: int) -> int:
    """The only child of a process."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def _listens(pid: int) -> bool:
    try:
        rows = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:  # it died, the reader of `process.poll()` will know
        return False
    return any(row.split()[1].endswith(":0016") and row.split()[3] == "0A" for row in rows)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _kill_all(find: Callable[[], list[Process]]) -> list[Process]:
    """Kill what `find` finds until it finds nothing; what it still finds at the deadline."""
    deadline = time.monotonic() + WAIT
    while (left := find()) and time.monotonic() < deadline:
        for process in left:
            _signal(process.pid, signal.SIGKILL)
        time.sleep(0.005)
    return left


# -- commands and files


def _command(argv: Sequence[str], text: str = "") -> str:
    done = subprocess.run(argv, input=text, text=True, capture_output=True)
    if done.returncode:
        raise LabError(f"{shlex.join(argv)}: {done.stderr.strip()}\n{text}")
    return done.stdout


def _ip(net: int, *lines: str) -> None:
    _command(["nsenter", f"--net={_path(net)}", "ip", "-batch", "-"], "\n".join(lines) + "\n")


def _mac(i: int) -> str:
    return f"02:77:00:00:{i // 250:02x}:{i % 250 + 1:02x}"


def _addresses(address: str) -> list[str]:
    return ["link set lo up", f"addr add {address}/16 dev eth0", "link set eth0 up"]


def _discipline(device: str, rate: str | None) -> list[str]:
    if rate is None:
        return ["del", "dev", device, "root"]
    return ["replace", "dev", device, "root", "tbf", "rate", rate, "burst", "128kb", "latency", "100ms"]


def _mount(table: Path, binds: Iterable[tuple[Path, Path]]) -> str:
    """Write a table of binds (what, where), in order; the command that makes them. One command for each takes 1.3 ms."""
    fields = [[str(path).replace(" ", "\\040") for path in bind] for bind in binds]
    _write(table, "".join(f"{what} {where} none rbind\n" for what, where in fields))
    return f"mount -a -T {shlex.quote(str(table))}"


def _without(space: Path, programs: Sequence[str]) -> list[str]:
    """Take programs away: an overlay over their directories, and they are not there (not: there, but broken)."""
    space.mkdir()
    folders = {Path(folder).resolve() for folder in PATH.split(":")}
    lines = [f"mount -t tmpfs tmpfs {shlex.quote(str(space))}"]
    for number, folder in enumerate(sorted(f for f in folders if any((f / name).exists() for name in programs))):
        upper, work = f"{space}/{number}u", f"{space}/{number}w"
        lines.append(f"mkdir {upper} {work}")
        lines.append(f"mount -t overlay -o lowerdir={folder},upperdir={upper},workdir={work} overlay {folder}")
        lines.append("rm -f " + " ".join(f"{folder}/{name}" for name in programs))
    return lines


def _topmost(paths: Iterable[Path]) -> list[Path]:
    """Each path once, without those that lie inside another one."""
    every = sorted({path.resolve() for path in paths})
    return [path for path in every if not any(other in path.parents for other in every)]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600 if path.name in ("host_key", "id_ed25519") else 0o644)


def _key_pair() -> tuple[str, str]:
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode(), public.decode()
