"""How a job ends that Slurm ends: what scontrol shows at the signal, and the outcome that all nodes record."""

from typing import Any

import pytest

from clustertool.model.job.outcome import EngineEnd, Outcome
from clustertool.model.shape import Malformed, check_of, read
from clustertool.model.slurm.job_end import begins_again, end_of, give_back, outcome_without_answer
from clustertool.model.slurm.slurm_answers import SlurmJob
from clustertool.model.wire import event_types

BY = "the supervisor on h1 received SIGTERM from pid 7 (slurmstepd: [11.0]), uid 0"


def _end(state: str, reason: str = "", restarts: int = 0, **fields) -> Outcome:
    return end_of(SlurmJob(11, state, reason, **{"comment": "clustertool X", **fields}), restarts, BY, 143)


@pytest.mark.parametrize(
    "found, wanted",
    [
        (_end("COMPLETING"), ("stopped", 143, "Slurm's job 11 was cancelled (scancel)")),
        (_end("CANCELLED"), ("stopped", 143, "Slurm's job 11 was cancelled (scancel)")),
        (_end("COMPLETING", "TimeLimit"), ("timeout", 124, "Slurm's job 11 exceeded its time limit")),
        (_end("TIMEOUT", "TimeLimit"), ("timeout", 124, "Slurm's job 11 exceeded its time limit")),
        (_end("DEADLINE", "DeadLine"), ("timeout", 124, "Slurm's job 11 reached its deadline")),
        (_end("RUNNING", preempted=1795435619.0), ("stopped", 143, "Slurm's job 11 was preempted")),
        (_end("COMPLETING", restarts=1), ("stopped", 143, "Slurm's job 11 was cancelled (scancel)")),
        (_end("COMPLETING", "NodeDown"), ("lost", 75, "a node of Slurm's job 11 failed")),
        (_end("NODE_FAIL", "NodeDown"), ("lost", 75, "a node of Slurm's job 11 failed")),
        (_end("OUT_OF_MEMORY", "OutOfMemory"), ("stopped", 137, "Slurm's job 11 was out of memory")),
        (_end("COMPLETING", "InactiveLimit"), ("stopped", 143, "Slurm's job 11 was ended: InactiveLimit")),
    ],
)
def test_an_end_by_slurm(found: Outcome, wanted: tuple[str, int, str]):
    assert (found.state, found.code, found.reason) == wanted
    assert (found.brief, found.source, found.culprits) == (found.reason, "tool", ())


def test_the_end_of_an_allocation_of_the_user():
    """Slurm shows the same if salloc or the script of the user ends, and if scancel ends it."""
    found = _end("COMPLETING", comment="mine")
    reason = "the allocation 11 of Slurm was ended: its shell or script has ended, or scancel"
    assert (found.code, found.reason) == (143, reason)
    assert _end("COMPLETING", "TimeLimit", comment="").code == 124


@pytest.mark.parametrize(
    ("fields", "requeue_on", "wanted"),
    [
        ({"reason": "TimeLimit"}, ("time_limit",), True),
        ({"state": "TIMEOUT"}, ("time_limit",), True),
        ({"reason": "TimeLimit"}, (), False),
        ({"reason": "TimeLimit", "requeue": False}, ("time_limit",), False),
        ({"reason": "TimeLimit", "restarts": 1}, ("time_limit",), False),
        ({}, ("time_limit",), False),
        ({"state": "RUNNING", "preempted": 1.0}, (), True),
    ],
)
def test_whether_slurm_is_asked_to_start_the_job_again(
    fields: dict[str, Any], requeue_on: tuple[str, ...], wanted: bool
):
    job = SlurmJob(**{"id": 11, "state": "COMPLETING", "requeue": True, **fields})
    assert begins_again(job, 0, requeue_on) is wanted


def test_a_job_that_was_requeued():
    job = SlurmJob(11, "COMPLETING", restarts=2)
    assert end_of(job, 1, BY, 143).reason == "Slurm's job 11 was requeued"


@pytest.mark.parametrize("code", [130, 143])
def test_a_signal_to_a_job_that_slurm_has_not_ended(code: int):
    """scancel --signal=TERM, kill, Ctrl+C in the terminal of srun."""
    found = end_of(SlurmJob(11, "RUNNING"), 0, BY, code)
    assert (found.state, found.code, found.brief) == ("stopped", code, "")
    assert found.reason == f"{BY}; Slurm has not ended job 11: its state is RUNNING"


@pytest.mark.parametrize(
    ("job", "coordinates", "lost", "wanted"),
    [
        ({}, True, True, "scancel --batch --signal=KILL 11"),
        ({}, True, False, "scancel --batch --signal=KILL 11"),
        ({}, False, True, "scancel 11"),  # the first node is lost, and with it the batch script
        ({"requeue": True}, True, True, "scontrol requeue 11"),
        ({"requeue": True}, False, True, "scontrol requeue 11"),
        (
            {"requeue": True},
            True,
            False,
            "scancel --batch --signal=KILL 11",
        ),  # the job failed, or its user has stopped it
        ({"comment": ""}, True, True, "scancel 11.3"),  # salloc, or a script of the user
        ({"comment": "clustertool other", "requeue": True}, False, True, "scancel 11.3"),
        ({"state": "COMPLETING"}, True, True, ""),
        ({"state": "NODE_FAIL"}, True, True, ""),
        ({"state": "PENDING", "requeue": True}, True, True, ""),
    ],
)
def test_the_nodes_of_a_job_with_a_lost_one_go_back(job: dict[str, object], coordinates: bool, lost: bool, wanted: str):
    found = SlurmJob(**{"id": 11, "state": "RUNNING", "comment": "clustertool J-1", **job})  # type: ignore[arg-type]
    assert give_back(found, "J-1", "3", coordinates, lost) == tuple(wanted.split())


def test_no_answer_of_slurm():
    found = outcome_without_answer("11", "it cannot start: No such file or directory", BY, 143)
    assert (found.state, found.code, found.engine) == ("stopped", 143, None)
    assert found.reason == f"{BY}; scontrol shows nothing about job 11: it cannot start: No such file or directory"


def test_the_record_of_an_outcome_has_what_slurm_recorded():
    found = _end("COMPLETING", "TimeLimit", ended=1795435742.0)
    assert found.engine == EngineEnd("slurm", "11", "COMPLETING", "TimeLimit", 1795435742.0)
    record = found.as_record()
    assert record["engine"] == {
        "engine": "slurm",
        "job": "11",
        "state": "COMPLETING",
        "reason": "TimeLimit",
        "ended": 1795435742.0,
    }
    assert read(Outcome, record) == found
    assert found.as_dict()["engine"] == record["engine"]
    check_of(event_types.Event)({"t": 1.0, "type": "verdict", **record}, "")
    with pytest.raises(Malformed, match="reason"):
        check_of(event_types.Event)(
            {"t": 1.0, "type": "verdict", **record, "engine": {**record["engine"], "reason": 7}}, ""
        )


def test_the_record_of_an_outcome_without_an_engine_is_as_before():
    assert "engine" not in Outcome("stopped", 143, "tool", "x").as_record()  # type: ignore[arg-type]
