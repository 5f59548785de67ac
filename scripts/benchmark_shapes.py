"""Measure micro-batches of many shapes on the path that trains; scripts.fit_cost_model makes models of the result.

accelerate launch --config_file configs/accelerate/1node.yaml --num_processes 8 -m scripts.benchmark_shapes \
    configs/wan_1_3b.yaml --output measurements.parquet --budget-minutes 8
"""

import os

# As in train.py, whose path this measures.
os.environ.setdefault("TORCHINDUCTOR_MIX_ORDER_REDUCTION", "0")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from adaptiveload.models.config import RECOMPUTE_LEVELS
from adaptiveload.scheduling.cost import TwoTermCost, analytic_prior
from adaptiveload.scheduling.fit import fit_memory, points_of
from adaptiveload.scheduling.memory import SAFE_SHARE, MemoryModel
from adaptiveload.scheduling.shapes import LatentGeometry, Shape
from adaptiveload.training.config import RunConfig, load_config
from adaptiveload.training.cost import Hardware, device_memory_bytes, model_dims, provenance, resolve_gpu
from adaptiveload.training.distributed import Ranks, clip_gradients, finish_ranks, reshard, start_ranks
from adaptiveload.training.ema import Ema
from adaptiveload.training.failures import ending_in_words
from adaptiveload.training.launcher_settings import follow_launcher
from adaptiveload.training.live_step import build_model, run_micro_batch
from adaptiveload.training.schedule import model_geometry, resolve_meet
from adaptiveload.training.synthetic import synthetic_batch

# Lengths that spread tokens and tokens squared. The three shortest alone tell the term per sample and the three longest
# the one per token squared, so each of them can be held out.
SHAPES = (
    Shape(1, 256, 256),
    Shape(1, 256, 384),
    Shape(1, 256, 512),
    Shape(1, 512, 512),
    Shape(17, 240, 416),
    Shape(49, 240, 416),
    Shape(17, 480, 832),
    Shape(33, 480, 832),
    Shape(49, 480, 832),
    Shape(81, 480, 832),
    Shape(49, 720, 1280),
    Shape(53, 720, 1280),
)
# Shares of the most tokens of a micro-batch at which each length is measured, besides one sample: two totals tell the
# fixed time from the time per token without help of other lengths.
TOKEN_SHARES = (0.25, 0.5)
FULL_EVERY = 3  # every third length of those below the least share is measured at all of them, for the memory model
# A micro-batch above LONG_S is repeated once less; one below SHORT_S twice as often, because launches scatter.
SHORT_S, LONG_S = 0.5, 3.0
UNKNOWN_GROWTH = 4  # until a memory model is there, a micro-batch has at most so many times the tokens of the last


@dataclass(frozen=True)
class Point:
    """`batch_size` samples of `shape`."""

    batch_size: int
    shape: Shape
    seq_len: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.batch_size * self.seq_len

    def price_s(self, cost: TwoTermCost) -> float:
        """Seconds by `cost`."""
        per_sample = cost.sample_us(np.array([self.seq_len]), np.array([0]))
        return float(cost.micro_batch_us(per_sample * self.batch_size)[0]) / 1e6


@dataclass
class Scan:
    """One recompute level's scan.

    Attributes:
        config, ranks, geometry: Of the run that is measured.
        meet: "slot" or "step".
        cost: Prior that orders points and shares out the budget.
        rows: Measurements so far, of all levels.
    """

    config: RunConfig
    ranks: Ranks
    geometry: LatentGeometry
    meet: str
    cost: TwoTermCost
    rows: list[dict[str, Any]] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    started = time.monotonic()
    options = parse_arguments(arguments)
    with ending_in_words("benchmark_shapes"):
        config = load_config(options.config, options.overrides)
        ranks = start_ranks()
        config = follow_launcher(config, os.environ, ranks.world_size)
        run(options, config, ranks, started)
    finish_ranks(ranks)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Measure micro-batches of many shapes on the path that trains.")
    parser.add_argument("config", help="YAML of the run whose model, precision and layout count")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration keys")
    parser.add_argument("--output", type=Path, required=True, help="parquet; an unfinished one is gone on with")
    parser.add_argument("--shapes", nargs="+", type=parse_shape, help="FRAMESxHEIGHTxWIDTH (default: chosen)")
    parser.add_argument("--points", nargs="+", help="BATCHxFRAMESxHEIGHTxWIDTH, instead of --shapes")
    parser.add_argument("--max-tokens", type=int, default=105_600, help="most tokens of a micro-batch")
    parser.add_argument("--max-seq-len", type=int, default=52_800, help="most tokens of a sample")
    parser.add_argument("--recompute", nargs="+", choices=RECOMPUTE_LEVELS, help="default: the configuration's")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of a point after the first (default 3)")
    parser.add_argument("--budget-minutes", type=float, default=20.0, help="start-up included (default 20)")
    return parser.parse_intermixed_args(arguments)


def parse_shape(text: str) -> Shape:
    """`17x480x832` as a shape."""
    try:
        frames, height, width = (int(part) for part in text.split("x"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not FRAMESxHEIGHTxWIDTH") from error
    return Shape(frames, height, width)


def run(options: argparse.Namespace, config: RunConfig, ranks: Ranks, started: float) -> None:
    """Scan each recompute level and write what was measured, after every point."""
    hardware = Hardware.of_all(ranks)
    gpu, geometry = resolve_gpu(config.cost, hardware), model_geometry(config.model)
    meet = resolve_meet(config, gpu, hardware)
    about = provenance(config, gpu, hardware, meet, ranks.world_size)
    about |= {"gpu_memory_bytes": device_memory_bytes(gpu, hardware), "averages": True}
    say(ranks, ranks.describe())
    if ranks.device.type != "cuda":
        say(ranks, "no GPU: memory cannot be measured and its columns stay empty; this wants a GPU")
    rows = read_rows(options.output, about)
    # "auto" plans with what was measured without recompute.
    levels = options.recompute or [config.schedule.recompute.replace("auto", "none")]
    model, timer, optimizer = build_model(config, ranks)
    ema = Ema(model, config.ema)  # as in training, its memory counts
    allocate_moments(optimizer)
    end = started + options.budget_minutes * 60
    for number, level in enumerate(levels):
        scan = Scan(config, ranks, geometry, meet, analytic_prior(model_dims(config.model), gpu, level), rows)
        joined = config.model.text_len if model_dims(config.model).text_joins else 0
        points = choose_points(options, geometry, scan.cost, joined)
        done = {(row["batch_size"], row["shape"]) for row in rows if row["recompute"] == level}
        todo = [point for point in points if (point.batch_size, str(point.shape)) not in done]
        if len(todo) < len(points):
            say(ranks, f"{options.output}: {len(points) - len(todo)} points are there already")
        share = (end - time.monotonic()) / (len(levels) - number)
        measure_all(scan, todo, level, time.monotonic() + share, options, about, model, timer, optimizer, ema)
    if not rows:
        raise ValueError("the budget was too small for a single point")
    print_correlation(ranks, rows)


def allocate_moments(optimizer: torch.optim.Optimizer) -> None:
    """Take a step of zero gradients: AdamW's moments must be there before memory is first measured."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def choose_points(
    options: argparse.Namespace, geometry: LatentGeometry, cost: TwoTermCost, joined_text: int = 0
) -> list[Point]:
    """Points to measure, cheapest first; `joined_text` rows of every sample are tokens of its sequence."""
    if options.points:
        parsed = [text.split("x", 1) for text in options.points]
        pairs = [(int(size), parse_shape(shape)) for size, shape in parsed]
    else:
        lengths = [s for s in options.shapes or SHAPES if geometry.num_tokens(s) <= options.max_seq_len]
        pairs = []
        for number, shape in enumerate(lengths):
            tokens = geometry.num_tokens(shape) + joined_text
            is_full = number % FULL_EVERY == 0 and tokens < TOKEN_SHARES[0] * options.max_tokens
            shares = (*TOKEN_SHARES, 1.0) if is_full else TOKEN_SHARES
            sizes = {1} | {int(share * options.max_tokens) // tokens for share in shares}
            pairs += [(size, shape) for size in sizes if size]
    points = [Point(size, shape, geometry.num_tokens(shape) + joined_text) for size, shape in pairs]
    if not points:
        raise ValueError("no shape is short enough: raise --max-seq-len or --max-tokens")
    return sorted(points, key=lambda point: (point.price_s(cost), point.num_tokens))


def measure_all(
    scan: Scan,
    points: list[Point],
    level: str,
    end: float,
    options: argparse.Namespace,
    about: dict[str, object],
    *parts: Any,
) -> None:
    """Measure `points` until the time `end`; each is skipped that would not fit in memory or time."""
    ranks, capacity = scan.ranks, int(about["gpu_memory_bytes"])  # type: ignore[call-overload]
    largest, extra_s = 0, []  # what a point takes beyond the prior's price: launches, plans of kernels, optimizer
    while points:
        left = ranks.seconds_until(end)
        affordable = thin(points, left, float(np.median(extra_s)) if extra_s else 0.0, scan.cost, options.repeats)
        if not affordable:
            say(ranks, f"the budget is used up; {len(points)} points were left out")
            return
        point = affordable[0]
        points.remove(point)
        if (reason := too_large(point, scan.rows, level, capacity, largest)) is not None:
            say(ranks, f"{point.batch_size:>5} x {point.shape!s:<14} skipped: {reason}")
            continue
        rows = measure(scan, point, level, options.repeats, *parts)
        scan.rows += rows
        largest = max(largest, point.num_tokens)
        busy, step = (float(np.median([row[name] for row in rows if row["repeat"]])) for name in ("busy_s", "step_s"))
        extra_s.append(step - point.price_s(scan.cost) * num_runs(point, scan.cost, options.repeats))
        if ranks.is_main:
            write_rows(options.output, scan.rows, about)
        peak = max(row["reserved_bytes"] or 0 for row in rows) / 2**30
        memory = f"{peak:7.2f} GiB reserved" if peak else "memory not measured"
        say(
            ranks,
            f"{point.batch_size:>5} x {point.shape!s:<14} {point.num_tokens:>7} tokens, recompute {level}: "
            f"{busy:8.4f} s busy, {memory}; {len(affordable) - 1} points, {max(left, 0) / 60:.1f} min left",
        )


def thin(points: list[Point], left_s: float, extra_s: float, cost: TwoTermCost, repeats: int) -> list[Point]:
    """`points` without the dearest of those whose length has another point, until the rest fits in `left_s`.

    A point takes its runs' price by the prior and `extra_s` besides. Adding, not scaling: the first points are short
    and almost all overhead, and would make the long ones look out of reach.
    """

    def price(point: Point) -> float:
        return extra_s + point.price_s(cost) * num_runs(point, cost, repeats)

    points = list(points)
    while points and sum(price(point) for point in points) > left_s:
        lengths = [point.seq_len for point in points]
        spare = [point for point in points if lengths.count(point.seq_len) > 1] or points
        points.remove(max(spare, key=price))
    return points


def num_runs(point: Point, cost: TwoTermCost, repeats: int) -> int:
    """Runs of a point: the first, which does not count, and its repeats."""
    seconds = point.price_s(cost)
    if seconds < SHORT_S:
        return 1 + 2 * repeats
    return 1 + (repeats if seconds < LONG_S else max(repeats - 1, 1))


def too_large(point: Point, rows: list[dict[str, Any]], level: str, capacity: int, largest: int) -> str | None:
    """Why `point` may not fit in memory, or None. The model is fitted anew to what was measured so far."""
    known = [row for row in rows if row["recompute"] == level and row["reserved_bytes"]]
    try:
        columns = ([row[name] for row in known] for name in ("batch_size", "seq_len", "reserved_bytes"))
        model: MemoryModel | None = fit_memory(*columns)
    except ValueError:
        model = None
    if model is None:
        if known and largest and point.num_tokens > UNKNOWN_GROWTH * largest:
            return f"more than {UNKNOWN_GROWTH} times the largest so far, and memory is not known yet"
        return None
    predicted = model.micro_batch_bytes(point.num_tokens, point.batch_size)
    if predicted <= SAFE_SHARE * capacity:
        return None
    return f"{predicted / 2**30:.1f} GiB predicted, over {SAFE_SHARE:.0%} of {capacity / 2**30:.1f} GiB"


def measure(scan: Scan, point: Point, level: str, repeats: int, *parts: Any) -> list[dict[str, Any]]:
    """Rows of one point: every run on every rank, the first included as repeat 0.

    All runs are micro-batches of one optimizer step, as in training: the gradients of the first are there while the
    later ones run, so the peak is that of a step, and what a step costs besides is paid once.
    """
    model, timer, optimizer, ema = parts
    ranks, on_gpu = scan.ranks, scan.ranks.device.type == "cuda"
    batch = synthetic_batch([point.shape] * point.batch_size, scan.geometry, scan.config.model, ranks.device)
    if on_gpu:
        torch.cuda.empty_cache()  # reserved memory is then this point's, and not what made its batch
        torch.cuda.reset_peak_memory_stats(ranks.device)
    num = num_runs(point, scan.cost, repeats)
    timer.start_step()
    began = time.perf_counter()
    for run_number in range(num):
        scale, is_last = 1 / (num * point.batch_size), run_number == num - 1
        run_micro_batch(model, timer, batch, scale=scale, meet=scan.meet, is_last=is_last, recompute=level)
    reshard(model)
    clip_gradients(optimizer, scan.config.optimizer.max_grad_norm)
    optimizer.step()
    ema.update(0)
    optimizer.zero_grad(set_to_none=True)
    busy_s = timer.busy_s()
    step_s = time.perf_counter() - began
    peaks = [0.0, 0.0]
    if on_gpu:
        peaks = [torch.cuda.max_memory_allocated(ranks.device), torch.cuda.max_memory_reserved(ranks.device)]
    table = torch.tensor([[busy, step_s, *peaks] for busy in busy_s], dtype=torch.float64)
    return [
        {
            "frames": point.shape.frames,
            "height": point.shape.height,
            "width": point.shape.width,
            "shape": str(point.shape),
            "batch_size": point.batch_size,
            "seq_len": point.seq_len,
            "text_len": scan.config.model.text_len,
            "recompute": level,
            "rank": rank,
            "repeat": repeat,
            "busy_s": busy,
            "step_s": step,
            "allocated_bytes": int(allocated) or None,
            "reserved_bytes": int(reserved) or None,
        }
        for rank, of_rank in enumerate(ranks.gather(table).tolist())
        for repeat, (busy, step, allocated, reserved) in enumerate(of_rank)
    ]


_SCHEMA = pa.schema(
    [(name, pa.int32()) for name in ("frames", "height", "width")]
    + [("shape", pa.string()), ("batch_size", pa.int64()), ("seq_len", pa.int64()), ("text_len", pa.int32())]
    + [("recompute", pa.string()), ("rank", pa.int32()), ("repeat", pa.int32())]
    + [("busy_s", pa.float64()), ("step_s", pa.float64())]
    + [("allocated_bytes", pa.int64()), ("reserved_bytes", pa.int64())]
)


def write_rows(path: Path, rows: list[dict[str, Any]], about: dict[str, object]) -> None:
    """Write all rows, so that a scan that is cut loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = _SCHEMA.with_metadata({"provenance": json.dumps(about)})
    temporary = path.with_suffix(".tmp")
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), temporary)
    temporary.replace(path)


def read_rows(path: Path, about: dict[str, object]) -> list[dict[str, Any]]:
    """Rows of an earlier scan to go on with.

    Raises:
        ValueError: If they were measured on something else.
    """
    if not path.exists():
        return []
    table = pq.read_table(path)
    earlier = json.loads((table.schema.metadata or {}).get(b"provenance", b"{}"))
    if earlier != json.loads(json.dumps(about)):
        changed = [key for key in about if earlier.get(key) != json.loads(json.dumps(about[key]))]
        raise ValueError(f"{path} holds measurements of another {', '.join(changed)}: give another --output")
    return list(table.to_pylist())


def print_correlation(ranks: Ranks, rows: list[dict[str, Any]]) -> None:
    """Pearson R of busy time with tokens and S^2 (docs/measuring.md), and the spread of repeats, by recompute level."""
    for level in dict.fromkeys(row["recompute"] for row in rows):
        of_level = [row for row in rows if row["recompute"] == level]
        points = points_of(*([row[name] for row in of_level] for name in ("batch_size", "seq_len", "repeat", "busy_s")))
        if len(points) < 3:
            continue
        tokens, squares = points.correlations
        say(ranks, f"recompute {level}: Pearson R of busy time with tokens {tokens:.2f}, with S^2 {squares:.2f}")
        say(ranks, f"  spread of repeats: median {np.median(points.spread):.2%}, most {points.spread.max():.2%}")


def say(ranks: Ranks, text: str) -> None:
    """Print on rank 0."""
    if ranks.is_main:
        print(text, flush=True)


if __name__ == "__main__":
    main()
