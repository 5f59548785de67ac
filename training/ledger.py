"""What became of the samples: lost ones are always written down, used ones on demand."""

import json
from pathlib import Path
from typing import Any

from adaptiveload.training.feed import DataConfig
from adaptiveload.training.rows import drop_rows_from
from adaptiveload.training.step_guard import StepGuard


class Ledger:
    """Names the samples that could not be read, in `lost.jsonl`, and on demand those that were trained.

    Args:
        run_dir: Folder of the run.
        rank: Whose samples.
        config: Limit of losses, and whether samples are named in `samples_used/rank-RRR.jsonl`.
        min_drawn: The share is taken over at least this many samples, so that one early loss does not stop a run.
        total: Losses of all ranks before this start, from the checkpoint.
    """

    def __init__(self, run_dir: Path, rank: int, config: DataConfig, min_drawn: int, total: int) -> None:
        self.rank = rank
        self.max_lost_share, self.log_samples = config.max_lost_share, config.log_samples
        self.min_drawn = min_drawn
        self.total = total
        self.lost_path, self.skipped_path = run_dir / "lost.jsonl", run_dir / StepGuard.FILE
        self.samples_dir = run_dir / "samples_used"

    def forget_from(self, step: int) -> None:
        """Drop the lines of `step` and later ones, which an earlier try wrote; for one rank, before training."""
        for path in (self.lost_path, self.skipped_path, *self.samples_dir.glob("rank-*.jsonl")):
            drop_rows_from(path, step)

    def record(self, step: int, used: list[str], lost: list[tuple[str, str]]) -> None:
        """Write one micro-batch down: names of used samples, and (key, reason) of lost ones."""
        if self.log_samples:
            _append(self.samples_dir / f"rank-{self.rank:03d}.jsonl", [{"step": step, "keys": used}])
        if lost:
            rows = [{"step": step, "rank": self.rank, "key": key, "reason": reason} for key, reason in lost]
            _append(self.lost_path, rows)

    def add(self, num_lost: int, num_drawn: int) -> None:
        """Count a step's losses of all ranks; call it on every rank with the same numbers.

        Raises:
            RuntimeError: If more than the set share of the `num_drawn` samples drawn so far was lost.
        """
        self.total += num_lost
        if self.total > self.max_lost_share * max(num_drawn, self.min_drawn):
            raise RuntimeError(
                f"{self.total} of {num_drawn} samples could not be read, more than data.max_lost_share="
                f"{self.max_lost_share} allows; {self.lost_path} names them"
            )


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
