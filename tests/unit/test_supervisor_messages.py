"""Requests to a supervisor come from any process of the user: each one is checked, whatever it contains."""

from __future__ import annotations

import math
from typing import Any, get_args, get_type_hints

import pytest

from clustertool.model.wire.supervisor_messages import REQUESTS, SupervisorAnswer, SupervisorRequest, read_request

STOP = {"type": "stop", "by": "inv stop", "code": 143, "grace": 1.5, "force": False}
RANK = {"type": "rank-environment", "role": "trainer", "rank": 3}
STACKS = {"type": "stacks", "role": "", "ranks": "3,7", "native": False, "tool": "", "seconds": 1.5}
VALID: list[dict[str, Any]] = [STOP, RANK, STACKS, {"type": "status"}, {"type": "bundle"}]


def types_of(union: Any) -> dict[str, Any]:
    return {name: one for one in get_args(union) for name in get_args(get_type_hints(one)["type"])}


def test_the_registry_has_each_request_and_each_answer_but_errors() -> None:
    assert {name: pair[0] for name, pair in REQUESTS.items()} == types_of(SupervisorRequest)
    answers = types_of(SupervisorAnswer)
    assert {pair[1] for pair in REQUESTS.values()} == {one for name, one in answers.items() if name != "error"}


@pytest.mark.parametrize("message", VALID, ids=[message["type"] for message in VALID])
def test_a_valid_request_passes_also_with_fields_of_a_newer_version(message: dict[str, Any]) -> None:
    assert read_request(message) is message
    newer = {**message, "later": [1]}
    assert read_request(newer) is newer


def test_a_laptop_of_the_previous_version_sends_no_notifications() -> None:
    notice = {"type": "attached", "laptop": "", "notified": ""}
    assert read_request({"type": "attached"}) == notice
    assert read_request({**notice, "laptop": "a1", "notified": "b2"}) == {**notice, "laptop": "a1", "notified": "b2"}
    for wrong in (7, None, "x" * 5000):
        with pytest.raises(ValueError, match="laptop"):
            read_request({**notice, "laptop": wrong})


def test_a_whole_number_of_seconds_is_a_grace() -> None:
    assert read_request({**STOP, "grace": 0})


@pytest.mark.parametrize("type", [None, "", "halt", 7, ["stop"], {"stop": 1}, "x" * 100_000])
def test_an_unknown_type_is_refused(type: object) -> None:
    with pytest.raises(ValueError, match="no type of a request") as caught:
        read_request({**STOP, "type": type})
    assert len(str(caught.value)) < 200


WRONG = [
    *((STOP, name) for name in ("by", "code", "grace", "force")),
    *((RANK, name) for name in ("role", "rank")),
    *((STACKS, name) for name in ("role", "ranks", "native", "tool", "seconds")),
]


@pytest.mark.parametrize("message, name", WRONG, ids=[f"{message['type']}-{name}" for message, name in WRONG])
def test_a_field_that_is_missing_or_of_another_type_is_refused(message: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"has no '{name}'"):
        read_request({key: value for key, value in message.items() if key != name})
    of = type(message[name])
    wrong: list[object] = [None, [], {}, [message[name]], "x" * 5000, -1, math.nan, math.inf, 1 << 80]
    wrong += [True] if of is not bool else [0, 1]
    wrong += ["1"] if of is not str else [1]
    wrong += [1.5] if of is int else []
    for value in wrong:
        with pytest.raises(ValueError, match=f"^{name} (is|has) "):
            read_request({**message, name: value})
