"""Stacks are what the threads of a rank and of its child processes do at one moment. Equal ones are gathered with their ranks.

A sample comes from memory that a program of a user has written: it is checked as all else that nodes send.
"""

from __future__ import annotations

import json
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from clustertool.model import field_types as fields
from clustertool.model.shape import Annotated, read, whole

_FRAMES, _THREADS = 200, 200
_TYPED = ("<string>", "<stdin>")  # python -c, and a script that is piped
_MAIN = "MainThread"


class Frame(NamedTuple):
    """A function that runs, and the line of its file that is executed: 0 for native code, and for a call of the kernel."""

    name: fields.Label
    filename: fields.Label
    line: Annotated[int, whole(-(1 << 31), 1 << 31)]


class ThreadStack(NamedTuple):
    """The frames of a thread, the innermost first. thread_name: "" of the main thread. call: of the kernel, where it waits."""

    thread_name: Optional[fields.Label]
    frames: Annotated[Tuple[Frame, ...], 100_000]
    os_thread_id: Optional[int] = None
    call: fields.Label = ""


class ProcessSample(NamedTuple):
    """One process of a rank at one moment.

    child: it is not the rank's own program. command: its name. folder: its working directory. state: of the kernel, one letter.
    note: why there is no stack of Python, and the frames are of the kernel; "" with one. cpu: seconds used. io: bytes read and
    written.
    """

    role: fields.Role
    rank: fields.Rank
    pid: fields.Pid
    child: bool
    command: fields.Label
    folder: fields.Label
    state: fields.Label
    note: fields.Label
    threads: Annotated[Tuple[ThreadStack, ...], 100_000] = ()
    cpu: float = 0.0
    io: int = 0


class StackGroup(NamedTuple):
    """Threads with equal stacks. ranks: of one role, each once. thread: the name of the first one, "" for main threads.

    threads: how many. command: "" for the ranks' own programs, else the name of the child process. frames: their files are
    relative to the working directory, or to the folder of a library. own: the index of the innermost frame of the user's own
    code, -1 without one.
    """

    role: str
    ranks: Tuple[int, ...]
    command: str
    thread: str
    threads: int
    frames: Tuple[Frame, ...]
    own: int
    call: str
    note: str


class _Dump(NamedTuple):
    """What py-spy prints of a process."""

    threads: Annotated[Tuple[ThreadStack, ...], 100_000]


def read_dump(text: str, pid: int) -> Tuple[ThreadStack, ...]:
    """Read the stacks of a process from the JSON of `py-spy dump`, the main thread first; raises ValueError.

    Of 200 threads, the innermost 200 frames are returned. The field names are those of py-spy.
    """
    found = read(_Dump, {"threads": json.loads(text)}).threads
    named = [one._replace(thread_name=_name_of(one, pid), frames=one.frames[:_FRAMES]) for one in found]
    return tuple(sorted(named, key=lambda one: one.thread_name != "")[:_THREADS])


def _name_of(one: ThreadStack, pid: int) -> str:
    """Return the name of a thread, "" for the main one: without number and name, as in Python 3.8, it runs a module."""
    main = one.os_thread_id == pid or one.thread_name == _MAIN
    if one.thread_name is None and one.os_thread_id is None:
        main = bool(one.frames) and one.frames[-1].name == "<module>"
    return "" if main else one.thread_name or "?"


def own_frame(frames: Sequence[Frame], folder: str) -> int:
    """Find the innermost frame of the user's own code, and return its index; -1 without one.

    It is the first one of a file below `folder`, or of a script that has no file; else the first one of a file outside of
    site-packages, dist-packages and the standard library. Installed packages below `folder` do not count, nor does native code.
    """
    outside = [index for index, frame in enumerate(frames) if frame.line > 0 and not _is_library(frame.filename)]
    below = [index for index in outside if short_file(frames[index].filename, folder)[:1] != "/"]
    return next(iter(below or outside), -1)


def _is_library(file: str) -> bool:
    """Check whether a file belongs to an installed package or to the standard library, or is made by one (<frozen os>)."""
    return not file or (file.startswith("<") and file not in _TYPED) or short_file(file) != file


def short_file(file: str, folder: str = "") -> str:
    """Return the part of a path behind site-packages, dist-packages, lib/python3.N, or behind `folder`; else the path."""
    for packages in ("/site-packages/", "/dist-packages/"):
        if packages in file:
            return file.rpartition(packages)[2]
    before, _, rest = file.rpartition("/python")
    version, slash, rest = rest.partition("/")
    if version and slash and before.rpartition("/")[2].startswith("lib") and not version.strip("0123456789.t"):
        return rest
    return file[len(folder) + 1 :] if folder and file.startswith(f"{folder}/") else file


def gather(samples: Iterable[ProcessSample]) -> List[StackGroup]:
    """Gather equal stacks of the processes, with their ranks, in one group each.

    Trainers come first, their own programs before child processes, main threads before others, and large groups before small
    ones. A process without a stack is in a group with its note. The working directory may differ between nodes.
    """
    found: Dict[StackGroup, List[Tuple[int, ThreadStack]]] = {}
    for sample in samples:
        command = sample.command if sample.child else ""
        for thread in sample.threads or (ThreadStack("", ()),):
            frames = tuple(_comparable(frame, sample.folder) for frame in thread.frames)
            own, kind = own_frame(thread.frames, sample.folder), "?" if thread.thread_name else ""
            alike = StackGroup(sample.role, (), command, kind, 0, frames, own, "", sample.note)
            found.setdefault(alike, []).append((sample.rank, thread))
    return sorted((_complete(alike, members) for alike, members in found.items()), key=_order)


def _comparable(frame: Frame, folder: str) -> Frame:
    """Return a frame as it is in other processes: with a short file, and "?" for an address in place of a name."""
    name = "?" if frame.name.startswith("0x") else frame.name
    return Frame(name, short_file(frame.filename, folder), frame.line)


def _complete(alike: StackGroup, members: Sequence[Tuple[int, ThreadStack]]) -> StackGroup:
    """Add to a group what its threads differ in. It has the call of the kernel if all of them wait in the same."""
    calls = {thread.call for _, thread in members}
    calls = calls if len(calls) == 1 else {call.partition(" ")[0] for call in calls}  # without peers
    call, ranks = calls.pop() if len(calls) == 1 else "", tuple(sorted({rank for rank, _ in members}))
    return alike._replace(ranks=ranks, thread=members[0][1].thread_name or "", threads=len(members), call=call)


def _order(group: StackGroup) -> Tuple[object, ...]:
    """Return the key by which groups are sorted: see gather()."""
    kind = (group.role != "trainer", group.role, group.command != "", group.thread != "")
    return (*kind, -len(group.ranks), group.ranks)
