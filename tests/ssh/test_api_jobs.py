"""The Python API in a program: real sshds, nothing printed, errors as exceptions, threads, and two clusters at once."""

from __future__ import annotations

import html
import logging
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from clustertool.actions.read_logs import locate_logs
from clustertool.api import (
    Cluster,
    ClustertoolError,
    ConfigError,
    Interrupted,
    Job,
    JobFailed,
    JobState,
    NotFound,
    PreflightError,
    Progress,
    RankState,
    Several,
    StillRunning,
    Terminated,
    UsageError,
    job_object,
)
from clustertool.fleet import job_places, this_machine
from clustertool.fleet.fleet import Fleet
from clustertool.model.wire.messages import LAUNCH, UNPLACE, Request
from clustertool.ssh.parallel import Gathered
from tests.cli import REPO, EmbeddedSite, LoopSite, Site, until
from tests.unit.test_page import EVIL, Reader

MakeSite = Callable[..., LoopSite]
GOES = f"""
    import os, pathlib, time
    rank, output = os.environ["RANK"], pathlib.Path(os.environ["CLUSTERTOOL_OUTPUT"])
    print("hello", rank, {EVIL!r}, os.environ.get("TOKEN"), flush=True)
    (output / "model").write_text(rank)
    while not (pathlib.Path.home() / "go").exists():
        time.sleep(0.05)
    print("step=7", flush=True)
"""
FAILS = """
    import os, time
    if os.environ["RANK"] == "1":
        raise ValueError("no data")
    time.sleep(60)
"""


def cluster_at(site: Site, **keys: object) -> Cluster:
    site.conf(**keys)
    return Cluster.from_conf(site.folder / "conf.py")


@pytest.fixture(autouse=True)
def silent(capfd: pytest.CaptureFixture[str]) -> object:
    """No test of this file may see output of the API, or other signal handlers."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    yield
    assert capfd.readouterr() == ("", "")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


def test_a_lease_counts_from_the_last_wait(site: MakeSite) -> None:
    here = site(1)
    cluster, folder = cluster_at(here), here.workspace(train_py=GOES)
    with pytest.raises(UsageError, match="each of 2 trainers starts torchrun") as caught:
        cluster.run(folder, script="torchrun train.py", nproc_per_node=2)
    assert caught.value.fix.startswith("start the program itself: script='train.py'")
    assert here.jobs(0) == []
    job = cluster.run(folder, lease=2.5)
    with pytest.raises(StillRunning):
        job.wait(timeout=4)
    until(lambda: job.status().over)
    with pytest.raises(Terminated, match=r"no laptop was attached for \d s \(lease\)"):
        job.wait()


def test_a_job_from_its_start_to_its_report(
    site: MakeSite, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here, seen = site(2), list[Progress]()
    caplog.set_level(logging.INFO, "clustertool")
    monkeypatch.setenv("TOKEN", "s3cret")
    cluster = cluster_at(here, SECRETS=["TOKEN"])
    assert cluster.hosts == (here.name(0), here.name(1))

    job = cluster.run(here.workspace(train_py=GOES), env={"A": 1}, progress=seen.append)
    assert [p.phase for p in seen][0] == "check" and {"dispatch", "start"} <= {p.phase for p in seen}
    assert (seen[-1].done, seen[-1].total) == (2, 2)
    status = job.status()
    assert (status.state, status.over, status.unreachable) == (JobState.RUNNING, False, {})
    assert [(one.rank, one.host, one.state) for one in status.ranks] == [
        (0, here.name(0), RankState.RUNNING),
        (1, here.name(1), RankState.RUNNING),
    ]
    assert status.json["job"] == job.id == cluster.job(job.id[:12]).id

    follow = job.logs(rank=1, follow=True)
    first = next(follow)
    assert (first.role, first.rank, first.host) == ("trainer", 1, here.name(1))
    assert str(first).startswith("hello 1") and first.text.isprintable() and first.text.endswith("***")
    for node in (0, 1):
        (here.home(node) / "go").touch()
    assert [line.text for line in follow] == ["step=7"]

    again = pickle.loads(pickle.dumps(job))  # as a pipeline that goes on in another process
    seen.clear()
    assert again.wait(progress=seen.append).state is JobState.SUCCEEDED
    assert seen[-1].phase == "ended" and "succeeded" in seen[-1].text
    assert sorted(line.rank for line in job.logs(rank="all", tail=1)) == [0, 1]
    with monkeypatch.context() as home:
        home.setenv("HOME", str(here.folder))
        assert job.fetch("~/one") == here.folder / "one" and (here.folder / "one/model").read_text() == "0"
    assert (job.fetch(here.folder / "all", rank="all") / "rank1/model").read_text() == "1"
    assert job.fetch(here.folder / "file", rank=1, path="output/model").read_text() == "1"
    assert job.stop() == {here.name(node): "ended already" for node in (0, 1)}
    shown = job._repr_html_()
    start, escaped, attributes = shown.split('"', 2)
    assert start == "<iframe srcdoc=" and 'sandbox=""' in attributes and "allow" not in attributes
    assert shown.count("<") == 2  # the frame and its end: the page in it is escaped
    page = html.unescape(escaped)
    assert page.startswith("<!doctype html>") and "s3cret" not in page and "succeeded" in Reader(page).text.lower()
    assert any("starting the trainers" in record.message for record in caplog.records)
    monkeypatch.chdir("/")  # no conf.py: the stored hosts are used, with the names of SECRETS
    assert next(Job.find(job.id).logs()).text.endswith("***")


def test_a_job_goes_on_where_an_earlier_one_ended(site: MakeSite) -> None:
    """Two jobs with one name: each object is its own job. The second one resumes from the output of the first."""
    here = site(1)
    cluster = cluster_at(here)
    folder = here.workspace(
        train_py="""
        import os, pathlib
        count = pathlib.Path(os.environ["CLUSTERTOOL_OUTPUT"], "count")
        count.write_text(str(int(count.read_text()) + 1 if count.exists() else 1))
        print("count", count.read_text())
        """
    )
    first = cluster.run(folder, job_id="again")
    first.wait()
    second = cluster.run(folder, job_id="again", resume=first)
    (other,) = second.logs(follow=True)
    assert (first.id, second.id) == ("again", "again-2") and cluster.job("again").id == "again-2"
    began = time.time()
    (line,) = first.logs()
    assert (line.text, other.text) == ("count 1", "count 2")
    assert line.time <= began and list(first.logs(since=began + 60)) == []
    assert first.status().job == first.id and f"<title>job {first.id}: " in first.report()
    assert [line.text for line in cluster.run(folder, job_id="again", resume=False).logs(follow=True)] == ["count 1"]


def test_a_failure_is_an_exception_with_node_fix_and_last_lines(
    site: MakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = site(2)
    job = cluster_at(here).run(here.workspace(train_py=FAILS))
    with pytest.raises(JobFailed) as caught:
        job.wait()
    error = caught.value
    assert (error.code, error.node) == (1, here.name(1)) and "trainer 1" in error.what
    assert "job.logs(1)" in error.fix and error.lines[-1] == "ValueError: no data"
    assert list(job.fetch(tmp_path / "none").iterdir()) == [] and "there are no files in output" in caplog.text
    outcome = job.wait(check=False)
    assert (outcome.state, outcome.code, outcome.culprits) == (JobState.FAILED, 1, (("trainer", 1),))
    assert [one.state for one in job.status().ranks] == [RankState.STOPPED, RankState.FAILED]
    monkeypatch.chdir(tmp_path)  # no conf.py here or above
    assert [Job.find(id).id for id in (job.id, job.id[:15], "")] == [job.id] * 3
    with pytest.raises(ConfigError, match="nope"):
        Job.find("nope")


def test_wait_has_a_limit_and_stop_ends_the_job(site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    here = site(1)
    cluster = cluster_at(here, GRACE=1)
    job = cluster.run(here.workspace(train_py=GOES), nproc_per_node=2)
    with pytest.raises(TimeoutError) as late:
        job.wait(timeout=0.5)
    assert isinstance(late.value, StillRunning) and job.id in late.value.what and late.value.fix
    follow = job.logs(rank="all", follow=True)
    assert {next(follow).rank, next(follow).rank} == {0, 1}
    follow.close()
    assert here.living()
    assert job.stop() == {here.name(0): "clean"}
    here.gone()
    with pytest.raises(Terminated, match="stop"):
        job.wait(timeout=0)  # it has ended: the limit does not count
    with pytest.raises(NotFound):
        next(job.logs(rank=5))
    with pytest.raises(NotFound, match="no attempt 9"):
        next(job.logs(attempt=9))
    searched = []
    monkeypatch.setattr(job_object, "locate_logs", lambda *given: (searched.append(given[-1]), locate_logs(*given))[1])
    next(job.logs(attempt=0))
    assert searched == [0], "an elastic job has other nodes in other attempts"
    with pytest.raises(NotFound) as unknown:
        cluster.job("nope")
    assert unknown.value.fix == "clustertool jobs lists the jobs"
    lines = job.logs(rank="all")  # the iterator is left early: its connections are closed
    next(lines)
    lines.close()


def test_two_clusters_in_one_program_and_threads(site: MakeSite) -> None:
    sites = [site(1), site(1)]
    found: dict[int, str] = {}
    ids: dict[int, str] = {}

    def pipeline(number: int) -> None:
        here = sites[number]
        job = Cluster.from_conf(here.folder / "conf.py").run(here.workspace(train_py=f"print('cluster {number}')"))
        follower = [line.text for line in job.logs(follow=True)]
        found[number] = f"{follower} {job.wait().state}"
        ids[number] = job.id

    threads = [threading.Thread(target=pipeline, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {number: f"['cluster {number}'] succeeded" for number in (0, 1)}
    listed = [[job.id for job in Cluster.from_conf(here.folder / "conf.py").jobs()] for here in sites]
    assert listed == [[ids[0]], [ids[1]]]


def test_what_is_wrong_is_raised_before_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = tmp_path / "conf.py"
    conf.write_text("HOSTS = ['127.0.0.1']\nNONSENSE = 1\n")
    with pytest.raises(ConfigError, match="NONSENSE"):
        Cluster.from_conf(conf)
    conf.write_text("HOSTS = ['127.0.0.1:1']\n")
    cluster = Cluster.from_conf(conf)
    for wrong in (
        {"job": ""},
        {"job": tmp_path, "nproc_per_node": "many"},
        {"job": tmp_path, "job_workspace": "/x"},
        {"job": tmp_path, "command": "python3 train.py"},
        {"job": tmp_path, "servers": "127.0.0.1"},
        {"job": tmp_path, "workers": "127.0.0.1"},
        {"job": tmp_path, "heter_workers": "127.0.0.1"},
        {"job": tmp_path, "devices": []},
    ):
        with pytest.raises(UsageError) as caught:
            cluster.run(**wrong)  # type: ignore[arg-type]
        assert caught.value.what and caught.value.fix
    for name in ("only", "skip"):
        with pytest.raises(UsageError, match="a list"):
            Cluster.from_conf(conf, **{name: "127.0.0.1"})  # type: ignore[arg-type]
    alone = Cluster(
        this_machine.own_cluster(tmp_path)
    )  # as from_conf() where clusterrun has started jobs, without a conf.py
    with pytest.raises(ConfigError, match=r"no conf\.py"):
        alone.run(tmp_path, command=["true"])
    both = replace(cluster._config, hosts=(*alone._config.hosts, *cluster._config.hosts))
    assert [(host.name, host.index) for host in Cluster(both)._without_this_machine().hosts] == [(cluster.hosts[0], 0)]
    job = Job(cluster._config, "x")
    for call in (lambda: job.logs(role="boss"), lambda: job.fetch(rank=-1), lambda: job.fetch(path="../x")):
        with pytest.raises(UsageError):
            call()


def test_nodes_that_do_not_answer_are_named(site: MakeSite, tmp_path: Path) -> None:
    here = site(1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.9", 0))
        port = closed.getsockname()[1]
    dead = [f"127.0.0.9:{port}", f"127.0.0.8:{port}"]
    cluster = cluster_at(here, HOSTS=dead)
    with pytest.raises(Several) as both:
        cluster.run(here.workspace(train_py="pass"))
    assert sorted(error.node for error in both.value.errors) == ["127.0.0.8", "127.0.0.9"]
    assert all(isinstance(error, PreflightError) and error.what for error in both.value.errors)
    with pytest.raises(ClustertoolError):
        cluster.jobs()
    shown = Job(cluster._config, "<b>x")._repr_html_()  # a notebook shows the error in place of the report
    assert shown.startswith("<pre>") and "<b>" not in shown and "127.0.0.9" in shown


INTERRUPTED = """
from clustertool.api import Cluster
cluster = Cluster.from_conf("conf.py")
try:
    cluster.run("job", progress=lambda p: open("phases", "a").write(p.text + chr(10)))
except KeyboardInterrupt:
    open("interrupted", "w").close()
"""


def test_an_interrupt_during_run_ends_what_was_started(site: MakeSite) -> None:
    """A trainer waits for a pserver that does not listen: run() is in its last phase when the interrupt comes."""
    here = site(1)
    here.workspace(train_py="pass", pserver_py="import time; time.sleep(60)", job_toml='mode = "ps"')
    program = here.start("-c", INTERRUPTED, program=[sys.executable])
    phases = here.folder / "phases"
    until(lambda: phases.exists() and "1 of 2" in phases.read_text(), 30.0, lambda: "the pserver to start")
    assert here.living()
    program.signal()
    assert program.wait(60).ends(0).err == ""
    assert (here.folder / "interrupted").exists()
    here.gone()


@pytest.mark.parametrize("when", ["while it is placed", "when it has started"])
def test_whatever_ends_run_ends_what_was_started(site: MakeSite, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SystemExit of a signal handler, an alarm: no error of this package, and raised anywhere."""
    here = site(1)
    cluster = cluster_at(here, GRACE=1)
    kinds: list[object] = []

    def ends(*_: object) -> NoReturn:
        assert here.living()
        raise SystemExit(3)

    if when == "when it has started":
        monkeypatch.setattr(job_places, "remember", ends)
    else:
        ask = Fleet.ask

        def place(fleet: Fleet, wanted: Mapping[int, Request[Any]], *args: Any, **given: Any) -> Gathered[Any]:
            kinds.extend(request.kind for request in wanted.values())
            found = ask(fleet, wanted, *args, **given)
            return ends() if kinds[-1] is LAUNCH else found

        monkeypatch.setattr(Fleet, "ask", place)
    with pytest.raises(SystemExit):
        cluster.run(here.workspace(train_py=GOES))
    assert (UNPLACE in kinds) == (when == "while it is placed")
    here.gone()


def test_an_interrupt_from_another_place_is_its_own_exception(site: MakeSite) -> None:
    """Ctrl+C in an attached shell: the pipeline sees Interrupted, with the exit code of the command."""
    here = site(1)
    cluster = cluster_at(here)
    shell = here.start("run", "-w", here.workspace(train_py=GOES))
    shell.says("hello")
    job = cluster.job()
    shell.signal()
    with pytest.raises(Interrupted) as caught:
        job.wait()
    assert caught.value.code == 130
    shell.wait()


def test_the_embedded_cluster(embedded: EmbeddedSite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(embedded.state))
    monkeypatch.chdir(embedded.folder)
    with pytest.raises(ConfigError, match="no conf.py"):
        Cluster.from_conf()
    cluster = Cluster.local(1)
    assert Cluster.from_conf().hosts == cluster.hosts == ("127.0.0.1",)
    job = cluster.run(embedded.workspace(train_py="print('done')"), nproc_per_node=2)
    assert job.wait().code == 0
    assert sorted(line.rank for line in job.logs(rank=[0, 1])) == [0, 1]


def test_the_api_needs_no_code_of_the_command_line() -> None:
    code = (
        "import sys, clustertool.api; print([m for m in sys.modules if m.startswith(('clustertool.verbs', 'IPython'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, check=True)
    assert done.stdout.strip() == "[]"
