"""The look at the machine that a study takes first."""

from __future__ import annotations

import pytest
import torch

from composer_speedups import hardware
from composer_speedups.ablation.jobs import survey, train, verify
from composer_speedups.algorithms import mixed_precision
from composer_speedups.errors import TaskError
from composer_speedups.measurement.results import RunResult
from composer_speedups.recipes import Recipe, load_recipe
from composer_speedups.tasks.inputs import data_of, marks
from composer_speedups.training import run as training


def look(*recipes: Recipe, planned: bool = False) -> dict:
    return survey({"recipes": list(recipes), "peaks": {}, "planned": planned}, print)


def contradictory() -> Recipe:
    return load_recipe("demo/compile", ["speedups.fused_adamw={}"], check_arguments=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is missing")
def test_the_reason_is_that_of_the_rows_own_speed_up():
    found = look(*(load_recipe(f"demo/{name}", check_arguments=False) for name in ("fp32", "tf32", "fp16")))
    assert found["error"] == "" and set(found["skip"]) == {"demo/tf32", "demo/fp16"}
    assert found["skip"]["demo/tf32"].startswith("matmul_precision: TF32 needs")
    assert found["skip"]["demo/fp16"].startswith("mixed_precision: fp16 needs a CUDA GPU")
    assert found["skip"]["demo/fp16"].endswith("(nor can matmul_precision be used here)")


def test_a_contradiction_is_the_users_mistake_or_a_plans_row_to_skip():
    asked = look(contradictory())
    assert "contradict each other" in asked["error"] and asked["skip"] == {}
    planned = look(contradictory(), planned=True)
    assert planned["error"] == "" and "contradict each other" in planned["skip"]["demo/compile"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU multiplies bf16")
@pytest.mark.parametrize("multiplies", [True, False])
def test_bf16_where_it_would_take_hours_is_skipped_with_the_reason(monkeypatch, multiplies: bool):
    monkeypatch.setattr(mixed_precision, "multiplies_bf16", lambda: multiplies)
    names = ("cpu/fp32", "cpu/bf16", "cpu/fastest", "cpu/fastest_fp32")
    found = look(*(load_recipe(name, check_arguments=False) for name in names))
    assert found["error"] == "" and set(found["skip"]) == (set() if multiplies else {"cpu/bf16", "cpu/fastest"})
    wanted = "mixed_precision: this CPU has no bf16 products"
    assert all(reason.startswith(wanted) for reason in found["skip"].values())


def test_a_peak_that_cannot_be_measured_is_told(monkeypatch):
    def refuses(device: str, precision: str) -> float:
        raise RuntimeError("no such product\nhere")

    monkeypatch.setattr(hardware, "matmul_peak", refuses)
    recipe = load_recipe("demo/fp32", check_arguments=False)
    found = survey({"recipes": [recipe], "peaks": {recipe.name: "fp32"}}, print)
    assert found["peaks"] == {} and found["unmeasured"] == {"fp32": "no such product"}


def test_a_run_does_not_read_what_changed_since_the_study_began(tmp_path):
    (tmp_path / "mine.csv").write_text("text,label\n" + "one of them,a\nand the other,b\n" * 40)
    overrides = [f"task={{name: text, path: {tmp_path / 'mine.csv'}}}", "duration=1ba", "schedule.warmup=0ba"]
    recipe = load_recipe("demo/fp32", overrides).to_dict()
    payload = {"recipe": recipe, "seed": 1, "inputs": marks(data_of(recipe))}
    (tmp_path / "mine.csv").write_text("text,label\n" + "one of them,b\nand the other,a\n" * 40)
    with pytest.raises(TaskError, match=r"mine\.csv has changed since the study began.*or choose another --out"):
        train(payload, print)


def test_a_run_has_the_seed_that_the_study_asks_for(monkeypatch) -> None:
    """And not the recipe's: its repetitions would be one run, and their scatter none."""
    monkeypatch.setattr(training, "run", lambda recipe, *, seed, **_: RunResult(recipe.name, seed))
    recipe = load_recipe("demo/fp32", ["seed=5"], check_arguments=False).to_dict()
    assert [train({"recipe": recipe, "seed": seed}, print)["seed"] for seed in (5, 6, 7)] == [5, 6, 7]


TINY = [
    "task={name: dummy, max_length: 32, mean_length: 16, vocabulary: 256, train_samples: 24, eval_samples: 8}",
    "model.config={num_hidden_layers: 1, hidden_size: 32, num_attention_heads: 2, intermediate_size: 64}",
    "batch_size=8",
    "duration=1ba",
    "schedule.warmup=0ba",
]


def test_numbers_are_compared() -> None:
    recipe, told = load_recipe("cpu/fastest_fp32", TINY).to_dict(), []
    found = verify({"recipe": recipe, "seed": 3, "train_samples": 24}, told.append)["numerics"]
    assert found["holds"] and found["wrong"] == []
    assert found["precision"] == "float32" and 0 < found["gradients"] < 3e-6
    assert {line["phase"] for line in told} == {"verify"} and told[-1]["message"].endswith("on the CPU")
