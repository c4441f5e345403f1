"""A hostile node: its `python` answers the requests of the tool itself, with whatever a test wants."""

from __future__ import annotations

import sys
import textwrap
import time

from clustertool.reach import pyz
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
take({loader})
for part in ("boot", "digests"):
    take(int(take(8)))
write(b"ready whole\\n")
take(int(take(8)))
while True:
    head, body = struct.unpack(">II", take(8))
    request = json.loads(take(head))
    take(body)
    answer(request)
"""


def site_with_hostile(site: LoopSite, node: int, answer: str, **keys: object) -> None:
    """Make `node` of the site hostile. `answer` is the source of `def answer(request)`; `keys` go to conf.py.

    It may use reply(request, **fields), write(bytes), frame(header, payload), job(id, **fields), take(size), NODE, NODES.
    """
    nodes = [site.name(number) for number in range(site.count)]
    for number in range(site.count):
        python = site.home(number) / "py"
        if number != node:
            if not python.exists():
                python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        else:
            text = _PROGRAM.format(
                python=sys.executable, node=node, nodes=nodes, answer=textwrap.dedent(answer), loader=len(pyz.LOADER)
            )
            python.write_text(text)
        python.chmod(0o755)
    site.conf(PYTHON="~/py", **keys)


def took(start: float) -> float:
    return time.monotonic() - start
