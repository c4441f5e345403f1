"""Programs of Slurm on the login host, as the engine runs them: late answers, and the accounting where there is one."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from clustertool.engines.slurm import slurm_host
from clustertool.engines.slurm.slurm_host import SlurmHost

DONE = {"path": "/usr/bin/x", "code": 0, "stdout": "", "stderr": ""}


def host(answer: dict[str, Any], seconds: float = 0.0) -> tuple[SlurmHost, list[str], list[Any]]:
    """The host, the notes that it makes, and the programs that it is asked to run."""
    notes: list[str] = []
    asked: list[Any] = []

    def ask_one(node: int, request: Any, timeout: float) -> Any:
        asked.append(request.fields["argv"])
        time.sleep(seconds)
        return {**DONE, **answer}

    cluster = SimpleNamespace(hosts=[SimpleNamespace(here=False)])
    fleet = SimpleNamespace(cluster=cluster, ask_one=ask_one, name=lambda node: "login")
    return SlurmHost(fleet, notes.append), notes, asked  # type: ignore[arg-type]


def test_a_late_answer_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each program. Programs of Slurm retry for some 10 s where slurmctld does not answer."""
    monkeypatch.setattr(slurm_host, "_SLOW", 0.05)
    slurm, notes, _ = host({}, 0.4)
    slurm.queue()
    assert notes == ["waiting for squeue on login; is slurmctld running? scontrol ping on that host shows it"]
    slurm.run("srun", "true")
    assert notes[1:] == ["waiting for srun on login"]
    quick, none, _ = host({})
    quick.queue()
    assert none == []


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ({"stdout": "OUT_OF_MEMORY\n"}, "OUT_OF_MEMORY"),
        ({"stdout": "CANCELLED by 1000\nCANCELLED by 1000\n"}, "CANCELLED by 1000"),
        ({"stdout": ""}, ""),
        ({"code": 1, "stderr": "Slurm accounting storage is disabled"}, ""),
        ({"code": 127, "path": ""}, ""),
    ],
)
def test_the_state_of_an_ended_job_by_the_accounting(answer: dict[str, Any], state: str) -> None:
    slurm, _, asked = host(answer)
    assert slurm.ended_state(41) == state
    assert asked[0][0] == "sacct" and "--jobs=41" in asked[0] and "--json" not in asked[0]
