"""Dispatch: a node that has the release is done; the others get it into a staging directory, verified, then renamed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from clustertool.errors import ClustertoolError, DispatchError
from clustertool.plan.facts import Facts
from clustertool.plan.portions import Portion
from clustertool.reach.fanout import each
from clustertool.reach.fleet import Fleet
from clustertool.reach.rsync import PushOptions, push
from clustertool.reach.workspace import Workspace

_WIDTH = 16  # rsync processes at a time: more only fight for one uplink
_LAST_MOMENT = 2.0


@dataclass(frozen=True)
class Dispatched:
    """`bytes` over the uplink; `sent`, `had` and `shared` are node ids (shared: another node's copy is theirs too)."""

    bytes: int
    seconds: float
    sent: tuple[int, ...]
    had: tuple[int, ...]
    shared: tuple[int, ...]
    failed: Mapping[int, ClustertoolError]


def owners(facts: Mapping[int, Facts]) -> dict[str, int]:
    """root id -> the node that receives for all that share this ROOT_DIR."""
    first: dict[str, int] = {}
    for node in sorted(facts):
        first.setdefault(facts[node].root_id, node)
    return first


def dispatch(
    fleet: Fleet, workspace: Workspace, portions: Mapping[int, Portion], facts: Mapping[int, Facts],
    progress: Callable[[int, int, int], None],
) -> Dispatched:  # fmt: skip
    """Raises nothing for single nodes: they are in `failed`. progress(node, bytes sent, total) with sent == total: done."""
    start = time.monotonic()
    first = owners(facts)
    receivers = sorted(set(first.values()))
    staged = fleet.ask({node: {"q": "stage", "release": portions[node].release} for node in receivers})
    failed: dict[int, ClustertoolError] = dict(staged.failed)
    had = [node for node, answer in staged.ok.items() if answer["have"]]
    for node in had:
        progress(node, 0, 0)
    todo = {node: node for node, answer in staged.ok.items() if not answer["have"]}

    def send(node: int) -> int:
        answer = staged.ok[node]
        options = PushOptions(link_dest=tuple(answer["base"]))
        sent = push(
            fleet.agents[node].link, workspace.top,
            [os.fsencode(entry.path) for entry in portions[node].of(workspace.entries)],
            answer["path"], options=options, on_progress=lambda done, total: progress(node, done, max(total, done + 1)),
            check=fleet.check,
        )  # fmt: skip
        fleet.agents[node].ask({"q": "seal", "release": portions[node].release}, timeout=600)
        progress(node, sent.bytes, sent.bytes)
        return sent.bytes

    busy: set[int] = set()

    def one(node: int) -> int:
        busy.add(node)
        try:
            return send(node)
        finally:
            busy.discard(node)

    try:
        gathered = each(todo, one, width=_WIDTH, check=fleet.check)
    except BaseException:
        _await(busy)
        raise
    failed.update({node: _as_dispatch(error) for node, error in gathered.failed.items()})
    shared = [node for node in facts if node not in receivers]
    for node in shared:
        owner = first[facts[node].root_id]
        if owner in failed:
            failed[node] = DispatchError(f"{fleet.name(owner)}, which shares its ROOT_DIR, has no copy", "", fleet.name(node))
        else:
            progress(node, 0, 0)
    return Dispatched(
        sum(gathered.ok.values()), time.monotonic() - start, tuple(gathered.ok), tuple(had), tuple(shared), failed
    )


def _await(busy: set[int]) -> None:
    """After an interrupt: each sender ends its rsync, which must not outlive us."""
    end = time.monotonic() + _LAST_MOMENT
    while busy and time.monotonic() < end:
        time.sleep(0.01)


def _as_dispatch(error: ClustertoolError) -> ClustertoolError:
    """A node that fails while it receives is a failed dispatch, whatever broke."""
    return error if isinstance(error, DispatchError) else DispatchError(error.what, error.fix, error.node)
