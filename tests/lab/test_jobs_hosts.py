"""How hosts may be named: hostfiles, choices, names, addresses; the ranks get the right addresses and meet each other."""

from __future__ import annotations

import pytest

from tests.lab.lab import Node
from tests.meets import MEETS, met

OPEN_MPI = "# three machines\nnode0 slots=2 max-slots=4\nnode1   slots = 1\n\nroot@node2 slots=3\n"
DEEPSPEED = "node0 slots=2\nnode1 slots=1\nnode2 slots=3\n"
HOROVOD = "node0:2\r\nnode1:1\r\nnode2:3\r\n"
PBS = "node0\nnode0\nnode1\nnode2\nnode2\nnode2\n"


def run(site, *args):
    return met(site.inv("run", "-w", "job", "--all-ranks", *args).ends(0))


def planned(site, *args):
    """The same of a job that is not started."""
    nodes = site.inv("run", "-w", "job", "--dry", "--json", *args).ends(0).json["nodes"]
    found = {}
    for env in (process["env"] for node in nodes for process in node["processes"]):
        found[int(env["RANK"])] = {"own": env["POD_IP"], "at": (int(env["NODE_RANK"]), int(env["LOCAL_RANK"]))}
    return found


def places(found):
    return [found[rank]["at"] for rank in sorted(found)]


def test_hostfiles_of_all_launchers_mean_the_same(site):
    three = site(3)
    three.workspace(train_py=MEETS)
    expected = [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    (three.folder / "open-mpi").write_text(OPEN_MPI)
    found = run(three, "--hostfile", "open-mpi")
    assert places(found) == expected
    assert [found[rank]["own"] for rank in (0, 2, 3)] == [three.lab.address(node) for node in range(3)]
    # a cluster that is described in full: the plan needs no connection
    three.conf(ROOT_DIR="/root/clustertool", DEVICE_KIND="cpu", START_PORT=7000, LEAD_PORT=7500)
    for name, text in (("deepspeed", DEEPSPEED), ("horovod", HOROVOD), ("pbs", PBS)):
        (three.folder / name).write_text(text)
        found = planned(three, "--hostfile", name)
        assert (name, places(found)) == (name, expected)
        assert [found[rank]["own"] for rank in (0, 2, 3)] == [three.lab.address(node) for node in range(3)]
    # with a part of the hosts, and of their slots; nodes are numbered anew
    assert places(planned(three, "--hostfile", "open-mpi", "--only", "node[1-2]")) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    found = planned(three, "--hostfile", "deepspeed", "--only", "node0@node2:0,2")
    assert places(found) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    found = planned(three, "--hostfile", "horovod", "--skip", "node0:1", "--skip", "node1")
    assert places(found) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert (
        "node2 has no slot 3"
        in three.inv("run", "-w", "job", "--hostfile", "horovod", "--only", "node2:3").ends(64).err
    )


def test_a_hostfile_needs_no_conf(site):
    """And goes before the HOSTS of one."""
    pair = site(2)
    pair.workspace(train_py=MEETS)
    (pair.folder / "hosts").write_text("node1 slots=2\n")
    done = pair.inv("run", "-w", "job", "--hostfile", "hosts", "--all-ranks").ends(0)
    assert "hosts of hosts (1 node)" in done.err
    assert places(met(done)) == [(0, 0), (0, 1)]
    (pair.folder / "conf.py").unlink()
    done = pair.inv("run", "-w", "job", "--hostfile", "hosts", "--all-ranks").ends(0)
    assert met(done)[1]["own"] == pair.lab.address(1)
    assert pair.inv("status", "--hostfile", "hosts").ends(0)


def test_hosts_and_slots_of_conf_are_chosen_too(site):
    three = site(3)
    three.workspace(train_py="")
    three.conf(HOSTS=["node0", {"host": "node[1-2]", "nproc": 3}])
    assert places(planned(three)) == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    assert places(planned(three, "--only", "node[0,2]", "--skip", "node2:0")) == [(0, 0), (1, 0), (1, 1)]


# -- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.chaos
def test_addresses_that_are_prefixes_of_each_other(site):
    """10.77.0.1, 10.77.0.10 and 10.77.0.11, as hosts and in explicit lists in any order."""
    many = site(11)
    chosen = [many.lab.address(node) for node in (0, 9, 10)]
    assert all(address.startswith(chosen[0]) for address in chosen)
    many.workspace(train_py=MEETS)
    many.conf(HOSTS=chosen)
    found = run(many, "--nproc-per-node", 2)
    assert [found[rank]["own"] for rank in range(6)] == [address for address in chosen for _ in range(2)]
    assert {reported["master"] for reported in found.values()} == {chosen[0]}
    order = [chosen[2], chosen[0], chosen[1], chosen[0]]
    found = run(many, "--workers", ",".join(order))
    assert [found[rank]["own"] for rank in range(4)] == order
    assert places(found) == [(2, 0), (0, 0), (1, 0), (0, 1)]
    assert {reported["master"] for reported in found.values()} == {order[0]}
    assert places(run(many, "--only", chosen[1])) == [(0, 0)]


def test_names_become_addresses(site):
    """Whatever a node's own hosts file says of its name: Debian's 127.0.1.1 is no address that others can reach."""
    three = site(3, nodes={node: Node(hosts=(f"127.0.1.1 node{node}",)) for node in range(3)})
    assert three.lab.exec(1, ["getent", "hosts", "node1"]).stdout.split()[0] == "127.0.1.1"
    three.workspace(train_py=MEETS)
    addresses = [three.lab.address(node) for node in range(3)]
    found = run(three)
    assert [found[rank]["own"] for rank in range(3)] == addresses
    assert found[2]["hosts"] == addresses
    assert {reported["master"] for reported in found.values()} == {addresses[0]}
    # the same by the interface, and where explicit lists give names
    three.conf(PADDLE_NIC="eth0")
    assert [reported["own"] for _, reported in sorted(planned(three, "--workers", "node2,node0").items())] == [
        addresses[2],
        addresses[0],
    ]


def test_pservers_of_nodes_that_call_themselves_127_0_1_1(site):
    pair = site(2, nodes={node: Node(hosts=(f"127.0.1.1 node{node}",)) for node in range(2)})
    pair.workspace(
        train_py="""
        import os, socket
        servers = os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
        for server in servers:
            host, port = server.split(":")
            with socket.create_connection((host, int(port)), 30) as other:
                assert other.makefile().readline().strip() == server
        print("met", servers, flush=True)
    """,
        pserver_py="""
        import os, socket
        own = os.environ["POD_IP"] + ":" + os.environ["PADDLE_PORT"]
        server = socket.create_server((os.environ["POD_IP"], int(os.environ["PADDLE_PORT"])))
        while True:
            client, _ = server.accept()
            client.sendall(own.encode() + b"\\n")
            client.close()
    """,
    )
    done = pair.inv("run", "-w", "job", "--mode", "ps", "--all-ranks").ends(0)
    endpoints = [f"{pair.lab.address(node)}:7164" for node in range(2)]
    assert done.out.count(f"met {endpoints}") == 2


def test_a_pserver_that_asks_for_its_name_is_reported(site):
    """It listens on 127.0.1.1, where no other node can reach it: the user reads why nothing goes on."""
    pair = site(2, nodes={1: Node(hosts=("127.0.1.1 node1",))})
    pair.workspace(
        train_py="",
        pserver_py="""
        import os, socket, time
        server = socket.create_server((socket.gethostbyname(socket.gethostname()), int(os.environ["PADDLE_PORT"])))
        time.sleep(600)
    """,
    )
    running = pair.start("run", "-w", "job", "--mode", "ps")
    address = pair.lab.address(1)
    running.says(f"warning: pserver 1 on node1 listens on 127.0.1.1 port 7164, the others expect it on {address}:7164$")
    (process,) = [
        p for p in pair.inv("status", "--json").ends(0).json["processes"] if (p["role"], p["rank"]) == ("pserver", 1)
    ]
    assert process["note"] == f"listens on 127.0.1.1 port 7164, not on {address}:7164"
    running.signal()
    running.wait().ends(130)
    assert "pserver 0" not in running.err
