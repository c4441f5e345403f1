"""The ssh engine turns a plan into requests: each node gets its part, as JSON, and no secret but in the launch."""

from __future__ import annotations

import json
from typing import Any

from cases import IDENTITY, cluster_of, facts_of, hosts, of_role, plan_of

from clustertool.model.planning.plan import Plan
from clustertool.model.planning.requests import Phase, start
from clustertool.model.wire.agent_requests import StopHow
from clustertool.model.wire.messages import STOP, stop_request

SECRETS = {"API_KEY": "s3cr3t-value", "OTHER": "0th3r-value"}
RELEASES = {0: "the-release", 1: "a-portion", 2: "the-release"}


def planned(**options: Any) -> Plan:
    cluster = cluster_of(hosts(3), SECRETS=list(SECRETS), PRELUDE="module load cuda", LD_LIBRARY_PATH="/lib64")
    options = {"mode": "ps", "worker_num": "2", "env": ("A=1",), **options}
    return plan_of(cluster, passed=list(SECRETS.items()), **options)


def phases(made: Plan) -> dict[str, Phase]:
    steps = start(made, RELEASES, SECRETS)
    return {phase.name: phase for phase in (*steps.phases, *steps.undo)}


def specs(made: Plan) -> list[Any]:
    """As they arrive: through JSON."""
    requests = phases(made)["place"].requests
    return [json.loads(json.dumps(requests[node].fields))["spec"] for node in sorted(requests)]


def test_a_job_is_placed_everywhere_then_launched_and_taken_back_in_that_order() -> None:
    steps = start(planned(), RELEASES, SECRETS)
    assert [phase.name for phase in steps.phases] == ["place", "launch"]
    assert [phase.name for phase in steps.undo] == ["unplace", "stop"]
    for phase in (*steps.phases, *steps.undo):
        assert sorted(phase.requests) == [0, 1, 2]
        json.dumps({node: request.header(1, 0.0) for node, request in phase.requests.items()})
    assert [request.kind.type for request in steps.phases[1].requests.values()] == ["start"] * 3
    assert {node: request.fields["release"] for node, request in steps.phases[0].requests.items()} == RELEASES
    assert {request.fields["release"] for request in start(planned(), {}, SECRETS).phases[0].requests.values()} == {""}


def test_a_failed_start_is_stopped_by_its_exact_id_and_without_mercy() -> None:
    request = phases(planned())["stop"].requests[1].fields
    assert (request["job"], request["exact"], request["force"], request["code"]) == (IDENTITY.job_id, True, True, 69)


def test_common_and_own_variables_together_are_the_plans() -> None:
    made = planned()
    for node, spec in zip(made.nodes, specs(made)):
        assert len(spec["processes"]) == len(node.processes)
        for process, sent in zip(node.processes, spec["processes"]):
            assert not set(spec["common"]) & set(sent["env"])
            masked = {name: "***" if name in SECRETS else value for name, value in process.env}
            assert {**spec["common"], **sent["env"]} == masked


def test_long_lists_travel_once() -> None:
    made = planned(worker_num="8")
    for spec in specs(made):
        assert "PADDLE_TRAINER_ENDPOINTS" in spec["common"]
        assert json.dumps(spec["processes"]).count("PADDLE_TRAINER_ENDPOINTS") == 0


def test_a_node_without_processes_has_a_spec_too() -> None:
    cluster = cluster_of([{"host": "a", "roles": ["trainer"]}, {"host": "b", "roles": ["pserver"]}])
    _, idle = specs(plan_of(cluster))
    assert (idle["processes"], idle["common"], idle["extra_ports"]) == ([], {}, [])


def test_secrets_travel_in_the_launch_only() -> None:
    made = planned()
    found = phases(made)
    for name, phase in found.items():
        text = json.dumps({node: request.header(1, 0.0) for node, request in phase.requests.items()})
        for value in (*SECRETS.values(), IDENTITY.certificate, IDENTITY.key):
            assert (value in text) == (name == "launch")
    assert all(request.fields["secrets"] == SECRETS for request in found["launch"].requests.values())


def test_the_receiver_of_notifications_is_sent_in_the_launch_only() -> None:
    found = phases(plan_of(cluster_of(hosts(3), NOTIFY="https://example.org/s3cr3t")))
    texts = {name: json.dumps([one.header(1, 0.0) for one in phase.requests.values()]) for name, phase in found.items()}
    assert [name for name, text in texts.items() if "s3cr3t" in text] == ["launch"]
    sent = [request.fields["notify"] for _, request in sorted(found["launch"].requests.items())]
    assert sent == [["https://example.org/s3cr3t"]] * 3, "the first one sends, and all mask it"


def test_a_secret_is_there_once_and_masked() -> None:
    for spec in specs(planned()):
        assert json.dumps([spec["common"], spec["processes"]]).count('"API_KEY": "***"') == 1


def test_only_the_coordinators_node_knows_the_shape() -> None:
    made = planned()
    first, *others = specs(made)
    assert first["shape"]["names"] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert sorted(first["shape"]["place"]) == sorted([p.role, p.rank, p.node] for p in made.processes)
    assert all("shape" not in spec for spec in others)
    coordinator = {"node": 0, "name": "10.0.0.1", "host": made.coordinator[0], "port": made.coordinator[1]}
    coordinator["endpoint"] = f"10.0.0.1:{made.coordinator[1]}"
    assert all(spec["lead"] == coordinator for spec in (first, *others))


def test_a_spec_says_what_its_node_must_do() -> None:
    made = planned()
    for node, spec in zip(made.nodes, specs(made)):
        assert (spec["job"], spec["node"], spec["name"]) == (IDENTITY.job_id, node.host.index, node.host.name)
        assert (spec["root"], spec["job_dir"], spec["work_dir"]) == (node.facts.root, node.job_dir, node.work_dir)
        assert spec["mark"] == dict(node.processes[0].env)["CLUSTERTOOL_MARK"]
        assert (spec["prelude"], spec["ld_library_path"], spec["output"]) == ("module load cuda", "/lib64", "output")
        assert spec["policy"] == vars(made.job.policy)
        assert spec["extra_ports"] == [port for at, port in made.extra_ports if at == node.host.index]
        for process, sent in zip(node.processes, spec["processes"]):
            assert sent["argv"] == list(process.argv)
            assert (sent["role"], sent["rank"], sent["local_rank"]) == (process.role, process.rank, process.local_rank)
            assert (sent["log"], sent["endpoint"], sent["ports"]) == (
                process.log,
                process.endpoint,
                list(process.ports),
            )
            assert sent["ready"] == list(process.ready)
            assert (sent["devices"], sent["shards"]) == (list(process.devices), list(process.shards))


def test_endpoints_are_in_rank_order_on_every_node() -> None:
    """log/endpoints.log says what PADDLE_TRAINER_ENDPOINTS says, also where explicit lists jump between nodes."""
    made = planned(workers=("10.0.0.3:9000,10.0.0.1:9000,10.0.0.2:9000,10.0.0.1:9001",), worker_num="")
    wanted = dict(of_role(made, "trainer")[0].env)["PADDLE_TRAINER_ENDPOINTS"].split(",")
    assert [spec["endpoints"] for spec in specs(made)] == [wanted] * 3


def test_the_header_is_enough_for_any_later_command() -> None:
    cluster = cluster_of(["ann@a:7", "b"])
    made = plan_of(cluster, facts=facts_of(cluster), script="train.py " + "x" * 300)
    for node, spec in zip(made.nodes, specs(made)):
        header = spec["header"]
        assert (header["id"], header["node"], header["name"]) == (IDENTITY.job_id, node.host.index, node.host.name)
        assert (header["owner"], header["created"], header["mode"]) == ("ann", IDENTITY.created, "collective")
        assert header["nodes"] == ["a", "b"]
        assert header["entry"] == ["ann@a:7", "@b:0"][node.host.index]
        assert header["command"].startswith("python3 -u train.py xxx")
        assert len(header["command"]) <= 200
        assert [(p["role"], p["rank"], p["log"]) for p in header["processes"]] == [
            ("trainer", node.host.index, f"log/workerlog.{node.host.index}")
        ]
        assert IDENTITY.token not in json.dumps(header)


def test_a_stop_names_its_job_exactly_or_all() -> None:
    how: StopHow = {"by": "ann", "code": 0, "grace": 1.0, "force": False}
    assert stop_request("", how) == STOP({"job": "", "exact": False, **how})
    assert stop_request("J", how).header(7, 5.0) == {
        "type": "stop",
        "id": 7,
        "now": 5.0,
        "job": "J",
        "exact": True,
        **how,
    }
