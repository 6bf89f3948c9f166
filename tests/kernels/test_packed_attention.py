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


# Kernels, and how each is launched.
LAUNCHED = {
    cuda.attention_kernel: (cuda._BLOCK, cuda._TURN, cuda._STAGES, cuda._REGISTERS),
    cuda.attention_queries_kernel: (cuda._BLOCK_Q, cuda._TURN_Q, cuda._STAGES_Q, cuda._REGISTERS_Q),
    cuda.attention_keys_kernel: (cuda._BLOCK_K, cuda._TURN_K, cuda._STAGES_K, cuda._REGISTERS_K),
}

# Bytes of a thread, where registers are bounded: of keys 24 by Triton 3.6 and 3.9, 72 by 3.3; of queries 16 by 3.9.
SPILLED = {cuda.attention_kernel: 0, cuda.attention_queries_kernel: 16, cuda.attention_keys_kernel: 72}


def compiled_for(capability: int, kernel: Any, dtype: torch.dtype, width: int = 64) -> Any:
    block, turn, stages, most = LAUNCHED[kernel]
    dtypes = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), dtype)
    dtypes |= {"sums": torch.float32, "delta": torch.float32}
    dtypes |= dict.fromkeys(("queries", "keys", "words"), torch.int32)
    constants = {"DROPPED": 6554, "WIDTH": width, "BLOCK": block, "TURN": turn}
    aligned = [name for name in kernel.arg_names if name.endswith("stride") or name == "room"]
    most = most if (capability, width) == (90, 64) else 0
    return compile_for(capability, kernel, dtypes, constants, block // 16, aligned, stages, most)


def name_of(kernel: Any) -> str:
    return kernel.fn.__name__


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("kernel", LAUNCHED, ids=name_of)
def test_programs_have_room_on_an_h100(kernel: Any, width: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Next to nothing of a thread's in memory, and several programs, of which some compute while others wait."""
    compiled = compiled_for(90, kernel, dtype, width)
    assert spills(compiled, tmp_path) <= SPILLED[kernel] * (width == 64)
    assert at_once(compiled, tmp_path) * compiled.metadata.num_warps >= 16
    assert "wgmma.mma_async" in compiled.asm["ptx"]


@pytest.mark.parametrize("capability", [80, 86, 89])
@pytest.mark.parametrize("kernel", LAUNCHED, ids=name_of)
def test_consumer_cards_have_enough_shared_memory(kernel: Any, capability: int) -> None:
    compiled = compiled_for(capability, kernel, torch.bfloat16)
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


def test_registers_are_bounded_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an option that it does not know, AMD's compiler makes an error."""
    wide, narrow = (torch.empty(1, 1, width) for width in (64, 32))
    assert cuda._bounded(wide, 96) == {}, "here is no Hopper"
    monkeypatch.setattr(cuda, "_hopper", lambda _: True)
    assert cuda._bounded(wide, 96) == {"maxnreg": 96}
    assert cuda._bounded(narrow, 96) == cuda._bounded(wide, 0) == {}


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
