"""The supervisor has the stacks of its ranks taken by a child of its own, one at a time, and never waits for it.

The child is a sampler (node/jobs/stack_sampler.py): it reads memory and /proc, which may block. It writes to a file without a
name, which the supervisor reads when the child has ended. A child that is late is killed, and its request gets the reason.
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from typing import IO, TYPE_CHECKING, Callable, List, Optional, Tuple

from clustertool.errors import PreflightError
from clustertool.node.jobs.descendants import Descendants
from clustertool.node.supervisor.control_socket import ControlSocket, Waiting
from clustertool.node.supervisor.node_monitor import fork_helper
from clustertool.node.supervisor.rank_table import RankTable
from clustertool.node.system import node_context, processes

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec
    from clustertool.model.wire.supervisor_messages import StacksQuery

Done = Callable[[bytes, str], None]  # gets the samples as JSON, b"" for none, and what went wrong, "" for nothing
_LATE = 3.0  # seconds that a sampler may take beyond those of its request
_MOST = 16  # requests that wait
_LARGEST = 48 << 20  # bytes of the samples


class StackRequests:
    """The requests for stacks, and the sampler. Call turn() each loop, changed() on the sampler's SIGCHLD, and end() once."""

    def __init__(self, family: Descendants, ranks: RankTable, control: ControlSocket, spec: Spec) -> None:
        self.pid = 0  # of the sampler
        self._family, self._ranks, self._control, self._mark = family, ranks, control, spec["mark"]
        self._job_dir = spec["job_dir"]
        # Queries, each with the directory of the job if traces are wanted. The first is that of the sampler, while it runs.
        self._waiting: List[Tuple[StacksQuery, str, Done]] = []
        self._file: Optional[IO[bytes]] = None
        self._until = 0.0
        self._number = 0

    def ask(self, query: StacksQuery) -> Waiting:
        """Put the request of a client in the queue, and return the key under which the client waits for the answer.

        Raises PreflightError if 16 requests wait.
        """
        if len(self._waiting) >= _MOST:
            raise PreflightError("too many commands want stacks at once", "type it again when they have ended")
        self._number += 1
        key = ("stacks", "", self._number)
        answer = partial(self._answer, key)
        self._waiting.append((query, "", answer))
        return key

    def _answer(self, key: Waiting, data: bytes, fault: str) -> None:
        """Answer the client that waits under this key."""
        self._control.resolve(key, {"type": "stacks", "fault": fault}, data)

    def trace(self, done: Done) -> None:
        """Have all ranks sampled three times, after the stacks that were requested before; `done` gets traces of that."""
        query: StacksQuery = {"type": "stacks", "role": "", "ranks": "", "native": False, "tool": "", "seconds": 10.0}
        self._waiting.append((query, self._job_dir, done))

    def turn(self) -> None:
        """Start the sampler for the first request, or kill it if it is late."""
        if self.pid and self._until and time.monotonic() > self._until:
            processes.kill_tree(self.pid)
            self._finish("the sampler did not answer in time, and was ended")
        if not self.pid and self._waiting:
            try:
                self._start(*self._waiting[0][:2])
            except OSError as error:
                self._finish(f"no sampler can be started: {error.strerror}")

    def changed(self, status: int) -> None:
        """Handle the sampler's wait status: answer its request if it has ended."""
        if not (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
            return
        self._family.spare.discard(self.pid)
        self.pid = 0
        if self._until:
            self._finish("the sampler has failed: see supervisor.err in the job's directory")

    def end(self) -> None:
        """Kill the sampler, if it runs, and wait up to 1 s for its end."""
        if self.pid:
            processes.kill_tree(self.pid)
            processes.reap(self.pid, 0.0, 1.0)
        self.pid = 0

    def _finish(self, fault: str) -> None:
        """Answer the first request with what the sampler has written, or with the fault if that is not complete."""
        data, file = b"", self._file
        self._until, self._file = 0.0, None
        if file is not None:
            with file:
                if file.seek(0, os.SEEK_END) > _LARGEST:
                    fault = "the stacks are too large for an answer: name some ranks by --rank"
                else:
                    file.seek(0)
                    data = file.read()
        complete = data.endswith(b"\n")
        self._waiting.pop(0)[2](data if complete else b"", "" if complete else fault)

    def _start(self, query: StacksQuery, folder: str) -> None:
        """Fork the sampler, add it to the supervisor's spared children, and set its deadline. folder: see _sample().

        Raises OSError.
        """
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - _finish() closes it
        heads = {rank.main: rank.key for rank in self._ranks.running.values()}
        body = partial(_sample, self._file, heads, [process.pid for process in self._family.members], query, folder)
        self.pid = fork_helper(self._family, self._mark, self._file.fileno(), body)
        self._until = time.monotonic() + query["seconds"] + _LATE


def _sample(*arguments: object) -> None:
    """Sample the ranks, in the sampler, as sample_for_supervisor(). Its modules are imported only there."""
    processes.set_name("ct-stacks")
    node_context.load_on_demand("jobs.stack_sampler:sample_for_supervisor")(*arguments)
