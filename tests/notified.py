"""A real HTTP server on loopback that gets the notifications of jobs, and a command that writes them down."""

from __future__ import annotations

import http.server
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Receiver(http.server.ThreadingHTTPServer):
    """What it gets: `messages`, and the methods of all requests. status: of its answers. slow: seconds before each."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.messages: list[dict[str, Any]] = []
        self.methods: list[str] = []
        self.headers: dict[str, str] = {}
        self.status, self.slow = 200, 0.0
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hooks/correct-horse-battery"

    @property
    def events(self) -> list[str]:
        return [message["event"] for message in self.messages]

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.headers = dict(self.headers)
        self.server.methods.append("POST")
        time.sleep(self.server.slow)
        if self.server.status == 200:
            self.server.messages.append(json.loads(body))
        self.send_response(self.server.status)
        self.send_header("Location", "/login")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.server.methods.append("GET")
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def command(folder: Path, body: str = "") -> list[str]:
    """A command that appends each message to folder/messages, after it has run `body`."""
    code = f"import os, sys, time\n{body}\nopen({str(folder / 'messages')!r}, 'a').write(sys.stdin.read() + '\\n')"
    return [sys.executable, "-c", code, "correct-horse-battery"]


def written(folder: Path) -> list[dict[str, Any]]:
    """The messages that the command has got."""
    file = folder / "messages"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def until(true: Callable[[], Any], what: str, patience: float = 30.0) -> None:
    """Poll until it is true, or fail."""
    end = time.monotonic() + patience
    while not true():
        assert time.monotonic() < end, f"{patience:g} s and not: {what}"
        time.sleep(0.02)
