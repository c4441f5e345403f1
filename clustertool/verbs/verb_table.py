"""The table of verbs: the name, the help, the options and the function of each.

Parser, help and completion read only this table. The module of a verb is imported when the verb is called, because the
libraries for connections take half a second to import.
"""

from __future__ import annotations

from dataclasses import replace

from clustertool.cli.completion import SCRIPTS
from clustertool.cli.options import FLAG, MANY, Opt, Positional, Verb
from clustertool.cli.rank_options import IN_JOB
from clustertool.engines import registry
from clustertool.model.job.job_names import NEWEST
from clustertool.model.roles import MODES, ROLES

ABOUT = (
    "clustertool runs distributed training jobs on plain Linux machines over SSH. The machines are those of HOSTS in conf.py. "
    "Without a conf.py it starts a small cluster on this machine."
)
# The headings of the list of commands, in this order.
_RUN, _WATCH, _CLUSTER, _DATA = "Run a job", "Watch jobs", "The cluster", "Data"

_NODES, _OUTPUT = "Nodes", "Output"
JSON = Opt("json", "answer as JSON on stdout", FLAG, group=_OUTPUT)
HOSTS = (
    Opt("conf", "the conf.py to use", value="FILE", usual="conf.py here, then upwards", group=_NODES),
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
ROLE = Opt("role", "the role that --rank counts in", "trainer", value="ROLE", choices=ROLES, usual="trainer")
_DRY = "print what would be done, and do nothing"
WORKSPACE = Opt("workspace", "the folder to send to every node", short="w", value="DIR")
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
    for entry in registry.entries()
    for option in entry.options
    if option is registry.options()[option.name]  # an option of two engines stands with one of them
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
    Opt("nested", "the trainers' command is a launcher such as torchrun on purpose: no warning", FLAG, group=_WHAT),
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
        "engine",
        "what provides the nodes",
        value="NAME",
        choices=registry.names(),
        usual=f"ENGINE of conf.py, or {registry.DEFAULT}",
        group=_NODES,
    ),
    Opt("nnodes", "use only the first N hosts", value="N", usual="all", group=_PROCESSES),
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

VERBS = (
    Verb(
        "run",
        "Check, dispatch, start and follow a job to its end; Ctrl+C stops it on all nodes.",
        *RUN,
        *NODES,
        purpose=_RUN,
        also="start launch submit train",
        positional=Positional(
            "program",
            "[PROGRAM [ARGUMENT...]]",
            "what to run, for all roles, in place of --script; its arguments are passed unchanged. Without --workspace the "
            "current folder is sent",
            rest=True,
        ),
        examples=(
            "run train.py --lr 0.1",
            "run --workspace ./job",
            'run --workspace ./job --script "train.py --lr 0.1" --nproc-per-node 2',
            "run --workspace ./job --only node[1-4] --devices 0,1 --timeout 2h",
            "run --workspace ./job --mode ps --server-num 1 --worker-num 2",
            "run --workspace ./job --detach",
        ),
    ),
    Verb(
        "attach",
        "Follow a running job to its end; Ctrl+C stops it on all nodes.",
        JOB,
        Opt("tail", "begin with the last N lines", short="n", value="N", usual="all"),
        *SHOWN,
        *COPIES,
        *PLACES,
        purpose=_RUN,
        also="follow",
        examples=("attach", "attach --tail 20 --all-ranks"),
    ),
    Verb(
        "stop",
        "Stop a job on all nodes and verify that no process is left.",
        replace(JOB, usual="the only running one"),
        Opt("all", "all running jobs of yours", FLAG),
        GRACE,
        Opt("force", "send KILL at once", FLAG),
        Opt("dry", _DRY, FLAG),
        *PLACES,
        purpose=_RUN,
        also="kill cancel abort end",
        examples=("stop", "stop --all --grace 30s"),
    ),
    Verb(
        "jobs",
        "List the jobs on the cluster.",
        replace(JOB, usual="all"),
        *PLACES,
        purpose=_WATCH,
        also="ps ls list queue",
        examples=("jobs", "jobs --json"),
    ),
    Verb(
        "status",
        "Show the state of one job, per process and per node.",
        JOB,
        replace(ROLE, help="only processes of this role", default="", usual="all"),
        *PLACES,
        purpose=_WATCH,
        also="describe show info",
        examples=("status", "status --job 20260102 --json"),
    ),
    Verb(
        "logs",
        "Print the log of any rank.",
        JOB,
        Opt("rank", "ranks within the role: 3, or 3,4, or all", short="r", value="RANK,...", usual="0"),
        ROLE,
        Opt("all-ranks", "all ranks of all roles", FLAG),
        Opt("host", "only ranks on this host", value="HOST"),
        Opt("follow", "continue as the log grows", FLAG, short="f"),
        Opt("tail", "only the last N lines", short="n", value="N", usual="all"),
        Opt("since", "only lines that were written since then", value="DURATION|TIME"),
        Opt("timestamps", "show when each line was written", FLAG),
        Opt("grep", "only lines that match this regular expression", value="REGEX"),
        Opt("raw", "exactly one rank's bytes, no prefix", FLAG),
        Opt("attempt", "the log of the K-th restart", value="K", usual="the newest"),
        Opt("files", "list all files in the job's log folder", FLAG),
        Opt("file", "print this file (with --host if several nodes have it)", value="NAME"),
        *PLACES,
        purpose=_WATCH,
        also="log tail output",
        examples=(
            "logs --follow",
            "logs --rank 3,4 --tail 100",
            "logs --all-ranks --grep 'loss|Error'",
            "logs --files",
        ),
    ),
    Verb(
        "top",
        "Watch nodes, devices and ranks live.",
        replace(JOB, help="only this job: its id, the beginning of it, or its name", usual="all"),
        Opt("interval", "time between two samples", value="DURATION", usual="1s"),
        Opt("count", "end after this number of samples", value="N"),
        *NODES,
        purpose=_WATCH,
        also="watch monitor htop",
        examples=("top", "top --interval 5s"),
    ),
    Verb(
        "report",
        "Write one HTML page about a job.",
        JOB,
        Opt("to", "the file", value="FILE", usual="./JOB<id>.html"),
        *NODES,
        purpose=_WATCH,
        examples=("report", "report --to report.html"),
    ),
    Verb(
        "check",
        "Test all nodes and report every error that would break a job.",
        WORKSPACE,
        replace(IMAGE, help='check for jobs in containers of this image; "" for none', group=Opt.group),
        Opt("bandwidth", "measure the bandwidth of each link", FLAG),
        Opt(
            "framework",
            "test it on all devices and between all nodes, in the job's own environment",
            value="NAME",
            choices=("torch", "paddle"),
        ),
        Opt(
            "timeout",
            "with --framework: time without progress after which it counts as blocked",
            value="DURATION",
            usual="60s",
        ),
        Opt("deep", "where an engine chooses the nodes: start a short program there, and check what it sees", FLAG),
        *ENGINES,
        *NODES,
        purpose=_CLUSTER,
        also="nodes ping doctor test",
        examples=("check", "check --workspace ./job --framework torch"),
    ),
    Verb(
        "gpus",
        "Show all devices (GPU, DCU, XPU, NPU), their load, and the jobs and processes on them.",
        *NODES,
        purpose=_CLUSTER,
        also="devices cards nvidia-smi",
        examples=("gpus",),
    ),
    Verb(
        "exec",
        "Run a command on all nodes, or on those of a job; or open a shell inside a rank.",
        replace(
            JOB, help="only on the nodes of this job: its id, a unique prefix of it, or its name", usual="all nodes"
        ),
        Opt("command", "what to run with the login shell of each node", short="c", value="COMMAND"),
        Opt("timeout", "time to wait for each node", value="DURATION", usual="no limit"),
        *IN_JOB,
        *NODES,
        target="exec:exec_",
        purpose=_CLUSTER,
        also="ssh sh shell pdsh",
        positional=Positional(
            "arguments",
            "[COMMAND...]",
            "the command in place of --command; arguments are joined as ssh joins them",
            rest=True,
        ),
        examples=(
            "exec hostname",
            "exec --only node[1-4] nvidia-smi -L",
            "exec --job JOB free -m",
            "exec --in-job --rank 3",
        ),
    ),
    Verb(
        "cluster.up",
        "Start the embedded local cluster.",
        Opt("nodes", "how many nodes", value="N", usual="as many as there are, or 3"),
        JSON,
        target="local:up",
        purpose=_CLUSTER,
        also="up local",
        examples=("cluster.up --nodes 3",),
    ),
    Verb(
        "cluster.down",
        "Stop the embedded cluster and its processes; its jobs' directories stay.",
        JSON,
        target="local:down",
        purpose=_CLUSTER,
        also="down",
        examples=("cluster.down",),
    ),
    Verb(
        "secret",
        "Make a secret for machines on which the same clusterrun command is typed.",
        Opt("to", "write it to this new file, with mode 0600", value="FILE", usual="print it"),
        JSON,
        purpose=_CLUSTER,
        also="key token password keygen",
        examples=("secret", "secret --to ~/.config/clustertool/secret"),
    ),
    Verb(
        "export",
        "Write what run would submit as files: the script, and a bundle with the job and its workspace.",
        Opt("to", "the folder to write, a new one", value="DIR"),
        *RUN,
        *NODES,
        target="run:export",
        purpose=_DATA,
        also="script manifest bundle sbatch offline",
        positional=Positional("program", "[PROGRAM [ARGUMENT...]]", "what to run, as for run", rest=True),
        examples=("export --engine slurm --workspace ./job --nnodes 2 --to ./exported",),
    ),
    Verb(
        "dispatch",
        "Copy a workspace to every node, without starting anything.",
        *SENT,
        Opt("verify", "hash again what the nodes have; remove and send again what is damaged", FLAG),
        Opt("dry", "only print what would be sent", FLAG),
        *NODES,
        purpose=_DATA,
        also="push sync upload send rsync scp",
        examples=("dispatch --workspace ./job",),
    ),
    Verb(
        "split",
        "Cut a data file into shards of equally many lines.",
        Opt("data", "the file to cut, line by line", value="FILE"),
        Opt("shards", "the number of shards", value="N"),
        Opt("to", "the folder for them", value="DIR", usual="where the file is"),
        Opt("shuffle", "put the lines in random order first", FLAG),
        Opt("seed", "the same number gives the same order", value="N", usual="a new one, which is printed"),
        Opt("force", "replace shards of this file that are there already", FLAG),
        JSON,
        purpose=_DATA,
        also="shard",
        examples=("split --data train.txt --shards 8 --to ./job/data",),
    ),
    Verb(
        "fetch",
        "Copy a job's results to this machine.",
        JOB,
        Opt(
            "rank",
            "rank within the role whose node is read, or all",
            "0",
            short="r",
            value="RANK",
            usual="0",
            choices=("all",),
        ),
        ROLE,
        Opt("path", "folder or file of the job to copy", value="PATH", usual="its output"),
        Opt("to", "the folder to write", value="DIR", usual="./JOB<id>"),
        *PLACES,
        purpose=_DATA,
        also="cp copy download get pull",
        examples=("fetch", "fetch --rank all --to ./results", "fetch --path output/model.pt"),
    ),
    Verb(
        "clean",
        "Remove finished jobs' directories from all nodes.",
        replace(JOB, usual=""),
        Opt("older-than", "only jobs older than this: 7d, 12h, 30m", value="DURATION"),
        Opt("dry", "only print what would be removed", FLAG),
        *PLACES,
        purpose=_DATA,
        also="rm remove delete prune purge",
        examples=("clean --older-than 7d --dry", "clean --job 20260102-030405-abcd"),
    ),
)

# clustertool only: `inv` has Invoke's own.
HELP = Opt("help", "show this", FLAG, short="h", group="Help")
COMMON = (
    replace(HELP, help="show this, or the options of the command that follows"),
    Opt("version", "show the version", FLAG, short="V"),
    Opt("list", "list the commands, one a line", FLAG, short="l"),
    Opt("dry", "before a command: the same as its own --dry", FLAG),
    Opt(
        "print-completion-script",
        "print the completion of commands and options for a shell",
        value="SHELL",
        choices=tuple(SCRIPTS),
    ),
)
EXAMPLES = (
    ("check", "test all nodes"),
    ("run --workspace ./job", "send a folder to all nodes and run its train.py"),
    ("logs --rank 3 --follow", "follow the log of one rank"),
    ("fetch --to ./results", "copy the output of the newest job"),
)
