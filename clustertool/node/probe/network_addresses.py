"""This module reads the addresses of this machine's network interfaces from the kernel (rtnetlink), as `ip addr` does.

The older ioctl (SIOCGIFADDR) reports one address of an interface only."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Dict, Iterator, List, Mapping, Optional, Tuple

from clustertool.node.devices import detect


def first_address(host: str, port: int = 0) -> Tuple[int, Tuple[object, ...]]:
    """Resolve a host to the family and the socket address for TCP. Raises OSError or UnicodeError for no such name.

    The name is passed as bytes. getaddrinfo encodes a str with the codec idna, whose import takes 2 ms of CPU time, also where
    the name is an IP address.
    """
    name = host.encode("ascii" if host.isascii() else "idna")
    family, _, _, _, address = socket.getaddrinfo(name, port, socket.AF_UNSPEC, socket.SOCK_STREAM)[0]
    return family, address


def resolved(name: str) -> Optional[str]:
    """Resolve a name to its first address: "" if the name does not exist, None if the name service needs over a second."""

    def ask() -> Optional[str]:
        with contextlib.suppress(OSError, UnicodeError):
            return str(first_address(name)[1][0])
        return ""

    return detect.within(1.0, ask, None)


_ROUTE = 0  # NETLINK_ROUTE; this and the following numbers: linux/netlink.h, linux/rtnetlink.h, linux/if_addr.h
_GET_ADDRESSES, _NEW_ADDRESS, _DONE, _ERROR = 22, 20, 3, 2
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_PEER, _LOCAL = 1, 2  # IFA_ADDRESS, IFA_LOCAL: on a point-to-point link the first one is the other side's
_HEADER, _ADDRESS, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")
Found = Tuple[int, int, bytes, int]  # family, index of the interface, address, length of the network's prefix


def interfaces() -> Dict[str, List[Tuple[str, int]]]:
    """Map each interface to its (address, length of the network's prefix) pairs, IPv4 first.

    [] for one without addresses, and for all if the kernel does not answer.
    """
    names = dict(socket.if_nameindex())
    found: Dict[str, List[Tuple[str, int]]] = {name: [] for name in names.values()}
    with contextlib.suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _ROUTE) as sock:
        sock.settimeout(5.0)
        request = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        sock.sendall(_HEADER.pack(_HEADER.size + len(request), _GET_ADDRESSES, _REQUEST_DUMP, 1, 0) + request)
        for family, index, address, prefix in sorted(_dump(sock), key=lambda one: one[0]):
            if index in names:
                found[names[index]].append((socket.inet_ntop(family, address), prefix))
    return found


def nic_of(address: str, names: Mapping[str, List[Tuple[str, int]]]) -> str:
    """Find the interface that has an address, or whose network it is in (127.0.0.2 is on lo); "" if none.

    names: what interfaces() returns.
    """
    wanted, near = _packed(address.partition("%")[0]), ""
    for name, pairs in names.items():
        for own, prefix in ((_packed(text), prefix) for text, prefix in pairs):
            if own == wanted:
                return name
            if prefix and len(own) == len(wanted) and _network(own, prefix) == _network(wanted, prefix):
                near = near or name
    return near


def _packed(address: str) -> bytes:
    """Pack an address into its 4 or 16 bytes; b"" for a host name."""
    with contextlib.suppress(OSError, ValueError):
        return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    return b""


def _network(packed: bytes, prefix: int) -> int:
    """Return the first `prefix` bits of an address."""
    return int.from_bytes(packed, "big") >> (8 * len(packed) - prefix)


def _dump(sock: socket.socket) -> List[Found]:
    """List all addresses in the answers of the kernel, until it reports the end or an error: see _address()."""
    found: List[Found] = []
    while True:
        data = sock.recv(1 << 16)
        while len(data) >= _HEADER.size:
            size, kind, _, _, _ = _HEADER.unpack_from(data)
            if kind in (_DONE, _ERROR) or size < _HEADER.size:
                return found
            if kind == _NEW_ADDRESS:
                found += _address(data[_HEADER.size : size])
            data = data[_aligned(size) :]


def _address(message: bytes) -> Iterator[Found]:
    """Yield (family, index of the interface, packed address, prefix length) of a message, if it is of IPv4 or IPv6."""
    family, prefix, _, _, index = _ADDRESS.unpack_from(message)
    values: Dict[int, bytes] = {}
    rest = message[_ADDRESS.size :]
    while len(rest) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(rest)
        values[kind] = rest[_ATTRIBUTE.size : size]
        rest = rest[_aligned(max(size, _ATTRIBUTE.size)) :]
    own = values.get(_LOCAL) or values.get(_PEER)
    if own and family in (socket.AF_INET, socket.AF_INET6):
        yield family, index, own, prefix


def _aligned(size: int) -> int:
    """Round a size up to a multiple of 4."""
    return (size + 3) & ~3
