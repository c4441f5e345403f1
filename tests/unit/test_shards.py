"""Shards: number modulo trainers, every file read exactly once, and no trainer left without data."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from cases import cluster_of, facts_of, hosts, job_of, of_role, plan_of

from clustertool.errors import DataError, Several, UsageError
from clustertool.model.planning.shards import assign_shards, matches, number, refuse_links, split

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


NUMBERLESS = ["train.txt", "train-", "train-5x", "train5", "train_5", "folder-9/train", "train-5\n", "x-\u0663", ""]


@pytest.mark.parametrize("path", NUMBERLESS)
def test_a_name_without_a_number_is_reported(path: str) -> None:
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
    (".x-1", "*", False),  # what editors leave next to a shard is none
    (".x-1", ".*", True),
    ("d/.x-1.swp", "d/*-[0-9]*", False),
    (".d/x-1", "*/x-1", False),
    ("x-[1]", "x-[[]1]", True),
    ("a b-1", "a b-*", True),
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
        ("b/y-0.txt", "a/x-0", "a/x-3"),
        ("b/y-1.txt", "a/x-1"),
        ("b/y-2.txt", "a/x-2"),
    )


WRONG = [
    (["train.py"], ["d/*-[0-9]*"], 1, "no file of the workspace matches"),
    (shards(2), ["d/*"], 3, "2 shards of 'd/\\*' for 3 trainers: 1 would read nothing"),
    (["d/x-0", "d/x-2"], ["d/*"], 1, "number 1 is missing, 'd/x-2' is there"),
    (["d/x-1", "d/x-2"], ["d/*"], 1, "number 0 is missing"),
    (["d/x-0", "d/x-20240101"], ["d/*"], 1, "number 1 is missing"),
    (["d/x-1", "d/x-01", "d/x-0"], ["d/*"], 1, "shard 1 of 'd/\\*' is there twice: 'd/x-01' and 'd/x-1'"),
    (["d/x-0", "e/x-0"], ["*/x-*"], 1, "shard 0 .* twice"),
    ([*shards(2), "d/readme"], ["d/*"], 1, "'d/readme' matches \\[shards\\] but has no shard number"),
    (shards(2), ["d/*", "d/x-*"], 1, "'d/x-00000' matches two patterns"),
    ([*shards(4), *shards(1, "e/y-{}")], ["d/*", "e/*"], 2, "1 shard of 'e/\\*' for 2 trainers: 1 would read nothing"),
    (["d/x-0.txt", "d/x-0.idx"], ["d/*"], 1, "shard 0 of 'd/\\*' is there twice: 'd/x-0.idx' and 'd/x-0.txt'"),
    (["d/x\n-0"], ["d/*"], 1, "has a line break in its name"),
]


@pytest.mark.parametrize("files, patterns, trainers, what", WRONG)
def test_an_error_is_reported_with_the_fix(files: list[str], patterns: list[str], trainers: int, what: str) -> None:
    with pytest.raises(DataError, match=what) as caught:
        assign_shards(files, patterns, trainers)
    assert (caught.value.code, bool(caught.value.fix)) == (65, True)


def test_odd_names_are_names() -> None:
    """Spaces, quotes, other alphabets, bytes that are no text, and very long numbers."""
    names = ["a b-0", "it's-1", "\u00fc-2", "\udcff-3", "$(x)-4", "---------5.tar.gz", "x-" + "0" * 200 + "6"]
    files = [f"d/{name}" for name in names]
    assert assign_shards(files, ["d/*-[0-9]*"], 1) == (tuple(files),)


def test_a_link_is_no_shard_and_is_reported() -> None:
    refuse_links(["lib.so", "data/readme"], ["data/*-[0-9]*"])
    with pytest.raises(DataError, match="'data/x-1' matches .* but is a link") as caught:
        refuse_links(["lib.so", "data/x-1"], ["other/*", "data/*-[0-9]*"])
    assert caught.value.fix


PLACES = {0: ("train.py", "d/x-0", "d/x-2"), 1: ("train.py", "d/x-1", "d/x-3")}


def test_with_a_job_workspace_each_node_needs_only_what_its_trainers_read() -> None:
    cluster = cluster_of(hosts(2))
    facts = {node: replace(fact, listing=PLACES[node]) for node, fact in facts_of(cluster).items()}
    listing = sorted({*PLACES[0], *PLACES[1]})
    made = plan_of(cluster, facts=facts, files=listing, shards=("d/*",), job_workspace="/data/job")
    assert [p.shards for p in of_role(made, "trainer")] == [("d/x-0", "d/x-2"), ("d/x-1", "d/x-3")]
    swapped = {0: facts[1], 1: facts[0]}
    with pytest.raises(Several) as caught:
        plan_of(cluster, facts=swapped, files=listing, shards=("d/*",), job_workspace="/data/job")
    assert caught.value.code == 65
    assert [error.node for error in caught.value.errors] == ["10.0.0.1", "10.0.0.2"]
    assert caught.value.errors[0].what == "'d/x-0', which trainer 0 reads, is not in /data/job (of 2 that are missing)"


PATTERNS_WRONG = ["/etc/*", "d/", "../d/*", "d/../*", "d/**", "**/x-*", ""]


@pytest.mark.parametrize("pattern", PATTERNS_WRONG)
def test_a_pattern_names_files_inside_the_workspace(pattern: str) -> None:
    cluster = cluster_of(hosts(1))
    with pytest.raises(DataError, match="job.toml: .shards. files =") as caught:
        job_of(cluster, {"shards": {"files": [pattern]}})
    assert caught.value.fix
    if pattern:
        with pytest.raises(UsageError, match="--shards"):
            job_of(cluster, shards=(pattern,))


def test_patterns_are_separated_by_commas_and_may_contain_some() -> None:
    spec = job_of(cluster_of(hosts(1)), shards=("./a//x-[0,1]*,b/./y-*", "a/x-[0,1]*"))
    assert spec.shards == ("a/x-[0,1]*", "b/y-*")


def test_trainers_and_only_trainers_get_their_shards() -> None:
    files = ["train.py", *shards(5, "data/x-{}")]
    toml = {"mode": "ps", "shards": {"files": ["./data/*-[0-9]*"]}}
    made = plan_of(cluster_of(hosts(2)), toml, files=files, workers=("10.0.0.2,10.0.0.1",))
    assert [p.shards for p in of_role(made, "trainer")] == [
        ("data/x-0", "data/x-2", "data/x-4"),
        ("data/x-1", "data/x-3"),
    ]
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
