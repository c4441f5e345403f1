"""This module names the states of jobs, ranks, nodes and stops. JSON answers and records contain their values.

Apart from state.py because supervisors need these names and nothing else of that file.
"""

from __future__ import annotations

from clustertool.model.name_enum import Name


class JobState(Name):
    """The state of a job. QUEUED: no node has a record of it. STARTING: no rank has started. The last five: its outcome.

    LOST also stands for a job without an outcome if no supervisor lives. NEXT_EPOCH is the result of an epoch of an elastic
    job for its members, which go on. It is neither a state nor an outcome of a job.
    """

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    UNKNOWN = "unknown"
    NEXT_EPOCH = "next epoch"
    LOST = "lost"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    TIMEOUT = "timeout"


OUTCOMES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.LOST, JobState.STOPPED, JobState.TIMEOUT})


class StartReason(Name):
    """Why a job is STARTING. PLACED: no supervisor has started. JOINING: supervisors run, and no rank has started."""

    NONE = ""
    PLACED = "placed"
    JOINING = "joining"


class RankState(Name):
    """What a rank does, or how it ended. LOST: with its node. NOT_STARTED: its node ended before it was started."""

    WAITING = "waiting"
    RUNNING = "running"
    FROZEN = "frozen"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"
    UNKNOWN = "unknown"
    NOT_STARTED = "not started"

    @property
    def alive(self) -> bool:
        """Whether its process lives."""
        return self in (RankState.RUNNING, RankState.FROZEN)


class NodeState(Name):
    """What a node's part of a job does. LOST: the coordinator gave the node up, or its supervisor is gone."""

    UNKNOWN = "unknown"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"
    LOST = "lost"


class NodeCause(Name):
    """Why a node is LOST or UNKNOWN, or what else is wrong there."""

    NONE = "none"
    UNKNOWN = "unknown"  # the state of its processes is not known
    DISK_FULL = "disk full"
    GIVEN_UP = "given up"  # by the coordinator
    NEVER_CONNECTED = "never connected"  # to the coordinator
    SUPERVISOR_LOST = "supervisor lost"  # as its guard has recorded
    SUPERVISOR_GONE = "supervisor gone"  # without a record
    ENGINE = "engine"  # which has ended the job, without a record


class StopState(Name):
    """What became of a job's processes on a node after a stop. A node itself answers with one of the first four."""

    CLEAN = "clean"
    SURVIVORS = "survivors"
    ENDED_ALREADY = "ended already"
    UNKNOWN = "unknown"
    NO_ANSWER = "no answer"
    NEVER_STARTED = "never started"
    UNDONE = "undone"  # its placing was taken back


NODE_ANSWERS = frozenset({StopState.CLEAN, StopState.SURVIVORS, StopState.ENDED_ALREADY, StopState.UNKNOWN})
