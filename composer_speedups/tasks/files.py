"""Read the user's own texts: csv, tsv, jsonl, parquet, folders of those, folders of class folders with .txt files."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from composer_speedups.errors import TaskError
from composer_speedups.tasks.columns import Columns
from composer_speedups.tasks.labels import ClassOfText, Labels
from composer_speedups.tasks.records import LINES, TABLES, records, text_of, unreadable
from composer_speedups.tasks.splitting import Part, Row, part_of, split
from composer_speedups.tasks.texts import Texts

__all__ = ["about_rows", "fingerprint", "read", "sources"]

_BEGINNING = 2**20

_CLASS_OF_TEXT = ClassOfText()


def fingerprint(path: str, key: str = "task.path") -> list[list[str | int]]:
    """Name, size and time of change of every file under `path`, which `key` names: enough to see that data changed."""
    root = _existing(path, key)
    try:
        files = [root] if root.is_file() else [f for f in _inside(root) if os.path.isfile(f)]
        return [[str(f), (found := f.stat()).st_size, found.st_mtime_ns] for f in files]
    except OSError as error:
        raise unreadable(root, error) from error


def sources(folder: Path) -> list[Path]:
    """The files of `folder` that `read` reads: its tables, or if there are none the documents of its class folders."""
    inside = _inside(folder)
    tables = [f for f in inside if f.suffix.lower() in TABLES and os.path.isfile(f)]
    return tables or [
        f for f in inside if f.suffix == ".txt" and len(f.relative_to(folder).parts) >= 2 and os.path.isfile(f)
    ]


def _inside(folder: Path) -> list[Path]:
    """All below `folder` that is no folder. OSError where one cannot be listed: what is in it would silently lack."""

    def refuse(error: OSError) -> None:
        raise error

    if not os.path.isdir(folder):
        return []
    return sorted(Path(place, name) for place, _, names in os.walk(folder, onerror=refuse) for name in names)


def about_rows(path: str) -> int | None:
    """About how many texts `path` holds, by the lines at its files' beginnings; None if that does not tell."""
    root = Path(os.path.expanduser(path))
    total = 0.0
    try:
        for file in [root] if root.is_file() else sources(root):
            kind, size = file.suffix.lower(), file.stat().st_size
            if kind in LINES:
                with file.open("rb") as stream:
                    head = stream.read(_BEGINNING)
                total += head.count(b"\n") * size / max(1, len(head))
            elif kind == ".parquet":
                import pyarrow.parquet

                total += pyarrow.parquet.read_metadata(file).num_rows
            elif kind == ".txt":
                total += 1
            else:
                return None
    except (OSError, ValueError):  # the latter of what is no Parquet; reading it will tell
        return None
    return round(total) or None


def read(
    path: str,
    *,
    text_column: str = "text",
    text_pair_column: str | None = None,
    labels: Labels | None = _CLASS_OF_TEXT,
    label_column: str = "label",
    label_columns: Sequence[str] | None = None,
    split_column: str | None = None,
    eval_path: str | None = None,
    train: int | None = None,
    evaluation: int | None = None,
    seed: int = 0,
    label_names: dict[str, str] | None = None,
) -> Texts:
    """Read `path` (and `eval_path`) into texts to train and to evaluate on, at most as many as asked for.

    What is evaluated on: `eval_path`; or what `split_column` says; or files and folders named train / test; or
    else a tenth of the texts (`splitting.split`).
    `labels` says how these are written; None leaves them out (MLM). `label_names` renames them; with `label_columns`
    each class has a column.
    """
    columns = Columns.of(
        labels, label_columns, text_column=text_column, text_pair_column=text_pair_column, label_column=label_column,
        split_column=split_column,
    )  # fmt: skip
    rows = list(_rows(_existing(path), columns))
    if eval_path is not None:
        rows = _with_apart(rows, path, eval_path, columns)
    return split(
        rows, path, labels=labels, label_column=label_column, eval_source=eval_path, train=train,
        evaluation=evaluation, seed=seed, order=columns.classes, told_alike=label_names,
    )  # fmt: skip


def _with_apart(rows: Iterable[Row], path: str, eval_path: str, columns: Columns) -> list[Row]:
    """`rows` without those to evaluate on, and those of `eval_path` instead."""
    apart = _existing(eval_path, "task.eval_path")
    if apart.samefile(_existing(path)):
        raise TaskError(f"task.eval_path {eval_path!r} is task.path: leave it out, and a part is kept to evaluate on")
    own = [row._replace(part="train") for row in rows if row.part != "evaluation"]
    return own + [row._replace(part="evaluation") for row in _rows(apart, columns.without("split_column"))]


def _existing(path: str, key: str = "task.path") -> Path:
    found = Path(os.path.expanduser(path))  # a home that nobody has stays as it is, and is not there
    if not os.path.exists(found):
        raise TaskError(
            f"{key} {path!r} is not there (seen from {str(Path.cwd())!r}): give the path of a csv, tsv, "
            "jsonl or parquet file, or of a folder"
        )
    if not os.path.isfile(found) and not os.path.isdir(found):
        kind = {"p": "named pipe", "s": "socket"}.get(stat.filemode(found.stat().st_mode)[0], "device")
        raise TaskError(f"{key} {path!r} is a {kind}, no file or folder: write what it gives into a file")
    return found


def _rows(path: Path, columns: Columns) -> Iterator[Row]:
    if path.is_file():
        yield from _table(path, columns, None)
        return
    try:
        found = sources(path)
    except OSError as error:
        raise unreadable(path, error) from error
    if not found:
        raise TaskError(
            f"folder {str(path)!r} holds neither {', '.join(TABLES)} files nor class folders with .txt files: "
            "give the folder that does"
        )
    labelled = bool(columns.classes) or "label_column" in columns.by_key
    if found[0].suffix.lower() in TABLES:
        for file in found:
            part = _part(file.relative_to(path).parts)
            if part != "unlabelled":
                yield from _table(file, columns, part)
            elif not labelled:
                yield from _table(file, columns, None)
        return
    if "text_pair_column" in columns.by_key:
        raise TaskError(
            f"folder {str(path)!r} holds .txt files, each of one text: pairs (task.text_pair_column) are read from "
            f"{', '.join(TABLES)} files"
        )
    for file in found:
        folders = file.relative_to(path).parts[:-1]
        part = _part(folders)
        if part == "unlabelled" and labelled:
            continue
        name = folders[-1]
        if part_of(name) is not None:  # a file about the split itself, such as aclImdb's url lists
            continue
        yield Row(text_of(file), name, None if part == "unlabelled" else part)


def _part(names: tuple[str, ...]) -> Part | Literal["unlabelled"] | None:
    """What file and folder names say: `train/pos/1.txt`, `test-00000-of-00001.parquet`."""
    words = [re.split(r"[-_.]", name.lower())[0] for name in names]
    if {"unsup", "unsupervised", "unlabeled", "unlabelled"}.intersection(words):
        return "unlabelled"
    return next((part for word in words if (part := part_of(word)) is not None), None)


def _table(file: Path, columns: Columns, part: Part | None) -> Iterator[Row]:
    for number, row in records(file, columns.names):
        cells = columns.cells(row, file, number)
        if "split_column" in cells:
            part = part_of(cells["split_column"])
            if part is None:
                name = columns.by_key["split_column"]
                raise TaskError(
                    f"{str(file)!r}: column {name!r} says {row[name]!r}; it must say train, or test, eval, validation"
                )
        yield Row.of(cells, part)
