"""Epochs of an elastic job: how one ends, and when the next one may begin."""

from __future__ import annotations

from typing import Mapping, NamedTuple, Tuple

_MARGIN = 1.0  # seconds for a node to kill its ranks after the end of its lease


class EpochEnd(NamedTuple):
    """How an epoch has ended. attempt: its last one. lost: members, and when their last heartbeat was received
    (CLOCK_BOOTTIME). left: members that were released. restarts_used: of --max-restarts. Only the coordinator knows these."""

    attempt: int
    why: str
    lost: Mapping[int, float] = {}
    left: Tuple[int, ...] = ()
    restarts_used: int = 0


def earliest_start(lost: Mapping[int, float], lease: float) -> float:
    """Before this time a lost node may still have ranks."""
    return max((at + lease + _MARGIN for at in lost.values()), default=0.0)


def pause(short: int, least: float, most: float) -> float:
    """Seconds before an epoch. short: how many epochs in a row ended early."""
    return min(most, least * 2.0 ** min(short, 30))
