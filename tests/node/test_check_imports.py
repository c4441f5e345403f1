"""What the agent of a check imports: each module costs every node of every check CPU time."""

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
UNUSED |= {"glob", "clustertool.node.probe.container_probe", "clustertool.model.container.runtime_output"}
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
import clustertool.node.probe.link_test
import clustertool.node.probe.check_probe
from clustertool.node.probe.name_service import first_address
first_address("127.0.0.1", 80)
print(*sys.modules)
"""


def test_a_check_imports_no_slow_module_that_it_does_not_use() -> None:
    root = Path(clustertool.__file__).parents[1]
    done = subprocess.run([sys.executable, "-ESs", "-c", CODE, root], stdout=subprocess.PIPE, text=True, check=True)
    assert UNUSED.isdisjoint(done.stdout.split())
