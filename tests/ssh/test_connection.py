"""A connection: what runs on it, what is kept from it, how it ends, and what is reported when there is none."""

from __future__ import annotations

import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import paramiko
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from paramiko.common import cMSG_CHANNEL_DATA, cMSG_CHANNEL_EOF

from clustertool.errors import AuthError, Interrupted, PreflightError, TimedOut, Unreachable, UsageError
from clustertool.fleet.agent_client import AgentClient
from clustertool.fleet.transfer.rsync_session import Pipe
from clustertool.model.config.cluster import Cluster, read_cluster
from clustertool.ssh.channel import KEEP, ended_by_loss
from clustertool.ssh.connection import SshLink
from clustertool.ssh.parallel import each
from clustertool.ssh.prompter import Prompter
from clustertool.ssh.user_command import Commands, Kept
from tests.free_ports import free_port
from tests.ssh import sshd
from tests.ssh.accounts import Host, Typist
from tests.ssh.links import Delayed, close_all, forgotten, open_all, run_user_command, script
from tests.ssh.sshd import until

needs_bash = pytest.mark.skipif(not sshd.READS_BASHRC, reason="needs an account whose login shell is bash")


@pytest.fixture
def link(cluster_of: Any) -> Iterator[SshLink]:
    cluster, _ = cluster_of(1)
    with SshLink(cluster.hosts[0], cluster) as link:
        yield link


# ---- scripts


def test_script_gives_both_streams_and_the_code(link: SshLink) -> None:
    done = script(link, b"echo out; echo err >&2; printf '\\000\\377'; exit 3\n", 10)
    assert (done.code, done.stdout, done.stderr) == (3, b"out\n\0\xff", b"err\n")


@needs_bash
def test_what_start_files_print_is_noise(cluster_of: Any) -> None:
    cluster, (server,) = cluster_of(1)
    (server.home / ".bashrc").write_text("echo welcome; echo beware >&2\n")
    with SshLink(cluster.hosts[0], cluster) as link:
        done = script(link, b"echo $0; exit 4\n", 10)
        assert (done.code, done.stdout, done.stderr) == (4, b"/bin/sh\n", b"")
        done = run_user_command(link, "echo mine", 10)
        assert (done.stdout, done.stderr) == (b"mine\n", b"")


def test_output_is_bounded_and_costs_no_more_than_its_bytes(link: SshLink) -> None:
    start = time.monotonic()
    done = script(link, b"head -c 50000000 /dev/zero; head -c 1000 /dev/zero >&2\n", 60)
    assert (done.code, len(done.stderr)) == (0, 1000)
    assert KEEP - 64 <= len(done.stdout) <= KEEP
    assert time.monotonic() - start < 40


def test_much_on_stderr_alone_does_not_block(link: SshLink) -> None:
    done = script(link, b"head -c 9000000 /dev/zero >&2; echo done\n", 30)
    assert done.stdout == b"done\n" and len(done.stderr) == 9000000


def test_script_that_does_not_end_in_time(link: SshLink) -> None:
    start = time.monotonic()
    with pytest.raises(Unreachable, match="0.5 s"):
        script(link, b"sleep 100 </dev/null\n", 0.5)
    assert time.monotonic() - start < 5
    assert script(link, b"echo still\n", 10).stdout == b"still\n"


def test_shell_killed_by_a_signal(link: SshLink) -> None:
    assert script(link, b"kill -9 $$\n", 10).code == 128 + signal.SIGKILL


@needs_bash
def test_pipe_gives_the_script_exactly_our_bytes(cluster_of: Any) -> None:
    cluster, (server,) = cluster_of(1)
    (server.home / ".bashrc").write_text("echo noise; seq 1000\n")
    with SshLink(cluster.hosts[0], cluster) as link:
        for size in (0, 1, 127, 128, 4096, 200000):
            data = os.urandom(size)
            pipe = Pipe(link, b"x='a  \\b\n$HOME'\nprintf '%s' \"$x\" >&2; echo\tgo\ncat\nexit 5")
            pipe.channel.sendall(data)
            pipe.channel.shutdown_write()
            got = b"".join(iter(pipe.recv, b""))
            assert got == b"go\n" + data, size
            assert pipe.code(5) == 5
            assert pipe.errors() == b"a  \\b\n$HOME"
            pipe.close()


# ---- the user's commands


COMMANDS = [
    ("true", b"", 0),
    ("exit 7", b"", 7),
    ("echo 'it''s' \"$((1 + 1))\" `echo x` \\\\ !", b"its 2 x \\ !\n", 0),
    ("echo a\necho b\n\n", b"a\nb\n", 0),
    ("cat <<'EOF'\n$HOME\nEOF\n", b"$HOME\n", 0),
    ("cat; echo $?", b"0\n", 0),
    ("kill -TERM $$", b"", 128 + signal.SIGTERM),
    ("no-such-command-anywhere", b"", 127),
    ("printf '%s' 'ä€'", "ä€".encode(), 0),
    ("", b"", 0),
    ("echo $0", f"{pwd.getpwuid(os.getuid()).pw_shell}\n".encode(), 0),
]


def test_user_commands(link: SshLink) -> None:
    """Commands of all kinds, by the user's login shell."""
    for command, stdout, code in COMMANDS:
        done = run_user_command(link, command, 20)
        assert (done.stdout, done.code) == (stdout, code), command


@pytest.mark.parametrize(
    "command",
    [
        "sleep {}; true",
        "trap '' TERM; sleep {}; true",
        "exec >&- 2>&-; trap '' TERM; sleep {}; true",
        "timeout 900 sleep {}",  # a process group of its own
        "setsid sleep {}; true",
        "sleep {} & exit 0",  # has the output open
    ],
)
def test_a_command_that_takes_too_long_is_ended(link: SshLink, command: str) -> None:
    seconds = f"{random.randint(10**6, 10**7)}"
    with pytest.raises(TimedOut, match="did not end within 0.5 s and was ended"):
        run_user_command(link, command.format(seconds), 0.5)
    until(lambda: subprocess.run(["pgrep", "-f", f"sleep {seconds}"], stdout=subprocess.DEVNULL).returncode)


def test_a_command_that_takes_too_long_where_one_session_is_allowed(cluster_of: Any) -> None:
    cluster, _ = cluster_of(1, extra=["MaxSessions 1"])
    with SshLink(cluster.hosts[0], cluster) as link, pytest.raises(TimedOut, match="and was ended"):
        run_user_command(link, "exec sleep 30", 0.5)


def test_a_command_that_has_ended_leaves_what_it_has_put_into_the_background(link: SshLink) -> None:
    done = run_user_command(link, "sleep 60 >/dev/null 2>&1 & echo $!", 20)
    link.close()
    pid = int(done.stdout)
    time.sleep(0.3)
    os.kill(pid, signal.SIGKILL)  # raises where it has ended


@needs_bash
def test_a_command_where_the_login_reads_its_input(cluster_of: Any) -> None:
    cluster, (server,) = cluster_of(1)
    (server.home / ".bashrc").write_text("echo 'Which project?'; cat >/dev/null\n")
    with (
        SshLink(cluster.hosts[0], cluster) as link,
        pytest.raises(Unreachable, match="not complete after 6 s.*project"),
    ):
        Commands().run(link, "echo", Kept().take, opening=2)


def test_user_command_limits(link: SshLink) -> None:
    with pytest.raises(UsageError):
        run_user_command(link, "a\0b", 1)


@needs_bash
@pytest.mark.parametrize("shell", ["tcsh", "fish", "bash", "dash"])
def test_any_login_shell(cluster_of: Any, shell: str) -> None:
    path = shutil.which(shell)
    if not path:
        pytest.skip(f"needs {shell}")
    cluster, (server,) = cluster_of(1, extra=[f'ForceCommand exec {path} -c "$SSH_ORIGINAL_COMMAND"'])
    (server.home / ".bashrc").write_text(f"export SHELL={path}; echo noise\n")
    with SshLink(cluster.hosts[0], cluster) as link:
        assert script(link, b'echo "$((2 * 3))"\n', 10).stdout == b"6\n"
        done = run_user_command(link, "echo 'a  b'\necho $0 | tr a-z A-Z\nexit 3\n", 10)
        if shell == "fish":  # has no $0
            done = run_user_command(link, "echo 'a  b'\nstatus fish-path | tr a-z A-Z\nexit 3\n", 10)
        assert (done.code, done.stdout.splitlines()[0]) == (3, b"a  b") and shell.upper().encode() in done.stdout
        pipe = Pipe(link, b'read x; echo "<$x>"')
        pipe.channel.sendall(b"hello\n")
        assert pipe.recv() == b"<hello>\n"
        pipe.close()


def test_login_shell_that_starts_nothing(cluster_of: Any) -> None:
    cluster, _ = cluster_of(1, extra=["ForceCommand echo This account is not available; exit 1"])
    with SshLink(cluster.hosts[0], cluster) as link:
        with pytest.raises(PreflightError, match="This account is not available"):
            script(link, b"echo\n", 10)
        with pytest.raises(PreflightError, match="This account is not available"):
            Pipe(link, b"cat")


# ---- how it ends


def test_close_is_quick_and_twice_is_fine_and_leaves_no_thread(cluster_of: Any) -> None:
    cluster, _ = cluster_of(2)
    links = list(open_all(cluster.hosts, cluster).all().values())
    start = time.monotonic()
    close_all([*links, *links])
    assert time.monotonic() - start < 5, "it waits for no node, and for no thread of paramiko"
    assert not any(link.alive for link in links)
    _gone(lambda: [thread for thread in threading.enumerate() if isinstance(thread, paramiko.Transport)])


def test_frozen_node(cluster_of: Any) -> None:
    cluster, (server,) = cluster_of(1)
    link = SshLink(cluster.hosts[0], cluster)
    server.cut()
    start = time.monotonic()
    with pytest.raises(Unreachable):
        script(link, b"echo\n", 0.5)
    link.close()
    assert time.monotonic() - start < 10, "a frozen node never answers"


def test_node_that_dies_while_a_command_runs(cluster_of: Any) -> None:
    cluster, (server,) = cluster_of(1)
    link = SshLink(cluster.hosts[0], cluster)
    timer = threading.Timer(0.3, server.stop)
    timer.start()
    with pytest.raises(Unreachable, match="lost"):
        script(link, b"sleep 100 </dev/null\n", 30)
    timer.join()
    assert not link.alive
    with pytest.raises(Unreachable):
        link.channel()
    link.close()


def test_node_that_dies_while_the_agent_starts(cluster_of: Any, tmp_path: Path) -> None:
    """That is no fault of its Python."""
    (python := tmp_path / "python").write_text("#!/bin/sh\n: > ${0%/*}/begun\nexec sleep 100\n")
    python.chmod(0o755)
    cluster, (server,) = cluster_of(1, PYTHON=str(python))

    def stop() -> None:
        until((tmp_path / "begun").exists)
        server.stop()

    with SshLink(cluster.hosts[0], cluster) as link, ThreadPoolExecutor() as pool:
        stopped = pool.submit(stop)
        with pytest.raises(Unreachable, match="the connection was lost"):
            AgentClient.open(link, cluster.hosts[0], cluster)
        stopped.result()


def test_connection_that_ends_after_its_channels(link: SshLink) -> None:
    """For the moment between the two no channel may be called one whose program has ended."""
    channel = link.channel()
    channel._unlink()  # as paramiko does
    threading.Timer(0.1, link.close).start()
    assert ended_by_loss(channel, link)
    channel.exit_status = 1
    assert not ended_by_loss(channel, link), "a program that has ended is not lost"


def test_too_many_sessions_on_one_connection(cluster_of: Any) -> None:
    cluster, _ = cluster_of(1, extra=["MaxSessions 2"])
    with SshLink(cluster.hosts[0], cluster) as link:
        channels = [link.channel(), link.channel()]
        with pytest.raises(PreflightError, match="MaxSessions|session"):
            link.channel()
        assert len(channels) == 2


def test_interrupt_while_connecting(cluster_of: Any, silent: tuple[str, int]) -> None:
    cluster, _ = cluster_of(1, CONNECT_TIMEOUT=30)
    hosts = (*cluster.hosts, *_cluster(f"{silent[0]}:{silent[1]}").hosts)
    end = time.monotonic() + 0.5

    def check() -> None:
        if time.monotonic() > end:
            raise Interrupted("Ctrl+C")

    start = time.monotonic()
    with pytest.raises(Interrupted):
        open_all([host.__class__(**{**vars(host), "index": i}) for i, host in enumerate(hosts)], cluster, check=check)
    assert time.monotonic() - start < 15, "the time to connect is 30 s"


# ---- no connection


def _cluster(host: str, **values: object) -> Cluster:
    return read_cluster({"HOSTS": [host], "CONNECT_TIMEOUT": 1, **values})


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """A port that takes connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield listener.getsockname()


def _fails(cluster: Cluster) -> Unreachable:
    start = time.monotonic()
    with pytest.raises(Unreachable) as caught:
        SshLink(cluster.hosts[0], cluster)
    assert time.monotonic() - start < 10, "CONNECT_TIMEOUT is 1 s; paramiko's own limits begin at 15 s"
    assert caught.value.node == cluster.hosts[0].name and caught.value.fix
    return caught.value


def test_nothing_listens(laptop: Path) -> None:
    assert "refuses connections" in _fails(_cluster(f"127.0.0.1:{free_port()}")).what


def test_name_is_not_known(laptop: Path) -> None:
    assert "name" in _fails(_cluster("nowhere.invalid")).what


def test_server_that_never_sends_anything(laptop: Path, silent: tuple[str, int]) -> None:
    assert "no SSH server answered within 1 s" in _fails(_cluster(f"127.0.0.1:{silent[1]}")).what


def test_packets_that_vanish(laptop: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        delayed = []
        for _ in range(4):  # a full backlog: the kernel drops what comes after it
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(address)
            delayed.append(client)
        assert "did not answer within 1 s" in _fails(_cluster(f"127.0.0.1:{address[1]}")).what
        for client in delayed:
            client.close()


def test_a_rush_of_logins_that_one_server_drops(cluster_of: Any) -> None:
    """MaxStartups: sshd hangs up on whom it does not want now."""
    one, (server,) = cluster_of(1, extra=["MaxStartups 2:100:2"])
    hosts = [f"{sshd.USER}@{server.address}:{server.port}"] * 12
    cluster = read_cluster({"HOSTS": hosts, "IDENTITY_FILE": one.identity_file, "CONNECT_TIMEOUT": 20})
    got = open_all(cluster.hosts, cluster)
    close_all(list(got.all().values()))
    assert len(got.ok) == 12 and "drop connection" in server.log()


@pytest.mark.parametrize(
    ("greeting", "text"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 200, "no SSH server"), (b"", "closed the connection")],
)
def test_what_answers_is_no_ssh_server(laptop: Path, greeting: bytes, text: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4)

        def serve() -> None:
            for _ in range(8):
                try:
                    client, _ = listener.accept()
                except OSError:  # the test is over
                    return
                client.sendall(greeting)
                client.close()

        threading.Thread(target=serve, daemon=True).start()
        assert text in _fails(_cluster(f"127.0.0.1:{listener.getsockname()[1]}")).what


def test_a_try_for_which_no_time_was_left_does_not_hide_why_the_one_before_failed(laptop: Path) -> None:
    """A server that hangs up, and then says nothing at all."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
        assert "closed the connection" in _fails(_cluster(f"127.0.0.1:{listener.getsockname()[1]}")).what


def test_many_nodes_all_failures_at_once(cluster_of: Any, silent: tuple[str, int]) -> None:
    good, _ = cluster_of(2)
    hosts = [f"{host.user}@{host.host}:{host.port}" for host in good.hosts]
    cluster = read_cluster(
        {
            "HOSTS": [hosts[0], f"127.0.0.1:{silent[1]}", hosts[1], "nowhere.invalid"],
            "IDENTITY_FILE": good.identity_file,
            "CONNECT_TIMEOUT": 2,
        }
    )
    got = open_all(cluster.hosts, cluster)
    assert sorted(got.ok) == [0, 2] and sorted(got.failed) == [1, 3]
    close_all(list(got.ok.values()))


# ---- who we are


def test_wrong_key(cluster_of: Any, tmp_path: Path) -> None:
    other = sshd.write_key(tmp_path / "other", ed25519.Ed25519PrivateKey.generate())
    cluster, _ = cluster_of(1, IDENTITY_FILE=str(other))
    with pytest.raises(AuthError) as caught:
        SshLink(cluster.hosts[0], cluster)
    assert str(other) in caught.value.what and "ssh-copy-id" in caught.value.fix


def test_a_server_that_stops_answering_during_the_login(cluster_of: Any) -> None:
    """It is no server that refuses the key: it searches for the key in a program that does not end in time."""
    slow = ["AuthorizedKeysCommand /bin/sleep 60", "AuthorizedKeysCommandUser root"]
    cluster, _ = cluster_of(1, extra=[*slow, "AuthorizedKeysFile none"], CONNECT_TIMEOUT=2)
    with pytest.raises(Unreachable, match="stopped answering during the login"):
        SshLink(cluster.hosts[0], cluster)


def test_key_file_that_is_not_there(cluster_of: Any) -> None:
    cluster, _ = cluster_of(1, IDENTITY_FILE="/no/such/key")
    with pytest.raises(AuthError, match="/no/such/key does not exist"):
        SshLink(cluster.hosts[0], cluster)


def test_default_key_in_the_home(cluster_of: Any, laptop: Path, ssh_keys: sshd.Keys) -> None:
    cluster, _ = cluster_of(1, IDENTITY_FILE="")
    with pytest.raises(AuthError, match="no key"):
        SshLink(cluster.hosts[0], cluster)
    shutil.copy(ssh_keys.user, laptop / ".ssh" / "id_ed25519")
    SshLink(cluster.hosts[0], cluster).close()


@pytest.fixture
def locked(tmp_path: Path) -> Path:
    return sshd.write_key(tmp_path / "locked", ed25519.Ed25519PrivateKey.generate(), "open sesame")


def _with_locked(cluster_of: Any, start: Callable[..., sshd.Sshd], locked: Path, count: int) -> Cluster:
    servers = [start(2 + number, authorized=[sshd.public(locked)]) for number in range(count)]
    hosts = [f"{sshd.USER}@{server.address}:{server.port}" for server in servers]
    return read_cluster({"HOSTS": hosts, "IDENTITY_FILE": str(locked), "CONNECT_TIMEOUT": 20})


def test_passphrase_is_asked_once_for_all_nodes(cluster_of: Any, start: Any, locked: Path) -> None:
    cluster = _with_locked(cluster_of, start, locked, 4)
    asked: list[tuple[str, bool]] = []

    def ask(question: str) -> str:
        asked.append((question, threading.current_thread() is threading.main_thread()))
        return "wrong" if len(asked) == 1 else "open sesame"

    got = open_all(cluster.hosts, cluster, prompter=Prompter(Typist(ask)))
    close_all(list(got.all().values()))
    assert asked == [(f"Passphrase of {locked}: ", True)] * 2


def test_passphrase_without_a_terminal(cluster_of: Any, start: Any, locked: Path) -> None:
    cluster = _with_locked(cluster_of, start, locked, 1)
    with pytest.raises(AuthError) as caught:
        SshLink(cluster.hosts[0], cluster)
    assert f"ssh-add {locked}" in caught.value.fix and "no terminal" in caught.value.fix


def test_wrong_passphrase_three_times(cluster_of: Any, start: Any, locked: Path) -> None:
    cluster = _with_locked(cluster_of, start, locked, 2)
    person = Typist(lambda question: "no")
    got = open_all(cluster.hosts, cluster, prompter=Prompter(person))
    assert len(person.asked) == 3 and len(got.failed) == 2


def test_interrupt_at_the_question(cluster_of: Any, start: Any, locked: Path) -> None:
    cluster = _with_locked(cluster_of, start, locked, 2)

    def ask(question: str) -> str:
        raise Interrupted("Ctrl+C")

    with pytest.raises(Interrupted):
        open_all(cluster.hosts, cluster, prompter=Prompter(Typist(ask)))


def test_the_named_key_goes_before_the_agents_many(
    cluster_of: Any, agent: str, start: Any, ssh_keys: sshd.Keys, tmp_path: Path
) -> None:
    for number in range(8):
        key = sshd.write_key(tmp_path / f"agent{number}", ed25519.Ed25519PrivateKey.generate())
        subprocess.run(["ssh-add", "-q", str(key)], check=True, capture_output=True)
    cluster, _ = cluster_of(2, extra=["MaxAuthTries 2"])
    close_all(list(open_all(cluster.hosts, cluster).all().values()))
    lost, _ = cluster_of(1, extra=["MaxAuthTries 2"], IDENTITY_FILE="")
    with pytest.raises(AuthError) as caught:
        SshLink(lost.hosts[0], lost)
    assert "too many keys" in caught.value.fix


def test_a_locked_key_that_the_agent_holds(cluster_of: Any, agent: str, ssh_keys: sshd.Keys, tmp_path: Path) -> None:
    """Its public half is read from the locked file, so the agent's key is tried at its place, and the user is not asked."""
    subprocess.run(["ssh-add", "-q", str(ssh_keys.user)], check=True, capture_output=True)
    locked = tmp_path / "locked"
    shutil.copy(ssh_keys.user, locked)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "open sesame", "-f", str(locked)], check=True, capture_output=True)
    cluster, _ = cluster_of(3, extra=["MaxAuthTries 2"], IDENTITY_FILE=str(locked))
    close_all(list(open_all(cluster.hosts, cluster).all().values()))


@pytest.fixture
def hosts(laptop: Path) -> Iterator[Callable[..., list[Host]]]:
    """hosts(3, methods=...): servers on 127.0.0.2 and up, all on one port."""
    made: list[Host] = []

    def make(count: int, **options: Any) -> list[Host]:
        for number in range(count):
            made.append(Host(laptop, f"127.0.0.{2 + number}", made[0].port if made else 0, **options))
        return made

    yield make
    for one in made:
        one.close()


def _named(hosts: list[Host], *names: str, **values: object) -> Cluster:
    return read_cluster(
        {"HOSTS": list(names) or [one.address for one in hosts], "USER": "me", "PORT": hosts[0].port, **values}
    )


@pytest.mark.parametrize("methods", ["publickey,password", "keyboard-interactive"])
def test_password_is_asked_once_for_one_host_and_again_if_wrong(hosts: Any, methods: str) -> None:
    (host,) = hosts(1, methods=methods, fields=[("Password: ", False), ("Code: ", True)], replies=["right", "123456"])
    person = Typist(lambda question: "123456" if "Code" in question else "right" if "refused" in question else "wrong")
    cluster = _named([host], *["127.0.0.2"] * 3)
    close_all(list(open_all(cluster.hosts, cluster, prompter=Prompter(person)).all().values()))
    first, second = (question for question in person.asked if "Password of" in question)
    assert re.fullmatch(r"Password of me@127\.0\.0\.2#\d \(127\.0\.0\.2\): ", first)
    assert second.endswith(f" refused it. {first}")
    codes = [question for question in person.asked if question.endswith('asks "Code:": ')]
    assert len(codes) + 2 == len(person.asked) and bool(codes) == (methods == "keyboard-interactive")


# ---- a channel's last word


def _close(link: SshLink, channel: paramiko.Channel, pid: bytes) -> None:
    channel.close()


def _kill(link: SshLink, channel: paramiko.Channel, pid: bytes) -> None:
    assert script(link, b"kill %s\n" % pid, 10).code == 0
    until(lambda: channel.closed)


@pytest.mark.parametrize("end", [_close, _kill])
@pytest.mark.parametrize("kind", [cMSG_CHANNEL_DATA, cMSG_CHANNEL_EOF], ids=["data", "eof"])
def test_what_would_pass_a_close_does_not_end_the_connection(link: SshLink, end: Any, kind: bytes) -> None:
    channel = link.channel()
    channel.sendall(b"echo $$; exec cat\n")
    channel.settimeout(10)
    pid = channel.recv(20).strip()
    delayed = Delayed(link.transport, kind)
    talker = threading.Thread(
        target=lambda: channel.send(b"late") if kind == cMSG_CHANNEL_DATA else channel.shutdown_write()
    )
    talker.start()
    assert delayed.here.wait(10)
    end(link, channel, pid)
    script(link, b"echo\n", 10)
    delayed.go.set()
    talker.join(10)
    until(forgotten(channel))
    assert delayed.closes.count(channel.remote_chanid) == 1
    assert script(link, b"echo up\n", 10).stdout == b"up\n"


# ---- together


def test_one_command_on_8_nodes(cluster_of: Any) -> None:
    cluster, _ = cluster_of(8)
    links = open_all(cluster.hosts, cluster).all()
    done = each(links, lambda link: run_user_command(link, "echo $HOME", 20)).all()
    assert len({one.stdout for one in done.values()}) == 8
    close_all(list(links.values()))


def _gone(what: Callable[[], list[Any]]) -> None:
    until(lambda: not what())
