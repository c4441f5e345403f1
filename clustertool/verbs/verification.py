"""dispatch --verify: each node hashes again what it has and removes what is damaged; here is what it found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from clustertool.errors import raise_all
from clustertool.fleet.dispatch.receivers import owners
from clustertool.fleet.fleet import Fleet
from clustertool.model.facts import Facts
from clustertool.model.quantities import human_bytes
from clustertool.show.table import count
from clustertool.verbs.verb import Call

_FOUND = ("releases", "pieces", "bytes", "damaged", "lost")


def verified(
    call: Call, fleet: Fleet, facts: Mapping[int, Facts]
) -> tuple[dict[int, Facts], dict[str, dict[str, Any]]]:
    """The facts without the releases that are damaged, and what each node has found, by its name.

    With --dry nothing is removed. Nodes that share a ROOT_DIR hash it once. Raises what nodes raised, after the report.
    """
    first = owners(facts)
    gathered = fleet.ask({node: {"q": "verify", "remove": not call.given.dry} for node in first.values()})
    answers = {node: {key: answer[key] for key in _FOUND} for node, answer in sorted(gathered.ok.items())}
    for node, answer in answers.items():
        call.terminal.line(
            f"{fleet.name(node)}: {_in_words(answer, call.given.dry)}", "red" if _is_damaged(answer) else ""
        )
    raise_all(list(gathered.failed.values()))
    lost = {node: set(answers[first[fact.root_id]]["lost"]) for node, fact in facts.items()}
    sound = {
        node: replace(fact, releases=tuple(name for name in fact.releases if name not in lost[node]))
        for node, fact in facts.items()
    }
    return sound, {fleet.name(node): answer for node, answer in answers.items()}


def _is_damaged(answer: Mapping[str, Any]) -> bool:
    return bool(answer["damaged"] or answer["lost"])


def _in_words(answer: Mapping[str, Any], dry: bool) -> str:
    all_ = (
        f"{count(answer['releases'], 'release')} of {count(answer['pieces'], 'piece')}, {human_bytes(answer['bytes'])}"
    )
    if not _is_damaged(answer):
        return f"{all_}: nothing is damaged"
    bad = f"damaged are {count(answer['damaged'], 'piece')} and {count(len(answer['lost']), 'release')}"
    return f"{all_}: {bad}{', which would be removed' if dry else '; removed'}"
