"""The table of the options of other launchers states what each of them means here, or why it is not needed. Pure."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from clustertool.cli.launchers.join_options import JoinOptions
from clustertool.errors import UsageError
from clustertool.model.config.elastic_keys import is_range
from clustertool.model.config.hostfile import Listed, is_host_list, read_host_list, split_list
from clustertool.model.config.job import combine_starts
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
    """A parsed command line of clusterrun, in the form of any launcher."""

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
    """An option of another launcher.

    `here` is shown to users: in the help, in the documents, and on stderr if the option changes nothing.
    `effect`: the option of `run` that gets the value, "" for the one with the same name, or any other effect.
    """

    names: str
    of: str  # keys of LAUNCHERS
    value: str  # what its value is called; "" for a switch
    here: str
    effect: str | Effect = ""

    @property
    def name(self) -> str:
        """The first of the names with two dashes; else all names."""
        return _long_name(self.names)


def _long_name(names: str) -> str:
    """Return the first name that begins with two dashes, else the whole text. names: with spaces between."""
    return next((name for name in names.split() if name.startswith("--")), names)


# -- what some of them mean -------------------------------------------------------------------------------------------


def _nnodes(launch: Launch, value: str) -> None:
    """Store the least and the greatest number of nodes, of N or MIN:MAX.

    Raises UsageError for another form, for 0, and for a MIN above MAX.
    """
    match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", value)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < low <= high:
        raise UsageError(f"--nnodes {value!r} is no number of nodes", "--nnodes 4, or MIN:MAX: --nnodes 2:4")
    launch.nodes = (low, high)


def _elastic_server(launch: Launch, value: str) -> None:
    """Store the URLs of etcd servers, with etcd:// in front of one without a scheme, as older fleetruns have it."""
    launch.options["elastic-server"] = tuple(url if "://" in url else f"etcd://{url}" for url in value.split(","))


def _ips(launch: Launch, value: str) -> None:
    """Store the nodes of --ips."""
    _store_nodes(launch, "--ips", tuple(split_list(value)))


def _hosts(launch: Launch, value: str) -> None:
    """Store the nodes of -H, with their slots. Raises UsageError."""
    _store_nodes(launch, "-H", read_host_list(value))


def _include(launch: Launch, value: str) -> None:
    """Add hosts and devices to those of --only. If conf.py has no HOSTS, they are the nodes themselves."""
    launch.included = (*launch.included, value)
    launch.options["only"] = (*launch.options.get("only", ()), value)


def _exclude(launch: Launch, value: str) -> None:
    """Add hosts and devices to those of --skip."""
    launch.options["skip"] = (*launch.options.get("skip", ()), value)


def _own_address(option: str, launch: Launch, value: str) -> None:
    """Store the address of this machine, and the option that states it."""
    launch.own_address, launch.own_address_by = value, option


def place_host(launch: Launch) -> None:
    """Store the value of --host as the list of nodes, in mpirun's form, in place of this machine's address.

    Do nothing if it has no comma and no slots, and no total of trainers is given. Raises UsageError for a list that is not
    valid, and if another option has named nodes.
    """
    value = launch.own_address
    if launch.own_address_by == "--host" and (launch.total or is_host_list(value)):
        launch.own_address = launch.own_address_by = ""
        _store_nodes(launch, "--host", read_host_list(value, "--host"))


def _store_nodes(launch: Launch, option: str, listed: tuple[Listed, ...]) -> None:
    """Store the list of nodes, and the option that names them. Raises UsageError if another option has named some."""
    if launch.listed_by not in ("", option):
        raise UsageError(f"{launch.listed_by} and {option} both name the nodes", "give one of them")
    launch.listed, launch.listed_by = listed, option


def _total(launch: Launch, value: str) -> None:
    """Store the number of trainers on all nodes. Raises UsageError if it is not from 1 to 1,000,000."""
    total = whole(value, 1, _MOST)
    if total is None:
        raise UsageError(f"-np {value!r} is no number of trainers", f"-np 4: on all nodes together, 1 to {_MOST}")
    launch.total = total


def _start_port(launch: Launch, value: str) -> None:
    """Store the first port, as a text. Raises UsageError if it is not from 1 to 65535."""
    if whole(value, 1, HIGHEST_PORT) is None:
        raise UsageError(f"--start_port {value!r} is not a port", f"a number from 1 to {HIGHEST_PORT}")
    launch.start_port = value


def _log_dir(launch: Launch, value: str) -> None:
    launch.log_dir = value


def _run_mode(launch: Launch, value: str) -> None:
    """Store the mode; cpuonly is the mode collective without devices."""
    if value == "cpuonly":
        launch.device_kind, value = "cpu", "collective"
    launch.options["mode"] = value


def _job_id(launch: Launch, value: str) -> None:
    """Store the name of the job, unless it is "default"."""
    if value != "default":  # what paddle calls every job that has no name
        launch.options["job-id"] = value


def _backend(launch: Launch, value: str) -> None:
    """Turn devices off for gloo, do nothing for auto, pass other back ends to the processes in PADDLE_DISTRI_BACKEND.

    Raises UsageError for an unknown one.
    """
    if value == "gloo":
        launch.device_kind = "cpu"
    elif value in ("nccl", "bkcl", "hccl", "xccl"):
        _environ("PADDLE_DISTRI_BACKEND", launch, value)
    elif value != "auto":
        raise UsageError(f"--backend {value!r} is not known here", "one of auto, gloo, nccl, bkcl, hccl, xccl")


def _elastic_level(launch: Launch, value: str) -> None:
    """Set 3 restarts for a level above 0, unless a number of restarts was given before; ignore any other value."""
    if re.fullmatch(r"[1-9]\d*", value):
        launch.options.setdefault("max-restarts", _RESTARTS)


def _log_level(launch: Launch, value: str) -> None:
    """Set quiet output for WARNING and above, and verbose output for DEBUG."""
    launch.quiet = value.upper() in ("WARNING", "ERROR", "CRITICAL", "FATAL")
    if value.upper() == "DEBUG":
        launch.options["verbose"] = True


def _how(how: str, launch: Launch, _: str) -> None:
    """Combine how the script is started (module, no-python, run-path) with what was given before."""
    launch.how = combine_starts(launch.how, how)


def _alone(launch: Launch, _: str) -> None:
    launch.alone = True


def _tee(launch: Launch, value: str) -> None:
    """Select the ranks whose logs are shown: all for 1 to 3, not all for 0, and those with 1 to 3 in a list such as 0:3,1:0.

    Raises UsageError for another value.
    """
    if re.fullmatch(r"[0-3]", value):
        launch.options["all-ranks"] = value != "0"
    elif re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", value):
        pairs = (pair.split(":") for pair in value.split(","))
        launch.options["rank"] = ",".join(rank for rank, which in pairs if which != "0")
    else:
        raise UsageError(f"--tee {value!r} is not valid", "0 to 3, or ranks: 0:3,1:3")


def _virtual(launch: Launch, value: str) -> None:
    """Set LOCAL_RANK=0 for each process, with --force-env, and let it see only its own devices."""
    _environ("LOCAL_RANK", launch, "0")
    launch.options["force-env"] = True
    launch.device_visibility = "own"


def _environ(variable: str, launch: Launch, value: str) -> None:
    """Add a variable of all processes."""
    launch.options["env"] = (*launch.options.get("env", ()), f"{variable}={value}")


def _note(note: str, launch: Launch, _: str) -> None:
    """Add a note that the option is not needed."""
    launch.notes.append(note)


def _join(field_: str, note: str, launch: Launch, value: str) -> None:
    """Store a value about where machines meet, and a note why it is not needed if one command starts all nodes."""
    setattr(launch.join, field_, value)
    launch.join.notes.append(note)
    launch.notes.append(note)


def _refuse(option: str, fix: str, launch: Launch, value: str) -> None:
    """Raise UsageError: "<option> <value> cannot be done here", for an option that is refused with any value.

    fix: the hint of the error. value: as it was typed, "" for a switch. launch: not used; each effect of an option has it.
    """
    raise UsageError(f"{option} {value} cannot be done here", fix)


def _off_only(option: str, launch: Launch, value: str) -> None:
    """Raise UsageError unless the value means off. option: its name, with --, for the error."""
    if value.lower() not in ("", "0", "false", "no", "off", "f", "n"):
        raise UsageError(f"--{option[2:].replace('-', '_')} is not done here", "leave it out")


# -- the table --------------------------------------------------------------------------------------------------------

# Keys of LAUNCHERS, the names of an option, what its value is called, and after the arrow what it does: an option of `run`
# that gets the value (--name), a variable of every process (env.NAME), a field of JoinOptions (join.name), how the script is
# started (how.name), or a function of this module. Without an arrow the option of `run` has the same name, or the
# text states that it is not needed, refused, or accepted in one case only. The text is shown to users: in the help, in the
# documents, and on stderr if the option changes nothing. An indented line continues the one before.
_TABLE = """
PL   --ips A,B -> ips  nodes in rank order: [user@]host[:ssh port], or hosts and addresses of conf.py
PT   --nnodes N -> nnodes  use the first N nodes; MIN:MAX: an elastic job; typed on each machine: the number of machines
M    -H --hosts -hosts -host A:2,B:2 -> hosts  nodes in rank order with their slots: one trainer each, on the first
         devices (--under mpi --hosts FILE: mpi.md)
M    -hostfile --machinefile -machinefile -f FILE -> --hostfile  the same as --hostfile
M    -i --include A:0,1@B -> include  only these hosts and devices (--only); without HOSTS they are the nodes
M    -e --exclude A:0@B -> exclude  all but these hosts and devices (--skip)
M    --num-nodes N -> nnodes  the same as --nnodes
M    --num-gpus N -> --nproc-per-node  the same as --nproc-per-node
M    -np -n --num-proc N -> total  trainers on all nodes together: slot by slot, without slots evenly
L    --np N -> nnodes  the same as --nnodes
PLT  --nproc-per-node N  processes per node: a number, gpu, xpu, npu, cpu or auto; default: one per device, or one
T    --standalone -> alone  run on this machine alone, without ssh, with any conf.py
P    --devices 0,1  physical ids on each node; without HOSTS, of those in CUDA_VISIBLE_DEVICES of the shell
PL   --gpus --selected-gpus 0,1  the same as --devices
PL   --xpus --selected-xpus 0,1  the same as --devices
PL   --npus --selected-npus 0,1  the same as --devices
P    --start-port P -> start_port  the trainers' first port; the master's comes after them (START_PORT)
L    --backend auto|gloo|nccl|bkcl|hccl|xccl -> backend  gloo: no devices; nccl, bkcl, hccl: PADDLE_DISTRI_BACKEND;
         auto: by device
PL   --run-mode collective|ps|ps-heter|rpc|mpi -> run_mode  collective, ps, ps-heter, rpc or mpi
PL   --servers E  pservers as ip:port,... by rank; without --ips and conf.py they name the nodes
P    --trainers E  trainers as ip[:port],... by rank; name nodes as --servers do
L    --workers E  the same as --trainers
L    --heter-workers E  heter trainers as ip[:port],..., a semicolon between stages
L    --heter-devices D  the device of each stage of heter trainers: gpu;cpu
PL   --server-num N  pservers per node
P    --trainer-num N  trainers per node
L    --worker-num N  the same as --trainer_num
L    --heter-worker-num N  heter trainers per node in each stage: 2, or 2;1
L    --http-port P  gloo's port on the first pserver
P    --gloo-port P -> --http-port  the same as --http_port
P    --with-gloo 0|1 -> env.PADDLE_WITH_GLOO  PADDLE_WITH_GLOO of every process
L    --coordinators E  refused: there are no coordinators (federated learning) here
L    --coordinator-num N  refused: there are no coordinators (federated learning) here
T    -m --module -> how.module  the script is a module, as in python -m
T    --no-python -> how.no-python  the script is a program, started as it is
T    --run-path -> how.run-path  the script is Python, whatever its name
PL   --job-id ID -> job_id  the job's id, `ID-2` after job ID has ended; `default` stands for none
PLT  --log-dir DIR -> log_dir  where the newest job's logs are; with nodes, rank 0's and those shown as they grow
         (--fetch-logs: all)
P    --log-level DEBUG|INFO|WARNING|ERROR -> log_level  DEBUG: as -v; WARNING and above: no configuration, no table
T    -t --tee R -> tee  1 to 3: show the output of all processes; 0:3,1:3: of these
T    --local-ranks-filter 0,1 -> --rank  show the output of these ranks, counted through all nodes
T    -r --redirects R  not needed: stdout and stderr of every process are in log/workerlog.<rank>
P    --log-overwrite BOOL  not needed: every job has a log folder of its own, nothing is appended
P    --enable-gpu-log BOOL  not needed: launching writes nothing about devices into log/
T    --duplicate-stdout-filters RE  not needed: `clustertool logs --grep RE` picks lines, also while the job runs
T    --duplicate-stderr-filters RE  not needed: `clustertool logs --grep RE` picks lines, also while the job runs
T    --logs-specs NAME  not needed: `clustertool logs` reads every log; there are no plugins
P    --rank N -> join.rank  typed on each machine: the number of this one, 0 is the one that --master names; typed once
         it is not needed: clusterrun is typed once and starts all nodes, in the order of --ips or HOSTS
T    --node-rank N -> join.rank  typed on each machine: the number of this one, 0 is the one that --master names; typed
         once it is not needed: clusterrun is typed once and starts all nodes, in the order of --ips or HOSTS
P    --master E -> join.master  typed on each machine: where they meet, HOST:PORT of one of them; typed once it is not
         needed: the first node is the master, at a port that is free (--start_port chooses)
T    --master-addr IP -> join.master_addr  typed on each machine: where they meet, HOST:PORT of one of them, PORT by
         --master-port; typed once it is not needed: the first node is the master
T    --master-port P  MASTER_PORT, on the first node; default: a free port. With --master-addr on each machine, the port
         to meet at
PLM  --host IP -> own_address  this machine's address; typed once with nodes, one of theirs. With a comma, slots (A:2)
         or -np: the same as -H
T    --local-addr IP -> own_address  this machine's address; typed once with nodes, one of theirs
P    --sort-ip BOOL  off only: ranks follow the order in which the nodes are named
T    --rdzv-backend B -> join.rdzv_backend  typed on each machine: c10d or static; typed once it is not needed: there is
         no rendezvous, every process gets its rank
T    --rdzv-endpoint E -> join.rdzv_endpoint  typed on each machine: where they meet, HOST:PORT of one of them; port
         29400 without a number; typed once it is not needed: there is no rendezvous, every process gets its rank
T    --rdzv-id ID -> join.rdzv_id  typed on each machine: the name of the job; typed once it is not needed: there is no
         rendezvous, every process gets its rank (--job-id names the job)
T    --rdzv-conf C -> join.rdzv_conf  typed on each machine: join_timeout=S, is_host=1; typed once it is not needed:
         there is no rendezvous, every process gets its rank
P    --max-restart N -> --max-restarts  start all again this many times after a failure; default 0
T    --max-restarts N  start all again this many times after a failure; default 0
P    --elastic-level N -> elastic_level  1: restarts are on, 3 of them without --max_restart
L    --scale N  0 only: a job keeps the nodes it has begun with
T    --shutdown-timeout S -> --grace  seconds between TERM and KILL (--grace)
L    --force BOOL  not needed: a job keeps the nodes it has begun with
P    --elastic-timeout S  how long an elastic job waits for nodes
L    --elastic-server E -> elastic_server  etcd for the epochs of an elastic job (--nnodes MIN:MAX)
T    --monitor-interval S  not needed: the end of a process is seen at once
T    --signals-to-handle S  not needed: Ctrl+C and TERM end the whole job, HUP leaves it running
L    --elastic-pre-hook CMD  refused: write it into PRELUDE in conf.py, which runs before each process
T    --virtual-local-rank -> virtual  LOCAL_RANK is 0, and processes see only their own devices
P    --legacy BOOL  not needed: both forms of the options are understood
T    --use-env  not needed: LOCAL_RANK is in the environment, --local-rank is never passed
T    --role R -> env.ROLE_NAME  ROLE_NAME of every process; its role in commands stays trainer
T    --start-method M  not needed: processes are started as programs
T    --event-log-handler NAME  not needed: `clustertool status` shows the events; there are no plugins
T    --numa-binding MODE  refused: bind in the script, or --no-python numactl ... python3 train.py
P    --auto-parallel-config FILE  refused: tuning starts many jobs; use Paddle's own launcher for it
P    --auto-tuner-json FILE  refused: tuning starts many jobs; use Paddle's own launcher for it
P    --auto-cluster-config BOOL  off only: tuning starts many jobs; use Paddle's own launcher for it
L    --cluster-topo-path FILE  refused: ranks follow the order in which the nodes are named
L    --rank-mapping-path FILE  refused: ranks follow the order in which the nodes are named
L    --enable-auto-mapping BOOL  off only: ranks follow the order in which the nodes are named
O    -p --job-dispatch-package DIR -> --workspace  the workspace to send to every node (--workspace)
O    -j --job-workspace DIR  a workspace that lies on every node already
"""
_ROW = re.compile(
    r"(?P<of>[A-Z]+) +(?P<names>-\S+(?: -\S+)*?)(?: (?P<value>[^-\s]\S*))?(?: -> (?P<effect>\S+))?  (?P<here>.*)"
)


def _read_flag(row: str) -> Flag:
    """Parse a row of the table."""
    match = _ROW.fullmatch(row)
    assert match is not None, row
    of, names, value, effect, here = match.groups("")
    return Flag(names, of, value, here, _effect(_long_name(names), effect, here))


def _effect(option: str, effect: str, here: str) -> str | Effect:
    """Return the effect of a row: the option of `run` that gets the value ("": the one of the same name), or a function.

    option: the long name of the row. effect: the text behind the arrow. here: the text for users, whose beginning ("not
    needed", "refused", "off only" or "0 only") decides where there is no arrow.
    """
    case, _, reason = here.partition(": ")
    kind, _, name = effect.partition(".")
    if effect.startswith("--"):
        return effect[2:]
    if kind == "join":
        why = here.partition("typed once it is not needed: ")[2]
        return functools.partial(_join, name, f"{option} is not needed: {why}")
    if kind in ("how", "env"):
        return functools.partial(_how if kind == "how" else _environ, name)
    if kind == "own_address":
        return functools.partial(_own_address, option)
    if effect:
        return _EFFECTS[effect]
    if case == "not needed":
        return functools.partial(_note, f"{option} is {here}")
    if case == "refused":
        return functools.partial(_refuse, option, reason)
    return functools.partial(_off_only, option) if case in ("off only", "0 only") else ""


_EFFECTS: dict[str, Effect] = {
    function.__name__[1:]: function
    for function in (
        *(_nnodes, _elastic_server, _ips, _hosts, _include, _exclude, _total, _start_port),
        *(_log_dir, _run_mode, _job_id, _backend, _elastic_level, _log_level, _alone, _tee, _virtual),
    )
}
FLAGS = tuple(map(_read_flag, re.sub(r"\n +", " ", _TABLE.strip()).splitlines()))
