"""What Hugging Face's Trainer reports to the program that has started it: only with the token, and never a delay."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from clustertool.model import shape
from clustertool.model.job.outcome import Key
from clustertool.model.job.progress import Metrics, posted_metrics
from clustertool.model.wire.spec_types import Spec
from clustertool.node.supervisor.trainer_endpoint import TOKEN, TrainerEndpoint
from tests.node import programs as p
from tests.node.harness import Bench, until

URL, TOKEN_FILE = "KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN"
# As transformers 5.24.0 sends it: integrations/integration_utils.py, KubeflowCallback.
STATUS: dict[str, Any] = {
    "trainerStatus": {
        "lastUpdatedTime": "2026-01-02T03:04:05+00:00",
        "progressPercentage": 45,
        "estimatedRemainingSeconds": 120,
        "metrics": [
            {"name": "loss", "value": "0.5123"},
            {"name": "grad_norm", "value": "1.25"},
            {"name": "learning_rate", "value": "1.5e-05"},
            {"name": "current_step", "value": "45"},
            {"name": "total_steps", "value": "100"},
            {"name": "current_epoch", "value": "1.35"},
        ],
    }
}
NUMBERS = Metrics(epoch=1.35, step=45, total_steps=100, percent=45, eta=120, loss=0.5123, lr=1.5e-05)


def process(rank: int, role: str = "trainer", **env: str) -> dict[str, Any]:
    return {"role": role, "rank": rank, "env": env}


class Served:
    """An endpoint of a node with three trainers, for one of which the user has set a variable, and what it reports."""

    def __init__(self, folder: Path) -> None:
        self.processes = [process(0), process(1), process(2, **{URL: "https://mine"}), process(0, "pserver")]
        self.seen: list[tuple[Key, Metrics]] = []
        spec = cast(Spec, {"job_dir": str(folder), "common": {}, "processes": self.processes})
        self.endpoint = TrainerEndpoint(os.open(folder, os.O_RDONLY), spec, lambda *one: self.seen.append(one))
        self.endpoint.start()
        self.url = self.processes[0]["env"][URL]
        self.token = Path(self.processes[0]["env"][TOKEN_FILE]).read_text()
        self.port = int(self.url.split(":")[2].split("/")[0])

    def post(self, body: Any, token: str | None = None, url: str = "") -> int:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token if token is None else token}"}
        try:
            with urllib.request.urlopen(urllib.request.Request(url or self.url, data, headers), timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    for name in (URL, TOKEN_FILE, "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    made = Served(tmp_path)
    yield made
    made.endpoint.close()


def test_a_report(served: Served, tmp_path: Path) -> None:
    assert served.post(STATUS) == 200
    assert served.post({"trainerStatus": {"progressPercentage": 0}}, url=served.processes[1]["env"][URL]) == 200
    assert served.seen == [(("trainer", 0), NUMBERS), (("trainer", 1), Metrics(percent=0))]
    assert (tmp_path / TOKEN).stat().st_mode & 0o777 == 0o600
    assert served.processes[2]["env"] == {URL: "https://mine"} and served.processes[3]["env"] == {}


@pytest.mark.parametrize("token", ["", "x", "x" * 5000, "\u00e9"])
def test_another_token(served: Served, token: str) -> None:
    assert served.post(STATUS, token) in (400, 401)
    assert served.post(STATUS, served.token[:-1]) == 401
    assert served.seen == []
    assert served.post(STATUS) == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b'{"trainerStatus": []}', b'{"trainerStatus": {"metrics": [3]}}', b"[" * 60_000]
    + [b'{"trainerStatus": {"metrics": [{"name": [], "value": 1}]}}', b'{"trainerStatus": {"progressPercentage": {}}}'],
)
def test_what_is_no_report(served: Served, body: bytes) -> None:
    assert served.post(body) == 400
    assert served.post(STATUS) == 200, "the next one is answered"


def test_values_have_limits() -> None:
    many = [{"name": "loss", "value": "nan"}, *({"name": f"n{n}", "value": "x"} for n in range(1000))]
    found = posted_metrics({"trainerStatus": {"progressPercentage": -3, "metrics": many}})
    assert found.percent is None and found.loss != found.loss


def test_other_requests(served: Served) -> None:
    for request in (b"GET / HTTP/1.1\r\n\r\n", b"POST /trainer/0 HTTP/1.1\r\n\r\n", b"\r\n" * 9, b""):
        with socket.create_connection(("127.0.0.1", served.port), 5) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 401"), request
    with socket.create_connection(("127.0.0.1", served.port), 5) as connection, contextlib.suppress(OSError):
        connection.sendall(b"x" * 10_000_000)
        pytest.fail("it reads without end")
    assert served.post(STATUS, url=f"http://127.0.0.1:{served.port}/trainer/x") == 400


def test_a_connection_that_sends_nothing_ends(served: Served) -> None:
    silent = [socket.create_connection(("127.0.0.1", served.port), 5) for _ in range(2)]
    began = time.monotonic()
    assert served.post(STATUS) == 200
    assert 1.0 < time.monotonic() - began < 4.9, "transformers waits for 5 s"
    for one in silent:
        one.close()


def test_the_end(served: Served, tmp_path: Path) -> None:
    threads = threading.active_count()
    served.endpoint.close()
    until(lambda: threading.active_count() < threads, "its thread has ended")
    assert not (tmp_path / TOKEN).exists()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", served.port), 5)


REPORTS = p.python(f"""
import json, os, time, urllib.request
token = open(os.environ["{TOKEN_FILE}"]).read()
headers = {{"Authorization": "Bearer " + token}}
urllib.request.urlopen(urllib.request.Request(os.environ["{URL}"], {json.dumps(STATUS)!r}.encode(), headers), timeout=5)
say("ready")
time.sleep(1000)
""")


def test_a_rank_reports(bench: Bench) -> None:
    job = bench.run(None, REPORTS, env={"no_proxy": "*"}).ready()

    def numbers() -> list[Metrics]:
        answer = job.nodes[0].ask("report", job=job.id, points=100)
        return [shape.read(Metrics, row) for *_, row in answer["metrics"]]

    until(lambda: NUMBERS in numbers(), f"its numbers are recorded: {numbers()}")
    job.stop()
    job.gone()
