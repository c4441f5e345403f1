"""Paddle's own launcher next to the tool on the same unmodified scripts: the same environment, the same results.

The differences of the environments are those that a table in docs/frameworks.md lists, and no other. Paddle's launcher
chooses the ports, and the tool is asked for the same.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cli import LoopSite, until
from tests.differences import PADDLE, grouped, listed
from tests.frameworks.examples import TIMEOUT, activate

pytestmark = pytest.mark.frameworks
PROGRAMS = Path(__file__).with_name("programs")
OF_PADDLE = re.compile("(PADDLE|FLAGS|TRAINING|TRAINER|DISTRIBUTED|POD|STAGE|HETER)_")
NOT_HERE = {  # rows for devices and for --ips: tests/unit has recorded environments with them
    *("CUDA_VISIBLE_DEVICES", "FLAGS_selected_gpus", "CUDA_DEVICE_ORDER"),
    *("PADDLE_LOCAL_DEVICE_IDS", "PADDLE_WORLD_DEVICE_IDS", "PADDLE_MASTER"),
}


class Process(NamedTuple):
    """What a script has printed. A pserver has no result."""

    env: dict[str, str]
    result: Any


Job = dict[tuple[str, int], Process]  # by role and rank


def test_collective_training(site, venv, scratch):
    here = same_collective(site(2), venv("digits-paddle"), "paddle_collective.py", 2, scratch)
    assert set(here) == {("trainer", rank) for rank in range(4)}
    assert [len(process.result) for process in here.values()] == [5] * 4


def test_automatic_parallelism(site, venv, scratch):
    here = same_collective(site(1), venv("digits-paddle"), "paddle_to_static.py", 2, scratch)
    assert [process.result for process in here.values()] == [[True, 2]] * 2


def test_parameter_servers(site, venv, scratch):
    two, paddle = site(2), venv("paddle-ps")
    there = launch(two, paddle, "paddle_ps.py", scratch, "--server_num", 1, "--trainer_num", 1)
    given = there["trainer", 0].env
    gloo = given["PADDLE_GLOO_HTTP_ENDPOINT"].split(":")[1]
    servers, trainers = given["PADDLE_PSERVERS_IP_PORT_LIST"], given["PADDLE_TRAINER_ENDPOINTS"]
    asked = ["--mode", "ps", "--servers", servers, "--workers", trainers, "--http-port", gloo]
    here = run(two, paddle, "paddle_ps.py", *asked)
    compare("ps", here, there)
    assert set(here) == {(role, rank) for role in ("pserver", "trainer") for rank in range(2)}
    assert here["trainer", 0].result == here["trainer", 1].result == [-16.875, -33.75]


def test_rpc(site, venv, scratch):
    """With 2.6.2: the CPU wheel of 3.3.1 is built without rpc."""
    two, paddle = site(2), venv("paddle-ps")
    there = launch(two, paddle, "paddle_rpc.py", scratch, "--run_mode", "rpc", "--nproc_per_node", 1)
    workers = ",".join(there["trainer", rank].env["PADDLE_WORKER_ENDPOINT"] for rank in range(2))
    master = there["trainer", 0].env["PADDLE_MASTER_ENDPOINT"].split(":")[1]
    here = run(two, paddle, "paddle_rpc.py", "--mode", "rpc", "--workers", workers, "--master-port", master)
    compare("rpc", here, there)
    assert [here["trainer", rank].result for rank in range(2)] == [40, 41]


def same_collective(site: LoopSite, venv: Path, program: str, each: int, scratch: Path) -> Job:
    there = launch(site, venv, program, scratch, "--nproc_per_node", each)
    given = there["trainer", 0].env
    master = given["PADDLE_MASTER"].split(":")[1]
    here = run(site, venv, program, "--workers", given["PADDLE_TRAINER_ENDPOINTS"], "--master-port", master)
    compare("collective", here, there)
    return here


def compare(mode: str, here: Job, there: Job) -> None:
    """The differences are those of the table, in both directions, and the results are the same."""
    assert here.keys() == there.keys()
    pairs = {}
    for key, (theirs, _) in there.items():
        ours = here[key].env
        names = {*theirs, *filter(OF_PADDLE.match, ours)} - {*of_shell(Path()), "LC_CTYPE"}
        pairs.update({name: (theirs.get(name), ours.get(name)) for name in names if theirs.get(name) != ours.get(name)})
    rows = listed(PADDLE, mode)
    assert grouped(pairs, rows) == rows - NOT_HERE, f"variable, theirs, ours: {pairs}"
    assert {key: here[key].result for key in here} == {key: there[key].result for key in there}


# -- both launchers -------------------------------------------------------------------------------------------------------


def run(site: LoopSite, venv: Path, program: str, *args: object) -> Job:
    site.conf(PRELUDE=activate(venv))
    folder = site.workspace()
    shutil.copy(PROGRAMS / program, folder / "train.py")
    site.inv("run", "-w", folder, *args, timeout=TIMEOUT).ends(0)
    return printed(site.jobs(node)[-1] / "log" for node in range(site.count))


def of_shell(scratch: Path) -> dict[str, str]:
    """The environment of Paddle's launcher."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "TMPDIR": str(scratch),
        "GLOO_SOCKET_IFNAME": "lo",
        "PORT_RANGE": "20000:32000",  # below the kernel's own: the tool is asked for these ports a moment later
    }


def launch(site: LoopSite, venv: Path, program: str, scratch: Path, *options: object) -> Job:
    """Start one launcher for each node, as its users do by hand. Pservers never end: they are stopped with their launcher."""
    with socket.create_server((site.name(0), 0)) as free:
        master = f"{site.name(0)}:{free.getsockname()[1]}"
    argv = [venv / "bin" / "python", "-m", "paddle.distributed.launch", "--master", master, "--nnodes", site.count]
    logs = [scratch / f"log{node}" for node in range(site.count)]
    outs = [scratch / f"launcher{node}" for node in range(site.count)]
    launchers = []
    try:
        for node in range(site.count):
            place = ["--rank", node, "--host", site.name(node), "--log_dir", logs[node]]
            with outs[node].open("w") as out:
                command = [str(token) for token in (*argv, *place, *options, PROGRAMS / program)]
                kept = {"env": of_shell(scratch), "cwd": scratch, "stdout": out, "stderr": out}
                launchers.append(subprocess.Popen(command, start_new_session=True, **kept))
        what = lambda: "results of Paddle's launchers\n" + "\n".join(out.read_text() for out in outs)  # noqa: E731
        until(lambda: finished(printed(logs)) or any(one.poll() for one in launchers), TIMEOUT, what)
        job = printed(logs)
        assert finished(job), what()
        if ("pserver", 0) not in job:
            assert [one.wait(TIMEOUT) for one in launchers] == [0] * site.count, what()
    finally:
        for one in launchers:
            one.terminate()  # it ends its processes, if it has not ended
            one.wait(TIMEOUT)
    return job


def finished(job: Job) -> bool:
    """Whether all trainers have printed a result."""
    results = [process.result for (role, _), process in job.items() if role == "trainer"]
    return (
        bool(job) and len(results) == int(next(iter(job.values())).env["PADDLE_TRAINERS_NUM"]) and None not in results
    )


def printed(folders: Iterable[Path]) -> Job:
    """What the scripts have printed into the logs of all nodes."""
    job: Job = {}
    for path in [path for folder in folders for path in folder.glob("*log.*")]:
        reports = [
            json.loads(line) for line in path.read_text().splitlines() if re.match(r'{"(env|result)": .*}$', line)
        ]
        if reports:
            found = {"result": None, **{key: value for report in reports for key, value in report.items()}}
            job[place(found["env"])] = Process(**found)
    return job


def place(env: dict[str, str]) -> tuple[str, int]:
    """The role and the rank, as Paddle's programs find them."""
    if env.get("TRAINING_ROLE") == "PSERVER":
        servers = env["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
        return "pserver", servers.index(f"{env['POD_IP']}:{env['PADDLE_PORT']}")
    return "trainer", int(env["PADDLE_TRAINER_ID"])
