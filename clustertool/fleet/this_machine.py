"""This machine is a node with a child /bin/sh in place of an ssh channel. All other code is the same.

    link = HereLink(host_in_folder(folder))
    agent = AgentClient.open(link, link.host, cluster)

The node's ROOT_DIR is `.clustertool` in the folder where the job was started, so verbs in this folder find the job, and
its records are removed with the folder.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from clustertool.errors import PreflightError, Unreachable
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.launcher_variables import SHELL_DEFAULTS, without_secret
from clustertool.model.paths import OURS
from clustertool.node.storage import files
from clustertool.node.system import processes, programs, users
from clustertool.ssh.channel import NO_SHELL, Programs, Shells

_ADDRESS = "127.0.0.1"  # as the launchers of one machine have it
_PACKET = 1 << 17
_TURN = 0.02  # seconds between two tests of the streams of a child
SHELL = ("/bin/sh",)


def own_cluster(folder: Path, known: Cluster | None = None) -> Cluster:
    """Build the cluster whose only host is this machine, for jobs in `folder`, with the interpreter of this command.

    known: the cluster of a conf.py, whose other keys stay. The checks of ping and rsync are off, and shell_defaults() are put
    in front of ENV. Raises PreflightError where the system is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise PreflightError("jobs on this machine alone need Linux", "name Linux nodes with --ips or in conf.py")
    host = host_in_folder(folder)
    base = known or Cluster((host,), where="this machine")
    off = (*base.checks_off, "ping", "rsync")  # nothing is sent
    env = (*shell_defaults(), *base.env)
    own = replace(base, hosts=(host,), root_dir=host.root_dir, checks_off=off, env=env)
    first, _ = _python_rule()
    return replace(own, python=sys.executable, first_path=first)


def with_job_python(cluster: Cluster) -> Cluster:
    """Return the cluster with a `job_python` that states path and version of its jobs' `python3`, and the rule that chose it.

    It is "" if no python3 is found. Returns the cluster unchanged where PRELUDE or an image decides this.
    """
    if cluster.prelude or cluster.container.image:
        return cluster
    folders = [cluster.first_path, *dict(cluster.env).get("PATH", os.environ.get("PATH", os.defpath)).split(os.pathsep)]
    path, version = programs.python3(folders)
    rule = _python_rule()[1]
    return replace(cluster, job_python=f"{path} {version}, {rule}" if path else "")


def _python_rule() -> tuple[str, str]:
    """Choose the folder to put first on PATH of this machine's jobs, "" to leave PATH as it is; return it with the rule.

    It is the folder of this interpreter, if no environment is activated, and clusterrun is not on PATH or PATH has no python3.
    """
    own = str(Path(sys.executable).parent)
    activated = next((name for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if os.environ.get(name)), "")
    if activated:
        return "", f"by PATH of the environment that is activated ({activated})"
    started = os.path.realpath(os.path.dirname(os.path.abspath(sys.argv[0])))
    if started not in map(os.path.realpath, os.get_exec_path()):
        return own, "the one of clusterrun, which was started by a path outside of PATH"
    if not shutil.which("python3"):
        return own, "the one of clusterrun, as PATH has no python3"
    return "", "the first on PATH"


def shell_defaults() -> tuple[tuple[str, str], ...]:
    """Return (name, value) of the variables SHELL_DEFAULTS that are set in this shell: they replace the defaults of the job."""
    return tuple((name, os.environ[name]) for name in SHELL_DEFAULTS if name in os.environ)


def shell_environment() -> dict[str, str]:
    """Copy the environment for a program to start: without CLUSTERTOOL_SECRET, and LC_CTYPE as before Python changed it."""
    return without_secret(processes.own_environment())


def host_in_folder(folder: Path) -> Host:
    """Describe this machine as a host whose ROOT_DIR is `.clustertool` in `folder`."""
    return host(str(folder / OURS))


def host(root_dir: str = "") -> Host:
    """Describe this machine as an entry of HOSTS, with its host name and the address 127.0.0.1."""
    name = socket.gethostname()
    return Host(0, name, address=_ADDRESS, root_dir=root_dir, name=name, here=True)


def folder_of_jobs(folder: Path) -> Path | None:
    """Find the nearest folder, `folder` or one above it, where this user has started jobs of this machine; else None."""
    return next((top for top in (folder, *folder.parents) if _has_own_jobs(top / OURS)), None)


def _has_own_jobs(records: Path) -> bool:
    """Check whether `records` has the marker of jobs, and is a real folder of this user.

    Another user may have put a folder or a link of this name into /tmp.
    """
    with contextlib.suppress(OSError):
        return files.is_own_dir(str(records)) and os.path.isfile(records / OURS / files.MARKER)
    return False


def user() -> str:
    """Return the name of this user as Facts.user has it."""
    return users.name_of(os.getuid())


def machine() -> str:
    """Identify this machine by its boot id and network namespace, as Facts.machine does; "" where it has none (not Linux)."""
    try:
        return f"{processes.boot_id()}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


class HereLink:
    """The link to this machine, as an SshLink to a node: it starts a program, usually a shell, for each channel.

    argv: the program, whose stdin and stdout are those of a shell.
    """

    noise = b""
    no_shell = NO_SHELL

    def __init__(self, host: Host, argv: Sequence[str] = SHELL) -> None:
        self.host = host
        self._argv = argv
        self.node = host.name
        self.alive = True
        self.waiting = 0  # bytes in flight: no network is involved
        self.times: Mapping[str, float] = {}
        self._channels: list[HereChannel] = []

    def channel(self, *, window: int = 0, timeout: float = 10.0) -> HereChannel:
        """Start a shell, and return its channel. The parameters are those of an SshLink, and have no effect."""
        self._channels.append(HereChannel(self._argv))
        return self._channels[-1]

    def run(self, argv: Sequence[str]) -> int:
        """Run a program on the terminal of this process, and return its exit code: 128 + N if signal N ended it.

        Ctrl+C reaches the program, and is ignored here.
        """
        with subprocess.Popen(argv, env=shell_environment()) as child:
            while True:
                with contextlib.suppress(KeyboardInterrupt):  # Ctrl+C is for the program
                    code = child.wait()
                    return code if code >= 0 else 128 - code

    def lost(self, why: str) -> Unreachable:
        """Build the error of a connection to this machine that has ended."""
        return Unreachable(why, "is this machine overloaded?", self.node)

    def close(self) -> None:
        """Close all channels."""
        for channel in self._channels:
            channel.close()


class HereChannel:
    """A shell of this machine with those functions of paramiko's channel that are used.

    It has a session of its own: a terminal's Ctrl+C does not reach it.
    """

    out_max_packet_size = _PACKET

    def __init__(self, argv: Sequence[str] = SHELL) -> None:
        ours, theirs = socket.socketpair()
        self._errors, their_errors = socket.socketpair()
        with theirs, their_errors:
            fd, errors = theirs.fileno(), their_errors.fileno()
            environ = shell_environment()  # the job's processes have this one
            self._process = subprocess.Popen(
                argv, cwd="/", env=environ, stdin=fd, stdout=fd, stderr=errors, start_new_session=True
            )
        self._socket = ours
        self.settimeout: Callable[[float | None], None] = ours.settimeout
        self.sendall: Callable[[bytes], None] = ours.sendall
        self.send: Callable[[bytes], int] = ours.send
        self.recv: Callable[[int], bytes] = ours.recv
        self.recv_stderr: Callable[[int], bytes] = self._errors.recv
        self.closed = False
        self.exit_status = -1
        self.status_event = threading.Event()
        threading.Thread(target=self._reap, daemon=True).start()

    @property
    def eof_received(self) -> bool:
        """Whether the shell has ended."""
        return self.status_event.is_set()

    def shutdown_write(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def recv_ready(self) -> bool:
        """Check whether bytes of stdout are there; False at the end of the stream, as with paramiko."""
        return _has_bytes(self._socket)

    def recv_stderr_ready(self) -> bool:
        return _has_bytes(self._errors)

    def wait(self, seconds: float) -> None:
        """Wait until bytes of stdout or stderr are there, or the shell has ended; at most `seconds`."""
        end = time.monotonic() + seconds
        while not (self.recv_ready() or self.recv_stderr_ready() or self.status_event.wait(_TURN)):
            if time.monotonic() > end:
                return

    def close(self) -> None:
        """Close stdin and stdout on this side: the shell gets EOF, its writes fail, and threads that receive wake up."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _reap(self) -> None:
        """Wait for the shell to end, and set its exit status: 128 + N if signal N ended it."""
        code = self._process.wait()
        self.exit_status = code if code >= 0 else 128 - code
        self.status_event.set()


def _has_bytes(stream: socket.socket) -> bool:
    """Check whether a socket has bytes to receive, without a wait; False at the end of the stream, and where it is closed."""
    waiting = select.poll()
    with contextlib.suppress(OSError, ValueError):  # it is closed
        waiting.register(stream, select.POLLIN)
        return bool(waiting.poll(0)) and bool(stream.recv(1, socket.MSG_PEEK))
    return False


class Link(Shells, Protocol):
    """A connection to a node: ssh, a child process, or one of an engine. A channel has the functions of HereChannel.

    times: seconds of the phases of its start. waiting: bytes that are on their way, 0 if not known.
    """

    @property
    def times(self) -> Mapping[str, float]: ...

    @property
    def waiting(self) -> int: ...

    def close(self) -> None: ...


@runtime_checkable
class ProgramLink(Link, Programs, Protocol):
    """A link of an engine that starts programs. root_group: see path_trust.py."""

    @property
    def root_group(self) -> str: ...
