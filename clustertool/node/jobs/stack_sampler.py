"""This module takes the stacks of a job's processes on this node: of Python by py-spy, of all others from /proc.

A request comes to the agent, which asks the supervisor: the kernel allows more to its children. The supervisor starts one
sampler, which runs sample_for_supervisor() and ends.

py-spy reads the memory of a process without stopping it; only where this fails, and for native frames, it stops the process
for some milliseconds. A process that is stopped, is in state D, or swaps is named as such and left alone: a read of its memory
could wait as long as it does. The laptop sends py-spy once, by its digest, into the node's cache.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, BinaryIO, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, cast

from clustertool.model.job import hang
from clustertool.model.job.outcome import Key
from clustertool.model.job.stacks import Frame, ProcessSample, ThreadStack, read_dump
from clustertool.model.paths import FLIGHT_PIPE, STACKS
from clustertool.model.roles import LAUNCHERS
from clustertool.node.devices import detect, sent_files
from clustertool.node.jobs import queries, supervisor_client
from clustertool.node.jobs.descendants import Owners
from clustertool.node.storage import files
from clustertool.node.system import processes, programs, tcp_table
from clustertool.node.system.node_context import NodeContext

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import StacksAnswer
    from clustertool.model.wire.agent_requests import StacksRequest
    from clustertool.model.wire.supervisor_messages import StacksQuery

_ROOM = 1 << 20  # bytes: a disk with less is full
_LARGEST = 16 << 20  # characters of a dump
_LARGEST_ANSWER = 48 << 20  # characters of all samples
_ANSWER = 5.0  # seconds for the supervisor, beyond those of the sampler
_AGAIN = 0.05  # seconds after which a process in state D is read again
_SLACK = 1.5  # seconds for py-spy to be ended
_ROUNDS, _BETWEEN = 3, 1.5  # samples of a job that makes no progress, and the seconds between two of them
_WIDTH = 2  # dumps at once for each core: one takes 0.05 s of CPU time
_MOST = 5000  # processes
_DENIED = "the kernel does not let this user read it"
_FIX = "set that to 0 as root; a program of another user is read by that user and root only"
_STATES = {
    "T": "stopped by a signal (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "blocked in the kernel (state D)",
    "Z": "has ended, and was not waited for",
}
_OF_PEERS = ("read", "write", "connect", "recvfrom", "recvmsg")
_CALLS = {  # that wait, by their numbers
    "x86_64": "0 read 1 write 7 poll 16 ioctl 23 select 35 nanosleep 42 connect 43 accept 45 recvfrom 47 recvmsg 61 wait4 "
    "73 flock 202 futex 230 clock_nanosleep 232 epoll_wait 247 waitid 270 pselect6 271 ppoll 281 epoll_pwait 288 accept4",
    "aarch64": "22 epoll_pwait 29 ioctl 32 flock 63 read 64 write 72 pselect6 73 ppoll 95 waitid 98 futex 101 nanosleep "
    "115 clock_nanosleep 202 accept 203 connect 207 recvfrom 212 recvmsg 242 accept4 260 wait4",
}


def stacks(node: NodeContext, request: StacksRequest) -> StacksAnswer:
    """Have the stacks of the requested ranks of a job on this node taken by its supervisor; none if that has ended.

    Raises NotFound if there is no such job here, and UsageError if the supervisor is of a version without stacks.
    """
    record = queries.record_of(node, request["job"])
    query = cast("StacksQuery", {**request, "type": "stacks"})
    head = record.process("supervisor")
    answer = supervisor_client.ask(
        record.paths, query, request["seconds"] + _ANSWER, lambda: not (head and processes.stopped(head))
    )
    if answer is None:
        lives = head is not None and processes.alive(head)  # it may have ended meanwhile
        return {"samples": [], "fault": "the supervisor of the job does not answer" * lives}
    return cast("StacksAnswer", json.loads(answer[1]))


# -- the processes


class Target(NamedTuple):
    """A process to be sampled, and its rank. child: it is not the rank's own program."""

    pid: int
    role: str
    rank: int
    child: bool


def targets(heads: Mapping[int, Key], members: Iterable[int]) -> List[Target]:
    """List the processes to be sampled: `heads`, the ranks' own programs, all processes below them, and members of ranks."""
    pids = {*heads, *members, *(child.pid for pid in heads for child in processes.descendants(pid))}
    stats = {pid: found for pid, found in ((pid, processes.stat(pid)) for pid in pids) if found is not None}
    return [Target(pid, *key, pid not in heads) for pid, key in Owners().find(stats, heads).items()]


def sample_for_supervisor(
    file: BinaryIO, heads: Mapping[int, Key], members: Iterable[int], query: StacksQuery, folder: str
) -> None:
    """Sample the ranks of a supervisor; write {"samples", "fault"} to a file, as a line of JSON. heads, members: see targets().

    folder: "", or that of the job: sample three times, append the samples to its stacks.jsonl, and write traces of them.
    """
    t, began, rounds, fault = time.time(), time.monotonic(), [], ""
    if folder:
        query = cast("StacksQuery", {**query, "seconds": query["seconds"] / _ROUNDS})
        _request_dumps(folder)
    for number in range(_ROUNDS if folder else 1):
        time.sleep(max(0.0, began + number * _BETWEEN - time.monotonic()))
        rounds.append(sample(targets(heads, members), query))
    found: Sequence[object] = rounds[0]
    if folder:
        room = os.statvfs(folder)
        full = "no room is left on its disk" * (room.f_bavail * room.f_frsize < _ROOM)
        found = [one._replace(cause=one.cause or full) for one in hang.trace(rounds, _BETWEEN)]
        with contextlib.suppress(OSError), files.closing(files.open_job_dir(folder)) as job:
            journal = files.Journal(files.open_append(job, STACKS))
            journal.write({"t": round(t, 2), "rounds": rounds})
            journal.close()
    elif any(one.note == _DENIED for one in rounds[0]):
        fault = f"{_DENIED} (kernel.yama.ptrace_scope is {processes.ptrace_scope()}): {_FIX}"
    data = json.dumps({"samples": found, "fault": fault})
    if len(data) > _LARGEST_ANSWER:
        data = json.dumps({"samples": [], "fault": "the stacks are too large for an answer: name some ranks by --rank"})
    file.write(data.encode() + b"\n")
    file.flush()


def _request_dumps(folder: str) -> None:
    """Have torch write the dump of its flight recorder in each rank of a job that has made a pipe for that (NCCL only)."""
    for pipe in glob.glob(os.path.join(glob.escape(folder), f"{FLIGHT_PIPE}*.pipe")):
        with contextlib.suppress(OSError):  # nothing reads it: the rank has ended
            with files.closing(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)) as fd:
                os.write(fd, b"1")


# -- the samples


def sample(found: Iterable[Target], query: StacksQuery) -> List[ProcessSample]:
    """Sample at the same time those of the processes that the query names; leave out those that have ended.

    role "": of all that are no launchers; ranks "": all.
    """
    role, ranks = query["role"], set(filter(None, query["ranks"].split(",")))
    of_role = [one for one in found if (one.role == role if role else one.role not in LAUNCHERS)]
    chosen = [one for one in of_role if not ranks or str(one.rank) in ranks][:_MOST]
    kept = [query["tool"]] if query["tool"] else detect.sent("py-spy")
    tool = next(filter(None, (sent_files.find("py-spy", digest) for digest in kept)), "")
    end = time.monotonic() + query["seconds"]
    if any(getattr(processes.stat(one.pid), "state", "") == "D" for one in chosen):
        time.sleep(_AGAIN)  # a read of a disk may have ended by then
    pool = ThreadPoolExecutor(max(8, _WIDTH * (os.cpu_count() or 1)))
    running = [pool.submit(_sample_one, one, tool, query["native"], end) for one in chosen]
    wait(running, end + _SLACK - time.monotonic())  # a thread that a process in state D blocks is left
    samples = [task.result() if task.done() else _late(one) for one, task in zip(chosen, running)]
    return [one for one in samples if one is not None]


def _late(target: Target) -> Optional[ProcessSample]:
    """Describe a process that was not sampled in time: a read of its /proc waits for it. None if it has ended."""
    stat = processes.stat(target.pid)
    about = (target.role, target.rank, target.pid, target.child)
    return None if stat is None else ProcessSample(*about, stat.name, "", stat.state, "not sampled in time")


def _sample_one(target: Target, tool: str, native: bool, end: float) -> Optional[ProcessSample]:
    """Sample one process, with py-spy until `end`; None if it has ended."""
    pid, stat = target.pid, processes.stat(target.pid)
    if stat is None or stat.state == "X":
        return None
    threads: Tuple[ThreadStack, ...] = ()
    note, folder = _STATES.get(stat.state, ""), ""
    if not note:
        with contextlib.suppress(OSError):
            folder = os.readlink(f"/proc/{pid}/cwd")
        note = _obstacle(pid) or ("" if tool else "py-spy is missing")
    if not note:
        threads, note = _dump(tool, pid, native, end)
    call = [] if stat.state in "RTtZ" else _kernel_call(pid)
    if note:
        threads = (ThreadStack("", tuple(Frame(name.partition(" ")[0], "", 0) for name in call)),) if call else ()
    elif call and threads and not threads[0].thread_name:
        threads = (threads[0]._replace(call=call[-1]), *threads[1:])
    moved = [int(line.split()[1]) for line in _lines(pid, "io") if line.startswith(("rchar:", "wchar:"))]
    about = (target.role, target.rank, pid, target.child, stat.name, folder, stat.state)
    return ProcessSample(*about, note, threads, stat.cpu, sum(moved))


def _lines(pid: int, name: str) -> List[str]:
    """Read the lines of a file of a process in /proc, [] if it cannot be read."""
    return processes.try_read(f"/proc/{pid}/{name}").decode(errors="replace").splitlines()


def _obstacle(pid: int) -> str:
    """Return why py-spy is not tried on a process: it may not be read, is not Python, or swaps; "" to try it."""
    try:
        program = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError as error:
        return _DENIED if isinstance(error, PermissionError) else "has no program"
    if "python" not in program and b"python" not in processes.try_read(f"/proc/{pid}/maps"):
        return "no Python"
    memory = dict(line.split()[:2] for line in _lines(pid, "status") if line.startswith(("VmRSS:", "VmSwap:")))
    swaps = int(memory.get("VmSwap:", "0")) > int(memory.get("VmRSS:", "0"))
    return f"{hang.SWAPS}most of its memory is not in RAM" if swaps else ""


def _dump(tool: str, pid: int, native: bool, end: float) -> Tuple[Tuple[ThreadStack, ...], str]:
    """Run py-spy, and return the stacks of a process and "", or no stack and the reason."""
    why = ""
    for how in ("--native" if native else "--nonblocking", "--nonblocking" if native else ""):
        argv = [tool, "dump", "--json", *filter(None, [how]), "--pid", str(pid)]
        left = end - time.monotonic()
        code, out, err = programs.output(argv, left, cwd="/") if left > 0 else (-1, "", "")
        if code == -1:
            return (), "py-spy did not answer in time, and was ended"
        try:
            if code == 0:
                return read_dump(out[:_LARGEST], pid), ""
            why = f"py-spy: {err.strip().partition(chr(10))[0].replace('Error: ', '')[:200] or f'exit code {code}'}"
        except ValueError as error:
            why = f"py-spy: {error}"
        if code == 127:
            return (), f"py-spy cannot be started: {err[:200]}"
        if "ermission" in err or "not permitted" in err:
            return (), _DENIED
    return (), why


def _kernel_call(pid: int) -> List[str]:
    """Return where the main thread of a process waits in the kernel: the kernel's function, and the call.

    "recvfrom 10.0.0.2:7000" has the peer of the socket. A call that is not known by its number is left out, and what may not be
    read.
    """
    known = _CALLS.get(os.uname().machine, "").split()
    number, *arguments = processes.try_read(f"/proc/{pid}/syscall").split() or [b""]
    waits = processes.try_read(f"/proc/{pid}/wchan").decode(errors="replace")
    calls = [known[at + 1] for at in range(0, len(known), 2) if known[at].encode() == number]
    if calls and calls[0] in _OF_PEERS and arguments:
        calls = [" ".join(filter(None, (*calls, tcp_table.peer_of(pid, str(int(arguments[0], 16))))))]
    return [name for name in (waits, *calls) if name.strip("0")]
