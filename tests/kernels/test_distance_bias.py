"""MPNet's attention over packed sequences: by C and by PyTorch's operations, against float64 by the book."""

from __future__ import annotations

import math

import pytest
import torch
from distances_check import LENGTHS, POSITIONS, SCALE, gradients, places
from fused_attention_check import HEADS, SEEDS, P, masks
from torch._subclasses.fake_tensor import FakeTensorMode

from composer_speedups.kernels import disentangled
from composer_speedups.kernels import distance_bias as module
from composer_speedups.kernels import fused_attention as fused
from composer_speedups.kernels.distance_bias import distance_biased_attention
from composer_speedups.kernels.fast_dropout import realised
from composer_speedups.kernels.varlen_attention import Lengths

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
NAMES = ("q", "k", "v", "table")


def tensors(dtype: torch.dtype, width: int = 32) -> list[torch.Tensor]:
    """Those of NAMES, and the gradient of the output. The table is what it is: in float32 with q in bfloat16."""
    total = sum(LENGTHS)
    q, k, v, gradient = torch.randn(4, total, HEADS, width).to(dtype)
    return [q, k, v, torch.randn(HEADS, POSITIONS) * 2, gradient]


def by_the_book(q, k, v, table, p: float) -> torch.Tensor:
    out, at = [], places()
    for *own, mask in zip(*(x.split(LENGTHS) for x in (q, k, v)), masks((LENGTHS, LENGTHS), p), strict=True):
        qi, ki, vi = own
        n = len(qi)
        apart = at.rows[torch.arange(n)[:, None] - torch.arange(n) + at.reach].long()
        scores = torch.einsum("ihd,jhd->hij", qi, ki) * SCALE + table[:, apart]
        kept = scores.softmax(-1) * mask / (1 - realised(p))
        out.append(torch.einsum("hij,jhd->ihd", kept, vi))
    return torch.cat(out)


def gradients_of(attend, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """As `gradients`, each in its own type."""
    *inputs, gradient = given
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    found = torch.autograd.grad(out, leaves, gradient)
    assert [x.dtype for x in (out, *found)] == [x.dtype for x in (given[0], *inputs)]
    return [x.double() for x in (out.detach(), *found)]


@pytest.fixture
def by_c(monkeypatch: pytest.MonkeyPatch):
    """`distance_biased_attention`, of which each call must be C."""
    monkeypatch.setattr(module, "draw_keys", lambda: SEEDS)
    if disentangled.native() is None or any(fused.native(d) is None for d in (torch.float32, torch.bfloat16)):
        pytest.skip("no compiler, or a CPU without the instructions")

    def attend(*given: torch.Tensor, p: float = 0.0, lengths: list[int] = LENGTHS) -> torch.Tensor:
        assert module.in_c(*given[:3])
        return distance_biased_attention(*given, places(), Lengths.of(lengths), p, SCALE)

    return attend


@DTYPES
@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.usefixtures("poisoned_memory")
def test_c_is_as_exact_as_its_roundings_are(by_c, dtype: torch.dtype, p: float) -> None:
    given = tensors(dtype)
    expected = gradients(lambda *x: by_the_book(*x, p), given)
    found = gradients_of(lambda *x: by_c(*x, p=p), given)
    # As of test_disentangled.py, without the rounding of a product with positions.
    units = 4 / math.sqrt(12) if dtype == torch.bfloat16 else 5
    for name, x, y in zip(("out", *NAMES), found, expected, strict=True):
        error = (x - y).norm() / y.norm()
        assert error < units * torch.finfo(dtype).eps, f"{name}: {error / torch.finfo(dtype).eps} units"


def test_pytorchs_operations_mean_the_same() -> None:
    given = tensors(torch.float64, width=5)
    expected = gradients(lambda *x: by_the_book(*x, 0.0), given)
    lengths = Lengths.of(LENGTHS)

    def with_the_bias(q, k, v, table: torch.Tensor) -> torch.Tensor:
        bias = module.padded_bias(table, places(), lengths, torch.float64)
        return distance_biased_attention(q, k, v, bias, places(), lengths, 0.0, SCALE)

    def with_the_table(*x: torch.Tensor) -> torch.Tensor:  # float64, which is nothing for C
        return distance_biased_attention(*x, places(), lengths, 0.0, SCALE)

    for attend in (with_the_bias, with_the_table):
        for x, y in zip(gradients(attend, given), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("frozen", range(4), ids=NAMES)
def test_what_is_frozen_takes_nothing_from_the_others(by_c, frozen: int) -> None:
    *given, gradient = tensors(torch.float32)
    everything = gradients_of(by_c, [*given, gradient])[1:]
    leaves = [x.detach().requires_grad_(i != frozen) for i, x in enumerate(given)]
    by_c(*leaves).backward(gradient)
    for i, (x, y) in enumerate(zip(leaves, everything, strict=True)):
        assert (x.grad is None) == (i == frozen) and (i == frozen or torch.equal(x.grad.double(), y))


@DTYPES
def test_other_numbers_of_threads_give_the_same_bits(by_c, dtype: torch.dtype) -> None:
    given, before = tensors(dtype), torch.get_num_threads()

    def run(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        return gradients_of(lambda *x: by_c(*x, p=P), given)

    try:
        # PyTorch sums up the table's gradient over tokens, each thread columns of its own: the same order.
        for x, *others in zip(*map(run, (1, 2, 3, 7)), strict=True):
            assert all(torch.equal(x, other) for other in others)
    finally:
        torch.set_num_threads(before)


@DTYPES
def test_shapes_without_numbers(by_c, dtype: torch.dtype) -> None:
    *given, gradient = tensors(dtype)
    with FakeTensorMode() as mode:
        leaves = [mode.from_tensor(x).requires_grad_() for x in given]
    out = by_c(*leaves, p=P)
    found = torch.autograd.grad(out, leaves, mode.from_tensor(gradient))
    assert [(x.shape, x.dtype) for x in (out, *found)] == [(x.shape, x.dtype) for x in (given[0], *given)]


def test_compiled_it_is_pytorchs_operations() -> None:
    *given, gradient = tensors(torch.float32)
    compiled = torch.compile(distance_biased_attention, backend="aot_eager", fullgraph=True)
    found, expected = (
        gradients_of(lambda *x, f=f: f(*x, places(), Lengths.of(LENGTHS), 0.0, SCALE), [*given, gradient])
        for f in (compiled, distance_biased_attention)
    )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


def test_errors_name_what_is_wrong(by_c) -> None:
    given = tensors(torch.float32)[:4]
    with pytest.raises(ValueError, match="reach 100 tokens far, and a sequence has 130"):
        distance_biased_attention(*given, places(100), Lengths.of(LENGTHS), 0.0, SCALE)
    with pytest.raises(ValueError, match=r"table must be \(3, 24\), .*, not \(3, 23\)"):
        distance_biased_attention(*given[:3], given[3][:, 1:], places(), Lengths.of(LENGTHS), 0.0, SCALE)
    bias = module.padded_bias(given[3], places(), Lengths.of(LENGTHS), torch.float32)
    with pytest.raises(ValueError, match=r"padded bias must be \(.*, 3, 136, 136\), .*, not \(.*, 136, 135\)"):
        distance_biased_attention(*given[:3], bias[..., 1:], places(), Lengths.of(LENGTHS), 0.0, SCALE)
    with pytest.raises(ValueError, match="reach 100 tokens far"):
        module.padded_bias(given[3], places(100), Lengths.of(LENGTHS), torch.float32)
    with pytest.raises(ValueError, match="lengths sum to 186, and there are 187 tokens"):
        by_c(*given, lengths=[*LENGTHS[:-1], 129])
