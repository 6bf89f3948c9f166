"""Cross entropy over a large vocabulary as two Triton kernels: nothing of the logits' size but their gradient.

What it computes is `reference_cross_entropy`: the mean over the rows that count, in float32 whatever the
logits' type. The forward kernel reads the logits once, keeping a running maximum and a running sum that is
rescaled when the maximum rises, and stores one logarithm of the sum a row. The backward kernel makes the
softmax again from that, and writes the gradient in the logits' own type: into a new tensor, or over the logits
if they are given up. PyTorch, which takes the float32 logits that Hugging Face's models make, writes three
further tensors of that size. Rows that are ignored are not read.

The mean is by a division on the device: nothing waits for it. A label outside the vocabulary makes the loss
NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from composer_speedups.kernels.launch import DTYPES, interpreted, on_device

__all__ = ["cross_entropy", "reference_cross_entropy"]

_MOST = 4096  # logits that a program holds at a time: 16 in each of 256 threads
_WARPS = 8


@triton.jit
def _forward_kernel(
    x_ptr,  # [rows, vocabulary], rows x_stride apart
    label_ptr,  # [rows] int64
    loss_ptr,  # [rows] float32
    lse_ptr,  # [rows] float32, log(sum(exp(x)))
    x_stride,
    vocabulary,
    ignored,
    COLS: tl.constexpr,
    HELD: tl.constexpr,  # logits that a thread takes of them
    NEIGHBOURS: tl.constexpr,  # whether those are neighbours, which it loads at once; else its warp loads neighbours
):
    row = tl.program_id(0).to(tl.int64)  # 64 bits: rows * vocabulary may pass 2^31
    label = tl.load(label_ptr + row)
    loss = 0.0
    lse = 0.0
    if label != ignored:
        line = x_ptr + row * x_stride
        # Each thread by itself, until the end: no exchange in the loop.
        largest = tl.full([COLS // HELD], float("-inf"), tl.float32)
        total = tl.zeros([COLS // HELD], tl.float32)
        for start in range(0, vocabulary, COLS):
            if NEIGHBOURS:
                col = start + (tl.arange(0, COLS // HELD) * HELD)[:, None] + tl.arange(0, HELD)[None, :]
            else:
                col = start + tl.arange(0, COLS // HELD)[:, None] + (tl.arange(0, HELD) * (COLS // HELD))[None, :]
            x = tl.load(line + col, mask=col < vocabulary, other=float("-inf")).to(tl.float32)
            new = tl.maximum(largest, tl.max(x, 1))
            base = tl.where(new == float("-inf"), 0.0, new)  # -inf - -inf would be NaN
            sums = tl.sum(tl.exp2((x - base[:, None]) * 1.4426950409), 1)
            total = total * tl.exp2((largest - base) * 1.4426950409) + sums
            largest = new
        most = tl.max(largest, 0)
        base = tl.where(most == float("-inf"), 0.0, most)
        lse = most + tl.log(tl.sum(total * tl.exp2((largest - base) * 1.4426950409), 0))
        valid = (label >= 0) & (label < vocabulary)
        target = tl.load(line + label, mask=valid, other=float("nan")).to(tl.float32)
        loss = lse - target
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)


@triton.jit
def _backward_kernel(
    x_ptr,  # [rows, vocabulary], rows x_stride apart
    label_ptr,  # [rows] int64
    lse_ptr,  # [rows] float32
    scale_ptr,  # [1] float32: gradient of the loss over the number of rows that count
    dx_ptr,  # [rows, vocabulary], rows dx_stride apart; may be x_ptr
    x_stride,
    dx_stride,
    vocabulary,
    ignored,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(label_ptr + row)
    line = x_ptr + row * x_stride
    out = dx_ptr + row * dx_stride
    if label != ignored:
        lse = tl.load(lse_ptr + row)
        # A comparison of 64 bits would take two instructions an element.
        target = tl.where((label >= 0) & (label < vocabulary), label, -1).to(tl.int32)
        scale = tl.load(scale_ptr)
        for start in range(0, vocabulary, COLS):
            col = start + tl.arange(0, COLS)
            x = tl.load(line + col, mask=col < vocabulary, other=0.0).to(tl.float32)
            dx = (tl.exp2((x - lse) * 1.4426950409) - tl.where(col == target, 1.0, 0.0)) * scale
            tl.store(out + col, dx.to(dx_ptr.dtype.element_ty), mask=col < vocabulary)
    else:
        for start in range(0, vocabulary, COLS):
            col = start + tl.arange(0, COLS)
            zero = tl.zeros([COLS], tl.float32)
            tl.store(out + col, zero.to(dx_ptr.dtype.element_ty), mask=col < vocabulary)


def reference_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """What the kernels mean, in plain PyTorch; in float64 if `logits` are."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    counts = labels != ignore_index
    wide, labels = wide[counts], labels[counts]
    return (wide.logsumexp(-1) - wide.gather(-1, labels[:, None])[:, 0]).mean()


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100, reuse_logits: bool = False
) -> torch.Tensor:
    """Mean cross entropy of `logits` against `labels`, a float32 scalar.

    Args:
        logits: `[rows, vocabulary]`, float32, float16 or bfloat16, on a CUDA device.
        labels: `[rows]`, int64.
        ignore_index: rows with this label count for nothing.
        reuse_logits: let backward write the gradient over `logits`, which are lost then.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or logits.shape[1] == 0:
        raise ValueError(
            "cross_entropy takes logits [rows, vocabulary] and labels [rows], not"
            f" {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    if logits.dtype not in DTYPES or labels.dtype != torch.int64:
        raise ValueError(
            "cross_entropy takes float32, float16 or bfloat16 logits and int64 labels, not"
            f" {logits.dtype} and {labels.dtype}"
        )
    if labels.device != logits.device or not (logits.is_cuda or interpreted()):
        raise ValueError(
            f"cross_entropy needs logits and labels on one CUDA device, they are on {logits.device} and"
            f" {labels.device}: use torch's cross_entropy here"
        )
    return _CrossEntropy.apply(logits, labels, ignore_index, reuse_logits)


def _cols(vocabulary: int) -> int:
    return min(_MOST, max(16, triton.next_power_of_2(vocabulary)))


def _held(x: torch.Tensor, cols: int) -> dict[str, int | bool]:
    """16 bytes of neighbours where Triton sees that they are aligned; it would give each of them another thread."""
    if x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0:
        return {"HELD": 16 // x.element_size(), "NEIGHBOURS": True}
    return {"HELD": max(1, cols // (32 * _WARPS)), "NEIGHBOURS": False}


def forward(x: torch.Tensor, labels: torch.Tensor, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row of `x`, which is contiguous: its loss, and log(sum(exp(x))), both 0 where it is ignored."""
    rows, vocabulary = x.shape
    loss = torch.empty(rows, dtype=torch.float32, device=x.device)
    lse, cols = torch.empty_like(loss), _cols(vocabulary)
    if rows:
        with on_device(x.device):
            _forward_kernel[(rows,)](
                x, labels, loss, lse, x.stride(0), vocabulary, ignored, COLS=cols, **_held(x, cols), num_warps=_WARPS
            )
    return loss, lse


def backward(
    x: torch.Tensor, labels: torch.Tensor, lse: torch.Tensor, scale: torch.Tensor, ignored: int, dx: torch.Tensor
) -> torch.Tensor:
    """The gradient of `x` into `dx`, which may be `x`; `scale`: one float32 number, what each loss counts for."""
    rows, vocabulary = x.shape
    cols, strides = _cols(vocabulary), (x.stride(0), dx.stride(0))
    if rows:
        with on_device(x.device):
            _backward_kernel[(rows,)](
                x, labels, lse, scale, dx, *strides, vocabulary, ignored, COLS=cols, num_warps=_WARPS
            )
    return dx


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, ignored, reuse):
        x = logits if logits.stride(1) == 1 else logits.contiguous()
        labels = labels.contiguous()
        loss, lse = forward(x, labels, ignored)
        counted = (labels != ignored).sum()
        ctx.save_for_backward(x, labels, lse, counted)
        ctx.options = (ignored, reuse)
        return loss.sum() / counted  # 0 / 0 is NaN where nothing counts, as PyTorch has it

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x, labels, lse, counted = ctx.saved_tensors
        ignored, reuse = ctx.options
        scale = (gradient / counted).to(torch.float32).reshape(1)
        dx = x if reuse else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return backward(x, labels, lse, scale, ignored, dx), None, None, None
