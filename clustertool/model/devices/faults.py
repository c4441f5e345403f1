"""This module finds the faults of one card in its reported values. A value that a card does not report is not a fault."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, NamedTuple

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Card

HOT = 90  # degrees, for a card that does not report its slowdown temperature
_SLOWING = ("hardware slowdown", "hardware thermal", "software thermal", "power brake")  # a power cap is a card at work
_AWAY = "reset the device or reboot the node, dmesg there shows the reason; until then leave it out: devices in HOSTS"
_MEMORY = (
    "reset the device or reboot the node, which takes bad memory out of use; have it replaced if errors come again"
)
_FAILED = "have the card replaced; until then leave it out: devices in HOSTS"
_MODE = "as root there: nvidia-smi -c DEFAULT"
_SLOW = "check its cooling and its power supply: one slow card slows all"


class Ill(NamedTuple):
    """level: warn, or error for what breaks a job."""

    level: str
    text: str
    fix: str


def ills(card: Card, shared: bool = False) -> List[Ill]:
    """`card` as node/devices/read.py reports it; shared: several ranks of the job would have it."""
    problem = str(card.get("problem") or "")
    if problem:
        return [Ill("warn" if problem == "health: Warning" else "error", problem, _AWAY)]
    found = []
    if card.get("compute_mode") == "prohibited":
        found.append(Ill("error", "compute mode prohibited: no process can compute on it", _MODE))
    elif shared and exclusive(card):
        found.append(Ill("warn", f"{card['compute_mode']}, and several ranks would share it", _MODE))
    if card.get("repair") == "failed":
        found.append(Ill("error", "bad memory that it can't replace any more", _FAILED))
    number = card.get("ecc_uncorrected") or 0
    if number:
        found.append(Ill("warn", f"{number} uncorrected ECC error{'s' * (number != 1)}", _MEMORY))
    if card.get("repair") == "pending":
        found.append(Ill("warn", "bad memory in use until it is reset", _MEMORY))
    return found + _heat(card)


def _heat(card: Card) -> List[Ill]:
    found = []
    degrees, limit = card.get("temperature"), card.get("slowdown") or HOT
    if degrees is not None and degrees >= limit:
        known = f", it slows down at {limit} C" if card.get("slowdown") else ""
        found.append(Ill("warn", f"{degrees} C{known}", _SLOW))
    slowing = [reason for reason in card.get("throttle") or () if reason in _SLOWING]
    if slowing:
        found.append(Ill("warn", f"slowed down now: {', '.join(slowing)}", _SLOW))
    return found


def exclusive(card: Card) -> bool:
    """Check whether only one process at a time may compute on a card."""
    return str(card.get("compute_mode") or "").startswith("e")


def broken(card: Card) -> str:
    """Describe why no job should get this card; "" if nothing is so wrong with it."""
    return next((ill.text for ill in ills(card) if ill.level == "error"), "")
