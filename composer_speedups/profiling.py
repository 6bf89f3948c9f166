"""Where a training step's time goes, by kind of work: matmuls, attention, norms, the optimizer, the loop, ...

A few steps run under PyTorch's profiler, after everything that is measured. Every operator's own time goes to one
kind. Operators inside others count with these where the outer one is a kind of work by itself (the random numbers
inside a dropout are dropout, the softmax inside attention is attention), and the backward pass counts with the
operator of the forward pass that caused it, which autograd's sequence numbers tell. What a checkpoint computes again
in the backward pass has the kinds that it had in the forward pass. What no rule knows is `other`, and is listed by
name. On a CPU the parts are seconds of the training thread, and what is left of the step is the loop itself: Python,
Composer, waiting. On a GPU they are seconds of kernels by the operator that launched them, and what is left is the
time in which the GPU had nothing to do.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from torch.autograd import DeviceType

__all__ = ["KINDS", "StepProfile", "StepProfiler", "classify", "profiled"]

KINDS = (
    "matmul",
    "attention",
    "norm",
    "dropout",
    "activation",
    "embedding",
    "loss and head",
    "compiled",
    "copies",
    "optimizer",
    "data",
    "other",
    "loop",
    "idle",
)
_HEAD = "composer_speedups: head"
_STEPS = "composer_speedups: steps"
_INSIDE = "composer_speedups: forward and backward"  # Composer runs both inside of the optimizer's step
_NODE = re.compile(r"^autograd::engine::evaluate_function: ")
_OPERATOR = 0  # PyTorch's RecordScope::FUNCTION; backward nodes have one of their own
_LISTED = 8  # names of operators that no rule knows

# The first rule that is found in a name says its kind, and whether what the operator calls counts with it. A name with
# two kinds in it is a fusion, such as dropout_add_norm: it goes to the first here.
_RULES = tuple(
    (re.compile(pattern, re.IGNORECASE), kind, whole)
    for pattern, kind, whole in (
        (r"^enumerate\(DataLoader\)|DataLoaderIter", "data", True),
        (r"^Optimizer\.|_fused_adam|_foreach_|_amp_(foreach|update)", "optimizer", True),
        (rf"^{_HEAD}$|cross_?entropy|nll_loss|log_?softmax|mse_loss|_FusedLoss", "loss and head", True),
        (r"scaled_?dot_?product|flash_attention|flash_attn|efficient_?attention|varlen_attention|packed_?attention"
         r"|_PerSequence|softmax|aten::(bmm|baddbmm)|Baddbmm|BmmBackward", "attention", True),
        (r"layer_?norm|batch_?norm|group_?norm|rms_?norm|add_norm|AddNorm", "norm", True),
        (r"dropout|bernoulli", "dropout", True),
        (r"gelu|relu|silu|swish|tanh|sigmoid|mish|aten::(elu|selu|celu|glu)\b", "activation", True),
        (r"embedding", "embedding", True),
        (r"^Torch-Compiled Region|CompiledFunction|^triton_|^TorchDynamo|^graph_\d|AOTAutograd|^## Call|inductor",
         "compiled", False),
        (r"aten::_?(linear|addmm|mm|mv|addmv|matmul|einsum|scaled_mm|addbmm|conv\w*)\b|mkldnn|cutlass|\bgemm"
         r"|^(Addmm|Mm|Linear|Conv)\w*Backward", "matmul", False),
        (r"aten::(to|_to_copy|copy_|contiguous|clone|cat|stack|detach|detach_|index|index_select|index_copy|gather"
         r"|scatter\w*|empty\w*|zeros\w*|zero_|ones\w*|full\w*|fill_|new_\w*|resize_|pin_memory|view\w*|_?reshape\w*"
         r"|_unsafe_view|t|transpose|permute|expand\w*|as_strided|select|slice|split\w*|unbind|unflatten|flatten"
         r"|squeeze|unsqueeze|narrow|chunk|alias|item|_local_scalar_dense|lift_fresh)$"
         r"|Memcpy|Memset|AccumulateGrad|^(To|ToCopy|Copy|Clone|View|Transpose|T|Index\w*|Slice|Select)Backward",
         "copies", False),
    )
)  # fmt: skip


@dataclass
class StepProfile:
    """Where the time of one step went.

    Attributes:
        seconds: by kind, in the order of `KINDS`; kinds without any are left out. They sum to the step's seconds.
        other: the largest of those operators that no rule knows, seconds by name.
        step: seconds of the whole step, the profiler's own cost (a microsecond or two an operator) included.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    other: dict[str, float] = field(default_factory=dict)
    step: float = 0.0


def classify(name: str) -> str:
    """The kind of an operator by its name alone; `other` for those that no rule knows.

    >>> classify("aten::addmm"), classify("composer_speedups::layer_norm"), classify("mine::stencil")
    ('matmul', 'norm', 'other')
    """
    return _rule(name)[0]


def _rule(name: str) -> tuple[str, bool]:
    return next(((kind, whole) for pattern, kind, whole in _RULES if pattern.search(name)), ("other", False))


class profiled:
    """Profile what runs inside; `profile` then holds where the time of one of `steps` equal steps went.

    >>> with profiled(torch.device("cpu")) as found:
    ...     _ = torch.ones(8, 8) @ torch.ones(8, 8)
    >>> "matmul" in found.profile.seconds
    True
    """

    def __init__(self, device: torch.device, steps: int = 1) -> None:
        self.device, self.steps = device, steps
        self.profile = StepProfile()

    def __enter__(self) -> profiled:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # There is one cycle only; saying so spares a warning about several.
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._profiler.__enter__()
        self._wait()
        self._root = torch.profiler.record_function(_STEPS)
        self._root.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._wait()
        self._root.__exit__(*error)
        self._profiler.__exit__(*error)
        if error[0] is None:
            self.profile = _summarise(self._profiler.events(), self.device, self.steps)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class StepProfiler(Callback):
    """Profiles `steps` steps of a fit, after `skip` others, and marks the model's head for it.

    Args:
        model: the Hugging Face model whose head is to be told from its encoder; None leaves the head unmarked, as it
            must be where hooks would make a compiler start anew.
        steps: to profile.
        skip: steps before that.
    """

    def __init__(self, model: torch.nn.Module | None, steps: int = 3, skip: int = 1) -> None:
        self.steps, self.skip = steps, skip
        self.profile = StepProfile()
        self._model, self._done = model, 0
        self._running: profiled | None = None
        self._inside: Any = None
        self._hooks: list[Any] = []

    def fit_start(self, state: State, logger: Logger) -> None:
        if self._model is not None:
            self._hooks = _mark_head(self._model)

    def before_forward(self, state: State, logger: Logger) -> None:
        if self._running is not None:
            self._inside = torch.profiler.record_function(_INSIDE)
            self._inside.__enter__()

    def after_backward(self, state: State, logger: Logger) -> None:
        if self._inside is not None:
            self._inside.__exit__(None, None, None)
            self._inside = None

    def batch_end(self, state: State, logger: Logger) -> None:
        self._done += 1
        if self._done == self.skip:
            self._running = profiled(state.device._device, self.steps).__enter__()
        elif self._done == self.skip + self.steps and self._running is not None:
            self._running.__exit__(None, None, None)
            self.profile = self._running.profile
            self._running = None

    def close(self, state: State, logger: Logger) -> None:
        self.stop()

    def stop(self) -> None:
        """End what is still running, and take the marks away."""
        if self._running is not None:
            self._running.__exit__(RuntimeError, None, None)
            self._running = None
        while self._hooks:
            self._hooks.pop().remove()


def _mark_head(model: torch.nn.Module) -> list[Any]:
    """Name the calls of what a Hugging Face model has besides its encoder; return the hooks."""
    encoder = getattr(model, "base_model", None)
    open_marks: list[Any] = []

    def before(*_: Any) -> None:
        open_marks.append(torch.profiler.record_function(_HEAD))
        open_marks[-1].__enter__()

    def after(*_: Any) -> None:
        if open_marks:
            open_marks.pop().__exit__(None, None, None)

    hooks = []
    for module in model.children():
        outside = encoder is not None and encoder is not model and module is not encoder
        if outside and next(module.parameters(), None) is not None:
            hooks.append(module.register_forward_pre_hook(before))
            hooks.append(module.register_forward_hook(after, always_call=True))
    return hooks


def _summarise(events: Iterable[Any], device: torch.device, steps: int) -> StepProfile:
    """By kind, the times of the profiler's events; microseconds of all steps become seconds of one."""
    events = [event for event in events if event.device_type == DeviceType.CPU and not event.is_async]
    root = next(event for event in events if event.name == _STEPS)
    kinds = _kinds(events)
    seconds: dict[str, float] = defaultdict(float)
    unknown: Counter[str] = Counter()
    whole = root.cpu_time_total
    for event in events:
        if device.type == "cuda":
            spent = sum(kernel.duration for kernel in event.kernels)
        else:
            # Other threads work beside this one: the step waits for them inside the operator that shares work out.
            spent = max(0.0, event.self_cpu_time_total) if event.thread == root.thread else 0.0
        if not spent or event.name in (_STEPS, _INSIDE):
            continue
        kind = kinds[id(event)][0]
        seconds[kind] += spent
        if kind == "other":
            unknown[event.name] += spent
    busy = sum(seconds.values())
    if busy > whole:  # kernels on several streams at once: their shares of the step
        seconds = {kind: value * whole / busy for kind, value in seconds.items()}
    else:
        seconds["idle" if device.type == "cuda" else "loop"] += whole - busy
    scale = 1e-6 / steps
    return StepProfile(
        {kind: seconds[kind] * scale for kind in KINDS if seconds.get(kind)},
        {_NODE.sub("backward of ", name): value * scale for name, value in unknown.most_common(_LISTED)},
        whole * scale,
    )


def _kinds(events: Iterable[Any]) -> Mapping[int, tuple[str, bool]]:
    """The kind of every event, by its id, and whether that holds for all that it calls."""
    found: dict[int, tuple[str, bool]] = {}
    forward: dict[tuple[int, int], tuple[str, bool]] = {}
    again: set[int] = set()  # events of a forward pass that runs inside of the backward pass
    # In order of time a parent comes before its children, and the forward pass before the backward pass.
    for event in sorted(events, key=lambda e: (e.time_range.start, -e.time_range.end)):
        if event.name == _INSIDE:
            found[id(event)] = ("other", False)
            continue
        parent = event.cpu_parent
        above = found.get(id(parent), ("other", False)) if parent is not None else ("other", False)
        backward = _in_backward(event)
        if parent is not None and id(parent) in again:
            again.add(id(event))
        elif backward and _is_recomputed(event):
            # A checkpoint computes a whole block again when the first of its nodes asks for what it has kept. That
            # node says nothing about the block.
            again.add(id(event))
            above = ("other", False)
        kind = above if above[1] else _rule(_NODE.sub("", event.name))
        if not above[1] and _NODE.match(event.name):
            # The node's cause: of the operators with its number, the last one to start made it.
            cause = forward.get((event.fwd_thread, event.sequence_nr), ("other", False))
            kind = cause if cause[0] != "other" else kind
        elif kind[0] == "other":
            kind = above  # a helper of what called it
        found[id(event)] = kind
        if event.sequence_nr >= 0 and not backward:
            forward[event.thread, event.sequence_nr] = kind
    return found


def _is_recomputed(event: Any) -> bool:
    """Whether an event inside of a backward node is an operator that records a graph; what the node runs does not."""
    return event.scope == _OPERATOR and event.sequence_nr >= 0 and not _NODE.match(event.name)


def _in_backward(event: Any) -> bool:
    while event is not None:
        if _NODE.match(event.name):
            return True
        event = event.cpu_parent
    return False
