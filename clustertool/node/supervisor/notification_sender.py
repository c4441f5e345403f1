"""This module sends a notification: by a POST, to the stdin of a command, or by apprise. The laptop uses it, too.

Nodes import it in the process that sends only (notifier.py): urllib takes 30 ms of CPU time. No answer contains the address.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import logging
import os
import time
import urllib.request
from typing import Any, Sequence

from clustertool.model.launcher_variables import without_secret
from clustertool.model.notification import Notification, needs_apprise, scheme
from clustertool.node.system import programs

_COMMAND_LIMIT = 30.0  # seconds that a command may take
_TIMEOUT = 10.0  # seconds without an answer of a server
_PAUSES = (1.0, 4.0, 0.0)  # seconds after each try
_HEADERS = {"Content-Type": "application/json", "User-Agent": "clustertool"}


def can_send(notify: Sequence[str]) -> bool:
    """Check whether there is a NOTIFY, and this machine can send to it: with apprise, if that is needed."""
    return bool(notify and (not needs_apprise(notify) or _service(notify[0])))


def deliver(notify: Sequence[str], message: Notification) -> str:
    """Send a message, with up to three tries. Return why it was not sent, "" if it was."""
    for pause in _PAUSES:
        why = send_once(notify, message)
        if not why:
            return ""
        time.sleep(pause)
    return f"{why}; tried three times"


def send_once(notify: Sequence[str], message: Notification) -> str:
    """Send a message once, to an address or to a command. Return why it was not sent, "" if it was."""
    text = json.dumps(message)
    if needs_apprise(notify):
        return _send_by_apprise(notify[0], message)
    if scheme(notify):
        return _post(notify[0], text.encode())
    code, _, _ = programs.output(notify, _COMMAND_LIMIT, text, cwd="/", env=without_secret(os.environ))
    ends = {-1: f"did not end in {_COMMAND_LIMIT:g} s", 127: "cannot be started"}
    return f"the command {ends.get(code, f'ended with {code}')}" if code else ""


def _send_by_apprise(address: str, message: Notification) -> str:
    """Send a message once by apprise. Return why it was not sent, "" if it was."""
    service = _service(address)
    if not service:
        return "nodes send to https://, http:// and commands only, and no attached laptop has confirmed to have sent it"
    title = f"clustertool: {message['event']}"
    return "" if service.notify(message["text"], title, body_format="text") else "apprise could not send it"


def _service(address: str) -> Any:
    """Create an Apprise with the address. It is false if it does not know that; None if it is not installed.

    Its log, which shows the address, is off.
    """
    if importlib.util.find_spec("apprise") is None:
        return None
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    service = importlib.import_module("apprise").Apprise()
    service.add(address)
    return service


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
