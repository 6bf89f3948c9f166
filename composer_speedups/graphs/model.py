"""Whole models as CUDA graphs: which can be, how many tokens a call of one has, and what else of it the host reads."""

from __future__ import annotations

from typing import Any

import torch

from composer_speedups.families import GRAPHED, has_head
from composer_speedups.graphs.kept_in_python import PLAIN, Itself
from composer_speedups.graphs.replay import Total
from composer_speedups.packed.encoder import PackedEncoder
from composer_speedups.surgery import known_code, stock_forward

__all__ = ["can_be_whole", "known_loss", "read_on_host", "total_of"]

_OF_HEADS = ("labels", "start_positions", "end_positions", "next_sentence_label")  # arguments that no encoder is given


def can_be_whole(model: torch.nn.Module) -> bool:
    """Whether `model` is an unpadded encoder and a head, so that its tokens' total is all that a call's host must know.

    Its modules must be known, and its loss: numbers that somebody's own keeps in Python would stay what they were when
    recorded. And none may keep statistics, which recording would change, nor choose tokens by a mask, for which the
    host waits.
    """
    encoder = getattr(model, "base_model", None)
    if not isinstance(encoder, PackedEncoder) or encoder is model or encoder.config.model_type not in GRAPHED:
        return False
    waits = has_head(model, ("ForMultipleChoice",)) or getattr(model, "sparse_prediction", False)
    waits = waits or (has_head(model, ("ForPreTraining",)) and encoder.config.model_type == "electra")
    known = all(known_code(type(m)) for m in model.modules())
    statistics = any("running_mean" in m._buffers for m in model.modules())
    return known and not waits and not statistics and stock_forward(model) and known_loss(model)


def known_loss(model: torch.nn.Module) -> bool:
    """Whether nobody gave `model` a loss of theirs, which may compute with numbers that it keeps in Python."""
    loss = vars(model).get("_loss_function")
    return loss is None or str(getattr(loss, "__module__", "")).startswith(("transformers.", "composer_speedups."))


def total_of(encoder: PackedEncoder, input_ids: Any = None, attention_mask: Any = None, **others: Any) -> Total | None:
    """How many tokens `encoder` will pack in such a call of its model; None if it packs none.

    Waits for the device unless the mask's rows were counted before.
    """
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2:
        return None
    own = (*_OF_HEADS, *encoder.packed_takes)
    found = encoder.counted(input_ids, attention_mask, (), {k: x for k, x in others.items() if k not in own})
    if found is None:
        return None
    step, most = encoder.packed_multiple_of, input_ids.numel()
    real = sum(map(abs, found[1]))
    return Total(min(most, -(-real // step) * step), step, most, input_ids.shape[1])


def read_on_host(model: torch.nn.Module, labels: Any) -> tuple[Any, ...]:
    """What heads and losses read of a model besides tensors: its configuration, and the loss that somebody gave it."""
    found = {name: x for name, x in vars(model.config).items() if isinstance(x, PLAIN)}
    # transformers writes it down in the first call with labels, and then it stays.
    found["problem_type"] = found.get("problem_type") or _kind_of_problem(model, labels)
    return *found.items(), Itself(vars(model).get("_loss_function"))


def _kind_of_problem(model: torch.nn.Module, labels: Any) -> str | None:
    """As transformers finds out for its classifiers of sequences."""
    if not isinstance(labels, torch.Tensor):
        return None
    if model.config.num_labels == 1:
        return "regression"
    whole = labels.dtype in (torch.long, torch.int)
    return "single_label_classification" if whole else "multi_label_classification"
