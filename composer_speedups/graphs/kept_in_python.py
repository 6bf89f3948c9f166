"""What modules keep in Python besides weights and buffers, as something to be compared with what it was before."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from numbers import Number
from types import ModuleType
from typing import Any

import torch

__all__ = ["PLAIN", "Itself", "at_present"]

PLAIN = (bool, int, float, str, type(None), torch.dtype)
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_CONTAINERS = (dict, list, tuple, set, frozenset)
_MANY = 4096  # in a container: of longer ones, data most likely, it is which one it is
_DEEP = 2  # objects within objects: an attribute may lead to a whole trainer


class Itself:
    """An object as a key, by what it is and not by what it equals; it lives as long as the key.

    >>> one, other = [1], [1]
    >>> Itself(one) == Itself(one), Itself(one) == Itself(other)
    (True, False)
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def at_present(module: torch.nn.Module, seen: dict[int, Hashable]) -> Hashable:
    """What `module` keeps in its attributes, parameters, buffers and parts aside.

    Numbers and words are kept as they are, those in containers and in plain objects (a configuration, say), too; of a
    tensor on a device where it is, as kernels read there what it has in it; of anything else (a function, a module)
    which one it is.

    Args:
        module: whose `__dict__` is looked at.
        seen: what was found of objects before, by `id`: several modules may have one configuration. Shared between the
            modules of one look, and by nothing that lives longer.

    >>> module = torch.nn.ReLU()
    >>> module.scales = {"default": 1.0}
    >>> before = at_present(module, {})
    >>> module.scales["default"] = 2.0
    >>> at_present(module, {}) == before
    False
    """
    return _dict(module.__dict__, seen, 0, _OF_EVERY_MODULE)


def _dict(
    values: dict[Any, Any], seen: dict[int, Hashable], depth: int, without: frozenset[str] = frozenset()
) -> tuple:
    return tuple([(name, _value(x, seen, depth)) for name, x in values.items() if name not in without])


def _value(value: Any, seen: dict[int, Hashable], depth: int) -> Hashable:
    if isinstance(value, (*PLAIN, Number, Enum)):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if id(value) not in seen:
        seen[id(value)] = Itself(value)  # of what holds itself
        seen[id(value)] = _object(value, seen, depth)
    return seen[id(value)]


def _tensor(value: torch.Tensor) -> Hashable:
    if value.numel() == 1 and not value.is_cuda:
        return value.dtype, value.item()
    where = value.data_ptr(), value.shape, value.stride(), value.dtype
    return where if value.is_cuda else (*where, value._version)


def _object(value: Any, seen: dict[int, Hashable], depth: int) -> Hashable:
    if isinstance(value, _CONTAINERS) and len(value) > _MANY:
        return Itself(value), len(value)
    if isinstance(value, dict):
        return _dict(value, seen, depth)
    if isinstance(value, (list, tuple)):
        return tuple([_value(x, seen, depth) for x in value])
    if isinstance(value, (set, frozenset)):
        return frozenset([_value(x, seen, depth) for x in value])
    if isinstance(value, (torch.nn.Module, type, ModuleType)) or depth == _DEEP or not hasattr(value, "__dict__"):
        return Itself(value)
    return Itself(value), _dict(vars(value), seen, depth + 1)
