"""The identity of a job is created once on the laptop: its id, its token, and a temporary certificate."""

from __future__ import annotations

import datetime
import secrets
import time

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from clustertool.fleet import this_user
from clustertool.model.facts import Identity

_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"


def job_id(now: float | None = None) -> str:
    """Make the id of a job: YYYYMMDD-HHMMSS-xxxx in UTC, which sorts by time."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return stamp + "-" + "".join(secrets.choice(_LETTERS) for _ in range(4))


def identity(job: str, asked: str = "", name: str = "", workspace: str = "") -> Identity:
    """Make the identity of a new job with this id: its owner, the time, and a new token and certificate."""
    return Identity(job, time.time(), this_user.name(), token(), *certificate(), asked, name, workspace)


def token() -> str:
    """Make 16 random bytes, in hex digits."""
    return secrets.token_hex(16)


def certificate() -> tuple[str, str]:
    """Make a self-signed P-256 certificate, the only authority of its job's links; return (certificate, key) in PEM.

    It never expires: a node whose clock is wrong must still be able to join, and the key is deleted with the job.
    """
    return self_signed(ec.generate_private_key(ec.SECP256R1()), x509.random_serial_number(), hashes.SHA256())


def self_signed(
    key: ec.EllipticCurvePrivateKey | Ed25519PrivateKey, serial: int, digest: hashes.SHA256 | None
) -> tuple[str, str]:
    """Build a certificate that is signed with its own key, and return (certificate, key) as PEM text.

    key: the private key object. Name and dates are always the same. digest: the hash function of the signature; None for
    Ed25519.
    """
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "clustertool job")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(datetime.datetime(1980, 1, 1))
        .not_valid_after(datetime.datetime(2100, 1, 1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, digest)
    )
    # PKCS 8 would name no kind of key, and OpenSSL 3 tries all it knows: 1.3 ms to load, not 0.9. Ed25519 has no other form.
    elliptic = isinstance(key, ec.EllipticCurvePrivateKey)
    form = serialization.PrivateFormat.TraditionalOpenSSL if elliptic else serialization.PrivateFormat.PKCS8
    pem = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return made.public_bytes(serialization.Encoding.PEM).decode(), pem.decode()
