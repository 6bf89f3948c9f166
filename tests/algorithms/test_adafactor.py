"""Adafactor: the paper's update, AdamW's groups and rates, a row and a column of state for each matrix."""

from __future__ import annotations

import copy

import pytest
import torch
from composer import Callback
from composer.algorithms.warnings import NoEffectWarning
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledAdamW
from torch.optim.lr_scheduler import LambdaLR

from composer_speedups import Adafactor, FusedAdamW, apply_adafactor, apply_adamw_8bit, apply_bnb_adamw
from composer_speedups.errors import ConflictError, SpeedUpUnavailable
from composer_speedups.measurement.memory_meters import tensor_bytes

EPS = torch.finfo(torch.float32).eps


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    # A wide matrix, a bias, a stack of matrices, a row; small weights, as a model's, but for one tensor.
    shapes = [((64, 96), 0.05), ((33,), 0.2), ((3, 5, 7), 3.0), ((1, 40), 0.1)]
    return [torch.nn.Parameter((torch.randn(s, generator=random) * scale).to(dtype)) for s, scale in shapes]


def gradient(shape: torch.Size, random: torch.Generator) -> torch.Tensor:
    """Rows and columns of very different sizes, all of them small, as in a large model."""
    grad = torch.randn(shape, generator=random) * 10.0 ** torch.randint(-6, -2, (1,), generator=random)
    if len(shape) > 1:
        grad = grad * torch.rand((*shape[:-1], 1), generator=random) * torch.rand(shape[-1:], generator=random)
    return grad


def step(optimizer: torch.optim.Optimizer, number: int) -> None:
    random = torch.Generator().manual_seed(1000 + number)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = gradient(p.shape, random).to(p.dtype)
    optimizer.step()


def float64_adafactor(
    values: list[torch.Tensor], steps: int, lr: float, weight_decay: float, scale_parameter: bool, fault: str = ""
) -> list[torch.Tensor]:
    """The paper's algorithms 4 and 5 in float64, written out here so that it shares no code with what it judges."""
    values = [v.detach().double().clone() for v in values]
    second: list[tuple[torch.Tensor, torch.Tensor]] = [(torch.zeros(()), torch.zeros(()))] * len(values)
    for t in range(1, steps + 1):
        random = torch.Generator().manual_seed(1000 + t - 1)
        decay = 1 - t ** (-0.5 if fault == "decay" else -0.8)
        for i, value in enumerate(values):
            g = gradient(value.shape, random).double()
            size = value.square().mean().sqrt().item()
            rate = lr * max(size, 1e-3 if scale_parameter else 1.0)
            value.mul_(1 - lr * weight_decay)
            square = g.square()
            if g.ndim < 2:
                v = second[i][0] * decay + square * (1 - decay)
                second[i] = (v, v)
            else:
                rows, columns = (
                    old * decay + square.mean(d) * (1 - decay) for old, d in zip(second[i], (-1, -2), strict=True)
                )
                second[i] = (rows, columns)
                v = rows[..., :, None] * columns[..., None, :] / rows.mean(-1)[..., None, None]
                v = square if fault == "not factored" else v
            update = g / v.sqrt()
            update /= 1.0 if fault == "clip" else max(1.0, update.square().mean().sqrt().item())
            value.sub_(rate * update)
    return values


@pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
@pytest.mark.parametrize("scale_parameter", [False, True], ids=["AdamW's rate", "relative rate"])
def test_computes_adafactor(scale_parameter: bool, foreach: bool) -> None:
    params = parameters()
    start = [p.detach().clone() for p in params]
    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, foreach=False)
    assert apply_adafactor(optimizer, scale_parameter=scale_parameter, foreach=foreach) == 4
    for number in range(10):
        step(optimizer, number)
    reference = float64_adafactor(start, 10, 1e-2, 0.1, scale_parameter)
    # A step rounds the value twice, by half an ulp each: 10 * 2 * eps/2 * size. Its update is at most 1e-2 of the size
    # times a few, and right to the rounding of two sums over 96 and some ten operations, 20 eps: 10 * 1e-2 * 20 * eps
    # more. Four times the sum of both bounds it, relative to the largest value.
    for p, expected in zip(params, reference, strict=True):
        largest = max(1.0 if not scale_parameter else 0.0, expected.abs().max().item())
        torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=4 * 12 * EPS * largest)


@pytest.mark.parametrize("fault", ["decay", "clip", "not factored", "weight decay", "PyTorch's eps"])
def test_planted_faults_would_fail_the_test_above(fault: str) -> None:
    params = parameters()
    start = [p.detach().clone() for p in params]
    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0 if fault == "weight decay" else 0.1)
    apply_adafactor(optimizer)
    if fault == "PyTorch's eps":  # float32's: small gradients' second moments are all below it
        optimizer.param_groups[0]["eps"] = (None, 1.0)
    for number in range(10):
        step(optimizer, number)
    reference = float64_adafactor(start, 10, 1e-2, 0.1, False, fault)
    off = max((p.detach().double() - r).abs().max().item() for p, r in zip(params, reference, strict=True))
    assert off > 20 * 4 * 12 * EPS * 10, "far beyond what the test above allows to the largest value, 10"


def test_the_learning_rate_means_what_it_meant() -> None:
    """The root mean square of an update is the rate, as AdamW's first is, whatever the size of weights below 1."""
    sizes = {}
    for name in ("adamw", "adafactor"):
        params = parameters()
        before = [p.detach().clone() for p in params]
        optimizer = torch.optim.AdamW(params, lr=1e-3, eps=1e-16, weight_decay=0.0)
        if name == "adafactor":
            apply_adafactor(optimizer)
        step(optimizer, 0)
        sizes[name] = [(p - b).detach().square().mean().sqrt().item() for p, b in zip(params, before, strict=True)]
    assert sizes["adamw"] == pytest.approx([1e-3] * 4, rel=0.05)
    factor = parameters()[2].detach().square().mean().sqrt().item()
    assert factor > 2 and sizes["adafactor"][2] <= 1e-3 * factor * 1.01, "larger by the tensor's own size above 1"
    for size in sizes["adafactor"][:2] + sizes["adafactor"][3:]:
        assert 0.8e-3 < size <= 1.001e-3


def test_state_is_measured_to_be_a_row_and_a_column(tiny_bert) -> None:
    def bytes_of(*changes) -> int:
        model = copy.deepcopy(tiny_bert)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        for change in changes:
            change(optimizer)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        return tensor_bytes(v for state in optimizer.state.values() for v in state.values())

    matrices = [p for p in tiny_bert.parameters() if p.ndim > 1]
    vectors = [p for p in tiny_bert.parameters() if p.ndim < 2]
    steps = 4 * (len(matrices) + len(vectors))
    assert bytes_of(apply_adafactor) == steps + 4 * sum(sum(p.shape) for p in matrices) + 4 * sum(
        p.numel() for p in vectors
    )
    # Here matrices are tiny: 32 x 32. Of BERT-large's 335 million weights it is 1/900 (`test_memory.py`).
    assert bytes_of(apply_adafactor) < bytes_of(lambda o: apply_adamw_8bit(o, embeddings_32bit=False)) / 2
    assert bytes_of(apply_adafactor) < bytes_of() / 10


@pytest.mark.parametrize("before", ["torch", "bitsandbytes"])
def test_a_running_adamw_hands_over_its_second_moments(before: str) -> None:
    params = parameters()
    optimizer = torch.optim.AdamW(params, lr=1e-2, betas=(0.9, 0.99))
    if before == "bitsandbytes":
        apply_bnb_adamw(optimizer)
    for number in range(7):
        step(optimizer, number)
    second = [optimizer.state[p]["state2" if before == "bitsandbytes" else "exp_avg_sq"].clone() for p in params]
    assert apply_adafactor(optimizer) == 4
    for p, v in zip(params, second, strict=True):
        state, exact = optimizer.state[p], v.double() / (1 - 0.99**7)
        assert state["step"].item() == 7 and "exp_avg" not in state
        for name, expected in (
            [("variance", exact)]
            if p.ndim < 2
            else [("row_var", exact.mean(-1, keepdim=True)), ("col_var", exact.mean(-2, keepdim=True))]
        ):
            # A mean of 96 float32 values: 7 roundings one after the other in a sum by halves, and three more.
            torch.testing.assert_close(state[name].double(), expected, rtol=10 * EPS, atol=0)
    step(optimizer, 7)
    assert all(state["step"].item() == 8 for state in optimizer.state.values())
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("embeddings", [None, False], ids=["32-bit", "8-bit"])
def test_moments_of_bitsandbytes_become_what_16_bit_weights_need(embeddings: bool | None) -> None:
    """Its own are float32, whatever the weights are; Adafactor's are of the weights' dtype."""
    params = [torch.nn.Parameter(p.detach().bfloat16()) for p in parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    if embeddings is None:
        apply_bnb_adamw(optimizer)
    else:
        apply_adamw_8bit(optimizer, embeddings_32bit=embeddings)
    for number in range(2):
        step(optimizer, number)
    apply_adafactor(optimizer)
    start = [p.detach().clone() for p in params]
    step(optimizer, 2)
    assert all(p.isfinite().all() and not torch.equal(p, old) for p, old in zip(params, start, strict=True))


def test_words_that_do_not_occur_stay_finite() -> None:
    """An embedding's rows without a gradient have a second moment of 0, by which nothing may be divided."""
    table = torch.nn.Embedding(50, 8)
    before = table.weight.detach().clone()
    optimizer = torch.optim.AdamW(table.parameters(), lr=1e-2, weight_decay=0.0)
    apply_adafactor(optimizer)
    for _ in range(3):
        table(torch.tensor([3, 4])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert table.weight.isfinite().all()
    moved = (table.weight != before).any(1)
    assert moved.nonzero().flatten().tolist() == [3, 4]
    table(torch.tensor([3])).mul(0).sum().backward()
    optimizer.step()
    assert table.weight.isfinite().all(), "nor may a gradient of nothing but zeros"


def test_groups_and_flags() -> None:
    one, two, three = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(3))
    groups = [
        {"params": [one], "lr": 1e-3, "weight_decay": 0.1, "name": "mine"},
        {"params": [two, three], "lr": 1e-4, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, maximize=True)
    assert apply_adafactor(optimizer) == 3
    first, second = optimizer.param_groups
    assert (first["lr"], first["weight_decay"], first["name"]) == (1e-3, 0.1, "mine")
    assert (second["lr"], second["weight_decay"], second["maximize"]) == (1e-4, 0.0, True)
    assert [id(p) for p in second["params"]] == [id(two), id(three)]
    assert "betas" not in first and first["eps"] == (1e-15, 1.0) and first["foreach"] is False
    assert apply_adafactor(optimizer) == 0
    assert apply_adafactor(torch.optim.AdamW([one]), scale_parameter=True, foreach=True) == 1


def test_decoupled_weight_decay_is_converted() -> None:
    p = torch.nn.Parameter(torch.full((4, 4), 0.5))
    optimizer = DecoupledAdamW([p], lr=1e-2, weight_decay=1e-3)
    apply_adafactor(optimizer)
    p.grad = torch.zeros(4, 4)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((4, 4), 0.5 * (1 - 1e-3)))


@pytest.mark.parametrize("kind", ["composer", "pytorch"])
def test_schedulers_still_set_the_learning_rate(kind: str, make_trainer, tiny_bert) -> None:
    class Watch(Callback):
        rates: list[float]

        def batch_start(self, state, logger):
            self.rates = [*getattr(self, "rates", []), state.optimizers[0].param_groups[0]["lr"]]

    rates = []
    for algorithms in ([], [Adafactor()]):
        watch, model = Watch(), copy.deepcopy(tiny_bert)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        composers = CosineAnnealingWithWarmupScheduler("2ba", alpha_f=0.1)
        trainer = make_trainer(
            algorithms,
            model=model,
            optimizer=optimizer,
            schedulers=composers if kind == "composer" else LambdaLR(optimizer, lambda n: 1 / (n + 1)),
            callbacks=[watch],
            step_schedulers_every_batch=True,
        )
        trainer.fit()
        rates.append(watch.rates)
    assert trainer.state.optimizers[0] is optimizer and type(optimizer) is torch.optim.Adafactor
    assert algorithms[0].evidence["optimizer"] == "torch Adafactor"
    assert algorithms[0].evidence["changed"] == len(list(tiny_bert.parameters()))
    assert rates[0] == rates[1] and len(set(rates[0])) > 2


def test_no_decay_on_bias_and_norm(make_trainer, tiny_bert) -> None:
    optimizer = torch.optim.AdamW(tiny_bert.parameters(), lr=1e-3, weight_decay=0.1)
    algorithm = Adafactor(no_decay_on_bias_and_norm=True)
    make_trainer([algorithm], optimizer=optimizer).fit()
    decayed, rest = optimizer.param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim == 2 for p in decayed["params"]) and all(p.ndim == 1 for p in rest["params"])
    assert algorithm.evidence["moved_to_no_decay"] == len(rest["params"])


@pytest.mark.filterwarnings("ignore:.* is not in the state_dict:UserWarning")  # Composer's word for the same
@pytest.mark.parametrize("there", [True, False], ids=["AdamW's file", "Adafactor's file"])
def test_a_checkpoint_of_another_optimizer_is_refused(there: bool, make_trainer, tiny_bert, tmp_path) -> None:
    first, second = ([], [Adafactor()]) if there else ([Adafactor()], [FusedAdamW()])
    start = copy.deepcopy(tiny_bert)
    make_trainer(first, save_folder=str(tmp_path), save_interval="2ba").fit()
    path = str(tmp_path / "ep0-ba2-rank0.pt")
    with pytest.raises(ConflictError, match="holds no state of torch Adafactor" if there else "holds no state of"):
        make_trainer(second, model=copy.deepcopy(start), load_path=path)
    trainer = make_trainer(second, model=start, load_path=path, load_weights_only=True)  # the way out that is named
    trainer.fit()
    assert all(p.isfinite().all() for p in start.parameters())


def test_another_implementation_goes_on_from_the_file(make_trainer, tiny_bert, tmp_path) -> None:
    start = copy.deepcopy(tiny_bert)
    make_trainer([Adafactor()], save_folder=str(tmp_path), save_interval="2ba").fit()
    path = str(tmp_path / "ep0-ba2-rank0.pt")
    trainer = make_trainer([Adafactor(foreach=True)], model=start, load_path=path)
    (optimizer,) = trainer.state.optimizers
    assert optimizer.param_groups[0]["foreach"] is True
    assert {state["step"].item() for state in optimizer.state.values()} == {2}
    trainer.fit()
    for (name, p), q in zip(start.named_parameters(), tiny_bert.parameters(), strict=True):
        if not name.endswith("key.bias"):  # moves all scores alike: its gradient is rounding, whatever it is scaled to
            torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("flag", ["amsgrad", "differentiable"])
def test_refuses_what_it_has_not(flag: str) -> None:
    p = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(SpeedUpUnavailable, match=f"no {flag}=True"):
        apply_adafactor(torch.optim.AdamW([p], **{flag: True}))
    half = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float16))
    with pytest.raises(SpeedUpUnavailable, match="Keep the parameters in float32"):
        apply_adafactor(torch.optim.AdamW([half]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_learn(dtype: torch.dtype) -> None:
    params = parameters(dtype)
    start = [p.detach().clone() for p in params]
    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
    apply_adafactor(optimizer)
    for number in range(10):
        step(optimizer, number)
    # The reference's gradients are float32's: rounding them to bf16 turns an update by half an ulp. Ten steps of 1e-2
    # (times the size of a tensor above 1, 3) at most, and the value is rounded twice in each.
    for p, expected in zip(params, float64_adafactor(start, 10, 1e-2, 0.1, False), strict=True):
        eps = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 2 * EPS
        bound = 10 * eps * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=bound)


def test_applied_again_says_so(make_trainer, tiny_bert) -> None:
    optimizer = torch.optim.AdamW(tiny_bert.parameters(), lr=1e-3)
    apply_adafactor(optimizer)
    with pytest.warns(NoEffectWarning, match="the optimizer is torch Adafactor already"):
        make_trainer([Adafactor()], optimizer=optimizer)


def test_an_optimizer_that_is_not_adamw_is_left_alone_loudly(make_trainer, tiny_bert) -> None:
    optimizer = torch.optim.SGD(tiny_bert.parameters(), lr=1e-3)
    with pytest.warns(NoEffectWarning, match=r"torch SGD, not torch\.optim\.AdamW"):
        make_trainer([Adafactor()], optimizer=optimizer).fit()
    assert type(optimizer) is torch.optim.SGD


def test_wrong_arguments() -> None:
    for name in ("scale_parameter", "foreach", "no_decay_on_bias_and_norm"):
        with pytest.raises(TypeError, match=f"{name} must be true or false, got 1"):
            Adafactor(**{name: 1})


@pytest.mark.gpu
@pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
def test_computes_adafactor_on_cuda(foreach: bool) -> None:
    params = [torch.nn.Parameter(p.detach().cuda()) for p in parameters()]
    start = [p.detach().cpu().clone() for p in params]
    optimizer = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)
    apply_adafactor(optimizer, foreach=foreach)
    for number in range(10):
        random = torch.Generator().manual_seed(1000 + number)
        for p in params:
            p.grad = gradient(p.shape, random).cuda()
        optimizer.step()
    for p, expected in zip(params, float64_adafactor(start, 10, 1e-2, 0.1, False), strict=True):
        largest = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(p.detach().cpu().double(), expected, rtol=0, atol=4 * 12 * EPS * largest)


def test_a_schedule_of_the_momentum_is_refused_and_one_without_goes_on() -> None:
    """What AdamW has of it Adafactor has not: the schedule's next step would end in a KeyError."""
    for cycles in (True, False):
        optimizer = torch.optim.AdamW(torch.nn.Linear(4, 4).parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=9, cycle_momentum=cycles)
        if cycles:
            with pytest.raises(SpeedUpUnavailable, match="cycle_momentum=False"):
                apply_adafactor(optimizer)
            assert type(optimizer) is torch.optim.AdamW
            continue
        apply_adafactor(optimizer)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()
        assert optimizer.param_groups[0]["lr"] > rate
