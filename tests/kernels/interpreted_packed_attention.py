"""Attention over packed sequences by tensor cores, without a GPU: `test_interpreted.py` runs this file."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from mutants import triton_mutant
from packed_attention_check import check, far_apart, tensors

from composer_speedups.kernels import packed_attention as module
from composer_speedups.kernels import packed_attention_triton as cuda
from composer_speedups.kernels.tensors import beside
from composer_speedups.kernels.varlen_attention import Lengths

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

# Triton's interpreter multiplies the bits of bfloat16, not its numbers; compiled code is executed as it is.
DTYPES = [torch.float16] + [torch.bfloat16] * ("EMULATED" in os.environ)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_matches_float64(width: int, dtype: torch.dtype, p: float) -> None:
    lengths = Lengths.of([70, 3, 0, 130, 64])
    check(module.packed_attention, *tensors(lengths, 2, width, dtype), lengths, p=p)


@pytest.mark.parametrize("lengths", [[1], [64], [65], [0, 0], [1, 128, 2], []])
def test_any_number_of_rows(lengths: list[int]) -> None:
    of = Lengths.of(lengths)
    check(module.packed_attention, *tensors(of, 1, 32, DTYPES[-1]), of, p=0.1)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_other_queries_than_keys(p: float) -> None:
    queries, keys = Lengths.of([1, 1, 0, 80, 4]), Lengths.of([90, 1, 2, 7, 65])
    (q,), (k, v) = tensors(queries, 2, 32, DTYPES[-1], 1), tensors(keys, 2, 32, DTYPES[-1], 2)
    check(module.packed_attention, q, k, v, queries, keys, p)
    others, (k, v) = Lengths.of([1, 1, 1, 79, 4]), tensors(queries, 2, 32, DTYPES[-1], 2)
    check(module.packed_attention, *tensors(keys, 2, 32, DTYPES[-1], 1), k, v, keys, others, p)


def test_a_sequence_without_keys_has_zeros() -> None:
    queries, keys = Lengths.of([3, 2]), Lengths.of([0, 2])
    (q,), (k, v) = tensors(queries, 1, 32, torch.float16, 1), tensors(keys, 1, 32, torch.float16, 2)
    out = module.packed_attention(q, k, v, queries, keys, 0.1)
    gradients = torch.autograd.grad(out.sum(), [q, k, v])
    assert out[:3].eq(0).all() and gradients[0][:3].eq(0).all() and all(g.isfinite().all() for g in gradients)


def test_any_scale_and_strides() -> None:
    lengths = Lengths.of([20, 66])
    q, k, v = (x.detach() for x in tensors(lengths, 2, 64, DTYPES[-1]))
    for same in (
        lambda x: x.contiguous(),
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x[:, :1].expand(-1, 2, -1),
        lambda x: x[..., ::2],  # not `serves`: the numbers of a head must lie beside each other
    ):
        parts = [same(x).requires_grad_() for x in (q, k, v)]
        assert module.serves(*parts) == (parts[0].stride(-1) == 1)
        if module.serves(*parts):
            check(module.packed_attention, *parts, lengths, p=0.1, scale=0.3)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_large_scores() -> None:
    """Softmax in powers of two, with the largest taken off, keeps what float64 keeps."""
    lengths = Lengths.of([100])
    q, k, v = (x.detach() for x in tensors(lengths, 1, 32, torch.float16))
    check(module.packed_attention, *((x * 3).requires_grad_() for x in (q, k)), v.requires_grad_(), lengths)
    check(module.packed_attention, *far_apart(lengths), lengths, p=0.2)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_sequences_do_not_see_each_other() -> None:
    lengths = Lengths.of([30, 50, 70])
    q, k, v = (x.detach() for x in tensors(lengths, 1, 32, DTYPES[-1]))
    found = []
    for bad in (0.0, float("nan"), float("inf")):
        parts = [x.clone() for x in (q, k, v)]
        for x in parts:
            x[30:80] = bad
        parts = [x.requires_grad_() for x in parts]
        torch.manual_seed(1)
        out = module.packed_attention(*parts, lengths, lengths, 0.2)
        found.append([x[[*range(30), *range(80, 150)]] for x in (out, *torch.autograd.grad(out, parts, q))])
    assert all(x.isfinite().all() for x in found[0])
    assert all(a.equal(b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_repeats_bit_for_bit_and_draws_anew() -> None:
    lengths = Lengths.of([100, 28])
    parts, outs = tensors(lengths, 2, 32, torch.float16), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = module.packed_attention(*parts, lengths, lengths, 0.2)
        outs.append([out, *torch.autograd.grad(out, parts, torch.ones_like(out))])
    assert all(a.equal(b) for a, b in zip(*outs[:2], strict=True)) and not outs[0][0].equal(outs[2][0])


def test_gradients_lie_as_their_tensors_do() -> None:
    """For `joint_linear`, which then copies nothing."""
    lengths = Lengths.of([9, 5])
    parts = tensors(lengths, 2, 32, torch.float16)
    out = module.packed_attention(*parts, lengths, lengths)
    gradients = [g.flatten(1) for g in torch.autograd.grad(out.sum(), parts)]
    assert beside(gradients).data_ptr() == gradients[0].data_ptr()


def test_what_was_kept_may_come_back_in_another_layout() -> None:
    lengths = Lengths.of([9, 70])
    parts = tensors(lengths, 2, 32, torch.float16)
    found = []
    across = (lambda x: x.transpose(0, -1).contiguous(), lambda x: x.transpose(0, -1))
    for hooks in (nullcontext(), torch.autograd.graph.saved_tensors_hooks(*across)):
        torch.manual_seed(2)
        with hooks:
            out = module.packed_attention(*parts, lengths, lengths, 0.2)
        found.append(torch.autograd.grad(out, parts, torch.ones_like(out), retain_graph=True))
        assert all(
            a.equal(b) for a, b in zip(found[-1], torch.autograd.grad(out, parts, torch.ones_like(out)), strict=True)
        )
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


def test_many_gradients_at_once_are_refused() -> None:
    lengths = Lengths.of([5])
    parts = tensors(lengths, 1, 32, torch.float16)
    out = module.packed_attention(*parts, lengths, lengths)
    with pytest.raises(NotImplementedError, match=r"in batches of them: use Unpadding\(timed_attention=False\)"):
        torch.autograd.grad(out, parts, torch.ones(2, *out.shape).half(), is_grads_batched=True)


def test_what_it_leaves_to_others() -> None:
    q, k, v = tensors(Lengths.of([4]), 1, 32, torch.float16)
    assert module.serves(q, k, v)
    for other in (q.float(), q.double(), q[..., :16], torch.cat([q] * 4, -1)):
        assert not module.serves(other, other, other)
    for others in ((k.float(), v.float()), (k, v.to(torch.bfloat16)), (k.expand(-1, 2, -1), v)):
        assert not module.serves(q, *others)
    with torch.autograd.forward_ad.dual_level():
        assert not module.serves(q, k, v)
    one, many = Lengths.of([4]), Lengths.of([0] * 65536)
    for arguments, message in (
        ((one, one, 1.0), "dropout_p is a probability from 0 to below 1, got 1"),
        ((one, one, 0.0, -1.0), "scale must be above 0, got -1"),
        ((many, many), "at most 65,535 sequences fit in a launch, got 65,536"),
    ):
        with pytest.raises(ValueError, match=message):
            module.packed_attention(q, k, v, *arguments)


MASKED, UNMASKED = 'tl.where((key < n_k)[None, :], tl.dot(q, tl.trans(k)), float("-inf"))', "tl.dot(q, tl.trans(k))"
FORWARD, BACKWARD = "\n        larger", "\n        p"
ADDED = "total_of = total_of * before + tl.sum("
WORDS = "of_queries = tl.load(_words(words_ptr, room, {}) + begin_q + at)\n        p"
MUTANTS = {
    "none": ("out = out * (kept", "out  = out * (kept"),
    "padding seen": (MASKED + FORWARD, UNMASKED + FORWARD),
    "padding seen by the gradient of queries": (MASKED + BACKWARD, UNMASKED + BACKWARD),
    "a sum of what is large": (ADDED + "p, 1)", ADDED + "tl.where(p > 0.5, p, 0.0), 1)"),
    "no rescaling": ("tl.dot(p.to(v.dtype), v, out * before[:, None])", "tl.dot(p.to(v.dtype), v, out)"),
    "a mask of its own": (WORDS.format(0), WORDS.format(1)),
    "one mask for all heads": ("(end * tl.num_programs(1) + tl.program_id(1))", "(end * tl.num_programs(1))"),
    "delta lost": ("(p * (dp - delta[None, :]))", "(p * (dp - 0 * delta[None, :]))"),
    "delta with what is kept": ("tl.float32), 1) / kept", "tl.float32), 1)"),
    "a scale of powers of two": ("dq * (scale * _LN_2 * kept)", "dq * (scale * kept)"),
    "values unscaled": ("dv * kept", "dv * 1.0"),
    "first head for all": ("k_ptr + head * k_head_stride, begin_k + key, real", "k_ptr, begin_k + key, real"),
    "last queries lost": ("cdiv(queries.longest, _BLOCK_Q)", "cdiv(1, _BLOCK_Q)"),
    "later turns lost": ("for first in range(0, n_q, TURN)", "for first in range(0, TURN, TURN)"),
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", MUTANTS)
def test_check_finds_planted_faults(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = triton_mutant(cuda, *MUTANTS[name], tmp_path)
    monkeypatch.setattr(module, "cuda_side", lambda *_: mutant)
    lengths = Lengths.of([70, 20, 100])

    def both() -> None:
        check(module.packed_attention, *tensors(lengths, 2, 32, torch.float16), lengths, p=0.3)
        check(module.packed_attention, *far_apart(lengths), lengths, p=0.3)

    if name == "none":
        return both()
    with pytest.raises(AssertionError):
        both()
