"""This machine sends the notifications of a job while a command is attached to it: to NOTIFY of its own conf.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clustertool.errors import ConfigError
from clustertool.model.config.cluster import Cluster
from clustertool.model.notification import Notification
from clustertool.node.system.node_context import load_on_demand

_SENDER = "supervisor.notification_sender:"


def check(cluster: Cluster) -> None:
    """Raise ConfigError if NOTIFY has an address that needs apprise, and this is not installed here or does not know it."""
    if cluster.notify and not can_send(cluster.notify):
        what = f"{cluster.where}: NOTIFY needs apprise, which is not installed here or does not know the address"
        raise ConfigError(what, "pip install 'clustertool[notify]'; or an address with https://, or a command")


def can_send(notify: Sequence[str]) -> bool:
    """Check whether there is a NOTIFY, and this machine can send to it: with apprise, if that is needed."""
    return bool(notify and load_on_demand(_SENDER + "can_send")(notify))


def deliver(notify: Sequence[str], event: Mapping[str, object]) -> str:
    """Send the message in an event of a job, with up to three tries. Return why it was not sent, "" if it was."""
    message = {name: event[name] for name in Notification.__annotations__}
    return str(load_on_demand(_SENDER + "deliver")(notify, message))
