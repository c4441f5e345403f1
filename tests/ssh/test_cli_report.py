"""inv report over real ssh: during the job and after it, with a node away, and with what programs print kept in its place."""

from __future__ import annotations

import re

import pytest

from tests.cli import Site, until
from tests.nvml import give
from tests.unit.test_page import EVIL, Reader

# Rank 1 fails when it gets the order; the others go on, rank 2 at a slower pace.
FAILS = f"""
    import os, sys, time
    from pathlib import Path
    rank = int(os.environ["RANK"])
    print({EVIL!r}, os.environ.get("TOKEN", ""), flush=True)
    step = 0
    while True:
        time.sleep(0.2 if rank == 2 else 0.05)
        step += 1
        print(f"step={{step}}", flush=True)
        if rank == 1 and (Path.home() / "go").exists():
            print("last words", os.environ.get("TOKEN", ""), flush=True)
            sys.exit(7)
"""


@pytest.fixture
def three(site) -> Site:
    made = site(3)
    made.workspace(train_py=FAILS)
    return made


def usage_lines(site: Site, node: int) -> int:
    (job,) = site.jobs(node)
    path = job / ".clustertool/usage.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_during_the_job_and_after_it(three: Site) -> None:
    three.conf(SECRETS=["TOKEN"])
    secret = {"TOKEN": "s3cret&<"}
    job = three.clustertool("run", "-w", "job", "--detach", env=secret).ends(0).job
    until(lambda: usage_lines(three, 2) >= 4, 60.0, lambda: "four looks at node 2")
    during = three.clustertool("report", env=secret).ends(0)
    path = three.folder / f"JOB{job}.html"
    assert re.search(rf"job {job}: running -> JOB{job}.html \(\d.* kB\)", during.out)
    reader = Reader(path.read_text())
    assert "3 running of 3 ranks" in reader.text
    assert "step of each rank" in reader.text

    until(lambda: usage_lines(three, 2) >= 9, 60.0, lambda: "enough looks to tell who is slow")
    (three.home(1) / "go").touch()
    three.gone(60.0)
    after = three.clustertool("report", "--job", job[:12], "--to", "page.html", "--json", env=secret).ends(0)
    assert (after.json["job"], after.json["file"], after.json["state"]) == (job, "page.html", "failed")
    assert [(role, rank) for role, rank, _ in after.json["stragglers"]] == [("trainer", 2)]
    page = (three.folder / "page.html").read_text()
    assert after.json["bytes"] == len(page.encode())
    reader = Reader(page)
    culprit = f"trainer 1 on {three.name(1)}"
    for reported in (culprit, "exit code 7", "last words ***", "victims): trainer 0,2", "python3 -u train.py"):
        assert reported in reader.text, reported
    assert "s3cret" not in page
    assert {name for name, _ in reader.tags}.isdisjoint({"script", "img"})
    assert not [path for path in three.folder.iterdir() if path.name.startswith(".page")]


def test_a_node_that_is_away(site) -> None:
    pair = site(2)
    pair.workspace(train_py="import sys; print('hello', flush=True); sys.exit(0)")
    job = pair.clustertool("run", "-w", "job").ends(0).job
    pair.servers[1].stop()
    done = pair.clustertool("report").ends(69)
    text = Reader((pair.folder / f"JOB{job}.html").read_text()).text
    assert f"{pair.name(1)} did not answer" in text
    assert "Succeeded" in text
    assert pair.name(1) in done.err


def test_secrets_that_are_not_known_here_are_reported(site) -> None:
    one = site(1)
    one.conf(SECRETS=["TOKEN"])
    one.workspace(train_py="print('hello')")
    one.clustertool("run", "-w", "job", env={"TOKEN": "x" * 9}).ends(0)
    done = one.clustertool("report", "--to", "page.html").ends(0)
    assert "SECRETS names TOKEN, not set where this page was made" in done.out + done.err
    assert "SECRETS names TOKEN" in Reader((one.folder / "page.html").read_text()).text


def test_restarts_are_attempts(site) -> None:
    pair = site(2)
    pair.workspace(
        train_py="import os, sys; sys.exit(os.environ['CLUSTERTOOL_ATTEMPT'] == '0' and os.environ['RANK'] == '0')"
    )
    pair.clustertool("run", "-w", "job", "--max-restarts", 1).ends(0)
    pair.clustertool("report", "--to", "page.html").ends(0)
    reader = Reader((pair.folder / "page.html").read_text())
    assert "2 attempts" in reader.text
    titles = [attributes["title"] or "" for name, attributes in reader.tags if name == "i"]
    assert [title for title in titles if title.startswith("trainer 0, attempt 0: failed")]
    assert [title for title in titles if title.startswith("trainer 0, attempt 1: done")]


def test_refused_before_any_connection(site) -> None:
    one = site(1)
    one.servers[0].stop()
    assert "no folder" in one.clustertool("report", "--to", "no/where.html").ends(64).err
    assert "is a folder" in one.clustertool("report", "--to", ".").ends(64).err


def test_no_such_job(site) -> None:
    one = site(1)
    assert "no job" in one.clustertool("report").ends(66).err
    assert "no job 'nope'" in one.clustertool("report", "--job", "nope").ends(66).err


def test_what_the_jobs_devices_did(site, nvml) -> None:
    two = site(2)
    drivers = give(two, nvml, 0, 1)
    for driver in drivers:
        driver.runs((1, 999_999_999, 40 << 10))
    two.workspace(
        train_py="""
        import time
        from pathlib import Path
        while not (Path.home() / "go").exists():
            time.sleep(0.05)
    """
    )
    two.clustertool("run", "-w", "job", "--devices", "0,1", "--detach").ends(0)

    def devices(node: int) -> int:
        (job,) = two.jobs(node)
        path = job / ".clustertool/usage.jsonl"
        return path.read_text().count('"d":') if path.exists() else 0

    until(lambda: min(map(devices, (0, 1))) >= 2, 60.0, lambda: "two looks at the cards of both nodes")
    for node in (0, 1):
        (two.home(node) / "go").touch()
    two.gone(60.0)
    two.clustertool("report", "--to", "page.html").ends(0)
    page = (two.folder / "page.html").read_text()
    for chart in ("Devices: busy", "Devices: memory", "device 0", "device 1"):
        assert page.count(chart) >= 2, chart
    assert "device 2" not in page  # no card of this job


# A rank prints a bar and a loss, which is NaN for rank 1.
PRINTS = """
    import os, time
    loss = "nan" if os.environ["RANK"] == "1" else "0.25"
    for step in range(1, 10_000):
        print(f"step={step}/10000 loss={loss} lr=1e-4", flush=True)
        time.sleep(0.05)
"""


def test_numbers_that_ranks_print(site) -> None:
    pair = site(2)
    pair.workspace(train_py=PRINTS)
    job = pair.inv("run", "-w", "job", "--detach").ends(0).job

    def rows() -> list[dict[str, object]]:
        return pair.inv("metrics", "--json").ends(0).json["rows"]

    until(lambda: len([row for row in rows() if row["eta"]]) >= 2, 60.0, lambda: f"two records of each rank: {rows()}")
    assert {(row["rank"], row["loss"]) for row in rows()} == {(0, 0.25), (1, "NaN")}
    status = pair.inv("status", "--json").ends(0).json
    assert status["progress"]["loss"] == 0.25 and status["progress"]["percent"] > 0 and status["progress"]["eta"] > 0
    assert status["warnings"] == ["the loss of trainer 1 is nan"]
    assert [one["metrics"]["lr"] for one in status["processes"]] == [1e-4, 1e-4]
    text = pair.inv("status").ends(0).out
    assert re.search(r"progress: +step \d+.*, \d+\.\d %, about .* left, loss 0\.25", text), text
    assert "the loss of trainer 1 is nan" in text
    assert re.search(r"trainer +1 +\d+ +10000 +.* +nan +0\.0001", pair.inv("metrics").ends(0).out)
    prometheus = pair.inv("metrics", "--prometheus").ends(0).out
    assert f'clustertool_loss{{job="{job}",role="trainer",rank="0"}} 0.25\n' in prometheus
    written = pair.inv("metrics", "--job", job, "--to", "loss.csv").ends(0)
    assert "-> loss.csv" in written.out
    head, *lines = (pair.folder / "loss.csv").read_text().splitlines()
    assert head.startswith("time,role,rank,attempt,epoch,step,") and len(lines) >= 4
    assert pair.inv("metrics", "--csv").ends(0).out.splitlines()[0] == head
    pair.inv("metrics", "--csv", "--prometheus").ends(64)
    top = pair.inv("top", "--json").ends(0).json
    assert {(rank["rank"], rank["loss"]) for rank in top["ranks"]} == {(0, 0.25), (1, "NaN")}
    pair.inv("report", "--to", "page.html").ends(0)
    page = Reader((pair.folder / "page.html").read_text()).text
    for shown in ("loss of each rank", "steps/s of each rank", "the loss of trainer 1 is nan"):
        assert shown in page, shown
    pair.inv("stop").ends(0)
    pair.gone(60.0)
