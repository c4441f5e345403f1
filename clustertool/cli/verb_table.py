"""The table of verbs has the name, the help, the options and the function of each.

Parser, help and completion read only this table. The module of a verb is imported when the verb is called, because the
libraries for connections take half a second to import.
"""

from __future__ import annotations

from dataclasses import replace

from clustertool.cli.completion import SCRIPTS
from clustertool.cli.options import FLAG, Opt, Positional, Verb, read_options
from clustertool.cli.shared_options import (
    COPIES,
    ENGINES,
    GRACE,
    HOST,
    IMAGE,
    IN_JOB,
    JOB,
    JSON,
    NODES,
    PLACES,
    ROLE,
    RUN,
    SENT,
    SHOWN,
    VERBOSE,
    WORKSPACE,
)

ABOUT = (
    "clustertool runs distributed training jobs on plain Linux machines over SSH. The machines are those of HOSTS in conf.py. "
    "Without a conf.py it starts a small cluster on this machine."
)
# The headings of the list of commands, in this order.
_RUN, _WATCH, _CLUSTER, _DATA = "Run a job", "Watch jobs", "The cluster", "Data"

_DRY = "print what would be done, and do nothing"

VERBS = (
    Verb(
        "run",
        "Check, dispatch, start and follow a job to its end; Ctrl+C stops it on all nodes.",
        *RUN,
        VERBOSE,
        *NODES,
        purpose=_RUN,
        also="start launch submit train resume=--resume restart=--resume",
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
        target="run:attach",
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
        "grow",
        "Add hosts to an elastic job that runs, or start lost nodes of it again.",
        HOST,
        replace(JOB, usual="the only running one"),
        *NODES,
        target="elastic:grow",
        purpose=_RUN,
        also="add scale join expand",
        examples=("grow --host node5", "grow --host me@10.0.0.9:2222 --job 20260102"),
    ),
    Verb(
        "shrink",
        "Release nodes of an elastic job that runs: the next epoch begins without them.",
        HOST,
        replace(JOB, usual="the only running one"),
        *NODES,
        target="elastic:shrink",
        purpose=_RUN,
        also="release drain",
        examples=("shrink --host node5",),
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
        target="jobs:status",
        purpose=_WATCH,
        also="describe show info events",
        examples=("status", "status --job 20260102 --json"),
    ),
    Verb(
        "logs",
        "Print the log of any rank.",
        JOB,
        *read_options("-r --rank RANK,...  ranks within the role: 3, or 3,4, or all (default: 0)"),
        ROLE,
        *read_options(
            """
            --all-ranks  all ranks of all roles
            --host HOST  only ranks on this host
            -f --follow  continue as the log grows
            -n --tail N  only the last N lines (default: all)
            --since DURATION|TIME  only lines that were written since then
            --timestamps  show when each line was written
            --grep REGEX  only lines that match this regular expression
            --raw  exactly one rank's bytes, no prefix
            --attempt K  the log of the K-th restart (default: the newest)
            --files  list all files in the job's log folder
            --file NAME  print this file (with --host if several nodes have it)
            """
        ),
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
        "stacks",
        "Show where all ranks of a running job are: their stacks at one moment, equal ones gathered.",
        JOB,
        *read_options("-r --rank RANK,...  ranks within the role: 3, or 3,7 (default: all)"),
        replace(ROLE, help="only ranks of this role", default="", usual="all; with --rank trainer"),
        *read_options("--native  also the frames of native code; it stops each process for a moment"),
        Opt("to", "write all frames to this file, too", value="FILE"),
        *PLACES,
        target="rank_stacks:stacks",
        purpose=_WATCH,
        also="hang hung py-spy pyspy gdb backtrace traceback dump",
        examples=("stacks", "stacks --rank 3,7 --native", "stacks --to stacks.txt"),
    ),
    Verb(
        "report",
        "Write one HTML page about a job.",
        JOB,
        Opt("to", "the file", value="FILE", usual="./JOB<id>.html"),
        *NODES,
        target="fetch:report",
        purpose=_WATCH,
        examples=("report", "report --to report.html"),
    ),
    Verb(
        "metrics",
        "Print the numbers that the ranks of a job have printed: step, loss, rates, percentage.",
        JOB,
        Opt("csv", "all of them, one row each time that a rank has printed new ones", FLAG),
        Opt("prometheus", "the newest ones, in the text format of Prometheus", FLAG),
        Opt("to", "write them to this file, as CSV without --json or --prometheus", value="FILE", usual="stdout"),
        *NODES,
        target="fetch:metrics",
        purpose=_WATCH,
        also="loss progress throughput",
        examples=("metrics", "metrics --to loss.csv", "metrics --prometheus"),
    ),
    Verb(
        "check",
        "Test all nodes and report every error that would break a job.",
        WORKSPACE,
        replace(IMAGE, help='check for jobs in containers of this image; "" for none', group=Opt.group),
        *read_options(
            """
            --bandwidth  measure the bandwidth of each link
            --framework NAME(torch|paddle)  test it on all devices and between all nodes, in the job's own environment
            --timeout DURATION  with --framework: time without progress after which it counts as blocked (default: 60s)
            --deep  where an engine chooses the nodes: start a short program there, and check what it sees
            """
        ),
        *ENGINES,
        *NODES,
        purpose=_CLUSTER,
        also="nodes ping doctor test init config validate",
        examples=("check", "check --workspace ./job --framework torch"),
    ),
    Verb(
        "gpus",
        "Show all devices (GPU, DCU, XPU, NPU), their load, and the jobs and processes on them.",
        *NODES,
        target="top:gpus",
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
        *read_options(
            """
            -c --command COMMAND  what to run with the login shell of each node
            --timeout DURATION  time to wait for each node (default: no limit)
            --stream  print each line when it comes, with the name of its node
            """
        ),
        *IN_JOB,
        *NODES,
        target="exec:exec_",
        targets={"in_job": "exec_in_job:exec_in_job", "job": "exec_in_job:exec_in_job"},
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
        target="new_secret:new_secret",
        purpose=_CLUSTER,
        also="key token password keygen",
        examples=("secret", "secret --to ~/.config/clustertool/secret"),
    ),
    Verb(
        "export",
        "Write what run would submit: a script and a bundle with the job and its workspace, or manifests of Kubernetes.",
        *read_options(
            """
            --to PLACE  what to write: a new folder, or with kubernetes a new file (default: stdout)
            --with-secrets  with kubernetes: the Secret, too, which has the job, its key and its secrets
            --secrets-to FILE  with kubernetes: a new file that gets the Secret alone
            --native  with kubernetes: a PaddleJob whose containers run the command themselves
            """
        ),
        *RUN,
        *NODES,
        target="run:export",
        purpose=_DATA,
        also="script manifest bundle sbatch offline",
        positional=Positional("program", "[PROGRAM [ARGUMENT...]]", "what to run, as for run", rest=True),
        examples=(
            "export --engine slurm --workspace ./job --nnodes 2 --to ./exported",
            "export --engine kubernetes --workspace ./job --to job.yaml --secrets-to secret.yaml",
        ),
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
        *read_options(
            """
            --data FILE  the file to cut, line by line
            --shards N  the number of shards
            --to DIR  the folder for them (default: where the file is)
            --shuffle  put the lines in random order first
            --seed N  the same number gives the same order (default: a new one, which is printed)
            --force  replace shards of this file that are there already
            """
        ),
        JSON,
        purpose=_DATA,
        also="shard",
        examples=("split --data train.txt --shards 8 --to ./job/data",),
    ),
    Verb(
        "fetch",
        "Copy a job's results to this machine.",
        JOB,
        *read_options("-r --rank RANK(all)=0  rank within the role whose node is read, or all (default: 0)"),
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
        target="stop:clean",
        purpose=_DATA,
        also="rm remove delete prune purge",
        examples=("clean --older-than 7d --dry", "clean --job 20260102-030405-abcd"),
    ),
)

# clustertool only: `inv` has Invoke's own.
HELP = Opt("help", "show this", FLAG, short="h", group="Help")
COMMON = (
    replace(HELP, help="show this, or the options of the command that follows"),
    *read_options(
        f"""
        -V --version  show the version
        -l --list  list the commands, one a line
        --dry  before a command: the same as its own --dry
        --print-completion-script SHELL({"|".join(SCRIPTS)})  print the completion of commands and options for a shell
        """
    ),
)
EXAMPLES = (
    ("check", "test all nodes"),
    ("run --workspace ./job", "send a folder to all nodes and run its train.py"),
    ("logs --rank 3 --follow", "follow the log of one rank"),
    ("fetch --to ./results", "copy the output of the newest job"),
)
