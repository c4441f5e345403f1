"""Dispatch end to end on loopback: what arrives is what was there, and only what is new is sent."""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

import pytest


@pytest.fixture
def pair(site):
    made = site(2)
    made.workspace(train_py="print('trained')")
    return made


def tree(top: Path, without: set[str]) -> dict[str, object]:
    """Everything below: kind, mode, time and content by path."""
    found: dict[str, object] = {}
    for folder, folders, names in os.walk(os.fsencode(top)):
        for name in [*folders, *names]:
            path = os.path.join(folder, name)
            relative = os.path.relpath(path, os.fsencode(top)).decode("utf-8", "surrogateescape")
            info = os.lstat(path)
            if relative.split("/")[0] in without:
                continue
            if stat.S_ISLNK(info.st_mode):
                found[relative] = os.readlink(path)
            elif stat.S_ISDIR(info.st_mode):
                found[relative] = stat.S_IMODE(info.st_mode)
            else:
                found[relative] = (stat.S_IMODE(info.st_mode), info.st_mtime_ns, Path(os.fsdecode(path)).read_bytes())
    return found


@pytest.mark.parametrize("carrier", ["swarm", "rsync"])
def test_names_modes_links_and_empty_folders_arrive(pair, carrier):
    job = pair.folder / "job"
    for name in ("-rf", "a b", "new\nline", os.fsdecode(b"\xff"), "$(touch x)", "dir/.hidden", "dir/empty file"):
        (job / name).parent.mkdir(exist_ok=True)
        (job / name).write_bytes(b"" if "empty" in name else os.urandom(100))
    (job / "big").write_bytes(os.urandom(1_500_000))
    (job / "run.sh").write_text("true")
    (job / "run.sh").chmod(0o750)
    (job / "empty/in it").mkdir(parents=True)
    (job / "read only").mkdir()
    (job / "read only/file").write_text("x")
    (job / "read only").chmod(0o555)
    (job / "link").symlink_to("-rf")
    (job / "nowhere").symlink_to("/does/not/exist")
    pair.clustertool("run", "-w", "job", "--dispatch", carrier).ends(0)
    ours = {"nodefile", "log", "output", ".clustertool"}
    for node in range(2):
        (placed,) = pair.jobs(node)
        assert tree(placed, ours) == tree(job, ours)
    (job / "read only").chmod(0o755)


def test_a_small_change_is_all_that_is_sent(pair):
    job = pair.folder / "job"
    for number in range(40):
        (job / f"f{number}").write_bytes(os.urandom(20_000))
    assert pair.clustertool("dispatch", "-w", "job", "--json").ends(0).json["bytes"] > 800_000
    (job / "f7").write_text("changed")
    (job / "f8").unlink()
    (job / "new").mkdir()
    second = pair.clustertool("dispatch", "-w", "job", "--json").ends(0).json
    assert 0 < second["bytes"] < 2 * 3000 and len(second["sent"]) == 2
    (job / "large").write_bytes(os.urandom(300_000))
    third = pair.clustertool("dispatch", "-w", "job", "--json").ends(0).json
    assert 300_000 < third["bytes"] < 400_000 and 300_000 < third["between"] < 400_000
    pair.clustertool("run", "-w", "job").ends(0)
    for node in range(2):
        (placed,) = pair.jobs(node)
        assert (placed / "f7").read_text() == "changed" and not (placed / "f8").exists() and (placed / "new").is_dir()
        assert (placed / "large").read_bytes() == (job / "large").read_bytes()


def test_a_node_that_comes_later_gets_it_from_the_others_and_another_laptop_sends_nothing(site):
    three = site(3)
    (three.workspace(train_py="print('trained')") / "big").write_bytes(os.urandom(3_000_000))
    first = three.clustertool("dispatch", "-w", "job", "--only", "127.0.0.2,127.0.0.3").ends(0)
    # The seconds count from the first connection: all may have come while nodes were still being reached, and the second
    # half of a dispatch is a moment then.
    reported = re.search(r"2 nodes ready in ([\d.]+) s", first.out)
    assert reported and first.seconds / 10 < float(reported[1]) < first.seconds + 0.05, first.out  # it is rounded
    late = three.clustertool("dispatch", "-w", "job", "--json").ends(0).json
    assert (late["sent"], late["had"]) == (["127.0.0.4"], ["127.0.0.2", "127.0.0.3"])
    assert late["bytes"] < 10_000 and late["between"] > 3_000_000
    other_place = {"XDG_CACHE_HOME": str(three.folder / "another")}
    again = three.clustertool("dispatch", "-w", "job", "--json", env=other_place).ends(0).json
    assert (again["bytes"], len(again["had"])) == (0, 3)


def test_a_store_that_somebody_damaged_is_repaired(pair):
    (pair.folder / "job/big").write_bytes(os.urandom(500_000))
    pair.clustertool("dispatch", "-w", "job").ends(0)
    shutil.rmtree(pair.root(1) / ".clustertool/pieces")
    refused = pair.clustertool("run", "-w", "job").ends(74)
    assert "is damaged" in refused.err and "127.0.0.3" in refused.err and "run it again" in refused.err
    pair.clustertool("run", "-w", "job").ends(0)
    assert [len(pair.jobs(node)) for node in range(2)] == [1, 1]


@pytest.mark.parametrize(
    "damages",
    [
        (("", "dispatch"), ("[\n", "run")),
        pytest.param((("[\n", "dispatch"), ("", "run")), marks=pytest.mark.chaos),
    ],
)
def test_an_empty_or_torn_manifest_is_received_again(pair, damages):
    """As a power cut may leave it on a node."""
    pair.clustertool("dispatch", "-w", "job").ends(0)
    manifest = next((pair.root(1) / ".clustertool/releases").glob("[0-9a-f]*"))
    for text, verb in damages:
        manifest.write_text(text)
        pair.clustertool(verb, "-w", "job").ends(0)
        assert manifest.read_text().endswith("]\n") and len(manifest.read_text()) > 20


@pytest.mark.parametrize("text", ["[\n", pytest.param("", marks=pytest.mark.chaos)])
def test_a_crash_of_the_laptop_costs_time_only(pair, text):
    """It may leave what it remembers of the last dispatch empty or torn."""
    cache = pair.folder / "cache"
    pair.clustertool("dispatch", "-w", "job", env={"XDG_CACHE_HOME": str(cache)}).ends(0)
    (manifest,) = cache.glob("clustertool/workspaces/*/*.manifest")
    manifest.write_text(text)
    (pair.folder / "job/new").write_text("new")
    pair.clustertool("run", "-w", "job", env={"XDG_CACHE_HOME": str(cache)}).ends(0)
    assert all((pair.jobs(node)[0] / "new").exists() for node in range(2))


def test_what_a_job_writes_stays_its_own(site):
    """The next job of the same release has the data as it was, and so has one of another release."""
    one = site(1)
    program = "import os; print('size', os.path.getsize('data')); open('data', 'w').write('spoiled')"
    (one.workspace(train_py=program) / "data").write_bytes(b"precious" * 200_000)
    for number in range(3):
        assert "size 1600000" in one.clustertool("run", "-w", "job").ends(0).out
        assert (one.jobs(0)[-1] / "data").read_text() == "spoiled"
        if number == 1:
            one.workspace(train_py=f"{program}  # changed")


# -- dispatch by rsync -------------------------------------------------------------------------------------------------


def test_rsync_brings_the_same_release(pair):
    """In a staging folder that is gone afterwards; what is there is not sent again, by whichever carrier."""
    for number in range(20):
        (pair.folder / f"job/f{number}").write_bytes(os.urandom(20_000))
    (pair.folder / "job/big").write_bytes(os.urandom(3_000_000))
    pair.conf(DISPATCH="rsync")
    first = pair.clustertool("dispatch", "-w", "job", "--json").ends(0).json
    assert len(first["sent"]) == 2 and 2 * 3_400_000 < first["bytes"] < 2 * 3_600_000 and first["between"] == 0
    assert [list((store(pair, node) / "staging").iterdir()) for node in range(2)] == [[], []]
    swarm = pair.clustertool("dispatch", "-w", "job", "--dispatch", "swarm", "--json").ends(0).json
    assert (swarm["bytes"], len(swarm["had"]), swarm["release"]) == (0, 2, first["release"])
    found = pair.clustertool("dispatch", "-w", "job", "--verify", "--json").ends(0).json["verified"]
    assert all((one["releases"], one["damaged"], one["lost"]) == (1, 0, []) for one in found.values())
    (pair.folder / "job/f3").write_text("changed")
    pair.clustertool("run", "-w", "job").ends(0)
    assert all((pair.jobs(node)[0] / "f3").read_text() == "changed" for node in range(2))


def test_rsync_goes_on_with_what_was_interrupted(pair):
    """Files that lie in the staging folder already are not sent."""
    big = pair.folder / "job/big"
    big.write_bytes(os.urandom(3_000_000))
    release = pair.clustertool("--dry", "dispatch", "-w", "job", "--json").ends(0).json["release"]
    staged = store(pair, 1) / "staging" / release
    staged.mkdir(parents=True)
    for folder in (staged, staged.parent, staged.parent.parent):
        folder.chmod(0o700)
    shutil.copy2(big, staged / "big")
    done = pair.clustertool("dispatch", "-w", "job", "--dispatch", "rsync", "--json").ends(0).json
    assert 3_000_000 < done["bytes"] < 3_200_000 and len(done["sent"]) == 2


def test_rsync_that_brings_something_else_is_no_release(pair):
    """A file in the staging folder that appears as the one that is sent: its bytes are not those of the manifest."""
    big = pair.folder / "job/big"
    big.write_bytes(os.urandom(300_000))
    release = pair.clustertool("--dry", "dispatch", "-w", "job", "--json").ends(0).json["release"]
    staged = store(pair, 1) / "staging" / release
    staged.mkdir(parents=True)
    shutil.copy2(big, staged / "big")
    spoil(staged / "big")
    shutil.copystat(big, staged / "big")
    done = pair.clustertool("dispatch", "-w", "job", "--dispatch", "rsync").ends(0)
    assert f"failed: {pair.name(1)}\n" in done.out, "the first time it is no release"
    assert "'big' is not what it was when the dispatch began; the workspace is sent as it is now" in done.err
    assert [path.name for path in (store(pair, 1) / "releases").glob("[0-9a-f]*")] == [release]
    assert (store(pair, 1) / "releases" / release).exists() and not staged.exists()


def test_shards_go_only_where_they_are_read_by_rsync_too(pair):
    for shard in range(2):
        (pair.folder / f"job/part-{shard}").write_bytes(os.urandom(400_000))
    (pair.folder / "job/job.toml").write_text('[shards]\nfiles = "part-*"\nonly_where_read = true\n')
    done = pair.clustertool("dispatch", "-w", "job", "--dispatch", "rsync", "--json").ends(0).json
    assert len(set(done["releases"].values())) == 2 and 800_000 < done["bytes"] < 900_000
    pair.clustertool("run", "-w", "job", "--dispatch", "rsync").ends(0)
    assert [sorted(path.name for path in pair.jobs(node)[0].glob("part-*")) for node in range(2)] == [
        [f"part-{shard}"] for shard in range(2)
    ]


def test_another_carrier_is_refused(pair):
    assert "one of swarm, rsync" in pair.clustertool("dispatch", "-w", "job", "--dispatch", "scp").ends(64).err
    pair.conf(DISPATCH="scp")
    assert "DISPATCH" in pair.clustertool("dispatch", "-w", "job").ends(78).err


# -- dispatch --verify -------------------------------------------------------------------------------------------------


def store(pair, node: int) -> Path:
    return pair.root(node) / ".clustertool"


def spoil(path: Path) -> None:
    """Other bytes, the same size."""
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def piece_of(pair, node: int, size: int) -> Path:
    return next(path for path in sorted((store(pair, node) / "pieces").iterdir()) if path.stat().st_size == size)


def test_verify_finds_wrong_bytes_and_repairs_them(pair):
    """A piece of a large file on one node, a manifest that reads well on another. Only what is damaged is sent."""
    (pair.folder / "job/empty").mkdir()
    (pair.folder / "job/nothing").touch()
    (pair.folder / "job/link").symlink_to("train.py")
    data = os.urandom(3_000_000)
    (pair.folder / "job/big").write_bytes(data)
    release = pair.clustertool("dispatch", "-w", "job", "--json").ends(0).json["release"]

    spoil(piece_of(pair, 0, 1 << 20))
    manifest = store(pair, 1) / "releases" / release
    manifest.write_text(manifest.read_text().replace('"nothing"', '"nowhere"'))
    assert not pair.clustertool("dispatch", "-w", "job", "--json").ends(0).json["bytes"], "sizes are right"
    dry = pair.clustertool("--dry", "dispatch", "-w", "job", "--verify").ends(0)
    assert "1 piece and 1 release, which would be removed" in dry.out and manifest.exists()
    found = pair.clustertool("dispatch", "-w", "job", "--verify", "--json").ends(0).json
    one, two = (found["verified"][pair.name(node)] for node in range(2))
    assert (one["damaged"], one["lost"], two["damaged"], two["lost"]) == (1, [release], 0, [release])
    assert (len(found["had"]), len(found["sent"])) == (0, 2) and found["bytes"] + found["between"] < 1_200_000
    pair.clustertool("run", "-w", "job").ends(0)
    for node in range(2):
        assert (pair.jobs(node)[0] / "big").read_bytes() == data
    assert "nothing is damaged" in pair.clustertool("dispatch", "-w", "job", "--verify").ends(0).out


def test_verify_reads_all_releases_and_nodes_without_any(pair):
    """Also at one of which only some shards were sent to a node, and at one that no job needs now."""
    for shard in range(2):
        (pair.folder / f"job/part-{shard}").write_bytes(os.urandom(400_000))
    (pair.folder / "job/job.toml").write_text('[shards]\nfiles = "part-*"\nonly_where_read = true\n')
    assert "0 releases of 0 pieces" in pair.clustertool("--dry", "dispatch", "-w", "job", "--verify").ends(0).out
    releases = pair.clustertool("dispatch", "-w", "job", "--json").ends(0).json["releases"]
    assert len(set(releases.values())) == 2
    (pair.folder / "job/job.toml").unlink()
    pair.clustertool("dispatch", "-w", "job").ends(0)
    found = pair.clustertool("dispatch", "-w", "job", "--verify", "--json").ends(0).json["verified"]
    assert {(one["releases"], one["damaged"], len(one["lost"])) for one in found.values()} == {(2, 0, 0)}
