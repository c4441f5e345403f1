"""The bundle is the node's code as it is sent: a package of plain files, named by a digest of their texts.

A node keeps it, compiled, in a directory of that name in ~/.cache/clustertool (node/agent/install.py). It is sent only to a
node that does not have it: compressed with bz2, or with zlib where a Python was built without bz2.
"""

from __future__ import annotations

import hashlib
import importlib.util
import threading
import zlib
from functools import lru_cache
from pathlib import Path

try:
    import bz2
except ImportError:  # this Python was built without libbz2
    bz2 = None  # type: ignore[assignment]

_ROOT = Path(__file__).resolve().parents[1]
# Of the model, the nodes that a laptop starts do not need config, planning, checks and joining, and these modules.
_LAPTOP = """
    container_options container_settings earlier_jobs engine_views facts finding gathering job_container
    late_pieces launch_command portions scheduler stop_result
""".split()
_MODEL = ("", "container/", "dispatch/", "elastic/", "job/", "mpi/", "wire/")
_FILES = ("__init__.py", "errors.py", "node/**/*.py", *(f"model/{folder}*.py" for folder in _MODEL))
_JOIN = "join"  # the folder of node/ that only nodes need which no laptop starts
# The types of messages are for the type checker, and for the laptop's checks.
_TYPES = "agent_answers agent_requests answers event_types join_messages spec_types stream_messages".split()
_INSTALLER = "node/agent/install.py"
_BY_THEMSELVES = ("framework_probe",)  # runs by itself, and is sent as text (program)

_making = threading.Lock()  # the threads of all nodes ask at once


def digest() -> str:
    """Return the digest of the code, by which a node finds it in its cache."""
    with _making:
        return _content()[0]


def packed(need: str) -> bytes:
    """Pack what a node without the code is sent: the installer (zlib) and the archive, each with its size in front.

    need: the node's answer, "need bz2" or "need zlib". The archive is bz2 only if both Pythons have it.
    """
    with _making:
        return _packed(need == "need bz2" and bz2 is not None)


@lru_cache(maxsize=1)
def _content() -> tuple[str, bytes]:
    """Read the code's files, and return their digest, and name and text of each with NUL between all of them.

    To read all files takes 7 ms.
    """
    left_out = {*_TYPES, *_LAPTOP, *_BY_THEMSELVES}
    paths = sorted(
        {path for pattern in _FILES for path in _ROOT.glob(pattern) if path.stem not in left_out}
        - set(_ROOT.glob(f"node/{_JOIN}/**/*.py"))
    )
    files = {path.relative_to(_ROOT.parent).as_posix(): path.read_text("utf-8") for path in paths}
    data = "\0".join(text for file in files.items() for text in file).encode()
    return digest_of(data), data


def names() -> frozenset[str]:
    """Return the paths of the code's files, from the folder above the package."""
    with _making:
        return frozenset(_content()[1].decode().split("\0")[::2])


@lru_cache(maxsize=2)
def _packed(small: bool) -> bytes:
    """Pack the installer with zlib and the archive with bz2 (small) or zlib, one behind the other, each with its size in front.

    The archive is the text of _content().
    """
    data = _content()[1]
    archive = bz2.compress(data) if small else zlib.compress(data, 9)
    return with_size(zlib.compress(program(_INSTALLER).encode(), 9)) + with_size(archive)


def digest_of(data: bytes) -> str:
    """Compute the digest by which nodes keep data that was sent: half of its SHA-256, in hex digits."""
    return hashlib.sha256(data).hexdigest()[:32]


def with_size(data: bytes) -> bytes:
    """Put the size, in eight digits, in front of data, as the loader reads it."""
    return b"%08d" % len(data) + data


def program(name: str) -> str:
    """Read the text of a module of the node's code that runs by itself. name: its path in the package."""
    return (_ROOT / name).read_text("utf-8")


@lru_cache(maxsize=1)
def nvml() -> tuple[str, bytes]:
    """Read the module `pynvml`, and return its digest, and its bytes packed by zlib: only nodes with NVIDIA's cards get it."""
    spec = importlib.util.find_spec("pynvml")
    assert spec is not None and spec.origin is not None, "nvidia-ml-py is a dependency"
    content = Path(spec.origin).read_bytes()
    return digest_of(content), zlib.compress(content, 9)


# Runs under whatever Python the node has, also under 2.7, which gets an answer. It reads exactly what it needs from stdin and
# no more: the digest, the hello, and the bundle if it says "need". The working directory, which `-c` puts first on the path, is
# not ours. A damaged file is found by its owner, mode and size: a digest of all files would take longer, and a user who can
# change a file here can change digests too.
LOADER = b"""\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
if sys.version_info < (3, 8):
    sys.stdout.write("old %s\\n" % sys.version.split()[0])
    sys.stdout.flush()
    sys.exit(0)
import time
def take(n):
    data = b""
    while len(data) < n:
        piece = os.read(0, n - len(data))
        if not piece:
            sys.exit(0)
        data += piece
    return data
user = os.getuid()
def safe(path, size="-"):
    info = os.lstat(path)
    if info.st_uid != user or info.st_mode & 18 or (size != "-" and int(size) != info.st_size):
        raise OSError("changed: " + path)
def complete(place):
    try:
        safe(os.path.dirname(place))
        safe(place)
        with open(os.path.join(place, "FILES")) as file:
            lines = file.read().split("\\n")
        for line in lines[:-1]:
            size, name = line.split(" ")
            safe(place + "/" + name, size)
        return lines[-1] == "end"
    except (OSError, ValueError):
        return False
digest, hello = take(32).decode(), take(int(take(8)))
place = os.path.join(os.path.expanduser("~"), ".cache", "clustertool", digest)
place += ".%s-%x" % (sys.implementation.cache_tag, sys.hexversion)
end = lambda: None
if not complete(place):
    import zlib
    try:
        import bz2
    except ImportError:
        bz2 = None
    os.write(1, b"need bz2\\n" if bz2 else b"need zlib\\n")
    space = {}
    exec(compile(zlib.decompress(take(int(take(8)))), "install.py", "exec"), space)
    archive = take(int(take(8)))
    try:
        data = (bz2 if archive[:3] == b"BZh" else zlib).decompress(archive)
        place, end = space["install"](data, digest, place, safe, complete)
    except Exception as error:
        os.write(1, ("the code cannot be installed: %s\\n" % error).encode())
        sys.exit(0)
elif os.stat(place).st_mtime < time.time() - 86400:
    try:
        os.utime(place)
    except OSError:
        pass
sys.path.append(place)  # last: it is searched for our modules only
from clustertool.node.agent.loop import main
main(hello, end, safe, complete)
"""

# All that `ps` on a node shows of the above: without quotes, so that it can stand between those of a shell.
FIRST = f"""\
import os
n, d = {len(LOADER)}, bytes()
while n: c = os.read(0, n) or os._exit(0); d += c; n -= len(c)
exec(d)"""
