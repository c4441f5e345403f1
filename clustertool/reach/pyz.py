"""The node's code travels in two parts, each named by its content, kept on the node and sent only when it is new.

The first part is what every command needs, and a dispatch; the rest follows with the first request that is none of those.
Comments and docstrings stay here, and only what the agent can reach goes along: many nodes hang on one uplink. Line numbers
stay what they are.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import secrets
import threading
import tokenize
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parent.parent
_PARTS = ("__init__.py", "errors.py", "plan/*.py", "node/*.py")
_AGENT = "node/agent.py"
_EARLY = (_AGENT, "node/probe.py", "node/meet.py", "node/relay.py", "node/releases.py")
EARLY = frozenset({"probe", "meet", "patch", "relay", "unrelay", "relayed"})  # requests that need no more than the first part
_IMPORT = r"from clustertool(?:\.(\w+))?(?:\.(\w+))? import ([\w, ]+)"


_making = threading.Lock()


class Part(NamedTuple):
    """`data`: zlib of {name: text} in JSON. `digest` is of the files in it."""

    digest: str
    data: bytes


def parts() -> tuple[Part, Part]:
    """(the first part, the rest). To make them takes a quarter of a second, so they are kept as long as no source changes."""
    with _making:  # the threads of all nodes ask at once
        return _parts()


@lru_cache(maxsize=1)
def _parts() -> tuple[Part, Part]:
    from platformdirs import user_cache_path

    paths = _paths()
    state = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in [*paths, Path(__file__)]]
    kept = user_cache_path("clustertool") / "code" / hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]
    with suppress(OSError, ValueError, KeyError):
        return _unpacked(kept.read_bytes())
    made = make(sources())
    with suppress(OSError):
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in kept.parent.iterdir():
            old.unlink()
        part = kept.with_name(secrets.token_hex(8))
        part.write_bytes(b"".join(b"%s%08d%s" % (one.digest.encode(), len(one.data), one.data) for one in made))
        part.replace(kept)
    return made


def _paths() -> list[Path]:
    return [path for part in _PARTS for path in sorted(_ROOT.glob(part))]


def sources() -> dict[str, str]:
    """Everything that may run on a node, by its name below the package."""
    return {path.relative_to(_ROOT).as_posix(): path.read_text("utf-8") for path in _paths()}


def program(name: str) -> str:
    """A module of the node's code that runs by itself, as text."""
    return lean((_ROOT / name).read_text("utf-8"))


def _unpacked(kept: bytes) -> tuple[Part, Part]:
    """Raises ValueError for what was torn."""
    found, at = [], 0
    for _ in range(2):
        size = int(kept[at + 32 : at + 40])
        found.append(Part(kept[at : at + 32].decode(), kept[at + 40 : at + 40 + size]))
        at += 40 + size
        if _digest(json.loads(zlib.decompress(found[-1].data))) != found[-1].digest:
            raise ValueError("damaged")
    return found[0], found[1]


def make(sources: Mapping[str, str]) -> tuple[Part, Part]:
    """Both parts of these sources, by their names below the package."""
    packages = {name for name in sources if name.endswith("__init__.py")}
    first = _reached(sources, _EARLY, "^") | packages
    rest = _reached(sources, (_AGENT,), "^ *") - first
    return _part(sources, first), _part(sources, rest)


def _reached(sources: Mapping[str, str], start: Iterable[str], indent: str) -> set[str]:
    """Modules that these import, and so on. indent "^": at their top only, "^ *": anywhere."""
    todo, found = list(start), set()
    while todo:
        name = todo.pop()
        if name in sources and name not in found:
            found.add(name)
            todo += _imports(sources[name], indent)
    return found


def _imports(text: str, indent: str) -> Iterator[str]:
    for package, module, names in re.findall(indent + _IMPORT, text, re.MULTILINE):
        if module:
            yield f"{package}/{module}.py"
        elif package:
            yield f"{package}.py"
            yield from (f"{package}/{name.split(' as ')[0].strip()}.py" for name in names.split(","))


def _part(sources: Mapping[str, str], names: Iterable[str]) -> Part:
    files = {f"clustertool/{name}": lean(sources[name]) for name in sorted(names)}
    return Part(_digest(files), zlib.compress(json.dumps(files).encode(), 9))


def _digest(files: Mapping[str, str]) -> str:
    state = hashlib.sha256()
    for name, text in sorted(files.items()):
        content = text.encode()
        state.update(b"%s %d\n" % (name.encode(), len(content)) + content)
    return state.hexdigest()[:32]


def lean(text: str) -> str:
    """A module without comments and docstrings, each statement on its line."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, False) is not None:
            doc = node.body[0]
            first, last = doc.lineno - 1, (doc.end_lineno or doc.lineno) - 1
            lines[first : last + 1] = [lines[first][: doc.col_offset] + '""', *[""] * (last - first)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


@lru_cache(maxsize=1)
def nvml() -> tuple[str, bytes]:
    """(digest, zlib) of the module `pynvml`: sent on its own, to nodes with NVIDIA's cards only."""
    import importlib.util

    spec = importlib.util.find_spec("pynvml")
    assert spec is not None and spec.origin is not None, "nvidia-ml-py is a dependency"
    content = Path(spec.origin).read_bytes()
    return hashlib.sha256(content).hexdigest()[:32], zlib.compress(content, 9)


# Runs under whatever python the node has, 2.7 too, to say so; it reads exactly what it needs from stdin and no more.
# The working directory, which `-c` puts first on the path, is none of ours.
LOADER = b"""\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
if sys.version_info < (3, 8):
    sys.stdout.write("old %s\\n" % sys.version.split()[0])
    sys.stdout.flush()
    sys.exit(0)
import zlib
def take(n):
    data = b""
    while len(data) < n:
        piece = os.read(0, n - len(data))
        if not piece:
            sys.exit(0)
        data += piece
    return data
exec(compile(zlib.decompress(take(int(take(8)))), "clustertool-boot", "exec"))
"""

# All that `ps` on a node shows of the above: without quotes, so that it can stand between those of a shell.
FIRST = f"""\
import os
n, d = {len(LOADER)}, bytes()
while n: c = os.read(0, n) or os._exit(0); d += c; n -= len(c)
exec(d)"""

# The second stage: find the code by its digest or fetch it, and hand over. It is kept as files, so that Python keeps it
# compiled beside them.
_BOOT = b'''\
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
home = os.path.expanduser("~")
cache = os.path.join(home, ".cache", "clustertool")
def say(word):
    os.write(1, word.encode() + b"\\n")
def good(files, digest):
    state = sha256()
    for name, content in sorted(files.items()):
        state.update(b"%s %d\\n" % (name.encode(), len(content)) + content)
    return state.hexdigest()[:32] == digest
def read(digest):
    """What lies there, if nobody else could have put it there."""
    info, files, top = os.lstat(cache), {}, os.path.join(cache, digest)
    if info.st_uid != os.getuid() or info.st_mode & 0o022:
        return files
    for folder, folders, names in os.walk(top):
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    files[os.path.relpath(path, top)] = file.read()
    return files
def write(files, digest):
    """Each file whole or not at all: others may start here at the same time."""
    if not os.path.isdir(home):
        raise OSError("no home")
    mask = os.umask(0o077)
    try:
        for name, content in files.items():
            path = os.path.join(cache, digest, name)
            part = "%s.%d.%s" % (path, os.getpid(), os.uname().nodename)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with open(part, "wb") as file:
                file.write(content)
            os.replace(part, path)
    finally:
        os.umask(mask)
from _frozen_importlib_external import FileFinder, SourceFileLoader
class Source(SourceFileLoader):
    """Compiled code that a full disk has cut short is compiled again, and not the end of everything."""
    def get_code(self, name):
        try:
            return super().get_code(name)
        except (EOFError, ValueError, TypeError):
            return self.source_to_code(self.get_data(self.path), self.path)
def finder(path):
    if not path.startswith(cache):
        raise ImportError
    return FileFinder(path, (Source, [".py"]))
memory = {}
class Memory:
    """Imports from `memory`, for a node whose home takes nothing."""
    @staticmethod
    def find_spec(name, path=None, target=None):
        if not name.startswith("clustertool"):
            return None
        from importlib.util import spec_from_loader
        for tail in ("/__init__.py", ".py"):
            if name.replace(".", "/") + tail in memory:
                return spec_from_loader(name, Memory, is_package=tail != ".py")
    @staticmethod
    def create_module(spec):
        return None
    @staticmethod
    def exec_module(module):
        name = module.__name__.replace(".", "/")
        name += "/__init__.py" if name + "/__init__.py" in memory else ".py"
        exec(compile(memory[name], name, "exec"), module.__dict__)
def have(digest):
    try:
        return good(read(digest), digest)
    except OSError:
        return False
def receive(data, digest):
    """Code that came. True if it is kept here now, False if it must be run from memory; None if it is damaged."""
    files = {name: text.encode() for name, text in json.loads(zlib.decompress(data)).items()}
    if not good(files, digest):
        return None
    try:
        write(files, digest)
        if have(digest):
            return True
    except OSError:
        pass
    memory.update(files)
    if Memory not in sys.meta_path:
        sys.meta_path.insert(0, Memory)
    return False
def mount():
    """The rest lies on the disk."""
    import clustertool.node, clustertool.plan
    for package in (clustertool.node, clustertool.plan):
        package.__path__.append(os.path.join(cache, hello["rest"], *package.__name__.split(".")))
def add(data):
    if receive(data, hello["rest"]):
        mount()
sys.path_hooks.insert(0, finder)
kept = have(hello["first"])
say("have" if kept else "need")
if not kept:
    kept = receive(take(int(take(8))), hello["first"])
    if kept is None:
        say("damaged")
        sys.exit(0)
if kept:
    sys.path.insert(0, os.path.join(cache, hello["first"]))
from clustertool.node.agent import main
if have(hello["rest"]):
    mount()
    say("ready whole")
else:
    say("ready")
hello["add"] = add
main(hello)
'''

BOOT = zlib.compress(_BOOT, 9)
