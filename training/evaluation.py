"""Held-out loss on fixed noise and timesteps, and the best linear predictor of each channel to hold it against."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from adaptiveload.data.corpus import Corpus
from adaptiveload.models.architectures import VideoTransformer
from adaptiveload.models.flow_matching import noisy_latents, per_sample_loss, timesteps, token_sigma, velocity_target
from adaptiveload.models.packing import PackedBatch
from adaptiveload.scheduling.cost import CostModel
from adaptiveload.scheduling.planner import plan_step
from adaptiveload.training.distributed import Ranks, reshard
from adaptiveload.training.feed import HELD_OUT_EPOCH, MicroBatchDataset, PlannedSample

# Held-out loss is also told by tenths of sigma.
NUM_SIGMA_BINS = 10


@dataclass
class EvaluationConfig:
    """Held-out loss of the averaged weights.

    Attributes:
        every_steps: Steps between evaluations; the last step is always followed by one.
        max_samples: Most held-out samples used, spread evenly over the index; 0 turns evaluation off.
        repeats: Draws of noise and timestep for each of them.
    """

    every_steps: int = 200
    max_samples: int = 256
    repeats: int = 1

    def check(self) -> None:
        """Raise ValueError for a value outside its range, naming the key."""
        if self.every_steps < 1 or self.max_samples < 0 or self.repeats < 1:
            raise ValueError(
                f"evaluation: every_steps={self.every_steps}, max_samples={self.max_samples}, repeats={self.repeats} "
                "must be at least 1, 0 and 1"
            )


class HeldOut:
    """The held-out samples, dealt to the ranks once by the planner; every evaluation sees the same inputs.

    Args:
        ids: Rows of the held-out samples.
        corpus: All samples.
        dataset: Makes their tensors.
        cost_model: Prices them, so that ranks finish together.
        memory_limit_tokens: Most tokens of a micro-batch.
    """

    def __init__(
        self,
        ids: Sequence[int],
        corpus: Corpus,
        dataset: MicroBatchDataset,
        cost_model: CostModel,
        memory_limit_tokens: int,
        ranks: Ranks,
        config: EvaluationConfig,
    ) -> None:
        self.dataset, self.ranks, self.corpus = dataset, ranks, corpus
        self._reported: set[str] = set()
        ids = np.asarray(ids, dtype=np.int64)
        chosen = ids[np.linspace(0, len(ids) - 1, min(len(ids), config.max_samples)).round().astype(int)]
        drawn = np.tile(chosen, config.repeats)
        repeats = np.repeat(np.arange(config.repeats), len(chosen))
        self.num_draws = len(drawn)
        table = corpus.table
        tokens = table.computed_tokens(drawn)
        costs = cost_model.sample_us(tokens, table.text_len[drawn])
        limit = max(memory_limit_tokens, int(tokens.max(initial=1)))
        plan = plan_step(costs.tolist(), tokens.tolist(), ranks.world_size, limit) if len(drawn) else None
        self.requests = [
            tuple(
                PlannedSample(int(drawn[i]), corpus.place(int(drawn[i])), HELD_OUT_EPOCH, int(repeats[i]))
                for i in slot[ranks.rank] or ()
            )
            for slot in (plan.slots if plan else ())
        ]

    @torch.no_grad()
    def losses(self, model: VideoTransformer) -> dict[str, float]:
        """Mean over held-out draws of the per-sample loss, without weights. All ranks must call it together.

        Returns:
            By metric key: of all, of each bucket, and of each tenth of sigma; of those that have draws.
        """
        reshard(model)  # gathered copies may be of other weights than those swapped in or trained on
        shapes, shape_ids = self.corpus.table.shapes, self.corpus.table.shape_ids
        keys = [
            "train/loss_heldout",
            *(f"heldout/loss_sigma_{number}" for number in range(NUM_SIGMA_BINS)),
            *(f"heldout/loss_{shape}" for shape in shapes),
        ]
        sums = torch.zeros(len(keys), 2, dtype=torch.float64)
        for batch in self._batches():
            on_device = batch.to(self.ranks.device)
            velocity = model(noisy_latents(on_device), timesteps(on_device), on_device)
            losses = per_sample_loss(velocity, velocity_target(on_device), batch.seq_offsets).double().cpu()
            for i, (sample_id, is_filler) in enumerate(zip(batch.sample_ids, batch.is_filler, strict=True)):
                if not is_filler:
                    level = min(int(batch.sigma[i] * NUM_SIGMA_BINS), NUM_SIGMA_BINS - 1)
                    rows = [0, 1 + level, 1 + NUM_SIGMA_BINS + int(shape_ids[sample_id])]
                    sums[rows] += torch.stack([losses[i], torch.ones_like(losses[i])])
        reshard(model)  # nor may training go on with the copies gathered here
        dist.all_reduce(sums, group=self.ranks.host_group)
        return {key: float(total / count) for key, (total, count) in zip(keys, sums, strict=True) if count}

    @cached_property
    def linear_loss(self) -> float:
        """Loss of the best linear predictor of each channel, on the same noise and timesteps.

        Given sigma, the velocity n - x0 is predicted as a(sigma) * x_t + b(sigma) for each latent channel, with a and
        b of least squares for a channel of the held-out samples' own mean and variance: what can be had without
        looking at neighbours or captions. It is told the held-out statistics, so it is a strict bound.
        """
        size = self.dataset.geometry.token_size
        channels = self.dataset.geometry.channels
        moments = torch.zeros(3, size, dtype=torch.float64)
        for batch in self._batches():
            for tokens in _real_tokens(batch, batch.latents.double()):
                moments += torch.stack([torch.ones(size).double(), tokens.mean(0), tokens.square().mean(0)])
        dist.all_reduce(moments, group=self.ranks.host_group)
        count, first, second = moments.view(3, channels, -1).mean(2)
        mean = (first / count).repeat_interleave(size // channels)
        variance = (second / count).repeat_interleave(size // channels) - mean.square()
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in self._batches():
            sigma = token_sigma(batch).double()
            slope = (sigma - (1 - sigma) * variance) / ((1 - sigma).square() * variance + sigma.square())
            predicted = -mean + slope * (noisy_latents(batch).double() - (1 - sigma) * mean)
            sums += _sum_real(batch, per_sample_loss(predicted, velocity_target(batch), batch.seq_offsets))
        return self._mean(sums)

    def _batches(self) -> Iterator[PackedBatch]:
        for request in self.requests:
            micro_batch = self.dataset[request]
            for key, reason in micro_batch.lost:
                if key not in self._reported:  # a filler stands in, which no sum counts
                    print(f"held-out sample {key} cannot be read and is left out: {reason}", file=sys.stderr)
                    self._reported.add(key)
            yield micro_batch.packed

    def _mean(self, sums: Tensor) -> float:
        dist.all_reduce(sums, group=self.ranks.host_group)
        return float(sums[0] / sums[1])


def _sum_real(batch: PackedBatch, losses: Tensor) -> Tensor:
    real = ~torch.tensor(batch.is_filler)
    return torch.stack([losses.detach().cpu().double()[real].sum(), real.sum().double()])


def _real_tokens(batch: PackedBatch, tokens: Tensor) -> list[Tensor]:
    parts = torch.split(tokens, batch.seq_offsets.diff().tolist())
    return [part for part, is_filler in zip(parts, batch.is_filler, strict=True) if not is_filler]
