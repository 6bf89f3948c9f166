"""What `limits.py` measures: each kernel of ours, and beside it what else has the same purpose.

Gradients are asked for and not added up: adding to those of the call before would move more bytes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = [
    "OPTIMIZERS",
    "Kernel",
    "activations",
    "attention",
    "convert",
    "copies",
    "embeddings",
    "losses",
    "norms",
    "optimizers",
    "projections",
]

OPTIMIZERS = ("foreach_adamw", "fused_adamw", "apex_fused_adamw", "bnb_adamw", "adamw_8bit")


@dataclass(frozen=True)
class Kernel:
    """`call` does the work once and must move at least `bytes` or compute `flops`."""

    group: str
    name: str
    call: Callable[[], Any]
    bytes: int = 0
    flops: int = 0


def _gradients(outputs: Any, leaves: Any, gradients: Any) -> None:
    """The backward pass. `.grad` stays as it is: what `backward` adds to it would be read and written as well."""
    import torch

    torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)


def copies(device: Any) -> Iterator[Kernel]:
    import torch

    # Far larger than any cache.
    source = torch.empty((1 << 30 if device.type == "cuda" else 1 << 28) // 4, device=device).fill_(1)
    target = torch.empty_like(source)
    yield Kernel("copy", "copy", lambda: target.copy_(source), bytes=2 * 4 * source.numel())
    yield Kernel("copy", "change in place", lambda: target.mul_(1.0), bytes=2 * 4 * source.numel())


def optimizers(device: Any) -> Iterator[Kernel]:
    """Steps over the weights of BERT-base (on a CPU: of 4 layers of width 256)."""
    import torch
    from transformers import BertConfig, BertModel

    from composer_speedups import registry

    small = {} if device.type == "cuda" else dict(num_hidden_layers=4, hidden_size=256, num_attention_heads=4)
    shapes = [p.shape for p in BertModel(BertConfig(**small)).parameters()]

    def make() -> torch.optim.Optimizer:
        parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        return torch.optim.AdamW(parameters, lr=1e-4, foreach=False)

    # Weights, gradients and two moments are read; weights and moments are written.
    moved = 7 * 4 * sum(shape.numel() for shape in shapes)
    less = (3 * 4 + 2 * 2 * 1) * sum(shape.numel() for shape in shapes)  # moments in 8 bits
    yield Kernel("AdamW", "AdamW: for-loop", make().step, bytes=moved)
    for key in OPTIMIZERS:
        # On a CPU those of bitsandbytes save memory, not time.
        if registry.build(key).unavailable(device) or (device.type == "cpu" and key not in OPTIMIZERS[:2]):
            continue
        if key in ("bnb_adamw", "adamw_8bit") and importlib.util.find_spec("bitsandbytes") is None:
            continue
        optimizer = make()
        convert(optimizer, key)
        yield Kernel("AdamW", f"AdamW: {key}", optimizer.step, bytes=less if key == "adamw_8bit" else moved)
    if device.type == "cuda" and importlib.util.find_spec("optimi"):
        import optimi

        parameters = [p for group in make().param_groups for p in group["params"]]
        triton = optimi.AdamW(parameters, lr=1e-4, betas=(0.9, 0.999), eps=1e-8, triton=True)
        yield Kernel("AdamW", "AdamW: optimi, Triton", triton.step, bytes=moved)


def convert(optimizer: Any, key: str) -> None:
    """Make it the speed-up's. With 8 bits its embedding, too: which parameters are one, only a model could tell."""
    from composer_speedups import registry

    registry.function(key)(optimizer, **({"embeddings_32bit": False} if key == "adamw_8bit" else {}))


def norms(device: Any, tokens: int, width: int) -> Iterator[Kernel]:
    """LayerNorm forward and backward, and BERT's dropout + residual + LayerNorm."""
    import torch
    import torch.nn.functional as F

    from composer_speedups import apply_fast_dropout, apply_low_precision_norm
    from composer_speedups.kernels.dropout_add_norm import dropout_add_norm

    # Two layers' worth of rows, so that nothing is found in a cache that would not be found in training.
    x, residual, gradient = (torch.randn(tokens, width, device=device).bfloat16() for _ in "xrg")
    x.requires_grad_()
    residual.requires_grad_()
    stock, low = torch.nn.LayerNorm(width).to(device), torch.nn.Sequential(torch.nn.LayerNorm(width)).to(device)
    apply_low_precision_norm(low)
    leaves = [x, residual, *stock.parameters(), *low.parameters()]
    # A gradient arrives in the output's type, as in training.
    arriving = {dtype: gradient.to(dtype) for dtype in (torch.bfloat16, torch.float32)}

    def both_ways(forward: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def call() -> None:
            with torch.autocast(device.type, torch.bfloat16):
                out = forward()
            _gradients(out, leaves, arriving[out.dtype])

        return call

    size = 2 * x.numel()
    norm = 5 * size  # read x, write y; read x and dy, write dx
    yield Kernel("LayerNorm", "LayerNorm: PyTorch in float32 (autocast)", both_ways(lambda: stock(x)), bytes=norm)
    yield Kernel("LayerNorm", "LayerNorm: LowPrecisionNorm", both_ways(lambda: low(x)), bytes=norm)
    if device.type == "cuda":
        from composer_speedups.kernels.layer_norm import layer_norm

        ours = both_ways(lambda: layer_norm(x, stock.weight, stock.bias, 1e-5))
        yield Kernel("LayerNorm", "LayerNorm: FusedLayerNorm (Triton)", ours, bytes=norm)
        if importlib.util.find_spec("liger_kernel"):
            from liger_kernel.transformers import LigerLayerNorm

            liger = LigerLayerNorm(width).to(device).bfloat16()
            leaves += liger.parameters()
            yield Kernel("LayerNorm", "LayerNorm: Liger", both_ways(lambda: liger(x)), bytes=norm)

    fused = 8 * size  # read x and residual, write y; read both and dy, write dx and dresidual
    dropout = torch.nn.Sequential(torch.nn.Dropout(0.1))
    block = "dropout + residual + LayerNorm"
    stock_block = both_ways(lambda: stock(dropout(x) + residual))
    yield Kernel(block, f"{block}: PyTorch (autocast)", stock_block, bytes=fused)
    low_dropout = torch.nn.Sequential(torch.nn.Dropout(0.1))
    if device.type == "cpu":
        apply_fast_dropout(low_dropout)
    parts = "LowPrecisionNorm" + (" + FastDropout" if device.type == "cpu" else "")
    yield Kernel(block, f"{block}: {parts}", both_ways(lambda: low(low_dropout(x) + residual)), bytes=fused)
    drop = 4 * size  # read x, write y; read dy, write dx
    yield Kernel("dropout", "dropout: PyTorch", both_ways(lambda: dropout(x)), bytes=drop)
    if device.type == "cpu":
        yield Kernel("dropout", "dropout: FastDropout", both_ways(lambda: low_dropout(x)), bytes=drop)
    weight, bias = stock.weight, stock.bias
    one = both_ways(lambda: dropout_add_norm(x, residual, weight, bias, 0.1))
    yield Kernel(block, f"{block}: FusedDropoutAddNorm", one, bytes=fused)
    before = torch.zeros(width, device=device, requires_grad=True)
    leaves.append(before)
    all_four = both_ways(lambda: dropout_add_norm(x, residual, weight, bias, 0.1, x_bias=before))
    yield Kernel(block, f"bias + {block}: FusedDropoutAddNorm", all_four, bytes=fused)

    def in_bf16() -> torch.Tensor:
        with torch.autocast(device.type, enabled=False):  # which would compute the norm in float32 on CUDA
            return F.layer_norm(F.dropout(x, 0.1) + residual, (width,), weight.bfloat16(), bias.bfloat16())

    plain = both_ways(in_bf16)
    yield Kernel(block, f"{block}: PyTorch, all in bf16", plain, bytes=fused)


def activations(device: Any, tokens: int, width: int) -> Iterator[Kernel]:
    import torch
    import torch.nn.functional as F

    from composer_speedups.kernels.bias_gelu import bias_gelu

    x, gradient = (torch.randn(tokens, 4 * width, device=device).bfloat16() for _ in "xg")
    x.requires_grad_()
    bias = torch.zeros(4 * width, device=device, dtype=torch.bfloat16, requires_grad=True)
    size = 2 * x.numel()
    moved = 5 * size

    def both_ways(forward: Callable[[], torch.Tensor]) -> Callable[[], None]:
        return lambda: _gradients(forward(), (x, bias), gradient)

    stock = both_ways(lambda: F.gelu(x + bias))
    yield Kernel("bias + GELU", "bias + GELU: PyTorch", stock, bytes=moved)

    def given_the_sum() -> None:  # as a linear layer hands it over, whose bias costs little or nothing in forward
        (dx,) = torch.autograd.grad(F.gelu(x), x, gradient)
        dx.sum(0)

    yield Kernel("bias + GELU", "bias + GELU: PyTorch, the bias added before", given_the_sum, bytes=moved)
    ours = both_ways(lambda: bias_gelu(x, bias))
    yield Kernel("bias + GELU", "bias + GELU: FusedBiasGELU", ours, bytes=moved)


def projections(device: Any, tokens: int, width: int) -> Iterator[Kernel]:
    """Queries, keys and values: by three linear layers, and as `Unpadding` does it, from their weights stacked."""
    import torch

    from composer_speedups.joint_linear import joint_linear

    x, gradient = (torch.randn(tokens, n * width, device=device).bfloat16() for n in (1, 3))
    x.requires_grad_()
    layers = [torch.nn.Linear(width, width, device=device) for _ in "qkv"]
    leaves = [x, *(p for layer in layers for p in layer.parameters())]
    flops = 3 * 2 * tokens * 3 * width**2
    arriving = gradient.chunk(3, -1)
    if device.type == "cuda":  # where attention has made each by itself; the C kernels make them beside each other
        arriving = tuple(g.contiguous() for g in arriving)

    def both_ways(project: Callable[[], Any]) -> Callable[[], None]:
        def call() -> None:
            with torch.autocast(device.type, torch.bfloat16):
                out = project()
            _gradients(out, leaves, arriving)

        return call

    three = both_ways(lambda: [layer(x) for layer in layers])
    stacked = both_ways(lambda: joint_linear(layers, x))
    yield Kernel("QKV", "queries, keys, values: three linear layers", three, flops=flops)
    yield Kernel("QKV", "queries, keys, values: weights stacked, as in Unpadding", stacked, flops=flops)


def embeddings(device: Any, tokens: int, width: int) -> Iterator[Kernel]:
    """BERT's three tables, forward and backward; ids as frequent as words are, which is as one over their rank."""
    import torch

    if device.type != "cuda":
        return
    from composer_speedups import apply_fused_embedding

    sizes = (30522, 512, 2)
    ranks = torch.rand(tokens).mul(torch.tensor(float(sizes[0])).log()).exp().long() - 1
    counted = torch.arange(tokens)
    ids = [x.to(device) for x in (ranks.clamp(0, sizes[0] - 1), counted % 256, counted % 2)]
    gradient = torch.randn(tokens, width, device=device)
    # Read and written in float32: rows, thrice, and each token's gradient; the words' table is zeroed.
    moved = 4 * (9 * tokens + sizes[0]) * width

    def both_ways(tables: torch.nn.ModuleList) -> Callable[[], None]:
        leaves = [table.weight for table in tables]
        return lambda: _gradients([table(i) for table, i in zip(tables, ids, strict=True)], leaves, [gradient] * 3)

    def make() -> torch.nn.ModuleList:
        return torch.nn.ModuleList(torch.nn.Embedding(size, width) for size in sizes).to(device)

    fused = make()
    apply_fused_embedding(fused)
    yield Kernel("embeddings", "embeddings of words, positions, types: PyTorch", both_ways(make()), bytes=moved)
    yield Kernel("embeddings", "embeddings of words, positions, types: FusedEmbedding", both_ways(fused), bytes=moved)


def attention(device: Any, width: int) -> Iterator[Kernel]:
    """1,024 texts (on a CPU 32) of 30 to 231 tokens, padded to 256 and packed; dropout 0.1."""
    import torch
    import torch.nn.functional as F

    from composer_speedups.kernels.packed_attention import packed_attention, serves
    from composer_speedups.kernels.varlen_attention import Lengths, varlen_attention

    heads, rows = width // 64, 1024 if device.type == "cuda" else 32
    lengths = torch.randint(30, 232, (rows,), generator=torch.Generator().manual_seed(1)).tolist()
    total = sum(lengths)
    packed = [torch.randn(total, heads, 64, device=device).bfloat16().requires_grad_() for _ in "qkv"]
    padded = [torch.randn(rows, heads, 256, 64, device=device).bfloat16().requires_grad_() for _ in "qkv"]
    mask = (torch.arange(256) < torch.tensor(lengths)[:, None])[:, None, None].to(device)
    of = Lengths.of(lengths, device)
    flops = 12 * heads * 64 * sum(n * n for n in lengths)  # forward two products, backward four

    of_packed, of_padded = torch.ones_like(packed[0]), torch.ones_like(padded[0])

    def ours() -> None:
        _gradients(varlen_attention(*packed, of, of, dropout_p=0.1), packed, of_packed)

    def stock() -> None:
        out = F.scaled_dot_product_attention(*padded, attn_mask=mask, dropout_p=0.1)
        _gradients(out, padded, of_padded)

    yield Kernel("attention", "attention: PyTorch's SDPA, padded to 256", stock, flops=flops)
    yield Kernel("attention", "attention: variable length, packed", ours, flops=flops)
    if serves(*packed):
        triton = lambda: _gradients(packed_attention(*packed, of, of, 0.1), packed, of_packed)  # noqa: E731
        yield Kernel("attention", "attention: packed, our Triton kernel", triton, flops=flops)


def losses(device: Any, tokens: int) -> Iterator[Kernel]:
    import torch
    import torch.nn.functional as F

    if device.type != "cuda":
        return
    from composer_speedups.kernels.cross_entropy import cross_entropy

    def of(vocabulary: int) -> Iterator[Kernel]:
        logits = torch.randn(tokens // 8, vocabulary, device=device).bfloat16().requires_grad_()
        labels = torch.randint(0, vocabulary, (len(logits),), device=device)
        moved = 3 * 2 * logits.numel()  # read twice, the gradient written
        stock = lambda: _gradients(F.cross_entropy(logits.float(), labels), logits, None)  # noqa: E731
        yield Kernel("cross-entropy", f"cross-entropy of {vocabulary:,}: PyTorch in float32", stock, bytes=moved)
        ours = lambda: _gradients(cross_entropy(logits, labels), logits, None)  # noqa: E731
        yield Kernel("cross-entropy", f"cross-entropy of {vocabulary:,}: FusedCrossEntropy", ours, bytes=moved)

    yield from of(30528)
    yield from of(30522)  # BERT's own, of which rows are not aligned: each logit is loaded by itself
