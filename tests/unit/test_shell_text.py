"""Text of a shell in --script and in values of variables, which no shell reads."""

from __future__ import annotations

import shlex

import pytest

from clustertool.actions.read_request import find_unexpanded_text
from clustertool.errors import ConfigError, DataError, UsageError
from clustertool.model.config import shell_text
from clustertool.model.config.cluster import Cluster, read_cluster
from clustertool.model.config.hosts import read_hosts
from clustertool.model.config.job import Options, read_job

CLUSTER = Cluster(read_hosts(["10.0.0.1"]))


@pytest.mark.parametrize(
    "script, operator",
    [
        ("python3 train.py a && python3 second.py > out.txt", "&&"),
        ("cd sub; python3 train.py", ";"),
        ("python3 train.py 2>&1 | tee log.txt", "2>&1"),
        ("python3 train.py |tee log.txt", "|"),
        ("python3 train.py>out.txt", ">"),
        ("python3 train.py &> out.txt", "&>"),
        ("python3 train.py >> out.txt", ">>"),
        ("train.py < input", "<"),
        ("train.py || true", "||"),
        ("train.py &", "&"),
    ],
)
def test_an_operator_is_refused_with_the_command_for_a_shell(script: str, operator: str) -> None:
    with pytest.raises(UsageError, match="no shell reads it") as caught:
        read_job(CLUSTER, {}, Options(script=script))
    assert f"has {operator}," in caught.value.what
    typed = shlex.split(caught.value.fix.partition(";  as")[0])[:2]
    assert typed[0] == "--script"
    inner = script if script.startswith(("python3", "cd")) else f"python3 -u {script}"
    again = shell_text.in_shell(script)
    assert shlex.split(again) == ["bash", "-c", inner]
    read_job(CLUSTER, {}, Options(script=again))


@pytest.mark.parametrize(
    "script",
    [
        "bash -c 'python3 train.py && python3 second.py > out.txt'",
        'python3 train.py --filter "a|b" --when "x > 3; y"',
        r"python3 train.py a\;b \> c",
        "python3 train.py --url http://h/?a=1&b=2 --shape (2,3) data/*.txt {rank}",
    ],
)
def test_quoted_text_and_what_no_shell_needs_stays(script: str) -> None:
    assert shell_text.operator(script) == ""
    assert read_job(CLUSTER, {}, Options(script=script)).trainer.command


@pytest.mark.parametrize(
    "script, found",
    [
        ("train.py --data $DATA", "$DATA"),
        ('train.py --data "${DATA}/x"', "$DATA"),
        ("train.py --n $(nproc)", "$("),
        ("train.py --n `nproc`", "`"),
        ("train.py --data '$DATA' 5$", ""),
        ('bash -c "echo $DATA"', ""),
        ('/bin/sh -ec "echo $(nproc)"', ""),
    ],
)
def test_what_a_shell_would_replace_is_a_warning(script: str, found: str) -> None:
    assert [f"has {found}," in what for what, _ in find_unexpanded_text(CLUSTER, {}, Options(script=script))] == [
        True
    ] * bool(found)


@pytest.mark.parametrize("value", ["/opt/x/bin:$PATH", "${PATH}:/opt/x/bin"])
def test_a_variable_in_its_own_value_is_an_error(value: str) -> None:
    with pytest.raises(UsageError, match="--env has PATH=") as caught:
        read_job(CLUSTER, {}, Options(env=(f"PATH={value}",)))
    assert f"export PATH={value}" in caught.value.fix and "PRELUDE" in caught.value.fix
    with pytest.raises(DataError, match="job.toml has PATH="):
        read_job(CLUSTER, {"env": {"PATH": value}}, Options())
    for keys, where in (
        ({"HOSTS": ["10.0.0.1"], "ENV": {"PATH": value}}, "ENV in conf.py has PATH="),
        ({"HOSTS": ["10.0.0.1", {"host": "10.0.0.2", "env": {"PATH": value}}]}, "env of 10.0.0.2 in conf.py has PATH="),
    ):
        with pytest.raises(ConfigError, match=where) as refused:
            read_job(read_cluster(keys), {}, Options())
        assert f"export PATH={value}" in refused.value.fix


def test_another_variable_in_a_value_is_a_warning() -> None:
    options = Options(env=("DATA=$HOME/data", "PRICE=5$", "PATTERN=^a$", "MY_PATH=$PATHS"))
    host = {"host": "10.0.0.[1-9]", "env": {"CACHE": "${HOME}/cache"}}
    cluster = read_cluster({"HOSTS": [host], "ENV": {"MINE": "`nproc`", "LETTERS": "a b"}})
    toml = {"env": {"N": "$(nproc)", "COUNT": 3}}
    read_job(cluster, toml, options)
    assert [what.partition(",")[0] for what, _ in find_unexpanded_text(cluster, toml, options)] == [
        "ENV in conf.py: MINE has `",
        "env of 10.0.0.1 in conf.py: CACHE has $HOME",
        "[env] in job.toml: N has $(",
        "--env: DATA has $HOME",
        "--env: MY_PATH has $PATHS",
    ]
