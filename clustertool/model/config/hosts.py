"""A host is one entry of HOSTS. Its position is its node id. A bad entry is a ConfigError."""

from __future__ import annotations

import ipaddress
import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple, TypeVar

from clustertool.errors import ConfigError
from clustertool.model import roles
from clustertool.model.quantities import HIGHEST_PORT, whole

T = TypeVar("T")
_RANGE = re.compile(r"\[([0-9,/\-]+)\]")
_MOST = 100_000  # hosts of one entry
_NO_HOST = re.compile(r"""['`"$\\;&<>|(){},\s\x00-\x1f\x7f]""")
_NO_USER = re.compile(r"""['`";&<>|(){}\x00-\x1f\x7f]|\s-|\\$""")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FIX = 'write "[user@]host[:port]", a range "node[1-40]", IPv6 "[fe80::1]:22", or a dict with at least "host"'
_KEYS = "host user port address devices nproc slots roles env root_dir python prelude interface identity_file".split()


@dataclass(frozen=True)
class Host:
    """One node, as an entry of HOSTS. "", 0 and None: not given, so conf.py's key for all, ssh or the node's probe decides.

    index: its position in the plan. member: its number in an elastic job, which stays the same where positions change. base:
    the parent of the job's directory, where it is known before the plan. conf_entry: its `entry`, where this object was made
    of what the node itself knows. chosen: the devices or slots that --only and --skip have left of it. listed: what names it, a
    hostfile or an option.
    """

    index: int
    host: str
    user: str = ""
    port: int = 0
    address: str = ""
    devices: Optional[Tuple[int, ...]] = None
    nproc: Optional[int] = None
    slots: Optional[Tuple[int, ...]] = None  # of a hostfile: one process each; slot 3 is on the node's device 3
    roles: Optional[Tuple[Tuple[str, Optional[int]], ...]] = None
    env: Tuple[Tuple[str, str], ...] = ()
    root_dir: str = ""
    python: str = ""
    prelude: Optional[str] = None  # "": none here
    interface: str = ""
    identity_file: str = ""
    name: str = ""
    twin: int = 0  # how many entries before this one name the same account and machine
    here: bool = False  # this machine itself: no ssh
    member: Optional[int] = None
    base: str = ""
    conf_entry: str = ""
    chosen: Optional[Tuple[int, ...]] = None
    listed: str = field(default="HOSTS", compare=False)

    @property
    def node_id(self) -> int:
        """The number by which records know it: its number in an elastic job, else its position."""
        return self.index if self.member is None else self.member

    @property
    def entry(self) -> str:
        """The text by which later commands find this node: its entry in conf.py, USER@HOST:PORT.

        #N is added for the Nth further entry of the same account and machine. `conf_entry` has priority.
        """
        own = f"{self.user}@{self.host}:{self.port}" + (f"#{self.twin}" if self.twin else "")
        return self.conf_entry or own

    def on_slots(self, devices: Tuple[int, ...]) -> Tuple[int, ...]:
        """Select the node's devices that belong to the host's slots; all of them without slots.

        More slots than devices share them in turns.
        """
        if self.slots is None or not devices:
            return devices
        return tuple(dict.fromkeys(devices[slot % len(devices)] for slot in self.slots))

    def with_slots(self, other: Host) -> Host:
        """Return this host with as many slots as `other` has, one trainer each; unchanged if that has none."""
        return self.limited_to(len(other.slots)) if other.slots is not None else self

    def limited_to(self, slots: int) -> Host:
        """Return this host with its first `slots` slots, one trainer each, in place of numbers of trainers that it had.

        It gets slots 0, 1, ... where it has none, or too few. Of its devices, it keeps the first `slots`.
        """
        first = self.slots[:slots] if self.slots is not None and len(self.slots) >= slots else tuple(range(slots))
        others = self.roles and tuple((role, None if role == "trainer" else number) for role, number in self.roles)
        return replace(self, slots=first, nproc=slots, roles=others, devices=self.devices and self.devices[:slots])

    def plays(self, role: str) -> bool:
        """Check whether HOSTS gives this host the role; a host without roles has all."""
        return self.roles is None or role in dict(self.roles)

    def count(self, role: str) -> Optional[int]:
        """Return the number of processes of `role` that HOSTS places on this host, None if it has no number."""
        return dict(self.roles or ()).get(role)


def valid_host(name: str) -> bool:
    """Check for a host name or address that ssh accepts (valid_hostname() of OpenSSH): nothing in it is for a shell."""
    return bool(name) and not name.startswith("-") and not _NO_HOST.search(name)


def valid_user(name: str) -> bool:
    """Check for a user name that ssh accepts (valid_ruser() of OpenSSH).

    It may have spaces, $ and backslashes: quote it in a command.
    """
    return bool(name) and not name.startswith("-") and not _NO_USER.search(name)


def read_hosts(value: object, listed: str = "HOSTS") -> Tuple[Host, ...]:
    """Read HOSTS of conf.py, or the list of an option, as hosts with node ids.

    listed: the name of what has the list, HOSTS or the option, for errors. Raises ConfigError for another value, an empty list,
    and a wrong entry, which it names.
    """
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{listed} is {value!r}, not a list", _FIX)
    found = [host for entry in value for host in _read_listed(entry, listed)]
    if not found:
        raise ConfigError(f"{listed} is empty", 'name at least one machine: HOSTS = ["user@10.0.0.1"]')
    return numbered(found)


def _read_listed(entry: object, listed: str) -> List[Host]:
    """Read an entry of a list, which may have ranges; a Host is returned as it is. listed: see read_hosts()."""
    if isinstance(entry, Host):
        return [entry]
    shown = entry["host"] if listed != "HOSTS" and isinstance(entry, dict) else entry
    return [replace(host, listed=listed) for host in read_entry(entry, f"{listed} has {shown!r}")]


def numbered(hosts: Sequence[Host]) -> Tuple[Host, ...]:
    """Return the hosts with node ids, unique display names, and their numbers among entries of the same account and machine.

    The name is its host, with port or id where two are alike.
    """
    plain = [host.host for host in hosts]
    ported = [f"{host.host}:{host.port}" if host.port else host.host for host in hosts]
    seen: Counter[Tuple[str, str, int]] = Counter()
    found = []
    for index, (host, short, long) in enumerate(zip(hosts, plain, ported)):
        name = short if plain.count(short) == 1 else long if ported.count(long) == 1 else f"{long}#{index}"
        entry = (host.user, host.host, host.port)
        found.append(replace(host, index=index, name=name, twin=seen[entry]))
        seen[entry] += 1
    return tuple(found)


def read_entry(entry: object, place: str) -> List[Host]:
    """Read an entry of HOSTS, a text or a dict, which may have ranges, as hosts without node ids.

    In a dict, user, port and address have priority over those in its host. Raises ConfigError, which begins with `place`, for a
    wrong text, an unknown or wrong key, no host, and one address for several hosts.
    """
    if isinstance(entry, str):
        return _parse_text(entry, place)
    if not isinstance(entry, dict):
        raise ConfigError(f"{place}, which is no text and no dict", _FIX)
    unknown = sorted(str(key) for key in entry if key not in _KEYS)
    if unknown:
        known = ", ".join(sorted(_KEYS))
        raise ConfigError(f"{place}: unknown key {unknown[0]!r}", f"known keys: {known}")
    line = entry.get("host")
    if not isinstance(line, str) or not line:
        raise ConfigError(f"{place}, which has no host", _FIX)
    given = _read_other_keys(entry, place)
    hosts = _parse_text(line, place)
    if len(hosts) > 1 and given.address:
        raise ConfigError(f"{place}, which gives one address to {len(hosts)} hosts", "write one entry per host")
    return [
        replace(
            given, host=h.host, user=given.user or h.user, port=given.port or h.port, address=given.address or h.address
        )
        for h in hosts
    ]


def _read_other_keys(entry: Dict[str, object], place: str) -> Host:
    """Build a host of the keys of a dict entry other than host, checked one by one.

    place: see read_entry(). Raises ConfigError for a wrong value, and for nproc and slots together.
    """

    def text(key: str) -> str:
        value = entry.get(key, "")
        if not isinstance(value, str):
            raise ConfigError(f"{place}: {key} is {value!r}, not a string", f'write {key} in quotes: "{key}": "..."')
        return value

    def number(key: str) -> Optional[int]:
        return None if entry.get(key) is None else _read_positive(entry[key], f"{place}: {key}")

    nproc, slots = number("nproc"), number("slots")
    if slots is not None and nproc is not None:
        raise ConfigError(f"{place}, which gives nproc and slots", "give one of them")
    user, address = text("user"), text("address")
    if (user and not valid_user(user)) or (address and not valid_host(address)):
        raise ConfigError(f"{place}: user or address has characters that ssh does not allow", _FIX)

    def read(key: str, reader: Callable[[object], T], default: T) -> T:
        try:
            return reader(entry[key]) if key in entry else default
        except ValueError as error:
            raise ConfigError(f"{place}: {key} is {entry[key]!r}", f"{key} is {error}") from None

    return Host(
        index=0,
        host="",
        user=user,
        address=address,
        root_dir=text("root_dir"),
        python=text("python"),
        prelude=read("prelude", lines, None),
        interface=text("interface"),
        identity_file=text("identity_file"),
        port=_read_port(entry["port"], place) if "port" in entry else 0,
        devices=device_ids(entry["devices"], f"{place}: devices") if "devices" in entry else None,
        nproc=nproc if slots is None else slots,
        slots=None if slots is None else tuple(range(slots)),
        roles=_read_roles(entry["roles"], place) if "roles" in entry else None,
        env=read("env", variables, ()),
    )


def _parse_text(line: str, place: str) -> List[Host]:
    """Parse "[user@]host[:port]" with ranges to hosts.

    As for ssh, the last @ ends the user, and ssh:// may be in front. place: see read_entry(). Raises ConfigError for a wrong
    user, host, range or port.
    """
    line = line.strip()
    if line.startswith("ssh://"):
        line = line[len("ssh://") :].rstrip("/")
    user, at, rest = line.rpartition("@")
    if at and not valid_user(user):
        raise ConfigError(f"{place}: {user!r} is no user name", _FIX)
    names, port = _split_port(rest, place)
    hosts = []
    for name in names:
        literal = is_address(name)
        if not valid_host(name) or not literal and not _is_name(name):
            raise ConfigError(f"{place}: {name!r} is no host name", _FIX)
        hosts.append(Host(index=0, host=name, user=user, port=port, address=name if literal else ""))
    return hosts


def _is_name(name: str) -> bool:
    """Check that a text can be the name of a host: no part of a pattern, and no incomplete address.

    Brackets and colons have a meaning in HOSTS; what consists of digits and dots is an address.
    """
    return not re.search(r"[\[\]:]", name) and not re.fullmatch(r"[0-9]*\.[0-9.]*", name)


def _split_port(rest: str, place: str) -> Tuple[List[str], int]:
    """Split "host:port" or "[IPv6]:port", and expand ranges: (names, port), port 0 if there is none. Raises ConfigError.

    place: see read_entry().
    """
    inside, closed, tail = rest[1:].partition("]")
    if rest.startswith("[") and (":" in inside or is_address(inside)):  # `ssh -G` prints 10.0.0.1 as [10.0.0.1]
        if not closed or (tail and not tail.startswith(":")):
            raise ConfigError(f"{place}: the bracket of the address is not closed", _FIX)
        names, port = [inside], tail[1:] if tail else ""
        if not is_address(inside) or (tail and not port):
            raise ConfigError(f"{place}: {inside!r} is no IPv6 address", _FIX)
    elif rest.count(":") > 1:
        names, port = [rest], ""
    else:
        host, colon, port = rest.partition(":")
        if colon and not port:
            raise ConfigError(f"{place}: no port after ':'", _FIX)
        try:
            names = expand(host)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error.what}", error.fix) from None
    return names, _read_port(port, place) if port else 0


def expand(pattern: str) -> List[str]:
    """Expand "node[01-03,7]" to node01 node02 node03 node7; several brackets multiply.

    "node[0-8/2]" has a step, as in ClusterShell: node0 node2 node4 node6 node8. Raises ConfigError for a wrong range, and more
    than 100,000 names.
    """
    split = _RANGE.split(pattern)  # text, range, text, range, ..., text
    parts = [_expand_numbers(text, pattern) if number % 2 else [text] for number, text in enumerate(split)]
    if math.prod(len(part) for part in parts) > _MOST:
        raise ConfigError(f"{pattern!r} names too many hosts", _FIX)
    return ["".join(combination) for combination in itertools.product(*parts)]


def _expand_numbers(text: str, pattern: str) -> List[str]:
    """Expand the ranges in brackets, "01-03,7", to numbers as texts. Raises ConfigError, which shows `pattern`."""
    found: List[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?:/(\d+))?)?", part)
        if not match:
            fix = 'write "node[1-40]", "node[1-3,7]" or "node[0-8/2]"'
            raise ConfigError(f"{pattern!r}: {part!r} is no range", fix)
        low, high = match.group(1), match.group(2) or match.group(1)
        if int(high) < int(low) or int(high) - int(low) > _MOST:
            raise ConfigError(f"{pattern!r}: the range {part!r} runs backwards or is too long", 'write "node[1-40]"')
        step = whole(match.group(3) or "1", 1, _MOST)
        if step is None:
            raise ConfigError(f"{pattern!r}: the step of {part!r} is not right", f"a number from 1 to {_MOST}")
        width = len(low) if low.startswith("0") else 0
        found += [str(n).zfill(width) for n in range(int(low), int(high) + 1, step)]
    return found


def is_address(text: str) -> bool:
    """Check for a literal IPv4 or IPv6 address (a zone such as fe80::1%eth0 allowed)."""
    try:
        ipaddress.ip_address(text.split("%")[0])
    except ValueError:
        return False
    return True


def device_ids(value: object, what: str) -> Tuple[int, ...]:
    """Read the ids of devices from "0,1", 3 or [0, 1], in this order.

    what: the name of the option or key that has them. Raises ConfigError, which begins with it, for another value, and for an
    id named twice.
    """
    if isinstance(value, str):
        items: Sequence[object] = [item.strip() for item in value.split(",") if item.strip()]
    elif isinstance(value, int) and not isinstance(value, bool):
        items = [value]
    elif isinstance(value, (list, tuple)):
        items = value
    else:
        raise ConfigError(f"{what} is {value!r}, not a list of device numbers", "write [0, 1]")
    ids: List[int] = []
    for item in items:
        number = whole(item, 0, 99999)
        if number is None:
            raise ConfigError(f"{what}: {item!r} is no device number", "write [0, 1]")
        ids.append(number)
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{what} names a device twice: {value!r}", "name every device once")
    return tuple(ids)


def _read_port(value: object, place: str) -> int:
    """Read a port. Raises ConfigError, which begins with `place`."""
    port = whole(value, 1, HIGHEST_PORT)
    if port is None:
        raise ConfigError(f"{place}: {value!r} is no port", f"a port is a number from 1 to {HIGHEST_PORT}")
    return port


def _read_positive(value: object, what: str) -> int:
    """Read a whole number from 1 to 99999. Raises ConfigError, which begins with `what`."""
    number = whole(value, 1, 99999)
    if number is None:
        raise ConfigError(f"{what} is {value!r}, which is not valid", "a whole number from 1 to 99999")
    return number


def _read_roles(value: object, place: str) -> Tuple[Tuple[str, Optional[int]], ...]:
    """Convert a list of roles, or a dict {role: number}, to pairs (role, number); the number is None in a list.

    place: see read_entry(). Raises ConfigError for another type, an unknown role, one that is named twice, and a wrong number.
    """
    fix = 'write roles as ["pserver", "trainer", "heter"] or {"pserver": 1, "trainer": 2}'
    pairs: List[Tuple[object, object]]
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, (list, tuple)):
        pairs = [(name, None) for name in value]
    else:
        raise ConfigError(f"{place}: roles is {value!r}, not a list or a dict", fix)
    found: List[Tuple[str, Optional[int]]] = []
    for name, number in pairs:
        role = roles.find_role(str(name), roles.RANKS)
        if not role:
            raise ConfigError(f"{place}: {name!r} is no role", fix)
        if role in dict(found):
            raise ConfigError(f"{place}, which names the role {role} twice", "name every role once")
        found.append((role, None if number is None else _read_positive(number, f"{place}: roles")))
    return tuple(found)


def lines(value: object) -> str:
    """Read lines of a shell, a string or a list, as one string. Raises ValueError, which states what is right."""
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError("a string or a list of lines")
    return value


def variables(value: object) -> Tuple[Tuple[str, str], ...]:
    """Read a dict of environment variables as (name, text); values may be numbers. Raises ValueError saying what is right."""
    if not isinstance(value, Mapping):
        raise ValueError('a dict such as {"NAME": "value"}')
    for name, item in value.items():
        if not isinstance(name, str) or not VARIABLE.fullmatch(name):
            raise ValueError(f"a dict of variables; {name!r} is no variable name")
        if not isinstance(item, (str, int, float)) or "\0" in str(item):
            raise ValueError(f"a dict of variables; {name} is {item!r}, not a string or a number")
    return tuple((name, str(item)) for name, item in value.items())
