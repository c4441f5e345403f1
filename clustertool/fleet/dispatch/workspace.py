"""A workspace is a folder that was walked once: the files to send, the excluded files with reasons, and its digest."""

from __future__ import annotations

import codecs
import contextlib
import errno
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

from clustertool.errors import DataError
from clustertool.fleet.dispatch.cache import WorkspaceCache
from clustertool.fleet.dispatch.ignore_lines import IgnoreLines
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
# What `fetch` and --log-dir write, unless another folder is named.
_FETCHED = re.compile(r"JOB\d{8}-\d{6}-[a-z2-7]{4}(-\d+)?")
# Not sent unless a line of .clusterignore takes them (decision 72); files that begin as a private key, too.
PRIVATE_KEY, CREDENTIALS = "private key", "credentials"
_FILES = {**dict.fromkeys(("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519"), PRIVATE_KEY), ".netrc": CREDENTIALS}
_FOLDERS = dict.fromkeys((".ssh", ".aws", ".kube"), CREDENTIALS)
_KEY_LINE = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY( BLOCK)?-----\s*(\n|$)")
_KEY_LINE_LIMIT = 200  # bytes
_MAYBE_SECRET = ".env"
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}
_NOT_SENT = {stat.S_IFSOCK: "socket", stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
VANISHED = "vanished while it was read"
UNUSUAL = (VANISHED, *_NOT_SENT.values())
_VANISHED = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_CHANGES = "changes while it is read"
_PROBLEMS, _SHOWN = 20, 200  # that an error lists; characters of a path in it
_LARGE = 100_000_000
_FORGOTTEN = "checkpoints checkpoint ckpt wandb mlruns node_modules conda-meta site-packages".split()
_STATES = {".pt", ".pth", ".ckpt", ".safetensors", ".pdparams", ".pdopt", ".h5", ".onnx"}
_BATCH = 100  # small files that one thread reads in one go
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
    """A folder as it was walked: what is sent (`entries`) and what is not (`left_out`).

    `times`: mtimes in ns. `chunks`: the names of the pieces of every file. `read`: content of small files, up to 64 MiB.
    `unsure`: paths of files that may have secrets and that .clusterignore does not name. `grown`: those of files to which a
    program wrote while they were read; sent is what they had when they were opened.
    """

    top: Path
    entries: tuple[Entry, ...]
    left_out: tuple[LeftOut, ...] = ()
    times: Mapping[str, int] = field(default_factory=dict)
    chunks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    read: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    unsure: tuple[str, ...] = ()
    grown: tuple[str, ...] = ()

    @cached_property
    def release(self) -> str:
        """The digest of all entries, which names what is sent."""
        return digest(self.entries)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(entry.path for entry in self.entries if entry.kind == "file")

    @property
    def links(self) -> tuple[str, ...]:
        return tuple(entry.path for entry in self.entries if entry.kind == "link")

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(entry.size for entry in self.entries)


def accidents(workspace: Workspace) -> list[tuple[str, int]]:
    """List files of models and folders of tools (checkpoints, wandb) of 100 MB or more, which are seldom meant to be sent.

    Returns (file, or folder with "/"; bytes), the largest first.
    """
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


def read_workspace(top: Path, ignore_from: Sequence[str] = ()) -> Workspace:
    """Walk a folder, read files that have changed, and return what is sent, with digests, and what is left out, with reasons.

    ignore_from: names of files whose lines keep out what is in their folders, besides .clusterignore. Raises DataError for a
    missing folder, and for what cannot be read in it, all in one list.
    """
    if not os.path.isdir(top):
        raise DataError(f"there is no workspace {str(top)!r}", "give a folder: --workspace ./job")
    with ThreadPoolExecutor(_WIDTH) as pool:
        crew, walk = _Readers(pool), _Walk(top, ignore_from)
        found = sorted(walk.tree(crew))
        read: dict[str, bytes] = {}
        files = [(path, info) for path, info in found if stat.S_ISREG(info.st_mode)]
        chunks, read_infos = _read_digests(walk, files, crew, read)
        _require_readable(walk.problems)
        entries, times = [], {}
        vanished = {left.path for left in walk.left_out if left.why == VANISHED}
        for path, info in found:
            info = read_infos.get(path, info)
            if (path in chunks or not stat.S_ISREG(info.st_mode)) and path + "/" not in vanished:
                with walk.noting(path):
                    entries.append(_build_entry(top, path, info, chunks))
                    times[path] = info.st_mtime_ns
        _require_readable(walk.problems)
    left_out = tuple(sorted(walk.left_out, key=lambda left: left.path))
    unsure, grown = tuple(sorted(walk.unsure)), tuple(sorted(walk.grown))
    return Workspace(top, tuple(entries), left_out, times, chunks, read, unsure, grown)


def _require_readable(problems: Mapping[str, str]) -> None:
    """Raise one DataError that lists the problems of the walk, 20 at most; do nothing without any."""
    if problems:
        paths = sorted(problems)
        listed = "; ".join(f"{path[:_SHOWN]!r} {problems[path]}" for path in paths[:_PROBLEMS])
        more = f"; and {len(paths) - _PROBLEMS} more" if len(paths) > _PROBLEMS else ""
        kinds = {text == _CHANGES for text in problems.values()}
        fixes = [*(["give rights"] * (False in kinds)), *(["try again when nothing writes it"] * (True in kinds))]
        raise DataError(f"{listed}{more}", f"{', or '.join(fixes)}, or name it in {IGNORE_FILE}")


def _build_entry(top: Path, path: str, info: os.stat_result, chunks: Mapping[str, Sequence[str]]) -> Entry:
    """Build the entry of a file, folder or link. Raises OSError for a link that cannot be read."""
    kind, mode = _KINDS[stat.S_IFMT(info.st_mode)], stat.S_IMODE(info.st_mode)
    if kind == "link":
        return Entry(path, kind, 0, 0, os.fsdecode(os.readlink(os.fsencode(top / path))))
    if kind == "dir":
        return Entry(path, kind, mode, 0, "")
    return Entry(path, kind, mode, info.st_size, content_of(chunks[path]))


# -- digests ----------------------------------------------------------------------------------------------------------


Found = tuple[str, os.stat_result]


class _Content(NamedTuple):
    """A file that was read. names: of its pieces. data: its bytes if it is small.

    private: it begins as a private key. info: its status when it was opened. still: nothing was written while it was read.
    """

    names: list[str]
    data: bytes
    private: bool
    info: os.stat_result
    still: bool


_Read = Sequence[tuple[str, _Content]]


def _read_digests(
    walk: _Walk, found: Sequence[Found], crew: _Readers, read: dict[str, bytes]
) -> tuple[dict[str, list[str]], dict[str, os.stat_result]]:
    """Return {path: names of its pieces} of all files, and {path: status} of those that were read; fill `read`.

    Read are files that have changed since the last dispatch, and private keys. A key that no line of .clusterignore takes is
    left out. `read` gets the bytes of small files, 64 MiB in all. The digests are stored, in a thread, except of private keys
    and of files that were written meanwhile.
    """
    memory = WorkspaceCache(walk.top)
    known, new, keys, infos = memory.digests(), {}, {}, {}
    todo = []
    for path, info in found:
        old = known.get(path)
        if old and old[0] == _stamp(info):
            new[path] = old
        else:
            todo.append((path, info))
    room = _READ
    for some in _read_all(walk, todo, crew):
        for path, content in some:
            if content.private and not walk.own.taken(path):
                walk.left_out.append(LeftOut(path, PRIVATE_KEY, content.info.st_size))
                continue
            infos[path] = content.info
            if content.private or not content.still:
                keys[path] = content.names
            else:
                new[path] = (_stamp(content.info), content.names)
            if content.data and len(content.data) <= room:
                read[path] = content.data
                room -= len(content.data)
    if todo or len(new) != len(known):
        threading.Thread(target=memory.keep_digests, args=(new,)).start()
    return {**{path: names for path, (_, names) in new.items()}, **keys}, infos


def _stamp(info: os.stat_result) -> tuple[int, int, int, int]:
    """Return size, times and inode of a file: while they are equal, its digests are valid."""
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino


def _read_all(walk: _Walk, todo: Sequence[Found], crew: _Readers) -> Iterator[_Read]:
    """Read files, and yield lists of (path, content): large files alone, small ones by the hundred.

    Files that cannot be sent are left out. They are read in threads, except that the smallest ones are read in this thread
    until one had to wait: to hand one to a thread costs as much as to read it.
    """

    def names(some: Sequence[Found]) -> _Read:
        read = ((path, _read_file(walk, path)) for path, _ in some)
        return [(path, content) for path, content in read if content is not None]

    yield from crew.each(names, _in_batches([item for item in todo if item[1].st_size <= TINY]))
    yield from crew.pool.map(names, ([item] for item in todo if item[1].st_size > SMALL))
    yield from crew.pool.map(names, _in_batches([item for item in todo if TINY < item[1].st_size <= SMALL]))


def _in_batches(items: Sequence[Found]) -> Iterator[Sequence[Found]]:
    """Yield the parts of a list, each of 100 files at most."""
    return (items[at : at + _BATCH] for at in range(0, len(items), _BATCH))


def _read_file(walk: _Walk, path: str) -> _Content | None:
    """Read a file. None: it cannot be sent, and the walk has the reason. After a problem files are only opened."""
    with walk.noting(path):
        fd = os.open(walk.place(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            info = os.fstat(fd)
            if walk.problems:
                return None
            if not stat.S_ISREG(info.st_mode):
                raise FileNotFoundError(errno.ENOENT, "no file any more")
            data, names, private = _read_pieces(fd, info.st_size)
            now = os.fstat(fd)
            still = _stamp(now) == _stamp(info)
            # What a program has appended is not sent. What it has written over may be mixed with what was there before.
            if not still and (now.st_size < info.st_size or _read_pieces(fd, info.st_size)[1] != names):
                walk.problems[path] = _CHANGES
                return None
            if now.st_size > info.st_size:
                walk.grown.append(path)
            return _Content(names, data if info.st_size <= SMALL else b"", private, info, still)
        finally:
            os.close(fd)
    return None


def _read_pieces(fd: int, size: int) -> tuple[bytes, list[str], bool]:
    """Read a file of `size` bytes; return its last piece, the names of all pieces, and whether it begins as a private key."""
    data, names, at, private = b"", [], 0, False
    for part in cut(size):
        data = read_exactly(fd, part, at)
        private = private or (at == 0 and _KEY_LINE.match(data[:_KEY_LINE_LIMIT]) is not None)
        names.append(name_of(data))
        at += part
    return data, names, private


def read_exactly(fd: int, size: int, at: int) -> bytes:
    """Read `size` bytes of a file from `at` on; fewer where it ends."""
    data = os.pread(fd, size, at)
    while data and len(data) < size and (more := os.pread(fd, size - len(data), at + len(data))):
        data += more
    return data


class _Readers:
    """A pool of threads that read files. Small files are read in the calling thread until one has to wait for the disk."""

    def __init__(self, pool: Executor) -> None:
        self.pool = pool  # for work that is done in all threads at once
        self._waits = False

    def each(self, do: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """Yield do(item) for each item, in order: in this thread until one had to wait, then in all threads at once."""
        rest = iter(items)
        while not self._waits and (item := next(rest, None)) is not None:
            since, busy = time.monotonic(), time.thread_time()
            result = do(item)
            self._waits = time.monotonic() - since > _WAIT + 2 * (time.thread_time() - busy)
            yield result
        yield from self.pool.map(do, rest)


# -- the walk ---------------------------------------------------------------------------------------------------------


class _Walk:
    """One pass over the tree, without following links; remembers what it leaves out, and what cannot be read: path -> why."""

    def __init__(self, top: Path, ignore_from: Sequence[str] = ()) -> None:
        self.top, self._top, self._ignore_from = top, os.fsencode(top), ignore_from
        self.left_out: list[LeftOut] = []
        self.unsure: list[str] = []
        self.grown: list[str] = []
        self.problems: dict[str, str] = {}
        self.own = IgnoreLines()  # .clusterignore
        with self.noting(IGNORE_FILE):
            self.own = _read_lines(top / IGNORE_FILE)
        # Folder -> the files of ignore_from in it, the last one first; folders count from the top of the repository.
        self._others: dict[str, list[tuple[str, IgnoreLines]]] = {}
        self._repositories: set[str] = set()  # below: the files above them have no meaning there
        self._prefix = self._read_above() if ignore_from else ""
        # Folder of jobs that has code -> what is sent of it; None: all but logs.
        self._code: dict[str, set[str] | None] = {}

    def place(self, path: str) -> bytes:
        """Return the path on the disk of a path of the workspace."""
        return self._top + b"/" + os.fsencode(path)

    @contextlib.contextmanager
    def noting(self, path: str) -> Iterator[None]:
        """Return a context manager that records an OSError in it as a problem of this path, and raises nothing.

        A path that has vanished is recorded as left out instead. "": the workspace.
        """
        try:
            yield
        except OSError as error:
            if path and error.errno in _VANISHED:
                self.left_out.append(LeftOut(path, VANISHED, 0))
            else:
                self.problems[path or str(self.top)] = f"cannot be read: {error.strerror}"

    def _read_above(self) -> str:
        """Read the files of ignore_from in the folders above the workspace, up to the top of its git repository.

        Returns the path of the workspace in the repository, with "/" behind it; "" at the top, and without a repository.
        """
        folders = [self.top.resolve(), *self.top.resolve().parents]
        repository = next((folder for folder in folders if (folder / ".git").exists()), folders[0])
        for folder in folders[1 : folders.index(repository) + 1]:
            self._read_others(os.fsencode(folder), "/".join(folder.relative_to(repository).parts))
        return "".join(f"{part}/" for part in folders[0].relative_to(repository).parts)

    def _read_others(self, place: bytes, folder: str) -> None:
        """Read the files of ignore_from in a folder, if they are no links, and record whether it is a repository by itself.

        place: its path on the disk; folder: its path in the repository.
        """
        for name in reversed(self._ignore_from):
            file = os.path.join(os.fsdecode(place), name)
            with self.noting(file.removeprefix(f"{self.top}/")):
                if not os.path.islink(file) and os.path.isfile(file):
                    self._others.setdefault(folder, []).append((name, _read_lines(Path(file))))
        if folder and os.path.lexists(os.path.join(place, b".git")):
            self._repositories.add(folder)

    def _left_out_by(self, path: str) -> str:
        """Return the name of the file of ignore_from that keeps a path out, "" if none does.

        The nearest file with a line that fits the path decides.
        """
        whole = self._prefix + path
        folder = whole.rstrip("/")
        while folder and folder not in self._repositories:
            folder = folder.rpartition("/")[0]
            for name, lines in self._others.get(folder, ()):
                ignored = lines.ignored(whole[len(folder) + bool(folder) :])
                if ignored is not None:
                    return name if ignored else ""
        return ""

    def tree(self, crew: _Readers) -> Iterator[tuple[str, os.stat_result]]:
        """Yield path and status of all that is sent.

        The folders of one depth are read at once: on a network disk each costs a round trip.
        """
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
        """List path and status of what is sent of one folder; record what is left out."""
        found: list[tuple[str, os.stat_result]] = []
        if self._ignore_from:
            self._read_others(self.place(folder), (self._prefix + folder).rstrip("/"))
        with self.noting(folder), os.scandir(self.place(folder)) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # as if it had gone before
                    self._add_or_leave_out(entry, folder, found)
        return found

    def _add_or_leave_out(
        self, entry: os.DirEntry[bytes], folder: str, found: list[tuple[str, os.stat_result]]
    ) -> None:
        """Add an entry of a folder to `found`, or record why it is left out; note a .env that .clusterignore does not take.

        Raises OSError for an entry that has vanished or cannot be read.
        """
        path = folder + os.fsdecode(entry.name)
        is_dir = entry.is_dir(follow_symlinks=False)
        info = entry.stat(follow_symlinks=False)
        why = self._reason_to_leave_out(entry, path, is_dir, folder == "")
        why = why or _NOT_SENT.get(stat.S_IFMT(info.st_mode), "")
        if why:
            self.left_out.append(LeftOut(path + "/" * is_dir, why, _size(entry.path, info)))
            return
        if entry.name == os.fsencode(_MAYBE_SECRET) and not is_dir and not self.own.taken(path):
            self.unsure.append(path)
        found.append((path, info))

    def _reason_to_leave_out(self, entry: os.DirEntry[bytes], path: str, is_dir: bool, top: bool) -> str:
        """Return why an entry is left out, "" if it is sent.

        path: of the entry, relative to the workspace. is_dir: it is a folder, and no link to one. top: it is in the workspace's
        own folder, not in one below it.

        The first of these counts: its name; results and logs of earlier jobs, if no line of .clusterignore fits it; a virtual
        environment; a line of .clusterignore, or if none fits, of a file of ignore_from; and, unless a line of .clusterignore
        takes it, the name of a private key or of credentials.
        """
        name = os.fsdecode(entry.name)
        if name in _ANYWHERE:
            return _ANYWHERE[name]
        whole = path + "/" * is_dir
        ignored, taken = self.own.ignored(whole), self.own.taken(whole)
        if ignored is None and not taken and (why := self._reason_of_jobs(entry, path, is_dir, top)):
            return why
        if is_dir and os.path.exists(entry.path + b"/pyvenv.cfg"):
            return "virtual environment"
        if ignored or (ignored is None and (other := self._left_out_by(whole))):
            return IGNORE_FILE if ignored else other
        return "" if taken else (_FOLDERS if is_dir else _FILES).get(name, "")

    def _reason_of_jobs(self, entry: os.DirEntry[bytes], path: str, is_dir: bool, top: bool) -> str:
        """Return why a path, which no line of .clusterignore fits, counts as results or logs of earlier jobs, else "".

        path, is_dir, top: see _reason_to_leave_out(). For a folder with code, what is sent of it is recorded: see _has_code().
        """
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
                shown_logs.is_log_name(name) or shown_logs.is_of_job(os.fsdecode(entry.path))
            )
            return LOGS if own else ""
        return "" if path in part else _TOP.get(above, LOGS)

    def _has_code(self, folder: bytes, path: str, marked: bool) -> bool:
        """Check whether a folder with the name, or the mark, of earlier jobs has what a program needs.

        path: of the folder, relative to the workspace. marked: it has the mark, the file LOGS_MARK.

        If so, records what is sent of it. Needed are a package, files that git tracks, and files that a line of .clusterignore
        takes; in a folder without the mark, all modules of Python.
        """
        try:
            names = os.listdir(folder)
        except OSError:
            return False
        if b"__init__.py" in names or (not marked and any(name.endswith(b".py") for name in names)):
            self._code[path] = None
            return True
        sent = {name[1:].strip("/").rstrip() for name in self.own.texts if name.startswith("!")}
        part = {parent for name in _tracked_files(folder) for parent in _parents(f"{path}/{name}")}
        part |= {parent for name in sent if name.startswith(path + "/") for parent in _parents(posixpath.dirname(name))}
        if part:
            self._code[path] = part
        return bool(part)


def _parents(path: str) -> Iterator[str]:
    """Yield the path, and each folder above it."""
    while path:
        yield path
        path = posixpath.dirname(path)


def _tracked_files(folder: bytes) -> list[str]:
    """List the files of a folder that git tracks, relative to it; none without git or a repository, or after 20 s."""
    try:
        done = subprocess.run(_GIT, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_TIME)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _read_lines(file: Path) -> IgnoreLines:
    """Read the lines of an ignore file, none where there is none. Raises OSError."""
    if not os.path.isfile(file):
        return IgnoreLines()
    text = os.fsdecode(file.read_bytes().removeprefix(codecs.BOM_UTF8))  # names as of the disk
    return IgnoreLines(text.splitlines())


def _size(path: bytes, info: os.stat_result) -> int:
    """Return the bytes of a file, or of all files below a folder; after 200,000 files, what was counted so far.

    What cannot be read counts 0.
    """
    if not stat.S_ISDIR(info.st_mode):
        return info.st_size
    total = count = 0
    folders = [path]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                count += 1
                if count > _SIZE_LIMIT:
                    return total
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_size
    return total
