"""An agent is one python process at the end of one channel; requests go down, answers and streams come up."""

from __future__ import annotations

import json
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from clustertool.errors import ClustertoolError, InternalError, PreflightError, Unreachable, from_wire
from clustertool.plan.cluster import Cluster
from clustertool.plan.frames import Decoder, FrameError, Header, encode
from clustertool.plan.hosts import Host
from clustertool.reach import pyz
from clustertool.reach.connection import Reach, discard

Sink = Callable[[int, Header, bytes], None]
_WINDOW = 8 << 20  # what may be on its way to us unread: bounds the laptop's memory
_NOISE = 64 << 10
_START_TIMEOUT = 30.0
_LAST_WORDS = 0.5


class Agent:
    """Open with Agent.open(); ask() for one answer; frames that answer nothing (events, logs, beats) go to `sink`."""

    def __init__(self, link: Reach, host: Host, sink: Sink | None) -> None:
        self.link = link
        self.host = host
        self.python = ""
        self._sink = sink
        self._channel: Any = None
        self._numbers = iter(range(1, 1 << 62))
        self._answers: dict[int, queue.SimpleQueue[Header]] = {}
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self.dead: ClustertoolError | None = None

    @classmethod
    def open(cls, link: Reach, host: Host, cluster: Cluster, sink: Sink | None = None) -> Agent:
        """Start the node side over `link`. Raises PreflightError (no python, too old) or Unreachable."""
        agent = cls(link, host, sink)
        try:
            agent._boot(cluster)
        except (OSError, EOFError) as error:
            why = agent._said(_LAST_WORDS) or str(error)
            agent.close()
            raise Unreachable(f"the session ended at once{': ' + why if why else ''}", "try ssh by hand", host.name) from None
        except ClustertoolError:
            agent.close()
            raise
        threading.Thread(target=agent._read, name=f"agent {host.name}", daemon=True).start()
        return agent

    # -- start --

    def _boot(self, cluster: Cluster) -> None:
        mark = secrets.token_hex(8)
        self._channel = self.link.channel("exec /bin/sh", window=_WINDOW, timeout=_START_TIMEOUT)
        self._channel.settimeout(_START_TIMEOUT)
        self._channel.sendall(_script(mark))
        self._skip_to(mark)
        digest, data = pyz.archive()
        hello = json.dumps(
            {"digest": digest, "root_dir": self.host.root_dir or cluster.root_dir, "entry": self.host.entry}
        ).encode()
        self._channel.sendall(cluster.python.encode() + b"\n" + pyz.LOADER + _sized(pyz.BOOT) + _sized(hello))
        word = self._word(cluster)
        if word == "need":
            self._channel.sendall(_sized(data))
            word = self._word(cluster)
        elif word == "have":
            word = self._word(cluster)
        if word != "ready":
            raise PreflightError(f"the node side did not start: {word}", "run inv check", self.host.name)
        self._channel.settimeout(None)

    def _skip_to(self, mark: str) -> None:
        """What a .bashrc prints comes before the mark and is none of our business."""
        seen = ""
        while True:
            line = self._line()
            if line == mark:
                return
            seen += line + "\n"
            if len(seen) > _NOISE:
                raise PreflightError("the login prints without end", "look at the shell's start files", self.host.name)

    def _word(self, cluster: Cluster) -> str:
        fix = "install Python 3.8 or newer on the node, or set PYTHON in conf.py"
        try:
            line = self._line()
        except EOFError:
            said = self._said(_LAST_WORDS)
            what = f"{cluster.python} did not run{': ' + said if said else ''}"
            raise PreflightError(what, fix, self.host.name) from None
        if line.startswith("old "):
            raise PreflightError(f"{cluster.python} is Python {line[4:]}, too old", fix, self.host.name)
        if line == "no python":
            raise PreflightError(f"there is no {cluster.python}", fix, self.host.name)
        return line

    def _said(self, wait: float = 0.0) -> str:
        """The last line of the channel's stderr; it may come a moment after the end of stdout."""
        text, end = b"", time.monotonic() + wait
        if self._channel is None:
            return ""
        while not self._channel.recv_stderr_ready() and time.monotonic() < end:
            time.sleep(0.01)
        while self._channel.recv_stderr_ready() and len(text) < _NOISE:
            text += self._channel.recv_stderr(4096)
        lines = text.decode(errors="backslashreplace").strip().splitlines()
        return lines[-1] if lines else ""

    def _line(self) -> str:
        """One line, byte by byte: what follows belongs to somebody else. Only the start is read so."""
        line = b""
        while not line.endswith(b"\n"):
            try:
                piece = self._channel.recv(1)
            except TimeoutError:
                raise Unreachable(f"no answer for {_START_TIMEOUT:g} s", "is the node overloaded?", self.host.name) from None
            if not piece:
                raise EOFError
            line += piece
        return line.decode(errors="backslashreplace").rstrip("\n")

    # -- talk --

    def ask(self, request: Mapping[str, Any], timeout: float | None = 60.0) -> Header:
        """One request, one answer. Raises what the node raised, with the node's name, or Unreachable."""
        number = next(self._numbers)
        answer: queue.SimpleQueue[Header] = queue.SimpleQueue()
        with self._lock:
            if self.dead is not None:
                raise self.dead
            self._answers[number] = answer
        self.send({**request, "id": number, "now": time.time()})
        try:
            reply = answer.get(timeout=timeout)
        except queue.Empty:
            raise Unreachable(f"no answer to {request['q']!r} for {timeout:g} s", "look at the node", self.host.name) from None
        finally:
            with self._lock:
                self._answers.pop(number, None)
        return self._judge(reply)

    def _judge(self, reply: Header) -> Header:
        error = reply.get("error")
        if error is None:
            return reply
        if error["kind"] == "InternalError":
            raise InternalError(error["what"], "", self.host.name)
        raise from_wire(error["kind"], error["what"], error["fix"], self.host.name)

    def send(self, request: Mapping[str, Any]) -> None:
        try:
            with self._send_lock:
                self._channel.sendall(encode(dict(request)))
        except (OSError, EOFError):
            self._died("the connection broke")

    def _read(self) -> None:
        """The only reader of the channel, in a thread of its own."""
        decoder = Decoder()
        why = "the connection was closed"
        try:
            while True:
                data = self._channel.recv(1 << 18)
                if not data:
                    break
                for header, payload in decoder.feed(data):
                    self._take(header, payload)
        except (OSError, EOFError, FrameError) as error:
            why = f"the connection broke: {error}"
        said = self._said()
        self._died(why + (f" ({said})" if said else ""))

    def _take(self, header: Header, payload: bytes) -> None:
        if "re" in header:
            with self._lock:
                answer = self._answers.get(int(header["re"]))
            if answer is not None:
                answer.put(header)
        elif self._sink is not None:
            self._sink(self.host.index, header, payload)

    def _died(self, why: str) -> None:
        with self._lock:
            if self.dead is not None:
                return
            self.dead = Unreachable(why, "look at the node; inv status tells what became of the job", self.host.name)
            waiting = list(self._answers.values())
        for answer in waiting:
            answer.put({"error": {"kind": "Unreachable", "what": why, "fix": "look at the node"}})
        if self._sink is not None:
            self._sink(self.host.index, {"k": "closed", "why": why}, b"")

    def close(self) -> None:
        self._sink = None
        if self._channel is not None:
            discard(self._channel)


def _sized(data: bytes) -> bytes:
    return b"%08d" % len(data) + data


def _script(mark: str) -> bytes:
    """One compound command, so that sh has read all of it before it runs and leaves the rest of stdin alone."""
    return (
        f"{{ printf '\\n%s\\n' {mark}; IFS= read -r p; "
        'case "$p" in "~/"*) p="$HOME/${p#??}";; esac; '
        "command -v \"$p\" >/dev/null 2>&1 || { echo 'no python'; exit 0; }; "
        f"exec \"$p\" -ESs -c '{pyz.FIRST}' clustertool-agent; }}\n"
    ).encode()
