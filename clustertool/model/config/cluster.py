"""A cluster is conf.py, checked and frozen. One table has every key, its type and its default."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Mapping, Tuple

from clustertool.errors import ConfigError
from clustertool.model.config.hosts import Host, read_hosts, valid_user, variables
from clustertool.model.finding import COLUMNS
from clustertool.model.quantities import HIGHEST_PORT

DEVICE_KINDS = ("auto", "cpu", "gpu", "xpu", "dcu", "npu")
HOST_KEY_POLICIES = ("accept-new", "strict", "off")
CARRIERS = ("swarm", "rsync")


@dataclass(frozen=True)
class Cluster:
    """Where jobs run. 0, "" and None in a field mean that conf.py does not set it."""

    hosts: Tuple[Host, ...]
    root_dir: str = "~/clustertool"
    root_dir_group: str = ""  # "trusted": groups may write to the folders of ROOT_DIR
    nic: str = ""
    pserver_port: int = 7164
    pserver_port_given: bool = False
    ports_num: int = 1
    ports_num_for_sparse: int = 1
    use_gpu: "bool | None" = None
    ld_library_path: str = ""
    user: str = ""
    port: int = 0
    identity_file: str = ""
    gateway: str = ""
    connect_timeout: float = 10.0
    host_keys: str = "accept-new"
    known_hosts: str = ""
    python: str = "python3"
    prelude: str = ""
    env: Tuple[Tuple[str, str], ...] = ()
    pass_env: Tuple[str, ...] = ()
    secrets: Tuple[str, ...] = ()
    device_kind: str = "auto"
    start_port: int = 0
    lead_port: int = 0
    relay: str = "auto"
    dispatch: str = "swarm"  # what carries a workspace to the nodes: swarm or rsync
    loss_timeout: float = 10.0
    grace: float = 10.0
    checks_off: Tuple[str, ...] = ()
    check_packages: Tuple[str, ...] = ("torch", "paddle", "numpy")
    ssh_config: str = field(default="", repr=False)  # set only by the embedded cluster: "none" ignores ~/.ssh/config
    first_path: str = ""  # set only by the embedded cluster: first on every process's PATH
    where: str = ""  # the conf.py that was read, or a description of its replacement


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def _user(value: object) -> str:
    text = _text(value)
    if text and not valid_user(text):
        raise ValueError("a user name that ssh accepts")
    return text


def _lines(value: object) -> str:
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return "\n".join(value)
    return _text(value)


def _number(low: int, high: int, what: str) -> Callable[[object], int]:
    def read(value: object) -> int:
        text = str(value).strip()
        if isinstance(value, bool) or not re.fullmatch(r"\d{1,5}", text) or not low <= int(text) <= high:
            raise ValueError(f"{what}, {low} to {high}")
        return int(text)

    return read


_port = _number(1, HIGHEST_PORT, "a port")


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not re.fullmatch(r"\d+(\.\d*)?", str(value).strip()) or float(str(value)) <= 0:
        raise ValueError("a number of seconds above 0")
    return float(str(value))


def _bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).strip().lower() in ("true", "1", "yes", "on"):
        return True
    if str(value).strip().lower() in ("false", "0", "no", "off", ""):
        return False
    raise ValueError('True or False (or "True", "False")')


def _names(value: object) -> Tuple[str, ...]:
    if isinstance(value, str):
        value = value.replace(",", " ").split()
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ValueError("a list of names")
    return tuple(value)


def _checks(value: object) -> Tuple[str, ...]:
    names = _names(value)
    if not set(names) <= set(COLUMNS):
        raise ValueError(f"a list of checks: {', '.join(COLUMNS)}")
    return names


def _one_of(*allowed: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        if value not in allowed:
            raise ValueError("one of " + ", ".join(allowed))
        return str(value)

    return read


# conf.py key -> (field of Cluster, reader). A reader raises ValueError saying what is right.
KEYS: Dict[str, Tuple[str, Callable[[object], Any]]] = {
    "HOSTS": ("hosts", read_hosts),
    "ROOT_DIR": ("root_dir", _text),
    "ROOT_DIR_GROUP": ("root_dir_group", _one_of("trusted")),
    "PADDLE_NIC": ("nic", _text),
    "PADDLE_PORT": ("pserver_port", _port),
    "PADDLE_PORTS_NUM": ("ports_num", _number(1, 1000, "a number of ports")),
    "PADDLE_PORTS_NUM_FOR_SPARSE": ("ports_num_for_sparse", _number(0, 1000, "a number of ports")),
    "PADDLE_USE_GPU": ("use_gpu", _bool),
    "LD_LIBRARY_PATH": ("ld_library_path", _text),
    "USER": ("user", _user),
    "PORT": ("port", _port),
    "IDENTITY_FILE": ("identity_file", _text),
    "GATEWAY": ("gateway", _text),
    "CONNECT_TIMEOUT": ("connect_timeout", _seconds),
    "HOST_KEYS": ("host_keys", _one_of(*HOST_KEY_POLICIES)),
    "KNOWN_HOSTS": ("known_hosts", _text),
    "PYTHON": ("python", _text),
    "PRELUDE": ("prelude", _lines),
    "ENV": ("env", variables),
    "PASS_ENV": ("pass_env", _names),
    "SECRETS": ("secrets", _names),
    "DEVICE_KIND": ("device_kind", _one_of(*DEVICE_KINDS)),
    "START_PORT": ("start_port", _port),
    "LEAD_PORT": ("lead_port", _port),
    "RELAY": ("relay", _one_of("auto", "off")),
    "DISPATCH": ("dispatch", _one_of(*CARRIERS)),
    "LOSS_TIMEOUT": ("loss_timeout", _seconds),
    "GRACE": ("grace", _seconds),
    "CHECKS_OFF": ("checks_off", _checks),
    "CHECK_PACKAGES": ("check_packages", _names),
}


def read_cluster(values: Mapping[str, object], where: str = "conf.py") -> Cluster:
    """The capital names of conf.py -> Cluster. Raises ConfigError naming the key, its value and what is right."""
    fields: Dict[str, Any] = {"where": where, "pserver_port_given": "PADDLE_PORT" in values}
    for key, value in values.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(KEYS))}"
            fix = f"{hint} (a name of your own: write it in small letters)"
            raise ConfigError(f"{where}: unknown key {key} = {value!r}", fix)
        name, read = KEYS[key]
        try:
            fields[name] = read(value)
        except ValueError as error:
            raise ConfigError(f"{where}: {key} = {value!r} is not right", f"{key} is {error}") from None
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.what}", error.fix) from None
    if "hosts" not in fields:
        raise ConfigError(f"{where} has no HOSTS", 'name your machines: HOSTS = ["user@10.0.0.1", "user@10.0.0.2"]')
    _check(fields, where)
    return Cluster(**fields)


def _check(fields: Mapping[str, Any], where: str) -> None:
    roots = {"ROOT_DIR": fields.get("root_dir", "~")}
    roots.update((f"root_dir of {host.name}", host.root_dir) for host in fields["hosts"] if host.root_dir)
    for key, root in roots.items():
        if root != "~" and not root.startswith(("/", "~/")):
            raise ConfigError(
                f"{where}: {key} = {root!r} is relative", "write an absolute path, or one that starts with ~/"
            )
    for key, value in {**roots, "PYTHON": fields.get("python", "")}.items():
        if "\n" in value or "\0" in value:
            raise ConfigError(f"{where}: {key} = {value!r} has a line break in it", "write it on one line")
