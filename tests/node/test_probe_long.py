"""What only `inv check` asks: the job's own python with its PRELUDE, what old jobs left, the machine's own name."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from clustertool.model.facts import Facts, read_facts
from clustertool.node.probe import job_environment, probe
from clustertool.node.probe.network_addresses import resolved
from tests.node import programs as p
from tests.node.harness import Bench, marked, until

JOB: dict[str, Any] = {"prelude": "", "first_path": "", "ld_library_path": "", "here": False, "env": {}, "packages": []}


def asked(bench: Bench, **job: Any) -> Facts:
    job.setdefault("first_path", str(Path(sys.executable).parent))
    return read_facts(0, bench.nodes(1)[0].probe(job={**JOB, **job}))


def test_condition(bench: Bench) -> None:
    facts = read_facts(0, bench.nodes(1)[0].probe(address="127.0.0.1"))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert facts.memory[0] == pytest.approx(total, rel=0.01)
    assert 0 < facts.memory[1] <= facts.memory[0]
    assert facts.cpus == len(os.sched_getaffinity(0))
    assert ("memlock", *resource.getrlimit(resource.RLIMIT_MEMLOCK)) in facts.limits
    assert (facts.nic, facts.mtu) == ("lo", int(Path("/sys/class/net/lo/mtu").read_text()))
    assert not facts.examined and not facts.packages and not facts.leftovers
    assert 0 < facts.took < 30


def test_proxies_of_the_login_are_not_reported(bench: Bench) -> None:
    node = bench.nodes(1, env={"HTTP_PROXY": "http://me:secret@proxy", "no_proxy": "x"})[0]
    answer = node.probe()
    assert "proxy" not in str(answer).lower()


@pytest.mark.parametrize(
    "text, own",
    [
        ("127.0.0.1 localhost\n127.0.1.1 box.lan box\n10.0.0.1 box\n", "127.0.1.1"),
        ("# 1.2.3.4 box\n10.0.0.1 box # x", "10.0.0.1"),
        ("::1 box\n10.0.0.1\tbox\n", "10.0.0.1"),
        ("10.0.0.1 boxer\n", ""),
        ("", ""),
    ],
)
def test_own_name(tmp_path: Path, text: str, own: str) -> None:
    (tmp_path / "hosts").write_text(text)
    assert probe.own_name("box", str(tmp_path / "hosts")) == own
    assert probe.own_name("box", str(tmp_path / "none")) == ""


def test_versions_of_the_jobs_own_python(bench: Bench, tmp_path: Path) -> None:
    """As importlib.metadata of that python tells them, whatever the folder or the package is called."""
    from importlib import metadata

    site = tmp_path / "site"
    (site / "paddlepaddle_gpu-2.6.2.post1.dist-info").mkdir(parents=True)
    (site / "My_Thing-0.3+cu118.dist-info").mkdir()
    other = site / "Distribution-7.dist-info"
    other.mkdir()
    (other / "top_level.txt").write_text("othername\n")
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: Distribution\nVersion: 7\n")
    (site / "othername.py").write_text("raise SystemExit('imported')")
    facts = asked(
        bench, env={"PYTHONPATH": str(site)}, packages=["paddle", "my-thing", "othername", "numpy", "no-such"]
    )
    reported = dict(facts.packages)
    assert reported.pop("python") == ".".join(map(str, sys.version_info[:3]))
    assert reported.pop("numpy") == metadata.version("numpy")
    assert reported == {"paddle": "2.6.2.post1", "my-thing": "0.3+cu118", "othername": "7", "no-such": ""}
    assert facts.examined and facts.problems == ()


def test_a_package_that_only_a_finder_knows(bench: Bench, tmp_path: Path) -> None:
    """As pip installs a package whose sources stay where they are."""
    finder = """
        import sys
        from importlib.machinery import ModuleSpec
        class Finder:
            def find_spec(self, name, path, target=None):
                return ModuleSpec(name, None) if name == "edited" else None
        sys.meta_path.append(Finder())
        """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(finder))
    facts = asked(bench, env={"PYTHONPATH": str(tmp_path)}, packages=["edited", "no-such"])
    assert dict(facts.packages[1:]) == {"edited": "?", "no-such": ""}


def test_prelude_is_applied_and_may_be_noisy(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "thing-5.dist-info").mkdir()
    prelude = f"echo noise\nexport PYTHONPATH='{tmp_path}' https_proxy=http://x no_proxy=10.\necho more >&2"
    facts = asked(bench, prelude=prelude, packages=["thing"])
    assert dict(facts.packages)["thing"] == "5"
    assert (facts.job_proxies, facts.no_proxy) == (("https_proxy",), "10.")


def test_the_logins_proxies_do_not_reach_the_job(bench: Bench) -> None:
    node = bench.nodes(1, env={"http_proxy": "http://x"})[0]
    facts = read_facts(0, node.probe(job={**JOB, "first_path": str(Path(sys.executable).parent)}))
    assert facts.job_proxies == ()


def test_a_prelude_that_fails_is_reported_with_its_output(bench: Bench) -> None:
    ((column, level, what, fix),) = asked(bench, prelude="source /no/such/activate").problems
    assert (column, level) == ("packages", "error")
    assert "PRELUDE" in what and "/no/such/activate" in what
    assert "PRELUDE" in fix


def test_no_python3_in_the_jobs_environment(bench: Bench, tmp_path: Path) -> None:
    ((column, level, what, _),) = asked(bench, env={"PATH": str(tmp_path)}).problems
    assert (column, level) == ("packages", "warn")
    assert "python3" in what


def test_a_prelude_that_never_ends_is_ended_with_all_it_started(tmp_path: Path) -> None:
    mark = f"MARK_{os.getpid()}_{time.monotonic_ns()}"
    start = time.monotonic()
    reported, ((column, level, what, _),) = job_environment.read_versions(
        {**JOB, "prelude": f"export {mark}=1; sleep 600 & sleep 600"}, limit=0.5
    )
    assert (reported, column, level, what) == ({}, "packages", "error", "PRELUDE and python3 did not end within 0.5 s")
    assert time.monotonic() - start < 20
    until(lambda: not marked(mark), "nothing of it lives")


def test_ranks_without_a_supervisor(bench: Bench) -> None:
    """A running job is none; one whose supervisor and guard are gone is, until it is stopped."""
    nodes = bench.nodes(1)
    job = bench.run(nodes, p.PLAIN, per_node=2).ready()
    request: dict[str, Any] = {"job": {}}
    assert nodes[0].probe(**request)["leftovers"] == []
    keepers = [job.process("supervisor"), job.process("guard")]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # both at once, as neither may see the other's end
        for keeper in keepers:
            os.kill(keeper.pid, number)
    ((name, count),) = until(lambda: nodes[0].probe(**request)["leftovers"], "it is seen")
    assert name == job.id and count >= 2
    job.stop()
    assert nodes[0].probe(**request)["leftovers"] == []


def test_the_name_of_this_machine(bench: Bench) -> None:
    facts = asked(bench)
    assert facts.own == (probe.own_name(socket.gethostname()) or resolved(socket.gethostname()))


def test_an_rsync_that_does_not_run_has_its_message(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rsync").write_text("#!/bin/sh\necho 'rsync: libpopt.so.0 is missing' >&2; exit 127\n")
    (tmp_path / "rsync").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert asked(bench).rsync_error == "rsync: libpopt.so.0 is missing"
    (tmp_path / "rsync").write_text("#!/bin/sh\nexit 0\n")
    assert asked(bench).rsync_error == ""
