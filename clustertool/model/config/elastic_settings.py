"""The settings of an elastic job: how it follows nodes that come and go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple


@dataclass(frozen=True)
class ElasticServer:
    """The etcd that decides who coordinates. urls: of its members, () for none. user: "" without authentication.

    password_name, ca_name: which of SECRETS have the password and the certificates (PEM) of the authority, "" for none.
    """

    urls: Tuple[str, ...] = ()
    user: str = ""
    password_name: str = ""
    ca_name: str = ""


@dataclass(frozen=True)
class ElasticSettings:
    """minimum 0: the job is not elastic. Times are seconds.

    timeout: how long the start waits for `maximum` nodes, and a job below `minimum` for further ones. grow: "next" adds a new
    node at the next epoch, "restart" at once. backoff: the least and the longest pause before an epoch. coordinator: the host
    of HOSTS that coordinates, "" for the first one.
    """

    minimum: int = 0
    maximum: int = 0
    timeout: float = 300.0
    grow: str = "next"
    backoff: Tuple[float, float] = (1.0, 30.0)
    server: ElasticServer = ElasticServer()
    coordinator: str = ""

    @property
    def present(self) -> bool:
        return self.minimum > 0
