"""A typed meeting is a job whose command is typed on each of its machines: where they meet, and how many they are."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Optional

from clustertool.model.planning.environment import endpoint


def on_loopback(host: str) -> bool:
    """Check whether `host` is typed as the loopback: other names may mean the loopback on their own machine only."""
    if host in ("localhost", "ip6-localhost", "ip6-loopback"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class TypedMeeting:
    """What a user types on each machine of a job. host, port: where the coordinator listens.

    nodes: the number of machines. index: of this machine; None: the machine that owns `host` is 0, and the others are numbered
    by address. run_id: what the user calls the job. timeout: seconds; None: that of conf.py.
    """

    host: str
    port: int
    nodes: int
    index: Optional[int] = None
    run_id: str = ""
    timeout: Optional[float] = None

    @property
    def endpoint(self) -> str:
        return endpoint(self.host, self.port)

    @property
    def salt(self) -> str:
        """What all machines of the job have in common, and two jobs at the same time do not."""
        return self.run_id or self.endpoint
