"""Hostfiles in three dialects, and --only/--skip among hosts and their slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cases import cluster_of, facts_of, of_role, plan_of

from clustertool.errors import ConfigError, UsageError
from clustertool.model.config.hostfile import choose, read_hostfile
from clustertool.model.config.hosts import Host, read_hosts

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
        (OPEN_MPI, [{"host": "node1", "slots": 2}, {"host": "ann@node2", "slots": 3}, {"host": "node3"}]),
        (DEEPSPEED, [{"host": "worker-1", "slots": 4}, {"host": "worker-2", "slots": 4}]),
        (HOROVOD, [{"host": "node1", "slots": 2}, {"host": "node2", "slots": 4}]),
        ("node[1-2] slots=8", [{"host": "node[1-2]", "slots": 8}]),
        ("node[1-2]:8", [{"host": "node[1-2]", "slots": 8}]),
        ("10.0.0.1:2\n10.0.0.11:3", [{"host": "10.0.0.1", "slots": 2}, {"host": "10.0.0.11", "slots": 3}]),
        (
            "fe80::1 slots=2\nann@[fe80::2]:3\n[fe80::3]",
            [
                {"host": "fe80::1", "slots": 2},
                {"host": "ann@[fe80::2]", "slots": 3},
                {"host": "[fe80::3]"},
            ],
        ),
        ("a\nb\na\na", [{"host": "a", "slots": 3}, {"host": "b"}]),  # one line a process, as PBS writes it
        ("a slots=2\nb:1\na slots=3 max_slots=9", [{"host": "a", "slots": 5}, {"host": "b", "slots": 1}]),
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
        ("a:x", "hf, line 1: slots 'x'"),
        ("a:", "hf, line 1: slots ':'"),
        ("a:10001", "hf, line 1: slots '10001'"),
        ("a b c", "hf, line 1: 'a b c'"),
        ("a slot=4", "hf, line 1: 'slot' is not known"),
        ("a max-slots=4 gpus=1", "hf, line 1: 'gpus' is not known"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hostfile(text, "hf")
    assert caught.value.what == what
    assert caught.value.fix


# -- choosing -----------------------------------------------------------------------------------------------------------

HOSTS = read_hosts(
    [
        {"host": "node[1-3]"},
        {"host": "gpu1", "devices": [0, 1, 2, 3]},
        {"host": "big", "nproc": 4},
        "twin:2201",
        "twin:2202",
    ]
)


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
    # only, skip -> (name, devices, slots, nproc)
    ("gpu1:0,2", "", [("gpu1", (0, 2), None, 2)]),
    ("gpu1:3", "", [("gpu1", (3,), None, 1)]),
    ("gpu1:1,3,node2", "", [("node2", None, None, None), ("gpu1", (1, 3), None, 2)]),
    ("gpu1:0@big:1,2", "", [("gpu1", (0,), None, 1), ("big", None, (1, 2), 2)]),
    ("gpu1:2,gpu1:0", "", [("gpu1", (0, 2), None, 2)]),
    ("gpu1:2,gpu1", "", [("gpu1", (0, 1, 2, 3), None, None)]),
    ("gpu1,big", "gpu1:0,1", [("gpu1", (2, 3), None, 2), ("big", None, None, 4)]),
    ("gpu1,big", "gpu1:0,1,2,3", [("big", None, None, 4)]),
    ("gpu1,big", "gpu1:0,gpu1", [("big", None, None, 4)]),
    ("big:0,2", "", [("big", None, (0, 2), 2)]),
    ("node1:5", "", [("node1", (5,), None, 1)]),
    ("node[1,3]:0,1", "", [("node1", (0, 1), None, 2), ("node3", (0, 1), None, 2)]),
    ("slots[1-2]:0,3", "", [("slots1", None, (0, 3), 2), ("slots2", None, (0, 3), 2)]),
    ("slots1,slots2", "slots[1-2]:1,2,3", [("slots1", None, (0,), 1), ("slots2", None, (0,), 1)]),
    ("ten:2222", "", [("ten", None, None, None)]),  # as HOSTS writes it
    ("::1", "", [("::1", None, None, None)]),
    ("[::1]:2200", "", [("::1", None, None, None)]),
    ("[::1]:1", "", [("::1", (1,), None, 1)]),
]


@pytest.mark.parametrize("only, skip, left", SLOTS)
def test_slots_are_devices_as_deepspeed_means_them(only: str, skip: str, left: list[tuple[str, Any, Any, Any]]) -> None:
    hosts = read_hosts(
        [
            {"host": "node[1-3]"},
            {"host": "gpu1", "devices": [0, 1, 2, 3]},
            {"host": "big", "nproc": 4},
            {"host": "slots[1-2]", "slots": 4},
            "ten:2222",
            "[::1]:2200",
        ]
    )
    found = choose(hosts, (only,), (skip,) if skip else ())
    assert [(host.name, host.devices, host.slots, host.nproc) for host in found] == left


FORMS = [
    "n1 slots=4\nn2 slots=2",
    "n1:4\nn2:2",
    "n1 slots=4 max-slots=8\nn2 slots=2 # Open MPI",
    "n1\nn2\n" * 2 + "n1\n" * 2,
]
# devices of a node, the slots that are taken -> the devices of each process
CARDS = [
    (8, "", [(0,), (1,), (2,), (3,)]),  # more cards than slots: as DeepSpeed, one each, the first ones
    (4, "", [(0,), (1,), (2,), (3,)]),
    (2, "", [(0,), (1,), (0,), (1,)]),  # fewer: shared in turns
    (0, "", [(), (), (), ()]),
    (8, "n1:1,3", [(1,), (3,)]),
    (2, "n1:1,3", [(1,), (1,)]),
]


@pytest.mark.parametrize("cards, only, each", CARDS)
@pytest.mark.parametrize("text", FORMS)
def test_a_slot_is_a_process_and_its_device(text: str, cards: int, only: str, each: list[tuple[int, ...]]) -> None:
    """All forms mean the same, whatever the nodes have."""
    cluster = cluster_of(read_hostfile(text, "hf"))
    if only:
        cluster = replace(cluster, hosts=choose(cluster.hosts, (only + ",n2",), ()))
    kind = {"device_kind": "gpu", "devices": tuple(range(cards))} if cards else {}
    made = plan_of(cluster, facts=facts_of(cluster, **kind))
    found = of_role(made, "trainer")
    assert [(process.node, process.devices) for process in found if process.node == 0] == [(0, cards) for cards in each]
    assert sum(process.node == 1 for process in found) == 2
    if cards:
        assert dict(found[-1].env)["CUDA_VISIBLE_DEVICES"] == "1"
        assert all(process.devices == (int(dict(process.env)["CUDA_VISIBLE_DEVICES"]),) for process in found)


def test_slots_of_a_hostfile_give_way_to_what_is_said_for_the_job() -> None:
    cluster = cluster_of(read_hostfile("n1 slots=4", "hf"))
    facts = facts_of(cluster, device_kind="gpu", devices=tuple(range(8)))
    made = plan_of(cluster, facts=facts, nproc_per_node="2")
    assert [process.devices for process in of_role(made, "trainer")] == [(0, 1), (2, 3)]
    made = plan_of(cluster, facts=facts, devices="6,7")
    assert [process.devices for process in of_role(made, "trainer")] == [(6,), (7,), (6,), (7,)]


@pytest.mark.parametrize("entry", [{"slots": 0}, {"slots": "x"}, {"slots": True}, {"slots": 2, "nproc": 2}])
def test_slots_in_hosts_are_checked(entry: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="slots"):
        read_hosts([{"host": "a", **entry}])


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
