"""The node's code travels in two parts, each named by its content, kept on the node and sent only when it is new.

The first part is what every command needs, and a dispatch; the rest follows with the first request that is none of those.
Comments and docstrings stay here, and only what the agent can reach goes along: many nodes hang on one uplink. Line numbers
stay what they are.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import json
import os
import re
import secrets
import threading
import tokenize
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_cache_path

from clustertool.ssh import ownership

_ROOT = Path(__file__).resolve().parent.parent
_PARTS = ("__init__.py", "errors.py", "light/*.py", "model/**/*.py", "node/**/*.py")
_AGENT = "node/agent/loop.py"
_BEFORE = ("node/agent/boot.py", "node/agent/unpack.py")  # they run before anything of ours is there
_EARLY = (
    _AGENT,
    "node/probe/probe.py",
    "node/probe/shared_root.py",
    "node/dispatch/relay_process.py",
    "node/dispatch/relay.py",
    "node/storage/patch.py",
)
EARLY = frozenset(
    {"probe", "meet", "patch", "relay", "unrelay", "relayed"}
)  # requests that need no more than the first part
_IMPORT = r"from clustertool((?:\.\w+)*) import (\((?:[^)]*)\)|[\w, ]+)"
_Cut = tuple[int, int, int]  # line, from 1, and columns

_making = threading.Lock()


class Part(NamedTuple):
    """`data`: zlib of {name: text} in JSON, which is named by its digest."""

    digest: str
    data: bytes


class Shipped(NamedTuple):
    """`boot` is zipped, too: node/agent/boot.py with node/agent/unpack.py."""

    boot: bytes
    first: Part
    rest: Part


def shipped() -> Shipped:
    """To make it takes half a second, so it is kept as long as no source changes."""
    with _making:  # the threads of all nodes ask at once
        return _shipped()


@lru_cache(maxsize=1)
def _shipped() -> Shipped:
    paths = _paths()
    state = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in [*paths, Path(__file__)]]
    kept = user_cache_path("clustertool") / "code" / hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]
    with suppress(OSError, ValueError):
        return _read(_own(kept))
    made = make(sources())
    with suppress(OSError):
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in kept.parent.iterdir():
            old.unlink()
        part = kept.with_name(secrets.token_hex(8))
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(_written(made))
        part.replace(kept)
    return made


def _written(made: Shipped) -> bytes:
    data = b"".join(b"%08d%s" % (len(one), one) for one in (made.boot, made.first.data, made.rest.data))
    return hashlib.sha256(data).digest() + data


def _own(path: Path) -> bytes:
    """A file that only root and this user can have written: its code runs on all nodes. Raises ValueError for another one."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        if ownership.problem(fd, os.fstat(fd)):
            raise ValueError("another user's")
        return file.read()


def _read(kept: bytes) -> Shipped:
    """Raises ValueError for what was torn."""
    if hashlib.sha256(kept[32:]).digest() != kept[:32]:
        raise ValueError("damaged")
    found, at = [], 32
    while at < len(kept):
        size = int(kept[at : at + 8])
        found.append(kept[at + 8 : at + 8 + size])
        at += 8 + size
    boot, first, rest = found
    return Shipped(boot, _part(first), _part(rest))


def _paths() -> list[Path]:
    return [path for part in _PARTS for path in sorted(_ROOT.glob(part))]


def sources() -> dict[str, str]:
    """Everything that may run on a node, by its name below the package."""
    return {path.relative_to(_ROOT).as_posix(): path.read_text("utf-8") for path in _paths()}


def program(name: str) -> str:
    """A module of the node's code that runs by itself, as text."""
    return lean((_ROOT / name).read_text("utf-8"))


def make(sources: Mapping[str, str]) -> Shipped:
    """All that travels, of these sources by their names below the package."""
    stand_ins = {Path(name).stem for name in sources if name.startswith("light/")} - {"__init__"}
    texts = {}
    for name, text in sources.items():
        texts[name] = light(lean(text), () if name.startswith("light/") else stand_ins)
    anywhere = {name for name in texts if name.endswith("__init__.py") or name.startswith("light/")}
    first = _reached(texts, _EARLY, "^") | anywhere
    rest = _reached(texts, (_AGENT,), "^ *") - first
    boot, unpack = (light(lean(sources[name]), ()) for name in _BEFORE)
    boot += f"boot(take, place, safe, {unpack!r}, fresh)\n"
    return Shipped(zlib.compress(boot.encode(), 9), _pack(texts, first), _pack(texts, rest))


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
    for package, names in re.findall(indent + _IMPORT, text, re.MULTILINE):
        path = package[1:].replace(".", "/")
        yield f"{path}.py"
        parts = (name.split(" as ")[0].strip() for name in names.strip("()").replace("\n", " ").split(","))
        yield from (f"{path}/{part}.py".lstrip("/") for part in parts if part)


def _pack(texts: Mapping[str, str], names: Iterable[str]) -> Part:
    files = {f"clustertool/{name}": texts[name] for name in sorted(names)}
    return _part(zlib.compress(json.dumps(files).encode(), 9))


def _part(data: bytes) -> Part:
    return Part(hashlib.sha256(data).hexdigest()[:32], data)


def lean(text: str) -> str:
    """A module without comments, docstrings and the types of its functions, each statement on its line."""
    lines, tree = text.splitlines(), ast.parse(text)
    for row, start, end in sorted({*_comments(text), *_types(lines, tree)}, reverse=True):
        lines[row - 1] = lines[row - 1][:start] + lines[row - 1][end:]
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, False) is not None:
            _replace(lines, node.body[0], '""')
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _comments(text: str) -> Iterator[_Cut]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield (*token.start, token.end[1])


def _types(lines: list[str], tree: ast.Module) -> Iterator[_Cut]:
    """Annotations that nothing looks at, where they are easily cut: on a line that is plain text, and not on two."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.arg) and node.annotation is not None:
                start, noted = node.col_offset + len(node.arg), node.annotation
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                start, noted = node.target.end_col_offset or 0, node.annotation
            elif isinstance(node, ast.FunctionDef) and node.returns is not None:
                start, noted = -1, node.returns
            else:
                continue
            line = lines[noted.lineno - 1]
            if start < 0:
                start = line.rindex(" ->", 0, noted.col_offset)
            if noted.lineno == noted.end_lineno and line.isascii():
                yield noted.lineno, start, noted.end_col_offset or 0


def light(text: str, stand_ins: Container[str]) -> str:
    """A module that imports modules of clustertool.light in place of those they stand for, and of typing what runs at all."""
    lines, tree = text.splitlines(), ast.parse(text)
    needed = _evaluated(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            _replace(lines, node, '""')  # it is a module, too; node/agent/unpack.py tells the compiler
        elif isinstance(node, ast.ImportFrom) and node.module == "typing":
            names = ", ".join(alias.name for alias in node.names if alias.name in needed)
            _replace(lines, node, f"from clustertool.light.typing import {names}" if names else '""')
        elif isinstance(node, ast.ImportFrom) and node.module in stand_ins and not node.level:
            _replace(lines, node, f"from clustertool.light.{ast.unparse(node)[len('from ') :]}")
        elif isinstance(node, ast.Import) and node.names[0].name in stand_ins:
            _replace(lines, node, f"from clustertool.light {ast.unparse(node)}")
    return "\n".join(lines) + "\n"


def _replace(lines: list[str], node: ast.stmt, text: str) -> None:
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    lines[first : last + 1] = [lines[first][: node.col_offset] + text, *[""] * (last - first)]


def _evaluated(tree: ast.Module) -> set[str]:
    """Names that are used where Python looks: not in annotations, given `from __future__ import annotations`."""
    noted: set[int] = set()
    lazy = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
    for node in ast.walk(tree) if lazy else ():
        for field in ("annotation", "returns"):
            noted.update(id(part) for part in ast.walk(getattr(node, field, None) or ast.Pass()))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in noted}


@lru_cache(maxsize=1)
def nvml() -> tuple[str, bytes]:
    """(digest, zlib) of the module `pynvml`: sent on its own, to nodes with NVIDIA's cards only."""
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
data = take(int(take(8)))
place = os.path.join(os.path.expanduser("~"), ".cache", "clustertool")
def safe():
    info = os.lstat(place)
    return info.st_uid == os.getuid() and not info.st_mode & 18
try:
    import marshal
    good = safe()
    with open(os.path.join(place, "boot.%s-%x" % (sys.implementation.cache_tag, sys.hexversion)), "rb") as file:
        kept = file.read()
    crc = int.from_bytes(kept[:4], "big")
    if not good or kept[4:4 + len(data)] != data or zlib.crc32(kept[4:]) != crc:
        raise ValueError
    code, fresh = marshal.loads(kept[4 + len(data):]), None
except (OSError, ValueError):
    code, fresh = compile(zlib.decompress(data), "clustertool-boot", "exec"), data
exec(code)
"""

# All that `ps` on a node shows of the above: without quotes, so that it can stand between those of a shell.
FIRST = f"""\
import os
n, d = {len(LOADER)}, bytes()
while n: c = os.read(0, n) or os._exit(0); d += c; n -= len(c)
exec(d)"""
