from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.models import ComposerModel, HuggingFaceModel
from small import bert_config
from test_length_grouped_batches import Indexed, train
from torch.utils.data import DataLoader
from transformers import BertForSequenceClassification, BertForTokenClassification

from composer_speedups import TokenBudgetBatches, apply_token_budget_batches
from composer_speedups.batches.loaders import sample_lengths
from composer_speedups.batches.plans import TokenBudgetSampler
from composer_speedups.errors import ConflictError, SpeedUpUnavailable


def test_equal_tokens_every_sample_once_and_no_warning(make_trainer) -> None:
    algorithm = TokenBudgetBatches(300)
    batches, trainer = train(make_trainer, [algorithm])
    steps = algorithm.evidence["changed"]
    assert len(batches) == 2 * steps == int(trainer.state.timestamp.batch)
    for epoch in (batches[:steps], batches[steps:]):
        rows = [tuple(row[row != 0].tolist()) for batch in epoch for row in batch]
        expected = [tuple(r["input_ids"][r["input_ids"] != 0].tolist()) for r in Indexed()]
        assert sorted(rows) == sorted(expected)
    tokens = torch.tensor([int((batch != 0).sum()) for batch in batches])
    mean = sum(int(r["attention_mask"].sum()) for r in Indexed()) / steps
    assert (tokens - mean).abs().max() < 64
    assert len({len(batch) for batch in batches}) > 1


def test_asking_for_another_epochs_samples_changes_nothing() -> None:
    lengths = sample_lengths(Indexed())
    sampler = TokenBudgetSampler(Indexed(), lengths, tokens=300, seed=3, num_replicas=1, rank=0)
    sampler.set_epoch(1)
    before, held = list(sampler), [sampler.samples_before(epoch, 3) for epoch in (0, 1, 5)]
    assert list(sampler) == before and sampler.epoch == 1
    assert held[1] == sum(map(len, before[:3])) and len(set(held)) > 1


def test_default_budget_keeps_the_number_of_steps(make_trainer) -> None:
    algorithm = TokenBudgetBatches()
    batches, _ = train(make_trainer, [algorithm], "1ep")
    assert algorithm.evidence["changed"] == algorithm.evidence["steps_before"] == len(batches) == 20


class Columns(Indexed):
    """The same, with each label in a row of its own, as some tokenizers' maps leave them."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        return sample | {"labels": sample["labels"].reshape(1)}


class Words(Indexed):
    """Every real token has a label."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        return sample | {"labels": torch.where(sample["attention_mask"].bool(), sample["input_ids"] % 3, -100)}


@pytest.mark.parametrize(
    ("weighting", "rows"),
    [("sample", Indexed), ("batch", Indexed), ("sample", Columns), ("sample", Words), ("batch", Words)],
)
@pytest.mark.parametrize("microbatch", [None, 3])
def test_every_sample_weighs_the_same(make_trainer, weighting: str, rows: type, microbatch: int | None) -> None:
    """With a learning rate of 0 gradients of an epoch add up to that of the mean over all samples, or all tokens."""
    torch.manual_seed(1)
    head = BertForTokenClassification if rows is Words else BertForSequenceClassification
    model = head(bert_config()).double()
    total = {}

    class Sum(torch.optim.SGD):
        def step(self, closure=None):
            loss = closure()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    total[name] = total.get(name, 0) + p.grad
            return loss

    algorithm = TokenBudgetBatches(300, weighting)
    loader = DataLoader(rows(), batch_size=8, shuffle=True)
    make_trainer(
        [algorithm], model=HuggingFaceModel(model), optimizer=Sum(model.parameters(), lr=0.0), train_dataloader=loader,
        device_train_microbatch_size=microbatch,
    ).fit()  # fmt: skip
    everything = torch.utils.data.default_collate(list(Words() if rows is Words else Indexed()))
    model.zero_grad()
    model(**everything).loss.backward()
    worst = max(
        float((total[name] / algorithm.evidence["changed"] - p.grad).abs().max() / p.grad.abs().max())
        for name, p in model.named_parameters() if p.grad is not None and float(p.grad.abs().max()) > 1e-12
    )  # fmt: skip
    # float64 throughout but for Composer's float32 accumulator of the loss, through which the gradient 1.0 passes,
    # and its factor of a microbatch: a few times 6e-8. Batches weighed alike are off by percents.
    assert worst < 1e-6 if weighting == "sample" else worst > 1e-2


class Tagged(Indexed):
    """A label a token, and some that do not count; short rows have more of those that do."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        ids, mask = sample["input_ids"], sample["attention_mask"]
        counts = (ids % (2 if mask.sum() < 30 else 5) == 0) & mask.bool()
        return sample | {"labels": torch.where(counts, ids % 3, -100)}


class Changed(Algorithm):
    """Changes batches as others do: labels that are chosen on the way, rows that are cut up or left out."""

    def __init__(self, how: str) -> None:
        self.how = how

    def match(self, event: Event, state: State) -> bool:
        return event is Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        batch = state.batch
        if self.how == "labels":
            chosen = batch["input_ids"] % torch.arange(2, 2 + len(batch["labels"]))[:, None] == 0
            batch["labels"] = torch.where(chosen, batch["labels"], -100)
        elif self.how == "rows in two":
            width = batch["input_ids"].shape[1] // 2
            state.batch = {key: torch.cat([v[:, :width], v[:, width : 2 * width]]) for key, v in batch.items()}
        else:
            state.batch = {key: value[::2].contiguous() for key, value in batch.items()}


@pytest.mark.parametrize("changed", ["", "labels", "rows in two", "half of the rows"])
@pytest.mark.parametrize("microbatch", [2, 3])
def test_microbatches_make_the_mean_over_the_batchs_tokens(make_trainer, microbatch: int, changed: str) -> None:
    budget = TokenBudgetBatches(300)
    others = [Changed(changed)] if changed else []
    found = []
    for size, algorithms in (
        (None, [budget, *others]),
        (microbatch, [budget, *others]),
        (microbatch, [*others, budget]),
    ):
        torch.manual_seed(1)
        model, seen = BertForTokenClassification(bert_config()).double(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def keep(optimizer, *_, seen=seen) -> None:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
            seen.append(torch.cat([g.flatten() for g in gradients if g is not None]))

        optimizer.register_step_post_hook(keep)
        make_trainer(
            algorithms, model=HuggingFaceModel(model), optimizer=optimizer, max_duration="5ba",
            train_dataloader=DataLoader(Tagged(), batch_size=8, shuffle=True), device_train_microbatch_size=size,
        ).fit()  # fmt: skip
        found.append(torch.stack(seen))
    assert found[0].shape[0] == 5
    # As above: 1.0 passes through float32. By samples, as Composer weighs them, it is off by tens of percents.
    for gradients in found[1:]:
        assert (gradients - found[0]).norm() < 1e-6 * found[0].norm()


class Losses(ComposerModel):
    """The same training, with the loss told in one way or another, or with batches as tuples."""

    def __init__(self, told: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model, self.told, self.sizes = BertForSequenceClassification(bert_config()), told, []

    def forward(self, batch):
        names = ("input_ids", "attention_mask", "labels")
        batch = dict(zip(names, batch, strict=True)) if isinstance(batch, tuple) else batch
        self.sizes.append(len(batch["labels"]))
        return self.model(**batch).loss

    def loss(self, outputs, batch):
        parts = {"a": outputs * 0.25, "b": outputs * 0.75}
        total = parts | {"total": parts["a"] + parts["b"]}
        return {"one": outputs, "parts": parts, "total": total, "tuple": tuple(parts.values())}[self.told]


def as_tuples(samples):
    return tuple(torch.stack([sample[k] for sample in samples]) for k in ("input_ids", "attention_mask", "labels"))


def train_losses(make_trainer, told: str, **options) -> tuple[Losses, Any]:
    model = Losses(told)
    collate = as_tuples if told == "one" and options.pop("tuples", False) else None
    loader = DataLoader(Indexed(), batch_size=8, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(
        [TokenBudgetBatches()], model=model, optimizer=optimizer, train_dataloader=loader, max_duration="4ba", **options
    )
    trainer.fit()
    return model, trainer


@pytest.mark.parametrize("told", ["parts", "total", "tuple"])
def test_a_loss_told_in_parts_is_weighed_once(make_trainer, told: str) -> None:
    found, expected = (train_losses(make_trainer, name)[0].state_dict() for name in (told, "one"))
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_batches_as_tuples_stay_whole_and_a_later_fit_may_ask_for_microbatches(make_trainer) -> None:
    model, trainer = train_losses(make_trainer, "one", tuples=True)
    assert len(model.sizes) == 4 and len(set(model.sizes)) > 1 and trainer.state.device_train_microbatch_size == 8
    model.sizes.clear()
    trainer.fit(duration="4ba", device_train_microbatch_size=2)
    assert max(model.sizes) == 2 and len(model.sizes) > 8 and trainer.state.device_train_microbatch_size == 2
    model.sizes.clear()
    loader = DataLoader(Indexed(), batch_size=8, shuffle=True, collate_fn=as_tuples)
    trainer.fit(train_dataloader=loader, duration="4ba", device_train_microbatch_size=8, reset_time=True)
    assert len(model.sizes) == 4, "another loader, whole batches again"


def weights_of_samples(algorithm: TokenBudgetBatches, ranks: int, token_labels: bool) -> list[list[list[float]]]:
    """By batch and rank, the weights of its samples in the gradient of an epoch, under Composer's DDP."""
    lengths = sample_lengths(Indexed())
    samplers = [
        TokenBudgetSampler(Indexed(), lengths, tokens=150, seed=3, num_replicas=ranks, rank=rank)
        for rank in range(ranks)
    ]
    found = []
    for step, batch in enumerate(samplers[0].batches()):
        counts, weights = [len(share) for share in batch], []
        for rank, count in enumerate(counts):
            algorithm._epoch, algorithm._drawn = -1, step + 1  # the algorithm of another rank
            loss = torch.ones((), requires_grad=True)
            state = SimpleNamespace(
                dataloader=SimpleNamespace(batch_sampler=samplers[rank]),
                batch={"labels": torch.zeros(count, 9, dtype=torch.long) if token_labels else torch.zeros(count)},
                loss=loss * 1,
            )
            algorithm._weigh(state)
            # Composer weighs a rank's mean by its samples over the ranks' mean number; DDP takes the mean over ranks.
            (state.loss * count / (sum(counts) / ranks) / ranks).backward()
            weights.append([float(loss.grad) if token_labels else float(loss.grad) / count] * count)
        found.append(weights)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_sample_weighs_the_same_on_several_ranks(ranks: int) -> None:
    batches = weights_of_samples(TokenBudgetBatches(150), ranks, token_labels=False)
    weights = torch.tensor([weight for batch in batches for share in batch for weight in share])
    assert len(weights) == len(Indexed()) and len({len(share) for batch in batches for share in batch}) > 1
    torch.testing.assert_close(weights / len(batches), torch.full_like(weights, 1 / len(weights)))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_with_one_label_a_token_every_token_weighs_the_same_on_several_ranks(ranks: int) -> None:
    lengths = sample_lengths(Indexed())
    sampler = TokenBudgetSampler(Indexed(), lengths, tokens=150, seed=3, num_replicas=ranks, rank=0)
    tokens = [[int(lengths[share].sum()) for share in batch] for batch in sampler.batches()]
    assert len({count for batch in tokens for count in batch}) > 1, "shares of equal tokens show nothing"
    batches = weights_of_samples(TokenBudgetBatches(150), ranks, token_labels=True)
    for counts, weights in zip(tokens, batches, strict=True):
        for count, share in zip(counts, weights, strict=True):
            assert share[0] / len(batches) / count == pytest.approx(1 / lengths.sum())


def test_logged_loss_is_the_batchs_mean(make_trainer) -> None:
    from composer.loggers import InMemoryLogger

    losses = []
    for weighting in ("sample", "batch"):
        memory = InMemoryLogger()
        torch.manual_seed(1)
        _, _ = train(make_trainer, [TokenBudgetBatches(300, weighting)], "1ba", loggers=[memory])
        losses.append(float(memory.data["loss/train/total"][0][1]))
    assert losses[0] == losses[1]


def test_resumed_training_is_the_uninterrupted_one(make_trainer, tmp_path) -> None:
    _, whole = train(make_trainer, [TokenBudgetBatches(300)], save_folder=str(tmp_path), save_interval="20ba")
    path = sorted(tmp_path.glob("ep*-ba20*"))[0]
    _, resumed = train(make_trainer, [TokenBudgetBatches(300)], load_path=str(path))
    for one, other in zip(whole.state.model.parameters(), resumed.state.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_resumed_without_spinning_it_trains_on(make_trainer, tmp_path, monkeypatch) -> None:
    """The epoch's batches come from its first one again, and their own numbers of samples count, not later ones'."""
    train(make_trainer, [TokenBudgetBatches(300)], "7ba", save_folder=str(tmp_path), save_interval="7ba")
    weigh, sizes = TokenBudgetBatches._weigh, []

    def seen(self, state) -> None:
        sizes.append(len(state.batch["labels"]))
        weigh(self, state)

    monkeypatch.setattr(TokenBudgetBatches, "_weigh", seen)
    algorithm, checkpoint = TokenBudgetBatches(300), str(tmp_path / "ep0-ba7-rank0.pt")
    batches, _ = train(make_trainer, [algorithm], "2ep", load_path=checkpoint, spin_dataloaders=False)
    assert len(batches) == 2 * algorithm.evidence["changed"]
    assert sizes == [len(batch) for batch in batches]  # each a single microbatch


def test_checkpoints_load_with_and_without_it_in_mid_epoch(make_trainer, tmp_path, caplog, monkeypatch) -> None:
    """Without it is for whoever resumes to know: there is nobody to say so."""
    for name, algorithms in (("stock", []), ("budget", [TokenBudgetBatches(300)])):
        folder = str(tmp_path / name)
        train(make_trainer, algorithms, "1ep", save_folder=folder, save_interval="7ba", save_num_checkpoints_to_keep=9)
    with caplog.at_level(logging.WARNING, "composer_speedups"):
        train(make_trainer, [], "1ep", load_path=str(tmp_path / "budget/ep0-ba7-rank0.pt"))
        assert "samples may come twice" not in caplog.text
        algorithm = TokenBudgetBatches(300)
        _, trainer = train(make_trainer, [algorithm], "1ep", load_path=str(tmp_path / "stock/ep0-ba7-rank0.pt"))
    assert caplog.text.count("in the middle of epoch 0 with other batches than token_budget_batches") == 1
    assert int(trainer.state.timestamp.batch) == algorithm.evidence["changed"]
    caplog.clear()  # by chance as many samples as the budget's batches have
    monkeypatch.setattr(TokenBudgetSampler, "samples_before", lambda *_: int(trainer.state.timestamp.sample_in_epoch))
    train(make_trainer, [TokenBudgetBatches()], "1ep", load_path=str(tmp_path / "stock/ep0-ba7-rank0.pt"))
    assert caplog.text.count("in the middle of epoch 0 with other batches") == 1
    with pytest.raises(ConflictError, match=r"on 1 rank, and here an epoch has \d+ on 1: samples would come twice"):
        train(make_trainer, [TokenBudgetBatches(600)], "1ep", load_path=str(tmp_path / "budget/ep0-ba7-rank0.pt"))
    caplog.clear()
    end = next((tmp_path / "budget").glob("ep1-*"))
    train(make_trainer, [TokenBudgetBatches(600)], "2ep", load_path=str(end))  # nothing of that epoch is left
    assert "samples may come twice" not in caplog.text


def test_automatic_microbatches_are_for_one_rank() -> None:
    """A rank with more samples than the first size tried would have one microbatch more, and wait for the others."""
    for ranks in (1, 2):
        sampler = TokenBudgetSampler(
            Indexed(), sample_lengths(Indexed()), tokens=300, seed=3, num_replicas=ranks, rank=0
        )
        state = SimpleNamespace(
            dataloader=SimpleNamespace(batch_sampler=sampler), auto_microbatching=True,
            timestamp=SimpleNamespace(batch_in_epoch=0), device_train_microbatch_size=8, algorithms=[],
        )  # fmt: skip
        if ranks == 1:
            TokenBudgetBatches(300).on_event(Event.FIT_START, state, None)
            continue
        with pytest.raises(SpeedUpUnavailable, match="give a number"):
            TokenBudgetBatches(300).on_event(Event.FIT_START, state, None)


def test_function_form() -> None:
    loader = apply_token_budget_batches(DataLoader(Indexed(), batch_size=8), 300, seed=2)
    first = [batch["input_ids"][:, 0].tolist() for batch in loader]
    assert len(first) == len(loader) and apply_token_budget_batches(loader) is loader
    loader.batch_sampler.set_epoch(1)
    assert [batch["input_ids"][:, 0].tolist() for batch in loader] != first


def test_warns_where_all_samples_are_equally_long(make_trainer) -> None:
    samples = [{"input_ids": torch.ones(8, dtype=torch.long), "attention_mask": torch.ones(8), "labels": 1}] * 16
    with pytest.warns(NoEffectWarning, match="all 16 samples have 8 tokens"):
        train(make_trainer, [TokenBudgetBatches()], "1ep", loader=DataLoader(samples, batch_size=8))


def test_two_weightings_are_refused(make_trainer) -> None:
    options = {"train_dataloader": DataLoader(Indexed(), batch_size=8), "accumulate_train_batch_on_tokens": True}
    trainer = make_trainer([TokenBudgetBatches()], **options)
    with pytest.raises(ConflictError, match=r"accumulate_train_batch_on_tokens.*Leave that out, or set weighting"):
        trainer.fit()
    assert trainer.state.timestamp.batch == 0
    trainer = make_trainer([TokenBudgetBatches(weighting="batch")], **options)
    trainer.fit(duration="1ba")
    assert trainer.state.timestamp.batch == 1


@pytest.mark.parametrize(
    "arguments, error",
    [
        ({"tokens_per_batch": 0}, ValueError),
        ({"tokens_per_batch": 1.5}, TypeError),
        ({"weighting": "token"}, ValueError),
        ({"multiple_of": -8}, ValueError),
    ],
)
def test_arguments_are_checked(arguments: dict, error: type) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        TokenBudgetBatches(**arguments)


def test_a_fit_that_was_broken_off_leaves_nothing_to_another_trainer(make_trainer) -> None:
    """Its microbatch may be, by chance, the one that the other asks for."""
    algorithm = TokenBudgetBatches(300)
    algorithm._set, algorithm._asked = 3, 8
    sizes = []
    algorithm_weighs = algorithm._weigh
    algorithm._weigh = lambda state: (sizes.append(len(state.batch["labels"])), algorithm_weighs(state))
    train(make_trainer, [algorithm], "1ep", device_train_microbatch_size=3)
    assert sizes and max(sizes) <= 3
