"""A child task does what may take long in a process of its own, so that the joining process always answers its coordinator.

The child is independent of the terminal, and ignores requests to end: its parent decides. It sends one answer. If its parent
dies at any time, it undoes what it has done.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
import traceback
from typing import TYPE_CHECKING, Callable, Dict, List, Optional, cast

from clustertool.errors import ClustertoolError, InternalError, PreflightError
from clustertool.model.container.container_runtimes import ALWAYS, NEVER
from clustertool.model.container.container_settings import NO_CONTAINER, ContainerSettings
from clustertool.model.joining.join_errors import error_rows, read_errors
from clustertool.model.planning.node_container import container_request
from clustertool.model.wire.messages import PLACE, PROBE
from clustertool.node.agent import place
from clustertool.node.container.image_store import pull_image
from clustertool.node.probe.container_probe import read_runtime
from clustertool.node.probe.probe import probe
from clustertool.node.storage import files
from clustertool.node.system import processes
from clustertool.node.system.child_signals import END
from clustertool.node.system.node_context import NodeContext, PlacingContext, WorkCounter

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import ContainerAnswer
    from clustertool.model.wire.agent_requests import PlaceRequest, ProbeRequest

_KEEP, _UNDO = b"K", b"U"
_POLL = 0.1
_PROBE_POLL = 0.02
_TOUCH = 1.0  # seconds between two signs of life of a placed job; its claims are valid while they are recent
STALLED = 60.0  # seconds in which the placing of a job has not moved, after which its file system is given up
_STUCK = 20.0  # seconds for a placing that was ended to reach its next step
PULL_END = 15.0  # seconds for a runtime to end the pull of an image: more than its grace
UNDO = 30.0  # seconds that a child may take to take back a job that it has placed
Reply = Dict[str, object]


class ChildTask:
    """A child process that does one task, sends one answer, and obeys one order: to keep what it has done, or to undo it.

    `body`: what the child does, with the descriptors of its orders and of its answer. patience: seconds that it may take to
    obey an order; then it is killed.
    """

    def __init__(self, body: Callable[[int, int], None], patience: float) -> None:
        """Start the child."""
        self._patience = patience
        orders, self._orders = os.pipe()
        self._answer, answer = os.pipe()
        self._data = b""
        self.pid = os.fork()
        if self.pid == 0:
            _become(body, orders, answer)
        os.close(orders)
        os.close(answer)
        os.set_blocking(self._answer, False)

    def fileno(self) -> int:
        """Return the descriptor of the answer."""
        return self._answer

    def reply(self) -> Optional[Reply]:
        """Return the child's answer once it is complete, {"facts": ...} or {}; None before.

        Raises the error in the answer; InternalError if the child has died.
        """
        end = False
        with contextlib.suppress(BlockingIOError):
            while not end:
                data = os.read(self._answer, 1 << 16)
                self._data += data
                end = not data
        if not end and not self._data.endswith(b"\n"):
            return None
        if not self._data.endswith(b"\n"):
            raise InternalError("a child process of the joining process died")
        reply: Reply = json.loads(self._data)
        if "errors" in reply:
            raise read_errors(reply["errors"])
        return reply

    def keep(self) -> None:
        """Order the child to end without an undo, and wait for its end, or kill it after `patience` seconds."""
        self._end(_KEEP)

    def undo(self) -> None:
        """Order the child to take back what it has done, and wait for its end, or kill it after `patience` seconds."""
        self._end(_UNDO)

    def _end(self, order: bytes) -> None:
        """Send the order, close the pipes, and wait for the child, which is killed after `patience` seconds."""
        with contextlib.suppress(OSError):
            os.write(self._orders, order)
        os.close(self._orders)
        os.close(self._answer)
        processes.reap(self.pid, self._patience)


def _become(body: Callable[[int, int], None], orders: int, answer: int) -> None:
    """Detach the child from its parent's session and descriptors, ignore signals to end, run the task, and exit.

    It keeps stderr, for tracebacks. body: the task, which gets the pipes for its orders and its answer.
    """
    try:
        null = os.open(os.devnull, os.O_RDWR)
        processes.detach(orders, answer, stdio=(null, null, 2))
        processes.set_name("ct-join-task")
        # An engine sends them to all processes. Programs that the child starts have the default action.
        for number in END:
            signal.signal(number, lambda number, frame: None)
        body(orders, answer)
    finally:
        processes.leave(0)


def probe_task(
    request: ProbeRequest, root: str, prepare: Callable[[], None], container: ContainerSettings = NO_CONTAINER
) -> Callable[[int, int], None]:
    """Create a task's function that calls prepare(), probes this machine, and sends the facts, or the error.

    For a job in containers it also reads the runtime, and pulls the image if `pull` of CONTAINER wants that. An order ends the
    pull.
    """
    node = NodeContext(root, "")
    replies: List[Reply] = []

    def facts() -> Reply:
        prepare()
        found = probe(node, request)
        if container:
            found["container"] = read_runtime(node, container_request(container, found))
            _pull_image(node, found["container"], container)
        return {"facts": found}

    def body(orders: int, answer: int) -> None:
        work = WorkCounter(PROBE, None, lambda: replies.append(_run_for_answer(facts)))
        while work.is_alive() and not _read_order(orders, 0):
            work.join(_PROBE_POLL)
        if work.is_alive():
            work.abandon()
            work.join(PULL_END)
        if replies:
            _send(answer, replies[0])

    return body


def _pull_image(node: NodeContext, known: ContainerAnswer, container: ContainerSettings) -> None:
    """Pull the image, and add its facts to `known`, if there is a runtime, and `pull` of CONTAINER wants that.

    No laptop brings images to machines that join, so each machine pulls its own. Raises DispatchError if the pull fails,
    NotFound for the path of a file that is not here.
    """
    if not known["runtime"] or container.pull == NEVER or (known["image_id"] and container.pull != ALWAYS):
        return
    known.update(pull_image(node, {"runtime": known["runtime"], "program": known["program"], "image": container.image}))


def place_task(
    request: PlaceRequest, patience: float = STALLED, finish: Callable[[], None] = lambda: None
) -> Callable[[int, int], None]:
    """Create a task's function that places a job, answers, waits for an order, and removes the job unless it is to keep it.

    patience: seconds without a step of the work, after which it has failed. finish: called after the placing; it may raise
    ClustertoolError. A directory that an earlier run left is not removed: of that, claims are taken back if the job may be
    placed there again.
    """

    def body(orders: int, answer: int) -> None:
        spec = request["spec"]
        node = PlacingContext(str(spec["root"]), "")
        replies: List[Reply] = []
        fresh: List[bool] = []  # whether the directory is this task's: an earlier run of the job has the same token

        def placed() -> Reply:
            fresh.append(not os.path.lexists(spec["job_dir"]))
            reply = cast(Reply, place.place(node, request))
            finish()
            return reply

        work = WorkCounter(PLACE, None, lambda: replies.append(_run_for_answer(placed)))
        node.threads = [work]
        order, moved_at = b"", time.monotonic()
        while work.is_alive() and not order and time.monotonic() - moved_at < patience:
            order = _read_order(orders, _POLL)
            if work.moved():
                moved_at = time.monotonic()
        if work.is_alive() and not order:
            _send(answer, {"errors": error_rows(_stalled(str(spec["job_dir"]), patience))})
            order = _read_order(orders, None)
        if work.is_alive():
            work.abandon()
            work.join(_STUCK)
            if work.is_alive():
                return  # a file system that does not answer: what was done there stays
        _send(answer, replies[0])
        while not order:
            order = _read_order(orders, _TOUCH)
            if node.placed:
                with contextlib.suppress(OSError):
                    os.utime(node.placed)
        again = fresh == [False]
        if order != _KEEP and fresh and (not again or place.may_be_placed_again(spec)):
            place.unplace(node, {"job_dir": spec["job_dir"], "token": spec["token"], "again": again})

    return body


def _stalled(job_dir: str, seconds: float) -> PreflightError:
    """Create the error for a placing without progress."""
    what = f"the files of the job are not written: no progress in {job_dir} for {seconds:g} s"
    return PreflightError(what, f"check the file system of ROOT_DIR; remove {job_dir} if it is left there")


def _read_order(orders: int, seconds: Optional[float]) -> bytes:
    """Return the parent's order, b"" if none comes within `seconds` (None: no limit), _UNDO if it has died."""
    if not select.select([orders], [], [], seconds)[0]:
        return b""
    return os.read(orders, 1) or _UNDO


def _run_for_answer(do: Callable[[], Reply]) -> Reply:
    """Run the work, `do`, and return its answer.

    An exception becomes {"errors": ...}, a bug as InternalError with its traceback.
    """
    try:
        return do()
    except ClustertoolError as error:
        return {"errors": error_rows(error)}
    except Exception as error:  # noqa: BLE001 - the boundary of a process: a bug is reported by its parent
        text = traceback.format_exc(limit=-4)
        return {"errors": error_rows(InternalError(f"{error!r}\n{text}"))}


def _send(answer: int, reply: Reply) -> None:
    """Write the answer to the pipe as a line of JSON. Nothing is done if the parent has died."""
    with contextlib.suppress(OSError):  # the parent has died
        files.write_all(answer, json.dumps(reply).encode() + b"\n")
