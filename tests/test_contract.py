"""The promises of every algorithm, held against everything that the registry discovers.

A new file in `algorithms/` is tested here without a line being added. What is measured: real Composer Trainers around
a real BERT, on the CPU. Speed-ups that need a GPU are held to their clear error, and to all that needs no kernel.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import doctest
import gc
import graphlib
import importlib
import inspect
import pickle
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from composer import Trainer
from composer.algorithms.warnings import NoEffectWarning
from composer.models import ComposerClassifier, HuggingFaceModel
from contract import (
    ALL,
    UNUSABLE,
    USABLE,
    at_once,
    batch,
    bert,
    case,
    forward_and_gradients,
    loader,
    make,
    tolerance,
)

import composer_speedups
from composer_speedups import registry, speedup
from composer_speedups.errors import ConflictError, RecipeError, SpeedUpUnavailable
from composer_speedups.recipes import load_recipe
from composer_speedups.recipes.files import recipe_names
from composer_speedups.speedup import SpeedUp, Stage, algorithm_passes

ROOT = Path(__file__).parents[1]
OPTIMIZER_KEYS = [key for key in ALL if registry.speedup_class(key).stage is Stage.OPTIMIZER]
DATA_KEYS = [key for key in ALL if registry.speedup_class(key).stage is Stage.DATA]


@pytest.fixture
def trainer_for():
    """Make a Trainer for one speed-up (or several) and the model of its case."""
    trainers = []

    def make_trainer(algorithms, model, head="classification", rows=32, optimizer=None, **kwargs):
        model = model if hasattr(model, "eval_forward") else HuggingFaceModel(model, metrics=[], use_logits=True)
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, foreach=False)
        settings = {"max_duration": "1ep", "device": "cpu", "seed": 7, "progress_bar": False, "loggers": []}
        trainer = Trainer(
            model=model,
            optimizers=optimizer,
            algorithms=algorithms,
            train_dataloader=loader(head, rows),
            **{**settings, **kwargs},
        )
        trainers.append(trainer)
        return trainer

    yield make_trainer
    for trainer in trainers:
        trainer.close()


def fingerprint(model: torch.nn.Module) -> dict[str, object]:
    """All that surgery must leave as it was."""
    return {
        "parameters": [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)],
        "state_dict": [(name, t.shape, t.dtype) for name, t in model.state_dict().items()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "modules": [name for name, _ in model.named_modules()],
        "arguments": list(inspect.signature(model.forward).parameters),
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), len(m._backward_pre_hooks))
            for m in model.modules()
        ],
    }


# ---- 1. same Parameters, same keys


@pytest.mark.parametrize("key", USABLE)
@pytest.mark.parametrize("variant", ["plain", "frozen", "bf16 weights", "eval mode", "tied"])
def test_the_model_keeps_its_parameters_and_keys(key: str, variant: str, trainer_for) -> None:
    head = "mlm" if variant == "tied" else case(key).head
    model = bert(head)
    if variant == "frozen":
        for p in model.bert.encoder.layer[0].parameters():
            p.requires_grad_(False)
    elif variant == "bf16 weights":
        model.to(torch.bfloat16)
    elif variant == "eval mode":
        model.eval()
    elif variant == "tied":
        assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    before = fingerprint(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEffectWarning)  # a head that it has nothing to do with is no fault here
        trainer_for([make(key)], model, head)
    assert fingerprint(model) == before


@pytest.mark.parametrize("key", USABLE)
def test_parameter_groups_stay(key: str, trainer_for) -> None:
    model = bert(case(key).head)
    norms = {id(p) for m in model.modules() if isinstance(m, torch.nn.LayerNorm) for p in m.parameters()}
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in norms], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if id(p) in norms], "weight_decay": 0.0, "lr": 1e-4},
    ]
    expected = [[id(p) for p in g["params"]] for g in groups]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    trainer = trainer_for([make(key)], model, case(key).head, optimizer=optimizer)
    now = trainer.state.optimizers[0].param_groups
    assert [[id(p) for p in g["params"]] for g in now] == expected
    assert [(g["lr"], g["weight_decay"]) for g in now] == [(1e-3, 0.1), (1e-4, 0.0)]


class OwnAdamW(torch.optim.AdamW):
    """A user's, whose step does something of its own."""

    def step(self, closure=None):
        loss = super().step(closure)
        self.counted = getattr(self, "counted", 0) + 1
        return loss


def prepared(parameters, **settings):
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(torch.optim.AdamW(parameters, **settings))


OTHERS = {
    "Adam": (torch.optim.Adam, r"torch\.optim\.adam\.Adam, .* Make it torch\.optim\.AdamW"),
    "SGD": (torch.optim.SGD, r"torch\.optim\.sgd\.SGD, .* Make it torch\.optim\.AdamW"),
    "own": (OwnAdamW, r"OwnAdamW, .* Make it torch\.optim\.AdamW"),
    "prepared": (prepared, r"AcceleratedOptimizer, .* before accelerator\.prepare"),
}


@pytest.fixture
def no_accelerator_after():
    """What an Accelerator chooses belongs to the process."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("no_accelerator_after")
@pytest.mark.parametrize("make_other, message", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("key", OPTIMIZER_KEYS)
def test_an_optimizer_that_is_no_adamw_is_refused_and_stays(key: str, make_other, message: str) -> None:
    layer = torch.nn.Linear(8, 8)
    optimizer = make_other(layer.parameters(), lr=0.5)
    layer(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    function, cls, before = registry.function(key), type(optimizer), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(SpeedUpUnavailable, match=message):
        function(optimizer, *([layer] if "model" in inspect.signature(function).parameters else []))
    assert type(optimizer) is cls
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


# ---- 2. checkpoints travel


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    model = trainer.state.model.model
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("key", USABLE)
def test_predicts_in_inference_mode(key: str, trainer_for) -> None:
    head = case(key).head
    trainer = trainer_for([make(key)], bert(head), head)
    trainer.fit()
    model, batch = trainer.state.model.model.eval(), next(iter(loader(head)))
    with torch.no_grad():
        expected = model(**batch)
    with torch.inference_mode():
        found = model(**batch)
    torch.testing.assert_close(found.loss.float(), expected.loss.float())
    torch.testing.assert_close(found.logits, expected.logits)


@pytest.mark.parametrize("key", USABLE)
def test_checkpoints_load_without_the_speed_up_and_with_it(key: str, trainer_for, tmp_path) -> None:
    head = case(key).head
    other_state = case(key).own_moments  # they need converting (see test_optimizer_states), or cannot be
    saving = {"save_interval": "2ba", "save_overwrite": True}
    with_it = trainer_for([make(key)], bert(head), head, save_folder=str(tmp_path / "with"), **saving)
    with_it.fit()
    without = trainer_for([], bert(head), head, save_folder=str(tmp_path / "without"), **saving)
    without.fit()
    plain = trainer_for(
        [], bert(head), head, load_path=str(tmp_path / "with/ep0-ba4-rank0.pt"), load_weights_only=other_state
    )
    for name, value in weights(with_it).items():
        assert torch.equal(weights(plain)[name], value), name
    fast = trainer_for(
        [make(key)],
        bert(head),
        head,
        load_path=str(tmp_path / "without/ep0-ba4-rank0.pt"),
        load_weights_only=other_state,
    )
    for name, value in weights(without).items():
        assert torch.equal(weights(fast)[name], value), name
    if not other_state:
        for trainer in (plain, fast):
            steps = {int(s["step"]) for s in trainer.state.optimizers[0].state.values()}
            assert steps == {4}, "the moments must have come along"


@pytest.mark.parametrize("key", USABLE)
@pytest.mark.parametrize("scheduler", ["composer", "pytorch"])
def test_resumed_equals_uninterrupted(key: str, scheduler: str, trainer_for, tmp_path) -> None:
    from composer.optim import LinearScheduler

    def build(**kwargs):
        model = bert(case(key).head, hidden_dropout_prob=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        schedule = (
            LinearScheduler()
            if scheduler == "composer"
            else torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        )
        return trainer_for(
            [make(key)],
            model,
            case(key).head,
            optimizer=optimizer,
            schedulers=schedule,
            step_schedulers_every_batch=True,
            max_duration="2ep",
            **kwargs,
        )

    whole = build(save_folder=str(tmp_path), save_interval="1ba")
    whole.fit()
    rest = build(load_path=str(tmp_path / "ep0-ba3-rank0.pt"))
    assert int(rest.state.timestamp.batch) == 3
    rest.fit()
    assert int(rest.state.timestamp.batch) == 8
    for name, value in weights(whole).items():
        assert torch.equal(weights(rest)[name], value), f"{name} differs after resuming"


@pytest.mark.parametrize("key", USABLE)
def test_autoresume_goes_on(key: str, trainer_for, tmp_path) -> None:
    """Composer's own `autoresume`: the same script again finds the latest checkpoint by itself."""

    def build(folder: str):
        saving = {"save_folder": str(tmp_path / folder), "save_interval": "1ba", "run_name": "run", "autoresume": True}
        model = bert(case(key).head, hidden_dropout_prob=0.1)
        return trainer_for([make(key)], model, case(key).head, max_duration="4ba", **saving)

    whole = build("whole")
    whole.fit()
    first = build("parts")  # not before: a Trainer seeds the random numbers of the whole process
    first.fit(duration="2ba")
    first.close()
    rest = build("parts")
    assert int(rest.state.timestamp.batch) == 2
    rest.fit()
    assert int(rest.state.timestamp.batch) == 4
    for name, value in weights(whole).items():
        assert torch.equal(weights(rest)[name], value), f"{name} differs after autoresume"


@pytest.mark.parametrize("key", ["adafactor", "adamw_8bit"])
def test_an_optimizer_of_a_speed_ups_name_is_still_missed(key: str, trainer_for, tmp_path) -> None:
    """Composer has the same words for both, but what a speed-up has no need of, an optimizer has lost."""
    head, name = case(key).head, registry.speedup_class(key).__name__
    trainer_for([], bert(head), head, save_folder=str(tmp_path), save_interval="2ba").fit()
    load = {"load_path": str(tmp_path / "ep0-ba2-rank0.pt")}

    def fast() -> torch.optim.Optimizer:
        return trainer_for([make(key)], bert(head), head).state.optimizers[0]

    optimizer = type(fast())
    assert optimizer.__name__ == name
    model = bert(head)
    with pytest.warns(UserWarning, match=f"{name} is not in the state_dict"):
        trainer_for([], model, head, optimizer=optimizer(model.parameters()), **load)
    # While a Trainer with the speed-up loads, too; of the speed-up itself nothing is said.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        with contextlib.suppress(ConflictError):
            trainer_for([make(key)], bert(head), head, **load)
        gc.collect()
        ours = [f for f in warnings.filters if f not in before and "state_dict" in str(f[1])]
    assert [str(w.message).split()[0] for w in caught if "state_dict" in str(w.message)] == [name]
    assert not ours, "a filter belongs to the process"


# ---- 4. twice is once; contradictions


@pytest.mark.parametrize("key", ALL)
def test_two_instances_raise(key: str, trainer_for) -> None:
    with pytest.raises(ConflictError, match=f"{key} is listed twice"):
        trainer_for([make(key), make(key)], bert(case(key).head), case(key).head)


@pytest.mark.parametrize("key", USABLE)
def test_applied_twice_changes_nothing_more(key: str, trainer_for) -> None:
    model = HuggingFaceModel(bert(case(key).head), metrics=[], use_logits=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = trainer_for([make(key)], model, case(key).head, optimizer=optimizer)
    classes = [type(m) for m in model.modules()]
    first.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEffectWarning)
        trainer_for([make(key)], model, case(key).head, optimizer=optimizer)
    assert [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize("key", ALL)
def test_says_that_the_model_has_it_already(key: str, trainer_for, monkeypatch) -> None:
    """In a second Trainer for the same model, which holds what it looks for no longer as it looks for it."""
    cls = registry.speedup_class(key)
    # What needs a GPU to compute is put in here all the same.
    monkeypatch.setattr(cls, "unavailable", lambda self, device: None)
    monkeypatch.setattr(importlib.import_module(cls.__module__), "_unavailable", lambda *_: None, raising=False)
    model = HuggingFaceModel(bert(case(key).head), metrics=[], use_logits=True)
    try:
        first = trainer_for([make(key)], model, case(key).head)
    except SpeedUpUnavailable as error:
        pytest.skip(f"cannot even be put in here: {error}")
    first.close()
    again = make(key)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_for([again], model, case(key).head, optimizer=first.state.optimizers[0])
    told = [str(w.message) for w in caught if issubclass(w.category, NoEffectWarning)]
    assert bool(told) == (again.evidence.get("changed") == 0)
    assert all("already" in text for text in told), told


def test_one_that_refuses_tells_what_those_before_it_have_changed(trainer_for) -> None:
    """What they changed cannot be taken back: in a notebook the next Trainer would train with it unasked."""

    class Refusing(SpeedUp):
        stage = Stage.COMPILE

        def install(self, state, logger) -> None:
            raise SpeedUpUnavailable("not this model")

    with pytest.raises(SpeedUpUnavailable, match="not this model") as refused:
        trainer_for([Refusing(), make("unpadding"), make("fused_adamw")], bert())
    (note,) = refused.value.__notes__
    assert note.startswith("Changed before that, and still so: what unpadding, fused_adamw changes. For another")
    with pytest.raises(SpeedUpUnavailable) as alone:
        trainer_for([Refusing()], bert())
    assert not hasattr(alone.value, "__notes__")


SLOTS = sorted({c.slot for c in map(registry.speedup_class, ALL) if c.slot})


@pytest.mark.parametrize("slot", SLOTS)
def test_two_that_fill_one_slot_raise(slot: str, trainer_for) -> None:
    keys = [key for key in ALL if registry.speedup_class(key).slot == slot]
    if len(keys) < 2:
        pytest.skip(f"only {keys} sets the {slot}")
    for other in keys[1:]:
        with pytest.raises(ConflictError, match="contradict each other"):
            trainer_for([make(keys[0]), make(other)], bert())


def test_order_is_right_whatever_is_listed(trainer_for) -> None:
    listed = sorted((make(key) for key in USABLE), key=lambda a: -a.stage)
    for event in composer_speedups.speedup.Event:
        stages = [a.stage for a in algorithm_passes(listed, event)]
        assert stages == sorted(stages)
    installed = []
    chosen = [make(key) for key in ("torch_compile", "fused_adamw", "low_precision_norm", "mixed_precision")]
    for algorithm in chosen:
        algorithm.install = (lambda a: lambda state, logger: installed.append(a.key()))(algorithm)
    trainer = trainer_for(chosen, bert())
    assert installed == ["mixed_precision", "low_precision_norm", "fused_adamw", "torch_compile"]
    assert [a.key() for a in trainer.state.algorithms] == installed  # so that later events come in this order, too


# ---- 5. loud


class Nothing(torch.nn.Module):
    """No BERT, no norm, no dropout, no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.parametrize("key", USABLE)
def test_says_what_it_changed_or_warns(key: str) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    model = ComposerClassifier(Nothing(), num_classes=2)
    algorithm = make(key)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            algorithms=[algorithm],
            train_dataloader=torch.utils.data.DataLoader(data, batch_size=4),
            max_duration="1ep",
            device="cpu",
            progress_bar=False,
            loggers=[],
        )
        try:
            trainer.fit()
        except SpeedUpUnavailable as error:  # samples that are no texts: refused, in one line, before the first batch
            assert "\n" not in str(error) and trainer.state.timestamp.batch == 0
            return
        finally:
            trainer.close()
    warned = [w for w in caught if issubclass(w.category, NoEffectWarning)]
    assert "changed" in algorithm.evidence, "it must report what it changed"
    assert bool(warned) == (algorithm.evidence["changed"] == 0), (algorithm.evidence, [str(w.message) for w in warned])
    for warning in warned:
        assert "\n" not in str(warning.message)
        assert warning.filename == __file__, "it must name the line of whoever uses the Trainer"


@pytest.mark.parametrize("key", UNUSABLE)
def test_what_this_machine_lacks_is_one_clear_error_before_training(key: str, trainer_for) -> None:
    model = bert(case(key).head)
    classes = [type(m) for m in model.modules()]
    with pytest.raises(SpeedUpUnavailable) as caught:
        trainer_for([make(key)], model, case(key).head)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    assert [type(m) for m in model.modules()] == classes, "nothing may be changed before the error"


# ---- 6. arguments are the configuration


@pytest.mark.parametrize("key", [key for key in ALL if registry.speedup_class(key).no_fsdp])
def test_what_fsdp_cannot_have_says_so_before_anything_is_changed(key: str, monkeypatch) -> None:
    cls, model = registry.speedup_class(key), bert(case(key).head)
    monkeypatch.setattr(cls, "unavailable", lambda self, device: None)
    monkeypatch.setattr(cls, "install", lambda self, state, logger: pytest.fail("it was installed"))
    device = SimpleNamespace(_device=torch.device("cpu"))
    state = SimpleNamespace(fsdp_config={}, algorithms=[], callbacks=[], device=device, model=model)
    with pytest.raises(SpeedUpUnavailable, match=r"cannot be used under FSDP: .*(Use|Set|Remove) "):
        speedup._install_all(make(key), state, None)


@pytest.mark.parametrize("key", ALL)
def test_repr_evaluates_back(key: str) -> None:
    algorithm = make(key)
    again = eval(repr(algorithm), {type(algorithm).__name__: type(algorithm)})
    assert repr(again) == repr(algorithm)
    assert type(again) is type(algorithm)


@pytest.mark.parametrize("key", USABLE)
def test_copies_and_pickles_after_use(key: str, trainer_for) -> None:
    """As whoever sends what is to be trained to another process does it; a copy belongs to no Trainer."""
    algorithm, head = make(key), case(key).head
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEffectWarning)
        trainer_for([algorithm], bert(head), head)
    for copied in (pickle.loads(pickle.dumps(algorithm)), copy.deepcopy(algorithm)):
        assert (repr(copied), copied.evidence) == (repr(algorithm), algorithm.evidence)
        assert copied._installed_in is None and algorithm._installed_in is not None


@pytest.mark.parametrize("key", ALL)
def test_yaml_and_python_are_the_same(key: str) -> None:
    cls = registry.speedup_class(key)
    for kwargs in (case(key).kwargs, *cls.choices):
        from_yaml = yaml.safe_load(yaml.safe_dump(kwargs))
        assert repr(registry.build(key, **from_yaml)) == repr(cls(**kwargs))
    for parameter in cls.parameters().values():
        if parameter.default is not inspect.Parameter.empty:
            assert parameter.default is None or isinstance(parameter.default, bool | int | float | str)


@pytest.mark.parametrize("key", ALL)
def test_unknown_arguments_raise(key: str) -> None:
    with pytest.raises(RecipeError, match="no argument 'bogus'"):
        registry.build(key, **case(key).kwargs, bogus=1)


@pytest.mark.parametrize("key", ALL)
def test_wrong_types_raise(key: str) -> None:
    for name in registry.speedup_class(key).parameters():
        with pytest.raises((TypeError, ValueError)):
            registry.speedup_class(key)(**{**case(key).kwargs, name: object()})


@pytest.mark.parametrize("key", ALL)
def test_has_card_function_test_and_recipe(key: str) -> None:
    cls = registry.speedup_class(key)
    assert cls.__name__.lower() == key.replace("_", "")
    assert getattr(composer_speedups, cls.__name__) is cls
    assert callable(getattr(composer_speedups, f"apply_{key}"))
    module = importlib.import_module(cls.__module__)
    card = module.__doc__ or ""
    for section in ("**Why it is faster.**", "**Numerics.**", "**When it pays.**", "**Needs.**", "Source:"):
        assert section in card, f"the card of {key} lacks {section}"
    assert len(Path(inspect.getfile(cls)).read_text().splitlines()) <= 250, "one file, one idea"
    # The AdamWs share theirs.
    tests = [ROOT / "tests" / "algorithms" / f"test_{name}.py" for name in (key, "optimizers")]
    tested = tests[0].exists() or f"apply_{key}" in tests[1].read_text()
    assert tested, f"{tests[0]} is not there: write it, as step 2 of CONTRIBUTING.md says"
    assert key in in_recipes(), f"no recipe uses {key}"


@cache
def in_recipes() -> set[str]:
    return {key for name in recipe_names() for key in load_recipe(name, check_arguments=False).speedups}


@pytest.mark.parametrize("key", ALL)
def test_every_argument_is_explained(key: str) -> None:
    cls, function = registry.speedup_class(key), registry.function(key)
    said = inspect.getdoc(cls)
    missing = [name for name in cls.parameters() if f"\n    {name}: " not in said]
    assert not missing, f"Args of {cls.__name__}'s docstring lacks {missing}"
    said, names = inspect.getdoc(function), list(inspect.signature(function).parameters)
    if f"The arguments are those of `{cls.__name__}`" in said.replace("\n", " "):
        assert set(names) - {"model"} <= set(cls.parameters())
        return
    # What is changed, the first of them, needs no line of its own where the first sentence names it.
    own = [name for name in names if name != names[0] or f"`{name}`" not in said]
    missing = [name for name in own if f"\n    {name}: " not in said]
    assert not missing, f"the docstring of {function.__name__} lacks {missing}"


def documented_modules() -> list[str]:
    names = []
    for path in sorted((ROOT / "composer_speedups").rglob("*.py")):
        if ">>>" in path.read_text():
            names.append(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    return names


@pytest.mark.parametrize("name", documented_modules())
def test_docstring_examples_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0 and (results.attempted > 0 or name == "composer_speedups.isolation.isolate")


# ---- 7. numerics


@pytest.mark.parametrize("key", USABLE)
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "unpadded"])
def test_loss_and_gradients_match_float64(key: str, padded: bool, trainer_for) -> None:
    head, bound = case(key).head, case(key).bound
    model = bert(head)
    reference = copy.deepcopy(model).double()
    trainer = trainer_for([make(key)], model, head)
    data = batch(head, padded)
    loss, grads = forward_and_gradients(trainer.state.model, data)
    expected_loss, expected = forward_and_gradients(reference, data)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=bound)
    error = ((grads - expected).norm() / expected.norm()).item()
    assert error <= bound


@pytest.mark.parametrize("fault", ["bias", "eps", "mask", "scale"])
def test_planted_faults_exceed_the_tolerance(fault: str) -> None:
    """The test above can fail: each fault moves the gradients far beyond the widest tolerance used."""
    model = bert()
    reference = copy.deepcopy(model).double()
    data = batch()
    expected = forward_and_gradients(reference, data)[1]
    layer = model.bert.encoder.layer[0]
    if fault == "bias":
        layer.output.LayerNorm.bias.data.zero_()
    elif fault == "eps":
        layer.output.LayerNorm.eps = 2.0
    elif fault == "scale":
        layer.attention.self.query.weight.data.mul_(1.5)
    else:
        data = data | {"attention_mask": torch.ones_like(data["attention_mask"])}
    grads = forward_and_gradients(model, data)[1]
    assert ((grads - expected).norm() / expected.norm()).item() > tolerance(torch.bfloat16)


# ---- 9. gradient accumulation; 10. evaluation; 11. determinism


@pytest.mark.parametrize("key", [k for k in USABLE if k not in DATA_KEYS])
def test_microbatches_give_the_update_of_the_full_batch(key: str, trainer_for) -> None:
    head = case(key).head
    if head == "mlm":
        pytest.skip("Composer weighs microbatches by samples, an MLM loss is a mean over its own tokens")
    if at_once(key):
        trainer = trainer_for([make(key)], bert(head), head, device_train_microbatch_size=2)
        with pytest.raises(ConflictError, match=r"device_train_microbatch_size is 2 of 8.* remove the speed-up"):
            trainer.fit()
        assert trainer.state.timestamp.batch == 0
        return
    gradients = []
    for microbatch in (8, 2):
        trainer = trainer_for([make(key)], bert(head), head, device_train_microbatch_size=microbatch)
        updates = []

        def keep(optimizer, *_, updates=updates):
            grads = [
                torch.zeros_like(p) if p.grad is None else p.grad for g in optimizer.param_groups for p in g["params"]
            ]
            updates.append(torch.cat([g.double().flatten() for g in grads]))

        trainer.state.optimizers[0].register_step_post_hook(keep)  # afterwards Composer clears them
        trainer.fit(duration="1ba")
        assert len(updates) == 1
        gradients += updates
    whole, parts = gradients
    assert whole.norm() > 0
    assert ((parts - whole).norm() / whole.norm()).item() <= case(key).bound


@pytest.mark.parametrize("key", USABLE)
def test_evaluation_agrees_with_plain_evaluation(key: str, trainer_for) -> None:
    from composer.metrics import CrossEntropy, LanguageCrossEntropy

    head, values = case(key).head, []
    for algorithms in ([], [make(key)]):
        metric = LanguageCrossEntropy() if head == "mlm" else CrossEntropy()
        model = HuggingFaceModel(bert(head), metrics=[], eval_metrics=[metric], use_logits=True)
        trainer = trainer_for(algorithms, model, head)
        trainer.eval(loader(head))
        values.append(next(iter(trainer.state.eval_metrics["eval"].values())).compute().item())
    assert values[1] == pytest.approx(values[0], rel=case(key).bound)


@pytest.mark.parametrize("key", USABLE)
def test_same_seed_same_result(key: str, trainer_for) -> None:
    head, results = case(key).head, []
    for _ in range(2):
        trainer = trainer_for([make(key)], bert(head, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1), head)
        trainer.fit()
        results.append(weights(trainer))
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name


# ---- 8. training agrees


@pytest.mark.parametrize("key", USABLE)
def test_thirty_steps_end_where_plain_training_ends(key: str, trainer_for) -> None:
    """The loss after 30 steps on the same data, against the fp32 run's, within 5 % of what that gained (`Case`).

    Those that choose the batches see the samples in another order, on purpose: as far apart as two seeds, 30 %.
    """
    head, ends = case(key).head, []
    for algorithms in ([], [make(key)]):
        trainer = trainer_for(algorithms, bert(head), head, rows=40, max_duration="30ba")
        trainer.fit()
        with torch.no_grad():
            ends.append(trainer.state.model(batch(head, rows=40))["loss"].item())
    start = bert(head)(**batch(head, rows=40))["loss"].item()
    assert ends[0] < start - 0.02, "plain training must learn, or this compares nothing"
    band = 0.3 if key in DATA_KEYS else case(key).ends_within
    assert abs(ends[1] - ends[0]) <= band * (start - ends[0]) + 1e-3


# ---- structure


# Each imports only of those before it. What is in none of them is used by several, and has no circles.
LAYERS = (
    ("isolation",),
    ("kernels",),
    ("batches", "packed"),
    ("graphs",),
    ("speedup",),
    ("optim",),
    ("algorithms",),
    ("registry",),
    ("tasks",),
    ("recipes",),
    ("measurement",),
    ("training",),
    ("verification",),
    ("ablation",),
    ("tuning",),
    ("recommend",),
    ("commands",),
    ("cli",),
)


def test_imports_flow_one_way() -> None:
    """kernels -> algorithms -> registry -> recipes and tasks -> training -> ablation -> cli; nothing goes back."""
    package = ROOT / "composer_speedups"
    place = {name: n for n, names in enumerate(LAYERS) for name in names}
    folders = {file.parent.name for file in package.glob("*/__init__.py")}
    assert folders <= place.keys(), "a new folder has a place among the others"
    units = folders | {file.stem for file in package.glob("*.py") if not file.stem.startswith("__")}
    assert place.keys() <= units
    imported = {unit: set[str]() for unit in units}
    for unit in units:
        for file in sorted((package / unit).rglob("*.py")) if unit in folders else [package / f"{unit}.py"]:
            for parts in (name.split(".") for name in _imported(file)):
                own = parts[0] == "composer_speedups" and len(parts) > 1 and parts[1] in units - {unit}
                imported[unit] |= {parts[1]} if own else {"composer"} if parts[0] == "composer" else set()
                if own and unit in place:
                    assert place.get(parts[1], -1) < place[unit], f"{file.relative_to(ROOT)} imports {parts[1]}"
    tuple(graphlib.TopologicalSorter(imported).static_order())  # an error names the circle, if there is one
    reached, new = set[str](), {"kernels"}
    while new:
        reached, new = reached | new, {name for unit in new for name in imported.get(unit, ())} - reached
    assert "composer" not in reached, "kernels import no Composer, nor do those that they import"


def _imported(file: Path) -> list[str]:
    """What a file imports, wherever in it, and each name that it takes of it."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module] if node.module != "composer_speedups" else []
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def test_no_name_of_a_composer_algorithm_is_taken() -> None:
    import composer.algorithms

    for key in ALL:
        assert not hasattr(composer.algorithms, registry.speedup_class(key).__name__)


def test_llmfoundry_finds_every_speed_up_by_key() -> None:
    """As LLM Foundry does: a `catalogue` registry of the name llmfoundry/algorithms, which looks through the installed
    packages' entry points; a class from it is called with the YAML's arguments, and must be a Composer Algorithm."""
    import catalogue
    from composer.core import Algorithm

    algorithms = catalogue.create("llmfoundry", "algorithms", entry_points=True)
    installed = algorithms.get_entry_points()
    ours = {name for name, cls in installed.items() if cls.__module__.startswith("composer_speedups.")}
    assert ours == set(ALL), "install again: setup.py makes an entry point for each file in algorithms/"
    for key in ALL:
        cls = algorithms.get(key)
        assert isinstance(cls, type) and issubclass(cls, Algorithm)
        assert repr(cls(**case(key).kwargs)) == repr(make(key))
