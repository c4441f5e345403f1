"""A job on the test API server whose pods are containers of podman."""

from __future__ import annotations

import json

from tests import containers
from tests.cli import until
from tests.kubernetes.kube_site import KubeSite
from tests.kubernetes.pod_runtime import PodmanApiPod

TRAIN = """
    import json, os
    status = open("/proc/self/status").read().split("\\n")
    caps = [line.split()[1] for line in status if line.startswith(("CapEff", "NoNewPrivs"))]
    print(json.dumps([os.getuid(), os.environ["IMAGE_WORD"], os.environ["RANK"], *caps]), flush=True)
    with open(os.environ["CLUSTERTOOL_OUTPUT"] + "/model.txt", "w") as file:
        file.write("done")
"""


def test_a_job_in_containers_of_a_cluster(site: KubeSite, kubectl_here: None) -> None:
    containers.demand()
    site.runtime.kind = PodmanApiPod
    site.workspace(train_py=TRAIN)
    site.conf(KUBERNETES={"nodes": 2})
    done = site.inv("run", "--workspace", "job", "--all-ranks").ends(0)
    assert (site.folder / f"JOB{done.job}/model.txt").read_text() == "done"
    expected = [json.dumps([1000, "image", str(rank), "0000000000000000", "1"]) for rank in range(2)]
    for rank in range(2):
        assert f"[trainer {rank} ct-{done.job}-{rank}] {expected[rank]}" in done.out
    assert expected[1] in site.kubectl("logs", site.objects("Pod")[1]["metadata"]["name"])
    until(lambda: all(pod["status"]["phase"] == "Succeeded" for pod in site.objects("Pod")), 30)  # pod 0 was released
    site.inv("clean", "--job", done.job).ends(0)
    site.is_empty()
