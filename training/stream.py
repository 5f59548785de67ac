"""`data.mode: stream`: every rank reads its own shards and fills micro-batches alone; then the ranks agree on a step.

Ranks tell each other the shapes of what they hold, so that all make the same plan, with as many micro-batches each and
fillers where one has run out. An epoch ends for all when none has a sample left. Same trainer, same figures; what an
index would allow, leveling the work of the ranks, is not done here.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from adaptiveload.data.reader import FIRST_CAPTION, Sample, read_null_text
from adaptiveload.data.stream import (
    Progress,
    ShardEnd,
    StreamLoss,
    StreamPlace,
    deal_shards,
    find_shards,
    peek_normalization,
    read_stream,
)
from adaptiveload.models.flow_matching import FlowMatchingConfig, draw, sample_generator
from adaptiveload.models.packing import PackedSample, filler_sample, pack, patchify
from adaptiveload.scheduling.assemble import StepAssembler
from adaptiveload.scheduling.cost import CostModel
from adaptiveload.scheduling.order import Draws
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.policies import STREAM_POLICIES, ScheduleConfig, num_replicas, recompute_of
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.shapes import LatentGeometry, Shape
from adaptiveload.scheduling.updates import CostHistory
from adaptiveload.training.feed import DataConfig, MicroBatch
from adaptiveload.training.packers import QUEUE, BucketPacker, LocalPacker, Packer, StreamItem
from adaptiveload.training.workers import Loaded

if TYPE_CHECKING:
    from adaptiveload.training.distributed import Ranks

# M_comp = f * S_max ** p, and the cost target of local packing = f * cost of the longest sample: 1.25 has the highest
# tokens/s at a memory of twice the longest sample.
DEFAULT_FACTOR = 1.25


class StreamDataset(IterableDataset[StreamItem | StreamLoss | ShardEnd]):
    """A rank's samples of one epoch, drawn and patchified in the reading process."""

    def __init__(
        self,
        urls: list[str],
        share: tuple[int, int],
        progress: Progress,
        normalization_hash: str | None,
        null_text: torch.Tensor,
        text_len: int,
        schedule: ScheduleConfig,
        geometry: LatentGeometry,
        objective: FlowMatchingConfig,
        seed: int,
    ) -> None:
        self.urls, self.share, self.progress = urls, share, progress
        self.normalization_hash = normalization_hash
        self.null_text, self.text_len = null_text, text_len
        self.schedule, self.geometry, self.objective, self.seed = schedule, geometry, objective, seed

    def __iter__(self) -> Iterator[StreamItem | StreamLoss | ShardEnd]:
        known = (self.null_text.shape[1], self.normalization_hash, self.geometry)
        for found in read_stream(self.urls, *self.share, self.progress, *known):
            if not isinstance(found, tuple):
                yield found
                continue
            place, shape, sample = found
            name, tokens = f"{place.shard}/{sample.key}", self.geometry.num_tokens(shape)
            if tokens > self.schedule.memory_limit_tokens and not self.schedule.allow_oversize:
                limit = self.schedule.memory_limit_tokens
                yield StreamLoss(name, f"{tokens} tokens, above schedule.memory_limit_tokens = {limit}", place)
            elif len(sample.stored_texts[FIRST_CAPTION]) > self.text_len:
                rows = len(sample.stored_texts[FIRST_CAPTION])
                yield StreamLoss(name, f"{rows} text rows, above model.text_len = {self.text_len}", place)
            else:
                yield StreamItem(place, shape, sample.source, self._draw(place, shape, sample))

    def _draw(self, place: StreamPlace, shape: Shape, sample: Sample) -> PackedSample:
        rng = sample_generator(self.seed, sample.source, sample.key, self.progress.epoch, 0)
        grid = tuple(self.geometry.token_grid(shape))
        drawn = draw(rng, sample.stored_latents.shape, int(np.prod(grid)), self.objective)
        return PackedSample(
            key=f"{place.shard}/{sample.key}",
            grid=grid,
            latents=patchify(sample.stored_latents, self.geometry.patch),
            noise=patchify(torch.from_numpy(drawn.noise), self.geometry.patch),
            sigma=drawn.sigma,
            clean_frames=drawn.clean_frames,
            weight=math.prod(grid) ** self.schedule.loss_weight_exponent * drawn.loss_weight,
            text=self.null_text if drawn.drops_text else sample.stored_texts[FIRST_CAPTION],
        )


class StreamFeed:
    """Steps from streams, with `PlannedFeed`'s interface. Every method that makes a step is collective.

    Args:
        data, schedule: The run's configuration.
        ranks: All of them make every step together.
        saved: State of the checkpoint that is resumed.
        text_dim, text_len: The model's.

    Raises:
        ValueError: If there are no shards, no null embedding, or the configuration asks for what needs an index.
    """

    def __init__(
        self,
        data: DataConfig,
        schedule: ScheduleConfig,
        ranks: "Ranks",
        saved: dict[str, Any] | None,
        cost_model: CostModel,
        meet: str,
        geometry: LatentGeometry,
        objective: FlowMatchingConfig,
        text_dim: int,
        text_len: int,
        seed: int,
    ) -> None:
        check_stream_config(data, schedule)
        self.data, self.schedule, self.ranks = data, schedule, ranks
        self.cost_model, self.meet = cost_model, meet
        self.geometry, self.objective, self.text_len, self.seed = geometry, objective, text_len, seed
        self.urls, storage = find_shards(data.path)
        self.null_text = read_null_text(storage, text_dim)
        self._normalization_hash = peek_normalization(self.urls)
        self._waited_s = 0.0
        self.table: SampleTable | None = None
        self._position = int(saved["position"]) if saved else 0
        self._step = int(saved["step"]) if saved else 0
        self._progress = Progress.merged([saved["stream"]]) if saved else Progress()
        self._longest = int(saved["longest_tokens"]) if saved else 0
        self._ahead: list[StreamItem] = []
        self._lost: list[tuple[str, str]] = []
        self._packer: Packer | None = None
        self._filler_grid = tuple(geometry.token_grid(Shape(1, *geometry.pixel_multiple)))
        self._begin_epoch()

    @property
    def wait_s(self) -> float:
        """Seconds that the training process has waited for the reading process so far."""
        return self._waited_s + self._items.wait_s

    def next_step(self) -> tuple[StepPlan, Iterator[MicroBatch]]:
        """The next step's plan and its micro-batches for this rank.

        Raises:
            RuntimeError: On all ranks, if a whole epoch has no usable sample.
        """
        if self._packer is None:
            self._packer = self._make_packer()
        for _ in range(2):
            mine = self._collect()
            told = self.ranks.gather_objects([[_told(item) for item in batch] for batch in mine])
            if any(batches for batches in told):
                plan = self._plan(told)
                return plan, self._micro_batches(mine, plan)
            self._end_epoch()
        raise RuntimeError(
            f"{self.data.path}: a whole epoch without a usable sample; lost on this rank: {self._lost[:3]}"
        )

    def close(self) -> None:
        """End the reading process."""
        self._items.close()

    def saved_state(self, plan: StepPlan) -> dict[str, Any]:
        """What a checkpoint after `plan` keeps; collective."""
        progress = Progress.merged(self.ranks.gather_objects(self._progress.to_json()))
        done = sum(map(len, progress.done.values()))
        return {
            "position": plan.next_position,
            "position_is": f"epoch {progress.epoch}, {done} samples done in {len(progress.done)} of "
            f"{len(self.urls)} shards",
            "stream": progress.to_json(),
            "longest_tokens": self._longest,
        }

    def _collect(self) -> list[list[StreamItem]]:
        """This rank's micro-batches of a step, fewer at the end of the epoch."""
        assert self._packer is not None
        batches: list[list[StreamItem]] = []
        while len(batches) < self.schedule.slots_per_step:
            batch = self._packer.take(self._is_exhausted)
            if batch is not None:
                batches.append(batch)
            elif self._is_exhausted:
                break
            elif (item := self._next()) is not None:
                self._packer.add(item)
        return batches

    @property
    def _is_exhausted(self) -> bool:
        """Whether the packer has got all samples of this rank's epoch."""
        return self._has_read_all and not self._ahead

    def _plan(self, told: list[list[list[tuple[Any, ...]]]]) -> StepPlan:
        num_slots = max(len(batches) for batches in told)
        rows: list[tuple[Any, ...]] = []
        slots: list[list[list[int]]] = [[] for _ in range(num_slots)]
        for slot in range(num_slots):
            for batches in told:
                batch = batches[slot] if slot < len(batches) else []
                slots[slot].append(list(range(len(rows), len(rows) + len(batch))))
                rows += batch
        keys, sources, frames, heights, widths, text_lens = zip(*rows, strict=True)
        self.table = SampleTable.from_columns(keys, sources, frames, heights, widths, text_lens, self.geometry)
        config = self.schedule
        costs = CostHistory(self.cost_model)  # nothing is refitted in a stream
        assembler = StepAssembler(
            self.table,
            costs,
            self.meet,
            recompute_of(config),
            config.loss_weight_exponent,
            config.text_memory_tokens,
            num_replicas(config.shard_ranks, self.ranks.world_size),
        )
        ids = np.arange(len(rows))
        draws = Draws(ids, np.full(len(rows), self._progress.epoch), np.zeros(len(rows), np.int64))
        plan = assembler.assemble(self._step, self._position, draws, slots)
        self._step, self._position = self._step + 1, plan.next_position
        return plan

    def _micro_batches(self, mine: list[list[StreamItem]], plan: StepPlan) -> Iterator[MicroBatch]:
        for item in (item for batch in mine for item in batch):
            self._progress.mark(item.place)
        text_dim = self.null_text.shape[1]
        filler = filler_sample(self._filler_grid, self.geometry.token_size, text_dim)
        for slot in range(plan.num_slots):
            samples = [item.packed for item in mine[slot]] if slot < len(mine) else []
            lost, self._lost = self._lost, []
            yield MicroBatch(pack(samples or [filler]), lost)

    def _next(self) -> StreamItem | None:
        """The next sample; None at a loss, at the end of a shard, and at the end of the epoch."""
        if self._ahead:
            return self._ahead.pop(0)
        found = next(self._items, None)
        if isinstance(found, StreamItem):
            return found
        if isinstance(found, StreamLoss):
            self._lost.append((found.key, found.reason))
            if found.place is not None:
                self._progress.mark(found.place)
        elif isinstance(found, ShardEnd):
            self._progress.totals[found.shard] = found.total
        else:
            self._has_read_all = True
        return None

    def _make_packer(self) -> Packer:
        """The packer, once the ranks agree on the longest of the first samples of each."""
        if not self._longest:
            first: list[StreamItem] = []
            while len(first) < QUEUE and not self._has_read_all:
                if (item := self._next()) is not None:
                    first.append(item)
            self._ahead = first
            self._longest = max(self.ranks.gather_objects(max((item.num_tokens for item in first), default=0)))
        config = self.schedule
        longest = max(self._longest, 1)
        factor = DEFAULT_FACTOR if config.compute_limit_factor is None else config.compute_limit_factor
        if config.policy == "local":
            cost_us = int(self.cost_model.sample_us(np.array([longest]), np.zeros(1, np.int64))[0])
            target = round(factor * cost_us)
            return LocalPacker(self.cost_model, config.memory_limit_tokens, config.max_samples_per_micro_batch, target)
        limit = factor * longest**config.cost_exponent if config.policy == "dual_constraint" else float("inf")
        return BucketPacker(config.memory_limit_tokens, config.max_samples_per_micro_batch, limit, config.cost_exponent)

    def _begin_epoch(self) -> None:
        rank, ranks = self.ranks.rank, self.ranks.world_size
        urls, *share = deal_shards(self.urls, self.seed, self._progress.epoch, rank, ranks)
        dataset = StreamDataset(
            urls,
            (share[0], share[1]),
            self._progress,
            self._normalization_hash,
            self.null_text,
            self.text_len,
            self.schedule,
            self.geometry,
            self.objective,
            self.seed,
        )
        self._items = Loaded(
            dataset, num_workers=self.data.num_workers, prefetch=QUEUE, timeout_s=self.data.worker_timeout_s
        )
        self._has_read_all = False

    def _end_epoch(self) -> None:
        self._waited_s += self._items.wait_s
        self._items.close()
        self._progress = Progress(self._progress.epoch + 1)
        self._begin_epoch()


def check_stream_config(data: DataConfig, schedule: ScheduleConfig) -> None:
    """Raise ValueError for what needs an index, naming the key; the values themselves are checked with the rest."""
    if schedule.policy not in STREAM_POLICIES:
        raise ValueError(
            f"schedule.policy={schedule.policy!r} needs an index; data.mode=stream has {', '.join(STREAM_POLICIES)}"
        )
    if data.num_workers > 1:
        raise ValueError(f"data.num_workers={data.num_workers}: data.mode=stream reads in order, with 0 or 1 a rank")
    if data.held_out_share or data.sources:
        raise ValueError(
            "data.mode=stream cannot hold samples out or mix sources: set data.held_out_share=0 and leave data.sources"
        )
    if schedule.memory_limit_tokens is None:
        raise ValueError(
            "data.mode=stream needs a number for schedule.memory_limit_tokens: no lengths are known to derive it from"
        )


def _told(item: StreamItem) -> tuple[Any, ...]:
    return (item.packed.key, item.source, *item.shape, len(item.packed.text))
