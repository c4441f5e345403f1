"""The node's code is one archive whose name is its content: made here, kept on the node, sent only when it is new."""

from __future__ import annotations

import hashlib
import io
import zipfile
from functools import lru_cache
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_PARTS = ("__init__.py", "errors.py", "plan", "node")
# Every archive of the same sources is the same bytes: zip's earliest date, one order.
_DATE = (1980, 1, 1, 0, 0, 0)


@lru_cache(maxsize=1)
def archive() -> tuple[str, bytes]:
    """(digest, bytes) of the .pyz: standard-library code of node, plan and errors."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for part in _PARTS:
            path = _ROOT / part
            for source in sorted(path.glob("*.py")) if path.is_dir() else [path]:
                info = zipfile.ZipInfo(f"clustertool/{source.relative_to(_ROOT).as_posix()}", _DATE)
                info.compress_type = zipfile.ZIP_DEFLATED
                file.writestr(info, source.read_bytes())
    data = buffer.getvalue()
    return hashlib.sha256(data).hexdigest()[:32], data


# Runs under whatever python the node has, 2.7 too, to say so; it reads exactly what it needs from stdin and no more.
LOADER = """\
import sys
if sys.version_info < (3, 8):
    sys.stdout.write("old %s\\n" % sys.version.split()[0])
    sys.stdout.flush()
    sys.exit(0)
import os
def take(n):
    data = b""
    while len(data) < n:
        piece = os.read(0, n - len(data))
        if not piece:
            sys.exit(0)
        data += piece
    return data
exec(compile(take(int(take(8))), "clustertool-boot", "exec"))
"""

# The second stage: find or fetch the archive, unpack it once beside itself so that compiled code is kept, and hand over.
BOOT = b"""\
import hashlib, io, json, zipfile
hello = json.loads(take(int(take(8))))
digest = hello["digest"]
home = os.path.join(os.path.expanduser("~"), ".cache", "clustertool")
def load(path):
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(fd, "rb") as file:
        data = file.read()
    return data if hashlib.sha256(data).hexdigest()[:32] == digest else None
def say(word):
    os.write(1, word.encode() + b"\\n")
def unpack(data, top):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            path, content = os.path.join(top, name), archive.read(name)
            try:
                with open(path, "rb") as file:
                    if file.read() == content:
                        continue
            except OSError:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            part = "%s.%d.%s" % (path, os.getpid(), os.uname().nodename)
            with open(part, "wb") as file:
                file.write(content)
            os.replace(part, path)
path = os.path.join(home, digest + ".pyz")
data = None
try:
    data = load(path)
except OSError:
    pass
say("have" if data else "need")
fresh = not data
if fresh:
    data = take(int(take(8)))
    if hashlib.sha256(data).hexdigest()[:32] != digest:
        say("damaged")
        sys.exit(0)
mask = os.umask(0o077)
try:
    if fresh:
        os.makedirs(home, mode=0o700, exist_ok=True)
        part = "%s.%d.%s" % (path, os.getpid(), os.uname().nodename)
        with open(part, "wb") as file:
            file.write(data)
        os.replace(part, path)
    top = os.path.join(home, digest)
    info = os.lstat(home)
    if info.st_uid != os.getuid():
        raise OSError("not ours")
    unpack(data, top)
    sys.path.insert(0, top)
except OSError:  # no room or no right in HOME: run from memory
    fd = os.memfd_create("clustertool")
    os.write(fd, data)
    sys.path.insert(0, "/proc/self/fd/%d" % fd)
os.umask(mask)
from clustertool.node.agent import main
say("ready")
main(hello)
"""
