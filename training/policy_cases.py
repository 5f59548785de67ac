"""Schedules on samples of a mix: what `scripts.benchmark_policies` runs, or predicts for as many ranks as one likes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from adaptiveload.models.config import ModelConfig
from adaptiveload.scheduling.cost import TwoTermCost
from adaptiveload.scheduling.cost_file import CostFile
from adaptiveload.scheduling.metrics import step_time
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.policies import Policy, ScheduleConfig, build_policy, num_replicas
from adaptiveload.scheduling.recompute import ALL_BLOCKS
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.simulation import MEASURED_PART, Simulation
from adaptiveload.scheduling.updates import CostHistory
from adaptiveload.training.config import RunConfig
from adaptiveload.training.cost import (
    Hardware,
    RunModels,
    build_models,
    device_memory_bytes,
    mismatches,
    model_dims,
    resolve_memory,
)
from adaptiveload.training.metrics import StepMeasurement, peak_flops
from adaptiveload.training.policy_table import Mix
from adaptiveload.training.schedule import model_geometry, trained_share


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    model: str
    kernels: str
    recompute: str
    meet: str
    policy: str


@dataclass
class SyntheticSchedule:
    """A policy over samples without a dataset, with what `Adaptation` needs of a schedule.

    Attributes:
        table: Samples.
        order: Order in which they run.
        policy: Plans the steps.
        meet: "slot" or "step".
        settings: The policy's.
        history: Prices.
        models: Cost and memory models that it begins with.
        samples_per_slot: Mean over an epoch under the paper's policies, whose steps are whole slots; else 0.
    """

    table: SampleTable
    order: EndlessOrder
    policy: Policy
    meet: str
    settings: ScheduleConfig
    history: CostHistory
    models: RunModels
    samples_per_slot: float


def synthetic_table(mix: str | Path, num_samples: int, config: RunConfig) -> SampleTable:
    """Samples of the mix for the run's model, each with the text that `synthetic_batch` gives it."""
    table = SampleTable.from_mix(mix, num_samples, config.schedule.seed, model_geometry(config.model))
    text_lens = np.full(len(table), config.model.text_len, np.int32)
    return replace(table, text_len=text_lens, text_joins=model_dims(config.model).text_joins)


def mix_of(table: SampleTable, model: ModelConfig, device: str) -> Mix:
    """What the table's samples are worth to the model; their FLOPs only on a device whose peak is known by its name."""
    peak = peak_flops(device)
    if peak is None:
        return Mix(table.num_tokens, table.computed_tokens(), None, None)
    dims = model_dims(model)
    lengths, counts = np.unique(table.num_tokens, return_counts=True)
    flops = [dims.train_flops(int(length), model.text_len) for length in lengths]
    return Mix(table.num_tokens, table.computed_tokens(), float(np.average(flops, weights=counts)), peak)


def spread_ids(num_samples: int, wanted: int) -> np.ndarray:
    """`wanted` rows of a table of `num_samples`, spread over it: it may be sorted by length.

    Raises:
        ValueError: If the table has fewer.
    """
    if wanted > num_samples:
        raise ValueError(f"--same-samples: {wanted} samples are more than the mix has here, {num_samples}")
    return np.arange(wanted) * (num_samples // wanted)


def build_case_schedule(
    case: Case,
    table: SampleTable,
    order: EndlessOrder,
    config: RunConfig,
    *,
    world_size: int,
    hardware: Hardware,
    gpu: str,
    cost_files: Sequence[str] = (),
    scale_b2: float = 1.0,
) -> SyntheticSchedule:
    """The policy of a row over the samples; of the paper's policies with the slots nearest to `samples_per_step`.

    Args:
        case: The row; what it says of policy and recompute goes before `config`.
        table: Samples.
        order: Their order.
        config: The run.
        world_size: Ranks.
        hardware: Whose memory counts; on a CPU that of `gpu`.
        gpu: From `resolve_gpu`.
        cost_files: The one with the fewest mismatches prices the row; without any a prior does.
        scale_b2: Makes the law wrong: b2 (or b) times this.
    """
    settings = replace(config.schedule, policy=case.policy, recompute=case.recompute)
    config = replace(config, schedule=settings)
    nearest = min(
        cost_files,
        key=lambda path: len(mismatches(CostFile.read(path), config, gpu, hardware, case.meet, world_size)),
        default=None,
    )
    models = build_models(
        replace(config, cost=replace(config.cost, file=nearest, allow_mismatch=True)),
        gpu,
        hardware,
        meet=case.meet,
        ranks=world_size,
        sharded_over=world_size // num_replicas(settings.shard_ranks, world_size),
        seq_lens=np.unique(table.computed_tokens()).tolist(),
        trained_share=trained_share(config),
    )
    settings = resolve_memory(settings, models, device_memory_bytes(gpu, hardware))
    name = "b2_us" if isinstance(models.cost, TwoTermCost) else "b_us"
    law = replace(models.cost, **{name: getattr(models.cost, name) * scale_b2})
    simulation = Simulation(table, order, law, world_size, case.meet)
    settings = simulation.resolved(settings)
    samples_per_slot = 0.0 if case.policy == "balanced" else simulation.mean_samples_per_slot(settings)
    history = CostHistory(law)
    policy = build_policy(settings, table, order, history, world_size, case.meet)
    models = replace(models, cost=law)
    return SyntheticSchedule(table, order, policy, case.meet, settings, history, models, samples_per_slot)


def steps_to_run(schedule: SyntheticSchedule, count: int, warmup: int, *, is_epoch: bool) -> list[int]:
    """`warmup` steps, then the whole epoch, or `count` steps of the midst of a long one."""
    total = schedule.policy.steps_in_first_epoch
    if is_epoch:
        return [*((total // 2 + step) % total for step in range(warmup)), *range(total)]
    # Full buckets alone: the paper's policies start with the small ones.
    first = int(MEASURED_PART[0] * total)
    return list(range(first, first + warmup + count))


def as_planned(plan: StepPlan, schedule: SyntheticSchedule) -> StepMeasurement:
    """What the ranks would measure if every micro-batch took what the models say, and nothing came between them."""
    ranks, models, table = plan.costs_us.shape[1], schedule.models, schedule.table
    peaks = np.zeros(ranks)
    for rank in range(ranks):
        for g, batch in enumerate(plan.micro_batches(rank)):
            memory = models.memory
            if schedule.settings.recompute == "auto":
                memory = models.kept_memory.mixed(memory, int(plan.recomputed[g, rank]) / ALL_BLOCKS)
            tokens = int(table.computed_tokens(plan.sample_ids[list(batch)]).sum())
            taken = memory.micro_batch_bytes(tokens, len(batch)) / 2**30
            peaks[rank] = max(peaks[rank], taken)
    wall_s = step_time(plan.costs_us, plan.meet, plan.replicas) / 1e6
    zeros = np.zeros(ranks)
    return StepMeasurement(0.0, 0, np.full(ranks, wall_s), zeros, peaks, plan.costs_us / 1e6)
