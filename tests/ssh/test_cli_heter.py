"""`--mode ps-heter` end to end: pservers, trainers and stages of heter trainers find each other by their environment."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.cli import HELLO, Done, Site
from tests.ssh.sshd import USER

# Prints what Paddle's names are in its environment, listens, and continues when both its neighbours listen. A trainer waits for
# all heter trainers, so that each of them has printed its environment. Then it ends, unless a stage is to fail. Pservers and
# heter trainers run until they are stopped.
STAGE = """
    import json, os, re, socket, time
    env = os.environ
    names = [name for name in env if name.startswith(("PADDLE_", "STAGE_", "HETER_", "POD_", "TRAINING_", "CLUSTERTOOL_"))]
    print(json.dumps({name: env[name] for name in names}), flush=True)
    own = socket.create_server((env["POD_IP"], int(env["PADDLE_PORT"])))
    sides = ("PREVIOUS", "NEXT", "ALL") if env["TRAINING_ROLE"] == "TRAINER" else ("PREVIOUS", "NEXT")
    lists = [env.get(f"PADDLE_{side}_HETER_TRAINER_IP_PORT_LIST", "") for side in sides]
    deadline = time.monotonic() + 60
    for endpoint in filter(None, re.split("[,;]", ",".join(lists))):
        host, port = endpoint.split(":")
        while socket.socket().connect_ex((host, int(port))):
            assert time.monotonic() < deadline, endpoint
            time.sleep(0.02)
    if env.get("STAGE_ID") == env.get("FAILS", "none"):
        os._exit(9)
    print("met", flush=True)
    if env["TRAINING_ROLE"] != "TRAINER" or "FAILS" in env:
        time.sleep(600)
"""


def environment(site: Site, done: Done, role: str, rank: int) -> dict[str, str]:
    """What a process of the job printed of its environment, by `inv logs`."""
    output = site.clustertool("logs", "--job", done.job, "--role", role, "--rank", rank, "--raw").ends(0)
    found: dict[str, str] = json.loads(output.out.splitlines()[0])
    return found


def log_names(site: Site, node: int) -> set[str]:
    (job,) = site.jobs(node)
    return {path.name for path in (job / "log").iterdir()}


@pytest.mark.chaos
def test_stages_of_heter_trainers_by_numbers(site: Any) -> None:
    """2 nodes: a pserver and a trainer on each, two heter trainers of stage 2, one of stage 3."""
    pair = site(2)
    pair.workspace(train_py=STAGE)
    done = pair.clustertool("run", "-w", "job", "--heter-devices", "cpu;cpu", "--heter-worker-num", "2;1").ends(0)
    assert "ps-heter, 2 pservers, 2 trainers, 6 heter trainers on 2 nodes" in done.err
    assert "starting the trainers and heter trainers" in done.err
    assert done.last == "clustertool: exit 0 (job): all trainers are done"
    assert "stopped by clustertool" not in done.err, "a heter trainer that is ended after training is no victim"
    pair.gone()

    heter = [environment(pair, done, "heter", rank) for rank in range(6)]
    trainers = [environment(pair, done, "trainer", rank) for rank in range(2)]
    servers = [environment(pair, done, "pserver", rank) for rank in range(2)]
    ends = [f"{env['POD_IP']}:{env['PADDLE_PORT']}" for env in heter]
    nodes = [server.address for server in pair.servers]
    assert [env["POD_IP"] for env in heter] == [nodes[0], nodes[0], nodes[1], nodes[1], nodes[0], nodes[1]]
    workers, second, third = trainers[0]["PADDLE_TRAINER_ENDPOINTS"], ",".join(ends[:4]), ",".join(ends[4:])
    assert {env["PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST"] for env in (*heter, *trainers, *servers)} == {
        f"{second},{third}"
    }
    concurrent = [
        (
            env["STAGE_ID"],
            env["PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST"],
            env["PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST"],
        )
        for env in (*trainers, *heter)
    ]
    assert concurrent == [("1", "", second)] * 2 + [("2", workers, third)] * 4 + [("3", second, "")] * 2
    for env in (*trainers, *heter):
        assert (env["STAGE_NUM"], env["PADDLE_STAGE_TRAINERS_NUM"], env["HETER_DEVICE_TYPE"]) == (
            "3",
            "[2, 4, 2]",
            "cpu",
        )
    assert {(env["TRAINING_ROLE"], env["PADDLE_ROLE"], env["CLUSTERTOOL_ROLE"]) for env in heter} == {
        ("HETER_TRAINER", "HETER_TRAINER", "heter")
    }
    assert [env["CLUSTERTOOL_RANK"] for env in heter] == list("012345")
    assert not any("STAGE_ID" in env for env in servers)

    links = {"server.log", "train.log", "heter.log", "endpoints.log"}
    assert log_names(pair, 0) == links | {"serverlog.0", "workerlog.0", "heterlog.0", "heterlog.1", "heterlog.4"}
    assert log_names(pair, 1) == links | {"serverlog.1", "workerlog.1", "heterlog.2", "heterlog.3", "heterlog.5"}
    log = pair.jobs(1)[0] / "log"
    assert (log / "heter.log").read_bytes() == (log / "heterlog.2").read_bytes()


def test_roles_pinned_to_hosts(site: Any) -> None:
    """What HOSTS says, with job.toml's mode and nothing on the command line; then the same job asked about by role."""
    three = site(3)
    parts: list[dict[str, Any]] = [{"roles": ["pserver"]}, {"roles": {"trainer": 2}}, {"roles": {"heter_trainer": 2}}]
    hosts = [
        {"host": server.address, "port": server.port, "user": USER, **its} for server, its in zip(three.servers, parts)
    ]
    three.conf(HOSTS=hosts)
    folder = three.workspace(train_py=STAGE)
    (folder / "job.toml").write_text('mode = "ps-heter"\n')
    done = three.clustertool("run", "-w", "job", "--all-ranks").ends(0)
    assert "ps-heter, 1 pserver, 2 trainers, 2 heter trainers on 3 nodes" in done.err
    assert [names - {"endpoints.log"} for names in (log_names(three, node) for node in range(3))] == [
        {"serverlog.0", "server.log"},
        {"workerlog.0", "workerlog.1", "train.log"},
        {"heterlog.0", "heterlog.1", "heter.log"},
    ]
    assert done.lines("[heter 1 ")
    states = three.clustertool("status", "--role", "heter", "--json").ends(0).json["processes"]
    assert [(p["role"], p["rank"], p["node"], p["state"]) for p in states] == [
        ("heter", n, 2, "stopped") for n in (0, 1)
    ]
    three.clustertool("fetch", "--role", "heter", "--rank", "all", "--path", "log", "--to", "got").ends(0)
    assert (three.folder / "got/heter1/heterlog.1").read_text().startswith("{")
    assert "it has heter trainers 0 to 1" in three.clustertool("fetch", "--role", "heter", "--rank", 2).ends(66).err
    assert "it has heter trainers 0 to 1" in three.clustertool("logs", "--role", "heter", "--rank", 2).ends(66).err


def test_a_heter_trainer_that_fails_ends_the_job(site: Any) -> None:
    pair = site(2)
    pair.workspace(train_py=STAGE)
    done = pair.clustertool("run", "-w", "job", "--heter-worker-num", "1;1", "--env", "FAILS=3").ends(9)
    reported = re.search(
        r"^ABORT!!! Out of all 4 heter trainers, the heter trainer process with rank=\[([\d,]+)\]", done.err, re.M
    )
    assert reported, done.err
    assert set(reported.group(1).split(",")) <= {"2", "3"}
    assert re.search(r"^stopped by clustertool because of it \(victims\): pserver 0-1; ", done.err, re.M), done.err
    pair.gone()


@pytest.mark.chaos  # tests/ssh/test_local_jobs.py runs it in every role, too
def test_hello_runs_in_every_role(site: Any) -> None:
    pair = site(2)
    done = pair.clustertool("run", "-w", HELLO, "--mode", "ps-heter", "--all-ranks").ends(0)
    roles = [line.split("role=")[1].split()[0] for line in done.lines("[") if "hello role=" in line]
    assert {"PSERVER", "TRAINER"} <= set(roles) <= {"PSERVER", "TRAINER", "HETER_TRAINER"}
    assert roles.count("TRAINER") == roles.count("PSERVER") == 2
