"""The agent answers one command of one laptop over one channel: frames in, frames out, and it is gone with the channel.

Requests and their answers: model/wire/messages. Slow requests run in threads, so that heartbeats and logs never wait for a
disk.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, Mapping, NamedTuple, Optional

from clustertool.errors import ClustertoolError, PreflightError, as_wire
from clustertool.model.wire.frames import Decoder, Header, encode
from clustertool.model.wire.messages import LOAD_IMAGE, PLACE, PULL_IMAGE, REQUESTS, SAVE_IMAGE, VERIFY, Kind
from clustertool.node.storage import files
from clustertool.node.system import mounts, node_context, path_trust, processes
from clustertool.node.system.node_context import NodeContext, PlacingContext, WorkCounter

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Answer
    from clustertool.model.wire.agent_requests import NoFields, RelayRequest
    from clustertool.node.dispatch.relay_process import RelayProcess
    from clustertool.node.jobs.follow import Follower

_BEAT = 1.0
_ABANDONED = (PLACE, VERIFY, PULL_IMAGE, SAVE_IMAGE, LOAD_IMAGE)  # their results are of no use without the laptop
_LARGEST = 64 << 20  # a manifest
_NO_HOME = PreflightError("HOME is not set, and the user has no home folder", "write ROOT_DIR in conf.py without ~")
_POLL = 0.05
_RELAY_ORDERS = ("relay-sources", "relay-piece", "relay-beat")
_ROOM = 1 << 20  # bytes that may wait for the channel before logs pause


# What an agent has from its start. umask: of the login session. safe: of the loader; raises OSError for a path that another
# user can change. complete: of the loader; whether a directory has all files of the tool's code.
AgentStart = NamedTuple(
    "AgentStart", [("umask", int), ("safe", Callable[[str], None]), ("complete", Callable[[str], bool])]
)


class BaseContext(NodeContext):
    """The context of a request about another node, whose records are in a shared ROOT_DIR: see node/jobs/records.py."""

    def __init__(self, agent: Agent, base: str) -> None:
        super().__init__(agent.root, agent.entry, base)
        self._agent = agent

    def follow(self, follower: Follower) -> None:
        """Add a follower to the agent; each of its frames names the base."""
        self._agent.follow(follower, self.base)


class Agent(PlacingContext):
    """The agent of one command: its channel to the laptop, the followers that read for it, its threads, and the relay.

    hello: the laptop's first message: root_dir, root_group (ROOT_DIR_GROUP), and entry (how conf.py names this node). safe,
    complete: see AgentStart.
    """

    def __init__(
        self, hello: Header, inlet: int, outlet: int, safe: Callable[[str], None], complete: Callable[[str], bool]
    ) -> None:
        given = os.path.expanduser(str(hello["root_dir"]))
        # The error of every request: it would wait for ever, or for a relative folder.
        self._stuck = mounts.unanswered(given) if os.path.isabs(given) else _NO_HOME
        super().__init__(given if self._stuck else files.resolve(given), str(hello["entry"]))
        path_trust.set_group(str(hello["root_group"]))
        self._in, self._out = inlet, outlet
        self._decoder = Decoder(max_payload=_LARGEST)
        self._waiting = bytearray()
        self._lock = threading.Lock()
        self._loop = threading.get_ident()
        self._wakeup = os.pipe()  # a thread wakes the loop up
        os.set_blocking(self._wakeup[1], False)
        self._followers: Dict[Follower, Dict[str, object]] = {}  # what each one's frames have besides
        self.relay: Optional[RelayProcess] = None
        self._beat_at = self._report_at = 0.0
        self.placed = ""  # the records of a job that is being placed, or waits here until it is placed on all nodes
        self.start = AgentStart(os.umask(0o077), safe, complete)
        self._open = True

    def run(self) -> None:
        """Answer requests until the laptop closes the channel, then wait for threads.

        Those that place a job, verify the store or handle an image end early: without the laptop their results are of no use.
        """
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        processes.outlive()
        os.set_blocking(self._out, False)
        while self._open:
            self._turn()
        for work in self.threads:  # a stop that was asked for is finished, laptop or not
            if work.kind in _ABANDONED:
                work.abandon()
            work.join()

    def _turn(self) -> None:
        """Send what is due, wait for something to do, at most a second, and handle messages of laptop and relay."""
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        poll.register(self._wakeup[0], select.POLLIN)
        relay = self.relay.fileno() if self.relay else -1
        if relay >= 0:
            poll.register(relay, select.POLLIN)
        if self._waiting:
            poll.register(self._out, select.POLLOUT)
        busy = self._pump()
        wait = 0.0 if busy else _POLL if self._followers else _BEAT
        for fd, mask in poll.poll(wait * 1000):
            if fd == self._in:
                self._read_laptop()
            elif fd == self._wakeup[0]:
                os.read(fd, 4096)
            elif fd == relay:
                self._read_relay()
            elif mask & (select.POLLERR | select.POLLHUP):
                self._open = False
        self._flush()

    def _read_laptop(self) -> None:
        """Read from the laptop, and dispatch complete frames. The end of the channel ends the agent."""
        data = os.read(self._in, 1 << 16)
        if not data:
            self._open = False
        for header, payload in self._decoder.feed(data):
            self._dispatch(header, payload)

    def _dispatch(self, header: Header, payload: bytes) -> None:
        """Pass an order to the relay; answer a request at once if its kind is quick, else in a new thread."""
        type, number = str(header["type"]), header.get("id")  # a request without a number wants no answer
        if type in _RELAY_ORDERS:
            # While it is busy nothing more is read from the laptop, which so sends no faster.
            if self.relay is not None:
                self.relay.send(header, payload)
            return
        kind = REQUESTS[type]
        if kind.inline:
            self._answer(kind, header, number)
        else:
            earlier = [thread for thread in self.threads if thread.is_alive()]
            self.threads = [*earlier, WorkCounter(kind, number, lambda: self._answer(kind, header, number))]

    def follow(self, follower: Follower, base: Optional[str] = None) -> None:
        """Add a follower: the loop sends what it reads. base: of the request, sent with each of its frames."""
        self._followers[follower] = {} if base is None else {"base": base}

    def _answer(self, kind: Kind[Any, Any], fields: Header, number: Optional[int]) -> None:
        """Call the handler of a request, and send the answer or the error, unless the request has no number.

        A request with `of_base` is about the records of another node: it is refused if its kind is not about records, or its
        answer is too large.
        """
        try:
            if self._stuck:
                raise self._stuck
            base = fields.get("of_base")
            if base is not None and not kind.of_records:
                what = f"{kind.type!r} needs an agent on the node: this one only reads the records of that node"
                raise PreflightError(what, "send it to an agent there")
            context = self if base is None else BaseContext(self, str(base))
            reply = encode({"re": number, **node_context.load_on_demand(kind.handler)(context, fields)})
            if base is not None and len(reply) > kind.limit:  # it would end the connection, which other nodes use
                what = f"the records in {base or 'ROOT_DIR'} are too large for an answer to {kind.type!r}"
                raise PreflightError(what, "a program there changed them: inspect them on that machine")
        except ClustertoolError as error:
            reply = encode({"re": number, "error": as_wire(error)})
        except Exception as error:  # noqa: BLE001 - the outermost boundary of the node side: a bug is reported to the laptop
            what = f"{error!r}\n{self._traceback(error)}"
            reply = encode({"re": number, "error": {"kind": "InternalError", "what": what, "fix": ""}})
        if number is not None:
            self._send(reply)

    def _traceback(self, error: Exception) -> str:
        """Format an error as the interpreter prints it: to import the module traceback takes 2 ms of CPU time."""
        with self._lock, contextlib.redirect_stderr(io.StringIO()) as text:
            sys.__excepthook__(type(error), error, error.__traceback__)
        return text.getvalue()

    def send(self, header: Mapping[str, object], payload: bytes = b"") -> None:
        """Queue a message and its payload for the channel."""
        self._send(encode(dict(header), payload))

    def _send(self, frame: bytes) -> None:
        """Queue a frame for the channel. From another thread, wake the loop up, which sends it."""
        with self._lock:
            self._waiting += frame
        if threading.get_ident() != self._loop:
            with contextlib.suppress(BlockingIOError):
                os.write(self._wakeup[1], b"!")

    def _pump(self) -> bool:
        """Queue heartbeats, progress, and what the followers have, and touch the records of a placed job.

        True if there may be more. Followers pause while more than 1 MiB waits for the channel.
        """
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = now + _BEAT
            if self.placed:  # its claims are valid while this is recent
                with contextlib.suppress(OSError):
                    os.utime(self.placed)
            for work in self.threads:
                if work.moved() and work.is_alive() and work.number is not None:
                    self.send({"re": work.number, "progress": work.steps})
        if self._followers and now >= self._beat_at:
            self._beat_at = now + _BEAT
            self.send({"type": "beat", "t": time.time()})
        busy = False
        for follower, about in list(self._followers.items()):
            if len(self._waiting) > _ROOM:
                return False
            for header, payload in follower.pieces():
                self.send({**header, **about}, payload)
                busy = True
            if follower.ended:
                del self._followers[follower]
                follower.close()
        return busy

    def _flush(self) -> None:
        """Write queued frames until the channel takes no more. A channel that has failed ends the agent."""
        while self._waiting:
            with self._lock:
                try:
                    sent = os.write(self._out, memoryview(self._waiting)[: 1 << 18])
                except BlockingIOError:
                    return
                except OSError:
                    self._open = False
                    return
                del self._waiting[:sent]

    # -- the relay of a dispatch, a process of its own --

    def _read_relay(self) -> None:
        """Pass messages of the relay on to the laptop; once the relay has ended, forget it, and send "relay-gone"."""
        if self.relay is None:
            return
        messages = self.relay.read()
        for header in messages or ():
            self.send(header)
        if messages is None:
            self.relay = None
            self.send({"type": "relay-gone"})


def relay(agent: Agent, request: RelayRequest) -> Answer:
    """Start a relay for a dispatch, and end an earlier one before.

    Its messages are sent to the laptop as frames of their own.
    """
    unrelay(agent, {})
    agent.relay = node_context.load_on_demand("dispatch.relay_process:RelayProcess")(request, agent.root)
    return {}


def unrelay(agent: Agent, request: NoFields) -> Answer:
    """End the relay, if there is one. Once this is answered it has ended, and its port is free."""
    if agent.relay is not None:
        agent.relay.end()
        agent.relay = None
    return {}


def main(hello: bytes, end: Callable[[], None], safe: Callable[[str], None], complete: Callable[[str], bool]) -> None:
    """Run the agent on stdin and stdout until its laptop is gone, call `end`, which cleans up for the loader, and exit.

    hello, safe, complete: see Agent and AgentStart. "ready" is written before the first frame.
    """
    processes.set_name("ct-agent")
    if sys.argv[-1].isdecimal():  # the shell that the login has started
        processes.take_environment(int(sys.argv[-1]))
    try:
        agent = Agent(json.loads(hello), 0, 1, safe, complete)
        os.write(1, b"ready\n")
        agent.run()
    finally:
        end()
        processes.leave(0)  # at once: an orderly end of the interpreter costs every node of every command 5 ms
