"""A job's ports are claimed under a lock on the node before anything starts, so that two starts at once never share one.

Claims of a user are on node-local storage (node/system/private_directory.py: /tmp/clustertool-UID-RANDOM), also where
ROOT_DIR is on NFS. A claim lasts as long as its job, whose supervisor removes it at the end. A remaining claim is void
after a reboot, without the job's directory, or when the job has ended. The next claim removes void ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from typing import Dict, List, Sequence, Tuple

from clustertool.errors import PortInUse
from clustertool.model.hints import PROGRAM
from clustertool.model.job import formats
from clustertool.model.job.caretakers import CaretakerRecord
from clustertool.node.jobs.job_processes import JobProcesses
from clustertool.node.system import private_directory, processes

_FILE = "ports.json"
_CHECK = "(check)"  # the job's name for ports of a check; its base is the agent: pid and start time
_PLACED = 300.0  # seconds after which a laptop that placed a job and never started it counts as gone
Claims = Dict[str, Tuple[str, str, str]]  # port -> (job, base directory of the job, boot id)


def touch() -> None:
    """Set the time of the file of claims to now, since old files in /tmp are removed on many machines. Ignores errors.

    The directory stays as long as there is a file in it.
    """
    place = private_directory.find()
    if place:
        with contextlib.suppress(OSError):
            os.utime(os.path.join(place, _FILE))


def claim(ports: Sequence[int], job: str, base: str) -> None:
    """Claim all ports for a job, or none; remove void claims. base: the base directory of the job.

    Raises PortInUse, with the jobs, if another job has one of them, and PreflightError if the file of claims cannot be used.
    """
    with private_directory.locked(_FILE) as fd:
        kept = _select_kept(_read_claims(fd), job)
        taken = [(port, kept[str(port)][0]) for port in ports if not _is_free(port, kept, job)]
        if taken:
            message = "; ".join(f"port {port} is in use by job {other}" for port, other in taken)
            fix = "wait for that check" if taken[0][1] == _CHECK else f"{PROGRAM} stop --job {taken[0][1]}"
            raise PortInUse(message, f"{fix}, or choose other ports")
        _add_claims(fd, kept, ports, job, base)


def take_back(job: str, base: str) -> None:
    """Remove the claims of a job, if there are any. Raises PreflightError if the file of claims cannot be used.

    base: see paths.base().
    """
    if not private_directory.find():
        return
    with private_directory.locked(_FILE) as fd:
        claims = _read_claims(fd)
        left = {port: claim for port, claim in claims.items() if claim[:2] != (job, base)}
        if len(left) < len(claims):
            _write_claims(fd, left)


def claim_for_check(ports: Sequence[int]) -> List[int]:
    """Claim for a check those of the ports that no job has, until release_check() or the end of this process; return them.

    Raises PreflightError if the file of claims cannot be used.
    """
    with private_directory.locked(_FILE) as fd:
        kept = _select_kept(_read_claims(fd), _CHECK)
        free = [port for port in ports if _is_free(port, kept, _CHECK)]
        _add_claims(fd, kept, free, _CHECK, _this_process())
    return free


def release_check() -> None:
    """Remove the claims that this process made by claim_for_check()."""
    take_back(_CHECK, _this_process())


def _this_process() -> str:
    """Return pid and start time of this process as text."""
    return " ".join(map(str, processes.this_process()))


def claimed_ports() -> Dict[int, str]:
    """Map the ports of this user's valid claims to their jobs, without changing the file; {} if it cannot be read.

    Raises PreflightError for a file of a newer version, or one that stays locked.
    """
    place = private_directory.find()
    if not place:
        return {}
    try:
        with open(os.path.join(place, _FILE), "rb") as file:
            private_directory.lock(file.fileno(), fcntl.LOCK_SH, file.name)  # not while another process writes
            return {int(port): job for port, (job, _, _) in _living_claims(_parse(file.read(), file.name)).items()}
    except OSError:
        return {}


def _select_kept(claims: Claims, job: str) -> Claims:
    """Select the claims of living jobs, and those of `job`: other nodes on this machine may have placed it a moment ago."""
    ours = {port: claim for port, claim in claims.items() if claim[0] == job}
    return {**_living_claims({port: claim for port, claim in claims.items() if port not in ours}), **ours}


def _is_free(port: int, claims: Claims, job: str) -> bool:
    """Check whether no other job than `job` has a claim of the port."""
    return str(port) not in claims or claims[str(port)][0] == job


def _add_claims(fd: int, claims: Claims, ports: Sequence[int], job: str, base: str) -> None:
    """Write the claims with those of `ports` for a job. Raises PreflightError if /tmp is full."""
    _write_claims(fd, {**claims, **dict.fromkeys(map(str, ports), (job, base, processes.boot_id()))})


def _read_claims(fd: int) -> Claims:
    """Read the claims of the locked file. Raises PreflightError for a newer version."""
    return _parse(private_directory.content(fd), os.readlink(f"/proc/self/fd/{fd}"))


def _parse(data: bytes, path: str) -> Claims:
    """Parse the claims of a file; leave out damaged ones. Raises PreflightError for a newer version."""
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    formats.require_known(found, path)
    rows = {port: row for port, row in found.items() if port.isdecimal() and isinstance(row, list) and len(row) == 3}
    return {port: (row[0], row[1], row[2]) for port, row in rows.items() if all(isinstance(item, str) for item in row)}


def _write_claims(fd: int, claims: Claims) -> None:
    """Write the claims. Raises PreflightError if there is no room; then the old ones stay."""
    private_directory.rewrite(fd, json.dumps({formats.KEY: formats.FORMAT, **claims}).encode())


def _living_claims(claims: Claims) -> Claims:
    """Select the claims of this boot whose jobs are not over."""
    boot = processes.boot_id()
    known = {port: claim for port, claim in claims.items() if claim[2] == boot}
    living = {(job, base) for job, base in {claim[:2] for claim in known.values()} if not _is_over(job, base)}
    return {port: claim for port, claim in known.items() if claim[:2] in living}


def _is_over(job: str, base: str) -> bool:
    """Check whether a job has no directory, has recorded its end, or has no caretaker; or the process of a check has ended.

    base: see paths.base(); of a check, the numbers of its Process.
    """
    if job == _CHECK:
        numbers = [int(item) for item in base.split() if item.isdecimal()]
        return len(numbers) != 2 or not processes.alive(processes.Process(*numbers))
    known = JobProcesses(base, job, {"id": job})
    if not os.path.isdir(known.paths.dir):
        return True
    own = known.own()
    return own.over or _has_no_caretaker(known, own)


def _has_no_caretaker(job: JobProcesses, own: CaretakerRecord) -> bool:
    """Check whether neither supervisor nor guard lives; if none is recorded, whether the job was placed more than 300 s ago."""
    known = [process for process in (job.process("supervisor", own), job.process("guard", own)) if process]
    if known:
        return not any(processes.alive(process) for process in known)
    with contextlib.suppress(FileNotFoundError):  # it is being made, or removed, this moment
        return time.time() - os.stat(job.paths.ours).st_mtime > _PLACED
    return False
