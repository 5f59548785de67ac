"""`StepPlan`: who computes which samples in one optimizer step, together with whom.

Legend: `n` samples of the step, `G` slots, `R` ranks.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

MicroBatch = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The plan of one optimizer step, equal on all ranks.

    Attributes:
        step: Optimizer step, from 0.
        position: Samples consumed before this step.
        next_position: Samples consumed after it.
        sample_ids: int64 [n], rows of the `SampleTable`.
        epochs: int64 [n], epoch of each draw; with `repeats` it keys the sample's noise.
        repeats: int64 [n], which of a sample's repeats within its epoch the draw is, from 0.
        weights: float64 [n], loss weight w_i of each draw.
        slots: `slots[g][r]` is the g-th micro-batch of rank r as indices into the arrays above: `()` is a filler,
            `None` says that rank r has no g-th micro-batch (only with `meet` "step" or `replicas`; they are the last of
            a rank).
        costs_us: int64 [G, R], planned microseconds of each micro-batch at its rank's speed, its fixed part included; 0
            where None.
        num_tokens: int64 [G, R], tokens of each micro-batch, text not included; 0 for fillers.
        recompute: What blocks do that are computed again in backward: "none", "full", or "attention" (kept).
        recomputed: int64 [G, R], thousandths of the blocks of each micro-batch that are; 0 where None.
        normalizer: Z, the sum of `weights`; the loss of a micro-batch is (R / Z) * sum(w_i * l_i).
        meet: Where ranks wait for each other: "slot" or "step".
        replicas: Groups of consecutive ranks that hold a copy of the model each (HSDP). With `meet` "slot" a rank waits
            for its group in every slot, and groups for each other at the end of the step.
    """

    step: int
    position: int
    next_position: int
    sample_ids: NDArray[np.int64]
    epochs: NDArray[np.int64]
    repeats: NDArray[np.int64]
    weights: NDArray[np.float64]
    slots: tuple[tuple[MicroBatch | None, ...], ...]
    costs_us: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    recompute: str
    recomputed: NDArray[np.int64]
    normalizer: float
    meet: str
    replicas: int = 1

    @property
    def num_samples(self) -> int:
        """Samples of the step, over all ranks."""
        return len(self.sample_ids)

    @property
    def num_slots(self) -> int:
        """Micro-batches of the rank that has most."""
        return len(self.slots)

    def micro_batches(self, rank: int) -> list[MicroBatch]:
        """Micro-batches of `rank` in the order in which it runs them; `()` is a filler."""
        return [row[rank] for row in self.slots if row[rank] is not None]  # type: ignore[misc]

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hex over all fields: ranks whose digests differ would not compute the same step."""
        digest = hashlib.sha256()
        fields = (self.step, self.position, self.next_position, self.slots, self.recompute, self.normalizer, self.meet)
        digest.update(repr((*fields, self.replicas)).encode())
        for array in (self.sample_ids, self.epochs, self.repeats, self.costs_us, self.num_tokens, self.recomputed):
            digest.update(array.astype("<i8").tobytes())
        digest.update(self.weights.astype("<f8").tobytes())
        return digest.hexdigest()
