"""Which processes of a step Slurm signals depends on its plugin for that, which slurm.conf names."""

from __future__ import annotations

import pytest

from clustertool.model.rank_signals import proctrack


@pytest.mark.parametrize(
    ("text", "plugin"),
    [
        ("ClusterName=x\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n", "linuxproc"),
        ("  proctracktype = proctrack/cgroup # our nodes\n", "cgroup"),
        ("#ProctrackType=proctrack/linuxproc\n", ""),
        ("ProctrackType=proctrack/linuxproc\nProctrackType=proctrack/pgid", "pgid"),
        ("", ""),
    ],
)
def test_the_plugin_in_slurm_conf(text: str, plugin: str) -> None:
    assert proctrack(text) == plugin
