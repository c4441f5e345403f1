"""Findings about containers, and the container of each node in a plan, from what probes answer."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Dict, List

import pytest

from clustertool.errors import PreflightError
from clustertool.model.checks.each_node import check
from clustertool.model.config.cluster import Cluster
from clustertool.model.container.container_settings import ContainerSettings
from clustertool.model.container.job_container import container_of
from clustertool.model.facts import ContainerFacts, Facts, read_facts
from clustertool.model.finding import Finding, Seen
from clustertool.model.planning import requests
from clustertool.model.planning.plan import as_dict, needs_probe, with_containers
from tests.unit.cases import cluster_of, facts_of, hosts, job_of, plan_of

ID, OTHER_ID = "a" * 64, "b" * 64
DIGEST, OTHER_DIGEST = "sha256:" + "4" * 64, "sha256:" + "5" * 64
GOOD = ContainerFacts(
    runtime="podman",
    program="/usr/bin/podman",
    version="4.3.1",
    rootless=True,
    cgroup="v2",
    image_id=ID,
    digest=DIGEST,
    size=7_000_000,
    store="/home/ann/store",
    store_free=50 << 30,
    uid=1000,
    groups=(1000, 44),
)
ABSENT = replace(GOOD, image_id="", digest="", size=-1)
SETTINGS = ContainerSettings("a:1", volumes=("/d:/d",))


def findings(
    *facts: ContainerFacts,
    settings: ContainerSettings = SETTINGS,
    checks_off: Any = (),
    IMAGE_FROM: str = "registry",
    **each: Any,
) -> List[Finding]:
    cluster = cluster_of(hosts(len(facts)), CHECKS_OFF=list(checks_off), IMAGE_FROM=IMAGE_FROM)
    known = {n: replace(fact, container=facts[n]) for n, fact in facts_of(cluster, **each).items()}
    found = check(cluster, known, Seen(), container=settings)
    return [finding for finding in found if finding.column == "container"]


def only(*facts: ContainerFacts, **more: Any) -> Finding:
    (found,) = findings(*facts, **more)
    return found


def test_nodes_that_were_not_asked_have_no_finding() -> None:
    cluster = cluster_of(hosts(2))
    assert not [found for found in check(cluster, facts_of(cluster), Seen()) if found.column == "container"]


def test_a_good_node() -> None:
    found = only(GOOD)
    assert (found.level, found.text) == ("ok", "podman 4.3.1 (rootless), sha256:444444444444, 7.0 MB")


def test_no_runtime_is_an_error_with_its_fix() -> None:
    found = only(ContainerFacts(problem="no podman", fix="install podman there"))
    assert (found.level, found.text, found.fix) == ("error", "no podman", "install podman there")
    assert not findings(ContainerFacts(problem="no podman"), checks_off=["container"])


def test_a_source_of_a_volume_that_is_missing() -> None:
    good, bad = findings(GOOD, replace(GOOD, missing=("/d", "/e"))), findings(GOOD, replace(GOOD, missing=("/d",)))
    (found,) = (one for one in good if one.level == "error")
    assert (found.node, found.text) == (1, "there is no /d and /e, the source of a volume")
    assert "`volumes`" in found.fix and len(bad) == 3


def test_an_image_that_is_missing() -> None:
    found = only(ABSENT)
    assert (found.level, found.text) == ("ok", "podman 4.3.1 (rootless): the image is not there, it will be pulled")
    found = only(ABSENT, settings=replace(SETTINGS, pull="never"))
    assert found.level == "error"
    assert "a:1 is not there" in found.text
    assert "podman pull a:1" in found.fix
    sif = replace(SETTINGS, image="/srv/a.sif", pull="never")
    assert "copy /srv/a.sif" in only(replace(ABSENT, runtime="apptainer"), settings=sif).fix


def test_room_for_an_image() -> None:
    small = replace(ABSENT, store_free=6_000_000)
    first, second = findings(GOOD, small)
    assert (first.level, second.level) == ("ok", "error")
    assert "needs 7.0 MB, 6.0 MB are free" in second.text
    assert "/home/ann/store" in second.fix
    assert only(small).level == "warn"  # no node knows its size
    assert only(replace(small, store_free=-1)).level == "ok"


def test_different_images_are_an_error_that_names_the_groups() -> None:
    other = replace(GOOD, image_id=OTHER_ID, digest=OTHER_DIGEST)
    found = [one for one in findings(GOOD, other, GOOD) if one.level == "error"]
    assert [one.node for one in found] == [1]
    assert "sha256:444444444444 on 10.0.0.1 and 10.0.0.3; sha256:555555555555 on 10.0.0.2" in found[0].text
    assert "always" in found[0].fix
    pulled = replace(SETTINGS, pull="always")
    assert {one.level for one in findings(GOOD, other, settings=pulled)} == {"ok"}
    assert {one.level for one in findings(GOOD, ABSENT)} == {"ok"}
    assert {one.level for one in findings(GOOD, other, IMAGE_FROM="laptop")} == {"ok"}
    never = replace(SETTINGS, pull="never")
    assert {one.level for one in findings(GOOD, ABSENT, settings=never, IMAGE_FROM="first")} == {"ok"}


def test_the_same_image_with_another_digest_is_no_error() -> None:
    loaded = replace(GOOD, digest=OTHER_DIGEST)  # of a file: podman writes another manifest
    docker = replace(GOOD, image_id=OTHER_ID)  # docker may take the manifest's digest as the id
    assert {one.level for one in findings(GOOD, loaded, docker)} == {"ok"}


GPUS: Dict[str, Any] = {"devices": (0, 1), "device_kind": "gpu"}


@pytest.mark.parametrize(
    ("runtime", "gpu", "level", "fix"),
    [
        ("podman", "cdi", "ok", ""),
        ("podman", "hook", "error", "nvidia-ctk cdi generate"),
        ("podman", "", "error", "nvidia-ctk cdi generate"),
        ("docker", "hook", "ok", ""),
        ("docker", "cdi", "ok", ""),
        ("docker", "", "error", "nvidia-ctk runtime configure"),
        ("apptainer", "", "ok", ""),
    ],
)
def test_gpus(runtime: str, gpu: str, level: str, fix: str) -> None:
    node = replace(GOOD, runtime=runtime, gpu=gpu)
    found = findings(node, **GPUS)[-1]
    assert (found.level, fix in found.fix) == (level, True)
    assert findings(node, device_kind="gpu")[-1].level == "ok"  # a node without GPUs
    chosen = replace(SETTINGS, options=("--device=nvidia.com/gpu=0",))
    assert findings(node, settings=chosen, **GPUS)[-1].level == "ok"


def test_limits_have_no_effect_in_rootless_containers_with_the_old_cgroups() -> None:
    limited = replace(SETTINGS, options=("--memory=8g",))
    old = replace(GOOD, cgroup="v1")
    assert findings(old, settings=limited)[-1].level == "warn"
    assert findings(old)[-1].level == "ok"
    assert findings(GOOD, settings=limited)[-1].level == "ok"
    assert findings(replace(old, rootless=False), settings=limited)[-1].level == "ok"


# -- the plan


def planned(*facts: ContainerFacts, **settings: Any) -> Any:
    cluster: Cluster = cluster_of(hosts(len(facts)), CONTAINER={"image": "a:1", **settings})
    known: Dict[int, Facts] = {n: replace(fact, container=facts[n]) for n, fact in facts_of(cluster).items()}
    return plan_of(cluster, facts=known)


def test_each_node_gets_its_container() -> None:
    made = planned(
        GOOD, replace(GOOD, runtime="docker", program="/bin/docker"), volumes=["/d:/d"], options=["--shm-size=8g"]
    )
    first, second = (node.container for node in made.nodes)
    assert first == {
        "runtime": "podman",
        "program": "/usr/bin/podman",
        "rootless": True,
        "image": ID,
        "reference": "a:1",
        "digest": DIGEST,
        "options": ["--shm-size=8g"],
        "volumes": ["/d:/d"],
        "process_limit": False,
        "uid": 1000,
        "groups": [1000, 44],
    }
    assert (second["runtime"], second["program"]) == ("docker", "/bin/docker")
    specs = [request.fields["spec"] for request in requests.start(made, {}, {}).phases[0].requests.values()]
    assert [spec["container"] for spec in specs] == [first, second]
    shown = as_dict(made)["nodes"][0]["container"]
    assert (shown["image"], shown["digest"], shown["runtime"]) == ("a:1", DIGEST, "podman")


def test_the_first_event_of_a_node_names_image_and_digest() -> None:
    for made, named in ((planned(GOOD), ("a:1", DIGEST, "podman")), (plan_of(cluster_of(hosts(1))), None)):
        header = requests.start(made, {}, {}).phases[0].requests[0].fields["spec"]["header"]
        assert container_of([{**header, "type": "job"}]) == named


def test_containers_of_nodes_that_differ() -> None:
    events = [
        {"type": "job", "image": "a:1", "digest": "", "runtime": "podman"},
        {"type": "job", "image": "a:1", "digest": "x", "runtime": "docker"},
        {"type": "started", "image": "no"},
        {"type": "job"},
    ]
    assert container_of(events) == ("a:1", "x", "podman, docker")
    assert container_of(events[:1]).text == "a:1, podman"
    assert container_of(events).text == "a:1 (x), podman, docker"
    assert container_of(events[2:]) is None


def test_without_an_image_no_node_has_one() -> None:
    made = plan_of(cluster_of(hosts(1)))
    assert made.nodes[0].container is None
    assert "container" not in as_dict(made)["nodes"][0]
    assert "container" not in requests.start(made, {}, {}).phases[0].requests[0].fields["spec"]


def test_an_image_that_comes_first_is_named_as_the_user_does() -> None:
    for made in (planned(ABSENT), planned(GOOD, pull="always")):
        container = made.nodes[0].container
        assert (container["image"], container["digest"]) == ("a:1", "")


def test_one_digest_names_the_image_of_all_nodes() -> None:
    made = planned(GOOD, replace(GOOD, digest=OTHER_DIGEST))
    assert [node.container["digest"] for node in made.nodes] == [f"sha256:{ID}"] * 2
    made = planned(GOOD, ABSENT)
    assert [node.container["digest"] for node in made.nodes] == [DIGEST, ""]


def test_a_plan_gets_the_image_that_was_brought() -> None:
    made = planned(GOOD, ABSENT)
    later = {node: replace(fact, container=GOOD) for node, fact in facts_of(made.cluster).items()}
    found = [node.container for node in with_containers(made, later).nodes]
    assert [(one["image"], one["digest"]) for one in found] == [(ID, DIGEST)] * 2


def test_a_node_without_a_runtime_cannot_be_planned() -> None:
    with pytest.raises(PreflightError, match="no podman"):
        planned(GOOD, ContainerFacts(problem="no podman", fix="x"))


def test_a_node_without_a_source_of_a_volume_cannot_be_planned() -> None:
    """Also where no check was made, as on machines that join."""
    with pytest.raises(PreflightError, match="there is no /d, the source of a volume"):
        planned(GOOD, replace(GOOD, missing=("/d",)))


def test_a_plan_needs_the_probe_for_containers() -> None:
    keys: Dict[str, Any] = {"DEVICE_KIND": "cpu", "ROOT_DIR": "/jobs", "START_PORT": 6000, "LEAD_PORT": 6001}
    cluster = cluster_of([{"host": "a", "address": "10.0.0.1"}], **keys)
    assert not needs_probe(cluster, job_of(cluster))
    assert needs_probe(cluster, job_of(cluster, image="a:1"))


def test_facts_are_read_from_an_answer() -> None:
    answer = {**vars(GOOD), "groups": [1000, 44], "of_a_later_version": 1}
    assert read_facts(0, json.loads(json.dumps({"container": answer}))).container == GOOD
    assert read_facts(0, {}).container is None
