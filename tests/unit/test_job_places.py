"""The hosts of jobs are stored on the laptop: whole files, few of them, without secrets, and only those of this user count."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertool.errors import ConfigError, UsageError
from clustertool.fleet import job_places, this_machine
from clustertool.fleet.job_places import JobPlaces
from clustertool.model.config.cluster import Cluster
from clustertool.model.planning.plan import Plan
from tests.unit.cases import IDENTITY, cluster_of, plan_of

HOSTS = ["ann@10.0.0.1:2222", {"host": "10.0.0.2", "root_dir": "/data/jobs", "address": "192.168.0.2"}, "[fe80::1]:22"]


def made(id: str = "J", hosts: list[Any] | None = None, created: float = 1.0, **given: Any) -> Plan:
    names = {name: given.pop(name) for name in ("asked", "name") if name in given}
    plan = plan_of(cluster_of(hosts or HOSTS, **given))
    return replace(plan, identity=replace(IDENTITY, job_id=id, created=created, **names))


@pytest.fixture
def places(tmp_path: Path) -> JobPlaces:
    return JobPlaces(tmp_path / "state/jobs")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state/jobs"


def store(places: JobPlaces, plan: Plan) -> None:
    places.store(plan.identity, plan.cluster)


def remember(plan: Plan) -> str:
    warnings: list[str] = []
    job_places.remember(plan.identity, plan.cluster, warnings.append)
    return "".join(warnings)


def cluster(places: JobPlaces, text: str) -> Cluster:
    found = places.find(text)
    assert found is not None
    assert found.cluster is not None
    return found.cluster


def test_hosts_come_back_as_they_were(places: JobPlaces, folder: Path) -> None:
    keys = {
        "USER": "bob",
        "GATEWAY": "bastion",
        "HOST_KEYS": "strict",
        "GRACE": "3",
        "PYTHON": "/opt/python3",
        "PORT": 23,
    }
    keys["IDENTITY_FILE"] = "keys/id"
    plan = made(**keys)
    store(places, plan)
    found = cluster(places, "J")
    assert found.hosts == plan.cluster.hosts
    assert (found.user, found.gateway, found.host_keys, found.grace) == ("bob", "bastion", "strict", 3.0)
    assert (found.python, found.port) == ("/opt/python3", 23)
    assert found.identity_file == os.path.abspath("keys/id"), "later commands have another current folder"
    store(places, made("K", [{"host": "10.0.0.1", "python": "/opt/py", "identity_file": "keys/one", "prelude": "x"}]))
    [host] = cluster(places, "K").hosts
    assert (host.python, host.identity_file, host.prelude) == ("/opt/py", os.path.abspath("keys/one"), None)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "J.json").stat().st_mode) == 0o600


def test_hosts_of_one_machine_keep_their_names_and_entries(places: JobPlaces) -> None:
    plan = made(hosts=["ann@10.0.0.1", "ann@10.0.0.1", "10.0.0.3:1", "10.0.0.3:2"])
    few = replace(plan, cluster=replace(plan.cluster, hosts=plan.cluster.hosts[1:3]))
    store(places, few)
    found = cluster(places, "J")
    assert [(host.name, host.entry) for host in found.hosts] == [(host.name, host.entry) for host in few.cluster.hosts]


def test_nothing_secret_is_stored(places: JobPlaces, folder: Path) -> None:
    plan = made(ENV={"TOKEN": "s3cr3t"}, SECRETS=["KEY"], PRELUDE="export PASSWORD=s3cr3t", PASS_ENV=["HOME"])
    store(places, plan)
    text = (folder / "J.json").read_text()
    for private in ("s3cr3t", "the-token", "the-key", "the-certificate", "TOKEN", "train.py"):
        assert private not in text
    assert cluster(places, "J").secrets == ("KEY",), "later commands mask its value"


def test_jobs_are_found_by_id_name_and_prefix(places: JobPlaces) -> None:
    store(places, made("X", ["10.0.0.1"], 1.0, asked="X", name="X"))
    store(places, made("X-2", ["10.0.0.2"], 2.0, asked="X", name="X"))
    store(places, made("2026-a", ["10.0.0.3"], 3.0, name="bert"))
    store(places, made("2026-b", ["10.0.0.4"], 4.0))
    for text, address in (("X", 2), ("X-1", 1), ("bert", 3), ("2026-b", 4), ("2026-a", 3)):
        assert cluster(places, text).hosts[0].host == f"10.0.0.{address}"
    with pytest.raises(UsageError, match="not unique: 2026-b, 2026-a"):
        places.find("2026")
    store(places, made("2026-b", ["10.0.0.3"], 4.0, ROOT_DIR="/data/jobs"))
    with pytest.raises(UsageError, match="not unique: 2026-b, 2026-a"):
        places.find("2026")
    store(places, made("2026-b", ["10.0.0.3"], 4.0))
    assert cluster(places, "2026").hosts[0].host == "10.0.0.3", "jobs of the same hosts"
    for text in ("ber", "Y", "../X", "X.json"):
        assert places.find(text) is None
    newest = places.newest()
    assert newest is not None
    assert newest.id == "2026-b"
    places.forget(["2026-b", "../../etc", "never"])
    assert places.find("2026-b") is None


def test_a_bounded_number_of_jobs_is_kept(places: JobPlaces, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_places, "_MOST", 5)
    plan = made()
    for number in range(8):
        store(places, replace(plan, identity=replace(plan.identity, job_id=f"J{number}")))
        os.utime(folder / f"J{number}.json", (number, number))
    store(places, replace(plan, identity=replace(plan.identity, job_id="last")))
    assert sorted(os.listdir(folder)) == ["J4.json", "J5.json", "J6.json", "J7.json", "last.json"]


def test_two_commands_at_once_lose_nothing(places: JobPlaces) -> None:
    plan = made()
    plans = [replace(plan, identity=replace(plan.identity, job_id=f"J{number}")) for number in range(40)]
    same = [replace(plan, identity=replace(plan.identity, job_id="same", created=number)) for number in range(40)]
    seen = []

    def store_both(pair: tuple[Plan, Plan]) -> None:
        for one in pair:
            store(places, one)
        found = places.find("same")
        seen.append(found is not None and found.cluster is not None)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store_both, zip(plans, same, strict=True)))
    assert seen == [True] * 40, "a file is never seen by half"
    assert all(places.find(f"J{number}") for number in range(40))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("host", "-oProxyCommand=sh"),
        ("host", "a;b"),
        ("host", ""),
        ("user", "-l"),
        ("address", "$(id)"),
        ("root_dir", "relative"),
        ("root_dir", "/a\nb"),
        ("python", "/a\nb"),
        ("identity_file", 7),
        ("port", 70000),
        ("port", "x"),
        ("name", 7),
    ],
)
def test_a_file_with_wrong_values_counts_as_missing(places: JobPlaces, folder: Path, key: str, value: object) -> None:
    store(places, made())
    content = json.loads((folder / "J.json").read_text())
    content["hosts"][0][key] = value
    (folder / "J.json").write_text(json.dumps(content))
    assert places.find("J") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', "[" * 100_000, '{"format": 1, "id": "other"}'])
def test_a_damaged_file_hides_no_other(places: JobPlaces, folder: Path, text: str) -> None:
    store(places, made())
    (folder / "K.json").write_text(text)
    os.mkfifo(folder / "F.json")
    (folder / "L.json").symlink_to(folder / "J.json")
    assert places.find("J") is not None
    assert [places.find(name) for name in ("K", "F", "L")] == [None] * 3
    content = json.loads((folder / "J.json").read_text())
    content["keys"]["HOST_KEYS"] = "none"
    (folder / "J.json").write_text(json.dumps(content))
    assert places.find("J") is None


def test_what_all_users_may_write_is_refused(places: JobPlaces, folder: Path) -> None:
    store(places, made())
    (folder / "J.json").chmod(0o666)
    with pytest.raises(ConfigError, match=r"J\.json can be changed by every user"):
        places.find("J")
    (folder / "J.json").chmod(0o600)
    folder.chmod(0o777)
    for act in (lambda: places.find("J"), places.newest, lambda: store(places, made())):
        with pytest.raises(ConfigError, match="all users may write"):
            act()


def test_jobs_of_the_embedded_cluster_need_no_hosts(places: JobPlaces) -> None:
    plan = made()
    store(places, replace(plan, cluster=replace(plan.cluster, ssh_config="none")))
    found = places.find("J")
    assert found is not None
    assert found.cluster is None


# -- which command uses them


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_conf_py_goes_before_stored_hosts_except_for_ids_of_the_tool(home: Path) -> None:
    conf = cluster_of(["10.0.0.9", *HOSTS])
    assert remember(made("20260102-030405-abcd")) == ""
    assert remember(made("20260102-030406-abcd", ["10.7.7.7"])) == ""
    assert remember(made("X", ["10.7.7.7"], asked="X", name="X")) == ""
    assert job_places.find_on_other_hosts("20260102-030405-abcd", conf) is None, "conf.py has these hosts"
    found = job_places.find_on_other_hosts("20260102-030406-abcd", conf)
    assert found is not None
    assert found.id == "20260102-030406-abcd"
    for text in ("X", "20260102-030406", "unknown"):
        assert job_places.find_on_other_hosts(text, conf) is None


def test_a_job_of_this_machine_is_found_from_other_folders(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = home / "work"
    work.mkdir()
    here = made()
    remember(replace(here, cluster=replace(this_machine.own_cluster(work), secrets=("KEY",))))
    found = job_places.find_without_conf("J")
    assert found is not None
    assert found.cluster is not None
    assert (found.here, found.cluster.root_dir) == (True, str(work / ".clustertool"))
    assert found.cluster.secrets == ("KEY",)
    (work / ".clustertool/.clustertool").mkdir(parents=True)
    (work / ".clustertool/.clustertool/marker").touch()
    monkeypatch.chdir(work)
    assert job_places.find_without_conf("J") is None, "the folder has it"
    assert job_places.find_without_conf("") is None


def test_a_state_folder_that_cannot_be_written_is_reported(home: Path) -> None:
    (home / "xdg").write_text("a file in its place")
    assert "the hosts of this job are not stored" in remember(made())
    assert job_places.find_without_conf("") is None
