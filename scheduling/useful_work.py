"""Speed apart from composition: the useful work of measured steps, and the tokens/s that it is worth on the mix.

Steps of different policies hold different samples, and a token of a long clip costs several times one of a picture:
over a few steps tokens/s say more about what was drawn than about the policy. So work is counted in the price of
samples, by one law that is fitted to all micro-batches that a model computed in a run, whichever policy made them.

Legend: `n` micro-batches.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from adaptiveload.scheduling.fit import FloatArray, relative_nnls


@dataclass(frozen=True)
class WorkLaw:
    """Seconds that a sample of S tokens adds to a micro-batch: c0 + b1*S + b2*S^2.

    It has no fixed part: that of all micro-batches is spread over their samples, so a policy that makes more and
    smaller ones pays for them in its share of useful time.

    Attributes:
        c0_s, b1_s, b2_s: Seconds per sample, per token and per token squared.
        error: Median of |predicted / measured - 1| over the micro-batches that it was fitted to.
    """

    c0_s: float
    b1_s: float
    b2_s: float
    error: float

    def seconds(self, seq_lens: ArrayLike) -> FloatArray:
        """Price of samples of these lengths, float64 [samples]."""
        lengths = np.asarray(seq_lens, np.float64)
        return np.asarray(self.c0_s + self.b1_s * lengths + self.b2_s * lengths * lengths, np.float64)


def power_sums(micro_batches: Iterable[ArrayLike]) -> FloatArray:
    """Samples, tokens and tokens squared of micro-batches given as lengths of their samples, float64 [n, 3]."""
    rows = []
    for lengths in micro_batches:
        array = np.asarray(lengths, np.float64)
        rows.append([float(array.size), float(array.sum()), float((array * array).sum())])
    return np.array(rows, np.float64).reshape(-1, 3)


def fit_work(sums: FloatArray, busy_s: ArrayLike) -> WorkLaw:
    """The law of least robust relative error, no term negative.

    Args:
        sums: From `power_sums`, float64 [n, 3].
        busy_s: Measured seconds of the micro-batches; those without samples, or that took no time, are left out.

    Raises:
        ValueError: If nothing is left.
    """
    seconds = np.asarray(busy_s, np.float64)
    used = (sums[:, 0] > 0) & (seconds > 0)
    if not used.any():
        raise ValueError("no micro-batch with samples was measured: there is nothing to price work by")
    columns, values = sums[used], seconds[used]
    coefficients = relative_nnls(columns, values)
    error = float(np.median(np.abs(columns @ coefficients / values - 1)))
    c0_s, b1_s, b2_s = coefficients.tolist()
    return WorkLaw(c0_s, b1_s, b2_s, error)


def useful_share(law: WorkLaw, seq_lens: ArrayLike, wall_s: float, ranks: int) -> float:
    """Price of the samples that ran over the seconds of all ranks.

    About 1 where every rank works all the time; waiting, collectives, the optimizer and many small micro-batches take
    from it.
    """
    return float(law.seconds(seq_lens).sum()) / (wall_s * ranks)


def rate_on_mix(law: WorkLaw, share: float, num_tokens: ArrayLike, seq_lens: ArrayLike, ranks: int) -> float:
    """Tokens per second of all ranks if the mix itself ran at this useful share.

    Args:
        law: Of the model.
        share: Useful share of a policy's steps.
        num_tokens: Tokens of each sample of the mix that count.
        seq_lens: Lengths that they are priced by: the same, or with the text where it joins the sequence.
        ranks: Ranks that work.
    """
    return ranks * share * float(np.asarray(num_tokens, np.float64).mean()) / float(law.seconds(seq_lens).mean())
