"""Jobs on Kubernetes by the command line: the official client, a test API server, and pods on the nodes of a lab."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import signal
from collections.abc import Callable

import pytest

from tests.cli import until
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.api_store import Obj
from tests.kubernetes.cluster_faults import evict, kill_for_memory, lose_node, preempt
from tests.kubernetes.kube_site import KubeSite

TRAIN = """
    import os, sys, time
    rank = os.environ["RANK"]
    print("rank", rank, "of", os.environ["WORLD_SIZE"], "secret", len(os.environ.get("TOKEN", "")), flush=True)
    for step in range(int(os.environ.get("STEPS", "1"))):
        print("step", step, flush=True)
        if os.path.exists("seen"):
            break
        time.sleep(0.5)
    if os.environ.get("WRITES"):
        with open(os.environ["CLUSTERTOOL_OUTPUT"] + "/model.txt", "w") as file:
            file.write(f"rank {rank}")
    sys.exit(7 if os.environ.get("FAILS") == rank else 0)
"""

AT_HOME = """
    import getpass, pathlib
    pathlib.Path("~/.cache/huggingface").expanduser().mkdir(parents=True)
    print("I am", getpass.getuser(), "at", pathlib.Path.home(), flush=True)
"""


@pytest.fixture
def job(site: KubeSite) -> KubeSite:
    site.workspace(train_py=TRAIN)
    return site


def run(*more: str) -> tuple[str, ...]:
    return ("run", "--workspace", "job", "--all-ranks", *more)


def test_a_job_runs_and_every_verb_knows_it(job: KubeSite, kubectl_here: None) -> None:
    """Pods run as user 1000, whom the image does not know: without more HOME is /, and getpass.getuser() fails."""
    job.workspace(train_py=AT_HOME + TRAIN)
    job.conf(KUBERNETES={"nodes": 2})
    done = job.inv(*run("--env", "WRITES=1")).ends(0)
    for rank in range(2):
        assert f"[trainer {rank} ct-{done.job}-{rank}] rank {rank} of 2" in done.out
    assert done.out.count(f"I am {getpass.getuser()} at /clustertool/.clustertool/home") == 2
    assert (job.folder / f"JOB{done.job}/model.txt").read_text() == "rank 0"
    assert "its output was fetched: 1 file" in done.err
    until(lambda: not job.living_pods, 30, lambda: f"{job.living_pods} to end")  # pod 0 was released
    found = job.inv("status", "--json").ends(0).json
    assert (found["state"], found["job"]) == ("succeeded", done.job)
    assert [process["state"] for process in found["processes"]] == ["done"] * 2
    (listed,) = job.inv("jobs", "--json").ends(0).json["jobs"]
    assert (listed["id"], listed["state"], listed["code"]) == (done.job, "succeeded", 0)
    assert "rank 1 of 2" in job.inv("logs", "--rank", "1").ends(0).out
    report = job.inv("report").ends(0)
    assert "succeeded -> " in report.out + report.err
    assert "nothing to stop" in job.inv("stop").ends(0).out

    pods = job.kubectl("get", "pods", "-o", "name").split()
    assert len(pods) == 2
    *lines, last = job.kubectl("logs", pods[1]).splitlines()
    assert "[trainer 1] rank 1 of 2 secret 0" in lines
    assert (json.loads(last)["state"], json.loads(last)["code"]) == ("succeeded", 0)
    assert "clustertool/job-id" in job.kubectl("describe", pods[1])

    assert done.job in job.inv("clean", "--job", done.job).ends(0).out
    job.is_empty()


def test_a_rank_that_fails_ends_the_job_with_its_exit_code(job: KubeSite) -> None:
    job.conf(KUBERNETES={"nodes": 2})
    done = job.inv(*run("--env", "FAILS=1")).ends(7)
    assert f"trainer 1 on ct-{done.job}-1: exit code 7" in done.last
    # Kubernetes deletes the pods that still run when another one has failed: their nodes may have no record (66).
    assert job.inv("status", "--json").json["outcome"]["code"] == 7
    job.inv("clean", "--job", done.job).ends(0)
    job.is_empty()


@pytest.mark.engines
def test_a_secret_is_in_the_secret_of_the_job_only(job: KubeSite) -> None:
    job.conf(SECRETS=["TOKEN"])
    command = job.start(*run("--env", "STEPS=40"), env={"TOKEN": "v3ry-secret"})
    command.says("rank 2 of 3 secret 11")
    for kind in ("Job", "Pod", "Service", "Event"):
        assert "v3ry-secret" not in json.dumps(job.objects(kind))
    command.signal(signal.SIGINT)
    done = command.wait()
    assert "v3ry-secret" not in done.out + done.err
    job.is_empty()


@pytest.mark.engines
def test_a_stop_from_another_place_leaves_nothing(job: KubeSite) -> None:
    command = job.start(*run("--env", "STEPS=200"))
    command.says("rank 2 of 3")
    stopped = job.inv("stop").ends(0)
    assert "-[0-2]: clean" in stopped.out
    done = command.wait().ends(143)
    assert "the job was stopped: inv stop" in done.err
    job.is_empty(5)


@pytest.mark.engines
def test_ctrl_c_while_the_job_runs(job: KubeSite) -> None:
    command = job.start(*run("--env", "STEPS=200"))
    command.says("rank 2 of 3")
    command.signal(signal.SIGINT)
    done = command.wait().ends(130)
    assert "-[0-2]: clean" in done.err
    job.is_empty(5)


@pytest.mark.engines
def test_ctrl_c_twice_kills_a_program_that_ignores_term(job: KubeSite) -> None:
    job.workspace(
        train_py="import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(600)\n"
    )
    job.conf(GRACE=60)
    command = job.start(*run())
    until(lambda: command.out.count("deaf") == 3, 60)
    command.signal(signal.SIGINT)
    command.says("grace 60 s")
    command.signal(signal.SIGINT)
    assert "killing everything now" in command.wait(40).ends(130).err
    job.is_empty(5)


def test_ctrl_c_in_the_queue(job: KubeSite) -> None:
    job.conf(KUBERNETES={"resources": {"cpu": 100}})
    command = job.start(*run())
    command.says("Insufficient cpu")
    queued = job.inv("status", "--json").ends(0).json
    assert queued["state"] == "queued" and "Insufficient cpu" in queued["queue"]["reason"]
    command.signal(signal.SIGINT)
    command.wait().ends(130)
    job.is_empty(5)


@pytest.mark.engines
def test_ctrl_c_while_pods_join(job: KubeSite) -> None:
    """One pod of two cannot be scheduled, so the other one waits for it."""
    job.conf(KUBERNETES={"nodes": 2, "resources": {"cpu": 5}})
    for worker in ("worker-1", "worker-2"):
        job.server.store.update("Node", "", worker, lambda node: node["status"]["allocatable"].update(cpu="1"))
    command = job.start(*run())
    job.pods(1)
    command.says("running")
    command.signal(signal.SIGINT)
    command.wait().ends(130)
    job.is_empty(5)


@pytest.mark.engines
def test_a_laptop_that_dies_ends_nothing(job: KubeSite) -> None:
    command = job.start(*run("--env", "STEPS=16"))
    command.says("rank 2 of 3")
    command.signal(signal.SIGKILL)
    followed = job.inv("attach", "--all-ranks").ends(0)
    assert followed.out.count("step 15") == 3
    assert "all trainers are done" in followed.last


@pytest.mark.engines
def test_a_job_goes_on_while_the_server_is_away(job: KubeSite) -> None:
    command = job.start(*run("--env", "STEPS=60"))
    command.says("rank 2 of 3")
    job.server.away(20)
    done = command.wait(120).ends(0)
    for rank in range(3):
        lines = [line.rpartition("] ")[2] for line in done.out.splitlines() if line.startswith(f"[trainer {rank} ")]
        assert lines[1:] == [f"step {step}" for step in range(60)]


@pytest.mark.engines
def test_ranks_start_again_in_pods_that_run(job: KubeSite) -> None:
    job.workspace(
        train_py="""
        import os, sys
        print("attempt", os.environ["CLUSTERTOOL_ATTEMPT"], flush=True)
        sys.exit(os.environ["RANK"] == "1" and os.environ["CLUSTERTOOL_ATTEMPT"] == "0")
        """
    )
    done = job.inv(*run("--max-restarts", "2")).ends(0)
    assert done.out.count("attempt 1") == 3
    assert len(job.objects("Pod")) == 3
    assert job.inv("logs", "--rank", "1", "--attempt", "0").ends(0).out.count("attempt 0") == 1


@pytest.mark.parametrize("dialect", [pytest.param("job", marks=pytest.mark.engines), "jobset"])
def test_parameter_servers_end_with_the_trainers(job: KubeSite, dialect: str) -> None:
    job.workspace(
        train_py="""
        import os, socket, time
        role = os.environ["TRAINING_ROLE"]
        listener = socket.create_server((os.environ["POD_IP"], int(os.environ["PADDLE_PORT"]))) if role == "PSERVER" else None
        print(role, os.environ["POD_IP"], flush=True)
        time.sleep(600 if listener else 1)
        """
    )
    job.conf(KUBERNETES={"nodes": {"pserver": 1, "trainer": 1}, "dialect": dialect})
    done = job.inv(*run("--mode", "ps")).ends(0)
    assert done.out.count("] TRAINER") == 1
    assert len(job.objects("Pod")) == 2


@pytest.mark.engines
def test_two_users_of_one_namespace(job: KubeSite, another_user: Callable[[str], KubeSite]) -> None:
    command = job.start(*run("--env", "STEPS=200", "--job-id", "words"))
    command.says("rank 2 of 3")
    bob = another_user("bob")
    bob.workspace(train_py=TRAIN)
    assert bob.inv("jobs", "--json").ends(0).json["jobs"] == []
    bob.inv("stop", "--job", "words").ends(66)
    assert "nothing to stop" in bob.inv("stop", "--all").ends(0).out
    theirs = bob.inv(*run()).ends(0)
    assert "rank 2 of 3" in theirs.out
    bob.inv("clean", "--older-than", "0s").ends(0)
    assert "-[0-2]: clean" in job.inv("stop", "--job", "words").ends(0).out
    command.wait().ends(143)
    job.is_empty(5)


@pytest.mark.engines
def test_a_pod_that_is_deleted_ends_the_job(job: KubeSite) -> None:
    command = job.start(*run("--env", "STEPS=200"))
    command.says("rank 2 of 3")
    job.kubectl("delete", "pod", "--wait=false", job.pods()[1]["metadata"]["name"])
    done = command.wait(60)
    assert done.code == 75, (done.code, done.err)
    assert "deleted" in done.last
    job.inv("clean", "--older-than", "0s").ends(0)
    job.is_empty()


@pytest.mark.engines
def test_an_image_that_cannot_be_pulled_is_the_reason_of_the_wait(job: KubeSite) -> None:
    job.server.controllers.bad_images.add("example.org/train:1")
    command = job.start(*run())
    command.says("ImagePullBackOff")
    assert "ImagePullBackOff" in job.inv("jobs").ends(0).err
    job.inv("stop").ends(0)
    command.wait().ends(69)
    job.is_empty(5)


def test_a_quota_that_is_full_is_the_reason_of_the_wait(job: KubeSite) -> None:
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"requests.cpu": "0"}}}
    job.server.store.create("ResourceQuota", "default", quota)
    command = job.start(*run())
    command.says("exceeded quota: small")
    command.signal(signal.SIGINT)
    command.wait().ends(130)
    until(lambda: job.left() == ["ResourceQuota small"], 10, lambda: str(job.left()))


@pytest.mark.engines
def test_a_quota_that_allows_a_part_of_the_pods_is_named(job: KubeSite) -> None:
    """The first pod runs and waits for the others, which are not created."""
    job.conf(JOIN_TIMEOUT=8)
    job.server.store.create("ResourceQuota", "default", {"metadata": {"name": "team"}, "spec": {"hard": {"pods": "1"}}})
    command = job.start(*run())
    command.says("exceeded quota: team")
    assert "exceeded quota: team" in job.inv("status").out
    done = command.wait().ends(69)
    assert "exceeded quota: team" in done.last and done.err.count("running: FailedCreate") == 1


def test_a_user_without_rights_gets_the_fix_and_leaves_nothing(
    job: KubeSite, another_user: Callable[[str], KubeSite]
) -> None:
    reader = another_user("reader")
    reader.server.add_user(
        "reader", [{"apiGroups": ["batch", ""], "resources": ["jobs", "pods"], "verbs": ["list", "get"]}]
    )
    reader.workspace(train_py=TRAIN)
    refused = reader.inv(*run()).ends(77)
    assert "may not create jobs.batch" in refused.err
    assert reader.left() == []


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        pytest.param(evict, 75, "Evicted by the node: The node was low on resource: memory", marks=pytest.mark.engines),
        (preempt, 75, "preempted by a pod of a higher priority"),
        pytest.param(lose_node, 75, "node lost", marks=pytest.mark.engines),
        pytest.param(kill_for_memory, 137, "OOMKilled", marks=pytest.mark.engines),
    ],
)
def test_the_verdict_names_what_the_cluster_has_done(
    job: KubeSite, fault: Callable[[ApiServer, Obj], None], code: int, text: str
) -> None:
    job.conf(KUBERNETES={"nodes": 2})
    command = job.start(*run("--env", "STEPS=400"))
    command.says("rank 1 of 2")
    fault(job.server, job.pods(2)[1])
    done = command.wait(90)
    assert (done.code, text in done.err) == (code, True), (done.code, done.err)
    if fault is not preempt:  # its pods are gone, and all that they have left
        assert text in json.dumps(job.inv("status", "--json").json)


@pytest.mark.engines
def test_a_job_ends_where_a_sidecar_runs_on(job: KubeSite) -> None:
    """A service mesh adds a container to each pod: the pods stay Running, and their controller sees no end."""
    job.server.controllers.sidecars.append("istio-proxy")
    done = job.inv(*run("--env", "FAILS=1")).ends(7)
    kept = "istio-proxy still runs in 3 pods, whose resources stay reserved: "
    assert f"warning: {kept}inv clean --job {done.job}" in done.err
    assert {pod["status"]["phase"] for pod in job.objects("Pod")} == {"Running"}
    (listed,) = job.inv("jobs", "--json").ends(0).json["jobs"]
    assert (listed["state"], listed["code"]) == ("failed", 7)
    assert kept in job.inv("status").ends(0).out
    assert "rank 2 of 3" in job.inv("logs", "--rank", "2").ends(0).out
    job.inv("clean", "--job", done.job).ends(0)
    job.is_empty()


@pytest.mark.engines
def test_a_job_whose_pods_kubernetes_has_deleted_is_known(job: KubeSite) -> None:
    """It is detached. A pod is preempted, and the others are deleted because of it; the Job object and events stay."""
    name = job.inv(*run("--detach", "--env", "STEPS=400")).ends(0).job
    preempt(job.server, job.pods()[1])
    until(
        lambda: not job.objects("Pod") and job.objects("Job")[0]["status"].get("conditions"),
        60,
        lambda: f"{job.left()}",
    )
    why = "preempted by a pod of a higher priority: Preempted by pod 3f0e on node worker-1"
    (listed,) = job.inv("jobs", "--json").ends(0).json["jobs"]
    assert (listed["id"], listed["state"], listed["code"], listed["total"]) == (name, "lost", 75, 3)
    found = job.inv("status", "--json").ends(0).json
    assert (found["state"], found["outcome"]["code"]) == ("lost", 75) and why in found["outcome"]["reason"]
    assert why in job.inv("attach").ends(75).last
    assert why in job.inv("logs", "--rank", "2").ends(66).err
    assert "nothing to stop" in job.inv("stop", "--all").ends(0).out
    job.inv("clean", "--job", name).ends(0)
    job.is_empty()


@pytest.mark.engines
def test_a_later_command_has_the_verdict_of_a_pod_that_was_killed_for_memory(job: KubeSite) -> None:
    """The logs of its ranks stay in its own log, which has no record."""
    job.inv(*run("--detach", "--env", "STEPS=400")).ends(0)
    pods = job.pods()
    until(lambda: all("step 1" in pod.shown for pod in job.living_pods), 60)
    kill_for_memory(job.server, pods[1])
    until(lambda: not job.living_pods and job.objects("Job")[0]["status"].get("conditions"), 60)
    (listed,) = job.inv("jobs", "--json").ends(0).json["jobs"]
    assert (listed["state"], listed["code"], listed["total"]) == ("lost", 137, 3) and "OOMKilled" in listed["reason"]
    assert job.inv("status", "--json").json["outcome"]["code"] == 137
    assert "OOMKilled" in job.inv("attach").ends(137).last
    assert "step 1" in job.inv("logs", "--rank", "1").ends(0).out
    assert "OOMKilled" in job.inv("logs", "--rank", "0").ends(66).err


@pytest.mark.engines
def test_an_exported_job_runs_when_kubectl_has_applied_it(job: KubeSite, kubectl_here: None) -> None:
    job.inv("export", "--workspace", "job", "--with-secrets", "--to", "job.yaml").ends(0)
    assert (job.folder / "job.yaml").stat().st_mode & 0o777 == 0o600
    job.kubectl("apply", "--validate=false", "-f", str(job.folder / "job.yaml"))
    done = job.inv("attach", "--all-ranks").ends(0)
    assert all(f"rank {rank} of 3" in done.out for rank in range(3))
    job.inv("clean", "--older-than", "0s").ends(0)
    job.is_empty()


@pytest.mark.engines
def test_a_workspace_that_fits_no_secret_is_sent_to_the_first_pod(job: KubeSite) -> None:
    """The other pods get it from there."""
    folder = job.workspace(
        train_py="""
        import hashlib, os
        print(os.environ["RANK"], hashlib.sha256(open("large.bin", "rb").read()).hexdigest(), flush=True)
        """
    )
    data = os.urandom(20_000_000)
    (folder / "large.bin").write_bytes(data)
    done = job.inv(*run()).ends(0)
    for rank in range(3):
        assert f"] {rank} {hashlib.sha256(data).hexdigest()}" in done.out
    (secret,) = job.objects("Secret")
    assert len(json.dumps(secret)) < 1_000_000


def test_ctrl_c_before_the_workspace_is_sent(job: KubeSite) -> None:
    (job.workspace() / "large.bin").write_bytes(os.urandom(2_000_000))
    job.conf(KUBERNETES={"resources": {"cpu": 100}})
    command = job.start(*run())
    command.says("its workspace is sent when its first pod runs")
    command.signal(signal.SIGINT)
    command.wait().ends(130)
    job.is_empty(5)


@pytest.mark.engines
def test_an_id_is_free_again_when_its_job_has_ended(job: KubeSite) -> None:
    assert job.inv(*run("--job-id", "words")).ends(0).job == "words"
    again = job.start(*run("--job-id", "words", "--env", "STEPS=100"))
    again.says("rank 2 of 3")
    assert "the id of this one is words-2" in again.err
    assert "job words-2 has not ended" in job.inv(*run("--job-id", "words")).ends(64).err
    job.inv("stop", "--job", "words-2").ends(0)
    again.wait().ends(143)
