"""Tuning: searches of fake tries in real processes, one of real training, and the command."""

from __future__ import annotations

import io
import math
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import tuning_fakes as fakes
from rich.console import Console

from composer_speedups.cli import main
from composer_speedups.commands.tune import memory_bytes
from composer_speedups.errors import ConflictError, SpeedUpUnavailable, UserError
from composer_speedups.isolation.isolate import Isolation
from composer_speedups.isolation.presence import Presence
from composer_speedups.recipes import load_recipe
from composer_speedups.tuning import rate as rates
from composer_speedups.tuning import tune as tune_module
from composer_speedups.tuning.record import RecordError
from composer_speedups.tuning.settings import Settings
from composer_speedups.tuning.tune import record_path, tune


@pytest.fixture(scope="module")
def isolation():
    with Isolation(fakes.ENTRIES.train, fakes.ENTRIES.preload) as made:
        yield made


def search(
    out: Path, isolation: Isolation | None = None, recipe: str = "demo/bf16", overrides=(), width=140, **options
):
    """`tune` with fake tries; what it printed comes with the result."""
    console = Console(file=io.StringIO(), width=width)
    base = load_recipe(recipe, check_arguments=False)
    loaded = load_recipe(recipe, [*fakes.SIZES, "duration=2ep", *overrides], check_arguments=False)
    settings = Settings(**options)
    result = tune(
        loaded,
        out=out,
        base=base,
        extends=recipe,
        settings=settings,
        console=console,
        entries=fakes.ENTRIES,
        isolation=isolation,
    )
    return result, console.file.getvalue()


# --- Whole searches, in real processes ---


def test_the_largest_batch_then_its_rate(tmp_path: Path, isolation: Isolation):
    out = tmp_path / "new.yaml"
    result, text = search(out, isolation, goal="largest", samples=320_000, trials=8)
    assert result.recipe is not None
    assert result.recipe.batch_size == 216, "the largest multiple of 8 that is no more than what fits"
    found = load_recipe(out, check_arguments=False)
    assert found.batch_size == 216 and found.learning_rate == result.recipe.learning_rate
    assert found.speedups == load_recipe("demo/bf16", check_arguments=False).speedups and found.duration == "2ep"
    assert abs(math.log2(found.learning_rate / fakes.BEST_WHOLE)) < 1, "not the scaling rule's 2.6e-3"
    content = out.read_text()
    assert "extends: demo/bf16" in content and "out of memory" in content and "pruned" in content
    assert "0.001 x sqrt(216/32) = 0.0026" in content
    assert "Budget: 320,000 samples" in text and not record_path(out).exists()
    assert "lowest evaluation loss of 4 whole" in content and "with another seed close rates may rank" in content


def test_the_fastest_batch_within_a_limit(tmp_path: Path, isolation: Isolation):
    limit = fakes.FIXED + 70 * fakes.SAMPLE
    free, _ = search(tmp_path / "free.yaml", isolation, rate=False)
    held, _ = search(tmp_path / "held.yaml", isolation, rate=False, memory_limit=limit)
    assert free.recipe is not None and held.recipe is not None
    assert 64 <= free.recipe.batch_size <= 128 and 48 <= held.recipe.batch_size <= 70
    scaled = rates.scaled_rate(1e-3, 32, free.recipe.batch_size)
    assert free.recipe.learning_rate == scaled


def test_the_effective_batch_can_stay(tmp_path: Path, isolation: Isolation):
    overrides = ["batch_size=512", "learning_rate=1e-3"]
    result, _ = search(tmp_path / "x.yaml", isolation, overrides=overrides, constant=True, goal="largest", rate=False)
    assert result.recipe is not None
    found = load_recipe(tmp_path / "x.yaml", check_arguments=False)
    assert (found.batch_size, found.microbatch_size, found.learning_rate) == (512, 128, 1e-3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_share_the_largest_batch(tmp_path: Path, isolation: Isolation, ranks: int):
    """Which is as many times as large: each has what one alone would have."""
    result, text = search(tmp_path / "x.yaml", isolation, goal="largest", rate=False, ranks=ranks)
    assert result.recipe is not None and result.recipe.batch_size == 216 * ranks
    assert ("2 ranks of fake" in text) == ("2 ranks of fake" in (tmp_path / "x.yaml").read_text()) == (ranks == 2)
    tried = [int(size) for size in re.findall(r"^  batch (\d+), ", text, re.MULTILINE)]
    assert len(tried) > 2 and all(size % ranks == 0 for size in tried), "each can be shared"


def test_a_microbatch_is_of_one_rank(tmp_path: Path, isolation: Isolation):
    overrides = ["batch_size=512"]
    options = {"constant": True, "goal": "largest", "rate": False, "ranks": 2}
    result, _ = search(tmp_path / "x.yaml", isolation, overrides=overrides, **options)
    assert result.recipe is not None and (result.recipe.batch_size, result.recipe.microbatch_size) == (512, 128)
    result, _ = search(tmp_path / "y.yaml", isolation, overrides=["batch_size=384"], **options)
    assert result.recipe is not None and (result.recipe.batch_size, result.recipe.microbatch_size) == (384, None)


def test_more_ranks_than_cores_are_refused(tmp_path: Path, isolation: Isolation):
    with pytest.raises(UserError, match=r"^3 ranks need a core each, this machine has 2: use --ranks 2$"):
        search(tmp_path / "x.yaml", isolation, rate=False, ranks=3)


def test_what_takes_the_batch_at_once_has_no_microbatch_to_search(tmp_path: Path):
    with pytest.raises(ConflictError, match=r"no microbatch to search.* or add speedups.gradient_release=null"):
        search(tmp_path / "x.yaml", overrides=["speedups.gradient_release={}"], constant=True, rate=False)
    assert not list(tmp_path.iterdir())


def test_a_budget_of_tokens_leaves_no_batch_to_search(tmp_path: Path):
    overrides = ["speedups.token_budget_batches={tokens_per_batch: 4096}"]
    with pytest.raises(ConflictError, match=r"takes 4,096 tokens a batch, whatever batch_size is.* Add --no-batch, or"):
        search(tmp_path / "x.yaml", overrides=overrides, rate=False)
    assert not list(tmp_path.iterdir())


def test_batches_and_warm_up_counted_in_batches_last_as_many_samples(tmp_path: Path, isolation: Isolation):
    overrides = ["duration=6000ba", "schedule.warmup=64ba"]
    search(tmp_path / "x.yaml", isolation, overrides=overrides, rate=False, goal="largest")
    found = load_recipe(tmp_path / "x.yaml", check_arguments=False)
    assert found.batch_size == 216 and found.duration == "889ba" and found.schedule.warmup == "9ba"


def test_a_recipe_in_a_file_and_one_beside_it(tmp_path: Path, isolation: Isolation, monkeypatch):
    from composer_speedups.recipes.written import extends_as

    monkeypatch.chdir(tmp_path)
    Path("old.yaml").write_text("extends: demo/bf16\nbatch_size: 16\nspeedups: {fused_adamw: {}}\n")
    out = Path("deeper/new.yaml")
    base = load_recipe("old.yaml", check_arguments=False)
    loaded = load_recipe("old.yaml", ["speedups.fused_adamw=null", "task.max_length=32"], check_arguments=False)
    assert extends_as("old.yaml", out) == "../old.yaml" and extends_as("demo/bf16", out) == "demo/bf16"
    console = Console(file=io.StringIO())
    settings = Settings(rate=False, samples=2000)
    tune(
        loaded,
        out=out,
        base=base,
        extends="../old.yaml",
        settings=settings,
        console=console,
        entries=fakes.ENTRIES,
        isolation=isolation,
    )
    found = load_recipe(out, check_arguments=False)
    assert found.task.max_length == 32 and "fused_adamw" not in found.speedups and "mixed_precision" in found.speedups
    assert "fused_adamw: null" in out.read_text()


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # Ctrl-C may come while one is being read
def test_ctrl_c_keeps_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    diary, whole, out = tmp_path / "diary", tmp_path / "whole", tmp_path / "x.yaml"
    monkeypatch.setenv("TUNING_DIARY", str(diary))
    monkeypatch.setenv("TUNING_PARENT", str(os.getpid()))
    monkeypatch.setenv("TUNING_FAULT", "hang:2")
    result, text = search(out, samples=20_000)
    assert result.recipe is None and not out.exists() and "2 tries are kept" in text
    before = diary.read_text().splitlines()
    kept = record_path(out).read_text()
    assert kept.count("\n") == 3, "the head and two tries"
    # The same search, now by a process that nobody stops.
    monkeypatch.delenv("TUNING_FAULT")
    result, text = search(out, samples=20_000)
    assert result.recipe is not None and "2 tries of an earlier start are kept" in text
    after = diary.read_text().splitlines()[len(before) :]
    monkeypatch.setenv("TUNING_DIARY", str(whole))
    never, _ = search(tmp_path / "y.yaml", samples=20_000)
    assert never.recipe is not None and never.recipe.learning_rate == result.recipe.learning_rate
    assert len(before) == 3
    assert before[:2] + after == whole.read_text().splitlines(), "only what was stopped is repeated"


@pytest.mark.parametrize("fault", ["disk:2", "kill:0"])
def test_what_was_no_fault_of_the_size_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str):
    """After a full disk, or a kill by whomever, the same command goes on as if nothing had been."""
    diary, out = tmp_path / "diary", tmp_path / "x.yaml"
    monkeypatch.setenv("TUNING_DIARY", str(diary))
    monkeypatch.setenv("TUNING_FAULT", fault)
    message = "No space left on device" if fault == "disk:2" else "found to fit: killed by SIGKILL.* --memory-limit"
    with pytest.raises(UserError, match=message):
        search(out, samples=8_000)
    kept = 2 if fault == "disk:2" else 0
    assert record_path(out).read_text().count("\n") == 1 + kept
    monkeypatch.delenv("TUNING_FAULT")
    result, text = search(out, samples=8_000)
    assert result.recipe is not None and ("2 tries of an earlier start" in text) == bool(kept)


def test_a_rate_that_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "x.yaml"
    monkeypatch.setenv("TUNING_DIARY", str(tmp_path / "diary"))
    monkeypatch.setenv("TUNING_FAULT", "disk:1")
    with pytest.raises(UserError, match=r"learning rate \S+ failed: .*No space left"):
        search(out, batch=False, samples=4_000)
    monkeypatch.delenv("TUNING_FAULT")
    result, text = search(out, batch=False, samples=4_000)
    assert result.recipe is not None and "1 tries of an earlier start" in text


def test_a_kill_that_the_kernel_did_not_count_is_lack_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """earlyoom and its like kill without a trace: the search goes on below, and the reason is in the evidence."""
    monkeypatch.setenv("TUNING_FAULT", "kill:64")
    result, _ = search(tmp_path / "x.yaml", rate=False, goal="largest")
    assert result.recipe is not None and result.recipe.batch_size == 64
    assert "out of memory: killed by SIGKILL" in (tmp_path / "x.yaml").read_text()


@pytest.mark.elsewhere
def test_a_longer_time_limit_tries_again_what_took_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    diary, out = tmp_path / "diary", tmp_path / "x.yaml"
    monkeypatch.setenv("TUNING_DIARY", str(diary))
    monkeypatch.setenv("TUNING_FAULT", "slow:2")
    options = {"overrides": ["batch_size=2"], "constant": True, "goal": "largest", "rate": False}
    message = "over the time limit of 0.5 s. Raise --timeout, or"
    with pytest.raises(UserError, match=message):
        search(out, timeout=0.5, **options)
    tried = diary.read_text()
    with pytest.raises(UserError, match=message):
        search(out, timeout=0.5, **options)
    assert diary.read_text() == tried, "under the same limit it would end the same way"
    result, _ = search(out, timeout=60.0, **options)
    assert result.recipe is not None and result.recipe.microbatch_size is None and "timeout" not in out.read_text()


@pytest.mark.parametrize(
    ("duration", "warmup", "share"),
    [
        ("6400ba", "0ba", "0.000000dur"),
        ("6400ba", "64ba", "0.010000dur"),
        ("4ep", "1ep", "0.250000dur"),
        ("64000sp", "16000sp", "0.250000dur"),
        ("4ep", "9000ba", "0.999999dur"),
        ("4ep", "0.06dur", "0.06dur"),
    ],
)
def test_tries_warm_up_for_the_same_share_as_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, duration: str, warmup: str, share: str
):
    """A rate found under a warm-up that the recipe has not may diverge in it."""
    diary = tmp_path / "diary"
    monkeypatch.setenv("TUNING_DIARY", str(diary))
    result, _ = search(
        tmp_path / "x.yaml", overrides=[f"duration={duration}", f"schedule.warmup={warmup}"], samples=8_000, trials=3
    )
    assert result.recipe is not None
    tries = [line.split() for line in diary.read_text().splitlines()]
    assert {line[4] for line in tries} == {share} and len({line[0] for line in tries}) > 1


def test_tries_beside_another_run_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMPOSER_SPEEDUPS_PRESENCE", str(tmp_path / "presence"))
    _, text = search(tmp_path / "alone.yaml", rate=False, samples=4_000)
    assert "beside other" not in text + (tmp_path / "alone.yaml").read_text()
    with Presence():
        _, text = search(tmp_path / "x.yaml", rate=False, samples=4_000)
    assert "samples/s, 1 MB, loss" in text and ", beside other work\n" in text
    assert "tries ran beside other work on this machine" in text
    content = (tmp_path / "x.yaml").read_text()
    assert "ok, beside other work" in content and "# beside other work: it shared this machine" in content


def test_the_record_of_another_search_is_refused(tmp_path: Path, isolation: Isolation):
    out = tmp_path / "x.yaml"
    record_path(out).write_text("garbage\n")
    with pytest.raises(RecordError, match="damaged in line 1"):
        search(out, isolation, rate=False)
    assert record_path(out).read_text() == "garbage\n"


def test_what_cannot_run_here_or_is_broken(tmp_path: Path, isolation: Isolation):
    with pytest.raises(SpeedUpUnavailable, match="demo/fp16 cannot run here: fp16 needs"):
        search(tmp_path / "x.yaml", isolation, recipe="demo/fp16")
    with pytest.raises(UserError, match="the loss function is missing"):
        search(tmp_path / "x.yaml", isolation, overrides=["description=broken"])
    with pytest.raises(UserError, match="no batch of demo/bf16 was found to fit"):
        search(tmp_path / "y.yaml", isolation, memory_limit=10)
    with pytest.raises(UserError, match="1 samples are too few to try a batch of demo/bf16"):
        search(tmp_path / "y.yaml", isolation, samples=1, goal="fastest")  # in the place of a search that found nothing
    assert not (tmp_path / "x.yaml").exists()


def test_no_rate_is_recommended_that_diverged(tmp_path: Path, isolation: Isolation):
    out = tmp_path / "x.yaml"
    with pytest.raises(UserError, match=r"no learning rate from 0.5 to 2 ended .* Start lower, .* learning_rate=0.05"):
        search(out, isolation, batch=False, overrides=["learning_rate=1"], trials=3)
    assert not out.exists() and record_path(out).exists()


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("dull:0", "the loss fell by 0 only in 19,968 samples, too little to compare; 0.001 is the recipe's own"),
        ("alike:0.001", "none of 3 tried was shown to be better: 0.002 only within the noise; 0.001 is the recipe's"),
    ],
)
def test_the_rules_rate_stays_where_noise_speaks_for_another(tmp_path: Path, monkeypatch, fault: str, says: str):
    monkeypatch.setenv("TUNING_FAULT", fault)
    result, text = search(tmp_path / "x.yaml", overrides=["duration=1ep"], batch=False, trials=3, samples=160_000)
    assert result.recipe is not None and result.recipe.learning_rate == 1e-3
    assert f"learning rate 0.001: {says}" in text, text
    assert ("Give more --samples" in text) == fault.startswith("dull")


def test_what_another_process_has_written_meanwhile_stays(tmp_path: Path, isolation: Isolation, monkeypatch):
    out = tmp_path / "x.yaml"

    class Slow(tune_module.Tries):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            out.write_text("theirs\n")

    monkeypatch.setattr(tune_module, "Tries", Slow)
    with pytest.raises(UserError, match=r"x\.yaml exists: add --overwrite"):
        search(out, isolation, rate=False)
    assert out.read_text() == "theirs\n" and list(tmp_path.iterdir()) == [out]


def test_lines_are_whole_where_nobody_cuts_them(tmp_path: Path, isolation: Isolation):
    _, text = search(tmp_path / "x.yaml", isolation, batch=False, samples=300, width=60)
    assert "300 samples are too few to compare rates at batch 32 (at least 1,280)\n" in text


# --- The command ---


def test_sizes_of_memory():
    assert [memory_bytes(t) for t in ("8GB", "512 MB", "1GiB", "7.5gb")] == [8 * 10**9, 512 * 10**6, 2**30, 75 * 10**8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "demo/bff16"], "unknown recipe"),
        (["tune", "batch_size=4"], "name the recipe first"),
        (["tune", "demo"], "demo' is a suite"),
        (["tune", "demo/bf16", "batch_sise=4"], "unknown key"),
        (["tune", "demo/bf16", "--no-batch", "--no-lr"], "nothing to tune"),
        (["tune", "demo/bf16", "--samples", "-5"], "--samples must be positive, got -5"),
        (["tune", "demo/bf16", "--trials", "0"], "--trials must be positive"),
        (["tune", "demo/bf16", "--timeout", "-1"], "--timeout must be positive, got -1"),
        (["tune", "demo/bf16", "--memory-limit", "much"], "--memory-limit 'much' is no size"),
        (["tune", "demo/bf16", "--memory-limit", "0GB"], "is no size"),
        (["tune", "demo/bf16", "--goal", "best"], "--goal must be largest or fastest"),
        (["tune", "demo/bf16", "--out", "x.txt"], "end it with .yaml"),
        (["tune", "demo/bf16", "--out", "/proc/x.yaml"], "--out: cannot write to /proc: No such file"),
        (["tune", "demo/bf16", "--out", "taken.yaml"], "taken.yaml exists: add --overwrite"),
        (["tune", "nowhere.yaml"], "there is no such file"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("taken.yaml").write_text("batch_size: 7\n")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert Path("taken.yaml").read_text() == "batch_size: 7\n" and len(list(tmp_path.iterdir())) == 1


def test_without_optuna_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["tune", "demo/bf16"]) == 2
    error = capsys.readouterr().err
    assert 'pip install "optuna>=4,<5"' in error and error.count("\n") == 1


@pytest.mark.elsewhere
@pytest.mark.parametrize("ranks", [1, 2])
def test_real_training_on_dummy_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, ranks: int):
    """The whole command with a tiny model, real tries and all."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(
        "task: {name: dummy, max_length: 16, train_samples: 256, eval_samples: 16, vocabulary: 256}\n"
        "model: {name: bert-base-uncased, pretrained: false, config: {hidden_size: 32, num_hidden_layers: 1, "
        "num_attention_heads: 2, intermediate_size: 64, vocab_size: 256}}\n"
        "batch_size: 8\nlearning_rate: 1e-3\nduration: 2ep\nschedule: {name: constant, warmup: 4ba}\n"
    )
    handlers = signal.getsignal(signal.SIGTERM)
    try:
        assert (
            main(["tune", "tiny.yaml", "--samples", "900", "--trials", "2", "--out", "new.yaml", "--ranks", str(ranks)])
            == 0
        )
    finally:
        signal.signal(signal.SIGTERM, handlers)
    text = capsys.readouterr().out
    found = load_recipe("new.yaml", check_arguments=False)
    assert (
        1 <= found.batch_size <= 25
        and found.batch_size % ranks == 0
        and found.learning_rate > 0
        and found.task.max_length == 16
    )
    content = Path("new.yaml").read_text()
    assert "extends: ./tiny.yaml" in content and "samples/s" in content
    assert "Tuning tiny" in text and "each try a fresh process" in text
    assert main(["tune", "tiny.yaml", "--out", "new.yaml"]) == 2
