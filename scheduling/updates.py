"""What a run learns about costs while it trains, as a history: plans stay a pure function of the step, given it.

An update takes effect at a step that no rank has planned yet and never changes afterwards, so that a resumed run that
has the history plans as the first one did.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from adaptiveload.scheduling.cost import CostModel, IntArray, TableCost


@dataclass(frozen=True)
class ScheduleUpdate:
    """Prices from one step on. Whole numbers only: rank 0 makes them, all ranks get the same.

    Attributes:
        from_step: First step that is planned with them.
        cost: Price of every length.
        speed_permille: Speed of each rank in thousandths; None is 1000 for all.
        batch_sizes: Batch size of each bucket under the paper's policies; None leaves them.
    """

    from_step: int
    cost: TableCost
    speed_permille: tuple[int, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "ScheduleUpdate":
        """Inverse of `to_json`, also through JSON text."""
        # Checkpoints from before `recompute: auto`, which alone asks for it, lack the last.
        cost = {"agains_us": [0] * len(record["cost"]["lengths"]), **record["cost"]}
        speeds, sizes = record["speed_permille"], record["batch_sizes"]
        return cls(
            int(record["from_step"]),
            TableCost(
                cost["launch_floor_us"],
                cost["a_us"],
                *(tuple(cost[name]) for name in ("lengths", "prices_us", "agains_us")),
            ),
            None if speeds is None else tuple(speeds),
            None if sizes is None else tuple(sizes),
        )


@dataclass
class CostHistory:
    """Cost model of every step: `initial` until the first update takes effect.

    Attributes:
        initial: Cost model that the run starts with.
        updates: In order of `from_step`.
    """

    initial: CostModel
    updates: list[ScheduleUpdate] = field(default_factory=list)

    def add(self, update: ScheduleUpdate) -> None:
        """Append `update`. It must lie after every other, and after every step that anybody has planned for use."""
        assert not self.updates or update.from_step > self.updates[-1].from_step
        self.updates.append(update)

    def at(self, step: int) -> ScheduleUpdate | None:
        """The update in effect at `step`."""
        return next((update for update in reversed(self.updates) if update.from_step <= step), None)

    def cost_at(self, step: int) -> CostModel:
        """Cost model that prices the samples of `step`."""
        update = self.at(step)
        return self.initial if update is None else update.cost

    def speed_at(self, step: int, ranks: int) -> IntArray | None:
        """Speed of each rank at `step`, int64 [ranks], or None for equal ones.

        Speeds of another number of ranks, from before a resume, say nothing about these.
        """
        update = self.at(step)
        if update is None or update.speed_permille is None or len(update.speed_permille) != ranks:
            return None
        return np.array(update.speed_permille, np.int64)
