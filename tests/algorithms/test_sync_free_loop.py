from __future__ import annotations

import pytest
import torch
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Callback
from composer.devices import DeviceCPU
from composer.loggers import InMemoryLogger
from composer.models import HuggingFaceModel
from composer.utils import dist
from small import BatchDataset
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from composer_speedups import LastLayerSubset, SyncFreeLoop, Unpadding, apply_sync_free_loop
from composer_speedups.algorithms import sync_free_loop

STEPS = 4


class Readings(TorchDispatchMode, Callback):
    """Counts how often Python reads a number that the "device" has been asked for in the same step.

    This machine's device is the CPU, whose tensors look like the host's. So it keeps book itself: what goes through
    `tensor_to_device` is on the device, and so is whatever is computed from that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = self.operations = self.began = 0
        self._there: dict[int, tuple[torch.UntypedStorage, int]] = {}  # when it was last written

    def arrived(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._there[storage._cdata] = (storage, self.operations)  # kept, so that no address is used twice
        return tensor

    def batch_start(self, state, logger) -> None:
        self.began = self.operations

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        known = [self._there[c] for t in tensors if (c := t.untyped_storage()._cdata) in self._there]
        if function is torch.ops.aten._local_scalar_dense.default:
            self.count += any(written >= self.began for _, written in known)
        result = function(*args, **(kwargs or {}))
        if known:
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self.arrived(tensor)
        return result


def fit(make_trainer, change=None, optimizer=torch.optim.SGD, **kwargs):
    """Train a small model; return its losses, its weights, and how often a number was read from the device."""
    torch.manual_seed(1)
    readings, memory = Readings(), InMemoryLogger()

    class Device(DeviceCPU):
        def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
            return readings.arrived(tensor.clone())

    model = HuggingFaceModel(bert(), metrics=kwargs.pop("metrics", []), use_logits=True)
    kwargs["train_dataloader"] = torch.utils.data.DataLoader(BatchDataset(32), batch_size=8, collate_fn=without_mask)
    trainer = make_trainer(
        model=model, optimizer=optimizer(model.parameters(), lr=0.1), loggers=[memory], device=Device(),
        callbacks=[readings], **kwargs
    )  # fmt: skip
    if change is not None:
        assert change(trainer.state) == 4
    with readings:
        trainer.fit()
    assert int(trainer.state.timestamp.batch) == STEPS
    losses = [float(value) for _, value in memory.data["loss/train/total"]]
    return losses, [p.detach().clone() for p in model.parameters()], readings.count, trainer


def without_mask(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Without a mask, and without an id for padding below, transformers looks at no mask: its readings are not ours."""
    batch = torch.utils.data.default_collate(samples)
    del batch["attention_mask"]
    return batch


def bert() -> torch.nn.Module:
    from small import bert_config
    from transformers import BertForSequenceClassification

    config = bert_config(num_hidden_layers=1, pad_token_id=None)
    return BertForSequenceClassification._from_config(config, attn_implementation="eager")


def late(state) -> int:
    return apply_sync_free_loop(state.device, train_metrics=lambda: bool(state.train_metrics))


def delayed(state) -> int:
    return apply_sync_free_loop(state.device, delayed_loss=True, train_metrics=lambda: bool(state.train_metrics))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_reads_once_a_step_and_changes_nothing(make_trainer, optimizer) -> None:
    before = fit(make_trainer, optimizer=optimizer)
    after = fit(make_trainer, late, optimizer=optimizer)
    assert after[0] == before[0] and len(after[0]) == STEPS  # bit for bit
    assert all(torch.equal(a, b) for a, b in zip(after[1], before[1], strict=True))
    assert before[2] >= 6 * STEPS  # the seventh, "is the data exhausted", was sent once and is read every step
    assert after[2] == STEPS
    timestamps = [run[3].state.timestamp for run in (before, after)]
    assert timestamps[0].sample == timestamps[1].sample == 32
    assert timestamps[0].token == timestamps[1].token


def test_a_delayed_loss_is_the_last_steps(make_trainer) -> None:
    before = fit(make_trainer)
    after = fit(make_trainer, delayed)
    assert after[0] == [before[0][0], *before[0][:-1]]
    assert all(torch.equal(a, b) for a, b in zip(after[1], before[1], strict=True))
    assert after[2] == 1  # the first step's own


class InParts(HuggingFaceModel):
    def loss(self, outputs, batch):
        return {"first": outputs["loss"] * 0.25, "second": outputs["loss"] * 0.75}


def test_parts_of_a_delayed_loss_are_of_its_step(make_trainer) -> None:
    found = []
    for change in (None, delayed):
        memory = InMemoryLogger()
        torch.manual_seed(1)
        model = InParts(bert(), use_logits=True)
        trainer = make_trainer(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loggers=[memory],
            train_dataloader=torch.utils.data.DataLoader(BatchDataset(32), batch_size=8, collate_fn=without_mask),
        )  # fmt: skip
        if change is not None:
            change(trainer.state)
        trainer.fit()
        names = [f"loss/train/{name}" for name in ("total", "first", "second")]
        found.append([[float(value) for _, value in memory.data[name]] for name in names])
    for own, late in zip(*found, strict=True):
        assert len(set(own)) == STEPS and late == [own[0], *own[:-1]]


@pytest.fixture
def loop_here(monkeypatch) -> type[SyncFreeLoop]:
    """The speed-up itself, on a device that it is not for: its bookkeeping is the same."""
    monkeypatch.setattr(SyncFreeLoop, "unavailable", lambda self, device: None)
    return SyncFreeLoop


def test_each_fit_reports_its_own_losses(make_trainer, loop_here) -> None:
    losses = []
    for algorithms in ([], [loop_here(delayed_loss=True)]):
        trainer = fit(make_trainer, algorithms=algorithms)[3]
        trainer.fit(duration="1ep")
        losses.append([float(value) for _, value in trainer.logger.destinations[-1].data["loss/train/total"]])
    own, delayed = losses
    assert len(own) == 2 * STEPS
    for fitted in (slice(0, STEPS), slice(STEPS, None)):
        assert delayed[fitted] == [own[fitted][0], *own[fitted][:-1]]


def test_a_closed_trainer_leaves_its_device_as_it_was(make_trainer, loop_here) -> None:
    device = DeviceCPU()
    before = dict(device.__dict__)
    first = make_trainer([loop_here()], model=HuggingFaceModel(bert()), device=device)
    with pytest.warns(NoEffectWarning, match="the device was changed already"):
        second = make_trainer([loop_here()], model=HuggingFaceModel(bert()), device=device)
    second.close()
    assert device.__dict__ != before, "the first Trainer is at work still"
    first.close()
    assert device.__dict__ == before
    first.close()
    make_trainer([loop_here()], model=HuggingFaceModel(bert()), device=device).fit(duration="1ba")


@pytest.mark.parametrize("microbatch", [2, 3])
def test_microbatches(make_trainer, microbatch: int) -> None:
    before = fit(make_trainer, device_train_microbatch_size=microbatch)
    after = fit(make_trainer, late, device_train_microbatch_size=microbatch)
    assert after[0] == before[0]
    assert all(torch.equal(a, b) for a, b in zip(after[1], before[1], strict=True))


def test_train_metrics_see_their_own_copy_of_the_batch(make_trainer) -> None:
    from torchmetrics.classification import MulticlassAccuracy

    values = []
    for change in (None, late):
        metrics = [MulticlassAccuracy(num_classes=3, average="micro")]
        trainer = fit(make_trainer, change, metrics=metrics)[3]
        values.append(float(trainer.state.train_metrics["MulticlassAccuracy"].compute()))
    assert values[0] == values[1] > 0


def test_the_copy_of_a_microbatch_is_left_out_without_train_metrics(make_trainer, monkeypatch) -> None:
    import copy

    copied = []

    def counting(value, *args):
        copied.append(type(value))
        return deepcopy(value, *args)

    deepcopy = copy.deepcopy
    monkeypatch.setattr("composer.trainer.trainer.deepcopy", counting)
    trainer = fit(make_trainer, late)[3]
    assert copied.count(sync_free_loop._Batch) == STEPS
    batch = sync_free_loop._Batch(trainer.state.train_dataloader.dataset[0])
    assert all(a is b for a, b in zip(deepcopy(batch).values(), batch.values(), strict=True))


def test_nothing_else_stays_on_the_host(make_trainer) -> None:
    trainer = make_trainer(model=HuggingFaceModel(bert()))
    sent = []
    device = trainer.state.device
    monkey = type("Device", (DeviceCPU,), {"tensor_to_device": lambda self, tensor: sent.append(tensor) or tensor})
    device.__class__ = monkey
    assert late(trainer.state) == 4 and late(trainer.state) == 0  # twice is once
    batch = {"labels": torch.zeros(1, dtype=torch.int64), "nested": [torch.zeros(2)]}
    moved = device.batch_to_device(batch)
    assert type(moved) is dict and len(sent) == 2
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    optimizer.step()
    device.optimizer_to_device(optimizer)
    assert len(sent) == 5  # step, exp_avg, exp_avg_sq
    device.tensor_to_device(torch.zeros(()))
    assert len(sent) == 6


def test_host_tensors_are_reduced_where_only_the_device_has_a_backend(monkeypatch) -> None:
    """As NCCL alone, whose collectives refuse a tensor on the host."""

    def nccl(tensor, *args, **kwargs):
        raise RuntimeError("No backend type associated with device type cpu")

    for name in ("all_reduce", "broadcast"):
        monkeypatch.setattr(dist, name, nccl)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cuda:nccl")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    sync_free_loop._reduce_on_the_host()
    tensor = torch.tensor([3, 4])
    dist.all_reduce(tensor, reduce_operation="SUM")
    dist.broadcast(tensor, src=0)
    assert tensor.tolist() == [3, 4]
    with pytest.raises(RuntimeError, match="No backend"):
        dist.all_reduce(torch.empty(1, device="meta"), reduce_operation="SUM")
    reduce = dist.all_reduce
    sync_free_loop._reduce_on_the_host()
    assert dist.all_reduce is reduce


def test_refused_on_a_cpu_and_with_another_loop(monkeypatch) -> None:
    from composer import Trainer

    assert "remove it" in SyncFreeLoop().unavailable(torch.device("cpu"))
    assert SyncFreeLoop().unavailable(torch.device("cuda")) is None
    monkeypatch.delattr(Trainer, "_accumulate_time_across_ranks")
    assert "mosaicml 0.32" in SyncFreeLoop().unavailable(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(("delayed_loss", "unpadded", "kind"), [
    (False, False, HuggingFaceModel), (False, True, HuggingFaceModel), (True, False, HuggingFaceModel),
    (True, True, HuggingFaceModel), (True, True, InParts),
])  # fmt: skip
def test_no_synchronisation_on_a_gpu(make_trainer, delayed_loss: bool, unpadded: bool, kind: type) -> None:
    """PyTorch itself tells of every wait: one a step at most, none with a delayed loss, also where it has parts."""
    import warnings

    class Count(Callback):
        def batch_start(self, state, logger):
            torch.cuda.set_sync_debug_mode("warn")

        def fit_end(self, state, logger):
            torch.cuda.set_sync_debug_mode("default")

    model = kind(bert(), metrics=[], use_logits=True)
    # transformers looks into every mask, and waits for it. Unpadding has counted tokens on the host.
    loader = torch.utils.data.DataLoader(
        BatchDataset(64), batch_size=8, pin_memory=True, collate_fn=None if unpadded else without_mask
    )
    more = [Unpadding(), LastLayerSubset()] if unpadded else []
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trainer = make_trainer(
        [SyncFreeLoop(delayed_loss), *more], model=model, optimizer=optimizer, train_dataloader=loader, device="gpu",
        precision="amp_bf16", callbacks=[Count()],
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit()
    waits = [w for w in caught if "synchronizing CUDA operation" in str(w.message)]
    assert len(waits) <= (0 if delayed_loss else 8)
