"""A relay is a process of its own: the agent forks it, and it is gone as soon as the agent is.

The child imports what a relay needs: what the agent does not have in memory need not be copied when they part.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import NoReturn, Tuple

from clustertool.errors import ClustertoolError
from clustertool.model.wire.frames import Header, encode
from clustertool.node.system import processes


def start(order: Header, root: str) -> Tuple[int, socket.socket]:
    """(pid, our end of its control socket)."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        _live(theirs, order, root)
    theirs.close()
    return child, ours


def _live(control: socket.socket, order: Header, root: str) -> NoReturn:
    """In the child. No descriptor of the agent's stays open: it must see the agent go, and ssh must not wait for it."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        processes.keep_only(control.fileno())
        processes.set_name("ct-relay")
        control.setblocking(False)
        from clustertool.node.dispatch.relay import Relay

        relay = Relay(control, order, root)
        try:
            relay.run()
        finally:
            relay.close()
    except ClustertoolError as error:
        _last_word(control, type(error).__name__, error.what, error.fix)
    except Exception:  # noqa: BLE001 - the outermost boundary of this process: what we did not foresee is told as a bug
        import traceback

        _last_word(control, "InternalError", traceback.format_exc(limit=-4), "")
    finally:
        processes.leave(0)


def _last_word(control: socket.socket, kind: str, what: str, fix: str) -> None:
    with contextlib.suppress(OSError):
        control.setblocking(True)
        control.settimeout(5.0)
        control.sendall(encode({"k": "relay", "s": "failed", "kind": kind, "what": what, "fix": fix}))
