"""`train.py --dry-run`: what a run would do, from its plans alone. No model is built and no latent is read."""

import numpy as np

from adaptiveload.scheduling.metrics import idle_share, load_cv
from adaptiveload.training.run import Schedule

_NUM_STEPS = 20


def describe_schedule(schedule: Schedule, ranks: int) -> str:
    """Buckets, the first steps' plans and their predicted figures, as text."""
    plans = [schedule.policy.plan(step) for step in range(_NUM_STEPS)]
    table = schedule.table
    seconds = [_wall_us(plan.costs_us, plan.meet) / 1e6 for plan in plans]
    tokens = [int(table.num_tokens[plan.sample_ids].sum()) for plan in plans]
    lines = [
        f"{'shape':>16} {'tokens':>8} {'samples':>8} {'share of tokens':>16}",
        *_bucket_lines(schedule),
        "",
        f"the first {_NUM_STEPS} steps on {ranks} ranks, meeting every {schedule.meet}:",
        f"  samples a step     {np.mean([plan.num_samples for plan in plans]):.1f}",
        f"  slots a step       {np.mean([plan.num_slots for plan in plans]):.1f}",
        f"  largest micro-batch {max(int(plan.num_tokens.max()) for plan in plans)} tokens",
        f"  load CV            {np.mean([load_cv(plan.costs_us, plan.meet) for plan in plans]):.4f}",
        f"  idle share         {np.mean([idle_share(plan.costs_us, plan.meet) for plan in plans]):.4f}",
        f"  predicted step     {np.mean(seconds):.3f} s, {sum(tokens) / sum(seconds):,.0f} tokens/s (by the prior)",
        "",
        f"step {plans[0].step}, planned milliseconds (tokens) of each micro-batch:",
        *_plan_lines(plans[0].costs_us, plans[0].num_tokens),
    ]
    return "\n".join(lines)


def _bucket_lines(schedule: Schedule) -> list[str]:
    table = schedule.table
    shape_ids = table.shape_ids[schedule.train_ids]
    total = int(table.num_tokens[schedule.train_ids].sum())
    lines = []
    for i, shape in enumerate(table.shapes):
        members = schedule.train_ids[shape_ids == i]
        if len(members):
            tokens = int(table.num_tokens[members[0]])
            lines.append(f"{shape!s:>16} {tokens:>8} {len(members):>8} {len(members) * tokens / total:>16.1%}")
    return lines


def _plan_lines(costs_us: np.ndarray, num_tokens: np.ndarray, max_ranks: int = 8) -> list[str]:
    lines = []
    for g, (costs, tokens) in enumerate(zip(costs_us, num_tokens, strict=True)):
        cells = [
            f"{cost / 1e3:9.1f} ({count})" for cost, count in zip(costs[:max_ranks], tokens[:max_ranks], strict=True)
        ]
        lines.append(f"  slot {g}: " + " ".join(cells) + (" ..." if len(costs) > max_ranks else ""))
    return lines


def _wall_us(costs_us: np.ndarray, meet: str) -> float:
    return float(costs_us.max(1).sum() if meet == "slot" else costs_us.sum(0).max())
