"""Replace what modules *do* without replacing what they *are*.

Every surgery here gives an existing module another class. The module object stays, and with it its
Parameters, buffers, hooks, training flag, name in `state_dict`, place in an optimizer's groups, and weight
tying: there is nothing that could be lost or copied by mistake.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from composer_speedups.errors import ConflictError

__all__ = [
    "compiled",
    "having",
    "hooked",
    "hooked_inside",
    "known_code",
    "mix_in",
    "override_methods",
    "overrides",
    "repeated_blocks",
    "same_code",
    "stock_class",
    "stock_forward",
    "swap_classes",
]

Choose = Callable[[torch.nn.Module], bool]


def swap_classes(
    model: torch.nn.Module,
    classes: Mapping[type[torch.nn.Module], type[torch.nn.Module]],
    only: Choose = lambda module: True,
) -> int:
    """Give each module of exactly a class in `classes` the class it maps to; return how many.

    Subclasses are left alone (they may compute something else), hence applying twice changes nothing.

    Args:
        model: changed in place.
        classes: old class -> new class; the new one must be a subclass that adds no state.
        only: a further condition on the module.
    """
    count = 0
    for module in model.modules():
        new = classes.get(type(module))
        if new is not None and only(module):
            module.__class__ = new
            count += 1
    return count


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def override_methods(module: torch.nn.Module, names: tuple[str, ...], wrap: Wrap) -> int:
    """Let the methods `names` of `module` become `wrap(method)`; return how many did.

    The module's class becomes a subclass made on the spot, which keeps the name and adds nothing to the
    object: `deepcopy` and pickle keep the override, and no hook or attribute tells of it. Applying the same
    `wrap` twice changes nothing.

    Args:
        module: changed in place.
        names: methods; those that its class does not have are passed over.
        wrap: makes the new method out of the old function (with `self` as its first argument). It must be
            hashable, comparable and picklable: a frozen dataclass with `__call__` is.
    """
    if wrap in overrides(module):
        return 0
    base = type(module)
    present = tuple(name for name in names if inspect.isfunction(getattr(base, name, None)))
    if present:
        module.__class__ = _overriding(base, present, wrap)
    return len(present)


def overrides(module: torch.nn.Module) -> list[Wrap]:
    """Every `wrap` that `override_methods` put around methods of `module`, the outermost first."""
    return [wrap for _, make, (*_, wrap) in _layers(type(module)) if make is _overriding]


@cache
def _overriding(base: type, names: tuple[str, ...], wrap: Wrap) -> type:
    def method(name: str) -> Callable[..., Any]:
        old = getattr(base, name)
        new = _with_code_of_its_own(wrap(old))
        return _looks_like(new, old)

    layer = (base, _overriding, (names, wrap))
    return type(base)(base.__name__, (base,), {name: method(name) for name in names} | _body(base, layer))


def mix_in(mixin: type, module: torch.nn.Module) -> None:
    """Put `mixin` in front of the class of `module`, which then overrides it and may call `super()`.

    For classes that differ by family and version of transformers. The new class keeps the old one's name, as
    transformers looks at names and writes them to files, and the arguments of its `forward`, as Composer and the
    Hugging Face Trainer drop every column that is not among them; it pickles and copies.
    """
    if not isinstance(module, mixin):
        try:
            module.__class__ = _mixed(type(module), mixin)
        except TypeError as error:
            name = type(module).__name__
            raise ConflictError(f"{name} cannot be changed in place ({error}): give the model that is in it") from error


@cache
def _mixed(base: type, mixin: type) -> type:
    body = _body(base, (base, _mixed, (mixin,)))
    if hasattr(mixin, "forward"):

        def forward(self, *args, **kwargs):
            return mixin.forward(self, *args, **kwargs)

        body["forward"] = _looks_like(_with_code_of_its_own(forward), base.forward)
    return type(base)(base.__name__, (mixin, base), body)


def _looks_like(new: Callable[..., Any], old: Callable[..., Any]) -> Callable[..., Any]:
    """`new` with the name, words and arguments of `old`, and without the way to it: Accelerate's `unwrap_model` goes it
    to the end when it takes its mixed precision off, and would take us off, too."""
    functools.update_wrapper(new, old)
    new.__signature__ = inspect.signature(old)
    del new.__wrapped__
    return new


def _with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, changed: Dynamo counts recompilations by code, and a process's later models would reach its limit."""
    if inspect.isfunction(function):
        function.__code__ = function.__code__.replace()
    return function


# Classes made at run time, by `override_methods` and `mix_in`, lie over each other in any order. Each knows what it
# lies over, and what made it with which arguments.
Layer = tuple[type, Callable[..., type], tuple[Any, ...]]


def _layers(cls: type) -> list[Layer]:
    """The classes made at run time over the stock one of `cls`, the outermost first."""
    return [vars(c)["_layer"] for c in cls.__mro__ if "_layer" in vars(c)]


def _body(base: type, layer: Layer) -> dict[str, Any]:
    """What every such class has: the name of what it lies over, and how to pickle."""
    named = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return named | {"__reduce_ex__": _reduce, "_layer": layer}


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle finds a class by its name, and would find the stock one: pickle what was laid over it, too."""
    stock = stock_class(type(self))
    maker, arguments, *rest = stock.__reduce_ex__(self, max(protocol, 2))
    # The stock class may have a way of its own; and what somebody else laid over ours (FSDP does) is his to pickle.
    if maker is not copyreg.__newobj__ or "_layer" not in vars(type(self)):
        return (maker, arguments, *rest)
    return (_remake, (stock, [layer[1:] for layer in reversed(_layers(type(self)))]), *rest)


def _remake(cls: type, layers: list[tuple[Callable[..., type], tuple[Any, ...]]]) -> Any:
    for make, arguments in layers:
        cls = make(cls, *arguments)
    return cls.__new__(cls)


def stock_class(cls: type) -> type:
    """The class that `cls` was before `override_methods` and `mix_in` laid others over it."""
    layers = _layers(cls)
    return layers[-1][0] if layers else cls


def known_code(cls: type) -> bool:
    """Whether a module of class `cls` is PyTorch's, transformers' or ours, which is known not to compute something else
    by numbers that it keeps in Python.

    >>> from composer.models import HuggingFaceModel
    >>> known_code(torch.nn.Linear), known_code(HuggingFaceModel)
    (True, False)
    """
    return cls.__module__.startswith(("torch.", "transformers.", "composer_speedups."))


def having(model: torch.nn.Module, *kinds: type) -> bool:
    """Whether a module in `model` has one of `kinds` already: as its class, mixed into it, or around a method.

    >>> class Mine(torch.nn.Linear):
    ...     pass
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    >>> having(model, Mine), swap_classes(model, {torch.nn.Linear: Mine}), having(model, Mine)
    (False, 1, True)
    """
    return any(isinstance(m, kinds) or any(isinstance(wrap, kinds) for wrap in overrides(m)) for m in model.modules())


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The children of the list of equal modules that holds the most parameters: a transformer's layers, in order.

    A `Sequential` of one module only wraps it (Sentence Transformers' models do): it counts where nothing else does.

    >>> len(repeated_blocks(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))))
    2
    """
    best: list[torch.nn.Module] = []
    most = (False, 0)
    for container in model.modules():
        blocks = list(container.children())
        if not isinstance(container, (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        wraps = isinstance(container, torch.nn.Sequential) and len(blocks) == 1
        size = (not wraps, sum(p.numel() for p in container.parameters()))
        # The last layer may have a mixin of its own (`LastLayerSubset`): it is a block all the same.
        kinds = {stock_class(type(block)) for block in blocks}
        if len(kinds) == 1 and size > most and not isinstance(blocks[0], (torch.nn.ModuleList, torch.nn.ModuleDict)):
            best, most = blocks, size
    return best


def same_code(function: Callable[..., Any], pattern: Callable[..., Any]) -> bool:
    """Whether `function` computes what `pattern` does, by the same operations on the same names.

    For code that transformers writes once for each family, under ever other class names: what counts is what a
    module computes, so that unknown families are found and changed ones are left alone.

    >>> same_code(lambda self, x: self.a(x), lambda self, x: self.a(x))
    True
    >>> same_code(lambda self, x: self.a(x), lambda self, x: self.b(x))
    False
    """
    one, other = getattr(function, "__code__", None), pattern.__code__
    parts = ("co_code", "co_names", "co_varnames", "co_consts", "co_freevars", "co_argcount")
    return one is not None and all(getattr(one, part) == getattr(other, part) for part in parts)


def stock_forward(model: torch.nn.Module) -> bool:
    """Whether `model` computes what transformers' class of this name does, whatever our own surgery has mixed in.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> class Mine(BertForSequenceClassification):
    ...     def forward(self, **inputs):
    ...         return self.classifier(self.bert(**inputs).last_hidden_state.mean(1))
    >>> config = BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    >>> stock_forward(BertForSequenceClassification(config)), stock_forward(Mine(config))
    (True, False)
    """
    if "forward" in vars(model):  # as Composer's Alibi does it, and Accelerate
        return False
    written = next(cls for cls in stock_class(type(model)).__mro__ if "forward" in vars(cls))
    return written.__module__.startswith("transformers.")


def hooked(module: torch.nn.Module) -> bool:
    """Whether somebody listens to `module`, so that it must be called and not be worked around.

    Or has given it a `forward` of its own, as Accelerate does to move weights to where they are used.
    """
    before_and_after = module._forward_pre_hooks or module._forward_hooks
    return bool(
        before_and_after or module._backward_pre_hooks or module._backward_hooks or "forward" in module.__dict__
    )


def compiled(module: torch.nn.Module) -> bool:
    """Whether `module` itself is compiled, and not a part of it: in place, as the wrapper that `torch.compile` returns,
    or by a compiled `forward` put into it.
    """
    in_place = module._compiled_call_impl is not None or "_orig_mod" in module._modules
    return in_place or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


def hooked_inside(module: torch.nn.Module) -> bool:
    """Whether somebody listens to a part of `module`."""
    return any(hooked(part) for part in module.modules() if part is not module)
