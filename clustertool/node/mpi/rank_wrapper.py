"""The rank wrapper is the program that mpirun starts as each rank. It makes the rank a child of the supervisor (decision 52).

1. It reads the number of its rank from the launcher's variables, and asks the supervisor of its node what belongs to that rank.
2. It starts the rank as a grandchild. The supervisor is the subreaper of the job, so it becomes the parent, and reaps the rank
   as it does any other: with exact exit code, signal and use of CPU and memory.
3. It registers the rank. Only then the rank's program begins.
4. It waits until the supervisor answers that the rank has ended, and ends in the same way: mpirun takes this as the rank's end.
   A rank that has failed or was stopped gets no answer: this process then stays until the supervisor ends.

The rank stays in the process group of this process, which mpirun signals. It keeps descriptors that it has from mpirun (PMI_FD
of MPICH). This process keeps them open as well: mpirun learns of the rank's end by the answer in step 4, and not before.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING, Dict, Mapping, NoReturn, Sequence, Tuple, cast

from clustertool.errors import ClustertoolError, InternalError
from clustertool.model.job.start_error import NOT_EXECUTABLE
from clustertool.model.mpi.rank_variables import rank_variables
from clustertool.model.paths import JobPaths
from clustertool.model.rank_signals import FOR_RANKS
from clustertool.node.jobs import supervisor_client
from clustertool.node.system import child_signals, prctl, processes, programs

if TYPE_CHECKING:
    from clustertool.model.wire.supervisor_messages import RankEnvironment, SupervisorRequest

_ROLE = "trainer"
_REFUSED = 78  # EX_CONFIG
_OF_LAUNCHER = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # by which it ends its ranks
# Variables of this process that its rank does not get: those of the tool, of shells, and of the private folder for mpirun.
_OWN = ("CLUSTERTOOL_", "OLDPWD", "PWD", "SHLVL", "TMPDIR")


def main(job_dir: str, arguments: Sequence[str]) -> None:
    """Start the rank, wait until it has ended, and end in the same way.

    If the supervisor refuses the rank, write why to stderr, which mpirun shows, and exit with 78.
    """
    paths = JobPaths.at(job_dir)
    try:
        rank = rank_variables(os.environ).rank
        wake, _other_end = _watch_signals()
        answer = _ask_supervisor(paths, {"type": "rank-environment", "role": _ROLE, "rank": rank})
        found = cast("RankEnvironment", answer)
        pid, go = _fork_rank(found)
        _ask_supervisor(paths, {"type": "rank-started", "role": _ROLE, "rank": rank, "pid": pid})
        with supervisor_client.open_request(paths, {"type": "rank-end", "role": _ROLE, "rank": rank}) as sock:
            os.write(go, b"g")
            os.close(go)
            code, number = _wait_for_end(paths, rank, sock, wake)
    except (OSError, ClustertoolError) as error:
        print(f"clustertool: {error}", file=sys.stderr)
        if isinstance(error, ClustertoolError) and error.fix:
            print(f"clustertool: {error.fix}", file=sys.stderr)
        sys.exit(_REFUSED)
    _end_as(code, number)


def _ask_supervisor(paths: JobPaths, request: SupervisorRequest) -> Mapping[str, object]:
    """Send a request to the supervisor, and return its answer.

    Raises OSError without a supervisor, InternalError if it ends before it answers, and the ClustertoolError by which it
    refuses.
    """
    with supervisor_client.open_request(paths, request) as sock:
        answer = supervisor_client.receive(sock)
    if answer is None:
        raise InternalError("the supervisor of this node has ended")
    return answer


def _watch_signals() -> Tuple[socket.socket, socket.socket]:
    """Keep the signals of the launcher from ending this process. Return a socket with the number of each, and its other end.

    The other end must stay open.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    processes.outlive()
    for number in _OF_LAUNCHER:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    return ours, theirs


def _wait_for_end(paths: JobPaths, rank: int, sock: socket.socket, wake: socket.socket) -> Tuple[int, int]:
    """Wait until the supervisor answers that the rank has ended, and return its exit code and signal (0 for none).

    The answer comes only if the rank has ended well, or by mpirun. For one that has failed or was stopped, this waits until the
    supervisor ends, and returns (0, SIGKILL). It reports once to the supervisor that the launcher has sent a signal. Raises the
    ClustertoolError by which the supervisor refuses.
    """
    reported = False
    while True:
        ready, _, _ = select.select([sock, wake], [], [])
        if wake in ready:
            numbers = wake.recv(4096)
            if not reported and any(number in _OF_LAUNCHER for number in numbers):
                reported = True
                with contextlib.suppress(OSError, ClustertoolError):
                    _ask_supervisor(paths, {"type": "launcher-signal", "role": _ROLE, "rank": rank})
        if sock in ready:
            answer = supervisor_client.receive(sock)
            return (0, signal.SIGKILL) if answer is None else (int(str(answer["code"])), int(str(answer["signal"])))


def _end_as(code: int, number: int) -> NoReturn:
    """End this process with an exit code, or by the signal `number` if it is not 0, without a core file."""
    if number:
        if number != signal.SIGKILL:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has written its own
        os.kill(os.getpid(), number)
    sys.exit(code)


# -- the rank ---------------------------------------------------------------------------------------------------------


def _fork_rank(found: RankEnvironment) -> Tuple[int, int]:
    """Fork a grandchild for the rank. Return its pid, and a descriptor: a byte written to it starts the rank's program.

    If it is closed before, the program does not start. Raises OSError.
    """
    wait, go = os.pipe()
    named, name = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            if os.fork() == 0:
                os.close(go)
                os.write(name, b"%d\n" % os.getpid())
                os.close(name)
                _become_rank(found, wait)
        finally:
            processes.leave(0)
    os.close(wait)
    os.close(name)
    os.waitpid(between, 0)  # from here on the supervisor is the parent of the rank
    with open(named, "rb") as file:
        return int(file.read() or b"0"), go


def _become_rank(found: RankEnvironment, wait: int) -> None:
    """Turn this process into the rank: wait for the byte, open the log as stdout and stderr, and execute the program.

    wait: the descriptor from which the byte is read; if it is closed before, this process ends by SIGKILL. found: the
    supervisor's answer. Never returns: if the program cannot start, it writes the reason to the log, and exits with 127 if the
    program is not found, else 126; with 126, too, if the log cannot be opened.
    """
    if os.read(wait, 1) != b"g":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        log = os.open(found["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
    except OSError:
        processes.leave(NOT_EXECUTABLE)
    for target, fd in enumerate((null, log, log)):
        os.dup2(fd, target)
    try:
        _execute_program(found)
    except OSError as error:
        code, why = programs.not_started(error, found["argv"][0], found["work_dir"])
        os.write(2, f"clustertool: {why}\n".encode())
        processes.leave(code)


def _execute_program(found: RankEnvironment) -> None:
    """Restore signals, set umask, limits and folder of the rank, and execute its program. Raises OSError."""
    for number in (*_OF_LAUNCHER, *FOR_RANKS, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    child_signals.unblock()
    prctl.allow_reader(os.getppid())  # the supervisor
    os.umask(found["umask"])
    if found["file_limit"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (found["file_limit"], resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.chdir(found["work_dir"])
    env = _merged_environment(found["env"], os.environ)
    os.execvpe(found["argv"][0], found["argv"], env)


def _merged_environment(planned: Mapping[str, str], own: Mapping[str, str]) -> Dict[str, str]:
    """Merge the rank's planned variables over those of this process: OMPI_*, PMIX_*, PMI_*, and of mpirun's option -x.

    Variables of the tool and of shells are left out.
    """
    added = {name: value for name, value in own.items() if not name.startswith(_OWN) and name != "_"}
    return {**added, **planned}
