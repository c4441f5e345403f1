"""The control fifo takes the commands of agents on this node. Its modification time is the supervisor's heartbeat."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Dict, List

from clustertool.errors import PreflightError
from clustertool.model.paths import OURS
from clustertool.model.wire import record_lines

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

_NAME = f"{OURS}/control"


class ControlFifo:
    """Call create() once, commands() each loop, touch() as the heartbeat and remove() at the end.

    `job`: the descriptor of the job's directory.
    """

    def __init__(self, job: int) -> None:
        self._job = job
        self._fd = -1
        self._rest = b""

    def create(self, spec: Spec) -> None:
        """Raises PreflightError if the job has a supervisor on this node, or the file system has no fifos."""
        try:
            os.mkfifo(_NAME, 0o600, dir_fd=self._job)
        except FileExistsError:
            raise PreflightError(f"job {spec['job']} was started here already", "take another --job-id") from None
        except OSError as error:
            what = f"cannot create a named pipe (fifo) below {spec['root']}: {error.strerror}"
            raise PreflightError(what, "set ROOT_DIR to a folder on a file system with fifos (ext4, xfs)") from None
        self._fd = os.open(_NAME, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._job)

    def fileno(self) -> int:
        return self._fd

    def commands(self) -> List[Dict[str, Any]]:
        """Return the commands that have arrived, each in a line (record_lines.control_line). Other lines are ignored."""
        with contextlib.suppress(BlockingIOError):
            self._rest += os.read(self._fd, 65536)
        *lines, self._rest = self._rest.split(b"\n")
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                found.append(record_lines.read_control(line))
        return found

    def touch(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._fd)

    def remove(self) -> bool:
        """Return whether create() has made the fifo; if not, it belongs to another supervisor and stays."""
        if self._fd < 0:
            return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_NAME, dir_fd=self._job)
        return True
