"""The kernel without a GPU, in Triton's interpreter and as compiled for one: `test_interpreted.py` runs this file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dropout_add_norm_check import EPS, case, check
from mutants import triton_mutant

from composer_speedups.kernels import dropout_add_norm as module
from composer_speedups.kernels import dropout_add_norm_triton as cuda
from composer_speedups.kernels.dropout_add_norm import dropout_add_norm, dropout_add_norm_twice
from composer_speedups.kernels.fast_dropout import keep_by_torch
from composer_speedups.kernels.launch import DTYPES

# Triton 3.3's interpreter turns arrays of one element into scalars in a way that NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def test_is_interpreted() -> None:
    assert module._triton(torch.ones(1)) is cuda and cuda.interpreted()


# Wide rows take seconds each: of these every dtype, and dropout and none of it, but not all of them together.
WIDE = [(768, 0.0, FP16), (768, 0.3, BF16), (768, 0.3, FP32), (769, 0.0, BF16), (769, 0.3, FP16), (769, 0.0, FP32)]
# Each width and each dtype with dropout and without, but not each pair of them.
NARROW = [
    (width, (0.0, 0.3)[(i + j) % 2], dtype) for i, width in enumerate([1, 2, 31, 64]) for j, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("width", "p", "dtype"), NARROW + WIDE, ids=str)
def test_matches_float64(width: int, p: float, dtype: torch.dtype) -> None:
    rows = 7 if width < 100 else 2  # of which three programs have a row each at a time
    for x_bias in (None, FP32):
        check(dropout_add_norm, case((rows, 3, width), dtype, x_bias=x_bias), p)


def test_the_widest_row() -> None:
    for x_bias in (None, FP32):  # which is loaded for each row there
        check(dropout_add_norm, case((3, 8192), BF16, x_bias=x_bias), 0.1)


@pytest.mark.parametrize("rows", [1, 33, 200])  # fewer rows than a block, one over, several loops
def test_any_number_of_rows(rows: int) -> None:
    check(dropout_add_norm, case((rows, 40), BF16, x_bias=FP32), 0.1)


def test_weight_and_biases_of_any_kind() -> None:
    for weight, bias, x_bias in ((BF16, BF16, FP16), (FP16, FP32, BF16)):
        check(dropout_add_norm, case((9, 48), FP32, weight, bias, x_bias=x_bias), 0.1)


def test_any_strides() -> None:
    x, residual, weight, bias = case((6, 10, 32), FP32)
    for view in (lambda t: t[:, ::2], lambda t: t.transpose(0, 1), lambda t: t[..., ::2], lambda t: t[0, 0]):
        inputs = [view(t).detach().requires_grad_() for t in (x, residual)]
        width = inputs[0].shape[-1]
        check(dropout_add_norm, [*inputs, *(t[:width].detach().requires_grad_() for t in (weight, bias))], 0.3)


def check_two_readers(dtype: torch.dtype, p: float = 0.3) -> None:
    """Bit for bit what autograd gives that adds up their gradients; the interpreter truncates to bf16, hence whole
    numbers there, which no sum rounds."""
    shape = (25, 24)  # two or three turns of a program's loop, the last one of a single row
    inputs = case(shape, dtype, x_bias=FP32)
    arguments = (*inputs[:4], p, EPS, inputs[4])
    given = [(torch.randint(-4, 5, shape) if dtype == BF16 else torch.randn(shape)).to(dtype) for _ in "ab"]
    torch.manual_seed(5)
    y = dropout_add_norm(*arguments)
    torch.manual_seed(5)
    first, second = dropout_add_norm_twice(*arguments)
    assert first.equal(y) and second.equal(y) and first.data_ptr() == second.data_ptr()
    for asked in ((0, 1), (0,), (1,)):
        outputs, gradients = zip(*(((first, second)[i], given[i]) for i in asked), strict=True)
        found = torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)
        wanted = torch.autograd.grad(y, inputs, sum(gradients), retain_graph=True)
        assert all(a.equal(b) for a, b in zip(found, wanted, strict=True)), asked


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_readers(dtype: torch.dtype) -> None:
    check_two_readers(dtype)
    check_two_readers(dtype, 0.0)


def test_gradients_of_two_readers_of_any_strides() -> None:
    inputs = case((12, 6, 16), BF16)
    given = [torch.randint(-4, 5, shape).to(BF16) for shape in ((6, 12, 16), (1, 16))]
    given = [given[0].transpose(0, 1), given[1].expand(12, 6, 16)]
    found = torch.autograd.grad(dropout_add_norm_twice(*inputs), inputs, given)
    wanted = torch.autograd.grad(dropout_add_norm(*inputs), inputs, given[0] + given[1])
    assert all(a.equal(b) for a, b in zip(found, wanted, strict=True))


def test_no_rows() -> None:
    inputs = case((0, 3, 16), BF16, x_bias=FP32)
    dropout_add_norm(*inputs[:4], 0.1, x_bias=inputs[4]).sum().backward()
    assert inputs[0].grad.shape == (0, 3, 16) and not any(t.grad.any() for t in inputs[2:])


@pytest.mark.parametrize(
    ("keys", "dropped"),
    [((0, 0), 32768), ((2**32 - 1, 2**32 - 1), 1), ((0x9B1D33F7, 0x00C0FFEE), 6554), ((0xC0FFEE, 0), 65535)],
)
@pytest.mark.parametrize("shape", [(41, 33), (41, 34), (9, 600)])  # odd, even, and in several chunks
def test_the_mask_is_that_of_fast_dropout(shape: tuple[int, int], keys: tuple[int, int], dropped: int) -> None:
    x, residual, weight, bias = (t.detach() for t in case(shape, FP32))
    seeds = torch.tensor(keys)
    _, mean, rstd = cuda.forward(x, residual, weight, bias, seeds, dropped, EPS)
    dx, _, _ = cuda.backward(torch.randn_like(x), x, residual, weight, mean, rstd, seeds, dropped)
    assert torch.equal(dx.flatten() != 0, keep_by_torch(x.numel(), keys, dropped))


def test_repeats_bit_for_bit() -> None:
    inputs, results = case((61, 24), BF16), []
    for _ in range(2):
        torch.manual_seed(2)
        results.append(torch.autograd.grad(dropout_add_norm(*inputs, 0.1, EPS).float().square().sum(), inputs))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_compiles_without_a_graph_break() -> None:
    compiled = torch.compile(dropout_add_norm, backend="aot_eager", fullgraph=True, dynamic=True)
    check(compiled, case((5, 48), BF16), 0.25)
    check(compiled, case((9, 48), BF16, x_bias=FP32), 0.25)


def test_operators_are_well_formed() -> None:
    inputs, seeds = case((3, 16), FP32), torch.tensor([3, 4])
    torch.library.opcheck(module._forward_op, (*inputs, seeds, 6554, EPS, None))
    torch.library.opcheck(module._forward_op, (*inputs, None, 0, EPS, None))
    torch.library.opcheck(module._forward_op, (*inputs, seeds, 6554, EPS, torch.ones(16, requires_grad=True)))


MUTANTS = {
    "none": ("dw += dy * z_hat", "dw  += dy * z_hat"),
    "bias dropped": ("rstd * w + b", "rstd * w"),
    "weight dropped": ("rstd * w + b", "rstd + b"),
    "eps ignored": ("normalise(z, inside, WIDTH, EPS)", "normalise(z, inside, WIDTH, 1e-5)"),
    "padding counted": ("normalise(z, inside, WIDTH, EPS)", "normalise(z, inside | (z == 0.0), WIDTH, EPS)"),
    "scale forgotten": ("BLOCK), x, 0.0) * scale + residual", "BLOCK), x, 0.0) + residual"),
    "bias of x forgotten": (
        "if BIASED:\n        x += load_for_each_row(x_bias_ptr",
        "if BIASED:\n        x += 0 * load_for_each_row(x_bias_ptr",
    ),
    "bias of x forgotten in backward": ("x += x_bias", "x += 0 * x_bias"),
    "dx_bias stored over dw": ("place + 2 * all_sums", "place + 0 * all_sums"),
    "dx_bias of the last rows only": ("dx_bias += dz", "dx_bias = dz"),
    "scale forgotten in dx": ("tl.where(keep, dz * scale, 0.0)", "tl.where(keep, dz, 0.0)"),
    "mask forgotten in dx": ("tl.where(keep, dz * scale, 0.0)", "(dz * scale)"),
    "mask forgotten in backward's sum": ("z = tl.where(keep, x, 0.0) * scale", "z = x * scale"),
    "same bits in every row": ("row.to(tl.uint32) * (WIDTH // 2)", "row.to(tl.uint32) * 0"),
    "same bits in every row of odd width": ("element = row * WIDTH", "element = row * 0"),
    "halves swapped": (
        "(h & 0xFFFF) >= DROPPED, (h >> 16) >= DROPPED",
        "(h >> 16) >= DROPPED, (h & 0xFFFF) >= DROPPED",
    ),
    "halves swapped of odd width": ("(element & 1) == 0", "(element & 1) == 1"),
    "halves without sign": ("(h >> 16) ^ 0x80008000", "(h >> 16) ^ 0"),
    "dw without z_hat": ("dw += dy * z_hat", "dw += dy"),
    "weight forgotten in dz": ("through_norm(dy * w,", "through_norm(dy,"),
    "last program's sums lost": ("add_up(partial)", "add_up(partial[:, :-1])"),
    "db stored over dw": ("tl.store(place + all_sums, db", "tl.store(place + 0 * all_sums, db"),
    "sums of a program over each other": ("own_sums(program, WIDTH", "own_sums(program, WIDTH * 0"),
    "rows skipped": ("tl.num_programs(0) * ROWS, num", "tl.num_programs(0) * ROWS * 2, num"),
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("name", "dtype"), [(n, FP32) for n in MUTANTS] + [("none", BF16), ("bias dropped", BF16)])
def test_check_finds_planted_faults(name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch) -> None:
    mutant = triton_mutant(cuda, *MUTANTS[name], tmp_path)
    monkeypatch.setattr(module, "_triton", lambda x: mutant)
    inputs = case((200, 25 if name.endswith("odd width") else 24), dtype, x_bias=FP32)
    if name == "none":
        return check(dropout_add_norm, inputs, 0.3)
    with pytest.raises(AssertionError):
        check(dropout_add_norm, inputs, 0.3)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+ more.to(tl.float32)", "+ 0 * more.to(tl.float32)"),
        ("more_ptr + row * WIDTH", "more_ptr + 0 * row * WIDTH"),
        ("(dy + more.to(tl.float32)).to(dy_ptr.dtype.element_ty).to(tl.float32)", "dy + more.to(tl.float32)"),
    ],
)
def test_check_finds_planted_faults_of_two_readers(old: str, new: str, tmp_path: Path, monkeypatch) -> None:
    mutant = triton_mutant(cuda, old, new, tmp_path)
    monkeypatch.setattr(module, "_triton", lambda x: mutant)
    with pytest.raises(AssertionError):
        check_two_readers(FP16)
