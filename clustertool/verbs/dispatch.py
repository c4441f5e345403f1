"""inv dispatch: only the copying; prints bytes, seconds and nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clustertool.errors import UsageError, raise_all
from clustertool.verbs import interrupts
from clustertool.verbs.call import JSON, NODES, WORKSPACE, Call, Opt, verb


@verb(
    WORKSPACE, Opt("job-dispatch-package", "the old name of --workspace"),
    Opt("dry", "only say what would be sent", False), NODES, JSON,
)  # fmt: skip
def dispatch(call: Call) -> None:
    """Copy a workspace to every node, without starting anything."""
    from clustertool.reach import sharing
    from clustertool.reach.fleet import Fleet
    from clustertool.show.progress import human_bytes
    from clustertool.show.table import count
    from clustertool.verbs import load, preflight

    folder = load.one_of(call, "workspace", "job-dispatch-package")
    if not folder:
        raise UsageError("dispatch needs a workspace", "inv dispatch --workspace ./job")
    load.workspace_toml(Path(folder))
    cluster = load.cluster(call, start_local=True)
    workspace = load.workspace(call, Path(folder))
    if call.given.dry:
        amount = f"{count(len(workspace.files), 'file')}, {human_bytes(workspace.size)}"
        call.terminal.line(f"would send {amount}, as release {workspace.release}")
        if call.json:
            call.answer({"release": workspace.release, "files": len(workspace.files), "bytes": workspace.size})
        return
    with Fleet(cluster, interrupts.check, ask=interrupts.asker()) as fleet:
        looked = preflight.look(cluster, fleet, {}, workspace.size)
        preflight.require(looked, cluster)
        done = send(call, fleet, workspace, sharing.confirm(fleet, looked.facts))
        if call.json:
            call.answer({
                "release": done.release, "bytes": done.bytes, "seconds": round(done.seconds, 3),
                "sent": [fleet.name(node) for node in done.sent], "had": [fleet.name(node) for node in done.had],
                "shared": [fleet.name(node) for node in done.shared],
            })  # fmt: skip


def send(call: Call, fleet: Any, workspace: Any, facts: Mapping[int, Any]) -> Any:
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

        done = send_all(fleet, workspace, facts, tell)
        for node, error in done.failed.items():
            progress.failed(fleet.name(node), error.what)
    raise_all(list(done.failed.values()))
    return done
