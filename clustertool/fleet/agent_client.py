"""An agent is a Python process on a node at the end of one channel. Requests go down; responses and streams come up."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from clustertool.errors import (
    REPORT,
    BadAnswer,
    ClustertoolError,
    InternalError,
    NoPython,
    PreflightError,
    Unreachable,
    from_wire,
)
from clustertool.fleet import node_bundle
from clustertool.fleet.this_machine import Link, ProgramLink
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.hints import PROGRAM
from clustertool.model.shape import Malformed
from clustertool.model.wire import answers
from clustertool.model.wire.frames import Decoder, FrameError, Header, encode
from clustertool.model.wire.messages import Answered, Request
from clustertool.model.wire.stream_messages import ClosedFrame, RelayOrder, RelayReport, StreamFrame
from clustertool.ssh.channel import SHELL_FIX, Greeting, discard, ended_by_loss, read_errors, seconds_for

Sink = Callable[[int, StreamFrame, bytes], None]
_WINDOW = 8 << 20  # what may be on its way to us unread: bounds the laptop's memory
_SLICE = 1 << 17
_GENTLE = 1 << 16
_PAUSE = 0.002
_ERROR_WAIT = 0.5
_TIMES = 20  # the timeout of a long request: as long as there is progress
_AGENT = ("-ESs", "-c", node_bundle.FIRST, "clustertool-agent")  # the arguments of the interpreter
# Reads the name of the interpreter from stdin. The shell stays, so that the agent can read with which environment the login has
# started it. It does not print how the agent ends.
_START = f"""\
IFS= read -r p; case "$p" in "~/"*) p="$HOME/${{p#??}}";; esac
command -v "$p" >/dev/null 2>&1 || {{ echo 'no python'; exit 0; }}
{{ "$p" {shlex.join(_AGENT)} $$ 2>&3 3>&-; }} 3>&2 2>/dev/null
exit""".encode()


class AgentClient:
    """The client of the agent on one node. Make it by open(); ask() sends a request and returns its answer.

    Frames that answer nothing (events, logs, heartbeats) go to `sink`.
    """

    def __init__(self, link: Link, host: Host, sink: Sink | None) -> None:
        self.link = link
        self.host = host
        self._sink = sink
        self.on_relay: Callable[[int, RelayReport], None] | None = None  # gets the reports of the node's relay
        self._channel: Any = None
        self._greeting: Greeting | None = None
        self._rest = b""  # bytes that came together with the last line of the start
        self._numbers = iter(range(1, 1 << 62))
        self._answers: dict[int, queue.SimpleQueue[Header | ClustertoolError]] = {}
        self._asked: dict[int, Request[Mapping[str, object]]] = {}  # without an answer so far
        self._decoder = Decoder(answers.STREAM, answers.PAYLOAD, check=self._check_size)
        self._refused: set[str | None] = set()  # bases with a frame that was not valid: no more of theirs are taken
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self.dead: ClustertoolError | None = None

    @classmethod
    def open(cls, link: Link, host: Host, cluster: Cluster, sink: Sink | None = None) -> AgentClient:
        """Start an agent over `link`, and a thread that reads its frames.

        Raises NoPython if the node has no Python that can run it, PreflightError if the login or the node side does not start
        it, and Unreachable if the connection or the shell ends or does not answer in time. The channel is closed then.
        """
        agent = cls(link, host, sink)
        try:
            agent._boot(cluster)
        except (OSError, EOFError) as error:
            why, fix = str(error), "try ssh by hand"
            if agent._greeting is not None and agent._greeting.login:
                why, fix = agent._greeting.ended(), SHELL_FIX
            agent.close()
            raise Unreachable(why or "the session ended at once", fix, host.name) from None
        except ClustertoolError:
            agent.close()
            raise
        threading.Thread(target=agent._read_frames, name=f"agent {host.name}", daemon=True).start()
        return agent

    # -- start --

    def _boot(self, cluster: Cluster) -> None:
        """Start the node's Python on a new channel, send the code if the node lacks it, and wait for "ready".

        Raises NoPython without a usable Python, PreflightError for another answer, Unreachable after the deadline, and OSError
        or EOFError where the connection or the shell ends.
        """
        seconds = seconds_for(cluster.connect_timeout)
        root = self.host.root_dir or cluster.root_dir
        group = self.link.root_group if isinstance(self.link, ProgramLink) else cluster.root_dir_group
        hello = json.dumps({"root_dir": root, "root_group": group, "entry": self.host.entry}).encode()
        start = node_bundle.LOADER + node_bundle.digest().encode() + node_bundle.with_size(hello)
        if isinstance(self.link, ProgramLink):
            self._channel = self.link.program((cluster.python_of(self.host), *_AGENT), window=_WINDOW, timeout=seconds)
            self._greeting = greeting = Greeting(self._channel, self.host.name, seconds)
            with contextlib.suppress(OSError):  # the program has ended already: its stderr has the reason
                self._channel.sendall(start)
        else:
            self._channel = self.link.channel(window=_WINDOW, timeout=seconds)
            self._greeting = greeting = Greeting(self._channel, self.host.name, seconds)
            greeting.start(_START)
            self._channel.sendall(cluster.python_of(self.host).encode() + b"\n" + start)
        line = self._start_line(cluster, greeting)
        if line.startswith("need "):
            self._channel.sendall(node_bundle.packed(line))
            line = self._start_line(cluster, greeting)
        if line != "ready":
            raise PreflightError(f"the node side did not start: {line}", f"run {PROGRAM} check", self.host.name)
        self._channel.settimeout(None)
        self._rest = greeting.rest

    def _start_line(self, cluster: Cluster, greeting: Greeting) -> str:
        """Read the next line of the start.

        Raises NoPython where there is no Python, an old one, or one that does not run, and Unreachable for a lost connection.
        """
        fix = "install Python 3.8 or newer on the node, or set PYTHON in conf.py (`python` in HOSTS for one node)"
        python = cluster.python_of(self.host)
        try:
            line = greeting.line()
        except (EOFError, ConnectionResetError):  # reset: it has ended with its stdin unread
            if ended_by_loss(self._channel, self.link):
                raise self.link.lost("the connection was lost") from None
            output = self._stderr_line(_ERROR_WAIT)
            what = f"{python} did not run{': ' + output if output else ''}"
            raise NoPython(what, fix, self.host.name) from None
        if line.startswith("old "):
            raise NoPython(f"{python} is Python {line[4:]}, too old", fix, self.host.name)
        if line == "no python":
            raise NoPython(f"there is no {python}", fix, self.host.name)
        return line

    def _stderr_line(self, wait: float = 0.0) -> str:
        """Return the last line of the channel's stderr, "" if there is none after `wait` seconds.

        It may come a moment after the end of stdout.
        """
        end = time.monotonic() + wait
        while not self._channel.recv_stderr_ready() and time.monotonic() < end:
            time.sleep(0.01)
        lines = read_errors(self._channel).decode(errors="backslashreplace").strip().splitlines()
        return lines[-1] if lines else ""

    # -- talk --

    def ask(self, request: Request[Answered], timeout: float = 60.0) -> Answered:
        """Send one request and wait for its answer, which gets the field `asked`: the times before and after.

        Raises what the node raised, with the node's name, or Unreachable after `timeout` seconds. For a long request these are
        seconds without progress; all of it may take 20 times as long.
        """
        before = time.time()
        number = next(self._numbers)
        answer: queue.SimpleQueue[Header | ClustertoolError] = queue.SimpleQueue()
        with self._lock:
            if self.dead is not None:
                raise self.dead
            self._answers[number] = answer
            self._asked[number] = request
            self._decoder.max_header = max(answers.STREAM, *(asked.limit for asked in self._asked.values()))
        self.send(request, number, before)
        end = time.monotonic() + timeout
        last = math.inf if request.kind.endless else end + _TIMES * timeout
        try:
            reply = answer.get(timeout=timeout)
            while isinstance(reply, dict) and "progress" in reply:
                if request.kind.long:
                    end = min(time.monotonic() + timeout, last)
                reply = answer.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            also = " and no progress" if request.kind.long else ""
            what = f"no answer to {request.kind.type!r}{also} for {timeout:g} s"
            raise Unreachable(what, "check the node", self.host.name) from None
        finally:
            with self._lock:
                self._answers.pop(number, None)
        return cast(Answered, {**self._require_success(reply), "asked": (before, time.time())})

    def _require_success(self, reply: Header | ClustertoolError) -> Header:
        """Return an answer, or raise the error that it has or is, with the node's name."""
        if isinstance(reply, ClustertoolError):
            raise reply
        error = reply.get("error")
        if error is None:
            return reply
        if error["kind"] == "InternalError":
            raise InternalError(f"a bug of clustertool on the node: {error['what']}", REPORT, self.host.name)
        raise from_wire(error["kind"], error["what"], error["fix"], self.host.name)

    def send(self, request: Request[Answered], number: int | None = None, now: float = 0.0) -> None:
        """Send a request. Without a number the node sends no answer. Nothing is raised if the channel fails."""
        with self._sending():
            self._channel.sendall(encode(request.header(number, now)))

    @contextlib.contextmanager
    def _sending(self) -> Iterator[None]:
        """Return a context manager for sending one message, which holds the lock.

        If the channel fails, the connection counts as lost, and nothing is raised.
        """
        try:
            with self._send_lock:
                yield
        except (OSError, EOFError):
            self._set_dead(self._lost("the connection broke"))

    def send_to_relay(
        self,
        order: RelayOrder,
        payload: bytes = b"",
        moved: Callable[[int], None] = lambda size: None,
        gently: Callable[[], bool] = lambda: False,
    ) -> None:
        """Send a message to the node's relay in slices; call `moved` with the size of each.

        Raises the error that has ended the connection, such as Unreachable.

        While gently() is true, little more is sent than has arrived, so that other messages on the connection do not wait.
        """
        data = memoryview(encode(dict(order), payload))
        with self._sending():
            while data:  # in slices: paramiko copies what is left with each packet
                careful = gently()
                while careful and gently() and self.link.waiting > _GENTLE:
                    time.sleep(_PAUSE)
                size = min(len(data), _GENTLE if careful else _SLICE)
                self._channel.sendall(data[:size])
                moved(size)
                data = data[size:]
        if self.dead is not None:
            raise self.dead

    def nudge_relay(self) -> None:
        """Send a sign of life to the node's relay, unless another message is being sent. Errors are ignored."""
        if self._send_lock.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError, EOFError):  # the reader finds out
                    self._channel.sendall(encode({"type": "relay-beat"}))
            finally:
                self._send_lock.release()

    def _read_frames(self) -> None:
        """Read the frames of the channel until its end, and pass each on by _take(): the work of a thread of its own.

        Then record why the channel has ended.
        """
        why = "the connection was closed"
        try:
            data, self._rest = self._rest or self._channel.recv(1 << 18), b""
            while data:
                for header, payload in self._decoder.feed(data):
                    self._take(header, payload)
                data = self._channel.recv(1 << 18)
        except FrameError as error:
            self._set_dead(self._bad(str(error)))
            return
        except (OSError, EOFError) as error:
            why = f"the connection broke: {error}"
        output = self._stderr_line()
        self._set_dead(self._lost(why + (f" ({output})" if output else "")))

    def _check_size(self, header: Header, size: int) -> None:
        """Check the size of a header, for the decoder. Raises FrameError for one that is too large or answers no request."""
        if "re" not in header or "progress" in header:
            most = answers.frame_limit(header)
        else:
            with self._lock:
                asked = self._asked.get(_request_number(header))
                most = asked.limit if asked else 0
        if size > most:
            what = "an answer" if "re" in header else f"a frame of type {str(header.get('type'))[:20]!r}"
            raise FrameError(f"{what} with a header of {size} bytes, more than {most}")

    def _take(self, header: Header, payload: bytes) -> None:
        """Pass a frame on: an answer to its request, a report to on_relay, any other to the sink.

        After a frame that is not valid no more of its base are passed on.
        """
        if "re" in header:
            self._take_answer(_request_number(header), header)
            return
        base = _base_of(header)
        if base in self._refused:
            return
        try:
            answers.check_frame(header)
        except Malformed as error:
            self._refuse(header, base, self._bad(str(error)))
            return
        if answers.is_relay_report(header):
            self._report(cast(RelayReport, header))
        elif self._sink is not None:
            self._sink(self.host.index, cast(StreamFrame, header), payload)

    def _take_answer(self, number: int, header: Header) -> None:
        """Pass an answer, or a report of progress, to the request that waits for it; drop it if that has timed out.

        An answer that is not valid becomes an error of its request alone. Raises FrameError for a second answer.
        """
        if "progress" in header:  # it may come after the answer
            with self._lock:
                waiting = self._answers.get(number)
            if waiting is not None:
                waiting.put(header)
            return
        with self._lock:
            asked = self._asked.pop(number, None)
            waiting = self._answers.pop(number, None)
        if asked is None:
            raise FrameError("two answers to one request")
        if waiting is None:  # the request has timed out
            return
        try:
            answers.check_answer(asked.kind, header)
        except Malformed as error:
            waiting.put(self._bad(f"to {asked.kind.type!r}: {error}"))
        else:
            waiting.put(header)

    def _refuse(self, header: Header, base: str | None, error: ClustertoolError) -> None:
        """Drop further frames of a base whose frame is not valid, and report its stream, or relay, as ended.

        Requests are still answered, as stop needs them.
        """
        self._refused.add(base)
        if answers.is_relay_report(header):
            self._report({"type": "relay-failed", "kind": "BadAnswer", "what": error.what, "fix": error.fix})
        else:
            self._close_stream(error.what, True, base)

    def _report(self, report: RelayReport) -> None:
        """Pass a report of the node's relay to on_relay, if that is set."""
        if self.on_relay is not None:
            self.on_relay(self.host.index, report)

    def _close_stream(self, why: str, refused: bool, base: str | None = None) -> None:
        """Pass the sink a frame that says that the stream of a base has ended. refused: it sent a frame that is not valid."""
        if self._sink is not None:
            closed: ClosedFrame = {"type": "closed", "why": why, "refused": refused}
            if base is not None:
                closed["base"] = base
            self._sink(self.host.index, closed, b"")

    def _bad(self, what: str) -> BadAnswer:
        """Build the error of a frame that is not valid. what: what is wrong in it."""
        fix = "a program there changed a job's records, or the tool's files in ~/.cache/clustertool: inspect them on that node"
        return BadAnswer(f"it sent something that is not valid: {what}", fix, self.host.name)

    def _lost(self, why: str) -> Unreachable:
        """Build the error of a connection that was lost."""
        return Unreachable(why, f"check the node; {PROGRAM} status shows the state of the job", self.host.name)

    def _set_dead(self, error: ClustertoolError) -> None:
        """Record the first error that ends the connection. Waiting requests raise it; on_relay and the sink get its text."""
        with self._lock:
            if self.dead is not None:
                return
            self.dead = error
            waiting = list(self._answers.values())
        for answer in waiting:
            answer.put(error)
        self._report({"type": "relay-gone", "why": error.what})
        self._close_stream(error.what, isinstance(error, BadAnswer))

    def mute(self) -> None:
        """Pass no more frames to the sink, nor the end of the connection. Requests are still answered."""
        self._sink = None

    def close(self) -> None:
        """Pass no more frames to the sink, and close the channel, which ends the agent."""
        self.mute()
        if self._channel is not None:
            discard(self._channel)


def _base_of(header: Header) -> str | None:
    """Return the base of the node whose stream a frame belongs to; None for this agent's own node, or all nodes."""
    base = header.get("base")
    return base if isinstance(base, str) else None


def _request_number(header: Header) -> int:
    """Return the number of the request that a header answers, 0 where its `re` is no number."""
    number = header["re"]
    return number if isinstance(number, int) and not isinstance(number, bool) else 0
