"""Growth records when the logs of a job grew: one line [time, log, size] each, which `inv logs` uses to merge ranks. Pure.

A log that grows all the time has two lines a second. Old lines are thinned as those of usage.jsonl are: a job of
weeks has some thousand lines for each log, and old output is merged less exactly.
"""

from __future__ import annotations

from typing import Dict, List, Set, Tuple

from clustertool.model.job.usage import kept


def thinned(data: bytes, now: float) -> bytes:
    """The lines that stay, in their order. The last one of each log does: what is behind it in the log has no time."""
    lines = data.split(b"\n")
    logs: Dict[bytes, List[Tuple[float, int]]] = {}
    for number, line in enumerate(lines):
        t, _, rest = line[1:].partition(b",")
        try:
            at = float(t)
        except ValueError:
            continue
        if not rest.endswith(b"]"):  # torn by a crash or a full disk
            continue
        logs.setdefault(rest.rpartition(b",")[0], []).append((at, number))
    stay: Set[int] = set()
    for found in logs.values():
        stay.update(found[index][1] for index in kept([t for t, _ in found], now))
        stay.add(found[-1][1])
    return b"".join(lines[number] + b"\n" for number in sorted(stay))
