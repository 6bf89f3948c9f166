"""Read a data set of the Hugging Face hub, or a folder that the library `datasets` reads, as texts with labels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_speedups.errors import TaskError, in_a_line
from composer_speedups.tasks import hub
from composer_speedups.tasks.columns import Columns
from composer_speedups.tasks.labels import class_names
from composer_speedups.tasks.objectives import OBJECTIVES
from composer_speedups.tasks.spec import TaskSpec
from composer_speedups.tasks.splitting import Part, Row, split
from composer_speedups.tasks.texts import Texts, pick

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

__all__ = ["fingerprint", "load", "load_from_hub", "read"]

_ROWS_AT_ONCE = 1000
_DRAWN = 20  # times as many rows as are asked for are looked at: of millions, reading all takes minutes and gigabytes


def load(spec: TaskSpec) -> DatasetDict:
    """All splits of the data set that `spec` names, from its folder, the local cache or the hub."""
    assert spec.path is not None
    folder = os.path.expanduser(spec.path)
    if os.path.isdir(folder):
        if spec.revision is not None:
            raise TaskError(f"task.revision is of data sets on the hub, and {spec.path!r} is a folder: remove it")
        if any((Path(folder) / name).is_file() for name in ("dataset_dict.json", "state.json")):
            return _saved(spec.path, folder)
        return _loaded(spec.path, folder, "give a folder that it reads, or task.name=text", spec.subset)
    otherwise = "set task.path to a local folder"
    return load_from_hub(spec.path, otherwise, spec.subset, spec.revision)


def _saved(name: str, folder: str) -> DatasetDict:
    """What `save_to_disk` has written: a data set with its splits, or one that is the split to train on."""
    import datasets

    try:
        found = datasets.load_from_disk(folder)
    except Exception as error:  # whatever a file's reader raises
        raise TaskError(f"data set {name!r} cannot be loaded ({in_a_line(error)}): save it again") from error
    return found if isinstance(found, datasets.DatasetDict) else datasets.DatasetDict(train=found)


def load_from_hub(name: str, otherwise: str, subset: str | None = None, revision: str | None = None) -> DatasetDict:
    """The data set `name` with all its splits; `otherwise` says what else to do where it cannot be had."""
    import datasets

    owner, _, own = name.rpartition("/")
    folder = "___".join(filter(None, (owner, datasets.naming.camelcase_to_snakecase(own))))
    kept = Path(datasets.config.HF_DATASETS_CACHE) / folder / (subset or "")
    if not kept.exists() and (why := hub.unreachable()):
        raise TaskError(f"{name} cannot be had from the Hugging Face hub ({why}): connect to it, or {otherwise}")
    found = _loaded(name, name, f"check its name, or {otherwise}", subset, revision)
    # Without the hub `datasets` takes what was used last, whatever revision is asked for.
    there = {Path(file["filename"]).parent.name for part in found.values() for file in part.cache_files}
    if revision is not None and there != {revision} and (why := hub.unreachable()):
        raise TaskError(
            f"revision {revision!r} of {name} cannot be told from others without the Hugging Face hub ({why}): connect "
            f"to it, or name the commit that is in the cache ({', '.join(sorted(there))})"
        )
    return found


def _loaded(name: str, place: str, remedy: str, subset: str | None = None, revision: str | None = None) -> DatasetDict:
    import datasets

    bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # we have our own
    try:
        return datasets.load_dataset(place, subset, revision=revision)
    except Exception as error:  # of the network, of what is not there, and whatever a file's reader raises
        if "onfig name is missing" in str(error) or (subset is not None and "BuilderConfig" in str(error)):
            remedy = "name one by task.subset"
        raise TaskError(f"data set {name!r} cannot be loaded ({in_a_line(error)}): {remedy}") from error
    finally:
        if bars:
            datasets.enable_progress_bars()


def fingerprint(data: DatasetDict) -> list[list[Any]]:
    """What tells this content of the data set from another."""
    places = ((name, part, [Path(file["filename"]) for file in part.cache_files]) for name, part in data.items())
    return [
        [name, part.num_rows, [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in found]]
        for name, part, found in places
    ]


def read(data: DatasetDict, spec: TaskSpec) -> Texts:
    """The texts of `spec`'s splits and columns; see `splitting.split` for what is evaluated on where no split is."""
    assert spec.path is not None
    labels = OBJECTIVES[spec.objective].labels
    columns = Columns.of(
        labels, spec.label_columns, text_column=spec.text_column, text_pair_column=spec.text_pair_column,
        label_column=spec.label_column,
    )  # fmt: skip
    splits: dict[str, Part] = {_split(data, spec, "train_split", spec.train_split): "train"}
    usual = (name for name in ("validation", "test") if name in data and name not in splits)
    label = columns.by_key.get("label_column")
    apart = spec.eval_split or next((name for name in usual if _told(data[name], label)), None)
    if apart is not None:
        splits[_split(data, spec, "eval_split", apart)] = "evaluation"
    rows: list[Row] = []
    read = 1.0
    for n, (name, part) in enumerate(splits.items()):
        told = None if apart is None else part
        some = _some(data[name], _looked_at(spec, told), spec.data_seed + n)
        rows += _rows(some, spec, name, columns, told)
        if part == "train":
            read = some.num_rows / max(1, data[name].num_rows)
    order = columns.classes if label is None else class_names(data[spec.train_split].features[label])
    return split(
        rows, spec.path, labels=labels, label_column=spec.label_column, train=spec.train_samples,
        evaluation=spec.eval_samples, seed=spec.data_seed, order=order or (), read=read,
        remedy="name others by task.train_split or eval_split",
    )  # fmt: skip


def _told(data: Dataset, label: str | None) -> bool:
    """Whether it has labels; competitions keep those of the test to themselves, and write -1."""
    if label not in data.features or not hasattr(data.features[label], "names"):
        return True
    return any(number is not None and number >= 0 for number in data[label])


def _split(data: DatasetDict, spec: TaskSpec, key: str, name: str) -> str:
    if name not in data:
        raise TaskError(f"data set {spec.path!r} has no split {name!r}: set task.{key} to one of {', '.join(data)}")
    return name


def _looked_at(spec: TaskSpec, part: Part | None) -> int | None:
    """Of how many rows those of `part` are chosen; of None both, of which a tenth at most is to evaluate on."""
    train, evaluation = spec.train_samples, spec.eval_samples
    if part is None:
        return None if train is None or evaluation is None else _DRAWN * (train + evaluation)
    asked = evaluation if part == "evaluation" else train
    return None if asked is None else _DRAWN * asked


def _some(data: Dataset, count: int | None, seed: int) -> Dataset:
    return data if count is None or count >= data.num_rows else data.select(pick(data.num_rows, count, seed))


def _rows(data: Dataset, spec: TaskSpec, name: str, columns: Columns, part: Part | None) -> Iterator[Row]:
    place = Path(f"{spec.path}, {name}")
    for key, column in columns.items():
        if column not in data.features:
            there = ", ".join(data.features)
            raise TaskError(f"{str(place)!r} has no column {column!r}: set task.{key} to one of {there}")
    # A 1 in a column of its own is no number of a name.
    known = {name: class_names(data.features[name]) for name in columns.names if name not in columns.classes}
    number = 0
    for batch in data.select_columns(columns.names).iter(_ROWS_AT_ONCE):
        for values in zip(*(batch[name] for name in columns.names), strict=True):
            number += 1
            named = zip(columns.names, values, strict=True)
            row = {name: _named(value, names) if (names := known.get(name)) else value for name, value in named}
            yield Row.of(columns.cells(row, place, number), part)


def _named(value: Any, classes: Sequence[str]) -> Any:
    """The name of a class's number, or of each one's in a list; -1 stands for a class that is kept secret."""
    if isinstance(value, list):
        return [_named(item, classes) for item in value]
    return classes[value] if value is not None and value >= 0 else None
