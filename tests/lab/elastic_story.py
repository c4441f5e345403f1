"""A story of an elastic job on a lab: the job, faults that are drawn by a seed, and what is true of its logs and records."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests import proc_files
from tests.cli import CLUSTERTOOL, Done, LabSite, Process, Running, until
from tests.lab.lab_store import LabStore

LOSS, GRACE, LENGTH, LEAST = 2.0, 1.0, 5.0, 2
TIMEOUT, STORED_TIMEOUT = 8.0, 16.0  # of [elastic]; etcd that was restarted keeps the leases of lost nodes for 6 s more
PATIENCE = 60.0
ANSWERS = {0, 64, 66, 69, 75}  # of grow and shrink: refused, the job is over, a node is not reached, or is late
# One line each 0.1 s, and one of a rank that has done all its steps. A child would outlive the rank.
TRAIN = f"""
    import os, subprocess, time
    env = os.environ
    head = " ".join(env[name] for name in ("CLUSTERTOOL_ATTEMPT", "RANK", "WORLD_SIZE"))
    if env["RANK"] == "1":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    end = time.monotonic() + {LENGTH}
    while time.monotonic() < end:
        print(head, f"{{time.time():.3f}}", flush=True)
        time.sleep(0.1)
    print(head, f"{{time.time():.3f}}", "done", flush=True)
"""
TOML = """
    [elastic]
    min = {least}
    max = {most}
    timeout = {timeout}
    grow = "{grow}"
    backoff = [0.5, 2]
"""


class Step(NamedTuple):
    """A line of a rank: its attempt, its number of how many, on which node, when, and whether it was its last one."""

    attempt: int
    rank: int
    world: int
    node: int
    t: float
    done: bool


class ElasticStory:
    """start() the job, do some of the faults(), end() it, and check() all.

    codes: with which it may end. lost: nodes that may be missing for good, as far as the minimum is concerned. cut: what is to
    be healed. killed: nodes that could not remove their files. down: machines without power.
    """

    def __init__(self, site: LabSite, dice: random.Random, store: LabStore | None) -> None:
        self.site, self.dice, self.store, self.lab = site, dice, store, site.lab
        self.nodes = range(site.count)
        self.timeout = STORED_TIMEOUT if store else TIMEOUT
        self.codes = {0}
        self.lost: set[int] = set()
        self.killed: set[int] = set()
        self.down: set[int] = set()
        self.notes: list[str] = []
        self.job = ""
        self._cut: set[int] = set()
        self._commands: list[tuple[str, Running]] = []
        self._began = time.monotonic()

    def note(self, text: str) -> None:
        self.notes.append(f"{time.monotonic() - self._began:.1f} s: {text}")

    # -- the job --

    def start(self, grow: str, hosts: int) -> None:
        """hosts: of the first nodes; the others may be added."""
        site = self.site
        site.conf(LOSS_TIMEOUT=LOSS, GRACE=GRACE, CONNECT_TIMEOUT=3)
        toml = TOML.format(least=LEAST, most=site.count, timeout=self.timeout, grow=grow)
        workspace = site.workspace(train_py=TRAIN, job_toml=toml)
        skipped = [token for node in self.nodes[hosts:] for token in ("--skip", site.name(node))]
        server = ["--elastic-server", self.store.url] if self.store else []
        tokens = ["run", "-w", workspace, "--max-restarts", 9, *skipped, *server]
        self.running: Running | None = site.start(*tokens, program=CLUSTERTOOL)
        self.job = self.running.says(r"^job (\S+):")
        self._began = time.monotonic()
        until(lambda: len(self.steps()) > 0, PATIENCE, lambda: f"the first step: {self.described()}")

    @property
    def ended(self) -> bool:
        return self.running is not None and self.running.process.poll() is not None

    def end(self) -> Done:
        """Follow the job to its end."""
        if self.running is None:
            self.attach()
        assert self.running is not None
        done = self.running.wait(PATIENCE)
        self.note(f"ended with {done.code}")
        return done

    def attach(self) -> None:
        self.note("attach")
        self.running = self.site.start("attach", "--job", self.job, program=CLUSTERTOOL)

    def command(self, *tokens: str) -> None:
        """A command of another user, in the background."""
        self.note(" ".join(tokens))
        self._commands.append((" ".join(tokens), self.site.start(*tokens, "--job", self.job, program=CLUSTERTOOL)))

    # -- faults --

    def faults(self) -> dict[str, Any]:
        """By name. Those of the coordinator's node are drawn on purpose, because they end a job without a store."""
        usual = {
            "kill a rank": self.kill_rank,
            "kill a guard": self.kill_guard,
            "kill a supervisor": self.kill_supervisor,
            "freeze a supervisor": self.freeze_supervisor,
            "kill all of a node": self.kill_all,
            "cut": self.cut,
            "cut and heal": self.cut_and_heal,
            "cut one way": self.cut_one_way,
            "reboot": self.reboot,
            "grow": self.grow,
            "shrink": self.shrink,
            "disconnect the laptop": self.disconnect,
        }
        if self.store:
            return {**usual, "pause the store": self.pause_store, "kill the store": self.kill_store}
        return usual

    def member(self) -> int:
        """A node; without a store mostly another one than the coordinator's, with a store often this one."""
        if self.store and self.dice.random() < 0.4:
            return self.coordinator
        return self.dice.choice(self.nodes if self.store or self.dice.random() < 0.1 else self.nodes[1:])

    @property
    def coordinator(self) -> int:
        """Of the newest epoch."""
        begun = [
            (event["attempt"], node) for node, own in self.events().items() for event in own if event["type"] == "epoch"
        ]
        return max(begun, default=(0, 0))[1]

    def lose(self, node: int) -> None:
        """The processes of a node are lost. Without a store the coordinator must not be among them."""
        self.lost.add(node)
        if node == 0 and not self.store:
            self.codes.add(75)

    def of_node(self, node: int, name: str) -> list[Process]:
        return [one for one in self.site.processes(node) if one.name == name]

    def lose_coordinator(self) -> None:
        """Without a store, that ends the job on all nodes."""
        self.dice.choice([self.kill_all, self.kill_supervisor, self.cut, self.reboot])(0)

    def strike(self, node: int, name: str, number: signal.Signals) -> bool:
        """Send a signal to a process of a node, if it has one."""
        found = self.of_node(node, name)
        self.note(f"{number.name} to {name} on node {node}" if found else f"no {name} on node {node}")
        for one in found[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, number)
        return bool(found)

    def kill_rank(self) -> None:
        node = self.dice.choice(self.nodes)
        found = [one for one in self.site.processes(node) if one.argv[-1:] == ("train.py",)]
        self.note(f"kill {len(found)} rank of node {node}")
        for one in found[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)

    def kill_guard(self) -> None:
        self.strike(self.dice.choice(self.nodes), "ct-guard", signal.SIGKILL)

    def kill_supervisor(self, node: int | None = None) -> None:
        node = self.member() if node is None else node
        self.killed.add(node)
        if self.strike(node, "ct-supervisor", signal.SIGKILL):
            self.lose(node)

    def freeze_supervisor(self) -> None:
        node, seconds = self.member(), self.dice.uniform(0.3, 3 * LOSS)
        if self.strike(node, "ct-supervisor", signal.SIGSTOP):
            self.lose(node)
            found = self.of_node(node, "ct-supervisor")
            time.sleep(seconds)
            for one in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGCONT)
            self.note(f"continued after {seconds:.1f} s")

    def kill_all(self, node: int | None = None) -> None:
        """Of the job on a node, all at one moment."""
        node = self.member() if node is None else node
        self.killed.add(node)
        self.lose(node)
        self.note(f"kill all of node {node}")
        while moving := [one for one in self._living(node) if proc_files.state(one.pid) not in "TtZX"]:
            for one in moving:
                _send(one.pid, signal.SIGSTOP)
        for one in self._living(node):
            _send(one.pid, signal.SIGKILL)

    def _living(self, node: int) -> list[Process]:
        return [one for one in self.site.living() if one.node == node]

    def cut(self, node: int | None = None) -> None:
        node = self.member() if node is None else node
        if node not in self._cut | self.down:
            self.note(f"cut node {node}")
            self.lose(node)
            self.lab.cut(node)
            self._cut.add(node)

    def cut_and_heal(self) -> None:
        node, seconds = self.dice.choice(self.nodes), self.dice.uniform(0.2, 2.5 * LOSS)
        if node not in self._cut | self.down:
            self.note(f"cut node {node} for {seconds:.1f} s")
            self.lab.cut(node)
            time.sleep(seconds)
            self.lab.heal(node)

    def cut_one_way(self) -> None:
        node, seconds, sends = (
            self.dice.choice(self.nodes),
            self.dice.uniform(0.2, 2.5 * LOSS),
            self.dice.random() < 0.5,
        )
        if node not in self.down:
            self.note(f"cut node {node} {'from' if sends else 'to'} for {seconds:.1f} s")
            others = [one for one in self.nodes if one != node and one not in self.down]
            way = ([node], [*others, "laptop"]) if sends else ([*others, "laptop"], [node])
            self.lab.drop(*way)
            time.sleep(seconds)
            self.lab.deliver(*way)

    def reboot(self, node: int | None = None) -> None:
        node, seconds = self.member() if node is None else node, self.dice.uniform(0.2, LOSS * 1.5)
        if node in self.down | self._cut:
            return
        self.note(f"crash node {node} for {seconds:.1f} s")
        self.killed.add(node)
        self.lose(node)
        self.lab.crash(node)
        time.sleep(seconds)
        self.lab.start(node)
        self.note("it is up")

    def grow(self) -> None:
        known = sorted(self.lost)
        self.command("grow", "--host", self.site.name(self.dice.choice(known or self.nodes[-1:])))

    def shrink(self) -> None:
        node = self.dice.choice(self.nodes[1:])
        self.lost.add(node)
        self.command("shrink", "--host", self.site.name(node))

    def stop(self) -> None:
        self.codes |= {130, 143}
        self.command("stop")

    def disconnect(self) -> None:
        """The laptop is gone. It comes back later."""
        if self.running is None:
            return self.attach()
        self.note("the laptop is disconnected")
        self.running.signal(signal.SIGKILL)
        self.running.process.wait()
        self.running = None
        return None

    def pause_store(self) -> None:
        assert self.store is not None
        seconds = self.dice.uniform(0.2, LOSS * 0.9)
        self.note(f"the store does not answer for {seconds:.1f} s")
        self.store.pause(seconds)

    def kill_store(self) -> None:
        assert self.store is not None
        seconds = self.dice.uniform(0.2, LOSS * 2.5)
        self.note(f"no store for {seconds:.1f} s")
        self.store.kill()
        time.sleep(seconds)
        self.store.start()

    # -- what must be true --

    def check(self, done: Done) -> None:
        if len(self.lost) > self.site.count - LEAST:  # it may have been below its minimum for too long
            self.codes.add(75)
        assert done.code in self.codes, f"it may end with {sorted(self.codes)}"
        for node in self._cut:
            self.lab.heal(node)
        limit = self.timeout + LOSS + GRACE + 8
        until(lambda: not self.site.living(), limit, lambda: f"these to end: {self.site.living()}")
        for tokens, running in self._commands:
            ended = running.wait(PATIENCE)
            assert ended.code in ANSWERS and "Traceback" not in ended.err, f"{tokens}: {ended}"
            self.note(f"{tokens}: {ended.code}")
        self._check_epochs(done.code)
        self._check_answers(done.code)
        self._check_nodes()
        if self.store:
            assert self.store.keys() == [f"clustertool/{self.job}/epoch"]

    def steps(self) -> list[Step]:
        found = []
        for node, place in self._places():
            for path in place.glob("log/**/workerlog.*"):
                found += [step for line in path.read_text().splitlines() if (step := _step(node, line)) is not None]
        return found

    def _places(self) -> Iterator[tuple[int, Path]]:
        """The directories of the job."""
        for node in self.nodes:
            yield from ((node, place) for place in self.site.jobs(node) if place.name == f"JOB{self.job}")

    def events(self) -> dict[int, list[dict[str, Any]]]:
        """Of each node."""
        found: dict[int, list[dict[str, Any]]] = {}
        for node, place in self._places():
            lines = (place / ".clustertool/events.jsonl").read_text(errors="replace").splitlines()
            found[node] = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return found

    def _check_epochs(self, code: int) -> None:
        by_attempt: dict[int, list[Step]] = defaultdict(list)
        for step in self.steps():
            by_attempt[step.attempt].append(step)
        last, before = 0.0, -1
        for attempt, steps in sorted(by_attempt.items()):
            first = min(step.t for step in steps)
            assert first > last, f"ranks of {before} lived until {last:.3f}, and of {attempt} from {first:.3f} on"
            last, before = max(step.t for step in steps), attempt
            assert len({step.world for step in steps}) == 1, f"the number {attempt} was used by several plans"
            places = {(step.rank, step.node) for step in steps}
            assert len({rank for rank, _ in places}) == len(places), f"a rank of {attempt} on two nodes: {places}"
        numbers = [event["attempt"] for own in self.events().values() for event in own if event["type"] == "epoch"]
        assert len(set(numbers)) == len(numbers), f"the number of an epoch was used twice: {sorted(numbers)}"
        final = by_attempt[before]
        complete = {step.rank for step in final if step.done} == set(range(final[0].world))
        assert complete or code != 0, f"the job has succeeded, and not all ranks of {before} have ended"

    def _check_answers(self, code: int) -> None:
        """`status` and `jobs` of any other laptop."""
        expected = {0: "succeeded", 75: "lost", 130: "stopped", 143: "stopped"}[code]
        status = self.site.clustertool("status", "--job", self.job, "--json")
        listed = self.site.clustertool("jobs", "--job", self.job, "--json")
        assert {status.code, listed.code} <= {0, 69}, f"{status}\n{listed}"
        (job,) = listed.json["jobs"]
        assert (status.json["state"], job["state"]) == (expected, expected), f"{status.json['nodes']}"

    def _check_nodes(self) -> None:
        """Ports and files of nodes whose supervisors could remove them."""
        for node in self.nodes:
            if node not in self.down:
                ports = [port for port in _listening(self.lab.boots[node].init) if port != 22]
                assert not ports, f"node {node} listens on {ports}"
            if node in self.killed | self.down:
                continue
            for path in self.lab.tmp(node).rglob("ports.json"):
                claims = set(json.loads(path.read_text() or "{}")) - {"format"}
                assert not claims, f"node {node} keeps claims of ports {claims}"
        for node, place in self._places():
            sockets = [path for path in place.rglob("*") if path.is_socket() or path.is_fifo()]
            assert not sockets or node in self.killed | self.down, f"node {node} keeps {sockets}"

    def described(self) -> str:
        """For a failure."""
        running = f"\n--- out\n{self.running.out[-2000:]}\n--- err\n{self.running.err}" if self.running else ""
        lines = [line for node, own in sorted(self.events().items()) for line in _short(node, own)]
        return "\n".join([*self.notes, running, *lines])


def etcd_or_skip() -> None:
    import pytest

    if not shutil.which("etcd"):
        if os.environ.get("DEMAND_ENGINES"):
            pytest.fail("etcd is missing: scripts/engine-packages.sh installs it")
        pytest.skip("needs etcd (package etcd-server)")


def _short(node: int, events: list[dict[str, Any]]) -> Iterator[str]:
    for event in events:
        if event["type"] not in ("job", "growth", "usage", "descendants", "placed"):
            yield f"node {node}: {json.dumps(event)[:300]}"


def _step(node: int, line: str) -> Step | None:
    tokens = line.split()
    if len(tokens) not in (4, 5) or not all(token.isdigit() for token in tokens[:3]):
        return None
    return Step(int(tokens[0]), int(tokens[1]), int(tokens[2]), node, float(tokens[3]), tokens[4:] == ["done"])


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _listening(pid: int) -> list[int]:
    """Ports of the network of a process."""
    rows = [
        row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]
    ]
    return sorted({int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"})
