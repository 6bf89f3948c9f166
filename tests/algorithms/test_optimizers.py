"""The five AdamW speed-ups: what they change, what they keep, and that they all compute AdamW."""

from __future__ import annotations

import copy
import sys
import types

import pytest
import torch
from composer.algorithms.warnings import NoEffectWarning
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW
from torch.optim.lr_scheduler import LambdaLR

from composer_speedups import (
    AdamW8bit,
    ApexFusedAdamW,
    BnbAdamW,
    ForeachAdamW,
    FusedAdamW,
    apply_adamw_8bit,
    apply_apex_fused_adamw,
    apply_bnb_adamw,
    apply_foreach_adamw,
    apply_fused_adamw,
    registry,
)
from composer_speedups.errors import ConflictError, SpeedUpUnavailable
from composer_speedups.optim.optimizers import describe
from composer_speedups.optim.states import read_moments

# What of each swap can be relied on to 32-bit accuracy.
EXACT = {"foreach_adamw": apply_foreach_adamw, "fused_adamw": apply_fused_adamw, "bnb_adamw": apply_bnb_adamw}
CLASSES = [ForeachAdamW, FusedAdamW, BnbAdamW, AdamW8bit]
DESCRIPTION = {
    ForeachAdamW: "torch AdamW (foreach)",
    FusedAdamW: "torch AdamW (fused)",
    BnbAdamW: "bitsandbytes AdamW",
    AdamW8bit: "bitsandbytes AdamW8bit",
}


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(64, 96), (33,), (5000,)]  # one that 8 bits quantise, a ragged small one, a long vector
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def step(optimizer: torch.optim.Optimizer, number: int) -> None:
    """One update with gradients that depend on the step only."""
    generator = torch.Generator().manual_seed(1000 + number)
    for group in optimizer.param_groups:
        for p in group["params"]:
            scale = 10.0 ** torch.randint(-3, 2, (1,), generator=generator)
            p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)
    optimizer.step()


def float64_adamw(
    values: list[torch.Tensor], steps: range, lr: float, weight_decay: float, betas=(0.9, 0.999), eps=1e-8, moments=None
) -> list[torch.Tensor]:
    """AdamW as its paper writes it, in float64, written out here so that it shares no code with what it judges."""
    values = [v.detach().double().clone() for v in values]
    moments = moments or [(torch.zeros_like(v), torch.zeros_like(v)) for v in values]
    for number in steps:
        generator = torch.Generator().manual_seed(1000 + number)
        for value, (m, v) in zip(values, moments, strict=True):
            scale = 10.0 ** torch.randint(-3, 2, (1,), generator=generator)
            g = (torch.randn(value.shape, generator=generator) * scale).double()
            m.mul_(betas[0]).add_(g, alpha=1 - betas[0])
            v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
            t = number + 1
            value.mul_(1 - lr * weight_decay)
            value.sub_(lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps))
    return values


@pytest.mark.parametrize("apply", EXACT.values(), ids=EXACT.keys())
@pytest.mark.parametrize("before", [0, 3], ids=["fresh", "after 3 steps"])
def test_computes_adamw(apply, before: int) -> None:
    params = parameters()
    start = [p.detach().clone() for p in params]
    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, foreach=False)
    for number in range(before):
        step(optimizer, number)
    assert apply(optimizer) == 3
    for number in range(before, 10):
        step(optimizer, number)
    reference = float64_adamw(start, range(10), lr=1e-2, weight_decay=0.1)
    # Ten steps of at most 1e-2 on values of order 1. Each step rounds the value (half an ulp of 4 at most) and
    # its update (relative error of a few eps of 1e-2, negligible): 10 * 2 * eps, and a factor 2 to spare.
    eps = torch.finfo(torch.float32).eps
    for p, expected in zip(params, reference, strict=True):
        torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=40 * eps)


def test_a_planted_fault_would_fail_the_test_above() -> None:
    """Moments lost at the swap, or decay not converted, are far outside the tolerance used."""
    params = parameters()
    start = [p.detach().clone() for p in params]
    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
    for number in range(3):
        step(optimizer, number)
    optimizer.state.clear()
    for number in range(3, 10):
        step(optimizer, number)
    reference = float64_adamw(start, range(10), lr=1e-2, weight_decay=0.1)
    worst = max((p.detach().double() - r).abs().max().item() for p, r in zip(params, reference, strict=True))
    assert worst > 1e-3


def test_8bit_stays_within_its_quantisation_error() -> None:
    params = parameters()
    start = [p.detach().clone() for p in params]
    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
    for number in range(3):
        step(optimizer, number)
    before = [read_moments(copy.deepcopy(optimizer.state[p])) for p in params]
    assert apply_adamw_8bit(optimizer, embeddings_32bit=False) == 3
    assert [optimizer.state[p]["state1"].dtype for p in params] == [torch.uint8, torch.float32, torch.uint8]
    for p, moments in zip(params, before, strict=True):
        after = read_moments(optimizer.state[p])
        assert after.step == moments.step == 3
        # The dynamic code book is 7 decades of fractions whose widest gap next to the block's maximum is
        # 1/64 of it (signed) and 1/128 (unsigned): half a gap, relative to the largest value of the block.
        for old, new, gap in (
            (moments.exp_avg, after.exp_avg, 1 / 64),
            (moments.exp_avg_sq, after.exp_avg_sq, 1 / 128),
        ):
            assert (old - new).abs().max() <= old.abs().max() * gap
    for number in range(3, 10):
        step(optimizer, number)
    reference = float64_adamw(start, range(10), lr=1e-2, weight_decay=0.1)
    for p, expected, began in zip(params, reference, start, strict=True):
        error = (p.detach().double() - expected).norm() / (expected - began.double()).norm()
        assert error < 0.15, "the path of ten steps must agree within the noise of 8-bit moments"


@pytest.mark.parametrize("apply", EXACT.values(), ids=EXACT.keys())
def test_decoupled_weight_decay_is_converted_exactly(apply) -> None:
    """Against Composer's own DecoupledAdamW, with a learning rate that moves."""
    ours, theirs = parameters(), parameters()
    make = lambda p: DecoupledAdamW(p, lr=1e-2, weight_decay=5e-4, betas=(0.8, 0.99), eps=1e-6)  # noqa: E731
    converted, original = make(ours), make(theirs)
    apply(converted)
    assert converted.param_groups[0]["weight_decay"] == pytest.approx(5e-4 / 1e-2)
    for number in range(12):
        for optimizer in (converted, original):
            optimizer.param_groups[0]["lr"] = 1e-2 * (12 - number) / 12
            step(optimizer, number)
    eps = torch.finfo(torch.float32).eps
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2 * 12 * 2 * eps)  # both round: twice the bound above


def test_decoupled_decay_without_learning_rate_is_refused() -> None:
    optimizer = DecoupledAdamW(parameters(), lr=0.0, weight_decay=1e-4)
    with pytest.raises(ConflictError, match="initial learning rate of 0"):
        apply_fused_adamw(optimizer)


@pytest.mark.parametrize("cls", CLASSES)
def test_changes_what_it_says_inside_a_trainer(cls, make_trainer, tiny_bert) -> None:
    params = list(tiny_bert.parameters())
    optimizer = DecoupledAdamW(params, lr=1e-3, weight_decay=1e-5)
    algorithm = cls()
    trainer = make_trainer([algorithm], optimizer=optimizer)
    assert trainer.state.optimizers[0] is optimizer, "the user's own variable must go on being the optimizer"
    assert describe(optimizer) == DESCRIPTION[cls]
    assert algorithm.evidence["changed"] == len(params)
    assert [p for g in optimizer.param_groups for p in g["params"]] == params
    before = [p.detach().clone() for p in params]
    trainer.fit()
    assert any(not torch.equal(p, b) for p, b in zip(params, before, strict=True))


@pytest.mark.parametrize("cls", CLASSES)
def test_groups_keep_all_they_had(cls, make_trainer, tiny_bert) -> None:
    decay, rest = tiny_bert.bert.encoder.parameters(), tiny_bert.classifier.parameters()
    optimizer = torch.optim.AdamW(
        [
            {"params": list(decay), "weight_decay": 0.3, "name": "encoder"},
            {"params": list(rest), "lr": 5e-4, "betas": (0.8, 0.95), "eps": 1e-6},
        ],
        lr=1e-3,
    )
    make_trainer([cls()], optimizer=optimizer)
    first, second = optimizer.param_groups
    assert (first["weight_decay"], first["name"], first["lr"]) == (0.3, "encoder", 1e-3)
    assert (second["lr"], second["betas"], second["eps"]) == (5e-4, (0.8, 0.95), 1e-6)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("kind", ["composer", "pytorch"])
def test_schedulers_still_set_the_learning_rate(cls, kind: str, make_trainer, tiny_bert) -> None:
    """The rate that each step uses is the one it would have been without the speed-up, and it moves."""
    from composer.core import Callback

    class Watch(Callback):
        def __init__(self):
            self.rates = []

        def batch_start(self, state, logger):
            self.rates.append(state.optimizers[0].param_groups[0]["lr"])

    seen = []
    for algorithms in ([], [cls()]):
        optimizer = torch.optim.AdamW(tiny_bert.parameters(), lr=1e-3)
        if kind == "composer":
            scheduler = CosineAnnealingWithWarmupScheduler(t_warmup="2ba")
        else:
            scheduler = LambdaLR(optimizer, lambda n: 1.0 / (1 + n))
        watch = Watch()
        make_trainer(
            algorithms,
            optimizer=optimizer,
            schedulers=scheduler,
            step_schedulers_every_batch=True,
            callbacks=[watch],
        ).fit()
        seen.append(watch.rates)
    assert seen[1] == seen[0]
    assert len(set(seen[1])) >= 3


@pytest.mark.parametrize("cls", CLASSES)
def test_holds_after_a_checkpoint_of_plain_adamw_is_loaded(cls, make_trainer, tiny_bert, tmp_path) -> None:
    """The file's groups say foreach=None, fused=None: loading must not undo the speed-up."""
    if cls in (BnbAdamW, AdamW8bit):
        pytest.skip("the moments of a torch file are converted, see test_optimizer_states")
    plain = make_trainer(model=copy.deepcopy(tiny_bert), save_folder=str(tmp_path), save_interval="2ba")
    plain.fit()
    optimizer = torch.optim.AdamW(tiny_bert.parameters(), lr=1e-3, weight_decay=0.01)
    trainer = make_trainer([cls()], optimizer=optimizer, load_path=str(tmp_path / "ep0-ba2-rank0.pt"))
    assert describe(optimizer) == DESCRIPTION[cls]
    assert all(s["step"].item() == 2 for s in optimizer.state.values())
    trainer.fit()
    assert all(s["step"].item() == 4 for s in optimizer.state.values())
    for p, q in zip(tiny_bert.parameters(), plain.state.model.model.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.* is not in the state_dict:UserWarning")  # Composer's word for the same
@pytest.mark.parametrize("cls", CLASSES)
def test_a_checkpoint_of_another_optimizer_is_refused(cls, make_trainer, tiny_bert, tmp_path) -> None:
    optimizer = DecoupledAdamW(tiny_bert.parameters(), lr=1e-3)
    make_trainer(optimizer=optimizer, save_folder=str(tmp_path), save_interval="2ba").fit()
    with pytest.raises(ConflictError, match="convert-checkpoint"):
        make_trainer([cls()], load_path=str(tmp_path / "ep0-ba2-rank0.pt"))


@pytest.mark.parametrize("cls", CLASSES)
def test_an_optimizer_that_is_not_adamw_is_left_alone_loudly(cls, make_trainer, tiny_bert) -> None:
    optimizer = torch.optim.SGD(tiny_bert.parameters(), lr=1e-3)
    with pytest.warns(NoEffectWarning, match=r"torch SGD, not torch\.optim\.AdamW"):
        make_trainer([cls()], optimizer=optimizer)
    assert type(optimizer) is torch.optim.SGD


def test_no_optimizer_given_says_what_composer_chose(tiny_bert) -> None:
    from composer import Trainer
    from composer.models import HuggingFaceModel

    with pytest.warns(Warning) as caught:
        trainer = Trainer(model=HuggingFaceModel(tiny_bert), algorithms=[FusedAdamW()], device="cpu", loggers=[])
    trainer.close()
    assert any("DecoupledSGDW (Composer's default" in str(w.message) for w in caught)


@pytest.mark.parametrize("cls", CLASSES)
def test_no_decay_on_bias_and_norm(cls, make_trainer, tiny_bert) -> None:
    optimizer = torch.optim.AdamW(tiny_bert.parameters(), lr=1e-3, weight_decay=0.2)
    algorithm = cls(no_decay_on_bias_and_norm=True)
    make_trainer([algorithm], optimizer=optimizer).fit()
    decayed, spared = optimizer.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.2, 0.0)
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert all(p.ndim < 2 for p in spared["params"])
    total = len(list(tiny_bert.parameters()))
    assert len(decayed["params"]) + len(spared["params"]) == total
    assert algorithm.evidence["moved_to_no_decay"] == len(spared["params"]) > 0


@pytest.mark.parametrize("cls", [BnbAdamW, AdamW8bit])
def test_what_is_refused_leaves_the_groups_as_they_were(cls, make_trainer, tiny_bert) -> None:
    optimizer = torch.optim.AdamW(tiny_bert.parameters(), lr=1e-3, weight_decay=0.2, amsgrad=True)
    [group] = optimizer.param_groups
    before = dict(group)
    with pytest.raises(SpeedUpUnavailable, match="amsgrad"):
        make_trainer([cls(no_decay_on_bias_and_norm=True)], optimizer=optimizer)
    assert type(optimizer) is torch.optim.AdamW
    assert len(optimizer.param_groups) == 1 and optimizer.param_groups[0] is group
    assert group == before and group["params"] is before["params"]


def test_no_decay_with_a_pytorch_scheduler_is_refused(make_trainer, tiny_bert) -> None:
    optimizer = torch.optim.AdamW(tiny_bert.parameters(), lr=1e-3, weight_decay=0.2)
    scheduler = LambdaLR(optimizer, lambda n: 1.0)
    with pytest.raises(ConflictError, match="splits the parameter groups"):
        make_trainer([FusedAdamW(no_decay_on_bias_and_norm=True)], optimizer=optimizer, schedulers=scheduler)


@pytest.mark.parametrize("apply", EXACT.values(), ids=EXACT.keys())
def test_twice_is_once(apply) -> None:
    optimizer = torch.optim.AdamW(parameters(), lr=1e-2)
    step(optimizer, 0)
    assert apply(optimizer) == 3
    state = {id(p): s for p, s in optimizer.state.items()}
    assert apply(optimizer) == 0
    assert all(optimizer.state[p] is state[id(p)] for p in optimizer.state)


@pytest.mark.parametrize("first", EXACT)
@pytest.mark.parametrize("second", EXACT)
def test_any_adamw_becomes_any_other(first: str, second: str) -> None:
    params = parameters()
    start = [p.detach().clone() for p in params]
    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
    for number, apply in enumerate([EXACT[first], EXACT[second], EXACT[first]]):
        apply(optimizer)
        step(optimizer, number)
    reference = float64_adamw(start, range(3), lr=1e-2, weight_decay=0.1)
    eps = torch.finfo(torch.float32).eps
    for p, expected in zip(params, reference, strict=True):
        torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=12 * eps)


@pytest.mark.parametrize("flag", ["amsgrad", "maximize"])
def test_bitsandbytes_refuses_what_it_has_not(flag: str) -> None:
    optimizer = torch.optim.AdamW(parameters(), lr=1e-2, **{flag: True})
    with pytest.raises(SpeedUpUnavailable, match=f"no {flag}=True"):
        apply_bnb_adamw(optimizer)
    assert apply_fused_adamw(optimizer) == 3
    assert optimizer.param_groups[0][flag] is True


def test_a_rate_that_is_a_tensor() -> None:
    """PyTorch's lists of tensors cannot have it: said before anything is converted, and not by the first step."""
    optimizer = torch.optim.AdamW(parameters(), lr=torch.tensor(1e-2))
    with pytest.raises(SpeedUpUnavailable, match=r"a learning rate that is a tensor .*use fused_adamw"):
        apply_foreach_adamw(optimizer)
    assert not optimizer.param_groups[0]["foreach"]
    assert apply_fused_adamw(optimizer) == 3
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    optimizer.step()
    assert not any(map(torch.equal, before, optimizer.param_groups[0]["params"]))


def test_amsgrad_state_is_kept() -> None:
    optimizer = torch.optim.AdamW(parameters(), lr=1e-2, amsgrad=True)
    step(optimizer, 0)
    before = [s["max_exp_avg_sq"].clone() for s in optimizer.state.values()]
    apply_fused_adamw(optimizer)
    assert all(torch.equal(s["max_exp_avg_sq"], b) for s, b in zip(optimizer.state.values(), before, strict=True))


def test_float64_parameters() -> None:
    optimizer = torch.optim.AdamW(parameters(dtype=torch.float64), lr=1e-2)
    with pytest.raises(SpeedUpUnavailable, match="float64"):
        apply_bnb_adamw(optimizer)


def test_8bit_keeps_32bit_state_for_embeddings(make_trainer) -> None:
    from small import bert_config
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification(bert_config(vocab_size=512, hidden_size=64, intermediate_size=128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    make_trainer([AdamW8bit()], model=model, optimizer=optimizer).fit()
    words = model.bert.embeddings.word_embeddings.weight
    dense = model.bert.encoder.layer[0].intermediate.dense.weight
    assert words.numel() >= 4096 and dense.numel() >= 4096
    assert optimizer.state[words]["state1"].dtype == torch.float32
    assert optimizer.state[dense]["state1"].dtype == torch.uint8


def test_8bit_override_of_one_model_does_not_reach_another() -> None:
    """bitsandbytes' global manager knows parameters by their place in the groups, across models."""
    embedding, linear = torch.nn.Embedding(100, 64), torch.nn.Linear(64, 100)
    first = torch.optim.AdamW(embedding.parameters(), lr=1e-3)
    second = torch.optim.AdamW(linear.parameters(), lr=1e-3)
    apply_adamw_8bit(first, embedding)
    apply_adamw_8bit(second, linear)
    for optimizer in (first, second):
        step(optimizer, 0)
    assert first.state[embedding.weight]["state1"].dtype == torch.float32
    assert second.state[linear.weight]["state1"].dtype == torch.uint8


@pytest.mark.parametrize("key", [*EXACT, "adamw_8bit", "adafactor"])
@pytest.mark.parametrize("decoupled", [False, True])
def test_a_group_added_later_has_the_users_defaults(key: str, decoupled: bool) -> None:
    """Gradual unfreezing gives the layers only, and means the rate that the optimizer was made with."""
    first, later = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    asked = {"lr": 1e-5, "betas": (0.8, 0.9), "eps": 1e-6}
    if decoupled:
        optimizer = DecoupledAdamW(first.parameters(), weight_decay=2e-7, **asked)
    else:
        optimizer = torch.optim.AdamW(first.parameters(), weight_decay=0.02, maximize=False, **asked)
    registry.function(key)(optimizer, **({"embeddings_32bit": False} if key == "adamw_8bit" else {}))
    optimizer.add_param_group({"params": list(later.parameters())})
    one, other = optimizer.param_groups
    assert other["weight_decay"] == pytest.approx(0.02) and other["lr"] == 1e-5
    own = {"params", "initial_lr"}
    assert {k: v for k, v in other.items() if k not in own} == {k: v for k, v in one.items() if k not in own}


def test_hooks_of_the_optimizer_stay() -> None:
    optimizer = torch.optim.AdamW(parameters(), lr=1e-2)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    apply_bnb_adamw(optimizer)
    step(optimizer, 0)
    assert calls == ["pre"]


class StandInFusedAdam(torch.optim.Optimizer):
    """The signature and the arithmetic of apex.optimizers.FusedAdam, whose kernels exist on CUDA only."""

    def __init__(
        self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True,
        weight_decay=0.0, amsgrad=False, set_grad_none=True, capturable=False, master_weights=False,
    ):  # fmt: skip
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        super().__init__(
            params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        )
        self.adam_w_mode = 1 if adam_w_mode else 0

    @torch.no_grad()
    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None, grad_scaler=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                m_hat, v_hat = m / (1 - beta1 ** group["step"]), v / (1 - beta2 ** group["step"])
                p.sub_(group["lr"] * (m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * p))


@pytest.fixture
def apex(monkeypatch):
    StandInFusedAdam.__module__, StandInFusedAdam.__name__ = "apex.optimizers.fused_adam", "FusedAdam"
    optimizers = types.ModuleType("apex.optimizers")
    optimizers.FusedAdam = StandInFusedAdam
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    monkeypatch.setitem(sys.modules, "amp_C", types.ModuleType("amp_C"))


@pytest.mark.parametrize("back", [None, apply_fused_adamw, apply_bnb_adamw])
def test_apex_with_its_signature(apex, back) -> None:
    params = parameters()
    start = [p.detach().clone() for p in params]
    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
    step(optimizer, 0)
    assert apply_apex_fused_adamw(optimizer) == 3
    assert isinstance(optimizer, StandInFusedAdam)
    assert apply_apex_fused_adamw(optimizer) == 0
    step(optimizer, 1)
    if back is not None:
        back(optimizer)
    step(optimizer, 2)
    reference = float64_adamw(start, range(3), lr=1e-2, weight_decay=0.1)
    eps = torch.finfo(torch.float32).eps
    for p, expected in zip(params, reference, strict=True):
        torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=12 * eps)


def test_apex_without_its_extensions_is_none(apex, monkeypatch) -> None:
    """Its Python part can be imported then, and fails when an optimizer is made."""
    monkeypatch.setitem(sys.modules, "amp_C", None)
    with pytest.raises(SpeedUpUnavailable, match=r"with its CUDA extensions is not installed: .*github\.com/NVIDIA"):
        apply_apex_fused_adamw(torch.optim.AdamW(parameters()))


def test_apex_missing_names_the_remedy(make_trainer) -> None:
    with pytest.raises(SpeedUpUnavailable, match="use fused_adamw"):
        make_trainer([ApexFusedAdamW()])
    with pytest.raises(SpeedUpUnavailable, match=r"github\.com/NVIDIA/apex"):
        apply_apex_fused_adamw(torch.optim.AdamW(parameters()))


@pytest.mark.parametrize("cls", [*CLASSES, ApexFusedAdamW])
def test_wrong_arguments(cls) -> None:
    with pytest.raises(TypeError, match="no_decay_on_bias_and_norm must be true or false, got 'yes'"):
        cls(no_decay_on_bias_and_norm="yes")


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_8bit_wrong_size(value) -> None:
    kind = ValueError if type(value) is int else TypeError
    with pytest.raises(kind, match="min_8bit_size must be a positive integer"):
        AdamW8bit(min_8bit_size=value)


def test_two_optimizers_at_once_are_refused(make_trainer) -> None:
    with pytest.raises(ConflictError, match="both set the optimizer"):
        make_trainer([FusedAdamW(), AdamW8bit()])


@pytest.mark.gpu
@pytest.mark.parametrize("apply", [*EXACT.values()], ids=[*EXACT])
def test_computes_adamw_on_cuda(apply) -> None:
    params = [torch.nn.Parameter(p.detach().cuda()) for p in parameters()]
    start = [p.detach().clone() for p in params]
    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
    generator = torch.Generator().manual_seed(3)
    m, v = [torch.zeros_like(p).double() for p in params], [torch.zeros_like(p).double() for p in params]
    reference = [s.double() for s in start]
    for number in range(6):
        if number == 2:
            assert apply(optimizer) == 3
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=generator).cuda()
            g = p.grad.double()
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.999 * v[i] + 0.001 * g * g
            m_hat, v_hat = m[i] / (1 - 0.9 ** (number + 1)), v[i] / (1 - 0.999 ** (number + 1))
            update, kept = 1e-2 * m_hat / (v_hat.sqrt() + 1e-8), 1 - 1e-3
            last = number >= 2 and apply is apply_bnb_adamw  # the decay of bitsandbytes' CUDA kernel
            reference[i] = (reference[i] - update) * kept if last else reference[i] * kept - update
        optimizer.step()
    eps = torch.finfo(torch.float32).eps
    for p, expected in zip(params, reference, strict=True):
        torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=24 * eps)


@pytest.mark.parametrize("apply", EXACT.values(), ids=EXACT.keys())
def test_decoupled_weight_decay_is_converted_in_mid_schedule(apply) -> None:
    """What it decays by is relative to the rate that training began with, whatever it is when it is converted."""
    ours, theirs = parameters(), parameters()
    make = lambda p: DecoupledAdamW(p, lr=1e-2, weight_decay=5e-4, betas=(0.8, 0.99), eps=1e-6)  # noqa: E731
    converted, original = make(ours), make(theirs)
    for number in range(12):
        if number == 6:
            apply(converted)
            assert converted.param_groups[0]["weight_decay"] == pytest.approx(5e-4 / 1e-2)
        for optimizer in (converted, original):
            optimizer.param_groups[0]["lr"] = 1e-2 * (12 - number) / 12
            step(optimizer, number)
    eps = torch.finfo(torch.float32).eps
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2 * 12 * 2 * eps)
