"""A bundle is one file with all that a machine needs to join: the code, the join file, and the workspace where it fits.

fleet/joining/join_bundle.py writes it. It has the job's key, so it is checked before it is used.
"""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
import zlib
from typing import Callable, List, TypeVar

from clustertool.errors import DataError, DispatchError, PreflightError
from clustertool.model.dispatch import manifest
from clustertool.model.joining import join_file
from clustertool.model.joining.join_file import JOIN_FILE, MANIFEST, NVML, PIECES, JoinFile
from clustertool.node.devices import detect, nvml, sent_files
from clustertool.node.join.join_engine import engine_of, require_private
from clustertool.node.storage.release_store import Store, writing
from clustertool.node.system import path_trust

T = TypeVar("T")
_DAMAGED = (OSError, zipfile.BadZipFile, KeyError, zlib.error, EOFError)
_FIX = "copy it again, or write a new one"


class BundleContent:
    """The content of the file at `path`. It is read once, so the file may be removed while the machine joins."""

    def __init__(self, path: str) -> None:
        """Read the bundle, and check that no other user can read it, or replace it or a folder above it.

        One for Kubernetes is a file of a Secret: it may belong to root, and others may read it, but not change it. Raises
        PreflightError, also for a file that cannot be read; DataError for a damaged one.
        """
        self._path = os.path.abspath(path)
        try:
            with open(self._path, "rb") as file:
                self.data = file.read()
                info = os.fstat(file.fileno())
        except OSError as error:
            raise PreflightError(f"{self._path} cannot be read: {error.strerror}", _FIX) from None
        if info.st_mode & 0o077:
            engine_of(self.join_file()).require_private(info, self._path)
        else:
            require_private(info, self._path)
        wrong = path_trust.unsafe(os.path.dirname(self._path))
        if wrong:
            raise PreflightError(f"{self._path} has the job's key, and its folder is open: {wrong.what}", wrong.fix)

    def join_file(self) -> JoinFile:
        """Parse the join file in the bundle. Raises DataError for a damaged one."""
        return join_file.from_json(self._content(JOIN_FILE).decode("utf-8", "replace"))

    def remove(self) -> None:
        """Remove the file, so that its keys are in the memory of the machines only. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def install(self, root: str, release: str) -> None:
        """Put the bundle's workspace, if it has one, into the store of ROOT_DIR where it is missing, and prune the store.

        Raises PreflightError if ROOT_DIR is not this user's, DispatchError if a piece is damaged or the store cannot be
        written, and DataError for a damaged bundle.
        """
        if not release or MANIFEST not in self._names():
            return
        store = Store(root)
        if store.has(release):
            return
        text = self._content(MANIFEST)
        sizes = manifest.sizes(manifest.read_rows(text))
        with writing(store):
            with store.used():
                for name in store.missing(sizes):
                    if not store.add(name, self._content(PIECES + name)):
                        raise DispatchError(f"a piece of the workspace in {self._path} is damaged", _FIX)
                    store.sync(name)
                store.complete(release, text)
            store.prune()

    def install_nvml(self) -> None:
        """Store the module that reads NVIDIA's devices, if the bundle has it, this machine has GPUs, and it is not here yet.

        No laptop sends it to machines that join.
        """
        digests = [name[len(NVML) :] for name in self._names() if name.startswith(NVML)]
        for digest in digests if detect.detect_cards()[0] == "gpu" else []:
            if not nvml.has(digest):
                sent_files.keep("nvml", digest, self._content(NVML + digest))

    def _names(self) -> List[str]:
        """List the names of the files in the bundle."""
        return self._in_archive(lambda archive: archive.namelist())

    def _content(self, name: str) -> bytes:
        """Return the content of a file in the bundle. Raises DataError if it is missing or damaged."""
        return self._in_archive(lambda archive: archive.read(name))

    def _in_archive(self, read: Callable[[zipfile.ZipFile], T]) -> T:
        """Open the bundle as a ZIP archive, and return what `read` returns for it. Raises DataError for a damaged bundle."""
        try:
            with zipfile.ZipFile(io.BytesIO(self.data)) as archive:
                return read(archive)
        except _DAMAGED as error:
            raise DataError(f"{self._path} is no bundle, or is damaged: {error}", _FIX) from None
