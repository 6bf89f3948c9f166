"""Replace what modules *do* without replacing what they *are*.

Every surgery here gives an existing module another class. The module object stays, and with it its
Parameters, buffers, hooks, training flag, name in `state_dict`, place in an optimizer's groups, and weight
tying: there is nothing that could be lost or copied by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

__all__ = ["swap_classes"]

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
