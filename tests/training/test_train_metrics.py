"""Metrics of the training batches: the same with every speed-up, of the step's own outputs and not of a pass more."""

from __future__ import annotations

import pytest
import torch
from composer.metrics import CrossEntropy
from composer.models import HuggingFaceModel
from contract import USABLE, Dataset, bert, case, make
from torchmetrics.classification import MulticlassAccuracy

from composer_speedups import registry

# Other batches and another optimizer's steps have other metrics; the head of masked tokens refuses them, and says why.
KEYS = [
    key
    for key in USABLE
    if not registry.speedup_class(key).regroups and not case(key).own_moments and case(key).head == "classification"
]


@pytest.mark.filterwarnings("ignore:The tokenizer was not provided")
@pytest.mark.parametrize("key", KEYS)
def test_train_metrics_are_those_of_the_plain_model_and_cost_no_pass(make_trainer, key: str) -> None:
    found = []
    for algorithms in ([], [make(key)]):
        model, passes = bert(), []
        model.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        metrics = [MulticlassAccuracy(num_classes=3, average="micro"), CrossEntropy()]
        trainer = make_trainer(
            algorithms,
            model=HuggingFaceModel(model, metrics=metrics, use_logits=True),
            train_dataloader=torch.utils.data.DataLoader(Dataset("classification", 24), batch_size=8),
        )
        trainer.fit()
        assert len(passes) == 3 == int(trainer.state.timestamp.batch)
        found.append({name: float(metric.compute()) for name, metric in trainer.state.train_metrics.items()})
    assert len(found[0]) == 2
    # Of the last batch, after two steps: the bounds of the contract, doubled as the loss is about 1.
    assert found[1] == pytest.approx(found[0], abs=2 * case(key).bound)
