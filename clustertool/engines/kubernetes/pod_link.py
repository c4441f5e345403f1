"""A node that is a pod is reached by programs in its container, by exec. The image needs no shell."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from clustertool.engines.kubernetes.api.pod_channel import PodChannel
from clustertool.errors import Unreachable
from clustertool.model.paths import IN_POD

_SHELL = ("/bin/sh",)
_NO_SHELL = "use an image with a shell, or run a program: exec --in-job PROGRAM ..."


class ChannelOpener(Protocol):
    """Of ClusterApi, what is used here."""

    def channel(self, pod: str, argv: Sequence[str]) -> PodChannel: ...


class PodLink:
    """api: may be used by several threads. pod: its name in the API server. node: what messages call it."""

    noise = b""
    no_shell = ("/bin/sh did not start in the container", _NO_SHELL)
    root_group = IN_POD

    def __init__(self, api: ChannelOpener, pod: str, node: str = "") -> None:
        self.pod, self.node = pod, node or pod
        self.times: Mapping[str, float] = {}
        self._api, self._lock = api, threading.Lock()
        self._channels: list[PodChannel] = []
        self._closed = False

    @property
    def alive(self) -> bool:
        """Each channel is a connection of its own."""
        return not self._closed

    @property
    def waiting(self) -> int:
        return sum(channel.waiting for channel in list(self._channels))

    def channel(self, *, window: int = 0, timeout: float = 10.0) -> PodChannel:
        """Open a POSIX shell. In an image without /bin/sh the channel ends with 126 or 127, and its stderr has the reason."""
        return self.program(_SHELL, timeout=timeout)

    def program(self, argv: Sequence[str], *, window: int = 0, timeout: float = 10.0) -> PodChannel:
        """Open a program in the place of a shell. Raises AuthError, NotFound, Unreachable."""
        channel = self._api.channel(self.pod, argv)
        channel.settimeout(timeout)
        with self._lock:
            self._channels = [one for one in self._channels if not one.closed]
            self._channels.append(channel)
            if self._closed:  # meanwhile
                channel.close()
        return channel

    def lost(self, why: str) -> Unreachable:
        return Unreachable(why, f"is the pod {self.pod} still running?", self.node)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.close()
