"""`ablate --ranks 2` as it is called, with real trainings: two processes learn what one does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from composer_speedups.ablation.aside import STORE
from composer_speedups.ablation.jobs import PRELOAD, survey, train
from composer_speedups.ablation.store import Store
from composer_speedups.ablation.study import Settings, Study, run_study
from composer_speedups.cli import main
from composer_speedups.errors import UserError
from composer_speedups.isolation.isolate import Isolation
from composer_speedups.recipes import load_recipe

TASK = "task={name: dummy, max_length: 32, mean_length: 16, vocabulary: 256, train_samples: 64, eval_samples: 16}"
MODEL = "model.config={num_hidden_layers: 1, hidden_size: 32, num_attention_heads: 2, intermediate_size: 64}"
TINY = [TASK, MODEL, "batch_size=8", "duration=6ba", "schedule.warmup=0ba"]


def study(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["ablate", *words, *TINY])
    said = capsys.readouterr()
    return code, " ".join((said.out + said.err).split())


@pytest.mark.elsewhere
@pytest.mark.timeout(300)
def test_two_ranks_learn_what_one_process_does(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code, said = study(capsys, "cpu/fp32", "cpu/ranks", "--ranks", "2", "--verify", "--out", "two")
    assert code == 0 and ", 2 ranks" in said, said
    found = json.loads((tmp_path / "two" / "results.json").read_text())
    plain, sent = found["rows"]
    assert (plain["status"], sent["status"]) == ("ok", "ok")
    assert sent["evidence"]["gradient_as_bucket_view"]["changed"] > 10
    assert plain["numerics"]["holds"] and sent["numerics"]["holds"] and sent["numerics"]["precision"] == "bf16"
    assert any(line.startswith("Ranks: 2 on this machine (DDP)") for line in found["study"]["conditions"])
    assert "--ranks 2" in found["study"]["command"]

    alone = train({"recipe": load_recipe("cpu/fp32", TINY).to_dict(), "seed": 17, "inspect": True}, print)
    assert plain["final_loss"] == pytest.approx(alone["final_loss"], rel=0.03)  # other dropout masks
    assert plain["samples_per_step"] == alone["batch_size"] == 8

    # Where time and memory go, of the first rank: with half of the batch, and with DDP's buckets.
    trained = alone["memory"]["gradients"]
    assert plain["memory"]["weights"] == alone["memory"]["weights"] and plain["memory"]["gradients"] == trained
    assert plain["memory"]["buckets"] == trained and "buckets" not in sent["memory"], "which lie in the buckets"
    assert plain["memory"]["activations"] == pytest.approx(alone["memory"]["activations"] / 2, rel=0.2)
    for row in (plain, sent):
        assert row["step_profile"]["exchange"] > 0 and "optimizer" in row["step_profile"]
        predicted = {kind: row["memory_predicted"][kind] for kind in row["memory"]}
        assert predicted == pytest.approx(row["memory"], rel=0.1)
    assert "exchange" not in alone["step_profile"]


@pytest.mark.elsewhere
@pytest.mark.timeout(300)
def test_a_fault_of_one_rank_in_a_training_is_told_at_once(monkeypatch) -> None:
    """Composer's Trainer closes with a barrier, in which the failed one would wait for those that wait for it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    faults = {
        "forward": (
            MemoryError("no room"),
            "out_of_memory",
            "rank 1: cpu/fp32 ran out of memory with 4 samples a forward",
        ),
        "evaluation": (ValueError("odd"), "failed", "rank 1: ValueError: odd"),
    }
    with Isolation("rank_entries:train_with_a_fault", preload=PRELOAD) as isolation:
        for phase, (error, status, reason) in faults.items():
            overrides = [*TINY, "duration=3ba"]
            payload = {"phase": phase, "error": error, "overrides": overrides}
            outcome = isolation.run(payload, ranks=2, timeout=100)
            assert outcome.status == status and outcome.reason.startswith(reason), (outcome, outcome.log[-2000:])


def test_what_the_ranks_cannot_share_is_skipped_with_the_reason() -> None:
    def look(ranks: int, *overrides: str) -> str:
        recipe = load_recipe("cpu/fp32", overrides)
        return survey({"recipes": [recipe], "peaks": {}, "ranks": ranks}, print)["skip"].get(recipe.name, "")

    try:
        assert look(2, "batch_size=7") == "batch_size 7 cannot be shared by 2 ranks: choose a multiple of 2"
        assert look(2, "eval_batch_size=5").startswith("eval_batch_size 5 cannot be shared")
        assert look(2, "batch_size=6") == ""
        assert look(2, "speedups.gradient_release={}").startswith(
            "gradient_release: gradient_release is for one process"
        )
    finally:
        os.environ.pop("WORLD_SIZE", None)  # which the look sets, in a process of its own


@pytest.mark.elsewhere
def test_another_number_of_ranks_changes_nothing_of_a_study(tmp_path: Path) -> None:
    recipe = load_recipe("cpu/fp32", TINY)
    study = Study([recipe], [1], tmp_path, command="the first")
    with Store(tmp_path / STORE) as store:
        study.begin(store)
        run = store.claim(store.add_environment({"ranks": 2}))
        store.finish(run, "failed", "it failed", None, "")
    with pytest.raises(UserError, match=r"was measured with 2 ranks, and this is 1: use --ranks 2, or another --out$"):
        run_study(Study([recipe], [1], tmp_path, command="the second"), Settings(retry=True))
    with Store(tmp_path / STORE) as store:
        assert store.study()["command"] == "the first" and [run.status for run in store.runs()] == ["failed"]


def test_one_process_has_nothing_to_exchange_and_its_row_is_skipped(monkeypatch) -> None:
    recipe = load_recipe("cpu/ranks", check_arguments=False)
    found = survey({"recipes": [recipe], "peaks": {}}, print)
    assert "gradient_as_bucket_view: one process exchanges no gradients" in found["skip"][recipe.name]
    monkeypatch.setenv("WORLD_SIZE", "1")  # which the look at a machine of several sets for itself
    found = survey({"recipes": [recipe], "peaks": {}, "ranks": 2}, print)
    assert "gradient_as_bucket_view" not in found["skip"].get(recipe.name, "")
    assert found["environment"]["ranks"] == 2
