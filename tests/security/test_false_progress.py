"""A hostile node reports progress without end: it cannot hold up a request whose answer the other nodes wait for."""

from __future__ import annotations

import sys
import time

import pytest

from clustertool.errors import Unreachable
from clustertool.fleet import node_bundle
from tests.node.harness import Bench, request
from tests.security import hostile

ANSWER = """
import threading

def progress(number):
    while True:
        reply({"id": number}, progress=1)
        time.sleep(0.05)

def answer(request):
    threading.Thread(target=progress, args=(request["id"],), daemon=True).start()
"""


@pytest.mark.parametrize(
    "question, limit, most", [("jobs", 0.5, 20), ("status", 0.5, 20), ("stop", 0.5, 20), ("unplace", 0.2, 30)]
)
def test_progress_extends_no_question_that_a_stop_needs(bench: Bench, question: str, limit: float, most: float) -> None:
    """And what is taken back after a failure is waited for a bounded time: there Ctrl+C does not end the waiting."""
    python = bench.tmp / "python"
    python.write_text(
        hostile._PROGRAM.format(python=sys.executable, node=0, nodes=[], answer=ANSWER, loader=len(node_bundle.LOADER))
    )
    python.chmod(0o755)
    node = bench.nodes(1, python=str(python))[0]
    before = time.monotonic()
    with pytest.raises(Unreachable, match=f"no answer to '{question}'.* for {limit} s"):
        node.client.agent.ask(request(question), limit)
    assert time.monotonic() - before < most
