"""Refits of the cost law to micro-batches as they run, and the speed of each rank beside the others."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from adaptiveload.scheduling.cost import AGAIN, IntArray, PowerCost, TwoTermCost
from adaptiveload.scheduling.fit import EXPONENT_RANGE, LAUNCH_FREE, FloatArray, relative_nnls, robust_loss

SAMPLED = 384  # micro-batches that a refit of the law sees
ENOUGH = 16  # and the fewest
LATEST = 16  # kept of each rank at the least: its median of times that scatter by 3 % is then good to 1 %
# Lengths that did not run lately must not be priced by chance: each length counts as this part of a measured
# micro-batch, at its old price times the factor by which the old law is off on the whole.
PRIOR_WEIGHT = 0.1
EXPONENT_STEP, EXPONENT_REACH = 0.02, 0.3
FLOOR_QUANTILES = (0.05, 0.1, 0.25, 0.5)  # of busy times: from where the launch floor is looked for, beside the old one
FLOOR_GAIN = 0.9  # another floor must earn its place
FEWEST_BOUND, FEWEST_ABOVE = 4, 6  # launch-bound micro-batches that tell a floor, others that tell the law
SLOW = 0.95  # a rank is slow below this part of the others' speed
FALSE_SLOW = 0.01  # refits in which scatter alone may make any rank slow; the more ranks, the surer of each
FEWEST_OF_RANK = 6  # micro-batches of a rank that tell its speed
Law = TwoTermCost | PowerCost


class Observation(NamedTuple):
    """One micro-batch that ran.

    Attributes:
        rank: Its rank.
        busy_s: Busy seconds.
        counts: How many samples it had of each length.
        again: Share of its blocks that was computed again beyond what the law holds.
    """

    rank: int
    busy_s: float
    counts: tuple[tuple[int, int], ...]
    again: float = 0.0


@dataclass
class OnlineFit:
    """Latest observations of each rank. Lives on rank 0.

    Kept apart by rank, so that one step of a thousand ranks, which come slot by slot, does not push all others out.

    Attributes:
        lengths: int64, every length of the data set.
        num_ranks: Ranks.
        of_rank: Observations of each; `SAMPLED` in all or `LATEST` a rank, whichever is more.
    """

    lengths: IntArray
    num_ranks: int
    of_rank: list[deque[Observation]] = field(init=False)

    def __post_init__(self) -> None:
        depth = max(LATEST, SAMPLED // self.num_ranks)
        self.of_rank = [deque(maxlen=depth) for _ in range(self.num_ranks)]

    def observe(self, rank: int, busy_s: float, counts: Mapping[int, int], again: float = 0.0) -> None:
        """Take in a micro-batch with `counts[length]` samples of each length; fillers and empty times are left out."""
        if counts and busy_s > 0:
            self.of_rank[rank].append(Observation(rank, busy_s, tuple(sorted(counts.items())), again))

    @property
    def observations(self) -> list[Observation]:
        """All that are kept: by rank, the latest last."""
        return list(chain.from_iterable(self.of_rank))

    @property
    def sample(self) -> list[Observation]:
        """At most `SAMPLED` of them, from all ranks and slots alike; a function of how many there are."""
        kept = self.observations
        if len(kept) <= SAMPLED:
            return kept
        return [kept[i] for i in np.random.default_rng(0).choice(len(kept), SAMPLED, replace=False)]

    @property
    def has_enough(self) -> bool:
        """Whether there is something to fit: enough micro-batches."""
        return sum(map(len, self.of_rank)) >= ENOUGH

    def refit(self, law: Law, speed: FloatArray) -> Law:
        """A law of the form of `law`, fitted to the sample; `speed` is float64 [ranks], 1 for a whole one."""
        sample = self.sample
        busy_us = np.array([o.busy_s * 1e6 for o in sample]) * speed[[o.rank for o in sample]]
        priced_us = self.predict_us(law, sample)
        prior_us = law.micro_batch_us(law.sample_us(self.lengths, np.zeros_like(self.lengths))).astype(np.float64)
        factor = float(np.median(busy_us / priced_us))
        values = np.concatenate([busy_us, prior_us * factor])
        weights = np.concatenate([np.ones(len(busy_us)), np.full(len(prior_us), PRIOR_WEIGHT)])
        if isinstance(law, PowerCost):
            # As if nothing had been computed again: the law does not tell attention, which is kept, from the rest.
            values[: len(busy_us)] *= self.predict_us(law, sample, kept=True) / priced_us
            return self._refit_power(law, sample, values, weights)
        columns = self._columns(sample, [0, 1, 2])
        # Of what is computed again attention is kept: the squares are not.
        columns[: len(sample), :2] *= 1 + AGAIN * np.array([[o.again] for o in sample])
        columns = np.concatenate([np.ones((len(columns), 1)), columns], 1)
        floors = [law.launch_floor_us, *np.quantile(busy_us, FLOOR_QUANTILES).tolist()]
        fits = [_fit_above(floor, columns, values, weights, len(busy_us)) for floor in floors]
        best = fits[0]
        for fit in fits[1:]:
            if fit[3] and fit[0] < best[0] * FLOOR_GAIN:
                best = fit
        return TwoTermCost(best[1], *best[2].tolist())

    def predict_us(self, law: Law, observed: Sequence[Observation], *, kept: bool = False) -> FloatArray:
        """Microseconds of each of `observed` under `law`, float64 [observed]; `kept`: had it kept all."""
        prices = law.sample_us(self.lengths, np.zeros_like(self.lengths))
        again = law.again_us(self.lengths) * (not kept)
        sizes = np.array([len(o.counts) for o in observed])
        pairs = np.array([pair for o in observed for pair in o.counts], np.int64)  # [pairs, length and count]
        where = np.searchsorted(self.lengths, pairs[:, 0])
        shares = np.repeat([o.again for o in observed], sizes)
        each_us = (prices[where] + shares * again[where]).astype(np.int64) * pairs[:, 1]
        sums = np.add.reduceat(each_us, np.cumsum(sizes) - sizes)
        return law.micro_batch_us(sums).astype(np.float64)

    def speeds(self, law: Law) -> FloatArray:
        """Speed of each rank beside the faster half of all, float64 [ranks]; 1 for those not below `SLOW`."""
        told = [rank for rank, latest in enumerate(self.of_rank) if len(latest) >= FEWEST_OF_RANK]
        speeds = np.ones(self.num_ranks)
        if not told:
            return speeds
        observed = [o for rank in told for o in self.of_rank[rank]]
        sizes = np.array([len(self.of_rank[rank]) for rank in told])
        ratios = self.predict_us(law, observed) / np.array([o.busy_s * 1e6 for o in observed])
        medians = _medians(ratios, sizes)
        spreads = _medians(np.abs(ratios - np.repeat(medians, sizes)), sizes)
        # Few observations may lie near each other by chance: a rank's spread counts as no less than is usual.
        spreads = np.maximum(spreads, np.median(spreads))
        # Standard error of a median of scattered values, their spread taken from their median deviation.
        errors = 1.2533 * 1.4826 * spreads / np.sqrt(sizes)
        reference = np.sort(medians)[len(medians) // 2]
        sure = NormalDist().inv_cdf(1 - FALSE_SLOW / len(told))
        is_slow = (medians + sure * errors) / reference < SLOW
        speeds[told] = np.where(is_slow, medians / reference, 1.0)
        return speeds

    def state(self) -> list[Any]:
        """Observations as plain lists."""
        return [[o.rank, o.busy_s, [list(pair) for pair in o.counts], o.again] for o in self.observations]

    def load(self, state: Sequence[Any]) -> None:
        """Take the observations of `state`, of as many ranks, that are of known lengths; other data may lack some."""
        known = set(self.lengths.tolist())
        for rank, busy_s, counts, *again in state:  # older checkpoints know of no recompute by micro-batch
            if all(length in known for length, _ in counts):
                self.observe(rank, busy_s, dict(counts), *again)

    def _columns(self, sample: Sequence[Observation], powers: Sequence[float]) -> FloatArray:
        """Sum over samples of S ** power: observed micro-batches, then one of a single sample of each length."""
        rows = [[sum(c * float(s) ** power for s, c in o.counts) for power in powers] for o in sample]
        rows += [[float(length) ** power for power in powers] for length in self.lengths.tolist()]
        return np.array(rows)

    def _refit_power(
        self, law: PowerCost, sample: Sequence[Observation], values: FloatArray, weights: FloatArray
    ) -> PowerCost:
        best = (np.inf, law)
        low = max(law.exponent - EXPONENT_REACH, EXPONENT_RANGE[0])
        high = min(law.exponent + EXPONENT_REACH, EXPONENT_RANGE[1])
        for exponent in np.arange(low, high + 1e-9, EXPONENT_STEP).tolist():
            columns = self._columns(sample, [exponent])
            columns = np.concatenate([np.ones((len(columns), 1)), columns], 1)
            coefficients = relative_nnls(columns, values, weights)
            loss = robust_loss(columns @ coefficients / values - 1, weights)
            if loss < best[0]:
                best = (loss, PowerCost(float(coefficients[0]), float(coefficients[1]), exponent))
        return best[1]


def _medians(values: FloatArray, sizes: IntArray) -> FloatArray:
    """Median of each run of values, float64 [runs]; `sizes` are the runs' lengths, positive, int64 [runs]."""
    rows = np.full((len(sizes), int(sizes.max())), np.inf)
    rows[np.arange(rows.shape[1]) < sizes[:, None]] = values
    rows.sort(axis=1)
    run = np.arange(len(sizes))
    medians: FloatArray = (rows[run, (sizes - 1) // 2] + rows[run, sizes // 2]) / 2
    return medians


def _fit_above(
    floor: float, columns: FloatArray, values: FloatArray, weights: FloatArray, num_observed: int
) -> tuple[float, float, FloatArray, bool]:
    """Loss, launch floor and coefficients, found from `floor` on, and whether micro-batches below it told it.

    What the law prices above twice the floor tells the law. What it prices below the floor tells the floor, by its
    median: launch-bound times scatter by a third to both sides. The measured times themselves would sort the noise.
    """
    tells = values > LAUNCH_FREE * floor
    coefficients = np.zeros(columns.shape[1])
    for _ in range(4):
        if tells[:num_observed].sum() < FEWEST_ABOVE:  # launch-bound nearly all: the law is what fits them
            tells = np.ones(len(values), bool)
        coefficients = relative_nnls(columns[tells], values[tells], weights[tells])
        priced = columns @ coefficients
        is_bound = priced[:num_observed] < floor
        if is_told := is_bound.sum() >= FEWEST_BOUND:
            floor = float(np.median(values[:num_observed][is_bound]))
        tells = priced > LAUNCH_FREE * floor
    # Of logarithms, or a time that is too short by chance would weigh more than one that is too long.
    errors = np.log(np.maximum(np.maximum(floor, priced), 1) / values)
    return robust_loss(errors[:num_observed]), floor, coefficients, bool(is_told)
