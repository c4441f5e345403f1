"""Every Python from 3.8 on that this machine has runs a whole job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.node import programs as p
from tests.node.harness import Bench, kill, pythons, until

FOUND = pythons()


def _case(path: str) -> Any:
    """The oldest and the newest; those between with `make test-chaos`."""
    marks = [] if path in (FOUND[0], FOUND[-1]) else [pytest.mark.chaos]
    return pytest.param(path, id=f"{Path(path).parent.parent.name}-{Path(path).name}", marks=marks)


@pytest.mark.parametrize("python", [_case(path) for path in FOUND])
def test_job(bench: Bench, python: str) -> None:
    """Start, pservers listen, trainers, success; then one that is stopped, with a new guard, whose supervisor dies."""
    nodes = bench.nodes(2, python=python, LOSS_TIMEOUT=5)
    version = subprocess.run([python, "-V"], stdout=subprocess.PIPE, text=True, check=True).stdout.split()[1]
    assert nodes[0].probe()["python"] == version
    job = bench.run(nodes, "echo trainer $RANK", pserver=p.PSERVER)
    stream = job.follow(1)
    assert [job.ended(node)["state"] for node in range(2)] == ["succeeded"] * 2
    job.gone()
    until(lambda: stream.ended)
    assert bytes(stream.logs["log/workerlog.1"]) == b"trainer 1\n"
    stubborn = bench.run(nodes, p.IGNORES_TERM).ready()
    kill(stubborn.process("guard", 1))
    stubborn.until("guard", 1, 2)
    kill(stubborn.process("supervisor", 1))
    stubborn.until("clean", 1)
    assert stubborn.stop(0, grace=0.1)["state"] == "clean"
    for one in (job, stubborn):
        for node in range(2):
            assert (one.dir(node) / ".clustertool/supervisor.err").read_text() == ""
            assert nodes[node].ask("clean", job=one.id, exact=True)["removed"] == [one.id]


def test_this_one_is_among_them() -> None:
    assert any(sys.version.split()[0].startswith(_version(path)) for path in FOUND)


def _version(path: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([path, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
