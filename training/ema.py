"""Exponential moving average of the weights, fp32, one shard a rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass
class EmaConfig:
    """The average of the weights that held-out loss, samples and exports use.

    Attributes:
        decay: Limit of the decay; early on the average follows faster, min(decay, (1+n)/(10+n)) at step n.
    """

    decay: float = 0.9999

    def check(self) -> None:
        """Raise ValueError if the decay is outside [0, 1)."""
        if not 0 <= self.decay < 1:
            raise ValueError(f"ema.decay={self.decay} must be in [0, 1)")


class Ema:
    """Average of `model`'s trained parameters. Built after sharding, so that each rank averages its own shards.

    Attributes:
        shadow: The averages by parameter name, fp32, sharded as the parameters are.
    """

    def __init__(self, model: nn.Module, config: EmaConfig) -> None:
        self.config = config
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.shadow: dict[str, Tensor] = {name: p.detach().clone() for name, p in self.parameters.items()}

    def decay_at(self, step: int) -> float:
        """Decay used after optimizer step `step` (from 0)."""
        return min(self.config.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights that optimizer step `step` left into the average."""
        averages = [_local(average) for average in self.shadow.values()]
        weights = [_local(parameter.detach()) for parameter in self.parameters.values()]
        torch._foreach_lerp_(averages, weights, 1.0 - self.decay_at(step))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the context the model holds the averages; afterwards its own weights again."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            weight, average = _local(parameter.detach()), _local(self.shadow[name])
            weight_copy = weight.clone()
            weight.copy_(average)
            average.copy_(weight_copy)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
