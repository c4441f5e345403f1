"""hello says where it is, in every mode, in a form scripts can read; as a pserver it stays until SIGTERM."""

from __future__ import annotations

import socket

from tests.free_ports import free_ports


def facts(line: str) -> dict[str, str]:
    first, *rest = line.split()
    assert first == "hello"
    return dict(token.split("=", 1) for token in rest)


PLACE = {
    "CLUSTERTOOL_JOB": "j1",
    "CLUSTERTOOL_ROLE": "trainer",
    "CLUSTERTOOL_RANK": "3",
    "CLUSTERTOOL_WORLD_SIZE": "4",
    "CLUSTERTOOL_LOCAL_RANK": "1",
    "CLUSTERTOOL_NODE_RANK": "1",
    "CLUSTERTOOL_NNODES": "2",
}


def test_collective_says_its_place_in_one_line(job_of):
    job = job_of("hello")
    program = job.start("train.py", env={**PLACE, "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:6171"})
    assert program.wait() == 0
    assert len(program.lines) == 1
    assert facts(program.lines[0]) == {
        "role": "TRAINER",
        "rank": "3",
        "world_size": "4",
        "local_rank": "1",
        "node": "1",
        "nodes": "2",
        "endpoint": "10.0.0.2:6171",
        "shards": "0",
        "host": socket.gethostname(),
        "job": "j1",
        "pid": str(program.popen.pid),
    }


def test_shards_are_listed_one_a_line(job_of, tmp_path):
    listing = tmp_path / "mine"
    listing.write_text("/data/a b-00001\n/data/a b-00005\n")
    program = job_of("hello").start("train.py", env={**PLACE, "CLUSTERTOOL_SHARDS": str(listing)})
    assert program.wait() == 0
    assert facts(program.lines[0])["shards"] == "2"
    assert program.lines[1:] == [f"hello role=TRAINER rank=3 shard=/data/a b-0000{n}" for n in (1, 5)]


def test_ps_trainer_names_its_own_endpoint(job_of):
    env = {**PLACE, "TRAINING_ROLE": "TRAINER", "POD_IP": "10.0.0.2", "PADDLE_PORT": "6170"}
    program = job_of("hello").start("train.py", env=env)
    assert program.wait() == 0
    assert facts(program.lines[0])["endpoint"] == "10.0.0.2:6170"


def test_pserver_listens_until_sigterm(job_of):
    (pserver,) = job_of("hello").start_pservers(1, trainers=1, script="train.py")
    pserver.says("role=PSERVER")
    assert facts(pserver.lines[0])["role"] == "PSERVER"
    assert facts(pserver.lines[0])["endpoint"] == pserver.endpoint
    assert pserver.popen.poll() is None
    pserver.popen.terminate()
    assert pserver.wait(60) == 0
    assert len(pserver.lines) == 1


def test_heter_trainer_listens_until_sigterm(job_of):
    (port,) = free_ports(1)
    env = {**PLACE, "TRAINING_ROLE": "HETER_TRAINER", "POD_IP": "127.0.0.1", "PADDLE_PORT": str(port)}
    program = job_of("hello").start("train.py", env=env)
    program.endpoint = f"127.0.0.1:{port}"
    program.listens()
    program.says("role=HETER_TRAINER")
    program.popen.terminate()
    assert program.wait(60) == 0


def test_alone_it_still_runs(job_of):
    program = job_of("hello").start("train.py", env={})
    assert program.wait() == 0
    assert facts(program.lines[0])["rank"] == "-"
