"""`key=value` on recipes and suites, and suites of one's own."""

from __future__ import annotations

import pytest
import yaml
from refusals import refusal

from composer_speedups.recipes import load_recipe, load_recipes
from composer_speedups.recipes.suites import load_suite

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
    assert (suite.name, suite.description, suite.baseline) == ("suite", "one of a CPU", "finetune/fp32")
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
