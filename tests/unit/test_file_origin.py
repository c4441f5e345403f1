"""Which job has written a file of a shared folder: by the time of its last change and the spans of the jobs."""

from __future__ import annotations

import pytest

from clustertool.model.job.file_origin import FileOrigin, SharedFile, WriteSpan, origin_of
from clustertool.show.job_text import shared_files

OWN = WriteSpan("own", 100, 200)


@pytest.mark.parametrize(
    ("changed", "others", "origin"),
    [
        (100, [], FileOrigin(True)),
        (99, [], FileOrigin(False)),
        (99, [WriteSpan("before", 50, 99)], FileOrigin(False)),
        (150, [WriteSpan("before", 50, 99), WriteSpan("later", 300, 400)], FileOrigin(True)),
        (300, [WriteSpan("later", 300, 400)], FileOrigin(False, "later")),
        (500, [WriteSpan("later", 300, 400)], FileOrigin(False, "later")),
        (350, [WriteSpan("later", 300, 400), WriteSpan("last", 500, None)], FileOrigin(False, "later")),
        (600, [WriteSpan("later", 300, 400), WriteSpan("last", 500, None)], FileOrigin(False, "last")),
        (250, [WriteSpan("later", 300, 400)], FileOrigin(True)),  # its user has changed the mode, for example
        (250, [WriteSpan("before", 50, 99)], FileOrigin(True)),
        (150, [WriteSpan("with", 120, None)], FileOrigin(True, "with")),
        (110, [WriteSpan("with", 120, None)], FileOrigin(True)),
        (150, [WriteSpan("longer", 50, 300)], FileOrigin(True, "longer")),
        (250, [WriteSpan("longer", 50, 300)], FileOrigin(False, "longer")),
    ],
)
def test_the_origin_of_a_file(changed: int, others: list[WriteSpan], origin: FileOrigin) -> None:
    assert origin_of(changed, OWN, others) == origin


def test_a_job_that_runs_has_no_end() -> None:
    runs = WriteSpan("own", 100, None)
    assert origin_of(10**18, runs, []) == FileOrigin(True)
    assert origin_of(500, runs, [WriteSpan("later", 300, None)]) == FileOrigin(True, "later")


def test_each_reason_is_one_sentence() -> None:
    files = [SharedFile(f"output/{name}", FileOrigin(False), False) for name in "abcdef"]
    files += [
        SharedFile("output/x", FileOrigin(False, "J2"), False),
        SharedFile("output/y", FileOrigin(True, "J3"), True),
    ]
    assert shared_files(files) == [
        "left out: output/a, output/b, output/c, output/d and 2 more: older than this job; --path FILE copies one",
        "left out: output/x: job J2, which began later in the same folder, has changed it; --path FILE copies one",
        "output/y: job J3 ran in the same folder at the time of the last change",
    ]
    assert shared_files([SharedFile("output/a", FileOrigin(False), True)]) == ["output/a: older than this job"]
