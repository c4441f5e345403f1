"""The node monitor samples what the job does on this node twice a second: descendants, disk, memory, devices, usage, logs.

Its recorder is a thread that records what ranks use and when their logs grew. A slow disk or driver costs lines, never a
heartbeat. The loop only passes the list of living processes and grown logs. The thread samples /proc and the cards, and
writes; while it is busy, further lists are dropped. model/job/usage.py defines the lines and how old ones are thinned out.

The card monitor is a process next to the supervisor that samples the job's cards: a driver's library may hang or crash. It
sends its samples, and no process waits for it. It ends when the supervisor ends it, when the supervisor is gone (by the
kernel), or when its socket is closed. If it dies, it is started again, a few times. None of its errors makes a job fail.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ClassVar,
    Dict,
    FrozenSet,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
)

from clustertool.model.cards import positions_of_numbers
from clustertool.model.job import usage
from clustertool.model.job.job_steps import JobSteps
from clustertool.model.job.outcome import Key
from clustertool.model.job.progress import NOTHING, Metrics, StepRate, prometheus_text
from clustertool.model.job.usage import CardUsage, RankUsage, UsageLine
from clustertool.model.paths import METRICS, OURS, JobPaths
from clustertool.model.shape import to_plain
from clustertool.node.devices import detect, nvml, vendor_tools
from clustertool.node.jobs.descendants import Descendants, Owners
from clustertool.node.jobs.rank_log import progress
from clustertool.node.storage import files
from clustertool.node.storage.disk_worker import DiskWorker
from clustertool.node.supervisor.helper_process import HelperProcess
from clustertool.node.supervisor.rank_table import Growth, RankTable, Running
from clustertool.node.supervisor.trainer_endpoint import TrainerEndpoint
from clustertool.node.system import pressure, processes
from clustertool.node.system.pressure import DiskWatch
from clustertool.node.system.processes import Process, Stat

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

_SAMPLE_EVERY = 0.5  # seconds between two samples of the node
EVERY = 2.0  # seconds between two lines
_SHARE = 500  # a sample of thousands of processes is less frequent: it may take this part of a core
_MORE = 1000  # new lines, after which the old ones are thinned out, or as many as had stayed
_WAITING = 1000  # calls for a thread that waits for its disk
_PROGRESS = 4096  # bytes of a log in which numbers are searched
_FAREWELL = 0.5  # seconds the last lines get
_FILE_EVERY = 5.0  # seconds between two versions of METRICS_FILE
_CARD_SHARE = 200  # the card monitor and the tools that it runs may take one part of so many of a core
_TRIES = 3  # card monitors that there will be, each after the death of the one before
_MESSAGE = 1 << 16
_MEMORY_LEFT = 512 << 20  # bytes that may be in use beyond the least sample: contexts of other programs come and go
_MEMORY_WAIT = 60.0  # seconds for the memory of cards to become free after the end of ranks
_SAMPLE_WAIT = 10.0  # seconds for the first sample after it

_MOST_FILES = 10_000

Output = Tuple[int, int, int]  # of the output: number of files, bytes, newest time in ns
Reached = Tuple[str, int, Optional[float], Optional[float], float]  # role, rank, epoch, step, time of its last output


class NodeMonitor:
    """The samples of a job on its node: of descendants, disk, ranks and cards twice a second, and of the growth of logs.

    Call turn() each loop, close() once. job: the descriptor of the job's directory. record: writes an event.
    """

    def __init__(
        self, spec: Spec, job: int, family: Descendants, ranks: RankTable, record: Callable[..., None]
    ) -> None:
        self._root = spec["root"]
        self._family = family
        self._ranks = ranks
        self._record = record
        self._disk = DiskWatch(job)
        self.devices = CardMonitor(family, spec, record)
        # Only the hang watch uses what is measured there.
        output = os.path.join(spec["job_dir"], spec["output"]) if spec["policy"]["hang_timeout"] else ""
        self.recorder = UsageRecorder(job, self.devices, output, RankMetrics(job, spec["job"], metrics_file(spec)))
        self._sampled_at = 0.0
        self._trainers: FrozenSet[int] = frozenset()  # the pids of those that ran at the newest sample
        self._output: Output = (0, 0, 0)
        self._progress_at = 0.0  # when a trainer has made progress last
        self.endpoint = TrainerEndpoint(job, spec, self._take_posted)

    def _take_posted(self, key: Key, numbers: Metrics) -> None:
        """Have the recorder add numbers that a rank of this node has sent; other ranks are ignored. In any thread."""
        rank = self._ranks.find(key)
        if rank is not None:
            self._progress_at = time.monotonic()
            self.recorder.take_posted(key, JobPaths.log(*key, rank.attempt), numbers)

    def turn(self) -> bool:
        """Record how logs grew; each 0.5 s, sample descendants, disk and ranks, and have the recorder write the usage.

        Starts the card monitor if it has to run. Returns whether it has taken the sample. Changes of the disk and of stopped
        containers become events.
        """
        self.record_growth()
        now = time.monotonic()
        if now < self._sampled_at + _SAMPLE_EVERY:
            return False
        self._sampled_at = now
        self._family.update()
        self.disk_is_full()
        for rank in self._ranks.running.values():
            if rank.sample() and rank.container is not None:
                role, number = rank.key
                self._record("frozen" if rank.container.frozen else "thawed", role=role, rank=number)
        if self._ranks.running:
            self.devices.turn()
        self.recorder.turn(self._family.members, self._ranks.snapshot())
        trainers = frozenset(pid for pid, rank in self._ranks.running.items() if rank.key[0] == "trainer")
        if (trainers, self.recorder.output) != (self._trainers, self._output):
            self._trainers, self._output, self._progress_at = trainers, self.recorder.output, now
        return True

    @property
    def quiet(self) -> Optional[float]:
        """The seconds for which no trainer here has printed, sent a number, written into output/, started or ended.

        None if no trainer runs here.
        """
        return time.monotonic() - self._progress_at if self._trainers else None

    def record_growth(self, at_once: bool = False) -> None:
        """Pass the logs that grew to the recorder; `at_once`: also those whose growth was recorded less than 0.5 s ago."""
        lines = self._ranks.growth(at_once)
        servers = {rank.log_name for rank in self._ranks.of_role("pserver")}
        if any(line[1] not in servers for line in lines):
            self._progress_at = time.monotonic()
        self.recorder.write_growth(lines)

    def disk_is_full(self) -> bool:
        """Sample the disk, write an event if its state has changed, and return whether it is full."""
        if self._disk.update():
            self._record("disk", full=self._disk.full, root=self._root)
        return self._disk.full

    def close(self) -> None:
        """Record the last growth of the logs, and wait briefly for the recorder to end."""
        self.endpoint.close()
        self.record_growth(at_once=True)
        self.recorder.close()


class UsageRecorder:
    """The recorder of what ranks use and how logs grew, with its thread and its files.

    Call turn() with each sample, and close() at the end. cards: is called in the thread and may be slow. folder: of the output.
    """

    def __init__(
        self,
        job: int,
        cards: Callable[[], Sequence[CardUsage]] = tuple,
        folder: str = "",
        metrics: Optional[RankMetrics] = None,
    ) -> None:
        self.output: Output = (0, 0, 0)  # of `folder`, that of the output
        self._folder = folder
        # Of the running ranks, at the newest sample; a new object after each change.
        self.progress: Tuple[Reached, ...] = ()
        self.steps = JobSteps()  # that ranks, but no pservers, have printed at the samples
        self.metrics = metrics or RankMetrics(job)
        self._file_at = 0.0
        self._job = job
        self._cards = cards
        self._at = 0.0
        self._pause = EVERY
        self._worker = DiskWorker()
        self._busy = False
        self._usage = Book(job, f"{OURS}/usage.jsonl")
        self._growth = Book(job, f"{OURS}/growth.jsonl")
        self._sampler = Sampler()
        self._sampled: FrozenSet[Running] = frozenset()  # the ranks at the newest sample

    def turn(self, members: Sequence[Process], ranks: Sequence[Running]) -> None:
        """Have the thread sample and write the usage of the ranks if that is due, the thread is idle and a rank runs.

        Does not wait. members: every living descendant.
        """
        now = time.monotonic()
        if now < self._at or self._busy or not ranks:
            return
        self._at = now + self._pause
        self._busy = True  # before the thread can be done with it
        if not self._worker.put(self._record_usage, time.time(), members, ranks):
            self._busy = False

    def write_growth(self, lines: Sequence[Growth]) -> None:
        """Have the thread write lines of how logs grew; drop them if 1000 calls wait. Does not wait."""
        if lines and self._worker.waiting < _WAITING:
            self._worker.put(self._growth.write, lines[-1][0], *lines)

    def take_posted(self, key: Key, log: str, numbers: Metrics) -> None:
        """Have the thread add numbers that a rank has sent; drop them if 1000 calls wait. log: that of its attempt."""
        if self._worker.waiting < _WAITING:
            self._worker.put(self.metrics.take, key, log, time.time(), numbers)

    def write_metrics(self, others: Mapping[Key, Metrics]) -> None:
        """Have the thread write METRICS_FILE if that is due and it is idle. others: the numbers of ranks of other nodes."""
        now = time.monotonic()
        if self.metrics.file and now >= self._file_at and not self._worker.waiting:
            self._file_at = now + _FILE_EVERY
            self._worker.put(self.metrics.write_file, {**others})

    def close(self) -> None:
        """End the thread after it has written the queued lines and closed the files; wait up to 0.5 s for that."""
        self._worker.end(_FAREWELL, self._usage.close, self._growth.close, self.metrics.close)

    # -- in the thread --

    def _record_usage(self, t: float, members: Sequence[Process], ranks: Sequence[Running]) -> None:
        """Sample and write a line with the usage of machine, ranks and cards; read the progress of ranks from their logs.

        Sets the pause to the next sample: 500 times its CPU time, 2 s at least.
        """
        began = time.thread_time()
        line = self._sampler(t, members, ranks)
        self._read_logs(ranks)
        self.output = _measure(self._folder)
        with contextlib.suppress(OSError, ValueError):
            cards = self._cards()
            if cards:
                line["d"] = list(cards)
        self._usage.write(t, line)
        self._pause = max(EVERY, _SHARE * (time.thread_time() - began))
        self._busy = False

    def _read_logs(self, ranks: Sequence[Running]) -> None:
        """Set `progress` to what the ends of the ranks' logs show, for the coordinator; record their numbers, and add `steps`.

        It is all that the coordinator knows of the ranks if this node is lost. A log that has not grown since the newest sample
        is not read again.
        """
        before, found = {reached[:2]: reached for reached in self.progress}, []
        attempts = {rank[:3] for rank in self._sampled}
        for rank in ranks:
            key = rank.role, rank.rank
            if key in before and rank in self._sampled:
                found.append(before[key])
                continue
            log = JobPaths.log(*key, rank.attempt)
            now = progress(self._job, log, _PROGRESS)
            if now is not None:
                found.append((*key, *now[:3]))
                self.metrics.take(key, log, now.output, now.numbers)
                if rank.role != "pserver":
                    known = [before[key][2:4]] if key in before and rank[:3] in attempts else []
                    self.steps = self.steps.add([*known, now[:2]])
        self._sampled = frozenset(ranks)
        if tuple(found) != self.progress:
            self.progress = tuple(found)


def _measure(folder: str) -> Output:
    """Return (number of files, their bytes, newest time in ns) of a folder, by the first 10,000 files; (0, 0, 0) without it."""
    count, size, newest = 0, 0, 0
    for path, _, names in os.walk(folder):
        for name in names[: _MOST_FILES - count]:
            with contextlib.suppress(OSError):
                about = os.lstat(os.path.join(path, name))
                count, size, newest = count + 1, size + about.st_size, max(newest, about.st_mtime_ns)
        if count >= _MOST_FILES:
            break
    return count, size, newest


class Book:
    """A file of lines, thinned out now and then. It is replaced whole, so a reader never sees half of it."""

    def __init__(self, job: int, name: str) -> None:
        self._job, self._name = job, name
        self._journal: Optional[files.Journal] = None
        self._fresh = self._stayed = 0

    def write(self, now: float, *lines: object) -> None:
        """Append lines; thin the file out after 1000 new ones, or as many as had stayed. On an OSError they are lost."""
        with contextlib.suppress(OSError):  # no room for the file: the lines are lost
            self._journal = self._journal or files.Journal(files.open_append(self._job, self._name))
            self._journal.write(*lines)
            self._fresh += len(lines)
            if self._fresh >= max(_MORE, self._stayed):
                self._fresh = 0
                self._thin(now)

    def _thin(self, now: float) -> None:
        """Replace the file by one in which older lines are thinned out. Raises OSError."""
        data = usage.thin_out(files.read(self._job, self._name), now)
        files.create(self._job, self._name + ".new", data, exclusive=False)
        os.rename(self._name + ".new", self._name, src_dir_fd=self._job, dst_dir_fd=self._job)
        self._stayed = data.count(b"\n")
        self.close()

    def close(self) -> None:
        """Close the file; write() opens it again."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None


def metrics_file(spec: Spec) -> str:
    """Return the path of METRICS_FILE if this node is to write it: the coordinator's; else ""."""
    return os.path.expanduser(spec.get("metrics_file", "")) if spec["node"] == spec["lead"]["node"] else ""


class RankMetrics:
    """The newest numbers of each rank on this node, and metrics.jsonl, which gets a line when they change.

    For the recorder's thread. newest: a new object after each change. name: of the job. file: METRICS_FILE, which node_exporter
    reads (--collector.textfile.directory), on the coordinator's node; "" is none.
    """

    def __init__(self, job: int, name: str = "", file: str = "") -> None:
        self.newest: Mapping[Key, Metrics] = {}
        self.file = file
        self._name = name
        self._failed = False
        self._book = Book(job, METRICS)
        self._attempts: Dict[Key, _AttemptMetrics] = {}

    def take(self, key: Key, log: str, t: float, found: Metrics) -> None:
        """Add the numbers that a rank has printed by the time `t`; write them with the ones before if there is a new one.

        log: that of its attempt. In a new attempt, nothing is known before.
        """
        attempt = self._attempts.get(key)
        if attempt is None or attempt.log != log:
            attempt = self._attempts[key] = _AttemptMetrics(log)
        known = attempt.add(t, found)
        row = to_plain([*known])  # in which a NaN is equal to another
        if row != to_plain([*self.newest.get(key, NOTHING)]):
            self.newest = {**self.newest, key: known}
            self._book.write(t, [round(t, 2), log, row])

    def write_file(self, others: Mapping[Key, Metrics]) -> None:
        """Write a new METRICS_FILE, and rename it, so that nothing reads half of it; the first error goes to supervisor.err."""
        try:
            text = prometheus_text(self._name, {**others, **self.newest})
            files.replace(self.file, text.encode(), durable=False, mode=0o644)  # node_exporter has another user
        except OSError as error:
            if not self._failed:
                print(f"METRICS_FILE {self.file} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
            self._failed = True

    def close(self) -> None:
        """Close metrics.jsonl, and remove METRICS_FILE: the numbers of an ended job are no present ones."""
        self._book.close()
        with contextlib.suppress(OSError):
            os.unlink(self.file)


class _AttemptMetrics:
    """The numbers of a rank in one attempt. first: when a percentage was read first, and that."""

    def __init__(self, log: str) -> None:
        self.log = log
        self._printed = NOTHING
        self._rate = StepRate()
        self._first: Optional[Tuple[float, float]] = None

    def add(self, t: float, found: Metrics) -> Metrics:
        """Add what was printed by the time `t`; return all that is known, with the rate and the seconds left, if computable.

        A rate that the program prints itself counts. The seconds left are by the mean pace since the first percentage.
        """
        self._printed = known = found.after(self._printed)
        if known.step is not None and known.steps_per_second is None:
            self._rate.feed(known.step, t)
            rate = self._rate.compute(t)
            known = known._replace(steps_per_second=None if rate is None else round(rate, 4))
        if known.percent is None or known.eta is not None:
            return known
        if self._first is None or known.percent < self._first[1]:
            self._first = t, known.percent
        seconds, done = t - self._first[0], known.percent - self._first[1]
        return known._replace(eta=round(seconds * (100 - known.percent) / done, 1)) if done > 0 else known


class Sampler:
    """The usage of all ranks so far, that of ended processes included, and the rank of each process."""

    def __init__(self) -> None:
        self._owners = Owners()
        self._used: Dict[Key, Tuple[int, float, float]] = {}  # (pid, seconds of the living then, seconds so far)

    def __call__(self, t: float, members: Sequence[Process], ranks: Sequence[Running]) -> UsageLine:
        """Build {t: time, n: machine_usage(), r: rows of the ranks} from /proc; members that have ended since are left out."""
        stats = {}
        for member in members:
            found = processes.stat(member.pid)
            if found is not None and found.start == member.start:
                stats[member.pid] = found
        owned = self._owned(stats, {rank.pid: (rank.role, rank.rank) for rank in ranks})
        rows = [self._row(rank, owned.get((rank.role, rank.rank), ())) for rank in ranks]
        return {"t": round(t, 2), "n": machine_usage(), "r": rows}

    def _row(self, rank: Running, stats: Sequence[Stat]) -> RankUsage:
        """Build a row: (role, rank, attempt, CPU seconds so far, bytes of memory, living processes, bytes of its log).

        A process's time is added to its parent when it is waited for, so the sum over the living grows, except for orphans.
        """
        key = (rank.role, rank.rank)
        total = sum(stat.cpu + stat.waited for stat in stats)
        pid, before, seconds = self._used.get(key, (rank.pid, 0.0, 0.0))
        seconds += max(0.0, total - (before if pid == rank.pid else 0.0))
        self._used[key] = rank.pid, total, seconds
        living = [stat for stat in stats if stat.state not in "ZX"]
        memory = sum(stat.memory for stat in living)
        return rank.role, rank.rank, rank.attempt, round(seconds, 2), memory, len(living), max(rank.log_size, 0)

    def _owned(self, stats: Dict[int, Stat], ranks: Dict[int, Key]) -> Dict[Key, List[Stat]]:
        """Group the stats of members by rank; leave out members of no rank."""
        found: Dict[Key, List[Stat]] = {}
        for pid, key in self._owners.find(stats, ranks).items():
            found.setdefault(key, []).append(stats[pid])
        return found


def machine_usage() -> Tuple[float, int, int, int]:
    """Return (busy CPU seconds, cores, bytes used, bytes of memory) of this machine; zeros for what is not available."""
    total, available = pressure.memory()
    return round(pressure.cpu_ticks()[0] / processes.TICKS, 2), os.cpu_count() or 0, total - available, total


class CardMonitor(HelperProcess):
    """The supervisor's side of the process that samples the job's cards: a call returns the newest sample.

    Call turn() with each sample of the descendants, changed() on the process's SIGCHLD, and end() once.
    """

    # The fewest bytes in use of each card, by its number in the plan: of all epochs that this process supervises.
    _least: ClassVar[Dict[int, int]] = {}

    def __init__(self, family: Descendants, spec: Spec, record: Callable[..., None]) -> None:
        super().__init__(family, spec["mark"])
        self._record, self._kind = record, spec["device_kind"]
        taken = {card for rank in spec["processes"] for card in rank["devices"]}
        each = positions_of_numbers(spec["allocated"]) if spec.get("allocated") else {card: card for card in taken}
        # Number on the node -> as in the plan.
        self._cards = {number: card for number, card in each.items() if card in taken}
        self._ids = sorted(self._cards)
        self._sock: Optional[socket.socket] = None
        self._tries = _TRIES if self._ids and self._kind != "cpu" else 0
        self._used: Dict[int, int] = {}  # bytes of each card, at the newest sample
        self._since = -_MEMORY_WAIT  # when the wait for free memory began
        self._recorded = False

    def turn(self) -> None:
        """Start the monitor if it does not run and tries are left.

        If this node has no readable cards of the job, no tries are left from then on.
        """
        if self.pid or not self._tries:
            return
        self._tries -= 1
        if not has_readable_cards(self._kind):
            self._tries = 0
            return
        with contextlib.suppress(OSError):  # no process to spare
            self._start()

    def __call__(self) -> Sequence[CardUsage]:
        """Return the newest sample that came since the last call; an empty one if none came. Never waits.

        A row is (card of the plan, percent of use, bytes used, bytes of memory). The recorder's thread calls it.
        """
        sock, newest = self._sock, []
        with contextlib.suppress(OSError, ValueError):
            while sock is not None:
                data = sock.recv(_MESSAGE, socket.MSG_DONTWAIT)
                if not data:
                    break
                newest = [(self._cards[index], *load) for index, *load in json.loads(data)]
                self._least.update((card, min(used, self._least.get(card, used))) for card, _, used, _ in newest)
                self._used = {card: used for card, _, used, _ in newest}
        return newest

    def expect_free(self) -> None:
        """Begin to wait for the memory of cards that ended ranks have used, see waits(); leave out samples until now.

        Before the first ranks there is no wait. Starts the monitor, so that its first sample comes before they use memory.
        """
        self()
        self._used, self._recorded, self._since = {}, False, time.monotonic() if self._least else -_MEMORY_WAIT
        self.turn()

    def waits(self) -> bool:
        """Check whether ranks must wait, since 512 MiB more of a card are in use than at its least sample; record this once.

        The wait ends after 60 s, or 10 s without a sample, or if the monitor does not run.
        """
        passed = time.monotonic() - self._since
        if self.pid and passed < _MEMORY_WAIT:
            self()
            busy = {card: used for card, used in self._used.items() if used > self._least[card] + _MEMORY_LEFT}
            if busy and not self._recorded:
                self._recorded = True
                self._record("memory-in-use", devices=sorted(busy), used=sum(busy.values()), seconds=_MEMORY_WAIT)
            if busy or (not self._used and passed < _SAMPLE_WAIT):
                return True
        self._since = -_MEMORY_WAIT
        return False

    def _start(self) -> None:
        """Start the monitor, connected by a socket pair, and record it. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            body = partial(sample_cards, theirs, self._kind, self._ids)
            self.fork(theirs.fileno(), body)
        self._sock = ours
        process = processes.identify(self.pid)
        if process:
            self._record("gauge", pid=self.pid, start=process.start)


def has_readable_cards(kind: str) -> bool:
    """Check whether this node has a library or tool that samples cards of this kind. Whether it works is not tested."""
    if kind == "gpu":
        return bool(nvml.newest()) and (bool(detect.library()) or os.path.exists("/dev/nvidiactl"))
    return bool(vendor_tools.program(kind))


def sample_cards(sock: socket.socket, kind: str, ids: Sequence[int]) -> None:
    """Send samples of the cards as JSON, every 2 s or less often if they take much CPU time, until the socket is closed.

    The CPU time of the first sample is not counted.
    """
    processes.set_name("ct-gauge")
    read, used = card_reader(kind, ids), None
    while True:
        before = processes.used_cpu_seconds()
        try:
            sock.send(json.dumps(read()).encode(), socket.MSG_DONTWAIT)
        except BlockingIOError:  # the reader does not take it at the moment
            pass
        except ConnectionError:
            return
        used = 0.0 if used is None else processes.used_cpu_seconds() - before
        if select.select([sock], [], [], max(EVERY, _CARD_SHARE * used))[0]:
            return


def card_reader(kind: str, ids: Sequence[int]) -> Callable[[], List[CardUsage]]:
    """Create the function that samples these cards, by NVML or by the vendor's tool; a call of it may hang."""
    if kind == "gpu":
        digest = nvml.newest()
        return lambda: nvml.load(digest, ids)
    return lambda: [
        _card_usage(one)
        for one in vendor_tools.read(kind)["devices"]
        if one["index"] in ids and one.get("memory_total")
    ]


def _card_usage(device: Any) -> CardUsage:
    """Return (index, utilisation, bytes used, bytes of memory) of a device; 0 for a use that is not known."""
    return device["index"], device.get("utilisation") or 0, device.get("memory_used") or 0, device["memory_total"]
