"""clusterrun on this machine alone: no sshd, no ssh, no rsync, nothing on PATH at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.cases import STUBBORN
from tests.cli import CLUSTERRUN, CLUSTERTOOL, INV, REPO, lines_before, until

# Says what it was given, as JSON, one line a process.
NOTES = """
    import os, signal, time
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    print("ready", flush=True)
    print("got", int(signal.sigwait({signal.SIGUSR1})), flush=True)
"""
TELLS = """
    import json, os, sys
    print(json.dumps({"argv": sys.argv, "cwd": os.getcwd(), "python": sys.executable, "env": dict(os.environ)}), flush=True)
"""
WAITS = """
    import os, time
    print("ready", os.environ["RANK"], flush=True)
    time.sleep(600)
"""


def reported(site, *ranks, log="log"):
    """What processes have written into their logs, where fleetrun's users search for them."""
    return [json.loads((site.folder / log / f"workerlog.{rank}").read_text()) for rank in ranks]


def starts(site, *args, **options):
    return site.start(*args, program=CLUSTERRUN, **options)


def detached(site, *args, **options):
    """The id of a job of WAITS, whose two ranks have printed that they are ready."""
    done = site.clusterrun("--detach", "--nproc_per_node", 2, *args, "train.py", **options).ends(0)
    for rank in (0, 1):
        until(lambda log=site.folder / f"log/workerlog.{rank}": log.exists() and "ready" in log.read_text())
    return done.job


# -- a job ------------------------------------------------------------------------------------------------------------


def test_it_runs_in_the_folder_itself(here):
    for program in ("sshd", "ssh", "rsync", "python3"):
        assert not shutil.which(program, path=str(here.folder.with_name("no-programs")))
    here.workspace(".", train_py=TELLS)
    tokens = [
        "--lr",
        "0.1",
        "a b",
        "",
        "$HOME",
        "{port}",
        '{"a": {"b": 1}}',
        "--ips=10.0.0.1",
        "--help",
        "-m",
        "--",
        "*",
    ]
    done = here.clusterrun("--nproc_per_node=2", "train.py", *tokens).ends(0)
    first, second = reported(here, 0, 1)
    for rank, output in enumerate((first, second)):
        assert output["argv"] == ["train.py", *tokens]
        assert output["cwd"] == str(here.folder)
        assert Path(output["python"]).parent == Path(sys.executable).parent
        env = output["env"]
        assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == (str(rank), "2", str(rank))
        assert (env["PADDLE_TRAINER_ID"], env["PADDLE_TRAINERS_NUM"]) == (str(rank), "2")
        assert env["PADDLE_CURRENT_ENDPOINT"] == env["PADDLE_TRAINER_ENDPOINTS"].split(",")[rank]
        assert env["PADDLE_CURRENT_ENDPOINT"].startswith("127.0.0.1:")
    assert done.out.startswith("[trainer 0 ")
    assert "[trainer 1 " not in done.out, "as fleetrun, it shows what trainer 0 prints"
    assert done.last == "clustertool: exit 0 (job): all trainers are done"
    assert sorted(path.name for path in here.folder.iterdir()) == [".clustertool", "log", "tasks.py", "train.py"]


def test_what_fleetruns_users_search(here):
    """A script that imports Paddle gets them without -v."""
    here.workspace(".", train_py=f"{TELLS}    if 0:\n        import paddle.distributed\n")
    err = here.clusterrun("--nproc_per_node=2", "--gpus=", "--job_id=default", "train.py", "--x", "1 2").ends(0).err
    block = re.search(r"^-+  Configuration Arguments  -+\n(.*?)^-+$", err, re.M | re.S)
    assert block
    output = dict(line.split(": ", 1) for line in block[1].splitlines())
    assert (output["nproc_per_node"], output["nnodes"], output["log_dir"]) == ("2", "1", "log")
    assert (output["training_script"], output["training_script_args"]) == ("train.py", "['--x', '1 2']")
    table = dict(re.findall(r"^([A-Z]\w+) +(\S+)$", err.partition("Distributed Envs")[2], re.M))
    env = reported(here, 0)[0]["env"]
    for name in ("TRAINER_ID", "CURRENT_ENDPOINT", "TRAINERS_NUM", "TRAINER_ENDPOINTS", "MASTER"):
        assert table[f"PADDLE_{name}"] == env[f"PADDLE_{name}"]
    assert re.search(r"^logs: log/workerlog\.\*; clustertool logs --job \S+$", err, re.M)
    quiet = here.clusterrun("--log_level", "WARNING", "train.py").ends(0).err
    assert "Configuration" not in quiet
    assert "PADDLE_TRAINER_ID" not in quiet


def test_few_lines_are_printed_before_the_first_one_of_the_program(here):
    """Also with options of launchers that are not needed. --log_level DEBUG, as -v, prints what Paddle's launcher prints."""
    here.workspace(".", train_py="print('the program')")
    unneeded = "--nproc-per-node=2", "--redirects=3", "--start-method=spawn", "--devices=", "--elastic-timeout=9"
    done = here.clusterrun(*unneeded, "train.py", "--nnodes=3", terminal=True).ends(0)
    lines = lines_before(done.out)
    assert len(lines) <= 6, lines
    assert [line for line in lines if "--redirects" in line and "--elastic-timeout" in line and "--nnodes" in line]
    assert "Configuration" not in done.out and "PADDLE_TRAINER_ID" not in done.out
    err = here.clusterrun("--log_level", "DEBUG", "train.py").ends(0).err
    assert "Configuration" in err and "PADDLE_TRAINER_ID" in err


def test_the_shells_environment_is_the_jobs_but_for_what_launchers_say(here):
    """And its values are on no disk."""
    here.workspace(".", train_py=TELLS)
    mine = {
        "MINE": "a=b c",
        "PYTHONPATH": f"/mine:{REPO}",
        "NCCL_DEBUG": "INFO",
        "PADDLE_TRAINER_ID": "7",
        "PADDLE_PG_TIMEOUT": "x",
        "PADDLE_ELASTIC_SERVER": "x",
        "WORLD_SIZE": "9",
        "http_proxy": "http://proxy",
        "POD_IP": "10.0.0.1",
        "FLAGS_selected_gpus": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
        "FLAGS_other": "1",
        "TRAINING_ROLE": "PSERVER",
        "MY_KEY": "0nly-here",
    }
    here.clusterrun("train.py", env=mine).ends(0)
    env = reported(here, 0)[0]["env"]
    assert (env["MINE"], env["NCCL_DEBUG"], env["FLAGS_other"]) == ("a=b c", "INFO", "1")
    assert env["PADDLE_PG_TIMEOUT"] == "x", "no launcher computes it"
    assert env["PYTHONPATH"].startswith("/mine:")
    assert (env["PADDLE_TRAINER_ID"], env["WORLD_SIZE"], env["POD_IP"]) == ("0", "1", "127.0.0.1")
    assert env["TRAINING_ROLE"] == "TRAINER"
    assert env["CUDA_VISIBLE_DEVICES"] == "-1", "an empty list of devices reaches the processes"
    assert not {"PADDLE_ELASTIC_SERVER", "http_proxy", "FLAGS_selected_gpus"} & set(env)
    assert env["PATH"].split(":")[0] == str(Path(sys.executable).parent)
    assert env["MY_KEY"] == "0nly-here"
    (job,) = here.jobs(0)
    for path in filter(Path.is_file, (job / ".clustertool").iterdir()):
        assert b"0nly-here" not in path.read_bytes(), path


def test_which_python3_runs_the_job(here):
    """The activated environment's, else that of a clusterrun outside of PATH, else the first on PATH. A line names it."""
    shown = "print('by', os.environ.get('BY'), 'on', os.environ['PATH'], flush=True)"
    here.workspace(".", train_py=f"import os; {shown}; import no_such_module")
    version = ".".join(map(str, sys.version_info[:3]))
    own, first, tool = (here.folder.with_name(name) for name in ("own", "first", "tool"))
    for folder in (own, first, tool):
        folder.mkdir()
    for folder in (own, first):
        (folder / "python3").write_text(f'#!/bin/sh\nBY={folder.name} exec {sys.executable} "$@"\n')
    (tool / "clusterrun").write_text(f"#!{sys.executable}\nfrom clustertool.verbs.clusterrun import main\nmain()\n")
    for program in (own / "python3", first / "python3", tool / "clusterrun"):
        program.chmod(0o755)
    path = f"{first}:{tool}"
    cases = (  # PATH, more variables -> what runs the job, and the line
        (path, {}, "first", f"{first}/python3 {version}, the first on PATH"),
        (f"{own}:{path}", {"VIRTUAL_ENV": "x"}, "own", f"{own}/python3 {version}, by PATH of the environment"),
        (str(first), {}, "None", f"{sys.executable.rpartition('/')[0]}/python3 {version}, the one of clu"),
        (str(tool), {}, "None", "as PATH has no python3"),
    )
    for path, more, by, line in cases:
        program = [str(tool / "clusterrun")]  # as the kernel starts it, whether it was found on PATH or not
        done = here.start("train.py", program=program, env={"PATH": path, **more}).wait().ends(1)
        assert f"by {by} on " in done.out, (line, done.err)
        assert not more or f" on {path}\n" in done.out, "an activated environment has its own python3"
        (output,) = re.findall(r"^python3: (.*)$", done.err, re.M)
        assert line in output
        fix = f"  fix: python3 is {output}: activate the environment that has no_such_module, or install no_such_module in this"
        assert fix in done.err
    (here.folder / "conf.py").write_text("HOSTS = ['a']\nPRELUDE = 'BY=prelude; export BY'\n")
    done = here.clusterrun("--standalone", "train.py").ends(1)
    assert "by prelude" in done.out and "python3: " not in done.err, "PRELUDE decides"


def test_a_failure_is_the_exit_code(here):
    here.workspace(".", train_py="import os, sys; sys.exit(7 * int(os.environ['RANK']))")
    done = here.clusterrun("--nproc_per_node", 2, "train.py").ends(7)
    assert (
        "ABORT!!! Out of all 2 trainers, the trainer process with rank=[1] was aborted. Please check its log."
        in done.err
    )
    assert f"warning: trainer 1 on {here.name(0)} ended with exit code 7" in done.err
    assert f"\nno last lines of trainer 1 ({here.name(0)}, log/workerlog.1): it has printed nothing" in done.err
    assert done.last == f"clustertool: exit 7 (job): trainer 1 on {here.name(0)}: exit code 7"
    here.gone()


def test_ctrl_c_on_a_terminal_ends_everything(here):
    """The terminal sends it to the whole foreground group; the job is in none."""
    here.workspace(".", train_py=STUBBORN)
    running = starts(here, "--nproc_per_node", 2, "--grace", 1, "--tee", 3, "train.py", terminal=True)
    for rank in (0, 1):
        running.says(f"ready {rank}")
    assert len([p for p in here.living() if p.name.startswith("python")]) == 8
    running.type("\x03")
    done = running.wait().ends(130)
    assert f"{here.name(0)}: clean" in done.out
    assert not here.living()


def test_the_terminal_is_closed_and_the_job_goes_on(here):
    here.workspace(".", train_py=WAITS)
    running = starts(here, "train.py")
    running.says("ready 0")
    running.signal(signal.SIGHUP)
    running.wait().ends(0)
    assert [job["state"] for job in here.clustertool("jobs", "--json").ends(0).json["jobs"]] == ["running"]
    here.clustertool("stop", "--force").ends(0)
    assert not here.living()


def test_sigterm_ends_it(here):
    here.workspace(".", train_py=WAITS)
    running = starts(here, "train.py")
    running.says("ready 0")
    running.signal(signal.SIGTERM)
    running.wait().ends(143)
    assert not here.living()


def test_a_signal_for_the_ranks(here):
    """As from `sbatch --signal=B:USR1@60`, where the script has become clusterrun."""
    here.workspace(".", train_py=NOTES)
    running = starts(here, "--nproc-per-node", 2, "train.py")
    running.says("ready")
    until(lambda: "ready" in (here.folder / "log/workerlog.1").read_text())
    running.signal(signal.SIGUSR1)
    running.wait().ends(0)
    assert [(here.folder / f"log/workerlog.{rank}").read_text() for rank in (0, 1)] == ["ready\ngot 10\n"] * 2


def test_two_at_once_in_one_folder(here):
    here.workspace(".", train_py=WAITS)
    one, two = detached(here, "--job_id", "one"), detached(here, "--job_id=two")
    assert os.readlink(here.folder / "log") == ".clustertool/JOBtwo/log"
    endpoints = [(job / "log/endpoints.log").read_text().splitlines()[1:] for job in here.jobs(0)]
    assert len(set(endpoints[0]) | set(endpoints[1])) == 4
    assert "--all" in here.clustertool("stop").ends(64).err
    here.clustertool("stop", "--job", one).ends(0)
    states = {job["id"]: job["state"] for job in here.clustertool("jobs", "--json").ends(0).json["jobs"]}
    assert states == {one: "stopped", two: "running"}
    here.clustertool("stop").ends(0)
    assert not here.living()
    here.workspace(".", train_py="import os; print('id', os.environ['PADDLE_JOB_ID'])")
    again = here.clusterrun("--job_id", "one", "--resume", "-v", "train.py").ends(0)
    assert "--resume: no output to copy; the job works in the same folder as earlier ones" in again.err
    assert "resume: True" in again.err
    assert (again.job, "id one\n" in again.out) == ("one-2", True)


# -- other verbs --------------------------------------------------------------------------------------------------------


def test_other_verbs_find_it_here_and_below(here):
    here.workspace(".", train_py=WAITS)
    job = detached(here)
    below = here.folder / "a" / "b"
    below.mkdir(parents=True)
    status = here.clustertool("status", "--json", cwd=below).ends(0).json
    assert (status["job"], [p["state"] for p in status["processes"]]) == (job, ["running", "running"])
    lines = here.clustertool("logs", "--rank", "0,1", cwd=below).ends(0).lines()
    assert sorted(lines) == [f"[trainer {rank} {here.name(0)}] ready {rank}" for rank in (0, 1)]
    attached = here.start("attach", program=CLUSTERTOOL, cwd=below)
    attached.says("ready 0")
    attached.signal()
    assert f"{here.name(0)}: clean" in attached.wait().ends(130).err
    assert not here.living()
    nowhere = here.folder.with_name("elsewhere")
    nowhere.mkdir()
    assert "no conf.py" in here.clustertool("jobs", cwd=nowhere).ends(78).err
    assert here.clustertool("status", "--job", job, "--json", cwd=nowhere).ends(0).json["state"] == "stopped"
    assert "no job on this machine" in here.clustertool("jobs", "--here", cwd=nowhere).ends(78).err
    here.clustertool("clean", "--job", job).ends(0)
    assert not (here.folder / "log").is_symlink(), "a link to what is gone would be in the way"


def test_next_to_a_conf_py_it_is_found_with_here(here):
    here.workspace(".", train_py=WAITS)
    (here.folder / "conf.py").write_text('HOSTS = ["nobody@192.0.2.1"]\nCONNECT_TIMEOUT = 0.5\n')
    running = starts(here, "--standalone", "train.py")
    running.says("ready 0")
    assert "this machine alone" in running.err
    assert here.clustertool("jobs").code == 69
    done = here.clustertool("stop", "--here").ends(0)
    assert f"{here.name(0)}: clean" in done.out
    assert "clustertool logs --here --job" in running.wait().err
    same = starts(here, "--ips=127.0.0.1", "train.py")
    same.says("ready 0")
    same.signal()
    same.wait().ends(130)


def test_secrets_are_in_memory_and_nowhere_else(here):
    """Of conf.py all keys count, also where the job runs here."""
    here.workspace(".", train_py="import os; print('it is', os.environ['TOKEN'], os.environ['OTHER'], flush=True)")
    (here.folder / "conf.py").write_text('HOSTS = ["a"]\nSECRETS = ["TOKEN"]\nENV = {"OTHER": "seen"}\n')
    done = here.clusterrun("--standalone", "train.py", env={"TOKEN": "s3cr3t-v4lue"}).ends(0)
    assert f"[trainer 0 {here.name(0)}] it is *** seen" in done.out
    assert (here.folder / "log/workerlog.0").read_text() == "it is s3cr3t-v4lue seen\n", "what a rank prints is its own"
    (job,) = here.jobs(0)
    for path in filter(Path.is_file, (job / ".clustertool").iterdir()):
        assert b"s3cr3t-v4lue" not in path.read_bytes(), path
    assert "s3cr3t-v4lue" not in done.err
    assert "TOKEN" in here.clusterrun("--standalone", "train.py").ends(78).err, "one that is not set is an error"


# -- logs ---------------------------------------------------------------------------------------------------------------


def test_log_dir(here):
    here.workspace(".", train_py=TELLS)
    assert "logs: out/of/here/workerlog.*;" in here.clusterrun("--log_dir=out/of/here/", "train.py").ends(0).err
    assert reported(here, 0, log="out/of/here")
    assert (here.folder / "out/of/here").is_symlink()
    other_place = here.folder.with_name("elsewhere")
    here.clusterrun("--log-dir", other_place, "--nproc-per-node", 2, "train.py").ends(0)
    assert [output["env"]["RANK"] for output in reported(here, 0, 1, log=other_place)] == ["0", "1"]
    assert not (here.folder / "log").exists()


def test_a_log_folder_of_another_launcher_shows_ours(here):
    here.workspace(".", train_py=TELLS)
    log = here.folder / "log"
    log.mkdir()
    (log / "workerlog.0").write_text("of fleetrun\n")
    (log / "workerlog.1").write_text("of fleetrun\n")
    done = here.clusterrun("--nproc_per_node=2", "train.py").ends(0)
    assert [output["env"]["WORLD_SIZE"] for output in reported(here, 0, 1)] == ["2", "2"]
    assert "logs: log/workerlog.*;" in done.err
    assert (log / "workerlog.0.old").read_text() == (log / "workerlog.1.old").read_text() == "of fleetrun\n"
    here.clusterrun("train.py").ends(0)
    assert reported(here, 0)[0]["env"]["WORLD_SIZE"] == "1", "a link of ours goes to the newest job"
    assert not (log / "workerlog.1").exists()


# -- what is started ------------------------------------------------------------------------------------------------------


def test_modules_and_programs(here):
    here.workspace("package", __init___py="", tool_py=TELLS)
    here.clusterrun("-m", "package.tool", "--x", "-m").ends(0)
    assert reported(here, 0)[0]["argv"][1:] == ["--x", "-m"]
    program = here.folder / "prog"
    program.write_text('#!/bin/sh\necho "$0" "$1" "$RANK"\n')
    program.chmod(0o755)
    assert here.clusterrun("./prog", "a  b").ends(0).lines() == [f"[trainer 0 {here.name(0)}] ./prog a  b 0"]
    planned = [
        here.clusterrun("--dry", "--json", *tokens, "./prog", "a  b")
        .ends(0)
        .json["nodes"][0]["processes"][0]["command"]
        for tokens in ((), ("--no-python",))
    ]
    assert planned[0] == planned[1]
    (here.folder / "script").write_text("import sys; print('read', sys.argv)")
    assert "read ['script', 'x']" in here.clusterrun("--run-path", "script", "x").ends(0).out
    done = here.clusterrun("--no-python", "no-such-program").ends(127)
    assert "no-such-program" in done.err


def test_job_toml_counts(here):
    here.workspace(".", train_py=TELLS, other_py="print('other')")
    (here.folder / "job.toml").write_text(
        '[trainer]\ncommand = ["python3", "other.py"]\nper_node = 2\n[env]\nA = "b"\n[shards]\nfiles = "data/x-*"\n'
    )
    (here.folder / "data").mkdir()
    for shard in range(3):
        (here.folder / "data" / f"x-{shard}").touch()
    here.clusterrun("train.py").ends(0)
    first, second = reported(here, 0, 1)
    assert first["env"]["A"] == "b"
    shards = [Path(output["env"]["CLUSTERTOOL_SHARDS"]).read_text().split() for output in (first, second)]
    assert shards == [[f"{here.folder}/data/x-0", f"{here.folder}/data/x-2"], [f"{here.folder}/data/x-1"]]
    assert "other" in here.clusterrun("--nproc_per_node", 1).ends(0).out, "its command, where the command line has none"


def test_restarts(here):
    here.workspace(".", train_py="import os, sys; sys.exit(os.environ['CLUSTERTOOL_ATTEMPT'] != '2')")
    done = here.clusterrun("--max_restart", 2, "train.py").ends(0)
    assert re.findall(r"attempt (\d) begins", done.err) == ["1", "2"]


def test_parameter_servers(here):
    here.workspace(
        ".",
        train_py="""
            import os, socket, time
            env = os.environ
            print(env["TRAINING_ROLE"], env["PADDLE_PSERVERS_IP_PORT_LIST"], env["PADDLE_TRAINERS_NUM"], flush=True)
            if env["TRAINING_ROLE"] == "PSERVER":
                with socket.create_server((env["POD_IP"], int(env["PADDLE_PORT"]))):
                    time.sleep(600)
            for endpoint in env["PADDLE_PSERVERS_IP_PORT_LIST"].split(","):
                socket.create_connection((endpoint.split(":")[0], int(endpoint.split(":")[1]))).close()
            print("met them")
        """,
    )
    done = here.clusterrun("--server_num=2", "--worker_num=3", "train.py").ends(0)
    assert "2 pservers, 3 trainers on 1 node" in done.err
    assert "met them" in done.out
    assert "logs: log/serverlog.* log/workerlog.*;" in done.err
    assert "PADDLE_PSERVERS_IP_PORT_LIST" in done.err
    names = {path.name for path in (here.folder / "log").iterdir()}
    assert {"serverlog.0", "serverlog.1", "workerlog.0", "workerlog.2"} <= names
    lists = ["--servers=127.0.0.1:7301,localhost:7302", "--workers=127.0.0.1"]
    processes = here.clusterrun("--dry", "--json", *lists, "train.py").ends(0).json["nodes"][0]["processes"]
    assert [p["endpoint"] for p in processes if p["role"] == "pserver"] == ["127.0.0.1:7301", "127.0.0.1:7302"]
    assert not here.living()


# -- devices ------------------------------------------------------------------------------------------------------------


def devices(site, *args, **env):
    plan = site.clusterrun("--dry", "--json", *args, "train.py", env=env).ends(0).json
    return [
        (p["devices"], p["env"].get("CUDA_VISIBLE_DEVICES"), p["env"].get("FLAGS_selected_gpus"))
        for p in plan["nodes"][0]["processes"]
    ]


@pytest.mark.chaos
def test_visible_devices_as_fleetrun_takes_them(here):
    here.workspace(".", train_py=TELLS)
    shell = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert devices(here, **shell) == [([i], "4,5,6,7", str(i - 4)) for i in (4, 5, 6, 7)]
    assert devices(here, "--gpus=4,6", **shell) == [([4], "4,6", "0"), ([6], "4,6", "1")]
    assert devices(here, "--devices", "7,4", "--nproc_per_node", "1", **shell) == [([7, 4], "7,4", "0,1")]
    assert devices(here, "--nproc-per-node=gpu", CUDA_VISIBLE_DEVICES="2,0") == [([2], "2,0", "0"), ([0], "2,0", "1")]
    assert devices(here, "--virtual-local-rank", **shell) == [([i], str(i), "0") for i in (4, 5, 6, 7)]
    assert devices(here, CUDA_VISIBLE_DEVICES="NoDevFiles") == [([], "-1", None)]
    done = here.clusterrun("--gpus=0,1", "train.py", env=shell).ends(64)
    assert "device 0 is not among those of CUDA_VISIBLE_DEVICES=4,5,6,7" in done.err
    done = here.clusterrun("--gpus=0,1", "train.py", env={"CUDA_VISIBLE_DEVICES": "-1"}).ends(64)
    assert "CUDA_VISIBLE_DEVICES hides all devices in this shell" in done.err
    assert devices(here, CUDA_VISIBLE_DEVICES="") == [([], "-1", None)]
    assert "hides" not in here.clusterrun("--dry", "--devices=1", "train.py", env={"CUDA_VISIBLE_DEVICES": ""}).err
    assert "GPU-1a2b" in here.clusterrun("train.py", env={"CUDA_VISIBLE_DEVICES": "GPU-1a2b"}).ends(64).err
    assert not (here.folder / ".clustertool").exists(), "nothing was made by looking"
    here.clusterrun("train.py").ends(0)
    assert here.clustertool("status", env={"CUDA_VISIBLE_DEVICES": "GPU-1a2b"}).ends(0), (
        "who starts nothing need not know"
    )


def test_workers_have_one_device_each_and_pservers_none(here):
    """Also where two workers share the one that is visible."""
    here.workspace(".", train_py=TELLS)
    endpoints = [f"127.0.0.1:{port}" for port in (7001, 7002, 7003, 7004)]
    lists = ["--servers", ",".join(endpoints[:2]), "--workers", ",".join(endpoints[2:])]
    assert devices(here, *lists, CUDA_VISIBLE_DEVICES="3") == [([], "-1", None)] * 2 + [([3], "3", "0")] * 2
    found = devices(here, "--server_num=1", "--worker_num=2", CUDA_VISIBLE_DEVICES="4,5,6")
    assert found == [([], "-1", None), ([4], "4", "0"), ([5], "5", "0")]


def test_run_never_reads_variables_of_the_shell(here):
    conf = ["HOSTS = [{'host': '10.0.0.1', 'devices': [0]}]", "ROOT_DIR = '/jobs'", "DEVICE_KIND = 'gpu'"]
    (here.folder / "conf.py").write_text("\n".join([*conf, "START_PORT = 7000", "LEAD_PORT = 7500"]))
    here.workspace("job", train_py=TELLS)
    shell = {"CUDA_VISIBLE_DEVICES": "", "PADDLE_PG_TIMEOUT": "9", "FLAGS_x": "1"}
    for program, tokens in ((CLUSTERTOOL, ["run", "-w", "job"]), (CLUSTERRUN, ["-w", "job"])):  # HOSTS counts for both
        done = here.inv(*tokens, "--dry", "--json", "--script=train.py", program=program, env=shell).ends(0)
        env = done.json["nodes"][0]["processes"][0]["env"]
        assert env["CUDA_VISIBLE_DEVICES"] == "0"
        assert not {"PADDLE_PG_TIMEOUT", "FLAGS_x"} & set(env)


def test_one_process_for_each_processor(here):
    here.workspace(".", train_py=TELLS)
    for token in ("cpu", "auto"):
        assert len(devices(here, f"--nproc-per-node={token}", CUDA_VISIBLE_DEVICES="-1")) == len(
            os.sched_getaffinity(0)
        )
    assert (
        "has none"
        in here.clusterrun("--nproc-per-node=gpu", "train.py", env={"CUDA_VISIBLE_DEVICES": "-1"}).ends(64).err
    )


# -- what cannot be done -------------------------------------------------------------------------------------------------


def test_requests_that_cannot_be_honoured(here):
    here.workspace(".", train_py=TELLS)
    for tokens, code, text in (
        ([], 64, "what is to be run?"),
        (["--nproc_per_node", "2"], 64, "what is to be run?"),
        (["nope.py"], 65, "there is no nope.py"),
        (["--workspace", "nowhere", "train.py"], 65, "nowhere"),
        (["--nnodes=2", "train.py"], 64, "there is 1 node"),
        (["--node_rank=1", "train.py"], 64, "typed once"),
        (["--nproc_per_nod", "2", "train.py"], 64, "did you mean '--nproc-per-node'"),
        (["--numa-binding=node", "train.py"], 64, "numactl"),
        (["--run_mode", "other", "train.py"], 64, "collective, ps"),
        (["--standalone=yes", "train.py"], 64, "takes no value"),
        (["--ips"], 64, "needs a value"),
    ):
        done = here.clusterrun(*tokens).ends(code)
        assert text in done.err, tokens
        assert done.last.startswith(f"clustertool: exit {code} (tool)")
    assert not (here.folder / ".clustertool").exists()


def test_a_folder_that_cannot_be_written_is_reported(here):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    here.workspace(".", train_py=TELLS)
    here.folder.chmod(0o555)
    try:
        assert "cannot be written" in here.clusterrun("train.py").ends(65).err
    finally:
        here.folder.chmod(0o755)


def test_what_is_not_needed_is_answered_on_stderr(here):
    here.workspace(".", train_py=TELLS)
    done = here.clusterrun(
        "--rdzv-backend=c10d",
        "--rdzv_endpoint",
        "localhost:0",
        "--master",
        "10.0.0.1:1",
        "--rank",
        "-1",
        "--log_overwrite=1",
        "--monitor-interval",
        "5",
        "-r",
        "3",
        "--host=",
        "-v",
        "train.py",
    ).ends(0)
    notes = [line for line in done.err.splitlines() if line.startswith("note: ")]
    named = [note.split()[1] for note in notes]
    assert named == [
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--master",
        "--rank",
        "--log-overwrite",
        "--monitor-interval",
        "--redirects",
    ]
    alone = "note: --master without --nnodes is this machine alone; --nnodes N joins N machines"
    assert [note for note in notes if "not needed" not in note] == [alone]


def test_help_names_every_option(here):
    from clustertool.cli.launchers.launcher_flags import FLAGS

    out = here.clusterrun("--help").ends(0).out
    for flag in FLAGS:
        assert flag.name in out
        assert flag.here in out
    assert "--verbose, -v " in out
    assert here.clusterrun("--version").ends(0).out.startswith("clusterrun ")


def test_json(here):
    here.workspace(".", train_py=TELLS)
    answer = here.clusterrun("--json", "train.py").ends(0).json
    assert answer["exit"]["code"] == 0
    assert answer["job"]
    assert here.clusterrun("--json", "--nnodes=0", "train.py").ends(64).json["exit"]["code"] == 64


def test_it_waits_for_no_reader(here):
    """`clusterrun train.py | head`: the job goes on, as with run."""
    here.workspace(".", train_py="import time\nfor i in range(100000): print(i, flush=True); time.sleep(0.001)")
    running = starts(here, "train.py")
    running.says("] 1$")
    os.close(running._streams.pop("out"))
    until(lambda: running.process.poll() is not None)
    until(lambda: "the job goes on" in running.err)
    here.clustertool("stop", "--force").ends(0)
    assert not here.living()


def test_heter_trainers(here):
    here.workspace(".", train_py=TELLS)
    tokens = [
        "--server_num=1",
        "--worker_num=1",
        "--heter_worker_num=2;1",
        "--heter_devices=cpu;cpu",
        "--dry",
        "--json",
    ]
    plan = here.clusterrun(*tokens, "train.py").ends(0).json
    roles = [(p["role"], p["env"]["TRAINING_ROLE"]) for p in plan["nodes"][0]["processes"]]
    assert plan["mode"] == "ps-heter"
    assert roles == [("pserver", "PSERVER"), ("trainer", "TRAINER"), *[("heter", "HETER_TRAINER")] * 3]


def test_fetch_takes_files_of_its_job_only(here):
    """Jobs of this folder share ./output and what --log_dir names. Without rsync, and with it, if this machine has it."""
    here.workspace(
        ".",
        train_py="""
        import os, sys
        print("this is", sys.argv[1])
        os.makedirs("output/deep", exist_ok=True)
        for name in sys.argv[2:]:
            with open(f"output/{name}", "w") as file:
                file.write(sys.argv[1])
            os.utime(f"output/{name}", (1, 1))
        """,
    )
    (here.folder / "output").mkdir()
    (here.folder / "output/mine").write_text("by hand")
    first = here.clusterrun("--log_dir", "logs", "train.py", "first", "deep/one", "both").ends(0).job
    second = here.clusterrun("--log_dir", "logs", "train.py", "second").ends(0).job
    none = here.clustertool("fetch", "--to", "none").ends(0)
    older = re.search(r"left out: (.*): older than this job", none.err)[1]
    assert sorted(re.split(", | and ", older)) == ["output/both", "output/deep/one", "output/mine"]
    assert "nothing to copy: there are no files of this job in output" in none.err
    assert not (here.folder / "none").exists()
    third = here.clusterrun("--log_dir", "logs", "train.py", "third", "both").ends(0).job
    for number, env in enumerate(({}, {"PATH": os.environ["PATH"]})):
        to = here.folder / f"got{number}"
        done = here.clustertool("fetch", "--job", first, "--to", to, "--json", env=env).ends(0)
        assert sorted(done.json["ranks"]["0"]["left_out"]) == [["output/both", third], ["output/mine", ""]]
        assert f"output/both: job {third}, which began later in the same folder, has changed it" in done.err
        assert sorted(str(path.relative_to(to)) for path in to.rglob("*") if path.is_file()) == ["deep/one"]
        assert (to / "deep/one").read_text() == "first"
    last = here.clustertool("fetch", "--to", "last").ends(0)
    assert "rank 0: 1 file, 5 B -> last" in last.out
    assert os.listdir(here.folder / "last") == ["both"], last
    named = here.clustertool("fetch", "--job", first, "--path", "output/both", "--to", to, env=env).ends(0)  # by rsync
    assert "rank 0: 1 file" in named.out and (to / "both").read_text() == "third"
    assert f"warning: rank 0: output/both: job {third}, which began later" in named.err
    to = here.folder / "logs-of-second"
    logs = here.clustertool("fetch", "--job", second, "--path", "logs", "--to", to).ends(0)
    assert "logs/workerlog.0" in logs.err
    assert not to.exists(), "the link leads to the logs of the third job"
    here.clustertool("fetch", "--job", second, "--path", "log", "--to", to).ends(0)
    assert (to / "workerlog.0").read_text() == "this is second\n"
    here.clustertool("report", "--job", second, "--to", "report.html").ends(0)
    page = (here.folder / "report.html").read_text()
    assert "this is second" in page
    assert "this is third" not in page


def test_a_launcher_that_each_trainer_would_start(here):
    """The warning comes before the start, and its command does what was meant."""
    here.workspace(".", train_py=TELLS)
    launcher = here.folder / "torchrun"
    launcher.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} "$@"\n')
    launcher.chmod(0o755)
    tokens = ["--nproc_per_node=2", "--no-python", "./torchrun", "--nproc-per-node", "3", "train.py"]
    done = here.clusterrun(*tokens).ends(0)
    warning, start = done.err.index("warning: each of 2 trainers starts torchrun"), done.err.index("\njob ")
    assert warning < start
    right = re.search(r"^  fix: (clusterrun .*)$", done.err, re.M)[1].split()
    assert right == ["clusterrun", "--nproc-per-node", "3", "train.py"]
    planned = here.clusterrun("--dry", "--json", *right[1:]).ends(0).json
    assert (len(planned["nodes"][0]["processes"]), planned["warnings"]) == (3, [])
    assert "trainings" not in here.clusterrun("--nested", "--dry", *tokens).ends(0).err


@pytest.mark.parametrize("program", [CLUSTERTOOL, INV])
def test_run_names_the_command_that_was_typed(here, program):
    """--dry of a cluster that is described in full opens no connection."""
    conf = ["HOSTS = ['10.0.0.1', '10.0.0.2']", "ROOT_DIR = '/jobs'", "DEVICE_KIND = 'cpu'"]
    (here.folder / "conf.py").write_text("\n".join([*conf, "START_PORT = 7000", "LEAD_PORT = 7500"]))
    here.workspace("job", train_py=TELLS)
    tokens = ["run", "--dry", "--json", "-w", "job", "--script", "mpirun -np 4 train.py"]
    (warning,) = here.inv(*tokens, program=program).ends(0).json["warnings"]
    name = "inv" if program is INV else "clustertool"
    assert f": {name} run --dry --json -w job --nproc-per-node 2 --script train.py" in warning
    assert here.inv(*tokens, "--nested", program=program).ends(0).json["warnings"] == []


def test_horovodruns_list_of_hosts_is_this_machine(here):
    here.workspace(".", train_py=TELLS, job_toml="[trainer]\nper_node = 7\n")
    shell = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert devices(here, "-np", 2, "-H", "localhost:4", **shell) == [([4], "4,5", "0"), ([5], "4,5", "1")]
    assert len(devices(here, "-H", "127.0.0.1:3", CUDA_VISIBLE_DEVICES="-1")) == 3
    assert len(devices(here, "-np", 4, CUDA_VISIBLE_DEVICES="-1")) == 4
    assert "have 4 slots" in here.clusterrun("-np", 5, "-H", "localhost:4", "train.py").ends(64).err


# -- where it runs ------------------------------------------------------------------------------------------------------


def test_no_option_that_names_machines_is_ignored(here):
    """mpirun's and deepspeed's lists are nodes, and an address is one of this machine."""
    here.workspace(".", train_py=TELLS)
    (here.folder / "machines").write_text("192.0.2.1 slots=2\n192.0.2.2 slots=2\n")
    for tokens in (
        ["--host", "192.0.2.1:2,192.0.2.2:2", "-np", 4],
        ["-host", "192.0.2.1,192.0.2.2"],
        ["--hosts=192.0.2.1:2,192.0.2.2:2"],
        ["-hostfile", "machines", "-n", 3],
        ["--include", "192.0.2.1:0,1@192.0.2.2"],
    ):
        done = here.clusterrun(*tokens, "--dry", "train.py", env={"CUDA_VISIBLE_DEVICES": "-1"})
        assert "(2 nodes)" in done.err, (tokens, done.err)
        assert "this machine alone" not in done.err
    wrong = here.clusterrun("--host", "192.0.2.1", "train.py").ends(64)
    assert "--host 192.0.2.1 is no address of this machine" in wrong.err
    other = here.clusterrun("--host=127.0.0.1", "--ips=192.0.2.1,192.0.2.2", "train.py").ends(64)
    assert "--host 127.0.0.1 is none of the nodes: 192.0.2.1, 192.0.2.2" in other.err
    (process,) = (
        here.clusterrun("--dry", "--json", "--host", "127.0.0.7", "train.py").ends(0).json["nodes"][0]["processes"]
    )
    assert process["env"]["POD_IP"] == "127.0.0.7"
    assert not (here.folder / ".clustertool").exists()


def test_devices_of_one_host_and_of_all(here):
    here.workspace(".", train_py=TELLS)
    shell = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    for tokens in (["--only", "localhost:6,7"], ["--include=localhost:6,7"], ["--skip", "127.0.0.1:4,5"]):
        assert devices(here, *tokens, **shell) == [([6], "6,7", "0"), ([7], "6,7", "1")]
    assert devices(here, "--only", "localhost:6,7", "--gpus", "7,6", **shell) == [([7], "7,6", "0"), ([6], "7,6", "1")]
    done = here.clusterrun("--only", "localhost:6,7", "--gpus", "4,5", "train.py", env=shell).ends(64)
    assert f"--devices 4,5 and the devices 6,7 of {here.name(0)} by --only or --skip differ" in done.err


def test_options_behind_the_script_are_named(here):
    here.workspace(".", train_py=TELLS)
    done = here.clusterrun("train.py", "--nproc_per_node", "2", "--lr=1", "--master=x:1", "--gpus=0").ends(0)
    line = "note: --nproc-per-node, --master are passed to train.py; options of clusterrun stand before the program\n"
    assert line in done.err
    assert "1 trainer on 1 node" in done.err


def test_the_secret_of_typed_commands_is_in_no_process_of_a_job(here):
    """An agent of this machine has the environment of the command, and its supervisor and the guard have that of the agent."""
    here.workspace(
        ".",
        train_py="""
        import os, pathlib
        supervisor = pathlib.Path(f"/proc/{os.getppid()}")
        children = supervisor.joinpath(f"task/{supervisor.name}/children").read_text().split()
        for process in (supervisor.name, *children):
            words = pathlib.Path(f"/proc/{process}/environ").read_bytes().split(b"\\0")
            print("environ", b"SHELL_HAS=1" in words, any(word.startswith(b"CLUSTERTOOL_SECRET=") for word in words))
        """,
    )
    env = {"CLUSTERTOOL_SECRET": "abcdefgh234567ijklmnopqrst", "SHELL_HAS": "1"}
    done = here.clusterrun("train.py", env=env).ends(0)
    assert done.out.count("environ True False") >= 3 and "environ True True" not in done.out


def test_a_shell_of_several_machines_trains_on_this_one_alone(here):
    """PaddleCloud's variables join no machines, and that is stated; so is what --nnodes needs."""
    here.workspace(".", train_py=TELLS)
    shell = {
        "PADDLE_TRAINERS": "10.0.0.1,10.0.0.2",
        "POD_IP": "10.0.0.2",
        "PADDLE_TRAINER_ID": "1",
        "PADDLE_TRAINERS_NUM": "2",
    }
    done = here.clusterrun("train.py", env=shell).ends(0)
    assert (
        "warning: PADDLE_TRAINERS of this shell names 2 machines, and this command trains on this one alone" in done.err
    )
    assert "  fix: clusterrun --master 10.0.0.1:PORT --nnodes 2 --rank 1 ... with a common secret" in done.err
    assert "PADDLE_TRAINERS of" not in here.clusterrun("--dry", "--standalone", "train.py", env=shell).ends(0).err
    refused = here.clusterrun("--nnodes=2", "train.py").ends(64).err
    file = here.home(0) / ".config/clustertool/secret"
    assert (
        f"without an address it needs a secret: clustertool secret --to {file}, the same file on each machine"
        in refused
    )


def test_conf_py_of_another_program(here):
    """Documentation tools have a file of this name, which is in the folder or above it."""
    (here.folder / "conf.py").write_text('project = "demo"\nextensions = []\n')
    here.workspace(".", train_py="print('trained')")
    done = here.clusterrun("--standalone", "train.py").ends(0)
    assert "trained" in done.out and "it is left out" in done.err
    assert "it is left out" in here.clusterrun("--ips=127.0.0.1", "--dry", "train.py").ends(0).err
    assert "it is left out" not in here.clusterrun("--no-conf", "--dry", "train.py").ends(0).err
    assert "trained" in here.clustertool("logs").ends(0).out
    assert "--no-conf" in here.clusterrun("train.py").ends(78).err
