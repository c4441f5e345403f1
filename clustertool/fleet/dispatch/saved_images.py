"""Images of this machine are saved as files for a dispatch. They are kept, so that an image is saved once.

~/.cache/clustertool/images/<id>-<kind> has the files; a folder has this name only once it is complete.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clustertool.errors import DispatchError, NotFound
from clustertool.fleet import this_user
from clustertool.fleet.dispatch.workspace import Workspace, read_workspace
from clustertool.model.container import container_runtimes
from clustertool.model.container.container_runtimes import APPTAINER, AUTO, DOCKER, PODMAN, only_for_apptainer
from clustertool.model.quantities import human_bytes
from clustertool.node.container import image_program, image_store
from clustertool.node.system import programs

_KEEP = 2  # images whose files are kept, the newest included
_STALE = 24 * 3600.0  # seconds after which nothing writes a folder that is not complete


@dataclass(frozen=True)
class LocalImage:
    """An image in the store of a runtime of this machine, or a .sif file. bytes: in that store."""

    name: str
    runtime: str
    program: str
    id: str  # "": it is not there
    bytes: int = 0


@dataclass(frozen=True)
class SavedImage:
    """The files of an image. id: that it has once a node has loaded it."""

    workspace: Workspace
    kind: str
    id: str
    bytes: int


def find(runtime: str, image: str) -> LocalImage:
    """Find an image on this machine: a .sif file, or in the store of `runtime`; for "auto" in docker's, else in podman's.

    If no store has it, the id is "", and the runtime the first one here that answers. Raises NotFound if none does, for a .sif
    file that does not exist, and for another image of apptainer.
    """
    if container_runtimes.is_file(image):
        with contextlib.suppress(OSError):
            info = os.stat(image)
            id = f"{info.st_size}-{info.st_mtime_ns}-{info.st_ino}"
            return LocalImage(image, APPTAINER, "", id, info.st_size)
        raise NotFound(f"there is no file {image} on this machine", "build it there, or change IMAGE_FROM")
    if only_for_apptainer(image) or runtime == APPTAINER:
        what = f'IMAGE_FROM = "laptop" sends the .sif files of apptainer, and {image!r} is no path of one'
        raise NotFound(what, "apptainer build FILE.sif IMAGE, and give the path of that file")
    found: list[LocalImage] = []
    problems: list[str] = []
    for name in (DOCKER, PODMAN) if runtime == AUTO else (runtime,):  # apptainer has files
        program = programs.find(name)
        if not program:
            problems.append(f"no {name}")
            continue
        try:
            here = image_store.inspect(program, image)
            found.append(LocalImage(image, name, program, here.image_id, max(0, here.size)))
        except DispatchError as error:
            problems.append(error.what)
    present = [one for one in found if one.id]
    if found:
        return (present or found)[0]
    what = f'IMAGE_FROM = "laptop": {"; ".join(problems)} (on this machine)'
    raise NotFound(what, 'install docker or podman here, or set IMAGE_FROM = "registry"')


def pull(image: LocalImage, check: Callable[[], None]) -> LocalImage:
    """Pull the image from its registry, and find it again. Raises DispatchError if the pull fails, or what `check` raises."""
    image_program.run(container_runtimes.pull(image.program, image.name), check)
    return find(image.runtime, image.name)


def save(image: LocalImage, kind: str, check: Callable[[], None]) -> SavedImage:
    """Save an image as files below the cache folder, unless an earlier dispatch has done so, and read them as a workspace.

    kind: its form, COPY_DIR, COPY_ARCHIVE or COPY_FILE. check: called ten times a second while the runtime saves it.

    Before a new one is saved, all others but the newest are removed. Raises DispatchError without room or if the runtime fails,
    ConfigError if the cache folder cannot be made, or what `check` raises.
    """
    top = this_user.cache() / "images"
    this_user.make_folder(top, "XDG_CACHE_HOME")
    folder = top / f"{image.id[:32]}-{kind}"
    if not folder.is_dir():
        _remove_unused(top)
        part = top / f"{folder.name}.{secrets.token_hex(4)}.part"
        part.mkdir(mode=0o700)
        try:
            _write_files(image, kind, part / "files", check)
            with contextlib.suppress(OSError):  # another command was quicker
                part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    os.utime(folder)
    id = (folder / "files.id").read_text()
    return SavedImage(read_workspace(folder / "files"), kind, id, image.bytes)


def _write_files(image: LocalImage, kind: str, folder: Path, check: Callable[[], None]) -> None:
    """Write the files of an image into a new folder, and its id into `files.id` next to it.

    kind, check: see save(). A .sif file is linked, or copied where that fails. Raises DispatchError without room for them.
    """
    folder.mkdir(mode=0o700)
    free = shutil.disk_usage(folder).free
    if free < image.bytes and kind != container_runtimes.COPY_DIR:
        what = f"{folder.parent.parent} has {human_bytes(free)} free, and the image has {human_bytes(image.bytes)}"
        raise DispatchError(what, "make room, or set XDG_CACHE_HOME to another folder")
    id = image.id
    if kind == container_runtimes.COPY_FILE:
        try:
            os.link(image.name, folder / container_runtimes.SIF)
        except OSError:  # on another file system, or of another user
            shutil.copyfile(image.name, folder / container_runtimes.SIF)
    else:
        id = image_store.save(image.program, kind, image.runtime, image.name, str(folder), check)
    (folder.parent / "files.id").write_text(id)


def _remove_unused(top: Path) -> None:
    """Remove all complete images but the newest one, which makes room for one more, and incomplete ones older than a day."""
    found = sorted(top.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    complete = [path for path in found if path.suffix != ".part"]
    old = [path for path in found if path.suffix == ".part" and time.time() - path.stat().st_mtime > _STALE]
    for path in (*complete[_KEEP - 1 :], *old):
        shutil.rmtree(path, ignore_errors=True)
