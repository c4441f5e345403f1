"""Ranks that do not want to end: a stop ends them and everything they have started."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clustertool.node.jobs import descendants, termination
from clustertool.node.jobs.termination import Shutdown, Sweep
from clustertool.node.storage import files
from clustertool.node.system import processes
from tests.node import programs as p
from tests.node.harness import Bench, Job, alive, kill, sample, state, until

RESIST = {
    "ignores TERM": p.IGNORES_TERM,
    "setsid": p.SETSID,
    "daemon": p.DAEMON,
    "wiped environment": p.ENV_WIPED,
    "retitled": p.RETITLED,
    "zombies": p.ZOMBIES,
    "headless": p.HEADLESS,
    "storm": p.STORM,
}


def ready(bench: Bench, program: Any, **given: Any) -> Job:
    job = bench.run(None, program, **given)
    return job.ready()


def group_lives(group: int) -> bool:
    """The kernel's own answer. A search of /proc may miss processes that start others and end."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    "names", [[name for name in RESIST if name != "storm"], ["storm"]], ids=["all but storm", "storm"]
)
def test_ended_by_a_stop(bench: Bench, names: list[str]) -> None:
    job = ready(bench, p.one_each(*(RESIST[name] for name in names)), per_node=len(names))
    groups = [job.rank(rank).pid for rank in range(len(names))]
    assert all(map(group_lives, groups))
    assert job.stop(grace=0.3) == {"state": "clean", "survivors": []}
    job.gone()
    until(lambda: not any(map(group_lives, groups)), "init has reaped the dead")
    assert [job.events(0, "clean")[0]["survivors"], job.ended()["state"]] == [[], "stopped"]


@pytest.mark.parametrize("name", ["ignores TERM", "daemon", "storm"])
def test_ended_by_force(bench: Bench, name: str) -> None:
    job = ready(bench, RESIST[name])
    group = job.rank().pid
    assert group_lives(group)
    assert job.stop(grace=60.0, force=True)["state"] == "clean"
    job.gone()
    until(lambda: not group_lives(group), "init has reaped the dead")


def test_a_storm_is_ended_by_the_guard(bench: Bench) -> None:
    """Its processes are no children of the guard: only searches of all processes find them."""
    job = ready(bench, p.STORM)
    group = job.rank().pid
    kill(job.process("supervisor"))
    job.until("clean")
    job.gone()
    until(lambda: not group_lives(group), "init has reaped the dead")


def test_force_sends_no_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program must not begin to save its state, or to fork, when it is to be killed."""
    sent: list[int] = []
    send = processes.signal_one
    monkeypatch.setattr(processes, "signal_one", lambda to, number: (sent.append(number), send(to, number)))
    for grace in (0.0, 0.2):
        child = subprocess.Popen(["sleep", "600"])
        assert Sweep(filter(None, [processes.identify(child.pid)]), "no such mark").end(grace) == []
        child.wait(10)
    assert sent[0] == signal.SIGKILL
    assert sent[1:] == [signal.SIGTERM, signal.SIGCONT]


def test_grace_is_given_and_then_over(bench: Bench) -> None:
    job = ready(bench, p.IGNORES_TERM)
    job.stop(grace=0.5)
    stopping, exited = job.events(0, "stopping")[0], job.events(0, "exited")[0]
    assert (exited["signal"], exited["stopped"]) == (signal.SIGKILL, True)
    assert exited["t"] - stopping["t"] >= 0.45


@pytest.mark.parametrize("supervised", [True, False])
def test_a_program_that_saves_by_a_child(bench: Bench, supervised: bool) -> None:
    job = ready(bench, p.SAVES_BY_A_CHILD)
    job.reported(count=1)
    if not supervised:
        kill(job.process("supervisor"), signal.SIGSTOP)
        kill(job.process("guard"), signal.SIGSTOP)
    assert job.stop(grace=3.0)["state"] == "clean"
    assert job.log().endswith(b"saved\ncopied\n"), job.log()
    job.gone()


def test_children_get_term_after_their_main_process(bench: Bench) -> None:
    """Two ranks: the main process of one ends at once, that of the other one is killed."""
    job = ready(bench, p.HAS_A_CHILD, per_node=2)
    job.says(b"ready", 1)
    assert job.stop(grace=3.0)["state"] == "clean"
    stopping = job.events(0, "stopping")[0]["t"]
    early, late = (
        [float(line.split()[1]) for line in job.log(rank).splitlines() if line[:4] == b"term"] for rank in (1, 0)
    )
    assert len(early) == len(late) == 1
    assert early[0] - stopping < 1.4
    assert 1.4 < late[0] - stopping < 2.9
    job.gone()


def test_stopped_rank_receives_term(bench: Bench) -> None:
    job = ready(bench, "trap 'echo bye; exit 3' TERM; echo pid $$; echo ready; while :; do sleep 0.2; done")
    os.kill(job.rank().pid, signal.SIGSTOP)
    job.until("frozen")
    assert state(job.rank()) == "T"
    assert job.stop()["state"] == "clean"
    assert (job.events(0, "exited")[0]["code"], job.log()[-4:]) == (3, b"bye\n")


def test_stopped_rank_goes_on(bench: Bench) -> None:
    job = ready(bench, p.PLAIN)
    os.kill(job.rank().pid, signal.SIGSTOP)
    job.until("frozen")
    os.kill(job.rank().pid, signal.SIGCONT)
    job.until("thawed")
    job.stop()
    assert job.ended()["state"] == "stopped"


def test_children_left_behind_end_with_the_job(bench: Bench) -> None:
    job = bench.run(None, p.BACKGROUND)
    assert job.ended()["state"] == "succeeded"
    left = [int(line.split()[1]) for line in job.log().splitlines() if line.startswith(b"pid")]
    assert len(left) == 2 and not any(sample(pid) for pid in left)


def test_children_left_behind_live_while_others_run(bench: Bench) -> None:
    """They may still be at work for the job, such as a data loader of a launcher that has gone."""
    program = f"if [ $RANK = 0 ]; then {p.BACKGROUND}; else echo pid $$; exec sleep 1000; fi"
    job = bench.run(None, program, per_node=2)
    left = job.reported(0, count=2)
    job.until("exited")
    assert all(alive(process) for process in left)
    job.stop()
    assert not any(alive(process) for process in left)


def test_failure_ends_the_stubborn(bench: Bench) -> None:
    """Two nodes, one rank fails: the others, deaf to TERM, are killed after the policy's grace."""
    program = f"if [ $RANK = 0 ]; then until [ -e go ]; do sleep 0.2; done; exit 7; fi; {p.IGNORES_TERM}"
    job = bench.run(bench.nodes(2), program, per_node=2, policy={"grace": 0.3})
    for rank in (1, 2, 3):
        job.says(b"ready", rank)
    (job.dir() / "go").touch()
    for node in range(2):
        outcome = job.ended(node)
        assert (outcome["state"], outcome["code"], outcome["culprits"]) == ("failed", 7, [["trainer", 0]])
        assert outcome["victims"] == [["trainer", 1], ["trainer", 2], ["trainer", 3]]
    job.gone()


def test_the_last_event_waits_for_exit_codes() -> None:
    """Who was killed a moment ago lives no more, and is not waited for yet: without it the verdict would not name it."""
    killed = subprocess.Popen(["sleep", "1000"])
    process = processes.identify(killed.pid)
    assert process is not None
    family: Any = SimpleNamespace(living=lambda: [process] if alive(process) else [], has_children=lambda: False)
    ending = Shutdown(family, "no such mark", grace=0.0)
    until(lambda: not ending.turn(unreaped=True) and not alive(process))
    assert ending.turn(unreaped=True) is None and not ending.over_at
    killed.wait()
    assert ending.turn(unreaped=False) == [] and ending.over_at


def test_a_child_that_no_search_finds_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose processes each start the next one and end: a search may come between two of them each time."""
    children = [True]
    family: Any = SimpleNamespace(living=list, has_children=lambda: children[0])
    ending = Shutdown(family, "no such mark", grace=0.0)
    assert ending.turn() is None and not ending.over_at
    children[0] = False
    assert ending.turn() == [] and ending.over_at
    monkeypatch.setattr(termination, "_HOPELESS", 0.0)
    children[0] = True
    assert Shutdown(family, "no such mark", grace=0.0).turn() == [
        "processes that start others faster than they are found"
    ]


def test_a_search_follows_processes_that_start_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each listing of /proc shows a process that ends before its environment is read; the fourth one lives."""
    with subprocess.Popen(["sleep", "600"], env={"CLUSTERTOOL_MARK": "chain of four"}) as last:
        until(lambda: processes.find_marked("chain of four"))
        gone = [subprocess.Popen(["true"]) for _ in range(3)]
        chain = [*(child.pid for child in gone), last.pid]
        for child in gone:
            child.wait()
        monkeypatch.setattr(processes, "pids", lambda: [chain.pop(0)] if len(chain) > 1 else list(chain))
        (found,) = processes.find_marked("chain of four")
        assert found.pid == last.pid
        last.kill()


def test_a_sweep_counts_what_it_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has ended since may have started another one."""
    with subprocess.Popen(["sleep", "600"]) as child:
        process = processes.identify(child.pid)
        child.kill()
    monkeypatch.setattr(processes, "find_marked", lambda mark: [process])
    assert Sweep([], "a mark").living() == [process]


def test_marked_process_that_is_no_descendant(bench: Bench) -> None:
    """What a rank has started through a service of the machine: it is of this job, and ends with it."""
    job = ready(bench, p.PLAIN)
    mark = job.place_requests[0]["spec"]["mark"]
    stray, other = [
        subprocess.Popen(["sleep", "1000"], env={**os.environ, "CLUSTERTOOL_MARK": text}, start_new_session=True)
        for text in (mark, mark + "x")
    ]
    assert job.stop()["state"] == "clean"
    assert stray.wait(60) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.parametrize("threads", ["few", "many"])
def test_descendants_are_written_down(bench: Bench, threads: str) -> None:
    """Also those whose parents were gone before anybody could check, and those that come later; by both ways of searching."""
    job = ready(
        bench, p.one_each(p.DAEMON, p.ENV_WIPED_LATE, p.MANY_THREADS if threads == "many" else p.PLAIN), per_node=3
    )
    until(lambda: job.seen() >= set(job.reported()), "the daemon is in the book")
    until(lambda: job.rank(2) in job.seen())
    (job.dir() / "go").touch()
    until(lambda: job.seen() >= set(job.reported(1, count=1)), "the late one is in the book")
    lines = (job.dir() / ".clustertool/seen").read_text().splitlines()
    assert len(lines) == len(set(lines)), "each once"
    job.stop(grace=0.1)


def test_the_book_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that starts programs all the time: the dead are struck off, whoever lives is still there."""
    monkeypatch.setattr(descendants, "_MOST", 50)
    (tmp_path / "root").mkdir()
    job = files.make_job_dir(str(tmp_path / "root/JOBx"))
    head = processes.identify(os.getpid())
    assert head is not None
    book = descendants.Descendants(job, head)
    with subprocess.Popen(["sleep", "1000"]) as stays:
        book.update()
        living = len(book.members)  # with what other tests keep running
        for _ in range(120):
            with subprocess.Popen(["true"]) as brief:
                found = processes.identify(brief.pid)
                book.write_down([found] if found else [])
        book.living()
        known = descendants.recorded(job)
        stays.kill()
        assert len(known) <= 51 + living and stays.pid in [process.pid for process in known]
    os.close(job)
