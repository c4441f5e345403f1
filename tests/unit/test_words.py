"""The check of names finds each kind of definition, and only whole words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECK = Path(__file__).resolve().parents[2] / "scripts/check-words.py"
REFUSED = """\
import os as told_os
class PortHeld: ...
def look_at(words): ...
async def hear(): ...
SHALL_END = 1
who: int = 2
for beside in []: ...
self.awaited = 3
try: ...
except OSError as said: ...
"""
ACCEPTED = """\
import os as withheld
class Shareholder: ...
def lookup(password, keyword, wording): ...
whole = whose = outlook = "told, said, who"
call(who=1, word=2)
"""


def check(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text)
    return subprocess.run([sys.executable, str(CHECK), str(path)], capture_output=True, text=True, timeout=120)


def test_each_kind_of_definition_is_checked(tmp_path: Path) -> None:
    result = check(tmp_path / "names.py", REFUSED)
    found = [int(line.split(":")[1]) for line in result.stdout.splitlines()]
    assert (result.returncode, found) == (1, [1, 2, 3, 3, 4, 5, 6, 7, 8, 10]), result.stdout + result.stderr


def test_parts_of_names_and_texts_are_accepted(tmp_path: Path) -> None:
    result = check(tmp_path / "names.py", ACCEPTED)
    assert (result.returncode, result.stdout) == (0, ""), result.stdout + result.stderr


def test_the_name_of_a_module_is_checked(tmp_path: Path) -> None:
    result = check(tmp_path / "held.py", "")
    assert "'held'" in result.stdout
    assert result.returncode == 1


def test_docstrings_of_functions_begin_with_a_verb(tmp_path: Path) -> None:
    text = """\
def first():
    '''The newest one.'''
class Subject:
    '''A class is a noun.'''
    @property
    def size(self): '''The number of bytes.'''
    def second(self): '''{} for none.'''
    def third(self): '''Return the newest one.'''
    def fourth(self): ...
"""
    result = check(tmp_path / "sentences.py", text)
    found = [line.partition(".py:")[2] for line in result.stdout.splitlines()]
    assert found == [
        "1: the docstring of first begins with 'the', not with a verb",
        "7: the docstring of second begins with '', not with a verb",
    ], result.stderr
    assert result.returncode == 1
