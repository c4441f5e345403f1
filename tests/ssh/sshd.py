"""Private OpenSSH servers on loopback: own keys, own configuration, own home; stopped with proof that nothing is left."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

from tests import proc_files

SSHD = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
USER = pwd.getpwuid(os.getuid()).pw_name
READS_BASHRC = pwd.getpwuid(os.getuid()).pw_shell.endswith("/bash")
OPTIONS = ("-D", "-r", "-e")  # -r: a fork for each connection starts no new program, and takes two thirds of the time
MARK = "CLUSTERTOOL_TEST_SSHD"  # in the environment of everything a server starts


@dataclass
class Sshd:
    """One server. `known_hosts` is the line a client would keep about it."""

    address: str
    port: int
    dir: Path
    home: Path
    host_key: str
    mark: str
    process: subprocess.Popen[bytes]

    @property
    def known_hosts(self) -> str:
        return f"[{self.address}]:{self.port} {self.host_key}\n"

    @property
    def entry(self) -> str:
        """As HOSTS names it."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    def log(self) -> str:
        return (self.dir / "sshd.log").read_text(errors="replace")

    def alive(self) -> list[int]:
        """Every living process of this server: itself, its sessions, and what they started."""
        return sorted(processes_of([self]))

    def cut(self) -> None:
        """Freeze the server and all its sessions, as a cut cable would: nothing is answered, nothing is closed."""
        moving = self.alive()
        while moving:  # one that is stopped may just have forked another
            for pid in moving:
                _signal(pid, signal.SIGSTOP)
            moving = [pid for pid in self.alive() if proc_files.stat(pid)[:1] != ["T"]]

    def stop(self) -> None:
        """End the server and all it started; raises AssertionError if something outlives SIGKILL."""
        stop_all([self])


def processes_of(servers: Sequence[Sshd]) -> set[int]:
    """Every living process of these servers, with one pass through the processes of the machine."""
    return descendants(*(server.process.pid for server in servers)) | marked(*(server.mark for server in servers))


def stop_all(servers: Sequence[Sshd]) -> None:
    """End the servers and all they started; raises AssertionError if something outlives SIGKILL."""
    victims = processes_of(servers)
    deadline = time.monotonic() + 30
    while victims:
        for number in (signal.SIGSTOP, signal.SIGKILL):  # all at once, as a crash: none sees the others die
            for pid in victims:
                _signal(pid, number)
        for server in servers:
            server.process.wait(30)
        victims = {pid for pid in victims | processes_of(servers) if proc_files.living(pid)}
        assert time.monotonic() < deadline, f"{[server.entry for server in servers]} left {victims}"
    for server in servers:
        server.process.wait(30)


@dataclass
class Keys:
    """What a session of tests needs once: a user's key and ready-made host keys (RSA takes long to make)."""

    user: Path
    user_public: str
    ed25519: Sequence[Path]
    rsa: Path


def make_keys(dir: Path, count: int = 8) -> Keys:
    dir.mkdir(parents=True, exist_ok=True)
    user = write_key(dir / "user", ed25519.Ed25519PrivateKey.generate())
    hosts = [write_key(dir / f"host{i}", ed25519.Ed25519PrivateKey.generate()) for i in range(count)]
    big = write_key(dir / "host_rsa", rsa.generate_private_key(65537, 2048))
    return Keys(user, public(user), hosts, big)


def write_key(path: Path, key: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey, passphrase: str = "") -> Path:
    """A private key file in OpenSSH's format, and its .pub next to it."""
    lock: serialization.KeySerializationEncryption = serialization.NoEncryption()
    form = serialization.PrivateFormat.OpenSSH
    if passphrase:  # hashed once: many times, as by default, take long
        lock = form.encryption_builder().kdf_rounds(1).build(passphrase.encode())
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, lock))
    path.chmod(0o600)
    known = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(path.name + ".pub").write_bytes(known + b"\n")
    return path


def public(path: Path) -> str:
    return path.with_name(path.name + ".pub").read_text().strip()


def start(
    address: str,
    dir: Path,
    keys: Sequence[Path],
    authorized: Iterable[str],
    extra: Sequence[str] = (),
    around: Sequence[str] = (),
) -> Sshd:
    """A server that listens on `address` when this returns; `keys` are its host keys, `authorized` the users' lines.

    around: a command that becomes the server, whose command line follows it.
    """
    assert SSHD, "no sshd on this machine"
    home = dir / "home"
    home.mkdir(parents=True)
    (dir / "authorized_keys").write_text("".join(line + "\n" for line in authorized))
    if os.getuid() == 0:  # sshd wants its empty directory
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for _ in range(5):  # the port may be taken between our check and sshd's bind
        server = _spawn(address, dir, keys, extra, around)
        if _listening(server):
            return server
        server.stop()
    raise AssertionError(f"sshd does not start on {address}: {server.log()}")


def _spawn(address: str, dir: Path, keys: Sequence[Path], extra: Sequence[str], around: Sequence[str]) -> Sshd:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    mark = uuid.uuid4().hex
    lines = [
        f"ListenAddress [{address}]:{port}",
        *(f"HostKey {key}" for key in keys),
        "PidFile none",
        f"AuthorizedKeysFile {dir / 'authorized_keys'}",
        "StrictModes no",
        "UsePAM no",
        "UseDNS no",
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "MaxStartups 1000",
        "MaxSessions 1000",
        "LogLevel VERBOSE",
        "PrintMotd no",
        "PrintLastLog no",
        f"SetEnv HOME={dir / 'home'} {MARK}={mark}",
        "Subsystem sftp internal-sftp",
    ]
    given = {line.split()[0].lower() for line in extra}
    lines = [*extra, *(line for line in lines if line.split()[0].lower() not in given)]
    (dir / "sshd_config").write_text("\n".join(lines) + "\n")
    with open(dir / "sshd.log", "wb") as log:
        process = subprocess.Popen(
            [*around, str(SSHD), *OPTIONS, "-f", str(dir / "sshd_config")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return Sshd(address, port, dir, dir / "home", public(keys[0]), mark, process)


def _listening(server: Sshd) -> bool:
    """sshd says so itself: a connection as a probe would be an unauthenticated login that newer servers punish."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if "Server listening on" in server.log():
            return True
        if server.process.poll() is not None:
            return False
        time.sleep(0.002)
    return False


def until(true: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait for something that must happen soon."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def descendants(*roots: int) -> set[int]:
    """`roots` and all processes below them that live now."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = proc_files.stat(int(name))
            if fields and fields[0] not in "ZX":
                parents[int(name)] = int(fields[1])
    found = set(roots) & set(parents)
    grown = True
    while grown:
        below = {pid for pid, parent in parents.items() if parent in found and pid not in found}
        grown = bool(below)
        found |= below
    return found


def marked(*marks: str) -> set[int]:
    """Living processes that carry one of these servers' marks in their environment (the double-forked too)."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    environ = file.read()
            except OSError:
                continue
            if any(mark.encode() in environ for mark in marks) and proc_files.living(int(name)):
                found.add(int(name))
    return found


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
