"""IMDB film reviews (Maas et al., 2011): 25,000 to train and 25,000 to evaluate on, positive or negative."""

from __future__ import annotations

from composer_speedups.tasks import files, hub_texts
from composer_speedups.tasks.labels import Labels
from composer_speedups.tasks.texts import Texts, pick

__all__ = ["read"]

_REPOSITORY = "stanfordnlp/imdb"
_NAMES = {"0": "neg", "1": "pos"}
_OTHERWISE = "set task.path to a local folder or parquet file of IMDB (task.name: docstrings needs no download)"


def read(path: str | None, train: int | None, evaluation: int | None, seed: int, labels: Labels | None) -> Texts:
    """From the hub, or from `path`: parquet files, or the folder of Stanford's archive (train/pos, test/neg, ...)."""
    if path is not None:
        return files.read(path, labels=labels, train=train, evaluation=evaluation, seed=seed, label_names=_NAMES)
    data = hub_texts.load_from_hub(_REPOSITORY, _OTHERWISE)
    parts = {part: data[part] for part in ("train", "test")}
    chosen = {
        "train": pick(len(parts["train"]), train, seed),
        "test": pick(len(parts["test"]), evaluation, seed + 1),
    }
    texts = {part: parts[part].select(chosen[part]) for part in parts}
    return Texts(
        train=list(texts["train"]["text"]), train_labels=list(texts["train"]["label"]),
        evaluation=list(texts["test"]["text"]), evaluation_labels=list(texts["test"]["label"]),
        label_names=list(_NAMES.values()),
    )  # fmt: skip
