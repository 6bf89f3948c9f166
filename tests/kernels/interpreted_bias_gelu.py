"""The kernel without a GPU, in Triton's interpreter and as compiled for one: `test_interpreted.py` runs this file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bias_gelu_check import case, check
from mutants import triton_mutant

from composer_speedups.kernels import bias_gelu as module
from composer_speedups.kernels import bias_gelu_triton as cuda
from composer_speedups.kernels.bias_gelu import bias_gelu
from composer_speedups.kernels.launch import DTYPES

# Triton 3.3's interpreter turns arrays of one element into scalars in a way that NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def test_is_interpreted() -> None:
    assert module._triton(torch.ones(1)) is cuda and cuda.interpreted()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 64, 300, 1024])  # less than a tile, one and a part, several
def test_matches_float64(width: int, dtype: torch.dtype) -> None:
    check(bias_gelu, case((7, 3, width), dtype))


@pytest.mark.parametrize("rows", [1, 33, 200])  # fewer rows than a block, one over, several loops
def test_any_number_of_rows(rows: int) -> None:
    check(bias_gelu, case((rows, 40), BF16))


def test_bias_of_any_kind() -> None:
    for bias in DTYPES:
        check(bias_gelu, case((9, 48), BF16, bias))


def test_any_strides() -> None:
    x, bias = case((6, 10, 32), FP32)
    for view in (x[:, ::2], x.transpose(0, 1), x[..., ::2], x[:1].expand(4, 10, 32), x[0, 0]):
        check(bias_gelu, [view.detach().requires_grad_(), bias[: view.shape[-1]].detach().requires_grad_()])
    bias_gelu(x, bias).sum().backward()  # sum sends an expanded gradient, strides 0
    expected = module.reference_bias_gelu(x, bias)
    torch.testing.assert_close(bias.grad, torch.autograd.grad(expected.sum(), bias)[0], rtol=1e-5, atol=1e-5)


def test_no_rows() -> None:
    x, bias = case((0, 3, 16), BF16)
    bias_gelu(x, bias).sum().backward()
    assert x.grad.shape == (0, 3, 16) and torch.equal(bias.grad, torch.zeros(16))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, for 1e30 squared
def test_far_tails_and_non_finite_values() -> None:
    x = torch.tensor([[-1e30, -40.0, -15.0, 15.0, 1e30, float("inf"), float("nan")]])
    y = bias_gelu(x, torch.zeros(7))[0]
    assert torch.equal(y[3:6], x[0, 3:6]) and y[6].isnan()
    # To -15 * Phi(-15) = 5.5e-50 and below: no number of float32.
    assert torch.equal(y[:3], torch.zeros(3))


def test_only_the_gradients_asked_for() -> None:
    for frozen in range(2):
        inputs = case((4, 16), FP32)
        full = torch.autograd.grad(bias_gelu(*inputs).square().sum(), inputs)
        inputs[frozen].requires_grad_(False)
        bias_gelu(*inputs).square().sum().backward()
        assert inputs[frozen].grad is None
        assert torch.equal(inputs[1 - frozen].grad, full[1 - frozen])


def test_saves_the_product_alone() -> None:
    inputs, saved = case((64, 32), BF16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        bias_gelu(*inputs)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in inputs]


def test_repeats_bit_for_bit() -> None:
    inputs = case((130, 24), BF16)
    first, second = (torch.autograd.grad(bias_gelu(*inputs).float().square().sum(), inputs) for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_shapes_without_numbers() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        inputs = case((4, 8), BF16)
        bias_gelu(*inputs).sum().backward()
    assert [t.grad.shape for t in inputs] == [t.shape for t in inputs]


def test_compiles_without_a_graph_break() -> None:
    compiled = torch.compile(bias_gelu, backend="aot_eager", fullgraph=True, dynamic=True)
    check(compiled, case((5, 48), BF16))
    check(compiled, case((9, 48), BF16))


def test_operators_are_well_formed() -> None:
    torch.library.opcheck(module._forward_op, tuple(case((3, 16), FP32)))


MUTANTS = {
    "none": ("total += dx", "total  += dx"),
    "bias dropped in forward": ("width).to(tl.float32) + bias\n", "width).to(tl.float32)\n"),
    "bias dropped in backward": ("h = x.to(tl.float32) + bias", "h = x.to(tl.float32)"),
    "approximation by tanh": (
        "return tl.where(h < 0.0, tail, 1.0 - tail), density",
        "return 1.0 / (1.0 + tl.exp(-1.5957691216 * (h + 0.044715 * h * h * h))), density",
    ),
    "tails swapped": ("h < 0.0, tail, 1.0 - tail", "h > 0.0, tail, 1.0 - tail"),
    "a coefficient off in the fifth digit": ("0.7107068705", "0.7107168705"),
    "density forgotten": ("below + 0.3989422804 * h * density", "below"),
    "density without h": ("0.3989422804 * h * density", "0.3989422804 * density"),
    "last program's sums lost": ("add_up(partial)", "add_up(partial[:-1])"),
    "sums of a program over each other": ("own = (program * ROWS + ", "own = (program * ROWS + 0 * "),
    "rows skipped": ("step = tl.num_programs(0) * ROWS", "step = tl.num_programs(0) * ROWS * 2"),
    "the gradient of the first rows again": ("_load(dy_ptr, dy_stride, row + step,", "_load(dy_ptr, dy_stride, row,"),
    "one column of tiles only": ("triton.cdiv(width, _COLS))](", "width // _COLS)]("),
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("name", "dtype"), [(n, FP32) for n in MUTANTS] + [("none", BF16), ("tails swapped", BF16)])
def test_check_finds_planted_faults(name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch) -> None:
    mutant = triton_mutant(cuda, *MUTANTS[name], tmp_path)
    monkeypatch.setattr(module, "_triton", lambda x: mutant)
    inputs = case((200, 300), dtype)
    if name == "none":
        return check(bias_gelu, inputs)
    with pytest.raises(AssertionError):
        check(bias_gelu, inputs)
