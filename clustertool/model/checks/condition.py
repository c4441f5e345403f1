"""These checks find conditions of one machine that do not prevent a start, but slow a job down or break it later."""

from __future__ import annotations

import ipaddress
from typing import Dict, List, Mapping

from clustertool.model.config.cluster import Cluster
from clustertool.model.facts import Facts
from clustertool.model.finding import Finding
from clustertool.model.quantities import human_bytes

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
_PROXY_FIX = "take it out of ENV or PRELUDE, or name the training addresses in no_proxy: frameworks meet by HTTP"


def condition(cluster: Cluster, fact: Facts) -> List[Finding]:
    """Findings about one machine alone."""
    found = [_memory(fact), _load(fact), _limits(fact), _shm(fact), _proxy(cluster, fact)]
    if fact.examined:
        found += [_jobs(fact), _own_packages(fact)]
    return found


def phases(node: int, user: str, seconds: Mapping[str, float]) -> Finding:
    """The phases of a login. Slow ones are reported with their cause."""
    slow = [name for name in _PHASES if seconds.get(name, 0.0) > SLOW]
    if not slow:
        return Finding(node, "ssh", "ok", user)
    text = ", ".join(f"{name} took {seconds[name]:.0f} s" for name in slow)
    return Finding(node, "ssh", "warn", text, "; ".join(_PHASES[name] for name in slow))


def _memory(fact: Facts) -> Finding:
    everything, available = fact.memory
    if everything and available < FEW_BYTES:
        text = f"{human_bytes(available)} of {human_bytes(everything)} left"
        return Finding(
            fact.node, "memory", "warn", text, "end what fills it: the kernel kills ranks that find no memory"
        )
    return Finding(fact.node, "memory", "ok", "ok")


def _load(fact: Facts) -> Finding:
    if fact.cpus and fact.load > BUSY * fact.cpus:
        text = f"{fact.load:.0f} on {fact.cpus} cores"
        return Finding(fact.node, "load", "warn", text, "another program computes there: one slow node slows all")
    return Finding(fact.node, "load", "ok", "ok")


def _limits(fact: Facts) -> Finding:
    """The soft limit counts, since the ranks do not raise it."""
    least = {"nofile": FEW_FILES, "nproc": FEW_PROCESSES}
    low = [f"{name} {soft}" for name, soft, _ in fact.limits if 0 <= soft < least.get(name, 0)]
    if fact.rdma:
        low += [f"memlock {soft >> 10} kB" for name, soft, _ in fact.limits if name == "memlock" and soft >= 0]
    if low:
        fix = "raise it in /etc/security/limits.conf (or sshd's unit), and log in again; RDMA needs memlock unlimited"
        return Finding(fact.node, "limits", "warn", ", ".join(low), fix)
    return Finding(fact.node, "limits", "ok", "ok")


def _shm(fact: Facts) -> Finding:
    if fact.shm < 0:
        return Finding(
            fact.node, "shm", "warn", "no /dev/shm", "mount -t tmpfs tmpfs /dev/shm: data loaders and NCCL need it"
        )
    if fact.shm < FEW_SHARED:
        fix = "mount -o remount,size=50% /dev/shm (a container: --shm-size): data loaders die there with a bus error"
        return Finding(fact.node, "shm", "warn", f"{human_bytes(fact.shm)} free in /dev/shm", fix)
    return Finding(fact.node, "shm", "ok", "ok")


def _proxy(cluster: Cluster, fact: Facts) -> Finding:
    """A proxy of the login never reaches a rank. One of conf.py or PRELUDE does."""
    host = next((host for host in cluster.hosts if host.index == fact.node), None)
    given: Dict[str, str] = {**dict(cluster.env), **dict(host.env if host else ())}
    names = set(fact.job_proxies) | {
        name for name in given if name.lower() in ("http_proxy", "https_proxy", "all_proxy")
    }
    free = fact.no_proxy or given.get("no_proxy", given.get("NO_PROXY", ""))
    if names and fact.address and not covers(free, fact.address):
        return Finding(fact.node, "proxy", "warn", f"{', '.join(sorted(names))} for {fact.address}", _PROXY_FIX)
    return Finding(fact.node, "proxy", "ok", "ok")


def covers(no_proxy: str, address: str) -> bool:
    """Whether an entry of no_proxy matches an address: itself, a prefix such as 10. or 10.0.0.0/8, a domain, or *."""
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
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def _jobs(fact: Facts) -> Finding:
    if not fact.leftovers:
        return Finding(fact.node, "jobs", "ok", "ok")
    text = ", ".join(f"{count} left of job {job}" for job, count in fact.leftovers)
    fix = "; ".join(f"inv stop --job {job}" for job, _ in fact.leftovers)
    return Finding(
        fact.node, "jobs", "warn", text, f"{fix} (they have no supervisor, and they use memory, cards and ports)"
    )


def _own_packages(fact: Facts) -> Finding:
    """What the node has, by itself neither right nor wrong: see drift."""
    have = [f"{name} {version}" for name, version in fact.packages if version]
    return Finding(fact.node, "packages", "ok", ", ".join(have))
