"""Errors of the machines that join have the form in which they travel between them and in which they are reported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, List, Type

from clustertool import errors
from clustertool.errors import (
    ClustertoolError,
    Interrupted,
    NodeLost,
    PreflightError,
    Terminated,
    TimedOut,
    as_one,
    singles,
)
from clustertool.model.job.state_names import JobState
from clustertool.model.quantities import whole

if TYPE_CHECKING:
    from clustertool.model.job.outcome import Outcome
    from clustertool.model.wire.join_messages import JoinError

_MOST = 1000  # errors in one message
_LONGEST = 1 << 16  # characters of a text
_FIELDS = ("kind", "what", "fix", "node")
_STATES = {
    0: JobState.SUCCEEDED,
    NodeLost.code: JobState.LOST,
    TimedOut.code: JobState.TIMEOUT,
    Interrupted.code: JobState.STOPPED,
    Terminated.code: JobState.STOPPED,
}


def state_of(code: int) -> JobState:
    """Return the state of a job that has ended with this exit code, where nothing else is known of its end."""
    return _STATES.get(code, JobState.FAILED)


def error_rows(error: ClustertoolError) -> List[JoinError]:
    """Convert an error to one row for each error of `Several`.

    The kind is the name of the class, which gives the exit code if the row has none.
    """
    return [_row(one) for one in singles(error)]


def _row(error: ClustertoolError) -> JoinError:
    """Convert an error that is not Several to a row, with its exit code if that is not the usual one of its class."""
    row: JoinError = {"kind": type(error).__name__, "what": error.what, "fix": error.fix, "node": error.node}
    if error.code != type(error).code:
        row["code"] = error.code
    return row


def ended_by_engine(outcome: Outcome) -> ClustertoolError:
    """Create the error of a job that its engine ends before the job has started, with the code of the outcome.

    TimedOut and NodeLost for these states, Interrupted for its code, else Terminated. outcome: as for a job that runs.
    """
    kinds: Dict[JobState, Type[ClustertoolError]] = {JobState.TIMEOUT: TimedOut, JobState.LOST: NodeLost}
    kind = kinds.get(outcome.state, Interrupted if outcome.code == Interrupted.code else Terminated)
    error = kind(f"the job did not start: {outcome.reason}")
    error.code = outcome.code
    return error


def read_errors(rows: object) -> ClustertoolError:
    """Convert 1 to 1000 rows to an error: the one, or Several. An unknown kind becomes PreflightError.

    Raises ValueError for what is no such list.
    """
    if not isinstance(rows, list) or not 0 < len(rows) <= _MOST:
        raise ValueError("no list of errors")
    error = as_one([read_error(row) for row in rows])
    assert error is not None
    return error


def read_error(row: object) -> ClustertoolError:
    """Convert one row to an error, of an unknown kind to PreflightError. Raises ValueError for what is no row."""
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in _FIELDS):
        raise ValueError("an error without its fields")
    kind, what, fix, node = (row[name][:_LONGEST] for name in _FIELDS)
    error = _BY_NAME.get(kind, PreflightError)(what, fix, node)
    error.code = whole(row.get("code"), 1, 255) or error.code
    return error


_OTHERS = (errors.Several, errors.JobFailed)  # their constructors want other values
_BY_NAME: Dict[str, Type[ClustertoolError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ClustertoolError) and kind not in _OTHERS
}
