"""Unpacking is what a node does once with a part of its code: check it, keep it, compile it for the Python that is here.

Sent with boot.py, as text; `code` is its Code. A home that takes nothing is no obstacle: what came is in memory.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import time
import zlib
from typing import Any, Dict, Optional, Tuple

_OLD = 30 * 86400.0  # seconds after which what was kept goes, when something new comes: other versions, other Pythons


def receive(code: Any, data: bytes, digest: str) -> bool:
    """Take in a part that came. False if it is damaged."""
    good = _add(code, data, digest)
    if good:
        _keep(code, digest + ".pyz", data)
    return good


def compile_kept(code: Any, digest: str) -> bool:
    """A part that is here as it came. False if it is not, or damaged."""
    try:
        data = code.read(digest + ".pyz")
    except OSError:
        return False
    return _add(code, data, digest)


def keep_boot(code: Any, data: bytes) -> None:
    """The compiled boot, behind what it came as: the next start that gets the same need not compile it.

    See fleet/node_bundle.py.
    """
    made = data + marshal.dumps(compile(zlib.decompress(data), "clustertool-boot", "exec"))
    _keep(code, code.name("boot"), zlib.crc32(made).to_bytes(4, "big") + made)


def _add(code: Any, data: bytes, digest: str) -> bool:
    import hashlib

    if hashlib.sha256(data).hexdigest()[:32] != digest:
        return False
    code.parts[digest] = data
    _compile_part(code, digest)
    return True


def _compile_part(code: Any, digest: str) -> None:
    """All of it, which takes 20 ms; the next start finds it done."""
    import __future__  # it is left out of what is sent: no module of ours need import it

    lazily = __future__.annotations.compiler_flag
    index: Dict[str, Tuple[bool, int, int]] = {}
    body = b""
    for name, text in _texts(code, digest).items():
        made = marshal.dumps(compile(text, name, "exec", lazily, dont_inherit=True))
        index[_module(name)] = name.endswith("__init__.py"), len(body), len(body) + len(made)
        body += made
    head = marshal.dumps(index)
    data = len(head).to_bytes(4, "big") + head + body
    compiled = zlib.crc32(data).to_bytes(4, "big") + data
    code.take(compiled)
    _keep(code, code.name(digest), compiled)


def source(code: Any, module: str) -> Optional[str]:
    """The text of a module, as it was sent; it may have been thrown away. Raises OSError."""
    for digest, data in code.parts.items():
        if data is None:
            code.parts[digest] = code.read(digest + ".pyz")
        for name, text in _texts(code, digest).items():
            if _module(name) == module:
                return text
    return None


def _texts(code: Any, digest: str) -> Dict[str, str]:
    return dict(json.loads(zlib.decompress(code.parts[digest])))


def _module(name: str) -> str:
    return name[: -len(".py")].replace("/__init__", "").replace("/", ".")


def _keep(code: Any, name: str, data: bytes) -> None:
    """Whole or not at all: others may start here at the same time."""
    if not os.path.isdir(os.path.expanduser("~")):  # nobody wants us to make one
        return
    mask = os.umask(0o077)
    part = os.path.join(code.place, f"{name}.{os.getpid()}.{os.uname().nodename}")
    try:
        os.makedirs(code.place, mode=0o700, exist_ok=True)
        if code.safe():
            _throw_out(code.place)
            with open(part, "wb") as file:
                file.write(data)
            os.replace(part, os.path.join(code.place, name))
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)
    finally:
        os.umask(mask)


def _throw_out(place: str) -> None:
    for name in os.listdir(place):
        path = os.path.join(place, name)
        with contextlib.suppress(OSError):
            if len(name.partition(".")[0]) == 32 and time.time() - os.lstat(path).st_mtime > _OLD:
                os.unlink(path)
