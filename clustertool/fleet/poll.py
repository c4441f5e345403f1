"""A poll sends every node the same small request repeatedly, each node at its own rate, and keeps the last response.

A node that does not answer delays no other one. It is asked over a new connection until it answers.
"""

from __future__ import annotations

import threading
import time

from clustertool.errors import ClustertoolError
from clustertool.fleet import node_bundle
from clustertool.fleet.fleet import Fleet, module_request
from clustertool.model.wire.agent_answers import GlanceAnswer, TailAnswer
from clustertool.model.wire.messages import SAMPLE, Request

_PATIENCE = 30.0  # seconds for one answer
_RETRY = 3.0


class Poll:
    """take() returns the samples since the last take; `failed` has the error of a node."""

    def __init__(self, fleet: Fleet, job: str, interval: float) -> None:
        self._fleet = fleet
        self._request = SAMPLE({"job": job, "nvml": node_bundle.nvml()[0]})
        self._interval = interval
        self._lock = threading.Lock()
        self._new: dict[int, GlanceAnswer] = {}
        self._aside: tuple[int, Request[TailAnswer]] | None = None
        self._aside_answer: tuple[Request[TailAnswer], TailAnswer] | None = None
        self._over = threading.Event()
        self.failed: dict[int, ClustertoolError] = dict(fleet.failed)

    def start(self) -> None:
        # The threads below log in again where a connection broke, and no thread serves questions.
        self._fleet.prompter.silence()
        for host in self._fleet.cluster.hosts:
            threading.Thread(target=self._run, args=(host.index,), name=f"poll {host.name}", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def take(self) -> dict[int, GlanceAnswer]:
        with self._lock:
            new, self._new = self._new, {}
        return new

    def aside(self, node: int, request: Request[TailAnswer]) -> TailAnswer | None:
        """Ask one node a second question with each turn: its last answer, None as long as there is none."""
        self._aside = (node, request)
        answer = self._aside_answer
        return answer[1] if answer and answer[0] == request else None

    def no_aside(self) -> None:
        self._aside = self._aside_answer = None

    def _run(self, node: int) -> None:
        """Ask a node again and again, in its own thread."""
        while not self._over.is_set():
            begun = time.monotonic()
            try:
                if node in self.failed:
                    self._fleet.reopen(node)
                self._turn(node)
                self.failed.pop(node, None)
                wait = self._interval
            except ClustertoolError as error:
                self.failed[node] = error
                wait = _RETRY
            self._over.wait(max(0.0, begun + wait - time.monotonic()))

    def _turn(self, node: int) -> None:
        agent = self._fleet.agents[node]
        answer = agent.ask(self._request, _PATIENCE)
        if "need" in answer:
            agent.ask(module_request(), _PATIENCE)
            answer = agent.ask(self._request, _PATIENCE)
        with self._lock:
            self._new[node] = answer
        aside = self._aside
        if aside is not None and aside[0] == node:
            self._aside_answer = (aside[1], agent.ask(aside[1], _PATIENCE))
