"""A job without progress hangs, or computes for long: the samples of its ranks decide, and tell which rank does not go on.

All nodes sample their ranks several times, some seconds apart. trace() describes on each node what a rank did meanwhile, and
judge() compares all ranks, on the coordinator's node. docs/my-job-hangs.md has the rule as a table.
"""

from __future__ import annotations

import hashlib
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from clustertool.model import field_types as fields
from clustertool.model.job.outcome import Key
from clustertool.model.job.stacks import Frame, ProcessSample, own_frame, short_file
from clustertool.model.shape import Annotated, one_of

SWAPS = "swaps: "  # begins the note of a process that is out of memory
MOVES, RUNS, WAITS, DEBUGGED = "moves", "runs", "waits", "debugged"  # what a rank does
_DEBUGGERS = ("pdb.py", "bdb.py")
_IO = 4096  # bytes between two samples; less is that of a heartbeat
_CHILD_CPU = 0.05  # seconds between two samples
_SHARE = 0.05  # of a processor that a rank uses which does not wait: 20 may share one
_STUCK = ("T", "t", "D")  # states of a process that does not go on by itself
_TRAINER = "trainer"
_NAMED = 3  # ranks in a text


class RankTrace(NamedTuple):
    """What a rank did while it was sampled.

    cause: what the kernel shows of it, or of a child of it, that cannot go on; or "". stack: the same for equal stacks of its
    main thread. place: the innermost line of the user's code, and what it calls: "all_reduce (train.py:88)".
    """

    role: fields.Role
    rank: fields.Rank
    doing: Annotated[str, one_of((MOVES, RUNS, WAITS, DEBUGGED))]
    cause: fields.Label
    stack: fields.Label
    place: fields.Label


class Hang(NamedTuple):
    """The verdict. named: the ranks that do not go on, those of the smallest groups first. others: those that wait for them.

    runs: the named ranks use the processor. Without `others` all ranks wait in the same place, or no place has most of them.
    servers: the ranks of other roles.
    """

    named: Tuple[RankTrace, ...]
    others: Tuple[RankTrace, ...]
    runs: bool = False
    servers: Tuple[RankTrace, ...] = ()


def trace(rounds: Sequence[Sequence[ProcessSample]], seconds: float) -> List[RankTrace]:
    """Describe what each rank did that was sampled in all rounds. seconds: between two of them."""
    by_rank: List[Dict[Key, List[ProcessSample]]] = [{} for _ in rounds]
    for found, samples in zip(by_rank, rounds):
        for sample in samples:
            found.setdefault((sample.role, sample.rank), []).append(sample)
    kept = [key for key in by_rank[-1] if all(key in found for found in by_rank)] if by_rank else []
    return [_trace_one(key, [found[key] for found in by_rank], seconds) for key in kept]


def _trace_one(key: Key, rounds: Sequence[Sequence[ProcessSample]], seconds: float) -> RankTrace:
    """Describe what one rank did, from the samples of its processes in each round."""
    last = rounds[-1]
    main = next((sample for sample in last if not sample.child), last[0])
    frames = main.threads[0].frames if main.threads else ()
    steps = list(zip(rounds, rounds[1:]))
    if any(
        short_file(frame.filename) in _DEBUGGERS for one in last for thread in one.threads for frame in thread.frames
    ):
        doing = DEBUGGED
    elif any(_has_moved(before, after) for before, after in steps):
        doing = MOVES
    elif all(_cpu(before, after, False) > _SHARE * seconds for before, after in steps):
        doing = RUNS
    else:
        doing = WAITS
    stuck = [sample for sample in last if _is_stuck(sample.pid, rounds) or (sample.child and sample.state == "Z")]
    causes = [f"process {one.pid} ({one.command}) {one.note}" if one.child else one.note for one in stuck]
    names = [(frame.name, short_file(frame.filename, main.folder), frame.line) for frame in frames]
    stack = hashlib.sha256(repr((names, main.note)).encode()).hexdigest()[:16]
    return RankTrace(*key, doing, next(iter(causes), ""), stack, _place(main, frames))


def _has_moved(before: Sequence[ProcessSample], after: Sequence[ProcessSample]) -> bool:
    """Check whether a rank has other processes than before, another stack, more I/O, or a child that uses a processor."""
    known = {sample.pid: sample for sample in before}
    if known.keys() != {sample.pid for sample in after} or _cpu(before, after, True) > _CHILD_CPU:
        return True
    same = [(known[sample.pid], sample) for sample in after]
    return any(_main_frames(old) != _main_frames(new) or new.io - old.io > _IO for old, new in same)


def _main_frames(sample: ProcessSample) -> Tuple[Frame, ...]:
    return sample.threads[0].frames if sample.threads else ()


def _cpu(before: Sequence[ProcessSample], after: Sequence[ProcessSample], child: bool) -> float:
    """Add up the seconds of CPU that the program of a rank, or its child processes, used between two rounds."""
    used = {sample.pid: sample.cpu for sample in before if sample.child is child}
    return sum(sample.cpu - used[sample.pid] for sample in after if sample.pid in used)


def _is_stuck(pid: int, rounds: Sequence[Sequence[ProcessSample]]) -> bool:
    """Check whether a process was stopped, blocked in the kernel, or swapped out in all rounds."""
    found = [sample for samples in rounds for sample in samples if sample.pid == pid]
    return all(sample.state in _STUCK or sample.note.startswith(SWAPS) for sample in found)


def _place(sample: ProcessSample, frames: Sequence[Frame]) -> str:
    """Describe where a program is: what the user's innermost line calls, file and line, and the peer of the socket, if known.

    Without a line of the user, its innermost function.
    """
    own = own_frame(frames, sample.folder)
    if own < 0:
        return frames[0].name if frames else sample.note or sample.command
    line = f"{frames[own].filename.rpartition('/')[2]}:{frames[own].line}"
    peer = sample.threads[0].call.partition(" ")[2]
    name = frames[own - 1 if own else 0].name
    if name == "<module>":
        name = sample.threads[0].call.partition(" ")[0] or name
    return f"{name} ({line})" + (f" for {peer}" if peer else "")


def judge(traces: Sequence[RankTrace], again: bool) -> Optional[Hang]:
    """Decide whether a job hangs whose ranks make no progress, and which ranks do not go on; None if it may go on.

    again: the job has made no progress for twice the hang timeout.
    """
    trainers = [one for one in traces if one.role == _TRAINER]
    if not trainers or any(one.doing in (DEBUGGED, MOVES) for one in trainers):
        return None
    causes = tuple(one for one in traces if one.cause)
    if causes:
        return Hang(causes, tuple(one for one in trainers if not one.cause))
    waits, runs = [one for one in trainers if one.doing == WAITS], tuple(one for one in trainers if one.doing == RUNS)
    if runs or not waits:
        return Hang(runs, tuple(waits), True) if again and len(runs) < len(waits) else None
    groups: Dict[str, List[RankTrace]] = {}
    for one in waits:
        groups.setdefault(one.stack, []).append(one)
    sizes = sorted(groups.values(), key=len)
    most = sizes[-1] if len(sizes) > 1 and len(sizes[-1]) > len(sizes[-2]) else []
    servers = tuple(sorted(one for one in traces if one.role != _TRAINER))
    return Hang(tuple(one for group in sizes if group is not most for one in group), tuple(most), False, servers)


def describe(hang: Hang, nodes: Mapping[Key, str], since: Mapping[Key, str]) -> str:
    """Describe a hang in a line. nodes: the names of the ranks' nodes. since: when they last made progress ("14:02")."""
    count = len(hang.named) + len(hang.others)
    first = hang.named[0]
    if not hang.others and len({one.stack for one in hang.named}) == 1 and not first.cause:
        servers = [f"{_name(one, nodes)} is in {one.place}" for one in hang.servers[:_NAMED]]
        all_ranks = f"all {count} ranks wait" if count > 1 else f"{_name(first, nodes)} waits"
        return "; ".join([f"{all_ranks} in {first.place}", *servers])
    texts = []
    for one in hang.named[:_NAMED]:
        key = (one.role, one.rank)
        doing = f" runs in {one.place} without progress" if hang.runs else f" is in {one.place}"
        last = since.get(key, "")
        texts.append(f"{_name(one, nodes)}{one.cause and f': {one.cause}' or doing}{last and f' since {last}'}")
    more = len(hang.named) - _NAMED
    texts += [f"{more} more"] if more > 0 else []
    places = {one.place for one in hang.others}
    where = f" in {places.pop()}" if len(places) == 1 else ""
    waiting = f"{len(hang.others)} of {count} ranks wait{where}; " if hang.others else ""
    return waiting + ", ".join(texts)


def _name(one: RankTrace, nodes: Mapping[Key, str]) -> str:
    """Name a rank and its node, if that is known."""
    at = nodes.get((one.role, one.rank), "")
    return f"{one.role} {one.rank}{at and f' on {at}'}"
