"""A cluster is conf.py, checked and frozen. Its fields name their keys in conf.py and how these are read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

from clustertool.errors import ConfigError
from clustertool.model.config.container_keys import read_conf
from clustertool.model.config.hosts import Host, lines, read_hosts, valid_user, variables
from clustertool.model.config.value_readers import nearest, one_of
from clustertool.model.container.container_runtimes import IMAGE_SOURCES
from clustertool.model.container.container_settings import ContainerSettings
from clustertool.model.finding import COLUMNS
from clustertool.model.masking import HIDDEN
from clustertool.model.notification import read_notify
from clustertool.model.quantities import DURATIONS, HIGHEST_PORT, seconds_of, whole

DEVICE_KINDS = ("auto", "cpu", "gpu", "xpu", "dcu", "npu")
VISIBILITIES = ("node", "own")
HOST_KEY_POLICIES = ("accept-new", "strict", "off")
CARRIERS = ("swarm", "rsync")


def _any_text(value: object) -> str:
    """Read a string. Raises ValueError, which states what is right."""
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def _user(value: object) -> str:
    """Read the name of a user that ssh accepts, or "". Raises ValueError, which states what is right."""
    text = _any_text(value)
    if text and not valid_user(text):
        raise ValueError("a user name that ssh accepts")
    return text


def _number_in_range(low: int, high: int, what: str) -> Callable[[object], int]:
    """Create a reader of a whole number, or its text, from `low` to `high`. what: describes it in the ValueError."""

    def read(value: object) -> int:
        number = whole(value.strip() if isinstance(value, str) else value, low, high)
        if number is None:
            raise ValueError(f"{what}, {low} to {high}")
        return number

    return read


_port = _number_in_range(1, HIGHEST_PORT, "a port")


def _seconds(value: object) -> float:
    """Read a duration above 0 in seconds. Raises ValueError, which states what is right."""
    found = seconds_of(value.strip() if isinstance(value, str) else value)
    if not found:
        raise ValueError(f"a duration above 0: {DURATIONS}")
    return found


def _limit(value: object) -> float:
    """Read a duration in seconds; 0: no limit. Raises ValueError, which states what is right."""
    found = seconds_of(value.strip() if isinstance(value, str) else value)
    if found is None:
        raise ValueError(f"a duration, or 0: {DURATIONS}")
    return found


def _bool(value: object) -> bool:
    """Read a bool, or a text for one; "" is False. Raises ValueError, which states what is right."""
    text = str(value).strip().lower()
    if text in ("true", "1", "yes", "on"):
        return True
    if text in ("false", "0", "no", "off", ""):
        return False
    raise ValueError('True or False (or "True", "False")')


def _list_of_names(value: object) -> Tuple[str, ...]:
    """Read a list of strings, or a text of names with commas or spaces between. Raises ValueError."""
    if isinstance(value, str):
        value = value.replace(",", " ").split()
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ValueError("a list of names")
    return tuple(value)


def _names_that(fit: Callable[[str], object], right: str) -> Callable[[object], Tuple[str, ...]]:
    """Create a reader of names that all fit. right: describes such a list in the error."""

    def read(value: object) -> Tuple[str, ...]:
        names = _list_of_names(value)
        if not all(map(fit, names)):
            raise ValueError(right)
        return names

    return read


_file_names = _names_that(
    lambda name: name.strip(".") and "/" not in name,
    'a list of names of files with lines as in .gitignore: [".gitignore"]',
)
_checks = _names_that(lambda name: name in COLUMNS, f"a list of checks: {', '.join(COLUMNS)}")
_rights = _names_that(
    lambda name: re.fullmatch(r"[a-z][a-z0-9-]*\.[a-z_]+(\..+)?", name),
    'a list of keys and options of job.toml: ["kubernetes.namespace", "container.options.--mount"]',
)


def _key(name: str, read: Callable[[object], object], default: object) -> Any:
    """Declare a field of Cluster that conf.py sets by the key `name`. read: its reader, which raises ValueError.

    The error states what is right.
    """
    return field(default=default, metadata={"key": name, "read": read})


@dataclass(frozen=True)
class Cluster:
    """The settings of conf.py: where and how jobs run. 0, "" and None in a field mean that conf.py does not set it."""

    hosts: Tuple[Host, ...] = field(metadata={"key": "HOSTS", "read": read_hosts})
    engine: str = _key("ENGINE", _any_text, "")  # what provides the nodes; "": the default of engines/known_engines.py
    root_dir: str = _key("ROOT_DIR", _any_text, "~/clustertool")
    root_dir_group: str = _key("ROOT_DIR_GROUP", one_of("trusted"), "")  # groups may write to the folders of ROOT_DIR
    nic: str = _key("PADDLE_NIC", _any_text, "")
    pserver_port: int = _key("PADDLE_PORT", _port, 7164)
    pserver_port_given: bool = False
    ports_num: int = _key("PADDLE_PORTS_NUM", _number_in_range(1, 1000, "a number of ports"), 1)
    ports_num_for_sparse: int = _key("PADDLE_PORTS_NUM_FOR_SPARSE", _number_in_range(0, 1000, "a number of ports"), 1)
    use_gpu: Optional[bool] = _key("PADDLE_USE_GPU", _bool, None)
    ld_library_path: str = _key("LD_LIBRARY_PATH", _any_text, "")
    user: str = _key("USER", _user, "")
    port: int = _key("PORT", _port, 0)
    identity_file: str = _key("IDENTITY_FILE", _any_text, "")
    gateway: str = _key("GATEWAY", _any_text, "")
    connect_timeout: float = _key("CONNECT_TIMEOUT", _seconds, 10.0)
    host_keys: str = _key("HOST_KEYS", one_of(*HOST_KEY_POLICIES), "accept-new")
    known_hosts: str = _key("KNOWN_HOSTS", _any_text, "")
    python: str = _key("PYTHON", _any_text, "python3")
    prelude: str = _key("PRELUDE", lines, "")
    env: Tuple[Tuple[str, str], ...] = _key("ENV", variables, ())
    pass_env: Tuple[str, ...] = _key("PASS_ENV", _list_of_names, ())
    secrets: Tuple[str, ...] = _key("SECRETS", _list_of_names, ())
    device_kind: str = _key("DEVICE_KIND", one_of(*DEVICE_KINDS), "auto")
    # What a rank sees; "": by its devices.
    device_visibility: str = _key("DEVICE_VISIBILITY", one_of(*VISIBILITIES), "")
    start_port: int = _key("START_PORT", _port, 0)
    lead_port: int = _key("LEAD_PORT", _port, 0)
    coordinator: str = _key("COORDINATOR", _any_text, "")  # of elastic jobs: a host that is known to stay available
    ignore_from: Tuple[str, ...] = _key("IGNORE_FROM", _file_names, ())  # whose lines keep files out of a dispatch
    relay: str = _key("RELAY", one_of("auto", "off"), "auto")
    dispatch: str = _key("DISPATCH", one_of(*CARRIERS), "swarm")  # what carries a workspace to the nodes
    container: ContainerSettings = _key("CONTAINER", read_conf, ContainerSettings())
    image_from: str = _key("IMAGE_FROM", one_of(*IMAGE_SOURCES), "registry")  # what brings an image to the nodes
    # What a job.toml may set besides the usual (workspace_rights.py).
    workspace_may_set: Tuple[str, ...] = _key("WORKSPACE_MAY_SET", _rights, ())
    # From the first machine that has joined a job until the last; None: by what starts the machines (join_file.py).
    join_timeout: Optional[float] = _key("JOIN_TIMEOUT", _seconds, None)
    loss_timeout: float = _key("LOSS_TIMEOUT", _seconds, 10.0)
    grace: float = _key("GRACE", _seconds, 10.0)
    # 0: a job that hangs is not reported; None: 600, and no program for that is sent to the nodes.
    hang_timeout: Optional[float] = _key("HANG_TIMEOUT", _limit, None)
    metrics_file: str = _key("METRICS_FILE", _any_text, "")  # on the coordinator's node, for node_exporter
    grace_given: bool = False
    checks_off: Tuple[str, ...] = _key("CHECKS_OFF", _checks, ())
    check_packages: Tuple[str, ...] = _key("CHECK_PACKAGES", _list_of_names, ("torch", "paddle", "numpy"))
    ssh_config: str = field(default="", repr=False)  # set only by the embedded cluster: "none" ignores ~/.ssh/config
    # What gets the job's notifications. It is secret: an address alone often allows to send there.
    notify: Tuple[str, ...] = field(default=(), repr=False, metadata={"key": "NOTIFY", "read": read_notify})
    first_path: str = ""  # of the embedded cluster and of this machine alone: first on every process's PATH
    job_python: str = ""  # set only by clusterrun on this machine: what python3 is for its jobs, and why
    shell_devices: str = ""  # set only by clusterrun: the variable of the shell that names the devices of all hosts
    where: str = ""  # the conf.py that was read, or a description of its replacement
    # of the engine, which checks them:
    settings: Mapping[str, object] = field(default_factory=dict, repr=False, hash=False)

    def python_of(self, host: Host) -> str:
        """Return the Python for the tool's own processes on a host: that of its entry, else PYTHON."""
        return host.python or self.python

    def prelude_of(self, host: Host) -> str:
        """Return the shell lines to run before each process on a host: those of its entry, else PRELUDE."""
        return self.prelude if host.prelude is None else host.prelude


KEYS = {each.metadata["key"]: each for each in fields(Cluster) if "key" in each.metadata}


def read_cluster(values: Mapping[str, object], where: str = "conf.py", needs_hosts: bool = True) -> Cluster:
    """Build a cluster of the capital names of conf.py; keys that are missing have the defaults.

    Raises ConfigError for an unknown key, a wrong value, missing HOSTS, and a ROOT_DIR or PYTHON that _require_absolute_roots()
    refuses. where: the file that has the values, for errors. needs_hosts: False for an engine that chooses the nodes itself;
    HOSTS may then be missing.
    """
    found: Dict[str, Any] = {
        "where": where,
        "pserver_port_given": "PADDLE_PORT" in values,
        "grace_given": "GRACE" in values,
    }
    for key, value in values.items():
        shown = HIDDEN if "NOTI" in key else repr(value)  # also of a key that is not spelled right
        if key not in KEYS:
            fix = f"{nearest(key, sorted(KEYS))} (a name of your own: write it in small letters)"
            raise ConfigError(f"{where}: unknown key {key} = {shown}", fix)
        try:
            found[KEYS[key].name] = KEYS[key].metadata["read"](value)
        except ValueError as error:
            raise ConfigError(f"{where}: {key} = {shown} is not right", f"{key} is {error}") from None
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.what}", error.fix) from None
    if "hosts" not in found and not needs_hosts:
        found["hosts"] = ()
    if "hosts" not in found:
        raise ConfigError(f"{where} has no HOSTS", 'name your machines: HOSTS = ["user@10.0.0.1", "user@10.0.0.2"]')
    cluster = Cluster(**found)
    _require_absolute_roots(cluster)
    return cluster


def _require_absolute_roots(cluster: Cluster) -> None:
    """Raise ConfigError for a ROOT_DIR, also of a host, or METRICS_FILE that begins with neither / nor ~/; ~ alone is allowed.

    And for a line break or NUL in it or in PYTHON, also in python of a host.
    """
    where = cluster.where
    roots = {"ROOT_DIR": cluster.root_dir, "METRICS_FILE": cluster.metrics_file or "~"}
    roots.update((f"root_dir of {host.name}", host.root_dir) for host in cluster.hosts if host.root_dir)
    for key, root in roots.items():
        if root != "~" and not root.startswith(("/", "~/")):
            fix = "write an absolute path, or one that starts with ~/"
            raise ConfigError(f"{where}: {key} = {root!r} is relative", fix)
    pythons = {f"python of {host.name}": host.python for host in cluster.hosts}
    for key, value in {**roots, **pythons, "PYTHON": cluster.python}.items():
        if "\n" in value or "\0" in value:
            raise ConfigError(f"{where}: {key} = {value!r} has a line break in it", "write it on one line")
