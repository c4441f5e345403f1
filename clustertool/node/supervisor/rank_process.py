"""This module starts one rank: its environment, its log, its command. A rank gets only what the contract names."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
from functools import partial
from typing import TYPE_CHECKING, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from clustertool.model.job.start_error import after_prelude
from clustertool.model.launcher_variables import of_launcher, of_scheduler, of_task
from clustertool.node.storage import files
from clustertool.node.system import child_signals, programs
from clustertool.node.system.node_context import load_on_demand

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import ProcessCommand, RankSurroundings, Spec

_OF_MPI = ("OMPI_", "PMI", "PRTE_")
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
_WITH_PRELUDE = after_prelude("the command $1 does not exist here, or cannot be executed")


def login_variables(environ: Mapping[str, str]) -> Dict[str, str]:
    """Keep the variables that `ssh host command` has, without Paddle's variables, those that launchers compute, and proxies.

    Open MPI's stay, except those of a rank: in a login they are settings of the user.
    """
    settings = {name: value for name, value in environ.items() if name.startswith("OMPI_") and "_COMM_" not in name}
    kept = {name: value for name, value in inherited_variables(environ).items() if not name.startswith("PADDLE_")}
    return {**kept, **settings}


def inherited_variables(environ: Mapping[str, str]) -> Dict[str, str]:
    """Select the variables of the user's shell for a job on the user's machine: without launchers' variables and proxies."""
    return {name: value for name, value in environ.items() if not (of_launcher(name) or name.endswith("_proxy"))}


def allocation_variables(environ: Mapping[str, str]) -> Dict[str, str]:
    """Select the variables of the shell that has submitted an engine's job, and those of this job, but not of its task."""
    return {name: value for name, value in inherited_variables(environ).items() if not of_task(name)}


def environment(spec: RankSurroundings, rank: ProcessCommand, attempt: int, own: Mapping[str, str]) -> Dict[str, str]:
    """Build the environment of a rank: a base out of `own`, the plan's variables, and the secrets.

    The base is allocation_variables() for an engine, inherited_variables() on the user's machine, else login_variables().
    conf.py's paths stand in front of its PATH and LD_LIBRARY_PATH; PRELUDE is added. A launcher (`apart`) gets no variable of a
    scheduler, and nothing that only ranks have. In mode mpi, neither it nor its ranks have variables of MPI from the base: Open
    MPI would send those of its own node to all nodes.
    """
    base = allocation_variables if spec.get("engine") else inherited_variables if spec["here"] else login_variables
    apart = rank.get("apart", False)
    env = {name: value for name, value in base(own).items() if not (apart and of_scheduler(name))}
    if apart or spec.get("launcher"):
        env = {name: value for name, value in env.items() if not name.startswith(_OF_MPI)}
    if spec["first_path"]:
        env["PATH"] = spec["first_path"] + ":" + env.get("PATH", os.defpath)
    env.update(planned_variables(spec, rank, attempt))
    if spec["ld_library_path"]:
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, (spec["ld_library_path"], env.get("LD_LIBRARY_PATH"))))
    if spec["prelude"]:
        env["CLUSTERTOOL_PRELUDE"] = spec["prelude"]
    return env


def planned_variables(spec: RankSurroundings, rank: ProcessCommand, attempt: int) -> Dict[str, str]:
    """Merge the plan's variables of all ranks (not for launchers) and of this one, the secrets, and the attempt's number.

    If the plan has PyTorch's number of restarts, it becomes that of the attempt, too.
    """
    env = {**({} if rank.get("apart", False) else spec["common"]), **rank["env"], **spec.get("secrets", {})}
    env["CLUSTERTOOL_ATTEMPT"] = str(attempt)
    if "TORCHELASTIC_RESTART_COUNT" in env:
        env["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    return env


def command(spec: RankSurroundings, process: ProcessCommand) -> List[str]:
    """Return the argv of a process; with a prelude, a shell that runs the prelude before it."""
    argv = [str(argument) for argument in process["argv"]]
    if not spec["prelude"]:
        return argv
    shell = next((shell for shell in _SHELLS if os.path.exists(shell)), _SHELLS[-1])
    return [shell, "-c", _WITH_PRELUDE, "prelude", *argv]


@contextlib.contextmanager
def _limits_of_rank(umask: int, file_limit: int) -> Iterator[None]:
    """Set the umask, and the soft limit of open files unless it is 0, while a process is started; then restore both."""
    ours, limits = os.umask(umask), resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if file_limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (file_limit, limits[1]))
        yield
    finally:
        os.umask(ours)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _spawn(rank: RankStart, log: int, apart: bool) -> int:
    """Start a process in a session of its own, with output to `log`, and return its pid. apart: it is mpirun or its daemon.

    Raises OSError. In the child, `preexec_fn` makes system calls and takes no lock, so our other threads do not matter.
    """
    allow_reader = load_on_demand("system.prctl:allow_reader")  # a probe, which starts no rank, need not import it
    child = subprocess.Popen(
        rank.argv,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=rank.folder,
        env=rank.env,
        start_new_session=True,
        preexec_fn=partial(_prepare, apart, partial(allow_reader, os.getpid())),
    )
    child.returncode = 0  # reaped by the supervisor's one waitpid loop, not by subprocess
    return child.pid


def _prepare(apart: bool, allow_reader: Callable[[], None]) -> None:
    """Set the signal mask of a child process before its program, and allow the supervisor to read its stacks."""
    allow_reader()
    if apart:
        child_signals.block_for_launcher()
    else:
        child_signals.unblock()


def _working_directory(spec: Spec, job: int) -> str:
    """Return the job's directory as a path by its descriptor, or the path of the folder of --job-workspace.

    By the descriptor, another user who can replace a folder above it cannot choose what the rank runs. Raises FileNotFoundError
    if the job's directory was removed.
    """
    if spec["work_dir"] != spec["job_dir"]:
        return spec["work_dir"]
    if not os.fstat(job).st_nlink:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), spec["job_dir"])
    return files.path_of(job)


# What makes a process a rank: its command, its whole environment, and its working directory.
RankStart = NamedTuple("RankStart", [("argv", List[str]), ("env", Dict[str, str]), ("folder", str)])


def rank_start(spec: Spec, process: ProcessCommand, attempt: int, job: int) -> RankStart:
    """Compute the command line, environment and working directory of a rank. job: the descriptor of the job's directory.

    Raises FileNotFoundError if that was removed.
    """
    env, argv = environment(spec, process, attempt, os.environ), command(spec, process)
    if "PWD" in env:  # of the login, in another directory
        env["PWD"] = spec["work_dir"]
    return RankStart(argv, env, _working_directory(spec, job))


def start(
    spec: Spec,
    process: ProcessCommand,
    attempt: int,
    job: int,
    log: int,
    umask: int,
    file_limit: int,
    client: Optional[Tuple[List[str], Dict[str, str]]] = None,
) -> Tuple[int, str]:
    """Start a rank in a session of its own, writing straight into its log. Returns (pid, ""), or (127 or 126, reason).

    The reason of an error is also written to the log. job: the descriptor of the job's directory. file_limit: the soft limit of
    open files, where the supervisor has raised its own; else 0. client: command line and environment of what starts the rank's
    container.
    """
    try:
        rank = RankStart(*client, "/") if client else rank_start(spec, process, attempt, job)
        with _limits_of_rank(umask, file_limit):
            return _spawn(rank, log, process.get("apart", False)), ""
    except OSError as error:
        name, folder = (client[0] if client else command(spec, process))[0], ""
        with contextlib.suppress(OSError):  # the directory may be what is gone
            folder = "" if client else _working_directory(spec, job)
        code, why = programs.not_started(error, name, folder)
        with contextlib.suppress(OSError):
            files.write_all(log, f"clustertool: {why}\n".encode())
        return code, why
