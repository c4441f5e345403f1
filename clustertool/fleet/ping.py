"""Ask with the system's `ping` command whether machines answer: one process for each address, at most 64 at a time."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping

from clustertool.ssh.parallel import each

_WIDTH = 64  # processes at a time; one of them takes 2 ms of CPU, or sleeps
_SECONDS = 2  # for one address; ping repeats its packet every second
_LOOPBACK = "127.0.0.1"


def ping_all(addresses: Mapping[int, str], timeout: float) -> dict[int, bool | None]:
    """Ping each address (or name), within about `timeout` seconds: True where it answers, else False. Nothing is raised.

    None: not measured, because the command is missing, this user may not run it, a name has no address, or the time was over.
    """
    names = sorted(set(addresses.values()))
    if not names or not _answers(_LOOPBACK):
        return dict.fromkeys(addresses)
    answers = each(names, _answers, width=_WIDTH, timeout=timeout).ok
    by_name = {names[key]: answer for key, answer in answers.items()}
    return {key: by_name.get(name) for key, name in addresses.items()}


def _answers(name: str) -> bool | None:
    """Ping a name or address once, and return whether it replies in 2 s; None where it has no address.

    False, too, where ping does not run.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)[0]
        argv = _argv(str(address[0]), family == socket.AF_INET6)
        # A session of its own: Ctrl+C in the terminal is for the tool alone.
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS + 1, start_new_session=True
        )
    except (socket.gaierror, UnicodeError):
        return None
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _argv(address: str, ipv6: bool) -> list[str]:
    """Build a command that ends with code 0 at the first reply, and with another one after 2 s without a reply."""
    if sys.platform == "darwin":
        return ["ping6", "-q", "-c", "1", address] if ipv6 else ["ping", "-q", "-o", "-t", str(_SECONDS), address]
    return ["ping", "-6" if ipv6 else "-4", "-q", "-c", "1", "-w", str(_SECONDS), address]
