"""Composer's loggers, as a recipe names them: what is wrong with one is told in one line, before any data is read."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import composer.loggers
from composer.loggers import FileLogger, LoggerDestination

from composer_speedups.errors import RecipeError, UserError, first_line
from composer_speedups.recipes import Recipe
from composer_speedups.recipes.schema import nearest
from composer_speedups.recipes.yaml import show

__all__ = ["built_loggers"]


@contextlib.contextmanager
def built_loggers(recipe: Recipe) -> Iterator[list[LoggerDestination]]:
    """The recipe's loggers, newly built, for `Trainer(loggers=...)`; at the end none takes output any more.

    Raises:
        RecipeError: an argument is wrong, or a package is not installed. What is found only when a Trainer starts,
            such as a file that cannot be written, is raised so by `Trainer(...)`.
    """
    built: list[LoggerDestination] = []
    try:
        for name, arguments in recipe.loggers.items():
            kind = getattr(composer.loggers, name)
            where = f"{recipe.where('loggers', name)}: loggers.{name}"
            _check_names(kind, arguments, where)
            with _explained(where, arguments):
                logger = kind(**arguments)
            logger.init = _explained(where, arguments)(logger.init)
            built.append(logger)
        yield built
    finally:
        for logger in built:
            # It takes stdout and stderr from the start, also where no Trainer came to be that would close it.
            if isinstance(logger, FileLogger) and logger.file is None:
                logger.close(None, None)  # type: ignore[arg-type]


def _check_names(kind: type[LoggerDestination], arguments: dict[str, Any], where: str) -> None:
    known = inspect.signature(kind).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):  # Neptune's own are passed on
        return
    for name in arguments:
        if name not in known:
            raise RecipeError(f"{where}: unknown argument {show(name)}. {nearest(name, known)}")


@contextlib.contextmanager
def _explained(where: str, arguments: dict[str, Any]) -> Iterator[None]:
    """Turn what a logger raises into one line. It may be anything: behind some are services of others."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        missing = next((e for e in (error, error.__cause__) if isinstance(e, ModuleNotFoundError) and e.name), None)
        if missing is not None:
            package = str(missing.name).partition(".")[0]
            raise RecipeError(f"{where}: it needs {package}, which is not installed: pip install {package}") from error
        reason = getattr(error, "strerror", None) or first_line(error)
        file = f"{error.filename}: " if isinstance(error, OSError) and error.filename is not None else ""
        given = f" Change what is given: {show(arguments, 200)}" if arguments else ""
        raise RecipeError(f"{where}: it cannot start ({type(error).__name__}: {file}{reason}).{given}") from error
