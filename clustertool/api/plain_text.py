"""Texts of the API name the command `clustertool` where actions and nodes write a placeholder (model/hints.py).

Errors name a parameter where those of the command line name the option of the same name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import TypeVar

from clustertool.errors import ClustertoolError, InternalError, JobFailed, singles
from clustertool.model.hints import PROGRAM, fill_program
from clustertool.show.program_name import commanded

_Method = TypeVar("_Method", bound=Callable[..., object])
# Not one in quotes, which is a value: an option of a container's runtime or of sbatch.
_OPTION = re.compile(r"(?<![\w.'\"-])--([a-z][a-z-]*)")
_PARAMETERS: set[str] = set()  # of all methods of the API
_OTHERS = {"workspace": "job"}  # the parameter of an option with another name


def plain(text: str) -> str:
    """Replace the placeholder of the program in the hints of a text by the name of the command."""
    return fill_program(text, commanded())


def _parameter(option: re.Match[str]) -> str:
    """Return the parameter of the API with the name of an option, or the option's text if there is none."""
    name = _OTHERS.get(option[1]) or option[1].replace("-", "_")
    return name if name in _PARAMETERS else option[0]


def _with_parameters(text: str) -> str:
    """Replace options in a text by parameters of the API (--nproc-per-node by nproc_per_node), except in a command to type."""
    head, program, command = text.partition(PROGRAM)
    return _OPTION.sub(_parameter, head) + program + command


class plain_errors(ContextDecorator):
    """A decorator for methods of the API, and a context manager: it rewrites the texts of the errors that are raised in it.

    They name the command `clustertool`, and parameters of the API in place of options.
    """

    def __call__(self, method: _Method) -> _Method:
        """Decorate a method, and add its parameters to those that replace options in texts."""
        _PARAMETERS.update(inspect.signature(method).parameters)
        return super().__call__(method)

    def __enter__(self) -> None:
        """Do nothing: errors are changed when the block ends."""

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        """Replace options and the placeholder of the program in the texts of a ClustertoolError and of its parts.

        Options stay in JobFailed and InternalError, which quote programs.
        """
        if not isinstance(error, ClustertoolError):
            return
        for one in {id(one): one for one in (error, *singles(error))}.values():  # a single error is its own part
            if not isinstance(one, (JobFailed, InternalError)):  # they quote programs
                one.what, one.fix = _with_parameters(one.what), _with_parameters(one.fix)
            one.what, one.fix = plain(one.what), plain(one.fix)
            one.args = (one.what,)
