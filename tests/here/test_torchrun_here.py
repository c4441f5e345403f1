"""Options and variables of torchrun on this machine alone."""

from __future__ import annotations

import json
import socket

from tests.free_ports import free_port
from tests.here.test_clusterrun_here import TELLS, reported

FAILS = """
    import json, os
    record = {"message": {"message": "ValueError: bad shard \\x1b[31m" + os.environ["RANK"], "extraInfo": {}}}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump(record, file)
    print("leaving")
    os._exit(3)
"""


def test_a_master_port_that_was_requested(here):
    here.workspace(".", train_py=TELLS)
    port = free_port()
    here.clusterrun("--nproc-per-node=2", f"--master-port={port}", "--role=worker", "train.py").ends(0)
    found = [output["env"] for output in reported(here, 0, 1)]
    assert {(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in found} == {("127.0.0.1", str(port))}
    assert {(env["ROLE_NAME"], env["CLUSTERTOOL_ROLE"]) for env in found} == {("worker", "trainer")}


def test_a_master_port_that_is_in_use(here):
    here.workspace(".", train_py=TELLS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = here.clusterrun(f"--master_port={port}", "train.py").ends(69)
    assert f"port {port} (--master-port) is in use by" in done.err


def test_the_number_of_threads_is_that_of_the_shell(here):
    """Unless --env has another one."""
    here.workspace(".", train_py=TELLS)
    shell = {"OMP_NUM_THREADS": "3"}
    here.clusterrun("--nproc-per-node=2", "train.py", env=shell).ends(0)
    assert {output["env"]["OMP_NUM_THREADS"] for output in reported(here, 0, 1)} == {"3"}
    dry = ("--dry", "--json", "--nproc-per-node=2")
    for options, env, number in (((), {}, "1"), (("--env", "OMP_NUM_THREADS=5"), shell, "5")):
        plan = here.clusterrun(*dry, *options, "train.py", env=env).ends(0).json
        assert {process["env"]["OMP_NUM_THREADS"] for process in plan["nodes"][0]["processes"]} == {number}


def test_a_recorded_exception_is_shown(here):
    """In the verdict and by `status`, and what it contains cannot control a terminal."""
    here.workspace(".", train_py=FAILS)
    done = here.clusterrun("--nproc-per-node=2", "train.py").ends(3)
    assert "2 trainers failed with the same error, first trainer " in done.err
    assert "exit code 3: ValueError: bad shard [31m" in done.err
    assert "\x1b" not in done.err
    status = here.clustertool("status").ends(0).out
    assert "ValueError: bad shard" in status.replace("\n", " ")
    found = json.loads(here.clustertool("status", "--json").ends(0).out)["processes"]
    assert [process["note"] for process in found] == [f"ValueError: bad shard [31m{rank}" for rank in range(2)]
