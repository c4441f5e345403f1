"""Man pages are made from the table of commands: all commands and options are in them, and man has no warning."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clustertool.cli.launchers.launcher_flags import FLAGS
from clustertool.cli.verb_table import VERBS
from tests.cli import REPO

SCRIPT = REPO / "scripts/make-man.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("man")
    subprocess.run([sys.executable, SCRIPT, made], check=True, stdout=subprocess.DEVNULL)
    return made / "man1"


def read(folder: Path) -> dict[str, str]:
    """All pages as man shows them, each in one line. One process of groff reads them."""
    argv = ["groff", "-man", "-ww", "-Tutf8", "-P-cbou", *sorted(folder.iterdir())]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    _, *parts = re.split(r"^([A-Z.-]+)\(1\) +User Commands .*$", done.stdout, flags=re.M)
    text = [re.sub(r"\s+", " ", re.sub(r"[‐−]\n? *", "-", part)) for part in parts[1::2]]
    return dict(zip(map(str.lower, parts[::2]), text, strict=True))


@pytest.mark.skipif(not shutil.which("groff"), reason="needs groff")
def test_a_page_of_each_command_has_its_options(folder: Path) -> None:
    pages = read(folder)
    every = pages["clustertool"]
    for verb in VERBS:
        text = pages[f"clustertool-{verb.name}"]
        assert [option.name for option in verb.options if f"--{option.name}" not in text] == []
        assert all(f"clustertool {example}".split("'")[0].split('"')[0] in text for example in verb.examples), verb.name
        assert verb.name in every
    assert len(list(folder.iterdir())) == len(pages) == len(VERBS) + 2
    text = pages["clusterrun"]
    assert [name for flag in FLAGS for name in flag.names.split() if name not in text] == []


@pytest.mark.skipif(not shutil.which("man"), reason="needs man")
def test_man_reads_the_pages_without_a_warning(folder: Path, tmp_path: Path) -> None:
    """Those of both kinds, and one of a command: groff has read all of them without a warning above."""

    def warnings(*pages: Path) -> str:
        argv = ["man", "--warnings=w", "--local-file", *pages]
        done = subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True)
        return done.stderr

    (tmp_path / "wrong.1").write_text('.TH X 1\n.SH "NAME"\n\\[nothing]\n')
    assert "nothing" in warnings(tmp_path / "wrong.1")
    assert warnings(*(folder / f"{name}.1" for name in ("clustertool", "clustertool-run", "clusterrun"))) == ""
