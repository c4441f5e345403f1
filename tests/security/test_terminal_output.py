"""No text of a node or a server controls the terminal, or appears as a line of the tool itself."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from clustertool.errors import BadAnswer, NodeLost
from clustertool.model.job.outcome import Outcome
from clustertool.model.shape import Malformed, check_of
from clustertool.model.wire.agent_answers import GlanceAnswer
from clustertool.show.error_text import show_error
from clustertool.show.terminal import Terminal
from clustertool.show.top_view import Screen, View
from clustertool.watch.sanitize import harmless_lines
from clustertool.watch.top_model import TopModel
from tests.cli import LoopSite
from tests.security.hostile import site_with_hostile

ESCAPES = "\x1b]0;title\x07\x1b[2J\x1b]52;c;ZXZpbA==\x07\x9b1m\r\u202e"
FORGED = "x\nclustertool: exit 0 (job): all trainers are done"


def _terminal() -> tuple[Terminal, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Terminal(out, err, {}), out, err


def _controls(text: str) -> set[str]:
    return {sign for sign in text if not sign.isprintable()} - {"\n"}


@pytest.mark.parametrize("method", ["line", "warn", "error", "note", "block"])
def test_no_control_character_passes(method: str) -> None:
    terminal, out, err = _terminal()
    getattr(terminal, method)(f"a{ESCAPES}\nb{ESCAPES}")
    output = out.getvalue() + err.getvalue()
    assert _controls(output) == set()
    assert "\\x1b]52;c;" in output


@pytest.mark.parametrize("method", ["line", "warn", "error", "note"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\u2028", "\x0b", "\x0c", "\x85"])
def test_a_message_cannot_forge_a_line_of_the_tool(method: str, end: str) -> None:
    terminal, out, err = _terminal()
    getattr(terminal, method)(FORGED.replace("\n", end))
    lines = (out.getvalue() + err.getvalue()).splitlines()
    assert not [line for line in lines if line.startswith("clustertool:")]
    assert "clustertool: exit 0" in "".join(lines)


def test_the_last_line_is_the_tool_s_own() -> None:
    terminal, _, err = _terminal()
    show_error(NodeLost(FORGED, FORGED, "node1"), terminal)
    assert [line for line in err.getvalue().splitlines() if line.startswith("clustertool:")] == [
        "clustertool: exit 75 (tool): node1: x"
    ]
    assert BadAnswer(FORGED).code == 69


def test_lines_that_are_indented_already_stay_as_they_are() -> None:
    assert harmless_lines("a\n  b\nc\n", "    ") == "a\n  b\n    c\n"
    assert harmless_lines("a\n  b\nc") == "a\n  b\nc"


def test_an_outcome_in_json_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON escapes what a terminal must not get, and a program gets the text as it was."""
    import json

    outcome = Outcome("failed", 1, "job", FORGED + ESCAPES)
    terminal, out, _ = _terminal()
    terminal.json(outcome.as_dict())
    assert _controls(out.getvalue()) == set()
    assert json.loads(out.getvalue())["reason"] == FORGED + ESCAPES


def test_a_state_is_one_of_a_fixed_set() -> None:
    sample = _sample("x")
    check_of(GlanceAnswer)(sample, "")
    sample["jobs"][0]["ranks"][0]["state"] = FORGED
    with pytest.raises(Malformed, match="state"):
        check_of(GlanceAnswer)(sample, "")


def _sample(text: str) -> dict[str, Any]:
    rank = {"role": "trainer", "rank": 0, "state": "running", "pid": 1, "log": text, "line": text}
    card = {
        "index": 0,
        "model": text,
        "utilisation": 1,
        "memory_used": 1,
        "memory_total": 2,
        "users": [text],
        "problem": text,
    }
    jobs = [{"job": "j", "heartbeat": 1.0, "ranks": [rank]}]
    return {
        "t": 1.0,
        "cpu": [1, 2],
        "cpus": 1,
        "memory": [1, 2],
        "kind": text,
        "devices": [card],
        "problem": text,
        "jobs": jobs,
    }


@pytest.mark.parametrize("text", [ESCAPES, FORGED], ids=["escapes", "forged"])
def test_top_shows_control_characters_and_does_not_obey_them(text: str) -> None:
    terminal, out, _ = _terminal()
    screen, picture, view = Screen(terminal, lambda line: line), TopModel(), View()
    picture.feed(0, "node1", _sample(text), 1.0)
    page = screen.page(picture, view, 200, 40, {"node2": text}, 2.0)
    view.message, view.log = text, page.ranks[0]
    pages = [page, screen.page(picture, view, 200, 40, {}, 2.0), screen.log_page(view, text, 40)]
    shown = [part for one in pages for line in one.lines for part, _ in line]
    assert set().union(*map(_controls, shown)) == set()
    assert not [part for part in shown if "\n" in part]
    screen.plain(picture, view, {"node2": text}, 2.0)
    assert _controls(out.getvalue()) == set()
    assert not [line for line in out.getvalue().splitlines() if line.startswith("clustertool:")]


@pytest.mark.parametrize("hidden", [True, False])
def test_a_question_of_a_server_is_harmless(site: Callable[..., LoopSite], hidden: bool) -> None:
    """A server chooses the text before any login."""
    one = site(1)
    code = f"from clustertool.verbs.verb import User; User().ask('Code for ' + {ESCAPES!r} + ': ', {hidden})"
    asked = one.start("-c", code, program=[sys.executable], terminal=True)
    asked.says("Code for ")
    asked.type("secret\r")
    asked.wait()
    assert b"\x1b]" not in asked.raw
    assert b"\\x1b]52;c;" in asked.raw


def test_texts_of_a_hostile_node_in_every_verb(site: Callable[..., LoopSite]) -> None:
    one = site(1)
    site_with_hostile(
        one,
        0,
        f"""
        BAD = {ESCAPES + FORGED!r}
        def answer(request):
            if request["type"] == "jobs":
                reply(request, jobs=[job("j", reason=BAD, command=BAD, owner=BAD, state="failed", code=1)])
            else:
                reply(request, error=dict(kind="NotFound", what=BAD, fix=BAD))
    """,
    )
    for verb in ("jobs", "status", "stop", "logs", "logs --files", "report", "fetch", "gpus", "clean --older-than 1d"):
        done = one.inv(*verb.split(), *(["--job", "j"] if verb == "stop" else []), timeout=60)
        assert _controls(done.out + done.err) == set(), verb
        forged = [line for line in (done.out + done.err).splitlines() if line.startswith("clustertool: exit 0")]
        assert forged == [], verb
        assert done.code != 70, (verb, done.err)
    assert os.listdir(one.folder)
