"""What to switch on where a recipe does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from composer_speedups.cli import main
from composer_speedups.fitting import what_fits
from composer_speedups.measurement import memory
from composer_speedups.measurement.memory import Memory, predict
from composer_speedups.recipes import Recipe, load_recipe

VIEWS, RELEASE, CHECKPOINT, EIGHT = (
    "gradient_as_bucket_view",
    "gradient_release",
    "gradient_checkpointing",
    "adamw_8bit",
)
CPU = torch.device("cpu")


def load(*changes: str) -> Recipe:
    """Four of BERT-base's layers: 137 MB of weights."""
    size = "{num_hidden_layers: 4, hidden_size: 768, num_attention_heads: 12, intermediate_size: 3072}"
    return load_recipe("demo/fp32", [f"model.config={size}", *changes])


def of_rows(rows: int) -> Callable[[Recipe], Memory]:
    """Few: weights, gradients and states are most of it. Many: activations are."""
    return lambda recipe: predict(recipe, lengths=[64] * rows, length=64)


def peak(predicted: Callable[[Recipe], Memory], *keys: str) -> int:
    recipe = load()
    return predicted(recipe.model_copy(update={"speedups": recipe.speedups | {key: {} for key in keys}})).peak


@pytest.mark.parametrize(
    ("keys", "rows"),
    [((RELEASE,), 1), ((CHECKPOINT,), 16), ((RELEASE, CHECKPOINT), 2), ((RELEASE, CHECKPOINT, EIGHT), 1)],
    ids=["release", "checkpointing", "both", "8-bit states, too"],
)
def test_the_cheapest_that_fits(keys: tuple[str, ...], rows: int) -> None:
    predicted = of_rows(rows)
    enough, plain = peak(predicted, *keys), peak(predicted)
    assert enough < plain
    found = what_fits(load(), plain, enough, predicted, CPU)
    assert found is not None and (found.speedups, found.peak, found.fits) == (keys, enough, True)
    assert len(found.prices) == len(keys)
    less = what_fits(load(), plain, enough - 1, predicted, CPU)
    assert less is not None and (less.speedups != keys or not less.fits)


def test_of_several_ranks_gradients_are_not_released_but_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")

    def predicted(recipe: Recipe) -> Memory:
        return predict(recipe, lengths=[64], length=64, ranks=2)

    enough, plain = peak(predicted, VIEWS), peak(predicted)
    found = what_fits(load(), plain, enough, predicted, CPU)
    assert found is not None and (found.speedups, found.peak, found.fits) == ((VIEWS,), enough, True)
    less = what_fits(load(), plain, 1000, predicted, CPU)
    assert less is not None and less.speedups == (VIEWS, CHECKPOINT, EIGHT)


def test_where_nothing_fits_the_leanest_is_told() -> None:
    found = what_fits(load(), peak(of_rows(1)), 1000, of_rows(1), CPU)
    assert found is not None and not found.fits
    assert found.peak == peak(of_rows(1), RELEASE, CHECKPOINT, EIGHT)


@pytest.mark.parametrize(
    ("changes", "never"),
    [
        (("microbatch_size=4",), RELEASE),
        (("speedups.mixed_precision={dtype: fp16}",), RELEASE),
        (("speedups.cuda_graphs={}",), RELEASE),
        (("speedups.cuda_graphs={}",), CHECKPOINT),
        (("speedups.apex_fused_adamw={}",), RELEASE),
        (("speedups.torch_compile={}",), RELEASE),
        (("speedups.adafactor={}",), EIGHT),
        (("speedups.fused_adamw={}",), EIGHT),
        (("speedups.gradient_release={}",), RELEASE),
    ],
)
def test_what_the_recipe_cannot_have_is_not_offered(changes: tuple[str, ...], never: str) -> None:
    recipe, offered = load(*changes), []

    def watched(one: Recipe) -> Memory:
        offered.append(one.speedups.keys() - recipe.speedups.keys())
        return of_rows(1)(load())

    what_fits(recipe, of_rows(1)(load()).peak, 1000, watched, CPU)
    assert all(never not in keys for keys in offered)
    assert {RELEASE, CHECKPOINT, EIGHT} - {never} & {key for keys in offered for key in keys}


def test_what_has_all_already_gets_no_word() -> None:
    recipe = load(*(f"speedups.{key}={{}}" for key in (RELEASE, CHECKPOINT, EIGHT)))
    assert what_fits(recipe, of_rows(1)(recipe).peak, 1000, of_rows(1), CPU) is None


def test_the_doctor_says_what_would_fit(monkeypatch, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    size = "{num_hidden_layers: 2, hidden_size: 768, num_attention_heads: 12, intermediate_size: 3072}"
    own = f"extends: demo/fp32\ntask: {{max_length: 64}}\nmodel: {{config: {size}}}\nbatch_size: 64\n"
    (tmp_path / "plain.yaml").write_text(own)
    (tmp_path / "all.yaml").write_text(own + f"speedups: {{{RELEASE}: {{}}, {CHECKPOINT}: {{}}, {EIGHT}: {{}}}}\n")
    fits = predict(load_recipe(tmp_path / "plain.yaml", [f"speedups.{CHECKPOINT}={{}}"])).peak
    monkeypatch.setattr(memory, "free_memory", lambda device: fits)
    monkeypatch.setattr(memory, "largest_batch", lambda *_, **__: 3)  # looked for in another test
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", "--recipe", str(tmp_path / "plain.yaml")]) == 0
    text = capsys.readouterr().out
    assert "does not fit; the largest batch that fits is 3" in text
    assert re.search(
        r"^with +\d+\.\d+ [GM]iB gradient_checkpointing \(the same gr.*, a third more compute\): fits", text, re.M
    )
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**20)
    assert main(["doctor", "--recipe", str(tmp_path / "all.yaml")]) == 0
    text = capsys.readouterr().out
    assert "iB the most that is there at once" in text
    assert "does not fit" in text and "\nwith " not in text
