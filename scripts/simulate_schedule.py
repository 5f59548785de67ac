"""Simulate the scheduling policies on an index or a shape mix, with the code that trains; needs no GPU.

python -m scripts.simulate_schedule --mix configs/mixes/mixed.yaml --world-size 8 64 --memory-limit-tokens 52800 105600
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from adaptiveload.scheduling.balanced import enough_samples_per_step
from adaptiveload.scheduling.cost import GPU_TFLOPS, CostModel, analytic_prior
from adaptiveload.scheduling.cost_file import LAWS, CostFile
from adaptiveload.scheduling.flops import MODELS
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.policies import POLICIES, ScheduleConfig
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.simulation import Row, Simulation

COSTS = Path(__file__).resolve().parents[1] / "configs" / "costs"
# Samples a rank that a mix's data set holds. The paper's buckets need many: one of short images, at 440 a batch and 4 %
# of the samples, fills for the first time after 12,000.
EPOCH_SAMPLES_PER_RANK = 30_000


def main(arguments: list[str] | None = None) -> None:
    """Print a table of every policy, meeting scope, memory limit and world size; write JSON and pictures if asked."""
    args = parse_arguments(arguments)
    try:
        rows = simulate_all(args)
    except ValueError as error:
        sys.exit(f"simulate_schedule: {error}")
    print(format_table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    if args.figures:
        from adaptiveload.training.schedule_figures import write_simulation_figures

        for path in write_simulation_figures(rows, args.figures):
            print(f"picture: {path}")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Simulate the scheduling policies on an index or a shape mix.")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--mix", default="configs/mixes/mixed.yaml", help="YAML of shapes and their shares")
    data.add_argument("--index", type=Path, help="dataset folder with an index, instead of a mix")
    cost = parser.add_mutually_exclusive_group()
    cost.add_argument("--cost", default="wan_1_3b", help="file under configs/costs without .yaml, or a path")
    cost.add_argument("--gpu", choices=GPU_TFLOPS, help="price by FLOPs on this GPU instead of a cost file")
    parser.add_argument("--model", choices=MODELS, default="wan_1_3b", help="with --gpu: whose FLOPs")
    parser.add_argument("--recompute", choices=("none", "full"), default="full", help="with --gpu")
    parser.add_argument("--law", choices=LAWS, default="two_term", help="which law of the cost file")
    parser.add_argument("--cost-exponent", type=float, help="the paper's p; default: that of the cost file")
    parser.add_argument("--world-size", type=int, nargs="+", default=[16], metavar="N")
    parser.add_argument("--memory-limit-tokens", type=int, nargs="+", default=[105_600], metavar="M")
    parser.add_argument("--meet", nargs="+", choices=("slot", "step"), default=["slot"], help="where ranks wait")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(reversed(POLICIES)))
    parser.add_argument("--samples-per-rank", type=int, default=28, help="global batch over ranks (default 28)")
    parser.add_argument(
        "--lookahead",
        default="auto",
        help="samples of a length that `balanced` draws together (default auto; of a run 1)",
    )
    parser.add_argument(
        "--pairs", action="store_true", help="simulate `balanced` beside each paper policy at its samples a step"
    )
    parser.add_argument("--steps", type=int, default=24, help="steps to plan, spread over an epoch (default 24)")
    parser.add_argument("--noise", type=float, default=0.0, help="relative noise of a micro-batch's time, such as 0.03")
    parser.add_argument("--slow-rank", type=float, default=1.0, metavar="SPEED", help="speed of rank 0, such as 0.7")
    parser.add_argument("--unknown-speed", action="store_true", help="the planner has not been told of the slow rank")
    parser.add_argument("--epoch-samples-per-rank", type=int, default=EPOCH_SAMPLES_PER_RANK, help="with --mix")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw slots by rank and CV against world size")
    return parser.parse_args(arguments)


def simulate_all(args: argparse.Namespace) -> list[Row]:
    """A row for each combination of options; those of one data set and limit are relative to its first policy."""
    cost_model, exponent = read_cost(args)
    rows: list[Row] = []
    for ranks in args.world_size:
        joins = bool(args.gpu) and MODELS[args.model].text_joins
        table = replace(read_table(args, ranks), text_joins=joins)
        order = EndlessOrder(np.arange(len(table)), args.seed)
        costs = cost_model.sample_us(table.computed_tokens(), table.text_len)
        for limit in args.memory_limit_tokens:
            for meet in args.meet:
                simulation = Simulation(
                    table,
                    order,
                    cost_model,
                    ranks,
                    meet,
                    args.steps,
                    args.noise,
                    args.slow_rank,
                    not args.unknown_speed,
                )
                config = ScheduleConfig(
                    samples_per_step=ranks * args.samples_per_rank,
                    memory_limit_tokens=limit,
                    cost_exponent=exponent,
                    lookahead=args.lookahead,
                    seed=args.seed,
                )
                group = simulate_policies(simulation, config, args)
                for row in group:
                    row["tokens_per_s_relative"] = row["tokens_per_s"] / group[0]["tokens_per_s"]
                rows += group
        enough = enough_samples_per_step(costs, ranks)
        if enough > ranks * args.samples_per_rank:
            print(
                f"{ranks} ranks: level work needs {enough} samples a step ({enough / ranks:.0f} a rank), or a lookahead"
            )
    return rows


def simulate_policies(simulation: Simulation, config: ScheduleConfig, args: argparse.Namespace) -> list[Row]:
    """Rows of the policies at equal mean samples per optimizer step.

    A paper's policy runs whole slots of full buckets. Where a single slot has more samples than asked for, all policies
    get as many as the largest of those.
    """
    papers = [replace(config, policy=name) for name in args.policies if name != "balanced"]
    least = max([round(simulation.mean_samples_per_slot(paper)) for paper in papers], default=0)
    if least > config.samples_per_step:
        print(
            f"{simulation.ranks} ranks, {config.memory_limit_tokens} tokens: a slot of full buckets has {least} samples"
        )
        config = replace(config, samples_per_step=least)
    rows: list[Row] = []
    for name in args.policies:
        if name == "balanced" and args.pairs:
            continue
        row, plans = simulation.run(replace(config, policy=name))
        rows.append(_with_picture(row, plans[0], args))
        if name != "balanced" and args.pairs:
            same = max(round(row["samples_per_step"]), simulation.ranks)
            row, plans = simulation.run(replace(config, policy="balanced", samples_per_step=same))
            rows.append(_with_picture({**row, "beside": name}, plans[0], args))
    return rows


def _with_picture(row: Row, plan: object, args: argparse.Namespace) -> Row:
    if args.figures:
        row["slots_us"] = plan.costs_us.tolist()  # type: ignore[attr-defined]
    return row


def read_cost(args: argparse.Namespace) -> tuple[CostModel, float | None]:
    """Cost model, and the exponent of the paper's law if it is known."""
    if args.gpu:
        return analytic_prior(MODELS[args.model], args.gpu, args.recompute), args.cost_exponent
    path = Path(args.cost) if args.cost.endswith((".yaml", ".yml")) else COSTS / f"{args.cost}.yaml"
    file = CostFile.read(path)
    exponent = args.cost_exponent or (file.power.exponent if file.power else None)
    return file.law(args.law), exponent


def read_table(args: argparse.Namespace, ranks: int) -> SampleTable:
    """Samples of the index, or of a mix large enough for `ranks`."""
    if args.index is None:
        if not Path(args.mix).is_file():
            raise ValueError(f"--mix {args.mix}: no such file")
        return SampleTable.from_mix(args.mix, ranks * args.epoch_samples_per_rank, args.seed)
    from adaptiveload.data.index import ShardIndex

    index = ShardIndex.read(args.index)
    return index.sample_table(index.info.geometry)


def format_table(rows: list[Row]) -> str:
    """Rows as aligned text."""
    head = (
        f"{'policy':<17}{'meet':<6}{'ranks':>6}{'limit':>9}{'load CV':>9}{'idle':>8}{'tokens/s':>13}{'rel.':>7}"
        f"{'step mean':>12}{'5 %':>12}{'least':>12}{'samples':>9}{'slots':>7}{'look':>6}{'steps':>8}"
        f"{'headroom':>10}{'over':>6}{'lost':>6}{'twice':>6}{'plan ms':>9}"
    )
    lines = [head]
    for row in rows:
        name = row["policy"] + ("" if row.get("beside") is None else f" ({row['beside'][:5]})")
        lines.append(
            f"{name:<17}{row['meet']:<6}{row['world_size']:>6}{row['memory_limit_tokens']:>9}{row['load_cv']:>9.4f}"
            f"{row['idle_share']:>8.4f}{row['tokens_per_s']:>13,.0f}{row['tokens_per_s_relative']:>7.2f}"
            f"{row['tokens_per_s_step_mean']:>12,.0f}{row['tokens_per_s_step_p5']:>12,.0f}"
            f"{row['tokens_per_s_step_min']:>12,.0f}{row['samples_per_step']:>9.1f}{row['slots_per_step']:>7.2f}"
            f"{row['lookahead']:>6}"
            f"{row['steps_per_epoch']:>8}{row['memory_headroom']:>10.1%}{row['oversize']:>6}{row['lost']:>6}"
            f"{row['repeated']:>6}{row['planner_ms']:>9.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
