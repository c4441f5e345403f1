"""inv check: the preflight alone, as one matrix of nodes and findings."""

from __future__ import annotations

from pathlib import Path

from clustertool.errors import UsageError
from clustertool.verbs import interrupts
from clustertool.verbs.call import JSON, NODES, WORKSPACE, Call, Opt, verb


@verb(
    WORKSPACE, Opt("bandwidth", "measure links (not built yet)", False),
    Opt("framework", "paddle or torch (not built yet)"), NODES, JSON,
)  # fmt: skip
def check(call: Call) -> None:
    """Preflight: everything that would go wrong, on all nodes, at once."""
    from clustertool.plan.checks import errors
    from clustertool.reach.fleet import Fleet
    from clustertool.show.status import check_matrix
    from clustertool.verbs import load, preflight
    from clustertool.verbs.dispatch import needs

    for name in ("bandwidth", "framework"):
        if getattr(call.given, name):
            raise UsageError(f"--{name} is not built yet", "leave it out")
    folder = Path(call.given.workspace) if call.given.workspace else None
    toml = load.workspace_toml(folder) if folder else {}
    cluster = load.cluster(call, start_local=True)
    spec, passed = load.scattered(cluster, toml), dict(load.passed(cluster))
    workspace = load.workspace(call, folder) if folder else None
    with Fleet(cluster, interrupts.check, ask=interrupts.asker()) as fleet:
        looked = preflight.look(cluster, fleet, lambda host: preflight.for_check(cluster, host, passed))
        if workspace:
            looked = preflight.room(looked, cluster, needs(workspace, cluster, looked.facts, spec))
        rows = preflight.matrix(looked, cluster)
        bad = errors(looked.findings)
        if call.json:
            code = preflight.worst(list(looked.failed.values())) if bad else 0
            call.answer({"nodes": rows, "exit": {"code": code, "source": "tool", "reason": bad[0].text if bad else ""}})
        else:
            check_matrix(rows, call.terminal)
    if bad:
        from clustertool.errors import PreflightError
        from clustertool.show.table import count

        nodes = {finding.node for finding in bad}
        what = f"{count(len(bad), 'problem')} on {len(nodes)} of {count(len(cluster.hosts), 'node')}"
        error = PreflightError(what, "see the fixes above")
        error.code = preflight.worst(list(looked.failed.values()))
        raise error
    call.terminal.note("the node is ready" if len(cluster.hosts) == 1 else f"all {len(cluster.hosts)} nodes are ready")
