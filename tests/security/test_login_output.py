"""A node whose login prints slowly, without end, or never reaches the start of the node side."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import pytest

from clustertool.errors import ClustertoolError, PreflightError, Unreachable
from clustertool.fleet.transfer.rsync_session import Pipe
from clustertool.model.config.cluster import Cluster
from clustertool.ssh.channel import MOST_BYTES, Greeting
from clustertool.ssh.connection import SshLink
from tests.cli import LoopSite, until
from tests.node.harness import Channel
from tests.ssh import sshd
from tests.ssh.links import script

DRIBBLE = "while printf x; do sleep 0.05; done"


def _greeting(script: str, seconds: float) -> tuple[Channel, Greeting]:
    channel = Channel(["/bin/sh", "-c", script], {"PATH": "/usr/bin:/bin"})
    return channel, Greeting(channel, "node7", seconds)


def test_a_login_that_prints_byte_by_byte_has_one_deadline() -> None:
    channel, greeting = _greeting(DRIBBLE, 0.6)
    start = time.monotonic()
    with pytest.raises(Unreachable, match="not complete after 0.6 s.*ends with 'xxx") as caught:
        greeting.skip_to("mark")
    assert time.monotonic() - start < 10, "without its deadline it would wait for ever"
    assert caught.value.node == "node7"
    assert ".bashrc" in caught.value.fix
    channel.kill()


def test_lines_do_not_extend_the_deadline() -> None:
    channel, greeting = _greeting("while echo x; do sleep 0.05; done", 0.6)
    with pytest.raises(Unreachable, match="not complete after 0.6 s"):
        greeting.skip_to("mark")
    channel.kill()


@pytest.mark.parametrize("endless", ["exec yes", "exec cat /dev/zero"])
def test_a_login_that_prints_without_end_has_a_limit(endless: str) -> None:
    channel, greeting = _greeting(endless, 60)
    with pytest.raises(PreflightError, match="prints too much"):
        greeting.skip_to("mark")
    assert len(greeting.rest) < 2 * MOST_BYTES
    channel.kill()


def test_a_login_that_ends_before_the_script_is_sent_shows_its_reason() -> None:
    channel, greeting = _greeting("echo This account is not available; exit 1", 30)
    channel.popen.wait()
    with pytest.raises(EOFError):
        greeting.start(b"true\n")
    assert greeting.ended().endswith("ends with 'This account is not available'")


@pytest.mark.parametrize(
    "start_file, message",
    [
        ("read answer", "reads from its input; it has printed nothing"),
        ("echo Your name?; read a; read b", "reads from its input; its output so far ends with 'Your name\\?'"),
        ("cat >/dev/null", "not complete after 0.6 s.*printed nothing"),
        ("sleep 60", "not complete after 0.6 s.*printed nothing"),
        ("echo Proceed?; sleep 60", "not complete after 0.6 s.*ends with 'Proceed\\?'"),
        ("printf 'a\\nProceed? '; sleep 60", "not complete after 0.6 s.*ends with 'Proceed\\?'"),
        ("echo Proceed? >&2; sleep 60", "not complete after 0.6 s.*ends with 'Proceed\\?'"),
    ],
)
def test_a_start_file_that_waits_is_named(start_file: str, message: str) -> None:
    channel, greeting = _greeting(f"{start_file}; exec /bin/sh", 0.6)
    with pytest.raises(ClustertoolError, match=message) as caught:
        greeting.start(b"echo the script runs")
    for name in (".bashrc", ".zshenv", ".cshrc", "config.fish", "forces a command"):
        assert name in caught.value.fix
    os.killpg(channel.popen.pid, signal.SIGKILL)  # its `sleep`, too, would keep stderr open, whose end is waited for
    channel.end()


@pytest.mark.parametrize(
    "start_file, message",
    [
        ("exit 0", "exit code 0 and did not start /bin/sh; it has printed nothing"),
        (
            "echo a; echo no >&2; set -e; false",
            "exit code 1 and did not start /bin/sh; its output so far ends with 'a'",
        ),
        ("echo broken >&2; exit 3", "exit code 3 and did not start /bin/sh; its output so far ends with 'broken'"),
        ("exec cat", "ended and did not start /bin/sh; its output so far ends with '}'"),  # a forced command
    ],
)
def test_a_start_file_that_ends_the_shell_is_named(start_file: str, message: str) -> None:
    channel, greeting = _greeting(f"{start_file}; exec /bin/sh", 30)
    with pytest.raises(EOFError):
        if start_file == "exec cat":
            threading.Timer(0.3, channel.popen.terminate).start()
        greeting.start(b"true")
    assert message in greeting.ended()


@pytest.mark.parametrize("start_file", ["exec sh", "exec bash", "echo noise >&2", "false"])
def test_what_a_start_file_may_do(start_file: str) -> None:
    channel, greeting = _greeting(f"{start_file}; exec /bin/sh", 30)
    greeting.start(b"echo the script runs")
    assert greeting.line() == "the script runs"
    channel.kill()


def test_what_follows_the_last_line_is_kept() -> None:
    channel, greeting = _greeting("printf 'noise\\nmark\\nready\\n\\001\\002'", 30)
    greeting.skip_to("mark")
    assert greeting.line() == "ready"
    rest = greeting.rest
    while len(rest) < 2:
        rest += channel.recv(10)
    assert rest == b"\1\2"
    channel.kill()


# More than the limit at once, and then some more without end: what `yes` prints, both ends encrypt as fast as they can.
FLOOD = "while head -c 70000 /dev/zero; do sleep 0.1; done"


@pytest.mark.parametrize("noise", [DRIBBLE, FLOOD])
def test_a_script_starts_in_time_or_fails(
    cluster_of: Callable[..., tuple[Cluster, list[sshd.Sshd]]], noise: str
) -> None:
    """What rsync and `exec` use."""
    if not sshd.READS_BASHRC:
        pytest.skip("the login shell here does not read .bashrc")
    cluster, servers = cluster_of(1)
    with SshLink(cluster.hosts[0], cluster) as link:
        (servers[0].home / ".bashrc").write_text(noise + "\n")
        start = time.monotonic()
        with pytest.raises(PreflightError, match=r"not complete after 0.5 s|prints too much"):
            Pipe(link, b"true\n", timeout=0.5)
        with pytest.raises(Unreachable, match="no answer within 0.5 s"):
            script(link, b"true\n", timeout=0.5)
        assert time.monotonic() - start < 10


@pytest.mark.parametrize("greeting", [b"x", b"SSH-2.0-x", b"line\r\n"])
def test_a_server_that_dribbles_before_the_key_exchange(laptop: object, greeting: bytes) -> None:
    """One byte (or line) a time, and never a complete banner."""
    from clustertool.model.config.cluster import read_cluster

    server = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def dribble() -> None:
        with server.accept()[0] as peer:
            while not over.wait(0.05):
                try:
                    peer.sendall(greeting)
                except OSError:
                    return

    thread = threading.Thread(target=dribble, daemon=True)
    thread.start()
    cluster = read_cluster({"HOSTS": [f"127.0.0.1:{server.getsockname()[1]}"], "CONNECT_TIMEOUT": 1})
    start = time.monotonic()
    with pytest.raises(ClustertoolError):
        SshLink(cluster.hosts[0], cluster)
    assert time.monotonic() - start < 10, "the banner would never be complete"
    over.set()
    thread.join(5)
    server.close()


@pytest.mark.chaos
def test_stop_reaches_the_other_nodes_at_once(site: Callable[..., LoopSite]) -> None:
    """One node's login prints one byte per second. Its failure is reported after the deadline, with the fix."""
    if not sshd.READS_BASHRC:
        pytest.skip("the login shell here does not read .bashrc")
    one = site(3)
    one.workspace(train_py="import time; time.sleep(600)")
    one.inv("run", "--workspace", "job", "--detach").ends(0)
    while left := one.living():  # a lost job, which does not run
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    job = one.inv("run", "--workspace", "job", "--detach").ends(0).job
    until(lambda: len([process for process in one.living() if "train.py" in process.argv]) == 3)
    (one.home(2) / ".bashrc").write_text("while printf x; do sleep 1; done\n")
    one.conf(CONNECT_TIMEOUT=4)  # 12 s for the login
    stop = one.start("stop")
    stop.says("127.0.0.4: still logging in; stopping on the other nodes now")
    until(lambda: not [process for node in (0, 1) for process in one.processes(node) if "train.py" in process.argv])
    done = stop.wait()
    assert done.code == 69
    assert f"job {job}: 127.0.0.[2-3]: clean" in done.out
    assert "127.0.0.4: job" in done.err
    assert "the login is not complete after 12 s, its output so far ends with 'x" in done.err
    assert ".bashrc" in done.err
    (one.home(2) / ".bashrc").unlink()
    one.inv("stop", "--job", job).ends(0)


def test_commands_name_the_start_file_of_a_node(site: Callable[..., LoopSite]) -> None:
    if not sshd.READS_BASHRC:
        pytest.skip("the login shell here does not read .bashrc")
    one = site(1)
    one.conf(CONNECT_TIMEOUT=1)  # 6 s for the login
    for text, what in (
        (
            "echo Name?; read -r name",
            "a start file of the login shell reads from its input; its output so far ends with 'Name?'",
        ),
        (
            "echo closed >&2; exit 0",
            "ended with exit code 0 and did not start /bin/sh; its output so far ends with 'closed'",
        ),
        (
            "echo Go on?; while printf ' '; do sleep 1; done",
            "did not start /bin/sh; its output so far ends with 'Go on?'",
        ),
    ):
        (one.home(0) / ".bashrc").write_text(text + "\n")
        done = one.inv("check").ends(69)
        assert what in done.out + done.err and "config.fish" in done.out + done.err
        done = one.inv("exec", "--command", "echo the command runs").ends(69)
        assert what.rpartition("'")[0].rpartition("'")[2] in done.err and "config.fish" in done.err
        assert "the command runs" not in done.out and done.seconds < 60
