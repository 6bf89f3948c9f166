"""Attention over packed sequences by tensor cores: on a GPU, its masks, and its kernels compiled for a GPU."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_code import at_once, compile_for, spills
from packed_attention_check import check, far_apart, tensors

from composer_speedups.kernels import packed_attention as module
from composer_speedups.kernels import packed_attention_triton as cuda
from composer_speedups.kernels.varlen_attention import Lengths

HALF = (torch.float16, torch.bfloat16)


FORWARD = (cuda.attention_kernel, cuda._QUERIES, cuda._KEYS, cuda._WARPS, cuda._STAGES)
BACKWARD = (
    cuda.attention_backward_kernel,
    cuda._BACK_QUERIES,
    cuda._BACK_KEYS,
    cuda._BACK_WARPS,
    cuda._BACK_STAGES,
)


def compiled_for(capability: int, launched: tuple[Any, int, int, int, int], dtype: torch.dtype):
    kernel, queries, keys, warps, stages = launched
    dtypes = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), dtype)
    dtypes |= {"sums": torch.float32, "delta": torch.float32}
    dtypes |= dict.fromkeys(("queries", "keys", "words"), torch.int32)
    constants = {"DROPPED": 6554, "WIDTH": 64, "QUERIES": queries, "KEYS": keys}
    aligned = [name for name in kernel.arg_names if name.endswith("stride") or name == "room"]
    return compile_for(capability, kernel, dtypes, constants, warps, aligned, stages)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_programs_have_room_on_an_h100(dtype: torch.dtype, tmp_path: Path) -> None:
    """Nothing of a thread's in memory, and several programs, of which one computes while another waits."""
    forward = compiled_for(90, FORWARD, dtype)
    backward = compiled_for(90, BACKWARD, dtype)
    assert spills(forward, tmp_path) == spills(backward, tmp_path) == 0
    assert at_once(forward, tmp_path) >= 3 and at_once(backward, tmp_path) >= 2
    assert "wgmma.mma_async" in forward.asm["ptx"] and "wgmma.mma_async" in backward.asm["ptx"]


@pytest.mark.parametrize("capability", [80, 86, 89])
def test_consumer_cards_have_enough_shared_memory(capability: int) -> None:
    for launched in (FORWARD, BACKWARD):
        compiled = compiled_for(capability, launched, torch.bfloat16)
        assert "mma.sync" in compiled.asm["ptx"]
        assert compiled.metadata.shared <= 99 * 1024 // 2  # two programs on a processor


def masks(p: float) -> torch.Tensor:
    """[sequences, queries, keys], in float32: what was dropped less its mean, over its deviation."""
    lengths = Lengths.of([128] * 600)
    words = torch.randint(-(1 << 31), 1 << 31, (2, 1, 128 * 600), dtype=torch.int32)
    dropped = ~module.kept_by_torch(words, lengths, lengths, p).squeeze(1)
    p = round(p * 65536) / 65536
    return (dropped.float() - p) / math.sqrt(p * (1 - p))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_are_as_of_independent_scores(p: float) -> None:
    """Shares, pairs in rows, columns and across, three and four corners of rectangles, and sums: to 5 deviations."""
    d = masks(p)
    products = {"share": d}
    for step in (1, 2, 8, 31):
        right, below, across = d[:, :, step:], d[:, step:], d[:, step:, step:]
        corner = d[:, :-step, :-step]
        products |= {
            f"row {step}": right * d[:, :, :-step],
            f"column {step}": below * d[:, :-step],
            f"across {step}": across * corner,
            f"three {step}": across * corner * d[:, step:, :-step],
            f"four {step}": across * corner * d[:, step:, :-step] * d[:, :-step, step:],
        }
    for name, x in products.items():
        # Neighbouring products have a factor in common, which changes nothing in their sum's variance.
        deviations = x.double().sum() / math.sqrt(x.numel()) / float(x.double().square().mean().sqrt())
        assert abs(deviations) < 5, f"{name}: {deviations:.1f}"
    for dims in ((1,), (2,), (1, 2)):
        sums = d.double().sum(dims)
        of_one = math.prod(d.shape[dim] for dim in dims)
        assert abs(sums.var() / of_one - 1) < 6 * math.sqrt(2 / sums.numel()), dims


def test_masks_of_heads_and_sequences_differ() -> None:
    lengths = Lengths.of([64, 64])
    words = torch.randint(-(1 << 31), 1 << 31, (2, 2, 256), dtype=torch.int32)
    kept = module.kept_by_torch(words, lengths, lengths, 0.5)
    for a, b in itertools.combinations(kept.flatten(0, 1), 2):
        assert 0.4 < (a == b).float().mean() < 0.6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("width", [32, 64])
def test_on_a_gpu(width: int, p: float, dtype: torch.dtype) -> None:
    lengths = Lengths.of([200, 1, 0, 256, 64, 65, 33], "cuda")
    check(module.packed_attention, *tensors(lengths, 4, width, dtype, device="cuda"), lengths, p=p)


@pytest.mark.gpu
def test_low_scores_on_a_gpu() -> None:
    lengths = Lengths.of([70, 20, 256], "cuda")
    check(module.packed_attention, *far_apart(lengths, "cuda"), lengths, p=0.3)


@pytest.mark.gpu
def test_other_queries_than_keys_on_a_gpu() -> None:
    queries, keys = Lengths.of([1, 1, 0, 80], "cuda"), Lengths.of([90, 1, 2, 200], "cuda")
    (q,) = tensors(queries, 2, 64, torch.bfloat16, 1, "cuda")
    check(module.packed_attention, q, *tensors(keys, 2, 64, torch.bfloat16, 2, "cuda"), queries, keys, 0.1)


@pytest.mark.gpu
def test_a_graph_draws_new_masks() -> None:
    lengths = Lengths.of([60, 100], "cuda")
    q, k, v = (x.detach() for x in tensors(lengths, 2, 64, torch.bfloat16, device="cuda"))
    module.packed_attention(q, k, v, lengths, lengths, 0.5)  # compiled now
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module.packed_attention(q, k, v, lengths, lengths, 0.5)
    found = []
    for _ in "abc":
        graph.replay()
        found.append(out.clone())
    assert all(x.isfinite().all() for x in found) and not found[0].equal(found[1]) and not found[1].equal(found[2])
