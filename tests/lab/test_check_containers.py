"""`check` and --dry on nodes with podman: the runtime, the image and its digest, as root and as a user."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests import containers
from tests.cli import LabSite


def cells(site: LabSite, *args: str, code: int = 0) -> list[dict[str, str]]:
    """The column `container` of each node."""
    answer: Any = site.inv("check", "--json", *args).ends(code).json
    return [row["findings"]["container"] for row in answer["nodes"]]


@pytest.fixture
def some(site: Callable[..., LabSite], tmp_path: Path, container_image: Path) -> Callable[[int], LabSite]:
    """some(3): so many nodes, the first of which has the image."""

    def make(count: int) -> LabSite:
        nodes = {node: containers.container_node(tmp_path / f"etc{node}") for node in range(count)}
        found: LabSite = site(count, nodes=nodes)
        containers.put_image(found, container_image, nodes=[0])
        return found

    return make


def test_check_reports_the_image_of_each_node(some: Callable[[int], LabSite], container_image: Path) -> None:
    three = some(3)
    three.conf(CONTAINER={"image": containers.IMAGE}, CHECKS_OFF=["load"])
    present, *absent = cells(three)
    assert present["level"] == "ok" and present["text"].startswith("podman ") and ", sha256:" in present["text"]
    assert [(one["level"], one["text"].rpartition(": ")[2]) for one in absent] == [
        ("ok", "the image is not there, it will be pulled")
    ] * 2
    never = {"image": containers.IMAGE, "pull": "never"}
    three.conf(CONTAINER=never, CHECKS_OFF=["load"])
    assert [one["level"] for one in cells(three, code=69)] == ["ok", "bad", "bad"]
    containers.copy_image(three, nodes=[1])
    containers.put_image(three, container_image, nodes=[2])
    found = cells(three, code=69)
    assert [one["level"] for one in found] == ["ok", "ok", "bad"]
    assert "different images" in found[2]["text"] and "node0 and node1" in found[2]["text"]
    assert not any(
        "container" in row["findings"] for row in three.inv("check", "--json", "--image", "").ends(0).json["nodes"]
    )
    containers.no_containers(three)


def test_dry_shows_runtime_image_digest_and_the_command_line_that_runs(some: Callable[[int], LabSite]) -> None:
    """Of the command line, only the token of the job, which differs, and the limits of the node are not compared."""
    two = some(2)
    containers.copy_image(two)
    job = two.workspace(train_sh="sleep 600")
    given = ("--script", "sh train.sh", "--image", containers.IMAGE, "--job-id", "same", "--env", "WORD=secret-word")
    options = ("-w", job, *given)
    dry = two.inv("run", *options, "--dry", "--json").ends(0).json
    found = [node["container"] for node in dry["nodes"]]
    assert {one["program"] for one in found} == {"/usr/bin/podman"}
    assert {(one["image"], one["runtime"], one["rootless"]) for one in found} == {(containers.IMAGE, "podman", False)}
    digests = {one["digest"] for one in found}
    assert len(digests) == 1 and digests.pop().startswith("sha256:")
    text = two.inv("run", *options, "--dry").ends(0).out
    assert f"container of each process on node0: {containers.IMAGE} (sha256:" in text
    assert "the first one starts so, with the limits and devices of the node: /usr/bin/podman run --rm" in text
    two.inv("run", *options, "--detach").ends(0)
    for node, shown in enumerate(found):
        ran = next(one.argv for one in two.lab.processes(node) if one.argv[1:3] == ("run", "--rm"))
        assert _compared(ran) == _compared(shown["command"])
        assert "--env=WORD" in ran and "secret-word" not in str(ran)
    two.inv("stop", "--job", "same").ends(0)
    containers.no_containers(two)


def _compared(argv: Iterable[str]) -> list[str]:
    more = (
        "--ulimit=",
        "--name=",
        "--label=clustertool.place=",
        "--env=KUBEFLOW_TRAINER_",
    )  # the supervisor adds these
    return [one for one in argv if not one.startswith(more)]


def test_a_runtime_that_a_user_cannot_use(site: Callable[..., LabSite], tmp_path: Path, container_image: Path) -> None:
    """A user without a range of uids, and a node whose podman is missing."""
    etc = [
        containers.container_node(tmp_path / f"etc{node}", users=("ann",), hide=("podman",) if node else ())
        for node in (0, 1)
    ]
    two: LabSite = site(2, nodes=dict(enumerate(etc)))
    (tmp_path / "etc0/subuid").write_text("")
    entries = [entry.replace("root@", "ann@") for entry in two.lab.entries()] if hasattr(two.lab, "entries") else None
    more = {"HOSTS": entries} if entries else {"USER": "ann"}
    two.conf(CONTAINER={"image": containers.IMAGE, "runtime": "podman"}, CHECKS_OFF=["load"], **more)
    without, missing = cells(two, code=69)
    assert "/etc/subuid" in without["text"] and "usermod --add-subuids" in without["fix"]
    assert missing["text"] == "no podman"
