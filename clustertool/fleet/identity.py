"""The identity of a job is created once on the laptop: its id, its token, and a temporary certificate."""

from __future__ import annotations

import datetime
import secrets
import time

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"


def job_id(now: float | None = None) -> str:
    """YYYYMMDD-HHMMSS-xxxx in UTC; sorts by time."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return stamp + "-" + "".join(secrets.choice(_LETTERS) for _ in range(4))


def token() -> str:
    return secrets.token_hex(16)


def certificate() -> tuple[str, str]:
    """(certificate, key) in PEM: self-signed P-256, the only authority of its job's links.

    It never expires: a node whose clock is wrong must still be able to join, and the key is deleted with the job.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "clustertool job")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(1980, 1, 1))
        .not_valid_after(datetime.datetime(2100, 1, 1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(  # PKCS 8 would name no kind of key, and OpenSSL 3 tries all it knows: 1.3 ms to load, not 0.9
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    return made.public_bytes(serialization.Encoding.PEM).decode(), pem.decode()
