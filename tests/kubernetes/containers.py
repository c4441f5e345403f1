"""What the API server of the tests needs of the hosts that run its pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Container(Protocol):
    """The first process of a pod, and its log."""

    log: Path

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""

    def signal(self, kill: bool) -> None:
        """Send TERM once, or KILL and wait for the end."""

    def message(self) -> str:
        """The termination message."""

    def exec(self, argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """The command that runs another one in the container, and the options of its process."""


class Runtime(Protocol):
    """The hosts of all nodes."""

    def address(self, pod: Mapping[str, Any]) -> str:
        """Of a pod that is to be started."""

    def start(self, pod: Mapping[str, Any], secrets: Mapping[str, Any]) -> Container:
        """secrets: the objects by their names."""

    def publish(self, services: Sequence[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]]) -> None:
        """Give pods the names of the headless Services that select them. Called after each change."""
