"""A rank session is a shell or a command that a user starts inside a running rank: `exec --in-job`.

find() answers with a command line, which the laptop executes over a channel of its own, on a terminal or without one. That is
main(): it takes the environment and the working directory of the rank from the supervisor, starts the program with them, and
ends it when the job stops.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, List, Mapping, Sequence, cast

import clustertool
from clustertool.errors import ClustertoolError, NotFound
from clustertool.model.hints import PROGRAM
from clustertool.model.job.outcome import exit_code
from clustertool.model.paths import JobPaths
from clustertool.model.roles import role_name
from clustertool.node.jobs import supervisor_client
from clustertool.node.jobs.queries import record_of
from clustertool.node.supervisor import rank_process
from clustertool.node.system import child_signals, processes, programs

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import RankSessionAnswer
    from clustertool.model.wire.agent_requests import RankSessionRequest
    from clustertool.model.wire.supervisor_messages import LiveStatus, RankEnvironment, RankSession, SupervisorRequest
    from clustertool.node.system.node_context import NodeContext

_PATIENCE = 10.0  # seconds for a supervisor to answer
_TURN = 1.0  # seconds between two questions whether the job stops
_HANGUP = 3.0  # seconds for a program to end by SIGHUP or SIGTERM
# By it the programs of a session are found. Without the underscore the wrapper in a container would remove it.
_SESSION = "_CLUSTERTOOL_SESSION"
_SHELL = "if command -v bash >/dev/null 2>&1; then exec bash; fi; exec sh"
_REFUSED = 78  # EX_CONFIG
# `-c` puts the working directory first on the path, which is not ours.
_CODE = """\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
sys.path.insert(0, sys.argv[1])
from clustertool.node.agent import rank_session
rank_session.main(sys.argv[2:])"""


def find(node: NodeContext, request: RankSessionRequest) -> RankSessionAnswer:
    """Build the command line to which the laptop adds a program and its arguments, or nothing for a shell.

    Raises NotFound for a rank that does not run here.
    """
    paths = record_of(node, request["job"]).paths
    _require_running(paths, request["job"], request["role"], request["rank"])
    place = os.path.dirname(os.path.dirname(os.path.abspath(clustertool.__file__)))
    prefix = [sys.executable, "-ESs", "-c", _CODE, place]
    return {"argv": [*prefix, paths.dir, request["role"], str(request["rank"])]}


def _require_running(paths: JobPaths, job: str, role: str, rank: int) -> None:
    """Raise NotFound, with the rank's state, if it does not run on this node."""
    status = cast("LiveStatus", _ask(paths, {"type": "status"}))
    found = next((one for one in status["ranks"] if (one["role"], one["rank"]) == (role, rank)), None)
    if found is None or not found["pid"]:
        state = found["state"] if found else "on another node"
        fix = f"{PROGRAM} status --job {job} shows the ranks that run"
        raise NotFound(f"{role_name(role)} {rank} does not run: it is {state}", fix)


def _ask(paths: JobPaths, request: SupervisorRequest) -> Mapping[str, object]:
    """Send a request to the supervisor of a job, and return the answer.

    Raises NotFound if no supervisor answers within 10 s.
    """
    answer = supervisor_client.ask(paths, request, _PATIENCE)
    if answer is None:
        raise NotFound(f"job {paths.job} does not run here", f"{PROGRAM} jobs shows what runs")
    return answer[0]


def main(arguments: Sequence[str]) -> None:
    """Run a program in the environment of a rank, and exit with its exit code; with 78 if the rank does not run here.

    arguments: the job's directory, role, rank, and the program, if any.
    """
    job_dir, role, rank, *command = arguments
    paths = JobPaths.at(job_dir)
    try:
        _require_running(paths, paths.job, role, int(rank))
        query = {"type": "rank-environment", "role": role, "rank": int(rank)}
        found = cast("RankEnvironment", _ask(paths, cast("SupervisorRequest", query)))
        sys.exit(_run(paths, found, command))
    except ClustertoolError as error:
        print(f"clustertool: {error}", file=sys.stderr)
        sys.exit(_REFUSED)


def _run(paths: JobPaths, found: RankEnvironment, command: Sequence[str]) -> int:
    """Start the program with the environment and limits of the rank, or in its container, and return its exit code.

    Ends it with the session or the job. If it cannot start, print why, and return 127 or 126.
    """
    session = found.get("session")
    env = dict(found["env"]) if session is None else {**os.environ, **session["env"]}
    env[_SESSION] = secrets.token_hex(8)
    if os.isatty(0):
        env["TERM"] = os.environ.get("TERM", "xterm")
    argv = _argv(env, command) if session is None else _in_container(session, command)
    os.umask(found["umask"])
    if found["file_limit"] and session is None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (found["file_limit"], resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    folder = found["work_dir"] if session is None else "/"
    try:
        no_input = None if os.isatty(0) else subprocess.DEVNULL  # stdin without a terminal has the end of the session
        child = subprocess.Popen(argv, stdin=no_input, env=env, cwd=folder, preexec_fn=child_signals.unblock)
    except OSError as error:
        code, why = programs.not_started(error, argv[0], folder if session is None else "")
        print(f"clustertool: {why}", file=sys.stderr)
        return code
    return _wait(paths, child, env[_SESSION])


def _in_container(session: RankSession, command: Sequence[str]) -> List[str]:
    """Build the command line in the rank's container. Without a command it is a shell of the image."""
    argv = list(session["argv"])
    if os.isatty(0) and "--interactive" in argv:
        argv.insert(argv.index("--interactive"), "--tty")
    return [*argv, *(command or ["sh", "-c", _SHELL])]


def _argv(env: Mapping[str, str], command: Sequence[str]) -> List[str]:
    """Build the command line of the program after PRELUDE. Without a command it is the user's shell."""
    wanted = list(command) or [env.get("SHELL", "/bin/sh")]
    prelude = env.get("CLUSTERTOOL_PRELUDE", "")
    return rank_process.command({"prelude": prelude}, {"argv": wanted, "env": {}})  # type: ignore[typeddict-item]


def _wait(paths: JobPaths, child: subprocess.Popen[bytes], session: str) -> int:
    """Wait for the program, and return its exit code (128 + N for signal N); end it when the session or the job ends.

    Keys of the terminal are for the program. An interactive shell ignores TERM, and a stop of the job would wait for it: it
    gets SIGHUP first.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, lambda *_: _hang_up(child, session))
    left = False
    while True:
        try:
            code = child.wait(_TURN)
            return exit_code(max(0, code), max(0, -code))
        except subprocess.TimeoutExpired:
            if not left and not os.isatty(0) and select.select([0], [], [], 0)[0]:
                left = True
                _hang_up(child, session)
            elif _job_stops(paths):
                print("\r\nclustertool: the job stops\r", file=sys.stderr)
                _hang_up(child, session)


def _job_stops(paths: JobPaths) -> bool:
    """Check whether the supervisor reports that the job stops, or does not answer."""
    with contextlib.suppress(ClustertoolError):
        answer = supervisor_client.ask(paths, {"type": "status"}, _PATIENCE)
        return answer is None or bool(answer[0].get("stopping"))
    return True


def _hang_up(child: subprocess.Popen[bytes], session: str) -> None:
    """End all programs of the session: by SIGHUP on a terminal, else SIGTERM, and by SIGKILL after 3 s.

    Those in a container outlive the client of the runtime, which is `child`.
    """
    for number in (signal.SIGHUP if os.isatty(0) else signal.SIGTERM, signal.SIGKILL):
        name, wanted = _SESSION.encode(), session.encode()
        found = [pid for pid in processes.pids() if processes.environment(pid).get(name) == wanted]
        for one in filter(None, map(processes.identify, found)):
            processes.signal_one(one, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_HANGUP)
