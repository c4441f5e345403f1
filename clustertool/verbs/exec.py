"""inv exec runs one command on all nodes, and prints equal output once under folded names."""

from __future__ import annotations

from typing import Any

from clustertool.errors import ClustertoolError, UsageError, raise_all
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.show.table import fold, gather
from clustertool.ssh.connection import SshLink, run_user_command
from clustertool.ssh.parallel import each
from clustertool.ssh.prompter import Prompter
from clustertool.verbs import load_config, signals
from clustertool.verbs.verb import Call, User


def exec_(call: Call) -> None:
    """Run a command on all nodes."""
    if not call.given.command.strip():
        raise UsageError("exec needs a command", 'inv exec --command "uptime"')
    timeout = _seconds(call.given.timeout)
    cluster = load_config.cluster(call, start_local=True)
    prompter, command = Prompter(User()), call.given.command

    def one(host: Host) -> Any:
        link = SshLink.open(host, cluster, prompt=prompter)
        try:
            return run_user_command(link, command, timeout)
        finally:
            link.close()

    def poll() -> None:
        prompter.serve()
        signals.check()

    try:
        gathered = each({host.index: host for host in cluster.hosts}, one, check=poll)
    finally:
        prompter.announce()
    _tell(call, cluster, gathered)


def _seconds(text: str) -> float:
    try:
        return float(text or 0)
    except ValueError:
        raise UsageError(f"--timeout {text!r}", "a number of seconds") from None


def _tell(call: Call, cluster: Cluster, gathered: Any) -> None:
    """Output by node, then the highest code; 69 if a node did not answer."""
    names = {host.index: host.name for host in cluster.hosts}
    if call.json:
        nodes = {
            names[node]: {"code": done.code, "stdout": _text(done.stdout), "stderr": _text(done.stderr)}
            for node, done in gathered.ok.items()
        }
        call.answer({"nodes": nodes, "unreachable": {names[node]: e.what for node, e in gathered.failed.items()}})
    else:
        _print(call, {names[node]: done for node, done in gathered.ok.items()})
    raise_all(list(gathered.failed.values()))
    worst = max((done.code for done in gathered.ok.values()), default=0)
    if worst:
        bad = [names[node] for node, done in gathered.ok.items() if done.code]
        alike = len({done.code for done in gathered.ok.values() if done.code}) == 1
        error = ClustertoolError(
            f"the command ended with {'' if alike else 'at worst '}exit code {worst} on {fold(bad)}"
        )
        error.code, error.source = worst, "job"
        raise error


def _print(call: Call, done: dict[str, Any]) -> None:
    outputs = {name: (d.stdout, d.stderr, d.code) for name, d in done.items()}
    for folded, (stdout, stderr, code) in gather(outputs):
        ending = f" (exit code {code})" if code else ""
        call.terminal.line(f"--- {folded}{ending}", "bold")
        for text in (_text(stdout), _text(stderr)):
            if text:
                call.terminal.block(text.rstrip("\n"))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")
