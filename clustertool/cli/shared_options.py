"""This module has the options of several verbs, and those of `run`, in the order of its help."""

from __future__ import annotations

from dataclasses import replace

from clustertool.cli.options import FLAG, MANY, Opt
from clustertool.engines import known_engines
from clustertool.model.job.job_names import NEWEST
from clustertool.model.roles import MODES, ROLES

_NODES, _OUTPUT = "Nodes", "Output"
JSON = Opt("json", "answer as JSON on stdout", FLAG, group=_OUTPUT)
HOSTS = (
    Opt("conf", "the conf.py to use", value="FILE", usual="conf.py here, then upwards", group=_NODES),
    Opt("no-conf", "search no conf.py: that of another program is in the way", FLAG, group=_NODES),
    Opt(
        "hostfile", "hosts of an Open MPI, DeepSpeed or Horovod hostfile in place of HOSTS", value="FILE", group=_NODES
    ),
    Opt("only", "only these hosts: names, ranges node[1-4], host:slot", MANY, value="HOST,...", group=_NODES),
    Opt("skip", "all but these hosts", MANY, value="HOST,...", group=_NODES),
)
NODES = (*HOSTS, JSON)
HERE = Opt(
    "here", "only jobs that clusterrun has started on this machine alone, here or in a folder above", FLAG, group=_NODES
)
PLACES = (*HOSTS, HERE, JSON)
JOB = Opt("job", "the job: its id, a unique prefix of it, or its name", short="j", value="JOB", usual="your newest")
HOST = Opt("host", "a host of HOSTS, or a new one: [user@]host[:port]", MANY, value="HOST,...")
ROLE = Opt("role", "the role that --rank counts in", "trainer", value="ROLE", choices=ROLES, usual="trainer")
WORKSPACE = Opt(
    "workspace",
    "the folder to send to every node, without private keys and what .clusterignore names (.gitignore: by IGNORE_FROM)",
    short="w",
    value="DIR",
)
_WHAT, _PROCESSES, _PS, _ENDING = (
    "What runs",
    "Processes and devices",
    "Parameter servers and endpoints",
    "Start and end",
)
SENT = (
    WORKSPACE,
    Opt("job-dispatch-package", "the old name of --workspace", value="DIR", alias="workspace"),
    Opt(
        "dispatch",
        "what carries the workspace to the nodes",
        value="NAME",
        choices=("swarm", "rsync"),
        usual="DISPATCH of conf.py, or swarm",
    ),
)
SHOWN = (
    Opt(
        "rank",
        "show the log of these trainers: 3, or 3,4, or all",
        short="r",
        value="RANK,...",
        usual="0",
        group=_OUTPUT,
    ),
    Opt("all-ranks", "show the logs of all processes", FLAG, group=_OUTPUT),
)
GRACE = Opt("grace", "time between TERM and KILL", value="DURATION", usual="GRACE of conf.py, or 10s")
ENGINES = tuple(
    Opt(
        option.name,
        option.help,
        MANY if option.many else "" if option.value else FLAG,
        value=option.value,
        group=f"Nodes of the engine {entry.name}",
    )
    for entry in known_engines.entries()
    for option in entry.options
    if option is known_engines.options()[option.name]  # an option of two engines stands with one of them
)
IMAGE = Opt(
    "image",
    'run each process in a container of this image; "" for none',
    None,
    value="IMAGE",
    usual="image of [container] in job.toml, or CONTAINER of conf.py",
    group=_WHAT,
)
COPIES = (
    Opt(
        "log-dir",
        "a folder of this machine for the log of rank 0 and those shown, as they grow",
        value="DIR",
        group=_OUTPUT,
    ),
    Opt("fetch-logs", "at the end, write all logs there", FLAG, usual="", group=_OUTPUT),
)
VERBOSE = Opt(
    "verbose",
    "print the configuration, and the environment of each role's first process",
    FLAG,
    short="v",
    group=_OUTPUT,
)

RUN = (
    *(replace(option, group=_WHAT) for option in SENT),
    Opt("job-workspace", "a folder that every node has already: nothing is sent", value="DIR", group=_WHAT),
    Opt(
        "script",
        'what to run, for all roles: "train.py --lr 0.1"',
        value="COMMAND",
        usual="the commands of job.toml, or train.py",
        group=_WHAT,
    ),
    Opt(
        "nested",
        "the trainers' command starts torchrun by itself: one on each node, with NNODES and NPROC_PER_NODE; no warning",
        FLAG,
        group=_WHAT,
    ),
    Opt(
        "mode", "kind of job", value="MODE", choices=tuple(MODES), usual="that of job.toml, or collective", group=_WHAT
    ),
    Opt("shards", "pattern of shard files in the workspace", MANY, value="PATTERN", group=_WHAT),
    Opt("only-where-read", "send each shard only to the node whose trainer reads it", FLAG, group=_WHAT),
    Opt("env", "a variable for every process", MANY, value="NAME=VALUE", group=_WHAT),
    IMAGE,
    Opt("force-env", "let ENV, [env] and --env override ranks and addresses", FLAG, group=_WHAT),
    Opt(
        "job-id",
        "the job's id; ID-2 after job ID has ended",
        value="ID",
        usual="a new one, from date and time",
        group=_WHAT,
    ),
    Opt("name", "a name for the job, which --job takes as it takes an id", value="NAME", usual="--job-id", group=_WHAT),
    Opt(
        "resume",
        "continue from the output of this ended job, or of the newest one of the same name or workspace",
        value="JOB",
        bare=NEWEST,
        group=_WHAT,
    ),
    Opt(
        "keep",
        "with --resume: a file or folder besides the output to copy",
        MANY,
        value="FILE",
        usual="none",
        group=_WHAT,
    ),
    Opt(
        "engine",
        "what provides the nodes",
        value="NAME",
        choices=known_engines.names(),
        usual=f"ENGINE of conf.py, or {known_engines.DEFAULT}",
        group=_NODES,
    ),
    Opt(
        "nnodes",
        "use only the first N hosts; MIN:MAX: an elastic job, whose number of nodes may change while it runs",
        value="N|MIN:MAX",
        usual="all",
        group=_PROCESSES,
    ),
    Opt(
        "elastic-timeout",
        "how long an elastic job waits for nodes: for MAX at its start, and for MIN later, before it ends",
        value="DURATION",
        usual="timeout of [elastic] in job.toml, or 5m",
        group=_ENDING,
    ),
    Opt(
        "elastic-server",
        "etcd for the epochs of an elastic job, which then may lose its coordinator: https://user@host:2379",
        MANY,
        value="URL,...",
        usual="none",
        group=_ENDING,
    ),
    Opt(
        "nproc-per-node",
        "trainers on each node: a number, or one per device (gpu, xpu, npu, auto) or processor (cpu)",
        value="N",
        usual="one per device, or one",
        group=_PROCESSES,
    ),
    Opt(
        "devices",
        "physical device ids to use on each node: 0,1; auto takes those that are free",
        value="IDS",
        usual="all",
        group=_PROCESSES,
    ),
    *(
        Opt(name, "the same as --devices", value="IDS", group=_PROCESSES, alias="devices")
        for name in ("gpus", "xpus", "npus")
    ),
    Opt("wait", "wait until devices in use are free", FLAG, group=_PROCESSES),
    Opt(
        "master-port",
        "the port at which trainers meet: MASTER_PORT",
        value="PORT",
        usual="a free one",
        group=_PROCESSES,
    ),
    Opt("servers", "pservers in rank order: ip:port,...", MANY, value="ENDPOINT,...", group=_PS),
    Opt("workers", "trainers in rank order: ip[:port],...", MANY, value="ENDPOINT,...", group=_PS),
    Opt("trainers", "the same as --workers", MANY, value="ENDPOINT,...", group=_PS, alias="workers"),
    Opt("heter-workers", 'heter trainers, a semicolon between stages: "ip,ip;ip"', MANY, value="ENDPOINTS", group=_PS),
    Opt("server-num", "pservers per node", value="N", usual="1", group=_PS),
    Opt("worker-num", "trainers per node", value="N", usual="1", group=_PS),
    Opt("trainer-num", "the same as --worker-num", value="N", group=_PS, alias="worker-num"),
    Opt("heter-worker-num", 'heter trainers per node in each stage: 2, or "2;1"', value="N;N", usual="1", group=_PS),
    Opt("heter-devices", 'cpu, gpu or xpu for each stage of heter trainers: "gpu;cpu"', value="KIND;KIND", group=_PS),
    Opt("http-port", "gloo's port on the first pserver", value="PORT", usual="a free one", group=_PS),
    *ENGINES,
    Opt("detach", "exit once all processes run", FLAG, group=_ENDING),
    Opt("skip-bad", "continue without the nodes that fail the checks", FLAG, group=_ENDING),
    Opt("timeout", "end the job after this time", value="DURATION", usual="no limit", group=_ENDING),
    replace(GRACE, group=_ENDING),
    Opt(
        "on-failure",
        "what the other processes do when one fails",
        value="ACTION",
        choices=("abort", "continue"),
        usual="abort",
        group=_ENDING,
    ),
    Opt("max-restarts", "start all again this many times after a failure", value="N", usual="0", group=_ENDING),
    Opt(
        "lease",
        "end the job when no run or attach has followed it for this time",
        value="DURATION",
        usual="no limit",
        group=_ENDING,
    ),
    *COPIES,
    Opt("dry", "print the plan, and do nothing", FLAG, group=_ENDING),
    *SHOWN,
)


_IN_RANK = "Inside a rank"
# They name one running rank, into which a command goes: exec --in-job.
IN_JOB = (
    Opt(
        "in-job",
        "inside one rank of a running job: its container, directory and environment; without a command, a shell",
        FLAG,
        group=_IN_RANK,
    ),
    Opt("rank", "in this rank", short="r", value="RANK", usual="the lowest that runs", group=_IN_RANK),
    Opt(
        "role",
        "the role that --rank counts in",
        "trainer",
        value="ROLE",
        choices=ROLES,
        usual="trainer",
        group=_IN_RANK,
    ),
    Opt("host", "in a rank on this host", value="HOST", group=_IN_RANK),
)
