"""inv check does the preflight only, and prints one matrix of nodes and findings."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clustertool.errors import ClustertoolError, InternalError, PreflightError
from clustertool.fleet.dispatch.workspace import Workspace
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.identity import job_id
from clustertool.model.checks.each_node import errors
from clustertool.model.checks.link_findings import ports_to_try
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import Options, Toml, read_job
from clustertool.model.facts import Identity
from clustertool.model.planning.plan import Plan, plan
from clustertool.show.status_view import check_matrix
from clustertool.show.table import count
from clustertool.verbs import framework_trial as trial
from clustertool.verbs import link_check, load_config, preflight, signals
from clustertool.verbs.dispatch import needs
from clustertool.verbs.link_check import Meshed
from clustertool.verbs.preflight import Examined
from clustertool.verbs.verb import Call, User


def check(call: Call) -> None:
    """Test all nodes and report every error that would break a job."""
    folder = Path(call.given.workspace) if call.given.workspace else None
    toml = load_config.workspace_toml(folder) if folder else {}
    cluster = load_config.cluster(call, start_local=True)
    spec, passed = load_config.scattered(cluster, toml), dict(load_config.passed(cluster))
    order, ear = trial.read_order(call, cluster, toml, tuple(passed.items())), trial.TrialFollower(len(cluster.hosts))
    more: dict[str, Any] = {}
    workspace = load_config.workspace(call, folder) if folder else None
    with Fleet(cluster, signals.check, ear.put, User()) as fleet:
        examined = preflight.examine(cluster, fleet, lambda host: preflight.for_check(cluster, host, passed))
        if workspace:
            examined = preflight.room(examined, cluster, needs(workspace, cluster, examined.facts, spec))
        made = _plan(cluster, examined, toml, workspace)
        examined = preflight.with_devices(examined, cluster, fleet, made)
        examined, meshed = _mesh(call, cluster, fleet, examined, made)
        if order:
            examined, ranks = trial.framework(call, cluster, fleet, examined, order, ear)
            more = {"framework": {"name": order.name, "ranks": ranks}}
    _tell(call, cluster, examined, meshed, more)


def _plan(cluster: Cluster, examined: Examined, toml: Toml, workspace: Workspace | None) -> Plan | None:
    """The job's plan, for its ports. None where options of `run` are needed to make one, or a node is missing."""
    if workspace is None or len(examined.facts) < len(cluster.hosts):
        return None
    with contextlib.suppress(ClustertoolError):
        return plan(cluster, read_job(cluster, toml, Options()), examined.facts, Identity(job_id()), workspace.files)
    return None


def _mesh(
    call: Call, cluster: Cluster, fleet: Fleet, examined: Examined, made: Plan | None
) -> tuple[Examined, Meshed | None]:
    """What was seen, and the links between the nodes."""
    if "mesh" in cluster.checks_off or len(examined.facts) < 2:
        return examined, None
    ports = ports_to_try(cluster, examined.facts, made, secrets.token_hex(8))
    meshed = link_check.mesh(cluster, fleet, examined.facts, ports, bool(call.given.bandwidth))
    return replace(examined, findings=examined.findings + meshed.findings), meshed


def _tell(call: Call, cluster: Cluster, examined: Examined, meshed: Meshed | None, more: Mapping[str, Any]) -> None:
    """The matrix, and an error if there is one in it."""
    rows = preflight.matrix(examined, cluster)
    bad = errors(examined.findings)
    if call.json:
        code = preflight.worst(list(examined.failed.values())) if bad else 0
        call.answer(
            {
                "nodes": rows,
                **({"mesh": link_check.as_json(meshed, cluster)} if meshed else {}),
                **more,
                "exit": {"code": code, "source": "tool", "reason": bad[0].text if bad else ""},
            }
        )
    else:
        check_matrix(rows, call.terminal)
    for line in link_check.describe(meshed, cluster) if meshed else ():
        call.terminal.note(line)
    for node, failure in examined.failed.items():
        if isinstance(failure, InternalError):
            call.terminal.note(f"{cluster.hosts[node].name}: {failure.what}")
    if bad:
        nodes = {finding.node for finding in bad}
        what = f"{count(len(bad), 'problem')} on {len(nodes)} of {count(len(cluster.hosts), 'node')}"
        error = PreflightError(what, "see the fixes above")
        error.code = preflight.worst(list(examined.failed.values()))
        raise error
    call.terminal.note("the node is ready" if len(cluster.hosts) == 1 else f"all {len(cluster.hosts)} nodes are ready")
