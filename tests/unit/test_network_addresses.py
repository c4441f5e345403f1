"""The interface of an address: by the address itself, else by the network that it is in."""

from __future__ import annotations

import pytest

from clustertool.node.probe.network_addresses import nic_of

NAMES = {
    "lo": [("127.0.0.1", 8), ("::1", 128)],
    "eth0": [("10.0.0.5", 24), ("fe80::5", 64)],
    "ib0": [("10.0.0.6", 24), ("fd00:1::6", 48)],
    "any": [("192.0.2.1", 0)],
    "down": [],
}


@pytest.mark.parametrize(
    ("address", "nic"),
    [
        ("127.0.0.1", "lo"),
        ("127.3.2.1", "lo"),
        ("10.0.0.5", "eth0"),
        ("10.0.0.6", "ib0"),  # also in the network of eth0
        ("10.0.0.7", "eth0"),  # in two networks: the first
        ("10.0.1.7", ""),
        ("192.0.2.2", ""),  # each address is in a network of prefix length 0
        ("::1", "lo"),
        ("::2", ""),
        ("fe80::9%eth0", "eth0"),
        ("fe80:0:0:0:0:0:0:5", "eth0"),
        ("fd00:1:0:7::1", "ib0"),
        ("a00:5::", ""),  # its first bytes are those of 10.0.0.5
        ("node7", ""),
        ("10.0.0", ""),
        ("10.0.0.5\0", ""),
        ("", ""),
    ],
)
def test_the_interface_of_an_address(address: str, nic: str) -> None:
    assert nic_of(address, NAMES) == nic
