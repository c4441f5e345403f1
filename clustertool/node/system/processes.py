"""A process is identified by (pid, start time, boot). No signal is ever sent by pid alone or by name.

Start time is field 22 of /proc/PID/stat, in clock ticks since boot.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import sys
import time
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, NoReturn, Optional, Sequence, Set, Tuple

from clustertool.model.rank_signals import FOR_RANKS

MARK = b"CLUSTERTOOL_MARK"  # the variable by which processes of jobs are found
_COERCED = ("C.UTF-8", "C.utf8", "UTF-8")  # what Python sets LC_CTYPE to
TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")  # a second has so many ticks
_SYS_PTRACE = 1 << 19  # linux/capability.h
_LISTINGS = 50  # of /proc in one search, on a machine that starts processes all the time


# Not as classes: their types would be strings, and the first one that typing compiles costs each start 2 ms (decision 26).
Process = NamedTuple("Process", [("pid", int), ("start", int)])
Stat = NamedTuple(
    "Stat",
    [
        ("name", str),
        ("state", str),
        ("parent", int),
        ("cpu", float),  # seconds, user + system
        ("threads", int),
        ("start", int),
        ("memory", int),  # bytes resident
        ("waited", float),  # CPU seconds of the children it has waited for, and of theirs
    ],
)


def stat(pid: int) -> Optional[Stat]:
    """Read /proc/PID/stat; None if there is no such process.

    The name may contain spaces and brackets: it ends at the last bracket.
    """
    name, _, rest = try_read(f"/proc/{pid}/stat").rpartition(b")")
    fields = rest.split()
    if len(fields) < 22:
        return None
    comm = name.partition(b"(")[2].decode(errors="replace")
    state, parent, threads, start = fields[0].decode(), int(fields[1]), int(fields[17]), int(fields[19])
    cpu, waited = (int(fields[11]) + int(fields[12])) / TICKS, (int(fields[13]) + int(fields[14])) / TICKS
    return Stat(comm, state, parent, cpu, threads, start, int(fields[21]) * _PAGE, waited)


def identify(pid: int) -> Optional[Process]:
    """Return pid and start time of a process; None if there is no such process."""
    found = stat(pid)
    return Process(pid, found.start) if found else None


def alive(process: Process) -> bool:
    """Check whether a process runs, is no zombie, and is still the same one.

    A zombie whose other threads continue does not count as a zombie.
    """
    found = stat(process.pid)
    return found is not None and found.start == process.start and (found.state not in "ZX" or found.threads > 1)


def stopped(process: Process) -> bool:
    """Check whether a process is still the same one, and is stopped by a signal or a debugger."""
    found = stat(process.pid)
    return found is not None and found.start == process.start and found.state in "Tt"


def dies_of(pid: int, number: int) -> bool:
    """Check whether this signal would end the process at once: its main thread neither catches, ignores nor blocks it.

    False if it cannot be read.
    """
    mask = 0
    with contextlib.suppress(OSError, ValueError):
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith((b"SigBlk:", b"SigIgn:", b"SigCgt:")):
                    mask |= int(line.split()[1], 16)
        return not mask >> (number - 1) & 1
    return False


def this_process() -> Process:
    """Return pid and start time of this process; the start is 0 if /proc cannot be read."""
    return identify(os.getpid()) or Process(os.getpid(), 0)


def boot_id() -> str:
    """Read the id of the machine's present boot. Raises OSError."""
    with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
        return file.read().strip()


def try_read(path: str, most: int = -1) -> bytes:
    """Read a file, at most `most` bytes of it; b"" if it cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(most)
    return b""


def namespace(kind: str, process: str = "self") -> str:
    """Read the name of a namespace ("pid", "mnt") of this process, or of the one with this pid; "" if it cannot be read.

    The same pid in another pid namespace is another process.
    """
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{process}/ns/{kind}")
    return ""


def pids() -> Iterator[int]:
    """Yield the pids of all processes."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def pids_and_new() -> Iterator[int]:
    """Yield each pid once, and those of processes that start during the search: list /proc until there is no new pid.

    A single listing could miss a chain of processes, each of which starts the next one and ends. The kernel assigns pids in
    ascending order, and /proc lists them so. So each listing has a process of the chain. There are 50 listings at most.
    """
    seen: Set[int] = set()
    for _ in range(_LISTINGS):
        new = [pid for pid in pids() if pid not in seen]
        if not new:
            return
        seen.update(new)
        yield from new


def children(pid: int) -> List[int]:
    """Read the pids of the children of a process, dead ones included; [] if it has ended or cannot be read.

    They are in /proc/PID/task/*/children; a kernel without that requires a read of every process.
    """
    found: List[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", encoding="utf-8") as file:
                found += [int(field) for field in file.read().split()]
    except FileNotFoundError:
        if os.path.exists(f"/proc/{pid}/task") and not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
            return [other for other in pids() if getattr(stat(other), "parent", 0) == pid]
    except OSError:
        pass
    return found


def descendants(pid: int, apart: Iterable[int] = ()) -> List[Process]:
    """Find the descendants of a process, zombies included, but not those with a pid in `apart`, and what these have started.

    The caller is their subreaper, so an orphan never leaves this tree.
    """
    found: List[Process] = []
    todo = children(pid)
    while todo:
        child = todo.pop()
        process = identify(child)
        if process and child not in apart:
            found.append(process)
            todo += children(child)
    return found


def environment(pid: int) -> Dict[bytes, bytes]:
    """Read the variables with which a process was started; {} for one that has ended or is another user's."""
    return _variables(try_read(f"/proc/{pid}/environ"))


def take_environment(pid: int) -> None:
    """Replace the variables of this process by those with which another one, or this one, was started, if they can be read.

    Python sets LC_CTYPE in the locale C, a shell drops names that it cannot have (functions that bash exports), and a wrapper
    of the interpreter adds its own: what we start has none of that.
    """
    found = environment(pid)
    if found:
        os.environb.clear()
        os.environb.update(found)


def own_environment() -> Dict[str, str]:
    """Copy the variables of this process, with LC_CTYPE as it was before Python set it in the locale C."""
    found, started = dict(os.environ), environment(os.getpid())
    if started and found.get("LC_CTYPE") in _COERCED:
        found.pop("LC_CTYPE")
        found.update({"LC_CTYPE": os.fsdecode(started[b"LC_CTYPE"])} if b"LC_CTYPE" in started else {})
    return found


def find_job_processes(searched: Callable[[], Iterable[int]] = pids) -> Iterator[Tuple[int, Dict[bytes, bytes]]]:
    """Yield pid and environment of each process of this user that has the marker of a job. searched: lists the pids."""
    for pid in searched():
        text = try_read(f"/proc/{pid}/environ")
        if MARK + b"=" in text:  # the environments of all other processes are not parsed
            yield pid, _variables(text)


def _variables(text: bytes) -> Dict[bytes, bytes]:
    """Parse an environment. Of a name twice the first counts, as for getenv()."""
    pairs = [line.partition(b"=") for line in text.split(b"\0")]
    return {name: value for name, equals, value in reversed(pairs) if name and equals}


def find_marked(mark: str) -> List[Process]:
    """Find the living processes of this user whose environment has this mark, also those that start during the search."""
    found = []
    for pid, variables in find_job_processes(pids_and_new):
        if variables.get(MARK) == mark.encode():
            process = identify(pid)
            if process and alive(process):
                found.append(process)
    return found


def kill_tree(pid: int) -> None:
    """Kill a child of this process, and the programs that it runs; it starts no other one meanwhile. Does not wait."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        below = descendants(pid)
        os.kill(pid, signal.SIGKILL)
        for process in below:
            signal_one(process, signal.SIGKILL)


def ptrace_scope() -> int:
    """Read how far the kernel keeps this user from reading its own processes: yama's 1 allows descendants only, 2 and 3 none.

    0 allows all, as does a kernel without yama, or the right of root.
    """
    lines = try_read("/proc/self/status").splitlines()
    rights = next((int(line.split()[1], 16) for line in lines if line.startswith(b"CapEff:")), 0)
    scope = int(try_read("/proc/sys/kernel/yama/ptrace_scope") or b"0")
    return 0 if scope < 3 and rights & _SYS_PTRACE else scope


def signal_one(process: Process, number: int) -> None:
    """Send a signal to a process if it lives and is still the same one; ignore that it may not be signalled."""
    if alive(process):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def used_cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def reap(child: int, patience: float, killed: float = 5.0) -> None:
    """Wait for a child that was asked to end; after `patience` seconds KILL it, and wait up to `killed` seconds more.

    Then it is left as it is: a process that waits for a driver or a dead NFS server does not end.
    """
    asked = time.monotonic() + patience
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(child, os.WNOHANG)[0] == 0 and time.monotonic() < asked + killed:
            if time.monotonic() > asked:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.005)


def describe(process: Process) -> str:
    """Describe a process for messages by pid and command line, as `1234 (python3 train.py)`, or `1234 (gone)`."""
    return f"{process.pid} ({named(process.pid)[1] or 'gone'})"


def named(pid: int) -> Tuple[str, str]:
    """Read the name of a process, and its command line (200 bytes at most) or else its name, each in one line.

    Returns two empty texts if it has ended.
    """
    found, line = stat(pid), try_read(f"/proc/{pid}/cmdline", 200).decode(errors="replace")
    name, command = (_one_line(text) for text in (found.name if found else "", line))
    return name, command or name


def _one_line(text: str) -> str:
    """Replace what cannot be printed by spaces, and join the parts of a text by single spaces."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def set_name(name: str) -> None:
    """Set the name of this process that `ps -o comm` and `top` show; 15 characters count."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="utf-8") as file:
        file.write(name)


def fork(body: Callable[[], object], *descriptors: int, quiet: bool = False) -> int:
    """Fork a child that detaches itself, with these descriptors, calls `body`, and ends. Returns its pid; raises OSError.

    quiet: its stdin, stdout and stderr are /dev/null.
    """
    child = os.fork()
    if child == 0:
        try:
            detach(*descriptors, stdio=(os.open(os.devnull, os.O_RDWR),) * 3 if quiet else ())
            body()
        finally:
            leave(0)
    return child


def detach(*descriptors: int, stdio: Sequence[int] = ()) -> None:
    """Make a forked child independent of its parent: give it its own session, default signal handlers and an empty mask.

    The signals for ranks do nothing. Of the parent's descriptors only `descriptors` stay open, and stdin, stdout and stderr,
    which become those of `stdio`.
    """
    # A socket that is garbage of the parent would close its number when it is collected: another file may have it by then.
    gc.freeze()
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    outlive()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for target, source in enumerate(stdio):
        os.dup2(source, target)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (0, 1, 2, *descriptors):
            with contextlib.suppress(OSError):
                os.close(int(name))


def outlive() -> None:
    """Handle the signals for ranks by doing nothing, so that they do not end this process.

    The programs that it starts have the default action.
    """
    for number in FOR_RANKS:
        signal.signal(number, lambda number, frame: None)


def leave(code: int) -> NoReturn:
    """End a forked child at once with an exit code. After an error, print it to stderr, and end with 1 instead of 0.

    For the child's `finally`: it never returns into its parent's loop.
    """
    kind, error, trace = sys.exc_info()
    if kind is not None and error is not None:
        sys.excepthook(kind, error, trace)
        sys.stderr.flush()
        code = code or 1
    os._exit(code)
