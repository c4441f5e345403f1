"""Sending brings a workspace to the nodes of a fleet and reports its progress to the caller."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from clustertool.engines.caller import Caller, DispatchView
from clustertool.errors import WorkspaceChanged, raise_all
from clustertool.fleet.dispatch.deliver import Dispatched, deliver, deliver_from
from clustertool.fleet.dispatch.shipment import RemoteShipment
from clustertool.fleet.dispatch.workspace import Workspace, read_workspace
from clustertool.fleet.fleet import Fleet
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import JobSpec
from clustertool.model.dispatch import portions as plan
from clustertool.model.dispatch.portions import Portions
from clustertool.model.facts import ByNode, nodes_sharing_root
from clustertool.model.planning.plan import readers
from clustertool.model.planning.shards import refuse_links


def portions(workspace: Workspace, cluster: Cluster, facts: ByNode, spec: JobSpec | None) -> Portions:
    """Return {node: the portion of the workspace that it gets}.

    spec: the job. If that has only_where_read, a node gets of the shards only those that it, or a node with the same ROOT_DIR,
    reads; otherwise, and for None, all nodes get all files. Raises DataError for a shard that is a link.
    """
    reads = None
    if spec is not None and spec.only_where_read:
        refuse_links(workspace.links, spec.shards)
        reads = readers(cluster, spec, facts, workspace.files)
    roots = {node: fact.root_id or f"node{node}" for node, fact in facts.items()}
    return plan.by_node(plan.portions(workspace.entries, roots, reads))


def disk_needs(
    workspace: Workspace, cluster: Cluster, facts: ByNode, spec: JobSpec | None, copies: int = 2
) -> dict[int, int]:
    """Return {node: the bytes of disk that it needs}: `copies` times its files, and once more with rsync (the staging folder).

    {} if shards are sent only where they are read, and a node has not answered: the portions depend on all.
    """
    copies += cluster.dispatch == "rsync"  # the staging folder
    if spec is None or not spec.only_where_read:
        return dict.fromkeys(facts, copies * workspace.size)
    if len(facts) < len(cluster.hosts):
        return {}
    return {node: copies * portion.size for node, portion in portions(workspace, cluster, facts, spec).items()}


def send(
    caller: Caller, fleet: Fleet, workspace: Workspace, shares: Portions, facts: ByNode, since: float | None = None
) -> Dispatched:
    """Send each node its portion of a workspace, and show the progress.

    Errors of single nodes are in the result (`failed`), and not raised. Prints how many nodes share ROOT_DIR, and a warning for
    each node that received the files from this machine because it could not connect to another node. since: where the shown
    seconds begin, by time.monotonic(); None for now.
    """
    _note_shared(caller, facts)
    with caller.dispatching([host.name for host in fleet.cluster.hosts if host.index in facts], since) as progress:
        done = deliver(fleet, workspace, shares, facts, progress)
        _conclude(fleet, done, progress)
    for node, why in done.tally.served.items():
        reason = f"because it could not connect to another node ({why})"
        caller.warn(f"{fleet.name(node)} received the files from this machine {reason}")
    return done


def send_whole(caller: Caller, fleet: Fleet, workspace: Workspace, facts: ByNode) -> None:
    """Send all files of a workspace to the nodes of `facts`, as send() does. Raises the errors of all nodes together."""
    sent = send(caller, fleet, workspace, portions(workspace, fleet.cluster, facts, None), facts)
    raise_all(list(sent.failed.values()))


def send_as_found(
    caller: Caller,
    fleet: Fleet,
    workspace: Workspace,
    shares_of: Callable[[Workspace], Portions],
    facts: ByNode,
    since: float | None = None,
) -> tuple[Dispatched, Workspace]:
    """Send the workspace. If a file changes while it is read, warn, read the workspace again, and send that once.

    shares_of: computes the portions of a workspace. Returns the result of the last dispatch, with the errors of single nodes,
    and the workspace as it was read last. Raises errors that make it unreadable, and WorkspaceChanged if it changes again.
    """
    try:
        done = send(caller, fleet, workspace, shares_of(workspace), facts, since)
        changed = [error for error in done.failed.values() if isinstance(error, WorkspaceChanged)]
    except WorkspaceChanged as error:
        changed = [error]
    if not changed:
        return done, workspace
    caller.warn(f"{changed[0].what}; the workspace is sent as it is now")
    workspace = read_workspace(Path(workspace.top), fleet.cluster.ignore_from)
    return send(caller, fleet, workspace, shares_of(workspace), facts, since), workspace


def send_from(
    caller: Caller, fleet: Fleet, holder: int, release: str, shipment: RemoteShipment, facts: ByNode
) -> Dispatched:
    """Spread a release that one node (`holder`) has: it and the others send it to one another. Shows the progress.

    Errors of single nodes are in the result, and not raised.
    """
    with caller.dispatching([host.name for host in fleet.cluster.hosts if host.index in facts], None) as progress:
        done = deliver_from(fleet, holder, release, shipment, facts, progress)
        _conclude(fleet, done, progress)
    return done


def _note_shared(caller: Caller, facts: ByNode) -> None:
    """Print how many nodes share ROOT_DIR, if some do."""
    shared = nodes_sharing_root(facts)
    if shared:
        caller.remark(f"{len(shared)} nodes share ROOT_DIR: each works in its own node<id>/, content is sent once")


def _conclude(fleet: Fleet, done: Dispatched, progress: DispatchView) -> None:
    """Complete the shown progress: which nodes failed, and the bytes that went from node to node."""
    for node, error in done.failed.items():
        progress.failed(fleet.name(node), error.what)
    progress.between = done.tally.between
