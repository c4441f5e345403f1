"""inv top shows a live view of nodes, devices and ranks. inv gpus prints the devices once, by node, with their users.

Ctrl+C and q only end the view.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import sys
import termios
import threading
import time
import tty
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from rich.console import ConsoleDimensions
from rich.live import Live

from clustertool.actions import load_config
from clustertool.actions.find_jobs import attach_to
from clustertool.actions.stop_jobs import stop_how, stop_now
from clustertool.engines.base import Engine
from clustertool.errors import ClustertoolError, UsageError, raise_all
from clustertool.fleet import node_bundle
from clustertool.fleet.fleet import Fleet, devices_of, module_request
from clustertool.model.config.folded_names import gather
from clustertool.model.engine_views import EngineNode
from clustertool.model.job import stacks
from clustertool.model.job.state_names import RankState
from clustertool.model.job.stop_result import read_result
from clustertool.model.shape import read
from clustertool.model.wire.agent_answers import GlanceAnswer, StacksAnswer
from clustertool.model.wire.agent_requests import StacksRequest
from clustertool.model.wire.messages import SAMPLE, STACKS, TAIL, Request
from clustertool.show.device_table import devices_tables, engine_nodes_table
from clustertool.show.job_text import stop_text
from clustertool.show.program_name import commanded
from clustertool.show.stack_view import stack_lines
from clustertool.show.table import rich_console
from clustertool.show.top_view import Screen, View, choose, draw
from clustertool.verbs import signals
from clustertool.verbs.jobs import engine_of, open_engine
from clustertool.verbs.verb import Call, read_seconds, read_whole_number
from clustertool.watch.top_model import SORTS, TopModel

A = TypeVar("A", bound=Mapping[str, object])  # an answer
_PATIENCE = 5.0  # seconds for the second sample of a node
_TURN = 0.1  # seconds: how soon a key is obeyed
_CODES = {
    "up": ("\x1b[A", "\x1bOA"),
    "down": ("\x1b[B", "\x1bOB"),
    "page up": ("\x1b[5~",),
    "page down": ("\x1b[6~",),
    "enter": ("\r", "\n"),
    "rub": ("\x7f", "\x08"),
    "esc": ("\x1b",),  # last: other codes begin with it
}
_NAMES = {code: name for name, codes in _CODES.items() for code in codes}
_MOVES = {"up": -1, "k": -1, "page up": -10, "down": 1, "j": 1, "page down": 10}
_POLL_PATIENCE = 30.0  # seconds for one answer
_POLL_RETRY = 3.0


def top(call: Call) -> None:
    """Show samples of nodes and ranks until the user ends the view, --count times, or once with --json.

    With an engine without agents of its own, the samples come from the nodes of one job.
    """
    interval = read_seconds(call.given.interval, "--interval", 1.0, 0.1, 3600.0)
    samples = read_whole_number(call.given.count, "--count")
    if call.json and samples not in (None, 1):
        raise UsageError("--json and --count cannot be given together", "--json answers once: leave --count out")
    with open_engine(call) as engine:
        fleet = engine.fleet
        if not fleet.agents:
            raise_all(list(fleet.failed.values()))
        if not engine.capabilities.live_channels:  # samples come from the nodes of one job
            fleet = engine.fleet_of_job(attach_to(engine, call.given.job, running=not call.given.job)["id"]).open()
        poll = Poll(fleet, call.given.job, interval)
        poll.start()
        try:
            Top(call, engine, fleet, poll, interval).run(samples)
        finally:
            poll.stop()


class Top:
    """A session of inv top: it takes samples, shows pages and handles keys. fleet: nodes with samples; engine: ends jobs."""

    def __init__(self, call: Call, engine: Engine, fleet: Fleet, poll: Poll, interval: float) -> None:
        self._engine = engine
        self._call, self._fleet, self._poll, self._interval = call, fleet, poll, interval
        self._screen = Screen(call.terminal, load_config.mask_known_secrets(fleet.cluster))
        self._picture, self._view = TopModel(), View()
        self._ranks: list[Any] = []
        self._samples: Counter[int] = Counter()  # by node
        self._asking = ""  # a job whose stop waits for a y
        self._quit = False

    def run(self, samples: int | None) -> None:
        """Answer with JSON, show the live view, or without a terminal print plain samples. Raises the errors of nodes.

        samples: how many to show, None for no limit.
        """
        if self._call.json:
            self._measure()
            self._call.answer(self._screen.as_dict(self._picture, self._failed(), time.monotonic()))
        elif self._call.terminal.is_terminal and sys.stdin is not None and sys.stdin.isatty():
            self._run_live(samples)
        else:
            self._run_plain(samples)
        raise_all(list(self._poll.failed.values()))

    def _measure(self) -> None:
        """Take samples for one interval, and on until each node that answers has sent two, as rates need.

        It goes on for at most another interval and 5 s.
        """
        end = time.monotonic() + self._interval
        while time.monotonic() < end or (self._lacks_samples() and time.monotonic() < end + self._interval + _PATIENCE):
            signals.check()
            self._take()
            time.sleep(0.05)

    def _lacks_samples(self) -> bool:
        """Check whether a node without an error has sent fewer than two samples."""
        return any(self._samples[node] < 2 for node in self._fleet.agents if node not in self._poll.failed)

    def _run_plain(self, samples: int | None) -> None:
        """Take samples for an interval and print a page of text, `samples` times; None: until a signal."""
        for _ in itertools.count() if samples is None else range(samples):
            self._measure()
            self._screen.plain(self._picture, self._view, self._failed(), time.monotonic())

    def _run_live(self, samples: int | None) -> None:
        """Draw the live view at each interval, key and change of the terminal's size, and handle keys.

        Ends at the key q on the page of ranks, or after `samples` intervals (None: no limit).
        """
        console = rich_console(self._call.terminal)
        drawn, shown, at = 0, (0, 0), 0.0
        with keyboard(), Live(console=console, screen=True, auto_refresh=False) as live:
            while not self._quit and (samples is None or drawn < samples):
                signals.check()
                self._take()
                keys = list(read_keys(_TURN))
                for key in keys:
                    self._handle_key(key)
                size, now = _terminal_size(), time.monotonic()
                due = now - at >= self._interval
                if keys or size != shown or due:
                    drawn += due
                    at = now if due else at
                    console.size = ConsoleDimensions(*size)
                    live.update(self._build_picture(*size, now), refresh=True)
                    shown = size

    def _build_picture(self, width: int, height: int, now: float) -> Any:
        """Build the picture of the view: the log or the stacks that are open, or the page of ranks. Stores the ranks for keys.

        The last 200 lines of the log, or the stacks, are requested with each sample; "..." until they come.
        """
        log, text = self._view.log, "..."
        if log is None:
            page = self._screen.page(self._picture, self._view, width, height, self._failed(), now)
            self._ranks = page.ranks
            return draw(page, width)
        if self._view.stacks:
            how = StacksRequest(job=log.job, role=log.role, ranks=str(log.rank), native=False, tool="", seconds=10.0)
            taken = self._poll.add_request(log.agent, STACKS(how))
            text = _stacks_text(taken) if taken else text
        else:
            tail = self._poll.add_request(log.agent, TAIL({"job": log.job, "log": log.log, "lines": 200}))
            text = str(tail["text"]) if tail else text
        return draw(self._screen.log_page(self._view, text, height), width)

    def _take(self) -> None:
        """Feed the new samples of all nodes to the model, and count them."""
        for node, sample in self._poll.take().items():
            self._samples[node] += 1
            self._picture.feed(node, self._fleet.name(node), sample, time.monotonic())

    def _failed(self) -> dict[str, str]:
        """Return {name of a node: why it does not answer}."""
        return {self._fleet.name(node): error.what for node, error in sorted(self._poll.failed.items())}

    # -- keys --

    def _handle_key(self, key: str) -> None:
        """Handle a key: q ends, s sorts, / filters, arrows select a rank, enter: its log, t: its stacks, x: stop of its job.

        While a question is open, a filter is typed or a log is shown, the key belongs to that.
        """
        view = self._view
        if self._asking:
            self._confirm_stop(key)
        elif view.typing:
            self._handle_filter_key(key)
        elif view.log is not None:
            if key in ("q", "esc", "enter"):
                view.log, view.stacks = None, False
                self._poll.remove_request()
        elif key == "q":
            self._quit = True
        elif key == "s":
            view.sort = SORTS[(SORTS.index(view.sort) + 1) % len(SORTS)]
        elif key in ("/", "f"):
            view.typing, view.text = True, ""
        elif key == "esc":
            view.text = view.message = ""
        elif key in _MOVES:
            choose(view, self._ranks, _MOVES[key])
        elif key in ("enter", "t") and self._ranks:
            choose(view, self._ranks)
            view.stacks = key == "t"
            self._open_log(self._ranks[view.at])
        elif key == "x" and self._ranks:
            choose(view, self._ranks)
            self._asking = self._ranks[view.at].job
            view.message = f"stop job {self._asking} on all nodes? y/n"

    def _open_log(self, rank: Any) -> None:
        """Open the log or the stacks of a rank, or show why it has none."""
        if rank.log and rank.state is not RankState.UNKNOWN:
            self._view.log = rank
        else:
            why = "it has not started" if rank.state is RankState.WAITING else f"{rank.node} does not answer"
            self._view.stacks, self._view.message = False, f"no log of {rank.name}: {why}"

    def _handle_filter_key(self, key: str) -> None:
        """Handle a key while the user types a filter: enter ends it, esc ends and removes it, other keys change it."""
        view = self._view
        if key in ("enter", "esc"):
            view.typing = False
            view.text = "" if key == "esc" else view.text
        elif key == "rub":
            view.text = view.text[:-1]
        else:
            view.text += key if len(key) == 1 else ""

    def _confirm_stop(self, key: str) -> None:
        """Take a key as the answer to the question: y stops the job in a thread, another key does not. Removes the question."""
        job, self._asking, self._view.message = self._asking, "", ""
        if key == "y":
            self._view.message = f"stopping job {job} ..."
            threading.Thread(target=self._stop, args=(job,), daemon=True).start()

    def _stop(self, job: str) -> None:
        """Stop a job, and show the result in the last line of the view."""
        try:
            answers = stop_now(self._engine, job, stop_how(f"{commanded()} stop", self._fleet.cluster.grace))
            texts = gather({name: stop_text(read_result(answer, job)) for name, answer in answers.items()})
            self._view.message = f"job {job}: {'; '.join(f'{names}: {text}' for names, text in texts) or 'cancelled'}"
        except ClustertoolError as error:
            self._view.message = f"job {job}: {error.what}"


def _stacks_text(answer: StacksAnswer) -> str:
    """Return the lines about the stacks of a rank, and why there are none or not all."""
    groups = stacks.gather(read(stacks.ProcessSample, one) for one in answer["samples"])
    lines = [text for text, _ in stack_lines(groups)]
    return "\n".join(filter(None, [*lines, answer["fault"]])) or "it has ended"


def _terminal_size() -> tuple[int, int]:
    """Return columns and lines of the terminal, (80, 24) if they are not known."""
    for stream in (sys.stdout, sys.stdin):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            width, height = os.get_terminal_size(stream.fileno())
            if width and height:
                return width, height
    return 80, 24


def read_keys(wait: float) -> Iterator[str]:
    """Wait up to `wait` seconds for input, and yield the keys in it, by name or as a character."""
    if not select.select([sys.stdin], [], [], wait)[0]:
        return
    text = os.read(sys.stdin.fileno(), 1024).decode("utf-8", "ignore")
    while text:
        known = next((name for name in _NAMES if text.startswith(name)), text[0])
        text = text[len(known) :]
        if known in _NAMES or known.isprintable():
            yield _NAMES.get(known, known)


@contextlib.contextmanager
def keyboard() -> Iterator[None]:
    """Return a context manager in which the terminal passes on keys one by one without echo; its end restores the terminal.

    Ctrl+C still interrupts.
    """
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


# -- devices -----------------------------------------------------------------------------------------------------------


def gpus(call: Call) -> None:
    """Print the devices of all nodes with their users, or answer with JSON; without agents, what the engine knows of them.

    Raises the errors of nodes.
    """
    with engine_of(call) as engine:
        fleet = engine.fleet
        if not engine.capabilities.live_channels:
            _print_engine_nodes(call, [] if fleet.failed else engine.nodes())
            return
        gathered = devices_of(fleet)
        nodes = {fleet.name(node): answer for node, answer in sorted(gathered.ok.items())}
        fleet.failed.update(gathered.failed)
        if call.json:
            answers = {name: {k: v for k, v in answer.items() if k != "re"} for name, answer in nodes.items()}
            away = {fleet.name(node): e.what for node, e in sorted(fleet.failed.items())}
            call.answer({"nodes": answers, "unreachable": away})
        else:
            devices_tables(nodes, call.terminal)


def _print_engine_nodes(call: Call, nodes: Sequence[EngineNode]) -> None:
    """Print the nodes of an engine with the devices that its users have reserved, not what runs there."""
    if call.json:
        found = {node.name: {k: v for k, v in asdict(node).items() if k not in ("name", "gpus")} for node in nodes}
        for node in nodes:
            found[node.name]["gpus"] = [dict(zip(("type", "total", "used"), gpu)) for gpu in node.gpus]
        call.answer({"nodes": found, "unreachable": {}})
    else:
        engine_nodes_table(nodes, call.terminal)


# -- samples -----------------------------------------------------------------------------------------------------------


class Poll:
    """The newest samples of all nodes. A thread for each node sends the same small request repeatedly, at the node's rate.

    take() returns the samples since the last take; `failed` has the error of a node. A node that does not answer delays no
    other one. It is asked over a new connection until it answers.
    """

    def __init__(self, fleet: Fleet, job: str, interval: float) -> None:
        self._fleet = fleet
        self._request = SAMPLE({"job": job, "nvml": node_bundle.nvml()[0]})
        self._interval = interval
        self._lock = threading.Lock()
        self._new: dict[int, GlanceAnswer] = {}
        self._second_request: tuple[int, Request[Any]] | None = None
        self._second_answer: tuple[Request[Any], Any] | None = None
        self._over = threading.Event()
        self.failed: dict[int, ClustertoolError] = dict(fleet.failed)

    def start(self) -> None:
        """Start a thread for each node that requests samples. From now on no question for a password is asked.

        A lost connection is opened again without such questions.
        """
        # The threads below log in again where a connection broke, and no thread serves questions.
        self._fleet.prompter.silence()
        for host in self._fleet.cluster.hosts:
            threading.Thread(target=self._run, args=(host.index,), name=f"poll {host.name}", daemon=True).start()

    def stop(self) -> None:
        """Let the threads end after their current request."""
        self._over.set()

    def take(self) -> dict[int, GlanceAnswer]:
        """Return the newest sample of each node since the last call."""
        with self._lock:
            new, self._new = self._new, {}
        return new

    def add_request(self, node: int, request: Request[A]) -> A | None:
        """Send a node a second request with each sample from now on, in place of another one.

        Returns the last answer to it, None before the first one.
        """
        self._second_request = (node, request)
        answer = self._second_answer
        return answer[1] if answer and answer[0] == request else None

    def remove_request(self) -> None:
        """End the second request of add_request()."""
        self._second_request = self._second_answer = None

    def _run(self, node: int) -> None:
        """Request samples of a node until stop(), each interval; after an error connect again after 3 s."""
        while not self._over.is_set():
            begun = time.monotonic()
            try:
                if node in self.failed:
                    self._fleet.reopen(node)
                self._poll_once(node)
                self.failed.pop(node, None)
                wait = self._interval
            except ClustertoolError as error:
                self.failed[node] = error
                wait = _POLL_RETRY
            self._over.wait(max(0.0, begun + wait - time.monotonic()))

    def _poll_once(self, node: int) -> None:
        """Request one sample of a node, and the answer to the second request if it is for this node, and store them.

        Sends the NVML module if the node needs it.
        """
        agent = self._fleet.agents[node]
        answer = agent.ask(self._request, _POLL_PATIENCE)
        if "need" in answer:
            agent.ask(module_request(), _POLL_PATIENCE)
            answer = agent.ask(self._request, _POLL_PATIENCE)
        with self._lock:
            self._new[node] = answer
        second = self._second_request
        if second is not None and second[0] == node:
            self._second_answer = (second[1], agent.ask(second[1], _POLL_PATIENCE))
