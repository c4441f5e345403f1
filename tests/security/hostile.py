"""A hostile node: its `python` answers the requests of the tool itself, with whatever a test wants."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from clustertool.fleet import node_bundle
from tests.cli import LoopSite

# Reads what the tool sends before the first frame, says that it is ready, and gives each request to `answer`.
_PROGRAM = """\
#!{python} -S
import json, os, struct, sys, time

def take(size):
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data

def write(data):
    view = memoryview(data)
    while view:
        view = view[os.write(1, view):]

def frame(header, payload=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack(">II", len(text), len(payload)) + text + payload

def reply(request, **fields):
    write(frame(dict(fields, re=request.get("id"))))

def job(id, **fields):
    known = dict(id=id, node=NODE, owner="ann", created=time.time(), mode="collective", command="x", nodes=NODES,
                 state="running", code=None, reason="", dir="/tmp/JOBx")
    return dict(known, **fields)

NODE, NODES = {node!r}, {nodes!r}
{answer}
take({loader} + 32)  # and the digest of the node's code
take(int(take(8)))
write(b"ready\\n")
while True:
    head, body = struct.unpack(">II", take(8))
    request = json.loads(take(head))
    take(body)
    answer(request)
"""


def hostile_python(home: Path, node: int, nodes: Sequence[str], answer: str) -> None:
    """Make `~/py` of a node answer every request itself. `answer` is the source of `def answer(request)`.

    It may use reply(request, **fields), write(bytes), frame(header, payload), job(id, **fields), take(size), NODE, NODES.
    """
    text = _PROGRAM.format(
        python=sys.executable,
        node=node,
        nodes=list(nodes),
        answer=textwrap.dedent(answer),
        loader=len(node_bundle.LOADER),
    )
    _executable(home / "py", text)


def honest_python(home: Path) -> None:
    """`~/py` is the Python of the tests."""
    _executable(home / "py", f'#!/bin/sh\nexec {sys.executable} "$@"\n')


def _executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def site_with_hostile(site: LoopSite, node: int, answer: str, **keys: object) -> None:
    """Make `node` of the site hostile and all others honest; `keys` go to conf.py."""
    nodes = [site.name(number) for number in range(site.count)]
    for number in range(site.count):
        if number != node:
            honest_python(site.home(number))
        else:
            hostile_python(site.home(number), node, nodes, answer)
    site.conf(PYTHON="~/py", **keys)
