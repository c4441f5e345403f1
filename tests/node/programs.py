"""Ranks that resist being ended. Each prints `pid N` for every process that must be gone, then `ready`."""

from __future__ import annotations

import sys

PYTHON = sys.executable


def python(text: str) -> list[str]:
    return [PYTHON, "-u", "-S", "-E", "-c", text]


PLAIN = "echo pid $$; echo ready; exec sleep 1000"
IGNORES_TERM = "trap '' TERM; echo pid $$; echo ready; while :; do sleep 0.05; done"
SAYS_BYE = python("""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("bye"), sys.exit()))
print("ready")
time.sleep(1000)
""")
SETSID = """setsid sh -c 'echo pid $$; trap "" TERM; while :; do sleep 0.05; done' & echo ready; wait"""
ENV_WIPED = "env -i sh -c 'echo pid $$; exec sleep 1000' & echo ready; wait"
BACKGROUND = "sleep 1000 & echo pid $!; setsid sleep 1000 & echo pid $!; echo ready"

DAEMON = python("""
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.closerange(3, 99)
        print("pid", os.getpid(), flush=True)
        time.sleep(1000)
    os._exit(0)
os.wait()
print("pid", os.getpid())
print("ready")
time.sleep(1000)
""")

# What setproctitle does: the memory that /proc/PID/environ shows is written over.
RETITLED = python("""
import ctypes, os, time
def retitle():
    start, end = map(int, open("/proc/self/stat").read().rpartition(")")[2].split()[47:49])
    ctypes.memset(start, ord("x"), end - start)
if os.fork() == 0:
    os.setsid()
    retitle()
    print("pid", os.getpid(), flush=True)
    time.sleep(1000)
retitle()
print("pid", os.getpid())
print("ready")
time.sleep(1000)
""")

ZOMBIES = python("""
import os, time
for _ in range(3):
    if os.fork() == 0:
        os._exit(0)
print("pid", os.getpid())
print("ready")
time.sleep(1000)
""")

# Its first thread is over and shows as a zombie, the process goes on.
HEADLESS = python("""
import ctypes, os, signal, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Thread(target=time.sleep, args=(1000,)).start()
print("pid", os.getpid())
print("ready")
ctypes.CDLL(None).pthread_exit(None)
""")

# Each generation lives for a moment: whoever is found is already replaced.
STORM = python("""
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("pid", os.getpid(), flush=True)
for _ in range(3):
    if os.fork() == 0:
        while True:
            if os.fork():
                os._exit(0)
            time.sleep(0.002)
print("ready", flush=True)
time.sleep(1000)
""")

MANY_THREADS = python("""
import threading, time
for _ in range(300):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
print("ready")
time.sleep(1000)
""")

PSERVER = python("""
import os, socket, time
server = socket.create_server((os.environ["POD_IP"], int(os.environ["PADDLE_PORT"])))
print("listening")
time.sleep(1000)
""")
