"""Ports are held against jobs of other users, and given back whatever becomes of the supervisor."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from clustertool.errors import PortInUse
from clustertool.node.ports import reservations
from tests.node import programs as p
from tests.node.harness import Bench, Job, kill, until

OTHER_UID = 65534


def as_other_user(work: Callable[[], None]) -> int:
    """The exit code of a child of another user: 0, or 1 if `work` raised PortHeld."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(OTHER_UID, OTHER_UID, OTHER_UID)
            work()
            os._exit(0)
        except PortInUse as error:
            os._exit(1 if error.what == "port 7 is in use by a job of user root" else 2)
        finally:
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(os.getuid() != 0, reason="needs two users")
def test_another_user_cannot_have_it_until_it_is_given_back() -> None:
    mine, theirs = reservations.Reservations(), reservations.Reservations()
    mine.take([7, 8])
    assert {port: reservations.reserved_ports()[port] for port in (7, 8)} == {7: [0], 8: [0]}
    assert reservations.holder(7, [0]) == "a job of user root"
    assert as_other_user(lambda: theirs.take([7])) == 1
    assert as_other_user(lambda: theirs.take([9])) == 0
    reservations.Reservations().take([7])  # another node of my job on this machine
    mine.close()
    assert not {7, 8, 9} & set(reservations.reserved_ports())
    assert as_other_user(lambda: theirs.take([7])) == 0


def reserved_by(job: Job) -> set[int]:
    wanted = {port for process in job.plan.processes for port in process.ports}
    return wanted & set(reservations.reserved_ports())


def test_a_job_holds_its_ports_as_long_as_it_lives(bench: Bench) -> None:
    job = bench.run(bench.nodes(2), p.PLAIN, pserver=p.PSERVER)
    job.ready()
    assert reserved_by(job) == {port for process in job.plan.processes for port in process.ports}
    busy = job.nodes[0].probe(ports=sorted(reserved_by(job)))
    assert reserved_by(job) <= set(busy["busy"])
    job.stop()
    job.gone()
    until(lambda: not reserved_by(job))


def test_a_supervisor_that_is_killed_holds_nothing(bench: Bench) -> None:
    job = bench.run(bench.nodes(1), p.PLAIN).ready()
    assert reserved_by(job)
    kill(job.process("supervisor"), signal.SIGKILL)
    job.gone()
    until(lambda: not reserved_by(job))
