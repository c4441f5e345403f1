"""This module reads the limits of partitions (`scontrol -o show partition`), and finds what of a job is beyond them.

sbatch takes such a job (EnforcePartLimits=NO, the default), and it stays in the queue.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Dict, List, Sequence, Tuple

from clustertool.model.quantities import human_seconds
from clustertool.model.slurm.slurm_settings import SlurmSettings
from clustertool.model.slurm.slurm_times import UNLIMITED, limit_seconds

SHOW_PARTITIONS = ("scontrol", "--oneliner", "show", "partition")


@dataclass(frozen=True)
class SlurmPartition:
    """One partition of Slurm, with its limits.

    longest: the longest time of a job, in seconds. accounts, qos: those that may use it; (): all. barred_accounts, barred_qos:
    those that may not.
    """

    name: str
    default: bool
    state: str
    longest: float
    fewest_nodes: int
    most_nodes: float
    accounts: Tuple[str, ...]
    qos: Tuple[str, ...]
    barred_accounts: Tuple[str, ...]
    barred_qos: Tuple[str, ...]


def read_partitions(text: str) -> List[SlurmPartition]:
    """Parse the output of SHOW_PARTITIONS.

    Lines that are no partition are left out; a limit that cannot be read counts as none.
    """
    lines = (dict(re.findall(r"(?:^| )(\w+)=(\S*)", line)) for line in text.splitlines())
    return [_partition_of(fields) for fields in lines if fields.get("PartitionName")]


def _partition_of(fields: Dict[str, str]) -> SlurmPartition:
    """Build a partition from the texts of its fields."""
    fewest, most = (fields.get(name, "") for name in ("MinNodes", "MaxNodes"))
    longest = limit_seconds(fields.get("MaxTime", ""))
    return SlurmPartition(
        name=fields["PartitionName"],
        default=fields.get("Default") == "YES",
        state=fields.get("State", ""),
        longest=UNLIMITED if longest is None else longest,
        fewest_nodes=int(fewest) if re.fullmatch("[0-9]{1,9}", fewest) else 0,
        most_nodes=int(most) if re.fullmatch("[0-9]{1,9}", most) else math.inf,
        accounts=_listed_names(fields.get("AllowAccounts", "")),
        qos=_listed_names(fields.get("AllowQos", "")),
        barred_accounts=_listed_names(fields.get("DenyAccounts", "")),
        barred_qos=_listed_names(fields.get("DenyQos", "")),
    )


def _listed_names(text: str) -> Tuple[str, ...]:
    """Split a list of names; () for a text that stands for all or none."""
    return () if text in ("", "ALL", "(null)", "N/A") else tuple(text.split(","))


def limits_exceeded(settings: SlurmSettings, partitions: Sequence[SlurmPartition]) -> List[str]:
    """List the limits that keep a job with these settings from starting in each partition that it names, or in the default one.

    [] if it can start in one of them, or if Slurm has none of them: sbatch reports that.
    """
    named = settings.partition.split(",") if settings.partition else []
    asked = [one for one in partitions if (one.name in named if named else one.default)]
    reasons = [_exceeded(settings, one) for one in asked]
    return [text for texts in reasons for text in texts] if all(reasons) else []


def _exceeded(settings: SlurmSettings, partition: SlurmPartition) -> List[str]:
    """List, as texts, why a job with these settings cannot start in a partition: its state, limits, accounts and qos."""
    found, nodes = [], settings.node_count
    seconds = (limit_seconds(settings.time) or UNLIMITED) if settings.time else None  # 0 is none for sbatch
    if partition.state not in ("", "UP"):
        found.append(f"it is {partition.state}")
    if seconds is not None and seconds > partition.longest:
        asked = "no limit" if seconds == UNLIMITED else human_seconds(seconds)
        found.append(f"its longest time is {human_seconds(partition.longest)}, not {asked}")
    if nodes > partition.most_nodes:
        found.append(f"a job has at most {partition.most_nodes:g} of its nodes, not {nodes}")
    if nodes < partition.fewest_nodes:
        found.append(f"a job has at least {partition.fewest_nodes} of its nodes, not {nodes}")
    for name, value, allowed, barred in (
        ("account", settings.account, partition.accounts, partition.barred_accounts),
        ("qos", settings.qos, partition.qos, partition.barred_qos),
    ):
        if value and ((allowed and value not in allowed) or value in barred):
            found.append(f"the {name} {value} may not use it")
    return [f"partition {partition.name}: {text}" for text in found]
