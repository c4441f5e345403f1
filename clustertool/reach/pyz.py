"""The node's code is one archive whose name is its content: made here, kept on the node, sent only when it is new."""

from __future__ import annotations

import hashlib
import io
import zipfile
from functools import lru_cache
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_PARTS = ("__init__.py", "errors.py", "plan", "node")
_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest that zip knows: the same sources make the same bytes


@lru_cache(maxsize=1)
def archive() -> tuple[str, bytes]:
    """(digest, bytes) of the .pyz: standard-library code of node, plan and errors. The digest is of the files in it."""
    buffer, state = io.BytesIO(), hashlib.sha256()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in sorted(_sources().items()):
            info = zipfile.ZipInfo(name, _DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(info, content)
            state.update(b"%s %d\n" % (name.encode(), len(content)) + content)
    return state.hexdigest()[:32], buffer.getvalue()


def _sources() -> dict[str, bytes]:
    paths = [path for part in _PARTS for path in ([_ROOT / part] if part.endswith(".py") else (_ROOT / part).glob("*.py"))]
    return {f"clustertool/{path.relative_to(_ROOT).as_posix()}": path.read_bytes() for path in paths}


# Runs under whatever python the node has, 2.7 too, to say so; it reads exactly what it needs from stdin and no more.
# The working directory, which `-c` puts first on the path, is none of ours.
LOADER = b"""\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
if sys.version_info < (3, 8):
    sys.stdout.write("old %s\\n" % sys.version.split()[0])
    sys.stdout.flush()
    sys.exit(0)
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

# All that `ps` on a node shows of the above: without quotes, so that it can stand between those of a shell.
FIRST = f"""\
import os
n, d = {len(LOADER)}, bytes()
while n: c = os.read(0, n) or os._exit(0); d += c; n -= len(c)
exec(d)"""

# The second stage: find the code by its digest or fetch it, and hand over. It is kept as files, so that Python keeps it
# compiled beside them. What is not needed when the code is there already (zipfile) is imported only where it is.
BOOT = b'''\
import gc
gc.disable()
import json
try:
    from _sha2 import sha256
except ImportError:
    try:
        from _sha256 import sha256
    except ImportError:
        from hashlib import sha256
hello = json.loads(take(int(take(8))))
digest = hello["digest"]
home = os.path.expanduser("~")
cache = os.path.join(home, ".cache", "clustertool")
top = os.path.join(cache, digest)
def say(word):
    os.write(1, word.encode() + b"\\n")
def good(files):
    state = sha256()
    for name, content in sorted(files.items()):
        state.update(b"%s %d\\n" % (name.encode(), len(content)) + content)
    return state.hexdigest()[:32] == digest
def read():
    """What lies in `top`, if nobody else could have put it there."""
    info, files = os.lstat(cache), {}
    if info.st_uid != os.getuid() or info.st_mode & 0o022:
        return files
    for folder, folders, names in os.walk(top):
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    files[os.path.relpath(path, top)] = file.read()
    return files
def write(files):
    """Each file whole or not at all: others may start here at the same time."""
    if not os.path.isdir(home):
        raise OSError("no home")
    for name, content in files.items():
        path = os.path.join(top, name)
        part = "%s.%d.%s" % (path, os.getpid(), os.uname().nodename)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(part, "wb") as file:
            file.write(content)
        os.replace(part, path)
from _frozen_importlib_external import FileFinder, SourceFileLoader
class Source(SourceFileLoader):
    """Compiled code that a full disk has cut short is compiled again, and not the end of everything."""
    def get_code(self, name):
        try:
            return super().get_code(name)
        except (EOFError, ValueError, TypeError):
            return self.source_to_code(self.get_data(self.path), self.path)
def finder(path):
    if not path.startswith(top):
        raise ImportError
    return FileFinder(path, (Source, [".py"]))
class Memory:
    """Imports from `files`, for a node whose home takes nothing."""
    @staticmethod
    def find_spec(name, path=None, target=None):
        from importlib.util import spec_from_loader
        for tail in ("/__init__.py", ".py"):
            if name.replace(".", "/") + tail in files:
                return spec_from_loader(name, Memory, is_package=tail != ".py")
    @staticmethod
    def create_module(spec):
        return None
    @staticmethod
    def exec_module(module):
        name = module.__name__.replace(".", "/")
        name += "/__init__.py" if name + "/__init__.py" in files else ".py"
        exec(compile(files[name], name, "exec"), module.__dict__)
try:
    files = read()
except OSError:
    files = {}
have = good(files)
say("have" if have else "need")
if not have:
    import io, zipfile
    with zipfile.ZipFile(io.BytesIO(take(int(take(8))))) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    if not good(files):
        say("damaged")
        sys.exit(0)
    mask = os.umask(0o077)
    try:
        write(files)
        have = good(read())
    except OSError:
        pass
    os.umask(mask)
if have:
    sys.path.insert(0, top)
    sys.path_hooks.insert(0, finder)
else:
    sys.meta_path.insert(0, Memory)
from clustertool.node.agent import main
say("ready")
main(hello)
'''
