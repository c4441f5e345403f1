"""This module opens a socket to one ssh server from its settings. Every failure has a reason.

A ProxyCommand runs in a session of its own, so that a terminal's Ctrl+C does not reach it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import tempfile
import time
from typing import IO, Any

import paramiko

from clustertool.errors import ClustertoolError, ConfigError, Unreachable
from clustertool.ssh.settings import SshSettings, expand_in_shell, tokens

_FIX_SLOW = "is the machine on, is the address right? A slow network: CONNECT_TIMEOUT in conf.py"


class Dropped(Unreachable):
    """sshd hung up before the login, as it does when too many log in at once: worth another try."""


def tcp(to: SshSettings, deadline: float) -> socket.socket:
    """Connect a socket to the first address of the host that accepts it, and set its keep-alive.

    Each address has an equal part of the time until the deadline. Raises Unreachable, with the last address's error, if none
    accepts it, or for a name without an address.
    """
    addresses = _addresses(to)
    problem: OSError | None = None
    for number, (family, address) in enumerate(addresses):
        left = max(0.05, deadline - time.monotonic()) / (len(addresses) - number)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(left)
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_alive(sock)
            return sock
        except OSError as error:
            sock.close()
            problem = error
    raise _unreachable_error(to, problem)


def _keep_alive(sock: socket.socket) -> None:
    """Set keep-alive of a socket: a cut cable ends the connection in half a minute, not in hours.

    A frozen sshd still answers: the kernels ask each other.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPALIVE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # macOS has another name for the first
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _addresses(to: SshSettings) -> list[tuple[int, Any]]:
    """Find the addresses of a host, (family, address). Raises Unreachable for a name that has none."""
    try:
        found = socket.getaddrinfo(to.hostname, to.port, socket.AF_UNSPEC, socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            fix = f"check the network, or use addresses in {to.listed}"
            raise Unreachable(f"no name server answers for {to.hostname!r}", fix, to.name) from None
        fix = f"correct it in {to.listed}, or give its HostName in ~/.ssh/config"
        raise Unreachable(f"the name {to.hostname!r} is not known here", fix, to.name) from None
    except UnicodeError:
        raise Unreachable(f"{to.hostname!r} is no host name", f"correct it in {to.listed}", to.name) from None
    return [(family, address) for family, _, _, _, address in found]


def _unreachable_error(to: SshSettings, error: OSError | None) -> Unreachable:
    """Build the error of a host to which no socket could be connected, from the last error of the system."""
    where = f"{to.hostname} port {to.port}"
    if isinstance(error, socket.timeout) or (error and error.errno == errno.ETIMEDOUT):
        return Unreachable(f"{where} did not answer within {to.connect_timeout:g} s", _FIX_SLOW, to.name)
    if isinstance(error, ConnectionRefusedError):
        fix = f"start sshd there, or correct the port in {to.listed}"
        return Unreachable(f"{where} refuses connections", fix, to.name)
    if error and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL):
        fix = "check the network (a VPN?), or configure a gateway: GATEWAY in conf.py"
        return Unreachable(f"there is no route to {where}", fix, to.name)
    reason = (error.strerror or str(error)) if error else "it has no address"
    return Unreachable(f"{where} cannot be reached: {reason}", "check the network", to.name)


class ProxySocket(socket.socket):
    """This side of a ProxyCommand; closing it ends the command and everything that the command started."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def close(self) -> None:
        """Close the socket once, and end the command and all processes of its group, by SIGHUP, then KILL."""
        if self.fileno() >= 0:
            super().close()
            end_group(self.process, signal.SIGHUP, 0.5)  # SIGHUP is what ssh sends to its ProxyCommand

    def complaint(self) -> str:
        """Read the first 4096 bytes of what the command has written to stderr, for an error message."""
        self.errors.seek(0)
        return self.errors.read(4096).decode(errors="replace").strip()


def end_group(process: subprocess.Popen[bytes], number: int, grace: float) -> None:
    """Signal a child and its process group, if the child runs; send KILL if it has not ended after `grace` seconds.

    After KILL it waits for the child for up to 5 s.
    """
    for each, patience in ((number, grace), (signal.SIGKILL, 5.0)):
        if process.poll() is None:
            signal_group(process.pid, each)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group. Nothing is raised for a group that has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
        os.killpg(group, number)


def proxy(to: SshSettings) -> ProxySocket:
    """Start the ProxyCommand of a host by the user's shell, and return the socket that is its stdin and stdout.

    Raises ConfigError if the shell does not start.
    """
    command = expand_in_shell(to.proxy_command, tokens(to.name, to.hostname, to.user, to.port))
    ours, theirs = socket.socketpair()
    sock = ProxySocket(fileno=ours.detach())
    sock.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the socket
    try:
        shell, fd = os.environ.get("SHELL") or "/bin/sh", theirs.fileno()
        sock.process = subprocess.Popen(
            [shell, "-c", f"exec {command}"], stdin=fd, stdout=fd, stderr=sock.errors, start_new_session=True
        )
    except OSError as error:
        socket.socket.close(sock)
        raise ConfigError(f"the ProxyCommand does not start: {error}", f"correct it: {command}", to.name) from None
    finally:
        theirs.close()
    return sock


def tunnel(gateway: Any, via: SshSettings, to: SshSettings, deadline: float) -> Any:
    """Open a channel over a gateway's connection to the next host, and return it.

    Raises Unreachable if the gateway forbids it, cannot reach the host, or does not open it until the deadline.
    """
    left, where = max(0.5, deadline - time.monotonic()), f"{to.hostname} port {to.port}"
    try:
        return gateway.open_channel("direct-tcpip", (to.hostname, to.port), ("127.0.0.1", 0), timeout=left)
    except paramiko.ChannelException as error:
        if error.code == 1:
            what = f"the gateway {via.name} forbids forwarding"
            fix = f"set AllowTcpForwarding yes in sshd_config of {via.name}"
        else:
            what = f"the gateway {via.name} cannot reach {where} ({error.text or 'connect failed'})"
            fix = f"try on {via.name}: ssh -p {to.port} {to.hostname}"
        raise Unreachable(what, fix, to.name) from None
    except (paramiko.SSHException, EOFError, OSError) as error:
        what = f"the gateway {via.name} gave no connection to {where}: {error}"
        raise Unreachable(what, _FIX_SLOW, to.name) from None


def failed_handshake(to: SshSettings, sock: Any, error: BaseException, late: bool) -> ClustertoolError:
    """Build the error of a connection on which no SSH session began. late: the deadline was over.

    It is Dropped, which is worth another try, only where the server has closed the connection.
    """
    complaint = sock.complaint() if isinstance(sock, ProxySocket) else ""
    where = f"{to.hostname} port {to.port}"
    if complaint:
        return Unreachable(f"the ProxyCommand to {to.hostname} failed: {complaint}", f"try: ssh {to.name}", to.name)
    if late:
        what = f"{where} accepts connections, but no SSH server answered within {to.connect_timeout:g} s"
        return Unreachable(what, _FIX_SLOW, to.name)
    text = str(error)
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        what = f"{where} and clustertool have no SSH algorithm in common: {text}"
        return Unreachable(what, "update sshd on the node", to.name)
    if "Indecipherable" in text or "Invalid SSH banner" in text:
        return Unreachable(f"what listens on {where} is no SSH server", f"correct the port in {to.listed}", to.name)
    what = f"{where} closed the connection before the login ({text or type(error).__name__})"
    fix = "too many logins at once (MaxStartups in its sshd_config), or this machine is banned there"
    return Dropped(what, fix, to.name)
