#!/usr/bin/env python3
"""This script writes the man pages from the table of commands, of which help is made, and from that of the launchers' options.

usage: make-man.py FOLDER

FOLDER/man1 gets clustertool.1, a page for each command (clustertool-run.1) and clusterrun.1. They are read with
`man -M FOLDER clustertool-run`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Iterable, Iterator, Sequence, Tuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from clustertool import __version__
from clustertool.cli.launchers.foreign_options import OWN
from clustertool.cli.launchers.launcher_flags import FLAGS, LAUNCHERS
from clustertool.cli.options import Opt, Verb
from clustertool.cli.verb_table import ABOUT, COMMON, EXAMPLES, HELP, VERBS
from clustertool.verbs import clusterrun

Row = Tuple[str, str]  # a term and its text


def plain(text: str) -> str:
    """Convert a text to roff, in one line."""
    text = re.sub(r"\s+", " ", text).strip().replace("\\", "\\(rs").replace("-", "\\-")
    text = "".join(char if char.isascii() else f"\\[u{ord(char):04X}]" for char in text)
    return "\\&" + text if text.startswith((".", "'")) else text


def section(title: str, rows: Iterable[Row]) -> Iterator[str]:
    yield f'.SH "{plain(title.upper())}"'
    for term, text in rows:
        yield f".TP\n\\fB{plain(term)}\\fR\n{plain(text)}"


def listed(options: Sequence[Opt]) -> Iterator[str]:
    """Options in the groups that help has."""
    for group in dict.fromkeys(option.group for option in options):
        rows = [(spelled(option), option.text) for option in options if option.group == group]
        yield from section(group, rows)


def spelled(option: Opt) -> str:
    return (f"-{option.short}, " if option.short else "") + f"--{option.name} {option.type}".rstrip()


def page(name: str, about: str, usage: str, *parts: Iterable[str]) -> str:
    """Make a page; `parts` are its sections after the first two."""
    head = f'.TH "{name.upper()}" 1 "" "clustertool {__version__}" "User Commands"'
    lines = [head, f".SH NAME\n{plain(name)} \\- {plain(about)}", f".SH SYNOPSIS\n\\fB{plain(usage)}\\fR"]
    return "\n".join([*lines, *(line for part in parts for line in part)]) + "\n"


def examples(commands: Iterable[str]) -> Iterator[str]:
    lines = [plain(f"clustertool {command}") for command in commands]
    if lines:
        yield ".SH EXAMPLES\n.nf\n" + "\n".join(lines) + "\n.fi"


def of_verb(verb: Verb) -> str:
    after = f" {verb.positional.value}" if verb.positional else ""
    usage = f"clustertool {verb.name}{' [options]' * bool(verb.options)}{after}"
    arguments = section("Arguments", [(verb.positional.value, verb.positional.help)]) if verb.positional else ()
    described = [".SH DESCRIPTION", plain(verb.help)]
    first = verb.help.partition(";")[0].rstrip(".")
    return page(
        f"clustertool-{verb.name}",
        first,
        usage,
        described,
        arguments,
        listed((*verb.options, HELP)),
        examples(verb.examples),
    )


def of_program() -> str:
    purposes = dict.fromkeys(verb.purpose for verb in VERBS)
    commands = (
        line
        for purpose in purposes
        for line in section(purpose, [(verb.name, verb.help) for verb in VERBS if verb.purpose == purpose])
    )
    also = [".SH SEE ALSO", ", ".join(f"\\fB{plain(name)}\\fR(1)" for name in pages_of_commands())]
    about = ABOUT.partition(". ")[0]
    described = [".SH DESCRIPTION", plain(ABOUT)]
    shown = examples(command for command, _ in EXAMPLES)
    return page("clustertool", about, "clustertool COMMAND [options]", described, commands, listed(COMMON), shown, also)


def of_clusterrun() -> str:
    def flags() -> Iterator[str]:
        for key, name in LAUNCHERS.items():
            of_launcher = [flag for flag in FLAGS if key in flag.of]
            rows = [(f"{', '.join(flag.names.split())} {flag.value}".rstrip(), flag.here) for flag in of_launcher]
            yield from section(f"Options of {name}", rows)

    taken = {name for flag in FLAGS for name in flag.names.split()}
    own = [(spelled(option), option.text) for option in OWN if f"--{option.name}" not in taken]
    about, _, rest = str(clusterrun.__doc__).partition("\n\n")
    described = [".SH DESCRIPTION", plain(about), ".PP", plain(rest)]
    first = "run with the command lines of fleetrun, torchrun and paddle.py"
    return page("clusterrun", first, clusterrun.USAGE, described, flags(), section("Options of clustertool run", own))


def pages_of_commands() -> Sequence[str]:
    return [*(f"clustertool-{verb.name}" for verb in VERBS), "clusterrun"]


def main() -> int:
    folder = Path(sys.argv[1]) / "man1"
    folder.mkdir(parents=True, exist_ok=True)
    texts = [of_program(), *map(of_verb, VERBS), of_clusterrun()]
    for name, text in zip(["clustertool", *pages_of_commands()], texts):
        (folder / f"{name}.1").write_text(text)
    print(f"{folder}: {len(texts)} man pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
