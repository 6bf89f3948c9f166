"""What is trained on what: `build_task` makes the data, `build_model` the model.

Importing this loads pydantic only; torch and transformers come with the first task that is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer_speedups.tasks.spec import ModelSpec, TaskSpec

if TYPE_CHECKING:
    from composer_speedups.tasks.models import build_model
    from composer_speedups.tasks.task import Task, build_task

__all__ = ["ModelSpec", "Task", "TaskSpec", "build_model", "build_task"]

_LAZY = {"Task": "task", "build_model": "models", "build_task": "task"}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _LAZY:
        return getattr(importlib.import_module(f"composer_speedups.tasks.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'composer_speedups.tasks' has no attribute {name!r}")
