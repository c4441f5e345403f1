"""The first machine of a typed job chooses an address that other machines may reach, and a free port."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from clustertool.errors import PreflightError
from clustertool.fleet.joining import typed_machine
from clustertool.node.ports import listeners
from clustertool.node.probe import network_addresses


@pytest.fixture
def no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a default route."""
    monkeypatch.setattr(typed_machine, "_FAR", ())


def has(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    pairs = [(address, 24) for address in addresses]
    monkeypatch.setattr(network_addresses, "interfaces", lambda: {"lo": [("127.0.0.1", 8)], "eth0": pairs})


def test_an_address_on_the_default_route_is_this_machines_own() -> None:
    try:
        found = typed_machine.default_address()
    except PreflightError:
        pytest.skip("no network")
    assert listeners.own_address(found) and not ipaddress.ip_address(found).is_loopback


def test_without_a_default_route(no_route: None, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "fe80::1", "2001:db8::5", "10.0.0.7", "169.254.3.4")
    assert typed_machine.default_address() == "10.0.0.7"
    has(monkeypatch, "fe80::1", "2001:db8::5")
    assert typed_machine.default_address() == "2001:db8::5"
    has(monkeypatch, "fe80::1")
    with pytest.raises(PreflightError, match="no address that another machine can reach") as caught:
        typed_machine.default_address()
    assert "--master HOST:PORT" in caught.value.fix


def test_the_port_is_free() -> None:
    port = typed_machine.free_port("127.0.0.1")
    with socket.create_server(("127.0.0.1", port)):
        assert typed_machine.free_port("127.0.0.1") != port
