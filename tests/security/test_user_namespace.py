"""A user namespace without uid 0: the folders of root belong to the overflow uid there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from clustertool.node.system import users
from tests.cli import REPO

STRANGER = 4002
# As another user of the machine, who has no name: the modules are read before.
_PROGRAM = f"""
import ctypes, grp, os, sys
sys.path.insert(0, {str(REPO)!r})
from clustertool.node.system import path_trust as trust, users
from clustertool.ssh import ownership
os.setgroups([])
os.setgid({STRANGER})
os.setuid({STRANGER})
ctypes.CDLL(None).prctl(4, 1)  # or /proc/self would belong to root
if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):
    sys.exit("no user namespaces")
open("/proc/self/uid_map", "w").write("{STRANGER} {STRANGER} 1")
print(os.stat("/").st_uid, trust.unsafe("/usr/bin"), repr(ownership.problem("/", os.stat("/"))))
"""


@pytest.mark.parametrize(
    "text, mapped",
    [
        ("         0          0 4294967295\n", True),
        ("0 1000 1\n1 100000 65536\n", True),
        ("1000 1000 1\n", False),
        ("1000 0 1\n1 100000 999\n", False),
    ],
)
def test_whether_root_is_in_a_namespace(text: str, mapped: bool) -> None:
    assert users.maps_root(text) is mapped


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_the_folders_of_root_are_trusted() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60)
    if "no user namespaces" in done.stderr:
        pytest.skip("this machine allows no user namespaces")
    assert done.stdout.split(maxsplit=1) == ["65534", "None ''\n"], done.stderr
