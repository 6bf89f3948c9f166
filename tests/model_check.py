"""Check a changed model, output and all gradients, against the same model in float64."""

from __future__ import annotations

import copy

import torch


def random_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Weights and biases large enough that attention is not uniform and a forgotten bias or mask shows."""
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        if name.lower().replace("_", "").endswith("layernorm.weight"):
            with torch.no_grad():
                parameter.add_(1.0)
    return model


def check_model(changed: torch.nn.Module, stock: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """Raise AssertionError unless `changed` is as near to float64 as float32 arithmetic lets it be.

    The errors of logits and of each gradient are taken relative to the largest entry of the exact tensor. The
    bound is eight times the largest such error of the stock float32 model: it does the same number of
    roundings on the same values in another order, and orders were seen to differ by a factor below three.
    """
    exact = _results(copy.deepcopy(stock).double(), batch)
    allowed = 8 * max(_errors(_results(stock, batch), exact).values())
    assert allowed < 1e-3, f"the stock model itself is off by {allowed / 8}: the check would see nothing"
    found = _errors(_results(changed, batch), exact)
    worst = max(found, key=found.__getitem__)
    assert found[worst] <= allowed, f"{worst} is off by {found[worst]:.2e}, allowed are {allowed:.2e}"


def _results(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    gradients = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"logits": output.logits.detach(), **gradients}


def _errors(results: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    assert results.keys() == exact.keys()
    # A key's bias moves all scores of a row alike: its exact gradient is 0, and there is nothing to relate to.
    scale = {n: t.abs().max().item() for n, t in exact.items() if t.abs().max() > 1e-9}
    return {n: (results[n].double() - exact[n]).abs().max().item() / s for n, s in scale.items()}
