"""Addresses and names as the name service of this machine answers."""

from __future__ import annotations

import socket

import pytest

from clustertool.node.probe.network_addresses import first_address, resolved


def test_addresses() -> None:
    assert first_address("127.0.0.1", 80) == (socket.AF_INET, ("127.0.0.1", 80))
    assert first_address("::1", 80)[1][:2] == ("::1", 80)
    assert first_address("localhost")[1][0] in ("127.0.0.1", "::1")


@pytest.mark.parametrize("name", ["..", "ü..invalid", "a" * 300, "\udcff"])
def test_names_that_do_not_exist(name: str) -> None:
    with pytest.raises((OSError, UnicodeError)):
        first_address(name)
    assert resolved(name) == ""
