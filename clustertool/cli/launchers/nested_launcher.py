"""Find a launcher in the trainers' command, or in the shell script that it runs, and write the command without it.

Each trainer would start the launcher, and so begin a training of its own:

clustertool run -w job --script "torchrun --nproc-per-node 2 train.py --lr 0.1"      # on 4 nodes: 4 trainings of 2 ranks
clustertool run -w job --nproc-per-node 2 --script "train.py --lr 0.1"               # 1 training of 8 ranks
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clustertool.cli.launchers import foreign_options
from clustertool.errors import UsageError
from clustertool.model.config.job import Options, started_by
from clustertool.model.planning.plan import Plan

# A launcher; where its number of processes is: in the options of clusterrun, which has them too (own), or in options that count
# on all nodes together (total) or on each one (each); and the modules that are the same program.
_LAUNCHERS = """
torchrun    own                      torch.distributed.run torch.distributed.launch
fleetrun    own                      paddle.distributed.launch paddle.distributed.fleet.launch
accelerate  total --num-processes    accelerate.commands.launch accelerate.commands.accelerate_cli
deepspeed   each --num-gpus          deepspeed.launcher.runner
mpirun      total -np -n -c --np
mpiexec     total -np -n -c --np
orterun     total -np -n -c --np
horovodrun  total -np -n -c --np
"""
_KNOWN = [(name, kind, rest) for name, kind, *rest in map(str.split, _LAUNCHERS.strip().splitlines())]
_FAMILIAR = tuple(name for name, kind, _ in _KNOWN if kind == "own")
_COUNTED = {
    name: ([one for one in rest if one[0] == "-"], kind == "total") for name, kind, rest in _KNOWN if kind != "own"
}
_MODULES = {module: name for name, _, rest in _KNOWN for module in rest if module[0] != "-"}
_PYTHON = re.compile(r"python[0-9.]*")
_AS_MODULE = ("python3", "-u", "-m")
_FRONT_END = "llamafactory-cli train"  # it starts torchrun on several devices, with NNODES and NODE_RANK
_SHELLS = ("sh", "bash", "dash", "ksh", "zsh")
_LONGEST = 1 << 16  # bytes of a script that are searched
_MOST = 16  # scripts that call each other
# The name of a launcher where a command of a shell begins, after variables of its own and the folder of the program.
_STARTS = re.compile(
    r"(?:^|[;&|({!]|\b(?:then|do|else|exec|time|nohup|env) |-[a-z]*c [\"']) *(?:[A-Za-z_]\w*=\S* )*(?:[\w./${}~-]{0,200}/)?"
    rf"(?P<shown>(?:{'|'.join([*_FAMILIAR, *(set(_COUNTED) - {'accelerate'})])})(?=\s|$)|(?:accelerate launch|{_FRONT_END})\b"
    rf"|(?:python[0-9.]*|\$\S{{1,80}}) (?:-\w+ )*-m (?:{'|'.join(map(re.escape, _MODULES))})(?=\s|$))",
    re.MULTILINE,
)
_CALLS = re.compile(r"(?:\b(?:bash|sh|source)|^\.) (?:-\w+ )*([\w./-]{1,200}\.sh)\b", re.MULTILINE)
_SEVERAL = re.compile(r"--(?:nnodes|num[-_](?:nodes|machines))[= ]+(\S+)")
_MEETS = re.compile(r"--(?:(?:node|machine)[-_]rank|rdzv[-_]endpoint|master([-_]addr)?|main[-_]process[-_]ip)\b")
_HOW = ("-m", "--module", "--no-python", "--run-path")  # switches of clusterrun about the program


@dataclass(frozen=True)
class Inner:
    """A launcher inside a command. `shown`: what the user knows it by. `program` is empty where it was not found."""

    shown: str
    options: tuple[tuple[str, str], ...]  # options of `run` with the same meaning; the value of a switch is ""
    program: tuple[str, ...]
    joins: bool = False  # its options make one training of all that are started


def nesting_warning(made: Plan, options: Options, typed: Sequence[str], folder: str = "") -> str:
    """Build the warning for a plan whose trainers each start a launcher, with the right command as the fix; "" if none does.

    typed: the user's command line. folder: the workspace on this machine, "" if it is not here.
    """
    inner = find_separating_launcher(made, folder)
    if inner is None:
        return ""
    return f"{effect_text(inner, made)} (--nested: intended)\n  fix: {_right_command(inner, made, options, typed)}"


def find_separating_launcher(made: Plan, folder: str = "") -> Inner | None:
    """Find the launcher that makes each trainer of a plan a training of its own, in the first trainer's command or its script.

    None if there is none, if there is one trainer, or if the launcher's options make one training of all. folder: see
    nesting_warning().
    """
    trainers = [process for process in made.processes if process.role == "trainer"]
    several = len(trainers) > len(made.nodes)
    inner = find(trainers[0].argv, len(made.nodes)) or _find_in_script(trainers[0].argv, folder, several)
    joins = inner is None or inner.joins or (inner.shown == _FRONT_END and not several)
    return None if joins or len(trainers) == 1 else inner


def effect_text(inner: Inner, made: Plan) -> str:
    """Describe how many separate trainings begin because each trainer starts the launcher."""
    number = sum(process.role == "trainer" for process in made.processes)
    return f"each of {number} trainers starts {inner.shown}: {number} separate trainings begin, not one"


def find(argv: Sequence[str], nodes: int) -> Inner | None:
    """Find the launcher that a command starts, also behind `env NAME=VALUE`; None if it starts another program.

    The pairs of `env` become options --env in front of the launcher's. nodes: a total number of processes is divided by it.
    """
    environ, rest = _split_environ(argv)
    inner = _find_launcher(rest, nodes) if rest else None
    return inner and replace(inner, options=(*(("--env", pair) for pair in environ), *inner.options))


def _find_launcher(rest: Sequence[str], nodes: int) -> Inner | None:
    """Find the launcher, its options and its program in a command, also as python -m MODULE; None for another program.

    accelerate counts only with `launch`. llamafactory-cli train is returned without options and program.
    """
    shown, arguments = os.path.basename(rest[0]), list(rest[1:])
    name = shown
    if _PYTHON.fullmatch(name) and "-m" in arguments:
        at = arguments.index("-m")
        module = arguments[at + 1] if at + 1 < len(arguments) else ""
        if not all(option.startswith("-") for option in arguments[:at]):  # -m of the script
            return None
        shown, name, arguments = f"{name} -m {module}", _MODULES.get(module, ""), arguments[at + 2 :]
    if name == "accelerate":
        if arguments[:1] == ["launch"]:
            shown, arguments = f"{shown} launch", arguments[1:]
        elif shown == name:  # accelerate config, accelerate test
            return None
    if f"{name} {' '.join(arguments[:1])}" == _FRONT_END:
        return Inner(_FRONT_END, (), ())
    if name in _FAMILIAR:
        return _parse_familiar(shown, arguments)
    return _parse_counted(shown, name, arguments, nodes) if name in _COUNTED else None


def _find_in_script(argv: Sequence[str], folder: str, several: bool) -> Inner | None:
    """Find the launcher that `sh -c TEXT`, a shell script of the workspace, or a script called by it starts; None without one.

    It has no options and no program. At most 16 scripts are read. folder: the workspace. several: nodes have several trainers;
    then no options of the launcher make one training of them.
    """
    texts = [_shell_text(_split_environ(argv)[1], folder)]
    for name, text in texts:
        text = re.sub(r"\\\n|[ \t]+", " ", re.sub(r"(?:^|\s)#.*", "", text))
        found = _STARTS.search(text)
        if found:
            joins = not several and (found["shown"] == _FRONT_END or _joins_nodes(text))
            return Inner(f"{found['shown']} in {name}", (), (), joins)
        called = (path for path in dict.fromkeys(_CALLS.findall(text)) if path not in dict(texts))
        texts += [(path, _read_script(folder, path)) for path in called][: _MOST - len(texts)]
    return None


def _joins_nodes(text: str) -> bool:
    """Check whether the text of a script has an option for a number of nodes above 1, and one for where they meet.

    The number may be in a variable that the script sets.
    """
    given = _SEVERAL.search(text)
    number = given[1].strip("\"'") if given else "1"
    own = re.search(rf"^\s*(?:export )?{re.escape(number.strip('${}'))}=[\"']?(\d+)\b", text, re.MULTILINE)
    return (own[1] if own else number) not in ("1", "1:1") and _MEETS.search(text) is not None


def _shell_text(argv: Sequence[str], folder: str) -> tuple[str, str]:
    """Return the name and the text of what the shell of a command runs: of -c, or of a script of the workspace.

    folder: the workspace. ("", "") if the command is no shell or shell script, or if its file is not here.
    """
    shell = bool(argv) and os.path.basename(argv[0]) in _SHELLS
    rest = list(argv[1:] if shell else argv)
    while shell and rest and rest[0][:1] in ("-", "+"):
        option = rest.pop(0)
        if option[1:2] != "-" and "c" in option:
            return f"{os.path.basename(argv[0])} -c", "".join(rest[:1])
        rest = rest[1:] if option[1:2] != "-" and option[-1] in "oO" else rest  # -eo pipefail
    text = _read_script(folder, rest[0]) if rest and (shell or "/" in rest[0]) else ""
    return (rest[0], text) if text and (shell or re.match(r"#!.*[/ ](?:ba|da|k|z)?sh\b", text)) else ("", "")


def _read_script(folder: str, path: str) -> str:
    """Read the first 64 KiB of a file of the workspace, "" if it is not here. path: relative to `folder`, the workspace."""
    with contextlib.suppress(OSError, ValueError):
        if Path(folder or ".", path).is_file():
            with Path(folder or ".", path).open("rb") as file:
                return file.read(_LONGEST).decode(errors="replace")
    return ""


def _split_environ(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `env NAME=value ... COMMAND` into the pairs and the command; another command has no pairs."""
    pairs, rest = [], list(argv)
    if rest and os.path.basename(rest[0]) == "env":
        rest.pop(0)
        while rest and re.match(r"[A-Za-z_][A-Za-z0-9_]*=", rest[0]):
            pairs.append(rest.pop(0))
    return pairs, rest


def _parse_familiar(shown: str, arguments: list[str]) -> Inner:
    """Parse the arguments of torchrun or fleetrun as clusterrun does; without options and program if they are wrong.

    shown: see Inner. `joins` is set if they name where several machines meet, or more than one node.
    """
    try:
        launch = foreign_options.read(arguments, ())
    except UsageError:
        return Inner(shown, (), ())
    meets = {"master", "rdzv_endpoint"} & launch.typed.keys() and launch.nodes and launch.nodes[1] > 1
    options = [(f"--{name}", each) for name, value in launch.options.items() for each in _option_values(value)]
    program = started_by(launch.how, launch.arguments)
    if program[:2] == ("python3", "-u") and launch.arguments[0].endswith(".py"):
        program = launch.arguments
    return Inner(shown, tuple(options), program, joins=bool(meets) or len(launch.listed) > 1)


def _option_values(value: object) -> tuple[str, ...]:
    """List the texts of an option's value, one for each time that the option is written; "" for a switch, () for none."""
    if isinstance(value, tuple):
        return value
    return ("",) if value is True else (value,) if isinstance(value, str) and value else ()


def _parse_counted(shown: str, name: str, arguments: list[str], nodes: int) -> Inner:
    """Parse the number of processes in the arguments of a launcher such as mpirun, and its program, into an Inner.

    The program begins with the first argument that is a Python script or interpreter; of several numbers before it the last one
    counts. A total is divided by `nodes`, and rounded up. shown: see Inner. name: the launcher's key in _COUNTED.
    """
    names, of_all = _COUNTED[name]
    starts = (
        at for at, text in enumerate(arguments) if text.endswith(".py") or _PYTHON.fullmatch(os.path.basename(text))
    )
    start = next(starts, len(arguments))
    number = 0
    for at, text in enumerate(arguments[:start]):
        option, equals, value = text.partition("=")
        if option.replace("_", "-") in names:
            value = value if equals else arguments[at + 1] if at + 1 < start else ""
            number = int(value) if value.isdecimal() else number
    each = -(-number // nodes) if of_all else number
    return Inner(shown, (("--nproc-per-node", str(each)),) if each else (), tuple(arguments[start:]))


def _right_command(inner: Inner, made: Plan, options: Options, typed: Sequence[str]) -> str:
    """Write the user's command line with the program in place of the launcher, or the command for job.toml.

    If the program is not known: a sentence on what to do.
    """
    if not inner.program:
        fix = f"start the program without {inner.shown}, with --nproc-per-node N"
        again = "or, if it passes NNODES, NODE_RANK, MASTER_ADDR and NPROC_PER_NODE on: --nested, one on each node"
        return fix if inner.shown in _FAMILIAR else f"{fix}; {again}"
    if options.host_counts:  # -np, or slots of -H: clusterrun refuses another number
        inner = replace(inner, options=tuple(option for option in inner.options if option[0] != "--nproc-per-node"))
    if options.script:
        return _command_line(typed, inner, ["--script", shlex.join(inner.program)])
    if options.command:  # clusterrun's, behind its options
        added = 3 if options.command[:3] == _AS_MODULE else 0  # by clusterrun, in front of what was typed
        outer = list(typed[: len(typed) - len(options.command) + added])
        outer = [text for text in outer if text.replace("_", "-") not in (*_HOW, "--")]
        return _command_line(outer, inner, inner.program)
    python = ["python3", "-u"] if inner.program[0].endswith(".py") else []
    number = dict(inner.options).get("--nproc-per-node", "")
    per_node = f", per_node = {number}" if number.isdecimal() else ""
    return f"in job.toml: [trainer] command = {json.dumps([*python, *inner.program])}{per_node}"


def _without_options(typed: Sequence[str], inner: Inner) -> list[str]:
    """Copy a command line without --script and its value, and without options (and values) that the launcher has, but --env.

    inner: the launcher that the command itself starts, as torchrun in `--script "torchrun ..."`.
    """
    takes_value = {"--script": True, **{name: bool(value) for name, value in inner.options if name != "--env"}}
    kept, rest = [], list(typed)
    while rest:
        text = rest.pop(0)
        name, equals, _ = text.partition("=")
        name = name.replace("_", "-")
        if name not in takes_value:
            kept.append(text)
        elif takes_value[name] and not equals and rest:
            rest.pop(0)
    return kept


def _command_line(outer: Sequence[str], inner: Inner, program: Sequence[str]) -> str:
    """Quote a command line for a shell: `outer` without the launcher's options, these options, and the program.

    Values of --env in `outer` become ***: they may be secret.
    """
    shown, before = [], ""
    for text in _without_options(outer, inner):
        option = "--env=" if text.startswith("--env=") else ""
        pair = text.removeprefix(option) if option or before == "--env" else ""
        shown.append(f"{option}{pair.partition('=')[0]}=***" if pair else text)
        before = text
    options = (text for option in inner.options for text in option if text)  # a switch has no value
    return shlex.join([*shown, *options, *program])
