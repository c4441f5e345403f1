"""This module plans devices: their kind on each node, those that a job may use, and the cards of each process."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from clustertool.errors import ClustertoolError, DeviceInUse, PreflightError, raise_all
from clustertool.model.cards import IN_USE_FIX, find_faults, holder, in_use
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.folded_names import gather
from clustertool.model.config.hosts import Host
from clustertool.model.config.job import JobSpec
from clustertool.model.facts import ByNode, Facts
from clustertool.model.job.outcome import some
from clustertool.model.planning.ranks import Seat
from clustertool.model.planning.shards import split

Cards = Mapping[int, Tuple[int, ...]]
_LOOPBACK = ("127.", "::1")
TWICE_FIX = (
    "leave one of them out, or give each its own devices (`devices` in HOSTS, --only NAME:0,1, CUDA_VISIBLE_DEVICES where the"
    " command is typed); nodes that are to share them have the same name, written twice"
)
AUTO_FIX = "wait for them with --wait, or ask for fewer with --nproc-per-node"
# kind -> HETER_DEVICE_TYPE; besides these Paddle knows only cpu
_HETER = {"gpu": "gpu", "dcu": "gpu", "xpu": "xpu"}


def choose_device_kind(cluster: Cluster, facts: Facts) -> str:
    """Choose the kind of devices: DEVICE_KIND, else PADDLE_USE_GPU, else what the probe found."""
    if cluster.device_kind != "auto":
        return cluster.device_kind
    if cluster.use_gpu is not None:
        return "gpu" if cluster.use_gpu else "cpu"
    return facts.device_kind


def with_devices(fact: Facts, answer: Mapping[str, Any]) -> Facts:
    """Return the facts with the faults of the node's devices, and the processes on them, from its answer about devices."""
    cards = answer["devices"]
    faults = tuple((int(card["index"]), fault.text, fault.fix) for card in cards for fault in find_faults(card))
    used = tuple((int(index), str(process)) for index, process in answer.get("used", ()))
    return replace(fact, used=used, ills=faults)


def busy(facts: Facts, job_id: str) -> Dict[int, str]:
    """Map each device in use to a description of its user: another job than `job_id` by its lock, else a process.

    Processes are known if the devices were read.
    """
    return {**dict(facts.used), **{device: holder(job, user) for device, job, user in facts.locked if job != job_id}}


def usable(host: Host, job: JobSpec, facts: Facts, kind: str, job_id: str) -> Tuple[int, ...]:
    """List the ids of the devices for this job on this host: of the command line, else HOSTS, else all that the probe found.

    They are physical ids, or positions in what an engine has allocated there. With --devices auto the free ones of HOSTS or the
    probe, as many as trainers are asked for on the host, else all of them. () where the kind is cpu and no ids are given.
    """
    if kind == "cpu" and job.devices is None and host.devices is None:
        return ()
    if job.devices is not None:
        return job.devices
    found = host.devices
    if found is None:
        found = host.on_slots(facts.devices) if facts.device_kind == kind else ()  # another kind's ids mean nothing
    if not job.auto_devices:
        return found
    taken = busy(facts, job_id)
    return tuple(device for device in found if device not in taken)[: _trainers_asked(host, job)]


def _trainers_asked(host: Host, job: JobSpec) -> Optional[int]:
    """Return the number of trainers, and so of devices with --devices auto, that was asked for on a host; None without one.

    The command line has priority over job.toml, and that over HOSTS. None in mode ps-heter.
    """
    asked = (job.nproc, job.trainer.per_node, host.count("trainer"), host.nproc) if job.mode != "ps-heter" else ()
    return next((number for number in asked if number is not None), None)


def require_free(
    cluster: Cluster, job: JobSpec, facts: ByNode, kinds: Sequence[str], seats: Sequence[Seat], job_id: str
) -> None:
    """Require that no process gets a device in use, and that --devices auto has found enough.

    Raises the DeviceInUse of all nodes.
    """
    errors: List[ClustertoolError] = []
    for host in cluster.hosts:
        fact, kind = facts[host.index], kinds[host.index]
        taken = busy(fact, job_id)
        takers = [seat for seat in seats if seat.node == host.index and _gets_devices(job, seat, kind)]
        own = {device for seat in takers for device in seat.devices}
        if kind == "cpu" or not taken or not takers:
            continue
        if job.auto_devices and len(own) < (_trainers_asked(host, job) or 1):
            what = f"{len(own)} of {_trainers_asked(host, job) or len(fact.devices)} devices are free: {in_use(kind, taken)}"
            errors.append(DeviceInUse(what, AUTO_FIX, host.name))
        elif own & set(taken):
            locked = {device: user for device, user in taken.items() if device in own}
            errors.append(DeviceInUse(in_use(kind, locked), IN_USE_FIX, host.name))
    raise_all(errors)


def require(cluster: Cluster, job: JobSpec, facts: ByNode, kinds: Sequence[str]) -> None:
    """Require that the ids of devices that were asked for exist on each host. Raises the PreflightErrors of all nodes.

    With --devices auto each node must have devices. If conf.py allows only the CPU, ids only count trainers.
    """
    if cluster.device_kind != "cpu" and cluster.use_gpu is not False:
        if job.auto_devices:
            bare = [host for host in cluster.hosts if facts[host.index].devices_seen and not facts[host.index].devices]
            fix = "leave --devices auto out; --nproc-per-node sets the number of trainers"
            raise_all([PreflightError("the node has no devices", fix, host.name) for host in bare])
        origin = f"{cluster.shell_devices} of this shell" if cluster.shell_devices else "devices in HOSTS"
        checked = [_error_of_missing(host, job, facts[host.index], kinds[host.index], origin) for host in cluster.hosts]
        raise_all([error for error in checked if error])


def _error_of_missing(host: Host, job: JobSpec, facts: Facts, kind: str, origin: str) -> Optional[PreflightError]:
    """Create the error for ids that do not exist on a host. None if all exist, or if the devices were not read.

    HOSTS' ids on a node without devices may count its slots. origin: where the devices of hosts come from.
    """
    asked = job.devices if job.devices is not None else host.devices
    of_hosts = host.devices is not None and set(asked or ()) <= set(host.devices)
    if not facts.devices_seen or not asked or (of_hosts and not facts.devices):
        return None
    have = facts.devices if facts.device_kind == kind else ()
    missing_devices = [device for device in asked if device not in have]
    if not missing_devices:
        return None
    where = "--devices" if job.devices is not None else origin
    what = f"there is no device {', '.join(map(str, missing_devices))} ({where})"
    if facts.allocated is not None:
        there = f"{len(have)}, numbered from 0" if have else "none"
        fix = f"of this node's devices the job's allocation has {there}: ask for more, or leave some out"
    elif not have and facts.devices:
        fix = f"DEVICE_KIND is {kind}, the node has {facts.device_kind}: correct one of them"
    elif not have:
        fix = "the node has no devices: leave it out; --nproc-per-node sets the number of trainers"
    else:
        fix = f"the node has {facts.device_kind} {', '.join(map(str, have))}"
    return PreflightError(what, fix, host.name)


class OneMachine(NamedTuple):
    """A node that is the same machine as one before it, and these devices are given to both. meant: the names show it."""

    node: int
    first: int
    devices: Tuple[int, ...]
    meant: bool

    def text(self, cluster: Cluster, kind: str) -> str:
        """Describe the conflict for an error of the node: the other node, and the devices."""
        ids = ",".join(map(str, self.devices))
        return f"is the same machine as {cluster.hosts[self.first].name}, and {kind} {ids} would be given to both"


def given_twice(cluster: Cluster, facts: ByNode, given: Mapping[int, Iterable[int]]) -> List[OneMachine]:
    """List the devices that are given to two nodes of one machine, for each pair of nodes; [] if CHECKS_OFF has `devices`.

    given: node -> ids. It is meant where the user has typed one name twice, or addresses of the loopback. Nodes with devices
    that an engine has allocated are left out: it has divided them.
    """
    owners: Dict[Tuple[str, str], int] = {}
    twice: Dict[Tuple[int, int], List[int]] = {}
    for node, ids in sorted(given.items()) if "devices" not in cluster.checks_off else ():
        fact = facts[node]
        keys = dict(zip(fact.devices, fact.device_keys))
        for device in sorted(set(ids)) if fact.allocated is None else ():
            first = owners.setdefault((fact.machine, keys.get(device, str(device))), node)
            if first != node:
                twice.setdefault((node, first), []).append(device)
    hosts = cluster.hosts
    return [
        OneMachine(node, first, tuple(ids), _same_name(hosts[node], hosts[first]))
        for (node, first), ids in twice.items()
    ]


def _same_name(host: Host, first: Host) -> bool:
    """Check whether a host is meant to be the same machine as `first`: its name is typed twice, or both are of the loopback."""
    again = host.twin > 0 and host.host == first.host
    return again or all(one.address.startswith(_LOOPBACK) for one in (host, first))


def of_nodes(seats: Iterable[Seat], kinds: Sequence[str]) -> Dict[int, List[int]]:
    """Map each node to the devices of its processes. Nodes of kind cpu are left out."""
    found: Dict[int, List[int]] = {}
    for seat in seats:
        if kinds[seat.node] != "cpu":
            found.setdefault(seat.node, []).extend(seat.devices)
    return found


def require_once(cluster: Cluster, facts: ByNode, kinds: Sequence[str], seats: Sequence[Seat]) -> None:
    """Require that no two nodes of one machine get the same device, unless it is meant. Raises the PreflightErrors of all."""
    wrong = [one for one in given_twice(cluster, facts, of_nodes(seats, kinds)) if not one.meant]
    raise_all(
        [PreflightError(one.text(cluster, kinds[one.node]), TWICE_FIX, cluster.hosts[one.node].name) for one in wrong]
    )


def shared_warnings(cluster: Cluster, facts: ByNode, kinds: Sequence[str], seats: Sequence[Seat]) -> List[str]:
    """Return one warning about all nodes that share devices with another node of their machine; [] if none do."""
    twice = given_twice(cluster, facts, of_nodes(seats, kinds))
    if not twice:
        return []
    nodes = sorted({node for one in twice for node in (one.node, one.first)})
    ids = sorted({device for one in twice for device in one.devices})
    names = some([cluster.hosts[node].name for node in nodes])
    return [f"{names} share {kinds[nodes[0]]} {','.join(map(str, ids))}: they are one machine"]


def unequal_warnings(
    cluster: Cluster, job: JobSpec, facts: ByNode, kinds: Sequence[str], seats: Sequence[Seat]
) -> List[str]:
    """Return one warning if nodes get different numbers or models of devices, or one node several models; else [].

    A host with devices or slots of its own in HOSTS or a hostfile may have any. [] also if CHECKS_OFF has `devices`.
    """
    given: Dict[int, List[int]] = {seat.node: [] for seat in seats if _gets_devices(job, seat, kinds[seat.node])}
    given.update({node: ids for node, ids in of_nodes(seats, kinds).items() if node in given})
    named = all(len(facts[node].device_models) == len(facts[node].devices) for node, ids in given.items() if ids)
    texts: Dict[str, str] = {}
    for host in cluster.hosts if "devices" not in cluster.checks_off else ():
        fact = facts[host.index]
        free = host.devices is None and host.slots is None and fact.allocated != ()  # unallocated() names these
        if free and host.index in given:
            models = dict(zip(fact.devices, fact.device_models)) if named else {}
            counts = Counter(models.get(device, kinds[host.index]) for device in set(given[host.index]))
            texts[host.name] = ", ".join(f"{number} x {name}" for name, number in sorted(counts.items())) or "none"
    if len(set(texts.values())) < 2 and not any(", " in text for text in texts.values()):
        return []
    listed = "; ".join(f"{text} on {nodes}" for nodes, text in gather(texts))
    return [f"unequal devices: {listed} (the slowest one sets the pace of all; --skip and --devices leave some out)"]


def unallocated_warnings(cluster: Cluster, facts: ByNode, kinds: Sequence[str]) -> List[str]:
    """Return one warning about nodes that have devices, but none in the job's allocation; [] without such nodes.

    [] also if CHECKS_OFF has `devices`.
    """
    bare = [host for host in cluster.hosts if facts[host.index].allocated == () and kinds[host.index] != "cpu"]
    if not bare or "devices" in cluster.checks_off:
        return []
    what = f"{some([host.name for host in bare])}: the job's allocation has no {kinds[bare[0].index]}, so its ranks get none"
    return [f'{what}; ask for devices when you submit it, or set DEVICE_KIND = "cpu"']


def heter_type(job: JobSpec, seat: Seat, kind: str) -> str:
    """Choose HETER_DEVICE_TYPE of a heter trainer: --heter-devices of its stage, else the kind of the node; else "cpu".

    "cpu" also stands for a kind that Paddle does not know.
    """
    return (job.heter[seat.stage - 2].device or _HETER.get(kind, "cpu")) if seat.role == "heter" else "cpu"


def assign_cards(seats: Sequence[Seat], job: JobSpec, cards: Cards, kinds: Sequence[str]) -> Tuple[Seat, ...]:
    """Return the seats with their cards. pservers get none, nor do trainers of a job with heter trainers.

    Trainers divide a node's cards evenly, or share them in turn if there are fewer. With parameter servers each gets one card,
    in turn, as from Paddle's launcher: Paddle reads FLAGS_selected_gpus of trainers and heter trainers there as one number.
    """
    number = Counter(seat.node for seat in seats if _gets_devices(job, seat, kinds[seat.node]))
    turn: Dict[int, int] = {}
    dealt: List[Seat] = []
    for seat in seats:
        own: Tuple[int, ...] = ()
        if cards[seat.node] and _gets_devices(job, seat, kinds[seat.node]):
            at = turn[seat.node] = turn.get(seat.node, -1) + 1
            own = _share(cards[seat.node], number[seat.node], at, one=job.has_pservers)
        dealt.append(replace(seat, devices=own))
    return tuple(dealt)


def _gets_devices(job: JobSpec, seat: Seat, kind: str) -> bool:
    """Check whether a seat gets devices: a trainer; in mode ps-heter only a heter trainer whose type is that of the node."""
    if job.mode == "ps-heter":
        return seat.role == "heter" and heter_type(job, seat, kind) == _HETER.get(kind)
    return seat.role == "trainer"


def _share(cards: Tuple[int, ...], number: int, at: int, one: bool) -> Tuple[int, ...]:
    """Choose the cards of one of `number` processes, by its position `at`: its share of all, or one of them in turn."""
    return (cards[at % len(cards)],) if one or len(cards) < number else split(cards, number)[at]


def visible(setting: str, collective: bool, seat: Seat, seats: Sequence[Seat]) -> Tuple[int, ...]:
    """Choose the devices that a process sees: its own ones, or those of all processes of its role and node, in rank order.

    seats: these processes. setting: DEVICE_VISIBILITY. If it is empty, processes of a collective job see all of them where each
    has exactly one of its own. LOCAL_RANK is then its position, as with torchrun and Paddle's launcher for collective jobs.
    Paddle's launcher for parameter servers gives each process one device, number 0 of those that it sees (decision 35).
    """
    of_all = [device for one in seats for device in one.devices]
    one_each = all(len(one.devices) == 1 for one in seats) and len(set(of_all)) == len(of_all)
    if setting == "node" or (not setting and collective and one_each):
        return tuple(dict.fromkeys(of_all))
    return seat.devices


def missing_devices(seats: Sequence[Seat], job: JobSpec, kinds: Sequence[str]) -> List[Tuple[Seat, str]]:
    """List heter trainers whose stage needs a device that their node does not have, with its kind, one per node and stage."""
    heter = [(seat, heter_type(job, seat, kinds[seat.node])) for seat in seats if seat.role == "heter"]
    wanting = {(seat.node, seat.stage): (seat, kind) for seat, kind in heter if kind != "cpu" and not seat.devices}
    return list(wanting.values())


def fault_warnings(cluster: Cluster, seats: Sequence[Seat], facts: ByNode, kinds: Sequence[str]) -> List[str]:
    """List the faults of the cards that processes get, as text, where the devices were read."""
    taken = {(seat.node, card) for seat in seats for card in seat.devices}
    return [
        f"{host.name}: {kinds[host.index]} {card}: {text} ({fix})"
        for host in cluster.hosts
        for card, text, fix in facts[host.index].ills
        if (host.index, card) in taken
    ]
