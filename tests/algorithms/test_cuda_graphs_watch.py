"""What graphs have in them of modules that are neither PyTorch's nor transformers', whose gradients they give, and when
they let go."""

from __future__ import annotations

import copy
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from composer.models import HuggingFaceModel
from small import stock_checkpointing
from test_cuda_graphs import batch_of, graphs_of, model_of, packed
from torch.nn.utils import parametrize

from composer_speedups import CUDAGraphs, apply_cuda_graphs
from composer_speedups.errors import ConflictError
from composer_speedups.graphs.cast_together import linear_weights
from composer_speedups.graphs.kept_in_python import at_present
from composer_speedups.graphs.unrecordable import unrecordable


class Strength(Enum):
    PLAIN = 1.0
    STRONG = 30.0


class Scaled(torch.nn.Module):
    """An activation of a user's own, which computes with what it keeps in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.scaling, self.host = 1.0, {"default": 1.0}, torch.tensor(1.0)
        self.kind, self.calls = "gelu", 0
        self.config, self.strength = SimpleNamespace(gain=1.0, of=self), Strength.PLAIN
        self.several, self.further = torch.ones(2), torch.nn.functional.hardtanh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gain = self.gain * self.scaling["default"] * self.config.gain * self.strength.value * self.several[1].item()
        return self.further(getattr(torch.nn.functional, self.kind)(x) * gain * self.host)


def scaled_model() -> torch.nn.Module:
    model = model_of()
    for layer in model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = Scaled()
    return model.cuda()


CHANGES = {
    "a number": lambda m: setattr(m, "gain", 30.0),
    "a number in a dict, as an adapter's": lambda m: m.scaling.update(default=30.0),
    "a number in a tensor on the host": lambda m: m.host.fill_(30.0),
    "a word": lambda m: setattr(m, "kind", "relu"),
    "a number in an object": lambda m: setattr(m.config, "gain", 30.0),
    "a member of an enumeration": lambda m: setattr(m, "strength", Strength.STRONG),
    "one of several numbers on the host": lambda m: m.several[1].fill_(30.0),
    "a function": lambda m: setattr(m, "further", torch.nn.functional.softsign),
}


@pytest.mark.gpu
@pytest.mark.parametrize("change", CHANGES)
def test_what_own_modules_keep_in_python_is_looked_at(change: str) -> None:
    model = scaled_model()
    stock, batch = copy.deepcopy(model), {k: x.cuda() for k, x in batch_of(1).items()}
    apply_cuda_graphs(model)
    for step in range(6):
        losses = []
        for m in (model, stock):
            if step == 3:
                for own in (x for x in m.modules() if isinstance(x, Scaled)):
                    CHANGES[change](own)
            m.zero_grad()
            loss = m(**batch).loss
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5), step
    assert (graphs_of(model).recorded, graphs_of(model).replayed, graphs_of(model).launched) == (1, 4, 2)


@pytest.mark.gpu
def test_what_changes_in_each_step_is_not_recorded() -> None:
    model, batch = scaled_model(), {k: x.cuda() for k, x in batch_of(1).items()}
    apply_cuda_graphs(model)
    for step in range(4):
        model.bert.encoder.layer[1].intermediate.intermediate_act_fn.calls = step
        model(**batch).loss.backward()
    assert (graphs_of(model).recorded, graphs_of(model).replayed, graphs_of(model).launched) == (0, 0, 4)
    assert graphs_of(model).reason.startswith("the layers have changed since the batch before: frozen, moved")


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_kept_in_python_is_compared(change: str) -> None:
    module = Scaled()
    before = at_present(module, {})
    assert at_present(module, {}) == before and hash(before) == hash(at_present(module, {}))
    CHANGES[change](module)
    assert at_present(module, {}) != before


def test_a_tensor_is_what_it_is_and_where() -> None:
    module = Scaled()
    module.seen = torch.ones(3)
    before = at_present(module, {})
    module.seen = torch.ones(3)  # the one before may be freed, and its memory another's
    assert at_present(module, {}) != before


def test_large_and_deep_things_are_kept_as_which_they_are() -> None:
    """An attribute may lead to a data set, or to the whole trainer: this is asked in each step."""
    module = Scaled()
    module.data, module.names = list(range(100_000)), {"one", "two"}
    module.deep = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=1)))
    before = at_present(module, {})
    module.data[7] = -1
    module.deep.a.b.c = 2
    assert at_present(module, {}) == before
    module.names.add("three")
    assert at_present(module, {}) != before
    before = at_present(module, {})
    module.data = list(module.data)
    assert at_present(module, {}) != before


@pytest.mark.gpu
def test_a_tensor_on_the_device_that_is_put_in_anew_is_read() -> None:
    """The one before is freed: a graph that still read it would read whatever came there."""
    model = scaled_model()
    stock, batch = copy.deepcopy(model), {k: x.cuda() for k, x in batch_of(1).items()}
    for m in (model, stock):
        for own in (x for x in m.modules() if isinstance(x, Scaled)):
            own.host = torch.ones((), device="cuda")
    apply_cuda_graphs(model)
    for step in range(6):
        losses = []
        for m in (model, stock):
            for own in (x for x in m.modules() if isinstance(x, Scaled)):
                if step == 3:
                    own.host = torch.full((), 30.0, device="cuda")
                if step == 5:
                    own.host.fill_(0.5)  # where a graph reads it
            m.zero_grad()
            loss = m(**batch).loss
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5), step
    assert (graphs_of(model).recorded, graphs_of(model).replayed) == (1, 4)


class Gate(torch.nn.Module):
    """In float32 whatever autocast says, as routers are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(width, width)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.gate.weight.dtype)
        with torch.autocast("cuda", enabled=False):
            return torch.nn.functional.gelu(x) * torch.sigmoid(self.gate(x.float())).to(x.dtype)


def test_weights_inside_of_a_users_own_module_are_not_cast_for_it() -> None:
    own, known = torch.nn.Sequential(Gate(4)), torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert linear_weights([*own.modules()]) == []
    assert len(linear_weights([*own.modules(), *known.modules()])) == 1
    known[0].weight = own[0].gate.weight
    assert linear_weights([*own.modules(), *known.modules()]) == []


@pytest.mark.gpu
def test_a_users_own_module_may_turn_autocast_off() -> None:
    model = model_of()
    for layer in model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = Gate(layer.intermediate.dense.out_features)
    model = model.cuda()
    stock, batch = copy.deepcopy(model), {k: x.cuda() for k, x in batch_of(1).items()}
    apply_cuda_graphs(model)
    for _ in range(3):
        for m in (model, stock):
            m.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = m(**batch).loss
            loss.backward()
        for found, wanted in zip(model.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-2, atol=1e-3)
    assert set(model.bert.encoder.layer[0].intermediate.intermediate_act_fn.seen) == {torch.float32}


class Delta(torch.nn.Module):
    def __init__(self, like: torch.Tensor) -> None:
        super().__init__()
        self.delta = torch.nn.Parameter(torch.zeros_like(like))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.delta


@pytest.mark.gpu
def test_two_parameters_with_one_gradient_have_each_their_own() -> None:
    """As both terms of a sum: clipped in place, one must not be clipped twice."""
    model = model_of()
    for layer in model.bert.encoder.layer:
        parametrize.register_parametrization(layer.output.dense, "weight", Delta(layer.output.dense.weight))
    model = model.cuda()
    stock, batches = copy.deepcopy(model), [{k: x.cuda() for k, x in batch_of(seed).items()} for seed in (1, 2)]
    apply_cuda_graphs(model)
    for step in range(4):
        for m in (model, stock):
            m.zero_grad()
            for batch in batches[: 1 + step % 2]:  # a second one is added to the first one's
                m(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=False)
        for found, wanted in zip(model.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-6)
    assert graphs_of(model).replayed == 5
    pair = model.bert.encoder.layer[0].output.dense.parametrizations.weight
    assert pair.original.grad.data_ptr() != pair[0].delta.grad.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["layers", "model"])
def test_a_trainer_gives_the_memory_back(make_trainer, scope: str) -> None:
    """When training ends, so that evaluation has it; trained on, shapes that came before are recorded at once."""
    model, graphs = packed(model_of(), multiple_of=1024), CUDAGraphs(scope=scope)  # one total
    trainer = make_trainer([graphs], HuggingFaceModel(model), device="gpu", precision="fp32")
    trainer.fit()
    assert graphs.evidence == {"changed": 1, "recorded": 1, "replayed": 3, "launched": 1}
    assert graphs_of(model).recorded == 0 and graphs_of(model)._memory is None
    trainer.fit(duration="1ep")
    assert graphs.evidence == {"changed": 1, "recorded": 1, "replayed": 7, "launched": 1}
    assert graphs_of(model).recorded == 0


@pytest.mark.gpu
def test_a_fit_that_fails_gives_it_back_when_the_trainer_is_closed(make_trainer) -> None:
    from composer import Callback

    class Fails(Callback):
        def batch_end(self, state, logger) -> None:
            if state.timestamp.batch == 3:
                raise ValueError("in the third")

    model = packed(model_of(), multiple_of=1024)
    trainer = make_trainer([CUDAGraphs()], HuggingFaceModel(model), callbacks=[Fails()], device="gpu", precision="fp32")
    with pytest.raises(ValueError, match="in the third"):
        trainer.fit()
    trainer.close()
    assert graphs_of(model).replayed == 2 and graphs_of(model)._memory is None


def checkpointed(model: torch.nn.Module) -> None:
    stock_checkpointing(model)


def with_flash_attention(model: torch.nn.Module) -> None:
    model.config._attn_implementation = "flash_attention_2"


REFUSED = {
    checkpointed: r"layers are computed again in backward. Call the model's gradient_checkpointing_disable\(\)",
    with_flash_attention: "attn_implementation='flash_attention_2' waits for the lengths of padded rows. Add unpadding",
}


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "ModernBert"])
@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_what_transformers_waits_for_is_refused_before_training(
    make_trainer, monkeypatch: pytest.MonkeyPatch, change: Callable, family: str
) -> None:
    monkeypatch.setattr(CUDAGraphs, "unavailable", lambda self, device: None)
    model = model_of(family)
    change(model)
    with pytest.raises(ConflictError, match=REFUSED[change]):
        make_trainer([CUDAGraphs()], HuggingFaceModel(model))


def test_unpadded_attention_waits_for_nothing() -> None:
    model = model_of()
    with_flash_attention(model)
    assert unrecordable(model)
    assert unrecordable(packed(model)) is None
