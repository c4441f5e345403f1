"""The embedded local cluster: private OpenSSH servers on loopback, ended by identity and never by name.

    >>> local = LocalCluster()
    >>> cluster = local.up()        # three nodes; at once if they run already
    >>> local.down()                # servers and their sessions, nothing else
    ['node 0: sshd on 127.0.0.1:23187 (pid 4711)', ...]

Everything lies in one directory of this user (0700), by default below the user's state directory:

    local/lock              held by `up` and `down`: two commands at once are no trouble
    local/run/              keys, known_hosts, one configuration and pid file per server, servers.json; gone after `down`
    local/node<i>/          the home of node i, with its ROOT_DIR; stays, so that `logs` and `fetch` work after the next `up`

The servers outlive the command that starts them and a terminal's Ctrl+C. `down` ends them and whatever still hangs on
their sessions; jobs are detached from their sessions, so the caller stops those first.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import pwd
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from platformdirs import user_state_path

from clustertool.errors import PreflightError, Survivors
from clustertool.fleet.embedded import local_processes
from clustertool.model.config.cluster import Cluster, read_cluster
from clustertool.node.system import path_trust

NODES = 3
MAX_NODES = 250  # 127.0.0.1 to 127.0.0.250
WAIT = 10.0  # seconds for a server to listen, and for killed processes to end
LOCK_WAIT = 60.0
PORTS = range(20000, 30000)  # below every system's ephemeral range, so no client socket takes one

_KEYS = ("host_key", "host_key.pub", "user_key", "user_key.pub", "authorized_keys")

_CONFIG = """\
ListenAddress {address}:{port}
HostKey "{run}/host_key"
AuthorizedKeysFile "{run}/authorized_keys"
PidFile "{run}/{node}.pid"
SetEnv "HOME={home}"
AllowUsers {user}
PermitRootLogin prohibit-password
AuthenticationMethods publickey
PasswordAuthentication no
KbdInteractiveAuthentication no
# the directory above is 0700 and ours; its parents may be as open as /tmp
StrictModes no
UsePAM {pam}
UseDNS no
PrintMotd no
PrintLastLog no
X11Forwarding no
# many commands at once come from this one address
MaxStartups 4096
MaxSessions 4096
LogLevel ERROR
Subsystem sftp internal-sftp
"""


@dataclass(frozen=True)
class Server:
    """One sshd. Pid, start time and boot id together are its identity; a pid alone may be reused."""

    node: int
    address: str
    port: int
    pid: int
    start: str
    boot: str

    @property
    def alive(self) -> bool:
        process = local_processes.find(self.pid)
        return process is not None and process[1] == self.start and self.boot == local_processes.boot_id()

    def __str__(self) -> str:
        return f"node {self.node}: sshd on {self.address}:{self.port} (pid {self.pid})"


class LocalCluster:
    """A few nodes on this machine. `up` is idempotent and repairs; `down` proves that none is left."""

    def __init__(self, directory: Path | None = None) -> None:
        self.dir = (directory or user_state_path("clustertool") / "local").absolute()
        self.run = self.dir / "run"

    def up(self, nodes: int | None = None) -> Cluster:
        """Start what is missing, end what is too much. Without a number: as many as there are, or three."""
        sshd = _sshd()
        _check_user()
        if nodes is not None and not 0 < nodes <= MAX_NODES:
            raise PreflightError(f"an embedded cluster of {nodes} nodes", f"give a number from 1 to {MAX_NODES}")
        self._make_dir()
        with self._locked():
            recorded = self._recorded()
            strays = self._strays(recorded)
            wanted = nodes or len(recorded) or NODES
            if not all((self.run / name).exists() for name in _KEYS):
                _end([*recorded, *strays])
                recorded, strays = (), ()
                self._make_keys()
            keep = [server for server in recorded if server.node < wanted and server.alive]
            _end([*strays, *(server for server in recorded if server.node >= wanted)])
            self._record(keep)
            missing = sorted(set(range(wanted)) - {server.node for server in keep})
            if missing:
                self._record([*keep, *self._start(sshd, missing, keep)])
            return self._cluster(self._recorded())

    def down(self) -> list[str]:
        """End the servers and their sessions; what was ended, one line per server. The nodes' homes stay."""
        if not self.dir.is_dir():
            return []
        with self._locked():
            recorded = self._recorded()
            ended = _end([*recorded, *self._strays(recorded)])
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.run)
            return ended

    def status(self) -> tuple[Server, ...]:
        """The servers this cluster should have, dead ones too (`.alive`); empty after `down`."""
        return self._recorded()

    def cluster(self) -> Cluster | None:
        """The cluster if it runs. If only a part runs, all of it: the dead nodes are then reported as unreachable."""
        servers = self._recorded()
        return self._cluster(servers) if any(server.alive for server in servers) else None

    def home(self, node: int) -> Path:
        return self.dir / f"node{node}"

    def _cluster(self, servers: Iterable[Server]) -> Cluster:
        user = pwd.getpwuid(os.geteuid()).pw_name
        hosts = [
            {
                "host": server.address,
                "user": user,
                "port": server.port,
                "address": server.address,
                "root_dir": str(self.home(server.node) / "clustertool"),
            }
            for server in servers
        ]
        where = "embedded local cluster"
        keys = {
            "HOSTS": hosts,
            "IDENTITY_FILE": str(self.run / "user_key"),
            "HOST_KEYS": "strict",
            "KNOWN_HOSTS": str(self.run / "known_hosts"),
            "PYTHON": sys.executable,
        }
        return replace(read_cluster(keys, where), ssh_config="none", first_path=str(Path(sys.executable).parent))

    # -- files

    def _make_dir(self) -> None:
        """The cluster's directory, of this user alone: its files decide which keys may log in."""
        if re.search(r'["\\%\n]', str(self.dir)):
            raise PreflightError(f"sshd cannot read the path {str(self.dir)!r}", "set XDG_STATE_HOME to a plain path")
        self.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = self.dir.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise PreflightError(
                f"{self.dir} is not a directory of this user", f"remove it, or chown it to uid {os.geteuid()}"
            )
        self.dir.chmod(0o700)
        self.run.mkdir(mode=0o700, exist_ok=True)

    def _check_dir(self) -> None:
        """Raise PreflightError if another user can have written the directory, as far as it exists.

        It names processes to end and servers to log in to.
        """
        wrong = path_trust.unsafe(str(self.run))
        if wrong:
            fix = "correct that folder (chown, chmod), or set XDG_STATE_HOME to a folder of yours"
            raise PreflightError(f"the folder of the embedded cluster is not safe: {wrong.what}", fix)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._check_dir()
        descriptor = os.open(self.dir / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        deadline = time.monotonic() + LOCK_WAIT
        try:
            while not _try_lock(descriptor):
                if time.monotonic() > deadline:
                    what = f"another command has held {self.dir / 'lock'} for {LOCK_WAIT:.0f} s"
                    raise PreflightError(what, "wait for it, or end it")
                time.sleep(0.02)
            self.run.mkdir(mode=0o700, exist_ok=True)  # a `down` may have come between
            yield
        finally:
            os.close(descriptor)

    def _make_keys(self) -> None:
        host, user = _key_pair(), _key_pair()
        for name, pair in (("host_key", host), ("user_key", user)):
            _write(self.run / name, pair[0])
            _write(self.run / f"{name}.pub", pair[1] + "\n")
        _write(self.run / "authorized_keys", user[1] + "\n")

    def _record(self, servers: Iterable[Server]) -> None:
        """The servers and their host key, as later commands find them."""
        known = sorted(servers, key=lambda server: server.node)
        key = (self.run / "host_key.pub").read_text()
        _write(self.run / "known_hosts", "".join(f"[{server.address}]:{server.port} {key}" for server in known))
        _write(self.run / "servers.json", json.dumps([asdict(server) for server in known], indent=1) + "\n")

    def _recorded(self) -> tuple[Server, ...]:
        self._check_dir()
        try:
            rows = json.loads((self.run / "servers.json").read_text())
            return tuple(Server(**row) for row in rows)
        except (
            FileNotFoundError,
            ValueError,
            TypeError,
        ):  # none, or of another version: pid files still name the servers
            return ()

    def _strays(self, recorded: Iterable[Server]) -> tuple[Server, ...]:
        """Servers of an `up` that was killed before it could record them: their pid file names them, their argv proves it."""
        known = {server.pid for server in recorded if server.alive}
        found = []
        for path in self.run.glob("*.pid"):
            server = self._listening(int(path.stem))
            if (
                server
                and server.pid not in known
                and str(path.with_suffix(".conf")) in local_processes.argv(server.pid)
            ):
                found.append(server)
        return tuple(found)

    # -- servers

    def _start(self, sshd: str, nodes: Iterable[int], running: Iterable[Server]) -> list[Server]:
        """All at once. A port that is lost between the probe and sshd's bind costs another round."""
        started: list[Server] = []
        taken = {(server.address, server.port) for server in running}
        waiting = list(nodes)
        for _ in range(5):
            prefer = min((port for _, port in taken), default=random.choice(PORTS))
            launched = []
            for node in waiting:
                address = _address(node)
                port = _free_port(address, prefer, {p for a, p in taken if a == address})
                taken.add((address, port))
                launched.append(self._launch(sshd, node, address, port))
            for process in launched:  # each has put itself into the background, or refused its configuration
                process.wait(WAIT)
            started += [server for server in map(self._await, waiting) if server]
            waiting = sorted(set(waiting) - {server.node for server in started})
            if not waiting:
                return started
        raise PreflightError("sshd found no free port on loopback", f"see {self.run}/*.log")

    def _launch(self, sshd: str, node: int, address: str, port: int) -> subprocess.Popen[bytes]:
        home, config, log = self.home(node), self.run / f"{node}.conf", self.run / f"{node}.log"
        home.mkdir(mode=0o700, exist_ok=True)
        for old in (log, self.run / f"{node}.pid"):
            old.unlink(missing_ok=True)
        text = _CONFIG.format(
            address=address,
            port=port,
            run=self.run,
            node=node,
            home=home,
            user=pwd.getpwuid(os.geteuid()).pw_name,
            pam="yes" if _root_is_locked() else "no",
        )
        _write(config, text + _newer(sshd))
        return subprocess.Popen(
            [sshd, "-f", str(config), "-E", str(log)],
            cwd="/",
            env={"PATH": os.defpath},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _await(self, node: int) -> Server | None:
        """The server once it listens (it writes its pid then), None if its port was taken after all."""
        log = self.run / f"{node}.log"
        deadline = time.monotonic() + WAIT
        while True:
            server = self._listening(node)
            if server:
                return server
            output = log.read_text(errors="replace").strip() if log.exists() else ""
            if "Cannot bind" in output:
                return None
            if output or time.monotonic() > deadline:
                what = f"sshd of node {node} did not start: {output or 'it says nothing'}"
                raise PreflightError(what, f"see {log.with_suffix('.conf')}")
            time.sleep(0.002)

    def _listening(self, node: int) -> Server | None:
        """The server of a node by its pid file and configuration, None if it is not there (yet)."""
        try:
            pid = (self.run / f"{node}.pid").read_text()
            address, port = (self.run / f"{node}.conf").read_text().split(None, 2)[1].rsplit(":", 1)
        except FileNotFoundError:
            return None
        process = local_processes.find(int(pid)) if pid.endswith("\n") else None
        return Server(node, address, int(port), int(pid), process[1], local_processes.boot_id()) if process else None


# -- ending


def _end(servers: Iterable[Server]) -> list[str]:
    """Kill servers and what hangs on them. Everything is stopped before anything is killed, so nothing can slip away."""
    targets = {server.pid: server for server in servers if server.alive}
    doomed: dict[int, str] = {}
    ended = []
    for pid, server in targets.items():
        tree = local_processes.freeze(pid, server.start)
        doomed.update(tree)
        ended.append(f"{server}" + (f" and {len(tree) - 1} processes of its sessions" if len(tree) > 1 else ""))
    for pid, start in doomed.items():
        local_processes.send_signal(pid, start, signal.SIGKILL)
    deadline = time.monotonic() + WAIT
    while alive := [pid for pid, start in doomed.items() if local_processes.lives(pid, start)]:
        if time.monotonic() > deadline:
            pids = ", ".join(map(str, sorted(alive)))
            raise Survivors(
                f"processes of the embedded cluster do not end: {pids}", f"see: ps -fp {pids.replace(' ', '')}"
            )
        time.sleep(0.005)
    return ended


def _address(node: int) -> str:
    """127.0.0.<node + 1> where all of 127/8 is local (Linux), else 127.0.0.1 for all of them."""
    address = f"127.0.0.{node + 1}"
    return address if _binds(address, 0) else "127.0.0.1"


def _free_port(address: str, prefer: int, taken: set[int]) -> int:
    """The same port on every address if possible: the nodes are then like those of a real cluster."""
    for port in [prefer, *random.sample(PORTS, 200)]:
        if port not in taken and _binds(address, port):
            return port
    raise PreflightError(f"no free port on {address} from {PORTS[0]} to {PORTS[-1]}")


def _binds(address: str, port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as sshd does
        try:
            listener.bind((address, port))
            listener.listen()
        except OSError:
            return False
    return True


# -- what must be there


def _sshd() -> str:
    """The path of sshd, which a node must have."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/sbin"])
    sshd = shutil.which("sshd", path=path)
    fix = "apt-get install openssh-server (or your system's package of that name); or name real machines in a conf.py"
    if not sshd:
        raise PreflightError("the embedded local cluster needs sshd, which is not here", fix)
    return str(Path(sshd).absolute())  # sshd wants to start itself again by an absolute path


def _check_user() -> None:
    """A user who can log in; sshd would only report that a login failed."""
    try:
        shell = pwd.getpwuid(os.geteuid()).pw_shell
    except KeyError:
        raise PreflightError(
            f"uid {os.geteuid()} is not in passwd, sshd cannot let it in", "run as a real user"
        ) from None
    if Path(shell).name in ("nologin", "false"):
        raise PreflightError(f"the login shell of this user is {shell}", "run as a user who can log in")
    if os.geteuid() == 0 and Path("/run").is_dir():
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # its privilege separation; Debian's service file makes it


@functools.lru_cache(maxsize=1)
def _newer(sshd: str) -> str:
    """Configuration that only newer servers know: from 9.8 on they would lock out the one address after some failures."""
    output = subprocess.run(
        [sshd, "-V"], stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace"
    )
    version = re.search(
        r"OpenSSH_(\d+)\.(\d+)", output.stderr + output.stdout
    )  # one that is too old for -V prints it in its usage
    return "PerSourcePenalties no\n" if version and tuple(map(int, version.groups())) >= (9, 8) else ""


def _root_is_locked() -> bool:
    """A locked root ("!" in shadow: Ubuntu's sudo) may log in by key only if sshd asks PAM."""
    if os.geteuid() != 0 or not Path("/etc/shadow").exists():
        return False
    return any(line.startswith("root:!") for line in Path("/etc/shadow").read_text(encoding="utf-8").splitlines())


def _key_pair() -> tuple[str, str]:
    """(private, public) in OpenSSH's own forms."""
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode(), public.decode()


def _write(path: Path, text: str) -> None:
    """Whole or not at all, readable by us only."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write(text)
    part.replace(path)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
