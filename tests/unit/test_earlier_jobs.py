"""Earlier jobs decide the id of a new job, and the output that it continues from."""

from __future__ import annotations

import re
from typing import Any

import pytest

from clustertool.engines.base import Description, EngineState
from clustertool.engines.earlier_work import merge_known
from clustertool.errors import NotFound, UsageError
from clustertool.model.job.earlier_jobs import (
    EarlierJob,
    Kinship,
    free_id,
    named_job,
    read_earlier,
    rows_of,
    same_work,
    script_of,
)
from clustertool.model.job.job_names import can_mean, is_named
from clustertool.model.job.state_names import JobState


def job(id: str, created: float = 0.0, **given: Any) -> EarlierJob:
    base = {"asked": "", "name": "", "owner": "ann", "workspace": "/w", "command": "", "with_output": ()}
    return EarlierJob(**{**base, "state": JobState.SUCCEEDED, **given, "id": id, "created": created})


def asked(id: str, of: str, **given: Any) -> EarlierJob:
    return job(id, asked=of, **given)


@pytest.mark.parametrize(
    ("earlier", "expected"),
    [
        ([], "X"),
        ([job("X-2"), job("Y")], "X"),
        ([asked("X", "X")], "X-2"),
        ([job("X")], "X-2"),  # of an older version, whose records do not name what was asked for
        ([asked("X", "X"), asked("X-2", "X")], "X-3"),
        ([asked("X-9", "X"), asked("X-10", "X")], "X-11"),  # the first ones are cleaned
        ([asked("X", "X"), asked("X-2", "X-2", state=JobState.RUNNING)], "X-3"),  # another family's
        ([asked("X", "X"), asked("X-2-2", "X-2")], "X-2"),
        ([asked("X", "X", state=JobState.LOST)], "X-2"),
        ([asked("X", "X"), job("X-old"), job("X-99999999999999999999")], "X-2"),
    ],
)
def test_the_id_after_jobs_that_have_ended(earlier: list[EarlierJob], expected: str) -> None:
    assert free_id("X", earlier) == expected


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.UNKNOWN, JobState.STARTING])
def test_an_id_is_not_free_before_its_newest_job_has_ended(state: JobState) -> None:
    with pytest.raises(UsageError, match=f"--job-id X: job X-2 has not ended, its state is {state}"):
        free_id("X", [asked("X-2", "X", state=state), asked("X", "X")])


@pytest.mark.parametrize(
    ("recorded", "known", "state"),
    [
        (JobState.SUCCEEDED, EngineState.RUNNING, JobState.SUCCEEDED),  # its last process is about to leave
        (JobState.STOPPED, EngineState.QUEUED, JobState.QUEUED),  # preempted, and it will start again
        (JobState.RUNNING, EngineState.QUEUED, JobState.RUNNING),  # the nodes know better that it has started
        (JobState.UNKNOWN, EngineState.RUNNING, JobState.RUNNING),
        (JobState.UNKNOWN, EngineState.ENDED, JobState.LOST),
        (JobState.UNKNOWN, EngineState.UNKNOWN, JobState.UNKNOWN),
        (JobState.UNKNOWN, None, JobState.UNKNOWN),
        (None, EngineState.QUEUED, JobState.QUEUED),
        (None, EngineState.RUNNING, JobState.STARTING),
        (None, EngineState.ENDED, JobState.LOST),
        (None, EngineState.UNKNOWN, JobState.UNKNOWN),
    ],
)
def test_the_state_of_an_earlier_job_by_records_and_engine(
    recorded: JobState | None, known: EngineState | None, state: JobState
) -> None:
    records = [asked("X-2", "X", created=1.0, state=recorded)] if recorded else []
    about = {} if known is None else {"X-2": Description(known, since=2.0, asked="X", job_name="n")}
    assert [(one.id, one.asked, one.state) for one in merge_known(records, about)] == [("X-2", "X", state)]


def test_jobs_without_a_record_are_in_the_order_of_their_submission() -> None:
    about = {"X-3": Description(EngineState.QUEUED, since=3.0), "X-1": Description(EngineState.ENDED, since=1.0)}
    assert [one.id for one in merge_known([job("X-2", 2.0)], about)] == ["X-3", "X-2", "X-1"]


def test_a_number_may_be_too_long_for_an_id() -> None:
    long = "x" * 63
    with pytest.raises(UsageError, match="too long"):
        free_id(long, [asked(long, long)])


def test_names_go_before_workspaces() -> None:
    a, b = job("1", name="a", with_output=(0,)), job("2", name="b", with_output=(0,))
    others = job("3", owner="bob", with_output=(0,))
    assert same_work([others, b, a], Kinship("a", "ann", "/w")) == a
    assert same_work([others, b, a], Kinship("", "ann", "/w")) == b
    assert same_work([others, b, a], Kinship("c", "ann", "/w")) is None, "another experiment of the same workspace"
    unnamed = job("0", with_output=(0,))
    assert same_work([others, b, a, unnamed], Kinship("c", "ann", "/w")) == unnamed
    assert same_work([others, b, a], Kinship("", "ann", "")) is None
    assert same_work([asked("X-2", "X"), a], Kinship("X", "ann", "/other")) == asked("X-2", "X")


def test_the_newest_ended_job_with_an_output_is_resumed() -> None:
    kin = Kinship("", "ann", "/w")
    running, empty, full = job("3", state=JobState.RUNNING, with_output=(0,)), job("2"), job("1", with_output=(1,))
    assert same_work([running, empty, full], kin) == full
    assert same_work([running, empty], kin) == empty
    assert same_work([running], kin) is None


def test_a_job_that_is_named_to_be_resumed() -> None:
    earlier = [asked("X-2", "X"), asked("X", "X"), job("20260101-1"), job("20260101-2", name="bert")]
    assert named_job(earlier, "X").id == "X-2"
    assert named_job(earlier, "X-1").id == "X"
    assert named_job(earlier, "bert").id == "20260101-2"
    assert named_job(earlier, "20260101-1").id == "20260101-1"
    with pytest.raises(UsageError, match=re.escape("not unique: 20260101-1, 20260101-2")):
        named_job(earlier, "2026")
    with pytest.raises(NotFound):
        named_job(earlier, "ber")
    with pytest.raises(UsageError, match="job 1 has not ended, its state is unknown"):
        named_job([job("1", state=JobState.UNKNOWN)], "1")


@pytest.mark.parametrize(
    ("text", "id", "asked_id", "name", "exactly", "possibly"),
    [
        ("", "J", "", "", True, True),
        ("X", "X-2", "X", "X", True, True),
        ("X-1", "X", "X", "X", True, True),
        ("X-1", "X-2", "X", "X", False, False),
        ("X-1", "X", "", "", False, False),
        ("2026", "20260101", "", "bert", False, True),
        ("bert", "20260101", "", "bert", True, True),
        ("ber", "20260101", "", "bert", False, False),
    ],
)
def test_what_a_user_can_call_a_job(
    text: str, id: str, asked_id: str, name: str, exactly: bool, possibly: bool
) -> None:
    assert is_named(text, id, asked_id, name) is exactly
    assert can_mean(text, id, asked_id, name) is possibly


def test_the_nodes_lists_become_one() -> None:
    row = {"id": "J", "asked": "", "name": "n", "owner": "ann", "workspace": "/w", "command": "python3 -u train.py --x"}
    row.update({"created": 5.0, "code": 0, "reason": "", "start": "", "final": True})
    one = rows_of([{**row, "node": 0, "state": "succeeded", "output": True}])
    three = rows_of([{**row, "node": 2, "state": "running", "code": None, "output": False}])
    (found,) = read_earlier({0: one, 1: (), 2: three})
    assert (found.state, found.ended, found.with_output, found.script) == (JobState.RUNNING, False, (0,), "train.py")
    assert read_earlier({0: one})[0].ended


def test_the_script_of_a_command() -> None:
    assert script_of("python3 -u a/train.py --lr 1") == "a/train.py"
    assert script_of("./train --lr 1") == "./train"
    assert script_of("") == ""
