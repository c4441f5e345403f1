"""Job ids, paths and records of a hostile node: nothing is written outside a folder, and the other nodes' answers stand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertool.model.config.job import valid_job_id
from clustertool.model.paths import is_job_id
from tests.cli import LoopSite
from tests.security.hostile import site_with_hostile

GOOD = ["20260101-120000-ab2c", "a", "A.b_c-d", "9" * 64]
BAD = [
    "",
    ".",
    "..",
    "-x",
    ".x",
    "_x",
    "x/../../up",
    "/etc",
    "x y",
    "x\n",
    "x\x1b[2J",
    "x\0",
    "ü",
    "x" * 65,
    "٣",
    "x\u202e",
]

# `jobs` names an id that leads out of the folder, newer than all others; `status` names a directory of the node's own.
HOSTILE = """
    def answer(request):
        if request["type"] == "jobs":
            reply(request, jobs=[job(ID, created=4e9)])
        elif request["type"] in ("status", "report"):
            event = dict(type="job", t=1.0, id=ID, node=NODE, nodes=NODES, processes=[
                dict(role="trainer", rank=0, local_rank=0, endpoint="", log="log/workerlog.0")])
            reply(request, node=NODE, dir="/tmp", heartbeat=None, events=[event], supervised=False, usage={})
        else:
            reply(request, jobs={})
"""


@pytest.mark.parametrize("text", GOOD)
def test_ids_that_are_accepted(text: str) -> None:
    assert is_job_id(text)
    assert valid_job_id(text) == text


@pytest.mark.parametrize("text", BAD)
def test_ids_that_are_refused(text: str) -> None:
    assert not is_job_id(text)


def hello(site: LoopSite) -> str:
    """A finished job on the honest node alone."""
    site.workspace(train_py="import os; open(os.environ['CLUSTERTOOL_OUTPUT'] + '/model', 'w').write('honest')")
    return site.inv("run", "--workspace", "job", "--only", site.name(0)).ends(0).job


def test_an_id_never_leads_out_of_the_folder(site: Callable[..., LoopSite], tmp_path: Path) -> None:
    """The hostile node's job would be the newest one. The honest node's job is used. All nodes of that job have answered."""
    one = site(2)
    outside = tmp_path / "outside"
    up = "../" * (len(one.folder.parts) + 1)
    site_with_hostile(one, 1, f"ID = {'x/' + up + str(outside).lstrip('/')!r}\n" + _dedented(HOSTILE))
    (one.folder / "JOBx").mkdir()
    job = hello(one)
    for verb, made in (("fetch", f"JOB{job}"), ("report", f"JOB{job}.html")):
        done = one.inv(verb)
        assert not outside.exists(), verb
        assert done.code == 0, verb
        assert (one.folder / made).exists(), done.err


def _dedented(text: str) -> str:
    import textwrap

    return textwrap.dedent(text)


def test_a_record_that_a_program_changed_is_an_error_of_its_node(site: Callable[..., LoopSite]) -> None:
    """The id of a job is the name of its directory, whatever its records say."""
    one = site(1)
    job = hello(one)
    path = one.jobs(0)[0] / ".clustertool" / "events.jsonl"
    lines = path.read_text().splitlines()
    header = json.loads(lines[0])
    path.write_text("\n".join([json.dumps({**header, "id": "../../evil"}), *lines[1:]]) + "\n")
    assert [found["id"] for found in one.inv("jobs", "--json").ends(0).json["jobs"]] == [job]
    verbs = [["jobs"], ["status"], ["report"], ["clean", "--older-than", "1h", "--dry"]]
    for created, some in ((1e300, verbs), ("yesterday", verbs[:2])):
        path.write_text("\n".join([json.dumps({**header, "created": created}), *lines[1:]]) + "\n")
        for verb in some:
            done = one.inv(*verb)
            assert done.code != 70, (verb, done.err)
            assert "a bug" not in done.err
