from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from composer_speedups.tasks.data import Lengths, MaskCollator, PadCollator, TokenDataset

SPECIAL = (0, 1, 2, 3, 4)  # [PAD] [UNK] [CLS] [SEP] [MASK]
PAD, UNK, CLS, SEP, MASK = SPECIAL
VOCABULARY = 1000


def random_rows(count: int, longest: int = 64, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [[CLS, *random.integers(5, VOCABULARY, random.integers(1, longest - 1)).tolist(), SEP] for _ in range(count)]


def dataset(count: int = 40) -> TokenDataset:
    return TokenDataset.of(random_rows(count), [i % 3 for i in range(count)])


def masker(**changes) -> MaskCollator:
    values = dict(
        pad_id=PAD, length=64, mask_id=MASK, special=SPECIAL, replacements=np.arange(5, VOCABULARY), seed=7
    )  # fmt: skip
    return MaskCollator(**(values | changes))


def test_samples_come_back_as_they_were(tmp_path: Path):
    rows = random_rows(20)
    data = TokenDataset.of(rows, list(range(20)))
    data.save(tmp_path / "d")
    stored = TokenDataset.load(tmp_path / "d")
    for copy in (data, stored, pickle.loads(pickle.dumps(stored)), pickle.loads(pickle.dumps(data))):
        assert len(copy) == 20
        assert [copy[i]["input_ids"].tolist() for i in range(20)] == rows
        assert [copy[i]["label"] for i in range(20)] == list(range(20))
        assert copy.lengths.tolist() == [len(r) for r in rows]
    assert stored[np.int64(3)]["index"] == 3 and stored[-1]["index"] == 19
    assert stored[0]["input_ids"].dtype == torch.int64
    assert len(pickle.dumps(stored)) < 1000, "a worker must open the file, not receive a copy"
    with pytest.raises(IndexError):
        stored[20]


def test_nothing_written_to_a_sample_reaches_the_file(tmp_path: Path):
    dataset().save(tmp_path)
    first = TokenDataset.load(tmp_path)
    before = first[0]["input_ids"].clone()
    first[0]["input_ids"].zero_()
    assert torch.equal(first[0]["input_ids"], before)
    first.ids[0] = 99
    assert torch.equal(TokenDataset.load(tmp_path)[0]["input_ids"], before)


@pytest.mark.parametrize(
    ("length", "multiple", "width"), [(64, None, 64), (None, None, 11), (None, 8, 16), (None, 11, 11)]
)
def test_padding(length, multiple, width):
    data = TokenDataset.of([[2, 5, 3], [2, *range(5, 14), 3]], [1, 0])
    batch = PadCollator(PAD, length, multiple)([data[0], data[1]])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, width)
    assert batch["input_ids"][0].tolist() == [2, 5, 3] + [PAD] * (width - 3)
    assert batch["attention_mask"].sum(1).tolist() == [3, 11]
    assert batch["attention_mask"][0, :3].all() and not batch["attention_mask"][0, 3:].any()
    assert batch["labels"].tolist() == [1, 0]
    assert all(value.dtype == torch.int64 for value in batch.values())


def test_lengths():
    lengths = Lengths.of(np.array([10, 20, 60]), 60)
    assert (lengths.mean, lengths.longest) == (30, 60)
    assert lengths.padding == pytest.approx(0.5)


def test_masks_at_the_rates_of_bert():
    rows = [[CLS, UNK, *np.random.default_rng(i).integers(5, VOCABULARY, 126), SEP] for i in range(2000)]
    data = TokenDataset.of(rows, [0] * len(rows))
    batch = masker(length=129)([data[i] for i in range(len(data))])
    original = torch.stack([data[i]["input_ids"] for i in range(len(data))])
    asked = batch["labels"] != -100

    assert torch.equal(batch["labels"][asked], original[asked])
    assert torch.equal(batch["input_ids"][~asked], original[~asked])
    assert not asked[torch.isin(original, torch.tensor(SPECIAL))].any()
    # 126 tokens that may be masked: round(0.15 * 126) = 19 in each row, exactly.
    assert (asked.sum(1) == 19).all()

    n = int(asked.sum())  # 38,000
    new = batch["input_ids"][asked]
    masked = (new == MASK).sum().item() / n
    kept = (new == original[asked]).sum().item() / n
    # Binomial standard deviations: sqrt(.8 * .2 / n) = 0.0021 and sqrt(.1 * .9 / n) = 0.0015. Five of them.
    assert masked == pytest.approx(0.8, abs=0.0105)
    assert kept == pytest.approx(0.1 + 0.1 / (VOCABULARY - 5), abs=0.0077)
    swapped = new[(new != MASK) & (new != original[asked])]
    assert not torch.isin(swapped, torch.tensor(SPECIAL)).any()
    # Uniform over 995 ids: mean 502, standard deviation 995 / sqrt(12) / sqrt(3800) = 4.7. Five of them.
    assert swapped.float().mean().item() == pytest.approx((5 + VOCABULARY - 1) / 2, abs=24)
    # Places are uniform: each of 126 is asked 2000 * 19 / 126 = 302 times, standard deviation 16. Six of them.
    counts = asked.sum(0)[2:-1]
    assert counts.min() > 206 and counts.max() < 398


@pytest.mark.parametrize(("tokens", "asked"), [(1, 1), (3, 1), (10, 2), (20, 3), (100, 15)])
def test_asks_for_at_least_one_token(tokens: int, asked: int):
    row = np.array([CLS, *range(10, 10 + tokens), SEP])
    places, masked = masker().mask(row, 0, 0)
    assert len(places) == asked == len(set(places.tolist()))
    assert row.tolist() == [CLS, *range(10, 10 + tokens), SEP], "the sample itself must stay as it was"
    assert masked[0] == CLS and masked[-1] == SEP


def by_index(batches: list[dict[str, torch.Tensor]], order: list[int]) -> dict[int, tuple]:
    rows = [(ids, labels) for b in batches for ids, labels in zip(b["input_ids"], b["labels"], strict=True)]
    return {i: (ids.tolist(), labels.tolist()) for i, (ids, labels) in zip(order, rows, strict=True)}


def test_masks_depend_on_seed_epoch_and_index_only():
    data = dataset()
    order = list(range(len(data)))
    reference = by_index([masker()([data[i] for i in order])], order)

    shuffled = np.random.default_rng(1).permutation(order).tolist()
    batches = [masker()([data[i] for i in shuffled[k : k + 7]]) for k in range(0, len(shuffled), 7)]
    assert by_index(batches, shuffled) == reference

    def different(collator: MaskCollator) -> int:
        other = by_index([collator([data[i] for i in order])], order)
        return sum(other[i][1] != reference[i][1] for i in order)

    next_epoch = masker()
    next_epoch.set_epoch(1)
    # Rows of one or two tokens may fall on the same places; most rows are longer.
    assert different(next_epoch) > 30 and different(masker(seed=8)) > 30
    next_epoch.set_epoch(0)
    assert different(next_epoch) == 0


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_that_outlive_an_epoch_see_the_next_one(context: str, tmp_path: Path):
    dataset(12).save(tmp_path)
    data, collator = TokenDataset.load(tmp_path), masker()
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, collate_fn=collator, num_workers=1, persistent_workers=True, multiprocessing_context=context
    )
    for epoch in (0, 1, 2):
        collator.set_epoch(epoch)
        alone = masker()
        alone.set_epoch(epoch)
        expected = alone([data[i] for i in range(12)])
        seen = torch.cat([batch["input_ids"] for batch in loader])
        assert torch.equal(seen, expected["input_ids"]), f"epoch {epoch}"
    assert collator.epoch == 2


def test_each_epoch_masks_other_places():
    row, collator = np.arange(5, 505), masker()
    seen = [frozenset(collator.mask(row, epoch, index)[0].tolist()) for epoch in range(4) for index in range(4)]
    assert len(set(seen)) == 16
    overlap = [len(a & b) / 75 for a in seen for b in seen if a is not b]
    # Independent draws of 75 in 500 share 15 % (standard deviation of the mean over 120 pairs: 0.35 %).
    assert np.mean(overlap) == pytest.approx(0.15, abs=0.02)
