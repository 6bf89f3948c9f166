"""The command as it was typed, for a report and for the comments of a recipe: what makes the same again."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from typing import Any

import typer

__all__ = ["typed"]


def typed(context: typer.Context, settled: Mapping[str, Any], without: Collection[str] = ()) -> str:
    """The words that `main` was given, ready for a shell.

    So an option needs no line here: whatever is typed is told.

    Args:
        settled: options that are told even where nobody typed them, as what they are by default may change.
        without: flags that are about this one time, and would do something else the next.
    """
    options = [each for each in context.command.params if each.param_type_name == "option"]
    valued = {name for option in options if not option.is_flag for name in option.opts}
    words = iter(context.obj[context.obj.index(context.info_name) + 1 :])
    told: list[str] = []
    rest: list[str] = []
    for word in words:
        if word == "--":  # no word after it is an option
            rest = [word, *words]
        elif word in valued:  # the next is its value, whatever it looks like
            told += [word, next(words)]
        elif word not in without:
            told.append(word)
    names = {word.partition("=")[0] for word in told}
    told += [str(word) for pair in settled.items() if pair[0] not in names for word in pair]
    return shlex.join([*context.command_path.split(), *told, *rest])
