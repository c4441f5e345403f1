"""inv exec runs one command on all nodes, and prints equal output once under folded names, or each line when it comes.

exec_in_job.py has the command line with --job or --in-job.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from clustertool.actions import load_config
from clustertool.errors import JobFailed, UsageError, raise_all
from clustertool.fleet.node_links import NodeLinks
from clustertool.fleet.this_machine import Link
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.folded_names import fold, gather
from clustertool.model.config.hosts import Host
from clustertool.model.hints import PROGRAM
from clustertool.show.terminal import Terminal, colour_of
from clustertool.ssh.channel import KEEP
from clustertool.ssh.parallel import Gathered, each
from clustertool.ssh.prompter import Prompter
from clustertool.ssh.user_command import Commands, Kept
from clustertool.verbs import signals
from clustertool.verbs.verb import Call, read_seconds
from clustertool.watch.lines import Lines
from clustertool.watch.sanitize import harmless, harmless_lines

_OURS = ("--only", "--skip", "--json", "--stream", "--conf", "--hostfile", "--in-job")  # few programs have such options
_LEAVE = 6.0  # seconds for commands to end at a signal; rank_session.py waits less before KILL


@dataclass(frozen=True)
class TypedCommand:
    """The typed command of `exec`, for nodes.

    timeout: seconds for each node, 0 without a limit. late: options of exec that stand in it. stream: print each line when it
    comes.
    """

    text: str
    timeout: float
    late: str
    stream: bool

    @classmethod
    def read(cls, call: Call) -> TypedCommand:
        """Build the command from the options and arguments of exec.

        Raises UsageError without a command, for two of them, for --stream with --json, and for --rank or --host, which need
        --in-job.
        """
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
        if given.stream and call.json:
            raise UsageError("--stream and --json exclude each other", "leave one of them out")
        late = [name for name in (text.partition("=")[0] for text in given.arguments) if name in _OURS]
        return cls(command, read_seconds(given.timeout, "--timeout", 0.0), ", ".join(dict.fromkeys(late)), given.stream)

    def run(
        self, call: Call, cluster: Cluster, hosts: Sequence[Host], connect: Callable[[Host], Link], prompter: Prompter
    ) -> None:
        """Run the command on these hosts at once, and print the output, or answer with JSON.

        With --stream each line is printed when it comes, the output of a single host too; else equal output once, at the end.
        connect: opens the connection to a host, in a thread. A remark names options of exec in the command. Raises Interrupted
        or Terminated after a signal, the errors of hosts that did not answer, else a JobFailed with the highest exit code.
        """
        names = {host.index: host.name for host in hosts}
        kept = {node: Kept() for node in names}
        shown: dict[int, _Plain | _Named] = {}
        if self.stream:
            shown = {node: _Named(call.terminal, node, name) for node, name in names.items()}
        elif len(hosts) == 1 and not call.json:
            shown = {node: _Plain(call.terminal, name) for node, name in names.items()}
        commands, codes, connecting = Commands(), dict[int, int](), set(names)

        def one(host: Host) -> int:
            node = host.index
            link = connect(host)
            connecting.discard(node)
            try:
                take = shown[node].take if shown else kept[node].take
                codes[node] = commands.run(link, self.text, take, self.timeout, cluster.connect_timeout)
                return codes[node]
            finally:
                if shown:
                    shown[node].end()
                link.close()

        def serve() -> bool:
            prompter.serve()
            return not connecting

        try:
            gathered = each({host.index: host for host in hosts}, one, check=create_signal_check(call, commands, serve))
        finally:
            prompter.announce()
            silent = [node for node in names if node not in shown or not shown[node].begun]
            if not call.json and not self.stream:
                _print_outputs(call, {names[node]: (*kept[node].texts(), codes.get(node)) for node in silent})
            _warn_of_cut(call, {names[node]: one.cut for node, one in kept.items() if one.cut})
        if self.late:
            before = f"options of exec stand before it: {PROGRAM} exec {self.late} ..."
            call.remark(f"{self.late} is part of the command; {before}")
        if call.json:
            call.answer(_json_answer(names, codes, kept, gathered))
        signals.check()
        _raise_worst(names, gathered)


class _Plain:
    """The printer of the only node's output: as it is, when it comes, below a title."""

    def __init__(self, terminal: Terminal, name: str) -> None:
        self._terminal, self._name = terminal, name
        self._decoders = [codecs.getincrementaldecoder("utf-8")("backslashreplace") for _ in range(2)]
        self.begun = False
        self._complete = True  # the last line

    def take(self, data: bytes, error: bool) -> None:
        """Print a part of the output, below the node's name the first time. error: it is of stderr."""
        if not self.begun:
            self.begun = True
            self._terminal.line(f"--- {self._name}", "bold")
        self._write(self._decoders[error].decode(data))

    def end(self) -> None:
        """Print incomplete characters of the output, and a newline if the last line has none."""
        for decoder in self._decoders:
            self._write(decoder.decode(b"", final=True))
        self._write("" if self._complete else "\n")

    def _write(self, text: str) -> None:
        if text:
            self._terminal.write(harmless_lines(text))
            self._complete = text.endswith("\n")


class _Named:
    """The printer of a node's output: each line when it is complete, with the name of the node."""

    begun = True

    def __init__(self, terminal: Terminal, node: int, name: str) -> None:
        self._terminal = terminal
        self._mark = terminal.paint(f"[{harmless(name)}]", colour_of(node)) + " "
        self._lines = Lines(), Lines()

    def take(self, data: bytes, error: bool) -> None:
        """Print the complete lines of a part of the output, each with the node's name. error: it is of stderr."""
        self._write(self._lines[error].feed(data))

    def end(self) -> None:
        """Print the incomplete last lines."""
        for lines in self._lines:
            self._write(lines.end())

    def _write(self, lines: Sequence[str]) -> None:
        if lines:
            self._terminal.write("".join(f"{self._mark}{harmless(line)}\n" for line in lines))


def create_signal_check(call: Call, commands: Commands, serve: Callable[[], bool]) -> Callable[[], None]:
    """Return a function that ends the commands at the first signal, for the parameter `check` of each().

    It raises the signal when no command runs any more, after 6 s, or at a further signal, and warns of hosts where the command
    may still run. serve: is called regularly, and returns whether all connections are open.
    """
    first = 0  # number of signals when the end was requested
    late = 0.0

    def check() -> None:
        nonlocal first, late
        connected, total = serve(), signals.count.total
        if total and not first:
            first, late = total, time.monotonic() + _LEAVE
            commands.end()
        over = total > first or time.monotonic() > late or not (commands.running or connected)
        if total and over:
            left = list(commands.running.values())
            if left:
                call.warn(f"the command may still run on {fold(left)}, which did not answer")
            signals.check()

    return check


def exec_(call: Call) -> None:
    """Run the typed command on all selected hosts, and print its output. Raises the errors of TypedCommand.read() and run()."""
    typed = TypedCommand.read(call)
    instead = f"{PROGRAM} exec --job J COMMAND runs it on the nodes of job J"
    cluster = load_config.cluster(call, call.selection, start_local=True, of_hosts="exec", instead=instead)
    with closing(NodeLinks(cluster, Prompter(call.person()))) as links:
        typed.run(call, cluster, cluster.hosts, links.connect, links.prompter)


def _json_answer(
    names: Mapping[int, str], codes: Mapping[int, int], kept: Mapping[int, Kept], gathered: Gathered[int]
) -> dict[str, object]:
    """Build the JSON answer: exit code and output of each node by name, and why nodes did not answer ("unreachable").

    Nodes without exit code and output are left out of the former. The code is None if it is not known.
    """
    nodes: dict[str, object] = {}
    for node, one in kept.items():
        stdout, stderr = one.texts()
        if node in codes or stdout or stderr:
            left_out = {"left_out": one.cut} if one.cut else {}
            nodes[names[node]] = {"code": codes.get(node), "stdout": stdout, "stderr": stderr, **left_out}
    return {"nodes": nodes, "unreachable": {names[node]: error.what for node, error in gathered.failed.items()}}


def _raise_worst(names: Mapping[int, str], gathered: Gathered[int]) -> None:
    """Raise the errors of nodes that did not answer, else a JobFailed with the highest exit code if one is not 0."""
    raise_all(list(gathered.failed.values()))
    codes = gathered.ok
    worst = max(codes.values(), default=0)
    if worst:
        bad = [names[node] for node, code in codes.items() if code]
        alike = len({code for code in codes.values() if code}) == 1
        most = "" if alike else "at worst "
        raise JobFailed(f"the command ended with {most}exit code {worst} on {fold(bad)}", worst)


def _print_outputs(call: Call, outputs: Mapping[str, tuple[str, str, int | None]]) -> None:
    """Print equal output once, under the folded names of its nodes. Output without an exit code is marked as not complete.

    Nodes that have neither are left out.
    """
    for folded, (stdout, stderr, code) in gather({name: one for name, one in outputs.items() if one != ("", "", None)}):
        ending = " (not complete)" if code is None else f" (exit code {code})" if code else ""
        call.terminal.line(f"--- {folded}{ending}", "bold")
        for text in (stdout, stderr):
            if text:
                call.terminal.block(text.rstrip("\n"))


def _warn_of_cut(call: Call, cut: Mapping[str, int]) -> None:
    """Warn of nodes of whose output a part was left out. cut: bytes left out, by name."""
    if cut:
        most = f"{max(cut.values())} bytes of the output are left out" if len(cut) == 1 else "output is left out"
        how = f"{PROGRAM} exec --stream prints all of it"
        call.warn(f"{most} on {fold(cut)}: {KEEP >> 20} MiB of stdout and of stderr are kept; {how}")
