"""Fetching by rsync over a channel of the open connection: one login, one host-key check, and every wait has an end.

The local rsync gets bridge.py for its remote shell; what it wants to run there is run by us, in the directory that is
meant, so that no path of the user's is ever read by a shell or expanded by rsync (`-s`, target `.`). rsync has its own
session, and its whole group is ended when the caller is interrupted or the connection is lost.
"""

from __future__ import annotations

import array
import contextlib
import os
import re
import selectors
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from clustertool.errors import ClustertoolError, DispatchError, NotFound
from clustertool.ssh.channel import BROKEN, BULK_WINDOW, Pipe, Reach
from clustertool.ssh.dial import end_group, signal_group

SLICE = 0.05  # seconds between two looks at `check` and the connection
STALL = 60  # seconds without a byte after which rsync gives up
_START = 20.0  # seconds for the node's shell to start
_TAIL = 8192  # bytes kept of what rsync says
_BRIDGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bridge.py")
_MISSING = "clustertool: rsync is missing"
_NO_DIRECTORY = "clustertool: no such directory"

Check = Callable[[], None]


@dataclass(frozen=True)
class Fetched:
    """What crossed the connection: bytes of rsync's stream, and the files whose content was in it."""

    bytes: int
    files: int


def pull(link: Reach, remote: str, target: Path, check: Check | None = None) -> Fetched:
    """Copy a directory of the node into `target` here, which is made.

    Links that lead out of the directory are left out. Raises NotFound, DispatchError, Unreachable.
    """
    os.makedirs(target, exist_ok=True)
    path = _quoted(remote)
    script = b"[ -d %s ] || { echo '%s' >&2; exit 66; }\ncd -- %s || exit 73\n" % (path, _NO_DIRECTORY.encode(), path)
    try:
        return _Job(link, script, target).run(check)
    except NotFound:
        with contextlib.suppress(OSError):  # not empty: it was there before
            os.rmdir(target)
        raise


class _Job:
    """One local rsync process, from its start to its end."""

    def __init__(self, link: Reach, script: bytes, target: Path) -> None:
        self._link = link
        self._script = script
        self._target = target
        self._said: dict[str, bytes] = {"out": b"", "err": b""}
        self._ended = 0.0
        self._moved = time.monotonic(), 0  # when bytes came last, and how many there were

    def run(self, check: Check | None) -> Fetched:
        """Copy, and look at everything that could end it early every SLICE seconds."""
        ours, theirs = socket.socketpair()
        relay = _Relay(self._link, ours, self._script)
        with ours, theirs:
            process = self._start(theirs)
            theirs.close()
            try:
                for _ in self._look(process, relay):
                    if check:
                        check()
                    self._alive(relay)
                    if self._over(process):
                        break
                code = process.wait(5)
            finally:
                _end(process)
                relay.end()
        if code:
            raise self._failure(code, relay)
        return Fetched(relay.down, _transferred(self._said["out"]))

    def _start(self, bridge: socket.socket) -> subprocess.Popen[bytes]:
        rsync = shutil.which("rsync")
        if not rsync:
            raise DispatchError("rsync is missing on this machine", "install the package rsync here", self._link.node)
        shell = " ".join(_rsh(word) for word in (sys.executable, "-SE", _BRIDGE, str(bridge.fileno())))
        environ = {key: value for key, value in os.environ.items() if not key.startswith("RSYNC_")}
        # -1: nanoseconds count too; else a file changed twice in a second would not be fetched again
        words = [
            "--recursive",
            "--links",
            "--safe-links",
            "--times",
            "--modify-window=-1",
            "--executability",
            "-s",
            "--stats",
        ]
        return subprocess.Popen(
            [rsync, *words, f"--timeout={STALL}", "-e", shell, "node:./", "./"],
            cwd=self._target,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[bridge.fileno()],
            start_new_session=True,
            env={**environ, "LC_ALL": "C"},
        )

    def _look(self, process: subprocess.Popen[bytes], relay: _Relay) -> _Looks:
        assert process.stdout and process.stderr
        return _Looks({"out": process.stdout, "err": process.stderr}, relay, self._said)

    def _over(self, process: subprocess.Popen[bytes]) -> bool:
        """rsync has ended, but its bridge keeps its outputs open (a node that froze never tells it an exit code)."""
        if process.poll() is None:
            return False
        self._ended = self._ended or time.monotonic()
        return time.monotonic() - self._ended > 2.0

    def _alive(self, relay: _Relay) -> None:
        """Its own --timeout guards only the side that sends: a receiver waits for a frozen node for ever."""
        if relay.failure:
            raise relay.failure
        if relay.down != self._moved[1]:
            self._moved = time.monotonic(), relay.down
        if time.monotonic() - self._moved[0] > STALL:
            fix = "check the node and the network, then try again"
            raise DispatchError(f"nothing moved for {STALL} s", fix, self._link.node)
        if not self._link.alive:
            raise self._link.lost("the connection was lost while files were copied")

    def _failure(self, code: int, relay: _Relay) -> ClustertoolError:
        """Why rsync failed, by what both sides said."""
        node = self._link.node
        if relay.failure:
            return relay.failure
        text = (self._said["err"] + relay.errors).decode(errors="replace")
        last = "\n".join(text.strip().splitlines()[-5:]) or f"rsync ended with code {code}"
        if _MISSING in text:
            return DispatchError("rsync is missing there", "install the package rsync on that node", node)
        if _NO_DIRECTORY in text:
            return NotFound("no such directory there", "check the path and the job", node)
        for sign, what, fix in _KNOWN:
            if sign in text:
                line = next(line for line in text.splitlines() if sign in line)
                return DispatchError(f"{what}: {line.strip()}", fix, node)
        if not self._link.alive:
            return self._link.lost(f"the connection was lost while files were copied: {last}")
        return DispatchError(f"rsync failed (code {code}): {last}", "correct this and try again", node)


_KNOWN: tuple[tuple[str, str, str], ...] = (
    ("No space left on device", "the disk here is full", "free some space, or fetch to another disk: --to DIR"),
    ("Disk quota exceeded", "the disk quota here is used up", "free some space, or fetch to another disk: --to DIR"),
    ("Read-only file system", "the file system here cannot be written", "fetch to another place: --to DIR"),
    ("Permission denied", "a permission is missing", "correct the permissions, on the node or here"),
    ("unknown option", "the two rsyncs do not fit together", "install rsync 3.1 or newer on both sides"),
    ("unrecognized option", "the two rsyncs do not fit together", "install rsync 3.1 or newer on both sides"),
    (
        "timeout in data send/receive",
        f"nothing moved for {STALL} s",
        "check the node and the network, then try again",
    ),
    ("vanished", "files went away while they were copied", "try again when nothing changes them"),
)


class _Looks:
    """Iterates until rsync has closed its outputs (it has ended then); a round is an event or SLICE seconds."""

    def __init__(self, streams: dict[str, IO[bytes]], relay: _Relay, said: dict[str, bytes]) -> None:
        self._relay = relay
        self._said = said
        self._open = set(streams)
        self._selector = selectors.DefaultSelector()
        for name, stream in streams.items():
            self._selector.register(stream, selectors.EVENT_READ, name)
        self._selector.register(relay.bridge, selectors.EVENT_READ, "bridge")

    def __iter__(self) -> _Looks:
        return self

    def __next__(self) -> None:
        if not self._open:
            self._selector.close()
            raise StopIteration
        for key, _ in self._selector.select(SLICE):
            if key.data == "bridge":
                self._selector.unregister(key.fileobj)
                self._relay.start()
                continue
            data = os.read(key.fd, 1 << 16)
            if not data:
                self._selector.unregister(key.fileobj)
                self._open.discard(key.data)
            self._said[key.data] = (self._said[key.data] + data)[-_TAIL:]


class _Relay:
    """Between the bridge's two pipes and a channel of the connection; it counts the bytes that come."""

    def __init__(self, link: Reach, bridge: socket.socket, script: bytes) -> None:
        self.bridge = bridge
        self.down = 0
        self.errors = b""
        self.failure: ClustertoolError | None = None
        self._link = link
        self._script = script
        self._pipe: Pipe | None = None
        self._ended = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """The bridge has written: take its pipes and its command, and go on beside the caller."""
        words, pipes = _receive(self.bridge)
        if len(pipes) == 2:
            self._beside(self._run, words, pipes[0], pipes[1])
        else:
            self.failure = DispatchError("rsync's bridge gave up", "try again", self._link.node)

    def end(self) -> None:
        """Nothing goes on after this, at the latest a moment later."""
        self._ended = True
        if self._pipe:
            self._pipe.close()
        for thread in self._threads:
            thread.join(1.0)

    def _beside(self, do: Callable[..., None], *values: object) -> None:
        thread = threading.Thread(target=do, args=values, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, words: list[bytes], source: int, target: int) -> None:
        """The remote side: start it, feed it, and pass on what it answers and how it ended."""
        command = (
            b"LC_ALL=C; export LC_ALL\ncommand -v rsync >/dev/null 2>&1 || { echo '%s' >&2; exit 127; }\n%sexec %s\n"
            % (
                _MISSING.encode(),
                self._script,
                b" ".join(_quoted(word) for word in words),
            )
        )
        try:
            pipe = self._pipe = self._link.pipe(command, window=BULK_WINDOW, timeout=_START)
            if self._ended:
                pipe.close()
            self._beside(self._upward, pipe, source)
            source = -1
            self._downward(pipe, target)
            code = pipe.code(5.0)
            self.errors = pipe.errors()[-_TAIL:]
            self._tell(code)
        except ClustertoolError as error:
            self.failure = error
        finally:
            _close(source)
            _close(target)

    def _upward(self, pipe: Pipe, source: int) -> None:
        size = (
            pipe.channel.out_max_packet_size - 64
        )  # what paramiko sends as one packet, so that nothing is cut and copied
        try:
            while True:
                data = os.read(source, size)
                if not data:
                    break
                while data:
                    sent = pipe.channel.send(data)
                    if not sent:
                        return
                    data = data[sent:]
            pipe.channel.shutdown_write()
        except BROKEN:  # the channel has closed; the other direction tells why
            return
        finally:
            _close(source)

    def _downward(self, pipe: Pipe, target: int) -> None:
        try:
            while True:
                data = pipe.recv()
                if not data:
                    return
                self.down += len(data)
                view = memoryview(data)
                while view:
                    view = view[os.write(target, view) :]
        except BROKEN:  # rsync or the connection has gone: both are looked at elsewhere
            return

    def _tell(self, code: int) -> None:
        try:
            self.bridge.send(bytes([code if 0 <= code < 256 else 255]))
        except OSError:  # the bridge has gone with its rsync
            return


def _receive(bridge: socket.socket) -> tuple[list[bytes], list[int]]:
    """The bridge's message: the words of the remote command, and its stdin and stdout."""
    bridge.settimeout(5.0)
    number = array.array("i")
    try:
        data, extra, _, _ = bridge.recvmsg(1 << 16, socket.CMSG_SPACE(2 * number.itemsize))
        while 4 <= len(data) < 4 + struct.unpack(">I", data[:4])[0]:
            more = bridge.recv(1 << 16)
            if not more:
                break
            data += more
    except OSError:
        return [], []
    for level, kind, content in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            number.frombytes(content[: len(content) - len(content) % number.itemsize])
    for pipe in number:
        os.set_blocking(pipe, True)  # rsync makes them non-blocking; its own ends stay so
        os.set_inheritable(pipe, False)
    return data[4:].split(b"\0"), list(number)


def _end(process: subprocess.Popen[bytes]) -> None:
    """No process of rsync's group lives after this. TERM first: rsync removes its half-written files."""
    end_group(process, signal.SIGTERM, 1.0)
    signal_group(process.pid, signal.SIGKILL)  # the bridge, if rsync went without it
    for stream in (process.stdout, process.stderr):
        if stream:
            stream.close()


def _close(handle: int) -> None:
    if handle >= 0:
        os.close(handle)


def _rsh(word: str) -> str:
    """A word of rsync's -e, which knows quotes and nothing else: a doubled quote stands for itself."""
    return '"' + word.replace('"', '""') + '"'


def _quoted(word: str | bytes) -> bytes:
    """A word for the node's sh, byte for byte."""
    return os.fsencode(shlex.quote(os.fsdecode(word)))


def _transferred(said: bytes) -> int:
    match = re.search(rb"Number of (?:regular )?files transferred: ([\d,.]+)", said)
    return int(re.sub(rb"\D", b"", match[1])) if match else 0
