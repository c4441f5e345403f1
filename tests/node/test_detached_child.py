"""A forked child that has closed the descriptors of its parent uses their numbers again."""

from __future__ import annotations

import gc
import os
import socket

import pytest

from clustertool.errors import ClustertoolError, InternalError, NodeLost
from clustertool.node.agent import detach
from clustertool.node.system import processes


class Ring:
    """Garbage that only a collection removes, with a socket in it."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.itself = self


def test_garbage_of_the_parent_closes_no_file_of_the_child() -> None:
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            Ring()
        pid = os.fork()
        if pid == 0:
            _use_all_numbers()
        _, status = os.waitpid(pid, 0)
    finally:
        gc.enable()
    assert os.waitstatus_to_exitcode(status) == 0


def _use_all_numbers() -> None:
    """In the child: 0 if all files that it opens stay open."""
    code = 1
    try:
        processes.detach()
        files = [os.open("/", os.O_RDONLY) for _ in range(60)]
        gc.collect()
        for file in files:
            os.fstat(file)
        code = 0
    finally:
        os._exit(code)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("kill -KILL $$", NodeLost("it was ended by signal 9 (killed)")),
        ("exit 1", InternalError("it has died: NameError: x")),
    ],
)
def test_the_death_of_a_process_without_a_report(code: str, expected: ClustertoolError) -> None:
    """A signal is no bug of the tool."""
    pid = os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", code)
    error = detach.death(pid, "it", "NameError: x")
    assert (type(error), error.what) == (type(expected), expected.what)
