"""Hostfiles in three dialects, and --only/--skip among hosts and their slots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import cluster_of, facts_of, of_role, plan_of

from clustertool.actions import load_config
from clustertool.errors import ConfigError, UsageError
from clustertool.model.config.hostfile import (
    choose_hosts,
    entries_for,
    hosts_of,
    hosts_of_only,
    is_host_list,
    read_host_list,
    read_hostfile,
    share_out,
)
from clustertool.model.config.hosts import Host, read_hosts
from clustertool.ssh import dial
from clustertool.ssh.settings import settings

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
        ("a\nb slots=x\n", "hf, line 2: slots 'x' is not valid"),
        ("a slots=0", "hf, line 1: slots '0' is not valid"),
        ("a slots=\u00b2", "hf, line 1: slots '\u00b2' is not valid"),
        ("a:0", "hf, line 1: slots '0' is not valid"),
        ("a slots", "hf, line 1: 'slots' has no value in 'a slots'"),
        ("a:x", "hf, line 1: slots 'x' is not valid"),
        ("a:", "hf, line 1: slots ':' is not valid"),
        ("a:10001", "hf, line 1: slots '10001' is not valid"),
        ("a b c", "hf, line 1: 'b' has no value in 'a b c'"),
        ("a slot=4", "hf, line 1: 'slot' is not known"),
        ("a max-slots=4 gpus=1", "hf, line 1: 'gpus' is not known"),
    ],
)
def test_an_error_is_reported_with_its_line(text: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hostfile(text, "hf")
    assert caught.value.what == what
    assert caught.value.fix


def test_a_hostfile_of_windows_has_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "hf").write_bytes(b"\xef\xbb\xbfnode1 slots=2\r\nnode2\r\n")
    assert [(host.name, host.nproc) for host in load_config._hosts_of_file(str(tmp_path / "hf"))] == [
        ("node1", 2),
        ("node2", None),
    ]


# -- -H and -np -----------------------------------------------------------------------------------------------------------


def shared_out(hosts: str, total: int, entries: Any = ()) -> list[tuple[str, int]]:
    """Name and number of trainers of each node that has some."""
    asked = hosts_of(read_host_list(hosts), "-H") if hosts else read_hosts(entries)
    found = share_out(asked, total) if total else asked
    assert [host.index for host in found] == list(range(len(found)))
    made = plan_of(replace(cluster_of(["x"]), hosts=found), {"trainer": {"per_node": 7}}, host_counts=True)
    trainers = [process.node for process in of_role(made, "trainer")]
    assert trainers == sorted(trainers)
    return [(host.name, trainers.count(host.index)) for host in found]


@pytest.mark.parametrize(
    "hosts, total, each",
    [
        ("a:2,b:2", 4, [("a", 2), ("b", 2)]),
        ("a:2,b:2", 3, [("a", 2), ("b", 1)]),
        ("a:2,b:2", 2, [("a", 2)]),
        ("a:2,b:2", 0, [("a", 2), ("b", 2)]),
        ("b:1 , a:3", 0, [("b", 1), ("a", 3)]),
        ("a,b", 5, [("a", 3), ("b", 2)]),
        ("a,b,c", 2, [("a", 1), ("b", 1)]),
        ("a:2,b", 3, [("a", 2), ("b", 1)]),
        ("a,a,b", 3, [("a", 2), ("b", 1)]),  # named again: a slot each
        ("n[1-4/2]:2", 3, [("n1", 2), ("n3", 1)]),
        ("ann@n[1,3]:2,[fe80::1]:1", 0, [("n1", 2), ("n3", 2), ("fe80::1", 1)]),
    ],
)
def test_a_total_fills_the_slots(hosts: str, total: int, each: list[tuple[str, int]]) -> None:
    assert shared_out(hosts, total) == each


def test_a_total_has_priority_over_numbers_of_conf_py() -> None:
    entries = [{"host": "a", "roles": {"trainer": 3, "pserver": 2}}, {"host": "b", "nproc": 8}]
    assert shared_out("", 4, entries) == [("a", 2), ("b", 2)]
    assert share_out(read_hosts(entries), 4)[0].count("pserver") == 2
    assert shared_out("", 4, [{"host": "a", "nproc": 3}, {"host": "b", "nproc": 8}]) == [("a", 3), ("b", 1)]


def test_more_trainers_than_slots_are_refused() -> None:
    with pytest.raises(UsageError, match="-np 5: the hosts have 4 slots"):
        shared_out("a:2,b:2", 5)
    with pytest.raises(UsageError, match="-np 4: the hosts have 2 slots"):
        shared_out("a:1,b", 4)


@pytest.mark.parametrize("hosts", ["", ",", "a:x", "a:0", "a b", "a:2 gpus=1", "a b=1"])
def test_a_list_of_hosts_that_is_not_right(hosts: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_host_list(hosts)
    assert caught.value.what.startswith("-H") and "line" not in caught.value.what


def test_slots_of_a_host_of_conf_py_are_its_first_devices() -> None:
    known = read_hosts([{"host": "ann@a:2200", "address": "10.0.0.1", "devices": [4, 5, 6]}, "b"])
    found = entries_for(known, hosts_of(read_host_list("10.0.0.1:2,c"), "-H"))
    assert [(host.entry, host.devices, host.slots) for host in found] == [
        ("ann@a:2200", (4, 5), (0, 1)),
        ("@c:0", None, None),
    ]
    cluster = replace(cluster_of(["x"]), hosts=hosts_of(read_host_list("n1:2,n2:3"), "-H"))
    made = plan_of(cluster, facts=facts_of(cluster, device_kind="gpu", devices=tuple(range(8))))
    assert [process.devices for process in of_role(made, "trainer")] == [(0,), (1,), (0,), (1,), (2,)]


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
    found = choose_hosts(hosts, (only,) if only else (), (skip,) if skip else ())
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


def test_arguments_may_come_one_by_one() -> None:
    assert [host.name for host in choose_hosts(HOSTS, ("node1", "node2,big"), ("node2",))] == ["node1", "big"]


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
    found = choose_hosts(hosts, (only,), (skip,) if skip else ())
    assert [(host.name, host.devices, host.slots, host.nproc) for host in found] == left


def test_hosts_that_items_with_slots_name() -> None:
    assert hosts_of_only(("a:0,1@b", "node[1,3]:2", "[::1]:0", "::1", "a")) == ("a", "b", "node[1,3]", "[::1]", "::1")


def test_what_is_a_list_of_hosts() -> None:
    assert all(map(is_host_list, ("a,b", "a:4", "[fe80::1]:2", "ann@a:2", "node[1,3]:2")))
    assert not any(map(is_host_list, ("a", "10.0.0.1", "fe80::1", "node[1,3]", "fe80::1%eth0")))


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
        cluster = replace(cluster, hosts=choose_hosts(cluster.hosts, (only + ",n2",), ()))
    kind = {"device_kind": "gpu", "devices": tuple(range(cards))} if cards else {}
    made = plan_of(cluster, facts=facts_of(cluster, **kind))
    found = of_role(made, "trainer")
    assert [(process.node, process.devices) for process in found if process.node == 0] == [(0, cards) for cards in each]
    assert sum(process.node == 1 for process in found) == 2
    if cards:
        for env in (dict(process.env) for process in found if process.node == 1):
            seen = env["CUDA_VISIBLE_DEVICES"].split(",")
            assert seen[int(env["FLAGS_selected_gpus"])] == env["LOCAL_RANK"]


def test_slots_of_a_hostfile_give_way_to_settings_of_the_job() -> None:
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
        ("gpu1:1@2", "", "'2' names no host"),  # not slot 2 of gpu1
        ("", "node1@gpu1:1@2", "'2' names no host"),
    ],
)
def test_what_names_no_rank_is_wrong_usage(only: str, skip: str, what: str) -> None:
    with pytest.raises(UsageError, match=what.replace("[", "\\[")) as caught:
        chosen(only, skip)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("bad;name slots=2", "'bad;name' is no host name"),
        ("a$b@node:2", "node"),
        ("10.0.0:2", "'10.0.0' is no host name"),
        ("node[3-1]", "node[3-1]"),
        ("[fe80::1", "not closed"),
        ("-x slots=1", "'-x' is no host name"),
    ],
)
def test_an_error_names_the_line_of_the_hostfile(tmp_path: Path, line: str, wrong: str) -> None:
    """And not HOSTS of conf.py, which has nothing to do with it."""
    path = tmp_path / "hosts.txt"
    path.write_text(f"# mine\nok-1 slots=1\n{line}\n")
    if "$" in line:  # which a user name may have
        assert load_config._hosts_of_file(str(path))[1].listed == str(path)
        return
    with pytest.raises(ConfigError) as caught:
        load_config._hosts_of_file(str(path))
    assert caught.value.what.startswith(f"{path}, line 3: ") and wrong in caught.value.what
    assert "HOSTS" not in str(caught.value) and "dict" not in str(caught.value)


@pytest.mark.parametrize("option", ["--ips", "-H", "--include"])
def test_errors_of_options_name_the_option(option: str) -> None:
    for listed in (("bad;name",), read_host_list("ok:2") + ({"host": "bad;name", "slots": 2},)):
        with pytest.raises(UsageError, match=f"^{option} has .*: 'bad;name' is no host name") as caught:
            hosts_of(listed, option)
        assert "HOSTS" not in str(caught.value) and "{" not in caught.value.what
    assert [host.listed for host in hosts_of(("a", "b"), option)] == [option] * 2


def test_later_errors_name_what_lists_the_host() -> None:
    """Of a connection, of an endpoint, of slots."""
    hosts = hosts_of(("10.0.0.1", "10.0.0.2"), "--ips")
    found = settings(hosts[0], replace(cluster_of(["10.0.0.1"]), hosts=hosts, ssh_config="none"))
    error = dial._unreachable_error(replace(found, port=1), ConnectionRefusedError())
    assert error.fix == "start sshd there, or correct the port in --ips"
    with pytest.raises(UsageError) as caught:
        choose_hosts(hosts, (), ("10.0.0.1:1",))
    assert caught.value.fix == "give slots in --ips"
