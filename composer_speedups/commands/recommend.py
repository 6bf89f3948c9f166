"""The command `recommend`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from composer_speedups import registry
from composer_speedups.commands.typed import typed
from composer_speedups.errors import RecipeError
from composer_speedups.recipes.yaml import inline

if TYPE_CHECKING:
    from rich.console import Console

    from composer_speedups.recipes import Recipe
    from composer_speedups.recommend.run import Recommendation

__all__ = ["RECOMMEND_EXAMPLE", "python_line", "recommend"]

RECOMMEND_EXAMPLE = (
    "Example: composer-speedups recommend --model ./my_model --task text path=reviews.csv text_column=review "
    "label_column=stars --minutes 20"
)


def recommend(
    context: typer.Context,
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Of the recipe (batch_size=16) or its task (path=reviews.csv is short for task.path=reviews.csv).",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="PATH|NAME", help="Folder or name of a Hugging Face encoder.")
    ] = "bert-base-uncased",
    task: Annotated[str, typer.Option(help="docstrings, imdb, text, hub or dummy.")] = "docstrings",
    minutes: Annotated[float, typer.Option(help="That it may take.")] = 15.0,
    ranks: Annotated[
        int, typer.Option(help="Processes that train together (DDP), which share each batch: one for each GPU.", min=1)
    ] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the study [default: runs/recommend-MODEL-TASK].")] = None,
) -> None:
    """Find out which speed-ups help your model on this machine, and get the recipe to use.

    A short run of each that applies, then the best together, repeated against the plain recipe. The same command again
    goes on where it was stopped.
    """
    from composer_speedups.ablation.terminal import make_console
    from composer_speedups.recommend.run import recommend as run
    from composer_speedups.termination import stop_on_termination

    overrides = [_dotted(option) for option in options or ()]
    base = _plain(model, task, overrides)
    stem = "".join(c if c.isalnum() or c in "._-" else "_" for c in Path(model).name) or "model"
    folder = out if out is not None else Path("runs") / f"recommend-{stem}-{base.task.name}"
    settled = {"--model": model, "--task": task, "--minutes": f"{minutes:g}", "--out": folder}
    stop_on_termination()
    console = make_console()
    own_batch = any(override.startswith("batch_size=") for override in overrides)
    command = typed(context, settled)
    found = run(base, minutes=minutes, out=folder, own_batch=own_batch, ranks=ranks, command=command, console=console)
    if found.interrupted:
        console.print("Stopped. The same command goes on from here.", style="yellow")
        raise typer.Exit(130)
    _show(found, console)


def _plain(model: str, task: str, overrides: list[str]) -> Recipe:
    """The recipe without speed-ups that all others are measured against."""
    from composer_speedups.recipes import make_recipe, plain_speedups

    folder = os.path.expanduser(model)  # a home that nobody has stays as it is, and is not there
    name = str(Path(folder).resolve()) if os.path.isdir(folder) else model
    values = {
        "name": "plain",
        "model": {"name": name},
        "task": {"name": task},
        "speedups": plain_speedups(),
    }
    recipe = make_recipe(values, overrides)
    changed = recipe.name != "plain" or recipe.speedups != values["speedups"]
    if changed:
        raise RecipeError("command line: name and speedups are what recommend finds: leave them out")
    return recipe


def _dotted(option: str) -> str:
    """A task's own key may stand alone: `path=x` is `task.path=x`."""
    from composer_speedups.recipes.schema import RecipeFields
    from composer_speedups.tasks.spec import TaskSpec

    key = option.partition("=")[0].strip()
    own = key in TaskSpec.model_fields and key not in RecipeFields.model_fields
    return f"task.{option}" if own else option


def python_line(speedups: dict[str, dict[str, Any]]) -> str:
    """What to write in Python for a recipe's speed-ups.

    >>> python_line({"mixed_precision": {"dtype": "bf16"}, "fused_adamw": {}})
    "algorithms=[MixedPrecision(dtype='bf16'), FusedAdamW()]"
    """
    calls = []
    for key, arguments in speedups.items():
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        calls.append(f"{registry.class_name(key)}({given})")
    return f"algorithms=[{', '.join(calls)}]"


def _show(found: Recommendation, console: Console) -> None:
    from composer_speedups.ablation.terminal import terminal_table
    from composer_speedups.ablation.words import notes
    from composer_speedups.isolation.ranks import train_words

    def say(text: str, **style: Any) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True, **style)

    say("")
    if found.findings is not None:
        console.print(terminal_table(found.findings.rows, console.width))
        say("")
        for line in notes(found.findings.rows):
            say(f"- {line}")
        say("")
    if found.answer.rejected:
        say("Not used, and why", style="bold")
        together: dict[str, list[str]] = {}
        for name, reason in found.answer.rejected.items():
            together.setdefault(reason, []).append(name)
        for reason, names in together.items():
            say(f"- {', '.join(names)}: {reason}")
        say("")
    helps = found.answer.row is not None
    say(f"Use: {', '.join(found.recipe.speedups)}" if helps else found.answer.sentence, style="bold")
    if helps:
        say(found.answer.sentence)
        say("\nIn a recipe:")
        say("speedups:")
        for key, arguments in found.recipe.speedups.items():
            inner = ", ".join(f"{name}: {inline(value)}" for name, value in arguments.items())
            say(f"  {key}: {{{inner}}}")
        classes = ", ".join(sorted(registry.class_name(key) for key in found.recipe.speedups))
        say("\nIn Python:")
        say(f"from composer_speedups import {classes}")
        say(f"Trainer(..., {python_line(found.recipe.speedups)})")
    if found.path is not None:
        path = shlex.quote(str(found.path))
        several = f" --ranks {found.ranks}" if found.ranks > 1 else ""
        say(f"\nThe whole recipe: {train_words(found.ranks)} {path} --save my_model")
        say(f"Its numbers against float64, here: composer-speedups verify {path}{several}")
    if found.findings is not None and found.folder is not None:
        say(f"Report: {found.folder / 'report.html'}")
