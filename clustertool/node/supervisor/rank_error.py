"""The error of a rank that failed is in its error file, or else at the end of its log.

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
from typing import Iterable, List, NamedTuple, Pattern, Sequence, Tuple

from clustertool.model.masking import mask
from clustertool.model.paths import JobPaths
from clustertool.node.jobs.rank_log import end_of
from clustertool.node.storage import files

_MOST = 1 << 20  # bytes; the traceback of the exception is in the file too
_SHOWN = 300  # characters of the message, which becomes a part of events and of the verdict
_LINE = 4096  # bytes in which the last line of a log is searched
# Bytes of a log in which its last error is searched: libraries print the stacks of all threads behind it.
_END = 64 << 10
_WIDTH = 1024  # bytes of a line that are searched: the time of a pattern with `.*` grows with their square
_MESSAGE = 8  # lines of one error message
_DIFFERENT = rb"0x[0-9a-fA-F]+|[0-9]+"  # in the same error of several ranks: rank, port, pid, time, address
_PREFIX = re.compile(rb"\[(rank)?[0-9]+(,[0-9]+)?\](<std(err|out)>)?: ?")  # of PyTorch, and of mpirun --tag-output
_TRACEBACK = b"Traceback (most recent call last):"
_CHAINED = (b"During handling of the above", b"The above exception was the direct cause")
_STACK = re.compile(rb"\s|frame #|#[0-9]|\[bt\]|@ |Exception raised from|Thread 0x|\[[^\]]*\] *\[ *[0-9]+\]")
# What libraries print behind the last exception of a program. Behind another line the program has gone on after it.
_NOISE = re.compile(
    rb"[\[*-]|[DIWEF][0-9]{4} |terminate called|C\+\+ Traceback|Error Message Summary|Exception (ignored|in thread)"
    rb"|Fatal Python|Current thread|Extension modules|wandb: |.*\b(WARNING|INFO|DEBUG|\w*Warning)\b"
)
# Where libraries written in C++ or C begin a message of several lines.
_BEGINS = re.compile(
    rb" *what\(\):|F[0-9]{4} |Error Message Summary:|.*(Fatal error in |\*\*\* An error occurred in MPI_)"
)
_SUMMARY = b"Error Message Summary:"  # of Paddle, in an exception without a text of its own
# The messages of these libraries have their reason in further lines.
_LIBRARIES = re.compile(rb"nccl|gloo|hccl|errors_impl|\(External\)|mpi|horovod|xla|jax|c10|dist\w+error", re.IGNORECASE)
# What a rank prints after another one has failed: a connection, the store of the rendezvous or a collective has ended.
_OF_OTHERS = re.compile(
    rb"connection (was |is )?(reset|refused|closed|aborted|lost)|broken ?pipe|ConnectionError|socket (is )?closed"
    rb"|closed (by|connection).* peer|peer .*closed|remote (peer|process exit)|failed to recv, got 0 bytes|Got EOF of Socket"
    rb"|failed to connect to all addresses|communication error with|endpoint is not connected|PROC_FAILED|process has failed"
    rb"|peer failure|another task died|heartbeat time ?out|different device incarnation"
    rb"|client socket has timed out|socket time ?out|waiting for clients|RendezvousConnectionError|TCP (receive|send) error"
    rb"|store->get\(|wait time ?out after [0-9]+ ?ms"
    rb"|communicator was aborted|collective ops (is|are) aborted|Horovod has been shut down|\bEI0006\b"
    rb"|nccl.*(remote|abort|timeout)|gloo.*(closed|reset)",
    re.IGNORECASE,
)
# The same where it has waited for the other one in a collective until the time ran out.
_IN_COLLECTIVE = re.compile(
    rb"collective operation timeout|operations have failed or timed out|monitoredBarrier|barrier timed out|\bEI0002\b"
    rb"|(nccl(?!.*(store|socket))|gloo).*time(out|d out)",
    re.IGNORECASE,
)


class LoggedError(NamedTuple):
    """The error with which a log ends.

    line: the error, as it is compared and shown. cause: what began it. exception: whether it ended a Python program.
    """

    line: bytes
    cause: bytes
    exception: bool = False


def remove_file(job: int, role: str, rank: int) -> None:
    """Remove the error file of a rank before it starts: what an earlier attempt wrote is no error of this one. Ignores OSError.

    job: a descriptor of the job's directory.
    """
    with contextlib.suppress(OSError):
        files.remove(job, JobPaths.error_file(role, rank))


def read_file(job: int, role: str, rank: int, secrets: Iterable[str]) -> str:
    """Read the first line of the exception in a rank's error file, without the values of `secrets`.

    It has 300 characters at most; "" if there is no file, or it has another form or more than 1 MiB.
    """
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
    return _shorten(first)


def _shorten(line: str) -> str:
    """Replace what cannot be printed by spaces, join them, and cut the line at 300 characters."""
    shown = " ".join("".join(sign if sign.isprintable() else " " for sign in line).split())
    return shown if len(shown) <= _SHOWN else shown[: _SHOWN - 3] + "..."


def describe_runtime_error(job: int, log: str, runtime: str, code: int) -> str:
    """Describe why a container was not started: the exit code of the runtime's client, and a line of the log, if it has one.

    That is, of its last 4 KiB, the last line with "error", else the first line.
    """
    lines: List[str] = []
    with contextlib.suppress(OSError):
        lines = [line for line in end_of(job, log, _LINE)[0].decode(errors="replace").splitlines() if line.strip()]
    found = next((line for line in reversed(lines) if "rror" in line), lines[0] if lines else "")
    return f"{runtime} did not start its container (exit code {code})" + (f": {_shorten(found)}" if found else "")


def end_of_log(job: int, log: str) -> LoggedError:
    """Find the error in the last 64 KiB of a log: a Python exception, else a library's message, else a line that is no stack.

    The latter is the last one. If an exception only tells that another process has gone, the first one of its chain is the
    error. Empty if the log is empty, or cannot be read.
    """
    data = b""
    with contextlib.suppress(OSError):
        data = end_of(job, log, _END)[0]
    lines = [line for line in (_PREFIX.sub(b"", line, 1).rstrip() for line in data.splitlines()) if line]
    chain = _last_exceptions(lines)
    if chain and _SUMMARY in lines[chain[-1] :]:
        place = lines.index(_SUMMARY, chain[-1]) + 1
        place = next((at for at in range(place, len(lines)) if lines[at].strip(b"-")), place - 1)
        return LoggedError(lines[place], _message(lines, place), exception=True)
    if chain:
        first, last = _message(lines, chain[0]), lines[chain[-1]]
        by_cleanup = _is_of_others(last) and not _is_of_others(first)
        return LoggedError(lines[chain[0]] if by_cleanup else last, first, exception=True)
    last = next((line for line in reversed(lines) if not _STACK.match(line)), lines[-1] if lines else b"")
    begins = [place for place, line in enumerate(lines) if _BEGINS.match(line)]
    if begins and sum(not _STACK.match(line) for line in lines[begins[-1] + 1 :]) <= _MESSAGE:
        return LoggedError(last, _message(lines, begins[-1]))
    return LoggedError(last, last)


def _last_exceptions(lines: Sequence[bytes]) -> List[int]:
    """Find the lines of the exception that ended the program and of those before it in its chain, the first one first.

    [] if there is none, or the program has printed more than a library's noise behind it.
    """
    chain: List[int] = []
    inside = linked = False
    for place, line in enumerate(lines):
        if line == _TRACEBACK:
            chain = chain if linked else []
            inside, linked = True, False
        elif inside and not line[:1].isspace():
            chain.append(place)
            inside = False
        elif chain and not inside and line.startswith(_CHAINED):
            linked = True
    if inside or not chain:
        return []
    behind = [line for line in lines[chain[-1] + 1 :] if not _STACK.match(line)]
    if _SUMMARY in behind:
        behind = behind[behind.index(_SUMMARY) + 1 + _MESSAGE :]
    elif _LIBRARIES.search(lines[chain[-1]], 0, _WIDTH):
        behind = behind[_MESSAGE:]
    return chain if all(map(_NOISE.match, behind)) else []


def _message(lines: Sequence[bytes], place: int) -> bytes:
    """Return the line at `place`, with the seven lines below it if a communication library or C++ has printed it."""
    if not _LIBRARIES.search(lines[place], 0, _WIDTH) and not _BEGINS.match(lines[place]):
        return lines[place]
    return b"\n".join(lines[place : place + _MESSAGE])


def shown_exception(error: LoggedError, secrets: Iterable[str]) -> str:
    """Return the line of a Python exception, shortened, without the values of `secrets`; "" for an error that is none."""
    return _shorten(mask(secrets)(error.line.decode(errors="replace"))) if error.exception else ""


def classify(error: LoggedError) -> Tuple[int, bool, bool]:
    """Return (number, consequence, timed out) of an error; (0, False, False) for an empty one.

    number: equal for lines that differ in digits and addresses only. consequence: another process has gone, or a collective has
    timed out. timed out: only the latter.
    """
    if not error.line:
        return 0, False, False
    number = zlib.crc32(re.sub(_DIFFERENT, b"0", error.line))
    return number, _is_of_others(error.cause), _finds(_IN_COLLECTIVE, error.cause)


def _is_of_others(text: bytes) -> bool:
    """Check whether a line of the text reports a process that has gone, or a collective that has timed out."""
    return _finds(_OF_OTHERS, text) or _finds(_IN_COLLECTIVE, text)


def _finds(pattern: Pattern[bytes], text: bytes) -> bool:
    """Check whether the pattern is found in the first 1024 bytes of a line of the text."""
    return any(pattern.search(line, 0, _WIDTH) for line in text.splitlines())
