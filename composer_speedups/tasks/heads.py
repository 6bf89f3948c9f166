"""The classes of a pretrained classifier's own head, and those of a task: numbers that must mean the same.

A task numbers its classes in the order of their names, a checkpoint as its author did. Where both have as many, the
head fits whatever they mean, and would train from answers that are all wrong.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["fit_head"]

_NAMELESS = re.compile(r"LABEL_(\d+)")  # transformers' word for a class that nobody named


def fit_head(
    model: PreTrainedModel, before: Mapping[int, str], names: Sequence[str], new: Collection[str]
) -> str | None:
    """Let the head's outputs be the classes `names`, in that order; return what its user should know.

    The same classes in another order change places, with what is known of them. Other ones, as many, get an output
    layer with random weights. Nothing is done where the layer is new anyway, as of a checkpoint without a head.

    Args:
        model: a classifier, with the checkpoint's weights.
        before: the checkpoint's names, by their numbers.
        names: the task's.
        new: names of the parameters that the checkpoint did not have, or of another shape.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> shape = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=9)
    >>> bert = BertForSequenceClassification(BertConfig(**shape))
    >>> row = bert.classifier.weight[0].tolist()
    >>> fit_head(bert, {0: "pos", 1: "neg"}, ["neg", "pos"], [])
    >>> bert.classifier.weight[1].tolist() == row
    True
    """
    body = f"{model.base_model_prefix}."
    outputs = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module.out_features == len(names) and not name.startswith(body)
    ]
    had, have = [before[i].casefold() for i in sorted(before)], [name.casefold() for name in names]
    if not outputs or f"{outputs[-1][0]}.weight" in new or len(had) != len(have) or had == have:
        return None
    layer = outputs[-1][1]
    parameters = [p for p in (layer.weight, layer.bias) if p is not None]
    if sorted(had) == sorted(have) and len(set(had)) == len(had):
        with torch.no_grad():
            for p in parameters:
                p.copy_(p[[had.index(name) for name in have]].clone())
        return None
    if all(_NAMELESS.fullmatch(before[i]) for i in before):
        if have == [str(i) for i in range(len(have))]:
            return None
        return f"the classes of its head have no names: they are taken for {_listed(names)}, in this order"
    torch.nn.init.normal_(layer.weight, std=getattr(model.config, "initializer_range", 0.02))
    if layer.bias is not None:
        torch.nn.init.zeros_(layer.bias)
    others = _listed([before[i] for i in sorted(before)])
    return f"its head was trained for {others}: for {_listed(names)} the output layer begins at random weights"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} others"
