"""What is held is told in one way, by whoever finds it out: a plan from facts, a node at the start."""

from __future__ import annotations

from typing import Dict, List, Mapping

FIX = "wait for it with --wait, or take others with --devices (auto: those that are free)"


def told(kind: str, holders: Mapping[int, str]) -> str:
    """`gpu 0,1 is held by job X of user anna; gpu 5 by ...`"""
    by_holder: Dict[str, List[int]] = {}
    for device, holder in sorted(holders.items()):
        by_holder.setdefault(holder, []).append(device)
    return "; ".join(f"{kind} {','.join(map(str, ids))} is held by {holder}" for holder, ids in by_holder.items())


def holder(job: str, user: str) -> str:
    return f"job {job} of user {user}"
