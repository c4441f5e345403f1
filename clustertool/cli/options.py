"""This module has the types of the table of commands (cli/verb_table.py): a verb, its options, its positional arguments."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

FLAG = False  # the `default` of an option without a value
MANY = ()  # of one that may be given several times


@dataclass(frozen=True)
class Opt:
    """An option. `default` decides its kind: text, FLAG or MANY.

    value: what help calls the value (DIR, N, DURATION). choices: all values, if they are few. usual: the default as help
    shows it. group: its heading in help. alias: the option that this one is another name of. bare: its value where none is
    written; "": it needs one.
    """

    name: str
    help: str
    default: Any = ""
    short: str = ""
    value: str = ""
    choices: tuple[str, ...] = ()
    usual: str = ""
    group: str = "Options"
    alias: str = ""
    bare: str = ""

    @property
    def attribute(self) -> str:
        """The name of the option in Python: with underscores, as a parameter of a task and in `Call.given`."""
        return self.name.replace("-", "_")

    @property
    def type(self) -> str:
        """How help describes the value: its choices or its name, in brackets if it may be left out; "" for a flag."""
        text = "|".join(self.choices) or self.value
        return f"[{text}]" if self.bare else text

    @property
    def text(self) -> str:
        """The help of the option, with its default."""
        repeated = "; may be repeated" if self.default == MANY else ""
        return f"{self.help}{repeated}" + (f" (default: {self.usual})" if self.usual else "")


_OPTION = re.compile(
    r"(?:-(?P<short>\w) )?--(?P<name>[\w-]+)"
    r"(?: (?P<value>[^\s([]+)(?:\((?P<choices>\S+)\)(?:=(?P<default>\w+))?)?(?:\[(?P<bare>\S+)\])?(?P<many> \*)?)?"
    r"(?: @(?P<alias>\S+))?  (?P<help>.*?)(?: \(default: (?P<usual>.*)\))?"
)


def read_options(text: str) -> tuple[Opt, ...]:
    """Read a table of options, one a line. A line without a dash is the heading of a group; an indented line continues one.

    Output
    -r --rank RANK,...  show the log of these trainers: 3, or 3,4, or all (default: 0)
    --all-ranks  a flag: it has no value
    --on-failure ACTION(abort|continue)=abort  all values, if they are few, and the value where the option is not given
    --only HOST,... *  it may be given several times
    --trainers ENDPOINT,... * @workers  another name of --workers
    --resume JOB[NEWEST]  the value where none is written
    """
    group, found = Opt.group, list[Opt]()
    for line in re.sub(r"\n +", " ", textwrap.dedent(text).strip()).splitlines():
        if not line.startswith("-"):
            group = line
            continue
        match = _OPTION.fullmatch(line)
        assert match is not None, line
        given = match.groupdict("")
        choices, many, default = (given.pop(key) for key in ("choices", "many", "default"))
        kind = MANY if many else default if given["value"] else FLAG
        found.append(Opt(**given, default=kind, choices=tuple(filter(None, choices.split("|"))), group=group))
    return tuple(found)


@dataclass(frozen=True)
class Positional:
    """Arguments of a verb that are no options. A verb gets them as a tuple, `Call.given.<name>`.

    rest: the first of them ends the options of the verb; what follows belongs to it: `exec ls -l`.
    """

    name: str
    value: str  # what help calls them
    help: str
    rest: bool = False
    choices: tuple[str, ...] = ()


def _names_of_other_tools(name: str, also: str) -> dict[str, str]:
    """Parse the names that other tools have for a verb, "WORD" or "WORD=--option", to {word: what to type here}."""
    pairs = (item.partition("=") for item in also.split())
    return {other: f"{name} {option}".rstrip() for other, _, option in pairs}


class Verb:
    """A command: its name, help, options and arguments, and which function runs it.

    target: "module:function" in clustertool.verbs, a function that takes a Call; by default both have the verb's name.
    targets: the same for a command line with an option, by the option's attribute. The first that is given counts.
    purpose: its heading in the list of commands. also: what other tools call it, for suggestions; WORD=--option is the verb
    with an option. examples: without the program's name.
    """

    def __init__(
        self,
        name: str,
        help: str,
        *options: Opt,
        target: str = "",
        targets: Mapping[str, str] | None = None,
        purpose: str = "",
        also: str = "",
        examples: tuple[str, ...] = (),
        positional: Positional | None = None,
    ) -> None:
        self.name, self.help, self.options = name, help, options
        self._target, self._targets = target or f"{name}:{name}", targets or {}
        self.also = _names_of_other_tools(name, also)
        self.purpose, self.examples, self.positional = purpose, examples, positional

    def target(self, given: SimpleNamespace) -> str:
        """Return "clustertool.verbs.MODULE:FUNCTION", the function to call: that of the first given option in `targets`.

        If no such option is given: `target`.
        """
        own = (target for option, target in self._targets.items() if getattr(given, option))
        return f"clustertool.verbs.{next(own, self._target)}"
