"""FusedCrossEntropy: the loss over a large vocabulary in one kernel each way, without float32 copies of the
logits.

**Why it is faster.** The logits of a language model are the largest tensor of its step: 8,192 tokens by 30,522
words are 1 GB in float32. Stock code widens them to float32, writes their log-softmax, and in backward a
gradient in float32 and one in the logits' type. Here one kernel reads them once for the loss, and one reads
them once and writes the gradient. Tokens that are not to be predicted are not even read.

**Numerics.** Sums in float32, gradients rounded once to the logits' type, as autocast does it: loss and
gradients are PyTorch's to rounding. Without a token to predict the loss is NaN, as in PyTorch; a label outside
the vocabulary makes it NaN, too, where PyTorch ends the process.

**When it pays.** It saves memory first: what is saved can go into a larger batch. With `MaskedTokenHead`, which
leaves 15 % of the logits, little of both is left to save; they go together. Under `TorchCompile` the compiler
fuses the stock loss itself, which is then used.

**Needs.** A CUDA device and Triton; a Hugging Face `...ForMaskedLM`, or a `...ForCausalLM` or `...LMHeadModel` that
shifts its labels by transformers' `loss_function` (BART and XLNet do not, nor Mamba in transformers 4), with the
stock `forward`, a loss of one part (mixtures of experts add their router's, LUKE that of entities: they are left
alone) and labels given by name. To models whose `forward` takes any argument (ModernBERT; with transformers 5 most) the
Hugging Face Trainer passes `num_items_in_batch`, which makes the loss another one: it stays stock then, and a warning
says so; set `model.accepts_loss_kwargs = False` before that Trainer is made. `reuse_logits=True` writes the gradient
over the logits, which saves the last large tensor, too: after backward `logits` are none, so a model with train metrics
is refused then. In a function of your own, apply it before `apply_masked_token_head`.

Source: the idea of Liger-Kernel's cross entropy, https://arxiv.org/abs/2410.10989, which writes the gradient in
forward; online softmax, https://arxiv.org/abs/1805.02867.
"""

from __future__ import annotations

import dis
import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from composer.core import State
from composer.loggers import Logger
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from composer_speedups.arguments import check_flag
from composer_speedups.compilation import TRITON_INTERPRETED, missing_for_triton_on
from composer_speedups.errors import ConflictError, SpeedUpUnavailable
from composer_speedups.families import CAUSAL, MASKED, has_head
from composer_speedups.ignored import IGNORED
from composer_speedups.speedup import SpeedUp, Stage
from composer_speedups.surgery import having, override_methods, overrides, stock_class, stock_forward

__all__ = ["FusedCrossEntropy", "apply_fused_cross_entropy"]

log = logging.getLogger("composer_speedups")

_OWN_LOSS = {"num_items_in_batch", "ignore_index"}  # arguments that change what the stock loss is
_OF_TRAINER = " Set model.accepts_loss_kwargs = False before the Hugging Face Trainer is made"
_told: set[type] = set()  # classes of models whose stock loss was warned of


def apply_fused_cross_entropy(model: torch.nn.Module, reuse_logits: bool = False) -> int:
    """Let every language model in `model` compute its loss by the fused kernel, in place; return how many.

    Args:
        model: a Hugging Face language model, or a module that contains one.
        reuse_logits: write the gradient over the logits, which are lost then.

    Raises:
        SpeedUpUnavailable: there is no CUDA device.
        ConflictError: the head was changed by `apply_masked_token_head` before.
    """
    check_flag("reuse_logits", reuse_logits)
    reason = _unavailable()
    if reason is not None:
        raise SpeedUpUnavailable(f"apply_fused_cross_entropy cannot be used here: {reason}")
    models = [m for m in model.modules() if isinstance(m, PreTrainedModel) and _has_known_loss(m)]
    for owner in models:
        if any(getattr(wrap, "predicted_only", False) for wrap in overrides(owner)):
            raise ConflictError("apply_fused_cross_entropy must come before apply_masked_token_head: swap the two")
    new = [m for m in models if not any(isinstance(wrap, _FusedLoss) for wrap in overrides(m))]
    return sum(override_methods(owner, ("forward",), _FusedLoss(reuse_logits)) for owner in new)


class FusedCrossEntropy(SpeedUp):
    """Apply `apply_fused_cross_entropy` at `Event.INIT`.

    Args:
        reuse_logits: write the gradient over the logits, which are lost then.

    >>> FusedCrossEntropy()
    FusedCrossEntropy(reuse_logits=False)
    """

    stage = Stage.NORM  # before MaskedTokenHead, which must be around it
    slot = "loss"

    def __init__(self, reuse_logits: bool = False) -> None:
        self.reuse_logits = check_flag("reuse_logits", reuse_logits)

    def unavailable(self, device: torch.device) -> str | None:
        return _unavailable(device)

    def install(self, state: State, logger: Logger) -> None:
        metrics = getattr(state.model, "get_metrics", None)
        if self.reuse_logits and metrics is not None and metrics(is_train=True):
            raise SpeedUpUnavailable(f"{self!r}: train metrics need the logits. Leave reuse_logits out, or the metrics")
        count = apply_fused_cross_entropy(state.model, self.reuse_logits)
        nothing = "no Hugging Face language model whose forward and loss are known (see the card)"
        self.report(logger, count, nothing, already=having(state.model, _FusedLoss))


def _has_known_loss(model: PreTrainedModel) -> bool:
    """Whether the stock loss is the mean cross entropy of masked tokens, or of the next tokens, and nothing besides.

    A `forward` of the user's own may weigh it. Causal models of older families take their labels as shifted already:
    those that shift them ask transformers' one `loss_function`.
    """
    if not (has_head(model, MASKED + CAUSAL) and stock_forward(model)):
        return False
    code = inspect.unwrap(stock_class(type(model)).forward).__code__
    if not _has_one_loss(code):
        return False
    known = ForCausalLMLoss if has_head(model, CAUSAL) else ForMaskedLMLoss
    if "loss_function" in code.co_names:
        return model.loss_function is known
    return known is ForMaskedLMLoss


def _has_one_loss(code: Any) -> bool:
    """Whether a `forward` sets a loss twice: to None, and where there are labels.

    Whatever adds to it sets it once more: the losses of routers, of entities, and of what is yet to come.
    """
    stored = [str(i.argval) for i in dis.get_instructions(code) if i.opname.startswith("STORE")]
    return sum(name.endswith("loss") for name in stored) == 2


def _unavailable(device: torch.device | None = None) -> str | None:
    return missing_for_triton_on(device, "masked_token_head saves most of the same work everywhere")


@dataclass(frozen=True)
class _FusedLoss:
    """Around the model's `forward`: asks the stock code for logits only, and computes the loss itself."""

    reuse_logits: bool

    def __call__(self, stock: Any) -> Any:
        def forward(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            labels = kwargs.get("labels")
            others = [name for name in kwargs if name in _OWN_LOSS or (name.endswith("labels") and name != "labels")]
            asked = [name for name in others if kwargs[name] is not None]
            if labels is None or asked:
                if labels is not None and type(model) not in _told:
                    _told.add(type(model))
                    log.warning(
                        "fused_cross_entropy leaves the loss of %s to its own code, as the caller passes %s.%s",
                        type(model).__name__,
                        ", ".join(asked),
                        _OF_TRAINER if "num_items_in_batch" in asked else "",
                    )
                return stock(model, *args, **kwargs)
            kwargs["labels"] = None
            out = stock(model, *args, **kwargs)
            if not isinstance(out, tuple) and any(out.get(name) is not None for name in ("loss", "aux_loss")):
                return stock(model, *args, **(kwargs | {"labels": labels}))  # a loss of parts, not all of labels
            logits = out[0] if isinstance(out, tuple) else out.logits
            if has_head(model, CAUSAL):
                # Shifting the labels instead of the logits spares a copy of these.
                labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
            loss = self._loss(logits.flatten(0, -2), labels.flatten().to(logits.device))
            if isinstance(out, tuple):
                return (loss, *out)
            return type(out)(loss=loss, **{name: value for name, value in out.items() if name != "loss"})

        return forward

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        from composer_speedups.kernels.cross_entropy import cross_entropy
        from composer_speedups.kernels.launch import DTYPES
        from composer_speedups.kernels.tensors import plain, shape_only

        ours = logits.dtype in DTYPES and (logits.is_cuda or TRITON_INTERPRETED) and not torch.compiler.is_compiling()
        ours = ours and plain(logits) and not shape_only(logits)  # a dry run has no numbers to give a kernel
        if not ours:
            return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), labels)
        # Only what training will not look at again may be overwritten.
        reuse = self.reuse_logits and torch.is_grad_enabled()
        return cross_entropy(logits, labels, reuse_logits=reuse)
