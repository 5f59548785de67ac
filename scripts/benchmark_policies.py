"""Train a few steps under each scheduling policy on synthetic latents: planned against measured imbalance.

accelerate launch --config_file configs/accelerate/1node.yaml --num_processes 8 -m scripts.benchmark_policies \
    configs/wan_1_3b.yaml --mix configs/mixes/mixed.yaml --cost costs.yaml --samples-per-rank 16 --steps 12 \
    --budget-minutes 8 --output out
"""

import os

# As in train.py, whose path this measures.
os.environ.setdefault("TORCHINDUCTOR_MIX_ORDER_REDUCTION", "0")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adaptiveload.scheduling.cost import PowerCost, TwoTermCost, analytic_prior
from adaptiveload.scheduling.cost_file import LAWS, CostFile
from adaptiveload.scheduling.metrics import idle_share, load_cv, where_ranks_meet
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.policies import POLICIES, Policy, ScheduleConfig, build_policy
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.simulation import MEASURED_PART, Simulation
from adaptiveload.scheduling.updates import CostHistory
from adaptiveload.training.adaptation import Adaptation
from adaptiveload.training.config import RunConfig, load_config
from adaptiveload.training.cost import model_dims, resolve_gpu
from adaptiveload.training.distributed import Ranks, clip_gradients, finish_ranks, reshard, start_ranks
from adaptiveload.training.live_step import build_model, run_micro_batch
from adaptiveload.training.metrics import RankMeasurement, StepMeasurement, cost_error, gather_measurements
from adaptiveload.training.schedule import model_geometry, resolve_meet
from adaptiveload.training.synthetic import synthetic_batch, warm_up_attention

EPOCH_SAMPLES_PER_RANK = 30_000  # as the simulator: the paper's large buckets fill late
TABLE = (
    ("steps", "num_steps", "d"),
    ("planned load CV", "load_cv", ".4f"),
    ("measured CV where ranks meet", "measured_cv", ".4f"),
    ("measured step-time CV", "step_time_cv", ".4f"),
    ("measured slot CV", "slot_time_cv", ".4f"),
    ("idle share planned", "idle_share_planned", ".4f"),
    ("idle share measured", "idle_share", ".4f"),
    ("tokens/s", "tokens_per_s", ",.0f"),
    ("relative", "tokens_per_s_relative", ".2f"),
    ("samples a step", "samples_per_step", ".1f"),
    ("seconds a step", "step_s", ".3f"),
    ("cost error", "cost_error", ".3f"),
    ("peak GiB", "memory_peak_gib", ".1f"),
)


@dataclass
class SyntheticSchedule:
    """What `Adaptation` needs of a schedule, without a dataset."""

    table: SampleTable
    order: EndlessOrder
    policy: Policy
    meet: str
    settings: ScheduleConfig
    history: CostHistory


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    started = time.monotonic()
    options = parse_arguments(arguments)
    try:
        config = load_config(options.config, options.overrides)
        ranks = start_ranks()
        run(options, config, ranks, started + 60 * options.budget_minutes)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"benchmark_policies: {error}")
    finish_ranks(ranks)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description="Planned against measured imbalance of each policy, synthetic latents."
    )
    parser.add_argument("config", help="YAML of the run whose model, precision and schedule count")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration keys")
    parser.add_argument("--mix", default="configs/mixes/mixed.yaml", help="YAML of shapes and their shares")
    parser.add_argument("--cost", type=Path, help="cost file (default: the prior from FLOPs)")
    parser.add_argument("--law", choices=LAWS, default="two_term")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(reversed(POLICIES)))
    parser.add_argument("--samples-per-rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each policy (default 12)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them that do not count (default 2)")
    parser.add_argument(
        "--budget-minutes",
        type=float,
        default=math.inf,
        help="start-up included; what is left goes evenly to the policies left, which take fewer steps (at least one)",
    )
    parser.add_argument("--scale-b2", type=float, default=1.0, help="make the cost law wrong: b2 (or b) times this")
    parser.add_argument("--adaptive", action="store_true", help="refit while it runs, as training does")
    parser.add_argument("--output", type=Path, required=True, help="folder for policies.json and policies.md")
    return parser.parse_intermixed_args(arguments)


def run(options: argparse.Namespace, config: RunConfig, ranks: Ranks, end: float) -> None:
    """Measure each policy on one model, until the time `end`, and write the table after every step."""
    gpu = resolve_gpu(config.cost, ranks.device)
    meet = resolve_meet(config, gpu, ranks.device)
    law: TwoTermCost | PowerCost
    law = (
        CostFile.read(options.cost).law(options.law)
        if options.cost
        else analytic_prior(model_dims(config.model), gpu, config.schedule.recompute)
    )
    name = "b2_us" if isinstance(law, TwoTermCost) else "b_us"
    law = replace(law, **{name: getattr(law, name) * options.scale_b2})
    num_samples = EPOCH_SAMPLES_PER_RANK * ranks.world_size
    table = SampleTable.from_mix(options.mix, num_samples, config.schedule.seed, model_geometry(config.model))
    # As `synthetic_batch` makes them.
    text_lens = np.full(len(table), config.model.text_len, np.int32)
    table = replace(table, text_len=text_lens, text_joins=model_dims(config.model).text_joins)
    order = EndlessOrder(np.arange(len(table)), config.schedule.seed)
    simulation = Simulation(table, order, law, ranks.world_size, meet)
    base = replace(config.schedule, samples_per_step=options.samples_per_rank * ranks.world_size)
    say(ranks, ranks.describe())
    parts = build_model(config, ranks)
    results: list[dict[str, Any]] = []
    for number, policy in enumerate(options.policies):
        schedule_config = simulation.resolved(replace(base, policy=policy))
        history = CostHistory(law)
        planner = build_policy(schedule_config, table, order, history, ranks.world_size, meet)
        schedule = SyntheticSchedule(table, order, planner, meet, schedule_config, history)
        now = time.monotonic()
        policy_end = now + (end - now) / (len(options.policies) - number)
        results.append({})
        for figures in measure(schedule, law, policy_end, options, config, ranks, *parts):
            results[-1] = figures
            figures["tokens_per_s_relative"] = figures["tokens_per_s"] / results[0]["tokens_per_s"]
            if ranks.is_main:  # a command that is cut leaves what it has
                write_results(results, options, config, ranks, law)
    if ranks.is_main:
        print((options.output / "policies.md").read_text())


def measure(
    schedule: SyntheticSchedule,
    law: TwoTermCost | PowerCost,
    end: float,
    options: argparse.Namespace,
    config: RunConfig,
    ranks: Ranks,
    *parts: Any,
) -> Iterator[dict[str, Any]]:
    """Figures of one policy after each measured step; no step begins that would not end by the time `end`."""
    adaptive = replace(config.cost, adaptive=options.adaptive)
    if not options.adaptive:
        schedule.settings = replace(schedule.settings, rank_speed="off")
    adaptation = Adaptation(adaptive, schedule, law, ranks, plans_ahead=0)
    # Full buckets alone: the paper's policies start with the small ones.
    first = int(MEASURED_PART[0] * schedule.policy.steps_in_first_epoch)
    steps = range(first, first + options.warmup + options.steps)
    warm_up(schedule, steps, config, ranks)
    plans: list[StepPlan] = []
    measurements: list[StepMeasurement] = []
    for step in steps:
        # The dearest step so far, the first of all apart: it allocates.
        dearest_s = max((float(measured.step_s.max()) for measured in measurements[1:]), default=0.0)
        if len(plans) > options.warmup and ranks.seconds_until(end) < dearest_s:
            say(ranks, f"{schedule.settings.policy}: the budget ends its steps at {len(plans) - options.warmup}")
            return
        plan = schedule.policy.plan(step)
        measured = run_step(plan, schedule, config, ranks, *parts)
        for line in adaptation.after_step(plan, measured.busy_s):
            say(ranks, f"  {line}")
        say(
            ranks,
            f"{schedule.settings.policy} step {step - first}: {measured.step_s.max():.3f} s, "
            f"{plan.num_slots} slots, CV planned {load_cv(plan.costs_us, plan.meet):.4f} measured "
            f"{load_cv(measured.busy_s, plan.meet):.4f}, cost error {cost_error(plan, measured.busy_s):.3f}",
        )
        plans.append(plan)
        measurements.append(measured)
        if len(plans) > options.warmup:
            yield summarize(schedule, plans, measurements, options.warmup)


def warm_up(schedule: SyntheticSchedule, steps: range, config: RunConfig, ranks: Ranks) -> None:
    """Let cuDNN plan the attention calls of all steps first."""
    began = time.perf_counter()
    lengths = [
        schedule.table.num_tokens[plan.sample_ids[list(members)]].tolist()
        for plan in map(schedule.policy.plan, steps)
        for members in plan.micro_batches(ranks.rank)
        if members
    ]
    calls = warm_up_attention(lengths, config.model, ranks.device, config.precision)
    say(ranks, f"{schedule.settings.policy}: {calls} attention calls planned in {time.perf_counter() - began:.1f} s")


def run_step(
    plan: StepPlan, schedule: SyntheticSchedule, config: RunConfig, ranks: Ranks, *parts: Any
) -> StepMeasurement:
    """One optimizer step of the plan on random latents."""
    model, timer, optimizer = parts
    geometry, table = model_geometry(config.model), schedule.table
    micro_batches = plan.micro_batches(ranks.rank)
    batches = [
        synthetic_batch(
            [table.shapes[table.shape_ids[plan.sample_ids[i]]] for i in members], geometry, config.model, ranks.device
        )
        for members in micro_batches
    ]
    ranks.barrier()
    began = time.perf_counter()
    timer.start_step()
    loss_sum = 0.0
    for g, batch in enumerate(batches):
        losses = run_micro_batch(
            model,
            timer,
            batch,
            scale=ranks.world_size / plan.normalizer,
            meet=plan.meet,
            is_last=g == len(batches) - 1,
            recompute=plan.recompute,
            permille=int(plan.recomputed[g, ranks.rank]),
        )
        loss_sum = loss_sum + losses.sum()
    reshard(model)
    clip_gradients(optimizer, config.optimizer.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    busy_s = timer.busy_s()
    step_s = time.perf_counter() - began
    mine = RankMeasurement(float(loss_sum), step_s, 0.0, ranks.take_memory_peak_gib(), 0, busy_s)
    return gather_measurements(ranks, plan, mine)


def summarize(
    schedule: SyntheticSchedule, plans: list[StepPlan], measurements: list[StepMeasurement], warmup: int
) -> dict[str, Any]:
    """Figures of the steps after the warm-up; cost errors of all of them, in order."""
    errors = [cost_error(plan, measured.busy_s) for plan, measured in zip(plans, measurements, strict=True)]
    plans, measurements = plans[warmup:], measurements[warmup:]
    meet = schedule.meet
    planned = np.concatenate([where_ranks_meet(plan.costs_us, meet) for plan in plans])
    busy = np.concatenate([where_ranks_meet(measured.busy_s, meet) for measured in measurements])
    step_s = np.array([measured.step_s.max() for measured in measurements])
    return {
        "policy": schedule.settings.policy,
        "num_steps": len(plans),
        "meet": meet,
        "load_cv": load_cv(planned, "slot"),
        "measured_cv": load_cv(busy, "slot"),
        "step_time_cv": float(np.mean([load_cv(measured.busy_s, "step") for measured in measurements])),
        "slot_time_cv": float(np.mean([load_cv(measured.busy_s, "slot") for measured in measurements])),
        "idle_share_planned": idle_share(planned, "slot"),
        "idle_share": idle_share(busy, "slot"),
        "tokens_per_s": sum(int(plan.num_tokens.sum()) for plan in plans) / float(step_s.sum()),
        "samples_per_step": float(np.mean([plan.num_samples for plan in plans])),
        "slots_per_step": float(np.mean([plan.num_slots for plan in plans])),
        "step_s": float(step_s.mean()),
        "cost_error": float(np.median(errors[warmup:])),
        "cost_error_by_step": [round(error, 4) for error in errors],
        "memory_peak_gib": max(float(measured.memory_peak_gib.max()) for measured in measurements),
        "updates": [update.from_step for update in schedule.history.updates],
        "steps": [
            {"costs_us": plan.costs_us.tolist(), "busy_s": np.round(measured.busy_s, 6).tolist()}
            for plan, measured in zip(plans, measurements, strict=True)
        ],
    }


def write_results(
    results: list[dict[str, Any]],
    options: argparse.Namespace,
    config: RunConfig,
    ranks: Ranks,
    law: TwoTermCost | PowerCost,
) -> None:
    """`policies.json` with everything, `policies.md` with the table."""
    options.output.mkdir(parents=True, exist_ok=True)
    about = {
        "world_size": ranks.world_size,
        "mix": str(options.mix),
        "memory_limit_tokens": config.schedule.memory_limit_tokens,
        "samples_per_rank": options.samples_per_rank,
        "cost": {"law": type(law).__name__, **vars(law), "scale_b2": options.scale_b2, "adaptive": options.adaptive},
        "device": torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    (options.output / "policies.json").write_text(json.dumps({**about, "policies": results}, indent=1))
    head = (
        f"{ranks.world_size} x {about['device']}, {Path(options.mix).stem}, {options.samples_per_rank} samples a rank, "
        f"{about['memory_limit_tokens']} tokens, ranks meet every {results[0]['meet']}"
    )
    lines = [
        head,
        "",
        "| policy | " + " | ".join(title for title, _, _ in TABLE) + " |",
        "|---" * (len(TABLE) + 1) + "|",
    ]
    lines += [
        f"| {row['policy']} | " + " | ".join(format(row[key], form) for _, key, form in TABLE) + " |" for row in results
    ]
    if options.adaptive:
        lines += ["", "Median error of a micro-batch's planned time, step by step:", ""]
        lines += [
            f"- {row['policy']}: " + " ".join(f"{error:.3f}" for error in row["cost_error_by_step"]) for row in results
        ]
    (options.output / "policies.md").write_text("\n".join(lines) + "\n")


def say(ranks: Ranks, text: str) -> None:
    """Print on rank 0."""
    if ranks.is_main:
        print(text, flush=True)


if __name__ == "__main__":
    main()
