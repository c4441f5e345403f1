"""Devices get into a rank's container by options of the runtime's client, which depend on their kind. Pure.

A container gets all devices of its node, and the planned variables (CUDA_VISIBLE_DEVICES ...) select among them, as without a
container. A container with some of them would number these from 0, and the planned numbers are those of the node.
"""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

from clustertool.model.container.container_names import APPTAINER, DOCKER

# kind -> (patterns of device files and of their folders, files and folders of the driver that programs load)
FILES: Dict[str, Tuple[Tuple[str, ...], Tuple[str, ...]]] = {
    "dcu": (("/dev/kfd", "/dev/mkfd", "/dev/dri"), ("/opt/hyhal",)),
    "xpu": (("/dev/xpu[0-9]*", "/dev/xpuctrl"), ()),
    "npu": (
        ("/dev/davinci[0-9]*", "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"),
        ("/usr/local/Ascend/driver", "/usr/local/dcmi", "/etc/ascend_install.info", "/etc/hccn.conf"),
    ),
}
# What in an option of the user states which NVIDIA GPUs a container gets
CHOSEN = ("--gpus", "nvidia.com/gpu", "--nv")


def patterns(kind: str) -> List[str]:
    """List what a node searches (glob) for `present` of device_options."""
    return [pattern for part in FILES.get(kind, ()) for pattern in part]


def device_options(runtime: str, kind: str, present: Sequence[str], chosen: Sequence[str] = ()) -> List[str]:
    """Build the options for a rank that has devices of `kind`.

    runtime: docker, podman or apptainer. present: the paths on the node that match `patterns(kind)`. chosen: the user's
    options; if they state GPUs, none are added.
    """
    if kind == "gpu":
        if any(mark in option for option in chosen for mark in CHOSEN):
            return []
        by_runtime = {DOCKER: ["--gpus", "all"], APPTAINER: ["--nv"]}
        return by_runtime.get(runtime, ["--device", "nvidia.com/gpu=all"])
    drivers = FILES.get(kind, ((), ()))[1]
    mounted = [path for path in present if path in drivers]
    if runtime == APPTAINER:  # it has the node's /dev
        options = ["--rocm"] if kind == "dcu" else []
        return options + [part for path in mounted for part in ("--bind", f"{path}:{path}:ro")]
    options = [part for path in present if path not in mounted for part in ("--device", path)]
    return options + [part for path in mounted for part in ("--volume", f"{path}:{path}:ro")]
