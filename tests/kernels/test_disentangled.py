"""DeBERTa's attention over packed sequences: by C and by PyTorch's operations, against float64 by the book."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from distances_check import LENGTHS, POSITIONS, SCALE, gradients, places
from fused_attention_check import HEADS, SEEDS, P, compiled, masks
from torch._subclasses.fake_tensor import FakeTensorMode

from composer_speedups.kernels import disentangled as module
from composer_speedups.kernels import fused_attention as fused
from composer_speedups.kernels import native as building
from composer_speedups.kernels.disentangled import disentangled_attention
from composer_speedups.kernels.fast_dropout import realised
from composer_speedups.kernels.varlen_attention import Lengths

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
NAMES = ("q", "k", "v", "pos_key", "pos_query")


def tensors(dtype: torch.dtype, width: int = 32, lengths: list[int] = LENGTHS) -> list[torch.Tensor]:
    """Those of NAMES, and the gradient of the output."""
    total = sum(lengths)
    sizes = (total, total, total, POSITIONS, POSITIONS, total)
    return [torch.randn(size, HEADS, width).to(dtype) for size in sizes]


def by_the_book(q, k, v, pos_key, pos_query, lengths: list[int], p: float) -> torch.Tensor:
    """Each pair's score by itself: no product is made for several pairs."""
    out, at = [], places()
    for *own, mask in zip(*(x.split(lengths) for x in (q, k, v)), masks((lengths, lengths), p), strict=True):
        qi, ki, vi = own
        n = len(qi)
        apart = at.rows[torch.arange(n)[:, None] - torch.arange(n) + at.reach].long()
        scores = torch.einsum("ihd,jhd->hij", qi, ki)
        if pos_key is not None:
            scores = scores + torch.einsum("ihd,ijhd->hij", qi, pos_key[apart])
        if pos_query is not None:
            scores = scores + torch.einsum("jhd,ijhd->hij", ki, pos_query[apart])
        kept = (scores * SCALE).softmax(-1) * mask / (1 - realised(p))
        out.append(torch.einsum("hij,jhd->ihd", kept, vi))
    return torch.cat(out)


@pytest.fixture
def by_c(monkeypatch: pytest.MonkeyPatch):
    """`disentangled_attention`, of which each call must be C."""
    monkeypatch.setattr(module, "draw_keys", lambda: SEEDS)
    if module.native() is None or any(fused.native(dtype) is None for dtype in module.NAMES):
        pytest.skip("no compiler, or a CPU without the instructions")

    def attend(*given: torch.Tensor, p: float = 0.0, lengths: list[int] = LENGTHS) -> torch.Tensor:
        assert module.in_c(*given)
        return disentangled_attention(*given, places(), Lengths.of(lengths), p, SCALE)

    return attend


def padded(*given: torch.Tensor) -> torch.Tensor:
    return module._padded(*given, places(), Lengths.of(LENGTHS), 0.0, SCALE)


@DTYPES
@pytest.mark.parametrize("p", [0.0, P])
def test_c_is_as_exact_as_its_roundings_are(by_c, dtype: torch.dtype, p: float) -> None:
    given = tensors(dtype)
    expected = gradients(lambda *x: by_the_book(*x, LENGTHS, p), given)
    found = gradients(lambda *x: by_c(*x, p=p), given, dtype)
    # In bfloat16 four roundings on the way to a gradient of positions (exp, its gradient, their sums, the result), each
    # of 1/sqrt(12) of a unit in the last place as a root of squares. In float32 a score loses a unit for its size,
    # which is a few, and sums of up to 130 products lose some.
    units = 4 / math.sqrt(12) if dtype == torch.bfloat16 else 5
    for name, x, y in zip(("out", *NAMES), found, expected, strict=True):
        error = (x - y).norm() / y.norm()
        assert error < units * torch.finfo(dtype).eps, f"{name}: {error / torch.finfo(dtype).eps} units"


def test_pytorchs_operations_mean_the_same() -> None:
    given = tensors(torch.float64, width=5)
    expected = gradients(lambda *x: by_the_book(*x, LENGTHS, 0.0), given)
    for x, y in zip(gradients(padded, given), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("missing", [3, 4])
def test_either_kind_of_positions_may_be_missing(missing: int) -> None:
    given = tensors(torch.float32)

    def without(attend):
        return lambda *x: attend(*x[:missing], None, *x[missing:])

    del given[missing]
    attend = without(lambda *x: disentangled_attention(*x, places(), Lengths.of(LENGTHS), 0.0, SCALE))
    expected = gradients(without(lambda *x: by_the_book(*x, LENGTHS, 0.0)), given)
    for x, y in zip(gradients(attend, given, torch.float32), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@DTYPES
@pytest.mark.usefixtures("poisoned_memory")
def test_other_numbers_of_threads_give_the_same_bits(by_c, dtype: torch.dtype) -> None:
    given, before = tensors(dtype), torch.get_num_threads()

    def run(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(1)  # of PyTorch's products, whose sums may depend on it
        products = [torch.bmm(x.transpose(0, 1), y.permute(1, 2, 0)) for x, y in ((given[0], given[3]), given[1::3])]
        torch.set_num_threads(threads)
        bias = module.spread(*products, places(), LENGTHS, dtype)
        return [bias, *module.collect(bias.to(dtype), HEADS, POSITIONS, places(), LENGTHS)]

    try:
        for x, *others in zip(*map(run, (1, 2, 3, 7)), strict=True):
            assert all(torch.equal(*map(torch.nan_to_num, (x, other))) for other in others)  # filling is not written
    finally:
        torch.set_num_threads(before)


@DTYPES
def test_gradients_of_what_was_made_by_one_product(by_c, dtype: torch.dtype) -> None:
    """Queries, keys and values are parts of one tensor there, and so are their gradients, to which more is added."""
    *given, gradient = tensors(dtype)
    whole = torch.cat(given[:3], 1).requires_grad_()
    (found,) = torch.autograd.grad(by_c(*whole.chunk(3, 1), *given[3:]), whole, gradient)
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    expected = torch.autograd.grad(by_c(*leaves, *given[3:]), leaves, gradient)
    assert torch.equal(found, torch.cat(expected, 1))


def test_autocast_outside_changes_nothing(by_c) -> None:
    given = tensors(torch.float32)
    expected = gradients(by_c, given, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, gradients(by_c, given, torch.float32), expected))


@pytest.mark.parametrize("frozen", range(5), ids=NAMES)
def test_what_is_frozen_takes_nothing_from_the_others(by_c, frozen: int) -> None:
    *given, gradient = tensors(torch.float32)
    everything = gradients(by_c, [*given, gradient], torch.float32)[1:]
    leaves = [x.detach().requires_grad_(i != frozen) for i, x in enumerate(given)]
    by_c(*leaves).backward(gradient)
    for i, (x, y) in enumerate(zip(leaves, everything, strict=True)):
        assert (x.grad is None) == (i == frozen) and (i == frozen or torch.equal(x.grad.double(), y))


@DTYPES
def test_shapes_without_numbers(by_c, dtype: torch.dtype) -> None:
    *given, gradient = tensors(dtype)
    module.native.cache_clear()  # asked for the first time in a dry run, it must not try itself on shapes
    with FakeTensorMode() as mode:
        leaves = [mode.from_tensor(x).requires_grad_() for x in given]
        assert module.in_c(*leaves)
    out = by_c(*leaves, p=P)  # they stay shapes where the mode is over
    found = torch.autograd.grad(out, leaves, mode.from_tensor(gradient))
    assert [(x.shape, x.dtype) for x in (out, *found)] == [(x.shape, dtype) for x in (given[0], *given)]


def test_compiled_it_is_pytorchs_operations() -> None:
    *given, gradient = tensors(torch.float32)
    leaves = [x.requires_grad_() for x in given]
    compiled_one = torch.compile(disentangled_attention, backend="aot_eager", fullgraph=True)
    found, expected = (
        gradients(lambda *x, f=f: f(*x, places(), Lengths.of(LENGTHS), 0.0, SCALE), [*leaves, gradient], torch.float32)
        for f in (compiled_one, disentangled_attention)
    )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


def test_a_sequence_without_tokens_is_no_nan() -> None:
    given = [x.requires_grad_() for x in tensors(torch.float64)[:5]]
    out = padded(*given)
    out.sum().backward()
    assert out.isfinite().all() and all(x.grad.isfinite().all() for x in given)


def test_errors_name_what_is_wrong(by_c, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors(torch.float32)[:5]
    with pytest.raises(ValueError, match="reach 100 tokens far, and a sequence has 130"):
        disentangled_attention(*given, places(100), Lengths.of(LENGTHS), 0.0, SCALE)
    with pytest.raises(ValueError, match=r"pos_query must be \(24, 3, 32\), .*, not \(23, 3, 32\)"):
        disentangled_attention(*given[:4], given[4][1:], places(), Lengths.of(LENGTHS), 0.0, SCALE)
    with pytest.raises(ValueError, match="lengths sum to 186, and there are 187 tokens"):
        by_c(*given, lengths=[*LENGTHS[:-1], 129])
    monkeypatch.setattr(module, "native", lambda: SimpleNamespace(spread_float32=lambda *_: 1))
    with pytest.raises(MemoryError, match="products with positions"):
        by_c(*given)


FAULTS = {
    "none": ("", ""),
    "one key's products for all": ("key[j * s->columns + place[-j]]", "key[place[-j]]"),
    "the other way round": ("query[place[-j]]", "query[s->place[j - i]]"),
    "the keys' products not added": ("out[j] += widen", "out[j] = widen"),
    "the place of the first key for all": ("key[j * s->columns + place[-j]]", "key[j * s->columns + place[0]]"),
    "sums not begun with zero": ("memset(sums, 0, (size_t)columns", "if (!i) memset(sums, 0, (size_t)columns"),
    "blocks' sums not begun with zero": ("memset(sums, 0, (size_t)(rows", "if (!from) memset(sums, 0, (size_t)(rows"),
    "the query's gradient taken from the next": ("(bias[i * wide + j]); ", "(bias[i * wide + j + 1]); "),
    "the keys' block forgotten": ("sums[j * columns + place[-j]]", "sums[j * columns + place[from - j]]"),
    "one head for all": ("(head * s->tokens + start[i].token)", "(0 * head * s->tokens + start[i].token)"),
    "one sequence for all": ("next.first += s->heads", "next.first += 0 * s->heads"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.usefixtures("poisoned_memory")  # what is not written must not happen to be right
def test_a_library_with_a_planted_fault_is_not_used(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if module.native() is None:
        pytest.skip("no compiler")
    library = compiled(tmp_path, "disentangled", *FAULTS[name])
    monkeypatch.setattr(building, "load", lambda _: library)
    assert (module.native.__wrapped__() is not None) == (name == "none")


def test_without_a_compiler_pytorch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "load", lambda _: None)
    assert module.native.__wrapped__() is None
    monkeypatch.setattr(module, "native", lambda: None)
    given = tensors(torch.float32)[:5]
    assert not module.in_c(*given)
    out = disentangled_attention(*given, places(), Lengths.of(LENGTHS), 0.0, SCALE)
    torch.testing.assert_close(out, by_the_book(*given, LENGTHS, 0.0), rtol=1e-4, atol=1e-5)
