"""The examples' data: all of scikit-learn's digits, cut the same way every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.examples import prepare


def lines(folder: Path) -> dict[str, list[str]]:
    return {path.name: path.read_text().splitlines() for path in sorted(folder.iterdir())}


def test_shards_are_of_one_size_and_the_rest_is_to_test_with(digits):
    """No shard of a former run is left."""
    files = lines(digits)
    assert list(files) == ["test.txt", *(f"train.txt-{number:05d}" for number in range(6))]
    test, *shards = files.values()
    assert len({len(shard) for shard in shards}) == 1
    every = [line for file in files.values() for line in file]
    assert len(every) == 1797
    assert 0.15 < len(test) / len(every) < 0.25
    assert {len(line.split()) for line in every} == {65}
    assert {line.split()[0] for line in test} == set("0123456789")


@pytest.mark.frameworks
def test_the_same_pictures_every_time(digits, tmp_path):
    prepare(tmp_path, "--shards", "6")
    assert lines(tmp_path) == lines(digits)
