"""A cluster of Slurm on one machine: the hosts of a lab, with Debian's munged, slurmd and slurmctld.

    with SlurmLab(3, tmp_path / "lab") as lab:
        lab.slurm("sbatch", "--parsable", "-N2", "--wrap", "srun hostname")     # on the login host
        lab.over(job)                                                           # past COMPLETING, as Slurm states it
        lab.crash(1)                                                            # node1 has lost its power

node0, node1, ... compute; `login` has an sshd, the commands of Slurm and slurmctld. All of them have one home, which the
laptop does not have: it is the shared file system. /tmp, /var/tmp and /run are each host's own, and so are munged and its
socket. No host has systemd, cgroups or a database of accounts, so there is no sacct.

Slurm reads its files in /etc/slurm, where each host sees a folder of the lab. Its logs are in /var/tmp of each host.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tests.lab.lab import WAIT, Lab, LabError, Node, why_not

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
ETC = Path("/etc/slurm")
LOGIN = "login"
DAEMONS = ("munged", "slurmctld", "slurmscriptd", "slurmd")  # names of processes; slurmstepd is a part of a job
# States of a job that Slurm has not finished with. COMPLETING is a flag next to the state, and `squeue` prints it instead.
UNFINISHED = (
    "UNREACHABLE",
    "PENDING",
    "RUNNING",
    "COMPLETING",
    "CONFIGURING",
    "SUSPENDED",
    "REQUEUED",
    "STAGE_OUT",
    "SIGNALING",
)
TURN = 0.2  # seconds between two questions to Slurm, each of which starts a program

# slurmctld, slurmd and proctrack/linuxproc as root without systemd and cgroups. SlurmdTimeout: NODE_FAIL comes some 5 s later.
SETTINGS: Mapping[str, object] = {
    "ClusterName": "lab",
    "SlurmctldHost": LOGIN,
    "SlurmUser": "root",
    "AuthType": "auth/munge",
    "CryptoType": "crypto/munge",
    "StateSaveLocation": "/var/tmp/slurmctld",
    "SlurmdSpoolDir": "/var/tmp/slurmd",
    "SlurmctldPidFile": "/run/slurmctld.pid",
    "SlurmdPidFile": "/run/slurmd.pid",
    "SlurmctldLogFile": "/var/tmp/slurmctld.log",
    "SlurmdLogFile": "/var/tmp/slurmd.log",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "SlurmdParameters": "config_overrides",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core",
    "MpiDefault": "none",
    "ReturnToService": 2,
    "SchedulerParameters": "bf_interval=1,sched_min_interval=0",
    "SlurmctldTimeout": 10,
    "SlurmdTimeout": 10,
    "KillWait": 30,
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
}


class SlurmLab(Lab):
    """`nodes` compute nodes and a login host. `settings`: of slurm.conf; `special`: as in Lab; `login`: the login host; `gpus`:
    of each node, for Slurm to allocate: no device is there."""

    def __init__(
        self,
        nodes: int,
        directory: Path,
        *,
        cpus: int = 4,
        gpus: int = 0,
        settings: Mapping[str, object] | None = None,
        special: Mapping[int, Node] | None = None,
        login: Node | None = None,
    ) -> None:
        self.nodes = nodes
        self.cpus, self.gpus = cpus, gpus
        self.settings = {**SETTINGS, **({"GresTypes": "gpu"} if gpus else {}), **(settings or {})}
        self.slurm_files = directory.resolve() / "slurm"
        hosts = {**(special or {}), nodes: login or Node()}
        own = {i: hosts.get(i, Node()) for i in range(nodes + 1)}
        every = {i: replace(host, binds=(*host.binds, (self.slurm_files, ETC))) for i, host in own.items()}
        super().__init__(nodes + 1, directory, shared_home=True, nodes=every)

    # -- names and places

    @property
    def login(self) -> int:
        """The number of the login host."""
        return self.nodes

    def name(self, i: int) -> str:
        return LOGIN if i == self.login else super().name(i)

    def log(self, i: int) -> str:
        """What slurmd of a node has logged, or slurmctld on the login host."""
        path = self._place(self.name(i), Path("/var/tmp")) / ("slurmctld.log" if i == self.login else "slurmd.log")
        return path.read_text(errors="replace") if path.exists() else ""

    # -- Slurm

    def slurm(self, *argv: str, env: Mapping[str, str] | None = None) -> str:
        """Run a command on the login host and return its output. An exit code other than 0 is a LabError."""
        given = [f"{name}={value}" for name, value in (env or {}).items()]
        done = self.exec(self.login, ["env", *given, *argv])
        if done.returncode:
            raise LabError(f"{shlex.join(argv)}: exit code {done.returncode}: {done.stderr.strip()}\n{done.stdout}")
        return done.stdout.strip()

    def state(self, job: str | int) -> str:
        """The state that squeue prints for a job: COMPLETING too. Empty: Slurm does not have the job any more.

        UNREACHABLE: slurmctld does not answer.
        """
        done = self.exec(self.login, ["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}"])
        return "UNREACHABLE" if done.returncode and "Invalid job id" not in done.stderr else done.stdout.strip()

    def job(self, job: str | int) -> dict[str, str]:
        """Fields without spaces of `scontrol -o show job`."""
        return dict(re.findall(r"(?:^|\s)([A-Za-z:/]+)=(\S*)", self.slurm("scontrol", "-o", "show", "job", str(job))))

    def over(self, job: str | int, seconds: float = WAIT) -> str:
        """Wait until Slurm has finished with a job; the state in which it ended."""
        return self.reaches(job, lambda state: state not in UNFINISHED, seconds)

    def runs(self, job: str | int, seconds: float = WAIT) -> str:
        return self.reaches(job, lambda state: state == "RUNNING", seconds)

    def reaches(self, job: str | int, wanted: Callable[[str], bool], seconds: float = WAIT) -> str:
        """Wait until `wanted(state)` is true for the state of a job."""
        deadline = time.monotonic() + seconds
        while not wanted(state := self.state(job)):
            if time.monotonic() > deadline:
                raise AssertionError(f"job {job} is {state} after {seconds} s: {self.slurm('scontrol', 'show', 'job')}")
            time.sleep(TURN)
        return state

    def cancel_all(self) -> None:
        """Empty the queue, and wait for the nodes."""
        self.slurm("scancel", "--user=root")
        self._await_idle()

    # -- daemons

    def start(self, i: int) -> None:
        super().start(i)
        self._start_daemons(i)

    def stop_controller(self) -> None:
        """End slurmctld as a restart of its service does. It stores its state; after SIGKILL the last 5 s would be missing."""
        deadline = time.monotonic() + WAIT
        while pids := [one.pid for one in self.processes(self.login) if one.argv[:1] == ("slurmctld",)]:
            if time.monotonic() > deadline:
                raise LabError(f"slurmctld does not end: {pids}\n{self.log(self.login)}")
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.05)

    def start_controller(self) -> None:
        self._daemon(self.login, ["slurmctld"])

    def _build(self) -> None:
        self.slurm_files.mkdir(parents=True)
        self._write_files()
        super()._build()
        for i in (self.login, *range(self.nodes)):
            self._start_daemons(i)
        self._await_idle()

    def _write_files(self) -> None:
        lines = [f"{key}={value}" for key, value in self.settings.items()]
        names = ",".join(super(SlurmLab, self).name(i) for i in range(self.nodes))
        lines += [
            f"NodeName={names} CPUs={self.cpus} RealMemory=16000 State=UNKNOWN"
            + f" Gres=gpu:{self.gpus}" * bool(self.gpus),
            f"PartitionName=batch Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=10",
            f"PartitionName=short Nodes={names} MaxTime=1 State=UP PriorityTier=10",
            f"PartitionName=urgent Nodes={names} State=UP PriorityTier=20",
        ]
        (self.slurm_files / "slurm.conf").write_text("\n".join(lines) + "\n")
        # without it slurmd stops on a machine where both versions of cgroups are mounted
        (self.slurm_files / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        devices = [self.slurm_files / f"gpu{number}" for number in range(self.gpus)]
        for device in devices:  # Slurm demands a device file; its number is that of the GPU
            os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        (self.slurm_files / "gres.conf").write_text("".join(f"Name=gpu File={ETC}/{one.name}\n" for one in devices))
        key = self.slurm_files / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    def _start_daemons(self, i: int) -> None:
        run = "/run/munge"
        files = [f"--log-file={run}/munged.log", f"--seed-file={run}/munged.seed", f"--key-file={ETC}/munge.key"]
        self.exec(i, ["mkdir", "-p", "-m", "755", run, "/var/tmp/slurmctld", "/var/tmp/slurmd"])
        self._daemon(i, ["munged", "--force", *files])
        if i == self.login:
            self.start_controller()
        else:
            self._daemon(i, ["slurmd", "-N", self.name(i)])

    def _daemon(self, i: int, argv: Sequence[str]) -> None:
        """Start a program that puts itself into the background once it is ready."""
        quiet = ["sh", "-c", 'exec "$@" </dev/null >/var/tmp/start.log 2>&1', "sh", *argv]
        done = self.exec(i, quiet)
        if done.returncode:
            log = (self._place(self.name(i), Path("/var/tmp")) / "start.log").read_text(errors="replace")
            raise LabError(f"{argv[0]} does not start on {self.name(i)}: {log.strip()}\n{self.log(i)}")

    def _await_idle(self) -> None:
        deadline = time.monotonic() + WAIT
        while len(idle := self.idle()) != self.nodes:
            if time.monotonic() > deadline:
                raise LabError(f"only {idle} are idle\n{self.log(self.login)}\n{self.log(0)}")
            time.sleep(TURN)

    def idle(self) -> list[str]:
        """The nodes that Slurm would give to another job."""
        argv = ["sinfo", "--noheader", "--Node", "--partition=batch", "--states=idle", "--format=%N"]
        return sorted(self.exec(self.login, argv).stdout.split())


def why_no_slurm() -> str:
    """Why there can be no lab of Slurm on this machine, "" if there can be one."""
    sbin = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [name for name in PROGRAMS if not shutil.which(name, path=sbin)]
    if missing:
        return f"no {', '.join(missing)} here: scripts/engine-packages.sh installs them"
    return why_not()
