"""What PyTorch's attention is given, and which of its kernels it may take, where a bias is learnt."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from distances_check import LENGTHS, POSITIONS, SCALE, places
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from composer_speedups.kernels.biased_attention import attention_with_bias
from composer_speedups.kernels.disentangled import disentangled_attention
from composer_speedups.kernels.distance_bias import distance_biased_attention
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
        attention_with_bias(q, q, q, bias, 0.0, SCALE)
        assert CUDNN() and not EFFICIENT()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # which it cannot be
        attention_with_bias(q, q, q, bias, 0.0, SCALE)
    assert [allowed for _, *allowed in calls] == [[False, False], [False, True]]


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients(compiled: bool) -> None:
    q, k, v, gradient = torch.randn(4, 2, 3, 8, 16).double()
    bias = torch.randn(2, 3, 8, 8).double()
    attend = (
        torch.compile(attention_with_bias, backend="aot_eager", fullgraph=True) if compiled else attention_with_bias
    )
    results = []
    for way in (attend, lambda q, k, v, bias, _, scale: (q @ k.mT * scale + bias).softmax(-1) @ v):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
        out = way(*leaves, 0.0, SCALE)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, gradient)))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
    torch._dynamo.reset()


def test_cudnn_has_no_gradient_for_a_bias() -> None:
    """The reason for all this; once it has one, there is none."""
    with FakeTensorMode():
        q = torch.empty(2, 4, 16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        bias = torch.empty(2, 4, 16, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'attn_bias'"):
            torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, q, bias, True)
