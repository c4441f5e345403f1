"""Jobs on real GPUs: NCCL, a GPU that ranks share, NVML, and the test of a framework. `make test-gpu` runs them."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import GpuSite, driver, unable
from tests.node.test_nvml import sample

pytestmark = pytest.mark.gpu
PROGRAMS = Path(__file__).with_name("programs")


def trained(here: GpuSite, backend: str, *options: object, **variables: str) -> list[dict[str, Any]]:
    """What the ranks of a training report. All of them have the same model in the end, and it has learned."""
    here.workspace(".")
    shutil.copy(PROGRAMS / "train.py", here.folder)
    done = here.module("clustertool.verbs.clusterrun", *options, "train.py", backend, **variables).ends(0)
    logs = sorted((here.folder / "log").glob("workerlog.*"))
    reports = [json.loads(line) for log in logs for line in log.read_text().splitlines() if line.startswith("{")]
    assert len(reports) == len(logs) > 0, done.err
    assert all(rank["losses"] == reports[0]["losses"] for rank in reports)
    assert all(rank["weights"] == pytest.approx(reports[0]["weights"]) for rank in reports)
    assert reports[0]["losses"][-1] < reports[0]["losses"][0] / 2
    return reports


def smi(*fields: str) -> list[list[str]]:
    """What nvidia-smi has for each GPU."""
    program = shutil.which("nvidia-smi")
    if not program:
        unable("needs nvidia-smi")
    query = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    text = subprocess.run(query, check=True, capture_output=True, text=True, timeout=60).stdout
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]


def bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()


def test_one_rank_with_nccl(here, gpus):
    [rank] = trained(here, "nccl", f"--gpus={gpus[-1]}")
    assert rank["seen"] == 1
    assert rank["env"] == {
        "CUDA_VISIBLE_DEVICES": str(gpus[-1]),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "FLAGS_selected_gpus": "0",
        "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": None,
    }
    assert bare(rank["uuid"]) == bare(smi("uuid")[gpus[-1]][0]), "the number means the same to CUDA and nvidia-smi"


def test_two_ranks_that_share_a_gpu(here, gpus):
    """Each sees its own one, number 0. NCCL refuses two ranks on one device, gloo does not."""
    ranks = trained(here, "gloo", f"--gpus={gpus[0]}", "--nproc-per-node=2")
    assert [rank["seen"] for rank in ranks] == [1, 1]
    assert [rank["env"]["LOCAL_RANK"] for rank in ranks] == ["0", "1"]
    assert {rank["env"]["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {str(gpus[0])}
    assert {rank["env"]["FLAGS_selected_gpus"] for rank in ranks} == {"0"}
    assert len({rank["uuid"] for rank in ranks}) == 1


def test_each_rank_takes_the_gpu_of_its_local_rank(here, gpus):
    if len(gpus) < 2:
        pytest.skip(f"needs two GPUs, and there is {len(gpus)}")
    last, first = gpus[-1], gpus[0]
    ranks = trained(here, "nccl", f"--gpus={last},{first}")
    assert [rank["seen"] for rank in ranks] == [2, 2]
    assert {rank["env"]["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {f"{last},{first}"}
    uuids = [bare(row[0]) for row in smi("uuid")]
    assert [bare(rank["uuid"]) for rank in ranks] == [uuids[last], uuids[first]]


HANGS = """
    import os, time, torch, torch.distributed as dist
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    dist.all_reduce(torch.ones(8, device="cuda"))
    torch.cuda.synchronize()
    print(os.environ["NCCL_RAS_ADDR"], flush=True)
    time.sleep(1000)
"""


def test_torch_writes_what_it_has_recorded_when_a_job_hangs(here, gpus):
    here.workspace(".", hangs_py=HANGS)
    options = (f"--gpus={gpus[0]}", "--hang-timeout=10", "--on-hang=abort")
    done = here.module("clustertool.verbs.clusterrun", *options, "hangs.py").ends(124)
    assert "hang: trainer 0" in done.last and "127.0.0.1:" in done.out
    [dump] = here.folder.glob("**/.clustertool/flight/rank-0")
    assert {entry["profiling_name"] for entry in pickle.loads(dump.read_bytes())["entries"]} == {"nccl:all_reduce"}


def test_nvml_agrees_with_nvidia_smi(bench, gpus):
    """What the agent of a node reads, next to what the driver's own program prints."""
    found = sample(bench.nodes(1, env=driver(), DEVICE_KIND="auto")[0])
    rows = smi("index", "name", "uuid", "memory.total", "driver_version", "temperature.gpu", "power.draw")
    assert (found["kind"], found["problem"]) == ("gpu", "")
    assert tuple(found["ids"]) == gpus == tuple(int(row[0]) for row in rows)
    for device, (_, name, uuid, memory, version, temperature, power) in zip(found["devices"], rows, strict=True):
        assert (device["model"], device["uuid"], found["driver"]) == (name, uuid, version)
        mib = device["memory_total"] / (1 << 20)
        assert mib == pytest.approx(float(memory), rel=0.02)  # one of both may count what the driver reserves
        assert agree(device["temperature"], temperature, 5)
        assert agree(device["power"], power, 100)
        assert device["problem"] == ""


def agree(ours: float | None, theirs: str, difference: float) -> bool:
    """Two readings, a moment apart; a GPU of a virtual machine may have none of them."""
    return ours is None or "N/A" in theirs or abs(ours - float(theirs)) <= difference


def test_check_tries_pytorch_on_each_gpu(here, gpus):
    here.workspace(".")
    shutil.copy(PROGRAMS / "check_here.py", here.folder)
    done = here.module("check_here", "--framework", "torch", "--json", "--timeout", "120")
    [row] = done.json["nodes"]
    assert row["findings"]["framework"]["level"] == "ok", done.out
    ranks: list[Mapping[str, Any]] = done.json["framework"]["ranks"]
    assert [(rank["at"], rank["backend"], rank["failed"]) for rank in ranks] == [("done", "nccl", "")] * len(gpus)
    assert [rank["what"] for rank in ranks] == [f"device {gpu}" for gpu in gpus]
