"""A rank has the environment of `ssh NODE COMMAND`, less what the contract removes: compared name by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli import REPO
from tests.ssh import sshd

PROGRAM = """
import os
with open("/proc/self/environ", "rb") as file:
    text = file.read()
with open(os.environ["CLUSTERTOOL_OUTPUT"] + "/env", "wb") as file:
    file.write(text)
"""
# p: the shell that starts the agent has a variable of this name, too. dash cannot have what `export -f` exports.
START_FILE = rb"""
export LD_LIBRARY_PATH=/opt/x/lib HF_HOME=/data/hf TMPDIR=/tmp PYTHONPATH=/opt/x/python p=mine BINARY=$'\xff\xfe=\n' EMPTY=
export LARGE=$(head -c 100000 /dev/zero | tr '\0' x) PRIVATE_TOKEN=rosebud OMPI_MCA_btl=tcp,self OMP_NUM_THREADS=3
export PADDLE_TRAINER_ID=7 PADDLE_MINE=1 http_proxy=http://127.0.0.1:9 no_proxy=x POD_IP=1.2.3.4 TRAINING_ROLE=PSERVER RANK=7
module() { echo loads; }
export -f module
"""
REMOVED = {b"PADDLE_MINE", b"http_proxy", b"no_proxy", sshd.MARK.encode()}
COMPUTED = {b"PADDLE_TRAINER_ID", b"POD_IP", b"TRAINING_ROLE", b"RANK"}
OF_EACH_LOGIN = {b"SSH_CLIENT", b"SSH_CONNECTION", b"PWD", b"_", b"SHLVL"}


def variables(text: bytes) -> dict[bytes, bytes]:
    return dict(line.split(b"=", 1) for line in text.split(b"\0") if line)


def of_ssh(server: sshd.Sshd, key: Path) -> dict[bytes, bytes]:
    """The environment of a command of OpenSSH's client."""
    options = ("UserKnownHostsFile=/dev/null", "StrictHostKeyChecking=no", "LogLevel=ERROR")
    argv = ["ssh", "-F", "none", "-i", str(key), "-p", str(server.port), *(f"-o{option}" for option in options)]
    return variables(subprocess.run([*argv, server.address, "env -0"], stdout=subprocess.PIPE, check=True).stdout)


def compare(site, key: Path, around: Sequence[str] = (), extra: Sequence[str] = ()) -> dict[bytes, bytes]:
    """Run a job on a node that is started so, and return the environment of its rank."""
    one = site(1, around=around, extra=extra)
    (server,) = one.servers
    (server.home / ".bashrc").write_bytes(START_FILE)
    one.workspace(train_py=PROGRAM)
    done = one.clustertool("run", "-w", "job").ends(0)
    (folder,) = one.jobs(0)
    login, rank = of_ssh(server, key), variables((folder / "output/env").read_bytes())
    assert {name for name in login if name not in rank} <= {*REMOVED, b"_"}
    different = {name for name in login if name in rank and login[name] != rank[name]}
    assert different <= {*COMPUTED, *OF_EACH_LOGIN}
    assert not REMOVED & set(rank)
    assert rank[b"PWD"] == bytes(folder)
    added = {name.decode() for name in rank if name not in login}
    computed = "PADDLE_ CLUSTERTOOL_ KUBEFLOW_TRAINER_ TORCH ROLE_ GROUP_ LOCAL_ NODE_ MASTER_ OMPI_COMM_ POD_".split()
    computed += "TRAINER_ NCCL_ GLOO_".split()
    others = {name for name in added if not name.startswith(tuple(computed))}
    assert others <= {"DISTRIBUTED_TRAINER_ENDPOINTS", "PYTHONUNBUFFERED", "WORLD_SIZE", "NNODES", "NPROC_PER_NODE"}
    assert b"rosebud" not in done.out.encode() + done.err.encode()
    for path in [path for path in server.home.rglob("*") if path.is_file() and path.name not in ("env", ".bashrc")]:
        assert b"rosebud" not in path.read_bytes(), f"the environment is on the disk: {path}"
    return rank


def test_a_rank_has_the_environment_of_ssh(site, ssh_keys) -> None:
    """In the locale C, in which Python would add LC_CTYPE."""
    if not sshd.READS_BASHRC or not shutil.which("ssh"):
        pytest.skip("needs the client of OpenSSH, and bash as login shell")
    rank = compare(site, ssh_keys.user)
    assert rank[b"HF_HOME"] == b"/data/hf" and rank[b"p"] == b"mine" and rank[b"BINARY"] == b"\xff\xfe=\n"
    assert b"loads" in rank[b"BASH_FUNC_module%%"] and b"LC_CTYPE" not in rank and b"LANG" not in rank


def test_a_rank_has_what_pam_sets(site, ssh_keys, tmp_path) -> None:
    """/etc/environment by pam_env."""
    file = tmp_path / "environment"
    file.write_text('FROM_PAM="of the machine"\nLANG=C.UTF-8\n')
    around = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/environment && exec "$@"', str(file))
    usable = not subprocess.run([*around, "true"], stderr=subprocess.DEVNULL, check=False).returncode
    pam = Path("/etc/pam.d/sshd")
    if not usable or not pam.exists() or "pam_env" not in pam.read_text() or not sshd.READS_BASHRC:
        pytest.skip("needs root, for a mount namespace, and PAM for sshd")
    assert os.path.exists("/etc/environment")
    rank = compare(site, ssh_keys.user, around, ["UsePAM yes"])
    assert rank[b"FROM_PAM"] == b"of the machine" and rank[b"LANG"] == b"C.UTF-8"


def test_what_python_adds_is_not_for_others() -> None:
    """In the locale C, where LC_CTYPE was not set, or set to what Python replaces."""
    code = "from clustertool.node.system import processes; print(processes.own_environment().get('LC_CTYPE'))"
    for env, found in (({}, "None"), ({"LC_CTYPE": "C"}, "C"), ({"LC_CTYPE": "C.UTF-8"}, "C.UTF-8")):
        argv = ["env", "-i", "HOME=/", *(f"{name}={value}" for name, value in env.items()), sys.executable, "-c", code]
        assert subprocess.run(argv, stdout=subprocess.PIPE, check=True, cwd=REPO).stdout.decode().strip() == found
