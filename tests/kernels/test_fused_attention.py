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
    HEADS,
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

from composer_speedups.kernels import fast_dropout
from composer_speedups.kernels import fused_attention as module
from composer_speedups.kernels import native as building
from composer_speedups.kernels import per_sequence as public
from composer_speedups.kernels.fast_dropout import realised
from composer_speedups.kernels.varlen_attention import Lengths, varlen_attention

KERNELS = {
    "bfloat16 by AMX": (torch.bfloat16, "fused_attention_amx", ()),
    "bfloat16 by AVX-512": (torch.bfloat16, "fused_attention_bf16", ()),
    "float32": (torch.float32, "fused_attention_float32", ()),
    "float32 by AVX2": (torch.float32, "fused_attention_float32", ("-mno-avx512f",)),
}
NEEDS = {  # what a CPU must have for each file
    "fused_attention_amx": ("amx_tile", "amx_bf16", "avx512_bf16"),
    "fused_attention_bf16": ("avx512_bf16",),
    "fused_attention_float32": ("avx2", "fma"),
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Each kernel's, None where this CPU or a missing compiler does not let it be built."""
    found = {}
    for name, (dtype, file, flags) in KERNELS.items():
        found[name] = module.usable(file, dtype)
        if flags and found[name] is not None:
            found[name] = compiled(tmp_path_factory.mktemp("kernel"), file, flags=flags)
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


@pytest.mark.parametrize("file", NEEDS)
def test_is_used_where_the_cpu_can(file: str) -> None:
    dtype = next(dtype for dtype, files in module.FILES.items() if file in files)
    library = module.usable(file, dtype)
    expected = able(*NEEDS[file]) and building.load(file) is not None
    assert (library is not None) == expected, "C and its meaning in PyTorch do not agree"
    if library is not None and file == next(iter(module.FILES[dtype])):
        assert module.native(dtype) is library
        assert public.served_by(torch.ones(1, 1, 16, dtype=dtype)) == f"C with {module.FILES[dtype][file]}"


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
@pytest.mark.parametrize("name", SHAPES)
def test_what_lies_on_the_stack_changes_nothing(dtype: torch.dtype, name: str, p: float) -> None:
    """GCC 12 read 64 bits of a mask where it had written 32, so that some runs dropped what they should have kept."""
    lengths, library = SHAPES[name], module.native(dtype)
    q, k, v, gradient = inputs(lengths, 16, dtype)
    found = []
    for _ in range(2):
        out, saved = module.forward(q, k, v, *lengths, SEEDS, p, SCALE)
        gradients = module.backward(gradient, saved, *lengths, p, SCALE)
        found.append([out, saved[3], *gradients])
        library.litter()
    with torch.no_grad():
        library.litter()
        out, saved = module.forward(q, k, v, *lengths, SEEDS, p, SCALE)
    assert torch.equal(out, found[0][0])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("p", [0.0, P])
def test_other_numbers_of_threads_give_the_same_bits(dtype: torch.dtype, p: float) -> None:
    lengths = ([250, 3, 97, 0, 41],) * 2  # 3 times 74,000 scores: enough for threads to be woken
    q, k, v, gradient = inputs(lengths, 64, dtype)

    def run(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        out, saved = module.forward(q, k, v, *lengths, SEEDS, p, SCALE)
        near, windowed = module.forward(q, k, v, *lengths, SEEDS, p, SCALE, window=30)
        gradients = module.backward(gradient, windowed, *lengths, p, SCALE, 30)
        return [out, *saved[3:], *module.backward(gradient, saved, *lengths, p, SCALE), near, *gradients]

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

    plain = [x.contiguous() for x in inputs(SAME, 48, dtype)]
    for x, y in zip(run(*plain), run(*map(layout, plain)), strict=True):
        assert torch.equal(x, y) and y.is_contiguous()


@pytest.mark.parametrize(
    "lengths, window",
    [(x, -1) for name, x in SHAPES.items() if name != "nothing"]
    + [(([3, 40, 0], [0, 40, 3]), -1), (SAME, 20), (([613], [613]), 20)],
)
@pytest.mark.usefixtures("poisoned_memory")
def test_gradients_beside_each_other_are_the_same(dtype: torch.dtype, lengths, window: int) -> None:
    """Of k and v, or of all three, in rows of one tensor: nothing else is written, and what has no keys is zero."""
    q, k, v, gradient = inputs(lengths, 48, dtype)
    ways = [(q, k, v)]
    if sum(lengths[0]) == sum(lengths[1]):
        ways.append(tuple(torch.cat([q, k, v], 1).chunk(3, 1)))
    for tensors in ways:
        saved = module.forward(*tensors, *lengths, SEEDS, P, SCALE, window=window)[1]
        apart = module.backward(gradient, saved, *lengths, P, SCALE, window)
        found = module.backward(gradient, saved, *lengths, P, SCALE, window, together=True)
        assert all(map(torch.equal, apart, found))
        assert found[1].untyped_storage()._cdata == found[2].untyped_storage()._cdata
        assert len({x.untyped_storage()._cdata for x in apart}) == 3


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


@pytest.mark.parametrize("which", range(3), ids=["q", "k", "v"])
@pytest.mark.parametrize("place", [2, 9])
def test_nan_stays_in_its_sequence_and_is_not_lost(dtype: torch.dtype, which: int, place: int) -> None:
    leaves = [torch.randn(10, 1, 16).to(dtype) for _ in "qkv"]
    leaves[which][place, 0, 0] = math.nan
    lengths = Lengths.of([4, 6])
    out = varlen_attention(*(x.requires_grad_() for x in leaves), lengths, lengths)
    out.backward(torch.ones_like(out))
    own, other = (slice(4), slice(4, 10)) if place < 4 else (slice(4, 10), slice(4))
    assert not any(y[other].isnan().any() for y in (out, *(x.grad for x in leaves)))
    if which == 0:  # one query's row; a key's or a value's NaN reaches them all
        assert out[place].isnan().all() and leaves[1].grad[own].isnan().all()
    else:
        assert out[own, :, 0].isnan().all() and leaves[0].grad[own].isnan().all()


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


def biased(dtype: torch.dtype, lengths, p: float = P) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The output and the gradients of q, k, v and a bias: by C, and in float64 by the book."""
    q, k, v, gradient = inputs(lengths, 32, dtype)
    sizes = [(HEADS, n, module.filled(dtype, m)) for n, m in zip(*lengths, strict=True)]
    bias = torch.randn(sum(map(math.prod, sizes)))
    out, saved = module.forward(q, k, v, *lengths, SEEDS, p, SCALE, bias=bias)
    *found, of_bias = out, *module.backward(gradient, saved, *lengths, p, SCALE, of_bias=True)
    with torch.enable_grad():
        leaves = [x.double().requires_grad_() for x in (q, k, v, bias)]
        packed = zip(*(x.split(n) for x, n in zip(leaves[:3], (*lengths, lengths[1]), strict=True)), strict=True)
        parts, first = [], 0
        for (qi, ki, vi), mask in zip(packed, masks(lengths, p), strict=True):
            own = module.scores_of(leaves[3], tuple(mask.shape), first, dtype)
            first += HEADS * len(qi) * module.filled(dtype, len(ki))
            scores = (torch.einsum("qhd,khd->hqk", qi, ki) + own) * SCALE
            kept = scores.softmax(-1) * mask / (1 - realised(p))
            parts.append(torch.einsum("hqk,khd->qhd", kept, vi))
        expected = torch.cat(parts)
    found.append(torch.where((wanted := torch.autograd.grad(expected, leaves, gradient.double()))[3] == 0, 0, of_bias))
    return found, [expected.detach(), *wanted]


@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.usefixtures("poisoned_memory")
def test_a_bias_is_added_and_has_its_gradient(dtype: torch.dtype, p: float) -> None:
    for lengths in (SAME, ([35, 130], [35, 131])):
        for name, x, y in zip(("out", "q", "k", "v", "bias"), *biased(dtype, lengths, p), strict=True):
            error = (x.double() - y).norm() / y.norm() / torch.finfo(dtype).eps
            # A few roundings of 1/sqrt(12) unit each; in float32 a score loses a unit for its size, which is a few.
            assert error < (1.2 if dtype == torch.bfloat16 else 5), f"{name}: {error:.2f} units"


def test_a_bias_of_zeros_changes_no_bit(dtype: torch.dtype) -> None:
    q, k, v, gradient = inputs(SAME, 32, dtype)
    zeros = torch.zeros(HEADS * sum(n * module.filled(dtype, n) for n in SAME[0]))
    found = []
    for bias in (None, zeros):
        out, saved = module.forward(q, k, v, *SAME, SEEDS, P, SCALE, bias=bias)
        found.append([out, *module.backward(gradient, saved, *SAME, P, SCALE, of_bias=bias is not None)[:3]])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    "fault",
    [
        ("c->bias + s->first + row * wide", "c->bias + s->first"),
        ("c->bias + s->first + row * wide", "c->bias + row * wide"),
        ("scores[i] += bias[i]", "scores[i] -= bias[i]"),
        ("c->dbias + s->first +", "c->dbias +"),
        ("; c->dbias && r < rows", "; c->dbias && r < rows - 1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("file", NEEDS)
@pytest.mark.usefixtures("poisoned_memory")  # what is not written must not happen to be right
def test_a_fault_planted_where_the_bias_is_is_found(file: str, fault: tuple[str, str], tmp_path: Path) -> None:
    dtype = next(dtype for dtype, files in module.FILES.items() if file in files)
    if module.usable(file, dtype) is None:
        pytest.skip("no compiler, or a CPU without the instructions")
    assert not module.agrees(compiled(tmp_path, file, *fault), dtype)


@pytest.mark.parametrize("window", [-1, 20])
def test_compiled_code_gives_the_same_bits(dtype: torch.dtype, window: int) -> None:
    q, k, v, gradient = inputs(SAME, 32, dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    host = [torch.tensor(x, dtype=torch.int32) for x in SAME]
    arguments = (*host, torch.tensor(SEEDS), P, SCALE, window)
    torch.library.opcheck(public._opaque, (*leaves, *arguments))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def graph(q, k, v):
        return public._opaque(q, k, v, *arguments)

    eager = varlen_attention(*leaves, *map(Lengths.of, SAME), P, SCALE, window)
    out = graph(*leaves)
    assert torch.equal(out, eager)
    for x, y in zip(*(torch.autograd.grad(o, leaves, gradient) for o in (out, eager)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("window", [-1, 20])
def test_what_is_made_again_has_the_same_bits(dtype: torch.dtype, window: int, monkeypatch) -> None:
    leaves = [x.requires_grad_() for x in inputs(SAME, 32, dtype)[:3]]
    lengths, found = list(map(Lengths.of, SAME)), []
    for long in (1024, 40):
        monkeypatch.setattr(public, "_LONG", long)
        out = varlen_attention(*leaves, *lengths, P, window=window)
        found.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    assert all(map(torch.equal, *found))


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
    for bias, window in ((torch.zeros(5), -1), (torch.zeros(3 * 4 * module.filled(dtype, 4)), 20)):
        with pytest.raises(ValueError, match=r"a bias must be .* in float32, without a window, not"):
            module.forward(q, k[:4], v[:4], [4], [4], SEEDS, P, SCALE, window=window, bias=bias)
    with pytest.raises(ValueError, match=r"as many queries as keys, got \[4\] and \[6\]"):
        module.forward(q, k, v, [4], [6], SEEDS, P, SCALE, window=2)
    monkeypatch.setattr(module, "native", lambda dtype: SimpleNamespace(forward=lambda call: 1))
    with pytest.raises(MemoryError, match="longest sequence"):
        module.forward(q, k, v, [4], [6], SEEDS, P, SCALE)


@pytest.mark.parametrize("threads", [1, 2])
def test_without_openmp_it_serves_one_thread_only(dtype: torch.dtype, threads: int, monkeypatch) -> None:
    """Several are better served by the separate passes, which share sequences out among them."""
    monkeypatch.undo()
    monkeypatch.setattr(building, "_TRIES", ((),))  # as a compiler without OpenMP ends up
    library, before = building.load.__wrapped__(list(module.FILES[dtype])[-1]), torch.get_num_threads()
    assert not library.threaded
    monkeypatch.setattr(module, "load", lambda name: library)
    torch.set_num_threads(threads)
    try:
        assert (module.native.__wrapped__(dtype) is not None) == (threads == 1)
    finally:
        torch.set_num_threads(before)


def test_lengths_below_zero_are_refused(dtype: torch.dtype) -> None:
    q, k, v, _ = inputs(([8], [8]), 16, dtype)
    with pytest.raises(ValueError, match="below 0: -2"):
        module.forward(q, k, v, [10, -2], [8, 0], SEEDS, P, SCALE)
    with pytest.raises(ValueError, match="0 or more, got -2"):
        Lengths.of([10, -2])


def test_a_default_device_of_the_user_changes_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    library = module.native(dtype)
    for owner in (module.native, public.native, fast_dropout.native):
        if hasattr(owner, "cache_clear"):
            owner.cache_clear()
    q, k, v, _ = inputs(SAME, 16, dtype)
    lengths = list(map(Lengths.of, SAME))
    expected = varlen_attention(q, k, v, *lengths, P)
    with torch.device("meta"):
        assert module.agrees(library, dtype)
        assert torch.equal(varlen_attention(q, k, v, *lengths, P), expected)
        assert torch.equal(varlen_attention(q, k, v, *map(Lengths.of, SAME), P), expected)
        assert (public.native() is None) == (building.load("per_sequence") is None)
        assert fast_dropout.draw_keys() and (fast_dropout.native() is None) == (building.load("fast_dropout") is None)


def rows_of_softmax(scores: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """What the kernel makes of `scores` [rows, at most 16], exactly representable: it multiplies by ones and zeros."""
    rows, n = scores.shape
    q, k, v = (torch.zeros(size, 1, 16, dtype=dtype) for size in (rows, rows * n, rows * n))
    q[:, 0, 0], k[:, 0, 0] = 1, scores.flatten().to(dtype)
    v[:, 0, :n] = torch.eye(n, dtype=dtype).repeat(rows, 1)
    return varlen_attention(q, k, v, Lengths.of([1] * rows), Lengths.of([n] * rows), 0.0, scale)[:, 0, :n]


def test_exp_is_as_exact_as_is_said(dtype: torch.dtype) -> None:
    """Relative, for scores from the largest to 30 below: 2^x by a polynomial, what its argument lost, one rounding."""
    distance = torch.linspace(0, 30, 3001).to(dtype)
    scores = torch.stack((torch.zeros_like(distance), -distance), -1)
    found, want = rows_of_softmax(scores, dtype, 1.0).double(), scores.double().softmax(-1)
    allowed = 4e-7 + 2.0**-23 * distance.double()[:, None] + (torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0)
    error = ((found - want) / want).abs()
    assert (error <= allowed).all(), (error / allowed).max()


@pytest.mark.parametrize("scale", [1.0, -1.0, 0.37], ids=str)
@pytest.mark.parametrize("size", [3.3e4, 3.1e9, 1.7e10, 1.3e20, 2.3e36])
def test_the_largest_score_wins_whatever_its_size(dtype: torch.dtype, size: float, scale: float) -> None:
    """And it does so with finite numbers, although differences are far beyond what exp can tell apart."""
    factors = torch.linspace(-1.03, 0.97, 12)
    scores = (torch.stack([factors.roll(n) for n in range(12)]) * size).to(dtype)
    found = rows_of_softmax(scores, dtype, scale)
    winner = (scores.double() * scale).argmax(-1)
    assert torch.allclose(found, torch.nn.functional.one_hot(winner, 12).to(dtype), atol=1e-30)


@pytest.mark.parametrize(
    ("file", "fault", "without"),
    [
        ("fused_attention_amx", ("bits >> (first & 1)", "bits >> 0"), "-mno-amx-bf16"),
        ("fused_attention_bf16", ("bits >> (first & 1)", "bits >> 0"), "-mno-avx512bf16"),
        ("fused_attention_float32", ("bits + odd", "bits"), "-mno-avx2 -mno-avx512f"),
    ],
)
def test_a_library_that_differs_or_lacks_the_instructions_is_not_used(
    file: str, fault: tuple[str, str], without: str, tmp_path: Path, monkeypatch
) -> None:
    dtype = next(dtype for dtype, files in module.FILES.items() if file in files)
    if module.usable(file, dtype) is None:
        pytest.skip("no compiler, or a CPU without the instructions")
    found = [None]
    for name, arguments in {"wrong": (*fault, ()), "lacking": ("", "", tuple(without.split()))}.items():
        (tmp_path / name).mkdir()
        found.append(compiled(tmp_path / name, file, *arguments))
    for library in found:
        monkeypatch.setattr(module, "load", lambda name, library=library: library)
        assert module.usable(file, dtype) is None and module.native.__wrapped__(dtype) is None
