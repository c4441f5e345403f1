"""The table of verbs: the name, the help, the options and the function of each.

`inv --list` and the parser of options read only this table. The module of a verb is imported when the verb is called, because
the libraries for connections take half a second to import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Opt:
    """`default` decides the kind: "" takes text, False is a flag, () may be given several times."""

    name: str
    help: str
    default: Any = ""
    short: str = ""


@dataclass(frozen=True)
class Verb:
    """`target`: "module:function", a function that takes a Call. An option group is a tuple of options."""

    name: str
    target: str
    help: str
    groups: tuple[Opt | tuple[Opt, ...], ...]

    @property
    def options(self) -> tuple[Opt, ...]:
        """All options, in the order of the groups."""
        return tuple(opt for group in self.groups for opt in ((group,) if isinstance(group, Opt) else group))


JSON = Opt("json", "answer as JSON on stdout", False)
NODES = (
    Opt("conf", "the conf.py to use (default: here, then upwards)"),
    Opt("hostfile", "hosts from an Open MPI, DeepSpeed or Horovod hostfile instead of HOSTS"),
    Opt("only", "only these hosts: names, ranges node[1-4], host:slot", ()),
    Opt("skip", "all but these hosts", ()),
)
PLACES = (
    *NODES,
    Opt("here", "only jobs that clusterrun has started on this machine alone, here or in a folder above", False),
)
JOB = Opt("job", "the job: its id or a unique prefix (default: your newest)", short="j")
ROLE = Opt("role", "pserver, trainer or heter", "trainer")
WORKSPACE = Opt("workspace", "the folder to send to every node", short="w")
CARRIER = Opt(
    "dispatch", "what carries the workspace to the nodes: swarm or rsync (default: DISPATCH of conf.py, swarm)"
)
RUN = (
    WORKSPACE,
    Opt("job-dispatch-package", "the old name of --workspace"),
    CARRIER,
    Opt("job-workspace", "a folder that every node has already: nothing is sent"),
    Opt("script", 'what to run, for all roles: "train.py --lr 0.1"'),
    Opt("mode", "collective, ps or ps-heter"),
    Opt("nproc-per-node", "trainers per node"),
    Opt("devices", "physical device ids to use on each node: 0,1; auto takes those that are free"),
    Opt("gpus", "the same as --devices"),
    Opt("xpus", "the same as --devices"),
    Opt("npus", "the same as --devices"),
    Opt("servers", "pservers as ip:port,..., in rank order", ()),
    Opt("workers", "trainers as ip[:port],..., in rank order", ()),
    Opt("trainers", "the same as --workers", ()),
    Opt("heter-workers", 'heter trainers as "ip[:port],...;ip[:port],...", a semicolon between stages', ()),
    Opt("heter-devices", 'cpu, gpu or xpu for each stage of heter trainers: "gpu;cpu"'),
    Opt("server-num", "pservers per node"),
    Opt("worker-num", "trainers per node"),
    Opt("trainer-num", "the same as --worker-num"),
    Opt("heter-worker-num", 'heter trainers per node in each stage: 2, or "2;1"'),
    Opt("http-port", "gloo's port on the first pserver"),
    Opt("nnodes", "use only the first N hosts"),
    Opt("job-id", "the job's id instead of a new one"),
    Opt("env", "NAME=value for every process; may be repeated", ()),
    Opt("force-env", "let ENV, [env] and --env override ranks and addresses", False),
    Opt("shards", "pattern of shard files in the workspace", ()),
    Opt("only-where-read", "send each shard only to the node whose trainer reads it", False),
    Opt("rank", "show the log of this trainer (default 0; 3,4 for several)", short="r"),
    Opt("all-ranks", "show the logs of all processes", False),
    Opt("detach", "exit once all processes run", False),
    Opt("lease", "end the job when no laptop was attached for this many seconds"),
    Opt("skip-bad", "continue without the nodes that fail the checks", False),
    Opt("timeout", "seconds after which the job is ended"),
    Opt("grace", "seconds between TERM and KILL"),
    Opt("on-failure", "abort or continue"),
    Opt("max-restarts", "start all again this many times after a failure"),
    Opt("wait", "wait until devices in use are free", False),
    Opt("dry", "print the plan and do nothing", False),
)

VERBS = (
    Verb(
        "run",
        "clustertool.verbs.run:run",
        "Check, dispatch, start and follow a job to its end; Ctrl+C stops it on all nodes.",
        (RUN, NODES, JSON),
    ),
    Verb(
        "check",
        "clustertool.verbs.check:check",
        "Test all nodes and report every error that would break a job.",
        (
            WORKSPACE,
            Opt("bandwidth", "measure the bandwidth of each link", False),
            Opt(
                "framework",
                "torch or paddle: test it on all devices and between all nodes, in the job's own environment",
            ),
            Opt("timeout", "with --framework: seconds without progress after which it counts as blocked (default 60)"),
            NODES,
            JSON,
        ),
    ),
    Verb(
        "dispatch",
        "clustertool.verbs.dispatch:dispatch",
        "Copy a workspace to every node, without starting anything.",
        (
            WORKSPACE,
            Opt("job-dispatch-package", "the old name of --workspace"),
            CARRIER,
            Opt("verify", "hash again what the nodes have; remove and send again what is damaged", False),
            Opt("dry", "only print what would be sent", False),
            NODES,
            JSON,
        ),
    ),
    Verb(
        "stop",
        "clustertool.verbs.stop:stop",
        "End a job on all nodes and verify that no process is left.",
        (
            JOB,
            Opt("all", "all running jobs of yours", False),
            Opt("grace", "seconds between TERM and KILL"),
            Opt("force", "KILL at once", False),
            Opt("dry", "only print what would be stopped", False),
            PLACES,
            JSON,
        ),
    ),
    Verb(
        "status",
        "clustertool.verbs.status:status",
        "Show the state of one job, per process and per node.",
        (
            JOB,
            Opt("role", "only processes of this role: pserver, trainer or heter"),
            PLACES,
            JSON,
        ),
    ),
    Verb(
        "jobs",
        "clustertool.verbs.jobs:jobs",
        "List the jobs on the cluster.",
        (JOB, PLACES, JSON),
    ),
    Verb(
        "logs",
        "clustertool.verbs.logs:logs",
        "Print the log of any rank.",
        (
            JOB,
            Opt("rank", "ranks within the role: 3 or 3,4 (default 0)", short="r"),
            ROLE,
            Opt("host", "only ranks on this host"),
            Opt("follow", "continue as the log grows", False, short="f"),
            Opt("tail", "only the last N lines", short="n"),
            Opt("grep", "only lines that match this regular expression"),
            Opt("raw", "exactly one rank's bytes, no prefix", False),
            Opt("attempt", "the K-th restart's log"),
            Opt("all-ranks", "all ranks of all roles", False),
            Opt("files", "list all files in the job's log folder", False),
            Opt("file", "print this file (with --host if several nodes have it)"),
            PLACES,
            JSON,
        ),
    ),
    Verb(
        "attach",
        "clustertool.verbs.attach:attach",
        "Follow a running job to its end; Ctrl+C stops it on all nodes.",
        (
            JOB,
            Opt("rank", "show the log of this trainer (default 0; 3,4 for several)", short="r"),
            Opt("all-ranks", "show the logs of all processes", False),
            Opt("tail", "begin with the last N lines", short="n"),
            PLACES,
            JSON,
        ),
    ),
    Verb(
        "fetch",
        "clustertool.verbs.fetch:fetch",
        "Copy a job's results to this machine.",
        (
            JOB,
            Opt("rank", "rank within the role whose node is read, or all (default 0)", "0", short="r"),
            ROLE,
            Opt("path", "folder of the job to copy (default: its output)"),
            Opt("to", "the folder to write (default: ./JOB<id>)"),
            PLACES,
            JSON,
        ),
    ),
    Verb(
        "exec",
        "clustertool.verbs.exec:exec_",
        "Run a command on all nodes.",
        (
            Opt("command", "what to run with the login shell of each node", short="c"),
            Opt("timeout", "seconds to wait for each node"),
            NODES,
            JSON,
        ),
    ),
    Verb(
        "gpus",
        "clustertool.verbs.gpus:gpus",
        "Show the devices of all nodes (GPU, DCU, XPU, NPU), their load, and the jobs and processes on them.",
        (NODES, JSON),
    ),
    Verb(
        "top",
        "clustertool.verbs.top:top",
        "Watch nodes, devices and ranks live.",
        (
            Opt("job", "only this job: its id or the beginning of it", short="j"),
            Opt("interval", "seconds between two samples (default 1)"),
            Opt("count", "end after this number of samples"),
            NODES,
        ),
    ),
    Verb(
        "split",
        "clustertool.verbs.split:split",
        "Cut a data file into shards of equally many lines.",
        (
            Opt("data", "the file to cut, line by line"),
            Opt("shards", "the number of shards"),
            Opt("to", "the folder for them (default: where the file is)"),
            Opt("shuffle", "put the lines in random order first", False),
            Opt("seed", "the same number gives the same order (default: a new one, which is printed)"),
            Opt("force", "replace shards of this file that are there already", False),
            JSON,
        ),
    ),
    Verb(
        "clean",
        "clustertool.verbs.clean:clean",
        "Remove finished jobs' directories from all nodes.",
        (
            JOB,
            Opt("older-than", "only jobs older than this: 7d, 12h, 30m"),
            Opt("dry", "only print what would be removed", False),
            PLACES,
            JSON,
        ),
    ),
    Verb(
        "report",
        "clustertool.verbs.report:report",
        "Write one HTML page about a job.",
        (
            JOB,
            Opt("to", "the file to write (default: ./JOB<id>.html)"),
            NODES,
            JSON,
        ),
    ),
)

# inv cluster.NAME
CLUSTER_VERBS = (
    Verb(
        "up",
        "clustertool.verbs.local:up",
        "Start the embedded local cluster.",
        (
            Opt("nodes", "how many nodes (default: as many as there are, or 3)"),
            JSON,
        ),
    ),
    Verb(
        "down",
        "clustertool.verbs.local:down",
        "Stop the embedded local cluster and all its processes; its jobs' directories stay.",
        (JSON,),
    ),
)
