"""Bundles: one file that a machine starts to join, with the code, the key and the workspace in it."""

from __future__ import annotations

import base64
import itertools
import os
import signal
import stat
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from clustertool.errors import NotFound, UsageError
from clustertool.fleet.dispatch.workspace import read_workspace
from clustertool.fleet.joining import join_bundle
from clustertool.model.config.hosts import Host
from clustertool.model.joining.join_file import EngineSettings, JoinFile, MeetingPoint
from clustertool.model.paths import JobPaths
from clustertool.node.jobs import supervisor_client
from tests.node.harness import Bench, Node, old_pythons, pythons, read, until
from tests.node.joining import JoinBench, Machine, tasks
from tests.node_code import add_compiled
from tests.sent_workspace import with_workspace

SCRIPT = "import os; print('rank', os.environ['RANK'], open('data/x-0').read(), open(os.environ['CLUSTERTOOL_SHARDS']).read())"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A workspace."""
    top = tmp_path / "job"
    (top / "data").mkdir(parents=True)
    (top / "train.py").write_text(SCRIPT)
    for number in range(2):
        (top / f"data/x-{number}").write_text(f"text {number}")
    (top / "large").write_bytes(os.urandom(3 << 20))
    return top


def bundle(
    tmp: Path, join: JoinFile, name: str = "bundle.pyz", workspace: Path | None = None, compiled: bool = True
) -> Path:
    """compiled: with more than the tool writes (tests/node_code.py)."""
    path = tmp / name
    given = read_workspace(workspace) if workspace else None
    assert join_bundle.write(path, join, given) is bool(given)
    if compiled:
        path.write_bytes(add_compiled(path.read_bytes()))
    return path


def run(python: str, path: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [python, str(path), *options]
    return subprocess.run(
        argv, capture_output=True, text=True, check=False, cwd="/", env={**os.environ, **env}, timeout=60
    )


def begin(machine: Machine, path: Path, *options: str) -> Machine:
    """Start the machine with a bundle."""
    machine.argv = [*joining(machine, path), *options]
    return machine.start()


def joining(machine: Machine, path: Path) -> list[str]:
    return [machine.python, str(path), "join", "--report"]


def test_a_bundle_has_all(join_bench: JoinBench, folder: Path) -> None:
    """Code, key and workspace. The files differ in ROOT_DIR, since both machines are this one, and one has compiled modules."""
    machines = join_bench.job(
        2, ["python3", "train.py"], python=pythons()[-1], port=0, toml={"shards": {"files": ["data/x-*"]}}
    )
    join = with_workspace(replace(machines[0].join, index=None), read_workspace(folder))
    machines[1].python = sys.executable
    path = bundle(join_bench.tmp, join, workspace=folder, compiled=False)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_size < 6 << 20
    for index, machine in enumerate(machines):
        own = replace(join, own=machine.join.own)
        path = bundle(join_bench.tmp, own, f"bundle{index}.pyz", folder, compiled=bool(index))
        begin(machine, path, "--index", str(index))
    assert [machine.wait() for machine in machines] == [0, 0], [one.lines for one in machines]
    for rank, machine in enumerate(machines):
        assert machine.log(rank) == f"rank {rank} text 0 {machine.job_dir}/data/x-{rank}\n\n"
        assert (machine.job_dir / "large").read_bytes() == (folder / "large").read_bytes()
        assert (machine.root / ".clustertool/releases" / join.release).is_file()


@pytest.mark.parametrize("python", old_pythons())
def test_an_old_python_gets_a_message(join_bench: JoinBench, python: str) -> None:
    (machine,) = join_bench.job(1)
    done = run(python, bundle(join_bench.tmp, machine.join), "join")
    assert (
        done.returncode == 69
        and "too old" in done.stderr
        and "start the bundle with Python 3.8 or newer" in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_a_bundle_that_others_can_open(join_bench: JoinBench) -> None:
    (machine,) = join_bench.job(1)
    path = bundle(join_bench.tmp, machine.join)
    path.chmod(0o640)
    done = run(machine.python, path, "join")
    assert done.returncode == 69 and "mode 0640" in done.stderr and f"chmod 600 {path}" in done.stderr
    path.chmod(0o600)
    open_folder = join_bench.tmp / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    moved = path.rename(open_folder / "bundle.pyz")
    done = run(machine.python, moved, "join")
    assert done.returncode == 69 and "all users may write to" in done.stderr
    with pytest.raises(UsageError, match="exists"):
        join_bundle.write(moved, machine.join)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_bundle_of_another_user(join_bench: JoinBench) -> None:
    (machine,) = join_bench.job(1)
    path = bundle(join_bench.tmp, machine.join)
    os.chown(path, 65534, 65534)
    done = run(machine.python, path, "join")
    assert done.returncode == 69 and "is not a file of this user" in done.stderr


def test_usage(join_bench: JoinBench) -> None:
    (machine, _) = join_bench.job(2)
    path = bundle(join_bench.tmp, machine.join)
    for options, text in (
        ([], "usage: python3"),
        (["join", "--index", "x"], "--index 'x' is no index"),
        (["join", "--coordinator", "h:0"], "--coordinator 'h:0' is not right"),
        (["join", "--other"], "unrecognized arguments: --other"),
    ):
        done = run(machine.python, path, *options)
        assert done.returncode == 64 and text in done.stderr and "Traceback" not in done.stderr, (options, done.stderr)


def test_a_damaged_bundle(join_bench: JoinBench) -> None:
    (machine,) = join_bench.job(1)
    path = bundle(join_bench.tmp, machine.join)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("join.json", "{")
    done = run(machine.python, path, "join")
    assert done.returncode == 65 and "is no JSON" in done.stderr


def test_a_workspace_that_does_not_fit(join_bench: JoinBench, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_bundle, "LARGEST_WORKSPACE", 1 << 20)
    (machine,) = join_bench.job(1)
    path = join_bench.tmp / "small.pyz"
    assert join_bundle.write(path, machine.join, read_workspace(folder)) is False
    with zipfile.ZipFile(path) as archive:
        assert not any(name.startswith("workspace/") for name in archive.namelist())


def test_machines_without_the_workspace_get_it_from_node_0(join_bench: JoinBench, folder: Path) -> None:
    """Only the bundle of node 0 contains it: relays fetch it from there and from each other."""
    machines = join_bench.job(3, ["python3", "train.py"], options={"shards": ("data/x-*",)})
    (folder / "data/x-2").write_text("text 2")
    join = with_workspace(machines[0].join, read_workspace(folder))
    for index, machine in enumerate(machines):
        own = replace(join, own=machine.join.own, index=index)
        begin(machine, bundle(join_bench.tmp, own, f"bundle{index}.pyz", None if index else folder))
    assert [machine.wait() for machine in machines] == [0, 0, 0], [one.lines for one in machines]
    for rank, machine in enumerate(machines):
        assert machine.log(rank).startswith(f"rank {rank} text 0")
        assert (machine.job_dir / "large").read_bytes() == (folder / "large").read_bytes()
    again = join_bench.job(3, ["python3", "train.py"])
    for machine in again:  # each has it now: no relay, and no bundle with the workspace
        machine.join = replace(machine.join, release=join.release, listing=join.listing)
        machine.start()
    assert [machine.wait() for machine in again] == [0, 0, 0], [one.lines for one in again]


def test_node_0_without_the_workspace(join_bench: JoinBench, folder: Path) -> None:
    machines = join_bench.job(2, ["python3", "train.py"])
    for machine in machines:
        machine.join = with_workspace(machine.join, read_workspace(folder))
        machine.start()
    assert [machine.wait() for machine in machines] == [74, 74]
    assert "the coordinator does not have the workspace" in machines[1].error
    assert [machine.left() for machine in machines] == [[], []]


def agent_on(machine: Machine) -> Node:
    host = Host(0, "here", address=machine.join.coordinator.host, root_dir=str(machine.root), name="here")
    return Node(replace(machine.join.cluster, hosts=(host,)), 0, machine.env)


def fetched(node: Node, job: str) -> bytes:
    """The bundle of a job, as a laptop fetches it."""
    found, last = b"", False
    while not last:
        answer = node.ask("bundle", job=job, at=len(found))
        found, last = found + base64.b64decode(answer["data"]), answer["last"]
    return found


def test_the_supervisor_has_the_bundle_for_later_machines(join_bench: JoinBench, folder: Path) -> None:
    """The file may be removed as soon as the machine has started. An agent gets it from the supervisor."""
    (machine,) = join_bench.job(1, "echo ready; exec sleep 600", toml={"shards": {"files": ["data/x-*"]}})
    join = with_workspace(machine.join, read_workspace(folder))
    path = bundle(join_bench.tmp, join, workspace=folder)
    content = path.read_bytes()
    begin(machine, path)
    machine.until("waiting")
    path.unlink()
    machine.until("started")
    paths = JobPaths(str(machine.root), machine.join.identity.job_id)
    answer = supervisor_client.ask(paths, {"type": "bundle"}, 10.0)
    assert answer is not None and answer[1] == content
    node = agent_on(machine)
    try:
        assert len(content) > 3 << 20 and fetched(node, join.identity.job_id) == content
        kept = [top.rglob("*") for top in (machine.root, Path(machine.env["HOME"]))]
        assert not [file for file in itertools.chain(*kept) if content[-100:] in read(str(file))]
        machine.signal(signal.SIGTERM)
        assert machine.wait() == 143
        with pytest.raises(NotFound, match="no supervisor of job"):
            fetched(node, join.identity.job_id)
        with pytest.raises(NotFound, match="no job other"):
            fetched(node, "other")
    finally:
        node.client.close()


def test_a_job_of_ssh_has_no_bundle(bench: Bench) -> None:
    job = bench.run(trainer="echo ready; exec sleep 600").ready()
    with pytest.raises(NotFound, match="has no bundle: its job was started by ssh"):
        fetched(job.nodes[0], job.id)
    job.stop()
    job.gone()


@pytest.mark.parametrize("keep", [False, True])
def test_machines_of_an_engine_join_with_one_bundle(join_bench: JoinBench, keep: bool) -> None:
    """Each learns its place from srun. The coordinator removes the bundle once all have joined. One that is kept, for a job
    that may be started again, is removed when the job has ended."""
    machines = join_bench.job(2, "echo rank $RANK; exec sleep 600", indices=[None, None], port=0)
    tasks(machines)
    join = replace(machines[0].join, coordinator=MeetingPoint(""), engine="slurm", of_engine=EngineSettings(keep))
    path = bundle(join_bench.tmp, join)
    begin(machines[0], path)
    machines[0].until("waiting", present=1, missing=[1])
    assert path.exists(), "not all machines have it"
    begin(machines[1], path)
    for node, machine in enumerate(machines):
        machine.until("started")
        planned = machine.reports("planned")[0]
        assert (planned["node"], planned["name"]) == (node, f"127.0.0.{21 + node}")  # as Slurm names it
        assert not [
            one for one in machine.reports("warning") if "load:" in one["what"]
        ]  # other jobs are there on purpose
        job_dir = machines[0].root / f"node{node}/JOB{join.identity.job_id}"
        log = str(job_dir / f"log/workerlog.{node}")
        until(lambda path=log, text=b"rank %d\n" % node: read(path) == text, f"the rank of node {node}")
    assert path.exists() is keep
    paths = JobPaths(str(machines[0].root / "node1"), join.identity.job_id)
    answer = supervisor_client.ask(paths, {"type": "bundle"}, 10.0)
    assert answer is not None and b"join.json" in answer[1]
    machines[1].signal(signal.SIGTERM)
    assert [machine.wait() for machine in machines] == [143, 143]
    assert not path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_bundle_that_cannot_be_removed(join_bench: JoinBench) -> None:
    """The job starts, and a warning names the file."""
    (machine,) = join_bench.job(1, indices=[None], port=0)
    tasks([machine])
    folder = join_bench.tmp / "fixed"
    folder.mkdir()
    path = bundle(folder, replace(machine.join, coordinator=MeetingPoint(""), engine="slurm"))
    read_only = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    machine.argv = ["unshare", "-m", "sh", "-c", read_only, str(folder), *joining(machine, path)]
    machine.start()
    assert machine.wait() == 0
    warnings = [one["what"] for one in machine.reports("warning")]
    assert any(text.startswith(f"{path} has the job's key and cannot be removed: ") for text in warnings), warnings


def test_an_engine_without_its_variables(join_bench: JoinBench) -> None:
    (machine,) = join_bench.job(1, indices=[None])
    path = bundle(join_bench.tmp, replace(machine.join, engine="slurm"))
    done = run(machine.python, path, "join", SLURM_NODEID="0")  # in the batch script itself
    assert done.returncode == 64 and "no step of Slurm has started this process" in done.stderr
    assert "srun --ntasks-per-node=1 python3 bundle.pyz join" in done.stderr and path.exists()


def test_a_name_that_only_slurm_knows(join_bench: JoinBench) -> None:
    """NodeName need not be a host name: scontrol has the address."""
    (machine,) = join_bench.job(1, indices=[None], port=0)
    tasks([machine])
    programs = join_bench.tmp / "bin"
    programs.mkdir()
    scontrol = programs / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\n[ "$*" = "-o show node c1.invalid" ] && echo "NodeName=c1.invalid NodeAddr=127.0.0.21 Port=1"\n'
    )
    scontrol.chmod(0o755)
    machine.env = {**machine.env, "SLURM_STEP_NODELIST": "c1.invalid", "PATH": f"{programs}:{machine.env['PATH']}"}
    begin(machine, bundle(join_bench.tmp, replace(machine.join, coordinator=MeetingPoint(""), engine="slurm")))
    assert machine.wait() == 0
    assert machine.reports("planned")[0]["name"] == "c1.invalid"
    scontrol.unlink()
    (other,) = join_bench.job(1, indices=[None], port=0)
    other.env = {**machine.env, "PATH": machine.env["PATH"]}
    begin(other, bundle(join_bench.tmp, replace(other.join, coordinator=MeetingPoint(""), engine="slurm"), "other.pyz"))
    assert other.wait() == 69 and "the coordinator's host c1.invalid is not known here" in other.error
