"""Text in, shards and a dictionary out. Runs once, on the laptop, before the job.

The text is the Python language reference, which every Python carries with it (pydoc_data.topics), so nothing
has to be downloaded. The same Python always writes the same bytes.

    python workspaces/word2vec/prepare.py
    inv run --workspace workspaces/word2vec
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

HERE = Path(__file__).resolve().parent


def paragraphs() -> list[list[str]]:
    """Every paragraph of the reference once (topics quote one another), as lowercase words."""
    texts = [part for name in sorted(topics) for part in re.split(r"\n\s*\n", topics[name])]
    words = [re.findall(r"[a-z]{2,}", text.lower()) for text in dict.fromkeys(texts)]
    return [line for line in words if len(line) > 1]


def dictionary(lines: list[list[str]], min_count: int) -> list[tuple[str, int]]:
    """The words worth learning, most frequent first: a word's place in this list is its id everywhere."""
    counts = Counter(word for line in lines for word in line)
    return sorted(((w, n) for w, n in counts.items() if n >= min_count), key=lambda item: (-item[1], item[0]))


def write(out: Path, lines: list[list[str]], words: list[tuple[str, int]], shards: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("train.txt-*"):  # a run with fewer shards must not leave some of the former ones
        old.unlink()
    # Not named like a shard: every trainer needs the whole dictionary, but only its own shards.
    (out / "word_dict.txt").write_text("".join(f"{word} {count}\n" for word, count in words))
    for number, part in enumerate(deal(lines, shards)):
        (out / f"train.txt-{number:05d}").write_text("".join(" ".join(line) + "\n" for line in part))


def deal(lines: list[list[str]], shards: int) -> list[list[list[str]]]:
    """Each line to the shard with the fewest words so far: equal sizes, each a fair sample of the text."""
    parts: list[list[list[str]]] = [[] for _ in range(shards)]
    sizes = [0] * shards
    for line in lines:
        smallest = sizes.index(min(sizes))
        parts[smallest].append(line)
        sizes[smallest] += len(line)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description="Cut the Python reference into shards for word2vec.")
    parser.add_argument("--out", type=Path, default=HERE / "train_data_dir", help="where the files go")
    parser.add_argument(
        "--shards", type=int, default=24, help="files to cut into (default 24: even for 2, 3, 4, 6, 8 trainers)"
    )
    parser.add_argument("--min-count", type=int, default=6, help="rarer words are left out of the dictionary")
    args = parser.parse_args()
    if args.shards < 1:
        parser.error("--shards must be at least 1")
    lines = paragraphs()
    words = dictionary(lines, args.min_count)
    write(args.out, lines, words, args.shards)
    print(
        f"{sum(map(len, lines))} words of text in {args.shards} shards, "
        f"{len(words)} words in the dictionary: {args.out}"
    )


if __name__ == "__main__":
    main()
