"""The command line of `clustertool`: what the parser reads and refuses, what help and completion show."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clustertool.cli import completion, help_text, parser
from clustertool.cli.options import FLAG, MANY, Opt, Positional, Verb
from clustertool.cli.parser import did_you_mean
from clustertool.cli.verb_table import COMMON, HELP, VERBS
from clustertool.errors import UsageError
from clustertool.fleet import this_user
from clustertool.verbs import program
from tests import forked

CLUSTERTOOL = str(Path(sys.executable).parent / "clustertool")
SHOW = Verb(
    "show",
    "Show a thing; more of it.",
    Opt("work-dir", "where", short="w", value="DIR", usual="here", group="Places"),
    Opt("old-dir", "the same as --work-dir", value="DIR", alias="work-dir", group="Places"),
    Opt("follow", "go on", FLAG, short="f"),
    Opt("tail", "lines", short="n", value="N"),
    Opt("only", "hosts", MANY, value="HOST"),
    purpose="Watch",
    also="display again=--work-dir",
    examples=("show -f",),
)
START = Verb(
    "start",
    "Start a command.",
    Opt("env", "a variable", MANY, value="K=V"),
    purpose="Run",
    positional=Positional("command", "COMMAND [ARGUMENTS]", "what to start", rest=True),
)
MOVE = Verb(
    "move",
    "Move.",
    Opt("to", "where", value="DIR"),
    purpose="Run",
    positional=Positional("jobs", "[JOB...]", "the jobs"),
)
TABLE = (SHOW, START, MOVE)


def given(*argv: str) -> dict[str, Any]:
    return parser.read(argv, TABLE, COMMON, HELP).given


def refused(*argv: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        parser.read(argv, TABLE, COMMON, HELP)
    return caught.value


NOTHING = {"work_dir": "", "old_dir": "", "follow": False, "tail": "", "only": ()}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), {}),
        (("--work-dir", "a b"), {"work_dir": "a b"}),
        (("--work-dir=a=b",), {"work_dir": "a=b"}),
        (("--work_dir", "a"), {"work_dir": "a"}),
        (("--work_dir=a_b",), {"work_dir": "a_b"}),
        (("-w", "a", "-f"), {"work_dir": "a", "follow": True}),
        (("-wa",), {"work_dir": "a"}),
        (("-w=a",), {"work_dir": "a"}),
        (("-fn", "5"), {"follow": True, "tail": "5"}),
        (("-fn5",), {"follow": True, "tail": "5"}),
        (("--tail", "-5"), {"tail": "-5"}),
        (("--tail=--follow",), {"tail": "--follow"}),
        (("--tail", "1", "--tail", "2"), {"tail": "2"}),
        (("--only", "a", "--only=b"), {"only": ("a", "b")}),
        (("--",), {}),
    ],
)
def test_options(argv: tuple[str, ...], expected: dict[str, Any]) -> None:
    assert given("show", *argv) == {**NOTHING, **expected}


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        ((), ()),
        (("ls", "-l", "--env", "B=1"), ("ls", "-l", "--env", "B=1")),
        (("--", "--odd", "x"), ("--odd", "x")),
        (("ls", "--", "x"), ("ls", "--", "x")),
        (("ls", "--help"), ("ls", "--help")),
    ],
)
def test_the_first_argument_of_a_command_ends_the_options(argv: tuple[str, ...], command: tuple[str, ...]) -> None:
    assert given("start", "--env", "A=1", *argv) == {"env": ("A=1",), "command": command}


@pytest.mark.parametrize(
    ("argv", "resumed", "rest"),
    [
        ((), "", ()),
        (("--resume",), "@newest", ()),
        (("--resume", "--to", "x"), "@newest", ()),
        (("--resume", "--", "a"), "@newest", ("a",)),
        (("--resume", "train.py", "--to", "x"), "@newest", ("train.py",)),
        (("--resume", "exp-2", "train.py"), "exp-2", ("train.py",)),
        (("--resume=train.py",), "train.py", ()),
    ],
)
def test_a_value_that_may_be_left_out(argv: tuple[str, ...], resumed: str, rest: tuple[str, ...]) -> None:
    resume = Opt("resume", "continue", value="JOB", bare="@newest")
    verb = Verb("go", "Go.", resume, Opt("to", "where"), purpose="Run", positional=Positional("script", "S", "what"))
    line = parser.read(("go", *argv), (verb,), COMMON, HELP)
    assert (line.given["resume"], line.given["script"]) == (resumed, rest)
    assert "--resume [JOB]" in help_text.of_verb(verb, COMMON, 80)


def test_arguments_may_stand_between_options() -> None:
    assert given("move", "a", "--to", "x", "b", "--", "-c") == {"to": "x", "jobs": ("a", "b", "-c")}


@pytest.mark.parametrize(
    ("argv", "what", "fix"),
    [
        (("shwo",), "unknown command 'shwo', did you mean 'show'?", "clustertool --help lists"),
        (("sho",), "unknown command 'sho', did you mean 'show'?", "clustertool --help lists"),
        (("s",), "unknown command 's', did you mean 'show' or 'start'?", "clustertool --help lists"),
        (("display",), "unknown command 'display', did you mean 'show'?", "clustertool --help lists"),
        (("xyz",), "unknown command 'xyz'", "clustertool --help lists"),
        (("again",), "unknown command 'again', did you mean 'show --work-dir'?", "clustertool --help lists"),
        (("show", "--wrok-dir", "x"), "unknown option '--wrok-dir' of show, did you mean '--work-dir'?", "help show"),
        (("show", "--work"), "unknown option '--work' of show, did you mean '--work-dir'?", "help show"),
        (("show", "--wrok_dir=x"), "unknown option '--wrok-dir' of show, did you mean '--work-dir'?", "help show"),
        (("show", "-x"), "unknown option '-x' of show", "help show"),
        (("show", "--work-dir"), "--work-dir needs a value", "--work-dir=DIR"),
        (("show", "--work-dir", "--follow"), "--work-dir needs a value", "--work-dir=DIR"),
        (("show", "-w", "-f"), "-w needs a value", "-w DIR"),
        (("show", "--follow=yes"), "--follow takes no value", "leave"),
        (("show", "x"), "show takes no argument 'x'", "clustertool help show"),
        (
            ("--work-dir", "x", "show"),
            "unknown option '--work-dir'",
            "options follow their command: clustertool show --work-dir",
        ),
        (("-",), "unknown option '-'", "clustertool --help lists"),
        (("--hlep",), "unknown option '--hlep', did you mean '--help'?", "clustertool --help lists"),
    ],
)
def test_what_is_wrong_is_one_plain_line(argv: tuple[str, ...], what: str, fix: str) -> None:
    error = refused(*argv)
    assert error.what == what
    assert fix in error.fix
    assert "\n" not in error.what + error.fix


def test_suggestions_are_at_most_two() -> None:
    assert did_you_mean("st", ["stop", "run", "status"]) == ", did you mean 'stop' or 'status'?"
    assert did_you_mean("st", ["stop", "status", "start"]) == ", did you mean 'stop'?"
    assert did_you_mean("", ["a", "b"]) == ""


# -- help


def test_help_of_a_verb_has_groups_types_defaults_and_aliases_together() -> None:
    text = help_text.of_verb(SHOW, (HELP,), 100)
    groups = re.findall(r"^(\S.*)\n  ", text, re.M)
    assert groups == ["Examples", "Places", "Options", "Help"]
    assert "  -w, --work-dir, --old-dir DIR\n" in text
    assert re.search(r"^ +where \(default: here\)$", text, re.M)
    assert re.search(r"^  -f, --follow +go on$", text, re.M)
    assert re.search(r"^      --only HOST +hosts; may be repeated$", text, re.M)
    assert "clustertool show -f" in text
    assert "COMMAND [ARGUMENTS]  " in help_text.of_verb(START, (HELP,), 100)


@pytest.mark.parametrize("width", [40, 80, 140])
def test_help_fits_the_window(width: int) -> None:
    for verb in VERBS:
        lines = help_text.of_verb(verb, (HELP,), width).splitlines()
        long = [line for line in lines if len(line) > width]
        assert width == 40 or all(line.startswith(("  clustertool ", "  -", "      --")) for line in long), long
    overview = help_text.overview("about", VERBS, COMMON, (("check", "text"),), width).splitlines()
    assert width == 40 or max(map(len, overview)) <= width
    assert max(map(len, overview)) <= max(width, 80) if width < 140 else 120


def shown(*argv: str, columns: int = 80) -> str:
    """stdout of a `clustertool` that ends with 0."""
    environ = {"COLUMNS": str(columns), "PATH": "/usr/bin:/bin"}
    done = forked.complete([CLUSTERTOOL, *argv], env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_help_of_the_program_is_its_own() -> None:
    text = shown("--help")
    assert text == shown() == shown("help") == shown("-h")
    for verb in VERBS:
        assert re.search(rf"^  {re.escape(verb.name)}  +\S", text, re.M), verb.name
    purposes = list(dict.fromkeys(verb.purpose for verb in VERBS))
    assert [line for line in text.splitlines() if line in purposes] == purposes
    assert "sudo" not in text
    assert "  clustertool run --workspace ./job " in text
    assert shown("help", "run") == shown("run", "--help") == shown("--help", "run") == shown("run", "-w", "job", "-h")
    assert "--nproc-per-node N" in shown("help", "run")
    assert [line.split()[0] for line in shown("--list").splitlines()] == [verb.name for verb in VERBS] + ["help"]
    assert re.fullmatch(r"clustertool \d\S*\n", shown("--version"))


def test_a_reader_that_leaves_is_no_error() -> None:
    done = subprocess.run(["bash", "-c", f"{CLUSTERTOOL} help run | true"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("shell", "code", "err"),
    [
        ("help run >&-", 0, ""),
        ("help run >/dev/full", 74, "clustertool: cannot write to stdout: No space left on device\n"),
        (
            "stat",
            64,
            "error: unknown command 'stat', did you mean 'status'?\n  fix: clustertool --help lists the commands\n",
        ),
        ("run --worksapce x", 64, "error: unknown option '--worksapce' of run, did you mean '--workspace'?\n"),
        ("run --workspace", 64, "error: --workspace needs a value\n  fix: --workspace=DIR\n"),
        ("version", 64, "error: unknown command 'version', did you mean '--version'?\n"),
        ("cluster down", 64, "error: unknown command 'cluster', did you mean 'cluster.up' or 'cluster.down'?\n"),
        (
            "logs exp-1",
            64,
            "error: logs takes no argument 'exp-1'\n  fix: clustertool logs --job exp-1; clustertool help logs ",
        ),
        (
            "fetch output/model.pt",
            64,
            "error: fetch takes no argument 'output/model.pt'\n  fix: clustertool help fetch ",
        ),
        ("check './a b'", 64, "error: check takes no argument './a b'\n  fix: clustertool check --workspace './a b'; "),
        ("gpus node1", 64, "error: gpus takes no argument 'node1'\n  fix: clustertool help gpus shows its use\n"),
        ("help run stop", 64, "error: help takes one command, not 2\n"),
        ("--dry", 64, "error: --dry without a command\n"),
        (
            "--print-completion-script tcsh",
            64,
            "error: --print-completion-script 'tcsh': there is none for this shell\n",
        ),
        ("$'st\\xff\\e[31m'", 64, "error: unknown command 'st\\udcff\\x1b[31m'\n"),
    ],
)
def test_what_the_program_answers_without_a_verb(shell: str, code: int, err: str) -> None:
    """Where the shell does more than to divide the line, the program starts from it."""
    environ = {"PATH": "/usr/bin:/bin"}
    if shell == "stat" or set(shell) & set("$>"):
        argv = ["bash", "-c", f"{CLUSTERTOOL} {shell}"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=environ)
    else:
        done = forked.complete([CLUSTERTOOL, *shlex.split(shell)], env=environ)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(err)
    assert code != 64 or done.stderr.endswith("\nclustertool: exit 64 (tool): wrong usage\n")


def test_an_error_of_the_command_line_is_a_json_answer_too() -> None:
    done = forked.complete([CLUSTERTOOL, "stat", "--json"])
    reason = "unknown command 'stat', did you mean 'status'?"
    assert json.loads(done.stdout) == {"exit": {"code": 64, "source": "tool", "reason": reason}}


# -- completion


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (("clustertool", "sta"), ["stacks", "status"]),
        (("clustertool", "--ver"), ["--version"]),
        (("clustertool", "run", "--nproc"), ["--nproc-per-node"]),
        (("clustertool", "run", "--mode", ""), ["collective", "ps", "ps-heter", "rpc", "mpi"]),
        (("clustertool", "run", "--mode", "ps-"), ["ps-heter"]),
        (("clustertool", "run", "--mode=c"), ["--mode=collective"]),
        (("clustertool", "run", "--mode", "=", "c"), ["collective"]),  # bash
        (("clustertool", "run", "--mode", "="), ["collective", "ps", "ps-heter", "rpc", "mpi"]),
        (("clustertool", "run", "--workspace", ""), []),
        (("clustertool", "run", "--detach", "--wo"), ["--workspace", "--worker-num", "--workers"]),
        (("clustertool", "help", "gp"), ["gpus"]),
        (("clustertool", "run", ""), []),
    ],
)
def test_completion(tokens: tuple[str, ...], expected: list[str]) -> None:
    found = completion.candidates(tokens, (*VERBS, program._HELP), COMMON, HELP)
    assert sorted(found) == sorted(expected)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of stored jobs; the current folder is another one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    folder = this_user.jobs_folder()
    folder.mkdir(parents=True)
    for age, (job, content) in enumerate(
        [
            ("20260102-030405-old2", '{"name": "mnist", "asked": "", "hosts": [{"name": "old"}]}'),
            ("20260103-030405-new2", '{"name": "mnist", "asked": "", "hosts": [{"name": "node7"}, {"name": "-x;y"}]}'),
            ("mine-2", '{"name": "", "asked": "mine"}'),
            ("torn", "{"),
            ("big", '{"name": "unread"}' + " " * 70_000),
        ]
    ):
        (folder / f"{job}.json").write_text(content)
        os.utime(folder / f"{job}.json", (1000 + age, 1000 + age))
    (folder / "no id!.json").write_text("{}")
    return folder


def completed(*tokens: str) -> list[str]:
    done = forked.complete([CLUSTERTOOL, "--complete", "--", "clustertool", *tokens])
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_bash_does_not_expand_candidates(tmp_path: Path) -> None:
    """A candidate may have the form of a pattern: `node[1-4]` is one, and the folder has files that it matches."""
    (tmp_path / "node1").touch()
    program = tmp_path / "clustertool"
    program.write_text("#!/bin/sh\nprintf '%s\\n' 'node[1-4]' '*' 'two words'\n")
    program.chmod(0o700)
    code = f"PATH=.:$PATH\n{completion.SCRIPTS['bash']}\nCOMP_WORDS=(clustertool x); COMP_CWORD=1; _clustertool\n"
    code += 'printf \'%s\\n\' "${#COMPREPLY[@]}" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines() == ["3", "node[1-4]", "*", "two words"]


@pytest.mark.usefixtures("state")
def test_completion_of_jobs() -> None:
    """The newest one is the first; then names."""
    ids = ["big", "torn", "mine-2", "20260103-030405-new2", "20260102-030405-old2"]
    assert completed("logs", "--job", "") == [*ids, "mine", "mnist"]
    assert completed("stop", "-j", "20260103") == ["20260103-030405-new2"]
    assert completed("status", "--job=mi") == ["--job=mine-2", "--job=mine"]
    assert completed("status", "--job", "=", "20260102") == ["20260102-030405-old2"], "as bash passes it"


def test_completion_of_hosts_does_not_run_conf_py(state: Path) -> None:
    Path("conf.py").write_text("import os\nos.mkdir('executed')\nHOSTS = ['ann@node[1-2]:22', {'host': 'gpu1'}]\n")
    assert completed("run", "--only", "") == ["node1", "node2", "gpu1"]
    assert completed("run", "--skip", "node1,g") == ["node1,gpu1"]
    assert completed("logs", "--host", "node2") == ["node2"]
    assert not Path("executed").exists()
    Path("conf.py").write_text("HOSTS = [f'node{i}' for i in range(2)]\n")
    newest = state / "20260103-030405-new2.json"
    os.utime(newest)
    assert completed("run", "--only", "") == ["node7"], "of the newest job"
    newest.unlink()
    for text in ("HOSTS = [", "HOSTS = ['a b']", "HOSTS = 5", "\0"):
        Path("conf.py").write_text(text)
        assert completed("run", "--only", "") == []


@pytest.mark.usefixtures("state")
@pytest.mark.parametrize("tokens", ["clustertool logs --job", "clusterrun --only"])
def test_completion_imports_nothing_slow(tokens: str) -> None:
    """A shell waits for it. The libraries for connections take half a second to import."""
    program_text = "import sys, clustertool.verbs.program as p; p.run(sys.argv[1:]); print(*sys.modules)"
    argv = [sys.executable, "-c", program_text, "--complete", "--", *tokens.split(), ""]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert not {"paramiko", "fabric", "invoke", "rich", "asyncio"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--run_mode p", ["ps", "ps-heter"]),
        ("--mode=r", ["--mode=rpc"]),
        ("--with-gloo ", ["0", "1"]),
        ("--under ", ["slurm", "mpi"]),
        ("--ips node1,", ["node1,node1", "node1,gpu1"]),
        ("-H g", ["gpu1"]),
        ("--only ", ["node1", "gpu1"]),
        ("--rdzv-b", ["--rdzv-backend"]),
        ("--standalone ", []),
        ("--nproc-per-node 2 train.py --mo", []),
        ("-m train --mode ", []),
    ],
)
def test_completion_of_clusterrun(state: Path, typed: str, expected: list[str]) -> None:
    Path("conf.py").write_text("HOSTS = ['node1', 'gpu1']\n")
    tokens = ["/opt/bin/clusterrun", *typed.split(" ")]
    done = forked.complete([CLUSTERTOOL, "--complete", "--", *tokens])
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stderr


def test_bash_completes_with_the_script() -> None:
    code = """
        PATH=$1:$PATH
        source <(clustertool --print-completion-script bash)
        complete -p clustertool
        COMP_WORDS=(clustertool run --mode "") COMP_CWORD=3
        _clustertool && echo "${COMPREPLY[*]}"
        COMP_WORDS=(clustertool "cluster." rest) COMP_CWORD=1
        _clustertool && echo "${COMPREPLY[*]}"
        complete -p clusterrun
        COMP_WORDS=(clusterrun --run-mode p) COMP_CWORD=2
        _clustertool && echo "${COMPREPLY[*]}"
    """
    argv = ["bash", "-c", code, "bash", str(Path(CLUSTERTOOL).parent)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    first, modes, verbs, second, ours = done.stdout.splitlines()
    assert "-F _clustertool clustertool" in first
    assert modes == "collective ps ps-heter rpc mpi"
    assert verbs == "cluster.up cluster.down"
    assert "-F _clustertool clusterrun" in second
    assert ours == "ps ps-heter"
    assert "compdef" in shown("--print-completion-script", "zsh")
    assert "complete --command clustertool" in shown("--print-completion-script", "fish")
