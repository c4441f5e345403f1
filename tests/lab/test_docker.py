"""Jobs in containers of docker: a real daemon on each node, whose children they are. No failure leaves one of them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import containers, docker_daemon
from tests.cli import LabSite, Running
from tests.containers import IMAGE, LABEL
from tests.lab.lab import Lab

WAITS = """\
trap '' TERM
setsid sleep 1000 &
echo ready $CLUSTERTOOL_RANK $(id -u)
while ! [ -e what ]; do sleep 0.05; done
. ./what
"""


@pytest.fixture(scope="module")
def docker_site(
    module_lab: Callable[..., Lab], tmp_path_factory: pytest.TempPathFactory, container_image: Path
) -> Iterator[LabSite]:
    nodes = {node: docker_daemon.docker_node() for node in range(2)}
    made = LabSite(tmp_path_factory.mktemp("docker") / "site", module_lab(2, nodes=nodes))
    docker_daemon.wait_for(made)
    docker_daemon.put_image(made, container_image)
    made.conf(CONTAINER=containers.settings(runtime="docker"), GRACE=2, LOSS_TIMEOUT=3, CONNECT_TIMEOUT=5)
    made.workspace(train_sh=WAITS)
    yield made
    made.close()


def test_docker_on_a_node(docker_site: LabSite) -> None:
    one = docker_site
    run = ["run", "--rm", "--net=host", "--ipc=host", "--pid=host", "--log-driver=none", "--user=4001:4001"]
    out = docker_daemon.docker(one, 1, *run, "--group-add=44", IMAGE, "id")
    assert out == "uid=4001 gid=4001 groups=4001,44\n"
    docker_daemon.docker(one, 1, *run, "--detach", f"--label={LABEL}=j", "--name=ct-1", IMAGE, "sleep", "100")
    assert docker_daemon.containers(one, 1) == ["ct-1"]
    assert [process.name for process in one.living()] == ["containerd-shim", "sleep"]
    docker_daemon.docker(one, 1, "rm", "--force", "ct-1")
    docker_daemon.no_containers(one)


def start(site: LabSite, *options: object) -> Running:
    command = site.start("run", "-w", "job", "--script", "sh train.sh", "--all-ranks", *options)
    for rank in range(2):
        command.says(rf"\bready {rank} 0$")
    return command


@pytest.mark.chaos  # test_container_failures.py has it with podman
def test_a_rank_exits(docker_site: LabSite) -> None:
    command = start(docker_site)
    (docker_site.jobs(1)[-1] / "what").write_text("exit 7\n")
    done = command.wait().ends(7)
    assert done.last == "clustertool: exit 7 (job): trainer 1 on node1: exit code 7"
    docker_daemon.no_containers(docker_site)


@pytest.mark.chaos
def test_a_rank_is_killed(docker_site: LabSite) -> None:
    command = start(docker_site)
    (rank,) = [p for p in docker_site.processes(1) if p.argv == ("sh", "train.sh")]
    os.kill(rank.pid, signal.SIGKILL)
    done = command.wait().ends(137)
    assert "trainer 1 on node1 ended with signal 9 (killed)" in done.err
    docker_daemon.no_containers(docker_site)


@pytest.mark.chaos  # test_container_failures.py has it with podman
@pytest.mark.parametrize("what", ["docker", "containerd-shim"])
def test_a_process_of_the_runtime_is_killed(docker_site: LabSite, what: str) -> None:
    """The client, and the parent of the container."""
    command = start(docker_site)
    (found,) = [p for p in docker_site.processes(1) if p.name == what]
    os.kill(found.pid, signal.SIGKILL)
    done = command.wait()
    assert re.search(r"exit \d+ \(job\): trainer 1 on node1: .+", done.last), done.err
    docker_daemon.no_containers(docker_site)


def test_ctrl_c_and_ranks_that_ignore_term(docker_site: LabSite) -> None:
    """They are no descendants of the supervisor: their parents are the daemon's."""
    command = start(docker_site)
    command.signal(signal.SIGINT)
    done = command.wait().ends(130)
    assert "node[0-1]: clean" in done.err
    assert not any(docker_daemon.containers(docker_site, node) for node in range(2)), "stop has proved this"
    docker_daemon.no_containers(docker_site)


@pytest.mark.chaos  # test_container_failures.py has it with podman
def test_a_supervisor_is_killed(docker_site: LabSite) -> None:
    command = start(docker_site)
    (found,) = [p for p in docker_site.processes(1) if p.name == "ct-supervisor"]
    os.kill(found.pid, signal.SIGKILL)
    command.wait().ends(75)
    docker_daemon.no_containers(docker_site)


@pytest.mark.chaos
def test_a_daemon_is_killed_and_started_again(docker_site: LabSite) -> None:
    """Its containers go on without it. The job ends, as the client has ended, and stop waits for the daemon."""
    command = start(docker_site)
    for process in docker_daemon.daemons(docker_site, 1):
        with contextlib.suppress(ProcessLookupError):  # containerd ends with the daemon that has started it
            os.kill(process.pid, signal.SIGKILL)
    docker_daemon.start_daemon(docker_site, 1)
    done = command.wait()
    assert re.search(r"exit \d+ \(job\): trainer 1 on node1: .+", done.last), done.err
    docker_daemon.no_containers(docker_site)


@pytest.mark.chaos
def test_a_session_inside_a_rank(docker_site: LabSite) -> None:
    """A command and a shell on a terminal; TERM reaches neither, and a stop ends both."""
    command = start(docker_site)
    inside = docker_site.clustertool(
        "exec", "--in-job", "--rank", 1, "--", "sh", "-c", "echo $RANK $IMAGE_WORD in $PWD; exit 6"
    ).ends(6)
    assert inside.out == f"1 image in /root/clustertool/{docker_site.jobs(1)[-1].name}\n"
    shell = docker_site.start("exec", "--in-job", "--rank", 0, terminal=True, env={"TERM": "dumb"})
    shell.says("trainer 0 on")
    shell.type("echo at $RANK $IMAGE_WORD; trap '' HUP TERM; tty >output/tty\r")
    shell.says("at 0 image$")
    docker_site.inv("stop").ends(0)
    command.wait().ends(143)
    shell.wait()
    docker_daemon.no_containers(docker_site)


def test_folders_with_colons(docker_site: LabSite) -> None:
    """In ROOT_DIR, and in the folder that --job-workspace names."""
    folder = docker_site.home(0) / "jobs:1,a"
    try:
        place = docker_site.home(0) / "work:2/job"
        place.mkdir(parents=True)
        (place / "train.sh").write_text("pwd; echo kept >$CLUSTERTOOL_OUTPUT/kept\n")
        for option, value in (("--workspace", "colon"), ("--job-workspace", "/root/work:2/job")):
            docker_site.workspace("colon", train_sh="pwd; echo kept >$CLUSTERTOOL_OUTPUT/kept\n")
            root = {"ROOT_DIR": "~/jobs:1,a"}
            docker_site.conf(CONTAINER=containers.settings(runtime="docker"), GRACE=2, LOSS_TIMEOUT=3, **root)
            done = docker_site.inv("run", option, value, "--only", "node0", "--script", "sh train.sh").ends(0)
            names = [path for path in folder.iterdir() if path.name.startswith("JOB")]
            newest = max(names, key=lambda path: path.stat().st_ctime)
            assert (newest / "output/kept").read_text() == "kept\n"
            wanted = f"/root/jobs:1,a/{newest.name}" if value == "colon" else value
            assert wanted in done.out, done.out
    finally:
        docker_site.conf(CONTAINER=containers.settings(runtime="docker"), GRACE=2, LOSS_TIMEOUT=3, CONNECT_TIMEOUT=5)
    docker_daemon.no_containers(docker_site)


def test_a_command_that_the_image_does_not_have(docker_site: LabSite) -> None:
    done = docker_site.inv("run", "-w", "job", "--only", "node0", "--script", "no-such-program").ends(127)
    assert "no-such-program does not exist in the image" in done.out + done.err
    docker_daemon.no_containers(docker_site)
