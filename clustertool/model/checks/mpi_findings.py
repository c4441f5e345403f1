"""This check judges the MPI of nodes for a job in mode mpi: its implementation and version, and whether all nodes agree."""

from __future__ import annotations

from typing import List, Mapping, Optional

from clustertool.model.checks.across_nodes import most_common
from clustertool.model.facts import ByNode, Facts
from clustertool.model.finding import Finding
from clustertool.model.mpi.launch_command import NO_MPI_FIX, SUPPORTED, Implementation, read_implementation


def mpi_findings(facts: ByNode) -> List[Finding]:
    """Return a finding about the MPI of each node: an error if it is missing, unsupported, without its daemon, or another one.

    It is compared with that of node 0, whose mpirun starts the daemons of all; without one, with what most have.

    facts: of the nodes that were asked for their MPI.
    """
    known = {node: read_implementation(fact.mpirun or "") for node, fact in facts.items()}
    usual = known[0] if known.get(0) is not None else most_common(found for found in known.values() if found)
    return [Finding(node, "mpi", *_judge_node(facts[node], known, usual)) for node in facts]


def _judge_node(
    fact: Facts, known: Mapping[int, Optional[Implementation]], usual: Optional[Implementation]
) -> "tuple[str, str, str]":
    """Return level, text and fix for one node: an error if its MPI is missing, not supported, not `usual` or has no daemon.

    The first of these counts. Otherwise "ok", the MPI, and no fix.
    """
    own = known[fact.node]
    if own is None:
        what = "the mpirun there is not known" if fact.mpirun else "no mpirun"
        return "error", f"{what}, mode mpi needs {SUPPORTED}", NO_MPI_FIX
    if not own.supported:
        return "error", f"{own.text}, mode mpi needs {SUPPORTED}", NO_MPI_FIX
    if own != usual and usual is not None:
        fix = f"install {usual.text} there, or put it first on PATH by PRELUDE: all nodes need the same version"
        others = "node 0 has" if known.get(0) else "others have"
        return "error", f"{own.text}, {others} {usual.text}", fix
    if own.daemon not in fact.mpi_daemons:
        fix = f"install {own.daemon} there, which is a part of {own.name}, or put it on PATH by PRELUDE"
        return "error", f"{own.text} without {own.daemon} on PATH", fix
    return "ok", own.text, ""
