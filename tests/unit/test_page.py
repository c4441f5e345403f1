"""The page: nothing of a program becomes markup, nothing comes from outside, and a large job makes no large page."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from clustertool.model.job.progress import Metrics
from clustertool.model.job.state_names import RankState
from clustertool.show.report_html import Html, Plot, band, chart, folded, human_time, page, tag, ticks
from clustertool.watch.report_model import RankReport, Span
from tests.unit.reports import BEGAN, CULPRIT, SLOW, answers, story_of

EVIL = "</pre></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'&lt;"
VOID = {"meta", "link"}


class Reader(HTMLParser):
    """Every tag is closed in its order; what is there is kept."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attrs)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


def made(given: dict[int, dict[str, Any]], secrets: tuple[str, ...] = ()) -> Reader:
    return Reader(page(story_of(given, secrets), BEGAN))


def test_tags() -> None:
    assert tag("td", "<&\"'", 3, None, [Html("<b>"), "<"], class_='a"b', aria_label="x", id=None) == (
        '<td class="a&quot;b" aria-label="x">&lt;&amp;&quot;&#x27;3<b>&lt;</td>'
    )


def test_the_events_end_with_the_end_of_the_job_and_long_lists_are_counted() -> None:
    assert re.search(r"\+10 min 00 s the job has ended: failed, exit code \d+", made(answers(3, 2)).text)
    text = made(answers(4, 2, crash=False)).text
    assert "Last lines" in text and "and 2 more" in text


def test_what_is_to_be_seen() -> None:
    text = made(answers(3, 2)).text
    victims = "Stopped by clustertool because of it (victims): trainer 0,2-5"
    for wanted in (
        "Failed",
        "trainer 1 on node0",
        "exit code 7",
        "last words of 1",
        victims,
        "trainer 2",
        "at step 900 where the median is",
        "python3 train.py",
        "node[0-2]",
        "collective",
    ):
        assert wanted in text, wanted
    assert (
        text.index("last words of 1")
        < text.index("Stragglers")
        < text.index("Timeline")
        < text.index("Starts and ends")
    )


def test_the_reason_is_shown_where_the_headline_does_not_have_it() -> None:
    given = answers(2, 2)
    assert "exit code 7. Exit code" not in made(given).text
    exits = [event for event in given[0]["events"] if event["type"] == "exited" and event["rank"] == CULPRIT]
    given[0]["events"][-1]["reason"] = "trainer 1 on node0 ended with exit code 0 before it listened on its port"
    exits[0]["code"] = 0
    assert "before it listened on its port. Exit code" in made(given).text
    given = answers(2, 2)
    del given[0]  # the culprit's node does not answer
    assert "ended with exit code 7. Exit code" in made(given).text


def test_ranks_that_followed_the_culprit_are_not_in_the_headline() -> None:
    given = answers(2, 2)
    for answer in given.values():
        for event in answer["events"]:
            if event["type"] == "exited" and event["rank"] == 3:
                event.update(code=1, signal=0, stopped=False, consequence=True)
            elif event["type"] == "ended":
                event.update(culprits=[["trainer", CULPRIT], ["trainer", 3]], followed=[["trainer", 3]])
    text = made(given).text
    assert f"Failedtrainer {CULPRIT} on node0 exit code 7" in text
    assert "Failed after it: trainer 3" in text


def test_nothing_of_a_program_becomes_markup() -> None:
    given = answers(2, 2)
    plain = [name for name, _ in made(given).tags]
    for node, answer in given.items():
        answer["tails"] = [["trainer", rank, f"{EVIL}\n{EVIL}\n"] for _, rank, _ in answer["tails"]]
        answer["events"][0].update(nodes=[EVIL, EVIL + "2"], owner=EVIL, command=EVIL, name=EVIL)
        answer["events"][-1]["reason"] = EVIL
        for event in answer["events"]:
            event["note"] = EVIL
        for process in answer["plan"]["processes"]:
            process["command"] = EVIL
        answer["plan"]["policy"] = {EVIL: EVIL}
        answer["events"].append({"t": BEGAN, "type": "supervisor-lost", "why": EVIL, "node": node})
    reader = made(given)
    names = {name for name, _ in reader.tags}
    assert names <= {*plain, "section", "ul", "li"}
    assert not any(key.startswith("on") for _, attributes in reader.tags for key in attributes)
    assert EVIL in reader.text


def test_stacks_of_a_job_without_progress_are_gathered_and_harmless() -> None:
    given = answers(2, 2)
    assert "Stacks when no rank" not in made(given).text
    for node, answer in given.items():
        frames = [["wait", "/lib/python3.11/threading.py", 9], [EVIL, "/job/train.py", 12]]
        rank = ["trainer", node, 100 + node, False, "python3", "/job", "S", ""]
        answer["stacks"] = [BEGAN + 5, [[*rank, [["", frames]]]]]
    reader = made(given)
    assert f"trainer 0-1: wait <- train.py:12 {EVIL}" in reader.text
    assert "img" not in {name for name, _ in reader.tags}


@pytest.mark.parametrize("nodes, each", [(1, 1), (3, 2), (20, 4)])
def test_it_needs_nothing_from_outside(nodes: int, each: int) -> None:
    text = page(story_of(answers(nodes, each)), BEGAN)
    assert not re.search(r"https?:|url\(|@import|<script|src=", text)
    links = [attributes["href"] for _, attributes in Reader(text).tags if "href" in attributes]
    assert links == ["data:,"]
    assert "default-src &#x27;none&#x27;" in text or "default-src 'none'" in text


def test_secrets_are_masked() -> None:
    given = answers(1, 2)
    given[0]["tails"][1][2] = "token=a<b&c\n"  # what escaping would change is masked before
    text = page(story_of(given, ("a<b&c",)), BEGAN)
    assert "token=***" in text
    assert "a&lt;b" not in text
    assert "a<b" not in text


def test_a_large_job_makes_no_large_page() -> None:
    text = page(story_of(answers(64, 8, 3600.0)), BEGAN)
    reader = Reader(text)
    assert len(text) < 2_000_000
    assert len(re.findall(r'class="row', text)) < 20
    assert "trainers 0,3-511" in reader.text
    assert "63 nodes more: node[1-63]" in reader.text
    assert len([name for name, _ in reader.tags if name == "tr"]) == 513


def test_much_that_happened_is_cut() -> None:
    given = answers(1, 1, crash=False)
    given[0]["events"] += [{"t": BEGAN + n, "type": "restart", "attempt": n, "pause": 1.0} for n in range(100)]
    text = made(given).text
    assert "attempt 39 begins" in text
    assert "attempt 40 begins" not in text
    assert "and 60 more" in text


def test_few_rows_stay_rows_of_their_own() -> None:
    ranks = story_of(answers(4, 4)).ranks
    assert [len(group) for group in folded(ranks, 600.0, 60)] == [1] * 16
    groups = folded(ranks, 600.0, 10)
    assert sorted(len(group) for group in groups) == [1, 1, 14]
    assert sum(len(group) for group in groups) == 16


def test_a_running_job() -> None:
    text = made(answers(2, 2, crash=False)).text
    assert "4 running of 4 ranks" in text
    assert "runs for 11 min 00 s" in text


def test_a_lost_rank_whose_node_does_not_answer_is_on_the_page() -> None:
    given = answers(3, 5, crash=False)
    del given[2]
    known = [["trainer", 10, None, 54.0, BEGAN + 30.0]]
    given[0]["events"].append(
        {"type": "lost", "t": BEGAN + 40.0, "node": 2, "why": "no heartbeat for 10 s", "ranks": known}
    )
    text = Reader(page(story_of(given, places=[["trainer", 0, 0, 5, 3]]), BEGAN)).text
    assert "15 trainers" in text and "10 running, 5 lost of 15 ranks" in text
    row = r"trainer 10node2unknown\+40\.00 slost last step 54, last output \+30\.00 s"
    assert re.search(row, text), text
    assert "trainer 14node2unknown+40.00 slost last step unknown, last output unknown" in text
    assert "last output +30.00 s+30.00 strainer" in text, "no CPU time and no memory of a rank without records"
    assert "lost · trainer 10-14" in text and "no ranks" not in text


def test_a_rank_that_printed_nothing_for_long_is_shown_with_that_time() -> None:
    given = answers(1, 3, length=100.0, crash=False)
    given[0]["output"] = [["trainer", rank, None, 8.0, BEGAN + (76.0 if rank == 2 else 158.0)] for rank in range(3)]
    text = made(given).text
    assert text.count("no output for") == 2, "as a straggler, and in the table"
    assert "no output for 1 min 24 s" in text


def test_without_records_of_use_it_is_still_a_page() -> None:
    given = answers(2, 2)
    for answer in given.values():
        answer["machine"] = {"cores": 0, "total": 0, "rows": []}
        for rank in answer["ranks"]:
            rank.update(rows=[], progress=[])
    assert "Nothing recorded here." in made(given).text


def test_devices_have_curves() -> None:
    given = answers(1, 2)
    given[0]["cards"] = [
        {"index": n, "total": 80e9, "rows": [(BEGAN + t, 50.0, 4e9) for t in range(1, 50)]} for n in range(2)
    ]
    text = made(given).text
    assert "Devices: busy" in text
    assert "device 1" in text


def test_curves_stay_in_their_frame() -> None:
    svg = chart("c", [Plot([(-5.0, 1.0), (50.0, 9.0), (999.0, -3.0)], "x")], 100.0, str)
    points = re.search(r'd="M([^"]+)"', svg)
    assert points
    numbers = [
        tuple(map(float, point.split())) for point in points.group(1).replace("L", " ").replace("  ", " ").split(",")
    ][0]
    assert all(0 <= x <= 1000 for x in numbers[::2])
    assert all(0 <= y <= 100 for y in numbers[1::2])


def test_many_lines_become_a_band() -> None:
    many = [Plot([(float(t), float(n)) for t in range(100)], f"rank {n}") for n in range(30)]
    svg = chart("c", [*many, Plot([(0.0, 1.0), (99.0, 1.0)], "bad", "culprit")], 100.0, str)
    assert svg.count("<path") == 3
    assert 'class="line culprit"' in svg
    lowest, middle, highest = band([line.curve for line in many], 100.0)
    assert {value for _, value in lowest} == {0.0}
    assert {value for _, value in middle} == {14.5}
    assert {value for _, value in highest} == {29.0}


@pytest.mark.parametrize("end", [0.5, 1.0, 7.0, 60.0, 3600.0, 90_000.0, 3e6, 1e8])
def test_ticks_are_round_and_few(end: float) -> None:
    found = ticks(end)
    assert found[0] == 0
    assert len(found) <= 7
    assert all(t <= end for t in found)
    assert len({human_time(t) for t in found}) == len(found)


def test_loss_and_throughput_with_restarts() -> None:
    story = story_of(answers(3, 2))
    assert "Loss and throughput" not in page(story, BEGAN)

    def numbers(rank: RankReport) -> list[tuple[float, Metrics]]:
        loss = math.nan if rank.rank == SLOW else 2.0
        return [
            (float(t), Metrics(loss=loss / (t + 1), steps_per_second=3.0, samples_per_second=24.0)) for t in range(9)
        ]

    spans = [Span(0.2, 3.0, RankState.FAILED, 0), Span(4.0, 600.0, RankState.STOPPED, 1)]
    ranks = [replace(rank, numbers=numbers(rank), spans=spans) for rank in story.ranks]
    again = replace(story, ranks=ranks)
    assert again.restarts == [4.0]
    reader = Reader(page(again, BEGAN))
    assert "loss of each rank" in reader.text and "samples/s of each rank" in reader.text
    assert "steps/s of each rank" not in reader.text, "of the rates, the one that says most"
    assert [attrs["d"] for name, attrs in reader.tags if attrs.get("class") == "line restart"] == ["M7 100.0V0"] * 2
    assert "nan" not in " ".join(str(attrs.get("d")) for _, attrs in reader.tags)
