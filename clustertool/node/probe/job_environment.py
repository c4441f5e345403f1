"""This module starts the job's own Python as a rank would be started, with PRELUDE, and reads its versions."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, List, Tuple

from clustertool.node.supervisor import rank_process
from clustertool.node.system import programs, users

if TYPE_CHECKING:
    from clustertool.model.facts import Problem
    from clustertool.model.wire.agent_answers import ProbeAnswer
    from clustertool.model.wire.agent_requests import JobEnvironment
    from clustertool.model.wire.spec_types import ProcessCommand, RankSurroundings

LIMIT = 15.0  # seconds: `conda activate` on a slow file system takes some
_SHOWN = 300  # characters of its output when it fails
# Runs under whatever python the job has, so it is old-fashioned, and imports next to nothing. A version is in the name of the
# package's .dist-info, as importlib.metadata finds it; that is asked (and paid for) only where a package has another name.
# It ends at once: an orderly end of the interpreter takes 1.5 ms of CPU time.
_CODE = r"""
import os, sys
mark, names = sys.argv[1], sys.argv[2:]
def plain(name):
    return name.replace("_", "-").replace(".", "-").lower()
found = {}
for folder in sys.path:
    try:
        entries = os.listdir(folder or ".")
    except OSError:
        continue
    for entry in entries:
        if entry.endswith((".dist-info", ".egg-info")):
            parts = entry[:entry.rindex(".")].split("-")
            if len(parts) > 1:
                found.setdefault(plain(parts[0]), parts[1])
def version(name):
    if plain(name) in found:
        return found[plain(name)]
    if name == "paddle":
        for other in sorted(found):
            if other.startswith("paddlepaddle"):
                return found[other]
    try:
        if not any(finder.find_spec(name, None) for finder in sys.meta_path):
            return ""
        from importlib import metadata
        for one in metadata.distributions():
            if name in (one.read_text("top_level.txt") or "").split():
                return one.version
    except (AttributeError, ImportError, ValueError):
        return ""
    return "?"
lines = ["python " + ".".join(map(str, sys.version_info[:3]))] + [n + " " + version(n) for n in names]
lines += ["", os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""]
lines += sorted(n for n in os.environ if n.lower() in ("http_proxy", "https_proxy", "all_proxy"))
print(mark + "\n" + "\n".join(lines) + "\n" + mark)
sys.stdout.flush()
os._exit(0)
"""
# Its output follows the first mark: PRELUDE may print something. Hydra prints how it was built, without end.
_MPI = r"""
mark=$1
shift
echo "$mark"
mpirun --version </dev/null 2>/dev/null | head -n 3
echo "$mark"
for name in "$@"; do command -v "$name"; done
"""


def read_versions(asked: JobEnvironment, limit: float = LIMIT) -> Tuple[ProbeAnswer, List[Problem]]:
    """Run the job's python3 with PRELUDE, and read versions of packages and proxies: (fields of Facts, problems).

    If that fails there are no fields, and one problem. asked: prelude, first_path, ld_library_path, here, env, packages.
    """
    mark = os.urandom(8).hex()
    process: ProcessCommand = {"argv": ["python3", "-c", _CODE, mark, *asked["packages"]], "env": asked["env"]}
    code, out, err = _output(asked, process, limit)
    _, _, rest = out.partition(mark + "\n")
    if mark in rest:
        lines = rest.partition("\n" + mark)[0].split("\n")
        versions, (free, *proxies) = lines[: lines.index("")], lines[lines.index("") + 1 :]
        return {
            "packages": [(name, version) for name, _, version in (line.partition(" ") for line in versions)],
            "job_proxies": proxies,
            "no_proxy": free,
        }, []
    return {}, [_problem(code, err or out, bool(asked["prelude"]), limit)]


def read_mpi(asked: JobEnvironment, limit: float = LIMIT) -> ProbeAnswer:
    """Run `mpirun --version` as mpirun would be started, and find the daemons in `packages`: {mpirun, mpi_daemons}.

    mpirun: the first three lines that it prints, 300 characters at most; "" without mpirun. mpi_daemons: those that are there.
    """
    mark = os.urandom(8).hex()
    process: ProcessCommand = {
        "argv": ["/bin/sh", "-c", _MPI, "mpi", mark, *asked["packages"]],
        "env": asked["env"],
        "apart": True,
    }
    _, out, _ = _output(asked, process, limit)
    _, _, rest = out.partition(mark + "\n")
    version, _, paths = rest.partition(mark + "\n")
    found = {os.path.basename(line) for line in paths.splitlines()}
    return {"mpirun": version.strip()[:_SHOWN], "mpi_daemons": [name for name in asked["packages"] if name in found]}


def _output(asked: JobEnvironment, process: ProcessCommand, limit: float) -> Tuple[int, str, str]:
    """Run a program as a process of the job would be started, and return its exit code, stdout and stderr."""
    spec: RankSurroundings = {
        "common": {},
        "prelude": asked["prelude"],
        "first_path": asked["first_path"],
        "ld_library_path": asked["ld_library_path"],
        "here": asked["here"],
        "engine": asked.get("engine", ""),
    }
    argv, env = rank_process.command(spec, process), rank_process.environment(spec, process, 0, os.environ)
    home = users.home()
    return programs.output(argv, limit, env=env, cwd=home if os.path.isdir(home) else "/")


def _problem(code: int, output: str, prelude: bool, limit: float) -> Problem:
    """Build ("packages", "warn" or "error", what, fix) for a Python that has reported no versions.

    code: its exit code, -1 after `limit` seconds. prelude: there is a PRELUDE. A warning only without python3 and PRELUDE.
    """
    # Behind a prelude, ours is the last line.
    last = "; ".join(output.strip().splitlines()[-2 if prelude else -1 :])[-_SHOWN:]
    fix = "try the lines of PRELUDE there by hand" if prelude else "install python3, or set PATH in PRELUDE"
    name = "PRELUDE and python3" if prelude else "the job's python3"
    if code == -1:
        return "packages", "error", f"{name} did not end within {limit:g} s", fix
    return "packages", "warn" if code == 127 and not prelude else "error", f"{name} failed ({last or code})", fix
