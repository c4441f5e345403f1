"""Answers of a hostile node: their sizes, their shapes, answers to nothing. They are errors of that node alone."""

from __future__ import annotations

import json
import queue
import resource
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from clustertool.errors import BadAnswer, ClustertoolError
from clustertool.fleet.fleet import Fleet
from clustertool.model.config.cluster import Cluster
from clustertool.model.shape import Malformed
from clustertool.model.wire import answers
from clustertool.model.wire.frames import Decoder, FrameError, encode
from clustertool.model.wire.messages import REQUESTS, Request
from tests.security.hostile import honest_python, hostile_python
from tests.ssh import sshd

Frames = "queue.Queue[tuple[int, Mapping[str, Any], bytes]]"

EVENT = {
    "type": "started",
    "t": 1.0,
    "role": "trainer",
    "rank": 0,
    "pid": 7,
    "start": 1,
    "attempt": 0,
    "log": "log/workerlog.0",
}
SUMMARY = {"id": "a", "state": "running", "node": 0, "created": 1.0, "nodes": ["n"], "code": None}
SUMMARY.update(reason="", owner=None, mode=None, command=None, dir="/x", start="", final=False)
STATUS = {
    "node": 0,
    "dir": "/x",
    "heartbeat": None,
    "events": [EVENT],
    "supervised": True,
    "usage": {"7": [0.1, 5]},
    "output": [],
    "metrics": [],
    "unknown": "",
}

# A hostile node plays back what the test has written into ~/script.json: header text and payload size by question.
PLAYS = """
    def answer(request):
        with open(os.path.expanduser("~/script.json")) as file:
            script = json.load(file)
        for header, payload in script.get(request["type"], [["", 0]]):
            text = header.replace("ID", str(request["id"])) or json.dumps(dict(re=request["id"], jobs=[]))
            write(frame(text.encode(), bytes(payload)))
"""


class Nodes:
    """A fleet of an honest node and a hostile one, whose answers to a question play() sets."""

    def __init__(self, cluster: Cluster, servers: list[sshd.Sshd]) -> None:
        self._script = servers[1].home / "script.json"
        self._script.write_text("{}")
        honest_python(servers[0].home)
        hostile_python(servers[1].home, 1, [host.name for host in cluster.hosts], PLAYS)
        self.frames: queue.Queue[tuple[int, Mapping[str, Any], bytes]] = queue.Queue()
        self.fleet = Fleet(cluster, sink=lambda *frame: self.frames.put(frame))

    def play(self, question: str, *frames: tuple[Any, int] | Any) -> None:
        """Each frame is a header (text or an object; "ID" stands for the request's number), or that and a payload's size."""
        pairs = [frame if isinstance(frame, tuple) else (frame, 0) for frame in frames]
        script = {question: [[one if isinstance(one, str) else json.dumps(one), size] for one, size in pairs]}
        self._script.write_text(json.dumps(script))

    def ask(self, question: str) -> tuple[ClustertoolError | None, bool]:
        """(the hostile node's error, whether the honest node has answered)."""
        gathered = self.fleet.ask(dict.fromkeys((0, 1), Request(REQUESTS[question], {"job": ""})), timeout=20)
        return gathered.failed.get(1), 0 in gathered.ok


@pytest.fixture
def nodes(cluster_of: Callable[..., tuple[Cluster, list[sshd.Sshd]]]) -> Iterator[Nodes]:
    made = Nodes(*cluster_of(2, PYTHON="~/py"))
    with made.fleet:
        assert not made.fleet.open().failed
        yield made


def check_answer(question: str, answer: dict[str, Any]) -> None:
    answers.check_answer(REQUESTS[question], answer)


def reply(**fields: Any) -> str:
    return json.dumps({"re": "ID", **fields}).replace('"ID"', "ID")


def test_a_wrong_shape_is_an_error_of_its_node_and_of_one_question(nodes: Nodes) -> None:
    """The connection stays: `stop` needs it although a record of the node cannot be read."""
    for fields, says in (
        ({"jobs": [{**SUMMARY, "id": "../../x"}]}, "to 'jobs': jobs[0].id is '../../x', not a job id"),
        ({"jobs": [{**SUMMARY, "created": 1e300}]}, "jobs[0].created is 1e+300, not a number from 0 to 1e+11"),
        ({"jobs": [{**SUMMARY, "created": "yesterday"}]}, "jobs[0].created is 'yesterday'"),
        ({"jobs": [{**SUMMARY, "created": float("nan")}]}, "jobs[0].created is nan"),
        ({"jobs": [{"state": "running"}]}, "jobs[0] has no 'id'"),
        ({"jobs": {}}, "jobs is a dict, not a list"),
        ({}, "has no 'jobs'"),
        ({"error": "no"}, "error is 'no', not an object"),
        ({"error": {"kind": "NotFound"}}, "error has no 'what'"),
    ):
        nodes.play("jobs", reply(**fields))
        error, honest = nodes.ask("jobs")
        assert isinstance(error, BadAnswer)
        assert says in error.what
        assert error.code == 69
        assert error.node == nodes.fleet.name(1)
        assert "inspect them on that node" in error.fix
        assert honest
    nodes.play("jobs", reply(jobs=[SUMMARY]))
    assert nodes.ask("jobs") == (None, True)


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (" " * (17 << 20), "a frame of 17825792+0 bytes"),
        ((reply(jobs=[]), (256 << 10) + 1), "262145 bytes"),
        ('{"re": 4711, "jobs": []}', "an answer with a header"),
        ('{"re": "1"}', "an answer with a header"),
        ('{"re": [1]}', "an answer with a header"),
        ("{]", "no JSON"),
        ("[]", "no object"),
        ("[" * 100_000, "no JSON"),
        ('{"type": "log", "x": "' + "x" * 50_000 + '"}', "a frame of type 'log' with a header of"),
    ],
    ids=["header", "payload", "unknown number", "text", "list", "no JSON", "no object", "deep", "stream"],
)
def test_a_frame_that_exceeds_its_limit_ends_the_connection_to_its_node(nodes: Nodes, frame: Any, says: str) -> None:
    nodes.play("jobs", frame)
    error, honest = nodes.ask("jobs")
    assert isinstance(error, BadAnswer)
    assert says in error.what
    assert honest
    assert isinstance(nodes.fleet.agents[1].dead, BadAnswer)
    assert nodes.frames.get(timeout=20)[1] == {"type": "closed", "why": error.what, "refused": True}


def test_a_large_answer_is_taken_only_where_one_is_asked_for(nodes: Nodes) -> None:
    large = reply(files={f"file{number:060}": 1 for number in range(40_000)})
    assert len(large) > 2 << 20
    nodes.play("files", large)
    assert nodes.ask("files")[0] is None
    nodes.play("tail", large)
    error, _ = nodes.ask("tail")
    assert isinstance(error, BadAnswer)


def test_many_answers_to_one_request(nodes: Nodes) -> None:
    """The first one counts. The second one answers nothing."""
    nodes.play("jobs", reply(jobs=[SUMMARY]), reply(jobs=[]))
    assert nodes.ask("jobs")[0] is None
    assert nodes.frames.get(timeout=20)[1]["refused"]
    assert nodes.ask("jobs") == (nodes.fleet.agents[1].dead, True)


def test_a_stream_that_is_not_valid_ends_and_requests_are_still_answered(nodes: Nodes) -> None:
    good = {"type": "events", "node": 0, "events": [EVENT], "at": 1}
    for bad in ({**good, "events": [{**EVENT, "rank": -1}]}, {"type": "nonsense"}, {"type": "closed", "why": "a lie"}):
        nodes.play("jobs", good, bad, good, reply(jobs=[]))
        assert nodes.ask("jobs")[0] is None
        if not nodes.frames.empty():
            assert nodes.frames.get()[1]["type"] == "events"
            assert nodes.frames.get()[1]["refused"]
        assert nodes.frames.empty()  # nothing after what is not valid


def test_a_flood_takes_little_memory(nodes: Nodes) -> None:
    """66 MB of `{},` became 1.75 GB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    nodes.play("jobs", '{"re": ID, "jobs": [' + "{}," * (5 << 20) + "{}]}")
    error, honest = nodes.ask("jobs")
    assert isinstance(error, BadAnswer)
    assert honest
    nodes.play("beat", *[{"type": "events", "node": 0, "events": [{}] * 100_000, "at": 0}] * 20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700_000


# -- the checks themselves --


def bad(question: str, answer: Mapping[str, Any]) -> str:
    with pytest.raises(Malformed) as caught:
        check_answer(question, answer)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"events": [{**EVENT, "role": "boss"}]}, "events[0] (started).role is 'boss', not one of"),
        ({"events": [{"type": "phase", "t": 1, "name": "ending", "end": "won"}]}, "(phase).end is 'won', not one of"),
        ({"events": [{**EVENT, "rank": "3"}]}, "events[0] (started).rank is '3'"),
        ({"events": [{**EVENT, "rank": True}]}, "events[0] (started).rank is True"),
        ({"events": [{**EVENT, "t": float("inf")}]}, "events[0].t is inf"),
        ({"events": [{"type": "job", "t": 1, "id": "x/y"}]}, "events[0] (job).id is 'x/y', not a job id"),
        (
            {"events": [{"type": "job", "t": 1, "id": "x", "processes": [{"role": "trainer"}]}]},
            "processes[0] has no 'rank'",
        ),
        (
            {"events": [{"type": "ended", "t": 1, "state": "lost", "code": 10**30, "source": "", "reason": ""}]},
            "code is 1000",
        ),
        (
            {"events": [{"type": "lost", "t": 1, "node": 1, "why": "", "ranks": [["trainer", 0, None, "x", 1]]}]},
            "ranks[0][3] is 'x'",
        ),
        ({"events": [{"type": "clean", "t": 1, "survivors": [["x"]]}]}, "survivors[0] is a list, not a string"),
        ({"events": [{"type": "new", "t": 1, "more": [[]] * 3000}]}, "events[0].more holds more than"),
        ({"usage": {"7": [1]}}, "usage['7'] has 1 values, not 2"),
        ({"dir": 7}, "dir is 7, not a string"),
        ({"node": 10**9}, "node is 1000000000"),
        ({"supervised": "yes"}, "supervised is"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_status_that_is_not_valid(change: dict[str, Any], says: str) -> None:
    check_answer("status", STATUS)
    assert says in bad("status", {**STATUS, **change})


NO_DEVICES = {"kind": "gpu", "ids": [0], "devices": [], "driver": "", "cuda": "", "problem": ""}


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("stop", {"jobs": {"../x": {"state": "clean", "survivors": []}}}),
        ("stop", {"jobs": {"x": {"state": "clean"}}}),
        ("clean", {"removed": ["x/.."], "running": [], "freed": 0}),
        ("clean", {"removed": [], "running": [], "freed": -1}),
        ("tail", {"text": 1}),
        ("tail", {"text": "x" * (2 << 20)}),
        ("files", {"files": {"a": "b"}}),
        ("patch", {}),
        ("devices", {"kind": "gpu"}),
        ("glance", {"jobs": []}),
        ("devices", {"need": 7}),
        ("devices", {**NO_DEVICES, "devices": [{"index": 0, "processes": [{"pid": 1, "memory": -5}]}]}),
        ("link-open", {"ports": [70_000]}),
        ("meet", {"seen": [-1]}),
        ("probe", {"cpus": "many"}),
        ("probe", {"busy": [None]}),
        ("probe", {"packages": [["x"]]}),
    ],
)
def test_other_answers_that_are_not_valid(question: str, answer: dict[str, Any]) -> None:
    check_answer("devices", NO_DEVICES)
    bad(question, answer)


def test_unknown_keys_pass_as_long_as_they_are_small() -> None:
    """Nodes with a newer version may say more."""
    check_answer("jobs", {"jobs": [{**SUMMARY, "new": {"a": [1, 2]}}], "more": "x"})
    check_answer("place", {"anything": 1})


def test_a_decoder_checks_each_header() -> None:
    def check(header: Mapping[str, Any], size: int) -> None:
        raise FrameError(f"{size} bytes")

    decoder = Decoder(check=check)
    with pytest.raises(FrameError, match="16 bytes"):
        list(decoder.feed(encode({"type": "value"}, bytes(100))))
