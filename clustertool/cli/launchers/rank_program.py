"""The program `clusterrun` is one rank of another launcher's (--under), or else the verb.

    srun --ntasks-per-node=4 clusterrun --under slurm train.py
    mpirun -hostfile H clusterrun --under mpi --hosts H train.py

A rank needs the standard library only, and Python 3.8. Where the tool is not installed: PYTHONPATH=... python3 -m
clustertool.cli.launchers.rank_program --under slurm train.py
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from clustertool.errors import ClustertoolError, DataError, JobFailed, UsageError
from clustertool.model.config.job import combine_starts, started_by
from clustertool.model.planning.launched_rank import RankOptions
from clustertool.model.planning.mpi_rank import mpi_rank_environment
from clustertool.model.quantities import HIGHEST_PORT, whole
from clustertool.model.slurm.task_rank import rank_environment
from clustertool.node.devices import detect
from clustertool.node.system import processes

_MOST = 10000  # pservers or trainers of one node
_HOW = {"-m": "module", "--module": "module", "--no-python": "no-python", "--run-path": "run-path"}
_WITH_VALUE = ("--under", "--start-port", "--hosts", "--master", "--server-num", "--worker-num", "--trainer-num")
_OF_MPI = _WITH_VALUE[2:]
RANK_USAGE = (
    "srun clusterrun --under slurm [--start-port P] [--virtual-local-rank] [-m | --no-python | --run-path] train.py, or "
    "mpirun -hostfile H clusterrun --under mpi (--hosts H | --master HOST) [--server-num N] [--worker-num N] [...] train.py"
)
# The values of --under, with what computes the environment of a rank.
UNDER: Dict[str, Callable[[Mapping[str, str], RankOptions], Dict[str, str]]] = dict(  # noqa: C408 - a text would be the name of an engine
    slurm=rank_environment, mpi=mpi_rank_environment
)


class RankOrder(NamedTuple):
    """A command line with --under. hosts: the path of a hostfile, "": not given. how: see started_by()."""

    under: str
    options: RankOptions
    hosts: str
    how: str
    arguments: Tuple[str, ...]


def main() -> None:
    """Run a rank's program in place of this one if --under is given, else the verb clusterrun.

    Exits with the code of an error, which is printed.
    """
    try:
        order = read(sys.argv[1:])
    except UsageError as error:
        sys.exit(_print_error(error))
    if order is not None:
        sys.exit(execute(order))
    # Not imported above: the verb needs libraries that a compute node may not have.
    importlib.import_module("clustertool.verbs.clusterrun").main()


def read(argv: Sequence[str]) -> Optional[RankOrder]:
    """Parse the command line of a rank's program. None where --under is not among the options.

    Raises UsageError for a wrong value, and for other options with --under.
    """
    values: Dict[str, str] = {}
    how, rest = "", list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        argument = rest.pop(0)
        if argument == "--":
            break
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name in _WITH_VALUE:
            if not equals and not rest:
                if "--under" in values:
                    raise UsageError(f"{name} needs a value", RANK_USAGE)
                return None
            values[_WITH_VALUE[-2] if name == _WITH_VALUE[-1] else name] = value if equals else rest.pop(0)
        elif argument in _HOW or name in _HOW:
            how = combine_starts(how, _HOW[name])
        elif name == "--virtual-local-rank":
            values[name] = "1"
        elif "--under" in values:
            raise UsageError(f"{name} has no effect with --under: the launcher has started all ranks", RANK_USAGE)
        else:
            return None
    return _build_order(values, how, rest) if "--under" in values else None


def _build_order(values: Dict[str, str], how: str, arguments: List[str]) -> RankOrder:
    """Check the values of the options with --under, and build the RankOrder.

    Raises UsageError for a value that is unknown, wrong or empty, for an option of --under mpi with another one, and without a
    program.
    """
    under = values["--under"]
    if under not in UNDER:
        raise UsageError(f"--under {under!r} is not known", f"one of {', '.join(UNDER)}")
    for name in _OF_MPI:
        if name in values and under != "mpi":
            raise UsageError(f"{name} has no effect with --under {under}", RANK_USAGE)
        if name in values and not values[name]:
            raise UsageError(f"{name} needs a value", RANK_USAGE)
    if not arguments:
        raise UsageError("what is to be run?", RANK_USAGE)
    options = RankOptions(
        start_port=_number_of_option(values, "--start-port", HIGHEST_PORT),
        own_device="--virtual-local-rank" in values,
        master=values.get("--master", ""),
        server_num=_number_of_option(values, "--server-num", _MOST),
        worker_num=_number_of_option(values, "--worker-num", _MOST),
    )
    return RankOrder(under, options, values.get("--hosts", ""), how, tuple(arguments))


def _number_of_option(values: Mapping[str, str], name: str, most: int) -> int:
    """Parse the value of an option as a number from 1 to `most`; 0 where it is not given or empty.

    Raises UsageError for another value.
    """
    text = values.get(name, "")
    number = whole(text, 1, most) if text else 0
    if number is None:
        noun = "port" if name == "--start-port" else "number of processes"
        raise UsageError(f"{name} {text!r} is not a {noun}", f"a number from 1 to {most}")
    return number


def execute(order: RankOrder) -> int:
    """Replace this process by the rank's program, in the environment of its rank.

    With --hosts, it first checks that this machine has the address of the rank's host. Where one of these fails, it prints the
    error and returns its exit code: 127 for a program that does not exist, 126 for one that cannot be started.
    """
    try:
        environment = UNDER[order.under](processes.own_environment(), _with_machine(order))
        if order.hosts:
            _check_address(environment["POD_IP"])
    except ClustertoolError as error:
        return _print_error(error)
    command = started_by(order.how, order.arguments)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        return _print_error(JobFailed(f"{command[0]} cannot be started: {error.strerror}", code, "correct the command"))


def _with_machine(order: RankOrder) -> RankOptions:
    """Return the options with the content of the hostfile and the devices of this machine if --hosts is given.

    Raises DataError if the hostfile cannot be read.
    """
    if not order.hosts:
        return order.options
    try:
        with open(order.hosts, encoding="utf-8") as file:
            hosts = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        fix = "each node needs the file at this path: copy it there, or put it into a folder that all nodes share"
        raise DataError(f"--hosts {order.hosts}: {reason} on {os.uname().nodename}", fix) from None
    kind, ids = detect.detect_cards()
    return order.options._replace(hosts=hosts, devices=(kind, tuple(ids)))


def _check_address(host: str) -> None:
    """Raise UsageError if the host of the rank has no address, or if none of its addresses is one of this machine."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        fix = "write a name that all nodes know, or the address itself"
        raise UsageError(f"{host} of --hosts has no address on {os.uname().nodename}: {error.strerror}", fix) from None
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
            return
        except OSError:
            continue
    raise UsageError(
        f"by --hosts this rank is on {host}, but mpirun has put it on {os.uname().nodename}",
        "give mpirun the same hostfile; with Open MPI 4, put the host on which mpirun runs at the top of it, because its ranks "
        "are numbered first",
    )


def _print_error(error: ClustertoolError) -> int:
    """Print an error on stderr in the form of the verb, and return its exit code. It needs no libraries."""
    last = f"clustertool: exit {error.code} ({error.source}): {error.brief or error.what}"
    print(f"error: {error.what}\n  fix: {error.fix}\n{last}", file=sys.stderr)
    return error.code


if __name__ == "__main__":
    main()
