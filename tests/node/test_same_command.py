"""Equal commands of two machines ask their first node which of them starts. Each agent is a process; its entry ends with it."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from clustertool.node.jobs.same_command import _read_entries, enter
from clustertool.node.system.node_context import NodeContext

FREE = {"starter": "", "job": ""}


def agent(root: str, pipe: Connection) -> None:
    while (request := pipe.recv()) is not None:
        pipe.send(enter(NodeContext(root, "root@node0:22"), request))


class Machine:
    """The agent of the command that was typed on a machine."""

    def __init__(self, root: Path, command: str, at: int) -> None:
        self.request: Any = {"command": command, "starter": f"machine{at}", "at": at}
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=agent, args=(str(root), theirs))
        self.process.start()

    def asks(self, start: bool = False) -> dict[str, str]:
        self.pipe.send({**self.request, "start": start})
        assert self.pipe.poll(20.0)
        answer: dict[str, str] = self.pipe.recv()
        return answer

    def starts(self) -> dict[str, str]:
        return self.asks(start=True)

    def end(self) -> None:
        if self.process.is_alive():
            self.pipe.send(None)
        self.process.join(20.0)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Machine]]:
    command = secrets.token_hex(16)
    made = [Machine(tmp_path, command, at) for at in (0, 1)]
    yield made
    for machine in made:
        machine.end()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_that_begin_at_once_the_first_in_the_list_starts(two: list[Machine], order: tuple[int, int]) -> None:
    assert [machine.asks() for machine in two] == [FREE, FREE]
    answers = {at: two[at].starts() for at in order}
    assert answers == {0: FREE, 1: {"starter": "machine0", "job": ""}}


def test_one_that_starts_already_goes_before_an_earlier_one_in_the_list(two: list[Machine]) -> None:
    assert (two[1].asks(), two[1].starts()) == (FREE, FREE)
    assert two[0].asks() == {"starter": "machine1", "job": ""}
    two[1].end()
    assert (two[0].asks(), two[0].starts()) == (FREE, FREE), "the other command has ended, and left no job"


def test_another_command_is_another_job(two: list[Machine]) -> None:
    assert two[0].starts() == FREE
    two[1].request["command"] += "x"
    assert (two[1].asks(), two[1].starts()) == (FREE, FREE)


def test_a_second_command_of_the_same_machine_is_a_second_job(two: list[Machine]) -> None:
    assert two[0].starts() == FREE
    two[1].request["starter"] = "machine0"
    assert two[1].starts() == FREE


def test_a_job_that_runs_is_known_without_its_command(two: list[Machine], tmp_path: Path) -> None:
    """Of a detached command, whose agent has ended."""
    ours = tmp_path / "JOBj1/.clustertool"
    ours.mkdir(parents=True, mode=0o700)
    (ours / "marker").touch()
    header = {"type": "job", "t": 1.0, "id": "j1", "entry": "root@node0:22", "starter": "machine1", "format": 1}
    header["same_command"] = two[0].request["command"]
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    supervisor = {"type": "supervisor", "t": 1.0, "pid": os.getpid(), "start": int(stat[19])}
    supervisor["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    supervisor["space"] = os.readlink("/proc/self/ns/pid")
    (ours / "events.jsonl").write_text(f"{json.dumps(header)}\n{json.dumps(supervisor)}\n")
    assert two[0].asks() == {"starter": "machine1", "job": "j1"}
    two[0].request["starter"] = "machine1"
    assert two[0].asks() == FREE


@pytest.mark.parametrize("damage", ["", "[", "{}", "[1]", '[["a", "b", Infinity, true, 1, 2]]', '[["a", "b"]]'])
def test_a_damaged_file_counts_for_nothing(tmp_path: Path, damage: str) -> None:
    (tmp_path / "file").write_text(damage)
    with open(tmp_path / "file") as file:
        assert _read_entries(file.fileno()) == []
