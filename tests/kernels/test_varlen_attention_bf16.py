"""Attention over packed sequences in bfloat16 by C: counted roundings, masks, memory, threads, planted faults."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from composer_speedups.kernels import native as building
from composer_speedups.kernels import varlen_attention as public
from composer_speedups.kernels import varlen_attention_bf16 as module
from composer_speedups.kernels.fast_dropout import keep_by_torch, realised
from composer_speedups.kernels.varlen_attention import Lengths, varlen_attention

HEADS, P, SCALE, SEEDS = 3, 0.25, 0.3, (0xDEADBEEF, 0x12345678)
SAME = ([7, 1, 0, 33, 16, 130], [7, 1, 0, 33, 16, 130])
SHAPES = {
    "as many queries as keys": SAME,
    "one query each": ([1, 1, 0, 1], [5, 131, 3, 1]),
    "no keys or no queries": ([3, 200, 0, 0], [0, 31, 4, 0]),
    "one long sequence": ([613], [613]),
    "nothing": ([], []),
}

needs_cpu = pytest.mark.skipif(module.native() is None, reason="no compiler, or a CPU without AVX512-BF16")


@pytest.fixture(autouse=True)
def _fixed_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "draw_keys", lambda: SEEDS)


def inputs(lengths: tuple[list[int], list[int]], width: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output; k and v are views of one tensor, as a fused projection gives them."""
    queries, keys = (sum(x) for x in lengths)
    k, v = torch.randn(keys, 2, HEADS, width).bfloat16().unbind(1)
    q, gradient = torch.randn(2, queries, HEADS, width).bfloat16()
    return [q, k, v, gradient]


def masks(lengths: tuple[list[int], list[int]], p: float) -> list[torch.Tensor]:
    """For each sequence [heads, queries, keys]: False where dropped, by the definition of the mask."""
    out, word = [], 0
    for n, m in zip(*lengths, strict=True):
        size = HEADS * n * m
        own = ((SEEDS[0] + word * 0x9E3779B9) % 2**32, SEEDS[1])
        keep = keep_by_torch(size, own, round(realised(p) * 65536)) if p else torch.ones(size, dtype=torch.bool)
        out.append(keep.view(HEADS, n, m))
        word += (size + 1) // 2
    return out


def expected(q, k, v, gradient, lengths, p: float) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """In float64, by the book: each result, the largest error that rounding may make, and its variance's bound.

    Both are in units of half an ulp, the largest relative error of one rounding to bfloat16. Rounded are exp(scores)
    where it is stored, the gradient of scores, in dv the gradient times the row's inverse sum, and each result. Scores
    and sums are float32. Errors of terms add up, in the second case as those of independent numbers do.
    """
    queries, keys = lengths
    parts: dict[str, list[tuple[torch.Tensor, ...]]] = {name: [] for name in ("out", "dq", "dk", "dv")}
    packed = ((q, queries), (k, keys), (v, keys), (gradient, queries))
    for *tensors, mask in zip(*(x.double().split(n) for x, n in packed), masks(lengths, p), strict=True):
        qi, ki, vi, gi = (x.transpose(0, 1) for x in tensors)
        probabilities = (qi @ ki.mT * SCALE).softmax(-1)
        kept = probabilities * mask / (1 - realised(p))
        dp = gi @ vi.mT
        through = dp * mask / (1 - realised(p))
        ds = probabilities * (through - (kept * dp).sum(-1, keepdim=True)) * SCALE
        dot = (kept * dp).abs().sum(-1, keepdim=True), (kept * dp).square().sum(-1, keepdim=True)
        share = probabilities * SCALE  # what one unit of error in a row's dot product does to the gradient of a score
        worst, variance = 2 * ds.abs() + share * dot[0], 2 * ds.square()
        for name, out, most, spread in (
            ("out", kept @ vi, kept @ vi.abs(), kept.square() @ vi.square()),
            ("dq", ds @ ki, worst @ ki.abs(), variance @ ki.square() + dot[1] * (share @ ki).square()),
            (
                "dk",
                ds.mT @ qi,
                worst.mT @ qi.abs(),
                variance.mT @ qi.square() + share.square().mT @ (dot[1] * qi.square()),
            ),
            ("dv", kept.mT @ gi, 2 * kept.mT @ gi.abs(), 2 * kept.square().mT @ gi.square()),
        ):
            parts[name].append(tuple(x.transpose(0, 1) for x in (out, most + out.abs(), spread + out.square())))
    if not queries:
        return {name: (q.double(),) * 3 for name in parts}
    return {name: tuple(torch.cat(x) for x in zip(*part, strict=True)) for name, part in parts.items()}


def check(lengths=SAME, width: int = 64, p: float = P) -> None:
    q, k, v, gradient = inputs(lengths, width)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = varlen_attention(*leaves, *map(Lengths.of, lengths), p, SCALE)
    out.backward(gradient)
    half = torch.finfo(torch.bfloat16).eps / 2
    found = (out.detach(), *(x.grad for x in leaves))
    for (name, (value, worst, variance)), x in zip(expected(q, k, v, gradient, lengths, p).items(), found, strict=True):
        error = (x.double() - value).abs() / half
        # 2 %: products of two errors, and float32, which is 65536 times finer but has `width` terms a score.
        assert (error <= 1.02 * worst + 1e-6).all(), f"{name}: an error of {(error / worst).max():.2f} of what may be"
        if x.numel():
            # An error is spread evenly over +- half an ulp, which gives a third; and half an ulp is 1/m of the largest,
            # for a mantissa m of 1 to 2, whose square is a half on average: a sixth, if nothing else is rounded.
            share = error.square().mean() / variance.mean()
            assert share < 0.25, f"{name}: {share:.2f} of the variance that all largest errors would have"


@needs_cpu
@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.parametrize("name", SHAPES)
def test_errors_are_those_of_counted_roundings(name: str, p: float) -> None:
    check(SHAPES[name], p=p)


@needs_cpu
@pytest.mark.parametrize("width", [16, 32, 48, 80, 128, 144])
def test_widths(width: int) -> None:
    assert module.serves(*inputs(SAME, width)[:3])
    check(width=width)


@pytest.mark.parametrize(
    ("width", "dtype"), [(24, torch.bfloat16), (64, torch.float32), (64, torch.float16), (64, torch.float64)], ids=str
)
def test_leaves_the_rest_to_others(width: int, dtype: torch.dtype) -> None:
    q, k, v, _ = (x.to(dtype) for x in inputs(SAME, width))
    assert not module.serves(q, k, v)
    out = varlen_attention(q, k, v, *map(Lengths.of, SAME), 0.0, SCALE)
    want = expected(q, k, v, q, SAME, 0.0)["out"][0]
    torch.testing.assert_close(out.double(), want, atol=0.05, rtol=0)  # how exact they are is tested with them


def test_is_used_where_the_cpu_can() -> None:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    able = "avx512_bf16" in flags and building.load("varlen_attention_bf16") is not None
    assert (module.native() is not None) == able, "C and its meaning in PyTorch do not agree"


@needs_cpu
@pytest.mark.parametrize("name", SHAPES)
def test_masks_are_those_of_the_definition(name: str) -> None:
    lengths = SHAPES[name]
    saved = module.forward(*inputs(lengths, 16)[:3], *lengths, SEEDS, P, SCALE)[1]
    signs, start = saved[3].view(torch.int16) < 0, 0
    for mask in masks(lengths, P):
        heads, n, m = mask.shape
        size = heads * n * -(-m // 32) * 32
        if size:
            assert torch.equal(~signs[start : start + size].view(heads, n, -1)[..., :m], mask)
        start += size
    assert start == len(signs)


@needs_cpu
@pytest.mark.parametrize("p", [0.0, P])
def test_other_numbers_of_threads_give_the_same_bits(p: float) -> None:
    lengths = ([250, 3, 97, 0, 41],) * 2  # 3 times 74,000 scores: enough for threads to be woken
    q, k, v, gradient = inputs(lengths, 64)

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


def odd_address(x: torch.Tensor) -> torch.Tensor:
    """At an address that is no multiple of 4, with gaps between tokens and heads."""
    total, heads, width = x.shape
    step = width + 3
    memory = torch.full((total * (heads * step + 5) + 1,), math.nan, dtype=x.dtype)
    return memory[1:].as_strided(x.shape, (heads * step + 5, step, 1)).copy_(x)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def backwards(x: torch.Tensor) -> torch.Tensor:
    """The last dimension has a stride of its own."""
    return x.transpose(0, 2).contiguous().transpose(0, 2)


@needs_cpu
@pytest.mark.parametrize("layout", [odd_address, heads_first, backwards])
def test_strides_change_nothing(layout) -> None:
    def run(q, k, v, gradient) -> list[torch.Tensor]:
        out, saved = module.forward(q, k, v, *SAME, SEEDS, P, SCALE)
        return [out, *module.backward(gradient, saved, *SAME, P, SCALE)]

    plain = [x.contiguous() for x in inputs(SAME, 32)]
    for x, y in zip(run(*plain), run(*map(layout, plain)), strict=True):
        assert torch.equal(x, y) and y.is_contiguous()


@needs_cpu
def test_gradient_of_one_number_for_all() -> None:
    q, k, v, _ = (x.requires_grad_() for x in inputs(SAME, 16))
    lengths = list(map(Lengths.of, SAME))
    gradients = torch.autograd.grad(varlen_attention(q, k, v, *lengths, P).sum(), (q, k, v))  # strides of zero
    again = torch.autograd.grad(varlen_attention(q, k, v, *lengths, P), (q, k, v), torch.ones_like(q))
    assert all(map(torch.equal, gradients, again))


@needs_cpu
def test_what_has_no_keys_is_zero() -> None:
    lengths = SHAPES["no keys or no queries"]
    q, k, v, gradient = inputs(lengths, 32)
    for poison in (q, k, v):
        poison[:3] = math.nan  # queries without keys, and of the keys those that only the second sequence has
    q[3:], k[:], v[:] = 1, 1, 1
    out, saved = module.forward(q, k, v, *lengths, SEEDS, P, SCALE)
    dq, dk, dv = module.backward(gradient, saved, *lengths, P, SCALE)
    assert not out[:3].any() and not dq[:3].any() and not dk[31:].any() and not dv[31:].any()
    assert out[3:].any(-1).any(-1).all() and dv[:31].any()


def check_far_scores() -> None:
    """exp would overflow, or all of it vanish, without the row's own largest score taken off."""
    q = torch.full((5, 1, 16), 1e4).bfloat16()
    v = torch.arange(5.0)[:, None, None].expand(5, 1, 16).bfloat16()
    for low, high in ((-1, 1), (-3, -1), (1, 3)):
        k = torch.linspace(low, high, 5)[:, None, None].expand(5, 1, 16).bfloat16()
        for sign, row in ((1, 4.0), (-1, 0.0)):
            out = varlen_attention(q, k, v, Lengths.of([5]), Lengths.of([5]), scale=sign * 0.25)
            assert torch.equal(out, torch.full_like(out, row)), f"far from zero: {out[0, 0, 0]} for {row}"


@needs_cpu
def test_scores_of_any_size_and_nan_stays_in_its_sequence() -> None:
    check_far_scores()
    x = torch.randn(10, 1, 16).bfloat16()
    x[2, 0, 0] = math.nan
    leaf, lengths = x.clone().requires_grad_(), Lengths.of([4, 6])
    out = varlen_attention(leaf, leaf, leaf, lengths, lengths)
    out.backward(torch.ones_like(out))
    for y in (out, leaf.grad):
        assert y[:4].isnan().any() and not y[4:].isnan().any()


@needs_cpu
def test_keeps_nothing_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, right = [], module.forward
    monkeypatch.setattr(module, "forward", lambda *a, **k: (lambda r: kept.append(len(r[1])) or r)(right(*a, **k)))
    q, k, v, _ = inputs(SAME, 16)
    lengths = list(map(Lengths.of, SAME))
    out = varlen_attention(q, k, v, *lengths, P)
    with torch.no_grad():
        assert torch.equal(varlen_attention(q.requires_grad_(), k, v, *lengths, P), out)
    assert torch.equal(varlen_attention(q, k, v, *lengths, P), out)
    assert kept == [0, 0, 5]


@needs_cpu
def test_compiled_code_gives_the_same_bits() -> None:
    q, k, v, gradient = inputs(SAME, 32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    host = [torch.tensor(x, dtype=torch.int32) for x in SAME]
    arguments = (*host, torch.tensor(SEEDS), P, SCALE)
    torch.library.opcheck(public._opaque, (*leaves, *arguments))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q, k, v):
        return public._opaque(q, k, v, *arguments)

    eager = varlen_attention(*leaves, *map(Lengths.of, SAME), P, SCALE)
    out = compiled(*leaves)
    assert torch.equal(out, eager)
    for x, y in zip(*(torch.autograd.grad(o, leaves, gradient) for o in (out, eager)), strict=True):
        assert torch.equal(x, y)


@needs_cpu
def test_shapes_without_numbers() -> None:
    q, k, v, gradient = inputs(SAME, 32)
    out, saved = module.forward(q, k, v, *SAME, SEEDS, P, SCALE)
    real = [out, *saved, *module.backward(gradient, saved, *SAME, P, SCALE)]
    with FakeTensorMode() as mode:
        q, k, v, gradient = map(mode.from_tensor, (q, k, v, gradient))
        out, saved = module.forward(q, k, v, *SAME, SEEDS, P, SCALE)
        fake = [out, *saved, *module.backward(gradient, saved, *SAME, P, SCALE)]
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


@needs_cpu
def test_errors_name_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, gradient = inputs(([4], [6]), 16)
    with pytest.raises(ValueError, match=r"\(4, 3, 16\).*\(7, 3, 16\).*, not \(4, 3, 16\), \(6, 3, 16\)"):
        module.forward(q, k, v, [4], [7], SEEDS, P, SCALE)
    _, saved = module.forward(q, k, v, [4], [6], SEEDS, P, SCALE)
    with pytest.raises(ValueError, match="must be as q"):
        module.backward(gradient[:3], saved, [4], [6], P, SCALE)
    monkeypatch.setattr(module, "native", lambda: SimpleNamespace(forward=lambda call: 1))
    with pytest.raises(MemoryError, match="longest sequence"):
        module.forward(q, k, v, [4], [6], SEEDS, P, SCALE)


MUTANTS = {
    "none": ("", ""),
    "scale dropped": ("scale * 1.44269504f", "0 * scale + 1.44269504f"),
    "scale dropped in backward": ("inverse[r] * scale)", "inverse[r])"),
    "base e for 2": ("scale * 1.44269504f", "scale"),
    "a row's tail not masked": ("if (n - i < 32) a =", "if (n < 0) a ="),
    "tail of columns in the largest score": ("_mm512_mask_max_ps(top, below(n - i), top, _", "_mm512_max_ps(top, _"),
    "odd first elements": ("bits >> (first & 1)", "bits >> 0"),
    "same mask in all words": ("number = _mm512_add_epi32(number, next);", ""),
    "same mask in all rows": ("row * n, s->k0", "n % 2, s->k0"),
    "same mask in all sequences": ("k0 += (uint32_t)", "k0 += 0 * (uint32_t)"),
    "mask forgotten in forward": ("left = _mm512_maskz_mov_epi16(~gone, p);", ""),
    "mask forgotten in dv": ("e[r] = _mm512_maskz_mov_epi16(~_mm512_movepi16_mask(e[r]), e[r]);",
                             "e[r] = _mm512_and_si512(e[r], _mm512_set1_epi16(0x7FFF));"),
    "mask forgotten in the dot product": ("x = _mm512_maskz_mov_epi16(stays, x);", "x = _mm512_abs_epi16(x);"),
    "mask forgotten in ds": ("keep, dot, (__mmask16)(stays >> 16)", "keep, dot, 0xFFFF"),
    "keep forgotten in forward": ("factor[r] = inverse * c->keep;", "factor[r] = inverse;"),
    "keep forgotten in dv": ("factor[r] = inverse[r] * c->keep;", "factor[r] = inverse[r];"),
    "dot product without keep": ("* inverse[r] * keep);", "* inverse[r]);"),
    "last odd row of keys lost": ("i < 2 && r + i < rows", "i < 2 && r + 1 < rows"),
    "last odd row of queries lost": ("if (r < rows)\n      differentiate(1,", "if (r < 0)\n      differentiate(1,"),
    "last rows of a tile lost": ("r < rows; r += ROWS", "r + ROWS <= rows; r += ROWS"),
    "last odd pair lost": ("kept, wide * 2, 4, depth, v", "kept, wide * 2, 4, n / 2, v"),
    "blocks of queries not added up in dv": ("(rows + 1) / 2, g2, d, 16, i > 0", "(rows + 1) / 2, g2, d, 16, 0"),
    "blocks of queries not added up in dk": ("(rows + 1) / 2, q2, d, 16, i > 0", "(rows + 1) / 2, q2, d, 16, 0"),
    "first block of queries only": ("i < s->queries; i += FORWARD", "i < FORWARD; i += FORWARD"),
    "columns of pairs exchanged": ("upper ? _mm512_add_epi16(low, _mm512_set1_epi16(16)) : low", "low"),
    "scores in bfloat16": ("_mm512_fmsub_ps(_mm512_loadu_ps(s + i), factor, top)",
                           "_mm512_fmsub_ps(widen((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(s + i))), factor, top)"),
}  # fmt: skip


def compiled(folder: Path, old: str = "", new: str = "", *flags: str) -> ctypes.CDLL:
    """The kernel's library, with a fault planted."""
    source = Path(module.__file__).with_suffix(".c").read_text()
    assert not old or source.count(old) == 1, f"{old!r} is {source.count(old)} times in the kernel"
    (folder / "mutant.c").write_text(source.replace(old, new) if old else source)
    shutil.copy(Path(building.__file__).with_name("native.h"), folder)
    quick = ["-O1" if flag == "-O3" else flag for flag in building._FLAGS]
    command = [shutil.which("cc") or "gcc", *quick, *flags, "-shared", "mutant.c", "-o", "mutant.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "mutant.so"))


@needs_cpu
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_in_c_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = compiled(tmp_path, *MUTANTS[name])
    monkeypatch.setattr(module, "native", lambda: library)
    if name == "none":
        assert module.agrees(library)
        return check()
    with pytest.raises(AssertionError, match=r"of what may be|of the variance|far from zero"):
        check(([35, 130], [35, 131]), width=48)
        check_far_scores()
    # The comparison before the first use is for a compiler's faults: not for the last digit or the farthest scores.
    if name not in ("scores in bfloat16", "tail of columns in the largest score"):
        assert not module.agrees(library)


@needs_cpu
def test_a_library_that_differs_or_lacks_the_instructions_is_not_used(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "wrong").mkdir(), (tmp_path / "lacking").mkdir()
    wrong = compiled(tmp_path / "wrong", *MUTANTS["odd first elements"])
    lacking = compiled(tmp_path / "lacking", "", "", "-mno-avx512bf16")
    for library in (wrong, lacking, None):
        monkeypatch.setattr(module, "load", lambda name, library=library: library)
        assert module.native.__wrapped__() is None


HARNESS = """
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/mman.h>
#include "mutant.c"
/* They end where a page begins that nobody may touch: the sanitizer does not see masked loads. */
static uint16_t *numbers(int64_t n) {
  int64_t bytes = n * 2, pages = (bytes + 4095) / 4096 * 4096;
  char *start = mmap(0, (size_t)pages + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mprotect(start + pages, 4096, PROT_NONE)) exit(4);
  uint16_t *x = (uint16_t *)(start + pages - bytes);
  for (int64_t i = 0; i < n; i++) x[i] = (uint16_t)(0x3C00 + (i * 2654435761u >> 20 & 0x83FF));
  return x;
}
int main(void) {
  static const int32_t all[][3] = {{7, 7, 16},  {1, 131, 32},  {131, 1, 48}, {0, 5, 64},
                                   {5, 0, 16}, {100, 33, 80}, {97, 64, 128}};
  for (int i = 0; i < 7; i++) {
    int32_t *queries = malloc(4), *keys = malloc(4);
    *queries = all[i][0], *keys = all[i][1];
    int64_t d = all[i][2], heads = 2, q = *queries * heads * d, k = *keys * heads * d, wide = (*keys + 31) / 32 * 32;
    Call c = {.q = numbers(q), .k = numbers(k), .v = numbers(k), .gradient = numbers(q), .out = numbers(q),
              .dq = numbers(q), .dk = numbers(k), .dv = numbers(k), .queries = queries, .keys = keys, .sequences = 1,
              .heads = heads, .width = d, .k0 = 1, .k1 = 2, .least = -30000, .threads = 1, .scale = 0.1f, .keep = 1.1f,
              .probabilities = aligned_alloc(64, (size_t)(heads * *queries * wide) * 2),
              .inverse = malloc((size_t)(heads * *queries) * 4)};
    c.q_token = c.k_token = c.v_token = c.g_token = heads * d;
    c.q_head = c.k_head = c.v_head = c.g_head = d;
    if (forward(&c) || backward(&c)) return 3;
  }
  puts("done");
  return 0;
}
"""
OVERRUNS = {
    "none": ("", ""),
    "half a vector behind keys": ("__mmask16 some = below((width - c) / 2);", "__mmask16 some = 0xFFFF;"),
    "a row behind keys": ("i < 2 && r + i < rows", "i < 2"),
    "a pair of rows behind the scores": ("r + 1 < rows; r += 2", "r < rows + 1; r += 2"),
    "less memory than is used": ("most * (d * 8 + wide * 10)", "most * (d * 8 + wide * 9)"),
}


@needs_cpu
@pytest.mark.parametrize("name", OVERRUNS)
def test_no_memory_but_its_own_is_touched(name: str, tmp_path: Path) -> None:
    compiler, checks = shutil.which("cc") or "gcc", ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    (tmp_path / "empty.c").write_text("int main(void) { return 0; }")
    if subprocess.run([compiler, *checks, "empty.c"], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("this compiler has no address sanitizer")
    compiled(tmp_path, *OVERRUNS[name])
    (tmp_path / "harness.c").write_text(HARNESS)
    flags = [flag for flag in building._FLAGS if flag != "-O3"]
    subprocess.run([compiler, *flags, "-g", *checks, "harness.c", "-o", "harness"], cwd=tmp_path, check=True)
    environment = {"ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([tmp_path / "harness"], capture_output=True, text=True, env=environment)
    if name == "none":
        assert done.stdout == "done\n", done.stderr
    else:
        assert done.returncode and "AddressSanitizer" in done.stderr, done.stderr
