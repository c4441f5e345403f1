"""Lines of real programs and the progress they tell."""

from __future__ import annotations

import time

import pytest

from clustertool.model.job.progress import find_metrics

Step = tuple[float | None, float | None]


def find_step(text: str) -> Step:
    return find_metrics(text)[:2]


LINES = {
    "epoch=23 step=1989 loss=2.0506 pairs/s=100494": (23, 1989),  # our word2vec
    "Train Epoch: 3 [1280/60000 (2%)]\tLoss: 0.3": (3, None),  # pytorch's mnist
    "global step 1200, epoch: 2, batch: 599, loss: 0.12": (2, 599),  # PaddleNLP: the last counter is the finest
    "epoch 0, batch 10, loss 2.3": (0, 10),
    "{'loss': 0.5, 'learning_rate': 1e-05, 'epoch': 0.25}": (0.25, None),  # transformers
    " 45%|####5     | 450/1000 [00:10<00:12, 45.1it/s]": (None, 450),  # tqdm
    "[2021-03-01 12:00:00] Epoch: [7][100/5005] Time 0.1": (7, None),
    "iter: [20/300] lr 0.1": (None, 20),
    "Iteration 77": (None, 77),
    "iteration       20/  500000 | consumed samples: 320": (None, 20),  # Megatron
    "step:12/100 train_loss:4.1": (None, 12),
}


@pytest.mark.parametrize("line", LINES)
def test_lines_of_real_programs(line: str) -> None:
    assert find_step(f"{line}\n") == LINES[line]


@pytest.mark.parametrize(
    "line", ["", "stepping 3", "step", "batch_size=64", "steps_per_epoch=12", "lr step 0.5", "timestep"]
)
def test_what_is_no_progress(line: str) -> None:
    assert find_step(f"{line}\n") == (None, None)


def test_a_line_of_spaces_takes_no_time() -> None:
    """Three repeated spaces in a row took 13 s for a line of a kilobyte, in which no heartbeat was sent."""
    began = time.thread_time()
    assert find_step("step" + " " * 5000 + "\n") == find_step("epoch" + " " * 5000 + "\n") == (None, None)
    assert time.thread_time() - began < 1.0


def test_only_whole_lines_count() -> None:
    assert find_step("step=1\nstep=23") == (None, 1)
    assert find_step("step=23") == (None, None)
    assert find_step("| 1/9 [\r| 2/9 [\r| 3") == (None, 2)


def test_the_last_line_that_tells_a_step() -> None:
    assert find_step("step=1\nstep=2\nsaving\nepoch 3 begins\n") == (None, 2)
    assert find_step("epoch 2\nepoch 3\nsaving\n") == (3, None)
