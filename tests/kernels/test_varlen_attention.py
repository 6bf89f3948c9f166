from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from fused_attention_check import seen

from composer_speedups.kernels import per_sequence as on_cpu
from composer_speedups.kernels import varlen_attention as module
from composer_speedups.kernels.fast_dropout import keep_by_torch, realised
from composer_speedups.kernels.native import load
from composer_speedups.kernels.varlen_attention import Lengths, attention_kernel, varlen_attention

LENGTHS = [7, 1, 0, 33, 16]
HEADS, WIDTH, P = 3, 8, 0.25
SEEDS = (0xDEADBEEF, 0x12345678)


def inputs(dtype: torch.dtype, device: str = "cpu", queries: list[int] = LENGTHS) -> list[torch.Tensor]:
    """q, k, v as views of one tensor, as a fused projection gives them, and a gradient."""
    qkv = torch.randn(sum(LENGTHS), 3, HEADS, WIDTH).to(dtype).to(device)
    q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(1))
    q = q[: sum(queries)].detach().requires_grad_()
    return [q, k, v, torch.randn(q.shape).to(dtype).to(device)]


def masks(queries: list[int], keys: list[int]) -> list[torch.Tensor]:
    """The dropout mask of each sequence, as a factor, by its definition: one hash that runs on over sequences."""
    out, word = [], 0
    for n, m in zip(queries, keys, strict=True):
        size = HEADS * n * m
        own = ((SEEDS[0] + word * 0x9E3779B9) % 2**32, SEEDS[1])
        keep = keep_by_torch(size, own, round(realised(P) * 65536))
        out.append(keep.view(HEADS, n, m).double() / (1 - realised(P)))
        word += (size + 1) // 2
    return out


def reference(
    q, k, v, queries: list[int], keys: list[int], dropout: bool, scale: float, window: int = -1
) -> torch.Tensor:
    """In float64, one sequence after the other."""
    out = []
    spans = zip(q.split(queries), k.split(keys), v.split(keys), masks(queries, keys), strict=True)
    for qi, ki, vi, mask in spans:
        scores = torch.einsum("qhd,khd->hqk", qi, ki) * scale
        p = (scores if window < 0 else seen(scores, window)).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", p * mask if dropout else p, vi))
    return torch.cat(out)


def check(
    dtype: torch.dtype, queries: list[int] = LENGTHS, p: float = P, scale: float | None = None, window: int = -1
) -> None:
    q, k, v, gradient = inputs(dtype, queries=queries)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = reference(*wide, queries, LENGTHS, p > 0, WIDTH**-0.5 if scale is None else scale, window)
    expected.backward(gradient.double())
    out = varlen_attention(q, k, v, Lengths.of(queries), Lengths.of(LENGTHS), p, scale, window)
    out.backward(gradient)
    # Scores, probabilities and the gradient of each are stored in `dtype`: four roundings of values that are then
    # summed with weights of at most a few units. bf16 scores of size s are off by s ulp/2, and so is exp of them
    # relatively: |s| stays below 8 here. The same bound serves gradients, whose terms are products of two such.
    ulp = max(torch.finfo(dtype).eps, 1e-13)
    torch.testing.assert_close(out.double(), expected, rtol=8 * ulp, atol=8 * ulp)
    for x, y in zip((q, k, v), wide, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=16 * ulp, atol=32 * ulp)


@pytest.fixture(autouse=True)
def _fixed_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "draw_keys", lambda: SEEDS)


@pytest.fixture(params=["C", "PyTorch"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The pass between the products by either implementation."""
    if request.param == "PyTorch":
        monkeypatch.setattr(on_cpu, "native", lambda: None)
    elif load("per_sequence") is None:
        pytest.skip("no C compiler on this machine")
    return request.param


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_matches_float64(dtype: torch.dtype, p: float, threads: int, passes: str, monkeypatch) -> None:
    monkeypatch.setattr(on_cpu, "_WORTHWHILE", 0)  # several threads however small the work
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(dtype, p=p)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_evaluation_keeps_no_probabilities_in_either_mode(threads: int, passes: str, monkeypatch) -> None:
    """Inference mode belongs to a thread: others may write its tensors only if they are in it, too."""
    monkeypatch.setattr(on_cpu, "_WORTHWHILE", 0)
    kept, right = [], on_cpu._forward

    def watched(*arguments, **keywords):
        out, blocks = right(*arguments, **keywords)
        kept.extend(block for block in blocks if block)
        return out, blocks

    monkeypatch.setattr(on_cpu, "_forward", watched)
    q, k, v, _ = inputs(torch.float32)
    lengths, before = Lengths.of(LENGTHS), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            expected = varlen_attention(q, k, v, lengths, lengths, P)
        with torch.inference_mode():
            found = varlen_attention(q, k, v, lengths, lengths, P)
        assert not kept
        assert torch.equal(found, expected)
        varlen_attention(q, k, v, lengths, lengths, P)
        assert len(kept) == sum(n > 0 for n in LENGTHS), "for a backward pass they are needed"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_other_queries_than_keys_and_own_scale(dtype: torch.dtype, passes: str) -> None:
    check(dtype, queries=[1, 1, 0, 1, 1], scale=0.2)


@pytest.mark.parametrize("window", [0, 1, 5, 16, 31, 32, 40])  # all but the two farthest tokens at 31
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_windows(dtype: torch.dtype, window: int, passes: str) -> None:
    check(dtype, window=window)
    check(dtype, p=0.0, scale=-0.3, window=window)


@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_probabilities_of_long_sequences_are_made_again(
    dtype: torch.dtype, window: int, passes: str, monkeypatch
) -> None:
    """With the masks that they had, and by as much memory less."""

    def run() -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(3)
        q, k, v, gradient = inputs(dtype)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            out = varlen_attention(q, k, v, lengths, lengths, P, window=window)
        return [out, *torch.autograd.grad(out, (q, k, v), gradient)], sum(kept)

    lengths = Lengths.of(LENGTHS)
    expected, before = run()
    monkeypatch.setattr(on_cpu, "_LONG", 32)
    check(dtype, window=window)
    found, after = run()
    assert all(map(torch.equal, found, expected))
    assert before - after >= HEADS * sum(n * n for n in LENGTHS) and after == 3 * expected[0].numel()


@pytest.mark.parametrize("fault", ["seeds", "queries"])
def test_a_planted_fault_in_making_them_again_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "_LONG", 32)
    check(torch.float64)
    right = on_cpu._again

    def wrong(gradient, q, k, v, queries, keys, seeds, *rest):
        return right(gradient, q.flip(0) if fault == "queries" else q, k, v, queries, keys,
                     seeds if fault == "queries" else (1, 2), *rest)  # fmt: skip

    monkeypatch.setattr(on_cpu, "_again", wrong)
    with pytest.raises(AssertionError, match="not close"):
        check(torch.float64)


def test_a_window_needs_as_many_queries_as_keys() -> None:
    x = torch.randn(6, 1, 8)
    with pytest.raises(ValueError, match="as many queries as keys, got up to 1 and 4"):
        varlen_attention(x[:2], x, x, Lengths.of([1, 1]), Lengths.of([4, 2]), window=2)


def test_what_was_built_is_used() -> None:
    assert (load("per_sequence") is None) == (on_cpu.native() is None), "C and PyTorch passes do not agree"


def test_scores_of_any_size(passes: str) -> None:
    q = torch.full((5, 1, 8), 1e4)  # exp would overflow without the row's maximum taken off
    k = torch.linspace(-1, 1, 5)[:, None, None].expand(5, 1, 8)
    v = torch.arange(5.0)[:, None, None].expand(5, 1, 8)
    lengths = Lengths.of([5])
    torch.testing.assert_close(varlen_attention(q, k, v, lengths, lengths), torch.full((5, 1, 8), 4.0))


def test_nan_stays_in_its_sequence(passes: str) -> None:
    x = torch.randn(10, 1, 8)
    x[2, 0, 0] = math.nan
    lengths = Lengths.of([4, 6])
    out = varlen_attention(x, x, x, lengths, lengths)
    assert out[:4].isnan().any() and not out[4:].isnan().any()


def test_dropout_has_the_stated_probability_and_mean() -> None:
    size = 400
    lengths, v = Lengths.of([size]), torch.ones(size, 1, 8)
    q = torch.zeros(size, 1, 8)  # all probabilities are 1 / size: the output is (kept share) / (1 - p)
    out = varlen_attention(q, q, v, lengths, lengths, 0.1)[:, 0, 0]
    # The mean of 160,000 Bernoulli draws, over 0.9, has a standard deviation of 0.3 / 400 / 0.9 = 0.00083.
    assert abs(out.mean().item() - 1) < 5 * 0.00083
    assert out.std().item() == pytest.approx(0.3 / 20 / 0.9, rel=0.2)  # rows are independent


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_all_dropped_gives_nothing(dtype: torch.dtype, passes: str) -> None:
    """As PyTorch's dropout does with p = 1; no gradient is NaN for it."""
    q, k, v, gradient = inputs(dtype)
    out = varlen_attention(q, k, v, Lengths.of(LENGTHS), Lengths.of(LENGTHS), 1.0)
    for x in (out, *torch.autograd.grad(out, (q, k, v), gradient)):
        assert torch.equal(x, torch.zeros_like(x))


def test_dropout_follows_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x, lengths = torch.randn(9, 1, 8), Lengths.of([9])

    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return varlen_attention(x, x, x, lengths, lengths, 0.5)

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize("window", [-1, 0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_padded_path_matches(dtype: torch.dtype, window: int) -> None:
    q, k, v, gradient = inputs(dtype)
    lengths = Lengths.of(LENGTHS)
    expected = reference(q.double(), k.double(), v.double(), LENGTHS, LENGTHS, False, 0.3, window)
    want = torch.autograd.grad(expected, (q, k, v), gradient.double())
    out = module._padded(q, k, v, lengths, lengths, 0.0, 0.3, window)
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=16 * ulp, atol=16 * ulp)
    for x, y in zip(torch.autograd.grad(out, (q, k, v), gradient), want, strict=True):
        torch.testing.assert_close(x, y, rtol=32 * ulp, atol=32 * ulp)


def test_flash_attn_is_called_by_its_documented_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package, which no CPU can run: with its arguments, and what they mean."""

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
    ):
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and not causal and dropout_p == 0.0
        lengths = [cu_seqlens.diff().tolist() for cu_seqlens in (cu_seqlens_q, cu_seqlens_k)]
        assert [max_seqlen_q, max_seqlen_k] == [max(each) for each in lengths]
        assert window_size[0] == window_size[1]  # to the left and to the right
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        return reference(q, k, v, *lengths, False, softmax_scale, window_size[0])

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    monkeypatch.setattr(module, "attention_kernel", lambda q: "flash-attn")
    queries = [min(n, 2) for n in LENGTHS]
    q, k, v, _ = inputs(torch.float64, queries=queries)
    out = varlen_attention(q, k, v, Lengths.of(queries), Lengths.of(LENGTHS), 0.0, 0.3)
    torch.testing.assert_close(out, reference(q, k, v, queries, LENGTHS, False, 0.3))
    q, k, v, _ = inputs(torch.float64)
    out = varlen_attention(q, k, v, Lengths.of(LENGTHS), Lengths.of(LENGTHS), 0.0, 0.3, window=6)
    torch.testing.assert_close(out, reference(q, k, v, LENGTHS, LENGTHS, False, 0.3, 6))
    torch.use_deterministic_algorithms(True)
    try:
        varlen_attention(q, k, v, Lengths.of(LENGTHS), Lengths.of(LENGTHS), 0.0, 0.3)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def not_yet_looked():
    module._look.cache_clear()
    yield
    module._look.cache_clear()


@pytest.mark.parametrize(
    ("capability", "width", "kernel"),
    [
        ((8, 0), 64, "aten flash"),
        ((7, 5), 64, "padded sdpa"),
        *(((8, 0), 256, "aten flash"), ((9, 0), 256, "aten flash"), ((10, 0), 256, "aten flash")),
        *(((8, 9), 192, "aten flash"), ((8, 9), 200, "padded sdpa"), ((12, 0), 256, "padded sdpa")),
    ],
)
@pytest.mark.usefixtures("not_yet_looked")
def test_choosing_the_kernel_breaks_no_graph(
    capability, width: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the choice asks the device, and whether flash-attn is there: in the graph of every layer."""

    class OnGpu:
        device, dtype, shape = torch.device("cuda", 0), torch.bfloat16, (9, 2, width)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # importing it raises ImportError

    @torch.compile(backend="eager", fullgraph=True)
    def chosen(x: torch.Tensor) -> torch.Tensor:
        return x + len(attention_kernel(OnGpu))

    assert int(chosen(torch.zeros(()))) == len(kernel)
    assert attention_kernel(OnGpu) == kernel


@pytest.mark.usefixtures("not_yet_looked")
def test_a_pytorch_without_flash_attention_pads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(9, 2, 64))
    assert attention_kernel(on_gpu) == "padded sdpa"


@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize("long", [1024, 20])
def test_compiled_code_calls_one_opaque_operation(window: int, long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "_LONG", long)
    q, k, v, gradient = inputs(torch.float64)
    seeds, host = torch.tensor(SEEDS), torch.tensor(LENGTHS, dtype=torch.int32)
    arguments = (host, host, seeds, P, 0.3, window)
    torch.library.opcheck(on_cpu._opaque, (q, k, v, *arguments))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q, k, v):
        return on_cpu._opaque(q, k, v, *arguments)

    out, expected = compiled(q, k, v), reference(q, k, v, LENGTHS, LENGTHS, True, 0.3, window)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    want = torch.autograd.grad(expected, (q, k, v), gradient)
    for x, y in zip(torch.autograd.grad(out, (q, k, v), gradient), want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def _leaks(queries, keys, heads):  # all sequences in one
    return [on_cpu._Span(slice(0, sum(queries)), slice(0, sum(keys)), 0, heads * sum(queries) * sum(keys))]


def _other_mask_in_backward(gradient, p, kept, dropout, scale, right=on_cpu._softmax_backward):
    return right(gradient, p.roll(1, -1).abs().copysign(p), kept, dropout, scale)


def _no_scale_in_backward(gradient, p, kept, dropout, scale, right=on_cpu._softmax_backward):
    return right(gradient, p, kept, dropout, 1.0)


def _mask_forgotten_in_backward(gradient, p, kept, dropout, scale, right=on_cpu._softmax_backward):
    return right(gradient, p.abs(), kept, dropout, scale)


def _wrong_scale(scores, kept, seeds, dropout, scale, right=on_cpu._softmax):
    return right(scores, kept, seeds, dropout, scale * 1.1)


def _same_mask_for_all(scores, kept, seeds, dropout, scale, right=on_cpu._softmax):
    return right(scores, kept, SEEDS, dropout, scale)


@pytest.mark.parametrize(
    "name, mutant",
    [
        ("_spans", _leaks),
        ("_softmax", _wrong_scale),
        ("_softmax", _same_mask_for_all),
        ("_softmax_backward", _other_mask_in_backward),
        ("_softmax_backward", _mask_forgotten_in_backward),
        ("_softmax_backward", _no_scale_in_backward),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_planted_fault_is_found(dtype: torch.dtype, name: str, mutant, monkeypatch) -> None:
    check(dtype)
    monkeypatch.setattr(on_cpu, name, mutant)
    with pytest.raises(AssertionError, match="not close"):
        check(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [-1, 5])
def test_cuda_matches_float64(dtype: torch.dtype, window: int) -> None:
    q, k, v, gradient = inputs(dtype, "cuda")
    wide = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    expected = reference(*wide, LENGTHS, LENGTHS, False, WIDTH**-0.5, window)
    expected.backward(gradient.cpu().double())
    lengths = Lengths.of(LENGTHS, "cuda")
    assert attention_kernel(q) == "padded sdpa" if dtype == torch.float32 else "flash" in attention_kernel(q)
    out = varlen_attention(q, k, v, lengths, lengths, window=window)
    out.backward(gradient)
    ulp = max(torch.finfo(dtype).eps, 1e-6)  # as on the CPU; float32 products may be in another order
    torch.testing.assert_close(out.cpu().double(), expected, rtol=8 * ulp, atol=8 * ulp)
    for x, y in zip((q, k, v), wide, strict=True):
        torch.testing.assert_close(x.grad.cpu().double(), y.grad, rtol=16 * ulp, atol=32 * ulp)


@pytest.mark.gpu
def test_cuda_dropout_is_the_same_in_backward() -> None:
    size = 256
    q = torch.zeros(size, 1, 64, device="cuda", dtype=torch.bfloat16)
    v = torch.ones_like(q).requires_grad_()
    lengths = Lengths.of([size // 2, size // 2], "cuda")
    out = varlen_attention(q, q, v, lengths, lengths, 0.5)
    out.sum().backward()
    # sum(out) is linear in v, all ones: it equals the sum of the gradient if both saw one mask. Without, the two
    # would be off by the spread of 2 * 128^2 draws, times 64: thousands of times these roundings' mean.
    assert out.std() > 0
    torch.testing.assert_close(out.float().sum(), v.grad.float().sum(), rtol=2e-3, atol=0)
