"""This module has every path of a job on a node (contract, section 4). No other module builds one."""

from __future__ import annotations

import posixpath
from typing import NamedTuple

_LOG = {"trainer": "workerlog", "pserver": "serverlog", "heter": "heterlog"}
_FIRST = {"trainer": "train.log", "pserver": "server.log", "heter": "heter.log"}
OURS = ".clustertool"  # the tool's own folder inside a job directory, and inside ROOT_DIR


class JobPaths(NamedTuple):
    """Paths of job `job` below `base`, which is ROOT_DIR, or ROOT_DIR/node<id> where nodes share ROOT_DIR."""

    base: str
    job: str

    @property
    def dir(self) -> str:
        return posixpath.join(self.base, "JOB" + self.job)

    def of(self, *parts: str) -> str:
        return posixpath.join(self.dir, *parts)

    @property
    def ours(self) -> str:
        return self.of(OURS)

    @property
    def events(self) -> str:
        return self.of(OURS, "events.jsonl")

    @property
    def spec(self) -> str:
        return self.of(OURS, "spec.json")

    @property
    def ledger(self) -> str:
        """Next to the job directories: node/jobs/ledger.py."""
        return posixpath.join(self.base, OURS, "jobs", self.job + ".json")

    @property
    def seen(self) -> str:
        """Every descendant ever seen: one `pid start` a line."""
        return self.of(OURS, "seen")

    @property
    def growth(self) -> str:
        """(time, log, size) of growing logs, one JSON list a line."""
        return self.of(OURS, "growth.jsonl")

    @property
    def usage(self) -> str:
        """Samples of what ranks use, every few seconds: model/job/usage.py."""
        return self.of(OURS, "usage.jsonl")

    @property
    def control(self) -> str:
        """The fifo through which commands reach the supervisor."""
        return self.of(OURS, "control")

    @property
    def output(self) -> str:
        return self.of("output")

    def shards(self, role: str, rank: int) -> str:
        return self.of(OURS, f"shards-{role}-{rank}")

    @staticmethod
    def log(role: str, rank: int, attempt: int = 0) -> str:
        """Relative to the job's directory: log/workerlog.3, log/attempt1/serverlog.0."""
        folder = f"log/attempt{attempt}" if attempt else "log"
        return f"{folder}/{_LOG[role]}.{rank}"

    @staticmethod
    def first_log(role: str) -> str:
        """The link to the first log of a role on its node, as the old tool named it."""
        return f"log/{_FIRST[role]}"


def is_job_id(text: str) -> bool:
    """Whether it is [A-Za-z0-9][A-Za-z0-9._-]{0,63}. Every id from outside passes this before it becomes a part of a path.

    It does without the module re, whose import takes long on nodes.
    """
    known = text.isascii() and all(sign.isalnum() or sign in "._-" for sign in text)
    return known and 0 < len(text) <= 64 and text[0].isalnum()


def folder_of(job: str) -> str:
    """The name of a job's directory, here and on nodes. Raises ValueError for what is no job id."""
    if not is_job_id(job):
        raise ValueError(f"{job!r} is no job id")
    return "JOB" + job


def base(root: str, node: int, shared: bool) -> str:
    """Where a node's job directories lie below its ROOT_DIR."""
    return posixpath.join(root, f"node{node}") if shared else root


def releases(root: str) -> str:
    """Received workspaces, one manifest a release digest; a job gets a copy."""
    return posixpath.join(root, OURS, "releases")
