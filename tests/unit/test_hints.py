"""Commands in messages name the program that the user typed, and work as they are printed."""

from __future__ import annotations

import ast
import io
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from clustertool import errors as error_types
from clustertool.api.plain_text import plain
from clustertool.cli.options import FLAG
from clustertool.cli.parser import spellings, split
from clustertool.cli.verb_table import VERBS
from clustertool.errors import NotFound, as_wire, from_wire
from clustertool.model.hints import PROGRAM
from clustertool.show.error_text import exit_json, show_error
from clustertool.show.program_name import commanded, typed
from clustertool.show.report_html import tag
from clustertool.show.table import table
from clustertool.show.terminal import Terminal

PACKAGE = Path(__file__).resolve().parents[2] / "clustertool"
# Their texts are for users of `clustertool` and `clusterrun` only.
OWN = ("cli", "model/hints.py", "cli/verb_table.py", "verbs/program.py")
BY_NAME = {verb.name: verb for verb in VERBS}
VALUE = "VALUE"  # in place of what an f-string fills in


def texts(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """The messages of a module: strings that are no docstrings, with PROGRAM and VALUE for what is filled in."""
    bodies = [node.body for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    skipped = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
            yield "".join(_part(part) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def _part(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    return PROGRAM if isinstance(part.value, ast.Name) and part.value.id == "PROGRAM" else VALUE


def errors(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """What the errors of a module state, as far as a text of the module has it."""
    for node in nodes:
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if isinstance(node, ast.Call) and node.args and isinstance(getattr(error_types, called, None), type):
            what = node.args[0]
            if isinstance(what, ast.JoinedStr):
                yield "".join(_part(part) for part in what.values)
            elif isinstance(what, ast.Constant):
                yield str(what.value)


def test_messages_and_errors_of_all_modules() -> None:
    """One test: to parse all modules takes most of its time."""
    messages, stated = [], []
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes, file = list(ast.walk(ast.parse(path.read_text("utf-8")))), str(path.relative_to(PACKAGE))
        stated += [(file, what) for what in errors(nodes)]
        messages += [] if file.startswith(OWN) else [(file, text) for text in texts(nodes)]
    check_names_of_programs(messages)
    check_errors(stated)
    check_commands(messages)


def check_names_of_programs(messages: list[tuple[str, str]]) -> None:
    """No message names a program of its own."""
    verbs = "|".join(map(re.escape, BY_NAME))
    named = re.compile(rf"\b(inv|clustertool) ({verbs})\b")
    assert [(file, text) for file, text in messages if named.search(text)] == []


def check_errors(found: list[tuple[str, str]]) -> None:
    """An error is a sentence, and not only a name with its value: `--nnodes 'x' is no number of nodes`."""
    assert len(found) > 200
    assert [one for one in found if re.fullmatch(r"(VALUE: )?-*[a-z][\w-]* VALUE", one[1])] == []


def check_commands(messages: list[tuple[str, str]]) -> None:
    """Every command in a message exists, with its options."""
    commands = [
        (file, command) for file, text in messages for command in text.replace("{program}", PROGRAM).split(PROGRAM)[1:]
    ]
    assert len(commands) > 30
    for file, command in commands:
        found = re.match(r" ([a-z]+(?:\.[a-z]+)?)(?:VALUE)?([`,;:).]?)(.*)", command, re.DOTALL)
        assert found and found[1] in BY_NAME, (file, command)
        known = spellings(BY_NAME[found[1]].options)
        rest, ended = found[3].split(), bool(found[2])
        while rest and not ended and rest[0].startswith("-"):
            argument = rest.pop(0)
            ended = argument[-1] in "`,;:)."
            option = known.get(split(argument.rstrip("`,;:)."), known)[0])
            assert option is not None, (file, command)
            if option.default is not FLAG:
                assert rest and not ended, (file, command)
                ended = rest.pop(0)[-1] in "`,;:)"


@pytest.mark.parametrize(
    ("path", "program", "hint"),
    [
        ("/usr/local/bin/clustertool", "clustertool", "clustertool"),
        ("/usr/local/bin/clusterrun", "clusterrun", "clustertool"),
        ("/venv/bin/inv", "inv", "inv"),
        ("/venv/bin/invoke", "inv", "inv"),
        ("/venv/lib/python3.11/site-packages/invoke/__main__.py", "inv", "inv"),
        ("/venv/bin/fab", "fab", "fab"),
        ("/home/ann/sweep.py", "sweep.py", "clustertool"),
        ("", "", "clustertool"),
    ],
)
def test_the_program_that_was_typed(path: str, program: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [path])
    assert (typed(), commanded()) == (program, hint)


@pytest.mark.parametrize("program", ["clustertool", "inv"])
def test_every_way_to_the_user_fills_the_program_in(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{program}"])
    sent = json.loads(json.dumps(as_wire(NotFound(f"see {PROGRAM} jobs", f"{PROGRAM} logs --files"))))
    error = from_wire(sent["kind"], sent["what"], sent["fix"], "node1")  # as a node sends it
    out, err = io.StringIO(), io.StringIO()
    terminal = Terminal(out=out, err=err, environ={})
    show_error(error, terminal)
    terminal.warn(f"{PROGRAM} check")
    terminal.line(f"{PROGRAM} attach")
    table("", ("a", "b"), [(f"{PROGRAM} status", "x")], terminal=terminal)
    terminal.json({"exit": exit_json(error)})
    assert err.getvalue().splitlines() == [
        f"error: node1: see {program} jobs",
        f"  fix: {program} logs --files",
        f"clustertool: exit 66 (tool): node1: see {program} jobs",
        f"warning: {program} check",
    ]
    assert PROGRAM not in out.getvalue()
    for command in ("attach", "status  ", "jobs"):
        assert f"{program} {command}" in out.getvalue()
    assert tag("p", f"{PROGRAM} logs") == f"<p>{program} logs</p>"


def test_output_of_a_rank_or_a_command_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/inv"])
    text = "see {clustertool} jobs"  # a line of a log, a name of a user, a path
    out, err = io.StringIO(), io.StringIO()
    terminal = Terminal(out=out, err=err, environ={})
    terminal.block(text)
    terminal.write(f"{text}\n")
    terminal.line(text)
    terminal.warn(f"{text}: {PROGRAM} logs")
    assert out.getvalue() == f"{text}\n" * 3
    assert err.getvalue() == f"warning: {text}: inv logs\n"
    table("", ("a", "b"), [(text, "x")], terminal=terminal)
    assert out.getvalue().splitlines()[-1].startswith(text)
    out.truncate(out.seek(0))
    terminal.json({"rows": [(text, f"{PROGRAM} jobs")], "{clustertool}": r"\ud800{clustertool} jobs", "code": 0})
    assert json.loads(out.getvalue()) == {
        "rows": [[text, "inv jobs"]],
        "{clustertool}": r"\ud800{clustertool} jobs",
        "code": 0,
    }
    assert tag("p", text) == f"<p>{text}</p>"
    assert plain(text) == text


def test_no_bytes_are_read_as_the_placeholder() -> None:
    with pytest.raises(UnicodeEncodeError):
        PROGRAM.encode("utf-8", "surrogateescape")
    wtf8 = PROGRAM.encode("utf-8", "surrogatepass")  # a program may print any bytes
    for errors in ("surrogateescape", "backslashreplace", "replace", "ignore"):
        assert PROGRAM not in wtf8.decode("utf-8", errors)
    assert json.loads(json.dumps(PROGRAM)) == PROGRAM  # as a node sends it
