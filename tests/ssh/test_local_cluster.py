"""The embedded local cluster against real OpenSSH servers, clients and processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from clustertool.errors import PreflightError, UsageError
from clustertool.fleet.embedded_cluster import LocalCluster
from clustertool.model.config.cluster import Cluster

REPO = Path(__file__).resolve().parents[2]
UP = textwrap.dedent("""
    import json, sys
    from clustertool.fleet.embedded_cluster import LocalCluster
    local = LocalCluster()
    local.up()
    print(json.dumps([[server.pid, server.port] for server in local.status()]), flush=True)
""")


@pytest.fixture
def local(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    local = LocalCluster()
    yield local
    local.down()
    assert not [pid for pid in pids() if str(local.dir) in argv(pid)]


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def argv(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def until(true, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.01)


def ssh(cluster: Cluster, node: int, *command: str) -> list[str]:
    """The command line of an OpenSSH client that trusts and uses only the cluster's own keys."""
    host = cluster.hosts[node]
    options = {
        "IdentityFile": cluster.identity_file,
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": cluster.known_hosts,
        "StrictHostKeyChecking": "yes",
        "BatchMode": "yes",
        "Port": str(host.port),
        "User": host.user,
    }
    pairs = [f"-o{name}={value}" for name, value in options.items()]
    return ["ssh", "-F", "none", *pairs, host.host, *command]


def say(cluster: Cluster, node: int, *command: str) -> str:
    done = subprocess.run(ssh(cluster, node, *command), capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_node_has_a_home_of_its_own(local):
    cluster = local.up(3)
    homes = [say(cluster, node, "echo $HOME; echo $LD_PRELOAD$XDG_STATE_HOME") for node in range(3)]
    assert homes == [str(local.home(node)) for node in range(3)]
    assert [host.root_dir for host in cluster.hosts] == [f"{home}/clustertool" for home in homes]
    assert len({host.name for host in cluster.hosts}) == 3
    assert (cluster.python, cluster.first_path) == (sys.executable, str(Path(sys.executable).parent))
    assert (cluster.ssh_config, cluster.host_keys, cluster.where) == ("none", "strict", "embedded local cluster")


def test_no_other_user_can_read_its_keys_or_reach_it_from_outside(local):
    cluster = local.up(2)
    assert stat.S_IMODE(local.dir.stat().st_mode) == 0o700
    secrets = ["host_key", "user_key", "authorized_keys", "known_hosts", "0.conf"]
    assert {stat.S_IMODE((local.run / name).stat().st_mode) for name in secrets} == {0o600}
    assert all(host.address.startswith("127.") for host in cluster.hosts)


def test_up_twice_is_up_once(local):
    assert local.cluster() is None
    assert local.status() == ()
    first = local.up()
    servers = local.status()
    assert len(servers) == 3
    assert local.up() == local.cluster() == first
    assert local.status() == servers


def test_two_commands_at_once_share_one_cluster(local):
    both = [subprocess.Popen([sys.executable, "-c", UP], cwd=REPO, stdout=subprocess.PIPE) for _ in range(2)]
    output = [json.loads(process.communicate(timeout=60)[0]) for process in both]
    assert output[0] == output[1]
    assert len(output[0]) == 3
    assert all(server.alive for server in local.status())


def test_it_outlives_the_command_and_its_ctrl_c(local):
    script = UP + "import time; time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout
    assert json.loads(process.stdout.readline())
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert say(local.up(), 0, "echo here") == "here"


def test_a_half_dead_cluster_is_repaired(local):
    before = local.up(3)
    first, second, third = local.status()
    os.kill(second.pid, signal.SIGKILL)
    until(lambda: not second.alive)
    assert local.cluster() == before  # the nodes that live are not hidden behind the one that does not
    after = local.up()
    assert local.status()[0] == first
    assert local.status()[2] == third
    assert local.status()[1].pid != second.pid
    assert [say(after, node, "echo $HOME") for node in range(3)] == [str(local.home(node)) for node in range(3)]


def test_it_grows_and_shrinks(local):
    two = local.up(2)
    small = local.status()
    assert len(local.up(4).hosts) == 4
    assert local.status()[:2] == small
    gone = local.status()[2:]
    assert local.up(2) == two
    assert local.status() == small
    assert not any(server.alive for server in gone)
    assert len(local.up().hosts) == 2, "without a number it stays as it is"


def test_down_ends_sessions_too_and_keeps_the_homes(local):
    cluster = local.up(2)
    say(cluster, 0, "echo kept > $HOME/file")
    servers = local.status()
    client = subprocess.Popen(
        ssh(cluster, 1, "echo $$; exec sleep 4321"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert client.stdout
    remote = int(client.stdout.readline())
    until(lambda: "sleep 4321" in argv(remote))
    ended = local.down()
    assert "sleep" not in argv(remote)
    assert client.wait(60) == 255
    client.stdout.close()
    assert [line.split(":")[0] for line in ended] == ["node 0", "node 1"]
    assert "of its sessions" in ended[1]
    assert not any(server.alive for server in servers)
    assert (local.home(0) / "file").read_text() == "kept\n"
    assert sorted(path.name for path in local.dir.iterdir()) == ["lock", "node0", "node1"]
    assert (local.cluster(), local.status(), local.down()) == (None, (), [])


def test_down_where_nothing_ever_was_makes_nothing(local):
    assert local.down() == []
    assert not local.dir.exists()


def test_a_pid_that_belongs_to_another_now_is_left_alone(local):
    local.up(1)
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        (local.run / "1.conf").write_text((local.run / "0.conf").read_text())
        (local.run / "1.pid").write_text(f"{stranger.pid}\n")
        assert [server.alive for server in local.status()] == [True, False]
        local.down()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_servers_of_an_up_that_was_killed_are_found(local):
    script = UP.replace("local.up()", "local._listens = lambda node: sys.exit(3)\nlocal.up(2)")
    assert subprocess.run([sys.executable, "-c", script], cwd=REPO).returncode == 3
    until(lambda: len([server for server in local.status() if server.alive]) == 2)
    assert len(local.up(1).hosts) == 1
    assert [server.node for server in local.status()] == [0]


def test_a_path_with_letters_outside_ascii(tmp_path):
    local = LocalCluster(tmp_path / "каталог-состояния-пользователя" / "ä")
    try:
        assert say(local.up(1), 0, "echo here") == "here"
        assert [server.alive for server in local.status()] == [True]
    finally:
        assert len(local.down()) == 1


def test_lost_keys_mean_a_new_start(local):
    local.up(1)
    (old,) = local.status()
    (local.run / "user_key").unlink()
    assert say(local.up(), 0, "echo here") == "here"
    assert not old.alive


def test_a_port_that_is_taken_is_not_used(local):
    port = local.up(1).hosts[0].port
    with socket.create_server(("127.0.0.2", port)):
        cluster = local.up(2)
        assert cluster.hosts[1].port != port or cluster.hosts[1].address != "127.0.0.2"
        assert say(cluster, 1, "echo here") == "here"


def test_a_directory_of_somebody_else_is_refused(local, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    local.dir.parent.mkdir(parents=True)
    local.dir.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PreflightError, match="not a directory of this user"):
        local.up()
    local.dir.unlink()


@pytest.mark.parametrize("nodes", [0, -1, 251])
def test_absurd_sizes_are_refused(local, nodes):
    with pytest.raises(UsageError, match="1 to 250"):
        local.up(nodes)
    assert not local.dir.exists()


# As root, in a mount namespace of its own: a user who is not in the machine's passwd (that file is covered for a
# moment), with what Python needs out of root's home, which is 0700, in a readable place.
OTHER_USER = textwrap.dedent("""
    set -e
    mount -t tmpfs -o mode=755 tmpfs /mnt
    mkdir /mnt/root
    for path in "$@"; do
        case $path in /root/*) mkdir -p "/mnt$path"; mount --rbind "$path" "/mnt$path" ;; esac
    done
    { cat /etc/passwd; echo "someone:x:4321:4321::/mnt/someone:/bin/sh"; } > /mnt/passwd
    if test -n "$LOCKED"; then sed 's/^root:[^:]*:/root:!:/' /etc/shadow > /mnt/shadow; mount --bind /mnt/shadow /etc/shadow; fi
    mount --bind /mnt/passwd /etc/passwd
    mkdir -m 700 /mnt/someone
    chown "$WHO" /mnt/someone
    mount --rbind /mnt/root /root
    cd /
    exec setpriv --reuid "$WHO" --regid "$WHO" --clear-groups "$PYTHON" -c "$SCRIPT"
""")
LOGIN = textwrap.dedent("""
    import os, sys
    from clustertool.fleet.embedded_cluster import LocalCluster
    import test_local_cluster as t
    local = LocalCluster()
    try:
        cluster = local.up(2)
        print(t.say(cluster, 1, "id -u; echo $HOME"))
    finally:
        print(len(local.down()))
    for server in local.status():
        assert not server.alive
""")


@pytest.mark.skipif(
    os.geteuid() != 0, reason="becomes another user, so it needs root; without, every test here is that test"
)
@pytest.mark.parametrize(("owner", "locked"), [(4321, ""), (0, "yes")], ids=["no root", "locked root"])
def test_other_users(owner, locked):
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode:
        pytest.skip("this machine permits no mount namespaces")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/mnt/someone",
        "XDG_STATE_HOME": "/mnt/someone/state",
        "PYTHONPATH": f"{REPO}:{REPO}/tests/ssh",
        "PYTHONDONTWRITEBYTECODE": "1",
        "WHO": str(owner),
        "LOCKED": locked,
        "PYTHON": sys.executable,
        "SCRIPT": LOGIN,
    }
    keep = [str(REPO), sys.prefix, sys.base_prefix]
    argv = ["unshare", "-m", "sh", "-c", OTHER_USER, "sh", *keep]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(owner), "/mnt/someone/state/clustertool/local/node1", "2"]


def test_a_program_of_paddle_v2_reaches_all_pservers_at_one_port(embedded):
    """It has one port for all of them, PADDLE_INIT_PORT. The nodes are one machine, so each listens on its own address."""
    embedded.clustertool("cluster.up", "--nodes", 2).ends(0)
    embedded.workspace(
        train_py="""
            import os, socket
            for host in os.environ["PADDLE_INIT_PSERVERS"].split(","):
                socket.create_connection((host, int(os.environ["PADDLE_INIT_PORT"])), 10).close()
            print("reached", os.environ["PADDLE_INIT_PSERVERS"], flush=True)
        """,
        pserver_py="""
            import os, socket, time
            with socket.create_server((os.environ["POD_IP"], int(os.environ["PADDLE_INIT_PORT"]))):
                time.sleep(600)
        """,
    )
    done = embedded.clustertool("run", "-w", "job", "--mode", "ps", "--all-ranks").ends(0)
    assert done.out.count("reached 127.0.0.1,127.0.0.2") == 2


def test_a_pserver_that_opens_no_port_and_ends(embedded):
    embedded.clustertool("cluster.up", "--nodes", 1).ends(0)
    embedded.workspace(train_py="print('trained')", pserver_py="print('done')")
    early = 'exit code 0 before it listened on its port (one that opens none: [pserver] ready = "started" in job.toml)'
    assert early in embedded.clustertool("run", "-w", "job", "--mode", "ps").ends(1).err
