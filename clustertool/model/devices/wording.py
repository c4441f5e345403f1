"""This module describes devices that are in use, in the same text for a plan and for a node at the start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, List, Mapping

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Card, CardProcess

FIX = "wait for it with --wait, or take others with --devices (auto: those that are free)"


def in_use(kind: str, holders: Mapping[int, str]) -> str:
    """Describe devices in use: `gpu 0,1 is in use by job X of user anna; gpu 5 by ...`."""
    by_holder: Dict[str, List[int]] = {}
    for device, holder in sorted(holders.items()):
        by_holder.setdefault(holder, []).append(device)
    return "; ".join(f"{kind} {','.join(map(str, ids))} is in use by {holder}" for holder, ids in by_holder.items())


def holder(job: str, user: str) -> str:
    return f"job {job} of user {user}"


def computing(card: Card) -> List[CardProcess]:
    """Select processes that compute on a card, without those that only draw, from the answer of node/devices/read.py."""
    return [process for process in card.get("processes") or () if not process.get("graphics")]


def describe(process: CardProcess) -> str:
    """Describe a process: `python3 (pid 12, user anna)`, or with its job."""
    owner = f"pid {process['pid']}" + (f", user {process['user']}" if process.get("user") else "")
    return f"{process.get('name') or 'a process'}{' of job ' + process['job'] if process.get('job') else ''} ({owner})"
