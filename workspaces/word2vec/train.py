"""A trainer: learns word vectors (skip-gram with negative sampling) from its own shards of the text.

Each step: take a batch of (word, neighbour) pairs, draw random words as counter-examples, pull the vectors of
all these words from the pservers (table.py), compute how each should move, push that. Trainers never talk to
one another, and none sees another's text: they meet in the table only. At the end trainer 0 writes the model.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Iterator, NoReturn

import numpy as np
import pserver
from table import Table, TableLost

if TYPE_CHECKING:
    from wire import Ints

DICTIONARY = Path("train_data_dir/word_dict.txt")
BAD_DATA = 65
SHOWN = "class function string import integer exception"


class Words:
    """The dictionary: a word's line number is its id, and its count says how common it is."""

    def __init__(self, path: Path) -> None:
        lines = [line.split() for line in path.read_text().splitlines()]
        self.names = [name for name, _ in lines]
        self.ids = {name: i for i, name in enumerate(self.names)}
        share = np.array([int(count) for _, count in lines], float)
        share /= share.sum()
        self.noise = np.cumsum(share**0.75) / np.sum(share**0.75)  # how often each word is a counter-example
        self.keep = np.minimum(1, np.sqrt(1e-3 / share))  # "the" and "of" teach little: read most past

    def __len__(self) -> int:
        return len(self.names)


def read_shards(words: Words, listing: Path) -> list[Ints]:
    """This trainer's text, as one array of word ids for each line. `listing` names its files, one a line."""
    text = "".join(Path(path).read_text() for path in listing.read_text().splitlines())
    return [
        np.array([words.ids[word] for word in line.split() if word in words.ids], np.int32)
        for line in text.splitlines()
    ]


def pairs(lines: list[Ints], words: Words, window: int, rng: np.random.Generator) -> Ints:
    """One epoch of (word, neighbour) pairs in random order; near neighbours come more often than far ones."""
    lines = [line[rng.random(len(line)) < words.keep[line]] for line in lines]
    text = np.concatenate([np.empty(0, np.int32), *lines])
    line_of = np.repeat(np.arange(len(lines)), [len(line) for line in lines])
    reach = rng.integers(1, window + 1, len(text))
    found = [np.empty((0, 2), np.int32)]
    for step in range(1, window + 1):
        left, right = text[:-step], text[step:]
        together = line_of[:-step] == line_of[step:]
        found.append(np.stack([left, right], 1)[together & (reach[:-step] >= step)])
        found.append(np.stack([right, left], 1)[together & (reach[step:] >= step)])
    return rng.permutation(np.concatenate(found))


def batches(lines: list[Ints], words: Words, args: argparse.Namespace, seed: int) -> Iterator[tuple[int, Ints, Ints]]:
    """(epoch, words, candidates): the first candidate of a word is its true neighbour, the rest are noise."""
    rng = np.random.default_rng(seed)
    for epoch in range(1, args.epochs + 1):
        found = pairs(lines, words, args.window, rng)
        for start in range(0, len(found), args.batch):
            batch = found[start : start + args.batch]
            noise = np.searchsorted(words.noise, rng.random((len(batch), args.negatives)))
            yield epoch, batch[:, 0], np.concatenate([batch[:, 1:], noise.astype(np.int32)], 1)


def train_step(table: Table, word: Ints, candidates: Ints) -> float:
    """Pull, compute, push. Returns the mean loss of a pair: 4.16 = 6 ln 2 when nothing is known yet."""
    # The table has two vectors for a word: row w as itself, row w + size as a neighbour.
    wanted = np.concatenate([word, candidates.ravel() + table.rows // 2])
    keys, place = np.unique(wanted, return_inverse=True)
    rows = table.pull(keys)[place]
    x, y = rows[: len(word)], rows[len(word) :].reshape(*candidates.shape, -1)
    sign = np.where(np.arange(candidates.shape[1]) == 0, -1, 1).astype(np.float32)
    scores = sign * np.einsum("bd,bkd->bk", x, y)  # negative when right: neighbour alike, noise unlike
    slope = (sign * (1 + np.tanh(scores / 2)) / 2)[:, :, None]  # the logistic function, as it can't overflow
    moves = np.concatenate([(slope * y).sum(1), (slope * x[:, None, :]).reshape(-1, table.dim)])
    order = np.argsort(place, kind="stable")  # a word can be in a batch many times: sum its moves
    table.push(keys, np.add.reduceat(moves[order], np.searchsorted(place[order], np.arange(len(keys)))))
    return float(np.logaddexp(0, scores).sum(1).mean())


def train(table: Table, words: Words, lines: list[Ints], args: argparse.Namespace, seed: int) -> None:
    say(f"read words={sum(map(len, lines))} lines={len(lines)} dictionary={len(words)}")
    started = reported = time.monotonic()
    losses: list[float] = []
    done = 0
    for epoch, word, candidates in batches(lines, words, args, seed):
        losses.append(train_step(table, word, candidates))
        done += len(word)
        now = time.monotonic()
        if len(losses) == 1 or now - reported > args.report:
            reported = now
            speed = done / (now - started)
            say(f"epoch={epoch} step={len(losses)} loss={np.mean(losses[-100:]):.4f} pairs/s={speed:.0f}")
    if losses:
        seconds = time.monotonic() - started
        say(f"trained steps={len(losses)} loss={np.mean(losses[-100:]):.4f} seconds={seconds:.1f}")


def save(table: Table, words: Words) -> None:
    """The whole table, which no process but this one ever holds, as files and as something to look at."""
    whole = table.pull(np.arange(table.rows, dtype=np.int32))
    vectors, contexts = whole[: len(words)], whole[len(words) :]
    out = Path(os.environ.get("CLUSTERTOOL_OUTPUT", "output"))
    out.mkdir(parents=True, exist_ok=True)
    np.savez(out / "model.npz", vectors=vectors, contexts=contexts)
    (out / "word_dict.txt").write_bytes(DICTIONARY.read_bytes())
    say(f"wrote {out / 'model.npz'} and {out / 'word_dict.txt'}")
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for name in SHOWN.split():
        if name in words.ids:
            nearest = np.argsort(-unit @ unit[words.ids[name]])[1:7]
            say(f"nearest to {name}: {' '.join(words.names[i] for i in nearest)}")


def say(text: str) -> None:
    print(text, flush=True)


def fail(text: str, code: int) -> NoReturn:
    print(text, file=sys.stderr, flush=True)
    sys.exit(code)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train word vectors on parameter servers.")
    parser.add_argument("--sync", action="store_true", default=True, help="all step together (default)")
    parser.add_argument("--async", action="store_false", dest="sync", help="each trainer at its own pace")
    parser.add_argument("--epochs", type=int, default=24, help="times through the text")
    parser.add_argument("--dim", type=int, default=48, help="numbers in a vector")
    parser.add_argument("--window", type=int, default=5, help="how far away a neighbour may be")
    parser.add_argument("--negatives", type=int, default=5, help="counter-examples for each pair")
    parser.add_argument("--batch", type=int, default=512, help="pairs in a step of one trainer")
    parser.add_argument("--lr", type=float, default=0.1, help="how far one step moves")
    parser.add_argument("--report", type=float, default=2, help="seconds between lines with the loss")
    return parser.parse_args()


def main() -> None:
    args = options()
    try:
        rank = int(os.environ["PADDLE_TRAINER_ID"])
        endpoints = os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(",")
        words = Words(DICTIONARY)
        lines = read_shards(words, Path(os.environ["CLUSTERTOOL_SHARDS"]))
    except KeyError as missing:
        fail(f"{missing} is not set; start this with `inv run --workspace workspaces/word2vec`", 1)
    except OSError as error:
        fail(f"no {error.filename}: run `python workspaces/word2vec/prepare.py` before `inv run`", BAD_DATA)
    try:
        table = Table(endpoints, (2 * len(words), args.dim))
        table.hello(rank, args.sync, args.lr)
        if lines:
            train(table, words, lines, args, seed=rank)
        else:
            say("no shard is mine (fewer shards than trainers): nothing to learn from")
        table.leave()
        if rank == 0:
            table.wait_for_all()
            save(table, words)
    except TableLost as error:
        fail(str(error), 1)


if __name__ == "__main__":
    # `inv run --script "train.py ..."` starts this file in every role.
    pserver.main() if os.environ.get("TRAINING_ROLE") == "PSERVER" else main()
