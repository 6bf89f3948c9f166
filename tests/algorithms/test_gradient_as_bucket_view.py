"""Gradients that lie in DDP's buckets: bit for bit those that do not, in half the memory, on two ranks."""

from __future__ import annotations

import pytest
import torch
from exchange_worker import data_of

from composer_speedups import GradientAsBucketView, apply_gradient_as_bucket_view
from composer_speedups.errors import SpeedUpUnavailable


@pytest.mark.parametrize("name", ["views", "views, unused looked for", "views, static graph"])
def test_bit_for_bit_and_once_in_memory(exchanged, name) -> None:
    """And the communication hook that was there stays: bf16's, without which nothing would be 16 bits wide."""
    one, two = exchanged[name]
    assert one["counts"] == [4, 0], "twice is once"
    for plain, views, other in zip(one["plain"], one["views"], two["views"], strict=True):
        assert torch.equal(plain, views) and torch.equal(views, other)
    assert torch.equal(one["views"][0], one["views"][0].bfloat16().float())
    assert one["plain storages"] == 4, "each has a place of its own"
    assert 1 < one["views storages"] < 4, "several lie in one bucket, of several"
    assert one["views bytes"] == one["plain bytes"] == 4 * sum(p.numel() for p in data_of(0)[0].parameters())


@pytest.mark.parametrize("name", ["views later", "views later, static graph", "views later, unused looked for"])
def test_between_two_passes_nothing_is_lost(exchanged, name) -> None:
    (plain, views), (_, other) = exchanged[name]
    assert all(map(torch.equal, plain, views))
    assert all(map(torch.equal, views, other)), "the ranks no longer exchange"
    assert not torch.equal(views[0], torch.zeros_like(views[0]))


def test_what_knows_its_buckets_is_refused(exchanged) -> None:
    said = exchanged["a built-in hook, views"]
    assert said.startswith("SpeedUpUnavailable: ") and "has the built-in communication hook" in said
    assert "Make it with gradient_as_bucket_view=True instead" in said


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("views in trainer", "plain trainer"),
        ("views in trainer, in parts", "plain trainer, in parts"),
        ("both in trainer", "trainer"),
        ("both in trainer, other order", "trainer"),
    ],
)
def test_in_composers_trainer(exchanged, name, plain) -> None:
    one, two = exchanged[name]
    assert torch.equal(one["weights"], two["weights"]), "ranks differ"
    assert torch.equal(one["weights"], exchanged[plain][0]["weights"])
    assert len(one["losses"]) == 4 and one["losses"] == exchanged[plain][0]["losses"]
    assert one["warned"] == [] and all(facts["changed"] > 30 for facts in one["evidence"])


def test_fsdp_is_refused_with_the_reason(exchanged) -> None:
    assert exchanged["views, fsdp2"].startswith("SpeedUpUnavailable: GradientAsBucketView() cannot be used under FSDP")


def test_one_process_has_nothing_to_exchange(make_trainer) -> None:
    with pytest.raises(
        SpeedUpUnavailable, match=r"one process exchanges no gradients: start several, as by ablate --ranks 2"
    ):
        make_trainer([GradientAsBucketView()])
    assert apply_gradient_as_bucket_view(torch.nn.Linear(2, 2)) == 0
