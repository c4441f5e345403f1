"""Records on disk carry the number of their format, so that an older version refuses what it cannot read, and names it.

The number stands under "format": in spec.json, in the first event of events.jsonl (for all files next to it), in ports.json, in
ROOT_DIR/.clustertool/jobs, in locks of devices. A record without a number is older than the numbers: it is read as format 1.
"""

from __future__ import annotations

from typing import Mapping

from clustertool.errors import PreflightError

FORMAT = 1
KEY = "format"


def require_known(record: Mapping[str, object], path: str) -> None:
    """Raise PreflightError for a record of a format that this version does not know. `path` names its file."""
    number = record.get(KEY, FORMAT)
    if type(number) is not int or not 1 <= number <= FORMAT:
        made = f"{path} has format {str(number)[:20]} and was made by a newer clustertool"
        what = f"{made}; this one reads formats up to {FORMAT}"
        raise PreflightError(what, "update clustertool where you give this command")
