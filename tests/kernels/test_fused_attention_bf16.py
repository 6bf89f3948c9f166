"""Attention over packed sequences in bfloat16 by C: counted roundings, far scores, planted faults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fused_attention_check import (
    SAME,
    SCALE,
    SEEDS,
    SHAPES,
    WINDOWS,
    P,
    check_far_scores,
    compiled,
    inputs,
    masks,
    run_with_guards,
    seen,
)

from composer_speedups.kernels import fused_attention as module
from composer_speedups.kernels import per_sequence as public
from composer_speedups.kernels.fast_dropout import realised
from composer_speedups.kernels.varlen_attention import Lengths, varlen_attention

AMX, AVX512 = module.FILES[torch.bfloat16]
LIBRARIES = {file: module.usable(file, torch.bfloat16) for file in (AMX, AVX512)}


@pytest.fixture(autouse=True)
def _fixed_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "draw_keys", lambda: SEEDS)


@pytest.fixture(params=LIBRARIES)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of the kernel that serves, one after the other."""
    library = LIBRARIES[request.param]
    if library is None:
        pytest.skip("no compiler, or a CPU without AVX512-BF16 or, for the other, AMX")
    monkeypatch.setattr(module, "native", lambda dtype: library)
    return request.param


def expected(
    q, k, v, gradient, lengths, p: float, window: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
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
        scores = qi @ ki.mT * SCALE
        probabilities = scores.softmax(-1) if window < 0 else seen(scores, window).softmax(-1)
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


def check(lengths=SAME, width: int = 64, p: float = P, window: int = -1) -> None:
    q, k, v, gradient = inputs(lengths, width, torch.bfloat16)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = varlen_attention(*leaves, *map(Lengths.of, lengths), p, SCALE, window)
    out.backward(gradient)
    half = torch.finfo(torch.bfloat16).eps / 2
    found = (out.detach(), *(x.grad for x in leaves))
    results = expected(q, k, v, gradient, lengths, p, window)
    for (name, (value, worst, variance)), x in zip(results.items(), found, strict=True):
        error = (x.double() - value).abs() / half
        # 2 %: products of two errors, and float32, which is 65536 times finer but has `width` terms a score.
        assert (error <= 1.02 * worst + 1e-6).all(), f"{name}: an error of {(error / worst).max():.2f} of what may be"
        if x.numel():
            # An error is spread evenly over +- half an ulp, which gives a third; and half an ulp is 1/m of the largest,
            # for a mantissa m of 1 to 2, whose square is a half on average: a sixth, if nothing else is rounded.
            share = error.square().mean() / variance.mean()
            assert share < 0.25, f"{name}: {share:.2f} of the variance that all largest errors would have"


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.parametrize("name", SHAPES)
def test_errors_are_those_of_counted_roundings(name: str, p: float) -> None:
    check(SHAPES[name], p=p)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(window: int, p: float) -> None:
    check(WINDOWS[window], p=p, window=window)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("width", [16, 32, 48, 80, 128, 144])
def test_widths(width: int) -> None:
    assert module.serves(*inputs(SAME, width, torch.bfloat16)[:3])
    check(width=width)


@pytest.mark.usefixtures("kernel")
def test_scores_of_any_size() -> None:
    check_far_scores(torch.bfloat16)


MUTANTS = {
    "none": ("", ""),
    "scale dropped": ("-scale : scale) * 1.44269504f", "1 : 1) * 1.44269504f"),
    "scale dropped in backward": ("inverse[r] * scale)", "inverse[r])"),
    "base e for 2": ("-scale : scale) * 1.44269504f", "-scale : scale)"),
    "a row's tail not masked": ("if (n - i < 32 || hidden > i) {", "if (hidden > i) {"),
    "what is before the window not masked": ("if (n - i < 32 || hidden > i) {", "if (n - i < 32) {"),
    "tail of columns in the largest score": ("_mm512_mask_max_ps(top, some, top, _", "_mm512_max_ps(top, _"),
    "odd first elements": ("bits >> (first & 1)", "bits >> 0"),
    "same mask in all words": ("number = _mm512_add_epi32(number, next);", ""),
    "same mask in all rows": ("row * n + range.from, s->k0", "n % 2 + range.from, s->k0"),
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
    "last half vector of a width lost": ("below((width - c) / 2);", "below((width - c) / 2 - 4);"),
    "last odd row of queries lost": ("if (r < rows)\n      differentiate(1,", "if (r < 0)\n      differentiate(1,"),
    "blocks of queries not added up in dv": ("g2, own, rows, d, add", "g2, own, rows, d, 0"),
    "blocks of queries not added up in dk": ("q2, own, rows, d, add", "q2, own, rows, d, 0"),
    "sums of a window not begun with zero": ("if (c->window >= 0) memset(dk", "if (c->window > 99) memset(dk"),
    "a block's keys from one vector too far on": ("row).from / FILL * FILL", "row).from / FILL * FILL + FILL"),
    "what forward leaves out not cleared": ("if (c->window < 0) return;", "return;"),
    "first block of queries only": ("i < s->queries; i += FORWARD", "i < FORWARD; i += FORWARD"),
    "columns of pairs exchanged": ("upper ? _mm512_add_epi16(low, _mm512_set1_epi16(16)) : low", "low"),
    "scores in bfloat16": ("_mm512_fmsub_ps(_mm512_loadu_ps(s + i), one, top)",
                           "_mm512_fmsub_ps(widen((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(s + i))), one, top)"),
}  # fmt: skip
FAULTS = {  # what both kernels share is tried with one of them
    AMX: {
        "none": ("", ""),
        "rows of a second tile lost": ("rows - r > 16", "rows - r > 31"),
        "columns of a second tile lost": ("vectors - c > 1", "vectors - c > 2"),
        "first columns for second ones": ("_tile_dpbf16ps(3, 5, 7)", "_tile_dpbf16ps(3, 5, 6)"),
        "half of a depth lost": ("i < depth; i += 16", "i < depth; i += 32"),
        "blocks of queries not added up": ("deep, b, wide, 16, add", "deep, b, wide, 16, 0"),
        "rows that are not there are summed": ("r < up(rows, DEEP) / 2; r++", "r < 0; r++"),
        "rows and columns not exchanged": ("      transpose(x);\n      UNROLL for", "      UNROLL for"),
        "the last keys' gradients lost": ("i < 16 && k + i < keys", "i < 15 && k + i < keys"),
    },
    AVX512: {
        **MUTANTS,
        "last rows of a tile lost": ("r < rows; r += ROWS", "r + ROWS <= rows; r += ROWS"),
        "blocks of queries not added up": ("(rows + 1) / 2, a, width, 16, add", "(rows + 1) / 2, a, width, 16, 0"),
        "last odd pair lost in forward": ("up(m, DEEP) / 2, v", "m / 2, v"),
        "last odd pair lost in backward": ("(rows + 1) / 2, a, width", "rows / 2, a, width"),
    },
}


@pytest.mark.elsewhere  # GCC is the same with each
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("kernel", "name"), [(k, name) for k in FAULTS for name in FAULTS[k]], indirect=["kernel"])
def test_planted_faults_in_c_are_found(kernel: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = compiled(tmp_path, kernel, *FAULTS[kernel][name])
    monkeypatch.setattr(module, "native", lambda dtype: library)
    if name == "none":
        assert module.agrees(library, torch.bfloat16)
        for lengths in (SAME, ([53], [53])):
            check(lengths, width=48)
        return check(([53, 130],) * 2, width=48, window=20)
    with pytest.raises(AssertionError, match=r"of what may be|of the variance|far from zero"):
        check(([53, 130], [53, 131]), width=48)
        check(([53], [53]), width=48)  # nothing before it in the memory
        check(([53, 130],) * 2, width=48, window=20)
        check_far_scores(torch.bfloat16)
    # The comparison before the first use is for a compiler's faults: not for the last digit or the farthest scores.
    if name not in ("scores in bfloat16", "tail of columns in the largest score"):
        assert not module.agrees(library, torch.bfloat16)


@pytest.mark.skipif(None in LIBRARIES.values(), reason="no compiler, or a CPU without AMX")
def test_where_the_system_lets_nobody_have_tiles_vectors_serve(tmp_path: Path, monkeypatch) -> None:
    refused = compiled(tmp_path, AMX, "/* XFEATURE_XTILEDATA */) == 0", "/* XFEATURE_XTILEDATA */) != 0")
    monkeypatch.setattr(module, "load", {AMX: refused, AVX512: LIBRARIES[AVX512]}.get)
    assert module.usable(AMX, torch.bfloat16) is None
    assert module.native.__wrapped__(torch.bfloat16) is LIBRARIES[AVX512]


OVERRUNS = {
    "none": ("", ""),
    "memory for the first sequence only": ("most = bytes > most ? bytes : most;", "most = most ? most : bytes;"),
    "half a vector behind keys": ("__mmask16 some = below((width - c) / 2);", "__mmask16 some = 0xFFFF;"),
    "a row behind keys": ("i < 2 && r + i < rows", "i < 2"),
    "a pair of rows behind the scores": ("r + 1 < rows; r += 2", "r < rows + 1; r += 2"),
    "gradients behind those of the bias": ("ds + r * wide, (size_t)n * 2", "ds + r * wide, (size_t)(wide + 1) * 2"),
    "a bias behind it": ("c->bias + s->first + row * wide, n)", "c->bias + s->first + row * wide, wide + 1)"),
    "less memory than is used": ("d * 10 + wide * 10 + deep * 2", "d * 10 + wide * 9 + deep * 2"),
}


APART = {  # found only where each part of a task's memory stands by itself
    AMX: {
        "none": ("", ""),
        "always two tiles of rows": ("rows - r > 16", "rows - r > 0"),
        "always two tiles of columns": ("vectors - c > 1", "vectors - c > 0"),
        "room for too few rows": ("up(s->queries, DEEP) : BACKWARD", "up(s->queries, 2) : BACKWARD"),
        "half a vector behind a row": ("below((width - c) / 2), x + r", "0xFFFF, x + r"),
        "rows behind the gradients": ("i < 16 && k + i < keys", "i < 16"),
    },
    AVX512: {"none": ("", "")},
}
ALL_OVERRUNS = [(k, name, fault, False) for k in APART for name, fault in OVERRUNS.items()]
ALL_OVERRUNS += [(k, name, fault, True) for k, faults in APART.items() for name, fault in faults.items()]


@pytest.mark.elsewhere  # GCC is the same with each
@pytest.mark.parametrize(
    ("kernel", "name", "fault", "apart"),
    [pytest.param(*case, id=f"{case[0]}-{case[1]}{'-apart' * case[3]}") for case in ALL_OVERRUNS],
    indirect=["kernel"],
)
def test_no_memory_but_its_own_is_touched(
    kernel: str, name: str, fault: tuple[str, str], apart: bool, tmp_path: Path
) -> None:
    element = "(NUMBER)(0x3C00 + (i * 2654435761u >> 20 & 0x83FF))"
    found = run_with_guards(tmp_path, kernel, fault, element, module._FILL[torch.bfloat16], apart=apart)
    if not found:
        pytest.skip("this compiler has no address sanitizer")
    assert found == "done" if name == "none" else "AddressSanitizer" in found, found
