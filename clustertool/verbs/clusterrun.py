"""clusterrun is `run` with the command lines of fleetrun, torchrun and the old paddle.py, typed once for all nodes.

The nodes are those of --ips, else of conf.py; without both, the job runs on this machine alone, in the folder itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from clustertool import __version__
from clustertool.errors import DataError, UsageError
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import device_ids
from clustertool.model.config.job import Options
from clustertool.model.paths import OURS
from clustertool.model.planning.environment import literal
from clustertool.model.planning.plan import Plan
from clustertool.model.roles import role_name
from clustertool.show.configuration import configuration, environment
from clustertool.show.table import fold, table
from clustertool.show.terminal import Terminal
from clustertool.verbs import foreign_options, load_config, run
from clustertool.verbs.foreign_options import LAUNCHERS, Launch
from clustertool.verbs.run_request import RunRequest, read_options, read_order
from clustertool.verbs.table import JSON, NODES, RUN, Opt
from clustertool.verbs.verb import Call, outermost
from clustertool.watch.sanitize import mask

_USAGE = "clusterrun [options] train.py [options of train.py]"
_V2_ENV = ("GLOG_logtostderr=0", "GLOG_log_dir=./log")  # where the old tool had Paddle write its *.INFO files
OWN = (
    *RUN,
    *NODES,
    JSON,
    Opt("help", "show this and do nothing", False, short="h"),
    Opt("version", "show it", False),
)


def main() -> None:
    argv = sys.argv[1:]
    sys.exit(outermost(lambda call: clusterrun(call, argv), Call(SimpleNamespace(json="--json" in argv))))


def clusterrun(call: Call, argv: Sequence[str]) -> None:
    """Understand the command line, find the nodes, and run."""
    if not argv:
        raise UsageError("what is to be run?", f"{_USAGE}; clusterrun --help lists the options")
    launch = foreign_options.read(argv, OWN)
    if launch.options.get("help") or launch.options.get("version"):
        _help(call.terminal, bool(launch.options.get("help")))
        return
    call.given = foreign_options.wish(launch, OWN)
    for note in dict.fromkeys(launch.notes):
        call.terminal.note(f"note: {note}")
    folder = _folder(call, launch)
    cluster = _cluster(call, launch, folder)
    options = _options(call, launch, folder, cluster)
    order = read_order(call, options, lambda: cluster)
    teller = _Teller(call, launch, folder, order)
    if not launch.quiet and not order.dry:
        teller.configuration()
        order.planned = teller.planned
    order.ended = teller.ended
    run.perform(call, order)


def _folder(call: Call, launch: Launch) -> Path:
    """The workspace: the one that is named, else this folder. Of --job-workspace on nodes only its name is known."""
    given = call.given
    named = load_config.one_of(call, "workspace", "job-dispatch-package") or given.job_workspace
    return Path(os.path.abspath(os.path.expanduser(named or ".")))


def _cluster(call: Call, launch: Launch, folder: Path) -> Cluster:
    """The nodes, after --nnodes, --start_port and other launcher options about them."""
    given = call.given
    cluster = load_config.launched(call, launch.ips, foreign_options.named_nodes(launch), launch.alone, folder)
    if launch.start_port:
        cluster = replace(cluster, start_port=int(launch.start_port))
    if launch.device_kind:
        cluster = replace(cluster, device_kind=launch.device_kind)
    if launch.nodes:
        low, high = launch.nodes
        if low > len(cluster.hosts):
            what = (
                f"--nnodes {low}: there {'is 1 node' if len(cluster.hosts) == 1 else f'are {len(cluster.hosts)} nodes'}"
            )
            raise UsageError(what, "name the nodes with --ips=a,b or in conf.py")
        given.nnodes = str(min(high, len(cluster.hosts)))
    return cluster


def _options(call: Call, launch: Launch, folder: Path, cluster: Cluster) -> Options:
    """The options of this run; call.given has the place of the workspace from now on."""
    given, here = call.given, cluster.hosts[0].here
    if here:
        _in_place(call, folder)
    elif not (given.workspace or given.job_dispatch_package or given.job_workspace):
        given.workspace = str(folder)
    typed = _typed(launch, folder, here, local=here or not given.job_workspace)
    options = read_options(call)
    if here:
        _check_devices(options.devices, cluster)
        options = replace(options, servers=_numeric(options.servers), workers=_numeric(options.workers))
    return replace(
        options,
        command=() if launch.old else tuple(map(literal, foreign_options.command(launch, typed))),
        v2=launch.old,
        v2_args=tuple(map(literal, launch.arguments)) if launch.old else (),
        env=(*(_V2_ENV if launch.old else ()), *options.env),
        log_dir=_log_dir(call, launch, here),
        script="" if launch.arguments else options.script,
        implied=launch.implied,
    )


def _in_place(call: Call, folder: Path) -> None:
    """On this machine nothing is copied: the job works in the folder itself."""
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {str(folder)!r}", "go to the folder of your script, or name it: --workspace DIR"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DataError(f"{folder} cannot be written, and the logs lie there", "run it in a folder of yours")
    records = folder / OURS
    if records.exists() and records.stat().st_uid != os.geteuid():
        raise DataError(f"{records} belongs to another user", "run it in a copy of the folder")
    call.given.workspace = call.given.job_dispatch_package = ""
    call.given.job_workspace = str(folder)


def _typed(launch: Launch, folder: Path, here: bool, local: bool) -> tuple[str, ...]:
    """The script's path on its node. `local`: the workspace is on this machine, so that it can be tested."""
    if launch.old or not local:
        return launch.arguments
    if not launch.arguments:
        if not (launch.options.get("script") or load_config.workspace_toml(folder).get("trainer", {}).get("command")):
            raise UsageError("what is to be run?", f"{_USAGE}, or [trainer] command in job.toml")
        return ()
    script, *rest = launch.arguments
    if launch.how in ("module", "no-python") or (launch.how != "run-path" and not script.endswith(".py")):
        return launch.arguments
    path = folder / script
    if not here and os.path.isabs(script) and path.is_relative_to(folder):
        script = str(path.relative_to(folder))
    if not path.is_file():
        raise DataError(f"there is no {script} in {folder}", "name the script as it is called in the workspace")
    if not here and not Path(os.path.normpath(path)).is_relative_to(folder):
        raise DataError(
            f"{script} lies outside of the workspace {folder}", "nodes get the workspace only: --workspace DIR"
        )
    return (script, *rest)


def _numeric(endpoints: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(text.replace("localhost", "127.0.0.1") for text in endpoints)


def _check_devices(text: str, cluster: Cluster) -> None:
    """As fleetrun has it: --gpus are ids of CUDA_VISIBLE_DEVICES. Raises UsageError."""
    visible = cluster.hosts[0].devices
    hidden = [i for i in device_ids(text, "--devices") if i not in visible] if text and visible is not None else []
    if hidden:
        seen = ",".join(map(str, visible or ()))
        raise UsageError(
            f"device {hidden[0]} is not among the visible ones ({seen})", "see CUDA_VISIBLE_DEVICES in this shell"
        )


def _log_dir(call: Call, launch: Launch, here: bool) -> str:
    """Where the working directory shows the logs: on this machine where fleetrun would write them."""
    if here and not launch.old:
        return launch.log_dir or "log"
    outside = os.path.isabs(launch.log_dir) or os.path.normpath(launch.log_dir).split("/")[0] == ".."
    if launch.log_dir and outside:
        call.terminal.note(
            f"note: --log_dir {launch.log_dir} is not used on nodes: logs are in the job's directory there"
        )
        return ""
    return launch.log_dir


class _Teller:
    """The configuration that fleetrun prints, on stderr: stdout belongs to the job."""

    def __init__(self, call: Call, launch: Launch, folder: Path, order: RunRequest) -> None:
        self._call, self._launch, self._folder, self._order = call, launch, folder, order
        self._aside = Terminal(out=sys.stderr)
        self._hide = mask(list(order.secrets.values()))

    def configuration(self) -> None:
        launch, order = self._launch, self._order
        values = {
            "ips": fold(host.address if host.here else host.name for host in order.cluster.hosts),
            "nnodes": str(len(order.cluster.hosts)),
            "workspace": str(self._folder),
            "log_dir": order.options.log_dir or "log",
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
        """The environment of the first process of every role."""
        for role in made.phases:
            mine = [process for process in made.processes if process.role == role]
            first = min(mine, key=lambda process: process.rank)
            environment(f"{role_name(role)} 0 of {len(mine)}:", dict(first.env), self._aside)

    def ended(self, made: Plan) -> None:
        """Where the logs are, in one line."""
        first = made.nodes[0]
        if not first.here:
            verbs = f"clustertool logs --job {made.job_id}; output: clustertool fetch --job {made.job_id}"
            self._call.terminal.note(f"logs: {first.job_dir}/log on every node; {verbs}")
            return
        shown, true = self._folder / (made.log_dir or "log"), Path(first.job_dir) / "log"
        logs = [Path(process.log).name for process in made.processes]
        ours = all((shown / log).resolve() == (true / log).resolve() for log in logs)
        where = os.path.relpath(shown if ours else true)
        names = " ".join(f"{where}/{stem}.*" for stem in dict.fromkeys(log.partition(".")[0] for log in logs))
        not_ours = "" if ours else f" (not all in {os.path.relpath(shown)} is of this job)"
        here = " --here" if load_config.has_conf(self._call) else ""
        self._call.terminal.note(f"logs: {names}{not_ours}; clustertool logs{here} --job {made.job_id}")


def _help(terminal: Terminal, whole: bool) -> None:
    if not whole:
        terminal.line(f"clusterrun {__version__}")
        return
    terminal.block(f"usage: {_USAGE}\n\n{__doc__}")
    for key, name in LAUNCHERS.items():
        rows = [(_spelled(flag), flag.here) for flag in foreign_options.FLAGS if key in flag.of]
        terminal.line()
        table(f"options of {name}", ("option", "here"), rows, terminal=terminal)
    taken = {name for flag in foreign_options.FLAGS for name in flag.names.split()}
    own = [(f"--{option.name}", option.help) for option in OWN if f"--{option.name}" not in taken]
    terminal.line()
    table("options of clustertool run", ("option", "here"), own, terminal=terminal)


def _spelled(flag: foreign_options.Flag) -> str:
    return ", ".join(flag.names.split()) + f" {flag.value}" * bool(flag.value)


if __name__ == "__main__":
    main()
