"""`inv logs`: the bytes of any rank exactly, or its lines, while the job runs and afterwards."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest

from tests.cases import HELLO
from tests.cli import until

MB = 1 << 20

# Rank 3 writes what no text is, and its last line never ends.
BINARY = """
    import os, random, sys
    out = sys.stdout.buffer
    if os.environ["CLUSTERTOOL_RANK"] == "3":
        block = random.Random(3).randbytes(1 << 20)
        for _ in range(int(sys.argv[1])):
            out.write(block)
        out.write(b"\\xff\\x00\\r\\n\\xc3")
    else:
        out.write(b"text\\n")
"""


def expected(blocks: int) -> bytes:
    import random

    return random.Random(3).randbytes(MB) * blocks + b"\xff\x00\r\n\xc3"


def test_raw_is_exactly_the_ranks_bytes(site, tmp_path):
    pair = site(2)
    pair.workspace(train_py=BINARY)
    done = pair.clustertool("run", "-w", "job", "--nproc-per-node", 2, "--script", "train.py 10", "--rank", 1).ends(0)
    assert "[trainer 1 127.0.0.2] text" in done.out
    target = tmp_path / "rank3"
    logs = pair.start("logs", "--rank", 3, "--raw", out=target)
    assert logs.wait().code == 0
    assert target.read_bytes() == expected(10)
    assert pair.clustertool("logs", "--rank", 0, "--raw").ends(0).out == "text\n"
    tail = pair.start("logs", "-r", 3, "--raw", "--tail", 1)
    assert tail.wait().code == 0
    assert tail.raw == b"\xc3"


def by_rank(done) -> list[str]:
    """Lines of several ranks come in the order of their time; each rank's own in its order."""
    return sorted(done.ends(0).lines(), key=lambda line: line.partition("]")[0])


SLOWLY = """
    import os, time
    from pathlib import Path
    rank = os.environ["CLUSTERTOOL_RANK"]
    for number in range(30):
        print(f"rank {rank} line {number}", flush=True)
    go = Path(os.environ["GO"])
    while not go.exists():
        time.sleep(0.02)
    print(f"rank {rank} the end", flush=True)
"""


@pytest.fixture
def waiting(site, tmp_path):
    """A job of 4 trainers and no pserver that says 30 lines a rank, then one more when `go()` is called."""
    pair = site(2)
    pair.workspace(train_py=SLOWLY)
    pair.go = (tmp_path / "go").touch
    running = pair.start("run", "-w", "job", "--nproc-per-node", 2, "--env", f"GO={tmp_path / 'go'}")
    running.says("line 29")
    logs = [pair.jobs(rank // 2)[0] / f"log/workerlog.{rank}" for rank in range(4)]
    until(lambda: all(path.exists() and "line 29" in path.read_text() for path in logs))
    yield pair, running
    pair.go()
    assert running.wait().code == 0


def test_logs_and_times_of_lines_during_the_job(waiting):
    pair, running = waiting
    job = running.says(r"^job (\S+):")
    first = pair.clustertool("logs").ends(0)
    assert first.lines("[trainer 0 127.0.0.2]") == [f"[trainer 0 127.0.0.2] rank 0 line {n}" for n in range(30)]
    assert by_rank(pair.clustertool("logs", "-r", "2,3", "-n", 2)) == [
        f"[trainer {rank} 127.0.0.3] rank {rank} line {n}" for rank in (2, 3) for n in (28, 29)
    ]
    by_host = pair.clustertool("logs", "--host", "127.0.0.3", "--grep", "line 1?7$", "--job", job[:15]).ends(0)
    assert by_rank(by_host) == [f"[trainer {rank} 127.0.0.3] rank {rank} line {n}" for rank in (2, 3) for n in (7, 17)]
    every = by_rank(pair.clustertool("logs", "--rank", "all", "-n", 1))
    assert [line.split("]")[1] for line in every] == [f" rank {rank} line 29" for rank in range(4)]
    before = datetime.now().astimezone()
    written = max(log.stat().st_mtime for node in range(2) for log in pair.job_dir(node, job).glob("log/workerlog.*"))
    until(lambda: time.time() > written + 1.5)  # each of the following commands takes more CPU than all of this waiting
    until(lambda: not pair.clustertool("logs", "--since", "1s").ends(0).out, 20)
    follow = pair.start("logs", "-f", "--rank", 3, "-n", 1)
    raw = pair.start("logs", "-f", "--rank", 2, "--raw")
    later = pair.start("logs", "-f", "--since", "1s", "--timestamps", "--rank", "all")
    follow.says("rank 3 line 29")
    raw.says("rank 2 line 29")
    later.says("conf:")
    assert follow.process.poll() is None
    pair.go()
    assert follow.wait().lines() == ["[trainer 3 127.0.0.3] rank 3 line 29", "[trainer 3 127.0.0.3] rank 3 the end"]
    assert raw.wait().out == "".join(f"rank 2 line {n}\n" for n in range(30)) + "rank 2 the end\n"
    lines = by_rank(later.wait())
    assert [line.split(" ", 4)[4] for line in lines] == [f"rank {rank} the end" for rank in range(4)]
    times = [datetime.fromisoformat(line.split(" ")[3]) for line in lines]
    assert all(before.replace(microsecond=0) <= t <= datetime.now().astimezone() for t in times)
    running.wait()
    shown = pair.clustertool("logs", "--timestamps", "--rank", 2).ends(0).lines()
    assert (
        len(shown) == 31
        and shown[-1] in lines
        and all(re.match(r"\[trainer 2 \S+\] \S+T\S+ rank 2 ", one) for one in shown)
    )
    since = shown[-1].split(" ")[3]  # as it is printed
    assert pair.clustertool("logs", "--since", since, "--rank", 2).ends(0).lines() == [
        "[trainer 2 127.0.0.3] rank 2 the end"
    ]
    assert pair.clustertool("logs", "--since", since, "--rank", 2, "--raw").ends(0).out == "rank 2 the end\n"


def test_leaving_logs_ctrl_d_and_refusals_leave_the_job_alone(waiting):
    pair, running = waiting
    refusals(pair)
    assert "Ctrl+D" not in running.err, "its stdin is no terminal"
    job = running.says(r"^job (\S+):")
    follow = pair.start("logs", "-f")
    attached = pair.start("attach", terminal=True)
    follow.says("line 29")
    follow.signal()
    assert follow.wait().code == 130
    attached.says("line 29")
    attached.type("\n\n")
    assert "Ctrl+C stops the job; Ctrl+D detaches: the job goes on" in attached.out
    assert attached.process.poll() is None
    attached.type("\x04")
    done = attached.wait().ends(0)
    assert "detached; the job goes on: " in done.out and f"attach --job {job}" in done.out
    assert running.process.poll() is None
    assert pair.clustertool("status", "--json").ends(0).json["state"] == "running"
    pair.go()
    running.wait().ends(0)
    started = pair.start("run", "-w", "job", "--env", "GO=/nowhere", "--only", pair.name(0), terminal=True)
    started.says("line 29")
    started.type("\x04")
    assert "the job goes on: " in started.wait().ends(0).out
    (listed,) = (one for one in pair.clustertool("jobs", "--json").ends(0).json["jobs"] if one["id"] != job)
    assert listed["state"] == "running"
    pair.clustertool("stop", "--job", listed["id"]).ends(0)


def refusals(pair):
    """What is not there is 66, and what makes no sense 64."""
    for args, code, reported in [
        (["--rank", 4], 66, "no trainer 4"),
        (["--role", "pserver"], 66, "no pserver"),
        (["--host", "elsewhere"], 66, "127.0.0.3"),
        (["--job", "2001"], 66, "no job '2001'"),
        (["--attempt", 1], 66, "has no attempt 1"),
        (["--rank", "a"], 64, "--rank 'a'"),
        (["--rank", "1,2", "--raw"], 64, "--raw"),
        (["--all-ranks", "--raw"], 64, "--raw"),
        (["--tail", "x"], 64, "--tail 'x'"),
        (["--grep", "("], 64, "--grep '('"),
        (["--role", "boss"], 64, "--role 'boss'"),
        (["--since", "soon"], 64, "--since 'soon'"),
        (["--timestamps", "--raw"], 64, "--raw"),
        (["--timestamps", "--file", "workerlog.0"], 64, "only the logs of ranks have times"),
        (["--rank", "all", "--raw"], 64, "--raw"),
        (["--files", "--grep", "x", "--attempt", 1], 64, "--grep, --attempt cannot be given with --files"),
        (["--file", "workerlog.0", "--rank", 0, "--all-ranks"], 64, "--rank, --all-ranks cannot be given with --file"),
    ]:
        done = pair.clustertool("logs", *args).ends(code)
        assert reported in done.err
        assert not done.out
    refused = pair.clustertool("logs", "--json", "--raw", "--rank", 0).ends(64)
    assert "give one of them" in refused.err
    assert json.loads(refused.out.splitlines()[-1])["exit"]["code"] == 64  # the answer is JSON Lines here, too
    *lines, last = map(json.loads, pair.clustertool("logs", "--json", "--rank", 0).ends(0).out.splitlines())
    assert lines and all((one["role"], one["rank"], one["node"]) == ("trainer", 0, pair.name(0)) for one in lines)
    assert all(abs(one["time"] - time.time()) < 600 and "\n" not in one["line"] for one in lines)
    assert last == {"exit": {"code": 0, "source": "tool", "reason": ""}}


def test_roles_and_files_after_the_job(site):
    pair = site(2)
    pair.clustertool("run", "-w", HELLO, "--mode", "ps").ends(0)
    output = by_rank(pair.clustertool("logs", "--role", "pserver", "-r", "0,1"))
    assert [line[:22] for line in output] == ["[pserver 0 127.0.0.2] ", "[pserver 1 127.0.0.3] "]
    assert all("role=PSERVER" in line for line in output)
    everything = by_rank(pair.clustertool("logs", "--all-ranks"))
    assert [line.split("]")[0] for line in everything] == [
        "[pserver 0 127.0.0.2",
        "[pserver 1 127.0.0.3",
        "[trainer 0 127.0.0.2",
        "[trainer 1 127.0.0.3",
    ]


# -- a gigabyte: speed and memory, on request


@pytest.mark.chaos
@pytest.mark.skipif(not shutil.which("ssh"), reason="compares with an ssh client, and there is none")
def test_a_gigabyte_is_exact_fast_and_takes_no_memory(site, tmp_path):
    pair = site(2)
    pair.workspace(train_py=BINARY)
    pair.clustertool(
        "run", "-w", "job", "--nproc-per-node", 2, "--script", "train.py 1024", "--rank", 0, timeout=300
    ).ends(0)
    log = pair.jobs(1)[0] / "log/workerlog.3"
    server = pair.servers[1]
    options = ["-F", "none", "-p", str(server.port), "-i", str(pair._keys.user), "-o", "StrictHostKeyChecking=no"]
    cat = ["ssh", *options, "-o", "UserKnownHostsFile=/dev/null", server.address, f"cat {log}"]
    ours = theirs = float("inf")
    peak = 0
    for _ in range(2):  # the better of two, others load the machine
        start = time.monotonic()
        with open(tmp_path / "theirs", "wb") as out:
            subprocess.run(cat, stdout=out, stderr=subprocess.DEVNULL, check=True)
        theirs = min(theirs, time.monotonic() - start)
        logs = pair.start("logs", "--rank", 3, "--raw", out=tmp_path / "ours", fresh=True)
        done, weight = logs.weighed()
        ours, peak = min(ours, done.seconds), max(peak, weight)
    print(f"\ninv logs --raw {ours:.2f} s, ssh cat {theirs:.2f} s, peak {peak / 1e6:.0f} MB")
    subprocess.run(["cmp", tmp_path / "ours", log], check=True)
    assert peak < 100e6
    assert ours < 2 * theirs


def test_logs_on_this_machine_while_the_job_runs(site, tmp_path):
    """Rank 0's and those that are shown; with --fetch-logs those of all ranks and attempts at the end."""
    pair = site(2)
    pair.workspace(train_py=SLOWLY)
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "workerlog.0").write_text("of an earlier job")
    go = tmp_path / "go2"
    args = ["run", "-w", "job", "--nproc-per-node", 2, "--env", f"GO={go}", "--log-dir", logs, "--rank", 3]
    running = pair.start(*args, "--fetch-logs")
    running.says("rank 3 line 29")
    half = {rank: "".join(f"rank {rank} line {n}\n" for n in range(30)) for rank in range(4)}
    for rank in (0, 3):
        path = logs / f"workerlog.{rank}"
        until(lambda path=path, text=half[rank]: path.exists() and path.read_text() == text)
    assert not (logs / "workerlog.1").exists() and "[trainer 0" not in running.out
    there = (pair.job_dir(0, running.says(r"^job (\S+):")) / "log/endpoints.log").read_text()
    until(lambda: (logs / "endpoints.log").exists() and (logs / "endpoints.log").read_text() == there)
    go.touch()
    done = running.wait().ends(0)
    for rank in range(4):
        assert (logs / f"workerlog.{rank}").read_text() == f"{half[rank]}rank {rank} the end\n"
    assert f"logs on this machine: 4 files in {logs}/JOB" in done.err
    assert (logs / "workerlog.0.old").read_text() == "of an earlier job"
    go.unlink()
    left = pair.clustertool(*args, "--detach").ends(0)
    assert f"attach --job {left.job} --log-dir {logs}," in left.out
    attached = pair.start("attach", "--log-dir", logs, "--rank", 2)
    attached.says("rank 2 line 29")
    assert "--tail begins" in pair.clustertool("attach", "--log-dir", logs, "--tail", 3).ends(64).err
    go.touch()
    assert (
        f"logs on this machine: 2 files in {logs}/JOB{left.job} (--fetch-logs writes those of all ranks there; now: "
        in attached.wait().ends(0).err
    )
    for rank in (0, 2):
        assert (logs / f"workerlog.{rank}").read_text() == f"{half[rank]}rank {rank} the end\n"
        assert (logs / f"workerlog.{rank}").readlink() == Path(f"JOB{left.job}/workerlog.{rank}")
    assert not (logs / "workerlog.3").exists(), "an old log is not left there"
    done = pair.clustertool("attach", "--job", left.job, "--fetch-logs").ends(0)
    assert len(list((pair.folder / f"JOB{left.job}/log").glob("workerlog.*"))) == 4, done.err
    stopped = pair.start(*args, "--env", "GO=/nowhere", "--fetch-logs")
    stopped.says("rank 3 line 29")
    there = [pair.jobs(rank // 2)[-1] / f"log/workerlog.{rank}" for rank in range(4)]
    until(lambda: all(path.exists() and "line 29" in path.read_text() for path in there))
    stopped.signal()
    done = stopped.wait().ends(130)
    assert "logs on this machine: 4 files in" in done.err and "not all logs" not in done.err
    assert "--fetch-logs waits" in pair.clustertool(*args, "--fetch-logs", "--detach").ends(64).err
    assert pair.clustertool(*args[:-2]).ends(0) and not (logs / "workerlog.1").exists(), "an old log is not left there"
