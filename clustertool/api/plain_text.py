"""Texts of the API name the command `clustertool` where actions and nodes write a placeholder (model/hints.py)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from clustertool.errors import ClustertoolError, singles
from clustertool.model.hints import filled
from clustertool.show.program_name import commanded


def plain(text: str) -> str:
    """The text with the name of the command in its hints."""
    return filled(text, commanded())


@contextmanager
def plain_errors() -> Iterator[None]:
    """A decorator for methods of the API: the texts of the errors that they raise are plain."""
    try:
        yield
    except ClustertoolError as error:
        for one in (error, *singles(error)):
            one.what, one.fix = plain(one.what), plain(one.fix)
            one.args = (one.what,)
        raise
