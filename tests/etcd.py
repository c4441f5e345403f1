"""The command lines of a real etcd, and of its client."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key, as files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "etcd")])
    now = datetime.datetime.now(datetime.timezone.utc)
    addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(
        now + datetime.timedelta(days=1)
    )
    builder = builder.add_extension(addresses, False).add_extension(x509.BasicConstraints(True, None), True)
    made = builder.sign(key, hashes.SHA256())
    files = folder / "etcd.crt", folder / "etcd.key"
    files[0].write_bytes(made.public_bytes(Encoding.PEM))
    files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


def server_argv(folder: Path, url: str, peers: str) -> list[str]:
    """A server of one member with its own folder. url: for clients. peers: for other members, of which there are none."""
    argv = ["etcd", "--data-dir", str(folder), "--listen-client-urls", url, "--log-level", "error"]
    argv += ["--advertise-client-urls", url, "--listen-peer-urls", peers]
    argv += ["--bcrypt-cost", "4"]  # each login with a password would take 0.1 s of CPU, on a busy machine a second
    return [*argv, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]


def client_argv(url: str, *arguments: str) -> list[str]:
    """Needs ETCDCTL_API=3 in its environment."""
    return ["etcdctl", "--endpoints", url, "--command-timeout", "2s", *arguments]
