"""What an agent does for an engine with a queue: programs of the login host, and the folders of submitted jobs."""

from __future__ import annotations

import base64
import json
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from clustertool.errors import DispatchError, NotFound, UsageError
from clustertool.model.dispatch.manifest import name_of, text_of
from clustertool.model.paths import BUNDLE, JobPaths
from clustertool.node.storage.release_store import Store
from clustertool.node.system import programs
from tests.node.harness import Bench, Node, marked, until


def about(job: str, **more: Any) -> dict[str, object]:
    texts = {"name": "n", "asked": "", "command": "python train.py", "mode": "collective", "owner": "ann"}
    return {"job": job, **texts, "nodes": 2, "created": 1.5, "release": "", "slurm_id": "", **more}


def encoded(**texts: str) -> dict[str, str]:
    return {name.replace("_", "."): base64.b64encode(text.encode()).decode() for name, text in texts.items()}


def ask(node: Node, name: str, **fields: Any) -> dict[str, Any]:
    answer = node.ask(name, **fields)
    del answer["re"]
    return answer


def program(node: Node, *argv: str, seconds: float = 10.0, **env: str) -> dict[str, Any]:
    answer = ask(node, "program", argv=list(argv), env=env, seconds=seconds)
    path = answer.pop("path")
    assert os.path.isabs(path) if answer["code"] != 127 else not path
    return answer


def test_a_program_gets_its_arguments_unchanged(bench: Bench) -> None:
    (node,) = bench.nodes()
    odd = ["$(id)", "a b", "; rm -rf x", "*", "'\"", "ü"]
    done = program(node, "printf", "%s\n", *odd)
    assert done == {"code": 0, "stdout": "".join(f"{one}\n" for one in odd), "stderr": ""}
    assert program(node, "cat")["stdout"] == "", "its stdin is empty"
    assert program(node, "sh", "-c", "echo out; echo err >&2; exit 3") == {
        "code": 3,
        "stdout": "out\n",
        "stderr": "err\n",
    }
    assert program(node, "sh", "-c", "echo $SLURM_TIME_FORMAT", SLURM_TIME_FORMAT="%s a")["stdout"] == "%s a\n"


def test_the_input_of_a_program() -> None:
    """Of a login shell, for example."""
    assert programs.output(["cat"], 10.0, "x\n" * 100_000) == (0, "x\n" * 100_000, "")
    assert programs.output(["true"], 10.0, "x" * 1_000_000) == (0, "", "")  # it reads nothing


def own(node: Node) -> set[int]:
    """The agent, and the shell that the login has started, if there is one."""
    return {node.client.pid, node.client.link.channels[-1].popen.pid}


def test_a_program_that_does_not_end_is_killed_with_its_children(bench: Bench) -> None:
    (node,) = bench.nodes(env={"MARK_OF_THIS_TEST": str(bench.tmp)})
    began = time.monotonic()
    done = program(node, "sh", "-c", "sleep 600 & sleep 600", seconds=0.5)
    assert (done["code"], time.monotonic() - began < 60) == (-1, True)
    mark = f"MARK_OF_THIS_TEST={bench.tmp}"
    until(lambda: {one.pid for one in marked(mark)} == own(node), "what was killed is dead")


def test_programs_that_are_not_wanted_any_more(bench: Bench) -> None:
    """They end at once with their children, and their requests are answered by an error."""
    (node,) = bench.nodes(env={"MARK_OF_THIS_TEST": str(bench.tmp)})
    mark = f"MARK_OF_THIS_TEST={bench.tmp}"
    node.open()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(program, node, "sh", "-c", "echo out; sleep 600 & sleep 600", seconds=600.0)
        until(lambda: len(marked(mark)) == len(own(node)) + 3, "it runs")
        assert ask(node, "programs-end") == {}
        assert {one.pid for one in marked(mark)} == own(node)
        with pytest.raises(DispatchError, match="was ended"):
            running.result(10)
    assert program(node, "echo", "next")["stdout"] == "next\n"
    assert ask(node, "programs-end") == {}


def test_a_program_that_only_a_login_shell_has_on_its_path(bench: Bench, tmp_path: Path) -> None:
    """`module load slurm` in a profile: the path and the variables of that shell, whatever it prints."""
    home, tools = tmp_path / "home", tmp_path / "tools"
    home.mkdir()
    tools.mkdir()
    (tools / "a-batch").write_text('#!/bin/sh\nprintf \'%s %s\' "$SLURM_CONF" "$1"\n')
    (tools / "a-batch").chmod(0o755)
    profile = f"echo Welcome; echo careful >&2\nexport PATH=$PATH:{tools} SLURM_CONF='/etc/a b\n=c'\n"
    (home / ".profile").write_text(profile)
    (node,) = bench.nodes(env={"HOME": str(home), "PATH": "/usr/bin:/bin"})
    assert program(node, "a-batch", "x") == {"code": 0, "stdout": "/etc/a b\n=c x", "stderr": ""}
    assert program(node, "no-such-program") == {"code": 127, "stdout": "", "stderr": ""}
    assert program(node, str(tools / "a-batch"), "x")["stdout"] == " x"  # by its path: with the agent's own variables
    given = {"argv": [str(tools / "a-batch"), "x"], "env": {}, "seconds": 10.0}
    assert ask(node, "program", **given, login=True)["stdout"] == "/etc/a b\n=c x"


def test_the_folder_of_a_submitted_job(bench: Bench) -> None:
    (node,) = bench.nodes()
    assert ask(node, "submissions") == {"submissions": []}
    node.ask("submit", about=about("a1"), files=encoded(bundle_pyz="key", job_sh="#!/bin/sh\n"))
    folder = Path(JobPaths(str(node.root), "a1").queue)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.iterdir()]}
    assert modes == {"a1": 0o700, "bundle.pyz": 0o600, "job.sh": 0o600, "submission.json": 0o600}
    assert (folder / "bundle.pyz").read_text() == "key"
    with pytest.raises(UsageError):
        node.ask("submit", about=about("a1"), files={})
    node.ask("submitted", job="a1", slurm_id="4711")
    assert node.open().ask("submissions")["submissions"] == [about("a1", slurm_id="4711")]
    for _ in range(2):
        node.ask("withdraw", job="a1", only_bundle=True)
        assert sorted(path.name for path in folder.iterdir()) == ["job.sh", "submission.json"]
    node.ask("withdraw", job="a1")
    node.ask("withdraw", job="a1")
    assert not folder.exists()
    with pytest.raises(NotFound):
        node.ask("submitted", job="a1", slurm_id="1")


def test_a_folder_that_cannot_be_written_whole_leaves_nothing(bench: Bench) -> None:
    (node,) = bench.nodes()
    with pytest.raises(Exception, match="cannot be written"):
        node.ask("submit", about=about("a1"), files={**encoded(job_sh="x"), "bundle.pyz": "no base64!"})
    assert not Path(JobPaths(str(node.root), "a1").queue).exists()
    with pytest.raises(UsageError):
        node.ask("submit", about=about("../a1"), files={})


def test_damaged_and_hostile_entries_hide_no_other_job(bench: Bench, tmp_path: Path) -> None:
    (node,) = bench.nodes()
    for job in ("good", "torn", "typed", "newer", "other"):
        node.ask("submit", about=about(job), files={})
    queue = Path(JobPaths(str(node.root), "good").queue).parent
    written = json.loads((queue / "good/submission.json").read_text())
    (queue / "torn/submission.json").write_text("{")
    (queue / "typed/submission.json").write_text(json.dumps({**written, "job": "typed", "nodes": "2"}))
    (queue / "newer/submission.json").write_text(json.dumps({**written, "job": "newer", "format": 99}))
    (queue / "other/submission.json").write_text(json.dumps(written))
    (queue / "linked").symlink_to(queue / "good")
    (queue / "-x").mkdir()
    os.mkfifo(queue / "torn/bundle.pyz")
    assert ask(node, "submissions") == {"submissions": [about("good")]}
    node.ask("withdraw", job="linked")
    assert (queue / "good").is_dir()


def test_the_workspace_of_a_queued_job_is_not_pruned(tmp_path: Path) -> None:
    root = tmp_path / "root"
    store = Store(str(root))
    names = []
    for number in range(8):
        piece = b"%d" % number
        assert store.add(name_of(piece), piece)
        text = text_of([["p", name_of(piece), 1, ""], ["s", "file", 0o640, 10**18, 0, 1]])
        names.append(f"{number:032x}")
        store.complete(names[-1], text)
        os.utime(root / ".clustertool/releases" / names[-1], (number, number))
    for job, release in (("queued", names[0]), ("started", names[1])):
        folder = Path(JobPaths(str(root), job).queue)
        folder.mkdir(parents=True)
        (folder / "submission.json").write_text(json.dumps(about(job, release=release)))
        (folder / BUNDLE).touch()
    (folder / BUNDLE).unlink()  # the coordinator has removed it: all nodes have joined
    store.prune()
    assert [name for name in names if store.has(name)] == [names[0], *names[4:]]
    assert store.read(name_of(b"0")) == b"0"


def test_a_release_that_vanishes_while_old_ones_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that share ROOT_DIR install the same bundle at the same time: the file of another one gets its final name."""
    store = Store(str(tmp_path / "root"))
    store.complete("f" * 32, text_of([]))
    listed = os.listdir
    gone = f"{'f' * 32}.{'0' * 8}.part"
    monkeypatch.setattr(os, "listdir", lambda top: [*listed(top), gone] if top == store.releases else listed(top))
    store.prune()
    assert store.has("f" * 32)
