"""An outcome is how a job ended and which processes caused it, with descriptions of exit codes and signals.

It is separate from state.py because supervisors need only this: a node starts hundreds of them.
"""

# Without annotations from __future__: types of NamedTuples that are text cost nodes time (decision 79).
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, cast

from clustertool.model import field_types as fields
from clustertool.model.job.state_names import JobState
from clustertool.model.roles import MPIRUN, role_name
from clustertool.model.shape import Annotated, to_plain, whole

Key = Tuple[str, int]
_Keys = Annotated[Tuple[fields.RankKey, ...], 100_000]
MESSAGE_FIELDS = 11  # the first ones of RankExit
_REQUESTED = (129, 130, 143)  # by SIGHUP, SIGINT and SIGTERM
COORDINATOR_NODE = 0  # the index of the coordinator's node in a job that is not elastic, see model/planning/requests.py

SIGNALS = {
    1: "hang-up",
    2: "interrupt",
    3: "quit",
    4: "illegal instruction",
    6: "abort",
    7: "bus error",
    8: "arithmetic error",
    9: "killed",
    11: "segmentation fault",
    13: "broken pipe",
    14: "alarm",
    15: "terminated",
    24: "CPU time limit",
    25: "file size limit",
}


class EngineEnd(NamedTuple):
    """What an engine has recorded about the end of its job. ended: by the clock of the engine; 0.0: not known."""

    engine: fields.Label
    job: fields.Label
    state: fields.Label
    reason: fields.Label
    ended: fields.Time


class Outcome(NamedTuple):
    """How a job ended. `state` is one of OUTCOMES, or NEXT_EPOCH for an epoch. source: whose code it is, job or tool."""

    state: JobState
    code: fields.ExitCode
    source: fields.Label
    reason: str
    culprits: _Keys = ()  # that failed by themselves; the first one is the cause as far as it can be known
    victims: _Keys = ()
    node: fields.NodeOrNone = -1
    brief: str = ""  # the reason as a short text, if it has such a form
    engine: Optional[EngineEnd] = None  # where an engine has ended the job
    followed: _Keys = ()  # the culprits that failed after the first one because it was gone

    def as_record(self) -> Dict[str, object]:
        """Convert an outcome to the fields of an event; without `engine` if that is None."""
        fields = cast(Dict[str, object], to_plain(self))
        if self.engine is None:
            del fields["engine"]
        return fields

    def as_dict(self) -> Dict[str, object]:
        """Convert an outcome to the "outcome" of JSON answers: its record without `brief`."""
        fields = self.as_record()
        del fields["brief"]
        return fields


def exit_code(code: int, signal: int) -> int:
    """Compute the exit code by the shell's convention: 128+N for signal N."""
    return 128 + signal if signal else code


def describe_exit(code: int, signal: int, note: str = "") -> str:
    """Describe an exit, with its note: `exit code 7: NOTE`; `signal 9 (killed)`."""
    text = f"signal {signal} ({SIGNALS.get(signal, 'unknown')})" if signal else f"exit code {code}"
    return f"{text}: {note}" if note else text


def short_exit(code: int, signal: int, note: str = "") -> str:
    """Describe an exit for the last line of a command: `segmentation fault (signal 11)`, or the note of an exit code."""
    if not signal:
        return note or f"exit code {code}"
    text = f"{SIGNALS[signal]} (signal {signal})" if signal in SIGNALS else f"signal {signal}"
    return f"{text}: {note}" if note else text


def describe_coordinator(name: str, endpoint: str) -> str:
    """Describe the coordinator of a job: its node and its endpoint, or the endpoint alone if this is the node's name."""
    alike = endpoint.rpartition(":")[0].strip("[]") == name
    return f"the coordinator at {endpoint}" if alike else f"the coordinator on {name} ({endpoint})"


def some(names: Sequence[str], last: str = "and") -> str:
    """Join the first four names of a list, and the number of more: "a", "a and b", "a, b, c, d and 3 more". last: the "and"."""
    shown = list(names[:4]) + ([f"{len(names) - 4} more"] if len(names) > 4 else [])
    return f" {last} ".join([*([", ".join(shown[:-1])] if shown[1:] else []), *shown[-1:]])


class RankExit(NamedTuple):
    """How a rank ended. The supervisor makes it when it reaps the rank; the message and the event `exited` have its fields.

    by_launcher: mpirun has ended it. The event has this as `stopped`. of_runtime: the runtime of its container could not
    start it, so the code is that of the runtime.

    `error` is a number made of the exception that its program recorded, else of the last line of its log: equal lines, equal
    numbers. `consequence`: this line is about a lost connection, store or collective, so another failure may be the cause.
    `timed_out`: it is about a collective that has waited for the other process until its time ran out.

    node: the name of its node, for sentences. The message has neither this nor the attempt: see MESSAGE_FIELDS.
    """

    role: fields.Label
    rank: fields.Rank
    code: Annotated[int, whole(0, 255)]
    signal: Annotated[int, whole(0, 127)] = 0
    stopped: bool = False
    note: str = ""
    error: int = 0
    consequence: bool = False
    by_launcher: bool = False
    of_runtime: bool = False
    timed_out: bool = False
    node: str = ""
    attempt: int = 0

    @property
    def key(self) -> Key:
        return (self.role, self.rank)

    @property
    def failed(self) -> bool:
        """Whether the rank has failed by itself: an exit code other than 0, or a signal, which no one else has caused."""
        return not self.ended_by_others and exit_code(self.code, self.signal) != 0

    @property
    def ended_by_others(self) -> bool:
        """Whether the tool has stopped it, or mpirun has ended it."""
        return self.stopped or self.by_launcher

    @property
    def by_request(self) -> bool:
        """Whether it ended by SIGHUP, SIGINT or SIGTERM, or with the exit code that a shell has for one of them."""
        return exit_code(self.code, self.signal) in _REQUESTED


def same_error(failure: RankExit) -> Tuple[object, ...]:
    """Compute a key that is equal for failures with the same error: role, exit code, signal, error number, attempt.

    The note is in place of a number that is 0, or that of a signal: after one the last line of the log is no error message.
    Notes of the same error may differ in numbers (ranks, ports), as a program records its exception with them.
    """
    error = 0 if failure.signal else failure.error
    return failure.role, failure.code, failure.signal, error or failure.note, failure.attempt


def alike(failures: Iterable[RankExit], followed: bool = False) -> List[List[RankExit]]:
    """Group failures by their error, in the order of the first failure of each group.

    Consequences of one kind are one group for each role and attempt if they follow a cause: a failure before them that is no
    consequence. followed: there was one before all of these.
    """
    groups: Dict[Tuple[object, ...], List[RankExit]] = {}
    for failure in failures:
        after = failure.consequence and followed
        followed = followed or not failure.consequence
        kind = (failure.role, failure.attempt, failure.timed_out) if after else same_error(failure)
        groups.setdefault(kind, []).append(failure)
    return list(groups.values())


def sentences(groups: Sequence[Sequence[RankExit]]) -> List[str]:
    """Make a sentence about each group of alike(): by followers() for consequences of the first one, else by failed()."""
    cause = bool(groups) and not groups[0][0].consequence
    return [followers(group) if cause and group[0].consequence else failed(group) for group in groups]


def followers(group: Sequence[RankExit]) -> str:
    """Make one sentence about failures that followed another one."""
    role, ranks = role_name(group[0].role), some([str(failure.rank) for failure in group])
    process = f"{role} {ranks} on {group[0].node}" if len(group) == 1 else f"{role}s {ranks}"
    return f"{process} failed after it ({'timed out in a collective' if group[0].timed_out else 'connection lost'})"


def failed(group: Sequence[RankExit]) -> str:
    """Describe failures with the same error in one sentence: the first one, and how many they are."""
    first, name = group[0], role_name(group[0].role)
    how = describe_exit(first.code, first.signal, first.note)
    if exit_code(first.code, first.signal) == 0:
        early = "exit code 0 before it listened on its port"
        early += ' (one that opens none: [pserver] ready = "started" in job.toml)'
        how = f"exit code 0, but {first.note}" if first.note else early
    process = f"{name} on {first.node}" if first.role == MPIRUN else f"{name} {first.rank} on {first.node}"
    if len(group) == 1:
        return f"{process} ended with {how}"
    return f"{len(group)} {name}s failed with the same error, first {process}: {how}"
