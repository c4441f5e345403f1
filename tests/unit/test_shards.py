"""Shards: number modulo trainers, every file read exactly once, and no trainer left without data."""

from __future__ import annotations

import itertools

import pytest
from cases import cluster_of, hosts, of_role, plan_of

from clustertool.errors import DataError
from clustertool.plan.shards import assign_shards, matches, number, split

NAMES = [
    ("train.txt-00000", 0),
    ("train.txt-00012", 12),
    ("part-2024-00003.txt.gz", 3),
    ("a-1.b-2", 2),
    ("a-1.b-2.c", 2),
    ("a-1.b", 1),
    ("data-v2-7", 7),
    ("-5", 5),
    ("x--5", 5),
    ("folder-9/train-4.csv", 4),
    ("0x-08", 8),
]


@pytest.mark.parametrize("path, shard", NAMES)
def test_the_number_is_the_last_digits_after_a_dash_before_a_dot_or_the_end(path: str, shard: int) -> None:
    assert number(path) == shard


@pytest.mark.parametrize("path", ["train.txt", "train-", "train-5x", "train5", "train_5", "folder-9/train", "train-5\n", ""])
def test_a_name_without_a_number_is_told(path: str) -> None:
    with pytest.raises(DataError, match="has no shard number") as caught:
        number(path)
    assert caught.value.fix


PATTERNS = [
    ("data/x-1", "data/*-[0-9]*", True),
    ("data/sub/x-1", "data/*-[0-9]*", False),
    ("x-1", "data/*-[0-9]*", False),
    ("data/x-1", "*/x-?", True),
    ("data/X-1", "data/x-*", False),
    ("data/x-a", "data/*-[0-9]*", False),
    ("a/b/c-1", "a/**", False),
    ("x-1", "*", True),
]


@pytest.mark.parametrize("path, pattern, yes", PATTERNS)
def test_a_star_stays_inside_a_folder(path: str, pattern: str, yes: bool) -> None:
    assert matches(path, pattern) is yes


def shards(count: int, name: str = "d/x-{:05d}") -> list[str]:
    return [name.format(index) for index in range(count)]


def test_every_shard_goes_to_its_number_modulo_trainers() -> None:
    for trainers, count in itertools.product(range(1, 7), range(1, 14)):
        if count < trainers:
            continue
        found = assign_shards(list(reversed(shards(count))), ["d/*"], trainers)
        assert [[number(path) for path in files] for files in found] == [
            list(range(rank, count, trainers)) for rank in range(trainers)
        ]


def test_numbers_are_numbers_and_not_text() -> None:
    files = [f"x-{index}" for index in range(12)]
    assert assign_shards(files, ["x-*"], 2)[0] == ("x-0", "x-2", "x-4", "x-6", "x-8", "x-10")


def test_each_pattern_is_a_set_of_its_own() -> None:
    files = [*shards(4, "a/x-{}"), *shards(3, "b/y-{}.txt"), "train.py", "a/readme"]
    assert assign_shards(files, ["b/*-[0-9]*", "a/*-[0-9]*"], 3) == (
        ("b/y-0.txt", "a/x-0", "a/x-3"), ("b/y-1.txt", "a/x-1"), ("b/y-2.txt", "a/x-2"),
    )  # fmt: skip


WRONG = [
    (["train.py"], ["d/*-[0-9]*"], 1, "no file of the workspace matches"),
    (shards(2), ["d/*"], 3, "2 shards of 'd/\\*' for 3 trainers: 1 would read nothing"),
    (["d/x-0", "d/x-2"], ["d/*"], 1, "number 1 is missing"),
    (["d/x-1", "d/x-2"], ["d/*"], 1, "number 0 is missing"),
    (["d/x-0", "d/x-20240101"], ["d/*"], 1, "number 1 is missing"),
    (["d/x-1", "d/x-01", "d/x-0"], ["d/*"], 1, "shard 1 of 'd/\\*' is there twice: 'd/x-01' and 'd/x-1'"),
    (["d/x-0", "e/x-0"], ["*/x-*"], 1, "shard 0 .* twice"),
    ([*shards(2), "d/readme"], ["d/*"], 1, "'d/readme' matches \\[shards\\] but has no shard number"),
    (shards(2), ["d/*", "d/x-*"], 1, "'d/x-00000' matches two patterns"),
    ([*shards(4), *shards(1, "e/y-{}")], ["d/*", "e/*"], 2, "1 shards of 'e/\\*' for 2 trainers"),
]


@pytest.mark.parametrize("files, patterns, trainers, what", WRONG)
def test_what_is_wrong_is_told_with_the_fix(files: list[str], patterns: list[str], trainers: int, what: str) -> None:
    with pytest.raises(DataError, match=what) as caught:
        assign_shards(files, patterns, trainers)
    assert (caught.value.code, bool(caught.value.fix)) == (65, True)


def test_trainers_and_only_trainers_get_their_shards() -> None:
    files = ["train.py", *shards(5, "data/x-{}")]
    toml = {"mode": "ps", "shards": {"files": ["./data/*-[0-9]*"]}}
    made = plan_of(cluster_of(hosts(2)), toml, files=files, workers=("10.0.0.2,10.0.0.1",))
    assert [p.shards for p in of_role(made, "trainer")] == [("data/x-0", "data/x-2", "data/x-4"), ("data/x-1", "data/x-3")]
    assert [p.shards for p in of_role(made, "pserver")] == [(), ()]


def test_the_command_line_names_shards_in_the_same_way() -> None:
    made = plan_of(cluster_of(hosts(1)), files=["train.py", "a/x-0", "b/y-0"], shards=("./a/x-*,b/*",))
    assert of_role(made, "trainer")[0].shards == ("a/x-0", "b/y-0")


def test_split_gives_runs_of_neighbours_of_nearly_one_length() -> None:
    for count, parts in itertools.product(range(12), range(1, 6)):
        found = split(range(count), parts)
        lengths = [len(part) for part in found]
        assert [item for part in found for item in part] == list(range(count))
        assert len(found) == parts
        assert sorted(lengths, reverse=True) == lengths
        assert max(lengths) - min(lengths) <= 1
