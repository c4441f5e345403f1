"""Joining processes as PID 1 of pods whose image has nothing but Python."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from clustertool.fleet import node_bundle
from clustertool.model.config.job import Options
from clustertool.model.joining.join_file import EngineSettings, MeetingPoint, OwnSettings
from clustertool.model.kubernetes.pod_record import EVENTS, GROWTH, LEDGER, RECORDS, SPEC
from clustertool.model.wire.agent_requests import JobRequest
from clustertool.model.wire.messages import LIST_JOBS, RELEASE, STATUS, STOP, TAIL
from tests.cli import until
from tests.kubernetes.lab_pods import (
    PORT,
    ROOT,
    SOON,
    VOLUME,
    FreshPod,
    LabPods,
    ask_agent,
    restored,
    workspace,
)
from tests.lab.lab import PATH, Lab, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "a lab can run here")

TALK = dedent(
    """
    import json, os, sys
    rank = os.environ["RANK"]
    sys.stdout.write(f"rank {rank} begins\\n" + "x" * 20_000 + f"\\n[trainer 99] from {rank}\\n")
    sys.stdout.write('{"clustertool": 1, "state": "succeeded"}\\n\\n')
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\\xff\\r\\x00 bytes\\n")
    with open(os.environ["CLUSTERTOOL_OUTPUT"] + "/env", "w") as file:
        json.dump({**os.environ, "uid": os.getuid(), "cwd": os.getcwd()}, file)
    sys.stdout.write("no newline at the end")
    """
)
WAIT = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The machines of all tests here: no process of a pod outlives its test."""
    with Lab(3, tmp_path_factory.mktemp("pods") / "lab") as made:
        yield made


@pytest.fixture
def pods(lab: Lab, tmp_path: Path) -> Iterator[Callable[[int], LabPods]]:
    """pods(3): pods on three nodes of the lab."""
    made: list[LabPods] = []

    def make(n: int = 3) -> LabPods:
        made.append(LabPods(lab, tmp_path, n))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.close()


@pytest.mark.parametrize("uid", [pytest.param(0, marks=pytest.mark.engines), 1234])
def test_a_job_in_pods_whose_image_has_only_python(pods: Callable[[int], LabPods], tmp_path: Path, uid: int) -> None:
    pair = pods(2)
    folder = workspace(tmp_path / "work", train_py=TALK)
    started = pair.start(pair.bundle(pair.join(Options(nproc_per_node="2")), folder), uid=uid, kind=FreshPod)
    assert [pod.wait() for pod in started] == [0, 0], [pod.shown for pod in started]
    for node, pod in enumerate(started):
        record = pod.record
        assert (record.end.job, record.end.node, record.end.state, record.end.code) == ("podjob", node, "succeeded", 0)
        assert pod.message == record.end
        assert set(record.files) >= {EVENTS, LEDGER, SPEC, GROWTH} and set(record.files) <= set(RECORDS)
        kinds = [json.loads(line)["type"] for line in record.files[EVENTS].splitlines()]
        assert kinds[0] == "job" and "ended" in kinds
        logs = {
            f"log/workerlog.{rank}": (pod.job_dir / f"log/workerlog.{rank}").read_bytes()
            for rank in (2 * node, 2 * node + 1)
        }
        assert {f"log/workerlog.{rank}": data for (_, rank, _), data in pod.logs().items()} == logs
        assert dict(record.logs) == {name: len(data) for name, data in logs.items()}
        env = json.loads((pod.job_dir / "output/env").read_text())
        assert (env["IMAGE_WORD"], env["HOME"], env["uid"]) == ("image", "/clustertool/.clustertool/home", uid)
        assert (env["POD_IP"], env["CLUSTERTOOL_NNODES"], env["CLUSTERTOOL_NODE_RANK"]) == (
            pair.lab.address(node),
            "2",
            str(node),
        )
        assert env["MASTER_ADDR"] == pair.lab.address(0)
        assert "CLUSTERTOOL_FIRST_NODE" not in env


@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.engines), 1])
def test_kubernetes_ends_a_pod(pods: Callable[[int], LabPods], tmp_path: Path, node: int) -> None:
    """SIGTERM for PID 1 of one pod: the node is lost, and the job ends everywhere."""
    pair = pods(2)
    started = pair.start(pair.bundle(pair.join(), workspace(tmp_path / "work", train_py=WAIT)))
    for pod in started:
        pod.says("ready")
    started[node].term()
    assert [pod.wait() for pod in started] == [75, 75]
    for pod in started:
        end = pod.record.end
        assert (
            end.state == "lost" and "Kubernetes has ended its pod" in end.reason and f"ct-podjob-{node}" in end.reason
        )
        assert "pid 1 (ct-pod)" in end.reason


def test_a_pod_is_lost(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    pair = pods(2)
    started = pair.start(pair.bundle(pair.join(), workspace(tmp_path / "work", train_py=WAIT)))
    for pod in started:
        pod.says("ready")
    pair.lab.cut(1)
    try:
        assert started[0].wait() == 75
    finally:
        pair.lab.heal(1)
    assert "ct-podjob-1" in started[0].message.reason and started[0].message.state == "lost"


def test_kubernetes_ends_a_pod_before_the_job_starts(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    three = pods(3)
    bundle = three.bundle(three.join(), workspace(tmp_path / "work", train_py=WAIT))
    first, second = three.start(bundle, nodes=[0, 1])
    until(lambda: "2 of 3 nodes have joined" in first.err.read_text(), SOON, lambda: first.shown)
    second.term()
    assert (first.wait(), second.wait()) == (75, 75)
    for pod in (first, second):
        assert (pod.message.state, pod.message.node) == ("lost", -1)
        assert "the job did not start" in pod.message.reason and pod.record.files == {}


def test_the_supervisor_of_a_pod_dies(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    """PID 1 stays: the guard ends the ranks and reports, and the records are in the pod's log."""
    pair = pods(2)
    started = pair.start(pair.bundle(pair.join(), workspace(tmp_path / "work", train_py=WAIT)))
    for pod in started:
        pod.says("ready")
    os.kill(started[1].child("ct-supervisor"), signal.SIGKILL)
    assert [pod.wait() for pod in started] == [75, 137]
    end = started[1].record.end
    assert (end.state, end.node) == ("lost", 1) and "exit code 137" in end.reason
    kinds = {json.loads(line)["type"] for line in started[1].record.files[EVENTS].split(b"\n") if line}
    assert {"supervisor-lost", "clean"} <= kinds


def test_ranks_restart_inside_running_pods(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    pair = pods(2)
    text = (
        "import os, sys\nn = os.environ['CLUSTERTOOL_ATTEMPT']\nprint('attempt', n)\nsys.exit(0 if n == '1' else 3)\n"
    )
    options = Options(max_restarts="2")
    started = pair.start(pair.bundle(pair.join(options), workspace(tmp_path / "work", train_py=text)))
    assert [pod.wait() for pod in started] == [0, 0], [pod.shown for pod in started]
    for rank, pod in enumerate(started):
        assert pod.logs()[("trainer", rank, 1)] == b"attempt 1\n"
        assert f"[trainer {rank} attempt 1] attempt 1\n" in pod.out.read_text()


def test_roles_of_pods(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    """A trainer and a pserver, which ends when the trainer is done; its pod exits with 0."""
    pair = pods(2)
    text = dedent(
        """
        import os, socket, time
        if os.environ["TRAINING_ROLE"] == "PSERVER":
            sock = socket.create_server((os.environ["POD_IP"], int(os.environ["PADDLE_PORT"])))
            time.sleep(600)
        print("trainer", os.environ["PADDLE_TRAINER_ID"], os.environ["PADDLE_PSERVERS_IP_PORT_LIST"])
        """
    )
    engine = EngineSettings(roles=("trainer", "pserver"))
    join = pair.join(Options(mode="ps"), engine=engine)
    started = pair.start(pair.bundle(join, workspace(tmp_path / "work", train_py=text)))
    assert [pod.wait() for pod in started] == [0, 0], [pod.shown for pod in started]
    assert sorted(started[0].logs()) == [("trainer", 0, 0)]
    assert pair.lab.address(1).encode() in started[0].logs()["trainer", 0, 0]


def test_node_0_waits_for_a_fetch_until_it_is_released(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    """The request comes from an agent in the pod, which has neither a shell nor an entry in /etc/passwd."""
    pair = pods(2)
    text = "import os\nopen(os.environ['CLUSTERTOOL_OUTPUT'] + '/model', 'w').write('m')\n"
    join = pair.join(engine=EngineSettings(keep=300.0))
    started = pair.start(pair.bundle(join, workspace(tmp_path / "work", train_py=text)), uid=1234)
    assert started[1].wait() == 0
    started[0].says("waiting up to 5 min 00 s for a fetch of the output; resources stay reserved")
    assert started[0].message.state == "succeeded", "the verdict is known while it waits"
    assert started[0].popen.poll() is None
    listed, refused, released = started[0].ask(
        LIST_JOBS({"job": ""}), RELEASE({"job": "another", "exact": True}), RELEASE({"job": "podjob", "exact": True})
    )
    assert [(job["id"], job["state"]) for job in listed["jobs"]] == [("podjob", "succeeded")]
    assert refused["error"]["kind"] == "NotFound" and "error" not in released
    assert started[0].wait() == 0
    assert "released after" in started[0].out.read_text() and started[0].record.end.state == "succeeded"


@pytest.mark.parametrize(("output", "keep"), [pytest.param(False, 300.0, marks=pytest.mark.engines), (True, 0.5)])
def test_node_0_does_not_wait_longer_than_it_must(
    pods: Callable[[int], LabPods], tmp_path: Path, output: bool, keep: float
) -> None:
    one = pods(1)
    text = "import os\nopen(os.environ['CLUSTERTOOL_OUTPUT'] + '/model', 'w').write('m')\n" if output else "pass\n"
    join = one.join(engine=EngineSettings(keep=keep))
    (pod,) = one.start(one.bundle(join, workspace(tmp_path / "work", train_py=text)))
    assert pod.wait() == 0
    assert ("not fetched after" in pod.out.read_text()) is output
    assert pod.record.end.code == 0


def test_a_kept_pod_that_kubernetes_ends(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    one = pods(1)
    text = "import os\nopen(os.environ['CLUSTERTOOL_OUTPUT'] + '/model', 'w').write('m')\n"
    (pod,) = one.start(
        one.bundle(one.join(engine=EngineSettings(keep=300.0)), workspace(tmp_path / "work", train_py=text))
    )
    pod.says("resources stay reserved")
    pod.term()
    assert pod.wait() == 0
    assert "ended by Kubernetes after" in pod.out.read_text() and pod.record.end.state == "succeeded"


def test_the_workspace_comes_from_the_laptop(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    """Node 0 waits until it is complete in its store; the other one gets it from there."""
    pair = pods(2)
    folder = workspace(tmp_path / "work", train_py="print(len(open('data.bin').read()))\n")
    (folder / "data.bin").write_text("x" * 3_000_000)
    join = pair.join(engine=EngineSettings(uploaded=True))
    started = pair.start(pair.bundle(join, folder, inside=False), uid=1234)
    until(lambda: "waiting for the workspace" in started[0].err.read_text(), SOON, lambda: started[0].shown)
    assert not started[0].out.read_text()
    started[0].receive(folder)
    assert [pod.wait() for pod in started] == [0, 0], [pod.shown for pod in started]
    assert [pod.logs()["trainer", rank, 0] for rank, pod in enumerate(started)] == [b"3000000\n"] * 2


@pytest.mark.engines
def test_one_pod_gets_the_workspace_from_the_laptop(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    one = pods(1)
    folder = workspace(tmp_path / "work", train_py="print('here')\n")
    (pod,) = one.start(one.bundle(one.join(engine=EngineSettings(uploaded=True)), folder, inside=False))
    until(lambda: "waiting for the workspace" in pod.err.read_text(), SOON, lambda: pod.shown)
    pod.receive(folder)
    assert pod.wait() == 0 and pod.logs()["trainer", 0, 0] == b"here\n"


def test_kubernetes_ends_a_pod_that_waits_for_the_workspace(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    pair = pods(2)
    folder = workspace(tmp_path / "work", train_py="pass\n")
    started = pair.start(pair.bundle(pair.join(engine=EngineSettings(uploaded=True)), folder, inside=False))
    until(lambda: "waiting for the workspace" in started[0].err.read_text(), SOON, lambda: started[0].shown)
    started[1].term()
    assert [pod.wait() for pod in started] == [75, 75]
    assert "ct-podjob-1 received SIGTERM" in started[0].message.reason


@pytest.mark.engines
def test_the_workspace_does_not_come(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    pair = pods(2)
    folder = workspace(tmp_path / "work", train_py="pass\n")
    join = pair.join(engine=EngineSettings(uploaded=True), join_timeout=4.0)
    started = pair.start(pair.bundle(join, folder, inside=False))
    assert [pod.wait() for pod in started] == [74, 74], [pod.shown for pod in started]
    assert "no part of the workspace has come from the laptop for 4 s" in started[1].message.reason


@pytest.mark.parametrize("uid", [pytest.param(0, marks=pytest.mark.engines), 1234])
def test_output_on_a_volume(pods: Callable[[int], LabPods], tmp_path: Path, uid: int) -> None:
    """Each node has an output of its own; the one of node 0 has the name of the job."""
    pair = pods(2)
    text = "import os\nopen(os.environ['CLUSTERTOOL_OUTPUT'] + '/model', 'w').write(os.environ['RANK'])\n"
    join = pair.join(engine=EngineSettings(output=VOLUME))
    started = pair.start(pair.bundle(join, workspace(tmp_path / "work", train_py=text)), uid=uid)
    assert [pod.wait() for pod in started] == [0, 0], [pod.shown for pod in started]
    assert (started[0].at(VOLUME) / "JOBpodjob/model").read_text() == "0"
    assert (started[1].at(VOLUME) / "JOBpodjob-node1/model").read_text() == "1"


def test_a_volume_that_cannot_be_written(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    one = pods(1)
    join = one.join(engine=EngineSettings(output="/proc/volume"))
    (pod,) = one.start(one.bundle(join, workspace(tmp_path / "work", train_py="pass\n")), uid=1234)
    assert pod.wait() == 69
    assert "the output cannot be put on the volume at /proc/volume" in pod.message.reason
    assert not list(pod.at(ROOT).glob("JOB*")), "the job is taken back"


def test_a_workspace_of_the_image(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    """The ranks run in a folder that each pod has, and that they may not change."""
    pair = pods(2)
    join = pair.join(
        Options(command=("python3", "train.py"), job_workspace="/opt/work"), own=OwnSettings(folder="/opt/work")
    )
    files = {"/opt/work/train.py": "import os\nprint(os.getcwd(), os.environ['CLUSTERTOOL_OUTPUT'])\n"}
    started = pair.start(pair.bundle(join, None), uid=1234, files=files)
    assert [pod.wait() for pod in started] == [0, 0], [pod.shown for pod in started]
    assert started[1].logs()["trainer", 1, 0] == f"/opt/work {ROOT}/JOBpodjob/output\n".encode()


@pytest.mark.engines
def test_a_log_that_is_not_read(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    """stdout is a pipe that is full: the job goes on, ends in time, and leaves its message."""
    one = pods(1)
    text = "for n in range(20_000): print('x' * 100)\nopen('done', 'w').close()\nimport time\ntime.sleep(600)\n"
    bundle = one.bundle(one.join(), workspace(tmp_path / "work", train_py=text))
    reader, writer = os.pipe()
    (pod,) = one.start(bundle, stdout=writer)
    os.close(writer)
    try:
        until(lambda: list(pod.at(ROOT).glob("JOB*/done")), SOON, lambda: pod.shown)
        pod.term()
        assert pod.wait(30.0) == 75
        assert (pod.message.state, pod.message.code) == ("lost", 75)
    finally:
        os.close(reader)


def test_prelude_in_an_image_without_a_shell(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    one = pods(1)
    join = one.join(Options(command=("python3", "-c", "pass")), cluster={"prelude": "export A=b"})
    (pod,) = one.start(one.bundle(join, workspace(tmp_path / "work", train_py="pass\n")))
    assert pod.wait() in (69, 127), pod.shown
    assert "/bin/sh" in pod.message.reason, pod.message


def test_node_0_is_known_by_its_own_address_only(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    """POD_IP may be the name of a Service (PaddleJob, intranet Service), whose address is none of the pod's."""
    pair = pods(2)
    hosts = f"127.0.0.1 localhost\n10.96.0.77 a-service\n{pair.lab.address(0)} ct-podjob-0\n{pair.lab.address(1)} ct-podjob-1\n"
    paddle = {"PADDLE_TRAINERS": "ct-podjob-0,ct-podjob-1", "POD_IP": "a-service"}
    join = pair.join(coordinator=MeetingPoint("", PORT))
    folder = workspace(tmp_path / "work", train_py="import os\nprint(os.environ['MASTER_ADDR'])\n")
    started = pair.start(pair.bundle(join, folder), env=paddle, files={"/etc/hosts": hosts})
    assert [pod.wait() for pod in started] == [0, 0], [pod.shown for pod in started]
    assert started[1].logs()["trainer", 1, 0].decode() == f"{pair.lab.address(0)}\n"


@pytest.mark.parametrize("uid", [pytest.param(0, marks=pytest.mark.engines), 1234])
def test_an_agent_stops_the_job_in_an_image_without_a_folder_for_temporary_files(
    pods: Callable[[int], LabPods], tmp_path: Path, uid: int
) -> None:
    """The job uses /dev/shm, which each container has, and so does an agent, which stops the job as the laptop does."""
    pair = pods(2)
    folder = workspace(tmp_path / "work", train_py=WAIT)
    started = pair.start(pair.bundle(pair.join(), folder), uid=uid, without=("tmp",))
    for pod in started:
        pod.says("ready")
    how = {"job": "podjob", "exact": True, "by": "the test", "code": 130, "grace": 3.0, "force": False}
    (answer,) = started[1].ask(STOP(how))  # type: ignore[arg-type]
    assert "error" not in answer, answer
    assert [pod.wait() for pod in started] == [130, 130]
    assert [pod.record.end.state for pod in started] == ["stopped", "stopped"]
    assert not started[0].at("tmp").exists() and not list(started[0].at("dev/shm").glob("clustertool-new*"))


FAILS = dedent(
    """
    import os, sys, time
    print(os.environ["RANK"], len(os.environ["TOKEN"]), flush=True)
    if os.environ["RANK"] == "1":
        sys.exit(7)
    time.sleep(600)
    """
)


def test_what_the_pods_of_a_failed_job_leave(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    """The outcome, no secret, and in the log of a pod that is gone all that status, logs and report need."""
    pair = pods(2)
    join = pair.join(cluster={"secrets": ("TOKEN",)}, secrets=(("TOKEN", "hunter2-hunter2"),))
    started = pair.start(pair.bundle(join, workspace(tmp_path / "work", train_py=FAILS)), uid=1234)
    assert [pod.wait() for pod in started] == [7, 7]
    key = join.identity.key.splitlines()[1].encode()
    for pod in started:
        assert (pod.record.end.state, pod.record.end.failed, pod.message.code) == ("failed", ("trainer 1",), 7)
        assert "trainer" in pod.record.end.reason
        left = [pod.out.read_bytes(), pod.err.read_bytes(), pod.termination.read_bytes(), *pod.record.files.values()]
        assert not [data for data in left if b"hunter2" in data or key in data]

    root = tmp_path / "restored"
    job = restored(started[1], root)
    assert (job / "log/workerlog.1").read_text() == "1 15\n"
    header = json.loads((job / ".clustertool/events.jsonl").read_bytes().split(b"\n")[0])
    hello = {"root_dir": str(root), "root_group": "", "entry": header["entry"]}
    argv = [sys.executable, "-ESs", "-c", node_bundle.FIRST, "clustertool-agent"]
    (tmp_path / "home").mkdir()
    exact: JobRequest = {"job": "podjob", "exact": True}
    asked = (LIST_JOBS(exact), STATUS(exact), TAIL({**exact, "log": "log/workerlog.1", "lines": 5}))
    jobs, status, tail = ask_agent(argv, hello, asked, {"PATH": PATH, "HOME": str(tmp_path / "home")})
    assert [(one["id"], one["state"], one["code"]) for one in jobs["jobs"]] == [("podjob", "failed", 7)]
    assert "error" not in status and tail["text"] == "1 15\n", (status, tail)


def test_a_file_that_is_no_secret(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    """A bundle that others could change is refused, and so are the variables of no pod."""
    one = pods(1)
    bundle = one.bundle(one.join(), workspace(tmp_path / "work", train_py="pass"))
    (pod,) = one.start(bundle, env={"JOB_COMPLETION_INDEX": ""})
    assert pod.wait() == 64 and "JOB_COMPLETION_INDEX is not set" in pod.err.read_text()
    assert (pod.message.code, pod.message.node) == (64, -1) and "JOB_COMPLETION_INDEX" in pod.message.reason


def test_the_first_process_reaps_orphans(pods: Callable[[int], LabPods], tmp_path: Path) -> None:
    """What `kubectl exec` leaves becomes a child of PID 1, and no zombie stays."""
    one = pods(1)
    (pod,) = one.start(one.bundle(one.join(), workspace(tmp_path / "work", train_py=WAIT)))
    pod.says("ready")
    pod.leave_orphans(20)
    below = {pod.child("ct-supervisor")}
    until(lambda: set(pod.children()) == below, SOON, lambda: f"{pod.children()} are {below}")
    pod.term()
    assert pod.wait() == 75
