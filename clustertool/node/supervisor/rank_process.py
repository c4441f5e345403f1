"""This module starts one rank: its environment, its log, its command. A rank gets only what the contract names."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import subprocess
import zlib
from typing import TYPE_CHECKING, Dict, Iterator, List, Mapping, Tuple, Union

from clustertool.node.storage import files
from clustertool.node.system import child_signals

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import ProcessCommand, RankSurroundings, Spec

NOT_FOUND, NOT_EXECUTABLE = 127, 126  # with the code of a shell
_LINE = 4096  # bytes in which the last line of a log is searched
_DIFFERENT = rb"0x[0-9a-fA-F]+|[0-9]+"  # in the same error of several ranks: rank, port, pid, time, address
_OF_OTHERS = (  # what a rank prints after another one has failed
    rb"connection (reset|refused|closed)|broken ?pipe|closed by peer|ConnectionError|peer .* closed"
    rb"|nccl.*(remote|abort|timeout)|gloo.*(closed|reset|timeout)"
)
_KEPT = ("HOME", "USER", "LOGNAME", "SHELL", "LANG", "TERM", "PATH")
_LAUNCHER = (
    r"(PADDLE_|CLUSTERTOOL_|OMPI_|TORCHELASTIC_|PET_|DISTRIBUTED_TRAINER_ENDPOINTS$|TRAINER_PORTS_NUM$|POD_(IP|NAME)$|TRAINING_ROLE$)"
    r"|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|MASTER_ADDR|MASTER_PORT|STAGE_ID|STAGE_NUM)$"
    r"|FLAGS_(selected_\w+|START_PORT)$|HETER_DEVICE_TYPE$|.*_proxy$"
)
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
# The prelude is shell by nature; it travels in the environment and not on the command line, where `ps` shows it.
_WITH_PRELUDE = 'eval "$CLUSTERTOOL_PRELUDE" || exit 126; unset CLUSTERTOOL_PRELUDE; exec "$@"'


def base_environment(environ: Mapping[str, str]) -> Dict[str, str]:
    """What `ssh host` without a terminal has, and nothing else of it."""
    return {name: environ[name] for name in _KEPT if name in environ}


def inherited(environ: Mapping[str, str]) -> Dict[str, str]:
    """For a job on the machine of its user: the variables of the user's shell, without those that launchers set."""
    return {name: value for name, value in environ.items() if not re.match(_LAUNCHER, name)}


def environment(
    spec: RankSurroundings, process: ProcessCommand, attempt: int, own: Mapping[str, str]
) -> Dict[str, str]:
    """The node's base, the plan's variables, the secrets; conf.py's LD_LIBRARY_PATH in front of the node's own."""
    env = inherited(own) if spec["here"] else base_environment(own)
    if spec["first_path"]:
        env["PATH"] = spec["first_path"] + ":" + env.get("PATH", os.defpath)
    env.update(spec["common"])
    env.update(process["env"])
    env.update(spec.get("secrets", {}))
    if spec["ld_library_path"]:
        rest = env.get("LD_LIBRARY_PATH") or own.get("LD_LIBRARY_PATH", "")
        env["LD_LIBRARY_PATH"] = ":".join(part for part in (spec["ld_library_path"], rest) if part)
    env["CLUSTERTOOL_ATTEMPT"] = str(attempt)
    if spec["prelude"]:
        env["CLUSTERTOOL_PRELUDE"] = spec["prelude"]
    return env


def command(spec: RankSurroundings, process: ProcessCommand) -> List[str]:
    argv = [str(argument) for argument in process["argv"]]
    if not spec["prelude"]:
        return argv
    shell = next(shell for shell in _SHELLS if os.path.exists(shell))
    return [shell, "-c", _WITH_PRELUDE, "prelude", *argv]


@contextlib.contextmanager
def _as_the_rank(folder: Union[int, str], umask: int, file_limit: int) -> Iterator[None]:
    """What a process has from the one that starts it. Raises OSError for a folder that cannot be entered."""
    ours, limits = os.umask(umask), resource.getrlimit(resource.RLIMIT_NOFILE)
    before = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        os.chdir(folder)
        if file_limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (file_limit, limits[1]))
        yield
    finally:
        os.umask(ours)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.fchdir(before)
        os.close(before)


def _spawn(argv: List[str], env: Dict[str, str], log: int) -> int:
    """The pid of a process in a session of its own. Raises OSError.

    In the child, `preexec_fn` makes one system call and takes no lock, so our other threads do not matter.
    """
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=env,
        start_new_session=True,
        preexec_fn=child_signals.unblock,
    )
    child.returncode = 0  # reaped by the supervisor's one waitpid loop, not by subprocess
    return child.pid


def _working_directory(spec: Spec, job: int) -> Union[int, str]:
    """The job's directory by its descriptor: another user who can replace a folder above it cannot choose what the rank runs.

    With --job-workspace it is another folder, by its path. Raises FileNotFoundError if the job's directory was removed.
    """
    if spec["work_dir"] != spec["job_dir"]:
        return str(spec["work_dir"])
    if not os.fstat(job).st_nlink:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), spec["job_dir"])
    return job


def start(
    spec: Spec, process: ProcessCommand, attempt: int, job: int, log: int, umask: int, file_limit: int
) -> Tuple[int, str]:
    """Start a rank in a session of its own, writing straight into its log. Returns (pid, "") or (127 or 126, why).

    `job`: the descriptor of the job's directory. `file_limit`: the user's own soft limit, where the supervisor has raised its
    own; else 0.
    """
    env, argv = environment(spec, process, attempt, os.environ), command(spec, process)
    try:
        with _as_the_rank(_working_directory(spec, job), umask, file_limit):
            return _spawn(argv, env, log), ""
    except OSError as error:
        what = error.filename if error.filename is not None else process["argv"][0]
        why = f"cannot start {what!r}: {error.strerror}"
        with contextlib.suppress(OSError):
            files.write_all(log, f"clustertool: {why}\n".encode())
        return (NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE), why


def last_line(job: int, log: str) -> Tuple[int, bool]:
    """Of the last line of a log that is not blank: a number, and whether it is about a lost connection to another process.

    Lines that differ in digits only have the same number. (0, False) if there is none.
    """
    with contextlib.suppress(OSError):
        fd = files.open_read(job, log)
        try:
            text = os.pread(fd, _LINE, max(0, os.fstat(fd).st_size - _LINE)).strip()
        finally:
            os.close(fd)
        line = text[text.rfind(b"\n") + 1 :]
        if line:
            return zlib.crc32(re.sub(_DIFFERENT, b"0", line)), re.search(_OF_OTHERS, line, re.IGNORECASE) is not None
    return 0, False
