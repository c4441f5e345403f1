"""A registry of images on the laptop of a lab: a program that serves images which podman has saved with `push dir:FOLDER`.

    python image_registry.py FOLDER PORT [USER PASSWORD]

FOLDER/NAME is such a folder. Without user and password everyone may pull. FOLDER/log gets a line for each layer that is sent:
client, time of the begin, time of the end.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

SLOW = 0.5  # seconds for each layer


class Handler(BaseHTTPRequestHandler):
    """Answers what podman asks to pull an image."""

    folder: ClassVar[Path]
    login: ClassVar[str]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""

    def _answer(self, body: bool) -> None:
        parts = self.path.strip("/").split("/")
        if self.login and self.headers.get("Authorization") != f"Basic {self.login}":
            self._send(401, b"{}", "application/json", body, {"WWW-Authenticate": 'Basic realm="test"'})
        elif len(parts) == 4 and parts[2] == "manifests" and (self.folder / parts[1]).is_dir():
            data = (self.folder / parts[1] / "manifest.json").read_bytes()
            found = json.loads(data)
            kind = found.get("mediaType") or "application/vnd.oci.image.manifest.v1+json"
            digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
            self._send(200, data, kind, body, {"Docker-Content-Digest": digest})
        elif len(parts) == 4 and parts[2] == "blobs":
            begin = time.time()
            data = (self.folder / parts[1] / parts[3].partition(":")[2]).read_bytes()
            if len(data) > 1 << 20:
                time.sleep(SLOW)
            self._send(200, data, "application/octet-stream", body, {})
            if len(data) > 1 << 20:
                with (self.folder / "log").open("a") as log:
                    log.write(f"{self.client_address[0]} {begin} {time.time()}\n")
        else:
            known = parts == ["v2"]
            self._send(200 if known else 404, b"{}", "application/json", body, {})

    def _send(self, code: int, data: bytes, kind: str, body: bool, more: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


if __name__ == "__main__":
    Handler.folder = Path(sys.argv[1])
    Handler.login = base64.b64encode(":".join(sys.argv[3:5]).encode()).decode() if sys.argv[3:] else ""
    ThreadingHTTPServer(("0.0.0.0", int(sys.argv[2])), Handler).serve_forever()
