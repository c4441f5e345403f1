"""inv exec --in-job: a shell or a command in the directory and the environment of a running rank."""

from __future__ import annotations

import os
import signal
import time

from tests.cli import until

PROGRAM = """\
    import os, time
    print("ready", flush=True)
    while not os.path.exists("end"):
        time.sleep(0.05)
    time.sleep(float(os.environ.get("MORE", "0")))
"""


def started(site, nodes=2, *args):
    one = site(nodes)
    one.conf(PRELUDE=["export FROM_PRELUDE=there", "PATH=/opt/of-prelude:$PATH"], SECRETS=["TOKEN"])
    one.workspace(train_py=PROGRAM)
    job = one.clustertool("run", "-w", "job", "--detach", *args, env={"TOKEN": "quiet word"}).ends(0).job
    return one, job


def sessions(one):
    return [process for process in one.all_processes() if "rank_session" in " ".join(process.argv)]


def test_a_command_has_what_the_rank_has_and_what_is_refused(site):
    one, job = started(site)
    show = 'echo "$RANK $MASTER_PORT $FROM_PRELUDE $TOKEN" "$1"; pwd; env | sort >env-$RANK; umask'
    done = one.clustertool("exec", "--in-job", "--rank", 1, "sh", "-c", show, "0", "a 'b' $c").ends(0)
    rank = next(p for p in one.processes(1) if p.argv[-1:] == ("train.py",))
    with open(f"/proc/{rank.pid}/environ") as file:
        environ = dict(pair.split("=", 1) for pair in file.read().split("\0") if "=" in pair)
    folder = one.jobs(1)[-1]
    tokens, where, umask = done.out.splitlines()
    assert tokens == f"1 {environ['MASTER_PORT']} there quiet word a 'b' $c"
    assert where == str(folder)
    names = {line.split("=", 1)[0] for line in (folder / "env-1").read_text().splitlines()}
    assert names ^ environ.keys() <= {"PWD", "OLDPWD", "_", "SHLVL", "_CLUSTERTOOL_SESSION"}
    assert not any("quiet word" in " ".join(process.argv) for process in one.all_processes())
    assert one.clustertool("exec", "--in-job", "--command", "echo $RANK | cat").ends(0).out == "0\n"
    assert one.clustertool("exec", "--in-job", "--host", one.name(1), "sh", "-c", "echo $RANK").ends(0).out == "1\n"
    failed = one.clustertool("exec", "--in-job", "--", "sh", "-c", "echo out; echo err >&2; exit 9").ends(9)
    assert (failed.out, "err\n" in failed.err) == ("out\n", True)
    assert failed.last == f"clustertool: exit 9 (job): the command in trainer 0 on {one.name(0)} ended with exit code 9"
    assert one.clustertool("exec", "--in-job", "--", "sh", "-c", "kill -9 $$").ends(137)
    hint = one.clustertool("exec", "echo", "--json").ends(0)
    assert "note: --json is part of the command; options of exec stand before it" in hint.err
    assert "the command no-such does not exist" in one.clustertool("exec", "--in-job", "no-such").ends(127).err
    # what is refused
    assert "needs a terminal" in one.clustertool("exec", "--in-job").ends(64).err
    assert "--json cannot be given" in one.clustertool("exec", "--in-job", "--json", "true").ends(64).err
    assert "--rank needs --in-job" in one.clustertool("exec", "--rank", 1, "true").ends(64).err
    assert f"job {job} has no trainer 7" in one.clustertool("exec", "--in-job", "--rank", 7, "true").ends(66).err
    assert "has no host 'nowhere'" in one.clustertool("exec", "--in-job", "--host", "nowhere", "true").ends(66).err
    os.kill(rank.pid, signal.SIGSTOP)  # a rank that is frozen runs
    assert one.clustertool("exec", "--in-job", "--rank", 1, "--", "echo", "in").ends(0).out == "in\n"
    os.kill(rank.pid, signal.SIGCONT)
    (folder / "end").touch()
    until(lambda: not any(p.argv[-1:] == ("train.py",) for p in one.processes(1)))
    assert "trainer 1 does not run: it is done" in one.clustertool("exec", "--in-job", "--rank", 1, "true").ends(66).err
    second = one.clustertool("run", "-w", "job", "--detach", env={"TOKEN": "t"}).ends(0).job
    error = one.clustertool("exec", "--in-job", "true").ends(64).err
    assert "several jobs run" in error and "name one with --job" in error
    one.clustertool("exec", "--in-job", "--job", second, "--", "touch", "end").ends(0)
    one.clustertool("stop", "--all").ends(0)
    assert "no job runs" in one.clustertool("exec", "--in-job", "true").ends(66).err
    assert f"no rank of job {job} runs" in one.clustertool("exec", "--in-job", "--job", job, "true").ends(66).err


def test_a_shell_on_a_terminal(site):
    one, job = started(site)
    shell = one.start("exec", "--in-job", "--rank", 1, terminal=True, columns=91, env={"TERM": "dumb"})
    shell.says("trainer 1 on")
    shell.type('echo "<$RANK $FROM_PRELUDE $TERM $(stty size)>"\r')
    assert shell.says("^<(.*)>") == "1 there dumb 40 91"
    shell.type("sleep 100\r")
    until(lambda: any(process.name == "sleep" for process in one.processes(1)))
    shell.type("\x03")  # it ends the program in the shell, and not the session
    until(lambda: not any(process.name == "sleep" for process in one.processes(1)))
    shell.type('echo "still $((40 + 2))"; exit 5\r')
    shell.says("^still 42")
    done = shell.wait()
    assert (done.code, done.last.strip()[-11:]) == (5, "exit code 5")
    until(lambda: not sessions(one))
    one.clustertool("stop", "--job", job).ends(0)


def test_the_end_of_exec_of_its_terminal_and_of_the_job(site):
    """Each ends the session with all that runs in it. An interactive shell ignores TERM, and must not delay the job's end."""
    one, job = started(site, 1, "--grace", "60")

    def sleeps():
        return any(process.name == "sleep" for process in one.processes(0))

    for number in (signal.SIGINT, signal.SIGKILL):  # of a command without a terminal
        running = one.start("exec", "--in-job", "--command", "echo begun; setsid sleep 1000; true")
        running.says("^begun")  # output comes while the command runs
        until(sleeps)
        running.signal(number)
        running.wait()
        until(lambda: not sleeps())
        until(lambda: not sessions(one))

    def shell_of():
        shell = one.start("exec", "--in-job", terminal=True, env={"TERM": "dumb"})
        shell.says("trainer 0 on")
        return shell

    shell = shell_of()
    shell.type("sleep 1000\r")
    until(sleeps)
    os.kill(shell.process.pid, signal.SIGKILL)  # the terminal is lost
    until(lambda: not sessions(one))
    until(lambda: not sleeps())
    for leave in ("\r~.", ""):
        shell = shell_of()
        shell.type("echo $((40 + 2))\r")
        shell.says("^42")
        if leave:
            shell.type(leave)
            shell.wait(20)
            until(lambda: not sessions(one))
    before = time.monotonic()
    one.clustertool("stop", "--job", job).ends(0)
    assert time.monotonic() - before < 30
    shell.wait(30)
    one.gone()
