"""Many gradients at once, as `jacobian(vectorize=True)` asks for them: they have no memory that C could read."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from contract import bert
from small import padded_batch

from composer_speedups import (
    apply_fast_dropout,
    apply_fused_bias_gelu,
    apply_fused_dropout_add_norm,
    apply_last_layer_subset,
    apply_low_precision_norm,
    apply_unpadding,
)


def many(model: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    batch = padded_batch()
    out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.sum(0)
    return torch.autograd.grad(out, list(model.parameters()), torch.eye(len(out)), is_grads_batched=True)


@pytest.mark.parametrize("change", [apply_unpadding, apply_fused_dropout_add_norm, apply_fused_bias_gelu])
def test_kernels_in_c_say_so(change: Callable[[torch.nn.Module], int]) -> None:
    model = bert().eval()
    change(model)
    with pytest.raises(RuntimeError, match="kernels in C take one gradient at a time"):
        many(model)


@pytest.mark.parametrize("change", [apply_fast_dropout, apply_low_precision_norm, apply_last_layer_subset])
def test_others_compute_them(change: Callable[[torch.nn.Module], int]) -> None:
    stock = bert().eval()
    model = copy.deepcopy(stock)
    change(model)
    for found, expected in zip(many(model), many(stock), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
