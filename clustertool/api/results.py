"""This module has what the methods of a job return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clustertool.actions.read_status import StatusJson
from clustertool.model.container.job_container import JobContainer
from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state_names import OUTCOMES, JobState, NodeState, RankState


@dataclass(frozen=True)
class LogLine:
    """One line that a process printed, without its newline. str() is its text.

    host: the node that runs the process. time: when it was written at the latest, in seconds since the epoch, if that is known.
    Control characters are written as escapes, and values of SECRETS as ***.
    """

    role: str
    rank: int
    host: str
    text: str
    time: float | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class RankStatus:
    """One process of a job. Times are seconds since the epoch.

    since: when `state` began. code, signal: how it ended. note: that as text. step, epoch, output: the last ones that it
    printed, and when it printed last. cpu: percent of one core. memory: bytes. What is not known is None.
    """

    role: str
    rank: int
    host: str
    state: RankState
    since: float
    code: int | None
    signal: int
    note: str
    attempt: int
    pid: int
    log: str
    step: float | None
    epoch: float | None
    output: float | None
    cpu: float | None
    memory: float | None


@dataclass(frozen=True)
class HostStatus:
    """What one node does for a job. why: what is wrong with it, "" if nothing is."""

    name: str
    state: NodeState
    why: str


@dataclass(frozen=True)
class Status:
    """A job at one moment. Times are seconds since the epoch.

    ranks: its processes by role and rank. container: the image of its ranks, None without one. waits: what it waits for, in
    sentences. unreachable: nodes that did not answer, and why; what is known of them comes from other nodes. json: the same as
    `clustertool status --json` prints it.
    """

    job: str
    state: JobState
    created: float | None
    started: float | None
    ended: float | None
    ranks: tuple[RankStatus, ...]
    hosts: tuple[HostStatus, ...]
    container: JobContainer | None
    waits: tuple[str, ...]
    outcome: Outcome | None
    unreachable: Mapping[str, str]
    json: Mapping[str, object]

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self.state in OUTCOMES

    def __str__(self) -> str:
        return f"{self.job}: {self.state}" + (f" ({self.outcome.reason})" if self.outcome else "")


def status_of(found: StatusJson, outcome: Outcome | None, unreachable: Mapping[str, str]) -> Status:
    """Convert the JSON form of a status to a Status, with the outcome, and {node: why it did not answer}."""
    names = {node["index"]: str(node["name"]) for node in found["nodes"]}
    plain = "role rank since signal note attempt pid log code step epoch cpu memory".split()
    ranks = tuple(
        RankStatus(
            host=names.get(one["node"], ""),
            state=RankState(one["state"]),
            output=one["output"] or None,
            **{name: one[name] for name in plain},
        )
        for one in found["processes"]
    )
    states = ((names[node["index"]], NodeState(node["state"]), str(node["why"])) for node in found["nodes"])
    hosts = tuple(HostStatus(*state) for state in states)
    times = (found["created"], found["started"], found["ended"])
    state, waits = JobState(found["state"]), tuple(found["waits"])
    container = JobContainer(**found["container"]) if found["container"] else None
    return Status(str(found["job"]), state, *times, ranks, hosts, container, waits, outcome, unreachable, found)
