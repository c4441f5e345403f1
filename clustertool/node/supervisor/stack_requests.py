"""The supervisor has the stacks of its ranks taken by a child of its own, one at a time, and never waits for it.

The child is a sampler (node/jobs/stack_sampler.py): it reads memory and /proc, which may block. It writes to a file without a
name, which the supervisor reads when the child has ended. A child that is late is killed, and its request gets the reason.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from functools import partial
from typing import IO, TYPE_CHECKING, Callable, List, Optional, Tuple

from clustertool.node.jobs.descendants import Descendants
from clustertool.node.supervisor.control_socket import ControlSocket, Waiting
from clustertool.node.supervisor.helper_process import HelperProcess
from clustertool.node.supervisor.rank_table import RankTable
from clustertool.node.system import node_context, processes

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec
    from clustertool.model.wire.supervisor_messages import StacksQuery, StacksTaken

Done = Callable[[bytes], None]  # gets {"samples": list, "fault": what went wrong, or ""} as JSON
_LATE = 3.0  # seconds that a sampler may take beyond those of its request
_TAKEN: StacksTaken = {"type": "stacks"}
_ALL: StacksQuery = {"type": "stacks", "role": "", "ranks": "", "native": False, "tool": "", "seconds": 10.0}


class StackRequests(HelperProcess):
    """The requests for stacks, and the sampler. Call turn() each loop, too."""

    def __init__(self, family: Descendants, ranks: RankTable, control: ControlSocket, spec: Spec) -> None:
        super().__init__(family, spec["mark"])
        self._ranks, self._control, self._job_dir = ranks, control, spec["job_dir"]
        # Queries, each with the directory of the job if traces are wanted. The first is that of the sampler, while it runs.
        self._waiting: List[Tuple[StacksQuery, str, Done]] = []
        self._file: Optional[IO[bytes]] = None  # of the sampler
        self._until = 0.0
        self._numbers = itertools.count()

    def ask(self, query: StacksQuery) -> Waiting:
        """Put the request of a client in the queue, and return the key under which the client waits for the answer."""
        key = ("stacks", "", next(self._numbers))
        self._waiting.append((query, "", partial(self._control.resolve, key, _TAKEN)))
        return key

    def trace(self, done: Done) -> None:
        """Have all ranks sampled three times, after the stacks that were requested before; `done` gets traces of that."""
        self._waiting.append((_ALL, self._job_dir, done))

    def turn(self) -> None:
        """Answer the first request if its sampler has ended, or is late, which is killed; start that of the next one."""
        if self._file is not None and not self.pid:
            self._finish("the sampler has failed: see supervisor.err in the job's directory")
        elif self._file is not None and time.monotonic() > self._until:
            processes.kill_tree(self.pid)
            self._finish("the sampler did not answer in time, and was ended")
        if not self.pid and self._waiting:
            try:
                self._start(*self._waiting[0][:2])
            except OSError as error:
                self._finish(f"no sampler can be started: {error.strerror}")

    def _finish(self, fault: str) -> None:
        """Answer the first request with what the sampler has written, or with the fault if that is not complete."""
        data, file = b"", self._file
        self._file = None
        if file is not None:
            with file:
                file.seek(0)
                data = file.read()
        if not data.endswith(b"\n"):
            data = json.dumps({"samples": [], "fault": fault}).encode()
        self._waiting.pop(0)[2](data)

    def _start(self, query: StacksQuery, folder: str) -> None:
        """Start the sampler, and set its deadline. folder: see _sample(). Raises OSError."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - _finish() closes it
        heads = {rank.main: rank.key for rank in self._ranks.running.values()}
        members = [process.pid for process in self._family.members]
        self.fork(self._file.fileno(), partial(_sample, self._file, heads, members, query, folder))
        self._until = time.monotonic() + query["seconds"] + _LATE


def _sample(*arguments: object) -> None:
    """Sample the ranks, in the sampler, as sample_for_supervisor(). Its modules are imported only there."""
    processes.set_name("ct-stacks")
    node_context.load_on_demand("jobs.stack_sampler:sample_for_supervisor")(*arguments)
