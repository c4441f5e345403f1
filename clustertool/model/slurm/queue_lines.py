"""squeue and sinfo answer in formats of ours: one line for each job or step, one for each node and partition.

Run both with TIME_FORMAT of job_lines.py. squeue answers for all jobs of a user at once, but forgets a job soon after its end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Dict, List, Tuple

from clustertool.model.slurm.job_lines import RUNNING, SlurmJob, job_of

_MARK = "\x1f"  # between fields: a job's comment and name can have all signs that a user types
# squeue(1), --format: the names of job_lines.job_of().
_JOB = {
    "id": "%A",
    "state": "%T",
    "reason": "%r",
    "SubmitTime": "%V",
    "StartTime": "%S",
    "EndTime": "%e",
    "NodeList": "%N",
    "comment": "%k",
    "nodes": "%D",
    "name": "%j",
    "shown": "%i",  # 20_1 of an array, 30+1 of a heterogeneous job; else the id
}
_STEP = {"shown": "%i", "StartTime": "%S", "NodeList": "%N", "comment": "%j"}  # those that run
# sinfo(1), --Format. A field with a text behind it has no fixed width.
_NODE = ("NodeList", "StateLong", "CPUsState", "Memory", "Gres", "GresUsed", "PartitionName", "Reason")
_RUNS = {"state": RUNNING, "reason": ""}  # Slurm lists no other steps
_FLAGS = "*~#!%$@^-"  # behind a state; * is a node that does not respond

QUEUE = ("squeue", "--me", "--noheader", f"--format={_MARK.join(_JOB.values())}")
STEPS = ("squeue", "--me", "--steps", "--noheader", f"--format={_MARK.join(_STEP.values())}")
NODES = ("sinfo", "--Node", "--noheader", f"--Format={','.join(f'{name}:{_MARK}' for name in _NODE)}")


@dataclass(frozen=True)
class SlurmNode:
    """A node as Slurm knows it.

    state: in small letters, such as idle, mixed, allocated, drained, down. responds: whether slurmd answers. cpus, used_cpus:
    numbers. memory: MB. gpus, used_gpus: numbers by type, "" for GPUs without one. reason: why nothing starts there.
    """

    name: str
    state: str
    responds: bool
    partitions: Tuple[str, ...]
    cpus: int
    used_cpus: int
    memory: int
    gpus: Tuple[Tuple[str, int], ...] = ()
    used_gpus: Tuple[Tuple[str, int], ...] = ()
    reason: str = ""


def read_queue(text: str) -> List[SlurmJob]:
    """Parse the user's jobs in the answer of QUEUE. Lines that are not a job are left out."""
    lines = (line.split(_MARK) for line in text.splitlines())
    found = (dict(zip(_JOB, line)) for line in lines if len(line) == len(_JOB))
    return [job_of(job) for job in found if _is_number(job["id"])]


def read_steps(queue: str, steps: str) -> List[SlurmJob]:
    """Read the steps of the user's jobs in the answers of QUEUE and STEPS. Steps without a number are left out.

    squeue shows for a step no id of its job as SLURM_JOB_ID has it, but in an array and in a heterogeneous job the other name.
    """
    jobs = (dict(zip(_JOB, line.split(_MARK))) for line in queue.splitlines())
    known = [job for job in jobs if len(job) == len(_JOB) and _is_number(job["id"])]
    ids = {name: job["id"] for job in known for name in (job["id"], job["shown"])}
    found = []
    for line in steps.splitlines():
        values = dict(zip(_STEP, line.split(_MARK)))
        job, _, step = values["shown"].partition(".")
        if len(values) == len(_STEP) and job in ids and _is_number(step):
            found.append(job_of({**values, "id": ids[job], "step": step, "name": values["comment"], **_RUNS}))
    return found


def read_nodes(text: str) -> List[SlurmNode]:
    """Parse the nodes in the answer of NODES, each with all of its partitions. Other lines are left out.

    sinfo names the partitions of each node in an order of its own, so they are sorted: equal nodes are equal.
    """
    found: Dict[str, SlurmNode] = {}
    for line in text.splitlines():
        node = _node(line.split(_MARK)[:-1])
        if node is not None:
            first = found.setdefault(node.name, node)
            partitions = tuple(sorted({*first.partitions, *node.partitions}))
            found[node.name] = replace(first, partitions=partitions)
    return list(found.values())


def gpus_of(gres: str) -> Tuple[Tuple[str, int], ...]:
    """Parse "gpu:a100:2(S:0-1),gpu:1,craynetwork:4" to (("a100", 2), ("", 1))."""
    outside = re.sub(r"\([^)]*\)", "", gres)
    found = re.findall(r"(?:^|,)gpu(?::([^:,]+))?:([0-9]{1,6})(?=,|$)", outside)
    return tuple((kind, int(number)) for kind, number in found)


def _node(values: List[str]) -> SlurmNode | None:
    if len(values) != len(_NODE):
        return None
    name, state, cpus, memory, gres, used, partition, reason = map(str.strip, values)
    counts = re.fullmatch(r"([0-9]{1,9})/[0-9]+/[0-9]+/([0-9]{1,9})", cpus)  # allocated/idle/other/total
    if counts is None or not name:
        return None
    return SlurmNode(
        name=name,
        state=state.rstrip(_FLAGS),
        responds="*" not in state,
        partitions=(partition,),
        cpus=int(counts[2]),
        used_cpus=int(counts[1]),
        memory=int(memory) if _is_number(memory) else 0,
        gpus=gpus_of(gres),
        used_gpus=gpus_of(used),
        reason="" if reason == "none" else reason,
    )


def _is_number(text: str) -> bool:
    return bool(re.fullmatch("[0-9]{1,10}", text))
