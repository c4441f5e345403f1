"""The boot makes the node's code importable, from what is kept here or from what the laptop sends, and starts the agent.

It travels as text with every command (fleet/node_bundle.py), so it is short;
what only a node needs that does not have the code yet,
or not compiled, is unpack.py, which goes with it and is run on demand.
"""

from __future__ import annotations

import gc
import marshal
import os
import sys
import zlib
from typing import Any, Callable, Dict, Optional, Tuple


class Code:
    """Finder and loader of our modules. A part is in memory as a whole before its first module is: a job needs no file of it.

    `place` keeps a part as it came, DIGEST.pyz, and what each Python here has made of it (unpack.py): four bytes of CRC, four
    of the size of an index, the index {name: (whether it is a package, from, to)}, and each module's code by marshal.
    """

    def __init__(self, place: str, safe: Callable[[], bool], unpack: str) -> None:
        self.place, self.unpack = place, unpack
        self.safe = safe  # whether nobody else can have put anything there; raises OSError
        self.modules: Dict[str, Tuple[bool, Any]] = {}  # name -> whether it is a package, and its code by marshal
        self.parts: Dict[str, Optional[bytes]] = {}  # digest -> .pyz, None: it was not needed

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.modules:
            return None
        kind: Any = type(sys.__spec__)  # ModuleSpec, whose module takes a while to import
        return kind(name, self, is_package=self.modules[name][0])

    def create_module(self, spec: Any) -> None:
        """As usual."""

    def exec_module(self, module: Any) -> None:
        exec(marshal.loads(self.modules[module.__name__][1]), module.__dict__)

    def get_source(self, name: str) -> Any:
        """For tracebacks."""
        return self.late("source", name)

    def late(self, what: str, *arguments: Any) -> Any:
        """A function of unpack.py."""
        space: Dict[str, Any] = {"__name__": "clustertool-unpack"}
        exec(compile(self.unpack, "clustertool-unpack", "exec"), space)
        return space[what](self, *arguments)

    def find(self, digest: str) -> bool:
        """Whether a part is here, and whole: compiled, or at least as it came."""
        try:
            if not self.safe():
                return False
            self.take(self.read(self.name(digest)))
        except (OSError, ValueError):
            return os.path.exists(os.path.join(self.place, digest + ".pyz")) and bool(self.late("compile_kept", digest))
        self.parts[digest] = None
        return True

    def take(self, compiled: bytes) -> None:
        """Raises ValueError."""
        data = memoryview(compiled)  # much is read here, and nothing of it copied
        if len(data) < 8 or zlib.crc32(data[4:]) != int.from_bytes(data[:4], "big"):
            raise ValueError("a full disk has cut it short")
        base = 8 + int.from_bytes(data[4:8], "big")
        for name, (package, start, end) in marshal.loads(data[8:base]).items():
            self.modules[name] = package, data[base + start : base + end]

    def read(self, name: str) -> bytes:
        with open(os.path.join(self.place, name), "rb") as file:
            return file.read()

    def name(self, digest: str) -> str:
        """Of what this very Python makes of a part."""
        return f"{digest}.{sys.implementation.cache_tag}-{sys.hexversion:x}"


def boot(
    take: Callable[[int], bytes], place: str, safe: Callable[[], bool], unpack: str, fresh: Optional[bytes]
) -> None:
    """`take` gives so many bytes of what the laptop sends: the parts' digests, its hello, the first part if it is not here.

    `fresh`: what this very text came as, if it had to be compiled.
    """
    gc.disable()  # until the agent knows better: most of what is made now stays

    def sized() -> bytes:
        return take(int(take(8)))

    def say(word: str) -> None:
        os.write(1, word.encode() + b"\n")

    first, rest = sized().decode().split()
    hello = sized()
    code = Code(place, safe, unpack)
    sys.meta_path.insert(0, code)
    kept = code.find(first)
    say("have" if kept else "need")
    if not kept and not code.late("receive", sized(), first):
        say("damaged")
        return
    if fresh is not None:
        code.late("keep_boot", fresh)
    from clustertool.node.agent.loop import main

    say("ready whole" if code.find(rest) else "ready")
    main(hello, lambda data: code.late("receive", data, rest))
