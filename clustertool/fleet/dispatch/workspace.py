"""A workspace is a folder that was walked once: the files to send, the excluded files with reasons, and its digest."""

from __future__ import annotations

import os
import posixpath
import re
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

import pathspec

from clustertool.errors import DataError
from clustertool.fleet.dispatch.cache import WorkspaceCache
from clustertool.model.dispatch.manifest import SMALL, TINY, Entry, content_of, cut, digest, name_of
from clustertool.model.paths import LOGS_MARK, OURS
from clustertool.node.storage import shown_logs

IGNORE_FILE = ".clusterignore"
# Written by jobs, by tools or for this laptop only.
_ANYWHERE = {
    ".git": "version control",
    "__pycache__": "compiled code",
    **dict.fromkeys((OURS, LOGS_MARK), "the tool's own"),
}
# Folders of earlier jobs: these at the top, unless they have code (decision 82), and those with LOGS_MARK.
LOGS, RESULTS = "logs of jobs", "results of jobs"
_TOP = {"output": RESULTS, "log": LOGS}
_GIT = "git -c core.fsmonitor=false ls-files -z --".split()  # a configuration of the workspace starts no program
_GIT_TIME = 20.0  # seconds
_FETCHED = re.compile(
    r"JOB\d{8}-\d{6}-[a-z2-7]{4}(-\d+)?"
)  # what `fetch` and --log-dir write, unless another folder is named
# Not sent unless a line of .clusterignore takes them (decision 72); files that begin as a private key, too.
PRIVATE_KEY, CREDENTIALS = "private key", "credentials"
_FILES = {**dict.fromkeys(("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519"), PRIVATE_KEY), ".netrc": CREDENTIALS}
_FOLDERS = dict.fromkeys((".ssh", ".aws", ".kube"), CREDENTIALS)
_KEY_LINE = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY( BLOCK)?-----\s*(\n|$)")
_KEY_LINE_LIMIT = 200  # bytes
_MAYBE_SECRET = ".env"
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}
_LARGE = 100_000_000
_FORGOTTEN = "checkpoints checkpoint ckpt wandb mlruns node_modules conda-meta site-packages".split()
_STATES = {".pt", ".pth", ".ckpt", ".safetensors", ".pdparams", ".pdopt", ".h5", ".onnx"}
_DOZENS = 100  # small files that one thread reads in one go
_WAIT = 0.002  # seconds of reading after which progress is shown
_READ = 64 << 20  # bytes of small files that are kept for the packs
_WIDTH = 4  # threads that walk and read
_SIZE_LIMIT = 200_000  # files that are counted in a folder that is left out


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class LeftOut:
    """A file or folder that is not sent. `size` in bytes."""

    path: str
    why: str
    size: int


@dataclass(frozen=True)
class Workspace:
    """`times`: mtimes in ns. `chunks`: the pieces of every file, by name. `read`: content of small files, as far as it fits.

    `unsure`: paths of files that may have secrets and that .clusterignore does not name.
    """

    top: Path
    entries: tuple[Entry, ...]
    left_out: tuple[LeftOut, ...] = ()
    times: Mapping[str, int] = field(default_factory=dict)
    chunks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    read: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    unsure: tuple[str, ...] = ()

    @cached_property
    def release(self) -> str:
        return digest(self.entries)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(entry.path for entry in self.entries if entry.kind == "file")

    @property
    def links(self) -> tuple[str, ...]:
        return tuple(entry.path for entry in self.entries if entry.kind == "link")

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)


def accidents(workspace: Workspace) -> list[tuple[str, int]]:
    """Large things that are seldom meant to be sent: (file, or folder with "/"; bytes), the largest first."""
    sizes: dict[str, int] = {}
    for entry in workspace.entries:
        parts = entry.path.split("/")
        folder = next((at for at, part in enumerate(parts[:-1], 1) if part.lower() in _FORGOTTEN), 0)
        if folder:
            path = "/".join(parts[:folder]) + "/"
        elif os.path.splitext(entry.path)[1].lower() in _STATES:
            path = entry.path
        else:
            continue
        sizes[path] = sizes.get(path, 0) + entry.size
    return sorted(((path, size) for path, size in sizes.items() if size >= _LARGE), key=lambda found: -found[1])


def read_workspace(top: Path) -> Workspace:
    """Raises DataError for a missing folder, or one with files that cannot be copied."""
    if not top.is_dir():
        raise DataError(f"there is no workspace {str(top)!r}", "give a folder: --workspace ./job")
    with ThreadPoolExecutor(_WIDTH) as pool:
        crew, walk = _Readers(pool), _Walk(top)
        found = sorted(walk.tree(crew))
        odd = [path for path, info in found if stat.S_IFMT(info.st_mode) not in _KINDS]
        if odd:
            what = f"the workspace has devices, pipes or sockets: {', '.join(map(repr, odd[:5]))}"
            raise DataError(what, f"remove them or name them in {IGNORE_FILE}")
        read: dict[str, bytes] = {}
        files = [(path, info) for path, info in found if stat.S_ISREG(info.st_mode)]
        chunks = _digests(top, files, crew, read, walk.taken)
        for path, info in files:
            if path not in chunks:
                walk.left_out.append(LeftOut(path, PRIVATE_KEY, info.st_size))
        found = [(path, info) for path, info in found if path in chunks or not stat.S_ISREG(info.st_mode)]
        entries = tuple(_entry(top, path, info, chunks) for path, info in found)
        times = {path: info.st_mtime_ns for path, info in found}
    left_out = tuple(sorted(walk.left_out, key=lambda left: left.path))
    return Workspace(top, entries, left_out, times, chunks, read, tuple(sorted(walk.unsure)))


def _entry(top: Path, path: str, info: os.stat_result, chunks: Mapping[str, Sequence[str]]) -> Entry:
    kind, mode = _KINDS[stat.S_IFMT(info.st_mode)], stat.S_IMODE(info.st_mode)
    if kind == "link":
        return Entry(path, kind, 0, 0, os.fsdecode(os.readlink(os.fsencode(top / path))))
    if kind == "dir":
        return Entry(path, kind, mode, 0, "")
    return Entry(path, kind, mode, info.st_size, content_of(chunks[path]))


# -- digests ----------------------------------------------------------------------------------------------------------


Found = tuple[str, os.stat_result]


class _Content(NamedTuple):
    """names: of the pieces of a file. data: its bytes if it is small. private: it begins as a private key."""

    names: list[str]
    data: bytes
    private: bool


_Read = Sequence[tuple[Found, _Content]]


def _digests(
    top: Path, found: Sequence[Found], crew: _Readers, read: dict[str, bytes], taken: Callable[[str], bool]
) -> dict[str, list[str]]:
    """The pieces of all files, without private keys that are not `taken`. Only files that have changed since the last time are
    read, and private keys, which are not remembered: .clusterignore may change."""
    memory = WorkspaceCache(top)
    known, new, keys = memory.digests(), {}, {}
    todo = []
    for path, info in found:
        old = known.get(path)
        if old and old[0] == _key(info):
            new[path] = old
        else:
            todo.append((path, info))
    room = _READ
    for some in _read(os.fsencode(top), todo, crew):
        for (path, info), (names, data, private) in some:
            if not private:
                new[path] = (_key(info), names)
            elif taken(path):
                keys[path] = names
            else:
                continue
            if data and len(data) <= room:
                read[path] = data
                room -= len(data)
    if todo or len(new) != len(known):
        threading.Thread(target=memory.keep_digests, args=(new,)).start()
    return {**{path: names for path, (_, names) in new.items()}, **keys}


def _key(info: os.stat_result) -> tuple[int, int, int, int]:
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino


def _read(top: bytes, todo: Sequence[Found], crew: _Readers) -> Iterator[_Read]:
    """Names, and bytes. Large files alone, small ones by the dozen: to hand one to a thread costs as much as to read it."""

    def names(some: Sequence[Found]) -> _Read:
        return [(item, _names(top, *item)) for item in some]

    yield from crew.each(names, _dozens([item for item in todo if item[1].st_size <= TINY]))
    yield from crew.at_once(names, ([item] for item in todo if item[1].st_size > SMALL))
    yield from crew.at_once(names, _dozens([item for item in todo if TINY < item[1].st_size <= SMALL]))


def _dozens(items: Sequence[Found]) -> Iterator[Sequence[Found]]:
    return (items[at : at + _DOZENS] for at in range(0, len(items), _DOZENS))


def _names(top: bytes, path: str, info: os.stat_result) -> _Content:
    """Read a file. Raises DataError: unreadable, or being written."""
    try:
        fd = os.open(top + b"/" + os.fsencode(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            data, names, at, private = b"", [], 0, False
            for size in cut(info.st_size):
                data = exactly(fd, size, at)
                private = private or (at == 0 and _KEY_LINE.match(data[:_KEY_LINE_LIMIT]) is not None)
                names.append(name_of(data))
                at += size
            if _key(os.fstat(fd)) == _key(info):
                return _Content(names, data if info.st_size <= SMALL else b"", private)
        finally:
            os.close(fd)
    except OSError as error:
        fix = f"give rights, or name it in {IGNORE_FILE}"
        raise DataError(f"{path!r} cannot be read: {error.strerror}", fix) from None
    fix = f"try again when nothing writes it, or name it in {IGNORE_FILE}"
    raise DataError(f"{path!r} changes while it is read", fix)


def exactly(fd: int, size: int, at: int) -> bytes:
    """So many bytes of a file from `at` on; fewer where it ends."""
    data = os.pread(fd, size, at)
    while data and len(data) < size and (more := os.pread(fd, size - len(data), at + len(data))):
        data += more
    return data


class _Readers:
    """Threads, for what waits for a disk or is hashed. Where small files come from memory they would only fight over Python."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._waits = False

    def each(self, do: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """In this thread, until one item was waited for: the rest side by side."""
        rest = iter(items)
        while not self._waits and (item := next(rest, None)) is not None:
            since, busy = time.monotonic(), time.thread_time()
            result = do(item)
            self._waits = time.monotonic() - since > _WAIT + 2 * (time.thread_time() - busy)
            yield result
        yield from self.at_once(do, rest)

    def at_once(self, do: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """All of them side by side, from now on."""
        return self._pool.map(do, items)


# -- the walk ---------------------------------------------------------------------------------------------------------


class _Walk:
    """One pass over the tree, without following links; remembers what it leaves out."""

    def __init__(self, top: Path) -> None:
        self._top = os.fsencode(top)
        self.left_out: list[LeftOut] = []
        self.unsure: list[str] = []
        self._ignored, self._lines = _matcher(top)
        self._code: dict[
            str, set[str] | None
        ] = {}  # folder of jobs that has code: what is sent of it; None: all but logs

    def taken(self, path: str) -> bool:
        """Whether a line of .clusterignore takes a file that would not be sent: `!PATH`."""
        return self._ignored(path) is False

    def tree(self, crew: _Readers) -> Iterator[tuple[str, os.stat_result]]:
        """All folders of one depth side by side: on a network disk each costs a round trip."""
        folders = [""]
        while folders:
            deeper = []
            for found in crew.each(self._scan, folders):
                for path, info in found:
                    if stat.S_ISDIR(info.st_mode):
                        deeper.append(path + "/")
                    yield path, info
            folders = deeper

    def _scan(self, folder: str) -> list[tuple[str, os.stat_result]]:
        found = []
        with os.scandir(self._top + b"/" + os.fsencode(folder)) as entries:
            for entry in entries:
                path = folder + os.fsdecode(entry.name)
                is_dir = entry.is_dir(follow_symlinks=False)
                why = self._reason(entry, path, is_dir, folder == "")
                if why:
                    self.left_out.append(LeftOut(path + "/" * is_dir, why, _size(entry.path, is_dir)))
                else:
                    if entry.name == os.fsencode(_MAYBE_SECRET) and not is_dir and not self.taken(path):
                        self.unsure.append(path)
                    found.append((path, entry.stat(follow_symlinks=False)))
        return found

    def _reason(self, entry: os.DirEntry[bytes], path: str, is_dir: bool, top: bool) -> str:
        name = os.fsdecode(entry.name)
        if name in _ANYWHERE:
            return _ANYWHERE[name]
        ignored = self._ignored(path + "/" if is_dir else path)
        if ignored is None and (why := self._of_jobs(entry, path, is_dir, top)):
            return why
        if is_dir and os.path.exists(entry.path + b"/pyvenv.cfg"):
            return "virtual environment"
        if ignored is None:
            return (_FOLDERS if is_dir else _FILES).get(name, "")
        return IGNORE_FILE if ignored else ""

    def _of_jobs(self, entry: os.DirEntry[bytes], path: str, is_dir: bool, top: bool) -> str:
        """Why a path that no line of .clusterignore is about belongs to earlier jobs; "" where it does not."""
        name = os.fsdecode(entry.name)
        if is_dir and _FETCHED.fullmatch(name):
            return "results of a job"
        marked = is_dir and os.path.exists(os.path.join(entry.path, os.fsencode(LOGS_MARK)))
        if marked or (top and name in _TOP and (is_dir or entry.is_symlink())):
            if is_dir and self._has_code(entry.path, path, marked):
                return ""
            return _TOP.get(name, LOGS) if not name.startswith("JOB") else "results of a job"
        above = next((folder for folder in tuple(self._code) if path.startswith(folder + "/")), None)
        if above is None:
            return ""
        part = self._code[above]
        if part is None:
            own = path == f"{above}/{name}" and (
                shown_logs.is_name(name) or shown_logs.is_of_job(os.fsdecode(entry.path))
            )
            return LOGS if own else ""
        return "" if path in part else _TOP.get(above, LOGS)

    def _has_code(self, folder: bytes, path: str, marked: bool) -> bool:
        """Whether a folder with the name, or the mark, of earlier jobs has what a program needs: a package, files that git
        tracks, or files that a line of .clusterignore takes. Notes what is sent of it.
        """
        names = os.listdir(folder)
        if b"__init__.py" in names or (not marked and any(name.endswith(b".py") for name in names)):
            self._code[path] = None
            return True
        sent = {name[1:].strip("/").rstrip() for name in self._lines if name.startswith("!")}
        part = {parent for name in _tracked(folder) for parent in _parents(f"{path}/{name}")}
        part |= {parent for name in sent if name.startswith(path + "/") for parent in _parents(posixpath.dirname(name))}
        if part:
            self._code[path] = part
        return bool(part)


def _parents(path: str) -> Iterator[str]:
    """The path, and each folder above it."""
    while path:
        yield path
        path = posixpath.dirname(path)


def _tracked(folder: bytes) -> list[str]:
    """The files of a folder that git tracks, relative to it. None where git is missing, or the folder is in no repository."""
    try:
        done = subprocess.run(_GIT, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_TIME)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _matcher(top: Path) -> tuple[Callable[[str], bool | None], Sequence[str]]:
    """Whether .clusterignore keeps a path out (None: no line is about it), and its lines. Most workspaces have none, and
    matching is slow.
    """
    if not (top / IGNORE_FILE).is_file():
        return (lambda path: None), ()
    lines = os.fsdecode((top / IGNORE_FILE).read_bytes()).splitlines()  # as names are read from the disk
    spec = pathspec.GitIgnoreSpec.from_lines(lines)
    return (lambda path: spec.check_file(path).include), lines


def _size(path: bytes, is_dir: bool) -> int:
    """Bytes below a path that is left out; an estimate once there are very many files."""
    if not is_dir:
        return os.lstat(path).st_size
    total = count = 0
    for folder, _, names in os.walk(path):
        for name in names:
            count += 1
            if count > _SIZE_LIMIT:
                return total
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total
