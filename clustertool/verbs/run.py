"""inv run reads the options, checks, plans, dispatches, starts and follows a job to its end. attach follows a running job.

inv export writes files in place of a start.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from clustertool.actions import load_config
from clustertool.actions.fetch_output import fetch_output
from clustertool.actions.find_jobs import attach_to, has_records, is_waiting, require_known, state_text
from clustertool.actions.follow_job import Inbox, count_started
from clustertool.actions.read_request import no_workspace, read_request
from clustertool.actions.wait_in_queue import CannotStart, EndedBefore, until_started
from clustertool.cli.launchers import nested_launcher
from clustertool.engines import base, known_engines
from clustertool.engines.base import Engine, ExportWish, Submission
from clustertool.engines.job_request import RunRequest, RunWish
from clustertool.errors import ClustertoolError, DataError, NodeLost, NotFound, Survivors, Unreachable, UsageError, only
from clustertool.fleet import this_user
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.folded_names import fold
from clustertool.model.config.job import Options, with_python
from clustertool.model.hints import PROGRAM
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import JobState
from clustertool.model.job.stop_result import read_result
from clustertool.model.joining.engine_place import join_timeout_of
from clustertool.model.masking import Hide
from clustertool.model.paths import LOGS_MARK, folder_of
from clustertool.model.planning.environment import literal
from clustertool.model.planning.plan import Plan, as_dict
from clustertool.model.planning.requests import container_lines
from clustertool.model.quantities import count, human_bytes
from clustertool.model.wire.agent_requests import FollowWanted, StopHow
from clustertool.show.error_text import exit_json
from clustertool.show.job_text import shared_files, show_results
from clustertool.show.plan_view import configuration, environments, plan_tables
from clustertool.show.status_view import reserved_text
from clustertool.show.terminal import RankLines, Terminal
from clustertool.verbs import signals
from clustertool.verbs.follow_session import (
    DetachKey,
    FollowSession,
    choose_ending,
    copy_of_logs,
    finish_log_copy,
    logs_to_show,
    prepare_log_folder,
    show_verdict,
)
from clustertool.verbs.jobs import open_engine, read_join_log, show_join_log
from clustertool.verbs.verb import Call, choose_alias, read_whole_number
from clustertool.watch.waits import away_coordinator

_OPTIONS_OF_RUN = frozenset(  # most scripts have no such options
    """--nproc-per-node --nnodes --node-rank --master --master-addr --rdzv-endpoint --rdzv-backend --ips --servers --server-num
    --worker-num --trainer-num --run-mode --max-restarts --hostfile --detach --all-ranks --dry""".split()
)
# After such an end an engine may start a job again.
_STARTED_AGAIN = (JobState.STOPPED, JobState.LOST, JobState.TIMEOUT)
_SLOW = 2.0  # seconds after which the screen shows what a command does
_RUN, _RESUME = "run", "--resume"


def read_order(call: Call, options: Options, find: Callable[[], Cluster]) -> RunRequest:
    """Read the request of `run` from call.given, on the cluster that `find` finds. It opens no connection.

    Raises UsageError for the command line, DataError for the workspace and its job.toml, ConfigError for conf.py.
    """
    given = call.given
    folder = choose_alias(call, "workspace", "job-dispatch-package")
    named = {name: getattr(given, name) for name in ("job_id", "name", "resume", "keep", "dry", "skip_bad", "wait")}
    settings = known_engines.typed_settings(vars(given))
    wish = RunWish(folder=folder, shown=logs_to_show(call), settings=settings, **named)

    def advise(made: Plan) -> str:
        where = folder or options.job_workspace
        return "" if given.nested else nested_launcher.nesting_warning(made, options, call.typed, where)

    return read_request(call, options, wish, find, advise)


def find_cluster(call: Call, options: Options) -> Cluster:
    """Find the cluster of a run, and start the embedded one if there is no conf.py.

    Raises UsageError without a workspace and a conf.py.
    """
    named = choose_alias(call, "workspace", "job-dispatch-package") or options.job_workspace
    conf = load_config.read_conf(call, call.selection)
    if not (named or conf.values):
        raise no_workspace()
    return load_config.cluster(call, call.selection, start_local=True, conf=conf)


def read_options(call: Call) -> Options:
    """Build the options of `run` from call.given, those not given with their defaults.

    Raises UsageError if two names of one option have different values.
    """
    given = call.given
    if given.workers and given.trainers and given.workers != given.trainers:
        raise UsageError("--workers and --trainers have different values", "they are two names of one option: give one")
    fields = {name: value for name, value in vars(given).items() if name in Options.__dataclass_fields__ and value}
    return replace(
        Options(**fields),
        image=given.image,
        log_dir="",  # that of `run` is on this machine
        devices=choose_alias(call, "devices", "gpus", "xpus", "npus"),
        workers=given.workers or given.trainers or (),
        worker_num=choose_alias(call, "worker-num", "trainer-num"),
    )


def with_program(call: Call, options: Options) -> Options:
    """Return the options with the program behind them as the command: `run train.py --lr 0.1`; as they are without one.

    Without a workspace, call.given gets the current folder as one. Checks that a script is in the workspace, and remarks on
    options of `run` behind it. Raises UsageError for two programs, or a folder; DataError for a script that is not in the
    workspace, and for / or the home folder as the workspace.
    """
    given = call.given
    if not given.program:
        return options
    if options.script:
        raise UsageError(f"run has two programs: {given.program[0]!r} and --script", "give one of them")
    script, *arguments = given.program
    folder = choose_alias(call, "workspace", "job-dispatch-package")
    here = not (folder or options.job_workspace)
    if here and Path(script).is_dir() and ("/" in script or not shutil.which(script)):
        raise UsageError(f"{script!r} is a folder, not a program", f"{PROGRAM} run --workspace {shlex.quote(script)}")
    if here:
        given.workspace = folder = "."
        if Path.cwd() == Path("/") or this_user.is_home(Path.cwd()):
            fix = "go to the folder of your script, or name it: --workspace DIR"
            raise DataError(f"the workspace would be {Path.cwd()}, with all that is in it", fix)
    remark_on_late_options(call, "run", given.program)
    if script.endswith(".py") and folder:
        script = path_in_workspace(Path(folder), script)
    elif folder and "/" in script and not os.path.isabs(script) and not os.path.lexists(Path(folder, script)):
        what = f"there is no {script} in {os.path.abspath(folder)}"
        raise DataError(what, f"a program of the workspace, or a folder: {PROGRAM} run --workspace DIR")
    return replace(options, command=tuple(map(literal, with_python((script, *arguments)))))


def remark_on_late_options(call: Call, program: str, command: Sequence[str]) -> None:
    """Remark on options of `run` or of launchers that stand behind a Python script and are passed to it."""
    names = [text.partition("=")[0].replace("_", "-") for text in command[1:]]
    late = [name for name in dict.fromkeys(names) if name in _OPTIONS_OF_RUN]
    if late and command[0].endswith(".py"):  # torchrun has them, too
        passed = f"{', '.join(late)} {'is' if len(late) == 1 else 'are'} passed to {command[0]}"
        call.remark(f"{passed}; options of {program} stand before the program")


def path_in_workspace(folder: Path, script: str) -> str:
    """Return the path of a script in the workspace; one that was given as absolute is made relative.

    Raises DataError for a script that does not exist or lies outside.
    """
    top = Path(os.path.abspath(folder))
    path = Path(os.path.normpath(top / script))
    if not path.is_file():
        raise DataError(f"there is no {script} in {top}", "name the script as it is called in the workspace")
    if not path.is_relative_to(top):
        what = f"{script} lies outside of the workspace {top}"
        raise DataError(what, "nodes get the workspace only: --workspace DIR")
    return str(path.relative_to(top)) if os.path.isabs(script) else script


# -- run and export ----------------------------------------------------------------------------------------------------


def run(call: Call) -> None:
    """Run a job: read the options and the workspace, check and start it on the nodes, and follow it. See perform().

    --verbose prints the options, and the environment of the first processes, on stderr.
    """
    call.gather_remarks()
    call.terse = not call.given.verbose and DetachKey().readable  # a line names the keys then
    options = with_program(call, read_options(call))
    order = read_order(call, options, lambda: find_cluster(call, options))
    if call.given.verbose and not order.wish.dry:
        aside = Terminal(out=sys.stderr)
        configuration(_configuration(call, order), aside)
        order.planned = functools.partial(environments, terminal=aside)
    perform(call, order)


def _configuration(call: Call, order: RunRequest) -> dict[str, str]:
    """Collect the options that were given, the nodes and the workspace, by name, with SECRETS masked.

    Of variables only the names.
    """
    given = {name: value for name, value in vars(call.given).items() if value and name not in ("verbose", "json")}
    values = {name: " ".join(value) if isinstance(value, tuple) else str(value) for name, value in given.items()}
    if order.options.env:
        values["env"] = ",".join(pair.partition("=")[0] for pair in order.options.env)
    hosts = fold(host.name for host in order.cluster.hosts)
    values.update({"nodes": hosts} if hosts else {}, mode=order.options.mode or (order.spec.mode if order.spec else ""))
    hide = load_config.mask_known_secrets(order.cluster)
    return {name: hide(value) for name, value in values.items() if value}


def export(call: Call) -> None:
    """Write what run would submit to --to or stdout, and print the commands for it.

    It is for a scheduler that this machine cannot reach. Secrets are written to --secrets-to, or with --with-secrets to the
    same file. Files are new and have mode 0600. Raises UsageError if one exists, and the errors of Starter.export().
    """
    given = call.given
    place, apart = _new_place(given.to, "--to"), _new_place(given.secrets_to, "--secrets-to")
    if apart is not None and (given.with_secrets or apart == place):
        raise UsageError("--secrets-to writes the secrets to a file of their own", "leave --with-secrets out")
    options = with_program(call, read_options(call))
    order = read_order(call, options, lambda: find_cluster(call, options))
    with base.engine_of(order.cluster)(order.cluster, call) as engine:
        wish = ExportWish(secrets=given.with_secrets, secrets_place=apart, native=given.native)
        made = base.starter_of(engine, order).export(place, wish)
    if apart is not None:
        _write_private(apart, made.secrets)
    if place is None:
        call.answer({"text": made.text}) if call.json else call.terminal.raw(made.text.encode())
        return
    if made.text:
        _write_private(place, made.text)
        call.terminal.line(str(place))
    else:
        names = sorted(path.name for path in place.iterdir())
        call.terminal.line(f"{place}: {', '.join(names)}")
    if made.note:
        call.terminal.note(made.note)
    for command in made.commands:
        call.terminal.line(f"  {command}")
    written = {"file": str(place)} if made.text else {"folder": str(place), "files": names}
    call.answer({**written, "commands": list(made.commands)})


def _new_place(given: str, option: str) -> Path | None:
    """Return the absolute path of an option, None if it is not given. Raises UsageError if it exists or its folder does not."""
    place = Path(given).absolute() if given else None
    if place is not None and (place.exists() or not place.parent.is_dir()):
        raise UsageError(f"{place} exists, or the folder above it does not", f"give a new place: {option} PLACE")
    return place


def _write_private(place: Path, text: str) -> None:
    """Write a new file with mode 0600."""
    with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def perform(call: Call, order: RunRequest) -> None:
    """Check, submit and follow the job of a request, or with --dry print what would be submitted. Raises the job's error.

    With --detach it returns when all processes run, or with a queue when the job is submitted.
    """
    wish, given = order.wish, call.given
    if given.fetch_logs and given.detach:
        raise UsageError("--fetch-logs waits for the end of the job, and --detach does not", "give one of them")
    if not wish.dry:
        prepare_log_folder(call)
    inbox = Inbox()
    with base.engine_of(order.cluster)(order.cluster, call, inbox.put) as engine:
        starter = base.starter_of(engine, order)
        submission = starter.prepare()
        if wish.dry:
            call.show_remarks()
            _show_submission(call, submission)
            return
        submitted = starter.submit(submission)
        if not engine.capabilities.queues:
            assert submission.plan is not None
            _follow_started(call, order, engine, inbox, submitted.plan or submission.plan, submitted.plan is not None)
        elif given.detach:
            _report_left(call, submitted.job_id, "submitted")
        elif wait_for_start(call, engine, submitted.job_id, order.grace):
            _follow_queued(call, order, engine, inbox, submitted.job_id)


def _follow_started(call: Call, order: RunRequest, engine: Engine, inbox: Inbox, made: Plan, exact: bool) -> None:
    """Follow a started job to its end, or with --detach until all processes run. Raises the job's error.

    exact: `made` is the plan that was started, else the nodes have made their own. If the coordinator's node is lost, the fix
    of the error is the command that resumes the job on the other nodes.
    """
    fleet = engine.fleet
    hide, copy = load_config.mask_known_secrets(order.cluster), copy_of_logs(call, made.job_id)
    lines = RankLines(call.terminal, hide=hide)
    revive = functools.partial(base.revive, engine)
    follow = FollowSession(call, fleet, inbox, made.job_id, lines, choose_ending(engine), copy=copy, revive=revive)
    if exact:
        follow.watch.status.plan = made.ranks
    follow.start({"logs": logs_to_show(call), "tail": None}, made.job.policy.grace)
    if call.given.detach and wait_until_all_run(follow, made.job_id, len(made.processes) if exact else 0):
        order.ended(made)
        return
    try:
        follow_to_end(follow, hide, lambda: order.ended(made))
    except NodeLost as error:
        coordinator = away_coordinator(follow.watch.status)
        if coordinator is not None:
            again = resume_command(call.typed, made.job_id, follow.watch.status.name(coordinator.index))
            error.fix = f"start it again on the other nodes, from its output: {again}"
        raise


def _follow_queued(call: Call, order: RunRequest, engine: Engine, inbox: Inbox, job: str) -> None:
    """Follow a job that has left the queue to its end, and through further starts. Raises the job's error."""
    attach_to(engine, job, exact=True)
    hide, request = load_config.mask_known_secrets(order.cluster), FollowWanted(logs=logs_to_show(call), tail=None)
    follow_starts(call, engine, inbox, job, hide, request, order.grace)


def follow_starts(
    call: Call, engine: Engine, inbox: Inbox, job: str, hide: Hide, request: FollowWanted, grace: float
) -> None:
    """Follow a job to its end, and again after each further start by its engine, until its last end. Raises the job's error.

    grace: seconds, for a stop.
    """
    copy = copy_of_logs(call, job)
    while True:
        lines = RankLines(call.terminal, hide=hide)
        revive = functools.partial(base.revive, engine)
        follow = FollowSession(call, engine.fleet, inbox, job, lines, choose_ending(engine), copy=copy, revive=revive)
        follow.start(request, grace)

        def ended(session: FollowSession = follow) -> None:
            if not session.detached and not session.stopper.stopping:
                _take_output(call, engine, job)
                _warn_of_reserved(call, engine, job)

        if not follow_to_end(follow, hide, ended, engine.starts_again, engine.cause):
            return
        call.note(f"job {job} is queued again, and followed: its engine starts it again")
        if not wait_for_start(call, engine, job, grace):
            return
        attach_to(engine, job, exact=True)
        request = {**request, "tail": None, "offsets": follow.watch.shown}


def _warn_of_reserved(call: Call, engine: Engine, job: str) -> None:
    """Warn of sidecars that keep the resources of a job that has ended. Errors are ignored."""
    with contextlib.suppress(ClustertoolError):
        reserved = reserved_text(job, [pod.sidecars for pod in engine.pods(job)])
        if reserved:
            call.warn(reserved)


def _take_output(call: Call, engine: Engine, job: str) -> None:
    """Fetch the output of an ended job, if a node waits with it, into JOB<id>, with notes, and release the node.

    Does nothing if the node has ended meanwhile. Errors are warnings, except signals, which are raised.
    """
    to, began, shown = Path(folder_of(job)), time.monotonic(), False

    def check() -> None:
        nonlocal shown
        if not shown and time.monotonic() - began > _SLOW:
            shown = True
            call.note(f"job {job}: fetching its output; its first node keeps its resources, GPUs too, until then")
        signals.check()

    try:
        if not engine.holds_output(job):
            return
        done = fetch_output(engine.fleet, check, job, to)[0]
        for text in shared_files(done.shared):
            call.warn(f"job {job}: {text}")
        if done.files:
            (to / LOGS_MARK).touch()
            size = f"{count(done.files, 'file')}, {human_bytes(done.bytes)}"
            call.note(f"job {job}: its output was fetched: {size} -> {done.place}")
        engine.release(job)
    except (ClustertoolError, OSError) as error:
        if isinstance(error, ClustertoolError) and only(error, Unreachable, NotFound):
            return  # without output its node has ended meanwhile
        what = error.what if isinstance(error, ClustertoolError) else str(error)
        left = f"the output is not fetched: {what}; its node waits, and resources stay reserved"
        again = f"{PROGRAM} fetch --job {job}, or give it up: {PROGRAM} stop --job {job}"
        if isinstance(error, signals.STOPS):  # the job has ended well, and this command has not
            error.what, error.fix = left, again
            raise
        call.warn(f"{left}: {again}")


def follow_to_end(
    follow: FollowSession,
    hide: Hide,
    ended: Callable[[], None] = lambda: None,
    again: Callable[[str, int], bool] = lambda job, attempt: False,
    cause: Callable[[str], tuple[str, int] | None] = lambda job: None,
) -> bool:
    """Follow a job until it is over or the user leaves it, copy its logs, show how it ended, and return False.

    Returns True after the verdict, without the rest, if others stopped the job or it timed out, and its engine starts it again.
    Prints how to follow a lost job that is started again. Raises the job's error. ended: is called before the last line, also
    if the user leaves. again: checks whether the engine starts an attempt again. cause: see Engine.cause().
    """

    def over() -> None:
        finish_log_copy(follow)
        ended()

    if not follow.detached:
        try:
            follow.run()
        except Survivors:  # the job is over all the same
            over()
            raise
    if follow.detached:
        follow.report_detached()
        ended()
        return False
    status = follow.watch.status
    if status.outcome is None or status.outcome.state is JobState.LOST:
        with contextlib.suppress(ClustertoolError):
            status.cause = cause(status.job)
    error = show_verdict(follow, hide)
    ended_by_others = status.state in _STARTED_AGAIN and not follow.stopper.stopping
    if ended_by_others and again(status.job, status.attempt):
        if status.state is not JobState.LOST:
            return True
        later = f"{PROGRAM} attach --job {status.job} follows its next start"
        follow.call.note(f"job {status.job} is queued again; {later}")
    over()
    _end_command(error, follow)
    return False


class _Detached(Exception):
    """The exception for a job that its user leaves in the queue."""


def wait_for_start(call: Call, engine: Engine, job: str, grace: float) -> bool:
    """Wait until a queued job has started, with a note at each change, and return True; False if the user detaches.

    The user detaches by Ctrl+D or a hangup. Raises Interrupted or Terminated after a signal, and CannotStart for a job that is
    stuck for the join timeout, both after cancelling the job; EndedBefore after printing the log of the start.
    """
    key = DetachKey()
    key.discard_input()
    signals.count.job = job

    def check() -> None:
        if signals.count.hups or key.pressed():
            raise _Detached
        signals.check()

    if key.readable:
        call.note("Ctrl+C cancels the job; Ctrl+D detaches: the job stays in the queue")
    try:
        for known in until_started(engine, job, check, join_timeout_of(engine.fleet.cluster.join_timeout)):
            call.note(f"job {job}: {state_text(known)}")
    except _Detached:
        _report_left(call, job, "queued", "detached")
        return False
    except EndedBefore:
        show_join_log(call, read_join_log(engine, job))
        raise
    except (*signals.STOPS, CannotStart) as error:
        _cancel_job(call, engine, job, error, grace)
        if not isinstance(error, CannotStart):  # which names the limit
            error.fix = ""
        raise
    return True


def _report_left(call: Call, job: str, state: str, reason: str = "") -> None:
    """Print that the job goes on without this command and how to come back. reason: of the exit code 0, "" for the state."""
    commands = f"{PROGRAM} status --job {job}, {PROGRAM} attach --job {job}, {PROGRAM} stop --job {job}"
    call.terminal.line(f"job {job} is {state}: {commands}")
    call.answer({"job": job, "exit": {"code": 0, "source": "tool", "reason": reason or state}})


def _cancel_job(call: Call, engine: Engine, job: str, error: ClustertoolError, grace: float) -> None:
    """Stop a job by its engine, because of `error`, and print a note before and the results after that."""
    how: StopHow = {"by": error.what, "code": error.code, "grace": grace, "force": False}
    call.note(f"{error.what}: cancelling job {job}")
    answers = engine.cancel(job, how)
    signals.count.job = ""
    if not answers:
        call.note(f"job {job} was cancelled before its start")
    show_results({node: read_result(one, job) for node, one in answers.items()}, call.note)


def wait_until_all_run(follow: FollowSession, job_id: str, total: int) -> bool:
    """Follow a job until all its processes run, for --detach, print how to come back, and return True.

    False if it has ended, is being stopped, or the user has left it. total: number of processes; 0: of the nodes' own plan.
    """

    def all_started(status: JobStatus) -> bool:
        return status.outcome is not None or count_started(status) >= (total or max(1, len(status.processes)))

    follow.run(all_started)
    if follow.detached or follow.watch.status.outcome is not None or follow.stopper.stopping:
        return False
    call, job = follow.call, f"--job {job_id}"
    call.terminal.line(f"job {job_id} runs: {follow.again}, {PROGRAM} logs {job} -f, {PROGRAM} stop {job}")
    call.answer({"job": job_id, "exit": {"code": 0, "source": "tool", "reason": "all started"}})
    return True


def _end_command(error: ClustertoolError | None, follow: FollowSession) -> None:
    """Give the JSON answer, and raise the job's error, or print that it has succeeded."""
    call, status = follow.call, follow.watch.status
    reason = status.outcome.reason if status.outcome else "done"
    outcome = status.outcome and status.outcome.as_dict()
    call.answer({"job": status.job, "exit": exit_json(error, done=reason), "outcome": outcome})
    if error is not None:
        raise error
    call.terminal.note(f"clustertool: exit 0 (job): {reason}")


def _show_submission(call: Call, submission: Submission) -> None:
    """Print, or answer with, the plan and the texts that submit() would use."""
    plan = as_dict(submission.plan) if submission.plan else {}
    lines = container_lines(submission.plan) if submission.plan else {}
    for node in plan.get("nodes", ()):
        if node["node"] in lines:
            node["container"]["command"] = lines[node["node"]]
    texts = {document.name: document.text for document in submission.documents}
    if call.json:
        stands = {"stands": submission.stands} if submission.stands else {}
        call.answer({**(plan or {"job": submission.job_id}), **({"documents": texts} if texts else {}), **stands})
        return
    if submission.stands:
        call.note(submission.stands)
    if plan:
        plan_tables(plan, call.terminal)
    if plan and texts:
        call.terminal.line()
    for name, text in texts.items():
        call.terminal.line(f"--- {name}", "bold")
        call.terminal.block(text.rstrip("\n"))


def resume_command(typed: Sequence[str], job: str, host: str) -> str:
    """Build the command line that runs a job again from the output of `job`, without `host`. typed: how it was started.

    The options are inserted behind `run`, and for clusterrun in front of all, since its script may have options of the same
    names.
    """
    program, *tokens = typed
    at = tokens.index(_RUN) + 1 if _RUN in tokens and not program.endswith("clusterrun") else 0
    options = _without_resume(tokens[at:]) if at else tokens
    return shlex.join([program, *tokens[:at], f"{_RESUME}={job}", f"--skip={host}", *options])


def _without_resume(tokens: Sequence[str]) -> list[str]:
    """Copy a command line without --resume and its value. An argument that begins with a dash is not its value."""
    kept: list[str] = []
    value = False  # the next word may be that of --resume
    for one in tokens:
        dropped = one == _RESUME or one.startswith(f"{_RESUME}=") or (value and not one.startswith("-"))
        value = one == _RESUME
        if not dropped:
            kept.append(one)
    return kept


# -- attach ------------------------------------------------------------------------------------------------------------


def attach(call: Call) -> None:
    """Follow a job that exists, from its queue on, to its end, as `run` does. Raises the job's error."""
    logs, tail = logs_to_show(call), read_whole_number(call.given.tail, "--tail")
    if tail is not None and (call.given.log_dir or call.given.fetch_logs):
        what = "--tail begins in the middle of a log, and --log-dir writes whole logs"
        raise UsageError(what, "leave one of them out")
    inbox = Inbox()
    with open_engine(call, inbox.put, newest=True) as engine:
        fleet = engine.fleet
        job = attach_to(engine, call.given.job, queued=True)
        if is_waiting(engine, job):
            if not wait_for_start(call, engine, job["id"], fleet.cluster.grace):
                return
            fleet, job = engine.fleet, attach_to(engine, job["id"], exact=True)
        if not has_records(job):
            show_join_log(call, read_join_log(engine, job["id"]))
        require_known(job)
        prepare_log_folder(call)
        hide = load_config.mask_known_secrets(fleet.cluster)
        call.terminal.note(f"job {job['id']}: {job['state']}")
        follow_starts(call, engine, inbox, job["id"], hide, {"logs": logs, "tail": tail}, fleet.cluster.grace)
