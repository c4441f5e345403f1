"""Checks of what a node sends: the fields of each answer, event and frame, and how large a frame's header may be.

Everything that comes from a node passes the check of its request (messages.py) or check_frame() before other code uses it. A
program of a job can change the records and the tool's code on its node, so nothing here is trusted. Raises shape.Malformed.
"""

from __future__ import annotations

from typing import Dict, Iterable, Mapping

from clustertool.model.job.state_names import NODE_ANSWERS, OUTCOMES, JobState, RankState, StartReason
from clustertool.model.paths import is_job_id
from clustertool.model.quantities import HIGHEST_PORT
from clustertool.model.roles import ROLES
from clustertool.model.wire.shape import (
    Check,
    Malformed,
    fields,
    flag,
    little,
    matching,
    maybe,
    number,
    row,
    rows,
    table,
    text,
    whole,
)

MOST_NODES = 100_000  # of a job
MOST_RANKS = 100_000  # of a job
MOST_JOBS = 20_000  # on one node
_MOST_EVENTS = 200_000  # of one job on one node
_MOST_FILES = 250_000
_MOST_CARDS = 1024
_LATEST = 1e11  # a time, in seconds
STREAM = 2 << 20  # bytes of a header that answers nothing; one event may name all processes of a node
PAYLOAD = 256 << 10  # bytes of a log in one frame
_SHORT = 32 << 10  # bytes of the header of a piece of a log, which names a file


def _one_of(names: Iterable[str]) -> Check:
    known = sorted(names)
    return matching(known.__contains__, f"one of {', '.join(known)}")


job_id = matching(is_job_id, "a job id")
_role = _one_of(ROLES)
_node, _rank, _pid = whole(0, MOST_NODES), whole(0, MOST_RANKS), whole(0, 1 << 31)
_attempt = whole(0, 1_000_000)
_time, _seconds, _bytes = number(0, _LATEST), number(-_LATEST, _LATEST), number(0, 1e18)
_code = whole(-(1 << 31), 1 << 31)
_label = text(4096)
_size = whole()
_release = matching(lambda name: len(name) == 32 and not name.strip("0123456789abcdef"), "a release")
_names = rows(_label, MOST_NODES)
_kind = matching(("file", "dir", "link").__contains__, "file, dir or link")

# -- events, see event_types.py --

_process = {"role": _role, "rank": _rank}
_step = number(0, 1e18)
_reached = row(_role, _rank, maybe(_step), maybe(_step), _time)  # epoch, step, time of the last output
_places = rows(row(_role, whole(), whole(), whole(), whole()), MOST_RANKS)
_keys = rows(row(_role, _rank), MOST_RANKS)
_outcome = fields(
    {"state": _one_of(OUTCOMES), "code": _code, "source": _label, "reason": text()},
    {"brief": text(), "culprits": _keys, "victims": _keys, "node": whole(-1, MOST_NODES)},
)
_EVENTS: Dict[str, Check] = {
    "job": fields(
        {"id": job_id},
        {
            "node": _node,
            "name": _label,
            "nodes": _names,
            "created": _time,
            "owner": _label,
            "mode": _label,
            "command": text(),
            "skew": _seconds,
            "output": text(),
            "work_dir": text(),
            "places": _places,
            "processes": rows(fields({**_process, "local_rank": _rank, "endpoint": _label, "log": text()}), MOST_RANKS),
        },
    ),
    "supervisor": fields({"pid": _pid}, {"start": whole(), "boot": _label}),
    "guard": fields({"pid": _pid}, {"start": whole()}),
    "gauge": fields({"pid": _pid}, {"start": whole()}),
    "started": fields({**_process, "pid": _pid}, {"start": whole(), "attempt": _attempt, "log": text()}),
    "listening": fields(_process),
    "elsewhere": fields({**_process, "listens": _label, "endpoint": _label}),
    "exited": fields(
        {**_process, "code": _code},
        {
            "signal": whole(0, 255),
            "stopped": flag,
            "note": text(),
            "attempt": _attempt,
            "cpu": _bytes,
            "memory": _bytes,
            "error": whole(),
            "consequence": flag,
        },
    ),
    "frozen": fields(_process),
    "thawed": fields(_process),
    "disk": fields({"full": flag, "root": text()}),
    "phase": fields({"name": _label}, {"end": maybe(_label), "why": text(), "culprits": _keys, "attempt": _attempt}),
    "absent": fields({"nodes": rows(_node, MOST_NODES), "endpoint": _label, "seconds": _bytes}),
    "unconnected": fields({"endpoint": _label, "errno": little, "why": text(), "since": _time}, {"again": flag}),
    "connected": fields({}),
    "lost": fields({"node": _node}, {"why": text(), "ranks": rows(_reached, MOST_RANKS)}),
    "restart": fields({"attempt": _attempt, "pause": number(0, 1e6)}),
    "stopping": fields({}, {"why": text(), "by": text()}),
    "clean": fields({"survivors": rows(_label, 100_000)}),
    "supervisor-lost": fields({}, {"why": text()}),
    "verdict": _outcome,
    "ended": _outcome,
}
_any_event = fields({"type": _label, "t": _time})


def _event(value: object, path: str) -> None:
    _any_event(value, path)
    if isinstance(value, dict) and value["type"] in _EVENTS:
        _EVENTS[value["type"]](value, f"{path} ({value['type']})")


# -- answers --

_status = {
    "node": _node,
    "dir": text(),
    "heartbeat": maybe(_bytes),
    "events": rows(_event, _MOST_EVENTS),
    "supervised": flag,
    "usage": table(_label, row(_bytes, _bytes), MOST_RANKS),
    "unknown": text(),
    "output": rows(_reached, MOST_RANKS),
}
_summary = fields(
    {
        "id": job_id,
        "state": _one_of(JobState),
        "node": maybe(_node),
        "owner": maybe(_label),
        "created": maybe(_time),
        "mode": maybe(_label),
        "command": maybe(text()),
        "nodes": maybe(_names),
        "code": maybe(_code),
        "reason": maybe(text()),
    },
    {"dir": text(), "start": _one_of(StartReason), "final": flag},
)
_curve = rows(rows(maybe(number(-_LATEST, 1e18)), 8), 10_000)
_machine_number = number(-1, 1e18)
_report = {
    **_status,
    "now": _time,
    "machine": fields({"cores": _bytes, "total": _bytes, "rows": rows(rows(_machine_number, 8), 10_000)}),
    "cards": rows(
        fields({"index": whole(), "total": _bytes, "rows": rows(rows(_machine_number, 8), 10_000)}), _MOST_CARDS
    ),
    "ranks": rows(
        fields({**_process, "rows": rows(rows(_machine_number, 8), 10_000), "log_size": _bytes, "progress": _curve}),
        MOST_RANKS,
    ),
    "tails": rows(row(_role, _rank, text(1 << 20)), MOST_RANKS),
    "plan": fields(
        {},
        {
            "policy": table(_label, little, 100),
            "work_dir": text(),
            "processes": rows(
                fields(
                    _process,
                    {
                        "devices": rows(whole(), _MOST_CARDS),
                        "shards": whole(),
                        "command": text(),
                    },
                ),
                MOST_RANKS,
            ),
        },
    ),
}
_user_of = fields({"job": _label, "user": _label})
_card = fields(
    {"index": whole(0, 1 << 16)},
    {
        **dict.fromkeys(("model", "uuid", "repair", "problem", "compute_mode"), maybe(_label)),
        **dict.fromkeys(
            "utilisation memory_used memory_total memory_free temperature power power_limit ecc_corrected ecc_uncorrected"
            " slowdown".split(),
            maybe(number(-1e6, 1e18)),
        ),
        "held": maybe(_user_of),
        "throttle": rows(_label, 100),
        "users": rows(_label, 10_000),
        "processes": rows(
            fields(
                {"pid": _pid},
                {
                    **dict.fromkeys(("user", "name", "job", "role", "rank"), _label),
                    "memory": maybe(_bytes),
                },
            ),
            10_000,
        ),
    },
)
_used = rows(row(whole(), _label), _MOST_CARDS)
_devices = fields(
    {
        "kind": _label,
        "ids": rows(whole(), _MOST_CARDS),
        "devices": rows(_card, _MOST_CARDS),
        "driver": _label,
        "cuda": _label,
        "problem": text(),
    },
    {"used": _used},
)
_shown_job = fields(
    {
        "job": job_id,
        "heartbeat": maybe(_bytes),
        "ranks": rows(
            fields(
                {**_process, "state": _one_of(RankState), "line": _label},
                {
                    "pid": maybe(_pid),
                    "log": maybe(text()),
                    "seconds": _bytes,
                    "memory": _bytes,
                    "quiet": _bytes,
                },
            ),
            MOST_RANKS,
        ),
    },
    {
        "node": _node,
        "command": maybe(text()),
        "lost": rows(_node, MOST_NODES),
        "plan": fields({"nodes": _names, "places": _places}),
    },
)
_glance = fields(
    {
        "t": _time,
        "cpu": row(whole(), whole()),
        "cpus": whole(),
        "memory": row(whole(), whole()),
        "kind": _label,
        "devices": rows(_card, _MOST_CARDS),
        "problem": text(),
        "jobs": rows(_shown_job, MOST_JOBS),
    }
)
_port = whole(0, HIGHEST_PORT)
_ports = rows(_port, 1 << 17)
_texts = rows(_label, 10_000)
_whole = whole(-(1 << 63), (1 << 63) - 1)
_probe = fields(
    {},
    {
        **dict.fromkeys(
            "hostname address nic boot_id netns root root_id root_hint home user python device_kind no_proxy".split(),
            _label,
        ),
        **dict.fromkeys("rsync ping devices_seen rdma examined".split(), flag),
        **dict.fromkeys("disk_free cpus inodes shm mtu".split(), _whole),
        "devices": rows(whole(), _MOST_CARDS),
        "locked": rows(row(whole(), _label, _label), _MOST_CARDS),
        "used": _used,
        "modules": _texts,
        "ephemeral": row(_port, _port),
        "busy": _ports,
        "listeners": rows(row(_port, _label), 1 << 17),
        "time": _time,
        "listing": rows(_label, _MOST_FILES),
        "job_toml": text(1 << 21),
        "releases": _texts,
        "took": _bytes,
        "memory": row(whole(), whole()),
        "load": _bytes,
        "limits": rows(row(_label, _whole, _whole), 100),
        "proxies": _texts,
        "own": maybe(_label),
        "leftovers": rows(row(_label, whole()), MOST_JOBS),
        "packages": rows(row(_label, _label), 10_000),
        "job_proxies": _texts,
        "problems": rows(row(_label, _label, text(), text()), 10_000),
    },
)
_stopped = fields({"state": _one_of(NODE_ANSWERS), "survivors": rows(_label, 100_000)}, {"waits": flag, "why": text()})
_ids = rows(job_id, MOST_JOBS)


def _or_need(check: Check) -> Check:
    """Instead of the answer, a node may say that it needs the NVML module first."""
    need = fields({"need": _label})

    def either(value: object, path: str) -> None:
        (need if isinstance(value, dict) and "need" in value else check)(value, path)

    return either


done = fields({})
jobs = fields({"jobs": rows(_summary, MOST_JOBS)})
status = fields(_status)
report = fields(_report)
tail = fields({"text": text(1 << 20)})
files = fields({"files": table(text(), whole(), _MOST_FILES)})
stopped = fields({"jobs": table(job_id, _stopped, MOST_JOBS)})
cleaned = fields(
    {"removed": _ids, "running": _ids, "freed": whole()},
    {"kept": table(job_id, row(text(), text()), MOST_JOBS)},
)
probed = _probe
opened = fields({"ports": _ports})
tried = fields({"tries": rows(row(_node, _port, _label, _bytes), MOST_RANKS)})
sent = fields({}, {"speed": _bytes})
met = fields({}, {"seen": rows(_node, MOST_NODES)})
patched = fields({"have": flag})
staged = fields({"dir": text()})
listed = fields({"entries": rows(row(text(), _kind, flag, whole(-(1 << 62), 1 << 62), whole(), text()), _MOST_FILES)})
content = fields({"data": text(1 << 20), "last": flag})
verified = fields(
    {"releases": _size, "pieces": _size, "bytes": _size, "damaged": _size, "lost": rows(_release, MOST_JOBS)}
)
devices = _or_need(_devices)
sample = _or_need(_glance)
error = fields({"kind": text(100), "what": text(1 << 18), "fix": text()})


# -- frames that answer nothing --

_BITS = 1 << 20  # pieces of a workspace, four to a character
_progress = fields({"left": whole(), "live": whole(), "peers": whole(), "came": rows(whole(), MOST_RANKS)})
_LOG_ROLES = (*ROLES, "file")
_FRAMES: Dict[str, Check] = {
    "log": fields(
        {
            "role": matching(_LOG_ROLES.__contains__, "a role"),
            "rank": _rank,
            "attempt": _attempt,
            "log": text(),
            "off": whole(),
        },
        {"node": _node, "t": _seconds},
    ),
    "events": fields({"node": _node, "events": rows(_event, _MOST_EVENTS), "at": whole()}),
    "beat": fields({}, {"t": _seconds}),
    "end": fields({}, {"orphan": flag}),
    "relay-ready": fields({"port": _port, "empty": flag}),
    "relay-lacks": fields({"lacks": text(_BITS), "have": text(_BITS)}),
    "relay-got": _progress,
    "relay-idle": fields({"lacks": text(_BITS), "live": whole(), "why": rows(text(), MOST_NODES)}),
    "relay-done": _progress,
    "relay-wrong": fields({"piece": whole()}),
    "relay-failed": fields({"what": text(1 << 18), "fix": text()}, {"kind": text(100)}),
    "relay-gone": fields({}, {"why": text()}),
}
RELAY = frozenset(type for type in _FRAMES if type.startswith("relay-"))  # reports of a relay
_LARGE = (*RELAY, "events")


def frame_limit(header: Mapping[str, object]) -> int:
    """Bytes that the header of a frame that answers no request may have."""
    return STREAM if header.get("type") in _LARGE else _SHORT


def check_frame(header: Mapping[str, object]) -> None:
    """A frame that answers no request."""
    kind = header.get("type")
    known = _FRAMES.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise Malformed("a frame", "is of no known type")
    known(header, "")
