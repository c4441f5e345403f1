"""The exception that a program records in its error file, as PyTorch's `@record` does, is in the verdict of its job."""

from __future__ import annotations

from pathlib import Path

from tests.node import programs as p
from tests.node.harness import Bench

# What `@record` of PyTorch does, without PyTorch.
RECORDS = """
    printf '{"message": {"message": "%s", "extraInfo": {"py_callstack": "..."}}}' "$1" > "$TORCHELASTIC_ERROR_FILE"
"""


def recording(text: str, then: str) -> str:
    return f"records() {{ {RECORDS} }}\nrecords {text}\n{then}"


def test_a_recorded_exception_is_in_the_verdict(bench: Bench) -> None:
    """Also where the last line of the log is another one, and of all ranks with this error together, whatever their numbers."""
    program = recording('"ValueError: bad shard $RANK"', "echo bye; echo from rank $RANK of many; exit 5")
    wait = f"echo ready; until [ -e {bench.tmp}/go ]; do sleep 0.05; done\n"
    job = bench.run(bench.nodes(2), wait + program).ready()
    (bench.tmp / "go").touch()
    outcome = job.ended()
    assert sorted(outcome["culprits"]) == [["trainer", 0], ["trainer", 1]]
    first = outcome["culprits"][0][1]
    name = job.nodes[outcome["node"]].host.name
    assert outcome["reason"] == (
        f"2 trainers failed with the same error, first trainer {first} on {name}: exit code 5: ValueError: bad shard {first}"
    )
    for node in range(2):
        [exit] = job.events(node, "exited")
        assert exit["note"] == f"ValueError: bad shard {exit['rank']}"


def test_a_recorded_exception_tells_a_consequence_from_a_cause(bench: Bench, tmp_path: Path) -> None:
    """The last lines of the logs do not: they are equal."""
    cause = f"until [ -e {tmp_path}/closed ]; do sleep 0.05; done; sleep 0.1\n"
    cause += recording("ValueError", "echo leaving; exit 5")
    consequence = recording(
        '"RuntimeError: Connection closed by peer"', f"touch {tmp_path}/closed; echo leaving; exit 1"
    )
    outcome = bench.run(bench.nodes(2), p.one_each(cause, consequence)).ended()
    assert (outcome["code"], outcome["culprits"]) == (5, [["trainer", 0], ["trainer", 1]])


def test_the_exception_of_an_earlier_attempt_is_not_reported_again(bench: Bench) -> None:
    """Nor that of a rank that was stopped, and with the value of a secret it is on no disk but in the file of the rank."""
    again = recording('"ValueError: $TOKEN"', "exit 5")
    program = f'[ "$TORCHELASTIC_RESTART_COUNT" = 1 ] && exit 6; {again}'
    nodes = bench.nodes(1, SECRETS=["TOKEN"])
    job = bench.run(nodes, program, secrets={"TOKEN": "correct-horse"}, policy={"max_restarts": 1})
    assert job.ended()["reason"] == f"trainer 0 on {nodes[0].host.name} ended with exit code 6"
    assert [event["note"] for event in job.events(0, "exited")] == ["ValueError: ***", ""]
    assert "correct-horse" not in (job.dir(0) / ".clustertool/events.jsonl").read_text()
