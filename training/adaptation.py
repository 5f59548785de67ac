"""Adaptation while training: busy seconds of real micro-batches reprice what is planned from some later step on."""

from collections import Counter
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist

from adaptiveload.scheduling.balanced import BalancedPolicy
from adaptiveload.scheduling.cost import PowerCost, TableCost, TwoTermCost
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.policies import Policy, ScheduleConfig, paper_batch_sizes
from adaptiveload.scheduling.recompute import ALL_BLOCKS
from adaptiveload.scheduling.refit import OnlineFit
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.updates import CostHistory, ScheduleUpdate
from adaptiveload.training.cost import CostConfig
from adaptiveload.training.distributed import Ranks

SPEED_STEP = 10  # thousandths: finer differences between ranks are noise
PERSISTENT = 2  # refits in a row that must find a rank slow
# A refit is told when what samples cost alone, by the median over their lengths, has moved by this share since one was
# told; every one is kept. Alone, because a fit to short micro-batches may put all of their time into its fixed part.
TOLD = 0.25


class Planned(Protocol):
    """What adaptation needs of a schedule."""

    table: SampleTable
    order: EndlessOrder
    policy: Policy
    meet: str
    settings: ScheduleConfig
    history: CostHistory


class Adaptation:
    """Collects measurements on rank 0, refits at fixed steps, and gives every rank the same whole numbers.

    Args:
        config: Whether and how often.
        schedule: Whose history grows.
        law: Cost law that the run starts with; refits keep its form.
        ranks: All of them call `after_step` together.
        plans_ahead: Most steps that may be planned before they run; an update takes effect after them.
    """

    def __init__(
        self, config: CostConfig, schedule: Planned, law: TwoTermCost | PowerCost, ranks: Ranks, plans_ahead: int
    ) -> None:
        self.config, self.schedule, self.law, self.ranks = config, schedule, law, ranks
        self.plans_ahead = plans_ahead
        self.online = OnlineFit(np.unique(schedule.table.computed_tokens()), ranks.world_size)
        self.speed = np.ones(ranks.world_size)
        self._slow_refits = np.zeros(ranks.world_size, np.int64)
        self._told = law

    @property
    def adapts_speed(self) -> bool:
        """Whether slow ranks get less work; the paper's policies deal samples without regard to ranks."""
        return self.schedule.settings.rank_speed == "auto" and isinstance(self.schedule.policy, BalancedPolicy)

    def after_step(self, plan: StepPlan, busy_s: np.ndarray | None) -> list[str]:
        """Take in a step's busy seconds, [G, R] and equal on all ranks; refit if it is time to. Collective.

        Args:
            plan: Of the step.
            busy_s: None if it was measured under a profiler and tells nothing.

        Returns:
            Lines for the log: what changes, from which step on.
        """
        if not (self.config.adaptive or self.adapts_speed):
            return []
        if self.ranks.is_main and busy_s is not None:
            self._observe(plan, busy_s)
        if (plan.step + 1) % self.config.refit_every_steps:
            return []
        message: list[Any] = [None]
        if self.ranks.is_main and self.online.has_enough:
            from_step = plan.step + 1 + self.plans_ahead
            if self.schedule.history.updates:  # one from before a resume may still lie ahead
                from_step = max(from_step, self.schedule.history.updates[-1].from_step + 1)
            message = [self._refit(from_step)]
        dist.broadcast_object_list(message, src=0, group=self.ranks.host_group)
        if message[0] is None:
            return []
        record, lines = message[0]
        self.schedule.history.add(ScheduleUpdate.from_json(record))
        return list(lines)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; only that of rank 0 counts."""
        return {
            "updates": [update.to_json() for update in self.schedule.history.updates],
            "law": vars(self.law),
            "speed": self.speed.tolist(),
            "slow_refits": self._slow_refits.tolist(),
            "observations": self.online.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`. Its updates are the schedule's already, see `build_schedule`."""
        if set(state["law"]) == set(vars(self.law)):
            self.law = self._told = type(self.law)(**state["law"])
        if len(state["speed"]) != len(self.speed):
            return  # other ranks: what the old ones measured says nothing of who is slow
        self.online.load(state["observations"])
        self.speed = np.array(state["speed"])
        # Older checkpoints lack it; a rank that was slow stays so if the next refit finds it slow.
        self._slow_refits = np.array(state.get("slow_refits", np.where(self.speed < 1, PERSISTENT, 0)))

    def _observe(self, plan: StepPlan, busy_s: np.ndarray) -> None:
        tokens = self.schedule.table.computed_tokens(plan.sample_ids)
        for g, slot in enumerate(plan.slots):
            for rank, members in enumerate(slot):
                if members:
                    again = plan.recomputed[g, rank] / ALL_BLOCKS if plan.recompute == "attention" else 0.0
                    counts = Counter(tokens[list(members)].tolist())
                    self.online.observe(rank, float(busy_s[g, rank]), counts, again)

    def _refit(self, from_step: int) -> tuple[dict[str, Any], list[str]] | None:
        """The update of this refit and what to say of it, or None if it changes too little."""
        lines = []
        old = TableCost.of(self.law, self.online.lengths)
        law = self.online.refit(self.law, self.speed)
        speed_lines = self._update_speed(law) if self.adapts_speed else []
        if speed_lines:
            law = self.online.refit(law, self.speed)
        new = TableCost.of(law, self.online.lengths)
        prices = (np.array([cost.launch_floor_us, *cost.prices_us], float) for cost in (old, new))
        before, after = prices
        changes = (
            self.config.adaptive and (np.abs(after - before) > self.config.tolerance * np.maximum(before, 1)).any()
        )
        if not changes and not speed_lines:
            return None
        sizes = None
        if changes:
            moved = float(np.median(self._alone_us(law) / self._alone_us(self._told)))
            if abs(moved - 1) > TOLD:
                lines.append(
                    f"cost law from step {from_step}: prices x {moved:.3g}, {_numbers(self._told)} -> {_numbers(law)}"
                )
                self._told = law
            self.law = law
            sizes, size_lines = self._batch_sizes(law, from_step)
            lines += size_lines
        cost = TableCost.of(self.law, self.online.lengths)
        speed_permille = tuple((np.rint(self.speed * 1000 / SPEED_STEP) * SPEED_STEP).astype(int).tolist())
        speeds = speed_permille if min(speed_permille) < 1000 else None
        return ScheduleUpdate(from_step, cost, speeds, sizes).to_json(), lines + speed_lines

    def _alone_us(self, law: TwoTermCost | PowerCost) -> np.ndarray:
        """Microseconds of a micro-batch of one sample, by its length; 1 at least."""
        lengths = self.online.lengths
        return law.micro_batch_us(law.sample_us(lengths, np.zeros_like(lengths)))

    def _update_speed(self, law: TwoTermCost | PowerCost) -> list[str]:
        """Speeds of the ranks that have been slow for some refits, or are no more; what to say of the change."""
        measured = self.online.speeds(law)
        self._slow_refits = np.where(measured < 1, self._slow_refits + 1, 0)
        speed = np.where(self._slow_refits >= PERSISTENT, measured, 1.0)
        moved = np.abs(speed - self.speed) > self.config.tolerance
        lines = [
            f"rank {rank} runs at {speed[rank]:.0%} of the others' speed and gets as much less work"
            if speed[rank] < 1
            else f"rank {rank} is as fast as the others again"
            for rank in np.flatnonzero(moved).tolist()
        ]
        self.speed = np.where(moved, speed, self.speed)
        return lines

    def _batch_sizes(self, law: TwoTermCost | PowerCost, from_step: int) -> tuple[tuple[int, ...] | None, list[str]]:
        """Batch sizes of the paper's dual constraint under `law`, and each one that changes."""
        schedule = self.schedule
        if schedule.settings.policy != "dual_constraint":
            return None, []
        sizes = paper_batch_sizes(
            schedule.settings, schedule.table, schedule.order, law, self.ranks.world_size, schedule.meet
        )
        before = schedule.history.updates[-1].batch_sizes if schedule.history.updates else None
        old = schedule.policy.batch_sizes.tolist() if before is None else list(before)  # type: ignore[attr-defined]
        lines = [
            f"batch size of {shape} from step {from_step}: {was} -> {size}"
            for shape, was, size in zip(schedule.table.shapes, old, sizes.tolist(), strict=True)
            if was != size
        ]
        return (tuple(sizes.tolist()) if lines else tuple(old)), lines


def _numbers(law: TwoTermCost | PowerCost) -> str:
    return ", ".join(f"{key} {value:.5g}" for key, value in vars(law).items())
