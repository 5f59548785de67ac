"""The endless seeded order of training samples, and the choice of held-out sources.

A position counts samples from the start of the run. Every epoch is a permutation of its own, made in two stages so
that a reader meets samples of one shard near each other: blocks of consecutive index entries are shuffled, then the
samples of every `BUFFER_BLOCKS` blocks in that order are shuffled together. A data set no larger than such a buffer is
shuffled whole. Only raw Philox output and stable sorts are used: numpy may change what `Generator.permutation` gives.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BUFFER_BLOCKS = 256  # 8,192 samples at the default block size: a window mixes many shards, a shard stays a few buffers


@dataclass(frozen=True, eq=False)
class Draws:
    """Consecutive draws of an order.

    Attributes:
        ids: int64 [count], sample ids.
        epochs: int64 [count], epoch of each draw, from 0.
        repeats: int64 [count], which of the sample's repeats within its epoch, from 0.
    """

    ids: NDArray[np.int64]
    epochs: NDArray[np.int64]
    repeats: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, indices: NDArray[np.int64]) -> "Draws":
        """The draws at `indices`, in that order."""
        return Draws(self.ids[indices], self.epochs[indices], self.repeats[indices])


def held_out_mask(sources: Sequence[str] | NDArray[Any], share: float, seed: int) -> NDArray[np.bool_]:
    """Which samples are held out of training, bool [n], by a hash of their source.

    All samples of one source fall on the same side, whatever else the index holds. With `share` > 0 at least one
    source is held out (that of the lowest hash), and never all.

    Raises:
        ValueError: If `share` is outside [0, 1), or is positive with a single source.
    """
    if not 0 <= share < 1:
        raise ValueError(f"held-out share must be in [0, 1), got {share}")
    if share == 0:
        return np.zeros(len(sources), np.bool_)
    names, source_ids = np.unique(np.asarray(sources, dtype=str), return_inverse=True)
    if len(names) < 2:
        raise ValueError(
            f"held-out share {share} needs at least two sources, the index has {len(names)}: add media, or set "
            "data.held_out_share=0"
        )
    hashes = np.array([_unit_hash(seed, str(name)) for name in names])
    held = hashes < share
    held[hashes.argmin()] = True
    held[hashes.argmax()] = False
    return np.asarray(held[source_ids.reshape(-1)], np.bool_)


def _unit_hash(seed: int, name: str) -> float:
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2.0**64


class EndlessOrder:
    """Concatenation of seeded permutations of the same samples, one an epoch, without end."""

    def __init__(
        self, ids: NDArray[np.int64], seed: int, block_size: int = 32, repeats: NDArray[np.int64] | None = None
    ) -> None:
        """Order over `ids`.

        Args:
            ids: int64 [m], sample ids in index order.
            seed: Seed of all epochs.
            block_size: Consecutive ids that are shuffled as one in the first stage.
            repeats: int64 [m], how often each sample comes in an epoch; None is once each.

        Raises:
            ValueError: If nothing is left to draw, a repeat is negative, or `block_size` is not positive.
        """
        counts = np.ones(len(ids), np.int64) if repeats is None else np.asarray(repeats, np.int64)
        if len(counts) != len(ids) or (counts < 0).any():
            raise ValueError(f"repeats must be one number >= 0 a sample: {len(ids)} samples, {len(counts)} repeats")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size} (schedule.order_block_size)")
        if not counts.sum():
            raise ValueError("no sample is left to train on: the order is empty")
        self.seed = seed
        self.block_size = block_size
        self._ids = np.repeat(np.asarray(ids, np.int64), counts)
        self._repeats = np.arange(len(self._ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._permutations: dict[int, NDArray[np.int64]] = {}

    @property
    def epoch_size(self) -> int:
        """Draws in one epoch."""
        return len(self._ids)

    @property
    def ids(self) -> NDArray[np.int64]:
        """int64 [epoch_size], sample ids of one epoch in index order, repeats included."""
        return self._ids

    @property
    def repeats(self) -> NDArray[np.int64]:
        """int64 [epoch_size], which of its sample's repeats each of `ids` is."""
        return self._repeats

    def window(self, start: int, count: int) -> Draws:
        """Draws at positions `start` to `start + count - 1`; they may span several epochs."""
        assert min(start, count) >= 0
        return self.at(np.arange(start, start + count, dtype=np.int64))

    def at(self, positions: NDArray[np.int64]) -> Draws:
        """Draws at `positions`, int64 [n], in that order."""
        epochs, offsets = np.divmod(positions, self.epoch_size)
        rows = np.empty(len(positions), np.int64)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            rows[in_epoch] = self._permutation(epoch)[offsets[in_epoch]]
        return Draws(self._ids[rows], epochs, self._repeats[rows])

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        """int64 [epoch_size], rows in the order of `epoch`. The two latest epochs stay in memory."""
        if epoch not in self._permutations:
            while len(self._permutations) > 1:
                self._permutations.pop(next(iter(self._permutations)))
            self._permutations[epoch] = self._shuffle(epoch)
        return self._permutations[epoch]

    def _random(self, name: str, epoch: int) -> np.random.Philox:
        key = hashlib.blake2b(f"{name}\0{self.seed}\0{epoch}".encode(), digest_size=16).digest()
        return np.random.Philox(key=int.from_bytes(key, "little"))

    def _shuffle(self, epoch: int) -> NDArray[np.int64]:
        random = self._random("order", epoch)
        num_blocks = -(-self.epoch_size // self.block_size)
        block_rank = np.empty(num_blocks, np.int64)
        block_rank[np.argsort(random.random_raw(num_blocks), kind="stable")] = np.arange(num_blocks)
        rows = np.arange(self.epoch_size)
        buffers = block_rank[rows // self.block_size] // BUFFER_BLOCKS
        return np.lexsort((random.random_raw(self.epoch_size), buffers)).astype(np.int64)


class CohortOrder(EndlessOrder):
    """An order of windows that are made of cohorts: samples of one length that come in one window together.

    Where a window's samples of one length are a multiple of the ranks, every rank has equal work; a few more and all
    ranks wait for some. So all samples of an epoch are sorted by length and cut into cohorts; of every stratum, which
    is as many cohorts of neighbouring lengths as there are windows, each window gets one by chance. Windows then differ
    in length as little as cohorts allow, however the index is laid out. What is short of a cohort is dealt one by one:
    the shortest samples, which fill gaps best. The end of an epoch and the start of the next make one window of what is
    left, cohorts of unlike lengths before others.

    It depends on lengths, window and cohort alone: not on ranks, costs or memory.
    """

    def __init__(self, order: EndlessOrder, num_tokens: NDArray[np.int64], window: int, cohort: int) -> None:
        """`order` in windows of `window` samples, in cohorts of `cohort`; `num_tokens` is int64 [samples], by id.

        Raises:
            ValueError: If `cohort` is not from 1 to `window`.
        """
        if not 1 <= cohort <= window:
            raise ValueError(f"schedule.lookahead={cohort} must be from 1 to schedule.samples_per_step={window}")
        super().__init__(order.ids, order.seed, order.block_size)
        self._repeats = order.repeats
        self._num_tokens, self._window, self._cohort = num_tokens[order.ids], window, cohort

    def _shuffle(self, epoch: int) -> NDArray[np.int64]:
        rows = super()._shuffle(epoch)
        size, window, cohort = self.epoch_size, self._window, self._cohort
        head = -epoch * size % window  # what the last window of the epoch before lacks
        num_windows = (size - head) // window
        if num_windows < 1:
            return rows
        random = self._random("cohorts", epoch)
        tokens = self._num_tokens[rows]
        longest_first = np.argsort(-tokens, kind="stable")
        num_strata, num_singles = divmod(window, cohort)
        num_spare, num_loose = divmod(size - num_windows * window, cohort)
        cohorts, shortest = np.split(longest_first, [(num_windows * num_strata + num_spare) * cohort])
        cohorts = cohorts.reshape(-1, cohort)
        spread = tokens[cohorts[:, 0]] - tokens[cohorts[:, -1]]
        unlike_first = np.lexsort((random.random_raw(len(cohorts)), -spread))
        kept = cohorts[np.sort(unlike_first[num_spare:])].reshape(num_strata, num_windows, cohort)
        singles = shortest[: len(shortest) - num_loose].reshape(num_singles, num_windows, 1)
        parts = []
        for strata in (kept, singles):
            drawn = random.random_raw(strata.shape[0] * num_windows).reshape(-1, num_windows)
            by_chance = np.argsort(drawn, axis=1, kind="stable")
            dealt = np.take_along_axis(strata, by_chance[:, :, None], axis=1)
            parts.append(dealt.transpose(1, 0, 2).reshape(num_windows, -1))
        left = np.concatenate([cohorts[unlike_first[:num_spare]].reshape(-1), shortest[len(shortest) - num_loose :]])
        left = np.sort(left)  # in the order of the shuffle
        dealt_rows: NDArray[np.int64] = rows[
            np.concatenate([left[:head], np.concatenate(parts, axis=1).reshape(-1), left[head:]])
        ]
        return dealt_rows
