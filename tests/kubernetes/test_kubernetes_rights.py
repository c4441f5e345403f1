"""The Role in docs/kubernetes.md is enough for a job, and each of its needed rules is needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.cli import REPO
from tests.kubernetes.kube_site import KubeSite

HELLO = "import os\nprint('rank', os.environ['RANK'], flush=True)\n"


def role() -> Any:
    import yaml

    (text,) = re.findall(r"```yaml\n(.*?)```", (REPO / "docs/kubernetes.md").read_text(), re.S)
    return yaml.safe_load(text)["rules"]


def test_the_role_of_the_page_is_enough(site: KubeSite, another_user: Callable[[str], KubeSite]) -> None:
    ann = another_user("ann")
    ann.server.add_user("ann", role())
    ann.workspace(train_py=HELLO)
    ann.conf(KUBERNETES={"nodes": 2})
    checked = ann.inv("check", "--json")
    assert checked.code == 0, checked.out + checked.err
    done = ann.inv("run", "--workspace", "job", "--all-ranks").ends(0)
    assert all(f"rank {rank}" in done.out for rank in range(2))
    assert ann.inv("status", "--json").ends(0).json["state"] == "succeeded"
    assert "may not list nodes" in ann.inv("gpus").ends(77).err
    ann.inv("clean", "--job", done.job).ends(0)
    site.is_empty()


def test_check_names_each_right_that_is_missing(site: KubeSite, another_user: Callable[[str], KubeSite]) -> None:
    ann = another_user("ann")
    ann.server.add_user("ann", [rule for rule in role() if "pods/exec" not in rule["resources"]])
    refused = ann.inv("check")
    assert refused.code == 77 or refused.code == 69
    assert "pods/exec" in refused.out + refused.err
