"""A machine that joins and whose file system does not answer gives up the placing of the job, and reports it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from clustertool.errors import ClustertoolError, PreflightError
from clustertool.node.join import child_task
from clustertool.node.join.child_task import ChildTask, place_task
from clustertool.node.system.node_context import step
from tests.node.harness import sample, until
from tests.node.joining import JoinBench, Machine

PATIENCE = 0.5
# A file system of FUSE whose server never answers, at sys.argv[1], for this process and what it starts. The server is the
# descriptor: when the last process that has it ends, all that wait for the file system go on with an error.
STUCK = """
import os, subprocess, sys
fd = os.open("/dev/fuse", os.O_RDWR)
os.set_inheritable(fd, True)
options = f"fd={fd},rootmode=40000,user_id=0,group_id=0"
subprocess.run(["mount", "-i", "-t", "fuse", "-o", options, "stuck", sys.argv[1]], check=True, pass_fds=[fd])
os.execv(sys.argv[2], sys.argv[2:])
"""
Place = Callable[[], dict[str, object]]


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Place], ChildTask]:
    """task(place) -> a task whose work is this function."""

    def make(place: Place) -> ChildTask:
        monkeypatch.setattr(child_task.place, "place", lambda node, request: place())
        request: Any = {"spec": {"root": str(tmp_path), "job_dir": str(tmp_path / "JOBx"), "token": "t"}, "release": ""}
        return ChildTask(place_task(request, PATIENCE), 5.0)

    return make


def reply(task: ChildTask) -> object:
    return until(lambda: [found] if (found := task.reply()) is not None else [])[0]


def test_work_that_moves_has_no_limit(task: Callable[[Place], ChildTask]) -> None:
    def slow() -> dict[str, object]:
        for _ in range(12):
            time.sleep(0.1)
            step()
        return {}

    one = task(slow)
    assert reply(one) == {}
    one.keep()


def test_work_that_does_not_move_is_an_error(task: Callable[[Place], ChildTask], tmp_path: Path) -> None:
    one = task(lambda: time.sleep(1.5) or {})
    began = time.monotonic()
    with pytest.raises(PreflightError, match=f"no progress in {tmp_path}/JOBx for 0.5 s") as found:
        reply(one)
    assert time.monotonic() - began < 1.4
    assert f"remove {tmp_path}/JOBx" in found.value.fix
    one.undo()
    assert sample(one.pid) is None


def test_work_that_ends_after_it_was_given_up_is_taken_back(task: Callable[[Place], ChildTask], tmp_path: Path) -> None:
    def late() -> dict[str, object]:
        time.sleep(1.0)
        step()
        (tmp_path / "after").touch()
        return {}

    one = task(late)
    with pytest.raises(ClustertoolError):
        reply(one)
    one.undo()
    assert not (tmp_path / "after").exists(), "its next step ends it"


def behind_stuck_files(machine: Machine, folder: Path) -> Machine:
    """The machine sees such a file system at `folder`; the others do not."""
    start = machine._popen
    private = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", STUCK, str(folder)]

    def popen(argv: Sequence[str]) -> Any:
        return start([*private, *argv])

    machine._popen = popen  # type: ignore[method-assign]
    return machine


@pytest.mark.chaos
@pytest.mark.skipif(os.getuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and FUSE")
def test_a_file_system_that_never_answers(join_bench: JoinBench, tmp_path: Path) -> None:
    """The logs are shown in a folder that does not answer: an NFS server that is gone."""
    shown = tmp_path / "folder/log"
    shown.mkdir(parents=True)
    machines = join_bench.job(2, "true", folder=shown.parent, options={"log_dir": "log"})
    began = time.monotonic()
    machines[0].start()
    behind_stuck_files(machines[1], shown).start()
    assert [machine.wait(150.0) for machine in machines] == [69, 69]
    assert 60 < time.monotonic() - began < 120
    for machine in machines:
        assert f"no progress in {machines[1].job_dir} for 60 s" in machine.error
    assert not machines[0].left()
    assert machines[1].left(), "its directory is named in the error"
