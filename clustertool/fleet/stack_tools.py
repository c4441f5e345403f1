"""py-spy reads the stacks of Python programs. The laptop gets it for the nodes' machines, and sends it to each node once.

It is the installed one (the extra `stacks`) if that is for this machine, else the wheel of PyPI, by pip, into the cache of this
machine. A node keeps it by its digest; without a network, nodes use what they have.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import sysconfig
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from clustertool.errors import ClustertoolError, PreflightError
from clustertool.fleet import this_user
from clustertool.fleet.fleet import Fleet, file_request
from clustertool.fleet.node_bundle import digest_of
from clustertool.model.wire.agent_answers import StackToolAnswer
from clustertool.model.wire.messages import STACK_TOOLS
from clustertool.ssh.parallel import in_background

# Of an ELF file, by the name of the machine.
_ELF = {"x86_64": 62, "aarch64": 183, "armv7l": 40, "i686": 3}
_PIP = (
    "download --quiet --no-deps --only-binary=:all: --no-input --disable-pip-version-check --retries=1 --timeout=10"
).split()
_SECONDS = 60.0  # for pip
_FIX = "pip install 'clustertool[stacks]' where clustertool is installed"


def send_early(fleet: Fleet) -> None:
    """Bring py-spy to the nodes of a fleet, in a thread, which nothing waits for; without it stacks come from /proc."""

    def send() -> None:
        with contextlib.suppress(ClustertoolError):
            prepare(fleet, fleet.ask(dict.fromkeys(list(fleet.agents), STACK_TOOLS({}))).ok)

    in_background(send)


def prepare(fleet: Fleet, found: Mapping[int, StackToolAnswer]) -> tuple[dict[int, str], dict[int, str]]:
    """Bring py-spy to those nodes of `found` that lack it. Return the digest by node, "" without one, and by node why.

    found: the nodes' answers to STACK_TOOLS. Nothing is downloaded if all nodes of a machine's kind have it.
    """
    tools = {node: next(iter(answer["kept"]), "") for node, answer in found.items()}
    reasons: dict[int, str] = {}
    for machine in sorted({answer["machine"] for answer in found.values()}):
        nodes = [node for node, answer in found.items() if answer["machine"] == machine]
        try:
            program = installed(machine) or (b"" if all(tools[node] for node in nodes) else _download(machine))
        except ClustertoolError as error:
            reasons.update((node, f"{error.what} ({error.fix})") for node in nodes if not tools[node])
            continue
        digest = digest_of(program)
        lacking = [node for node in nodes if program and digest not in found[node]["kept"]]
        request = file_request("py-spy", digest, zlib.compress(program) if lacking else b"")
        sent = fleet.ask(dict.fromkeys(lacking, request), timeout=300.0)
        reasons.update((node, f"{error.what} ({error.fix})") for node, error in sent.failed.items())
        tools.update(dict.fromkeys([node for node in nodes if program and node not in sent.failed], digest))
    return tools, reasons


def source() -> str:
    """Describe where `stacks` gets py-spy: it is here for some machine, or has to be downloaded."""
    with contextlib.suppress(ClustertoolError):
        if any(map(installed, _ELF)):
            return "py-spy"
    return "py-spy by pip, when needed"


def installed(machine: str) -> bytes:
    """Read the py-spy for a machine that is installed with clustertool here, or in this machine's cache; b"" if none is."""
    if machine not in _ELF:  # a name that a node has sent
        return b""
    with contextlib.suppress(OSError):
        data = (Path(sysconfig.get_path("scripts")) / "py-spy").read_bytes()
        if data[:4] == b"\x7fELF" and int.from_bytes(data[18:20], "little") == _ELF[machine]:
            return data
    for path in sorted(_cache().glob(f"py_spy-*_{machine}.whl"), reverse=True):
        with contextlib.suppress(OSError, KeyError, zipfile.BadZipFile), zipfile.ZipFile(path) as wheel:
            return wheel.read(f"py_spy-{path.name.split('-')[1]}.data/scripts/py-spy")
    return b""


def _cache() -> Path:
    """Return the folder of wheels of this user. Raises NoHome."""
    return this_user.cache() / "py-spy"


def _download(machine: str) -> bytes:
    """Get the wheel for a machine by pip into the cache, and return the program in it.

    Raises PreflightError if this fails, as it does without a network, and NoHome.
    """
    if machine not in _ELF:
        raise PreflightError(f"there is no py-spy for {machine}", "its stacks come from /proc")
    this_user.make_folder(_cache(), "XDG_CACHE_HOME")
    argv = [sys.executable, "-m", "pip", *_PIP, f"--platform=manylinux2014_{machine}", f"--dest={_cache()}", "py-spy"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS)
    program = installed(machine)
    if not program:
        raise PreflightError(f"py-spy for {machine} cannot be downloaded by pip", _FIX)
    return program
