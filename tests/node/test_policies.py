"""Time limits, leases, restarts, claims and memory kills: the coordinator's rules and what the node knows of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from clustertool.errors import PreflightError
from clustertool.node.ports import claims
from tests.node import programs as p
from tests.node.harness import Bench, claims_on_disk, until

MEMORY = Path("/sys/fs/cgroup/memory")


def test_the_time_is_over(bench: Bench) -> None:
    job = bench.run(bench.nodes(2), p.PLAIN, policy={"timeout": 0.5})
    assert (job.ended()["state"], job.ended()["code"]) == ("timeout", 124)
    assert job.ended(1)["code"] == 124


def test_a_lease_ends_the_job_when_no_laptop_is_there(bench: Bench) -> None:
    job = bench.run(bench.nodes(2), p.PLAIN, lease="1.0")
    ended = job.ended()
    assert (ended["state"], ended["code"]) == ("stopped", 143)
    assert "--lease" in ended["reason"]


def test_a_lease_lasts_while_a_laptop_says_it_is_there(bench: Bench) -> None:
    nodes = bench.nodes(1)
    job = bench.run(nodes, ["sh", "-c", "sleep 4"], lease="2.5")
    done = lambda: bool(job.events(0, "ended"))  # noqa: E731 - one line, used twice

    def there() -> bool:
        if not done():
            nodes[0].ask("attached", job=job.plan.job_id, laptop="", notified="")
        return done()

    until(there, "the job ended")
    assert job.ended()["state"] == "succeeded"


def test_restarts_until_it_works_each_with_its_own_logs(bench: Bench, tmp_path: Path) -> None:
    program = f"""
        echo attempt $CLUSTERTOOL_ATTEMPT
        [ $CLUSTERTOOL_ATTEMPT = 1 ] && exit 0
        touch {tmp_path}/said$RANK; until [ -e {tmp_path}/said0 -a -e {tmp_path}/said1 ]; do sleep 0.05; done; exit 9
    """
    job = bench.run(bench.nodes(2), program, policy={"max_restarts": 3})
    assert [job.ended(node)["state"] for node in range(2)] == ["succeeded"] * 2
    assert [event["attempt"] for event in job.events(0, "restart")] == [1]
    assert [job.log(rank, attempt=k) for rank in (0, 1) for k in (0, 1)] == [b"attempt 0\n", b"attempt 1\n"] * 2
    first, second = job.events(0, "started")
    assert second["t"] - first["t"] >= 1.0, "a pause between two attempts"


def test_restarts_end_with_the_last_failure(bench: Bench) -> None:
    job = bench.run(bench.nodes(1), "exit 9", policy={"max_restarts": 1})
    assert (job.ended()["state"], job.ended()["code"]) == ("failed", 9)
    assert len(job.events(0, "started")) == 2


def test_restarts_without_a_later_step_end_the_job(bench: Bench, tmp_path: Path) -> None:
    """The rank that prints the steps is another one than that which fails, on another node, and is stopped."""
    program = f"""
        case $CLUSTERTOOL_ATTEMPT in 0) step=100;; 1) step=101;; *) step=90;; esac
        [ $RANK = 1 ] && echo step=$step && touch {tmp_path}/printed$CLUSTERTOOL_ATTEMPT && exec sleep 600
        until [ -e {tmp_path}/printed$CLUSTERTOOL_ATTEMPT ]; do sleep 0.02; done; exit 9
    """
    job = bench.run(bench.nodes(2), program, policy={"max_restarts": 9, "max_restarts_without_progress": 1})
    ended = job.ended()
    assert (ended["state"], ended["code"]) == ("failed", 9)
    why = "; 1 restart in a row without a later step than step 101 (max_restarts_without_progress)"
    assert ended["reason"].endswith(why)
    assert [event["attempt"] for event in job.events(0, "restart")] == [1, 2]


def test_a_stop_in_the_pause_between_two_attempts_is_final(bench: Bench) -> None:
    job = bench.run(bench.nodes(1), "exit 9", policy={"max_restarts": 5})
    job.until("restart", count=2)
    job.stop(code=130)
    assert (job.ended()["state"], job.ended()["code"]) == ("stopped", 130)
    assert len(job.events(0, "started")) == 2


def test_two_starts_never_share_a_port(bench: Bench) -> None:
    nodes = bench.nodes(1, LEAD_PORT=20417)
    first, second = bench.job(nodes, p.PLAIN), bench.job(nodes, p.PLAIN)  # both planned while the port was free
    first.place()
    with pytest.raises(PreflightError, match=f"port 20417 is in use by job {first.plan.job_id}"):
        second.place()
    assert not second.dir().exists()
    assert claims.claimed_ports()[20417] == first.plan.job_id
    assert 20417 in nodes[0].probe()["busy"]
    first.start()
    first.stop()
    first.ended()
    until(lambda: "20417" not in claims_on_disk(), "its supervisor took the claim back")
    third = bench.job(nodes, p.PLAIN).place()
    nodes[0].ask("unplace", job_dir=str(third.dir()), token=third.plan.identity.token)
    assert 20417 not in claims.claimed_ports()


def test_a_job_that_was_placed_and_never_started_gives_its_ports_back(bench: Bench) -> None:
    nodes = bench.nodes(1, LEAD_PORT=20418)
    forgotten = bench.job(nodes, p.PLAIN).place()
    assert claims.claimed_ports()[20418] == forgotten.plan.job_id
    nodes[0].client.close()  # as long as its laptop is there, it waits for other nodes
    long_ago = time.time() - 3600
    os.utime(forgotten.dir() / ".clustertool", (long_ago, long_ago))
    assert 20418 not in claims.claimed_ports()
    nodes[0].open()
    again = bench.job(nodes, p.PLAIN).place()
    nodes[0].ask("unplace", job_dir=str(again.dir()), token=again.plan.identity.token)


@pytest.mark.skipif(not os.access(MEMORY / "cgroup.procs", os.W_OK), reason="needs root and memory cgroups")
def test_a_memory_kill_is_reported(bench: Bench) -> None:
    group = MEMORY / f"clustertool-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        eater = p.python(f"""
import os, time
open({str(group / "cgroup.procs")!r}, "w").write(str(os.getpid()))
time.sleep(1.2)
hoard = [bytearray(b"x" * (1 << 20)) for _ in range(500)]
""")
        job = bench.run(bench.nodes(1), eater)
        ended = job.ended()
        assert (ended["state"], ended["code"]) == ("failed", 137)
        assert "out of memory" in ended["reason"]
        job.gone()
    finally:
        until(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
        group.rmdir()
