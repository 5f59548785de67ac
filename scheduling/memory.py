"""Memory model: bytes of a rank at the peak of a micro-batch, and a prior before anything is measured."""

import math
from dataclasses import dataclass

from adaptiveload.scheduling.flops import ModelDims

SAFE_SHARE = 0.95  # of a device's memory that may be planned for; the allocator and NCCL grow a little over a run


@dataclass(frozen=True)
class MemoryModel:
    """static + token_bytes * tokens + sample_bytes * samples.

    Attributes:
        static_bytes: Weights, optimizer, averages, gathered blocks, and what the allocator keeps beside them.
        token_bytes: Per token of the micro-batch.
        sample_bytes: Per sample: its text, which is padded to one length.
    """

    static_bytes: float
    token_bytes: float
    sample_bytes: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"memory model: {name} must be a number >= 0, got {value}")

    def micro_batch_bytes(self, num_tokens: int, num_samples: int) -> float:
        """Peak bytes while a micro-batch runs."""
        return self.static_bytes + self.token_bytes * num_tokens + self.sample_bytes * num_samples

    def mixed(self, other: "MemoryModel", share: float) -> "MemoryModel":
        """Memory of a micro-batch that is by `share` as `other` has it."""
        pairs = ((value, getattr(other, name)) for name, value in vars(self).items())
        return MemoryModel(*(mine + (its - mine) * share for mine, its in pairs))

    @property
    def text_tokens(self) -> int:
        """Tokens that take the memory of one sample's text."""
        return math.ceil(self.sample_bytes / self.token_bytes) if self.token_bytes else 0

    def max_tokens(self, capacity_bytes: float, share: float = SAFE_SHARE) -> int:
        """Most tokens of a micro-batch that fit in `share` of `capacity_bytes`, texts counted as `text_tokens` each.

        Raises:
            ValueError: If not even the static part fits, or nothing grows with tokens.
        """
        free = share * capacity_bytes - self.static_bytes
        if free <= 0 or not self.token_bytes:
            raise ValueError(
                f"{share:.0%} of {capacity_bytes / 2**30:.1f} GiB less {self.static_bytes / 2**30:.1f} GiB of weights "
                f"and states leaves no memory for tokens at {self.token_bytes:.0f} bytes each: use more ranks, or set "
                "schedule.memory_limit_tokens"
            )
        return int(free // self.token_bytes)


INPUT_BYTES = 6  # of a block, which recompute keeps: fp32 residual stream, and the bf16 output still to be added
STATE_BYTES = 20  # fp32 weight, gradient, two moments and average of a trained parameter, sharded over the ranks
# At the peak one block has all that it keeps, and its gradients beside it. Measured on an H200 for Wan 1.3B at 32,760
# tokens: 3,118, 682 and 497 kB a token with all blocks kept, all but attention computed again, and all; this gives
# 3,137, 683 and 495.
PEAK_BLOCKS = 2.25
FROZEN_BYTES = 2  # of a frozen one: its bf16 weight
GATHERED_WEIGHT_BYTES, GATHERED_GRADIENT_BYTES = 2, 4  # bf16 and, of a trained one, fp32


def memory_prior(dims: ModelDims, recompute: str, meet: str, ranks: int, trained_share: float = 1.0) -> MemoryModel:
    """Memory model from the model's sizes. An estimate: fit one before relying on the last gigabytes.

    Args:
        dims: Sizes of the transformer.
        recompute: "none", "full", or "attention": all blocks computed again, attention outputs kept.
        meet: "slot" gathers two blocks at a time, "step" the whole model.
        ranks: Ranks that share weights and states.
        trained_share: Trained parameters over all.
    """
    per_block = dims.block_token_bytes
    kept_by_block = {
        "none": per_block,
        "full": INPUT_BYTES * dims.hidden_size,
        "attention": INPUT_BYTES * dims.hidden_size + dims.attention_token_bytes,
    }
    kept = dims.num_layers * kept_by_block[recompute]
    gathered = dims.num_parameters if meet == "step" else 2 * dims.num_parameters / max(dims.num_layers, 1)
    return MemoryModel(
        static_bytes=(trained_share * STATE_BYTES + (1 - trained_share) * FROZEN_BYTES) * dims.num_parameters / ranks
        + (GATHERED_WEIGHT_BYTES + trained_share * GATHERED_GRADIENT_BYTES) * gathered,
        token_bytes=kept + PEAK_BLOCKS * per_block,
        sample_bytes=dims.text_bytes * (dims.num_layers if recompute == "none" else 1),
    )
