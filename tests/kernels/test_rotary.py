from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.modernbert import modeling_modernbert as stock

from composer_speedups.kernels import native as building
from composer_speedups.kernels import rotary as module
from composer_speedups.kernels.native import load
from composer_speedups.kernels.rotary import rotary, serves
from composer_speedups.kernels.tensors import shape_only

needs_c = pytest.mark.skipif(load("rotary") is None, reason="no C compiler on this machine")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def tables(tokens: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Of positions that jump, as where sequences are packed; other angles in the second half, which nobody promises."""
    angles = torch.randn(tokens, width, dtype=torch.float64) * 9
    return angles.cos().to(dtype), angles.sin().to(dtype)


def packed(tokens: int, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Queries, as a view of one tensor with keys and values."""
    return torch.randn(tokens, 3, heads, width).to(dtype)[:, 0]


def reference(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    x, cosine, sine = (t.double() for t in (x, cosine[:, None], sine[:, None]))
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


@needs_c
@DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 2), (7, 3, 16), (5, 2, 38), (70, 4, 64), (300, 12, 64), (0, 3, 16)], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_matches_float64(shape: tuple[int, int, int], dtype: torch.dtype, threads: int) -> None:
    x, gradient = packed(*shape, dtype).requires_grad_(), packed(*shape, dtype)
    cosine, sine = tables(shape[0], shape[-1])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert serves(x, cosine, sine)
        out = rotary(x, cosine, sine)
        (found,) = torch.autograd.grad(out, x, gradient)
    finally:
        torch.set_num_threads(before)
    wide = x.detach().double().requires_grad_()
    expected = reference(wide, cosine, sine)
    (want,) = torch.autograd.grad(expected, wide, gradient.double())
    # Two products and their sum in float32, each off by half an ulp of at most the larger of two numbers times 1; then
    # one rounding to the type of x.
    largest = x.detach().double().abs().amax() if x.numel() else 0
    allowed = dict(rtol=torch.finfo(dtype).eps / 2, atol=float(2 * largest * torch.finfo(torch.float32).eps))
    for a, b in ((out, expected), (found, want)):
        assert a.dtype == dtype and a.is_contiguous()
        torch.testing.assert_close(a.double(), b, **allowed)


@needs_c
def test_equals_transformers_own() -> None:
    q, k = packed(40, 3, 32, torch.float32), packed(40, 3, 32, torch.float32)
    cosine, sine = tables(40, 32)
    expected = stock.apply_rotary_pos_emb(q, k, cosine, sine, unsqueeze_dim=1)
    for x, y in zip((q, k), expected, strict=True):
        torch.testing.assert_close(rotary(x, cosine, sine), y, rtol=1e-6, atol=1e-6)


@needs_c
@DTYPES
def test_agrees_bit_for_bit_with_its_meaning(dtype: torch.dtype) -> None:
    x, both = packed(130, 5, 48, dtype), tables(130, 48)
    for back in (False, True):
        assert torch.equal(module._turn(x, *both, back), module._by_torch(x, *both, back))


@needs_c
def test_any_strides_but_of_the_last_dimension() -> None:
    x, both = torch.randn(9, 4, 16), tables(9, 16)
    expected = rotary(x, *both)
    assert torch.equal(rotary(x.transpose(0, 1).contiguous().transpose(0, 1), *both), expected)
    assert torch.equal(rotary(x, *(t.T.contiguous().T for t in both)), expected)
    gradient = torch.randn(9, 4, 16)
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(rotary(leaf, *both), leaf, gradient)
    (found,) = torch.autograd.grad(rotary(leaf, *both), leaf, gradient.transpose(0, 2).contiguous().transpose(0, 2))
    assert torch.equal(found, want)


@needs_c
def test_nan_is_not_lost_and_stays_with_its_head() -> None:
    x, both = torch.randn(4, 2, 8), tables(4, 8)
    x[1, 0, 3] = math.nan
    for dtype in (torch.float32, torch.bfloat16):
        gone = rotary(x.to(dtype), *both).isnan()
        assert gone[1, 0, 3] and gone[1, 0, 7] and gone.sum() == 2


@needs_c
def test_leaves_the_rest_to_others() -> None:
    x, (cosine, sine) = torch.randn(6, 2, 8), tables(6, 8)
    assert serves(x, cosine, sine)
    assert not serves(x.double(), cosine, sine) and not serves(x.half(), cosine, sine)
    assert not serves(x, cosine.double(), sine) and not serves(x, cosine, sine[:1])
    assert not serves(x[None], cosine, sine) and not serves(x[..., :7], cosine[:, :7], sine[:, :7])
    assert not serves(x.to("meta"), cosine, sine)
    assert not serves(x.transpose(0, 2).contiguous().transpose(0, 2), cosine, sine)
    assert not serves(x, cosine.requires_grad_(), sine), "a gradient that it would not give"
    seen = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        seen.append(serves(x, cosine.detach(), sine))
        return x.sum()

    torch.func.grad(inside)(x)
    assert seen == [False]


@needs_c
def test_shapes_without_numbers() -> None:
    module.native.cache_clear()  # asked for the first time in a dry run, it must not try itself on shapes
    with FakeTensorMode() as mode:
        x, *both = (mode.from_tensor(t) for t in (torch.randn(6, 2, 8), *tables(6, 8)))
        assert serves(x, *both)
    out = rotary(x.requires_grad_(), *both)  # they stay shapes where the mode is over
    out.sum().backward()
    assert out.shape == x.grad.shape == (6, 2, 8) and all(map(shape_only, (out, x.grad)))


@needs_c
@pytest.mark.parametrize("function", module._NAMES.values())
def test_a_library_that_differs_is_not_used(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = load("rotary")

    class Wrong:
        def __getattr__(self, name: str):
            found = getattr(right, name)
            if name != function:
                return found

            def backwards(*given):
                *rest, back, threads = given
                found(*rest, not back, threads)

            return backwards

    assert module.native() is not None
    monkeypatch.setattr(building, "load", lambda name: Wrong())
    assert module.native.__wrapped__() is None
    monkeypatch.setattr(building, "load", lambda name: None)
    assert module.native.__wrapped__() is None
