"""All failures at once, equal ones once, and a last line that says whose exit code it is."""

from __future__ import annotations

import io
import json

import pytest

from clustertool.errors import (
    AuthError,
    ClustertoolError,
    ConfigError,
    DataError,
    JobFailed,
    NodeLost,
    Several,
    Unreachable,
    UsageError,
)
from clustertool.show.error_text import exit_json, show_error
from clustertool.show.terminal import Terminal


def shown(error: ClustertoolError) -> list[str]:
    out, err = io.StringIO(), io.StringIO()
    show_error(error, Terminal(out, err, {}))
    assert out.getvalue() == ""
    return err.getvalue().splitlines()


def refused(node: str) -> Unreachable:
    return Unreachable("ssh: connection refused", "start sshd there", node)


def test_one_error() -> None:
    assert shown(ConfigError("HOSTS is empty", "name a machine")) == [
        "error: HOSTS is empty",
        "  fix: name a machine",
        "clustertool: exit 78 (tool): HOSTS is empty",
    ]


def test_without_a_fix_nothing_is_made_up() -> None:
    assert shown(NodeLost("no heartbeat for 10 s", node="node2")) == [
        "error: node2: no heartbeat for 10 s",
        "clustertool: exit 75 (tool): node2: no heartbeat for 10 s",
    ]


def test_equal_failures_are_folded() -> None:
    assert shown(Several([refused(f"node{i}") for i in (1, 2, 3)])) == [
        "error: node[1-3]: ssh: connection refused",
        "  fix: start sshd there",
        "clustertool: exit 69 (tool): node[1-3]: ssh: connection refused",
    ]


def test_fixes_that_name_their_node_are_one_fix() -> None:
    nodes = ["10.0.0.1", "10.0.0.2", "10.0.0.12"]
    refusals = [AuthError("permission denied for ann (tried K)", f"ssh-copy-id ann@{node}", node) for node in nodes]
    assert shown(Several(refusals)) == [
        "error: 10.0.0.[1-2,12]: permission denied for ann (tried K)",
        "  fix: ssh-copy-id ann@NODE (NODE: each of 10.0.0.[1-2,12])",
        "clustertool: exit 77 (tool): 10.0.0.[1-2,12]: permission denied for ann (tried K)",
    ]
    assert shown(refusals[0])[1] == "  fix: ssh-copy-id ann@10.0.0.1", "as it can be typed"


def test_failures_of_the_same_cause_that_name_their_node_are_one_message() -> None:
    refusals = [Unreachable(f"{node} port 22 refuses connections", "", node) for node in ("n1", "n2")]
    assert shown(Several([*refusals, Unreachable("n1 is not known", "", "n3")])) == [
        "error: n[1-2]: n[1-2] port 22 refuses connections",
        "error: n3: n1 is not known",
        "clustertool: exit 69 (tool): 2 different failures, first n[1-2]: n[1-2] port 22 refuses connections",
    ]


def test_a_shared_fix_is_shown_once_after_all_that_need_it() -> None:
    inner = Several(
        [Unreachable("timed out", "start sshd there", "node9"), AuthError("permission denied", "ssh-copy-id", "node7")]
    )
    assert shown(Several([refused("node1"), inner, refused("node2")])) == [
        "error: node[1-2]: ssh: connection refused",
        "error: node9: timed out",
        "  fix: start sshd there",
        "error: node7: permission denied",
        "  fix: ssh-copy-id",
        "clustertool: exit 69 (tool): 3 different failures, first node[1-2]: ssh: connection refused",
    ]


def test_the_jobs_own_code_is_the_jobs() -> None:
    error = JobFailed("ABORT!!! Out of all 8 trainers ...\nexit code 7", 7, node="node2")
    assert shown(error) == [
        "error: node2: ABORT!!! Out of all 8 trainers ...",
        "    exit code 7",
        "clustertool: exit 7 (job): node2: ABORT!!! Out of all 8 trainers ...",
    ]


def test_the_answer_of_a_node_stays_text() -> None:
    lines = shown(Unreachable("\x1b[2J[red]banner[/red]\rclustertool: exit 0", node="n\x1b1"))
    assert lines[0] == "error: n\\x1b1: \\x1b[2J[red]banner[/red]\\rclustertool: exit 0"
    assert lines[-1].startswith("clustertool: exit 69 (tool): ")


@pytest.mark.parametrize("what", ["", "\n", "  "])
def test_an_error_without_text(what: str) -> None:
    assert shown(DataError(what))[-1] == "clustertool: exit 65 (tool): no reason given"


def test_wrong_usage_is_named_once() -> None:
    assert shown(UsageError("unknown command 'x'", "see --help")) == [
        "error: unknown command 'x'",
        "  fix: see --help",
        "clustertool: exit 64 (tool): wrong usage",
    ]
    assert exit_json(UsageError("unknown command 'x'"))["reason"] == "unknown command 'x'"


def test_exit_as_json() -> None:
    assert exit_json(None) == {"code": 0, "source": "job", "reason": ""}
    assert exit_json(None, "tool")["source"] == "tool"
    assert exit_json(JobFailed("killed", 137)) == {"code": 137, "source": "job", "reason": "killed"}
    several = exit_json(Several([refused("node1"), refused("node2")]))
    assert json.loads(json.dumps(several)) == {
        "code": 69,
        "source": "tool",
        "reason": "node[1-2]: ssh: connection refused",
    }
