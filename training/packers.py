"""How one rank of a stream makes micro-batches of what it has read, alone: by buckets, or from a queue."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from adaptiveload.data.stream import StreamPlace
from adaptiveload.models.packing import PackedSample
from adaptiveload.scheduling.buckets import bucket_batch_size
from adaptiveload.scheduling.cost import CostModel
from adaptiveload.scheduling.local import pack_local
from adaptiveload.scheduling.shapes import Shape

QUEUE = 64  # samples that local packing chooses from; more gains nothing (simulated at 64 to 512)


@dataclass(frozen=True)
class StreamItem:
    """One sample in the queue: its tensors, and what the ranks tell each other about it."""

    place: StreamPlace
    shape: Shape
    source: str
    packed: PackedSample

    @property
    def num_tokens(self) -> int:
        """Tokens, text not included."""
        return len(self.packed.latents)


class Packer(Protocol):
    """Makes micro-batches of what a rank has read."""

    def add(self, item: StreamItem) -> None:
        """Take one sample."""

    def take(self, is_exhausted: bool) -> list[StreamItem] | None:
        """The next micro-batch, or None if more samples should be read first."""


@dataclass
class BucketPacker:
    """The paper's rule: a bucket that holds its batch size is a micro-batch; at the end partial buckets are."""

    memory_limit_tokens: int
    max_samples: int
    compute_limit: float
    cost_exponent: float
    buckets: dict[Shape, list[StreamItem]] = field(default_factory=dict)
    full: list[list[StreamItem]] = field(default_factory=list)

    def add(self, item: StreamItem) -> None:
        """Take one sample."""
        bucket = self.buckets.setdefault(item.shape, [])
        bucket.append(item)
        size = bucket_batch_size(item.num_tokens, self.memory_limit_tokens, self.compute_limit, self.cost_exponent)
        if len(bucket) >= min(size, self.max_samples):
            self.full.append(self.buckets.pop(item.shape))

    def take(self, is_exhausted: bool) -> list[StreamItem] | None:
        """The oldest full bucket; once there are no more samples, any bucket."""
        if not self.full and is_exhausted and self.buckets:
            self.full.append(self.buckets.pop(min(self.buckets)))
        return self.full.pop(0) if self.full else None


@dataclass
class LocalPacker:
    """`pack_local` from a queue to a cost that all ranks aim at, within memory."""

    cost_model: CostModel
    memory_limit_tokens: int
    max_samples: int
    target_us: int
    queue: list[StreamItem] = field(default_factory=list)

    def add(self, item: StreamItem) -> None:
        """Take one sample."""
        self.queue.append(item)

    def take(self, is_exhausted: bool) -> list[StreamItem] | None:
        """A pack of a full queue, or of what is left."""
        if not self.queue or (len(self.queue) < QUEUE and not is_exhausted):
            return None
        tokens = np.array([item.num_tokens for item in self.queue])
        costs = self.cost_model.sample_us(tokens, np.zeros(len(tokens), np.int64))
        # A floor under a sample's memory is a ceiling on the samples of a micro-batch.
        mems = np.maximum(tokens, -(-self.memory_limit_tokens // self.max_samples))
        chosen = pack_local(costs.tolist(), mems.tolist(), self.target_us, self.memory_limit_tokens)
        taken = [self.queue[i] for i in chosen]
        self.queue = [item for i, item in enumerate(self.queue) if i not in set(chosen)]
        return taken
