"""What a trial of a framework means: who failed, who hangs, who only waited for them, and what to do about it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from cases import cluster_of, facts_of, hosts

from clustertool.model.checks.framework_findings import (
    LAST_LINE_WAIT,
    SOON,
    STEPS,
    TrialRank,
    advance,
    describe_waiting,
    judge,
    meeting_broke,
    own_ports,
    patience,
)
from clustertool.model.config.folded_names import fold
from clustertool.model.finding import Finding
from clustertool.model.hints import PROGRAM

MARK = "clustertool-1234:"
FACTS = facts_of(cluster_of(hosts(3)))
SICK = {"failed": "RuntimeError: no"}


def names(nodes: Sequence[int]) -> str:
    return fold(f"n{node}" for node in nodes)


def at(node: int, step: str, **more: str) -> TrialRank:
    return TrialRank(node, node, step, **{"version": "2.13", "backend": "gloo", "nic": "eth0", **more})


def found(*ranks: TrialRank, name: str = "torch") -> dict[int, Finding]:
    return {finding.node: finding for finding in judge(name, ranks, FACTS, 60.0, names)}


def test_what_to_install_for_paddle():
    """PyPI's paddle is another project. A conf.py with PRELUDE alone does not change the embedded cluster."""
    rank = at(0, "import", failed="ModuleNotFoundError: No module named 'paddle'", missing="paddle")
    [one] = judge("paddle", [rank], {0: FACTS[0]}, 60.0, names)
    assert one.fix.startswith(
        "install paddlepaddle (with GPUs paddlepaddle-gpu) there, or let PRELUDE in conf.py activate"
    )
    [one] = judge("paddle", [rank], {0: FACTS[0]}, 60.0, names, "/opt/tool/bin")
    assert "install paddlepaddle " in one.fix and "in /opt/tool/bin: the embedded cluster" in one.fix
    assert "PRELUDE" not in one.fix


def levels(*ranks: TrialRank) -> list[str]:
    return [finding.level for _, finding in sorted(found(*ranks).items())]


def test_a_rank_is_where_its_last_line_says():
    rank = TrialRank(0, 0)
    lines = [
        MARK + json.dumps({"at": "import"}),
        "some warning",
        "",
        MARK + json.dumps({"at": "device", "version": "2.13"}),
        MARK + json.dumps({"at": "device", "what": "cuda:1"}),
        MARK + json.dumps({"at": "", "failed": "RuntimeError: no"}),
    ]
    for line in lines:
        rank = advance(rank, line, MARK)
    assert rank == TrialRank(0, 0, "device", "2.13", "cuda:1", failed="RuntimeError: no", last_line="some warning")


@pytest.mark.parametrize(
    "line", [MARK, MARK + "{", MARK + "7", MARK + '{"at": "nowhere", "rank": 7}', MARK + '{"at": ["x"]}']
)
def test_what_the_environment_prints_with_our_mark_changes_nothing(line):
    assert advance(at(0, "import"), line, MARK) == at(0, "import")


def test_all_is_well():
    assert found(*(at(node, "done") for node in range(3)))[1] == Finding(1, "framework", "ok", "torch 2.13 on gloo")


@pytest.mark.parametrize(
    ("rank", "text", "fix"),
    [
        (
            at(0, "start", ended="ended with exit code 126", last_line="conda?"),
            "python3: ended with exit code 126: conda?",
            "PRELUDE",
        ),
        (at(0, "start"), "python3: not done in 60 s", "--timeout"),
        (
            at(0, "import", failed="ModuleNotFoundError: No module named 'torch'", missing="torch"),
            "no torch for the job's python3",
            "install torch",
        ),
        (
            at(0, "import", failed="ModuleNotFoundError: No module named 'numpy'", missing="numpy"),
            "import torch: ModuleNotFoundError: No module named 'numpy'",
            "python3 -c",
        ),
        (
            at(0, "import", ended="ended with signal 4 (illegal instruction)"),
            "import torch: ended with signal 4 (illegal instruction)",
            "python3 -c",
        ),
        (at(0, "import"), "import torch: not done in 60 s", "slow file system"),
        (at(0, "device", what="cuda:3", **SICK), "cuda:3: RuntimeError: no", f"{PROGRAM} gpus"),
        (at(0, "device", what="cuda:3"), "cuda:3: not done in 60 s", f"{PROGRAM} gpus"),
    ],
)
def test_what_one_lacks_alone_is_its_own_and_the_others_waited(rank, text, fix):
    last_line = found(rank, at(1, "meet"), at(2, "meet"))
    assert (last_line[0].level, last_line[0].text) == ("error", text)
    assert fix in last_line[0].fix
    for node in (1, 2):
        assert last_line[node] == Finding(node, "framework", "skip", "torch 2.13 waited for n0")


@pytest.mark.parametrize(
    ("name", "step", "text"),
    [
        ("torch", "meet", "init_process_group hangs, not done in 60 s"),
        ("paddle", "meet", "init_parallel_env hangs, not done in 60 s"),
        ("torch", "reduce", "all_reduce hangs, not done in 60 s"),
    ],
)
def test_where_all_hang_it_is_between_them(name, step, text):
    for finding in found(*(at(node, step) for node in range(3)), name=name).values():
        assert (finding.level, finding.text) == ("error", text)
        assert "gloo takes ports of its own choice on eth0" in finding.fix
        assert "from 32768 to 60999" in finding.fix
    cards = found(*(at(node, step, backend="nccl") for node in range(3)), name=name)
    assert "NCCL_DEBUG" in cards[0].fix


@pytest.mark.parametrize(
    ("backend", "nic", "reported"),
    [
        ("gloo", "lo", True),
        ("nccl", "ib0,ib1", True),
        ("nccl", "^eth", True),
        ("nccl", "=eth0", False),
        ("nccl", "eth", False),
        ("nccl", "^docker,lo", False),
        ("gloo", "", False),
    ],
)
def test_another_interface_than_that_of_the_address(backend, nic, reported):
    """Facts say eth0."""
    fix = found(*(at(node, "meet", backend=backend, nic=nic) for node in range(3)))[1].fix
    assert ("and the training address 10.0.0.2 is on eth0: take it out" in fix) == reported
    assert ("of its own choice" in fix) == (not reported)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((at(0, "reduce"), at(1, "meet"), at(2, "reduce")), ["skip", "error", "skip"]),
        ((at(0, "meet"), at(1, "meet", **SICK), at(2, "meet")), ["skip", "error", "skip"]),
        ((at(0, "done"), at(1, "reduce"), at(2, "done")), ["ok", "error", "ok"]),
        ((at(0, "meet"), at(1, "reduce", **SICK), at(2, "reduce")), ["error", "error", "skip"]),
        ((at(0, "import", **SICK), at(1, "import"), at(2, "device", **SICK)), ["error", "error", "error"]),
        ((at(0, "done", ended="ended with exit code 1"), at(1, "done"), at(2, "done")), ["ok", "ok", "ok"]),
    ],
)
def test_a_rank_that_waits_for_one_behind_it_is_not_to_blame(ranks, expected):
    assert levels(*ranks) == expected


def test_whatever_happens_somebody_is_to_blame_unless_all_are_done():
    kinds = [at(0, step, **more) for step in STEPS for more in ({}, SICK) if (step, more) != ("done", SICK)]
    for some in itertools.product(kinds, repeat=3):
        ranks = [replace(rank, rank=node, node=node) for node, rank in enumerate(some)]
        well = all(rank.at == "done" for rank in ranks)
        assert ("error" in levels(*ranks)) == (not well), ranks
        assert (patience(ranks, 60.0) <= LAST_LINE_WAIT) or any(rank.waits for rank in ranks)


def test_devices_of_a_node_that_fail_alike_are_reported_at_once():
    ranks = [TrialRank(rank, 0, "device", "2.13", f"device {rank}", **SICK) for rank in range(3)]
    odd = replace(ranks[1], failed="RuntimeError: other")
    last_line = judge("torch", [ranks[0], odd, ranks[2]], FACTS, 60.0, names)
    texts = [finding.text for finding in last_line if finding.level == "error"]
    assert texts == ["device 0, device 2: RuntimeError: no", "device 1: RuntimeError: other"]


def test_a_node_without_a_trainer_is_not_tried():
    assert found(at(0, "done"), at(1, "done"))[2].text == "no trainer there"


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [
        ((at(0, "done"), at(1, "done")), 0.0),
        ((at(0, "done"), at(1, "import", **SICK)), LAST_LINE_WAIT),
        ((at(0, "meet"), at(1, "import", **SICK)), LAST_LINE_WAIT),
        ((at(0, "done"), at(1, "reduce", **SICK)), LAST_LINE_WAIT),
        ((at(0, "meet"), at(1, "meet", **SICK)), SOON),
        ((at(0, "device"), at(1, "import", **SICK)), 60.0),
        ((at(0, "meet"), at(1, "meet")), 60.0),
        ((at(0, "start"), at(1, "done")), 60.0),
    ],
)
def test_a_node_without_further_messages_is_not_waited_for(ranks, seconds):
    assert patience(ranks, 60.0) == seconds


def test_what_is_waited_for_is_the_last_of_all():
    def last_line(*ranks: TrialRank) -> str:
        return describe_waiting("torch", ranks, names)

    assert last_line(at(0, "meet"), at(1, "import"), at(2, "import")) == "import torch on n[1-2]"
    assert last_line(at(0, "meet"), at(1, "import", **SICK), at(2, "reduce")) == "init_process_group on n0"
    assert last_line(at(0, "done")) == ""


def test_only_what_all_do_together_is_about_the_network():
    assert meeting_broke([at(0, "meet"), at(1, "reduce", **SICK)])
    assert not meeting_broke([at(0, "meet"), at(1, "import", **SICK)])
    assert not meeting_broke([at(0, "done"), at(1, "done")])


def test_ports_as_the_kernel_gives_them_each_once():
    facts = facts_of(cluster_of(hosts(4)), machines=(0, 0, 1, 1), ephemeral=(40000, 40007), busy=frozenset({40001}))
    ports = own_ports(facts, "seed")
    assert all(
        len(some) == 2 and all(40000 <= port <= 40007 and port != 40001 for port in some) for some in ports.values()
    )
    for pair in ((0, 1), (2, 3)):
        assert len({port for node in pair for port in ports[node]}) == 4
