"""A node that logs in and does not answer is a failure (69) in every verb, and a bug on one node (70) hides no other node."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli import LoopSite, until
from tests.ssh.sshd import USER

Sites = Callable[..., LoopSite]
TRAIN = "import time\nprint('ready', flush=True)\ntime.sleep(1000)\n"


@contextlib.contextmanager
def away(site: LoopSite, node: int) -> Iterator[None]:
    """ROOT_DIR of a node cannot be read, as when its file server is away."""
    root = site.root(node)
    aside = root.with_name("aside")
    if root.exists():
        root.rename(aside)
    root.write_text("no directory")
    try:
        yield
    finally:
        root.unlink()
        if aside.exists():
            aside.rename(root)


@pytest.fixture
def running(site: Sites) -> tuple[LoopSite, str]:
    """A job that runs on two nodes."""
    pair = site(2)
    pair.workspace(train_py=TRAIN)
    job = pair.inv("run", "-w", "job", "--detach").ends(0).job
    logs = [pair.root(node) / f"JOB{job}/log/workerlog.{node}" for node in (0, 1)]
    until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs))
    return pair, job


def test_no_verb_takes_a_silent_node_for_one_without_jobs(running: tuple[LoopSite, str]) -> None:
    pair, job = running
    silent = pair.name(1)
    with away(pair, 1):  # the other node tells what it knows
        found = pair.inv("jobs", "--json").ends(69).json
        assert [one["id"] for one in found["jobs"]] == [job] and list(found["unreachable"]) == [silent]
        shown = pair.inv("status", "--json").ends(69).json
        ranks = [one["rank"] for one in shown["processes"] if one["state"] == "running"]
        assert ranks == [0], shown
        assert "ready" in pair.inv("logs", "--rank", 0).ends(69).out
        assert silent in pair.inv("fetch", "--rank", 1).ends(69).err
        assert pair.inv("clean", "--job", job).ends(64)
        pair.inv("report", "--to", "page.html").ends(69)
        assert silent in (pair.folder / "page.html").read_text()
        done = pair.inv("stop", "--grace", "0.2").ends(69)
        assert f"{pair.name(0)}: clean" in done.out and f"{silent}: did not answer" in done.out
    pair.gone()
    assert pair.inv("stop", "--job", job).ends(0)
    # the same of the silent node alone; no process of the job is left, which a stop would end
    verbs = (
        ["jobs"],
        ["stop"],
        ["status"],
        ["logs"],
        ["fetch"],
        ["report"],
        ["clean", "--older-than", "0s"],
        ["attach"],
    )
    alone(pair, *verbs)


def alone(pair: LoopSite, *verbs: list[str]) -> None:
    """Node 1 is the only one of conf.py, and silent."""
    pair.conf(HOSTS=[f"{USER}@{pair.servers[1].entry}"])
    with away(pair, 1):
        for verb in verbs:
            done = pair.inv(*verb).ends(69)
            assert "cannot be read" in done.err and pair.name(1) in done.err, verb
            assert "nothing to stop" not in done.out.splitlines() and "no job" not in done.err, verb


@pytest.mark.chaos
def test_no_option_takes_a_silent_node_for_one_without_jobs(running: tuple[LoopSite, str]) -> None:
    pair, job = running
    with away(pair, 1):
        for verb in (["fetch", "--rank", 7], ["logs", "--file", "workerlog.1"]):
            assert pair.name(1) in pair.inv(*verb).ends(69).err, verb
    pair.inv("stop", "--grace", "0.2").ends(0)
    pair.gone()
    alone(pair, ["stop", "--all"], ["stop", "--job", job], ["status", "--job", job])


def test_top_and_stop_name_the_node(site: Sites) -> None:
    """Nothing runs on the node that answers: nothing is known of the other one."""
    pair = site(2)
    with away(pair, 1):
        done = pair.inv("stop", "--json").ends(69)
        assert done.json["exit"]["code"] == 69
        assert "nothing to stop on the nodes that answered" in done.err
        assert pair.name(1) in pair.inv("top", "--count", 1).ends(69).out
    assert "nothing to stop" in pair.inv("stop").ends(0).out.splitlines()


# -- bugs ---------------------------------------------------------------------------------------------------------------


def broken_on(site: LoopSite, node: int, line: str) -> str:
    """A python that runs `line` first on one node: stands for whatever makes our code fail there, and there alone."""
    path = site.folder / "python-with-a-fault"
    path.write_text(
        f"""#!/bin/sh
case "$SSH_CONNECTION $HOME" in
*{site.home(node)}*) exec {sys.executable} "$1" "$2" "import os
{line}
$3" "$4" ;;
*) exec {sys.executable} "$@" ;;
esac
"""
    )
    path.chmod(0o755)
    return str(path)


def test_a_bug_on_one_node_hides_no_other(site: Sites) -> None:
    pair = site(2)
    pair.conf(PYTHON=broken_on(pair, 1, "os.sched_getaffinity = None"))
    done = pair.inv("check", "--json").ends(70)
    rows: dict[str, Any] = {row["node"]: row["findings"] for row in done.json["nodes"]}
    assert rows[pair.name(1)]["ssh"]["level"] == "bad" and "TypeError" in rows[pair.name(1)]["ssh"]["text"]
    assert rows[pair.name(0)]["python"]["level"] == "ok"
    done = pair.inv("check").ends(70)
    assert "Traceback" in done.err and "report it" in done.out and "Traceback" not in done.out
    pair.workspace(train_py="")
    assert pair.name(1) in pair.inv("run", "-w", "job").ends(70).err
    pair.inv("run", "-w", "job", "--skip-bad").ends(0)


def test_a_bug_in_jobs_and_report_of_one_node(site: Sites) -> None:
    pair = site(2)
    pair.workspace(train_py="print('ready')")
    job = pair.inv("run", "-w", "job").ends(0).job
    pair.conf(PYTHON=broken_on(pair, 1, "os.uname = None"))
    done = pair.inv("jobs", "--json").ends(70)
    assert [one["id"] for one in done.json["jobs"]] == [job]
    assert list(done.json["unreachable"]) == [pair.name(1)]
    done = pair.inv("report", "--job", job, "--to", "page.html").ends(70)
    page = Path(pair.folder / "page.html").read_text()
    assert f"{pair.name(1)} did not answer" in page and "ready" in page
    pair.inv("status", "--job", job).ends(70)


def test_a_fifo_in_place_of_a_record_blocks_no_reader(site: Sites) -> None:
    one = site(1)
    one.workspace(train_py="print('ready')")
    jobs = [one.inv("run", "-w", "job").ends(0).job for _ in range(2)]
    for name in ("events.jsonl", "spec.json"):
        path = one.root(0) / f"JOB{jobs[0]}/.clustertool/{name}"
        path.unlink()
        os.mkfifo(path)
    found = {entry["id"]: entry["state"] for entry in one.inv("jobs", "--json").ends(0).json["jobs"]}
    assert found[jobs[1]] == "succeeded" and set(found) == set(jobs)
