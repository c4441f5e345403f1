"""The verbs next to run: what they print, what they do, and their exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.cases import HELLO
from tests.cli import CLUSTERTOOL, SOON, until

SLACK = 20.0
CARETAKERS = ("ct-supervisor", "ct-guard")

WAITS = """
    import os, signal, sys, time
    from pathlib import Path
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("ready", os.environ["RANK"], flush=True)
    go = Path.home() / "go"
    while not go.exists():
        time.sleep(0.02)
    print("done", os.environ["RANK"], flush=True)
"""


@pytest.fixture
def pair(site):
    """Two nodes and a workspace `job` that waits until `pair.go()`."""
    two = site(2)
    two.workspace(train_py=WAITS)

    def go() -> None:
        for node in range(2):
            (two.home(node) / "go").touch()

    two.go = go
    yield two
    if two.living():
        two.clustertool("stop", "--all", "--force")


def detached(site, *args):
    """A job that runs, by its id."""
    done = site.clustertool("run", "-w", "job", "--detach", *args).ends(0)
    (line,) = done.lines("job ")
    assert re.search(r"clustertool attach --job \S+.*clustertool logs --job \S+.*clustertool stop --job \S+", line)
    return done.job


# -- dry


def test_dry_prints_the_plan_and_does_nothing_and_the_job_is_as_it_was_shown(pair):
    run = ("run", "-w", HELLO, "--nproc-per-node", 2, "--job-id", "same", "--json")
    done = pair.clustertool("run", "-w", "job", "--dry", "--nproc-per-node", 2).ends(0)
    for reported in ("trainer", "workerlog.3", "train.py", "PADDLE_TRAINER_ENDPOINTS"):
        assert reported in done.out
    plan = pair.start("--dry", *run).wait().ends(0).json
    assert [process["rank"] for node in plan["nodes"] for process in node["processes"]] == [0, 1, 2, 3]
    assert "would send 1 file, " in pair.clustertool("dispatch", "-w", "job", "--dry").ends(0).out
    for node in range(2):
        assert not pair.root(node).exists()
    done = pair.clustertool(*run, "--all-ranks").ends(0)
    shown = {(p["rank"], p["endpoint"]) for node in plan["nodes"] for p in node["processes"]}
    ran = {(int(r), e) for r, e in re.findall(r"hello role=TRAINER rank=(\d+) .*endpoint=(\S+)", done.err)}
    assert shown == ran
    assert json.loads(done.out)["exit"] == {"code": 0, "source": "job", "reason": "all trainers are done"}, (
        "JSON is all there is on stdout"
    )
    missing = pair.clustertool("status", "--job", "no-such", "--json").ends(66)
    assert missing.json["exit"]["code"] == 66


# -- detach, attach, stop


def test_status_and_jobs_and_attach_of_a_detached_job(pair):
    pair.clustertool("status").ends(66)
    assert pair.clustertool("jobs", "--json").ends(0).json["jobs"] == []
    job = detached(pair, "--nproc-per-node", 2)
    assert pair.clustertool("jobs", "--json").ends(0).json["jobs"][0]["state"] == "running"
    status = pair.clustertool("status", "--json").ends(0).json
    assert (status["job"], status["state"], status["mode"], status["outcome"]) == (job, "running", "collective", None)
    assert [(p["role"], p["rank"], p["node"], p["state"]) for p in status["processes"]] == [
        ("trainer", rank, rank // 2, "running") for rank in range(4)
    ]
    assert all(p["memory"] > 1e6 for p in status["processes"])
    assert [node["state"] for node in status["nodes"]] == ["running"] * 2
    assert "running" in pair.clustertool("status", "--job", job[:-1]).ends(0).out
    done = pair.clustertool("exec", "--job", job[:-1], "--only", pair.name(1), "--command", "echo on; exit 4").ends(4)
    assert done.lines() == [f"--- {pair.name(1)}", "on"]
    attached = pair.start("attach", "--all-ranks")
    attached.says("ready 0$")
    attached.says("ready 3$")
    pair.go()
    done = attached.wait().ends(0)
    assert {"[trainer 0 127.0.0.2] done 0", "[trainer 3 127.0.0.3] done 3"} <= set(done.lines())
    assert done.last == "clustertool: exit 0 (job): all trainers are done"
    again = pair.clustertool("attach", "--job", job).ends(0)
    assert "done 0" in again.out, "one that has ended is told as it ended"
    (one,) = pair.clustertool("jobs", "--json").ends(0).json["jobs"]
    assert (one["id"], one["state"], one["code"], one["total"]) == (job, "succeeded", 0, 2)
    pair.servers[1].stop()
    done = pair.clustertool("status", "--json").ends(69)
    assert done.json["state"] == "succeeded", "the answer stands, as far as it is known"
    assert "127.0.0.3" in done.err


def test_ctrl_c_in_attach_stops_the_job_for_everybody(pair):
    running = pair.start("run", "-w", "job")
    running.says("ready 0")
    attached = pair.start("attach", "-n", 1)
    attached.says("ready 0")
    at = attached.signal(signal.SIGINT)
    done = attached.wait().ends(130)
    assert "127.0.0.[2-3]: clean" in done.err
    for ended in (done, running.wait().ends(130)):
        assert ended.err.endswith("error: the job was stopped: Ctrl+C\nclustertool: exit 130 (tool): Ctrl+C\n")
    assert time.monotonic() - at < 2 + SLACK
    pair.gone(SOON)


def test_stop_from_another_folder_and_laptop(pair, tmp_path):
    running = pair.start("run", "-w", "job")
    running.says("ready 0")
    other_place = tmp_path / "elsewhere"
    other_place.mkdir()
    for name in ("conf.py", "tasks.py"):
        shutil.copy(pair.folder / name, other_place)
    home = tmp_path / "another-home"
    home.mkdir()
    done = pair.clustertool("stop", cwd=other_place, env={"HOME": str(home)}).ends(0)
    job = running.says(r"^job (\S+):")
    assert done.lines() == [f"job {job}: 127.0.0.[2-3]: clean"]
    pair.gone(SOON)
    assert "error: the job was stopped: clustertool stop\n" in running.wait().ends(143).err
    done = pair.clustertool("stop", "--json", "--only", pair.name(0)).ends(0)
    assert done.json == {"jobs": {}, "exit": {"code": 0, "source": "tool", "reason": ""}}
    assert "nothing to stop" in pair.clustertool("stop").ends(0).out


def test_stop_of_some_hosts_names_the_others(pair):
    job = detached(pair)
    for name in (0, 1):
        done = pair.clustertool("stop", "--all", "--only", pair.name(name)).ends(0)
        assert (
            f"job {job}: {pair.name(1 - name)}: not asked (--only, --skip)" in done.err or "nothing to stop" in done.out
        )
        assert "not among the hosts" not in done.err
    pair.gone(SOON)


@pytest.mark.chaos
def test_stop_of_some_hosts_with_a_job_that_was_lost_long_ago(pair):
    """The machines of a job crashed: a stop of other machines, or of some of them, is no failure because of it."""
    lost = detached(pair)
    for process in pair.living():
        os.kill(process.pid, signal.SIGSTOP)  # none of them sees the others die
    for process in pair.living():
        os.kill(process.pid, signal.SIGKILL)
    pair.gone()
    (listed,) = pair.clustertool("jobs", "--json").ends(0).json["jobs"]
    assert (listed["id"], listed["state"]) == (lost, "lost")
    running = detached(pair, "--only", pair.name(0))
    done = pair.clustertool("stop", "--all", "--only", pair.name(0)).ends(0)
    assert f"job {running}: {pair.name(0)}: clean" in done.out
    assert "did not answer" not in done.err and lost not in done.out
    assert pair.clustertool("stop", "--all", "--skip", pair.name(0)).ends(0).out == "nothing to stop\n"
    assert pair.clustertool("stop", "--all").ends(0).out == "nothing to stop\n"


@pytest.mark.chaos
@pytest.mark.parametrize("alone", [True, False])
def test_stop_finds_ranks_without_supervisors_and_guards(pair, alone):
    """Nothing controls the job any more, so it is lost, and its ranks run on. A stop without --job ends them.

    With --all also beside a job that runs.
    """
    lost = detached(pair)

    def living(caretakers=False):
        return [process for process in pair.living() if (process.name in CARETAKERS) == caretakers]

    until(lambda: len(living()) == 2, 30, lambda: f"two ranks: {pair.living()}")
    caretakers = living(caretakers=True)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # none of them sees the others die
        for process in caretakers:
            os.kill(process.pid, number)
    until(lambda: not living(caretakers=True), 30, lambda: f"their end: {pair.living()}")
    assert len(living()) == 2
    assert pair.clustertool("stop", "--dry").ends(0).out == f"would stop: {lost}\n"
    running = "" if alone else detached(pair)
    lines = pair.clustertool("stop", *([] if alone else ["--all"])).ends(0).out.splitlines()
    assert {line.split(": ")[0] for line in lines} == {f"job {job}" for job in (lost, running) if job}, lines
    assert all(line.endswith(": clean") for line in lines), lines
    assert not pair.living()
    assert pair.clustertool("stop").ends(0).out == "nothing to stop\n"
    assert pair.clustertool("stop", "--json").ends(0).json["jobs"] == {}


def test_stop_and_clean_with_several_jobs(site):
    """clean removes what has ended and nothing else."""
    node = site(1)
    node.workspace(train_py=WAITS)
    node.clustertool("run", "-w", HELLO, "--job-id", "done").ends(0)
    one, two = detached(node, "--job-id", "abc-one"), detached(node, "--job-id", "abc-two")
    done = node.clustertool("stop").ends(64)
    assert one in done.err
    assert two in done.err
    assert "--all" in done.err
    assert "not unique" in node.clustertool("stop", "--job", "abc").ends(64).err
    dry = node.clustertool("stop", "--all", "--dry").ends(0)
    assert one in dry.out
    assert two in dry.out
    assert len([p for p in node.living() if "train.py" in p.argv]) == 2
    assert f"clustertool stop --job {one}" in node.clustertool("clean", "--job", one).ends(64).err
    assert "would remove 1 job" in node.clustertool("clean", "--older-than", "0s", "--dry").ends(0).out
    assert "removed 0 jobs" in node.clustertool("clean", "--older-than", "1d").ends(0).out
    assert len(node.jobs(0)) == 3
    done = node.clustertool("clean", "--older-than", "0s", "--json").ends(0)
    assert done.json["removed"] == ["done"]
    assert sorted(done.json["running"]) == [one, two]
    assert [path.name for path in node.jobs(0)] == [f"JOB{one}", f"JOB{two}"]
    done = node.clustertool("stop", "--all", "--json").ends(0).json
    assert done["jobs"] == {job: {"127.0.0.2": "clean"} for job in (one, two)}
    assert done["exit"]["code"] == 0
    node.gone(SOON)
    node.clustertool("clean", "--job", one).ends(0)
    assert [path.name for path in node.jobs(0)] == [f"JOB{two}"]
    node.clustertool("clean", "--job", one).ends(66)


# -- exec, check, dispatch


def test_exec_gathers_equal_output(site):
    four = site(4)  # three with the same output, one with another
    done = four.clustertool(
        "exec", "--command", "echo same; test $(basename $(dirname $HOME)) != sshd2 || { echo odd >&2; exit 5; }"
    )
    done.ends(5)
    assert done.lines() == ["--- 127.0.0.[2-3,5]", "same", "--- 127.0.0.4 (exit code 5)", "same", "odd"]
    assert done.last.startswith("clustertool: exit 5 (job): ")
    answer = four.clustertool("exec", "--command", "pwd", "--json").ends(0).json
    assert {node["code"] for node in answer["nodes"].values()} == {0}
    assert len(answer["nodes"]) == 4
    late = four.clustertool("exec", "--command", "exec sleep 600", "--timeout", 1, "--only", four.name(0))
    assert late.code in (69, 124)
    assert late.seconds < 1 + SLACK
    assert not sleepers(four)
    four.servers[1].stop()
    done = four.clustertool("exec", "--command", "exit 3").ends(69)
    assert "--- 127.0.0.[2,4-5] (exit code 3)" in done.out
    assert "127.0.0.3" in done.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_ends_the_command_and_its_children(site, number, code):
    two = site(2)
    running = two.start("exec", "--command", "echo begun; timeout 900 sleep 600 & exec sleep 600")
    until(lambda: len(sleepers(two)) == 4)
    at = running.signal(number)
    done = running.wait().ends(code)
    assert time.monotonic() - at < 2 + SLACK
    assert not sleepers(two)
    assert done.lines() == ["--- 127.0.0.[2-3] (exit code 143)", "begun"]


def test_a_second_ctrl_c_does_not_wait_for_commands(site):
    one = site(1)
    running = one.start("exec", "--command", "echo begun; exec sleep 600")
    until(lambda: "begun" in running.out)
    one.servers[0].cut()
    running.signal(signal.SIGINT)
    running.signal(signal.SIGINT)
    done = running.wait().ends(130)
    assert f"the command may still run on {one.name(0)}, which did not answer" in done.err
    one.servers[0].stop()


def test_an_exec_that_is_killed_ends_its_command(site):
    one = site(1)
    running = one.start("exec", "--command", "trap '' TERM; sleep 600; true")
    until(lambda: len(sleepers(one)) == 1)
    running.signal(signal.SIGKILL)
    until(lambda: not sleepers(one))


def test_output_of_exec_comes_while_the_command_runs(site):
    two = site(2)
    big = "head -c 17000000 /dev/zero | tr '\\0' x; echo END"
    wait = f"echo begun; printf half; while ! test -e $HOME/go; do sleep 0.1; done; {big}"
    running = two.start("exec", "--only", two.name(0), "--command", wait)
    until(lambda: "begun\nhalf" in running.out)
    (two.servers[0].home / "go").touch()
    ended = running.wait().ends(0)
    assert ended.out.endswith("xEND\n") and ended.err.splitlines()[0].endswith("conf.py (1 of 2 nodes)")
    running = two.start("exec", "--stream", "--command", "echo begun; sleep 600")
    until(lambda: sorted(running.out.splitlines()) == [f"[{two.name(node)}] begun" for node in (0, 1)])
    running.signal(signal.SIGINT)
    running.wait().ends(130)
    big = f"test $(basename $(dirname $HOME)) = sshd0 || {big}"
    done = two.clustertool("exec", "--command", big, "--json").ends(0)
    assert {node.get("left_out", 0) for node in done.json["nodes"].values()} == {0, 17000004 - (16 << 20)}
    assert "output are left out on" in done.err and "--stream" in done.err


def sleepers(site) -> list[int]:
    return [p.pid for node in range(site.count) for p in site.processes(node) if p.argv == ("sleep", "600")]


def test_check_is_one_matrix(site):
    many = site(4)
    done = many.clustertool("check").ends(0)
    assert done.seconds < 4 + SLACK
    head, row = done.lines()[:2]
    assert row.startswith("127.0.0.[2-5]")
    for column in ("ping", "ssh", "python", "rsync", "root", "disk", "ports", "clock"):
        assert column in head
    assert "all 4 nodes are ready" in done.err
    many.root(1).write_text("in the way")
    many.servers[2].stop()
    done = many.clustertool("check", "--json").ends(69)
    by_node = {row["node"]: row["findings"] for row in done.json["nodes"]}
    assert by_node["127.0.0.3"]["root"]["level"] == "bad"
    assert by_node["127.0.0.4"]["ssh"]["level"] == "bad"
    assert by_node["127.0.0.2"]["root"]["level"] == "ok"
    assert done.json["exit"]["code"] == 69


def test_dispatch_sends_what_is_new_and_nothing_twice(pair):
    job = pair.folder / "job"
    (job / "data").write_bytes(os.urandom(2 << 20))
    (job / "secret.key").write_text("x")
    (job / "deep").mkdir()
    (job / "deep/a.tmp").write_text("x")
    (job / ".clusterignore").write_text("*.key\n*.tmp\n")
    for name in ("output", "log", "__pycache__", ".git"):
        (job / name).mkdir()
        (job / name / "file").write_bytes(b"x" * 1000)
    first = pair.clustertool("dispatch", "-w", "job", "--json").ends(0)
    for name in ("output/", "log/", "__pycache__/", ".git/", "secret.key"):
        assert re.search(rf"left out: .*{re.escape(name)}", first.err), first.err
    assert first.json["sent"] == ["127.0.0.2", "127.0.0.3"]
    assert 2 << 20 < first.json["bytes"] < 3 << 20, "once, and not once a node"
    assert 2 << 20 < first.json["between"] < 3 << 20
    again = pair.clustertool("dispatch", "-w", "job", "--json").ends(0).json
    assert (again["bytes"], again["sent"], again["had"]) == (0, [], ["127.0.0.2", "127.0.0.3"])
    (job / "train.py").write_text("print('new')")
    delta = pair.clustertool("dispatch", "-w", "job", "--json").ends(0).json
    assert 0 < delta["bytes"] < 10_000
    done = pair.clustertool("run", "-w", "job").ends(0)
    assert "[trainer 0 127.0.0.2] new" in done.out
    files = {str(path.relative_to(pair.jobs(1)[0])) for path in pair.jobs(1)[0].rglob("*") if path.is_file()}
    assert {"train.py", "data", ".clusterignore", "nodefile"} <= files
    assert not {"secret.key", "deep/a.tmp", ".git/file", "output/file", "log/file"} & files
    pair.conf(IGNORE_FROM=[".gitignore"])
    (job / "deep/.gitignore").write_text("new.*\n!new.py\n")
    for name in ("new.txt", "new.py"):
        (job / "deep" / name).write_text(name)
    done = pair.clustertool("run", "-w", "job", "--only", "127.0.0.3").ends(0)
    assert "deep/new.txt (.gitignore, 7 B)" in done.err
    assert {path.name for path in (pair.job_dir(1, done.job) / "deep").iterdir()} == {"new.py", ".gitignore"}


def test_each_edit_is_sent_and_reported_with_dispatches_to_other_nodes_between(pair):
    job = pair.folder / "job"
    for number in range(4):
        (job / f"f{number}").write_text(str(number))
    for step, (node, edited) in enumerate(((3, True), (3, True), (2, False), (3, True), (3, True), (2, True))):
        if edited:
            (job / "f3").write_text(f"edit {step}")
        done = pair.clustertool("dispatch", "-w", "job", "--only", f"127.0.0.{node}").ends(0)
        assert re.search(r"^dispatch: [1-9].* over the uplink", done.out + done.err, re.M), (step, done.out, done.err)
    done = pair.clustertool("dispatch", "-w", "job", "--only", "127.0.0.2").ends(0)
    assert "dispatch: nothing to send" in done.out + done.err


def test_a_workspace_that_is_there_already(pair):
    text = "import os\nprint('at', os.getcwd(), os.environ['CLUSTERTOOL_OUTPUT'])\n"
    (pair.folder / "there").mkdir()
    (pair.folder / "there/train.py").write_text(text)
    done = pair.clustertool("run", "--job-workspace", pair.folder / "there", "--all-ranks").ends(0)
    for node in range(2):
        (job,) = pair.jobs(node)
        assert f"[trainer {node} 127.0.0.{node + 2}] at {pair.folder / 'there'} {job}/output" in done.lines()
        assert not (job / "train.py").exists()
        assert (job / f"log/workerlog.{node}").exists()
    assert (pair.folder / "there/log").is_symlink()
    assert (pair.folder / "there/train.py").read_text() == text
    assert (
        "nowhere" in pair.clustertool("run", "--job-workspace", "/nowhere/at/all", "--only", "127.0.0.2").ends(69).err
    )
    (pair.home(0) / "mine").mkdir()
    (pair.home(0) / "mine/job.toml").write_text("[trainer]\ncommand = ['pwd']\nper_node = 2\n")
    done = pair.clustertool("run", "--job-workspace", "~/mine", "--only", "127.0.0.2", "-r", "0,1").ends(0)
    assert sorted(done.lines("[")) == [f"[trainer {rank} 127.0.0.2] {pair.home(0)}/mine" for rank in (0, 1)]


# -- the form of the output


def test_the_list_and_the_help(site):
    from clustertool.verbs import ns

    alone = site(0)
    listed = alone.inv("--list").ends(0).out
    for name in ns.task_names:
        assert re.search(rf"^  {re.escape(name)}(?: \(\S+\))?  +\S.*$", listed, re.M), (name, listed)
    text = alone.inv("--help", "run").ends(0).out
    for option in ns["run"].get_arguments():
        name = option.name.replace("_", "-")
        assert re.search(rf"--{name}[ =\[\n,]", text), name
        assert option.help, name


def test_the_list_loads_nothing_heavy(site):
    code = (
        "import sys; sys.argv = ['inv', '--list']\n"
        "from invoke.main import program\n"
        "try: program.run()\n"
        "except SystemExit: pass\n"
        "heavy = ('fabric', 'paramiko', 'rich', 'cryptography')\n"
        "print('LOADED', [name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=site(0).folder, capture_output=True, text=True, timeout=60)
    assert "LOADED []" in done.stdout, done.stdout + done.stderr


# -- questions at a terminal


@pytest.fixture
def locked(site, tmp_path):
    """Two nodes that let in a key with a passphrase only."""
    from cryptography.hazmat.primitives.asymmetric import ed25519

    from tests.ssh import sshd

    two = site(2)
    key = sshd.write_key(tmp_path / "locked", ed25519.Ed25519PrivateKey.generate(), passphrase="open sesame")
    for server in two.servers:
        (server.dir / "authorized_keys").write_text(sshd.public(key) + "\n")
    two.conf(IDENTITY_FILE=str(key))
    return two


def test_a_passphrase_is_asked_for_once(locked):
    running = locked.start("run", "-w", HELLO, "--all-ranks", terminal=True)
    running.says("[Pp]assphrase.*: ?$")
    running.type("open sesame\n")
    done = running.wait().ends(0)
    assert done.out.count("Passphrase of") == 1
    assert "open sesame" not in done.out
    assert done.out.count("hello role=TRAINER") == 2


def test_ctrl_c_instead_of_a_passphrase(locked):
    for keys in ("\x03", "\x04"):
        running = locked.start("run", "-w", HELLO, terminal=True)
        running.says("[Pp]assphrase.*: ?$")
        at = running.type(keys)
        done = running.wait()
        assert time.monotonic() - at < 2 + SLACK
        assert done.code == (130 if keys == "\x03" else 77), done.out
        assert "Traceback" not in done.out


def test_without_a_terminal_no_question_is_asked(locked):
    done = locked.clustertool("jobs").ends(77)
    assert "passphrase" in done.err


def test_fetch_brings_results_back(pair):
    pair.workspace(
        train_py="""
        import os
        from pathlib import Path
        out = Path(os.environ["CLUSTERTOOL_OUTPUT"])
        (out / "deep").mkdir()
        (out / "deep/model").write_text("of rank " + os.environ["RANK"])
    """
    )
    job = pair.clustertool("run", "-w", "job").ends(0).job
    assert "rank 0: 1 file, 9 B -> " in pair.clustertool("fetch").ends(0).out
    assert (pair.folder / f"JOB{job}/deep/model").read_text() == "of rank 0"
    assert (pair.folder / f"JOB{job}/.clustertool-logs").exists()
    done = pair.clustertool("fetch", "--job", job, "--rank", "all", "--to", "all", "--json").ends(0)
    assert sorted(done.json["ranks"]) == ["0", "1"]
    assert [(pair.folder / f"all/rank{rank}/deep/model").read_text() for rank in (0, 1)] == ["of rank 0", "of rank 1"]
    pair.clustertool("fetch", "--rank", 1, "--path", "log", "--to", "logs", "--only", pair.name(1)).ends(0)
    assert (pair.folder / "logs/workerlog.1").exists()
    pair.clustertool("fetch", "--rank", 7).ends(66)
    done = pair.clustertool("fetch", "--path", "output/deep/model/", "--to=~/one", "--rank", "all", "--json").ends(0)
    assert done.json["ranks"]["1"]["to"] == str(pair.laptop / "one/rank1/model")
    assert (pair.laptop / "one/rank1/model").read_text() == "of rank 1"
    assert "rank 0: nothing new to copy -> " in pair.clustertool("fetch").ends(0).out
    files = pair.clustertool("logs", "--files", "--json").ends(0).json["nodes"]
    assert [f"workerlog.{rank}" in files[pair.name(rank)] for rank in (0, 1)] == [True, True]
    shutil.rmtree(pair.jobs(0)[0] / "output/deep")
    empty = pair.clustertool("fetch", "--to", "empty", "--only", pair.name(0)).ends(0)
    assert f"rank 0: nothing to copy: there are no files in output on {pair.name(0)}" in empty.err
    assert not (pair.folder / "empty").exists()
    missing = pair.clustertool("fetch", "--path", "nothing", "--to", "x", "--only", pair.name(0)).ends(66)
    assert f"{pair.name(0)}: there is no file or folder 'nothing' of this job" in missing.err
    assert f"logs --job {job} --files" in missing.err
    pair.clustertool("fetch", "--path", "../up").ends(64)


# Commands of one program, as forks: to start Python and import the package takes 0.3 s of CPU for each of them.
ONE_AFTER_THE_OTHER = """
import os, runpy, sys
import clustertool.verbs
import clustertool.verbs.exec, clustertool.verbs.jobs, clustertool.verbs.logs, clustertool.verbs.run
program, *typed = sys.argv[1:]
for command in typed:
    pid = os.fork()
    if not pid:
        sys.argv[:] = [program, *command.split()]
        runpy.run_path(program, run_name="__main__")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        sys.exit(code)
    print("it ended", flush=True)
"""


def test_commands_of_a_user_without_an_entry_against_nodes(site):
    """The uid of this test's user has no line in passwd here, and the nodes know it by its login."""
    become = ["unshare", "--map-user=9999", "--map-group=9999"]
    if subprocess.run([*become, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no user namespaces")
    node = site(1)
    node.workspace(train_py="print('trained')")
    env = {name: text for name, text in node.environ({}).items() if name not in ("USER", "LOGNAME")}
    typed = ("run -w job", "jobs", "logs", "exec id -u")
    argv = (*become, sys.executable, "-c", ONE_AFTER_THE_OTHER, *CLUSTERTOOL, *typed)
    done = subprocess.run(argv, cwd=node.folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    run, jobs, logs, uid, _ = done.stdout.split("it ended\n")
    assert "trained" in run and "succeeded" in jobs and "trained" in logs
    assert uid.split()[-1] == str(os.getuid())


@pytest.mark.parametrize("carrier", ["swarm", "rsync"])
def test_a_large_file_that_is_cut_after_it_was_read_is_sent_as_it_is(pair, carrier):
    """The node's interpreter cuts it at the first login, which comes after the workspace was read."""
    folder = pair.workspace(train_py="import os; print(os.path.getsize('big'))")
    (folder / "big").write_bytes(os.urandom(3_000_000))
    python = pair.folder / "python"
    python.write_text(
        f'#!/bin/sh\n[ -e {folder}/big.cut ] || truncate -s 1000000 {folder}/big\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    pair.conf(PYTHON=str(python))
    done = pair.clustertool("run", "-w", "job", "--dispatch", carrier).ends(0)
    assert "1000000" in done.out
    assert len([line for line in done.err.splitlines() if "is sent as it is now" in line and "big" in line]) == 1
