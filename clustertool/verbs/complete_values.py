"""Job ids and hosts for the completion of the command line. A shell waits for them, so nothing is run and no node is asked.

Jobs are those that were started from this machine. Hosts are those of HOSTS in conf.py if it is a plain list: conf.py is read
and not executed. Without such a list they are those of the newest job.
"""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clustertool.actions import conf_file
from clustertool.errors import ClustertoolError
from clustertool.fleet import job_files
from clustertool.model.config.hosts import read_hosts, valid_host
from clustertool.model.paths import is_job_id

_READ = 32  # files of jobs
_LARGEST = 64 << 10  # bytes of a file of which more than its name is read


def jobs() -> list[str]:
    """List ids and names of jobs, the newest first."""
    files = _stored()[::-1]
    contents = map(_content, files[:_READ])
    names = [str(content.get(key, "")) for content in contents for key in ("asked", "name")]
    return list(dict.fromkeys([*map(job_files.job_of, files), *filter(is_job_id, names)]))


def hosts() -> list[str]:
    """List names of hosts: of conf.py, else of the newest stored job."""
    named = _hosts_of_conf()
    for path in _stored()[-1:] if not named else ():
        with contextlib.suppress(TypeError, KeyError):
            named = [str(host["name"]) for host in _content(path).get("hosts", ())]
    return [name for name in dict.fromkeys(named) if valid_host(name)]


VALUES: Mapping[str, Callable[[], list[str]]] = {"JOB": jobs, "HOST": hosts}  # by what help calls the value


def _stored() -> list[Path]:
    """List the files of stored jobs, the oldest first; none for a user without a home folder."""
    with contextlib.suppress(ClustertoolError):
        return job_files.by_age(job_files.default_directory())
    return []


def _content(path: Path) -> dict[str, Any]:
    """Read an object of a JSON file; {} if there is none, or a large one."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if path.stat().st_size <= _LARGEST:
            found = json.loads(path.read_bytes())
            return found if isinstance(found, dict) else {}
    return {}


def _hosts_of_conf() -> list[str]:
    with contextlib.suppress(OSError, ValueError, SyntaxError, RecursionError, MemoryError, ClustertoolError):
        path = conf_file.find("")
        for line in ast.parse(path.read_bytes()).body if path else ():
            if isinstance(line, ast.Assign) and [ast.unparse(target) for target in line.targets] == ["HOSTS"]:
                return [host.name for host in read_hosts(ast.literal_eval(line.value))]
    return []
