"""How ranks exchange gradients, tried on as many as there are; `python -m torch.distributed.run --nproc-per-node N`
starts it.

`exchange_worker.py FOLDER` writes FOLDER/results.pt: what each try gave, of all ranks, or its error.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

import torch
from contract import Dataset, bert
from tiny_recipe import tiny
from together import end_together, sharded, try_all
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from composer_speedups import (
    FusedAdamW,
    GradientAsBucketView,
    GradientCompression,
    apply_gradient_as_bucket_view,
    apply_gradient_compression,
)
from composer_speedups.measurement.profiling import profiled
from composer_speedups.speedup import SpeedUp
from composer_speedups.training.run import run

LATE = 0.5  # seconds
SHARES = (1.0, -0.37, 2.5)  # by rank: what its gradients are multiplied with


def data_of(rank: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model, the same on all ranks, and what this one computes its gradients of."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(24, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3))
    torch.manual_seed(2 + rank)
    return model, torch.randn(16, 24)


def loss_of(model: torch.nn.Module, rank: int, rows: torch.Tensor) -> torch.Tensor:
    return SHARES[rank] * model(rows).square().mean()


def gradients(dtype: str | None, parts: int = 1, scale: float = 1.0) -> tuple[torch.Tensor, list[int]]:
    """Averaged over the ranks, of `parts` microbatches; and how often the speed-up found something to change."""
    from composer.utils import dist

    rank = dist.get_global_rank()
    model, rows = data_of(rank)
    ddp = DistributedDataParallel(model)
    counts = [] if dtype is None else [apply_gradient_compression(ddp, dtype) for _ in range(2)]
    for number, part in enumerate(rows.chunk(parts)):
        with ddp.no_sync() if number + 1 < parts else torch.enable_grad():
            (scale / parts * loss_of(ddp, rank, part)).backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    return torch.cat([p.grad.flatten() for p in model.parameters()]), counts


def in_buckets(**options: Any) -> dict[str, Any]:
    """Three backward passes, of two microbatches the second, with and without views; each pass's gradients."""
    from composer.utils import dist

    rank, found = dist.get_global_rank(), {}
    for name in ("plain", "views"):
        model, rows = data_of(rank)
        # Buckets of a few hundred bytes: the model has several, as large ones have.
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0004, **options)
        if name == "views":
            apply_gradient_compression(ddp)
            found["counts"] = [apply_gradient_as_bucket_view(ddp) for _ in range(2)]
        else:
            apply_gradient_compression(ddp)
        passes = []
        for number in range(3):
            model.zero_grad(set_to_none=number != 2)
            for part in rows.chunk(2) if number == 1 else [rows]:
                with ddp.no_sync() if number == 1 and part.data_ptr() == rows.data_ptr() else torch.enable_grad():
                    loss_of(ddp, rank, part).backward()
            passes.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        places = [p.grad.untyped_storage() for p in model.parameters()]
        found[name] = passes
        found[f"{name} bytes"] = sum({place.data_ptr(): place.nbytes() for place in places}.values())
        found[f"{name} storages"] = len({place.data_ptr() for place in places})
    return found


def in_buckets_from_then_on(**options: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of five passes, plain, and with views from the third on."""
    from composer.utils import dist

    rank, found = dist.get_global_rank(), ([], [])
    for views, passes in enumerate(found):
        model, rows = data_of(rank)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0004, **options)
        for number in range(5):
            if views and number == 2:
                apply_gradient_as_bucket_view(ddp)
            model.zero_grad()
            loss_of(ddp, rank, rows).backward()
            passes.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return found


def of_its_own_ranks() -> tuple[float, float]:
    """The gradient's norm of a DDP that is alone in its group, without and with compression."""
    from composer.utils import dist

    rank, norms = dist.get_global_rank(), []
    groups = [torch.distributed.new_group([other]) for other in range(dist.get_world_size())]
    for compressed in (False, True):
        model, rows = data_of(rank)
        ddp = DistributedDataParallel(model, process_group=groups[rank])
        if compressed:
            apply_gradient_compression(ddp)
        loss_of(ddp, rank, rows).backward()
        norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))
    return tuple(norms)


def beside_a_built_in_one(apply: Any) -> None:
    ddp = DistributedDataParallel(data_of(0)[0])
    ddp._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)
    apply(ddp)


def beside_swa(algorithm: Any) -> None:
    """Which copies the model, DDP included."""
    from composer.algorithms import SWA

    trained([SWA(swa_start="0.2dur", swa_end="0.9dur", update_interval="1ba"), algorithm])


def loaded_by_a_callback(saved: bool, folder: str) -> list[tuple[int, float]]:
    """For each group its parameters and weight decay, of a file whose groups are others."""
    from composer.callbacks import LoadCheckpoint
    from composer.core import Event

    there = f"{folder}/groups-{saved}"
    trained([FusedAdamW(no_decay_on_bias_and_norm=saved)], save_folder=there, save_interval="1ba")
    callback, groups = LoadCheckpoint(f"{there}/ep0-ba1-rank0.pt", event=Event.AFTER_LOAD), []
    trained([FusedAdamW(no_decay_on_bias_and_norm=not saved)], callbacks=(callback,), groups=groups)
    return groups


def trained(
    algorithms: list[Any],
    strategy: str = "ddp",
    callbacks: tuple[Any, ...] = (),
    groups: list[Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Two fits of two steps in Composer's Trainer; `groups` is given the optimizer's."""
    from composer import Callback, Trainer
    from composer.models import HuggingFaceModel
    from composer.utils import dist

    ranks, losses = dist.get_world_size(), []

    class Losses(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            losses.append(state.total_loss_dict["loss/train/total"])

    if strategy == "fsdp2":
        options |= sharded()
    model = HuggingFaceModel(bert(), metrics=[], use_logits=True)
    samples = Dataset("classification", 32)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        algorithms=algorithms,
        callbacks=[Losses(), *callbacks],
        train_dataloader=DataLoader(
            samples, 8 // ranks, sampler=DistributedSampler(samples, ranks, dist.get_global_rank())
        ),
        max_duration="2ba",
        device="cpu",
        precision="fp32",
        seed=7,
        dist_timeout=60,
        progress_bar=False,
        loggers=[],
        **options,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit()
            trainer.fit(duration="2ba")
            if groups is not None:
                groups += [(len(g["params"]), g["weight_decay"]) for g in trainer.state.optimizers[0].param_groups]
        finally:
            trainer.close()
    return {
        "losses": losses,
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "evidence": [dict(one.evidence) for one in algorithms if isinstance(one, SpeedUp)],
        "warned": [str(one.message) for one in caught if "changed nothing" in str(one.message)],
    }


def labelled_tokens() -> list[float]:
    """The losses of a recipe whose texts have a label for each word."""
    return run(tiny("task.objective=token_classification", "evaluate=false")).losses


def own_hook(state, bucket):  # DDP asks for annotations that are classes, or none
    return torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda sum: sum.value()[0])


def beside_another() -> None:
    ddp = DistributedDataParallel(data_of(0)[0])
    ddp.register_comm_hook(None, own_hook)
    apply_gradient_compression(ddp)


class LateProfiler(torch.profiler.profile):
    def __enter__(self):
        time.sleep(LATE)
        return super().__enter__()


def profiled_steps(late: float, profiler: type = torch.profiler.profile) -> dict[str, float]:
    """Seconds of two steps by kind, in which the second rank is late with its gradients, or its profiler is."""
    from composer.utils import dist

    rank = dist.get_global_rank()
    if rank:
        torch.profiler.profile = profiler
    model, rows = data_of(rank)
    ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        loss = loss_of(ddp, rank, rows)
        time.sleep(late * rank)
        optimizer.step(lambda: loss.backward())  # as in Composer's loop

    step()
    with profiled(torch.device("cpu")) as found:
        step()
        step()
    return found.profile.seconds


TRIES: dict[str, Any] = {
    "profile": lambda: profiled_steps(LATE),
    "profile of a late profiler": lambda: profiled_steps(0.0, LateProfiler),
    "float32": lambda: gradients(None),
    "bf16": lambda: gradients("bf16"),
    "fp16": lambda: gradients("fp16"),
    "bf16 in parts": lambda: gradients("bf16", parts=4),
    "fp16 too large": lambda: gradients("fp16", scale=1e8),
    "trainer": lambda: trained([GradientCompression()]),
    "trainer in parts": lambda: trained([GradientCompression()], device_train_microbatch_size=1),
    "plain trainer": lambda: trained([]),
    "views": in_buckets,
    "views, unused looked for": lambda: in_buckets(find_unused_parameters=True),
    "views, static graph": lambda: in_buckets(static_graph=True),
    "views in trainer": lambda: trained([GradientAsBucketView()]),
    "views in trainer, in parts": lambda: trained([GradientAsBucketView()], device_train_microbatch_size=1),
    "plain trainer, in parts": lambda: trained([], device_train_microbatch_size=1),
    "both in trainer": lambda: trained([GradientAsBucketView(), GradientCompression()]),
    "both in trainer, other order": lambda: trained([GradientCompression(), GradientAsBucketView()]),
    "views, fsdp2": lambda: trained([GradientAsBucketView()], "fsdp2"),
    "fsdp2": lambda: trained([GradientCompression()], "fsdp2"),
    "another hook": beside_another,
    "views later": in_buckets_from_then_on,
    "views later, static graph": lambda: in_buckets_from_then_on(static_graph=True),
    "views later, unused looked for": lambda: in_buckets_from_then_on(find_unused_parameters=True),
    "a group of its own": of_its_own_ranks,
    "compression, swa": lambda: beside_swa(GradientCompression()),
    "views, swa": lambda: beside_swa(GradientAsBucketView()),
    "compression, forced_sync": lambda: trained([GradientCompression()], ddp_sync_strategy="forced_sync"),
    "views, forced_sync": lambda: trained([GradientAsBucketView()], ddp_sync_strategy="forced_sync"),
    "labelled tokens": labelled_tokens,
    "two groups loaded as one": lambda: loaded_by_a_callback(True, sys.argv[1]),
    "one group loaded as two": lambda: loaded_by_a_callback(False, sys.argv[1]),
    "a built-in hook, compression": lambda: beside_a_built_in_one(apply_gradient_compression),
    "a built-in hook, views": lambda: beside_a_built_in_one(apply_gradient_as_bucket_view),
}


if __name__ == "__main__":
    try_all(TRIES, sys.argv[1])
    end_together()
