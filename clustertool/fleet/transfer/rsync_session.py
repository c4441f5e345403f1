"""A session of rsync copies a folder over a channel of the open connection: one login, and every wait has an end.

The local rsync gets bridge.py for its remote shell. What it wants to run on the node is run by us, in the directory that is
meant, so that no path of the user's is ever read by a shell or expanded by rsync (`-s`, target `.`). rsync has its own
session, and its whole group is ended when the caller is interrupted or the connection is lost.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from clustertool.errors import ClustertoolError, DispatchError, NotFound, PreflightError
from clustertool.fleet.this_machine import Link
from clustertool.model.hints import PROGRAM
from clustertool.ssh.channel import BROKEN, KEEP, Greeting, discard, ended_by_loss, read_errors
from clustertool.ssh.dial import end_group, signal_group

SLICE = 0.05  # seconds between two calls of `check` and tests of the connection
STALL = 60  # seconds without a byte after which rsync gives up
_START = 20.0  # seconds for the node's shell to start
_TAIL = 8192  # bytes kept of rsync's output
_CHUNK = 1 << 18
_WINDOW = 1 << 24
_BRIDGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bridge.py")
_MISSING = "clustertool: rsync is missing"
_NO_DIRECTORY = "clustertool: no such directory"
_SCRIPT = b"""\
LC_ALL=C; export LC_ALL
command -v rsync >/dev/null 2>&1 || { echo '%s' >&2; exit 127; }
[ -d %%s ] || { echo '%s' >&2; exit 66; }
cd -- %%s || exit 73
exec %%s""" % (_MISSING.encode(), _NO_DIRECTORY.encode())

_FILES, _SIZE = rb"Number of (?:regular )?files transferred", rb"Total transferred file size"  # lines of --stats
Check = Callable[[], None]


class RsyncMissing(DispatchError):
    """The error of a missing rsync, on this machine or on the node."""


@dataclass(frozen=True)
class Copied:
    """The files whose content came over the connection, and their size in bytes."""

    bytes: int
    files: int


def pull(
    link: Link, remote: str, target: Path, check: Check | None = None, names: Iterable[str] | None = None
) -> Copied:
    """Copy a directory of the node into `target` here, which is made. names: only these entries of it, by their paths.

    Links that lead out of the directory are left out. Raises what _Session.run() raises, and OSError if `target` cannot be
    made. With NotFound `target` is removed if it is empty.
    """
    os.makedirs(target, exist_ok=True)
    which = ["--recursive"] if names is None else ["--files-from=-", "--from0"]
    options = [*which, "--links", "--safe-links", "--executability", "node:./", "./"]
    try:
        with _names_file(names or ()) as listed:
            return _Session(link, remote, options, target, None if names is None else listed).run(check)
    except NotFound:
        with contextlib.suppress(OSError):  # not empty: it was there before
            os.rmdir(target)
        raise


def pull_file(link: Link, remote: str, path: str, target: Path, check: Check | None = None) -> Copied:
    """Copy one regular file, by its path in a directory of the node, into `target` here, which exists and is empty.

    Raises what _Session.run() raises.
    """
    options = ["--files-from=-", "--from0", "--no-relative", "--executability", "node:./", "./"]
    with _names_file([path]) as listed:
        return _Session(link, remote, options, target, listed).run(check)


def push(
    link: Link, source: Path, names: Iterable[str], remote: str, moved: Callable[[int], None], check: Check
) -> None:
    """Copy files below `source` into a directory of the node, which is there. `moved` gets the number of bytes of each send.

    Only their content and times are copied: folders get mode 0700, files 0600. Raises what _Session.run() raises.
    """
    options = ["--files-from=-", "--from0", "--no-implied-dirs", "--chmod=D0700,F0600", "--partial", "./", "node:./"]
    with _names_file(names) as listed:
        _Session(link, remote, options, source, listed, moved).run(check)


@contextlib.contextmanager
def _names_file(names: Iterable[str]) -> Iterator[IO[bytes]]:
    """Return a context manager whose value is an open temporary file with the names, each with NUL behind it.

    --files-from=- with --from0 reads them so.
    """
    with tempfile.TemporaryFile() as file:
        file.write(b"".join(os.fsencode(name) + b"\0" for name in names))
        file.seek(0)
        yield file


class Pipe:
    """A script on a node, its stdin and stdout. What the login prints before it is dropped."""

    def __init__(self, link: Link, script: bytes, *, window: int = 0, timeout: float = 10.0) -> None:
        """Open a channel and start the script: see _start()."""
        self.channel = link.channel(window=window, timeout=timeout)
        self._mark = secrets.token_hex(16).encode()
        try:
            self._rest = self._start(link, script, timeout)
        except BaseException:
            self.close()
            raise

    def _start(self, link: Link, script: bytes, timeout: float) -> bytes:
        """Start the script, and return the bytes that came together with its start.

        Raises PreflightError if the login shell ends without starting it, and Unreachable if the connection breaks, or it has
        not started after `timeout` seconds.
        """
        greeting = Greeting(self.channel, link.node, timeout)
        try:
            greeting.start(b"printf %s >&2\n%s" % (self._mark, script))
            self.channel.settimeout(None)
        except EOFError:
            if ended_by_loss(self.channel, link):
                raise link.lost("the connection was lost") from None
            raise PreflightError(greeting.ended(), link.no_shell[1], link.node) from None
        except BROKEN as error:
            raise link.lost(f"the script did not start ({error or type(error).__name__})") from None
        return greeting.rest

    def recv(self) -> bytes:
        """Receive some bytes, b"" at the end. Waits until there are some, or the channel closes."""
        rest, self._rest = self._rest, b""
        return rest or bytes(self.channel.recv(_CHUNK))

    def code(self, timeout: float) -> int:
        """Wait for the exit code: -1 if none came within the time or the connection was lost."""
        self.channel.status_event.wait(timeout)
        return int(self.channel.exit_status)

    def errors(self) -> bytes:
        """Return what the script has written to stderr so far (read it when it has ended)."""
        return read_errors(self.channel, KEEP).partition(self._mark)[2]

    def close(self) -> None:
        discard(self.channel)


@dataclass
class _Session:
    """One local rsync process, from its start to its end, and the remote one on a channel of the connection."""

    link: Link
    remote: str  # the directory on the node
    options: Sequence[str]
    folder: Path  # where the local process runs
    stdin: IO[bytes] | None = None
    moved: Callable[[int], None] | None = None  # gets the bytes that are sent; None: it receives
    up: int = 0  # bytes that crossed
    down: int = 0
    progress: tuple[float, int] = (0.0, -1)  # when bytes crossed last, and how many had by then
    # The last bytes of each stream.
    output: dict[str, bytes] = field(default_factory=lambda: {"out": b"", "err": b"", "remote": b""})
    pipe: Pipe | None = None
    ended: bool = False
    error: ClustertoolError | None = None  # of the remote side

    def run(self, check: Check | None) -> Copied:
        """Run rsync to its end, and return what it copied; call `check` every 0.05 s.

        At the end its processes have ended, and the channel is closed. Raises RsyncMissing if this machine or the node has no
        rsync, NotFound if the node has no such directory, Unreachable for a lost connection, PreflightError if no shell starts,
        DispatchError for another failure and if nothing moves for 60 s, and what `check` raises.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs:
            process = self._start(theirs)
            theirs.close()
            streams = (("out", process.stdout), ("err", process.stderr))
            threads = [_start_thread(self._keep_tail, name, stream) for name, stream in streams]
            threads.append(_start_thread(self._serve, ours))
            try:
                while process.poll() is None:
                    if check:
                        check()
                    self._require_moving()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(SLICE)
            finally:
                end_group(process, signal.SIGTERM, 1.0)  # TERM first: rsync removes its half-written files
                signal_group(process.pid, signal.SIGKILL)  # the bridge, if rsync went without it
                self.ended = True
                if self.pipe:
                    self.pipe.close()
                for thread in threads:
                    thread.join(1.0)
        if process.returncode:
            raise self._failure(process.returncode)
        numbers = self.output["out"]
        return Copied(_number_in_stats(_SIZE, numbers), _number_in_stats(_FILES, numbers))

    def _start(self, bridge: socket.socket) -> subprocess.Popen[bytes]:
        """Start the local rsync, with the bridge as its remote shell. Raises RsyncMissing if this machine has none."""
        rsync = shutil.which("rsync")
        if not rsync:
            raise RsyncMissing("rsync is missing on this machine", "install the package rsync here", self.link.node)
        shell = " ".join(_rsh(argument) for argument in (sys.executable, "-SE", _BRIDGE, str(bridge.fileno())))
        environ = {key: value for key, value in os.environ.items() if not key.startswith("RSYNC_")}
        # -1: nanoseconds count too; else a file changed twice in a second would not be fetched again
        common = ["--times", "--modify-window=-1", "-s", "--stats", f"--timeout={STALL}", "-e", shell]
        return subprocess.Popen(
            [rsync, *common, *self.options],
            cwd=self.folder,
            stdin=self.stdin or subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[bridge.fileno()],
            start_new_session=True,
            env={**environ, "LC_ALL": "C"},
        )

    def _require_moving(self) -> None:
        """Raise the error of the remote side, of a lost connection, or of 60 seconds without a byte; else do nothing.

        rsync's own --timeout guards only the side that sends: a receiver waits for a frozen node for ever.
        """
        if self.error:
            raise self.error
        moved = self.down + (self.up if self.moved else 0)  # as a receiver rsync sends signs of life up
        if moved != self.progress[1]:
            self.progress = time.monotonic(), moved
        if time.monotonic() - self.progress[0] > STALL:
            raise DispatchError(f"nothing moved for {STALL} s", _TRY_AGAIN, self.link.node)
        if not self.link.alive:
            raise self.link.lost("the connection was lost while files were copied")

    def _failure(self, code: int) -> ClustertoolError:
        """Build the error that says why rsync failed, from the output of both sides."""
        node = self.link.node
        if self.error:
            return self.error
        text = (self.output["err"] + self.output["remote"]).decode(errors="replace")
        last = "\n".join(text.strip().splitlines()[-5:]) or f"rsync ended with code {code}"
        if _MISSING in text:
            return RsyncMissing("rsync is missing there", "install the package rsync on that node", node)
        if _NO_DIRECTORY in text:
            return NotFound("no such directory there", "check the path and the job", node)
        side, other = ("there", _OTHER_ROOT) if self.moved else ("here", _OTHER_DISK)
        for sign, what, fix in (*((sign, what.format(side), other) for sign, what in _DISK), *_KNOWN):
            if sign in text:
                line = next(line for line in text.splitlines() if sign in line)
                return DispatchError(f"{what}: {line.strip()}", fix, node)
        if not self.link.alive or (self.pipe and ended_by_loss(self.pipe.channel, self.link)):
            return self.link.lost(f"the connection was lost while files were copied: {last}")
        return DispatchError(f"rsync failed (code {code}): {last}", "correct this and try again", node)

    # -- in threads --

    def _keep_tail(self, name: str, stream: IO[bytes]) -> None:
        """Read a stream to its end, and keep its last 8 KiB in `output`."""
        with stream:
            while data := os.read(stream.fileno(), 1 << 16):
                self.output[name] = (self.output[name] + data)[-_TAIL:]

    def _serve(self, bridge: socket.socket) -> None:
        """Receive the bridge's pipes and command, run the command on the node, and copy bytes both ways.

        At its end the bridge gets its exit code, and an error is in `error`.
        """
        arguments, pipes = _receive_command(bridge)
        if len(pipes) != 2:  # rsync has ended without it
            return
        source, target = pipes
        script = _SCRIPT % (_quoted(self.remote), _quoted(self.remote), b" ".join(map(_quoted, arguments)))
        with open(source, "rb", buffering=0) as up, open(target, "wb", buffering=0) as down:
            try:
                pipe = self.pipe = Pipe(self.link, script, window=_WINDOW, timeout=_START)
                if self.ended:
                    pipe.close()
                sender = _start_thread(self._upward, pipe, up)
                self._downward(pipe, down)
                down.close()  # rsync waits for this, then for the bridge's exit code
                code = pipe.code(5.0)
                self.output["remote"] = pipe.errors()[-_TAIL:]
                with contextlib.suppress(OSError):  # the bridge has ended with its rsync
                    bridge.send(bytes([code if 0 <= code < 256 else 255]))
                sender.join()
            except ClustertoolError as error:
                self.error = error

    def _upward(self, pipe: Pipe, source: IO[bytes]) -> None:
        """Copy the bytes of the local rsync to the node until its end, and count them in `up`."""
        size = pipe.channel.out_max_packet_size - 64  # what paramiko sends as one packet: nothing is cut and copied
        with contextlib.suppress(*BROKEN):  # the channel has closed; the other direction has the reason
            while data := source.read(size):
                while data:
                    sent = pipe.channel.send(data)
                    if not sent:
                        return
                    self.up += sent
                    if self.moved:
                        self.moved(sent)
                    data = data[sent:]
            pipe.channel.shutdown_write()

    def _downward(self, pipe: Pipe, target: IO[bytes]) -> None:
        """Copy the bytes of the node to the local rsync until their end, and count them in `down`."""
        with contextlib.suppress(*BROKEN):  # rsync or the connection has ended: run() detects both
            while data := pipe.recv():
                self.down += len(data)
                view = memoryview(data)
                while view:
                    view = view[target.write(view) :]


_TRY_AGAIN = "check the node and the network, then try again"
_OTHER_DISK = "free some space, or fetch to another disk: --to DIR"
_OTHER_ROOT = f"make room ({PROGRAM} clean --older-than 7d), or choose another ROOT_DIR"
_DISK = (
    ("No space left on device", "the disk {} is full"),
    ("Disk quota exceeded", "the disk quota {} is used up"),
    ("Read-only file system", "the file system {} cannot be written"),
)
_KNOWN = (
    ("Permission denied", "a permission is missing", "correct the permissions, on the node or here"),
    ("unknown option", "the two rsyncs do not fit together", "install rsync 3.1 or newer on both sides"),
    ("unrecognized option", "the two rsyncs do not fit together", "install rsync 3.1 or newer on both sides"),
    ("timeout in data send/receive", f"nothing moved for {STALL} s", _TRY_AGAIN),
    ("vanished", "files went away while they were copied", "try again when nothing changes them"),
)


def _start_thread(do: Callable[..., None], *values: object) -> threading.Thread:
    thread = threading.Thread(target=do, args=values, daemon=True)
    thread.start()
    return thread


def _receive_command(bridge: socket.socket) -> tuple[list[bytes], list[int]]:
    """Receive the bridge's message: the arguments of the remote command, and its stdin and stdout (none without a bridge)."""
    data, pipes, _, _ = socket.recv_fds(bridge, 1 << 16, 2)
    while more := bridge.recv(1 << 16):
        data += more
    for pipe in pipes:
        os.set_blocking(pipe, True)  # rsync makes them non-blocking; its own ends stay so
        os.set_inheritable(pipe, False)
    return data.split(b"\0"), pipes


def _rsh(argument: str) -> str:
    """Quote an argument of rsync's -e, which knows quotes and nothing else: a doubled quote stands for itself."""
    return '"' + argument.replace('"', '""') + '"'


def _quoted(argument: str | bytes) -> bytes:
    """Quote an argument for the node's sh, byte for byte."""
    return os.fsencode(shlex.quote(os.fsdecode(argument)))


def _number_in_stats(what: bytes, output: bytes) -> int:
    """Read the number after `what` in the output of --stats; 0 if it is not there."""
    match = re.search(what + rb": ([\d,.]+)", output)
    return int(re.sub(rb"\D", b"", match[1])) if match else 0
