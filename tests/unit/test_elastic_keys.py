"""Settings of an elastic job: the options, [elastic] of job.toml, COORDINATOR, and the URLs of etcd."""

from __future__ import annotations

import pytest

from clustertool.errors import ClustertoolError, ConfigError, DataError, UsageError
from clustertool.model.config.cluster import Cluster, read_cluster
from clustertool.model.config.elastic_keys import ElasticServer, ElasticSettings
from clustertool.model.config.job import Options, read_job
from clustertool.model.shape import read_own, to_plain

HOSTS = ["a", "b", "c", "d"]


def cluster(**keys: object) -> Cluster:
    return read_cluster({"HOSTS": HOSTS, **keys})


def read(toml: dict[str, object] | None = None, *, on: Cluster | None = None, **options: object) -> ElasticSettings:
    return read_job(on or cluster(), toml or {}, Options(**options)).elastic  # type: ignore[arg-type]


def test_a_range_of_nodes_makes_a_job_elastic() -> None:
    assert read(nnodes="2:4") == ElasticSettings(minimum=2, maximum=4)
    assert read(nnodes="2:4").present and read(nnodes="2:4").text == "2:4"
    # It keeps its number of nodes, and waits for another one when it has lost one.
    assert read(nnodes="2:2") == ElasticSettings(minimum=2, maximum=2)


def test_a_number_of_nodes_is_no_elastic_job() -> None:
    assert not read().present and not read(nnodes="2").present
    assert not read({"elastic": {"min": 1, "max": 4}}, nnodes="2").present  # the command line has priority
    assert not read({"elastic": {"timeout": "1m"}}).present


def test_the_table_has_all_settings() -> None:
    table = {"min": 1, "max": 3, "timeout": "2m", "grow": "restart", "backoff": ["500ms", 60]}
    expected = ElasticSettings(1, 3, 120.0, "restart", (0.5, 60.0))
    assert read({"elastic": table}) == expected
    assert read({"elastic": table}, nnodes="2:4") == ElasticSettings(2, 4, 120.0, "restart", (0.5, 60.0))
    assert read({"elastic": {"min": 1, "backoff_min": 2, "backoff_max": "1m"}}).backoff == (2.0, 60.0)
    assert read({"elastic": {"min": 2}}).maximum == 4  # all hosts
    assert read_own(ElasticSettings, to_plain(expected)) == expected


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ({"mni": 1}, "unknown key 'mni'"),
        ({"min": "1"}, "min = '1' is not right"),
        ({"min": 0}, "min = 0 is not right"),
        ({"min": True}, "min = True is not right"),
        ({"min": 3, "max": 2}, "min = 3 is more than max = 2"),
        ({"max": 2}, "max and no min"),
        ({"min": 1, "timeout": 0}, "timeout = 0 is not right"),
        ({"min": 1, "timeout": "soon"}, "timeout = 'soon' is not right"),
        ({"min": 1, "grow": "now"}, "grow = 'now' is not right"),
        ({"min": 1, "backoff": 1}, "backoff = 1 is not right"),
        ({"min": 1, "backoff": [1]}, "backoff = [1] is not right"),
        ({"min": 1, "backoff": [31, 30]}, "31 s, is longer than the longest, 30 s"),
        ({"min": 1, "backoff_min": "40s"}, "40 s, is longer than the longest, 30 s"),
        ({"min": 1, "server": 1}, "server = 1 is not right"),
        ({"min": 1, "server": "node0:2379"}, "'node0:2379' is no URL of an etcd server"),
    ],
)
def test_a_wrong_table_is_an_error_of_job_toml(table: dict[str, object], what: str) -> None:
    with pytest.raises(DataError) as caught:
        read({"elastic": table})
    assert what in caught.value.what and "job.toml: [elastic]" in caught.value.what and caught.value.fix


@pytest.mark.parametrize("nnodes", ["2:", ":4", "4:2", "0:2", "2:x", "2:4:6", "2:99999", " 2:4"])
def test_a_wrong_range_is_an_error_of_the_command_line(nnodes: str) -> None:
    with pytest.raises(UsageError, match="--nnodes"):
        read(nnodes=nnodes)


@pytest.mark.parametrize("mode", ["ps", "mpi"])
def test_modes_with_elastic_jobs(mode: str) -> None:
    assert read(nnodes="2:4", mode=mode).present


@pytest.mark.parametrize("mode", ["ps-heter", "rpc"])
def test_modes_without_elastic_jobs(mode: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(nnodes="2:4", mode=mode)
    assert f"(2:4 nodes) in mode {mode}" in caught.value.what and "collective, ps, mpi" in caught.value.fix
    assert not read(nnodes="2", mode=mode).present


# -- etcd -----------------------------------------------------------------------------------------------------------


def server(*texts: str, **keys: object) -> ElasticServer:
    return read(nnodes="2:4", elastic_server=texts, on=cluster(**keys)).server


def test_urls_of_etcd() -> None:
    assert server("http://a:1") == ElasticServer(("http://a:1",))
    assert server("etcd://10.0.0.1:2379") == ElasticServer(("http://10.0.0.1:2379",))  # as Paddle has it
    assert server("https://a") == ElasticServer(("https://a:2379",))
    assert server("https://a/, https://[fe80::1]:5", "https://c").urls == (
        "https://a:2379",
        "https://[fe80::1]:5",
        "https://c:2379",
    )
    assert not server().present


def test_password_and_certificates_are_secrets() -> None:
    both = server("https://me@a,https://b", SECRETS=["ETCD_PASSWORD", "ETCD_CA", "OTHER"])
    assert both == ElasticServer(("https://a:2379", "https://b:2379"), "me", "ETCD_PASSWORD", "ETCD_CA")
    assert both.secrets == ("ETCD_PASSWORD", "ETCD_CA")
    assert server("http://a", SECRETS=["ETCD_CA"]).secrets == ()


def test_the_server_of_job_toml() -> None:
    table = {"min": 2, "max": 4, "server": ["http://a", "http://b"]}
    assert read({"elastic": table}).server.urls == ("http://a:2379", "http://b:2379")
    assert read({"elastic": table}, elastic_server=("http://c",)).server.urls == ("http://c:2379",)


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("node0:2379", "is no URL"),
        ("ftp://a", "is no URL"),
        ("http://a:0", "is no URL"),
        ("http://a:70000", "is no URL"),
        ("http://a/path", "is no URL"),
        ("https://me@a", "SECRETS of conf.py has no ETCD_PASSWORD"),
        ("http://me@a", "would send the password of me unencrypted"),
        ("https://me@a,http://b", "would send the password of me unencrypted"),
        ("https://me@a,https://you@b", "has the users me, you"),
    ],
)
def test_a_wrong_url(url: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        server(url)


@pytest.mark.parametrize("url", ["https://me:s3cret@a", "ftp://me:s3cret@a", "https://me:s3cret@a:x"])
def test_a_password_on_the_command_line_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        server(url, SECRETS=["ETCD_PASSWORD"])
    assert "s3cret" not in caught.value.what + caught.value.fix


def test_the_timeout_of_the_command_line() -> None:
    assert read({"elastic": {"min": 1, "timeout": 5}}, elastic_timeout="2m").timeout == 120.0
    with pytest.raises(UsageError, match="--elastic-timeout 'soon' is not right"):
        read(nnodes="1:2", elastic_timeout="soon")
    with pytest.raises(UsageError, match="--elastic-timeout is for elastic jobs"):
        read(nnodes="2", elastic_timeout="2m")


def test_a_server_needs_an_elastic_job() -> None:
    with pytest.raises(UsageError, match="a fixed number of nodes"):
        read(elastic_server=("http://a",))


# -- COORDINATOR ----------------------------------------------------------------------------------------------------


def test_the_coordinator_is_a_host() -> None:
    assert read(nnodes="2:4", on=cluster(COORDINATOR="c")).coordinator == "c"
    assert read(nnodes="2:4", on=cluster(COORDINATOR="c"), elastic_server=("http://a",)).coordinator == ""
    with pytest.raises(ConfigError, match="COORDINATOR = 'x' is none of the hosts"):
        read(nnodes="2:4", on=cluster(COORDINATOR="x"))
    assert not read(on=cluster(COORDINATOR="x")).present  # a job that is not elastic has no use for it


def test_an_error_is_of_the_tool() -> None:
    with pytest.raises(ClustertoolError) as caught:
        read({"elastic": []})
    assert caught.value.code == 65
