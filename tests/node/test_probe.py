"""The probe reports what a plan must know of a node, and leaves no trace of its work."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from clustertool.model.facts import read_facts
from clustertool.model.field_types import MOST_FILES
from clustertool.model.wire.messages import PROBE
from clustertool.node.probe import container_probe, probe
from clustertool.node.system import private_directory
from tests.node.harness import Bench, claims_on_disk, until


def test_facts(bench: Bench) -> None:
    node = bench.nodes(1)[0]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        answer = node.probe(ports=[port, 1])
    facts = read_facts(0, answer)
    assert (facts.hostname, facts.python) == (socket.gethostname(), sys.version.split()[0])
    assert (facts.root, facts.home) == (str(node.root), str(bench.home))
    assert facts.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert facts.netns == os.readlink("/proc/self/ns/net")
    assert facts.rsync == (shutil.which("rsync") is not None)
    assert list(facts.ephemeral) == [
        int(token) for token in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    ]
    assert abs(facts.time - time.time()) < 60
    free = shutil.disk_usage("/tmp").free
    assert 0.5 * free < facts.disk_free <= 2 * free
    assert port in facts.busy and f"(pid {os.getpid()}, user " in facts.holder(port)
    assert [number for number, _ in facts.listeners] == [port]
    assert (facts.problems, facts.releases) == ((), ())


def test_the_python3_of_a_job_on_its_path(bench: Bench, tmp_path: Path) -> None:
    """The first one of the folders; an empty entry stands for PATH of the node."""
    node = bench.nodes(1)[0]
    (tmp_path / "python3").symlink_to(sys.executable)
    version = sys.version.split()[0]
    assert node.probe(job_path=["/nowhere", f"/none:{tmp_path}"])["job_python"] == [str(tmp_path / "python3"), version]
    assert node.probe(job_path=["/nowhere"])["job_python"] == ["", ""]
    assert node.probe(job_path=[str(tmp_path), ""])["job_python"][0] == str(tmp_path / "python3")
    assert "job_python" not in node.probe()


def test_holder_of_a_job(bench: Bench) -> None:
    """A port that a job's process holds is reported with the job's name."""
    nodes = bench.nodes(1)
    from tests.node import programs as p

    job = bench.run(nodes, "echo ready; exec sleep 1000", pserver=p.PSERVER).ready()
    port = next(process.ports[0] for process in job.plan.processes if process.role == "pserver")
    reported = dict(nodes[0].probe(ports=[port])["listeners"])
    assert f"of job {job.id} (pid {job.rank(0, 'pserver').pid}, user" in reported[port]
    job.stop()


@pytest.mark.parametrize(
    "ask, address, nic",
    [
        ({"address": "127.0.0.2"}, "127.0.0.2", "lo"),
        ({"address": "127.0.0.2", "explicit_address": "127.0.0.9"}, "127.0.0.9", "lo"),
        ({"address": "", "nic": "lo"}, "127.0.0.1", "lo"),
        ({"address": "127.0.0.2", "nic": "lo"}, "127.0.0.2", "lo"),
        ({"address": "192.0.2.200", "nic": "lo"}, "127.0.0.1", "lo"),
        ({"address": "::1", "nic": "lo"}, "127.0.0.1", "lo"),  # Paddle cannot use IPv6
        ({"address": "127.0.0.2", "nic": "lo", "explicit_address": "127.0.0.7"}, "127.0.0.7", "lo"),
        ({"address": "240.0.0.7"}, "240.0.0.7", ""),
        ({"address": "a-name"}, "a-name", ""),
        ({"address": ""}, "127.0.0.1", "lo"),
    ],
)
def test_address(bench: Bench, ask: dict[str, str], address: str, nic: str) -> None:
    answer = bench.nodes(1)[0].probe(**{"explicit_address": "", "nic": "", **ask})
    foreign = [
        problem[1] for problem in answer["problems"] if f"{address}, its training address, is on none" in problem[2]
    ]
    assert (answer["address"], answer["nic"], foreign) == (address, nic, ["warn"] * (address == "240.0.0.7"))


def test_address_of_the_login(bench: Bench) -> None:
    """Where nothing is given, it is where ssh came in."""
    node = bench.nodes(1, env={"SSH_CONNECTION": "127.0.0.1 50000 127.0.0.3 22"})[0]
    assert node.probe(address="", explicit_address="")["address"] == "127.0.0.3"


def test_nic_missing(bench: Bench) -> None:
    problems = bench.nodes(1)[0].probe(nic="ib7")["problems"]
    assert [problem[:3] for problem in problems] == [
        ["nic", "error", "there is no interface ib7 (PADDLE_NIC, or `interface` in HOSTS)"]
    ]
    assert "lo" in problems[0][3]


def test_real_interface(bench: Bench) -> None:
    """Against `ip`, for every interface with an IPv4 address."""
    if not shutil.which("ip"):
        pytest.skip("needs ip (package iproute2)")
    reported = subprocess.run(["ip", "-4", "-o", "addr"], stdout=subprocess.PIPE, text=True, check=True).stdout
    node = bench.nodes(1)[0]
    for name, address in re.findall(r"^\d+: (\S+)\s+inet ([\d.]+)", reported, re.M):
        answer = node.probe(address=address, explicit_address=address)
        assert (answer["address"], answer["nic"]) == (address, name)


def test_root_problems(bench: Bench) -> None:
    file = bench.tmp / "file"
    file.touch()
    node = bench.nodes(1)[0]

    def reported(root: str) -> list[list[str]]:
        return list(node.probe(root_dir=root)["problems"])

    assert reported(str(bench.tmp / "not" / "yet" / "there")) == []
    assert f"{file} is no directory" in reported(str(file / "below"))[0][2]
    assert f"{file} is no directory" in reported(str(file))[0][2]
    assert reported("~/clustertool") == []
    closed = bench.tmp / "closed"
    closed.mkdir(mode=0o500)
    if os.getuid():  # root may write everywhere
        assert "not writable" in reported(str(closed / "below"))[0][2]


def test_job_workspace(bench: Bench) -> None:
    work = bench.tmp / "work"
    for name in ("train.py", "data/a-0", ".git/x", "log/old", "job.toml"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("mode = 'ps'" if name == "job.toml" else "")
    node = bench.nodes(1)[0]
    answer = node.probe(job_workspace=str(work))
    assert (answer["listing"], answer["job_toml"]) == (["data/a-0", "job.toml", "train.py"], "mode = 'ps'")
    assert "is not there" in node.probe(job_workspace=str(work / "no"))["problems"][0][2]


@pytest.mark.parametrize("path", ["", "~/clustertool", "//no-such/folder"])
def test_a_path_without_a_folder_above_it(path: str) -> None:
    """A ROOT_DIR with ~ is such a path for a user without HOME."""
    assert probe._nearest_folder(path) == ("//" if path.startswith("//") else "")
    assert container_probe._free_bytes(path) == -1


def test_a_listing_of_job_workspace_is_cut_where_the_laptop_would_refuse_it(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"part-{number:03}").touch()
    found, whole = probe._listing(str(tmp_path), 300, 1 << 20)
    assert (len(found), whole) == (300, True)
    found, whole = probe._listing(str(tmp_path), 299, 1 << 20)
    assert (len(found), whole) == (299, False)
    (tmp_path / ("\N{GRINNING FACE}" * 60)).touch()
    found, whole = probe._listing(str(tmp_path), 1000, 3000)
    assert not whole
    assert len(json.dumps(found)) <= 3000
    assert probe._MOST_FILES < MOST_FILES
    assert PROBE({"job_workspace": "/x"}).limit > probe._MOST_BYTES + (4 << 20)


def test_reads_only(bench: Bench) -> None:
    """Nothing is made, changed or touched below home and ROOT_DIR, and no claim is made.

    The claims are of the user, and tests that run at the same time change them: only those of this node are compared.
    """
    node = bench.nodes(1)[0]
    node.open()
    node.root.mkdir()
    (node.root / "JOBx").mkdir()
    before = _trace(bench, node.root)
    node.probe(job_workspace=str(bench.tmp), ports=list(range(1, 60000)))
    assert _trace(bench, node.root) == before


def _trace(bench: Bench, root: Path) -> dict[str, Any]:
    directory = Path(private_directory.make("ports.json"))
    made = claims_on_disk()
    paths = [path for top in (bench.home, root) for path in [top, *top.rglob("*")]]
    found = {str(path): path.lstat() for path in paths if path.suffix != ".pyc"}
    return {
        "files of the claims": sorted(os.listdir(directory)),
        "claims": {port: claim for port, claim in made.items() if str(root) in str(claim)},
        # Files of the code are links that all workers share: a new link of another one changes their ctime.
        **{
            name: (
                info.st_mtime_ns,
                info.st_size,
                0 if stat.S_ISREG(info.st_mode) and info.st_nlink > 1 else info.st_ctime_ns,
            )
            for name, info in found.items()
        },
    }


def test_ports_of_a_job_are_busy(bench: Bench) -> None:
    """From the placing on, so that a second start takes others."""
    nodes = bench.nodes(1)
    job = bench.job(nodes, "exec sleep 1000").place()
    ports = {port for process in job.plan.processes for port in process.ports} | {
        port for _, port in job.plan.extra_ports
    }
    assert ports <= set(nodes[0].probe()["busy"])
    job.start()
    job.stop()
    until(lambda: not ports & set(nodes[0].probe()["busy"]))


def test_an_interface_with_several_addresses() -> None:
    """The address that HOSTS names, else the one to which ssh connected, else the first one; the kernel knows all of them."""
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, "--net", "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs network namespaces")
    lines = [
        "ip link set lo up",
        *(f"ip addr add {own} dev lo" for own in ("10.1.0.1/24", "10.2.0.1/24", "fd00::5/64")),
    ]
    code = """
        import json, os, sys
        from clustertool.node.probe.network_addresses import interfaces
        from clustertool.node.probe.probe import _choose_address
        found = []
        came_in = "10.9.9.9 1 10.1.0.1 22"
        for given, came in (("10.2.0.1", ""), ("", came_in), ("10.2.0.1", came_in), ("10.3.0.1", "")):
            os.environ["SSH_CONNECTION"] = came
            request = {"nic": "lo", "address": given, "explicit_address": ""}
            found.append(_choose_address(request, []))
        print(json.dumps([interfaces()["lo"], found]))
    """
    shell = " && ".join([*lines, 'exec "$0" -c "$1"'])
    argv = [unshare, "--net", "sh", "-ec", shell, sys.executable, textwrap.dedent(code)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    known, chosen = json.loads(done.stdout)
    assert [*known[:3], *sorted(known[3:])] == [
        ["127.0.0.1", 8],
        ["10.1.0.1", 24],
        ["10.2.0.1", 24],
        ["::1", 128],
        ["fd00::5", 64],
    ]
    assert chosen == [["10.2.0.1", "lo"], ["10.1.0.1", "lo"], ["10.2.0.1", "lo"], ["127.0.0.1", "lo"]]
