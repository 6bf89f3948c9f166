"""MaskedTokenHead: in masked language modelling, the head works on the tokens to be predicted only.

**Why it is faster.** A head of BERT is a dense layer, a norm and a matmul with the whole vocabulary, as many operations
as three layers of BERT-base, and its logits in float32 are the largest tensor of the step. The loss looks at
15 % of them. Here the hidden states of those tokens are gathered before the head: six sevenths of its time and
memory go.

**Numerics.** Loss and all gradients are the same function, to the rounding of sums in another order: tokens
that are left out had no share in the loss. Dropout inside a head (few have it) draws fewer numbers. With no
token to predict the loss is NaN, as in the stock model.

**When it pays.** In every masked language model, the more the larger the vocabulary and the smaller the model. Padding
costs nothing in the head either, so `Unpadding` goes together with it.

**Needs.** A Hugging Face `...ForMaskedLM` whose head is applied token by token: all of BERT's relatives. An
encoder that returns more than there are labels, as ViLT's does with the parts of an image, is an error in the first
step. Only training with labels given by name is changed: in evaluation, or without labels, logits are for all tokens,
as metrics expect. In training `logits` are `[1, predicted tokens, vocabulary]`, in the order of the tokens in the
batch; Composer's train metrics would compare them with labels of all tokens, so a model with any is refused. To
count the predicted tokens a CUDA device is waited for once a forward pass. `capacity`, a share of the batch's
tokens such as 0.2, has no such wait and gives fixed shapes to the compiler; a batch with more to predict
raises.

Source: MosaicBERT and ModernBERT (sparse prediction), DeepSpeed's BERT (`max_predictions_per_seq`).
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from composer.core import State
from composer.loggers import Logger
from composer.models import HuggingFaceModel
from transformers import PreTrainedModel

from composer_speedups.errors import SpeedUpUnavailable
from composer_speedups.families import MASKED, has_head
from composer_speedups.ignored import IGNORED
from composer_speedups.speedup import SpeedUp, Stage, warn
from composer_speedups.surgery import mix_in, override_methods, overrides, stock_class

__all__ = ["MaskedTokenHead", "apply_masked_token_head"]


class _Chosen(threading.local):
    """What is chosen in this thread's call: threads may share a model."""

    def __init__(self) -> None:
        self.now: tuple[torch.nn.Module, torch.Tensor, torch.Size] | None = None  # encoder, places, shape of the labels


_here = _Chosen()


def apply_masked_token_head(model: torch.nn.Module, capacity: float | None = None) -> int:
    """Let every masked language model in `model` compute its head on tokens to predict only; return how many.

    Args:
        model: a Hugging Face `...ForMaskedLM`, or a module that contains one.
        capacity: share of a batch's tokens that is always taken; None takes those with a label.

    >>> from transformers import BertConfig, BertForMaskedLM
    >>> bert = BertForMaskedLM(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9))
    >>> apply_masked_token_head(bert), apply_masked_token_head(bert)
    (1, 0)
    >>> labels = torch.tensor([[-100, 3, -100, -100], [4, 5, -100, -100]])
    >>> bert.train()(input_ids=torch.ones_like(labels), labels=labels).logits.shape
    torch.Size([1, 3, 9])
    """
    _check(capacity)
    count = 0
    for owner in [m for m in model.modules() if _is_masked_lm(m) and _why_not(m) is None]:
        mix_in(_Gathers, owner.base_model)
        count += override_methods(owner, ("forward",), _PredictedOnly(capacity))
    return count


class MaskedTokenHead(SpeedUp):
    """Apply `apply_masked_token_head` at `Event.INIT`.

    Args:
        capacity: share of a batch's tokens that is always taken; None takes those with a label.

    >>> MaskedTokenHead(capacity=0.2)
    MaskedTokenHead(capacity=0.2)
    """

    stage = Stage.HEAD

    def __init__(self, capacity: float | None = None) -> None:
        _check(capacity)
        self.capacity = capacity

    def install(self, state: State, logger: Logger) -> None:
        models = [m for m in state.model.modules() if _is_masked_lm(m)]
        metrics = getattr(state.model, "get_metrics", None)
        if models and metrics is not None and metrics(is_train=True):
            raise SpeedUpUnavailable(
                f"{self!r}: train metrics need logits of all tokens."
                " Give HuggingFaceModel metrics=[] and eval_metrics=[...]"
            )
        cls = stock_class(type(state.model))
        if models and issubclass(cls, HuggingFaceModel) and cls.loss is not HuggingFaceModel.loss:
            warn(
                UserWarning(
                    f"{self!r}: {cls.__name__} has a loss of its own. In training it gets logits [1, "
                    "predicted tokens, vocabulary], beside the batch's labels of all tokens: let it begin with "
                    "outputs['loss'], which is of the predicted ones, or remove the speed-up"
                )
            )
        reasons = sorted({reason for m in models if (reason := _why_not(m)) is not None})
        count = apply_masked_token_head(state.model, self.capacity)
        self.report(logger, count, "; ".join(reasons) or "no Hugging Face masked language model (...ForMaskedLM)")


def _is_masked_lm(module: torch.nn.Module) -> bool:
    return isinstance(module, PreTrainedModel) and has_head(module, MASKED)


def waits_for_predicted(module: torch.nn.Module) -> bool:
    """Whether this head, on a GPU, waits in each step to learn how many tokens it has to predict."""
    return any(isinstance(wrap, _PredictedOnly) and wrap.capacity is None for wrap in overrides(module))


def _why_not(model: PreTrainedModel) -> str | None:
    if any(isinstance(wrap, _PredictedOnly) for wrap in overrides(model)):
        return "its head works on predicted tokens only already"
    if model.base_model is model:
        return f"{type(model).__name__} has no encoder of its own (base_model_prefix is {model.base_model_prefix!r})"
    if getattr(model.config, "model_type", "") == "modernbert" and (
        model.config._attn_implementation == "flash_attention_2"
    ):
        return "ModernBERT with flash_attention_2 does this itself: set config.sparse_prediction=True"
    return None


@dataclass(frozen=True)
class _PredictedOnly:
    """Around the model's `forward`: chooses the tokens, and shows the stock code a batch of just these."""

    capacity: float | None

    predicted_only: ClassVar[bool] = True  # by which `fused_cross_entropy` knows it, which must come before

    def __call__(self, stock: Any) -> Any:
        def forward(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            labels = kwargs.get("labels")
            if not model.training or labels is None or labels.dim() != 2 or _one_of_a_batch(labels):
                return stock(model, *args, **kwargs)
            encoder, shape, labels = model.base_model, labels.shape, labels.flatten()
            places = _places(labels, self.capacity)
            if getattr(model, "sparse_prediction", False) and not len(places):
                places = places.new_zeros(1)  # ModernBERT's own choice cannot reshape an empty batch; it takes none
            before, _here.now = _here.now, (encoder, places, shape)
            try:
                kwargs["labels"] = labels[places][None]
                return stock(model, *args, **kwargs)
            finally:
                _here.now = before

        return forward


def _one_of_a_batch(labels: torch.Tensor) -> bool:
    """Whether they may stand for many, as `vmap` has it (gradients of each sample), with other numbers to predict."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(labels)


def _places(labels: torch.Tensor, capacity: float | None) -> torch.Tensor:
    """Where `labels` (int64 [tokens]) is to be predicted, in order; with a capacity, filled up with other places."""
    asked = labels != IGNORED
    if capacity is None:
        return asked.nonzero()[:, 0]
    room = min(labels.numel(), math.ceil(capacity * labels.numel()))
    message = f"MaskedTokenHead: more tokens to predict than capacity={capacity} has room for ({room}): raise it"
    torch._assert_async(asked.sum() <= room, message)
    return torch.argsort(asked, descending=True, stable=True)[:room]


class _Gathers:
    """Mixed into an encoder: hands the hidden states of the chosen places, [1, chosen, width], to the head."""

    chooses_tokens = True  # out of all: what packs them comes first

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        if _here.now is None or _here.now[0] is not self:
            return out
        _, places, shape = _here.now
        if out[0].shape[:2] != shape:  # as ViLT's: an image's parts follow the words
            raise SpeedUpUnavailable(
                f"MaskedTokenHead: {type(self).__name__} returns {tuple(out[0].shape[:2])} tokens for labels of "
                f"{tuple(shape)}, so that it is not known which are to be predicted: leave masked_token_head out"
            )
        chosen = out[0].flatten(0, 1).index_select(0, places)[None]
        if isinstance(out, tuple):
            return (chosen, *out[1:])
        out[next(iter(out))] = chosen
        return out


def _check(capacity: float | None) -> None:
    if capacity is None:
        return
    if isinstance(capacity, bool) or not isinstance(capacity, float | int):
        raise TypeError(f"capacity is a share of the tokens from 0 to 1, or None, not {capacity!r}")
    if not 0 < capacity <= 1:
        raise ValueError(f"capacity must be above 0 and at most 1, not {capacity}: 0.2 serves masks of 15 %")
