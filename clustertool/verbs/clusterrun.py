"""clusterrun is `run` with the command lines of fleetrun, torchrun and the old paddle.py, typed once for all nodes.

The nodes are those of --ips, else of conf.py. Without both, --master HOST:PORT and --nnodes N join the other machines on which
the same command is typed, without ssh; --nnodes N alone shows the command for the others. Otherwise the job runs on this
machine alone, in the folder itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from clustertool import __version__
from clustertool.actions import conf_file, load_config, load_workspace
from clustertool.actions.load_config import Conf, NamedNodes
from clustertool.cli.launchers import foreign_options
from clustertool.cli.launchers.foreign_options import OWN
from clustertool.cli.launchers.join_options import EVERYWHERE
from clustertool.cli.launchers.launcher_flags import FLAGS, LAUNCHERS, Launch
from clustertool.cli.launchers.rank_program import RANK_USAGE
from clustertool.engines.job_request import RunRequest
from clustertool.errors import DataError, UsageError
from clustertool.fleet import this_user
from clustertool.fleet.joining import secret, typed_machine
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.folded_names import fold
from clustertool.model.config.hostfile import hosts_of_only, share_out
from clustertool.model.config.hosts import device_ids
from clustertool.model.config.job import AUTO, Options, started_by
from clustertool.model.hints import PROGRAM
from clustertool.model.joining.typed_meeting import TypedMeeting
from clustertool.model.paths import OURS
from clustertool.model.planning import shell_variables
from clustertool.model.planning.environment import literal
from clustertool.model.planning.plan import Plan
from clustertool.model.quantities import count
from clustertool.show.plan_view import configuration, environments
from clustertool.show.table import table
from clustertool.show.terminal import Terminal
from clustertool.verbs import joined_run, run
from clustertool.verbs.run import path_in_workspace, read_options, read_order, remark_on_late_options
from clustertool.verbs.verb import Call, choose_alias, run_and_report

USAGE = "clusterrun [options] train.py [options of train.py]"
_V2_ENV = ("GLOG_logtostderr=0", "GLOG_log_dir=./log")  # where the old tool had Paddle write its *.INFO files
_PADDLE_MODES = ("ps", "ps-heter")
_IMPORT = re.compile(rb"^\s*(import|from)\s+paddle\b", re.MULTILINE)
_LONGEST_SCRIPT = 1 << 20  # bytes that are searched for it


def main() -> None:
    """Run clusterrun with the arguments of this program, and exit with its code."""
    argv = sys.argv[1:]
    sys.exit(run_and_report(lambda call: clusterrun(call, argv), Call(SimpleNamespace(json="--json" in argv))))


def clusterrun(call: Call, argv: Sequence[str]) -> None:
    """Parse the command line, find the nodes, and run the job on them, on this machine alone, or with those of a meeting.

    Returns nothing; raises UsageError, or the job's error, which has the exit code. --help and --version only print. Options
    in variables of the shell are added if conf.py does not name the nodes.
    """
    if not argv:
        raise UsageError("what is to be run?", f"{USAGE}; clusterrun --help lists the options")
    launch = foreign_options.read(argv, OWN)
    if launch.options.get("help") or launch.options.get("version"):
        show_help() if launch.options.get("help") else call.terminal.line(f"clusterrun {__version__}")
        return
    if "under" in launch.options:  # rank_program.py takes it where it stands alone
        raise UsageError("--under makes one rank of a job that runs, and other options start a job", RANK_USAGE)
    call.given = foreign_options.values_for_run(launch, OWN)
    call.terse = not call.given.verbose
    call.gather_remarks()
    of_shell = foreign_options.options_of_shell(os.environ, launch, OWN)
    whole = foreign_options.read([*of_shell.values(), *argv], OWN)
    conf = load_config.read_conf(call, call.selection, foreign_options.needs_no_conf(whole))
    if of_shell and not conf.names_nodes:
        argv, launch, call.given = [*of_shell.values(), *argv], whole, foreign_options.values_for_run(whole, OWN)
        pairs = (f"{shlex.quote(option)} ({name})" for name, option in of_shell.items())
        call.remark(f"from this shell: {', '.join(pairs)}; env -u {next(iter(of_shell))} clusterrun ... leaves one out")
    meeting = foreign_options.meeting(launch, conf.names_nodes)
    if foreign_options.begins_meeting(launch, conf.names_nodes):
        meeting = _choose_meeting(call, launch, argv)
    for note in foreign_options.notes(launch, conf.names_nodes, meeting is not None):
        call.remark(note)
    remark_on_late_options(call, "clusterrun", launch.arguments or ("",))
    folder = _workspace_folder(call)
    _check_own_address(launch)
    if meeting is not None:
        _join_meeting(call, launch, folder, conf, meeting)
        return
    if not (foreign_options.names_nodes(launch, conf.names_nodes) or launch.nodes or launch.join.named):
        _refuse_alone()
    cluster = _build_cluster(call, launch, folder, conf)
    _warn_of_cloud(call, launch, cluster)
    if ":" not in call.given.nnodes:
        _drop_elastic_options(call)
    options = _build_options(call, launch, folder, cluster)
    order = read_order(call, options, lambda: cluster)
    if len(cluster.hosts) > 1 and not (launch.old or launch.total or foreign_options.named_nodes(launch)):
        first = cluster.hosts[0].address or cluster.hosts[0].host
        order.everywhere = shlex.join(foreign_options.on_each_node(argv, OWN, first, len(cluster.hosts)))
        order.everywhere += ", without HOSTS in conf.py" if conf.names_nodes else ""
    report = _LaunchReport(call, launch, folder, order)
    if report.detailed:
        report.configuration()
        order.planned = report.planned
    order.ended = report.ended
    run.perform(call, order)


def _check_own_address(launch: Launch) -> None:
    """Replace --host or --local-addr by this machine's address of that name.

    Raises UsageError if it is not one of this machine.
    """
    if launch.own_address:
        address = typed_machine.own_address(launch.own_address)
        if not address:
            what = f"{launch.own_address_by} {launch.own_address} is no address of this machine"
            raise UsageError(what, "it belongs to the machine where it is typed: leave it out; --ips=a,b names nodes")
        launch.own_address = address


def _choose_meeting(call: Call, launch: Launch, argv: Sequence[str]) -> TypedMeeting | None:
    """Choose an address and a port of this machine, and return the meeting there; None without a secret to meet with.

    Prints the command to type on the other machines, except with --dry. This machine gets the number 0.
    """
    assert launch.nodes is not None
    if secret.find(os.environ) is None:
        return None
    host = typed_machine.default_address()
    meeting = TypedMeeting(host, typed_machine.free_port(host), launch.nodes[1], 0)
    if not call.given.dry:
        others = "other machine" if meeting.nodes == 2 else f"{meeting.nodes - 1} other machines"
        command = shlex.join(["clusterrun", "--master", meeting.endpoint, *argv])
        call.terminal.note(f"type this on the {others}: {command}")
    return meeting


def _join_meeting(call: Call, launch: Launch, folder: Path, conf: Conf, meeting: TypedMeeting) -> None:
    """Run this machine's part of a job whose command is typed on several machines, with the options that are typed here.

    Raises UsageError, and the job's error.
    """
    devices = foreign_options.names_devices(launch)
    for option, items in (("--only", call.given.only), ("--skip", call.given.skip)):
        if items:
            what = f"{option} is not possible where the command is typed on each machine"
            raise UsageError(what, "type it on the machines that take part, with --devices IDS on each")
    coordinates = typed_machine.own_address(meeting.host) if launch.own_address and not meeting.index else ""
    if coordinates not in ("", launch.own_address):
        what = f"{launch.own_address_by} {launch.own_address}: the machines meet at {coordinates}, which is this machine, too"
        raise UsageError(what, "name the same address where the machines meet and here, or leave this one out")
    cluster = load_config.cluster_of_meeting(call, conf, meeting.nodes, folder, devices, launch.own_address)
    cluster = _with_launcher_options(cluster, launch)
    call.given.nnodes = _node_range(launch)
    if not launch.elastic:
        _drop_elastic_options(call)
    if launch.join.static:  # the machines meet at this port, so it is not that of the trainers
        call.given.master_port = ""
    options = _build_options(call, launch, folder, cluster)
    order = read_order(call, options, lambda: cluster)
    report = _LaunchReport(call, launch, folder, order)
    if report.detailed:
        report.configuration(together=meeting.nodes)
    joined_run.perform(call, order, meeting, folder, report.logs)


def _workspace_folder(call: Call) -> Path:
    """Return the absolute path of the workspace: --workspace, else --job-workspace, else the current folder.

    Raises UsageError if two names of the first option have different values.
    """
    given = call.given
    named = choose_alias(call, "workspace", "job-dispatch-package") or given.job_workspace
    return Path(os.path.abspath(this_user.expand_home(named or ".")))


def _build_cluster(call: Call, launch: Launch, folder: Path, conf: Conf) -> Cluster:
    """Build the cluster for this command line, with launcher options applied, and set --nnodes and its range in call.given.

    A total of trainers (-np) is shared out among the hosts. Raises UsageError if there are too few nodes, for a total with an
    engine that chooses the nodes, and if the address of this machine that is typed is none of the nodes'.
    """
    given = call.given
    include = launch.included and not (launch.listed or conf.names_nodes)
    nodes = NamedNodes(
        hosts_of_only(launch.included) if include else launch.listed,
        "--include" if include else launch.listed_by or "--ips",
        foreign_options.named_nodes(launch),
        launch.own_address,
        launch.alone,
        foreign_options.names_devices(launch),
    )
    cluster = _with_launcher_options(load_config.cluster_of_launcher(call, call.selection, nodes, folder, conf), launch)
    there = len(cluster.hosts)
    _require_own_address(launch, cluster)
    if not load_config.needs_hosts(cluster):
        if launch.total:
            raise UsageError("a total number of processes needs hosts", "give --nnodes and --nproc-per-node")
        given.nnodes = _node_range(launch) or (str(launch.nodes[1]) if launch.nodes else given.nnodes)
    elif launch.nodes:
        low, high = launch.nodes
        if low > there:
            what = f"--nnodes {low}: there {'is' if there == 1 else 'are'} {count(there, 'node')}"
            fix = f"name the nodes with --ips=a,b or in conf.py, or {EVERYWHERE}"
            if foreign_options.begins_meeting(launch, conf.names_nodes):  # and there is no secret
                made = f"{PROGRAM} secret --to {secret.default_file()}"
                fix += f"; without an address it needs a secret: {made}, the same file on each machine, then type this again"
            raise UsageError(what, fix)
        given.nnodes = _node_range(launch) or str(min(high, there))
        if launch.elastic and all(host.here for host in cluster.hosts):
            given.nnodes = "1"
    if launch.total:
        cluster = replace(cluster, hosts=share_out(cluster.hosts[: int(given.nnodes or there)], launch.total))
        given.nnodes = ""
    return cluster


def _refuse_alone() -> None:
    """Raise UsageError if variables of the shell, which no launcher reads, name several machines; else do nothing."""
    environ = os.environ
    variable, number = shell_variables.front_end_machines(environ)
    if not variable:
        return
    rank = environ.get("NODE_RANK") or environ.get("RANK", "I")
    address, port = environ.get("MASTER_ADDR", "HOST"), environ.get("MASTER_PORT", "29500")
    place = shlex.join(["--node-rank", rank, "--master-addr", address, "--master-port", port])
    what = f"{variable}={number} of this shell names {number} machines, and this command would train on this one alone"
    fix = f"on each machine: clusterrun --nnodes {number} {place} ...; or for this machine alone: clusterrun --standalone ..."
    raise UsageError(what, fix)


def _warn_of_cloud(call: Call, launch: Launch, cluster: Cluster) -> None:
    """Warn if PaddleCloud's variables name several machines and the job runs on this one alone, with what joins them."""
    machines = shell_variables.cloud_machines(os.environ)
    alone = all(host.here for host in cluster.hosts)
    if machines and alone and not (launch.alone or launch.listed or launch.join.named):
        number = os.environ["PADDLE_TRAINER_ID"]
        joined = f"clusterrun --master {machines[0]}:PORT --nnodes {len(machines)} --rank {number} ..."
        fix = f"{joined} with a common secret"
        named = f"PADDLE_TRAINERS of this shell names {len(machines)} machines"
        what = f"{named}, and this command trains on this one alone"
        call.warn(f"{what}\n  fix: {fix} ({PROGRAM} secret), or --ips={','.join(machines[:8])} on one of them (ssh)")


def _require_own_address(launch: Launch, cluster: Cluster) -> None:
    """Raise UsageError if the address of this machine that is typed is not one of the nodes' addresses.

    Does nothing if none is typed, or the address of a node is not known.
    """
    addresses = [host.address for host in cluster.hosts]
    if launch.own_address and all(addresses) and launch.own_address not in addresses:
        what = f"{launch.own_address_by} {launch.own_address} is none of the nodes: {', '.join(addresses[:8])}"
        raise UsageError(what, "leave it out: clusterrun is typed once and starts all nodes")


def _drop_elastic_options(call: Call) -> None:
    """Reset options of elastic jobs in call.given, with a remark, since the number of nodes is fixed."""
    given = call.given
    for name, nothing in (("elastic_server", ()), ("elastic_timeout", "")):
        if getattr(given, name):
            option = name.replace("_", "-")
            call.remark(f"--{option} is not needed: the number of nodes is fixed; --nnodes MIN:MAX makes it elastic")
            setattr(given, name, nothing)


def _node_range(launch: Launch) -> str:
    """Return MIN:MAX for --nnodes of an elastic job; "" for another job."""
    return "{}:{}".format(*launch.nodes) if launch.elastic and launch.nodes else ""


def _with_launcher_options(cluster: Cluster, launch: Launch) -> Cluster:
    """Return the cluster with the start port, the kind and the visibility of devices that the options have set."""
    devices = {"device_kind": launch.device_kind, "device_visibility": launch.device_visibility}
    given: dict[str, Any] = {"start_port": int(launch.start_port or 0), **devices}
    return replace(cluster, **{name: value for name, value in given.items() if value})


def _build_options(call: Call, launch: Launch, folder: Path, cluster: Cluster) -> Options:
    """Build the options of the job, and set the place of its workspace in call.given.

    If this machine is one of the hosts, the workspace is the folder itself, and nothing is copied. Raises UsageError for
    options that do not fit, DataError for a folder or a script that cannot be used.
    """
    given, here = call.given, any(host.here for host in cluster.hosts)
    if here:
        _use_folder_in_place(call, folder)
    elif not (given.workspace or given.job_dispatch_package or given.job_workspace):
        given.workspace = str(folder)
    typed = _script_and_arguments(launch, folder, here, local=here or not given.job_workspace)
    options = read_options(call)
    if cluster.shell_devices and cluster.hosts[0].chosen is None:
        _check_devices(options.devices, cluster)
    if here:
        servers = tuple(text.replace("localhost", "127.0.0.1") for text in options.servers)
        workers = tuple(text.replace("localhost", "127.0.0.1") for text in options.workers)
        options = replace(options, servers=servers, workers=workers)
    return replace(
        options,
        command=() if launch.old else tuple(map(literal, started_by(launch.how, typed))),
        v2=launch.old,
        v2_args=tuple(map(literal, launch.arguments)) if launch.old else (),
        env=(*(_V2_ENV if launch.old else ()), *options.env),
        log_dir=_choose_log_dir(call, launch, folder, here),
        script="" if launch.arguments else options.script,
        implied=launch.implied,
        host_counts=bool(launch.total) or launch.by_slots,
    )


def _use_folder_in_place(call: Call, folder: Path) -> None:
    """Set the folder as the job's workspace on this machine, where nothing is copied. Raises DataError if it cannot be used."""
    if not folder.is_dir():
        fix = "go to the folder of your script, or name it: --workspace DIR"
        raise DataError(f"there is no folder {str(folder)!r}", fix)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DataError(f"{folder} cannot be written, and the logs lie there", "run it in a folder of yours")
    records = folder / OURS
    if records.exists() and records.stat().st_uid != os.geteuid():
        raise DataError(f"{records} belongs to another user", "run it in a copy of the folder")
    call.given.workspace = call.given.job_dispatch_package = ""
    call.given.job_workspace = str(folder)


def _script_and_arguments(launch: Launch, folder: Path, here: bool, local: bool) -> tuple[str, ...]:
    """Return the script, by its path in the workspace, and its arguments; () if the command is in --script or job.toml.

    A module, a program that is no Python file, and all arguments of paddle.py stay as typed. here: the job runs on this
    machine, in `folder` itself, so the script is typed relative to it. local: the workspace is on this machine, so a script is
    checked; else all stays as typed. Raises UsageError without a program, DataError for a script that is not in the workspace.
    """
    if launch.old or not local:
        return launch.arguments
    if not launch.arguments:
        if not (
            launch.options.get("script") or load_workspace.workspace_toml(folder).get("trainer", {}).get("command")
        ):
            raise UsageError("what is to be run?", f"{USAGE}, or [trainer] command in job.toml")
        return ()
    script, *rest = launch.arguments
    if launch.how in ("module", "no-python") or (launch.how != "run-path" and not script.endswith(".py")):
        return launch.arguments
    if not here:
        return (path_in_workspace(folder, script), *rest)
    if not (folder / script).is_file():
        raise DataError(f"there is no {script} in {folder}", "name the script as it is called in the workspace")
    return (script, *rest)


def _check_devices(text: str, cluster: Cluster) -> None:
    """Raise UsageError if an id of --devices is not among those of CUDA_VISIBLE_DEVICES in the shell.

    text: of --devices; "" and "auto" are not checked.
    """
    if text in ("", AUTO):
        return
    visible = cluster.hosts[0].devices or ()
    hidden = [i for i in device_ids(text, "--devices") if i not in visible]
    if hidden:
        variable = cluster.shell_devices
        fix = f"start it without the variable: env -u {variable} clusterrun ..."
        if not visible:
            raise UsageError(f"{variable} hides all devices in this shell, and --devices names some", fix)
        what = f"device {hidden[0]} is not among those of {variable}={','.join(map(str, visible))} in this shell"
        raise UsageError(what, f"name one of them, or {fix}")


def _choose_log_dir(call: Call, launch: Launch, folder: Path, here: bool) -> str:
    """Choose the folder for logs in the working directory: --log_dir, "" if it is outside or not given.

    here: the job runs on this machine. Then, except with paddle.py's options, --log_dir may be outside, and is log if not
    given. On nodes call.given.log_dir gets it, too, for a copy on this machine. Expands ~ in launch.log_dir. Remarks on an
    unused one, and on logs of an earlier job.
    """
    launch.log_dir = launch.log_dir and str(this_user.expand_home(launch.log_dir))
    call.given.log_dir = "" if here else launch.log_dir  # on this machine, too
    if not here and not launch.log_dir and any((folder / "log").glob("workerlog.*")):
        old = os.path.relpath(folder / "log")
        call.remark(f"{old} has the logs of an earlier job; write those of this one with --log_dir DIR")
    if here and not launch.old:
        return launch.log_dir or "log"
    outside = os.path.isabs(launch.log_dir) or os.path.normpath(launch.log_dir).split("/")[0] == ".."
    if here and outside:
        unused = f"--log_dir {launch.log_dir} is not used"
        call.remark(f"{unused}: logs are in the job's directory")
    return "" if outside else launch.log_dir


class _LaunchReport:
    """What clusterrun prints about a job, as fleetrun does: its configuration, on stderr, and the place of its logs."""

    def __init__(self, call: Call, launch: Launch, folder: Path, order: RunRequest) -> None:
        self._call, self._launch, self._folder, self._order = call, launch, folder, order
        self._aside = Terminal(out=sys.stderr)
        self._hide = load_config.mask_known_secrets(order.cluster)
        # What users of Paddle's launcher search.
        of_paddle = launch.old or {order.options.mode, launch.implied} & set(_PADDLE_MODES)
        paddle = of_paddle or self._imports_paddle()
        shown = call.given.verbose or (paddle and not launch.quiet)
        self.detailed = shown and not order.wish.dry

    def _imports_paddle(self) -> bool:
        """Check whether the script, if it is on this machine, imports Paddle; only its first MiB is read."""
        with contextlib.suppress(OSError, IndexError), (self._folder / self._launch.arguments[0]).open("rb") as script:
            return _IMPORT.search(script.read(_LONGEST_SCRIPT)) is not None
        return False

    def configuration(self, together: int = 0) -> None:
        """Print the configuration as Paddle's launcher does, on stderr.

        together: the number of machines on which the command is typed; their addresses are not known yet, as with an engine
        that chooses the nodes.
        """
        launch, order = self._launch, self._order
        here = any(host.here for host in order.cluster.hosts)
        ips = fold(host.address if host.here else host.name for host in order.cluster.hosts)
        nodes = str(together or len(order.cluster.hosts) or order.options.nnodes)
        values = {
            **({"ips": ips} if ips and not together else {}),
            **({"nnodes": nodes} if nodes else {}),
            "workspace": str(self._folder),
            "log_dir": order.options.log_dir or ("log" if here else "log, in the job's directory on every node"),
            **launch.typed,
        }
        if launch.old:
            values["trainer_args"] = " ".join(launch.arguments)
        elif launch.arguments:
            values.update(training_script=launch.arguments[0], training_script_args=str(list(launch.arguments[1:])))
        if order.options.mode:
            values["run_mode"] = order.options.mode
        if order.options.env:
            values["env"] = ",".join(pair.partition("=")[0] for pair in order.options.env)
        configuration({name: self._hide(value) for name, value in values.items()}, self._aside)

    def planned(self, made: Plan) -> None:
        """Print the variables that place the first process of every role, long lists cut, on stderr."""
        environments(made, self._aside)

    def ended(self, made: Plan) -> None:
        """Print where the logs of a job are, in one line."""
        first = made.nodes[0]
        if not first.host.here:
            verbs = f"{PROGRAM} logs --job {made.job_id}; output: {PROGRAM} fetch --job {made.job_id}"
            self._call.terminal.note(f"logs: {first.job_dir}/log on every node; {verbs}")
            return
        self.logs(made.job_id, first.job_dir, [process.log for process in made.processes])

    def logs(self, job: str, job_dir: str, paths: Sequence[str]) -> None:
        """Print where the logs of a job on this machine are. paths: relative to the job's directory."""
        shown, true = self._folder / (self._order.options.log_dir or "log"), Path(job_dir) / "log"
        logs = [Path(path).name for path in paths]
        ours = all((shown / log).resolve() == (true / log).resolve() for log in logs)
        where = os.path.relpath(shown if ours else true)
        names = " ".join(f"{where}/{stem}.*" for stem in dict.fromkeys(log.partition(".")[0] for log in logs))
        not_ours = "" if ours else f" (not all in {os.path.relpath(shown)} is of this job)"
        # Else later commands from here would go by conf.py.
        here = " --here" if conf_file.find_conf(self._call.given.conf) else ""
        self._call.terminal.note(f"logs: {names}{not_ours}; {PROGRAM} logs{here} --job {job}")


def show_help() -> None:
    """Print the usage of clusterrun, the options of all launchers, and those of `run` that no launcher has."""
    terminal = Terminal()
    terminal.block(f"usage: {USAGE}\n\n{__doc__}")
    for key, name in LAUNCHERS.items():
        flags = [flag for flag in FLAGS if key in flag.of]
        rows = [(", ".join(flag.names.split()) + f" {flag.value}" * bool(flag.value), flag.here) for flag in flags]
        terminal.line()
        table(f"options of {name}", ("option", "here"), rows, terminal=terminal)
    taken = {name for flag in FLAGS for name in flag.names.split()}
    rest = [option for option in OWN if f"--{option.name}" not in taken]
    short = {option.name: f", -{option.short}" for option in rest if option.short and f"-{option.short}" not in taken}
    own = [(f"--{option.name}{short.get(option.name, '')}", option.text) for option in rest]
    terminal.line()
    table(f"options of {PROGRAM} run", ("option", "here"), own, terminal=terminal)


if __name__ == "__main__":
    main()
