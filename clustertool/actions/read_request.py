"""Reading a run request: what a caller wants to run is checked before any connection is opened."""

from __future__ import annotations

import contextlib
import posixpath
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clustertool.actions import load_config, load_workspace
from clustertool.engines import known_engines
from clustertool.engines.caller import Caller
from clustertool.engines.job_request import Advise, RunRequest, RunWish, make_plan, no_advice, settings_note
from clustertool.engines.queued_request import with_usual_command
from clustertool.errors import DataError, UsageError
from clustertool.fleet import notify
from clustertool.fleet.dispatch.workspace import IGNORE_FILE, Workspace
from clustertool.model.config import shell_text
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.elastic_keys import is_range, node_range
from clustertool.model.config.hosts import Host, device_ids
from clustertool.model.config.job import (
    AUTO,
    JobSpec,
    Options,
    gives_grace,
    read_job,
    resumes,
    valid_job_id,
    variable_sources,
)
from clustertool.model.hints import PROGRAM
from clustertool.model.job.job_names import FRESH, NEWEST
from clustertool.model.job.start_error import wrong_first_line
from clustertool.model.paths import OURS
from clustertool.model.planning.plan import given_facts

_NOT_KEPT = (".", "..", OURS, "log", "nodefile")  # what each job has of its own
_FIRST_LINE = 4096  # bytes of a script
_WORKSPACES = (
    f"{PROGRAM} run --workspace DIR (sent to every node; . is this folder), or --job-workspace DIR (there already)"
)


def read_request(
    caller: Caller, options: Options, wish: RunWish, find: Callable[[], Cluster], advise: Advise = no_advice
) -> RunRequest:
    """Check the options, find the cluster by `find`, read job.toml and the workspace, and build the request.

    It opens no connection. It plans the job with the facts of conf.py, to find errors early, and warns of text that only a
    shell would expand. advise: see RunRequest. Raises UsageError, DataError, ConfigError.
    """
    folder, there = wish.folder, options.job_workspace
    if folder and there:
        raise UsageError("--workspace and --job-workspace cannot be given together", _WORKSPACES)
    if there and not there.startswith(("/", "~/")):
        fix = "give its path on the nodes: /srv/job or ~/job"
        raise UsageError(f"--job-workspace {there!r} is relative", fix)
    for option, text in (("--job-id", wish.job_id), ("--name", wish.name), ("--resume", wish.resume)):
        if text not in ("", NEWEST, FRESH):
            valid_job_id(text, option)
    if wish.keep:
        _check_kept(wish, there)
    toml = load_workspace.workspace_toml(Path(folder)) if folder else {}
    found = find()
    table = load_workspace.workspace_settings(Path(folder), found) if folder else {}
    # Nodes of an engine may have the files by themselves. Of a folder here only job.toml counts then.
    of_engine = str(table.get("workspace") or found.settings.get("workspace") or "")
    if not (folder or there or of_engine):
        raise no_workspace()
    cluster = limit_hosts(found, options) if load_config.needs_hosts(found) else found
    if not load_config.needs_hosts(found):
        _refuse_endpoints(found, options)
    known_engines.refuse_settings(cluster.engine, wish.settings)
    _refuse_other_devices(cluster, options)
    notify.check(cluster)
    checked = read_job(cluster, toml, options)  # without a folder job.toml is on the nodes: only the options, for now
    _refuse_elastic(cluster, checked)
    for what, fix in find_unexpanded_text(cluster, toml, options):
        caller.warn(f"{what}\n  fix: {fix}")
    if note := settings_note(toml, table, cluster):
        caller.remark(note)
    sent = folder and not of_engine
    workspace = load_workspace.workspace(caller, Path(folder), cluster.ignore_from) if sent else None
    if workspace and cluster.notify and posixpath.relpath(cluster.where, workspace.top.resolve()) in workspace.files:
        caller.warn(f"{cluster.where} has NOTIFY, and is sent with the workspace: name it in {IGNORE_FILE}")
    if workspace and checked.has_pservers:
        checked = replace(checked, one_port=load_workspace.uses_one_port(workspace))
    spec = None if there else with_usual_command(checked) if of_engine else checked
    secrets = {} if wish.dry else load_config.secrets(cluster)
    passed = load_config.passed_variables(cluster)
    request = RunRequest(cluster, options, wish, spec, workspace, wish.job_id, secrets, passed)
    request.advise = advise
    request.table = table
    request.origin, request.resumes = of_engine or (str(Path(folder).resolve()) if folder else there), resumes(toml)
    request.grace_given = cluster.grace_given or gives_grace(toml, options)
    if spec is not None:
        check_without_nodes(request)
    if wish.skip_bad:
        request.cluster = found  # of which the first N that are fit are taken
    return request


def find_unexpanded_text(cluster: Cluster, toml: Mapping[str, Any], options: Options) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for text in --script and in variables that only a shell would expand: no shell reads it."""
    found = shell_text.expansion(options.script)
    if found:
        fix = f"--script {shlex.quote(shell_text.in_shell(options.script))}"
        yield f"--script has {found}, and no shell reads it: it stays as it is", fix
    file = tuple((name, str(value)) for name, value in toml.get("env", {}).items())
    seen: set[tuple[str, str]] = set()  # hosts may have the same
    for where, pairs, _ in variable_sources(cluster, file, options):
        for name, value in pairs:
            found = shell_text.in_value(value)
            if found and (name, value) not in seen:
                seen.add((name, value))
                fix = f"PRELUDE in conf.py, which a shell runs on each node: export {name}=..."
                yield f"{where}: {name} has {found}, and no shell reads it: it stays as it is", fix


def _check_kept(wish: RunWish, there: str) -> None:
    """Raise UsageError if --keep is given without --resume or with --job-workspace (`there`), or names no file of a program."""
    if wish.resume in ("", FRESH):
        what = "--keep names files of an earlier job, which --resume continues"
        raise UsageError(what, "add --resume, or --resume JOB")
    if there:
        fix = "leave --keep out"
        raise UsageError("--keep has nothing to copy: the job works in the same folder as earlier ones", fix)
    for path in wish.keep:
        if path != posixpath.normpath(path) or path.startswith(("/", "../")) or path.split("/")[0] in _NOT_KEPT:
            what = f"--keep {path!r} is no file of a program in the job's directory"
            raise UsageError(what, "a relative path, such as snapshot.pt or checkpoints")


def no_workspace() -> UsageError:
    """Build the error for a run without --workspace and --job-workspace."""
    return UsageError("run needs a workspace", _WORKSPACES)


def _refuse_endpoints(cluster: Cluster, options: Options) -> None:
    """Raise UsageError for --servers, --workers and --heter-workers: the engine of the cluster chooses the nodes later."""
    for option in ("servers", "workers", "heter_workers"):
        if getattr(options, option):
            what = f"--{option.replace('_', '-')} names addresses, and the engine {cluster.engine} chooses the nodes itself"
            raise UsageError(what, "give numbers: --nnodes, and --server-num or --worker-num for each node")


def _refuse_elastic(cluster: Cluster, spec: JobSpec) -> None:
    """Raise UsageError for an elastic job if the engine of the cluster cannot run one."""
    if spec.elastic.present and not known_engines.capabilities(cluster.engine).elastic:
        what = f"an elastic job ({spec.elastic.text} nodes) is not possible with the engine {cluster.engine}"
        fix = f"give a fixed number: --nnodes {spec.elastic.maximum}; the engines ssh and slurm have elastic jobs"
        raise UsageError(what, fix)


def limit_hosts(cluster: Cluster, options: Options) -> Cluster:
    """Return the cluster with only the first N hosts for --nnodes N. For MIN:MAX, or without it, return it unchanged.

    Raises UsageError for another value.
    """
    if not options.nnodes:
        return cluster
    if is_range(options.nnodes):
        node_range(options.nnodes)
        return cluster
    if not options.nnodes.isdecimal() or not 0 < int(options.nnodes) <= len(cluster.hosts):
        what = f"--nnodes {options.nnodes!r} is not valid"
        raise UsageError(what, f"a number from 1 to {len(cluster.hosts)}, the hosts of {cluster.where}")
    return replace(cluster, hosts=cluster.hosts[: int(options.nnodes)])


def _refuse_other_devices(cluster: Cluster, options: Options) -> None:
    """Raise UsageError where the ids of --devices differ from the devices of a host that --only and --skip have left."""
    if options.devices in ("", AUTO):
        return
    for host in cluster.hosts:
        if host.chosen is not None and set(host.chosen) != set(device_ids(options.devices, "--devices")):
            left = ",".join(map(str, host.chosen))
            what = f"--devices {options.devices} and the devices {left} of {host.name} by --only or --skip differ"
            raise UsageError(what, "name the devices in one of them: --devices is for all nodes, host:0,1 for one")


def check_without_nodes(request: RunRequest) -> None:
    """Plan the job with what conf.py has of the nodes, and check names, scripts and first lines of programs in the workspace.

    So errors are raised before any connection. If an engine chooses the nodes, one node stands for them. If a PRELUDE has cd,
    scripts are not checked.
    """
    cluster = request.cluster
    if not cluster.hosts:
        cluster = replace(cluster, hosts=(Host(0, "node0", address="node0", name="node0"),))
    facts = {
        node: replace(fact, address=fact.address or f"node{node}", boot_id=f"node{node}")
        for node, fact in given_facts(cluster).items()
    }
    assert request.spec is not None
    counted = replace(request.spec, nproc_of="")  # --nproc-per-node gpu: the devices are not known yet
    made = make_plan(replace(request, cluster=cluster, spec=counted), facts)
    if request.workspace:
        require_names(request.workspace, request.spec.output)
    preludes = " ".join(map(request.cluster.prelude_of, cluster.hosts))
    if request.workspace and not re.search(r"\b(cd|pushd)\b", preludes):
        commands = dict.fromkeys(process.argv for process in made.processes)
        require_scripts(request.workspace, commands)
        require_first_lines(request.workspace, commands)


def require_names(workspace: Workspace, output: str) -> None:
    """Raise DataError if the workspace has a file in the place of log/ or of the output's folders, or a folder nodefile.

    A link `log` counts as a file.
    """
    parts = output.split("/")
    folders = {"log", *("/".join(parts[:count]) for count in range(1, len(parts) + 1))}
    for path, kind in ((entry.path, entry.kind) for entry in workspace.entries):
        if (path in folders and kind == "file") or (path, kind) in (("log", "link"), ("nodefile", "dir")):
            own = "file" if kind == "dir" else "folder"
            what = f"{path!r} of the workspace is in the place of the job's {own} of this name"
            raise DataError(what, f"rename it, or name it in {IGNORE_FILE}")


def require_scripts(workspace: Workspace, commands: Iterable[Sequence[str]]) -> None:
    """Raise DataError for a command whose Python script is not sent. Links and paths outside the workspace are not checked."""
    for script in filter(None, map(script_of, commands)):
        path = posixpath.normpath(script)
        if path.startswith(("/", "../", "~")) or path in workspace.files or (workspace.top / path).is_symlink():
            continue
        if (workspace.top / path).is_file():
            fix = f"write a line !/{path} into {IGNORE_FILE}, or move it out of an ignored folder"
            raise DataError(f"{path} is in the workspace {workspace.top}, but is not sent to the nodes", fix)
        fix = "name the script as it is called in the workspace: --script, or command in job.toml"
        raise DataError(f"there is no {path} in {workspace.top}", fix)


def require_first_lines(workspace: Workspace, commands: Iterable[Sequence[str]]) -> None:
    """Raise DataError for a command that is a script of the workspace, if its first line names no usable interpreter."""
    for path in {posixpath.normpath(argv[0]) for argv in commands if "/" in argv[0]} & set(workspace.files):
        with contextlib.suppress(OSError), open(workspace.top / path, "rb") as file:
            wrong, _, fix = wrong_first_line(file.read(_FIRST_LINE)).partition(": ")
            if wrong:
                raise DataError(f"{path} cannot be started: {wrong}", fix)


def script_of(argv: Sequence[str]) -> str:
    """Return the Python script that a command starts, "" if it starts something else (python -m, -c, another program)."""
    first, *rest = argv
    if first.endswith(".py"):
        return first
    if not re.fullmatch(r"python[0-9.]*", posixpath.basename(first)):
        return ""
    arguments = iter(rest)
    for argument in arguments:
        if argument in ("-W", "-X"):
            next(arguments, "")
        elif not argument.startswith("-"):
            return argument if argument.endswith(".py") else ""
        elif argument in ("-m", "-c", "-"):
            return ""
    return ""
