"""Dropout + add + LayerNorm: the C kernel, PyTorch's meaning of it, and Triton's compiled for GPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from dropout_add_norm_check import EPS, case, check, kept
from gpu_code import at_once, compile_for, copied_ahead, instructions, late_loads, spills, time_for
from mutants import c_mutant
from packaging.version import Version
from test_fast_dropout_kernel import check_bits
from torch.utils.checkpoint import checkpoint

from composer_speedups.kernels import dropout_add_norm as module
from composer_speedups.kernels import dropout_add_norm_triton as cuda
from composer_speedups.kernels.dropout_add_norm import dropout_add_norm
from composer_speedups.kernels.launch import DTYPES, backward_tile_of, most_programs, tile_of

STRIDES = ("x_stride", "residual_stride", "dy_stride")
WIDTHS = [16, 256, 384, 512, 640, 768, 1024, 2048, 4096, 8192, 769, 1000]  # the last two are not aligned
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
BY = {"C": (FP32, BF16), "PyTorch": (FP32, BF16, FP16, FP64)}
BOTH = [pytest.param(by, dtype, id=f"{by} {dtype}") for by, dtypes in BY.items() for dtype in dtypes]


@pytest.fixture
def by(request, monkeypatch) -> str:
    if request.param == "PyTorch":
        monkeypatch.setattr(module, "native", lambda: None)
    elif module.native() is None:
        pytest.skip("no C compiler on this machine")
    return request.param


# --- the CPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("by", "dtype"), BOTH, indirect=["by"])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("width", [1, 2, 31, 64, 256, 769])  # odd widths: rows begin in the middle of a word of bits
@pytest.mark.parametrize("x_bias", [None, FP32], ids=["no x_bias", "x_bias"])
def test_matches_float64(by: str, dtype: torch.dtype, p: float, width: int, x_bias: torch.dtype | None) -> None:
    check(dropout_add_norm, case((7, 9, width), dtype, x_bias=x_bias), p)


@pytest.mark.parametrize(("by", "spread"), [("C", 0.0), ("C", 1e-6), ("PyTorch", 0.0)], indirect=["by"])
@pytest.mark.parametrize("width", [5, 31, 256, 768])
def test_rows_that_are_nearly_constant(by: str, width: int, spread: float) -> None:
    """Their mean is rounded by more than they deviate from it, and the norm makes that large: eps is 1e-12 as BERT's.

    So near, float32 has its numbers 2.4e-7 apart: a mean that is stored for backward is off by half of that. PyTorch's
    own norm, which its operations are given to, is right only where they do not deviate at all.
    """
    torch.manual_seed(0)
    x = torch.full((9, width), 3.7) + spread * torch.randn(9, width)
    inputs = [x, torch.zeros_like(x), torch.randn(width), torch.randn(width)]
    expected = torch.nn.functional.layer_norm(x.double(), (width,), *(t.double() for t in inputs[2:]), 1e-12)
    found = dropout_add_norm(*inputs, 0.0, 1e-12)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by", BY, indirect=True)
@pytest.mark.parametrize("rows", [1, 33, 2000])  # one chunk, several, the most
def test_any_number_of_rows(by: str, rows: int) -> None:
    for x_bias in (None, FP32):
        check(dropout_add_norm, case((rows, 40), BF16, x_bias=x_bias), 0.1)


@pytest.mark.parametrize("by", BY, indirect=True)
def test_weight_and_biases_of_any_kind(by: str) -> None:
    for weight, bias, x_bias in ((BF16, BF16, FP16), (FP16, FP32, BF16)):
        check(dropout_add_norm, case((9, 48), BF16, weight, bias, x_bias=x_bias), 0.1)


@pytest.mark.parametrize("by", BY, indirect=True)
def test_strides_do_not_change_the_mask(by: str) -> None:
    x, residual, weight, bias = case((6, 10, 32), FP32)
    for view in (
        lambda t: t[:, ::2],
        lambda t: t.transpose(0, 1),
        lambda t: t[..., ::2],
        lambda t: t[:1].expand(4, 10, 32),
    ):
        inputs = [view(t).detach().requires_grad_() for t in (x, residual)]
        width = inputs[0].shape[-1]
        check(dropout_add_norm, [*inputs, *(t[:width].detach().requires_grad_() for t in (weight, bias))], 0.3)
    dropout_add_norm(x, residual, weight, bias, 0.3).sum().backward()  # sum sends an expanded gradient, strides 0
    torch.testing.assert_close(bias.grad, torch.full((32,), 60.0), rtol=0, atol=0)


@pytest.mark.parametrize("by", BY, indirect=True)
def test_no_rows(by: str) -> None:
    inputs = case((0, 3, 16), BF16, x_bias=FP32)
    y = dropout_add_norm(*inputs[:4], 0.1, x_bias=inputs[4])
    y.sum().backward()
    assert y.shape == inputs[0].grad.shape == (0, 3, 16)
    assert not any(t.grad.any() for t in inputs[2:])


@pytest.mark.parametrize("by", BY, indirect=True)
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_only_the_gradients_asked_for(by: str, p: float) -> None:
    def run(inputs) -> torch.Tensor:
        torch.manual_seed(1)
        return dropout_add_norm(*inputs[:4], p, x_bias=inputs[4]).square().sum()

    for frozen in range(5):
        inputs = case((4, 16), FP32, x_bias=FP32)
        full = torch.autograd.grad(run(inputs), inputs)
        inputs[frozen].requires_grad_(False)
        run(inputs).backward()
        assert inputs[frozen].grad is None
        assert all(i == frozen or torch.equal(t.grad, full[i]) for i, t in enumerate(inputs))


@pytest.mark.parametrize("by", BY, indirect=True)
def test_masks_are_independent_and_of_the_right_rate(by: str) -> None:
    residual, dy = torch.randn(2, 1024, 256)
    x, weight, bias = torch.ones(1024, 256), torch.ones(256), torch.zeros(256)

    def keep(size: int, keys, dropped: int) -> torch.Tensor:
        seeds = torch.tensor(keys)
        _, mean, rstd = module._forward(x, residual, weight, bias, seeds, dropped, EPS)
        dx, _, _ = module._backward(dy, x, residual, weight, mean, rstd, seeds, dropped)
        assert size == dx.numel()
        return dx.flatten() != 0

    check_bits(keep)


def test_expectation_is_the_input() -> None:
    """Over many masks dropout(x) is x in the mean: with a residual that outweighs it, the norm is nearly linear."""
    x, residual = torch.full((4096, 64), 1e-2), torch.randn(1, 64).expand(4096, 64) * 10
    weight, bias = torch.ones(64), torch.zeros(64)
    plain = dropout_add_norm(x, residual, weight, bias)
    mean = dropout_add_norm(x, residual, weight, bias, 0.5).double().mean(0)
    # Each term deviates by 1e-2 / 10 (x over the rows' deviation, of at least 7): 5 deviations of the mean of 4096.
    assert (mean - plain[0]).abs().max() < 5 * 1e-2 / 7 / 4096**0.5 + 1e-6


def test_threads_do_not_change_the_result() -> None:
    inputs, before, results = case((3000, 65), BF16, x_bias=FP32), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(1)
            y = dropout_add_norm(*inputs[:4], 0.1, x_bias=inputs[4])
            results.append((y, *torch.autograd.grad(y.float().square().sum(), inputs)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_saves_no_mask_and_no_sum() -> None:
    inputs, saved = case((64, 32), BF16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        dropout_add_norm(*inputs, 0.1)
    large = [t for t in saved if t.numel() > 64]
    assert [t.data_ptr() for t in large] == [t.data_ptr() for t in inputs[:2]]


def test_machine_without_compiler_draws_the_same_masks() -> None:
    code = (
        "import torch; from composer_speedups.kernels.dropout_add_norm import *; torch.manual_seed(5);"
        "x = torch.ones(9, 33, requires_grad=True); r = torch.linspace(0, 1, 33).expand(9, 33);"
        "dropout_add_norm(x, r, torch.ones(33), torch.ones(33), 0.3)[:, :5].sum().backward();"
        "print(native() is None, x.grad.flatten().nonzero().sum().item())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PATH": "", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    keep = kept(torch.ones(9, 33), 0.3, 5)
    assert run.stdout.split() == ["True", str(keep.flatten().nonzero().sum().item())], run.stderr


def test_gradient_checkpointing_draws_the_same_mask() -> None:
    inputs, gradients = case((8, 16), FP32, x_bias=FP32), []
    for run in (dropout_add_norm, lambda *a: checkpoint(dropout_add_norm, *a, use_reentrant=False)):
        torch.manual_seed(6)
        gradients.append(torch.autograd.grad(run(*inputs[:4], 0.5, EPS, inputs[4]).square().sum(), inputs))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_calls_differ_and_the_seed_repeats_them() -> None:
    inputs = case((64, 64), FP32)
    torch.manual_seed(8)
    a, b = (dropout_add_norm(*inputs, 0.5) for _ in "ab")
    torch.manual_seed(8)
    assert torch.equal(dropout_add_norm(*inputs, 0.5), a) and not torch.equal(a, b)
    state = torch.get_rng_state()
    dropout_add_norm(*inputs, 0.0)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn where nothing is dropped"


def test_compiles_without_a_graph_break() -> None:
    compiled = torch.compile(dropout_add_norm, backend="aot_eager", fullgraph=True, dynamic=True)
    check(compiled, case((5, 48), BF16), 0.25)
    check(compiled, case((9, 48), BF16), 0.25)
    check(compiled, case((2, 48), FP32), 0.0)
    check(compiled, case((5, 48), BF16, x_bias=FP32), 0.25)
    check(compiled, case((9, 48), BF16, x_bias=FP32), 0.0)
    torch._dynamo.reset()


@pytest.mark.parametrize("by", BY, indirect=True)
def test_operators_are_well_formed(by: str) -> None:
    inputs, seeds = case((3, 16), FP32), torch.tensor([3, 4])
    torch.library.opcheck(module._forward_op, (*inputs, seeds, 6554, EPS, None))
    torch.library.opcheck(module._forward_op, (*inputs, None, 0, EPS, None))
    torch.library.opcheck(module._forward_op, (*inputs, seeds, 6554, EPS, torch.ones(16, requires_grad=True)))


def test_shapes_without_numbers() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        inputs = case((4, 8), BF16, x_bias=FP32)
        y = dropout_add_norm(*inputs[:4], 0.1, x_bias=inputs[4])
        y.sum().backward()
    assert y.shape == (4, 8) and [t.grad.shape for t in inputs] == [t.shape for t in inputs]


def test_non_finite_values_stay_in_their_row() -> None:
    x, residual, weight, bias = (t.detach() for t in case((4, 16), FP32))
    x[1, 3], residual[2, 0] = float("nan"), float("inf")
    y = dropout_add_norm(x, residual, weight, bias)
    assert y[[0, 3]].isfinite().all() and y[[1, 2]].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": 1.0}, "a probability below 1, not 1.0"),
        ({"p": float("nan")}, "not nan"),
        ({"x": torch.ones(2, 0)}, "must have rows"),
        ({"residual": torch.ones(2, 5)}, r"residual must be as x.*not \(2, 5\)"),
        ({"residual": torch.ones(2, 4, dtype=BF16)}, "not .* in torch.bfloat16"),
        ({"weight": torch.ones(5)}, r"weight must have the shape \(4,\).*not \(5,\)"),
        ({"bias": torch.ones(4, dtype=torch.int64)}, "bias is in torch.int64"),
        ({"x_bias": torch.ones(5)}, r"x_bias must have the shape \(4,\).*not \(5,\)"),
        ({"x": torch.ones(2, 4, device="meta"), "residual": torch.ones(2, 4, device="meta")}, "on meta, not"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    inputs = {"x": torch.ones(2, 4), "residual": torch.ones(2, 4), "weight": torch.ones(4), "bias": torch.ones(4)}
    with pytest.raises(ValueError, match=message):
        dropout_add_norm(**(inputs | change))


MUTANTS = {
    "none": ("float m = mean[r]", "float  m = mean[r]"),
    "bias dropped": ("* weight[i] + bias[i]);", "* weight[i] + 0 * bias[i]);"),
    "eps ignored": ("/ (float)n + eps)", "/ (float)n + 1e-5f + 0 * eps)"),
    "sample variance": ("squares / (float)n", "squares / (float)(n - 1)"),
    "mean in low precision": ("mean[r] = m;", "mean[r] = widen_uint16_t(narrow_uint16_t(m));"),
    "scale forgotten": ("+ x_bias[i]) * scale", "+ x_bias[i]) + 0 * scale"),
    "scale forgotten in dx": ("h[i] * scale : 0.0f", "h[i] + 0 * scale : 0.0f"),
    "mask forgotten in dx": ("lanes[i] >= least ? h[i]", "lanes[i] >= INT16_MIN ? h[i]"),
    "mask of another row": ("(uint32_t)(first / 2)", "(uint32_t)(first)    "),
    "odd rows shifted": ("lanes += odd;", "lanes += 0 * odd;"),
    "rate off by a hundredth": ("lanes[i] >= least ? (widen", "lanes[i] >= least + 655 ? (widen"),
    "residual forgotten": ("\\\n             + widen_##TYPE(residual[i]);", "\\\n+ 0 * widen_##TYPE(residual[i]);"),
    "bias of x forgotten": ("(widen_##TYPE(x[i]) + x_bias[i])", "(widen_##TYPE(x[i]) + 0 * x_bias[i])"),
    "bias of x after the scale": ("x[i]) + x_bias[i]) * scale", "x[i])) * scale + x_bias[i]"),
    "bias of x dropped last": (
        "? (widen_##TYPE(x[i]) + x_bias[i]) * scale :",
        "? (widen_##TYPE(x[i])) * scale : x_bias[i] +",
    ),
    "dx_bias of dresidual": ("dxb[i] += h[i]", "dxb[i] += to_residual[i]"),
    "dx_bias without the last row": ("if (dxb)                      ", "if (dxb && r + 1 < rows)      "),
    "dx_bias stored over": ("dxb[i] += h[i]", "dxb[i] = h[i]"),
    "variance forgotten in dz": ("- h[i] * by_variance", "- 0 * by_variance"),
    "mean forgotten in dz": ("- by_mean) * s;", "- 0 * by_mean) * s;"),
    "weight forgotten in dz": ("(grown * weight[i]", "(grown"),
    "rstd forgotten in dz": ("- by_mean) * s;", "- by_mean);"),
    "dw without z_hat": ("dw[i] += grown * h[i];", "dw[i] += grown;"),
    "rows skipped": ("r < rows * (c + 1) / chunks", "r + 1 < rows * (c + 1) / chunks"),
}


@pytest.mark.elsewhere  # GCC is the same with each
@pytest.mark.skipif(module.native() is None, reason="no C compiler on this machine")
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("name", "dtype"), [(n, FP32) for n in MUTANTS] + [("none", BF16), ("bias dropped", BF16)])
def test_check_finds_planted_faults_in_c(name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch) -> None:
    c_mutant(module, *MUTANTS[name], tmp_path, monkeypatch)
    inputs = case((200, 25), dtype, x_bias=FP32)
    if name == "none":
        return check(dropout_add_norm, inputs, 0.3)
    with pytest.raises(AssertionError):
        check(dropout_add_norm, inputs, 0.3)


# --- Triton -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 769, 8192])
@pytest.mark.parametrize("name", ["forward_kernel", "backward_kernel"])
def test_compiles_for_a_gpu(
    name: str, width: int, dtype: torch.dtype, capability: int, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    aligned = () if width % 16 else STRIDES  # as Triton finds them, when it is called
    assert not spills(compiled(capability, name, width, dtype, False, aligned), tmp_path)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("width", "dtype", "most"), [(768, BF16, 0), (1024, BF16, 0), (1024, FP32, 0), (4096, BF16, 0), (8192, BF16, 64)]
)
def test_a_third_sum_finds_registers(
    width: int, dtype: torch.dtype, most: int, capability: int, tmp_path: Path, monkeypatch
) -> None:
    """That for the bias of x. In the 16 warps that share the widest rows, a few values have no register left."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert spills(compiled(capability, "backward_kernel", width, dtype, True, STRIDES), tmp_path) <= most


@pytest.mark.parametrize(("name", "moved"), [("forward_kernel", 6), ("backward_kernel", 10)])
@pytest.mark.parametrize("width", [768, 1024])
def test_memory_is_what_it_waits_for(name: str, moved: int, width: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = compiled(90, name, width, BF16, True, STRIDES)
    assert instructions(code, tmp_path, tile_for(name, width, 2)["ROWS"] * width) < 0.75 * time_for(moved)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("width", [256, 768, 1024, 4096])
@pytest.mark.parametrize("biased", [False, True])
def test_a_row_waits_for_memory_once(biased: bool, width: int, dtype: torch.dtype, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert not late_loads(compiled(90, "backward_kernel", width, dtype, biased, STRIDES), tmp_path)


def test_a_row_that_waits_twice_is_seen(tmp_path: Path, monkeypatch) -> None:
    """As the kernel was: weight and bias loaded for each row, when `x` is there. Not kept, they still are."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda, "_stay", lambda *_: False)
    assert late_loads(compiled(90, "backward_kernel", 1024, FP32, True, STRIDES), tmp_path) > 4


def test_vectors_loaded_for_each_row_are_not_copied_ahead(tmp_path: Path, monkeypatch) -> None:
    """Weight and bias of x would come from the second cache for every row: where they are not kept, from the first."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda, "_stay", lambda *_: False)
    assert copied_ahead(compiled(90, "backward_kernel", 768, BF16, True, STRIDES, 3)) == (5, 1)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("biased", [False, True])
def test_all_programs_run_at_once(biased: bool, width: int, dtype: torch.dtype, tmp_path: Path, monkeypatch) -> None:
    """Backward: some that begin when the others are done would take as long again. And no fewer at BERT's widths."""
    if (width, dtype, biased) == (384, FP32, True) and Version(triton.__version__) < Version("3.6"):
        pytest.skip("Triton 3.3 gives a thread 132 registers there, 4 too many: one program in 8 begins later")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = compiled(90, "backward_kernel", width, dtype, biased, () if width % 16 else STRIDES)
    tile, of_one = backward_tile_of(width, dtype.itemsize), SimpleNamespace(type="cuda")
    monkeypatch.setattr("composer_speedups.kernels.launch.processors", lambda _: 1)
    monkeypatch.setattr("composer_speedups.kernels.launch.room", lambda _: 32)
    programs = most_programs(tile, cuda._registers(width, tile), of_one)
    assert programs <= at_once(code, tmp_path)
    if biased and dtype == BF16 and width in (768, 1024):
        assert programs == at_once(code, tmp_path) == {768: 8, 1024: 6}[width]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("width", [256, 768, 1024, 4096])
def test_a_second_gradient_costs_no_more_than_its_bytes(
    width: int, dtype: torch.dtype, capability: int, tmp_path: Path, monkeypatch
) -> None:
    """In 16 bits: as many programs at once, one wait for a row, and time enough for the instructions."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = compiled(capability, "backward_kernel", width, dtype, True, STRIDES, more=True)
    tile, of_one = backward_tile_of(width, dtype.itemsize), SimpleNamespace(type="cuda")
    monkeypatch.setattr("composer_speedups.kernels.launch.processors", lambda _: 1)
    monkeypatch.setattr("composer_speedups.kernels.launch.room", lambda _: 32)
    assert most_programs(tile, cuda._registers(width, tile), of_one) <= at_once(code, tmp_path)
    assert not spills(code, tmp_path) and not late_loads(code, tmp_path)
    if capability == 90 and width in (768, 1024):
        assert instructions(code, tmp_path, tile["ROWS"] * width) < 0.75 * time_for(12)


@pytest.mark.parametrize("stages", [3, 4])
@pytest.mark.parametrize("width", [768, 1024])
def test_rows_may_be_loaded_ahead(width: int, stages: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = compiled(90, "backward_kernel", width, BF16, True, STRIDES, stages)
    assert copied_ahead(code) == (5, stages - 2), "x, residual, dy, mean and rstd, and neither weight nor x_bias"
    assert "cp.async" in code.asm["ptx"] and not spills(code, tmp_path)
    moved = backward_tile_of(width, 2)["ROWS"] * width
    assert instructions(code, tmp_path, moved) < 0.9 * time_for(10)


def tile_for(name: str, width: int, itemsize: int) -> dict[str, int]:
    return (tile_of if name == "forward_kernel" else backward_tile_of)(width, itemsize)


def compiled(
    capability: int,
    name: str,
    width: int,
    dtype: torch.dtype,
    biased: bool,
    aligned: tuple[str, ...] = (),
    stages: int = 1,
    more: bool = False,
):
    tile = tile_for(name, width, dtype.itemsize)
    constants = tile | {"WIDTH": width, "BIASED": biased, "DROPPED": 6554}
    warps = constants.pop("num_warps")
    stay = cuda._stay(width, tile, biased)
    constants |= {"EPS": 1e-12} if name == "forward_kernel" else {"STAGES": stages, "STAY": stay, "MORE": more}
    dtypes = dict.fromkeys(("w", "b", "x_bias", "mean", "rstd", "partial"), torch.float32) | {"seeds": torch.int64}
    dtypes |= dict.fromkeys(("x", "residual", "y", "dy", "more", "dx", "dresidual"), dtype)
    return compile_for(capability, getattr(cuda, name), dtypes, constants, warps, aligned)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("width", [1, 2, 31, 64, 768, 769, 4096, 8192])
def test_matches_float64_on_the_gpu(width: int, p: float, dtype: torch.dtype) -> None:
    for x_bias in (None, FP32):
        check(dropout_add_norm, case((70, 9, width), dtype, device="cuda", x_bias=x_bias), p)


@pytest.mark.gpu
def test_compiled_model_on_the_gpu() -> None:
    compiled = torch.compile(dropout_add_norm, fullgraph=True, dynamic=True)
    for rows in (64, 2000):
        inputs = case((rows, 768), BF16, device="cuda", x_bias=FP32)
        check(compiled, inputs, 0.0)
        y = compiled(
            *inputs[:4], 0.1, EPS, inputs[4]
        )  # Inductor has its own random numbers: the rate is what can be told
        (dx,) = torch.autograd.grad(y.float().square().sum(), inputs[0])
        assert abs((dx == 0).float().mean().item() - 0.1) < 5 * (0.09 / dx.numel()) ** 0.5 + 1e-3
        assert not torch.equal(y, compiled(*inputs[:4], 0.1, EPS, inputs[4])), "the same mask in every step"
    torch._dynamo.reset()


@pytest.mark.gpu
def test_repeats_bit_for_bit_on_the_gpu() -> None:
    inputs, results = case((5000, 768), BF16, device="cuda"), []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(torch.autograd.grad(dropout_add_norm(*inputs, 0.1).float().square().sum(), inputs))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
def test_cuda_graphs_draw_new_masks() -> None:
    inputs = [t.detach() for t in case((256, 64), BF16, device="cuda")]
    dropout_add_norm(*inputs, 0.5)  # compiled before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = dropout_add_norm(*inputs, 0.5)
    results = []
    for _ in range(2):
        graph.replay()
        results.append(y.clone())
    assert not torch.equal(*results)


@pytest.mark.gpu
def test_waits_for_nothing_on_the_gpu() -> None:
    inputs = case((256, 64), BF16, device="cuda")
    dropout_add_norm(*inputs, 0.5).sum().backward()
    try:
        torch.cuda.set_sync_debug_mode("error")
        dropout_add_norm(*inputs, 0.5).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
