"""Tuning by whole trainings: short runs like higher rates than long ones, in fake tries by a law, and in real ones."""

from __future__ import annotations

import io
import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import tuning_fakes as fakes
from rich.console import Console

from composer_speedups.errors import UserError
from composer_speedups.recipes import load_recipe
from composer_speedups.tuning.rate_search import RateSearch
from composer_speedups.tuning.settings import Settings
from composer_speedups.tuning.tune import record_path, tune
from composer_speedups.tuning.whole import Trained, lowest, walk

OWN = 2 * fakes.SAMPLES


def search(out: Path, *changes: str, **options):
    """`tune` with fake tries, the batch left as it is; what it printed comes with the result."""
    console = Console(file=io.StringIO(), width=300)
    recipe = load_recipe("demo/bf16", ["batch_size=32", "duration=2ep", *changes], check_arguments=False)
    settings = Settings(**({"batch": False, "trials": 6} | options))
    return tune(recipe, out=out, settings=settings, console=console, entries=fakes.ENTRIES), console.file.getvalue()


# --- The walk ---


def law(rate: float, best: float = 1e-4, diverges: float = math.inf) -> Trained:
    return Trained(rate, math.log(rate / best) ** 2 if rate < diverges else math.inf)


@pytest.mark.parametrize("start", [0.6e-4, 0.9e-4, 1.2e-4, 1.7e-4, 2.5e-4, 3.9e-4])
def test_a_walk_ends_beside_the_lowest_loss(start: float):
    tried = walk(law, start, 4)
    best = lowest(tried)
    assert best is not None and abs(math.log2(best.rate / 1e-4)) <= 0.51 and len({one.rate for one in tried}) <= 4
    rates = [one.rate for one in tried]
    assert rates[0] == start and min(rates) < best.rate < max(rates)


def test_a_walk_costs_no_more_than_it_may():
    assert [one.rate for one in walk(law, 6.4e-3, 2)] == [6.4e-3, 3.2e-3]
    assert [one.rate for one in walk(law, 6.4e-3, 4)] == [6.4e-3, 3.2e-3, 1.6e-3, 8e-4]
    assert [one.rate for one in walk(law, 1.25e-5, 4)] == [1.25e-5, 6.25e-6, 2.5e-5, 5e-5]


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


@pytest.mark.parametrize("samples", [50_000, 82_000, 90_000, 130_000, 1_000_000])
def test_a_budget_holds_for_both_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int):
    diary = tmp_path / "diary"
    monkeypatch.setenv("TUNING_DIARY", str(diary))
    result, text = search(tmp_path / "x.yaml", samples=samples)
    steps = [int(line.split()[3]) for line in diary.read_text().splitlines()]
    assert result.recipe is not None and 32 * sum(steps) <= samples
    count = min(4, (samples - 4 * 20 * 32) // OWN)
    enough = count >= 2
    assert (2 <= steps.count(OWN // 32) <= count) if enough else OWN // 32 not in steps
    advice = "a training of 40,000 often likes a lower rate. 123,000 samples would do for runs as long"
    assert (advice in text) == (not enough) and f"Budget: {samples:,} samples, each try" in text
    assert abs(math.log2(result.recipe.learning_rate / (fakes.BEST_WHOLE if enough else fakes.BEST))) < 1.3


def test_what_short_runs_show_whole_needs_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    diary = tmp_path / "diary"
    monkeypatch.setenv("TUNING_DIARY", str(diary))
    result, text = search(tmp_path / "x.yaml", "duration=64ba", samples=100_000)
    assert result.recipe is not None and abs(math.log2(result.recipe.learning_rate / fakes.BEST)) < 1
    assert "whole training" not in text + (tmp_path / "x.yaml").read_text()


def test_a_rate_as_good_as_the_best_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of rates that are nearly as good one run each tells nothing: there the recipe's own stays."""
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
    # 40,000 samples at 73 a second, and a tenth more to begin.
    assert "about 10 minutes, longer than a try may. It may like a lower rate: search again with --timeout 14" in text
    assert "whole training" not in (tmp_path / "x.yaml").read_text()


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("full", "out of memory: out of memory with 32 samples: try 16"),
        ("more", "over the limit: 1.32 GB"),
        ("late", "timeout: over the time limit of 0.9 s"),
        ("break", "failed: .*the evaluation cannot be"),
    ],
)
def test_a_training_that_comes_to_no_end_says_nothing_of_its_rate(tmp_path: Path, monkeypatch, fault: str, says: str):
    """The next would hardly do better: one is made, and short runs decide."""
    diary, out = tmp_path / "diary", tmp_path / "x.yaml"
    monkeypatch.setenv("TUNING_DIARY", str(diary))
    monkeypatch.setenv("TUNING_FAULT", f"{fault}:0")
    if fault == "late":
        monkeypatch.setattr(RateSearch, "_is_too_long", lambda self: False)
    result, text = search(out, timeout=0.9 if fault == "late" else 1800.0)
    steps = [int(line.split()[3]) for line in diary.read_text().splitlines()]
    assert steps.count(OWN // 32) == 1 and steps[-1] == OWN // 32
    assert result.recipe is not None and abs(math.log2(result.recipe.learning_rate / fakes.BEST)) < 1
    assert re.search(rf"A whole training did not end well \({says}.*\)\. See whether this batch", text), text
    content = out.read_text()
    assert "in short runs: no whole training ended well; 0.001 is the recipe's own" in content
    assert re.search(rf"#  +0\.0005  +-  +-  +{says[:20]}", content), content


def test_one_that_ended_well_counts_though_the_next_did_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was found on the way down stays; and what diverged on the way is no reason to stop."""
    monkeypatch.setenv("TUNING_FAULT", "diverge:2e-4")
    result, text = search(tmp_path / "x.yaml")
    assert result.recipe is not None and result.recipe.learning_rate == 1.25e-4 and "did not end well" not in text
    assert (tmp_path / "x.yaml").read_text().count("diverged") == 2
    monkeypatch.setenv("TUNING_FAULT", "full:1.5e-4")
    result, text = search(tmp_path / "y.yaml", "learning_rate=1e-4", samples=10**6, trials=1)
    assert result.recipe is not None and result.recipe.learning_rate == 1e-4 and "did not end well" in text
    assert "evaluation loss of 2 whole trainings, one of each (higher ones may be better still)" in text


def test_one_training_is_compared_with_none_and_which_side_may_be_better_is_no_guess():
    def judged(*tried: Trained) -> tuple[float, str]:
        return RateSearch._judge(SimpleNamespace(rule=1e-4), list(tried), lowest(tried), 0.02)

    late = Trained(4e-4, broken="timeout")
    rate, why = judged(Trained(8e-4, 0.5), late)
    assert rate == 8e-4 and "compared with none (lower or higher ones may be better still)" in why
    assert judged(Trained(8e-4, 0.5), Trained(4e-4, 0.4), Trained(2e-4, broken="x"))[1].endswith(
        "(lower ones may be better still)"
    )
    assert judged(Trained(2e-4, 0.4), late, Trained(1e-3, 0.6), Trained(1e-5, 0.6))[1].endswith(
        "3 whole trainings, one of each"
    )


def test_no_rate_is_taken_with_which_every_training_diverged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TUNING_FAULT", "diverge:0")
    message = r"no whole training ended with a finite loss, down to a learning rate of 6\.25e-05; .*learning_rate=6e-06"
    with pytest.raises(UserError, match=message):
        search(tmp_path / "y.yaml")
    assert not (tmp_path / "y.yaml").exists()


def test_short_runs_keep_to_what_was_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A training hardly longer than they are is no reason to spend on them what is for whole ones; batches share it."""
    diary = tmp_path / "diary"
    monkeypatch.setenv("TUNING_DIARY", str(diary))
    result, text = search(tmp_path / "x.yaml", "duration=5000sp")
    assert result.recipe is not None and "at most 4 whole trainings of 5,000" in text
    samples = [32 * int(line.split()[3]) for line in diary.read_text().splitlines()]
    short = [n for n in samples if n < 4_900]
    assert sum(short) <= 16_000 and 2 <= len(samples) - len(short) <= 4
    diary.unlink()
    result, text = search(tmp_path / "y.yaml", batch=True)
    lines = [list(map(float, line.split()[:4])) for line in diary.read_text().splitlines()]
    long = [line for line in lines if line[0] * line[3] > 0.9 * OWN]
    assert result.recipe is not None and 2 <= len(long) <= 4
    assert sum(line[0] * line[3] for line in lines if line not in long) <= 16_000


# --- And real ones ---


@pytest.mark.elsewhere
def test_a_real_training_is_evaluated_where_it_ends(tmp_path: Path):
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
    assert result.recipe is not None and result.recipe.evaluate is False
    whole = [line for line in text.splitlines() if "whole training, 40 steps" in line]
    assert 2 <= len(whole) <= 3 and all("on evaluation texts 0." in line for line in whole), text
    assert "evaluation loss  accuracy" in out.read_text()
