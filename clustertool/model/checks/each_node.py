"""These checks judge each node alone: what a job needs there, and what slows a job down or breaks it later."""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from clustertool.model.checks.across_nodes import drift
from clustertool.model.checks.container_findings import container_findings
from clustertool.model.checks.mpi_findings import mpi_findings
from clustertool.model.config.cluster import Cluster
from clustertool.model.container.container_settings import NO_CONTAINER, ContainerSettings
from clustertool.model.facts import ByNode, Facts
from clustertool.model.finding import Finding, Seen
from clustertool.model.hints import PROGRAM
from clustertool.model.quantities import MOST_FILES, human_bytes

_LITTLE = 256 << 20  # bytes free under which a node is warned of
_LEAST = 1 << 20  # bytes free without which no job starts
FEW_BYTES = 512 << 20  # of available memory
FEW_SHARED = 256 << 20  # of /dev/shm: containers have 64 MB, which data loaders fill in seconds
FEW_INODES = 10_000
FEW_FILES = 1024  # a rank opens sockets to all others, and its data
FEW_PROCESSES = 1024
BUSY = 1.5  # runnable processes per core, over a minute
SLOW = 5.0  # seconds of a phase of the login
_PHASES = {
    "connect": "a slow network, or sshd asks a name server: UseDNS no in its sshd_config",
    "login": "GSSAPIAuthentication no and UsePAM's modules in its sshd_config; a slow name or directory service",
    "agent": "the start files of the login shell (.bashrc), a slow home, or a machine without a core to spare",
}
_CLEAN = f"{PROGRAM} clean --older-than 7d"
Wrong = Optional[Tuple[str, str]]  # what is wrong and the fix; None: nothing


def check(
    cluster: Cluster, facts: ByNode, seen: Seen, ports: bool = True, container: ContainerSettings = NO_CONTAINER
) -> Tuple[Finding, ...]:
    """Collect the findings of all nodes that answered, without those of checks in CHECKS_OFF.

    ports: check the ports that conf.py names; for a job its plan does this, which knows the ports that the job will use.
    container: of the job, for nodes that were asked for their runtime.
    """
    found: List[Finding] = []
    alike = _equal_by_machine(facts)
    for node, fact in sorted(alike.items()):
        found.append(_phases(node, fact.user, seen.phases.get(node, {})))
        found += _check_node(cluster, fact, ports)
        found += _check_condition(cluster, fact)
        if node in seen.pings:
            found.append(_ping(node, seen.pings[node], answered=True))
    found += drift(dict(sorted(alike.items())), seen.asked)
    found += mpi_findings({node: fact for node, fact in sorted(facts.items()) if fact.mpirun is not None})
    found += container_findings(cluster, container, facts)
    return tuple(finding for finding in found if finding.column not in cluster.checks_off)


def _equal_by_machine(facts: ByNode) -> Dict[int, Facts]:
    """Return the facts with equal load, memory and /dev/shm for all nodes of one machine: those of its first node.

    They were read at different times; findings with equal values are shown together.
    """
    first = {facts[node].machine: facts[node] for node in sorted(facts, reverse=True)}
    alike = {node: first[fact.machine] for node, fact in facts.items()}
    return {n: replace(fact, load=alike[n].load, memory=alike[n].memory, shm=alike[n].shm) for n, fact in facts.items()}


def unreachable(
    node: int, pings: Mapping[int, Optional[bool]], what: str, fix: str, column: str = "ssh"
) -> Tuple[Finding, ...]:
    """Report the error of a node that did not answer, in this column, and the result of its ping, if there is one.

    what, fix: of the error. A ping without a reply is an error where ssh did not reach the node (column ssh), else a warning.
    """
    found = [Finding(node, column, "error", what, fix)]
    if node in pings:
        found.append(_ping(node, pings[node], answered=column != "ssh"))
    return tuple(found)


def _ping(node: int, answer: Optional[bool], answered: bool) -> Finding:
    """Report the result of a ping: without a reply a warning if the node answered by ssh (`answered`), else an error.

    answer: there was a reply; None, not measured, is the level skip.
    """
    if answer is None:
        return Finding(node, "ping", "skip", "not measured")
    if answer:
        return Finding(node, "ping", "ok", "ok")
    fix = "check that the machine is up and its address is right (a firewall may block ICMP)"
    return Finding(node, "ping", "warn" if answered else "error", "no answer", fix)


def _phases(node: int, user: str, seconds: Mapping[str, float]) -> Finding:
    """Report the user of the login (ok), or phases that took more than SLOW seconds, with their usual causes (a warning)."""
    slow = [name for name in _PHASES if seconds.get(name, 0.0) > SLOW]
    if not slow:
        return Finding(node, "ssh", "ok", user)
    text = ", ".join(f"{name} took {seconds[name]:.0f} s" for name in slow)
    return Finding(node, "ssh", "warn", text, "; ".join(_PHASES[name] for name in slow))


def _check_node(cluster: Cluster, fact: Facts, ports: bool) -> List[Finding]:
    """Report python, rsync, disk, ports (if they are checked), and problems of root, tmp and nic that the node has found.

    Each without a problem is ok. A missing rsync is an error, but only if DISPATCH is rsync; one that does not run is otherwise
    a warning.
    """
    n = fact.node
    found = [Finding(n, "python", "ok", fact.python)]
    if cluster.dispatch == "rsync" and not fact.rsync:
        found.append(Finding(n, "rsync", "error", "no rsync", "install the package rsync on the node"))
    elif fact.rsync_error:
        level = "error" if cluster.dispatch == "rsync" else "warn"
        found.append(Finding(n, "rsync", level, f"does not run: {fact.rsync_error}", "install rsync again on the node"))
    else:
        found.append(Finding(n, "rsync", "ok", "yes" if fact.rsync else "no"))
    found.append(disk(fact, 0))
    if ports:
        found.append(_ports(cluster, n, fact))
    found += [Finding(n, *problem) for problem in fact.problems]
    reported = {column for column, _, _, _ in fact.problems}
    right = {"root": "ok", "tmp": "ok", "nic": fact.nic or "ok"}
    return found + [Finding(n, column, "ok", text) for column, text in right.items() if column not in reported]


def disk(fact: Facts, need: int) -> Finding:
    """Check that ROOT_DIR has room: an error for less than `need` bytes (at least 1 MiB), or without an inode.

    Less than 256 MiB more, or fewer than FEW_INODES inodes, are a warning. need: bytes of the workspace.
    """
    node, free = fact.node, fact.disk_free
    text = f"{human_bytes(free)} free"
    if free < max(need, _LEAST):
        what = f"{text}, {human_bytes(max(need, _LEAST))} needed below {fact.root}"
        return Finding(node, "disk", "error", what, f"make room, or choose another ROOT_DIR; {_CLEAN} removes old jobs")
    if 0 <= fact.inodes < FEW_INODES:
        level = "warn" if fact.inodes else "error"
        return Finding(node, "disk", level, f"{fact.inodes} inodes free", f"remove small files: {_CLEAN}")
    if free < need + _LITTLE:
        return Finding(node, "disk", "warn", text, f"make room: {_CLEAN} removes old jobs")
    return Finding(node, "disk", "ok", "ok")


def _ports(cluster: Cluster, node: int, fact: Facts) -> Finding:
    """Check the ports that conf.py demands: one finding, an error with all that are in use, else ok.

    LEAD_PORT counts on node 0 only. A default port that is taken is only avoided, so it is no finding.
    """
    wanted: List[Tuple[str, int]] = []
    if cluster.pserver_port_given:
        width = cluster.ports_num + cluster.ports_num_for_sparse
        wanted += [("PADDLE_PORT", cluster.pserver_port + i) for i in range(width)]
    if cluster.start_port:
        wanted.append(("START_PORT", cluster.start_port))
    if cluster.lead_port and node == 0:
        wanted.append(("LEAD_PORT", cluster.lead_port))
    taken = [f"{port} ({key}) is in use by {fact.holder(port)}" for key, port in wanted if port in fact.busy]
    if taken:
        return Finding(node, "ports", "error", "; ".join(taken), "end that program, or choose another port in conf.py")
    return Finding(node, "ports", "ok", "free")


# -- conditions that do not prevent a start --


def _check_condition(cluster: Cluster, fact: Facts) -> List[Finding]:
    """Judge memory, load, limits, /dev/shm, proxies and processes of ended jobs: for each a warning, or ok.

    Of an examined node, the packages that it has are reported, too, as ok.
    """
    wrong = {"memory": _memory(fact), "load": _load(fact), "limits": _limits(fact), "shm": _shm(fact)}
    wrong["proxy"] = _proxy(cluster, fact)
    if fact.examined or fact.leftovers:
        wrong["jobs"] = _jobs(fact)
    hard = {name: most for name, _, most in fact.limits}.get("nofile", 0)
    right = {"limits": f"{MOST_FILES if hard < 0 else min(hard, MOST_FILES)} open files"} if hard else {}
    found = [
        Finding(fact.node, name, *(("warn", *why) if why else ("ok", right.get(name, "ok"))))
        for name, why in wrong.items()
    ]
    if fact.examined:  # what the node has, by itself neither right nor wrong: across_nodes.py compares it
        have = [f"{name} {version}" for name, version in fact.packages if version]
        found.append(Finding(fact.node, "packages", "ok", ", ".join(have)))
        found += _stacks(fact)
    return found


def _stacks(fact: Facts) -> List[Finding]:
    """Check that the verb `stacks` can read the programs of ranks: a warning if yama forbids it, also only in containers."""
    scope, runtime = fact.ptrace_scope, fact.container.runtime if fact.container else ""
    if scope < 1 + (runtime != "docker"):  # what docker starts is not below the supervisor, which 1 requires
        return []
    fix = f"as root: sysctl kernel.yama.ptrace_scope={int(runtime != 'docker')}" + "; 3 stays until it boots" * (
        scope > 2
    )
    return [Finding(fact.node, "stacks", "warn", f"kernel.yama.ptrace_scope is {scope}: no stacks of Python", fix)]


def _memory(fact: Facts) -> Wrong:
    """Return what is wrong and the fix if less than FEW_BYTES of memory are available, else None."""
    everything, available = fact.memory
    if not everything or available >= FEW_BYTES:
        return None
    text = f"{human_bytes(available)} of {human_bytes(everything)} left"
    return text, "end what fills it: the kernel kills ranks that find no memory"


def _load(fact: Facts) -> Wrong:
    """Return what is wrong and the fix if more than BUSY processes per core are runnable, else None."""
    if not fact.cpus or fact.load <= BUSY * fact.cpus:
        return None
    return f"{fact.load:.0f} on {fact.cpus} cores", "other processes use the CPU; one slow node slows the whole job"


def _limits(fact: Facts) -> Wrong:
    """Return which limits are below FEW_FILES and FEW_PROCESSES, and the fix; None if none is.

    Of open files the hard limit counts, to which the tool raises that of ranks; of processes the soft one. With RDMA memlock
    must be unlimited, too.
    """
    files = [("nofile", hard) for name, _, hard in fact.limits if name == "nofile"]
    soft_ones = [(name, soft) for name, soft, _ in fact.limits if name == "nproc"]
    least = {"nofile": FEW_FILES, "nproc": FEW_PROCESSES}
    low = [f"{name} {number}" for name, number in (*files, *soft_ones) if 0 <= number < least[name]]
    if fact.rdma:
        low += [f"memlock {soft >> 10} kB" for name, soft, _ in fact.limits if name == "memlock" and soft >= 0]
    fix = "raise it in /etc/security/limits.conf (or sshd's unit), and log in again; RDMA needs memlock unlimited"
    return (", ".join(low), fix) if low else None


def _shm(fact: Facts) -> Wrong:
    """Return what is wrong and the fix if /dev/shm is missing, or less than FEW_SHARED bytes are free in it, else None."""
    if fact.shm < 0:
        return "no /dev/shm", "mount -t tmpfs tmpfs /dev/shm: data loaders and NCCL need it"
    fix = "mount -o remount,size=50% /dev/shm (a container: --shm-size): data loaders die there with a bus error"
    return (f"{human_bytes(fact.shm)} free in /dev/shm", fix) if fact.shm < FEW_SHARED else None


def _proxy(cluster: Cluster, fact: Facts) -> Wrong:
    """Return the variables of proxies in conf.py or PRELUDE, with the training address and the fix.

    None if there are none, or if no_proxy excludes the address. A proxy of the login never reaches a rank.
    """
    given = {**dict(cluster.env), **dict(cluster.hosts[fact.node].env)}
    proxies = {name for name in given if name.lower() in ("http_proxy", "https_proxy", "all_proxy")}
    names = sorted(proxies | set(fact.job_proxies))
    free = fact.no_proxy or given.get("no_proxy", given.get("NO_PROXY", ""))
    if not names or not fact.address or covers(free, fact.address):
        return None
    fix = "take it out of ENV or PRELUDE, or name the training addresses in no_proxy: frameworks meet by HTTP"
    return f"{', '.join(names)} for {fact.address}", fix


def covers(no_proxy: str, address: str) -> bool:
    """Check whether an entry of no_proxy matches an address: itself, a prefix such as 10. or 10.0.0.0/8, a domain, or *."""
    for entry in (entry.strip() for entry in no_proxy.split(",")):
        if entry == "*" or entry == address:
            return True
        plain = entry.lstrip("*")
        if plain.startswith(".") and address.endswith(plain) or plain.endswith(".") and address.startswith(plain):
            return True
        if "/" in entry and _in_network(address, entry):
            return True
    return False


def _in_network(address: str, network: str) -> bool:
    """Check whether an address is in a network; False for what is none."""
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def _jobs(fact: Facts) -> Wrong:
    """Return the processes of jobs whose supervisors have ended, and the commands that stop them; None if there are none."""
    if not fact.leftovers:
        return None
    stops = "; ".join(f"{PROGRAM} stop --job {job}" for job, _ in fact.leftovers)
    fix = f"{stops} (they have no supervisor, and they use memory, devices and ports)"
    return ", ".join(f"{count} left of job {job}" for job, count in fact.leftovers), fix


def errors(findings: Sequence[Finding]) -> Tuple[Finding, ...]:
    """Select the findings of level error."""
    return tuple(finding for finding in findings if finding.level == "error")
