"""The secret of machines that start one job together: its form, its file, and the certificate that is derived from it."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import time
from pathlib import Path

import pytest

from clustertool.errors import ConfigError, UsageError
from clustertool.fleet.joining import secret
from clustertool.model.launcher_variables import SECRET
from clustertool.node.system.tls_link import TlsLink, context

GOOD = "abcdefgh234567ijklmnopqrst"  # 26 characters of 5 bits


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def put(path: Path, text: str, mode: int = 0o600) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


# -- the form -----------------------------------------------------------------------------------------------------------


def test_a_new_secret_is_accepted_and_is_another_one_each_time() -> None:
    made = {secret.new() for _ in range(100)}
    assert len(made) == 100
    for text in made:
        assert secret.bits(text) >= secret.BITS
        assert text.isalnum()
        assert secret.find({SECRET: text}) == secret.Secret(text, SECRET)


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        "0123456789abcdef" * 2,  # openssl rand -hex 16
        "q5Wn0m8sR2uX7yZ1aB3cDg",  # 22 characters of 6 bits
        "314159265358979323846264338327950288419",  # 39 digits
    ],
)
def test_secrets_of_at_least_128_bits(text: str) -> None:
    found = secret.find({SECRET: f" {text}\n"})
    assert found is not None
    assert found.text == text


@pytest.mark.parametrize(
    "text",
    [
        GOOD[:-1],
        "0123456789abcdef0123456789abcde",
        "q5Wn0m8sR2uX7yZ1aB3cD",
        "12345678901234567890123456789012345678",
        "ab" * 40,
        "password",
        "two words " * 5,
        "ü" * 40,
        " ",
    ],
)
def test_what_is_too_short_or_no_secret_is_an_error(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        secret.find({SECRET: text})
    assert "clustertool} secret" in caught.value.fix
    assert text.strip() not in caught.value.what or not text.strip(), "an error never shows it"


# -- the file -----------------------------------------------------------------------------------------------------------


def test_the_variable_has_priority_over_the_file(home: Path) -> None:
    assert secret.find({}) is None
    put(secret.default_file(), GOOD + "\n")
    assert secret.default_file() == home / ".config/clustertool/secret"
    assert secret.find({}) == secret.Secret(GOOD, str(secret.default_file()))
    other = secret.new()
    assert secret.find({SECRET: other}) == secret.Secret(other, SECRET)
    assert secret.find({SECRET: ""}) == secret.Secret(GOOD, str(secret.default_file()))
    assert GOOD not in repr(secret.find({}))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o777])
def test_a_file_that_others_can_read_is_an_error(mode: int) -> None:
    put(secret.default_file(), GOOD, mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}"):
        secret.find({})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_an_error() -> None:
    put(secret.default_file(), GOOD)
    os.chown(secret.default_file(), 4242, -1)
    with pytest.raises(ConfigError, match="belongs to uid 4242"):
        secret.find({})


def test_a_folder_or_a_short_text_in_place_of_the_file() -> None:
    secret.default_file().mkdir(parents=True)
    with pytest.raises(ConfigError, match="is no file"):
        secret.find({})
    secret.default_file().rmdir()
    put(secret.default_file(), "short")
    with pytest.raises(UsageError, match="too short"):
        secret.find({})


def test_a_written_file_has_mode_0600_and_replaces_nothing(tmp_path: Path) -> None:
    path, before = tmp_path / "secret", os.umask(0)
    try:
        secret.write(path, GOOD)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == GOOD + "\n"
    with pytest.raises(FileExistsError):
        secret.write(path, secret.new())
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError):
        secret.write(tmp_path / "link", secret.new())
    assert sorted(found.name for found in tmp_path.iterdir()) == ["link", "secret"], "no part is left"


def test_the_secret_of_this_machine_is_made_once() -> None:
    assert not secret.of_this_machine(make=False).text
    assert not Path(secret.of_this_machine(make=False).source).exists()
    first = secret.of_this_machine()
    assert secret.of_this_machine() == secret.of_this_machine(make=False) == first
    assert stat.S_IMODE(Path(first.source).stat().st_mode) == 0o600
    assert Path(first.source) != secret.default_file()


# -- the certificate ----------------------------------------------------------------------------------------------------


def test_the_certificate_is_the_same_on_every_machine() -> None:
    """A fixed vector: another version of clustertool, Python or cryptography must derive the same bytes."""
    public, key = secret.certificate(GOOD, "10.0.0.1:29400")
    assert (
        hashlib.sha256(public.encode()).hexdigest()
        == "925b957b61a75410462ecf4b1d6a7c0b858eabaf66880aea5331d5e44c08746d"
    )
    assert (
        hashlib.sha256(key.encode()).hexdigest() == "5b2f0d1eef5d7f0178b1c23e6bcd38ded8517d63786743ce3504207768111293"
    )


def test_another_secret_or_another_job_has_another_key() -> None:
    keys = [secret.certificate(text, salt)[1] for text in (GOOD, GOOD[::-1]) for salt in ("a", "b")]
    assert len(set(keys)) == 4


def connected(server: tuple[str, str], client: tuple[str, str]) -> bool:
    """Whether mutual TLS, as supervisors have it, admits a client with this certificate."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours = listener.accept()[0]
    with ours, theirs:
        links = [
            TlsLink(ours, context(*server, True), True, 1024),
            TlsLink(theirs, context(*client, False), False, 1024),
        ]
        links[1].send({"type": "hello"})
        end = time.monotonic() + 10
        while time.monotonic() < end:
            for link in links:
                try:
                    if link.turn():
                        return True
                except ConnectionError:
                    return False
    raise AssertionError("neither admitted nor refused")


def test_tls_admits_only_the_owner_of_the_secret() -> None:
    one, same = (secret.certificate(GOOD, "job") for _ in range(2))
    assert connected(one, same)
    assert not connected(one, secret.certificate(GOOD, "another job"))
    assert not connected(one, secret.certificate(secret.new(), "job"))
