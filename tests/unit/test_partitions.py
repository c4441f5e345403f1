"""The limits of partitions as scontrol shows them, and jobs that sbatch takes and that never start."""

from __future__ import annotations

from typing import Any

import pytest

from clustertool.model.slurm.partitions import limits_exceeded, read_partitions
from clustertool.model.slurm.slurm_settings import read_settings

LINE = (
    "PartitionName={name} AllowGroups=ALL {more} AllocNodes=ALL Default={default} QoS=N/A DefaultTime=NONE DisableRootJobs=NO"
    " ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes={nodes} MaxTime={time} MinNodes={least} LLN=NO MaxCPUsPerNode=UNLIMITED"
    " Nodes=n[0-2] PriorityJobFactor=1 PriorityTier=10 State={state} TotalCPUs=12 TotalNodes=3 JobDefaults=(null)"
)
FREE = {
    "default": "NO",
    "more": "AllowAccounts=ALL AllowQos=ALL",
    "nodes": "UNLIMITED",
    "time": "UNLIMITED",
    "least": 0,
}


def lines(**partitions: dict[str, Any]) -> str:
    return "\n".join(LINE.format(**{**FREE, "state": "UP", "name": name, **one}) for name, one in partitions.items())


ALL = read_partitions(
    lines(
        free={},
        day={"default": "YES", "time": "1-00:00:00"},
        short={"time": "00:01:00", "nodes": 2},
        wide={"least": 4},
        closed={"state": "DOWN"},
        lab={"more": "AllowAccounts=a,b AllowQos=high"},
        most={"more": "DenyAccounts=c DenyQos=low"},
    )
    + "\nno partition\n"
)


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        ({"time": "2-00", "nodes": 9}, ["partition day: its longest time is 1 d 00 h, not 2 d 00 h"]),
        ({"time": "24h", "nodes": 9}, []),
        ({}, []),
        ({"partition": "free", "time": "unlimited", "nodes": 99, "account": "c", "qos": "low"}, []),
        ({"partition": "day", "time": "unlimited"}, ["partition day: its longest time is 1 d 00 h, not no limit"]),
        ({"partition": "day", "time": "0"}, ["partition day: its longest time is 1 d 00 h, not no limit"]),
        (
            {"partition": "short", "time": 10, "nodes": 3},
            [
                "partition short: its longest time is 1 min 00 s, not 10 min 00 s",
                "partition short: a job has at most 2 of its nodes, not 3",
            ],
        ),
        ({"partition": "wide", "nodes": 3}, ["partition wide: a job has at least 4 of its nodes, not 3"]),
        ({"partition": "closed"}, ["partition closed: it is DOWN"]),
        ({"partition": "closed,free"}, []),
        (
            {"partition": "closed,wide"},
            ["partition wide: a job has at least 4 of its nodes, not 1", "partition closed: it is DOWN"],
        ),
        ({"partition": "lab", "account": "a", "qos": "high"}, []),
        ({"partition": "lab"}, []),  # the account of the user is not known
        (
            {"partition": "lab", "account": "c", "qos": "low"},
            ["partition lab: the account c may not use it", "partition lab: the qos low may not use it"],
        ),
        ({"partition": "most", "account": "a", "qos": "high"}, []),
        ({"partition": "most", "account": "c"}, ["partition most: the account c may not use it"]),
        ({"partition": "most", "qos": "low"}, ["partition most: the qos low may not use it"]),
        ({"partition": "no-such"}, []),
    ],
)
def test_what_is_beyond_the_limits(settings: dict[str, Any], reasons: list[str]) -> None:
    assert limits_exceeded(read_settings(settings), ALL) == reasons
