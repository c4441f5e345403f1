"""Which options give a container its devices: docs/containers.md names the page of each."""

from __future__ import annotations

import pytest

from clustertool.model.config.cluster import DEVICE_KINDS
from clustertool.model.container.container_command import device_options, device_patterns

ASCEND = ["/dev/davinci0", "/dev/davinci1", "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"]


@pytest.mark.parametrize(
    ("runtime", "kind", "present", "expected"),
    [
        ("docker", "gpu", [], "--gpus all"),
        ("podman", "gpu", [], "--device nvidia.com/gpu=all"),
        ("apptainer", "gpu", [], "--nv"),
        ("docker", "dcu", ["/dev/kfd", "/dev/dri"], "--device /dev/kfd --device /dev/dri"),
        (
            "podman",
            "dcu",
            ["/dev/kfd", "/dev/mkfd", "/dev/dri", "/opt/hyhal"],
            "--device /dev/kfd --device /dev/mkfd --device /dev/dri --volume /opt/hyhal:/opt/hyhal:ro",
        ),
        ("apptainer", "dcu", ["/dev/kfd", "/dev/dri", "/opt/hyhal"], "--rocm --bind /opt/hyhal:/opt/hyhal:ro"),
        ("docker", "xpu", ["/dev/xpu0", "/dev/xpuctrl"], "--device /dev/xpu0 --device /dev/xpuctrl"),
        ("apptainer", "xpu", ["/dev/xpu0", "/dev/xpuctrl"], ""),
        (
            "podman",
            "npu",
            [*ASCEND, "/usr/local/Ascend/driver"],
            " ".join(f"--device {path}" for path in ASCEND)
            + " --volume /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro",
        ),
        ("apptainer", "npu", [*ASCEND, "/etc/hccn.conf"], "--bind /etc/hccn.conf:/etc/hccn.conf:ro"),
        ("docker", "cpu", [], ""),
    ],
)
def test_options_of_each_kind_and_runtime(runtime: str, kind: str, present: list[str], expected: str) -> None:
    assert " ".join(device_options(runtime, kind, present)) == expected


@pytest.mark.parametrize("chosen", [["--gpus", '"device=0,1"'], ["--device", "nvidia.com/gpu=0"], ["--nvccli"]])
def test_gpus_that_the_user_has_stated_are_not_added_to(chosen: list[str]) -> None:
    assert device_options("docker", "gpu", [], chosen) == []


def test_each_kind_is_known() -> None:
    """A kind without files is one of a vendor's runtime, or has no devices."""
    assert {kind for kind in DEVICE_KINDS if not device_patterns(kind)} == {"auto", "cpu", "gpu"}
