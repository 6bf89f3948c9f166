from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from composer.algorithms.warnings import NoEffectWarning

from composer_speedups import LowPrecisionNorm, apply_low_precision_norm

WIDTHS = [64, 768, 769]  # power of two, BERT-base, ragged tail


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_matches_float64(width: int, dtype: torch.dtype, device: str) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(width)).to(device)
    for p in model.parameters():
        torch.nn.init.normal_(p)  # the default bias is 0: it would hide a dropped bias
    x = torch.randn(37, width, device=device, dtype=dtype, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    # The reference's inputs are rounded too: the test judges the arithmetic, not the cast asked for.
    w64, b64 = (p.detach().to(dtype).double() for p in model.parameters())
    reference = F.layer_norm(x64, (width,), w64, b64, model[0].eps)
    apply_low_precision_norm(model)
    with torch.autocast(device, dtype=dtype):
        out = model(x)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    reference.backward(gradient.double())
    ulp = torch.finfo(dtype).eps
    assert out.dtype == dtype
    # Forward rounds once, on store: ulp/2, doubled here. Backward on CPU reloads mean and rstd that were
    # stored in `dtype`: two more roundings of order-one values.
    torch.testing.assert_close(out.double(), reference, rtol=ulp, atol=ulp / 8)
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=2 * ulp, atol=2 * ulp)


def test_is_bit_exact_outside_autocast() -> None:
    layer, x = torch.nn.LayerNorm(768), torch.randn(5, 768)
    expected = layer(x)
    model = torch.nn.Sequential(layer)
    apply_low_precision_norm(model)
    assert torch.equal(model(x), expected)


def test_twice_is_once(tiny_bert: torch.nn.Module) -> None:
    assert apply_low_precision_norm(tiny_bert) == 5  # embeddings, and two a layer
    assert apply_low_precision_norm(tiny_bert) == 0


def test_works_inside_a_trainer(make_trainer) -> None:
    algorithm = LowPrecisionNorm()
    make_trainer([algorithm]).fit()
    assert algorithm.evidence["changed"] == 5


def test_warns_when_nothing_to_replace(make_trainer) -> None:
    from composer.models import ComposerClassifier

    model = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
    with pytest.warns(NoEffectWarning, match=r"no torch\.nn\.LayerNorm"):
        make_trainer([LowPrecisionNorm()], model=model)
