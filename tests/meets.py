"""A trainer that proves the addresses it was given: it listens on its own endpoint and meets the others on theirs."""

from __future__ import annotations

import json
from typing import Any

from tests.cli import Done

# Every rank listens where the others expect it, and is asked there who it is.
MEETS = """
    import json, os, socket, threading, time

    def split(endpoint):
        host, _, port = endpoint.rpartition(":")
        return host.strip("[]"), int(port)

    def ask(endpoint, patience=60):
        end = time.monotonic() + 60
        while True:
            try:
                with socket.create_connection(split(endpoint), patience) as other:
                    return int(other.makefile().readline())
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def listen(endpoint, answer):
        family = socket.AF_INET6 if endpoint.startswith("[") else socket.AF_INET
        server = socket.create_server(split(endpoint), family=family)
        thread = threading.Thread(target=answer, args=(server,), daemon=True)
        thread.start()
        return thread

    def one_by_one(server):
        while True:
            client, _ = server.accept()
            client.sendall(b"%d\\n" % rank)
            client.close()

    def all_at_once(server):
        clients = [server.accept()[0] for _ in range(int(env["WORLD_SIZE"]))]
        for client in clients:
            client.sendall(b"%d\\n" % rank)

    rank, env = int(os.environ["RANK"]), os.environ
    listen(env["PADDLE_CURRENT_ENDPOINT"], one_by_one)
    master = env["PADDLE_MASTER"]
    assert split(master) == (env["MASTER_ADDR"], int(env["MASTER_PORT"])), master
    barrier = listen(master, all_at_once) if rank == 0 else None
    for other, endpoint in enumerate(env["PADDLE_TRAINER_ENDPOINTS"].split(",")):
        assert ask(endpoint) == other, endpoint
    names = ["PADDLE_CURRENT_ENDPOINT", "POD_IP", "MASTER_ADDR", "CLUSTERTOOL_HOSTS", "LOCAL_RANK", "NODE_RANK"]
    print(json.dumps([rank, [env[name] for name in names]]), flush=True)
    assert ask(master, 600) == 0  # answered when all have asked: then nobody needs us any more
    if barrier:
        barrier.join()
"""


def met(done: Done) -> dict[int, dict[str, Any]]:
    """rank -> what it got: endpoint, own address, master, all hosts, local rank, node."""
    found = {}
    for line in done.lines("[trainer "):
        rank, values = json.loads(line.partition("] ")[2])
        endpoint, own, master, hosts, local, node = values
        assert endpoint.rpartition(":")[0].strip("[]") == own
        at = int(node), int(local)
        found[rank] = {"endpoint": endpoint, "own": own, "master": master, "hosts": hosts.split(","), "at": at}
    return found
