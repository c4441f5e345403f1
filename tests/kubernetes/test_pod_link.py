"""Agents over links that start a program themselves: no shell takes part."""

import sys

import pytest

from clustertool.engines.kubernetes.kubernetes_engine import PodLink
from clustertool.errors import NoPython
from clustertool.fleet.agent_client import AgentClient
from clustertool.fleet.this_machine import HereChannel, HereLink, ProgramLink
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.wire.messages import LIST_JOBS


class DirectChannels:
    """In the place of a ClusterApi: exec starts a process of this machine, whose stdin does not end before it."""

    def __init__(self):
        self.argvs, self.channels = [], []

    def channel(self, pod, argv):
        self.argvs.append((pod, tuple(argv)))
        try:
            self.channels.append(HereChannel(argv))
        except FileNotFoundError:  # as the runtime of a pod answers
            missing = "import sys; sys.exit('exec: no such file')"
            self.channels.append(HereChannel([sys.executable, "-c", missing]))
        return self.channels[-1]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    host = Host(0, "trainer-0", root_dir=str(tmp_path / "root"), name="trainer-0")
    return host, Cluster((host,), where="test", python=sys.executable)


def test_an_agent_starts_without_a_shell_and_answers(place):
    host, cluster = place
    api = DirectChannels()
    link = PodLink(api, "ct-job-0", host.name)
    agent = AgentClient.open(link, host, cluster)
    try:
        assert agent.ask(LIST_JOBS({"job": ""}), 30)["jobs"] == []
    finally:
        link.close()
    ((pod, argv),) = api.argvs
    assert (pod, argv[0], argv[-1]) == ("ct-job-0", sys.executable, "clustertool-agent")
    assert not link.alive
    assert api.channels[0].status_event.wait(30)


def test_an_image_without_python_is_named(place):
    host, cluster = place
    cluster = cluster.__class__((host,), where="test", python="/none/python3")
    with pytest.raises(NoPython, match="/none/python3 did not run: exec: no such file"):
        AgentClient.open(PodLink(DirectChannels(), "ct-job-0", host.name), host, cluster)


def test_links_with_a_shell_are_as_they_were():
    host = Host(0, "here", name="here", here=True)
    assert not isinstance(HereLink(host), ProgramLink)
    assert isinstance(PodLink(DirectChannels(), "a"), ProgramLink)
