"""Durations are read with and without units, wherever a user writes one."""

from __future__ import annotations

import pytest

from clustertool.cli.options import Opt
from clustertool.cli.verb_table import VERBS
from clustertool.errors import DataError, UsageError
from clustertool.model.config.cluster import read_cluster
from clustertool.model.config.job import Options, Policy, read_job
from clustertool.model.quantities import seconds_of, whole
from clustertool.verbs.verb import read_seconds, seconds_with_unit

CLUSTER = read_cluster({"HOSTS": ["node1"]})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *[("90", 90.0), ("1.5", 1.5), ("2.", 2.0), ("0", 0.0), (10, 10.0), (2.5, 2.5)],
        *[("30s", 30.0), ("5m", 300.0), ("2h", 7200.0), ("7d", 604800.0), ("1w", 604800.0), ("500ms", 0.5)],
        *[("1h30m", 5400.0), ("1.5h", 5400.0), ("1d12h", 129600.0), ("1m30s", 90.0)],
        *[
            (wrong, None)
            for wrong in ("", "x", "5x", "5 m", "m", "-1", "-5m", "1e3", "nan", "inf", "5m3", "5M", "9" * 13)
        ],
        *[(wrong, None) for wrong in (True, None, -1, float("inf"), float("nan"), [5], "５m")],
    ],
)
def test_a_duration(text: object, found: float | None) -> None:
    assert seconds_of(text) == found


@pytest.mark.parametrize(
    ("value", "high", "found"),
    [
        *[("7", 9, 7), (7, 9, 7), ("007", 9, 7), ("10", 9, None), (-1, 9, None), ("", 9, None), (True, 9, None)],
        *[("65535", 65535, 65535), ("065535", 65535, None), ("٣", 9, None), ("1.0", 9, None), ("9" * 5000, 9, None)],
        *[(1000660000, (1 << 31) - 1, 1000660000), ("100000", 100_000, 100_000), (100_001, 100_000, None)],
    ],
)
def test_a_whole_number(value: object, high: int, found: int | None) -> None:
    assert whole(value, 0, high) == found


def policy(toml: dict[str, object], **options: str) -> Policy:
    return read_job(CLUSTER, {"policy": toml}, Options(**options)).policy


def test_durations_of_a_job() -> None:
    made = policy({"timeout": "1h30m", "grace": 3}, grace="2m", lease="1d")
    assert (made.timeout, made.grace, made.lease) == (5400.0, 120.0, 86400.0)
    with pytest.raises(
        DataError, match=r"^job.toml: \[policy\] timeout = '5x' is not a duration\n  fix: seconds, or .* 5m"
    ):
        policy({"timeout": "5x"})
    with pytest.raises(UsageError, match=r"^--lease 'soon' is not a duration\n  fix: seconds, or "):
        policy({}, lease="soon")


@pytest.mark.parametrize("key", ["CONNECT_TIMEOUT", "JOIN_TIMEOUT", "LOSS_TIMEOUT", "GRACE"])
def test_durations_of_conf_py(key: str) -> None:
    cluster = read_cluster({"HOSTS": ["node1"], key: "1m30s"})
    assert getattr(cluster, key.lower()) == 90.0


def test_durations_of_verbs() -> None:
    assert (read_seconds("", "--grace", 7.0), read_seconds("5m", "--grace", 7.0)) == (7.0, 300.0)
    with pytest.raises(UsageError, match=r"--interval 2h is out of range\n  fix: from 0.1 s to 1 h"):
        read_seconds("2h", "--interval", 1.0, 0.1, 3600.0)
    assert seconds_with_unit("7d", "--older-than") == 604800.0
    for text in ("7", "1.5", "7.", ""):  # 7 seconds would remove all
        with pytest.raises(UsageError, match=f"--older-than '{text}' is not a duration with a unit"):
            seconds_with_unit(text, "--older-than")


def test_the_options_that_are_durations() -> None:
    """A new one is read by read_seconds(), seconds_with_unit() or read_job(), and is added here."""

    def is_one(option: Opt) -> bool:
        return "DURATION" in option.value.split("|")

    found = {f"{verb.name} --{option.name}" for verb in VERBS for option in verb.options if is_one(option)}
    known = (
        "run --timeout",
        "run --grace",
        "run --lease",
        "run --hang-timeout",
        "run --elastic-timeout",
        "stop --grace",
        "logs --since",
        "top --interval",
    )
    exported = {
        f"export --{name}" for name in ("timeout", "grace", "lease", "hang-timeout", "elastic-timeout")
    }  # the options of run
    assert found == {*known, *exported, "check --timeout", "exec --timeout", "clean --older-than"}
