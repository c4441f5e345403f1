"""A joining process runs the installed package: its command, the digest of its code, and the process as a child."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, TypedDict, cast

from clustertool.fleet import node_bundle
from clustertool.fleet.this_machine import shell_environment
from clustertool.model.joining.join_file import JoinFile, to_json

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
_KEPT = 8192  # bytes of the error output of a child


def command(*options: str) -> list[str]:
    """Build the command of a joining process; see node/join/main.py for the options. Its stdin is the join file."""
    return [sys.executable, "-ESs", "-c", _CODE, str(_ROOT.parent), *options]


@lru_cache(maxsize=1)
def code() -> Mapping[str, str]:
    """Read the modules that a joining process may import: {path from the folder above the package: text}."""
    paths = sorted({path for pattern in _FILES for path in _ROOT.glob(pattern)})
    texts = {path.relative_to(_ROOT.parent).as_posix(): path.read_text("utf-8") for path in paths}
    return dict(sorted(texts.items()))


def digest() -> str:
    """Compute the digest of the code, which is the same on all machines of a job."""
    return node_bundle.digest_of(_join_texts(code()))


@lru_cache(maxsize=1)
def additional() -> bytes:
    """Pack the modules of the code that an agent does not have (node/agent/members.py).

    Name and text of each, with NUL between them; zlib.
    """
    have = node_bundle.names()
    return zlib.compress(_join_texts({name: text for name, text in code().items() if name not in have}), 9)


def _join_texts(files: Mapping[str, str]) -> bytes:
    """Return name and text of each file, with NUL between all of them."""
    return "\0".join(text for file in files.items() for text in file).encode()


class Report(TypedDict, total=False):
    """One line of the process.

    node/join/join_report.py has the kinds, and the fields of each. node: a number, or in an error the node's name.
    """

    type: str
    present: int
    nnodes: int
    missing: list[int]
    coordinator: str
    why: str
    what: str
    fix: str
    kind: str
    code: int
    job: str
    node: int | str
    name: str
    job_dir: str
    nodes: list[str]
    ranks: list[tuple[str, int]]
    logs: list[tuple[str, int, str]]


CLOSED: Report = {"type": "closed"}  # after the last one


class JoinChild:
    """A process that joins a job on this machine, and becomes the supervisor of its ranks here. Its lines are reports.

    It runs in a session of its own: it outlives this command if the user detaches or closes the terminal.

    lock: a socket that must stay open as long as the process lives. The join file goes through a pipe. The secret from which
    its key was derived is not in the environment.
    """

    def __init__(self, file: JoinFile, folder: Path, lock: socket.socket | None) -> None:
        self._process = subprocess.Popen(
            command("--report", "--with-parent"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=shell_environment(),
            start_new_session=True,
            pass_fds=[lock.fileno()] if lock else [],
        )
        self._reports: queue.Queue[Report] = queue.Queue()
        self._errors = b""
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._threads = [
            threading.Thread(target=self._write_input, args=(self._process.stdin, to_json(file).encode()), daemon=True),
            threading.Thread(target=self._read_reports, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_errors, args=(self._process.stderr,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def next(self, wait: float) -> Report | None:
        """Return the next report, None if there is none in `wait` seconds. CLOSED is the last one."""
        with contextlib.suppress(queue.Empty):
            return self._reports.get(timeout=wait)
        return None

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it has not ended."""
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int | None:
        """Wait for the process, and return its exit code; None if it has not ended by then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    @property
    def errors(self) -> str:
        """The last 8 KiB that the process has written to stderr: after a report, nothing but a bug.

        Waits up to 1 s for the end of the stream.
        """
        self._threads[-1].join(1.0)
        return self._errors.decode(errors="replace").strip()

    @staticmethod
    def _write_input(pipe: IO[bytes], data: bytes) -> None:
        """Write data to the process, and close the pipe. If it has ended already, its reports say why."""
        with contextlib.suppress(OSError), pipe:  # it has ended already, and reports why
            pipe.write(data)

    def _read_reports(self, pipe: IO[bytes]) -> None:
        """Queue the reports of the process, and CLOSED at their end. Lines that are no objects of JSON are dropped."""
        for line in pipe:
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    self._reports.put(cast(Report, found))
        self._reports.put(CLOSED)

    def _read_errors(self, pipe: IO[bytes]) -> None:
        """Read the process's stderr to its end, and keep the last 8 KiB."""
        for line in pipe:
            self._errors = (self._errors + line)[-_KEPT:]
