from __future__ import annotations

import os
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import composer_speedups
from composer_speedups import registry
from composer_speedups.errors import ConflictError, RecipeError
from composer_speedups.recipe_schema import LOGGERS
from composer_speedups.recipes import (
    SUITE_SECTIONS,
    Recipe,
    list_recipes,
    load_recipe,
    load_recipes,
    load_suite,
    recipe_names,
    suite_names,
)

ROOT = Path(__file__).resolve().parents[1] / "recipes"

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


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a file in an empty working folder; return its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes, name: str = "mine.yaml") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return write


def refusal(*args, loader=load_recipe, **kwargs) -> str:
    """The message of the one-line error that loading gives."""
    with pytest.raises((RecipeError, ConflictError)) as caught:
        loader(*args, **{"check_arguments": False} | kwargs)
    message = str(caught.value)
    assert message.isprintable(), "an error is one line, and cannot control the terminal"
    assert len(message) < 700
    return message


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
        "from composer_speedups.recipes import list_recipes, load_recipe\n"
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


# --- Writing and reading back ------------------------------------------------------------------------------------


@pytest.mark.parametrize("comments", [False, True])
@pytest.mark.parametrize("name", ["finetune/adamw_8bit_low_precision_norm", "mlm/flash_attention_compile", "demo/bf16"])
def test_resolved_yaml_loads_again(write, name: str, comments: bool) -> None:
    recipe = load_recipe(name, ["loggers.TensorboardLogger={log_dir: runs}", "evaluate=100ba"], check_arguments=False)
    copy = load_recipe(write(recipe.to_yaml(comments)), check_arguments=False)
    assert copy.to_dict() == recipe.to_dict()
    assert copy.name == name
    assert yaml.safe_load(recipe.to_yaml())["batch_size"] == recipe.batch_size


@pytest.mark.parametrize(
    "text",
    [
        *(
            "1e-4",
            "010",
            "0x10",
            "1:30",
            "null",
            "no",
            "~",
            "",
            " ",
            "-",
            "a: b",
            "a #b",
            "- a",
            "*a",
            "&a",
            "!a",
            "%a",
        ),
        *("@a", "'", '"', "two\nlines", "tab\tbed", "\x85", "\u2028", "\ufeff", "déjà", "😀", "\x07", "{", "]", "a, b"),
        *("x" * 400, "1_000", ".5", "1.", "2001-01-01", "=", "<<", "?", "\\", "trailing ", "a:", ": a"),
    ],
)
def test_any_text_survives_the_round_trip(write, text: str) -> None:
    recipe = load_recipe("demo/fp32", check_arguments=False)
    data = recipe.to_dict() | {"description": text, "loggers": {"FileLogger": {"filename": text}}}
    recipe = Recipe.model_validate(data)
    from composer_speedups.recipe_yaml import Item, Where, dump

    def item(value):
        if isinstance(value, dict):
            return Item({k: item(v) for k, v in value.items()}, Where("x"))
        return Item([item(v) for v in value] if isinstance(value, list) else value, Where("x"))

    copy = load_recipe(write(dump(item(data), comments=True)), check_arguments=False)
    assert copy.description == text
    assert copy.loggers == {"FileLogger": {"filename": text}}
    assert copy.to_dict() == data
    assert load_recipe(write(copy.to_yaml()), check_arguments=False).to_dict() == data


def test_a_changed_copy_is_written_as_changed() -> None:
    """`tune` makes recipes so."""
    recipe = load_recipe("finetune/fp32", check_arguments=False).model_copy(update={"batch_size": 7})
    assert yaml.safe_load(recipe.to_yaml())["batch_size"] == 7
    built = Recipe(batch_size=9, speedups={"fused_adamw": {}})
    assert (built.learning_rate, built.provenance["batch_size"]) == (5e-5, "default")
    assert yaml.safe_load(built.to_yaml())["speedups"] == {"fused_adamw": {}}


def test_travels_to_another_process() -> None:
    recipe = load_recipe("finetune/fp32", check_arguments=False)
    copy = pickle.loads(pickle.dumps(recipe))
    assert (copy.to_dict(), copy.provenance) == (recipe.to_dict(), recipe.provenance)


# --- Values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1.E-4", 1e-4), ("+1E-4", 1e-4), ("0.0001", 1e-4), (".5", 0.5), ("1_0e-5", None), ("1", 1.0)],
)
def test_numbers_are_numbers(write, text: str, value: float | None) -> None:
    name = write(f"learning_rate: {text}\n")
    if value is None:
        assert "must be a positive number" in refusal(name)
    else:
        assert load_recipe(name, check_arguments=False).learning_rate == value


def test_thousands_may_be_grouped(write) -> None:
    assert load_recipe(write("batch_size: 1_024\n"), check_arguments=False).batch_size == 1024


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("0.1", "0.1dur"), ("0.06dur", "0.06dur"), ("100", "100ba"), ("1ep", "1ep"), ("0", "0ba"), ("0.0", "0dur")),
        ("1e-3", "0.001dur"),
    ],
)
def test_warmup_has_composers_form(write, text: str, value: str) -> None:
    name = write(f"duration: 3ep\nschedule: {{name: linear, warmup: {text}}}\n")
    assert load_recipe(name, check_arguments=False).schedule.warmup == value


def test_yaml_words_for_true(write) -> None:
    assert load_recipe(write("evaluate: off\n"), check_arguments=False).evaluate is False
    assert load_recipe(write("evaluate: 2ep\n"), check_arguments=False).evaluate == "2ep"


# --- Mistakes: one line, with file, line and remedy --------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch_size: -8", "mine.yaml:1: batch_size must be a positive integer, got -8. Write e.g. batch_size: 32"),
        ("seed: 1\n\nbatch_size: 0", "mine.yaml:3: batch_size must be a positive integer, got 0"),
        ("batch_size: true", "batch_size must be a positive integer, got True"),
        ("batch_size: 32.0", "batch_size must be a positive integer, got 32.0"),
        ("batch_size: '32'", "batch_size must be a positive integer, got '32'"),
        ("batch_size: 010", "batch_size must be a positive integer, got '010'"),
        ("batch_size: 0x20", "batch_size must be a positive integer, got '0x20'"),
        ("batch_size: 1:30", "batch_size must be a positive integer, got '1:30'"),
        ("batch_size: [32]", "batch_size must be a positive integer, got [32]"),
        ("batch_size: {a: 1}", "batch_size must be a positive integer, got {'a': 1}"),
        ("batch_size:", "batch_size must be a positive integer, got None"),
        ("batch_size: 99999999999999999999999999", "batch_size must be a positive integer"),
        ("batch_size: 9999999", "batch_size must be a positive integer"),
        ("learning_rate: .nan", "mine.yaml:1: .nan is not a finite number"),
        ("learning_rate: .inf", "mine.yaml:1: .inf is not a finite number"),
        ("learning_rate: -.INF", "-.INF is not a finite number"),
        ("learning_rate: 1e999", "1e999 is not a finite number"),
        ("learning_rate: nan", "learning_rate must be a positive number, at most 1e30, got 'nan'"),
        (
            "learning_rate: 0",
            "learning_rate must be a positive number, at most 1e30, got 0. Write e.g. learning_rate: 1e-4",
        ),
        ("learning_rate: -1e-4", "learning_rate must be a positive number, at most 1e30, got -0.0001"),
        ("learning_rate: true", "learning_rate must be a positive number, at most 1e30, got True"),
        ("learning_rate: 1e-4f", "learning_rate must be a positive number, at most 1e30, got '1e-4f'"),
        ("batchsize: 3", "mine.yaml:1: unknown key 'batchsize'. Nearest: batch_size"),
        ("Batch_Size: 3", "unknown key 'Batch_Size'. Nearest: batch_size"),
        ("task:\n  max_lenght: 3", "mine.yaml:2: unknown key 'max_lenght' in task. Nearest: max_length"),
        ("task:\n\n  name: imbd", "mine.yaml:3: task.name must be 'docstrings', 'imdb', 'text' or 'dummy', got 'imbd'"),
        ("task: {max_length: yes}", "task.max_length must be a"),
        ("task: imdb", "task must be a mapping, got 'imdb'. Write e.g. task: {name: docstrings}"),
        ("task:", "task must be a mapping, got None"),
        ("task: {name: text}", "mine.yaml:1: task text needs path"),
        ("model: {pretrained: maybe}", "model.pretrained must be a boolean or 'auto', got 'maybe'"),
        ("model:\n  config:\n    trust_remote_code: true", "config.trust_remote_code cannot be set"),
        ("model: {config: {a: [1]}}", "model.config"),
        ("optimizer: {name: sgd}", "optimizer.name must be 'adamw' or 'decoupled_adamw', got 'sgd'"),
        ("optimizer: {betas: [0.9]}", "optimizer.betas must be two numbers from 0 to below 1"),
        ("optimizer: {betas: [0.9, 1.0]}", "optimizer.betas must be two numbers from 0 to below 1, got 1.0"),
        ("optimizer: {betas: 0.9}", "optimizer.betas must be two numbers from 0 to below 1, got 0.9"),
        ("optimizer: {weight_decay: -1}", "optimizer.weight_decay must be a number from 0, got -1"),
        ("optimizer: {eps: 0}", "optimizer.eps must be a positive number, got 0"),
        ("schedule: {name: cosin}", "schedule.name must be 'cosine', 'linear' or 'constant', got 'cosin'"),
        ("schedule: {warmup: 1.5}", "schedule.warmup must be a share of the duration below 1"),
        ("schedule: {warmup: 0.99999999999}", "schedule.warmup must be a share of the duration below 1"),
        ("schedule: {warmup: -1}", "schedule.warmup must be a share"),
        ("schedule: {warmup: true}", "schedule.warmup must be a share"),
        ("schedule: {warmup: 1dur}", "schedule.warmup must be a share"),
        (
            "duration: 10ba\nschedule:\n  warmup: 10ba",
            "mine.yaml:3: schedule.warmup 10ba leaves nothing of duration 10ba",
        ),
        (
            "duration: 2ep\nschedule:\n  warmup: 800sp",
            "mine.yaml:3: schedule.warmup 800sp and duration 2ep are not both in samples: "
            "give the warm-up in batches or epochs, or as a share (0.1dur)",
        ),
        (
            "duration: 8000sp\nschedule: {name: constant, warmup: 10}",
            "schedule.warmup 10ba and duration 8000sp are not both in samples: give the warm-up in samples, or",
        ),
        ("duration: 2", "duration must be a number of epochs, batches or samples, got 2. Write e.g. duration: 2ep"),
        ("duration: 0ep", "duration must be a number of epochs"),
        ("duration: 2epochs", "duration must be a number of epochs"),
        ("duration: '2ep\n\n'", "duration must be a number of epochs"),
        ("evaluate: 3", "evaluate must be true, false, or an interval"),
        ("evaluate: sometimes", "evaluate must be true, false, or an interval"),
        ("seed: -1", "seed must be an integer from 0"),
        ("seed: 4294967296", "seed must be an integer from 0"),
        ("workers: -1", "workers must be an integer from 0 to 64, got -1"),
        ("batch_size: 32\nmicrobatch_size: 64", "mine.yaml:2: microbatch_size 64 exceeds batch_size 32"),
        ("name: ../../etc", "name must be letters"),
        ("name: 'a b'", "name must be letters"),
        ("published: {samples_per_second: fast}", "published.samples_per_second must be a positive number, got 'fast'"),
        ("learning_rate: 1e300", "learning_rate must be a positive number, at most 1e30, got 1e+300"),
        ("published: {stable: 1}", "published.stable must be a boolean, got 1"),
        ("batch_size: 8\nbatch_size: 9", "mine.yaml:2: 'batch_size' is given twice, first at line 1. Keep one"),
        ("task: {name: imdb, name: imdb}", "'name' is given twice"),
        ("speedups: [fused_adamw, fused_adamw]", "speed-up 'fused_adamw' is listed twice"),
        (
            "speedups:\n  - mixed_precision: {dtype: fp16}\n  - mixed_precision: {dtype: bf16}",
            "mine.yaml:3: speed-up 'mixed_precision' is listed twice",
        ),
        ("speedups: {fused_adamw: {}, fused_adamw: {}}", "'fused_adamw' is given twice"),
        ("speedups: {fused_adam: {}}", "mine.yaml:1: unknown speed-up 'fused_adam'. Nearest: fused_adamw"),
        ("speedups: {FusedAdamW: {}}", "unknown speed-up 'FusedAdamW'. Nearest: fused_adamw"),
        ("speedups: [fp16]", "unknown speed-up 'fp16'. Write mixed_precision: {dtype: fp16}"),
        ("speedups:", "mine.yaml:1: speedups is empty. Write speedups: {} for none"),
        ("speedups: fused_adamw", "speedups must be a mapping or a list, got 'fused_adamw'"),
        ("speedups: {fused_adamw: fast}", "speedups.fused_adamw must be a mapping of its arguments, got 'fast'"),
        ("speedups: {fused_adamw: 1}", "speedups.fused_adamw must be a mapping of its arguments, got 1"),
        ("speedups: {fused_adamw: null}", "is null, which removes it, but nothing was inherited"),
        ("speedups: [3]", "a speed-up in a list is a name, or one name with its arguments, got 3"),
        ("speedups: [{a: {}, b: {}}]", "a speed-up in a list is a name, or one name"),
        ("speedups: {torch_compile: {scope: [a]}}", "speedups.torch_compile.scope must be a single value, got ['a']"),
        ("loggers: {TensorBoardLogger: {}}", "unknown logger 'TensorBoardLogger'. Nearest: TensorboardLogger"),
        ("loggers: {os.system: {command: ls}}", "unknown logger 'os.system'"),
        ("loggers: {FileLogger: {filename: {a: 1}}}", "loggers.FileLogger.filename must be a single value"),
        ("recipes: [finetune/fp32]", "unknown key 'recipes'"),
        ("", "mine.yaml:1: is empty"),
        ("# nothing\n", "is empty"),
        ("- batch_size: 3", "must hold keys and values, got [{'batch_size': 3}]"),
        ("just text", "must hold keys and values, got 'just text'"),
    ],
)
def test_mistakes_are_told_in_one_line(write, text: str, expected: str) -> None:
    message = refusal(write(text))
    assert expected in message
    assert message.startswith("mine.yaml:")


def test_speedups_arguments_are_checked(write) -> None:
    message = refusal(write("speedups:\n  low_precision_norm:\n    eps: 3\n"), check_arguments=True)
    assert message.startswith("mine.yaml:3: speed-up 'low_precision_norm' has no argument 'eps'")
    message = refusal(write("seed: 1\nspeedups:\n  mixed_precision: {dtype: fp8}\n"), check_arguments=True)
    assert message.startswith("mine.yaml:3: ") and "fp8" in message
    for name in ("self", "key", "state", "__class__", "*"):
        message = refusal(write(f"speedups: {{low_precision_norm: {{'{name}': 1}}}}\n"), check_arguments=True)
        assert "has no argument" in message


def test_contradictions_are_found_when_loading(write) -> None:
    message = refusal(write("speedups:\n  foreach_adamw: {}\n  fused_adamw: {}\n"), check_arguments=True)
    assert message.startswith("mine.yaml:3: foreach_adamw (mine.yaml:2) and fused_adamw contradict each other")
    message = refusal(write("extends: finetune/compile\nspeedups:\n  adamw_8bit: {}\n"), check_arguments=True)
    assert message.startswith("mine.yaml:3: ") and "foreach_adamw: null removes an inherited one" in message
    message = refusal(write("speedups: [low_precision_norm, fused_layer_norm]\n"), check_arguments=True)
    assert "contradict each other" in message


def test_unknown_recipes_and_suites(write) -> None:
    write("")
    assert refusal("finetune/fp23").startswith("unknown recipe 'finetune/fp23'. Nearest: finetune/fp32")
    assert "Nearest: finetune/compile" in refusal("finetune/Compile")
    assert refusal("gone.yaml") == "gone.yaml: there is no such file"
    assert "is a suite" in refusal("demo") or "is the name of" in refusal("demo")
    assert "unknown suite 'dmo'. Nearest: demo" in refusal("dmo", loader=load_suite)
    assert refusal("no/such/thing at all")
    for name in (
        "",
        " ",
        "\0",
        "a\0.yaml",
        "x" * 5000,
        "x" * 5000 + ".yaml",
        "a\nb",
        "\x1b[31m.yaml",
        "../../etc/passwd",
    ):
        assert refusal(name)
        assert refusal(name, loader=load_suite)


# --- Hostile files -----------------------------------------------------------------------------------------------

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BOMB, "anchors (&) and aliases (*) are not allowed"),
        ("task: &t {name: imdb}\nmodel: *t", "anchors (&)"),
        ("task: &t {name: imdb}\nmodel: {<<: *t}", "anchors (&)"),
        ("task: {<<: {name: imdb}}", "unknown key '<<' in task"),
        ("seed: *nothing", "anchors (&) and aliases (*)"),
        ("seed: !!python/object/apply:os.system ['touch pwned']", "is not allowed: recipes are plain data"),
        ("seed: !!python/name:os.system", "is not allowed"),
        ("description: !!binary aGk=", "is not allowed"),
        ("seed: !!int '3'", "is not allowed"),
        ("seed: !mine 3", "is not allowed"),
        ("!!map {seed: 3}", "is not allowed"),
        ("? [a, b]\n: 3", "a key must be a word"),
        ("? {a: b}\n: 3", "a key must be a word"),
        ("task: " + "[" * 30_000, "nested deeper than 8 levels"),
        ("task: " + "{a: " * 10_000, "nested deeper than 8 levels"),
        ("\n".join("  " * i + "a:" for i in range(150)), "nested deeper than 8 levels"),
        ("- " * 20_000, "nested deeper than 8 levels"),
        ("optimizer: {betas: [" + "1, " * 15_000 + "1]}", "holds more than 2000 values"),
        ("x" * 70_000, "is larger than 64 KiB"),
        ("seed: 1\n---\nseed: 2\n", "mine.yaml:2: cannot be read as YAML"),
        ("seed: 1\n\tbatch_size: 2", "cannot be read as YAML"),
        ("batch_size: 1\n\tseed: 2", "Indent with spaces, not tabs"),
        ("batch_size: 8\n seed: 1\n", "Is the line indented as those beside it"),
        ("description: a: b", "needs quotes"),
        ("seed: [1", "cannot be read as YAML"),
        ("seed: 'open", "cannot be read as YAML"),
        ("seed: 1\nseed 2\n", "cannot be read as YAML: could not find expected ':'. Write e.g. batch_size: 16"),
        ("seed: @x", "mine.yaml:1: cannot be read as YAML"),
        ("%YAML 9.9\n---\nseed: 1", "cannot be read as YAML"),
        ("seed: 1\ndescription: a\x00b", "mine.yaml:2: cannot be read as YAML"),
        ("description: a\x1bb", "cannot be read as YAML"),
        ('description: "a\\0b"', "holds a NUL character"),
        ('description: "\\ud800"', "lone surrogate"),
        ('"\\e[31mred": 1', r"unknown key '\x1b[31mred'"),
        ('"two\\nlines": 1', r"unknown key 'two\nlines'"),
        ("k" * 300 + ": 1", "a key of 300 characters"),
        (b"\xff\xfe\x00s", "is not UTF-8 text"),
        (b"seed: 1\ndescription: caf\xe9\n", "mine.yaml:2: is not UTF-8 text"),
        (b"\x7fELF\x02\x01\x01" + bytes(100), "mine.yaml"),
        ("seed: " + "9" * 5000, "seed must be an integer"),
        ("learning_rate: 1e" + "9" * 5000, "learning_rate must be a positive number"),
        ("learning_rate: 0." + "0" * 5000 + "1", "learning_rate must be a positive number"),
        ("batch_size: " + "1_" * 20_000 + "1", "batch_size must be a positive integer"),
        ("description: " + "long " * 1000, "description must be a few words"),
        ("__class__: 1", "unknown key '__class__'"),
        ("_item: 1", "unknown key '_item'"),
        ("model_config: {extra: allow}", "unknown key 'model_config'"),
        ("model: {config: {auto_map: x}}", "cannot be set"),
    ],
)
def test_hostile_files_are_refused_in_one_line(write, text: str | bytes, expected: str) -> None:
    assert expected in refusal(write(text))
    assert os.listdir() == ["mine.yaml"], "nothing in a recipe runs code"


def test_byte_order_mark_and_windows_line_ends(write) -> None:
    recipe = load_recipe(write(b"\xef\xbb\xbfseed: 3\r\nbatch_size: 4\r\n"), check_arguments=False)
    assert (recipe.seed, recipe.batch_size, recipe.provenance["batch_size"]) == (3, 4, "mine.yaml:2")


def test_what_is_no_file(write) -> None:
    write("")
    os.mkdir("folder.yaml")
    assert "is a folder" in refusal("folder.yaml")
    os.mkfifo("pipe.yaml")  # opening it would wait for ever
    assert refusal("pipe.yaml")
    os.symlink("/dev/zero", "endless.yaml")
    assert refusal("endless.yaml")
    os.symlink("loop.yaml", "loop.yaml")
    assert refusal("loop.yaml")
    if os.geteuid() != 0:
        os.chmod(write("seed: 1", "secret.yaml"), 0)
        assert "cannot be read: Permission denied" in refusal("secret.yaml")


def test_mangled_recipes_never_give_a_traceback(write) -> None:
    """A quick fuzz: shipped recipes with bytes dropped, doubled and replaced either load or are refused in one line."""
    rng = random.Random(5)
    texts = [(ROOT / f"{name}.yaml").read_text() for name in recipe_names()]
    spice = [
        "null",
        "-1",
        "{",
        "]",
        ": ",
        "\n",
        "  ",
        "&a",
        "*a",
        "!!x",
        "1e999",
        "'",
        '"',
        "\t",
        "#",
        "true",
        "[]",
        "\0",
    ]
    loaded = refused = 0
    for _ in range(400):
        text = rng.choice(texts)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice([*spice, "", text[at : at + 30]]) + text[at + rng.randint(0, 12) :]
        name = write(text)
        try:
            recipe = load_recipe(name, check_arguments=False)
        except RecipeError as error:
            assert str(error).isprintable()
            refused += 1
        else:
            assert (
                load_recipe(write(recipe.to_yaml(), "copy.yaml"), check_arguments=False).to_dict() == recipe.to_dict()
            )
            loaded += 1
    assert loaded > 20 and refused > 20, "the fuzz tells nothing unless both happen"


# --- key=value ---------------------------------------------------------------------------------------------------


def test_overrides_reach_every_field() -> None:
    recipe = load_recipe(
        "finetune/compile",
        [
            *("task.max_length=128", "model.config.num_hidden_layers=2", "learning_rate=1e-5", "batch_size=8"),
            *("optimizer.betas=[0.8, 0.9]", "optimizer.weight_decay=0", "schedule.name=linear", "batch_size=16"),
            *("speedups.torch_compile.mode=default", "speedups.fused_adamw={}", "speedups.foreach_adamw=null"),
            *("speedups.mixed_precision=false", "speedups.low_precision_norm=true", "description='a=b, c'"),
            *("published.samples_per_second=3", "microbatch_size=8", "microbatch_size="),
            "loggers.TensorboardLogger={log_dir: logs}",
        ],
        check_arguments=False,
    )
    assert recipe.task.max_length == 128
    assert recipe.model.config == {"num_hidden_layers": 2}
    assert recipe.learning_rate == 1e-5
    assert recipe.optimizer.betas == (0.8, 0.9)
    assert recipe.optimizer.weight_decay == 0
    assert recipe.speedups == {
        "matmul_precision": {"precision": "high"},
        "torch_compile": {"scope": "model", "mode": "default"},
        "fused_adamw": {},
        "low_precision_norm": {},
    }
    assert recipe.published is not None and recipe.published.samples_per_second == 3
    assert recipe.microbatch_size is None
    assert recipe.description == "a=b, c"
    assert recipe.loggers == {"TensorboardLogger": {"log_dir": "logs"}}
    assert recipe.schedule.name == "linear"
    assert recipe.batch_size == 16, "the last one counts"
    assert recipe.provenance["speedups.torch_compile.mode"] == "command line"
    assert recipe.provenance["speedups.torch_compile.scope"].endswith("finetune/compile.yaml:5")


def test_every_leaf_of_the_schema_can_be_overridden() -> None:
    recipe = load_recipe("finetune/compile", check_arguments=False)
    for path in recipe.provenance:
        if path in ("speedups.foreach_adamw",):
            continue
        value = recipe.to_dict()
        for key in path.split("."):
            value = value[key]
        text = "null" if value is None else yaml.safe_dump(value, default_flow_style=True).splitlines()[0]
        changed = load_recipe("finetune/compile", [f"{path}={text}"], check_arguments=False)
        assert changed.to_dict() == recipe.to_dict()
        assert changed.provenance[path] == "command line", path


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("batch_size=-8", "command line: batch_size must be a positive integer, got -8"),
        ("batchsize=8", "command line: unknown key 'batchsize'. Nearest: batch_size"),
        ("task.max_lenght=8", "command line: unknown key 'max_lenght' in task. Nearest: max_length"),
        ("batch_size", "'batch_size' is not key=value"),
        ("=3", "is not key=value"),
        ("a..b=3", "is not key=value"),
        (".=3", "is not key=value"),
        ("batch_size.x=3", "batch_size must be a positive integer, got {'x': 3}"),
        ("a.b.c.d.e.f=3", "unknown key 'a.b.c.d.e.f'"),
        ("." * 100_000 + "=1", "is not key=value"),
        (".".join("a" * 10_000) + "=1", "unknown key"),
        ("task=dummy", "task must be a mapping"),
        ("speedups=null", "speedups is empty"),
        ("speedups.fused_adamw.x.y=3", "speedups.fused_adamw"),
        ("speedups.fused_adamw=3", "must be a mapping of its arguments"),
        ("speedups.nonsense={}", "command line: unknown speed-up 'nonsense'"),
        (
            "speedups.torch_compile.mode=default",
            "no speed-up torch_compile to change here. There are: matmul_precision",
        ),
        ("speedups.fused_adamw=null", "no speed-up fused_adamw to change here"),
        ("loggers.FileLogger.filename=x", "no logger FileLogger to change here. There are none"),
        ("extends=finetune/fp16", "extends cannot be overridden"),
        ("learning_rate=.nan", "command line: .nan is not a finite number"),
        ("seed=!!python/name:os.system", "is not allowed"),
        ("seed=@", "command line: cannot be read as YAML"),
        ("seed=[[[[[[[[[[[[", "nested deeper"),
        ("seed=" + "[" * 6000, "too long"),
        ("description=a\0b", "cannot be read as YAML"),
        ("seed=1\nbatch_size: 3", "cannot be read as YAML"),
        ("seed=a: 1\nb: 3", "seed must be an integer"),
        ("task.__class__=3", "unknown key '__class__' in task"),
    ],
)
def test_overrides_that_are_mistaken(override: str, expected: str) -> None:
    assert expected in refusal("finetune/fp32", [override])


@pytest.mark.parametrize(
    ("override", "left"),
    [
        ("speedups={}", {}),
        ("model.config={}", {}),
        ("model.config={hidden_size: 128}", {"hidden_size": 128, "num_hidden_layers": 4}),
        ("speedups.torch_compile={}", {"torch_compile": {"scope": "block"}}),
    ],
)
def test_an_empty_mapping_of_names_means_none_of_the_inherited(write, override: str, left: dict) -> None:
    write("model: {config: {num_hidden_layers: 4}}\nspeedups: {torch_compile: {scope: block}}\n", "base.yaml")
    child = write("extends: base.yaml\n", "child.yaml")
    recipe = load_recipe(child, [override], check_arguments=False)
    assert (recipe.model.config if "config" in override else recipe.speedups) == left
    section, _, value = override.partition("=")
    if value == "{}" and section.count(".") < 2 and not section.startswith("speedups."):  # the same in a file
        text = "speedups: {}" if section == "speedups" else "model: {config: {}}"
        same = load_recipe(write(f"extends: base.yaml\n{text}\n", "same.yaml"), check_arguments=False)
        assert same.to_dict() | {"name": ""} == recipe.to_dict() | {"name": ""}


def test_overrides_must_be_a_list() -> None:
    with pytest.raises(TypeError, match="list of 'key=value'"):
        load_recipe("finetune/fp32", "batch_size=3")


# --- Suites ------------------------------------------------------------------------------------------------------


def test_own_suite_with_own_recipe(write) -> None:
    write("extends: finetune/fp16\nbatch_size: 8\n", "sub/mine.yaml")
    name = write(
        "description: two\nbaseline: finetune/fp32\nrecipes: [finetune/fp32, mine.yaml]\n"
        "overrides:\n  duration: 5ba\n  speedups: {foreach_adamw: null}\n"
        "cuda:\n  recipes: [mine.yaml]\n  baseline: mine.yaml\n"
        "cpu: {description: one of a CPU}\ncpu_without_bf16: {overrides: {duration: 7ba}}\n",
        "sub/suite.yaml",
    )
    suite = load_suite(name, "cpu", ["seed=3"], check_arguments=False)
    assert (suite.name, suite.description, suite.baseline, suite.hardware) == (
        *("suite", "one of a CPU", "finetune/fp32", "cpu"),
    )
    assert [r.name for r in suite.recipes] == ["finetune/fp32", "mine"]
    assert [(r.duration, r.seed) for r in suite.recipes] == [("5ba", 3)] * 2
    assert all("foreach_adamw" not in r.speedups for r in suite.recipes)
    assert suite.recipes[0].provenance["duration"] == "sub/suite.yaml:5"
    suite = load_suite(name, "cuda", check_arguments=False)
    assert [r.name for r in suite.recipes] == ["mine"]
    assert (suite.description, suite.baseline) == ("two", "mine")
    suite = load_suite(name, "cpu_without_bf16", check_arguments=False)
    assert (suite.description, suite.baseline) == ("one of a CPU", "finetune/fp32"), "the CPU's, where it has no own"
    assert [r.duration for r in suite.recipes] == ["7ba", "7ba"]


def test_override_of_an_argument_is_for_the_rows_that_have_it() -> None:
    recipes = load_recipes(
        ["finetune/fp32", "finetune/compile"], ["speedups.torch_compile.mode=default"], check_arguments=False
    )
    assert "torch_compile" not in recipes[0].speedups
    assert recipes[1].speedups["torch_compile"]["mode"] == "default"
    assert "no speed-up adamw_8bit to change" in refusal(
        ["finetune/fp32", "finetune/compile"], ["speedups.adamw_8bit=null"], loader=load_recipes
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("recipes: [finetune/fp32]", "baseline is missing. Write e.g. baseline: finetune/fp32"),
        ("baseline: finetune/fp32", "recipes is missing"),
        ("baseline: finetune/fp32\nrecipes: []", "recipes must be a list of recipe names, got []"),
        ("baseline: finetune/fp32\nrecipes: finetune/fp32", "recipes must be a list of recipe names"),
        ("baseline: finetune/fp32\nrecipes: [3]", "recipes must be a list of recipe names"),
        ("baseline: finetune/fp32\nrecipes:\n- finetune/fp32\n- finetune/fp23", "mine.yaml:4: unknown recipe"),
        ("baseline: finetune/fp32\nrecipes:\n- finetune/fp32\n- finetune/fp32", "mine.yaml:4: finetune/fp32 is listed"),
        ("baseline: finetune/fp16\nrecipes: [finetune/fp32]", "mine.yaml:1: baseline finetune/fp16 is none of"),
        ("baseline: fp32\nrecipes: [finetune/fp32]", "mine.yaml:1: baseline: 'fp32' is the name of 5 recipes"),
        ("baseline: nonsense\nrecipes: [finetune/fp32]", "mine.yaml:1: baseline: unknown recipe 'nonsense'"),
        ("baseline: finetune/fp32\nrecipes: [finetune/fp32]\nrecipe: 3", "mine.yaml:3: unknown key 'recipe'"),
        ("baseline: finetune/fp32\nrecipes: [finetune/fp32]\ncpu: 3", "mine.yaml:3: cpu must be a mapping, got 3"),
        ("baseline: finetune/fp32\nrecipes: [finetune/fp32]\ncuda: {recipe: 3}", "unknown key 'recipe'"),
        ("baseline: finetune/fp32\nrecipes: [finetune/fp32]\noverrides: 3", "overrides must be a mapping"),
        (
            "baseline: finetune/fp32\nrecipes: [finetune/fp32]\noverrides:\n  task:\n    max_lenght: 3",
            "mine.yaml:5: unknown key 'max_lenght' in task",
        ),
        ("batch_size: 3", "unknown key 'batch_size'"),
    ],
)
def test_mistaken_suites(write, text: str, expected: str) -> None:
    assert expected in refusal(write(text), loader=load_suite)


def test_hardware_is_one_of_three() -> None:
    with pytest.raises(ValueError, match="must be 'cpu', 'cuda', 'cpu_without_bf16', got 'tpu'"):
        load_suite("demo", "tpu")


# --- What the names refer to -------------------------------------------------------------------------------------


def test_loggers_are_composers() -> None:
    import composer.loggers
    from composer.loggers import LoggerDestination

    for name in LOGGERS:
        assert issubclass(getattr(composer.loggers, name), LoggerDestination)


def test_speedups_of_the_recipes_exist() -> None:
    used = {key for name in recipe_names() for key in load_recipe(name, check_arguments=False).speedups}
    assert used <= set(registry.keys())
