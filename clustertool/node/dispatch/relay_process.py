"""A relay is a process of its own: the agent forks it, and it ends as soon as the agent does."""

from __future__ import annotations

import contextlib
import socket
import traceback
from functools import partial
from typing import TYPE_CHECKING, Dict, List, Optional

from clustertool.errors import ClustertoolError, as_wire
from clustertool.model.wire.frames import Decoder, Header, encode
from clustertool.node.dispatch.relay import Relay
from clustertool.node.system import processes

if TYPE_CHECKING:
    from clustertool.model.wire.agent_requests import RelayRequest

_END = 2.0  # seconds for a relay to end


class RelayProcess:
    """A relay as its parent sees it: a child process that starts at once, with messages to and from it."""

    def __init__(self, order: RelayRequest, root: str) -> None:
        self._socket, theirs = socket.socketpair()
        self._decoder = Decoder()
        self._pid = processes.fork(partial(_run_relay, theirs, order, root), theirs.fileno(), quiet=True)
        theirs.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, header: Header, payload: bytes) -> None:
        """Send a message, and wait as long as the relay is busy.

        An error is ignored: read() finds out that the relay has ended.
        """
        with contextlib.suppress(OSError):  # it has ended: read() finds out
            self._socket.sendall(encode(header, payload))

    def read(self) -> Optional[List[Header]]:
        """Receive bytes from the relay, waiting if there are none, and return the messages that are complete with them.

        [] if none is. None: the relay has ended, and was reaped.
        """
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        if data:
            return [header for header, _ in self._decoder.feed(data)]
        self.end()
        return None

    def end(self) -> None:
        """Close the connection, at which the relay ends, and wait for that, or kill it after 2 s."""
        self._socket.close()
        processes.reap(self._pid, _END)


def _run_relay(control: socket.socket, order: RelayRequest, root: str) -> None:
    """Run the relay in the child until it ends, and report an error to the agent.

    No descriptor of the agent's stays open: the relay must see the agent go, and ssh must not wait for it.
    """
    try:
        processes.set_name("ct-relay")
        control.setblocking(False)
        with contextlib.closing(Relay(control, order, root)) as relay:
            relay.run()
    except ClustertoolError as error:
        _report_failure(control, as_wire(error))
    except Exception:  # noqa: BLE001 - the outermost boundary of this process: an unexpected error is reported as a bug
        _report_failure(control, {"kind": "InternalError", "what": traceback.format_exc(limit=-4), "fix": ""})


def _report_failure(control: socket.socket, error: Dict[str, str]) -> None:
    """Send the agent the error, within 5 s. It may have ended."""
    with contextlib.suppress(OSError):
        control.settimeout(5.0)
        control.sendall(encode({"type": "relay-failed", **error}))
