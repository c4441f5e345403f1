"""Ranks in real containers: they are ranks of their supervisor, and a stop leaves neither process nor container."""

from __future__ import annotations

import contextlib
import os
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import containers
from tests.node.container_store import Docker, Store, below, open_docker, open_podman
from tests.node.harness import Bench, Job, alive, kill, sample, until

_LOOP = "sleep 1000 & echo ready; while [ ! -e go ]; do sleep 0.2; done"


# With docker in `make test-chaos` only: what these show is code for both runtimes, which other tests here run with docker.
_WITH_PODMAN = (
    "test_how_a_program_exits",
    "test_stop_of_a_handler",
    "test_kill_of_a_program_or_its_supervisor",
    "test_restart",
    "test_usage_and_freeze",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give `store` its two runtimes; a file that uses the fixture imports this, too."""
    marks = [pytest.mark.chaos] if metafunc.function.__name__ in _WITH_PODMAN else []
    metafunc.parametrize("store", ["podman", pytest.param("docker", marks=marks)], indirect=True, scope="module")


@pytest.fixture(scope="module")
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    opened = {"podman": open_podman, "docker": open_docker}[request.param]
    with opened(tmp_path_factory.mktemp("store")) as made:
        yield made


@pytest.fixture
def contained(bench: Bench, store: Store) -> Iterator[Any]:
    """Make a job whose ranks run in containers, on one node."""

    def job(trainer: Any, container: Any = (), prelude: Any = (), node_env: Any = (), **given: Any) -> Job:
        nodes = bench.nodes(env={**store.env, **dict(node_env)}, PRELUDE=list(prelude))
        made = bench.job(nodes, trainer, **given)
        for request in made.place_requests.values():
            request["spec"] = dict(request["spec"])
            request["spec"]["container"] = {
                "runtime": store.runtime,
                "program": store.program,
                "rootless": False,
                "image": store.image,
                "reference": "ct-test:1",
                "digest": "",
                "options": [],
                "volumes": [],
                "process_limit": store.runtime == "podman",
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
    """Working directory, log, variables of plan and image, PRELUDE, groups; the recorded pid is that of the program."""
    job = contained(
        "echo $RANK $FROM_IMAGE $HOME $PATH in $PWD; echo slurm ${SLURM_PROCID-none} $LATE; id; env; echo ready; "
        "while [ ! -e go ]; do sleep 0.2; done",
        per_node=2,
        node_env={"FROM_NODE": "node"},
        prelude=["LATE=prelude", "export LATE"],
        env={"HTTP_PROXY": "http://proxy", "LD_LIBRARY_PATH": "/lib/own", "DOCKER_X": "a 'b' $c"},
    )
    job.ready()
    log = job.log(1).decode()
    assert f"1 image /opt/image/home /opt/image/bin:/usr/bin:/bin in {job.dir()}\n" in log
    assert "slurm none prelude\n" in log and ",4321\n" in log
    variables = dict(line.split("=", 1) for line in log.splitlines() if "=" in line)
    assert not {name for name in variables if name.startswith("CLUSTERTOOL_ENV_") or name == "FROM_NODE"}
    assert not variables.keys() & {"CLUSTERTOOL_RUN", "CLUSTERTOOL_LOG", "CLUSTERTOOL_NAMES", "CLUSTERTOOL_PRELUDE"}
    wanted = {"CLUSTERTOOL_ROLE": "trainer", "CLUSTERTOOL_RANK": "1", "HTTP_PROXY": "http://proxy"}
    wanted |= {"LD_LIBRARY_PATH": "/lib/own", "DOCKER_X": "a 'b' $c"}
    assert wanted.items() <= variables.items()
    program = Path(f"/proc/{job.rank(1).pid}/cmdline").read_bytes()
    assert b"while" in program and b"--rm" not in program
    (job.dir() / "go").touch()
    assert job.ended()["state"] == "succeeded"
    assert {event["code"] for event in job.until("exited", count=2)} == {0}
    job.gone()


@pytest.mark.parametrize(("command", "code", "number"), [("exit 7", 7, 0), ("exit 126", 126, 0), ("kill -9 $$", 0, 9)])
def test_how_a_program_exits(contained: Any, command: Any, code: int, number: int) -> None:
    _ends(contained, command, code, number)


@pytest.mark.parametrize(("command", "code", "number"), [(["no-such-command"], 127, 0)])
def test_how_a_program_ends(contained: Any, command: Any, code: int, number: int) -> None:
    _ends(contained, command, code, number)


def _ends(contained: Any, command: Any, code: int, number: int) -> None:
    with containers.oom_kills(False):
        job = contained(command)
        ended = job.ended()
    assert (ended["state"], ended["source"]) == ("failed", "job")
    event = job.until("exited")[0]
    assert (event["code"], event.get("signal", 0), event.get("note", "")) == (code, number, "")
    job.gone()


def test_runtime_that_fails(contained: Any, store: Store) -> None:
    job = contained("true", container={"options": ["--no-such-option"]})
    event = job.until("exited")[0]
    start = f"{store.runtime} did not start its container (exit code 125): "
    assert event["code"] == 125 and event["note"].startswith(start) and "no-such-option" in event["note"]
    ended = job.ended()
    assert (ended["code"], ended["source"]) == (125, "tool")
    job.gone()


@pytest.mark.chaos
def test_client_that_does_not_exist(contained: Any) -> None:
    """It was there when the node was probed."""
    job = contained("true", container={"program": "/nowhere/podman"})
    event = job.until("exited")[0]
    assert (event["code"], event["note"]) == (127, "cannot start '/nowhere/podman': No such file or directory")
    ended = job.ended()
    assert (ended["code"], ended["source"]) == (127, "tool")
    job.gone()


def test_stop(contained: Any) -> None:
    """A main process without handlers ends by TERM."""
    _stops(contained, "plain")


@pytest.mark.parametrize("how", ["trap", "ignores"])
def test_stop_of_a_handler(contained: Any, how: str) -> None:
    """A main process with a handler gets TERM once, one that ignores it is killed."""
    _stops(contained, how)


def _stops(contained: Any, how: str) -> None:
    traps = {"plain": "", "trap": "trap 'echo got TERM; exit 5' TERM;", "ignores": "trap '' TERM;"}
    job = contained(f"{traps[how]} {_LOOP}")
    job.ready()
    assert job.stop(grace=2.0) == {"state": "clean", "survivors": []}
    event = job.until("exited")[0]
    assert event["stopped"]
    assert job.log().count(b"got TERM") == (how == "trap")
    assert (event["code"], event.get("signal", 0)) == {"plain": (0, 15), "trap": (5, 0), "ignores": (0, 9)}[how]
    job.gone()


def test_stop_before_the_program_runs(contained: Any) -> None:
    """A stop while the runtime starts the container."""
    job = contained("echo ready; sleep 1000")
    assert job.stop(grace=5.0) == {"state": "clean", "survivors": []}
    job.gone()


@pytest.mark.parametrize("victim", ["client", "conmon", "caretakers", "daemon"])
def test_kill(contained: Any, store: Store, victim: str) -> None:
    """kill -9 of what belongs to a container leaves neither process nor container."""
    if victim == ("conmon" if store.runtime == "docker" else "daemon"):
        pytest.skip(f"{store.runtime} has none")
    _killed(contained, store, victim)


@pytest.mark.parametrize("victim", ["supervisor", "main"])
def test_kill_of_a_program_or_its_supervisor(contained: Any, store: Store, victim: str) -> None:
    _killed(contained, store, victim)


def _killed(contained: Any, store: Store, victim: str) -> None:
    job = contained(_LOOP, per_node=2)
    job.ready()
    supervisor, main = job.process("supervisor"), job.rank(0)
    if victim in ("client", "conmon"):
        client = next(pid for pid in below(supervisor.pid) if _name(pid) == store.runtime)
        parent = sample(main.pid)[2]  # type: ignore[index]
        assert victim == "client" or _name(parent) == "conmon"
        kill(sample(client if victim == "client" else parent)[0])  # type: ignore[index]
    elif victim == "main":
        kill(main)
    elif isinstance(store, Docker) and victim == "daemon":
        store.kill()
        store.start()
    elif victim == "supervisor":
        kill(supervisor)
    else:
        kill(supervisor, signal.SIGSTOP)
        kill(job.process("guard"))
        kill(supervisor)
        assert alive(main) and store.left()
        assert job.stop(grace=1.0) == {"state": "clean", "survivors": []}
    if victim in ("supervisor", "caretakers"):
        assert job.until("clean")[-1]["survivors"] == []
    else:
        assert job.ended()["state"] == "failed"
    job.gone()
    assert job.until("clean")[-1]["survivors"] == []
    until(lambda: not store.left(), f"no container: {store.left()}", 5.0)


@pytest.mark.chaos  # it takes a minute
def test_a_container_that_stays_is_reported(contained: Any, store: Store, tmp_path: Path) -> None:
    """The runtime cannot remove it, so the stop does not state that nothing is left."""
    runtime = tmp_path / store.runtime
    script = f"""\
        #!/bin/sh
        [ "$1" = rm ] && {{ echo "the store is read-only" >&2; exit 1; }}
        for word; do shift; [ "$word" = --rm ] || set -- "$@" "$word"; done
        exec {store.program} "$@"
        """
    runtime.write_text(textwrap.dedent(script))
    runtime.chmod(0o755)
    job = contained(_LOOP, {"program": str(runtime)})
    job.ready()
    answer = job.stop(grace=1.0)
    assert answer["state"] == "survivors" and len(answer["survivors"]) == 1, answer
    assert answer["survivors"][0].startswith("container"), answer
    job.gone()
    runtime.unlink()
    store.run("rm", "--force", *store.run("ps", "--all", "--quiet").split())


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_restart(contained: Any) -> None:
    """Each attempt has a container of its own."""
    job = contained(
        "echo attempt $CLUSTERTOOL_ATTEMPT; [ $CLUSTERTOOL_ATTEMPT = 1 ]",
        policy={"max_restarts": 1},
    )
    assert job.ended()["state"] == "succeeded"
    assert b"attempt 1" in job.log(attempt=1)
    job.gone()


def test_out_of_memory(contained: Any) -> None:
    """The container's own limit is exceeded."""
    with containers.oom_kills(True):
        job = contained("sleep 1; exec dd if=/dev/zero of=/dev/null bs=300M count=1", {"options": ["--memory=32m"]})
        assert job.ended()["state"] == "failed"
    event = job.until("exited")[0]
    assert event["signal"] == 9 and event["note"].startswith("out of memory"), event
    job.gone()


def test_usage_and_freeze(contained: Any) -> None:
    """CPU and memory are those of the program, and SIGSTOP of it is recorded."""
    job = contained("dd if=/dev/zero of=/dev/null bs=64M count=60; " + _LOOP)
    job.ready()
    main = job.rank()
    kill(main, signal.SIGSTOP)
    job.until("frozen")
    os.kill(main.pid, signal.SIGCONT)
    job.until("thawed")
    (job.dir() / "go").touch()
    job.ended()
    event = job.until("exited")[0]
    assert 0.05 < event["cpu"] < 30 and 0 < event["memory"] < 1 << 30, event


def test_container_without_processes(contained: Any, store: Store) -> None:
    """Everything was killed, the runtime's processes too: `clean` removes what the runtime still lists."""
    job = contained(_LOOP)
    job.ready()
    supervisor, main = job.process("supervisor"), job.rank()
    kill(supervisor, signal.SIGSTOP)
    kill(job.process("guard"))
    if isinstance(store, Docker):
        store.kill()
    for pid in [*below(supervisor.pid), *below(sample(main.pid)[2]), supervisor.pid]:  # type: ignore[index]
        with contextlib.suppress(ProcessLookupError):  # it has ended because another one has
            os.kill(pid, signal.SIGKILL)
    job.gone()
    if isinstance(store, Docker):
        store.start()
    else:
        assert store.left()
    answer = job.nodes[0].client.ask("clean", job=job.id, exact=True, now=time.time(), ended=[])
    assert answer["removed"] == [job.id], answer
    assert not store.left() and not job.dir().exists()
