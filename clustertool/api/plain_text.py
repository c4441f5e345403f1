"""Texts of the API name the command `clustertool` where actions and nodes write a placeholder (model/hints.py).

They name a parameter where those of the command line name an option.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from clustertool.errors import ClustertoolError, UsageError, singles
from clustertool.model.hints import PROGRAM, filled
from clustertool.show.program_name import commanded

_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]*)")


def plain(text: str) -> str:
    """The text with the name of the command in its hints."""
    return filled(text, commanded())


def _with_parameters(text: str) -> str:
    """Write `nproc_per_node` in place of `--nproc-per-node`, except in a text with a command to type."""
    return text if PROGRAM in text else _OPTION.sub(lambda option: option[1].replace("-", "_"), text)


@contextmanager
def plain_errors() -> Iterator[None]:
    """A decorator for methods of the API: the texts of the errors that they raise are plain."""
    try:
        yield
    except ClustertoolError as error:
        for one in {id(one): one for one in (error, *singles(error))}.values():  # a single error is its own part
            if isinstance(one, UsageError):
                one.what, one.fix = _with_parameters(one.what), _with_parameters(one.fix)
            one.what, one.fix = plain(one.what), plain(one.fix)
            one.args = (one.what,)
        raise
