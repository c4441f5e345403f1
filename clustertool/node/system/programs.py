"""Find and run other programs of the node. This is apart from processes.py, as most requests run none."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, Mapping, Sequence, Tuple

from clustertool.model.job import start_error
from clustertool.model.wire.messages import PROGRAM
from clustertool.node.system.node_context import NodeContext, PlacingContext, step

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Answer, ProgramAnswer
    from clustertool.model.wire.agent_requests import NoFields, ProgramRequest

_VERSION = 2.0  # seconds for python3 -V: a shim of pyenv starts a shell
_TURN = 0.2  # seconds between two calls of the check of a program that runs
_ENDING = 2.0  # seconds for a program that was ended
_FIRST_LINE = 4096  # bytes
_MOST = 1 << 20  # characters of an output that an answer has
_LOGIN = 20.0  # seconds that a login shell may take to start
_MARK = "clustertool: the environment follows"  # after what the files of a login shell print
_login: Dict[str, str] = {}  # the environment of a login shell, once it was read


def find(name: str, *folders: str) -> str:
    """Find the path of a program on PATH or in one of the `folders`, or ""."""
    return first([*os.get_exec_path(), *folders], name)


def python3(folders: Iterable[str]) -> Tuple[str, str]:
    """Find path and version of the first python3 in the folders of a PATH.

    Returns ("", "") if there is none, or `python3 -V` fails or takes more than 2 s; the next folders are not tried.
    """
    path = first(filter(None, folders), "python3")
    code, out, err = output([path, "-V"], _VERSION) if path else (127, "", "")
    version = (out or err).strip().rpartition(" ")[2]
    return (path, version[:40]) if code == 0 and version else ("", "")


def first(folders: Iterable[str], name: str) -> str:
    """Find the path of an executable file of this name in the first of the folders that has one, or ""."""
    paths = (os.path.join(folder, name) for folder in folders)
    return next((path for path in paths if os.access(path, os.X_OK) and os.path.isfile(path)), "")


def output(
    argv: Sequence[str], seconds: float, stdin: str = "", check: Callable[[], None] = lambda: None, **more: Any
) -> Tuple[int, str, str]:
    """Run a program, and return its exit code, stdout and stderr.

    The code is 127 if it cannot start (stderr has the reason), -N if signal N ended it, and -1, without output, if it did not
    end in `seconds`. stdin: a text for it. check: is called each 0.2 s while it runs, and raises what ends it. At the end, its
    session's processes get KILL; one that waits for a driver is left. more: arguments of Popen.
    """
    pipe = subprocess.PIPE
    inlet = pipe if stdin else subprocess.DEVNULL
    try:
        child = subprocess.Popen(argv, stdin=inlet, stdout=pipe, stderr=pipe, start_new_session=True, **more)
    except OSError as error:
        return 127, "", f"{error.filename}: {error.strerror}"
    code, out, err = -1, b"", b""
    data, end = stdin.encode() or None, time.monotonic() + seconds
    try:
        while code < 0 and time.monotonic() < end:
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, err = child.communicate(data, timeout=min(_TURN, seconds))
                code = child.returncode
                break
            data = None
            check()
    finally:
        signal_session(child, signal.SIGKILL, 1.0)
        for file in (child.stdin, child.stdout, child.stderr):  # unread, since another process may keep them open
            if file:
                with contextlib.suppress(OSError):  # what stdin did not take
                    file.close()
    return code, out.decode(errors="replace"), err.decode(errors="replace")


def signal_session(child: subprocess.Popen[bytes], number: int, seconds: float) -> None:
    """Send a signal to the processes of a program's session, and wait up to `seconds` for the end of the program."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(seconds)


def run_program(node: NodeContext, request: ProgramRequest) -> ProgramAnswer:
    """Run a program of this machine, without a shell, for the request's seconds; answer its path, exit code and output.

    It runs in /. It is searched for on PATH, then on the PATH of a login shell: some clusters add the programs of their
    scheduler only there. In this case, or if the request has `login`, it gets the environment of that shell, else that of this
    process; `env` of the request is added. The exit code is that of output(); 127 with the path "" if there is no such program.
    Of each output there are 1 MiB at most.
    """
    name, *arguments = request["argv"]
    environ: Mapping[str, str] = (login_environment() if request.get("login") else {}) or os.environ
    path = _find_on_path(name, environ)
    if not path:
        environ = login_environment()
        path = _find_on_path(name, environ)
    if not path:
        return {"path": "", "code": 127, "stdout": "", "stderr": ""}
    more = {**environ, **request["env"]}
    code, out, err = output([path, *arguments], request["seconds"], check=step, cwd="/", env=more)
    return {"path": path, "code": code, "stdout": out[:_MOST], "stderr": err[:_MOST]}


def end_programs(agent: PlacingContext, request: NoFields) -> Answer:
    """End the programs that this connection runs, and wait up to 2 s until their requests have ended."""
    running = [work for work in agent.threads if work.kind is PROGRAM]
    for work in running:
        work.abandon()
    end = time.monotonic() + _ENDING
    for work in running:
        work.join(max(0.0, end - time.monotonic()))
    return {}


def _find_on_path(name: str, environ: Mapping[str, str]) -> str:
    """Return the path of a program on the PATH of an environment, or ""; an absolute name as it is."""
    return name if os.path.isabs(name) else first(filter(None, environ.get("PATH", "").split(os.pathsep)), name)


def login_environment() -> Mapping[str, str]:
    """Return the environment of this user's login shell, {} if it cannot be read; once read, it is kept."""
    if not _login:
        shell = _login_shell()
        script = f"echo {_MARK!r}\nexec /usr/bin/env -0\n"
        _, out, _ = output([shell, "-l"], _LOGIN, script, cwd="/")
        _, mark, text = out.partition(f"{_MARK}\n")
        pairs = (line.partition("=") for line in text.split("\0"))
        _login.update((key, value) for key, equals, value in pairs if mark and equals)
    return _login


def _login_shell() -> str:
    """Return this user's login shell, /bin/sh if there is none."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    return "/bin/sh"


def not_started(error: OSError, name: str, folder: str) -> Tuple[int, str]:
    """Return the exit code and the reason of a program that could not be started.

    The reason may be a wrong first line of a script, or a file system mounted noexec. folder: where a relative name begins; "":
    the first line is not examined.
    """
    code, why = start_error.not_started(error, name)
    path = os.path.join(folder, name)
    with contextlib.suppress(OSError):
        if folder:
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                wrong = start_error.wrong_first_line(file.read(_FIRST_LINE))
            why = f"cannot start {name!r}: {wrong}" if wrong else why
        if isinstance(error, PermissionError) and os.statvfs(path).f_flag & os.ST_NOEXEC:
            why += "; its file system is mounted noexec"
    return code, why
