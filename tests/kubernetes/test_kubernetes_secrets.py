"""The content of the Secret of a job is in no other object, in no command line, in no log, and not in an export."""

from __future__ import annotations

import base64
import io
import json
import os
import zipfile
from pathlib import Path

from clustertool.model.kubernetes import pod_record
from tests.cli import until
from tests.kubernetes.kube_site import KubeSite
from tests.kubernetes.test_kubernetes_runs import TRAIN, run

TOKEN = "v3ry-secret"


def content(site: KubeSite) -> list[bytes]:
    """The secrets of the job, its token, its private key by lines, and the beginning of the bundle in base64."""
    (secret,) = site.objects("Secret")
    encoded = secret["data"]["bundle.pyz"]
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(encoded))) as archive:
        identity = json.loads(archive.read("join.json"))["identity"]
    key = [line for line in identity["key"].splitlines() if "PRIVATE KEY" not in line]
    return [one.encode() for one in (TOKEN, identity["token"], *key, encoded[:100])]


def command_lines() -> bytes:
    """Of all processes of this machine, which has those of the pods, too."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            found.append(Path(f"/proc/{name}/cmdline").read_bytes())
        except OSError:
            continue
    return b"\n".join(found)


def _record_lines(log: Path) -> list[bytes]:
    """Find the record of a pod, which it prints when its job has ended. stderr may follow it."""
    return [line for line in log.read_bytes().splitlines() if line.startswith(b'{"')]


def logs(site: KubeSite) -> bytes:
    """Of all pods, with the records in them."""
    logs_of_pods = [pod.log for pod in site.runtime.pods.values()]
    until(lambda: all(map(_record_lines, logs_of_pods)), what=lambda: "the record of each pod")
    found = [log.read_bytes() for log in logs_of_pods]
    records = [pod_record.decode(_record_lines(log)[-1]).files for log in logs_of_pods]
    return b"\n".join([*found, *(data for files in records for data in files.values())])


def test_the_content_of_the_secret_is_nowhere_else(site: KubeSite) -> None:
    site.conf(SECRETS=["TOKEN"], KUBERNETES={"nodes": 2})
    site.workspace(train_py=TRAIN)
    command = site.start(*run("--env", "STEPS=240"), env={"TOKEN": TOKEN})
    command.says("rank 1 of 2 secret 11")
    secrets, seen = content(site), command_lines()
    assert b"bundle.pyz" in seen and len(secrets) > 4
    for pod in site.runtime.pods.values():
        (pod.job_dir / "seen").touch()
    done = command.wait().ends(0)
    with site.server.store.changed:
        objects = [one for (kind, _, _), one in site.server.store.objects.items() if kind != "Secret"]
    exported = site.inv("export", "--workspace", "job", env={"TOKEN": TOKEN}).ends(0).out
    assert "kind: Job" in exported and "kind: Secret" not in exported and "PRIVATE KEY" not in exported
    places = {
        "command lines": seen,
        "objects": json.dumps(objects).encode(),
        "logs": logs(site),
        "output": f"{done.out}{done.err}{exported}".encode(),
    }
    assert [(place, token) for place, text in places.items() for token in secrets if token in text] == []
