"""`verify` as several ranks call it together; `python -m torch.distributed.run --nproc-per-node 2` starts it.

`verify_worker.py FOLDER` writes FOLDER/results.pt: what each try found, of all ranks, or its error.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from composer.core import Event
from composer.models import HuggingFaceModel
from contract import bert, case, loader, make
from exchange_worker import own_hook
from together import end_together, try_all

import composer_speedups as cs
from composer_speedups import registry
from composer_speedups.algorithms import token_budget_batches
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.verification.verify import verify


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, foreach=False, fused=False)


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def try_on(head: str, *algorithms: Any, optimizer: Any = adamw, **options: Any) -> dict[str, Any]:
    model = HuggingFaceModel(bert(head), use_logits=True)
    found = verify(model, loader(head), algorithms, optimizer, **options)
    return {
        "wrong": found.wrong,
        "notes": found.notes,
        "changed": found.changed,
        "tokens": found.tokens,
        "padding": found.padding,
        "comparisons": [(one.precision, one.step, one.share, one.errors.gradients) for one in found.comparisons],
        "updates": found.updates and (found.updates.error, found.updates.allowed),
    }


class Fault(SpeedUp):
    """What goes wrong with several ranks only."""

    stage = Stage.OPTIMIZER
    events = frozenset({Event.FIT_START, Event.AFTER_TRAIN_BATCH})

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def install(self, state, logger) -> None:
        rank, dense = int(torch.distributed.get_rank()), state.model.model.bert.encoder.layer[1].output.dense
        if self.fault == "a gradient of one rank":
            dense.weight.register_hook(lambda gradient: gradient * (1.001 if rank else 1))
        elif self.fault == "the loss of one rank" and rank:
            loss = state.model.loss
            state.model.loss = lambda out, batch: (right := loss(out, batch)) + right.detach() * 1e-3
        elif self.fault == "the rate of one rank" and rank:
            state.optimizers[0].param_groups[0]["lr"] *= 1.001
        elif self.fault == "the texts of the first rank" and rank:
            forward, loss = state.model.forward, state.model.loss
            state.model.forward = lambda batch: forward(other(batch))
            state.model.loss = lambda out, batch: loss(out, other(batch))
        elif rank and self.fault in AFTER_A_STEP:
            steps = []

            @torch.no_grad()
            def spoil(*_) -> None:
                steps.append(0)
                if len(steps) == (4 if "no number" in self.fault else 2):
                    dense.weight.mul_(math.nan if "no number" in self.fault else 1.01)

            state.optimizers[0].register_step_post_hook(spoil)
        self.report(logger, 1, "")

    def on_event(self, event, state, logger) -> None:
        if event is Event.AFTER_TRAIN_BATCH:
            late = self.fault == "a gradient after the exchange" and int(state.timestamp.batch) in (1, 2)
            for parameter in state.model.parameters() if late and torch.distributed.get_rank() else ():
                parameter.grad *= 1.5
        elif self.fault == "nothing is exchanged":
            state.model.register_comm_hook(None, alone)


def alone(state, bucket):
    return own_hook(state, bucket).then(lambda _: bucket.buffer())


def other(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: column.flip(0) if name == "labels" else column for name, column in batch.items()}


def without_weighing(head: str) -> dict[str, Any]:
    weigh = token_budget_batches.weigh
    token_budget_batches.weigh = lambda loss, factor: None
    try:
        return try_on(head, cs.TokenBudgetBatches())
    finally:
        token_budget_batches.weigh = weigh


def other_models() -> dict[str, Any]:
    model = HuggingFaceModel(bert(), use_logits=True)
    if torch.distributed.get_rank():
        with torch.no_grad():
            model.model.bert.pooler.dense.bias += 1e-3
    return verify(model, loader(), []).summary()


def in_bf16() -> dict[str, Any]:
    return try_on("classification", cs.MixedPrecision("bf16"), cs.Unpadding())


AFTER_A_STEP = ("a weight of one rank", "a weight that is no number")
FAULTS = (
    "a gradient of one rank",
    "the loss of one rank",
    "the rate of one rank",
    "the texts of the first rank",
    "nothing is exchanged",
    "a gradient after the exchange",
)
# Each by itself, on a model that it changes.
SPEEDUPS = registry.keys()
TRIES: dict[str, Any] = {
    "plain": lambda: try_on("classification"),
    "plain, accumulated": lambda: try_on("classification", microbatch_size=2),
    "plain mlm": lambda: try_on("mlm"),
    "bf16": in_bf16,
    "views": lambda: try_on("classification", cs.GradientAsBucketView(), cs.Unpadding(), cs.FusedAdamW()),
    "sent in bf16": lambda: try_on("classification", cs.GradientCompression()),
    "sent in fp16": lambda: try_on("mlm", cs.GradientCompression("fp16"), cs.MaskedTokenHead()),
    "bf16, sent in bf16": lambda: try_on("classification", cs.MixedPrecision("bf16"), cs.GradientCompression()),
    "budget": lambda: try_on("classification", cs.TokenBudgetBatches()),
    "budget mlm": lambda: try_on("mlm", cs.TokenBudgetBatches()),
    "budget mlm, every batch": lambda: try_on("mlm", cs.TokenBudgetBatches(weighting="batch")),
    "budget mlm, not weighed": lambda: without_weighing("mlm"),
    "seven samples": lambda: try_on("classification", samples=7),
    "labels of tokens, accumulated": lambda: try_on("mlm", microbatch_size=2),
    **{key: lambda key=key: try_on(case(key).head, make(key)) for key in SPEEDUPS},
    **{fault: lambda fault=fault: try_on("classification", Fault(fault), optimizer=sgd) for fault in AFTER_A_STEP},
    "an update that is no number": lambda: try_on("classification", Fault("a weight that is no number")),
    "other models": other_models,
    **{fault: lambda fault=fault: try_on("classification", Fault(fault)) for fault in FAULTS},
}


if __name__ == "__main__":
    try_all(TRIES, sys.argv[1])
    end_together()
