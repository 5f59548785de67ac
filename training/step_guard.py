"""Which steps may move the weights: one whose loss or gradient is not finite is skipped, on all ranks alike."""

import json
import math
from pathlib import Path

import torch
from torch import Tensor

from adaptiveload.training.distributed import Ranks

MicroBatchLosses = list[tuple[Tensor, tuple[str, ...]]]


class StepGuard:
    """Decides about each step, counts the skipped ones and names their samples in `skipped.jsonl`.

    Args:
        run_dir: Folder of the run.
        ranks: All of them must ask together.
        max_in_a_row: `optimizer.max_skipped_in_a_row`.
        total: Steps skipped before this start, from the checkpoint.
        in_a_row: Those at its end, so that a run launched again and again does not walk on.
    """

    FILE = "skipped.jsonl"

    def __init__(self, run_dir: Path, ranks: Ranks, max_in_a_row: int, total: int, in_a_row: int) -> None:
        self.path = run_dir / self.FILE
        self.ranks, self.max_in_a_row = ranks, max_in_a_row
        self.total, self.in_a_row = total, in_a_row

    def why_skip(self, step: int, grad_norm: float, losses: MicroBatchLosses) -> str | None:
        """Why the optimizer must not take the step, or None; on all ranks, after backward, before the optimizer.

        Args:
            step: The step.
            grad_norm: Of the whole gradient, the same on every rank.
            losses: Of this rank's micro-batches: w_i * l_i of each sample, and the samples' keys.

        Raises:
            RuntimeError: On every rank alike, if this is one skipped step in a row too many.
        """
        # The gradient of a loss that overflowed may be finite, so the losses of all ranks decide too.
        mine = sum(float(loss.sum()) for loss, _ in losses)
        sums = self.ranks.gather(torch.tensor([mine], dtype=torch.float64))
        if math.isfinite(grad_norm) and bool(sums.isfinite().all()):
            self.in_a_row = 0
            return None
        self.total += 1
        self.in_a_row += 1
        suspects = {rank: keys for rank, keys in enumerate(self.ranks.gather_objects(_suspects(losses))) if keys}
        message = f"step {step} is skipped: {_describe(grad_norm, suspects)}"
        if self.ranks.is_main:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, "grad_norm": str(grad_norm), "samples": suspects}) + "\n")
        if self.in_a_row > self.max_in_a_row:
            raise RuntimeError(
                f"{message}. That makes {self.in_a_row} in a row, and optimizer.max_skipped_in_a_row="
                f"{self.max_in_a_row}; the weights are those of the last good step. {self.path} names the samples"
            )
        return message


def _describe(grad_norm: float, suspects: dict[int, list[str]]) -> str:
    named = "; ".join(f"rank {rank}: {', '.join(keys)}" for rank, keys in suspects.items())
    return f"the gradient norm is {grad_norm}; samples whose loss is not finite: " + (
        named or "none, so it arose in the backward pass"
    )


def _suspects(losses: MicroBatchLosses) -> list[str]:
    return [
        key
        for loss, keys in losses
        for key, is_finite in zip(keys, loss.isfinite().tolist(), strict=True)
        if not is_finite
    ]
