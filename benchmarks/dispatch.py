"""This program measures how long a workspace takes to all nodes, and what each command takes.

It compares our dispatch, a parallel rsync loop and `clush --copy`, on a shaped cluster.

    make bench                                     # every case of CASES
    make bench ARGS="--only cold-16 --rounds 3 --json bench.json"

Each case builds a cluster of network namespaces (tests/lab) with its own uplink and LAN speeds. In every round all tools
run, one after the other on cold nodes, so that what else the machine does meets all of them; medians and ratios are printed.
The CPU time of laptop and nodes is printed, and ratios are those of the time without the nodes' share of the processors: real
nodes have processors of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from tests.lab.lab import Lab, why_not  # noqa: E402
from tests.nodes_cpu import NodesCpu  # noqa: E402

INV = (sys.executable, "-m", "invoke")
SSH = "ssh -o BatchMode=yes -o StrictHostKeyChecking=no -o LogLevel=ERROR"


@dataclass(frozen=True)
class Case:
    """`files` of `size` bytes each. `limit`: the most that ours may take, as a multiple of one rsync to one node."""

    name: str
    nodes: int
    files: int
    size: int
    uplink: str
    lan: str
    limit: float
    all_tools: bool = False  # loops and clush as well: they take N times as long

    @property
    def bytes(self) -> int:
        return self.files * self.size


CASES = (
    Case("cold-16", 16, 500, 50_000, "100mbit", "1gbit", 1.3, all_tools=True),
    Case("cold-64", 64, 100, 50_000, "20mbit", "1gbit", 1.6),
    Case("equal-16-files", 8, 16, 25_000_000, "200mbit", "200mbit", 1.5),
    Case("equal-1-file", 8, 1, 400_000_000, "200mbit", "200mbit", 2.0),
    Case("small-files", 16, 20_000, 1_000, "100mbit", "1gbit", 1.5),
)
WARM = Case("warm-64", 64, 100, 50_000, "100mbit", "1gbit", 1.3)
COMMANDS = Case("commands-64", 64, 100, 50_000, "100mbit", "1gbit", 0)
_BARE = "for _ in 0 1 2 3 4 5 6 7 8 9; do python3 -ESs -c pass; done"

_BYTES, _OURS = 1.1, 60_000  # over the uplink: times the yardstick's, and bytes for each node
_STRANGERS = 30  # nodes; to ask for each other's hardware addresses, all namespaces of a machine have one table of 1024
_ROOM = 500_000_000  # bytes of all nodes' copies
_PROCESSES = 15_000_000  # bytes that sshd, agent and relay of a node need
_TOUCH = "import sys\nmemory = bytearray(int(sys.argv[1]))\nfor at in range(0, len(memory), 4096): memory[at] = 1"


class Bench:
    """One case on its lab."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.lab = Lab(case.nodes, folder / "lab", nodes={}, acquainted=case.nodes > _STRANGERS)
        self.aside = 0
        self.work = folder / "work"
        self.work.mkdir()
        # As on machines where nothing was set up: a virtual environment takes longer to start.
        conf = self.lab.conf(PYTHON=None)
        (self.work / "conf.py").write_text(conf)
        (self.work / "tasks.py").write_text("from clustertool.verbs import ns\n")
        self.job = self.work / "job"
        for number in range(case.files):
            path = self.job / f"d{number % 50}" / f"f{number}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(case.size))
        self.lab.shape("uplink", case.uplink)
        for node in range(case.nodes):
            self.lab.shape(node, case.lan)
        self.cpu = NodesCpu(boot.init for boot in self.lab.boots.values())
        self.run(*INV, "exec", "--command", "true")  # host keys, and Python's compiled files
        self.first = self.run(*INV, "jobs")  # which sends the tool's own code to all nodes

    def run(self, *argv: str) -> dict[str, float]:
        """Seconds, CPU seconds of the laptop and of all nodes, `alone` (seconds without the nodes' CPU time), bytes sent."""
        nodes, laptop = self.cpu.seconds(), _waited_for()
        before, start = self.lab.sent(), time.monotonic()
        done = self.lab.run(argv, cwd=self.work, env={"PYTHONPATH": str(REPO)}, timeout=1800)
        seconds, laptop = time.monotonic() - start, _waited_for() - laptop
        if done.returncode:
            raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        sent, nodes = self.lab.sent() - before, self.cpu.seconds() - nodes
        alone = seconds - nodes / len(os.sched_getaffinity(0))
        return {"seconds": seconds, "alone": alone, "laptop": laptop, "nodes": nodes, "bytes": sent}

    def clear(self) -> None:
        """Cold nodes again: nothing of any copy is left, but what the tool itself keeps of its own code.

        Copies are put aside, if there is room: ext4 without a journal passes by the inodes that were given back in the last
        minutes, one by one, so that to delete much makes the next copy slow.
        """
        self.aside += 1
        small = self.case.nodes * self.case.bytes < _ROOM
        for node in range(self.case.nodes):
            for name in ("clustertool", "copy"):
                copy = self.lab.home(node) / name
                if not small:
                    shutil.rmtree(copy, ignore_errors=True)
                elif copy.exists():
                    copy.rename(copy.with_name(f"{name}.{self.aside}"))
        shutil.rmtree(self.lab.laptop_home / ".cache/clustertool/workspaces", ignore_errors=True)

    def wake(self) -> None:
        """Have as much free memory as all nodes will need, and be done with it.

        A virtual machine gives back to its host what was free for some seconds, and waits 10 us for each page that it wants
        again. One machine would pay that for all nodes here.
        """
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        size = min(self.case.nodes * (self.case.bytes + _PROCESSES), free // 4)
        subprocess.run([sys.executable, "-c", _TOUCH, str(size)], check=True)

    # -- the tools --

    def ours(self) -> dict[str, float]:
        return self.run(*INV, "dispatch", "--workspace", "job")

    def rsync_one(self) -> dict[str, float]:
        return self.run("rsync", "-a", "-e", SSH, "job/", "root@node0:copy/")

    def rsync_loop(self) -> dict[str, float]:
        nodes = " ".join(self.lab.name(node) for node in range(self.case.nodes))
        return self.run("sh", "-c", f"for n in {nodes}; do rsync -a -e '{SSH}' job/ root@$n:copy/ & done; wait")

    def clush(self) -> dict[str, float]:
        nodes = ",".join(self.lab.name(node) for node in range(self.case.nodes))
        return self.run(
            "clush", "-w", nodes, "-l", "root", "-o", "-o StrictHostKeyChecking=no", "--copy", "job", "--dest", "."
        )

    def nothing(self) -> dict[str, float]:
        return self.run(*INV, "exec", "--command", "true")

    def bare_pythons(self) -> dict[str, float]:
        """Ten starts of a bare Python on each node: by it the CPU times of two machines can be compared."""
        return self.run(*INV, "exec", "--command", _BARE)

    def check(self) -> dict[str, float]:
        return self.run(*INV, "check")

    def jobs(self) -> dict[str, float]:
        return self.run(*INV, "jobs")

    def start(self) -> dict[str, float]:
        """Run a job until its ranks have started: they only sleep. Then stop it, which is not measured."""
        found = self.run(*INV, "run", "--workspace", "job", "--detach")
        self.run(*INV, "stop", "--force")
        return found

    def change(self) -> dict[str, float]:
        (self.job / "d0/f0").write_bytes(os.urandom(10_000))
        return self.ours()


def _waited_for() -> float:
    """CPU seconds of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


Runs = dict[str, list[dict[str, float]]]


def measure(tools: dict[str, Callable[[], dict[str, float]]], rounds: int, *between: Callable[[], None]) -> Runs:
    """Measure the tools in turn, after one more round: caches fill, and a virtual machine gets its memory."""
    found: Runs = {name: [] for name in tools}
    for _ in range(1 + rounds):
        for name, tool in tools.items():
            for prepare in between:
                prepare()
            found[name].append(tool())
    return {name: runs[1:] for name, runs in found.items()}


def cold(case: Case, rounds: int, folder: Path) -> Runs:
    bench = Bench(case, folder)
    try:
        tools = {"rsync to one node": bench.rsync_one, "clustertool": bench.ours}
        if case.all_tools:
            tools["rsync loop"] = bench.rsync_loop
            if shutil.which("clush"):
                tools["clush --copy"] = bench.clush
        return measure(tools, rounds, bench.clear, bench.wake)
    finally:
        bench.lab.close()


def warm(rounds: int, folder: Path) -> Runs:
    bench = Bench(WARM, folder)
    try:
        bench.ours()
        tools = {"exec true": bench.nothing, "nothing changed": bench.ours, "one file changed": bench.change}
        found = measure(tools, rounds, bench.wake)
        print(
            f"{WARM.name:16} {'first use':20} {bench.first['bytes'] / WARM.nodes / 1000:8.0f} kB for each node",
            flush=True,
        )
        return found
    finally:
        bench.lab.close()


def commands(rounds: int, folder: Path) -> Runs:
    bench = Bench(COMMANDS, folder)
    try:
        (bench.job / "job.toml").write_text('[trainer]\ncommand = ["sleep", "1000"]\n')
        bench.ours()
        tools = {
            "exec true": bench.nothing,
            "exec ten Pythons": bench.bare_pythons,
            "check": bench.check,
            "jobs": bench.jobs,
            "dispatch": bench.ours,
            "run --detach": bench.start,
        }
        return measure(tools, rounds, bench.wake)
    finally:
        bench.lab.close()


def table(case: Case, found: Runs, limits: dict[str, float]) -> list[dict[str, object]]:
    """Print one case; the first tool is the yardstick, of cold nodes also for what crosses the uplink."""
    rows: list[dict[str, object]] = []
    name, yardstick = case.name, next(iter(found.values()))
    base = [one["alone"] for one in yardstick]
    most = _BYTES * statistics.median(one["bytes"] for one in yardstick) + _OURS * case.nodes
    for tool, runs in found.items():
        seconds = _median(runs, "seconds")
        alone, laptop, nodes, sent = (_median(runs, key) for key in ("alone", "laptop", "nodes", "bytes"))
        ratio = statistics.median(one["alone"] / first for one, first in zip(runs, base))
        limit = limits.get(tool)
        judged = f"at most {limit:g}: {_met(ratio <= limit)}" if limit else ""
        if limit and case in CASES:
            judged += f", at most {most / 1e6:.1f} MB: {_met(sent <= most)}"
        cpu = f"CPU: laptop {laptop:.2f} s, each node {nodes / case.nodes * 1000:.0f} ms"
        print(f"{name:16} {tool:20} {seconds:8.2f} s, without the nodes' CPU {alone:8.2f} s {ratio:7.2f} x", end=" ")
        print(f"{sent / 1e6:10.2f} MB  {cpu}  {judged}", flush=True)
        row = {
            "case": name,
            "tool": tool,
            "seconds": seconds,
            "alone": alone,
            "laptop": laptop,
            "nodes": nodes,
            "ratio": ratio,
            "uplink": sent,
            "limit": limit,
            "runs": runs,
        }
        rows.append(row)
    return rows


def _median(runs: list[dict[str, float]], key: str) -> float:
    return statistics.median(one[key] for one in runs)


def _met(met: bool) -> str:
    return "yes" if met else "NO"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", help="a case by its name; may be given several times")
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="where to write all numbers")
    given = parser.parse_args()
    if why_not():
        raise SystemExit(why_not())
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for number, case in enumerate(CASES):
            if not given.only or case.name in given.only:
                found = cold(case, given.rounds, _new(Path(folder) / str(number)))
                rows += table(case, found, {"clustertool": case.limit})
        if not given.only or WARM.name in given.only:
            limits = {"nothing changed": WARM.limit, "one file changed": 1.6}
            rows += table(WARM, warm(given.rounds, _new(Path(folder) / "warm")), limits)
        if not given.only or COMMANDS.name in given.only:
            rows += table(COMMANDS, commands(given.rounds, _new(Path(folder) / "commands")), {})
    given.json.write_text(json.dumps({"cpus": os.cpu_count(), "rounds": given.rounds, "rows": rows}, indent=1))
    print(f"all numbers: {given.json}")


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
