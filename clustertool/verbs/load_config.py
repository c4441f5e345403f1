"""This module reads files: conf.py, hostfile, job.toml and passed variables of the environment become configuration values."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clustertool.errors import ConfigError, DataError, UsageError
from clustertool.fleet import this_machine
from clustertool.fleet.dispatch.workspace import Workspace, accidents
from clustertool.fleet.dispatch.workspace import read_workspace as read
from clustertool.fleet.embedded.embedded_cluster import LocalCluster
from clustertool.model.config.cluster import CARRIERS, Cluster, read_cluster
from clustertool.model.config.hostfile import choose, pick, read_hostfile
from clustertool.model.config.job import JobSpec, Options, Toml, read_job
from clustertool.model.paths import OURS
from clustertool.model.quantities import human_bytes
from clustertool.ssh import settings
from clustertool.verbs import conf_file
from clustertool.verbs.verb import Call

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def cluster(call: Call, start_local: bool) -> Cluster:
    """The cluster of this call, after --only and --skip; prints its source.

    start_local: without a conf.py, start the embedded cluster if necessary; else use it only if it runs.
    """
    values, where, source = _named(call) if not getattr(call.given, "here", False) else ({}, "", "")
    if values:
        found = read_cluster(values, where)
        _tell(call, source, found)
    else:
        found = _local(call, start_local)
    return _chosen(call, found)


def launched(call: Call, ips: Sequence[str], mentioned: Sequence[str], alone: bool, folder: Path) -> Cluster:
    """Where clusterrun runs: the nodes of --ips, or of conf.py or a hostfile, or those that are mentioned, or else this
    machine alone, in `folder`."""
    values, where, source = _named(call)
    ips = ips or (() if values else mentioned)
    no_hosts = {"HOSTS": ["localhost"]} if ips or alone else {}  # then conf.py need not name any
    known = read_cluster({**no_hosts, **values}, where) if values else None
    if alone or not (ips or known) or _itself(ips, known if "HOSTS" in values else None):
        found = this_machine.as_shown(this_machine.alone(folder, known), os.environ)
        source = f"{source}, this machine alone" if source else "none found, this machine alone"
    elif ips:
        base = known or read_cluster({"HOSTS": list(ips)}, "--ips")
        found = replace(base, hosts=pick(base.hosts, ips))
        source = ", ".join(filter(None, (source, "nodes of --ips")))
    else:
        assert known is not None
        found = known
    _tell(call, source, found)
    return _chosen(call, found)


def _itself(ips: Sequence[str], known: Cluster | None) -> bool:
    """--ips=127.0.0.1, as fleetrun calls this machine, unless conf.py has its own way there."""
    loopback = len(ips) == 1 and ips[0] in _LOOPBACK
    return loopback and not (known and any(ips[0] in (host.host, host.address) for host in known.hosts))


def _named(call: Call) -> tuple[dict[str, object], str, str]:
    """The keys of conf.py and of the hostfile, their file, and its description; {} if there is neither."""
    given = call.given
    path, values = conf_file.read(given.conf)
    if given.hostfile:
        values["HOSTS"] = _hostfile(given.hostfile)
    files = [str(path)] * bool(path) + [given.hostfile] * bool(given.hostfile)
    return values, files[0] if files else "", ", hosts of ".join(files)


def has_conf(call: Call) -> bool:
    """Whether later commands from here will go by a conf.py."""
    return conf_file.find(call.given.conf) is not None


def _chosen(call: Call, found: Cluster) -> Cluster:
    """After --dispatch, --only and --skip. Raises ConfigError for an ssh configuration that must not be obeyed."""
    given = call.given
    carrier = getattr(given, "dispatch", "")
    if carrier not in ("", *CARRIERS):
        raise UsageError(f"--dispatch {carrier!r}", f"one of {', '.join(CARRIERS)}")
    found = replace(found, dispatch=carrier or found.dispatch)
    if found.ssh_config != "none" and not all(host.here for host in found.hosts):
        settings.check()
    if given.only or given.skip:
        return replace(found, hosts=choose(found.hosts, given.only or (), given.skip or ()))
    return found


def _tell(call: Call, source: str, found: Cluster) -> None:
    nodes = len(found.hosts)
    call.terminal.note(f"conf: {source} ({nodes} node{'s' * (nodes != 1)})")


def _local(call: Call, start: bool) -> Cluster:
    """Without conf.py: the embedded cluster, started if need be, and for jobs that exist this machine's own."""
    only = getattr(call.given, "here", False)
    top = None if start else this_machine.found(Path.cwd())
    embedded = None if only else LocalCluster().up() if start else LocalCluster().cluster()
    if embedded is None and top is None:
        if only:
            fix = "go to the folder where clusterrun was started"
            raise ConfigError("clusterrun has started no job on this machine from this folder or one above", fix)
        raise ConfigError(
            "there is no conf.py here or above, and the embedded local cluster does not run",
            "write conf.py (see conf.py.example), or start it with inv cluster.up",
        )
    if top is None:
        assert embedded is not None
        _tell(call, "none found, using the embedded local cluster", embedded)
        return embedded
    mine = this_machine.alone(top)
    if embedded is not None:
        number = len(embedded.hosts)
        mine = replace(embedded, hosts=(*embedded.hosts, replace(mine.hosts[0], index=number)))
    names = f"{top}/{OURS}" if embedded is None else f"the embedded local cluster and {top}/{OURS}"
    _tell(call, f"none found, using {names}", mine)
    return mine


def _hostfile(path: str) -> list[dict[str, Any]]:
    try:
        text = Path(path).read_text(errors="replace", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the hostfile {path} cannot be read: {error.strerror}", "give the path of a hostfile"
        ) from None
    return read_hostfile(text, path)


def job_toml(text: str) -> Toml:
    """job.toml's text -> its tables. Raises DataError with the line."""
    try:
        return dict(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"job.toml: {error}", "correct it; docs/reference.md has an example") from None


def workspace_toml(folder: Path) -> Toml:
    if not folder.is_dir():
        raise DataError(f"there is no workspace {str(folder)!r}", "give a folder: --workspace ./job")
    path = folder / "job.toml"
    if not path.is_file():
        return {}
    try:
        return job_toml(path.read_text("utf-8"))  # as TOML is, whatever the locale
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def workspace(call: Call, folder: Path) -> Workspace:
    """Walk it, and print once what is excluded."""
    found = read(folder)
    if found.left_out:
        listed = ", ".join(f"{left.path} ({left.why}, {human_bytes(left.size)})" for left in found.left_out[:8])
        more = f" and {len(found.left_out) - 8} more" if len(found.left_out) > 8 else ""
        call.terminal.note(f"left out: {listed}{more}")
    for path, size in accidents(found)[:4]:
        call.terminal.warn(f"{path} ({human_bytes(size)}) is sent too; if that is not meant, name it in .clusterignore")
    return found


def scattered(cluster: Cluster, toml: Toml) -> JobSpec | None:
    """The job of a job.toml whose shards are sent only to the nodes that read them; None where all nodes get all."""
    shards = toml.get("shards")
    if not isinstance(shards, dict) or not shards.get("only_where_read"):
        return None
    return read_job(cluster, toml, Options())


def passed(found: Cluster) -> tuple[tuple[str, str], ...]:
    """Values of PASS_ENV from the laptop's environment; names that are not set are simply not passed."""
    return tuple((name, os.environ[name]) for name in found.pass_env if name in os.environ)


def secrets(found: Cluster) -> dict[str, str]:
    """Values of SECRETS. A secret that is not set is an error: a job must not start half configured."""
    missing = [name for name in found.secrets if name not in os.environ]
    if missing:
        fix = f"export {missing[0]}=... or take it out of SECRETS"
        raise ConfigError(f"SECRETS names {missing[0]}, which is not set here", fix)
    return {name: os.environ[name] for name in found.secrets}


def one_of(call: Call, *names: str) -> str:
    """The value of an option and its aliases. Raises UsageError when two differ."""
    values = {name: getattr(call.given, name.replace("-", "_")) for name in names}
    given = {name: value for name, value in values.items() if value}
    if len(set(given.values())) > 1:
        both = " and ".join(f"--{name} {value}" for name, value in given.items())
        raise UsageError(f"{both} have different values", "they are two names of one option: give one")
    return str(next(iter(given.values()), ""))


def known_secrets(found: Cluster) -> dict[str, str]:
    """Those SECRETS that happen to be set here, for masking what is shown."""
    return {name: os.environ[name] for name in found.secrets if os.environ.get(name)}
