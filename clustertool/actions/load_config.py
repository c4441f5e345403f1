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
from clustertool.model.config.hostfile import LOOPBACK, Listed, choose, hosts_of, pick, read_hostfile
from clustertool.model.config.hosts import Host, read_hosts
from clustertool.model.hints import PROGRAM
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
    """Load the cluster that is selected; its source is a note.

    start_local: without a conf.py, start the embedded cluster if necessary; else use the hosts that are stored for the selected
    job, or the embedded cluster if it runs, and this machine for jobs of this folder; these need no HOSTS in conf.py. of_hosts:
    the command, if it works on HOSTS and needs them; instead: what to do without them. conf: what read_conf() has returned, if
    it was called.
    """
    if conf is None:
        conf = read_conf(caller, selection, optional=not start_local) if not selection.here else Conf()
    known = None if start_local else _find_stored_job(selection, conf.values, conf.where)
    if known is not None and known.cluster is not None:
        found = known.cluster
        _report_source(caller, selection, f"hosts of job {known.id}, stored when it was started", found)
    elif conf.values and (start_local or conf.names_nodes or this_machine.found(Path.cwd()) is None):
        found = _read_keys(conf.values, conf.where)
        _report_source(caller, selection, conf.source, found)
        if start_local:
            _note_allocation(caller, found)
    else:
        found = _local(caller, selection, start_local, f"{conf.where} has no HOSTS" if conf.values else "none found")
    if of_hosts and not needs_hosts(found):
        what = f"{of_hosts} works on HOSTS, and the engine {found.engine} chooses the nodes itself"
        raise UsageError(
            what, instead or f"give a conf.py with HOSTS and ENGINE = {known_engines.DEFAULT!r}: --conf FILE"
        )
    return _apply_selection(selection, found)


def needs_hosts(found: Cluster) -> bool:
    """Check whether the engine runs jobs on the hosts of the cluster. Else the cluster has none."""
    return known_engines.capabilities(found.engine).needs_hosts


def _read_keys(values: Mapping[str, object], where: str) -> Cluster:
    """Read the keys of conf.py, with those of engines. Raises ConfigError."""
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
    """Check whether the engine that the keys of conf.py name needs hosts. An ENGINE that is not known counts as the default."""
    engine = str(values.get("ENGINE", ""))
    return known_engines.capabilities(engine if engine in known_engines.names() else "").needs_hosts


def _find_stored_job(selection: Selection, values: Mapping[str, object], where: str) -> StoredJob | None:
    """Find the job whose stored hosts are used in place of those of conf.py or a hostfile (`values`), None for these."""
    if selection.job is None or selection.here or selection.conf or selection.hostfile:
        return None
    if "HOSTS" not in values and _engine_needs_hosts(values):
        return job_places.without_conf(selection.job)
    return job_places.other_than(selection.job, _read_keys(values, where)) if selection.job else None


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
        """Whether they name the nodes, or an engine that chooses them."""
        return "HOSTS" in self.values or not _engine_needs_hosts(self.values)


def cluster_of_launcher(caller: Caller, selection: Selection, named: NamedNodes, folder: Path, conf: Conf) -> Cluster:
    """Choose where clusterrun runs: on the listed nodes, those of conf.py or a hostfile, or those that are mentioned.

    Else on this machine alone, in `folder`.
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
    if named.alone or not (asked or known) or _itself(asked, known if "HOSTS" in values else None):
        found = this_machine.with_job_python(this_machine.alone(folder, known))
        found = replace(
            found, hosts=tuple(host.with_slots(one) for host, one in zip(found.hosts, asked or found.hosts))
        )
        found = shell_variables.obey(found, os.environ, named.devices)
        if named.own_address:
            found = replace(found, hosts=(replace(found.hosts[0], address=named.own_address),))
        source = f"{source}, this machine alone" if source else "none found, this machine alone"
    elif asked:
        base = known or Cluster(asked, where=named.option)
        found = replace(base, hosts=pick(base.hosts, asked))
        source = ", ".join(filter(None, (source, f"nodes of {named.option}")))
        if "HOSTS" not in values:
            found = shell_variables.obey(found, os.environ, named.devices)
    else:
        assert known is not None
        found = known
    _report_source(caller, selection, source, found)
    _tell_python(caller, found)
    if not found.hosts[0].here:
        _note_allocation(caller, found)
        note = shell_variables.note(found, os.environ)
        if note:
            caller.remark(note)
    return _apply_selection(selection, found)


def cluster_of_meeting(caller: Caller, conf: Conf, nodes: int, folder: Path, devices: bool, address: str) -> Cluster:
    """Build the cluster of this machine as one of the `nodes` machines on which the same command is typed, in `folder`.

    conf: without HOSTS. devices: the command line names devices. address: for training, "" for the one on the way to the
    coordinator. ENV is that of conf.py, without variables of the shell.
    """
    known = _without_hosts(conf)
    found = this_machine.with_job_python(this_machine.alone(folder, known))
    host = replace(found.hosts[0], address=address)
    found = replace(found, hosts=(host,), env=known.env if known else ())
    caller.note(f"conf: {conf.source or 'none found'}, this machine and {count(nodes - 1, 'other')}")
    _tell_python(caller, found)
    return shell_variables.obey(found, os.environ, devices)


def _without_hosts(conf: Conf) -> Cluster | None:
    """Read the other keys of a conf.py that need not name hosts; None without one."""
    return _read_keys({"HOSTS": ["localhost"], **conf.values}, conf.where) if conf.values else None


def _itself(asked: Sequence[Host], known: Cluster | None) -> bool:
    """Check for --ips=127.0.0.1, as fleetrun calls this machine.

    It is another one if it has an ssh user or port, or conf.py has its own way there.
    """
    if len(asked) != 1 or asked[0].host not in LOOPBACK or asked[0].user or asked[0].port:
        return False
    return not (known and any(asked[0].host in (host.host, host.address) for host in known.hosts))


def read_conf(caller: Caller, selection: Selection, named: bool = False, optional: bool = False) -> Conf:
    """Read the keys of conf.py and of the hostfile. An engine that is typed and needs no hosts needs no file.

    named: the command line names the nodes. optional: the command needs no conf.py. A conf.py of another program is then left
    out, with a note. Raises UsageError, ConfigError.
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
            path, values = conf_file.read(selection.conf, keys, named, named or optional)
        except conf_file.NotNeeded as error:
            caller.remark(f"{error.what}; this command needs no conf.py, so it is left out")
    if selection.hostfile:
        values["HOSTS"] = _hostfile(selection.hostfile)
    files = [str(path)] * bool(path) + [selection.hostfile] * bool(selection.hostfile)
    if typed and (files or not known_engines.capabilities(typed).needs_hosts):
        values["ENGINE"] = typed
    return Conf(values, files[0] if files else "", ", hosts of ".join(files))


def _apply_selection(selection: Selection, found: Cluster) -> Cluster:
    """Apply --dispatch, --only and --skip. Raises ConfigError for an ssh configuration that must not be obeyed."""
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
        return replace(found, hosts=choose(found.hosts, selection.only, selection.skip))
    return found


def _report_source(caller: Caller, selection: Selection, source: str, found: Cluster) -> None:
    if not needs_hosts(found):
        caller.note(f"conf: {source or 'none found'} (engine {found.engine})")
        return
    hosts, nodes = found.hosts, count(len(found.hosts), "node")
    with contextlib.suppress(UsageError):  # raised behind this line
        hosts = choose(hosts, selection.only, selection.skip)
    part = f"{len(hosts)} of {nodes}" if len(hosts) < len(found.hosts) else nodes
    twice = [host.host for host in found.hosts if host.twin]
    again = f"; more than once: {', '.join(dict.fromkeys(twice))}" if twice else ""
    caller.note(f"conf: {source} ({part}{again})")


def _tell_python(caller: Caller, found: Cluster) -> None:
    if found.job_python:
        caller.note(f"python3: {found.job_python}")


def _note_allocation(caller: Caller, found: Cluster) -> None:
    """Report that the nodes which a scheduler gave to this shell are not those of the command."""
    engine = found.engine or known_engines.DEFAULT
    for variable in known_engines.ignored_allocations(os.environ, engine):
        caller.remark(f"the allocation of this shell ({variable}) is ignored: the engine {engine} does not use it")


def _local(caller: Caller, selection: Selection, start: bool, why: str) -> Cluster:
    """Load the embedded cluster, started if need be, and for jobs that exist this machine's own.

    Used without conf.py, or without HOSTS there (`why`).
    """
    only = selection.here
    top = None if start else this_machine.found(Path.cwd())
    embedded = None
    try:
        embedded = None if only else LocalCluster().up() if start else LocalCluster().cluster()
    except NoHome:
        if top is None:
            raise
    found, names = embedded, "the embedded local cluster"
    if top is not None:
        found, names = this_machine.alone(top), f"{top}/{OURS}"
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


def _hostfile(path: str) -> tuple[Host, ...]:
    try:
        text = Path(path).read_text(errors="replace", encoding="utf-8-sig")  # Windows may put a mark in front
    except OSError as error:
        what = f"the hostfile {path} cannot be read: {error.strerror}"
        raise ConfigError(what, "give the path of a hostfile") from None
    return read_hosts(read_hostfile(text, path), path)


def passed_variables(found: Cluster) -> tuple[tuple[str, str], ...]:
    """Read the values of PASS_ENV from the laptop's environment; names that are not set are not passed."""
    return tuple((name, os.environ[name]) for name in found.pass_env if name in os.environ)


def secrets(found: Cluster) -> dict[str, str]:
    """Read the values of SECRETS. Raises ConfigError for one that is not set: a job must not start half configured."""
    missing = [name for name in found.secrets if name not in os.environ]
    if missing:
        fix = f"export {missing[0]}=... or take it out of SECRETS"
        raise ConfigError(f"SECRETS names {missing[0]}, which is not set here", fix)
    return {name: os.environ[name] for name in found.secrets}


def known_secrets(found: Cluster) -> dict[str, str]:
    """Read those SECRETS that happen to be set here, for masking what is shown."""
    return {name: os.environ[name] for name in found.secrets if os.environ.get(name)}
