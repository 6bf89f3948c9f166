"""`composer_speedups/packed/packing.py`: tokens without padding and back, and counts that travel with their mask."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from composer.devices.device import Device
from splits import SPLITS
from unpadded import LENGTH, ROWS, batch

from composer_speedups.packed.packing import (
    COUNTS,
    Holed,
    OnHost,
    Packing,
    Valued,
    count_on_host,
    count_tokens,
    counts_of,
    hand_over,
)


@pytest.mark.parametrize("kind", ["right", "left", "holes", "full"])
def test_there_and_back(kind: str) -> None:
    mask = batch("Model", kind=kind)["attention_mask"]
    packing, x = Packing.of(mask, count_tokens(mask)), torch.randn(ROWS, LENGTH, 3)
    assert torch.equal(packing.pack(x), x[mask.bool()])
    assert torch.equal(packing.pad(packing.pack(x)), x * mask[..., None])
    assert packing.lengths.host.tolist() == mask.sum(1).tolist()


@pytest.mark.parametrize("kind", ["right", "left", "holes", "full"])
def test_filled_up(kind: str) -> None:
    mask = batch("Model", kind=kind)["attention_mask"]
    packing, x = Packing.of(mask, count_tokens(mask), 32), torch.randn(ROWS, LENGTH, 3)
    packed, real = packing.pack(x), int(mask.sum())
    assert len(packed) == packing.lengths.host.sum() == packing.lengths.cumulative[-1] == -(-real // 32) * 32
    assert torch.equal(packed[:real], x[mask.bool()])
    assert torch.equal(packing.pad(packed), x * mask[..., None])
    first = x[torch.arange(ROWS), mask.argmax(1)]
    assert torch.equal(packing.first(packed), first)
    filled = packing.lengths.host[ROWS:].tolist()
    assert sum(filled) == -real % 32 and max(filled) <= LENGTH, "attention costs the square of a sequence"
    assert len(filled) == -(-32 // LENGTH), "as many whatever is filled: a graph has them in it"
    assert packing.ones().host.tolist() == [1] * ROWS + [0] * len(filled)
    assert len(Packing.of(mask, count_tokens(mask), 10**6).lengths.host) == 2 * ROWS, "no more than can be filled"
    assert packing.steady().lengths.longest == LENGTH >= packing.lengths.longest


def test_counts_travel_with_their_mask_only() -> None:
    inputs = {"attention_mask": torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])}
    assert count_on_host(inputs) and inputs[COUNTS].counts() == [2, -2, 0]
    inputs["attention_mask"] = mask = inputs["attention_mask"].to("meta")  # a device that cannot even be asked
    assert hand_over(inputs) and COUNTS not in inputs
    assert counts_of(mask) == [2, -2, 0]
    assert count_on_host(inputs) and inputs.pop(COUNTS).counts() == [2, -2, 0], "no need to count again"
    for other in (mask.clone(), mask[:, :], mask.mul_(1)):  # another one, a part, and the same changed in place
        with pytest.raises((NotImplementedError, RuntimeError)):
            counts_of(other)
    assert not hand_over(inputs) and not hand_over([1])


@pytest.mark.parametrize("cut", [lambda mask: mask[:, :2], lambda mask: mask[:2]], ids=["length", "rows"])
def test_counts_that_do_not_fit_their_mask_are_not_taken(cut) -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
    inputs = {"attention_mask": cut(mask).to("meta"), COUNTS: OnHost.of(count_tokens(mask))}
    hand_over(inputs)
    with pytest.raises((NotImplementedError, RuntimeError)):
        counts_of(inputs["attention_mask"])


def test_on_the_host_they_are_counted_again() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
    inputs = {"attention_mask": mask.flip(0), COUNTS: OnHost.of(count_tokens(mask))}
    hand_over(inputs)
    assert counts_of(inputs["attention_mask"]) == [1, 2, 3]


def test_in_inference_mode_they_are_counted_when_asked_for() -> None:
    """There nothing tells whether a tensor was changed."""
    with torch.inference_mode():
        inputs = {"attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
        assert count_on_host(inputs) and hand_over(inputs) and COUNTS not in inputs
        assert counts_of(inputs["attention_mask"]) == [3, 2]
        inputs["attention_mask"][0, 2] = 0
        assert counts_of(inputs["attention_mask"]) == [2, 2]
    assert counts_of(inputs["attention_mask"]) == [2, 2]


@pytest.mark.parametrize("split", ["composer", "tensors", "rows", "named", "lists"])
def test_they_come_through_whatever_splits_a_batch(split: str) -> None:
    """To a device that cannot even be asked. A batch that is made anew, without them, is counted there."""
    batch = {"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 0, 0]]), "labels": torch.ones(4)}
    assert count_on_host(batch)
    parts = SPLITS[split](batch, 2)
    assert len(parts) == 2
    for part, expected in zip(parts, ([3, Holed(2)], [-2, 1]), strict=True):
        sent = Device.batch_to_device(SimpleNamespace(tensor_to_device=lambda x: x.to("meta")), copy.deepcopy(part))
        assert hand_over(sent) == (split != "named") and COUNTS not in sent
        if split != "named":
            counts = counts_of(sent["attention_mask"])
            assert counts == expected and list(map(type, counts)) == list(map(type, expected))


def test_what_kind_of_mask_it_was_travels_with_the_counts() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 2, 0], [0, 3, 1], [2, 0, 1]])
    kinds = [int, Holed, Valued, Valued, Valued]
    for given in (mask, mask.to(torch.uint8), mask.half()):
        counts = count_tokens(given)
        assert counts == OnHost.of(counts).counts() == [2, 2, 2, -2, 2]
        assert list(map(type, counts)) == list(map(type, OnHost.of(counts).counts())) == kinds
    assert set(map(type, count_tokens(mask != 0))) == {int, Holed}


def test_strange_batches_are_left_alone() -> None:
    four = {"attention_mask": torch.ones(1, 1, 2, 2)}
    assert not count_on_host([1]) and not count_on_host(four) and list(four) == ["attention_mask"]
