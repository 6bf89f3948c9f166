"""`benchmarks/peers.py`: who is compared, with the same work, in which order, and how the table says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarked import row

from benchmarks import harness, peers, run
from composer_speedups.recipes import load_recipe


@pytest.mark.parametrize("hardware", peers.ENTRIES)
def test_who_is_compared_has_the_same_work(hardware: str) -> None:
    kinds: dict[str, list[Any]] = {}
    for name, entry in peers.ENTRIES[hardware].items():
        recipe = load_recipe(entry.recipe, entry.overrides)
        work = (recipe.task, recipe.batch_size, recipe.learning_rate, recipe.optimizer.weight_decay, recipe.model.name)
        memory = peers._kind(name) == "memory/"  # one process each, and no loader to speak of
        kinds.setdefault(peers._kind(name), []).append((*work, None if memory else recipe.workers))
        if entry.contender.startswith(("huggingface", "composer")):
            assert recipe.model.attn_implementation != "eager", "peers have the attention that a user gets"
    for kind, works in kinds.items():
        assert all(work == works[0] for work in works), kind
    assert set(kinds) == ({"", "mlm/", "memory/"} if hardware == "cuda" else {""})


def test_what_decides_on_a_gpu_comes_first() -> None:
    names = list(peers.ENTRIES["cuda"])
    first, others = names[: peers.DECIDING["cuda"]], names[peers.DECIDING["cuda"] :]
    assert first[:2] == ["ours: finetune/fp32 (TF32 off)", "ours: finetune/fastest"]
    assert sum("best" in name for name in first) == 3, "all peers at their best"
    assert {peers._kind(name) for name in first} == {"", "mlm/", "memory/"} and len(first) == 10
    assert [name.partition(",")[0] for name in first[8:]] == ["Hugging Face Trainer", "Composer"]
    assert all("compiled" in name for name in first[8:]), "slow to compile where the caches are empty"
    assert {peers._kind(name) for name in others} == {"", "mlm/"} and not any("best" in name for name in others)


def test_on_a_gpu_what_decides_is_repeated_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(peers, "interleaved", lambda *_, urgent, **__: asked.append(urgent))
    monkeypatch.setattr(peers, "_peak", lambda _: 1e12)
    for section, some, urgent in (("cuda", (), 10), ("cuda", ("ours: mlm/",), 2), ("cpu", (), 0)):
        monkeypatch.setattr(peers, "suite_section", lambda section=section: section)
        peers.measure(tmp_path, 5, 2, only=some)
        said = json.loads((tmp_path / "conditions.json").read_text())
        assert (asked[-1], said.get("urgent"), "cache" in said) == (
            urgent,
            urgent or None,
            urgent > 0,
        )


def test_changes_are_in_every_entrys_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, harness.Entry] = {}
    monkeypatch.setattr(peers, "interleaved", lambda entries, folder, **_: given.update(entries))
    monkeypatch.setattr(peers, "_peak", lambda _: 1e12)  # it is measured in another process
    arguments = ["peers", "--only", "ours", "--set", "batch_size=4", "model.config.hidden_size=64"]
    run.main([*arguments, "--out", str(tmp_path)])
    for name, entry in given.items():
        recipe = load_recipe(entry.recipe, entry.overrides, check_arguments=False)
        assert (recipe.batch_size, recipe.model.config["hidden_size"]) == (4, 64), name
    assert len(given) >= 3 and all("ours" in name for name in given)
    (tmp_path / "rows.jsonl").write_text('{"entry": "ours: cpu/fp32", "repetition": 0, "reason": "not run"}\n')
    assert "Every recipe with batch_size=4, model.config.hidden_size=64." in peers.table(tmp_path)
    with pytest.raises(SystemExit):
        run.main(["limits", "--set", "batch_size=4", "--out", str(tmp_path / "other")])


def test_the_table_compares_real_tokens_within_a_kind() -> None:
    names = ["ours: x/fp32", "ours: x/fastest", "ours: mlm/amp", "ours: mlm/fastest"]
    speeds = (10, 40, 5, 15)
    rows = [row(name, n, speed * (n + 1)) for n in range(3) for name, speed in zip(names, speeds, strict=True)]
    lines = {name: peers._line(rows, name, names, 100.0) for name in names}
    assert lines["ours: x/fastest"][4].startswith("4.00x")
    assert lines["ours: x/fp32"][5].startswith("4.00x")
    assert lines["ours: mlm/amp"][4:6] == ("1.00x [1.00, 1.00]", "3.00x [3.00, 3.00]")
    assert lines["ours: x/fp32"][3] == "5.0 % [5.0, 5.0]"
    rows[0]["overlapped"] = True
    assert "beside other work" in peers._line(rows, names[0], names, 100.0)[0]
    assert peers._line(rows, names[0], names, None)[3] == "", "no peak, no MFU"
    failed = [row(names[0], 0, 0, seconds=[], reason="out of memory")]
    assert peers._line(failed, names[0], names[:1], 1.0)[1] == "out of memory"


def test_a_peak_that_cannot_be_measured_ends_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is measured in a process of its own, as a device may be in a bad state."""
    assert peers._peak("fp8") is None
    assert "no MFU: ValueError: precision must be" in capfd.readouterr().err
    (tmp_path / "environment.json").write_text(json.dumps(harness.environment(), default=str))
    conditions = {"batches": 2, "precision": "bf16", "peak": None, "cache": "/cache", "urgent": 2, "early": 3}
    harness.begin(tmp_path, "peers", **conditions)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row("ours: x/fp32", 0, 10)) + "\n")
    text = peers.table(tmp_path)
    assert "bf16 matmul peak measured here, which failed. Memory" in text
    assert "The first 2 lines have 3 repetitions before the others begin. Compiled code is kept" in text
