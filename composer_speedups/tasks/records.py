"""What a file of the user's holds: rows of csv, tsv, jsonl and parquet, their cells as text, or one document."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from composer_speedups.errors import TaskError, first_line
from composer_speedups.tasks.labels import as_cell

__all__ = ["LINES", "TABLES", "as_class", "as_text", "records", "text_of", "unreadable"]

LINES = (".csv", ".tsv", ".jsonl", ".ndjson")
TABLES = (*LINES, ".parquet")
_WHOLE = re.compile(r"(-?\d+)\.0+")


def records(file: Path, columns: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows by their line, or in Parquet by their number from 1."""
    kind = file.suffix.lower()
    if kind == ".parquet":
        yield from enumerate(_parquet(file, columns), 1)
    elif kind in (".csv", ".tsv"):
        csv.field_size_limit(2**31 - 1)  # the default refuses texts beyond 128 KiB
        with _open(file) as stream:
            try:
                reader = csv.DictReader(stream, delimiter="\t" if kind == ".tsv" else ",", strict=True)
                names = reader.fieldnames or []
                _need(file, columns, names)
                for row in reader:
                    if None in row:  # fields beyond the header: a comma in a text would give the rest as its label
                        raise TaskError(
                            f"{str(file)!r} line {reader.line_num} has {len(names) + len(row[None])} fields, the "
                            f"header {len(names)}: put texts that hold the separator into double quotes"
                        )
                    yield reader.line_num, row
            except csv.Error as error:
                raise TaskError(f"{str(file)!r} is no valid {kind[1:]} (line {reader.line_num}): {error}") from error
            except UnicodeDecodeError as error:
                raise _no_utf8(file, error) from error
    elif kind in (".jsonl", ".ndjson"):
        with _open(file) as stream:
            try:
                for number, line in enumerate(stream, 1):
                    if not line.strip():
                        continue
                    try:
                        row = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise TaskError(f"{str(file)!r} line {number} is no JSON: {error}") from error
                    if not isinstance(row, dict):
                        raise TaskError(f"{str(file)!r} line {number} is no JSON object: give one object per line")
                    _need(file, columns, list(row), number)
                    yield number, row
            except UnicodeDecodeError as error:
                raise _no_utf8(file, error) from error
    else:
        raise TaskError(
            f"{str(file)!r}: cannot read {kind or 'a file without extension'}; known are {', '.join(TABLES)}"
        )


def as_class(label: str) -> str:
    """The class that a table's label means: pandas writes 1.0 for 1 into a column where one is missing.

    >>> as_class("1.0"), as_class("1.5"), as_class("v1.0")
    ('1', '1.5', 'v1.0')
    """
    whole = _WHOLE.fullmatch(label)
    return whole[1] if whole else label


def as_text(
    value: Any, file: Path, number: int, key: str, column: str, lists: bool = False, inner: bool = False
) -> str:
    """What a cell says; empty where it is missing. Python's way to write bytes or a list is nobody's text or label.

    With `lists` it may hold a list of such, each of which is `inner`.
    """
    if type(value) is str:
        if lists and not value.strip():  # of a list of none, as a csv has it
            return as_cell([])
        return as_class(value.strip()) if key == "label_column" and file.suffix.lower() in (".csv", ".tsv") else value
    if value is None or value != value:  # NaN is how pandas writes what is missing
        return ""
    place = f"{str(file)!r} {'line' if file.suffix.lower() in LINES else 'row'} {number}: column {column!r}"
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise TaskError(
                f"{place} is no UTF-8 ({error.reason} at byte {error.start}): write it as UTF-8, or name another "
                f"task.{key}"
            ) from error
    if lists and isinstance(value, (list, tuple)):
        return as_cell([as_text(item, file, number, key, column, inner=True) for item in value])
    if isinstance(value, (list, tuple, dict)):
        wanted = "one text" if key in ("text_column", "text_pair_column") else "one word or number"
        taken = {"label_column": "multi_label or token_classification", "text_column": "token_classification"}
        other = ""
        if key in taken and type(value) is list and not inner:
            other = f", or task.objective={taken[key]}, for which it may"
        raise TaskError(
            f"{place} holds a {type(value).__name__}, not {wanted}: write {wanted} there, or name another task.{key}"
            f"{other}"
        )
    if key == "label_column" and isinstance(value, (float, Decimal)) and value % 1 == 0:
        return str(int(value))  # as `as_class` does
    return str(value)


def _parquet(file: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        _need(file, columns, table.schema_arrow.names)
        for batch in table.iter_batches(columns=columns):
            yield from batch.to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise TaskError(f"{str(file)!r} cannot be read as parquet: {first_line(error)}") from error
    except UnicodeDecodeError as error:  # a column of strings that another writer did not check
        raise _no_utf8(file, error) from error


def _need(file: Path, wanted: list[str], there: list[str], line: int | None = None) -> None:
    for column in wanted:
        if there.count(column) > 1:
            raise TaskError(f"{str(file)!r} has more than one column {column!r}: rename all but one")
        if column not in there:
            place = f"{str(file)!r}" + (f" line {line}" if line else "")
            remedy = "Set task.text_column, task.text_pair_column, task.label_column or task.split_column"
            if file.suffix.lower() in (".csv", ".tsv") and len(there) == 1 and re.search("[;,\t|]", there[0]):
                remedy = "Columns of a csv are separated by commas, of a tsv by tabs: convert it"
            raise TaskError(
                f"{place} has no column {column!r}: it has {', '.join(map(repr, there)) or 'none'}. {remedy}"
            )


def _open(file: Path):
    try:
        return file.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise unreadable(file, error) from error


def text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _no_utf8(file, error) from error
    except OSError as error:
        raise unreadable(file, error) from error


def unreadable(path: Path, error: OSError) -> TaskError:
    return TaskError(f"{str(error.filename or path)!r} cannot be read: {error.strerror}")


def _no_utf8(file: Path, error: UnicodeDecodeError) -> TaskError:
    return TaskError(f"{str(file)!r} is no UTF-8 ({error.reason} at byte {error.start}): convert it, as with iconv")
