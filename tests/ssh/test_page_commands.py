"""The commands of the pages, typed in the order of each page on an embedded cluster of its own.

tests/pages.py describes how a page marks blocks that are not run here.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests import cases
from tests.cli import CLUSTERTOOL, REPO, Done
from tests.pages import PAGES, blocks_of
from tests.ssh.conftest import ForkingSite

# tests/unit/test_pages.py requires that a translation has the blocks of the English page
TRANSLATED = {REPO / "docs/zh-CN/first-run.md"}
TYPED = [page for page in PAGES if page not in TRANSLATED and any(block.runs for block in blocks_of(page))]
# The pages that start the embedded cluster themselves, with its three nodes; the jobs of the others are on one or two.
ON_THREE_NODES = {REPO / "README.md", REPO / "docs/first-run.md"}
ON_ONE_NODE = {REPO / "docs/api.md"}


def shape(line: str) -> str:
    """A line without its numbers and job ids."""
    return re.sub(r"\d+(\.\d+)?( [kMG]?B)?", "0", re.sub(r"\d{8}-\d{6}-\w{4}", "ID", line))


def arguments_of(line: str) -> list[str]:
    """The arguments of a command of clustertool that needs no shell, with the program; none for any other line."""
    arguments = list(shlex.shlex(line, posix=True, punctuation_chars=True))
    plain = not any(re.search(r"[$`*?~]", argument) or re.fullmatch(r"[();<>|&]+", argument) for argument in arguments)
    return arguments if plain and arguments[:1] == ["clustertool"] else []


def type_block(embedded: ForkingSite, text: str) -> Done:
    """Run the lines of a block one after the other, until one fails. Those that need no shell are forks."""
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    out = err = ""
    for line in text.replace("\\\n", " ").splitlines():
        arguments = arguments_of(line)
        script = re.fullmatch(r"python3 (\w+\.py)", line)
        program = CLUSTERTOOL if arguments else ["bash", "-euo", "pipefail", "-c"]
        if script:
            done = embedded.script(embedded.folder / script[1], env)
        else:
            done = embedded.inv(*(arguments[1:] or [line]), program=program, env=env)
        out, err = out + done.out, err + done.err
        if done.code:
            break
    return Done(done.code, out, err, done.seconds)


def add_workspaces(folder: Path) -> None:
    """Copy the workspaces, with few lines of data for word2vec."""
    made = shutil.ignore_patterns("word2vec", "output", "__pycache__", "train_data_dir")
    shutil.copytree(REPO / "workspaces", folder, ignore=made)
    for shard in (cases.small_word2vec(folder) / "train_data_dir").glob("*-[0-9]*"):
        shard.write_text("".join(shard.read_text().splitlines(keepends=True)[:10]))


@pytest.mark.parametrize("page", TYPED, ids=lambda page: str(page.relative_to(REPO)))
def test_commands_of_a_page(embedded: ForkingSite, page: Path) -> None:
    """The folder has what a checkout has after `make demo`: .venv, the workspaces with their data.

    A block of text below a block of commands is their output, or a part of it. A cluster that runs keeps its number of nodes,
    which the commands of most pages do not depend on.
    """
    folder, blocks = embedded.folder, blocks_of(page)
    typed = "".join(block.text for block in blocks if block.runs)
    if "workspaces/" in typed:
        add_workspaces(folder / "workspaces")
    (folder / ".venv").symlink_to(sys.prefix)
    if page not in ON_THREE_NODES:
        embedded.clustertool("cluster.up", "--nodes", 1 if page in ON_ONE_NODE else 2).ends(0)
    output = ""
    for block in blocks:
        if block.title:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text)
        if block.runs:
            done = type_block(embedded, block.text)
            assert done.code == block.exit_code, f"{block.where}\n{block.text}\n{done.out}\n{done.err}"
            output = done.out + done.err
        elif block.language == "text" and output:
            shown, printed = ({shape(line) for line in text.splitlines()} for text in (block.text, output))
            assert shown <= printed, f"{block.where}\n{output}"
            output = ""
