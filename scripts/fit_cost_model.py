"""Fit cost and memory models to a shape benchmark, and write them as YAML with a picture beside it.

python -m scripts.fit_cost_model measurements.parquet --output configs/costs/my_cluster.yaml
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from adaptiveload.scheduling.buckets import Buckets
from adaptiveload.scheduling.cost import PowerCost, TwoTermCost
from adaptiveload.scheduling.cost_file import CostFile
from adaptiveload.scheduling.fit import (
    Points,
    fit_memory,
    fit_power,
    fit_two_term,
    held_out_errors,
    points_of,
    relative_errors,
)
from adaptiveload.scheduling.memory import SAFE_SHARE, MemoryModel
from adaptiveload.scheduling.samples import SampleTable

# Columns by name, in order of preference. A CSV from elsewhere calls the tokens of one sample `tokens`.
NAMES = {
    "batch_size": ("batch_size", "batch", "B"),
    "seq_len": ("seq_len", "tokens", "S"),
    "repeat": ("repeat", "rep"),
    "seconds": ("busy_s", "seconds", "time_s"),
    "milliseconds": ("milliseconds", "busy_ms", "ms"),
}


def main(arguments: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    args = parse_arguments(arguments)
    try:
        table = read_measurements(args.measurements)
        provenance = read_provenance(table)
        columns = to_columns(table, args.recompute)
        file, points = fit_all(columns, provenance, args)
    except ValueError as error:
        sys.exit(f"fit_cost_model: {args.measurements}: {error}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    file.write(args.output, f"Fitted by scripts.fit_cost_model to {args.measurements.name}.")
    print(f"wrote {args.output}")
    if not args.no_picture:
        from adaptiveload.training.schedule_figures import fit_figure

        picture = args.output.with_suffix(".png")
        fit_figure(points, file.two_term, file.power).savefig(picture, dpi=110)
        print(f"wrote {picture}")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Fit cost and memory models to a shape benchmark.")
    parser.add_argument("measurements", type=Path, help="parquet of benchmark_shapes, or a CSV")
    parser.add_argument("--output", type=Path, required=True, help="YAML file; the picture goes beside it")
    parser.add_argument("--recompute", help="which recompute level of the file (default: its first)")
    parser.add_argument("--mix", type=Path, help="mix for the M_comp curve (default: measured lengths, evenly)")
    parser.add_argument("--memory-limit-tokens", type=int, help="for the curve (default: what fits)")
    parser.add_argument("--ranks", type=int, default=64, help="for the curve (default 64)")
    parser.add_argument("--no-picture", action="store_true")
    return parser.parse_args(arguments)


def read_measurements(path: Path) -> pa.Table:
    """Rows of a parquet or CSV file."""
    if not path.is_file():
        raise ValueError("no such file")
    try:
        return pq.read_table(path) if path.suffix == ".parquet" else pyarrow.csv.read_csv(path)
    except pa.ArrowException as error:
        raise ValueError(f"cannot be read: {error}") from error


def read_provenance(table: pa.Table) -> dict[str, Any]:
    """What scripts.benchmark_shapes says of GPU, model, layout and versions; empty for a CSV."""
    metadata = table.schema.metadata or {}
    return json.loads(metadata[b"provenance"]) if b"provenance" in metadata else {}


def to_columns(table: pa.Table, recompute: str | None) -> dict[str, Any]:
    """Columns by our names, of one recompute level, seconds in seconds."""
    if "recompute" in table.column_names:
        levels = table["recompute"].to_pylist()
        recompute = recompute or levels[0]
        if recompute not in levels:
            raise ValueError(f"no rows with recompute {recompute!r}; it has {', '.join(sorted(set(levels)))}")
        table = table.filter(pa.array([level == recompute for level in levels]))
    columns: dict[str, Any] = {"recompute": recompute}
    for name, known in NAMES.items():
        present = next((alias for alias in known if alias in table.column_names), None)
        if present is not None:
            values = table[present].to_numpy(zero_copy_only=False).astype(np.float64)
            columns["seconds" if name == "milliseconds" else name] = values / (1e3 if name == "milliseconds" else 1)
    for name in ("batch_size", "seq_len", "seconds"):
        if name not in columns:
            raise ValueError(f"no column for {name}: call it {' or '.join(NAMES[name])}")
    columns.setdefault("repeat", np.ones(len(columns["seconds"])))
    if "reserved_bytes" in table.column_names:
        columns["reserved_bytes"] = table["reserved_bytes"].to_numpy(zero_copy_only=False).astype(np.float64)
    return columns


def fit_all(columns: dict[str, Any], provenance: dict[str, Any], args: argparse.Namespace) -> tuple[CostFile, Points]:
    """Both laws and the memory model, printed as they are fitted."""
    points = points_of(columns["batch_size"], columns["seq_len"], columns["repeat"], columns["seconds"])
    print(
        f"{points.num_rows} rows, {len(points)} points of {len(np.unique(points.seq_len))} lengths; "
        f"{points.num_first} first runs dropped, {points.num_outliers} outliers thrown out"
    )
    correlation = points.correlations
    print(f"Pearson R of time with tokens {correlation[0]:.2f}, with S^2 {correlation[1]:.2f} (the paper: .35 and .92)")
    two_term, power = fit_two_term(points), fit_power(points)
    floor_s = two_term.cost.launch_floor_us / 1e6 or float(points.seconds.min())
    above = points.seconds > 2 * floor_s
    summary: dict[str, Any] = {
        "num_rows": points.num_rows,
        "num_points": len(points),
        "num_first_dropped": points.num_first,
        "num_outliers": points.num_outliers,
        "pearson_r_tokens": round(correlation[0], 3),
        "pearson_r_squares": round(correlation[1], 3),
        "two_term": describe_law(points, two_term.cost, above, lambda p: fit_two_term(p).cost),
        "power": describe_law(points, power.cost, above, lambda p: fit_power(p).cost),
    }
    summary["two_term"]["standard_errors"] = {k: float(f"{v:.4g}") for k, v in two_term.standard_errors.items()}
    summary["power"]["exponent_interval"] = [round(edge, 4) for edge in power.exponent_interval]
    for name, cost, notes in (("two_term", two_term.cost, two_term.notes), ("power", power.cost, power.notes)):
        print(f"{name:>9}: " + ", ".join(f"{key} {value:.6g}" for key, value in vars(cost).items()))
        print("           " + ", ".join(f"{key} {value}" for key, value in summary[name].items()))
        for note in notes:
            print(f"           note: {note}")
        summary[name]["notes"] = list(notes)
    memory = fit_memory_model(columns, provenance, summary)
    print_curve(points, two_term.cost, power.cost, memory, provenance, summary, args)
    layout = {**provenance.get("layout", {})}
    if columns["recompute"] is not None:
        layout["recompute"] = columns["recompute"]
    known = {key: provenance[key] for key in ("gpu", "model", "versions") if key in provenance}
    if "gpu_memory_bytes" in provenance:
        summary["gpu_memory_bytes"] = provenance["gpu_memory_bytes"]
    return CostFile(two_term.cost, power.cost, memory, layout=layout, fit=summary, **known), points


def describe_law(points: Points, cost: TwoTermCost | PowerCost, above: np.ndarray, fit: Any) -> dict[str, Any]:
    """Errors of a law: in the fit, and of each length when its points were left out; launch-bound points apart."""
    errors, held_out = np.abs(relative_errors(points, cost)), np.abs(held_out_errors(points, fit))

    def worst(values: np.ndarray) -> float:
        known = values[~np.isnan(values)]
        return round(float(known.max()), 4) if len(known) else float("nan")

    return {
        "median_error": round(float(np.median(errors)), 4),
        "worst_error": worst(errors),
        "worst_error_above_twice_floor": worst(errors[above]),
        "worst_held_out_error": worst(held_out),
        "worst_held_out_error_above_twice_floor": worst(held_out[above]),
    }


def fit_memory_model(
    columns: dict[str, Any], provenance: dict[str, Any], summary: dict[str, Any]
) -> MemoryModel | None:
    """Memory model of reserved bytes, if they were measured; its held-out error by length."""
    reserved = columns.get("reserved_bytes")
    if reserved is None or not (known := np.isfinite(reserved) & (reserved > 0)).any():
        print("   memory: not measured")
        return None
    batch, length, peaks = columns["batch_size"][known], columns["seq_len"][known], reserved[known]
    try:
        model = fit_memory(batch, length, peaks)
    except ValueError as error:
        print(f"   memory: {error}")
        return None

    def error_of(fitted: MemoryModel, rows: np.ndarray) -> float:
        predicted = [
            fitted.micro_batch_bytes(int(b * s), int(b)) for b, s in zip(batch[rows], length[rows], strict=True)
        ]
        # A small micro-batch hides under the optimizer's own peak, the least that was measured.
        return float(np.abs(np.maximum(predicted, peaks.min()) / peaks[rows] - 1).max())

    held_out = []
    for held in np.unique(length):
        rest = length != held
        try:
            held_out.append(error_of(fit_memory(batch[rest], length[rest], peaks[rest]), ~rest))
        except ValueError:
            continue
    summary["memory"] = {
        "worst_error": round(error_of(model, np.ones(len(peaks), bool)), 4),
        "worst_held_out_error": round(max(held_out), 4) if held_out else None,
    }
    print(
        f"   memory: {model.static_bytes / 2**30:.2f} GiB + {model.token_bytes / 1e3:.1f} KB a token + "
        f"{model.sample_bytes / 1e6:.2f} MB a sample, {summary['memory']}"
    )
    if provenance and not provenance.get("averages"):
        print("   note: measured without averages (ema), 4 bytes a trained parameter over the ranks: set")
        print("   schedule.memory_limit_tokens below what follows from it, or scan again")
    return model


def print_curve(
    points: Points,
    cost: TwoTermCost,
    power: PowerCost,
    memory: MemoryModel | None,
    provenance: dict[str, Any],
    summary: dict[str, Any],
    args: argparse.Namespace,
) -> None:
    """M_comp of the paper's policy: simulated tokens/s and load CV at each factor of S_max ** p, and the best."""
    if args.mix is not None:
        table = SampleTable.from_mix(args.mix, 20_000, 0)
        lengths, counts = table.shape_tokens, np.bincount(table.shape_ids)
    else:
        lengths = np.unique(points.seq_len)
        counts = np.full(len(lengths), 100)
        table = SampleTable.of_lengths(lengths, counts)
    limit = args.memory_limit_tokens
    if limit is None and memory is not None and "gpu_memory_bytes" in provenance:
        limit = memory.max_tokens(provenance["gpu_memory_bytes"])
        print(
            f"memory limit: {limit} tokens fit in {SAFE_SHARE:.0%} of {provenance['gpu_memory_bytes'] / 2**30:.0f} GiB"
        )
        summary["memory_limit_tokens"] = limit
    limit = max(limit or 2 * int(lengths.max()), int(lengths.max()))
    buckets = Buckets(table, counts, limit, 0, 1024, power.exponent)
    curve = buckets.curve(cost, args.ranks, 4, "slot")
    best = buckets.best_factor(cost, args.ranks, 4, "slot")
    print(f"M_comp = f * S_max^{power.exponent:.3f} at {limit} tokens on {args.ranks} ranks: tokens/s a rank (load CV)")
    for factor, (rate, load_cv) in curve.items():
        print(f"  f {factor:<5g} {rate:>12,.1f} ({load_cv:.3f}){'  <- best' if factor == best else ''}")
    summary["compute_limit"] = {
        "factor": best,
        "curve": {str(factor): [round(rate, 2), round(cv, 4)] for factor, (rate, cv) in curve.items()},
    }


if __name__ == "__main__":
    main()
