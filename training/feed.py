"""From step plans to packed micro-batches: DataLoader workers read, draw noise, and pack what the plan asks for."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from adaptiveload.data.reader import Sample, SampleError, SampleReader
from adaptiveload.models.flow_matching import FlowMatchingConfig, draw, sample_generator
from adaptiveload.models.packing import PackedBatch, PackedSample, filler_sample, pack, patchify
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.policies import Policy
from adaptiveload.scheduling.shapes import LatentGeometry, Shape

# Epoch number of held-out draws: no training epoch is negative, so they never share noise with training.
HELD_OUT_EPOCH = -1


@dataclass
class DataConfig:
    """`path` is a folder written by scripts.prepare or indexed by scripts.index_shards.

    Attributes:
        held_out_share: Share of the source files kept out of training, chosen by hash of the source.
        num_workers: DataLoader processes a rank; 0 reads in the training process.
        prefetch: Micro-batches that each worker prepares ahead.
        max_lost_share: The run stops when more than this share of the samples drawn so far could not be read.
    """

    path: str = "sample_data/latents"
    held_out_share: float = 0.1
    num_workers: int = 1
    prefetch: int = 4
    max_lost_share: float = 0.01

    def check(self) -> None:
        """Raise ValueError for a value outside its range, naming the key."""
        for name in ("held_out_share", "max_lost_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"data.{name}={getattr(self, name)} must be in [0, 1)")
        if self.num_workers < 0 or self.prefetch < 1:
            raise ValueError(f"data.num_workers={self.num_workers}, data.prefetch={self.prefetch}: at least 0 and 1")


@dataclass(frozen=True)
class PlannedSample:
    """One sample at one place of the endless order.

    Attributes:
        sample_id: Row of the index.
        epoch: Epoch of the order; with `repeat` and the sample's name it keys noise, timestep and caption dropout.
        repeat: Which of the sample's repeats within the epoch.
        weight: w_i of the loss.
    """

    sample_id: int
    epoch: int
    repeat: int
    weight: float = 1.0


@dataclass
class MicroBatch:
    """What a worker hands over: the tensors, and the samples that it could not read as (key, reason)."""

    packed: PackedBatch
    lost: list[tuple[str, str]] = field(default_factory=list)

    def pin_memory(self) -> "MicroBatch":
        """Called by DataLoader."""
        self.packed = self.packed.pin_memory()
        return self


class MicroBatchDataset(Dataset[MicroBatch]):
    """Maps a planned micro-batch to its tensors. An unreadable sample, like an empty micro-batch, is a filler.

    Args:
        reader: Access to the dataset.
        geometry: Strides and patch.
        objective: Timestep distribution and caption dropout.
        seed: The run's seed.
        text_dropout: False for held-out samples, whose captions always count.
    """

    def __init__(
        self,
        reader: SampleReader,
        geometry: LatentGeometry,
        objective: FlowMatchingConfig,
        seed: int,
        text_dropout: bool = True,
    ) -> None:
        self.reader = reader
        self.geometry = geometry
        self.objective = objective
        self.seed = seed
        self.text_dropout = text_dropout
        index = reader.index
        shapes = np.unique(np.stack([index.frames, index.heights, index.widths]), axis=1).T
        smallest = min((Shape(*map(int, shape)) for shape in shapes), key=geometry.num_tokens)
        self.filler_grid = tuple(geometry.token_grid(smallest))
        self.null_text = reader.null_text()

    def __getitem__(self, micro_batch: tuple[PlannedSample, ...]) -> MicroBatch:
        """Tensors of a planned micro-batch; of one filler if it is empty."""
        lost: list[tuple[str, str]] = []
        samples = []
        for planned in micro_batch:
            try:
                samples.append(self._sample(planned, self.reader.read(planned.sample_id)))
            except SampleError as error:
                lost.append((error.key, error.reason))
                samples.append(self._filler(f"filler for {error.key}"))
        return MicroBatch(pack(samples or [self._filler("filler")]), lost)

    def _sample(self, planned: PlannedSample, sample: Sample) -> PackedSample:
        rng = sample_generator(self.seed, sample.source, sample.key, planned.epoch, planned.repeat)
        grid = tuple(self.geometry.token_grid(self.reader.index.shape(planned.sample_id)))
        drawn = draw(rng, sample.latents.shape, int(np.prod(grid)), self.objective)
        use_null = drawn.drops_text and self.text_dropout
        return PackedSample(
            key=sample.key,
            sample_id=planned.sample_id,
            grid=grid,
            latents=patchify(torch.from_numpy(sample.latents), self.geometry.patch),
            noise=patchify(torch.from_numpy(drawn.noise), self.geometry.patch),
            sigma=drawn.sigma,
            text=torch.from_numpy(self.null_text if use_null else sample.text),
            weight=planned.weight,
        )

    def _filler(self, key: str) -> PackedSample:
        return filler_sample(self.filler_grid, self.geometry.token_size, self.null_text.shape[1], key=key)


class PlannedFeed:
    """This rank's micro-batches, step after step, read ahead by DataLoader workers.

    Args:
        dataset: Makes the tensors.
        policy: Plans each step.
        rank: Whose micro-batches.
        steps: Steps to serve, in order.
        config: Workers and prefetch.
        pin_memory: For copies to the GPU that do not wait.

    Attributes:
        wait_s: Seconds that the training process has waited for workers so far.
        plans_ahead: Most steps that are planned before the one that runs has ended: workers hold so many micro-batches.
    """

    def __init__(
        self,
        dataset: MicroBatchDataset,
        policy: Policy,
        rank: int,
        steps: range,
        config: DataConfig,
        pin_memory: bool,
    ) -> None:
        self.dataset = dataset
        self.rank = rank
        self.wait_s = 0.0
        self.plans_ahead = config.num_workers * config.prefetch
        sampler = _PlanSampler(policy, rank, steps)
        self._plans = sampler.plans
        self._batches = iter(
            DataLoader(
                dataset,
                sampler=sampler,
                batch_size=None,
                num_workers=config.num_workers,
                prefetch_factor=config.prefetch if config.num_workers else None,
                pin_memory=pin_memory,
            )
        )

    def next_step(self) -> tuple[StepPlan, Iterator[MicroBatch]]:
        """The next step's plan and its micro-batches for this rank, which must be taken before the next call."""
        first = self._next()
        plan = self._plans.pop(0)
        rest = (self._next() for _ in range(len(plan.micro_batches(self.rank)) - 1))
        return plan, chain([first], rest)

    def close(self) -> None:
        """End the workers."""
        self._batches = iter(())

    def _next(self) -> MicroBatch:
        start = time.perf_counter()
        batch = next(self._batches)
        self.wait_s += time.perf_counter() - start
        return batch


class _PlanSampler(Sampler[tuple[PlannedSample, ...]]):
    """Plans steps as workers ask for more, and keeps the plans for the training loop."""

    def __init__(self, policy: Policy, rank: int, steps: range) -> None:
        self.policy, self.rank, self.steps = policy, rank, steps
        self.plans: list[StepPlan] = []

    def __iter__(self) -> Iterator[tuple[PlannedSample, ...]]:
        for step in self.steps:
            plan = self.policy.plan(step)
            self.plans.append(plan)
            for indices in plan.micro_batches(self.rank):
                yield tuple(
                    PlannedSample(
                        int(plan.sample_ids[i]), int(plan.epochs[i]), int(plan.repeats[i]), float(plan.weights[i])
                    )
                    for i in indices
                )


class LostSamples:
    """Counts and names the samples that could not be read, in `lost.jsonl`; says when there are too many.

    Args:
        path: File that takes a line for each loss, with step, rank, key and reason.
        max_share: Limit of losses over samples drawn.
        min_drawn: The share is taken over at least this many samples, so that one early loss does not stop a run.
        total: Losses of all ranks before this start, from the checkpoint.
    """

    def __init__(self, path: Path, max_share: float, min_drawn: int, total: int) -> None:
        self.path = path
        self.max_share = max_share
        self.min_drawn = min_drawn
        self.total = total

    def forget_from(self, step: int) -> None:
        """Drop the lines of `step` and later ones, which an earlier try wrote; for one rank, before training."""
        if self.path.exists():
            kept = [line for line in self.path.read_text().splitlines() if json.loads(line)["step"] < step]
            self.path.write_text("".join(line + "\n" for line in kept))

    def record(self, step: int, rank: int, lost: list[tuple[str, str]]) -> None:
        """Write the losses of one micro-batch down."""
        if not lost:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"step": step, "rank": rank, "key": key, "reason": reason}) for key, reason in lost]
        with self.path.open("a") as file:
            file.write("".join(line + "\n" for line in lines))

    def add(self, num_lost: int, num_drawn: int) -> None:
        """Count a step's losses of all ranks; call it on every rank with the same numbers.

        Raises:
            RuntimeError: If more than the set share of the `num_drawn` samples drawn so far was lost.
        """
        self.total += num_lost
        if self.total > self.max_share * max(num_drawn, self.min_drawn):
            raise RuntimeError(
                f"{self.total} of {num_drawn} samples could not be read, more than data.max_lost_share="
                f"{self.max_share} allows; {self.path} names them"
            )
