"""Short ways to make the inputs of a plan. Facts say by default that every host is a machine of its own, without devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from clustertool.model.config.cluster import Cluster, read_cluster
from clustertool.model.config.job import JobSpec, Options, read_job
from clustertool.model.facts import Facts, Identity
from clustertool.model.planning.plan import Plan, PlannedProcess, plan

IDENTITY = Identity("20260102-030405-abcd", 1700000000.0, "ann", "the-token", "the-certificate", "the-key")
FILES = ("train.py",)


def hosts(count: int) -> list[str]:
    """10.0.0.1, 10.0.0.2 ..."""
    return [f"10.0.0.{index + 1}" for index in range(count)]


def cluster_of(entries: Sequence[object], **keys: object) -> Cluster:
    return read_cluster({"HOSTS": list(entries), **keys})


def facts_of(cluster: Cluster, machines: Sequence[int] = (), **each: Any) -> dict[int, Facts]:
    """What probes would answer; `machines`: node -> machine, `each`: fields that are the same on all nodes."""
    return {
        host.index: replace(
            Facts(
                node=host.index,
                hostname=f"box{machine}",
                address=host.address or host.host,
                boot_id=f"boot{machine}",
                root="/jobs",
                root_id=f"root{host.index}",
                home="/home/ann",
                nic="eth0",
            ),
            **each,
        )
        for host in cluster.hosts
        for machine in [machines[host.index] if machines else host.index]
    }


def job_of(cluster: Cluster, toml: Mapping[str, Any] | None = None, **options: Any) -> JobSpec:
    return read_job(cluster, toml or {}, Options(**options))


def plan_of(
    cluster: Cluster,
    toml: Mapping[str, Any] | None = None,
    facts: Mapping[int, Facts] | None = None,
    files: Sequence[str] = FILES,
    passed: Sequence[tuple[str, str]] = (),
    **options: Any,
) -> Plan:
    return plan(cluster, job_of(cluster, toml, **options), facts or facts_of(cluster), IDENTITY, files, tuple(passed))


def of_role(made: Plan, role: str) -> list[PlannedProcess]:
    """The processes of a role in rank order."""
    return sorted((process for process in made.processes if process.role == role), key=lambda process: process.rank)


def one(made: Plan, role: str, rank: int) -> PlannedProcess:
    return of_role(made, role)[rank]


def env_of(made: Plan, role: str, rank: int) -> dict[str, str]:
    return dict(one(made, role, rank).env)
