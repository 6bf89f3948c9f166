from __future__ import annotations

import gc

import pytest
import torch
from composer.core import Callback, Evaluator, Event
from small import BatchDataset
from torch.backends import cudnn

from composer_speedups import MatmulPrecision, apply_matmul_precision, compat, registry
from composer_speedups.algorithms.matmul_precision import PrecisionHold, _already_so
from composer_speedups.errors import ConflictError, SpeedUpUnavailable

LOADER = torch.utils.data.DataLoader(BatchDataset(8), batch_size=8)


@pytest.fixture(autouse=True)
def _untouched():
    """Every test starts from PyTorch's defaults, and must leave no hold behind."""
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = True
    yield
    if PrecisionHold._in_force:
        gc.collect()  # a second each: not for every test
    assert PrecisionHold._in_force == []
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = True


def now() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), cudnn.allow_tf32


class Watch(Callback):
    """Notes the setting in the middle of the work."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    def after_forward(self, state, logger) -> None:
        self.seen.append(now())

    eval_after_forward = after_forward


class Fails(Callback):
    def batch_end(self, state, logger) -> None:
        raise RuntimeError("planted")


@pytest.mark.parametrize(("precision", "tf32"), [("highest", False), ("high", True), ("medium", True)])
def test_function_sets_both_and_restores(precision: str, tf32: bool) -> None:
    cudnn.allow_tf32 = not tf32
    with apply_matmul_precision(precision):
        assert now() == (precision, tf32)
        assert torch.backends.cuda.matmul.allow_tf32 == tf32
    assert now() == ("highest", not tf32)


def test_restores_after_an_error_and_only_once() -> None:
    with pytest.raises(ZeroDivisionError), apply_matmul_precision("high") as hold:
        raise ZeroDivisionError
    assert now() == ("highest", True)
    torch.set_float32_matmul_precision("medium")
    hold.restore()
    assert now() == ("medium", True)


@pytest.mark.parametrize("first", [0, 1])
def test_holds_may_end_in_any_order(first: int) -> None:
    holds = [apply_matmul_precision("medium"), apply_matmul_precision("highest")]
    holds.pop(first).restore()
    assert now() == (("highest", False) if first == 0 else ("medium", True))
    holds.pop().restore()
    assert now() == ("highest", True)


def test_contradictory_names_are_saved_and_restored() -> None:
    # From torch 2.9 on, old and new names of the setting disagree after this, and reading the old ones raises.
    torch.set_float32_matmul_precision("medium")
    torch.backends.cuda.matmul.allow_tf32 = True
    before = compat.read_float32_precision()
    with apply_matmul_precision("highest"):
        assert now() == ("highest", False)
        assert str(compat.read_float32_precision()) == "matmul highest, cuDNN float32"
    assert compat.read_float32_precision() == before
    assert torch.backends.cuda.matmul.allow_tf32


def test_holds_in_fit_and_eval_and_is_restored_after_each(make_trainer) -> None:
    algorithm, watch = MatmulPrecision("highest"), Watch()
    trainer = make_trainer([algorithm], callbacks=[watch], eval_dataloader=LOADER)
    assert now() == ("highest", False)
    for work in (trainer.fit, trainer.eval, lambda: trainer.fit(duration="1ep")):
        torch.set_float32_matmul_precision("high")
        cudnn.allow_tf32 = True
        watch.seen.clear()
        work()
        assert set(watch.seen) == {("highest", False)}
        assert cudnn.allow_tf32
    assert algorithm.evidence["before"] == "matmul highest, cuDNN TF32"
    assert algorithm.evidence["after"] == "matmul highest, cuDNN float32"
    # 256 roundings of 2^-24 each, adding up as a random walk or better.
    assert 0 < algorithm.evidence["relative_error"] < 16 * 2**-24


@pytest.mark.parametrize("work", ["eval", "predict"])
def test_holds_on_when_a_callback_evaluates_within_the_fit(make_trainer, work: str) -> None:
    class Evaluates(Callback):
        def batch_end(self, state, logger) -> None:
            if int(state.timestamp.batch) > 1:
                return
            trainer.eval(Evaluator(label="own", dataloader=LOADER)) if work == "eval" else trainer.predict(LOADER)

    torch.set_float32_matmul_precision("high")
    watch = Watch()
    trainer = make_trainer([MatmulPrecision("highest")], callbacks=[Evaluates(), watch], max_duration="3ba")
    trainer.fit()
    assert len(watch.seen) >= 3 and set(watch.seen) == {("highest", False)}
    assert now() == ("high", True)
    trainer.close()


@pytest.mark.parametrize(("before", "already"), [("highest", "matmul"), ("high", "none")])
def test_counts_what_matters_on_this_device(make_trainer, before: str, already: str) -> None:
    torch.set_float32_matmul_precision(before)
    algorithm = MatmulPrecision("highest")
    make_trainer([algorithm])  # no warning: a baseline says on purpose what is so already
    assert (algorithm.evidence["changed"], algorithm.evidence["already_so"]) == (1, already)
    torch.set_float32_matmul_precision("highest")


def test_cudnn_matters_on_a_gpu_alone() -> None:
    before, after = compat.Float32Precision("highest", True), compat.Float32Precision("highest", False)
    assert _already_so(before, after, torch.device("cpu")) == {"matmul": True}
    assert _already_so(before, after, torch.device("cuda")) == {"matmul": True, "cuDNN": False}
    mixed = compat.Float32Precision(None, None)
    assert _already_so(mixed, after, torch.device("cuda")) == {"matmul": False, "cuDNN": False}


def test_medium_stays_medium(make_trainer, monkeypatch) -> None:
    monkeypatch.setattr(MatmulPrecision, "unavailable", lambda self, device: None)
    watch = Watch()
    trainer = make_trainer([MatmulPrecision("medium")], callbacks=[watch])
    torch.backends.cuda.matmul.allow_tf32 = True  # as Composer does for the next Trainer
    trainer.fit()
    assert set(watch.seen) == {("medium", True)}
    assert now() == ("highest", True)


def test_restored_when_a_failed_trainer_is_closed(make_trainer) -> None:
    trainer = make_trainer([MatmulPrecision("highest")], callbacks=[Fails()])
    with pytest.raises(RuntimeError, match="planted"):
        trainer.fit()
    assert now() == ("highest", False)
    trainer.close()
    assert now() == ("highest", True)


def test_restored_when_the_trainer_fails_to_start(make_trainer) -> None:
    class Refuses(MatmulPrecision):
        slot = "refuses"
        stage = 99

        def install(self, state, logger) -> None:
            raise SpeedUpUnavailable("planted")

    Refuses.__module__ = "refuses"
    with pytest.raises(SpeedUpUnavailable, match="planted"):
        make_trainer([MatmulPrecision("highest"), Refuses("highest")])
    gc.collect()
    assert now() == ("highest", True)


def test_restored_when_a_checkpoint_cannot_be_loaded(make_trainer, tmp_path) -> None:
    with pytest.raises(FileNotFoundError) as failed:
        make_trainer([MatmulPrecision("highest")], load_path=str(tmp_path / "nowhere.pt"))
    assert now() == ("highest", True), "while the error, and with it the Trainer, is still there"
    del failed


def test_checkpoints_travel_both_ways(make_trainer, tmp_path) -> None:
    with_it = make_trainer([MatmulPrecision("highest")], run_name="a")
    with_it.fit()
    with_it.save_checkpoint(str(tmp_path / "a.pt"))
    without = make_trainer([], load_path=str(tmp_path / "a.pt"), max_duration="2ep", run_name="b")
    without.fit()
    without.save_checkpoint(str(tmp_path / "b.pt"))
    make_trainer([MatmulPrecision("highest")], load_path=str(tmp_path / "b.pt"), max_duration="3ep").fit()


def test_says_where_it_has_no_effect(make_trainer, monkeypatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert MatmulPrecision("highest").unavailable(cpu) is None
    with apply_matmul_precision("highest"):
        exact = torch.nn.functional.linear(torch.ones(64, 64), torch.full((64, 64), 1 / 3))
    with apply_matmul_precision("high"):
        changed = not torch.equal(torch.nn.functional.linear(torch.ones(64, 64), torch.full((64, 64), 1 / 3)), exact)
    if not changed:  # unlike a CPU whose AMX unit multiplies in TF32
        with pytest.raises(SpeedUpUnavailable, match="TF32 needs an Ampere or newer CUDA GPU"):
            make_trainer([MatmulPrecision("high")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "Ampere" in MatmulPrecision("high").unavailable(cuda)
    assert "Ampere" in MatmulPrecision("medium").unavailable(cuda)
    assert MatmulPrecision("highest").unavailable(cuda) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert MatmulPrecision("high").unavailable(cuda) is None
    assert now() == ("highest", True)


def test_looking_changes_nothing() -> None:
    state = torch.random.get_rng_state()
    cudnn.allow_tf32 = False
    MatmulPrecision("medium").unavailable(torch.device("cpu"))
    assert now() == ("highest", False)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("wrong", ["TF32", "", "HIGH"])
def test_unknown_precision(wrong: str) -> None:
    for make in (MatmulPrecision, apply_matmul_precision):
        with pytest.raises(ValueError, match=f"precision='{wrong}' is unknown. Use one of: highest, high, medium"):
            make(wrong)


@pytest.mark.parametrize("wrong", [None, True, 32, ["high"]])
def test_wrong_type(wrong: object) -> None:
    with pytest.raises(TypeError, match="is not a string"):
        MatmulPrecision(wrong)


def test_repr_and_registry() -> None:
    algorithm = registry.build("matmul_precision", precision="medium")
    assert repr(algorithm) == "MatmulPrecision(precision='medium')"
    assert repr(eval(repr(algorithm))) == repr(algorithm)


def test_twice_is_refused(make_trainer) -> None:
    with pytest.raises(ConflictError, match="listed twice"):
        make_trainer([MatmulPrecision("highest"), MatmulPrecision("high")])
    assert now() == ("highest", True)


def test_ignores_other_events() -> None:
    assert not MatmulPrecision("high").match(Event.BATCH_END, None)


@pytest.mark.gpu
def test_really_changes_products_on_a_gpu(make_trainer) -> None:
    errors = {}
    for precision in ("highest", "high"):
        algorithm = MatmulPrecision(precision)
        make_trainer([algorithm], device="gpu", precision="fp32").fit()
        errors[precision] = algorithm.evidence["relative_error"]
    # Float32 rounds to 2^-24, TF32 rounds its inputs to 2^-11.
    assert errors["highest"] < 1e-6 < 5e-5 < errors["high"] < 2e-3
