"""How much of a micro-batch's forward runs again in backward: as few blocks as its memory asks.

A block that is computed again keeps its inputs and its attention outputs, and no attention runs twice. The memory of a
micro-batch of n tokens falls linearly from "all blocks kept" to "all computed again", so two lengths say it all: the
most tokens that fit without recompute, and the most that fit at all.
"""

from dataclasses import dataclass

import numpy as np

from adaptiveload.scheduling.choices import check_choice
from adaptiveload.scheduling.cost import IntArray

LEVELS = ("none", "full", "auto")
ALL_BLOCKS = 1000  # shares are thousandths of the blocks: plans are made of whole numbers


@dataclass(frozen=True)
class Recompute:
    """Share of the blocks of each micro-batch that is computed again.

    Attributes:
        level: "none"; "full" computes every block again, attention included, as most trainers do; "auto" as few blocks
            as fit, without their attention.
        kept_tokens: With "auto", most tokens of a micro-batch that keeps all blocks.
        most_tokens: With "auto", most that fit when all blocks are computed again.
        text_tokens: Tokens that take the memory of one sample's text; both lengths count them.
    """

    level: str
    kept_tokens: int = 0
    most_tokens: int = 0
    text_tokens: int = 0

    def __post_init__(self) -> None:
        check_choice("schedule.recompute", self.level, LEVELS)
        if self.level == "auto" and not 0 <= self.kept_tokens < self.most_tokens:
            raise ValueError(
                f"schedule.kept_tokens={self.kept_tokens} must be less than schedule.most_tokens={self.most_tokens}"
            )

    @property
    def block_level(self) -> str:
        """What a block that is computed again does, as the models name it."""
        return "attention" if self.level == "auto" else self.level

    def permille(self, num_tokens: IntArray) -> IntArray:
        """Thousandths of the blocks, for micro-batches of so many tokens, texts counted as `text_tokens`."""
        tokens = np.asarray(num_tokens, np.int64)
        if self.level != "auto":
            return np.full(tokens.shape, ALL_BLOCKS if self.level == "full" else 0, np.int64)
        above = np.maximum(tokens - self.kept_tokens, 0)
        span = np.maximum(tokens, 1) * (self.most_tokens - self.kept_tokens)
        shares: IntArray = np.minimum(-(-ALL_BLOCKS * above * self.most_tokens // span), ALL_BLOCKS)
        return shares
