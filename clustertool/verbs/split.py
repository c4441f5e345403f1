"""inv split cuts a file of lines into shards, FILE-00000 and so on, as [shards] and the trainers expect them."""

from __future__ import annotations

import re
import secrets
import shlex
import time
from pathlib import Path

from clustertool.errors import UsageError
from clustertool.fleet.dispatch.split_data import LineOrder, Result, cut
from clustertool.model.hints import PROGRAM
from clustertool.model.quantities import human_bytes, human_seconds
from clustertool.show.progress_bars import Bar
from clustertool.verbs import signals
from clustertool.verbs.verb import Call


def split(call: Call) -> None:
    """Cut a file of lines into shards, with a progress bar, and print the result."""
    order = _read_order(call)
    start = time.monotonic()
    with Bar(call.terminal, "split") as bar:
        done = cut(order, bar.tell, signals.check)
    _report_result(call, order, done, time.monotonic() - start)


def _read_order(call: Call) -> LineOrder:
    """Check the options of split and build the order. Raises UsageError for one that is missing or not valid.

    The shards are made in --to, else in the folder of the file. --shuffle without --seed gets a random seed; without --shuffle
    it is None.
    """
    given = call.given
    if not given.data:
        raise UsageError("split needs a file", f"{PROGRAM} split --data train.txt --shards 8")
    if not re.fullmatch(r"[0-9]{1,9}", given.shards) or not int(given.shards):
        right = f"{PROGRAM} split --data {shlex.quote(given.data)} --shards 8"
        raise UsageError(f"--shards {given.shards!r} is not a number of files, from 1 on", right)
    if given.seed and not given.shuffle:
        raise UsageError("--seed has no effect without --shuffle", "add --shuffle, or leave --seed out")
    if not re.fullmatch(r"[0-9]{0,18}", given.seed):
        raise UsageError(f"--seed {given.seed!r} is not valid", "a whole number of at most 18 digits")
    data = Path(given.data)
    if data.is_dir():
        raise UsageError(f"--data {given.data!r} is a folder", "give one file; several files are shards already")
    seed = int(given.seed or secrets.randbelow(1 << 32)) if given.shuffle else None
    return LineOrder(data, Path(given.to) if given.to else data.parent, int(given.shards), seed, given.force)


def _report_result(call: Call, order: LineOrder, done: Result, seconds: float) -> None:
    """Print how many lines the shards have and how they were made, or answer with JSON."""
    if call.json:
        call.answer(
            {
                "data": str(order.data),
                "lines": sum(shard.lines for shard in done.shards),
                "bytes": sum(shard.bytes for shard in done.shards),
                "seed": order.seed,
                "replaced": done.replaced,
                "shards": [{"file": str(s.path), "lines": s.lines, "bytes": s.bytes} for s in done.shards],
            }
        )
        return
    first, last = done.shards[0], done.shards[-1]
    names = str(first.path) if len(done.shards) == 1 else f"{first.path} to {last.path.name}"
    most, least = first.lines, last.lines
    each = f"{most} lines" if most == least else f"{least} or {most} lines"
    amount = f"{human_bytes(sum(shard.bytes for shard in done.shards))} in {human_seconds(seconds)}"
    old = f", {done.replaced} older shards replaced" if done.replaced else ""
    order_ = f", shuffled with --seed {order.seed}" if order.seed is not None else ""
    call.terminal.line(f"split: {names}, {each} each, {amount}{order_}{old}")
