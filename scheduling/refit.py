"""Refits of the cost law to micro-batches as they run, and the speed of each rank beside the others."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from adaptiveload.scheduling.cost import AGAIN, IntArray, PowerCost, TwoTermCost
from adaptiveload.scheduling.fit import EXPONENT_RANGE, LAUNCH_FREE, FloatArray, relative_nnls, robust_loss

KEPT = 384  # latest micro-batches that a refit sees
ENOUGH = 16  # and the fewest
# Lengths that did not run lately must not be priced by chance: each length counts as this part of a measured
# micro-batch, at its old price times the factor by which the old law is off on the whole.
PRIOR_WEIGHT = 0.1
EXPONENT_STEP, EXPONENT_REACH = 0.02, 0.3
FLOOR_QUANTILES = (0.05, 0.1, 0.25, 0.5)  # of busy times: from where the launch floor is looked for, beside the old one
FLOOR_GAIN = 0.9  # another floor must earn its place
FEWEST_BOUND, FEWEST_ABOVE = 4, 6  # launch-bound micro-batches that tell a floor, others that tell the law
SLOW, SURE = 0.95, 3.0  # a rank is slow below this part of the others' speed, by as many standard errors
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
    """Latest observations of all ranks. Lives on rank 0.

    Attributes:
        lengths: int64, every length of the data set.
        observations: The latest `KEPT`.
    """

    lengths: IntArray
    observations: deque[Observation] = field(default_factory=lambda: deque(maxlen=KEPT))

    def observe(self, rank: int, busy_s: float, counts: Mapping[int, int], again: float = 0.0) -> None:
        """Take in a micro-batch with `counts[length]` samples of each length; fillers and empty times are left out."""
        if counts and busy_s > 0:
            self.observations.append(Observation(rank, busy_s, tuple(sorted(counts.items())), again))

    @property
    def has_enough(self) -> bool:
        """Whether there is something to fit: enough micro-batches."""
        return len(self.observations) >= ENOUGH

    def refit(self, law: Law, speed: FloatArray) -> Law:
        """A law of the form of `law`, fitted to the observations; `speed` is float64 [ranks], 1 for a whole one."""
        busy_us = np.array([o.busy_s * 1e6 for o in self.observations]) * speed[[o.rank for o in self.observations]]
        prior_us = law.micro_batch_us(law.sample_us(self.lengths, np.zeros_like(self.lengths))).astype(np.float64)
        factor = float(np.median(busy_us / self.predict_us(law)))
        values = np.concatenate([busy_us, prior_us * factor])
        weights = np.concatenate([np.ones(len(busy_us)), np.full(len(prior_us), PRIOR_WEIGHT)])
        if isinstance(law, PowerCost):
            # As if nothing had been computed again: the law does not tell attention, which is kept, from the rest.
            values[: len(busy_us)] *= self.predict_us(law, kept=True) / self.predict_us(law)
            return self._refit_power(law, values, weights)
        columns = self._columns([0, 1, 2])
        # Of what is computed again attention is kept: the squares are not.
        columns[: len(self.observations), :2] *= 1 + AGAIN * np.array([[o.again] for o in self.observations])
        columns = np.concatenate([np.ones((len(columns), 1)), columns], 1)
        floors = [law.launch_floor_us, *np.quantile(busy_us, FLOOR_QUANTILES).tolist()]
        fits = [_fit_above(floor, columns, values, weights, len(busy_us)) for floor in floors]
        best = fits[0]
        for fit in fits[1:]:
            if fit[3] and fit[0] < best[0] * FLOOR_GAIN:
                best = fit
        return TwoTermCost(best[1], *best[2].tolist())

    def predict_us(self, law: Law, *, kept: bool = False) -> FloatArray:
        """Microseconds of each observed micro-batch under `law`, float64 [observations]; `kept`: had it kept all."""
        where = {int(length): i for i, length in enumerate(self.lengths)}
        prices = law.sample_us(self.lengths, np.zeros_like(self.lengths))
        again = law.again_us(self.lengths) * (not kept)
        sums = [
            sum(int(prices[where[s]] + o.again * again[where[s]]) * count for s, count in o.counts)
            for o in self.observations
        ]
        return law.micro_batch_us(np.array(sums, np.int64)).astype(np.float64)

    def speeds(self, law: Law, ranks: int) -> FloatArray:
        """Speed of each rank beside the faster half of all, float64 [ranks]; 1 for those not below `SLOW`."""
        ratios = self.predict_us(law) / np.array([o.busy_s * 1e6 for o in self.observations])
        of_rank = np.array([o.rank for o in self.observations])
        medians, errors = np.full(ranks, np.nan), np.zeros(ranks)
        for rank in np.unique(of_rank).tolist():
            mine = ratios[of_rank == rank]
            medians[rank] = np.median(mine)
            # Standard error of a median of scattered values, their spread taken from their median deviation.
            errors[rank] = 1.2533 * 1.4826 * np.median(np.abs(mine - medians[rank])) / np.sqrt(len(mine))
        known = np.sort(medians[~np.isnan(medians)])
        reference = known[len(known) // 2]
        is_slow = (medians + SURE * errors) / reference < SLOW
        return np.where(is_slow, np.nan_to_num(medians / reference, nan=1.0), 1.0)

    def state(self) -> list[Any]:
        """Observations as plain lists."""
        return [[o.rank, o.busy_s, [list(pair) for pair in o.counts], o.again] for o in self.observations]

    def load(self, state: Sequence[Any]) -> None:
        """Take the observations of `state` that are of known lengths; a changed data set may lack some."""
        known = set(self.lengths.tolist())
        for rank, busy_s, counts, *again in state:  # older checkpoints know of no recompute by micro-batch
            if all(length in known for length, _ in counts):
                self.observe(rank, busy_s, dict(counts), *again)

    def _columns(self, powers: Sequence[float]) -> FloatArray:
        """Sum over samples of S ** power: observed micro-batches, then one of a single sample of each length."""
        rows = [[sum(c * float(s) ** power for s, c in o.counts) for power in powers] for o in self.observations]
        rows += [[float(length) ** power for power in powers] for length in self.lengths.tolist()]
        return np.array(rows)

    def _refit_power(self, law: PowerCost, values: FloatArray, weights: FloatArray) -> PowerCost:
        best = (np.inf, law)
        low = max(law.exponent - EXPONENT_REACH, EXPONENT_RANGE[0])
        high = min(law.exponent + EXPONENT_REACH, EXPONENT_RANGE[1])
        for exponent in np.arange(low, high + 1e-9, EXPONENT_STEP).tolist():
            columns = self._columns([exponent])
            columns = np.concatenate([np.ones((len(columns), 1)), columns], 1)
            coefficients = relative_nnls(columns, values, weights)
            loss = robust_loss(columns @ coefficients / values - 1, weights)
            if loss < best[0]:
                best = (loss, PowerCost(float(coefficients[0]), float(coefficients[1]), exponent))
        return best[1]


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
