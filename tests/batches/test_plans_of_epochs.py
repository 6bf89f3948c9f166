"""The plans of an epoch, and trimming, without a Trainer."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from composer_speedups.batches.loaders import check_loader, sample_lengths
from composer_speedups.batches.plans import LengthGroupedSampler, TokenBudgetSampler
from composer_speedups.batches.trimming import TrimPadding
from composer_speedups.errors import SpeedUpUnavailable

LENGTHS = np.random.default_rng(0).integers(3, 200, 1003)


class Rows(torch.utils.data.Dataset):
    def __init__(self, lengths) -> None:
        self.lengths = np.asarray(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((int(self.lengths[index]),), index + 1)}


def grouped(ranks: int = 1, rank: int = 0, drop_last: bool = False, pool: int = 10, lengths=LENGTHS, size: int = 8):
    return LengthGroupedSampler(
        Rows(lengths), lengths, batch_size=size, pool=pool, seed=3, drop_last=drop_last, num_replicas=ranks, rank=rank
    )


def budget(ranks: int = 1, rank: int = 0, tokens: int = 2000, lengths=LENGTHS):
    return TokenBudgetSampler(Rows(lengths), lengths, tokens=tokens, seed=3, num_replicas=ranks, rank=rank)


@pytest.mark.parametrize("size, rows", [(8, 1003), (8, 1000), (1003, 1003), (2000, 1003), (1, 7)])
def test_grouped_epoch_has_every_sample_once(size: int, rows: int) -> None:
    for epoch in range(3):
        sampler = grouped(lengths=LENGTHS[:rows], size=size)
        sampler.set_epoch(epoch)
        assert sorted(sampler) == list(range(rows)) and len(sampler) == rows


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_share_a_grouped_epoch(ranks: int, drop_last: bool) -> None:
    shares = [list(grouped(ranks, rank, drop_last)) for rank in range(ranks)]
    plain = DistributedSampler(Rows(LENGTHS), num_replicas=ranks, rank=0, drop_last=drop_last)
    together = sorted(i for share in shares for i in share)
    assert {len(share) for share in shares} == {len(grouped(ranks, 0, drop_last))}
    if drop_last:  # whole batches only, none twice
        assert len(shares[0]) == len(LENGTHS) // (8 * ranks) * 8 and len(set(together)) == len(together)
    else:
        assert set(together) == set(range(len(LENGTHS))) and len(together) == len(plain) * ranks
    # Longest samples of the ranks' batches are neighbours in length.
    widths = np.array([[LENGTHS[share[i : i + 8]].max() for i in range(0, 320, 8)] for share in shares])
    assert np.mean(widths.max(0) - widths.min(0)) < 3


def test_grouping_leaves_little_padding_and_stays_random() -> None:
    def padding(batches) -> float:
        return 1 - LENGTHS.sum() / sum(int(LENGTHS[b].max()) * len(b) for b in batches)

    sampler = grouped()
    first = sampler.batches()
    random = np.random.default_rng(1).permutation(len(LENGTHS))
    assert padding(first) < 0.1 < 0.35 < padding([random[i : i + 8] for i in range(0, 1003, 8)])
    sampler.set_epoch(1)
    second = sampler.batches()
    assert {frozenset(b) for b in first}.isdisjoint({frozenset(b) for b in second})
    means = np.array([LENGTHS[b].mean() for b in first])
    # No trend of length over the epoch: the rank correlation of 126 independent values has a deviation of 0.09.
    assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.3
    again = iter(list(grouped()))
    assert all({next(again) for _ in b} == set(b.tolist()) for b in first)


@pytest.mark.parametrize("ranks", [1, 2])
def test_halves_of_a_grouped_batch_are_as_long(ranks: int) -> None:
    """Microbatches are cut out of a batch in its order, and each has a mean over its tokens."""
    order = LENGTHS[list(grouped(ranks, size=32, pool=1))][: 1003 // (32 * ranks) * 32].reshape(-1, 2, 16)
    first, second = order.sum((0, 2))
    # Of 15 batches or more; within one of pool 1 lengths deviate as those of all samples do, by 57.
    assert abs(first - second) < 4 * LENGTHS.std() * order.shape[0] ** 0.5 * 32**0.5


def test_what_is_dropped_is_random() -> None:
    """Dropping after the sort would drop the shortest samples in every epoch."""
    dropped = []
    for epoch in range(40):
        sampler = grouped(drop_last=True, pool=1000, size=100)
        sampler.set_epoch(epoch)
        dropped += sorted(set(range(1003)) - set(sampler))
    assert len(dropped) == 40 * 3
    assert abs(LENGTHS[dropped].mean() - LENGTHS.mean()) < 5 * LENGTHS.std() / 120**0.5


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_budget_epoch_has_every_sample_once_and_equal_tokens(ranks: int) -> None:
    steps = set()
    for epoch in range(5):
        shares = []
        for rank in range(ranks):
            sampler = budget(ranks, rank)
            sampler.set_epoch(epoch)
            shares.append(list(sampler))
            assert len(shares[-1]) == len(sampler)
        steps.add(len(sampler))
        assert sorted(i for share in shares for batch in share for i in batch) == list(range(1003))
        tokens = np.array([[LENGTHS[batch].sum() for batch in share] for share in shares])
        mean = LENGTHS.sum() / len(sampler)
        assert (tokens > 0).all()
        assert np.abs(tokens.sum(0) - mean).max() < LENGTHS.max()
        assert (tokens.max(0) - tokens.min(0)).max() <= LENGTHS.max()
    assert len(steps) == 1  # the same in all epochs, as schedules need it


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_ranks_share_keeps_the_random_order(ranks: int) -> None:
    """Dealt longest first and left so, a batch's first microbatch would hold its long samples, its last the short."""
    alone = TokenBudgetSampler(
        Rows(LENGTHS), LENGTHS, tokens=2000, seed=3, num_replicas=1, rank=0, together=2000 * ranks
    )
    for batch, shares in zip(alone, budget(ranks).batches(), strict=True):
        assert all(share == [i for i in batch if i in share] for share in shares)
        assert sorted(i for share in shares for i in share) == sorted(batch)


def test_all_ranks_split_a_step_into_as_many_microbatches() -> None:
    random = np.random.default_rng(5)
    larger = 0
    for _ in range(3000):
        most, samples = int(random.integers(1, 12)), random.integers(1, 60, random.integers(1, 5)).tolist()
        number = TokenBudgetSampler.microbatches(samples, most)
        parts = [torch.zeros(count).split(-(-count // number)) for count in samples]
        assert {len(split) for split in parts} == {number}
        above = max(len(part) for split in parts for part in split) > most
        if len(samples) == 1:
            assert number == -(-samples[0] // most) and not above
        possible = [
            n
            for n in range(1, min(samples) + 1)
            if all(-(-s // -(-s // n)) == n and -(-s // n) <= most for s in samples)
        ]
        assert above == (not possible) and (above or number == possible[0])
        larger += above
    assert 0 < larger < 3000
    assert TokenBudgetSampler.microbatches([16, 12, 14], 8) == 2


@pytest.mark.parametrize("batch", [8, 24, 40])
def test_the_default_budget_has_as_many_steps_on_any_number_of_ranks(batch: int) -> None:
    from composer_speedups import apply_token_budget_batches

    for rows in range(batch * 12 - 1, batch * 13 + 1, batch // 8):  # 12.5 batches, too
        steps = set()
        for ranks in (1, 2, 4, 8):
            rows_of = Rows(LENGTHS[:rows])
            sampler = DistributedSampler(rows_of, num_replicas=ranks, rank=0)
            try:
                steps.add(
                    len(apply_token_budget_batches(DataLoader(rows_of, batch_size=batch // ranks, sampler=sampler)))
                )
            except SpeedUpUnavailable:  # too few samples a batch for so many ranks
                assert ranks * 2 > batch // 4
        assert len(steps) == 1, (rows, steps)


def test_budget_that_cannot_work_says_what_would() -> None:
    with pytest.raises(SpeedUpUnavailable, match="take tokens_per_batch of at least 3") as error:
        budget(tokens=150)
    least = int(str(error.value).split("at least ")[1].split(",")[0])
    assert len(budget(tokens=least)) > 1
    for rows, ranks in itertools.product(range(9, 60), (1, 2)):  # also where the number of steps is rounded up
        lengths = LENGTHS[:rows]
        with pytest.raises(SpeedUpUnavailable) as error:
            budget(ranks, tokens=20, lengths=lengths)
        least = int(str(error.value).split("at least ")[1].split(",")[0])
        budget(ranks, tokens=least, lengths=lengths)
        with pytest.raises(SpeedUpUnavailable):
            budget(ranks, tokens=least - 2, lengths=lengths)  # one less may do, where a half is rounded down
    with pytest.raises(SpeedUpUnavailable, match="more samples"):
        budget(ranks=4, lengths=LENGTHS[:3], tokens=10_000)
    assert len(budget(tokens=10**9)) == 1


def test_lengths_of_all_kinds_of_samples() -> None:
    class Samples(list):
        pass

    assert sample_lengths(Rows([5, 2])).tolist() == [5, 2]
    assert sample_lengths(Subset(Rows([5, 2, 7]), [2, 0])).tolist() == [7, 5]
    masked = Samples(
        [{"input_ids": torch.zeros(9), "attention_mask": torch.tensor([1] * n + [0] * (9 - n))} for n in (4, 9)]
    )
    assert sample_lengths(masked).tolist() == [4, 9]
    assert sample_lengths(Samples([{"input_ids": [1, 2, 3]}])).tolist() == [3]
    choices = {"input_ids": [[1, 2, 3], [1, 2]], "attention_mask": [[1, 1, 1], [1, 0]]}  # not padded yet
    assert sample_lengths(Samples([choices])).tolist() == [4]
    assert sample_lengths(Samples([{"input_ids": choices["input_ids"]}])).tolist() == [5]
    assert sample_lengths(Samples([{"input_ids": torch.ones(1, 7)}])).tolist() == [7]
    with pytest.raises(SpeedUpUnavailable, match="`lengths`"):
        sample_lengths(Samples([(torch.zeros(3), 1)]))
    with pytest.raises(SpeedUpUnavailable, match="no token"):
        sample_lengths(Samples([{"input_ids": [1]}, {"input_ids": []}]))
    with pytest.raises(SpeedUpUnavailable, match="sample 1 has no token"):
        sample_lengths(Rows([5, 0]))
    with pytest.raises(SpeedUpUnavailable, match="has no sample"):
        sample_lengths(Samples())


def test_of_a_subset_only_its_samples_are_read() -> None:
    class Counting(list):
        read = 0

        def __getitem__(self, index):
            self.read += 1
            return {"input_ids": [1] * index}

    samples = Counting(range(100))
    assert sample_lengths(Subset(samples, [7, 3])).tolist() == [7, 3], "sample 0, which is empty, was left out"
    assert samples.read == 2
    nested = Subset(Subset(Rows([5, 0, 7, 9]), [3, 1, 0]), [0, 2])
    assert sample_lengths(nested).tolist() == [9, 5]


def test_loaders_that_cannot_be_regrouped() -> None:
    rows = Rows([3] * 8)

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    class Own(DataLoader):
        pass

    for loader, reason in (
        (Own(rows, batch_size=2), "is a Own"),
        ([1, 2], "is a list"),
        (DataLoader(Stream(), batch_size=2), "iterable"),
        (DataLoader(rows, batch_size=None), "own batches"),
        (DataLoader(rows, batch_sampler=BatchSampler(RandomSampler(rows), 7, False)), "give batch_size instead"),
        (DataLoader(rows, batch_sampler=budget(lengths=np.full(8, 3), tokens=12)), "own batches"),
        (DataLoader(rows, batch_size=2, sampler=SubsetRandomSampler([1, 2])), "SubsetRandomSampler"),
        (DataLoader(rows, batch_size=2, sampler=WeightedRandomSampler([1.0] * 8, 8)), "WeightedRandomSampler"),
    ):
        with pytest.raises(SpeedUpUnavailable, match=reason):
            check_loader(loader)


def batch(widths=(3, 9), width: int = 32) -> dict[str, torch.Tensor]:
    mask = (torch.arange(width)[None] < torch.tensor(widths)[:, None]).long()
    return {"input_ids": mask * 7, "attention_mask": mask, "labels": torch.arange(len(widths))}


def test_trims_what_is_padding_only() -> None:
    trimmed = TrimPadding(lambda b: b)(batch())
    assert trimmed["input_ids"].shape == trimmed["attention_mask"].shape == (2, 16)
    assert trimmed["labels"].tolist() == [0, 1]
    assert trimmed["attention_mask"].sum() == 12
    assert TrimPadding(lambda b: b)(batch((3, 32)))["input_ids"].shape == (2, 32)
    assert TrimPadding(lambda b: b, 64)(batch())["input_ids"].shape == (2, 32)  # never wider than it was
    assert TrimPadding(lambda b: b)(batch((0, 0)))["input_ids"].shape == (2, 8)
    left = batch()
    left = {k: v.flip(1) if v.dim() > 1 else v for k, v in left.items()}
    assert TrimPadding(lambda b: b)(left)["input_ids"].shape == (2, 32)  # padding on the left stays


def test_trims_labels_of_tokens_but_no_label_that_counts() -> None:
    full = batch()
    full["labels"] = torch.full((2, 32), -100)
    full["labels"][0, 1] = 5
    assert TrimPadding(lambda b: b)(dict(full))["labels"].shape == (2, 16)
    full["labels"][1, 25] = 5  # beyond the attention mask, but in the loss
    assert TrimPadding(lambda b: b)(dict(full))["labels"].shape == (2, 32)


def test_trims_soft_labels_and_positions_that_all_rows_share() -> None:
    soft = batch() | {"labels": torch.zeros(2, 32, 3), "position_ids": torch.arange(32)[None]}
    soft["labels"][0, 1] = 1 / 3
    out = TrimPadding(lambda b: b)(dict(soft))
    assert (out["input_ids"].shape, out["labels"].shape, out["position_ids"].shape) == ((2, 16), (2, 16, 3), (1, 16))
    soft["labels"][1, 25] = 1 / 3  # beyond the attention mask, but in the loss
    assert TrimPadding(lambda b: b)(dict(soft))["labels"].shape == (2, 32, 3)


def test_leaves_alone_what_may_not_be_per_token(caplog) -> None:
    for labels in (torch.ones(2, 32), torch.arange(2)):  # 32 numbers a sample: of its tokens, or of classes by chance
        out = TrimPadding(lambda b: b)(batch() | {"labels": labels})
        assert out["labels"] is labels and out["input_ids"].shape == (2, 32 if labels.dim() == 2 else 16)
    classes = batch() | {"labels": torch.ones(2, 5)}
    assert TrimPadding(lambda b: b)(classes)["input_ids"].shape == (2, 16)
    unknown = batch() | {"weights": torch.ones(2, 32)}
    with caplog.at_level("WARNING"):
        assert TrimPadding(lambda b: b)(dict(unknown))["input_ids"].shape == (2, 32)
    assert "weights" in caplog.text
    tensors = (torch.ones(2), torch.ones(2))
    assert TrimPadding(lambda b: b)(tensors) is tensors


def test_pickles_to_workers() -> None:
    collate = pickle.loads(pickle.dumps(TrimPadding(torch.utils.data.default_collate)))
    assert collate([{"input_ids": torch.ones(3)}])["input_ids"].shape == (1, 3)


# ---- several ranks


@pytest.fixture(scope="module")
def seen_on_two_ranks(request, tmp_path_factory):
    """Name of a loader -> epoch -> rank -> batches; made once for all of pytest's workers."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "accelerate"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += [str(Path(__file__).parents[1] / "accelerate_worker.py"), str(folder)]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            with open(folder / "log", "w") as log:
                subprocess.run(
                    words, env=environment | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log, timeout=300, check=False
                )
    assert (folder / "seen.json").exists(), (folder / "log").read_text()[-3000:]
    return json.loads((folder / "seen.json").read_text())


@pytest.mark.elsewhere
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["budget", "grouped"])
@pytest.mark.parametrize("loop", ["bare", "made before", "made after", "trainer"])
def test_two_ranks_see_every_sample_once_whoever_shares_them(loop: str, kind: str, seen_on_two_ranks) -> None:
    """In a bare loop the function shares; under Accelerate, and so the Hugging Face Trainer, `prepare` does."""
    epochs = seen_on_two_ranks[f"{loop} {kind}"]
    for ranks in epochs:
        assert len(ranks) == 2 and len(ranks[0]) == len(ranks[1]) == 6
        assert sorted(row for rank in ranks for batch in rank for row in batch) == list(range(96))
    assert epochs[0] != epochs[1], "each epoch has an order of its own"
