"""Scheduling policies: their configuration, and `build_policy`, which makes the one that a run names."""

import logging
import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from adaptiveload.scheduling.assemble import StepAssembler
from adaptiveload.scheduling.balanced import BalancedPolicy
from adaptiveload.scheduling.buckets import Buckets
from adaptiveload.scheduling.choices import check_choice
from adaptiveload.scheduling.cost import CostModel, IntArray, PowerCost
from adaptiveload.scheduling.fit import power_law_of
from adaptiveload.scheduling.metrics import step_time
from adaptiveload.scheduling.order import CohortOrder, EndlessOrder
from adaptiveload.scheduling.paper_policies import BucketPolicy
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.recompute import LEVELS, Recompute
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.updates import CostHistory

logger = logging.getLogger(__name__)

POLICIES = ("balanced", "dual_constraint", "equal_token")
STREAM_POLICIES = ("local", "dual_constraint", "equal_token")  # of streams, which have no index
MEETINGS = ("slot", "step")


@dataclass
class ScheduleConfig:
    """What a user decides about scheduling; the keys of `schedule:` in a run's YAML.

    Attributes:
        policy: "balanced" (default), or the baselines of the paper: "equal_token" and "dual_constraint"; "local" packs
            from a queue of each rank, in streams without an index alone.
        samples_per_step: The global batch N: samples per optimizer step over all ranks. `balanced` keeps it exactly;
            the paper's policies take what their buckets give (see `slots_per_step`).
        memory_limit_tokens: Most tokens of one micro-batch; None takes what the memory model says fits.
        text_memory_tokens: Tokens that take the memory of one sample's text, counted against the limit; the trainer
            sets it with the limit from the memory model.
        max_samples_per_micro_batch: Most samples of one micro-batch, however short they are.
        meet: Where ranks wait for each other: "slot", "step", or "auto" (the trainer chooses by memory).
        shard_ranks: Ranks that share one copy of the model, consecutive ones, such as the GPUs of a node: each group of
            so many holds a whole copy (HSDP). 0 shares one copy among all ranks (FSDP).
        slots_per_step: Micro-batches per rank and step of the paper's policies.
        cost_exponent: The paper's p, for `dual_constraint`; None takes that of the cost model.
        compute_limit_factor: f in compute_limit = f * S_max ** p; None takes the f of the highest simulated tokens/s.
        lookahead: Samples of one length that `balanced` looks ahead for, to draw them together; 1 draws as shuffled,
            "auto" takes one for each rank when a run starts, where windows as they come leave ranks waiting. It stays
            with the run.
        rank_speed: "auto" gives less work to a rank that is persistently slow (`balanced` alone), "off" as much to
            all.
        slot_overhead_us: Microseconds that one more slot costs; None takes the cost model's fixed part.
        order_block_size: Consecutive samples of the index that stay near each other in the shuffle.
        seed: Seed of the order.
        loss_weight_exponent: alpha in the loss weight w_i = S_i ** alpha: 0 weighs samples alike, 1 tokens.
        allow_oversize: Run a sample above `memory_limit_tokens` alone instead of refusing it.
        recompute: What backward computes again: "none", "full" (every block), or "auto": in each micro-batch as few
            blocks as its memory asks, their attention kept.
        kept_tokens, most_tokens: With "auto", most tokens of a micro-batch that keeps all blocks, and of one that
            computes all of them again; null takes what the memory model says.
        recompute_text_tokens: Tokens that take the memory of one sample's text, which these two count; the trainer sets
            it with them.
    """

    policy: str = "balanced"
    samples_per_step: int = 64
    memory_limit_tokens: int | None = 52_800
    text_memory_tokens: int = 0
    max_samples_per_micro_batch: int = 1024
    meet: str = "auto"
    shard_ranks: int = 0
    slots_per_step: int = 4
    cost_exponent: float | None = None
    compute_limit_factor: float | None = None
    lookahead: str = "1"
    rank_speed: str = "auto"
    slot_overhead_us: int | None = None
    order_block_size: int = 32
    seed: int = 0
    loss_weight_exponent: float = 0.0
    allow_oversize: bool = False
    recompute: str = "none"
    kept_tokens: int | None = None
    most_tokens: int | None = None
    recompute_text_tokens: int = 0

    def check(self) -> None:
        """Raise ValueError for a value that no data set and no number of ranks could work with, naming the key."""
        check_choice("schedule.policy", self.policy, sorted({*POLICIES, *STREAM_POLICIES}))
        check_choice("schedule.meet", self.meet, ("auto", *MEETINGS))
        check_choice("schedule.rank_speed", self.rank_speed, ("auto", "off"))
        check_choice("schedule.recompute", self.recompute, LEVELS)
        if self.lookahead != "auto" and not (self.lookahead.isdecimal() and int(self.lookahead) >= 1):
            raise ValueError(f"schedule.lookahead={self.lookahead!r}: use auto or a whole number from 1")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"schedule.{name}={value} must be at least {least}")
        for name in ("cost_exponent", "compute_limit_factor"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"schedule.{name}={value} must be a positive number")
        if not math.isfinite(self.loss_weight_exponent):
            raise ValueError(f"schedule.loss_weight_exponent={self.loss_weight_exponent} must be a finite number")
        if self.recompute == "auto" and self.kept_tokens is not None and self.most_tokens is not None:
            recompute_of(self)


# Least values of the whole numbers among its keys; null is none of them.
_LEAST = {
    "samples_per_step": 1,
    "memory_limit_tokens": 1,
    "text_memory_tokens": 0,
    "max_samples_per_micro_batch": 1,
    "shard_ranks": 0,
    "slots_per_step": 1,
    "slot_overhead_us": 0,
    "order_block_size": 1,
    "seed": 0,
    "kept_tokens": 0,
    "most_tokens": 1,
    "recompute_text_tokens": 0,
}


class Policy(Protocol):
    """Plans optimizer steps. `plan` gives the same plan whenever and wherever it is asked for the same step."""

    @property
    def order(self) -> EndlessOrder:
        """Order of the training samples."""
        ...

    @property
    def steps_in_first_epoch(self) -> int:
        """Whole steps in the first epoch, at least 1."""
        ...

    def plan(self, step: int) -> StepPlan:
        """Plan of optimizer step `step`, from 0."""
        ...


def build_policy(
    config: ScheduleConfig,
    table: SampleTable,
    order: EndlessOrder,
    costs: CostModel | CostHistory,
    ranks: int,
    meet: str,
) -> Policy:
    """The policy that `config` names, over `order`, whose ids are rows of `table`.

    Args:
        config: See `ScheduleConfig`; `lookahead` and `memory_limit_tokens` must be numbers by now.
        table: All samples of the index.
        order: Order of the training samples.
        costs: Prices samples and micro-batches in microseconds; a history lets them change while a run goes on.
        ranks: Data-parallel ranks.
        meet: "slot" or "step": `config.meet` with "auto" resolved.

    Raises:
        ValueError: If a value is unknown or out of range, a sample is above the memory limit and `allow_oversize` is
            off, or `samples_per_step` is less than `ranks`.
    """
    check_config(config, ranks, meet)
    check_memory(config, table, order)
    history = costs if isinstance(costs, CostHistory) else CostHistory(costs)
    assembler = StepAssembler(
        table,
        history,
        meet,
        recompute_of(config),
        config.loss_weight_exponent,
        config.text_memory_tokens,
        num_replicas(config.shard_ranks, ranks),
    )
    if config.policy == "balanced":
        if int(config.lookahead) > 1:
            order = CohortOrder(order, table.num_tokens, config.samples_per_step, int(config.lookahead))
        return BalancedPolicy(
            assembler,
            order,
            ranks,
            config.samples_per_step,
            limit_of(config),
            config.max_samples_per_micro_batch,
            config.slot_overhead_us,
        )
    batch_sizes = paper_batch_sizes(config, table, order, history.initial, ranks, meet)
    return BucketPolicy(assembler, order, ranks, batch_sizes, config.slots_per_step)


ENOUGH_IDLE = 0.015  # windows whose ranks wait less than this are large enough: jitter alone makes ranks wait longer
LOOKAHEAD_GAIN = 0.005  # a lookahead must save so much more: it makes the lengths of steps vary more
COMPARED_WINDOWS = 64


def resolve_lookahead(
    config: ScheduleConfig, table: SampleTable, order: EndlessOrder, cost_model: CostModel, ranks: int, meet: str
) -> int:
    """Samples that `lookahead: auto` draws together: 1 where windows as they come are level, else one for each rank.

    To be asked once when a run starts, and kept: another lookahead is another order of samples.
    """
    idle = []
    for lookahead in (1, min(ranks, config.samples_per_step)):
        trial = replace(config, policy="balanced", lookahead=str(lookahead), allow_oversize=True)
        policy = build_policy(trial, table, order, cost_model, ranks, meet)
        num_windows = min(COMPARED_WINDOWS, policy.steps_in_first_epoch)
        plans = [policy.plan(step) for step in range(num_windows)]
        times = [(plan.costs_us.sum() / ranks, step_time(plan.costs_us, meet, plan.replicas)) for plan in plans]
        idle.append(1 - sum(busy for busy, _ in times) / sum(wall for _, wall in times))
        if idle[0] <= ENOUGH_IDLE:
            return 1
    return ranks if idle[1] < idle[0] - LOOKAHEAD_GAIN else 1


def paper_batch_sizes(
    config: ScheduleConfig, table: SampleTable, order: EndlessOrder, cost_model: CostModel, ranks: int, meet: str
) -> IntArray:
    """Batch size of every bucket under the paper's policy that `config` names, int64 [num shapes]."""
    buckets = buckets_of(config, table, order, cost_model)
    factor = math.inf
    if config.policy == "dual_constraint":
        factor = config.compute_limit_factor or buckets.best_factor(cost_model, ranks, config.slots_per_step, meet)
        logger.info("dual_constraint: compute_limit_factor %g, cost_exponent %.3f", factor, buckets.cost_exponent)
        if too_long := buckets.above_compute_limit(factor):
            logger.warning(
                "dual_constraint: one sample of %s is above the compute limit at schedule.compute_limit_factor %g; "
                "each runs alone and takes longer than other micro-batches",
                ", ".join(map(str, too_long)),
                factor,
            )
    return buckets.batch_sizes(factor)


def buckets_of(config: ScheduleConfig, table: SampleTable, order: EndlessOrder, cost_model: CostModel) -> Buckets:
    """The buckets of an epoch of `order` and the limits that `config` sets them."""
    exponent = config.cost_exponent
    if exponent is None:
        exponent = cost_exponent_of(cost_model, table.shape_tokens, limit_of(config))
    return Buckets(
        table,
        bucket_counts(table, order),
        limit_of(config),
        config.text_memory_tokens + table.longest_joined_text,
        config.max_samples_per_micro_batch,
        exponent,
    )


def cost_exponent_of(cost_model: CostModel, seq_lens: IntArray, memory_limit_tokens: int) -> float:
    """The paper's p for `cost_model`: its own, or that of the nearest power law."""
    if isinstance(cost_model, PowerCost):
        return cost_model.exponent
    return power_law_of(cost_model, seq_lens.tolist(), memory_limit_tokens).exponent


def num_replicas(shard_ranks: int, ranks: int) -> int:
    """Groups that hold a copy of the model each, of `shard_ranks` of the `ranks`; 0 stands for all.

    Raises:
        ValueError: If the ranks do not divide into such groups.
    """
    if shard_ranks < 0 or (shard_ranks and ranks % shard_ranks):
        raise ValueError(
            f"schedule.shard_ranks={shard_ranks}: {ranks} ranks do not divide into groups of so many; "
            "take a divisor of the ranks, such as the GPUs of a node, or 0 for one group of all"
        )
    return ranks // shard_ranks if shard_ranks else 1


def limit_of(config: ScheduleConfig) -> int:
    """`memory_limit_tokens`, which must be known by now."""
    if config.memory_limit_tokens is None:
        raise ValueError("schedule.memory_limit_tokens is null and there is no memory model to take it from")
    return config.memory_limit_tokens


def recompute_of(config: ScheduleConfig) -> Recompute:
    """How much of a micro-batch is computed again; "auto" needs its two lengths by now."""
    if config.recompute != "auto":
        return Recompute(config.recompute)
    if config.kept_tokens is None or config.most_tokens is None:
        raise ValueError(
            "schedule.recompute=auto needs schedule.kept_tokens and schedule.most_tokens where there is no memory model"
        )
    return Recompute("auto", config.kept_tokens, config.most_tokens, config.recompute_text_tokens)


def bucket_counts(table: SampleTable, order: EndlessOrder) -> IntArray:
    """Draws of each bucket in an epoch, int64 [num shapes]."""
    return np.bincount(table.shape_ids[order.ids], minlength=len(table.shapes)).astype(np.int64)


def check_config(config: ScheduleConfig, ranks: int, meet: str) -> None:
    """`config.check`, and what must be known by now or depends on the ranks; raises ValueError naming the key."""
    config.check()
    check_choice("schedule.policy", config.policy, POLICIES)
    check_choice("schedule.meet", meet, MEETINGS)
    limit_of(config)
    if config.lookahead == "auto":
        raise ValueError('schedule.lookahead="auto" must be a number by now: it is resolved once when a run starts')
    if config.policy == "balanced" and config.samples_per_step < ranks:
        raise ValueError(
            f"{config.samples_per_step} samples a step are fewer than {ranks} ranks: "
            "raise schedule.samples_per_step or start fewer processes"
        )


def check_memory(config: ScheduleConfig, table: SampleTable, order: EndlessOrder) -> None:
    """Raise ValueError if a sample of `order` is above the memory limit, or warn if the configuration allows it."""
    tokens = table.computed_tokens(order.ids) + config.text_memory_tokens
    num_above = int((tokens > limit_of(config)).sum())
    if not num_above:
        return
    worst = order.ids[int(tokens.argmax())]
    message = (
        f"sample {table.keys[worst]!r} has {int(tokens.max())} tokens, "
        f"above schedule.memory_limit_tokens = {config.memory_limit_tokens} ({num_above} such samples)"
    )
    if not config.allow_oversize:
        raise ValueError(
            f"{message}: raise the limit, prepare smaller shapes, or set schedule.allow_oversize to run each alone"
        )
    logger.warning("%s: each runs alone in its micro-batch, and may run out of memory", message)
