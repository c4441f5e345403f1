"""Certificates: which fields are read, and which ones prove a host. Broken data proves nothing."""

from __future__ import annotations

import base64
import random
import subprocess
import time
from pathlib import Path

import pytest
from paramiko.message import Message

from clustertool.errors import AuthError
from clustertool.ssh.certificates import Certificate, read_certificate, read_private, read_public
from clustertool.ssh.host_keys import KnownHosts
from clustertool.ssh.settings import SshSettings

SECURITY_KEY = "sk-ssh-ed25519@openssh.com"


def _keygen(*argv: object) -> None:
    subprocess.run(["ssh-keygen", "-q", *map(str, argv)], check=True, stdin=subprocess.DEVNULL, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a key, and host certificates of the key: for the host a, and for all hosts."""
    path = tmp_path_factory.mktemp("certificates")
    for name in ("authority", "key"):
        _keygen("-t", "ed25519", "-N", "", "-f", path / name)
    for name, options in (("all", []), ("a", ["-n", "a"])):
        _keygen("-s", path / "authority", "-I", "me", "-h", *options, path / "key.pub")
        (path / "key-cert.pub").rename(path / f"{name}.pub")
    return path


def _certificate(path: Path) -> Certificate:
    found = read_certificate(read_public(str(path)))
    assert found
    return found


def test_what_a_certificate_contains(folder: Path) -> None:
    found = _certificate(folder / "a.pub")
    assert (found.names, found.key) == (("a",), read_public(str(folder / "key.pub")))
    assert found.authority == read_public(str(folder / "authority.pub"))
    assert not found.problem("a") and "is for a, not for b" in found.problem("b")
    assert not _certificate(folder / "all.pub").problem("b")
    assert read_private((folder / "key").read_bytes()) == found.key
    assert read_public(str(folder / "key")) == b"" and read_certificate(found.key) is None


def test_no_changed_byte_is_accepted(folder: Path) -> None:
    blob = read_public(str(folder / "a.pub"))
    for place in range(len(_certificate(folder / "a.pub").signed)):
        found = read_certificate(blob[:place] + bytes([blob[place] ^ 1]) + blob[place + 1 :])
        assert not found or found.problem("a"), place
        cut = read_certificate(blob[:place])
        assert not cut or cut.problem("a"), place


def test_random_bytes(folder: Path) -> None:
    chance = random.Random(7)
    head = read_public(str(folder / "a.pub"))[:36]
    for _ in range(2000):
        found = read_certificate(head + chance.randbytes(chance.randrange(300)))
        assert not found or found.problem("a")


def _signed_by(blob: bytes, signer: bytes, kind: str) -> bytes:
    """The certificate as if another kind of key had signed it."""
    found = read_certificate(blob)
    assert found
    message = Message()
    message.add_bytes(found.signed[: -len(found.authority) - 4])
    message.add_string(signer)
    signature = Message()
    signature.add_string(kind)
    signature.add_string(b"x" * 64)
    message.add_string(signature.asbytes())
    return bytes(message.asbytes())


def _strings(*fields: str | bytes) -> bytes:
    message = Message()
    for field in fields:
        message.add_string(field)
    return bytes(message.asbytes())


@pytest.mark.parametrize("policy", ["strict", "accept-new"])
def test_an_authority_that_cannot_be_checked(folder: Path, tmp_path: Path, policy: str) -> None:
    """It signs by a security key. Neither policy takes the host's plain key in place of the certificate."""
    signer = _strings(SECURITY_KEY, b"k" * 32, "ssh:")
    blob = _signed_by(read_public(str(folder / "a.pub")), signer, SECURITY_KEY)
    known = tmp_path / "known_hosts"
    known.write_text(f"@cert-authority * {SECURITY_KEY} {base64.b64encode(signer).decode()}\n")
    to = SshSettings("a", "a", "u", host_key_name="a", known_hosts=(str(known),), host_keys=policy)
    hosts = KnownHosts(to.known_hosts, ())
    assert hosts.algorithms(to)[0] == "ssh-ed25519-cert-v01@openssh.com"
    key = base64.b64encode(read_public(str(folder / "key.pub"))).decode()
    with pytest.raises(AuthError, match=f"line 1, is signed by a key of the type {SECURITY_KEY}") as caught:
        hosts.verify(to, "ssh-ed25519", key, blob)
    assert "ssh-keyscan a" in caught.value.fix


def test_what_makes_a_certificate_wrong(folder: Path) -> None:
    found = _certificate(folder / "a.pub")
    weak = Certificate(**{**vars(found), "signature": _strings("ssh-rsa", b"x" * 256)})
    assert weak.problem("a") == "is not signed by that authority"
    assert "has expired on" in Certificate(**{**vars(found), "before": int(time.time())}).problem("a")
    assert "is not valid before" in Certificate(**{**vars(found), "after": int(time.time()) + 60}).problem("a")
    assert "critical options" in Certificate(**{**vars(found), "critical": b"x"}).problem("a")
    assert "is no certificate of a host" in Certificate(**{**vars(found), "kind": 1}).problem("a")
