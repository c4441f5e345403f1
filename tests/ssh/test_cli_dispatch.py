"""Dispatch end to end on loopback: what arrives is what was there, and only what is new is sent."""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

import pytest


@pytest.fixture
def three(site):
    made = site(3)
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
def test_names_modes_links_and_empty_folders_arrive(three, carrier):
    job = three.folder / "job"
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
    three.inv("run", "-w", "job", "--dispatch", carrier).ends(0)
    ours = {"nodefile", "log", "output", ".clustertool"}
    for node in range(3):
        (placed,) = three.jobs(node)
        assert tree(placed, ours) == tree(job, ours)
    (job / "read only").chmod(0o755)


def test_a_small_change_is_all_that_is_sent(three):
    job = three.folder / "job"
    for number in range(40):
        (job / f"f{number}").write_bytes(os.urandom(20_000))
    assert three.inv("dispatch", "-w", "job", "--json").ends(0).json["bytes"] > 800_000
    (job / "f7").write_text("changed")
    (job / "f8").unlink()
    (job / "new").mkdir()
    second = three.inv("dispatch", "-w", "job", "--json").ends(0).json
    assert 0 < second["bytes"] < 3 * 3000 and len(second["sent"]) == 3
    (job / "large").write_bytes(os.urandom(300_000))
    third = three.inv("dispatch", "-w", "job", "--json").ends(0).json
    assert 300_000 < third["bytes"] < 400_000 and 600_000 < third["between"] < 700_000
    three.inv("run", "-w", "job").ends(0)
    for node in range(3):
        (placed,) = three.jobs(node)
        assert (placed / "f7").read_text() == "changed" and not (placed / "f8").exists() and (placed / "new").is_dir()
        assert (placed / "large").read_bytes() == (job / "large").read_bytes()


def test_the_seconds_in_the_message_count_from_the_first_connection(three):
    """All may have come while nodes were still being reached: the second half of a dispatch is a moment then."""
    (three.folder / "job/big").write_bytes(os.urandom(3_000_000))
    done = three.inv("dispatch", "-w", "job").ends(0)
    reported = re.search(r"3 nodes ready in ([\d.]+) s", done.out)
    assert reported and done.seconds / 10 < float(reported[1]) < done.seconds, done.out


def test_a_node_that_comes_later_gets_it_from_the_others(three):
    job = three.folder / "job"
    (job / "big").write_bytes(os.urandom(3_000_000))
    three.inv("dispatch", "-w", "job", "--only", "127.0.0.2,127.0.0.3").ends(0)
    late = three.inv("dispatch", "-w", "job", "--json").ends(0).json
    assert (late["sent"], late["had"]) == (["127.0.0.4"], ["127.0.0.2", "127.0.0.3"])
    assert late["bytes"] < 10_000 and late["between"] > 3_000_000


def test_another_laptop_sends_nothing_that_is_there(three):
    (three.folder / "job/big").write_bytes(os.urandom(500_000))
    three.inv("dispatch", "-w", "job").ends(0)
    other_place = {"XDG_CACHE_HOME": str(three.folder / "another")}
    again = three.inv("dispatch", "-w", "job", "--json", env=other_place).ends(0).json
    assert (again["bytes"], len(again["had"])) == (0, 3)


def test_a_store_that_somebody_damaged_is_repaired(three):
    (three.folder / "job/big").write_bytes(os.urandom(500_000))
    three.inv("dispatch", "-w", "job").ends(0)
    shutil.rmtree(three.root(1) / ".clustertool/pieces")
    refused = three.inv("run", "-w", "job").ends(74)
    assert "is damaged" in refused.err and "127.0.0.3" in refused.err and "run it again" in refused.err
    three.inv("run", "-w", "job").ends(0)
    assert [len(three.jobs(node)) for node in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("text", "verb"),
    [
        ("", "dispatch"),
        ("[\n", "run"),
        pytest.param("[\n", "dispatch", marks=pytest.mark.chaos),
        pytest.param("", "run", marks=pytest.mark.chaos),
    ],
)
def test_an_empty_or_torn_manifest_is_received_again(three, text, verb):
    """As a power cut may leave it on a node."""
    three.inv("dispatch", "-w", "job").ends(0)
    manifest = next((three.root(1) / ".clustertool/releases").glob("[0-9a-f]*"))
    manifest.write_text(text)
    three.inv(verb, "-w", "job").ends(0)
    assert manifest.read_text().endswith("]\n") and len(manifest.read_text()) > 20


@pytest.mark.parametrize("text", ["[\n", pytest.param("", marks=pytest.mark.chaos)])
def test_a_crash_of_the_laptop_costs_time_only(three, text):
    """It may leave what it remembers of the last dispatch empty or torn."""
    cache = three.folder / "cache"
    three.inv("dispatch", "-w", "job", env={"XDG_CACHE_HOME": str(cache)}).ends(0)
    (manifest,) = cache.glob("clustertool/workspaces/*/*.manifest")
    manifest.write_text(text)
    (three.folder / "job/new").write_text("new")
    three.inv("dispatch", "-w", "job", env={"XDG_CACHE_HOME": str(cache)}).ends(0)
    three.inv("run", "-w", "job").ends(0)
    assert all((three.jobs(node)[0] / "new").exists() for node in range(3))


def test_what_a_job_writes_stays_its_own(three):
    three.workspace(train_py="open('data', 'w').write('spoiled')")
    (three.folder / "job/data").write_bytes(b"precious" * 200_000)
    for _ in range(2):
        three.inv("run", "-w", "job").ends(0)
    three.workspace(train_py="import os; print('size', os.path.getsize('data'))")
    assert "size 1600000" in three.inv("run", "-w", "job").ends(0).out


# -- dispatch by rsync -------------------------------------------------------------------------------------------------


def test_rsync_brings_the_same_release(three):
    """In a staging folder that is gone afterwards; what is there is not sent again, by whichever carrier."""
    for number in range(20):
        (three.folder / f"job/f{number}").write_bytes(os.urandom(20_000))
    (three.folder / "job/big").write_bytes(os.urandom(3_000_000))
    three.conf(DISPATCH="rsync")
    first = three.inv("dispatch", "-w", "job", "--json").ends(0).json
    assert len(first["sent"]) == 3 and 3 * 3_400_000 < first["bytes"] < 3 * 3_600_000 and first["between"] == 0
    assert [list((store(three, node) / "staging").iterdir()) for node in range(3)] == [[], [], []]
    swarm = three.inv("dispatch", "-w", "job", "--dispatch", "swarm", "--json").ends(0).json
    assert (swarm["bytes"], len(swarm["had"]), swarm["release"]) == (0, 3, first["release"])
    found = three.inv("dispatch", "-w", "job", "--verify", "--json").ends(0).json["verified"]
    assert all((one["releases"], one["damaged"], one["lost"]) == (1, 0, []) for one in found.values())
    (three.folder / "job/f3").write_text("changed")
    three.inv("run", "-w", "job").ends(0)
    assert all((three.jobs(node)[0] / "f3").read_text() == "changed" for node in range(3))


def test_rsync_goes_on_with_what_was_interrupted(three):
    """Files that lie in the staging folder already are not sent."""
    big = three.folder / "job/big"
    big.write_bytes(os.urandom(3_000_000))
    release = three.inv("--dry", "dispatch", "-w", "job", "--json").ends(0).json["release"]
    staged = store(three, 1) / "staging" / release
    three.inv("check").ends(0)
    staged.mkdir(parents=True)
    for folder in (staged, staged.parent, staged.parent.parent):
        folder.chmod(0o700)
    shutil.copy2(big, staged / "big")
    done = three.inv("dispatch", "-w", "job", "--dispatch", "rsync", "--json").ends(0).json
    assert 6_000_000 < done["bytes"] < 6_200_000 and len(done["sent"]) == 3


def test_rsync_that_brings_something_else_is_no_release(three):
    """A file in the staging folder that appears as the one that is sent: its bytes are not those of the manifest."""
    big = three.folder / "job/big"
    big.write_bytes(os.urandom(300_000))
    release = three.inv("--dry", "dispatch", "-w", "job", "--json").ends(0).json["release"]
    staged = store(three, 1) / "staging" / release
    staged.mkdir(parents=True)
    shutil.copy2(big, staged / "big")
    spoil(staged / "big")
    shutil.copystat(big, staged / "big")
    done = three.inv("dispatch", "-w", "job", "--dispatch", "rsync").ends(0)
    assert f"failed: {three.name(1)}\n" in done.out, "the first time it is no release"
    assert "'big' is not what it was when the dispatch began; the workspace is sent as it is now" in done.err
    assert [path.name for path in (store(three, 1) / "releases").glob("[0-9a-f]*")] == [release]
    assert (store(three, 1) / "releases" / release).exists() and not staged.exists()


def test_shards_go_only_where_they_are_read_by_rsync_too(three):
    for shard in range(3):
        (three.folder / f"job/part-{shard}").write_bytes(os.urandom(400_000))
    (three.folder / "job/job.toml").write_text('[shards]\nfiles = "part-*"\nonly_where_read = true\n')
    done = three.inv("dispatch", "-w", "job", "--dispatch", "rsync", "--json").ends(0).json
    assert len(set(done["releases"].values())) == 3 and 1_200_000 < done["bytes"] < 1_300_000
    three.inv("run", "-w", "job", "--dispatch", "rsync").ends(0)
    assert [sorted(path.name for path in three.jobs(node)[0].glob("part-*")) for node in range(3)] == [
        [f"part-{shard}"] for shard in range(3)
    ]


def test_another_carrier_is_refused(three):
    assert "one of swarm, rsync" in three.inv("dispatch", "-w", "job", "--dispatch", "scp").ends(64).err
    three.conf(DISPATCH="scp")
    assert "DISPATCH" in three.inv("dispatch", "-w", "job").ends(78).err


# -- dispatch --verify -------------------------------------------------------------------------------------------------


def store(three, node: int) -> Path:
    return three.root(node) / ".clustertool"


def spoil(path: Path) -> None:
    """Other bytes, the same size."""
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def piece_of(three, node: int, size: int) -> Path:
    return next(path for path in sorted((store(three, node) / "pieces").iterdir()) if path.stat().st_size == size)


def test_verify_finds_wrong_bytes_and_repairs_them(three):
    """A piece of a large file on one node, a manifest that reads well on another. Only what is damaged is sent."""
    (three.folder / "job/empty").mkdir()
    (three.folder / "job/nothing").touch()
    (three.folder / "job/link").symlink_to("train.py")
    data = os.urandom(3_000_000)
    (three.folder / "job/big").write_bytes(data)
    three.inv("dispatch", "-w", "job").ends(0)
    right = three.inv("dispatch", "-w", "job", "--verify", "--json").ends(0).json
    names = sorted(right["verified"])
    assert [right["verified"][name]["releases"] for name in names] == [1, 1, 1] and len(right["had"]) == 3
    assert all((one["damaged"], one["lost"]) == (0, []) for one in right["verified"].values())

    spoil(piece_of(three, 1, 1 << 20))
    manifest = store(three, 2) / "releases" / right["release"]
    manifest.write_text(manifest.read_text().replace('"nothing"', '"nowhere"'))
    assert not three.inv("dispatch", "-w", "job", "--json").ends(0).json["bytes"], "sizes are right"
    dry = three.inv("--dry", "dispatch", "-w", "job", "--verify").ends(0)
    assert "1 piece and 1 release, which would be removed" in dry.out and manifest.exists()
    found = three.inv("dispatch", "-w", "job", "--verify", "--json").ends(0).json
    assert [found["verified"][name]["damaged"] for name in names] == [0, 1, 0]
    assert [found["verified"][name]["lost"] for name in names] == [[], [right["release"]], [right["release"]]]
    assert (len(found["had"]), len(found["sent"])) == (1, 2) and found["bytes"] + found["between"] < 1_200_000
    three.inv("run", "-w", "job").ends(0)
    for node in range(3):
        assert (three.jobs(node)[0] / "big").read_bytes() == data
    assert "nothing is damaged" in three.inv("dispatch", "-w", "job", "--verify").ends(0).out


def test_verify_reads_all_releases_and_nodes_without_any(three):
    """Also at one of which only some shards were sent to a node, and at one that no job needs now."""
    for shard in range(3):
        (three.folder / f"job/part-{shard}").write_bytes(os.urandom(400_000))
    (three.folder / "job/job.toml").write_text('[shards]\nfiles = "part-*"\nonly_where_read = true\n')
    assert "0 releases of 0 pieces" in three.inv("--dry", "dispatch", "-w", "job", "--verify").ends(0).out
    releases = three.inv("dispatch", "-w", "job", "--json").ends(0).json["releases"]
    assert len(set(releases.values())) == 3
    (three.folder / "job/job.toml").unlink()
    three.inv("dispatch", "-w", "job").ends(0)
    found = three.inv("dispatch", "-w", "job", "--verify", "--json").ends(0).json["verified"]
    assert {(one["releases"], one["damaged"], len(one["lost"])) for one in found.values()} == {(2, 0, 0)}
