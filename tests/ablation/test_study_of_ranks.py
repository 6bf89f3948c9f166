"""`ablate --ranks 2` as it is called, with real trainings: two processes learn what one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composer_speedups.ablation.jobs import survey, train
from composer_speedups.cli import main
from composer_speedups.recipes import load_recipe

TASK = "task={name: dummy, max_length: 32, mean_length: 16, vocabulary: 256, train_samples: 64, eval_samples: 16}"
MODEL = "model.config={num_hidden_layers: 1, hidden_size: 32, num_attention_heads: 2, intermediate_size: 64}"
TINY = [TASK, MODEL, "batch_size=8", "duration=6ba", "schedule.warmup=0ba"]


def study(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["ablate", *words, *TINY])
    said = capsys.readouterr()
    return code, " ".join((said.out + said.err).split())


@pytest.mark.timeout(300)
def test_two_ranks_learn_what_one_process_does(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code, said = study(capsys, "cpu/fp32", "cpu/ranks", "--ranks", "2", "--out", "two")
    assert code == 0 and ", 2 ranks" in said, said
    found = json.loads((tmp_path / "two" / "results.json").read_text())
    plain, sent = found["rows"]
    assert (plain["status"], sent["status"]) == ("ok", "ok")
    assert sent["evidence"]["gradient_as_bucket_view"]["changed"] > 10
    assert any(line.startswith("Ranks: 2 on this machine (DDP)") for line in found["study"]["conditions"])
    assert "--ranks 2" in found["study"]["command"]

    alone = train({"recipe": load_recipe("cpu/fp32", TINY).to_dict(), "seed": 17, "inspect": True}, print)
    assert plain["final_loss"] == pytest.approx(alone["final_loss"], rel=0.03)  # other dropout masks
    assert plain["samples_per_step"] == alone["batch_size"] == 8
    assert alone["memory"] and plain["memory"] == {}, "what looks inside is about one process"


def test_one_process_has_nothing_to_exchange_and_its_row_is_skipped(monkeypatch) -> None:
    recipe = load_recipe("cpu/ranks", check_arguments=False)
    found = survey({"recipes": [recipe], "peaks": {}}, print)
    assert "gradient_as_bucket_view: one process exchanges no gradients" in found["skip"][recipe.name]
    monkeypatch.setenv("WORLD_SIZE", "1")  # which the look at a machine of several sets for itself
    found = survey({"recipes": [recipe], "peaks": {}, "ranks": 2}, print)
    assert "gradient_as_bucket_view" not in found["skip"].get(recipe.name, "")
    assert found["environment"]["ranks"] == 2


def test_what_is_about_one_process_is_refused_beside_ranks(capsys) -> None:
    for option, remedy in (("--verify", "verify in a study of its own"), ("--tune", "tune first, then --ranks")):
        code, said = study(capsys, "cpu/fp32", "--ranks", "2", option)
        assert code == 2 and f"{option} is about one process, --ranks 2 about several: {remedy}" in said
