"""A hostfile of Open MPI, DeepSpeed or Horovod becomes HOSTS entries. --ips, --only and --skip select hosts and slots.

A slot is one process. Where a node has devices, slot 3 is on device 3, as in DeepSpeed and Horovod.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from clustertool.errors import ConfigError, UsageError
from clustertool.model.config.hosts import Host, expand, is_address, numbered, read_entry, read_hosts
from clustertool.model.quantities import whole

_KEYS = ("slots", "max-slots", "max_slots", "slots-max", "slots_max")  # the longer ones only warn mpirun
_FIX = 'write "host slots=4" or "host:4", one host a line'
_MOST_SLOTS = 10_000

_SLICED = re.compile(r"(\[[^\]]*:[^\]]*\]|[^:]+):([0-9]{1,5}(?:,[0-9]{1,5})*)")  # a host and its slots
LOOPBACK = ("127.0.0.1", "localhost", "::1")
Listed = Union[str, Dict[str, Any]]  # a host as HOSTS has it


def read_hostfile(text: str, where: str) -> List[Dict[str, Any]]:
    """Read `host slots=4` (Open MPI, DeepSpeed) or `host:4` (Horovod) lines as entries of HOSTS: dicts of host and slots.

    A # begins a comment. A host that is named again has the slots of all its lines, one for a line without a number (Open MPI,
    PBS); one that is named once, without a number, has no slots. where: the file or the option, for errors. Raises ConfigError
    for a wrong line, and without any host.
    """
    found: Dict[str, List[Optional[int]]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if line:
            place = f"{where}, line {number}"
            host, slots = _read_line(line, place)
            try:
                read_entry(host, place)
            except ConfigError as error:
                raise ConfigError(error.what, _FIX) from None
            found.setdefault(host, []).append(slots)
    if not found:
        raise ConfigError(f"{where} names no host", _FIX)
    counts = {host: sum(number or 1 for number in slots) for host, slots in found.items() if slots != [None]}
    return [{"host": host, **({"slots": counts[host]} if host in counts else {})} for host in found]


def _read_line(line: str, where: str) -> Tuple[str, Optional[int]]:
    """Split a line into the host and its number of slots, None if it has none; host:4 has priority over slots=4.

    max-slots is ignored. where: begins the errors. Raises ConfigError for an unknown key, a key without a value, and a number
    that is not from 1 to 10000.
    """
    first, *rest = re.sub(r"\s*=\s*", "=", line).split()
    host, slots = _read_name(first)
    for option in rest:
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"{where}: {option!r} has no value in {line!r}", _FIX)
        if key not in _KEYS:
            raise ConfigError(f"{where}: {key!r} is not known", f"known: {', '.join(_KEYS[:2])}; {_FIX}")
        slots = value if key == "slots" and not slots else slots
    if not slots:
        return host, None
    number = whole(slots, 1, _MOST_SLOTS)
    if number is None:
        raise ConfigError(f"{where}: slots {slots!r} is not valid", f"a whole number from 1 to {_MOST_SLOTS}")
    return host, number


def _read_name(name: str) -> Tuple[str, str]:
    """Split host:slots, [IPv6]:slots, or a host alone into host and slots, "" if it has none.

    The slots of `host:` are ":", which is no number. A user@ stays with the host.
    """
    end = max(name.rfind("]"), name.rfind("@")) + 1
    if name.count(":", end) > 1:
        return name, ""
    host, colon, slots = name[end:].partition(":")
    return name[:end] + host, slots or colon


def choose_hosts(hosts: Sequence[Host], only: Sequence[str], skip: Sequence[str]) -> Tuple[Host, ...]:
    """Choose the hosts and slots that `only` names, all if it is empty, without those of `skip`, and number them again.

    A host without slots left is left out. Items: a host's name with ranges, or host:slots (DeepSpeed: `h1:0,2`; `@` between
    hosts). Raises UsageError for an item that names no host or slot, and if nothing is left.
    """
    kept = list(hosts)
    if only:
        wanted = _slots_by_host(hosts, only)
        kept = [_select_slots(host, wanted[host.name], keep=True) for host in kept if host.name in wanted]
    if skip:
        unwanted = _slots_by_host(hosts, skip)
        rest = [host for host in kept if unwanted.get(host.name, ()) is not None]
        kept = [_select_slots(host, unwanted.get(host.name, ()), keep=False) for host in rest]
    kept = [host for host in kept if host.nproc != 0]
    if not kept:
        raise UsageError("--only and --skip leave no host", "relax --only or --skip")
    return numbered(kept)


def read_host_list(text: str, option: str = "-H") -> Tuple[Listed, ...]:
    """Read -H of mpirun and horovodrun, `a:2,b:2` with slots behind each host, as entries of HOSTS.

    Raises UsageError, which names `option`.
    """
    try:
        return tuple(read_hostfile("\n".join(split_list(text)), option))
    except ConfigError as error:
        raise UsageError(re.sub(", line [0-9]+", "", error.what), f'write {option} "host1:4,host2:4"') from None


def is_host_list(text: str) -> bool:
    """Return whether a text names several hosts, or a host with slots, and is not the name or the address of one machine."""
    items = split_list(text)
    return len(items) > 1 or any(_read_name(item)[1] for item in items)


def hosts_of_only(items: Sequence[str]) -> Tuple[str, ...]:
    """Return the hosts that items of --only name, without their slots: `a:0,1@b` -> a, b."""
    sliced = ((item, _SLICED.fullmatch(item)) for item in _split(items))
    return tuple(dict.fromkeys(match[1] if match else item for item, match in sliced))


def hosts_of(listed: Sequence[Listed], option: str) -> Tuple[Host, ...]:
    """Read the hosts that an option names, with node ids. Raises UsageError for an entry that is no host."""
    try:
        return read_hosts(list(listed), option)
    except ConfigError as error:
        fix = f'write "[user@]host[:port]", with commas between them: {option} host1,host2'
        raise UsageError(error.what, fix) from None


def share_out(hosts: Sequence[Host], total: int) -> Tuple[Host, ...]:
    """Distribute `total` trainers (-np) to hosts, and return those that get some, limited to as many slots, numbered again.

    By slots in the order of the hosts, where all hosts have a number of them, else evenly. A host without a number among hosts
    with slots has one slot (Open MPI). Raises UsageError for more trainers than slots.
    """
    usual = 1 if any(host.slots is not None for host in hosts) else None
    numbers = [usual if host.nproc is None else host.nproc for host in hosts]
    have = [number for number in numbers if number is not None]
    if len(have) < len(hosts):
        size, more = divmod(total, len(hosts))
        shares = [size + (at < more) for at in range(len(hosts))]
    elif total > sum(have):
        fix = "name more hosts or slots: -H host1:4,host2:4"
        raise UsageError(f"-np {total}: the hosts have {sum(have)} slots", fix)
    else:
        starts = itertools.accumulate(have, initial=0)
        shares = [min(number, max(0, total - start)) for number, start in zip(have, starts)]
    return numbered([host.limited_to(number) for host, number in zip(hosts, shares) if number])


def entries_for(hosts: Sequence[Host], asked: Sequence[Host]) -> Tuple[Host, ...]:
    """Return for each host of --ips or -H its entry of HOSTS, with the slots that it was given, else the host itself.

    Each entry is used once. The order is that of `asked`, and the hosts are numbered again.
    """
    free, found = list(hosts), []
    for host in asked:
        known = next((entry for entry in free if matches_entry(host, entry)), None)
        if known is not None:
            free.remove(known)
        found.append(known.with_slots(host) if known else host)
    return numbered(found)


def matches_entry(name: Host, entry: Host) -> bool:
    """Check whether a name of --ips means this entry of HOSTS, by its host, address or display name.

    The entry may have a user and a port that the name does not have.
    """
    same = name.host in (entry.host, entry.address, entry.name)
    return same and name.user in ("", entry.user) and name.port in (0, entry.port)


def _slots_by_host(hosts: Sequence[Host], names: Sequence[str]) -> Dict[str, Optional[Tuple[int, ...]]]:
    """Map the names of hosts that items of --only or --skip name to their slots, None for all of them.

    Slots of a host that is named again are added. Raises UsageError for an item that names no host.
    """
    found: Dict[str, Optional[Tuple[int, ...]]] = {}
    for name in _split(names):
        chosen, slots = _named_by(name, hosts)
        if not chosen:
            known = ", ".join(host.name for host in hosts)
            raise UsageError(f"--only/--skip {name!r} names no host", f"hosts: {known}")
        for host in chosen:
            before = found.get(host.name, ())
            found[host.name] = None if slots is None or before is None else tuple(dict.fromkeys((*before, *slots)))
    return found


def _named_by(name: str, hosts: Sequence[Host]) -> Tuple[List[Host], Optional[Tuple[int, ...]]]:
    """Find the hosts that an item names, and its slots, None for all; no hosts if there are none of that name.

    First the whole item counts as a host as HOSTS writes it (host:port, IPv6); if it is none, what follows the colon are slots.
    """
    chosen = [host for one in _expand_name(name) for host in hosts if one in _names_of_host(host)]
    sliced = _SLICED.fullmatch(name)
    if chosen or not sliced:
        return chosen, None
    slots = tuple(int(slot) for slot in sliced.group(2).split(","))
    return [host for one in _expand_name(sliced.group(1)) for host in hosts if one in _names_of_host(host)], slots


def _names_of_host(host: Host) -> Tuple[str, ...]:
    """List the names by which --only and --skip know a host; this machine also has those of loopback."""
    bracketed = f"[{host.host}]" if is_address(host.host) and ":" in host.host else host.host
    if host.here:
        return (host.name, host.host, host.address, *LOOPBACK)
    return (host.name, host.host, bracketed, *([f"{bracketed}:{host.port}"] if host.port else ()))


def _expand_name(name: str) -> List[str]:
    """Expand the ranges of a name. Raises UsageError for a wrong range."""
    try:
        return expand(name)
    except ConfigError as error:
        raise UsageError(f"--only/--skip {error.what}", "write node[1-40]") from None


def split_list(text: str) -> List[str]:
    """Split items at commas. A comma in brackets does not separate."""
    return [item.strip() for item in re.split(r",(?![^\[]*\])", text) if item.strip()]


def _split(names: Sequence[str]) -> List[str]:
    """Split lists at `@` and at commas that are not in brackets or between slot numbers: `a:1,2@b` is a:1,2 and b."""
    found: List[str] = []
    for item in (item for name in names for item in name.split("@")):
        parts: List[str] = []
        for piece in split_list(item):
            if parts and re.fullmatch("[0-9]+", piece) and re.search(r":[0-9,]+$", parts[-1]):
                parts[-1] += "," + piece
            else:
                parts.append(piece)
        found += parts
    return found


def _select_slots(host: Host, slots: Optional[Tuple[int, ...]], keep: bool) -> Host:
    """Return a host with only these slots (keep), or without them; unchanged for () and None.

    Slots are its devices, if HOSTS names them, else the numbers from 0; those that are left are also `chosen`, and their number
    is `nproc`. Raises UsageError for a slot that it does not have, and without `keep` if its slots are not known.
    """
    if not slots:
        return host
    numbered = host.slots if host.slots is not None else tuple(range(host.nproc)) if host.nproc else None
    have = host.devices if host.devices is not None else numbered
    if have is None:
        if not keep:
            what = f"--skip {host.name}:{','.join(map(str, slots))}: its slots are not known"
            raise UsageError(what, f"give {'devices or nproc' if host.listed == 'HOSTS' else 'slots'} in {host.listed}")
        have = slots
    unknown = sorted(set(slots) - set(have))
    if unknown:
        raise UsageError(f"--only/--skip: {host.name} has no slot {unknown[0]}", f"it has {','.join(map(str, have))}")
    left = tuple(slot for slot in have if (slot in slots) == keep)
    if host.devices is None and numbered is not None:
        return replace(host, slots=left, nproc=len(left), chosen=left)
    return replace(host, devices=left, nproc=len(left), chosen=left)
