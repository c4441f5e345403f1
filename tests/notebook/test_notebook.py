"""A notebook in a real IPython kernel: bars and reports are displays of their cells, and no cell has printed anything.

`make test-notebook` installs what it needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.cli import REPO, LoopSite

nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel (make test-notebook)")
pytest.importorskip("ipykernel", reason="needs ipykernel (make test-notebook)")
import nbformat  # noqa: E402 - it comes with nbclient

STEPS = """
    import os, pathlib, time
    print("<script>alert(1)</script>", flush=True)
    for step in range(1000):
        print(f"step={step}", flush=True)
        time.sleep(0.1)
        if (pathlib.Path.home() / "go").exists():
            break
"""
CELLS = (
    "from clustertool.api import Cluster\ncluster = Cluster.from_conf('conf.py')\njob = cluster.run('job')",
    "job",
    "job.wait()",  # interrupted
    "import pathlib; [pathlib.Path(home, 'go').touch() for home in open('homes').read().split()]\njob.wait().state",
    "job",
    "cluster.run('job', command=['python3', '-c', '1 / 0']).wait()",  # fails
)


def html_of(cell: Any) -> list[str]:
    return [output["data"]["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]


@pytest.fixture
def cells(site: Callable[..., LoopSite]) -> list[Any]:
    """The cells after their execution. An interrupt ends the third one, which waits for a job that goes on."""
    here = site(2)
    here.workspace(train_py=STEPS)
    (here.folder / "homes").write_text(" ".join(str(here.home(node)) for node in range(2)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "SSH_"))}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    client = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        allow_errors=True,
        interrupt_on_timeout=True,
        timeout_func=lambda cell: 4 if cell.source == "job.wait()" else 60,
        resources={"metadata": {"path": str(here.folder)}},
    )
    client.execute(env={**kept, "HOME": str(here.laptop), "PYTHONPATH": str(REPO)})
    return list(notebook.cells)


def test_bars_and_reports_are_shown_inline(cells: list[Any]) -> None:
    run, during, interrupted, ended, after, failed = cells
    printed = [output for cell in cells for output in cell.outputs if output.output_type == "stream"]
    assert printed == []

    (bar,) = html_of(run)
    assert '<progress value="2" max="2"' in bar and "2 of 2 ranks started" in bar
    (report,) = html_of(during)
    assert report.startswith("<iframe ") and 'sandbox=""' in report and "<script" not in report
    assert "job " in report and "running" in report

    assert [output.ename for output in interrupted.outputs if output.output_type == "error"] == ["KeyboardInterrupt"]
    (bar,) = html_of(interrupted)  # updated in place while it waited
    assert "0 of 2 trainers done, step " in bar

    assert ended.outputs[-1]["data"]["text/plain"] == "<JobState.SUCCEEDED: 'succeeded'>"
    assert [text for text in html_of(ended) if "succeeded" in text and "<progress" not in text]
    assert "succeeded" in html_of(after)[0].lower()

    (error,) = [output for output in failed.outputs if output.output_type == "error"]
    assert error.ename == "JobFailed"
    if sys.version_info >= (3, 11):  # its notes
        assert "ZeroDivisionError: division by zero" in "\n".join(error.traceback)
