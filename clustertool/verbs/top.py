"""inv top shows a live view of nodes, devices and ranks. Ctrl+C and q only end the view."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from typing import Any

from rich.console import ConsoleDimensions
from rich.live import Live

from clustertool.errors import ClustertoolError, UsageError, raise_all
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.poll import Poll
from clustertool.model.job.state_names import RankState
from clustertool.model.job.stop_result import read_result
from clustertool.model.wire.messages import TAIL
from clustertool.show.outcome_view import stop_text
from clustertool.show.table import gather
from clustertool.show.top_view import Screen, View, choose, draw
from clustertool.verbs import load_config, signals
from clustertool.verbs.stop import stop_job
from clustertool.verbs.verb import Call, User, whole
from clustertool.watch.sanitize import mask
from clustertool.watch.top_model import SORTS, TopModel

_TURN = 0.1  # seconds: how soon a key is obeyed
_NAMES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "rub",
    "\x08": "rub",
    "\x1b": "esc",
}
_MOVES = {"up": -1, "k": -1, "page up": -10, "down": 1, "j": 1, "page down": 10}


def top(call: Call) -> None:
    """Watch nodes, devices and ranks live."""
    interval, samples = _interval(call.given.interval), whole(call.given.count, "--count")
    cluster = load_config.cluster(call, start_local=False)
    with Fleet(cluster, signals.check, person=User()).open() as fleet:
        if not fleet.agents:
            raise_all(list(fleet.failed.values()))
        poll = Poll(fleet, call.given.job, interval)
        poll.start()
        try:
            Top(call, fleet, poll, interval).run(samples)
        finally:
            poll.stop()


def _interval(text: str) -> float:
    try:
        seconds = float(text or 1)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise UsageError(f"--interval {text!r}", "a number of seconds from 0.1 on")
    return seconds


class Top:
    """One session: samples in, pages out, keys obeyed in between."""

    def __init__(self, call: Call, fleet: Fleet, poll: Poll, interval: float) -> None:
        self._call, self._fleet, self._poll, self._interval = call, fleet, poll, interval
        self._screen = Screen(call.terminal, mask(load_config.known_secrets(fleet.cluster).values()))
        self._picture, self._view = TopModel(), View()
        self._ranks: list[Any] = []
        self._asking = ""  # a job whose stop waits for a y
        self._quit = False

    def run(self, samples: int | None) -> None:
        if self._call.terminal.is_terminal and sys.stdin is not None and sys.stdin.isatty():
            self._live(samples)
        else:
            self._plain(samples)
        raise_all(list(self._poll.failed.values()))

    def _plain(self, samples: int | None) -> None:
        done = 0
        while samples is None or done < samples:
            end = time.monotonic() + self._interval
            while time.monotonic() < end or not (self._picture.sampled or self._poll.failed):
                signals.check()
                self._take()
                time.sleep(0.05)
            self._screen.plain(self._picture, self._view, self._failed(), time.monotonic())
            done += 1

    def _live(self, samples: int | None) -> None:
        console = self._call.terminal.console()
        drawn, shown, at = 0, (0, 0), 0.0
        with keyboard() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            while not self._quit and (samples is None or drawn < samples):
                signals.check()
                self._take()
                pressed = list(keys.pressed(_TURN))
                for key in pressed:
                    self._obey(key)
                size = _size()
                now = time.monotonic()
                if pressed or size != shown or now - at >= self._interval:
                    drawn += now - at >= self._interval
                    at = now if now - at >= self._interval else at
                    console.size = ConsoleDimensions(*size)
                    live.update(self._drawing(*size, now), refresh=True)
                    shown = size

    def _drawing(self, width: int, height: int, now: float) -> Any:
        log = self._view.log
        if log is not None:
            answer = self._poll.aside(log.agent, TAIL({"job": log.job, "log": log.log, "lines": 200}))
            page = self._screen.log_page(self._view, str(answer["text"]) if answer else "...", width, height)
        else:
            page = self._screen.page(self._picture, self._view, width, height, self._failed(), now)
            self._ranks = page.ranks
        return draw(page, width)

    def _take(self) -> None:
        for node, sample in self._poll.take().items():
            self._picture.feed(node, self._fleet.name(node), sample, time.monotonic())

    def _failed(self) -> dict[str, str]:
        return {self._fleet.name(node): error.what for node, error in sorted(self._poll.failed.items())}

    # -- keys --

    def _obey(self, key: str) -> None:
        view = self._view
        if self._asking:
            self._answer(key)
        elif view.typing:
            self._type(key)
        elif view.log is not None:
            if key in ("q", "esc", "enter"):
                view.log = None
                self._poll.no_aside()
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
        elif key == "enter" and self._ranks:
            choose(view, self._ranks)
            self._open_log(self._ranks[view.at])
        elif key == "x" and self._ranks:
            choose(view, self._ranks)
            self._asking = self._ranks[view.at].job
            view.message = f"stop job {self._asking} on all nodes? y/n"

    def _open_log(self, rank: Any) -> None:
        if rank.log and rank.state is not RankState.UNKNOWN:
            self._view.log = rank
        else:
            why = "it has not started" if rank.state is RankState.WAITING else f"{rank.node} does not answer"
            self._view.message = f"no log of {rank.name}: {why}"

    def _type(self, key: str) -> None:
        view = self._view
        if key in ("enter", "esc"):
            view.typing = False
            view.text = "" if key == "esc" else view.text
        elif key == "rub":
            view.text = view.text[:-1]
        else:
            view.text += key if len(key) == 1 else ""

    def _answer(self, key: str) -> None:
        job, self._asking, self._view.message = self._asking, "", ""
        if key == "y":
            self._view.message = f"stopping job {job} ..."
            threading.Thread(target=self._stop, args=(job,), daemon=True).start()

    def _stop(self, job: str) -> None:
        """Runs in the background of the view; its result is in the last line."""
        try:
            answers = stop_job(self._fleet, job, self._fleet.cluster.grace, False)
            texts = gather({name: stop_text(read_result(answer, job)) for name, answer in answers.items()})
            self._view.message = f"job {job}: {'; '.join(f'{names}: {text}' for names, text in texts)}"
        except ClustertoolError as error:
            self._view.message = f"job {job}: {error.what}"


def _size() -> tuple[int, int]:
    for stream in (sys.stdout, sys.stdin):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            width, height = os.get_terminal_size(stream.fileno())
            if width and height:
                return width, height
    return 80, 24


class Keys:
    """What is typed, key by key."""

    def pressed(self, wait: float) -> Iterator[str]:
        if not select.select([sys.stdin], [], [], wait)[0]:
            return
        text = os.read(sys.stdin.fileno(), 1024).decode("utf-8", "ignore")
        while text:
            known = next((name for name in _NAMES if text.startswith(name)), text[0])
            text = text[len(known) :]
            if known in _NAMES or known.isprintable():
                yield _NAMES.get(known, known)


@contextlib.contextmanager
def keyboard() -> Iterator[Keys]:
    """Keys come one by one and are not shown; Ctrl+C stays what it is. Undone in any case."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield Keys()
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
