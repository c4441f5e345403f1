"""The error of a rank that failed is in its error file, or else in the last line of its log.

PyTorch's `@record` writes the exception that ended the program to TORCHELASTIC_ERROR_FILE. The form is that of
torch.distributed.elastic.multiprocessing.errors: {"message": {"message": "ValueError: ...", ...}}, where the outer message may
also be the text itself. The program of the job writes both files, so nothing in them is trusted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from typing import Iterable, List, Tuple

from clustertool.model.masking import mask
from clustertool.model.paths import JobPaths
from clustertool.node.jobs.rank_log import end_of
from clustertool.node.storage import files

_MOST = 1 << 20  # bytes; the traceback of the exception is in the file too
_SHOWN = 300  # characters of the message, which becomes a part of events and of the verdict
_LINE = 4096  # bytes in which the last line of a log is searched
_DIFFERENT = rb"0x[0-9a-fA-F]+|[0-9]+"  # in the same error of several ranks: rank, port, pid, time, address
_OF_OTHERS = (  # what a rank prints after another one has failed
    rb"connection (reset|refused|closed)|broken ?pipe|closed by peer|ConnectionError|peer .* closed"
    rb"|nccl.*(remote|abort|timeout)|gloo.*(closed|reset|timeout)"
)


def remove_file(job: int, role: str, rank: int) -> None:
    """Before the rank starts: the file of an earlier attempt is no error of this one. `job`: its directory's descriptor."""
    with contextlib.suppress(OSError):
        files.remove(job, JobPaths.error_file(role, rank))


def read_file(job: int, role: str, rank: int, secrets: Iterable[str]) -> str:
    """The first line of the exception, without the values of `secrets`; "" if the rank has recorded none."""
    try:
        with files.closing(files.open_read(job, JobPaths.error_file(role, rank))) as fd:
            data = os.pread(fd, _MOST + 1, 0)
        message = json.loads(data)["message"] if len(data) <= _MOST else ""
        text = message["message"] if isinstance(message, dict) else message
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    if not isinstance(text, str):
        return ""
    first = next((line for line in mask(secrets)(text).splitlines() if line.strip()), "")
    return _shown(first)


def _shown(line: str) -> str:
    shown = " ".join("".join(sign if sign.isprintable() else " " for sign in line).split())
    return shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "..."


def of_runtime(job: int, log: str, runtime: str, code: int) -> str:
    """Of a rank whose program did not begin: the exit code of the runtime's client, and its message in the rank's log."""
    lines: List[str] = []
    with contextlib.suppress(OSError):
        lines = [line for line in end_of(job, log, _LINE)[0].decode(errors="replace").splitlines() if line.strip()]
    found = next((line for line in reversed(lines) if "rror" in line), lines[0] if lines else "")
    return f"{runtime} did not start its container (exit code {code})" + (f": {_shown(found)}" if found else "")


def last_line(job: int, log: str) -> bytes:
    """The last line of a log that is not blank; b"" if there is none."""
    with contextlib.suppress(OSError):
        return end_of(job, log, _LINE)[0].strip().rpartition(b"\n")[2]
    return b""


def classify(line: bytes) -> Tuple[int, bool]:
    """Of an error message: a number, and whether it is about a lost connection to another process. (0, False) for an empty one.

    Lines that differ in digits only have the same number.
    """
    if not line:
        return 0, False
    return zlib.crc32(re.sub(_DIFFERENT, b"0", line)), re.search(_OF_OTHERS, line, re.IGNORECASE) is not None
