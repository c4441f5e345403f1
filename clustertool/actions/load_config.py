"""This module reads conf.py, a hostfile and variables of the environment: they become a cluster and the values for its jobs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from clustertool.actions import conf_file
from clustertool.actions.conf_file import Selection
from clustertool.engines import known_engines
from clustertool.engines.caller import Caller
from clustertool.errors import ConfigError, UsageError
from clustertool.fleet import job_places, this_machine
from clustertool.fleet.embedded_cluster import LocalCluster
from clustertool.fleet.job_places import StoredJob
from clustertool.fleet.this_user import NoHome
from clustertool.model.config.cluster import CARRIERS, KEYS, Cluster, read_cluster
from clustertool.model.config.hostfile import LOOPBACK, Listed, choose_hosts, entries_for, hosts_of, read_hostfile
from clustertool.model.config.hosts import Host, read_hosts
from clustertool.model.hints import PROGRAM
from clustertool.model.masking import Hide, mask
from clustertool.model.notification import secret_parts
from clustertool.model.paths import OURS
from clustertool.model.planning import shell_variables
from clustertool.model.quantities import count
from clustertool.ssh import settings


def cluster(
    caller: Caller,
    selection: Selection,
    start_local: bool,
    of_hosts: str = "",
    instead: str = "",
    conf: Conf | None = None,
) -> Cluster:
    """Load the selected cluster, apply --dispatch, --only and --skip, and report its source as a note.

    It is that of conf.py, else the embedded one, which start_local starts if necessary. Without start_local, hosts that are
    stored for the selected job have priority, and this machine is added to the embedded cluster, if that runs, or is in its
    place, if clusterrun has started jobs in this folder or above. of_hosts: the command, if it needs HOSTS: UsageError for an
    engine without; instead: the fix. conf: what read_conf() returned, if it was called. Raises ConfigError if no hosts are
    found, or conf.py is not valid, and UsageError for options that are not possible.
    """
    if conf is None:
        conf = read_conf(caller, selection, optional=not start_local) if not selection.here else Conf()
    known = None if start_local else _find_stored_job(selection, conf.values, conf.where)
    if known is not None and known.cluster is not None:
        found = known.cluster
        _report_source(caller, selection, f"hosts of job {known.id}, stored when it was started", found)
    elif conf.values and (start_local or conf.names_nodes or this_machine.folder_of_jobs(Path.cwd()) is None):
        found = _read_keys(conf.values, conf.where)
        _report_source(caller, selection, conf.source, found)
        if start_local:
            _note_allocation(caller, found)
    else:
        why = f"{conf.where} has no HOSTS" if conf.values else "none found"
        found = _cluster_without_hosts(caller, selection, start_local, why)
    if of_hosts and not needs_hosts(found):
        what = f"{of_hosts} works on HOSTS, and the engine {found.engine} chooses the nodes itself"
        fix = f"give a conf.py with HOSTS and ENGINE = {known_engines.DEFAULT!r}: --conf FILE"
        raise UsageError(what, instead or fix)
    return _apply_selection(selection, found)


def needs_hosts(found: Cluster) -> bool:
    """Check whether the engine of a cluster runs jobs on HOSTS.

    Other engines choose the nodes, and the cluster has no hosts.
    """
    return known_engines.capabilities(found.engine).needs_hosts


def _read_keys(values: Mapping[str, object], where: str) -> Cluster:
    """Check the keys of conf.py and convert them to a cluster, with the settings of its engine. where: the file.

    HOSTS is left out where the engine chooses the nodes. Raises ConfigError for a key or value that is not valid.
    """
    keys = dict(values)
    engine = keys.get("ENGINE", "")
    if engine not in ("", *known_engines.names()):
        raise ConfigError(f"{where}: ENGINE = {engine!r} is not known", f"one of {', '.join(known_engines.names())}")
    settings: dict[str, object] = {}
    for key, name in known_engines.settings_keys().items():
        value = keys.pop(key, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {key} = {value!r} is not right", f"{key} is a dict, the settings of {name}")
        if name == (engine or known_engines.DEFAULT):
            settings = value
    if engine == known_engines.DEFAULT:
        del keys["ENGINE"]
    hosts = _engine_needs_hosts(keys)
    if not hosts:
        keys.pop("HOSTS", None)
    found = read_cluster(keys, where, hosts)
    tables = ("container", "elastic", *known_engines.names())
    for name in found.workspace_may_set:
        if name.partition(".")[0] not in tables:
            raise ConfigError(f"{where}: WORKSPACE_MAY_SET has {name!r}", f"the tables are {', '.join(tables)}")
    return replace(found, settings=settings)


def _engine_needs_hosts(values: Mapping[str, object]) -> bool:
    """Check whether the engine that the keys of conf.py name runs jobs on HOSTS.

    An unknown ENGINE counts as the default one.
    """
    engine = str(values.get("ENGINE", ""))
    return known_engines.capabilities(engine if engine in known_engines.names() else "").needs_hosts


def _find_stored_job(selection: Selection, values: Mapping[str, object], where: str) -> StoredJob | None:
    """Find the stored record of the selected job whose hosts are used in place of those of conf.py (`values`), else None.

    If conf.py names no hosts, and the engine needs them, this is any stored job, for "" the newest; else only one on other
    hosts that its id names. None also for --here, --conf, --hostfile, and commands that are about no single job. where: the
    file that has the values, for errors.
    """
    if selection.job is None or selection.here or selection.conf or selection.hostfile:
        return None
    if "HOSTS" not in values and _engine_needs_hosts(values):
        return job_places.find_without_conf(selection.job)
    return job_places.find_on_other_hosts(selection.job, _read_keys(values, where)) if selection.job else None


@dataclass(frozen=True)
class NamedNodes:
    """Nodes of a command line of clusterrun: listed by an option, mentioned as endpoints, or this machine alone."""

    listed: tuple[Listed, ...] = ()
    option: str = "--ips"
    mentioned: tuple[str, ...] = ()
    own_address: str = ""  # of this machine
    alone: bool = False
    devices: bool = False  # the command line names devices


@dataclass(frozen=True)
class Conf:
    """conf.py and the hostfile as they were read: the keys, their file, and its description. All are empty without a file."""

    values: Mapping[str, object] = field(default_factory=dict)
    where: str = ""
    source: str = ""

    @property
    def names_nodes(self) -> bool:
        """Whether conf.py or the hostfile names the nodes, or an engine that chooses them."""
        return "HOSTS" in self.values or not _engine_needs_hosts(self.values)


def cluster_of_launcher(caller: Caller, selection: Selection, named: NamedNodes, folder: Path, conf: Conf) -> Cluster:
    """Build the cluster on which clusterrun runs: the listed nodes, else those of conf.py or a hostfile, else those mentioned.

    Without any of them, for --standalone or --ips=127.0.0.1, it is this machine alone, in `folder`. Applies --dispatch, --only
    and --skip. Notes the source and python3, and remarks on an allocation or variables of the shell that are ignored. Raises
    UsageError for nodes that are named with an engine which chooses them.
    """
    values, source = conf.values, conf.source
    listed = named.listed or (() if values else named.mentioned)
    known = _without_hosts(conf) if listed or named.alone else _read_keys(values, conf.where) if values else None
    asked = hosts_of(listed, named.option) if listed else ()
    if known is not None and not needs_hosts(known):
        if asked or named.alone:
            what = f"{named.option if asked else 'this command line'} names nodes, and the engine {known.engine} chooses them"
            raise UsageError(what, f"leave that out, or add --engine {known_engines.DEFAULT}")
        _report_source(caller, selection, source, known)
        return _apply_selection(selection, known)
    if named.alone or not (asked or known) or _is_this_machine(asked, known if "HOSTS" in values else None):
        found = this_machine.with_job_python(this_machine.own_cluster(folder, known))
        slots = zip(found.hosts, asked or found.hosts)
        found = replace(found, hosts=tuple(host.with_slots(one) for host, one in slots))
        found = shell_variables.apply_to(found, os.environ, named.devices)
        if named.own_address:
            found = replace(found, hosts=(replace(found.hosts[0], address=named.own_address),))
        source = f"{source}, this machine alone" if source else "none found, this machine alone"
    elif asked:
        base = known or Cluster(asked, where=named.option)
        found = replace(base, hosts=entries_for(base.hosts, asked))
        source = ", ".join(filter(None, (source, f"nodes of {named.option}")))
        if "HOSTS" not in values:
            found = shell_variables.apply_to(found, os.environ, named.devices)
    else:
        assert known is not None
        found = known
    _report_source(caller, selection, source, found)
    _note_python(caller, found)
    if not found.hosts[0].here:
        _note_allocation(caller, found)
        note = shell_variables.describe(found, os.environ)
        if note:
            caller.remark(note)
    return _apply_selection(selection, found)


def cluster_of_meeting(caller: Caller, conf: Conf, nodes: int, folder: Path, devices: bool, address: str) -> Cluster:
    """Build the cluster of this machine as one of the `nodes` machines on which the same command is typed, in `folder`.

    conf: without HOSTS. devices: the command line names devices. address: for training, "" for the one on the way to the
    coordinator. ENV is that of conf.py, without variables of the shell. Notes the source and python3.
    """
    known = _without_hosts(conf)
    found = this_machine.with_job_python(this_machine.own_cluster(folder, known))
    host = replace(found.hosts[0], address=address)
    found = replace(found, hosts=(host,), env=known.env if known else ())
    caller.note(f"conf: {conf.source or 'none found'}, this machine and {count(nodes - 1, 'other')}")
    _note_python(caller, found)
    return shell_variables.apply_to(found, os.environ, devices)


def _without_hosts(conf: Conf) -> Cluster | None:
    """Read the keys of a conf.py as a cluster, with localhost as HOSTS if it has none; None without a conf.py."""
    return _read_keys({"HOSTS": ["localhost"], **conf.values}, conf.where) if conf.values else None


def _is_this_machine(asked: Sequence[Host], known: Cluster | None) -> bool:
    """Check whether the only node asked for is an address of the loopback, as fleetrun calls this machine.

    False if it has an ssh user or port, or if conf.py (`known`) has a host of this name or address.
    """
    if len(asked) != 1 or asked[0].host not in LOOPBACK or asked[0].user or asked[0].port:
        return False
    return not (known and any(asked[0].host in (host.host, host.address) for host in known.hosts))


def read_conf(caller: Caller, selection: Selection, named: bool = False, optional: bool = False) -> Conf:
    """Read the keys of conf.py, with the hostfile in place of HOSTS and --engine in place of ENGINE. All may be missing.

    named: the command line names the nodes. optional: the command needs no conf.py. In both cases, a conf.py of another program
    is left out, with a remark. Raises UsageError for --no-conf with --conf and for an unknown --engine, and ConfigError for a
    file that cannot be read or run.
    """
    if selection.no_conf and selection.conf:
        raise UsageError(f"{conf_file.NO_CONF} and --conf contradict each other", "leave one of them out")
    typed = selection.engine
    if typed and typed not in known_engines.names():
        raise UsageError(f"--engine {typed!r} is not known", f"one of {', '.join(known_engines.names())}")
    path: Path | None = None
    values: dict[str, object] = {}
    if not selection.no_conf:
        keys = (*KEYS, *known_engines.settings_keys())
        named = named or bool(selection.hostfile)
        try:
            path, values = conf_file.find_and_run(selection.conf, keys, named, named or optional)
        except conf_file.NotNeeded as error:
            caller.remark(f"{error.what}; this command needs no conf.py, so it is left out")
    if selection.hostfile:
        values["HOSTS"] = _hosts_of_file(selection.hostfile)
    files = [str(path)] * bool(path) + [selection.hostfile] * bool(selection.hostfile)
    if typed and (files or not known_engines.capabilities(typed).needs_hosts):
        values["ENGINE"] = typed
    return Conf(values, files[0] if files else "", ", hosts of ".join(files))


def _apply_selection(selection: Selection, found: Cluster) -> Cluster:
    """Return the cluster with --dispatch, --only and --skip applied.

    Raises UsageError for a value that is not known or has no effect with the engine, and ConfigError for an ssh configuration
    that must not be obeyed.
    """
    carrier = selection.dispatch
    if carrier not in ("", *CARRIERS):
        raise UsageError(f"--dispatch {carrier!r} is not known", f"one of {', '.join(CARRIERS)}")
    found = replace(found, dispatch=carrier or found.dispatch)
    if not needs_hosts(found):
        options = {"--hostfile": selection.hostfile, "--only": selection.only, "--skip": selection.skip}
        if known_engines.capabilities(found.engine).sends_workspace:
            options["--dispatch"] = carrier
        for option in [option for option, value in options.items() if value]:
            raise UsageError(f"{option} has no effect with the engine {found.engine}", "leave it out")
    if found.ssh_config != "none" and not all(host.here for host in found.hosts):
        settings.check()
    if selection.only or selection.skip:
        return replace(found, hosts=choose_hosts(found.hosts, selection.only, selection.skip))
    return found


def _report_source(caller: Caller, selection: Selection, source: str, found: Cluster) -> None:
    """Note where the cluster comes from, how many of its nodes are selected, and which hosts are named more than once."""
    if not needs_hosts(found):
        caller.note(f"conf: {source or 'none found'} (engine {found.engine})")
        return
    hosts, nodes = found.hosts, count(len(found.hosts), "node")
    with contextlib.suppress(UsageError):  # raised behind this line
        hosts = choose_hosts(hosts, selection.only, selection.skip)
    part = f"{len(hosts)} of {nodes}" if len(hosts) < len(found.hosts) else nodes
    twice = [host.host for host in found.hosts if host.twin]
    again = f"; more than once: {', '.join(dict.fromkeys(twice))}" if twice else ""
    caller.note(f"conf: {source} ({part}{again})")


def _note_python(caller: Caller, found: Cluster) -> None:
    """Note which python3 the jobs of this machine use, if that is known."""
    if found.job_python:
        caller.note(f"python3: {found.job_python}")


def _note_allocation(caller: Caller, found: Cluster) -> None:
    """Remark on each variable of the shell that names an allocation of a scheduler which the cluster's engine does not use."""
    engine = found.engine or known_engines.DEFAULT
    for variable in known_engines.ignored_allocations(os.environ, engine):
        caller.remark(f"the allocation of this shell ({variable}) is ignored: the engine {engine} does not use it")


def _cluster_without_hosts(caller: Caller, selection: Selection, start: bool, why: str) -> Cluster:
    """Build the cluster for a command without HOSTS: with `start` the embedded one, which is started if necessary.

    Otherwise: the embedded one, if it runs, and this machine, if clusterrun has started jobs in the current folder or above;
    with --here this machine alone. Notes the source, with `why`. Raises ConfigError if there is neither.
    """
    only = selection.here
    top = None if start else this_machine.folder_of_jobs(Path.cwd())
    embedded = None
    try:
        embedded = None if only else LocalCluster().up() if start else LocalCluster().cluster()
    except NoHome:
        if top is None:
            raise
    found, names = embedded, "the embedded local cluster"
    if top is not None:
        found, names = this_machine.own_cluster(top), f"{top}/{OURS}"
        if embedded is not None:
            here = replace(found.hosts[0], index=len(embedded.hosts))
            found, names = replace(embedded, hosts=(*embedded.hosts, here)), f"the embedded local cluster and {names}"
    if found is None and only:
        fix = "go to the folder where clusterrun was started"
        raise ConfigError("clusterrun has started no job on this machine from this folder or one above", fix)
    if found is None:
        what = "there is no conf.py here or above, and the embedded local cluster does not run"
        if selection.job:
            what = f"no hosts of a job {selection.job!r} are stored, {what}"
        raise ConfigError(what, f"write conf.py (see conf.py.example), or start it with {PROGRAM} cluster.up")
    _report_source(caller, selection, f"{why}, using {names}", found)
    return found


def _hosts_of_file(path: str) -> tuple[Host, ...]:
    """Read a hostfile as the value of HOSTS. Raises ConfigError if it cannot be read, or a line is not valid."""
    try:
        text = Path(path).read_text(errors="replace", encoding="utf-8-sig")  # Windows may put a mark in front
    except OSError as error:
        what = f"the hostfile {path} cannot be read: {error.strerror}"
        raise ConfigError(what, "give the path of a hostfile") from None
    return read_hosts(read_hostfile(text, path), path)


def passed_variables(found: Cluster) -> tuple[tuple[str, str], ...]:
    """Return (name, value) of the variables in PASS_ENV that are set in this machine's environment."""
    return tuple((name, os.environ[name]) for name in found.pass_env if name in os.environ)


def secrets(found: Cluster) -> dict[str, str]:
    """Return {name: value} of SECRETS from this machine's environment.

    Raises ConfigError if one is not set: a job must not start half configured.
    """
    missing = [name for name in found.secrets if name not in os.environ]
    if missing:
        fix = f"export {missing[0]}=... or take it out of SECRETS"
        raise ConfigError(f"SECRETS names {missing[0]}, which is not set here", fix)
    return {name: os.environ[name] for name in found.secrets}


def known_secrets(found: Cluster) -> dict[str, str]:
    """Return {name: value} of those SECRETS that are set here and not empty."""
    return {name: os.environ[name] for name in found.secrets if os.environ.get(name)}


def mask_known_secrets(found: Cluster) -> Hide:
    """Return a function that replaces NOTIFY and the values of SECRETS, as far as they are set here, in a shown text."""
    return mask([*known_secrets(found).values(), *secret_parts(found.notify)])
