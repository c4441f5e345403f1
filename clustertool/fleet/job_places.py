"""This module stores the places of jobs: which hosts have the jobs that this user has started from this machine.

    state directory/jobs/<id>.json      one file per job, 0600, in a folder of this user (0700); the newest 256 of them

So later commands find a job without a conf.py, from any folder. A file has what a connection needs and the names of SECRETS,
and no environment, no command and no value of a secret. It is written whole or not at all, so two commands at once never see
half of one. A file or folder that another user can have written is refused: it decides which hosts are trusted, and a gateway
may be a command. The hosts of stored jobs take the place of HOSTS where no conf.py has them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustertool.errors import ConfigError, UsageError
from clustertool.fleet import this_machine, this_user
from clustertool.fleet.this_user import NoHome
from clustertool.model.config.cluster import KEYS, Cluster, read_cluster
from clustertool.model.config.hosts import Host, valid_host, valid_user
from clustertool.model.job.job_names import find_meant
from clustertool.model.paths import is_job_id
from clustertool.model.quantities import HIGHEST_PORT, whole
from clustertool.node.storage import files
from clustertool.node.system import path_trust
from clustertool.ssh import ownership

if TYPE_CHECKING:  # of all commands only those that start a job have one
    from clustertool.model.facts import Identity

_Content = Mapping[str, Any]  # an object of a file
_FORMAT = 1
_MOST = 256  # jobs
_LARGEST = 16 << 20  # bytes of a file; 100,000 hosts have less
# How conf.py says that nodes are reached, how long a stop may take, and the names whose values are masked in what is shown.
_REACH = """ENGINE ROOT_DIR ROOT_DIR_GROUP USER PORT IDENTITY_FILE GATEWAY CONNECT_TIMEOUT HOST_KEYS KNOWN_HOSTS PYTHON
LOSS_TIMEOUT GRACE SECRETS""".split()
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # raised for a file that is damaged
_LOCAL_FILES = ("IDENTITY_FILE", "KNOWN_HOSTS")
_TEXTS = ("host", "user", "address", "root_dir", "python", "identity_file", "name")  # fields of a host
_FIX = "remove what is not yours, or correct it (chown, chmod go-w); or name the hosts: --conf FILE, --hostfile FILE"


@dataclass(frozen=True)
class StoredJob:
    """A job and where it runs or ran, as its file has it.

    cluster: of the content, once with_cluster() has checked it; None for the embedded local cluster, whose addresses change.
    """

    id: str
    asked: str
    name: str
    created: float
    content: _Content
    cluster: Cluster | None = None

    @property
    def reach(self) -> tuple[object, ...]:
        """The hosts and how they are reached: two jobs with the same are in one place."""
        return tuple(self.content.get(part) for part in ("hosts", "keys", "settings"))

    @property
    def here(self) -> bool:
        """Whether it runs on this machine alone."""
        return self.cluster is not None and [host.here for host in self.cluster.hosts] == [True]

    def with_cluster(self) -> StoredJob | None:
        """Return the job with its cluster, None where its hosts are damaged. To check those of all files would take long."""
        try:
            return replace(self, cluster=_to_cluster(self.id, self.content))
        except _DAMAGED:
            return None


class JobPlaces:
    """The stored jobs of this user. `directory`: by default below the user's state directory."""

    def __init__(self, directory: Path | None = None) -> None:
        self._dir = (directory or this_user.jobs_folder()).absolute()

    def store(self, identity: Identity, cluster: Cluster) -> None:
        """Write the file of a job that has been started, and remove the oldest files, until 256 are left.

        Raises OSError if it cannot be written, and ConfigError where another user can write the folder.
        """
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_dir()
        about = {"asked": identity.asked, "name": identity.name, "created": identity.created}
        value = {"format": _FORMAT, "id": identity.job_id, **about, **_to_content(cluster)}
        files.replace(str(self._path(identity.job_id)), json.dumps(value, default=str).encode(), durable=False)
        for path in this_user.job_files_by_age(self._dir)[:-_MOST]:
            path.unlink(missing_ok=True)

    def find(self, text: str) -> StoredJob | None:
        """Find the stored job that `text` names: by id or name the newest one, else by a unique prefix of its id; else None.

        None, too, where its hosts are damaged. Raises ConfigError where another user can write the folder or a file, and
        UsageError for a prefix of jobs in several places; of several in one place it returns the newest.
        """
        for entry in self._read_files([self._path(text)] if is_job_id(text) else []):
            if not entry.asked:  # an id that the tool has made: no other job is meant
                return entry.with_cluster()
        stored = self._read_files(this_user.job_files(self._dir))
        found = find_meant(text, stored, lambda entry: (entry.id, entry.asked, entry.name))
        if any(entry.reach != found[0].reach for entry in found):
            listed = ", ".join(entry.id for entry in found[:8])
            raise UsageError(f"--job {text!r} is not unique: {listed}", "write more of it")
        return found[0].with_cluster() if found else None

    def newest(self) -> StoredJob | None:
        """Return the job whose file was written last; None where there is no file, or a damaged one.

        Raises ConfigError where another user can write the folder or the file.
        """
        for entry in self._read_files(this_user.job_files_by_age(self._dir)[-1:]):
            return entry.with_cluster()
        return None

    def forget(self, jobs: Iterable[str]) -> None:
        """Remove the files of these jobs, as far as they can be removed."""
        for job in filter(is_job_id, jobs):
            with contextlib.suppress(OSError):
                self._path(job).unlink()

    def _path(self, job: str) -> Path:
        return self._dir / f"{job}{this_user.JOB_FILE_END}"

    def _check_dir(self) -> None:
        """Raise ConfigError if another user can write the folder, or replace it."""
        wrong = path_trust.unsafe(str(self._dir))
        if wrong:
            raise ConfigError(f"the stored hosts of jobs are not used: {wrong.what}", _FIX)

    def _read_files(self, paths: Sequence[Path]) -> list[StoredJob]:
        """Read these files, of which only what names the job is checked, and return them with the newest job first.

        A file that is damaged, of a newer version or of another job is left out. Raises ConfigError where another user can
        write one.
        """
        if paths:
            self._check_dir()
        found: list[StoredJob] = []
        for path in paths:
            with contextlib.suppress(OSError, *_DAMAGED):
                entry = _read_content(json.loads(self._read_own_file(path)))
                if entry.id == this_user.job_of_file(path):
                    found.append(entry)
        return sorted(found, key=lambda entry: (entry.created, entry.id), reverse=True)

    @staticmethod
    def _read_own_file(path: Path) -> bytes:
        """Read a file. Raises ConfigError if another user can have written it, OSError for what is no file."""
        with open(files.open_file(str(path)), "rb") as file:
            problem = ownership.problem(file.fileno(), os.fstat(file.fileno()))
            if problem:
                raise ConfigError(f"the stored hosts of jobs are not used: {path} {problem}", _FIX)
            return file.read(_LARGEST)


def _to_content(cluster: Cluster) -> dict[str, object]:
    """Convert a cluster to what its file has: {"keys": of conf.py, "hosts": fields of each, "settings": of the engine, if any}.

    The keys are those about connections, stops and SECRETS whose values differ from the defaults. Paths of local files become
    absolute. Returns {} for the embedded cluster.
    """
    if cluster.ssh_config == "none":
        return {}
    keys: dict[str, object] = {}
    for key in _REACH:
        field = KEYS[key]
        value = getattr(cluster, field.name)
        if value != field.default:
            keys[key] = os.path.abspath(this_user.expand_home(value)) if key in _LOCAL_FILES else value
    hosts = [{name: getattr(host, name) for name in (*_TEXTS, "port", "twin", "here")} for host in cluster.hosts]
    for host in hosts:
        host["identity_file"] = host["identity_file"] and os.path.abspath(this_user.expand_home(host["identity_file"]))
    settings = {"settings": dict(cluster.settings)} if cluster.settings else {}
    return {"keys": keys, "hosts": hosts, **settings}


def _read_content(value: _Content) -> StoredJob:
    """Build the stored job of a file's content, without its cluster.

    Raises ValueError for another format; ValueError, KeyError, TypeError or AttributeError for damaged content.
    """
    if value["format"] != _FORMAT:
        raise ValueError(value["format"])
    return StoredJob(str(value["id"]), str(value["asked"]), str(value["name"]), float(value["created"]), value)


def _to_cluster(job: str, value: _Content) -> Cluster | None:
    """Build the cluster of a file's content; None where it has no hosts (embedded cluster).

    If the only host is this machine, it is that of own_cluster(), with the stored engine, settings and SECRETS. Raises
    ValueError, KeyError, TypeError or AttributeError for damaged content.
    """
    if "hosts" not in value:
        return None
    hosts = tuple(_to_host(index, each) for index, each in enumerate(value["hosts"]))
    keys = {key: value["keys"][key] for key in _REACH if key in value["keys"]}
    try:
        known = read_cluster({**keys, "HOSTS": ["localhost"]}, f"the hosts of job {job}")
        known = replace(known, settings={**value.get("settings", {})})
    except ConfigError as error:
        raise ValueError(error.what) from None
    if len(hosts) == 1 and hosts[0].here:
        here = this_machine.own_cluster(Path(hosts[0].root_dir).parent)
        return replace(here, secrets=known.secrets, engine=known.engine, settings=known.settings)
    return replace(known, hosts=hosts)


def _to_host(index: int, value: _Content) -> Host:
    """Build the host with this index from its stored fields. Raises ValueError or KeyError if one is wrong or missing."""
    texts = {name: value.get(name, "") for name in _TEXTS}
    port, twin = whole(value["port"], 0, HIGHEST_PORT), whole(value["twin"], 0, 1 << 20)
    right = all(isinstance(text, str) for text in texts.values()) and port is not None and twin is not None
    right = right and valid_host(texts["host"]) and (not texts["user"] or valid_user(texts["user"]))
    right = right and (not texts["address"] or valid_host(texts["address"]))
    root = texts["root_dir"]
    right = right and (root in ("", "~") or root.startswith(("/", "~/")))
    if not right or {"\n", "\0"} & set(root + texts["python"]):
        raise ValueError(value)
    return Host(index, **texts, port=port or 0, twin=twin or 0, here=value["here"] is True)


# -- for commands ------------------------------------------------------------------------------------------------------


def remember(identity: Identity, cluster: Cluster, warn: Callable[[str], None]) -> None:
    """Store the hosts of a job that has been started or queued. warn: gets a message if this fails."""
    try:
        JobPlaces().store(identity, cluster)
    except (OSError, ConfigError) as error:
        why = error.what if isinstance(error, ConfigError) else f"{error.filename}: {error.strerror}"
        warn(f"the hosts of this job are not stored ({why}): later commands need a conf.py or --hostfile")


def forget(jobs: Iterable[str]) -> None:
    """Remove the stored files of these jobs. Does nothing for a user without a home folder."""
    with contextlib.suppress(NoHome):
        JobPlaces().forget(jobs)


def find_on_other_hosts(job: str, conf: Cluster) -> StoredJob | None:
    """Find the stored job with this id that ran with another engine than `conf`, or on hosts which `conf` lacks; else None.

    Only a complete id that the tool has made can mean a job of other hosts. Other ids and names may exist on both, and conf.py
    goes first.
    """
    found = None
    with contextlib.suppress(ConfigError):  # conf.py is enough
        found = JobPlaces().find(job)
    if found is None or found.cluster is None or found.id != job or found.asked or not _hosts_differ(found, True):
        return None
    entries = {host.entry for host in conf.hosts}
    if conf.engine != found.cluster.engine:
        return found
    return None if entries.issuperset(host.entry for host in found.cluster.hosts) else found


def find_without_conf(job: str) -> StoredJob | None:
    """Find the stored job that `job` names, for "" the one stored last. Raises what JobPlaces.find() raises.

    None where there is none, or where a command without conf.py finds the job by itself: a job of the embedded local cluster,
    or of this machine in this folder or one above.
    """
    found = None
    with contextlib.suppress(NoHome):
        found = JobPlaces().find(job) if job else JobPlaces().newest()
    return found if found is not None and _hosts_differ(found, bool(job)) else None


def _hosts_differ(job: StoredJob, named: bool) -> bool:
    """Check whether the job's hosts differ from those that a command in this folder uses without a conf.py.

    False for a job of the embedded cluster, and for one of this machine if this folder, or one above, has jobs: where the user
    named the job, it must be the folder of this job.
    """
    if job.cluster is None:
        return False
    top = this_machine.folder_of_jobs(Path.cwd()) if job.here else None
    return top is None or (named and job.cluster.root_dir != this_machine.host_in_folder(top).root_dir)
