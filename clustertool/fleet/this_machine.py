"""This machine is a node with a child /bin/sh in place of an ssh channel. All other code is the same.

    link = HereLink(node(folder))
    agent = Agent.open(link, link.host, cluster)

The node's ROOT_DIR is `.clustertool` in the folder where the job was started, so verbs in this folder find the job, and
its records are removed with the folder.
"""

from __future__ import annotations

import itertools
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from clustertool.errors import PreflightError, Unreachable, UsageError
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.paths import OURS
from clustertool.model.planning.devices import VARIABLES
from clustertool.ssh.channel import SHELL, Pipe, open_pipe

_ADDRESS = "127.0.0.1"  # as the launchers of one machine have it
_PACKET = 1 << 17


def alone(folder: Path, known: Cluster | None = None) -> Cluster:
    """This machine as a cluster, for jobs in `folder`. `known`: a conf.py whose other keys count."""
    if not sys.platform.startswith("linux"):
        raise PreflightError("jobs on this machine alone need Linux", "name Linux nodes with --ips or in conf.py")
    host = node(folder)
    base = known or Cluster((host,), where="this machine")
    off = (*base.checks_off, "ping", "rsync")  # nothing is sent
    return replace(
        base, hosts=(host,), root_dir=host.root_dir, python=sys.executable, checks_off=off, first_path=_first_path()
    )


def as_shown(cluster: Cluster, environ: Mapping[str, str]) -> Cluster:
    """With the devices that the shell lets one see and no others."""
    kind, ids = visible(environ)
    hosts = tuple(replace(host, devices=ids) for host in cluster.hosts)
    return replace(
        cluster, hosts=hosts, device_kind=kind if kind and cluster.device_kind == "auto" else cluster.device_kind
    )


def node(folder: Path) -> Host:
    """This machine, as later commands from the same folder know it."""
    name = socket.gethostname()
    return Host(0, name, address=_ADDRESS, root_dir=str(folder / OURS), name=name, here=True)


def found(folder: Path) -> Path | None:
    """The folder with this user's jobs of this machine: this one, or the next above it."""
    return next((top for top in (folder, *folder.parents) if _ours(top / OURS)), None)


def _ours(records: Path) -> bool:
    """Whether jobs lie there, in a real folder of this user: another user may have put one into /tmp."""
    try:
        info = os.lstat(records)
        return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and os.path.isfile(records / OURS / "marker")
    except OSError:
        return False


def visible(environ: Mapping[str, str]) -> tuple[str, tuple[int, ...] | None]:
    """Kind and ids of the devices that this shell may use, ("", None) if it says nothing. No id at all is kind cpu.

    Raises UsageError for ids that are no numbers.
    """
    limits = {kind: environ[name] for kind, (name, _) in VARIABLES.items() if environ.get(name, "all").strip() != "all"}
    for kind, text in limits.items():
        ids = [one.strip() for one in text.split(",") if one.strip()]
        ids = list(itertools.takewhile(lambda one: not one.startswith("-"), ids))  # -1 hides itself and what follows
        odd = next((one for one in ids if not one.isdecimal()), "")
        if odd:
            what = f"{VARIABLES[kind][0]}={text}: {odd!r} is no number"
            raise UsageError(what, "write the devices' numbers, as nvidia-smi -L has them")
        if ids:
            return kind, tuple(map(int, ids))
    return ("cpu" if limits else ""), None


def _first_path() -> str:
    """The tool's own interpreter runs the job, unless the user has activated an environment, which is on PATH already."""
    activated = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    return "" if activated else str(Path(sys.executable).parent)


class HereLink:
    """What a Link is to a node behind ssh."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.alive = True
        self.quick = True
        self._channels: list[HereChannel] = []

    @property
    def node(self) -> str:
        return self.host.name

    @property
    def waiting(self) -> int:
        """Bytes in flight: 0, since no network is involved."""
        return 0

    def channel(self, command: bytes | str = SHELL, *, window: int = 0, timeout: float = 10.0) -> HereChannel:
        self._channels.append(HereChannel(os.fsdecode(command)))
        return self._channels[-1]

    def pipe(self, script: bytes, *, window: int = 0, timeout: float = 10.0) -> Pipe:
        return open_pipe(self, script, window=window, timeout=timeout)

    def lost(self, why: str) -> Unreachable:
        return Unreachable(why, "is this machine overloaded?", self.node)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


class HereChannel:
    """A shell in a session of its own (a terminal's Ctrl+C does not reach it), with the used functions of paramiko's
    channel."""

    out_max_packet_size = _PACKET

    def __init__(self, command: str) -> None:
        ours, theirs = socket.socketpair()
        reading, errors = os.pipe()
        os.set_blocking(reading, False)
        self._errors = open(reading, "rb", buffering=0)  # noqa: SIM115 - read to the end by the last user
        self._error_output = b""
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                cwd="/",
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=errors,
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(errors)
        self._socket = ours
        self.settimeout: Callable[[float | None], None] = ours.settimeout
        self.sendall: Callable[[bytes], None] = ours.sendall
        self.send: Callable[[bytes], int] = ours.send
        self.recv: Callable[[int], bytes] = ours.recv
        self.closed = False
        self.exit_status = -1
        self.status_event = threading.Event()
        threading.Thread(target=self._reap, daemon=True).start()

    @property
    def eof_received(self) -> bool:
        return self.status_event.is_set()

    def shutdown_write(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def recv_stderr_ready(self) -> bool:
        """Bytes are there; at the end of the stream none are, as with paramiko."""
        self._error_output = self._error_output or self._errors.read(1 << 16) or b""
        return bool(self._error_output)

    def recv_stderr(self, size: int) -> bytes:
        data, self._error_output = self._error_output[:size], self._error_output[size:]
        return data

    def close(self) -> None:
        """Close this side: the shell gets EOF, its outputs fail, and waiting threads wake up."""
        if self.closed:
            return
        self.closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended already
            pass
        self._socket.close()

    def _reap(self) -> None:
        code = self._process.wait()
        self.exit_status = code if code >= 0 else 128 - code
        self.status_event.set()
