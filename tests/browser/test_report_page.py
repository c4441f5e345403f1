"""The report of a real run in a real browser: the culprit and the straggler are seen at once, and nothing is fetched.

CLUSTERTOOL_SCREENSHOT=docs/report.png keeps the picture that the documentation shows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from clustertool.model.job.progress import Metrics
from tests.browser.chromium import Chromium
from tests.cli import REPO, Site
from tests.unit.reports import BEGAN, answers, story_of

HERE = Path(__file__).parent


def overflow(browser: Chromium) -> float:
    """Pixels that stand out at the right."""
    return float(browser.value("document.documentElement.scrollWidth - innerWidth"))


def word2vec(site: Site) -> Path:
    """The page of a run with one slow and one crashed rank."""
    workspace = site.folder / "word2vec"
    made = shutil.ignore_patterns("train_data_dir", "output", "__pycache__")
    shutil.copytree(REPO / "workspaces/word2vec", workspace, ignore=made)
    subprocess.run(
        [sys.executable, workspace / "prepare.py", "--min-count", "20"], check=True, stdout=subprocess.DEVNULL
    )
    shutil.copy(HERE / "faulty.py", workspace)
    site.inv("run", "-w", workspace, "--script", "faulty.py --async --epochs 10000 --report 1 --dim 16").ends(1)
    site.inv("report", "--to", "page.html").ends(0)
    return site.folder / "page.html"


def test_one_slow_and_one_crashed_rank(site, browser: Chromium, tmp_path: Path) -> None:
    # PATH of a scrubbed environment has no virtual environment, and the example needs numpy
    three = site(3).conf(PRELUDE=f"PATH={Path(sys.executable).parent}:$PATH")
    page = word2vec(three)
    browser.open(page, 1280, 800)
    culprit, straggler = f"trainer 1 on {three.name(1)}", f" on {three.name(2)}: at step"
    for text in ("Failed", culprit, "FloatingPointError: the loss is nan", "victims", straggler, "straggler: "):
        assert browser.visible(text), text
    assert browser.value("scrollY") == 0
    kept = os.environ.get("CLUSTERTOOL_SCREENSHOT")
    Path(kept or tmp_path / "report.png").write_bytes(browser.screenshot())
    assert browser.value("[...document.querySelectorAll('b.straggler')].map(one => one.textContent)") == ["trainer 2"]
    assert browser.complaints == []
    assert browser.fetched == [page.as_uri()]


def test_light_dark_and_small(browser: Chromium, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for nodes, each in ((3, 2), (24, 8)):
        page.write_text(_page(nodes, each))
        for dark in (False, True)[: 1 + (nodes == 3)]:
            browser.open(page, 1280, 800, dark)
            paper = browser.value("getComputedStyle(document.body).backgroundColor")
            assert (paper == "rgb(255, 255, 255)") is not dark
            assert overflow(browser) <= 0
            assert browser.visible("trainer 1 on node0")
            assert browser.visible(": at step")
        for width in (500, 360):
            browser.open(page, width, 740)
            assert overflow(browser) <= 0
            narrow = "[...document.querySelectorAll('td')].filter(one => one.innerText && one.clientWidth < 60).length"
            assert browser.value(narrow) == 0, "no column is a few letters wide"
            wide = "[...document.querySelectorAll('.wide')].filter(one => one.scrollWidth > one.clientWidth).length"
            assert browser.value(wide) == 0, "no table scrolls"
        assert browser.visible("trainer 1 on node0")
    assert browser.complaints == []


def test_numbers_and_stacks_of_64_ranks(browser: Chromium, tmp_path: Path) -> None:
    """Half of the ranks wait in the same place; each other one has a stack of its own."""
    from clustertool.show.report_html import page

    given = answers(16, 4, 3600.0)
    for node, answer in given.items():
        for rank in range(4 * node, 4 * node + 4):
            frames = [
                [f"call_{number}", "/job/a_long_name_of_a_file_of_the_user.py", number + rank % 32]
                for number in range(40)
            ]
            about = ["trainer", rank, 100 + rank, False, "python3", "/job", "S", ""]
            answer.setdefault("stacks", [0.0, []])
            answer["stacks"] = [BEGAN + 5, [*answer["stacks"][1], [*about, [["", frames]]]]]
    story = story_of(given)
    numbers = [(9.0 * at, Metrics(loss=9.0 / (at + 1), steps_per_second=3.0)) for at in range(400)]
    text = page(replace(story, ranks=[replace(rank, numbers=numbers) for rank in story.ranks]), BEGAN)
    assert len(text.encode()) < 2_000_000
    (tmp_path / "page.html").write_text(text)
    for width in (500, 1400):
        for dark in (False, True):
            browser.open(tmp_path / "page.html", width, 900, dark)
            assert overflow(browser) <= 0
            assert browser.value("document.body.innerText.includes('Stacks when no rank made progress')")
            assert browser.value("document.body.innerText.includes('trainer 0,32: ')")
            (tmp_path / f"page-{width}-{dark}.png").write_bytes(browser.screenshot())
    assert browser.complaints == []


def test_nothing_runs_and_nothing_is_fetched_whatever_got_in(browser: Chromium, tmp_path: Path) -> None:
    """The policy in the head holds even where escaping had failed."""
    page = tmp_path / "page.html"
    evil = (
        '<script>document.title = "run"</script><img src="http://127.0.0.1:9/x.png">'
        '<link rel=stylesheet href="http://127.0.0.1:9/y">'
    )
    page.write_text(_page(1, 2).replace("<main>", f"<main>{evil}"))
    browser.open(page, 1280, 800)
    assert browser.value("document.title") == "job 20261121-000000-test: failed"
    assert len(browser.complaints) >= 2  # the browser says what it refused
    assert "Content Security Policy" in browser.complaints[0]


def _page(nodes: int, each: int) -> str:
    from clustertool.show.report_html import page

    return page(story_of(answers(nodes, each, 3600.0)), BEGAN)
