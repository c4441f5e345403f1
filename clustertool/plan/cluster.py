"""A cluster is conf.py, checked and frozen. One table names every key, its type and its default."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Mapping, Tuple

from clustertool.errors import ConfigError
from clustertool.plan.hosts import Host, read_hosts

DEVICE_KINDS = ("auto", "cpu", "gpu", "xpu", "dcu", "npu")
HOST_KEY_POLICIES = ("accept-new", "strict", "off")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Cluster:
    """Where jobs run. 0, "" and None in a field mean that conf.py does not say."""

    hosts: Tuple[Host, ...]
    root_dir: str = "~/clustertool"
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
    loss_timeout: float = 10.0
    grace: float = 10.0
    checks_off: Tuple[str, ...] = ()
    check_packages: Tuple[str, ...] = ("torch", "paddle", "numpy")
    ssh_config: str = field(default="", repr=False)  # set only by the embedded cluster: "none" ignores ~/.ssh/config
    first_path: str = ""  # set only by the embedded cluster: goes first on every process's PATH
    where: str = ""  # the conf.py it came from, or what stands for it


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def _lines(value: object) -> str:
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return "\n".join(value)
    return _text(value)


def _number(value: object) -> int:
    if isinstance(value, bool) or not re.fullmatch(r"\d+", str(value).strip()):
        raise ValueError("a whole number")
    return int(str(value))


def _port(value: object) -> int:
    port = _number(value)
    if not 0 < port < 65536:
        raise ValueError("a port, 1 to 65535")
    return port


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


def _env(value: object) -> Tuple[Tuple[str, str], ...]:
    if not isinstance(value, Mapping):
        raise ValueError('a dict such as {"NAME": "value"}')
    for name in value:
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise ValueError(f"a dict of variables; {name!r} is no variable name")
    return tuple((name, str(item)) for name, item in value.items())


def _names(value: object) -> Tuple[str, ...]:
    if isinstance(value, str):
        value = value.replace(",", " ").split()
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise ValueError("a list of names")
    return tuple(value)


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
    "PADDLE_NIC": ("nic", _text),
    "PADDLE_PORT": ("pserver_port", _port),
    "PADDLE_PORTS_NUM": ("ports_num", _number),
    "PADDLE_PORTS_NUM_FOR_SPARSE": ("ports_num_for_sparse", _number),
    "PADDLE_USE_GPU": ("use_gpu", _bool),
    "LD_LIBRARY_PATH": ("ld_library_path", _text),
    "USER": ("user", _text),
    "PORT": ("port", _port),
    "IDENTITY_FILE": ("identity_file", _text),
    "GATEWAY": ("gateway", _text),
    "CONNECT_TIMEOUT": ("connect_timeout", _seconds),
    "HOST_KEYS": ("host_keys", _one_of(*HOST_KEY_POLICIES)),
    "KNOWN_HOSTS": ("known_hosts", _text),
    "PYTHON": ("python", _text),
    "PRELUDE": ("prelude", _lines),
    "ENV": ("env", _env),
    "PASS_ENV": ("pass_env", _names),
    "SECRETS": ("secrets", _names),
    "DEVICE_KIND": ("device_kind", _one_of(*DEVICE_KINDS)),
    "START_PORT": ("start_port", _port),
    "LEAD_PORT": ("lead_port", _port),
    "RELAY": ("relay", _one_of("auto", "off")),
    "LOSS_TIMEOUT": ("loss_timeout", _seconds),
    "GRACE": ("grace", _seconds),
    "CHECKS_OFF": ("checks_off", _names),
    "CHECK_PACKAGES": ("check_packages", _names),
}


def read_cluster(values: Mapping[str, object], where: str = "conf.py") -> Cluster:
    """The capital names of conf.py -> Cluster. Raises ConfigError naming the key, its value and what is right."""
    fields: Dict[str, Any] = {"where": where, "pserver_port_given": "PADDLE_PORT" in values}
    for key, value in values.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(KEYS))}"
            raise ConfigError(f"{where}: unknown key {key} = {value!r}", f"{hint} (a name of your own: write it in small letters)")
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
    root = fields.get("root_dir", "~")
    if not (root.startswith("/") or root == "~" or root.startswith("~/")):
        raise ConfigError(f"{where}: ROOT_DIR = {root!r} is relative", "write an absolute path, or one that starts with ~/")
    for host in fields["hosts"]:
        if host.root_dir and not host.root_dir.startswith(("/", "~/")):
            raise ConfigError(f"{where}: root_dir of {host.name} is relative: {host.root_dir!r}", "write an absolute path")
    for key in ("root_dir", "python"):
        if "\n" in fields.get(key, "") or "\0" in fields.get(key, ""):
            raise ConfigError(f"{where}: {key.upper()} has a line break in it", "write it on one line")
