"""Ranks that a real mpirun starts: they are ranks of their supervisors, and mpirun's daemons are processes of these."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from clustertool.errors import ClustertoolError
from clustertool.model.paths import JobPaths
from clustertool.node.jobs import supervisor_client
from tests.node.harness import Bench, Job, Process, alive, kill, read, sample, until

_RANK = ["/bin/sh", "-c", 'exec /bin/sh "$CLUSTERTOOL_MPI_RANK"']


def _host(node: int) -> str:
    return f"240.0.0.{node + 1}"


def _open_mpi(nodes: Sequence[int]) -> tuple[str, list[str]]:
    hosts = "".join(f"{_host(node)} slots={nodes.count(node)}\n" for node in dict.fromkeys(nodes))
    argv = ["mpirun.openmpi", "--allow-run-as-root", "--hostfile", ".clustertool/mpi-hosts", "--map-by", "slot"]
    argv += ["--bind-to", "none", "--mca", "plm", "rsh", "--mca", "plm_rsh_agent", "/bin/sh .clustertool/mpi-agent"]
    argv += ["--mca", "plm_rsh_no_tree_spawn", "1", "--leave-session-attached", "-wdir", "/"]
    argv += ["--mca", "odls_base_sigkill_timeout", "5", "-n", str(len(nodes))]
    return hosts, argv


def _mpich(nodes: Sequence[int]) -> tuple[str, list[str]]:
    hosts = "".join(f"{_host(node)}:{nodes.count(node)}\n" for node in dict.fromkeys(nodes))
    argv = [
        "mpirun.mpich",
        "-launcher",
        "ssh",
        "-launcher-exec",
        ".clustertool/mpi-agent",
        "-f",
        ".clustertool/mpi-hosts",
    ]
    argv += ["-localhost", "127.0.0.1", "-genvnone", "-disable-auto-cleanup", "-wdir", "/", "-n", str(len(nodes))]
    return hosts, argv


def kind(*further: str) -> pytest.MarkDecorator:
    """Both kinds of mpirun. further: those that run with `make test-chaos` only, since other tests here show the same path."""
    names = {"openmpi": _open_mpi, "mpich": _mpich}
    params = [
        pytest.param(make, id=name, marks=[pytest.mark.chaos] * (name in further)) for name, make in names.items()
    ]
    return pytest.mark.parametrize("mpirun", params, indirect=True)


@pytest.fixture
def mpirun(request: pytest.FixtureRequest) -> Any:
    name = request.param([0])[1][0]
    if shutil.which(name) is None and not os.environ.get("DEMAND_ENGINES"):
        pytest.skip(f"needs {name}")
    return request.param


def launched(job: Job, mpirun: Any) -> Job:
    """The job with its trainers started by mpirun, as plan() makes it in mode mpi."""
    nodes = [
        process.node for process in sorted(job.plan.processes, key=lambda one: one.rank) if process.role == "trainer"
    ]
    hosts, argv = mpirun(nodes)
    extra = [("mpirun", 0, 0), *(("mpidaemon", node, node) for node in dict.fromkeys(nodes))]
    for at, request in job.place_requests.items():
        spec = request["spec"] = dict(request["spec"])
        spec["launcher"] = "mpirun"
        spec["processes"] = list(spec["processes"])
        for role, rank, node in extra:
            if node == at:
                made = _process(role, rank, argv if role == "mpirun" else ["orted"])
                spec["processes"].append({**made, "env": {**made["env"], **_local(job)}})
        if at == 0:
            spec["hostfile"] = hosts
            place = [*spec["shape"]["place"], *extra]
            spec["shape"] = {**spec["shape"], "place": place}
    return job


def _local(job: Job) -> Mapping[str, str]:
    """Nodes of this test are on one machine: their ranks must not use one shared memory."""
    return {"OMPI_MCA_btl": "^vader"}


def _process(role: str, rank: int, argv: list[str]) -> dict[str, Any]:
    command = [*argv, *_RANK] if role == "mpirun" else argv
    plain = {"endpoint": "", "ports": [], "ready": [], "devices": [], "shards": [], "local_rank": 0}
    return {
        "role": role,
        "rank": rank,
        "argv": command,
        "env": {},
        "log": f"log/{role}log.{rank}",
        "apart": True,
        **plain,
    }


def folders(job: Job) -> list[Path]:
    """The private folders of the job that exist."""
    marks = [request["spec"]["mark"] for request in job.place_requests.values()]
    names = [f"ct-mpi-{os.getuid()}-{hashlib.sha256(mark.encode()).hexdigest()[:12]}" for mark in marks]
    return [path for name in names for path in (Path("/tmp", name), Path("/dev/shm", name)) if path.exists()]


def run(bench: Bench, mpirun: Any, trainer: str, nodes: int = 3, **given: Any) -> Job:
    given.setdefault("per_node", 2)
    return launched(bench.job(bench.nodes(nodes), trainer, **given), mpirun).place().start()


def launcher(job: Job, role: str, rank: int) -> Process:
    """mpirun, or a daemon of it: the process with this role in the records of its node."""
    node = rank if role == "mpidaemon" else 0
    event = until(
        lambda: [e for e in job.events(node, "started") if (e["role"], e["rank"]) == (role, rank)],
        f"{role} {rank} runs",
    )[-1]
    return Process(event["pid"], event["start"])


def exits(job: Job, node: int) -> dict[tuple[str, int], tuple[int, int, bool]]:
    """(code, signal, stopped) of the processes of a node that have ended."""
    found = job.events(node, "exited")
    return {(e["role"], e["rank"]): (e["code"], e.get("signal", 0), e.get("stopped", False)) for e in found}


@kind()
def test_ranks_are_children_of_their_supervisors(bench: Bench, mpirun: Any) -> None:
    """Each has the contract's environment, its own log and its exit; mpirun and its daemons end with 0."""
    job = run(
        bench,
        mpirun,
        "echo rank $RANK of $WORLD_SIZE at $CLUSTERTOOL_NODE_RANK; echo ready; while [ ! -e go ]; do sleep 0.2; done",
    )
    job.ready()
    for rank in range(6):
        node = rank // 2
        found = sample(job.rank(rank).pid)
        assert found is not None and found[2] == job.process("supervisor", node).pid
        assert b"rank %d of 6 at %d\n" % (rank, node) in job.log(rank)
        environ = read(f"/proc/{job.rank(rank).pid}/environ")
        assert (b"OMPI_COMM_WORLD_RANK=%d\0" % rank in environ) or (b"PMI_RANK=%d\0" % rank in environ)
    assert launcher(job, "mpidaemon", 2) != launcher(job, "mpidaemon", 1)
    assert folders(job)
    for node in range(3):
        (job.dir(node) / "go").touch()
    assert job.ended()["state"] == "succeeded"
    for node in range(3):
        own = exits(job, node)
        assert own["trainer", 2 * node][:2] == (0, 0) and own["trainer", 2 * node + 1][:2] == (0, 0)
    assert exits(job, 0)["mpirun", 0] == (0, 0, False)
    job.gone()
    assert not folders(job)


@kind("mpich")
def test_a_rank_that_fails_has_its_own_code(bench: Bench, mpirun: Any) -> None:
    """The others are victims, and mpirun's own exit is no failure."""
    text = "echo ready; while [ ! -e go ]; do sleep 0.2; done; [ $RANK = 3 ] && exit 7; sleep 60"
    job = run(bench, mpirun, text, nodes=2).ready()  # all have started, also where mpirun takes long
    (job.dir(1) / "go").touch()
    ended = job.ended()
    assert (ended["state"], ended["code"], ended["culprits"]) == ("failed", 7, [["trainer", 3]])
    assert ["trainer", 0] in ended["victims"] and ["trainer", 2] in ended["victims"]
    job.gone()
    assert not folders(job)


@kind("mpich")
def test_a_rank_that_is_killed_is_the_culprit(bench: Bench, mpirun: Any) -> None:
    job = run(bench, mpirun, "echo ready; sleep 60", nodes=2, per_node=1).ready()
    kill(job.rank(1))
    ended = job.ended()
    assert (ended["state"], ended["code"], ended["culprits"]) == ("failed", 137, [["trainer", 1]])
    job.gone()
    assert not folders(job)


@kind("mpich")
@pytest.mark.parametrize("role,rank,text", [("mpirun", 0, "mpirun"), ("mpidaemon", 1, "MPI daemon 1")])
def test_a_launcher_that_is_killed_is_the_culprit(bench: Bench, mpirun: Any, role: str, rank: int, text: str) -> None:
    """Ranks that it ended, or that lost it, are victims."""
    job = run(bench, mpirun, "echo ready; sleep 60", nodes=2, per_node=1).ready()
    kill(launcher(job, role, rank))
    ended = job.ended()
    assert (ended["state"], ended["code"], ended["culprits"]) == ("failed", 137, [[role, rank]]), ended
    assert text in ended["reason"]
    job.gone()
    assert not folders(job)


@kind("mpich")
def test_a_supervisor_that_is_killed(bench: Bench, mpirun: Any) -> None:
    """Its guard ends its ranks and daemon, and the node is lost."""
    job = run(bench, mpirun, "echo ready; sleep 60", nodes=2, per_node=1).ready()
    kill(job.process("supervisor", 1))
    ended = job.ended()
    assert (ended["state"], ended["node"]) == ("lost", 1)
    job.gone()
    until(lambda: not folders(job), "no private folder is left")


@kind()
def test_stop_sends_term_to_ranks(bench: Bench, mpirun: Any) -> None:
    """They have the grace to end, longer than mpirun gives them, and nothing is left."""
    text = "trap 'sleep 3; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.2; done"
    job = run(bench, mpirun, text, nodes=2).ready()
    answer = job.stop(1, grace=10.0)
    assert answer["state"] == "clean"
    assert job.ended()["state"] == "stopped"
    assert [job.log(rank).count(b"saved") for rank in range(4)] == [1] * 4
    job.gone()
    assert not folders(job)


@kind("mpich")
def test_stop_without_supervisor(bench: Bench, mpirun: Any) -> None:
    job = run(bench, mpirun, "echo ready; sleep 60", nodes=1).ready()
    for kind in ("guard", "supervisor"):
        os.kill(job.process(kind).pid, signal.SIGSTOP)
    assert job.stop(0, grace=1.0)["state"] == "clean"
    job.gone()
    assert not folders(job)


@kind("mpich")
def test_a_restart_has_a_new_mpirun(bench: Bench, mpirun: Any) -> None:
    text = "echo ready; [ $CLUSTERTOOL_ATTEMPT = 1 ] && exit 0; [ $RANK = 1 ] && exit 3; sleep 60"
    job = run(bench, mpirun, text, nodes=2, policy={"max_restarts": 1})
    assert job.ended()["state"] == "succeeded"
    first, second = (e["pid"] for e in job.events(0, "started") if e["role"] == "mpirun")
    assert first != second and not alive(launcher(job, "mpirun", 0))
    job.gone()
    assert not folders(job)


def ask(job: Job, node: int, **request: Any) -> Mapping[str, object]:
    with supervisor_client.open_request(JobPaths.at(str(job.dir(node))), request) as sock:  # type: ignore[arg-type]
        return supervisor_client.receive(sock) or {}


@kind("mpich")
def test_requests_of_strangers(bench: Bench, mpirun: Any) -> None:
    """A process of the user cannot make other processes ranks, nor have the coordinator start a daemon that is none."""
    job = run(bench, mpirun, "echo ready; sleep 60", nodes=2, per_node=1).ready()
    for node, request in (
        (1, {"type": "rank-started", "role": "trainer", "rank": 1, "pid": os.getpid()}),
        (1, {"type": "rank-started", "role": "trainer", "rank": 0, "pid": os.getpid()}),
        (0, {"type": "rank-end", "role": "mpirun", "rank": 0}),
        (0, {"type": "rank-end", "role": "trainer", "rank": 7}),
        (0, {"type": "launcher-signal", "role": "pserver", "rank": 0}),
        (0, {"type": "launch-daemon", "host": "240.0.0.9", "command": "true"}),
        (0, {"type": "launch-daemon", "host": "127.0.0.1", "command": "true"}),
        (0, {"type": "launch-daemon", "host": "240.0.0.2", "command": "true"}),  # it runs
        (1, {"type": "launch-daemon", "host": "240.0.0.2", "command": "true"}),
    ):
        with pytest.raises(ClustertoolError):
            ask(job, node, **request)
    assert job.stop(0)["state"] == "clean"
    assert job.ended()["state"] == "stopped"


def test_a_job_without_mpirun_starts_no_daemon(bench: Bench) -> None:
    job = bench.run(bench.nodes(2), "echo ready; sleep 60").ready()
    for request in (
        {"type": "launch-daemon", "host": "240.0.0.2", "command": "true"},
        {"type": "rank-started", "role": "trainer", "rank": 0, "pid": os.getpid()},
    ):
        with pytest.raises(ClustertoolError):
            ask(job, 0, **request)
    assert job.stop(0)["state"] == "clean"
