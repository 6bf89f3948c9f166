"""Which calls of a stack of layers, or of a model, are replayed as CUDA graphs: those of a shape that has come before.

`recording.py` records one; here is what a graph has in it besides the numbers in its tensors, by which it is found.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from composer_speedups.errors import SpeedUpUnavailable, first_line, is_out_of_memory
from composer_speedups.graphs.cast_together import cast_together, linear_weights
from composer_speedups.graphs.kept_in_python import PLAIN, at_present
from composer_speedups.graphs.recording import Memory, Recorded
from composer_speedups.packed.fixed_total import FixedTotal, total_fixed
from composer_speedups.read_twice import reading_twice
from composer_speedups.surgery import hooked, known_code

__all__ = ["Graphs", "Total", "all_modules", "kernel_by_kernel"]

_looked_at = 0  # by how many, in this process
_OUTPUT = object()  # stands for a tensor in what layers return
_REMEMBERED = 4096  # shapes
_SHORT = 4096  # numbers of a tensor on the host
_CHANGED = "frozen, moved, other rates of dropout, or numbers that modules of your own keep"
_CHANGES = 20  # of the layers after which nothing is recorded any more: a recording costs as much as some steps
# Steps of padding after which a total is recorded. A recording takes the time of 6 to 10 on an H200 (0.11 to 0.22 s),
# of fewer where a step takes longer.
_PRICE = 4
_FLAGS = ("training", "p", "attention_dropout", "dropout_prob")  # of modules


@contextmanager
def kernel_by_kernel() -> Iterator[None]:
    """Nothing is replayed inside: for who looks at operators, or at what autograd keeps."""
    global _looked_at
    _looked_at += 1
    try:
        yield
    finally:
        _looked_at -= 1


class Total(NamedTuple):
    """The tokens that a call of a whole model works on, in the end; its inputs have no such shape.

    Attributes:
        tokens: real ones, filled up to a multiple of `step`.
        step: what totals are multiples of.
        most: all, padding included.
        length: of a row.
    """

    tokens: int
    step: int
    most: int
    length: int

    def enlarged(self) -> Total:
        """What is recorded first: with room for those that come after it, which use its memory."""
        return self._replace(tokens=min(self.most, -(-(self.tokens + self.tokens // 6) // self.step) * self.step))

    def fixed(self) -> FixedTotal:
        """For all that this total serves, and for what it was enlarged from, which is less."""
        return FixedTotal(self.tokens, min(self.most, self.tokens // 7 + 2 * self.step))

    def serves(self, smaller: int) -> bool:
        return smaller <= self.tokens <= smaller + smaller // 8


class Graphs:
    """Those of one stack of layers, or of one model. A shape is recorded when it comes for the second time.

    A model's shapes are totals of tokens: one that is not recorded is filled up to a recorded one, if that is an eighth
    larger at most, until that has cost as much as some steps.

    Attributes:
        replayed: how often one was used.
        launched: how often the layers ran kernel by kernel in training instead.
        reason: why they did so last.
    """

    def __init__(self) -> None:
        self.replayed = self.launched = 0
        self.reason = ""
        # By call, and its total where it has one; None where it is not recorded.
        self._known: dict[tuple[Hashable, Total | None], tuple[Recorded, Any] | None] = {}
        self._memory: Memory | None = None
        self._state: Hashable = None  # of the layers, as the graphs have it in them
        self._changes = 0  # of it, for which graphs were lost
        self._restless = False  # whether it has changed since the call before
        self._largest = 0  # numbers in the inputs of what is recorded, or tokens
        self._filled: dict[tuple[Hashable, Total], int] = {}  # tokens that were computed for want of such a graph

    @property
    def recorded(self) -> int:
        """How many shapes have graphs."""
        return sum(known is not None for known in self._known.values())

    def __call__(
        self,
        modules: list[torch.nn.Module],
        forward: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        limit: int,
        around: Hashable = None,
        total: Total | None = None,
        steady: Callable[[Any], Any] = lambda x: x,
    ) -> Any:
        """`forward(*args, **kwargs)`: replayed, recorded if fewer than `limit` shapes are, or called.

        `modules` are all whose parameters it uses, first the one that has the others in it; `around`: what else a graph
        has in it; `steady` takes from an argument what differs from batch to batch and no kernel reads.
        """
        recorded_for = tuple(map(steady, args)), {name: steady(x) for name, x in kwargs.items()}
        values, structure = pytree.tree_flatten(recorded_for)
        inputs, which = _distinct(values)
        if not inputs or _looked_at:
            return forward(*args, **kwargs)
        # Streams, recordings and replays are of the current device, which the layers' own need not be.
        with torch.cuda.device(inputs[0].device):
            parameters = list({id(p): p for m in modules for p in m._parameters.values() if p is not None}.values())
            call = _call_key(around, len(args), tuple(kwargs), values, which)
            self.reason = self._why_not(modules, inputs, parameters)
            if not self.reason:
                self.reason, total = self._chosen(call, total, limit)
            new = self._known.get((call, total)) is None
            if not self.reason and new and len({x.device for x in (*inputs, *parameters)}) > 1:
                self.reason = "the layers are on several devices"
            if self.reason:
                self.launched += 1
                return forward(*args, **kwargs)
            if new:
                self._make_room(sum(x.numel() for x in inputs) if total is None else total.tokens)
                if total is not None and self._memory is None:
                    total = total.enlarged()
                    self._largest = total.tokens
                run = functools.partial(_call, forward, values, which, structure, total and total.fixed())
                self._known[call, total] = self._record(run, inputs, modules, parameters, total)
            self.replayed += 1
            recorded, template = self._known[call, total]
            outputs = iter(recorded(inputs, parameters))
            return pytree.tree_map(lambda y: next(outputs) if y is _OUTPUT else y, template)

    def _why_not(self, modules, inputs, parameters) -> str:
        """Why the layers must run kernel by kernel, or ""; moves gradients out of the way."""
        # Whoever listens to the first is called before and after what is recorded.
        if any(map(hooked, modules[1:])):
            return "there is a hook in a layer"
        if not any(x.requires_grad for x in (*inputs, *parameters)):
            return "nothing is trained"
        state = _state(modules, parameters)
        self._restless = state != self._state and self._state is not None
        if state != self._state:
            self._changes += self._memory is not None
            self._forget(state)
        if self._changes > _CHANGES:
            return f"the layers have changed {self._changes} times: {_CHANGED}"
        if self._memory is not None and self._memory.taken():
            return "a backward pass comes after another forward pass"
        if self._memory is not None and not self._memory.vacate(parameters):
            return "somebody holds gradients of the step before"
        return ""

    def _chosen(self, call: Hashable | None, total: Total | None, limit: int) -> tuple[str, Total | None]:
        """Why this shape is neither replayed nor recorded, or "", and the total that serves; remembers the shape."""
        if call is None:
            return "the layers are given something other than tensors and plain values", total
        key = call, total
        new = key not in self._known
        if not new and self._known[key] is not None:
            return "", total
        if new and len(self._known) < _REMEMBERED:
            self._known[key] = None
        full = self.recorded >= limit
        if total is not None:
            there = [t for (c, t), known in self._known.items() if c == call and known is not None]
            if larger := [t for t in there if t.serves(total.tokens)]:
                self._filled[key] = self._filled.get(key, 0) + min(larger).tokens - total.tokens
                if full or new or self._filled[key] < _PRICE * total.tokens:
                    return "", min(larger)
        if full:
            return f"the limit of {limit} shapes is reached", total
        if new and self._restless:
            return f"the layers have changed since the batch before: {_CHANGED}", total
        if new:
            return "each batch has a shape of its own. Pad to few lengths, or give unpadding multiple_of=512", total
        return "", total

    def release(self) -> None:
        """Give all memory back. Shapes that have come before are recorded at once when they come again."""
        shapes = dict.fromkeys(self._known)
        self._forget(self._state)
        self._known = shapes

    def _forget(self, state: Hashable) -> None:
        """All graphs, as what they have in them of the layers is not so any more, or to make room."""
        if self._memory is not None:
            torch.cuda.synchronize(self._memory.stream.device)
        self._known, self._filled, self._memory, self._state, self._largest = {}, {}, None, state, 0

    def _make_room(self, size: int) -> None:
        """The first graph's memory is what all others use. It does not grow: a larger one begins anew."""
        if size > self._largest and self._memory is not None:
            self.release()
        self._largest = max(self._largest, size)

    def _record(self, call: Callable[..., Any], inputs, modules, parameters, total) -> tuple[Recorded, Any]:
        self._memory = memory = self._memory or Memory()
        numbers = {id(p): number for number, p in enumerate(parameters)}
        template: Any = None
        low = {"enabled": torch.is_autocast_enabled("cuda"), "dtype": torch.get_autocast_dtype("cuda")}

        def function(inputs, standing_in) -> tuple[list[torch.Tensor], int]:
            nonlocal template
            by = dict(zip(map(id, parameters), standing_in, strict=True))
            if weights:
                places = [memory.gradients.get(numbers[id(w)]) for w in weights]  # of the graphs before, if there are
                cast = cast_together([by[id(w)] for w in weights], low["dtype"], places)
                by |= dict(zip(map(id, weights), cast, strict=True))
            with _replaced(modules, by), torch.autocast("cuda", **low), reading_twice():
                returned = call(inputs)
            torch.clear_autocast_cache()  # what was cast here is in this graph
            template = pytree.tree_map(lambda y: _OUTPUT if isinstance(y, torch.Tensor) else y, returned)
            outputs = [y for y in pytree.tree_leaves(returned) if isinstance(y, torch.Tensor)]
            # A model with labels is trained by its loss, the first of what it returns; hidden states by all.
            return outputs, 1 if isinstance(getattr(returned, "loss", None), torch.Tensor) else len(outputs)

        weights = linear_weights(modules) if low["enabled"] else []
        torch.clear_autocast_cache()
        handled = sys.exception()
        try:
            with torch.autocast("cuda", enabled=False):  # as the backward pass has it
                recorded = Recorded(function, inputs, parameters, memory)
        except RuntimeError as error:
            with suppress(RuntimeError):  # of a device that does nothing more
                self._forget(None)  # no graph has the memory now, and PyTorch records nothing else into it
            if isinstance(error, torch.OutOfMemoryError):
                raise
            what = _first_words(error, handled)
            if is_out_of_memory(RuntimeError(what)):  # of CUDA's own, beside PyTorch's: in words that Composer knows
                raise torch.OutOfMemoryError(f"CUDA out of memory while cuda_graphs recorded: {what}") from error
            instead = "Remove it" if total is None else "Use scope='layers', or remove it"
            raise SpeedUpUnavailable(
                f"cuda_graphs cannot record these layers: {what}. {instead}, and start the process anew"
            ) from error
        return recorded, template


def _first_words(error: BaseException, handled: BaseException | None) -> str:
    """Of what went wrong first: PyTorch then fails to end the recording, too.

    What is being `handled` outside has nothing to do with it.
    """
    while isinstance(error.__context__, Exception) and error.__context__ is not handled:
        error = error.__context__
    return first_line(error)


def _distinct(values: list[Any]) -> tuple[list[torch.Tensor], tuple[int | None, ...]]:
    """The tensors on the device among `values`, each once, and for each value which of them it is, if any."""
    numbers: dict[int, int] = {}
    inputs, which = [], []
    for x in values:
        there = isinstance(x, torch.Tensor) and x.is_cuda
        which.append(numbers.setdefault(id(x), len(inputs)) if there else None)
        if there and which[-1] == len(inputs):
            inputs.append(x)
    return inputs, tuple(which)


def _call(forward: Callable[..., Any], values: list[Any], which, structure: Any, total, inputs) -> Any:
    """`forward` of `values`, with `inputs` in place of the tensors on the device."""
    filled = [x if number is None else inputs[number] for x, number in zip(values, which, strict=True)]
    args, kwargs = pytree.tree_unflatten(filled, structure)
    with total_fixed(total):
        return forward(*args, **kwargs)


def all_modules(layers: torch.nn.Module) -> list[torch.nn.Module]:
    """As `modules()`, in a tenth of its time: it is asked in each step."""
    found = [layers]
    for module in found:
        found.extend(m for m in module._modules.values() if m is not None)
    return found


def _call_key(around: Hashable, positional: int, names: tuple[str, ...], values, which) -> Hashable | None:
    """What a graph has in it of its call, but the numbers in its tensors; None where that cannot be told."""
    arguments = []
    for x, number in zip(values, which, strict=True):
        if number is not None:
            arguments.append((x.shape, x.dtype, x.device, x.requires_grad))
        elif isinstance(x, torch.Tensor) and x.numel() <= _SHORT:
            arguments.append((x.shape, x.dtype, tuple(x.flatten().tolist())))
        elif isinstance(x, PLAIN):
            arguments.append(x)
        else:
            return None
    low = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    return positional, names, which, tuple(arguments), *low, torch.are_deterministic_algorithms_enabled(), around


def _state(modules: list[torch.nn.Module], parameters: list[torch.nn.Parameter]) -> Hashable:
    """What a graph has in it of the layers themselves."""
    weights = tuple([(p.data_ptr(), p.requires_grad, p.dtype) for p in parameters])
    buffers = tuple([(b.data_ptr(), b.dtype) for m in modules for b in m._buffers.values() if b is not None])
    # By `__dict__`, as a module takes long to say that it has no such attribute.
    flags = tuple([(type(m), *[m.__dict__.get(name) for name in _FLAGS]) for m in modules])
    # Such as a temperature, or the scale of an adapter: kernels were given them when they were recorded.
    seen: dict[int, Hashable] = {}
    own = tuple([at_present(m, seen) for m in modules if not known_code(type(m))])
    return weights, buffers, flags, own


@contextmanager
def _replaced(modules: list[torch.nn.Module], by: dict[int, torch.nn.Parameter]) -> Iterator[None]:
    """The modules with other parameters, given for the `id` of their own."""
    before = [(m, dict(m._parameters)) for m in modules]
    try:
        for module, parameters in before:
            module._parameters.update({name: p if p is None else by[id(p)] for name, p in parameters.items()})
        yield
    finally:
        for module, parameters in before:
            module._parameters.update(parameters)
