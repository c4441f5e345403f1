"""The verbs with an engine without a way to the nodes: one agent reads the records of all of them on a shared directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import CLUSTERTOOL as CLI
from tests.cli import until

IMPORT = f"import sys\n\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport shared_process\n\n"
WAITS = """
    import os, time
    print("ready", os.environ["RANK"], os.environ["NODE_NAME"], flush=True)
    open("output/part" + os.environ["RANK"], "w").close()
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.05)
    print("last", os.environ["RANK"])
"""


@pytest.fixture
def readers(here):
    """A folder whose conf.py names the engine; its jobs end when `go` is there."""
    settings = {"spool": str(here.folder / "spool"), "nodes": 2, "shared": True}
    conf = f"{IMPORT}ENGINE = 'shared-process'\nSHARED_PROCESS = {settings!r}\n"
    (here.folder / "conf.py").write_text(f"{conf}ENV = {{'GO': {str(here.folder / 'go')!r}}}\nGRACE = 1\n")
    here.workspace(train_py=WAITS)
    return here


def test_verbs_read_the_records_of_all_nodes(readers):
    run = readers.start("run", "-w", "job", "--all-ranks", "--job-id", "X", program=CLI)
    run.says("ready 0 local0")
    run.says("ready 1 local1")
    assert [one["state"] for one in readers.clustertool("jobs", "--json").ends(0).json["jobs"]] == ["running"]
    status = readers.clustertool("status", "--json").ends(0).json
    assert [(one["rank"], one["state"], one["cpu"]) for one in status["processes"]] == [
        (0, "running", None),
        (1, "running", None),
    ]
    assert [one["name"] for one in status["nodes"]] == ["local0", "local1"]
    assert readers.clustertool("logs", "--rank", "1").ends(0).lines() == ["[trainer 1 local1] ready 1 local1"]
    assert "job X runs" in readers.clustertool("clean", "--job", "X").ends(64).err
    (readers.folder / "go").touch()
    done = run.wait().ends(0)
    assert "[trainer 0 local0] last 0" in done.out and "[trainer 1 local1] last 1" in done.out

    assert "job X: succeeded" in readers.clustertool("attach", "--job", "X").ends(0).err
    fetched = readers.clustertool("fetch", "--rank", "all", "--to", "got").ends(0).lines()
    assert [line.partition(",")[0] for line in fetched] == ["rank 0: 1 file", "rank 1: 1 file"]
    assert (readers.folder / "got/rank1/part1").exists()
    readers.clustertool("report", "--to", "report.html").ends(0)
    assert "local1" in (readers.folder / "report.html").read_text()
    until(lambda: '"ended"' in (readers.folder / "spool/X/state").read_text())
    assert readers.clustertool("clean", "--job", "X", "--json").ends(0).json["removed"] == ["X"]
    assert not [*(readers.folder / "spool/root").glob("node*/JOB*")]
