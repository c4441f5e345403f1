"""This module writes the scripts that mpirun and its daemons call on a node, and the variables by which they find them.

The program of all ranks is one fixed text on the command line of mpirun, and paths differ between nodes. So the text names a
variable (RANK_VARIABLE), which is set for mpirun and for each daemon, and names the script of its own node.
"""

from __future__ import annotations

import io
import os
import shlex
import shutil
import sys
import zipfile
from typing import TYPE_CHECKING, Dict

import clustertool
from clustertool.model.mpi.daemon_launch import AGENT, HOSTFILE, RANK_VARIABLE
from clustertool.model.paths import OURS
from clustertool.node.storage import files

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

_RANK_SCRIPT = f"{OURS}/mpi-rank"
_TEMPORARY = "clustertool-code-"  # begins the name of a directory with the code that is removed before the job ends
# `-c` puts the working directory first on the path, which is not ours.
_CODE = """\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
sys.path.insert(0, sys.argv[1])
from clustertool.node.mpi import {module}
{module}.main(sys.argv[2], sys.argv[3:])"""


def write(spec: Spec, job: int, folder: str, bundle: bytes) -> None:
    """Write the scripts that mpirun and its daemons call, and on mpirun's node its hostfile, into the job's directory.

    job: its descriptor. folder: a private one of the job, for a copy of the code. bundle: the file by which this machine has
    joined the job, b"" if none. Raises OSError.
    """
    place = _code_directory(folder, bundle)
    _write_script(job, _RANK_SCRIPT, _script_text("rank_wrapper", place, spec["job_dir"]))
    if "hostfile" in spec:
        _write_script(job, HOSTFILE, spec["hostfile"])
        _write_script(job, AGENT, _script_text("launch_agent", place, spec["job_dir"]))


def variables(spec: Spec, folder: str) -> Dict[str, str]:
    """Return the variables of mpirun and its daemons on this node: script of the ranks, mark, and `folder` as TMPDIR."""
    script = os.path.join(spec["job_dir"], _RANK_SCRIPT)
    return {RANK_VARIABLE: script, "CLUSTERTOOL_MARK": spec["mark"], "TMPDIR": folder}


def _code_directory(folder: str, bundle: bytes) -> str:
    """Return a directory with the tool's code that stays as long as the job runs, if needed a copy in `folder`. Raises OSError.

    Of a bundle only the code is extracted: it has the job's key, and its file may be removed by now.
    """
    place = os.path.dirname(os.path.dirname(os.path.abspath(clustertool.__file__)))
    copy = os.path.join(folder, "code")
    if not os.path.isdir(place):
        with zipfile.ZipFile(io.BytesIO(bundle) if bundle else place) as archive:
            archive.extractall(copy, [name for name in archive.namelist() if name.startswith("clustertool/")])
        return copy
    return shutil.copytree(place, copy) if os.path.basename(place).startswith(_TEMPORARY) else place


def _script_text(module: str, place: str, job_dir: str) -> str:
    """Build a shell script that runs main() of a module of this package, with the job's directory and its arguments."""
    argv = [sys.executable, "-ESs", "-c", _CODE.format(module=module), place, job_dir]
    return "#!/bin/sh\nexec " + " ".join(map(shlex.quote, argv)) + ' "$@"\n'


def _write_script(job: int, name: str, text: str) -> None:
    """Write an executable file into the job's directory, whose descriptor is `job`."""
    files.create(job, name, text.encode(), exclusive=False)
    os.chmod(f"{files.path_of(job)}/{name}", 0o700)
