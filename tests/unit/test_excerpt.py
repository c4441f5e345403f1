"""What is shown of a culprit's log."""

from __future__ import annotations

from clustertool.watch.lines import excerpt

HEAD = "Traceback (most recent call last):"


def test_without_a_traceback_the_last_lines() -> None:
    lines = [f"step {i}" for i in range(100)]
    assert excerpt(lines, 5) == lines[-5:]
    assert excerpt([], 5) == []


def test_the_last_traceback_whole_even_if_longer_than_the_tail() -> None:
    lines = (
        ["noise"] * 50 + [HEAD, "old", "ValueError: old"] + ["more"] * 5 + [HEAD] + [f"  frame {i}" for i in range(30)]
    )
    found = excerpt([*lines, "ValueError: new"], 20)
    assert found[0] == HEAD
    assert found[-1] == "ValueError: new"
    assert "ValueError: old" not in found
    assert len(found) == 32


def test_a_chained_traceback_is_one_story() -> None:
    between = "During handling of the above exception, another exception occurred:"
    chain = [HEAD, "KeyError: 1", "", between, "", HEAD, "ValueError: 2"]
    assert excerpt(["x", *chain], 20) == chain


def test_an_endless_traceback_keeps_its_head_and_its_end() -> None:
    lines = [HEAD] + [f"  frame {i}" for i in range(3000)] + ["RecursionError"]
    found = excerpt(lines, 20)
    assert found[0] == HEAD and found[-1] == "RecursionError"
    assert len(found) == 61 and "2942 lines" in found[20]


def test_what_a_launcher_says_of_its_term_does_not_hide_the_traceback() -> None:
    lines = [HEAD, "ValueError: mine", "W Sending process 1 closing signal SIGTERM"]
    assert excerpt(lines, 1)[0] == HEAD
