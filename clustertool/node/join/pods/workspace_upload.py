"""The laptop sends the workspace into the store of node 0, by a dispatch to an agent in that pod.

The release appears in the store by one rename when all its pieces are there, so no message is needed about the end.
"""

from __future__ import annotations

import contextlib
import os
import time

from clustertool.errors import DispatchError
from clustertool.model import paths
from clustertool.model.joining.join_file import JoinFile

_POLL = 0.3  # seconds


class WorkspaceUpload:
    """The wait for the workspace that the laptop sends. Call turn() each loop while it is expected. root: ROOT_DIR here."""

    def __init__(self, root: str, join: JoinFile) -> None:
        self._release = os.path.join(paths.releases(root), join.release)
        self._pieces = os.path.join(os.path.dirname(paths.releases(root)), "pieces")
        self._wanted = bool(join.release and join.of_engine.uploaded)
        self._patience = join.join_timeout
        self._poll_at = self._moved_at = 0.0
        self._seen = 0

    @property
    def expected(self) -> bool:
        """Whether the workspace is still to come."""
        return self._wanted and not os.path.isfile(self._release)

    def turn(self) -> bool:
        """Check, at most every 0.3 s, whether the store has the whole workspace, or none is to come; False between two checks.

        Raises DispatchError if nothing has come for JOIN_TIMEOUT.
        """
        now = time.monotonic()
        if now < self._poll_at:
            return False
        self._poll_at = now + _POLL
        if not self.expected:
            return True
        changed = 0
        with contextlib.suppress(OSError):
            changed = os.stat(self._pieces).st_mtime_ns
        if changed != self._seen or not self._moved_at:
            self._seen, self._moved_at = changed, now
        if now - self._moved_at > self._patience:
            what = f"no part of the workspace has come from the laptop for {self._patience:g} s"
            raise DispatchError(what, "let `run` go on until the job has started; JOIN_TIMEOUT in conf.py is the limit")
        return False
