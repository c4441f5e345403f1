"""This module removes a job's containers on a node, and proves that none is left. The label on each container finds them.

A supervisor starts it as a child (Removal), since its loop must not wait. A guard and a stop without supervisor wait: remove().
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import IO, TYPE_CHECKING, List, Optional

from clustertool.model.container import container_command
from clustertool.node.system import child_signals, programs

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import RuntimeSpec

_PATIENCE = 20.0  # seconds in which it is repeated: a daemon may be starting again
_EACH = 15.0  # seconds that one command may take
_PAUSE = 0.3  # between two of them


def _survivors(program: str, code: int, output: str, error: str) -> List[str]:
    """Describe the containers that a command has left, by its output; if it has failed, that they cannot be listed."""
    name = os.path.basename(program)
    if code:
        lines = error.strip().splitlines() or ["it does not answer" if code < 0 else f"exit code {code}"]
        return [f"containers that {name} cannot list ({lines[-1][:200]})"]
    return [f"container {one[:12]} of {name}" for one in output.split()]


def remove(container: RuntimeSpec, mark: str, patience: float = _PATIENCE) -> List[str]:
    """Remove the containers of a job until none is left, or `patience` seconds have passed.

    Returns a text for each that is left. mark: of the job on this node.
    """
    argv = container_command.removal(container["runtime"], container["program"], mark)
    end, left = time.monotonic() + patience, [""] if argv else []
    while left:
        left = _survivors(container["program"], *programs.output(argv, _EACH, cwd="/"))
        if left and time.monotonic() > end:
            break
        time.sleep(_PAUSE if left else 0.0)
    return left


def _read_rest(file: Optional[IO[bytes]]) -> str:
    """Return what a command that has ended has written, up to the size of a pipe. Another process may keep the pipe open."""
    data = b""
    if file is not None:
        os.set_blocking(file.fileno(), False)
        with contextlib.suppress(OSError):
            data = os.read(file.fileno(), 1 << 16)
        file.close()
    return data.decode(errors="replace")


class Removal:
    """The removal of a job's containers by child processes, without waiting.

    Call turn() until it returns the survivors, and changed() when the child `pid` has ended.
    """

    def __init__(self, container: Optional[RuntimeSpec], mark: str) -> None:
        self.pid = 0
        self._program = container["program"] if container else ""
        self._argv = container_command.removal(container["runtime"], self._program, mark) if container else []
        self._end = self._kill_at = self._again = 0.0
        self._child: Optional[subprocess.Popen[bytes]] = None
        self._left: Optional[List[str]] = None if self._argv else []

    def turn(self) -> Optional[List[str]]:
        """Start the next command, or kill one that takes over 15 s.

        Return a text for each container that is left, or None while that is not known yet. It is [] once no container is left,
        or what the last command has left after 20 s.
        """
        now = time.monotonic()
        self._end = self._end or now + _PATIENCE
        if self.pid:
            if now > self._kill_at:
                os.killpg(self.pid, signal.SIGKILL)
            return None
        if self._left == [] or (self._left is not None and now > self._end):
            return self._left
        if now >= self._again:
            self._again = now + _PAUSE
            self._start(now)
        return None

    def _start(self, now: float) -> None:
        """Start the command that removes the containers. Its failure is one of the descriptions of what is left."""
        try:
            child = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                start_new_session=True,
                preexec_fn=child_signals.unblock,
            )
        except OSError as error:
            self._left = _survivors(self._program, 1, "", str(error.strerror))
            return
        child.returncode = 0  # reaped by the supervisor's one waitpid loop, not by subprocess
        self.pid, self._kill_at, self._child = child.pid, now + _EACH, child

    def changed(self, status: int) -> None:
        """Handle the wait status of the command: once it has ended, read from its output which containers are left."""
        if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
            return
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1
        files = (self._child.stdout, self._child.stderr) if self._child else (None, None)
        output, error = map(_read_rest, files)
        self.pid, self._child = 0, None
        self._again = time.monotonic() + _PAUSE
        self._left = _survivors(self._program, code, output, error)
