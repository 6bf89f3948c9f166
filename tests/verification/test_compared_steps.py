"""What a parameter's gradient may be off by: the plain model's errors say it."""

from __future__ import annotations

import pytest

from composer_speedups.verification.compared_steps import _worst
from composer_speedups.verification.findings import Errors

NORMS = {"layers.0.k.bias": 1e-6, "layers.1.k.bias": 1e-6, "layers.0.k.weight": 1.0}


def worst(plain: dict[str, float], found: dict[str, float], norms: dict[str, float] = NORMS) -> tuple[str, float]:
    return _worst(Errors(1e-7, 3e-7, plain, norms), Errors(1e-7, 3e-7, found, norms))


@pytest.mark.parametrize(
    ("own", "other", "error", "passes"),
    [
        (2e-12, 2e-12, 7e-12, True),  # four times its own
        (2e-12, 2e-12, 9e-12, False),
        (2e-12, 8e-12, 2e-11, True),  # by chance its own was small, as another layer's shows
        (2e-12, 8e-12, 4e-11, False),
        (2e-12, 1e-7, 4e-11, False),  # no other layer's excuses more than four times as much
        (0.0, 8e-12, 2e-12, False),  # nor an error where the plain model has none
    ],
)
def test_another_layers_error_may_excuse_it(own: float, other: float, error: float, passes: bool) -> None:
    plain = {"layers.0.k.bias": own, "layers.1.k.bias": other, "layers.0.k.weight": 3e-7}
    name, share = worst(plain, plain | {"layers.0.k.bias": error})
    assert (share <= 1) == passes
    assert passes or name == "layers.0.k.bias"


def test_what_is_no_rounding_is_found_all_the_same() -> None:
    """A hundredth of a gradient, with every layer's own error a few roundings."""
    plain = {"layers.0.k.bias": 2e-12, "layers.1.k.bias": 8e-12, "layers.0.k.weight": 3e-7}
    assert worst(plain, plain | {"layers.0.k.bias": 1e-8})[1] > 100
