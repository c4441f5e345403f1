"""word2vec's trainer with two faults: rank 2 dawdles in every step, and rank 1 loses its numbers after a while."""

from __future__ import annotations

import os
import time

import pserver
import train

RANK = int(os.environ.get("PADDLE_TRAINER_ID", "-1"))
SECONDS = 8.0
born = time.monotonic()
healthy = train.train_step


def train_step(*args) -> float:
    loss = healthy(*args)
    time.sleep(0.8 if RANK == 2 else 0.1)  # so that the healthy ones leave time to others on this machine
    if RANK == 1 and time.monotonic() - born > SECONDS:
        raise FloatingPointError("the loss is nan")
    return loss


train.train_step = train_step
pserver.main() if os.environ.get("TRAINING_ROLE") == "PSERVER" else train.main()
