"""A live sample is the answer for `inv top`, once a second: devices, the node's load, and the ranks of running jobs.

It must cost the node little: job directories are listed only after one was added or removed, events are read from the last
position, and devices are read as often as the cost of their driver allows.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple, cast

from clustertool.errors import NotFound
from clustertool.model.elastic.membership import Membership
from clustertool.model.job.attempts import ProcessStatus
from clustertool.model.job.node_status import NodeStatus
from clustertool.model.job.progress import NOTHING, Metrics, find_metrics
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import RankState
from clustertool.model.shape import to_plain
from clustertool.model.wire.record_lines import read_events
from clustertool.node.devices import read
from clustertool.node.jobs.rank_log import end_of
from clustertool.node.jobs.records import Record, find
from clustertool.node.storage import files
from clustertool.node.system import pressure, processes
from clustertool.node.system.node_context import NodeContext

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Card, GlanceAnswer, JobSample, RankSample
    from clustertool.model.wire.agent_requests import GlanceRequest
    from clustertool.model.wire.event_types import MembershipSample

_LINE = 160  # characters of a log's last line
_AGAIN = 10.0  # seconds after which job directories are listed in any case
_FORGOTTEN = 600.0  # seconds without heartbeat
_TAIL = 2048  # bytes that are searched for it
_PLAN = 10  # samples, one of which names the places of all ranks of a job
_DEVICE = (
    "index model utilisation memory_used memory_total temperature power held problem throttle ecc_uncorrected "
    "compute_mode"
).split()


def glance(node: NodeContext, request: GlanceRequest) -> GlanceAnswer:
    """Return a sample of this node for `inv top`, by a sampler that is kept between requests to this agent."""
    return _sampler(node.root, node.entry, request["nvml"]).sample(request["job"])


class LiveSampler:
    """The sampler of a node for `inv top`, with what it keeps between two samples. module: the digest of the NVML module."""

    def __init__(self, root: str, entry: str, module: str) -> None:
        self._root, self._entry = root, entry
        self._pulse = read.PacedReader(module)
        self._places: Tuple[Tuple[str, int], ...] = ()
        self._again = 0.0
        self._jobs: Dict[str, _SampledJob] = {}

    def sample(self, job: str) -> GlanceAnswer:
        """Sample the node's load, devices, and the running jobs that a user can mean by `job` ("": all).

        Returns {"need": ...} instead if the NVML module has to be sent first.
        """
        found = self._pulse.now()
        if "need" in found:
            return cast("GlanceAnswer", found)
        self._list_jobs()
        shown = [{key: device[key] for key in _DEVICE if key in device} for device in found["devices"]]
        for device, whole in zip(shown, found["devices"]):
            device["users"] = sorted({process["user"] for process in whole["processes"] if process.get("user")})
        running = [one.sample() for one in self._jobs.values() if one.record.called(job)]
        total, available = pressure.memory()
        return {
            "t": time.time(),
            "cpu": pressure.cpu_ticks(),
            "cpus": os.cpu_count() or 1,
            "memory": (total - available, total),
            "kind": found["kind"],
            "devices": cast("List[Card]", shown),
            "problem": found["problem"],
            "jobs": [one for one in running if one is not None],
        }

    def _list_jobs(self) -> None:
        """Find the node's jobs again if a job directory was added or removed, or after 10 s; keep the state of known ones.

        Jobs of another machine, and those whose records cannot be used, are left out.
        """
        places, now = _places(self._root), time.monotonic()
        if places == self._places and now < self._again:
            return
        self._places, self._again = places, now + _AGAIN
        found = find(self._root, self._entry, os.uname().nodename)
        records = [record for record in found if not (record.trouble or record.other_machine())]
        self._jobs = {record.job: self._jobs.get(record.job) or _SampledJob(record) for record in records}


_sampler = lru_cache(maxsize=1)(LiveSampler)  # kept between the requests to an agent


def _places(root: str) -> Tuple[Tuple[str, int], ...]:
    """List (name, time of the last change in ns) of ROOT_DIR, as "", and of the directories of nodes in it that share it."""
    found = []
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(root) if name.startswith("node") and name[4:].isdigit()]
        for name in ["", *sorted(names)]:
            found.append((name, os.stat(os.path.join(root, name)).st_mtime_ns))
    return tuple(found)


class _SampledJob:
    """The state of a job's part on this node, by the events that were read; after its end nothing is read any more."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._at = 0
        self._rest = b""
        self._membership = Membership()
        self._reset()

    def _reset(self) -> None:
        """Begin with a new status without ranks, and count the samples anew."""
        self._status = JobStatus()
        self._here = self._status.nodes[self.record.node] = NodeStatus(self.record.node)
        self._samples = -1

    def sample(self) -> Optional[JobSample]:
        """Read new events, and sample the job's part on this node; None if it has ended, or none of its ranks lives.

        The latter counts only without a heartbeat in 600 s: it was never started, or lost. Every tenth sample has the nodes and
        places of all ranks.
        """
        beat = self.record.heartbeat()
        returns = self._membership.elastic and beat is not None and beat < _FORGOTTEN  # released, and added again
        if self._here.ended is None or returns:
            self._read_events()
        if self._here.ended is not None:
            return None
        own = [rank for rank in self._status.processes.values() if rank.node == self.record.node]
        ranks = [self._rank_sample(rank) for rank in own]
        if (beat is None or beat > _FORGOTTEN) and not any("seconds" in rank for rank in ranks):
            return None  # placed and never started, or lost long ago
        self._samples += 1
        header = self.record.header
        sample: JobSample = {
            "job": self.record.job,
            "node": self.record.node,
            "heartbeat": beat,
            "ranks": ranks,
            "lost": [node.index for node in self._status.nodes.values() if node.lost is not None],
            "command": header.get("command"),
        }
        if self._samples % _PLAN == 0:
            sample["plan"] = {"nodes": header.get("nodes", []), "places": header.get("places", [])}
        membership = self._membership.sample()
        if membership is not None:
            sample["membership"] = cast("MembershipSample", membership)
        return sample

    def _read_events(self) -> None:
        """Apply the events that are new since the last call to header, membership and status; ignore malformed ones.

        A new epoch of an elastic job resets the status.
        """
        with contextlib.suppress(OSError):
            with open(self.record.paths.events, "rb") as file:
                file.seek(self._at)
                new = file.read()
            self._at += len(new)
            *lines, self._rest = (self._rest + new).split(b"\n")
            for event in read_events(lines):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    self._membership.apply(event)
                    if event["type"] == "job":  # the directory may have been found before it was filled
                        self.record.header = event
                    if event["type"] == "job" and "lead" in event:  # an epoch of an elastic job, with other ranks
                        self._reset()
                    elif event["type"] == "job":
                        continue
                    self._status.apply(self.record.node, event)

    def _rank_sample(self, rank: ProcessStatus) -> RankSample:
        """Sample a rank: state, CPU seconds, bytes of memory, the last line of its log, and for how many seconds it is silent.

        A rank without process and supervisor is LOST: its machine has crashed since.
        """
        shown: Dict[str, Any] = {name: getattr(rank, name) for name in ("role", "rank", "state", "log")}
        shown["pid"] = rank.pid if rank.state.alive else 0
        found = processes.stat(rank.pid) if shown["pid"] else None
        if found is not None and found.start == rank.start:
            shown["seconds"], shown["memory"] = found.cpu, found.memory
        living = found is not None and "seconds" in shown and found.state not in "ZX"
        if rank.state.alive and not living and not self.record.supervised(self._here):
            shown["state"] = RankState.LOST  # its machine has crashed since
        shown["line"], written, numbers = _last_line(self.record.paths.dir, rank.log)
        shown["metrics"] = to_plain(numbers)
        if written and (shown["state"] is RankState.LOST or shown["state"].alive):
            shown["quiet"] = round(max(0.0, time.time() - written), 1)
        return cast("RankSample", shown)


def _last_line(job_dir: str, log: str) -> Tuple[str, float, Metrics]:
    """Read the last line of a log that is not empty, of a progress bar its last state; when it was written; and its numbers.

    Reads 2 KiB, and returns 160 characters at most; ("", 0.0, no numbers) if there is no log or it cannot be read.
    """
    with contextlib.suppress(OSError, NotFound):
        with files.closing(files.open_job_dir(job_dir)) as job:
            data, written = end_of(job, log, _TAIL)
        text = data.decode("utf-8", "backslashreplace")
        lines = [line.strip() for line in text.replace("\r", "\n").split("\n")]
        return next((line for line in reversed(lines) if line), "")[:_LINE], written, find_metrics(text)
    return "", 0.0, NOTHING
