"""conf.py: every key with its old and new forms; what is wrong is named with its value and with what is right."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clustertool.actions import load_config
from clustertool.actions.conf_file import Selection
from clustertool.errors import ConfigError, UsageError
from clustertool.model.config.cluster import KEYS, Cluster, read_cluster
from clustertool.model.config.hosts import Host, expand, read_hosts
from clustertool.model.container.container_settings import ContainerSettings
from clustertool.model.planning.requests import job_environment, probe_request

HOSTS = ["10.0.0.1"]

# key -> what conf.py may say, and what it is read as
RIGHT: list[tuple[str, object, object]] = [
    ("ENGINE", "ssh", "ssh"),
    ("ROOT_DIR", "/data", "/data"),
    ("ROOT_DIR", "~/jobs", "~/jobs"),
    ("ROOT_DIR", "~", "~"),
    ("ROOT_DIR_GROUP", "trusted", "trusted"),
    ("PADDLE_NIC", "eth0", "eth0"),
    ("PADDLE_PORT", 7164, 7164),
    ("PADDLE_PORT", "7164", 7164),
    ("PADDLE_PORT", " 7164 ", 7164),
    ("PADDLE_PORTS_NUM", "2", 2),
    ("PADDLE_PORTS_NUM_FOR_SPARSE", 0, 0),
    ("PADDLE_PORTS_NUM_FOR_SPARSE", "3", 3),
    ("PADDLE_USE_GPU", "True", True),
    ("PADDLE_USE_GPU", "False", False),
    ("PADDLE_USE_GPU", True, True),
    ("PADDLE_USE_GPU", 0, False),
    ("LD_LIBRARY_PATH", "/usr/local/cuda/lib64:/opt/lib", "/usr/local/cuda/lib64:/opt/lib"),
    ("USER", "ann", "ann"),
    ("PORT", "2222", 2222),
    ("IDENTITY_FILE", "~/.ssh/id", "~/.ssh/id"),
    ("GATEWAY", "ann@gate:22", "ann@gate:22"),
    ("CONNECT_TIMEOUT", "2.5", 2.5),
    ("HOST_KEYS", "strict", "strict"),
    ("WORKSPACE_MAY_SET", ["container.options.--mount", "q.x"], ("container.options.--mount", "q.x")),
    ("KNOWN_HOSTS", "/etc/known", "/etc/known"),
    ("PYTHON", "/opt/python/bin/python3", "/opt/python/bin/python3"),
    ("PRELUDE", "module load cuda", "module load cuda"),
    ("PRELUDE", ["source ~/venv/bin/activate", "module load cuda"], "source ~/venv/bin/activate\nmodule load cuda"),
    ("ENV", {"A": "x", "B": 2, "C": 0.5}, (("A", "x"), ("B", "2"), ("C", "0.5"))),
    ("PASS_ENV", ["A", "B"], ("A", "B")),
    ("PASS_ENV", "A, B", ("A", "B")),
    ("SECRETS", ("KEY",), ("KEY",)),
    ("NOTIFY", "https://hooks.example.org/a?b=c#d", ("https://hooks.example.org/a?b=c#d",)),
    ("NOTIFY", "HTTP://10.0.0.9:8080", ("HTTP://10.0.0.9:8080",)),
    ("NOTIFY", "mailtos://ann:word@example.org?to=bob", ("mailtos://ann:word@example.org?to=bob",)),
    ("NOTIFY", ["/opt/notify", "-q", ""], ("/opt/notify", "-q", "")),
    ("NOTIFY", "", ()),
    ("NOTIFY", [], ()),
    ("DEVICE_KIND", "npu", "npu"),
    ("DEVICE_VISIBILITY", "own", "own"),
    ("START_PORT", "6170", 6170),
    ("LEAD_PORT", 6160, 6160),
    ("RELAY", "off", "off"),
    ("IGNORE_FROM", [".gitignore"], (".gitignore",)),
    ("DISPATCH", "rsync", "rsync"),
    ("COORDINATOR", "node1", "node1"),
    ("JOIN_TIMEOUT", "5m", 300.0),
    ("LOSS_TIMEOUT", 3, 3.0),
    ("GRACE", "1.5", 1.5),
    ("HANG_TIMEOUT", "2m", 120.0),
    ("HANG_TIMEOUT", 0, 0.0),
    ("METRICS_FILE", "~/metrics/{job}.prom", "~/metrics/{job}.prom"),
    ("CONTAINER", {"image": "a:1", "options": ["--privileged"]}, ContainerSettings("a:1", options=("--privileged",))),
    ("IMAGE_FROM", "first", "first"),
    ("CHECKS_OFF", ["ping"], ("ping",)),
    ("CHECK_PACKAGES", [], ()),
]

# key, what is wrong, a word of what is right
WRONG: list[tuple[str, object, str]] = [
    *[("ROOT_DIR", value, "absolute") for value in ("jobs", "./jobs", "~ann/jobs", "")],
    ("ROOT_DIR", 5, "a string"),
    ("METRICS_FILE", 5, "a string"),
    ("HANG_TIMEOUT", "soon", "a duration, or 0"),
    ("METRICS_FILE", "metrics.prom", "absolute"),
    ("ENGINE", 5, "a string"),
    *[("ROOT_DIR_GROUP", value, "trusted") for value in ("staff", True, "")],
    ("ROOT_DIR", "/a\nb", "one line"),
    ("PYTHON", "python3\nrm", "one line"),
    *[
        ("PADDLE_PORT", value, "a port, 1 to 65535")
        for value in (0, 65536, -1, "http", "7164.0", 7164.5, True, None, [7164])
    ],
    *[("PADDLE_PORTS_NUM", value, "1 to 1000") for value in (0, "-1", "many", False, 100000)],
    *[("PADDLE_PORTS_NUM_FOR_SPARSE", value, "0 to 1000") for value in (-1, "few", None)],
    *[("PADDLE_USE_GPU", value, "True or False") for value in ("maybe", 2, None, [])],
    *[(key, value, "a port") for key in ("PORT", "START_PORT", "LEAD_PORT") for value in (0, "ssh", 70000)],
    *[
        (key, value, "a duration above 0: seconds, or ")
        for key in ("CONNECT_TIMEOUT", "JOIN_TIMEOUT", "LOSS_TIMEOUT", "GRACE")
        for value in (0, -1, "soon", True, float("inf"), float("nan"), None)
    ],
    *[
        (key, value, "a string")
        for key in ("PADDLE_NIC", "LD_LIBRARY_PATH", "USER", "IDENTITY_FILE", "GATEWAY", "KNOWN_HOSTS", "PYTHON")
        for value in (5, None, ["x"])
    ],
    *[("PRELUDE", value, "a string") for value in (5, [1], {"a": 1})],
    *[
        ("ENV", value, "a dict")
        for value in (["A=1"], "A=1", {1: "a"}, {"A-B": "x"}, {"A": None}, {"A": ["x"]}, {"A": "x\0y"})
    ],
    *[
        (key, value, "a list of names")
        for key in ("PASS_ENV", "SECRETS", "CHECKS_OFF", "CHECK_PACKAGES")
        for value in (5, [1], {"A": 1}, None)
    ],
    *[("IGNORE_FROM", value, "a list of names of files") for value in (["a/b"], [".."], [""])],
    *[("HOST_KEYS", value, "one of accept-new, strict, off") for value in ("yes", "", None, [])],
    *[("DEVICE_KIND", value, "one of auto, cpu, gpu, xpu, dcu, npu") for value in ("tpu", "GPU", 1)],
    *[("DEVICE_VISIBILITY", value, "one of node, own") for value in ("all", "", None)],
    *[("RELAY", value, "one of auto, off") for value in ("on", True)],
    *[("CONTAINER", value, "a dict") for value in ("a:1", ["a:1"], None)],
    *[("IMAGE_FROM", value, "one of laptop, first, registry") for value in ("hub", "", None)],
    *[("WORKSPACE_MAY_SET", value, "a list of keys and options") for value in (["mount"], ["--mount"], ["a..b", "."])],
    ("COORDINATOR", 1, "a string"),
    *[("DISPATCH", value, "one of swarm, rsync") for value in ("scp", "", None)],
]


def read(**keys: object) -> Cluster:
    return read_cluster({"HOSTS": HOSTS, **keys})


def refusal(**keys: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(**keys)
    assert caught.value.code == 78
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize("key, given, meant", RIGHT)
def test_right_values(key: str, given: object, meant: object) -> None:
    assert getattr(read(**{key: given}), KEYS[key].name) == meant


@pytest.mark.parametrize("key, given, right", WRONG)
def test_wrong_values_are_named_with_the_key_the_value_and_what_is_right(key: str, given: object, right: str) -> None:
    error = refusal(**{key: given})
    assert key in error.what
    assert repr(given) in error.what
    assert right in error.fix


def test_both_tables_know_every_key() -> None:
    assert {key for key, _, _ in RIGHT} == set(KEYS) - {"HOSTS"}
    assert {key for key, _, _ in WRONG} == set(KEYS) - {"HOSTS", "NOTIFY"}  # whose value is not shown


def test_the_defaults() -> None:
    cluster = read()
    assert (cluster.root_dir, cluster.nic) == ("~/clustertool", "")
    assert (cluster.pserver_port, cluster.pserver_port_given) == (7164, False)
    assert (cluster.ports_num, cluster.ports_num_for_sparse, cluster.use_gpu, cluster.ld_library_path) == (
        1,
        1,
        None,
        "",
    )
    assert (cluster.host_keys, cluster.python, cluster.prelude) == ("accept-new", "python3", "")
    assert (cluster.env, cluster.pass_env, cluster.secrets) == ((), (), ())
    assert (cluster.device_kind, cluster.start_port, cluster.lead_port, cluster.relay) == ("auto", 0, 0, "auto")
    assert (cluster.loss_timeout, cluster.grace) == (10.0, 10.0)
    assert (cluster.checks_off, cluster.check_packages) == ((), ("torch", "paddle", "numpy"))
    assert read(PADDLE_PORT="7164").pserver_port_given


def test_a_conf_of_the_old_tool_reads_as_it_did() -> None:
    cluster = read_cluster(
        {
            "HOSTS": ["root@192.168.100.17", "root@192.168.100.18"],
            "ROOT_DIR": "/home/paddle",
            "PADDLE_NIC": "eth0",
            "PADDLE_PORT": "7164",
            "PADDLE_PORTS_NUM": "2",
            "PADDLE_PORTS_NUM_FOR_SPARSE": "2",
            "PADDLE_USE_GPU": "False",
            "LD_LIBRARY_PATH": "/usr/local/cuda/lib64:/usr/lib64",
        }
    )
    assert [(host.index, host.user, host.host) for host in cluster.hosts] == [
        (0, "root", "192.168.100.17"),
        (1, "root", "192.168.100.18"),
    ]
    assert (cluster.pserver_port, cluster.ports_num, cluster.ports_num_for_sparse, cluster.use_gpu) == (
        7164,
        2,
        2,
        False,
    )


@pytest.mark.parametrize(
    "typo, meant", [("HOST", "HOSTS"), ("PADLE_PORT", "PADDLE_PORT"), ("ROOTDIR", "ROOT_DIR"), ("SECRET", "SECRETS")]
)
def test_an_unknown_key_is_named_with_the_one_that_was_meant(typo: str, meant: str) -> None:
    error = refusal(**{typo: "x"})
    assert f"{typo} = 'x'" in error.what
    assert f"did you mean {meant}?" in error.fix


@pytest.mark.parametrize(
    "value",
    [
        "hooks.example.org/s3cr3t",
        "https://s3cr3t:word@example.org/",
        "HTTPS://s3cr3t@example.org",
        "https://example.org/s3cr3t twice",
        "https:///s3cr3t",
        "://s3cr3t",
        ["s3cr3t", 7],
        ["", "s3cr3t"],
        ["https://s3cr3t", "-q"],
        ["mail", "s3cr3t\0"],
        {"s3cr3t": 1},
    ],
)
def test_a_wrong_receiver_of_notifications_is_not_shown(value: object) -> None:
    error = refusal(NOTIFY=value)
    assert error.what == "conf.py: NOTIFY = *** is not right" and "a list of arguments" in error.fix
    assert "s3cr3t" not in str(error) + error.fix
    if isinstance(value, str):
        assert "s3cr3t" not in refusal(NOTIFI=value).what, "a key that is not spelled right"


def test_the_receiver_of_notifications_is_in_no_text_of_the_cluster() -> None:
    assert "s3cr3t" not in repr(read_cluster({"HOSTS": HOSTS, "NOTIFY": "https://example.org/s3cr3t"}))


def test_an_unknown_key_that_is_like_none_lists_them_all() -> None:
    error = refusal(QQQQQ=1)
    assert all(key in error.fix for key in KEYS)
    assert "small letters" in error.fix


def test_the_file_is_named() -> None:
    with pytest.raises(ConfigError, match="^/home/ann/conf.py: PORT = 0 is not right"):
        read_cluster({"HOSTS": HOSTS, "PORT": 0}, "/home/ann/conf.py")
    with pytest.raises(ConfigError, match="^/home/ann/conf.py: HOSTS is empty"):
        read_cluster({"HOSTS": []}, "/home/ann/conf.py")


def test_hosts_must_be_there() -> None:
    with pytest.raises(ConfigError, match="has no HOSTS"):
        read_cluster({"PORT": 22})


# -- HOSTS --------------------------------------------------------------------------------------------------------------

LINES = [
    ("node1", [("", "node1", 0, "")]),
    ("ann@node1", [("ann", "node1", 0, "")]),
    ("ann@node1:2222", [("ann", "node1", 2222, "")]),
    (" ann@node1:22 ", [("ann", "node1", 22, "")]),
    ("10.0.0.1:22", [("", "10.0.0.1", 22, "10.0.0.1")]),
    ("fe80::1", [("", "fe80::1", 0, "fe80::1")]),
    ("[fe80::1]", [("", "fe80::1", 0, "fe80::1")]),
    ("u@[10.0.0.1]:2200", [("u", "10.0.0.1", 2200, "10.0.0.1")]),  # as `ssh -G` prints a ProxyJump
    ("ann@[fe80::1%eth0]:22", [("ann", "fe80::1%eth0", 22, "fe80::1%eth0")]),
    ("a.b-c_d.example.org.", [("", "a.b-c_d.example.org.", 0, "")]),
    ("ann@node[1-3]:22", [("ann", f"node{n}", 22, "") for n in (1, 2, 3)]),
    ("10.0.0.[9-11]", [("", f"10.0.0.{n}", 0, f"10.0.0.{n}") for n in (9, 10, 11)]),
    ({"host": "node1", "user": "ann", "port": "22", "address": "10.0.0.1"}, [("ann", "node1", 22, "10.0.0.1")]),
    ({"host": "ann@node1:22", "user": "bob"}, [("bob", "node1", 22, "")]),
    ({"host": "node[1-2]", "port": 7}, [("", "node1", 7, ""), ("", "node2", 7, "")]),
]


@pytest.mark.parametrize("entry, meant", LINES)
def test_entries_of_hosts(entry: object, meant: list[tuple[str, str, int, str]]) -> None:
    assert [(host.user, host.host, host.port, host.address) for host in read_hosts([entry])] == meant


RANGES = [
    ("node[1-3]", "node1 node2 node3"),
    ("node[08-11]", "node08 node09 node10 node11"),
    ("node[1,3-4,007]", "node1 node3 node4 node007"),
    ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
    ("n[5]x", "n5x"),
    ("plain", "plain"),
    ("node[0-8/2]", "node0 node2 node4 node6 node8"),
    ("n[1-6/4,9,01-04/3]", "n1 n5 n9 n01 n04"),
]


@pytest.mark.parametrize("pattern, names", RANGES)
def test_ranges(pattern: str, names: str) -> None:
    assert expand(pattern) == names.split()


@pytest.mark.parametrize("pattern", ["n[0-8/0]", "n[0-8/]", "n[3/2]", "n[/2]", "n[0-8/2/2]", "n[0-8/999999]"])
def test_a_step_that_is_not_right_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hosts([pattern])
    assert pattern in caught.value.what and caught.value.fix


def test_the_index_is_the_node_id_through_ranges_and_dicts() -> None:
    hosts = read_hosts(["a[1-2]", {"host": "b[1-2]"}, "c"])
    assert [(host.index, host.host) for host in hosts] == [(0, "a1"), (1, "a2"), (2, "b1"), (3, "b2"), (4, "c")]


def test_a_dict_says_what_a_line_cannot() -> None:
    (host,) = read_hosts(
        [
            {
                "host": "n",
                "devices": "0,2",
                "nproc": 2,
                "roles": {"pserver": 1, "trainer": None},
                "env": {"A": 1},
                "root_dir": "/d",
            }
        ]
    )
    assert (host.devices, host.nproc, host.env, host.root_dir) == ((0, 2), 2, (("A", "1"),), "/d")
    assert host.roles == (("pserver", 1), ("trainer", None))
    assert (host.plays("pserver"), host.plays("heter"), host.count("pserver"), host.count("trainer")) == (
        True,
        False,
        1,
        None,
    )
    (heter,) = read_hosts([{"host": "n", "roles": {"heter_trainer": 2, "pserver": 1}}])
    assert heter.roles == (("heter", 2), ("pserver", 1))
    (listed,) = read_hosts([{"host": "n", "roles": ["trainer"], "devices": 3}])
    assert (listed.plays("trainer"), listed.plays("pserver"), listed.devices) == (True, False, (3,))


def test_a_host_has_its_own_python_prelude_interface_and_key() -> None:
    own = {"host": "n1", "python": "/p", "prelude": ["a", "b"], "interface": "ib0", "identity_file": "~/k"}
    keys = {"PYTHON": "py", "PRELUDE": "all", "PADDLE_NIC": "eth1", "IDENTITY_FILE": "key"}
    cluster = read_cluster({"HOSTS": [own, "n2", {"host": "n3", "prelude": ""}], **keys})
    assert [cluster.python_of(host) for host in cluster.hosts] == ["/p", "py", "py"]
    assert [cluster.prelude_of(host) for host in cluster.hosts] == ["a\nb", "all", ""]
    assert [probe_request(cluster, host)["nic"] for host in cluster.hosts] == ["ib0", "eth1", "eth1"]
    assert ["job_path" in probe_request(cluster, host) for host in cluster.hosts] == [False, False, True]
    assert [job_environment(cluster, host, {})["prelude"] for host in cluster.hosts] == ["a\nb", "all", ""]
    assert cluster.hosts[0].identity_file == "~/k"


def test_names_are_unique() -> None:
    hosts = read_hosts(["a", "b:1", "b:2", "c", "c", "d:5", "d:5"])
    assert [host.name for host in hosts] == ["a", "b:1", "b:2", "c#3", "c#4", "d:5#5", "d:5#6"]


BAD_HOSTS: list[tuple[object, str]] = [
    ("node1", "not a list"),
    (None, "not a list"),
    ({"host": "a"}, "not a list"),
    ([], "HOSTS is empty"),
    ([5], "HOSTS has 5"),
    ([""], "no host name"),
    (["a b"], "no host name"),
    (["-a"], "no host name"),
    (["a;rm"], "no host name"),
    (["10.0.0"], "'10.0.0' is no host name"),
    (["10.0.0.300"], "no host name"),
    (["@a"], "no user name"),
    (["a@b;@c"], "no user name"),
    ([{"host": "a", "user": "-b"}], "that ssh does not allow"),
    (["a:"], "no port after ':'"),
    (["a:x"], "'x' is no port"),
    (["a:0"], "'0' is no port"),
    (["a:65536"], "'65536' is no port"),
    (["a:b:c"], "no host name"),
    (["[fe80::1"], "HOSTS has '\\[fe80::1'"),
    (["[fe80::1]22"], "HOSTS has"),
    (["[fe80::1]:"], "no IPv6"),
    (["[fe80::zz]:22"], "no IPv6 address"),
    (["node[1-"], "no host name"),
    (["node[]"], "no host name"),
    (["node[3-1]"], "runs backwards"),
    (["node[1-9999999]"], "too long"),
    (["node[1--3]"], "is no range"),
    (["r[1-9999]n[1-9999]n[1-9999]"], "too many"),
    ([{}], "has no host"),
    ([{"host": 5}], "has no host"),
    ([{"host": ""}], "has no host"),
    ([{"host": "a", "cpus": 4}], "unknown key 'cpus'"),
    ([{"host": "a", "user": 5}], "user is 5"),
    ([{"host": "a", "address": None}], "address is None"),
    ([{"host": "a[1-2]", "address": "10.0.0.1"}], "one address to 2 hosts"),
    ([{"host": "a", "port": True}], "True is no port"),
    ([{"host": "a", "devices": "x"}], "'x' is no device number"),
    ([{"host": "a", "devices": [0, 0]}], "names a device twice"),
    ([{"host": "a", "devices": True}], "devices is True"),
    ([{"host": "a", "devices": [-1]}], "-1 is no device number"),
    ([{"host": "a", "nproc": 0}], "nproc is 0"),
    ([{"host": "a", "nproc": "two"}], "nproc is 'two'"),
    ([{"host": "a", "roles": ["worker"]}], "'worker' is no role"),
    ([{"host": "a", "roles": [["heter"]]}], "\\['heter'\\] is no role"),
    ([{"host": "a", "roles": ["heter", "heter_trainer"]}], "names the role heter twice"),
    ([{"host": "a", "roles": "trainer"}], "roles is 'trainer'"),
    ([{"host": "a", "roles": {"trainer": 0}}], "roles is 0"),
    ([{"host": "a", "env": ["A=1"]}], "env is \\['A=1'\\]"),
    ([{"host": "a", "env": {"A B": "1"}}], "env is"),
    ([{"host": "a", "env": {"A": None}}], "env is"),
    ([{"host": "a", "prelude": 5}], "prelude is 5"),
    ([{"host": "a", "identity_file": ["k"]}], "identity_file is"),
    ([{"host": "a", "python": "/p\n"}], "python of a = .* line break"),
    ([{"host": "a", "root_dir": "rel"}], "root_dir of a = 'rel' is relative"),
    ([{"host": "a", "root_dir": "/a\nb"}], "line break"),
]


@pytest.mark.parametrize("hosts, what", BAD_HOSTS)
def test_a_bad_entry_is_named_with_what_is_right(hosts: object, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_cluster({"HOSTS": hosts})
    assert re.search(what, caught.value.what)
    assert caught.value.fix


def test_thousands_of_hosts_are_no_trouble() -> None:
    hosts = read_hosts(["node[0001-5000]"])
    assert (len(hosts), hosts[-1]) == (5000, Host(4999, "node5000", name="node5000"))


def test_an_entry_is_known_by_user_host_and_port() -> None:
    entries: list[Any] = ["ann@a:7", "b"]
    assert [host.entry for host in read_hosts(entries)] == ["ann@a:7", "@b:0"]


@pytest.mark.parametrize(
    ("only", "part"), [((), "3 nodes"), (("127.0.0.2",), "1 of 3 nodes"), (("nowhere",), "3 nodes")]
)
def test_the_first_line_has_what_is_selected_and_what_is_listed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: tuple[str, ...], part: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    conf = tmp_path / "conf.py"
    conf.write_text('HOSTS = ["127.0.0.1", "127.0.0.2", "127.0.0.1"]\n')
    notes: list[str] = []
    caller: Any = SimpleNamespace(note=notes.append)
    with contextlib.suppress(UsageError):
        load_config.cluster(caller, Selection(conf=str(conf), only=only), start_local=False)
    assert notes == [f"conf: {conf} ({part}; more than once: 127.0.0.1)"]
