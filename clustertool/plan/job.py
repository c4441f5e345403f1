"""A job spec is job.toml and the options of the command line, checked and merged; the command line wins."""

from __future__ import annotations

import posixpath
import re
import shlex
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Type

from clustertool.errors import ClustertoolError, ConfigError, DataError, UsageError
from clustertool.plan.cluster import Cluster
from clustertool.plan.hosts import VARIABLE, device_ids
from clustertool.plan.paths import OURS

MODES = ("collective", "ps", "ps-heter")
Command = Optional[Tuple[str, ...]]
Pairs = Tuple[Tuple[str, str], ...]
_MOST = 10000  # processes of one role on one node, and nodes
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

# What the plan computes for every process. Overriding one of these by hand breaks a job in ways that look like the
# network's fault, so it needs --force-env.
PLACED = frozenset(
    """RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT
    OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE
    PADDLE_MASTER PADDLE_GLOBAL_SIZE PADDLE_LOCAL_SIZE PADDLE_GLOBAL_RANK PADDLE_LOCAL_RANK PADDLE_NNODES
    PADDLE_CURRENT_ENDPOINT PADDLE_TRAINER_ID PADDLE_TRAINERS_NUM PADDLE_RANK_IN_NODE PADDLE_TRAINER_ENDPOINTS
    PADDLE_TRAINERS POD_IP PADDLE_PSERVERS_IP_PORT_LIST PADDLE_PORT PADDLE_ROLE TRAINING_ROLE
    PADDLE_GLOO_HTTP_ENDPOINT PADDLE_INIT_TRAINER_ID PADDLE_INIT_PSERVERS PADDLE_INIT_NUM_GRADIENT_SERVERS
    PADDLE_INIT_PORT PADDLE_HETER_TRAINER_IP_PORT_LIST""".split()
)


@dataclass(frozen=True)
class Role:
    """How many processes of a role, and what they run. None: not said, so the plan's default."""

    command: Command = None
    per_node: Optional[int] = None
    endpoints: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Policy:
    """How a job ends. 0 seconds: no limit."""

    timeout: float = 0.0
    grace: float = 10.0
    on_failure: str = "abort"
    max_restarts: int = 0
    lease: float = 0.0
    loss_timeout: float = 10.0


@dataclass(frozen=True)
class JobSpec:
    mode: str = "collective"
    trainer: Role = Role()
    pserver: Role = Role()
    env: Pairs = ()
    force_env: bool = False
    shards: Tuple[str, ...] = ()
    output: str = "output"
    policy: Policy = Policy()
    devices: Optional[Tuple[int, ...]] = None
    nproc: Optional[int] = None
    nnodes: int = 0
    http_port: int = 0
    job_workspace: str = ""


@dataclass(frozen=True)
class Options:
    """The options of `run` as typed; "" and () mean not given. Everything is text and is checked in read_job."""

    mode: str = ""
    script: str = ""
    nproc_per_node: str = ""
    devices: str = ""
    servers: Tuple[str, ...] = ()
    workers: Tuple[str, ...] = ()
    server_num: str = ""
    worker_num: str = ""
    http_port: str = ""
    nnodes: str = ""
    env: Tuple[str, ...] = ()
    force_env: bool = False
    shards: Tuple[str, ...] = ()
    lease: str = ""
    timeout: str = ""
    grace: str = ""
    on_failure: str = ""
    max_restarts: str = ""
    job_workspace: str = ""


def read_job(cluster: Cluster, toml: Mapping[str, Any], options: Options) -> JobSpec:
    """Raises DataError for what job.toml says wrong, UsageError for the command line, both with the fix."""
    file = _read_toml(toml)
    mode = _mode(options, file)
    ps_options = options.servers or options.server_num
    if mode == "collective" and ps_options:
        raise UsageError("--servers and --server-num need parameter servers, the mode is collective", "add --mode ps")
    if mode == "ps-heter":
        where, error = ("--mode", UsageError) if options.mode else ("job.toml: mode =", DataError)
        raise error(f"{where} ps-heter is not built yet", "use the mode ps")
    script = _script(options.script)
    devices = options.devices.strip()
    return JobSpec(
        mode=mode,
        trainer=Role(
            script or file["trainer"].command,
            _count(options.worker_num, "--worker-num") or file["trainer"].per_node,
            _endpoints(options.workers, "--workers"),
        ),
        pserver=Role(
            script or file["pserver"].command,
            _count(options.server_num, "--server-num") or file["pserver"].per_node,
            _endpoints(options.servers, "--servers"),
        ),
        env=_environment(cluster, file["env"], options),
        force_env=options.force_env,
        shards=_patterns(list(_words(options.shards)), "--shards", UsageError) or file["shards"],
        output=file["output"],
        policy=_policy(cluster, file["policy"], options),
        devices=_devices(devices) if devices else None,
        nproc=_count(options.nproc_per_node, "--nproc-per-node"),
        nnodes=_count(options.nnodes, "--nnodes") or 0,
        http_port=_count(options.http_port, "--http-port", "a port from 1 to 65535", 65535) or 0,
        job_workspace=options.job_workspace,
    )


def valid_job_id(text: str) -> str:
    """The id itself, or UsageError."""
    if not _JOB_ID.fullmatch(text):
        raise UsageError(
            f"--job-id {text!r} is no job id", "letters, digits, '.', '_' and '-', up to 64, the first one a letter or digit"
        )
    return text


def _mode(options: Options, file: Mapping[str, Any]) -> str:
    asked = options.mode or file["mode"]
    implied = "ps" if options.servers or options.server_num else "collective"
    mode = str(asked or implied)
    if mode not in MODES:
        raise UsageError(f"--mode {mode!r} is not known", f"one of {', '.join(MODES)}")
    return mode


# -- job.toml ---------------------------------------------------------------------------------------------------------

_TABLES: Dict[str, Tuple[str, ...]] = {
    "trainer": ("command", "per_node"),
    "pserver": ("command", "per_node"),
    "shards": ("files",),
    "outputs": ("path",),
    "policy": ("timeout", "grace", "on_failure", "max_restarts"),
}


def _read_toml(toml: Mapping[str, Any]) -> Dict[str, Any]:
    for key, value in toml.items():
        if key not in ("mode", "env", *_TABLES):
            raise DataError(f"job.toml: unknown key {key!r}", f"known: mode, env, {', '.join(_TABLES)}")
        if key == "mode":
            if value not in MODES:
                raise DataError(f"job.toml: mode = {value!r}", f"one of {', '.join(MODES)}")
        elif not isinstance(value, dict):
            raise DataError(f"job.toml: {key} = {value!r} is no table", f"write [{key}] and its keys below it")
        for name in value if key in _TABLES else ():
            if name not in _TABLES[key]:
                raise DataError(f"job.toml: [{key}] has the unknown key {name!r}", f"known: {', '.join(_TABLES[key])}")
    output = toml.get("outputs", {}).get("path", "output")
    first = posixpath.normpath(output).split("/")[0] if isinstance(output, str) and "\0" not in output else ""
    if first in ("", ".", "..", "log", "nodefile", OURS):
        raise DataError(f"job.toml: [outputs] path = {output!r}", "a folder inside the job's directory, such as output")
    return {
        "mode": toml.get("mode", ""),
        "trainer": _role(toml, "trainer"),
        "pserver": _role(toml, "pserver"),
        "env": _toml_env(toml.get("env", {})),
        "shards": _patterns(toml.get("shards", {}).get("files", []), "job.toml: [shards] files =", DataError),
        "output": posixpath.normpath(output),
        "policy": toml.get("policy", {}),
    }


def _role(toml: Mapping[str, Any], name: str) -> Role:
    table = toml.get(name, {})
    command, per_node = table.get("command"), table.get("per_node")
    if command is not None and not _is_command(command):
        raise DataError(f"job.toml: [{name}] command = {command!r}", 'a list of words: ["python3", "-u", "train.py"]')
    if per_node is not None and (isinstance(per_node, bool) or not isinstance(per_node, int) or not 0 < per_node <= _MOST):
        raise DataError(f"job.toml: [{name}] per_node = {per_node!r}", f"a whole number from 1 to {_MOST}")
    return Role(None if command is None else tuple(command), per_node)


def _is_command(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(word, str) and "\0" not in word for word in value)


def _toml_env(table: Mapping[str, Any]) -> Pairs:
    for name, value in table.items():
        if not VARIABLE.fullmatch(name) or isinstance(value, (dict, list)) or "\0" in str(value):
            raise DataError(f"job.toml: [env] {name} = {value!r}", 'NAME = "value"')
    return tuple((name, str(value)) for name, value in table.items())


def _patterns(value: Any, where: str, error: Type[ClustertoolError]) -> Tuple[str, ...]:
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list) or not all(isinstance(p, str) and p and not p.startswith("/") for p in patterns):
        raise error(f"{where} {value!r}", 'a pattern inside the workspace: "data/*-[0-9]*"')
    return tuple(p[2:] if p.startswith("./") else p for p in patterns)


# -- the command line ---------------------------------------------------------------------------------------------------


def _script(text: str) -> Command:
    """"train.py --lr 0.1" -> python3 -u train.py --lr 0.1, split as a shell would."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--script {text!r}: {error}", "close the quote") from None
    if not words:
        return None
    return tuple(["python3", "-u", *words] if words[0].endswith(".py") else words)


def _count(text: str, option: str, right: str = f"a whole number from 1 to {_MOST}", most: int = _MOST) -> Optional[int]:
    if text == "":
        return None
    if not re.fullmatch(r"\d{1,5}", text) or not 0 < int(text) <= most:
        raise UsageError(f"{option} {text!r}", right)
    return int(text)


def _words(values: Sequence[str]) -> Tuple[str, ...]:
    return tuple(word for value in values for word in value.split(",") if word)


def _endpoints(values: Sequence[str], option: str) -> Tuple[str, ...]:
    words = _words(values)
    for word in words:
        if words.count(word) > 1 and re.search(r"(^[^:]+|\]):\d+$", word):
            raise UsageError(f"{option} names the endpoint {word} twice", "every process needs its own")
    return words


def _devices(text: str) -> Tuple[int, ...]:
    try:
        return device_ids(text, "--devices")
    except ConfigError as error:
        raise UsageError(error.what, "write --devices 0,1") from None


def _environment(cluster: Cluster, file: Pairs, options: Options) -> Pairs:
    """[env], then --env; the plan lays them over conf.py's. CLUSTERTOOL_* is never a user's, a placed name only by force."""
    merged: Dict[str, str] = {}
    sources: List[Tuple[str, Pairs]] = [
        ("ENV in conf.py", cluster.env),
        *((f"env of {host.name} in conf.py", host.env) for host in cluster.hosts),
        ("PASS_ENV or SECRETS in conf.py", tuple((name, "") for name in (*cluster.pass_env, *cluster.secrets))),
        ("[env] in job.toml", file),
        ("--env", _pairs(options.env)),
    ]
    for where, pairs in sources:
        for name, value in pairs:
            if name.startswith("CLUSTERTOOL_"):
                raise UsageError(f"{where} sets {name}, which only the tool sets", "take another name")
            if name in PLACED and not options.force_env:
                what = f"{where} sets {name}, which is computed for every process"
                raise UsageError(what, "leave it out, or add --force-env")
            if where in ("[env] in job.toml", "--env"):
                merged[name] = value
    return tuple(merged.items())


def _pairs(values: Sequence[str]) -> Pairs:
    pairs = []
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals or not VARIABLE.fullmatch(name):
            raise UsageError(f"--env {value!r}", "write --env NAME=value")
        pairs.append((name, rest))
    return tuple(pairs)


def _policy(cluster: Cluster, file: Mapping[str, Any], options: Options) -> Policy:
    def said(name: str, typed: str, default: object, pattern: str, right: str) -> str:
        value = str(typed or file.get(name, default))
        if not re.fullmatch(pattern, value):
            where, error = (f"--{name.replace('_', '-')}", UsageError) if typed else (f"job.toml: [policy] {name} =", DataError)
            raise error(f"{where} {value!r}", right)
        return value

    def seconds(name: str, typed: str, default: float) -> float:
        return float(said(name, typed, default, r"\d+(\.\d*)?", "a number of seconds"))

    return Policy(
        timeout=seconds("timeout", options.timeout, 0.0),
        grace=seconds("grace", options.grace, cluster.grace),
        on_failure=said("on_failure", options.on_failure, "abort", "abort|continue", "abort or continue"),
        max_restarts=int(said("max_restarts", options.max_restarts, 0, r"\d{1,5}", "a whole number up to 99999")),
        lease=seconds("lease", options.lease, 0.0),
        loss_timeout=cluster.loss_timeout,
    )
