"""A notification is one message about a job: it has ended, failed, lost nodes, or begins again. NOTIFY names the receiver.

Pure. The coordinator of the job makes it from the events that it records (decision 91).
"""

# Without annotations from __future__: types of records that are text cost nodes time (decision 79).
import re
from typing import Any, List, Mapping, Optional, Sequence, Tuple, TypedDict

from clustertool.model import field_types as fields

_SHORTEST_SECRET = 8  # characters: shorter arguments are common in what programs print
_ADDRESS = re.compile(r"|https?://[^\s/@]+(/\S*)?|(?!https?:)[a-z][a-z0-9+.-]*://\S+", re.IGNORECASE)
_RIGHT = 'an address ("https://...", without a user), or a list of arguments: ["/usr/local/bin/notify", "-q"]'


class Notification(TypedDict):
    """What a receiver gets, as JSON. The same message may come twice, with the same id."""

    id: fields.Label
    event: fields.Label  # end, failure, loss or restart
    job: fields.JobId
    name: fields.Label  # of --name, or ""
    text: fields.Label
    code: Optional[fields.ExitCode]  # of the job, once it has ended


def read_notify(value: object) -> Tuple[str, ...]:
    """Read the value of NOTIFY: an address alone, the arguments of a command, or nothing, which is "" or [].

    Raises ValueError, which states what is right, for another value.
    """
    if isinstance(value, str) and _ADDRESS.fullmatch(value):
        return (value,) if value else ()
    command = tuple(value) if isinstance(value, (list, tuple)) else ("",)
    valid = all(isinstance(one, str) and "\0" not in one for one in command)
    if valid and (not command or (command[0] and not scheme(command))):
        return command
    raise ValueError(_RIGHT)


def scheme(notify: Sequence[str]) -> str:
    """Return the scheme of the address, in small letters; "" for a command and for nothing."""
    return notify[0].partition("://")[0].lower() if notify and "://" in notify[0] else ""


def needs_laptop(notify: Sequence[str]) -> bool:
    """Check whether it is an address of another scheme than HTTP: nodes do not have what can send there (apprise)."""
    return scheme(notify) not in ("", "https", "http")


def secret_parts(notify: Sequence[str]) -> List[str]:
    """List what is masked in texts: the address, or the arguments of the command with 8 or more characters."""
    return [one for one in notify if len(one) >= _SHORTEST_SECRET]


def describe(kind: str, event: Mapping[str, Any], why: str, names: Sequence[str]) -> Tuple[str, str]:
    """Return `event` and `text` of the message about an event of the coordinator; both are "" if it makes none.

    why: the newest attempt has failed. names: of the nodes, by their ids.
    """
    if kind == "lost":
        return "loss", f"node {names[event['node']]} is lost: {event['why']}"
    if kind == "hang":
        return "hang", str(event["text"])
    if kind == "restart":
        return "restart", f"attempt {event['attempt']} begins: {why}".rstrip(": ")
    if kind == "verdict":
        text = f"{event['state']} with exit code {event['code']}: {event['reason']}"
        return "end" if event["state"] in ("succeeded", "stopped") else "failure", text
    return "", ""
