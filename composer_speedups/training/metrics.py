"""What a trained model is measured by, on texts that it has not seen: for each objective a loss and how often, or how
far, it is right."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from composer.metrics import CrossEntropy, LanguageCrossEntropy, MaskedAccuracy
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MultilabelAccuracy

from composer_speedups.ignored import IGNORED
from composer_speedups.measurement.results import RunResult
from composer_speedups.tasks import Task

_ROUNDING = 1e-12  # of a sum of squares: labels that differ by less are the same

__all__ = ["R2", "MeanSquaredError", "MultiLabelAccuracy", "MultiLabelCrossEntropy", "evaluation_metrics", "record"]


class _Sums(Metric):
    """Sums over samples, in float64: of many, or of large numbers, float32 would lose what tells recipes apart."""

    full_state_update = False
    sums: torch.Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(count, dtype=torch.float64), dist_reduce_fx="sum")

    def _add(self, *values: torch.Tensor) -> None:
        self.sums += torch.stack([value.double().sum() for value in values])


class _Mean(_Sums):
    """Of what `of` gives for each answer."""

    def __init__(self) -> None:
        super().__init__(2)

    def of(self, preds: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        values = self.of(preds.double(), target.double())
        self._add(values, torch.ones_like(values))

    def compute(self) -> torch.Tensor:
        return self.sums[0] / self.sums[1]


class MultiLabelCrossEntropy(_Mean):
    """Mean over texts and classes of the binary cross entropy, of logits and labels [rows, classes]."""

    def of(self, preds: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(preds, target, reduction="none")


class MultiLabelAccuracy(MultilabelAccuracy):
    """Share of right answers, of one to each class of each text: 0 or 1, by whether its logit is above 0."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes, average="micro")

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        # Not probabilities: logits that all happen to lie between 0 and 1 would be taken for such.
        super().update((preds > 0).long(), target.long())


class MeanSquaredError(_Mean):
    """Of numbers [rows]."""

    def of(self, preds: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (preds - target) ** 2


class R2(_Sums):
    """The share of the variance of the labels [rows] that is explained: 1 is all, 0 what their mean would do.

    NaN where the labels are all the same.
    """

    def __init__(self) -> None:
        super().__init__(4)

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        labels = target.double()
        self._add((preds.double() - labels) ** 2, labels, labels**2, torch.ones_like(labels))

    def compute(self) -> torch.Tensor:
        squares, total, squared, count = self.sums
        varied = squared - total**2 / count
        return 1 - squares / torch.where(varied > _ROUNDING * squared, varied, torch.nan)


def evaluation_metrics(task: Task, classes: int) -> list[Any]:
    """For Composer's evaluation of a model with so many classes."""
    if task.objective == "regression":
        return [MeanSquaredError(), R2()]
    if task.objective == "multi_label":
        return [MultiLabelCrossEntropy(), MultiLabelAccuracy(classes)]
    if task.objective == "classification":
        return [CrossEntropy(), MulticlassAccuracy(num_classes=classes, average="micro")]
    return [LanguageCrossEntropy(), MaskedAccuracy(ignore_index=IGNORED)]


def record(result: RunResult, metric: Metric, task: Task) -> None:
    """Write what `metric`, one of `evaluation_metrics`, found into `result`."""
    value = float(metric.compute())
    if isinstance(metric, R2):
        result.eval_r2 = value
    elif isinstance(metric, MulticlassAccuracy | MultilabelAccuracy | MaskedAccuracy):
        result.eval_accuracy, result.eval_majority = value, task.majority
    else:
        result.eval_loss = value
