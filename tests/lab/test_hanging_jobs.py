"""A job that hangs says which rank, and where; a healthy one that is quiet for long is left alone. 8 ranks on 4 nodes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from tests.cli import LabSite, Running
from tests.lab.hanging_programs import HANGING, HEALTHY, LIBRARY, PSERVER, START

TIMEOUT = 5
JOB = '[trainer]\nper_node = 2\n[pserver]\ncommand = ["python3", "-u", "pserver.py"]\n'
IN_EACH_RUN = ("an extra barrier", "an evaluation of rank 0")


def cases(names: list[str]) -> list[object]:
    return [name if name in IN_EACH_RUN else pytest.param(name, marks=pytest.mark.chaos) for name in names]


def start(site: Callable[..., LabSite], text: str, *options: str, **env: str) -> tuple[LabSite, Running]:
    four = site(4, acquainted=True)
    job = four.workspace(train_py=START + text, pserver_py=PSERVER, job_toml=JOB)
    (job / "site-packages").mkdir()
    (job / "site-packages/collectives.py").write_text(LIBRARY)
    typed = [f"--env={name}={value}" for name, value in env.items()]
    running = four.start("run", "-w", "job", f"--hang-timeout={TIMEOUT}", *typed, *options)
    running.says("ready$")
    return four, running


@pytest.mark.parametrize("name", cases(list(HANGING)))
def test_the_rank_that_does_not_go_on_is_named(site: Callable[..., LabSite], name: str) -> None:
    text, found, patience, options = HANGING[name]
    four, running = start(site, text, *options)
    began = time.monotonic()
    running.says("no progress: ")
    assert time.monotonic() - began < TIMEOUT * patience + 5
    (verdict,) = re.findall("no progress: (.*)$", running.err, re.M)
    assert found in verdict, verdict
    lines = (START + text).split("\n")
    here = [number for number, line in enumerate(lines, 1) if line.endswith("# here")]
    if here:
        assert f"train.py:{here[0]})" in verdict, verdict
    four.inv("stop").ends(0)
    running.wait()


@pytest.mark.parametrize("name", cases(list(HEALTHY)))
def test_a_healthy_job_that_is_quiet_is_left_alone(site: Callable[..., LabSite], name: str) -> None:
    four, running = start(site, f"SECONDS = {TIMEOUT + 8}" + HEALTHY[name])
    time.sleep(TIMEOUT + 7)
    assert "no progress" not in running.err
    four.inv("stop")
    running.wait()
