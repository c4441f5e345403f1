"""This module packs the places of all ranks of a job, so that the records of every node can name the ranks of all nodes.

It is pure. A packed row is [role, first rank, first node, ranks on each node, nodes]: a job of 1000 equal nodes is one row.
"""

from __future__ import annotations

from typing import Iterable, Iterator, List, Sequence, Tuple

from clustertool.model.roles import ROLES

MOST = 100_000  # ranks of a job
Place = Tuple[str, int, int]  # role, rank, node
Row = Tuple[str, int, int, int, int]  # a list in JSON
_NONE: Row = ("", 0, 0, 0, 0)


def pack(places: Iterable[Place]) -> List[Row]:
    """Pack the places of ranks into rows for unpack()."""
    runs: List[Row] = []
    for role, rank, node in sorted(places):
        last = runs[-1] if runs else _NONE
        if last[0] == role and last[2] == node and last[1] + last[3] == rank:
            runs[-1] = (*last[:3], last[3] + 1, 1)
        else:
            runs.append((role, rank, node, 1, 1))
    rows: List[Row] = []
    for role, rank, node, each, _ in runs:
        last = rows[-1] if rows else _NONE
        if last[0] == role and last[3] == each and last[2] + last[4] == node and last[1] + each * last[4] == rank:
            rows[-1] = (*last[:4], last[4] + 1)
        else:
            rows.append((role, rank, node, each, 1))
    return rows


def unpack(rows: Sequence[Row], nodes: int) -> Iterator[Place]:
    """Yield (role, rank, node) of each rank. Rows come from a node: at the first one that is not possible it ends.

    That is a role that does not exist, a node that is not among `nodes`, or more than 100,000 ranks.
    """
    left = MOST
    for role, rank, node, each, count in rows:
        first, start, each, count = int(rank), int(node), int(each), int(count)
        left -= each * count
        if role not in ROLES or min(first, start) < 0 or min(each, count) < 1 or start + count > nodes or left < 0:
            return
        for number in range(each * count):
            yield str(role), first + number, start + number // each
