"""Rows of Paddle's documents, typed as the page has them, on this machine alone."""

from __future__ import annotations

import re

import pytest

from tests.cli import HereSite
from tests.document_rows import ROWS, Row, parts

PROGRAM = """
    import os, socket, time
    if os.environ["TRAINING_ROLE"] == "PSERVER":
        print("pserver", flush=True)
        with socket.create_server((os.environ["POD_IP"], int(os.environ["PADDLE_PORT"]))):
            time.sleep(600)
    print("rank", os.environ["PADDLE_TRAINER_ID"], "of", os.environ["PADDLE_TRAINERS_NUM"], flush=True)
"""
BAD = """
    import os, sys, time
    rank = int(os.environ["RANK"])
    if rank == 3:
        open("ready", "w").close()
    while rank < 2 or not os.path.exists("ready"):  # ranks 2 and 3 fail at the same time
        time.sleep(0.01)
    print("rank", rank, "has failed", flush=True)
    sys.exit(3)
"""
FEW = (33, 63)  # of `make test`: pservers, and the line of an abort
TYPED = [
    pytest.param(row, id=str(number), marks=() if number in FEW else pytest.mark.chaos)
    for number, row in enumerate(ROWS, 1)
    if row.runs
]


@pytest.mark.parametrize("row", TYPED)
def test_a_row_that_is_typed(here: HereSite, row: Row) -> None:
    here.workspace(".", train_py=PROGRAM, bad_py=BAD)
    _, (program, *argv) = parts(row.now)
    assert program == "clusterrun"
    runs = dict(row.runs)
    done = here.clusterrun(*argv).ends(runs.pop("code", 0))
    for stream, text in (("out", done.out), ("err", done.err)):
        for part in runs.pop(stream, ()):
            assert part in text
    for name, pattern in runs.pop("files", {}).items():
        assert re.search(pattern, (here.folder / name).read_text()), name
    if "again" in runs:
        assert here.clusterrun(*argv).ends(0).job == runs.pop("again")
    if "then" in runs:
        rank = runs.pop("then")
        assert f"rank {rank} has failed" in here.clustertool("logs", "--rank", rank).ends(0).out
    assert not runs, "a key that this test does not know"
