"""Puts the parts of a run together; train.py then only has the loop."""

import json
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from adaptiveload.data.corpus import Corpus, open_corpus
from adaptiveload.data.stream import find_shards, peek_normalization, shard_names
from adaptiveload.models.architectures import VideoTransformer
from adaptiveload.models.config import ModelConfig
from adaptiveload.scheduling.cost import analytic_prior
from adaptiveload.scheduling.order import EndlessOrder, held_out_mask
from adaptiveload.scheduling.paper_policies import BucketPolicy
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.policies import Policy, ScheduleConfig, build_policy, limit_of, resolve_lookahead
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.shapes import LatentGeometry
from adaptiveload.scheduling.updates import CostHistory, ScheduleUpdate
from adaptiveload.training.adaptation import Adaptation
from adaptiveload.training.checkpoint import Checkpointer, find_to_resume
from adaptiveload.training.checkpoint_files import read_state
from adaptiveload.training.config import RunConfig, save_config
from adaptiveload.training.cost import RunModels, build_models, device_memory_bytes, model_dims, resolve_gpu
from adaptiveload.training.distributed import Ranks
from adaptiveload.training.ema import Ema
from adaptiveload.training.evaluation import HeldOut
from adaptiveload.training.feed import MicroBatchDataset, PlannedFeed
from adaptiveload.training.handover import warn_of_little_room
from adaptiveload.training.ledger import Ledger
from adaptiveload.training.live_step import build_model, lay_out_model
from adaptiveload.training.previews import Previews
from adaptiveload.training.step_guard import StepGuard
from adaptiveload.training.step_timer import StepTimer
from adaptiveload.training.stream import StreamFeed, check_stream_config
from adaptiveload.training.tracker import Tracker
from adaptiveload.training.trained_weights import frozen_identity
from adaptiveload.training.workers import TAKEN_OVER

# bf16 weights and fp32 gradients, of the whole model, which `meet: step` keeps on every rank over a step.
_WEIGHT_BYTES, _GRADIENT_BYTES = 2, 4
# `meet: auto` spends at most this share of a rank's memory on them; 1.3B takes 8.5 GB of an H200's 141.
_UNSHARDED_SHARE = 0.125
# The share of lost samples is taken over at least so many.
_MIN_DRAWN = 1000
# The paper's p on Wan 1.3B; without an index there are no lengths to fit one to.
_STREAM_COST_EXPONENT = 1.45


@dataclass
class Schedule:
    """Everything that decides who computes what.

    Attributes:
        corpus: All samples, and where they lie.
        table: The samples as the scheduler sees them.
        train_ids, held_out_ids: int64 rows of the corpus.
        order: Order of the training samples.
        policy: Plans steps.
        models: Cost and memory models that the run starts with.
        history: Cost model of every step; it grows while the run adapts.
        meet: "slot" or "step".
        identity: What a resumed run must have in common with the one that saved.
        config: The run's configuration with every "auto" of the schedule replaced by what it came to.
    """

    corpus: Corpus
    table: SampleTable
    train_ids: np.ndarray
    held_out_ids: np.ndarray
    order: EndlessOrder
    policy: Policy
    models: RunModels
    history: CostHistory
    meet: str
    identity: dict[str, object]
    config: RunConfig

    @property
    def settings(self) -> ScheduleConfig:
        """The schedule's part of `config`."""
        return self.config.schedule


@dataclass
class StreamSchedule:
    """What takes the place of `Schedule` without an index.

    Attributes:
        meet: "slot" or "step".
        identity: What a resumed run must have in common with the one that saved.
        config: The run's configuration with every "auto" of the schedule replaced by what it came to.
    """

    meet: str
    identity: dict[str, object]
    config: RunConfig


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
    first_step: int

    def saved_state(self, plan: StepPlan) -> dict[str, object]:
        """What a checkpoint after `plan` keeps beside tensors. Random numbers are keyed by seed, epoch and sample."""
        counts = {"num_lost": self.ledger.total, "num_skipped": self.guard.total}
        counts["num_skipped_in_a_row"] = self.guard.in_a_row
        state = {**self.feed.saved_state(plan), **counts, **self.schedule.identity}
        if self.adaptation is not None:
            state["adaptation"] = self.adaptation.state()
        return state


def model_geometry(model: ModelConfig) -> LatentGeometry:
    """Geometry of the latents that `model` takes."""
    return LatentGeometry(model.in_channels, spatial_stride=model.spatial_stride, patch=tuple(model.patch_size))


def build_schedule(config: RunConfig, ranks: int, device: torch.device, saved: dict[str, object] | None) -> Schedule:
    """Index, split, order, models and policy of a run on `ranks` ranks.

    Args:
        config: The run's configuration.
        ranks: Data-parallel ranks to plan for.
        device: Whose prior prices the samples when `cost.gpu` is "auto".
        saved: The state beside the checkpoint that is resumed, whose lookahead and history of costs stay.

    Raises:
        ValueError: If the data set is absent, damaged or does not fit the model, or the schedule cannot be kept.
    """
    geometry = model_geometry(config.model)
    corpus = open_corpus(config.data.all_sources, geometry)
    paths = ", ".join(source.path for source in corpus.sources)
    if corpus.info.geometry != geometry:
        raise ValueError(
            f"{paths}: latents of {corpus.info.geometry}, but model.in_channels="
            f"{config.model.in_channels}, model.patch_size={list(config.model.patch_size)} and "
            f"model.spatial_stride={config.model.spatial_stride} take {geometry}"
        )
    if corpus.info.text_dim != config.model.text_dim:
        raise ValueError(f"{paths}: text_dim {corpus.info.text_dim}, but model.text_dim={config.model.text_dim}")
    table = replace(corpus.table, text_joins=model_dims(config.model).text_joins)
    corpus = replace(corpus, table=table)
    if (longest := int(table.text_len.max())) > config.model.text_len:
        raise ValueError(f"{paths}: a text of {longest} rows, but model.text_len={config.model.text_len}")
    held_out = held_out_mask(corpus.source_names, config.data.held_out_share, config.seed)[corpus.source_codes]
    train_ids, held_out_ids = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    gpu = resolve_gpu(config.cost, device)
    meet = resolve_meet(config, gpu, device)
    models = build_models(
        config,
        gpu,
        device,
        meet=meet,
        ranks=ranks,
        seq_lens=np.unique(table.computed_tokens()).tolist(),
        trained_share=trained_share(config),
    )
    schedule_config = replace(config.schedule, meet=meet)
    if schedule_config.memory_limit_tokens is None:
        limit = models.memory.max_tokens(device_memory_bytes(gpu, device))
        schedule_config = replace(
            schedule_config, memory_limit_tokens=limit, text_memory_tokens=models.memory.text_tokens
        )
    order = EndlessOrder(
        train_ids, config.schedule.seed, config.schedule.order_block_size, repeats=corpus.repeats[train_ids]
    )
    lookahead = config.schedule.lookahead
    if lookahead == "auto" and schedule_config.policy != "balanced":
        lookahead = "1"  # the paper's policies draw in plain order
    elif lookahead == "auto":
        lookahead = str(
            saved["schedule.lookahead"]
            if saved and "schedule.lookahead" in saved
            else resolve_lookahead(schedule_config, table, order, models.cost, ranks, meet)
        )
    schedule_config = replace(schedule_config, lookahead=lookahead)
    adaptation = saved.get("adaptation") if saved else None
    updates = adaptation["updates"] if isinstance(adaptation, dict) else []
    history = CostHistory(models.cost, [ScheduleUpdate.from_json(record) for record in updates])
    policy = build_policy(schedule_config, table, order, history, ranks, meet)
    identity: dict[str, object] = {
        "data_fingerprint": corpus.fingerprint,
        "num_samples": len(table),
        "seed": config.seed,
        "schedule.seed": config.schedule.seed,
        "schedule.policy": config.schedule.policy,
        "schedule.samples_per_step": config.schedule.samples_per_step,
        "schedule.order_block_size": config.schedule.order_block_size,
        "schedule.lookahead": lookahead,
        "data.held_out_share": config.data.held_out_share,
    }
    if isinstance(policy, BucketPolicy):
        # Every rank fills buckets of its own there: which samples a step holds depends on these too.
        identity |= {"ranks": ranks, "schedule.slots_per_step": config.schedule.slots_per_step}
        identity["batch_sizes"] = policy.batch_sizes.tolist()
    check_same_data(saved, identity)
    resolved = replace(config, schedule=schedule_config, cost=replace(config.cost, gpu=gpu))
    return Schedule(corpus, table, train_ids, held_out_ids, order, policy, models, history, meet, identity, resolved)


def model_identity(config: RunConfig) -> dict[str, object]:
    """What a resumed run must keep of its model. Its folder may move; frozen weights are read from it again."""
    identity: dict[str, object] = {"model": json.loads(json.dumps(asdict(replace(config.model, pretrained=None))))}
    identity["lora"] = json.loads(json.dumps(asdict(config.lora)))
    return identity | frozen_identity(config)


def trained_share(config: RunConfig) -> float:
    """Trained parameters over all."""
    parameters = list(lay_out_model(config).parameters())
    return sum(p.numel() for p in parameters if p.requires_grad) / sum(p.numel() for p in parameters)


def check_same_data(saved: dict[str, object] | None, identity: dict[str, object]) -> None:
    """Raise ValueError if the checkpoint that is resumed was trained on other samples, with what is known of both."""
    if saved is None or saved.get("data_fingerprint") == identity["data_fingerprint"]:
        return
    raise ValueError(
        "the data set has changed since the checkpoint: data_fingerprint "
        f"{saved.get('data_fingerprint')} of {saved.get('num_samples')} samples then, "
        f"{identity['data_fingerprint']} of {identity['num_samples']} samples now. Its order cannot be continued: "
        "bring the old shards, index and data.sources back, or start anew under another `name`"
    )


def build_run(config: RunConfig, ranks: Ranks) -> Run:
    """All parts of a run, restored from its checkpoint if there is one to resume.

    Raises:
        ValueError: For anything in configuration, data or checkpoint that training could not live with.
    """
    config.tracking.check_installed()
    folder = config.run_dir / "checkpoints"
    resume_from = find_to_resume(folder, config.checkpoint, ranks)
    saved = read_state(resume_from) if resume_from else None
    schedule: Schedule | StreamSchedule
    if config.data.mode == "stream":
        schedule, min_drawn = build_stream_schedule(config, ranks.device), _MIN_DRAWN
    else:
        schedule = build_schedule(config, ranks.world_size, ranks.device, saved)
        min_drawn = min(_MIN_DRAWN, len(schedule.train_ids))
        if ranks.is_main:
            schedule.corpus.verify()
    schedule.identity |= model_identity(config)
    ranks.barrier()

    model, timer, optimizer = build_model(config, ranks, is_resumed=resume_from is not None)
    ema = Ema(model, config.ema)
    checkpointer = Checkpointer(folder, config.checkpoint, ranks, model, optimizer, ema)
    first_step, num_lost, skipped = 0, 0, (0, 0)
    if resume_from is not None:
        saved = checkpointer.load(resume_from, schedule.identity)
        first_step, num_lost = int(saved["step"]), int(saved["num_lost"])
        skipped = int(saved["num_skipped"]), int(saved["num_skipped_in_a_row"])
        if isinstance(schedule, Schedule):
            _check_position(schedule, first_step, int(saved["position"]))
    if config.checkpoint.every_steps and first_step < config.max_steps:
        checkpointer.check_room()
    ledger = Ledger(config.run_dir, ranks.rank, config.data, min_drawn, num_lost)
    if ranks.is_main:
        ledger.forget_from(first_step)
        if first_step < config.max_steps:
            save_config(schedule.config, config.run_dir / "config.yaml")
    ranks.barrier()

    feed: PlannedFeed | StreamFeed
    adaptation = None
    if isinstance(schedule, StreamSchedule):
        feed, held_out = stream_feed(config, ranks, schedule, saved), None
    else:
        feed, held_out = planned_feeds(config, ranks, schedule, first_step)
        adaptation = Adaptation(config.cost, schedule, schedule.models.cost, ranks, feed.plans_ahead)
        if saved is not None and "adaptation" in saved:
            adaptation.load(saved["adaptation"])  # type: ignore[arg-type]
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
        previews=build_previews(config, ranks, schedule),
        feed=feed,
        adaptation=adaptation,
        ledger=ledger,
        guard=StepGuard(config.run_dir, ranks, config.optimizer.max_skipped_in_a_row, *skipped),
        tracker=Tracker(config.run_dir, config.tracking, config, first_step, config.max_steps)
        if ranks.is_main
        else None,
        first_step=first_step,
    )


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


def build_stream_schedule(config: RunConfig, device: torch.device) -> StreamSchedule:
    """What decides over a run without an index. Raises ValueError for what needs one."""
    check_stream_config(config.data, config.schedule)
    if model_dims(config.model).text_joins:
        raise ValueError(
            f"model.architecture={config.model.architecture}: needs data.mode=index, a stream does not price text"
        )
    gpu = resolve_gpu(config.cost, device)
    meet = resolve_meet(config, gpu, device)
    identity: dict[str, object] = {
        "data.mode": "stream",
        "shards": shard_names(config.data.path),
        "normalization_hash": peek_normalization(find_shards(config.data.path)[0]),
        "seed": config.seed,
        "schedule.policy": config.schedule.policy,
    }
    exponent = _STREAM_COST_EXPONENT if config.schedule.cost_exponent is None else config.schedule.cost_exponent
    schedule_config = replace(config.schedule, meet=meet, cost_exponent=exponent)
    resolved = replace(config, schedule=schedule_config, cost=replace(config.cost, gpu=gpu))
    return StreamSchedule(meet, identity, resolved)


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


def _check_position(schedule: Schedule, first_step: int, position: int) -> None:
    """Refuse to resume where this schedule would repeat or leave out samples.

    `balanced` never does; the paper's policies do when ranks, limits or costs change, because these decide how many
    samples a step takes.
    """
    planned = schedule.policy.plan(first_step).position
    if planned != position:
        raise ValueError(
            f"the checkpoint stands at sample {position}, but step {first_step} of this schedule begins at {planned}: "
            "with the paper's policies a resumed run must keep its number of ranks, schedule.memory_limit_tokens, "
            "schedule.slots_per_step, schedule.cost_exponent, schedule.compute_limit_factor and its cost model"
        )


def resolve_meet(config: RunConfig, gpu: str, device: torch.device) -> str:
    """Where ranks meet: as configured, or "auto": "step" where gathered weights and gradients fit, else "slot"."""
    if config.schedule.meet != "auto":
        return config.schedule.meet
    unsharded = sum(
        parameter.numel() * (_WEIGHT_BYTES + _GRADIENT_BYTES * parameter.requires_grad)
        for parameter in lay_out_model(config).parameters()
    )
    return "step" if unsharded <= _UNSHARDED_SHARE * device_memory_bytes(gpu, device) else "slot"
