"""This module handles images in the store of a container runtime: inspect, pull, save as files, load from a release.

A saved image travels as a release (node/storage/release_store.py), so pieces that the node has from an earlier image are not
sent again. podman reads a folder of files, which lies in ROOT_DIR/.clustertool/images until podman has loaded it. docker reads
a tar archive, which is made while it reads. apptainer uses the .sif file there, which stays as long as its release.
"""

from __future__ import annotations

import binascii
import contextlib
import fcntl
import hashlib
import json
import os
import stat
import tarfile
import time
import zlib
from typing import TYPE_CHECKING, BinaryIO, Callable, Dict, Iterator, List, Tuple

from clustertool.errors import DispatchError, NotFound
from clustertool.model import paths
from clustertool.model.container import container_runtimes
from clustertool.model.container.container_runtimes import APPTAINER, Image
from clustertool.model.dispatch import manifest
from clustertool.model.hints import PROGRAM
from clustertool.model.quantities import human_bytes
from clustertool.node.container.image_program import require_wanted, run
from clustertool.node.storage import files
from clustertool.node.storage.release_store import Store, remove, unpack, writing
from clustertool.node.system import file_lock, pressure, programs
from clustertool.node.system.node_context import NodeContext, step

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import ImageAnswer, SavedImageAnswer
    from clustertool.model.wire.agent_requests import ImageRequest, LoadImageRequest, SaveImageRequest

_QUICK = 60.0  # seconds for a runtime to name an image
_STALE = 24 * 3600.0  # seconds after which nothing writes a folder that is not complete, where there are no locks
_YOUNG = 5.0  # seconds in which a folder gets its lock


def pull_image(node: NodeContext, request: ImageRequest) -> ImageAnswer:
    """Pull the image, with the runtime's own login files, and answer {image_id, digest, size}.

    Apptainer's becomes a .sif file in ROOT_DIR, whose path is the id. Raises DispatchError if this fails, and NotFound if
    apptainer's image is the path of a file.
    """
    runtime, program, image = request["runtime"], request["program"], request["image"]
    with _room_required(program, runtime, node.root):
        if runtime != APPTAINER:
            run(container_runtimes.pull(program, image))
            return _answer(inspect(program, image))
        if container_runtimes.is_file(image):
            raise NotFound(f"there is no file {image}", 'copy it to the node, or set IMAGE_FROM = "laptop"')
        top = _make_image_folder(node)
        folder = os.path.join(top, hashlib.sha256(image.encode()).hexdigest()[:32])
        with _new_folder(top, os.path.basename(folder)) as part:
            run(container_runtimes.pull_file(program, image, os.path.join(part, container_runtimes.SIF)))
            remove_copy(folder)
            os.rename(part, folder)
        return _answer(_describe_file(folder))


def load_image(node: NodeContext, request: LoadImageRequest) -> ImageAnswer:
    """Load a release into the runtime under the image's name, and answer {image_id, digest, size}.

    Apptainer's is unpacked in ROOT_DIR; its id is the path. Raises DispatchError if the release is damaged, there is no room,
    or the runtime fails.
    """
    runtime, program = request["runtime"], request["program"]
    store, release, kind = Store(node.root), request["release"], request["kind"]
    top = _make_image_folder(node)
    _remove_stale(top)
    if kind == container_runtimes.COPY_FILE:
        return _answer(_place_file(store, release, os.path.join(top, release)))
    with _room_required(program, runtime, node.root, request["bytes"]):
        if kind == container_runtimes.COPY_DIR:
            with _new_folder(top, release) as part:
                with writing(store):
                    unpack(store, release, part)
                run(container_runtimes.load(program, kind, part))
        else:
            with store.used():
                run(container_runtimes.load(program, kind, ""), feed=lambda file: _write_archive(store, release, file))
        found = inspect(program, request["image_id"])
        if found.image_id and "@" not in request["image"]:
            run(container_runtimes.tag(program, found.image_id, request["image"]))
    return _answer(found)


def save_image(node: NodeContext, request: SaveImageRequest) -> SavedImageAnswer:
    """Save this node's image as a release in the store, and prune the store. Other nodes get it from here.

    Answers {release, packed: the manifest by zlib and base64, bytes: its size, image_id: "" for a .sif file}. Raises
    DispatchError if this fails.
    """
    program, kind, image = request["program"], request["kind"], request["image"]
    store, top = Store(node.root), _make_image_folder(node)
    _remove_stale(top)
    with _new_folder(top, "saved") as part:
        if kind == container_runtimes.COPY_FILE:
            os.symlink(image, os.path.join(part, container_runtimes.SIF))
            id = ""
        else:
            id = save(program, kind, request["runtime"], image, part)
        with writing(store), store.used():
            release, text = _store_files(store, part)
    with writing(store):
        store.prune()
    packed = binascii.b2a_base64(zlib.compress(text), newline=False).decode()
    return {"release": release, "packed": packed, "bytes": len(text), "image_id": id}


def _store_files(store: Store, folder: str) -> Tuple[str, bytes]:
    """Write the files of a folder to the store, as a release; return its name and its manifest."""
    entries: List[manifest.Entry] = []
    chunks: Dict[str, List[str]] = {}
    for at, names, found in os.walk(folder):
        names.sort()
        path = os.path.relpath(at, folder)
        if path != ".":
            entries.append(manifest.Entry(path, "dir", 0o700, 0, ""))
        for name in found:
            full = os.path.join(at, name)
            path = os.path.relpath(full, folder)
            if os.path.islink(full) and name != container_runtimes.SIF:
                entries.append(manifest.Entry(path, "link", 0, 0, os.readlink(full)))
                continue
            with open(full, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                chunks[path] = [_store_piece(store, file.read(length)) for length in manifest.cut(size)]
            entries.append(manifest.Entry(path, "file", 0o600, size, manifest.content_of(chunks[path])))
    release = manifest.digest(entries)
    times = dict.fromkeys((entry.path for entry in entries), 0)
    alone = {entry.path: chunks[entry.path] for entry in entries if entry.kind == "file" and entry.size}
    text = manifest.text_of(manifest.rows(entries, times, alone, {}, {}))
    store.complete(release, text)
    return release, text


def _store_piece(store: Store, data: bytes) -> str:
    """Write a piece to the store, unless it is there, and return its name."""
    step()
    name = manifest.name_of(data)
    if data and store.missing({name: len(data)}):
        store.add(name, data)
        store.sync(name)
    return name


# -- also on the laptop -------------------------------------------------------------------------------------------------


def inspect(program: str, image: str) -> Image:
    """Return id, digest and size of an image in the runtime's store; the id is "" if it is not there.

    program: the path of the runtime's client. Raises DispatchError for another error, or after 60 s without an answer.
    """
    code, out, err = programs.output([program, "image", "inspect", image], _QUICK, cwd="/")
    text = err.lower()
    if code == 0 or "no such" in text or "not known" in text or "not found" in text:
        return container_runtimes.read_image(out if code == 0 else "", image)
    lines = err.strip().splitlines() or [f"exit code {code}"]
    raise DispatchError(f"{os.path.basename(program)} image inspect: {lines[-1]}", f"try it by hand; {PROGRAM} check")


def save(
    program: str, kind: str, runtime: str, image: str, folder: str, check: Callable[[], None] = require_wanted
) -> str:
    """Write an image to an empty folder, and return the id that it gets when it is loaded. Raises DispatchError.

    program: the path of the runtime's client. kind: the form, COPY_DIR or COPY_ARCHIVE. check: see image_program.run().
    """
    argv = container_runtimes.save(program, kind, runtime, image, folder)
    try:
        if kind == container_runtimes.COPY_DIR:
            run(argv, check)
        else:
            run(argv, check, drain=lambda file: _extract(file, folder))
        with open(os.path.join(folder, "manifest.json"), "rb") as file:
            found = json.load(file)
        if kind == container_runtimes.COPY_DIR:
            return container_runtimes.plain_id(str(found["config"]["digest"]))
        return os.path.basename(str(found[0]["Config"])).partition(".")[0]
    except OSError as error:
        raise DispatchError(f"the image cannot be written to {folder}: {error.strerror}", "make room") from None
    except (ValueError, LookupError, TypeError, AttributeError, tarfile.TarError) as error:
        what = f"{runtime} has written no image to {folder}: {error}"
        raise DispatchError(what, "save it by hand to test that") from None


def remove_copy(folder: str) -> None:
    """Remove the folder of an image, if it is there. Errors are ignored."""
    with contextlib.suppress(OSError):
        remove(folder)


def _extract(file: BinaryIO, folder: str) -> None:
    """Extract folders, files and links of a tar archive that the runtime writes, without those that lead out of the folder."""
    with tarfile.open(fileobj=file, mode="r|") as archive:
        for member in archive:
            path = os.path.normpath(os.path.join(folder, member.name))
            if not path.startswith(folder + "/"):
                continue
            os.makedirs(path if member.isdir() else os.path.dirname(path), exist_ok=True)
            if member.issym():
                os.symlink(member.linkname, path)
            source = archive.extractfile(member) if member.isreg() else None
            if source is not None:
                with files.closing(files.make_new(path)) as fd:
                    for data in iter(lambda: source.read(1 << 20), b""):  # noqa: B023 - it ends with this turn
                        files.write_all(fd, data)


# -- on the node ----------------------------------------------------------------------------------------------------------


def _answer(found: Image) -> ImageAnswer:
    """Build the answer that describes an image."""
    return {"image_id": found.image_id, "digest": found.digest, "size": found.size}


def _make_image_folder(node: NodeContext) -> str:
    """Make the folder for images in ROOT_DIR, and return its path."""
    files.make_root(node.root)
    return files.make_dir(node.root, paths.OURS, paths.IMAGES)


@contextlib.contextmanager
def _new_folder(top: str, name: str) -> Iterator[str]:
    """Create a locked folder, yield its path, and remove it at the end of the `with` block, unless it was renamed."""
    part = os.path.join(top, f"{name}.{os.urandom(4).hex()}.part")
    os.mkdir(part, 0o700)
    with files.closing(os.open(part, os.O_RDONLY)) as fd:
        with contextlib.suppress(OSError):  # as NFS, which locks no folders
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield part
        finally:
            remove_copy(part)


def _remove_stale(top: str) -> None:
    """Remove incomplete folders that no process has locked; where there are no locks, those older than a day."""
    for name in os.listdir(top):
        path = os.path.join(top, name)
        with contextlib.suppress(OSError):
            age = time.time() - os.lstat(path).st_mtime
            if name.endswith(".part") and age > (_YOUNG if _is_unlocked(path) else _STALE):
                remove(path)


def _is_unlocked(path: str) -> bool:
    """Check that no process has the lock of a folder. False also where there are no locks."""
    with files.closing(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as fd:
        return file_lock.try_lock(fd, fcntl.LOCK_EX)


def _place_file(store: Store, release: str, folder: str) -> Image:
    """Unpack the .sif file of a release in this folder, unless it is there; return its path as id, digest and size."""
    if not os.path.exists(os.path.join(folder, container_runtimes.SIF)):
        with _new_folder(os.path.dirname(folder), release) as part, writing(store):
            unpack(store, release, part)
            with contextlib.suppress(FileExistsError):  # another request was quicker
                os.rename(part, folder)
    return _describe_file(folder)


def _describe_file(folder: str) -> Image:
    """Return path (as id), digest and size of the .sif file in a folder; set the folder's time to now, that of its last use."""
    path = os.path.join(folder, container_runtimes.SIF)
    os.utime(folder)
    with open(path, "rb") as file:
        digest = container_runtimes.sif_digest(file.read(container_runtimes.SIF_HEADER))
    return Image(path, digest, os.stat(path).st_size)


def _write_archive(store: Store, release: str, file: BinaryIO) -> None:
    """Write the tar archive of a release, without a copy of it on the disk."""
    rows = manifest.read_rows(store.manifest(release))
    for one in manifest.files(rows):
        about = tarfile.TarInfo(one.path)
        about.size, about.mode = one.size, stat.S_IMODE(one.mode)
        file.write(about.tobuf(tarfile.GNU_FORMAT))
        for data in [store.read_packed(one)] if one.pack else (store.read(name) for name, _, _ in one.parts):
            file.write(data)
        file.write(bytes(-one.size % tarfile.BLOCKSIZE))
    for _, path, to in [row for row in rows if row[0] == "l"]:
        about = tarfile.TarInfo(path)
        about.type, about.linkname = tarfile.SYMTYPE, to
        file.write(about.tobuf(tarfile.GNU_FORMAT))
    file.write(bytes(2 * tarfile.BLOCKSIZE))


@contextlib.contextmanager
def _room_required(program: str, runtime: str, root: str, need: int = 0) -> Iterator[None]:
    """Require `need` free bytes where the runtime keeps images; add the free ones to an error of the body for a full disk.

    root: ROOT_DIR, where apptainer keeps them. Raises DispatchError if fewer are free.
    """
    place = root
    if runtime != APPTAINER:
        place = programs.output(container_runtimes.storage(program, runtime), _QUICK)[1].strip() or root
    free = pressure.free_bytes(place)
    fix = f"remove images that are not needed there ({runtime} image prune)"
    if 0 <= free < need:
        raise DispatchError(f"the image needs {human_bytes(need)} in {place}, and {human_bytes(free)} are free", fix)
    try:
        yield
    except DispatchError as error:
        if "no space" in error.what.lower() or "quota" in error.what.lower():
            left = f" ({human_bytes(max(0, pressure.free_bytes(place)))} are free in {place} now)"
            raise DispatchError(error.what + left, error.fix or fix) from None
        raise
