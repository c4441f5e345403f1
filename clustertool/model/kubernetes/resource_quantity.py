"""This module reads resource quantities of Kubernetes, as in requests, limits, quotas and nodes: `500m`, `32Gi`, `1e3`."""

from __future__ import annotations

import re
from decimal import Decimal

UNITS = {
    unit: Decimal(1000) ** power for power, unit in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), -3)
}
UNITS.update({f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)})
# The numbers of digits are bounded: a server may send any text.
_QUANTITY = re.compile(
    r"([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(?:([eE][+-]?[0-9]{1,2})|([numkMGTPE]|[KMGTPE]i)?)"
)


def quantity(written: str) -> Decimal:
    """Parse a quantity of Kubernetes. Raises ValueError for another text."""
    found = _QUANTITY.fullmatch(written)
    if found is None:
        raise ValueError(f"{written!r:.60} is no quantity of Kubernetes")
    return Decimal(found[1] + (found[2] or "")) * UNITS[found[3] or ""]
