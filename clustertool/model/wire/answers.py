"""Check what a node sends: the answers to requests and the frames that answer nothing, and how large a frame's header may be.

Everything that comes from a node passes one of these checks before other code uses it: a program of a job can change the
records and the tool's code on its node. The checks follow from the types of messages. Only the laptop imports this module.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Mapping, get_args, get_type_hints

from clustertool.model.shape import Check, Malformed, by_type, check_of
from clustertool.model.wire import agent_answers, agent_requests, messages
from clustertool.model.wire.messages import DEVICES, SAMPLE, Kind
from clustertool.model.wire.stream_messages import FollowFrame, RelayReport

STREAM = 2 << 20  # bytes of a header that answers nothing; one event may name all processes of a node
PAYLOAD = 256 << 10  # bytes of a log in one frame
_SHORT = 32 << 10  # bytes of the header of a piece of a log, which names a file


def check_answer(kind: Kind[Any, Any], answer: Mapping[str, object]) -> None:
    """Raise Malformed for what is neither an answer to a request of this kind nor an error in its place."""
    if answer.get("error") is not None:
        check_of(agent_answers.ErrorFields)(answer["error"], "error")
    elif "need" in answer and kind in (DEVICES, SAMPLE):
        check_of(agent_answers.NeedsModule)(answer, "")
    else:
        check_of(_answer_types()[kind.type])(answer, "")


@lru_cache(maxsize=1)
def _answer_types() -> Mapping[str, object]:
    """Read the type of each request's answer: the annotation of the request in messages.py names it."""
    names = {**vars(messages), "answers": agent_answers, "requests": agent_requests}
    hints = get_type_hints(messages, names, include_extras=True)
    kinds = {name: kind for name, kind in vars(messages).items() if isinstance(kind, Kind)}
    return {kind.type: get_args(hints[name])[1] for name, kind in kinds.items()}


@lru_cache(maxsize=1)
def _frames() -> Mapping[str, Check]:
    """Map the type of each frame that answers no request to its check."""
    return {**by_type(FollowFrame), **by_type(RelayReport)}


def is_relay_report(header: Mapping[str, object]) -> bool:
    """Check whether a frame is a report of a node's relay, by its type."""
    return str(header.get("type")).startswith("relay-")


def frame_limit(header: Mapping[str, object]) -> int:
    """Return how many bytes the header of a frame that answers no request may have.

    2 MiB for events and reports of a relay, else 32 KiB.
    """
    return STREAM if header.get("type") == "events" or is_relay_report(header) else _SHORT


def check_frame(header: Mapping[str, object]) -> None:
    """Check a frame that answers no request. Raises Malformed, also for an unknown type."""
    check = _frames().get(str(header.get("type")))
    if check is None:
        raise Malformed("a frame", "is of no known type")
    check(header, "")
