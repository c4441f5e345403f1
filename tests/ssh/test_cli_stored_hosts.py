"""Jobs that were started without a conf.py are found again by their id, from any folder of the laptop."""

from __future__ import annotations

import json

import pytest

from tests.cases import POLITE
from tests.ssh.test_cli_clusterrun import without_conf

WRITES = """
import os, pathlib
out = pathlib.Path(os.environ["CLUSTERTOOL_OUTPUT"])
out.joinpath("model.pt").write_text("of rank " + os.environ["RANK"])
print("trained", flush=True)
"""


@pytest.mark.chaos
def test_verbs_find_the_hosts_of_a_job_from_any_folder(site, tmp_path):
    pair = site(2)
    without_conf(pair)
    pair.workspace(".", train_py=WRITES, polite_py=POLITE)
    ips = ",".join(server.entry for server in pair.servers)
    anywhere = tmp_path / "anywhere"
    anywhere.mkdir()
    done = pair.clusterrun("--ips", ips, "train.py").ends(0)
    shown = pair.clustertool("logs", "--job", done.job, cwd=anywhere).ends(0)
    assert "trained" in shown.out
    assert f"conf: hosts of job {done.job}, stored when it was started (2 nodes)" in shown.err
    pair.clustertool("fetch", "--rank", "all", cwd=anywhere).ends(0)
    assert (anywhere / f"JOB{done.job}/rank1/model.pt").read_text() == "of rank 1", "without an id: the newest"

    running = pair.clusterrun("--ips", ips, "--detach", "--name", "long", "polite.py").ends(0).job
    (anywhere / "conf.py").write_text('HOSTS = ["192.0.2.7"]\n')
    assert pair.clustertool("status", "--job", running, "--json", cwd=anywhere).ends(0).json["state"] == "running"
    (anywhere / "conf.py").unlink()
    stopped = pair.clustertool("stop", "--job", "long", cwd=anywhere).ends(0)
    assert f"job {running}: 127.0.0.[2-3]: clean" in stopped.out
    assert "stop --all" not in stopped.err
    assert "no conf.py" in pair.clustertool("stop", "--all", cwd=anywhere).ends(78).err

    stored = pair.laptop / ".local/state/clustertool/jobs"
    assert sorted(path.stem for path in stored.iterdir()) == sorted([done.job, running])
    pair.clustertool("clean", "--job", "long", cwd=anywhere).ends(0)
    assert [path.stem for path in stored.iterdir()] == [done.job]
    unknown = pair.clustertool("logs", "--job", running, cwd=anywhere).ends(78)
    assert f"no hosts of a job '{running}' are stored" in unknown.err
    stored.chmod(0o777)
    refused = pair.clustertool("logs", "--job", done.job, cwd=anywhere).ends(78)
    assert "all users may write" in refused.err
    assert json.loads((stored / f"{done.job}.json").read_text())["keys"] == {}
