"""This table has the options of mpirun that a user may add, and those that the tool itself sets."""

from __future__ import annotations

from typing import Dict, Sequence

# Options that would contradict the plan: how many ranks, on which hosts, how daemons start, in which folder.
_NUMBER = "the plan has the number of ranks: --nproc-per-node, or per_node"
_HOSTS = "HOSTS in conf.py names the hosts"
_DAEMONS = "the tool starts the daemons of mpirun itself"
_REFUSED: Dict[str, str] = {
    **dict.fromkeys(("n", "np", "c", "npernode", "N", "ppn", "perhost", "npersocket"), _NUMBER),
    **dict.fromkeys(
        ("hostfile", "machinefile", "default-hostfile", "host", "hosts", "H", "f", "rf", "rankfile"), _HOSTS
    ),
    **dict.fromkeys(("launcher", "launcher-exec", "bootstrap", "bootstrap-exec", "rmk", "localhost", "plm"), _DAEMONS),
    **dict.fromkeys(("wdir", "wd", "dir"), "the working directory of ranks is that of the job"),
    **dict.fromkeys(("configfile", "app"), "the tool states the program"),
    **dict.fromkeys(("x", "env", "genv", "genvlist", "genvall", "envlist", "envall"), "write variables into [env]"),
    "daemonize": _DAEMONS,
    "version": "it starts no job",
    "help": "it starts no job",
}


def refused(options: Sequence[str]) -> str:
    """Describe why the first option that a user may not add does not fit, with its name; "" if all fit."""
    for number, option in enumerate(options):
        name = option.lstrip("-").partition("=")[0] if option.startswith("-") else ""
        if name in ("mca", "prtemca", "gmca") and options[number + 1 : number + 2]:
            name = options[number + 1] if options[number + 1].startswith("plm") else name
            name = "plm" if name.startswith("plm") else name
        if name in _REFUSED:
            return f"{option}: {_REFUSED[name]}"
        if option in (":", "--"):
            return f"{option!r}: the tool states the program"
    return ""


def gives(options: Sequence[str], name: str) -> bool:
    """Check whether one of the options is --name, with one or two dashes, with its value behind it or behind =."""
    return any(option.startswith("-") and option.lstrip("-").partition("=")[0] == name for option in options)
