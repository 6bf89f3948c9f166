from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from composer.algorithms.warnings import NoEffectWarning

from composer_speedups import LowPrecisionNorm, MixedPrecision, apply_low_precision_norm

WIDTHS = [64, 768, 769]  # power of two, BERT-base, ragged tail


def check(make, width: int, dtype: torch.dtype, device: str = "cpu", rows: int = 2000, bias: bool = True) -> None:
    """What `make(layer)` computes of a LayerNorm, and all its gradients, against float64."""
    layer = torch.nn.LayerNorm(width, eps=0.1, bias=bias).to(device)  # an eps that is seen if it is another
    for p in layer.parameters():
        torch.nn.init.normal_(p)  # the default bias is 0: it would hide a dropped bias
    # Far from 0, so that a mean in low precision is off by much more than a rounding of the result.
    x = (torch.randn(rows, width, device=device) + 8).to(dtype).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    # On CUDA the weights are rounded, so the reference's are: the test judges the arithmetic, not the cast asked for.
    wide = tuple(
        (p.detach().to(dtype) if device == "cuda" else p.detach()).double().requires_grad_() for p in layer.parameters()
    )
    reference = F.layer_norm(x64, (width,), *wide, eps=layer.eps)
    changed = make(layer)
    with torch.autocast(device, dtype=dtype):
        out = changed(x)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    reference.backward(gradient.double())
    ulp = torch.finfo(dtype).eps
    assert out.dtype == dtype and x.grad.dtype == dtype
    # Each is rounded once, on store: ulp/2, doubled here; absolute where the terms of one sum cancel.
    torch.testing.assert_close(out.double(), reference, rtol=ulp, atol=ulp / 4)
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=ulp, atol=ulp / 4)
    # Sums of `rows` products in float32: random roundings grow with the root of their number. On CUDA the result
    # goes through the low precision once.
    for p, p64 in zip(layer.parameters(), wide, strict=True):
        tolerance = 4 * rows**0.5 * torch.finfo(torch.float32).eps + (ulp if device == "cuda" else 0)
        assert p.grad.dtype == torch.float32
        assert float((p.grad.double() - p64.grad).norm() / p64.grad.norm()) < tolerance


def low_precision(layer: torch.nn.Module) -> torch.nn.Module:
    model = torch.nn.Sequential(layer)
    assert apply_low_precision_norm(model) == 1
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bias", [True, False], ids=["with bias", "without"])  # ModernBERT's norms have none
def test_matches_float64(bias: bool, width: int, dtype: torch.dtype, device: str) -> None:
    check(low_precision, width, dtype, device, bias=bias)


class Faulty(torch.nn.Module):
    """LayerNorm from its formula, right but for one planted fault."""

    def __init__(self, layer: torch.nn.LayerNorm, fault: str | None) -> None:
        super().__init__()
        self.layer, self.fault = layer, fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias, eps = self.layer.weight, self.layer.bias, 1e-5 if self.fault == "eps" else self.layer.eps
        if self.fault == "sums in low precision":
            return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), eps)
        wide = x.float()
        mean = wide.mean(-1, keepdim=True)
        if self.fault == "mean in low precision":
            mean = mean.to(x.dtype).float()
        centred = wide - mean
        y = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
        return (y if self.fault == "bias" else y + bias).to(x.dtype)


FAULTS = ["bias", "eps", "mean in low precision", "sums in low precision"]


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_planted_faults_are_found(fault: str | None) -> None:
    if fault is None:
        return check(lambda layer: Faulty(layer, None), 256, torch.bfloat16)
    with pytest.raises(AssertionError):
        check(lambda layer: Faulty(layer, fault), 256, torch.bfloat16)


@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    layer = torch.nn.LayerNorm(8)
    x = torch.randn(3, 2, 8, requires_grad=frozen != "input")
    if frozen != "input":
        getattr(layer, frozen).requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        low_precision(layer)(x).float().square().sum().backward()
    found = {"weight": layer.weight.grad, "bias": layer.bias.grad, "input": x.grad}
    assert {name for name, grad in found.items() if grad is None} == {frozen}


def test_norms_over_several_dimensions_and_without_weights() -> None:
    for layer in (torch.nn.LayerNorm((4, 8)), torch.nn.LayerNorm(8, bias=False), torch.nn.LayerNorm(8, 1e-5, False)):
        x = torch.randn(6, 4, 8, requires_grad=True)
        expected = torch.autograd.grad((layer(x) ** 3).sum(), x)[0]
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.autograd.grad((low_precision(layer)(x) ** 3).float().sum(), x)[0]
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)


def test_is_bit_exact_outside_autocast() -> None:
    layer, x = torch.nn.LayerNorm(768), torch.randn(5, 768)
    expected = layer(x)
    model = torch.nn.Sequential(layer)
    apply_low_precision_norm(model)
    assert torch.equal(model(x), expected)


def test_what_autocast_leaves_alone_is_left_alone() -> None:
    """float64, in which a linear layer after it would refuse bf16; and "meta", of which autocast knows nothing."""
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).double()
    x = torch.randn(5, 8, dtype=torch.float64)
    expected = model(x)
    assert apply_low_precision_norm(model) == 2
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), expected)
        assert model.to("meta")(x.to("meta")).dtype == torch.float64


def test_twice_is_once(tiny_bert: torch.nn.Module) -> None:
    assert apply_low_precision_norm(tiny_bert) == 5  # embeddings, and two a layer
    assert apply_low_precision_norm(tiny_bert) == 0


def test_works_inside_a_trainer(make_trainer, caplog) -> None:
    algorithm = LowPrecisionNorm()
    make_trainer([algorithm, MixedPrecision("bf16")]).fit()
    assert algorithm.evidence["changed"] == 5
    assert algorithm.evidence["computes_in"] == "the dtype of autocast"
    assert "leaves norms in float32" not in caplog.text


def test_says_where_it_finds_no_autocast(make_trainer, caplog) -> None:
    algorithm = LowPrecisionNorm()
    make_trainer([algorithm])
    assert algorithm.evidence["computes_in"] == "float32: the Trainer uses no autocast"
    assert "leaves norms in float32: the Trainer uses no autocast. Add MixedPrecision" in caplog.text


def test_warns_when_nothing_to_replace(make_trainer) -> None:
    from composer.models import ComposerClassifier

    model = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
    with pytest.warns(NoEffectWarning, match=r"no torch\.nn\.LayerNorm"):
        make_trainer([LowPrecisionNorm()], model=model)


def test_works_under_torch_func() -> None:
    """As the stock norm does; in the low precision, too, and with PyTorch's own sums."""
    model, x = torch.nn.Sequential(torch.nn.LayerNorm(8)), torch.randn(3, 8)
    apply_low_precision_norm(model)
    seen = []

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        out = torch.func.functional_call(model, parameters, (x,))
        seen.append(out.dtype)
        return (out * torch.arange(8)).sum()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16):
        model(x).mul(torch.arange(8)).sum().backward()
        found = torch.func.grad(loss)(parameters, x)
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x[:, None])
    assert set(seen) == {torch.bfloat16}
    for name, p in model.named_parameters():
        # Three rows of terms up to 14, rounded and summed in bf16.
        bound = 4 * torch.finfo(torch.bfloat16).eps * 14
        torch.testing.assert_close(found[name], p.grad, rtol=0, atol=bound)
        torch.testing.assert_close(each[name].sum(0), p.grad, rtol=0, atol=bound)
