from __future__ import annotations

import copy

import pytest
import torch

from composer_speedups.graphs.cast_together import cast_together, linear_weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_and_gradients_are_autocasts_bit_for_bit(dtype: torch.dtype) -> None:
    """One layer is frozen, and one is not called."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    model[1].weight.requires_grad_(False)
    other, x = copy.deepcopy(model), torch.randn(5, 16)

    def loss(model: torch.nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            return model[2](model[1](model[0](x))).float().square().sum()

    exact = loss(other)
    exact.backward()
    weights = linear_weights(list(model.modules()))
    assert [id(w) for w in weights] == [id(layer.weight) for layer in model]
    for layer, cast in zip(model, cast_together(weights, dtype), strict=True):
        assert cast.requires_grad == layer.weight.requires_grad
        layer._parameters["weight"] = cast
    found = loss(model)
    found.backward()
    assert found.equal(exact)
    for weight, layer in zip(weights, other, strict=True):
        wanted = layer.weight.grad
        assert (weight.grad is None) == (wanted is None)
        assert wanted is None or (weight.grad.equal(wanted) and weight.grad.dtype == torch.float32)


def test_only_weights_that_autocast_would_cast() -> None:
    class Mine(torch.nn.Linear):
        """Whoever knows what it does with its weight."""

    plain, half = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16()
    tied, table = torch.nn.Linear(2, 3), torch.nn.Embedding(3, 2)
    table.weight = tied.weight
    assert linear_weights([plain, half, Mine(2, 2), tied, table, torch.nn.LayerNorm(2)]) == [plain.weight]


def test_gradients_are_written_where_they_belong() -> None:
    weights = [torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True), torch.ones(4)]
    place = torch.zeros(2, 3)
    first, second, _ = cast_together(weights, torch.bfloat16, [place, None, None])
    found = torch.autograd.grad((first.sum() * 2, second.sum() * 3), weights[:2])
    assert found[0] is place, "what else has its memory may still be held when its users are counted"
    assert place.eq(2).all()
    assert found[1].eq(3).all() and found[1].dtype == torch.float32
