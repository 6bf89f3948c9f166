"""What plans make of the shipped recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_speedups.ablation.plans import equal_batch, expand, root
from composer_speedups.errors import RecipeError
from composer_speedups.recipes import Recipe, load_recipe
from composer_speedups.recipes.suites import load_suite

TRUE_FP32 = {"matmul_precision": {"precision": "highest"}}


def load(name: str, *overrides: str) -> Recipe:
    return load_recipe(name, overrides, check_arguments=False)


def rows(plan: str, name: str, *overrides: str) -> tuple[dict[str, Recipe], str]:
    recipe = load(name, *overrides)
    found, baseline = expand(plan, [recipe], root(recipe))
    assert len({r.name for r in found}) == len(found)
    for made in found:  # what a plan makes must be a recipe that loads again
        Recipe.model_validate(made.to_dict())
    return {r.name: r for r in found}, baseline


def test_the_root_has_the_base_settings_and_the_overrides():
    found = root(load("finetune/compile", "batch_size=4", "task.max_length=64"))
    assert (found.name, found.speedups) == ("finetune/fp32", TRUE_FP32)
    assert (found.batch_size, found.learning_rate, found.task.max_length) == (4, 1e-4, 64)
    alone = root(load("finetune/fp32"))
    assert (alone.name, alone.speedups) == ("finetune/fp32.plain", TRUE_FP32)


def test_the_root_of_a_file_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "base.yaml").write_text("extends: demo/fp32\nbatch_size: 8\n")
    (tmp_path / "mine.yaml").write_text("extends: ./base.yaml\nspeedups: {fused_adamw: {}}\n")
    for folder, name in ((tmp_path, "mine.yaml"), (tmp_path.parent, f"{tmp_path.name}/mine.yaml")):
        monkeypatch.chdir(folder)
        assert root(load(f"./{name}")).name == "demo/fp32"
    (tmp_path / "base.yaml").write_text("batch_size: 8\ntask: {name: dummy}\n")
    assert root(load(f"./{name}")).name == "base"


def test_leave_one_out_brings_the_base_setting_back():
    found, baseline = rows("leave-one-out", "finetune/compile")
    full = found[baseline].speedups
    assert baseline == "finetune/compile" and len(found) == 1 + len(full)
    for key in full:
        left = found[f"finetune/compile.without_{key}"].speedups
        assert left == {k: v for k, v in full.items() if k != key} | (TRUE_FP32 if key == "matmul_precision" else {})


def test_a_base_setting_is_not_left_out():
    found, _ = rows("leave-one-out", "demo/bf16")
    assert set(found) == {"demo/bf16", "demo/bf16.without_foreach_adamw", "demo/bf16.without_mixed_precision"}
    assert all(r.speedups["matmul_precision"] == {"precision": "highest"} for r in found.values())


def test_one_at_a_time_and_pairs():
    found, baseline = rows("one-at-a-time", "demo/compile")
    added = {"foreach_adamw": {}, "mixed_precision": {"dtype": "bf16"}, "torch_compile": {"scope": "block"}}
    assert baseline == "demo/fp32"
    assert {n: r.speedups for n, r in found.items()} == {"demo/fp32": TRUE_FP32} | {
        f"demo/fp32+{key}": TRUE_FP32 | {key: value} for key, value in added.items()
    }
    found, _ = rows("pairs", "demo/compile")
    assert len(found) == 1 + 3 + 3
    assert set(found["demo/fp32+mixed_precision+torch_compile"].speedups) == {
        "matmul_precision",
        "mixed_precision",
        "torch_compile",
    }


def test_ladder_adds_one_a_row():
    found, baseline = rows("ladder", "demo/compile")
    counts = [len(r.speedups) for r in found.values()]
    assert counts == [1, 2, 3, 4] and baseline == "demo/fp32" and list(found)[-1] == "demo/compile"


@pytest.mark.parametrize("plan", ["one-at-a-time", "pairs", "ladder"])
def test_what_a_plan_adds_is_the_switch_and_not_the_batch(plan: str):
    """A larger batch of the recipe that the switches come from would be credited to each of them."""
    found, baseline = rows(plan, "finetune/compile_larger_batch")
    made = [r for r in found.values() if r.name != "finetune/compile_larger_batch"]
    assert len(made) > 3 and {(r.batch_size, r.learning_rate) for r in made} == {
        (found[baseline].batch_size, found[baseline].learning_rate)
    }
    if plan == "ladder":
        target = found["finetune/compile_larger_batch"]
        assert target.batch_size > found[baseline].batch_size and made[-1].speedups == target.speedups
        again = equal_batch(list(found.values()), found[baseline])
        assert [r.name for r in again] == list(found), "the row before the last is the recipe at the baseline's batch"


def test_a_warm_up_in_batches_is_the_baselines_only_with_its_duration():
    baseline = load("demo/fp32", "duration=1ep", "schedule.warmup=100ba")
    source = load("demo/bf16", "duration=50ba", "schedule.warmup=10ba")
    found, _ = expand("one-at-a-time", [source], baseline)
    assert (found[1].duration, found[1].schedule.warmup) == ("50ba", "10ba")


def test_evaluations_counted_in_batches_are_the_baselines_too():
    baseline, source = (load(name, "batch_size=8", "evaluate=100ba") for name in ("demo/fp32", "demo/bf16"))
    source = source.model_copy(update={"batch_size": 32, "evaluate": "25ba"})
    assert [r.evaluate for r in equal_batch([baseline, source], baseline)] == ["100ba", "25ba", "100ba"]


def test_ladder_of_recipes_starts_with_a_baseline_from_outside():
    recipes = [load("demo/bf16"), load("demo/compile")]
    found, baseline = expand("ladder", recipes, load("demo/fp32"))
    assert [r.name for r in found] == ["demo/fp32", "demo/bf16", "demo/compile"] and baseline == "demo/fp32"
    found, _ = expand("ladder", recipes, recipes[1])
    assert [r.name for r in found] == ["demo/bf16", "demo/compile"], "one that is among them stays where it is"


def test_of_a_suite_each_speed_up_once_with_its_arguments():
    suite = load_suite("demo", "cpu", check_arguments=False)
    found, _ = expand("one-at-a-time", suite.recipes, suite.recipes[0])
    names = [r.name for r in found]
    assert "demo/fp32+mixed_precision.fp16" in names and "demo/fp32+mixed_precision.bf16" in names
    assert len(names) == len(set(names))
    pairs, _ = expand("pairs", suite.recipes, suite.recipes[0])
    assert "demo/fp32+mixed_precision.fp16+mixed_precision.bf16" not in [r.name for r in pairs]


def test_equal_batch_adds_what_differs():
    recipes = [load("finetune/fp32"), load("finetune/fp16"), load("finetune/fp16_larger_batch")]
    found = equal_batch(recipes, recipes[0])
    assert [r.name for r in found] == [*(r.name for r in recipes), "finetune/fp16_larger_batch.equal_batch"]
    assert (found[-1].batch_size, found[-1].learning_rate, found[-1].published) == (40, 1e-4, None)
    assert found[-1].speedups == recipes[-1].speedups


def test_equal_batch_of_tuned_rows_is_the_untuned_row_at_the_measured_baseline_s_values():
    untuned = [load("demo/fp32", "schedule.warmup=6ba"), load("demo/bf16", "schedule.warmup=6ba")]
    values = [
        {"batch_size": 96, "learning_rate": 3e-4, "duration": "10ba"},
        {"batch_size": 128, "learning_rate": 4e-4, "duration": "8ba"},
    ]
    tuned = [
        recipe.model_copy(
            update=new
            | {"name": f"{recipe.name}.tuned", "description": "tuned"}
            | {"schedule": recipe.schedule.model_copy(update={"warmup": "2ba"})}
        )
        for recipe, new in zip(untuned, values, strict=True)
    ]
    found = equal_batch(tuned, tuned[0], untuned)
    assert [r.name for r in found] == ["demo/fp32.tuned", "demo/bf16.tuned", "demo/bf16.equal_batch"]
    equal = found[-1]
    assert (equal.batch_size, equal.learning_rate) == (96, 3e-4)
    assert (equal.duration, equal.schedule.warmup) == ("10ba", "2ba"), "as many steps as the baseline"
    assert equal.speedups == untuned[1].speedups and "tuned" not in equal.description.partition(",")[0]
    Recipe.model_validate(equal.to_dict())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("ladders", "unknown plan 'ladders'. Choose ladder"),
        ("leave-one-out", "nothing to leave out"),
        ("pairs", "nothing to compare"),
    ],
)
def test_mistakes(plan: str, message: str):
    recipe = load("demo/fp32")
    with pytest.raises(RecipeError, match=message):
        expand(plan, [recipe], recipe)
