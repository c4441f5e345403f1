"""This module serves the address at which Hugging Face's Trainer reports its progress to the program that has started it.

The variables are those of Kubeflow Trainer, for which transformers has a callback (KubeflowCallback): a POST with a token, at
most once in 5 s, of rank 0. The server is a thread that listens on the loopback and answers one request after another. A
request has 64 KiB and 2 s, so another user of the machine can delay a report, and neither a rank nor the supervisor.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import secrets
import socket
import time
from threading import Thread
from typing import TYPE_CHECKING, Callable, Optional

from clustertool.model.job.outcome import Key
from clustertool.model.job.progress import Metrics, posted_metrics
from clustertool.model.paths import OURS
from clustertool.node.storage import files

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

TOKEN = f"{OURS}/trainer-token"
_URL, _TOKEN_FILE = "KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN"
_MOST, _PATIENCE = 64 << 10, 2.0
_MALFORMED = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class TrainerEndpoint:
    """The server of one supervisor. Call start() before a rank starts and after signals are blocked, and close() once.

    report: is called in the thread with the rank that has sent numbers, and these.
    """

    def __init__(self, job: int, spec: Spec, report: Callable[[Key, Metrics], None]) -> None:
        self._job, self._spec, self._report = job, spec, report
        self._token = secrets.token_urlsafe(24)
        self._listener: Optional[socket.socket] = None

    def start(self) -> None:
        """Listen, write the token, and add the variables to those of each trainer for which the user has set neither.

        Without a free port, thread or room on the disk nothing is served. The thread has the mask of signals of the caller.
        """
        trainers = [process for process in self._spec["processes"] if process["role"] == "trainer"]
        own = [{*self._spec["common"], *process["env"], *os.environ} for process in trainers]
        chosen = [process for process, names in zip(trainers, own) if not names & {_URL, _TOKEN_FILE}]
        with contextlib.suppress(OSError, RuntimeError):
            if chosen:
                self._listener = socket.create_server(("127.0.0.1", 0), backlog=16)
                files.create(self._job, TOKEN, self._token.encode(), exclusive=False)
                Thread(target=self._serve, args=(self._listener,), daemon=True).start()
                for process in chosen:
                    url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/trainer/{process['rank']}"
                    process["env"].update({_URL: url, _TOKEN_FILE: f"{self._spec['job_dir']}/{TOKEN}"})

    def close(self) -> None:
        """Stop listening, which ends the thread, and remove the token."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            self._listener.close()
            with contextlib.suppress(OSError):
                files.remove(self._job, TOKEN)

    def _serve(self, listener: socket.socket) -> None:
        """Answer one connection after another, until the listener is closed."""
        with contextlib.suppress(OSError):
            while True:
                connection = listener.accept()[0]
                with connection, contextlib.suppress(OSError):
                    code = self._answer(connection)
                    connection.sendall(f"HTTP/1.1 {code}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())

    def _answer(self, connection: socket.socket) -> str:
        """Read a request and report its numbers; return the status: 401 for a wrong token, 400 for what cannot be read."""
        data, end = "", time.monotonic() + _PATIENCE
        with contextlib.suppress(*_MALFORMED):
            while len(data) < _MOST:
                connection.settimeout(max(0.001, end - time.monotonic()))
                part = connection.recv(_MOST)
                data += part.decode("latin-1")
                head, blank, body = data.partition("\r\n\r\n")
                about = {name.lower(): value for name, value in re.findall(r"\r\n([^\s:]{1,40}): ?([^\r\n]*)", head)}
                if blank and len(body) >= int(about["content-length"]):
                    if not hmac.compare_digest(
                        about.get("authorization", "").encode(), f"Bearer {self._token}".encode()
                    ):
                        return "401 Unauthorized"
                    rank = int(head[len("POST /trainer/") :].split(" ")[0])
                    self._report(("trainer", rank), posted_metrics(json.loads(body[: int(about["content-length"])])))
                    return "200 OK"
                if not part:
                    break
        return "400 Bad Request"
