"""`clustertool check` of this machine without ssh. argv: the options of check."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from clustertool.actions import load_config
from clustertool.fleet import this_machine
from clustertool.model.config.cluster import Cluster
from clustertool.verbs.program import run

QUIET = ("load", "memory", "disk", "shm", "limits")  # what else this machine does is no matter


def cluster(*_: Any, **__: Any) -> Cluster:
    found = this_machine.own_cluster(Path.cwd())
    return replace(found, checks_off=(*found.checks_off, *QUIET))


load_config.cluster = cluster
sys.exit(run(["check", *sys.argv[1:]]))
