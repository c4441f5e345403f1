"""The answers of squeue and sinfo. All are answers of Slurm 22.05.8, with SLURM_TIME_FORMAT=%s."""

from __future__ import annotations

import pytest

from clustertool.model.engine_views import EngineNode
from clustertool.model.slurm.slurm_answers import (
    NODES,
    QUEUE,
    SlurmJob,
    gpus_of,
    read_nodes,
    read_queue,
    read_steps,
)

PENDING = "12|PENDING|Resources|1795436523|N/A|N/A||(null)|2-4|wrap|12"
RUNNING = "11|RUNNING|None|1795436523|1795436524|1795443723|vm|clustertool X|1|a;b c|11"
MIXED = "vm|mixed|2/2/0/4|2000|gpu:a100:2|gpu:a100:1(IDX:0)|{partition}|none|"
DOWN = "n2|down*|0/0/4/4|16000|(null)|gpu:0|debug|Not responding|"


def marked(*lines: str) -> str:
    return "".join(line.replace("|", "\x1f") + "\n" for line in lines)


def test_the_jobs_of_a_user() -> None:
    pending, running = read_queue(marked(PENDING, RUNNING))
    assert pending == SlurmJob(id=12, state="PENDING", reason="Resources", submitted=1795436523.0, nodes=2, name="wrap")
    assert running == SlurmJob(
        id=11,
        state="RUNNING",
        submitted=1795436523.0,
        started=1795436524.0,
        nodelist="vm",
        comment="clustertool X",
        nodes=1,
        name="a;b c",
    )


def test_the_expected_start_of_a_pending_job() -> None:
    (job,) = read_queue(marked(PENDING.replace("N/A", "1795440000", 1)))
    assert job.expected == 1795440000.0 and job.started is None


def test_the_steps_of_a_user() -> None:
    """Those of Slurm itself have a name in place of a number."""
    steps = marked("11.batch|1795436524|vm|batch", "11.3|1795436530|vm[1-2]|clustertool X", "11.3")
    (step,) = read_steps(marked(PENDING, RUNNING), steps)
    assert (step.number, step.id, step.clustertool_job, step.state) == ("11.3", 11, "X", "RUNNING")
    assert (step.started, step.nodelist) == (1795436530.0, "vm[1-2]")


@pytest.mark.parametrize("shown", ["20_1", "20+1", "11"])
def test_a_step_has_the_raw_id_of_its_job(shown: str) -> None:
    """In an array, and in a heterogeneous job."""
    queue = marked(RUNNING.replace("11|", "20|", 1).replace("|11", "|20_2"), RUNNING.replace("|11", f"|{shown}"))
    (step,) = read_steps(queue, marked(f"{shown}.0|1795436530|vm|clustertool X", "20_7.0|1795436530|vm|clustertool Y"))
    assert (step.number, step.id) == ("11.0", 11)


@pytest.mark.parametrize(
    "text", ["", "slurm_load_jobs error: Unable to contact slurm controller", PENDING, marked("x" + PENDING)]
)
def test_other_lines_are_no_jobs(text: str) -> None:
    assert read_queue(text) == []


def test_a_node_has_all_of_its_partitions() -> None:
    mixed, down = read_nodes(marked(MIXED.format(partition="debug"), DOWN, MIXED.format(partition="second")))
    assert mixed == EngineNode(
        name="vm",
        state="mixed",
        partitions=("debug", "second"),
        cpus=4,
        used_cpus=2,
        memory=2000,
        gpus=(("a100", 2, 1),),
    )
    assert (down.state, down.cpus, down.gpus, down.reason) == ("down, no answer", 4, (), "Not responding")


def test_the_order_of_its_partitions_is_that_of_their_names() -> None:
    """sinfo has an order for each node."""
    lines = [MIXED.format(partition=name) for name in ("second", "debug", "first")]
    assert read_nodes(marked(*lines)) == read_nodes(marked(*reversed(lines)))


@pytest.mark.parametrize("text", ["", "x", "\x1f" * 8, marked(MIXED.replace("2/2/0/4", "four"))])
def test_other_lines_are_no_nodes(text: str) -> None:
    assert read_nodes(text) == []


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        ("gpu:2", (("", 2),)),
        ("gpu:a100:2(S:0-1),gpu:v100:1(S:0,2)", (("a100", 2), ("v100", 1))),
        ("gpu:1g.5gb:7,craynetwork:4,mygpu:3", (("1g.5gb", 7),)),
        ("gpu:a100:2(IDX:0,3)", (("a100", 2),)),
        ("(null)", ()),
        ("", ()),
    ],
)
def test_gpus_of_a_node(gres: str, found: object) -> None:
    assert gpus_of(gres) == found


def test_the_commands_ask_for_all_fields() -> None:
    assert QUEUE[-1].count("%") == 11 and NODES[-1].count(":") == 8
