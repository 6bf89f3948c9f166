"""The trained model, written as Hugging Face's `from_pretrained` reads it: whole, or not at all."""

from __future__ import annotations

import filecmp
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from composer_speedups.tasks import Task
from composer_speedups.training.checkpoints import free_name, writing

__all__ = ["save_model"]

log = logging.getLogger("composer_speedups")

# What `from_pretrained` would read of another model that was there, and before what this one has, some of it.
_READ = (
    "model*.safetensors", "pytorch_model*.bin", "*.index.json", "adapter_*", "added_tokens.json", "merges.txt",
    "special_tokens_map.json", "*.model", "tokenizer*.json", "vocab.*",
)  # fmt: skip


def save_model(model: Any, task: Task, folder: Path) -> None:
    """Write beside the folder first, then move file by file into it: no file there is ever half written.

    Files of another model that was there are kept, as checkpoints are.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    beside = folder / ".saving"
    with writing(folder, then=". The same command with --resume then writes the model"):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)  # of a run that was killed here; one run at a time holds the folder
        try:
            model.save_pretrained(beside)
            if task.tokenizer is not None:
                task.tokenizer.save_pretrained(beside)
            new = {file.name for file in beside.iterdir()}
            before = [file for file in folder.iterdir() if file.name in new or _is_of_a_model(file)]
            if not all(file.name in new and filecmp.cmp(file, beside / file.name, shallow=False) for file in before):
                aside = free_name(folder / "model-old")
                aside.mkdir()
                for path in before:
                    path.rename(aside / path.name)
                log.warning("the model that was in %s is kept in %s", folder, aside)
            for file in beside.iterdir():
                os.replace(file, folder / file.name)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def _is_of_a_model(file: Path) -> bool:
    return file.is_file() and any(file.match(pattern) for pattern in _READ)
