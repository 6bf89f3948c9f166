"""What a recipe reads from the user's disk, and whether it still is what it was: data, and a local model folder.

A path says where to look, not what is there. Studies and checkpoints keep a mark of what was there, so that runs on
two contents of one path are never taken for repetitions of each other.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from composer_speedups.tasks import files

__all__ = ["Mark", "changed", "data_of", "marks", "model_of", "read_by"]

Kind = Literal["data", "hub", "model"]

_PIECE = 2**20
_PIECES = 256  # of a file that are read; a larger one is read in so many places: its size, too, tells of changes
_MODEL = {".json", ".safetensors", ".bin", ".txt", ".model"}  # configuration, weights and tokenizers


@dataclass(frozen=True)
class Mark:
    """What was at a path.

    Attributes:
        kind: what it was read as: `data` of ours, a folder as of the `hub`, or a `model`.
        content: a digest of names, sizes and bytes; a copy with another time of change has the same.
        seen: a digest of names, sizes and times: while it is the same, nothing needs to be read.
    """

    kind: Kind
    content: str
    seen: str


def data_of(recipe: Mapping[str, Any]) -> dict[str, Kind]:
    """The files and folders that a recipe's task reads."""
    task = recipe.get("task") or {}
    kind: Kind = "hub" if task.get("name") == "hub" else "data"
    return {path: kind for key in ("path", "eval_path") if (path := task.get(key)) is not None}


def model_of(recipe: Mapping[str, Any]) -> dict[str, Kind]:
    """The folder that a recipe's model comes from; empty for a name of the hub, which nobody is asked about."""
    name = (recipe.get("model") or {}).get("name")
    return {name: "model"} if name and os.path.isdir(os.path.expanduser(name)) else {}


def read_by(recipe: Mapping[str, Any]) -> dict[str, Kind]:
    """All that a recipe reads. A path that is both, which none should be, is its data."""
    return model_of(recipe) | data_of(recipe)


def marks(paths: Mapping[str, Kind]) -> dict[str, Mark]:
    """Of every path that can be read; what is wrong with another one, the run that needs it will say."""
    found = {}
    for path, kind in paths.items():
        try:
            found[path] = Mark(kind, _content(path, kind), _seen(path, kind))
        except OSError:
            continue
    return found


def changed(known: Mapping[str, Mark]) -> str | None:
    """The first path that holds something else than it did; None if there is none."""
    for path, mark in known.items():
        try:
            if _seen(path, mark.kind) != mark.seen and _content(path, mark.kind) != mark.content:
                return path
        except OSError:
            continue
    return None


def _files(path: str, kind: Kind) -> list[tuple[str, Path]]:
    """Name and place of every file that is read."""
    root = Path(os.path.expanduser(path))  # a home that nobody has stays as it is, and is not there
    if root.is_file():
        return [("", root)]
    if kind == "data":
        inside = files.sources(root)
    elif kind == "hub":  # `datasets` reads many kinds of files, and takes the card's word for which
        inside = sorted(f for f in root.rglob("*") if f.is_file())
    else:
        inside = sorted(f for f in root.iterdir() if f.suffix in _MODEL and f.is_file())
    if not inside:
        raise FileNotFoundError(path)
    return [(file.relative_to(root).as_posix(), file) for file in inside]


def _seen(path: str, kind: Kind) -> str:
    found = [(name, file.stat()) for name, file in _files(path, kind)]
    return _digest([[name, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in found]).hexdigest()


def _content(path: str, kind: Kind) -> str:
    found = [(name, file, file.stat().st_size) for name, file in _files(path, kind)]
    digest = _digest([[name, size] for name, _, size in found])
    for _, file, size in found:
        whole = size <= _PIECE * _PIECES
        places = range(0, size, _PIECE) if whole else [(size - _PIECE) * n // (_PIECES - 1) for n in range(_PIECES)]
        with file.open("rb") as stream:
            for place in places:
                stream.seek(place)
                digest.update(stream.read(_PIECE))
    return digest.hexdigest()


def _digest(facts: list[Any]) -> hashlib.blake2b:
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=12)
