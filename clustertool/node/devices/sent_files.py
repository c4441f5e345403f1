"""This module keeps files that laptops send to a node, by their digests: the NVML module, and py-spy."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import zlib
from typing import TYPE_CHECKING, Dict

from clustertool.errors import PreflightError
from clustertool.node.devices import detect
from clustertool.node.system.node_context import NodeContext

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Answer, StackToolAnswer
    from clustertool.model.wire.agent_requests import NoFields, SentFileRequest

_NAMES = {"nvml": "pynvml.py", "py-spy": "py-spy"}  # of the files, by their kinds
in_memory: Dict[str, bytes] = {}  # NVML modules that could not be written anywhere, by their digests


def path_of(kind: str, digest: str) -> str:
    """Return the path of the file of this kind with this digest."""
    return os.path.join(detect.place(), f"{kind}-{digest}", _NAMES[kind])


def find(kind: str, digest: str) -> str:
    """Return the path of a file that is here and complete; "" if it is not, or another user could have changed it."""
    path = path_of(kind, digest)
    with contextlib.suppress(OSError):
        infos = [os.lstat(path), os.lstat(detect.place())]
        with open(path, "rb") as file:
            complete = _digest(file.read()) == digest
        if complete and all(info.st_uid == os.getuid() and not info.st_mode & 0o022 for info in infos):
            return path
    return ""


def list_tools(node: NodeContext, request: NoFields) -> StackToolAnswer:
    """Answer for which machine this node needs py-spy, and the digests of those that it has."""
    kept = [digest for digest in detect.sent("py-spy") if find("py-spy", digest)]
    return {"machine": os.uname().machine, "kept": kept}


def receive(node: NodeContext, request: SentFileRequest) -> Answer:
    """Store the file that the laptop has sent: base64 of zlib. Raises PreflightError as keep()."""
    packed = b""
    with contextlib.suppress(ValueError):
        packed = base64.b64decode(request["data"])
    keep(request["kind"], request["digest"], packed)
    return {}


def keep(kind: str, digest: str, packed: bytes) -> None:
    """Store a file on the disk, else an NVML module in memory. packed: zlib.

    Raises PreflightError if its digest is another one, or py-spy cannot be written.
    """
    data = b""
    with contextlib.suppress(zlib.error):
        data = zlib.decompress(packed)
    if _digest(data) != digest:
        raise PreflightError(f"{_NAMES[kind]} arrived damaged", "type the command again")
    path = path_of(kind, digest)
    part = f"{path}.{os.getpid()}.{os.uname().nodename}"
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o700), "wb") as file:
            file.write(data)
        os.replace(part, path)
    except OSError as error:
        if kind == "py-spy":
            raise PreflightError(f"cannot write to {detect.place()}: {error.strerror}", "make room there") from None
        in_memory[digest] = data


def _digest(data: bytes) -> str:
    """Return the first 32 digits of the SHA-256 of a file."""
    return hashlib.sha256(data).hexdigest()[:32]
