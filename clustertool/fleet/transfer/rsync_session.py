"""A session of rsync copies a folder over a channel of the open connection: one login, and every wait has an end.

The local rsync gets bridge.py for its remote shell. What it wants to run on the node is run by us, in the directory that is
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
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from clustertool.errors import ClustertoolError, DispatchError, NotFound
from clustertool.ssh.channel import BROKEN, BULK_WINDOW, Pipe, Reachable
from clustertool.ssh.dial import end_group, signal_group

SLICE = 0.05  # seconds between two calls of `check` and tests of the connection
STALL = 60  # seconds without a byte after which rsync gives up
_START = 20.0  # seconds for the node's shell to start
_TAIL = 8192  # bytes kept of rsync's output
_BRIDGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bridge.py")
_MISSING = "clustertool: rsync is missing"
_NO_DIRECTORY = "clustertool: no such directory"

Check = Callable[[], None]


class RsyncMissing(DispatchError):
    """There is no rsync, here or on the node."""


@dataclass(frozen=True)
class Copied:
    """Bytes that came over the connection, and the files whose content went over it."""

    bytes: int
    files: int


def pull(link: Reachable, remote: str, target: Path, check: Check | None = None) -> Copied:
    """Copy a directory of the node into `target` here, which is made.

    Links that lead out of the directory are left out. Raises NotFound, RsyncMissing, DispatchError, Unreachable.
    """
    os.makedirs(target, exist_ok=True)
    options = ["--recursive", "--links", "--safe-links", "--executability", "node:./", "./"]
    try:
        return _Session(link, remote, options, target).run(check)
    except NotFound:
        with contextlib.suppress(OSError):  # not empty: it was there before
            os.rmdir(target)
        raise


def push(
    link: Reachable,
    source: Path,
    names: Iterable[str],
    remote: str,
    moved: Callable[[int], None],
    check: Check | None = None,
) -> None:
    """Copy files below `source` into a directory of the node, which is there. `moved` gets the bytes as they are sent.

    Only their content and times are copied. Raises NotFound, RsyncMissing, DispatchError, Unreachable.
    """
    options = ["--files-from=-", "--from0", "--no-implied-dirs", "--chmod=D0700,F0600", "--partial", "./", "node:./"]
    with tempfile.TemporaryFile() as listed:
        listed.write(b"".join(os.fsencode(name) + b"\0" for name in names))
        listed.seek(0)
        _Session(link, remote, options, source, listed, moved).run(check)


class _Session:
    """One local rsync process, from its start to its end. `folder`: where it runs; `stdin`: what it reads.

    `moved`: it sends, and reports the bytes here; None: it receives.
    """

    def __init__(
        self,
        link: Reachable,
        remote: str,
        options: Sequence[str],
        folder: Path,
        stdin: IO[bytes] | None = None,
        moved: Callable[[int], None] | None = None,
    ) -> None:
        self._link = link
        self._script = b"[ -d %s ] || { echo '%s' >&2; exit 66; }\ncd -- %s || exit 73\n" % (
            _quoted(remote),
            _NO_DIRECTORY.encode(),
            _quoted(remote),
        )
        self._options = options
        self._folder = folder
        self._stdin = stdin
        self._moved = moved
        self._output: dict[str, bytes] = {"out": b"", "err": b""}
        self._ended = 0.0
        self._progress = time.monotonic(), 0  # when bytes crossed last, and how many had by then

    def run(self, check: Check | None) -> Copied:
        """Copy, and check every SLICE seconds what could end it early."""
        ours, theirs = socket.socketpair()
        relay = _Relay(self._link, ours, self._script, self._moved)
        with ours, theirs:
            process = self._start(theirs)
            theirs.close()
            try:
                for _ in self._rounds(process, relay):
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
        return Copied(relay.down, _transferred(self._output["out"]))

    def _start(self, bridge: socket.socket) -> subprocess.Popen[bytes]:
        rsync = shutil.which("rsync")
        if not rsync:
            raise RsyncMissing("rsync is missing on this machine", "install the package rsync here", self._link.node)
        shell = " ".join(_rsh(argument) for argument in (sys.executable, "-SE", _BRIDGE, str(bridge.fileno())))
        environ = {key: value for key, value in os.environ.items() if not key.startswith("RSYNC_")}
        # -1: nanoseconds count too; else a file changed twice in a second would not be fetched again
        common = ["--times", "--modify-window=-1", "-s", "--stats", f"--timeout={STALL}", "-e", shell]
        return subprocess.Popen(
            [rsync, *common, *self._options],
            cwd=self._folder,
            stdin=self._stdin or subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[bridge.fileno()],
            start_new_session=True,
            env={**environ, "LC_ALL": "C"},
        )

    def _rounds(self, process: subprocess.Popen[bytes], relay: _Relay) -> _Rounds:
        assert process.stdout and process.stderr
        return _Rounds({"out": process.stdout, "err": process.stderr}, relay, self._output)

    def _over(self, process: subprocess.Popen[bytes]) -> bool:
        """rsync has ended, but its bridge keeps its outputs open (a node that froze never reports an exit code)."""
        if process.poll() is None:
            return False
        self._ended = self._ended or time.monotonic()
        return time.monotonic() - self._ended > 2.0

    def _alive(self, relay: _Relay) -> None:
        """Its own --timeout guards only the side that sends: a receiver waits for a frozen node for ever."""
        if relay.failure:
            raise relay.failure
        moved = relay.down + (relay.up if self._moved else 0)  # as a receiver rsync sends signs of life up
        if moved != self._progress[1]:
            self._progress = time.monotonic(), moved
        if time.monotonic() - self._progress[0] > STALL:
            fix = "check the node and the network, then try again"
            raise DispatchError(f"nothing moved for {STALL} s", fix, self._link.node)
        if not self._link.alive:
            raise self._link.lost("the connection was lost while files were copied")

    def _failure(self, code: int, relay: _Relay) -> ClustertoolError:
        """Why rsync failed, from the output of both sides."""
        node = self._link.node
        if relay.failure:
            return relay.failure
        text = (self._output["err"] + relay.errors).decode(errors="replace")
        last = "\n".join(text.strip().splitlines()[-5:]) or f"rsync ended with code {code}"
        if _MISSING in text:
            return RsyncMissing("rsync is missing there", "install the package rsync on that node", node)
        if _NO_DIRECTORY in text:
            return NotFound("no such directory there", "check the path and the job", node)
        for sign, what, fix in (*(_THERE if self._moved else _HERE), *_KNOWN):
            if sign in text:
                line = next(line for line in text.splitlines() if sign in line)
                return DispatchError(f"{what}: {line.strip()}", fix, node)
        if not self._link.alive:
            return self._link.lost(f"the connection was lost while files were copied: {last}")
        return DispatchError(f"rsync failed (code {code}): {last}", "correct this and try again", node)


_TO_ANOTHER_DISK = "free some space, or fetch to another disk: --to DIR"
_ROOM_THERE = "make room (inv clean --older-than 7d), or choose another ROOT_DIR"
_HERE = (
    ("No space left on device", "the disk here is full", _TO_ANOTHER_DISK),
    ("Disk quota exceeded", "the disk quota here is used up", _TO_ANOTHER_DISK),
    ("Read-only file system", "the file system here cannot be written", "fetch to another place: --to DIR"),
)
_THERE = (
    ("No space left on device", "the disk there is full", _ROOM_THERE),
    ("Disk quota exceeded", "the disk quota there is used up", _ROOM_THERE),
    ("Read-only file system", "the file system there cannot be written", "choose another ROOT_DIR"),
)
_KNOWN = (
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


class _Rounds:
    """Iterates until rsync has closed its outputs (it has ended then); a round is an event or SLICE seconds."""

    def __init__(self, streams: dict[str, IO[bytes]], relay: _Relay, output: dict[str, bytes]) -> None:
        self._relay = relay
        self._output = output
        self._open = set(streams)
        self._selector = selectors.DefaultSelector()
        for name, stream in streams.items():
            self._selector.register(stream, selectors.EVENT_READ, name)
        self._selector.register(relay.bridge, selectors.EVENT_READ, "bridge")

    def __iter__(self) -> _Rounds:
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
            self._output[key.data] = (self._output[key.data] + data)[-_TAIL:]


class _Relay:
    """Between the bridge's two pipes and a channel of the connection; it counts the bytes that go up and come down."""

    def __init__(
        self, link: Reachable, bridge: socket.socket, script: bytes, moved: Callable[[int], None] | None
    ) -> None:
        self.bridge = bridge
        self.up = self.down = 0
        self._moved = moved
        self.errors = b""
        self.failure: ClustertoolError | None = None
        self._link = link
        self._script = script
        self._pipe: Pipe | None = None
        self._ended = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """The bridge has written: take its pipes and its command, and go on in threads."""
        command, pipes = _receive(self.bridge)
        if len(pipes) == 2:
            self._in_thread(self._run, command, pipes[0], pipes[1])
        else:
            self.failure = DispatchError("rsync's bridge gave up", "try again", self._link.node)

    def end(self) -> None:
        """End all threads of the transfer, at the latest a moment later."""
        self._ended = True
        if self._pipe:
            self._pipe.close()
        for thread in self._threads:
            thread.join(1.0)

    def _in_thread(self, do: Callable[..., None], *values: object) -> None:
        thread = threading.Thread(target=do, args=values, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, arguments: list[bytes], source: int, target: int) -> None:
        """The remote side: start it, feed it, and pass on what it answers and how it ended."""
        command = (
            b"LC_ALL=C; export LC_ALL\ncommand -v rsync >/dev/null 2>&1 || { echo '%s' >&2; exit 127; }\n%sexec %s\n"
            % (
                _MISSING.encode(),
                self._script,
                b" ".join(_quoted(argument) for argument in arguments),
            )
        )
        try:
            pipe = self._pipe = self._link.pipe(command, window=BULK_WINDOW, timeout=_START)
            if self._ended:
                pipe.close()
            self._in_thread(self._upward, pipe, source)
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
                    self.up += sent
                    if self._moved:
                        self._moved(sent)
                    data = data[sent:]
            pipe.channel.shutdown_write()
        except BROKEN:  # the channel has closed; the other direction has the reason
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
        except BROKEN:  # rsync or the connection has ended: the main loop detects both
            return

    def _tell(self, code: int) -> None:
        try:
            self.bridge.send(bytes([code if 0 <= code < 256 else 255]))
        except OSError:  # the bridge has ended with its rsync
            return


def _receive(bridge: socket.socket) -> tuple[list[bytes], list[int]]:
    """The bridge's message: the arguments of the remote command, and its stdin and stdout."""
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


def _rsh(argument: str) -> str:
    """An argument of rsync's -e, which knows quotes and nothing else: a doubled quote stands for itself."""
    return '"' + argument.replace('"', '""') + '"'


def _quoted(argument: str | bytes) -> bytes:
    """An argument for the node's sh, byte for byte."""
    return os.fsencode(shlex.quote(os.fsdecode(argument)))


def _transferred(output: bytes) -> int:
    match = re.search(rb"Number of (?:regular )?files transferred: ([\d,.]+)", output)
    return int(re.sub(rb"\D", b"", match[1])) if match else 0
