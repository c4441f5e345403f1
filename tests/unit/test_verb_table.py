"""The table of verbs is complete, and nothing slow is imported to read it."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from clustertool.verbs.table import CLUSTER_VERBS, VERBS, Verb


@pytest.mark.parametrize("verb", [*VERBS, *CLUSTER_VERBS], ids=lambda verb: verb.name)
def test_each_verb_is_a_function_whose_docstring_is_its_help(verb: Verb) -> None:
    module, name = verb.target.split(":")
    assert getattr(importlib.import_module(module), name).__doc__ == verb.help
    names = [option.name for option in verb.options]
    assert len(set(names)) == len(names)


def test_a_list_of_verbs_imports_neither_verbs_nor_what_they_need() -> None:
    """`inv --list` and the completion of a shell wait for these imports: connections and tables take 0.2 s."""
    code = "import sys; import clustertool.verbs.program; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    ours = {name for name in done.stdout.split() if name.startswith("clustertool.verbs.")}
    assert ours == {f"clustertool.verbs.{name}" for name in ("program", "signals", "table")}
    assert not {"paramiko", "fabric", "rich", "cryptography"} & set(done.stdout.split())
