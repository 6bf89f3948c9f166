"""The kernel without a GPU, in Triton's interpreter and as compiled for one: `test_interpreted.py` runs this file."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from layer_norm_check import EPS, case, check
from mutants import triton_mutant

from composer_speedups.kernels import layer_norm as module
from composer_speedups.kernels.launch import DTYPES, interpreted
from composer_speedups.kernels.layer_norm import layer_norm

# Triton 3.3's interpreter turns arrays of one element into scalars in a way that NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def test_is_interpreted() -> None:
    assert interpreted()


@pytest.mark.parametrize(
    ("width", "dtype"), [*itertools.product([1, 2, 31, 64, 768], DTYPES), (769, FP32), (769, BF16)], ids=str
)
def test_matches_float64(width: int, dtype: torch.dtype) -> None:
    rows = 7 if width < 100 else 2  # of which three programs have a row each at a time
    check(layer_norm, *case((rows, 3, width), dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)  # one for each size of an element
def test_the_widest_row(dtype: torch.dtype) -> None:
    check(layer_norm, *case((2, 3, 8192), dtype))


@pytest.mark.parametrize("rows", [1, 33, 200])  # fewer rows than a block, one over, several loops
def test_any_number_of_rows(rows: int) -> None:
    check(layer_norm, *case((rows, 40), BF16))


@pytest.mark.parametrize(
    ("weight", "bias"), [(None, None), (FP32, None), (None, FP32), (BF16, BF16), (FP16, FP32)], ids=str
)
def test_weight_and_bias_of_any_kind(weight, bias) -> None:
    check(layer_norm, *case((9, 48), BF16, weight, bias))


def test_any_strides() -> None:
    x, weight, bias = case((6, 10, 32), FP32)
    for view in (x[:, ::2], x.transpose(0, 1), x[..., :16], x[..., ::2], x[:1].expand(4, 10, 32), x[0, 0]):
        width = view.shape[-1]
        check(
            layer_norm,
            view.detach().requires_grad_(),
            weight[:width].detach().requires_grad_(),
            bias[:width].detach().requires_grad_(),
        )


def test_strided_gradient() -> None:
    x, weight, bias = case((5, 32), FP32)
    layer_norm(x, weight, bias, EPS).sum().backward()  # sum sends an expanded gradient, strides 0
    torch.testing.assert_close(bias.grad, torch.full((32,), 5.0), rtol=0, atol=0)


def test_no_rows() -> None:
    x, weight, bias = case((0, 3, 16), BF16)
    y = layer_norm(x, weight, bias, EPS)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 3, 16)
    assert torch.equal(weight.grad, torch.zeros(16)) and torch.equal(bias.grad, torch.zeros(16))


def test_only_the_gradients_asked_for() -> None:
    for frozen in range(3):
        inputs = case((4, 16), FP32)
        full = torch.autograd.grad(layer_norm(*inputs, EPS).square().sum(), inputs)
        inputs[frozen].requires_grad_(False)
        layer_norm(*inputs, EPS).square().sum().backward()
        assert inputs[frozen].grad is None
        for i, tensor in enumerate(inputs):
            assert i == frozen or torch.equal(tensor.grad, full[i])
    with torch.no_grad():
        assert not layer_norm(*inputs, EPS).requires_grad


def test_shapes_without_numbers() -> None:
    """A dry run that counts memory must not reach the kernel."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        inputs = case((4, 8), BF16)
        layer_norm(*inputs, EPS).sum().backward()
    assert [t.grad.shape for t in inputs] == [t.shape for t in inputs]


def test_repeats_bit_for_bit() -> None:
    inputs = case((61, 24), BF16)
    first, second = (torch.autograd.grad(layer_norm(*inputs, EPS).float().square().sum(), inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, for inf - inf
def test_nan_and_inf_stay_in_their_row() -> None:
    x, weight, bias = case((4, 16), FP32)
    with torch.no_grad():
        x[1, 3], x[2, 0] = float("nan"), float("inf")
        y = layer_norm(x, weight, bias, EPS)
    assert y[[0, 3]].isfinite().all() and y[[1, 2]].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=torch.ones(2, 8193)), "widths from 1 to 8192, not 8193"),
        (dict(x=torch.ones(2, 0)), "not 0"),
        (dict(x=torch.tensor(1.0)), "not 0"),
        (dict(x=torch.ones(2, 4, dtype=torch.float64)), "not x in torch.float64"),
        (dict(x=torch.ones(2, 4), weight=torch.ones(4, dtype=torch.int64)), "not weight in torch.int64"),
        (dict(x=torch.ones(2, 4), weight=torch.ones(5)), r"weight must have the shape \(4,\), not \(5,\)"),
        (dict(x=torch.ones(2, 4), bias=torch.ones(1, 4)), "bias must have the shape"),
        (dict(x=torch.ones(2, 4), bias=torch.ones(4, device="meta")), "bias is on meta, x on cpu"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_norm(**change)


def test_compiles_without_a_graph_break() -> None:
    compiled = torch.compile(layer_norm, backend="aot_eager", fullgraph=True, dynamic=True)
    check(compiled, *case((5, 48), BF16))
    check(compiled, *case((9, 48), BF16))
    check(compiled, *case((2, 48), FP32, weight=None, bias=None))


def test_operators_are_well_formed() -> None:
    x, weight, bias = case((3, 16), FP32)
    torch.library.opcheck(module._forward_op, (x, weight, bias, EPS))
    torch.library.opcheck(module._forward_op, (x, None, None, EPS))


MUTANTS = {
    "none": ("    if HAS_B:\n", "\n    if HAS_B:\n"),
    "bias dropped": ("HAS_B=bias is not None", "HAS_B=False"),
    "weight dropped": (
        "                HAS_W=weight is not None,\n                HAS_B",
        "                HAS_W=False,\n                HAS_B",
    ),
    "eps ignored": ("/ width + eps)", "/ width + 1e-5)"),
    "eps outside the root": (
        "1.0 / tl.sqrt(row_sum(centred * centred) / width + eps)",
        "1.0 / (tl.sqrt(row_sum(centred * centred) / width) + eps)",
    ),
    "mean in low precision": (
        "    mean = row_sum(x) / width",
        "    mean = (row_sum(x) / width).to(tl.bfloat16).to(tl.float32)",
    ),
    "sample variance": ("row_sum(centred * centred) / width", "row_sum(centred * centred) / (width - 1)"),
    "padding counted": ("centred = tl.where(inside, x - mean, 0.0)", "centred = x - mean"),
    "variance forgotten in dx": ("g - x_hat * by_variance - by_mean", "g - by_mean"),
    "mean forgotten in dx": ("g - x_hat * by_variance - by_mean", "g - x_hat * by_variance"),
    "weight forgotten in dx": ("g = dy * w", "g = dy"),
    "rstd forgotten in dx": ("- by_mean) * rstd", "- by_mean)"),
    "dw without x_hat": ("dw += dy * x_hat", "dw += dy"),
    "last program's sums lost": ("return dx, add_up(partial)", "return dx, add_up(partial[:, :-1])"),
    "sums of a program over each other": ("return (program * ROWS + ", "return (program * ROWS + 0 * "),
    "rows skipped": ("tl.num_programs(0) * ROWS, num", "tl.num_programs(0) * ROWS * 2, num"),
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, FP32) for name in MUTANTS]
    + [(name, BF16) for name in ("none", "bias dropped", "mean in low precision", "mean forgotten in dx")],
    ids=str,
)
def test_check_finds_planted_faults(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    mutant = triton_mutant(module, *MUTANTS[name], tmp_path).layer_norm
    # Rows that a program has at a time are several only where they are short, and of an aligned width.
    inputs = case((200, 16 if name == "sums of a program over each other" else 24), dtype)
    if name == "none":
        check(mutant, *inputs)
        return
    with pytest.raises(AssertionError):
        check(mutant, *inputs)
