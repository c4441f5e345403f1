"""This table has the reasons of pending jobs that do not go away by waiting: squeue(1), JOB REASON CODES."""

from __future__ import annotations

_MEANINGS = {
    "AccountNotAllowed": "its account may not use the partition",
    "BadConstraints": "no nodes have what it asks for",
    "DependencyNeverSatisfied": "a job that it depends on has not ended as it must",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its qos is not valid",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "it is held; scontrol release NUMBER releases it",
    "JobLaunchFailure": "a node could not start it: its folder may not be there",
    "PartitionConfig": "its partition does not allow what it asks for",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionNodeLimit": "it asks for more nodes than its partition has or allows",
    "PartitionTimeLimit": "its time is above the limit of its partition",
    "QOSNotAllowed": "its qos may not use the partition",
    "ReqNodeNotAvail": "a node of nodelist is down, reserved or in use",
}
_PER_JOB = ("PerJob", "PerJobLimit")  # QOSMaxCpuPerJobLimit and others: one job asks for too much


def explained(reason: str) -> str:
    """Explain a reason of squeue that stays until the job or the cluster is changed; return any other reason alone."""
    name = reason.split(",")[0]  # "ReqNodeNotAvail, UnavailableNodes:node1"
    meaning = _MEANINGS.get(name, "it asks for more than a job may have" if name.endswith(_PER_JOB) else "")
    return f"{reason}: {meaning}, so it does not start" if meaning else reason
