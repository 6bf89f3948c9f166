"""Tuning by whole trainings: short runs like higher rates than long ones, in fake tries by a law, and in real ones."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path

import pytest
import tuning_fakes as fakes
from rich.console import Console

from composer_speedups.errors import UserError
from composer_speedups.recipes import load_recipe
from composer_speedups.tuning.settings import Settings
from composer_speedups.tuning.tune import record_path, tune
from composer_speedups.tuning.whole import Trained, is_between, lowest, walk

OWN = 2 * fakes.SAMPLES


def search(out: Path, *changes: str, entries=fakes.ENTRIES, **options):
    """`tune` with fake tries, the batch left as it is; what it printed comes with the result."""
    console = Console(file=io.StringIO(), width=300)
    recipe = load_recipe("demo/bf16", ["batch_size=32", "duration=2ep", *changes], check_arguments=False)
    settings = Settings(**({"batch": False, "trials": 6} | options))
    return tune(recipe, out=out, settings=settings, console=console, entries=entries), console.file.getvalue()


# --- The walk ---


def law(rate: float, best: float = 1e-4, diverges: float = math.inf) -> Trained:
    return Trained(rate, math.log(rate / best) ** 2 if rate < diverges else math.inf)


@pytest.mark.parametrize("start", [0.6e-4, 0.9e-4, 1.2e-4, 1.7e-4, 2.5e-4, 3.9e-4])
def test_a_walk_ends_beside_the_lowest_loss(start: float):
    tried = walk(law, start, 4)
    best = lowest(tried)
    assert best is not None and abs(math.log2(best.rate / 1e-4)) <= 0.51 and len({one.rate for one in tried}) <= 4
    assert tried[0].rate == start and is_between(best.rate, tried)


def test_a_walk_costs_no_more_than_it_may():
    assert [one.rate for one in walk(law, 6.4e-3, 2)] == [6.4e-3, 3.2e-3]
    assert [one.rate for one in walk(law, 6.4e-3, 4)] == [6.4e-3, 3.2e-3, 1.6e-3, 8e-4]
    assert [one.rate for one in walk(law, 1.25e-5, 4)] == [1.25e-5, 6.25e-6, 2.5e-5, 5e-5]
    assert not is_between(8e-4, walk(law, 6.4e-3, 4))


def test_a_walk_leaves_what_diverged_behind():
    tried = walk(lambda rate: law(rate, 1e-3, diverges=1e-3), 3e-3, 4)
    assert [math.isinf(one.loss) for one in tried] == [True, True, False, False] and lowest(tried).rate == 7.5e-4
    assert lowest(walk(lambda rate: law(rate, diverges=0.0), 3e-3, 4)) is None
    up = walk(lambda rate: law(rate, 1e-3, diverges=1e-3), 6e-4, 4)  # the double of what is best diverges
    assert [one.rate for one in up] == [6e-4, 3e-4, 1.2e-3] and lowest(up).rate == 6e-4


# --- Searches of fake tries ---


def test_whole_trainings_have_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Short runs like 3e-4 here, and whole trainings 1.2e-4: without being asked, the search goes that far."""
    diary, out = tmp_path / "diary", tmp_path / "x.yaml"
    monkeypatch.setenv("TUNING_DIARY", str(diary))
    result, text = search(out)
    assert result.recipe is not None and abs(math.log2(result.recipe.learning_rate / fakes.BEST_WHOLE)) <= 0.6
    lines = [line.split() for line in diary.read_text().splitlines()]
    steps = [int(line[3]) for line in lines]
    assert steps.count(OWN // 32) == 4 and max(steps[:-4]) < OWN // 32, "the last four are whole, and no other is"
    assert abs(math.log2(float(lines[-4][2]) / fakes.BEST)) < 1, "they begin where short runs ended"
    assert "Budget: 16,000 samples in short runs, and at most 4 whole trainings of 40,000 (--samples for less)" in text
    content = out.read_text()
    assert "lowest evaluation loss of 4 whole trainings, one of each; 0.001 is the recipe's own" in content
    best = 1.1 * (1 + 8 * 32 / OWN + math.log(result.recipe.learning_rate / fakes.BEST_WHOLE) ** 2)
    assert f"   {result.recipe.learning_rate:g}           {best:.4f} " in content
    assert "loss at" in content and "Short runs like higher rates than long ones" in content


@pytest.mark.parametrize("samples", [50_000, 80_000, 130_000, 1_000_000])
def test_a_budget_holds_for_both_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int):
    diary = tmp_path / "diary"
    monkeypatch.setenv("TUNING_DIARY", str(diary))
    result, text = search(tmp_path / "x.yaml", samples=samples)
    steps = [int(line.split()[3]) for line in diary.read_text().splitlines()]
    assert result.recipe is not None and 32 * sum(steps) <= samples
    enough = samples > 3 * OWN
    assert (steps.count(OWN // 32) >= 2) == enough
    advice = "a training of 40,000 often likes a lower rate. 123,000 samples would do for whole trainings"
    assert (advice in text) == (not enough) and f"Budget: {samples:,} samples, each try" in text
    assert abs(math.log2(result.recipe.learning_rate / (fakes.BEST_WHOLE if enough else fakes.BEST))) < 1.1


def test_what_short_runs_show_whole_needs_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    diary = tmp_path / "diary"
    monkeypatch.setenv("TUNING_DIARY", str(diary))
    result, text = search(tmp_path / "x.yaml", "duration=64ba", samples=100_000)
    assert result.recipe is not None and abs(math.log2(result.recipe.learning_rate / fakes.BEST)) < 1
    assert "whole training" not in text + (tmp_path / "x.yaml").read_text()


def test_a_rate_as_good_as_the_best_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of rates that are nearly as good one run each tells nothing: there the recipe's own stays."""
    result, text = search(tmp_path / "x.yaml", f"learning_rate={1.03 * fakes.BEST_WHOLE}", samples=10**6, trials=2)
    assert result.recipe is not None and result.recipe.learning_rate == pytest.approx(1.03 * fakes.BEST_WHOLE)
    assert "lowest evaluation loss of" in text
    monkeypatch.setenv("TUNING_FAULT", "alike:0.001")
    result, text = search(tmp_path / "y.yaml", "learning_rate=1e-3", samples=10**6, trials=2)
    assert result.recipe is not None and result.recipe.learning_rate == 1e-3
    assert "no whole training of 4 had an evaluation loss lower by over 0.02; 0.001 is the recipe's own" in text


def test_trainings_that_were_stopped_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    diary, out = tmp_path / "diary", tmp_path / "x.yaml"
    monkeypatch.setenv("TUNING_DIARY", str(tmp_path / "all"))
    never, _ = search(tmp_path / "y.yaml")
    everything = (tmp_path / "all").read_text().splitlines()
    monkeypatch.setenv("TUNING_DIARY", str(diary))
    monkeypatch.setenv("TUNING_PARENT", str(os.getpid()))
    monkeypatch.setenv("TUNING_FAULT", f"hang:{len(everything) - 2}")
    result, text = search(out)
    assert result.recipe is None and f"{len(everything) - 2} tries are kept" in text
    kinds = [json.loads(json.loads(line)["content"]).get("kind") for line in record_path(out).read_text().splitlines()]
    assert kinds[-2:] == ["whole", "whole"]
    monkeypatch.delenv("TUNING_FAULT")
    result, text = search(out)
    assert result.recipe is not None and result.recipe.learning_rate == never.recipe.learning_rate
    assert diary.read_text().splitlines()[-2:] == everything[-2:], "only what was stopped is repeated"


def test_trainings_that_take_longer_than_a_try_may_are_left_out(tmp_path: Path):
    """At some 70 samples a second a training takes ten minutes."""
    result, text = search(tmp_path / "x.yaml", timeout=300.0)
    assert result.recipe is not None and abs(math.log2(result.recipe.learning_rate / fakes.BEST)) < 1
    assert "minutes, longer than a try may. It may like a lower rate: --timeout 1" in text
    assert "whole training" not in (tmp_path / "x.yaml").read_text()


def test_where_no_training_ends_well_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TUNING_FAULT", "full")
    result, text = search(tmp_path / "x.yaml")
    assert result.recipe is not None and abs(math.log2(result.recipe.learning_rate / fakes.BEST)) < 1
    assert "No whole training came to its end (out of memory with 32 samples: try 16), so that the rate is" in text
    monkeypatch.setenv("TUNING_FAULT", "diverge")
    message = r"no whole training ended with a finite loss, down to a learning rate of 6\.25e-05; .*learning_rate=6e-06"
    with pytest.raises(UserError, match=message):
        search(tmp_path / "y.yaml")
    assert not (tmp_path / "y.yaml").exists()


# --- And real ones ---


def test_a_real_training_is_evaluated_where_it_ends(tmp_path: Path):
    from composer_speedups.tuning.tries import ENTRIES

    (tmp_path / "tiny.yaml").write_text(
        "task: {name: dummy, max_length: 16, train_samples: 160, eval_samples: 48, vocabulary: 256}\n"
        "model: {name: bert-base-uncased, pretrained: false, config: {hidden_size: 32, num_hidden_layers: 1, "
        "num_attention_heads: 2, intermediate_size: 64, vocab_size: 256}}\n"
        "batch_size: 8\nlearning_rate: 1e-3\nduration: 2ep\nevaluate: false\nschedule: {warmup: 4ba}\n"
    )
    console = Console(file=io.StringIO(), width=300)
    recipe, out = load_recipe(str(tmp_path / "tiny.yaml"), check_arguments=False), tmp_path / "new.yaml"
    result = tune(recipe, out=out, settings=Settings(batch=False, trials=2, samples=1600), console=console)
    text = console.file.getvalue()
    assert ENTRIES.train and result.recipe is not None and result.recipe.evaluate is False
    whole = [line for line in text.splitlines() if "whole training, 40 steps" in line]
    assert 2 <= len(whole) <= 3 and all("on evaluation texts 0." in line for line in whole), text
    assert "evaluation loss  accuracy" in out.read_text()
