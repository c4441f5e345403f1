"""This module reads command lines of other launchers, by the table of their options (launcher_flags.py). Pure.

    fleetrun --ips=a,b --gpus=0,1 train.py --batch_size 64      paddle.distributed.launch, new and legacy
    torchrun --nnodes=2 --nproc-per-node=gpu train.py --lr 0.1
    python paddle.py --job_dispatch_package=./job --config=./conf.py --use_gpu=0

Dashes and underscores are equal in a name; `--opt=value` and `--opt value` are equal; the last one counts, as in the
launchers. The first argument that is not an option is the script, and the following ones are passed to it unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from types import SimpleNamespace

from clustertool.cli import parser
from clustertool.cli.launchers import join_options
from clustertool.cli.launchers.launcher_flags import FLAGS, Flag, Launch, place_host
from clustertool.cli.launchers.rank_program import UNDER
from clustertool.cli.options import FLAG, MANY, Opt
from clustertool.cli.parser import did_you_mean, following, split
from clustertool.cli.shared_options import NODES, RUN, VERBOSE
from clustertool.errors import UsageError
from clustertool.model.joining.typed_meeting import TypedMeeting
from clustertool.model.planning import shell_variables

_IN_A_TASK = "in a task of srun or a process of mpirun: set the environment of its rank, and run the script"
_RANK = Opt("under", _IN_A_TASK, value="NAME", choices=tuple(UNDER))
_ABOUT = (_RANK, Opt("help", "show this and do nothing", False, short="h"), Opt("version", "show it", False))
# --log-dir is an option of the launchers here; paddle.py did not know it and passed it to the trainer.
OWN = (*(option for option in RUN if option.name != "log-dir"), VERBOSE, *NODES, *_ABOUT)
_HOST_LISTS = ("A,B", "A:2,B:2")  # what help calls the value of options that list hosts
_ENDPOINTS = ("servers", "workers", "trainers", "heter-workers")
_DEVICES = ("devices", "gpus", "xpus", "npus")
_ALONE = "--master without --nnodes is this machine alone; --nnodes N joins N machines"
_MEETING_PORT = 8090
# What names the nodes, or counts on all of them. A command that is typed on each node names their meeting instead.
_OF_ALL_NODES = (
    *("--ips", "-H", "-hostfile", "--hostfile", "-i", "-e", "--conf", "--only", "--skip", "-np"),
    *("--nnodes", "--num-nodes", "--np", "--master", "--rdzv-endpoint", "--master-addr", "--rank", "--node-rank"),
    *("--host", "--local-addr", "--skip-bad", "--wait", "--resume"),
)
# Options with one meaning; those that only count where the command is typed on each machine, or that name the nodes.
_PLACES = ("master", "rdzv-endpoint", "master-addr", "standalone", "ips", "servers", "trainers")
_SAME = (
    _PLACES,
    ("nnodes", "np", "num-nodes"),
    ("rank", "node-rank"),
    ("nproc-per-node", "num-gpus", "num-proc"),
    _DEVICES,
    ("max-restart", "max-restarts"),
    ("trainer-num", "worker-num"),
)
_OF_MEETING = (*_PLACES, "nnodes", "rank", "node-rank", "master-port", "rdzv-id", "rdzv-backend", "rdzv-conf")
_PS = ("workers", "trainers", "worker-num", "trainer-num", "http-port")


# -- reading ----------------------------------------------------------------------------------------------------------


def read(argv: Sequence[str], own: Sequence[Opt]) -> Launch:
    """Parse a command line of clusterrun, in the form of any launcher. own: options of `run` that are understood, too.

    With an option that only paddle.py has and without a script, it is one of paddle.py, whose other options go to the trainer.
    Raises UsageError for unknown options and wrong values, and for options that contradict each other.
    """
    known = _options_by_spelling(FLAGS, own)
    found = _Arguments(argv, known)
    packaged = [flag for flag, _ in found.given if isinstance(flag, Flag) and flag.of == "O"]
    if packaged and found.script is None:
        found = _Arguments(argv, _options_by_spelling([flag for flag in FLAGS if flag.of == "O"], own), old=True)
    elif found.rest:
        raise _unknown_option(found.rest[0], known)
    launch = Launch(arguments=tuple(found.rest or found.script or ()), old=bool(packaged and found.script is None))
    for flag, value in found.given:
        _store_option(launch, flag, value)
    _combine_options(launch)
    return launch


def options_of_shell(environ: Mapping[str, str], launch: Launch, own: Sequence[Opt]) -> dict[str, str]:
    """Map variables of the shell to the options that they stand for, with their values: {"PET_NNODES": "--nnodes=2"}.

    Left out: those for which the command line has an option with the same meaning, switches that are off, and, if the command
    line names nodes or has --nnodes 1, those about a meeting. Raises UsageError, which names the variable, for a wrong value.
    """
    nodes = names_nodes(launch, known=False) or launch.nodes == (1, 1)
    typed = {name.replace("_", "-") for name in launch.typed}
    taken: dict[str, str] = {}
    for variable, (name, value) in shell_variables.launch_options(environ).items():
        of = "T" if variable.startswith("PET_") else "P"
        flag = next((flag for flag in FLAGS if flag.name == f"--{name}" and of in flag.of), None)
        same = next((names for names in _SAME if name in names), (name,))
        off = flag is not None and not flag.value and value in ("0", "")
        if flag is None or off or typed & set(same) or (name in _OF_MEETING and nodes):
            continue
        option = f"--{name}={value}" if flag.value else f"--{name}"
        try:
            read([option, "train.py"], own)
        except UsageError as error:
            raise UsageError(f"{variable} of this shell: {error.what}", error.fix) from None
        taken[variable] = option
    return taken


def values_for_run(launch: Launch, own: Sequence[Opt]) -> SimpleNamespace:
    """Build the values of the options of `run` for a command line: those typed, else the defaults."""
    return SimpleNamespace(**{option.attribute: launch.options.get(option.name, option.default) for option in own})


def named_nodes(launch: Launch) -> tuple[str, ...]:
    """List the hosts of --servers, --workers, --trainers and --heter-workers in this order, without ports, each once.

    localhost becomes 127.0.0.1.
    """
    texts = [text for name in _ENDPOINTS for text in launch.options.get(name, ())]
    items = [item.strip() for text in texts for item in re.split("[,;]", text) if item.strip()]
    hosts = (re.sub(r":\d+$", "", item) if item.count(":") == 1 or "]" in item else item for item in items)
    return tuple(dict.fromkeys("127.0.0.1" if host == "localhost" else host for host in hosts))


def names_devices(launch: Launch) -> bool:
    """Check whether a command line names devices."""
    return any(launch.options.get(name) for name in _DEVICES)


def meeting(launch: Launch, known: bool) -> TypedMeeting | None:
    """Return where the machines meet, if the command is typed on each; None if it starts all nodes, or this one alone.

    known: a conf.py or a hostfile names the nodes. Raises UsageError for wrong options about the meeting, for -np with a
    meeting, and for a rank other than 0 without one.
    """
    master_port = str(launch.options.get("master-port", ""))
    named = names_nodes(launch, known)
    found = None if named else join_options.meeting(launch.join, launch.nodes, master_port)
    if found is None:
        join_options.refuse_rank(launch.join)
    elif launch.total:
        raise UsageError("-np counts the trainers of all nodes", "--nproc-per-node N for each machine")
    return found


def needs_no_conf(launch: Launch) -> bool:
    """Check whether the command line names the nodes, this machine alone, or a meeting, so that no conf.py has to."""
    return bool(launch.alone or launch.listed or named_nodes(launch) or launch.join.named)


def begins_meeting(launch: Launch, known: bool) -> bool:
    """Check for the first machine of a meeting: the command line has --nnodes N above 1, but no node, address, rank or -np.

    known: see meeting().
    """
    first = join_options.is_first_of_meeting(launch.join, launch.nodes)
    return first and not (launch.total or names_nodes(launch, known))


def notes(launch: Launch, known: bool, joins: bool) -> list[str]:
    """List a note for each typed option that is not needed, each once.

    joins: the command joins other machines, which needs the options about their meeting. Else, without --nnodes and named
    nodes, the note about --master says that this machine is alone. known: see meeting().
    """
    found = list(dict.fromkeys(launch.notes))
    if joins:
        return [note for note in found if note not in launch.join.notes]
    if launch.nodes is not None or names_nodes(launch, known):
        return found
    return [_ALONE if note.startswith("--master is ") else note for note in found]


def on_each_node(argv: Sequence[str], own: Sequence[Opt], address: str, nodes: int) -> list[str]:
    """Rewrite a command line that starts all nodes as the one to type on each of `nodes`: they meet at `address`, port 8090.

    Options that name nodes or count on all of them are left out.
    """
    found = _Arguments(argv, _options_by_spelling(FLAGS, own))
    kept = ["clusterrun", "--master", f"{address}:{_MEETING_PORT}", "--nnodes", str(nodes)]
    for flag, value in found.given:
        name = f"--{flag.name}" if isinstance(flag, Opt) else flag.names.split()[0]
        if name not in _OF_ALL_NODES:
            kept += [f"{name}={value}"] if value and name.startswith("--") else [name, value] if value else [name]
    return [*kept, *(found.script or ())]


def names_nodes(launch: Launch, known: bool) -> bool:
    """Check whether the options or, by `known`, conf.py name the nodes, so that this command starts all of them.

    True as well for --standalone, which is this machine alone, and for a command line of paddle.py.
    """
    return bool(launch.alone or launch.listed or launch.included or named_nodes(launch) or launch.old or known)


def spellings() -> dict[str, Opt]:
    """Map every spelling of clusterrun's options, with dashes, to an Opt, for completion."""
    known = _options_by_spelling(FLAGS, OWN)
    return {name: _as_option(one) if isinstance(one, Flag) else one for name, one in known.items()}


def _as_option(flag: Flag) -> Opt:
    """Convert an option of another launcher to an Opt."""
    value = "HOST,..." if flag.value in _HOST_LISTS else flag.value
    choices = tuple(flag.value.split("|")) if "|" in flag.value else ()
    return Opt(flag.name, flag.here, "" if flag.value else FLAG, value=value, choices=choices)


def _options_by_spelling(flags: Sequence[Flag], own: Sequence[Opt]) -> Mapping[str, Flag | Opt]:
    """Map every spelling of options, with dashes, to its option. A launcher's name has priority over one of `run`."""
    return {**parser.spellings(own), **{name: flag for flag in flags for name in flag.names.split()}}


class _Arguments:
    """The parsed command line: options with their values, then the script and its arguments.

    `rest`: from the first unknown option on; for paddle.py, the trainer's arguments.
    """

    def __init__(self, argv: Sequence[str], known: Mapping[str, Flag | Opt], old: bool = False) -> None:
        self.given: list[tuple[Flag | Opt, str]] = []
        self.script: list[str] | None = None
        self.rest: list[str] = []
        arguments = list(argv)
        while arguments:
            argument = arguments.pop(0)
            name, value = split(argument, known)
            flag = known.get(name)
            if flag is not None:
                self.given.append((flag, _take_value(flag, name, value, arguments, known)))
            elif self.rest or argument.startswith("-") and argument not in ("-", "--") or old:
                self.rest.append(argument)
            else:
                self.script = arguments if argument == "--" else [argument, *arguments]
                return


def _take_value(flag: Flag | Opt, name: str, value: str | None, rest: list[str], known: Container[str]) -> str:
    """Return the value of an option: `value`, else the next argument, which is removed from `rest`; "" for a switch.

    An option of `run` whose value may be left out has its `bare` value instead of the next argument. Raises UsageError for a
    switch with a value, and for an option without one.
    """
    if not (flag.value if isinstance(flag, Flag) else flag.default is not FLAG):
        if value is not None:
            raise UsageError(f"{name} takes no value", "leave the value out")
        return ""
    if value is None and isinstance(flag, Opt) and flag.bare:  # what follows may be the script
        return flag.bare
    return following(name, value, rest, known)


def _unknown_option(argument: str, known: Mapping[str, Flag | Opt]) -> UsageError:
    """Build the error for an option that is not known, with a suggestion."""
    name = split(argument, known)[0]
    what = f"{name} is no option of clusterrun{did_you_mean(name, known)}"
    return UsageError(what, "options of your script go after it; clusterrun --help lists ours")


def _store_option(launch: Launch, flag: Flag | Opt, value: str) -> None:
    """Record an option in `launch` as typed, and store its value there or apply its effect.

    Lists grow; of other options the last value counts. An empty value of a launcher's option has no effect.
    """
    bare = isinstance(flag, Opt) and value == flag.bare
    shown = "True" if bare or not value else value
    launch.typed[(flag.name if isinstance(flag, Opt) else flag.name[2:]).replace("-", "_")] = shown
    if isinstance(flag, Opt):
        if flag.default == MANY:
            launch.options[flag.name] = (*launch.options.get(flag.name, ()), value)
        else:
            launch.options[flag.name] = True if flag.default is FLAG else value
    elif flag.value and not value:  # --ips= and the like: argparse's way to say nothing
        return
    elif isinstance(flag.effect, str):
        launch.options[flag.effect or flag.name[2:]] = value
    else:
        flag.effect(launch, value)


def _combine_options(launch: Launch) -> None:
    """Apply and check, in `launch`, options whose meaning depends on others: --host, etcd, endpoints, numbers of trainers.

    Texts of endpoints become tuples, and options of pservers imply the mode ps. Raises UsageError for contradictions.
    """
    place_host(launch)
    etcd = join_options.etcd_urls(launch.join)
    if launch.elastic and etcd:
        launch.options.setdefault("elastic-server", etcd)
        launch.notes = [note for note in launch.notes if note not in launch.join.notes]
    for name in _ENDPOINTS:
        if isinstance(launch.options.get(name), str):
            launch.options[name] = (launch.options[name],) if launch.options[name] else ()
    if any(launch.options.get(name) for name in _PS):
        launch.implied = "ps"
    if launch.elastic and launch.total:
        what = "-np counts the trainers of all nodes, which an elastic job does not know"
        raise UsageError(what, "--nproc-per-node N")
    named_by = launch.listed_by or ("--hostfile" if launch.options.get("hostfile") else "")
    if launch.alone and named_by:
        raise UsageError(f"--standalone is this machine alone, {named_by} names nodes", "give one of them")
    if launch.options.get("nproc-per-node") and (launch.total or launch.by_slots):
        option = "-np" if launch.total else launch.listed_by
        raise UsageError(f"--nproc-per-node and {option} are both numbers of trainers", "give one of them")
