"""Another user who can write to a folder above ROOT_DIR, or to ROOT_DIR, does not choose what this user's jobs run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clustertool.errors import PreflightError
from clustertool.node.system import path_trust
from tests.cli import LoopSite
from tests.node.harness import Bench, until

OTHER = 4002
root_only = pytest.mark.skipif(os.getuid() != 0, reason="files of another user need root")


@pytest.fixture
def top(tmp_path: Path) -> Iterator[Path]:
    """A folder that only this user may write to."""
    folder = tmp_path / "top"
    folder.mkdir(mode=0o755)
    yield folder
    path_trust.set_group("")


def mode(folder: Path, bits: int, uid: int = -1, gid: int = -1) -> None:
    folder.mkdir(exist_ok=True)
    os.chown(folder, uid, gid)
    folder.chmod(bits)


def reported(folder: Path) -> str:
    """What is wrong and the fix, on one line; "" for nothing."""
    return "; ".join(path_trust.unsafe(str(folder)) or ())


@root_only
@pytest.mark.parametrize("missing", [False, True])
def test_a_parent_of_another_user(top: Path, missing: bool) -> None:
    mode(top / "ann", 0o755, OTHER)
    root = top / "ann" / "ct"
    if not missing:
        root.mkdir()
    assert reported(root).startswith(f"{top}/ann belongs to user {OTHER}, who can replace its content; choose a folder")


@root_only
def test_root_dir_of_another_user(top: Path) -> None:
    mode(top / "ct", 0o1777, OTHER)
    assert f"{top}/ct belongs to user {OTHER}" in reported(top / "ct")


def test_a_folder_that_all_may_write_to(top: Path) -> None:
    mode(top / "open", 0o777)
    assert f"all users may write to {top}/open" in reported(top / "open" / "ct")
    assert f"chmod o-w {top}/open" in reported(top / "open" / "ct")
    path_trust.set_group("trusted")
    assert f"all users may write to {top}/open" in reported(top / "open" / "ct")
    mode(top / "open", 0o1777)
    assert reported(top / "open" / "ct") == ""


@root_only
def test_a_folder_that_a_group_may_write_to(top: Path) -> None:
    mode(top / "lab", 0o2775, gid=OTHER)
    wrong = reported(top / "lab" / "ct")
    assert f"the group {OTHER} may write to {top}/lab" in wrong
    assert f"chmod g-w {top}/lab" in wrong and 'ROOT_DIR_GROUP = "trusted"' in wrong
    path_trust.set_group("trusted")
    assert reported(top / "lab" / "ct") == ""
    path_trust.set_group("")
    mode(top / "lab", 0o3775, gid=OTHER)
    assert reported(top / "lab" / "ct") == "", "a sticky folder lets each user rename their own files only"


@root_only
def test_only_the_private_group_of_the_user_is_accepted(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import grp

    mode(top / "mine", 0o775, gid=0)
    assert reported(top / "mine") == "", "the group root has no member"
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("root", "x", 0, ["root"])))
    assert reported(top / "mine") == ""
    for name, members in (("root", ["ann"]), ("staff", [])):
        row = grp.struct_group((name, "x", 0, members))
        monkeypatch.setattr(grp, "getgrgid", lambda gid, row=row: row)
        assert f"the group {name} may write to {top}/mine" in reported(top / "mine")


@root_only
def test_links_are_followed_and_checked(top: Path) -> None:
    (top / "good").mkdir()
    mode(top / "evil", 0o755, OTHER)
    (top / "link").symlink_to("good/../good")
    assert reported(top / "link" / "ct") == ""
    (top / "away").symlink_to(top / "evil")
    assert f"{top}/evil belongs to user {OTHER}" in reported(top / "away" / "ct")
    os.lchown(top / "link", OTHER, -1)
    assert f"{top}/link belongs to user {OTHER}" in reported(top / "link" / "ct")
    (top / "round").symlink_to("round")
    assert "too many links" in reported(top / "round")
    (top / "nowhere").symlink_to("missing")
    assert f"{top}/nowhere is a link to {top}/missing, which is not there" in reported(top / "nowhere")


@root_only
def test_the_node_refuses_it_and_the_probe_reports_it(bench: Bench) -> None:
    mode(bench.tmp / "lab", 0o2775, gid=OTHER)
    node = bench.nodes(1, root=bench.tmp / "lab" / "ct")[0]
    job = bench.job([node])
    (problem,) = node.probe()["problems"]
    assert problem[:2] == ["root", "error"] and "ROOT_DIR: the group 4002 may write to" in problem[2]
    with pytest.raises(PreflightError, match="the group 4002 may write to") as raised:
        job.place()
    assert 'ROOT_DIR_GROUP = "trusted"' in raised.value.fix
    assert not node.root.exists(), "nothing was made there"
    trusting = bench.nodes(1, root=bench.tmp / "lab" / "ct", ROOT_DIR_GROUP="trusted")
    assert trusting[0].probe()["problems"] == []
    bench.run(trusting).ended()


@root_only
def test_a_folder_of_job_workspace_that_others_may_write_to_gives_a_warning(bench: Bench) -> None:
    mode(bench.tmp / "work", 0o777)
    (problem,) = bench.nodes(1)[0].probe(job_workspace=str(bench.tmp / "work"))["problems"]
    assert problem[:2] == ["workspace", "warn"] and f"all users may write to {bench.tmp}/work" in problem[2]


def test_a_rank_starts_in_the_jobs_own_directory_whatever_lies_at_its_path(bench: Bench) -> None:
    """A folder above is replaced between two attempts; the second one runs what the job brought."""
    program = 'test "$CLUSTERTOOL_ATTEMPT" = 0 && { until [ -e ../../go ]; do sleep 0.05; done; exit 3; }; cat what'
    node = bench.nodes(1, root=bench.tmp / "ann" / "ct")[0]
    job = bench.job([node], program, policy={"max_restarts": 1}).place()
    (job.dir() / "what").write_text("the job's own\n")
    job.start()
    job.until("started")
    (bench.tmp / "ann").rename(bench.tmp / "taken")
    evil = bench.tmp / "ann" / "ct" / job.dir().name
    evil.mkdir(parents=True)
    (evil / "what").write_text("another user's\n")
    (bench.tmp / "taken" / "go").touch()
    log = bench.tmp / "taken/ct" / job.dir().name / "log/attempt1/workerlog.0"
    until(lambda: log.exists() and log.read_text(), "the second attempt has run")
    assert log.read_text() == "the job's own\n"
    until(lambda: '"ended"' in (log.parents[2] / ".clustertool/events.jsonl").read_text())


@root_only
def test_run_and_dispatch_refuse_it_also_where_the_release_is_stored(site: Callable[..., LoopSite]) -> None:
    made = site(1)
    made.workspace(train_py="print('ran')")
    lab = made.folder / "lab"
    mode(lab, 0o755)
    made.conf(ROOT_DIR=str(lab / "ct"))
    made.inv("dispatch", "-w", "job").ends(0)
    assert made.inv("dispatch", "-w", "job", "--json").ends(0).json["had"]
    mode(lab, 0o2775, gid=OTHER)
    for verb in (("check",), ("dispatch", "-w", "job"), ("run", "-w", "job")):
        done = made.inv(*verb).ends(69)
        tokens = done.out + done.err
        assert f"{lab}" in tokens and "chmod g-w" in tokens and "ROOT_DIR_GROUP" in tokens, tokens
    made.conf(ROOT_DIR=str(lab / "ct"), ROOT_DIR_GROUP="trusted")
    assert "ran" in made.inv("run", "-w", "job").ends(0).out
