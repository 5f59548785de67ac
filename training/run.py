"""Puts the parts of a run together; train.py then only has the loop."""

from dataclasses import dataclass
from typing import Any

import torch

from adaptiveload.models.architectures import VideoTransformer
from adaptiveload.scheduling.cost import analytic_prior
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.policies import limit_of
from adaptiveload.training.adaptation import Adaptation
from adaptiveload.training.checkpoint import Checkpointer
from adaptiveload.training.checkpoint_files import read_state
from adaptiveload.training.config import RunConfig, save_config
from adaptiveload.training.cost import Hardware, model_dims
from adaptiveload.training.distributed import Ranks
from adaptiveload.training.ema import Ema
from adaptiveload.training.evaluation import HeldOut
from adaptiveload.training.feed import MicroBatchDataset, PlannedFeed
from adaptiveload.training.handover import warn_of_little_room
from adaptiveload.training.ledger import Ledger
from adaptiveload.training.live_step import build_model
from adaptiveload.training.memory_limits import LIMITS_NAME, MemoryLimits, read_records
from adaptiveload.training.previews import Previews
from adaptiveload.training.profiling import Profiler
from adaptiveload.training.resume import find_to_resume
from adaptiveload.training.rows import move_aside
from adaptiveload.training.run_folder import hold_run_folder
from adaptiveload.training.schedule import (
    Schedule,
    StreamSchedule,
    build_schedule,
    build_stream_schedule,
    check_position,
    memory_conditions,
    model_geometry,
    model_identity,
)
from adaptiveload.training.startup_report import describe_start
from adaptiveload.training.step_guard import StepGuard
from adaptiveload.training.step_timer import StepTimer
from adaptiveload.training.stragglers import StragglerWatch
from adaptiveload.training.stream import StreamFeed
from adaptiveload.training.tracker import FIGURES_NAMES, Tracker
from adaptiveload.training.workers import TAKEN_OVER

# The share of lost samples is taken over at least so many.
_MIN_DRAWN = 1000


@dataclass
class Run:
    """The parts of a run; see `build_run`."""

    config: RunConfig
    ranks: Ranks
    schedule: Schedule | StreamSchedule
    model: VideoTransformer
    optimizer: torch.optim.AdamW
    ema: Ema
    timer: StepTimer
    checkpointer: Checkpointer
    held_out: HeldOut | None
    previews: Previews | None
    feed: PlannedFeed | StreamFeed
    adaptation: Adaptation | None
    ledger: Ledger
    guard: StepGuard
    tracker: Tracker | None
    profiler: Profiler
    straggler_watch: StragglerWatch
    memory: MemoryLimits
    first_step: int

    def saved_state(self, plan: StepPlan) -> dict[str, object]:
        """What a checkpoint after `plan` keeps beside tensors. Random numbers are keyed by seed, epoch and sample."""
        counts = {"num_lost": self.ledger.total, "num_skipped": self.guard.total}
        counts["num_skipped_in_a_row"] = self.guard.in_a_row
        state = {**self.feed.saved_state(plan), **counts, **self.schedule.identity}
        if self.adaptation is not None:
            state["adaptation"] = self.adaptation.state()
        return state


def build_run(config: RunConfig, ranks: Ranks) -> Run:
    """All parts of a run, restored from its checkpoint if there is one to resume.

    Raises:
        ValueError: For anything in configuration, data or checkpoint that training could not live with.
    """
    config.tracking.check_installed()
    hold_run_folder(config.run_dir, ranks)
    checkpoints = config.run_dir / "checkpoints"
    resume_from = find_to_resume(checkpoints, config.checkpoint, ranks)
    saved = read_state(resume_from) if resume_from else None
    hardware = Hardware.of_all(ranks)
    schedule = plan_run(config, ranks, hardware, saved)

    model, timer, optimizer = build_model(config, ranks, is_resumed=resume_from is not None)
    ema = Ema(model, config.ema)
    checkpointer = Checkpointer(checkpoints, config.checkpoint, ranks, model, optimizer, ema)
    first_step, num_lost, skipped = 0, 0, (0, 0)
    if resume_from is not None:
        saved = checkpointer.load(resume_from, schedule.identity)
        first_step, num_lost = int(saved["step"]), int(saved["num_lost"])
        skipped = int(saved["num_skipped"]), int(saved["num_skipped_in_a_row"])
        if isinstance(schedule, Schedule):
            check_position(schedule, first_step, int(saved["position"]))
    if config.checkpoint.is_on and first_step < config.max_steps:
        checkpointer.check_room()
    previews = build_previews(config, ranks, schedule)
    profiler = Profiler(config.profile, ranks, config.run_dir, timer, print)
    feed, held_out, adaptation = build_feeds(config, ranks, schedule, saved, first_step)

    min_drawn = min(_MIN_DRAWN, len(schedule.train_ids)) if isinstance(schedule, Schedule) else _MIN_DRAWN
    ledger = Ledger(config.run_dir, ranks.rank, config.data, min_drawn, num_lost)
    # Nothing refuses the start after this: the folder changes.
    ranks.run_on_main(lambda: begin(config, schedule, ranks.world_size, ledger, first_step))
    tracker = Tracker(config.run_dir, config.tracking, config, first_step, config.max_steps) if ranks.is_main else None
    if tracker is not None:
        profiler.say = tracker.message
    return Run(
        config=config,
        ranks=ranks,
        schedule=schedule,
        model=model,
        optimizer=optimizer,
        ema=ema,
        timer=timer,
        checkpointer=checkpointer,
        held_out=held_out,
        previews=previews,
        feed=feed,
        adaptation=adaptation,
        ledger=ledger,
        guard=StepGuard(config.run_dir, ranks, config.optimizer.max_skipped_in_a_row, *skipped),
        tracker=tracker,
        straggler_watch=StragglerWatch(),
        profiler=profiler,
        memory=build_memory_limits(config, ranks, hardware, schedule),
        first_step=first_step,
    )


def plan_run(
    config: RunConfig, ranks: Ranks, hardware: Hardware, saved: dict[str, Any] | None
) -> Schedule | StreamSchedule:
    """What decides over the run, the same on all ranks; rank 0 also looks whether the shards are as indexed."""
    schedule: Schedule | StreamSchedule
    if config.data.mode == "stream":
        schedule = build_stream_schedule(config, ranks.world_size, hardware)
    else:
        records = ranks.run_on_main(lambda: read_records(config.run_dir / LIMITS_NAME))
        schedule = build_schedule(config, ranks.world_size, ranks.device, saved, records, hardware)
        ranks.run_on_main(schedule.corpus.verify)
    schedule.identity |= model_identity(config)
    return schedule


def begin(
    config: RunConfig, schedule: Schedule | StreamSchedule, num_ranks: int, ledger: Ledger, first_step: int
) -> None:
    """Leave no row in the run's folder that will be written again, and the configuration; say what is done; on rank 0.

    Raises:
        ValueError: If there is nothing to train; the folder is then as it was.
    """
    report = describe_start(config, schedule, num_ranks, first_step)
    if first_step == 0:
        figures = [config.run_dir / name for name in FIGURES_NAMES]
        if line := move_aside([*figures, ledger.lost_path, ledger.skipped_path, ledger.samples_dir]):
            print(line, flush=True)
    ledger.forget_from(first_step)
    if first_step < config.max_steps:
        save_config(schedule.config, config.run_dir / "config.yaml")
    print(report, flush=True)


def build_memory_limits(
    config: RunConfig, ranks: Ranks, hardware: Hardware, schedule: Schedule | StreamSchedule
) -> MemoryLimits:
    """What writes down that a micro-batch did not fit."""
    return MemoryLimits(
        config.run_dir / LIMITS_NAME,
        ranks.rank,
        memory_conditions(config, ranks.world_size, hardware, schedule.meet),
        schedule.settings if isinstance(schedule, Schedule) else schedule.config.schedule,
        can_obey=isinstance(schedule, Schedule) and config.schedule.policy == "balanced",
    )


def build_feeds(
    config: RunConfig,
    ranks: Ranks,
    schedule: Schedule | StreamSchedule,
    saved: dict[str, Any] | None,
    first_step: int,
) -> tuple[PlannedFeed | StreamFeed, HeldOut | None, Adaptation | None]:
    """Training samples; of an indexed run also held-out ones, and what reprices the plans as it goes on."""
    if isinstance(schedule, StreamSchedule):
        return stream_feed(config, ranks, schedule, saved), None, None
    feed, held_out = planned_feeds(config, ranks, schedule, first_step)
    adaptation = Adaptation(config.cost, schedule, schedule.models.cost, ranks, feed.plans_ahead)
    if saved is not None and "adaptation" in saved:
        adaptation.load(saved["adaptation"])
    return feed, held_out, adaptation


def planned_feeds(config: RunConfig, ranks: Ranks, schedule: Schedule, first_step: int) -> tuple[PlannedFeed, HeldOut]:
    """Training and held-out samples of an indexed run."""
    geometry = model_geometry(config.model)
    smallest = min(schedule.table.shapes, key=lambda shape: (geometry.num_tokens(shape), shape))
    parts = (schedule.corpus.reader(), geometry, smallest, config.objective, config.seed)
    training, evaluation = MicroBatchDataset(*parts), MicroBatchDataset(*parts, is_training=False)
    held_out = HeldOut(
        schedule.held_out_ids,
        schedule.corpus,
        evaluation,
        schedule.models.cost,
        limit_of(schedule.settings),
        ranks,
        config.evaluation,
    )
    # An oversize sample runs alone. Latents and noise take at most 4 bytes a number, texts 2; next to a picture's
    # latents its text is large.
    table = schedule.table
    largest = max(limit_of(schedule.settings), int(table.num_tokens.max()))
    text_bytes_per_token = float((table.text_len / table.num_tokens).max()) * config.model.text_dim * 2
    micro_batch_bytes = int(largest * (geometry.token_size * 2 * 4 + text_bytes_per_token))
    if prefetched := config.data.prefetch_factor(micro_batch_bytes):
        warn_of_little_room(micro_batch_bytes * (config.data.num_workers * prefetched + TAKEN_OVER))
    feed = PlannedFeed(
        training,
        schedule.corpus,
        schedule.policy,
        ranks.rank,
        range(first_step, config.max_steps),
        config.data,
        micro_batch_bytes=micro_batch_bytes,
        pin_memory=ranks.device.type == "cuda",
    )
    return feed, held_out


def build_previews(config: RunConfig, ranks: Ranks, schedule: Schedule | StreamSchedule) -> Previews | None:
    """What makes the run's previews, if it has any. Raises ValueError where they cannot be made."""
    if not config.previews.every_steps:
        return None
    if isinstance(schedule, StreamSchedule):
        raise ValueError("previews.every_steps: previews need data.mode=index, they sample captions of the index")
    return Previews(
        config.previews,
        config.objective,
        schedule.corpus,
        config.data.held_out_share,
        config.seed,
        model_geometry(config.model),
        ranks,
        limit_of(schedule.settings),
        config.run_dir,
    )


def stream_feed(
    config: RunConfig, ranks: Ranks, schedule: StreamSchedule, saved: dict[str, object] | None
) -> StreamFeed:
    """Training samples of a run without an index."""
    return StreamFeed(
        config.data,
        schedule.config.schedule,
        ranks,
        saved,
        analytic_prior(model_dims(config.model), schedule.config.cost.gpu, config.schedule.recompute),
        schedule.meet,
        model_geometry(config.model),
        config.objective,
        config.model.text_dim,
        config.model.text_len,
        config.seed,
    )


def check_agreement(ranks: Ranks, plan: StepPlan) -> None:
    """Compare the ranks' plans before a step: a stale index stops the run in words instead of hanging it.

    Raises:
        RuntimeError: On all ranks, if their plans differ.
    """
    digests = ranks.gather(torch.tensor([int(plan.digest[:15], 16)], dtype=torch.int64)).flatten().tolist()
    if len(set(digests)) > 1:
        raise RuntimeError(
            f"step {plan.step}: the ranks planned different steps (digests {[f'{digest:015x}' for digest in digests]}"
            "): a rank has another index, configuration or version"
        )
