"""Gathered stacks become lines: each group of ranks with where it is, and its frames, the user's own code marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clustertool.model.config.folded_names import ranges
from clustertool.model.job.stacks import Frame, StackGroup
from clustertool.model.quantities import count
from clustertool.model.roles import role_name

_BEYOND = 2  # frames that called the user's innermost one
_MOST = 12  # frames of a group


def stack_lines(groups: Sequence[StackGroup], whole: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the lines about groups of equal stacks, with their style: `trainer 0-30: all_reduce <- train.py:88 step`.

    The frames follow, the innermost first, `>` at the innermost one of the user's own code. Unless `whole`, those are left out
    that are far from it, and those of a stack with one frame.
    """
    for group in groups:
        yield f"{_members(group)}: {place(group)}", "bold" if not (group.thread or group.command) else ""
        frames = group.frames if not group.note and (whole or len(group.frames) > 1) else ()
        shown = frames if whole or group.own < 0 else frames[: group.own + 1 + _BEYOND]
        lines = [(f"    {frame.name} ({_source(frame)})", "dim") for frame in shown]
        if lines and group.own >= 0:
            lines[group.own] = f"  > {lines[group.own][0][4:]}", ""
        if not whole and len(lines) > _MOST:
            lines[_MOST // 2 : -_MOST // 2] = [(f"    ... {count(len(lines) - _MOST, 'frame')}", "dim")]
        yield from lines


def _members(group: StackGroup) -> str:
    """Name the ranks of a group, and which of their processes and threads it has."""
    what = f" child {group.command}" * bool(group.command) + f" thread {group.thread}" * bool(group.thread)
    number = f" ({group.threads} of them)" if group.threads > len(group.ranks) else ""
    return f"{role_name(group.role)} {ranges(group.ranks)}{what}{number}"


def place(group: StackGroup) -> str:
    """Describe in one line where a group is: the innermost function, and the innermost line of the user's own code."""
    frames, own = group.frames, group.own
    if group.note:
        return " <- ".join(frame.name for frame in frames) + f" ({group.note})" if frames else group.note
    names = [frame.name for frame in frames[:own] if frame.name != "?"] if own > 0 else []
    if own < 0:
        return f"{frames[0].name} ({_source(frames[0])})" if frames else "no Python code runs"
    inner = names[0] if names else group.call
    line = f"{_source(frames[own])} {frames[own].name}"
    return f"{inner} <- {line}" if inner else line


def _source(frame: Frame) -> str:
    """Return file and line of a frame; of native code the name of its library."""
    return f"{frame.filename}:{frame.line}" if frame.line else frame.filename.rpartition("/")[2]
