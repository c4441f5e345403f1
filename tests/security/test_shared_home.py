"""One home on several machines, and a name that leads to another one now: the records of a job are seen where it never ran."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cli import LabSite


def leads_to(site: LabSite, node: int) -> None:
    config = site.lab.laptop_home / ".ssh/config"
    config.write_text(f"Host gpu\n  HostName {site.name(node)}\n")
    config.chmod(0o600)


@pytest.mark.chaos
def test_a_name_that_leads_to_another_machine(lab_site: Callable[..., LabSite]) -> None:
    pair = lab_site(2, shared_home=True)
    pair.conf(HOSTS=["gpu"])
    pair.workspace(train_py="import time; print('ready', flush=True); time.sleep(600)")
    leads_to(pair, 0)
    job = pair.inv("run", "-w", "job", "--detach").ends(0).job
    leads_to(pair, 1)
    why = "it runs (or ran) on node0: ask there"
    assert [one["state"] for one in pair.inv("jobs", "--json").ends(0).json["jobs"]] == ["unknown"]
    status = pair.inv("status", "--json").ends(69)
    assert status.json["state"] == status.json["processes"][0]["state"] == "unknown" and why in status.err
    for verb in (["stop"], ["stop", "--job", job], ["clean", "--older-than", "0s"], ["report"], ["attach"]):
        done = pair.inv(*verb).ends(69)
        assert why in done.err or verb == ["stop"], verb
    assert pair.inv("logs").ends(0).out.endswith("ready\n")
    assert len(pair.jobs(0)) == 1 and pair.living()
    leads_to(pair, 0)
    assert pair.inv("stop").ends(0).lines() == [f"job {job}: gpu: clean"]
    pair.gone()
    leads_to(pair, 1)  # it has ended: its own records prove it, from anywhere
    assert pair.inv("stop", "--job", job).ends(0).lines() == [f"job {job}: gpu: ended already"]
    assert pair.inv("clean", "--job", job, "--json").ends(0).json["removed"] == [job]
    assert not pair.jobs(0)
