"""Several users on the same nodes at the same time: each has a job, and none sees, disturbs or ends another one's."""

from __future__ import annotations

import os

import pytest

from tests.cli import LabSite, until
from tests.lab.lab import FIRST_UID, HOME, USERS, Node

UIDS = {"root": 0, "ann": FIRST_UID, "bob": FIRST_UID + 1}
# Trainers meet their own pservers, which say whose they are, and no other ones.
TRAINER = """
    import os, socket, time
    for server in os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(","):
        host, port = server.split(":")
        with socket.create_connection((host, int(port)), 30) as other:
            assert other.makefile().readline().strip() == os.environ["CLUSTERTOOL_JOB"], server
    print("met", os.getuid(), flush=True)
    while not os.path.exists("/tmp/go" + str(os.getuid())):
        time.sleep(0.05)
"""
PSERVER = """
    import os, socket
    server = socket.create_server((os.environ["POD_IP"], int(os.environ["PADDLE_PORT"])))
    while True:
        client, _ = server.accept()
        client.sendall(os.environ["CLUSTERTOOL_JOB"].encode() + b"\\n")
        client.close()
"""


@pytest.fixture
def people(lab, tmp_path):
    """people["ann"]: the folder of a user whose conf.py says so; all on the same two nodes."""
    nodes = lab(2, nodes={node: Node(users=("ann", "bob")) for node in (0, 1)})
    if nodes.exec(0, ["setpriv", f"--reuid={FIRST_UID}", "--clear-groups", "python3", "-c", "import ssl"]).returncode:
        pytest.skip("other users than root have no python3 here")
    made = {}
    for user in UIDS:
        made[user] = LabSite(tmp_path / user, nodes)
        made[user].conf(USER=user, PYTHON="python3")
        made[user].workspace(train_py=TRAINER, pserver_py=PSERVER)
    yield made
    for site in made.values():
        for node in (0, 1):
            (nodes.tmp(node) / f"go{UIDS['root']}").touch()
        site.close()


def of(people, user):
    """The living processes of a user's jobs, agents left out."""
    return [process for process in people[user].living() if os.stat(f"/proc/{process.pid}").st_uid == UIDS[user]]


def on_one_node(people, users, **keys):
    """The port and the folder of a user are those of each node."""
    for user in users:
        people[user].conf(USER=user, PYTHON="python3", HOSTS=["node0"], **keys)


def run(people, user, *args):
    return people[user].start("run", "-w", "job", "--mode", "ps", "--all-ranks", *args)


def met(running, user, ranks=2):
    for rank in range(ranks):
        running.says(rf"trainer {rank} node\d\] met {UIDS[user]}$")


def jobs(site):
    return [job["id"] for job in site.inv("jobs", "--json").ends(0).json["jobs"]]


@pytest.mark.chaos
def test_each_has_a_job_of_their_own(people):
    streams, ids = {}, {}
    for user in UIDS:
        streams[user] = run(people, user)
        met(streams[user], user)
        ids[user] = streams[user].says(r"^job (\S+):")
    assert "(PADDLE_PORT) is in use by" in streams["bob"].err, "the default port was root's already"
    for user, site in people.items():
        assert jobs(site) == [ids[user]]
        status = site.inv("status", "--json").ends(0).json
        assert (status["job"], status["state"], len(status["processes"])) == (ids[user], "running", 4)
        assert len(of(people, user)) >= 2 * 4
    # what is another one's is not there, for no other user
    for user, other in (("ann", "bob"), ("bob", "root"), ("root", "ann")):
        for verb in ("status", "stop", "logs"):
            assert ids[other] in people[user].inv(verb, "--job", ids[other]).ends(66).err
        people[user].inv("clean", "--job", ids[other])
    as_user = ["setpriv", f"--reuid={UIDS['bob']}", "--clear-groups"]
    for folder in (USERS / "ann/clustertool", USERS / "ann", HOME / f"clustertool/JOB{ids['root']}"):
        assert people["ann"].lab.exec(0, [*as_user, "ls", str(folder)]).returncode != 0
    # each ends their own: one by a stop, one by Ctrl+C, one by success
    assert people["bob"].inv("stop", "--all").ends(0).out.count("clean") == 1
    streams["bob"].wait().ends(143)
    assert not of(people, "bob")
    streams["root"].signal()
    streams["root"].wait().ends(130)
    assert not of(people, "root")
    assert len(of(people, "ann")) >= 2 * 4
    assert people["ann"].inv("status", "--json").ends(0).json["state"] == "running"
    for node in (0, 1):
        (people["ann"].lab.tmp(node) / f"go{UIDS['ann']}").touch()
    streams["ann"].wait().ends(0)
    assert [people[user].inv("status", "--json").ends(0).json["state"] for user in UIDS] == [
        "stopped",
        "succeeded",
        "stopped",
    ]


@pytest.mark.chaos
def test_they_start_in_the_same_moment(people):
    """All want the default port of a pserver; whoever comes second takes another one."""
    streams = {user: run(people, user) for user in UIDS}
    for user in UIDS:
        met(streams[user], user)
    for user, site in people.items():
        assert site.inv("stop").ends(0)
        streams[user].wait().ends(143)


def test_a_port_that_is_demanded_names_its_holder(people):
    on_one_node(people, ("ann", "bob"), PADDLE_PORT=7777)
    running = run(people, "ann")
    met(running, "ann", 1)
    done = run(people, "bob").wait().ends(69)
    assert "port 7777 (PADDLE_PORT) is in use by a process of user ann" in done.err
    assert not of(people, "bob")
    people["ann"].inv("stop").ends(0)


def test_one_root_dir_for_all(people):
    """A sticky directory, as /tmp is one: each has a folder there."""
    lab = people["root"].lab
    lab.exec(0, ["install", "-d", "-m", "1777", "/tmp/jobs"])
    streams = {}
    users = ("root", "ann")
    on_one_node(people, users, ROOT_DIR="/tmp/jobs")
    for user in users:
        streams[user] = run(people, user)
        met(streams[user], user, 1)
    ids = {}
    for user in users:
        (ids[user],) = jobs(people[user])
    there = {user: f"/tmp/jobs/{UIDS[user] or ''}/JOB{ids[user]}" for user in users}
    for user, folder in there.items():
        assert lab.exec(0, ["stat", "-c", "%u %a", folder]).stdout.split() == [str(UIDS[user]), "700"]
    assert people["ann"].inv("stop", "--all").ends(0)
    streams["ann"].wait().ends(143)
    assert [people[user].inv("status", "--json").ends(0).json["state"] for user in users] == ["running", "stopped"]
    assert people["root"].inv("clean", "--older-than", "0s")
    assert people["ann"].inv("status").ends(0), "root's clean is root's"
    people["root"].inv("stop").ends(0)
    streams["root"].wait().ends(143)
    until(lambda: not any(of(people, user) for user in users))
