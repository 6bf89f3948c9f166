"""Recipes as files: written and read back, values of all forms, and mistakes, each told in one line."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path

import pytest
import yaml
from refusals import refusal

from composer_speedups.errors import RecipeError
from composer_speedups.recipes import Recipe, load_recipe
from composer_speedups.recipes.files import recipe_names
from composer_speedups.recipes.suites import load_suite

ROOT = Path(__file__).resolve().parents[2] / "recipes"


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
    from composer_speedups.recipes.yaml import Item, Where, dump

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
        (
            "task:\n\n  name: imbd",
            "mine.yaml:3: task.name must be 'docstrings', 'imdb', 'text', 'hub' or 'dummy', got 'imbd'",
        ),
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


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ("cuda_graphs: {}", "gradient_checkpointing: {}", "keeps the memory that gradient_checkpointing gives back"),
        ("cuda_graphs: {}", "gradient_release: {}", "keeps the memory that gradient_release gives back"),
        ("cuda_graphs: {}", "torch_compile: {scope: model}", "Give it scope='block' and no mode, or remove it"),
        ("gradient_release: {}", "mixed_precision: {dtype: fp16}", "Use mixed_precision with dtype: bf16"),
        ("gradient_release: {}", "torch_compile: {scope: model}", "Use torch_compile with scope: block"),
        ("gradient_release: {}", "apex_fused_adamw: {}", "Use fused_adamw, or remove gradient_release"),
    ],
)
def test_one_that_cannot_be_beside_another_is_found_when_loading(write, one: str, other: str, message: str) -> None:
    """On whatever machine, before a Trainer is made."""
    key = other.partition(":")[0]
    for line, (first, second) in ((3, (one, other)), (2, (other, one))):
        found = refusal(write(f"speedups:\n  {first}\n  {second}\n"), check_arguments=True)
        assert found.startswith(f"mine.yaml:{line}: ") and message in found
        assert found.endswith(f"; {key}: null removes an inherited one")


def test_what_uses_gradients_as_they_come_is_not_for_those_that_accumulate(write) -> None:
    own = "microbatch_size: 2\nspeedups: {gradient_release: {}}\n"
    message = refusal(write(f"batch_size: 8\n{own}"), check_arguments=True)
    assert message.startswith("mine.yaml:2: microbatch_size 2 of 8 accumulates gradients, and gradient_release (mine.y")
    assert "Set microbatch_size: null" in message and "gradient_release: null" in message
    load_recipe(write(f"batch_size: 2\n{own}"))


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
