"""The `clustertool` command has the same verbs without a tasks.py. What the parser refuses ends with 64.

It loads no file of Invoke: no tasks.py, which is searched upwards, and no configuration file, which can be a program.
"""

from __future__ import annotations

import sys

from clustertool.verbs import ns  # first: it installs the SIGINT handler

from invoke import Config, Program  # isort: skip
from invoke.exceptions import ParseError  # isort: skip

from clustertool import __version__


class _Config(Config):
    """Invoke's settings without /etc/invoke.* and ~/.invoke.*; a file that the user names with -f is read."""

    def load_base_conf_files(self) -> None:
        """Read nothing."""


class VerbProgram(Program):
    """Invoke's program with the exit code of the contract for wrong options."""

    def parse_tasks(self) -> None:
        try:
            super().parse_tasks()
        except ParseError as error:
            print(f"error: {error}\n  fix: {self.binary} --help VERB lists the options", file=sys.stderr)
            print(f"clustertool: exit 64 (tool): {error}", file=sys.stderr)
            sys.exit(64)


def main() -> None:
    VerbProgram(name="clustertool", binary="clustertool", namespace=ns, version=__version__, config_class=_Config).run()
