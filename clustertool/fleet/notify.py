"""This machine sends the notifications of a job while a command is attached to it: to NOTIFY of its own conf.py."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from clustertool.errors import ConfigError
from clustertool.model.config.cluster import Cluster
from clustertool.model.notification import Notification, needs_laptop
from clustertool.node.system.node_context import load_on_demand


def check(cluster: Cluster) -> None:
    """Raise ConfigError if NOTIFY has an address that needs apprise, and this is not installed here or does not know it."""
    if needs_laptop(cluster.notify) and not can_send(cluster.notify):
        what = f"{cluster.where}: NOTIFY needs apprise, which is not installed here or does not know the address"
        raise ConfigError(what, "pip install 'clustertool[notify]'; or an address with https://, or a command")


def can_send(notify: Sequence[str]) -> bool:
    """Check whether there is a NOTIFY, and this machine can send to it: with apprise, if that is needed."""
    return bool(notify) and bool(not needs_laptop(notify) or _service(notify))


def deliver(notify: Sequence[str], event: Mapping[str, object]) -> str:
    """Send the message in an event of a job, with up to three tries. Return why it was not sent, "" if it was."""
    message = {name: event[name] for name in Notification.__annotations__}
    send = (_send_by_apprise,) if needs_laptop(notify) else ()
    return str(load_on_demand("supervisor.notification_sender:deliver")(notify, message, *send))


def _send_by_apprise(notify: Sequence[str], message: Notification) -> str:
    """Send a message once by apprise. Return why it was not sent, "" if it was."""
    title = f"clustertool: {message['event']}"
    return "" if _service(notify).notify(message["text"], title, body_format="text") else "apprise could not send it"


def _service(notify: Sequence[str]) -> Any:
    """Create an Apprise with the address. It is false if it does not know that; None if it is not installed.

    Its log, which shows the address, is off.
    """
    if importlib.util.find_spec("apprise") is None:
        return None
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    service = importlib.import_module("apprise").Apprise()
    service.add(notify[0])
    return service
