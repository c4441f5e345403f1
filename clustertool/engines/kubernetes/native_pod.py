"""This program runs a command in a pod of a PaddleJob, so that pservers and heter trainers end with the workers.

The operator ends no pod of a job that succeeds, and a pserver of Paddle does not end by itself. Each worker sends its number
and its exit code to them when it ends. One that has got all of them, or a failure, ends its command by SIGTERM. The text of
this file is in the manifest: python3 -c TEXT worker|ps|heter COMMAND ...
It needs Python 3.8, the standard library, and the variables of the operator.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import List, Set, Tuple

LAST_PORT = 19  # a pod has 20 ports from PADDLE_PORT on; Paddle's gloo uses the one before the last
GRACE = 10  # seconds between SIGTERM and SIGKILL of the command
PATIENCE = 60  # seconds in which a worker must reach the others
_ENDS: List[int] = []  # exit codes of workers
_REAL_TIME = getattr(signal, "SIGRTMIN", 1), getattr(signal, "SIGRTMAX", 0)  # as in model/rank_signals.py
_OF_USERS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, *range(_REAL_TIME[0], _REAL_TIME[1] + 1))
_PASSED = (signal.SIGTERM, signal.SIGINT, *_OF_USERS)  # to the command


def main(role: str, command: List[str]) -> int:
    """Run a role's command, and return the exit code of the pod. A worker sends its exit code to the other roles at its end.

    The command of another role is ended when all workers have ended, or one has failed: then 0 or 1 is returned. Signals are
    passed on to the command.
    """
    process = subprocess.Popen(command)
    for number in _PASSED:
        signal.signal(number, lambda received, _: process.send_signal(received))
    if role == "worker":
        code = _exit_code(process.wait())
        senders = [threading.Thread(target=_send, args=(place, code)) for place in _others()]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        return code
    listener = socket.create_server(("", int(os.environ["PADDLE_PORT"]) + LAST_PORT))
    threading.Thread(target=_end_with_workers, args=(listener, process), daemon=True).start()
    code = _exit_code(process.wait())
    over = len(_ENDS) >= int(os.environ["PADDLE_TRAINERS_NUM"]) or any(_ENDS)
    return int(any(_ENDS)) if over else code


def _exit_code(status: int) -> int:
    """Convert the status of a process to an exit code: 128 + number for a signal."""
    return 128 - status if status < 0 else status


def _others() -> List[Tuple[str, int]]:
    """List host and port at which the pservers and heter trainers receive the ends of workers."""
    given = (os.environ.get(name, "") for name in ("PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_HETER_ENDPOINTS"))
    ends = (end.rpartition(":") for one in given for end in one.split(",") if end)
    return [(host, int(port) + LAST_PORT) for host, _, port in ends]


def _send(place: Tuple[str, int], code: int) -> None:
    """Send this worker's number and exit code to another pod; try again for up to 60 s, then print that it does not answer."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            with socket.create_connection(place, 5) as connection:
                connection.sendall(f"{os.environ['PADDLE_TRAINER_ID']} {code}\n".encode())
                if connection.recv(1):
                    return
        except OSError:
            pass
        time.sleep(1)
    print(f"[pod] {place[0]}:{place[1]} does not answer, its pod is not ended", file=sys.stderr, flush=True)


def _end_with_workers(listener: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    """Receive the exit codes of workers until all have come or one is no success.

    Then end the command by TERM, and KILL 10 s later.
    """
    numbers: Set[int] = set()
    while len(numbers) < int(os.environ["PADDLE_TRAINERS_NUM"]) and not any(_ENDS):
        connection, _ = listener.accept()
        with connection:
            try:
                connection.settimeout(5)
                number, code = map(int, connection.makefile().readline(64).split())
                connection.sendall(b"\n")
            except (OSError, ValueError):
                continue  # it is no worker
        if number not in numbers:
            numbers.add(number)
            _ENDS.append(code)
    what = "a worker has failed" if any(_ENDS) else "all workers are done"
    print(f"[pod] {what}: ending the command", file=sys.stderr, flush=True)
    process.terminate()
    time.sleep(GRACE)
    process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
