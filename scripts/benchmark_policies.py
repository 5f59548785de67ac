"""Train a few steps under each scheduling policy on synthetic latents: the paper's table, measured.

accelerate launch --config_file configs/accelerate/1node.yaml --num_processes 8 -m scripts.benchmark_policies \
    configs/wan_1_3b.yaml --mix configs/mixes/mixed.yaml --cost costs.yaml --samples-per-rank 16 --steps 12 \
    --kernels reference cuda --recompute full auto --meet step --peer --same-samples --budget-minutes 8 --output out

Every policy runs with each of `--kernels`, `--recompute` and `--meet`; `--peer` adds the plain trainer that people
write (diffusers, FSDP2, full checkpointing, equal_token, ranks meeting at the slot). The result is `policies.md` and
`policies.json`, rewritten after every step, and a picture of the steps, `policies.png`, after every row.

`--dry-run --ranks 8 cost.gpu=h200` needs neither GPU nor launcher: the same plans as the models predict them.

Tokens/s of rows compare only where their samples do. Over a few steps policies draw different ones: the bucket policies
leave long clips in their queues until a bucket is full, and a token of a long clip takes several times as long. Two
ways out:

- `--same-samples`: the order is an epoch of steps x samples-per-rank x ranks samples, the same for all, and every
  policy runs it whole. The bucket policies then also run their partial buckets at its end, and fillers where a rank has
  none left: a price that an epoch of millions of samples does not show.
- `tokens/s on the mix`, in every table: the samples that ran are priced by one law, fitted to all micro-batches of this
  run (of one model, kernels and recompute), their price over ranks x wall seconds is the useful share, and that share
  is turned into tokens/s of the mix as a whole. Over many steps it is tokens/s; over few it is much less noisy.
"""

import os

# As in train.py, whose path this measures.
os.environ.setdefault("TORCHINDUCTOR_MIX_ORDER_REDUCTION", "0")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt

from adaptiveload.kernels.backends import CHOICES, VARIABLE
from adaptiveload.scheduling.cost_file import LAWS
from adaptiveload.scheduling.metrics import load_cv
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.policies import POLICIES
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.training.adaptation import Adaptation
from adaptiveload.training.benchmark_trainers import (
    BenchmarkTrainer,
    DiffusersTrainer,
    OwnTrainer,
    run_plan,
    shapes_of,
)
from adaptiveload.training.config import RunConfig, load_config
from adaptiveload.training.cost import Hardware, device_memory_bytes, resolve_gpu
from adaptiveload.training.distributed import Ranks, finish_ranks, start_ranks
from adaptiveload.training.failures import ending_in_words
from adaptiveload.training.figures import policies_figure
from adaptiveload.training.launcher_settings import follow_launcher
from adaptiveload.training.metrics import StepMeasurement, cost_error
from adaptiveload.training.policy_cases import (
    Case,
    SyntheticSchedule,
    as_planned,
    build_case_schedule,
    mix_of,
    spread_ids,
    steps_to_run,
    synthetic_table,
)
from adaptiveload.training.policy_table import Row, markdown, notes, rate_rows, summarize, title_of
from adaptiveload.training.schedule import resolve_meet

EPOCH_SAMPLES_PER_RANK = 30_000  # as the simulator: the paper's large buckets fill late
AS_IS = "default"  # of --kernels: what the environment says
PEER = Case(DiffusersTrainer.name, "none", "full", "slot", "equal_token")


@dataclass(frozen=True)
class Benchmark:
    """What all rows share.

    Attributes:
        options: The command line.
        config: The run.
        gpu: Whose rates a prior has.
        hardware: What ranks compute on; of a prediction the CPU, which stands for `gpu`.
        world_size: Ranks, real or predicted.
        cases: Rows.
        table: Samples of the mix.
        order: Those that run, in their order.
    """

    options: argparse.Namespace
    config: RunConfig
    gpu: str
    hardware: Hardware
    world_size: int
    cases: list[Case]
    table: SampleTable
    order: EndlessOrder

    @property
    def device_title(self) -> str:
        """What computes, for a reader."""
        return f"{self.gpu}, predicted" if self.options.dry_run else self.hardware.name


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    started = time.monotonic()
    options = parse_arguments(arguments)
    with ending_in_words("benchmark_policies"):
        cost = [f"cost.file={options.cost[0]}"] if options.cost else []
        config = load_config(options.config, [*options.overrides, *cost])
        if options.dry_run:
            if config.cost.gpu == "auto":
                raise ValueError("--dry-run: whose memory and rates? Name the GPU, for example cost.gpu=h200")
            config = follow_launcher(config, os.environ, options.ranks)
            predict(prepare(options, config, options.ranks, Hardware.of(torch.device("cpu"))))
            return
        ranks = start_ranks()
        config = follow_launcher(config, os.environ, ranks.world_size)
        benchmark = prepare(options, config, ranks.world_size, Hardware.of_all(ranks))
        run(benchmark, ranks, started + 60 * options.budget_minutes)
    finish_ranks(ranks)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML of the run whose model, precision and schedule count")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration keys")
    parser.add_argument("--mix", default="configs/mixes/mixed.yaml", help="YAML of shapes and their shares")
    parser.add_argument(
        "--cost",
        nargs="+",
        default=[],
        help="cost files; each row takes the one that was fitted to what is most like it (default: a prior from FLOPs)",
    )
    parser.add_argument("--law", choices=LAWS, default="two_term")
    parser.add_argument("--policies", nargs="*", choices=POLICIES, default=list(reversed(POLICIES)))
    parser.add_argument("--kernels", nargs="+", choices=(AS_IS, *CHOICES), default=[AS_IS], help=f"as {VARIABLE}")
    parser.add_argument("--recompute", nargs="+", help="as schedule.recompute (default: the configuration's)")
    parser.add_argument("--meet", nargs="+", choices=("slot", "step"), help="default: the configuration's")
    parser.add_argument("--peer", action="store_true", help="a row of the plain diffusers trainer, last")
    parser.add_argument("--same-samples", action="store_true", help="all rows run one finite set of samples, whole")
    parser.add_argument("--samples-per-rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each row (default 12)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them that do not count (default 2)")
    parser.add_argument(
        "--budget-minutes",
        type=float,
        default=math.inf,
        help="start-up included; what is left goes evenly to the rows left, which take fewer steps (at least one)",
    )
    parser.add_argument("--scale-b2", type=float, default=1.0, help="make the cost law wrong: b2 (or b) times this")
    parser.add_argument("--adaptive", action="store_true", help="refit while it runs, as training does")
    parser.add_argument("--output", type=Path, required=True, help="folder for policies.json, .md and .png")
    parser.add_argument("--dry-run", action="store_true", help="predict the table, run nothing")
    parser.add_argument("--ranks", type=int, help="with --dry-run: predict for this many ranks")
    options = parser.parse_intermixed_args(arguments)
    if options.dry_run != (options.ranks is not None):
        parser.error("--dry-run and --ranks N go together; a launch has the ranks that it was launched with")
    if options.dry_run and (options.peer or options.adaptive or options.kernels != [AS_IS]):
        parser.error("--dry-run knows one model and what its cost file was fitted to: no --peer, --kernels, --adaptive")
    if options.adaptive and options.same_samples:
        parser.error("--adaptive changes the steps while they run: leave out --same-samples")
    for name, least in (("samples_per_rank", 1), ("steps", 1), ("warmup", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: at least {least}")
    if not options.policies and not options.peer:
        parser.error("nothing to measure: name --policies or --peer")
    return options


def prepare(options: argparse.Namespace, config: RunConfig, world_size: int, hardware: Hardware) -> Benchmark:
    """Rows and samples.

    Raises:
        ValueError: Of a cost, a mix or a number of samples that cannot be.
    """
    cost = replace(config.cost, law=options.law)
    schedule = replace(
        config.schedule,
        samples_per_step=options.samples_per_rank * world_size,
        rank_speed=config.schedule.rank_speed if options.adaptive else "off",
    )
    config = replace(config, cost=cost, schedule=schedule)
    gpu = resolve_gpu(cost, hardware)
    table = synthetic_table(options.mix, EPOCH_SAMPLES_PER_RANK * world_size, config)
    arms = product(
        options.kernels,
        options.recompute or [schedule.recompute],
        options.meet or [resolve_meet(config, gpu, hardware)],
        options.policies,
    )
    cases = [Case(OwnTrainer.name, *arm) for arm in arms] + ([PEER] if options.peer else [])
    order = EndlessOrder(np.arange(len(table)), schedule.seed)
    benchmark = Benchmark(options, config, gpu, hardware, world_size, cases, table, order)
    # A step of the paper's policies is whole slots of full buckets: where one has more samples, all get as many.
    papers = {(c.model, c.recompute, c.meet, c.policy): c for c in cases if c.policy != "balanced"}
    largest = max((round(schedule_of(benchmark, case).samples_per_slot) for case in papers.values()), default=0)
    if largest > schedule.samples_per_step:
        schedule = replace(schedule, samples_per_step=-(-largest // world_size) * world_size)
    if options.same_samples:
        order = EndlessOrder(spread_ids(len(table), options.steps * schedule.samples_per_step), schedule.seed)
    return replace(benchmark, config=replace(config, schedule=schedule), order=order)


def schedule_of(benchmark: Benchmark, case: Case) -> SyntheticSchedule:
    """The steps of a row."""
    config = benchmark.config
    if case.model == DiffusersTrainer.name:  # it shards over all ranks
        config = replace(config, schedule=replace(config.schedule, shard_ranks=0))
    return build_case_schedule(
        case,
        benchmark.table,
        benchmark.order,
        config,
        world_size=benchmark.world_size,
        hardware=benchmark.hardware,
        gpu=benchmark.gpu,
        cost_files=benchmark.options.cost,
        scale_b2=benchmark.options.scale_b2,
    )


def steps_of(schedule: SyntheticSchedule, options: argparse.Namespace) -> list[int]:
    """Steps of a row, the warm-up first."""
    return steps_to_run(schedule, options.steps, options.warmup, is_epoch=options.same_samples)


def predict(benchmark: Benchmark) -> None:
    """Write the table that the models predict."""
    rows: list[Row] = []
    for case in benchmark.cases:
        schedule = schedule_of(benchmark, case)
        plans = [schedule.policy.plan(step) for step in steps_of(schedule, benchmark.options)]
        measurements = [as_planned(plan, schedule) for plan in plans]
        rows.append(vars(case) | figures_of(benchmark, schedule, plans, measurements) | {"is_complete": True})
    write_results(rows, benchmark)
    draw(rows, benchmark)
    print((benchmark.options.output / "policies.md").read_text())


def run(benchmark: Benchmark, ranks: Ranks, end: float) -> None:
    """Measure each row, until the time `end`, and write the table after every step."""
    say(ranks, ranks.describe())
    rows: list[Row] = []
    trainer: BenchmarkTrainer | None = None
    unasked = os.environ.get(VARIABLE, "")
    for number, case in enumerate(benchmark.cases):
        if trainer is None or trainer.name != case.model:
            trainer = None  # the memory of one must not count as the other's
            gc.collect()
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
            kind: Callable[..., BenchmarkTrainer] = OwnTrainer if case.model == OwnTrainer.name else DiffusersTrainer
            trainer = kind(benchmark.config, ranks)
            ranks.take_memory_peak_gib()
        os.environ[VARIABLE] = case.kernels if case.kernels in CHOICES else unasked
        schedule = schedule_of(benchmark, case)
        now = time.monotonic()
        row_end = now + (end - now) / (len(benchmark.cases) - number)
        rows.append({})
        for figures in measure(benchmark, schedule, row_end, ranks, trainer):
            rows[-1] = vars(case) | figures
            if ranks.is_main:  # a command that is cut leaves what it has
                write_results(rows, benchmark)
        if ranks.is_main:
            draw(rows, benchmark)
    if ranks.is_main:
        print((benchmark.options.output / "policies.md").read_text())


def measure(
    benchmark: Benchmark, schedule: SyntheticSchedule, end: float, ranks: Ranks, trainer: BenchmarkTrainer
) -> Iterator[Row]:
    """Figures of one row after each measured step; no step begins that would not end by the time `end`."""
    options, config = benchmark.options, benchmark.config
    adaptation = Adaptation(
        replace(config.cost, adaptive=options.adaptive), schedule, schedule.models.cost, ranks, plans_ahead=0
    )
    steps = steps_of(schedule, benchmark.options)
    began = time.perf_counter()
    all_plans = [schedule.policy.plan(step) for step in steps]
    calls = trainer.warm_up([shapes for plan in all_plans for shapes in shapes_of(plan, schedule.table, ranks.rank)])
    name = schedule.settings.policy
    say(ranks, f"{name}: {calls} attention calls planned in {time.perf_counter() - began:.1f} s")
    plans: list[StepPlan] = []
    measurements: list[StepMeasurement] = []
    for number, step in enumerate(steps):
        # The dearest step so far, the first of all apart: it allocates.
        dearest_s = max((float(measured.step_s.max()) for measured in measurements[1:]), default=0.0)
        if number > options.warmup and ranks.seconds_until(end) < dearest_s:
            done = number - options.warmup
            say(ranks, f"{name}: the budget ends its steps at {done} of {len(steps) - options.warmup}")
            return
        plan = schedule.policy.plan(step)
        measured = run_plan(trainer, plan, schedule.table, ranks, config.optimizer.max_grad_norm)
        for line in adaptation.after_step(plan, measured.busy_s):
            say(ranks, f"  {line}")
        say(
            ranks,
            f"{name} step {number}: {measured.step_s.max():.3f} s, "
            f"{plan.num_slots} slots, CV planned {load_cv(plan.costs_us, plan.meet, plan.replicas):.4f} measured "
            f"{load_cv(measured.busy_s, plan.meet, plan.replicas):.4f}, "
            f"cost error {cost_error(plan, measured.busy_s):.3f}",
        )
        plans.append(plan)
        measurements.append(measured)
        if number >= options.warmup:
            yield figures_of(benchmark, schedule, plans, measurements) | {"is_complete": number == len(steps) - 1}


def figures_of(
    benchmark: Benchmark,
    schedule: SyntheticSchedule,
    plans: Sequence[StepPlan],
    measurements: Sequence[StepMeasurement],
) -> Row:
    """Figures of a row's steps, those of the warm-up apart."""
    settings = schedule.settings
    assert settings.memory_limit_tokens is not None, "resolved"
    figures = summarize(
        plans,
        measurements,
        benchmark.options.warmup,
        schedule.table,
        settings.memory_limit_tokens,
        settings.text_memory_tokens,
        device_memory_bytes(benchmark.gpu, benchmark.hardware),
    )
    figures["cost"] = schedule.models.source
    return figures | {"updates": [update.from_step for update in schedule.history.updates]}


def write_results(rows: list[Row], benchmark: Benchmark) -> None:
    """`policies.json` with everything, `policies.md` with the tables."""
    options, config = benchmark.options, benchmark.config
    options.output.mkdir(parents=True, exist_ok=True)
    rate_rows(rows, mix_of(benchmark.table, config.model, benchmark.device_title), benchmark.world_size)
    about: dict[str, Any] = {
        "world_size": benchmark.world_size,
        "is_predicted": options.dry_run,
        "mix": str(options.mix),
        "memory_limit_tokens": config.schedule.memory_limit_tokens,
        "samples_per_rank": config.schedule.samples_per_step // benchmark.world_size,
        "same_samples": options.same_samples,
        "scale_b2": options.scale_b2,
        "adaptive": options.adaptive,
        "device": benchmark.device_title,
        "torch": torch.__version__,
    }
    (options.output / "policies.json").write_text(json.dumps({**about, "policies": rows}, indent=1))
    meets = " and ".join(dict.fromkeys(row["meet"] for row in rows))
    head = (
        f"{benchmark.world_size} x {about['device']}, {Path(options.mix).stem}, "
        f"{about['samples_per_rank']} samples a rank, {about['memory_limit_tokens'] or 'fitted'} tokens, "
        f"ranks meet every {meets}, {'the same samples for all' if options.same_samples else 'each its own samples'}"
    )
    text = markdown(head, rows) + notes(rows, same_samples=options.same_samples)
    if options.adaptive:
        text += "\nMedian error of a micro-batch's planned time, step by step:\n\n"
        for row in rows:
            text += f"- {title_of(row)}: {' '.join(f'{error:.3f}' for error in row['cost_error_by_step'])}\n"
    (options.output / "policies.md").write_text(text)


def draw(rows: list[Row], benchmark: Benchmark) -> None:
    """`policies.png`: what each rank did in the steps of every row."""
    titles = [
        f"{title_of(row)}: {row['tokens_per_s_on_mix']:,.0f} tokens/s on the mix, idle {row['idle_share']:.3f}"
        for row in rows
    ]
    figure = policies_figure(rows, titles)
    figure.savefig(benchmark.options.output / "policies.png", dpi=100)
    plt.close(figure)


def say(ranks: Ranks, text: str) -> None:
    """Print on rank 0."""
    if ranks.is_main:
        print(text, flush=True)


if __name__ == "__main__":
    main()
