"""This module has the options of several verbs, and those of `run`, in the order of its help."""

from __future__ import annotations

from dataclasses import replace

from clustertool.cli.options import FLAG, MANY, Opt, read_options
from clustertool.engines import known_engines
from clustertool.model.job.job_names import NEWEST
from clustertool.model.roles import MODES, ROLES

_WHAT = "What runs"
_GRACE = "--grace DURATION  time between TERM and KILL (default: GRACE of conf.py, or 10s)"
_ROLE = f"--role ROLE({'|'.join(ROLES)})=trainer  the role that --rank counts in (default: trainer)"

*HOSTS, HERE = read_options(
    """
Nodes
--conf FILE  the conf.py to use (default: conf.py here, then upwards)
--no-conf  search no conf.py: that of another program is in the way
--hostfile FILE  hosts of an Open MPI, DeepSpeed or Horovod hostfile in place of HOSTS
--only HOST,... *  only these hosts: names, ranges node[1-4], host:slot
--skip HOST,... *  all but these hosts
--here  only jobs that clusterrun has started on this machine alone, here or in a folder above
"""
)
JSON, *COPIES = read_options(
    """
Output
--json  answer as JSON on stdout
--log-dir DIR  a folder of this machine for the log of rank 0 and those shown, as they grow
--fetch-logs  at the end, write all logs there
"""
)
VERBOSE, *SHOWN = read_options(
    """
Output
-v --verbose  print the configuration, and the environment of each role's first process
-r --rank RANK,...  show the log of these trainers: 3, or 3,4, or all (default: 0)
--all-ranks  show the logs of all processes
"""
)
NODES = (*HOSTS, JSON)
PLACES = (*HOSTS, HERE, JSON)
JOB, HOST, ROLE, GRACE = read_options(
    f"""
-j --job JOB  the job: its id, a unique prefix of it, or its name (default: your newest)
--host HOST,... *  a host of HOSTS, or a new one: [user@]host[:port]
{_ROLE}
{_GRACE}
"""
)
SENT = read_options(
    """
-w --workspace DIR  the folder to send to every node, without private keys and what .clusterignore names (.gitignore: by
    IGNORE_FROM)
--job-dispatch-package DIR @workspace  the old name of --workspace
--dispatch NAME(swarm|rsync)  what carries the workspace to the nodes (default: DISPATCH of conf.py, or swarm)
"""
)
WORKSPACE = SENT[0]
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
_IN_CONTAINER = 'run each process in a container of this image; "" for none'
_USUAL_IMAGE = "image of [container] in job.toml, or CONTAINER of conf.py"
IMAGE = Opt("image", _IN_CONTAINER, None, value="IMAGE", usual=_USUAL_IMAGE, group=_WHAT)
# They name one running rank, into which a command goes: exec --in-job.
IN_JOB = read_options(
    f"""
Inside a rank
--in-job  inside one rank of a running job: its container, directory and environment; without a command, a shell
-r --rank RANK  in this rank (default: the lowest that runs)
{_ROLE}
--host HOST  in a rank on this host
"""
)

RUN = (
    *(replace(option, group=_WHAT) for option in SENT),
    *read_options(
        f"""
What runs
--job-workspace DIR  a folder that every node has already: nothing is sent
--script COMMAND  what to run, for all roles: "train.py --lr 0.1" (default: the commands of job.toml, or train.py)
--nested  the trainers' command starts torchrun by itself: one on each node, with NNODES and NPROC_PER_NODE; no warning
--mode MODE({"|".join(MODES)})  kind of job (default: that of job.toml, or collective)
--shards PATTERN *  pattern of shard files in the workspace
--only-where-read  send each shard only to the node whose trainer reads it
--env NAME=VALUE *  a variable for every process
"""
    ),
    IMAGE,
    *read_options(
        f"""
What runs
--force-env  let ENV, [env] and --env override ranks and addresses
--job-id ID  the job's id; ID-2 after job ID has ended (default: a new one, from date and time)
--name NAME  a name for the job, which --job takes as it takes an id (default: --job-id)
--resume JOB[{NEWEST}]  continue from the output of this ended job, or of the newest one of the same name or workspace
--keep FILE *  with --resume: a file or folder besides the output to copy (default: none)
Nodes
--engine NAME({"|".join(known_engines.names())})  what provides the nodes
    (default: ENGINE of conf.py, or {known_engines.DEFAULT})
Processes and devices
--nnodes N|MIN:MAX  use only the first N hosts; MIN:MAX: an elastic job, whose number of nodes may change while it runs
    (default: all)
Start and end
--elastic-timeout DURATION  how long an elastic job waits for nodes: for MAX at its start, and for MIN later, before it ends
    (default: timeout of [elastic] in job.toml, or 5m)
--elastic-server URL,... *  etcd for the epochs of an elastic job, which then may lose its coordinator: https://user@host:2379
    (default: none)
Processes and devices
--nproc-per-node N  trainers on each node: a number, or one per device (gpu, xpu, npu, auto) or processor (cpu)
    (default: one per device, or one)
--devices IDS  physical device ids to use on each node: 0,1; auto takes those that are free (default: all)
--gpus IDS @devices  the same as --devices
--xpus IDS @devices  the same as --devices
--npus IDS @devices  the same as --devices
--wait  wait until devices in use are free
--master-port PORT  the port at which trainers meet: MASTER_PORT (default: a free one)
Parameter servers and endpoints
--servers ENDPOINT,... *  pservers in rank order: ip:port,...
--workers ENDPOINT,... *  trainers in rank order: ip[:port],...
--trainers ENDPOINT,... * @workers  the same as --workers
--heter-workers ENDPOINTS *  heter trainers, a semicolon between stages: "ip,ip;ip"
--server-num N  pservers per node (default: 1)
--worker-num N  trainers per node (default: 1)
--trainer-num N @worker-num  the same as --worker-num
--heter-worker-num N;N  heter trainers per node in each stage: 2, or "2;1" (default: 1)
--heter-devices KIND;KIND  cpu, gpu or xpu for each stage of heter trainers: "gpu;cpu"
--http-port PORT  gloo's port on the first pserver (default: a free one)
"""
    ),
    *ENGINES,
    *read_options(
        f"""
Start and end
--detach  exit once all processes run
--skip-bad  continue without the nodes that fail the checks
--timeout DURATION  end the job after this time (default: no limit)
{_GRACE}
--on-failure ACTION(abort|continue)  what the other processes do when one fails (default: abort)
--hang-timeout DURATION  without progress for so long, which ranks hang and where is found out (default: 10m; 0: never)
--on-hang ACTION(report|abort|restart)  what a job that hangs leads to (default: report)
--max-restarts N  start all again this many times after a failure (default: 0)
--lease DURATION  end the job when no run or attach has followed it for this time (default: no limit)
"""
    ),
    *COPIES,
    Opt("dry", "print the plan, and do nothing", FLAG, group="Start and end"),
    *SHOWN,
)
