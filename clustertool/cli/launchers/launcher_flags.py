"""The table of the options of other launchers states what each of them means here, or why it is not needed. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from clustertool.cli.launchers.join_options import JoinOptions
from clustertool.errors import UsageError
from clustertool.model.config.elastic_keys import is_range
from clustertool.model.config.hostfile import Listed, is_host_list, read_host_list, split_list
from clustertool.model.config.job import combined
from clustertool.model.quantities import HIGHEST_PORT, whole

LAUNCHERS = {
    "P": "fleetrun and python -m paddle.distributed.launch",
    "L": "fleetrun of Paddle 2.0 to 2.2 (--legacy)",
    "T": "torchrun",
    "O": "paddle.py",
    "M": "mpirun, horovodrun and deepspeed",
}
_MOST = 1_000_000  # trainers
_SLOT_LISTS = ("-H", "--host")
_RESTARTS = "3"  # paddle.distributed.launch's own default where restarts are on


@dataclass
class Launch:
    """A command line as it was understood."""

    options: dict[str, Any] = field(default_factory=dict)  # what `run` is asked for, by its options' names
    arguments: tuple[str, ...] = ()  # the script and its arguments; for paddle.py the arguments of the trainer
    old: bool = False  # paddle.py's command line
    how: str = ""  # module, no-python, run-path
    implied: str = ""  # the default mode
    listed: tuple[Listed, ...] = ()  # the nodes
    listed_by: str = ""  # the option that names them
    included: tuple[str, ...] = ()  # of --include: among the nodes of conf.py, or else the nodes themselves
    own_address: str = ""  # of this machine
    own_address_by: str = ""  # the option that states it
    total: int = 0  # of trainers on all nodes; 0: not given
    alone: bool = False  # this machine and no other
    nodes: tuple[int, int] | None = None  # at least and at most so many
    start_port: str = ""
    device_kind: str = ""
    device_visibility: str = ""
    log_dir: str = ""
    quiet: bool = False  # no configuration, no table
    join: JoinOptions = field(default_factory=JoinOptions)  # where the machines meet, if it is typed on each of them
    typed: dict[str, str] = field(default_factory=dict)  # as fleetrun prints them: name_with_underscores -> value
    notes: list[str] = field(default_factory=list)

    @property
    def elastic(self) -> bool:
        """Whether a range of nodes was typed, by --nnodes or --np."""
        return any(is_range(self.typed.get(name, "")) for name in ("nnodes", "np"))

    @property
    def by_slots(self) -> bool:
        """Whether a list of mpirun's form names the nodes, with their numbers of trainers."""
        return self.listed_by in _SLOT_LISTS


Effect = Callable[[Launch, str], None]  # of an option with its value; "" for a switch


@dataclass(frozen=True)
class Flag:
    """One option. `here` is shown to users: in the help, in the documents, and on stderr if the option changes nothing.

    `effect`: the option of `run` that gets the value, "" for the one with the same name, or any other effect.
    """

    names: str
    of: str  # keys of LAUNCHERS
    value: str  # what its value is called; "" for a switch
    here: str
    effect: str | Effect = ""

    @property
    def name(self) -> str:
        return _long(self.names)


def _long(names: str) -> str:
    """Select the long name with dashes."""
    return next((name for name in names.split() if name.startswith("--")), names)


# -- what some of them mean -------------------------------------------------------------------------------------------


def _nnodes(launch: Launch, value: str) -> None:
    match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", value)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < low <= high:
        raise UsageError(f"--nnodes {value!r} is no number of nodes", "--nnodes 4, or MIN:MAX: --nnodes 2:4")
    launch.nodes = (low, high)


def _elastic_server(launch: Launch, value: str) -> None:
    """Read the server of the older fleetrun, which knows only etcd, without a scheme."""
    launch.options["elastic-server"] = tuple(url if "://" in url else f"etcd://{url}" for url in value.split(","))


def _ips(launch: Launch, value: str) -> None:
    _list(launch, "--ips", tuple(split_list(value)))


def _hosts(launch: Launch, value: str) -> None:
    _list(launch, "-H", read_host_list(value))


def _include(launch: Launch, value: str) -> None:
    launch.included = (*launch.included, value)
    launch.options["only"] = (*launch.options.get("only", ()), value)


def _exclude(launch: Launch, value: str) -> None:
    launch.options["skip"] = (*launch.options.get("skip", ()), value)


def _own_address(option: str) -> Effect:
    def effect(launch: Launch, value: str) -> None:
        launch.own_address, launch.own_address_by = value, option

    return effect


def place_host(launch: Launch) -> None:
    """Decide what --host is: Paddle's address of this machine, or mpirun's list of nodes.

    It is a list with a comma, slots, or a total of trainers. Raises UsageError.
    """
    value = launch.own_address
    if launch.own_address_by == "--host" and (launch.total or is_host_list(value)):
        launch.own_address = launch.own_address_by = ""
        _list(launch, "--host", read_host_list(value, "--host"))


def _list(launch: Launch, option: str, listed: tuple[Listed, ...]) -> None:
    if launch.listed_by not in ("", option):
        raise UsageError(f"{launch.listed_by} and {option} both name the nodes", "give one of them")
    launch.listed, launch.listed_by = listed, option


def _total(launch: Launch, value: str) -> None:
    total = whole(value, 1, _MOST)
    if total is None:
        raise UsageError(f"-np {value!r} is no number of trainers", f"-np 4: on all nodes together, 1 to {_MOST}")
    launch.total = total


def _start_port(launch: Launch, value: str) -> None:
    if whole(value, 1, HIGHEST_PORT) is None:
        raise UsageError(f"--start_port {value!r} is not a port", f"a number from 1 to {HIGHEST_PORT}")
    launch.start_port = value


def _log_dir(launch: Launch, value: str) -> None:
    launch.log_dir = value


def _run_mode(launch: Launch, value: str) -> None:
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
    if value.upper() == "DEBUG":
        launch.options["verbose"] = True


def _program(how: str) -> Effect:
    def effect(launch: Launch, _: str) -> None:
        launch.how = combined(launch.how, how)

    return effect


def _tee(launch: Launch, value: str) -> None:
    if re.fullmatch(r"[0-3]", value):
        launch.options["all-ranks"] = value != "0"
    elif re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", value):
        pairs = (pair.split(":") for pair in value.split(","))
        launch.options["rank"] = ",".join(rank for rank, which in pairs if which != "0")
    else:
        raise UsageError(f"--tee {value!r} is not valid", "0 to 3, or ranks: 0:3,1:3")


def _virtual(launch: Launch, value: str) -> None:
    _environ(launch, "LOCAL_RANK=0")
    launch.options["force-env"] = True
    launch.device_visibility = "own"


def _role_name(launch: Launch, value: str) -> None:
    _environ(launch, f"ROLE_NAME={value}")


def _environ(launch: Launch, pair: str) -> None:
    launch.options["env"] = (*launch.options.get("env", ()), pair)


def _sets(**fields: object) -> Effect:
    """Create a switch that gives these values to fields of Launch."""
    return lambda launch, _: vars(launch).update(fields)


def _off_only(text: str) -> Effect:
    """Create an option that may be given as long as it is off."""

    def effect(launch: Launch, value: str) -> None:
        if value.lower() not in ("", "0", "false", "no", "off", "f", "n"):
            raise UsageError(f"{text} is not done here", "leave it out")

    return effect


# -- the table --------------------------------------------------------------------------------------------------------


def _unneeded(names: str, of: str, value: str, why: str) -> Flag:
    """Create an option that has no effect but a note that says why it is not needed."""
    here = f"not needed: {why}"
    return Flag(names, of, value, here, lambda launch, _: launch.notes.append(f"{_long(names)} is {here}"))


def _joins(names: str, of: str, value: str, field_: str, here: str, why: str) -> Flag:
    """Create an option that acts where the command is typed on each machine; otherwise a note says why it is not needed."""

    def effect(launch: Launch, given: str) -> None:
        setattr(launch.join, field_, given)
        note = f"{_long(names)} is not needed: {why}"
        launch.join.notes.append(note)
        launch.notes.append(note)

    return Flag(names, of, value, f"{here}; typed once it is not needed: {why}", effect)


def _refused(names: str, of: str, value: str, fix: str) -> Flag:
    def refuse(launch: Launch, given: str) -> None:
        raise UsageError(f"{_long(names)} {given} cannot be done here", fix)

    return Flag(names, of, value, f"refused: {fix}", refuse)


_FIXED = "a job keeps the nodes it has begun with"
_TUNING = "tuning starts many jobs; use Paddle's own launcher for it"
_ORDER = "ranks follow the order in which the nodes are named"
_OWN = "this machine's address; typed once with nodes, one of theirs"
_NODE_ZERO = "clusterrun is typed once and starts all nodes, in the order of --ips or HOSTS"
_MASTER = "the first node is the master, at a port that is free (--start_port chooses)"
_JOB_ID = "there is no rendezvous, every process gets its rank (--job-id names the job)"
_NUMBER = "typed on each machine: the number of this one, 0 is the one that --master names"
_MEET = "typed on each machine: where they meet, HOST:PORT of one of them"
_NO_RENDEZVOUS = "there is no rendezvous, every process gets its rank"
_MASTER_PORT = (
    "MASTER_PORT, on the first node; default: a free port. With --master-addr on each machine, the port to meet at"
)
_PER_NODE = "processes per node: a number, gpu, xpu, npu, cpu or auto; default: one per device, or one"
_GREP = "`clustertool logs --grep RE` picks lines, also while the job runs"
_LOGS = "where the newest job's logs are; with nodes, rank 0's and those shown as they grow (--fetch-logs: all)"
_AGAIN = "start all again this many times after a failure; default 0"

FLAGS = (
    # nodes and processes
    Flag("--ips", "PL", "A,B", "nodes in rank order: [user@]host[:ssh port], or hosts and addresses of conf.py", _ips),
    Flag(
        "--nnodes",
        "PT",
        "N",
        "use the first N nodes; MIN:MAX: an elastic job; typed on each machine: the number of machines",
        _nnodes,
    ),
    Flag(
        "-H --hosts -hosts -host",
        "M",
        "A:2,B:2",
        "nodes in rank order with their slots: one trainer each, on the first devices (--under mpi --hosts FILE: mpi.md)",
        _hosts,
    ),
    Flag("-hostfile --machinefile -machinefile -f", "M", "FILE", "the same as --hostfile", "hostfile"),
    Flag(
        "-i --include",
        "M",
        "A:0,1@B",
        "only these hosts and devices (--only); without HOSTS they are the nodes",
        _include,
    ),
    Flag("-e --exclude", "M", "A:0@B", "all but these hosts and devices (--skip)", _exclude),
    Flag("--num-nodes", "M", "N", "the same as --nnodes", _nnodes),
    Flag("--num-gpus", "M", "N", "the same as --nproc-per-node", "nproc-per-node"),
    Flag("-np -n --num-proc", "M", "N", "trainers on all nodes together: slot by slot, without slots evenly", _total),
    Flag("--np", "L", "N", "the same as --nnodes", _nnodes),
    Flag("--nproc-per-node", "PLT", "N", _PER_NODE),
    Flag("--standalone", "T", "", "run on this machine alone, without ssh, with any conf.py", _sets(alone=True)),
    Flag(
        "--devices",
        "P",
        "0,1",
        "physical ids on each node; without HOSTS, of those in CUDA_VISIBLE_DEVICES of the shell",
    ),
    Flag("--gpus --selected-gpus", "PL", "0,1", "the same as --devices"),
    Flag("--xpus --selected-xpus", "PL", "0,1", "the same as --devices"),
    Flag("--npus --selected-npus", "PL", "0,1", "the same as --devices"),
    Flag("--start-port", "P", "P", "the trainers' first port; the master's comes after them (START_PORT)", _start_port),
    Flag(
        "--backend",
        "L",
        "auto|gloo|nccl|bkcl|hccl|xccl",
        "gloo: no devices; nccl, bkcl, hccl: PADDLE_DISTRI_BACKEND; auto: by device",
        _backend,
    ),
    # roles
    Flag("--run-mode", "PL", "collective|ps|ps-heter|rpc|mpi", "collective, ps, ps-heter, rpc or mpi", _run_mode),
    Flag("--servers", "PL", "E", "pservers as ip:port,... by rank; without --ips and conf.py they name the nodes"),
    Flag("--trainers", "P", "E", "trainers as ip[:port],... by rank; name nodes as --servers do"),
    Flag("--workers", "L", "E", "the same as --trainers"),
    Flag("--heter-workers", "L", "E", "heter trainers as ip[:port],..., a semicolon between stages"),
    Flag("--heter-devices", "L", "D", "the device of each stage of heter trainers: gpu;cpu"),
    Flag("--server-num", "PL", "N", "pservers per node"),
    Flag("--trainer-num", "P", "N", "trainers per node"),
    Flag("--worker-num", "L", "N", "the same as --trainer_num"),
    Flag("--heter-worker-num", "L", "N", "heter trainers per node in each stage: 2, or 2;1"),
    Flag("--http-port", "L", "P", "gloo's port on the first pserver"),
    Flag("--gloo-port", "P", "P", "the same as --http_port", "http-port"),
    Flag("--with-gloo", "P", "0|1", "PADDLE_WITH_GLOO of every process", _with_gloo),
    _refused("--coordinators", "L", "E", "there are no coordinators (federated learning) here"),
    _refused("--coordinator-num", "L", "N", "there are no coordinators (federated learning) here"),
    # what runs
    Flag("-m --module", "T", "", "the script is a module, as in python -m", _program("module")),
    Flag("--no-python", "T", "", "the script is a program, started as it is", _program("no-python")),
    Flag("--run-path", "T", "", "the script is Python, whatever its name", _program("run-path")),
    Flag("--job-id", "PL", "ID", "the job's id, `ID-2` after job ID has ended; `default` stands for none", _job_id),
    # logs
    Flag("--log-dir", "PLT", "DIR", _LOGS, _log_dir),
    Flag(
        "--log-level",
        "P",
        "DEBUG|INFO|WARNING|ERROR",
        "DEBUG: as -v; WARNING and above: no configuration, no table",
        _log_level,
    ),
    Flag("-t --tee", "T", "R", "1 to 3: show the output of all processes; 0:3,1:3: of these", _tee),
    Flag("--local-ranks-filter", "T", "0,1", "show the output of these ranks, counted through all nodes", "rank"),
    _unneeded("-r --redirects", "T", "R", "stdout and stderr of every process are in log/workerlog.<rank>"),
    _unneeded("--log-overwrite", "P", "BOOL", "every job has a log folder of its own, nothing is appended"),
    _unneeded("--enable-gpu-log", "P", "BOOL", "launching writes nothing about devices into log/"),
    _unneeded("--duplicate-stdout-filters", "T", "RE", _GREP),
    _unneeded("--duplicate-stderr-filters", "T", "RE", _GREP),
    _unneeded("--logs-specs", "T", "NAME", "`clustertool logs` reads every log; there are no plugins"),
    # meeting each other
    _joins("--rank", "P", "N", "rank", _NUMBER, _NODE_ZERO),
    _joins("--node-rank", "T", "N", "rank", _NUMBER, _NODE_ZERO),
    _joins("--master", "P", "E", "master", _MEET, _MASTER),
    _joins(
        "--master-addr", "T", "IP", "master_addr", f"{_MEET}, PORT by --master-port", "the first node is the master"
    ),
    Flag("--master-port", "T", "P", _MASTER_PORT),
    Flag("--host", "PLM", "IP", f"{_OWN}. With a comma, slots (A:2) or -np: the same as -H", _own_address("--host")),
    Flag("--local-addr", "T", "IP", _OWN, _own_address("--local-addr")),
    Flag("--sort-ip", "P", "BOOL", f"off only: {_ORDER}", _off_only("--sort_ip")),
    _joins("--rdzv-backend", "T", "B", "rdzv_backend", "typed on each machine: c10d or static", _NO_RENDEZVOUS),
    _joins("--rdzv-endpoint", "T", "E", "rdzv_endpoint", f"{_MEET}; port 29400 without a number", _NO_RENDEZVOUS),
    _joins("--rdzv-id", "T", "ID", "rdzv_id", "typed on each machine: the name of the job", _JOB_ID),
    _joins("--rdzv-conf", "T", "C", "rdzv_conf", "typed on each machine: join_timeout=S, is_host=1", _NO_RENDEZVOUS),
    # failing
    Flag("--max-restart", "P", "N", _AGAIN, "max-restarts"),
    Flag("--max-restarts", "T", "N", _AGAIN),
    Flag("--elastic-level", "P", "N", "1: restarts are on, 3 of them without --max_restart", _elastic_level),
    Flag("--scale", "L", "N", f"0 only: {_FIXED}", _off_only("--scale")),
    Flag("--shutdown-timeout", "T", "S", "seconds between TERM and KILL (--grace)", "grace"),
    _unneeded("--force", "L", "BOOL", _FIXED),
    Flag("--elastic-timeout", "P", "S", "how long an elastic job waits for nodes"),
    Flag("--elastic-server", "L", "E", "etcd for the epochs of an elastic job (--nnodes MIN:MAX)", _elastic_server),
    _unneeded("--monitor-interval", "T", "S", "the end of a process is seen at once"),
    _unneeded("--signals-to-handle", "T", "S", "Ctrl+C and TERM end the whole job, HUP leaves it running"),
    _refused("--elastic-pre-hook", "L", "CMD", "write it into PRELUDE in conf.py, which runs before each process"),
    # the rest
    Flag("--virtual-local-rank", "T", "", "LOCAL_RANK is 0, and processes see only their own devices", _virtual),
    _unneeded("--legacy", "P", "BOOL", "both forms of the options are understood"),
    _unneeded("--use-env", "T", "", "LOCAL_RANK is in the environment, --local-rank is never passed"),
    Flag("--role", "T", "R", "ROLE_NAME of every process; its role in commands stays trainer", _role_name),
    _unneeded("--start-method", "T", "M", "processes are started as programs"),
    _unneeded("--event-log-handler", "T", "NAME", "`clustertool status` shows the events; there are no plugins"),
    _refused("--numa-binding", "T", "MODE", "bind in the script, or --no-python numactl ... python3 train.py"),
    _refused("--auto-parallel-config", "P", "FILE", _TUNING),
    _refused("--auto-tuner-json", "P", "FILE", _TUNING),
    Flag("--auto-cluster-config", "P", "BOOL", f"off only: {_TUNING}", _off_only("--auto_cluster_config")),
    _refused("--cluster-topo-path", "L", "FILE", _ORDER),
    _refused("--rank-mapping-path", "L", "FILE", _ORDER),
    Flag("--enable-auto-mapping", "L", "BOOL", f"off only: {_ORDER}", _off_only("--enable_auto_mapping")),
    Flag("-p --job-dispatch-package", "O", "DIR", "the workspace to send to every node (--workspace)", "workspace"),
    Flag("-j --job-workspace", "O", "DIR", "a workspace that lies on every node already"),
)
