from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from composer_speedups.kernels import fast_dropout as module
from composer_speedups.kernels.fast_dropout import draw_keys, fast_dropout, fast_dropout_mask, keep_by_torch, realised

KEYS = (0x9B1D33F7, 0x00C0FFEE)
ODD_SIZES = [0, 1, 2, 3, 511, 512, 513, 70_001]  # around a block of the C kernel; several blocks on several threads

needs_compiler = pytest.mark.skipif(module.native() is None, reason="no C compiler on this machine")


@pytest.fixture(params=["C", "PyTorch"])
def bits_by(request, monkeypatch) -> str:
    """Both ways to the same bits."""
    if request.param == "PyTorch":
        monkeypatch.setattr(module, "native", lambda: None)
    elif module.native() is None:
        pytest.skip("no C compiler on this machine")
    return request.param


# --- the bits ---------------------------------------------------------------------------------------------------------


def check_bits(keep) -> None:
    """Fail unless `keep(size, keys, dropped)` gives independent Bernoulli masks of the right rate.

    Each count below is a sum of about n independent terms, so that its standard deviation is known; 5 of them
    are passed by chance once in 1.7 million. Keys are fixed: what passes, passes always.
    """
    n = 1 << 18
    for dropped in (1, 655, 6554, 16384, 32768, 65000):
        share = dropped / 65536
        count = sum(int((~keep(n, (i * 77_777, i * i * 99_991 + 5), dropped)).sum()) for i in range(4))
        deviation = (4 * n * share * (1 - share)) ** 0.5
        assert abs(count - 4 * n * share) < 5 * deviation, f"{count} of {4 * n} dropped, {4 * n * share} expected"
    # How the 16 bits are spread: 256 bins by thresholds. Chi-square with 255 degrees of freedom: mean 255, sd 22.6.
    kept = torch.stack([keep(n, KEYS, dropped).sum() for dropped in range(256, 65536, 256)])
    counts = torch.diff(torch.cat((torch.tensor([n]), kept, torch.tensor([0])))).neg().double()
    chi_square = float(((counts - n / 256) ** 2).sum() / (n / 256))
    assert 255 - 5 * 22.6 < chi_square < 255 + 5 * 22.6, f"chi-square {chi_square} over 256 bins"
    # Independence: of neighbours and of rows of usual widths, and between masks whose keys are close.
    bound = 5 / n**0.5
    one = keep(n, KEYS, 32768).double() * 2 - 1
    for lag in (1, 2, 3, 4, 8, 16, 32, 64, 100, 128, 256, 512, 768, 1024, 4096, 65536):
        r = float((one[:-lag] * one[lag:]).mean())
        assert abs(r) < bound * (n / (n - lag)) ** 0.5, f"lag {lag}: correlation {r}"
    triple = float((one[:-2] * one[1:-1] * one[2:]).mean())
    assert abs(triple) < bound, f"three neighbours: {triple}"
    # Independence of masks: keys drawn one after the other, and first keys that make the words overlap.
    torch.manual_seed(0)
    first, second = KEYS
    for keys in (
        (first, 77),
        (first + 1, second),
        ((first + 0x9E3779B9) % (1 << 32), 78),
        *(draw_keys() for _ in "9" * 9),
    ):
        other = keep(n, keys, 32768).double() * 2 - 1
        for shift in (0, 1, 2):
            r = float((one[shift:] * other[: n - shift]).mean())
            assert abs(r) < 1.01 * bound, f"keys {keys} shifted by {shift}: correlation {r}"


def test_bits_are_independent_and_of_the_right_rate() -> None:
    check_bits(keep_by_torch)


def _mutant(*, mix: bool = True, second_key: bool = True, halves: bool = True, rate: int = 0):
    def keep(size: int, keys, dropped: int) -> torch.Tensor:
        signed = module._signed
        h = torch.arange((size + 1) // 2, dtype=torch.int32) * signed(0x9E3779B9) + signed(keys[0])
        if mix:
            h = (h ^ (h >> 16 & 0xFFFF) ^ (signed(keys[1]) if second_key else 0)) * 0x7FEB352D
            h = (h ^ (h >> 15 & 0x1FFFF)) * signed(0x846CA68B)
            h = h ^ (h >> 16 & 0xFFFF)
        else:
            h = h ^ signed(keys[1])
        lanes = torch.stack((h >> 16 if not halves else h << 16 >> 16, h >> 16), -1).flatten()[:size]
        return lanes >= dropped + rate - 32768

    return keep


@pytest.mark.parametrize(
    "fault", [{"mix": False}, {"second_key": False}, {"halves": False}, {"rate": 128}], ids=lambda f: next(iter(f))
)
def test_faulty_bits_fail(fault: dict) -> None:
    check_bits(_mutant())
    with pytest.raises(AssertionError):
        check_bits(_mutant(**fault))


@needs_compiler
@pytest.mark.parametrize("size", ODD_SIZES)
def test_c_and_torch_agree_bit_for_bit(size: int) -> None:
    for keys in (KEYS, (0, 0), (2**32 - 1, 2**32 - 1)):
        for p in (1e-9, 0.1, 0.5, 0.999999):
            expected = keep_by_torch(size, keys, module.dropped_of(p))
            assert torch.equal(fast_dropout_mask((size,), p, torch.bool, keys), expected)
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(size).to(dtype)
                native = module._native(x, torch.empty_like(x), keys, module.dropped_of(p))
                assert torch.equal(native, module._by_torch(x, keys, module.dropped_of(p)))


def test_chunks_join_without_a_seam(monkeypatch) -> None:
    expected = keep_by_torch(70_001, KEYS, 6554)
    monkeypatch.setattr(module, "native", lambda: None)
    monkeypatch.setattr(module, "_CHUNK", 1000)
    assert torch.equal(fast_dropout_mask((70_001,), 0.1, torch.bool, KEYS), expected)


def test_threads_do_not_change_the_result() -> None:
    x, before = torch.randn(300_001), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(1)
            results.append(fast_dropout(x, 0.1))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_machine_without_compiler_makes_the_same_masks() -> None:
    code = (
        "import torch; from composer_speedups.kernels.fast_dropout import *;"
        "torch.manual_seed(5); x = fast_dropout(torch.ones(999), 0.3);"
        "print(native() is None, int(x.count_nonzero()), x.nonzero().sum().item())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], env={"PATH": "", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    torch.manual_seed(5)
    x = fast_dropout(torch.ones(999), 0.3)
    assert out.stdout.split() == ["True", str(int(x.count_nonzero())), str(x.nonzero().sum().item())], out.stderr


# --- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_matches_float64(dtype: torch.dtype, p: float, bits_by: str) -> None:
    x = torch.randn(37, 129).to(dtype).requires_grad_()
    gradient = torch.randn(37, 129).to(dtype)
    torch.manual_seed(2)
    out = fast_dropout(x, p)
    out.backward(gradient)
    torch.manual_seed(2)
    keep = keep_by_torch(x.numel(), draw_keys(), module.dropped_of(p)).view(x.shape)
    scale = 1 / (1 - realised(p))
    # The scale is rounded to float32 at worst, the product once to the dtype.
    tolerance = dict(rtol=torch.finfo(dtype).eps / 2 + 2**-24 * (dtype != torch.float64), atol=0)
    if dtype == torch.float16:
        tolerance["atol"] = 2.0**-25  # half the spacing of its subnormals
    assert out.dtype == x.grad.dtype == dtype
    torch.testing.assert_close(out.double(), x.detach().double() * keep * scale, **tolerance)
    torch.testing.assert_close(x.grad.double(), gradient.double() * keep * scale, **tolerance)


def test_expectation_is_the_input() -> None:
    # bfloat16 at p = 0.1: with the scale rounded to bfloat16, as PyTorch has it, the mean is off by 0.16 %.
    n = 1 << 22
    mean = float(fast_dropout(torch.full((n,), 9.0, dtype=torch.bfloat16), 0.1).double().mean())
    assert abs(mean / 9 - 1) < 5 * (0.1 / 0.9 / n) ** 0.5  # 0.0008: 9 / 0.9 = 10 is a bfloat16


def test_gradients_to_second_order(bits_by: str) -> None:
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return fast_dropout(x, 0.4).square()

    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


def test_strides_do_not_change_the_mask(bits_by: str) -> None:
    base = torch.randn(6, 10, 8)
    for view in (base.transpose(0, 2), base[:, ::3], base[..., :1].expand(6, 10, 8), base[3:3]):
        torch.manual_seed(4)
        expected = fast_dropout(view.contiguous(), 0.3)
        torch.manual_seed(4)
        assert torch.equal(fast_dropout(view, 0.3), expected)


def test_gradient_that_is_a_view() -> None:
    x = torch.ones(64, 64, requires_grad=True)
    torch.manual_seed(4)
    out = fast_dropout(x, 0.3)
    out.sum().backward()  # its gradient is one number, expanded
    assert torch.equal(x.grad, out.detach())


def test_inplace(bits_by: str) -> None:
    for x in (torch.randn(40, 40), torch.randn(40, 40).t(), torch.randn(40, 40).half()):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(3)
        expected = fast_dropout(x, 0.3)
        torch.manual_seed(3)
        middle = leaf * 1
        out = fast_dropout(middle, 0.3, inplace=True)
        assert out is middle or out.data_ptr() == middle.data_ptr()
        assert torch.equal(out, expected)
        out.sum().backward()
        assert torch.equal(leaf.grad != 0, expected != 0)
    with pytest.raises(RuntimeError, match="leaf"):
        fast_dropout(torch.ones(3, requires_grad=True), 0.5, inplace=True)


def test_edges() -> None:
    x = torch.randn(9)
    assert fast_dropout(x, 0.5, training=False) is x
    assert fast_dropout(x, 0.0) is x
    assert not fast_dropout(x, 1.0).any()
    assert fast_dropout(torch.empty(0, 3), 0.5).shape == (0, 3)
    assert fast_dropout(torch.tensor(2.0), 0.5).shape == ()
    assert fast_dropout(torch.empty(4, device="meta"), 0.5).is_meta
    rare, frequent = (int(fast_dropout(torch.ones(1 << 20), p).count_nonzero()) for p in (1e-9, 1 - 1e-9))
    assert rare < 1 << 20 and frequent > 0  # never "not at all" where some dropout is asked for
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises((ValueError, RuntimeError), match="probability"):  # torch's own, RuntimeError for NaN
            fast_dropout(x, p)
        with pytest.raises(ValueError, match="probability"):
            fast_dropout_mask((3,), p)
    with pytest.raises(ValueError, match="make several"):
        fast_dropout_mask((1 << 20, 1 << 20), 0.1)


def test_non_finite_inputs() -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.38e38]).repeat(500)
    for dtype in (torch.float32, torch.bfloat16):
        out = fast_dropout(x.to(dtype), 0.5)
        kept = out != 0
        expected = (x.to(dtype).float() * 2).to(dtype)
        assert kept.float().mean().sub(0.5).abs() < 0.06  # 5 standard deviations of 2,000 draws
        torch.testing.assert_close(out[kept], expected[kept], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool], ids=str)
def test_mask(dtype: torch.dtype, bits_by: str) -> None:
    mask = fast_dropout_mask((3, 5, 7), 0.25, dtype, KEYS)
    keep = keep_by_torch(105, KEYS, 16384).view(3, 5, 7)
    assert mask.dtype == dtype
    assert torch.equal(mask, (keep if dtype == torch.bool else keep.to(dtype) * (4 / 3)).to(dtype))
    assert fast_dropout_mask((2, 2), 0.0, dtype).all() and not fast_dropout_mask((2, 2), 1.0, dtype).any()


# --- the machinery around it ------------------------------------------------------------------------------------------


def test_gradient_checkpointing_draws_the_same_mask() -> None:
    layer, x = torch.nn.Linear(16, 16), torch.randn(8, 16)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return fast_dropout(layer(x), 0.5).square().sum()

    gradients = []
    for run in (loss, lambda x: checkpoint(loss, x, use_reentrant=False)):
        torch.manual_seed(6)
        (gradient,) = torch.autograd.grad(run(x), layer.weight)
        gradients.append(gradient)
    assert torch.equal(*gradients)


def test_calls_differ_and_the_seed_repeats_them() -> None:
    x = torch.ones(4096)
    torch.manual_seed(8)
    a, b = fast_dropout(x, 0.5), fast_dropout(x, 0.5)
    state = torch.get_rng_state()
    c = fast_dropout(x, 0.5)
    torch.set_rng_state(state)
    assert torch.equal(fast_dropout(x, 0.5), c)
    torch.manual_seed(8)
    assert torch.equal(fast_dropout(x, 0.5), a)
    for one, other in ((a, b), (b, c), (a, c)):
        assert abs(int((one == other).sum()) - 2048) < 5 * 32  # half agree, as independent masks do


def test_compiles_into_one_graph() -> None:
    layer = torch.nn.Linear(64, 64)
    compiled = torch.compile(lambda x: fast_dropout(layer(x), 0.25), backend="aot_eager", fullgraph=True)
    x = torch.randn(64, 64)
    torch.manual_seed(9)
    out = compiled(x)
    (gradient,) = torch.autograd.grad(out.sum(), layer.bias)
    torch.manual_seed(9)
    keep = fast_dropout(torch.ones(64, 64), 0.25)  # the same bits: aot_eager draws from the same generator
    torch.testing.assert_close(out, layer(x) * keep)
    torch.testing.assert_close(gradient, keep.sum(0))


def test_under_functional_transforms_it_is_torchs() -> None:
    out = torch.func.vmap(lambda x: fast_dropout(x, 0.5), randomness="different")(torch.ones(100, 50))
    assert 0.4 < float((out != 0).float().mean()) < 0.6
    gradient = torch.func.grad(lambda x: fast_dropout(x, 0.5).sum())(torch.ones(500))
    assert set(gradient.tolist()) == {0.0, 2.0}
