from __future__ import annotations

import copy
import pickle

import pytest
import torch
from composer.algorithms.warnings import NoEffectWarning
from composer.models import ComposerClassifier, HuggingFaceModel
from small import bert_config, padded_batch

from composer_speedups import FastDropout, apply_fast_dropout, apply_fused_dropout_add_norm
from composer_speedups.algorithms.fast_dropout import DropoutOfCheapBits


def bert(p: float = 0.1, attention: str = "eager") -> torch.nn.Module:
    from transformers import BertForSequenceClassification

    config = bert_config(hidden_dropout_prob=p, attention_probs_dropout_prob=p)
    return BertForSequenceClassification._from_config(config, attn_implementation=attention)


def test_replaces_every_dropout_once() -> None:
    model = bert()
    keys, parameters = list(model.state_dict()), list(map(id, model.parameters()))
    plain = [m for m in model.modules() if type(m) is torch.nn.Dropout]
    assert apply_fast_dropout(model) == len(plain) > 0
    assert all(type(m) is DropoutOfCheapBits and m.p == 0.1 for m in plain)  # the same module objects
    assert apply_fast_dropout(model) == 0
    assert list(model.state_dict()) == keys and list(map(id, model.parameters())) == parameters


@pytest.mark.parametrize("fused", [False, True])
def test_dropouts_are_still_found_by_the_name_of_their_class(fused: bool) -> None:
    """As many do who draw in evaluation, for Monte Carlo dropout."""
    model, batch = bert(0.5), padded_batch()
    if fused:
        apply_fused_dropout_add_norm(model)
    apply_fast_dropout(model)
    model.eval()
    for module in model.modules():
        if type(module).__name__.startswith("Dropout"):
            module.train()
    assert all(module.training for module in model.modules() if isinstance(module, torch.nn.Dropout))
    assert not torch.equal(model(**batch).logits, model(**batch).logits)


def test_draws_nothing_from_bernoulli_and_saves_no_mask() -> None:
    layer = torch.nn.Sequential(torch.nn.Dropout(0.1))
    apply_fast_dropout(layer)
    x = torch.randn(64, 64, requires_grad=True)
    saved = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile,
    ):
        layer(x).sum().backward()
    assert saved == []
    assert not any("bernoulli" in event.key for event in profile.key_averages())


def test_is_the_identity_in_evaluation() -> None:
    model, batch = bert(0.5).eval(), padded_batch()
    expected = model(**batch).logits
    apply_fast_dropout(model)
    assert torch.equal(model(**batch).logits, expected)


def test_stays_in_the_autocast_dtype() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
    apply_fast_dropout(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.ones(4, 8)).dtype == torch.bfloat16


def test_copies_and_pickles() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.25, inplace=True))
    apply_fast_dropout(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other[0]) is DropoutOfCheapBits and (other[0].p, other[0].inplace) == (0.25, True)


def test_regularises_as_torchs_dropout_does() -> None:
    check_regularisation()


def check_regularisation() -> None:
    """Mean and spread of the loss over many masks are the same for both kinds of mask, and each mask's mean is 1."""
    layer = torch.nn.Sequential(torch.nn.Dropout(0.3))
    apply_fast_dropout(layer)
    # Norms hide a scale from a BERT's loss. The mean of n elements has a standard error of sqrt(p / (1 - p) / n).
    dropped = layer(torch.ones(100_000))
    assert float((dropped.mean() - 1).abs()) < 5 * (0.3 / 0.7 / 100_000) ** 0.5
    assert float(((dropped == 0).float().mean() - 0.3).abs()) < 5 * (0.3 * 0.7 / 100_000) ** 0.5
    batch = padded_batch()
    losses = {}
    for fast in (False, True):
        torch.manual_seed(0)
        model = bert(0.3)
        if fast:
            apply_fast_dropout(model)
        with torch.no_grad():
            losses[fast] = torch.stack([model(**batch).loss for _ in range(200)])
    mean, spread = (torch.stack([f(losses[False]), f(losses[True])]) for f in (torch.mean, torch.std))
    # The mean of 200 draws has a standard error of spread / sqrt(200), the spread itself of spread / sqrt(400).
    assert float((mean[0] - mean[1]).abs()) < 5 * float(spread.max()) * (2 / 200) ** 0.5
    assert float((spread[0] - spread[1]).abs()) < 5 * float(spread.max()) * (2 / 400) ** 0.5


@pytest.mark.parametrize("fault", ["no scale", "half the probability", "active in evaluation"])
def test_planted_faults_are_found(fault: str, monkeypatch) -> None:
    from composer_speedups.kernels import fast_dropout as kernel

    right = kernel.fast_dropout

    def faulty(x, p, training=True, inplace=False):
        if fault == "no scale":
            return right(x, p, training, inplace) * (1 - p if training else 1)
        if fault == "half the probability":
            return right(x, p / 2, training, inplace)
        return right(x, p, True, inplace)

    monkeypatch.setattr(kernel, "fast_dropout", faulty)
    with pytest.raises(AssertionError):
        if fault == "active in evaluation":
            test_is_the_identity_in_evaluation()
        else:
            check_regularisation()


def test_works_inside_a_trainer_and_repeats(make_trainer) -> None:
    weights = []
    for _ in range(2):
        torch.manual_seed(1)
        algorithm = FastDropout()
        trainer = make_trainer([algorithm], model=HuggingFaceModel(bert()))
        trainer.fit()
        weights.append(trainer.state.model.model.classifier.weight.detach().clone())
    assert algorithm.evidence["changed"] == algorithm.evidence["active"] > 0
    assert torch.equal(*weights)


def test_says_that_there_is_nothing_to_drop(make_trainer, tiny_bert, caplog) -> None:
    for module in tiny_bert.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    make_trainer([FastDropout()], model=HuggingFaceModel(tiny_bert, use_logits=True))
    assert "every dropout in the model has the rate 0" in caplog.text


def test_refused_beside_a_gpu() -> None:
    assert FastDropout().unavailable(torch.device("cpu")) is None
    assert "remove it" in FastDropout().unavailable(torch.device("cuda"))


def test_warns_when_nothing_to_replace(make_trainer) -> None:
    model = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
    with pytest.warns(NoEffectWarning, match=r"no torch\.nn\.Dropout"):
        make_trainer([FastDropout()], model=model)
