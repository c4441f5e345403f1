"""A training in a test imports this first, and calls step(): it writes when its process lives, and its steps.

The file is /tmp/witness/JOB.ATTEMPT.RANK.PID. Its first line is WORLD_SIZE, and when the process began, which is before that of
Python. Each other line is a time and a number: that of a step, or 0 each 0.1 s. All machines of a lab have one clock.
"""

import os
import threading
import time

FOLDER = "/tmp/witness"
FAST = "/tmp/witness/fast"  # the file whose presence ends the pauses
PAUSE = float(os.environ.get("WITNESS_PAUSE", "0"))  # seconds after each step


def process_start() -> float:
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def write(text: str) -> None:
    os.write(_file, text.encode())


def live() -> None:
    while True:
        write(f"{time.time():.3f} 0\n")
        time.sleep(0.1)


def step(number: int) -> None:
    write(f"{time.time():.3f} {number}\n")
    if PAUSE and not os.path.exists(FAST):
        time.sleep(PAUSE)


os.makedirs(FOLDER, exist_ok=True)
_name = ".".join(os.environ[f"CLUSTERTOOL_{field}"] for field in ("JOB", "ATTEMPT", "RANK"))
_file = os.open(f"{FOLDER}/{_name}.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
write(f"{os.environ['CLUSTERTOOL_WORLD_SIZE']} {process_start():.3f}\n")
threading.Thread(target=live, daemon=True).start()
