"""The script of a job has one command, which starts a task on each node (sbatch(1), srun(1)).

sbatch gets it with options. In an allocation that is there, a shell runs it.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Optional, Tuple

from clustertool.model.paths import STEP_OUTPUT
from clustertool.model.slurm.shell_allocation import ShellAllocation
from clustertool.model.slurm.slurm_answers import comment
from clustertool.model.slurm.slurm_settings import SlurmSettings

SCRIPT = "job.sh"
# --signal=USR1@60 may come before the program has its handlers.
_SURVIVE = 'trap "" USR1 USR2; exec "$@"'
_FREE = 10  # seconds in which the processors of an allocation must become free


@dataclass(frozen=True)
class SubmitOrder:
    """What a submission has besides the settings. name: as squeue shows it; "" for the job id.

    folder: of the submission, an absolute path on the shared file system; it exists before the job starts. bundle: the path
    of the program that joins. python: its interpreter on the nodes, `~/` is allowed. root_dir: ROOT_DIR as conf.py has it if
    the job is submitted by hand: no folder in ROOT_DIR shows that it is queued. least: with how many nodes an elastic job can
    start, of at most the nodes of the settings; 0: the job is not elastic.
    """

    job_id: str
    folder: str
    bundle: str
    python: str = "python3"
    name: str = ""
    root_dir: str = ""
    least: int = 0


def script(settings: SlurmSettings, order: SubmitOrder) -> str:
    """Write the text of the script for sbatch, with its options and the srun that starts the tasks. It has no secret."""
    lines = [
        "#!/bin/sh",
        f"# Job {order.job_id} of clustertool. One task on each node joins the job; the ranks are its children.",
        *(f"#SBATCH {_quote_for_sbatch(option)}" for option in sbatch_options(settings, order)),
        "exec " + " ".join(map(_shell_argument, srun_command(settings, order))),
    ]
    return "\n".join(lines) + "\n"


def step_script(settings: SlurmSettings, order: SubmitOrder, allocation: ShellAllocation) -> str:
    """Write the text of the shell script that runs srun in an allocation, with its output in the submission's folder.

    settings: those of allocation.step().
    """
    lines = [
        "#!/bin/sh",
        f"# Job {order.job_id} of clustertool, a step of the allocation {allocation.job}. One task on each node joins the job.",
        f"cd {shlex.quote(order.folder)} || exit",
        f"exec </dev/null >>{STEP_OUTPUT} 2>&1",
        "exec " + " ".join(map(_shell_argument, srun_command(settings, order, allocation))),
    ]
    return "\n".join(lines) + "\n"


def submit_command(settings: SlurmSettings, order: SubmitOrder, path: str) -> Tuple[str, ...]:
    """Build the command that submits the script at this path, and prints the id of the Slurm job (and ;CLUSTER).

    The options of the script are repeated, because variables SBATCH_* of the login host have priority over those of a script.
    """
    return ("sbatch", "--parsable", *sbatch_options(settings, order), path)


def submitted_number(output: str) -> str:
    """Read the id of the Slurm job in the output of submit_command(), among lines of a site's wrapper; "" if there is none."""
    found = re.search(r"^([0-9]{1,10})(?:;[\w.-]+)?$", output, re.MULTILINE | re.ASCII)
    return found[1] if found else ""


def sbatch_options(settings: SlurmSettings, order: SubmitOrder) -> Tuple[str, ...]:
    """Build the long options of sbatch. Those of `settings.options` are the last ones, and so have priority.

    An elastic job has a range of nodes, and --no-kill: it goes on when a node fails.
    """
    given = [
        ("job-name", _job_name(order)),
        ("comment", comment(order.job_id, order.root_dir)),
        ("nodes", f"{order.least}-{settings.node_count}" if order.least else str(settings.node_count)),
        # With a number of tasks for each node Slurm 22.05 gives the least number of nodes, also where more are free.
        ("ntasks-per-node", "" if order.least else "1"),
        ("cpus-per-task", str(settings.cpus_per_node or "")),
        *((name.replace("_", "-"), getattr(settings, name)) for name in _AS_THEY_ARE),
        ("chdir", order.folder),
        ("output", _escape_pattern(f"{order.folder}/{STEP_OUTPUT}")),
        ("open-mode", "append"),
    ]
    return (
        *(f"--{name}={value}" for name, value in given if value),
        *(["--exclusive"] if settings.exclusive else []),
        *(["--no-kill"] if order.least else []),  # the allocation stays when a node fails
        "--requeue" if settings.goes_back else "--no-requeue",
        *settings.options,
    )


_AS_THEY_ARE = "partition account qos time mem gpus_per_node constraint nodelist exclude reservation".split()


def srun_command(
    settings: SlurmSettings, order: SubmitOrder, allocation: Optional[ShellAllocation] = None
) -> Tuple[str, ...]:
    """Build the command that starts one task on each node, which runs the bundle.

    allocation: that of the shell, if it is used.
    """
    # srun does not take over --cpus-per-task of the allocation since Slurm 22.05.
    cpus = (f"--cpus-per-task={settings.cpus_per_node}",) if settings.cpus_per_node else ()
    counted = settings.nodes and (allocation or not order.least)
    nodes = (f"--nodes={settings.nodes}",) if counted else ()  # else all of the allocation
    return (
        "srun",
        *(_step_options(settings, order, allocation) if allocation else ()),
        *nodes,
        "--ntasks-per-node=1",
        *cpus,
        *(["--no-kill"] if order.least else []),  # the step goes on when a node fails
        "--cpu-bind=none",  # ranks are children of the task, and choose their processors themselves
        "--kill-on-bad-exit=0",  # the coordinator decides what the failure of a node means
        "--wait=0",  # nodes may end at different times
        "--export=ALL",
        "--mpi=none",  # the task is no rank: a PMI of the site's default would wait for ranks that call it
        *("sh", "-c", _SURVIVE, "sh"),
        # Of a step it would be the name of the step.
        *(("env", f"SLURM_JOB_NAME={_job_name(order)}") if allocation else ()),
        order.python,
        order.bundle,
        "join",
    )


def _step_options(settings: SlurmSettings, order: SubmitOrder, allocation: ShellAllocation) -> Tuple[str, ...]:
    """Build the options by which srun runs as a step of this allocation."""
    return (
        f"--jobid={allocation.job}",
        f"--job-name={comment(order.job_id)}",  # a step has no comment
        f"--ntasks={settings.node_count}",
        *(["--het-group=0"] if allocation.heterogeneous else []),
        # A shell in a step has all that was allocated. Other steps share nothing: the job does not wait for them long.
        "--overlap" if allocation.in_step else f"--immediate={_FREE}",
    )


def _job_name(order: SubmitOrder) -> str:
    """Return the name of the Slurm job: the user's name of the job, else its id."""
    return order.name or order.job_id


def cpus_warning(settings: SlurmSettings, ranks: int = 0) -> str:
    """Return a warning if ranks would share the one processor that Slurm gives to a task by default; "" if they do not.

    ranks: on each node, 0 if their number is not known.
    """
    sized = any(option.startswith(("--cpus-per-gpu", "--exclusive")) for option in settings.options)
    if settings.cpus_per_node or settings.exclusive or sized:
        return ""
    sharing = {0: "all its ranks share it", 1: "its rank has no more"}.get(ranks, f"its {ranks} ranks share it")
    return (
        f"Slurm gives this job 1 CPU on each node, unless its partition has whole nodes only, and {sharing}; "
        "set cpus_per_node or exclusive in SLURM, or give --cpus-per-node N or --exclusive"
    )


def _quote_for_sbatch(text: str) -> str:
    """Quote an option for a line of #SBATCH. Unlike in a shell, a backslash escapes also in single quotes there."""
    if re.fullmatch(r"[\w@%+=:,./-]*", text, re.ASCII):
        return text
    escaped = re.sub(r'([\\"])', r"\\\1", text)
    return f'"{escaped}"'


def _escape_pattern(path: str) -> str:
    """Escape the path of a file where Slurm expects a pattern: %j would be the job id. A backslash switches patterns off."""
    return path.replace("\\", "\\\\") if "\\" in path else path.replace("%", "%%")


def _shell_argument(text: str) -> str:
    """Quote an argument for a shell; `~/` at its beginning becomes "$HOME"/."""
    return '"$HOME"/' + shlex.quote(text[2:]) if text.startswith("~/") else shlex.quote(text)
