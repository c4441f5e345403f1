"""Ports: what was asked for is taken or refused with its holder, what was not is found free, and none is given twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from cases import IDENTITY, cluster_of, env_of, facts_of, hosts, job_of, of_role, one, plan_of

from clustertool.errors import PreflightError, Several, UsageError
from clustertool.model.facts import Facts
from clustertool.model.planning.plan import Plan, plan

LOOPBACK = ["127.0.0.2", "127.0.0.3"]


def ports_of(made: Plan, role: str) -> list[tuple[int, ...]]:
    return [process.ports for process in of_role(made, role)]


def busy(cluster: Any, *ports: int, machines: tuple[int, ...] = (), **each: Any) -> dict[int, Facts]:
    owner = tuple((port, f"nginx (pid {port}, user www)") for port in ports)
    return facts_of(cluster, machines, busy=frozenset(ports), listeners=owner, **each)


# -- what was asked for -------------------------------------------------------------------------------------------------


def test_one_port_on_two_addresses_of_a_machine_is_allowed_when_it_was_asked_for() -> None:
    cluster = cluster_of(LOOPBACK)
    facts = facts_of(cluster, (0, 0))
    made = plan_of(
        cluster, facts=facts, servers=("127.0.0.2:6170,127.0.0.3:6170",), workers=("127.0.0.2:6180", "127.0.0.3:6180")
    )
    assert [p.endpoint for p in of_role(made, "pserver")] == ["127.0.0.2:6170", "127.0.0.3:6170"]
    assert [p.endpoint for p in of_role(made, "trainer")] == ["127.0.0.2:6180", "127.0.0.3:6180"]
    collective = plan_of(cluster, facts=facts, workers=("127.0.0.2:6170,127.0.0.3:6170",))
    assert env_of(collective, "trainer", 1)["PADDLE_TRAINER_ENDPOINTS"] == "127.0.0.2:6170,127.0.0.3:6170"


SAME: list[tuple[list[Any], tuple[str, ...], tuple[str, ...]]] = [
    # HOSTS, --servers, --workers: one address and port in two spellings
    (["127.0.0.2"], ("127.0.0.2:6170",), ("127.0.0.2:6170",)),
    ([{"host": "node1", "address": "127.0.0.2"}], ("node1:6170,127.0.0.2:6170",), ()),
    ([{"host": "node1", "address": "127.0.0.2"}], ("node1:6170",), ("127.0.0.2:6170",)),
]


@pytest.mark.parametrize("entries, servers, workers", SAME)
def test_one_port_of_one_address_is_not_given_twice(
    entries: list[Any], servers: tuple[str, ...], workers: tuple[str, ...]
) -> None:
    with pytest.raises(PreflightError, match="port 6170 .* is given to two processes of this job"):
        plan_of(cluster_of(entries), servers=servers, workers=workers)


def test_two_entries_for_one_address_share_its_ports() -> None:
    cluster = cluster_of(["10.0.0.1:22", "10.0.0.1:2222"])
    made = plan_of(cluster, facts=facts_of(cluster, (0, 0)), nproc_per_node="2")
    assert len({process.endpoint for process in made.processes}) == 4


def test_endpoints_may_be_packed_closer_than_the_ports_of_a_pserver() -> None:
    """As people write it: a program that opens one port needs no room behind it."""
    made = plan_of(
        cluster_of(["10.0.0.1"]), servers=("10.0.0.1:6170,10.0.0.1:6171",), workers=("10.0.0.1:6172,10.0.0.1:6173",)
    )
    assert ports_of(made, "pserver") == [(6170,), (6171,)]
    assert ports_of(made, "trainer") == [(6172,), (6173,)]


def test_the_last_endpoint_keeps_its_room() -> None:
    made = plan_of(cluster_of(["10.0.0.1"]), servers=("10.0.0.1:6171,10.0.0.1:6170",))
    assert ports_of(made, "pserver") == [(6171, 6172), (6170,)]


def test_nothing_that_is_chosen_lies_in_the_room_of_an_endpoint_that_was_asked_for() -> None:
    cluster = cluster_of(["10.0.0.1"], PADDLE_PORTS_NUM=200, PADDLE_PORTS_NUM_FOR_SPARSE=100)
    found: set[int] = set()
    for start in range(10000, 32000, 500):  # wherever the search begins, some of these stand in its way
        made = plan_of(cluster, servers=(f"10.0.0.1:{start}",), worker_num="4")
        used = Counter(port for process in made.processes for port in process.ports)
        used.update(port for _, port in made.extra_ports)
        assert set(used.values()) == {1}
        found |= {port for process in of_role(made, "trainer") for port in process.ports}
    assert len(found) > 4


def test_a_busy_port_behind_an_endpoint_is_reported_before_anything_starts() -> None:
    cluster = cluster_of(["10.0.0.1"])
    with pytest.raises(PreflightError, match=r"port 7001 \(--servers\) is in use by nginx"):
        plan_of(cluster, facts=busy(cluster, 7001), servers=("10.0.0.1:7000",))


ASKED: list[tuple[dict[str, Any], dict[str, Any], int, str]] = [
    ({"PADDLE_PORT": 7164}, {"mode": "ps"}, 7165, "PADDLE_PORT"),
    ({"START_PORT": 6170}, {}, 6170, "START_PORT"),
    ({"START_PORT": 6170}, {}, 6171, "START_PORT"),
    ({"LEAD_PORT": 6160}, {}, 6160, "LEAD_PORT"),
    ({}, {"servers": ("10.0.0.1:7000",)}, 7000, "--servers"),
    ({}, {"workers": ("10.0.0.1:7000",)}, 7000, "--workers"),
    ({}, {"mode": "ps", "http_port": "8000"}, 8000, "--http-port"),
]


@pytest.mark.parametrize("keys, options, port, name", ASKED)
def test_a_port_that_was_asked_for_and_is_busy_is_refused_with_its_holder(
    keys: dict[str, Any], options: dict[str, Any], port: int, name: str
) -> None:
    cluster = cluster_of(["10.0.0.1"], **keys)
    with pytest.raises(PreflightError) as caught:
        plan_of(cluster, facts=busy(cluster, port), **options)
    assert caught.value.what == f"port {port} ({name}) is in use by nginx (pid {port}, user www)"
    assert (caught.value.node, caught.value.code) == ("10.0.0.1", 69)
    assert name in caught.value.fix


def test_an_unknown_holder_is_another_process() -> None:
    cluster = cluster_of(["10.0.0.1"], LEAD_PORT=6160)
    with pytest.raises(PreflightError, match="in use by another process"):
        plan_of(cluster, facts=facts_of(cluster, busy=frozenset([6160])))


def test_all_ports_that_are_taken_are_reported_at_once() -> None:
    cluster = cluster_of(hosts(2), START_PORT=6170)
    with pytest.raises(Several) as caught:
        plan_of(cluster, facts=busy(cluster, 6170))
    assert [error.node for error in caught.value.errors] == ["10.0.0.1", "10.0.0.2"]
    assert caught.value.code == 69


CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"LEAD_PORT": 6170, "START_PORT": 6170}, {}, 6170),
    ({"LEAD_PORT": 7165, "PADDLE_PORT": 7164}, {"mode": "ps"}, 7165),
    ({"LEAD_PORT": 7000}, {"workers": ("10.0.0.1:7000",)}, 7000),
    ({}, {"servers": ("10.0.0.1:7000",), "http_port": "7000"}, 7000),
]


@pytest.mark.parametrize("keys, options, port", CONTRADICTIONS)
def test_what_contradicts_itself_is_refused(keys: dict[str, Any], options: dict[str, Any], port: int) -> None:
    with pytest.raises(PreflightError, match=f"port {port} .* two processes"):
        plan_of(cluster_of(["10.0.0.1"], **keys), **options)


def test_on_one_machine_a_port_with_two_names_is_refused_on_two_addresses_too() -> None:
    """Only a list of endpoints says that each listens on its own address alone."""
    cluster = cluster_of([LOOPBACK[0], {"host": LOOPBACK[1], "roles": ["pserver"]}], LEAD_PORT=7164, PADDLE_PORT=7164)
    with pytest.raises(PreflightError, match="port 7164 .* two processes"):
        plan_of(cluster, facts=facts_of(cluster, (0, 0)), mode="ps", servers=(LOOPBACK[1],))
    assert plan_of(cluster, mode="ps", servers=(LOOPBACK[1],))


def test_counting_from_start_port_passes_over_ports_with_another_name() -> None:
    cluster = cluster_of(["10.0.0.1"], START_PORT=6170, LEAD_PORT=6171)
    made = plan_of(cluster, workers=("10.0.0.1,10.0.0.1:6172,10.0.0.1",))
    assert ports_of(made, "trainer") == [(6170,), (6172,), (6173,)]
    assert env_of(made, "trainer", 0)["MASTER_PORT"] == "6174"


@pytest.mark.parametrize(
    "keys, options",
    [
        ({"PADDLE_PORT": 65535}, {"mode": "ps"}),
        ({"START_PORT": 65535}, {}),
        ({"PADDLE_PORTS_NUM": 1000}, {"mode": "ps", "server_num": "100"}),
        ({}, {"servers": ("10.0.0.1:65535",)}),
    ],
)
def test_above_65535_there_is_no_port(keys: dict[str, Any], options: dict[str, Any]) -> None:
    with pytest.raises((PreflightError, Several), match="above 65535") as caught:
        plan_of(cluster_of(["10.0.0.1"], **keys), **options)
    assert caught.value.code == 69
    assert str(caught.value).count("above 65535") <= 2  # once for each port, not for each process that got none


# -- what was not asked for ---------------------------------------------------------------------------------------------


def test_the_default_port_moves_to_the_next_free_block_with_a_warning() -> None:
    cluster = cluster_of(hosts(2))
    facts = facts_of(cluster)
    facts[1] = busy(cluster, 7164, 7167)[1]
    made = plan_of(cluster, facts=facts, mode="ps", server_num="2")
    assert ports_of(made, "pserver") == [(7168, 7169), (7170, 7171), (7168, 7169), (7170, 7171)]
    assert list(made.warnings) == [
        "10.0.0.2: port 7164 (PADDLE_PORT) is in use by nginx (pid 7164, user www), pservers take 7168"
    ]
    assert (
        env_of(made, "trainer", 0)["PADDLE_PSERVERS_IP_PORT_LIST"]
        == "10.0.0.1:7168,10.0.0.1:7170,10.0.0.2:7168,10.0.0.2:7170"
    )
    assert env_of(made, "pserver", 2)["PADDLE_INIT_PORT"] == "7168"


# -- one port for all pservers, as Paddle v2 has it --------------------------------------------------------------------------

V2: dict[str, Any] = {"v2": True, "files": ()}


def test_the_block_is_free_on_all_nodes() -> None:
    """Trainers of Paddle v2 get one port: PADDLE_INIT_PORT and --port are that of each pserver."""
    cluster = cluster_of(hosts(3))
    facts = facts_of(cluster)
    facts[1], facts[2] = busy(cluster, 7165)[1], busy(cluster, 7166)[2]
    for options in ({"mode": "ps"}, V2):
        made = plan_of(cluster, facts=facts, **options)
        assert ports_of(made, "pserver") == [(7168, 7169)] * 3
        assert {dict(process.env)["PADDLE_INIT_PORT"] for process in made.processes} == {"7168"}
    assert [text for text in one(made, "trainer", 2).argv if text.startswith("--port=")] == ["--port=7168"]
    with pytest.raises(PreflightError, match="7165 .* in use"):
        plan_of(cluster_of(hosts(3), PADDLE_PORT=7164), facts=facts, mode="ps")


def test_nodes_of_one_machine_have_one_port_on_their_own_addresses() -> None:
    cluster = cluster_of([*LOOPBACK, "10.0.0.1"])
    facts = facts_of(cluster, (0, 0, 1))
    made = plan_of(cluster, facts=facts, **V2)
    assert ports_of(made, "pserver") == [(7164, 7165)] * 3
    assert env_of(made, "trainer", 0)["PADDLE_INIT_PSERVERS"] == "127.0.0.2,127.0.0.3,10.0.0.1"
    (warning,) = made.warnings
    assert warning.startswith("127.0.0.2, 127.0.0.3 are one machine") and "--nics=eth0" in warning
    asked = cluster_of([*LOOPBACK, "10.0.0.1"], PADDLE_PORT=7200)
    assert ports_of(plan_of(asked, facts=facts, mode="ps"), "pserver") == [(7200, 7201)] * 3
    program = replace(job_of(cluster, mode="ps"), one_port=True)
    assert ports_of(plan(cluster, program, facts, IDENTITY, ("train.py",)), "pserver") == [(7164, 7165)] * 3
    # a program that may listen on all addresses: ports of its own on one machine
    assert ports_of(plan_of(cluster, facts=facts, mode="ps"), "pserver") == [(7164, 7165), (7166, 7167), (7164, 7165)]


@pytest.mark.parametrize(
    "entries, options, what",
    [
        (["10.0.0.1"], {"server_num": "2"}, "2 pservers have the address 10.0.0.1"),
        (["10.0.0.1:22", "10.0.0.1:2222"], {}, "2 pservers have the address 10.0.0.1"),
        (["10.0.0.1", "10.0.0.2"], {"servers": ("10.0.0.1:7000,10.0.0.2:7001",)}, "names the ports 7000, 7001"),
        (["10.0.0.1", "10.0.0.2"], {"servers": ("10.0.0.1:7000,10.0.0.2",)}, "names the ports none, 7000"),
    ],
)
def test_pservers_that_cannot_have_one_port_are_refused(entries: list[str], options: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        plan_of(cluster_of(entries), **V2, **options)
    assert caught.value.fix
    toml = {"trainer": {"command": ["prog", "--port={{pserver_port}"]}}  # an escaped brace: no port is filled in
    assert plan_of(cluster_of(entries), toml, mode="ps", **options)


def test_a_later_block_that_is_busy_moves_alone() -> None:
    cluster = cluster_of(["10.0.0.1"])
    made = plan_of(cluster, facts=busy(cluster, 7166), mode="ps", server_num="3")
    assert ports_of(made, "pserver") == [(7164, 7165), (7168, 7169), (7170, 7171)]
    assert len(made.warnings) == 1
    assert "port 7166" in made.warnings[0]


def test_passing_over_ports_of_this_job_is_not_worth_a_warning() -> None:
    made = plan_of(cluster_of(["10.0.0.1"]), servers=("10.0.0.1,10.0.0.1:7164",))
    assert ports_of(made, "pserver") == [(7166, 7167), (7164, 7165)]
    assert not made.warnings


def test_the_same_port_in_conf_as_a_demand_does_not_move() -> None:
    cluster = cluster_of(["10.0.0.1"], PADDLE_PORT="7164")
    with pytest.raises(PreflightError, match="7164 .* in use by nginx"):
        plan_of(cluster, facts=busy(cluster, 7164), mode="ps")
    assert not plan_of(cluster, mode="ps").warnings


def test_free_ports_lie_below_the_range_of_the_kernel_and_are_not_busy() -> None:
    cluster = cluster_of(["10.0.0.1"])
    reserved = frozenset(range(10000, 32768)) - frozenset(range(20000, 20010))
    made = plan_of(cluster, facts=facts_of(cluster, busy=reserved), nproc_per_node="8")
    used = {port for process in made.processes for port in process.ports} | {port for _, port in made.extra_ports}
    assert used == set(range(20000, 20010))


@pytest.mark.parametrize(
    "ephemeral, low, high",
    [
        ((32768, 60999), 10000, 32767),
        ((10500, 60999), 1024, 10499),
        ((1500, 60999), 61000, 65535),
        ((1024, 65535), 1024, 65535),
    ],
)
def test_where_free_ports_are_searched(ephemeral: tuple[int, int], low: int, high: int) -> None:
    cluster = cluster_of(["10.0.0.1"])
    made = plan_of(cluster, facts=facts_of(cluster, ephemeral=ephemeral), nproc_per_node="16")
    assert all(low <= port <= high for process in made.processes for port in process.ports)


def test_a_machine_without_a_free_port_is_reported() -> None:
    cluster = cluster_of(["10.0.0.1"])
    with pytest.raises(PreflightError, match="no free port is left") as caught:
        plan_of(cluster, facts=facts_of(cluster, busy=frozenset(range(10000, 32768))))
    assert caught.value.node == "10.0.0.1"


def test_default_ports_of_pservers_are_left_to_pservers() -> None:
    cluster = cluster_of(["10.0.0.1"])
    facts = facts_of(cluster, ephemeral=(9000, 60999))  # so that the search covers 7164
    for job_id in range(300):
        made = plan(cluster, job_of(cluster), facts, replace(IDENTITY, job_id=f"j{job_id}"), ("train.py",))
        assert not {port for p in made.processes for port in p.ports} & set(range(7164, 7164 + 64))


def test_two_jobs_begin_to_search_at_different_places() -> None:
    cluster = cluster_of(["10.0.0.1"])
    jobs = [
        plan(cluster, job_of(cluster), facts_of(cluster), replace(IDENTITY, job_id=f"j{n}"), ("train.py",))
        for n in range(50)
    ]
    assert len({made.coordinator for made in jobs}) > 40
