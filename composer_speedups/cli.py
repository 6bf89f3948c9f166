"""The command line: parses, calls, prints. Small commands are functions here, the others each have a file of
`commands/`; their work is done elsewhere.

Nothing heavy is imported at the top, so that `--help` and the lists answer at once.
"""

from __future__ import annotations

import ast
import errno
import inspect
import logging
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from composer_speedups import __version__
from composer_speedups.collector import end_without_collecting
from composer_speedups.commands.ablate import ABLATE_EXAMPLE, ablate
from composer_speedups.commands.doctor import DOCTOR_EXAMPLE, doctor
from composer_speedups.commands.recommend import RECOMMEND_EXAMPLE, recommend
from composer_speedups.commands.report import REPORT_EXAMPLE, report
from composer_speedups.commands.tune import TUNE_EXAMPLE, tune
from composer_speedups.commands.verify import VERIFY_EXAMPLE, verify
from composer_speedups.errors import UserError

__all__ = ["app", "main"]

app = typer.Typer(
    name="composer-speedups",
    help="Train BERT-like models faster with Composer: speed-ups, recipes, and studies of what each one brings.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text: it survives pipes, logs and narrow terminals
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, with dotted keys.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code. What the user can mend is one line, and code 2."""
    if sys.stdout is None:  # closed by whoever called
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    # A terminal or a log in ASCII or Latin-1 shows a question mark for what it has no letter for.
    if getattr(sys.stdout, "errors", None) in ("strict", "surrogateescape") and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    # Composer imports PEFT where it is installed, and PEFT bitsandbytes, which on a machine without a GPU warns
    # that a kernel for 4-bit weights cannot be downloaded: nothing here has use for it.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # It imports Inductor, too, which then starts its compile workers: a process that imports PyTorch once more beside
    # each rank, and that writes a traceback if Ctrl-C comes before it is done. `prepare_inductor` starts them.
    os.environ.setdefault("TORCH_WARM_POOL", "0")
    end_without_collecting()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _check_folders(given)
        code = app(args=given, obj=given, prog_name="composer-speedups", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has had enough
        _drop_output()
        return 141
    except OSError as error:
        # Only what is written to has no name: every file's error carries its own.
        if error.filename is not None:
            # Of a file that is moved, the name it was to have: the other is a temporary one.
            return _complain(f"{error.filename2 or error.filename}: {error.strerror or error}")
        if _is_not_loaded(error):
            return _complain(_not_loaded(error))
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            raise
        _drop_output()
        return _complain(f"the output cannot be written: {error.strerror}", 1)
    except ImportError as error:
        if not _is_not_loaded(error):
            raise
        return _complain(_not_loaded(error))
    except Exception as error:
        # Typer bundles its command-line parser from 0.2x on, so its errors have no import that fits all versions.
        if not (hasattr(error, "format_message") and hasattr(error, "exit_code")):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return 0
        context = getattr(error, "ctx", None)
        help_for = context.command_path if context is not None else "composer-speedups"
        return _complain(f"{error.format_message()} See {help_for} --help", error.exit_code)


def _check_folders(arguments: Sequence[str]) -> None:
    """What would send every command's files to where nobody meant them to go."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working folder is gone: change to one that exists") from None
    for option in ("--out", "--save"):
        # As a Path, an empty name is the working folder.
        if f"{option}=" in arguments or (option, "") in pairwise(arguments):
            raise UserError(f"{option} is empty: name a place, such as {option} my_model")


def _is_not_loaded(error: Exception) -> bool:
    """Whether a library of PyTorch's, or one that it needs, is there but could not be taken into memory."""
    return any(words in str(error) for words in ("failed to map segment", "cannot allocate memory"))


def _not_loaded(error: Exception) -> str:
    return f"PyTorch cannot be loaded: {error}. Is there enough memory, or a limit on it (ulimit -v)?"


def _drop_output() -> None:
    """What is still to be written goes nowhere, so that the interpreter's end does not stumble over it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, code: int = 2) -> int:
    line = " ".join(message.split("\n"))
    print(f"error: {''.join(c if c.isprintable() else ascii(c)[1:-1] for c in line)}", file=sys.stderr)
    return code


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"composer-speedups {__version__}")
        raise typer.Exit


@app.callback(epilog="Start with: composer-speedups doctor, then composer-speedups ablate demo --dry-run")
def _app(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    # No docstring: it would take the place of the app's own help.
    pass


app.command(epilog=DOCTOR_EXAMPLE, short_help="What this machine supports")(doctor)
app.command(epilog=ABLATE_EXAMPLE, short_help="Compare recipes side by side")(ablate)
app.command(epilog=RECOMMEND_EXAMPLE, short_help="Find the recipe for your model and machine")(recommend)


@app.command(
    short_help="List recipes, or print one with the source of every value",
    epilog="Example: composer-speedups recipes finetune/compile batch_size=32 task.name=docstrings > my_recipe.yaml",
)
def recipes(
    name: Annotated[str | None, typer.Argument(help="A recipe's name, or the path of its YAML file.")] = None,
    overrides: Overrides = None,
) -> None:
    """List the recipes, or print one resolved: every value with the file and line that it came from."""
    from composer_speedups.recipes import load_recipe
    from composer_speedups.recipes.files import suite_names
    from composer_speedups.recipes.suites import list_recipes

    if name is not None:
        # Everything is checked but the speed-ups' arguments: that would import Composer and take seconds.
        recipe = load_recipe(name, overrides or (), check_arguments=False)
        # With changes it is another recipe: named after the file that it is written to, and of no published figures.
        changed = {override.partition("=")[0].strip() for override in overrides or ()}
        typer.echo(recipe.to_yaml(comments=True, without={"name", "published"} - changed if changed else ()), nl=False)
        return
    rows = []
    for info in list_recipes():
        speed = "" if info.samples_per_second is None else f"{info.samples_per_second:g}"
        mantissa, _, exponent = f"{info.learning_rate:e}".partition("e")
        rate = f"{float(mantissa):g}e{int(exponent)}"
        rows.append((info.name, info.description, str(info.batch_size), rate, speed))
    _print_table(("recipe", "what", "batch", "LR", "published samples/s"), rows, right=(2, 3, 4))
    typer.echo(f"\nSuites, for composer-speedups ablate: {', '.join(suite_names())}")


@app.command(
    short_help="List speed-ups, or print one's method card", epilog="Example: composer-speedups algorithms fused_adamw"
)
def algorithms(
    name: Annotated[str | None, typer.Argument(help="A speed-up's key, such as fused_adamw.")] = None,
) -> None:
    """List the speed-ups, or print the method card of one: why it is faster, numerics, when it pays, needs."""
    from composer_speedups import registry
    from composer_speedups.errors import RecipeError
    from composer_speedups.recipes.schema import nearest
    from composer_speedups.recipes.yaml import show

    keys = registry.keys()
    if name is not None:
        key = next((k for k in keys if k.replace("_", "") == name.replace("_", "").lower()), None)
        if key is None:
            raise RecipeError(f"unknown speed-up {show(name)}. {nearest(name, keys)}")
        _print_card(_card(key)[0])
        return
    rows = []
    for key in keys:
        docstring, class_name = _card(key)
        rows.append((key, class_name, " ".join(docstring.partition("\n\n")[0].split()).partition(": ")[2]))
    _print_table(("key", "class", "what"), rows)


@app.command(
    short_help="Train one recipe",
    epilog="Example: composer-speedups train demo/bf16 duration=1ep --save my_model. "
    "On several devices: composer -n 2 -m composer_speedups train finetune/fp16 --save my_model",
)
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or the path of its YAML file.")],
    overrides: Overrides = None,
    save: Annotated[
        Path | None, typer.Option(help="Folder for the model (Hugging Face's format) and its checkpoints.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the latest checkpoint under --save.")] = False,
    checkpoint_interval: Annotated[
        str | None, typer.Option(help="How often to write a checkpoint, such as 200ba [default: 1ep].")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the recipe's.", min=0, max=2**32 - 1)] = None,
) -> int:
    """Train one recipe: a live line with loss, samples/s and accuracy, and a summary at the end."""
    from composer_speedups.commands.train import train as run
    from composer_speedups.errors import RecipeError
    from composer_speedups.recipes import load_recipe
    from composer_speedups.recipes.schema import INTERVAL
    from composer_speedups.recipes.yaml import show

    if resume and save is None:
        raise RecipeError("--resume needs the folder to resume from: add --save DIR")
    if checkpoint_interval is not None and save is None:
        raise RecipeError("--checkpoint-interval needs a folder for checkpoints: add --save DIR")
    checkpoint_interval = checkpoint_interval or "1ep"
    if not INTERVAL.fullmatch(checkpoint_interval):
        raise RecipeError(
            f"--checkpoint-interval must be epochs or batches like 1ep or 200ba, got {show(checkpoint_interval)}"
        )
    loaded = load_recipe(recipe, overrides or (), check_arguments=False)
    return run(loaded, seed=seed, save=save, resume=resume, checkpoint_interval=checkpoint_interval)


app.command(epilog=TUNE_EXAMPLE, short_help="Find the batch, then the learning rate for it")(tune)
app.command(epilog=VERIFY_EXAMPLE, short_help="Check a recipe's numbers against float64")(verify)
app.command(epilog=REPORT_EXAMPLE, short_help="Show a study again, or compare two")(report)


@app.command(
    "convert-checkpoint",
    short_help="Change the optimizer of a checkpoint",
    epilog="Example: composer-speedups convert-checkpoint ckpt/ep1-rank0.pt ckpt/ep1-8bit.pt --to adamw_8bit",
)
def convert_checkpoint(
    source: Annotated[Path, typer.Argument(help="A .pt file that Composer's Trainer saved.")],
    target: Annotated[Path, typer.Argument(help="The file to write.")],
    to: Annotated[str, typer.Option(help="adamw, decoupled_adamw, bnb_adamw, adamw_8bit or apex_fused_adamw.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write TARGET even if it exists.")] = False,
    keep_32_bit: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Parameters that adamw_8bit keeps in 32 bits. [default: embeddings]"),
    ] = None,
    min_8bit_size: Annotated[int, typer.Option(help="adamw_8bit keeps smaller tensors in 32 bits.", min=1)] = 4096,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE.CLASS", help="A class of your own that the file may hold. Only if you trust it."),
    ] = None,
) -> None:
    """Rewrite the optimizer state in a checkpoint, so that another AdamW goes on with its moments."""
    from composer_speedups.optim import convert

    kept = convert.EMBEDDINGS if keep_32_bit is None else keep_32_bit
    done = convert.convert_checkpoint(
        source, target, to, overwrite=overwrite, keep_32_bit=kept, min_8bit_size=min_8bit_size, allow=allow or ()
    )
    typer.echo(f"{target}: {done}")


def _card(key: str) -> tuple[str, str]:
    """A speed-up's method card and the name of its class, read from its file without importing torch."""
    from composer_speedups.registry import class_name

    file = Path(__file__).parent / "algorithms" / f"{key}.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return inspect.cleandoc(ast.get_docstring(tree) or f"{key}: has no method card."), class_name(key)


def _print_card(text: str) -> None:
    if not sys.stdout.isatty():
        typer.echo(text)  # markdown as it is, for a file or a pager
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """In a terminal a table that fits its width; in a pipe plain columns, one line a row, nothing cut off."""
    if not sys.stdout.isatty():
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        for row in [head, *rows]:
            cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            typer.echo("  ".join(cells).rstrip())
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: no cell is read as markup
    Console().print(table)
