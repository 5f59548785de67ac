"""From step plans to packed micro-batches: DataLoader workers read, draw noise, and pack what the plan asks for."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from adaptiveload.data.corpus import Corpus, CorpusReader, SourceConfig
from adaptiveload.data.index import SamplePlace
from adaptiveload.data.reader import FIRST_CAPTION, Sample, SampleError
from adaptiveload.models.flow_matching import FlowMatchingConfig, draw, sample_generator
from adaptiveload.models.packing import PackedBatch, PackedSample, filler_sample, pack, patchify
from adaptiveload.scheduling.choices import check_choice
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.policies import Policy
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.shapes import LatentGeometry, Shape
from adaptiveload.training.workers import TAKEN_OVER, Loaded

# Epoch number of held-out draws: no training epoch is negative, so they never share noise with training.
HELD_OUT_EPOCH = -1


# Most micro-batches that one worker prepares ahead: plans are made as early, and nothing is gained beyond.
_MOST_PREFETCHED = 16


@dataclass
class DataConfig:
    """`path` is a folder or URL written by scripts.prepare or indexed by scripts.index_shards.

    Attributes:
        mode: "index" plans over the whole dataset; "stream" reads shards without an index.
        path: The dataset; not looked at where `sources` are given. A stream also takes `shards-{000..999}.tar`.
        sources: Several datasets to mix; an entry has the keys of `SourceConfig`.
        held_out_share: Share of the source files kept out of training, chosen by hash of the source.
        num_workers: DataLoader processes a rank; 0 reads in the training process. Steps do not depend on it.
        prefetch_mib: Memory that micro-batches ahead may take on a rank; each worker has at least one, and three have
            been taken over from the workers.
        worker_timeout_s: The run stops when a micro-batch takes the workers longer than this.
        max_lost_share: The run stops when more than this share of the samples drawn so far could not be read.
        log_samples: Write the names of the samples of every step to `samples_used/rank-RRR.jsonl`.
    """

    mode: str = "index"
    path: str = "sample_data/latents"
    sources: list[SourceConfig] = field(default_factory=list)
    held_out_share: float = 0.1
    num_workers: int = 1
    prefetch_mib: int = 1024
    worker_timeout_s: float = 600.0
    max_lost_share: float = 0.01
    log_samples: bool = False

    def check(self) -> None:
        """Raise ValueError for a value outside its range, naming the key."""
        check_choice("data.mode", self.mode, ("index", "stream"))
        for name in ("held_out_share", "max_lost_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"data.{name}={getattr(self, name)} must be in [0, 1)")
        if self.num_workers < 0 or self.prefetch_mib < 1 or not self.worker_timeout_s > 0:
            raise ValueError(
                f"data.num_workers={self.num_workers}, data.prefetch_mib={self.prefetch_mib}, "
                f"data.worker_timeout_s={self.worker_timeout_s}: at least 0, at least 1, positive"
            )

    @property
    def all_sources(self) -> list[SourceConfig]:
        """The datasets to mix; one of default settings if only `path` is given."""
        return self.sources or [SourceConfig(path=self.path)]

    def prefetch_factor(self, micro_batch_bytes: int) -> int | None:
        """Micro-batches that each worker prepares ahead, for `DataLoader`."""
        if not self.num_workers:
            return None
        fitting = self.prefetch_mib * 2**20 // micro_batch_bytes - TAKEN_OVER
        return min(max(fitting // self.num_workers, 1), _MOST_PREFETCHED)


@dataclass(frozen=True)
class PlannedSample:
    """One sample at one place of the endless order.

    Attributes:
        sample_id: Row of the corpus.
        place: Where it lies, so that workers need no index.
        epoch: Epoch of the order; with `repeat` and the sample's name it keys noise, timestep and caption dropout.
        repeat: Which of the sample's repeats within the epoch.
        weight: w_i of the loss.
    """

    sample_id: int
    place: SamplePlace
    epoch: int
    repeat: int
    weight: float = 1.0


@dataclass
class MicroBatch:
    """What a worker hands over: the tensors, and the samples that it could not read as (key, reason)."""

    packed: PackedBatch
    lost: list[tuple[str, str]] = field(default_factory=list)

    @property
    def trained(self) -> list[str]:
        """Names of the samples that count, fillers left out."""
        return [key for key, is_filler in zip(self.packed.keys, self.packed.is_filler, strict=True) if not is_filler]

    def pin_memory(self) -> "MicroBatch":
        """Called by DataLoader."""
        self.packed = self.packed.pin_memory()
        return self


class MicroBatchDataset(Dataset[MicroBatch]):
    """Maps a planned micro-batch to its tensors. An unreadable sample, like an empty micro-batch, is a filler.

    Args:
        reader: Access to the samples.
        geometry: Strides and patch.
        filler: Shape of fillers: the smallest there is.
        objective: Timestep distribution and caption dropout.
        seed: The run's seed.
        is_training: False for held-out samples: their first captions always count, and all their frames.
    """

    def __init__(
        self,
        reader: CorpusReader,
        geometry: LatentGeometry,
        filler: Shape,
        objective: FlowMatchingConfig,
        seed: int,
        is_training: bool = True,
    ) -> None:
        self.reader = reader
        self.geometry = geometry
        self.objective = objective
        self.seed = seed
        self.is_training = is_training
        self.filler_grid = tuple(geometry.token_grid(filler))
        self.null_text = reader.null_text()

    def __getitem__(self, micro_batch: tuple[PlannedSample, ...]) -> MicroBatch:
        """Tensors of a planned micro-batch; of one filler if it is empty."""
        lost: list[tuple[str, str]] = []
        samples = []
        for planned in micro_batch:
            try:
                samples.append(self._sample(planned, self.reader.read(planned.place)))
            except SampleError as error:
                lost.append((error.key, error.reason))
                samples.append(self._filler(f"filler for {error.key}"))
        return MicroBatch(pack(samples or [self._filler("filler")]), lost)

    def _sample(self, planned: PlannedSample, sample: Sample) -> PackedSample:
        name = planned.place.name
        rng = sample_generator(self.seed, sample.source, name, planned.epoch, planned.repeat)
        grid = tuple(self.geometry.token_grid(planned.place.served))
        drawn = draw(rng, sample.stored_latents.shape, int(np.prod(grid)), self.objective)
        return PackedSample(
            key=name,
            sample_id=planned.sample_id,
            grid=grid,
            latents=patchify(sample.stored_latents, self.geometry.patch),
            noise=patchify(torch.from_numpy(drawn.noise), self.geometry.patch),
            sigma=drawn.sigma,
            clean_frames=drawn.clean_frames if self.is_training else 0,
            text=self._text(planned, sample, drawn.drops_text),
            weight=planned.weight * drawn.loss_weight,
        )

    def _text(self, planned: PlannedSample, sample: Sample, drops_text: bool) -> torch.Tensor:
        if not self.is_training:
            return sample.stored_texts[FIRST_CAPTION]
        if drops_text:
            return self.null_text
        name = planned.place.name
        rng = sample_generator(self.seed, sample.source, f"{name}\0caption", planned.epoch, planned.repeat)
        return sample.stored_texts[self.reader.choose_caption(planned.place, sample, rng.random())]

    def _filler(self, key: str) -> PackedSample:
        return filler_sample(self.filler_grid, self.geometry.token_size, self.null_text.shape[1], key=key)


class PlannedFeed:
    """This rank's micro-batches, step after step, read ahead by DataLoader workers.

    Args:
        dataset: Makes the tensors.
        corpus: Where samples lie.
        policy: Plans each step.
        rank: Whose micro-batches.
        steps: Steps to serve, in order.
        config: Workers and prefetch.
        micro_batch_bytes: Of the largest micro-batch.
        pin_memory: For copies to the GPU that do not wait.
    """

    def __init__(
        self,
        dataset: MicroBatchDataset,
        corpus: Corpus,
        policy: Policy,
        rank: int,
        steps: range,
        config: DataConfig,
        micro_batch_bytes: int,
        pin_memory: bool,
    ) -> None:
        self.dataset = dataset
        self.rank = rank
        self.epoch_size = policy.order.epoch_size
        self.table: SampleTable = corpus.table
        sampler = _PlanSampler(policy, corpus, rank, steps)
        self._plans = sampler.plans
        self._batches = Loaded(
            dataset,
            sampler,
            num_workers=config.num_workers,
            prefetch=config.prefetch_factor(micro_batch_bytes),
            timeout_s=config.worker_timeout_s,
            pin_memory=pin_memory,
        )

    @property
    def plans_ahead(self) -> int:
        """Most steps that are planned before the one that runs has ended: each has at least one micro-batch."""
        return self._batches.ahead

    @property
    def wait_s(self) -> float:
        """Seconds that the training process has waited for workers so far."""
        return self._batches.wait_s

    def next_step(self) -> tuple[StepPlan, Iterator[MicroBatch]]:
        """The next step's plan and its micro-batches for this rank, which must be taken before the next call."""
        first = next(self._batches)
        plan = self._plans.pop(0)
        rest = (next(self._batches) for _ in range(len(plan.micro_batches(self.rank)) - 1))
        return plan, chain([first], rest)

    def close(self) -> None:
        """End the workers."""
        self._batches.close()

    def saved_state(self, plan: StepPlan) -> dict[str, Any]:
        """What a checkpoint after `plan` keeps of the order: one number, and what it means."""
        epoch, drawn = divmod(plan.next_position, self.epoch_size)
        return {"position": plan.next_position, "position_is": f"epoch {epoch}, {drawn} of {self.epoch_size} samples"}


class _PlanSampler(Sampler[tuple[PlannedSample, ...]]):
    """Plans steps as workers ask for more, and keeps the plans for the training loop."""

    def __init__(self, policy: Policy, corpus: Corpus, rank: int, steps: range) -> None:
        self.policy, self.corpus, self.rank, self.steps = policy, corpus, rank, steps
        self.plans: list[StepPlan] = []

    def __iter__(self) -> Iterator[tuple[PlannedSample, ...]]:
        for step in self.steps:
            plan = self.policy.plan(step)
            self.plans.append(plan)
            for indices in plan.micro_batches(self.rank):
                yield tuple(planned_sample(plan, self.corpus, i) for i in indices)


def planned_sample(plan: StepPlan, corpus: Corpus, i: int) -> PlannedSample:
    """Draw `i` of a plan, as workers get it."""
    sample_id = int(plan.sample_ids[i])
    draw_of = (int(plan.epochs[i]), int(plan.repeats[i]), float(plan.weights[i]))
    return PlannedSample(sample_id, corpus.place(sample_id), *draw_of)
