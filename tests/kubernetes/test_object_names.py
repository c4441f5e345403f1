"""Names of objects for each form of a job id, and what their annotations state."""

from __future__ import annotations

import re
from typing import Any

import pytest

from clustertool.model.kubernetes.object_names import (
    JobAbout,
    about_of,
    annotations_of_job,
    job_hash,
    job_of,
    labels,
    object_name,
)

IDS = [
    "a",
    "0",
    "20261121-030429-hzfz",
    "A",
    "a.b",
    "a_b",
    "a-b",
    "a-",
    "a.",
    "x" * 37,
    "x" * 38,
    "Y" * 64,
    "9" + "-" * 63,
]


@pytest.mark.parametrize("job", IDS)
def test_each_job_id_gives_a_dns_label(job: str) -> None:
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", object_name(job)) and len(object_name(job)) <= 40
    assert re.fullmatch(r"[a-z0-9]{1,63}", job_hash(job))


def test_ids_of_different_jobs_have_different_names() -> None:
    assert len({object_name(job) for job in IDS}) == len(IDS)
    assert object_name("20261121-030429-hzfz") == "ct-20261121-030429-hzfz"
    assert object_name("A") != object_name("a")


def workload(job: str, about: JobAbout = JobAbout()) -> dict[str, Any]:  # noqa: B008 - it is frozen
    return {"metadata": {"labels": labels(job, "ann"), "annotations": annotations_of_job(job, "ann", about)}}


def test_a_workload_states_its_job() -> None:
    about = JobAbout("name", "asked", "python train.py", "ps", 3, 1e9, "jobset")
    assert job_of(workload("A.b", about)) == "A.b"
    assert about_of(workload("A.b", about)) == about


@pytest.mark.parametrize("job", ["", "../x", "a/b", "x" * 65, "another"])
def test_an_id_that_is_none_or_not_that_of_the_label_is_no_job(job: str) -> None:
    found = workload("a")
    found["metadata"]["annotations"]["clustertool/job-id"] = job
    assert job_of(found) == ""
    if job != "another":  # with the label of this id, too
        found["metadata"]["labels"] = labels(job, "ann")
        assert job_of(found) == ""
    assert job_of({"metadata": None}) == ""


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"name": 1, "nodes": "x", "created": NaN}', 7])
def test_an_annotation_of_another_form_counts_as_absent(text: object) -> None:
    found = workload("a")
    found["metadata"]["annotations"]["clustertool/about"] = text
    assert about_of(found) == JobAbout()
