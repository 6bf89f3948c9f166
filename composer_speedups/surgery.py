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

__all__ = [
    "hooked",
    "mix_in",
    "override_methods",
    "overrides",
    "repeated_blocks",
    "same_code",
    "stock_class",
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
    return [vars(c)["_override"][2] for c in type(module).__mro__ if "_override" in vars(c)]


@functools.cache
def _overriding(base: type, names: tuple[str, ...], wrap: Wrap) -> type:
    def method(name: str) -> Callable[..., Any]:
        old = getattr(base, name)
        new = functools.update_wrapper(wrap(old), old)
        new.__signature__ = inspect.signature(old)  # for getfullargspec, which does not unwrap
        return new

    def reduce(self: Any, protocol: Any) -> Any:
        # Pickle finds a class by its name, and would find `base`; deepcopy takes the same way.
        maker, arguments, *rest = super(cls, self).__reduce_ex__(protocol)
        if maker is not copyreg.__newobj__ or type(self) is not cls:
            return (maker, arguments, *rest)
        layers = [vars(c)["_override"] for c in reversed(cls.__mro__) if "_override" in vars(c)]
        return (_remake, (layers[0][0], [layer[1:] for layer in layers]), *rest)

    body = {name: method(name) for name in names} | {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduce,
        "_override": (base, names, wrap),
    }
    cls = type(base)(base.__name__, (base,), body)
    return cls


def _remake(cls: type, layers: list[tuple[tuple[str, ...], Wrap]]) -> Any:
    for names, wrap in layers:
        cls = _overriding(cls, names, wrap)
    return cls.__new__(cls)


def mix_in(mixin: type, module: torch.nn.Module) -> None:
    """Put `mixin` in front of the class of `module`, which then overrides it and may call `super()`.

    For classes that differ by family and version of transformers. The new class keeps the old one's name, as
    transformers looks at names and writes them to files, and the arguments of its `forward`, as Composer and the
    Hugging Face Trainer drop every column that is not among them; it pickles and copies.
    """
    if not isinstance(module, mixin):
        module.__class__ = _mixed(mixin, type(module))


@cache
def _mixed(mixin: type, cls: type) -> type:
    def reduce(self, protocol):  # the class is made at run time: pickle what it is made of
        mixins, base = [], type(self)
        while "_mixture" in vars(base):
            outer, base = vars(base)["_mixture"]
            mixins.insert(0, outer)
        return _rebuild, (base, *mixins), self.__dict__

    body = {"__module__": cls.__module__, "__reduce_ex__": reduce, "_mixture": (mixin, cls)}
    if hasattr(mixin, "forward"):

        def forward(self, *args, **kwargs):
            return mixin.forward(self, *args, **kwargs)

        body["forward"] = functools.update_wrapper(forward, cls.forward)
        forward.__signature__ = inspect.signature(cls.forward)  # for getfullargspec, which does not unwrap
    return type(cls.__name__, (mixin, cls), body)


def _rebuild(cls: type, *mixins: type) -> torch.nn.Module:
    for mixin in mixins:
        cls = _mixed(mixin, cls)
    return cls.__new__(cls)


def stock_class(cls: type) -> type:
    """The class that `cls` was before `mix_in` put mixins in front of it."""
    while "_mixture" in vars(cls):
        cls = vars(cls)["_mixture"][1]
    return cls


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The children of the list of equal modules that holds the most parameters: a transformer's layers, in order.

    >>> len(repeated_blocks(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))))
    2
    """
    best: list[torch.nn.Module] = []
    most = 0
    for container in model.modules():
        blocks = list(container.children())
        if not isinstance(container, (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        size = sum(p.numel() for p in container.parameters())
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


def hooked(module: torch.nn.Module) -> bool:
    """Whether somebody listens to `module`, so that it must be called and not be worked around."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)
