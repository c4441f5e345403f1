"""The documentation site in a real browser: every page opens and fetches nothing from other servers, and the search finds.

`make docs` installs the generator that it needs.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.browser.chromium import Chromium
from tests.browser.test_report_page import overflow
from tests.cli import REPO, until

# What the search shows is in a shadow tree, which also has the input.
FOUND = "[...document.querySelectorAll('*')].map(one => one.shadowRoot?.textContent ?? '').join(' ')"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Requests are no news."""


pytestmark = pytest.mark.skipif(not importlib.util.find_spec("zensical"), reason="needs zensical (make docs)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder of the site, and the address of a server for it."""
    folder = tmp_path_factory.mktemp("docs")
    done = subprocess.run([sys.executable, REPO / "scripts/make-docs.py", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    root = folder / "site"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(root)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield root, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("link", ["nowhere.md", "reference.md#nowhere"])
def test_a_link_that_leads_nowhere_ends_the_build(site: tuple[Path, str], tmp_path: Path, link: str) -> None:
    """After the check of our own script, which sees no headings."""
    shutil.copytree(site[0].parent, tmp_path / "docs", ignore=shutil.ignore_patterns("site", ".cache"))
    with (tmp_path / "docs/pages/index.md").open("a") as page:
        page.write(f"\n[a link]({link})\n")
    build = "import runpy, sys, pathlib; sys.exit(runpy.run_path(sys.argv[1])['build'](pathlib.Path(sys.argv[2])))"
    argv = [sys.executable, "-c", build, REPO / "scripts/make-docs.py", tmp_path / "docs"]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 1
    assert "does not exist" in done.stderr
    assert "Traceback" not in done.stderr


def foreign(browser: Chromium, address: str) -> set[str]:
    return {url for url in browser.fetched if not url.startswith((address, "data:"))}


def test_every_page_opens_and_fetches_nothing_from_others(site: tuple[Path, str], browser: Chromium) -> None:
    root, address = site
    pages = sorted(page.relative_to(root).as_posix() for page in root.rglob("*.html") if page.name != "404.html")
    pages = [page for page in pages if not page.startswith("decisions/0")]  # one for each record, all of the same form
    assert {
        "index.html",
        "first-run.html",
        "guides/torch.html",
        "reference/options.html",
        "zh-CN/first-run.html",
    } <= set(pages)
    for page in pages:
        browser.open(address + quote(page), 1280, 800)
        assert browser.value("document.querySelector('article h1').textContent.length") > 1, page
        assert overflow(browser) <= 0, page
        links = browser.value("[...document.querySelectorAll('a[href]')].map(one => one.href.split('#')[0])")
        missing = {url for url in links if url.startswith(address) and not (root / url[len(address) :]).is_file()}
        assert missing - {address} == set(), page
    assert browser.complaints == []
    assert foreign(browser, address) == set()


def test_a_reader_on_a_telephone(site: tuple[Path, str], browser: Chromium) -> None:
    for page in ("index.html", "first-run.html", "reference/options.html", "reference.html", "zh-CN/first-run.html"):
        browser.open(site[1] + page, 360, 740)
        assert overflow(browser) <= 0, page


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("only-where-read", "Large data"),  # a section of the guide
        ("--only-where-read", "ReferenceOptions"),  # the path of the page
        ("PADDLE_PORTS_NUM", "Keys of conf.py"),
        ("exit code 75", "How a job ends"),
        ("工作区", "第一个作业"),
    ],
)
def test_search(site: tuple[Path, str], browser: Chromium, query: str, page: str) -> None:
    browser.open(site[1] + "index.html", 1280, 800)
    browser.value("document.querySelector('.md-search__button').click(), 1")
    until(lambda: browser.value("document.activeElement.shadowRoot?.querySelector('input') !== null"), 10)
    time.sleep(0.2)
    browser.ask("Input.insertText", text=query)
    until(lambda: page in browser.value(FOUND), 10, lambda: browser.value(FOUND))


def test_from_the_home_page_to_the_first_run(site: tuple[Path, str], browser: Chromium) -> None:
    browser.open(site[1] + "index.html", 1280, 800)
    browser.value("[...document.querySelectorAll('article a')].find(one => one.textContent == 'First run').click(), 1")
    until(lambda: browser.value("document.querySelector('article h1')?.textContent ?? ''").startswith("First run"), 10)
    until(lambda: browser.visible("three nodes"), 10)
