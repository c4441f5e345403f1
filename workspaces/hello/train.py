"""The smallest job: every process prints its role, rank and node. All it knows comes from its environment.

One line a process, `hello key=value ...` without spaces inside a value, then one line a shard, so that
`inv logs` and grep can answer "which rank ran where, and which data was it given?".

Under `--mode ps` this same file also runs as the pserver, because the folder has no pserver.py, and under
`--mode ps-heter` as the heter trainers too: it then listens where the environment says it must, and stays until
it gets a signal.
"""

from __future__ import annotations

import os
import sys


def endpoint() -> str:
    """The address of this process: Paddle names it directly in collective mode, in two halves in ps mode."""
    env = os.environ
    if env.get("PADDLE_CURRENT_ENDPOINT"):
        return env["PADDLE_CURRENT_ENDPOINT"]
    if env.get("POD_IP") and env.get("PADDLE_PORT"):
        return env["POD_IP"] + ":" + env["PADDLE_PORT"]
    return "-"


def shards() -> list[str]:
    """The data files of this process: CLUSTERTOOL_SHARDS names a file that holds one path a line."""
    listing = os.environ.get("CLUSTERTOOL_SHARDS")
    if not listing:
        return []
    with open(listing) as file:
        return file.read().splitlines()


def say(role: str) -> None:
    known = {
        name: os.environ.get("CLUSTERTOOL_" + name.upper(), "-")
        for name in ("rank", "world_size", "local_rank", "node_rank", "nnodes", "job")
    }
    print(
        f"hello role={role} rank={known['rank']} world_size={known['world_size']} "
        f"local_rank={known['local_rank']} node={known['node_rank']} nodes={known['nnodes']} "
        f"endpoint={endpoint()} shards={len(shards())} host={os.uname().nodename} "
        f"job={known['job']} pid={os.getpid()}",
        flush=True,
    )
    for path in shards():
        print(f"hello role={role} rank={known['rank']} shard={path}", flush=True)


def serve(role: str) -> None:
    """Be a pserver that holds nothing (trainers start only once every pserver's port listens), or an idle heter trainer."""
    import signal  # here, since trainers have no need of it: the smallest job is also the one that starts fastest
    import socket

    host, port = endpoint().rsplit(":", 1)
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen()
        say(role)
        while True:
            listener.accept()[0].close()


if __name__ == "__main__":
    role = os.environ.get("TRAINING_ROLE") or os.environ.get("CLUSTERTOOL_ROLE") or "trainer"
    if role.upper() in ("PSERVER", "HETER_TRAINER"):
        serve(role.upper())
    else:
        say(role.upper())
