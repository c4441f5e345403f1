"""A kubeconfig of one context."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def kubeconfig(
    path: Path, server: str, user: Mapping[str, Any], authority: bytes = b"", namespace: str = "default"
) -> Path:
    """user: the credentials. authority: the certificate of the authority that has signed that of the server."""
    cluster = {"server": server}
    if authority:
        cluster["certificate-authority-data"] = base64.b64encode(authority).decode()
    lists = {
        "clusters": [{"name": "one", "cluster": cluster}],
        "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one", "namespace": namespace}}],
        "users": [{"name": "one", "user": dict(user)}],
    }
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "one", **lists}))
    path.chmod(0o600)
    return path
