"""A join bundle is one zipapp that a machine starts to join a job: `python3 bundle.pyz join [--index I]`.

It has the code, the join file with the job's key, the module that reads NVIDIA's devices, and the workspace where it fits.
node/join/bundle_content.py reads it.
"""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import BinaryIO

from clustertool.errors import UsageError
from clustertool.fleet import node_bundle
from clustertool.fleet.dispatch.shipment import Shipment
from clustertool.fleet.dispatch.workspace import Workspace
from clustertool.fleet.joining import join_process
from clustertool.model.joining.join_file import JOIN_FILE, MANIFEST, NVML, PIECES, JoinFile, to_json

LARGEST_WORKSPACE = 64 << 20  # bytes of a workspace that a bundle contains; a larger one comes from node 0
_SHEBANG = b"#!/usr/bin/env python3\n"
# Runs under whatever Python starts it, also under 2.7, which gets a message.
_MAIN = b"""\
import sys
if sys.version_info < (3, 8):
    sys.stderr.write("clustertool join: %s is Python %s, too old\\n" % (sys.executable, sys.version.split()[0]))
    sys.stderr.write("  fix: start the bundle with Python 3.8 or newer\\n")
    sys.exit(69)
from clustertool.node.join.main import start_bundle
sys.exit(start_bundle(sys.argv))
"""


def write(path: Path, join: JoinFile, workspace: Workspace | None = None) -> bool:
    """Write a bundle to a new file of mode 0600, and return whether the workspace is in it: one of more than 64 MiB is not.

    Raises UsageError where the file exists, OSError if it cannot be written, and DispatchError for a workspace that changes
    meanwhile; no new file is left then.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except FileExistsError:
        raise UsageError(f"{path} exists", "remove it, or write to another file") from None
    fits = workspace is not None and workspace.size <= LARGEST_WORKSPACE
    try:
        with open(fd, "wb") as file:
            _write_bundle(file, join, workspace if fits else None)
    except BaseException:
        os.unlink(path)
        raise
    return fits


def content(join: JoinFile) -> bytes:
    """Return the bytes of a bundle without a workspace."""
    file = io.BytesIO()
    _write_bundle(file, join, None)
    return file.getvalue()


def _write_bundle(file: BinaryIO, join: JoinFile, workspace: Workspace | None) -> None:
    """Write a bundle: the code, the join file, the module that reads NVIDIA's devices, and the workspace, if it is given."""
    file.write(_SHEBANG)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in join_process.code().items():
            archive.writestr(name, text)
        archive.writestr("__main__.py", _MAIN)
        archive.writestr(JOIN_FILE, to_json(join))
        digest, packed = node_bundle.nvml()
        archive.writestr(NVML + digest, packed)
        if workspace is not None:
            _add_workspace(archive, Shipment(workspace, {}))


def _add_workspace(archive: zipfile.ZipFile, shipment: Shipment) -> None:
    """Write the manifest of a workspace, and each of its pieces."""
    archive.writestr(MANIFEST, shipment.text)
    for number, piece in enumerate(shipment.pieces):
        if number:
            archive.writestr(PIECES + piece.name, shipment.read(number))
