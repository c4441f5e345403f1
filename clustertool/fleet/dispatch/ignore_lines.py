"""Lines of .clusterignore and .gitignore are matched as git matches them: the last line that fits a path decides.

A line counts for what it names itself, not for what is below: the walk does not enter a folder that is left out. pathspec
1.1.1 gives other results than git for one of fifty random sets of lines, and for `*`, `!*/`, `!*.py`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

_Fits = Callable[[str], object]


class _Line(NamedTuple):
    """parts: what fits the names of a path, None for any number of them (`**`). takes: it begins with `!`."""

    takes: bool
    only_folders: bool
    parts: Sequence[_Fits | None]


class IgnoreLines:
    """The lines of one file. Paths are relative to its folder; those of folders end in `/`."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self.texts = tuple(lines)
        self._lines = [line for line in map(_parse_line, reversed(self.texts)) if line is not None]

    def ignored(self, path: str) -> bool | None:
        """Check whether the last line that fits a path leaves it out; False if the line takes it, None where no line fits."""
        if not self._lines:
            return None
        names, is_dir = path.rstrip("/").split("/"), path.endswith("/")
        found = (line for line in self._lines if (is_dir or not line.only_folders) and _fits(line.parts, names))
        return next((not line.takes for line in found), None)

    def taken(self, path: str) -> bool:
        """Check whether the last line that fits a path takes it (`!`).

        If no line fits, the nearest folder above for which one does counts.
        """
        while path and self._lines:
            ignored = self.ignored(path)
            if ignored is not None:
                return not ignored
            above, slash, _ = path.rstrip("/").rpartition("/")
            path = above + slash
        return False


def _parse_line(text: str) -> _Line | None:
    """Parse a line. None for a comment and an empty line."""
    text = re.sub(r"(?<!\\)[ \r]+$", "", text)
    takes = text.startswith("!")
    pattern = text[takes:]
    only_folders = pattern.endswith("/")
    parts = pattern.rstrip("/").split("/")
    if not any(parts) or text.startswith("#"):
        return None
    if len(parts) == 1:  # of any folder
        return _Line(takes, only_folders, (None, _compile_name(parts[0])))
    return _Line(takes, only_folders, [None if part == "**" else _compile_name(part) for part in parts[not parts[0] :]])


def _compile_name(pattern: str) -> _Fits:
    """Compile a pattern for one name, and return a function that matches a name.

    It may have `*`, `?`, `[a-z]`, `[^a-z]`, and a backslash in front of a character that is meant.
    """
    plain = re.sub(r"\\(.)", lambda found: f"[{found[1]}]" if found[1] in "*?[" else found[1], pattern)
    return re.compile(fnmatch.translate(plain.replace("[^", "[!"))).match


def _fits(parts: Sequence[_Fits | None], names: Sequence[str]) -> bool:
    """Check whether the parts of a line match all names of a path, in this order."""
    if not parts or not names:
        return not parts and not names
    fits = parts[0]
    if fits is None:
        return len(parts) == 1 or any(_fits(parts[1:], names[at:]) for at in range(len(names)))
    return bool(fits(names[0])) and _fits(parts[1:], names[1:])
