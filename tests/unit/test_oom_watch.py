"""OOM kills are named by the counters of a process's cgroup, as its processes see it, and by that of the machine."""

from __future__ import annotations

import builtins
import io
from typing import Any

import pytest

from clustertool.node.system import pressure

GIB = 1 << 30


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The files that the module finds, by path."""
    found: dict[str, str] = {}

    def opened(path: str, *args: Any, **kwargs: Any) -> io.StringIO:
        if path not in found:
            raise FileNotFoundError(2, "No such file", path)
        return io.StringIO(found[path])

    monkeypatch.setattr(builtins, "open", opened)
    monkeypatch.setattr(pressure.os.path, "exists", lambda path: path in found)
    return found


@pytest.mark.parametrize(
    ("line", "counter", "limit"),
    [
        ("0::/\n", "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory.max"),
        ("0::/kubepods/pod1/c1\n", "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory.max"),
        (
            "9:memory:/kubepods/pod1/c1\n0::/\n",
            "/sys/fs/cgroup/memory/memory.oom_control",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        ),
        (
            "0::/user.slice\n",
            "/sys/fs/cgroup/user.slice/memory.events",
            "/sys/fs/cgroup/user.slice/memory.max",
        ),
    ],
)
def test_an_oom_kill_in_the_cgroup_of_a_container(files: dict[str, str], line: str, counter: str, limit: str) -> None:
    files.update({"/proc/7/cgroup": line, counter: "oom 0\noom_kill 0\n", limit: f"{GIB}\n"})
    watch = pressure.OomWatch(7)
    assert watch.verdict() == ""
    files[counter] = "oom 1\noom_kill 1\n"
    assert watch.verdict() == f"out of memory: the kernel killed it (oom_kill in {counter}, limit 1024 MiB)"
    files[limit] = "max\n"
    assert watch.verdict() == f"out of memory: the kernel killed it (oom_kill in {counter})"
    files[limit] = "9223372036854771712\n"  # v1 without a limit
    assert watch.verdict() == f"out of memory: the kernel killed it (oom_kill in {counter})"


def test_an_oom_kill_of_another_process_of_the_machine(files: dict[str, str]) -> None:
    """The counter of the whole machine grows with each kill; the cgroup of the rank knows whether it was the victim."""
    counter = "/sys/fs/cgroup/user.slice/memory.events"
    files.update({"/proc/7/cgroup": "0::/user.slice\n", counter: "oom_kill 3\n", "/proc/vmstat": "oom_kill 8\n"})
    watch = pressure.OomWatch(7)
    files["/proc/vmstat"] = "oom_kill 9\n"
    assert watch.verdict() == ""
    files[counter] = "oom_kill 4\n"
    assert counter in watch.verdict()


def test_an_oom_kill_before_the_program_of_a_container_is_found(files: dict[str, str]) -> None:
    """The container's cgroup has counted it already. At the top is the cgroup of others."""
    files.update({"/proc/7/cgroup": "0::/client\n", "/sys/fs/cgroup/client/memory.events": "oom_kill 2\n"})
    watch = pressure.OomWatch(7)
    counter = "/sys/fs/cgroup/container/memory.events"
    files.update({"/proc/8/cgroup": "4:memory:/\n0::/container\n", counter: "oom_kill 1\n"})
    files["/sys/fs/cgroup/memory/memory.oom_control"] = "oom_kill 5\n"
    files["/proc/vmstat"] = "oom_kill 8\n"
    watch = pressure.OomWatch(7)
    watch.enter_container(8)
    content = files.pop(counter)
    assert watch.verdict() == "", "the container has ended without a kill of the machine"
    files["/proc/vmstat"] = "oom_kill 9\n"
    assert "/proc/vmstat" in watch.verdict(), "the container has ended, and its client had no kill"
    files[counter] = content
    watch.update(8)
    assert watch.verdict() == f"out of memory: the kernel killed it (oom_kill in {counter})"
    watch.update(8)
    assert watch.verdict() == "", "it has outlived the kill of another process of the container"


@pytest.mark.parametrize("cgroup", ["", "0::/container\n"])
def test_an_oom_kill_without_a_cgroup(files: dict[str, str], cgroup: str) -> None:
    """The process has none that is visible, or its container has ended: the machine's counter is what is left."""
    counter = "/sys/fs/cgroup/container/memory.events"
    files["/proc/vmstat"] = "oom_kill 8\n"
    if cgroup:
        files.update({"/proc/7/cgroup": cgroup, counter: "oom_kill 0\n"})
    watch = pressure.OomWatch(7)
    files.pop(counter, None)
    assert watch.verdict() == ""
    files["/proc/vmstat"] = "oom_kill 9\n"
    assert watch.verdict() == "out of memory: the kernel killed it (oom_kill in /proc/vmstat)"
