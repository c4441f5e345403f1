"""Earlier jobs of the same work: --job-id again, names, and --resume."""

from __future__ import annotations

import os
import re

import pytest

from tests.cli import Site

# Writes three snapshots for each start; begins with the newest snapshot that is there, as a script under torchrun does.
SNAPSHOTS = """
import json, os, pathlib, sys
path = pathlib.Path("output/snapshot.json")
epoch = json.loads(path.read_text())["epoch"] + 1 if path.exists() else 0
print(f"begins at epoch {epoch}", flush=True)
for epoch in range(epoch, epoch + 3):
    if os.environ["RANK"] == "0":
        path.parent.mkdir(exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"epoch": epoch}))
        new.replace(path)  # another rank never reads half of a snapshot
print("id", os.environ["PADDLE_JOB_ID"], os.environ["CLUSTERTOOL_JOB"], flush=True)
sys.exit(int(os.environ.get("CODE", "0")))
"""
WAITS = "import time; print('ready', flush=True); time.sleep(600)"
RUN = ("run", "-w", "job")


@pytest.fixture
def alone(site) -> Site:
    one: Site = site(1)
    one.workspace(train_py=SNAPSHOTS)
    return one


@pytest.fixture
def pair(site) -> Site:
    two: Site = site(2)
    two.workspace(train_py=SNAPSHOTS)
    return two


def begins(out: str) -> int:
    (epoch,) = re.findall(r"begins at epoch (\d+)", out)
    return int(epoch)


def test_a_job_id_again_gets_a_number(alone):
    assert "id exp exp\n" in alone.clustertool(*RUN, "--job-id", "exp").ends(0).out
    second = alone.clustertool(*RUN, "--job-id", "exp").ends(0)
    assert second.job == "exp-2"
    assert "id exp exp-2" in second.out, "frameworks get the id that was asked for"
    assert "job exp has ended before: the id of this one is exp-2" in second.err
    assert alone.clustertool("status", "--job", "exp", "--json").ends(0).json["job"] == "exp-2", "the newest"
    alone.clustertool("clean", "--job", "exp-1").ends(0)
    assert [path.name for path in alone.jobs(0)] == ["JOBexp-2"]
    (listed,) = alone.clustertool("jobs", "--json").ends(0).json["jobs"]
    assert (listed["id"], listed["name"]) == ("exp-2", "exp")


@pytest.mark.chaos
def test_a_name_is_accepted_as_an_id_is_and_the_id_of_a_running_job_is_refused(pair):
    pair.workspace("waits", train_py=WAITS)
    pair.clustertool("run", "-w", "waits", "--job-id", "exp", "--name", "bert", "--detach").ends(0)
    done = pair.clustertool(*RUN, "--job-id", "exp").ends(64)
    assert "--job-id exp: job exp has not ended, its state is running" in done.err
    assert "stop --job exp ends it" in done.err
    assert "job exp has not ended" in pair.clustertool(*RUN, "--resume", "bert").ends(64).err
    assert len(pair.jobs(0)) == 1
    assert "job exp: 127.0.0.[2-3]: clean" in pair.clustertool("stop", "--job", "bert").ends(0).out
    assert pair.clustertool(*RUN, "--name", "bert").ends(0).job != "exp"
    assert pair.clustertool("status", "--job", "bert", "--json").ends(0).json["name"] == "bert"
    named = pair.clustertool("jobs", "--job", "bert", "--json").ends(0).json["jobs"]
    assert [job["name"] for job in named] == ["bert", "bert"]
    assert pair.clustertool("fetch", "--job", "bert", "--json").ends(0).json["job"] == named[0]["id"] != "exp"


def test_resume_continues_from_the_output_of_an_ended_job(pair):
    first = pair.clustertool(*RUN).ends(0)
    assert begins(first.out) == 0
    old = pair.root(0) / f"JOB{first.job}/output"
    (old / "best").symlink_to(old / "snapshot.json")
    fresh = pair.clustertool(*RUN).ends(0)
    assert begins(fresh.out) == 0
    hint = f"job {first.job} of this script has left an output on 127.0.0.2, and this one begins without"
    assert f"{hint}: --resume continues from it" in fresh.err
    pair.clustertool("clean", "--job", fresh.job).ends(0)
    again = pair.clustertool(*RUN, "--resume", "--env", "CODE=3").ends(3)
    assert begins(again.out) == 3
    assert f"resuming job {first.job}: its output is copied on 127.0.0.2; 127.0.0.3 has none of it" in again.err
    assert os.readlink(pair.root(0) / f"JOB{again.job}/output/best").endswith(f"JOB{again.job}/output/snapshot.json")
    assert (old / "snapshot.json").read_text() == '{"epoch": 2}', "the old output stays as it is"
    assert begins(pair.clustertool(*RUN, "--resume").ends(0).out) == 6, "a failed job has left an output too"


def test_nodes_that_share_a_root_copy_their_own_output(pair, tmp_path):
    pair.conf(ROOT_DIR=str(tmp_path / "shared"))
    pair.workspace(train_py=SNAPSHOTS.replace("snapshot.json", "of-{os.environ['RANK']}").replace('Path("', 'Path(f"'))
    (pair.folder / "job/train.py").write_text(
        (pair.folder / "job/train.py").read_text().replace('["RANK"] == "0"', '["RANK"]')
    )
    pair.clustertool(*RUN).ends(0)
    again = pair.clustertool(*RUN, "--resume", "--all-ranks").ends(0)
    assert again.out.count("begins at epoch 3") == 2
    assert "its output is copied on 127.0.0.[2-3]" in again.err
    for node in (0, 1):
        assert os.listdir(tmp_path / f"shared/node{node}/JOB{again.job}/output") == [f"of-{node}"]


def test_job_toml_resumes_a_workspace_that_lies_on_the_nodes(alone):
    folder = alone.home(0) / "job"
    folder.mkdir()
    (folder / "train.py").write_text(SNAPSHOTS.replace('"output/snap', 'os.environ["CLUSTERTOOL_OUTPUT"] + "/snap'))
    (folder / "job.toml").write_text("resume = true\n")
    run = ("run", "--job-workspace", "~/job")
    first = alone.clustertool(*run).ends(0)
    assert begins(first.out) == 0
    assert "there is no output of an earlier job; this one starts anew" in first.err
    assert begins(alone.clustertool(*run).ends(0).out) == 3
    assert begins(alone.clustertool(*run, "--resume", "none").ends(0).out) == 0


def test_no_output_is_copied_out_of_the_job_directory(alone, tmp_path):
    job = alone.workspace(train_py=SNAPSHOTS.replace('"output/', '"results/'))
    (job / "job.toml").write_text('[outputs]\npath = "results"\n')
    first = alone.clustertool(*RUN).ends(0)
    old, other = alone.root(0) / f"JOB{first.job}/results", tmp_path / "shared"
    other.mkdir()
    (other / "snapshot.json").write_text("of another job")
    (job / "results").symlink_to(other)
    refused = alone.clustertool(*RUN, "--resume").ends(69)
    assert re.search(rf"127\.0\.0\.2: \S+/JOB\S+/results leads to {other}, outside of the job's directory", refused.err)
    assert (other / "snapshot.json").read_text() == "of another job"
    assert len(alone.jobs(0)) == 1, "the new job is taken back"
    old.rename(other.with_name("moved"))
    old.symlink_to(other)  # as if that job had had the link, too: its script then continues in the same folder
    (other / "snapshot.json").write_text('{"epoch": 2}')
    assert begins(alone.clustertool(*RUN, "--resume", first.job).ends(0).out) == 3


def test_files_of_the_working_directory_are_kept_by_name(pair):
    """As PyTorch's tutorial writes its snapshot; other files of the program stay with the old job."""
    script = SNAPSHOTS.replace('"output/snap', '"snap')
    pair.workspace(train_py=script.replace("print(f", 'pathlib.Path("other.txt").touch(); print(f'))
    first = pair.clustertool(*RUN).ends(0)
    assert begins(first.out) == 0
    fresh = pair.clustertool(*RUN).ends(0)
    assert begins(fresh.out) == 0
    hint = f"job {first.job} of this script has left other.txt and snapshot.json in its directory, and this one begins without"
    assert f"{hint}: --resume --keep other.txt --keep snapshot.json continues from them" in fresh.err
    again = pair.clustertool(*RUN, "--resume", "--keep", "snapshot.json").ends(0)
    assert begins(again.out) == 3
    assert f"resuming job {fresh.job}: snapshot.json is copied on 127.0.0.2" in again.err
    named = pair.clustertool(
        *RUN, "--resume", first.job, "--keep", "snapshot.json", "--keep", "other.txt", "--detach"
    ).ends(0)
    assert "other.txt is copied on 127.0.0.[2-3]" in named.err
    missing = pair.clustertool(*RUN, "--resume", first.job, "--keep", "model.pt").ends(66)
    assert f"job {first.job} has left no model.pt on these nodes" in missing.err
    for wrong in (
        ("--keep", "snapshot.json"),
        ("--resume", "--keep", "../up"),
        ("--resume", "--keep", ".clustertool/spec.json"),
    ):
        assert "--keep" in pair.clustertool(*RUN, *wrong).ends(64).err
