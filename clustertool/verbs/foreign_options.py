"""This module reads the options of other launchers: one table maps each to an option here, or to why it is not needed. Pure.

    fleetrun --ips=a,b --gpus=0,1 train.py --batch_size 64      paddle.distributed.launch, new and legacy
    torchrun --nnodes=2 --nproc-per-node=gpu train.py --lr 0.1
    python paddle.py --job_dispatch_package=./job --config=./conf.py --use_gpu=0

Dashes and underscores are equal in a name; `--opt=value` and `--opt value` are equal; the last one counts, as in the
launchers. The first argument that is not an option is the script, and the following ones are passed to it unchanged.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from clustertool.errors import UsageError
from clustertool.model.config.hosts import is_port
from clustertool.model.quantities import HIGHEST_PORT
from clustertool.verbs.table import Opt

LAUNCHERS = {
    "P": "fleetrun and python -m paddle.distributed.launch",
    "L": "fleetrun of Paddle 2.0 to 2.2 (--legacy)",
    "T": "torchrun",
    "O": "paddle.py",
}
_ONCE = "clusterrun is typed once and starts all nodes"
_RESTARTS = "3"  # paddle.distributed.launch's own default where restarts are on


@dataclass
class Launch:
    """A command line as it was understood."""

    options: dict[str, Any] = field(default_factory=dict)  # what `run` is asked for, by its options' names
    arguments: tuple[str, ...] = ()  # the script and its arguments; for paddle.py the arguments of the trainer
    old: bool = False  # paddle.py's command line
    how: str = ""  # module, no-python, run-path
    implied: str = ""  # the default mode
    ips: tuple[str, ...] = ()
    alone: bool = False  # this machine and no other
    nodes: tuple[int, int] | None = None  # at least and at most so many
    start_port: str = ""
    device_kind: str = ""
    log_dir: str = ""
    quiet: bool = False  # no configuration, no table
    typed: dict[str, str] = field(default_factory=dict)  # as fleetrun prints them: name_with_underscores -> value
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Flag:
    """One option. `here` is shown to users: in the help, in the documents, and on stderr if the option changes nothing.

    `to`: the option of `run` that it maps to. `means`: any other effect. Neither: a note, or with `refused` an error.
    """

    names: str
    of: str  # keys of LAUNCHERS
    value: str  # what its value is called; "" for a switch
    here: str
    to: str = ""
    means: Callable[[Launch, str], None] | None = None
    refused: bool = False

    @property
    def name(self) -> str:
        """The long name with dashes."""
        return next(name for name in self.names.split() if name.startswith("--"))


# -- what some of them mean -------------------------------------------------------------------------------------------


def _nnodes(launch: Launch, value: str) -> None:
    match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", value)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < low <= high:
        raise UsageError(f"--nnodes {value!r}", "a number of nodes, or MIN:MAX")
    launch.nodes = (low, high)


def _node_rank(launch: Launch, value: str) -> None:
    if value not in ("0", "-1"):
        raise UsageError(f"--rank {value!r}: {_ONCE}", "leave it out, and name the nodes with --ips=a,b or in conf.py")
    launch.notes.append(f"--rank is not needed: {_ONCE}, in the order of --ips or HOSTS")


def _ips(launch: Launch, value: str) -> None:
    launch.ips = tuple(argument.strip() for argument in re.split(r",(?![^\[]*\])", value) if argument.strip())


def _alone(launch: Launch, value: str) -> None:
    launch.alone = True


def _start_port(launch: Launch, value: str) -> None:
    if not is_port(value):
        raise UsageError(f"--start_port {value!r}", f"a port from 1 to {HIGHEST_PORT}")
    launch.start_port = value


def _log_dir(launch: Launch, value: str) -> None:
    launch.log_dir = value


def _run_mode(launch: Launch, value: str) -> None:
    if value == "rpc":
        raise UsageError("--run_mode rpc is not known here", "one of collective, ps, ps-heter")
    if value == "cpuonly":
        launch.device_kind, value = "cpu", "collective"
    launch.options["mode"] = value


def _job_id(launch: Launch, value: str) -> None:
    if value != "default":  # what paddle calls every job that has no name
        launch.options["job-id"] = value


def _with_gloo(launch: Launch, value: str) -> None:
    _environ(launch, f"PADDLE_WITH_GLOO={value}")


def _backend(launch: Launch, value: str) -> None:
    if value == "gloo":
        launch.device_kind = "cpu"
    elif value in ("nccl", "bkcl", "hccl", "xccl"):
        _environ(launch, f"PADDLE_DISTRI_BACKEND={value}")
    elif value != "auto":
        raise UsageError(f"--backend {value!r} is not known here", "one of auto, gloo, nccl, bkcl, hccl, xccl")


def _elastic_level(launch: Launch, value: str) -> None:
    if re.fullmatch(r"[1-9]\d*", value):
        launch.options.setdefault("max-restarts", _RESTARTS)


def _log_level(launch: Launch, value: str) -> None:
    launch.quiet = value.upper() in ("WARNING", "ERROR", "CRITICAL", "FATAL")


def _module(launch: Launch, value: str) -> None:
    launch.how = "module"


def _no_python(launch: Launch, value: str) -> None:
    launch.how = launch.how or "no-python"


def _run_path(launch: Launch, value: str) -> None:
    launch.how = "run-path"


def _tee(launch: Launch, value: str) -> None:
    if re.fullmatch(r"[0-3]", value):
        launch.options["all-ranks"] = value != "0"
    elif re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", value):
        pairs = (pair.split(":") for pair in value.split(","))
        launch.options["rank"] = ",".join(rank for rank, which in pairs if which != "0")
    else:
        raise UsageError(f"--tee {value!r}", "0 to 3, or ranks: 0:3,1:3")


def _ranks_shown(launch: Launch, value: str) -> None:
    launch.options["rank"] = value


def _virtual(launch: Launch, value: str) -> None:
    _environ(launch, "LOCAL_RANK=0")
    launch.options["force-env"] = True


def _environ(launch: Launch, pair: str) -> None:
    launch.options["env"] = (*launch.options.get("env", ()), pair)


def _off_only(text: str) -> Callable[[Launch, str], None]:
    """An option that may be given as long as it is off."""

    def means(launch: Launch, value: str) -> None:
        if value.lower() not in ("", "0", "false", "no", "off", "f", "n"):
            raise UsageError(f"{text} is not done here", "leave it out")

    return means


# -- the table --------------------------------------------------------------------------------------------------------


def _unneeded(names: str, of: str, value: str, why: str) -> Flag:
    return Flag(names, of, value, f"not needed: {why}")


def _refused(names: str, of: str, value: str, fix: str) -> Flag:
    return Flag(names, of, value, f"refused: {fix}", refused=True)


_FIXED = "a job keeps the nodes it has begun with"
_TUNING = "tuning starts many jobs; use Paddle's own launcher for it"
_ORDER = "ranks follow the order in which the nodes are named"
_NODE_ZERO = "0 only: clusterrun is typed once and starts all nodes, in the order of --ips or HOSTS"
_NO_RENDEZVOUS = "there is no rendezvous, every process gets its rank"
_GREP = "`clustertool logs --grep RE` picks lines, also while the job runs"
_AGAIN = "start all again this many times after a failure; default 0"

FLAGS = (
    # nodes and processes
    Flag(
        "--ips",
        "PL",
        "A,B",
        "nodes in rank order: [user@]host[:ssh port], or hosts and addresses of conf.py",
        means=_ips,
    ),
    Flag(
        "--nnodes",
        "PT",
        "N",
        "use the first N nodes; of MIN:MAX as many as there are, for the whole job",
        means=_nnodes,
    ),
    Flag("--np", "L", "N", "the same as --nnodes", means=_nnodes),
    Flag(
        "--nproc-per-node",
        "PLT",
        "N",
        "processes per node: a number, gpu, xpu, npu, cpu or auto; default: one per device, or one",
        "nproc-per-node",
    ),
    Flag("--standalone", "T", "", "run on this machine alone, without ssh, with any conf.py", means=_alone),
    Flag(
        "--devices",
        "P",
        "0,1",
        "physical ids on each node; on this machine of those in CUDA_VISIBLE_DEVICES",
        "devices",
    ),
    Flag("--gpus --selected-gpus", "PL", "0,1", "the same as --devices", "gpus"),
    Flag("--xpus --selected-xpus", "PL", "0,1", "the same as --devices", "xpus"),
    Flag("--npus --selected-npus", "PL", "0,1", "the same as --devices", "npus"),
    Flag(
        "--start-port",
        "P",
        "P",
        "the trainers' first port; the master's comes after them (START_PORT)",
        means=_start_port,
    ),
    Flag(
        "--backend",
        "L",
        "B",
        "gloo: no devices; nccl, bkcl, hccl: PADDLE_DISTRI_BACKEND; auto: by devices",
        means=_backend,
    ),
    # roles
    Flag("--run-mode", "PL", "M", "collective, ps or ps-heter; rpc is refused", means=_run_mode),
    Flag(
        "--servers",
        "PL",
        "E",
        "pservers as ip:port,... by rank; without --ips and conf.py they name the nodes",
        "servers",
    ),
    Flag("--trainers", "P", "E", "trainers as ip[:port],... by rank; name nodes as --servers do", "trainers"),
    Flag("--workers", "L", "E", "the same as --trainers", "workers"),
    Flag("--heter-workers", "L", "E", "heter trainers as ip[:port],..., a semicolon between stages", "heter-workers"),
    Flag("--heter-devices", "L", "D", "the device of each stage of heter trainers: gpu;cpu", "heter-devices"),
    Flag("--server-num", "PL", "N", "pservers per node", "server-num"),
    Flag("--trainer-num", "P", "N", "trainers per node", "trainer-num"),
    Flag("--worker-num", "L", "N", "the same as --trainer_num", "worker-num"),
    Flag("--heter-worker-num", "L", "N", "heter trainers per node in each stage: 2, or 2;1", "heter-worker-num"),
    Flag("--http-port", "L", "P", "gloo's port on the first pserver", "http-port"),
    Flag("--gloo-port", "P", "P", "the same as --http_port", "http-port"),
    Flag("--with-gloo", "P", "0|1", "PADDLE_WITH_GLOO of every process", means=_with_gloo),
    _refused("--coordinators", "L", "E", "there are no coordinators (federated learning) here"),
    _refused("--coordinator-num", "L", "N", "there are no coordinators (federated learning) here"),
    # what runs
    Flag("-m --module", "T", "", "the script is a module, as in python -m", means=_module),
    Flag("--no-python", "T", "", "the script is a program, started as it is", means=_no_python),
    Flag("--run-path", "T", "", "the script is Python, whatever its name", means=_run_path),
    Flag(
        "--job-id", "PL", "ID", "the job's id; every job needs one of its own, `default` stands for none", means=_job_id
    ),
    # logs
    Flag(
        "--log-dir",
        "PLT",
        "DIR",
        "where the newest job's logs are; on nodes, inside the job's directory",
        means=_log_dir,
    ),
    Flag("--log-level", "P", "L", "WARNING and above: no configuration, no table", means=_log_level),
    Flag("-t --tee", "T", "R", "1 to 3: show the output of all processes; 0:3,1:3: of these", means=_tee),
    Flag(
        "--local-ranks-filter",
        "T",
        "0,1",
        "show the output of these ranks, counted through all nodes",
        means=_ranks_shown,
    ),
    _unneeded("-r --redirects", "T", "R", "stdout and stderr of every process are in log/workerlog.<rank>"),
    _unneeded("--log-overwrite", "P", "BOOL", "every job has a log folder of its own, nothing is appended"),
    _unneeded("--enable-gpu-log", "P", "BOOL", "launching writes nothing about devices into log/"),
    _unneeded("--duplicate-stdout-filters", "T", "RE", _GREP),
    _unneeded("--duplicate-stderr-filters", "T", "RE", _GREP),
    _unneeded("--logs-specs", "T", "NAME", "`clustertool logs` reads every log; there are no plugins"),
    # meeting each other
    Flag("--rank", "P", "N", _NODE_ZERO, means=_node_rank),
    Flag("--node-rank", "T", "N", _NODE_ZERO, means=_node_rank),
    _unneeded("--master", "P", "E", "the first node is the master, at a port that is free (--start_port chooses)"),
    _unneeded("--master-addr", "T", "IP", "the first node is the master"),
    _unneeded("--master-port", "T", "P", "a port that is free is taken (--start-port chooses)"),
    _unneeded("--host", "PL", "IP", "addresses come from --ips, HOSTS or PADDLE_NIC"),
    _unneeded("--local-addr", "T", "IP", "addresses come from --ips, HOSTS or PADDLE_NIC"),
    _unneeded("--sort-ip", "P", "BOOL", _ORDER),
    _unneeded("--rdzv-backend", "T", "B", _NO_RENDEZVOUS),
    _unneeded("--rdzv-endpoint", "T", "E", _NO_RENDEZVOUS),
    _unneeded("--rdzv-id", "T", "ID", f"{_NO_RENDEZVOUS} (--job-id names the job)"),
    _unneeded("--rdzv-conf", "T", "C", _NO_RENDEZVOUS),
    # failing
    Flag("--max-restart", "P", "N", _AGAIN, "max-restarts"),
    Flag("--max-restarts", "T", "N", _AGAIN, "max-restarts"),
    Flag("--elastic-level", "P", "N", "1: restarts are on, 3 of them without --max_restart", means=_elastic_level),
    Flag("--scale", "L", "N", f"0 only: {_FIXED}", means=_off_only("--scale")),
    Flag("--shutdown-timeout", "T", "S", "seconds between TERM and KILL (--grace)", "grace"),
    _unneeded("--force", "L", "BOOL", _FIXED),
    _unneeded("--elastic-timeout", "P", "S", _FIXED),
    _unneeded("--elastic-server", "L", "E", "the first node leads the job, no etcd does"),
    _unneeded("--monitor-interval", "T", "S", "the end of a process is seen at once"),
    _unneeded("--signals-to-handle", "T", "S", "Ctrl+C and TERM end the whole job, HUP leaves it running"),
    _refused(
        "--elastic-pre-hook", "L", "CMD", "write the command into PRELUDE in conf.py, it runs before each process"
    ),
    # the rest
    Flag(
        "--virtual-local-rank",
        "T",
        "",
        "LOCAL_RANK is 0; processes see only their own devices, as always",
        means=_virtual,
    ),
    _unneeded("--legacy", "P", "BOOL", "both forms of the options are understood"),
    _unneeded("--use-env", "T", "", "LOCAL_RANK is in the environment, --local-rank is never passed"),
    _unneeded("--role", "T", "R", "the processes of a collective job are trainers"),
    _unneeded("--start-method", "T", "M", "processes are started as programs"),
    _unneeded("--event-log-handler", "T", "NAME", "`clustertool status` shows the events; there are no plugins"),
    _refused("--numa-binding", "T", "MODE", "bind in the script, or --no-python numactl ... python3 train.py"),
    _refused("--auto-parallel-config", "P", "FILE", _TUNING),
    _refused("--auto-tuner-json", "P", "FILE", _TUNING),
    Flag("--auto-cluster-config", "P", "BOOL", f"off only: {_TUNING}", means=_off_only("--auto_cluster_config")),
    _refused("--cluster-topo-path", "L", "FILE", _ORDER),
    _refused("--rank-mapping-path", "L", "FILE", _ORDER),
    Flag("--enable-auto-mapping", "L", "BOOL", f"off only: {_ORDER}", means=_off_only("--enable_auto_mapping")),
    Flag("-p --job-dispatch-package", "O", "DIR", "the workspace to send to every node (--workspace)", "workspace"),
    Flag("-j --job-workspace", "O", "DIR", "a workspace that lies on every node already", "job-workspace"),
)

_PS = ("workers", "trainers", "worker-num", "trainer-num", "http-port")


# -- reading ----------------------------------------------------------------------------------------------------------


def read(argv: Sequence[str], own: Sequence[Opt]) -> Launch:
    """A command line -> Launch. `own`: the options of `run`, which are understood too. Raises UsageError."""
    known = _known(FLAGS, own)
    found = _Arguments(argv, known)
    packaged = [flag for flag, _ in found.given if isinstance(flag, Flag) and flag.of == "O"]
    if packaged and found.script is None:
        found = _Arguments(argv, _known([flag for flag in FLAGS if flag.of == "O"], own), old=True)
    elif found.rest:
        raise _unknown(found.rest[0], known)
    launch = Launch(arguments=tuple(found.rest or found.script or ()), old=bool(packaged and found.script is None))
    for flag, value in found.given:
        _take(launch, flag, value)
    _finish(launch)
    return launch


def wish(launch: Launch, own: Sequence[Opt]) -> SimpleNamespace:
    """What `run` would have been given: its own options with these values."""
    values = {option.name: launch.options.get(option.name, option.default) for option in own}
    return SimpleNamespace(**{name.replace("-", "_"): value for name, value in values.items()})


def named_nodes(launch: Launch) -> tuple[str, ...]:
    """The nodes that lists of endpoints name, in the order of their first mention; for a command line without --ips."""
    texts = [
        text for name in ("servers", "workers", "trainers", "heter-workers") for text in launch.options.get(name, ())
    ]
    items = [item.strip() for text in texts for item in re.split("[,;]", text) if item.strip()]
    hosts = (re.sub(r":\d+$", "", item) if item.count(":") == 1 or "]" in item else item for item in items)
    return tuple(dict.fromkeys("127.0.0.1" if host == "localhost" else host for host in hosts))


def command(launch: Launch, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The command to start, for all roles; the arguments are the script and its own arguments."""
    if not arguments or launch.how == "no-python":
        return arguments
    if launch.how == "module":
        return ("python3", "-u", "-m", *arguments)
    python = launch.how == "run-path" or arguments[0].endswith(".py")
    return ("python3", "-u", *arguments) if python else arguments


def _known(flags: Sequence[Flag], own: Sequence[Opt]) -> Mapping[str, Flag | Opt]:
    """Every spelling with dashes -> its option. A launcher's name has priority over one of `run`."""
    found: dict[str, Flag | Opt] = {f"--{option.name}": option for option in own}
    found.update((f"-{option.short}", option) for option in own if option.short)
    found.update((name, flag) for flag in flags for name in flag.names.split())
    return found


class _Arguments:
    """The parsed command line: options with their values, then the script and its arguments.

    `rest`: from the first unknown option on; for paddle.py, the trainer's arguments.
    """

    def __init__(self, argv: Sequence[str], known: Mapping[str, Flag | Opt], old: bool = False) -> None:
        self.given: list[tuple[Flag | Opt, str]] = []
        self.script: list[str] | None = None
        self.rest: list[str] = []
        arguments = list(argv)
        while arguments:
            argument = arguments.pop(0)
            name, equals, value = _split(argument)
            flag = known.get(name)
            if flag is not None:
                self.given.append((flag, self._value(flag, argument, value if equals else None, arguments)))
            elif self.rest or argument.startswith("-") and argument not in ("-", "--") or old:
                self.rest.append(argument)
            else:
                self.script = arguments if argument == "--" else [argument, *arguments]
                return

    @staticmethod
    def _value(flag: Flag | Opt, argument: str, value: str | None, arguments: list[str]) -> str:
        if not (flag.value if isinstance(flag, Flag) else flag.default is not False):
            if value is not None:
                raise UsageError(f"{argument}: {argument.split('=')[0]} takes no value", "leave the value out")
            return ""
        if value is not None:
            return value
        if not arguments or arguments[0].startswith("--"):
            raise UsageError(f"{argument} needs a value", f"write {argument}=...")
        return arguments.pop(0)


def _split(argument: str) -> tuple[str, str, str]:
    """--a_b=c -> --a-b, =, c; -r3 -> -r, =, 3; any other argument stays whole."""
    if argument.startswith("--"):
        name, equals, value = argument.partition("=")
        return name.replace("_", "-"), equals, value
    if re.match(r"-[a-z].", argument):
        return argument[:2], "=", argument[2:].removeprefix("=")
    return argument, "", ""


def _unknown(argument: str, known: Mapping[str, Flag | Opt]) -> UsageError:
    name = _split(argument)[0]
    near = difflib.get_close_matches(name, known, 1)
    fix = f"did you mean {near[0]}? " if near else ""
    fix += "(options of your script go after it; clusterrun --help lists ours)"
    return UsageError(f"{name} is no option of clusterrun", fix)


def _take(launch: Launch, flag: Flag | Opt, value: str) -> None:
    """One option's meaning. Of texts the last one counts; run's own lists grow."""
    launch.typed[(flag.name if isinstance(flag, Opt) else flag.name[2:]).replace("-", "_")] = value or "True"
    if isinstance(flag, Opt):
        if flag.default == ():
            launch.options[flag.name] = (*launch.options.get(flag.name, ()), value)
        else:
            launch.options[flag.name] = True if flag.default is False else value
    elif flag.value and not value:  # --ips= and the like: argparse's way to say nothing
        return
    elif flag.refused:
        raise UsageError(f"{flag.name} {value} cannot be done here", flag.here.removeprefix("refused: "))
    elif flag.means is not None:
        flag.means(launch, value)
    elif flag.to:
        launch.options[flag.to] = value
    else:
        launch.notes.append(f"{flag.name} is {flag.here}")


def _finish(launch: Launch) -> None:
    """Options that have a meaning only together with others."""
    for name in ("servers", "workers", "trainers", "heter-workers"):
        if isinstance(launch.options.get(name), str):
            launch.options[name] = (launch.options[name],) if launch.options[name] else ()
    if any(launch.options.get(name) for name in _PS):
        launch.implied = "ps"
    if launch.alone and launch.ips:
        raise UsageError("--standalone is this machine alone, --ips names nodes", "give one of them")
