"""The same command typed on each machine: no laptop, no ssh. The machines have only the network, a secret and their folders."""

from __future__ import annotations

import json
import re
import shlex
import time

import pytest

from tests.cli import CLUSTERRUN, REPO, LabSite
from tests.lab.lab import Node
from tests.lab.typed import SECRET, TypedSite, interrupt, together

PORT = 8090
# All ranks train one model together: sums over a connection to rank 0, in rank order, so that the losses are always the same.
TRAINS = """
    import json, os, socket, struct, sys
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with open(os.path.join(os.environ["CLUSTERTOOL_OUTPUT"], f"env-{rank}.json"), "w") as file:
        json.dump({"env": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd()}, file)
    if rank == 0:
        server, peers = socket.create_server(("", place[1])), {}
        while len(peers) < world - 1:
            peer = server.accept()[0]
            peers[struct.unpack("i", peer.recv(4))[0]] = peer
    else:
        import time
        for _ in range(200):
            try:
                root = socket.create_connection(place)
                break
            except OSError:
                time.sleep(0.05)
        root.sendall(struct.pack("i", rank))

    def total(value):
        if rank:
            root.sendall(struct.pack("d", value))
            return struct.unpack("d", root.recv(8, socket.MSG_WAITALL))[0]
        value += sum(struct.unpack("d", peers[one].recv(8, socket.MSG_WAITALL))[0] for one in sorted(peers))
        for peer in peers.values():
            peer.sendall(struct.pack("d", value))
        return value

    weight = 0.0
    for step in range(5):
        loss = total((weight * (rank + 1) - 3 * (rank + 1)) ** 2) / world
        weight -= 0.02 * total(2 * (rank + 1) * (weight * (rank + 1) - 3 * (rank + 1))) / world
        print(f"step {step} loss {loss!r}", flush=True)
"""
WAITS = """
    import os, time
    print("ready", os.environ["RANK"], flush=True)
    time.sleep(600)
"""
PROMPT = (
    "from os import environ as e; print('rank', e['RANK'], 'of', e['WORLD_SIZE'], 'node', e['NODE_RANK'], flush=True)"
)


@pytest.fixture(scope="module")
def machines(module_lab):
    return module_lab(3)


@pytest.fixture
def typed(machines):
    """typed(2, train_py=...): the folders of so many machines, each with the same files."""
    made: list[TypedSite] = []

    def make(count, **files):
        folder = f"work{len(list(machines.home(0).glob('work*')))}"
        sites = [TypedSite(machines, node, folder) for node in range(count)]
        for site in sites:
            site.workspace(".", **files)
        made.extend(sites)
        return sites

    yield make
    for site in made:
        site.close()


@pytest.fixture
def there(machines):
    return f"{machines.address(0)}:{PORT}"


def losses(text):
    return re.findall(r"step (\d) loss (\S+)", text)


def reports(folder):
    """Rank -> what it found, as it wrote it into its output."""
    found = {}
    for path in folder.glob("JOB*/output/env-*.json"):
        found[int(path.stem[4:])] = json.loads(path.read_text())
    return found


def table():
    """The variables that differ, as docs/without-ssh.md names them."""
    page = (REPO / "docs/without-ssh.md").read_text()
    section = page.partition("\n## The environment of a rank\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    assert rows[2].strip() == "variables of your shell"
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_a_job_is_the_same_as_over_ssh(machines, typed, there, tmp_path):
    """The same ranks on the same nodes, the same losses, and the same environment but for what a page names."""
    ssh = LabSite(tmp_path / "laptop", machines)
    ssh.conf(HOSTS=["node0", "node1"])
    ssh.workspace(train_py=TRAINS)
    options = ("--nproc-per-node", 2, "--rdzv-id", "same")
    over = ssh.start("--workspace", "job", *options, "train.py", "-x", program=CLUSTERRUN).wait().ends(0)
    plan = ssh.inv("run", "-w", "job", "--nproc-per-node", 2, "--dry", "--json").ends(0).json
    computed = {name for node in plan["nodes"] for process in node["processes"] for name in process["env"]}
    shell = {"MINE": "1", "http_proxy": "http://proxy", "RANK": "9", "OMP_NUM_THREADS": "3"}
    shell["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    sites = typed(2, train_py=TRAINS)
    done = together(sites, "--master", there, "--nnodes", 2, *options, "train.py", "-x", env=shell)
    assert [re.findall(r"^\[trainer (\d) ", one.out, re.M)[0] for one in done] == ["0", "2"]
    assert len(losses(over.out)) == 5
    assert losses(done[0].out) == losses(done[1].out) == losses(over.out)
    by_ssh = {rank: one for node in range(2) for rank, one in reports(ssh.root(node)).items()}
    differ = table() - {"CLUSTERTOOL_SECRET"}
    for node, site in enumerate(sites):
        here = reports(site.root(0))
        assert sorted(here) == [2 * node, 2 * node + 1] == sorted(reports(ssh.root(node)))
        for rank, mine in here.items():
            assert (mine["argv"], mine["cwd"]) == (["train.py", "-x"], str(site.inside))
            ours, theirs = mine["env"], by_ssh[rank]["env"]
            assert {n: ours.get(n) for n in computed - differ} == {n: theirs.get(n) for n in computed - differ}
            assert ours["MASTER_PORT"] != str(PORT), "that is the coordinator's"
            assert (ours["MINE"], ours["TORCHELASTIC_RUN_ID"], ours["PADDLE_JOB_ID"]) == ("1", "same", "same")
            assert not {"http_proxy", "CLUSTERTOOL_SECRET"} & set(ours)
    for name in differ & computed:  # the page names no variable that is the same
        assert any(one["env"][name] != by_ssh[rank]["env"][name] for rank, one in reports(sites[0].root(0)).items()), (
            name
        )
    no_secret_is_left(sites)


def no_secret_is_left(sites):
    for site in sites:
        for path in site.folder.rglob("*"):
            if path.is_file():
                assert SECRET.encode() not in path.read_bytes(), path
                assert b"PRIVATE KEY" not in path.read_bytes(), path


# Of PyTorch's and Paddle's documents, with the lab's address; one more of Paddle's is in test_folders_that_differ_are_named.
EXAMPLES = [
    [
        "--nnodes=2 --nproc-per-node=2 --max-restarts=3 --rdzv-id=100 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400",
    ]
    * 2,
    [
        "--nproc-per-node=2 --nnodes=2 --node-rank=0 --master-addr=HOST --master-port=1234",
        "--nproc-per-node=2 --nnodes=2 --node-rank=1 --master-addr=HOST --master-port=1234",
    ],
    [
        "--master HOST:8765 --nnodes 2 --nproc_per_node 2 --rank 0 --run_mode rpc",
        "--master HOST:8765 --nnodes 2 --nproc_per_node 2 --rank 1 --run_mode rpc",
    ],
]
ROLES = """
    import os, socket, time
    e = os.environ
    servers = e["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
    print(e["TRAINING_ROLE"], e["CLUSTERTOOL_RANK"], e["PADDLE_TRAINERS_NUM"], len(servers), flush=True)
    if e["TRAINING_ROLE"] == "PSERVER":
        listener = socket.create_server((e["POD_IP"], int(e["PADDLE_PORT"])))
        time.sleep(600)
"""


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(EXAMPLES[0], id="torchrun"),
        pytest.param(EXAMPLES[1], id="torch.distributed.launch", marks=pytest.mark.chaos),
        pytest.param(EXAMPLES[2], id="rpc", marks=pytest.mark.chaos),  # tests/unit/test_launchers.py has the options
    ],
)
def test_examples_of_the_launchers_documents(machines, typed, lines):
    sites = typed(2, train_py=PROMPT)
    commands = [line.replace("HOST", machines.address(0)).split() for line in lines]
    running = [site.types(*command, "train.py") for site, command in zip(sites, commands)]
    for node, one in enumerate(running):
        done = one.wait().ends(0)
        assert f"rank {2 * node} of 4 node {node}" in done.out
        assert (
            sites[node].folder / f"log/workerlog.{2 * node + 1}"
        ).read_text() == f"rank {2 * node + 1} of 4 node {node}\n"
        assert done.last == "clustertool: exit 0 (job): all trainers are done"


def test_parameter_servers_of_paddles_documents(machines, typed):
    sites = typed(2, train_py=ROLES)
    master = f"{machines.address(0)}:9090"
    together(sites, "--master", master, "--server_num=2", "--trainer_num=2", "--nnodes", 2, "train.py")
    for node, site in enumerate(sites):
        for rank in (2 * node, 2 * node + 1):
            assert (site.folder / f"log/workerlog.{rank}").read_text() == f"TRAINER {rank} 4 4\n"
            assert (site.folder / f"log/serverlog.{rank}").read_text() == f"PSERVER {rank} 4 4\n"


def test_the_first_machine_of_paddles_documents_names_no_place(machines, typed):
    """It shows the command for the other one."""
    sites = typed(2, train_py=PROMPT)
    first = sites[0].types("--nnodes", 2, "train.py", "--lr", "0.1 x")
    shown = first.says("type this on the other machine: clusterrun (.*)")
    assert shown.startswith(f"--master {machines.address(0)}:")
    assert shown.endswith(" --nnodes 2 train.py --lr '0.1 x'")
    done = sites[1].types(*shlex.split(shown)).wait().ends(0), first.wait().ends(0)
    assert ["rank 1 of 2 node 1" in done[0].out, "rank 0 of 2 node 0" in done[1].out] == [True, True]
    assert "another command was typed" not in done[1].err


# -- how it can fail ------------------------------------------------------------------------------------------------------


def test_a_machine_with_another_secret(typed, there):
    """It ends with 77, and the others wait on for the right one."""
    sites = typed(2, train_py=PROMPT)
    first = sites[0].types("--master", there, "--nnodes", 2, "train.py")
    first.says("1 of 2 machines is here")
    other = sites[1].types("--master", there, "--nnodes", 2, "train.py", env={"CLUSTERTOOL_SECRET": SECRET[::-1]})
    done = other.wait().ends(77)
    assert "give all machines the same secret" in done.err
    assert "--rdzv-id and HOST:PORT must be typed alike" in done.err
    sites[1].types("--master", there, "--nnodes", 2, "train.py").wait().ends(0)
    first.wait().ends(0)


def test_another_number_of_machines(typed, there):
    sites = typed(2, train_py=PROMPT)
    first = sites[0].types("--master", there, "--nnodes", 2, "train.py")
    first.says("1 of 2 machines is here")
    done = sites[1].types("--master", there, "--nnodes", 3, "train.py").wait().ends(64)
    assert re.search(r"\b3\b.*\b2\b|\b2\b.*\b3\b", done.err)
    interrupt(first)
    first.wait().ends(130)
    assert not sites[0].root(0).exists() or not list(sites[0].root(0).glob("JOB*")), "nothing was started"


def test_one_machine_is_missing(typed, there):
    sites = typed(2, train_py=PROMPT)
    given = ("--rdzv-endpoint", there, "--nnodes", 3, "--rdzv-conf", "join_timeout=1.5")
    running = [site.types(*given, "--node-rank", node, "train.py") for node, site in enumerate(sites)]
    for one in running:
        done = one.wait().ends(75)
        assert re.search(r"missing.* 2\b|index 2\b", done.err)
        assert done.last.startswith("clustertool: exit 75 (tool)")
    assert not [path for site in sites for path in site.root(0).glob("JOB*")]


def test_one_machine_too_many(typed, there):
    sites = typed(3, train_py=WAITS)
    running = [site.types("--master", there, "--nnodes", 2, "train.py") for site in sites[:2]]
    for one in running:
        one.says("ready")
    done = sites[2].types("--master", there, "--nnodes", 2, "train.py").wait().ends(64)
    assert "all its 2" in done.err
    interrupt(running[1])
    for one in running:
        one.wait().ends(130)
    for site in sites:
        site.gone()


@pytest.mark.parametrize("seconds", [0, pytest.param(30, marks=pytest.mark.chaos)])
def test_the_first_machine_is_late(typed, there, seconds):
    """The others try again until it is there."""
    sites = typed(2, train_py=PROMPT)
    early = sites[1].types("--master", there, "--nnodes", 2, "train.py")
    early.says("no connection to 10.77.0.1:8090 yet: .*refused")
    time.sleep(seconds)
    sites[0].types("--master", there, "--nnodes", 2, "train.py").wait().ends(0)
    early.wait().ends(0)


def test_the_port_is_in_use(machines, typed, there):
    sites = typed(1, train_py=PROMPT)
    hold = f"import socket; s = socket.create_server(('', {PORT})); print('up', flush=True); input()"
    holder = sites[0].start("-c", hold, program=["python3"], terminal=True)
    holder.says("up")
    done = sites[0].types("--master", there, "--nnodes", 2, "train.py").wait().ends(69)
    assert re.search(rf"port {PORT}.*in use by.*python", done.err)
    holder.type("\n")
    holder.wait()


# -- one terminal among others -------------------------------------------------------------------------------------------


def test_ctrl_c_on_a_machine_that_is_not_the_first(typed, there):
    sites = typed(2, train_py=WAITS)
    running = [site.types("--master", there, "--nnodes", 2, "--nproc-per-node", 2, "train.py") for site in sites]
    running[0].says(r"^\[trainer 0 node0\] ready 0")
    running[1].says(r"^\[trainer 2 node1\] ready 2")
    assert len(sites[0].living()) > 2
    taken = sites[0].clustertool("stacks").ends(69)  # the other machine cannot be asked
    assert re.search(r"^trainer 0-1: .*(sleep|nanosleep)", taken.out, re.M) and "trainer 2" not in taken.out
    interrupt(running[1])
    for one in running:
        done = one.wait().ends(130)
        assert done.last.startswith("clustertool: exit 130 (tool): ")
    assert "Ctrl+C: stopping the job on all nodes" in running[1].err
    for site in sites:
        site.gone()


def test_a_failure_on_another_machine_is_known_on_all(typed, there):
    fails = PROMPT + "\nimport sys, time\nif e['RANK'] == '1': sys.exit('bad shard')\ntime.sleep(600)\n"
    sites = typed(2, train_py=fails)
    done = together(sites, "--master", there, "--nnodes", 2, "train.py", codes=[1, 1])
    assert "rank=[1] was aborted" in done[0].err
    assert "the log of trainer 1 is on node1: log/workerlog.1" in done[0].err
    assert "bad shard" in done[1].out
    assert all(one.last.startswith("clustertool: exit 1 (job): ") for one in done)


def test_folders_that_differ_are_named(machines, typed):
    """With the example of Paddle's documents."""
    sites = typed(2, train_py=PROMPT)
    (sites[1].folder / "model.py").write_text("x = 1\n")
    line = ("--master", f"{machines.address(0)}:38714", "--nnodes", 2, "train.py")
    running = [site.types(*line, *arguments) for site, arguments in zip(sites, [(), ("--lr", "0.2")])]
    done = [one.wait().ends(0) for one in running]
    assert [re.findall(r"rank (\d) of 2 node (\d)", one.out) for one in done] == [[("0", "0")], [("1", "1")]]
    assert "node1" in re.search(r"^warning: .*differ.*$", done[0].err, re.M)[0]
    assert "warning: node1: another command was typed than on node0, which runs everywhere" in done[0].err
    assert "train.py --lr 0.2'" in done[0].err


def test_one_folder_for_all_machines_and_a_name_for_the_first(module_lab):
    """A shared home, and Debian's entry for a machine's own name: 127.0.1.1."""
    pair = module_lab(2, shared_home=True, nodes={0: Node(hosts=("127.0.1.1 node0",))})
    sites = [TypedSite(pair, node) for node in (0, 1)]
    sites[0].workspace(".", train_py=TRAINS)
    done = together(sites, "--master", f"node0:{PORT}", "--nnodes", 2, "train.py")
    assert losses(done[0].out)
    assert sorted(sites[0].root(0).glob("node?/JOB*/log/workerlog.?"))[-1].parts[-4] == "node1"
    assert {"workerlog.0", "workerlog.1"} <= {
        path.name for path in (sites[0].folder / "log").iterdir() if path.exists()
    }
