"""The Markdown pages of the project: their blocks, and the commands in them.

A block of commands (```sh) is run by tests/ssh/test_page_commands.py. A comment in the line above it changes this:

- `<!-- exits with 3 -->`: it is run, and its last command has this exit code.
- `<!-- tested by FILE FILE::FUNCTION ... -->`: these tests contain its verbs and options.
- `<!-- not run: REASON -->`

A block with `title="FILE"` is a file that the reader writes; it is written before the blocks below it are run. A block of
text below a block of commands has lines of its output.
"""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.cli import REPO

PAGES = sorted([*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")])
PROGRAMS = ("clustertool", "inv", "clusterrun", "make")
_FENCE = re.compile(r"^(\s*)(`{3,})(\w*)(.*)$")
_COMMENT = re.compile(r"^\s*<!-- (.*) -->\s*$")


@dataclass(frozen=True)
class Block:
    """One fenced block. line: that of the fence, from 1. mark: the text of the comment above it. title: a file's name."""

    page: Path
    line: int
    language: str
    title: str
    mark: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(REPO)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language == "sh" and not self.mark.startswith(("not run", "tested by"))

    @property
    def exit_code(self) -> int:
        found = re.fullmatch(r"exits with (\d+)", self.mark)
        return int(found[1]) if found else 0


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order. Raises AssertionError for one that does not end."""
    found, above = [], ""
    lines = page.read_text().splitlines()
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence:
            end = next((n for n in range(at + 1, len(lines)) if lines[n].strip() == fence[2]), None)
            assert end, f"{page}:{at + 1}: a block that does not end"
            comment = _COMMENT.match(above)
            title = re.search(r'title="([^"]*)"', fence[4])
            text = "".join(f"{line.removeprefix(fence[1])}\n" for line in lines[at + 1 : end])
            found.append(Block(page, at + 1, fence[3], title[1] if title else "", comment[1] if comment else "", text))
            at = end
        if lines[at].strip():
            above = lines[at]
        at += 1
    return found


def commands_of(text: str) -> list[list[str]]:
    """The commands of a shell text that start one of PROGRAMS, each as its words."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        tokens: list[str] = []
        for token in [*shlex.split(line, comments=True), "&&"]:
            if token not in ("&&", "||", "|", ";", "&"):
                tokens.append(token)
                continue
            while tokens and re.match(r"\w+=", tokens[0]):
                tokens = tokens[1:]
            if tokens and tokens[0] in PROGRAMS:
                found.append(tokens)
            tokens = []
    return found


def commands_in_prose(page: Path) -> list[list[str]]:
    """The commands in backticks, outside blocks, that have a verb or a target."""
    blocks = blocks_of(page)
    inside = {n for block in blocks for n in range(block.line, block.line + block.text.count("\n") + 2)}
    lines = [line for n, line in enumerate(page.read_text().splitlines(), 1) if n not in inside]
    spans = re.findall(rf"`((?:{'|'.join(PROGRAMS)}) [^`]+)`", "\n".join(lines))
    return [command for span in spans for command in commands_of(span.replace("\n", " "))]


def source_of(test: str) -> str:
    """The text of FILE, or of the function in FILE::FUNCTION. Raises AssertionError if it is not there."""
    name, _, function = test.partition("::")
    path = REPO / name
    assert path.is_file(), f"{name} is no file"
    if not function:
        return path.read_text()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return ast.get_source_segment(path.read_text(), node) or ""
    raise AssertionError(f"{name} has no function {function}")
