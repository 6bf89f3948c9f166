from __future__ import annotations

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from composer.core import Callback, Precision
from composer.models import ComposerClassifier, HuggingFaceModel
from small import BatchDataset, bert_config, padded_batch
from torchmetrics.classification import MulticlassAccuracy

from composer_speedups import MixedPrecision, apply_mixed_precision, registry
from composer_speedups.algorithms import mixed_precision
from composer_speedups.errors import ConflictError, SpeedUpUnavailable
from composer_speedups.surgery import override_methods, overrides

LOADER = torch.utils.data.DataLoader(BatchDataset(16), batch_size=8)


class Dtypes(Callback):
    """Notes the dtype of logits and loss, in training and in evaluation."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def after_loss(self, state, logger) -> None:
        self.seen |= {("logits", str(state.outputs["logits"].dtype)), ("loss", str(state.loss.dtype))}

    def eval_after_forward(self, state, logger) -> None:
        outputs = state.outputs
        self.seen.add(("eval", str((outputs if isinstance(outputs, torch.Tensor) else outputs["logits"]).dtype)))


def bert() -> torch.nn.Module:
    from transformers import BertForSequenceClassification

    torch.manual_seed(3)
    return BertForSequenceClassification(bert_config()).eval()


def composer_bert() -> HuggingFaceModel:
    metric = MulticlassAccuracy(num_classes=3, average="micro")
    return HuggingFaceModel(bert(), metrics=[metric], eval_metrics=[metric], use_logits=True)


@pytest.fixture
def sums_in_float32():
    """cuBLAS may otherwise sum the parts of a long product in bf16."""
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    yield
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before


def test_matches_float64_within_bf16(device: str, sums_in_float32) -> None:
    # In one layer: products of bf16-rounded factors, summed in float32, and rounded once to bf16.
    layer = torch.nn.Linear(768, 64).to(device)
    x = torch.randn(37, 768, device=device, requires_grad=True)
    rounded = [t.detach().bfloat16().double().requires_grad_() for t in (x, layer.weight, layer.bias)]
    reference = torch.nn.functional.linear(*rounded)
    model = torch.nn.Sequential(layer)
    assert apply_mixed_precision(model, "bf16") == 1
    out = model(x)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    reference.backward(gradient.double())
    ulp = torch.finfo(torch.bfloat16).eps
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), reference, rtol=ulp, atol=ulp / 8)
    # The gradients are rounded to bf16 as the output is, then widened to the parameters' float32.
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    for got, exact in zip((x, layer.weight, layer.bias), rounded, strict=True):
        torch.testing.assert_close(got.grad.double(), exact.grad, rtol=ulp, atol=ulp / 8)


def test_matches_float64_in_bert() -> None:
    model, batch = bert(), padded_batch()
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(**batch)
        plain = model(**batch)
        apply_mixed_precision(model, "bf16")
        low = model(**batch)
    assert (low.logits.dtype, low.loss.dtype) == (torch.bfloat16, torch.float32)
    # Some 20 roundings of order-one values one after the other, 2^-9 each, that add up like a random walk.
    bound = 20**0.5 * 2**-9 * 4
    error = (low.logits.double() - exact.logits).abs().max().item()
    assert (plain.logits.double() - exact.logits).abs().max().item() < 1e-5 < error < bound
    assert abs(low.loss.item() - exact.loss.item()) < bound


def test_cpu_bf16_in_training_loss_and_evaluation(make_trainer) -> None:
    algorithm, dtypes = MixedPrecision("bf16"), Dtypes()
    trainer = make_trainer([algorithm], model=composer_bert(), callbacks=[dtypes], eval_dataloader=LOADER)
    trainer.fit()
    assert dtypes.seen == {("logits", "torch.bfloat16"), ("loss", "torch.float32"), ("eval", "torch.bfloat16")}
    assert trainer.state.precision is Precision.FP32
    assert {p.dtype for p in trainer.state.model.parameters()} == {torch.float32}
    assert 0 <= trainer.state.eval_metrics["eval"]["MulticlassAccuracy"].compute() <= 1
    evidence = algorithm.evidence
    assert (evidence["changed"], evidence["output_dtype"], evidence["grad_scaler"]) == (4, "bfloat16", "none")


def test_training_agrees_with_float32(make_trainer) -> None:
    losses = {}
    for algorithms in ([], [MixedPrecision("bf16")]):
        trainer = make_trainer(algorithms, model=composer_bert(), max_duration="5ep")
        trainer.fit()
        losses[len(algorithms)] = trainer.state.loss.item()
    assert losses[0] != losses[1]
    assert abs(losses[0] - losses[1]) < 0.02


def test_a_classifier_of_ones_own(make_trainer) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(16, 3))
    model = ComposerClassifier(module, num_classes=3)
    batch = (torch.randn(5, 16), torch.randint(0, 3, (5,)))
    assert apply_mixed_precision(model, "bf16") == 4
    outputs = model(batch)
    assert outputs.dtype == model.eval_forward(batch).dtype == torch.bfloat16
    assert model.loss(outputs, batch).dtype == torch.float32
    for metric in model.get_metrics(is_train=False).values():
        model.update_metric(batch, outputs, metric)
        assert torch.isfinite(metric.compute())


def test_changes_nothing_but_what_methods_do() -> None:
    model = composer_bert()
    before = (list(map(id, model.parameters())), list(model.state_dict()), dict(vars(model)), type(model))
    assert apply_mixed_precision(model, "bf16") == 4
    assert apply_mixed_precision(model, "bf16") == 0, "twice is once"
    assert (list(map(id, model.parameters())), list(model.state_dict()), dict(vars(model))) == before[:3]
    cls = type(model)
    assert isinstance(model, before[3])
    assert (cls.__name__, cls.__qualname__, cls.__module__) == (
        before[3].__name__, before[3].__qualname__, before[3].__module__,
    )  # fmt: skip
    assert inspect.getfullargspec(model.eval_forward) == inspect.getfullargspec(before[3](bert()).eval_forward)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_keep_it(copier) -> None:
    model, batch = bert(), padded_batch()
    apply_mixed_precision(model, "bf16")
    twin = copier(model)
    assert apply_mixed_precision(twin, "bf16") == 0
    with torch.no_grad():
        assert torch.equal(twin(**batch).logits, model(**batch).logits)
        for p in model.parameters():
            p.zero_()
        assert not torch.equal(twin(**batch).logits, model(**batch).logits), "the copy has its own weights"


def test_plain_hugging_face_model_keeps_its_ways(tmp_path) -> None:
    model = bert()
    signature = inspect.signature(model.forward)
    assert apply_mixed_precision(model, "bf16") == 1
    assert inspect.signature(model.forward) == signature
    model.save_pretrained(tmp_path)
    again = type(bert()).from_pretrained(tmp_path)
    assert again.config.architectures == ["BertForSequenceClassification"]
    assert again(**padded_batch()).logits.dtype == torch.float32


def test_checkpoints_travel_both_ways(make_trainer, tmp_path) -> None:
    first = make_trainer([MixedPrecision("bf16")], model=composer_bert(), run_name="a")
    first.fit()
    first.save_checkpoint(str(tmp_path / "a.pt"))
    second = make_trainer([], model=composer_bert(), load_path=str(tmp_path / "a.pt"), max_duration="2ep", run_name="b")
    for mine, theirs in zip(first.state.model.parameters(), second.state.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    second.fit()
    second.save_checkpoint(str(tmp_path / "b.pt"))
    third = make_trainer(
        [MixedPrecision("bf16")], model=composer_bert(), load_path=str(tmp_path / "b.pt"), max_duration="3ep"
    )
    third.fit()
    assert third.state.timestamp.epoch == 3


def test_fp16_on_cpu_is_one_clear_error(make_trainer) -> None:
    wanted = r"MixedPrecision\(dtype='fp16'\) .* fp16 needs a CUDA GPU.* (Use bf16|Leave it out)"
    with pytest.raises(SpeedUpUnavailable, match=wanted):
        make_trainer([MixedPrecision("fp16")])
    if not torch.cuda.is_available():
        with pytest.raises(SpeedUpUnavailable, match="fp16 needs a CUDA GPU"):
            apply_mixed_precision(torch.nn.Linear(2, 2), "fp16")


def test_the_schedulers_warning_is_hidden_while_an_fp16_trainer_works(make_trainer, monkeypatch) -> None:
    monkeypatch.setattr(MixedPrecision, "unavailable", lambda self, device: None)
    monkeypatch.setattr(mixed_precision, "apply_mixed_precision", lambda model, dtype: 1)

    def hidden() -> bool:
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("Detected call of `lr_scheduler.step()` before `optimizer.step()`", UserWarning)
        return not caught

    class Watch(Callback):
        def batch_end(self, state, logger) -> None:
            self.hidden = hidden()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        watch = Watch()
        trainer = make_trainer([MixedPrecision("fp16")], callbacks=[watch])
        assert hidden()
        trainer.fit()
        assert watch.hidden and not hidden()
        trainer.close()
        make_trainer([MixedPrecision("fp16")]).close()
        assert not hidden()


def test_fp16_left_on_the_cpu_of_a_gpu_machine(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = torch.nn.Linear(2, 2)
    apply_mixed_precision(model, "fp16")
    with pytest.raises(SpeedUpUnavailable, match="fp16 on CPU"):
        model(torch.ones(1, 2))


def test_bf16_on_an_old_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert MixedPrecision("bf16").unavailable(torch.device("cuda")) == (
        "Tesla T4 has no bf16 (Ampere and newer have). Use fp16"
    )
    assert MixedPrecision("fp16").unavailable(torch.device("cuda")) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    assert MixedPrecision("bf16").unavailable(torch.device("cuda")) is None


@pytest.mark.parametrize("multiplies", [True, False])
def test_a_cpu_that_only_emulates_bf16_is_told_and_trains(make_trainer, monkeypatch, caplog, multiplies: bool) -> None:
    monkeypatch.setattr(mixed_precision, "multiplies_bf16", lambda: multiplies)
    algorithm = MixedPrecision("bf16")
    reason = algorithm.too_slow(torch.device("cpu"))
    assert (reason is None) == multiplies and algorithm.unavailable(torch.device("cpu")) is None
    assert MixedPrecision("fp16").too_slow(torch.device("cpu")) is None
    assert algorithm.too_slow(torch.device("cuda")) is None
    make_trainer([algorithm]).fit()
    assert algorithm.evidence["output_dtype"] == "bfloat16"
    said = [record.getMessage() for record in caplog.records if "makes training slower here" in record.getMessage()]
    assert len(said) == (not multiplies) and all("Leave it out, as cpu/fastest_fp32 does" in text for text in said)


def test_sets_composers_precision_on_a_gpu_and_refuses_another_in_fit(make_trainer, monkeypatch) -> None:
    # Without a GPU: Composer's own set-up on "cpu", and the algorithm told that the device is another.
    algorithm = MixedPrecision("bf16")
    trainer = make_trainer([])
    monkeypatch.setattr(type(trainer.state.device), "name", "gpu")
    algorithm.install(trainer.state, trainer.logger)
    assert trainer.state.precision is Precision.AMP_BF16
    assert (algorithm.evidence["precision_before"], algorithm.evidence["precision_after"]) == ("fp32", "amp_bf16")
    trainer.state.precision = Precision.FP32
    from composer.core import Event

    with pytest.raises(ConflictError, match=r"fit\(precision='fp32'\) contradicts MixedPrecision\(dtype='bf16'\)"):
        algorithm.on_event(Event.FIT_START, trainer.state, trainer.logger)


def test_another_dtype_on_top_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = torch.nn.Linear(2, 2)
    apply_mixed_precision(model, "bf16")
    with pytest.raises(ConflictError, match="runs in bf16 already, not fp16"):
        apply_mixed_precision(model, "fp16")


def test_a_forward_replaced_on_the_object_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    model.forward = lambda x: x
    with pytest.raises(SpeedUpUnavailable, match=r"Linear\.forward was replaced on the object itself"):
        apply_mixed_precision(model, "bf16")


@pytest.mark.parametrize("wrong", ["float16", "", "BF16", "fp8"])
def test_unknown_dtype(wrong: str) -> None:
    for make in (MixedPrecision, lambda dtype: apply_mixed_precision(torch.nn.Linear(2, 2), dtype)):
        with pytest.raises(ValueError, match=f"dtype='{wrong}' is unknown. Use one of: fp16, bf16"):
            make(wrong)


@pytest.mark.parametrize("wrong", [None, torch.bfloat16, 16])
def test_wrong_type(wrong: object) -> None:
    with pytest.raises(TypeError, match="is not a string"):
        MixedPrecision(wrong)


def test_repr_and_registry() -> None:
    algorithm = registry.build("mixed_precision", dtype="bf16")
    assert repr(eval(repr(algorithm))) == repr(algorithm) == "MixedPrecision(dtype='bf16')"


class Doubled:
    """A second kind of override, to nest with the first."""

    def __call__(self, method):
        return lambda self, *args: 2 * method(self, *args)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Doubled)

    def __hash__(self) -> int:
        return 1


def test_overrides_nest_and_still_copy() -> None:
    model = torch.nn.Linear(4, 2)
    x = torch.randn(3, 4)
    apply_mixed_precision(model, "bf16")
    once = model(x)
    assert override_methods(model, ("forward", "no_such_method"), Doubled()) == 1
    assert override_methods(model, ("forward",), Doubled()) == 0
    assert len(overrides(model)) == 2
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), 2 * once)
        assert apply_mixed_precision(twin, "bf16") == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "scaler"), [("fp16", "GradScaler"), ("bf16", "none")])
def test_trains_on_a_gpu(make_trainer, dtype: str, scaler: str) -> None:
    algorithm, dtypes = MixedPrecision(dtype), Dtypes()
    precision = "amp_bf16" if dtype == "fp16" else "amp_fp16"  # overridden
    trainer = make_trainer(
        [algorithm], model=composer_bert(), device="gpu", precision=precision, callbacks=[dtypes],
        eval_dataloader=LOADER,
    )  # fmt: skip
    trainer.fit()
    wanted = f"torch.{'float16' if dtype == 'fp16' else 'bfloat16'}"
    assert dtypes.seen == {("logits", wanted), ("loss", "torch.float32"), ("eval", wanted)}
    assert algorithm.evidence["grad_scaler"] == scaler
    with pytest.raises(ConflictError, match="contradicts"):
        trainer.fit(duration="1ep", precision="fp32")
