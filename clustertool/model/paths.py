"""This module has every path of a job on a node (contract, section 4). No other module builds one."""

from __future__ import annotations

import posixpath
from typing import Optional, Sequence

_LOG = {
    "trainer": "workerlog",
    "pserver": "serverlog",
    "heter": "heterlog",
    "mpirun": "mpirunlog",
    "mpidaemon": "mpidaemonlog",
}
_FIRST = {
    "trainer": "train.log",
    "pserver": "server.log",
    "heter": "heter.log",
    "mpirun": "mpirun.log",
    "mpidaemon": "mpidaemon.log",
}
LOG_NAMES = tuple(_LOG.values())  # followed by a dot and the number of the rank
FIRST_NAMES = tuple(_FIRST.values())
ENDPOINTS = "log/endpoints.log"  # relative to the job's directory
MANIFEST_END = b"\n]\n"  # of the text of a manifest
OURS = ".clustertool"  # the tool's own folder inside a job directory, and inside ROOT_DIR
STEP_OUTPUT = "slurm.out"  # in the same folder: the output of srun and its tasks
IMAGES = "images"  # in the same folder of ROOT_DIR: files of images
CUT = ".cut"  # the ending of a file with what a log had before its program truncated it
STACKS = f"{OURS}/stacks.jsonl"  # of ranks that made no progress: node/jobs/stack_sampler.py
FLIGHT = f"{OURS}/flight"  # a folder with the dump of torch's flight recorder of each rank: FLIGHT/rank-3
FLIGHT_PIPE = f"{OURS}/flight-"  # followed by the rank and .pipe: torch writes its dump after a byte in it
METRICS = f"{OURS}/metrics.jsonl"  # numbers that ranks have printed: model/job/usage.py
SUPERVISOR_ERRORS = f"{OURS}/supervisor.err"  # what a supervisor writes to stderr
BUNDLE = "bundle.pyz"  # in the folder of a submitted job: what its nodes start
RELEASED = "released"  # in a job's own folder: its pod need not wait for a fetch any more
IN_POD = "pod"  # in the place of ROOT_DIR_GROUP: all that writes to the file systems of a pod is the job's own
LOGS_MARK = ".clustertool-logs"  # an empty file in a folder of the laptop that has logs or results of jobs


class JobPaths:
    """Paths of job `job` below `base`, which is ROOT_DIR, or ROOT_DIR/node<id> where nodes share ROOT_DIR."""

    def __init__(self, base: str, job: str) -> None:
        self.base, self.job = base, job
        self.dir = posixpath.join(base, "JOB" + job)
        self.ours = self.of(OURS)
        self.events = self.of(OURS, "events.jsonl")
        self.spec = self.of(OURS, "spec.json")
        self.ledger = posixpath.join(base, OURS, "jobs", job + ".json")  # node/jobs/ledger.py
        # Further names of its records: node/supervisor/log_keeper.py.
        self.kept = posixpath.join(base, OURS, "kept", job)
        self.queue = posixpath.join(queue(base), job)  # node/storage/submissions.py
        self.seen = self.of(OURS, "seen")  # every descendant ever seen: one `pid start` a line
        self.growth = self.of(OURS, "growth.jsonl")  # (time, log, size) of growing logs, one JSON list a line
        self.usage = self.of(OURS, "usage.jsonl")  # samples of what ranks use, every few seconds: model/job/usage.py
        self.control = self.of(OURS, "control")  # the supervisor's socket; a fifo in jobs of the previous version

    @classmethod
    def at(cls, job_dir: str) -> JobPaths:
        """Build the paths of the job with this directory, BASE/JOB<id>."""
        base, name = posixpath.split(job_dir)
        return cls(base, name[len("JOB") :])

    def of(self, *parts: str) -> str:
        """Join a path below the job's directory."""
        return posixpath.join(self.dir, *parts)

    def shards(self, role: str, rank: int) -> str:
        """Return the path of the file that lists the shards of a rank."""
        return self.of(OURS, f"shards-{role}-{rank}")

    @staticmethod
    def log(role: str, rank: int, attempt: int = 0) -> str:
        """Return the name of a rank's log: the path of its copy for readers, relative to the job's directory.

        That is log/workerlog.3, or log/attempt1/serverlog.0 of a later attempt.
        """
        folder = f"log/attempt{attempt}" if attempt else "log"
        return f"{folder}/{_LOG[role]}.{rank}"

    @staticmethod
    def written(log: str) -> str:
        """Return the path, relative to the job's directory, of the file that the rank itself writes. log: its name by log()."""
        return f"{OURS}/{log}"

    @staticmethod
    def error_file(role: str, rank: int) -> str:
        """Return the path, relative to the job's directory, where a rank's program may record the exception that ends it."""
        return f"{OURS}/error-{role}-{rank}.json"

    @staticmethod
    def main_file(role: str, rank: int) -> str:
        """Return the path, relative to the job's directory, where a container writes the pid of its first process."""
        return f"{OURS}/main-{role}-{rank}"

    @staticmethod
    def first_log(role: str, log: str = "log/") -> str:
        """Return the second name of a role's first log on its node, as the old tool had it: log/train.log.

        log: any log; the result is in its folder.
        """
        return f"{posixpath.dirname(log)}/{_FIRST[role]}"


def endpoints_log(endpoints: Sequence[str]) -> str:
    """Return the text of ENDPOINTS: the endpoints of all trainers, by rank."""
    return "".join(f"{line}\n" for line in ("PADDLE_TRAINER_ENDPOINTS:", *endpoints))


def is_job_id(text: str) -> bool:
    """Check for [A-Za-z0-9][A-Za-z0-9._-]{0,63}. Every id from outside passes this before it becomes a part of a path.

    It does without the module re, whose import takes long on nodes.
    """
    known = text.isascii() and all(sign.isalnum() or sign in "._-" for sign in text)
    return known and 0 < len(text) <= 64 and text[0].isalnum()


def folder_of(job: str) -> str:
    """Return the name of a job's directory, here and on nodes. Raises ValueError for what is no job id."""
    if not is_job_id(job):
        raise ValueError(f"{job!r} is no job id")
    return "JOB" + job


def base(root: str, node: int, shared: bool) -> str:
    """Return the folder of a node's job directories: its ROOT_DIR, or node<id> below a shared one."""
    return posixpath.join(root, f"node{node}") if shared else root


def is_base(name: str) -> bool:
    """Check for the name of a folder of base() below ROOT_DIR: node<id>, or "" for ROOT_DIR itself."""
    number = name[len("node") :]
    return name == "" or (number.isascii() and number.isdigit() and len(number) < 6 and name == f"node{int(number)}")


def node_of(base: str) -> Optional[int]:
    """Return the node whose jobs are in the folder node<id>; None for "", ROOT_DIR itself, which has those of any node."""
    return int(base[len("node") :]) if base else None


def queue(root: str) -> str:
    """Return the folder of submitted jobs."""
    return posixpath.join(root, OURS, "queue")


def releases(root: str) -> str:
    """Return the folder of received workspaces, one manifest for each release digest; a job gets a copy."""
    return posixpath.join(root, OURS, "releases")


def rank_home(root: str) -> str:
    """Return HOME of ranks in images whose own HOME they cannot write. It stays between jobs."""
    return posixpath.join(root, OURS, "home")
