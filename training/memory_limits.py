"""What a run has learnt about memory: a micro-batch for which it did not suffice, and the lower limit that follows.

Out of memory cannot be mended inside a step, for the other ranks sit in its collectives. So the rank writes
`limits.yaml` in the run's folder and all end; started again, the run plans smaller micro-batches. Under `balanced`
these hold the same samples step by step.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.policies import ScheduleConfig, check_memory, limit_of
from adaptiveload.scheduling.recompute import ALL_BLOCKS
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.training.stop_signals import LOWER_LIMIT_EXIT_CODE

LIMITS_NAME = "limits.yaml"
# The next limit over the tokens that did not fit; three of these come to 0.61.
_SHRINK = 0.85
_MOST_KEYS = 16
# Keys of `schedule` that a record may lower; a record without any says that nothing of the kind helps.
_LIMITS = ("memory_limit_tokens", "kept_tokens", "most_tokens")


class MicroBatchMemoryError(RuntimeError):
    """A micro-batch did not fit in memory; the message is for the user.

    Attributes:
        exit_code: Of this run: `LOWER_LIMIT_EXIT_CODE` where starting again helps.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the device had no more memory, be it for PyTorch's allocator or for a library behind its back."""
    words = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


@dataclass(frozen=True)
class MemoryLimits:
    """The file of one run, as one rank writes to it.

    Attributes:
        path: `limits.yaml` in the run's folder.
        rank: This one.
        under: What decides over memory beside the micro-batch; records made under something else are not looked at.
        schedule: The run's schedule.
        can_obey: Whether a run that is started again plans by a lower limit (`balanced` over an index).
    """

    path: Path
    rank: int
    under: dict[str, Any]
    schedule: ScheduleConfig
    can_obey: bool

    def exceeded(self, plan: StepPlan, g: int, table: SampleTable, error: BaseException) -> MicroBatchMemoryError:
        """Record that this rank's `g`-th micro-batch of `plan` did not fit; what to raise."""
        ids = plan.sample_ids[list(plan.micro_batches(self.rank)[g])]
        tokens = int(table.computed_tokens(ids).sum()) + len(ids) * self.schedule.text_memory_tokens
        shapes = Counter(str(table.shapes[shape]) for shape in table.shape_ids[ids])
        lower = self._lower(tokens, is_alone=len(ids) <= 1, permille=int(plan.recomputed[g, self.rank]))
        record: dict[str, Any] = {
            "step": plan.step,
            "rank": self.rank,
            "micro_batch": g,
            "num_tokens": tokens,
            "num_samples": len(ids),
            "text_rows": int(table.text_len[ids].sum()),
            "shapes": dict(shapes),
            "keys": [str(table.keys[i]) for i in ids[:_MOST_KEYS]],
            **lower,
            "under": self.under,
        }
        # One line, in one write: several ranks may fail together.
        with self.path.open("a") as file:
            file.write(f"- {json.dumps(record)}\n")
        contents = ", ".join(f"{count} of {shape}" for shape, count in shapes.items()) or "a filler"
        said = str(error).splitlines()[0][:300].rstrip(".")
        what = (
            f"out of memory in a micro-batch of {tokens} tokens ({contents}; {record['text_rows']} text rows): {said}. "
        )
        if not lower:
            return MicroBatchMemoryError(what + cannot_split(record), 1)
        before = {name: getattr(self.schedule, name) for name in lower}
        changes = _changes(before, lower)
        if not self.can_obey:
            return MicroBatchMemoryError(
                f"{what}Only schedule.policy=balanced with an index can go on under other limits. Start anew under "
                f"another `name` with {changes}, or with schedule.recompute=auto",
                1,
            )
        return MicroBatchMemoryError(f"{what}From here on, by {self.path}: {changes}", LOWER_LIMIT_EXIT_CODE)

    def _lower(self, tokens: int, *, is_alone: bool, permille: int) -> dict[str, int]:
        """The limits that such a micro-batch asks for, by their key in the schedule; none where none would help."""
        schedule = self.schedule
        if schedule.recompute == "auto" and permille < ALL_BLOCKS:  # as many tokens may fit with more computed again
            assert schedule.kept_tokens is not None
            assert schedule.most_tokens is not None
            most = max(int(_SHRINK * schedule.most_tokens), 1)
            kept = min(int(_SHRINK * min(schedule.kept_tokens, tokens)), most - 1)
            return {"memory_limit_tokens": min(limit_of(schedule), most), "kept_tokens": kept, "most_tokens": most}
        return {} if is_alone else {"memory_limit_tokens": int(_SHRINK * tokens)}


def read_records(path: Path) -> list[dict[str, Any]]:
    """What `limits.yaml` holds, if there is one. Raises ValueError if it cannot be read."""
    if not path.exists():
        return []
    try:
        records: list[dict[str, Any]] = yaml.safe_load(path.read_text()) or []
        for record in records:
            if missing := {"step", "rank", "under", "num_tokens", "keys", "shapes"} - record.keys():
                raise KeyError(*missing)
    except (yaml.YAMLError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read, mend or remove it: {error!r}") from error
    return records


def lower_limit(
    schedule: ScheduleConfig, records: Sequence[dict[str, Any]], table: SampleTable, order: EndlessOrder
) -> tuple[ScheduleConfig, str | None]:
    """`schedule` under the lowest limits of `records`, and what to say of it, if they are lower than the user's.

    Samples between that limit and the user's run alone: nothing is known against them.

    Raises:
        ValueError: If a sample did not fit alone, naming it, or one is above the user's own limit.
    """
    lowest: dict[str, Any] = {}
    for name in _LIMITS:
        found = [int(record[name]) for record in records if name in record]
        mine = getattr(schedule, name)
        if found and mine is not None and min(found) < mine:
            lowest[name] = min(found)
    for record in records:
        if "memory_limit_tokens" not in record:
            before = f"rank {record['rank']} ran out of memory in step {record['step']}"
            raise ValueError(f"{before}: {cannot_split(record)}")
    if not lowest:
        return schedule, None
    check_memory(schedule, table, order)
    last = records[-1]
    line = (
        f"{_changes({name: getattr(schedule, name) for name in lowest}, lowest)}: {last['num_tokens']} tokens did not "
        f"fit on rank {last['rank']} in step {last['step']} ({LIMITS_NAME})"
    )
    return replace(schedule, **lowest, allow_oversize=True), line


def _changes(before: dict[str, int], after: dict[str, int]) -> str:
    return ", ".join(f"schedule.{name} {before[name]} -> {after[name]}" for name in after)


def cannot_split(record: dict[str, Any]) -> str:
    """What to tell the user about a micro-batch of one sample that did not fit."""
    names = ", ".join(record["keys"]) or "a filler"
    shape = ", ".join(record["shapes"])
    return (
        f"sample {names} ({shape}, {record['num_tokens']} tokens) does not fit alone, so no "
        "schedule.memory_limit_tokens helps: leave it out (data.sources: max_frames, max_pixels), set "
        "schedule.recompute=full, or take more GPUs. To try again as before, remove its line from "
        f"{LIMITS_NAME} in the run's folder"
    )
