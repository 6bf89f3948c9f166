"""Attention over packed sequences by C, what holds for each of its kernels: masks, memory, threads, strides, graphs.

How exact they are is in `test_fused_attention_bf16.py` and `test_fused_attention_float32.py`.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fused_attention_check import (
    SAME,
    SCALE,
    SEEDS,
    SHAPES,
    P,
    backwards,
    compiled,
    heads_first,
    inputs,
    masks,
    odd_address,
)  # fmt: skip
from torch._subclasses.fake_tensor import FakeTensorMode

from composer_speedups.kernels import fused_attention as module
from composer_speedups.kernels import native as building
from composer_speedups.kernels import varlen_attention as public
from composer_speedups.kernels.varlen_attention import Lengths, varlen_attention

KERNELS = {
    "bfloat16": (torch.bfloat16, ()),
    "float32": (torch.float32, ()),
    "float32 by AVX2": (torch.float32, ("-mno-avx512f",)),
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Each kernel's, None where this CPU or a missing compiler does not let it be built."""
    found = {}
    for name, (dtype, flags) in KERNELS.items():
        found[name] = module.native(dtype)
        if flags and found[name] is not None:
            found[name] = compiled(tmp_path_factory.mktemp("kernel"), module._FILES[dtype], flags=flags)
    return found


@pytest.fixture(params=KERNELS)
def dtype(request: pytest.FixtureRequest, libraries: dict, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """What the tests' tensors are of, served by one kernel after the other."""
    library = libraries[request.param]
    if library is None:
        pytest.skip("no compiler, or a CPU without the instructions")
    monkeypatch.setattr(module, "native", lambda dtype: library)
    monkeypatch.setattr(public, "draw_keys", lambda: SEEDS)
    return KERNELS[request.param][0]


def able(*names: str) -> bool:
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else ()
    return all(name in flags for name in names)


@pytest.mark.parametrize(
    ("dtype", "flags"), [(torch.bfloat16, ("avx512_bf16",)), (torch.float32, ("avx2", "fma"))], ids=str
)
def test_is_used_where_the_cpu_can(dtype: torch.dtype, flags: tuple[str, ...]) -> None:
    expected = able(*flags) and building.load(module._FILES[dtype]) is not None
    assert (module.native(dtype) is not None) == expected, "C and its meaning in PyTorch do not agree"


@pytest.mark.parametrize(
    ("width", "dtype"), [(24, torch.bfloat16), (24, torch.float32), (64, torch.float16), (64, torch.float64)], ids=str
)
def test_leaves_the_rest_to_others(width: int, dtype: torch.dtype) -> None:
    q, k, v, _ = inputs(SAME, width, dtype)
    assert not module.serves(q, k, v)
    if dtype == torch.float32:
        assert not module.serves(q, k.double(), v)
    out = varlen_attention(q, k, v, *map(Lengths.of, SAME), 0.0, SCALE)
    parts = (x.double().split(SAME[0]) for x in (q, k, v))
    want = [torch.einsum("hqk,khd->qhd", (torch.einsum("qhd,khd->hqk", q, k) * SCALE).softmax(-1), v)
            for q, k, v in zip(*parts, strict=True)]  # fmt: skip
    torch.testing.assert_close(out.double(), torch.cat(want), atol=0.05, rtol=0)  # how exact they are has tests there


@pytest.mark.parametrize("name", SHAPES)
def test_masks_are_those_of_the_definition(dtype: torch.dtype, name: str) -> None:
    lengths, fill = SHAPES[name], module._FILL[dtype]
    saved = module.forward(*inputs(lengths, 16, dtype)[:3], *lengths, SEEDS, P, SCALE)[1]
    signs, start = saved[3].signbit(), 0
    for mask in masks(lengths, P):
        heads, n, m = mask.shape
        size = heads * n * -(-m // fill) * fill
        if size:
            assert torch.equal(~signs[start : start + size].view(heads, n, -1)[..., :m], mask)
        start += size
    assert start == len(signs)


@pytest.mark.parametrize("p", [0.0, P])
def test_other_numbers_of_threads_give_the_same_bits(dtype: torch.dtype, p: float) -> None:
    lengths = ([250, 3, 97, 0, 41],) * 2  # 3 times 74,000 scores: enough for threads to be woken
    q, k, v, gradient = inputs(lengths, 64, dtype)

    def run(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        out, saved = module.forward(q, k, v, *lengths, SEEDS, p, SCALE)
        return [out, *saved[3:], *module.backward(gradient, saved, *lengths, p, SCALE)]

    before = torch.get_num_threads()
    try:
        for x, *others in zip(*map(run, (1, 2, 3, 7)), strict=True):
            assert all(torch.equal(x, other) for other in others)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("layout", [odd_address, heads_first, backwards])
def test_strides_change_nothing(dtype: torch.dtype, layout) -> None:
    def run(q, k, v, gradient) -> list[torch.Tensor]:
        out, saved = module.forward(q, k, v, *SAME, SEEDS, P, SCALE)
        return [out, *module.backward(gradient, saved, *SAME, P, SCALE)]

    plain = [x.contiguous() for x in inputs(SAME, 32, dtype)]
    for x, y in zip(run(*plain), run(*map(layout, plain)), strict=True):
        assert torch.equal(x, y) and y.is_contiguous()


def test_gradient_of_one_number_for_all(dtype: torch.dtype) -> None:
    q, k, v, _ = (x.requires_grad_() for x in inputs(SAME, 16, dtype))
    lengths = list(map(Lengths.of, SAME))
    gradients = torch.autograd.grad(varlen_attention(q, k, v, *lengths, P).sum(), (q, k, v))  # strides of zero
    again = torch.autograd.grad(varlen_attention(q, k, v, *lengths, P), (q, k, v), torch.ones_like(q))
    assert all(map(torch.equal, gradients, again))


def test_what_has_no_keys_is_zero(dtype: torch.dtype) -> None:
    lengths = SHAPES["no keys or no queries"]
    q, k, v, gradient = inputs(lengths, 32, dtype)
    for poison in (q, k, v):
        poison[:3] = math.nan  # queries without keys, and of the keys those that only the second sequence has
    q[3:], k[:], v[:] = 1, 1, 1
    out, saved = module.forward(q, k, v, *lengths, SEEDS, P, SCALE)
    dq, dk, dv = module.backward(gradient, saved, *lengths, P, SCALE)
    assert not out[:3].any() and not dq[:3].any() and not dk[31:].any() and not dv[31:].any()
    assert out[3:].any(-1).any(-1).all() and dv[:31].any()


def test_nan_stays_in_its_sequence(dtype: torch.dtype) -> None:
    for place in (2, 9):
        x = torch.randn(10, 1, 16).to(dtype)
        x[place, 0, 0] = math.nan
        leaf, lengths = x.clone().requires_grad_(), Lengths.of([4, 6])
        out = varlen_attention(leaf, leaf, leaf, lengths, lengths)
        out.backward(torch.ones_like(out))
        for y in (out, leaf.grad):
            with_nan = [part.isnan().any().item() for part in y.split([4, 6])]
            assert with_nan == [place < 4, place >= 4]


def test_scale_of_zero_means_the_mean(dtype: torch.dtype) -> None:
    q, k, v, _ = inputs(([5], [5]), 16, dtype)
    lengths = Lengths.of([5])
    out = varlen_attention(q, k, v, lengths, lengths, 0.0, 0.0)
    error = torch.finfo(dtype).eps * 4
    torch.testing.assert_close(out.double(), v.double().mean(0).expand(5, -1, -1), atol=error, rtol=error)


def test_keeps_nothing_without_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, right = [], module.forward
    monkeypatch.setattr(module, "forward", lambda *a, **k: (lambda r: kept.append(len(r[1])) or r)(right(*a, **k)))
    q, k, v, _ = inputs(SAME, 16, dtype)
    lengths = list(map(Lengths.of, SAME))
    out = varlen_attention(q, k, v, *lengths, P)
    with torch.no_grad():
        assert torch.equal(varlen_attention(q.requires_grad_(), k, v, *lengths, P), out)
    assert torch.equal(varlen_attention(q, k, v, *lengths, P), out)
    assert kept == [0, 0, 5]


def test_compiled_code_gives_the_same_bits(dtype: torch.dtype) -> None:
    q, k, v, gradient = inputs(SAME, 32, dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    host = [torch.tensor(x, dtype=torch.int32) for x in SAME]
    arguments = (*host, torch.tensor(SEEDS), P, SCALE)
    torch.library.opcheck(public._opaque, (*leaves, *arguments))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def graph(q, k, v):
        return public._opaque(q, k, v, *arguments)

    eager = varlen_attention(*leaves, *map(Lengths.of, SAME), P, SCALE)
    out = graph(*leaves)
    assert torch.equal(out, eager)
    for x, y in zip(*(torch.autograd.grad(o, leaves, gradient) for o in (out, eager)), strict=True):
        assert torch.equal(x, y)


def test_shapes_without_numbers(dtype: torch.dtype) -> None:
    q, k, v, gradient = inputs(SAME, 32, dtype)
    out, saved = module.forward(q, k, v, *SAME, SEEDS, P, SCALE)
    real = [out, *saved, *module.backward(gradient, saved, *SAME, P, SCALE)]
    with FakeTensorMode() as mode:
        q, k, v, gradient = map(mode.from_tensor, (q, k, v, gradient))
        out, saved = module.forward(q, k, v, *SAME, SEEDS, P, SCALE)
        fake = [out, *saved, *module.backward(gradient, saved, *SAME, P, SCALE)]
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


def test_errors_name_what_is_wrong(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, gradient = inputs(([4], [6]), 16, dtype)
    with pytest.raises(ValueError, match=r"\(4, 3, 16\).*\(7, 3, 16\).*, not \(4, 3, 16\), \(6, 3, 16\)"):
        module.forward(q, k, v, [4], [7], SEEDS, P, SCALE)
    _, saved = module.forward(q, k, v, [4], [6], SEEDS, P, SCALE)
    with pytest.raises(ValueError, match="must be as q"):
        module.backward(gradient[:3], saved, [4], [6], P, SCALE)
    monkeypatch.setattr(module, "native", lambda dtype: SimpleNamespace(forward=lambda call: 1))
    with pytest.raises(MemoryError, match="longest sequence"):
        module.forward(q, k, v, [4], [6], SEEDS, P, SCALE)


@pytest.mark.parametrize(
    ("dtype", "fault", "without"),
    [
        (torch.bfloat16, ("bits >> (first & 1)", "bits >> 0"), ("-mno-avx512bf16",)),
        (torch.float32, ("bits + odd", "bits"), ("-mno-avx2", "-mno-avx512f")),
    ],
    ids=str,
)
def test_a_library_that_differs_or_lacks_the_instructions_is_not_used(
    dtype: torch.dtype, fault, without, tmp_path: Path, monkeypatch
) -> None:
    if module.native(dtype) is None:
        pytest.skip("no compiler, or a CPU without the instructions")
    found = [None]
    for name, arguments in {"wrong": (*fault, ()), "lacking": ("", "", without)}.items():
        (tmp_path / name).mkdir()
        found.append(compiled(tmp_path / name, module._FILES[dtype], *arguments))
    for library in found:
        monkeypatch.setattr(module, "load", lambda name, library=library: library)
        assert module.native.__wrapped__(dtype) is None
