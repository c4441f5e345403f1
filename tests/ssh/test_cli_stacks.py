"""inv stacks: where the ranks of a job are, on all nodes at one moment."""

from __future__ import annotations

import json
import os
import signal

from tests.cli import until

PROGRAM = """\
    import os, time
    def next_batch():
        time.sleep(1000)
    def step():
        read, write = os.pipe()
        print("ready", flush=True)
        os.read(read, 1)
    if os.environ["RANK"] == "3":
        next_batch()
    step()
"""


def test_equal_stacks_of_all_nodes_are_one_line(site, tmp_path):
    one = site(2)
    one.workspace(train_py=PROGRAM)
    job = one.inv("run", "-w", "job", "--detach", "--nproc-per-node", 2).ends(0).job
    until(lambda: sum(process.argv[-1:] == ("train.py",) for node in (0, 1) for process in one.processes(node)) == 4)

    def lines():
        return one.clustertool("stacks").ends(0).out.splitlines()

    until(lambda: "trainer 3: clock_nanosleep <- train.py:3 next_batch" in lines())
    until(lambda: "trainer 0-2: read <- train.py:7 step" in lines())
    found = lines()
    at = found.index("trainer 0-2: read <- train.py:7 step")
    assert found[at + 1 : at + 3] == ["  > step (train.py:7)", "    <module> (train.py:10)"]
    # a file, JSON, and single ranks
    to = tmp_path / "all.txt"
    answer = json.loads(one.clustertool("stacks", "--job", job, "--rank", "1,3", "--to", to, "--json").ends(0).out)
    assert [(group["ranks"], group["own"], group["call"]) for group in answer["groups"]] == [
        ([1], 0, "read"),
        ([3], 0, "clock_nanosleep"),
    ]
    assert sorted(len(samples) for samples in answer["nodes"].values()) == [1, 1]
    assert {sample["note"] for samples in answer["nodes"].values() for sample in samples} == {""}
    assert to.read_text().startswith("trainer 1: read <- train.py:7 step\n  > step (train.py:7)\n")
    native = one.clustertool("stacks", "--rank", 3, "--native").ends(0).out
    assert native.startswith("trainer 3: clock_nanosleep <- train.py:3 next_batch\n") and "  > next_batch" in native
    # a process that does not run is named, and left alone
    frozen = next(process for process in one.processes(0) if process.argv[-1:] == ("train.py",))
    os.kill(frozen.pid, signal.SIGSTOP)
    until(lambda: any(line.endswith(": stopped by a signal (SIGSTOP)") for line in lines()))
    os.kill(frozen.pid, signal.SIGCONT)
    # what is refused
    assert "--rank '3;7' is not a whole number" in one.clustertool("stacks", "--rank", "3;7").ends(64).err
    assert f"no such rank of job {job} runs" in one.clustertool("stacks", "--rank", 9).ends(66).err
    assert "--to" in one.clustertool("stacks", "--to", tmp_path).ends(64).err
    one.inv("stop", "--all").ends(0)
    assert "no job runs" in one.clustertool("stacks").ends(66).err


def test_check_names_the_means(site):
    rows = json.loads(site(1).clustertool("check", "--json").ends(0).out)["nodes"]
    assert "py-spy" in json.dumps(rows)
