"""The options of `run` as they were typed become a run request."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from clustertool.actions import load_config
from clustertool.actions.read_request import no_workspace, read_request
from clustertool.cli.launchers import nested_launcher
from clustertool.engines import known_engines
from clustertool.engines.job_request import RunRequest, RunWish, Shown
from clustertool.errors import DataError, UsageError
from clustertool.fleet import this_user
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import Options, with_python
from clustertool.model.hints import PROGRAM
from clustertool.model.planning.environment import literal
from clustertool.model.planning.plan import Plan
from clustertool.verbs.verb import Call, one_of

_OURS = frozenset(  # most scripts have no such options
    """--nproc-per-node --nnodes --node-rank --master --master-addr --rdzv-endpoint --rdzv-backend --ips --servers --server-num
    --worker-num --trainer-num --run-mode --max-restarts --hostfile --detach --all-ranks --dry""".split()
)


def read_order(call: Call, options: Options, find: Callable[[], Cluster]) -> RunRequest:
    """Read what call.given asks for, on the cluster that `find` finds.

    Raises UsageError, DataError, ConfigError; no connection is open yet.
    """
    given = call.given
    folder = one_of(call, "workspace", "job-dispatch-package")
    wish = RunWish(
        folder=folder,
        job_id=given.job_id,
        name=given.name,
        resume=given.resume,
        keep=given.keep,
        dry=given.dry,
        skip_bad=given.skip_bad,
        wait=given.wait,
        shown=wanted(call),
        settings=known_engines.typed_settings(vars(given)),
    )

    def advise(made: Plan) -> str:
        return (
            "" if given.nested else nested_launcher.warning(made, options, call.typed, folder or options.job_workspace)
        )

    return read_request(call, options, wish, find, advise)


def find_cluster(call: Call, options: Options) -> Callable[[], Cluster]:
    """Create the function that finds the cluster of a run.

    Without a workspace it must have a conf.py, and no embedded cluster is started.
    """

    def find() -> Cluster:
        named = one_of(call, "workspace", "job-dispatch-package") or options.job_workspace
        conf = load_config.read_conf(call, call.selection)
        if not (named or conf.values):
            raise no_workspace()
        return load_config.cluster(call, call.selection, start_local=True, conf=conf)

    return find


def read_options(call: Call) -> Options:
    """Read the options of `run`; those that were not given have the defaults of Options."""
    given = call.given
    if given.workers and given.trainers and given.workers != given.trainers:
        raise UsageError("--workers and --trainers have different values", "they are two names of one option: give one")
    fields = {name: value for name, value in vars(given).items() if name in Options.__dataclass_fields__ and value}
    return replace(
        Options(**fields),
        image=given.image,
        log_dir="",  # that of `run` is on this machine
        devices=one_of(call, "devices", "gpus", "xpus", "npus"),
        workers=given.workers or given.trainers or (),
        worker_num=one_of(call, "worker-num", "trainer-num"),
    )


def with_program(call: Call, options: Options) -> Options:
    """Add the program that stands behind the options to them: `run train.py --lr 0.1`. Raises UsageError, DataError.

    Its workspace is the current folder if there is no other one.
    """
    given = call.given
    if not given.program:
        return options
    if options.script:
        raise UsageError(f"run has two programs: {given.program[0]!r} and --script", "give one of them")
    script, *arguments = given.program
    folder = one_of(call, "workspace", "job-dispatch-package")
    here = not (folder or options.job_workspace)
    if here and Path(script).is_dir() and ("/" in script or not shutil.which(script)):
        raise UsageError(f"{script!r} is a folder, not a program", f"{PROGRAM} run --workspace {shlex.quote(script)}")
    if here:
        given.workspace = folder = "."
        if Path.cwd() == Path("/") or this_user.is_home(Path.cwd()):
            fix = "go to the folder of your script, or name it: --workspace DIR"
            raise DataError(f"the workspace would be {Path.cwd()}, with all that is in it", fix)
    note_late(call, "run", given.program)
    if script.endswith(".py") and folder:
        script = script_in(Path(folder), script)
    elif folder and "/" in script and not os.path.isabs(script) and not os.path.lexists(Path(folder, script)):
        what = f"there is no {script} in {os.path.abspath(folder)}"
        raise DataError(what, f"a program of the workspace, or a folder: {PROGRAM} run --workspace DIR")
    return replace(options, command=tuple(map(literal, with_python((script, *arguments)))))


def note_late(call: Call, program: str, command: Sequence[str]) -> None:
    """Name the options of `run` or of launchers that stand behind the script and go to it."""
    names = [text.partition("=")[0].replace("_", "-") for text in command[1:]]
    late = [name for name in dict.fromkeys(names) if name in _OURS]
    if late and command[0].endswith(".py"):  # torchrun has them, too
        passed = f"{', '.join(late)} {'is' if len(late) == 1 else 'are'} passed to {command[0]}"
        call.remark(f"{passed}; options of {program} stand before the program")


def script_in(folder: Path, script: str) -> str:
    """Return the path of a script below the workspace, in which it starts.

    Raises DataError for a script that nodes do not get.
    """
    top = Path(os.path.abspath(folder))
    path = Path(os.path.normpath(top / script))
    if not path.is_file():
        raise DataError(f"there is no {script} in {top}", "name the script as it is called in the workspace")
    if not path.is_relative_to(top):
        raise DataError(
            f"{script} lies outside of the workspace {top}", "nodes get the workspace only: --workspace DIR"
        )
    return str(path.relative_to(top)) if os.path.isabs(script) else script


def wanted(call: Call) -> Shown:
    """Return the logs to show: all, all trainers, or trainers by rank. Raises UsageError."""
    if call.given.all_ranks:
        return "all"
    text = call.given.rank or "0"
    if text == "all":
        return "trainer"
    ranks = [item for item in text.split(",") if item]
    if not ranks or not all(item.isdecimal() for item in ranks):
        raise UsageError(f"--rank {text!r} is not valid", "a rank, several (--rank 3,4), or all")
    return [("trainer", int(item)) for item in ranks]
