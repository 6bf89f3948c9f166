"""Checkpoints whose parameters are in other groups, and optimizer states that are not there to be loaded."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from composer.core import Callback
from composer.optim import CosineAnnealingScheduler
from contract import OPTIMIZERS

from composer_speedups import Adafactor, ForeachAdamW, FusedAdamW, registry
from composer_speedups.errors import ConflictError

CLASSES = [registry.speedup_class(key) for key in OPTIMIZERS]
FILE = "ep0-ba2-rank0.pt"


def adamw(model: torch.nn.Module, **options) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, "weight_decay": 0.2, **options})


class Rates(Callback):
    """The rates of all groups at each step."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def batch_start(self, state, logger) -> None:
        self.seen.append([group["lr"] for group in state.optimizers[0].param_groups])


def whole_run(make_trainer, tiny_bert, algorithms, folder, **options):
    """Four steps, and a checkpoint after two."""
    model = copy.deepcopy(tiny_bert)
    trainer = make_trainer(
        algorithms, model=model, optimizer=adamw(model, **options), schedulers=CosineAnnealingScheduler(),
        save_folder=str(folder), save_interval="2ba", callbacks=[Rates()],
    )  # fmt: skip
    trainer.fit()
    return trainer


@pytest.mark.parametrize("saved", [False, True], ids=["from_one", "from_two"])
@pytest.mark.parametrize("cls", CLASSES)
def test_another_no_decay_keeps_all_but_weight_decay(
    cls, saved: bool, make_trainer, tiny_bert, tmp_path, caplog
) -> None:
    start = copy.deepcopy(tiny_bert)
    options = {} if cls is Adafactor else {"betas": (0.8, 0.95), "eps": 1e-6}
    whole = whole_run(make_trainer, tiny_bert, [cls(no_decay_on_bias_and_norm=saved)], tmp_path, **options)
    optimizer = adamw(start)
    with caplog.at_level(logging.WARNING, "composer_speedups"):
        trainer = make_trainer(
            [cls(no_decay_on_bias_and_norm=not saved)], model=start, optimizer=optimizer,
            schedulers=CosineAnnealingScheduler(), load_path=str(tmp_path / FILE),
        )  # fmt: skip
    assert caplog.text.count("no_decay_on_bias_and_norm") == 1
    groups = optimizer.param_groups
    assert [g["weight_decay"] for g in groups] == ([0.2] if saved else [0.2, 0.0])
    assert sum(len(g["params"]) for g in groups) == len(list(start.parameters())) == len(optimizer.state)
    theirs = whole.state.optimizers[0].param_groups[0]
    for group in groups:
        for key in theirs.keys() - {"params", "lr", "weight_decay"}:
            assert group[key] == theirs[key], key
    rates = Rates()
    trainer.state.callbacks.append(rates)
    trainer.fit()
    (expected,) = (c.seen for c in whole.state.callbacks if isinstance(c, Rates))
    assert expected[2] != expected[3]
    assert rates.seen == [[rate[0]] * len(groups) for rate in expected[2:]], "scheduled in all groups"


@pytest.mark.parametrize("flag", [False, True])
def test_the_same_groups_have_what_the_file_says(flag: bool, make_trainer, tiny_bert, tmp_path, caplog) -> None:
    algorithm = FusedAdamW(no_decay_on_bias_and_norm=flag)
    whole = whole_run(make_trainer, tiny_bert, [algorithm], tmp_path, betas=(0.8, 0.95), weight_decay=0.3)
    optimizer = adamw(tiny_bert)
    with caplog.at_level(logging.WARNING, "composer_speedups"):
        trainer = make_trainer(
            [FusedAdamW(no_decay_on_bias_and_norm=flag)], optimizer=optimizer, schedulers=CosineAnnealingScheduler(),
            load_path=str(tmp_path / FILE),
        )  # fmt: skip
    assert "other groups" not in caplog.text
    assert [g["weight_decay"] for g in optimizer.param_groups] == ([0.3, 0.0] if flag else [0.3])
    assert all(g["betas"] == (0.8, 0.95) for g in optimizer.param_groups)
    trainer.fit()
    for one, other in zip(whole.state.model.parameters(), trainer.state.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("joined", [False, True], ids=["split", "joined"])
def test_groups_of_other_rates_are_not_guessed(joined: bool, make_trainer, tiny_bert, tmp_path) -> None:
    def groups(model: torch.nn.Module, two: bool) -> torch.optim.AdamW:
        if not two:
            return adamw(model)
        body, head = model.bert.parameters(), model.classifier.parameters()
        return torch.optim.AdamW([{"params": list(body), "lr": 1e-4}, {"params": list(head)}], lr=1e-3)

    model = copy.deepcopy(tiny_bert)
    saving = {"save_folder": str(tmp_path), "save_interval": "2ba"}
    make_trainer([FusedAdamW()], model=model, optimizer=groups(model, joined), **saving).fit()
    with pytest.raises(ConflictError, match=r"other groups, and lr differs.*no_decay_on_bias_and_norm"):
        make_trainer([FusedAdamW()], optimizer=groups(tiny_bert, not joined), load_path=str(tmp_path / FILE))


@pytest.mark.filterwarnings("ignore:.* is not in the state_dict:UserWarning")  # Composer's word of what was ignored
@pytest.mark.parametrize("keys", ["state/optimizers", "state/optimizers/*", "state/optimizers/AdamW/state/*"])
@pytest.mark.parametrize("cls", CLASSES)
def test_a_state_that_the_user_has_ignored_is_not_missed(
    cls, keys: str, make_trainer, tiny_bert, tmp_path, caplog
) -> None:
    if keys.endswith("state/*") and cls not in (ForeachAdamW, FusedAdamW):
        pytest.skip("an entry of another optimizer: refused as before")
    saving = {"save_folder": str(tmp_path), "save_interval": "2ba"}
    make_trainer(model=copy.deepcopy(tiny_bert), **saving).fit()
    with caplog.at_level(logging.WARNING, "composer_speedups"):
        trainer = make_trainer([cls()], load_path=str(tmp_path / FILE), load_ignore_keys=[keys])
    assert sum("moments begin anew" in r.getMessage() for r in caplog.records) == 1
    trainer.fit()
    assert int(trainer.state.timestamp.batch) == 4 and len(trainer.state.optimizers[0].state) > 0


def test_a_file_saved_without_the_optimizer_loads(make_trainer, tiny_bert, tmp_path) -> None:
    saving = {"save_folder": str(tmp_path), "save_interval": "2ba", "save_ignore_keys": ["state/optimizers"]}
    make_trainer([FusedAdamW()], model=copy.deepcopy(tiny_bert), **saving).fit()
    make_trainer([FusedAdamW()], load_path=str(tmp_path / FILE)).fit()


@pytest.mark.filterwarnings("ignore:.* is not in the state_dict:UserWarning")  # Composer's word for the same
def test_one_entry_ignored_does_not_hide_another_optimizer(make_trainer, tiny_bert, tmp_path) -> None:
    model = copy.deepcopy(tiny_bert)
    saving = {"save_folder": str(tmp_path), "save_interval": "2ba"}
    make_trainer(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), **saving).fit()
    with pytest.raises(ConflictError, match="holds no state of torch AdamW"):
        make_trainer([FusedAdamW()], load_path=str(tmp_path / FILE), load_ignore_keys=["state/rank_zero_seed"])


def test_a_trainer_that_could_not_load_is_not_kept(make_trainer, tiny_bert, tmp_path) -> None:
    import gc
    import weakref

    algorithm, states = FusedAdamW(), []
    install = algorithm.install
    algorithm.install = lambda state, logger: (states.append(weakref.ref(state)), install(state, logger))
    with pytest.raises(FileNotFoundError):
        make_trainer([algorithm], load_path=str(tmp_path / "none.pt"))
    gc.collect()
    assert states[0]() is None


@pytest.mark.parametrize("saved", [True, False], ids=["from_two", "from_one"])
def test_under_ddp_a_callback_may_load_other_groups(exchanged, saved: bool) -> None:
    """Composer has put DDP around the model then, and every name begins with that."""
    found, other = exchanged["two groups loaded as one" if saved else "one group loaded as two"]
    assert found == other
    assert [decay for _, decay in found] == ([0.01] if saved else [0.01, 0.0])


@pytest.mark.parametrize("saved", [False, True])
def test_adafactors_scale_is_what_was_asked_for(saved: bool, make_trainer, tiny_bert, tmp_path, caplog) -> None:
    start = copy.deepcopy(tiny_bert)
    whole_run(make_trainer, tiny_bert, [Adafactor(scale_parameter=saved)], tmp_path)
    optimizer = adamw(start)
    with caplog.at_level(logging.WARNING, "composer_speedups"):
        make_trainer(
            [Adafactor(scale_parameter=not saved)], model=start, optimizer=optimizer, load_path=str(tmp_path / FILE)
        )
    assert [group["eps"] for group in optimizer.param_groups] == [(1e-15, 1.0 if saved else 1e-3)]
    assert caplog.text.count("was saved with another scale_parameter") == 1
