"""The promises of every algorithm beside what else is at the model: the user's hooks, copies, and other speed-ups.

As in `test_contract.py`, whatever the registry discovers is held to them, on the CPU.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch
from composer import Trainer
from composer.algorithms.warnings import NoEffectWarning
from composer.models import HuggingFaceModel
from contract import USABLE, batch, bert, case, forward_and_gradients, loader, make
from small import stock_checkpointing

from composer_speedups import registry
from composer_speedups.recipes import load_recipe
from composer_speedups.speedup import SpeedUp, Stage, conflict

DATA_KEYS = [key for key in USABLE if registry.speedup_class(key).stage is Stage.DATA]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    yield
    torch._dynamo.reset()  # what is compiled here would be used again by other tests' layers


@contextmanager
def trainer(algorithms: list[SpeedUp], model: torch.nn.Module, head: str):
    """That one of several finds nothing to do is no fault here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEffectWarning)
        made = Trainer(
            model=HuggingFaceModel(model, metrics=[], use_logits=True),
            optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
            algorithms=algorithms,
            train_dataloader=loader(head),
            max_duration="2ba",
            seed=7,
            device="cpu",
            progress_bar=False,
            loggers=[],
        )
    try:
        yield made
    finally:
        made.close()


def install(algorithms: list[SpeedUp], model: torch.nn.Module, head: str) -> None:
    with trainer(algorithms, model, head):
        pass


def heard(model: torch.nn.Module) -> Counter[str]:
    """Lets every submodule count its calls, by name."""
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    return calls


# Compiled code keeps to the hooks that it was compiled with; PyTorch says so.
AT_ANY_TIME = [("after", key) for key in USABLE if key != "torch_compile"]


@pytest.mark.parametrize(("when", "key"), [*AT_ANY_TIME, *(("before", key) for key in USABLE)])
def test_a_hook_on_any_module_is_called(when: str, key: str) -> None:
    head, called = case(key).head, []
    for algorithms in ([], [make(key)]):
        model = bert(head)
        calls = heard(model) if when == "before" else Counter()
        install(algorithms, model, head)
        if when == "after":
            calls = heard(model)
        model(**batch(head))["loss"].backward()
        called.append(set(calls))
    # As with transformers' own SDPA, there are no attention probabilities whose dropout could be called.
    fused = registry.speedup_class(key).slot == "attention"
    inside = {name for name in called[0] if fused and name.endswith("attention.self.dropout")}
    assert called[1] == called[0] - inside


@pytest.mark.parametrize("key", [key for key in USABLE if registry.speedup_class(key).stage is not Stage.COMPILE])
@pytest.mark.parametrize("recomputed", ["blocks", "offloaded"])
def test_a_hook_on_any_gradient_is_called(recomputed: str, key: str) -> None:
    """Those that clip or mask one, also where what is saved for the backward pass goes through PyTorch's own hooks."""
    head = case(key).head
    model = bert(head)
    install([make(key)], model, head)
    if recomputed == "blocks" and key != "gradient_checkpointing":
        stock_checkpointing(model)
    for parameter in model.parameters():
        parameter.register_hook(torch.zeros_like)
    offloaded = torch.autograd.graph.save_on_cpu() if recomputed == "offloaded" else nullcontext()
    with torch.autocast("cpu", torch.bfloat16, enabled=key == "low_precision_norm"), offloaded:
        loss = model(**batch(head))["loss"]
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(grads) > 10 and not [name for name, grad in grads.items() if grad.count_nonzero()]


@pytest.mark.parametrize("key", USABLE)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_compute_the_same(key: str, how: str) -> None:
    head = case(key).head
    model = bert(head)
    install([make(key)], model, head)
    again = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    data = batch(head)
    expected, others = forward_and_gradients(model, data), forward_and_gradients(again, data)
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    assert torch.equal(others[0], expected[0]) and torch.equal(others[1], expected[1])


def beside_all_that_pays(key: str, listed: str) -> list[SpeedUp]:
    """All of `cpu/fastest_fp32` that `key` does not contradict (in float32, so that tolerances are narrow)."""
    own = make(key)
    company = [other for other in load_recipe("cpu/fastest_fp32").algorithms() if conflict([other, own]) is None]
    return [own, *company] if listed == "before" else [*company, own]


@pytest.mark.parametrize("key", [key for key in USABLE if key not in DATA_KEYS])
def test_beside_everything_that_pays_it_matches_float64(key: str) -> None:
    head, bound = case(key).head, case(key).bound
    model = bert(head)
    reference = copy.deepcopy(model).double()
    algorithms = beside_all_that_pays(key, "before")
    install(algorithms, model, head)
    assert algorithms[0].evidence["changed"] > 0
    data = batch(head)
    loss, grads = forward_and_gradients(model, data)
    expected_loss, expected = forward_and_gradients(reference, data)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=bound)
    assert ((grads - expected).norm() / expected.norm()).item() <= bound


@pytest.mark.parametrize("key", USABLE)
def test_beside_everything_that_pays_it_trains_alike_wherever_it_is_listed(key: str) -> None:
    head, weights = case(key).head, []
    for listed in ("before", "after"):
        model = bert(head, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        with trainer(beside_all_that_pays(key, listed), model, head) as made:
            made.fit()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights) and not torch.equal(weights[0], start)


def lora(head: str, adapters: tuple[str, ...]) -> torch.nn.Module:
    """A BERT with adapters by PEFT on its linear layers of these names, which are no zeros as they are at first."""
    peft = pytest.importorskip("peft", reason="PEFT is not on every machine that is lent")
    kind = "SEQ_CLS" if head == "classification" else None
    wanted = peft.LoraConfig(task_type=kind, r=4, lora_dropout=0.0, target_modules=list(adapters))
    model = peft.get_peft_model(bert(head), wanted)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return model


@pytest.mark.parametrize("key", [key for key in USABLE if key not in DATA_KEYS])
def test_adapters_train_as_in_float64_and_nothing_else_does(key: str) -> None:
    head, bound = case(key).head, case(key).bound
    model = lora(head, case(key).adapters)
    names = list(model.state_dict())
    reference = copy.deepcopy(model).double()
    algorithm = make(key)
    install([algorithm], model, head)
    assert algorithm.evidence["changed"] > 0
    data = batch(head)
    loss, grads = forward_and_gradients(model, data)
    expected_loss, expected = forward_and_gradients(reference, data)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=bound)
    assert ((grads - expected).norm() / expected.norm()).item() <= bound

    before = {name: value.clone() for name, value in model.state_dict().items()}
    with trainer([make(key)], model, head) as made:
        made.fit()
    assert list(model.state_dict()) == names
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("key", DATA_KEYS)
def test_what_is_about_batches_leaves_the_model_alone(key: str) -> None:
    model = bert(case(key).head)
    before = [type(m) for m in model.modules()]
    install([make(key)], model, case(key).head)
    assert [type(m) for m in model.modules()] == before
