"""Jobs in podman on two machines, as root and rootless: they compute what they compute without containers, and have what the
image and the plan give them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import cases, containers
from tests.cli import LabSite, until
from tests.lab.lab import FIRST_UID, USERS
from tests.lab.test_join_machines import losses, model

IDS = {"root": 0, "ann": FIRST_UID}
SHOW = """\
id >output/id-$RANK; pwd >output/pwd-$RANK; env >output/env-$RANK
echo "rank $RANK ready"
while [ ! -e end ]; do sleep 0.1; done
"""


@pytest.fixture(params=["root", pytest.param("ann", marks=pytest.mark.chaos)])
def two(
    request: pytest.FixtureRequest, site: Callable[..., LabSite], tmp_path: Path, container_image: Path
) -> Iterator[containers.UserSite]:
    """Two nodes whose user has the image."""
    users = () if request.param == "root" else (request.param,)
    nodes = {node: containers.container_node(tmp_path / f"etc{node}", users=users) for node in range(2)}
    plain = site(2, nodes=nodes)
    containers.put_image(plain, container_image, users=(request.param,), nodes=[0])
    containers.copy_image(plain, users=(request.param,))
    made = containers.UserSite.of(plain, request.param)
    yield made
    containers.no_containers(plain, users=(request.param,))


def user_of(site: LabSite) -> str:
    return getattr(site, "user", "root")


@pytest.mark.chaos
def test_word2vec_learns_the_same(two: LabSite) -> None:
    """Two kinds of ranks, shards, and connections between the nodes."""
    folder = cases.small_word2vec(two.folder)
    found = []
    for container in ({}, containers.settings()):
        keys = {"CONTAINER": container} if container else {}
        two.conf(PRELUDE=f"export PATH={Path(sys.executable).parent}:$PATH", **keys)
        done = two.inv("run", "-w", folder, "--job-id", "w2v", "--server-num", 1, "--worker-num", 1).ends(0)
        assert "all trainers are done, ending the pservers" in done.err
        found.append(([losses(two, node) for node in range(2)], model(two)))
        for node in range(2):
            shutil.rmtree(two.jobs(node)[0])
    outside, inside = found
    assert inside == outside and inside[1]
    containers.no_containers(two, users=(user_of(two),))


def test_what_a_rank_has(two: LabSite) -> None:
    two.conf(CONTAINER=containers.settings(), PRELUDE="export LATE=prelude", ENV={"FROM_CONF": "conf"})
    user = user_of(two)
    folder = two.workspace(show_sh=SHOW)
    assert "podman " in two.inv("check", "--workspace", folder).ends(0).out
    assert (
        containers.IMAGE in two.clustertool("--dry", "run", "--workspace", folder, "--script", "sh show.sh").ends(0).out
    )
    job = two.inv("run", "--workspace", folder, "--detach", "--script", "sh show.sh").ends(0).job
    assert containers.IMAGE in two.inv("status").ends(0).out
    logs = [two.jobs(node)[0] / f"log/workerlog.{node}" for node in range(2)]
    until(lambda: [log.read_text() for log in logs] == ["rank 0 ready\n", "rank 1 ready\n"])
    assert two.inv("logs", "--rank", 1).ends(0).out.endswith("rank 1 ready\n")
    ids = set()
    for node in range(2):
        (path,) = two.jobs(node)
        place = path.name
        home = f"{USERS / user}" if user != "root" else "/root"
        env = dict(line.split("=", 1) for line in (path / f"output/env-{node}").read_text().splitlines() if "=" in line)
        assert (env["IMAGE_WORD"], env["HOME"], env["FROM_CONF"]) == ("image", "/opt/image/home", "conf")
        assert (env["PATH"], env["LATE"]) == (containers.IMAGE_ENV["PATH"], "prelude")
        assert (path / f"output/pwd-{node}").read_text() == f"{home}/clustertool/{place}\n"
        ids.add((path / f"output/id-{node}").read_text().split()[0].partition("(")[0])
        assert (path / f"output/id-{node}").stat().st_uid == IDS[user]
        assert logs[node].stat().st_uid == IDS[user]
        assert len(containers.containers(two, node, user)) == 1
    assert ids == {f"uid={IDS[user]}"}
    inside = two.clustertool("exec", "--in-job", "--rank", 0, "--", "sh", "-c", "echo $RANK $IMAGE_WORD $LATE; exit 6")
    assert inside.ends(6).out == "0 image prelude\n"
    stacks = two.clustertool("stacks").ends(0).out  # of programs in containers, from outside
    assert stacks.startswith("trainer 0-1: ") and "(no Python)" in stacks
    shell = two.start("exec", "--in-job", "--rank", 1, terminal=True, env={"TERM": "dumb"})
    shell.says("trainer 1 on")
    shell.type("echo at $RANK $IMAGE_WORD; exit\r")
    shell.says("at 1 image$")
    shell.wait().ends(0)
    two.inv("stop", "--job", job).ends(0)
    containers.no_containers(two, users=(user,))
