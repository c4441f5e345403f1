"""A job that hangs says which rank, and where; a healthy one that is quiet for long is left alone. 8 ranks on 4 nodes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable

import pytest

from tests.cli import LabSite, Running
from tests.frameworks.examples import activate, find_venv
from tests.lab.hanging_programs import HANGING, HEALTHY, LIBRARIES, PSERVER, START, WITH_TORCH

TIMEOUT = 5
JOB = '[trainer]\nper_node = 2\n[pserver]\ncommand = ["python3", "-u", "pserver.py"]\n'
IN_EACH_RUN = ("an extra barrier", "an evaluation of rank 0")


def cases(names: Iterable[str]) -> list[object]:
    """Each name with each library; but for two with the plain one, in `make test-chaos` only."""
    pairs = [(library, name) for library in LIBRARIES for name in names]
    usual = [("plain", name) for name in IN_EACH_RUN]
    return [pytest.param(*pair, marks=() if pair in usual else pytest.mark.chaos) for pair in pairs]


def start(site: Callable[..., LabSite], library: str, text: str, *options: str) -> tuple[LabSite, Running]:
    """Start 8 ranks of a program on 4 nodes, and wait until they have met."""
    four = site(4, acquainted=True)
    if library == "torch":
        four.conf(PRELUDE=activate(find_venv("digits-torch")))
    job = four.workspace(train_py=START + text, pserver_py=PSERVER, job_toml=JOB)
    (job / "site-packages").mkdir()
    (job / "site-packages/collectives.py").write_text(LIBRARIES[library])
    running = four.start("run", "-w", "job", f"--hang-timeout={TIMEOUT}", *options)
    running.says("ready$", 90)
    return four, running


@pytest.mark.parametrize(("library", "name"), cases(HANGING))
def test_the_rank_that_does_not_go_on_is_named(site: Callable[..., LabSite], library: str, name: str) -> None:
    text, found, patience, options = (WITH_TORCH if library == "torch" else HANGING).get(name) or HANGING[name]
    four, running = start(site, library, text, *options)
    began = time.monotonic()
    running.says("no progress: ")
    assert time.monotonic() - began < TIMEOUT * patience + 5
    (verdict,) = re.findall("no progress: (.*)$", running.err, re.M)
    assert found in verdict, verdict
    lines = (START + text).split("\n")
    here = [number for number, line in enumerate(lines, 1) if line.endswith("# here")]
    if here:
        assert f"train.py:{here[0]})" in verdict, verdict
    assert "no progress: " in four.inv("status").ends(0).out
    four.inv("stop").ends(0)
    running.wait()


@pytest.mark.parametrize(("library", "name"), cases(HEALTHY))
def test_a_healthy_job_that_is_quiet_is_left_alone(site: Callable[..., LabSite], library: str, name: str) -> None:
    four, running = start(site, library, f"SECONDS = {TIMEOUT + 8}" + HEALTHY[name])
    time.sleep(TIMEOUT + 7)
    assert "no progress" not in running.err
    four.inv("stop")
    running.wait()
