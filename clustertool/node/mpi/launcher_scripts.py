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
    """Write the scripts into the job's directory, whose descriptor is `job`. Raises OSError.

    folder: that of the job outside of its directory. bundle: the file by which this machine has joined the job, b"" if none.
    """
    place = _code(folder, bundle)
    _write(job, _RANK_SCRIPT, _script("rank_wrapper", place, spec["job_dir"]))
    if "hostfile" in spec:
        _write(job, HOSTFILE, spec["hostfile"])
        _write(job, AGENT, _script("launch_agent", place, spec["job_dir"]))


def variables(spec: Spec, folder: str) -> Dict[str, str]:
    """Return variables of mpirun and its daemons on this node."""
    script = os.path.join(spec["job_dir"], _RANK_SCRIPT)
    return {RANK_VARIABLE: script, "CLUSTERTOOL_MARK": spec["mark"], "TMPDIR": folder}


def _code(folder: str, bundle: bytes) -> str:
    """Return the directory of the tool's code for as long as the job runs. Raises OSError.

    A bundle has the job's key, and its file may be removed by now: the code alone is written.
    """
    place = os.path.dirname(os.path.dirname(os.path.abspath(clustertool.__file__)))
    copy = os.path.join(folder, "code")
    if not os.path.isdir(place):
        with zipfile.ZipFile(io.BytesIO(bundle) if bundle else place) as archive:
            archive.extractall(copy, [name for name in archive.namelist() if name.startswith("clustertool/")])
        return copy
    return shutil.copytree(place, copy) if os.path.basename(place).startswith(_TEMPORARY) else place


def _script(module: str, place: str, job_dir: str) -> str:
    argv = [sys.executable, "-ESs", "-c", _CODE.format(module=module), place, job_dir]
    return "#!/bin/sh\nexec " + " ".join(map(shlex.quote, argv)) + ' "$@"\n'


def _write(job: int, name: str, text: str) -> None:
    files.create(job, name, text.encode(), exclusive=False)
    os.chmod(f"{files.path_of(job)}/{name}", 0o700)
