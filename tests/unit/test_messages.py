"""The registry of requests is whole: each type has a handler on the node with the same types, and a check of its answer."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest

from clustertool.model.shape import Malformed
from clustertool.model.wire import agent_answers, agent_requests, answers, messages
from clustertool.model.wire.coordinator_messages import Incarnation, is_outdated, read_incarnation
from clustertool.model.wire.messages import REQUESTS, STATUS, STOP, Kind
from clustertool.model.wire.stream_messages import FollowFrame, RelayReport

NAMES = {"answers": agent_answers, "requests": agent_requests, "Kind": Kind}
TYPES = {  # request type -> the types of its fields and of its answer
    kind.type: get_args(eval(messages.__annotations__[name], NAMES))
    for name, kind in vars(messages).items()
    if isinstance(kind, Kind)
}


def handler(kind: Kind[Any, Any]) -> Callable[..., Any]:
    module, _, name = kind.handler.partition(":")
    return getattr(importlib.import_module(f"clustertool.node.{module}"), name)  # type: ignore[no-any-return]


def members(union: Any) -> set[str]:
    """The values of `type` of the messages of a union."""
    return {name for one in get_args(union) for name in get_args(get_type_hints(one)["type"])}


def test_every_request_is_in_the_registry_once() -> None:
    assert sorted(TYPES) == sorted(REQUESTS)
    assert [kind.type for kind in REQUESTS.values()] == list(REQUESTS)


@pytest.mark.parametrize("type", REQUESTS)
def test_a_handler_has_the_types_of_its_request(type: str) -> None:
    function = handler(REQUESTS[type])
    parameters = list(inspect.signature(function).parameters.values())
    names = {**vars(agent_requests), **vars(agent_answers), **NAMES}
    fields, answer = (eval(function.__annotations__[name], names) for name in (parameters[1].name, "return"))
    assert (fields, answer) == TYPES[type]


@pytest.mark.parametrize("type", REQUESTS)
def test_a_check_requires_the_fields_of_the_answer(type: str) -> None:
    """An empty answer passes only where the type of the answer requires no field."""
    required = getattr(TYPES[type][1], "__required_keys__", ())  # the fields of a record have defaults
    try:
        answers.check_answer(REQUESTS[type], {"re": 1})
    except Malformed as error:
        assert any(f"has no {name!r}" in str(error) for name in required)
    else:
        assert not required


@pytest.mark.parametrize("type", ["closed", *sorted(members(FollowFrame) | members(RelayReport))])
def test_a_frame_passes_the_check_of_its_type(type: str) -> None:
    """The agent client makes `closed` itself, so a node must not send it."""
    with pytest.raises(Malformed, match="is of no known type" if type == "closed" else "has no|is None"):
        answers.check_frame({"type": type, "why": None})


def test_a_request_travels_as_json_with_one_key_for_its_type() -> None:
    request = STATUS({"job": "J"})
    assert json.loads(json.dumps(request.header(3, 5.0))) == {"type": "status", "id": 3, "now": 5.0, "job": "J"}
    assert request == STATUS({"job": "J"}) != STATUS({"job": "K"})
    assert request != STOP({"job": "J", "by": "ann", "code": 0, "grace": 0.0, "force": False})


def test_an_incarnation_is_read_or_refused() -> None:
    assert read_incarnation(["boot", 7, 9]) == Incarnation("boot", 7, 9)
    for value in (None, "boot", [], ["boot", 7], ["boot", 7, 9, 1], [1, 7, 9], ["boot", True, 9], ["boot", 7, 9.0], {}):
        with pytest.raises(ValueError, match="an incarnation"):
            read_incarnation(value)


def test_a_supervisor_never_goes_back_to_an_older_attempt() -> None:
    orders = [{"type": type, "attempt": attempt} for type in ("start", "stop", "finish") for attempt in (0, 1, 2)]
    dropped = [(order["type"], order["attempt"]) for order in orders if is_outdated(order, 1)]
    assert dropped == [("start", 0), ("stop", 0)], "the end of the job counts in any attempt"
    for attempt in (None, "1", 1.0, True):
        with pytest.raises(ValueError, match="an attempt"):
            is_outdated({"type": "start", "attempt": attempt}, 0)
