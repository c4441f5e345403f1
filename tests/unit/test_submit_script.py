"""The script for sbatch: every option as the settings have it, and no value that could become another line or command."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from clustertool.model.slurm.shell_allocation import ShellAllocation
from clustertool.model.slurm.slurm_answers import RUNNING, SlurmJob, comment
from clustertool.model.slurm.slurm_settings import SlurmSettings, read_settings
from clustertool.model.slurm.submit_script import (
    SubmitOrder,
    cpus_warning,
    script,
    srun_command,
    step_script,
    submit_command,
    submitted_number,
)

ORDER = SubmitOrder("20261123-120000-abcd", "/shared/q", "/shared/q/bundle.pyz")


def test_the_script_has_what_slurm_needs() -> None:
    settings = read_settings(
        {
            "login": "login",
            "nodes": 2,
            "partition": "long",
            "account": "lab",
            "qos": "high",
            "time": "90m",
            "cpus_per_node": 8,
            "mem": "64G",
            "gpus_per_node": 2,
            "constraint": "[rack1|rack2]",
            "nodelist": "n[1-4]",
            "exclude": "n3",
            "reservation": "course",
            "options": ["--mail-type=END", "--mail-user=ada lovelace"],
        }
    )
    assert (
        script(settings, ORDER)
        == """\
#!/bin/sh
# Job 20261123-120000-abcd of clustertool. One task on each node joins the job; the ranks are its children.
#SBATCH --job-name=20261123-120000-abcd
#SBATCH "--comment=clustertool 20261123-120000-abcd"
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --partition=long
#SBATCH --account=lab
#SBATCH --qos=high
#SBATCH --time=0-01:30:00
#SBATCH --mem=64G
#SBATCH --gpus-per-node=2
#SBATCH "--constraint=[rack1|rack2]"
#SBATCH "--nodelist=n[1-4]"
#SBATCH --exclude=n3
#SBATCH --reservation=course
#SBATCH --chdir=/shared/q
#SBATCH --output=/shared/q/slurm.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --mail-type=END
#SBATCH "--mail-user=ada lovelace"
exec srun --nodes=2 --ntasks-per-node=1 --cpus-per-task=8 --cpu-bind=none --kill-on-bad-exit=0 --wait=0 --export=ALL \
--mpi=none sh -c 'trap "" USR1 USR2; exec "$@"' sh python3 /shared/q/bundle.pyz join
"""
    )


def test_what_is_not_given_is_left_to_slurm() -> None:
    lines = script(SlurmSettings(), ORDER).splitlines()
    options = [line.split("=")[0].split("--")[1] for line in lines if line.startswith("#SBATCH")]
    assert options == "job-name comment nodes ntasks-per-node chdir output open-mode no-requeue".split()
    assert "#SBATCH --nodes=1" in lines
    assert "--cpus-per-task" not in lines[-1] and "--nodes" not in lines[-1]  # srun uses the whole allocation


def test_exclusive_and_requeue() -> None:
    lines = script(SlurmSettings(exclusive=True, requeue=True), ORDER).splitlines()
    assert {"#SBATCH --exclusive", "#SBATCH --requeue"} <= set(lines)
    assert "#SBATCH --no-requeue" not in lines
    assert "#SBATCH --requeue" in script(SlurmSettings(requeue_on=("time_limit",)), ORDER).splitlines()


def test_an_elastic_job_keeps_its_allocation_when_a_node_fails() -> None:
    order = SubmitOrder("J", "/shared/q", "/shared/q/bundle.pyz", least=2)
    lines = script(SlurmSettings(nodes=4), order).splitlines()
    assert {"#SBATCH --nodes=2-4", "#SBATCH --no-kill"} <= set(lines)
    assert " --no-kill " in lines[-1] and "--kill-on-bad-exit=0 --wait=0" in lines[-1]
    assert not [line for line in lines[:-1] if "ntasks" in line] and " --ntasks-per-node=1 " in lines[-1]
    assert "--nodes" not in lines[-1], "srun uses all nodes that Slurm has found"
    step = step_script(SlurmSettings(nodes=3), order, ShellAllocation("7", nodes=3)).splitlines()[-1]
    assert " --nodes=3 " in step and " --no-kill " in step
    assert "--no-kill" not in script(SlurmSettings(nodes=4), ORDER)


def test_the_command_of_sbatch_has_the_same_options() -> None:
    settings = SlurmSettings(partition="long", options=("--mail-user=a b",))
    command = submit_command(settings, ORDER, "/shared/q/job.sh")
    assert command[:2] == ("sbatch", "--parsable") and command[-1] == "/shared/q/job.sh"
    lines = [line for line in script(settings, ORDER).splitlines() if line.startswith("#SBATCH")]
    assert [shlex.split(line[len("#SBATCH ") :])[0] for line in lines] == list(command[2:-1])
    assert command.index("--mail-user=a b") > command.index(f"--comment={comment(ORDER.job_id)}")


@pytest.mark.parametrize("name", ["a b", "a'b", 'a"b', "a\\b", "$(id)", "`id`", "a;b", "a#b", "é", "-x", "*"])
def test_a_path_is_one_argument_of_the_command(tmp_path: Path, name: str) -> None:
    """The last line is run by a real shell, with a program `srun` that prints its arguments."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    order = SubmitOrder("J", f"/s/{name}", f"/s/{name}/bundle.pyz", python=f"~/{name}/python")
    done = subprocess.run(
        ["sh", "-s"],
        input=script(SlurmSettings(), order),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/home/a b"},
    )
    printed = done.stdout.splitlines()
    assert printed[-3:] == [f"/home/a b/{name}/python", f"/s/{name}/bundle.pyz", "join"]
    assert printed[:-3] == list(srun_command(SlurmSettings(), order)[1:-3])


@pytest.mark.parametrize(
    ("output", "number"),
    [
        ("812\n", "812"),
        ("812;lab\n", "812"),
        ("812\nsbatch: This job will be charged to the account liu. 97% remaining\n", "812"),
        ("Welcome to 7\n812;lab\n", "812"),
        ("Submitted batch job\n", ""),
        ("", ""),
    ],
)
def test_the_id_in_the_output_of_sbatch(output: str, number: str) -> None:
    assert submitted_number(output) == number


def test_a_folder_is_no_pattern_of_sbatch() -> None:
    """sbatch replaces %j in --output, but not in --chdir; it does not do so where the path has a backslash."""
    lines = script(SlurmSettings(), SubmitOrder("J", "/s/%j", "/s/%j/b.pyz")).splitlines()
    assert "#SBATCH --output=/s/%%j/slurm.out" in lines and "#SBATCH --chdir=/s/%j" in lines
    lines = script(SlurmSettings(), SubmitOrder("J", "/s/\\%j", "/s/\\%j/b.pyz")).splitlines()
    assert '#SBATCH "--output=/s/\\\\\\\\%j/slurm.out"' in lines and '#SBATCH "--chdir=/s/\\\\%j"' in lines


def commented(text: str) -> SlurmJob:
    return SlurmJob(1, RUNNING, comment=text)


def test_a_comment_names_the_job() -> None:
    texts = (comment("J-1"), "", "J-1", "clustertool ", "clustertool ../x")
    assert [commented(text).clustertool_job for text in texts] == ["J-1", "", "", "", ""]


def test_the_comment_of_a_job_that_is_submitted_by_hand() -> None:
    """It names ROOT_DIR: a user may have several, and each conf.py shows the jobs of its own."""
    text = comment("J-1", "~/my jobs")
    assert commented(text).clustertool_job == "J-1"
    assert commented(text).is_by_hand("~/my jobs") and not commented(text).is_by_hand("~/my")
    others = (comment("J-1"), "", "other ~/my jobs", "clustertool ../x ~/my jobs")
    assert not any(commented(other).is_by_hand("~/my jobs") for other in others)


def test_a_warning_about_one_cpu() -> None:
    assert "its 4 ranks share it" in cpus_warning(SlurmSettings(), 4)
    assert "all its ranks share it; set cpus_per_node" in cpus_warning(SlurmSettings())
    assert "and its rank has no more; set cpus_per_node" in cpus_warning(SlurmSettings(), 1)
    for settings in (
        SlurmSettings(cpus_per_node=2),
        SlurmSettings(exclusive=True),
        SlurmSettings(options=("--exclusive=user",)),
    ):
        assert not cpus_warning(settings, 4)
