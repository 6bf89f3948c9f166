"""Attention over packed sequences in float32 by C: bounds on the error, far scores, planted faults, by both vectors."""

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

KERNEL = "fused_attention_float32"
VECTORS = {"AVX-512 if there is": (), "AVX2": ("-mno-avx512f",)}

pytestmark = pytest.mark.skipif(
    module.native(torch.float32) is None, reason="no compiler, or a CPU without AVX2 or AVX-512"
)


@pytest.fixture(autouse=True)
def _fixed_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public, "draw_keys", lambda: SEEDS)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return {name: compiled(tmp_path_factory.mktemp("kernel"), KERNEL, flags=flags) for name, flags in VECTORS.items()}


@pytest.fixture(params=VECTORS)
def _vectors(request: pytest.FixtureRequest, built: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "native", lambda dtype: built[request.param])


def expected(q, k, v, gradient, lengths, p: float, window: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """In float64, by the book: each result, and how far from it float32 can get, in units of half an ulp.

    A sum of n products in any order is off by at most n units of the sum of their sizes. Errors of scores are relative
    errors of exp; 2^x and the few operations around it get eight units and those that their arguments lose.
    """
    queries, keys = lengths
    parts: dict[str, list[tuple[torch.Tensor, ...]]] = {name: [] for name in ("out", "dq", "dk", "dv")}
    packed = ((q, queries), (k, keys), (v, keys), (gradient, queries))
    for *tensors, mask in zip(*(x.double().split(n) for x, n in packed), masks(lengths, p), strict=True):
        qi, ki, vi, gi = (x.transpose(0, 1) for x in tensors)
        (n, width), m, factor = qi.shape[1:], ki.shape[1], mask / (1 - realised(p))
        scores = qi @ ki.mT * SCALE
        probabilities = scores.softmax(-1) if window < 0 else seen(scores, window).softmax(-1)
        lost = width * SCALE * (qi.abs() @ ki.abs().mT) + scores.abs() + 8
        lost = lost + (probabilities * lost).sum(-1, keepdim=True) + m  # relative, of the probabilities
        kept = probabilities * factor
        dp, dp_lost = gi @ vi.mT, width * (gi.abs() @ vi.abs().mT)
        through = dp * factor
        dot = (kept * dp).sum(-1, keepdim=True)
        dot_lost = (kept * (dp_lost + dp.abs() * (lost + m))).sum(-1, keepdim=True)
        ds = probabilities * (through - dot) * SCALE
        sizes = through.abs() + dot.abs()
        ds_lost = probabilities * SCALE * (dp_lost * factor + dot_lost + sizes * (lost + 8))
        for name, out, most in (
            ("out", kept @ vi, (kept * (lost + m + 2)) @ vi.abs()),
            ("dq", ds @ ki, (ds_lost + m * ds.abs()) @ ki.abs()),
            ("dk", ds.mT @ qi, (ds_lost + n * ds.abs()).mT @ qi.abs()),
            ("dv", kept.mT @ gi, (kept * (lost + n + 2)).mT @ gi.abs()),
        ):
            parts[name].append(tuple(x.transpose(0, 1) for x in (out, most)))
    if not queries:
        return {name: (q.double(),) * 2 for name in parts}
    return {name: tuple(torch.cat(x) for x in zip(*part, strict=True)) for name, part in parts.items()}


def check(lengths=SAME, width: int = 64, p: float = P, window: int = -1) -> None:
    q, k, v, gradient = inputs(lengths, width, torch.float32)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    assert module.serves(*leaves)
    out = varlen_attention(*leaves, *map(Lengths.of, lengths), p, SCALE, window)
    out.backward(gradient)
    half = torch.finfo(torch.float32).eps / 2
    found = (out.detach(), *(x.grad for x in leaves))
    results = expected(q, k, v, gradient, lengths, p, window)
    for (name, (value, worst)), x in zip(results.items(), found, strict=True):
        error = (x.double() - value).abs() / half
        assert (error <= worst + 1e-6).all(), f"{name}: an error of {(error / worst).max():.2f} of what may be"
        # Worst cases do not meet: what rounding does to many terms is a small part of their sum of sizes.
        if x.numel():
            share = (error.square().mean() / worst.square().mean()).sqrt()
            assert share < 0.02, f"{name}: {share:.3f} of what the worst cases would give, as a root of squares"


@pytest.mark.usefixtures("_vectors")
@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "nothing"])
def test_errors_are_those_of_float32(name: str, p: float) -> None:
    check(SHAPES[name], p=p)


@pytest.mark.usefixtures("_vectors")
@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(window: int, p: float) -> None:
    check(WINDOWS[window], p=p, window=window)


@pytest.mark.usefixtures("_vectors")
def test_nothing_gives_nothing() -> None:
    q, k, v, gradient = inputs(([], []), 16, torch.float32)
    out, saved = module.forward(q, k, v, [], [], SEEDS, P, SCALE)
    assert [tuple(x.shape) for x in (out, *module.backward(gradient, saved, [], [], P, SCALE))] == [(0, 3, 16)] * 4


@pytest.mark.usefixtures("_vectors")
@pytest.mark.parametrize("width", [16, 32, 48, 80, 128, 144])
def test_widths(width: int) -> None:
    check(width=width)


@pytest.mark.usefixtures("_vectors")
def test_scores_of_any_size() -> None:
    check_far_scores(torch.float32, 1e-30)


MUTANTS = {
    "none": ("", ""),
    "scale dropped": ("-scale : scale) * 1.44269504f", "1 : 1) * 1.44269504f"),
    "scale dropped in backward": ("unit = all(scale);", "unit = all(0 * scale + 1);"),
    "base e for 2": ("-scale : scale) * 1.44269504f", "-scale : scale)"),
    "a row's tail not masked": ("if (n - i < WIDE || hidden > i) e =", "if (hidden > i) e ="),
    "what is before the window not masked": ("if (n - i < WIDE || hidden > i) e =", "if (n - i < WIDE) e ="),
    "tail of columns in the largest score": ("if (n - i < WIDE || hidden > i) {", "if (n < 0) {"),
    "odd first elements": ("bits + odd", "bits"),
    "same mask in all rows": ("first = row * n + range.from, odd", "first = n % 2 + range.from, odd"),
    "same mask in all sequences": ("k0 += (uint32_t)", "k0 += 0 * (uint32_t)"),
    "mask forgotten in forward": ("store(x + i, (Vector)(p & ~gone) * kept);", "store(x + i, (Vector)p * kept);"),
    "mask forgotten in backward": ("signed_p + i, (Vector)(p | (gone & sign))", "signed_p + i, (Vector)p"),
    "mask forgotten in dv": ("(Vector)(a & ~(a >> 31)) * factor", "(Vector)(a & size) * factor"),
    "mask forgotten in ds": ("(Vector)((Bits)(load(x + i) * factor) & ~(a >> 31))", "load(x + i) * factor"),
    "dropped ones without gradient": ("(Vector)(a & size) * unit", "(Vector)(a & ~(a >> 31)) * unit"),
    "keep forgotten in forward": ("kept = all(keep);", "kept = all(0 * keep + 1);"),
    "keep forgotten in backward": ("factor = all(keep), unit", "factor = all(0 * keep + 1), unit"),
    "last rows of a tile lost": ("r < rows; r += ROWS", "r + ROWS <= rows; r += ROWS"),
    "last columns of a tile lost": ("c < vectors; c += COLUMNS", "c + COLUMNS <= vectors; c += COLUMNS"),
    "last key lost": ("scores, wide, 1, m, v", "scores, wide, 1, m - 1, v"),
    "blocks of queries not added up in dv": ("rows, g, d, WIDE, add", "rows, g, d, WIDE, 0"),
    "blocks of queries not added up in dk": ("rows, q, d, WIDE, add", "rows, q, d, WIDE, 0"),
    "sums of a window not begun with zero": ("if (c->window >= 0) /*", "if (c->window > 99) /*"),
    "a block's keys from one vector too far on": ("row).from / FILL * FILL", "row).from / FILL * FILL + FILL"),
    "what forward leaves out not cleared": ("if (c->window < 0) return;", "return;"),
    "first block of queries only": ("i < s->queries; i += FORWARD", "i < FORWARD; i += FORWARD"),
    "halves exchanged when keys are turned": ("a[j], a[j + 4], 0x20)", "a[j], a[j + 4], 0x31)"),
    "2^x by too short a polynomial": ("y = multiply_add(y, f, all(0.00961848896f));", "y = all(0.00961848896f);"),
    "products in bfloat16": ("Vector first = all(a[i * step + r * row]);",
                             "Vector first = (Vector)((Bits)all(a[i * step + r * row]) & (int32_t)0xFFFF0000);"),
}  # fmt: skip


@pytest.mark.elsewhere  # GCC is the same with each
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_in_c_are_found(name: str, vectors: str, tmp_path: Path, monkeypatch) -> None:
    library = compiled(tmp_path, KERNEL, *MUTANTS[name], flags=VECTORS[vectors])
    monkeypatch.setattr(module, "native", lambda dtype: library)
    if name == "none":
        assert module.agrees(library, torch.float32)
        return check()
    with pytest.raises(AssertionError, match=r"of what may be|of what the worst|far from zero"):
        check(([35, 130], [35, 131]), width=48)
        check(([35, 130],) * 2, width=48, window=20)
        check_far_scores(torch.float32, 1e-30)
    # The comparison before the first use is for a compiler's faults: not for the last digit or the farthest scores.
    if name not in ("2^x by too short a polynomial", "tail of columns in the largest score"):
        assert not module.agrees(library, torch.float32)


OVERRUNS = {
    "none": ("", ""),
    "memory for the first sequence only": ("most = bytes > most ? bytes : most;", "most = most ? most : bytes;"),
    "a row behind keys": ("i < 8 && r + i < rows", "i < 8"),
    "rows behind the output": ("height = rows - r < ROWS ? rows - r : ROWS,", "height = ROWS,"),
    "less memory than is used": ("most * wide * 8", "most * wide * 7"),
    "gradients behind those of the bias": ("ds + r * wide, (size_t)n * 4", "ds + r * wide, (size_t)(wide + 1) * 4"),
    "a bias behind it": ("c->bias + s->first + row * wide, n)", "c->bias + s->first + row * wide, wide + 1)"),
    "less memory in forward": ("FORWARD * wide * 4 + (wide / 2 + 1) * 8", "FORWARD * wide * 3"),
}


@pytest.mark.elsewhere  # GCC is the same with each
@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("name", OVERRUNS)
def test_no_memory_but_its_own_is_touched(name: str, vectors: str, tmp_path: Path) -> None:
    element = "(NUMBER)(i * 2654435761u >> 20 & 1023) / 256.0f - 2.0f"
    flags = VECTORS[vectors]
    found = run_with_guards(tmp_path, KERNEL, OVERRUNS[name], element, module._FILL[torch.float32], *flags)
    if not found:
        pytest.skip("this compiler has no address sanitizer")
    assert found == "done" if name == "none" else "AddressSanitizer" in found, found
