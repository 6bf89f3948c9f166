from __future__ import annotations

import copy

import pytest
import torch
from small import BatchDataset
from torch.utils.data import DataLoader

from composer_speedups import PrefetchBatches, apply_prefetch_batches
from composer_speedups.algorithms import prefetch_batches
from composer_speedups.packed.packing import COUNTS, count_on_host, count_tokens, counts_of


def loader(workers: int = 1, rows: int = 32) -> DataLoader:
    return DataLoader(BatchDataset(rows), batch_size=8, shuffle=True, num_workers=workers)


def test_the_same_batches_in_the_same_order() -> None:
    epochs = []
    for change in (False, True):
        torch.manual_seed(3)
        batches = loader()
        if change:
            assert apply_prefetch_batches(batches, "cpu") == 1
            assert apply_prefetch_batches(batches, "cpu") == 0  # twice is once
        assert isinstance(batches, DataLoader) and len(batches) == 4
        epochs.append([batch for _ in range(2) for batch in batches])
    for before, after in zip(*epochs, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("rows", [0, 8])
def test_few_batches(rows: int) -> None:
    batches = DataLoader(BatchDataset(8), batch_size=8, num_workers=1, sampler=range(rows))
    apply_prefetch_batches(batches, "cpu")
    assert len(list(batches)) == rows // 8


def test_each_batch_is_sent_before_the_one_before_it_is_used(monkeypatch) -> None:
    events = []

    class Sender(prefetch_batches._Sender):
        def __call__(self, batch):
            events.append("sent")
            return super().__call__(batch)

    monkeypatch.setattr(prefetch_batches, "_Sender", Sender)
    batches = loader()
    apply_prefetch_batches(batches, "meta")
    for batch in batches:
        assert all(tensor.device.type == "meta" for tensor in batch.values())
        events.append("used")
    assert events == ["sent", "sent", "used", "sent", "used", "sent", "used", "used"]


def test_token_counts_are_taken_before_the_batch_leaves_the_host() -> None:
    """Asking a device how many tokens there are would make the host wait; "meta" could not even answer."""
    expected = [count_tokens(batch["attention_mask"]) for batch in DataLoader(BatchDataset(16), batch_size=8)]
    batches = DataLoader(BatchDataset(16), batch_size=8, num_workers=1)
    apply_prefetch_batches(batches, "meta")
    sent = list(batches)
    assert [counts_of(batch["attention_mask"]) for batch in sent] == expected
    assert all(COUNTS not in batch for batch in sent), "transforms and algorithms expect tensors"
    assert count_on_host(sent[0]) and sent[0][COUNTS].counts() == expected[0]


def test_a_loader_without_workers_is_left_alone() -> None:
    batches = loader(0)
    assert apply_prefetch_batches(batches, "cpu") == 0 and type(batches) is DataLoader
    assert apply_prefetch_batches([1, 2], "cpu") == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_in_a_trainer(make_trainer, workers: int, monkeypatch) -> None:
    from composer.algorithms.warnings import NoEffectWarning

    monkeypatch.setattr(PrefetchBatches, "unavailable", lambda *_: None)  # the copy's target is the CPU here
    model = copy.deepcopy(make_trainer().state.model)
    weights = []
    for algorithms in ([], [PrefetchBatches()]):
        torch.manual_seed(3)
        trainer = make_trainer(algorithms, model=copy.deepcopy(model), train_dataloader=loader(workers))
        if algorithms and not workers:
            with pytest.warns(NoEffectWarning, match="num_workers=2"):
                trainer.fit()
        else:
            trainer.fit()
        assert type(trainer.state.train_dataloader) is DataLoader  # as it was
        weights.append([p.detach().clone() for p in trainer.state.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_failed_fit_leaves_the_loader_as_it_was(make_trainer, monkeypatch) -> None:
    monkeypatch.setattr(PrefetchBatches, "unavailable", lambda *_: None)
    trainer = make_trainer([PrefetchBatches()], train_dataloader=loader(1))

    def fail(*args, **kwargs):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(trainer.state.model, "forward", fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.fit()
    trainer.close()
    assert type(trainer.state.train_dataloader) is DataLoader


def test_refused_without_a_gpu() -> None:
    assert "remove it" in PrefetchBatches().unavailable(torch.device("cpu"))
    assert PrefetchBatches().unavailable(torch.device("cuda")) is None


@pytest.mark.gpu
def test_on_a_gpu_the_batches_are_there_and_whole() -> None:
    batches = DataLoader(BatchDataset(256), batch_size=8, num_workers=2)
    expected = list(batches)
    apply_prefetch_batches(batches, "cuda")
    busy = torch.randn(2048, 2048, device="cuda")
    received = []
    for batch in batches:
        busy = busy @ busy / 50  # so that copies and kernels are queued beside each other
        received.append({name: tensor + 0 for name, tensor in batch.items()})
    for before, after in zip(expected, received, strict=True):
        assert all(tensor.is_cuda and torch.equal(tensor.cpu(), before[name]) for name, tensor in after.items())


@pytest.mark.gpu
def test_epochs_do_not_take_more_memory_each() -> None:
    """The allocator keeps what was freed by stream."""
    batches = DataLoader(BatchDataset(256), batch_size=8, num_workers=1)
    apply_prefetch_batches(batches, "cuda")
    reserved = []
    for _ in range(4):
        for batch in batches:
            del batch
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1:] == reserved[:1] * 3
