"""Read the user's own texts: csv, tsv, jsonl, parquet, folders of those, folders of class folders with .txt files."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from composer_speedups.errors import TaskError
from composer_speedups.tasks.records import TABLES, as_text, records, text_of, unreadable
from composer_speedups.tasks.texts import Texts

__all__ = ["about_rows", "fingerprint", "read", "sources"]

Part = Literal["train", "evaluation"]
# text, label (None where none is asked for), part (None where the data does not say)
Row = tuple[str, str | None, Part | None]
Chosen = tuple[bytes, str, int]  # hash, text, number of the label

_TRAIN = {"train", "training"}
_EVALUATION = {"test", "eval", "evaluation", "validation", "valid", "val", "dev"}
_MOST_LABELS = 1000
_BEGINNING = 2**20


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
            if kind in (".csv", ".tsv", ".jsonl", ".ndjson"):
                with file.open("rb") as stream:
                    head = stream.read(_BEGINNING)
                total += head.count(b"\n") * size / max(1, len(head))
            elif kind == ".txt":
                total += 1
            else:
                return None
    except OSError:
        return None
    return round(total) or None


def read(
    path: str,
    *,
    text_column: str = "text",
    label_column: str | None = "label",
    split_column: str | None = None,
    eval_path: str | None = None,
    train: int | None = None,
    evaluation: int | None = None,
    seed: int = 0,
    label_names: dict[str, str] | None = None,
) -> Texts:
    """Read `path` (and `eval_path`) into texts to train and to evaluate on, at most as many as asked for.

    What is evaluated on: `eval_path`; or what `split_column` says; or files and folders named train / test; or
    else a tenth of the texts, chosen by a hash of the text, so that equal texts fall on one side.
    `label_column` None leaves labels out (MLM). `label_names` renames labels.
    """
    rows = list(_rows(_existing(path), text_column, label_column, split_column))
    if eval_path is not None:
        rows = _with_apart(rows, path, eval_path, text_column, label_column)
    kept, notes = _cleaned(rows, path, labelled=label_column is not None)
    names = _label_names({label for _, label, _ in kept if label}, len(kept), label_column)
    number = {name: i for i, name in enumerate(names)}
    ordered = sorted(
        ((_hash(seed, text), text, number.get(label or "", 0), part) for text, label, part in kept), key=lambda r: r[:3]
    )
    told = any(part == "evaluation" for *_, part in ordered)
    parts = _as_told(ordered) if told else _by_hash(ordered, evaluation)
    for part, what in (("train", "train"), ("evaluation", "evaluate")):
        if not parts[part]:
            raise TaskError(f"{path!r} leaves no text to {what} on ({len(kept):,} texts): give more, or task.eval_path")
    if told:  # in a part of a few texts, chosen by their hash, it happens
        _check_labels(parts, names, eval_path or path)
    chosen_train, chosen_eval = parts["train"][:train], parts["evaluation"][:evaluation]
    known = {n for _, _, n in chosen_train}
    new = [n for _, _, n in chosen_eval if n not in known]
    if new:
        notes.append(
            f"{len(new):,} of {len(chosen_eval):,} texts to evaluate on have labels that no text to train on has: "
            f"{_some(set(new), names)}"
        )
    if train is not None and train < len(parts["train"]):
        notes.append(
            f"{train:,} of {len(parts['train']):,} texts to train on are used: task.train_samples=null takes all"
        )
    return Texts(
        train=[t for _, t, _ in chosen_train], train_labels=[n for _, _, n in chosen_train],
        evaluation=[t for _, t, _ in chosen_eval], evaluation_labels=[n for _, _, n in chosen_eval],
        label_names=[(label_names or {}).get(name, name) for name in names], notes=notes,
    )  # fmt: skip


def _with_apart(
    rows: Iterable[Row], path: str, eval_path: str, text_column: str, label_column: str | None
) -> list[Row]:
    """`rows` without those to evaluate on, and those of `eval_path` instead."""
    apart = _existing(eval_path, "task.eval_path")
    if apart.samefile(_existing(path)):
        raise TaskError(f"task.eval_path {eval_path!r} is task.path: leave it out, and a part is kept to evaluate on")
    own: list[Row] = [(text, label, "train") for text, label, part in rows if part != "evaluation"]
    return own + [(text, label, "evaluation") for text, label, _ in _rows(apart, text_column, label_column, None)]


def _cleaned(rows: Sequence[Row], path: str, *, labelled: bool) -> tuple[list[Row], list[str]]:
    """The rows that have what is needed, and words on the others."""
    clean = [(_clean(text), None if label is None else label.strip(), part) for text, label, part in rows]
    kept = [row for row in clean if row[0] and (row[1] or not labelled)]
    notes = []
    if empty := sum(not row[0] for row in clean):
        notes.append(f"{empty:,} of {len(clean):,} rows of {path} dropped: no text")
    if unlabelled := len(clean) - len(kept) - empty:
        notes.append(f"{unlabelled:,} of {len(clean):,} rows of {path} dropped: no label")
    if not kept:
        raise TaskError(f"{path!r} holds no row with both text and label ({len(clean):,} rows read): check the columns")
    return kept, notes


def _as_told(ordered: Iterable[tuple[bytes, str, int, Part | None]]) -> dict[Part, list[Chosen]]:
    """As the rows say themselves."""
    parts: dict[Part, list[Chosen]] = {"train": [], "evaluation": []}
    for hashed, text, n, part in ordered:
        parts[part or "train"].append((hashed, text, n))
    return parts


def _by_hash(
    ordered: Sequence[tuple[bytes, str, int, Part | None]], evaluation: int | None
) -> dict[Part, list[Chosen]]:
    """A tenth to evaluate on, or fewer where fewer are asked for."""
    tenth = len(ordered) // 10
    cut = max(1, tenth if evaluation is None else min(evaluation, tenth))
    while cut < len(ordered) and ordered[cut][0] == ordered[cut - 1][0]:
        cut += 1  # equal texts lie side by side: keep them on one side
    return {"train": [row[:3] for row in ordered[cut:]], "evaluation": [row[:3] for row in ordered[:cut]]}


def _check_labels(parts: Mapping[Part, Sequence[Chosen]], names: Sequence[str], source: str) -> None:
    """Raise if no label to evaluate on is one to train on."""
    known, asked = ({n for _, _, n in parts[part]} for part in ("train", "evaluation"))
    if not known & asked:
        raise TaskError(
            f"the labels to evaluate on ({_some(asked, names)}), as {source} has them, do not occur among "
            f"those to train on ({_some(known, names)}): write them alike"
        )


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


def _rows(path: Path, text: str, label: str | None, split: str | None) -> Iterator[Row]:
    if path.is_file():
        yield from _table(path, text, label, split, None)
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
    if found[0].suffix.lower() in TABLES:
        for file in found:
            part = _part(file.relative_to(path).parts)
            if part != "unlabelled":
                yield from _table(file, text, label, split, part)
            elif label is None:
                yield from _table(file, text, None, split, None)
        return
    for file in found:
        folders = file.relative_to(path).parts[:-1]
        part = _part(folders)
        if part == "unlabelled" and label is not None:
            continue
        name = folders[-1]
        if name.lower() in _TRAIN | _EVALUATION:  # a file about the split itself, such as aclImdb's url lists
            continue
        yield text_of(file), name, None if part == "unlabelled" else part


def _part(names: tuple[str, ...]) -> Part | Literal["unlabelled"] | None:
    """What file and folder names say: `train/pos/1.txt`, `test-00000-of-00001.parquet`."""
    for name in names:
        word = re.split(r"[-_.]", name.lower())[0]
        if word in {"unsup", "unsupervised", "unlabeled", "unlabelled"}:
            return "unlabelled"
    for name in names:
        word = re.split(r"[-_.]", name.lower())[0]
        if word in _TRAIN:
            return "train"
        if word in _EVALUATION:
            return "evaluation"
    return None


def _table(file: Path, text: str, label: str | None, split: str | None, part: Part | None) -> Iterator[Row]:
    columns = [text, *([label] if label else []), *([split] if split else [])]
    for number, row in records(file, columns):
        if split is not None:
            word = as_text(row[split], file, number, "split_column", split).strip().lower()
            if word not in _TRAIN | _EVALUATION:
                raise TaskError(
                    f"{str(file)!r}: column {split!r} says {row[split]!r}; it must say train, or test, eval, validation"
                )
            part = "train" if word in _TRAIN else "evaluation"
        name = as_text(row[label], file, number, "label_column", label) if label else None
        yield as_text(row[text], file, number, "text_column", text), name, part


def _clean(text: str) -> str:
    # A lone surrogate (JSON can escape one) cannot be encoded by a tokenizer.
    return text.strip().encode("utf-8", "replace").decode()


def _label_names(labels: set[str], rows: int, column: str | None) -> list[str]:
    if column is None:
        return ["none"]
    if len(labels) < 2:
        raise TaskError(f"column {column!r} holds one label only, {next(iter(labels))!r}: classification needs two")
    if len(labels) > _MOST_LABELS or (len(labels) > 10 and len(labels) > rows // 2):
        raise TaskError(
            f"column {column!r} holds {len(labels):,} different values in {rows:,} rows: that is no label. "
            "Name another task.label_column, or use task.objective=mlm"
        )
    try:
        return sorted(labels, key=int)
    except ValueError:
        return sorted(labels)


def _some(labels: set[int], names: Sequence[str]) -> str:
    shown = ", ".join(repr(names[n]) for n in sorted(labels)[:5])
    return f"{shown} and {len(labels) - 5} more" if len(labels) > 5 else shown


def _hash(seed: int, text: str) -> bytes:
    return hashlib.blake2b(f"{seed}:{text}".encode(), digest_size=12).digest()
