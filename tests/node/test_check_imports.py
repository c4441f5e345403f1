"""What the agents of a check and of a stop import: each module costs every node of every such command CPU time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import clustertool

# Measured with Python 3.11: ctypes takes 1.5 ms, traceback with tokenize 2 ms, the codec 2 ms; ssl and inspect take more.
UNUSED = {"ast", "ctypes", "dataclasses", "encodings.idna", "inspect", "ssl", "tokenize", "traceback"}
# The records of jobs with the fold of their events take 4 ms.
UNUSED |= {f"clustertool.{name}" for name in ("model.job.state_names", "model.job.outcome", "node.jobs.records")}
# Only a job in containers needs them: its probe is a request of its own. They take 4 million instructions.
UNUSED |= {"glob", "clustertool.node.probe.container_probe", "clustertool.model.container.container_runtimes"}
# The first call of compile() takes 2 ms. typing calls it for a type that is text, as each one is in the body of a NamedTuple.
CODE = """
import builtins, sys
sys.path.insert(0, sys.argv[1])
of_source = builtins.compile
def noted(source, name, *more, **named):
    assert name != "<string>", f"typing compiles {source}"
    return of_source(source, name, *more, **named)
builtins.compile = noted
import clustertool.node.agent.loop
"""
CHECK = """
import clustertool.node.probe.link_test
import clustertool.node.probe.check_probe
from clustertool.node.probe.network_addresses import first_address
first_address("127.0.0.1", 80)
"""
STOP = """
import clustertool.node.jobs.queries
import clustertool.node.jobs.stop_request
"""
# Only a job whose supervisor does not answer needs them. They take 29 million instructions.
UNUSED_BY_STOP = {"ast", "glob", "hashlib", "subprocess", "clustertool.node.jobs.termination"}


def test_a_check_imports_no_slow_module_that_it_does_not_use() -> None:
    assert UNUSED.isdisjoint(imported(CHECK))


def test_the_stop_of_a_healthy_job_imports_nothing_that_ends_processes() -> None:
    assert UNUSED_BY_STOP.isdisjoint(imported(STOP))


def imported(code: str) -> list[str]:
    """The modules of a process that executes this; AssertionError where typing compiles a type."""
    root = Path(clustertool.__file__).parents[1]
    argv = [sys.executable, "-ESs", "-c", f"{CODE}{code}print(*sys.modules)", root]
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
