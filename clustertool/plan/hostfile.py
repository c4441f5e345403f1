"""A hostfile of Open MPI, DeepSpeed or Horovod becomes HOSTS entries; --only and --skip choose among hosts."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Dict, List, Optional, Sequence, Tuple

from clustertool.errors import ConfigError, UsageError
from clustertool.plan.hosts import Host, expand, named

_LINE = re.compile(r"(?P<host>[^\s:]+)(:(?P<colon>\d+))?(?P<rest>(\s+[a-z_\-]+\s*=\s*\S+)*)\s*")


def read_hostfile(text: str, where: str) -> List[Dict[str, Any]]:
    """`host slots=4` (Open MPI, DeepSpeed) or `host:4` (Horovod), # comments -> entries of HOSTS. Raises ConfigError."""
    entries: List[Dict[str, Any]] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if not match:
            raise ConfigError(f"{where}, line {number}: {line!r}", 'write "host slots=4" or "host:4"')
        entry: Dict[str, Any] = {"host": match.group("host")}
        options = dict(re.findall(r"([a-z_\-]+)\s*=\s*(\S+)", match.group("rest") or ""))
        slots = match.group("colon") or options.get("slots")
        if slots is not None:
            if not re.fullmatch(r"[0-9]{1,5}", slots) or int(slots) < 1:
                raise ConfigError(f"{where}, line {number}: slots {slots!r}", "a whole number from 1")
            entry["nproc"] = int(slots)
        entries.append(entry)
    if not entries:
        raise ConfigError(f"{where} names no host", 'write "host slots=4", one host a line')
    return entries


def choose(hosts: Sequence[Host], only: Sequence[str], skip: Sequence[str]) -> Tuple[Host, ...]:
    """The chosen hosts, numbered anew. Words: a host's name with ranges, or host:slots (DeepSpeed: `h1:0,2`; `@` between
    hosts). Raises UsageError for a word that names nobody."""
    kept = list(hosts)
    if only:
        wanted = _wanted(hosts, only)
        kept = [_sliced(host, wanted[host.name], keep=True) for host in kept if host.name in wanted]
    if skip:
        unwanted = _wanted(hosts, skip)
        kept = [_sliced(h, unwanted.get(h.name, ()), keep=False) for h in kept if unwanted.get(h.name, ()) is not None]
    kept = [host for host in kept if host.nproc != 0]
    if not kept:
        raise UsageError("--only and --skip leave no host", "loosen them")
    return named(tuple(replace(host, index=index) for index, host in enumerate(kept)))


def _wanted(hosts: Sequence[Host], words: Sequence[str]) -> Dict[str, Optional[Tuple[int, ...]]]:
    """Name -> slots, None for all of them."""
    found: Dict[str, Optional[Tuple[int, ...]]] = {}
    for word in _split(words):
        sliced = re.fullmatch(r"([^:]+):([0-9]{1,5}(?:,[0-9]{1,5})*)", word)
        if sliced and not any(host.name == word for host in hosts):
            name, colon, slots = sliced.group(1), ":", sliced.group(2)
        else:
            name, colon, slots = word, "", ""
        chosen = [host for one in _expanded(name) for host in hosts if one in (host.name, host.host)]
        if not chosen:
            raise UsageError(f"--only/--skip {word!r} names no host", f"hosts: {', '.join(host.name for host in hosts)}")
        for host in chosen:
            found[host.name] = tuple(int(slot) for slot in slots.split(",") if slot) if colon else None
    return found


def _expanded(name: str) -> List[str]:
    try:
        return expand(name)
    except ConfigError as error:
        raise UsageError(f"--only/--skip {error.what}", "write node[1-40]") from None


def _split(words: Sequence[str]) -> List[str]:
    """Commas separate hosts, but not inside brackets and not between slot numbers."""
    parts: List[str] = []
    for word in words:
        for item in word.replace("@", "\n").splitlines():
            for piece in re.split(r",(?![^\[]*\])", item):
                if parts and piece.isdigit() and re.search(r":[\d,]+$", parts[-1]):
                    parts[-1] += "," + piece
                elif piece:
                    parts.append(piece)
    return parts


def _sliced(host: Host, slots: Optional[Tuple[int, ...]], keep: bool) -> Host:
    """A host with only (or without) some of its slots: its devices, numbered from 0 where HOSTS gives only a number."""
    if not slots:
        return host
    have = host.devices if host.devices is not None else tuple(range(host.nproc)) if host.nproc else None
    if have is None:
        if not keep:
            what = f"--skip {host.name}:{','.join(map(str, slots))}: its slots are not known"
            raise UsageError(what, "give devices or nproc in HOSTS")
        have = slots
    unknown = sorted(set(slots) - set(have))
    if unknown:
        raise UsageError(f"--only/--skip: {host.name} has no slot {unknown[0]}", f"it has {','.join(map(str, have))}")
    left = tuple(slot for slot in have if (slot in slots) == keep)
    return replace(host, devices=left, nproc=len(left))
