"""The ssh servers of tests/ssh, for a notebook that runs in a real kernel."""

from __future__ import annotations

from tests.ssh.conftest import laptop, site, ssh_keys, start

__all__ = ["laptop", "site", "ssh_keys", "start"]
