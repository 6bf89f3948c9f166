"""Which calls of a stack of layers are replayed as CUDA graphs: those of a shape that has come before.

`recording.py` records one; here is what a graph has in it besides the numbers in its tensors, by which it is found.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from composer_speedups.errors import SpeedUpUnavailable
from composer_speedups.families import layers_of
from composer_speedups.first_request import asked_for_first
from composer_speedups.packing import Packing
from composer_speedups.recording import Memory, Recorded
from composer_speedups.surgery import hooked

__all__ = ["Graphs", "kernel_by_kernel"]

_looked_at = 0  # by how many, in this process
_OUTPUT = object()  # stands for a tensor in what layers return
_REMEMBERED = 4096  # shapes
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_SHORT = 4096  # numbers of a tensor on the host
_CHANGES = 20  # of the layers after which nothing is recorded any more: a recording costs as much as some steps
_FLAGS = ("training", "p", "attention_dropout", "dropout_prob")  # of modules
_UNREAD = "num_items_in_batch"  # transformers gives it to all that it calls; no layer reads it, and it always differs


@contextmanager
def kernel_by_kernel() -> Iterator[None]:
    """Nothing is replayed inside: for who looks at operators, or at what autograd keeps."""
    global _looked_at
    _looked_at += 1
    try:
        yield
    finally:
        _looked_at -= 1


class Graphs:
    """Those of one stack of layers. A shape is recorded when it comes for the second time.

    Attributes:
        replayed: how often one was used.
        launched: how often the layers ran kernel by kernel in training instead.
        reason: why they did so last.
    """

    def __init__(self) -> None:
        self.replayed = self.launched = 0
        self.reason = ""
        self._known: dict[Hashable, tuple[Recorded, Any] | None] = {}  # by shape; None where it is not recorded
        self._memory: Memory | None = None
        self._state: Hashable = None  # of the layers, as the graphs have it in them
        self._changes = 0  # of it, for which graphs were lost
        self._largest = 0  # numbers in the inputs of what is recorded

    @property
    def recorded(self) -> int:
        """How many shapes have graphs."""
        return sum(known is not None for known in self._known.values())

    def __call__(
        self, stack: torch.nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any], limit: int
    ) -> Any:
        """`forward(*args, **kwargs)` of `stack`: replayed, recorded if fewer than `limit` shapes are, or called."""
        values, structure = pytree.tree_flatten(_steady(args, kwargs))
        inputs, which = _distinct(values)
        if not inputs or _looked_at:
            return forward(*args, **kwargs)
        modules = _modules(layers_of(stack))
        parameters = list({id(p): p for m in modules for p in m._parameters.values() if p is not None}.values())
        key = _key(stack, len(args), tuple(kwargs), values, which)
        self.reason = self._why_not(modules, inputs, parameters, key, limit)
        if self.reason:
            self.launched += 1
            return forward(*args, **kwargs)
        known = self._known[key]
        if known is None:
            self._make_room(sum(x.numel() for x in inputs))
            call = functools.partial(_call, forward, values, which, structure)
            known = self._known[key] = self._record(call, inputs, modules, parameters)
        self.replayed += 1
        recorded, template = known
        outputs = iter(recorded(inputs, parameters))
        return pytree.tree_map(lambda y: next(outputs) if y is _OUTPUT else y, template)

    def _why_not(self, modules, inputs, parameters, key: Hashable | None, limit: int) -> str:
        """Why the layers must run kernel by kernel, or ""; remembers the shape, and moves gradients out of the way."""
        if any(map(hooked, modules)):
            return "there is a hook in a layer"
        if not any(x.requires_grad for x in (*inputs, *parameters)):
            return "nothing is trained"
        state = _state(modules, parameters)
        if state != self._state:
            self._changes += self._memory is not None
            self._forget(state)
        if self._changes > _CHANGES:
            return f"the layers have changed {self._changes} times: frozen, moved, or other rates of dropout"
        if self._memory is not None and self._memory.taken():
            return "a backward pass comes after another forward pass"
        if self._memory is not None and not self._memory.vacate(parameters):
            return "somebody holds gradients of the step before"
        if key is None:
            return "the layers are given something other than tensors and plain values"
        if key not in self._known:
            if len(self._known) < _REMEMBERED:
                self._known[key] = None
            return "each batch has a shape of its own. Pad to few lengths, or give unpadding multiple_of=512"
        if self._known[key] is None and self.recorded >= limit:
            return f"the limit of {limit} shapes is reached"
        return ""

    def _forget(self, state: Hashable) -> None:
        """All graphs, as what they have in them of the layers is not so any more, or to make room."""
        if self._memory is not None:
            torch.cuda.synchronize()
        self._known, self._memory, self._state, self._largest = {}, None, state, 0

    def _make_room(self, size: int) -> None:
        """The first graph's memory is what all others use. It does not grow: a larger one begins anew."""
        if size > self._largest and self._memory is not None:
            shapes = dict.fromkeys(self._known)
            self._forget(self._state)
            self._known = shapes  # they have come before
        self._largest = max(self._largest, size)

    def _record(self, call: Callable[..., Any], inputs, modules, parameters) -> tuple[Recorded, Any]:
        self._memory = self._memory or Memory()
        template: Any = None
        low = {"enabled": torch.is_autocast_enabled("cuda"), "dtype": torch.get_autocast_dtype("cuda")}

        def function(inputs, standing_in) -> list[torch.Tensor]:
            nonlocal template
            replaced = _replaced(modules, dict(zip(map(id, parameters), standing_in, strict=True)))
            with replaced, torch.autocast("cuda", **low):
                returned = call(inputs)
            torch.clear_autocast_cache()  # what was cast here is in this graph
            template = pytree.tree_map(lambda y: _OUTPUT if isinstance(y, torch.Tensor) else y, returned)
            return [y for y in pytree.tree_leaves(returned) if isinstance(y, torch.Tensor)]

        torch.clear_autocast_cache()
        handled = sys.exception()
        try:
            with torch.autocast("cuda", enabled=False):  # as the backward pass has it
                recorded = Recorded(function, inputs, parameters, self._memory)
        except torch.OutOfMemoryError:
            self._forget(None)
            raise
        except RuntimeError as error:
            what = _first_words(error, handled)
            raise SpeedUpUnavailable(
                f"cuda_graphs cannot record these layers: {what}. Remove it, and start the process anew"
            ) from error
        return recorded, template


def _first_words(error: BaseException, handled: BaseException | None) -> str:
    """Of what went wrong first: PyTorch then fails to end the recording, too.

    What is being `handled` outside has nothing to do with it.
    """
    while isinstance(error.__context__, Exception) and error.__context__ is not handled:
        error = error.__context__
    return str(error).partition("\n")[0]


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


def _call(forward: Callable[..., Any], values: list[Any], which, structure: Any, inputs) -> Any:
    """`forward` of `values`, with `inputs` in place of the tensors on the device."""
    filled = [x if number is None else inputs[number] for x, number in zip(values, which, strict=True)]
    args, kwargs = pytree.tree_unflatten(filled, structure)
    return forward(*args, **kwargs)


def _steady(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments, without what differs from batch to batch and no kernel reads."""

    def of(x: Any) -> Any:
        return x.steady() if isinstance(x, Packing) else x

    return tuple(map(of, args)), {name: None if name == _UNREAD else of(x) for name, x in kwargs.items()}


def _modules(layers: torch.nn.Module) -> list[torch.nn.Module]:
    """As `modules()`, in a tenth of its time: it is asked in each step."""
    found = [layers]
    for module in found:
        found.extend(m for m in module._modules.values() if m is not None)
    return found


def _key(stack: torch.nn.Module, positional: int, names: tuple[str, ...], values, which) -> Hashable | None:
    """What a graph has in it of its call, but the numbers in its tensors; None where that cannot be told."""
    arguments = []
    for x, number in zip(values, which, strict=True):
        if number is not None:
            arguments.append((x.shape, x.dtype, x.device, x.requires_grad))
        elif isinstance(x, torch.Tensor) and x.numel() <= _SHORT:
            arguments.append((x.shape, x.dtype, tuple(x.flatten().tolist())))
        elif isinstance(x, _PLAIN):
            arguments.append(x)
        else:
            return None
    low = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    config = getattr(stack, "config", None)
    asked = [getattr(config, name, None) for name in ("output_hidden_states", "output_attentions")]
    around = *low, torch.are_deterministic_algorithms_enabled(), asked_for_first(layers_of(stack)[-1]), *asked
    return positional, names, which, tuple(arguments), around


def _state(modules: list[torch.nn.Module], parameters: list[torch.nn.Parameter]) -> Hashable:
    """What a graph has in it of the layers themselves."""
    weights = tuple([(p.data_ptr(), p.requires_grad, p.dtype) for p in parameters])
    # By `__dict__`, as a module takes long to say that it has no such attribute.
    return weights, tuple([(type(m), *[m.__dict__.get(name) for name in _FLAGS]) for m in modules])


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
