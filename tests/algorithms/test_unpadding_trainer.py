"""`Unpadding` in a Trainer: counts come from the host, whatever splits or changes a batch, and it trains the same."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from composer.algorithms import SeqLengthWarmup
from composer.models import HuggingFaceModel
from splits import SPLITS
from unpadded import LENGTH, batch, make

from composer_speedups import MixedPrecision, Unpadding
from composer_speedups.kernels import fused_attention
from composer_speedups.kernels.disentangled import in_c
from composer_speedups.kernels.per_sequence import served_by
from composer_speedups.packed import encoder as packed_encoder
from composer_speedups.packed import packing
from composer_speedups.packed.packing import COUNTS, counts_of

TOKENS = batch("ForTokenClassification")


def _without_last(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch with each row's last token but one masked."""
    mask = inputs["attention_mask"]
    ends = mask.sum(1, keepdim=True)
    mask = mask * ~((mask.cumsum(1) == ends) & (ends > 1))
    return inputs | {"attention_mask": mask, "labels": torch.where(mask.bool(), inputs["labels"], -100)}


def test_counts_on_the_host(make_trainer, monkeypatch) -> None:
    algorithm, counted = Unpadding(), []

    def look(mask: torch.Tensor) -> list[int]:
        counted.append(packing._tied(mask) is not None)
        return counts_of(mask)

    monkeypatch.setattr(packed_encoder, "counts_of", look)
    make_trainer([algorithm], device_train_microbatch_size=4).fit()
    assert algorithm.evidence["changed"] == 2
    assert algorithm.evidence["kernel"] == f"per sequence: {served_by(torch.ones(1, 1, 8))}"
    assert algorithm.evidence["counted_on_host"]
    assert len(counted) == 8 and all(counted), "a count was made anew"


@pytest.mark.parametrize("split", ["composer", "tensors", "rows", "named", "lists"])
def test_a_split_of_ones_own(make_trainer, split: str, device: str) -> None:
    """As of a `DataSpec(split_batch=...)`: it is given what its dataloader yields, and on a GPU a tensor more."""
    algorithm, seen = Unpadding(), []
    options = {"device": "gpu" if device == "cuda" else "cpu", "device_train_microbatch_size": 4}
    trainer = make_trainer([algorithm], **options)

    def watched(batch: dict, size: int) -> list[dict]:
        seen.append(COUNTS in batch)
        return SPLITS[split](batch, size)

    trainer._train_data_spec.split_batch = watched
    trainer.fit()
    assert set(seen) == {device == "cuda"}
    assert algorithm.evidence.get("counted_on_host", False) == (device == "cpu" or split != "named")


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("family", ["Bert", "DebertaV2"])
def test_tells_the_kernel_of_the_precision_that_runs(make_trainer, family: str, around: bool, monkeypatch):
    model, queries = make(family, num_attention_heads=2).float(), []
    serves = fused_attention.serves
    monkeypatch.setattr(fused_attention, "serves", lambda q, k, v: queries.append(q) or serves(q, k, v))
    columns = batch("ForSequenceClassification")
    samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    rows = torch.utils.data.DataLoader(samples, batch_size=3)
    algorithms = [*([] if around else [MixedPrecision("bf16")]), Unpadding()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = make_trainer(algorithms, model=HuggingFaceModel(model), optimizer=optimizer, train_dataloader=rows)
    with torch.autocast("cpu", torch.bfloat16, enabled=around):  # a user's own
        trainer.fit()
    asked, *real = queries
    assert {q.dtype for q in real} == {asked.dtype} == {torch.bfloat16}
    own = family == "Bert" or in_c(*real[:1] * 3)
    assert algorithms[-1].evidence["kernel"] == (f"per sequence: {served_by(real[0])}" if own else "padded sdpa")


@pytest.mark.parametrize("at_padding", [-100, 0])
def test_labels_at_padding_are_told_of_once(make_trainer, at_padding: int, caplog) -> None:
    columns = batch("ForTokenClassification")
    columns["labels"] = torch.where(columns["attention_mask"].bool(), columns["labels"], at_padding)
    samples = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    rows = torch.utils.data.DataLoader(samples, batch_size=2)
    algorithm = Unpadding()
    for _ in range(2):  # once in each Trainer
        model = HuggingFaceModel(make(head="ForTokenClassification").float())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "composer_speedups"):
            make_trainer([algorithm], model=model, optimizer=optimizer, train_dataloader=rows).fit()
        assert caplog.text.count("labels at padding are not all -100") == int(at_padding != -100)


def test_others_may_change_the_batch(make_trainer) -> None:
    """Composer's algorithms that cut batches, and transforms that mask tokens, come before the count."""
    stock = make(head="ForTokenClassification").float()
    rows = [dict(zip(TOKENS, row, strict=True)) for row in zip(*TOKENS.values(), strict=True)]
    trained = []
    for speedups in ([], [Unpadding()]):
        model = copy.deepcopy(stock)
        loader = torch.utils.data.DataLoader(rows, batch_size=3)
        warmup = SeqLengthWarmup(duration=0.5, min_seq_length=8, max_seq_length=LENGTH, step_size=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        options = dict(model=HuggingFaceModel(model), optimizer=optimizer, train_dataloader=loader)
        trainer = make_trainer([*speedups, warmup], max_duration="4ep", **options)
        trainer._train_data_spec.batch_transforms = _without_last
        trainer.fit()
        trained.append(model)
    for p, q, before in zip(*(model.parameters() for model in (*trained, stock)), strict=True):
        moved = (p - before).detach().abs().max()  # float32 gradients, summed in another order, of 8 steps
        torch.testing.assert_close(q, p, rtol=0, atol=float(1e-3 * moved + 1e-6))


def test_trains_as_the_padded_model(tiny_bert, make_trainer) -> None:
    twin = copy.deepcopy(tiny_bert)
    make_trainer([Unpadding()]).fit()
    make_trainer([], model=twin).fit()
    for p, q in zip(tiny_bert.parameters(), twin.parameters(), strict=True):
        # Adam's first steps have the size of the learning rate whatever the gradient's: where that is nothing but
        # rounding (keys' biases), 4 steps of 1e-3 may differ in sign.
        torch.testing.assert_close(p, q, rtol=1e-3, atol=8e-3)
    close = [(p - q).abs().max() < 1e-5 for p, q in zip(tiny_bert.parameters(), twin.parameters(), strict=True)]
    assert sum(close) >= 0.9 * len(close)
