"""Unit tests of roles: which are ranks, which are launchers, and where the names of launchers are accepted."""

from __future__ import annotations

import pytest

from clustertool.errors import ConfigError
from clustertool.model import roles
from clustertool.model.config.hosts import read_hosts
from clustertool.model.paths import JobPaths
from clustertool.model.wire.spec_types import RankSurroundings
from clustertool.node.supervisor import rank_process
from clustertool.watch.straggler import RankPace, find_stragglers


def test_every_role_has_a_name_a_log_and_a_link_of_its_own() -> None:
    assert set(roles.ROLES) == {*roles.RANKS, *roles.LAUNCHERS}
    assert {role for mode in roles.MODES.values() for role in mode} == set(roles.RANKS)
    assert len({JobPaths.log(role, 0) for role in roles.ROLES}) == len(roles.ROLES)
    assert len({JobPaths.first_log(role) for role in roles.ROLES}) == len(roles.ROLES)
    assert JobPaths.log("mpirun", 0, 2) == "log/attempt2/mpirunlog.0"
    assert JobPaths.log("mpidaemon", 3) == "log/mpidaemonlog.3"
    assert roles.role_name("mpidaemon") == "MPI daemon"


def test_a_user_can_read_the_log_of_a_launcher_and_not_place_one() -> None:
    assert roles.find_role("mpirun") == "mpirun"
    assert roles.find_role("heter_trainer", roles.RANKS) == "heter"
    with pytest.raises(ConfigError, match="'mpirun' is no role"):
        read_hosts([{"host": "a", "roles": ["mpirun"]}])


def test_an_mpi_daemon_is_no_straggler() -> None:
    def pace(role: str, rank: int, cpu: float) -> RankPace:
        return RankPace(role, rank, 0.0, 100.0, cores=cpu)

    def slow(role: str) -> list[tuple[str, int]]:
        return list(find_stragglers([pace(role, rank, 1.0 if rank else 0.01) for rank in range(4)]))

    assert slow("trainer") and not slow("mpidaemon")


def test_the_environment_of_a_launcher_has_nothing_of_ranks_or_of_a_scheduler() -> None:
    own = {"PATH": "/bin", "HOME": "/root", "SLURM_JOB_ID": "7", "SLURM_NODELIST": "a,b", "PBS_NODEFILE": "/x"}
    spec: RankSurroundings = {
        "prelude": "",
        "first_path": "",
        "ld_library_path": "",
        "here": False,
        "common": {"WORLD_SIZE": "2"},
        "engine": "slurm",
    }
    rank = rank_process.environment(spec, {"argv": [], "env": {"RANK": "0"}}, 0, own)
    launcher = rank_process.environment(spec, {"argv": [], "env": {"A": "b"}, "apart": True}, 1, own)
    assert rank["SLURM_JOB_ID"] == "7" and rank["WORLD_SIZE"] == "2"
    assert launcher == {"PATH": "/bin", "HOME": "/root", "A": "b", "CLUSTERTOOL_ATTEMPT": "1"}
