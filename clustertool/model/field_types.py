"""Fields of what nodes send have these types, each with the check that a value must pass before other code uses it.

A program of a job can change the records and the tool's code on its node, so nothing that a node sends is trusted. shape.py
makes the check of a message from the types of its fields. `int` and `float` alone are not negative, `str` has at most 65,536
characters. A list or an object has a number after its type, the limit of its entries. A tuple is a list in JSON.
"""

from __future__ import annotations

from sys import float_info
from typing import Dict, List, Optional, Tuple, TypeVar

from clustertool.model.paths import is_base, is_job_id
from clustertool.model.quantities import HIGHEST_PORT
from clustertool.model.roles import ROLES
from clustertool.model.shape import Annotated, matching, number, one_of, text, whole

T = TypeVar("T")


def printed_number(value: object, path: str) -> object:
    """Check for a number that a program has printed, or the name of one that JSON does not have; return it as a number."""
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(str(value))
    return number(-float_info.max, float_info.max)(value, path)


MOST_FILES = 250_000  # of a folder, in one answer
_LATEST = 1e11  # seconds
_MOST_NODES = 100_000

PerNode = Annotated[List[T], _MOST_NODES]  # of a job
PerRank = Annotated[List[T], 100_000]  # of a job
PerJob = Annotated[List[T], 20_000]  # on one node
PerCard = Annotated[List[T], 1024]
PerPort = Annotated[List[T], 1 << 17]
PerFile = Annotated[List[T], MOST_FILES]
Some = Annotated[List[T], 10_000]
Few = Annotated[List[T], 100]

Label = Annotated[str, text(4096)]
Name = Annotated[str, matching(lambda name: len(name) <= 256 and name.isprintable(), "a name of one line")]
ShortText = Annotated[str, text(100)]
TomlText = Annotated[str, text(1 << 21)]
LogText = Annotated[str, text(1 << 20)]  # also a set of pieces of a workspace, four to a character
ErrorText = Annotated[str, text(1 << 18)]
PackedManifest = Annotated[str, text(16 << 20)]
BaseName = Annotated[str, matching(is_base, "a base")]
JobId = Annotated[str, matching(is_job_id, "a job id")]
ByJob = Annotated[Dict[JobId, T], 20_000]
Role = Annotated[str, one_of(ROLES)]
LogRole = Annotated[str, one_of((*ROLES, "file"))]
ReleaseName = Annotated[str, matching(lambda name: len(name) == 32 and not name.strip("0123456789abcdef"), "a release")]
Runtime = Annotated[str, one_of(("", "docker", "podman", "apptainer"))]
JoinStart = Annotated[str, one_of(("started", "runs already", "needs code", "left"))]  # after a request to join a job
EntryKind = Annotated[str, one_of(("file", "dir", "link", "unreadable"))]

NodeIndex = Annotated[int, whole(0, _MOST_NODES)]
NodeOrNone = Annotated[int, whole(-1, _MOST_NODES)]  # -1: none
Rank = Annotated[int, whole(0, 100_000)]
CardIndex = Annotated[int, whole(0, 1 << 16)]
AttemptNumber = Annotated[int, whole(0, 1_000_000)]
Pid = Annotated[int, whole(0, 1 << 31)]
Signal = Annotated[int, whole(0, 255)]
ExitCode = Annotated[int, whole(-(1 << 31), 1 << 31)]
Port = Annotated[int, whole(0, HIGHEST_PORT)]
Signed = Annotated[int, whole(-(1 << 63))]  # -1 often stands for "not known"
Mtime = Annotated[int, whole(-(1 << 62), 1 << 62)]  # nanoseconds

Time = Annotated[float, number(0, _LATEST)]  # seconds since the epoch, by the node's clock
Seconds = Annotated[float, number(-_LATEST, _LATEST)]
Pause = Annotated[float, number(0, 1e6)]
Sampled = Annotated[float, number(-1)]
Size = Annotated[int, number()]  # bytes; some tools give it a fraction
Amount = Annotated[int, number(-1e6)]  # of a card; some tools give it a fraction
Gauge = Annotated[float, number(-1e6)]  # of a card

RankKey = Tuple[Role, Rank]
RankOutput = Tuple[Role, Rank, Optional[float], Optional[float], Time]  # epoch, step, time of the last output
PrintedNumber = Annotated[float, printed_number]
RankPlaces = Tuple[Role, int, int, int, int]  # model/job/rank_places
Curve = Some[Annotated[Tuple[Sampled, ...], 8]]  # rows of values; the first one is the time
