"""This module reads and writes times as the programs of Slurm do."""

from __future__ import annotations

import math
import re
from typing import Optional

from clustertool.model.quantities import seconds_of

# sbatch(1), --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds
_FORMS = (
    re.compile(r"(?P<m>\d+)(?::(?P<s>\d+))?"),
    re.compile(r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)"),
    re.compile(r"(?P<d>\d+)-(?P<h>\d+)(?::(?P<m>\d+)(?::(?P<s>\d+))?)?"),
)
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
UNLIMITED = math.inf
_RECORDING = 5.0  # seconds for SIGKILL, and for the records of the end
CONFIG = ("scontrol", "show", "config")
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*([0-9]{1,6}) sec", re.MULTILINE)


def limit_seconds(text: str) -> Optional[float]:
    """Parse a time limit of sbatch to seconds; "infinite" and "unlimited" to math.inf. None if it is no time limit."""
    if text.lower() in ("infinite", "unlimited"):
        return UNLIMITED
    if len(text) > 20 or not text.isascii():
        return None
    match = next(filter(None, (form.fullmatch(text) for form in _FORMS)), None)
    if match is None:
        return None
    return float(sum(int(number) * _SECONDS[unit] for unit, number in match.groupdict().items() if number))


def as_limit(text: str) -> str:
    """Convert a time limit for sbatch: the text itself, or a duration with a unit (90s, 1h30m) in Slurm's form; else ""."""
    if limit_seconds(text) is not None:
        return text
    seconds = seconds_of(text) if text[-1:].isalpha() else None
    if not seconds:
        return ""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes // 1440}-{minutes % 1440 // 60:02}:{minutes % 60:02}:{rest:02}"


def kill_wait(config: str) -> Optional[int]:
    """Read KillWait, the seconds between SIGTERM and SIGKILL (slurm.conf(5)), None if unknown. config: the answer of CONFIG."""
    found = _KILL_WAIT.search(config)
    return int(found[1]) if found else None


def longest_grace(limit: int) -> float:
    """Return the longest grace (seconds) with which supervisors record the end before `limit`, KillWait, is over.

    It is 5 s shorter than this, but at least half of it.
    """
    return max(limit - _RECORDING, limit / 2)


def grace_warning(grace: float, limit: Optional[int]) -> str:
    """Return a warning if Slurm would kill supervisors before they have recorded the end of a job; "" if not, or not known.

    grace: seconds. limit: KillWait, None if it is not known.
    """
    if limit is None or grace < limit:
        return ""
    return (
        f"the grace of {grace:g} s is not shorter than KillWait of this Slurm ({limit} s): when Slurm ends the job, its "
        f"supervisors are killed before they have recorded the end; give --grace {longest_grace(limit):g}, or leave it out"
    )
