"""SDPAttention: eager attention becomes PyTorch's scaled_dot_product_attention.

**Why it is faster.** Eager attention writes the scores, `[batch, heads, length, length]`, to memory four times:
product, mask, softmax, dropout. The flash and memory-efficient kernels never write them; they compute in tiles
and recompute in backward, so that memory grows with the length and not with its square.

**Numerics.** The same function with sums in another order, to rounding; the softmax is taken in float32 inside
the fused kernels. Padding masks and attention dropout are kept, though dropout draws other random numbers, and a rate
that is changed later does not reach it in 4.53, as in the SDPA classes of transformers.
A row whose keys are all masked may differ: its values are without meaning in either. Where the loss reads one all
the same, as it does of choices that are all padding, PyTorch's CPU kernel without dropout gives it wrong gradients,
of stock SDPA models, too: let such a row have a token that counts.

**When it pays.** On a GPU, the more the longer the sequences. Models that transformers builds without being
told use SDPA already: the report then says so. A padding mask rules flash out in favour of the memory-efficient
kernel. On Hopper and Blackwell PyTorch prefers cuDNN's from 2.11 on, with a mask or without: it plans for each
new shape, for up to a second; some of its kernels know dropout rates in steps of 1/16 only
(pytorch/pytorch#174245); and with a mask, 64 tokens more than a multiple of 128, and all scores of a query far
below 0, its gradients are NaN (#196678): `backend="efficient"` does nothing of this. transformers drops a mask
of only ones, which costs one wait for the device each forward pass, while under `TorchCompile` the mask stays.
On a CPU, dropout leaves only the math kernel. The kernel that really ran in the first training batch is in the
evidence as `kernel`; for a compiled model, in the first batch that compiles nothing.

**Needs.** A Hugging Face model whose family has SDPA in the installed transformers (4.53: not ELECTRA, MPNet,
DeBERTa; relative position embeddings never). `backend` restricts PyTorch's choice: `"auto"` not at all; a call that
`"flash"` (no padding masks on CUDA), `"efficient"` or `"cudnn"` cannot serve raises; `"math"` is the reference. PyTorch
has one choice for the whole process: a Trainer restricts it from its start, and again whenever it fits or evaluates;
after each, and when the Trainer is closed or dropped, it is what it was. Attention weights (`output_attentions=True`):
4.53 computes them eagerly, 5.x would return None; here it raises.

Source: torch.nn.functional.scaled_dot_product_attention; FlashAttention, https://arxiv.org/abs/2205.14135.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from composer.core import Event, State
from composer.loggers import Logger
from transformers import PreTrainedModel

from composer_speedups.arguments import check_choice
from composer_speedups.compat import (
    announce_sdpa,
    attention_implementation,
    lacks_sdpa,
    make_sdpa,
    why_no_sdpa,
)
from composer_speedups.holds import Hold
from composer_speedups.kernels.attention_kernels import AttentionWatch
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import compiled

__all__ = ["SDPAttention", "apply_sdp_attention", "enable_kernels", "enabled_kernels"]

log = logging.getLogger("composer_speedups")

BACKENDS = ("auto", "flash", "efficient", "cudnn", "math")
_MAX_TRIES = 8  # batches looked at for the kernel; more would mean that every batch compiles anew


def apply_sdp_attention(model: torch.nn.Module, backend: str = "auto") -> int:
    """Let every eager Hugging Face attention layer in `model` use SDPA, in place; return how many.

    Modules, Parameters and `state_dict` keys stay. The model's config is told, as transformers itself does.

    Args:
        model: a Hugging Face model, or any module that contains some.
        backend: other than `"auto"`: the only kernel that this *process* may use from now on;
            `torch.nn.attention.sdpa_kernel` does the same for a block of code.

    >>> from transformers import BertConfig, BertModel
    >>> shape = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=2, vocab_size=9)
    >>> bert = BertModel._from_config(BertConfig(**shape), attn_implementation="eager")
    >>> apply_sdp_attention(bert), apply_sdp_attention(bert)
    (2, 0)
    """
    if check_choice("backend", backend, BACKENDS) != "auto":
        KernelHold(backend).make()
    eager = [(owner, layer) for owner, layer, how in _attention_layers(model) if how == "eager"]
    able = [(owner, layer) for owner, layer in eager if why_no_sdpa(owner, layer) is None]
    for _, layer in able:
        make_sdpa(layer)
    for owner in {id(owner): owner for owner, _ in able}.values():
        # The models around it hold their own copies of the setting, and the same config object.
        for outer in (m for m in model.modules() if getattr(m, "config", None) is owner.config):
            announce_sdpa(outer)
    return len(able)


class SDPAttention(SpeedUp):
    """Apply `apply_sdp_attention` at `Event.INIT`, and see which kernel runs in training.

    Args:
        backend: `"auto"`, `"flash"`, `"efficient"`, `"cudnn"` or `"math"`.

    >>> SDPAttention()
    SDPAttention(backend='auto')
    """

    stage = Stage.ATTENTION
    slot = "attention"
    events = frozenset({Event.AFTER_LOAD, Event.BEFORE_FORWARD, Event.AFTER_FORWARD})

    def __init__(self, backend: str = "auto") -> None:
        self.backend = check_choice("backend", backend, BACKENDS)
        self._watch = AttentionWatch()
        self._tries = 0

    def unavailable(self, device: torch.device) -> str | None:
        if self.backend == "auto" or self.backend == "math":
            return None
        if device.type != "cuda":
            return (
                None
                if device.type == "cpu" and self.backend == "flash"
                else f"backend {self.backend!r} needs a CUDA device, the run is on {device}; use backend='auto'"
            )
        if self.backend == "flash" and torch.cuda.get_device_capability(device) < (8, 0):
            name = torch.cuda.get_device_name(device)
            return f"backend 'flash' needs compute capability 8.0, {name} has less; use backend='efficient'"
        return None

    def install(self, state: State, logger: Logger) -> None:
        self._watch, self._tries = AttentionWatch(), 0
        if self.backend != "auto":
            self.keep(state, KernelHold(self.backend))
        layers = list(_attention_layers(state.model))
        already = sum(how == "sdpa" for _, _, how in layers)
        reasons = sorted({r for o, m, how in layers if how == "eager" and (r := why_no_sdpa(o, m))})
        others = sorted({str(how) for _, _, how in layers if how not in ("eager", "sdpa")})
        count = apply_sdp_attention(state.model)
        if reasons:
            nothing = "; ".join(reasons)
        elif others:
            nothing = f"its attention is {', '.join(others)} already"
        elif already:
            nothing = f"all {already} attention layers use scaled_dot_product_attention already"
        else:
            models = (m for m in state.model.modules() if isinstance(m, PreTrainedModel))
            lacking = (reason for m in models if (reason := lacks_sdpa(m)) is not None)
            nothing = next(lacking, "no Hugging Face attention layer in the model")
        restricted = already if self.backend != "auto" else 0
        self.report(
            logger,
            count + restricted,
            nothing,
            backend=self.backend,
            already_sdpa=already,
            left_alone=len(layers) - already - count,
            left_alone_because="; ".join(reasons),
        )

    def on_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.AFTER_LOAD:
            self.at_close(state, self._watch.stop)
        elif event is Event.BEFORE_FORWARD and "kernel" not in self.evidence:
            self._look(state)
        elif event is Event.AFTER_FORWARD and self._watch.running:
            self._see(state, logger)

    def _look(self, state: State) -> None:
        self._watch.stop()  # running still if the last forward pass ran out of memory and is tried again
        if self._tries >= _MAX_TRIES:
            return
        self._tries += 1
        if self._tries == 1 and any(map(compiled, state.model.modules())):
            return  # the first pass compiles, and the compiler runs kernels of its own
        self._graphs = _graphs_compiled()
        self._watch.start(state.model)

    def _see(self, state: State, logger: Logger) -> None:
        kernels = self._watch.stop()
        if _graphs_compiled() != self._graphs:
            return
        nothing = "none (compiled)" if any(map(compiled, state.model.modules())) else "none (eager)"
        self.tell(logger, kernel=", ".join(kernels) or nothing)
        log.info("%r: attention kernel in training: %s", self, self.evidence["kernel"])


def _attention_layers(
    model: torch.nn.Module,
) -> Iterator[tuple[PreTrainedModel, torch.nn.Module, str]]:
    """Each attention layer with the innermost Hugging Face model that it belongs to, and how it computes."""
    owner: dict[int, PreTrainedModel] = {}
    for outer in model.modules():  # outer models come first, inner ones overwrite
        if isinstance(outer, PreTrainedModel):
            owner.update((id(module), outer) for module in outer.modules())
    for module in model.modules():
        how = attention_implementation(module) if id(module) in owner else None
        if how is not None:
            yield owner[id(module)], module, how


class KernelHold(Hold):
    """The only attention kernel that the process may use."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def read(self) -> tuple[bool, ...]:
        return enabled_kernels()

    def make(self) -> None:
        enable_kernels(tuple(self.backend == name for name in BACKENDS[1:]))

    def write(self, before: tuple[bool, ...]) -> None:
        enable_kernels(before)


def enabled_kernels() -> tuple[bool, ...]:
    """Which of PyTorch's attention kernels this process may use, in the order of `BACKENDS`."""
    cuda = torch.backends.cuda  # so named, but CPU code obeys them too
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )


def enable_kernels(flags: tuple[bool, ...]) -> None:
    """Allow what `enabled_kernels` said, and nothing else."""
    cuda = torch.backends.cuda
    switches = (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_cudnn_sdp, cuda.enable_math_sdp)
    for switch, flag in zip(switches, flags, strict=True):
        switch(flag)


def _graphs_compiled() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
