"""NaN and infinite losses, too little memory, and bad input through the command line."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract import USABLE, bert, make
from hostile import TINY, cli

from composer_speedups import registry
from composer_speedups.ablation.jobs import PRELOAD
from composer_speedups.isolation.isolate import Isolation
from composer_speedups.measurement.measure import Measurement
from composer_speedups.speedup import Stage
from composer_speedups.training.checkpoints import read_checkpoint


@pytest.fixture(scope="module")
def isolation():
    """Fresh processes at the price of a fork."""
    with Isolation("hostile:train", PRELOAD, {"OMP_NUM_THREADS": "1"}) as started:
        yield started


# ---- NaN and infinite losses


def test_a_run_that_stays_nan_is_ended_and_leaves_the_last_good_checkpoint(tmp_path, capsys) -> None:
    arguments = ("learning_rate=1e30", "duration=50ep", "schedule.warmup=0ba", "--save", str(tmp_path))
    with pytest.warns(UserWarning, match=r"no checkpoint ep\d+-ba\d+-rank0.pt: the weights are not finite"):
        code, lines = cli(capsys, "train", "demo/fp32", *TINY, *arguments, "--checkpoint-interval", "1ba")
    assert code == 1
    assert any("No model was saved" in line for line in lines)
    assert not (tmp_path / "model.safetensors").exists()
    for path in tmp_path.glob("checkpoints/ep*.pt"):
        assert all(bool(v.isfinite().all()) for v in read_checkpoint(path)["state"]["model"].values())


def measured(losses: list[float]) -> Measurement:
    measurement = Measurement()
    measurement._cuda, measurement._compiled, measurement._mark, measurement._began = False, 0.0, 0.0, 0.0
    for loss in losses:
        state = SimpleNamespace(
            total_loss_dict={"loss/train/total": loss},
            stop_training=lambda: None,
            timestamp=SimpleNamespace(sample=8),
            previous_timestamp=SimpleNamespace(sample=0),
        )
        measurement.batch_end(state, None)
        if measurement.gave_up:
            break
    return measurement


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_few_steps_without_a_finite_loss_are_survived(bad: float) -> None:
    """The scaler of fp16 skips such steps; 25 in a row are too many."""
    assert not measured([1.0, *[bad] * 24, 1.0, *[bad] * 24, 1.0]).gave_up
    lost = measured([1.0, *[bad] * 25, 1.0])
    assert lost.gave_up and len(lost.losses) == 26


OPTIMIZERS = [key for key in USABLE if registry.speedup_class(key).stage is Stage.OPTIMIZER]


@pytest.mark.parametrize("key", OPTIMIZERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scaler_skips_a_step_without_finite_gradients_and_recovers(key: str, bad: float) -> None:
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    make(key).convert(optimizer, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def step(spoil: bool) -> list[torch.Tensor]:
        optimizer.zero_grad()
        scaler.scale(sum(p.square().sum() for p in model.parameters())).backward()
        if spoil:
            next(model.parameters()).grad[0] = bad
        scaler.step(optimizer)
        scaler.update()
        return [p.detach().clone() for p in model.parameters()]

    first = step(spoil=False)
    moments = [t.clone() for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    spoilt = step(spoil=True)
    assert all(map(torch.equal, first, spoilt)), "a spoilt step must change no weight"
    now = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    assert all(map(torch.equal, moments, now)), "nor a moment"
    assert scaler.get_scale() == 2.0**15
    after = step(spoil=False)
    assert all(bool(p.isfinite().all()) for p in after)
    assert not any(map(torch.equal, spoilt, after))


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["fused_adamw", "foreach_adamw"])
def test_fp16_scaler_skips_and_recovers_in_a_real_run(optimizer: str) -> None:
    """A scale of 2**30 overflows in fp16; each skipped step halves it, until the gradients fit.

    PyTorch's warning of schedules that lose their first value, which is not so here, would be an error.
    """
    from composer import Callback, Trainer
    from composer.models import HuggingFaceModel
    from small import BatchDataset, bert_config
    from transformers import BertForSequenceClassification

    scales: list[float] = []

    class TooLarge(Callback):
        def fit_start(self, state: Any, logger: Any) -> None:
            state.scaler._init_scale = 2.0**30

        def batch_end(self, state: Any, logger: Any) -> None:
            scales.append(state.scaler.get_scale())

    model = HuggingFaceModel(BertForSequenceClassification(bert_config()))
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        algorithms=[registry.build("mixed_precision", dtype="fp16"), registry.build(optimizer)],
        train_dataloader=torch.utils.data.DataLoader(BatchDataset(32), batch_size=8),
        max_duration="15ep",
        callbacks=[TooLarge()],
        device="gpu",
        progress_bar=False,
        loggers=[],
    )
    trainer.fit()
    trainer.close()
    skipped = sum(b < a for a, b in zip([2.0**30, *scales], scales, strict=False))
    steps = {int(s["step"]) for s in trainer.state.optimizers[0].state.values()}
    assert skipped >= 3 and steps == {60 - skipped}
    assert all(bool(p.isfinite().all()) for p in model.parameters())


# ---- too little memory


BIG = ["task.max_length=512", "task.mean_length=500", "task.train_samples=64", "duration=1ep", "schedule.warmup=0ba"]


@pytest.mark.elsewhere
def test_out_of_memory_in_training_names_the_batch_and_a_smaller_one(isolation) -> None:
    payload = {"overrides": [*BIG, "batch_size=64", "evaluate=false"], "memory": 400 * 2**20}
    outcome = isolation.run(payload, timeout=120)
    assert outcome.status == "out_of_memory", outcome.reason + outcome.log
    assert "with 64 samples a forward pass: try microbatch_size=32, which keeps the batch at 64" in outcome.reason
    assert "MiB" in outcome.reason


def test_out_of_memory_in_evaluation_names_the_evaluation_batch(isolation) -> None:
    payload = {
        "overrides": [
            *BIG,
            *("duration=1ba", "batch_size=1", "eval_batch_size=48", "task.eval_samples=48"),
            "model.config.intermediate_size=8192",  # 800 MB: the attention alone may be a kernel that needs little
        ],
        "memory": 250 * 2**20,
    }
    outcome = isolation.run(payload, timeout=120)
    assert outcome.status == "out_of_memory", outcome.reason + outcome.log
    assert "with 48 samples an evaluation pass: try eval_batch_size=24" in outcome.reason


def test_out_of_memory_before_the_first_batch_names_the_model(isolation) -> None:
    payload = {
        "overrides": ["model.config.hidden_size=2048", "model.config.num_hidden_layers=8"],
        "memory": 300 * 2**20,
    }
    outcome = isolation.run(payload, timeout=120)
    assert outcome.status == "out_of_memory", outcome.reason + outcome.log
    assert "before its first batch" in outcome.reason and "smaller model" in outcome.reason


# ---- bad input, through the command line


TEXT = "task={name: text, path: rows.csv, text_column: words, label_column: kind}"
BAD = {
    "unknown recipe": (["demo/fp23"], "unknown recipe 'demo/fp23'. Nearest: demo/fp32"),
    "unknown key": (["demo/fp32", "batchsize=3"], "unknown key 'batchsize'. Nearest: batch_size"),
    "wrong type": (["demo/fp32", "batch_size=many"], "batch_size must be a positive integer, got 'many'"),
    "negative batch": (["demo/fp32", "batch_size=-8"], "batch_size must be a positive integer, got -8"),
    "twice": (["demo/fp32", "speedups=[fused_adamw, fused_adamw]"], "'fused_adamw' is listed twice"),
    "fp16 with bf16": (["twice.yaml"], "twice.yaml:3: speed-up 'mixed_precision' is listed twice"),
    "unreadable YAML": (["broken.yaml"], "broken.yaml:2: cannot be read as YAML"),
    "no file": (["gone.yaml"], "gone.yaml: there is no such file"),
    "code": (["demo/fp32", "seed=!!python/object/apply:os.system [id]"], "is not allowed"),
}
BAD_LATER = {
    "two optimizers": (["demo/fp32", "speedups=[fused_adamw, foreach_adamw]"], "contradict each other"),
    "wrong argument": (["demo/fp32", "speedups.mixed_precision={dtype: fp8}"], "fp8"),
    "no column": (["demo/fp32", TEXT], "words"),
    "no model folder": (["demo/fp32", TINY[0], "model={name: ./nowhere}"], "nowhere"),
    "hub": (["demo/fp32", TINY[0], "model={name: some/bert, pretrained: true}"], "hub"),
}


@pytest.fixture
def bad_files(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("text,label\ngood,1\nbad,0\n")
    Path("twice.yaml").write_text("speedups:\n- mixed_precision: {dtype: fp16}\n- mixed_precision: {dtype: bf16}\n")
    Path("broken.yaml").write_text("batch_size: [1\n")


@pytest.mark.parametrize("command", ["train", "ablate"])
@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_line_and_code_2(kind: str, command: str, bad_files, capsys) -> None:
    words, expected = BAD[kind]
    code, lines = cli(capsys, command, *words)
    assert code == 2 and len(lines) == 1, lines
    assert lines[0].startswith("error: ") and expected in lines[0]


@pytest.mark.parametrize("kind", BAD_LATER)
def test_bad_input_found_before_training_is_one_line_and_code_2(kind: str, bad_files, capsys, monkeypatch) -> None:
    if kind == "hub":
        from huggingface_hub import constants

        from composer_speedups.tasks import hub

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        hub.unreachable.cache_clear()
    words, expected = BAD_LATER[kind]
    try:
        code, lines = cli(capsys, "train", *words, "--save", "out")
    finally:
        if kind == "hub":
            hub.unreachable.cache_clear()
    errors = [line for line in lines if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1 and lines[-1] == errors[0], lines
    assert expected in errors[0]
    assert not list(Path().glob("out/**/*.pt"))


@pytest.mark.slow
def test_two_optimizers_in_an_ablation(bad_files, capsys) -> None:
    code, lines = cli(capsys, "ablate", *BAD_LATER["two optimizers"][0], "--out", "out")
    assert code == 2 and "contradict each other" in lines[-1], lines
