"""A job spec is job.toml and the options of the command line, checked and merged. The command line has priority."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from dataclasses import dataclass, replace
from typing import Callable, Dict, List, Optional, Sequence, Tuple, Type, TypeVar

from clustertool.errors import ClustertoolError, ConfigError, DataError, UsageError
from clustertool.model.config import shell_text
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.container_keys import merge_container, refuse_launcher
from clustertool.model.config.elastic_keys import ElasticSettings, is_range, read_elastic
from clustertool.model.config.hostfile import split_list
from clustertool.model.config.hosts import VARIABLE, device_ids
from clustertool.model.config.job_tables import (
    COMMANDS,
    MOST,
    NUMBER,
    Command,
    Pairs,
    Role,
    Toml,
    patterns,
    read_tables,
)
from clustertool.model.container.container_settings import ContainerSettings
from clustertool.model.paths import is_job_id
from clustertool.model.quantities import DURATIONS, HIGHEST_PORT, seconds_of, whole
from clustertool.model.roles import MODES

COUNTED = ("gpu", "xpu", "npu", "cpu", "auto")  # --nproc-per-node by what the node has, as torchrun knows it
_NPROC = f"{NUMBER}, or one of {', '.join(COUNTED)}"
# The commands of the old paddle.py on every host; the trainer's own options come before --trainer_id.
_V2_PSERVER = tuple(
    """paddle pserver --num_gradient_servers={num_trainers} --nics={nic} --port={port}
    --ports_num={ports_num} --ports_num_for_sparse={ports_num_for_sparse}""".split()
)
_V2_TRAINER = tuple(
    """paddle train --num_gradient_servers={num_trainers} --nics={nic} --port={pserver_port}
    --ports_num={ports_num} --pservers={pservers}""".split()
)

# What the plan computes for every process. Overriding one of these by hand breaks a job in ways that resemble
# a fault of the network, so it needs --force-env.
PLACED = frozenset(
    """RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT
    ROLE_RANK ROLE_WORLD_SIZE TORCHELASTIC_RESTART_COUNT TORCHELASTIC_ERROR_FILE
    OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE
    PADDLE_MASTER PADDLE_GLOBAL_SIZE PADDLE_LOCAL_SIZE PADDLE_GLOBAL_RANK PADDLE_LOCAL_RANK PADDLE_NNODES
    PADDLE_CURRENT_ENDPOINT PADDLE_WORKER_ENDPOINT PADDLE_MASTER_ENDPOINT DISTRIBUTED_TRAINER_ENDPOINTS TRAINER_PORTS_NUM
    PADDLE_TRAINER_ID PADDLE_TRAINERS_NUM PADDLE_RANK_IN_NODE PADDLE_TRAINER_ENDPOINTS
    PADDLE_TRAINERS POD_IP PADDLE_PSERVERS_IP_PORT_LIST PADDLE_PORT PADDLE_ROLE TRAINING_ROLE
    PADDLE_GLOO_HTTP_ENDPOINT PADDLE_INIT_TRAINER_ID PADDLE_INIT_PSERVERS PADDLE_INIT_NUM_GRADIENT_SERVERS
    PADDLE_INIT_PORT PADDLE_HETER_TRAINER_IP_PORT_LIST PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST
    PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST
    PADDLE_STAGE_TRAINERS_NUM STAGE_ID STAGE_NUM""".split()
)


AUTO = "auto"  # --devices auto
ON_FAILURE = ("abort", "continue")
ON_HANG = ("report", "abort", "restart")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Policy:
    """How a job ends. 0 seconds: no limit."""

    timeout: float = 0.0
    grace: float = 10.0
    on_failure: str = "abort"
    max_restarts: int = 0
    max_restarts_without_progress: int = 3  # 0: no limit
    lease: float = 0.0
    loss_timeout: float = 10.0
    hang_timeout: float = 600.0
    on_hang: str = "report"


@dataclass(frozen=True)
class RequestedPorts:
    """Ports that the command line names; 0: any free one."""

    gloo: int = 0
    master: int = 0


@dataclass(frozen=True)
class MpiSettings:
    """Settings of mode mpi. options: for mpirun. pservers: the job has some."""

    options: Tuple[str, ...] = ()
    pservers: bool = False


@dataclass(frozen=True)
class JobSpec:
    """What a job runs, and how: job.toml and the options of the command line, merged."""

    mode: str = "collective"
    trainer: Role = Role()
    pserver: Role = Role()
    heter: Tuple[Role, ...] = ()  # one for each stage of heter trainers: stage 2, 3, ... (trainers are stage 1)
    env: Pairs = ()
    shards: Tuple[str, ...] = ()
    only_where_read: bool = False  # each shard is sent only to the node whose trainer reads it
    output: str = "output"
    policy: Policy = Policy()
    devices: Optional[Tuple[int, ...]] = None
    auto_devices: bool = False  # those that are free when the job starts
    nproc: Optional[int] = None
    nproc_of: str = ""  # one of COUNTED
    nnodes: int = 0
    ports: RequestedPorts = RequestedPorts()
    job_workspace: str = ""
    log_dir: str = ""
    mpi: MpiSettings = MpiSettings()
    container: ContainerSettings = ContainerSettings()
    elastic: ElasticSettings = ElasticSettings()
    one_port: bool = False  # its program connects to all pservers at one port, as Paddle v2
    nested: bool = False  # a trainer starts a launcher: there is one on a node if no number is asked for

    @property
    def by_mpirun(self) -> bool:
        """Whether the trainers are the ranks of one mpirun."""
        return self.mode == "mpi"

    @property
    def has_pservers(self) -> bool:
        return "pserver" in self.roles

    @property
    def roles(self) -> Tuple[str, ...]:
        """The roles of its ranks in the order of their start; in mode mpi with pservers only if the job has some."""
        return tuple(role for role in MODES[self.mode] if role != "pserver" or not self.by_mpirun or self.mpi.pservers)


@dataclass(frozen=True)
class Options:
    """The options of `run` as typed; "" and () mean not given. Everything is text and is checked in read_job.

    implied: the mode if neither the options nor job.toml have one. command: instead of script, already split.
    v2: the command line of the old paddle.py, whose roles run `paddle train` and `paddle pserver`; v2_args are passed to the
    trainer. log_dir: where the working directory shows the logs. host_counts: the command line has given each host its number
    of trainers. image: None if it is not given; "": no container.
    """

    mode: str = ""
    implied: str = ""
    script: str = ""
    command: Tuple[str, ...] = ()
    v2: bool = False
    v2_args: Tuple[str, ...] = ()
    log_dir: str = ""
    nproc_per_node: str = ""
    devices: str = ""
    servers: Tuple[str, ...] = ()
    workers: Tuple[str, ...] = ()
    heter_workers: Tuple[str, ...] = ()
    heter_devices: str = ""
    server_num: str = ""
    worker_num: str = ""
    heter_worker_num: str = ""
    http_port: str = ""
    master_port: str = ""
    nnodes: str = ""
    env: Tuple[str, ...] = ()
    force_env: bool = False
    shards: Tuple[str, ...] = ()
    only_where_read: bool = False
    lease: str = ""
    timeout: str = ""
    grace: str = ""
    on_failure: str = ""
    max_restarts: str = ""
    hang_timeout: str = ""
    on_hang: str = ""
    job_workspace: str = ""
    host_counts: bool = False
    image: Optional[str] = None
    elastic_server: Tuple[str, ...] = ()
    elastic_timeout: str = ""
    nested: bool = False


def read_job(cluster: Cluster, toml: Toml, options: Options) -> JobSpec:
    """Check job.toml and the options of the command line, which have priority, and merge them to a job.

    Raises DataError for errors in job.toml, UsageError for the command line, ConfigError for conf.py and for mode mpi in a
    container.
    """
    file = read_tables(toml)
    mode = _mode(options, file)
    script = options.command or _script(options.script)
    _require_program(script)
    policy = _policy(cluster, file["policy"], options)
    if mode == "mpi" and policy.on_failure != "abort":
        what = f"on_failure {policy.on_failure!r} is not possible in mode mpi: mpirun ends all trainers when one fails"
        raise UsageError(what, "leave it out, or take another mode")
    container = merge_container(cluster.container, file["container"], options.image, cluster.workspace_may_set)
    refuse_launcher(container, mode)
    devices = options.devices.strip()
    trainer, pserver, heter = (replace(file[name], command=script or file[name].command) for name in COMMANDS)
    if options.v2:  # the trainer of the old paddle.py is its command, then what was typed for it
        train, last = (trainer.command, ()) if trainer.command else (_V2_TRAINER, ("--trainer_id={rank}",))
        trainer = replace(trainer, command=(*train, *options.v2_args, *last))
        pserver = replace(pserver, command=pserver.command or _V2_PSERVER)
    if options.host_counts:
        trainer = replace(trainer, per_node=None)
    shards = patterns(list(_parts(options.shards)), "--shards", UsageError) or file["shards"]
    return JobSpec(
        mode=mode,
        trainer=_with_counts(trainer, "--workers", options.workers, "--worker-num", options.worker_num),
        pserver=_with_counts(pserver, "--servers", options.servers, "--server-num", options.server_num),
        heter=_stages(heter, options) if mode == "ps-heter" else (),
        env=_environment(cluster, file["env"], options),
        shards=shards,
        only_where_read=_only_where_read(shards, file, options),
        output=file["output"],
        policy=policy,
        devices=_parse_devices(devices) if devices not in ("", AUTO) else None,
        auto_devices=devices == AUTO,
        nproc=None
        if options.nproc_per_node in COUNTED
        else _parse_count(options.nproc_per_node, "--nproc-per-node", _NPROC),
        nproc_of=options.nproc_per_node if options.nproc_per_node in COUNTED else "",
        nnodes=0 if is_range(options.nnodes) else _parse_count(options.nnodes, "--nnodes") or 0,
        ports=RequestedPorts(
            gloo=_parse_port(options.http_port, "--http-port"), master=_parse_port(options.master_port, "--master-port")
        ),
        job_workspace=options.job_workspace,
        log_dir=options.log_dir,
        mpi=MpiSettings(file["mpi"], file["pservers"] or _asks_for_pservers(cluster, options)),
        container=container,
        nested=options.nested,
        elastic=read_elastic(
            cluster, file["elastic"], mode, options.nnodes, options.elastic_server, options.elastic_timeout
        ),
    )


def valid_job_id(text: str, option: str = "--job-id") -> str:
    """Check and return the id of a job. Raises UsageError. Names of jobs have the same form.

    option: the option that has it, for the error.
    """
    if not is_job_id(text):
        fix = "letters, digits, '.', '_' and '-', up to 64, the first one a letter or digit"
        raise UsageError(f"{option} {text!r} is no job {'name' if option == '--name' else 'id'}", fix)
    return text


def resumes(toml: Toml) -> bool:
    """Return job.toml's `resume`: whether a job continues from the newest one of the same name or workspace."""
    return bool(toml.get("resume", False))


def gives_grace(toml: Toml, options: Options) -> bool:
    """Return whether the command line or job.toml sets `grace`. Otherwise it is that of conf.py, or of the engine."""
    return bool(options.grace) or "grace" in toml.get("policy", {})


def _mode(options: Options, file: Toml) -> str:
    """Choose the mode: the option, else that of job.toml, else the one that other options imply.

    Raises UsageError for an unknown mode, and for options of a role that the mode does not have.
    """
    heter = _first_given(options, "heter_workers", "heter_worker_num", "heter_devices")
    servers = _first_given(options, "servers", "server_num")
    implied = "ps-heter" if heter else "ps" if servers or options.v2 else options.implied or "collective"
    mode = options.mode.replace("_", "-") or str(file["mode"] or implied)
    if mode not in MODES:
        raise UsageError(f"--mode {mode!r} is not known", f"one of {', '.join(MODES)}")
    if heter and "heter" not in MODES[mode]:
        raise UsageError(f"{heter} is for heter trainers, the mode is {mode}", "add --mode ps-heter")
    if servers and "pserver" not in MODES[mode]:
        raise UsageError(f"{servers} is for parameter servers, the mode is {mode}", "add --mode ps")
    return mode


def _asks_for_pservers(cluster: Cluster, options: Options) -> bool:
    """Check whether the command line or HOSTS asks for pservers, which mode mpi does not have by itself."""
    hosts = any("pserver" in dict(host.roles or ()) for host in cluster.hosts)
    return hosts or bool(_first_given(options, "servers", "server_num"))


def _first_given(options: Options, *names: str) -> str:
    """Return the name of the first of these options that has a value, as --NAME; "" if none has one."""
    return next((f"--{name.replace('_', '-')}" for name in names if getattr(options, name)), "")


def _only_where_read(shards: Sequence[str], file: Toml, options: Options) -> bool:
    """Return whether each shard is sent only to the node that reads it, by the option or job.toml.

    Raises UsageError, or DataError if job.toml has it, without shards; UsageError for the option with --job-workspace.
    """
    asked = options.only_where_read
    if asked and options.job_workspace:
        raise UsageError("--only-where-read with --job-workspace, which sends nothing", "leave one of them out")
    if (asked or file["only_where_read"]) and not shards:
        where, error = ("--only-where-read", UsageError) if asked else ("job.toml: [shards] only_where_read", DataError)
        raise error(f"{where} without shards", 'name them: [shards] files = ["data/*-[0-9]*"], or --shards')
    return asked or bool(file["only_where_read"])


# -- the command line ---------------------------------------------------------------------------------------------------


def _script(text: str) -> Command:
    """Split "train.py --lr 0.1" as a shell would, with python3 -u in front of a script; None for "".

    Raises UsageError for an open quote, and for operators of a shell.
    """
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--script {text!r}: {error}", "close the quote") from None
    operator = shell_text.operator(text)
    if operator:
        fix = f"--script {shlex.quote(shell_text.in_shell(text))}; as an argument it needs quotes inside of --script"
        raise UsageError(f"--script has {operator}, and no shell reads it: it would be an argument", fix)
    return with_python(parts) or None


def _require_program(command: Command) -> None:
    """Raise UsageError for `A=1 python3 train.py`: no shell reads the command, so A=1 would be the program."""
    name, equals, _ = command[0].partition("=") if command else ("", "", "")
    if equals and re.fullmatch(VARIABLE, name):
        raise UsageError(f"the command begins with the variable {name}; no shell reads it", f"give --env {name}=...")


def with_python(arguments: Sequence[str]) -> Tuple[str, ...]:
    """Put python3 -u in front of arguments whose first one is a script of Python (.py)."""
    return ("python3", "-u", *arguments) if arguments and arguments[0].endswith(".py") else tuple(arguments)


def combine_starts(how: str, other: str) -> str:
    """Combine two of torchrun's switches about the program, as torchrun does; the later one counts, except after run-path.

    how: the earlier one, as for started_by(). Raises UsageError for a program that cannot be started in both ways.
    """
    if {how, other} == {"module", "no-python"}:
        raise UsageError("--module is started by Python, and --no-python starts the program itself", "give one of them")
    return how if how == "run-path" else other


def started_by(how: str, arguments: Sequence[str]) -> Tuple[str, ...]:
    """Build the command for a program and its arguments.

    how: as torchrun has it: module, no-python, run-path, or "" where the name of the program decides.
    """
    if not arguments or how == "no-python":
        return tuple(arguments)
    if how == "module":
        return ("python3", "-u", "-m", *arguments)
    return ("python3", "-u", *arguments) if how == "run-path" else with_python(arguments)


def _parse_count(text: str, option: str, right: str = NUMBER, most: int = MOST) -> Optional[int]:
    """Parse a number from 1 to `most`; None for "". Raises UsageError.

    option: the option that has the number, for the error. right: what is right, for the error.
    """
    number = whole(text, 1, most)
    if number is None and text:
        raise UsageError(f"{option} {text!r} is not valid", right)
    return number


def _parse_port(text: str, option: str) -> int:
    """Parse a port, 0 if it is not given. Raises UsageError. option: see _parse_count()."""
    return _parse_count(text, option, f"a port from 1 to {HIGHEST_PORT}", HIGHEST_PORT) or 0


def _with_counts(role: Role, listed: str, endpoints: Sequence[str], counted: str, number: str) -> Role:
    """Return the role with the endpoints and the number per node that two options of the command line give.

    listed, counted: the names of the two options. endpoints, number: their values; without a number the role keeps its own.
    Raises UsageError for a wrong value, and if the number is neither that of all endpoints nor that of each host.
    """
    parts, count = _endpoints(endpoints, listed), _parse_count(number, counted)
    each = Counter(re.sub(r":\d+$", "", part) for part in parts)
    if parts and count and count != len(parts) and set(each.values()) != {count}:
        fix = f"leave {counted} out: the list has the number"
        raise UsageError(f"{listed} names {len(parts)}, {counted} says {count}", fix)
    return replace(role, endpoints=parts, per_node=count or role.per_node)


def _stages(role: Role, options: Options) -> Tuple[Role, ...]:
    """Build the role of heter trainers for each stage, from three options with `;` between the stages.

    One number or device is that of all stages. Raises UsageError for an option with another number of stages, an empty stage,
    an unknown device, a wrong number, and an endpoint that is named twice.
    """
    texts = {
        "--heter-workers": ",".join(options.heter_workers),
        "--heter-worker-num": options.heter_worker_num,
        "--heter-devices": options.heter_devices,
    }
    by_option = {option: _by_stage(option, text) for option, text in texts.items()}
    number = max(map(len, by_option.values()))
    for option, parts in by_option.items():
        if len(parts) == 1 and not (option == "--heter-workers" and parts[0]):
            by_option[option] = parts = parts * number
        if len(parts) != number:
            raise UsageError(f"{option} names {len(parts)} of {number} stages", "name all of them, with ; between")
    stages = []
    for endpoints, count, device in zip(*by_option.values()):
        if device not in ("", "cpu", "gpu", "xpu"):
            what = f"--heter-devices {device!r} is not cpu, gpu or xpu"
            raise UsageError(what, 'one of them for each stage: "gpu;cpu"')
        stage = _with_counts(role, "--heter-workers", [endpoints], "--heter-worker-num", count)
        stages.append(replace(stage, device=device))
    _endpoints([part for stage in stages for part in stage.endpoints], "--heter-workers")  # nor twice in two stages
    return tuple(stages)


def _by_stage(option: str, text: str) -> List[str]:
    """Split "a,b;c" into "a,b" and "c"; one empty part if nothing is given. Raises UsageError for an empty stage.

    option: the option that has the text, for the error.
    """
    parts = [part.strip(" ,") for part in text.split(";")]
    if len(parts) > 1 and not all(parts):
        fix = f'{option} "a;b": in quotes, with ; only between stages'
        raise UsageError(f"{option} {text!r} has an empty stage", fix)
    return parts


def _parts(values: Sequence[str]) -> Tuple[str, ...]:
    """Split values at commas. A comma in brackets, as in a pattern, does not separate."""
    return tuple(part for value in values for part in split_list(value))


def _endpoints(values: Sequence[str], option: str) -> Tuple[str, ...]:
    """Split values at commas. Raises UsageError for an endpoint with a port that is named twice. option: see _by_stage()."""
    parts = _parts(values)
    for part in parts:
        if parts.count(part) > 1 and re.search(r"(^[^:]+|\]):\d+$", part):
            raise UsageError(f"{option} names the endpoint {part} twice", "every process needs its own")
    return parts


def _parse_devices(text: str) -> Tuple[int, ...]:
    """Parse the numbers of --devices. Raises UsageError for what is no list of numbers, and for a number named twice."""
    try:
        return device_ids(text, "--devices")
    except ConfigError as error:
        raise UsageError(error.what, "write --devices 0,1, or --devices auto") from None


def _environment(cluster: Cluster, file: Pairs, options: Options) -> Pairs:
    """Merge [env] and --env, which has priority, and return them. Check the variables of all sources, also those of conf.py.

    Raises UsageError for CLUSTERTOOL_*, and without --force-env for a name of PLACED; the error of a source for a value with
    the variable itself, as PATH=/x:$PATH.
    """
    merged: Dict[str, str] = {}
    sources = variable_sources(cluster, file, options)
    for where, pairs, error in sources:
        name = shell_text.find_own_variable(pairs)
        if name:
            value = dict(pairs)[name]
            fix = f"PRELUDE in conf.py, which a shell runs on each node: export {name}={value}"
            raise error(f"{where} has {name}={value}, and no shell reads it: ${name} would stay as it is", fix)
    passed = tuple((name, "") for name in (*cluster.pass_env, *cluster.secrets))
    for where, pairs, _ in [*sources, ("PASS_ENV or SECRETS in conf.py", passed, ConfigError)]:
        for name, value in pairs:
            if name.startswith("CLUSTERTOOL_"):
                raise UsageError(f"{where} sets {name}, which only the tool sets", "take another name")
            if name in PLACED and not options.force_env:
                what = f"{where} sets {name}, which is computed for every process"
                raise UsageError(what, "leave it out, or add --force-env")
            if where in ("[env] in job.toml", "--env"):
                merged[name] = value
    return tuple(merged.items())


def variable_sources(
    cluster: Cluster, file: Pairs, options: Options
) -> List[Tuple[str, Pairs, Type[ClustertoolError]]]:
    """List the sources of variables that a user sets for a job: (name of the source, its variables, its kind of error).

    file: [env] of job.toml. Raises UsageError for --env.
    """
    return [
        ("ENV in conf.py", cluster.env, ConfigError),
        *((f"env of {host.name} in conf.py", host.env, ConfigError) for host in cluster.hosts),
        ("[env] in job.toml", file, DataError),
        ("--env", _split_variables(options.env), UsageError),
    ]


def _split_variables(values: Sequence[str]) -> Pairs:
    """Split the values of --env, NAME=value, into names and values. Raises UsageError for another text."""
    pairs = []
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals or not VARIABLE.fullmatch(name):
            raise UsageError(f"--env {value!r} is not a variable and its value", "write --env NAME=value")
        pairs.append((name, rest))
    return tuple(pairs)


def _policy(cluster: Cluster, file: Toml, options: Options) -> Policy:
    """Build the policy: each value of its option, else of [policy], else the default.

    conf.py has the defaults of grace and hang_timeout, and always loss_timeout. Raises UsageError for a wrong option, DataError
    for a wrong value in [policy].
    """

    def checked(name: str, default: object, read: Callable[[object], Optional[Value]], what: str, fix: str) -> Value:
        """Read the option of this name, if there is one, else the value of [policy], else the default.

        read: converts the value; None: it is wrong. what: a right value, for the error. fix: of the error. Raises UsageError
        for the option, DataError for the file.
        """
        typed = getattr(options, name, "")
        value = typed or file.get(name, default)
        found = read(value)
        if found is None:
            where = f"--{name.replace('_', '-')}" if typed else f"job.toml: [policy] {name} ="
            raise (UsageError if typed else DataError)(f"{where} {value!r} is not {what}", fix)
        return found

    def action(name: str, actions: Sequence[str]) -> str:
        """Read the name of an action; the first one is the default."""
        known = {one: one for one in actions}
        return checked(name, actions[0], lambda value: known.get(str(value)), " or ".join(actions), "give one of them")

    def restarts(name: str, default: int) -> int:
        return checked(name, default, lambda value: whole(value, 0, 99999), "a whole number", "0 to 99999")

    def seconds(name: str, default: float) -> float:
        return checked(name, default, seconds_of, "a duration", DURATIONS)

    return Policy(
        timeout=seconds("timeout", 0.0),
        grace=seconds("grace", cluster.grace),
        on_failure=action("on_failure", ON_FAILURE),
        max_restarts=restarts("max_restarts", 0),
        max_restarts_without_progress=restarts("max_restarts_without_progress", Policy.max_restarts_without_progress),
        lease=seconds("lease", 0.0),
        loss_timeout=cluster.loss_timeout,
        hang_timeout=seconds(
            "hang_timeout", Policy.hang_timeout if cluster.hang_timeout is None else cluster.hang_timeout
        ),
        on_hang=action("on_hang", ON_HANG),
    )
