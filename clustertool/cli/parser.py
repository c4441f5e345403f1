"""This module reads the command line of `clustertool`: arguments and the table of commands in, values or a UsageError out.

The rules are those of getopt_long: `--name value`, `--name=value`, `-nvalue`, `-fn 5`; `--` ends the options. Underscores in
a name are dashes. The last value counts, except for options that may be repeated. Names are not abbreviated. An argument is the
value of an option that needs none if it is neither an option nor a script. The verbs check the values, because Invoke has
another parser.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clustertool.cli.options import FLAG, MANY, Opt, Verb
from clustertool.errors import UsageError
from clustertool.model.paths import is_job_id

_LIST = "clustertool --help lists the commands"
_MOST_SUGGESTIONS = 2


@dataclass
class CommandLine:
    """A parsed command line: the verb, None if there is none, and the values of options by attribute.

    common: of the options before the verb, and its help option. given: of the verb's other options and positional arguments.
    """

    common: dict[str, Any]
    verb: Verb | None = None
    given: dict[str, Any] = field(default_factory=dict)


def read(argv: Sequence[str], verbs: Sequence[Verb], common: Sequence[Opt], help_option: Opt) -> CommandLine:
    """Parse the command line of the program: options before the verb, the verb, its options and arguments.

    help_option: one of `common`, which each verb has, too. Raises UsageError for an unknown verb, and as _read_verb() does.
    """
    rest = list(argv)
    line = CommandLine(_defaults(common))
    while rest and line.verb is None:
        if rest[0].startswith("-"):
            _read_option(rest, spellings(common), line.common, "", _fix_for_early_option(rest[0], verbs))
        else:
            line.verb = find(rest.pop(0), verbs, common)
    if line.verb is not None:
        _read_verb(line, line.verb, rest, help_option)
    return line


def find(name: str, verbs: Sequence[Verb], options: Sequence[Opt] = ()) -> Verb:
    """Return the verb with this name.

    Raises UsageError for another name, with what is probably meant, if it is similar or another tool's name for a verb, or one
    of `options`, those of the program.
    """
    for verb in verbs:
        if verb.name == name:
            return verb
    for verb in verbs:
        if name in verb.also:
            raise UsageError(f"unknown command {name!r}, did you mean {verb.also[name]!r}?", _LIST)
    if any(option.name == name for option in options):  # other programs have `version` as a command
        raise UsageError(f"unknown command {name!r}, did you mean '--{name}'?", _LIST)
    raise UsageError(f"unknown command {name!r}{did_you_mean(name, [verb.name for verb in verbs])}", _LIST)


def spellings(options: Iterable[Opt]) -> dict[str, Opt]:
    """Map every spelling of options, --name and -n, to its option."""
    found = {f"--{option.name}": option for option in options}
    return {**found, **{f"-{option.short}": option for option in found.values() if option.short}}


def split(argument: str, known: Container[str]) -> tuple[str, str | None]:
    """Split an argument into option and value: --a_b=c into --a-b and c; -r3 and -r=3 into -r and 3.

    Without a value it is None, and only underscores of the option become dashes. known: the spellings of options. A longer one
    (-hostfile, -np) has priority over one of one letter.
    """
    name, equals, value = argument.partition("=")
    if argument.startswith("--") or name in known:
        return name.replace("_", "-"), value if equals else None
    short = next((argument[:end] for end in (3, 2) if argument[:end] in known), argument)
    return short, argument[len(short) :].removeprefix("=") if len(short) < len(argument) else None


def following(name: str, value: str | None, rest: list[str], known: Container[str], example: str = "...") -> str:
    """Return the value of an option: `value` if its own argument has one, else the next argument, which is removed from `rest`.

    Raises UsageError if an option follows, or nothing.
    """
    if value is not None:
        return value
    if not rest or rest[0].startswith("--") or rest[0] in known:
        raise UsageError(f"{name} needs a value", f"{name}{'=' if name.startswith('--') else ' '}{example}")
    return rest.pop(0)


def _read_verb(line: CommandLine, verb: Verb, rest: list[str], help_option: Opt) -> None:
    """Parse the arguments behind the verb, and store the values in `line`.

    The help option is set in `line.common`, where it may be set already. Raises UsageError for an unknown option, a value that
    is missing or not allowed, and an argument of a verb that takes none.
    """
    options = (*verb.options, help_option)
    known = spellings(options)
    fix = f"clustertool help {verb.name} lists the options"
    line.given, arguments = _defaults(options), []
    while rest:
        if rest[0] == "--":
            arguments += rest[1:]
            break
        if rest[0].startswith("-") and rest[0] != "-":
            _read_option(rest, known, line.given, f" of {verb.name}", fix)
        elif verb.positional and verb.positional.rest:
            arguments += rest
            break
        else:
            arguments.append(rest.pop(0))
    line.common[help_option.attribute] |= line.given.pop(help_option.attribute)
    if verb.positional:
        line.given[verb.positional.name] = tuple(arguments)
    elif arguments:
        raise UsageError(f"{verb.name} takes no argument {arguments[0]!r}", _fix_for_argument(verb, arguments[0]))


def _defaults(options: Iterable[Opt]) -> dict[str, Any]:
    """Return {attribute: default} of options."""
    return {option.attribute: option.default for option in options}


def _read_option(rest: list[str], known: Mapping[str, Opt], values: dict[str, Any], where: str, fix: str) -> None:
    """Remove one option and its value from the front of `rest`, and store the value in `values`, or add it for MANY.

    Of joined letters such as -fn only the first is removed. An option that needs no value takes the next argument only if that
    has no dash in front and no .py at its end. Raises UsageError for an unknown option, with `fix`, and for a value that is
    missing or not allowed. where: " of VERB", for a message.
    """
    argument = rest.pop(0)
    name, value = split(argument, known)
    option = known.get(name)
    if option is None:
        hosts = [spelling for spelling in ("--only", "--hostfile") if name == "--hosts" and spelling in known]
        meant = f", did you mean {' or '.join(map(repr, hosts))}?" if hosts else did_you_mean(name, known)
        raise UsageError(f"unknown option {name!r}{where}{meant}", fix)
    if option.default is FLAG:
        if value is not None and name.startswith("--"):
            raise UsageError(f"{name} takes no value", f"leave {'=' + value!r} out")
        if value is not None:  # -fn 5 is -f -n 5
            rest.insert(0, f"-{value}")
        values[option.attribute] = True
        return
    if value is None and option.bare and (not rest or rest[0].startswith("-") or rest[0].endswith(".py")):
        value = option.bare
    value = following(name, value, rest, known, option.type)
    values[option.attribute] = (*values[option.attribute], value) if option.default == MANY else value


def _fix_for_argument(verb: Verb, argument: str) -> str:
    """Build the fix for an argument of a verb that takes none: give it as the value of the verb's first option.

    Other programs take the id of a job, or a file, without an option. If that option cannot take it, the fix only names the
    help.
    """
    shows = f"clustertool help {verb.name} shows its use"
    first = verb.options[0]
    if first.default is FLAG or first.group != Opt.group or (first.value == "JOB" and not is_job_id(argument)):
        return shows
    return f"clustertool {verb.name} --{first.name} {shlex.quote(argument)}; {shows}"


def _fix_for_early_option(argument: str, verbs: Sequence[Verb]) -> str:
    """Build the fix for an unknown option before the verb: write it behind the first verb that has it, else list the verbs."""
    for verb in verbs:
        known = spellings(verb.options)
        name = split(argument, known)[0]
        if name in known:
            return f"options follow their command: clustertool {verb.name} {name}"
    return _LIST


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Build the end of a sentence with similar names: ", did you mean 'status' or 'stop'?"; "" without any.

    They are the one or two of `known` that begin with `name`; else the one that differs from it in the fewest letters, if these
    are few.
    """
    names = list(known) if name.strip("-") else []
    found = [each for each in names if each.startswith(name)]
    if not 0 < len(found) <= _MOST_SUGGESTIONS:
        found = difflib.get_close_matches(name, found or names, 1)
    return f", did you mean {' or '.join(map(repr, found))}?" if found else ""
