"""A selection is what a command line says about the cluster that a command is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Selection:
    """How a cluster is selected: the options of verbs that concern hosts, "" and () where they are not given.

    engine: in place of ENGINE of conf.py.

    no_conf: no conf.py is searched.

    here: only jobs that clusterrun has started on this machine. job: the job that the command is about, "" for the newest one;
    None: it is about no single job. Without a conf.py its hosts are those that are stored (fleet/stored_hosts.py).
    """

    conf: str = ""
    hostfile: str = ""
    only: Sequence[str] = ()
    skip: Sequence[str] = ()
    dispatch: str = ""
    engine: str = ""
    here: bool = False
    job: str | None = None
    no_conf: bool = False
