"""Scheduling policies: their configuration, and `build_policy`, which makes the one that a run names."""

from dataclasses import dataclass
from typing import Protocol

from adaptiveload.scheduling.cost import CostModel
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.samples import SampleTable

POLICIES = ("balanced", "equal_token", "dual_constraint")


@dataclass
class ScheduleConfig:
    """What a user decides about scheduling; the keys of `schedule:` in a run's YAML.

    Attributes:
        policy: "balanced" (default), or the baselines of the paper: "equal_token" and "dual_constraint".
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
    raise NotImplementedError
