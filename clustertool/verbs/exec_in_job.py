"""inv exec with a job: one command on the nodes of the job, or with --in-job a shell or a command inside a running rank.

A rank's command has its container, directory and environment.
"""

from __future__ import annotations

import contextlib
import sys

from clustertool.actions.find_jobs import attach_to
from clustertool.actions.read_status import read
from clustertool.errors import JobFailed, NotFound, PreflightError, UsageError, raise_all
from clustertool.fleet.this_machine import HereLink
from clustertool.model.hints import PROGRAM
from clustertool.model.job.outcome import Key
from clustertool.model.job.state import JobStatus
from clustertool.model.roles import role_name
from clustertool.model.wire.messages import RANK_SESSION, STATUS
from clustertool.ssh import terminal_session
from clustertool.ssh.channel import Shells
from clustertool.ssh.connection import SshLink
from clustertool.ssh.parallel import each
from clustertool.ssh.user_command import Commands
from clustertool.verbs import signals
from clustertool.verbs.exec import TypedCommand, create_signal_check
from clustertool.verbs.jobs import open_engine
from clustertool.verbs.verb import Call, read_whole_number, role_of


def exec_in_job(call: Call) -> None:
    """Run the typed command on the nodes of a job that --only and --skip select, or with --in-job in one of its ranks.

    In a rank, without a command, it opens a shell.
    """
    if call.given.in_job:
        _exec_in_rank(call)
        return
    typed = TypedCommand.read(call)
    with open_engine(call) as engine:
        chosen = {host.name for host in engine.fleet.cluster.hosts} if call.given.only or call.given.skip else None
        fleet = engine.fleet_of_job(attach_to(engine, call.given.job)["id"])
        hosts = [host for host in fleet.cluster.hosts if chosen is None or host.name in chosen]
        typed.run(call, fleet.cluster, hosts, lambda host: fleet.link(host.index), fleet.prompter)


def _exec_in_rank(call: Call) -> None:
    """Run a command, or without one a shell at the terminal, in the environment of one rank of a running job.

    Raises UsageError for options that do not fit, and for a shell without a terminal; NotFound if no such rank is there; the
    errors of nodes; and a JobFailed with the exit code of the command, if that is not 0.
    """
    given = call.given
    for name in ("timeout", "json", "stream"):
        if getattr(given, name):
            raise UsageError(f"--{name} cannot be given with --in-job", f"leave --{name} out")
    command = list(given.arguments) or (["/bin/sh", "-c", given.command] if given.command else [])
    terminal = terminal_session.present()
    if not command and not terminal:
        fix = f"{PROGRAM} exec --in-job COMMAND runs a command"
        raise UsageError("exec --in-job opens a shell, which needs a terminal", fix)
    role, rank = role_of(given.role), read_whole_number(given.rank, "--rank")
    with open_engine(call, newest=True) as engine:
        job = attach_to(engine, given.job, running=True)["id"]
        status = read(engine.fleet.ask_all(STATUS({"job": job})))
        raise_all(list(engine.fleet.silent.values()))
        key = _choose_rank(status, role, rank, given.host)
        node = status.processes[key].node
        if node in engine.fleet.failed:
            raise engine.fleet.failed[node]
        fleet = engine.fleet_of_job(job)
        if node not in fleet.agents:
            fleet.reopen(node)
        prefix = fleet.ask_one(node, RANK_SESSION({"job": job, "role": key[0], "rank": key[1]}))["argv"]
        link = fleet.link(node)
        argv = [*prefix, *command]
        where = f"{role_name(key[0])} {key[1]} on {fleet.name(node)}"
        if not terminal:
            code = _run_without_terminal(call, link, argv)
        elif isinstance(link, SshLink):
            call.terminal.note(f"{where} (Enter ~ . ends a session that hangs)" if not command else where)
            code = terminal_session.run_on_terminal(link, argv, signals.check)
        elif isinstance(link, HereLink):
            call.terminal.note(where)
            code = link.run(argv)
        else:
            raise PreflightError("the engine of this job has no terminal on its nodes", "give a command, and pipe it")
    if code:
        raise JobFailed(f"the command in {where} ended with exit code {code}", code)


def _choose_rank(status: JobStatus, role: str, rank: int | None, host: str) -> Key:
    """Return (role, rank) of --role and --rank; without --rank the lowest rank that runs, if possible of this role.

    host: only ranks on the node of this name; "": on any. Raises NotFound for a host that the job does not have, a rank that is
    not there, and if no rank runs.
    """
    names = {node.index: node.name for node in status.nodes.values()}
    if host and host not in names.values():
        raise NotFound(f"job {status.job} has no host {host!r}", f"hosts: {', '.join(names.values())}")
    here = {key: one for key, one in status.processes.items() if not host or names.get(one.node) == host}
    where = f" on {host}" if host else ""
    fix = f"{PROGRAM} status --job {status.job} shows its ranks"
    if rank is not None:
        if (role, rank) not in here:
            raise NotFound(f"job {status.job} has no {role_name(role)} {rank}{where}", fix)
        return role, rank
    living = sorted((key[0] != role, key[1], key[0]) for key, one in here.items() if one.state.alive)
    if not living:
        raise NotFound(f"no rank of job {status.job} runs{where}", fix)
    return living[0][2], living[0][1]


def _run_without_terminal(call: Call, link: Shells, argv: list[str]) -> int:
    """Run the program without input, copy its stdout and stderr to those of this program, and return its exit code.

    Raises Interrupted or Terminated after a signal, and the error of the connection.
    """
    commands = Commands()

    def take(data: bytes, error: bool) -> None:
        if not error:
            call.terminal.raw(data)
            return
        with contextlib.suppress(OSError):
            sys.stderr.buffer.write(data)
            sys.stderr.flush()

    check = create_signal_check(call, commands, lambda: True)
    done = each([link], lambda one: commands.run_program(one, argv, take), check=check)
    signals.check()
    return done.all()[0]
