"""Programs damage what the tool keeps in their directory: stop still ends them, and nothing claims what it cannot know."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clustertool.errors import PreflightError
from clustertool.model.job.formats import FORMAT
from clustertool.node.ports import claims
from clustertool.node.system import private_directory, processes
from tests.node import programs as p
from tests.node.harness import Bench, Job, Process, alive, kill, until

CLEAN = {"state": "clean", "survivors": []}
OURS = ".clustertool"


def clean(job: Job, **fields: object) -> dict[str, Any]:
    return dict(job.nodes[0].open().ask("clean", job=job.id, exact=True, now=4e9, older_than=0, **fields))


def listed(job: Job) -> dict[str, Any]:
    found = {one["id"]: one for one in job.nodes[0].open().ask("jobs")["jobs"]}
    return dict(found.get(job.id, {}))


def truncate(job: Job, *names: str) -> None:
    for name in names:
        (job.dir() / OURS / name).write_text("")


def damage_all(job: Job) -> None:
    truncate(job, "spec.json", "events.jsonl", "seen")


def remove_folder(job: Job) -> None:
    """The supervisor writes there meanwhile."""
    shutil.rmtree(job.dir() / OURS, ignore_errors=True)
    assert not (job.dir() / OURS / "marker").exists()


def remove_all(job: Job) -> None:
    shutil.rmtree(job.dir(), ignore_errors=True)
    assert not (job.dir() / OURS / "marker").exists()


@pytest.mark.parametrize("damage", [lambda job: truncate(job, "spec.json"), damage_all, remove_folder, remove_all])
def test_stop_ends_a_job_whose_records_are_damaged(bench: Bench, damage: Any) -> None:
    """As `git clean -xfd` or a careless open(..., "w") in train.py does it. The job stays listed, and clean leaves it alone."""
    job = bench.run(None, p.SETSID, per_node=2).ready()
    job.living()  # notes all processes while they are on record
    damage(job)
    assert listed(job)["state"] == "running"
    status = job.nodes[0].open().ask("status", job=job.id)
    assert status["supervised"] and [event["type"] for event in status["events"]][:2] == ["job", "supervisor"]
    answer = clean(job)
    assert (answer["removed"], answer["running"], answer["kept"]) == ([], [job.id], {})
    assert job.stop(grace=0.2) == CLEAN
    assert not job.living()
    job.gone()
    clean(job)
    assert not job.dir().exists() and listed(job) == {}
    assert not (job.dir().parent / OURS / f"jobs/{job.id}.json").exists()


def test_supervisor_and_guard_are_dead_and_records_are_damaged(bench: Bench) -> None:
    """What is left is found by the marker of the second copy."""
    job = bench.run(None, p.IGNORES_TERM).ready()
    job.living()
    damage_all(job)
    entry = json.loads((job.dir().parent / OURS / f"jobs/{job.id}.json").read_text())
    guard, supervisor = (Process(*entry[kind]) for kind in ("guard", "supervisor"))
    kill(supervisor, signal.SIGSTOP)  # else it would start another guard
    kill(guard)
    kill(supervisor)
    rank = job.reported()[0]
    assert alive(rank)
    assert listed(job)["state"] == "lost"
    assert clean(job)["running"] == [job.id]
    assert job.stop(grace=0.1) == CLEAN
    assert not alive(rank)


def test_without_the_second_copy_nothing_is_claimed(bench: Bench) -> None:
    """A job of an older version, or a copy that was lost: unknown is not clean."""
    job = bench.run(None, p.PLAIN).ready()
    job.living()
    damage_all(job)
    copy = job.dir().parent / OURS / f"jobs/{job.id}.json"
    kept = copy.read_bytes()
    copy.unlink()
    answer = job.stop()
    assert answer["state"] == "unknown" and "damaged" in answer["why"]
    found = listed(job)
    assert found["state"] == "unknown" and "damaged" in found["reason"]
    assert job.id in clean(job)["kept"] and job.dir().exists()
    copy.write_bytes(kept)
    assert job.stop(grace=0.1) == CLEAN


def test_spec_alone_is_damaged_in_a_job_of_an_older_version(bench: Bench) -> None:
    """Its supervisor is known from the events, gets the stop and proves it."""
    job = bench.run(None, p.PLAIN).ready()
    truncate(job, "spec.json")
    (job.dir().parent / OURS / f"jobs/{job.id}.json").unlink()
    assert job.stop(grace=0.1) == CLEAN
    job.gone()
    assert clean(job)["removed"] == [job.id]


def test_records_of_another_machine(bench: Bench) -> None:
    """One home on NFS, one name that leads to another machine now: neither ended nor removable from here."""
    job = bench.run(None, p.PLAIN).ready()
    entry = job.dir().parent / OURS / f"jobs/{job.id}.json"
    events = job.dir() / OURS / "events.jsonl"
    before = events.read_text(), entry.read_text()

    def becomes(hostname: str) -> None:
        own, boot, space = json.loads(before[1])["header"]["hostname"], processes.boot_id(), processes.namespace("pid")
        for path, text in zip((events, entry), before):
            text = text.replace(f'"hostname": "{own}"', f'"hostname": "{hostname}"')
            text = text.replace(f'"hostname":"{own}"', f'"hostname":"{hostname}"')
            path.write_text(text.replace(boot, "other-boot").replace(space, "pid:[1]"))

    becomes("node0")
    why = "it runs (or ran) on node0: ask there"
    assert (listed(job)["state"], listed(job)["reason"]) == ("unknown", why)
    assert job.stop() == {"state": "unknown", "survivors": [], "why": why}
    what, _ = clean(job)["kept"][job.id]
    assert why in what and job.dir().exists()
    assert job.nodes[0].ask("status", job=job.id)["unknown"] == why
    with pytest.raises(PreflightError, match="ask there"):
        job.follow()
    assert job.follow(follow=False)
    assert alive(job.rank())
    with events.open("a") as file:  # its own last word is a proof
        file.write(
            '{"t":1,"e":"clean","survivors":[]}\n{"t":1,"e":"ended","state":"stopped","code":143,"source":"tool","reason":"x"}\n'
        )
    assert listed(job)["state"] == "stopped"
    assert job.stop()["state"] == "ended already"
    assert clean(job, dry=True)["removed"] == [job.id]
    events.write_text(before[0])
    entry.write_text(before[1])
    assert job.stop(grace=0.1) == CLEAN


def test_a_job_of_another_machine_whose_directory_was_removed(bench: Bench) -> None:
    """Its copy in ROOT_DIR/.clustertool/jobs goes only where the user names the job."""
    job = bench.run(None, p.PLAIN).ready()
    entry = job.dir().parent / OURS / f"jobs/{job.id}.json"
    assert job.stop(grace=0.1) == CLEAN
    known = json.loads(entry.read_text())
    known.pop("ended", None)
    entry.write_text(json.dumps({**known, "header": {**known["header"], "hostname": "node0"}, "boot": "other-boot"}))
    (job.dir() / OURS / "events.jsonl").unlink()
    (job.dir() / OURS / "spec.json").unlink()
    assert job.id in clean(job)["kept"] and entry.exists()
    remove_all(job)
    assert listed(job)["state"] == "unknown"
    every = job.nodes[0].open().ask("clean", job="", exact=False, now=4e9, older_than=0)
    assert job.id in every["kept"] and entry.exists()
    assert clean(job, dry=True)["removed"] == [job.id] and entry.exists()
    assert clean(job)["removed"] == [job.id]
    assert not entry.exists() and not listed(job)


def test_survivors_are_no_end(bench: Bench) -> None:
    """The job has ended, and what survived its stop lives in the directory: clean leaves it."""
    job = bench.run(None, "sleep 1000 & echo pid $!; echo ready; wait").ready()
    other = job.reported()[0]
    entry = job.dir().parent / OURS / f"jobs/{job.id}.json"
    assert job.stop(grace=0.1) == CLEAN
    job.gone()
    mark = json.loads(entry.read_text())["mark"]
    survivor = subprocess.Popen(["sleep", "1000"], env={**os.environ, "CLUSTERTOOL_MARK": mark})
    try:
        assert other.pid != survivor.pid
        assert clean(job)["running"] == [job.id] and job.dir().exists()
    finally:
        survivor.kill()
        survivor.wait()
    assert clean(job)["removed"] == [job.id]


# -- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["events.jsonl", "ledger"])
def test_newer_records_are_refused_and_named(bench: Bench, file: str) -> None:
    nodes = bench.nodes(1)
    other = bench.run(nodes, "true", id="other")
    job = bench.run(nodes, p.PLAIN, id="newer").ready()
    path = job.dir().parent / OURS / "jobs/newer.json" if file == "ledger" else job.dir() / OURS / "events.jsonl"
    before = path.read_text()
    for number in (f"{FORMAT + 1}", '"two"'):
        text = before.replace(f'"format": {FORMAT}', f'"format": {number}').replace(
            f'"format":{FORMAT}', f'"format":{number}'
        )
        path.write_text(text)
        if file == "events.jsonl":
            assert listed(job)["state"] == "unknown" and str(path) in listed(job)["reason"]
            with pytest.raises(PreflightError, match="made by a newer clustertool"):
                nodes[0].ask("status", job=job.id)
            answer = job.stop()
            assert answer["state"] == "unknown" and "newer clustertool" in answer["why"]
        assert alive(job.rank())
        assert job.id not in clean(job)["removed"]
        assert listed(other)["state"] == "succeeded"
    path.write_text(before)
    assert job.stop(grace=0.1) == CLEAN


def test_records_without_a_number_are_format_1(bench: Bench) -> None:
    job = bench.run(None, p.PLAIN).ready()
    for path in (job.dir() / OURS / "events.jsonl", job.dir().parent / OURS / f"jobs/{job.id}.json"):
        path.write_text(path.read_text().replace('"format": 1, ', "").replace('"format":1,', ""))
    assert listed(job)["state"] == "running"
    assert job.stop(grace=0.1) == CLEAN


TIMES = ('"yesterday"', "null", "1e300", "[]", "NaN", "-5", "1" + "0" * 400)


def test_one_bad_record_hides_no_other(bench: Bench) -> None:
    nodes = bench.nodes(1)
    jobs = [bench.run(nodes, "true", id=f"job{number}") for number in range(2)]
    for job in jobs:
        job.ended()
        job.gone()
    bad = jobs[0].dir() / OURS / "events.jsonl"
    lines = bad.read_text().splitlines()
    header = json.loads(lines[0])
    for time in TIMES:
        first = json.dumps({**header, "created": "BAD", "t": "BAD", "skew": "BAD"}).replace('"BAD"', time)
        bad.write_text("\n".join([json.dumps({**header, "skew": "BAD"}).replace('"BAD"', time), *lines[1:], ""]))
        answer = nodes[0].ask("status", job="job0")  # the laptop does not refuse it
        if time != "-5":
            assert [event["skew"] for event in answer["events"] if event["type"] == "job"] == [0], time
        bad.write_text("\n".join([first, *lines[1:], ""]))
        assert sorted(one["id"] for one in nodes[0].ask("jobs")["jobs"]) == ["job0", "job1"], time
        stream = jobs[0].follow(by_time=True, events_at=len(first) + 1)  # the laptop refuses the first event itself
        until(lambda stream=stream: stream.ended, f"the job is followed to its end, with {time:.20}")
    for text in ("[" * 100_000, "[]", '{"e": "job", "node": [], "nodes": 5, "hostname": {}}', "\0" * 1000):
        bad.write_text("\n".join([text, *lines[1:], ""]))
        assert sorted(one["id"] for one in nodes[0].ask("jobs")["jobs"]) == ["job0", "job1"], text[:50]
    lines[-1] = '{"e": "ended"}'  # no state, no code
    bad.write_text("\n".join([*lines, ""]))
    found = {one["id"]: one["state"] for one in nodes[0].ask("jobs")["jobs"]}
    assert found == {"job0": "unknown", "job1": "succeeded"}
    assert nodes[0].ask("clean", job="job1", exact=True, now=4e9, older_than=0)["removed"] == ["job1"]


@pytest.fixture
def ports_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The claims of this user, in a /tmp of the test's own."""
    monkeypatch.setattr(private_directory, "_TMP", str(tmp_path))
    claims.claim_for_check([20001])
    assert claims.claimed_ports() == {20001: "(check)"}
    found = Path(private_directory.make("ports.json"), "ports.json")
    assert json.loads(found.read_text())["format"] == FORMAT
    return found


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "7",
        "null",
        '"x"',
        "{",
        '{"20001": ["a", "b", "c", "d"]}',
        '{"20001": 5}',
        '{"x": ["a", "b", "c"]}',
        '{"20001": [1, 2, 3]}',
        '{"20001": ["(check)", "x y z", "BOOT"]}',
        "[" * 100_000,
    ],
)
def test_claims_of_another_shape_count_for_nothing(ports_json: Path, text: str) -> None:
    ports_json.write_text(text.replace("BOOT", processes.boot_id()))
    assert claims.claimed_ports() == {}
    claims.claim_for_check([20001])
    assert claims.claimed_ports() == {20001: "(check)"}
    claims.release_check()
    assert claims.claimed_ports() == {}


def test_claims_of_a_newer_version_are_refused_and_kept(ports_json: Path) -> None:
    newer = json.dumps({"format": FORMAT + 1, "claims": [{"port": 20001}]})
    ports_json.write_text(newer)
    for do in (
        claims.claimed_ports,
        lambda: claims.claim([20002], "job", "/base"),
        lambda: claims.take_back("job", "/base"),
    ):
        with pytest.raises(PreflightError, match=f"{ports_json} has format 2 and was made by a newer clustertool"):
            do()
    assert ports_json.read_text() == newer


def test_claims_without_a_number_are_read(ports_json: Path) -> None:
    text = ports_json.read_text()
    ports_json.write_text(text.replace(f'"format": {FORMAT}, ', ""))
    assert claims.claimed_ports() == {20001: "(check)"}
    assert ports_json.read_text() != text
