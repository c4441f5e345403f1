"""The agent answers one command of one laptop over one channel: frames in, frames out, and it is gone with the channel.

Requests are {"q": name, "id": n, ...}; answers {"re": n, ...} or {"re": n, "error": {kind, what, fix}}. Slow requests
run beside the loop, so that heartbeats and logs never wait for a disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from _thread import allocate_lock, get_ident
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple

from clustertool.errors import ClustertoolError, NotFound
from clustertool.model.paths import OURS
from clustertool.model.wire.frames import Decoder, Header, encode
from clustertool.node.storage import files
from clustertool.node.system import path_trust, processes
from clustertool.node.system.work_counter import Work

# A request imports what it needs: an agent starts on every node for every command, and its start is most of its cost.
if TYPE_CHECKING:
    import socket

    from clustertool.node.jobs.follow import Follower
    from clustertool.node.jobs.live_sample import Glance
    from clustertool.node.jobs.queries import Jobs

_BEAT = 1.0
_LARGEST = 64 << 20  # a manifest
_POLL = 0.05
_GARBAGE = 20_000  # objects; with the usual 700 most of a short life's collections find nothing
_LAST_MOMENT = 2.0  # seconds for a relay to end
_ROOM = 1 << 20  # bytes that may wait for the channel before logs pause


class Agent:
    """`hello` is the laptop's first word: root_dir, root_group (ROOT_DIR_GROUP), and entry (how conf.py names this node).

    `add` takes in the second part of our code.
    """

    def __init__(self, hello: Header, add: Callable[[bytes], object], inlet: int, outlet: int) -> None:
        self.root = files.resolve(str(hello["root_dir"]))
        path_trust.set_group(str(hello["root_group"]))
        self.entry = str(hello["entry"])
        self._add = add
        self._in, self._out = inlet, outlet
        self._decoder = Decoder(max_payload=_LARGEST)
        self._waiting = bytearray()
        self._lock = allocate_lock()
        self._loop = get_ident()
        self._bell, self._ring = os.pipe()
        os.set_blocking(self._ring, False)
        self._threads: List[Work] = []
        self._followers: List[Follower] = []
        self._relay: Optional[Tuple[int, socket.socket, Decoder]] = None
        self._glance: Optional[Glance] = None
        self._beat_at = self._report_at = 0.0
        self._placed = ""  # the records of a job that waits here until it is placed on all nodes
        self._umask = os.umask(0o077)
        self._open = True

    def run(self) -> None:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.set_blocking(self._out, False)
        while self._open:
            self._turn()
        for work in self._threads:  # a stop that was asked for is finished, laptop or not
            if work.header.get("q") in ("place", "verify"):  # their results are of no use without it
                work.abandon()
            work.wait()

    def _turn(self) -> None:
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        relay = self._relay[1].fileno() if self._relay else -1
        if relay >= 0:
            poll.register(relay, select.POLLIN)
        if self._waiting:
            poll.register(self._out, select.POLLOUT)
        busy = self._pump()
        wait = 0.0 if busy else _POLL if self._followers else _BEAT
        for fd, mask in poll.poll(wait * 1000):
            if fd == self._in:
                self._read()
            elif fd == self._bell:
                os.read(self._bell, 4096)
            elif fd == relay:
                self._hear_relay()
            elif mask & (select.POLLERR | select.POLLHUP):
                self._open = False
        self._flush()

    def _read(self) -> None:
        data = os.read(self._in, 1 << 16)
        if not data:
            self._open = False
        for header, payload in self._decoder.feed(data):
            self._dispatch(header, payload)

    def _dispatch(self, header: Header, payload: bytes) -> None:
        name = str(header.get("q"))
        if name == "relayed":
            self._order_relay(header, payload)
        elif name == "code":
            self._add(payload)
        elif name in _INLINE:
            self._answer(header, lambda: _INLINE[name](self, header))
        else:
            header["earlier"] = self._threads
            earlier = [thread for thread in self._threads if not thread.over()]
            self._threads = [*earlier, Work(header, self._answer, header, lambda: _HANDLERS[name](self, header))]

    def _answer(self, header: Header, handle: Callable[[], Dict[str, Any]]) -> None:
        number = header.get("id")  # a request without one wants no answer
        try:
            reply = {"re": number, **handle()}
        except ClustertoolError as error:
            reply = {"re": number, "error": {"kind": type(error).__name__, "what": error.what, "fix": error.fix}}
        except Exception as error:  # noqa: BLE001 - the outermost boundary of the node side: the laptop is told of a bug
            import traceback

            text = traceback.format_exc(limit=-4)
            reply = {"re": number, "error": {"kind": "InternalError", "what": f"{error!r}\n{text}", "fix": ""}}
        if number is not None:
            self.send(reply)

    def send(self, header: Header, payload: bytes = b"") -> None:
        with self._lock:
            self._waiting += encode(header, payload)
        if get_ident() != self._loop:
            with contextlib.suppress(BlockingIOError):
                os.write(self._ring, b"!")

    def _pump(self) -> bool:
        """Heartbeats, progress, and what the followers have; True if there may be more at once."""
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = now + _BEAT
            if self._placed:  # its claims hold as long as this is young
                with contextlib.suppress(OSError):
                    os.utime(self._placed)
            for work in self._threads:
                if work.moved() and not work.over() and "id" in work.header:
                    self.send({"re": work.header["id"], "progress": work.steps})
        if self._followers and now >= self._beat_at:
            self._beat_at = now + _BEAT
            self.send({"k": "beat", "t": time.time()})
        busy = False
        for follower in list(self._followers):
            if len(self._waiting) > _ROOM:
                return False
            for header, payload in follower.pieces():
                self.send(header, payload)
                busy = True
            if follower.ended:
                self._followers.remove(follower)
                follower.close()
        return busy

    def _flush(self) -> None:
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

    def _order_relay(self, header: Header, payload: bytes) -> None:
        """A word for the relay. While it is busy nothing more is read from the laptop, which so sends no faster."""
        if self._relay is not None:
            with contextlib.suppress(OSError):  # it has gone: the loop finds out
                self._relay[1].sendall(encode(header, payload))

    def _hear_relay(self) -> None:
        if self._relay is None:
            return
        pid, sock, decoder = self._relay
        try:
            data = sock.recv(1 << 16)
        except OSError:
            data = b""
        for header, _ in decoder.feed(data):
            self.send(header)
        if not data:
            sock.close()
            self._relay = None
            os.waitpid(pid, 0)
            self.send({"k": "relay", "s": "gone"})

    # -- requests --

    def probe(self, header: Header) -> Dict[str, Any]:
        from clustertool.node.probe import probe

        return probe.probe(header)

    def meet(self, header: Header) -> Dict[str, Any]:
        from clustertool.node.probe import shared_root

        return shared_root.meet(self.root, str(header["step"]), str(header["token"]), int(header["node"]))

    def examine(self, header: Header) -> Dict[str, Any]:
        """A probe that needs code which is not in the first part."""
        return self.probe(header)

    def mesh(self, header: Header) -> Dict[str, Any]:
        from clustertool.node.probe import link_test

        return link_test.mesh(header)

    def patch(self, header: Header) -> Dict[str, Any]:
        """A release that is little more than one that is here."""
        from clustertool.node.storage import patch as releases

        return releases.patch(self.root, header)

    def verify(self, header: Header) -> Dict[str, Any]:
        """Hash again what dispatches have left here."""
        from clustertool.node.storage import verify_store

        return verify_store.verify(self.root, bool(header["remove"]))

    def relay(self, header: Header) -> Dict[str, Any]:
        """Take part in a dispatch. Its words come as frames of their own."""
        from clustertool.node.dispatch import relay_process

        self.unrelay(header)
        pid, sock = relay_process.start(header, self.root)
        self._relay = pid, sock, Decoder()
        return {}

    def unrelay(self, header: Header) -> Dict[str, Any]:
        """Once this is answered the relay has gone, and its port with it."""
        if self._relay is not None:
            pid, sock, _ = self._relay
            self._relay = None
            sock.close()
            processes.reap(pid, _LAST_MOMENT)
        return {}

    def place(self, header: Header) -> Dict[str, Any]:
        from clustertool.node.agent import place

        done = place.place(header["spec"], str(header["release"]))
        self._placed = os.path.join(header["spec"]["job_dir"], OURS)
        return done

    def unplace(self, header: Header) -> Dict[str, Any]:
        """Take back the directory of a job that never started; an older job of the same name stays untouched."""
        from clustertool.node.agent import place
        from clustertool.node.jobs import clean

        for work in header["earlier"]:  # a placing that was interrupted is over before it is taken back
            if work.header["q"] == "place":
                work.abandon()
            work.wait()
        with contextlib.suppress(NotFound):
            if place.belongs(str(header["job_dir"]), str(header["token"])):
                clean.remove(str(header["job_dir"]))
        return {}

    def start(self, header: Header) -> Dict[str, Any]:
        from clustertool.node.agent import launch

        done = launch.launch(header, self._umask)
        self._placed = ""
        return done

    def follow(self, header: Header) -> Dict[str, Any]:
        from clustertool.node.jobs.follow import Follower

        record = self.jobs().record(header)
        if header.get("follow", True):
            record.require_here()
        self._followers.append(Follower(record, header))
        return {}

    def job(self, header: Header) -> Dict[str, Any]:
        """A question about the jobs that are here."""
        return self.jobs().answer(header)

    def jobs(self) -> Jobs:
        from clustertool.node.jobs.queries import Jobs

        return Jobs(self.root, self.entry)

    def devices(self, header: Header) -> Dict[str, Any]:
        """The node's cards now, or {"need": digest}: the NVML module is sent to nodes that have a use for it."""
        from clustertool.node.devices import read

        return read.look(str(header["nvml"]))

    def glance(self, header: Header) -> Dict[str, Any]:
        """For `inv top`, once a second."""
        if self._glance is None:
            from clustertool.node.jobs.live_sample import Glance

            self._glance = Glance(self.root, self.entry, str(header["nvml"]))
        return self._glance.look(str(header["job"]))

    def module(self, header: Header) -> Dict[str, Any]:
        """The NVML module, which `devices` said it needs: zlib in base64."""
        from clustertool.node.devices import nvml

        nvml.keep(str(header["nvml"]), str(header["data"]))
        return {}


_INLINE: Dict[str, Callable[[Agent, Header], Dict[str, Any]]] = {
    # start and relay fork, which must not be done beside other threads; follow touches the loop's own list
    "start": Agent.start,
    "relay": Agent.relay,
    "unrelay": Agent.unrelay,
    "follow": Agent.follow,
}
_HANDLERS: Dict[str, Callable[[Agent, Header], Dict[str, Any]]] = {
    "probe": Agent.probe,
    "meet": Agent.meet,
    "patch": Agent.patch,
    "place": Agent.place,
    "examine": Agent.examine,
    "mesh": Agent.mesh,
    "unplace": Agent.unplace,
    "devices": Agent.devices,
    "module": Agent.module,
    "glance": Agent.glance,
    "verify": Agent.verify,
    **dict.fromkeys("stop attached jobs status report tail files clean".split(), Agent.job),
}


def main(hello: bytes, add: Callable[[bytes], object]) -> None:
    """The bootstrap calls this with stdin and stdout being the channel, and without garbage collection."""
    import gc

    gc.freeze()  # what is imported stays for good: no collection, and no fork, need touch it
    gc.set_threshold(_GARBAGE)
    gc.enable()
    processes.set_name("ct-agent")
    try:
        Agent(json.loads(hello), add, 0, 1).run()
    finally:
        processes.leave(0)  # at once: an orderly end of the interpreter costs every node of every command 5 ms
