"""inv dispatch copies a workspace to the nodes, and prints bytes, seconds and nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from clustertool.errors import UsageError, as_one, raise_all
from clustertool.fleet import shared_roots
from clustertool.fleet.dispatch.deliver import Dispatched, deliver
from clustertool.fleet.dispatch.receivers import owners
from clustertool.fleet.dispatch.workspace import Workspace
from clustertool.fleet.fleet import Fleet
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import JobSpec
from clustertool.model.dispatch import portions as plan
from clustertool.model.dispatch.portions import Portion
from clustertool.model.facts import Facts, sharing
from clustertool.model.planning.plan import given_facts, readers
from clustertool.model.planning.shards import refuse_links
from clustertool.model.quantities import human_bytes
from clustertool.model.wire.agent_answers import VerifyAnswer
from clustertool.model.wire.messages import VERIFY
from clustertool.show.errors import exit_json
from clustertool.show.progress_bars import DispatchProgress
from clustertool.show.table import count
from clustertool.verbs import load_config, preflight, signals
from clustertool.verbs.verb import Call, User

_FOUND = ("releases", "pieces", "bytes", "damaged", "lost")  # of the answer to --verify


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
        portions(workspace, cluster, given_facts(cluster), spec)  # bad data is an error before any connection
    if call.given.dry:
        _show_plan(call, workspace, cluster, scattered=spec is not None)
        return
    with Fleet(cluster, signals.check, person=User()) as fleet:
        start = time.monotonic()
        facts = _examine(call, fleet, lambda facts: needs(workspace, cluster, facts, spec, copies=1))
        facts, found = verified(call, fleet, facts) if call.given.verify else (facts, {})
        done = send(call, fleet, workspace, portions(workspace, cluster, facts, spec), facts, start)
        if call.json:
            checked = {"verified": found} if call.given.verify else {}
            call.answer({"release": workspace.release, **checked, **_as_json(done, fleet)})
        raise_all(list(done.failed.values()))


def _show_plan(call: Call, workspace: Workspace, cluster: Cluster, scattered: bool) -> None:
    """--dry; with --verify the nodes hash what they have, and nothing is removed."""
    amount = f"{count(len(workspace.files), 'file')}, {human_bytes(workspace.size)}"
    shards = ", shards only to the nodes that read them" if scattered else f", as release {workspace.release}"
    call.terminal.line(f"would send {amount}{shards}")
    answer: dict[str, object] = {"release": workspace.release, "files": len(workspace.files), "bytes": workspace.size}
    if call.given.verify:
        with Fleet(cluster, signals.check, person=User()) as fleet:
            answer["verified"] = verified(call, fleet, _examine(call, fleet))[1]
    if call.json:
        call.answer(answer)


def _examine(
    call: Call, fleet: Fleet, need: Callable[[Mapping[int, Facts]], Mapping[int, int]] | None = None
) -> dict[int, Facts]:
    """The facts of all nodes, after a preflight. `need`: bytes for each node. Raises the errors of all nodes."""
    examined = preflight.examine(fleet.cluster, fleet, {}, ping=False)
    if need is not None:
        examined = preflight.room(examined, fleet.cluster, need(examined.facts))
    preflight.require(examined, fleet.cluster)
    return shared_roots.confirm(fleet, examined.facts)


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
    copies += cluster.dispatch == "rsync"  # the staging folder
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
    since: float | None = None,
) -> Dispatched:
    """The dispatch with its progress, whose seconds count from `since`. Raises nothing for single nodes."""
    shared = sharing(facts)
    if shared:
        call.terminal.note(f"{len(shared)} nodes share ROOT_DIR: each works in its own node<id>/, content is sent once")
    with DispatchProgress(call.terminal, [host.name for host in fleet.cluster.hosts], since=since) as progress:
        done = deliver(fleet, workspace, shares, facts, _ByName(progress, fleet))
        for node, error in done.failed.items():
            progress.failed(fleet.name(node), error.what)
        progress.between = done.tally.between
    for node, why in done.tally.served.items():
        call.terminal.warn(f"{fleet.name(node)} was served by this machine, for it reached no other node: {why}")
    return done


def _as_json(done: Dispatched, fleet: Fleet) -> dict[str, object]:

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
    """The progress of a dispatch, which has node ids, for a display that has names."""

    def __init__(self, progress: DispatchProgress, fleet: Fleet) -> None:
        self._progress, self._fleet = progress, fleet

    def uplink(self, sent: int, total: int) -> None:
        self._progress.uplink(sent, total)

    def node(self, node: int, got: int, total: int) -> None:
        self._progress.node(self._fleet.name(node), got, total)

    def done(self, node: int) -> None:
        self._progress.done(self._fleet.name(node))


def verified(
    call: Call, fleet: Fleet, facts: Mapping[int, Facts]
) -> tuple[dict[int, Facts], dict[str, Mapping[str, object]]]:
    """The facts without the releases that are damaged, and what each node has found, by its name.

    With --dry nothing is removed. Nodes that share a ROOT_DIR hash it once. Raises what nodes raised, after the report.
    """
    first = owners(facts)
    gathered = fleet.ask({node: VERIFY({"remove": not call.given.dry}) for node in first.values()})
    answers = dict(sorted(gathered.ok.items()))
    for node, answer in answers.items():
        call.terminal.line(
            f"{fleet.name(node)}: {_described(answer, call.given.dry)}", "red" if _is_damaged(answer) else ""
        )
    raise_all(list(gathered.failed.values()))
    lost = {node: set(answers[first[fact.root_id]]["lost"]) for node, fact in facts.items()}
    sound = {
        node: replace(fact, releases=tuple(name for name in fact.releases if name not in lost[node]))
        for node, fact in facts.items()
    }
    return sound, {
        fleet.name(node): {key: value for key, value in answer.items() if key in _FOUND}
        for node, answer in answers.items()
    }


def _is_damaged(answer: VerifyAnswer) -> bool:
    return bool(answer["damaged"] or answer["lost"])


def _described(answer: VerifyAnswer, dry: bool) -> str:
    all_ = (
        f"{count(answer['releases'], 'release')} of {count(answer['pieces'], 'piece')}, {human_bytes(answer['bytes'])}"
    )
    if not _is_damaged(answer):
        return f"{all_}: nothing is damaged"
    bad = f"damaged are {count(answer['damaged'], 'piece')} and {count(len(answer['lost']), 'release')}"
    return f"{all_}: {bad}{', which would be removed' if dry else '; removed'}"
