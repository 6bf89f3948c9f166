"""Memory by kind: what a recipe needs before anything runs, and what a real step then took.

`predict` puts the recipe's model together without memory (PyTorch's FakeTensorMode: shapes, dtypes and devices, no
numbers), applies the recipe's speed-ups to it, and runs one forward and backward pass; a second one where gradients
are accumulated, as those of the first are there then. Every tensor that autograd keeps for the backward pass is
counted as it is kept, so unpadding, low precision norms, checkpointing and an MLM head on few tokens count as what
they are. Optimizer states follow from the optimizer's layout. `SavedForBackward` counts the same in a real step.

What it cannot see: what a compiler keeps instead (usually less), work space inside kernels, and what Python, PyTorch,
CUDA's context and an allocator's gaps take on top.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from composer.core import State, get_precision_context
from composer.devices import DeviceCPU, DeviceGPU
from composer.loggers import Logger
from composer.models import ComposerModel
from torch._subclasses.fake_tensor import FakeTensorMode

from composer_speedups import cgroup
from composer_speedups.ignored import IGNORED
from composer_speedups.measurement.memory_meters import OperationMeter, SavedForBackward, tensor_bytes
from composer_speedups.measurement.results import MEMORY_KINDS, MOST_SAMPLES
from composer_speedups.optim.speedup import OptimizerSpeedUp, adamw_state_bytes, sizes
from composer_speedups.speedup import SpeedUp, Stage, algorithm_passes, check_combination
from composer_speedups.tasks import model_sources, models
from composer_speedups.tasks.task import DEFAULT_VOCABULARY

if TYPE_CHECKING:
    from composer_speedups.recipes import Recipe
    from composer_speedups.tasks import Task

__all__ = [
    "Memory",
    "free_memory",
    "largest_batch",
    "optimizer_bytes",
    "predict",
    "rows_per_pass",
]

log = logging.getLogger("composer_speedups")

_LABELS = 10  # classes, where nobody says how many: a head is small beside its encoder


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, each kind at its most.

    Attributes:
        weights: parameters and buffers.
        gradients: at the end of the backward pass; where they are dropped in it, those that are there at once.
        buckets: of DDP, in which ranks exchange gradients, where these do not lie in them.
        optimizer: moments and whatever else the optimizer keeps.
        activations: kept by autograd between forward and backward pass, of one microbatch.
        temporary: what the fullest moment needs beyond the larger of activations and gradients (of which one goes as
            the other comes), or beyond both where gradients are accumulated; and what CUDA graphs hold between steps.
        peak: the fullest moment.
        notes: what was left out of the count.
        accumulated: gradients of earlier microbatches are there while a later one's activations are.
        released: gradients are dropped in the backward pass.
    """

    weights: int
    gradients: int
    buckets: int
    optimizer: int
    activations: int
    temporary: int
    peak: int
    notes: tuple[str, ...] = ()
    accumulated: bool = False
    released: bool = False

    def kinds(self) -> dict[str, int]:
        """The kinds that a step's tensors have, by name."""
        return {name: getattr(self, name) for name in MEMORY_KINDS if name != "buckets" or self.buckets}


def predict(
    recipe: Recipe,
    *,
    batch_size: int | None = None,
    length: int | None = None,
    lengths: Sequence[int] | None = None,
    task: Task | None = None,
    device: torch.device | None = None,
    ranks: int = 1,
) -> Memory:
    """What training `recipe` will need, by kind; takes a second or so and no memory to speak of.

    Args:
        recipe: a resolved recipe.
        batch_size: samples of a forward pass on one device; None is `rows_per_pass`, of the rank's share.
        length: tokens of the padded rows; None is the task's longest.
        lengths: real tokens of each row, which matter to unpadding; None takes all rows as full.
        task: the task if it has been made, for vocabulary and labels; None assumes what the recipe says of them.
        device: where it would train; None is this machine's.
        ranks: processes that train it together under DDP. What is said is of each of them.

    Raises:
        UserError: the model cannot be had, or the recipe's speed-ups contradict each other.
    """
    algorithms = recipe.algorithms()
    check_combination(algorithms)
    accumulates = recipe.accumulates_on(ranks)
    notes: list[str] = []
    if lengths is not None:
        length = length or max(lengths)
    else:
        length = length or recipe.task.max_length
        lengths = [length] * (batch_size or rows_per_pass(recipe, length, ranks))
        notes += [f"all rows counted as full: {a.key()} regroups them by length" for a in algorithms if a.regroups]
        if "unpadding" in recipe.speedups:
            notes.append("all rows counted as full: unpadding keeps the less, the shorter the texts are")
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with _as_before(), _quiet():
        shape = _shape(recipe, length) if task is None else task
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.device(device):
            model = models.build_empty_model(recipe.model, shape).train()
        state = _state(_Wrapped(model), device)
        _apply(algorithms, state, notes)
        batch = _batch(lengths, length, recipe, shape.num_labels, device)
        meter = OperationMeter(state.model)
        released = _Released(algorithms, state.model, meter)
        with meter:
            # Composer clears gradients once a batch: from the second microbatch on those of the first are there.
            for _ in range(2 if accumulates else 1):
                with (saved := SavedForBackward(state.model)), get_precision_context(state.precision):
                    outputs = state.model(batch)
                    loss = state.model.loss(outputs, batch)
                loss.backward()
        del fake, outputs, loss
        weights = tensor_bytes([*state.model.parameters(), *state.model.buffers()])
        left = [p for p in state.model.parameters() if p.grad is not None]
        gradients = max(tensor_bytes(p.grad for p in left), released.most)
        optimizer = optimizer_bytes(algorithms, state.model, [*released.updated, *left])
        during_step = _during_step(algorithms, left)
    apart = ranks > 1 and not any(isinstance(a, SpeedUp) and a.in_buckets for a in algorithms)
    buckets = tensor_bytes(p.grad for p in left) if apart else 0
    kept = weights + optimizer + buckets
    peak = kept + max(meter.peak, released.peak, tensor_bytes(p.grad for p in left) + during_step)
    peak += sum(a.held_bytes(saved.bytes) for a in algorithms if isinstance(a, SpeedUp))
    together = saved.bytes + gradients if accumulates else max(saved.bytes, gradients)
    temporary = max(0, peak - kept - together)
    return Memory(
        weights,
        gradients,
        buckets,
        optimizer,
        saved.bytes,
        temporary,
        peak,
        tuple(notes),
        accumulated=accumulates,
        released=bool(released.updated),
    )


def rows_per_pass(recipe: Recipe, length: int | None = None, ranks: int = 1) -> int:
    """Samples of a forward pass of one of `ranks`: the recipe's microbatch, or its share of the batch, or full rows of
    `length` for its token budget."""
    share = max(1, recipe.batch_size // ranks)
    size = min(recipe.microbatch_size or share, share)
    budget = recipe.speedups.get("token_budget_batches", {}).get("tokens_per_batch")  # of each rank
    if budget is None or size < share:  # a microbatch is counted in samples whatever the batch holds
        return size
    return -(-budget // (length or recipe.task.max_length))


def largest_batch(recipe: Recipe, free: int, *, length: int | None = None, step: int = 8, ranks: int = 1) -> int:
    """The largest batch whose predicted peak is at most `free` bytes: a multiple of `step`, or below it any number.

    0 if not even one sample fits; `MOST_SAMPLES` if that many do. Of several `ranks` it is what each of them takes.
    """
    known: dict[int, int] = {}

    def peak(size: int) -> int:
        if size not in known:
            known[size] = predict(recipe, batch_size=size, length=length, ranks=ranks).peak
        return known[size]

    fits, size, unit = 0, step, step
    while peak(size) <= free:
        if size >= MOST_SAMPLES:
            return MOST_SAMPLES
        fits, size = size, min(4 * size, MOST_SAMPLES)
    too_large, unit = size, step if fits else 1
    while too_large - fits > unit:
        # Memory grows along a line once activations outweigh gradients: few looks are enough.
        share = (free - peak(fits)) / (peak(too_large) - peak(fits)) if fits else 0.5
        guess = fits + math.floor(share * (too_large - fits) / unit) * unit
        guess = min(max(guess, fits + unit), too_large - unit)
        if peak(guess) <= free:
            fits = guess
        else:
            too_large = guess
    return fits


def free_memory(device: torch.device) -> int | None:
    """Bytes that a new process could take on `device` now; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    free = psutil.virtual_memory().available
    limit, used = cgroup.memory_limit(), cgroup.memory_used()
    return free if limit is None or used is None else min(free, limit - used)


def optimizer_bytes(algorithms: Iterable[Any], model: torch.nn.Module, trained: Iterable[torch.Tensor]) -> int:
    """Bytes that the optimizer among `algorithms`, or else plain AdamW, will keep for the parameters `trained`."""
    speedup = _optimizer(algorithms)
    return adamw_state_bytes([*trained]) if speedup is None else speedup.state_bytes(model, [*trained])


class _Wrapped(ComposerModel):
    """What Composer's HuggingFaceModel does in training, without its search through all models there are."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, Any]) -> Any:
        return self.model(**{key: value for key, value in batch.items() if isinstance(value, torch.Tensor)})

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return outputs["loss"]

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class _Shape:
    """The little of a `Task` that decides the size of its model."""

    source: model_sources.Source
    vocabulary: int
    max_length: int
    objective: str
    num_labels: int
    label_names: list[str] = field(default_factory=list)
    tokenizer: None = None


def _shape(recipe: Recipe, length: int) -> _Shape:
    task, spec = recipe.task, recipe.model
    source = model_sources.resolve(spec)
    if source.tokenizer or task.name == "dummy":
        size = task.vocabulary if task.name == "dummy" else None
        vocabulary = size or spec.config.get("vocab_size") or model_sources.load_config(source).vocab_size
    else:
        vocabulary = task.vocabulary or DEFAULT_VOCABULARY
    count = task.num_labels if task.name == "dummy" else 2 if task.name == "imdb" else _LABELS
    if task.objective == "regression":
        count = 1
    names = [str(n) for n in range(count)]
    return _Shape(source, int(vocabulary), length, task.objective, count, names)


def _state(model: ComposerModel, device: torch.device) -> State:
    """A Trainer's state as speed-ups meet it at `Event.INIT`, without an optimizer."""
    return State(
        model=model,
        rank_zero_seed=0,
        run_name="prediction",
        device=DeviceGPU() if device.type == "cuda" else DeviceCPU(),
        device_train_microbatch_size=1,
        precision="fp32",
    )


def _apply(algorithms: Sequence[Any], state: State, notes: list[str]) -> None:
    """The speed-ups that change the model, in their order; what can't be followed is noted."""
    from composer.core import Event

    state.algorithms = list(algorithms)
    logger = Logger(state, [])
    for speedup in algorithm_passes(algorithms, Event.INIT):
        if not isinstance(speedup, SpeedUp):
            continue
        if Stage.PRECISION <= speedup.stage <= Stage.RECOMPUTE:
            if (reason := speedup.unavailable(state.device._device)) is not None:
                notes.append(f"without {speedup.key()}, which cannot be used here: {reason}")
                continue
            if speedup.slot == "matmul":  # of the whole process, held until the state is gone; it takes no memory
                continue
            speedup.install(state, logger)
            if speedup.slot == "loss":  # its kernel needs numbers: a dry run computes the stock loss
                notes.append(f"without {speedup.key()}, which keeps less: counted with the model's own loss")
        elif speedup.stage is Stage.COMPILE:
            notes.append("counted as not compiled: compiled code usually keeps less")


def _batch(
    lengths: Sequence[int], width: int, recipe: Recipe, classes: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """A batch of that shape; it is real, as what reads lengths must find them, and small."""
    rows = len(lengths)
    mask = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
    labels = torch.zeros(rows, dtype=torch.int64)
    if recipe.task.objective == "regression":
        labels = torch.zeros(rows)
    elif recipe.task.objective == "multi_label":
        labels = torch.zeros(rows, classes)
    elif recipe.task.objective == "token_classification":
        labels = mask - 1
        labels[labels < 0] = IGNORED
    elif recipe.task.objective == "mlm":
        labels = torch.full((rows, width), IGNORED)
        for row, length in zip(labels, lengths, strict=True):
            allowed = max(1, length - 2)  # [CLS] and [SEP] are never masked
            row[1 : 1 + max(1, round(recipe.task.mlm_probability * allowed))] = 0
    return {k: v.to(device) for k, v in (("input_ids", mask.clone()), ("attention_mask", mask), ("labels", labels))}


def _during_step(algorithms: Iterable[Any], trained: Sequence[torch.Tensor]) -> int:
    """What the optimizer's step needs for itself, beyond weights, gradients and states."""
    speedup = _optimizer(algorithms)
    if speedup is None:  # a for-loop: the denominator of one parameter, and its update
        return 2 * max(sizes(trained), default=0)
    return speedup.step_bytes(trained)


class _Released:
    """What of the gradients goes in the backward pass already, as parameters are updated there.

    Attributes:
        updated: parameters whose gradients went.
        peak: the fullest moment of those updates, as the meter counts.
        most: bytes of gradients that were there at once.
    """

    def __init__(self, algorithms: Iterable[Any], model: torch.nn.Module, meter: OperationMeter) -> None:
        self.updated: list[torch.nn.Parameter] = []
        self.peak = 0

        def update(parameters: Sequence[torch.nn.Parameter]) -> None:
            self.updated += parameters
            self.peak = max(self.peak, meter.now + _during_step(algorithms, parameters))

        speedups = [a for a in algorithms if isinstance(a, SpeedUp)]
        found = [a.released(list(model.parameters()), update) for a in speedups]
        self._buckets = next((buckets for buckets in found if buckets is not None), None)

    @property
    def most(self) -> int:
        return 0 if self._buckets is None else self._buckets.most


def _optimizer(algorithms: Iterable[Any]) -> OptimizerSpeedUp | None:
    return next((a for a in algorithms if isinstance(a, OptimizerSpeedUp)), None)


@contextmanager
def _as_before() -> Iterator[None]:
    """Put process-wide settings back that speed-ups change, and the random numbers that a forward pass draws."""
    from composer_speedups.algorithms import sdp_attention
    from composer_speedups.compat import read_float32_precision, write_float32_precision

    precision, kernels = read_float32_precision(), sdp_attention.enabled_kernels()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        write_float32_precision(precision)
        sdp_attention.enable_kernels(kernels)


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is trained here: what a speed-up would say of its work is not to be said twice."""
    import warnings

    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
