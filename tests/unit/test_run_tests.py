"""scripts/run-tests.py runs failed tests a second time, and hides no failure by that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.node.harness import until

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "run-tests.py"
FAILS_ONCE = "def test_{name}(pytestconfig):\n    first = pytestconfig.rootpath / '{name}'\n    {action}\n"


def fails_once(name: str, then: str = "pass") -> str:
    """The text of a test that fails in its first attempt only. then: what it does in the second."""
    action = f"first.exists() or (first.touch(), 1 / 0)\n    {then}"
    return FAILS_ONCE.format(name=name, action=action)


class Run:
    """`make test` of one file. It is started at once."""

    def __init__(self, folder: Path, text: str, *arguments: str) -> None:
        (folder / "setup.cfg").write_text("[tool:pytest]\n")
        (folder / "test_it.py").write_text(f"import time, pytest\n{text}")
        command = [sys.executable, str(SCRIPT), "-q", *arguments]
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end(self) -> tuple[int, str]:
        """Wait for its end. Returns its exit code and its output."""
        output = self.process.communicate(timeout=120)[0]
        return self.process.returncode, output


def run(folder: Path, text: str, *arguments: str) -> tuple[int, str]:
    return Run(folder, text, *arguments).end()


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_passes_in_the_second_attempt_is_named_last(tmp_path: Path, workers: str) -> None:
    text = fails_once("a") + fails_once("b") + "def test_c(): pass\n"
    (tmp_path / "test_other.py").write_text("def test_d(): pass\n")  # is not collected a second time
    code, output = run(tmp_path, text, "-n", workers, "--dist", "worksteal")
    assert code == 0, output
    assert output.count("1 / 0") >= 2, "the first failures stay"
    assert "2 failed, 2 passed" in output and "2 passed, 1 deselected" in output
    last = output.splitlines()[-1]
    assert last.startswith("passed only in the second attempt")
    assert sorted(last.split()[-2:]) == ["test_it.py::test_a", "test_it.py::test_b"]


def test_a_run_without_a_failure_has_one_attempt(tmp_path: Path) -> None:
    code, output = run(tmp_path, "def test_a(): pass\n")
    assert code == 0
    assert "attempt" not in output


@pytest.mark.parametrize(
    "text",
    [
        fails_once("a") + "def test_b(): assert False\n",
        fails_once("a", "pytest.skip('no')"),
        fails_once("a", "pytest.xfail('no')"),
        "@pytest.fixture\ndef broken():\n    yield\n    1 / 0\ndef test_a(broken): pass\n",
    ],
    ids=["fails again", "skipped", "expected to fail", "fails at its end"],
)
def test_a_second_attempt_that_does_not_pass_is_a_failure(tmp_path: Path, text: str) -> None:
    code, output = run(tmp_path, text)
    assert code == 1, output
    assert "second attempt of" in output
    assert "passed only in" not in output


IMPORT_FAILS = "import missing_module\n" + fails_once("a")


@pytest.mark.parametrize(
    "text, arguments, codes",
    [
        ("".join(map(fails_once, "abcd")), [], {1}),
        ("".join(map(fails_once, "abcd")), ["-n", "2"], {1}),
        (IMPORT_FAILS, [], {1, 2}),
        (IMPORT_FAILS, ["-n", "2"], {1, 2}),
        (fails_once("a"), ["--no-such-option"], {4}),
        (fails_once("a"), ["-k", "nothing"], {5}),
        (fails_once("a") + fails_once("b"), ["-x"], {1, 2}),
        (fails_once("a") + fails_once("b"), ["-x", "-n", "1"], {1, 2}),
    ],
    ids=["four", "four of two workers", "import", "import by workers", "option", "no test", "-x", "-x by a worker"],
)
def test_no_second_attempt(tmp_path: Path, text: str, arguments: list[str], codes: set[int]) -> None:
    code, output = run(tmp_path, text, *arguments)
    assert "second attempt" not in output
    assert code in codes, output


def test_the_selection_stays_the_same(tmp_path: Path) -> None:
    code, output = run(tmp_path, fails_once("a") + "def test_b(): assert False\n", "-k", "test_a or nothing")
    assert code == 0, output
    assert "1 passed, 1 deselected" in output


WAITS = """
@pytest.fixture(autouse=True)
def tidy(pytestconfig):
    yield
    with open(pytestconfig.rootpath / "tidied", "a") as file:
        file.write("x")

def wait(folder):
    (folder / "waits").touch()
    time.sleep(60)
"""


@pytest.mark.parametrize(
    "text, workers, tests",
    [
        ("def test_a(pytestconfig): wait(pytestconfig.rootpath)\n", "0", 1),
        ("def test_a(pytestconfig): wait(pytestconfig.rootpath)\n", "2", 1),
        (fails_once("a", "wait(pytestconfig.rootpath)"), "2", 2),
    ],
    ids=["first", "first of two workers", "second"],
)
def test_ctrl_c(tmp_path: Path, text: str, workers: str, tests: int) -> None:
    """The run fails, and each fixture does what it does at its end."""
    started = Run(tmp_path, WAITS + text, "-n", workers)
    until((tmp_path / "waits").exists)
    os.killpg(started.process.pid, signal.SIGINT)
    code, output = started.end()
    assert code == 2, output
    assert (tmp_path / "tidied").read_text() == "x" * tests
    assert "passed only in" not in output
