"""The commands that only look: `recipes` and `algorithms`, and how the command line treats mistakes."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import composer_speedups
from composer_speedups import cli, registry
from composer_speedups.recipes import load_recipe
from composer_speedups.recipes.files import recipe_names, suite_names


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the command line in an empty folder; return exit code, output, errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(arguments)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def complaint(result: tuple[int, str, str]) -> str:
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1 and err[:-1].isprintable()
    return err


def test_recipes_lists_all_with_published_speed(run) -> None:
    code, out, err = run("recipes")
    assert (code, err) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert set(recipe_names()) <= set(lines)
    assert lines["finetune/fp16_larger_batch"].split()[-3:] == ["56", "1.5e-4", "209"]
    assert "fp16, larger batch" in lines["finetune/fp16_larger_batch"]
    assert all(name in out.splitlines()[-1] for name in suite_names())


def test_recipes_prints_one_resolved_with_the_place_of_every_value(run, tmp_path: Path) -> None:
    code, out, _ = run("recipes", "finetune/compile", "batch_size=8", "task.name=docstrings")
    assert code == 0
    recipe = load_recipe("finetune/compile", ["batch_size=8", "task.name=docstrings"], check_arguments=False)
    assert yaml.safe_load(out)["batch_size"] == 8
    for line in out.splitlines():
        assert line.endswith(":") or "  # " in line
    (row,) = [line for line in out.splitlines() if line.startswith("batch_size:")]
    assert row.endswith("# command line")
    (row,) = [line for line in out.splitlines() if line.startswith("learning_rate:")]
    assert row.endswith("recipes/finetune/compile.yaml:3")
    (row,) = [line for line in out.splitlines() if line.startswith("seed:")]
    assert row.endswith("# default")
    (tmp_path / "mine.yaml").write_text(out)  # what is printed is a recipe
    mine = load_recipe("mine.yaml", check_arguments=False)
    # Another one than that it is compared with, and of other figures than the source's.
    assert mine.to_dict() == recipe.to_dict() | {"name": "mine", "published": None}
    assert "\nname: own " in run("recipes", "finetune/compile", "name=own")[1].join(("\n", ""))
    assert "\npublished:" in run("recipes", "finetune/compile")[1]


def test_recipes_takes_a_path(run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: finetune/fp32\nbatch_size: 6\n")
    code, out, _ = run("recipes", "mine.yaml")
    assert code == 0
    assert "# mine.yaml:2" in out and "name: mine" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["recipes", "finetune/fp33"], "unknown recipe 'finetune/fp33'. Nearest: finetune/fp32"),
        (["recipes", "finetune/fp32", "batch_size=-8"], "command line: batch_size must be a positive integer, got -8"),
        (["recipes", "finetune/fp32", "batch=8"], "unknown key 'batch'. Nearest: batch_size"),
        (["recipes", "finetune/fp32", "nonsense"], "'nonsense' is not key=value"),
        (["recipes", "demo"], "'demo' is a suite: its rows are shown by `composer-speedups ablate demo --dry-run`"),
        (["recipes", "demoo"], "unknown recipe 'demoo'. Nearest: demo, "),
        (["recipes", "batch_size=8"], "name the recipe first"),
        (["recipes", "gone.yaml"], "gone.yaml: there is no such file"),
        (["recipes", "/dev/null"], "/dev/null: is no plain file"),
        (["report", __file__], "it is a file: name the study's folder"),
        (["train", "demo/fp32", "--checkpoint-interval", "1ba"], "needs a folder for checkpoints: add --save DIR"),
        (["recipes", "--frobnicate"], "No such option"),
        (["recipes", "a\nb"], r"unknown recipe 'a\nb'"),
        (["algorithms", "fused_adam"], "unknown speed-up 'fused_adam'. Nearest: fused_adamw"),
        (["algorithms", "../recipes"], "unknown speed-up '../recipes'"),
        (["algorithms", "fused_adamw", "more"], "unexpected extra argument"),
        (["recipe"], "No such command 'recipe'"),
        (["\x1b[31m"], "No such command"),
    ],
)
def test_mistakes_are_one_line_and_code_2(run, arguments: list[str], expected: str) -> None:
    assert expected in complaint(run(*arguments))


def test_algorithms_lists_every_key(run) -> None:
    code, out, err = run("algorithms")
    assert (code, err) == (0, "")
    rows = [line.split(maxsplit=2) for line in out.splitlines()[1:]]
    assert [row[0] for row in rows] == list(registry.keys())
    for key, class_name, what in rows:
        assert class_name.lower() == key.replace("_", "")
        assert what.endswith(".")  # whole sentences


@pytest.mark.parametrize("key", registry.keys())
def test_algorithms_prints_the_method_card(run, key: str) -> None:
    code, out, err = run("algorithms", key)
    assert (code, err) == (0, "")
    for heading in ("Why it is faster", "Numerics", "When it pays", "Needs"):
        assert f"**{heading}" in out, f"the card of {key} has no section {heading}"
    tree = ast.parse((Path(cli.__file__).parent / "algorithms" / f"{key}.py").read_text())
    assert out.strip() == ast.get_docstring(tree).strip()


def test_algorithms_takes_a_class_name(run) -> None:
    assert run("algorithms", "LowPrecisionNorm") == run("algorithms", "low_precision_norm")


def test_version(run) -> None:
    assert run("--version") == (0, f"composer-speedups {composer_speedups.__version__}\n", "")


def test_help_shows_an_example_for_every_command(run) -> None:
    import typer.main

    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    assert {"recipes", "algorithms"} <= set(commands)
    code, overview, _ = run("--help")
    assert code == 0
    assert "..." not in overview.partition("Commands:")[2]  # nothing is cut off
    for name in commands:
        assert name in overview
        code, out, err = run(name, "--help")
        assert (code, err) == (0, "")
        assert f"composer-speedups {name}" in out.partition("Example")[2], f"{name} --help shows no example"


def test_answers_without_importing_torch() -> None:
    code = (
        "import sys\n"
        "from composer_speedups.cli import main\n"
        "codes = [main(['recipes']), main(['algorithms']), main(['algorithms', 'low_precision_norm'])]\n"
        "codes.append(main(['recipes', 'finetune/fp32']))\n"
        "print(codes, [m for m in ('torch', 'composer', 'transformers', 'numpy', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0] []", done.stderr


def test_runs_as_a_module_and_survives_a_closed_pipe() -> None:
    module = [sys.executable, "-m", "composer_speedups"]
    done = subprocess.run([*module, "algorithms", "nonsense"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown speed-up 'nonsense'")
    with subprocess.Popen([*module, "recipes"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()  # as `| head -0` does
        errors = process.stderr.read()
        process.wait(timeout=120)
    assert errors == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_an_output_that_cannot_be_written_is_one_line() -> None:
    module = [sys.executable, "-m", "composer_speedups", "recipes", "demo/fp32"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(module, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device\n")
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *module], capture_output=True, text=True, timeout=120)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_a_terminal_gets_a_table_and_rendered_markdown(run, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "100")
    for arguments, expected in [
        (["recipes"], "finetune/fp16_larger_batch"),
        (["algorithms"], "LowPrecisionNorm"),
        (["algorithms", "low_precision_norm"], "Why it is faster."),
    ]:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        assert cli.main(arguments) == 0
        assert expected in terminal.getvalue()
        assert "**" not in terminal.getvalue()


def test_what_others_do_when_they_are_imported_is_not_seen() -> None:
    """Composer imports PEFT, and that bitsandbytes, which warns of a kernel that nobody here asks for; and on the
    pinned stack that imports Inductor, which starts compile workers if it may."""
    code = (
        "from composer_speedups.cli import main; code = main(['--version']); import bitsandbytes, psutil, torch;"
        "import torch._inductor.async_compile;"
        "print([p.cmdline() for p in psutil.Process().children()]); exit(code)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_WARM_POOL"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "[]", "no process of workers"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_is_heard_while_composer_is_imported(number: int) -> None:
    """Composer tries `import peft`, and takes whatever that raises for PEFT's absence."""
    code = (
        "import os, sys\n"
        "class Signal:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'peft' and 'composer' in sys.modules:\n"
        f"            os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Signal())\n"
        "from composer_speedups.cli import main\n"
        "sys.exit(main(['train', 'demo/fp32', 'duration=1ba']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130 and done.stderr.endswith("stopped\n"), done.stderr
    assert "samples/s" not in done.stdout + done.stderr
