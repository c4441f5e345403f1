"""inv dispatch: only the copying; prints bytes, seconds and nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clustertool.errors import UsageError, as_one, raise_all
from clustertool.fleet import shared_roots as sharing
from clustertool.fleet.dispatch.deliver import HELPERS, Dispatched, merged, quickly
from clustertool.fleet.dispatch.deliver import dispatch as send_all
from clustertool.fleet.dispatch.spread import Spread
from clustertool.fleet.dispatch.workspace import Workspace
from clustertool.fleet.fleet import Fleet
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import JobSpec
from clustertool.model.dispatch import portions as plan
from clustertool.model.dispatch.portions import Portion
from clustertool.model.facts import Facts, read_facts
from clustertool.model.planning.plan import given_facts, readers
from clustertool.model.planning.shards import refuse_links
from clustertool.model.quantities import human_bytes
from clustertool.model.wire.frames import Header
from clustertool.show.errors import exit_json
from clustertool.show.progress_bars import DispatchProgress
from clustertool.show.table import count
from clustertool.verbs import load_config, preflight, signals
from clustertool.verbs.verb import Call, User
from clustertool.verbs.verification import verified


def dispatch(call: Call) -> None:
    """Copy a workspace to every node, without starting anything."""
    folder = load_config.one_of(call, "workspace", "job-dispatch-package")
    if not folder:
        raise UsageError("dispatch needs a workspace", "inv dispatch --workspace ./job")
    toml = load_config.workspace_toml(Path(folder))
    cluster = load_config.cluster(call, start_local=True)
    spec = load_config.scattered(cluster, toml)
    workspace = load_config.workspace(call, Path(folder))
    if spec:
        portions(workspace, cluster, given_facts(cluster), spec)  # bad data is told before any connection
    found: dict[str, Any] = {}  # by --verify
    if call.given.dry:
        amount = f"{count(len(workspace.files), 'file')}, {human_bytes(workspace.size)}"
        shards = ", shards only to the nodes that read them" if spec else f", as release {workspace.release}"
        call.terminal.line(f"would send {amount}{shards}")
        if call.given.verify:
            with Fleet(cluster, signals.check, person=User()) as fleet:
                _look(call, fleet, cluster, {}, None, found)
        if call.json:
            size = {"release": workspace.release, "files": len(workspace.files), "bytes": workspace.size}
            call.answer({**size, **({"verified": found} if call.given.verify else {})})
        return
    with Fleet(cluster, signals.check, person=User()) as fleet:
        done = _send(call, fleet, workspace, cluster, spec, found)
        if call.json:
            verified = {"verified": found} if call.given.verify else {}
            call.answer({"release": workspace.release, **verified, **_as_json(done, fleet)})
        raise_all(list(done.failed.values()))


def _look(
    call: Call,
    fleet: Fleet,
    cluster: Cluster,
    probed: dict[int, Header],
    need: Callable[[Mapping[int, Facts]], Mapping[int, int]] | None,
    found: dict[str, Any],
) -> dict[int, Facts]:
    """A preflight; with --verify the nodes also hash what they have, which `found` gets. `need`: bytes for each node."""
    looked = preflight.look(cluster, fleet, {}, known=probed)
    if need is not None:
        looked = preflight.room(looked, cluster, need(looked.facts))
    preflight.require(looked, cluster)
    facts = sharing.confirm(fleet, looked.facts)
    return verified(call, fleet, facts, found) if call.given.verify else facts


def _send(
    call: Call, fleet: Fleet, workspace: Workspace, cluster: Cluster, spec: JobSpec | None, found: dict[str, Any]
) -> Dispatched:
    """First what needs no look at the nodes; if that is not enough, a preflight and the whole of it."""
    probed: dict[int, Header] = {}

    def look(node: int) -> Facts:
        probed[node] = preflight.probe_one(cluster, fleet, {}, node)
        return read_facts(node, probed[node])

    start = time.monotonic()
    first, spread = quickly(fleet, workspace, look) if spec is None and not call.given.verify else (None, None)
    if first and len(first.releases) == len(cluster.hosts):
        with _progress(call, fleet, start) as progress:
            progress.uplink(first.tally.uplink, first.tally.uplink)
            for node in first.releases:
                progress.done(fleet.name(node))
        return first
    fleet.wake(HELPERS)
    facts = _look(call, fleet, cluster, probed, lambda facts: needs(workspace, cluster, facts, spec, copies=1), found)
    done = send(call, fleet, workspace, portions(workspace, cluster, facts, spec), facts, (first, spread), start)
    return merged(first, done) if first else done


def portions(
    workspace: Workspace, cluster: Cluster, facts: Mapping[int, Facts], spec: JobSpec | None
) -> Mapping[int, Portion]:
    """What each node gets. spec: the job, where it decides that; None: all nodes get all."""
    reads = None
    if spec is not None and spec.only_where_read:
        refuse_links(workspace.links, spec.shards)
        reads = readers(cluster, spec, facts, workspace.files)
    roots = {node: fact.root_id or f"node{node}" for node, fact in facts.items()}
    return plan.by_node(plan.portions(workspace.entries, roots, reads))


def needs(
    workspace: Workspace, cluster: Cluster, facts: Mapping[int, Facts], spec: JobSpec | None, copies: int = 2
) -> dict[int, int]:
    """Bytes that each node needs: the release, and the copy of the job. Unknown while it hangs on a node without answer."""
    if spec is None or not spec.only_where_read:
        return dict.fromkeys(facts, copies * workspace.size)
    if len(facts) < len(cluster.hosts):
        return {}
    return {node: copies * portion.size for node, portion in portions(workspace, cluster, facts, spec).items()}


def send(
    call: Call,
    fleet: Fleet,
    workspace: Workspace,
    shares: Mapping[int, Portion],
    facts: Mapping[int, Facts],
    begun: tuple[Dispatched | None, Spread | None] = (None, None),
    since: float | None = None,
) -> Dispatched:
    """The dispatch with its progress; `begun`: what was done since `since`. Raises nothing for single nodes."""
    from clustertool.model.facts import sharing

    shared = sharing(facts)
    if shared:
        call.terminal.note(f"{len(shared)} nodes share ROOT_DIR: each works in its own node<id>/, content is sent once")
    with _progress(call, fleet, since) as progress:
        for node in begun[0].releases if begun[0] else ():
            progress.done(fleet.name(node))
        done = send_all(fleet, workspace, shares, facts, _ByName(progress, fleet), spread=begun[1])
        for node, error in done.failed.items():
            progress.failed(fleet.name(node), error.what)
        progress.between = done.tally.between
    for node, why in done.tally.served.items():
        call.terminal.warn(f"{fleet.name(node)} was served by this machine, for it reached no other node: {why}")
    return done


def _progress(call: Call, fleet: Fleet, since: float | None) -> Any:
    return DispatchProgress(call.terminal, [host.name for host in fleet.cluster.hosts], since=since)


def _as_json(done: Dispatched, fleet: Fleet) -> dict[str, Any]:
    return {
        "bytes": done.tally.uplink,
        "between": done.tally.between,
        "seconds": round(done.seconds, 3),
        "sent": [fleet.name(node) for node in done.sent],
        "had": [fleet.name(node) for node in done.had],
        "shared": [fleet.name(node) for node in done.shared if node not in done.failed],
        "served": {fleet.name(node): why for node, why in done.tally.served.items()},
        "releases": {fleet.name(node): what for node, what in sorted(done.releases.items()) if node not in done.failed},
        "failed": {fleet.name(node): error.what for node, error in sorted(done.failed.items())},
        "exit": exit_json(as_one(list(done.failed.values())), "tool"),
    }


class _ByName:
    """What a dispatch tells of nodes by number, told by name."""

    def __init__(self, progress: Any, fleet: Fleet) -> None:
        self._progress, self._fleet = progress, fleet

    def uplink(self, sent: int, total: int) -> None:
        self._progress.uplink(sent, total)

    def node(self, node: int, got: int, total: int) -> None:
        self._progress.node(self._fleet.name(node), got, total)

    def done(self, node: int) -> None:
        self._progress.done(self._fleet.name(node))
