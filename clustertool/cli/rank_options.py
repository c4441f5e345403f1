"""These options name one running rank, into which a command goes: exec --in-job."""

from __future__ import annotations

from clustertool.cli.options import FLAG, Opt
from clustertool.model.roles import ROLES

_GROUP = "Inside a rank"
IN_JOB = (
    Opt(
        "in-job",
        "inside one rank of a running job: its container, directory and environment; without a command, a shell",
        FLAG,
        group=_GROUP,
    ),
    Opt("rank", "in this rank", short="r", value="RANK", usual="the lowest that runs", group=_GROUP),
    Opt(
        "role",
        "the role that --rank counts in",
        "trainer",
        value="ROLE",
        choices=ROLES,
        usual="trainer",
        group=_GROUP,
    ),
    Opt("host", "in a rank on this host", value="HOST", group=_GROUP),
)
