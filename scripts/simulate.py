"""Simulate the scheduling policies on a shape mix, with the code that trains; needs no GPU.

python -m scripts.simulate --mix configs/mixes/mixed.yaml --ranks 16 --samples-per-rank 28 \
    --memory-limit-tokens 105600 --steps 24
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from adaptiveload.scheduling.buckets import mean_batch_size
from adaptiveload.scheduling.cost import CostModel, read_cost
from adaptiveload.scheduling.metrics import idle_share, load_cv, where_ranks_meet
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.policies import (
    POLICIES,
    Policy,
    ScheduleConfig,
    bucket_counts,
    build_policy,
    paper_batch_sizes,
)
from adaptiveload.scheduling.samples import SampleTable

COSTS = Path(__file__).resolve().parents[1] / "configs" / "costs"
# Samples a rank that the data set holds. The paper's buckets need many: one of short images, at 440 a batch and 4 % of
# the samples, fills for the first time after 12,000.
EPOCH_SAMPLES_PER_RANK = 30_000
# Part of the first epoch that is measured: full buckets only. The end, where what is left of every bucket runs, weighs
# more the smaller the data set is, and only the paper's policies have one.
MEASURED_PART = (0.1, 0.85)


def main(arguments: list[str] | None = None) -> None:
    """Print one line a policy, or JSON."""
    args = parse_arguments(arguments)
    path = Path(args.cost) if args.cost.endswith((".yaml", ".yml")) else COSTS / f"{args.cost}.yaml"
    table = SampleTable.from_mix(args.mix, args.ranks * args.epoch_samples_per_rank, args.seed)
    order = EndlessOrder(np.arange(len(table)), args.seed)
    config = ScheduleConfig(
        samples_per_step=args.ranks * args.samples_per_rank,
        memory_limit_tokens=args.memory_limit_tokens,
        cost_exponent=args.cost_exponent or yaml.safe_load(path.read_text()).get("cost_exponent", 1.45),
        lookahead=str(args.lookahead),
        seed=args.seed,
    )
    rows = []
    for name in args.policies:
        policy_config = match_samples_per_step(replace(config, policy=name), table, order, read_cost(path), args)
        policy = build_policy(policy_config, table, order, read_cost(path), args.ranks, args.meet)
        rows.append({"policy": name, **simulate(policy, args.steps, args.meet)})
    for row in rows:
        row["tokens_per_s_relative"] = row["tokens_per_s"] / rows[0]["tokens_per_s"]
    print(json.dumps(rows, indent=2) if args.json else format_table(rows))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Simulate the scheduling policies on a shape mix.")
    parser.add_argument("--mix", default="configs/mixes/mixed.yaml", help="YAML of shapes and their shares")
    parser.add_argument("--cost", default="wan_1_3b", help="file under configs/costs without .yaml, or a path")
    parser.add_argument("--cost-exponent", type=float, help="the paper's p; default: that of the cost file")
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--samples-per-rank", type=int, default=28, help="the global batch divided by the ranks")
    parser.add_argument("--memory-limit-tokens", type=int, default=105_600)
    parser.add_argument("--meet", choices=("slot", "step"), default="slot", help="where ranks wait for each other")
    parser.add_argument("--lookahead", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24, help="steps to plan, spread over an epoch")
    parser.add_argument("--epoch-samples-per-rank", type=int, default=EPOCH_SAMPLES_PER_RANK)
    parser.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=["equal_token", "dual_constraint", "balanced"]
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(arguments)


def match_samples_per_step(
    config: ScheduleConfig, table: SampleTable, order: EndlessOrder, cost_model: CostModel, args: argparse.Namespace
) -> ScheduleConfig:
    """Give a paper's policy the slots per step that come nearest to `samples_per_step` samples a step."""
    if config.policy == "balanced":
        return config
    sizes = paper_batch_sizes(config, table, order, cost_model, args.ranks, args.meet)
    mean = mean_batch_size(bucket_counts(table, order), sizes)
    return replace(config, slots_per_step=max(1, round(config.samples_per_step / args.ranks / mean)))


def simulate(policy: Policy, num_steps: int, meet: str) -> dict[str, Any]:
    """Load CV, idle share and tokens per second and rank over `num_steps` steps of the first epoch."""
    start, end = (int(part * policy.steps_in_first_epoch) for part in MEASURED_PART)
    steps = np.unique(np.linspace(start, max(end - 1, start), num_steps).astype(int))
    plans, milliseconds = [], []
    for step in steps.tolist():
        begin = time.perf_counter()
        plans.append(policy.plan(step))
        milliseconds.append((time.perf_counter() - begin) * 1e3)
    work = np.concatenate([where_ranks_meet(plan.costs_us, meet) for plan in plans])
    num_tokens = sum(int(plan.num_tokens.sum()) for plan in plans)
    return {
        "load_cv": load_cv(work, "slot"),
        "idle_share": idle_share(work, "slot"),
        "tokens_per_s": num_tokens / work.shape[1] / work.max(axis=1).sum() * 1e6,
        "max_micro_batch_tokens": max(int(plan.num_tokens.max()) for plan in plans),
        "samples_per_step": float(np.mean([plan.num_samples for plan in plans])),
        "slots_per_step": float(np.mean([plan.num_slots for plan in plans])),
        "plan_ms": float(np.median(milliseconds)),
    }


def format_table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text."""
    lines = ["policy           load CV  idle share  tokens/s (rel.)  max tokens  samples/step  slots/step  plan ms"]
    lines += [
        f"{row['policy']:<15}  {row['load_cv']:7.4f}  {row['idle_share']:10.4f}  "
        f"{row['tokens_per_s']:8,.0f} ({row['tokens_per_s_relative']:4.2f})  {row['max_micro_batch_tokens']:10,}  "
        f"{row['samples_per_step']:12.1f}  {row['slots_per_step']:10.2f}  {row['plan_ms']:7.1f}"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
