"""What a model learns to say of texts: the head that each objective gives it, and what its labels are."""

from __future__ import annotations

from dataclasses import dataclass

from composer_speedups.tasks.labels import ClassOfText, ClassOfWords, Labels, Number, SeveralClasses

__all__ = ["OBJECTIVES", "Objective"]


@dataclass(frozen=True)
class Objective:
    """One of those that `task.objective` names.

    Attributes:
        head: the class of transformers that gives a model its head.
        problem: transformers' name of the loss, where a head has several.
        labels: how labels are written in the data; None where the texts themselves are what is learnt.
        of_tokens: a label belongs to a token, and so the loss is a mean over tokens.
    """

    head: str
    problem: str | None = None
    labels: Labels | None = None
    of_tokens: bool = False

    @property
    def has_classes(self) -> bool:
        """Whether outputs are classes with names."""
        return self.labels is not None and self.labels.are_classes


_OF_TEXT = "AutoModelForSequenceClassification"

OBJECTIVES = {
    "classification": Objective(_OF_TEXT, "single_label_classification", ClassOfText()),
    "multi_label": Objective(_OF_TEXT, "multi_label_classification", SeveralClasses()),
    "regression": Objective(_OF_TEXT, "regression", Number()),
    "token_classification": Objective("AutoModelForTokenClassification", labels=ClassOfWords(), of_tokens=True),
    "mlm": Objective("AutoModelForMaskedLM", of_tokens=True),
}
