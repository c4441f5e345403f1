"""The table of verbs is complete, its examples are right, and nothing slow is imported to read it."""

from __future__ import annotations

import importlib
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from clustertool.cli import parser
from clustertool.cli.options import FLAG, MANY, Opt, Verb, read_options
from clustertool.cli.verb_table import COMMON, EXAMPLES, HELP, VERBS
from clustertool.model.checks.framework_findings import FRAMEWORKS
from clustertool.model.config.cluster import CARRIERS


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_each_verb_is_a_function_with_unique_options(verb: Verb) -> None:
    module, name = verb.target(SimpleNamespace(job="", in_job=False)).split(":")
    assert callable(getattr(importlib.import_module(module), name))
    assert verb.help
    assert verb.purpose
    names = [option.name for option in verb.options]
    shorts = [option.short for option in verb.options if option.short]
    assert len(set(names)) == len(names)
    assert len(set(shorts)) == len(shorts)
    assert HELP.short not in shorts
    for option in verb.options:
        assert bool(option.type) == (option.default is not FLAG), f"--{option.name}: help names the type of a value"
        assert not option.alias or option.alias in names


def test_the_choices_of_options_are_those_that_verbs_accept() -> None:
    by_name = {option.name: option.choices for verb in VERBS for option in verb.options}
    assert by_name["dispatch"] == CARRIERS
    assert by_name["framework"] == FRAMEWORKS


def test_every_example_of_the_help_is_a_command_line() -> None:
    examples = [example for verb in VERBS for example in verb.examples] + [example for example, _ in EXAMPLES]
    for example in examples:
        assert parser.read(shlex.split(example), VERBS, COMMON, HELP).verb is not None, example
    for verb in VERBS:
        assert verb.examples
        assert all(shlex.split(example)[0] == verb.name for example in verb.examples)


def test_a_name_of_another_tool_belongs_to_one_verb_and_is_no_verb() -> None:
    others = [name for verb in VERBS for name in verb.also]
    assert len(set(others)) == len(others)
    assert not set(others) & {verb.name for verb in VERBS}


def test_a_line_of_a_table_becomes_an_option() -> None:
    """Between a name and its help stand two spaces; an indented line continues the one before."""
    table = """
        -r --role ROLE(a|b)=a  the role (of a rank) (default: a)
        Output
        --only HOST,... *  these
            hosts
        --hosts HOST,... * @only  the same
        --all  all of them
        --resume JOB[newest]  go on
    """
    assert read_options(table) == (
        Opt("role", "the role (of a rank)", "a", short="r", value="ROLE", choices=("a", "b"), usual="a"),
        Opt("only", "these hosts", MANY, value="HOST,...", group="Output"),
        Opt("hosts", "the same", MANY, value="HOST,...", group="Output", alias="only"),
        Opt("all", "all of them", FLAG, group="Output"),
        Opt("resume", "go on", value="JOB", bare="newest", group="Output"),
    )


def test_help_and_completion_import_neither_verbs_nor_what_they_need() -> None:
    """`clustertool --help` and the completion of a shell wait for these imports: Invoke takes 0.13 s, connections 0.5 s."""
    code = "import sys; import clustertool.verbs.program; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    ours = {name for name in done.stdout.split() if name.startswith("clustertool.verbs.")}
    assert ours == {f"clustertool.verbs.{name}" for name in ("program", "signals")}
    assert not {"invoke", "paramiko", "fabric", "rich", "cryptography"} & set(done.stdout.split())
