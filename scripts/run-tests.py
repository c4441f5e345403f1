#!/usr/bin/env python3
"""This script runs pytest with the given arguments, and runs at most three failed tests a second time.

The second attempt runs exactly the tests that failed, in one process, one after the other. If each of them passes now, the
run succeeds, and its last line of output names them. The failures of the first attempt stay in the output. Exits with the
code of pytest: of the first attempt if there is no second one.

There is no second attempt if more tests failed, if a test file could not be imported, or if the run did not reach its end
(Ctrl+C, `-x`, `--maxfail`).
"""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, List, Set

import pytest

MOST = 3  # failed tests that get a second attempt
ONLY = "--second-attempt="  # the argument of this script's own call: followed by the id of one failed test


class Record:
    """A plugin of pytest that records which tests passed and which failed, whichever worker ran them.

    only: the ids of the tests that are run, of all that are collected. Empty: all.
    """

    def __init__(self, only: Set[str]) -> None:
        self.only = only
        self.failed: List[str] = []
        self.passed: Set[str] = set()
        self.complete = True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: List[pytest.Item]) -> None:
        if self.only:
            other = [item for item in items if item.nodeid not in self.only]
            config.hook.pytest_deselected(items=other)
            items[:] = [item for item in items if item.nodeid in self.only]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
        elif report.passed and report.when == "call":
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.complete = self.complete and not report.failed

    def pytest_sessionfinish(self, session: Any) -> None:
        self.complete = self.complete and not session.shouldfail and not session.shouldstop


def second_attempt(failed: List[str], arguments: List[str]) -> int:
    """Run the failed tests in a new process and return its exit code."""
    signal.signal(
        signal.SIGINT, lambda *_: None
    )  # the terminal sends it to the new process, too, and that one ends the tests
    files = sorted({test.partition("::")[0] for test in failed})
    # Only these files are collected, unless the arguments name others.
    alone = [*arguments, "-n", "0", "--dist", "no", *files]
    command = [sys.executable, __file__, *(ONLY + test for test in failed), *alone]
    with subprocess.Popen(command) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def main(given: List[str]) -> int:
    """Run pytest with these arguments. Returns the exit code."""
    only = [argument[len(ONLY) :] for argument in given if argument.startswith(ONLY)]
    arguments = [argument for argument in given if not argument.startswith(ONLY)]
    record = Record(set(only))
    code = int(pytest.main(arguments, plugins=[record]))
    if only:
        missing = record.only - record.passed
        if not code and not missing:
            print(f"passed only in the second attempt, a defect to mend: {' '.join(only)}", flush=True)
        return code or int(bool(missing))
    failed = record.failed
    if code != pytest.ExitCode.TESTS_FAILED or not record.complete or not 0 < len(failed) <= MOST:
        return code
    print(f"\nsecond attempt of {len(failed)}, one after the other: {' '.join(failed)}", flush=True)
    return second_attempt(failed, arguments)


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))  # as `python -m pytest` does
    sys.exit(main(sys.argv[1:]))
