"""What a node gets of a workspace: everything but the shards of others, under a name that says exactly what it is."""

from __future__ import annotations

import itertools

import pytest
from cases import cluster_of, facts_of, hosts, job_of, of_role, plan_of

from clustertool.errors import DataError, UsageError
from clustertool.model.dispatch.manifest import Entry, digest
from clustertool.model.dispatch.portions import Portion, by_node, portions
from clustertool.model.planning.plan import readers


def entry(path: str, size: int = 10, content: str = "") -> Entry:
    return Entry(path, "file", 0o644, size, content or path)


COMMON = [entry("train.py", 5), Entry("d", "dir", 0o755, 0, ""), Entry("link", "link", 0, 0, "d/x-0")]
SHARDS = [f"d/x-{number}" for number in range(6)]
ENTRIES = [*COMMON, *map(entry, SHARDS)]
TOTAL = 65


def roots(count: int) -> dict[int, str]:
    return {node: f"root{node}" for node in range(count)}


def reading(trainers: int, nodes: int = 0) -> dict[int, frozenset[str]]:
    """One trainer a node, shards by number modulo trainers; more nodes read nothing."""
    return {node: frozenset(SHARDS[node::trainers] if node < trainers else ()) for node in range(nodes or trainers)}


def paths(portion: Portion) -> set[str]:
    return {e.path for e in portion.of(ENTRIES)}


def test_without_readers_all_nodes_have_one_release_which_is_the_workspaces() -> None:
    (one,) = portions(ENTRIES, roots(4))
    assert (one.release, one.nodes, one.size) == (digest(ENTRIES), (0, 1, 2, 3), TOTAL)
    assert one.of(ENTRIES) == tuple(ENTRIES)


@pytest.mark.parametrize("trainers", range(1, 7))
def test_each_node_gets_exactly_what_its_trainers_read(trainers: int) -> None:
    reads = reading(trainers)
    found = by_node(portions(ENTRIES, roots(trainers), reads))
    for node, portion in found.items():
        assert paths(portion) == {e.path for e in COMMON} | reads[node]
        assert portion.release == digest(portion.of(ENTRIES)), "the node that has received it finds the same name"
        assert portion.size == 5 + 10 * len(reads[node])
    assert sorted(itertools.chain(*(portion.shards for portion in found.values()))) == SHARDS


def test_nodes_that_read_nothing_share_one_release() -> None:
    found = portions(ENTRIES, roots(5), reading(2, nodes=5))
    assert [(portion.nodes, len(portion.shards)) for portion in found] == [((0,), 3), ((1,), 3), ((2, 3, 4), 0)]
    assert {e.path for e in found[2].of(ENTRIES)} == {e.path for e in COMMON}


def test_one_reader_has_the_whole_workspace() -> None:
    """So a node that received it for a job without this option has it already."""
    assert portions(ENTRIES, roots(1), reading(1))[0].release == digest(ENTRIES)


def test_nodes_that_share_a_root_get_what_any_of_them_reads() -> None:
    found = portions(ENTRIES, {0: "a", 1: "b", 2: "a"}, reading(3))
    assert [(portion.nodes, portion.shards) for portion in found] == [
        ((0, 2), frozenset(SHARDS[0::3] + SHARDS[2::3])),
        ((1,), frozenset(SHARDS[1::3])),
    ]
    (one,) = portions(ENTRIES, dict.fromkeys(range(3), "nfs"), reading(3))
    assert (one.release, one.nodes) == (digest(ENTRIES), (0, 1, 2))


def test_another_shape_has_other_names_and_the_same_shape_the_same() -> None:
    names = {}
    for trainers in range(1, 7):
        found = by_node(portions(ENTRIES, roots(trainers), reading(trainers)))
        assert {node: p.release for node, p in found.items()} == {
            node: p.release for node, p in by_node(portions(ENTRIES[::-1], roots(trainers), reading(trainers))).items()
        }
        for node, portion in found.items():
            names.setdefault(portion.release, set()).add(portion.shards)
            assert (node, trainers) == (0, 1) or portion.release != digest(ENTRIES)
    assert all(len(shards) == 1 for shards in names.values()), "one name, one content"


def test_a_change_of_one_shard_names_only_its_readers_portion_anew() -> None:
    before = by_node(portions(ENTRIES, roots(3), reading(3)))
    changed = [e._replace(content="new") if e.path == SHARDS[4] else e for e in ENTRIES]
    after = by_node(portions(changed, roots(3), reading(3)))
    assert [before[node].release == after[node].release for node in range(3)] == [True, False, True]


def test_nothing_to_send() -> None:
    (one,) = portions([], roots(2), {0: frozenset(), 1: frozenset()})
    assert (one.release, one.size, one.nodes) == (digest([]), 0, (0, 1))


# -- who reads what -----------------------------------------------------------------------------------------------------


def test_readers_are_those_of_the_plan() -> None:
    """Uneven nodes, pservers that read nothing, an explicit order: the same answer with and without a whole plan."""
    shapes = [
        ([{"host": host, "nproc": size} for host, size in zip(hosts(3), (1, 3, 2))], {}),
        (hosts(3), {"mode": "ps", "worker_num": "2"}),
        (hosts(3), {"mode": "ps", "workers": ("10.0.0.3,10.0.0.1",)}),
        ([{"host": "10.0.0.1", "roles": ["pserver"]}, {"host": "10.0.0.2", "roles": {"trainer": 4}}], {"mode": "ps"}),
    ]
    for entries, options in shapes:
        cluster = cluster_of(entries)
        listing = ("train.py", *SHARDS)
        job = job_of(cluster, shards=("d/*",), only_where_read=True, **options)
        found = readers(cluster, job, facts_of(cluster), listing)
        made = plan_of(cluster, files=listing, shards=("d/*",), **options)
        assert found == {
            node.host.index: frozenset(itertools.chain(*(process.shards for process in node.processes)))
            for node in made.nodes
        }
        assert sorted(itertools.chain(*found.values())) == SHARDS
        assert of_role(made, "trainer")


def test_a_dispatch_needs_no_command() -> None:
    cluster = cluster_of(hosts(2))
    job = job_of(cluster, {"shards": {"files": ["d/*"], "only_where_read": True}})
    assert readers(cluster, job, facts_of(cluster), SHARDS) == reading(2)
    with pytest.raises(DataError, match="would read nothing"):
        readers(cluster, job, facts_of(cluster), SHARDS[:1])


def test_the_key_and_the_option() -> None:
    cluster = cluster_of(hosts(2))
    files = {"files": ["d/*"]}
    assert not job_of(cluster, {"shards": files}).only_where_read
    assert not job_of(cluster, {"shards": {**files, "only_where_read": False}}).only_where_read
    assert job_of(cluster, {"shards": {**files, "only_where_read": True}}).only_where_read
    assert job_of(cluster, {"shards": files}, only_where_read=True).only_where_read
    assert job_of(cluster, shards=("d/*",), only_where_read=True).only_where_read
    with pytest.raises(DataError, match=r"only_where_read = 'yes'"):
        job_of(cluster, {"shards": {**files, "only_where_read": "yes"}})
    with pytest.raises(DataError, match="only_where_read without shards"):
        job_of(cluster, {"shards": {"only_where_read": True}})
    with pytest.raises(UsageError, match="--only-where-read without shards"):
        job_of(cluster, only_where_read=True)
    with pytest.raises(UsageError, match="--only-where-read with --job-workspace"):
        job_of(cluster, shards=("d/*",), only_where_read=True, job_workspace="/srv/job")
