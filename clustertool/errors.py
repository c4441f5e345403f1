"""Errors state what happened, on which node, and the fix. The class of an error gives the exit code.

    ClustertoolError                 70
     +-- UsageError                  64   wrong options
     +-- DataError                   65   bad workspace or data
     +-- NotFound                    66   no such job, rank or file
     +-- PreflightError              69   a check failed
     |    +-- Unreachable            69   a node did not answer
     |    +-- BadAnswer              69   the answer of a node is not valid
     |    +-- PortHeld               69   another job took a port after this one was planned
     |    +-- DeviceHeld             69   another job or process uses a device that the job needs
     +-- InternalError               70   a bug of the tool
     +-- DispatchError               74   the workspace could not be copied
     +-- NodeLost                    75   a node was lost while its job ran
     +-- Survivors                   76   processes survived a stop
     +-- AuthError                   77   authentication or host key refused
     +-- ConfigError                 78   bad conf.py
     +-- TimedOut                   124   the job reached its time limit
     +-- Interrupted                130   Ctrl+C
     +-- Terminated                 143   SIGTERM
     +-- JobFailed                        the culprit's own code
     +-- Several                          the failures of several nodes, gathered

Codes come from sysexits.h where it has one. docs/reference.md has the whole list.
"""

from __future__ import annotations

from typing import Optional, Sequence, Tuple


class ClustertoolError(Exception):
    """What happened (`what`), what to do (`fix`), where (`node`, its display name or "")."""

    code = 70
    source = "tool"
    printed = False  # the message was printed before: only the fix and the exit code remain
    brief = ""  # for the exit line: the failure without what was printed already

    def __init__(self, what: str, fix: str = "", node: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix
        self.node = node

    def __str__(self) -> str:
        where = f"{self.node}: " if self.node else ""
        fix = f"\n  fix: {self.fix}" if self.fix else ""
        return f"{where}{self.what}{fix}"


class UsageError(ClustertoolError):
    code = 64


class DataError(ClustertoolError):
    code = 65


class NotFound(ClustertoolError):
    code = 66


class PreflightError(ClustertoolError):
    code = 69


class Unreachable(PreflightError):
    pass


class BadAnswer(PreflightError):
    pass


class PortInUse(PreflightError):
    """Where the port was not asked for by name, planning once more finds another."""


class DeviceInUse(PreflightError):
    """It may become free: --wait waits for that."""


REPORT = "report it with the text above"


class InternalError(ClustertoolError):
    @property
    def short(self) -> str:
        """Its first line, without the traceback."""
        return self.what.partition("\n")[0]


class DispatchError(ClustertoolError):
    code = 74


class NodeLost(ClustertoolError):
    code = 75


class Survivors(ClustertoolError):
    code = 76


class AuthError(ClustertoolError):
    code = 77


class ConfigError(ClustertoolError):
    code = 78


class TimedOut(ClustertoolError):
    code = 124


class Interrupted(ClustertoolError):
    code = 130


class Terminated(ClustertoolError):
    code = 143


class JobFailed(ClustertoolError):
    """The job's own failure: `code` is the culprit's exit code, or 128+N for signal N."""

    source = "job"

    def __init__(self, what: str, code: int, fix: str = "", node: str = "") -> None:
        super().__init__(what, fix, node)
        self.code = code


class Several(ClustertoolError):
    """All nodes' failures at once. 77 only if every one is an authentication error (contract)."""

    def __init__(self, errors: Sequence[ClustertoolError]) -> None:
        self.errors: Tuple[ClustertoolError, ...] = tuple(errors)
        super().__init__("\n".join(str(error) for error in self.errors))
        codes = {error.code for error in self.errors}
        self.code = codes.pop() if len(codes) == 1 else 69 if codes & {69, 77} else max(codes)


def as_one(errors: Sequence[ClustertoolError]) -> Optional[ClustertoolError]:
    """Nothing, the one error, or all of them as `Several`."""
    if len(errors) > 1:
        return Several(errors)
    return errors[0] if errors else None


def raise_all(errors: Sequence[ClustertoolError]) -> None:
    """Raise what as_one() makes of them."""
    error = as_one(errors)
    if error is not None:
        raise error


# Sent over the wire by a node as its class name; unknown names become PreflightError.
_BY_NAME = {
    cls.__name__: cls
    for cls in (
        UsageError,
        DataError,
        NotFound,
        PreflightError,
        Unreachable,
        PortInUse,
        DeviceInUse,
        InternalError,
        DispatchError,
        NodeLost,
        Survivors,
        AuthError,
        ConfigError,
        TimedOut,
    )
}


def from_wire(kind: str, what: str, fix: str = "", node: Optional[str] = None) -> ClustertoolError:
    """The error a node reported: `kind` is a class name of the tree above."""
    return _BY_NAME.get(kind, PreflightError)(what, fix, node or "")
