"""Scheduling policies: their configuration, and `build_policy`, which makes the one that a run names."""

import logging
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from adaptiveload.scheduling.assemble import StepAssembler
from adaptiveload.scheduling.balanced import BalancedPolicy
from adaptiveload.scheduling.buckets import best_compute_limit_factor, bucket_batch_sizes, compute_limit
from adaptiveload.scheduling.cost import CostModel, IntArray
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.paper_policies import BucketPolicy
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.samples import SampleTable

logger = logging.getLogger(__name__)

POLICIES = ("balanced", "equal_token", "dual_constraint")


@dataclass
class ScheduleConfig:
    """What a user decides about scheduling; the keys of `schedule:` in a run's YAML.

    Attributes:
        policy: "balanced" (default), or the baselines of the paper: "equal_token" and "dual_constraint"; "local" packs
            from a queue of each rank, in streams without an index alone.
        samples_per_step: The global batch N: samples per optimizer step over all ranks. `balanced` keeps it exactly;
            the paper's policies take what their buckets give (see `slots_per_step`).
        memory_limit_tokens: Most tokens of one micro-batch, text not included.
        max_samples_per_micro_batch: Most samples of one micro-batch, however short they are.
        meet: Where ranks wait for each other: "slot", "step", or "auto" (the trainer chooses by memory).
        slots_per_step: Micro-batches per rank and step of the paper's policies.
        cost_exponent: The paper's p, for `dual_constraint`.
        compute_limit_factor: f in compute_limit = f * S_max ** p; None takes the f of the highest simulated tokens/s.
        lookahead: Windows that `balanced` regroups by cost, an integer as text, or "auto" (see `resolve_lookahead`).
        slot_overhead_us: Microseconds that one more slot costs; None takes the cost model's fixed part.
        order_block_size: Consecutive samples of the index that stay near each other in the shuffle.
        seed: Seed of the order.
        loss_weight_exponent: alpha in the loss weight w_i = S_i ** alpha: 0 weighs samples alike, 1 tokens.
        allow_oversize: Run a sample above `memory_limit_tokens` alone instead of refusing it.
        recompute: Recompute level of every slot: "none" or "full".
    """

    policy: str = "balanced"
    samples_per_step: int = 64
    memory_limit_tokens: int = 52_800
    max_samples_per_micro_batch: int = 1024
    meet: str = "auto"
    slots_per_step: int = 4
    cost_exponent: float = 1.45
    compute_limit_factor: float | None = None
    lookahead: str = "1"
    slot_overhead_us: int | None = None
    order_block_size: int = 32
    seed: int = 0
    loss_weight_exponent: float = 0.0
    allow_oversize: bool = False
    recompute: str = "none"


class Policy(Protocol):
    """Plans optimizer steps. `plan` gives the same plan whenever and wherever it is asked for the same step."""

    @property
    def steps_in_first_epoch(self) -> int:
        """Whole steps in the first epoch, at least 1."""
        ...

    def plan(self, step: int) -> StepPlan:
        """Plan of optimizer step `step`, from 0."""
        ...


def build_policy(
    config: ScheduleConfig, table: SampleTable, order: EndlessOrder, cost_model: CostModel, ranks: int, meet: str
) -> Policy:
    """The policy that `config` names, over `order`, whose ids are rows of `table`.

    Args:
        config: See `ScheduleConfig`; `lookahead` must be a number by now (see `resolve_lookahead`).
        table: All samples of the index.
        order: Order of the training samples.
        cost_model: Prices samples and micro-batches in microseconds.
        ranks: Data-parallel ranks.
        meet: "slot" or "step": `config.meet` with "auto" resolved.

    Raises:
        ValueError: If a value is unknown or out of range, a sample is above the memory limit and `allow_oversize` is
            off, or `samples_per_step` is less than `ranks`.
    """
    check_config(config, ranks, meet)
    check_memory(config, table, order)
    assembler = StepAssembler(table, cost_model, meet, config.recompute, config.loss_weight_exponent)
    if config.policy == "balanced":
        overhead_us = round(cost_model.a_us) if config.slot_overhead_us is None else config.slot_overhead_us
        return BalancedPolicy(
            assembler,
            order,
            ranks,
            config.samples_per_step,
            config.memory_limit_tokens,
            config.max_samples_per_micro_batch,
            overhead_us,
            int(config.lookahead),
        )
    batch_sizes = paper_batch_sizes(config, table, order, cost_model, ranks, meet)
    return BucketPolicy(assembler, order, ranks, batch_sizes, config.slots_per_step)


def paper_batch_sizes(
    config: ScheduleConfig, table: SampleTable, order: EndlessOrder, cost_model: CostModel, ranks: int, meet: str
) -> IntArray:
    """Batch size of every bucket under the paper's policy that `config` names, int64 [num shapes]."""
    tokens, counts = table.shape_tokens, bucket_counts(table, order)
    limit = math.inf
    if config.policy == "dual_constraint":
        factor = config.compute_limit_factor
        if factor is None:
            factor = best_compute_limit_factor(
                table,
                counts,
                config.memory_limit_tokens,
                config.max_samples_per_micro_batch,
                config.cost_exponent,
                cost_model,
                ranks,
                config.slots_per_step,
                meet,
            )
            logger.info("dual_constraint: compute_limit_factor %g has the highest simulated tokens/s", factor)
        limit = compute_limit(tokens, counts, factor, config.cost_exponent)
    return bucket_batch_sizes(
        tokens, config.memory_limit_tokens, config.max_samples_per_micro_batch, limit, config.cost_exponent
    )


def bucket_counts(table: SampleTable, order: EndlessOrder) -> IntArray:
    """Draws of each bucket in an epoch, int64 [num shapes]."""
    return np.bincount(table.shape_ids[order.ids], minlength=len(table.shapes)).astype(np.int64)


def check_config(config: ScheduleConfig, ranks: int, meet: str) -> None:
    """Raise ValueError for a value that is unknown or out of range, naming its key."""
    for key, value, known in (
        ("schedule.policy", config.policy, POLICIES),
        ("schedule.meet", meet, ("slot", "step")),
        ("schedule.recompute", config.recompute, ("none", "full")),
    ):
        if value not in known:
            raise ValueError(f"{key} must be one of {', '.join(known)}, got {value!r}")
    for key, number in (
        ("schedule.memory_limit_tokens", config.memory_limit_tokens),
        ("schedule.max_samples_per_micro_batch", config.max_samples_per_micro_batch),
        ("schedule.slots_per_step", config.slots_per_step),
        ("schedule.cost_exponent", config.cost_exponent),
        ("schedule.compute_limit_factor", 1 if config.compute_limit_factor is None else config.compute_limit_factor),
    ):
        if not (math.isfinite(number) and number > 0):
            raise ValueError(f"{key} must be positive, got {number}")
    if not math.isfinite(config.loss_weight_exponent):
        raise ValueError(f"schedule.loss_weight_exponent must be a finite number, got {config.loss_weight_exponent}")
    if config.slot_overhead_us is not None and config.slot_overhead_us < 0:
        raise ValueError(f"schedule.slot_overhead_us must not be negative, got {config.slot_overhead_us}")
    if not config.lookahead.isdecimal() or int(config.lookahead) < 1:
        raise ValueError(
            f"schedule.lookahead must be a whole number from 1 by now, got {config.lookahead!r}; "
            '"auto" is resolved once when a run starts'
        )
    if config.policy == "balanced" and config.samples_per_step < ranks:
        raise ValueError(
            f"{config.samples_per_step} samples a step are fewer than {ranks} ranks: "
            "raise schedule.samples_per_step or start fewer processes"
        )


def check_memory(config: ScheduleConfig, table: SampleTable, order: EndlessOrder) -> None:
    """Raise ValueError if a sample of `order` is above the memory limit, or warn if the configuration allows it."""
    tokens = table.num_tokens[order.ids]
    num_above = int((tokens > config.memory_limit_tokens).sum())
    if not num_above:
        return
    worst = order.ids[int(tokens.argmax())]
    message = (
        f"sample {table.keys[worst]!r} has {table.num_tokens[worst]} tokens, "
        f"above schedule.memory_limit_tokens = {config.memory_limit_tokens} ({num_above} such samples)"
    )
    if not config.allow_oversize:
        raise ValueError(
            f"{message}: raise the limit, prepare smaller shapes, or set schedule.allow_oversize to run each alone"
        )
    logger.warning("%s: each runs alone in its micro-batch, and may run out of memory", message)
