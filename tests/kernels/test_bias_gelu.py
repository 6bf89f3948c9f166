"""Bias + GELU: the C kernel, PyTorch's meaning of it, and Triton's compiled for GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bias_gelu_check import case, check
from gpu_code import at_once, compile_for, instructions, late_loads, spills, time_for
from mutants import c_mutant, triton_mutant

from composer_speedups.kernels import bias_gelu as module
from composer_speedups.kernels import bias_gelu_triton as cuda
from composer_speedups.kernels.bias_gelu import bias_gelu
from composer_speedups.kernels.launch import DTYPES

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
@pytest.mark.parametrize("width", [1, 31, 64, 300, 1024])
def test_matches_float64(by: str, dtype: torch.dtype, width: int) -> None:
    check(bias_gelu, case((7, 9, width), dtype))


@pytest.mark.parametrize("by", BY, indirect=True)
@pytest.mark.parametrize("rows", [1, 33, 2000])  # one chunk, several, the most
def test_any_number_of_rows(by: str, rows: int) -> None:
    check(bias_gelu, case((rows, 40), BF16))


@pytest.mark.parametrize("by", BY, indirect=True)
def test_bias_of_any_kind(by: str) -> None:
    for bias in (*DTYPES, FP64):
        check(bias_gelu, case((9, 48), BF16, bias))


@pytest.mark.parametrize("by", BY, indirect=True)
def test_any_strides(by: str) -> None:
    x, bias = case((6, 10, 32), FP32)
    for view in (x[:, ::2], x.transpose(0, 1), x[..., ::2], x[:1].expand(4, 10, 32), x[0, 0]):
        check(bias_gelu, [view.detach().requires_grad_(), bias[: view.shape[-1]].detach().requires_grad_()])
    bias_gelu(x, bias).sum().backward()  # sum sends an expanded gradient, strides 0
    expected = module.reference_bias_gelu(x, bias)
    torch.testing.assert_close(bias.grad, torch.autograd.grad(expected.sum(), bias)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by", BY, indirect=True)
def test_no_rows(by: str) -> None:
    x, bias = case((0, 3, 16), BF16)
    bias_gelu(x, bias).sum().backward()
    assert x.grad.shape == (0, 3, 16) and torch.equal(bias.grad, torch.zeros(16))


@pytest.mark.parametrize("by", BY, indirect=True)
def test_far_tails_and_non_finite_values(by: str) -> None:
    far = 3e38 if by == "C" else 1e30
    x = torch.tensor([[-far, -40.0, -20.0, 15.0, far, float("inf"), float("nan")]], requires_grad=True)
    y = bias_gelu(x, torch.zeros(7))[0]
    assert torch.equal(y[3:5], x[0, 3:5]) and not y[5:].isfinite().any()  # of infinity PyTorch may make NaN
    assert y[:3].abs().amax() < 1e-37, "to -20 * Phi(-20) = 6e-88 and below: no number of float32"
    (slope,) = torch.autograd.grad(y[:5].sum(), x)
    torch.testing.assert_close(slope[0, :5], torch.tensor([0.0, 0, 0, 1, 1]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("by", BY, indirect=True)
def test_only_the_gradients_asked_for(by: str) -> None:
    for frozen in range(2):
        inputs = case((4, 16), FP32)
        full = torch.autograd.grad(bias_gelu(*inputs).square().sum(), inputs)
        inputs[frozen].requires_grad_(False)
        bias_gelu(*inputs).square().sum().backward()
        assert inputs[frozen].grad is None
        assert torch.equal(inputs[1 - frozen].grad, full[1 - frozen])


def test_threads_do_not_change_the_result() -> None:
    inputs, before, results = case((3000, 65), BF16), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = bias_gelu(*inputs)
            results.append((y, *torch.autograd.grad(y.float().square().sum(), inputs)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_saves_the_product_alone() -> None:
    inputs, saved = case((64, 32), BF16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        bias_gelu(*inputs)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in inputs]


def test_compiles_without_a_graph_break() -> None:
    compiled = torch.compile(bias_gelu, backend="aot_eager", fullgraph=True, dynamic=True)
    check(compiled, case((5, 48), BF16))
    check(compiled, case((9, 48), BF16))
    torch._dynamo.reset()


@pytest.mark.parametrize("by", BY, indirect=True)
def test_operators_are_well_formed(by: str) -> None:
    torch.library.opcheck(module._forward_op, tuple(case((3, 16), FP32)))


def test_shapes_without_numbers() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        inputs = case((4, 8), BF16)
        bias_gelu(*inputs).sum().backward()
    assert [t.grad.shape for t in inputs] == [t.shape for t in inputs]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 4, dtype=torch.int64)}, "x is in torch.int64"),
        ({"bias": torch.ones(4, dtype=torch.int64)}, "bias is in torch.int64"),
        ({"bias": torch.ones(5)}, r"bias must have the shape \(4,\) on cpu, not \(5,\)"),
        ({"x": torch.ones(2, 0)}, r"bias must have the shape \(0,\)"),
        ({"bias": torch.ones(4, device="meta")}, "on meta"),
        ({"x": torch.ones(2, 4, device="meta"), "bias": torch.ones(4, device="meta")}, "or on the CPU, not on meta"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bias_gelu(**({"x": torch.ones(2, 4), "bias": torch.ones(4)} | change))


MUTANTS = {
    "none": ("db[i] += g", "db[i]  += g"),
    "bias dropped in forward": ("h = widen_##TYPE(in[i]) + bias[i];", "h = widen_##TYPE(in[i]);"),
    "bias dropped in backward": ("h = bias[i] + widen_##TYPE(in[i]);", "h = widen_##TYPE(in[i]);"),
    "approximation by tanh": (
        "return h < 0.0f ? tail : 1.0f - tail;",
        "return 1.0f / (1.0f + __builtin_expf(-1.5957691216f * (h + 0.044715f * h * h * h)));",
    ),
    "tails swapped": ("h < 0.0f ? tail", "h > 0.0f ? tail"),
    "a coefficient of the tail off in the fifth digit": ("0.7107068705f", "0.7107168705f"),
    "a coefficient of the power off in the third digit": ("2.40226462e-1f", "2.41226462e-1f"),
    "density without h": ("0.3989422804f * h, density", "0.3989422804f, density"),
    "density forgotten": ("slope = TIMES_PLUS(0.3989422804f * h, density, slope);", "; "),
    "sums of the last row only": ("db[i] += g", "db[i] = g"),
    "rows skipped": ("r < rows * (c + 1) / chunks", "r + 1 < rows * (c + 1) / chunks"),
}


@pytest.mark.skipif(module.native() is None, reason="no C compiler on this machine")
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("name", "dtype"), [(n, FP32) for n in MUTANTS] + [("none", BF16), ("tails swapped", BF16)])
def test_check_finds_planted_faults_in_c(name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch) -> None:
    c_mutant(module, *MUTANTS[name], tmp_path, monkeypatch)
    inputs = case((200, 25), dtype)
    if name == "none":
        return check(bias_gelu, inputs)
    with pytest.raises(AssertionError):
        check(bias_gelu, inputs)


# --- Triton -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["forward_kernel", "backward_kernel"])
def test_compiles_for_a_gpu(name: str, dtype: torch.dtype, capability: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert not spills(compiled(capability, name, dtype), tmp_path)


@pytest.mark.parametrize(("name", "moved"), [("forward_kernel", 4), ("backward_kernel", 6)])
def test_memory_is_what_it_waits_for(name: str, moved: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = compiled(90, name, torch.bfloat16, ALIGNED)
    assert instructions(code, tmp_path, rows_of_a_tile(name) * cuda._COLS) < time_for(moved)


ALIGNED = ("x_stride", "dy_stride", "width")


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_tile_waits_for_memory_once(dtype: torch.dtype, tmp_path: Path, monkeypatch) -> None:
    """The next tile is on its way while one is computed, both parts of it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert not late_loads(compiled(90, "backward_kernel", dtype, ALIGNED), tmp_path)


def test_a_tile_that_waits_twice_is_seen(tmp_path: Path, monkeypatch) -> None:
    """Loaded in the turn that needs it, the gradient is loaded when the slope is computed."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    takes = "        x, dy = next_x, next_dy\n"
    source = Path(cuda.__file__).read_text()
    loads = source.partition(takes)[2].partition("        h = x.to")[0]
    assert loads.count("_load(") == 2
    needed = loads.replace("next_", "").replace("row + step", "row")
    mutant = triton_mutant(cuda, takes + loads, needed, tmp_path)
    assert late_loads(compiled(90, "backward_kernel", BF16, ALIGNED, mutant), tmp_path)


@pytest.mark.parametrize(("dtype", "aligned"), [(BF16, ALIGNED), (BF16, ()), (FP32, ALIGNED), (FP32, ())])
def test_all_programs_run_at_once(dtype: torch.dtype, aligned: tuple[str, ...], tmp_path: Path, monkeypatch) -> None:
    """Backward: some that begin when the others are done would take as long again."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    room = at_once(compiled(90, "backward_kernel", dtype, aligned), tmp_path)
    columns = 3072 // cuda._COLS
    programs = cuda._programs(1 << 20, columns, dtype.itemsize, of_device=132)
    assert programs * columns / 132 <= room
    assert not aligned or programs * columns / 132 > room - 1


def rows_of_a_tile(name: str) -> int:
    return cuda._ROWS_FORWARD if name == "forward_kernel" else cuda._ROWS_BACKWARD


def compiled(capability: int, name: str, dtype: torch.dtype, aligned: tuple[str, ...] = (), module=cuda):
    constants = {"ROWS": rows_of_a_tile(name), "COLS": cuda._COLS}
    dtypes = dict.fromkeys(("bias", "dbias"), torch.float32) | dict.fromkeys(("x", "y", "dx", "dy"), dtype)
    return compile_for(capability, getattr(module, name), dtypes, constants, cuda._WARPS, aligned)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 31, 256, 300, 3072, 4096])
def test_matches_float64_on_the_gpu(width: int, dtype: torch.dtype) -> None:
    check(bias_gelu, case((70, 9, width), dtype, device="cuda"))


@pytest.mark.gpu
def test_compiled_model_on_the_gpu() -> None:
    compiled = torch.compile(bias_gelu, fullgraph=True, dynamic=True)
    for rows in (64, 2000):
        check(compiled, case((rows, 3072), torch.bfloat16, device="cuda"))
    torch._dynamo.reset()


@pytest.mark.gpu
def test_repeats_bit_for_bit_on_the_gpu() -> None:
    inputs = case((5000, 3072), torch.bfloat16, device="cuda")
    first, second = (torch.autograd.grad(bias_gelu(*inputs).float().square().sum(), inputs) for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 24 << 30:
        pytest.skip("needs a GPU with 24 GiB of memory")
    x = torch.zeros(2**31 // 4096 + 8, 4096, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(4096, device="cuda")
    bias = torch.randn(4096, device="cuda")
    torch.testing.assert_close(bias_gelu(x, bias)[-1], bias_gelu(x[-1:], bias)[0], rtol=0, atol=0)
