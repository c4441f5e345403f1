"""The command lines of a real etcd, and of its client."""

from __future__ import annotations

from pathlib import Path


def server_argv(folder: Path, url: str, peers: str) -> list[str]:
    """A server of one member with its own folder. url: for clients. peers: for other members, of which there are none."""
    argv = ["etcd", "--data-dir", str(folder), "--listen-client-urls", url, "--log-level", "error"]
    argv += ["--advertise-client-urls", url, "--listen-peer-urls", peers]
    return [*argv, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]


def client_argv(url: str, *arguments: str) -> list[str]:
    """Needs ETCDCTL_API=3 in its environment."""
    return ["etcdctl", "--endpoints", url, "--command-timeout", "2s", *arguments]
