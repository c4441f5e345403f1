"""The boot makes the node's code importable, from what is kept here or from what the laptop sends, and starts the agent.

It travels as text with every command (reach/pyz.py), and each node compiles it: so it is short, and what only a node needs
that does not have the code yet, or not compiled, is unpack.py, which goes with it and is run on demand.
"""

from __future__ import annotations

import gc
import marshal
import os
import sys
import zlib
from typing import Any, Callable, Dict, List, Tuple


class Code:
    """Finder and loader of our modules. A part is in memory as a whole before its first module is: a job needs no file of it.

    `place` keeps a part as it came, DIGEST.pyz, and what each Python here has made of it (unpack.py): four bytes of CRC, four
    of the size of an index, the index {name: (whether it is a package, from, to)}, and each module's code by marshal.
    """

    def __init__(self, place: str, unpack: str) -> None:
        self.place, self.unpack = place, unpack
        self.modules: Dict[str, Tuple[bool, Any]] = {}  # name -> whether it is a package, and its code by marshal
        self.parts: Dict[str, bytes] = {}  # digest -> .pyz
        self.unread: List[str] = []  # digests of parts that are here

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        while name not in self.modules:
            if not self.unread or not name.startswith("clustertool"):
                return None
            self.load(self.unread.pop(0))
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
        """Whether a part is here, and whole."""
        try:
            data = self.read(digest + ".pyz") if self.safe() else b""
        except OSError:
            return False
        if self.digest(data) != digest:
            return False
        self.parts[digest] = data
        self.unread.append(digest)
        return True

    def load(self, digest: str) -> None:
        try:
            self.take(self.read(self.name(digest)))
        except (OSError, ValueError):
            self.late("compile_part", digest)

    def take(self, compiled: bytes) -> None:
        """Raises ValueError."""
        data = memoryview(compiled)  # much is read here, and nothing of it copied
        if len(data) < 8 or zlib.crc32(data[4:]) != int.from_bytes(data[:4], "big"):
            raise ValueError("a full disk has cut it short")
        base = 8 + int.from_bytes(data[4:8], "big")
        for name, (package, start, end) in marshal.loads(data[8:base]).items():
            self.modules[name] = package, data[base + start : base + end]

    def safe(self) -> bool:
        """Whether nobody else can have put anything there. Raises OSError."""
        info = os.lstat(self.place)
        return info.st_uid == os.getuid() and not info.st_mode & 0o022

    def read(self, name: str) -> bytes:
        with open(os.path.join(self.place, name), "rb") as file:
            return file.read()

    def name(self, digest: str) -> str:
        """Of what this very Python makes of a part."""
        return f"{digest}.{sys.implementation.cache_tag}-{sys.hexversion:x}"

    @staticmethod
    def digest(data: bytes) -> str:
        """By Python's own SHA-256: hashlib takes longer to import than this to run."""
        for module in ("_sha2", "_sha256", "hashlib"):
            try:
                return str(__import__(module).sha256(data).hexdigest()[:32])
            except ImportError:
                continue
        raise ImportError("this Python has no SHA-256")


def boot(take: Callable[[int], bytes], unpack: str) -> None:
    """`take` gives so many bytes of what the laptop sends: the parts' digests, its hello, the first part if it is not here."""
    gc.disable()  # until the agent knows better: most of what is made now stays

    def sized() -> bytes:
        return take(int(take(8)))

    def say(word: str) -> None:
        os.write(1, word.encode() + b"\n")

    first, rest = sized().decode().split()
    hello = sized()
    code = Code(os.path.join(os.path.expanduser("~"), ".cache", "clustertool"), unpack)
    sys.meta_path.insert(0, code)
    kept = code.find(first)
    say("have" if kept else "need")
    if not kept and not code.late("receive", sized(), first):
        say("damaged")
        return
    from clustertool.node.agent import main

    say("ready whole" if code.find(rest) else "ready")
    main(hello, lambda data: code.late("receive", data, rest))
