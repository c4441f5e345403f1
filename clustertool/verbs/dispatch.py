"""inv dispatch: only the copying; prints bytes, seconds and nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustertool.errors import UsageError, raise_all
from clustertool.verbs import interrupts
from clustertool.verbs.call import JSON, NODES, WORKSPACE, Call, Opt, verb

if TYPE_CHECKING:
    from clustertool.plan.cluster import Cluster
    from clustertool.plan.facts import Facts
    from clustertool.plan.job import JobSpec
    from clustertool.plan.portions import Portion
    from clustertool.reach.dispatch import Dispatched
    from clustertool.reach.workspace import Workspace


@verb(
    WORKSPACE, Opt("job-dispatch-package", "the old name of --workspace"),
    Opt("dry", "only say what would be sent", False), NODES, JSON,
)  # fmt: skip
def dispatch(call: Call) -> None:
    """Copy a workspace to every node, without starting anything."""
    from clustertool.plan.plan import given_facts
    from clustertool.reach import sharing
    from clustertool.reach.fleet import Fleet
    from clustertool.show.progress import human_bytes
    from clustertool.show.table import count
    from clustertool.verbs import load, preflight

    folder = load.one_of(call, "workspace", "job-dispatch-package")
    if not folder:
        raise UsageError("dispatch needs a workspace", "inv dispatch --workspace ./job")
    toml = load.workspace_toml(Path(folder))
    cluster = load.cluster(call, start_local=True)
    spec = load.scattered(cluster, toml)
    workspace = load.workspace(call, Path(folder))
    if spec:
        portions(workspace, cluster, given_facts(cluster), spec)  # bad data is told before any connection
    if call.given.dry:
        amount = f"{count(len(workspace.files), 'file')}, {human_bytes(workspace.size)}"
        shards = ", shards only to the nodes that read them" if spec else f", as release {workspace.release}"
        call.terminal.line(f"would send {amount}{shards}")
        if call.json:
            call.answer({"release": workspace.release, "files": len(workspace.files), "bytes": workspace.size})
        return
    with Fleet(cluster, interrupts.check, ask=interrupts.asker()) as fleet:
        looked = preflight.look(cluster, fleet, {})
        looked = preflight.room(looked, cluster, needs(workspace, cluster, looked.facts, spec, copies=1))
        preflight.require(looked, cluster)
        facts = sharing.confirm(fleet, looked.facts)
        shares = portions(workspace, cluster, facts, spec)
        done = send(call, fleet, workspace, shares, facts)
        if call.json:
            call.answer({
                "release": workspace.release, "bytes": done.bytes, "seconds": round(done.seconds, 3),
                "sent": [fleet.name(node) for node in done.sent], "had": [fleet.name(node) for node in done.had],
                "shared": [fleet.name(node) for node in done.shared],
                "releases": {fleet.name(node): portion.release for node, portion in sorted(shares.items())},
            })  # fmt: skip


def portions(
    workspace: Workspace, cluster: Cluster, facts: Mapping[int, Facts], spec: JobSpec | None
) -> Mapping[int, Portion]:
    """What each node gets. spec: the job, where it decides that; None: all nodes get all."""
    from clustertool.plan import portions as plan
    from clustertool.plan.plan import readers
    from clustertool.plan.shards import refuse_links

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
    call: Call, fleet: Any, workspace: Workspace, shares: Mapping[int, Portion], facts: Mapping[int, Facts]
) -> Dispatched:
    """The dispatch with its progress. Raises DispatchErrors of all nodes at once."""
    from clustertool.plan.facts import sharing
    from clustertool.reach.dispatch import dispatch as send_all
    from clustertool.show.progress import DispatchProgress

    shared = sharing(facts)
    if shared:
        call.terminal.note(f"{len(shared)} nodes share ROOT_DIR: each works in its own node<id>/, content is sent once")
    with DispatchProgress(call.terminal, [host.name for host in fleet.cluster.hosts]) as progress:

        def tell(node: int, sent: int, total: int) -> None:
            if total:
                progress.node(fleet.name(node), sent, total)
            if sent == total:
                progress.done(fleet.name(node))

        done = send_all(fleet, workspace, shares, facts, tell)
        for node, error in done.failed.items():
            progress.failed(fleet.name(node), error.what)
    raise_all(list(done.failed.values()))
    return done
