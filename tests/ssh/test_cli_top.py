"""inv top in a real terminal (tmux), and without one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli import REPO, until
from tests.nvml import give
from tests.security.test_silent_nodes import away
from tests.ssh.test_cli_verbs import detached

TALKS = """
    import os, time
    step = 0
    while True:
        step += 1
        print(f"step {step} loss {1 / step:.3f}", flush=True)
        time.sleep(0.05)
"""
TOP = f"{sys.executable} -m invoke top; echo code $?"


class Tmux:
    """One window of a private server; the shell in it has printed `before`."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.env = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "TERM": "xterm-256color",
            "TMUX_TMPDIR": str(folder),
            **env,
        }
        self("-f", "/dev/null", "new-session", "-d", "-x", "120", "-y", "30", "echo before; PS1='$ ' exec sh")

    def __call__(self, *args: str) -> str:
        done = subprocess.run(
            ["tmux", "-u", "-L", "top", *args], env=self.env, stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout

    def types(self, keys: str) -> None:
        for part in re.split(r"(\n)", keys):
            if part:
                self("send-keys", *(["Enter"] if part == "\n" else ["-l", part]))

    def press(self, key: str) -> None:
        self("send-keys", key)

    def screen(self) -> str:
        return self("capture-pane", "-p")

    def shows(self, text: str) -> str:
        """The screen that shows `text`."""
        return self.becomes(lambda page: bool(re.search(text, page, re.M)), text)

    def becomes(self, right: Callable[[str], bool], what: str) -> str:
        """The first screen that is right. One that is being drawn is not."""
        page = [""]

        def now() -> bool:
            page[0] = self.screen()
            return right(page[0])

        until(now, what=lambda: f"{what!r} on\n{page[0]}", pause=0.1)  # each time tmux is started
        return page[0]


@pytest.fixture
def top(site, nvml, tmp_path, request):
    """Two nodes, the first with eight cards, a job that talks, and `inv top` in a terminal."""
    if not shutil.which("tmux"):
        pytest.skip("needs tmux")
    two = site(2)
    give(two, nvml, 0)
    two.workspace(train_py=TALKS)
    request.addfinalizer(lambda: two.living() and two.clustertool("stop", "--all", "--force"))
    two.id = detached(two, "--nproc-per-node", 2)
    env = {"HOME": str(two.laptop), "PYTHONPATH": str(REPO)}
    two.tmux = Tmux(tmp_path, env)
    request.addfinalizer(lambda: two.tmux("kill-server"))
    two.tmux.shows("^before$")
    two.tmux.types(f"cd {shlex.quote(str(two.folder))}; {TOP}\n")
    return two


def test_what_is_seen_and_how_it_ends_by_q_and_by_ctrl_c(top):
    tmux = top.tmux
    tmux.shows(r"> +trainer 0 .* running .* step \d+ loss")
    page = tmux.shows(r"trainer 3 +127\.0\.0\.3 +running +\d+ % +\S+ MB +\d")  # CPU and steps a second need two samples
    lines = page.splitlines()
    assert re.match(r"2 nodes, 8 devices 0 % busy, 1 job, by rank +\d\d:\d\d:\d\d", lines[0])
    assert re.match(r"127\.0\.0\.2 +0 NVIDIA Test 80GB .* 0 % .* 0\.0/80 GiB +40 C", lines[2])
    assert "ECC, hardware slowd" in lines[7] and "cpus" in lines[10]
    assert "before" not in page
    tmux.shows(r"q quit.*\s*\Z")  # is drawn last
    # First up, then down: tmux 3.3 itself leaves rubbish of any full-screen program that was made smaller and then bigger.
    tmux("resize-window", "-x", "140", "-y", "40")
    tmux.shows(r"^127\.0\.0\.2 +7 NVIDIA Test 80GB")
    tmux("resize-window", "-x", "70", "-y", "12")  # cards fold to nodes
    tmux.becomes(lambda page: "8 x NVIDIA Te" in page and page.count("trainer") >= 2, "nodes and ranks")
    assert len(tmux.screen().rstrip("\n").splitlines()) <= 12
    tmux.press("s")
    tmux.shows("by cpu")
    tmux.types("/trainer 2\n")
    tmux.shows("> +trainer 2")
    tmux.becomes(lambda page: "trainer 1" not in page and "/trainer 2" in page, "rank 2 alone")
    tmux.press("Escape")
    tmux.shows("trainer 1")
    tmux.press("s")
    tmux.shows("by memory")
    tmux.press("q")
    page = tmux.shows("^code 0$")
    joined = tmux("capture-pane", "-p", "-J")  # broken lines are joined
    assert "invoke top; echo code $?" in joined  # the screen is as it was
    assert "trainer" not in page and "STEPS" not in page
    tmux.types("stty -a\n")
    tmux.shows(r"(?<!-)icanon")
    assert "-echo " not in tmux.screen()
    tmux.types(f"{TOP}\n")
    tmux.shows("> +trainer 0")
    tmux.press("C-c")
    tmux.shows("^code 130$")
    names = sorted(process.name for process in top.living())
    assert names == ["ct-gauge", *["ct-guard"] * 2, *["ct-supervisor"] * 2, *["python3"] * 4]


def test_a_ranks_log_a_stop_and_nodes_that_do_not_answer(top):
    tmux = top.tmux
    tmux.shows("> +trainer 0 .* step")
    tmux.press("Down")
    tmux.shows("> +trainer 1")
    tmux.press("Enter")
    tmux.shows(rf"^trainer 1 on 127\.0\.0\.2, job {top.id}: log/workerlog.1$")
    tmux.shows(r"(^step \d+ loss .*$\n){5}")
    last = re.findall(r"step (\d+)", tmux.screen())[-1]
    until(lambda: re.findall(r"step (\d+)", tmux.screen())[-1] != last)  # it goes on
    tmux.shows("q back")
    tmux.press("q")
    tmux.shows("> +trainer 1")
    tmux.press("x")
    tmux.shows(rf"stop job {top.id} on all nodes\? y/n")
    tmux.press("n")
    tmux.shows("q quit")
    assert top.living()
    tmux.press("x")
    tmux.shows("y/n")
    tmux.press("y")
    tmux.shows(rf"job {top.id}: 127\.0\.0\.\[2-3\]: clean")
    top.gone()
    tmux.shows("0 jobs")
    # One of the nodes goes and comes: the others are shown on; the one that is gone is reported.
    for pid in [p.pid for p in _agents(top, 1)]:
        os.kill(pid, signal.SIGKILL)
    tmux.shows(r"^127\.0\.0\.3: .*(closed|broke)")
    tmux.shows(r"^2 nodes(?s:(?!127\.0\.0\.3: ).)*$")
    with away(top, 1):
        tmux.shows(r"^127\.0\.0\.3: ")
        tmux.press("q")
        tmux.shows("^code 69$")  # a node does not answer


def _agents(site, node):
    return [process for process in site.processes(node) if process.name == "ct-agent"]


@pytest.mark.chaos
def test_without_a_terminal(site):
    two = site(2)
    two.workspace(train_py=TALKS)
    job = detached(two)
    done = two.clustertool("top", "--count", 3, "--interval", 0.5, "--job", job[:15]).ends(0)
    assert len(done.lines("2 nodes, 1 job, by rank")) == 3 and len(done.lines(f"{job}  trainer 1")) == 3
    row = done.lines(f"{job}  trainer 1")[-1]
    assert re.search(
        rf"^{job} +trainer 1 +127\.0\.0\.3 +running +\d+ % +\S+ MB +[\d.]+ +\S+ s +\S+ s +step \d+ loss", row
    )
    (row,) = two.clustertool("top", "--count", 1, "--interval", 0.5).ends(0).lines(f"{job}  trainer 1")
    assert re.search(r"running +\d+ % +\S+ MB +[\d.]+ ", row), "one table has rates, too"
    found = two.clustertool("top", "--json", "--interval", 0.5).ends(0).json
    ranks = {(rank["job"], rank["rank"]): rank for rank in found["ranks"]}
    assert ranks[job, 1]["steps_per_second"] > 1 and "step" in ranks[job, 1]["last_line"]
    assert sorted(found["nodes"]) == ["127.0.0.2", "127.0.0.3"] and found["unreachable"] == {}
    assert not two.clustertool("top", "--count", 1, "--job", "none").ends(0).out.count("trainer")
    two.clustertool("stop", "--job", job).ends(0)


def test_wrong_options(site):
    one = site(1)
    assert "--interval 'soon'" in one.clustertool("top", "--interval", "soon").ends(64).err
    assert "--json and --count" in one.clustertool("top", "--json", "--count", 3).ends(64).err
    assert "--count 'x'" in one.clustertool("top", "--count", "x").ends(64).err
