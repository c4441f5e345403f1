"""Machines that join a job and are one machine: each device belongs to one of them."""

from __future__ import annotations

import pytest
from cases import facts_of

from clustertool.errors import PreflightError
from clustertool.model.config.cluster import read_cluster
from clustertool.model.config.job import Options, read_job
from clustertool.model.facts import Identity
from clustertool.model.finding import Seen
from clustertool.model.joining.join_file import JoinFile, MeetingPoint, OwnSettings
from clustertool.model.joining.join_plan import Arrival, cluster_of, plan_of
from clustertool.model.planning.plan import Plan


def planned(owns: list[OwnSettings], addresses: list[str]) -> Plan:
    cluster = read_cluster({"HOSTS": ["10.0.0.1"]})
    job = read_job(cluster, {"trainer": {"command": ["./prog"]}}, Options())
    join = JoinFile("1", "0" * 32, Identity("J1", token="t"), cluster, job, 2, MeetingPoint("10.0.0.1", 29500))
    arrivals = [
        Arrival("box", address, own, member=node)
        for node, (own, address) in enumerate(zip(owns, addresses, strict=True))
    ]
    whole = cluster_of(join, arrivals, 29500)
    facts = facts_of(whole, (0, 0), devices=(0, 1), device_kind="gpu", disk_free=1 << 40)
    return plan_of(join, whole, arrivals, facts, Seen())


def test_a_command_typed_twice_on_one_machine_needs_devices_of_its_own() -> None:
    with pytest.raises(PreflightError, match="box#1: is the same machine as box#0, and gpu 0,1 would"):
        planned([OwnSettings()] * 2, ["10.0.0.1", "10.0.0.1"])
    made = planned([OwnSettings(devices=(0,)), OwnSettings(devices=(1,))], ["10.0.0.1", "10.0.0.1"])
    assert [process.devices for process in made.processes] == [(0,), (1,)]


def test_machines_that_meet_on_the_loopback_or_have_one_name_in_hosts_share_devices() -> None:
    twice = [OwnSettings(entry="@a:0"), OwnSettings(entry="@a:0#1", twin=1)]
    for owns, addresses in (([OwnSettings()] * 2, ["127.0.0.1"] * 2), (twice, ["10.0.0.1"] * 2)):
        assert any("share gpu 0,1" in one for one in planned(owns, addresses).warnings)
