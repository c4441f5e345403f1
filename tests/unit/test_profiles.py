"""Lines of real programs, with the version of the source that formats them, and the numbers that a profile reads there."""

from __future__ import annotations

import json
import math
import time

import pytest

from clustertool.model.job.progress import NOTHING, PROFILES, Metrics, find_metrics
from clustertool.model.shape import Malformed, read, to_plain

BAR = "\x1b[32m━━━\x1b[0m\x1b[37m━━━━━━━━━━━━━━━━━\x1b[0m"
LINES = {
    # workspaces/word2vec of this project
    ("plain", "epoch=23 step=1989 loss=2.0506 pairs/s=100494"): Metrics(epoch=23, step=1989, loss=2.0506),
    ("plain", "step 12/100 loss nan lr=1e-4 1200.5 tokens/s"): Metrics(
        step=12, total_steps=100, percent=12.0, loss=math.nan, lr=1e-4, tokens_per_second=1200.5
    ),
    # pytorch/examples mnist/main.py, 2024
    ("plain", "Train Epoch: 3 [1280/60000 (2%)]\tLoss: 0.302511"): Metrics(epoch=3, loss=0.302511),
    # torchtitan, main of 2025, components/metrics.py: MetricsProcessor.log()
    (
        "plain",
        "\x1b[31mstep: 10  \x1b[32mloss:  7.9361  \x1b[38;2;180;60;0mgrad_norm:  1.25  \x1b[34mtps: 12,345  mfu: 9.8%",
    ): (Metrics(step=10, loss=7.9361, tokens_per_second=12345)),
    # tqdm 4.70.1, std.py: format_meter()
    ("tqdm and Lightning", "train:  45%|████▌     | 450/1000 [00:10<00:12, 45.00it/s, loss=0.31]"): Metrics(
        step=450, total_steps=1000, percent=45.0, loss=0.31, steps_per_second=45.0
    ),
    ("tqdm and Lightning", "  0%|          | 3/1000 [00:10<55:23,  3.33s/it]"): Metrics(
        step=3, total_steps=1000, percent=0.3, steps_per_second=1 / 3.33
    ),
    ("tqdm and Lightning", " 45%|####5     | 450/1000 [00:10<00:12, 4.50ktok/s]"): Metrics(
        step=450, total_steps=1000, percent=45.0, tokens_per_second=4500.0
    ),
    # transformers 5.24.0, trainer_callback.py: ProgressCallback (the values are strings) and PrinterCallback
    ("Hugging Face Trainer", "{'loss': '0.5123', 'grad_norm': '1.25', 'learning_rate': '1.5e-05', 'epoch': '0.25'}"): (
        Metrics(epoch=0.25, loss=0.5123, lr=1.5e-05)
    ),
    ("Hugging Face Trainer", "{'loss': nan, 'grad_norm': nan, 'learning_rate': 5e-05, 'epoch': 0.5}"): Metrics(
        epoch=0.5, loss=math.nan, lr=5e-05
    ),
    ("Hugging Face Trainer", "{'eval_loss': '0.7', 'eval_samples_per_second': '9.5', 'epoch': '1'}"): Metrics(epoch=1),
    (
        "Hugging Face Trainer",
        "{'train_runtime': '9.1', 'train_samples_per_second': '87.2', 'train_steps_per_second': '10.9', "
        "'train_loss': '0.6', 'epoch': '3'}",
    ): Metrics(epoch=3, steps_per_second=10.9, samples_per_second=87.2),
    # lightning 2.6.6, callbacks/progress/tqdm_progress.py: BAR_FORMAT
    (
        "tqdm and Lightning",
        "Epoch 3:  16%|█▌        | 10/64 [00:10<00:54,  1.00it/s, v_num=0, train_loss=0.123]",
    ): Metrics(epoch=3, step=10, total_steps=64, loss=0.123, steps_per_second=1.0),
    ("tqdm and Lightning", "Validation DataLoader 0:  50%|█████     | 5/10 [00:10<00:10,  0.50it/s]"): Metrics(),
    # Megatron-LM, main of November 2025, training/training.py: training_log()
    (
        "Megatron",
        " [2025-11-20 10:00:00] iteration       20/  500000 | consumed samples:          320 | elapsed time per iteration "
        "(ms): 500.0 | throughput per GPU (TFLOP/s/GPU): 180.2 | learning rate: 1.500000E-04 | global batch size:    16 | "
        "lm loss: 1.034567E+01 | loss scale: 1.0 | grad norm: 2.345 | number of skipped iterations:   0 |",
    ): Metrics(
        step=20,
        total_steps=500000,
        percent=0.0,
        loss=10.34567,
        lr=1.5e-4,
        steps_per_second=2.0,
        samples_per_second=32.0,
    ),
    # deepspeed 0.19.8, utils/timer.py: ThroughputTimer, and runtime/engine.py: _report_progress()
    (
        "DeepSpeed",
        "[Rank 0] epoch=0/micro_step=20/global_step=10, RunningAvgSamplesPerSec=41.5, CurrSamplesPerSec=44.25, "
        "MemAllocated=0.5GB, MaxMemAllocated=0.75GB",
    ): Metrics(epoch=0, step=10, samples_per_second=44.25),
    ("DeepSpeed", "[Rank 0] step=10, skipped=0, lr=[0.001], mom=[(0.9, 0.999)]"): Metrics(step=10, lr=0.001),
    # paddlenlp 2.8.1, trainer/trainer.py: _maybe_log_save_evaluate()
    (
        "PaddleNLP",
        "[2025-11-20 10:00:00,123] [    INFO] - loss: 0.68, learning_rate: 2.9e-05, global_step: 10, interval_runtime: "
        "1.2, interval_samples_per_second: 66.66, interval_steps_per_second: 8.33, progress_or_epoch: 0.25",
    ): Metrics(epoch=0.25, step=10, loss=0.68, lr=2.9e-05, steps_per_second=8.33, samples_per_second=66.66),
    # paddle, develop of 2022, hapi/progressbar.py
    (
        "Paddle and Keras",
        "step  10/469 [..............................] - loss: 2.2876 - acc: 0.1 - ETA: 5s - 12ms/step",
    ): Metrics(step=10, total_steps=469, loss=2.2876, steps_per_second=1 / 0.012),
    ("Paddle and Keras", "step 20/469 - loss: 1.9301 - acc: 0.3 - 2s/step"): Metrics(
        step=20, total_steps=469, loss=1.9301, steps_per_second=0.5
    ),
    # keras 3.15.1, utils/progbar.py: verbose 1, as it is printed into a file, and verbose 2
    (
        "Paddle and Keras",
        f"\x1b[1m12/64\x1b[0m {BAR} \x1b[1m1s\x1b[0m 25ms/step - accuracy: 0.5 - loss: 1.2500  \b\b\b",
    ): Metrics(step=12, total_steps=64, loss=1.25, steps_per_second=40.0),
    ("Paddle and Keras", "64/64 - 1s - 10ms/step - accuracy: 0.5000 - loss: 1.2500 - val_loss: 9.0"): Metrics(
        step=64, total_steps=64, loss=1.25, steps_per_second=100.0
    ),
}


@pytest.mark.parametrize("profile, line", LINES)
def test_a_line_of_a_program(profile: str, line: str) -> None:
    found = find_metrics(f"{line}\n")
    for value, wanted in zip(found, LINES[profile, line]):
        assert value == pytest.approx(wanted, nan_ok=True)


def test_each_profile_has_a_line() -> None:
    assert {profile for profile, _ in LINES} == set(PROFILES)


@pytest.mark.parametrize(
    "line",
    ["val_loss=0.5", "eval_loss: 3", "validation loss 2.1", "loss scale: 1.0", "loss_fn=3", "lossless 3", "color=3"],
)
def test_what_is_no_number_of_the_training(line: str) -> None:
    assert find_metrics(f"{line}\n") == NOTHING


def test_the_percentage_of_a_bar_in_an_epoch_is_that_of_the_job() -> None:
    keras = "Epoch 3/10\n\x1b[1m16/64\x1b[0m ━━━ \x1b[1m1s\x1b[0m 25ms/step - loss: 1.25\r"
    found = find_metrics(keras)
    assert (found.epoch, found.step, found.percent) == (3, 16, 22.5)
    # the line with the epoch is no more in the end of the log that is read
    later = find_metrics("\x1b[1m32/64\x1b[0m ━━━ \x1b[1m1s\x1b[0m 25ms/step - loss: 1.25\r").after(found)
    assert (later.epoch, later.step, later.percent) == (3, 32, 25.0)


def test_numbers_of_several_lines() -> None:
    bar = " 45%|####5     | 450/1000 [00:10<00:12, 45.00it/s]"
    text = f"{{'loss': '0.5', 'learning_rate': '1e-05', 'epoch': '0.25'}}\n\r{bar}\r"
    found = find_metrics(text)
    assert (found.epoch, found.step, found.percent, found.loss, found.lr) == (0.25, 450, 45.0, 0.5, 1e-05)
    assert find_metrics("step=1/4 loss=3\nstep=2\n") == Metrics(step=2, loss=3)  # the total is of another line


def test_what_a_program_does_not_print_any_more_stays() -> None:
    before = Metrics(step=2, total_steps=4, percent=50.0, loss=0.5)
    assert find_metrics("step=3/4\n").after(before) == Metrics(step=3, total_steps=4, percent=75.0, loss=0.5)
    assert find_metrics("saving\n").after(before) == before
    assert find_metrics("step=3\n").after(before) == before._replace(step=3), "of how many is not known"


@pytest.mark.parametrize(
    "line",
    [
        "step=" + "9" * 8000,
        "loss=" + "1e" * 4000,
        "loss" + " " * 8000 + "=3",
        "| 1/9 [" * 1100,
        "{'a': " * 1300 + "}",
        "Epoch 1: " + "|" * 8000,
        "1/1 " + "1ms/ste" * 1100,
        "[" * 4000 + "<" * 4000,
        "loss=" * 1600,
        "\x1b[" + "1;" * 4000,
    ],
)
def test_a_hostile_line_costs_little(line: str) -> None:
    began = time.process_time()
    found = find_metrics(f"{line}\n")
    assert time.process_time() - began < 0.2
    json.dumps(to_plain([*found]), allow_nan=False)


def test_values_have_limits() -> None:
    found = find_metrics("step=5 loss=-1e999 lr=-3 samples/s=inf\n")
    assert found == Metrics(step=5, loss=-math.inf)
    row = [None, 5, None, None, None, None, "-Infinity", *[None] * 4]
    assert to_plain([*found]) == row
    assert read(Metrics, row) == found


@pytest.mark.parametrize("loss", ["-1.7e308", "1e999", "nan", "0"])
def test_a_node_can_send_any_loss(loss: str) -> None:
    found = find_metrics(f"loss={loss}\n")
    assert to_plain(read(Metrics, json.loads(json.dumps(to_plain([*found]))))) == to_plain(found)


@pytest.mark.parametrize(
    "row",
    [
        [[]],
        ["x"],
        [True],
        [1] * 21,
        {"loss": "x"},
        None,
        [float("nan")],
        [None, -1],
        [None, 1e19],
        [*[None] * 4, 101],
        [*[None] * 6, [[]]],
        [*[None] * 6, float("nan")],
    ],
)
def test_what_is_no_row_of_numbers(row: object) -> None:
    with pytest.raises(Malformed):
        read(Metrics, row)
