"""This module sends a notification: by a POST, or to the stdin of a command. The laptop uses it, too.

Nodes import it in the process that sends only (notifier.py): urllib takes 30 ms of CPU time. No answer contains the address.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.request
from typing import Callable, Sequence

from clustertool.model.launcher_variables import without_secret
from clustertool.model.notification import Notification, needs_laptop, scheme
from clustertool.node.system import programs

_COMMAND_LIMIT = 30.0  # seconds that a command may take
_TIMEOUT = 10.0  # seconds without an answer of a server
_PAUSES = (1.0, 4.0, 0.0)  # seconds after each try
_HEADERS = {"Content-Type": "application/json", "User-Agent": "clustertool"}
Send = Callable[[Sequence[str], Notification], str]


def send_once(notify: Sequence[str], message: Notification) -> str:
    """Send a message once, to an address of HTTP or to a command. Return why it was not sent, "" if it was."""
    text = json.dumps(message)
    if scheme(notify):
        return _post(notify[0], text.encode())
    code, _, _ = programs.output(notify, _COMMAND_LIMIT, text, cwd="/", env=without_secret(os.environ))
    ends = {-1: f"did not end in {_COMMAND_LIMIT:g} s", 127: "cannot be started"}
    return f"the command {ends.get(code, f'ended with {code}')}" if code else ""


def deliver(notify: Sequence[str], message: Notification, send: Send = send_once) -> str:
    """Send a message, by `send`, with up to three tries. Return why it was not sent, "" if it was."""
    if send is send_once and needs_laptop(notify):
        return "nodes send to https://, http:// and commands only, and no attached laptop has confirmed to have sent it"
    for pause in _PAUSES:
        why = send(notify, message)
        if not why:
            return ""
        time.sleep(pause)
    return f"{why}; tried three times"


def _post(address: str, data: bytes) -> str:
    """POST the data to an address. Return the HTTP status, or the name of the error, if it is not taken; else "".

    A redirect is an error: what follows it is a GET, which has no message.
    """
    try:
        request = urllib.request.Request(address, data, _HEADERS)
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            return "" if answer.url == request.full_url else "the server redirects"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"the POST has failed ({getattr(error, 'code', type(getattr(error, 'reason', error)).__name__)})"
