"""The node list is Slurm's short form of node names, as in SLURM_STEP_NODELIST and in the answers of scontrol and squeue."""

from __future__ import annotations

import re
from typing import List

from clustertool.errors import DataError
from clustertool.model.config.hosts import expand

_NAME = r"(?:[^\s,\[\]]|\[[0-9,-]+\])+"  # with its ranges: a comma in brackets does not end it


def read_node_list(text: str) -> List[str]:
    """Expand "gpu[01-02,7],login" to gpu01 gpu02 gpu7 login; "" to none. Raises DataError, ConfigError for no node list."""
    if text and not re.fullmatch(f"{_NAME}(?:,{_NAME})*", text):
        raise DataError(f"{text[:80]!r} is no list of nodes", "scontrol show hostnames expands a list of Slurm")
    return [name for part in re.findall(_NAME, text) for name in expand(part)]
