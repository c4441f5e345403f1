"""The rules of the store of epochs: what its content means, and what a member of the job may do.

The store (etcd) has two keys of a job, and each answer shows both at one moment:

- `epoch`: the record of the newest epoch. It is replaced by compare-and-swap only, so no epoch has two coordinators.
- `coordinator`: the presence of its coordinator. It belongs to a lease in the store, which ends soon after the coordinator.

A node may have ranks of an epoch until `ttl` seconds after it *sent* the newest request whose answer confirms the epoch. The
winner of a later epoch has replaced the record after that request. So no node has ranks of an earlier epoch after `won_at` +
ttl of the winner, whatever the store does with its leases. All times are seconds of CLOCK_BOOTTIME of one machine.

A coordinator writes its record again once a beat, and only such a write confirms its epoch to itself. The winner has replaced
the last one of them, so the coordinator before it has no ranks `ttl` seconds after the winner had *seen* that write: in
general soon after its lease in the store has ended.
"""

from __future__ import annotations

import json
import math
from enum import Enum
from typing import NamedTuple, Optional, Tuple

from clustertool.model import field_types as fields
from clustertool.model import shape
from clustertool.model.shape import Annotated, whole
from clustertool.model.wire.coordinator_messages import Incarnation, read_incarnation

_Number = Annotated[int, whole(0, 1 << 31)]


class StoreRecord(NamedTuple):
    """An epoch in the store.

    epoch: its number, that of its first attempt. attempt: the highest number that the coordinator has used in it. member,
    address, port, incarnation: the coordinator, and where it is reached. job: identifies the job among those with the same id.
    nodes: all that may have ranks of this epoch or of an earlier one. restarts: failures that count for max_restarts, in all
    epochs so far. over: the exit code of the job, None while it runs.
    """

    epoch: _Number
    member: _Number
    address: fields.Name
    port: fields.Port
    incarnation: Incarnation
    job: fields.Name
    attempt: _Number
    nodes: Annotated[Tuple[_Number, ...], 1 << 16] = ()
    restarts: _Number = 0
    over: Optional[fields.Signal] = None


class StoreContent(NamedTuple):
    """What one linearizable read of both keys shows.

    revision: at which the record was written, 0 if there is none. presence: the coordinator whose lease has not ended, None if
    there is none. since: the revision at which this presence began, 0 if there is none.
    """

    record: Optional[StoreRecord] = None
    revision: int = 0
    presence: Optional[Incarnation] = None
    since: int = 0


class Standing(Enum):
    """What a content means to a candidate.

    CLAIM: it may replace the record. WAIT: another coordinator is present. WON: the epoch is its own. LOST: another one has
    this epoch or a later one. OVER: the job has ended. FOREIGN: another job with the same id runs.
    """

    CLAIM = "claim"
    WAIT = "wait"
    WON = "won"
    LOST = "lost"
    OVER = "over"
    FOREIGN = "foreign"


def beat(loss_timeout: float) -> float:
    """Compute the seconds between two requests that confirm the epoch: a quarter of the loss timeout, at most 1."""
    return min(1.0, loss_timeout / 4)


def ttl(loss_timeout: float) -> int:
    """Compute the whole seconds of the leases in the store, for which an answer confirms the epoch, too.

    Three beats longer than the timeout, so that an outage of the store that is shorter than the timeout has no effect: the last
    confirmation before it is up to one beat old, and the first one after it may need two.
    """
    return math.ceil(loss_timeout + 3 * beat(loss_timeout))


def standing(content: StoreContent, claim: StoreRecord) -> Standing:
    """Determine what a candidate with this record may do, by the first of these that is true.

    No record: WAIT if another coordinator is present, else CLAIM. A record of another job: FOREIGN if it runs and one is
    present, else CLAIM. Then OVER and WON; LOST also for a claim that was made from an older record; at last WAIT or CLAIM as
    without a record.
    """
    record, other = content.record, content.presence is not None and content.presence != claim.incarnation
    if record is None:
        return Standing.WAIT if other else Standing.CLAIM
    if record.job != claim.job:
        return Standing.FOREIGN if content.presence is not None and record.over is None else Standing.CLAIM
    if record.over is not None:
        return Standing.OVER
    if record.epoch == claim.epoch and record.incarnation == claim.incarnation:
        return Standing.WON
    if record.attempt >= claim.epoch or (record.nodes, record.restarts) != (claim.nodes, claim.restarts):
        # In the second case the claim was made from an older record, and misses nodes that may have ranks.
        return Standing.LOST
    return Standing.WAIT if other else Standing.CLAIM


def confirms(content: StoreContent, job: str, epoch: int) -> bool:
    """Check that the record in the store is of this job and epoch: no later epoch has begun."""
    record = content.record
    return record is not None and record.job == job and record.epoch == epoch


def is_present(content: StoreContent, record: StoreRecord) -> bool:
    """Check whether this coordinator's presence is in the store."""
    return content.presence == record.incarnation


def may_restore(content: StoreContent, record: StoreRecord) -> bool:
    """Check whether a coordinator may restore its presence, which the store has ended early: no other member took over."""
    return confirms(content, record.job, record.epoch) and content.presence is None


def write_record(record: StoreRecord) -> bytes:
    """Build the value of the key `epoch`."""
    return json.dumps(record._asdict()).encode()


def read_record(value: bytes) -> StoreRecord:
    """Parse the value of the key `epoch`. Raises ValueError: whatever can write to the store may have written it."""
    try:
        return shape.read(StoreRecord, json.loads(value), "a record")
    except RecursionError:
        raise ValueError("a record that is nested too deep") from None


def write_presence(incarnation: Incarnation) -> bytes:
    """Build the value of the key `coordinator`."""
    return json.dumps(incarnation).encode()


def read_presence(value: bytes) -> Incarnation:
    """Parse the value of the key `coordinator`. Raises ValueError."""
    try:
        return read_incarnation(json.loads(value))
    except RecursionError:
        raise ValueError("a presence that is nested too deep") from None
