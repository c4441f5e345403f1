"""Images in the store of a node's container runtime: inspect, pull, save as files, load from a release.

A saved image travels as a release (node/storage/release_store.py), so pieces that the node has from an earlier image are not
sent again. podman reads a folder of files, which lies in ROOT_DIR/.clustertool/images until podman has loaded it. docker reads
a tar archive, which is made while it reads. apptainer uses the .sif file there, which stays as long as its release.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import tarfile
import time
from typing import TYPE_CHECKING, BinaryIO, Callable, Iterator, Tuple

from clustertool.errors import DispatchError, NotFound
from clustertool.model import paths
from clustertool.model.container import image_commands as commands
from clustertool.model.container.container_names import APPTAINER, AUTO, DOCKER, PODMAN
from clustertool.model.dispatch import manifest
from clustertool.model.hints import PROGRAM
from clustertool.model.quantities import human_bytes
from clustertool.node.container.image_program import require_wanted, run
from clustertool.node.storage import files
from clustertool.node.storage.release_store import Store, remove, unpack, writing
from clustertool.node.system import programs
from clustertool.node.system.node_context import NodeContext

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import ImageAnswer
    from clustertool.model.wire.agent_requests import ImageRequest, LoadImageRequest

_QUICK = 60.0  # seconds for a runtime to name an image
_STALE = 24 * 3600.0  # seconds after which nothing writes a folder that is not complete, where there are no locks
_YOUNG = 5.0  # seconds in which a folder gets its lock
_NONE = ("", "", 0)


def inspect_image(node: NodeContext, request: ImageRequest) -> ImageAnswer:
    """The image as this node has it. Raises NotFound where it has no runtime."""
    runtime, program = found_runtime(request["runtime"], request["image"])
    if runtime == APPTAINER:
        path = _pulled(node, request["image"])
        return _answer(runtime, (path if os.path.exists(path) else "", path, 0))
    return _answer(runtime, inspect(program, request["image"]))


def pull_image(node: NodeContext, request: ImageRequest) -> ImageAnswer:
    """Pull the image. The runtime reads its own login files. Raises DispatchError."""
    runtime, program = found_runtime(request["runtime"], request["image"])
    image = request["image"]
    file = _pulled(node, image)
    if runtime == APPTAINER:
        if commands.is_file(image):
            raise NotFound(f"there is no file {image}", 'copy it to the node, or set IMAGE_FROM = "laptop"')
        files.make_dir(os.path.dirname(os.path.dirname(file)), os.path.basename(os.path.dirname(file)))
    with _with_room(program, runtime, node.root):
        if runtime == APPTAINER:
            part = f"{file}.{os.urandom(4).hex()}.part"
            try:
                run(commands.pull(program, runtime, image, part))
                os.rename(part, file)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(part)
            return _answer(runtime, (file, file, 0))
        run(commands.pull(program, runtime, image, ""))
    return _answer(runtime, inspect(program, image))


def load_image(node: NodeContext, request: LoadImageRequest) -> ImageAnswer:
    """Load a release into the runtime, under the image's name. Raises DispatchError."""
    runtime, program = found_runtime(request["runtime"], request["image"])
    store, release, kind = Store(node.root), request["release"], request["kind"]
    top = _images(node)
    _remove_stale(top)
    if kind == commands.COPY_FILE:
        return _answer(runtime, _place_file(store, release, os.path.join(top, release)))
    with _with_room(program, runtime, node.root, request["bytes"]):
        if kind == commands.COPY_DIR:
            with _new_folder(top, release) as part:
                with writing(store):
                    unpack(store, release, part)
                run(commands.load(program, kind, part))
        else:
            with store.used():
                run(commands.load(program, kind, ""), feed=lambda file: _write_archive(store, release, file))
        id, path, size = inspect(program, request["image_id"])
        if id and "@" not in request["image"]:
            run(commands.tag(program, id, request["image"]))
    return _answer(runtime, (id, path, size))


# -- also on the laptop -------------------------------------------------------------------------------------------------


def found_runtime(runtime: str, image: str) -> Tuple[str, str]:
    """Its name, and the path of its program. Raises NotFound."""
    only = [APPTAINER] if commands.only_for_apptainer(image) else [DOCKER, PODMAN, APPTAINER]
    names = only if runtime == AUTO else [runtime]
    for name in names:
        program = programs.find(name)
        if program:
            return name, program
    what = f"there is no {' or '.join(names)} on PATH"
    raise NotFound(what, "install one of them, or choose another `runtime`")


def inspect(program: str, image: str) -> Tuple[str, str, int]:
    """(id, what ranks name, bytes) of an image; the id is "" if it is not there. Raises DispatchError for other errors."""
    code, out, err = programs.output(commands.inspect(program, image), _QUICK)
    if code == 0 and len(out.split()) == 2:
        id, size = out.split()
        return commands.plain_id(id), commands.plain_id(id), int(size)
    text = err.lower()
    if code not in (-1, 127) and ("no such" in text or "not known" in text or "not found" in text):
        return _NONE
    lines = err.strip().splitlines() or [f"exit code {code}"]
    raise DispatchError(f"{os.path.basename(program)} image inspect: {lines[-1]}", f"try it by hand; {PROGRAM} check")


def save(
    program: str, kind: str, runtime: str, image: str, folder: str, check: Callable[[], None] = require_wanted
) -> str:
    """Write an image to an empty folder; the id that it has when it was loaded. Raises DispatchError."""
    argv = commands.save(program, kind, runtime, image, folder)
    try:
        if kind == commands.COPY_DIR:
            run(argv, check)
        else:
            run(argv, check, drain=lambda file: _extract(file, folder))
        with open(os.path.join(folder, "manifest.json"), "rb") as file:
            found = json.load(file)
        if kind == commands.COPY_DIR:
            return commands.plain_id(str(found["config"]["digest"]))
        return os.path.basename(str(found[0]["Config"])).partition(".")[0]
    except OSError as error:
        raise DispatchError(f"the image cannot be written to {folder}: {error.strerror}", "make room") from None
    except (ValueError, LookupError, TypeError, AttributeError, tarfile.TarError) as error:
        raise DispatchError(
            f"{runtime} has written no image to {folder}: {error}", "save it by hand to test that"
        ) from None


def remove_copy(folder: str) -> None:
    """Remove the files of an image; nothing happens where there are none."""
    with contextlib.suppress(OSError):
        remove(folder)


def _extract(file: BinaryIO, folder: str) -> None:
    """The files of a tar archive that the runtime writes."""
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


def _answer(runtime: str, found: Tuple[str, str, int]) -> ImageAnswer:
    return {"runtime": runtime, "image_id": found[0], "image": found[1], "bytes": found[2]}


def _images(node: NodeContext) -> str:
    files.make_root(node.root)
    return files.make_dir(node.root, paths.OURS, paths.IMAGES)


def _pulled(node: NodeContext, image: str) -> str:
    """Where apptainer's copy of an image lies."""
    if commands.is_file(image):
        return image
    return os.path.join(_images(node), hashlib.sha256(image.encode()).hexdigest()[:32], commands.SIF)


@contextlib.contextmanager
def _new_folder(top: str, name: str) -> Iterator[str]:
    """A folder that is removed at the end, unless it was renamed. It has a lock for as long."""
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
    """What a machine that crashed, or a killed process, has left."""
    for name in os.listdir(top):
        path = os.path.join(top, name)
        with contextlib.suppress(OSError):
            age = time.time() - os.lstat(path).st_mtime
            if name.endswith(".part") and age > (_YOUNG if _unlocked(path) else _STALE):
                remove(path)


def _unlocked(path: str) -> bool:
    """False also where there are no locks."""
    with files.closing(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def _place_file(store: Store, release: str, folder: str) -> Tuple[str, str, int]:
    """Unpack a .sif file, unless it is there; the time of its folder is that of its last use."""
    path = os.path.join(folder, commands.SIF)
    if not os.path.exists(path):
        with _new_folder(os.path.dirname(folder), release) as part, writing(store):
            unpack(store, release, part)
            with contextlib.suppress(FileExistsError):  # another request was quicker
                os.rename(part, folder)
    os.utime(folder)
    return release, path, os.stat(path).st_size


def _write_archive(store: Store, release: str, file: BinaryIO) -> None:
    """The tar archive of a release, without a copy of it on the disk."""
    rows = manifest.read_rows(store.manifest(release))
    for one in manifest.files(rows):
        about = tarfile.TarInfo(one.path)
        about.size, about.mode = one.size, stat.S_IMODE(one.mode)
        file.write(about.tobuf(tarfile.GNU_FORMAT))
        for data in [store.small(one)] if one.pack else (store.read(name) for name, _, _ in one.parts):
            file.write(data)
        file.write(bytes(-one.size % tarfile.BLOCKSIZE))
    for _, path, to in [row for row in rows if row[0] == "l"]:
        about = tarfile.TarInfo(path)
        about.type, about.linkname = tarfile.SYMTYPE, to
        file.write(about.tobuf(tarfile.GNU_FORMAT))
    file.write(bytes(2 * tarfile.BLOCKSIZE))


@contextlib.contextmanager
def _with_room(program: str, runtime: str, root: str, need: int = 0) -> Iterator[None]:
    """Raises DispatchError, with bytes, where the runtime's disk has no room for an image."""
    place = root
    if runtime != APPTAINER:
        place = programs.output(commands.storage(program, runtime), _QUICK)[1].strip() or root
    free = _free(place)
    fix = f"remove images that are not needed there ({runtime} image prune)"
    if 0 <= free < need:
        raise DispatchError(f"the image needs {human_bytes(need)} in {place}, and {human_bytes(free)} are free", fix)
    try:
        yield
    except DispatchError as error:
        if "no space" in error.what.lower() or "quota" in error.what.lower():
            left = f" ({human_bytes(max(0, _free(place)))} are free in {place} now)"
            raise DispatchError(error.what + left, error.fix or fix) from None
        raise


def _free(place: str) -> int:
    """Bytes; -1 if that cannot be known, as of the disk of a daemon elsewhere."""
    try:
        found = os.statvfs(place)
    except OSError:
        return -1
    return found.f_bavail * found.f_frsize
