"""inv exec runs one command on all nodes, and prints equal output once under folded names.

exec_in_job.py has the command line with --job or --in-job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clustertool.actions import load_config
from clustertool.errors import ClustertoolError, UsageError, raise_all
from clustertool.fleet.node_links import NodeLinks
from clustertool.fleet.this_machine import Link
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.folded_names import fold, gather
from clustertool.model.config.hosts import Host
from clustertool.model.hints import PROGRAM
from clustertool.ssh.parallel import Gathered, each
from clustertool.ssh.prompter import Prompter
from clustertool.ssh.user_command import Completed, run_user_command
from clustertool.verbs import signals
from clustertool.verbs.verb import Call, seconds

_OURS = ("--only", "--skip", "--json", "--conf", "--hostfile", "--in-job")  # few programs have such options


@dataclass(frozen=True)
class TypedCommand:
    """A command for nodes. timeout: seconds for each node, 0 without a limit. late: options of exec that stand in it."""

    text: str
    timeout: float
    late: str

    @classmethod
    def read(cls, call: Call) -> TypedCommand:
        """The command of a command line. Raises UsageError."""
        given = call.given
        if given.rank or given.host:
            name = "--rank" if given.rank else "--host"
            raise UsageError(f"{name} needs --in-job", f"{PROGRAM} exec --in-job {name} ...; --only selects nodes")
        typed = " ".join(given.arguments)
        if typed and given.command:
            raise UsageError(f"exec has two commands: {typed!r} and --command", "give one of them")
        command = typed or given.command
        if not command.strip():
            raise UsageError("exec needs a command", f'{PROGRAM} exec --command "uptime"')
        late = [name for name in (text.partition("=")[0] for text in given.arguments) if name in _OURS]
        return cls(command, seconds(given.timeout, "--timeout", 0.0), ", ".join(dict.fromkeys(late)))

    def run(
        self, call: Call, cluster: Cluster, hosts: Sequence[Host], connect: Callable[[Host], Link], prompter: Prompter
    ) -> None:
        """Run it on these hosts of the cluster at once, and print the output. connect: opens the connection to one, in a
        thread. Raises what ended differently."""

        def one(host: Host) -> Completed:
            link = connect(host)
            try:
                return run_user_command(link, self.text, self.timeout, cluster.connect_timeout)
            finally:
                link.close()

        def poll() -> None:
            prompter.serve()
            signals.check()

        try:
            gathered = each({host.index: host for host in hosts}, one, check=poll)
        finally:
            prompter.announce()
        if self.late:
            before = f"options of exec stand before it: {PROGRAM} exec {self.late} ..."
            call.remark(f"{self.late} is part of the command; {before}")
        _tell(call, cluster, gathered)


def exec_(call: Call) -> None:
    typed = TypedCommand.read(call)
    instead = f"{PROGRAM} exec --job J COMMAND runs it on the nodes of job J"
    cluster = load_config.cluster(call, call.selection, start_local=True, of_hosts="exec", instead=instead)
    with NodeLinks(cluster, Prompter(call.person())) as links:
        typed.run(call, cluster, cluster.hosts, links.connect, links.prompter)


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
