"""Records of joined machines on one shared ROOT_DIR, read by one agent on a machine where none of their processes can be seen.

The reader has another host name and its own process numbers. So a pid in a record means another process, or none, to it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertool.actions import follow_job
from clustertool.actions.fetch_output import fetch_output
from clustertool.actions.find_jobs import (
    ask_jobs,
    engine_proof,
    locate_nodes,
    merge_answers,
    record_unknown_end,
    summaries_by_job,
)
from clustertool.actions.follow_job import Inbox, JobFollower
from clustertool.actions.read_status import as_dict, error_of, read
from clustertool.engines.base import Description, EngineState
from clustertool.errors import ClustertoolError, NodeLost, NotFound, Unreachable
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.this_machine import HereLink
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.job.state_names import JobState, RankState
from clustertool.model.wire.messages import (
    BASES,
    CLEAN,
    FOLLOW,
    LIST_FOLDER,
    LIST_JOBS,
    REPORT,
    SAMPLE,
    STATUS,
    STOP,
    TAIL,
)
from clustertool.watch.job_view import LogLines
from tests.node.harness import Process, alive, until
from tests.node.joining import JoinBench, Machine, codes, start

OTHER_HOST = ("unshare", "--uts", "--pid", "--fork", "--mount-proc", "--", "sh", "-c", "hostname login && exec /bin/sh")
RUNS, NOTHING = Description(EngineState.RUNNING), Description(EngineState.UNKNOWN, "the controller does not answer")
ENDED = Description(EngineState.ENDED, "NODE_FAIL")
UNTIL = 'echo "ready $RANK"; echo result >output/part$RANK; until [ -e {go} ]; do sleep 0.2; done; echo "last $RANK"'


class Shared:
    """Jobs of machines that join on one shared ROOT_DIR, and fleets that read it from another machine."""

    def __init__(self, bench: JoinBench) -> None:
        self.bench = bench
        self.root = bench.tmp / "shared"
        self.go = bench.tmp / "go"
        self.links: list[HereLink] = []
        self.fleets: list[Fleet] = []
        self.host = Host(0, "login", root_dir=str(self.root), name="login")

    def job(self, count: int = 2, command: str = "", **fields: Any) -> list[Machine]:
        made = self.bench.job(count, command or UNTIL.format(go=self.go), **fields)
        for machine in made:
            machine.join = replace(machine.join, own=replace(machine.join.own, root_dir=str(self.root)))
        return start(made)

    def running(self, **fields: Any) -> tuple[str, list[Machine]]:
        """A job of two nodes whose ranks have started."""
        machines = self.job(**fields)
        job = machines[0].join.identity.job_id
        for node in range(2):
            until(
                lambda node=node: f"ready {node}" in self.log(job, node), f"{machines[0].lines} {machines[0].errors!r}"
            )
            until(lambda node=node: self.events(job, node, "started"), "the start is recorded")
        return job, machines

    def dir(self, job: str, node: int = 0) -> Path:
        return self.root / f"node{node}" / f"JOB{job}"

    def log(self, job: str, node: int) -> str:
        path = self.dir(job, node) / f"log/workerlog.{node}"
        return path.read_text() if path.exists() else ""

    def events(self, job: str, node: int, kind: str) -> list[dict[str, Any]]:
        lines = (self.dir(job, node) / ".clustertool/events.jsonl").read_text().split("\n")[:-1]
        return [event for event in map(json.loads, lines) if event["type"] == kind]

    def pids(self, job: str, node: int, *kinds: str) -> list[Process]:
        found = [event for kind in kinds for event in self.events(job, node, kind)]
        return [Process(event["pid"], event["start"]) for event in found]

    def fleet(self, inbox: Inbox | None = None) -> Fleet:
        def reach(host: Host) -> HereLink:
            self.links.append(HereLink(host, OTHER_HOST))
            return self.links[-1]

        cluster = Cluster((), python=self.bench.machines[0].python, root_dir=str(self.root), loss_timeout=5.0)
        fleet = Fleet(cluster, sink=inbox.put if inbox else None, reach=reach)
        self.fleets.append(fleet)
        return fleet.open_shared(self.host)

    def attached(self, job: str, inbox: Inbox | None = None) -> Fleet:
        """A fleet whose nodes are those of the job."""
        fleet = self.fleet(inbox)
        answers = ask_jobs(fleet, job)
        fleet.reduce_to_job(*locate_nodes(summaries_by_job(answers)[job], answers, fleet.own_names()))
        return fleet

    def state(self, job: str) -> JobState:
        return merge_answers(ask_jobs(self.fleet(), job))[0]["state"]

    def age(self, job: str, seconds: float) -> None:
        """As if that time had passed since the last heartbeat of the supervisors."""
        for node in range(2):
            os.utime(self.dir(job, node) / ".clustertool/control", (time.time() - seconds,) * 2)

    def end(self) -> None:
        self.go.touch()
        for fleet in self.fleets:
            fleet.close()


@pytest.fixture
def shared(join_bench: JoinBench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    monkeypatch.setenv("HOME", join_bench.env["HOME"])
    made = Shared(join_bench)
    yield made
    made.end()


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(ClustertoolError) as caught:
        act()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_all_nodes_of_a_running_and_of_an_ended_job(shared: Shared, tmp_path: Path) -> None:
    job, machines = shared.running()
    fleet = shared.fleet()
    assert [host.name for host in fleet.cluster.hosts] == ["login", "login:node0", "login:node1"]
    answers = ask_jobs(fleet, "")
    listed = merge_answers(answers)[0]
    assert (listed["id"], listed["state"], listed["total"], listed["seen_on"]) == (job, JobState.RUNNING, 2, [0, 1])
    places, names = locate_nodes(summaries_by_job(answers)[job], answers, fleet.own_names())
    assert places == {0: 1, 1: 2}
    fleet.reduce_to_job(places, names)
    assert [host.name for host in fleet.cluster.hosts] == names

    found = as_dict(fleet.ask_all(STATUS({"job": job})))
    assert found["state"] == JobState.RUNNING
    assert [(one["rank"], one["node"], one["state"]) for one in found["processes"]] == [
        (0, 0, RankState.RUNNING),
        (1, 1, RankState.RUNNING),
    ]
    assert all(one["heartbeat"] < 30 for one in found["nodes"])
    assert all(not answer["usage"] for answer in fleet.ask_all(STATUS({"job": job})).values())
    tail = TAIL({"job": job, "log": "log/workerlog.1", "lines": 1})
    assert fleet.ask_one(1, tail)["text"] == "ready 1\n"

    shared.go.touch()
    assert codes(machines) == [0, 0]
    assert not fleet.failed
    done = read(fleet.ask_all(STATUS({"job": job})))
    assert done.outcome is not None and done.state is JobState.SUCCEEDED
    report = fleet.ask_all(REPORT({"job": job, "points": 100}))
    assert [[key for *key, _ in answer["tails"]] for answer in report.values()] == [[["trainer", 0]], [["trainer", 1]]]
    fetched = fetch_output(fleet, lambda: None, job, tmp_path / "fetched", rank="all")
    assert {rank: one.files for rank, one in fetched.items()} == {0: 1, 1: 1}
    assert (tmp_path / "fetched/rank1/part1").read_text() == "result\n"
    assert len(shared.links) == 1


def test_follow_all_nodes_over_one_connection_that_breaks(shared: Shared) -> None:
    job, machines = shared.running()
    inbox = Inbox()
    fleet = shared.attached(job, inbox)
    follower = JobFollower(fleet, inbox, job)
    follower.start({"logs": "all"})
    lines: list[str] = []

    def check() -> None:
        """The connection breaks once both ranks have printed a line; they end once it was opened again."""
        if len(shared.links) == 1 and sum(line.startswith("ready") for line in lines) == 2:
            shared.links[0].close()
        if len(shared.links) == 2 and not follower.watch.closed:
            shared.go.touch()

    for item in follower.items(check):
        if isinstance(item, LogLines):
            lines.extend(item.lines)
    assert sorted(lines) == ["last 0", "last 1", "ready 0", "ready 1"]
    assert follower.over and follower.watch.status.state is JobState.SUCCEEDED
    assert len(shared.links) == 2  # opened again once, for both nodes
    assert codes(machines) == [0, 0]


def kill_all(shared: Shared, job: str, machines: list[Machine]) -> None:
    """Ranks, supervisors and guards, so that nothing records the end. A supervisor that is stopped starts no other guard."""
    victims = [
        one for kind in ("guard", "supervisor", "started") for node in range(2) for one in shared.pids(job, node, kind)
    ]
    for machine in machines:
        machine.signal(signal.SIGSTOP)
    for victim in victims:
        if alive(victim):
            os.kill(victim.pid, signal.SIGKILL)
    codes(machines)


def test_killed_with_everything_that_watches(shared: Shared) -> None:
    """Nothing records such an end: only the heartbeat stops."""
    job, machines = shared.running()
    kill_all(shared, job, machines)
    assert shared.state(job) is JobState.RUNNING  # a recent heartbeat
    shared.age(job, 100)
    fleet = shared.attached(job)
    found = as_dict(fleet.ask_all(STATUS({"job": job})))
    assert found["state"] == JobState.UNKNOWN
    assert {one["state"] for one in found["processes"]} == {RankState.UNKNOWN}
    host = os.uname().nodename
    reason = merge_answers(ask_jobs(fleet, job))[0]["reason"]
    assert re.fullmatch(rf"its supervisor on {re.escape(host)} has given no sign of life for 1\d\d s", reason), reason


def test_the_engine_knows_the_end_of_a_followed_job(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_job, "_ASK", 0.1)
    monkeypatch.setattr(follow_job, "_LATE", 1.0)
    job, machines = shared.running(command='printf "ready $RANK\\nno end of line"; exec sleep 600')
    inbox = Inbox()
    fleet = shared.attached(job, inbox)
    asked: list[str] = []

    def engine_end(name: str) -> str | None:
        asked.append(name)
        if len(asked) == 3:
            kill_all(shared, job, machines)
        return "cancelled by uid 0" if len(asked) > 3 else None

    fleet.engine_end = engine_end
    follower = JobFollower(fleet, inbox, job)
    follower.start({"logs": "all"})
    lines = [line for item in follower.items(lambda: None) if isinstance(item, LogLines) for line in item.lines]
    assert sorted(lines) == ["no end of line", "no end of line", "ready 0", "ready 1"]
    status, error = follower.watch.status, error_of(follower.watch.status)
    assert set(asked) == {job} and len(asked) == 4
    assert status.state is JobState.LOST and {one.state for one in status.processes.values()} == {RankState.LOST}
    assert isinstance(error, NodeLost) and "ended without a verdict: cancelled by uid 0" in error.what

    listed = ask_jobs(fleet, job)
    shared.age(job, 100)
    for known, state in ((RUNS, JobState.RUNNING), (ENDED, JobState.LOST), (NOTHING, JobState.UNKNOWN)):
        for answers in (listed, ask_jobs(fleet, job)):  # with and without a recent heartbeat
            found = merge_answers(answers, {job: known})[0]
            assert found["state"] is (JobState.RUNNING if answers is listed and known is NOTHING else state)
            about = as_dict(fleet.ask_all(STATUS({"job": job})), engine_proof(fleet, found))
            assert about["state"] == state
            assert about["reason"] == ("NODE_FAIL" if known is ENDED else "")
            record_unknown_end(fleet, found, fleet.ask_all(STATUS({"job": job})))
            assert (fleet.failed != {}) == (known is NOTHING)
            fleet.failed.clear()
    assert {
        one["why"] for one in as_dict({0: fleet.ask_one(0, STATUS({"job": job}))}, ENDED)["nodes"] if one["why"]
    } == {"its processes have ended: NODE_FAIL"}


def test_what_a_reader_cannot_do(shared: Shared) -> None:
    job, machines = shared.running()
    fleet = shared.attached(job)
    how: Any = {"by": "test", "code": 143, "grace": 0.0, "force": True}
    for request in (STOP({"job": job, "exact": True, **how}), SAMPLE({"job": job, "nvml": ""})):
        what = refused(lambda request=request: fleet.ask_one(1, request))
        assert f"PreflightError: {fleet.name(1)}: {request.kind.type!r} needs an agent on the node" in what
    everything = CLEAN({"job": "", "older_than": 0.0})
    for request in (everything, CLEAN({"job": job, "exact": True, "older_than": 0.0, "ended": [job]})):
        answer = fleet.ask_one(0, request)
        assert (answer["removed"], answer["running"], list(answer["kept"])) == ([], [], [job])
    assert "gave a sign of life" in answer["kept"][job][0]
    assert shared.state(job) is JobState.RUNNING
    shared.go.touch()
    assert codes(machines) == [0, 0]


def test_only_jobs_whose_end_is_proved_are_removed(shared: Shared) -> None:
    shared.go.touch()
    jobs = []
    for _ in range(2):
        machines = shared.job()
        assert codes(machines) == [0, 0]
        jobs.append(machines[0].join.identity.job_id)
    fleet = shared.fleet()
    answers = fleet.ask_all(CLEAN({"job": "", "older_than": 0.0, "ended": jobs[:1]}))
    assert [answer["removed"] for answer in answers.values()] == [[], jobs[:1], jobs[:1]]
    assert {*answers[1]["kept"], *answers[2]["kept"]} == {jobs[1]}
    assert [one["id"] for one in merge_answers(ask_jobs(fleet, ""))] == jobs[1:]
    assert not shared.dir(jobs[0]).exists() and shared.dir(jobs[1]).is_dir()


def test_a_new_base_joins_an_open_fleet(shared: Shared) -> None:
    shared.go.touch()
    alone = shared.job(1)
    assert codes(alone) == [0]
    fleet = shared.fleet()
    assert [host.name for host in fleet.cluster.hosts] == ["login"]
    machines = shared.job(2)
    assert codes(machines) == [0, 0]
    assert [host.name for host in fleet.open_shared(shared.host).cluster.hosts] == [
        "login",
        "login:node0",
        "login:node1",
    ]
    assert {one["id"]: one["seen_on"] for one in merge_answers(ask_jobs(fleet, ""))} == {
        alone[0].join.identity.job_id: [0],
        machines[0].join.identity.job_id: [0, 1],
    }
    assert len(shared.links) == 1


def test_hostile_content(shared: Shared, tmp_path: Path) -> None:
    """Names that are no bases, links in the place of records, and claims to be another node."""
    shared.go.touch()
    machines = shared.job()
    assert codes(machines) == [0, 0]
    job = machines[0].join.identity.job_id
    (shared.root / "node7").symlink_to(shared.root / "node0")
    for name in ("node", "node01", "node-1", "node1x", "node123456", "nodes", "node\u0661"):
        (shared.root / name).mkdir()
    fleet = shared.fleet()
    assert fleet.shared is not None
    login = fleet.shared.agents[0]
    assert login.ask(BASES({}))["bases"] == ["", "node0", "node1"]
    for base in ("node7", "node9", "..", "node0/..", "/etc", "node\u0661", "node01"):
        what = refused(lambda base=base: login.ask(LIST_JOBS({"job": ""}).about(base)))
        assert "NotFound" in what and "no folder of a node" in what

    victim = shared.dir(job, 1)
    copied = shared.dir("copy", 1)
    copied.mkdir()
    (copied / ".clustertool").symlink_to(victim / ".clustertool")
    shared.dir("link", 1).symlink_to(victim)
    events = victim / ".clustertool/events.jsonl"
    first, rest = events.read_text().split("\n", 1)
    events.write_text(json.dumps({**json.loads(first), "node": 0}) + "\n" + rest)
    found = {one["id"]: one for one in fleet.ask_one(2, LIST_JOBS({"job": ""}))["jobs"]}
    assert set(found) == {job, "copy"}  # a linked directory is no job
    assert found[job]["node"] == 1
    assert found["copy"]["state"] == JobState.UNKNOWN and "is a link" in found["copy"]["reason"]
    assert "is a link" in refused(lambda: fleet.ask_one(2, STATUS({"job": "copy"})))
    kept = fleet.ask_one(2, CLEAN({"job": "copy", "exact": True, "ended": ["copy"]}))["kept"]
    assert "is a link" in kept["copy"][0] and (victim / ".clustertool/marker").exists()


def test_records_that_are_too_large_end_no_connection(shared: Shared) -> None:
    """The other nodes of the job use it, too."""
    shared.go.touch()
    machines = shared.job()
    assert codes(machines) == [0, 0]
    job = machines[0].join.identity.job_id
    lines = shared.dir(job, 1) / ".clustertool/events.jsonl"
    ended = lines.read_text().splitlines()[-1]
    sizes = {"x": 17 << 20, "\u00e9": 1 << 20}
    huge = [json.dumps({"type": "job", "t": 1.0, "command": sign * size}) for sign, size in sizes.items()]
    lines.write_text("\n".join([*lines.read_text().splitlines()[:-1], *huge, ended, ""]))
    inbox = Inbox()
    fleet = shared.attached(job, inbox)
    answers = fleet.ask_all(STATUS({"job": job}))
    assert list(answers) == [0] and "node1 are too large" in fleet.failed[1].what
    fleet.failed.clear()
    follower = JobFollower(fleet, inbox, job)
    follower.start({"logs": "all"})
    shown = [line for item in follower.items(lambda: None) if isinstance(item, LogLines) for line in item.lines]
    assert sorted(shown) == ["last 0", "last 1", "ready 0", "ready 1"]
    assert not follower.watch.refused and len(shared.links) == 1
    assert follower.watch.status.state is JobState.SUCCEEDED


def test_a_node_without_records_and_a_host_that_is_gone(shared: Shared) -> None:
    shared.go.touch()
    machines = shared.job()
    assert codes(machines) == [0, 0]
    job = machines[0].join.identity.job_id
    shutil.rmtree(shared.root / "node1")
    fleet = shared.attached(job)
    assert isinstance(fleet.failed[1], NotFound) and "no records of this job" in fleet.failed[1].what
    assert read(fleet.ask_all(STATUS({"job": job}))).state is JobState.SUCCEEDED
    shared.host = replace(shared.host, root_dir=str(shared.root / "missing"))
    assert [host.name for host in shared.fleet().cluster.hosts] == ["login"]

    def unreachable(host: Host) -> HereLink:
        raise Unreachable("no route to host", "", host.name)

    gone = Fleet(fleet.cluster, reach=unreachable).open_shared(shared.host)
    assert isinstance(gone.failed[0], Unreachable) and not gone.agents and gone.name(0) == "login"
    assert fleet.ask_one(0, LIST_FOLDER({"dir": str(shared.dir(job))}))["entries"]
    assert "NotFound" in refused(lambda: fleet.ask_one(0, FOLLOW({"job": "other"})))
