"""inv exec runs one command on all nodes, or on those of a job, and prints equal output once under folded names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from clustertool.actions import load_config
from clustertool.actions.find_jobs import attach_to
from clustertool.errors import ClustertoolError, UsageError, raise_all
from clustertool.fleet.fleet import Fleet
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.hints import PROGRAM
from clustertool.show.table import fold, gather
from clustertool.ssh.parallel import Gathered, each
from clustertool.ssh.user_command import Completed, run_user_command
from clustertool.verbs import signals
from clustertool.verbs.jobs import opened
from clustertool.verbs.verb import Call, seconds


def exec_(call: Call) -> None:
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
