"""The shipped recipes against the published tables, what `extends` inherits, and where each value came from."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refusal

import composer_speedups
from composer_speedups import registry
from composer_speedups.recipes import load_recipe, load_recipes
from composer_speedups.recipes.files import recipe_names, suite_names
from composer_speedups.recipes.schema import LOGGERS
from composer_speedups.recipes.suites import SUITE_SECTIONS, list_recipes, load_suite

ROOT = Path(__file__).resolve().parents[2] / "recipes"

LADDER = {"foreach_adamw": {}, "matmul_precision": {"precision": "high"}, "mixed_precision": {"dtype": "fp16"}}
COMPILED = LADDER | {"torch_compile": {"scope": "model"}}
WITHOUT_FOREACH = {key: value for key, value in COMPILED.items() if key != "foreach_adamw"}

# The published tables: batch, learning rate, samples/s, speed-up, seconds, stable; and the speed-ups of each row.
TABLE = {
    "finetune/fp32": (40, 1e-4, 136, None, 154, True, {"matmul_precision": {"precision": "highest"}}),
    "finetune/foreach_adamw": (
        *(40, 1e-4, 137, None, 153, True),
        {"matmul_precision": {"precision": "highest"}, "foreach_adamw": {}},
    ),
    "finetune/tf32": (
        *(40, 1e-4, 137, None, 153, True),
        {"matmul_precision": {"precision": "high"}, "foreach_adamw": {}},
    ),
    "finetune/fp16": (40, 1e-4, 200, 1.47, 104, True, LADDER),
    "finetune/fp16_larger_batch": (56, 1.5e-4, 209, 1.54, 100, True, LADDER),
    "finetune/bf16": (
        *(56, 1.5e-4, 208, 1.53, 102, True),
        LADDER | {"mixed_precision": {"dtype": "bf16"}, "matmul_precision": {"precision": "medium"}},
    ),
    "finetune/compile": (56, 1.25e-4, 270, 1.99, 107, True, COMPILED),
    "finetune/compile_larger_batch": (64, 1.25e-4, 280, 2.06, 105, True, COMPILED),
    "finetune/apex_fused_adamw": (64, 1.25e-4, 278, 2.04, 105, True, WITHOUT_FOREACH | {"apex_fused_adamw": {}}),
    "finetune/fused_layer_norm": (72, 1e-4, 287, 2.11, 99, False, COMPILED | {"fused_layer_norm": {}}),
    "finetune/low_precision_norm": (72, 1.35e-4, 282, 2.07, 106, True, COMPILED | {"low_precision_norm": {}}),
    "finetune/adamw_8bit": (64, 8e-5, 285, 2.10, 105, False, WITHOUT_FOREACH | {"adamw_8bit": {}}),
    "finetune/fused_adamw": (64, 1.25e-4, 245, 1.80, 113, True, WITHOUT_FOREACH | {"fused_adamw": {}}),
    "finetune/bnb_adamw": (64, 1.25e-4, 277, 2.04, 106, True, WITHOUT_FOREACH | {"bnb_adamw": {}}),
    "finetune/adamw_8bit_low_precision_norm": (
        *(72, 1.25e-4, 286, 2.10, 108, False),
        WITHOUT_FOREACH | {"adamw_8bit": {}, "low_precision_norm": {}},
    ),
    "mlm/amp": (32, 5e-5, 163, None, None, None, LADDER),
    "mlm/compile": (32, 5e-5, 200, 1.23, None, None, COMPILED),
    "mlm/flash_attention": (40, 7.5e-5, 209, 1.28, None, None, LADDER | {"sdp_attention": {}}),
    "mlm/flash_attention_compile": (48, 1e-4, 224, 1.37, None, None, COMPILED | {"sdp_attention": {}}),
}


# --- What is shipped ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLE)
def test_reproduces_the_published_table(name: str) -> None:
    batch, rate, samples, speedup, seconds, stable, speedups = TABLE[name]
    recipe = load_recipe(name, check_arguments=False)
    assert (recipe.name, recipe.batch_size, recipe.learning_rate) == (name, batch, rate)
    assert recipe.speedups == speedups
    figures = recipe.published
    assert figures is not None and figures.source and figures.hardware == "RTX 3080 Ti 12 GB"
    assert (figures.samples_per_second, figures.speedup) == (samples, speedup)
    assert (figures.wallclock_seconds, figures.stable) == (seconds, stable)
    assert (recipe.task.name, recipe.task.max_length, recipe.task.padding) == ("imdb", 256, "max_length")
    assert (recipe.task.train_samples, recipe.task.eval_samples, recipe.duration) == (8000, 8000, "2ep")
    assert recipe.task.objective == ("mlm" if name.startswith("mlm/") else "classification")
    assert (recipe.model.name, recipe.model.pretrained) == ("bert-base-uncased", True)
    assert (recipe.optimizer.name, recipe.optimizer.weight_decay) == ("adamw", 0.01)
    assert recipe.schedule.name == "cosine"


def test_every_shipped_recipe_builds_its_speedups() -> None:
    for recipe in load_recipes(recipe_names()):
        assert [a.key() for a in recipe.algorithms()] == list(recipe.speedups)
        for built, (key, arguments) in zip(recipe.algorithms(), recipe.speedups.items(), strict=True):
            assert built.key() == key
            assert {name: getattr(built, name) for name in arguments} == arguments


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_value_has_a_comment_or_a_plain_reason(name: str) -> None:
    text = (ROOT / f"{name}.yaml").read_text()
    recipe = load_recipe(name, check_arguments=False)
    assert recipe.description and len(recipe.description) <= 40, "it is a cell of a table"
    if not name.startswith("demo/"):
        assert "#" in text
        for key in ("batch_size", "learning_rate"):
            line = re.search(rf"^{key}:.*$", text, re.MULTILINE)
            assert line is None or "#" in line[0], f"{key} gives no reason"
            assert line is not None or re.search(r"# (Batch size|The batch|The row)", text) or "extends" in text


@pytest.mark.parametrize("hardware", SUITE_SECTIONS)
@pytest.mark.parametrize("name", suite_names())
def test_every_suite_loads(name: str, hardware: str) -> None:
    suite = load_suite(name, hardware, check_arguments=False)
    assert suite.baseline in [recipe.name for recipe in suite.recipes]
    assert suite.recipes[0].name == suite.baseline, "the table starts with what the others are compared to"


def test_finetune_suite_is_the_whole_table_in_its_order() -> None:
    names = [recipe.name for recipe in load_suite("finetune", check_arguments=False).recipes]
    assert names == [name for name in TABLE if name.startswith("finetune/")]
    names = [recipe.name for recipe in load_suite("mlm", check_arguments=False).recipes]
    assert names == [name for name in TABLE if name.startswith("mlm/")]


def test_demo_downloads_nothing_but_a_model_and_scales_down_on_a_cpu() -> None:
    for recipe in load_suite("demo", "cuda", check_arguments=False).recipes:
        assert (recipe.task.name, recipe.model.pretrained) == ("docstrings", "auto")
        if recipe.name != "finetune/fastest":  # beyond the published table
            assert (recipe.batch_size, recipe.learning_rate) == TABLE[recipe.name][:2]
        assert (
            recipe.provenance["task.name"].startswith(f"{ROOT}") or "suites/demo.yaml" in recipe.provenance["task.name"]
        )
    cpu = load_suite("demo", "cpu", check_arguments=False)
    assert [r.name.removeprefix("demo/") for r in cpu.recipes] == [
        *("fp32", "foreach_adamw", "tf32", "fp16", "bf16", "compile", "apex_fused_adamw", "fused_layer_norm"),
        *("low_precision_norm", "fused_adamw", "bnb_adamw", "adamw_8bit", "fastest"),
    ]
    without_bf16 = load_suite("demo", "cpu_without_bf16", check_arguments=False)
    assert [r.name.removeprefix("demo/") for r in without_bf16.recipes] == [
        *("fp32", "foreach_adamw", "tf32", "fp16", "bf16"),
        *("fused_adamw_fp32", "compile_fp32", "unpadding_fp32", "fastest_fp32"),
    ]
    for recipe in (*cpu.recipes, *without_bf16.recipes):
        assert (recipe.task.name, recipe.model.pretrained, recipe.task.max_length) == ("docstrings", False, 128)
        assert "mixed_precision" not in recipe.speedups or not recipe.name.endswith("_fp32")


def test_lists_quickly_without_torch() -> None:
    code = (
        "import sys\n"
        "from composer_speedups.recipes import load_recipe\n"
        "from composer_speedups.recipes.suites import list_recipes\n"
        "assert len(list_recipes()) >= 19\n"
        "load_recipe('finetune/fp32', ['batch_size=3'], check_arguments=False)\n"
        "print([m for m in ('torch', 'composer', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_list_has_the_table_in_order() -> None:
    infos = [info for info in list_recipes() if info.name in TABLE]
    assert [info.name for info in infos] == list(TABLE)
    assert [(i.batch_size, i.learning_rate, i.samples_per_second) for i in infos] == [v[:3] for v in TABLE.values()]


def test_is_reached_from_the_package() -> None:
    assert composer_speedups.load_recipe is load_recipe


# --- extends and provenance --------------------------------------------------------------------------------------


def test_provenance_names_the_line_of_every_value() -> None:
    recipe = load_recipe("finetune/adamw_8bit_low_precision_norm", ["optimizer.eps=1e-6"], check_arguments=False)
    places = recipe.provenance
    assert places["optimizer.eps"] == "command line"
    assert places["optimizer.betas"] == places["seed"] == "default"
    expected = {
        "batch_size": "finetune/adamw_8bit_low_precision_norm",
        "speedups.low_precision_norm": "finetune/adamw_8bit_low_precision_norm",
        "speedups.adamw_8bit": "finetune/adamw_8bit",
        "speedups.torch_compile.scope": "finetune/compile",
        "speedups.matmul_precision.precision": "finetune/tf32",
        "task.max_length": "finetune/fp32",
        "published.stable": "finetune/adamw_8bit_low_precision_norm",
    }
    for path, file in expected.items():
        place, _, number = places[path].rpartition(":")
        assert Path(place).resolve() == ROOT / f"{file}.yaml"
        line = (ROOT / f"{file}.yaml").read_text().splitlines()[int(number) - 1]
        assert path.rpartition(".")[2] in line, f"{path} is not in line {number}: {line}"
    assert "speedups.foreach_adamw" not in places


def test_own_recipe_extends_a_shipped_one_and_a_relative_one(write) -> None:
    write("extends: finetune/fp16\nbatch_size: 8\nspeedups:\n  mixed_precision: {dtype: bf16}\n", "base/a.yaml")
    write("extends: ../base/a.yaml\nlearning_rate: 3e-5\ntask: {max_length: 64}\n", "top/b.yaml")
    recipe = load_recipe("top/b.yaml", check_arguments=False)
    assert (recipe.name, recipe.batch_size, recipe.learning_rate, recipe.task.max_length) == ("b", 8, 3e-5, 64)
    assert recipe.task.name == "imdb", "what a child does not mention stays"
    assert recipe.speedups["mixed_precision"] == {"dtype": "bf16"}
    assert recipe.provenance["batch_size"] == "base/a.yaml:2"
    assert recipe.provenance["task.max_length"] == "top/b.yaml:3"
    assert load_recipe(Path("top/b.yaml"), check_arguments=False).to_dict() == recipe.to_dict()


def test_figures_and_description_are_not_inherited(write) -> None:
    recipe = load_recipe(write("extends: finetune/fp32\n"), check_arguments=False)
    assert recipe.published is None
    assert recipe.description == ""
    assert recipe.batch_size == 40


def test_a_unique_last_part_is_a_name(write) -> None:
    name = "adamw_8bit_low_precision_norm"
    assert load_recipe(name, check_arguments=False).name == f"finetune/{name}"
    assert load_recipe(write(f"extends: {name}\n"), check_arguments=False).batch_size == 72
    message = refusal("fp32")
    assert "demo/fp32" in message and "finetune/fp32" in message


@pytest.mark.parametrize("form", ["null", "false", "~", ""])
def test_child_removes_an_inherited_speedup(write, form: str) -> None:
    recipe = load_recipe(
        write(f"extends: finetune/fp16\nspeedups:\n  foreach_adamw: {form}\n  fused_adamw: true\n"),
        check_arguments=False,
    )
    assert list(recipe.speedups) == ["matmul_precision", "mixed_precision", "fused_adamw"]


def test_child_adds_to_a_speedups_arguments(write) -> None:
    recipe = load_recipe(
        write("extends: finetune/compile\nspeedups: {torch_compile: {mode: default}}\n"), check_arguments=False
    )
    assert recipe.speedups["torch_compile"] == {"scope": "model", "mode": "default"}


def test_list_form(write) -> None:
    recipe = load_recipe(
        write("speedups: [fused_adamw, {torch_compile: {scope: block}}]\nloggers: [TensorboardLogger]\n"),
        check_arguments=False,
    )
    assert recipe.speedups == {"fused_adamw": {}, "torch_compile": {"scope": "block"}}
    assert recipe.loggers == {"TensorboardLogger": {}}


def test_extends_that_cannot_be_followed(write) -> None:
    write("extends: b.yaml\n", "a.yaml")
    write("seed: 1\nextends: ./a.yaml\n", "b.yaml")
    assert refusal("a.yaml").startswith("b.yaml:2: extends: './a.yaml' leads back to a.yaml")
    assert "leads back" in refusal(write("extends: mine.yaml\n"))
    assert refusal(write("extends: gone.yaml\n")).startswith("mine.yaml:1: extends: there is no file gone.yaml")
    assert "Nearest: finetune/fp32" in refusal(write("extends: finetun/fp32\n"))
    assert "must be the name or the path of one recipe" in refusal(write("extends: [finetune/fp32]\n"))
    assert "must be the name or the path of one recipe" in refusal(write("extends: true\n"))
    assert "is a suite" in refusal(write("extends: mlm\n"))
    assert refusal(write("batch_size: -3\n", "p.yaml")).startswith("p.yaml:1:")
    assert refusal(write("seed: 1\nextends: p.yaml\n")).startswith("p.yaml:1: batch_size"), "blame where it stands"
    for i in range(40):
        write(f"extends: c{i + 1}.yaml\n", f"c{i}.yaml")
    assert "more than 30 recipes in one chain" in refusal("c0.yaml")
    os.symlink("loop.yaml", "loop.yaml")
    assert refusal(write("extends: loop.yaml\n"))


# --- What the names refer to -------------------------------------------------------------------------------------


def test_loggers_are_composers() -> None:
    import composer.loggers
    from composer.loggers import LoggerDestination

    for name in LOGGERS:
        assert issubclass(getattr(composer.loggers, name), LoggerDestination)


def test_speedups_of_the_recipes_exist() -> None:
    used = {key for name in recipe_names() for key in load_recipe(name, check_arguments=False).speedups}
    assert used <= set(registry.keys())
