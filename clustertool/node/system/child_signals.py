"""Signals reach the supervisor: a child's end wakes its loop, and other signals are read with the process that sent them.

They stay blocked, because only a blocked signal can be read with its sender. Ranks start with an empty mask. They are requests
to end, and signals for the ranks: those are passed on, unless their sender signals all processes of the job itself.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from typing import Iterator, List, NamedTuple, Tuple

from clustertool.model.rank_signals import FOR_RANKS, in_step, proctrack, signals_all
from clustertool.node.system import processes

END = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_READ = (*END, *FOR_RANKS)
_SI_KERNEL = 0x80
_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/var/spool/slurmd/conf-cache/slurm.conf")
_LARGEST = 1 << 20  # bytes of one
_LINGER = "; systemd does so at logout if KillUserProcesses=yes: run `loginctl enable-linger` on the node"


# A signal that asks this process to end. what: "received SIGTERM from ...". code: the exit code that it means. everywhere: its
# sender has signalled all processes of the job, the ranks as well. Written so, since a class would let typing call compile().
EndRequest = NamedTuple("EndRequest", [("what", str), ("code", int), ("everywhere", bool)])


class Signals:
    """The signals to this process, which it blocks and reads. Call turn() each loop; `wake` becomes readable when a child ends.

    for_ranks: the signals of the last turn to pass on to ranks, in their order. A process without ranks ignores them.
    """

    def __init__(self) -> None:
        """Install the handlers, block the signals to end and for ranks, and make `wake` readable at each child's end.

        Raises OSError if no descriptor is left.
        """
        self.for_ranks: List[int] = []
        self._unblocked: List[int] = []
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        for number in (signal.SIGCHLD, *_READ):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_BLOCK, _READ)
        self.wake = self._ours.fileno()

    def turn(self) -> List[EndRequest]:
        """Read the signals that came, and empty `wake`: return a list of the requests to end, and set for_ranks.

        A signal for ranks whose sender signals all processes of the job is left out.
        """
        with contextlib.suppress(BlockingIOError):
            while self._ours.recv(4096):
                pass
        ends = [number for number in self._unblocked if number in END]
        found = [EndRequest(f"received {_signal_name(number)}", _exit_code(number), False) for number in ends]
        self.for_ranks = [number for number in self._unblocked if number not in END]
        self._unblocked.clear()
        while True:
            info = signal.sigtimedwait(_READ, 0)
            if info is None:
                return found
            name, is_parent = processes.named(info.si_pid)[0], info.si_pid == os.getppid()
            everywhere = signals_all(name, is_parent, os.environ) and _signals_all_processes()
            if info.si_signo in END:
                sender = _describe_sender(info.si_code, info.si_pid, info.si_uid)
                what = f"received {_signal_name(info.si_signo)} from {sender}"
                found.append(EndRequest(what, _exit_code(info.si_signo), everywhere))
            elif not everywhere:
                self.for_ranks.append(info.si_signo)

    def close(self) -> None:
        """Close the sockets of the wakeup; a newer object's wakeup stays.

        The signals stay blocked, so those that come now are read by the next object of this class.
        """
        newest = signal.set_wakeup_fd(-1)
        if newest not in (-1, self._theirs.fileno()):  # of a later object, which still works
            signal.set_wakeup_fd(newest, warn_on_full_buffer=False)
        self._ours.close()
        self._theirs.close()

    def _on_signal(self, number: int, frame: object) -> None:
        """Handle a signal that some thread does not block: keep its number for the next turn().

        SIGCHLD only wakes up the loop.
        """
        if number != signal.SIGCHLD:
            self._unblocked.append(number)


def _signals_all_processes() -> bool:
    """Check whether Slurm signals all processes below this one, and not this one alone.

    By the first slurm.conf, of SLURM_CONF and three usual places, that names a plugin (proctrack): it is linuxproc. If none
    does: the cgroup of this process is none of a step, or cannot be read.
    """
    for path in (os.environ.get("SLURM_CONF", ""), *_CONFIGURATIONS):
        plugin = proctrack(processes.try_read(path, _LARGEST).decode(errors="replace"))
        if plugin:
            return plugin == "linuxproc"
    return b"/step_" not in processes.try_read("/proc/self/cgroup")


def changed_children() -> Iterator[Tuple[int, int, resource.struct_rusage]]:
    """Reap the children that have ended, and yield (pid, status, usage) of each that has ended, stopped or continued."""
    while True:
        try:
            pid, status, used = os.wait4(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status, used


def unblock() -> None:
    """Unblock all signals, in a child process."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def block_for_launcher() -> None:
    """Set the signal mask of mpirun, in a child process: block only the signals for ranks, and in a step of Slurm SIGTERM.

    mpirun would pass them on to its ranks, which get them from the supervisor; Slurm sends SIGTERM to all processes. mpirun
    catches signals that it finds ignored, and not those that are blocked.
    """
    term = (signal.SIGTERM,) if in_step(os.environ) else ()
    signal.pthread_sigmask(signal.SIG_SETMASK, (*FOR_RANKS, *term))


def _exit_code(number: int) -> int:
    """Return the exit code that a signal to end means: 130 for SIGINT (Ctrl+C in the terminal of this process), else 143."""
    return 130 if number == signal.SIGINT else 143


def _signal_name(number: int) -> str:
    return signal.Signals(number).name


def _describe_sender(code: int, pid: int, uid: int) -> str:
    """Describe the sender of a signal: the kernel, a process outside of this container (pid 0), or pid, command and uid.

    code: si_code. Of pid 1 the name is given instead of the command. For systemd the description adds how to prevent the
    signal.
    """
    if code >= _SI_KERNEL:
        return "the kernel"
    if pid == 0:
        return f"a process outside of this container (uid {uid})"
    name, command = processes.named(pid)
    systemd = name == "systemd"
    shown = (name if pid == 1 else command) or "it has ended"
    return f"pid {pid} ({shown}), uid {uid}{_LINGER if systemd else ''}"
