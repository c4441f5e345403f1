"""The page about troubleshooting quotes messages that exist, and each row of its first table leads to a section."""

from __future__ import annotations

import re

from clustertool.model.job.outcome import RankExit, failed
from clustertool.model.planning.ports import LOWEST_PORT
from clustertool.show.job_text import news_text
from clustertool.watch.news import EventNews
from tests.cli import REPO

PAGE = (REPO / "docs/troubleshooting.md").read_text()
SOURCES = "\n".join(path.read_text() for path in sorted((REPO / "clustertool").rglob("*.py")))
MADE = [  # of several parts
    failed([RankExit("trainer", 0, 0, 9, note="out of memory: the kernel killed it (oom_kill in /sys)", node="n1")]),
    news_text(EventNews(0.0, "n1", {"type": "lost", "t": 0.0, "node": 1, "why": "no heartbeat for 10 s", "ranks": []})),
    "the disk of /home is full",
]
# Messages of the kernel, Python, sshd and the frameworks.
OTHERS = {
    "No module named 'torch'",
    "paddle",
    "python3: not found",
    "Connection refused",
    "unhandled system error",
    "connectFullMesh failed",
    "Timed out",
    "No space left on device",
    ".bashrc",
}


def test_quoted_messages_exist() -> None:
    seen = re.findall(r"\*\*You see\*\* (.*?)\n\n", PAGE, re.S)
    assert len(seen) >= 10
    quoted = {" ".join(span.split()) for text in seen for span in re.findall(r"`([^`]+)`", text)}
    quoted -= {"stop", *OTHERS}
    assert [text for text in quoted if text not in SOURCES and not any(text in made for made in MADE)] == []


def test_messages_of_commands_that_are_typed_on_every_machine_exist() -> None:
    page = (REPO / "docs/without-ssh.md").read_text()
    rows = page.partition("| you see | cause and fix | exit code |\n")[2].splitlines()[1:]
    quoted = [re.search("`([^`]+)`", row) for row in rows if row.startswith("|")]
    assert len(quoted) >= 9
    assert [found[1] for found in quoted if found and found[1] not in SOURCES] == []


def test_each_symptom_leads_to_its_section() -> None:
    sections = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (.*)$", PAGE, re.M)
    }
    links = re.findall(r"\]\(#([^)]+)\)", PAGE)
    assert len(links) >= 10 and set(links) <= sections


def test_ports_are_those_that_jobs_take() -> None:
    assert f"{LOWEST_PORT}-32767" in PAGE
