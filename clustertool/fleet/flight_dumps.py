"""After a hang, nodes have what torch's flight recorder knows of each rank: the collectives that it has called.

They are gathered in one folder, and torchfrtrace of torch, if this machine has it, compares them: which rank has not called
the collective that the others wait in.
"""

from __future__ import annotations

import contextlib
import pickletools
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from clustertool.errors import NotFound
from clustertool.fleet.fleet import Check, Fleet
from clustertool.fleet.transfer.receive import NodeFolder
from clustertool.model.hints import PROGRAM
from clustertool.model.paths import FLIGHT
from clustertool.model.wire.messages import STATUS

_PREFIX = "rank-"
_LARGEST = 64 << 20  # bytes of a dump
_SECONDS = 120.0  # for torchfrtrace
# Opcodes of pickles with lists, tuples, dicts, strings and numbers. A dump of torch has no others; those that name a function
# would run code where it is read.
_PLAIN = frozenset(
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE SHORT_BINUNICODE "
    "EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 SETITEM SETITEMS APPEND APPENDS "
    "BINPUT LONG_BINPUT BINGET LONG_BINGET MEMOIZE".split()
)


def gather_dumps(fleet: Fleet, check: Check, job: str, to: Path) -> list[Path]:
    """Copy the dumps of all ranks of a job into `to`, and list them. fleet.failed gets the errors of nodes.

    Raises NotFound if no node has one. Dumps that are too large, or are no plain data, are not kept. Other files in `to` stay.
    """
    received: set[str] = set()
    for node, answer in fleet.ask_all(STATUS({"job": job})).items():
        folder = NodeFolder(fleet, node, posixpath.join(answer["dir"], FLIGHT))
        try:
            files = [one for one in folder.entries() if one.kind == "file" and one.size <= _LARGEST]
            dumps = [one for one in files if re.fullmatch(rf"{_PREFIX}\d{{1,6}}", one.path)]
            if dumps:
                folder.receive(to, check, dumps)
                received.update(one.path for one in dumps)
        except NotFound as error:
            fleet.failed[node] = error
    found = [to / name for name in sorted(received) if _is_plain(to / name)]
    if not found:
        what = f"no rank of job {job} has a dump of torch's flight recorder"
        raise NotFound(what, f"ranks with NCCL write one after a hang: {PROGRAM} stacks shows where ranks are")
    return found


def _is_plain(path: Path) -> bool:
    """Check whether a dump is a pickle of plain data; remove it otherwise."""
    with contextlib.suppress(ValueError):  # damaged
        if _PLAIN.issuperset(opcode.name for opcode, _, _ in pickletools.genops(path.read_bytes())):
            return True
    path.unlink()
    return False


def compare_dumps(dumps: Sequence[Path]) -> str:
    """Return what torchfrtrace, of the Python of clustertool or in PATH, says of gathered dumps; "" if it is not there.

    It gets a folder with these dumps only: it unpickles all that has such a name. What it prints of an error is returned, too,
    and that it did not end in 120 s.
    """
    own = Path(sys.executable).with_name("torchfrtrace")
    tool = str(own) if own.exists() else shutil.which("torchfrtrace")
    if tool is None:
        return ""
    try:
        with tempfile.TemporaryDirectory() as folder:
            for dump in dumps:
                Path(folder, dump.name).symlink_to(dump.absolute())
            argv = [tool, "--allow-incomplete-ranks", "--prefix", _PREFIX, folder]
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return f"torchfrtrace has failed: {type(error).__name__}"
    return (done.stdout + done.stderr).strip()
