"""A job is job.toml and the command line: which one wins, and which error each wrong thing is."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from cases import cluster_of, env_of, facts_of, hosts, job_of, of_role, one, plan_of

from clustertool.errors import ClustertoolError, DataError, UsageError
from clustertool.model.config.job import PLACED, JobSpec, Policy, valid_job_id
from clustertool.model.planning.plan import Plan

CLUSTER = cluster_of(hosts(2), GRACE=3)
Toml = Mapping[str, Any]


def refusal(kind: type[ClustertoolError], toml: Toml | None = None, **options: Any) -> ClustertoolError:
    with pytest.raises(ClustertoolError) as caught:
        job_of(CLUSTER, toml, **options)
    assert type(caught.value) is kind
    assert caught.value.what
    assert caught.value.fix
    return caught.value


# -- what wins ----------------------------------------------------------------------------------------------------------

TOML: Toml = {
    "mode": "ps",
    "trainer": {"command": ["python3", "a.py"], "per_node": 3},
    "pserver": {"command": ["./server", "--x"], "per_node": 2},
    "shards": {"files": "data/*-[0-9]*"},
    "env": {"A": "toml", "B": "toml"},
    "outputs": {"path": "model"},
    "policy": {
        "timeout": 60,
        "grace": 5,
        "on_failure": "continue",
        "max_restarts": 2,
        "max_restarts_without_progress": 0,
        "hang_timeout": "90s",
        "on_hang": "abort",
    },
}


def test_job_toml_beats_conf_and_defaults() -> None:
    job = job_of(CLUSTER, TOML)
    assert (job.mode, job.output, job.shards) == ("ps", "model", ("data/*-[0-9]*",))
    assert (job.trainer.command, job.trainer.per_node) == (("python3", "a.py"), 3)
    assert (job.pserver.command, job.pserver.per_node) == (("./server", "--x"), 2)
    policy = job.policy
    assert (policy.timeout, policy.grace, policy.on_failure, policy.max_restarts) == (60.0, 5.0, "continue", 2)
    assert policy.max_restarts_without_progress == 0 != Policy().max_restarts_without_progress
    assert (policy.hang_timeout, policy.on_hang) == (90.0, "abort")
    assert (Policy().hang_timeout, Policy().on_hang) == (600.0, "report")


def test_the_command_line_beats_job_toml() -> None:
    job = job_of(
        CLUSTER,
        TOML,
        mode="collective",
        script="b.py",
        worker_num="1",
        shards=("x-*,y-*", "z-*"),
        env=("B=line", "C=1=2"),
        timeout="7",
        grace="0",
        on_failure="abort",
        max_restarts="0",
        lease="30",
    )
    assert job.mode == "collective"
    assert (job.trainer.command, job.trainer.per_node) == (("python3", "-u", "b.py"), 1)
    assert job.shards == ("x-*", "y-*", "z-*")
    assert job.env == (("A", "toml"), ("B", "line"), ("C", "1=2"))
    policy = job.policy
    assert (policy.timeout, policy.grace, policy.on_failure, policy.max_restarts, policy.lease) == (
        7.0,
        0.0,
        "abort",
        0,
        30.0,
    )


def test_the_defaults() -> None:
    job = job_of(CLUSTER)
    assert job == JobSpec(policy=job.policy)
    assert (job.mode, job.output, job.shards, job.env, job.nnodes, job.ports.gloo) == (
        "collective",
        "output",
        (),
        (),
        0,
        0,
    )
    policy = job.policy
    assert (policy.timeout, policy.grace, policy.on_failure, policy.max_restarts) == (0.0, 3.0, "abort", 0)
    assert policy.loss_timeout == 10.0


def test_env_goes_conf_then_host_then_passed_then_job_toml_then_command_line() -> None:
    cluster = cluster_of(
        [{"host": "10.0.0.1", "env": {"B": "host", "C": "host"}}], ENV={"A": "conf", "B": "conf"}, PASS_ENV=["C", "D"]
    )
    made = plan_of(
        cluster, {"env": {"D": "toml", "E": "toml"}}, env=("E=line",), passed=[("C", "laptop"), ("D", "laptop")]
    )
    env = env_of(made, "trainer", 0)
    assert [env[name] for name in "ABCDE"] == ["conf", "host", "laptop", "toml", "line"]


COUNTS: list[tuple[dict[str, Any], Toml, dict[str, Any], list[int]]] = [
    # the HOSTS entry, job.toml, options -> trainers on that host (ps)
    ({}, {}, {}, [1]),
    ({"nproc": 4}, {}, {}, [4]),
    ({"nproc": 4, "roles": {"trainer": 3, "pserver": 1}}, {}, {}, [3]),
    ({"nproc": 4}, {"trainer": {"per_node": 2}}, {}, [2]),
    ({"nproc": 4}, {"trainer": {"per_node": 2}}, {"worker_num": "5"}, [5]),
    ({"nproc": 4}, {"trainer": {"per_node": 2}}, {"nproc_per_node": "6"}, [6]),
]


@pytest.mark.parametrize("entry, toml, options, trainers", COUNTS)
def test_counts_of_trainers(entry: dict[str, Any], toml: Toml, options: dict[str, Any], trainers: list[int]) -> None:
    made = plan_of(cluster_of([{"host": "10.0.0.1", **entry}]), toml, mode="ps", **options)
    assert [sum(p.role == "trainer" for p in node.processes) for node in made.nodes] == trainers


def test_trainers_wait_for_ports_of_pservers_unless_these_need_no_port() -> None:
    for ready, ports in (("listen", 1), ("started", 0)):
        made = plan_of(CLUSTER, {"mode": "ps", "pserver": {"ready": ready}})
        assert [len(process.ready) for process in of_role(made, "pserver")][1:] == [ports]


def test_counts_of_pservers() -> None:
    def servers(toml: Toml, **options: Any) -> int:
        return len(of_role(plan_of(CLUSTER, toml, mode="ps", **options), "pserver"))

    assert servers({}) == 2
    assert servers({"pserver": {"per_node": 2}}) == 4
    assert servers({"pserver": {"per_node": 2}}, server_num="3") == 6
    roles = cluster_of([{"host": "a", "roles": {"pserver": 2}}, {"host": "b", "roles": ["trainer"]}])
    assert len(of_role(plan_of(roles, mode="ps"), "pserver")) == 2
    assert len(of_role(plan_of(roles, mode="ps", server_num="3"), "pserver")) == 3


# -- mode ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"server_num": "1"}, {"servers": ("10.0.0.1:7000",)}])
def test_options_for_pservers_imply_the_mode(options: dict[str, Any]) -> None:
    assert job_of(CLUSTER, **options).mode == "ps"
    refusal(UsageError, None, mode="collective", **options)
    refusal(UsageError, {"mode": "collective"}, **options)
    assert job_of(CLUSTER, {"mode": "collective"}, mode="ps", **options).mode == "ps"


HETER: list[dict[str, Any]] = [{"heter_workers": ("10.0.0.1",)}, {"heter_worker_num": "2"}, {"heter_devices": "gpu"}]


@pytest.mark.parametrize("options", HETER)
def test_options_for_heter_trainers_imply_the_mode(options: dict[str, Any]) -> None:
    assert job_of(CLUSTER, **options, server_num="1").mode == "ps-heter"
    assert job_of(CLUSTER, {"mode": "ps"}, mode="ps-heter", **options).mode == "ps-heter"
    for mode in ("collective", "ps"):
        assert "--mode ps-heter" in refusal(UsageError, None, mode=mode, **options).fix
        reported = refusal(UsageError, {"mode": mode}, **options).what
        assert reported == f"--{next(iter(options)).replace('_', '-')} is for heter trainers, the mode is {mode}"


def test_workers_do_not_imply_a_mode() -> None:
    assert job_of(CLUSTER, workers=("10.0.0.1,10.0.0.2",), worker_num="2").mode == "collective"


@pytest.mark.parametrize("number", ["4", "2"])
def test_a_list_and_its_number_in_all_or_on_each_node_say_the_same(number: str) -> None:
    workers = ("10.0.0.1:1,10.0.0.2:1,10.0.0.1:2,10.0.0.2:2",)
    job = job_of(CLUSTER, workers=workers, worker_num=number)
    assert (
        len(of_role(plan_of(CLUSTER, workers=workers, worker_num=number), "trainer")) == len(job.trainer.endpoints) == 4
    )
    assert "leave --worker-num out" in refusal(UsageError, workers=workers, worker_num="3").fix


# -- stages of heter trainers -------------------------------------------------------------------------------------------

STAGES: list[tuple[dict[str, Any], list[tuple[int | None, tuple[str, ...], str]]]] = [
    # options -> number per node, endpoints and device of each stage
    ({"mode": "ps-heter"}, [(None, (), "")]),
    ({"heter_devices": "gpu"}, [(None, (), "gpu")]),
    ({"heter_devices": "gpu;cpu;xpu"}, [(None, (), "gpu"), (None, (), "cpu"), (None, (), "xpu")]),
    ({"heter_worker_num": "2"}, [(2, (), "")]),
    ({"heter_worker_num": "2", "heter_devices": "gpu; cpu"}, [(2, (), "gpu"), (2, (), "cpu")]),
    ({"heter_worker_num": "2;1", "heter_devices": "gpu"}, [(2, (), "gpu"), (1, (), "gpu")]),
    ({"heter_workers": ("a:1,b:1",)}, [(None, ("a:1", "b:1"), "")]),
    ({"heter_workers": ("a:1,b:1;a:2",)}, [(None, ("a:1", "b:1"), ""), (None, ("a:2",), "")]),
    ({"heter_workers": ("a:1", "b:1; a:2")}, [(None, ("a:1", "b:1"), ""), (None, ("a:2",), "")]),
    (
        {"heter_workers": ("a,a;b",), "heter_worker_num": "2;1", "heter_devices": "gpu;cpu"},
        [(2, ("a", "a"), "gpu"), (1, ("b",), "cpu")],
    ),
]


@pytest.mark.parametrize("options, stages", STAGES)
def test_stages_of_heter_trainers(options: dict[str, Any], stages: list[Any]) -> None:
    job = job_of(CLUSTER, **options)
    assert job.mode == "ps-heter"
    assert [(stage.per_node, stage.endpoints, stage.device) for stage in job.heter] == stages


def test_what_job_toml_says_of_heter_trainers_is_for_every_stage() -> None:
    toml: Toml = {"mode": "ps-heter", "heter_trainer": {"command": ["./heter"], "per_node": 3}}
    job = job_of(CLUSTER, toml, heter_devices="gpu;cpu")
    assert [(stage.command, stage.per_node) for stage in job.heter] == [(("./heter",), 3)] * 2
    assert [stage.per_node for stage in job_of(CLUSTER, toml, heter_worker_num="1;2").heter] == [1, 2]
    assert {stage.command for stage in job_of(CLUSTER, toml, script="b.py").heter} == {("python3", "-u", "b.py")}
    assert job_of(CLUSTER, toml, mode="ps").heter == ()


def test_heter_trainers_are_counted_by_option_then_job_toml_then_hosts_then_one_on_each_host() -> None:
    pinned = [{"host": "10.0.0.2", "roles": {"heter_trainer": 3}}, {"host": "10.0.0.3", "roles": ["trainer"]}]
    cluster = cluster_of(["10.0.0.1", *pinned])

    def counts(toml: Toml, **options: Any) -> list[int]:
        made = plan_of(cluster, {"mode": "ps-heter", **toml}, **options)
        return [sum(process.role == "heter" for process in node.processes) for node in made.nodes]

    assert counts({}) == [1, 3, 0]
    assert counts({}, heter_devices="cpu;cpu") == [2, 6, 0]
    assert counts({"heter_trainer": {"per_node": 2}}) == [2, 2, 0]
    assert counts({"heter_trainer": {"per_node": 2}}, heter_worker_num="4") == [4, 4, 0]
    assert counts({}, heter_worker_num="1;2") == [3, 3, 0]


def test_a_heter_trainer_runs_its_own_command_or_the_trainers() -> None:
    made = plan_of(CLUSTER, {"mode": "ps-heter", "heter_trainer": {"command": ["./heter", "{rank}", "{port}"]}})
    process = one(made, "heter", 1)
    assert process.argv == ("./heter", "1", str(process.ports[0]))
    assert one(plan_of(CLUSTER, mode="ps-heter"), "heter", 0).argv == ("python3", "-u", "train.py")


# -- commands -----------------------------------------------------------------------------------------------------------

SCRIPTS = [
    ("train.py --lr 0.1", ("python3", "-u", "train.py", "--lr", "0.1")),
    ("sub/dir/t.py", ("python3", "-u", "sub/dir/t.py")),
    ("'my train.py' \"a b\" c\\ d", ("python3", "-u", "my train.py", "a b", "c d")),
    ("./run.sh a.py", ("./run.sh", "a.py")),
    ("python3 train.py", ("python3", "train.py")),
    ("echo '' $HOME *", ("echo", "", "$HOME", "*")),
]


@pytest.mark.parametrize("script, argv", SCRIPTS)
def test_a_script_is_split_as_a_shell_would_for_all_roles(script: str, argv: tuple[str, ...]) -> None:
    job = job_of(CLUSTER, TOML, script=script)
    assert (job.trainer.command, job.pserver.command) == (argv, argv)


def test_an_empty_script_is_none() -> None:
    assert job_of(CLUSTER, TOML, script="  ").trainer.command == ("python3", "a.py")


FILES = [
    (["train.py"], ["python3", "-u", "train.py"], ["python3", "-u", "train.py"]),
    (["train.py", "pserver.py"], ["python3", "-u", "train.py"], ["python3", "-u", "pserver.py"]),
    (["train.py", "sub/pserver.py"], ["python3", "-u", "train.py"], ["python3", "-u", "train.py"]),
]


@pytest.mark.parametrize("files, trainer, pserver", FILES)
def test_commands_by_the_files_of_the_workspace(files: list[str], trainer: list[str], pserver: list[str]) -> None:
    made = plan_of(CLUSTER, mode="ps", files=files)
    assert list(one(made, "trainer", 0).argv) == trainer
    assert list(one(made, "pserver", 0).argv) == pserver


def test_a_pserver_runs_the_trainers_command_if_there_is_nothing_else() -> None:
    made = plan_of(CLUSTER, {"trainer": {"command": ["prog", "{rank}"]}}, mode="ps", files=[])
    assert one(made, "pserver", 1).argv == ("prog", "1")


def test_a_workspace_without_anything_to_run_is_bad_data() -> None:
    with pytest.raises(DataError, match="no train.py") as caught:
        plan_of(CLUSTER, files=["pserver.py"])
    assert "--script" in caught.value.fix


def filled(*tokens: str) -> tuple[str, ...]:
    cluster = cluster_of(hosts(2), PADDLE_PORT=7164, PADDLE_PORTS_NUM=2, PADDLE_PORTS_NUM_FOR_SPARSE=3)
    made = plan_of(cluster, {"pserver": {"command": ["prog", *tokens]}}, mode="ps", nproc_per_node="3")
    return one(made, "pserver", 1).argv[1:]


def test_placeholders() -> None:
    assert filled("--port={port}", "{ports_num}/{ports_num_for_sparse}") == ("--port=7164", "2/3")
    assert filled("{num_trainers}", "{rank}") == ("6", "1")
    assert filled("{log_dir}/x", "{rank}{rank}") == ("/jobs/JOB20260102-030405-abcd/log/x", "11")


@pytest.mark.parametrize("token, meant", [("{{", "{"), ("{{port}", "{port}"), ("{{{rank}", "{1"), ("a{{b{{", "a{b{")])
def test_two_braces_are_one(token: str, meant: str) -> None:
    assert filled(token) == (meant,)


@pytest.mark.parametrize(
    "token",
    ['{"a": {"b": [1, {}]}}', '{"port": 1}', "{}", "{0}", "{ port }", "{Port}", "}}", "${port_x}", "{port", "%s"],
)
def test_all_other_text_is_left_alone(token: str) -> None:
    assert filled(token) == (token,)


# -- wrong things -------------------------------------------------------------------------------------------------------

BAD_TOML: list[tuple[Toml, str]] = [
    ({"modes": "ps"}, "unknown key 'modes'"),
    ({"heter": {}}, "unknown key 'heter'"),
    ({"heter_trainer": {"device": "gpu"}}, "\\[heter_trainer\\] has the unknown key 'device'"),
    ({"heter_trainer": {"command": "heter.py"}}, "\\[heter_trainer\\] command = 'heter.py'"),
    ({"heter_trainer": {"per_node": 0}}, "\\[heter_trainer\\] per_node = 0"),
    ({"mode": "fast"}, "mode = 'fast'"),
    ({"mode": ["ps"]}, "mode = \\['ps'\\]"),
    ({"trainer": "train.py"}, "trainer = 'train.py' is no table"),
    ({"env": []}, "env = \\[\\] is no table"),
    ({"trainer": {"comand": []}}, "unknown key 'comand'"),
    ({"trainer": {"command": "train.py"}}, "\\[trainer\\] command = 'train.py'"),
    ({"pserver": {"command": []}}, "\\[pserver\\] command = \\[\\]"),
    ({"trainer": {"command": ["a", 1]}}, "command"),
    ({"trainer": {"command": ["a\0b"]}}, "command"),
    ({"pserver": {"ready": "open"}}, "\\[pserver\\] ready = 'open'"),
    ({"pserver": {"ready": ["listen"]}}, "\\[pserver\\] ready = \\['listen'\\]"),
    ({"trainer": {"ready": "listen"}}, "\\[trainer\\] has the unknown key 'ready'"),
    ({"trainer": {"per_node": 0}}, "per_node = 0"),
    ({"trainer": {"per_node": -1}}, "per_node = -1"),
    ({"trainer": {"per_node": "2"}}, "per_node = '2'"),
    ({"trainer": {"per_node": True}}, "per_node = True"),
    ({"trainer": {"per_node": 10**9}}, "per_node"),
    ({"shards": {"pattern": "x"}}, "unknown key 'pattern'"),
    ({"shards": {"files": "/data/x-*"}}, "files = '/data/x-\\*'"),
    ({"shards": {"files": [1]}}, "files"),
    ({"shards": {"files": [""]}}, "files"),
    ({"shards": {"files": {"a": 1}}}, "files"),
    ({"env": {"A B": "1"}}, "\\[env\\] A B"),
    ({"env": {"A": ["1"]}}, "\\[env\\] A"),
    ({"env": {"A": {"b": 1}}}, "\\[env\\] A"),
    ({"env": {"A": "x\0"}}, "\\[env\\] A"),
    ({"outputs": {"path": "/out"}}, "path = '/out'"),
    ({"outputs": {"path": "a/../../b"}}, "path"),
    ({"outputs": {"path": ""}}, "path"),
    ({"outputs": {"path": "."}}, "path"),
    ({"outputs": {"path": "./log/x"}}, "path"),
    ({"outputs": {"path": ".clustertool"}}, "path"),
    ({"outputs": {"path": 5}}, "path = 5"),
    ({"outputs": {"dir": "out"}}, "unknown key 'dir'"),
    ({"policy": {"timeout": "soon"}}, "\\[policy\\] timeout = 'soon'"),
    ({"policy": {"timeout": -1}}, "timeout"),
    ({"policy": {"timeout": True}}, "timeout"),
    ({"policy": {"grace": [1]}}, "grace"),
    ({"policy": {"on_failure": "ignore"}}, "\\[policy\\] on_failure = 'ignore'"),
    ({"policy": {"max_restarts": -1}}, "max_restarts"),
    ({"policy": {"max_restarts": 1.5}}, "max_restarts"),
    ({"policy": {"max_restarts": True}}, "max_restarts"),
    ({"policy": {"on_hang": "stop"}}, "on_hang = 'stop' is not report or abort or restart"),
    ({"policy": {"max_restarts_without_progress": -1}}, "max_restarts_without_progress = -1"),
    ({"policy": {"max_restarts_without_progress": "3x"}}, "max_restarts_without_progress = '3x'"),
    ({"policy": {"lease": 5}}, "unknown key 'lease'"),
]


@pytest.mark.parametrize("toml, what", BAD_TOML)
def test_what_job_toml_says_wrong_is_bad_data(toml: Toml, what: str) -> None:
    error = refusal(DataError, toml)
    assert error.code == 65
    assert re.search(what, error.what)


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"mode": "fast"}, "--mode 'fast'"),
    ({"script": "train.py 'x"}, "--script"),
    ({"script": "CUDA_LAUNCH_BLOCKING=1 python3 train.py"}, "the variable CUDA_LAUNCH_BLOCKING; no shell"),
    ({"command": ("A=1", "python3", "train.py")}, "the variable A; no shell"),
    *[
        ({name: value}, f"--{name.replace('_', '-')} '{value}'")
        for name in (
            "nproc_per_node",
            "worker_num",
            "server_num",
            "heter_worker_num",
            "nnodes",
            "http_port",
            "master_port",
        )
        for value in ("0", "-1", "two", "1.5", "100000")
    ],
    *[
        ({name: " "}, f"--{name.replace('_', '-')} ' '")
        for name in ("nproc_per_node", "worker_num", "server_num", "nnodes")
    ],
    ({"http_port": "65536"}, "--http-port"),
    *[({"devices": value}, "--devices") for value in ("a", "0,x", "0,0", "-1", "0 1", "123456")],
    ({"shards": ("/data/x-*",)}, "--shards"),
    *[({"env": (value,)}, "--env") for value in ("A", "=1", "A B=1", "1A=1", "")],
    *[({name: value}, f"--{name}") for name in ("timeout", "grace", "lease") for value in ("soon", "-1", "1e3", "nan")],
    ({"on_failure": "ignore"}, "--on-failure 'ignore'"),
    *[({"max_restarts": value}, "--max-restarts") for value in ("-1", "x", "1.5")],
    ({"mode": "ps", "servers": ("10.0.0.1:7000", "10.0.0.1:7000")}, "names the endpoint 10.0.0.1:7000 twice"),
    ({"workers": ("10.0.0.1:7000,10.0.0.2:7000,10.0.0.1:7000",)}, "names the endpoint 10.0.0.1:7000 twice"),
    ({"workers": ("[fe80::1]:7000,[fe80::1]:7000",)}, "twice"),
    ({"workers": ("10.0.0.1:1,10.0.0.1:2",), "worker_num": "3"}, "--workers names 2, --worker-num says 3"),
    ({"servers": ("10.0.0.1:1,10.0.0.1:2,10.0.0.2:1",), "server_num": "1"}, "--servers names 3, --server-num says 1"),
    *[
        ({"heter_devices": value}, f"--heter-devices '{bad}'")
        for value, bad in (("tpu", "tpu"), ("npu", "npu"), ("gpu;GPU", "GPU"), ("gpu,cpu", "gpu,cpu"))
    ],
    *[
        ({name: value}, f"--{name.replace('_', '-')} {value!r} has an empty stage")
        for name, value in (("heter_devices", "gpu;"), ("heter_devices", ";"), ("heter_worker_num", "1;;2"))
    ],
    ({"heter_workers": ("10.0.0.1:1;,",)}, "--heter-workers '10.0.0.1:1;,' has an empty stage"),
    ({"heter_worker_num": "1;0"}, "--heter-worker-num '0'"),
    ({"heter_worker_num": "1;2", "heter_devices": "gpu;cpu;cpu"}, "--heter-worker-num names 2 of 3 stages"),
    ({"heter_workers": ("10.0.0.1",), "heter_devices": "gpu;cpu"}, "--heter-workers names 1 of 2 stages"),
    ({"heter_workers": ("10.0.0.1;10.0.0.2",), "heter_devices": "gpu;cpu;cpu"}, "--heter-workers names 2 of 3 stages"),
    (
        {"heter_workers": ("10.0.0.1:1,10.0.0.1:2;10.0.0.2:1",), "heter_worker_num": "2;2"},
        "--heter-workers names 1, --heter-",
    ),
    ({"heter_workers": ("10.0.0.1:1;10.0.0.1:1",)}, "--heter-workers names the endpoint 10.0.0.1:1 twice"),
]


@pytest.mark.parametrize("options, what", BAD_OPTIONS)
def test_wrong_options_are_wrong_usage(options: dict[str, Any], what: str) -> None:
    error = refusal(UsageError, None, **options)
    assert error.code == 64
    assert what in error.what


def test_a_wrong_option_is_wrong_usage_even_where_job_toml_is_right() -> None:
    assert refusal(UsageError, TOML, timeout="soon").code == 64
    assert refusal(UsageError, TOML, on_failure="x").code == 64


@pytest.mark.parametrize("text", ["a", "1", "A" * 64, "a.b_c-d", "20260102-030405-abcd"])
def test_right_job_ids(text: str) -> None:
    assert valid_job_id(text) == text


@pytest.mark.parametrize("text", ["", "-a", ".a", "_a", "a/b", "a b", "A" * 65, "a\n", "é", "..", "a\0"])
def test_wrong_job_ids(text: str) -> None:
    with pytest.raises(UsageError):
        valid_job_id(text)


# -- what a user may set in the environment -----------------------------------------------------------------------------


def setting(where: str, name: str, force: bool) -> JobSpec:
    keys: dict[str, object] = {"ENV": {name: "x"}, "PASS_ENV": [name], "SECRETS": [name]}
    keys = {key: value for key, value in keys.items() if key == where}
    entry = {"host": "a", "env": {name: "x"} if where == "host" else {}}
    toml = {"env": {name: "x"}} if where == "[env]" else {}
    return job_of(cluster_of([entry], **keys), toml, env=(f"{name}=x",) if where == "--env" else (), force_env=force)


@pytest.mark.parametrize("where", ["ENV", "host", "PASS_ENV", "SECRETS", "[env]", "--env"])
@pytest.mark.parametrize("name", ["CLUSTERTOOL_RANK", "CLUSTERTOOL_MARK", "CLUSTERTOOL_OTHER"])
def test_only_the_tool_sets_clustertool_names(where: str, name: str) -> None:
    for force in (False, True):
        with pytest.raises(UsageError, match=name) as caught:
            setting(where, name, force)
        assert caught.value.fix


@pytest.mark.parametrize("where", ["ENV", "host", "PASS_ENV", "SECRETS", "[env]", "--env"])
def test_ranks_endpoints_and_addresses_are_set_by_force_only(where: str) -> None:
    for name in PLACED:
        with pytest.raises(UsageError, match=f"sets {name},") as caught:
            setting(where, name, force=False)
        assert "--force-env" in caught.value.fix
        setting(where, name, force=True)


def test_every_rank_endpoint_and_address_of_a_process_is_placed() -> None:
    """What differs between processes, or names a machine, is not the user's but by force. POD_NAME is only a name."""
    for mode in ("collective", "ps", "ps-heter"):
        made = plan_of(cluster_of(hosts(2)), nproc_per_node="2", mode=mode)
        pairs = {pair for process in made.processes for pair in process.env if not pair[0].startswith("CLUSTERTOOL_")}
        names = [name for name, _ in pairs]
        assert {name for name, value in pairs if names.count(name) > 1 or "10.0.0." in value} <= PLACED | {"POD_NAME"}


@pytest.mark.parametrize(
    "name", "OMP_NUM_THREADS PADDLE_WITH_GLOO PYTHONUNBUFFERED CUDA_VISIBLE_DEVICES NCCL_SOCKET_IFNAME POD_NAME".split()
)
def test_all_else_may_be_set(name: str) -> None:
    for where in ("ENV", "[env]", "--env"):
        setting(where, name, force=False)
    made = plan_of(cluster_of(hosts(1)), env=(f"{name}=mine",))
    assert env_of(made, "trainer", 0)[name] == "mine"


def test_by_force_a_user_sets_a_rank() -> None:
    made = plan_of(CLUSTER, env=("RANK=7",), force_env=True)
    assert {env_of(made, "trainer", rank)["RANK"] for rank in (0, 1)} == {"7"}


# -- explicit lists -----------------------------------------------------------------------------------------------------


def endpoints(made: Plan, role: str) -> list[str]:
    return [process.endpoint for process in of_role(made, role)]


def test_rank_is_the_position_in_the_list_in_any_order() -> None:
    cluster = cluster_of(hosts(3))
    servers = "10.0.0.3:7000,10.0.0.1:7000,10.0.0.3:8000"
    workers = "10.0.0.2:9000,10.0.0.3:9000,10.0.0.1:9000,10.0.0.2:9001"
    made = plan_of(cluster, servers=(servers,), workers=tuple(workers.split(",")))
    assert ",".join(endpoints(made, "pserver")) == servers
    assert ",".join(endpoints(made, "trainer")) == workers
    for process in made.processes:
        env = dict(process.env)
        assert (env["PADDLE_PSERVERS_IP_PORT_LIST"], env["PADDLE_TRAINER_ENDPOINTS"]) == (servers, workers)
    assert [(p.node, p.local_rank) for p in of_role(made, "trainer")] == [(1, 0), (2, 0), (0, 0), (1, 1)]
    assert env_of(made, "trainer", 2)["MASTER_ADDR"] == "10.0.0.2"
    assert env_of(made, "pserver", 1)["PADDLE_GLOO_HTTP_ENDPOINT"].startswith("10.0.0.3:")


def test_an_address_is_compared_whole() -> None:
    cluster = cluster_of(["10.0.0.11", "10.0.0.1", "10.0.0.10"])
    made = plan_of(cluster, workers=("10.0.0.1:7000,10.0.0.10:7000,10.0.0.11:7000,10.0.0.1:7001",))
    assert [process.node for process in of_role(made, "trainer")] == [1, 2, 0, 1]
    with pytest.raises(UsageError, match="'10.0.0' is no host of HOSTS"):
        plan_of(cluster, workers=("10.0.0:7000",))


LISTED = [("10.0.0.1", 7000), ("10.0.0.11", 7000), ("head", 0), ("head", 7000)]


@pytest.mark.parametrize("order", list(itertools.permutations(LISTED)))
def test_lists_of_every_role_in_any_order(order: Sequence[tuple[str, int]]) -> None:
    """Addresses that begin alike, a host name, two ports on one host, a port that is left out."""
    cluster = cluster_of(["10.0.0.11", {"host": "head", "address": "10.0.0.111"}, "10.0.0.1"])
    nodes = {"10.0.0.11": 0, "head": 1, "10.0.0.1": 2}
    text = {
        base: ",".join(f"{host}:{port + base}" if port else host for host, port in order)
        for base in (0, 1000, 2000, 2500)
    }
    made = plan_of(cluster, servers=(text[0],), workers=(text[1000],), heter_workers=(f"{text[2000]};{text[2500]}",))
    for role, wanted in (("pserver", order), ("trainer", order), ("heter", [*order, *order])):
        assert [process.node for process in of_role(made, role)] == [nodes[host] for host, _ in wanted]
        assert [process.rank for process in of_role(made, role)] == list(range(len(wanted)))
    asked = [port + base for base in (2000, 2500) for _, port in order if port]
    chosen = [process.ports[0] for process, (_, port) in zip(of_role(made, "heter"), [*order, *order]) if port]
    assert chosen == asked
    assert len({process.endpoint for process in made.processes}) == len(made.processes) == 16
    server = next(process for process in of_role(made, "pserver") if process.node == 1)
    assert server.endpoint.startswith("10.0.0.111:")


def test_of_two_entries_with_one_address_the_first_is_meant() -> None:
    cluster = cluster_of(["10.0.0.1:22", "10.0.0.1:2222"])
    made = plan_of(cluster, facts=facts_of(cluster, (0, 0)), workers=("10.0.0.1:7000,10.0.0.1:7001",))
    assert [process.node for process in made.processes] == [0, 0]


def test_ports_are_optional() -> None:
    made = plan_of(CLUSTER, workers=("10.0.0.2,10.0.0.1,10.0.0.2",))
    assert [process.node for process in of_role(made, "trainer")] == [1, 0, 1]
    assert len(set(endpoints(made, "trainer"))) == 3
    served = plan_of(CLUSTER, servers=("10.0.0.2,10.0.0.2:9000",))
    assert [p.ports for p in of_role(served, "pserver")] == [(7164, 7165), (9000, 9001)]


def test_a_host_goes_by_its_name_its_address_and_what_the_probe_found() -> None:
    cluster = cluster_of([{"host": "node1", "address": "10.0.0.1"}, "node2", "[fe80::2]:22"])
    facts = facts_of(cluster)
    facts[1] = facts_of(cluster_of(["x", "10.0.0.2"]))[1]
    workers = ("node1:7000", "10.0.0.1:7001", "node2:7000", "10.0.0.2:7001", "fe80::2", "[fe80::2]:7000")
    made = plan_of(cluster, facts=facts, workers=workers)
    assert [process.node for process in of_role(made, "trainer")] == [0, 0, 1, 1, 2, 2]
    assert endpoints(made, "trainer")[:4] == ["10.0.0.1:7000", "10.0.0.1:7001", "10.0.0.2:7000", "10.0.0.2:7001"]
    assert endpoints(made, "trainer")[5] == "[fe80::2]:7000"


@pytest.mark.parametrize(
    "token",
    [
        "10.0.0.9",
        "10.0.0.9:7000",
        "10.0.0.1:",
        "10.0.0.1:x",
        "10.0.0.1:0",
        "10.0.0.1:65536",
        "10.0.0.1:\u00b2",
        ":7000",
    ],
)
@pytest.mark.parametrize("option", ["servers", "workers", "heter_workers"])
def test_a_wrong_endpoint_is_wrong_usage(token: str, option: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_of(CLUSTER, mode="ps-heter", **{option: (token,)})
    assert caught.value.fix


def test_a_role_without_ranks_is_wrong_usage() -> None:
    cluster = cluster_of([{"host": "a", "roles": ["trainer"]}])
    with pytest.raises(UsageError, match="no host is left to run a pserver"):
        plan_of(cluster, mode="ps")
    with pytest.raises(UsageError, match="no host is left to run a trainer"):
        plan_of(cluster_of([{"host": "a", "roles": ["pserver"]}]))
    with pytest.raises(UsageError, match="no host is left to run a heter trainer"):
        plan_of(cluster_of([{"host": "a", "roles": ["pserver", "trainer"]}]), mode="ps-heter")
