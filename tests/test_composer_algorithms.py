"""Composer's own algorithms, callbacks and loggers beside ours, wherever they are listed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.algorithms import EMA, SAM, Factorize, GatedLinearUnits, GradientClipping, LayerFreezing, SeqLengthWarmup
from composer.algorithms.low_precision_layernorm.low_precision_layernorm import apply_low_precision_layernorm
from composer.callbacks import LoadCheckpoint
from composer.core import Algorithm, Event, Precision
from composer.loggers import LoggerDestination
from composer.models import HuggingFaceModel
from small import bert_config
from torch.utils.data import DataLoader
from transformers import BertForSequenceClassification, BertForTokenClassification

from composer_speedups import (
    Adafactor,
    AdamW8bit,
    FusedAdamW,
    FusedBiasGELU,
    FusedDropoutAddNorm,
    LengthGroupedBatches,
    LowPrecisionNorm,
    TokenBudgetBatches,
    Unpadding,
)
from composer_speedups.errors import ConflictError
from composer_speedups.speedup import SpeedUp

FACTORIZE = functools.partial(Factorize, min_features=16, latent_features=0.4)
FILE = "ep0-ba2-rank0.pt"

pytestmark = pytest.mark.filterwarnings("ignore:SAM has known issues:UserWarning")  # whose remedy is load_weights_only


class Norms(Algorithm):
    """Composer's low-precision norms, which it puts in last of all, and on a GPU only."""

    def match(self, event: Event, state: Any) -> bool:
        return event is Event.INIT

    def apply(self, event: Event, state: Any, logger: Any) -> None:
        apply_low_precision_layernorm(state.model, Precision.AMP_BF16, state.optimizers)


def speedups(no_decay: bool = False) -> list[SpeedUp]:
    return [Unpadding(), FusedDropoutAddNorm(), FusedBiasGELU(), FusedAdamW(no_decay_on_bias_and_norm=no_decay)]


def samples() -> list[dict[str, Any]]:
    """64 of 8 to 31 tokens."""
    return [
        {"input_ids": torch.arange(32) + n, "attention_mask": (torch.arange(32) < 8 + n % 24).long(), "labels": n % 2}
        for n in range(64)
    ]


def trained(make_trainer, start: torch.nn.Module, algorithms: list[Algorithm]) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, eps=1e-4)
    make_trainer(algorithms, model=model, optimizer=optimizer).fit()
    return {name: value for name, value in model.state_dict().items() if value.is_floating_point()}


@pytest.mark.filterwarnings("ignore::composer.algorithms.warnings.NoEffectWarning")  # of gated units there is no GELU
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize(
    "make",
    [EMA, SAM, FACTORIZE, functools.partial(GradientClipping, "norm", 0.1), LayerFreezing],
    ids=["EMA", "SAM", "Factorize", "GradientClipping", "LayerFreezing"],
)
def test_it_trains_as_without_ours(make: Callable[[], Algorithm], place: str, make_trainer) -> None:
    torch.manual_seed(0)
    start = BertForSequenceClassification(bert_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    expected = trained(make_trainer, start, [make()])
    ours = [make(), *speedups()] if place == "first" else [*speedups(), make()]
    found = trained(make_trainer, start, ours)
    assert found.keys() == expected.keys()
    moved = max((expected[name] - value).abs().max() for name, value in start.state_dict().items() if name in expected)
    assert moved > 1e-3, "else nothing was trained"
    assert max((found[name] - expected[name]).abs().max() for name in found) < 1e-5


@pytest.mark.filterwarnings("ignore::composer.algorithms.warnings.NoEffectWarning")
@pytest.mark.parametrize("make", [GatedLinearUnits, FACTORIZE, Norms], ids=["GatedLinearUnits", "Factorize", "Norms"])
def test_surgery_comes_before_ours_wherever_it_is_listed(make: Callable[[], Algorithm], make_trainer) -> None:
    """Else what we changed is gone without a word, and groups that we split are refused."""
    torch.manual_seed(0)
    start = BertForSequenceClassification(bert_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    told, weights = [], []
    for first in (True, False):
        torch.manual_seed(1)  # of the parameters that surgery makes
        model = copy.deepcopy(start)
        ours = [*speedups(no_decay=True)[1:], LowPrecisionNorm()]
        trainer = make_trainer([make(), *ours] if first else [*ours, make()], model=model)
        assert len(trainer.state.optimizers[0].param_groups) == 2
        held = {p for group in trainer.state.optimizers[0].param_groups for p in group["params"]}
        assert held == set(model.parameters())
        trainer.fit()
        told.append({a.key(): a.evidence["changed"] for a in ours})
        weights.append(model.state_dict())
    assert told[0] == told[1]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_ours_are_put_in_though_an_algorithm_is_never_run(tiny_bert) -> None:
    """As somebody's pass may take it out; and one that fails leaves the next Trainer alone."""

    class Fails(Norms):
        def apply(self, *_: Any) -> None:
            raise RuntimeError("on purpose")

    def without(algorithms, event):
        return [a for a in algorithms if not isinstance(a, Norms)]

    def trainer(**options) -> Trainer:
        return Trainer(
            model=HuggingFaceModel(tiny_bert), optimizers=torch.optim.AdamW(tiny_bert.parameters()), device="cpu",
            max_duration="1ep", algorithms=[ours, other], loggers=[], **options,
        )  # fmt: skip

    ours, other = FusedAdamW(), Fails()
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer()
    assert not ours.evidence
    trainer(algorithm_passes=without).close()
    assert ours.evidence["changed"]
    ours, other = FusedAdamW(), Norms()
    made = trainer()
    assert ours.evidence["changed"] and "apply" not in vars(other)
    made.close()


SAVED = [(FusedAdamW, None), (functools.partial(FusedAdamW, True), None), (AdamW8bit, None), (Adafactor, Adafactor)]


def resumed(make_trainer, tiny_bert, folder, of: Callable[[], SpeedUp], saved_with, algorithms, **options):
    saving = {"save_folder": str(folder), "save_interval": "2ba"}
    make_trainer([saved_with()] if saved_with else [], model=copy.deepcopy(tiny_bert), **saving).fit()
    trainer = make_trainer(algorithms, **options)
    if saved_with is None:
        trainer.fit()
    return getattr(trainer.state.optimizers[0], "base_optimizer", trainer.state.optimizers[0])


@pytest.mark.filterwarnings("ignore:.* is not in the state_dict:UserWarning")  # of SAM, and of what is refused
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize(("make", "saved_with"), SAVED, ids=["fused", "no_decay", "8bit", "adafactor"])
def test_an_optimizer_that_sam_wraps_is_resumed(
    make, saved_with, last: bool, make_trainer, tiny_bert, tmp_path
) -> None:
    """It wraps when a checkpoint is loaded, and so before us if it is listed after us."""
    algorithms = [make(), SAM()] if last else [SAM(), make()]
    options = {"load_path": str(tmp_path / FILE)}
    if make is AdamW8bit:
        with pytest.raises(ConflictError, match="holds no state of bitsandbytes AdamW8bit"):
            resumed(make_trainer, tiny_bert, tmp_path, make, saved_with, algorithms, **options)
        return
    optimizer = resumed(make_trainer, tiny_bert, tmp_path, make, saved_with, algorithms, **options)
    assert len(optimizer.state) == len(list(tiny_bert.parameters()))
    if make is not Adafactor:
        assert all(group["fused"] for group in optimizer.param_groups)
        assert {float(moments["step"]) for moments in optimizer.state.values()} == {4.0}
    if saved_with is None and make is not FusedAdamW:
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]


@pytest.mark.filterwarnings("ignore:.* is not in the state_dict:UserWarning")
def test_what_sam_has_saved_is_gone_on_with_as_in_composer(make_trainer, tiny_bert, tmp_path, caplog) -> None:
    """Its checkpoints hold no moments: Composer goes on without, and there is no other file to be converted."""
    saving = {"save_folder": str(tmp_path), "save_interval": "2ba"}
    make_trainer([FusedAdamW(), SAM()], model=copy.deepcopy(tiny_bert), **saving).fit()
    ends = []
    for algorithms in ([SAM()], [FusedAdamW(), SAM()]):
        caplog.clear()
        trainer = make_trainer(algorithms, model=copy.deepcopy(tiny_bert), load_path=str(tmp_path / FILE))
        trainer.fit()
        assert int(trainer.state.timestamp.batch) == 4
        ends.append(torch.cat([p.detach().flatten() for p in trainer.state.model.parameters()]))
    assert "saved under Composer's SAM, which leaves out the moments of AdamW: they begin anew" in caplog.text
    torch.testing.assert_close(*ends, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.* is not in the state_dict:UserWarning")
@pytest.mark.parametrize("event", [Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START])
@pytest.mark.parametrize(("make", "saved_with"), SAVED[:3], ids=["fused", "no_decay", "8bit"])
def test_what_a_callback_loads_is_seen(make, saved_with, event: Event, make_trainer, tiny_bert, tmp_path) -> None:
    options = {"callbacks": [LoadCheckpoint(str(tmp_path / FILE), event=event)]}
    if make is AdamW8bit:
        with pytest.raises(ConflictError, match=r"^the checkpoint holds no state of bitsandbytes AdamW8bit.* FILE\.pt"):
            resumed(make_trainer, tiny_bert, tmp_path, make, saved_with, [make()], **options)
        return
    optimizer = resumed(make_trainer, tiny_bert, tmp_path, make, saved_with, [make()], **options)
    assert all(group["fused"] for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == ([0.01] if make is FusedAdamW else [0.01, 0])
    assert all(float(moments["step"]) >= 4 for moments in optimizer.state.values())


@pytest.mark.parametrize("cls", [TokenBudgetBatches, LengthGroupedBatches])
def test_beside_a_warmup_of_lengths(cls, make_trainer) -> None:
    """Composer's takes batches of one size only, and would say so at the first step, as if it were the user's fault."""
    data = [sample | {"labels": sample["input_ids"] % 2} for sample in samples()]
    warmup = SeqLengthWarmup(duration=0.5, min_seq_length=8, max_seq_length=32, step_size=8)
    model = BertForTokenClassification(bert_config())
    trainer = make_trainer([warmup, cls()], model=model, train_dataloader=DataLoader(data, batch_size=8))
    if cls is TokenBudgetBatches:
        with pytest.raises(ConflictError, match="use length_grouped_batches"):
            trainer.fit()
    else:
        trainer.fit()
        assert int(trainer.state.timestamp.batch) == 8


class OneValue(LoggerDestination):
    """Takes no second value of a hyperparameter, as MLflow does not."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        for name, value in hyperparameters.items():
            assert self.known.setdefault(name, value) == value, f"{name} is another now"


def test_a_second_fit_on_other_data_tells_loggers_nothing_else(make_trainer) -> None:
    algorithm, logger = TokenBudgetBatches(100), OneValue()
    data = samples()
    trainer = make_trainer([algorithm], train_dataloader=DataLoader(data, batch_size=8), loggers=[logger])
    trainer.fit()
    first = algorithm.evidence["changed"]
    assert logger.known["token_budget_batches/changed"] == first
    trainer.fit(train_dataloader=DataLoader(data[: len(data) // 2], batch_size=8), duration="1ep")
    assert algorithm.evidence["changed"] < first
