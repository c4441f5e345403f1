"""A job in an allocation that is there: what it takes from the settings, and the script of its step."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from clustertool.errors import UsageError
from clustertool.fleet import this_machine
from clustertool.model.slurm.shell_allocation import ShellAllocation, for_srun, ignored_keys, shell_allocation
from clustertool.model.slurm.slurm_settings import SlurmSettings, read_settings
from clustertool.model.slurm.submit_script import SubmitOrder, step_script

SALLOC = {"SLURM_JOB_ID": "812", "SLURM_JOB_CPUS_PER_NODE": "4(x2),16"}
ORDER = SubmitOrder("20261123-120000-abcd", "/shared/q", "/shared/q/bundle.pyz")


@pytest.mark.parametrize(
    "environ, found",
    [
        (SALLOC, ShellAllocation("812", cpus=4)),
        ({"SLURM_JOB_ID": "812"}, ShellAllocation("812")),
        ({**SALLOC, "SLURM_STEP_ID": "4294967290"}, ShellAllocation("812", cpus=4)),  # salloc's shell on a node
        ({**SALLOC, "SLURM_STEP_ID": "0"}, ShellAllocation("812", cpus=4, in_step=True)),  # srun --pty
        ({**SALLOC, "CLUSTERTOOL_JOB": "X"}, None),  # a rank: its job uses the allocation
        ({**SALLOC, "SLURM_JOB_ID": ""}, None),
        ({**SALLOC, "SLURM_JOB_ID": "12;reboot"}, None),
        ({}, None),
    ],
)
def test_the_allocation_of_a_shell(environ: dict[str, str], found: ShellAllocation | None) -> None:
    assert shell_allocation(environ) == found


def test_a_plan_shows_what_the_nodes_have() -> None:
    found = shell_allocation({**SALLOC, "SLURM_GPUS_PER_NODE": "a100:2"})
    assert found is not None
    assert found.with_resources(SlurmSettings(nodes=3)) == SlurmSettings(
        nodes=3, cpus_per_node=4, gpus_per_node="a100:2"
    )
    assert found.with_resources(SlurmSettings(cpus_per_node=2)).cpus_per_node == 2


def test_a_step_has_no_settings_that_ask_for_resources() -> None:
    given = {
        "login": "login",
        "partition": "gpu",
        "time": "1h",
        "cpus_per_node": 2,
        "requeue": True,
        "options": ["--nice"],
    }
    settings = read_settings(given)
    assert ShellAllocation("812", 3, 4).step(settings) == SlurmSettings(login="login", nodes=3, cpus_per_node=2)
    assert ignored_keys(settings) == ("partition", "time", "requeue", "options")
    assert ignored_keys(SlurmSettings(login="login", nodes=2, cpus_per_node=2)) == ()
    kept = {each.name for each in fields(SlurmSettings)} - {"login", "nodes", "cpus_per_node"}
    everything = SlurmSettings(**dict.fromkeys(kept, "x"))  # type: ignore[arg-type]
    assert set(ignored_keys(everything)) == kept


@pytest.mark.parametrize("wanted, nodes", [(0, 3), (1, 1), (3, 3)])
def test_the_number_of_nodes(wanted: int, nodes: int) -> None:
    assert ShellAllocation("812", 3).step(SlurmSettings(nodes=wanted)).nodes == nodes


@pytest.mark.parametrize(
    "settings, text",
    [
        (SlurmSettings(nodes=4), "has 3 nodes, and the job needs 4"),
        (SlurmSettings(cpus_per_node=5), "has 4 CPUs on a node, and the job needs 5"),
    ],
)
def test_an_allocation_that_is_too_small(settings: SlurmSettings, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        ShellAllocation("812", 3, 4).step(settings)
    assert text in caught.value.what and caught.value.code == 64


@pytest.mark.parametrize(
    "cpus, settings, ranks, text",
    [
        (1, SlurmSettings(), 2, "the allocation 812 has 1 CPU on a node, and its 2 ranks share it"),
        (1, SlurmSettings(), 0, "and all its ranks share it"),
        (1, SlurmSettings(), 1, "and its rank has no more"),
        (3, SlurmSettings(), 4, "has 3 CPUs on a node, and its 4 ranks share them"),
        (4, SlurmSettings(), 4, ""),
        (1, SlurmSettings(cpus_per_node=1), 2, ""),
        (0, SlurmSettings(), 2, ""),
    ],
)
def test_a_warning_about_few_processors(cpus: int, settings: SlurmSettings, ranks: int, text: str) -> None:
    warning = ShellAllocation("812", 1, cpus).cpus_warning(settings, ranks)
    assert text in warning and bool(text) == bool(warning)


def test_the_script_of_a_step() -> None:
    settings = SlurmSettings(nodes=2, cpus_per_node=3)
    assert (
        step_script(settings, ORDER, ShellAllocation("812", 2))
        == """\
#!/bin/sh
# Job 20261123-120000-abcd of clustertool, a step of the allocation 812. One task on each node joins the job.
cd /shared/q || exit
exec </dev/null >>slurm.out 2>&1
exec srun --jobid=812 '--job-name=clustertool 20261123-120000-abcd' --ntasks=2 --immediate=10 --nodes=2 --ntasks-per-node=1 \
--cpus-per-task=3 --cpu-bind=none --kill-on-bad-exit=0 --wait=0 \
--export=ALL --mpi=none \
sh -c 'trap "" USR1 USR2; exec "$@"' sh env SLURM_JOB_NAME=20261123-120000-abcd python3 /shared/q/bundle.pyz join
"""
    )
    shared = step_script(settings, ORDER, ShellAllocation("812", 2, in_step=True))
    assert " --overlap " in shared and "--immediate" not in shared


def test_no_folder_becomes_a_command(tmp_path: Path) -> None:
    folder = tmp_path / "a b'c$(touch evil)\n;d"
    folder.mkdir()
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$PWD" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    order = SubmitOrder("X", str(folder), f"{folder}/bundle.pyz")
    script = step_script(SlurmSettings(nodes=1), order, ShellAllocation("812", 1))
    subprocess.run(["/bin/sh"], input=script, env={"PATH": str(tmp_path)}, cwd=tmp_path, text=True, check=True)
    text = (folder / "slurm.out").read_text()
    assert text.startswith(f"{folder}\n--jobid=812\n--job-name=clustertool X\n") and text.endswith(
        f"{folder}/bundle.pyz\njoin\n"
    )
    assert not list(tmp_path.rglob("evil")) and shlex.quote(str(folder)) in script


def test_srun_reads_no_options_of_the_shell() -> None:
    environ = {
        **SALLOC,
        "SLURM_NTASKS": "8",
        "SRUN_CPUS_PER_TASK": "4",
        "SLURM_CONF": "/etc/s.conf",
        "HOME": "/h",
        "PMI_RANK": "0",
    }
    assert for_srun(environ) == {"SLURM_JOB_ID": "812", "SLURM_CONF": "/etc/s.conf", "HOME": "/h"}


def test_this_machine_is_known_by_its_facts() -> None:
    boot, _, net = this_machine.machine().partition("/")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert net == os.readlink("/proc/self/ns/net")
