"""How far a job is, and whose loss is wrong, by what its ranks print."""

from __future__ import annotations

import math

import pytest

from clustertool.model.job.attempts import ProcessStatus
from clustertool.model.job.outcome import Key
from clustertool.model.job.progress import Metrics
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import RankState
from clustertool.model.shape import to_plain
from clustertool.show.job_text import loss_text
from clustertool.show.status_view import progress_text
from clustertool.watch.rank_metrics import (
    MetricsRow,
    find_wrong_losses,
    job_progress,
    newest_rows,
    read_rows,
)

NAN, INF = math.nan, math.inf
Rows = dict[Key, list[MetricsRow]]


def losses(*ranks: list[float], steps: list[float] | None = None, role: str = "trainer") -> Rows:
    """The losses of each rank, from the oldest to the newest."""
    return {
        (role, rank): [
            MetricsRow(role, rank, 0, float(t), Metrics(loss=loss, step=steps[rank] if steps else t))
            for t, loss in enumerate(history)
        ]
        for rank, history in enumerate(ranks)
    }


ALIKE = [2.5, 2.4, 2.3], [2.6, 2.5, 2.2], [2.4, 2.4, 2.35]
HISTORIES: list[tuple[str, Rows, list[str]]] = [
    ("nothing is printed", {}, []),
    ("all alike", losses(*ALIKE), []),
    ("one rank prints", losses([2.0, 1.0, 50.0]), []),
    ("NaN of one", losses(*ALIKE, [2.4, NAN, NAN]), ["the loss of trainer 3 is nan"]),
    ("NaN of the only one that prints", losses([2.0, NAN]), ["the loss of trainer 0 is nan"]),
    ("infinite", losses(*ALIKE, [2.4, 9.0, INF]), ["the loss of trainer 3 is inf"]),
    ("NaN of all", losses([NAN], [NAN], [NAN]), ["the loss of trainer 0-2 is nan"]),
    ("NaN once, as with loss scaling", losses(*ALIKE, [2.4, NAN, 2.3]), []),
    (
        "one has left the others",
        losses(*ALIKE, [8.0, 8.5, 9.0]),
        ["the loss of trainer 3 is 9, where the median of the trainers is 2.325"],
    ),
    ("one leaves the others, for one loss only", losses(*ALIKE, [2.4, 2.3, 9.0]), []),
    ("a loss that is in several records", losses(*ALIKE, [2.4, 2.3, 9.0, 9.0, 9.0]), []),
    ("one comes back", losses(*ALIKE, [8.0, 8.5, 2.4]), []),
    ("two: none is right", losses([2.4, 2.3, 2.2], [9.0, 9.1, 9.2]), []),
    ("noise between shards", losses(*([n, n + 0.1, n] for n in (2.0, 1.0, 3.0, 5.0, 4.0))), []),
    ("close, and all others equal", losses([2.0] * 3, [2.0] * 3, [2.0] * 3, [2.5, 2.6, 2.5]), []),
    ("another step", losses(*ALIKE, [9.1, 9.0, 9.2], steps=[100, 100, 100, 50]), []),
    (
        "NaN and apart",
        losses(*ALIKE, [NAN], [9.2, 9.1, 9.0]),
        [
            "the loss of trainer 3 is nan",
            "the loss of trainer 4 is 9, where the median of the trainers is 2.325",
        ],
    ),
    ("pservers", losses([2.0] * 3, [2.0] * 3, [2.0] * 3, [NAN] * 3, role="pserver"), []),
    ("a loss near 0", losses(*([n, n + 1e-4, n] for n in (0.01, 0.011, 0.009, 0.012))), []),
]


@pytest.mark.parametrize("rows, texts", [history[1:] for history in HISTORIES], ids=[one[0] for one in HISTORIES])
def test_wrong_losses(rows: Rows, texts: list[str]) -> None:
    assert [loss_text(one) for one in find_wrong_losses(rows)] == texts


def status(ranks: int = 2) -> JobStatus:
    found = JobStatus(plan={("trainer", rank): rank for rank in range(ranks)})
    for rank in range(ranks):
        process = found.processes["trainer", rank] = ProcessStatus("trainer", rank, rank)
        process.state = RankState.RUNNING
    return found


def row(rank: int, attempt: int = 0, t: float = 1.0, **numbers: float) -> tuple[str, int, int, float, object]:
    return "trainer", rank, attempt, t, to_plain([*Metrics(**numbers)])


def test_a_node_has_only_numbers_of_its_own_ranks() -> None:
    found = status()
    rows = read_rows(found, {0: {"metrics": [row(0, loss=NAN), row(1, loss=9.0)]}, 1: {"metrics": [row(1, loss=1.0)]}})
    assert [(one.rank, one.numbers.loss) for one in rows if one.rank] == [(1, 1.0)]
    assert math.isnan(rows[0].numbers.loss or 0.0)


def test_how_far_a_job_is() -> None:
    found = status(3)
    given = [row(1, percent=40.0, eta=90.0, loss=2.0), row(2, percent=60.0, eta=30.0, loss=3.0)]
    rows = newest_rows(found, read_rows(found, {1: {"metrics": given[:1]}, 2: {"metrics": given[1:]}}))
    assert job_progress(found.processes.values(), rows) == {"percent": 40.0, "eta": 90.0, "loss": 2.0}
    found.processes["trainer", 1].state = RankState.DONE
    assert job_progress(found.processes.values(), rows) == {"percent": 40.0, "eta": 30.0, "loss": 2.0}
    assert job_progress(found.processes.values(), {}) == {"percent": None, "eta": None, "loss": None}


def test_only_the_newest_attempt_counts() -> None:
    found = status()
    found.processes["trainer", 0].attempt = 1
    rows = [MetricsRow("trainer", 0, attempt, t, Metrics(step=t)) for attempt, t in ((0, 1.0), (1, 3.0), (1, 2.0))]
    assert [one.t for one in newest_rows(found, rows)["trainer", 0]] == [2.0, 3.0]


@pytest.mark.parametrize(
    "progress, text",
    [
        ({}, ""),
        ({"percent": None, "eta": None, "loss": None}, ""),
        ({"percent": 45.25, "eta": 730.0, "loss": 0.123456}, "45.2 %, about 12 min 10 s left, loss 0.1235"),
        ({"percent": None, "eta": None, "loss": "NaN"}, "loss nan"),
    ],
)
def test_the_sentence_of_status(progress: dict[str, object], text: str) -> None:
    assert progress_text(progress) == text
