"""ClusterApi and PodLink with the API server of the tests: TLS, rights, exec, and a server that is away."""

from __future__ import annotations

import sys
import threading
import time
from collections import namedtuple

import pytest

from clustertool.engines.kubernetes.cluster_api import ClusterApi
from clustertool.engines.kubernetes.kubernetes_engine import PodLink
from clustertool.errors import AuthError
from clustertool.fleet.agent_client import AgentClient
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.wire.messages import LIST_JOBS
from tests.cli import until
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.plain_pods import PlainPods

Place = namedtuple("Place", "context namespace", defaults=("", ""))


@pytest.fixture
def server(tmp_path, monkeypatch):
    with ApiServer(PlainPods(tmp_path / "pods")) as made:
        monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig(tmp_path / "kubeconfig")))
        yield made


@pytest.fixture
def pod(server):
    api = ClusterApi(Place())
    command = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"]
    container = {"name": "clustertool", "image": "any", "command": command}
    spec = {"restartPolicy": "Never", "containers": [container], "terminationGracePeriodSeconds": 1}
    api.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec})
    until(lambda: (api.get("Pod", "one") or {}).get("status", {}).get("phase") == "Running", 60)
    return api


def test_a_program_gets_a_megabyte_and_gives_it_back(pod):
    echo = "import os\nn = 1 << 20\nwhile n:\n  d = os.read(0, 65536); os.write(1, d); n -= len(d)\nos._exit(5)"
    channel = pod.channel("one", [sys.executable, "-c", echo])
    channel.settimeout(60)
    sent = bytes(range(256)) * 4096
    threading.Thread(target=channel.sendall, args=(sent,), daemon=True).start()
    found = b""
    while len(found) < len(sent):
        found += channel.recv(1 << 16)
    assert found == sent
    assert channel.status_event.wait(60)
    assert channel.exit_status == 5


def test_an_agent_answers_through_the_server(pod, tmp_path):
    host = Host(0, "one", root_dir=str(tmp_path / "root"), name="one")
    cluster = Cluster((host,), where="test", python=sys.executable)
    link = PodLink(pod, "one")
    try:
        assert AgentClient.open(link, host, cluster).ask(LIST_JOBS({"job": ""}), 60)["jobs"] == []
    finally:
        link.close()


@pytest.mark.chaos
def test_a_server_that_is_away_for_20_seconds_is_waited_for(server):
    notes = []
    api = ClusterApi(Place(), notes.append)
    api.list_objects("Pod")
    server.away(20)
    began = time.monotonic()
    assert api.list_objects("Pod") == []
    assert 15 < time.monotonic() - began < 40
    assert len(notes) == 1


def test_missing_rights_and_a_wrong_token_are_refused(server, tmp_path, monkeypatch):
    server.add_user("ann", [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}])
    path = server.kubeconfig(tmp_path / "ann", "ann")
    monkeypatch.setenv("KUBECONFIG", str(path))
    api = ClusterApi(Place())
    assert api.list_objects("Pod") == []
    with pytest.raises(AuthError, match="may not list secrets"):
        api.list_objects("Secret")
    assert not api.allowed("list", "", "secrets")
    assert api.user() == "ann"
