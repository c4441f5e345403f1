"""The embedded local cluster: private OpenSSH servers on loopback, ended by identity and never by name.

    >>> local = LocalCluster()
    >>> cluster = local.up()        # three nodes; at once if they run already
    >>> local.down()                # servers and their sessions, nothing else
    ['node 0: sshd on 127.0.0.1:23187 (pid 4711)', ...]

Everything lies in one directory of this user (0700), by default below the user's state directory:

    local/lock              locked by `up` and `down`: two commands at once wait for each other
    local/run/              keys, known_hosts, one configuration and pid file per server; gone after `down`
    local/node<i>/          the home of node i, with its ROOT_DIR; stays, so that `logs` and `fetch` work after the next `up`

The servers outlive the command that starts them and a terminal's Ctrl+C. `down` ends them and whatever still hangs on
their sessions; jobs are detached from their sessions, so the caller stops those first.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pwd
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from clustertool.errors import PreflightError, Survivors, UsageError
from clustertool.fleet import this_user
from clustertool.model.config.cluster import Cluster, read_cluster
from clustertool.node.storage import files
from clustertool.node.system import file_lock, path_trust, processes, users
from clustertool.node.system.processes import Process

NODES = 3
MAX_NODES = 250  # 127.0.0.1 to 127.0.0.250
WAIT = 10.0  # seconds for a server to listen, and for killed processes to end
LOCK_WAIT = 60.0
PORTS = range(20000, 30000)  # below every system's ephemeral range, so no client socket takes one
_ROUNDS = 20  # ports that are tried

_KEYS = ("host_key", "host_key.pub", "user_key", "user_key.pub", "authorized_keys", "known_hosts")

_CONFIG = """\
ListenAddress {address}
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
    """One sshd. Pid and start time are its identity; a pid alone may be reused. pid 0: it has ended."""

    node: int
    address: str
    port: int
    pid: int = 0
    start: int = 0

    @property
    def process(self) -> Process:
        """Its pid and start time."""
        return Process(self.pid, self.start)

    @property
    def alive(self) -> bool:
        return processes.alive(self.process)

    def __str__(self) -> str:
        return f"node {self.node}: sshd on {self.address}:{self.port} (pid {self.pid})"


class LocalCluster:
    """A few nodes on this machine. `up` is idempotent and repairs; `down` proves that none is left."""

    def __init__(self, directory: Path | None = None) -> None:
        self.dir = (directory or this_user.state() / "local").absolute()
        self.run = self.dir / "run"

    def up(self, nodes: int | None = None) -> Cluster:
        """Start the servers that are missing, end those beyond `nodes`, and return the cluster.

        nodes None: as many as there are, or three. If a key is missing, all servers are ended, and keys are made. Raises
        UsageError for a number that is not 1 to 250, Survivors if a server does not end, ConfigError if the directory cannot be
        made, and PreflightError without sshd, for a user that cannot log in, for a directory that is not safe or is locked, and
        if a server does not start.
        """
        sshd = _sshd()
        _check_user()
        if nodes is not None and not 0 < nodes <= MAX_NODES:
            raise UsageError(f"the embedded cluster cannot have {nodes} nodes", f"give a number from 1 to {MAX_NODES}")
        self._make_dir()
        with self._lock():
            servers = self.status()
            wanted = nodes or len(servers) or NODES
            if not all((self.run / name).exists() for name in _KEYS):
                _end(servers)
                self._make_keys()
            surplus = [server for server in servers if server.node >= wanted]
            _end(surplus)
            for server in surplus:
                self._config(server.node).unlink()
            running = [server for server in servers if server.node < wanted and server.alive]
            missing = set(range(wanted)) - {server.node for server in running}
            if missing:
                self._start(sshd, sorted(missing), running)
            return self._to_cluster(self.status())

    def down(self) -> list[str]:
        """End the servers and their sessions, remove keys and configurations, and return a line for each server that ran.

        The nodes' homes stay. Returns [] if there was no cluster. Raises Survivors if a process does not end, and
        PreflightError for a directory that is not safe, or is locked for 60 s.
        """
        if not self.dir.is_dir():
            return []
        with self._lock():
            ended = _end(self.status())
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.run)
            return ended

    def status(self) -> tuple[Server, ...]:
        """List the servers that have a configuration, by number, with the dead ones (`alive`). Empty after `down`.

        Raises PreflightError for a directory that another user can have written.
        """
        self._check_dir()
        found = []
        for node in sorted(int(path.stem) for path in self.run.glob("*.conf")):
            with contextlib.suppress(FileNotFoundError):  # another command has ended it
                found.append(self._read_server(node))
        return tuple(found)

    def cluster(self) -> Cluster | None:
        """Return the cluster if a server runs, else None.

        It has the nodes of dead servers, too: they are then reported as unreachable.
        """
        servers = self.status()
        return self._to_cluster(servers) if any(server.alive for server in servers) else None

    def home(self, node: int) -> Path:
        """Return the home folder of a node."""
        return self.dir / f"node{node}"

    def _to_cluster(self, servers: Iterable[Server]) -> Cluster:
        """Build the cluster of these servers, with the user's key and the known hosts in `run`."""
        user = users.own_name()
        where = "embedded local cluster"
        keys = {
            "HOSTS": [
                {"host": f"{user}@{one.address}:{one.port}", "root_dir": f"{self.home(one.node)}/clustertool"}
                for one in servers
            ],
            "IDENTITY_FILE": str(self.run / "user_key"),
            "HOST_KEYS": "strict",
            "KNOWN_HOSTS": str(self.run / "known_hosts"),
            "PYTHON": sys.executable,
        }
        return replace(read_cluster(keys, where), ssh_config="none", first_path=str(Path(sys.executable).parent))

    # -- files

    def _make_dir(self) -> None:
        """Create the cluster's directory and `run`, of this user alone: their files decide which keys may log in.

        Raises PreflightError for a path that sshd cannot read, or a directory of another user; ConfigError if it cannot be
        made.
        """
        if re.search(r'["\\%\n]', str(self.dir)):
            raise PreflightError(f"sshd cannot read the path {str(self.dir)!r}", "set XDG_STATE_HOME to a plain path")
        this_user.make_folder(self.dir, "XDG_STATE_HOME")
        if not files.is_own_dir(str(self.dir)):
            fix = f"remove it, or chown it to uid {os.geteuid()}"
            raise PreflightError(f"{self.dir} is not a directory of this user", fix)
        self.dir.chmod(0o700)
        self.run.mkdir(mode=0o700, exist_ok=True)

    def _check_dir(self) -> None:
        """Raise PreflightError if another user can have written the directory, as far as it exists.

        Its files name processes to end and servers to log in to.
        """
        wrong = path_trust.unsafe(str(self.run))
        if wrong:
            fix = "correct that folder (chown, chmod), or set XDG_STATE_HOME to a folder of yours"
            raise PreflightError(f"the folder of the embedded cluster is not safe: {wrong.what}", fix)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Return a context manager that locks the cluster's directory, and makes `run`. Waits at most 60 s.

        Raises PreflightError after this time, and for a directory that another user can have written.
        """
        self._check_dir()
        with files.closing(os.open(self.dir / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)) as descriptor:
            if not file_lock.lock_within(descriptor, fcntl.LOCK_EX, LOCK_WAIT):
                what = f"another command has locked {self.dir / 'lock'} for {LOCK_WAIT:.0f} s"
                raise PreflightError(what, "wait for it, or end it")
            self.run.mkdir(mode=0o700, exist_ok=True)  # a `down` may have come between
            yield

    def _make_keys(self) -> None:
        """Write new keys of the host and of the user, and authorized_keys and known_hosts with them."""
        host, user = _key_pair(), _key_pair()
        texts = {"authorized_keys": f"{user[1]}\n", "known_hosts": f"* {host[1]}\n"}
        for name, (private, public) in (("host_key", host), ("user_key", user)):
            texts.update({name: private, f"{name}.pub": f"{public}\n"})
        for name, text in texts.items():
            files.replace(str(self.run / name), text.encode(), durable=False)

    # -- servers

    def _config(self, node: int) -> Path:
        """Return the path of the configuration of a node's server."""
        return self.run / f"{node}.conf"

    def _read_server(self, node: int) -> Server:
        """Read the address of a server from its configuration, and its process from its pid file, pid 0 if that does not run.

        The command line proves that the process is this server: it has the path of the configuration.
        """
        config = self._config(node)
        address, port = config.read_text().split(None, 2)[1].rsplit(":", 1)
        with contextlib.suppress(OSError, ValueError):  # no pid yet, or no such process
            process = processes.identify(int(config.with_suffix(".pid").read_text()))
            line = Path(f"/proc/{process.pid}/cmdline").read_bytes() if process else b""
            line = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), line)  # sshd writes its title so
            if process and os.fsencode(config) in line:
                return Server(node, address, int(port), *process)
        return Server(node, address, int(port))

    def _start(self, sshd: str, nodes: Sequence[int], running: Sequence[Server]) -> None:
        """Start the servers of these nodes, and wait until they listen: on the port of `running`, else a random one.

        Those whose port is taken are started again on another one: the nodes of a real cluster have one port. Raises
        PreflightError after 20 ports, and for a server that does not start.
        """
        port = running[0].port if running else random.choice(PORTS)
        for _ in range(_ROUNDS):
            launched = [self._launch(sshd, node, port) for node in nodes]
            for process in launched:  # each has put itself into the background, or refused its configuration
                process.wait(WAIT)
            nodes = [node for node in nodes if not self._listens(node)]
            if not nodes:
                return
            port = random.choice(PORTS)
        raise PreflightError("sshd found no free port on loopback", f"see {self.run}/*.log")

    def _launch(self, sshd: str, node: int, port: int) -> subprocess.Popen[bytes]:
        """Make the home of a node, write the configuration of its server, remove its old log and pid file, and start it."""
        home, config = self.home(node), self._config(node)
        home.mkdir(mode=0o700, exist_ok=True)
        for suffix in (".log", ".pid"):
            config.with_suffix(suffix).unlink(missing_ok=True)
        user, pam = users.own_name(), "yes" if _root_is_locked() else "no"
        address = f"127.0.0.{node + 1}:{port}"  # Linux has all of 127/8 on loopback
        text = _CONFIG.format(address=address, run=self.run, node=node, home=home, user=user, pam=pam)
        files.replace(str(config), f"{text}{_line_for_newer(sshd)}".encode(), durable=False)
        return subprocess.Popen(
            [sshd, "-f", str(config), "-E", str(config.with_suffix(".log"))],
            cwd="/",
            env={"PATH": os.defpath, "ROOM": "." * 4096},  # for the title of sshd, where a letter may take eight bytes
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _listens(self, node: int) -> bool:
        """Wait until a server listens (it writes its pid then); return False if its port is taken.

        Raises PreflightError for another problem in its log, and after 10 s.
        """
        log = self._config(node).with_suffix(".log")
        deadline = time.monotonic() + WAIT
        while not self._read_server(node).alive:
            output = log.read_text(errors="replace").strip() if log.exists() else ""
            if "Bind to port" in output:  # the first of two lines: the second may not be there yet
                return False
            if output or time.monotonic() > deadline:
                what = f"sshd of node {node} did not start: {output or 'it says nothing'}"
                raise PreflightError(what, f"see {self._config(node)}")
            time.sleep(0.002)
        return True


# -- ending


def _end(servers: Iterable[Server]) -> list[str]:
    """Kill servers and all their descendants, and return a line for each server that ran.

    All of them are stopped before one is killed, so that none starts another process. Raises Survivors if some do not end in 10
    s.
    """
    doomed: set[Process] = set()
    ended = []
    for server in servers:
        if server.alive:
            tree = _freeze(server.process)
            doomed |= tree
            ended.append(f"{server}" + (f" and {len(tree) - 1} processes of its sessions" if len(tree) > 1 else ""))
    for process in doomed:
        processes.signal_one(process, signal.SIGKILL)
    deadline = time.monotonic() + WAIT
    while alive := [process for process in doomed if processes.alive(process)]:
        if time.monotonic() > deadline:
            pids = sorted(process.pid for process in alive)
            fix = f"see: ps -fp {','.join(map(str, pids))}"
            raise Survivors(f"processes of the embedded cluster do not end: {', '.join(map(str, pids))}", fix)
        time.sleep(0.005)
    return ended


def _freeze(server: Process) -> set[Process]:
    """Stop a process and its descendants (SIGSTOP) until there is no new one, and return all of them.

    This process is left out: it may run in a session of a node.
    """
    tree: set[Process] = set()
    new = {server}
    while new:
        for process in new:
            processes.signal_one(process, signal.SIGSTOP)
        tree |= new
        found = {child for process in new for child in processes.descendants(process.pid) if processes.alive(child)}
        new = {child for child in found - tree if child.pid != os.getpid()}
    return tree


# -- what must be there


def _sshd() -> str:
    """Find the path of sshd: on PATH, else in the usual folders. Raises PreflightError without it, and if this is not Linux."""
    if not sys.platform.startswith("linux"):
        raise PreflightError("the embedded local cluster needs Linux", "name Linux nodes in a conf.py")
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/sbin"])
    sshd = shutil.which("sshd", path=path)
    fix = "apt-get install openssh-server (or your system's package of that name); or name real machines in a conf.py"
    if not sshd:
        raise PreflightError("the embedded local cluster needs sshd, which is not here", fix)
    return str(Path(sshd).absolute())  # sshd wants to start itself again by an absolute path


def _check_user() -> None:
    """Raise PreflightError for a user that cannot log in, as sshd would only report a failed login; as root, make /run/sshd."""
    try:
        shell = pwd.getpwuid(os.geteuid()).pw_shell
    except KeyError:
        what = f"uid {os.geteuid()} is not in passwd, sshd cannot let it in"
        raise PreflightError(what, "run as a real user") from None
    if Path(shell).name in ("nologin", "false"):
        raise PreflightError(f"the login shell of this user is {shell}", "run as a user who can log in")
    if os.geteuid() == 0 and Path("/run").is_dir():
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # its privilege separation; Debian's service file makes it


@functools.lru_cache(maxsize=1)
def _line_for_newer(sshd: str) -> str:
    """Return the line of the configuration for OpenSSH 9.8 and newer, "" for older servers, which do not know it.

    Without it they would lock out the one address after some failures.
    """
    done = subprocess.run([sshd, "-V"], stdin=subprocess.DEVNULL, capture_output=True)
    # One that is too old for -V prints it in its usage.
    version = re.search(rb"OpenSSH_(\d+)\.(\d+)", done.stderr + done.stdout)
    return "PerSourcePenalties no\n" if version and tuple(map(int, version.groups())) >= (9, 8) else ""


def _root_is_locked() -> bool:
    """Check whether this user is root, and locked ("!" in shadow: Ubuntu's sudo): sshd then allows keys only if it asks PAM."""
    if os.geteuid() != 0 or not Path("/etc/shadow").exists():
        return False
    return any(line.startswith("root:!") for line in Path("/etc/shadow").read_text(encoding="utf-8").splitlines())


def _key_pair() -> tuple[str, str]:
    """Make an Ed25519 key, and return (private, public) in OpenSSH's own forms."""
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode(), public.decode()
