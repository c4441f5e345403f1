"""A headless Chromium, driven over two pipes: what a reader sees, what the page fetches, what the browser complains of."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
).split()
_PATIENCE = 60.0


class Chromium:
    """A browser with one page, that close() ends with all its children. `fetched` and `complaints` grow as the page loads."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM
        self.fetched: list[str] = []
        self.complaints: list[str] = []
        self._number = 0
        self._rest = b""
        self._loaded = False
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs_in, theirs_out)]

        def place() -> None:
            """The browser reads from 3 and writes to 4."""
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [PROGRAM, *_FLAGS, f"--user-data-dir={profile}"],
            preexec_fn=place,
            pass_fds=(3, 4),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        self._target = ""
        self.turn()

    def turn(self) -> None:
        """Replace the page by a new one, of which nothing is noted yet."""
        former = self._target
        self._target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        if former:
            self._ask("Target.closeTarget", targetId=former)
        self.fetched.clear()
        self.complaints.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def open(self, page: Path | str, width: int, height: int, dark: bool = False) -> None:
        """Open a file or an address."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self.ask("Page.navigate", url=page.as_uri() if isinstance(page, Path) else page)
        end = time.monotonic() + _PATIENCE
        while not self._loaded:
            self._take(end)

    def value(self, expression: str) -> Any:
        """What an expression is in the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    def visible(self, text: str) -> bool:
        """Some element's own words hold `text`, and all of it is inside the window as it is, nothing scrolled."""
        return bool(
            self.value(f"""(() => {{
            const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
            while (walk.nextNode()) {{
                const at = walk.currentNode.data.indexOf({json.dumps(text)});
                if (at < 0) continue;
                const range = document.createRange();
                range.setStart(walk.currentNode, at);
                range.setEnd(walk.currentNode, at + {len(text)});
                const box = range.getBoundingClientRect();
                const inside = box.width > 0 && box.top >= 0 && box.left >= 0
                    && box.bottom <= innerHeight && box.right <= innerWidth;
                const top = document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
                if (inside && top && top.contains(walk.currentNode)) return true;
            }}
            return false;
        }})()""")
        )

    def screenshot(self) -> bytes:
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        return self._ask(method, self._session, **params)

    def _ask(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {
            "id": self._number,
            "method": method,
            "params": params,
            **({"sessionId": session} if session else {}),
        }
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _PATIENCE
        while True:
            for answer in self._take(end):
                if answer.get("id") == self._number:
                    assert "error" not in answer, answer
                    return dict(answer["result"])

    def _take(self, end: float) -> list[dict[str, Any]]:
        """Whole messages that are there; events are noted."""
        assert select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0], "the browser says nothing"
        data = os.read(self._in, 1 << 20)
        assert data, "the browser has ended"
        *whole, self._rest = (self._rest + data).split(b"\0")
        messages: list[dict[str, Any]] = [json.loads(message) for message in whole]
        for message in messages:
            self._note(message.get("method", ""), message.get("params", {}))
        return messages

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.fetched.append(params["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(params))

    def close(self) -> None:
        os.close(self._out)
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait(_PATIENCE)
        os.close(self._in)
