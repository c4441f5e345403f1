"""The objects of a job are created in order, and removed where a step fails."""

import pytest

from clustertool.engines.kubernetes.cluster_api import AlreadyExists
from clustertool.engines.kubernetes.kubernetes_start import SubmittedObjects, documents
from clustertool.errors import Interrupted, PreflightError, Unreachable
from clustertool.model.kubernetes.workload import with_owner
from tests.kubernetes.prepared_objects import Objects


def manifest(kind, version="v1", job="j1", **more):
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": "ct-a", "labels": {"clustertool/job": job}},
        **more,
    }


JOB = manifest("Job", "batch/v1")
SECRET = manifest("Secret", data={"bundle.pyz": "czNjcmV0"})
SERVICE = manifest("Service", spec={"clusterIP": "None"})


def submitted(api, check=lambda: None):
    warnings = []
    objects = SubmittedObjects(api, warnings.append, check)
    return objects, warnings


def test_the_workload_is_first_and_owns_the_others():
    api = Objects()
    created = submitted(api)[0].create(JOB, [SECRET, SERVICE])
    assert api.created == ["Job", "Secret", "Service"]
    assert created["metadata"]["uid"] == "uid-Job"
    for kind in ("Secret", "Service"):
        (owner,) = api.objects[kind]["metadata"]["ownerReferences"]
        assert (owner["apiVersion"], owner["kind"], owner["name"], owner["uid"]) == (
            "batch/v1",
            "Job",
            "ct-a",
            "uid-Job",
        )
    assert "ownerReferences" not in SECRET["metadata"]


@pytest.mark.parametrize("kind", ["Job", "Secret", "Service"])
@pytest.mark.parametrize("late", [False, True])
def test_nothing_is_left_where_the_server_refuses_one(kind, late):
    api = Objects({kind: Unreachable("away") if late else PreflightError("refused")}, [kind] if late else [])
    objects, warnings = submitted(api)
    with pytest.raises(PreflightError):
        objects.create(JOB, [SECRET, SERVICE])
    assert (api.objects, warnings) == ({}, [])


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_ctrl_c_in_each_phase_leaves_nothing(at):
    api, calls = Objects(), []

    def check():
        calls.append(1)
        if len(calls) == at:
            raise Interrupted("Ctrl+C")

    objects, warnings = submitted(api, check)
    with pytest.raises(Interrupted):
        objects.create(JOB, [SECRET, SERVICE])
    assert (api.objects, warnings) == ({}, [])
    assert len(api.created) == at - 1


def test_the_object_of_another_job_stays():
    api = Objects({"Job": AlreadyExists("a job of this name")})
    api.objects["Job"] = manifest("Job", "batch/v1", job="j2")
    with pytest.raises(AlreadyExists):
        submitted(api)[0].create(JOB, [SECRET, SERVICE])
    assert list(api.objects) == ["Job"]
    assert api.deleted == []


def test_documents_have_no_secret():
    shown = documents([JOB, with_owner(SECRET, {**JOB, "metadata": {"name": "ct-a", "uid": "u"}}), SERVICE])
    assert [one.name for one in shown] == ["ct-a-job.yaml", "ct-a-secret.yaml", "ct-a-service.yaml"]
    assert "czNjcmV0" not in "".join(one.text for one in shown)
    assert "bundle.pyz: '***'" in shown[1].text
    assert SECRET["data"]["bundle.pyz"] == "czNjcmV0"
