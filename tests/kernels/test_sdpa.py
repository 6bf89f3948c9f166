"""What PyTorch's attention over padded sequences is given, and which of its kernels it may take."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from distances_check import LENGTHS, POSITIONS, SCALE, places
from torch.nn.attention import SDPBackend, sdpa_kernel

from composer_speedups.kernels import sdpa
from composer_speedups.kernels.disentangled import disentangled_attention
from composer_speedups.kernels.distance_bias import distance_biased_attention
from composer_speedups.kernels.sdpa import padded_attention
from composer_speedups.kernels.varlen_attention import Lengths

EFFICIENT = torch.backends.cuda.mem_efficient_sdp_enabled
CUDNN = torch.backends.cuda.cudnn_sdp_enabled


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, bool, bool]]:
    """Of each call the bias, and whether cuDNN's and memory-efficient attention were allowed."""
    seen, own = [], F.scaled_dot_product_attention

    def record(q, k, v, bias, *rest, **more) -> torch.Tensor:
        seen.append((bias, CUDNN(), EFFICIENT()))
        return own(q, k, v, bias, *rest, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    monkeypatch.setattr(sdpa, "_may_be_cudnns", lambda q: True)  # as on a GPU
    return seen


def test_both_kinds_of_bias_need_no_copy_and_no_cudnn(calls) -> None:
    """Memory-efficient attention copies, and keeps for backward, what has a stride that 8 does not divide."""
    q, k, v = torch.randn(3, sum(LENGTHS), 2, 8).double()
    table, positions = torch.randn(2, POSITIONS).double(), torch.randn(POSITIONS, 2, 8).double()
    lengths = Lengths.of(LENGTHS)
    distance_biased_attention(q, k, v, table, places(), lengths, 0.0, SCALE)
    disentangled_attention(q, k, v, positions, positions, places(), lengths, 0.0, SCALE)
    assert len(calls) == 2 and max(LENGTHS) % 8
    for bias, cudnn, efficient in calls:
        *strides, last = bias.stride()
        assert last == 1 and not any(stride % 8 for stride in strides)
        assert (cudnn, efficient) == (False, True)
    assert CUDNN(), "as before"


def test_what_is_turned_off_stays_so(calls) -> None:
    q, bias = torch.randn(2, 3, 8, 16), torch.randn(2, 3, 8, 8)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]):
        padded_attention(q, q, q, bias, 0.0, SCALE)
        assert CUDNN() and not EFFICIENT()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # which it cannot be
        padded_attention(q, q, q, bias, 0.0, SCALE)
    assert [allowed for _, *allowed in calls] == [[False, False], [False, True]]


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients(compiled: bool) -> None:
    q, k, v, gradient = torch.randn(4, 2, 3, 8, 16).double()
    bias = torch.randn(2, 3, 8, 8).double()
    attend = torch.compile(padded_attention, backend="aot_eager", fullgraph=True) if compiled else padded_attention
    results = []
    for way in (attend, lambda q, k, v, bias, _, scale: (q @ k.mT * scale + bias).softmax(-1) @ v):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
        out = way(*leaves, 0.0, SCALE)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, gradient)))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
    torch._dynamo.reset()


def test_where_only_the_bias_learns_the_math_kernel_serves(calls) -> None:
    """Memory-efficient attention would keep nothing for backward."""
    q, bias = torch.randn(2, 3, 8, 16), torch.randn(2, 3, 8, 8, requires_grad=True)
    padded_attention(q, q, q, bias, 0.0, SCALE)
    with torch.no_grad():
        padded_attention(q, q, q, bias, 0.0, SCALE)
    for which in range(3):
        qkv = [q.clone().requires_grad_(i == which) for i in range(3)]
        padded_attention(*qkv, bias, 0.0, SCALE)
    padded_attention(q, q, q, None, 0.0, SCALE)
    assert [efficient for _, _, efficient in calls] == [False, True, True, True, True, True]
    assert not any(cudnn for _, cudnn, _ in calls)


@pytest.mark.gpu
@pytest.mark.parametrize("learns", ["all", "mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuda_gradients(dtype: torch.dtype, learns: str) -> None:
    """On a GPU; of the mask alone, too, where memory-efficient attention would read memory that was never written."""
    q, k, v, gradient = torch.randn(4, 2, 3, 8, 16).to(dtype).cuda()
    mask = torch.randn(2, 3, 8, 8).to(dtype).cuda()
    given = [x.requires_grad_(learns == "all" or x is mask) for x in (q, k, v, mask)]
    leaves = [x for x in given if x.requires_grad]
    found = torch.autograd.grad(padded_attention(*given, 0.0, SCALE), leaves, gradient)
    wide = [x.detach().cpu().double().requires_grad_(x.requires_grad) for x in given]
    out = (wide[0] @ wide[1].mT * SCALE + wide[3]).softmax(-1) @ wide[2]
    expected = torch.autograd.grad(out, [x for x in wide if x.requires_grad], gradient.cpu().double())
    ulp = max(torch.finfo(dtype).eps, 1e-6)  # as in test_varlen_attention.py
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.cpu().double(), y, rtol=16 * ulp, atol=32 * ulp)


def test_on_cpus_nothing_is_set_that_threads_could_leave_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kernels: object) -> None:
        raise AssertionError("set")

    monkeypatch.setattr(sdpa, "sdpa_kernel", refuse)
    q = torch.randn(1, 2, 3, 8)
    padded_attention(q, q, q, torch.zeros(1, 2, 3, 3), 0.0, 0.5)
    with pytest.raises(AssertionError, match="set"):  # where the mask alone learns, the kernel matters there, too
        padded_attention(q, q, q, torch.zeros(1, 2, 3, 3, requires_grad=True), 0.0, 0.5)
