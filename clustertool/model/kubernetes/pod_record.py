"""The log of a pod has the lines of all ranks of its node, `[trainer 3] text`, and a record of the node as its last line.

After a restart by --max-restarts a line is `[trainer 3 attempt 1] text`. One that is longer than a piece, or that its program
has not ended, goes on in the next one of this rank: `[trainer 3 +] text`. So the logs can be restored byte for byte. A line of
the tool itself begins with another character.

A pod that has ended leaves a record behind: a last line of JSON in its log, and the termination message of its container.

The line has the verdict and the records of the pod's node, so the laptop can show a job whose pods are gone. The message has
the verdict only: the kubelet keeps 4096 bytes. Both are read as input of others: a program of the job can write to that log.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from clustertool.errors import DataError
from clustertool.model import field_types as fields
from clustertool.model.job import formats
from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state_names import OUTCOMES, JobState
from clustertool.model.kubernetes.object_names import JobAbout
from clustertool.model.paths import is_job_id
from clustertool.model.shape import Annotated, matching, one_of, read, whole

PIECE = 8 << 10  # bytes of a line after which it is continued: runtimes split at 16 KiB
_LINE = re.compile(
    rb"\[(?P<role>[a-z]{1,20}) (?P<rank>[0-9]{1,9})(?: attempt (?P<attempt>[0-9]{1,5}))?(?P<goes_on> \+)?\] (?P<text>.*)",
    re.DOTALL,
)
FORMAT = 1
MOST_MESSAGE = 4096  # bytes of a termination message
MOST_LINE = 2 << 20  # bytes of the last line
EVENTS, LEDGER, SPEC, GROWTH, USAGE = "events.jsonl", "ledger.json", "spec.json", "growth.jsonl", "usage.jsonl"
NUMBERS = "metrics.jsonl"
RECORDS = (EVENTS, LEDGER, SPEC, GROWTH, USAGE, NUMBERS)  # the most important first
_LINES = (EVENTS, GROWTH, USAGE, NUMBERS)  # have a record in each line
_MOST_PACKED = 1 << 20
_MOST_RECORDS = 16 << 20  # bytes of all records of a node
_LONGEST = 1000  # characters of a reason
_MOST_LOGS = 4096
_CUTS = (4, 16, 64)
_SMALL = 64 << 10  # bytes of a file that stays as it is
_JobOrNone = Annotated[str, matching(lambda job: job == "" or is_job_id(job), "a job id")]
_RankName = Annotated[str, matching(re.compile(r"[a-z]{1,20} [0-9]{1,9}").fullmatch, "a rank")]
Log = Tuple[str, int]  # name in the job's directory, size in bytes


class PodLine(NamedTuple):
    """A line of a rank. text: without the newline, which it had unless it goes on."""

    role: str
    rank: int
    attempt: int
    text: bytes
    goes_on: bool = False

    @property
    def content(self) -> bytes:
        """The bytes of the line in the rank's own log."""
        return self.text if self.goes_on else self.text + b"\n"


def encode_line(line: PodLine) -> bytes:
    """Format a line of a rank for the log of the pod: `[trainer 3] text`."""
    attempt = f" attempt {line.attempt}" if line.attempt else ""
    head = f"[{line.role} {line.rank}{attempt}{' +' if line.goes_on else ''}] "
    return head.encode() + line.text + b"\n"


def decode_line(line: bytes) -> Optional[PodLine]:
    """Parse a line of a pod's log, without its newline; None if it is no line of a rank."""
    found = _LINE.fullmatch(line)
    if found is None:
        return None
    role, rank, attempt = found["role"].decode(), int(found["rank"]), int(found["attempt"] or 0)
    return PodLine(role, rank, attempt, found["text"], bool(found["goes_on"]))


class PodEnd(NamedTuple):
    """How the job has ended, as the pod's node knows it. node: -1 if it had not joined. failed: the ranks, as `trainer 3`."""

    job: _JobOrNone
    node: Annotated[int, whole(-1, 99999)]
    state: Annotated[str, one_of(OUTCOMES)]
    reason: str
    code: fields.Signal
    failed: Annotated[Tuple[_RankName, ...], 100_000] = ()


class Stated(NamedTuple):
    """What is known of a pod without its log.

    end: by its termination message, None if that has none. at: when its process ended, seconds since the epoch.
    """

    about: JobAbout
    end: Optional[PodEnd] = None
    at: float = 0.0


class PodRecord(NamedTuple):
    """The record in the last line of a pod's log. files: the content of those of RECORDS that fit.

    logs: of the node's ranks, with their sizes at the end.
    """

    end: PodEnd
    files: Dict[str, bytes]
    logs: Tuple[Log, ...] = ()


def encode(end: PodEnd, files: Mapping[str, bytes], logs: Sequence[Log] = ()) -> bytes:
    """Write the last line of a pod's log, with the end and the records; of too large records their newest lines, or nothing."""
    fields = {**_end_fields(end), "logs": [list(log) for log in logs[:_MOST_LOGS]], "records": _pack_records(files)}
    return json.dumps(fields).encode() + b"\n"


def decode(line: bytes) -> PodRecord:
    """Parse the last line of a pod's log. Raises DataError for another line, and for records that are too large or cut."""
    if len(line) > MOST_LINE:
        raise _no_record("it is too long")
    try:
        fields = json.loads(line)
        end = _decode_end(fields)
        logs = tuple((str(name), size) for name, size in fields["logs"][:_MOST_LOGS] if type(size) is int and size >= 0)
        packed = base64.b64decode(fields["records"], validate=True)
        unpack = zlib.decompressobj()
        data = unpack.decompress(packed, _MOST_RECORDS + 1)
        if len(data) > _MOST_RECORDS or not unpack.eof:
            raise _no_record("its records are too large, or cut")
        return PodRecord(end, _split_files(data), logs)
    except (ValueError, LookupError, TypeError, RecursionError, zlib.error) as error:
        raise _no_record(f"{error!r:.200}") from None


def encode_message(end: PodEnd) -> bytes:
    """Write the termination message, at most 4096 bytes: ranks are cut first, then the reason."""
    failed, reason = list(end.failed), end.reason
    while True:
        text = json.dumps(_end_fields(end._replace(failed=tuple(failed), reason=reason))).encode()
        if len(text) <= MOST_MESSAGE:
            return text
        if failed:
            del failed[len(failed) // 2 :]
        else:
            reason = reason[: len(reason) * 3 // 4]


def decode_message(text: str) -> PodEnd:
    """Parse a termination message.

    Raises DataError for another text: without a message the kubelet puts the end of the log there.
    """
    try:
        return _decode_end(json.loads(text[: 4 * MOST_MESSAGE]))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _no_record(f"{error!r:.200}") from None


def stated_events(job: str, node: int, stated: Stated, ranks: Mapping[str, Tuple[str, int, int]]) -> bytes:
    """Build the events of a node whose pod has left no record: of the job, of each rank with a log, of the stated end.

    ranks: role, rank and attempt by the names of the logs.
    """
    about, end, t = stated.about, stated.end, stated.about.created
    known = {"created": t, "command": about.command, "mode": about.mode, "job_name": about.name, "asked": about.asked}
    begin = {"type": "job", "t": t, "format": formats.FORMAT, "id": job, "node": node, **known}
    events: List[Dict[str, object]] = [begin]
    for log, (role, rank, attempt) in ranks.items():
        found = {"role": role, "rank": rank, "attempt": attempt, "log": log}
        events.append({"type": "started", "t": t, "pid": 0, "start": 0, **found})
    if end is not None:
        state = JobState(end.state)
        source = "job" if state in (JobState.SUCCEEDED, JobState.FAILED) else "tool"
        culprits = tuple((role, int(rank)) for role, _, rank in (one.partition(" ") for one in end.failed))
        outcome = Outcome(state, end.code, source, end.reason, culprits, node=end.node)
        events.append({"type": "ended", "t": stated.at, **outcome.as_record()})
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def _end_fields(end: PodEnd) -> Dict[str, object]:
    """Build the fields of an end for _decode_end(), with at most 1000 characters of the reason."""
    return {"clustertool": FORMAT, **end._asdict(), "reason": end.reason[:_LONGEST], "failed": list(end.failed)}


def _decode_end(fields: Mapping[str, object]) -> PodEnd:
    """Check and read the fields of an end.

    Raises ValueError for another format or a wrong field, LookupError for a missing one, TypeError for what is no object.
    """
    if fields["clustertool"] != FORMAT:
        raise ValueError("another format")
    end = read(PodEnd, {name: fields[name] for name in PodEnd._fields})
    return end._replace(reason=end.reason[:_LONGEST])


def _pack_records(files: Mapping[str, bytes]) -> str:
    """Compress the records, and return them in base64; too large ones are shortened, the least important first.

    Those with lines keep their newest 1/4, 1/16 or 1/64, others become empty; up to 64 KiB they stay. If that is too much, none
    is packed.
    """
    kept = {name: files[name] for name in RECORDS if name in files}
    data = _join_files(kept)
    for name in [one for one in reversed(list(kept)) if len(kept[one]) > _SMALL]:
        for part in _CUTS:
            if len(data) <= _MOST_PACKED and sum(map(len, kept.values())) < _MOST_RECORDS - _LONGEST:
                return base64.b64encode(data).decode()
            kept[name] = _newest_lines(files[name], len(files[name]) // part) if name in _LINES else b""
            data = _join_files(kept)
    return base64.b64encode(data if len(data) <= _MOST_PACKED else _join_files({})).decode()


def _newest_lines(data: bytes, most: int) -> bytes:
    """Return the first line, which states what the file is about, and of the others the last `most` bytes in whole lines."""
    first, _, rest = data.partition(b"\n")
    return first + b"\n" + rest[-most:].partition(b"\n")[2]


def _join_files(files: Mapping[str, bytes]) -> bytes:
    """Pack files: a line of JSON with the name and the size of each file, and their bytes one after the other; compressed."""
    present = [(name, data) for name, data in files.items() if data]
    head = json.dumps([[name, len(data)] for name, data in present]).encode()
    return zlib.compress(b"\n".join([head, b"".join(data for _, data in present)]), 9)


def _split_files(data: bytes) -> Dict[str, bytes]:
    """Unpack the result of _join_files(), without the compression.

    Raises ValueError for an unknown file and a wrong size, ValueError or TypeError for a first line of another form.
    """
    head, _, rest = data.partition(b"\n")
    found: Dict[str, bytes] = {}
    for name, size in json.loads(head):
        if name not in RECORDS or type(size) is not int or not 0 <= size <= len(rest):
            raise ValueError("a record that is none, or is not there")
        found[name], rest = rest[:size], rest[size:]
    return found


def _no_record(why: str) -> DataError:
    """Create the error for a text that is no record."""
    return DataError(f"this is no record of a pod: {why}")
