"""Texts whose lengths say nothing of their class, for what depends on the order of lengths (`grouping.py`).

    python -m benchmarks.balanced_texts bert-base-uncased balanced.csv

The embedded corpus, of which each class gives as many texts of a length as the class that has the fewest of it: lengths
in tokens of that tokenizer, with its special ones, in steps of four; all that are cut (`--length`) count as one length.
The order is random, by `--seed`. Labels are balanced, too, by that.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["balance"]

_STEP = 4  # tokens: what of a class's lengths is left to be told by, when a class has every step alike


def balance(
    texts: Iterable[tuple[str, str]], length_of: Callable[[str], int], cut: int, seed: int
) -> list[tuple[str, str]]:
    """Of (text, label) pairs as many of each label as each other, in every step of lengths; shuffled."""
    steps: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    labels = set()
    for text, label in texts:
        steps[min(length_of(text), cut) // _STEP][label].append(text)
        labels.add(label)
    drawn = random.Random(seed)
    kept = []
    for _, by_label in sorted(steps.items()):
        each = min(len(by_label[label]) for label in labels)
        kept += [(text, label) for label in sorted(labels) for text in drawn.sample(by_label[label], each)]
    drawn.shuffle(kept)
    return kept


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="a name or a folder, as AutoTokenizer takes it")
    parser.add_argument("out", type=Path, help="csv, with the columns text and label")
    parser.add_argument("--length", type=int, default=128, help="tokens at which texts will be cut (default: 128)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    from transformers import AutoTokenizer

    from composer_speedups.tasks import docstrings

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    found = docstrings.collect(None, None, progress=lambda line: print(line, end="\r", file=sys.stderr))
    pairs = zip(
        found.train + found.evaluation,
        (found.label_names[label] for label in found.train_labels + found.evaluation_labels),
        strict=True,
    )
    kept = balance(pairs, lambda text: len(tokenizer(text)["input_ids"]), options.length, options.seed)
    with options.out.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *kept])
    print(f"\n{options.out}: {len(kept):,} texts, {len(kept) // len(found.label_names):,} of each class")
    return 0


if __name__ == "__main__":
    sys.exit(main())
