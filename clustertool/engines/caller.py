"""A caller is the program that an action or an engine works for: a verb of the command line, or the Python API.

Actions and engines write nothing themselves. They report to their caller, and they ask it whether they must end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from clustertool.errors import ClustertoolError, Interrupted, Terminated
from clustertool.fleet.dispatch.receivers import ProgressReceiver
from clustertool.ssh.prompter import Person


class DispatchView(ProgressReceiver, Protocol):
    """A context manager that shows the progress of one dispatch. `between`: bytes from node to node."""

    between: int

    def __enter__(self) -> DispatchView: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    def failed(self, name: str, why: str) -> None:
        """Record that the node of this name gets nothing more."""


class WorkView(Protocol):
    """A context manager that shows the progress of work that each node does by itself; nodes report from any thread."""

    def __enter__(self) -> WorkView: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    def turn(self) -> None:
        """Draw the progress again; called several times a second."""

    def done(self, name: str) -> None:
        """Record that the node of this name has done its work."""

    def failed(self, name: str) -> None:
        """Record that the work of the node of this name has failed."""


class Caller(Protocol):
    """The program for which an action works: it shows messages and progress, and ends the action.

    The methods are called from the thread that called the action.
    """

    def note(self, text: str) -> None:
        """Show one message about what happens now."""

    def remark(self, text: str) -> None:
        """Show one message about the command line, the shell, the workspace or earlier jobs. Several may become one line."""

    def warn(self, text: str) -> None:
        """Show one message about something that may be wrong."""

    def check(self) -> None:
        """Raise the error with which the action must end now, or nothing. Called several times a second."""

    def person(self) -> Person | None:
        """Return the object that answers questions of SSH servers; None: no question is asked."""

    def dispatching(self, names: Sequence[str], since: float | None) -> DispatchView:
        """Return a context manager that shows a dispatch to the nodes of these names.

        since: its start by time.monotonic(), None for now.
        """

    def working(self, phase: str, names: Sequence[str]) -> WorkView:
        """Return a context manager that shows the progress of work of these nodes. phase: the work, such as "image: load"."""

    def starting(self, job: str) -> None:
        """Record that processes of this job may run on nodes from now on; "": that none do."""


def report_nothing_left(caller: Caller, error: ClustertoolError) -> None:
    """Report to the caller that no process of the job runs on a node, and remove the fix of an Interrupted or Terminated error.

    That fix is to stop the job.
    """
    caller.starting("")
    if isinstance(error, (Interrupted, Terminated)):
        error.fix = ""


def pause(caller: Caller, seconds: float) -> None:
    """Wait for these seconds, and call caller.check() every 20 ms. Raises its error."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        caller.check()
        time.sleep(0.02)
