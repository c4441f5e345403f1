"""Values of SECRETS are in the memory of who needs them, and nowhere else: no command line, no file, no message."""

from __future__ import annotations

import json
import os
from pathlib import Path

SECRET = "s3cr3t-7f\"'$ x"
TOKEN = b"s3cr3t-7f"

PROGRAM = """
    import os, sys, time
    from pathlib import Path
    print("rank", os.environ["RANK"], "has", os.environ["TOKEN"], flush=True)
    go = Path.home() / "go"
    while not go.exists():
        time.sleep(0.02)
    sys.exit(3)
"""


def shown_by_ps() -> list[str]:
    """Every command line of this machine, of laptop and nodes alike, that holds the secret."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            found += [line.decode(errors="replace")] if TOKEN in line else []
    return found


def files_with_it(top: Path) -> list[str]:
    found = []
    for folder, _, names in os.walk(top):
        for name in names:
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink() and TOKEN in path.read_bytes():
                found.append(str(path))
    return found


def test_a_secret_is_nowhere_but_in_the_ranks(site):
    pair = site(2)
    pair.workspace(train_py=PROGRAM)
    pair.conf(SECRETS=["TOKEN"], PRELUDE="true")
    env = {"TOKEN": SECRET}
    running = pair.start("run", "-w", "job", "--all-ranks", env=env)
    for rank in range(2):
        running.says(rf"^\[trainer {rank} node{rank}\] rank {rank} has \*\*\*$")
    ranks = [p for node in (0, 1) for p in pair.lab.processes(node) if "train.py" in p.argv]
    assert [p.environ["TOKEN"] for p in ranks] == [SECRET] * 2
    # the supervisor, its guard and the agent hold it in memory only: what they were started with is readable by `ps e`
    others = [p for node in (0, 1) for p in pair.lab.processes(node) if "train.py" not in p.argv]
    assert not [p for p in others if "s3cr3t" in str(p.environ)]
    assert not shown_by_ps()
    during = pair.inv("logs", "-r", "0,1", env=env).ends(0)
    assert sorted(during.lines()) == [f"[trainer {rank} node{rank}] rank {rank} has ***" for rank in range(2)]
    status = pair.inv("status", "--json", env=env).ends(0)
    assert "s3cr3t" not in status.out + status.err
    dry = pair.inv("run", "-w", "job", "--dry", "--json", env=env).ends(0)
    assert "s3cr3t" not in dry.out + dry.err
    assert dry.json["nodes"][0]["processes"][0]["env"]["TOKEN"] == "***"
    (pair.home(0) / "go").touch()
    done = running.wait().ends(3)
    assert "s3cr3t" not in done.out + done.err
    again = pair.inv("attach", "--rank", 1, env=env).ends(3)
    assert "rank 0 has ***" in again.err, "the last lines of a failed rank are masked too"
    assert "s3cr3t" not in again.out + again.err
    for node in (0, 1):
        job, name = pair.jobs(node)[0], f"workerlog.{node}"
        logs = [job / ".clustertool/log" / name, job / "log" / name, job / "log/train.log"]
        found = files_with_it(pair.home(node)) + files_with_it(pair.lab.tmp(node))
        assert sorted(found) == sorted(map(str, logs)), "but for what a rank printed itself"
    raw = pair.inv("logs", "--rank", 1, "--raw", env=env).ends(0)
    assert raw.out == f"rank 1 has {SECRET}\n"
    assert not files_with_it(pair.lab.laptop_home)


def test_a_missing_secret_is_reported_before_anything_happens(site):
    one = site(1)
    one.workspace(train_py="")
    one.conf(SECRETS=["TOKEN"])
    done = one.inv("run", "-w", "job").ends(78)
    assert "TOKEN" in done.err
    assert "fix: " in done.err
    assert not one.root(0).exists()
    one.inv("status").ends(66)  # a reader needs no secret


def test_names_that_are_passed_and_names_that_are_not(site):
    one = site(1)
    one.workspace(
        train_py="""
        import json, os
        print(json.dumps(dict(os.environ)))
    """
    )
    one.conf(PASS_ENV=["MINE", "UNSET"])
    env = {"MINE": "a b", "PADDLE_TRAINER_ID": "99", "http_proxy": "http://10.0.0.1:3128", "OTHER": "x"}
    exports = "export PADDLE_PORT=1 POD_IP=9.9.9.9 https_proxy=x HF_HOME=/hf"
    (one.home(0) / ".bashrc").write_text(f"{exports}; echo noise from .bashrc\n")
    done = one.inv("run", "-w", "job", env=env).ends(0)

    reported = json.loads(done.lines("[trainer 0 node0] {")[0].partition("] ")[2])
    assert reported["MINE"] == "a b"
    assert reported["PADDLE_TRAINER_ID"] == "0"
    assert reported["POD_IP"] == one.lab.address(0)
    assert not {"UNSET", "OTHER", "http_proxy", "https_proxy"} & set(reported)
    assert reported["HF_HOME"] == "/hf"
    assert "noise" not in done.out
    known = ("CLUSTERTOOL_", "PADDLE_", "OMPI_", "LOCAL_", "MASTER_", "ROLE_", "TORCHELASTIC_", "KUBEFLOW_TRAINER_")
    rest = {name for name in reported if not name.startswith(known)}
    assert rest <= {
        "HF_HOME",
        *(
            "MAIL",
            "SHLVL",
            "PWD",
            "OLDPWD",
            "_",
            "SSH_CLIENT",
            "SSH_CONNECTION",
            "LC_CTYPE",
        ),  # of sshd, the shell, Python
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "TERM",
        "PATH",
        "PYTHONUNBUFFERED",
        "MINE",
        "POD_IP",
        "POD_NAME",
        "RANK",
        "WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TRAINING_ROLE",
        "TRAINER_PORTS_NUM",
        "DISTRIBUTED_TRAINER_ENDPOINTS",
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
        "LC_CTYPE",
    }, rest
