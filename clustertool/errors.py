"""Errors state what happened, on which node, and the fix. The class of an error gives the exit code.

Codes come from sysexits.h where it has one. docs/reference.md has the whole list.
"""

from __future__ import annotations

import copyreg
from typing import Dict, Iterator, Optional, Sequence, Tuple, Type


class ClustertoolError(Exception):
    """What happened (`what`), what to do (`fix`), where (`node`, its display name or "")."""

    code = 70  # for a class without a code of its own: that of its base
    source = "tool"
    printed = False  # the message was printed before: only the fix and the exit code remain
    brief = ""  # for the exit line: the failure without what was printed already

    def __init_subclass__(cls, code: int = 0) -> None:
        cls.code = code or cls.code

    def __init__(self, what: str, fix: str = "", node: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix
        self.node = node

    def __reduce__(self) -> Tuple[object, ...]:
        """Return what pickle needs to copy the error without a call of __init__: the class, its text and its fields.

        The error of a job may come from another process of a pipeline.
        """
        return copyreg.__newobj__, (type(self), self.what), vars(self)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        where = f"{self.node}: " if self.node else ""
        fix = f"\n  fix: {self.fix}" if self.fix else ""
        return f"{where}{self.what}{fix}"


class UsageError(ClustertoolError, code=64):  # wrong options
    brief = "wrong usage"  # its message is one line, and stands right above the exit line


class DataError(ClustertoolError, code=65): ...  # bad workspace or data


class NotFound(ClustertoolError, code=66): ...  # no such job, rank or file


class PreflightError(ClustertoolError, code=69): ...  # a check failed


class Unreachable(PreflightError): ...  # a node did not answer


class NoPython(PreflightError): ...  # a node has no Python that can run the tool's part


class BadAnswer(PreflightError): ...  # the answer of a node is not valid


class PortInUse(PreflightError):
    """Another job took a port after this one was planned.

    Where the port was not asked for by name, planning once more finds another.
    """


class DeviceInUse(PreflightError):
    """Another job or process uses a device that the job needs. It may become free: --wait waits for that."""


REPORT = "report it with the text above"


class InternalError(ClustertoolError):
    """A bug of the tool."""

    @property
    def short(self) -> str:
        """Its first line, without the traceback."""
        return self.what.partition("\n")[0]


class DispatchError(ClustertoolError, code=74): ...  # the workspace could not be copied


class WorkspaceChanged(DispatchError): ...  # a file is not what it was when the workspace was read


class NodeLost(ClustertoolError, code=75): ...  # a node was lost while its job ran


class Survivors(ClustertoolError, code=76): ...  # processes survived a stop


class AuthError(ClustertoolError, code=77): ...  # authentication or host key refused


class ConfigError(ClustertoolError, code=78): ...  # bad conf.py


class TimedOut(ClustertoolError, code=124): ...  # the job reached its time limit


class Interrupted(ClustertoolError, code=130): ...  # Ctrl+C


class Terminated(ClustertoolError, code=143): ...  # SIGTERM


class JobFailed(ClustertoolError):
    """The job's own failure: `code` is the culprit's exit code, or 128+N for signal N. `lines`: the last ones of its log."""

    source = "job"
    lines: Tuple[str, ...] = ()

    def __init__(self, what: str, code: int, fix: str = "", node: str = "") -> None:
        super().__init__(what, fix, node)
        self.code = code


class Several(ClustertoolError):
    """All nodes' failures at once. `code`: theirs if they have the same, else 69 if one has 69 or 77, else the highest."""

    def __init__(self, errors: Sequence[ClustertoolError]) -> None:
        self.errors: Tuple[ClustertoolError, ...] = tuple(errors)
        super().__init__("\n".join(str(error) for error in self.errors))
        codes = {error.code for error in self.errors}
        self.code = codes.pop() if len(codes) == 1 else 69 if codes & {69, 77} else max(codes)


def as_one(errors: Sequence[ClustertoolError]) -> Optional[ClustertoolError]:
    """Return None for no error, the only error, or all of them as `Several`."""
    if len(errors) > 1:
        return Several(errors)
    return errors[0] if errors else None


def raise_all(errors: Sequence[ClustertoolError]) -> None:
    """Raise the only error, or all of them as `Several`; do nothing for no error."""
    error = as_one(errors)
    if error is not None:
        raise error


def singles(error: ClustertoolError) -> Iterator[ClustertoolError]:
    """Yield the single errors in an error, in order; the error itself if it is no `Several`."""
    if isinstance(error, Several):
        for one in error.errors:
            yield from singles(one)
    else:
        yield error


def only(error: ClustertoolError, *kinds: Type[ClustertoolError]) -> bool:
    """Check whether all single errors in an error are of these kinds."""
    return all(isinstance(one, kinds) for one in singles(error))


# What nodes raise. It is sent as the name of its class; unknown names become PreflightError.
_OF_NODES = (
    UsageError,
    NotFound,
    PreflightError,
    PortInUse,
    DeviceInUse,
    InternalError,
    DispatchError,
    WorkspaceChanged,
)
_BY_NAME = {cls.__name__: cls for cls in _OF_NODES}


def from_wire(kind: str, what: str, fix: str = "", node: Optional[str] = None) -> ClustertoolError:
    """Build the error that a node reported. kind: a class of _OF_NODES by name; another one becomes PreflightError."""
    return _BY_NAME.get(kind, PreflightError)(what, fix, node or "")


def as_wire(error: ClustertoolError) -> Dict[str, str]:
    """Convert an error to what a node sends for it: its class, text and fix."""
    return {"kind": type(error).__name__, "what": error.what, "fix": error.fix}
