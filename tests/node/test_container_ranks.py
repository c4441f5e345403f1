"""Ranks in real containers of podman: they are ranks of their supervisor, and a stop leaves neither process nor container."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import containers
from tests.node.harness import Bench, Job, kill, look, until

_STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{top}/graph"\nrunroot = "{top}/run"\n'


@dataclass
class Store:
    """A store of images and containers of this test, with one image. env: by which podman uses it."""

    env: dict[str, str]
    image: str
    program: str

    def podman(self, *args: str, **more: Any) -> str:
        done = subprocess.run(
            [self.program, *args], env={**os.environ, **self.env}, text=True, capture_output=True, check=True, **more
        )
        return done.stdout

    def left(self) -> list[str]:
        return self.podman("ps", "--all", "--format", "{{.Names}} {{.Status}}").splitlines()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    containers.demand()
    if os.getuid():
        pytest.skip("needs root")
    top = tmp_path_factory.mktemp("store")
    (top / "storage.conf").write_text(_STORAGE.format(top=top))
    (top / "containers.conf").write_text(containers.SETTINGS)
    env = {"CONTAINERS_STORAGE_CONF": f"{top}/storage.conf", "CONTAINERS_CONF": f"{top}/containers.conf"}
    program = shutil.which("podman")
    assert program
    made = Store(env, "", program)
    tar = containers.make_image(top)
    changes = [
        "FROM_IMAGE=image",
        "SLURM_PROCID=7",
        "RANK=77",
        "PATH=/opt/image/bin:/usr/bin:/bin",
        "HOME=/opt/image/home",
    ]
    with tar.open("rb") as file:
        asked = [word for change in changes for word in ("--change", f"ENV {change}")]
        made.image = made.podman("import", "--quiet", *asked, "-", "ct-test:1", stdin=file).strip()
    yield made
    made.podman("system", "reset", "--force")


@pytest.fixture
def contained(bench: Bench, store: Store) -> Iterator[Any]:
    """Make a job whose ranks run in containers, on one node."""

    def job(trainer: str, container: Any = (), prelude: Any = (), node_env: Any = (), **given: Any) -> Job:
        nodes = bench.nodes(env={**store.env, **dict(node_env)}, PRELUDE=list(prelude))
        made = bench.job(nodes, trainer, **given)
        for request in made.place_requests.values():
            request["spec"] = dict(request["spec"])
            request["spec"]["container"] = {
                "runtime": "podman",
                "program": store.program,
                "rootless": False,
                "image": store.image,
                "reference": "ct-test:1",
                "digest": "",
                "options": [],
                "volumes": [],
                "uid": os.getuid(),
                "groups": [os.getgid(), 4321],
                **dict(container),
            }
        return made.place().start()

    yield job
    for one in bench.jobs:
        one.stop(grace=0.0)
    until(lambda: not store.left(), f"no container: {store.left()}")


def test_rank_of_a_container(contained: Any) -> None:
    """Working directory, log, variables of plan and image, PRELUDE, groups, mark; the recorded pid is that of the program."""
    job = contained(
        "echo $RANK $FROM_IMAGE $HOME $PATH in $PWD; echo slurm ${SLURM_PROCID-none} $LATE; id; env; umask; echo ready; "
        "while [ ! -e go ]; do sleep 0.1; done",
        per_node=2,
        node_env={"FROM_NODE": "node"},
        prelude=["LATE=prelude", "export LATE"],
    )
    job.ready()
    log = job.log(1).decode()
    assert f"1 image /opt/image/home /opt/image/bin:/usr/bin:/bin in {job.dir()}\n" in log
    assert "slurm none prelude\n" in log and ",4321\n" in log
    names = {line.partition("=")[0] for line in log.splitlines() if "=" in line}
    assert not {name for name in names if name.startswith("CLUSTERTOOL_ENV_") or name == "FROM_NODE"}
    assert not names & {
        "CLUSTERTOOL_RUN",
        "CLUSTERTOOL_LOG",
        "CLUSTERTOOL_MAIN",
        "CLUSTERTOOL_NAMES",
        "CLUSTERTOOL_PRELUDE",
    }
    assert "CLUSTERTOOL_ROLE=trainer\n" in log and "CLUSTERTOOL_RANK=1\n" in log
    program = Path(f"/proc/{job.rank(1).pid}/cmdline").read_bytes()
    assert b"while" in program and b"podman" not in program
    (job.dir() / "go").touch()
    assert job.ended()["state"] == "succeeded"
    assert {event["code"] for event in job.until("exited", count=2)} == {0}
    job.gone()


@pytest.mark.parametrize(
    ("command", "code", "number", "note"),
    [
        ("exit 7", 7, 0, ""),
        ("kill -9 $$", 0, 9, ""),
        ("exit 126", 126, 0, ""),
        (["no-such-command"], 127, 0, ""),
    ],
)
def test_how_a_program_ends(contained: Any, command: Any, code: int, number: int, note: str) -> None:
    job = contained(command)
    assert job.ended()["state"] == "failed"
    event = job.until("exited")[0]
    assert (event["code"], event.get("signal", 0), event.get("note", "")) == (code, number, note)
    job.gone()


def test_runtime_that_fails(contained: Any) -> None:
    job = contained("true", container={"options": ["--no-such-option"]})
    event = job.until("exited")[0]
    assert event["code"] == 125 and event["note"].startswith("podman did not start its container (exit code 125)")
    assert "no-such-option" in event["note"]
    job.ended()
    job.gone()


@pytest.mark.parametrize("how", ["plain", "trap", "ignores"])
def test_stop(contained: Any, how: str) -> None:
    """A main process without handlers ends by TERM, one with a handler gets it once, one that ignores it is killed."""
    traps = {"plain": "", "trap": "trap 'echo got TERM; exit 5' TERM;", "ignores": "trap '' TERM;"}
    job = contained(f"{traps[how]} sleep 1000 & echo ready; while :; do sleep 0.1; done")
    job.ready()
    assert job.stop(grace=2.0) == {"state": "clean", "survivors": []}
    event = job.until("exited")[0]
    assert event["stopped"]
    assert job.log().count(b"got TERM") == (how == "trap")
    assert (event["code"], event.get("signal", 0)) == {"plain": (0, 15), "trap": (5, 0), "ignores": (0, 9)}[how]
    job.gone()


@pytest.mark.parametrize("victim", ["client", "conmon", "supervisor", "main"])
def test_kill(contained: Any, store: Store, victim: str) -> None:
    """kill -9 of what belongs to a container leaves neither process nor container."""
    job = contained("sleep 1000 & echo ready; while :; do sleep 0.1; done", per_node=2)
    job.ready()
    main = job.rank(0)
    conmon = look(main.pid)[2]  # type: ignore[index]
    supervisor = job.process("supervisor")
    if victim in ("client", "conmon"):
        names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in _below(supervisor.pid)}
        client = next(pid for pid, name in names.items() if name == "podman")
        assert names[conmon] == "conmon"
        kill(look(client if victim == "client" else conmon)[0])  # type: ignore[index]
    else:
        kill(supervisor if victim == "supervisor" else main)
    if victim == "supervisor":
        job.until("clean")
    else:
        assert job.ended()["state"] == "failed"
    job.gone()
    assert job.until("clean")[-1]["survivors"] == []
    until(lambda: not store.left(), f"no container: {store.left()}", 5.0)


def _below(pid: int) -> list[int]:
    children = [
        int(text) for task in Path(f"/proc/{pid}/task").iterdir() for text in (task / "children").read_text().split()
    ]
    return [one for child in children for one in (child, *_below(child))]
