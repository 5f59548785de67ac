"""Puts the parts of a run together; train.py then only has the loop."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import torch

from adaptiveload.data.index import ShardIndex
from adaptiveload.data.reader import SampleReader
from adaptiveload.models.wan import WanConfig, WanTransformer
from adaptiveload.scheduling.balanced import resolve_lookahead
from adaptiveload.scheduling.order import EndlessOrder, held_out_mask
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.policies import Policy, build_policy
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.shapes import LatentGeometry
from adaptiveload.training.checkpoint import Checkpointer, read_state
from adaptiveload.training.config import RunConfig, save_config
from adaptiveload.training.cost import build_cost_model
from adaptiveload.training.distributed import Ranks, shard_model
from adaptiveload.training.ema import Ema
from adaptiveload.training.evaluation import HeldOut
from adaptiveload.training.feed import LostSamples, MicroBatchDataset, PlannedFeed
from adaptiveload.training.optimizer import build_optimizer
from adaptiveload.training.step_timer import StepTimer
from adaptiveload.training.tracker import Tracker

# bf16 weights and fp32 gradients of the whole model, which `meet: step` keeps on every rank over a step.
_UNSHARDED_BYTES_PER_PARAMETER = 6
# `meet: auto` spends at most this share of a rank's memory on them; 1.3B takes 8.5 GB of an H200's 141.
_UNSHARDED_SHARE = 0.125


@dataclass
class Schedule:
    """Everything that decides who computes what.

    Attributes:
        index: The dataset.
        table: Its samples as the scheduler sees them.
        train_ids, held_out_ids: int64 rows of the index.
        policy: Plans steps.
        meet: "slot" or "step".
        lookahead: Windows regrouped by cost.
        identity: What a resumed run must have in common with the one that saved.
    """

    index: ShardIndex
    table: SampleTable
    train_ids: np.ndarray
    held_out_ids: np.ndarray
    policy: Policy
    meet: str
    lookahead: int
    identity: dict[str, object]

    def saved_state(self) -> dict[str, object]:
        """What a checkpoint keeps of the schedule. Random numbers are keyed by seed, epoch and sample: no state."""
        return {**self.identity, "lookahead": self.lookahead}


@dataclass
class Run:
    """The parts of a run; see `build_run`."""

    config: RunConfig
    ranks: Ranks
    schedule: Schedule
    model: WanTransformer
    optimizer: torch.optim.AdamW
    ema: Ema
    timer: StepTimer
    checkpointer: Checkpointer
    held_out: HeldOut
    feed: PlannedFeed
    lost: LostSamples
    tracker: Tracker | None
    first_step: int


def model_geometry(model: WanConfig) -> LatentGeometry:
    """Geometry of the latents that `model` takes."""
    return LatentGeometry(channels=model.in_channels, patch=tuple(model.patch_size))


def build_schedule(config: RunConfig, ranks: int, device: torch.device, saved: dict[str, object] | None) -> Schedule:
    """Index, split, order, cost model and policy of a run on `ranks` ranks.

    Args:
        config: The run's configuration.
        ranks: Data-parallel ranks to plan for.
        device: Whose prior prices the samples when `cost.gpu` is "auto".
        saved: The state beside the checkpoint that is resumed, whose lookahead stays.

    Raises:
        ValueError: If the data set is absent, damaged or does not fit the model, or the schedule cannot be kept.
    """
    geometry = model_geometry(config.model)
    index = ShardIndex.read(config.data.path)
    if index.info.text_dim != config.model.text_dim:
        raise ValueError(
            f"{config.data.path}: text_dim {index.info.text_dim}, but model.text_dim={config.model.text_dim}"
        )
    table = index.sample_table(geometry)
    if (longest := int(table.text_len.max())) > config.model.text_len:
        raise ValueError(f"{config.data.path}: a text of {longest} rows, but model.text_len={config.model.text_len}")
    held_out = held_out_mask(table.sources, config.data.held_out_share, config.seed)
    train_ids, held_out_ids = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    cost_model = build_cost_model(config.cost, config.model, device, config.schedule.recompute)
    meet = _resolve_meet(config, device)
    lookahead = config.schedule.lookahead
    if lookahead == "auto":
        costs = cost_model.sample_us(table.num_tokens[train_ids], table.text_len[train_ids])
        lookahead = str(
            saved["lookahead"] if saved else resolve_lookahead(costs, config.schedule.samples_per_step, ranks)
        )
    schedule_config = replace(config.schedule, lookahead=lookahead)
    order = EndlessOrder(train_ids, config.schedule.seed, block_size=config.schedule.order_block_size)
    policy = build_policy(schedule_config, table, order, cost_model, ranks, meet)
    identity: dict[str, object] = {
        "data_fingerprint": index.fingerprint,
        "seed": config.seed,
        "schedule.seed": config.schedule.seed,
        "schedule.policy": config.schedule.policy,
        "schedule.samples_per_step": config.schedule.samples_per_step,
        "schedule.order_block_size": config.schedule.order_block_size,
        "data.held_out_share": config.data.held_out_share,
    }
    return Schedule(index, table, train_ids, held_out_ids, policy, meet, int(lookahead), identity)


def build_run(config: RunConfig, ranks: Ranks) -> Run:
    """All parts of a run, restored from its checkpoint if there is one to resume.

    Raises:
        ValueError: For anything in configuration, data or checkpoint that training could not live with.
    """
    folder = config.run_dir / "checkpoints"
    resume_from = Checkpointer.to_resume(folder, config.checkpoint)
    saved = read_state(resume_from) if resume_from else None
    schedule = build_schedule(config, ranks.world_size, ranks.device, saved)
    if ranks.is_main:
        schedule.index.verify()
        save_config(config, config.run_dir / "config.yaml")
    ranks.barrier()

    # Drawn on the CPU: equal weights on all ranks, and on every kind of device, before they are sharded.
    torch.manual_seed(config.seed)
    model = WanTransformer(config.model).to(ranks.device)
    shard_model(model, ranks, config.precision)
    timer = StepTimer(ranks.device)
    timer.attach(model.fsdp_units()[1])
    optimizer = build_optimizer(model, config.optimizer)  # after sharding: it must hold the shards
    ema = Ema(model, config.ema)
    checkpointer = Checkpointer(folder, config.checkpoint, ranks, model, optimizer, ema)
    first_step = 0
    if resume_from is not None:
        first_step = int(checkpointer.load(resume_from, schedule.identity)["step"])

    reader = SampleReader(schedule.index)
    geometry = model_geometry(config.model)
    training = MicroBatchDataset(reader, geometry, config.objective, config.seed)
    evaluation = MicroBatchDataset(reader, geometry, config.objective, config.seed, text_dropout=False)
    return Run(
        config=config,
        ranks=ranks,
        schedule=schedule,
        model=model,
        optimizer=optimizer,
        ema=ema,
        timer=timer,
        checkpointer=checkpointer,
        held_out=HeldOut(
            schedule.held_out_ids,
            schedule.table,
            evaluation,
            build_cost_model(config.cost, config.model, ranks.device, "none"),
            config.schedule.memory_limit_tokens,
            ranks,
            config.evaluation,
        ),
        feed=PlannedFeed(
            training,
            schedule.policy,
            ranks.rank,
            range(first_step, config.max_steps),
            config.data,
            pin_memory=ranks.device.type == "cuda",
        ),
        lost=LostSamples(config.run_dir / "lost.jsonl", config.data.max_lost_share, min(1000, len(schedule.train_ids))),
        tracker=Tracker(config.run_dir, config.tracking, config, first_step, config.max_steps)
        if ranks.is_main
        else None,
        first_step=first_step,
    )


def check_agreement(run: Run, plan: StepPlan) -> int:
    """Compare the ranks' plans and losses before a step. Returns samples lost so far, over all ranks.

    Raises:
        RuntimeError: On all ranks, if their plans differ, or more samples than `data.max_lost_share` were lost.
    """
    mine = torch.tensor([int(plan.digest[:15], 16), run.lost.count], dtype=torch.int64)
    digests, lost = run.ranks.gather(mine).unbind(1)
    if len(set(digests.tolist())) > 1:
        raise RuntimeError(
            f"step {plan.step}: the ranks planned different steps (digests "
            f"{[f'{digest:015x}' for digest in digests.tolist()]}): a rank has another index, configuration or version"
        )
    num_lost = int(lost.sum())
    run.lost.check(num_lost, plan.next_position)
    return num_lost


def _resolve_meet(config: RunConfig, device: torch.device) -> str:
    if config.schedule.meet != "auto":
        return config.schedule.meet
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in WanTransformer(config.model).parameters())
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = psutil.virtual_memory().total
    return "step" if parameters * _UNSHARDED_BYTES_PER_PARAMETER <= _UNSHARDED_SHARE * memory else "slot"


def run_summary(schedule: Schedule, path: Path) -> str:
    """What a run trains on and how it is scheduled, in a line each."""
    table = schedule.table
    return (
        f"data: {len(schedule.train_ids)} training and {len(schedule.held_out_ids)} held-out samples of "
        f"{len(table.shapes)} shapes, {int(table.num_tokens.min())} to {int(table.num_tokens.max())} tokens\n"
        f"schedule: {type(schedule.policy).__name__}, ranks meet every {schedule.meet}, run folder {path}"
    )
