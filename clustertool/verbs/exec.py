"""inv exec runs one command on all nodes, or on those of a job, and prints equal output once under folded names.

--in-job opens a shell, or runs a command, inside a running rank: in its container, directory and environment.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from clustertool.actions import load_config
from clustertool.actions.find_jobs import attach_to
from clustertool.actions.read_status import read
from clustertool.errors import ClustertoolError, NotFound, PreflightError, UsageError, raise_all
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.this_machine import HereLink
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.hints import PROGRAM
from clustertool.model.job.outcome import Key
from clustertool.model.job.state import JobStatus
from clustertool.model.roles import role_name
from clustertool.model.wire.messages import RANK_SESSION, STATUS
from clustertool.show.table import fold, gather
from clustertool.ssh import terminal_session
from clustertool.ssh.connection import SshLink
from clustertool.ssh.parallel import Gathered, each
from clustertool.ssh.shells import Shells
from clustertool.ssh.user_command import Completed, run_program, run_user_command
from clustertool.verbs import signals
from clustertool.verbs.jobs import opened
from clustertool.verbs.verb import Call, role_of, seconds, whole


def exec_(call: Call) -> None:
    given = call.given
    if given.in_job:
        _in_job(call)
        return
    if given.rank or given.host:
        name = "--rank" if given.rank else "--host"
        raise UsageError(f"{name} needs --in-job", f"{PROGRAM} exec --in-job {name} ...; --only selects nodes")
    typed = " ".join(call.given.arguments)
    if typed and call.given.command:
        raise UsageError(f"exec has two commands: {typed!r} and --command", "give one of them")
    command = typed or call.given.command
    if not command.strip():
        raise UsageError("exec needs a command", f'{PROGRAM} exec --command "uptime"')
    timeout = seconds(call.given.timeout, "--timeout", 0.0)
    with _nodes(call) as (fleet, hosts):
        connecting = fleet.cluster.connect_timeout

        def one(host: Host) -> Completed:
            link = fleet.link(host.index)
            try:
                return run_user_command(link, command, timeout, connecting)
            finally:
                link.close()

        def poll() -> None:
            fleet.prompter.serve()
            signals.check()

        try:
            gathered = each({host.index: host for host in hosts}, one, check=poll)
        finally:
            fleet.prompter.announce()
        _tell(call, fleet.cluster, gathered)


@contextmanager
def _nodes(call: Call) -> Iterator[tuple[Fleet, Sequence[Host]]]:
    """The hosts that are meant, and a fleet that connects to them: all of the cluster, or with --job those of a job."""
    if not call.given.job:
        instead = f"{PROGRAM} exec --job J COMMAND runs it on the nodes of job J"
        cluster = load_config.cluster(call, call.selection, start_local=True, of_hosts="exec", instead=instead)
        with Fleet(cluster, call.check, None, call.person()) as fleet:
            yield fleet, cluster.hosts
        return
    with opened(call) as engine:
        chosen = {host.name for host in engine.fleet.cluster.hosts} if call.given.only or call.given.skip else None
        fleet = engine.live(attach_to(engine, call.given.job)["id"])
        yield fleet, [host for host in fleet.cluster.hosts if chosen is None or host.name in chosen]


def _tell(call: Call, cluster: Cluster, gathered: Gathered[Completed]) -> None:
    """Output by node, then the highest code; 69 if a node did not answer."""
    names = {host.index: host.name for host in cluster.hosts}
    outputs = {names[node]: (done.stdout, done.stderr, done.code) for node, done in gathered.ok.items()}
    if call.json:
        nodes = {
            name: {"code": c, "stdout": _text(out), "stderr": _text(err)} for name, (out, err, c) in outputs.items()
        }
        call.answer({"nodes": nodes, "unreachable": {names[node]: e.what for node, e in gathered.failed.items()}})
    else:
        _print(call, outputs)
    raise_all(list(gathered.failed.values()))
    worst = max((done.code for done in gathered.ok.values()), default=0)
    if worst:
        bad = [names[node] for node, done in gathered.ok.items() if done.code]
        alike = len({done.code for done in gathered.ok.values() if done.code}) == 1
        most = "" if alike else "at worst "
        error = ClustertoolError(f"the command ended with {most}exit code {worst} on {fold(bad)}")
        error.code, error.source = worst, "job"
        raise error


def _print(call: Call, outputs: dict[str, tuple[bytes, bytes, int]]) -> None:
    for folded, (stdout, stderr, code) in gather(outputs):
        ending = f" (exit code {code})" if code else ""
        call.terminal.line(f"--- {folded}{ending}", "bold")
        for text in (_text(stdout), _text(stderr)):
            if text:
                call.terminal.block(text.rstrip("\n"))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


# -- inside a rank


def _in_job(call: Call) -> None:
    given = call.given
    for name in ("timeout", "json"):
        if getattr(given, name):
            raise UsageError(f"--{name} cannot be given with --in-job", f"leave --{name} out")
    command = list(given.arguments) or (["/bin/sh", "-c", given.command] if given.command else [])
    terminal = terminal_session.present()
    if not command and not terminal:
        raise UsageError(
            "exec --in-job opens a shell, which needs a terminal", f"{PROGRAM} exec --in-job COMMAND runs a command"
        )
    role, rank = role_of(given.role), whole(given.rank, "--rank")
    with opened(call, newest=True) as engine:
        job = attach_to(engine, given.job, running=True)["id"]
        status = read(engine.fleet.ask_all(STATUS({"job": job})))
        raise_all(list(engine.fleet.silent.values()))
        key = _chosen(status, role, rank, given.host)
        node = status.processes[key].node
        if node in engine.fleet.failed:
            raise engine.fleet.failed[node]
        fleet = engine.live(job)
        if node not in fleet.agents:
            fleet.reopen(node)
        prefix = fleet.ask_one(node, RANK_SESSION({"job": job, "role": key[0], "rank": key[1]}))["argv"]
        link = fleet.link(node)
        argv = [*prefix, *command]
        where = f"{role_name(key[0])} {key[1]} on {fleet.name(node)}"
        if not terminal:
            code = _without_terminal(link, argv)
        elif isinstance(link, SshLink):
            call.terminal.note(f"{where} (Enter ~ . ends a session that hangs)" if not command else where)
            code = terminal_session.run_on_terminal(link, argv, signals.check)
        elif isinstance(link, HereLink):
            call.terminal.note(where)
            code = link.run(argv)
        else:
            raise PreflightError("the engine of this job has no terminal on its nodes", "give a command, and pipe it")
    if code:
        error = ClustertoolError(f"the command in {where} ended with exit code {code}")
        error.code, error.source = code, "job"
        raise error


def _chosen(status: JobStatus, role: str, rank: int | None, host: str) -> Key:
    """The rank that is meant: without --rank the lowest one that runs, of the role if it has one. Raises NotFound."""
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


def _without_terminal(link: Shells, argv: list[str]) -> int:
    """The program gets no input. Its output is printed when it has ended, byte by byte as it was."""
    done = run_program(link, argv)
    for stream, data in ((sys.stdout, done.stdout), (sys.stderr, done.stderr)):
        stream.flush()
        stream.buffer.write(data)
        stream.flush()
    return done.code
