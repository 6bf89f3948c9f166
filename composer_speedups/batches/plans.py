"""Plans of an epoch: which samples make which batch, and on which rank.

Everything here is decided by (seed, epoch), the same on every rank, so that a resumed run goes on with the
batches that it would have had. The samplers are `DistributedSampler`s, to which Composer and others call
`set_epoch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Dataset, DistributedSampler

from composer_speedups.errors import SpeedUpUnavailable

__all__ = ["LengthGroupedSampler", "TokenBudgetSampler", "padding_share"]


class LengthGroupedSampler(DistributedSampler):
    """Order of samples in which every `batch_size` on end are of similar length, and batches come in random order.

    An epoch is shuffled, cut into pools of `pool` batches, each pool sorted by length and cut into batches, and the
    batches of all pools are shuffled. A batch left over at the end is made of random samples. The ranks share each
    batch as cards are dealt, so that their longest samples are neighbours in length, and shuffle their share: where it
    is split into microbatches, each with a mean over its tokens, those of short samples would else weigh more.
    """

    def __init__(
        self, dataset: Dataset, lengths: np.ndarray, *, batch_size: int, pool: int, seed: int, drop_last: bool,
        num_replicas: int, rank: int,
    ) -> None:  # fmt: skip
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, seed=seed, drop_last=drop_last)
        self.lengths, self.batch_size, self.pool = lengths, batch_size, pool
        together = batch_size * num_replicas
        if drop_last:
            self.num_samples = len(lengths) // together * batch_size
        else:
            self.num_samples = math.ceil(len(lengths) / num_replicas)
        if not self.num_samples:
            raise SpeedUpUnavailable(
                f"the dataset has {len(lengths)} samples, a batch {together}, and drop_last=True leaves none: make "
                "batch_size smaller"
            )
        self.total_size = self.num_samples * num_replicas

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng((self.seed, self.epoch, self.rank))
        shares = (batch[self.rank :: self.num_replicas] for batch in self.batches())
        return (int(i) for share in shares for i in random.permutation(share))

    def batches(self) -> list[np.ndarray]:
        """The epoch's batches, of all ranks together."""
        random = np.random.default_rng((self.seed, self.epoch))
        order = random.permutation(len(self.lengths))
        # As DistributedSampler does without drop_last, a few samples come twice if the ranks could not share evenly.
        order = np.resize(order, self.total_size)
        together = self.batch_size * self.num_replicas
        whole = len(order) // together * together
        batches: list[np.ndarray] = []
        for start in range(0, whole, self.pool * together):
            pool = order[start : min(start + self.pool * together, whole)]
            pool = pool[np.argsort(-self.lengths[pool], kind="stable")]
            batches += np.split(pool, len(pool) // together)
        batches = [batches[i] for i in random.permutation(len(batches))]
        return batches if whole == len(order) else [*batches, order[whole:]]


class TokenBudgetSampler(DistributedSampler):
    """Batches, as lists of indices, of about equally many tokens; every sample once in an epoch.

    The number of batches is the same in every epoch: the shuffled samples' tokens, end to end, are cut into that many
    equal stretches, and a sample belongs to the stretch that its middle lies in. So a batch has `tokens` tokens a
    rank on average and deviates by less than a sample. The ranks get equal shares, the longest samples dealt first; in
    each they are in the epoch's random order, so that microbatches, of equally many samples, differ by chance alone.

    Args:
        tokens: of a batch, on each rank.
        together: of a batch, on all ranks, where they do not depend on the number of ranks, as rounded `tokens` would.
    """

    def __init__(
        self, dataset: Dataset, lengths: np.ndarray, *, tokens: int, seed: int, num_replicas: int, rank: int,
        together: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, seed=seed)
        self.lengths, self.tokens = lengths, tokens
        total, longest = int(lengths.sum()), int(lengths.max())
        self.steps = max(1, round(total / (together or tokens * num_replicas)))
        if (self.steps > 1 and total / self.steps < (num_replicas + 1) * longest) or len(lengths) < num_replicas:
            most = max(1, total // ((num_replicas + 1) * longest))  # steps, to which their number is rounded
            least = 2 * total // ((2 * most + 1) * num_replicas) + 1
            raise SpeedUpUnavailable(
                f"batches of {tokens} tokens are too small for samples of up to {longest} tokens on {num_replicas} "
                f"rank{'s' * (num_replicas > 1)}: take tokens_per_batch of at least {least}, or more samples"
            )

    @property
    def sampler(self) -> TokenBudgetSampler:
        """Itself: around a batch sampler, Accelerate looks for `sampler.set_epoch`."""
        return self

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        return ([int(i) for i in shares[self.rank]] for shares in self.batches())

    def batches(self, epoch: int | None = None) -> list[list[list[int]]]:
        """For each batch of `epoch`, or of the present one, each rank's samples."""
        epoch = self.epoch if epoch is None else epoch
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.lengths))
        lengths = self.lengths[order]
        middle = np.cumsum(lengths) - lengths / 2
        stretch = np.minimum((middle * self.steps / lengths.sum()).astype(np.int64), self.steps - 1)
        cuts = np.searchsorted(stretch, np.arange(1, self.steps))
        return [self._share(batch) for batch in np.split(order, cuts)]

    def sizes(self) -> tuple[list[list[int]], list[float]]:
        """Of each of the epoch's batches: each rank's number of samples; this rank's tokens over the mean number."""
        batches = self.batches()
        samples = [[len(share) for share in batch] for batch in batches]
        mean = self.lengths.sum() / self.steps / self.num_replicas
        return samples, [float(self.lengths[batch[self.rank]].sum() / mean) for batch in batches]

    def samples_before(self, epoch: int, step: int) -> int:
        """How many samples, of all ranks, `epoch` has in its first `step` batches."""
        return sum(len(share) for batch in self.batches(epoch)[:step] for share in batch)

    @staticmethod
    def microbatches(samples: Sequence[int], most: float) -> int:
        """Into how many microbatches all ranks split a step that has `samples` on them, one size on each rank.

        All must do as many: under FSDP, and where DDP reduces after each, a rank with more would wait for the others
        forever. It is the least number that leaves at most `most` samples in each; where no number does, the next
        smaller one that all can do: 2 samples make no 5 microbatches, and 5 samples, in equal numbers, no 4.

        >>> TokenBudgetSampler.microbatches([5, 8], 4), TokenBudgetSampler.microbatches([2, 20], 4)
        (2, 2)
        >>> TokenBudgetSampler.microbatches([5, 7], 2)
        3
        """
        wanted, possible = max(math.ceil(count / most) for count in samples), min(samples)
        for number in (*range(wanted, possible + 1), *range(min(wanted, possible), 1, -1)):
            if all(math.ceil(count / math.ceil(count / number)) == number for count in samples):
                return number
        return 1

    def _share(self, batch: np.ndarray) -> list[list[int]]:
        if self.num_replicas == 1:
            return [batch.tolist()]
        shares: list[list[int]] = [[] for _ in range(self.num_replicas)]
        held = [0] * self.num_replicas
        for i in batch[np.argsort(-self.lengths[batch], kind="stable")]:
            least = held.index(min(held))
            shares[least].append(int(i))
            held[least] += int(self.lengths[i])
        place = {int(i): number for number, i in enumerate(batch)}
        return [sorted(share, key=place.__getitem__) for share in shares]


def padding_share(lengths: np.ndarray, batches: Sequence[np.ndarray], multiple_of: int) -> float:
    """Which part of the columns of these batches, padded to their longest sample, is padding."""
    longest = [-(-int(lengths[batch].max()) // multiple_of) * multiple_of for batch in batches]
    wide = sum(width * len(batch) for width, batch in zip(longest, batches, strict=True))
    return 1 - sum(int(lengths[batch].sum()) for batch in batches) / wide
