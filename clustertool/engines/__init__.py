"""Pure: an engine turns a plan into steps and reads answers back; what carries steps out is reach/."""

from __future__ import annotations

from clustertool.engines.base import Engine
from clustertool.engines.ssh import SshEngine

ENGINES: "dict[str, type[Engine]]" = {"ssh": SshEngine}
