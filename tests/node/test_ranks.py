"""A rank is started in its folder, its session, with its files and nothing of ours, by whatever means this Python has."""

from __future__ import annotations

import os
import resource
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from clustertool.node.supervisor import rank_process
from tests.node.harness import until


@pytest.fixture(params=["spawn", "popen"], autouse=True)
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "popen":

        def none(*arguments: Any, **named: Any) -> int:
            raise NotImplementedError  # as Pythons say it that were built with an old C library

        monkeypatch.setattr(os, "posix_spawn", none)
    return str(request.param)


class Rank:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.job = -1  # descriptor of the job's directory
        self.spec: dict[str, Any] = {
            "here": False,
            "first_path": "",
            "common": {"A": "b c"},
            "ld_library_path": "",
            "prelude": "",
            "work_dir": str(folder),
            "job_dir": str(folder / "job"),
        }

    def start(self, *argv: str, umask: int = 0o027, file_limit: int = 0) -> tuple[int, str]:
        fd = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            return rank_process.start(
                self.spec, {"argv": list(argv), "env": {"RANK": "3"}}, 0, self.job, fd, umask, file_limit
            )
        finally:
            os.close(fd)

    def output(self, *argv: str, **given: int) -> str:
        pid, why = self.start(*argv, **given)
        assert not why
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, self.log.read_text()
        return self.log.read_text()


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


def test_what_it_has(rank: Rank) -> None:
    before, mask = os.getcwd(), os.umask(0o077)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    leak = os.open("/dev/zero", os.O_RDONLY)
    try:
        reported = rank.output(
            "sh",
            "-c",
            "pwd; echo $A $RANK $CLUSTERTOOL_ATTEMPT; ulimit -n; ls -l /proc/self/fd | grep -c zero; : > made;"
            "readlink /proc/self/fd/0; cut -d' ' -f6 /proc/$$/stat; echo $$; echo bad >&2;"
            "exec grep -E 'SigIgn|SigBlk' /proc/self/status",
            file_limit=200,  # a shell that starts something blocks signals
        )
    finally:
        os.close(leak)
        assert os.umask(mask) == 0o077
    folder, values, limit, files, null, session, pid, bad, blocked, ignored = reported.splitlines()
    assert (folder, values, limit, null, bad) == (str(rank.folder), "b c 3 0", "200", "/dev/null", "bad")
    assert files == "0", "what is open here is not open there"
    assert session == pid, "it leads a session"
    assert int(blocked.split()[1], 16) == 0
    deaf = {signal.SIGPIPE, signal.SIGXFSZ}
    assert not any(int(ignored.split()[1], 16) >> (number - 1) & 1 for number in deaf)
    assert stat.S_IMODE((rank.folder / "made").stat().st_mode) == 0o640
    assert os.getcwd() == before and resource.getrlimit(resource.RLIMIT_NOFILE) == limits


def test_programs_are_searched_in_its_own_path(rank: Rank) -> None:
    for name, mode in (("one", 0o755), ("two", 0o644)):
        folder = rank.folder / name
        folder.mkdir()
        (folder / "tool").write_text(f"#!/bin/sh\necho {name}\n")
        (folder / "tool").chmod(mode)
    rank.spec["common"]["PATH"] = f"/nowhere:{rank.folder}/log:{rank.folder}/two:one:{os.environ['PATH']}"
    assert rank.output("tool") == "one\n", "what cannot be run is passed by, and folders may be relative"
    assert rank.output("one/tool") == "one\none\n"


@pytest.mark.parametrize(
    "argv, code, what",
    [
        (["no-such-tool"], 127, "cannot start 'no-such-tool': No such file or directory"),
        (["./no-such-tool"], 127, "cannot start './no-such-tool': No such file or directory"),
        (["plain"], 126, "cannot start 'plain': Permission denied"),
        (["./plain"], 126, "cannot start './plain': Permission denied"),
        (["./text"], 126, "cannot start './text': Exec format error"),
    ],
)
def test_what_cannot_be_started(rank: Rank, argv: list[str], code: int, what: str) -> None:
    for name, mode in (("plain", 0o644), ("text", 0o755)):
        (rank.folder / name).write_text("neither ELF nor script\n")
        (rank.folder / name).chmod(mode)
    rank.spec["common"]["PATH"] = f"{rank.folder}:/usr/bin:/bin"
    assert rank.start(*argv) == (code, what)
    assert rank.log.read_text() == f"clustertool: {what}\n"


def test_a_folder_that_is_gone(rank: Rank) -> None:
    rank.spec["work_dir"] = str(rank.folder / "gone")
    before, mask = os.getcwd(), os.umask(0o077)
    assert rank.start("true") == (127, f"cannot start '{rank.folder}/gone': No such file or directory")
    assert os.umask(mask) == 0o077 and os.getcwd() == before


def test_a_job_directory_that_is_gone(rank: Rank) -> None:
    gone = rank.folder / "job"
    gone.mkdir()
    rank.job = os.open(gone, os.O_RDONLY)
    gone.rmdir()
    rank.spec["work_dir"] = str(gone)
    try:
        assert rank.start("true") == (127, f"cannot start '{gone}': No such file or directory")
    finally:
        os.close(rank.job)


def test_it_is_not_waited_for(rank: Rank) -> None:
    pid, _ = rank.start("sleep", "60")
    os.kill(pid, signal.SIGKILL)
    until(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid)
