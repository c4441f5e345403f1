"""Data on the way from a file on the laptop to the trainers: every shard is read once, by the trainer it belongs to."""

from __future__ import annotations

import json

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
    """rank -> the shards that it was given, in its order, after a look into each."""
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
    found = read(pair.inv("run", "-w", "job", "--all-ranks").ends(0))
    assert found == {rank: first[rank::3] + second[rank::3] for rank in range(3)}
    # the command line goes before job.toml
    found = read(pair.inv("run", "-w", "job", "--all-ranks", "--shards", "./more/y-[0,1,2]").ends(0))
    assert found == {rank: [second[rank]] for rank in range(3)}


def test_shards_that_are_not_complete_start_nothing(site):
    pair = site(2)
    folder = reading(pair, ["d/x-0", "d/x-2"])
    done = pair.inv("run", "-w", "job", "--shards", "d/*").ends(65)
    assert "number 1 is missing, 'd/x-2' is there" in done.err
    (folder / "d/x-2").unlink()
    done = pair.inv("run", "-w", "job", "--shards", "d/*").ends(65)
    assert "1 shard of 'd/*' for 2 trainers: 1 would read nothing" in done.err
    (folder / "d/x-1").symlink_to("x-0")
    assert "'d/x-1' matches [shards] but is a link" in pair.inv("run", "-w", "job", "--shards", "d/*").ends(65).err
    assert not pair.jobs(0)


def test_shards_that_lie_on_the_nodes_already(site):
    """Each node has only those of its own trainers; a node that lacks one is told by name before anything starts."""
    pair = site(2)
    folders = []
    for node, shards in enumerate((["d/x-0", "d/x-2"], ["d/x-1", "d/x-3"])):
        folders.append(pair.home(node) / "work")
        (folders[node] / "d").mkdir(parents=True)
        (folders[node] / "train.py").write_text((reading(pair, []) / "train.py").read_text())
        for name in shards:
            (folders[node] / name).write_text(name)
    run = ["run", "--job-workspace", "~/work", "--shards", "d/*", "--all-ranks"]
    assert read(pair.inv(*run).ends(0)) == {0: ["d/x-0", "d/x-2"], 1: ["d/x-1", "d/x-3"]}
    (folders[0] / "d/x-0").rename(folders[1] / "d/x-0")
    done = pair.inv(*run).ends(65)
    assert f"{pair.name(0)}: 'd/x-0', which trainer 0 reads, is not in ~/work" in done.err
    assert f"{pair.name(1)}:" not in done.err
