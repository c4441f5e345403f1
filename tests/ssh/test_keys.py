"""ssh logs in with each of these keys and certificates, and so does clustertool; where it cannot, the error names the way."""

from __future__ import annotations

import base64
import functools
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ed25519
from paramiko.message import Message

from clustertool.errors import AuthError
from clustertool.model.config.cluster import Cluster
from clustertool.ssh import auth
from clustertool.ssh import settings as sshconfig
from clustertool.ssh.host_keys import hashed_name
from clustertool.ssh.prompter import Prompter
from tests.ssh import sshd
from tests.ssh.accounts import Typist
from tests.ssh.conftest import cluster_for
from tests.ssh.links import close_all, open_all

PASSPHRASE = "open sesame"


def _run(*argv: object, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [str(token) for token in argv], check=check, stdin=subprocess.DEVNULL, capture_output=True, timeout=60
    )


LIGHT = ["-a", "1"]  # a passphrase is hashed once: many times, as by default, take 0.2 s of CPU


@functools.cache
def _rsa() -> tuple[bytes, bytes]:
    """The RSA key of all tests, and its .pub file: one takes 0.1 to 0.5 s of CPU."""
    with tempfile.TemporaryDirectory() as folder:
        _run("ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", f"{folder}/rsa")
        return Path(folder, "rsa").read_bytes(), Path(folder, "rsa.pub").read_bytes()


def _key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    """A key in the format of OpenSSH, and its .pub file. It is a new one, if it is not RSA."""
    if kind == "rsa":
        private, public = _rsa()
        path.touch(0o600)
        path.write_bytes(private)
        path.with_name(path.name + ".pub").write_bytes(public)
        if passphrase:
            _run("ssh-keygen", "-q", *LIGHT, "-p", "-P", "", "-N", passphrase, "-f", path)
    else:
        _run("ssh-keygen", "-q", *LIGHT, "-t", kind, "-N", passphrase, "-f", path)
    return path


def _sign(authority: Path, key: Path, *options: object) -> Path:
    """The certificate of `key`, in the file that ssh-keygen gives it."""
    _run("ssh-keygen", "-q", "-s", authority, "-I", "test", *options, key.with_name(key.name + ".pub"))
    return key.with_name(key.name + "-cert.pub")


def _config(laptop: Path, *lines: str) -> None:
    (laptop / ".ssh" / "config").write_text("".join(f"{line}\n" for line in lines))
    sshconfig._for_all_hosts.cache_clear()
    sshconfig._for_host.cache_clear()


def _ssh(server: sshd.Sshd, laptop: Path, *options: str) -> bool:
    """Whether ssh itself logs in, with the same configuration and known_hosts."""
    usual = ("BatchMode=yes", f"UserKnownHostsFile={laptop}/.ssh/known_hosts", "StrictHostKeyChecking=no")
    given = [token for option in (*options, *usual) for token in ("-o", option)]
    config = laptop / ".ssh" / "config"
    config.touch(0o600)
    where = ["-p", str(server.port), f"{sshd.USER}@{server.address}", "true"]
    return _run("ssh", "-F", config, *given, *where, check=False).returncode == 0


def _login(cluster: Cluster, prompter: Prompter | None = None) -> None:
    auth._agent_at.cache_clear()  # as a new process: no agent's list of keys is remembered
    auth._read_key.cache_clear()
    close_all(list(open_all(cluster.hosts, cluster, prompter=prompter).all().values()))


# ---- private keys in files

FORMS = [("rsa", "PKCS8"), ("ecdsa", "PKCS8"), ("rsa", "PEM"), ("ecdsa", "PEM"), ("ed25519", "RFC4716")]


@pytest.mark.parametrize("passphrase", ["", PASSPHRASE], ids=["plain", "locked"])
def test_each_form_of_a_private_key(
    start: Callable[..., sshd.Sshd], laptop: Path, tmp_path: Path, passphrase: str
) -> None:
    keys = {kind: _key(tmp_path / kind, kind, passphrase) for kind in ("rsa", "ecdsa", "ed25519")}
    server = start(2, authorized=[sshd.public(key) for key in keys.values()])
    for kind, form in FORMS[::2] if passphrase else FORMS:
        key = Path(shutil.copy(keys[kind], tmp_path / f"{kind}-{form}"))  # without a .pub file
        if form != "RFC4716":
            _run("ssh-keygen", "-q", *LIGHT, "-p", "-P", passphrase, "-N", passphrase, "-m", form, "-f", key)
        assert passphrase or _ssh(server, laptop, f"IdentityFile={key}", "IdentitiesOnly=yes")
        person = Typist(lambda question: PASSPHRASE)
        _login(cluster_for([server], {"IDENTITY_FILE": str(key)}), Prompter(person))
        assert bool(person.asked) == bool(passphrase)


@pytest.mark.parametrize("cipher", ["aes256-gcm@openssh.com", "chacha20-poly1305@openssh.com"])
def test_a_cipher_of_a_key_file(start: Callable[..., sshd.Sshd], laptop: Path, tmp_path: Path, cipher: str) -> None:
    key = tmp_path / "key"
    _run("ssh-keygen", "-q", *LIGHT, "-t", "ed25519", "-Z", cipher, "-N", PASSPHRASE, "-f", key)
    server = start(2, authorized=[sshd.public(key)])
    cluster = cluster_for([server], {"IDENTITY_FILE": str(key)})
    wrong = iter(["wrong", PASSPHRASE])
    if "gcm" not in cipher:
        with pytest.raises(AuthError, match="chacha20-poly1305") as caught:
            _login(cluster)
        assert f"ssh-keygen -p -f {key}" in caught.value.fix
        _run("ssh-keygen", "-q", *LIGHT, "-p", "-P", PASSPHRASE, "-N", PASSPHRASE, "-f", key)  # as the error says
    _login(cluster, Prompter(Typist(lambda question: next(wrong))))


# ---- certificates of users


PLACES = [("ed25519", "file"), ("rsa", "file"), ("rsa", "agent"), ("rsa", "agent alone"), ("ecdsa", "agent alone")]


@pytest.mark.parametrize(("kind", "place"), [*PLACES, pytest.param("ecdsa", "file", marks=pytest.mark.chaos)])
def test_certificate_file(
    start: Callable[..., sshd.Sshd], laptop: Path, tmp_path: Path, agent: str, kind: str, place: str
) -> None:
    """The certificate has a name of its own. The private key is in a file, in the agent, or there with the certificate."""
    authority, key = _key(tmp_path / "authority"), _key(tmp_path / "key", kind)
    server = start(2, authorized=["none"], extra=[f"TrustedUserCAKeys {authority}.pub"])
    certificate = _sign(authority, key, "-n", sshd.USER)
    if place != "agent alone":
        (laptop / "certs").mkdir()
        certificate = certificate.rename(laptop / "certs" / f"{server.address} me.pub")
        _config(
            laptop,
            f"CertificateFile {laptop}/no-such.pub",
            f"IdentityFile {key}",
            'CertificateFile "~/certs/%h me.pub"',
        )
    if place != "file":
        _run("ssh-add", "-q", key)
        key.unlink()
    cluster = cluster_for([server], {})
    assert _ssh(server, laptop, f'CertificateFile="{certificate}"')
    _login(cluster)


def test_a_certificate_that_is_not_accepted(start: Callable[..., sshd.Sshd], laptop: Path, tmp_path: Path) -> None:
    """ssh tries the key itself, too. Where that fails, the error names the time of the certificate."""
    authority, key = _key(tmp_path / "authority"), _key(tmp_path / "key")
    _sign(authority, key, "-n", sshd.USER, "-V", "20200101:20200102")
    for accepted in (True, False):
        server = start(
            2, authorized=[sshd.public(key)] * accepted or ["none"], extra=[f"TrustedUserCAKeys {authority}.pub"]
        )
        assert _ssh(server, laptop, f"IdentityFile={key}", "IdentitiesOnly=yes") is accepted
        cluster = cluster_for([server], {"IDENTITY_FILE": str(key)})
        if accepted:
            _login(cluster)
            continue
        with pytest.raises(AuthError, match=f"{key}-cert.pub has expired on 2020-01-02"):
            _login(cluster)


# ---- keys in agents


def test_the_public_key_names_a_key_of_the_agent(
    start: Callable[..., sshd.Sshd], laptop: Path, tmp_path: Path, agent: str
) -> None:
    """Of an agent with many keys, IdentityFile NAME.pub takes one (a security key, a password manager)."""
    for number in range(3):
        _run("ssh-add", "-q", _key(tmp_path / f"other{number}"))
    key = _key(tmp_path / "only")
    (tmp_path / "only.pub").write_text(
        "# from the agent\r\n\r\n" + (tmp_path / "only.pub").read_text().strip() + "\r\n"
    )
    server = start(2, authorized=[sshd.public(key).splitlines()[-1]], extra=["MaxAuthTries 2"])
    _config(laptop, f"IdentityFile {key}.pub", "IdentitiesOnly yes", f"IdentityAgent {agent}")
    cluster = cluster_for([server], {})
    with pytest.raises(AuthError, match=r"only\.pub is a public key") as caught:
        _login(cluster)
    assert caught.value.fix.endswith(f"ssh-add {key}") and caught.value.node
    _run("ssh-add", "-q", key)
    key.unlink()
    assert _ssh(server, laptop)
    _login(cluster)
    _login(cluster_for([server], {"IDENTITY_FILE": f"{key}.pub"}))


def test_a_key_that_the_agent_does_not_use(
    start: Callable[..., sshd.Sshd], laptop: Path, tmp_path: Path, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ssh goes on with the next key, where the agent asks its user and gets a no."""
    monkeypatch.setenv("SSH_ASKPASS", "/bin/false")
    first, second = _key(tmp_path / "first"), _key(tmp_path / "second")
    _run("ssh-add", "-q", "-c", first)
    both = [sshd.public(first), sshd.public(second)]
    for authorized in (both, both[:1]):
        server = start(2, authorized=authorized)
        _config(laptop, f"IdentityFile {first}.pub", f"IdentityFile {second}")
        assert _ssh(server, laptop) is (authorized is both)
        if authorized is both:
            _login(cluster_for([server], {}))
            continue
        with pytest.raises(AuthError, match=f"the agent does not sign with {first}.pub"):
            _login(cluster_for([server], {}))


class SecurityKey:
    """An agent with a security key: it signs as a device does (PROTOCOL.u2f of OpenSSH), touched by its user."""

    def __init__(self, path: Path) -> None:
        self._key = ed25519.Ed25519PrivateKey.generate()
        message = Message()
        for field in (b"sk-ssh-ed25519@openssh.com", self._key.public_key().public_bytes_raw(), b"ssh:"):
            message.add_string(field)
        self.blob = message.asbytes()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as stream:
            while length := stream.read(4):
                request, reply = Message(stream.read(int.from_bytes(length, "big"))), Message()
                kind = request.get_byte()
                if kind == b"\x0b":  # which keys
                    reply.add_byte(b"\x0c")
                    reply.add_int(1)
                    reply.add_string(self.blob)
                    reply.add_string("security key")
                elif kind == b"\x0d" and request.get_string() == self.blob:  # sign
                    reply.add_byte(b"\x0e")
                    reply.add_string(self._sign(request.get_string()))
                else:
                    reply.add_byte(b"\x05")
                stream.write(len(reply.asbytes()).to_bytes(4, "big") + reply.asbytes())
                stream.flush()

    def _sign(self, data: bytes) -> bytes:
        state = b"\x01" + (7).to_bytes(4, "big")  # touched; its counter
        signature = Message()
        signature.add_string("sk-ssh-ed25519@openssh.com")
        signature.add_string(self._key.sign(_sha256(b"ssh:") + state + _sha256(data)))
        signature.add_bytes(state)
        return bytes(signature.asbytes())


def _sha256(data: bytes) -> bytes:
    digest = hashes.Hash(hashes.SHA256())
    digest.update(data)
    return digest.finalize()


def test_a_security_key_in_an_agent(start: Callable[..., sshd.Sshd], laptop: Path, tmp_path: Path) -> None:
    device = SecurityKey(laptop / "device")
    line = f"sk-ssh-ed25519@openssh.com {base64.b64encode(device.blob).decode()} me"
    (laptop / "sk.pub").write_text(line + "\n")
    server = start(2, authorized=[line])
    _config(
        laptop,
        f"IdentityFile {laptop}/sk.pub",
        "IdentitiesOnly yes",
        f"IdentityAgent {laptop}/device",
    )
    assert _ssh(server, laptop)
    _login(cluster_for([server], {}))
    device.close()
    _config(laptop, "IdentityAgent none")
    # the file of such a key has no secret, only a handle for the device
    head = Message()
    for field in (b"none", b"none", b""):
        head.add_string(field)
    head.add_int(1)
    head.add_string(device.blob)
    body = base64.b64encode(b"openssh-key-v1\0" + head.asbytes()).decode()
    (laptop / "sk").write_text(f"-----BEGIN OPENSSH PRIVATE KEY-----\n{body}\n-----END OPENSSH PRIVATE KEY-----\n")
    with pytest.raises(AuthError, match="is on a security key") as caught:
        _login(cluster_for([server], {"IDENTITY_FILE": f"{laptop}/sk"}))
    assert caught.value.fix.endswith(f"ssh-add {laptop}/sk")


def test_a_server_that_takes_no_keys(start: Callable[..., sshd.Sshd], ssh_keys: sshd.Keys, laptop: Path) -> None:
    server = start(2, extra=["PubkeyAuthentication no", "HostbasedAuthentication yes"])
    with pytest.raises(AuthError, match="it takes only hostbased") as caught:
        _login(cluster_for([server], {"IDENTITY_FILE": str(ssh_keys.user)}))
    assert "PubkeyAuthentication" in caught.value.fix


# ---- certificates of hosts

HOURS = "-1h:+1h"


@pytest.fixture
def certified(start: Callable[..., sshd.Sshd], ssh_keys: sshd.Keys, laptop: Path, tmp_path: Path) -> Any:
    """certified(*options of ssh-keygen, kind=...) -> a server with a host certificate, a strict cluster, its authority."""

    def make(*options: object, kind: str = "ed25519", authority: str = "ed25519") -> tuple[sshd.Sshd, Cluster, str]:
        folder = tmp_path / f"host-{kind}-{authority}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        signer, host = _key(folder / "authority", authority), _key(folder / "host", kind)
        certificate = _sign(signer, host, "-h", *options)
        server = start(2, keys=[host], extra=[f"HostCertificate {certificate}"])
        return (
            server,
            cluster_for([server], {"IDENTITY_FILE": str(ssh_keys.user), "HOST_KEYS": "strict"}),
            sshd.public(signer),
        )

    return make


def _known(laptop: Path, *lines: str) -> Path:
    path = laptop / ".ssh" / "known_hosts"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def _agree(server: sshd.Sshd, cluster: Cluster, laptop: Path) -> str:
    """The error of the login, "" for none. ssh logs in where clustertool does."""
    same = _ssh(server, laptop, f"IdentityFile={cluster.identity_file}", "StrictHostKeyChecking=yes")
    try:
        _login(cluster)
    except AuthError as error:
        assert error.node and not same
        return f"{error.what}: {error.fix}"
    assert same
    return ""


@pytest.mark.parametrize(("kind", "authority"), [("ed25519", "rsa"), ("rsa", "ecdsa"), ("ecdsa", "ed25519")])
def test_host_certificate(certified: Any, laptop: Path, kind: str, authority: str) -> None:
    server, cluster, public = certified("-n", "other,127.0.0.2", "-V", HOURS, kind=kind, authority=authority)
    known = _known(laptop, f"@cert-authority * {public}")
    before = known.read_text()
    assert not _agree(server, cluster, laptop)
    assert known.read_text() == before
    _known(laptop, f"@cert-authority * {public}", f"@revoked * {public}")
    assert "authority is revoked" in _agree(server, cluster, laptop)


PATTERNS = [
    ("127.0.0.*", True),
    ("[127.0.0.2]:*", True),
    ("*,!127.0.0.3", True),
    ("127.0.0.3", False),
    ("*,!127.0.0.2,![127.0.0.2]:*", False),
    (hashed_name("127.0.0.2"), True),
]


def test_lines_for_an_authority(certified: Any, laptop: Path) -> None:
    """Patterns, negated ones, the port, and hashed names; without a line that fits, the host is unknown."""
    server, cluster, public = certified("-n", "127.0.0.2")
    for names, fits in PATTERNS:
        _known(laptop, f"@cert-authority {names} {public}")
        error = _agree(server, cluster, laptop)
        assert bool(error) != fits and ("is not known" in error) != fits, (names, error)


WRONG = [
    (("-V", "20200101:20200102"), "has expired on 2020-01-02"),
    (("-n", "other,127.0.0.?"), "is for other, 127.0.0.?, not for 127.0.0.2"),  # no patterns, as for ssh
]


@pytest.mark.parametrize(("options", "text"), WRONG)
def test_a_host_certificate_that_is_not_right(
    certified: Any, laptop: Path, options: tuple[str, ...], text: str
) -> None:
    """It is no new host for accept-new either. The fix of the error helps."""
    server, cluster, public = certified(*options)
    known = _known(laptop, f"@cert-authority * {public}")
    for policy in ("strict", "accept-new"):
        error = _agree(server, Cluster(**{**vars(cluster), "host_keys": policy}), laptop)
        assert text in error and f"{known} line 1" in error
    subprocess.run(error[error.index("ssh-keyscan") :], shell=True, check=True, capture_output=True)
    assert not _agree(server, cluster, laptop)


def test_a_certificate_of_another_authority(certified: Any, laptop: Path, ssh_keys: sshd.Keys) -> None:
    server, cluster, _ = certified()
    _known(laptop, f"@cert-authority * {ssh_keys.user_public}")
    assert "no certificate of an authority in known_hosts" in _agree(server, cluster, laptop)
    server, cluster, public = certified("-n", "node", "-V", HOURS)
    _config(laptop, "HostKeyAlias node")
    _known(laptop, f"@cert-authority node {public}")
    assert not _agree(server, cluster, laptop)


@pytest.mark.parametrize("form", ["list", "krl"])
def test_revoked_host_keys(certified: Any, laptop: Path, ssh_keys: sshd.Keys, form: str) -> None:
    """The file of ssh's configuration, a list or a KRL; one that cannot be read revokes all keys."""
    server, cluster, public = certified()
    other, ours = laptop / "other.pub", laptop / "ours.pub"
    other.write_text(f"{sshd.public(ssh_keys.rsa)}\n")
    ours.write_text(f"{server.host_key}\n")
    _config(laptop, f"RevokedHostKeys {laptop}/revoked")
    for known in (server.known_hosts.strip(), f"@cert-authority * {public}")[form == "krl" :]:
        _known(laptop, known)
        assert "cannot be read" in _agree(server, cluster, laptop)
        for named, text in ((other, ""), (ours, "host key is revoked by")):
            if form == "krl":
                _run("ssh-keygen", "-q", "-k", "-f", laptop / "revoked", named)
            else:
                shutil.copy(named, laptop / "revoked")
            error = _agree(server, cluster, laptop)
            assert text in error and bool(text) == bool(error)
        (laptop / "revoked").unlink()
