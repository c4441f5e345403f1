"""A joining process begins here: it reads the join file, finds out whether this machine is the coordinator, and joins.

    main(["--file", "0", "--report"])            the join file from descriptor 0, progress as lines of JSON
    start_bundle(["bundle.pyz", "join", "--index", "2"])

The process is its node's supervisor in the foreground. Its exit code is that of the job, or its own where the job did not
start.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import replace
from typing import NoReturn, Optional, Sequence

from clustertool.errors import PreflightError, UsageError
from clustertool.model.joining import join_file
from clustertool.model.joining.engine_place import with_engine_place
from clustertool.model.joining.join_file import JoinFile, MeetingPoint
from clustertool.model.joining.join_offers import COORDINATOR
from clustertool.model.quantities import HIGHEST_PORT, whole
from clustertool.node.join import meeting
from clustertool.node.join.bundle_content import BundleContent
from clustertool.node.join.epoch_loop import EpochLoop
from clustertool.node.join.join_coordinator import JoinCoordinator
from clustertool.node.join.join_engine import engine_of, require_private
from clustertool.node.join.join_report import JoinReport
from clustertool.node.join.joiner import Joiner
from clustertool.node.join.joining_node import JoiningNode
from clustertool.node.system import path_trust, prctl, processes
from clustertool.node.system.child_signals import Signals

_LARGEST = 256 << 20  # bytes of a join file


def start_bundle(argv: Sequence[str]) -> int:
    """Run the command `join` of a bundle, and return the exit code; for another command write the usage.

    argv: the path of the bundle, `join`, options.
    """
    bundle, *arguments = argv
    if arguments[:1] != ["join"]:
        sys.stderr.write(f"usage: python3 {bundle} join [--index I] [--coordinator HOST[:PORT]]\n")
        return UsageError.code
    return main(arguments[1:], bundle)


def main(arguments: Sequence[str], path: str = "") -> int:
    """Join as the options in `arguments` say, report errors, and return the exit code.

    path: of the bundle, "" where the join file is by itself.
    """
    report = JoinReport(lines="--report" in arguments)
    processes.take_environment(os.getpid())
    processes.outlive()
    processes.set_name("ct-join")
    return report.guarded(lambda: _start(arguments, path, report))


def start_detached(reports: int, source: int, umask: int, *kept: int) -> None:
    """Join in a process that an agent has detached, and report the progress and errors.

    reports: a descriptor for progress as lines of JSON. source: that of the join file. umask: that of the ranks. kept:
    descriptors that stay open as long as this process lives.
    """
    for descriptor in (reports, source, *kept):
        os.set_inheritable(descriptor, False)
    os.umask(umask)
    processes.take_environment(os.getpid())
    processes.set_name("ct-join")
    report = JoinReport(lines=False, also=reports, log=True)
    report.guarded(lambda: _join(_read_join_file(str(source)), report, None))


def _start(arguments: Sequence[str], path: str, report: JoinReport) -> int:
    """Read the join file, which may be in the bundle, and join under its engine with the options. Returns the exit code.

    With --with-parent, the process gets SIGTERM when its parent ends.
    """
    given = _parse_arguments(arguments)
    if given.with_parent:
        prctl.end_with_parent(signal.SIGTERM)
    bundle = BundleContent(path) if path else None
    join = bundle.join_file() if bundle is not None else _read_join_file(given.file)
    return engine_of(join).run(join, lambda to: _join(_with_options(join, given), to, bundle), report)


class _Parser(argparse.ArgumentParser):
    """A parser of options that raises UsageError in place of an exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, "join --help shows the options")


def _parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `join`. Raises UsageError for wrong ones; --help prints and exits."""
    parser = _Parser(prog="join", description="Join a job as one of its nodes.")
    parser.add_argument("--index", default="", help="of this machine, from 0; 0 is the coordinator")
    parser.add_argument("--coordinator", default="", metavar="HOST[:PORT]", help="where the coordinator listens")
    parser.add_argument("--file", default="0", help="the join file: a path, or a descriptor such as 0")
    parser.add_argument("--report", action="store_true", help="write progress as lines of JSON to stdout")
    parser.add_argument("--with-parent", action="store_true", help="before the job starts, end when its starter ends")
    return parser.parse_args(list(arguments))


def _with_options(join: JoinFile, given: argparse.Namespace) -> JoinFile:
    """Set index and coordinator: from the options, else the engine's variables, else as in the file; and check the join file.

    Raises UsageError for a wrong index, coordinator or join file, and DataError for an unknown engine.
    """
    if not (given.index and given.coordinator):
        join = engine_of(join).with_address(with_engine_place(join, os.environ))
    if given.index:
        index = whole(given.index, 0, 99999)
        if index is None:
            raise UsageError(f"--index {given.index!r} is no index", f"a whole number from 0 to {join.nnodes - 1}")
        join = replace(join, index=index)
    if given.coordinator:
        join = replace(join, coordinator=_parse_meeting_point(given.coordinator, join.coordinator.port))
    return join_file.check(join)


def _parse_meeting_point(text: str, port: int) -> MeetingPoint:
    """Parse HOST, HOST:PORT, an IPv6 address or [IPv6]:PORT. port: for a text without one.

    Raises UsageError for another text.
    """
    host, colon, last = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        return MeetingPoint(text.strip("[]"), port)
    number = whole(last, 1, HIGHEST_PORT)
    if number is None or not host:
        raise UsageError(f"--coordinator {text!r} is not right", f"HOST or HOST:PORT, a port from 1 to {HIGHEST_PORT}")
    return MeetingPoint(host.strip("[]"), number)


def _read_join_file(name: str) -> JoinFile:
    """Read the join file. name: its path, or the number of an open descriptor.

    Raises PreflightError if it cannot be opened, or others may read it, and DataError for a damaged one.
    """
    fd = int(name) if name.isdecimal() else _open_join_file(name)
    with open(fd, "rb") as file:
        text = file.read(_LARGEST)
    if fd == 0:
        os.open(os.devnull, os.O_RDONLY)  # becomes descriptor 0
    return join_file.from_json(text.decode("utf-8", "replace"))


def _open_join_file(path: str) -> int:
    """Open the join file, and return its descriptor.

    Raises PreflightError if it cannot be opened, is a link, is not this user's, or is not closed to others.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise PreflightError(f"{path} cannot be read: {error.strerror}", "name the join file") from None
    try:
        require_private(os.fstat(fd), path)
    except PreflightError:
        os.close(fd)
        raise
    return fd


def _join(join: JoinFile, report: JoinReport, bundle: Optional[BundleContent]) -> int:
    """Join as coordinator or joiner, or in each epoch of an elastic job, and return the exit code of this node.

    The process gets umask 077, and / as its working directory.
    """
    umask = os.umask(0o077)
    os.chdir("/")  # a joining process must not keep a file system in use
    path_trust.set_group(engine_of(join).root_group(join))
    if join.job.elastic.present:
        return EpochLoop(join, report, umask, bundle).run(meeting.place_of(join))
    signals, place = Signals(), meeting.place_of(join)
    node = JoiningNode(replace(join, index=place.number), report, umask, bundle)
    if place.number == COORDINATOR:
        return JoinCoordinator(node, signals, place).run()
    return Joiner(node, signals, place.doubt).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
