"""A joining process runs the installed package: its command, and the digest of its code. It gets the join file over stdin."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from clustertool.fleet import node_bundle

_ROOT = Path(__file__).resolve().parents[2]
_FILES = ("__init__.py", "errors.py", "node/**/*.py", "model/**/*.py")
# Without the user's own packages. The package's folder is the last one, so what is next to it shadows no module of Python.
_CODE = """\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
sys.path.append(sys.argv.pop(1))
from clustertool.node.join.main import main
sys.exit(main(sys.argv[1:]))
"""


def command(*options: str) -> list[str]:
    """Build the command of a joining process; see node/join/main.py for the options. Its stdin is the join file."""
    return [sys.executable, "-ESs", "-c", _CODE, str(_ROOT.parent), *options]


@lru_cache(maxsize=1)
def code() -> Mapping[str, str]:
    """Read {name: text} of the modules that a joining process may import."""
    paths = sorted({path for pattern in _FILES for path in _ROOT.glob(pattern)})
    texts = {path.relative_to(_ROOT.parent).as_posix(): path.read_text("utf-8") for path in paths}
    return dict(sorted(texts.items()))


def digest() -> str:
    """Hash the code: all machines of a job need the same."""
    return node_bundle.named(_joined(code()))


@lru_cache(maxsize=1)
def additional() -> bytes:
    """Pack the modules that an agent does not have (node/agent/join_code.py).

    Name and text of each, with NUL between them; zlib.
    """
    have = node_bundle.names()
    return zlib.compress(_joined({name: text for name, text in code().items() if name not in have}), 9)


def _joined(files: Mapping[str, str]) -> bytes:
    return "\0".join(text for file in files.items() for text in file).encode()
