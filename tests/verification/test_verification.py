"""`verify`: it holds where all is well, and sees planted faults that are as small as a change of a rounding's size."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from composer.algorithms import GradientClipping
from composer.core import Event
from composer.models import HuggingFaceModel
from small import BatchDataset, bert_config, config_of
from torch.utils.data import DataLoader

import composer_speedups as cs
from composer_speedups.cli import main
from composer_speedups.errors import UserError
from composer_speedups.recipes import load_recipe
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.verification import compared_steps
from composer_speedups.verification.findings import Comparison, Errors
from composer_speedups.verification.recipe import verify_recipe
from composer_speedups.verification.true_gradients import Gradients, errors, gradients, without_dropout
from composer_speedups.verification.verify import verify

TINY = [
    "task={name: dummy, max_length: 32, mean_length: 16, length_std: 6, vocabulary: 256, train_samples: 64, "
    "eval_samples: 16}",
    "model.config={num_hidden_layers: 2, hidden_size: 32, num_attention_heads: 2, intermediate_size: 64}",
    "batch_size=8",
]


def bert(**config: object) -> HuggingFaceModel:
    """With dropout, which `verify` has to switch off."""
    from transformers import BertForSequenceClassification

    torch.manual_seed(3)
    config = bert_config(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.2, **config)
    model = HuggingFaceModel(BertForSequenceClassification(config), use_logits=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # biases that are 0 would hide that one is lost
    return model


def loader() -> DataLoader:
    return DataLoader(BatchDataset(32), batch_size=4)


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, foreach=False, fused=False)


class Fault(SpeedUp):
    """Does to the model what a speed-up must not."""

    stage = Stage.OPTIMIZER  # after those that make another optimizer's groups

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def install(self, state, logger) -> None:
        model, optimizer = state.model, state.optimizers[0]
        encoder = model.model.bert
        dense = encoder.encoder.layer[1].output.dense
        if self.fault == "a bias is lost":
            dense.forward = lambda x: F.linear(x, dense.weight)
        elif self.fault == "padding is seen":
            encoder.register_forward_pre_hook(lambda m, a, k: (a, k | {"attention_mask": None}), with_kwargs=True)
        elif self.fault == "another epsilon":
            encoder.encoder.layer[0].output.LayerNorm.eps = 1e-4
        elif self.fault == "a gradient a ten-thousandth too large":
            dense.weight.register_hook(lambda gradient: gradient * 1.0001)
        elif self.fault == "a gradient is lost":
            dense.bias.register_hook(torch.zeros_like)
        elif self.fault == "only in 16 bits":
            dense.register_forward_hook(lambda m, a, out: out if out.dtype is torch.float32 else out * 1.1)
        elif self.fault == "from the third step on":
            seen = []
            dense.weight.register_hook(lambda gradient: gradient * (1.01 if (seen.append(0) or len(seen)) > 2 else 1))
        elif self.fault == "not a number":
            dense.weight.register_hook(lambda gradient: gradient * math.nan)
        elif self.fault == "the loss alone":
            loss = model.loss
            model.loss = lambda out, batch: (right := loss(out, batch)) + right.detach() * 1e-4
        elif self.fault == "other weights":
            with torch.no_grad():
                dense.weight.mul_(1.0001)
        elif self.fault == "no weight decay":
            optimizer.param_groups[0]["weight_decay"] = 0.0
        elif self.fault == "no update":
            optimizer.param_groups[0]["lr"] = 0.0
        elif self.fault == "another optimizer":
            optimizer.__class__ = torch.optim.SGD
            optimizer.param_groups[0].update(momentum=0, dampening=0, nesterov=False)
        elif self.fault == "the first batch again and again":
            forward, first = model.forward, []
            model.forward = lambda batch: forward((first.append(batch) or first)[0])
            loss = model.loss
            model.loss = lambda out, batch: loss(out, first[0])
        elif self.fault == "another rate":
            optimizer.param_groups[0]["lr"] *= 1.001
        self.report(logger, 1, "")


FAULTS = {
    "a bias is lost": "step 1 in float32",
    "padding is seen": "step 1 in float32",
    "another epsilon": "step 1 in float32",
    "a gradient a ten-thousandth too large": "model.bert.encoder.layer.1.output.dense.weight, step 1 in float32",
    "a gradient is lost": "model.bert.encoder.layer.1.output.dense.bias, step 1 in float32",
    "from the third step on": "model.bert.encoder.layer.1.output.dense.weight, step 4 in float32",
    "not a number": "step 1: its gradients are not finite",
    "the loss alone": "loss, step 1 in float32",
    "other weights": "model.bert.encoder.layer.1.output.dense.weight: other weights",
    "no weight decay": "updates of torch AdamW",
    "another rate": "updates of torch AdamW",
    "no update": "updates of torch AdamW",
    "another optimizer": "the optimizer is torch SGD now",
    "the first batch again and again": "step 4 in float32",
}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, precision: str) -> None:
    own = [cs.MixedPrecision("bf16")] if precision == "bf16" else []
    found = verify(bert(), loader(), [*own, Fault(fault)], adamw)
    assert not found.holds
    assert any(FAULTS[fault] in line for line in found.wrong), found.wrong
    assert all("step 1" not in line for line in found.wrong) or fault != "from the third step on"


def test_a_fault_of_kernels_for_16_bits_is_found() -> None:
    """Of which float32 sees nothing, and which is there with all texts."""
    said = []
    found = verify(bert(), loader(), [cs.MixedPrecision("bf16"), Fault("only in 16 bits")], adamw, say=said.append)
    assert not found.holds and all("in bf16" in line for line in found.wrong)
    assert said[-1] == "computing its step 4 in float64, on the CPU"
    assert sum(line.startswith("looking again, at other texts") for line in said) == 7


def comparison(precision: str, share: float, plain: float = 4e-3) -> Comparison:
    off = Errors(0.0, plain, {}, {})
    return Comparison(precision, 1, off, off, "head.weight", share)


@pytest.mark.parametrize(
    ("others", "used"),
    [
        ([comparison("bf16", 0.5)], 0),
        ([comparison("bf16", 9.0), comparison("bf16", 0.5), comparison("bf16", 0.4)], 1),
        # Where the plain model is further off, nothing would be seen.
        ([comparison("bf16", 0.5, 8e-2), comparison("bf16", 0.4)], 1),
        ([comparison("bf16", 0.5, 8e-2)] * 7, None),
        ([comparison("bf16", 1.1)] * 7, None),
        # What the first texts were was no measure.
        ([comparison("bf16", 1.5, 1e-3), comparison("bf16", 0.5, 4e-3), comparison("bf16", 0.3, 1.5e-3)], 2),
    ],
)
def test_what_is_so_with_some_texts_only_is_chance(others: list[Comparison], used: int | None) -> None:
    made = []

    def train_at(look: int) -> SimpleNamespace:
        made.append(look)
        return SimpleNamespace(kept=[others[look - 1]], dtype=torch.bfloat16, not_finite=0)

    first = [comparison("bf16", 3.0), comparison("float32", 0.3)]
    found, notes = compared_steps.looked_again(first, train_at, lambda step, dtype: step, lambda text: None)
    if used is None:
        assert found == first and not notes and made == [*range(1, 8)]
        return
    assert found == [others[used], first[1]] and made == [*range(1, used + 2)]
    assert notes == [
        "with other texts it is not so, by chance then: head.weight, step 1 in bf16: 3 times the error that is allowed"
    ]


def test_in_float64_a_step_is_computed_once(monkeypatch) -> None:
    asked = []

    def counted(*args, **kwargs):
        asked.append(kwargs.get("dtype"))
        return gradients(*args, **kwargs)

    monkeypatch.setattr(compared_steps, "gradients", counted)
    found = verify(bert(), loader(), [cs.MixedPrecision("bf16")], adamw)
    # Two precisions of two steps each, and both trainings begin with the same weights.
    assert found.holds and len(found.comparisons) == 4 and asked.count(torch.float64) == 3


def test_nothing_changed_is_nothing_off() -> None:
    found = verify(bert(), loader(), [Fault("none")], adamw)
    assert found.holds and not found.notes
    assert [(c.precision, c.step) for c in found.comparisons] == [("float32", 1), ("float32", 4)]
    assert all(c.errors == c.plain and c.share == pytest.approx(0.25) for c in found.comparisons)
    assert 0 < found.updates.error < found.updates.allowed < 1e-3


SPEEDUPS = {
    "all": lambda: [
        cs.MixedPrecision("bf16"),
        cs.Unpadding(),
        cs.FusedAdamW(no_decay_on_bias_and_norm=True),
        cs.FusedDropoutAddNorm(),
        cs.FusedBiasGELU(),
        cs.LowPrecisionNorm(),
        cs.LastLayerSubset(),
    ],
    "in float32": lambda: [cs.MatmulPrecision("highest"), cs.Unpadding(), cs.ForeachAdamW()],
    "batches": lambda: [cs.TokenBudgetBatches(tokens_per_batch=20), cs.Unpadding()],
    "checkpointing": lambda: [cs.GradientCheckpointing(), cs.MixedPrecision("bf16")],
    "release": lambda: [cs.GradientRelease(), cs.GradientCheckpointing()],
}


@pytest.mark.parametrize("which", SPEEDUPS)
def test_holds(which: str) -> None:
    model, algorithms = bert(), SPEEDUPS[which]()
    before = copy.deepcopy(model.state_dict())
    found = verify(model, loader(), algorithms, adamw)
    assert found.holds, found.wrong
    precisions = ["bf16", "bf16", "float32", "float32"] if which in ("all", "checkpointing") else ["float32"] * 2
    assert [c.precision for c in found.comparisons] == precisions
    low = [c for c in found.comparisons if c.precision == "bf16"]
    exact = [c for c in found.comparisons if c.precision == "float32"]
    assert all(1e-3 < c.errors.gradients < 0.1 for c in low) and all(c.errors.gradients < 3e-6 for c in exact)
    assert found.updates.error < found.updates.allowed < 1e-3
    # Rows of padded_batch, of 3 to 16 tokens; the shortest and the longest are among them.
    assert 8 * 3 < found.tokens < 8 * 16 and 0 < found.padding < 1
    assert set(found.changed) == {a.key() for a in algorithms}
    assert all(evidence["changed"] > 0 for evidence in found.changed.values())
    # What was given is as it was.
    assert not any(a.evidence for a in algorithms) and model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.model.config.hidden_dropout_prob == 0.1


def test_batches_of_a_tokenizer() -> None:
    """Which are mappings, and no dicts."""
    from transformers import BatchEncoding

    def collate(samples: list[dict[str, torch.Tensor]]) -> BatchEncoding:
        return BatchEncoding(torch.utils.data.default_collate(samples))

    found = verify(bert(), DataLoader(BatchDataset(32), collate_fn=collate), [cs.Unpadding()])
    assert found.holds and found.tokens == verify(bert(), loader(), [cs.Unpadding()]).tokens


def test_labels_of_tokens_are_not_accumulated() -> None:
    from transformers import BertForMaskedLM

    data = [{name: column[i] for name, column in BatchDataset(32).data.items()} for i in range(32)]
    data = [sample | {"labels": sample["input_ids"]} for sample in data]
    model = HuggingFaceModel(BertForMaskedLM(bert_config()), use_logits=True)
    assert verify(model, DataLoader(data), [cs.FusedAdamW()]).holds
    with pytest.raises(UserError, match="microbatch_size is for models with one label a sample"):
        verify(model, DataLoader(data), [cs.FusedAdamW()], microbatch_size=2)


def test_gradients_that_are_accumulated() -> None:
    assert verify(bert(), loader(), [cs.Unpadding()], adamw, samples=6, microbatch_size=2).holds


def test_states_of_8_bits_may_be_further_off() -> None:
    found = verify(bert(), loader(), [cs.AdamW8bit(min_8bit_size=256)], adamw)
    assert found.holds and found.updates.allowed == 0.5
    assert 1e-4 < found.updates.error < 0.2
    assert not verify(bert(), loader(), [cs.AdamW8bit(min_8bit_size=256), Fault("no update")], adamw).holds


def test_another_rule_is_not_compared() -> None:
    assert verify(bert(), loader(), [cs.Adafactor()], adamw).updates is None
    still = verify(bert(), loader(), [cs.Adafactor(), Fault("no update")], adamw)
    assert len(still.wrong) == 1 and still.wrong[0].endswith("updated nothing")
    sgd = verify(bert(), loader(), [cs.Unpadding()], lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    assert sgd.holds and sgd.updates is None


def test_decoupled_decay_is_compared() -> None:
    from composer.optim import DecoupledAdamW

    def decoupled(model: torch.nn.Module) -> DecoupledAdamW:
        return DecoupledAdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)

    assert verify(bert(), loader(), [cs.FusedAdamW()], decoupled).updates.allowed
    assert not verify(bert(), loader(), [Fault("no weight decay")], decoupled).holds


class Recording(Fault):
    """A fault of a speed-up that records, at the step at which it does."""

    stage = Stage.RECORD

    def install(self, state, logger) -> None:
        seen = []
        weight = state.model.model.bert.encoder.layer[1].output.dense.weight
        weight.register_hook(lambda gradient: gradient * (2 if (seen.append(0) or len(seen)) == 2 else 1))
        self.report(logger, 1, "")


def test_each_step_of_what_records_is_compared() -> None:
    found = verify(bert(), loader(), [Recording("")], adamw)
    assert [c.step for c in found.comparisons] == [1, 2, 3, 4]
    assert len(found.wrong) == 1 and "dense.weight, step 2 in float32" in found.wrong[0]


class Batches(SpeedUp):
    """Gives other batches than there are texts for."""

    stage = Stage.DATA
    events = frozenset({Event.AFTER_DATALOADER})

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def install(self, state, logger) -> None:
        self.report(logger, 1, "")

    def on_event(self, event, state, logger) -> None:
        batch, whole = state.batch, state.batch["labels"].dim() > 1
        if self.fault == "some are lost":
            state.batch = {name: column[:-3] for name, column in batch.items()}
        elif self.fault == "one comes twice":
            state.batch = {name: torch.cat([column[:1], column[:-1]]) for name, column in batch.items()}
        elif self.fault == "they end too soon":
            batch["attention_mask"][:, 4:] = 0
        elif self.fault == "others' labels":
            batch["labels"] = (
                torch.where(batch["labels"] < 0, -100, (batch["labels"] + 1) % 3)
                if whole
                else (batch["labels"].roll(1))
            )
        elif self.fault == "types are zero":
            batch["token_type_ids"] = torch.zeros_like(batch["token_type_ids"])
        elif self.fault == "no types":
            del batch["token_type_ids"]
        elif self.fault == "other tokens":
            batch["input_ids"] = torch.where(batch["attention_mask"].bool(), 7, 0)
        elif self.fault == "trimmed and in another order":
            longest = int(batch["attention_mask"].sum(1).max())
            state.batch = {n: (x[:, :longest] if x.dim() > 1 else x).flip(0) for n, x in batch.items()}
        elif self.fault == "in the last step" and int(state.timestamp.batch) == 3:
            batch["labels"] = batch["labels"].flip(0)


class Typed(BatchDataset):
    """With types of tokens, and labels a text or a token."""

    def __init__(self, by_token: bool) -> None:
        super().__init__(32)
        ids, mask = self.data["input_ids"], self.data["attention_mask"]
        self.data["token_type_ids"] = ids % 2 * mask
        if by_token:
            self.data["labels"] = torch.where(mask.bool(), ids % 3, -100)


OF_BATCHES = {
    "": None,
    "some are lost": "its batch has other input_ids, labels, token_type_ids than its samples",
    "one comes twice": "its batch has other input_ids, labels, token_type_ids than its samples",
    "they end too soon": "its batch has other input_ids, labels, token_type_ids than its samples",
    "others' labels": "its batch has other labels than its samples",
    "types are zero": "its batch has other token_type_ids than its samples",
    "no types": "its batch has no token_type_ids, which its samples have",
    "other tokens": "its batch has other input_ids than its samples",
    "trimmed and in another order": None,
    "in the last step": "its batch has other labels than its samples",
}


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("fault", OF_BATCHES)
def test_batches_have_what_their_samples_have(fault: str, by_token: bool) -> None:
    from transformers import BertForTokenClassification

    model = HuggingFaceModel(BertForTokenClassification(bert_config()), use_logits=True) if by_token else bert()
    found = verify(model, DataLoader(Typed(by_token), batch_size=4), [Batches(fault)], adamw)
    step = 4 if fault == "in the last step" else 1
    assert found.wrong == ([f"step {step}: {OF_BATCHES[fault]}"] if OF_BATCHES[fault] else [])


def test_what_a_collator_draws_by_chance_is_not_compared() -> None:
    from transformers import BertForMaskedLM

    def masked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        batch = torch.utils.data.default_collate(samples)
        chosen = (torch.rand(batch["input_ids"].shape) < 0.4) & batch["attention_mask"].bool()
        labels = torch.where(chosen, batch["input_ids"], -100)
        return batch | {"input_ids": torch.where(chosen, 4, batch["input_ids"]), "labels": labels}

    def verified(fault: str) -> list[str]:
        torch.manual_seed(1)
        model = HuggingFaceModel(BertForMaskedLM(bert_config()), use_logits=True)
        data = DataLoader(Typed(by_token=True), batch_size=4, collate_fn=masked)
        return verify(model, data, [Batches(fault)], adamw).wrong

    assert verified("") == []
    assert verified("types are zero") == ["step 1: its batch has other token_type_ids than its samples"]
    assert verified("they end too soon") == ["step 1: its batch has other token_type_ids than its samples"]


class InEvaluation(SpeedUp):
    """Wrong when the model does not train."""

    stage = Stage.HEAD

    def __init__(self, factor: float, shape: bool = False) -> None:
        self.factor, self.shape = factor, shape

    def install(self, state, logger) -> None:
        def change(module, given, out):
            return out if module.training else out[:, :1] if self.shape else out * self.factor

        state.model.model.classifier.register_forward_hook(change)
        self.report(logger, 1, "")


@pytest.mark.parametrize(("factor", "shape"), [(1.0, False), (1.001, False), (math.nan, False), (1.0, True)])
def test_evaluation_is_compared(factor: float, shape: bool) -> None:
    found = verify(bert(), loader(), [cs.MixedPrecision("bf16"), InEvaluation(factor, shape)], adamw)
    assert [one.precision for one in found.evaluated] == ["bf16", "float32"]
    assert all(one.plain > 0 for one in found.evaluated)
    if factor == 1.0 and not shape:
        assert found.holds and all(one.share < 0.6 for one in found.evaluated)
        return
    said = "NaN, or of other shapes than the plain model's" if shape or math.isnan(factor) else "times as far off"
    assert found.wrong and all(said in line for line in found.wrong)
    assert "evaluating in float32: its outputs are" in found.wrong[-1]


def test_a_model_that_cannot_be_evaluated_is_told() -> None:
    model = bert()
    model.eval_forward = None
    found = verify(model, loader(), [cs.Unpadding()], adamw)
    assert found.holds and found.evaluated == []
    assert any(note.startswith("its evaluation was not compared: TypeError") for note in found.notes)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.AdamW(model.model.classifier.parameters(), lr=1e-3),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, maximize=True),
        lambda model: torch.optim.AdamW(model.parameters(), lr=3e-2, amsgrad=True, betas=(0.9, 0.5)),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.0),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-12),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-14),
    ],
    ids=["of the head alone", "maximize", "amsgrad", "no rate", "hardly a rate", "below all rounding"],
)
def test_optimizers_of_all_kinds_hold(make) -> None:
    found = verify(bert(), loader(), [cs.Unpadding()], make)
    assert found.holds, found.wrong
    if (rate := make(bert()).param_groups[0]["lr"]) < 1e-6:
        assert (found.updates.error, found.updates.allowed) == (0.0, 0.0) if not rate else found.updates.allowed is None


def test_random_numbers_go_on_as_if_nothing_had_been() -> None:
    def numbers() -> tuple[float, float, float]:
        return torch.rand(()).item(), float(np.random.random()), random.random()

    def seeded() -> None:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)

    model = bert()
    seeded()
    expected = numbers()
    seeded()
    assert verify(model, loader(), [cs.Unpadding()]).holds
    assert numbers() == expected


@pytest.mark.parametrize("seed", range(3))
def test_gradients_that_are_nothing_but_rounding_are_no_alarm(seed: int) -> None:
    """Keys' biases, where the plain model's attention is eager: two kernels' rounding, which differs manifold."""
    recipe = load_recipe("memory/leanest", [*TINY, "model.pretrained=false"])
    found = verify_recipe(recipe, seed=seed)
    assert found.holds, found.wrong


def test_what_is_not_finite_in_float64_is_no_verdict() -> None:
    from transformers import ModernBertForSequenceClassification

    torch.manual_seed(0)
    sizes = dict(vocab_size=128, pad_token_id=0, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    config = config_of("ModernBert", **sizes, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = HuggingFaceModel(
        ModernBertForSequenceClassification._from_config(config, attn_implementation="eager"), use_logits=True
    )
    with contextlib.suppress(UserError):  # newer versions of transformers are right
        assert verify(model, loader(), [cs.FusedAdamW()]).holds


def test_what_changes_nothing_is_a_note() -> None:
    found = verify(bert(), loader(), [cs.MaskedTokenHead(), cs.Unpadding()])
    (note,) = found.notes
    assert found.holds and note.startswith("MaskedTokenHead(capacity=None) changed nothing: ")


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(UserError, match="GradientClipping changes what is trained: leave it out"):
        verify(bert(), loader(), [GradientClipping("norm", 1.0)])
    with pytest.raises(UserError, match="has a speed-up already: give the model as it was"):
        changed = bert()
        cs.apply_unpadding(changed)
        verify(changed, loader(), [cs.Unpadding()])
    for wrong, message in (
        ({"model": bert().model}, "verify takes a ComposerModel, got BertForSequenceClassification: HuggingFaceModel"),
        ({"dataloader": [1, 2]}, "verify takes a torch DataLoader"),
        ({"algorithms": [cs.Unpadding]}, "Unpadding is a class, not a speed-up"),
        ({"samples": 0}, "samples must be a whole number from 1 on, got 0"),
        ({"samples": "8"}, "samples must be a whole number from 1 on, got '8'"),
        ({"microbatch_size": -1}, "microbatch_size must be a whole number from 1 on, got -1"),
        ({"optimizer": lambda model: adamw(copy.deepcopy(model))}, "the optimizer has no parameter of the model"),
    ):
        given = {"model": bert(), "dataloader": loader(), "algorithms": [cs.Unpadding()]} | wrong
        with pytest.raises(UserError, match=re.escape(message)):
            verify(**given)
    with pytest.raises(UserError, match="has 32 samples, fewer than the 40 of the batch"):
        verify(bert(), loader(), [cs.Unpadding()], samples=40)
    with pytest.raises(UserError, match="convert the model"):
        verify(bert().bfloat16(), loader(), [cs.Unpadding()])
    broken = bert()
    broken.model.classifier.weight.data.fill_(math.nan)
    with pytest.raises(UserError, match="loss is nan without any speed-up"):
        verify(broken, loader(), [cs.Unpadding()])
    noisy = bert()
    noisy.model.classifier.register_forward_hook(lambda m, i, out: out + torch.randn_like(out))
    with pytest.raises(UserError, match="what else draws random numbers"):
        verify(noisy, loader(), [cs.Unpadding()])


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "ModernBert", "DebertaV2", "MPNet", "NomicBert", "EuroBert"])
def test_dropout_is_found_in_every_family(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers has no {family}")
    sizes = dict(
        vocab_size=128, pad_token_id=0, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    config = config_of(family, **sizes, num_labels=3, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    torch.manual_seed(0)
    model = HuggingFaceModel(getattr(transformers, f"{family}ForSequenceClassification")(config), use_logits=True)
    batch = BatchDataset(8).data
    random = [gradients(model, batch, {}).loss for _ in range(2)]
    without_dropout(model)
    assert random[0] != random[1] and gradients(model, batch, {}).loss == gradients(model, batch, {}).loss


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        "finetune/fastest",
        "finetune/fastest_eager",
        "finetune/fp16",
        "finetune/tf32",
        "mlm/fastest",
        "memory/leanest",
        "memory/fp16_all",
    ],
)
def test_recipes_hold_on_a_gpu(name: str) -> None:
    # Heads of 64, as flash attention likes them.
    sizes = "{num_hidden_layers: 2, hidden_size: 128, num_attention_heads: 2, intermediate_size: 256}"
    recipe = load_recipe(name, [*TINY, f"model.config={sizes}", "model.pretrained=false", "microbatch_size=null"])
    found = verify_recipe(recipe)
    assert found.holds, found.wrong
    assert {c.precision for c in found.comparisons} >= {"float32"} and not found.notes
    if "cuda_graphs" in recipe.speedups:
        assert found.changed["cuda_graphs"]["replayed"] > 0


def test_errors_count_what_is_missing() -> None:
    true = Gradients(2.0, {"a": torch.tensor([3.0, 4.0]).double(), "b": torch.tensor([12.0]).double()})
    found = errors(Gradients(2.5, {"a": true.tensors["a"], "c": torch.tensor([5.0]).double()}), true)
    assert (found.loss, found.gradients) == (0.25, 1.0)
    assert found.tensors == {"a": 0.0, "b": 12.0, "c": 5.0} and found.norms == {"a": 5.0, "b": 12.0, "c": 0.0}


def test_a_loss_scale_cancels() -> None:
    model, batch = bert(), BatchDataset(8).data
    without_dropout(model)
    weights = dict(model.named_parameters())
    plain, scaled = (gradients(model, batch, weights, loss_scale=scale) for scale in (1.0, 1024.0))
    assert plain.tensors.keys() == weights.keys()
    assert plain.loss == scaled.loss and errors(scaled, plain).gradients < 1e-6


def test_a_scale_at_which_the_plain_model_overflows_is_lowered(monkeypatch) -> None:
    asked = []

    def overflowing(*_, loss_scale: float, **__) -> Gradients:
        asked.append(loss_scale)
        return Gradients(1.0, {"weight": torch.tensor([math.inf if loss_scale > 300 else 1.0])})

    monkeypatch.setattr(compared_steps, "gradients", overflowing)
    step = SimpleNamespace(batch={}, weights={}, loss_scale=65536.0, precision=None, share=1.0)
    assert compared_steps._stock(None, step, torch.float16, None).finite and asked == [65536.0, 4096.0, 256.0]
    monkeypatch.setattr(compared_steps, "gradients", lambda *_, **__: Gradients(math.nan, {}))
    with pytest.raises(UserError, match="gradients are not finite in fp16: there is nothing to compare with"):
        compared_steps._stock(None, step, torch.float16, None)


def test_the_command(capsys) -> None:
    assert main(["verify", "cpu/fastest_fp32", *TINY, "--samples", "6"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "6 texts of dummy" in out and "float32, step 4" in out and "updates of torch AdamW (fused)" in out
    assert out.endswith("yes: cpu/fastest_fp32 computes what its model does without speed-ups")


def test_the_command_ends_with_one_where_it_does_not_hold(capsys, monkeypatch) -> None:
    from composer_speedups.algorithms import unpadding

    def apply(model, *args, right=unpadding.apply_unpadding, **kwargs):
        count = right(model, *args, **kwargs)
        model.model.bert.encoder.layer[0].output.dense.weight.register_hook(lambda gradient: gradient * 1.01)
        return count

    monkeypatch.setattr(unpadding, "apply_unpadding", apply)
    assert main(["verify", "cpu/fastest_fp32", *TINY]) == 1
    out = capsys.readouterr().out
    assert "bert.encoder.layer.0.output.dense.weight, step 1 in float32" in out
    assert "no: cpu/fastest_fp32 does not compute" in out and "speedups.unpadding=null" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["batch_size=8"], "name the recipe first: NAME batch_size=8"),
        (["cpu/fastest", *TINY, "--samples", "500"], "has 64 samples, fewer than the 500 of the batch: lower samples"),
        (["finetune/fastest"], "fused_layer_norm cannot be used here: it needs a CUDA device"),
        (["finetune/fastest"], "all but what this machine lacks: speedups.fused_layer_norm=null speedups.f"),
        (["cpu/fastest", "speedups.nonsense={}"], "unknown speed-up 'nonsense'"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys) -> None:
    assert main(["verify", *words]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and message in last


def test_out_of_memory_names_fewer_samples(capsys, monkeypatch) -> None:
    def full(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(compared_steps, "gradients", full)
    assert main(["verify", "cpu/fp32", *TINY]) == 2
    assert "cpu/fp32 ran out of memory with 8 texts: try --samples 4" in capsys.readouterr().err
