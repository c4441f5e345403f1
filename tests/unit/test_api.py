"""The Python API has the options of the command line, and shows its progress as safe HTML."""

from __future__ import annotations

import inspect
import pickle
import sys
import time
from contextlib import nullcontext
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from cases import cluster_of, plan_of

from clustertool.actions import find_jobs
from clustertool.api import Cluster, Job, JobFailed, JobState, NotFound, Progress, Several, StillRunning, job_object
from clustertool.api.cluster_object import refuse_nested
from clustertool.api.plain_text import plain_errors
from clustertool.api.silent_caller import SilentCaller, listener
from clustertool.cli.shared_options import RUN
from clustertool.engines import known_engines
from clustertool.errors import ConfigError, DataError, PreflightError, Unreachable, UsageError
from clustertool.model.hints import PROGRAM
from clustertool.model.wire.messages import FOLLOW
from clustertool.ssh.parallel import Gathered
from tests.unit.test_nested_launcher import INSIDE

# Options of `run` that are no keywords, and why.
NOT_KEYWORDS = {
    **dict.fromkeys(("workspace", "job-dispatch-package"), "the first argument"),
    **dict.fromkeys(("gpus", "xpus", "npus", "trainers", "trainer-num"), "other names of options"),
    **dict.fromkeys(("rank", "all-ranks"), "job.logs"),
    **dict.fromkeys(("detach", "dry"), "about what a command prints or waits for"),
    **dict.fromkeys(("log-dir", "fetch-logs"), "job.logs and job.fetch"),
    "dispatch": "DISPATCH of conf.py",
    "engine": "Cluster.from_conf",
    **dict.fromkeys(known_engines.options(), "settings"),
}


def test_run_has_the_options_of_the_command() -> None:
    keywords = set(inspect.signature(Cluster.run).parameters) - {"self", "job", "command", "settings", "progress"}
    options = {option.name for option in RUN}
    assert NOT_KEYWORDS.keys() <= options
    assert keywords == {name.replace("-", "_") for name in options - NOT_KEYWORDS.keys()}


@pytest.mark.parametrize("script", [script for script, _ in INSIDE])
def test_a_launcher_in_the_command_is_an_error_with_the_right_call(script: str) -> None:
    two = cluster_of(["10.0.0.1", "10.0.0.2"])
    with pytest.raises(UsageError, match="each of 2 trainers starts .*: 2 separate trainings begin, not one") as caught:
        refuse_nested(plan_of(two, script=script))
    call = caught.value.fix.removeprefix("start the program itself: ").partition("; or give nested=True")[0]
    keywords = eval(f"dict({call})")
    assert keywords.keys() <= inspect.signature(Cluster.run).parameters.keys()
    assert refuse_nested(plan_of(two, script=keywords["script"])) == ""


def test_progress_is_html_without_markup_of_others() -> None:
    shown = Progress("running", 1, 4, "<script>x</script>")._repr_html_()
    assert '<progress value="1" max="4"' in shown and "<script>" not in shown
    assert "value=" not in Progress("check", text="checking")._repr_html_()
    assert "<progress" not in Progress("ended", text="done")._repr_html_()


def test_errors_name_the_command_and_cross_processes() -> None:
    """Actions and nodes write a placeholder for the program. A pool of processes sends its errors by pickle."""

    @plain_errors()
    def fails() -> None:
        raise Several([NotFound("no job", f"{PROGRAM} jobs lists the jobs", "node1"), JobFailed(f"see {PROGRAM}", 3)])

    with pytest.raises(Several) as caught:
        fails()
    first, second = caught.value.errors
    assert (first.fix, second.what, PROGRAM in str(caught.value)) == (
        "clustertool jobs lists the jobs",
        "see clustertool",
        False,
    )
    second.lines = ("ValueError",)
    for error in (first, second, StillRunning("job x has not ended", "wait again")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("kind", [UsageError, DataError, ConfigError, PreflightError, NotFound])
@pytest.mark.parametrize(
    ("what", "plain"),
    [
        ("--job-id x: job x has not ended", "job_id x: job x has not ended"),
        ("--workspace and --job-workspace=/a", "job and job_workspace=/a"),
        (f"give --nnodes 2; {PROGRAM} check --no-conf", "give nnodes 2; clustertool check --no-conf"),
        ("options has '--name=x', options.--env, a--job-id", "options has '--name=x', options.--env, a--job-id"),
        ("--no-such-option", "--no-such-option"),
        ("correct it, or --no-conf", "correct it, or no_conf"),
    ],
)
def test_errors_of_each_class_name_parameters(kind: Any, what: str, plain: str) -> None:
    """But no options of other programs, of commands to type, and of the log of a rank."""

    @plain_errors()
    def fails() -> None:
        raise Several([kind(what, what), JobFailed("--job-id", 3)])

    with pytest.raises(Several) as caught:
        fails()
    first, second = caught.value.errors
    assert (first.what, first.fix, second.what) == (plain, plain, "--job-id")


def test_no_conf_is_a_parameter(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf.py").write_text("raise SystemExit")
    (tmp_path / "hosts").write_text("10.0.0.1\n")
    monkeypatch.chdir(tmp_path)
    assert Cluster.from_conf(hostfile="hosts", no_conf=True).hosts == ("10.0.0.1",)
    with pytest.raises(UsageError, match="^no_conf and conf contradict each other"):
        Cluster.from_conf("conf.py", no_conf=True)


def test_a_silent_node_does_not_stall_wait_with_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports wait for nodes. The job is followed between two of them, and a lost node is not asked."""
    asked: list[tuple[float, float, list[int]]] = []

    def ask(requests: Any, timeout: float = 60.0, patient: bool = False) -> Gathered[Any]:
        if next(iter(requests.values())).kind is FOLLOW:
            return Gathered({0: {}}, {1: Unreachable("the connection broke")})
        began = time.monotonic()
        time.sleep(0.1)  # the timeout for a node that says nothing
        asked.append((began, time.monotonic(), list(requests)))
        return Gathered({}, {0: Unreachable("no answer")})

    def reopen(node: int) -> None:
        raise Unreachable("no answer")

    agent = SimpleNamespace(send=lambda request: None, dead=None)
    fleet = SimpleNamespace(
        cluster=cluster_of(["10.0.0.1", "10.0.0.2"]), agents=dict.fromkeys((0, 1), agent), failed={}
    )
    fleet.ask, fleet.reopen, fleet.prompter = ask, reopen, SimpleNamespace(serve=lambda: None)
    fleet.engine_end, fleet.late = None, []
    engine = SimpleNamespace(fleet=fleet, capabilities=known_engines.capabilities("ssh"))
    monkeypatch.setattr(SilentCaller, "opened", lambda self, config, sink: nullcontext(engine))
    running = {"state": JobState.RUNNING, "queued": None, "seen_on": [0]}
    monkeypatch.setattr(find_jobs, "attach_to", lambda *_, **__: running)
    monkeypatch.setattr(job_object, "_SAMPLE", 0.1)
    with pytest.raises(StillRunning):
        Job(fleet.cluster, "x").wait(timeout=1.5, progress=lambda _: None)
    assert len(asked) > 1 and all(nodes == [0] for _, _, nodes in asked)
    assert all(later[0] - earlier[1] >= 0.1 for earlier, later in pairwise(asked))


class Kernel:
    """IPython as a notebook has it: displays that are shown, and their updates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **shell: object) -> None:
        self.shown: list[str] = []
        ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
        ipython.get_ipython = lambda: SimpleNamespace(**shell)  # type: ignore[attr-defined]
        display.display = self.display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def display(self, value: Progress, display_id: bool) -> Kernel:
        self.shown.append(f"new {value.text}")
        return self

    def update(self, value: Progress) -> None:
        self.shown.append(f"update {value.text}")


def test_a_notebook_shows_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, kernel=object())
    show = listener(None)
    assert show is not None
    for phase, done, text in (
        ("check", 0, "a"),
        ("dispatch", 1, "b"),
        ("dispatch", 2, "too soon"),
        ("dispatch", 3, "all"),
        ("dispatch", 3, "all"),
        ("ended", 0, "c"),
    ):
        show(Progress(phase, done, 3, text))
    assert kernel.shown == ["new a", "update b", "update all", "update c"]


def test_nothing_is_shown_on_other_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert listener(None) is None
    kernel = Kernel(monkeypatch)  # IPython in a terminal, where a display would be printed
    assert listener(None) is None
    Kernel(monkeypatch, kernel=object())
    assert listener(print) is print
    assert kernel.shown == []


def test_errors_of_options_name_the_parameter() -> None:
    """But a command to type has its options."""
    for fix, shown in [
        ("write --nproc-per-node 3", "write nproc_per_node 3"),
        (f"{PROGRAM} run --wait", "clustertool run --wait"),
    ]:
        with pytest.raises(UsageError) as caught, plain_errors():
            raise UsageError("--nproc-per-node 'x' is not a whole number", fix)
        assert (caught.value.what, caught.value.fix) == ("nproc_per_node 'x' is not a whole number", shown)


def test_the_package_has_the_names_of_the_api() -> None:
    import clustertool
    from clustertool import Cluster as FromPackage

    assert FromPackage is Cluster
    assert not hasattr(clustertool, "nothing")
