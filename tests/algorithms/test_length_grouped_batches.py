from __future__ import annotations

import logging

import pytest
import torch
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Callback
from composer.models import HuggingFaceModel
from small import BatchDataset, bert_config
from torch.utils.data import DataLoader, DistributedSampler

from composer_speedups import LengthGroupedBatches, apply_length_grouped_batches
from composer_speedups.errors import SpeedUpUnavailable


class Indexed(BatchDataset):
    """Rows of 5 to 60 tokens, padded to 64; the first token tells which row it is."""

    def __init__(self, rows: int = 160) -> None:
        super().__init__(rows, 64)
        self.data["input_ids"][:, 0] = torch.arange(rows) % 120 + 5


class Seen(Callback):
    def __init__(self) -> None:
        self.batches: list[torch.Tensor] = []

    def batch_start(self, state, logger) -> None:
        self.batches.append(state.batch["input_ids"].clone())


def bert() -> HuggingFaceModel:
    from transformers import BertForSequenceClassification

    torch.manual_seed(1)
    return HuggingFaceModel(BertForSequenceClassification(bert_config(hidden_dropout_prob=0.1)))


def train(make_trainer, algorithms, duration: str = "2ep", loader=None, **kwargs):
    seen = Seen()
    model = bert()
    loader = loader or DataLoader(Indexed(), batch_size=8, shuffle=True)
    trainer = make_trainer(
        algorithms, model=model, max_duration=duration, train_dataloader=loader, callbacks=[seen], **kwargs
    )
    trainer.fit()
    return seen.batches, trainer


def test_keeps_samples_and_saves_padding(make_trainer) -> None:
    algorithm = LengthGroupedBatches()
    batches, trainer = train(make_trainer, [algorithm])
    assert len(batches) == 40
    for epoch in (batches[:20], batches[20:]):
        rows = [tuple(row[row != 0].tolist()) for batch in epoch for row in batch]
        expected = [tuple(r["input_ids"][r["input_ids"] != 0].tolist()) for r in Indexed()]
        assert sorted(rows) == sorted(expected)
    assert algorithm.evidence["changed"] == 20
    assert algorithm.evidence["padding_grouped"] < algorithm.evidence["padding_random"] - 0.05
    assert len({batch.shape[1] for batch in batches}) > 1 and all(b.shape[1] % 8 == 0 for b in batches)
    assert int(trainer.state.timestamp.batch) == 40


def test_resumed_training_is_the_uninterrupted_one(make_trainer, tmp_path) -> None:
    _, whole = train(make_trainer, [LengthGroupedBatches()], save_folder=str(tmp_path), save_interval="26ba")
    path = next(tmp_path.glob("ep1-ba26*"))
    batches, resumed = train(make_trainer, [LengthGroupedBatches()], load_path=str(path))
    assert len(batches) == 14
    for one, other in zip(whole.state.model.parameters(), resumed.state.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_of_mid_epoch_with_other_batches_is_warned_of(make_trainer, tmp_path, caplog) -> None:
    saved = {"save_interval": "7ba", "save_num_checkpoints_to_keep": 9}
    for name, algorithms in (("stock", []), ("grouped", [LengthGroupedBatches()])):
        train(make_trainer, algorithms, "1ep", save_folder=str(tmp_path / name), **saved)

    def told(name: str, algorithm: LengthGroupedBatches, checkpoint: str = "ep0-ba7", duration: str = "1ep") -> int:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "composer_speedups"):
            train(make_trainer, [algorithm], duration, load_path=str(tmp_path / name / f"{checkpoint}-rank0.pt"))
        return caplog.text.count("in the middle of epoch 0 with other batches than length_grouped_batches has here")

    assert told("stock", LengthGroupedBatches()) == 1
    assert told("grouped", LengthGroupedBatches(pool=2)) == 1
    assert told("grouped", LengthGroupedBatches()) == 0
    assert told("grouped", LengthGroupedBatches(pool=2), "ep1-ba20", "2ep") == 0  # nothing of that epoch is left


def test_function_form_keeps_the_loaders_settings() -> None:
    dataset = Indexed()
    sampler = DistributedSampler(dataset, num_replicas=2, rank=1, seed=9, drop_last=True)
    before = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True, num_workers=0, timeout=0)
    after = apply_length_grouped_batches(before)
    assert (after.batch_size, after.drop_last, after.dataset) == (8, True, dataset)
    assert (after.sampler.rank, after.sampler.num_replicas, after.sampler.seed) == (1, 2, 9)
    assert len(after) == len(before) == 10
    assert apply_length_grouped_batches(after) is after
    workers = DataLoader(dataset, batch_size=8, num_workers=1, prefetch_factor=3, persistent_workers=True)
    after = apply_length_grouped_batches(workers)
    assert (after.num_workers, after.prefetch_factor, after.persistent_workers) == (1, 3, True)


def test_epochs_differ_and_seeds_repeat() -> None:
    loader = apply_length_grouped_batches(DataLoader(Indexed(), batch_size=8), seed=4)
    first = [b["input_ids"][:, 0].tolist() for b in loader]
    assert [b["input_ids"][:, 0].tolist() for b in loader] == first
    loader.sampler.set_epoch(1)
    assert [b["input_ids"][:, 0].tolist() for b in loader] != first


def test_subset_of_batches_is_kept(make_trainer) -> None:
    batches, _ = train(make_trainer, [LengthGroupedBatches()], "2ep", train_subset_num_batches=3)
    assert len(batches) == 6


def test_twice_is_once(make_trainer) -> None:
    _, trainer = train(make_trainer, [LengthGroupedBatches()], "1ep")
    loader = trainer.state.train_dataloader
    trainer.fit(duration="1ep")
    assert trainer.state.train_dataloader is loader


def test_warns_where_all_samples_are_equally_long(make_trainer) -> None:
    samples = [{"input_ids": torch.ones(8, dtype=torch.long), "attention_mask": torch.ones(8), "labels": 1}] * 16
    with pytest.warns(NoEffectWarning, match="all 16 samples have 8 tokens"):
        train(make_trainer, [LengthGroupedBatches()], "1ep", loader=DataLoader(samples, batch_size=8))


def test_refuses_before_training_what_it_cannot_regroup(make_trainer) -> None:
    loader = DataLoader(Indexed(), batch_sampler=[[1, 2], [3, 4]])
    with pytest.raises(SpeedUpUnavailable, match="give batch_size"):
        train(make_trainer, [LengthGroupedBatches()], loader=loader, device_train_microbatch_size=2)


@pytest.mark.parametrize(
    "arguments, error", [({"pool": 0}, ValueError), ({"pool": "many"}, TypeError), ({"multiple_of": True}, TypeError)]
)
def test_arguments_are_checked(arguments: dict, error: type) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        LengthGroupedBatches(**arguments)


def test_fewer_samples_than_a_batch_and_none_kept_is_one_line() -> None:
    samples = [{"input_ids": [1] * n} for n in (1, 2, 3)]
    with pytest.raises(SpeedUpUnavailable, match=r"3 samples, a batch 4, and drop_last=True leaves none: make batch"):
        apply_length_grouped_batches(DataLoader(samples, batch_size=4, collate_fn=list, drop_last=True))
    assert len(apply_length_grouped_batches(DataLoader(samples, batch_size=4, collate_fn=list))) == 1
