"""Hostfiles in three dialects, and --only/--skip among hosts and their slots."""

from __future__ import annotations

from typing import Any

import pytest

from clustertool.errors import ConfigError, UsageError
from clustertool.plan.hostfile import choose, read_hostfile
from clustertool.plan.hosts import Host, read_hosts

OPEN_MPI = """
# two machines
node1 slots=2 max-slots=4
ann@node2   slots = 3   # the big one
node3
"""
DEEPSPEED = "worker-1 slots=4\nworker-2 slots=4\n"
HOROVOD = "node1:2\r\nnode2:4\r\n"


@pytest.mark.parametrize(
    "text, entries",
    [
        (OPEN_MPI, [{"host": "node1", "nproc": 2}, {"host": "ann@node2", "nproc": 3}, {"host": "node3"}]),
        (DEEPSPEED, [{"host": "worker-1", "nproc": 4}, {"host": "worker-2", "nproc": 4}]),
        (HOROVOD, [{"host": "node1", "nproc": 2}, {"host": "node2", "nproc": 4}]),
        ("node[1-2] slots=8", [{"host": "node[1-2]", "nproc": 8}]),
    ],
)
def test_dialects(text: str, entries: list[dict[str, Any]]) -> None:
    assert read_hostfile(text, "hf") == entries
    assert read_hosts(read_hostfile(text, "hf"))


@pytest.mark.parametrize(
    "text, what",
    [
        ("", "hf names no host"),
        ("# nothing\n\n", "hf names no host"),
        ("a\nb slots=x\n", "hf, line 2: slots 'x'"),
        ("a slots=0", "hf, line 1: slots '0'"),
        ("a slots=\u00b2", "hf, line 1: slots '\u00b2'"),
        ("a:0", "hf, line 1: slots '0'"),
        ("a slots", "hf, line 1: 'a slots'"),
        ("a:x", "hf, line 1: 'a:x'"),
        ("a b c", "hf, line 1: 'a b c'"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hostfile(text, "hf")
    assert caught.value.what == what
    assert caught.value.fix


# -- choosing -----------------------------------------------------------------------------------------------------------

HOSTS = read_hosts([
    {"host": "node[1-3]"}, {"host": "gpu1", "devices": [0, 1, 2, 3]}, {"host": "big", "nproc": 4}, "twin:2201", "twin:2202",
])  # fmt: skip


def chosen(only: str = "", skip: str = "", hosts: tuple[Host, ...] = HOSTS) -> list[str]:
    found = choose(hosts, (only,) if only else (), (skip,) if skip else ())
    assert [host.index for host in found] == list(range(len(found)))
    return [host.name for host in found]


ALL = ["node1", "node2", "node3", "gpu1", "big", "twin:2201", "twin:2202"]


@pytest.mark.parametrize(
    "only, skip, names",
    [
        ("", "", ALL),
        ("node1", "", ["node1"]),
        ("node3,node1", "", ["node1", "node3"]),
        ("node[1-2],big", "", ["node1", "node2", "big"]),
        ("node[1,3]", "", ["node1", "node3"]),
        ("node1@big", "", ["node1", "big"]),
        ("", "node[1-3]", ALL[3:]),
        ("node[1-3]", "node2", ["node1", "node3"]),
        ("twin:2201", "", ["twin"]),
        ("twin", "", ["twin:2201", "twin:2202"]),
        ("", "twin:2202", [*ALL[:5], "twin"]),
    ],
)
def test_hosts_are_chosen_by_name_in_their_own_order_and_numbered_anew(only: str, skip: str, names: list[str]) -> None:
    assert chosen(only, skip) == names


def test_words_may_come_one_by_one() -> None:
    assert [host.name for host in choose(HOSTS, ("node1", "node2,big"), ("node2",))] == ["node1", "big"]


SLOTS = [
    # only, skip -> (name, devices, nproc)
    ("gpu1:0,2", "", [("gpu1", (0, 2), 2)]),
    ("gpu1:3", "", [("gpu1", (3,), 1)]),
    ("gpu1:1,3,node2", "", [("node2", None, None), ("gpu1", (1, 3), 2)]),
    ("gpu1:0@big:1,2", "", [("gpu1", (0,), 1), ("big", (1, 2), 2)]),
    ("gpu1,big", "gpu1:0,1", [("gpu1", (2, 3), 2), ("big", None, 4)]),
    ("gpu1,big", "gpu1:0,1,2,3", [("big", None, 4)]),
    ("big:0,2", "", [("big", (0, 2), 2)]),
    ("node1:5", "", [("node1", (5,), 1)]),
]


@pytest.mark.parametrize("only, skip, left", SLOTS)
def test_slots_are_devices_as_deepspeed_means_them(only: str, skip: str, left: list[tuple[str, Any, Any]]) -> None:
    found = choose(HOSTS, (only,), (skip,) if skip else ())
    assert [(host.name, host.devices, host.nproc) for host in found] == left


@pytest.mark.parametrize(
    "only, skip, what",
    [
        ("node9", "", "'node9' names no host"),
        ("node", "", "'node' names no host"),
        ("", "nod1", "'nod1' names no host"),
        ("node1", "node1", "leave no host"),
        ("gpu1", "gpu1:0,1,2,3", "leave no host"),
        ("gpu1:7", "", "gpu1 has no slot 7"),
        ("gpu1", "gpu1:0,9", "gpu1 has no slot 9"),
        ("big:4", "", "big has no slot 4"),
        ("", "node1:0", "its slots are not known"),
        ("node[3-1]", "", "runs backwards"),
        ("node[1-", "", "names no host"),
        ("gpu1:x", "", "'gpu1:x' names no host"),
    ],
)
def test_what_names_nobody_is_wrong_usage(only: str, skip: str, what: str) -> None:
    with pytest.raises(UsageError, match=what.replace("[", "\\[")) as caught:
        chosen(only, skip)
    assert caught.value.fix
