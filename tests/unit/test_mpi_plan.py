"""Unit tests of plans in mode mpi: mpirun's command line and hostfile, its daemons, the environments, and the findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from clustertool.errors import ClustertoolError, DataError, NotFound, PreflightError, UsageError
from clustertool.model.checks.mpi_findings import mpi_findings
from clustertool.model.facts import Facts
from clustertool.model.mpi import daemon_launch
from clustertool.model.mpi.launch_command import Implementation, read_implementation, refused_option
from clustertool.model.planning import requests
from clustertool.model.planning.plan import Plan, as_dict, given_facts, needs_probe
from clustertool.node.mpi.launched_ranks import LaunchedRanks
from tests.unit.cases import cluster_of, env_of, facts_of, hosts, job_of, of_role, one, plan_of

OPEN_MPI_4 = "mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/"
MPI = {"mpirun": OPEN_MPI_4, "mpi_daemons": ("orted",), "user": "ann", "cpus": 4}
OPEN_MPI_5 = {"mpirun": "mpirun (Open MPI) 5.0.11", "mpi_daemons": ("prted",), "user": "ann", "cpus": 4}
HYDRA = "HYDRA build details:\n    Version:                                 4.0.2"
MPICH = {"mpirun": HYDRA, "mpi_daemons": ("hydra_pmi_proxy",), "user": "root", "cpus": 1}
RANK = ("/bin/sh", "-c", 'exec /bin/sh "$CLUSTERTOOL_MPI_RANK"')


def mpi_plan(
    entries: Sequence[object] = tuple(hosts(3)),
    machines: Sequence[int] = (),
    facts: Mapping[str, Any] = MPI,
    **options: Any,
) -> Plan:
    cluster = cluster_of(entries)
    return plan_of(cluster, facts=facts_of(cluster, machines, **facts), **{"mode": "mpi", **options})


@pytest.mark.parametrize(
    ("text", "name", "version", "daemon"),
    [
        (OPEN_MPI_4, "Open MPI", "4.1.4", "orted"),
        ("mpirun (Open MPI) 4.1.6\n", "Open MPI", "4.1.6", "orted"),
        (
            "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/",
            "Open MPI",
            "5.0.11",
            "prted",
        ),
        ("mpirun (Open MPI) 5.1.0rc2\n", "Open MPI", "5.1.0rc2", "prted"),
        (
            "HYDRA build details:\n    Version:                                 4.0.2\n",
            "MPICH",
            "4.0.2",
            "hydra_pmi_proxy",
        ),
    ],
)
def test_version(text: str, name: str, version: str, daemon: str) -> None:
    found = read_implementation(text)
    assert found == Implementation(name, version) and found.supported and found.daemon == daemon


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307", "Intel MPI 2021.9"),
        ("mpirun (Open MPI) 3.1.3", "Open MPI 3.1.3"),
        ("HYDRA build details:\n    Version:    3.3a2\n", "MPICH 3.3a2"),
    ],
)
def test_versions_that_are_not_supported(text: str, shown: str) -> None:
    found = read_implementation(text)
    assert found is not None and found.text == shown and not found.supported


def test_no_version() -> None:
    assert read_implementation("") is None and read_implementation("bash: mpirun: command not found") is None


def daemons(*nodes: int) -> LaunchedRanks:
    """What the coordinator's node knows of a job with these daemons."""
    spec: Any = {"launcher": "mpirun", "shape": {"place": [("mpidaemon", node, node) for node in nodes]}}
    return LaunchedRanks(spec)


@pytest.mark.parametrize(
    ("node", "name"), [(0, "240.0.0.1"), (254, "240.0.0.255"), (255, "240.0.1.0"), (99_999, "240.1.134.160")]
)
def test_names_of_nodes(node: int, name: str) -> None:
    assert daemon_launch.host_name(node) == name and daemons(node).daemon_of(name) == ("mpidaemon", node)


@pytest.mark.parametrize(
    "name", ["", "node1", "240.0.0.0", "10.0.0.1", "240.0.0", "240.0.0.1.1", "240.0.0.01", "240.0.0.256", "²40.0.0.1"]
)
def test_other_names_are_no_nodes(name: str) -> None:
    with pytest.raises(NotFound, match="no node of this job"):
        daemons(*range(300)).daemon_of(name)


def test_command_line_of_open_mpi_4() -> None:
    made = mpi_plan(nproc_per_node="2")
    mpirun = one(made, "mpirun", 0)
    agent = ("--mca", "plm", "rsh", "--mca", "plm_rsh_agent", "/bin/sh .clustertool/mpi-agent")
    assert mpirun.node == 0 and mpirun.log == "log/mpirunlog.0" and not mpirun.ports
    assert mpirun.argv == (
        *("mpirun", "--hostfile", ".clustertool/mpi-hosts", "--map-by", "slot", "--bind-to", "none", *agent),
        *("--mca", "plm_rsh_no_tree_spawn", "1", "--leave-session-attached", "--wdir", "/", "-n", "6", *RANK),
    )
    assert made.hostfile == "240.0.0.1 slots=2\n240.0.0.2 slots=2\n240.0.0.3 slots=2\n"
    daemons = of_role(made, "mpidaemon")
    assert [(daemon.rank, daemon.node, daemon.argv, daemon.log) for daemon in daemons] == [
        (node, node, ("orted",), f"log/mpidaemonlog.{node}") for node in range(3)
    ]


def test_root_may_run_it() -> None:
    assert "--allow-run-as-root" in one(mpi_plan(facts={**MPI, "user": "root"}), "mpirun", 0).argv


def test_command_line_of_open_mpi_5() -> None:
    made = mpi_plan([*hosts(2), {"host": "127.0.0.3"}], facts=OPEN_MPI_5)
    agent = ("--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", "/bin/sh .clustertool/mpi-agent")
    assert one(made, "mpirun", 0).argv == (
        *("mpirun", "--hostfile", ".clustertool/mpi-hosts", "--map-by", "slot", "--bind-to", "none", *agent),
        *("--prtemca", "plm_ssh_no_tree_spawn", "1", "--leave-session-attached", "--wdir", "/", "-n", "3", *RANK),
    )
    daemon, local = env_of(made, "mpidaemon", 1), env_of(made, "mpidaemon", 2)
    assert daemon["PRTE_MCA_prte_if_include"] == daemon["OMPI_MCA_btl_tcp_if_include"] == "10.0.0.2/31"
    assert "PRTE_MCA_prte_if_include" not in local and local["OMPI_MCA_btl_tcp_if_include"] == "127.0.0.0/8"
    assert of_role(made, "mpidaemon")[0].argv == ("prted",)
    assert env_of(mpi_plan(machines=(0, 0, 0), facts=OPEN_MPI_5), "mpidaemon", 0)["OMPI_MCA_btl"] == "^sm"


def test_command_line_of_mpich() -> None:
    made = mpi_plan(facts=MPICH, nproc_per_node="2")
    rsh = ("-launcher", "rsh", "-launcher-exec", "/bin/sh", "-localhost", "10.0.0.1", "-genvnone", "-wdir", "/")
    assert one(made, "mpirun", 0).argv == ("mpirun", *rsh, "-f", ".clustertool/mpi-hosts", "-n", "6", *RANK)
    assert env_of(made, "mpirun", 0)["HYDRA_LAUNCHER_EXTRA_ARGS"] == ".clustertool/mpi-agent"
    assert made.hostfile == "240.0.0.1:2\n240.0.0.2:2\n240.0.0.3:2\n"
    daemon = of_role(made, "mpidaemon")[1]
    assert daemon.argv == ("hydra_pmi_proxy",) and not [name for name, _ in daemon.env if name.startswith("OMPI_")]
    rank = env_of(made, "trainer", 2)
    assert rank["MPIR_CVAR_CH3_INTERFACE_HOSTNAME"] == "10.0.0.2" and rank["FI_TCP_IFACE"] == "eth0"


def test_mpich_cannot_put_ranks_of_a_node_apart() -> None:
    with pytest.raises(UsageError, match="--workers"):
        mpi_plan(facts=MPICH, workers=("10.0.0.3,10.0.0.1,10.0.0.3",))


def test_options_of_the_user_replace_the_defaults() -> None:
    cluster = cluster_of(hosts(2))
    toml = {"mode": "mpi", "mpi": {"options": ["--bind-to", "core", "--map-by=slot:PE=2"]}}
    argv = one(plan_of(cluster, toml, facts_of(cluster, **MPI)), "mpirun", 0).argv
    assert argv[-len(RANK) - 3 :] == ("--bind-to", "core", "--map-by=slot:PE=2", *RANK)
    assert argv.count("--bind-to") == 1 and "--map-by" not in argv


def test_nodes_of_different_size_and_without_trainers() -> None:
    entries = [
        {"host": "10.0.0.1", "roles": {"pserver": 1}},
        {"host": "10.0.0.2", "roles": {"trainer": 3}},
        {"host": "10.0.0.3", "roles": {"trainer": 1}},
    ]
    made = mpi_plan(entries)
    assert made.hostfile == "240.0.0.2 slots=3\n240.0.0.3 slots=1\n"
    assert [daemon.node for daemon in of_role(made, "mpidaemon")] == [1, 2]
    assert one(made, "mpirun", 0).node == 0 and as_dict(made)["phases"] == ["pserver", "trainer"]


def test_ranks_in_any_order_have_a_line_each() -> None:
    made = mpi_plan(workers=("10.0.0.3,10.0.0.1,10.0.0.2,10.0.0.3",))
    assert made.hostfile == "240.0.0.3\n240.0.0.1\n240.0.0.2\n240.0.0.3\n"
    argv = one(made, "mpirun", 0).argv
    assert argv[argv.index("--map-by") + 1] == "seq" and argv[argv.index("-n") + 1] == "4"


def test_pservers_only_where_they_are_asked_for() -> None:
    cluster = cluster_of(hosts(2))
    facts = facts_of(cluster, **MPI)
    assert not of_role(plan_of(cluster, facts=facts, mode="mpi"), "pserver")
    assert as_dict(plan_of(cluster, facts=facts, mode="mpi"))["phases"] == ["trainer"]
    for wish in ({"server_num": "1"}, {"servers": ("10.0.0.1",)}):
        assert of_role(plan_of(cluster, facts=facts, mode="mpi", **wish), "pserver")
    assert of_role(plan_of(cluster, {"mode": "mpi", "pserver": {"per_node": 1}}, facts), "pserver")


def test_environment_of_ranks() -> None:
    """Those of a collective job, or of one with pservers, without the variables that mpirun sets itself."""
    made = mpi_plan(nproc_per_node="2")
    env = env_of(made, "trainer", 3)
    assert (env["RANK"], env["WORLD_SIZE"], env["PADDLE_TRAINER_ID"], env["OMP_NUM_THREADS"]) == ("3", "6", "3", "1")
    assert not [name for name in env if name.startswith("OMPI_")]
    assert env_of(mpi_plan(server_num="1"), "trainer", 1)["PADDLE_PSERVERS_IP_PORT_LIST"].count(":") == 3


def test_environment_of_launchers() -> None:
    cluster = cluster_of(hosts(2), ENV={"OMPI_MCA_btl_base_verbose": "1"})
    made = plan_of(cluster, facts=facts_of(cluster, **MPI), mode="mpi", nproc_per_node="4", env=("A=b",))
    mpirun, daemon = env_of(made, "mpirun", 0), env_of(made, "mpidaemon", 1)
    assert daemon["OMPI_MCA_oob_tcp_if_include"] == daemon["OMPI_MCA_btl_tcp_if_include"] == "10.0.0.2/31"
    assert [name for name in mpirun if name.startswith("OMPI_")] == ["OMPI_MCA_btl_base_verbose"], (
        "the same for all nodes"
    )
    assert mpirun["A"] == daemon["A"] == "b" and daemon["OMPI_MCA_btl_base_verbose"] == "1"
    assert mpirun["CLUSTERTOOL_MARK"].split("/")[1] == "0" and daemon["CLUSTERTOOL_MARK"].split("/")[1] == "1"
    assert "WORLD_SIZE" not in mpirun and "OMPI_MCA_btl" not in daemon and "OMPI_MCA_mpi_yield_when_idle" not in daemon


def test_nodes_on_one_machine_and_more_ranks_than_processors() -> None:
    made = mpi_plan(machines=(0, 0, 1), nproc_per_node="3")
    shared = [env_of(made, "mpidaemon", 0), env_of(made, "mpidaemon", 1)]
    assert all(env["OMPI_MCA_btl"] == "^vader" and env["OMPI_MCA_mpi_yield_when_idle"] == "1" for env in shared)
    alone = env_of(made, "mpidaemon", 2)
    assert "OMPI_MCA_btl" not in alone and "OMPI_MCA_mpi_yield_when_idle" not in alone


def test_specs() -> None:
    made = mpi_plan(nproc_per_node="2")
    specs = [request.fields["spec"] for request in requests.start(made, {}, {}).phases[0].requests.values()]
    assert [spec["launcher"] for spec in specs] == ["mpirun"] * 3  # type: ignore[index]
    assert [spec.get("hostfile") for spec in specs] == [made.hostfile, None, None]  # type: ignore[attr-defined]
    processes = specs[0]["processes"]  # type: ignore[index]
    assert [(one["role"], one.get("apart", False)) for one in processes] == [
        *[("trainer", False)] * 2,
        *[("mpirun", True), ("mpidaemon", True)],
    ]
    assert specs[0]["common"]["WORLD_SIZE"] == "6"  # type: ignore[index]
    assert processes[2]["env"]["CLUSTERTOOL_JOB"] == made.job_id, "nothing of common is added to it"
    assert len(specs[0]["endpoints"]) == 6, "of trainers only"  # type: ignore[index]


def test_other_modes_have_no_launcher() -> None:
    made = mpi_plan(mode="collective")
    spec = next(iter(requests.start(made, {}, {}).phases[0].requests.values())).fields["spec"]
    assert "launcher" not in spec and "hostfile" not in spec and not made.hostfile  # type: ignore[operator]
    assert {process.role for process in made.processes} == {"trainer"}


def test_a_plan_without_facts_names_no_options() -> None:
    cluster = cluster_of(
        [{"host": "10.0.0.1", "address": "10.0.0.1", "devices": [0, 1]}],
        ROOT_DIR="/jobs",
        LEAD_PORT=9000,
        START_PORT=9001,
        DEVICE_KIND="gpu",
    )
    made = plan_of(cluster, facts=given_facts(cluster), mode="mpi")
    assert one(made, "mpirun", 0).argv == ("mpirun", "-n", "2", *RANK)
    assert needs_probe(cluster, job_of(cluster, mode="mpi")) and not needs_probe(
        cluster, job_of(cluster, mode="collective")
    )


@pytest.mark.parametrize(
    ("text", "part"), [("", "there is no mpirun"), ("mpirun (Open MPI) 3.1.0", "mpirun is of Open MPI 3.1.0")]
)
def test_a_node_without_a_usable_mpirun(text: str, part: str) -> None:
    with pytest.raises(PreflightError, match=part) as caught:
        mpi_plan(facts={**MPI, "mpirun": text})
    assert caught.value.node == "10.0.0.1" and "PRELUDE" in caught.value.fix


@pytest.mark.parametrize(
    ("error", "wish", "part"),
    [
        (UsageError, {"heter_worker_num": "1"}, "--heter-worker-num is for heter trainers, the mode is mpi"),
        (UsageError, {"on_failure": "continue"}, "not possible in mode mpi"),
    ],
)
def test_what_does_not_fit(error: type[ClustertoolError], wish: dict[str, str], part: str) -> None:
    with pytest.raises(error, match=part):
        mpi_plan(**wish)


@pytest.mark.parametrize(
    "value",
    ["--bind-to core", [1], ["-n", "3"], ["--hostfile=x"], ["--mca", "plm", "ssh"], ["-launcher", "ssh"], [":"]],
)
def test_bad_options(value: object) -> None:
    with pytest.raises(DataError, match=r"\[mpi\] options"):
        job_of(cluster_of(hosts(1)), {"mode": "mpi", "mpi": {"options": value}})


def test_options_that_fit() -> None:
    assert not refused_option(
        ["--bind-to", "core", "--map-by", "ppr:2:node", "--mca", "btl", "^openib", "--report-bindings", "-v"]
    )


def test_address_of_mpirun_for_a_daemon() -> None:
    command = 'orted -mca orte_hnp_uri "165.0;tcp://10.9.0.1,172.17.0.1:50537" --mca plm_rsh_no_tree_spawn "1"'
    reduced = daemon_launch.correct_daemon_command(command, "10.9.0.1")
    assert reduced == 'orted -mca orte_hnp_uri "165.0;tcp://10.9.0.1:50537" --mca plm_rsh_no_tree_spawn "1"'
    of_prrte = 'prted --prtemca prte_hnp_uri "prterun-a@0.0;tcp://10.9.0.1,172.17.0.1:33057:24,16" --prtemca plm "ssh"'
    reduced = daemon_launch.correct_daemon_command(of_prrte, "172.17.0.1")
    assert reduced == 'prted --prtemca prte_hnp_uri "prterun-a@0.0;tcp://172.17.0.1:33057:16" --prtemca plm "ssh"'
    of_hydra = '"/opt/my mpich/bin/hydra_pmi_proxy" --control-port 10.9.0.1:3 --proxy-id 1'
    assert daemon_launch.correct_daemon_command(of_hydra, "10.9.0.1") == (
        "hydra_pmi_proxy --control-port 10.9.0.1:3 --proxy-id 1"
    )
    assert daemon_launch.correct_daemon_command(command, "10.0.0.7") == command, "an address that it does not listen on"


def levels(*nodes: Mapping[str, Any]) -> dict[int, tuple[str, str]]:
    facts = {number: replace(Facts(number), **{**MPI, **fields}) for number, fields in enumerate(nodes)}
    return {finding.node: (finding.level, finding.text) for finding in mpi_findings(facts)}


def test_findings() -> None:
    assert levels({}, {}) == {0: ("ok", "Open MPI 4.1.4"), 1: ("ok", "Open MPI 4.1.4")}
    other = {"mpirun": "mpirun (Open MPI) 4.1.6"}
    assert levels({}, other, {})[1] == ("error", "Open MPI 4.1.6, node 0 has Open MPI 4.1.4")
    assert [level for level, _ in levels(other, {}, {}).values()] == ["ok", "error", "error"]
    assert levels({}, {"mpi_daemons": ()})[1] == ("error", "Open MPI 4.1.4 without orted on PATH")
    assert levels({}, {"mpirun": ""})[1][0] == "error"
    assert levels({"mpirun": ""}, other, other)[1] == ("ok", "Open MPI 4.1.6")


@pytest.mark.parametrize(("facts", "warned"), [(MPICH, True), (OPEN_MPI_5, False)])
def test_mpich_on_nodes_with_ipv6_only_is_warned_of(facts: Mapping[str, Any], warned: bool) -> None:
    for entries, there in ((["[fe80::1]:22", "[fe80::2]:22"], warned), (hosts(2), False)):
        made = mpi_plan(entries, facts=facts, nproc_per_node="1")
        assert any("MPICH 4.0.2 needs IPv4" in warning for warning in made.warnings) is there
