"""The classes of a pretrained classifier's own head, and those of a task: numbers that must mean the same.

A task numbers its classes in the order of their names, a checkpoint as its author did. Where both have as many, the
head fits whatever they mean, and would train from answers that are all wrong.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from composer_speedups.tasks.records import as_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["begin_at", "fit_head"]

_NAMELESS = re.compile(r"LABEL_(\d+)")  # transformers' word for a class that nobody named


def begin_at(model: PreTrainedModel, mean: float) -> None:
    """Let a new head of one output begin at `mean`: training then need not get there first, step by step."""
    output = _output(model, 1)
    if output is not None and output[1].bias is not None and not output[1].bias.any():  # a trained one is not 0
        torch.nn.init.constant_(output[1].bias, mean)


def fit_head(
    model: PreTrainedModel,
    before: Mapping[int | str, object],
    names: Sequence[str],
    new: Collection[str],
    same_kind: bool = True,
) -> str | None:
    """Let the head's outputs be `names`, in that order; return what its user should know.

    The same classes in another order change places, with what is known of them. Other ones, as many, get an output
    layer with random weights. Nothing is done where the layer is new anyway, as of a checkpoint without a head.

    Args:
        model: a classifier, with the checkpoint's weights.
        before: the checkpoint's names, by their numbers.
        names: the task's.
        new: names of the parameters that the checkpoint did not have, or of another shape.
        same_kind: whether the checkpoint's head was one of this kind, as of texts or of words.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> shape = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=9)
    >>> bert = BertForSequenceClassification(BertConfig(**shape))
    >>> row = bert.classifier.weight[0].tolist()
    >>> fit_head(bert, {0: "pos", 1: "neg"}, ["neg", "pos"], [])
    >>> bert.classifier.weight[1].tolist() == row
    True
    """
    output = _output(model, len(names))
    had = [str(before[number]) for number in sorted(before, key=int)]
    if output is None or f"{output[0]}.weight" in new or len(had) != len(names):
        return None
    layer = output[1]
    if not same_kind:
        _at_random(model, layer)
        return "its head is of another kind of task: the output layer begins at random weights"
    parameters = [p for p in (layer.weight, layer.bias) if p is not None]
    if (places := _places(had, names)) is not None:
        with torch.no_grad():
            for p in parameters:
                p.copy_(p[places].clone())
        return None
    if all(_NAMELESS.fullmatch(name) for name in had):
        return f"the classes of its head have no names: they are taken for {_listed(names)}, in this order"
    _at_random(model, layer)
    return (
        f"its head was trained for {_listed(had)}: for {_listed(names)} the output layer begins at random weights. If "
        "these are the same, call them alike: in the data, or in id2label of its config.json"
    )


def _output(model: PreTrainedModel, count: int) -> tuple[str, torch.nn.Linear] | None:
    """The last layer of the head, with its name, if it has so many outputs."""
    body = f"{model.base_model_prefix}."
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    return next(((n, m) for n, m in reversed(layers) if m.out_features == count and not n.startswith(body)), None)


def _at_random(model: PreTrainedModel, layer: torch.nn.Linear) -> None:
    torch.nn.init.normal_(layer.weight, std=getattr(model.config, "initializer_range", 0.02))
    if layer.bias is not None:
        torch.nn.init.zeros_(layer.bias)


def _places(had: Sequence[str], names: Sequence[str]) -> list[int] | None:
    """Where each of `names` stands among `had`, if these are the same: by letter, else in another case, or as a number.

    >>> _places(["us", "US"], ["US", "us"]), _places(["Pos", "neg"], ["neg", "pos"])
    ([1, 0], [1, 0])
    >>> _places(["LABEL_1", "LABEL_0"], ["0", "1"]), _places(["0.0", "1.0"], ["0", "1"])
    ([1, 0], [0, 1])
    >>> _places(["a", "b"], ["a", "c"])
    """
    for form in (str, str.casefold, _number):
        known, wanted = [form(name) for name in had], [form(name) for name in names]
        if sorted(known) == sorted(wanted) and len(set(known)) == len(known):
            return [known.index(name) for name in wanted]
    return None


def _number(name: str) -> str:
    """The number that a nameless class has, or that a table has written as 1.0; else the name itself."""
    nameless = _NAMELESS.fullmatch(name)
    return nameless[1] if nameless else as_class(name)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} others"
