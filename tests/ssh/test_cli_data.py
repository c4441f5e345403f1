"""Data on the way from a file on the laptop to the trainers: every shard is read once, by the trainer it belongs to."""

from __future__ import annotations

import json
import os
import re

from tests.cli import INV

# What a trainer was given: its list, and whether each file is there and what is in it.
READS = """
    import json, os
    with open(os.environ["CLUSTERTOOL_SHARDS"], encoding="utf-8", errors="surrogateescape") as file:
        paths = file.read().split("\\n")[:-1]
    texts = [open(path, errors="surrogateescape").read() for path in paths]
    inside = [os.path.relpath(path) for path in paths if os.path.isabs(path)]
    print(json.dumps([os.environ["CLUSTERTOOL_RANK"], inside, texts]), flush=True)
"""


def reading(site, shards):
    """A workspace whose trainers tell what they read; `shards`: relative names, each file holds its own name."""
    folder = site.workspace(train_py=READS)
    for name in shards:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, errors="surrogateescape")
    return folder


def read(done):
    """rank -> the shards that it was given, in its order, after a check of each."""
    found = {}
    for line in done.lines("[trainer "):
        rank, paths, texts = json.loads(line.partition("] ")[2])
        assert paths == texts
        found[int(rank)] = paths
    return found


def test_every_shard_is_read_once(site):
    """Two sets, uneven counts, nodes of different sizes, names as odd as file systems allow."""
    pair = site(2)
    odd = "it's a \udcff $(set)"
    first, second = [f"data/{odd}-{n:05}.txt" for n in range(7)], [f"more/y-{n}" for n in range(3)]
    folder = reading(pair, [*first, *second, "data/README", "data/.x-00007.txt"])
    (folder / "job.toml").write_text('[shards]\nfiles = ["data/*-[0-9]*", "more/*"]\n')
    hosts = [f"{server.address}:{server.port}" for server in pair.servers]
    pair.conf(HOSTS=[{"host": hosts[0], "nproc": 1}, {"host": hosts[1], "nproc": 2}])
    found = read(pair.clustertool("run", "-w", "job", "--all-ranks").ends(0))
    assert found == {rank: first[rank::3] + second[rank::3] for rank in range(3)}
    # the command line goes before job.toml
    found = read(pair.clustertool("run", "-w", "job", "--all-ranks", "--shards", "./more/y-[0,1,2]").ends(0))
    assert found == {rank: [second[rank]] for rank in range(3)}


def test_shards_that_are_not_complete_start_nothing(site):
    pair = site(2)
    folder = reading(pair, ["d/x-0", "d/x-2"])
    done = pair.clustertool("run", "-w", "job", "--shards", "d/*").ends(65)
    assert "number 1 is missing, 'd/x-2' is there" in done.err
    (folder / "d/x-2").unlink()
    done = pair.clustertool("run", "-w", "job", "--shards", "d/*").ends(65)
    assert "1 shard of 'd/*' for 2 trainers: 1 would read nothing" in done.err
    (folder / "d/x-1").symlink_to("x-0")
    assert (
        "'d/x-1' matches [shards] but is a link" in pair.clustertool("run", "-w", "job", "--shards", "d/*").ends(65).err
    )
    assert not pair.jobs(0)


def test_shards_that_lie_on_the_nodes_already(site):
    """Each node has only those of its own trainers; a node that lacks one is named before anything starts."""
    pair = site(2)
    folders = []
    for node, shards in enumerate((["d/x-0", "d/x-2"], ["d/x-1", "d/x-3"])):
        folders.append(pair.home(node) / "work")
        (folders[node] / "d").mkdir(parents=True)
        (folders[node] / "train.py").write_text((reading(pair, []) / "train.py").read_text())
        for name in shards:
            (folders[node] / name).write_text(name)
    run = ["run", "--job-workspace", "~/work", "--shards", "d/*", "--all-ranks"]
    assert read(pair.clustertool(*run).ends(0)) == {0: ["d/x-0", "d/x-2"], 1: ["d/x-1", "d/x-3"]}
    (folders[0] / "d/x-0").rename(folders[1] / "d/x-0")
    done = pair.clustertool(*run).ends(65)
    assert f"{pair.name(0)}: 'd/x-0', which trainer 0 reads, is not in ~/work" in done.err
    assert f"{pair.name(1)}:" not in done.err


# -- shards that go only to the nodes that read them ------------------------------------------------------------------

SIZE = 200_000


def scattered(site, count, mode=""):
    """A workspace of `count` shards of SIZE bytes each, which are sent only where they are read."""
    folder = reading(site, [f"d/x-{n}" for n in range(count)])
    for n in range(count):
        (folder / f"d/x-{n}").write_bytes(os.urandom(SIZE))
    (folder / "train.py").write_text(
        "import os\nfor path in open(os.environ['CLUSTERTOOL_SHARDS']):\n"
        "    print(path.strip().rpartition('/')[2], os.path.getsize(path.strip()), flush=True)\n"
    )
    (folder / "job.toml").write_text(mode + '\n[shards]\nfiles = ["d/*"]\nonly_where_read = true\n')
    return folder


def content(folder):
    return sorted(int(path.name[2:]) for path in folder.glob("d/x-*"))


def job_of(site, node, done):
    (job,) = [path for path in site.jobs(node) if path.name == f"JOB{done.job}"]
    return job


def test_nodes_hold_exactly_their_shards(site):
    three = site(3)
    folder = scattered(three, 7)
    first = three.clustertool("run", "-w", "job", "--all-ranks").ends(0)
    assert sorted(re.findall(r"x-(\d) (\d+)$", first.out, re.M)) == [(str(n), str(SIZE)) for n in range(7)]
    for node in range(3):
        job, own = job_of(three, node, first), list(range(7))[node::3]
        assert content(job) == own
        assert all((job / f"d/x-{n}").read_bytes() == (folder / f"d/x-{n}").read_bytes() for n in own)
        kept = sum(path.stat().st_size for path in (three.root(node) / ".clustertool").rglob("*") if path.is_file())
        assert kept < (len(own) + 0.5) * SIZE, "what it keeps for the next job is no more either"
    # another shape: each node gets what it lacks, and no more
    pair = three.clustertool("run", "-w", "job", "--all-ranks", "--nnodes", 2).ends(0)
    assert len(re.findall(r"x-\d \d+$", pair.out, re.M)) == 7
    for node in (0, 1):
        assert content(job_of(three, node, pair)) == list(range(7))[node::2]
    # 0 3 6 -> 0 2 4 6 and 1 4 -> 1 3 5: they give each other 3 and 4, so two files are sent
    assert 2 * SIZE < sent(pair) < 4.5 * SIZE  # no more than all four, should one come late for that
    # and back: the release is still there, nothing is sent, and it is right again
    again = three.clustertool("run", "-w", "job").ends(0)
    assert "dispatch: nothing to send, 3 nodes ready" in again.err
    assert [content(job_of(three, node, again)) for node in range(3)] == [list(range(7))[node::3] for node in range(3)]
    # without the key all nodes get all
    (folder / "job.toml").write_text('[shards]\nfiles = ["d/*"]\n')
    done = three.clustertool("run", "-w", "job", "--nnodes", 2).ends(0)
    assert [content(job_of(three, node, done)) for node in range(2)] == [list(range(7))] * 2
    done = three.clustertool("run", "-w", "job", "--nnodes", 2, "--only-where-read").ends(0)
    assert [content(job_of(three, node, done)) for node in range(2)] == [list(range(7))[node::2] for node in range(2)]


def sent(done):
    """The bytes that the dispatch line tells."""
    amount, unit = re.search(r"^dispatch: ([\d.]+) (kB|MB) over the uplink, .* ready", done.err, re.M).groups()
    return float(amount) * {"kB": 1e3, "MB": 1e6}[unit]


def test_dispatch_and_check_know_which_rank_reads_what(site):
    pair = site(2)
    scattered(pair, 4)
    dry = pair.clustertool("dispatch", "-w", "job", "--dry").ends(0)
    assert "shards only to the nodes that read them" in dry.out
    done = pair.clustertool("dispatch", "-w", "job", "--json").ends(0)
    assert 4 * SIZE < done.json["bytes"] < 5 * SIZE
    assert len(set(done.json["releases"].values())) == 2
    done = pair.clustertool("run", "-w", "job").ends(0)
    assert "dispatch: nothing to send" in done.err and "dispatch" not in done.out, "stdout has the job's output only"
    pair.clustertool("check", "-w", "job").ends(0)
    (pair.folder / "job/d/x-2").unlink()
    assert "number 2 is missing" in pair.clustertool("dispatch", "-w", "job").ends(65).err


SERVER = """
    import os, socket, time
    server = socket.create_server((os.environ["POD_IP"], int(os.environ["PADDLE_PORT"])))
    time.sleep(600)
"""


def test_servers_get_no_shards_and_nodes_that_share_a_root_get_each_others(site, tmp_path):
    four = site(4)
    scattered(four, 6, 'mode = "ps"')
    four.workspace(pserver_py=SERVER)
    addresses = [f"{server.address}:{server.port}" for server in four.servers]
    roots = [tmp_path / "shared", tmp_path / "shared", tmp_path / "own", tmp_path / "server"]
    roles = [["trainer"]] * 3 + [["pserver"]]
    four.conf(HOSTS=[{"host": a, "root_dir": str(r), "roles": x} for a, r, x in zip(addresses, roots, roles)])
    done = four.clustertool("run", "-w", "job", "--all-ranks").ends(0)
    assert len(re.findall(r"x-\d \d+$", done.out, re.M)) == 6
    jobs = [roots[0] / "node0", roots[1] / "node1", roots[2], roots[3]]
    assert [content(jobs[node] / f"JOB{done.job}") for node in range(4)] == [[0, 1, 3, 4], [0, 1, 3, 4], [2, 5], []]


# -- inv split --------------------------------------------------------------------------------------------------------


def test_split_makes_what_a_job_reads(site):
    """A file is cut on the laptop, and each of its lines is read by one trainer."""
    pair = site(2)
    folder = reading(pair, [])
    (folder / "data").mkdir()
    lines = [f"line {n}\r\n" for n in range(1000)]
    (pair.folder / "all.txt").write_bytes("".join(lines).encode())
    (folder / "train.py").write_text(
        "import os\nfor path in open(os.environ['CLUSTERTOOL_SHARDS']):\n"
        "    for line in open(path[:-1], newline='\\n'):\n        print(line, end='')\n"
    )
    done = pair.clustertool(
        "split", "--data", "all.txt", "--shards", 5, "--to", "job/data", "--shuffle", "--seed", 3
    ).ends(0)
    assert re.fullmatch(
        r"split: job/data/all.txt-00000 to all.txt-00004, 200 lines each, 9.9 kB in \S+ s, shuffled with --seed 3\n",
        done.out,
    )
    done = pair.clustertool("run", "-w", "job", "--shards", "data/*", "--all-ranks", "--json").ends(0)
    output = re.findall(r"^\[trainer \d \S+\] (line \d+)", done.err, re.M)
    assert sorted(output) == sorted(line.strip() for line in lines)
    assert output != sorted(output, key=lambda line: int(line.split()[1]))


def test_split_tells_what_it_does(site):
    alone = site(0)
    (alone.folder / "d.txt").write_text("a\nb\nc")
    done = alone.clustertool("split", "--data", "d.txt", "--shards", 2, "--json").ends(0)
    assert done.json == {
        "data": "d.txt",
        "lines": 3,
        "bytes": 5,
        "seed": None,
        "replaced": 0,
        "shards": [{"file": "d.txt-00000", "lines": 2, "bytes": 4}, {"file": "d.txt-00001", "lines": 1, "bytes": 1}],
        "exit": {"code": 0, "source": "tool", "reason": ""},
    }
    done = alone.clustertool("split", "--data", "d.txt", "--shards", 1).ends(64)
    assert ". has shards of d.txt already: d.txt-00000 to d.txt-00001" in done.err
    assert "--force" in done.err
    done = alone.clustertool("split", "--data", "d.txt", "--shards", 1, "--force", "--shuffle").ends(0)
    seed = re.search(r"shuffled with --seed (\d+), 2 older shards replaced$", done.out, re.M).group(1)
    text = (alone.folder / "d.txt-00000").read_text()
    again = alone.clustertool(
        "split", "--data", "d.txt", "--shards", 1, "--force", "--shuffle", "--seed", seed, "--json"
    ).ends(0)
    assert again.json["seed"] == int(seed)
    assert (alone.folder / "d.txt-00000").read_text() == text
    for args, code, reported in (
        ([], 64, "split needs a file"),
        (["--data", "d.txt"], 64, "--shards ''"),
        (["--data", "d.txt", "--shards", "٣"], 64, "--shards '٣'"),
        (["--data", "d.txt", "--shards", "4", "--to", "x"], 65, "d.txt has 3 lines, too few for 4 shards"),
        (["--data", "missing", "--shards", "4"], 65, "missing cannot be read"),
        (["--data", ".", "--shards", "4"], 64, "is a folder"),
        (["--data", "d.txt", "--shards", "1", "--seed", "4"], 64, "--seed has no effect without --shuffle"),
        (["--data", "d.txt", "--shards", "1", "--shuffle", "--seed", "x"], 64, "--seed 'x'"),
    ):
        done = alone.clustertool("split", *args).ends(code)
        assert reported in done.err
        assert "fix: " in done.err
    assert not (alone.folder / "x").exists()


def test_split_on_a_terminal_shows_a_bar_and_ctrl_c_leaves_nothing(site):
    alone = site(0)
    with open(alone.folder / "d", "wb") as file:
        file.truncate(1 << 40)  # a line of a terabyte takes longer than anybody has
    running = alone.start("split", "--data", "d", "--shards", 1, "--to", "to", terminal=True)
    running.says("split: counting lines ━+ .* of 1.1 TB")
    running.signal()
    done = running.wait().ends(130)
    assert "clustertool: exit 130 (tool): Ctrl+C" in done.out
    assert not (alone.folder / "to").exists()


def test_split_on_a_disk_that_is_full(site):
    """A limit of this process stands for the disk's."""
    alone = site(0)
    (alone.folder / "d").write_bytes(b"x" * 99 + b"\n" + b"y\n" * 200_000)
    program = ["sh", "-c", 'ulimit -f 64; exec "$@"', "sh", *INV]
    done = alone.inv("split", "--data", "d", "--shards", 2, program=program).ends(65)
    assert "File too large" in done.err
    assert "make room" in done.err
    assert sorted(path.name for path in alone.folder.iterdir() if "pycache" not in path.name) == [
        "conf.py",
        "d",
        "tasks.py",
    ]
