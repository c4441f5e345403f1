"""The model of `inv top`: samples of nodes in, rows out, folded until they fit. Pure: times come with the samples."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from clustertool.model.job.progress import NOTHING, Metrics, StepRate
from clustertool.model.job.rank_places import unpack
from clustertool.model.job.state_names import RankState
from clustertool.model.shape import read
from clustertool.model.wire.agent_answers import CardValues, GlanceAnswer, JobSample, RankSample
from clustertool.model.wire.event_types import MembershipSample, SamplePlan

_HISTORY = 60
_TREND = 8  # samples of a rank's trends
SORTS = ("rank", "cpu", "memory", "rate")
_BUCKETS = (10, 25, 50, 101)  # percent: nodes that are so close in load and memory are alike


@dataclass
class TopRank:
    """One process of a job. epoch: of its sample, in an elastic job."""

    job: str
    agent: int
    node: str
    role: str
    rank: int
    state: RankState = RankState.WAITING
    pid: int = 0
    log: str = ""
    cpu: float | None = None
    memory: int | None = None
    line: str = ""
    heartbeat: float | None = None
    speed: float | None = None
    loss: float | None = None
    # Of the last samples, steps a second and loss.
    trends: Sequence[tuple[float | None, ...]] = ((), ())
    quiet: float | None = None  # seconds since it printed something
    rate: StepRate = field(default_factory=StepRate)
    seconds: tuple[float, float] = (0.0, 0.0)  # CPU seconds, and when they were read
    epoch: int = 0

    @property
    def name(self) -> str:
        return f"{self.role} {self.rank}"


@dataclass(frozen=True)
class Row:
    """One line about devices: a card, a node's cards, or those of several nodes. A node without cards has its processors.

    `label` and `model` are of one card.
    """

    nodes: tuple[str, ...]
    what: str
    loads: tuple[float, ...]
    used: int
    total: int
    temperature: int | None
    user: str
    wrong: tuple[str, ...]
    history: tuple[float, ...]
    label: str = ""
    model: str = ""

    @property
    def load(self) -> float | None:
        return sum(self.loads) / len(self.loads) if self.loads else None

    @property
    def filled(self) -> float:
        return self.used / self.total if self.total else 0.0


class TopModel:
    """The newest samples of all nodes, with their jobs and ranks: feed() each sample, then ask for rows() and processes()."""

    def __init__(self) -> None:
        self.devices: dict[str, list[Row]] = {}
        self.ranks: dict[tuple[str, str, int], TopRank] = {}
        self.sampled: dict[str, float] = {}
        self.problems: dict[str, str] = {}
        # By node, what it knew of its running jobs at its newest sample.
        self._jobs: dict[str, dict[str, _KnownJob]] = {}
        self._place: dict[str, int] = {}  # a node's number in conf.py
        self._cpu: dict[str, tuple[int, int]] = {}

    def feed(self, agent: int, name: str, sample: GlanceAnswer, now: float) -> None:
        """Store a sample of a node: its devices, its jobs and their ranks; remove the ranks that the node does not have now.

        A rank that another node has reported in a later epoch stays as it is. agent, name: number and name of the node. now:
        when it came.
        """
        self.sampled[name], self._place[name] = now, agent
        self.problems[name] = str(sample["problem"])
        self._take_devices(name, sample)
        seen = set()
        before, self._jobs[name] = self._jobs.get(name, {}), {}
        for job in sample["jobs"]:
            plan, lost = job.get("plan"), {int(node) for node in job.get("lost", ())}
            places = _places(plan) if plan else before.get(str(job["job"]), _KnownJob()).places
            known = self._jobs[name][str(job["job"])] = _KnownJob(places, lost, job.get("membership"))
            for values in job["ranks"]:
                key = (str(job["job"]), str(values["role"]), int(values["rank"]))
                rank = self.ranks.get(key)
                if rank is not None and rank.agent != agent and rank.epoch > known.epoch:
                    continue  # another node has it in a later epoch
                seen.add(key)
                if rank is None or rank.agent != agent:
                    rank = self.ranks[key] = TopRank(key[0], agent, name, key[1], key[2])
                rank.epoch = known.epoch
                _take_rank(rank, values, job, float(sample["t"]))
        for key in [key for key, rank in self.ranks.items() if rank.agent == agent and key not in seen]:
            del self.ranks[key]

    def _take_devices(self, name: str, sample: GlanceAnswer) -> None:
        """Store the devices of a sample as rows, with their history; for a node without devices, its processors."""
        histories = {card.label: card.history for card in self.devices.get(name, ())}
        self.devices[name] = []
        cards: Sequence[CardValues] = sample["devices"]
        for values in cards or [self._processors(name, sample)]:
            label, model = str(values.get("index", "")), str(values.get("model") or sample["kind"])
            loads = tuple(float(load) for load in [values.get("utilisation")] if load is not None)
            used, total = int(values.get("memory_used") or 0), int(values.get("memory_total") or 0)
            history = (*histories.get(label, ()), *(loads or (0.0,)))[-_HISTORY:]
            what, about = f"{label} {model}".strip(), (values.get("temperature"), _user_of(values), _faults_of(values))
            self.devices[name].append(Row((name,), what, loads, used, total, *about, history, label, model))

    def _processors(self, name: str, sample: GlanceAnswer) -> CardValues:
        """Describe the processors and memory of a node as a device, with their load since its sample before, None at first."""
        busy, every = sample["cpu"]
        before = self._cpu.get(name, (busy, every))
        self._cpu[name] = (busy, every)
        load = round(100 * (busy - before[0]) / (every - before[1])) if every > before[1] else None
        used, total = sample["memory"]
        return {"model": f"{sample['cpus']} cpus", "utilisation": load, "memory_used": used, "memory_total": total}

    # -- rows --

    def rows(self, room: int, sort: str, text: str) -> list[Row]:
        """Build rows about all devices of the nodes that a filter finds: one for each card; if more than `room`, one a node.

        If these are too many, too, nodes with similar load and memory are one row, more and more coarsely. text: the filter; it
        finds a node by its name, the user of a device, or a rank on it. sort: "cpu" or "memory", the highest first; else by the
        nodes' numbers.
        """
        places = sorted(self.devices, key=lambda name: self._place[name])
        there = {rank.node for rank in self.processes("rank", text)} if text else set()
        chosen = [name for name in places if name in there or _filter_finds_node(name, self.devices[name], text)]
        nodes = {name: self.devices[name] for name in chosen}
        rows = [card for found in nodes.values() for card in found]
        if len(rows) > room:
            rows = [_combine_devices(found, _models_text(found)) for found in nodes.values()]
        for bucket in _BUCKETS:
            if len(rows) <= room:
                break
            rows = list(_fold_similar_nodes(nodes, bucket))
        if sort == "cpu":
            rows.sort(key=lambda row: -(row.load or 0))
        elif sort == "memory":
            rows.sort(key=lambda row: -row.filled)
        return rows

    def processes(self, sort: str, text: str, away: Collection[str] = ()) -> list[TopRank]:
        """List the ranks of all running jobs that a filter finds, in the order of `sort`, with those that no node reports now.

        text: the filter. away: nodes that do not answer; their ranks that had not ended are LOST or UNKNOWN.
        """
        every = [rank for rank in self.ranks.values() if rank.node not in away] + list(self._unreported_ranks(away))
        found = [rank for rank in every if _filter_finds_rank(text, rank)]
        found.sort(key=lambda rank: (rank.job, rank.role, rank.rank))  # stable: equals stay in this order
        if sort == "cpu":
            found.sort(key=lambda rank: -(rank.cpu or 0))
        elif sort == "memory":
            found.sort(key=lambda rank: -(rank.memory or 0))
        elif sort == "rate":  # those that make no progress first, then the slowest
            counting = {(rank.job, rank.role) for rank in every if rank.rate.has_steps}
            found.sort(key=lambda rank: _progress_key(rank, (rank.job, rank.role) in counting))
        return found

    def _unreported_ranks(self, away: Collection[str]) -> Iterator[TopRank]:
        """Yield the ranks that no node reports now: of nodes that do not answer, and those that have not started."""
        jobs = self._merge_known_jobs(away)
        for rank in self.ranks.values():
            if rank.node in away and rank.job in jobs and jobs[rank.job].may_have(rank):
                node, _ = jobs[rank.job].places.get((rank.role, rank.rank), (-1, ""))
                ended = rank.state in (RankState.DONE, RankState.FAILED, RankState.STOPPED)
                state = rank.state if ended else jobs[rank.job].state(node)
                yield replace(rank, state=state, cpu=None, memory=None, speed=None, heartbeat=None, quiet=None)
        for job, about in jobs.items():
            for (role, number), (node, name) in about.places.items():
                if (job, role, number) in self.ranks:
                    continue
                if name in away or name not in self.sampled:
                    yield TopRank(job, -1, name, role, number, about.state(node))
                elif job in self._jobs[name]:
                    yield TopRank(job, -1, name, role, number)

    def _merge_known_jobs(self, away: Collection[str]) -> dict[str, _KnownJob]:
        """Merge what all nodes know of each job that runs on a node that answers, in the job's newest epoch.

        If no node answers, all jobs of the last samples count. away: nodes that do not answer; the losses that they report do
        not count.
        """
        names = [name for name in self._jobs if name not in away]
        there = {job for name in names or self._jobs for job in self._jobs[name]}
        found: dict[str, _KnownJob] = {}
        newest = {job: max(jobs[job].epoch for jobs in self._jobs.values() if job in jobs) for job in there}
        for name, jobs in self._jobs.items():
            for job in there & set(jobs):
                known = jobs[job]
                if known.epoch < newest[job]:
                    continue
                one = found.setdefault(job, _KnownJob(membership=known.membership))
                one.places.update(known.places)
                one.lost |= known.lost if name not in away else set()
        return found

    def memberships(self, away: Collection[str] = ()) -> dict[str, MembershipSample]:
        """Return {job: membership} of running elastic jobs: that of the newest epoch, if possible from its coordinator.

        From another node it has the nodes of the plan. away: nodes that do not answer; they are left out.
        """
        found: dict[str, MembershipSample] = {}
        for name in sorted(set(self._jobs) - set(away)):
            for job, known in self._jobs[name].items():
                new, old = known.membership, found.get(job)
                if new is not None and (old is None or _membership_order(new) > _membership_order(old)):
                    planned = sorted(set(known.places.values()))
                    found[job] = new if new["coordinates"] else {**new, "nodes": [name for _, name in planned]}
        return dict(sorted(found.items()))


@dataclass
class _KnownJob:
    """What nodes know of a job: (role, rank) -> its node's number and name, and the numbers of nodes that were given up.

    membership: of an elastic job.
    """

    places: dict[tuple[str, int], tuple[int, str]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    membership: MembershipSample | None = None

    @property
    def epoch(self) -> int:
        return self.membership["epoch"] if self.membership is not None else 0

    def may_have(self, rank: TopRank) -> bool:
        """Check whether a rank that was reported before belongs to the newest epoch; True if the job is not elastic."""
        return self.membership is None or (rank.epoch == self.epoch and (rank.role, rank.rank) in self.places)

    def state(self, node: int) -> RankState:
        """Return the state of the ranks of a node that does not answer: LOST if the job has given it up, else UNKNOWN."""
        return RankState.LOST if node in self.lost else RankState.UNKNOWN


def _membership_order(known: MembershipSample) -> tuple[int, bool]:
    """Return the order of memberships: by epoch, then a coordinator's before another node's."""
    return known["epoch"], known["coordinates"]


def _places(plan: SamplePlan) -> dict[tuple[str, int], tuple[int, str]]:
    """Map (role, rank) to its node's number and name, by the plan of a sample."""
    names = [str(name) for name in plan["nodes"]]
    return {(role, rank): (node, names[node]) for role, rank, node in unpack(plan["places"], len(names))}


def _progress_key(rank: TopRank, counting: bool) -> tuple[int, float]:
    """Return the sort key of a rank by progress: first those without any, lost and frozen ones included, then the slowest.

    Ranks without a rate that need none come last. counting: a rank of its job and role prints steps.
    """
    runs = rank.state is RankState.RUNNING
    if rank.state in (RankState.LOST, RankState.UNKNOWN, RankState.FROZEN) or (runs and counting and not rank.speed):
        return 0, 0.0
    return (1, rank.speed) if rank.speed is not None else (2 if runs else 3, 0.0)


def _filter_finds_node(name: str, devices: Sequence[Row], text: str) -> bool:
    """Check whether a filter is in the name of a node or in the user of one of its devices."""
    return text in name or any(text in device.user for device in devices)


def _filter_finds_rank(text: str, rank: TopRank) -> bool:
    """Check whether a filter is in the name, node, job, state or last line of a rank.

    A filter that ends with a number finds a name only if the whole number is equal: "rank 1" does not find rank 12.
    """
    whole = re.compile(rf"(?<!\d){re.escape(text)}(?!\d)" if text[-1:].isdecimal() else re.escape(text))
    numbered = any(map(whole.search, (rank.name, f"rank {rank.rank}")))
    return numbered or any(text in item for item in (rank.node, rank.job, rank.state, rank.line))


def _take_rank(rank: TopRank, values: RankSample, job: JobSample, t: float) -> None:
    """Update a rank by a sample: state, pid, CPU in percent since the sample before, memory, last line, steps a second.

    t: when it was taken.
    """
    seconds = values.get("seconds")
    if seconds is None or (values["pid"] or 0) != rank.pid:
        rank.cpu = None
    elif t > rank.seconds[1]:
        rank.cpu = max(0.0, 100 * (seconds - rank.seconds[0]) / (t - rank.seconds[1]))
    rank.seconds = (float(seconds or 0), t)
    rank.state, rank.pid, rank.log = RankState(values["state"]), int(values["pid"] or 0), str(values["log"] or "")
    rank.memory, rank.line, rank.heartbeat = values.get("memory"), str(values["line"]), job["heartbeat"]
    found = read(Metrics, values["metrics"]) if "metrics" in values else NOTHING
    if found.step is not None:
        rank.rate.feed(found.step, t)
    rank.speed = rank.rate.compute(t) if rank.state is RankState.RUNNING else None
    rank.loss = found.loss if found.loss is not None else rank.loss
    rank.trends = [(*before, new)[-_TREND:] for before, new in zip(rank.trends, (rank.speed, rank.loss))]
    rank.quiet = values.get("quiet")


def _user_of(values: CardValues) -> str:
    """Return the user and job that have reserved a device, else its users, joined by commas."""
    lock = values.get("held")
    return f"{lock['user']} {lock['job']}" if lock else ",".join(values.get("users", ()))


def _faults_of(values: CardValues) -> tuple[str, ...]:
    """List the faults of a device as short texts, with why it is throttled, except by its power cap."""
    found = [str(values["problem"])] if values.get("problem") else []
    if values.get("ecc_uncorrected"):
        found.append("ECC")
    return (*found, *(str(reason) for reason in values.get("throttle", ()) if reason != "power cap"))


def _combine_devices(cards: Sequence[Row], what: str) -> Row:
    """Combine several devices in one row: all loads and faults, the sums of memory, the highest temperature, the mean history.

    what: the row's name.
    """
    hot = [card.temperature for card in cards if card.temperature is not None]
    length = min((len(card.history) for card in cards), default=0)
    return Row(
        tuple(dict.fromkeys(node for card in cards for node in card.nodes)),
        what,
        tuple(load for card in cards for load in card.loads),
        sum(card.used for card in cards),
        sum(card.total for card in cards),
        max(hot, default=None),
        _join_first_two(card.user for card in cards),
        tuple(dict.fromkeys(fault for card in cards for fault in card.wrong)),
        tuple(sum(card.history[i - length] for card in cards) / len(cards) for i in range(length)),
    )


def _join_first_two(texts: Iterable[str]) -> str:
    """Join the first two different texts, and how many more there are."""
    different = [text for text in dict.fromkeys(texts) if text]
    return ", ".join(different[:2]) + (f" and {len(different) - 2} more" if len(different) > 2 else "")


def _models_text(cards: Sequence[Row]) -> str:
    """Describe the models of devices: `8 x H100, 1 x A100`."""
    models = [card.model for card in cards]
    if len(models) == 1:
        return models[0]
    return ", ".join(f"{models.count(model)} x {model}" for model in dict.fromkeys(models))


def _fold_similar_nodes(nodes: Mapping[str, Sequence[Row]], bucket: int) -> Iterator[Row]:
    """Yield a row for the nodes with the same cards and faults, whose load and memory are in the same `bucket` of percent."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for found in nodes.values():
        row = _combine_devices(found, _models_text(found))
        key = (row.what, row.wrong, int((row.load or 0) // bucket), int(100 * row.filled // bucket))
        groups.setdefault(key, []).extend(found)
    for (what, *_), cards in groups.items():
        row = _combine_devices(cards, str(what))
        yield replace(row, what=f"{len(row.nodes)} x ({what})") if len(row.nodes) > 1 else row
