"""Settings of an elastic job: how many nodes it may have, and how it follows their changes. elastic_keys.py reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Tuple

ELASTIC_MODES = ("collective", "ps", "mpi")
GROWS = (
    "next",
    "restart",
)  # when a machine that has joined takes part: at the next epoch, or in one that begins for it


@dataclass(frozen=True)
class ElasticServer:
    """etcd, in which the epochs of a job are numbered. urls: https://host:port or http://host:port; () for no server.

    password_name, ca_name: of SECRETS, whose values are the password of `user` and the certificates (PEM) that sign that of
    the server; "" for no password, and for those that the node trusts.
    """

    urls: Tuple[str, ...] = ()
    user: str = ""
    password_name: str = ""
    ca_name: str = ""

    @property
    def present(self) -> bool:
        return bool(self.urls)

    @property
    def secrets(self) -> Tuple[str, ...]:
        """Names of SECRETS that only the nodes need, and no rank."""
        return tuple(name for name in (self.password_name, self.ca_name) if name)

    def of_ranks(self, names: Iterable[str]) -> Tuple[str, ...]:
        """Select those of SECRETS (`names`) that ranks get."""
        return tuple(name for name in names if name not in self.secrets)


@dataclass(frozen=True)
class ElasticSettings:
    """How a job follows nodes that come and go. minimum 0: it does not. Times are seconds.

    timeout: how long the job waits for `maximum` nodes before it starts with at least `minimum`, and how long it waits below
    `minimum` before it ends. grow: one of GROWS. backoff: the first and the longest time between two attempts to reach a
    coordinator, or to start a node that was lost. coordinator: a host of HOSTS, "" for the first node.
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

    @property
    def text(self) -> str:
        """MIN:MAX, as --nnodes has it."""
        return f"{self.minimum}:{self.maximum}"
