"""A report inside a notebook, in Chromium: the frame shows it, and runs nothing even if a script got into the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustertool.api import Job
from clustertool.model.config.cluster import read_cluster
from tests.browser.chromium import Chromium

BROKEN = """<!doctype html><h1>the report</h1><script>parent.document.title = "taken"</script>
<img src="x" onerror="parent.document.title = 'taken'"></iframe><script>document.title = "left the frame"</script>"""


@pytest.mark.parametrize("sandbox", [True, False])
def test_a_script_in_a_report_does_not_run(
    browser: Chromium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: bool
) -> None:
    """Without the sandbox the same page takes the notebook over: the test can see it."""
    monkeypatch.setattr(Job, "report", lambda self: BROKEN)
    shown = Job(read_cluster({"HOSTS": ["node1"]}), "x")._repr_html_()
    page = tmp_path / "notebook.html"
    page.write_text(f"<!doctype html><title>notebook</title>{shown if sandbox else shown.replace('sandbox', 'id')}")
    browser.open(page, 1000, 800)
    assert browser.value("document.title") == ("notebook" if sandbox else "taken")
    assert browser.value("document.querySelector('iframe').srcdoc.includes('<h1>the report</h1>')")
    assert browser.value("document.querySelector('iframe').offsetHeight") > 300
