"""This module names and labels the objects of a job.

An object has the whole id and the owner's name as annotations: a label holds 63 characters of a small alphabet, so labels have
their hashes.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Dict, Mapping, NamedTuple

from clustertool.model.kubernetes.api_objects import fields, text
from clustertool.model.paths import is_job_id

PREFIX = "ct-"
JOB_LABEL, OWNER_LABEL = "clustertool/job", "clustertool/owner"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"  # of Kueue, for the queue that admits a workload
JOB_ID, OWNER, ABOUT = "clustertool/job-id", "clustertool/owner", "clustertool/about"  # annotations
LONGEST_NAME = 40  # characters of a name: what controllers and roles append must fit 63
_HASH = 8  # characters of a hash in a name
_LABEL_HASH = 20
_MOST_ABOUT = 64 << 10  # characters
_MOST = 1e11  # of a number


class JobAbout(NamedTuple):
    """What the objects of a job state about it before a node has a record.

    asked: the id of --job-id. created: seconds since the epoch, by the clock of the machine that has submitted it.
    """

    name: str = ""
    asked: str = ""
    command: str = ""
    mode: str = ""
    nodes: int = 0
    created: float = 0.0
    dialect: str = ""


def object_name(job: str) -> str:
    """Build a DNS label of a job id, at most 40 characters: `ct-` and the id in lower case, with - for other characters.

    It has a hash of the id at its end if that changes or cuts the id.
    """
    wanted = PREFIX + job
    name = re.sub(r"[^a-z0-9-]", "-", wanted.lower())
    if name == wanted and len(name) <= LONGEST_NAME and not name.endswith("-"):
        return name
    return f"{name[: LONGEST_NAME - _HASH - 1].rstrip('-')}-{_short_hash(job, _HASH)}"


def job_hash(job: str) -> str:
    """Return the hash of a job id, which is the value of JOB_LABEL."""
    return _short_hash(job, _LABEL_HASH)


def owner_hash(owner: str) -> str:
    """Return the hash of an owner's name, which is the value of OWNER_LABEL."""
    return _short_hash(owner, _LABEL_HASH)


def labels(job: str, owner: str) -> Dict[str, str]:
    """Build the labels of each object of a job."""
    return {JOB_LABEL: job_hash(job), OWNER_LABEL: owner_hash(owner)}


def job_label(of: Mapping[str, object]) -> str:
    """Return the job's hash in the labels of an object; "" without one."""
    return text(fields(fields(of, "metadata"), "labels"), JOB_LABEL)


def annotations_of_job(job: str, owner: str, about: JobAbout) -> Dict[str, str]:
    """Build the annotations of the workload of a job."""
    return {JOB_ID: job, OWNER: owner, ABOUT: json.dumps(about._asdict(), sort_keys=True)}


def job_of(workload: Mapping[str, object]) -> str:
    """Return the job id in an object's annotations; "" if there is none, or the label is not its hash."""
    metadata = fields(workload, "metadata")
    job = fields(metadata, "annotations").get(JOB_ID)
    if not isinstance(job, str) or not is_job_id(job) or fields(metadata, "labels").get(JOB_LABEL) != job_hash(job):
        return ""
    return job


def about_of(workload: Mapping[str, object]) -> JobAbout:
    """Parse the annotation ABOUT of a workload. Fields that are absent or of another type have their defaults."""
    written = fields(fields(workload, "metadata"), "annotations").get(ABOUT)
    try:
        found = json.loads(written) if isinstance(written, str) and len(written) <= _MOST_ABOUT else {}
    except (ValueError, RecursionError):
        found = {}
    if not isinstance(found, dict):
        return JobAbout()
    return JobAbout(
        text(found, "name"),
        text(found, "asked"),
        text(found, "command"),
        text(found, "mode"),
        int(_bounded_number(found, "nodes")),
        _bounded_number(found, "created"),
        text(found, "dialect"),
    )


def _bounded_number(found: Mapping[str, object], name: str) -> float:
    """Return a number from 0 to 1e11 in a field; 0.0 for another value."""
    value = found.get(name)
    return float(value) if type(value) in (int, float) and 0 <= value < _MOST else 0.0  # type: ignore[operator, arg-type]


def _short_hash(text: str, length: int) -> str:
    """Return the first `length` digits of the text's SHA-256 in hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:length]
