"""What each policy would cost on so many ranks: the planner that trains, run over a mix or an index without a GPU."""

import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from adaptiveload.scheduling.buckets import mean_batch_size
from adaptiveload.scheduling.cost import CostModel, TableCost
from adaptiveload.scheduling.metrics import FloatArray, load_cv, step_time, where_ranks_meet
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.policies import (
    Policy,
    ScheduleConfig,
    bucket_counts,
    build_policy,
    limit_of,
    paper_batch_sizes,
    resolve_lookahead,
)
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.updates import CostHistory, ScheduleUpdate

# Part of the first epoch that is measured: full buckets only. The end, where what is left of every bucket runs, weighs
# more the smaller the data set is, and only the paper's policies have one.
MEASURED_PART = (0.1, 0.85)
CHECKED_SAMPLES_PER_RANK = 64  # of an epoch that is planned whole, to count samples lost or repeated
Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Simulation:
    """One data set on one number of ranks.

    Attributes:
        table: Samples.
        order: Order of all of them.
        cost_model: Prices samples; also the truth, but for noise and slow ranks.
        ranks: Data-parallel ranks.
        meet: "slot" or "step".
        num_steps: Steps to plan, spread over an epoch.
        noise: Relative standard deviation of a micro-batch's time about its price.
        slow_rank_speed: Speed of rank 0 beside the others.
        knows_speed: Whether the planner has been told of it, as `schedule.rank_speed: auto` does.
        seed: Of the noise.
    """

    table: SampleTable
    order: EndlessOrder
    cost_model: CostModel
    ranks: int
    meet: str
    num_steps: int = 24
    noise: float = 0.0
    slow_rank_speed: float = 1.0
    knows_speed: bool = True
    seed: int = 0

    def run(self, config: ScheduleConfig) -> tuple[Row, list[StepPlan]]:
        """Figures of the policy that `config` names, and the plans behind them."""
        config = self.resolved(config)
        policy = self._policy(config, self.order)
        start, end = (int(part * policy.steps_in_first_epoch) for part in MEASURED_PART)
        steps = np.unique(np.linspace(start, max(end - 1, start), self.num_steps).astype(int))
        plans, planner_ms = [], []
        for step in steps.tolist():
            begin = time.perf_counter()
            plans.append(policy.plan(step))
            planner_ms.append((time.perf_counter() - begin) * 1e3)
        times, replicas = self._times(plans), plans[0].replicas
        walls = [step_time(each, self.meet, replicas) for each in times]
        rates = [int(plan.num_tokens.sum()) / wall * 1e6 for plan, wall in zip(plans, walls, strict=True)]
        num_tokens = sum(int(plan.num_tokens.sum()) for plan in plans)
        meetings, limit = (
            np.concatenate([where_ranks_meet(each, self.meet, replicas) for each in times]),
            limit_of(config),
        )
        largest = max(int(plan.num_tokens.max()) for plan in plans)
        lost, repeated = self._count_an_epoch(config)
        slots_per_step = float(np.mean([plan.num_slots for plan in plans]))
        row = {
            "policy": config.policy,
            "meet": self.meet,
            "world_size": self.ranks,
            "memory_limit_tokens": limit,
            "load_cv": load_cv(meetings, "slot"),
            "idle_share": 1 - float(sum(each.sum() for each in times)) / self.ranks / sum(walls),
            "tokens_per_s": num_tokens / sum(walls) * 1e6,
            "tokens_per_s_step_mean": float(np.mean(rates)),
            "tokens_per_s_step_p5": float(np.percentile(rates, 5)),
            "tokens_per_s_step_min": min(rates),
            "samples_per_step": float(np.mean([plan.num_samples for plan in plans])),
            "slots_per_step": slots_per_step,
            "steps_per_epoch": policy.steps_in_first_epoch,
            "slots_per_epoch": round(policy.steps_in_first_epoch * slots_per_step),
            "hours_per_epoch": sum(walls) / len(plans) * policy.steps_in_first_epoch / 3.6e9,
            "max_micro_batch_tokens": largest,
            "memory_headroom": 1 - largest / limit,
            "oversize": int((self.table.computed_tokens(self.order.ids) > limit).sum()),
            "lost": lost,
            "repeated": repeated,
            "planner_ms": float(np.median(planner_ms)),
            "lookahead": int(config.lookahead),
        }
        return row, plans

    def resolved(self, config: ScheduleConfig) -> ScheduleConfig:
        """`config` with the slots that bring a paper's policy nearest to `samples_per_step`, and a whole lookahead."""
        if config.policy == "balanced":
            if config.lookahead == "auto":
                cohort = resolve_lookahead(config, self.table, self.order, self.cost_model, self.ranks, self.meet)
                config = replace(config, lookahead=str(cohort))
            return config
        mean = self.mean_samples_per_slot(config) / self.ranks
        slots = max(1, round(config.samples_per_step / self.ranks / mean))
        return replace(config, slots_per_step=slots, lookahead="1")

    def mean_samples_per_slot(self, config: ScheduleConfig) -> float:
        """Samples over all ranks of a slot of full buckets under a paper's policy."""
        sizes = paper_batch_sizes(config, self.table, self.order, self.cost_model, self.ranks, self.meet)
        return self.ranks * mean_batch_size(bucket_counts(self.table, self.order), sizes)

    def _policy(self, config: ScheduleConfig, order: EndlessOrder) -> Policy:
        history = CostHistory(self.cost_model)
        if self.knows_speed and self.slow_rank_speed < 1:
            speeds = (round(self.slow_rank_speed * 1000), *[1000] * (self.ranks - 1))
            history.add(ScheduleUpdate(0, TableCost.of(self.cost_model, self.table.computed_tokens()), speeds))
        return build_policy(replace(config, allow_oversize=True), self.table, order, history, self.ranks, self.meet)

    def _times(self, plans: list[StepPlan]) -> list[FloatArray]:
        """Microseconds that each plan's micro-batches take, [G, R] each."""
        random = np.random.default_rng(self.seed)
        times = []
        for plan in plans:
            taken = plan.costs_us.astype(np.float64)
            if not self.knows_speed:
                taken[:, 0] /= self.slow_rank_speed
            times.append(taken * np.maximum(1 + self.noise * random.standard_normal(taken.shape), 0.1))
        return times

    def _count_an_epoch(self, config: ScheduleConfig) -> tuple[int, int]:
        """Samples of an epoch that never run, and those that run again. A short epoch stands for a long one."""
        size = min(self.order.epoch_size, max(CHECKED_SAMPLES_PER_RANK * self.ranks, 2 * config.samples_per_step))
        order = EndlessOrder(self.order.ids[:size], self.order.seed, self.order.block_size)
        policy, runs = self._policy(config, order), Counter[tuple[int, int]]()
        for step in count():
            plan = policy.plan(step)
            done = [i for slot in plan.slots for bin_ in slot for i in bin_ or ()]
            in_epoch = [i for i in done if plan.epochs[i] == 0]
            runs.update((int(plan.sample_ids[i]), int(plan.repeats[i])) for i in in_epoch)
            if plan.next_position >= size:
                return size - len(runs), sum(runs.values()) - len(runs)
        raise AssertionError("an endless order ended")
