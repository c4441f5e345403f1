"""inv check does the preflight only, and prints one matrix of nodes and findings."""

from __future__ import annotations

import contextlib
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path

from clustertool.actions import load_config, load_workspace
from clustertool.engines import known_engines, preflight, registry
from clustertool.engines.preflight import Examined
from clustertool.engines.send_workspace import needs
from clustertool.errors import ClustertoolError, InternalError, PreflightError, UsageError
from clustertool.fleet.dispatch.workspace import Workspace
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.identity import job_id
from clustertool.model.checks.each_node import errors
from clustertool.model.checks.link_findings import ports_to_try
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.folded_names import fold
from clustertool.model.config.hosts import Host
from clustertool.model.config.job import Options, read_job
from clustertool.model.config.job_tables import Toml
from clustertool.model.facts import Identity
from clustertool.model.planning.plan import Plan, plan
from clustertool.model.quantities import count
from clustertool.model.wire.agent_requests import ProbeWanted
from clustertool.show.status_view import check_matrix
from clustertool.verbs import framework_trial as trial
from clustertool.verbs import link_check, signals
from clustertool.verbs.link_check import Meshed
from clustertool.verbs.verb import Call, User


def check(call: Call) -> None:
    folder = Path(call.given.workspace) if call.given.workspace else None
    toml = load_workspace.workspace_toml(folder) if folder else {}
    cluster = load_config.cluster(call, call.selection, start_local=True)
    typed, container = (
        known_engines.typed_settings(vars(call.given)),
        load_workspace.container(cluster, toml, call.given.image),
    )
    known_engines.refuse_settings(cluster.engine, typed)
    if not load_config.needs_hosts(cluster):
        _of_engine(call, cluster, typed)
        return
    spec, passed = load_workspace.scattered(cluster, toml), dict(load_config.passed(cluster))
    order, ear = trial.read_order(call, cluster, toml, tuple(passed.items())), trial.TrialFollower(len(cluster.hosts))
    more: dict[str, object] = {}
    workspace = load_workspace.workspace(call, folder, cluster.ignore_from) if folder else None
    with Fleet(cluster, signals.check, ear.put, User()) as fleet:
        examined = preflight.examine(fleet, lambda host: _wanted(cluster, host, toml, passed), container=container)
        if workspace:
            examined = examined.room(needs(workspace, cluster, examined.facts, spec))
        made = _plan(call, cluster, examined, toml, workspace)
        examined = examined.devices(fleet, made)
        meshed = _mesh(call, fleet, examined, made)
        examined = examined.found(meshed.findings if meshed else ())
        if order:
            examined, ranks = trial.framework(call, fleet, examined, order, ear)
            more = {"framework": {"name": order.name, "ranks": ranks}}
    _tell(call, examined, meshed, more)


def _wanted(cluster: Cluster, host: Host, toml: Toml, passed: Mapping[str, str]) -> ProbeWanted:
    """Build what `check` asks a node: also for its MPI where the workspace needs it."""
    wanted = preflight.for_check(cluster, host, passed)
    if toml.get("mode") != "mpi":
        return wanted
    variables = {**passed, **{name: str(value) for name, value in dict(toml.get("env", {})).items()}}
    return {**wanted, **preflight.for_mpi(cluster, host, variables)}


def _of_engine(call: Call, cluster: Cluster, typed: Mapping[str, object]) -> None:
    """Check what jobs need where an engine chooses the nodes. Raises UsageError for options that need HOSTS."""
    for option in ("framework", "bandwidth"):
        if getattr(call.given, option):
            what = f"--{option} works on HOSTS, and the engine {cluster.engine} chooses the nodes itself"
            raise UsageError(what, "leave it out")
    with registry.engine_of(cluster)(cluster, call) as engine:
        _tell(call, engine.check(typed, call.given.deep), None, {})


def _plan(call: Call, cluster: Cluster, examined: Examined, toml: Toml, workspace: Workspace | None) -> Plan | None:
    """Make the job's plan, for its ports. None where options of `run` are needed to make one, or a node is missing."""
    if workspace is None or len(examined.facts) < len(cluster.hosts):
        return None
    with contextlib.suppress(ClustertoolError):
        job = read_job(cluster, toml, Options(image=call.given.image))
        return plan(cluster, job, examined.facts, Identity(job_id()), workspace.files)
    return None


def _mesh(call: Call, fleet: Fleet, examined: Examined, made: Plan | None) -> Meshed | None:
    """Try the links between the nodes, where there is more than one."""
    if "mesh" in fleet.cluster.checks_off or len(examined.facts) < 2:
        return None
    ports = ports_to_try(fleet.cluster, examined.facts, made, secrets.token_hex(8))
    return link_check.mesh(fleet, examined.facts, ports, bool(call.given.bandwidth))


def _tell(call: Call, examined: Examined, meshed: Meshed | None, more: Mapping[str, object]) -> None:
    """Print the matrix of findings, and raise an error if one of them is an error."""
    cluster, rows, bad = examined.cluster, examined.rows(), errors(examined.findings)
    if call.json:
        done = {"code": examined.code() if bad else 0, "source": "tool", "reason": bad[0].text if bad else ""}
        links = {"mesh": link_check.as_json(meshed, cluster)} if meshed else {}
        call.answer({"nodes": rows, **links, **more, "exit": done})
    else:
        check_matrix(rows, call.terminal)
    for line in link_check.describe(meshed, cluster) if meshed else ():
        call.terminal.note(line)
    for node, failure in examined.failed.items():
        if isinstance(failure, InternalError):
            call.terminal.note(f"{cluster.hosts[node].name}: {failure.what}")
    if bad:
        nodes = {finding.node for finding in bad}
        verb, skip = "is" if len(nodes) == 1 else "are", fold(cluster.hosts[node].name for node in sorted(nodes))
        ready = f"{len(nodes)} of {count(len(cluster.hosts), 'node')} {verb} not ready"
        some = len(nodes) < len(cluster.hosts) and load_config.needs_hosts(cluster)
        leave = f", or leave out with --skip {shlex.quote(skip)}" if some else ""
        error = PreflightError(f"check failed: {ready} ({count(len(bad), 'problem')})", f"as listed above{leave}")
        error.code = examined.code()
        raise error
    call.terminal.note("the node is ready" if len(cluster.hosts) == 1 else f"all {len(cluster.hosts)} nodes are ready")
