"""Reasons of pending jobs: those that wait for a change are explained, the others are Slurm's own text."""

from __future__ import annotations

import pytest

from clustertool.model.slurm.slurm_answers import SlurmJob


@pytest.mark.parametrize(
    "reason", ["", "Resources", "Priority", "Dependency", "BeginTime", "AssocGrpCpuLimit", "A new one"]
)
def test_what_ends_by_waiting_is_left_alone(reason: str) -> None:
    assert SlurmJob(1, "PENDING", reason).explained_reason == reason


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (
            "PartitionTimeLimit",
            "PartitionTimeLimit: its time is above the limit of its partition, so it does not start",
        ),
        ("QOSMaxCpuPerJobLimit", "QOSMaxCpuPerJobLimit: it asks for more than a job may have, so it does not start"),
        (
            "ReqNodeNotAvail, UnavailableNodes:node1",
            "ReqNodeNotAvail, UnavailableNodes:node1: a node of nodelist is down, reserved or in use, so it does not start",
        ),
    ],
)
def test_what_needs_a_change_is_explained(reason: str, text: str) -> None:
    assert SlurmJob(1, "PENDING", reason).explained_reason == text
