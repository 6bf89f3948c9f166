"""A few steps of a real training with speed-ups, of which loss, gradients and updates are kept to be compared."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from composer import Trainer
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Algorithm, Callback, State
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.utils import dist, reproducibility
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from composer_speedups import compat
from composer_speedups.algorithms.mixed_precision import low_precision_of
from composer_speedups.batches.weighting import of_tokens
from composer_speedups.errors import UserError, in_a_line
from composer_speedups.everyone import differing, everyones
from composer_speedups.optim.optimizers import describe, is_adamw
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.training.around import close_trainer
from composer_speedups.verification.texts import Texts
from composer_speedups.verification.true_gradients import Gradients, mapped, tensors_of

__all__ = ["Step", "Watch", "part_of", "train"]

_STEPS = 4  # CUDAGraphs records at the second batch of a shape, and replays from the third
_OVERFLOWS = 16  # steps more that fp16's scaler may need until its gradients are finite
_PART = 4096  # elements of a parameter whose updates are compared


@dataclass
class Step:
    """One step of a training, on the CPU."""

    number: int
    batch: Any
    weights: dict[str, torch.Tensor]
    loss_scale: float
    precision: compat.Float32Precision
    share: float = 1.0  # of this rank's part of the batch; `batch` is that part, loss and gradients are of all ranks
    loss: float = 0.0
    finite: bool = True
    found: dict[str, torch.Tensor] = field(default_factory=dict)
    part: dict[str, torch.Tensor] = field(default_factory=dict)  # of each gradient

    @property
    def gradients(self) -> Gradients:
        return Gradients(self.loss, self.found)


@dataclass
class Evaluation:
    """One batch that the model was evaluated on, on the CPU."""

    batch: Any
    weights: dict[str, torch.Tensor]
    precision: compat.Float32Precision
    outputs: list[torch.Tensor] = field(default_factory=list)


class Watch(Callback):
    """Keeps the first and the last step whose gradients are finite, and of each the part of the updates to compare.

    Args:
        names: of the parameters that are trained.
        texts: what the batches are made of.
        every: keep all steps.
        by_tokens: with one label a token, ranks weigh by their tokens; else, as Composer has it, by their samples.

    Attributes:
        kept: the steps.
        parts: of each step, a part of each gradient.
        after: of each parameter the same part, when the last step was done.
        dtype: of autocast; None without.
        was_adamw: whether the optimizer was an AdamW before any speed-up.
        optimizer: the one that made the steps; whether it is an AdamW, and has states of 8 bits.
        not_finite: the step at which all was given up, as its gradients were not; 0 if none.
        apart: what ranks have each of their own, and since which step; empty if nothing.
        evaluated: what it gave for a batch when all steps were done; None if it was not evaluated.
    """

    def __init__(
        self, names: dict[torch.nn.Parameter, str], texts: Texts, every: bool = False, by_tokens: bool = False
    ) -> None:
        self.names, self.texts, self.every, self.by_tokens = names, texts, every, by_tokens
        self.kept: list[Step] = []
        self.parts: list[dict[str, torch.Tensor]] = []
        self.after: dict[str, torch.Tensor] = {}
        self.dtype: torch.dtype | None = None
        self.rounded = False  # whether float32 products are
        self.was_adamw = False
        self.optimizer, self.is_adamw, self.in_8_bits = "", False, False
        self.overflows, self.not_finite, self.apart = 0, 0, ""
        self.released: dict[str, torch.Tensor] = {}
        self.evaluated: Evaluation | None = None
        self._step: Step | None = None
        self._rows, self._share = 0, 0.0

    @property
    def _whole(self) -> bool:
        """Whether this step may be one that is kept."""
        return self.every or len(self.parts) in (0, _STEPS - 1)

    def batch_start(self, state: State, logger: Logger) -> None:
        scaler = state.scaler
        self._step = Step(
            number=int(state.timestamp.batch) + 1,
            batch=mapped(state.batch, _host),
            weights={name: _host(p) for p, name in self.names.items()} if self._whole else {},
            loss_scale=float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0,
            precision=compat.read_float32_precision(),
            share=self._share_of(state.batch),
        )
        self._rows = _rows(state.batch)
        self.rounded = self._step.precision.matmul != "highest"

    def _share_of(self, batch: Any) -> float:
        """Of this rank's part in the batch of all."""
        part = float(_rows(batch))
        if self.by_tokens and of_tokens(batch) and "attention_mask" in batch:
            # The samples were dealt out by their lengths before the first step, and those of the last step are others.
            # There is one batch, of all samples: it has the same shares in each epoch.
            if self._share:
                return self._share
            part = float(batch["attention_mask"].sum())
        self._share = part / (sum(everyones(part)) or 1.0)
        return self._share

    def before_forward(self, state: State, logger: Logger) -> None:
        self.dtype = low_precision_of(state)

    def after_loss(self, state: State, logger: Logger) -> None:
        assert self._step is not None
        loss = state.loss["total"] if isinstance(state.loss, dict) else state.loss
        self._step.loss += float(loss.detach()) * (_rows(state.batch) / self._rows if self._rows else 1.0)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        assert self._step is not None
        there = {name: self.released.get(name) if p.grad is None else p.grad for p, name in self.names.items()}
        found = {name: g.detach() for name, g in there.items() if g is not None}
        finite = all(bool(g.isfinite().all()) for g in found.values())
        told = everyones((self._step.loss * self._step.share, finite))
        self._step.loss = sum(loss for loss, _ in told)
        self._step.finite = math.isfinite(self._step.loss) and all(finite for _, finite in told)
        self._step.part = {name: part_of(g) for name, g in found.items()}
        self._step.found = {name: _host(g) for name, g in found.items()} if self._whole else {}

    def batch_end(self, state: State, logger: Logger) -> None:
        step = self._step
        assert step is not None
        if step.finite:
            if self._whole:
                self.kept.append(step)
            self.parts.append(step.part)
            self.after = {name: part_of(p) for p, name in self.names.items()}
            if not self.apart and (name := differing(self.after)) is not None:
                self.apart = f"{name}: ranks have different weights after step {step.number}"
            self._look_at(state.optimizers[0])
        else:
            self.overflows += 1
        given_up = self.overflows > (_OVERFLOWS if step.loss_scale != 1.0 else 0)
        if given_up:
            self.not_finite = step.number
            self.kept = self.kept or [step]
        if given_up or len(self.parts) >= _STEPS:
            state.stop_training()
        self.texts.others = len(self.parts) == _STEPS - 1
        self.released.clear()

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        weights = {name: _host(p) for p, name in self.names.items()}
        self.evaluated = Evaluation(mapped(state.batch, _host), weights, compat.read_float32_precision())

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        assert self.evaluated is not None
        self.evaluated.outputs = [_host(x) for x in tensors_of(state.outputs)]

    def _look_at(self, optimizer: Optimizer) -> None:
        self.optimizer, self.is_adamw = describe(optimizer), is_adamw(optimizer)
        values = [value for entry in optimizer.state.values() for value in entry.values()]
        self.in_8_bits = any(isinstance(value, torch.Tensor) and value.dtype is torch.uint8 for value in values)


def train(
    plain: ComposerModel,
    optimizer: Callable[[torch.nn.Module], Optimizer],
    microbatch_size: int | None,
    loader: DataLoader,
    algorithms: Sequence[Algorithm],
) -> tuple[Watch, dict[str, dict[str, Any]], list[str]]:
    """Some steps of copies of `plain` and `algorithms`; by speed-up its evidence, and what had no effect."""
    model, speedups = copy.deepcopy(plain), [_in_one_batch(a) for a in copy.deepcopy(list(algorithms))]
    stepped = optimizer(model)
    trained = {parameter for group in stepped.param_groups for parameter in group["params"]}
    names = {p: name for name, p in model.named_parameters() if p.requires_grad and p in trained}
    if not names:
        raise UserError(
            "the optimizer has no parameter of the model that is trained: let it take those of its argument"
        )
    loader.dataset.others = False
    watch = Watch(
        names,
        loader.dataset,
        every=any(speedup.stage is Stage.RECORD for speedup in speedups),
        by_tokens=any(getattr(speedup, "weighting", "") == "sample" for speedup in speedups),
    )
    watch.was_adamw = is_adamw(stepped)
    if any(speedup.at_once for speedup in speedups):
        # Before it drops them: hooks run in the order in which they came.
        for parameter, name in watch.names.items():
            parameter.register_post_accumulate_grad_hook(partial(_keep, watch.released, name))
    with _same_random_numbers(), _quiet() as said:
        trainer = Trainer(
            model=model,
            train_dataloader=loader,
            optimizers=stepped,
            max_duration=f"{_STEPS + _OVERFLOWS}ba",
            device_train_microbatch_size=microbatch_size or loader.batch_size,
            algorithms=speedups,
            callbacks=[watch],
            precision="fp32",
            device="gpu" if torch.cuda.is_available() else "cpu",
            seed=0,
            progress_bar=False,
            log_to_console=False,
            auto_log_hparams=False,
        )
        with contextlib.ExitStack() as stack:
            stack.push(partial(close_trainer, trainer))
            trainer.fit()
            if not watch.not_finite:
                said += _evaluate(trainer, loader, watch)
    return watch, {speedup.key(): dict(speedup.evidence) for speedup in speedups}, said


def _evaluate(trainer: Trainer, loader: DataLoader, watch: Watch) -> list[str]:
    """Evaluate on one batch; what is to be said where the model cannot be."""
    try:
        trainer.eval(eval_dataloader=loader, subset_num_batches=1)
    except Exception as error:  # anybody's model, and metrics
        if dist.get_world_size() > 1:  # it need not be all ranks', and they would wait for this one
            raise
        watch.evaluated = None
        return [f"its evaluation was not compared: {type(error).__name__}: {in_a_line(str(error))}"]
    return []


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Have all generators afterwards as they were: a Trainer seeds them, and whoever asks has a training to come."""
    before = reproducibility.get_rng_state()
    try:
        yield
    finally:
        reproducibility.load_rng_state(before)


@contextlib.contextmanager
def _quiet() -> Iterator[list[str]]:
    """No warning is shown; those of what had no effect are in the list at the end.

    The log is silent, too: without dropout, or without autocast, some say that there is nothing to do.
    """
    said: list[str] = []
    log = logging.getLogger("composer_speedups")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
        said += dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, NoEffectWarning))
    finally:
        log.setLevel(level)


def _in_one_batch(speedup: SpeedUp) -> SpeedUp:
    """A budget of tokens becomes that of all samples, which all weigh the same."""
    if speedup.key() == "token_budget_batches":
        speedup.tokens_per_batch = None  # type: ignore[attr-defined]
    return speedup


def _keep(kept: dict[str, torch.Tensor], name: str, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    kept[name] = parameter.grad.detach().clone()


def _rows(batch: Any) -> int:
    """Samples of a batch."""
    return max((len(x) for x in tensors_of(batch) if x.ndim), default=0)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Elements from all rows and columns of a parameter and its last ones, at most `_PART` or a few more."""
    flat = tensor.detach().reshape(-1)
    step = max(1, len(flat) // _PART)
    while math.gcd(step, tensor.shape[-1] if tensor.ndim else 1) > 1:  # else the same columns of all rows
        step += 1
    return torch.cat([flat[::step], flat[-64:]]).to("cpu")
