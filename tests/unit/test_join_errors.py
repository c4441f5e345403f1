"""Errors of machines that join keep their exit code on their way."""

from __future__ import annotations

import json

import pytest

from clustertool.errors import ClustertoolError, NodeLost, PreflightError, UsageError, as_one
from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state_names import JobState
from clustertool.model.joining.join_errors import ended_by_engine, error_rows, read_error, read_errors


def sent(error: ClustertoolError) -> ClustertoolError:
    """The error as another machine reads it."""
    return read_errors(json.loads(json.dumps(error_rows(error))))


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (JobState.STOPPED, 143),
        (JobState.STOPPED, 130),
        (JobState.STOPPED, 137),  # out of memory
        (JobState.TIMEOUT, 124),
        (JobState.LOST, 75),
    ],
)
def test_the_end_by_an_engine_has_its_exit_code_on_all_machines(state: JobState, code: int) -> None:
    error = ended_by_engine(Outcome(state, code, "tool", "why"))
    for one in (error, sent(error), sent(sent(error))):
        assert (one.code, one.what, type(one)) == (code, "the job did not start: why", type(error))


def test_the_code_of_a_class_is_not_sent() -> None:
    rows = error_rows(NodeLost("gone", "look", "node1"))
    assert rows == [{"kind": "NodeLost", "what": "gone", "fix": "look", "node": "node1"}]


def test_several_errors_stay_several() -> None:
    both = as_one([UsageError("a"), NodeLost("b")])
    assert both is not None and (str(sent(both)), sent(both).code) == (str(both), both.code)


@pytest.mark.parametrize("code", [None, 0, 256, -1, True, "x", [], 1e9])
def test_a_code_that_cannot_be_one_is_that_of_the_class(code: object) -> None:
    row = {"kind": "NoSuchClass", "what": "a", "fix": "", "node": "", "code": code}
    assert (type(read_error(row)), read_error(row).code) == (PreflightError, PreflightError.code)
