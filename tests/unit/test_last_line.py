"""What the last line of a failed rank's log says: which errors are the same, and which are consequences of another one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clustertool.node.supervisor import rank_error


def last_line(folder: Path, text: str) -> tuple[int, bool]:
    (folder / "log").write_text(text)
    job = os.open(folder, os.O_RDONLY)
    try:
        return rank_error.classify(rank_error.end_of_log(job, "log"))[:2]
    finally:
        os.close(job)


CAUSES = [
    "ValueError: shape (3, 4)",
    "SyntaxError: invalid syntax",
    "ModuleNotFoundError: No module named 'paddle'",
    "RuntimeError: NCCL version 2.18 is too old",
]
CONSEQUENCES = [
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "ConnectionError: closed by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:4711",
    "NCCL error: remote process exited or there was a network error",
    "Watchdog caught NCCL collective operation timeout: it ran for 600 s",
]


@pytest.mark.parametrize(
    "line, consequence", [*((line, False) for line in CAUSES), *((line, True) for line in CONSEQUENCES)]
)
def test_a_lost_connection_is_a_consequence(tmp_path: Path, line: str, consequence: bool) -> None:
    assert last_line(tmp_path, f"step 1\n{line}\n\n")[1] is consequence
    assert not last_line(tmp_path, f"{line}\nan error of its own")[1], "the last line counts"


def test_lines_that_differ_in_numbers_only_are_the_same_error(tmp_path: Path) -> None:
    texts = [f"Error: rank {rank} at 0x7f{rank:x}a: port {6170 + rank}, 12:00:{rank:02}" for rank in (3, 12)]
    numbers = {last_line(tmp_path, text)[0] for text in texts}
    assert len(numbers) == 1 and 0 not in numbers
    assert last_line(tmp_path, "Error: rank 3")[0] != last_line(tmp_path, "Failure: rank 3")[0]
    assert last_line(tmp_path, "\n \n") == (0, False)
