"""The program `clusterrun`: as one rank of another launcher's (--under), or else the verb.

    srun --ntasks-per-node=4 clusterrun --under slurm train.py

A rank needs the standard library only, and Python 3.8. Where the tool is not installed: PYTHONPATH=... python3 -m
clustertool.cli.launchers.rank_program --under slurm train.py
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from clustertool.errors import ClustertoolError, JobFailed, UsageError
from clustertool.model.config.job import started_by
from clustertool.model.quantities import HIGHEST_PORT, whole
from clustertool.model.slurm.task_rank import UNDER

_HOW = {"-m": "module", "--module": "module", "--no-python": "no-python", "--run-path": "run-path"}
RANK_USAGE = (
    "srun clusterrun --under slurm [--start-port P] [--virtual-local-rank] [-m | --no-python | --run-path] train.py"
)


class RankOrder(NamedTuple):
    """A command line with --under. how: see started_by()."""

    under: str
    start_port: int
    own: bool
    how: str
    arguments: Tuple[str, ...]


def main() -> None:
    try:
        order = read(sys.argv[1:])
    except UsageError as error:
        sys.exit(_fail(error))
    if order is not None:
        sys.exit(execute(order))
    # Not imported above: the verb needs libraries that a compute node may not have.
    importlib.import_module("clustertool.verbs.clusterrun").main()


def read(argv: Sequence[str]) -> Optional[RankOrder]:
    """None where --under is not among the options. Raises UsageError for a wrong value, and for other options with --under."""
    values: Dict[str, str] = {}
    how, rest = "", list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        argument = rest.pop(0)
        if argument == "--":
            break
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name in ("--under", "--start-port"):
            if not equals and not rest:
                return None
            values[name] = value if equals else rest.pop(0)
        elif argument in _HOW or name in _HOW:
            how = how or _HOW[name]
        elif name == "--virtual-local-rank":
            values[name] = "1"
        elif "--under" in values:
            raise UsageError(f"{name} has no effect with --under: the launcher has started all ranks", RANK_USAGE)
        else:
            return None
    return _order(values, how, rest) if "--under" in values else None


def _order(values: Dict[str, str], how: str, arguments: List[str]) -> RankOrder:
    under, port = values["--under"], values.get("--start-port", "")
    if under not in UNDER:
        raise UsageError(f"--under {under!r} is not known", f"one of {', '.join(UNDER)}")
    number = whole(port, 1, HIGHEST_PORT) if port else 0
    if number is None:
        raise UsageError(f"--start-port {port!r} is not a port", f"a number from 1 to {HIGHEST_PORT}")
    if not arguments:
        raise UsageError("what is to be run?", RANK_USAGE)
    return RankOrder(under, number, "--virtual-local-rank" in values, how, tuple(arguments))


def execute(order: RankOrder) -> int:
    """Become the rank's program. Returns the exit code where that fails."""
    try:
        environment = UNDER[order.under](os.environ, order.start_port, order.own)
    except ClustertoolError as error:
        return _fail(error)
    command = started_by(order.how, order.arguments)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        return _fail(JobFailed(f"{command[0]} cannot be started: {error.strerror}", code, "correct the command"))


def _fail(error: ClustertoolError) -> int:
    """Print an error as the verb does, which has libraries for that."""
    last = f"clustertool: exit {error.code} ({error.source}): {error.brief or error.what}"
    print(f"error: {error.what}\n  fix: {error.fix}\n{last}", file=sys.stderr)
    return error.code


if __name__ == "__main__":
    main()
