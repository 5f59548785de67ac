"""A training step on one GPU beside its bound and beside diffusers: forward and backward of one micro-batch.

python -m scripts.benchmark_step configs/wan_1_3b.yaml --shapes 1x32760 16x1560 --recompute none attention full \
    --parts bound ours compiled diffusers diffusers_compiled --profile --output out

A shape is BATCHxTOKENS or BATCHxFRAMESxHEIGHTxWIDTH. Parts:

- bound: what the blocks' matrix products, attention and memory-bound ops take at the rates of the best library kernels,
  measured in this run, without recompute (what is counted: training/step_bound.py). Rows get their ratio to it.
- ours, compiled: this project's model under FSDP2 on one rank, at each of `--recompute` (none, full, attention, which
  keeps attention outputs, and `attention:500` for the first half of the blocks); `compiled` with torch.compile.
- diffusers, diffusers_compiled: `diffusers.WanTransformer3DModel`, bf16 weights, all blocks checkpointed, padded text;
  blocks run by torch.compile in the second.

Compiled parts have a new model and a new compilation for each shape: diffusers' for that shape alone, which is the
fastest there is, ours for any length, as it trains.

Milliseconds are medians of GPU events after a warm-up, without optimizer. MFU counts model FLOPs without recompute over
the data sheet's dense bf16 peak. KB a token is peak memory above what is allocated before the step, over tokens. A part
that fails, out of memory for one, is a row that says so. `--profile` writes `profile-PART-LEVEL-SHAPE.txt`: kernels by
time and the share of time in which none ran. Larger models are measured as fewer blocks: `model.num_layers=8`.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from adaptiveload.models.wan import WanConfig
from adaptiveload.scheduling.recompute import ALL_BLOCKS
from adaptiveload.scheduling.shapes import LatentGeometry, Shape
from adaptiveload.training.benchmark_trainers import OwnTrainer
from adaptiveload.training.config import RunConfig, load_config
from adaptiveload.training.cost import Hardware, device_name, model_dims, resolve_gpu
from adaptiveload.training.distributed import Ranks, finish_ranks, reshard, start_ranks
from adaptiveload.training.failures import ending_in_words
from adaptiveload.training.kernel_profile import kernel_table, profiled_spans
from adaptiveload.training.launcher_settings import follow_launcher
from adaptiveload.training.metrics import peak_flops
from adaptiveload.training.schedule import model_geometry, resolve_meet
from adaptiveload.training.step_bound import measure_bound, run_ms

PARTS = ("bound", "ours", "compiled", "diffusers", "diffusers_compiled")
COMPILED = ("compiled", "diffusers_compiled")
MOST_FRAMES, ROWS_OVER_COLUMNS = 21, 30 / 52  # of 81 frames of 480x832, which --shapes in tokens come near to
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """`batch_size` samples of `shape`, `seq_len` tokens each."""

    batch_size: int
    shape: Shape
    seq_len: int

    @property
    def name(self) -> str:
        """As it is asked for."""
        return f"{self.batch_size}x{self.seq_len}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    end = time.monotonic()
    options = parse_arguments(arguments)
    with ending_in_words("benchmark_step"):
        config = load_config(options.config, options.overrides)
        cases = [parse_case(text, model_geometry(config.model)) for text in options.shapes]
        ranks = start_ranks()
        config = follow_launcher(config, os.environ, ranks.world_size)
        run(options, config, cases, ranks, end + 60 * options.budget_minutes)
    finish_ranks(ranks)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="YAML of the run whose model and precision count")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration keys")
    parser.add_argument("--shapes", nargs="+", default=["1x32760", "16x1560"], help="default: 1x32760 16x1560")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument(
        "--recompute", nargs="+", default=["none", "full"], help="LEVEL or LEVEL:PERMILLE (of the blocks) of ours"
    )
    parser.add_argument("--warmup", type=int, default=2, help="steps that do not count (default 2)")
    parser.add_argument("--repeats", type=int, default=5, help="steps that do (default 5)")
    parser.add_argument("--budget-minutes", type=float, default=math.inf, help="what has not begun by then is left out")
    parser.add_argument("--profile", action="store_true", help="kernels of one more step of each row, to text files")
    parser.add_argument("--output", type=Path, required=True, help="folder for step.json, step.md and profiles")
    return parser.parse_intermixed_args(arguments)


def parse_case(text: str, geometry: LatentGeometry) -> Case:
    """BATCHxTOKENS or BATCHxFRAMESxHEIGHTxWIDTH.

    Raises:
        ValueError: If it is neither, or no shape has so many tokens.
    """
    try:
        batch_size, *sizes = (int(part) for part in text.split("x"))
        shape = Shape(*sizes) if len(sizes) == 3 else shape_of(*sizes, geometry)
    except TypeError as error:
        raise ValueError(f"--shapes {text!r} is not BATCHxTOKENS or BATCHxFRAMESxHEIGHTxWIDTH") from error
    geometry.check(shape, f"--shapes {text}")
    return Case(batch_size, shape, geometry.num_tokens(shape))


def shape_of(tokens: int, geometry: LatentGeometry) -> Shape:
    """A shape of `tokens` tokens, as near to 480x832 as there is one: speed goes by tokens alone.

    Raises:
        ValueError: If `tokens` is not positive.
    """
    if tokens < 1:
        raise ValueError(f"--shapes: {tokens} tokens; there must be at least 1")
    size = 480 * 832 // (geometry.pixel_multiple[0] * geometry.pixel_multiple[1])
    grids = [
        (frames, rows, tokens // frames // rows)
        for frames in range(1, MOST_FRAMES + 1)
        if tokens % frames == 0
        for rows in range(1, math.isqrt(tokens // frames) + 1)
        if tokens // frames % rows == 0
    ]

    def distance(grid: tuple[int, int, int]) -> float:
        frames, rows, columns = grid
        return abs(math.log(tokens / frames / size)) + abs(math.log(rows / columns / ROWS_OVER_COLUMNS))

    frames, rows, columns = min(grids, key=distance)
    height, width = geometry.pixel_multiple
    latent_frames = frames * geometry.patch[0]
    return Shape((latent_frames - 1) * geometry.temporal_stride + 1, rows * height, columns * width)


def run(options: argparse.Namespace, config: RunConfig, cases: list[Case], ranks: Ranks, end: float) -> None:
    """Measure part after part, and write the table after every row."""
    rows: list[Row] = []
    for row in measure(options, config, cases, ranks, end):
        rows.append(row)
        print(describe(row), flush=True)
        write_results(rows, options, config, ranks)
    print((options.output / "step.md").read_text())


def measure(
    options: argparse.Namespace, config: RunConfig, cases: list[Case], ranks: Ranks, end: float
) -> Iterator[Row]:
    """Rows of all parts. One that fails says so, and the rest goes on with a new model."""
    for part in options.parts:
        levels = options.recompute if part in ("ours", "compiled") else ["none" if part == "bound" else "full"]
        subject: Any = None
        for case in cases:
            if part in COMPILED:  # what was compiled for one shape would be compiled for any by the next
                subject = None
                free_memory(ranks)
                torch._dynamo.reset()
            for level in levels:
                row: Row = {"part": part, "recompute": level, "shape": str(case.shape), "case": case.name}
                row |= {"batch_size": case.batch_size, "seq_len": case.seq_len}
                try:
                    if time.monotonic() > end:
                        figures: Row = {"error": "left out: the budget is used up"}
                    elif part == "bound":
                        figures = measure_part_bound(case, config, ranks)
                    else:
                        subject = subject or SUBJECTS[part](config, ranks)
                        figures = measure_step(subject, case, part, level, options, ranks)
                except (RuntimeError, ValueError, TypeError) as error:  # out of memory is a RuntimeError
                    subject = None  # what was interrupted is not to be trusted
                    figures = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
                free_memory(ranks)
                yield row | figures
        subject = None
        free_memory(ranks)


def free_memory(ranks: Ranks) -> None:
    """Give back what nobody holds."""
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()


def measure_part_bound(case: Case, config: RunConfig, ranks: Ranks) -> Row:
    """The bound of one shape."""
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    bound = measure_bound(config.model, case.batch_size, case.seq_len, ranks.device, dtype)
    return {"ms": bound.ms, **asdict(bound)}


class Ours:
    """This project's model on the path that trains, on one rank."""

    def __init__(self, config: RunConfig, ranks: Ranks, *, compiled: bool = False) -> None:
        self.trainer = OwnTrainer(replace(config, compile=compiled), ranks)
        # A new model's head is zero, and so would be all gradients of the blocks: products of zeros draw less power.
        with torch.no_grad():
            self.trainer.model.proj_out.weight.to_local().normal_(std=0.02)
        hardware = Hardware.of(ranks.device)
        self.meet = resolve_meet(config, resolve_gpu(config.cost, hardware), hardware)

    def make_batch(self, case: Case) -> Any:
        """Random samples, whose attention is planned."""
        self.trainer.warm_up([[case.shape] * case.batch_size])
        return self.trainer.make_batch([case.shape] * case.batch_size)

    def step(self, batch: Any, level: str) -> None:
        """Forward and backward; `level` is as for --recompute."""
        recompute, _, permille = level.partition(":")
        self.trainer.timer.start_step()
        self.trainer.run(
            batch,
            scale=1 / len(batch),
            meet=self.meet,
            is_last=True,
            recompute=recompute,
            permille=int(permille or ALL_BLOCKS),
        )

    def after_step(self) -> None:
        """Weights are gathered anew, as after an optimizer step; gradients are dropped."""
        reshard(self.trainer.model)
        self.trainer.optimizer.zero_grad(set_to_none=True)


class Diffusers:
    """The model of diffusers as its users run it: weights in the compute dtype, all blocks checkpointed, unsharded."""

    def __init__(self, config: RunConfig, ranks: Ranks, *, compiled: bool = False) -> None:
        from diffusers import WanTransformer3DModel

        if not isinstance(config.model, WanConfig):
            raise ValueError("only Wan's transformer of diffusers is measured")
        self.config, self.device = config.model, ranks.device
        self.dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        torch.manual_seed(config.seed)
        with torch.device(ranks.device):
            self.model = WanTransformer3DModel(**config.model.to_diffusers()).to(self.dtype)
        self.model.enable_gradient_checkpointing()
        self.model.train()
        if compiled:
            for block in self.model.blocks:
                block.compile(dynamic=False)

    def make_batch(self, case: Case) -> tuple[torch.Tensor, ...]:
        """Noisy latents, target, timestep and text."""
        options: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        size = (case.batch_size, *model_geometry(self.config).latent_size(case.shape))
        noisy, target = torch.randn(2, *size, **options)
        text = torch.randn(case.batch_size, self.config.text_len, self.config.text_dim, **options)
        return noisy, target, torch.full((case.batch_size,), 500.0, device=self.device), text

    def step(self, batch: tuple[torch.Tensor, ...], _level: str) -> None:
        """Forward and backward."""
        noisy, target, timestep, text = batch
        velocity = self.model(noisy, timestep, text, return_dict=False)[0]
        (velocity.float() - target.float()).square().mean().backward()

    def after_step(self) -> None:
        """Gradients are dropped."""
        self.model.zero_grad(set_to_none=True)


SUBJECTS: dict[str, Callable[[RunConfig, Ranks], Any]] = {
    "ours": Ours,
    "compiled": lambda config, ranks: Ours(config, ranks, compiled=True),
    "diffusers": Diffusers,
    "diffusers_compiled": lambda config, ranks: Diffusers(config, ranks, compiled=True),
}


def measure_step(subject: Any, case: Case, part: str, level: str, options: argparse.Namespace, ranks: Ranks) -> Row:
    """Median milliseconds and peak memory of a step; its profile, if asked for."""
    batch = subject.make_batch(case)
    times = []
    for number in range(options.warmup + options.repeats):
        if number == options.warmup:
            ranks.take_memory_peak_gib()
        before = torch.cuda.memory_allocated(ranks.device) if ranks.device.type == "cuda" else 0
        times.append(run_ms(lambda: subject.step(batch, level), ranks.device))
        subject.after_step()
    counted = sorted(times[options.warmup :])
    peak_gib = ranks.take_memory_peak_gib()
    row: Row = {"ms": counted[len(counted) // 2], "all_ms": times, "peak_gib": peak_gib}
    row["kb_per_token"] = max(peak_gib * 2**30 - before, 0) / (case.batch_size * case.seq_len) / 1e3
    if options.profile:
        spans = profiled_spans(lambda: subject.step(batch, level), ranks.device)
        subject.after_step()
        options.output.mkdir(parents=True, exist_ok=True)
        name = f"profile-{part}-{level.replace(':', '-')}-{case.name}.txt"
        row["profile"] = name
        (options.output / name).write_text(kernel_table(spans))
    return row


def describe(row: Row) -> str:
    """One line on a row, as soon as it is there."""
    head = f"{row['part']}, recompute {row['recompute']}, {row['case']} ({row['shape']}): "
    return head + (row["error"] if "error" in row else f"{row['ms']:.1f} ms")


def write_results(rows: list[Row], options: argparse.Namespace, config: RunConfig, ranks: Ranks) -> None:
    """`step.json` with everything, `step.md` with the tables."""
    options.output.mkdir(parents=True, exist_ok=True)
    device = device_name(ranks.device)
    about = {"device": device, "torch": torch.__version__, "model": asdict(config.model), "precision": config.precision}
    dims = model_dims(config.model)
    flops = {row["case"]: row["batch_size"] * dims.train_flops(row["seq_len"], config.model.text_len) for row in rows}
    (options.output / "step.json").write_text(json.dumps({**about, "rows": rows}, indent=1))
    head = f"{device}, {config.model.architecture} of {config.model.num_layers} layers of {config.model.hidden_size}"
    (options.output / "step.md").write_text(markdown(head, rows, flops, peak_flops(device)))


def markdown(head: str, rows: Sequence[Row], flops: dict[str, int], peak: float | None) -> str:
    """All rows by shape, each beside the bound and beside diffusers; then the bound's parts and rates.

    Args:
        head: First line.
        rows: As measured.
        flops: Model FLOPs of a step of each case.
        peak: FLOP/s of the device, if known.
    """
    titles = ("shape", "part", "recompute", "ms", "x bound", "diffusers / it", "compiled diffusers / it", "tokens/s")
    titles += ("MFU", "peak GiB", "KB a token")
    lines = [head, "", "| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case]
        base: dict[str, float | None] = dict.fromkeys(PARTS)
        base |= {row["part"]: row["ms"] for row in reversed(of_case) if "ms" in row}
        for row in of_case:
            cells = [f"{case} ({row['shape']})", row["part"], row["recompute"]]
            if "error" in row:
                lines.append("| " + " | ".join([*cells, row["error"]]) + " |" * (len(titles) - len(cells)))
                continue
            tokens_per_s = row["batch_size"] * row["seq_len"] / row["ms"] * 1e3
            cells += [
                f"{row['ms']:.1f}",
                ratio(row["ms"], base["bound"]),
                ratio(base["diffusers"], row["ms"]),
                ratio(base["diffusers_compiled"], row["ms"]),
                f"{tokens_per_s:,.0f}",
                f"{flops[case] / row['ms'] * 1e3 / peak:.3f}" if peak else "-",
                f"{row['peak_gib']:.1f}" if "peak_gib" in row else "-",
                f"{row['kb_per_token']:.0f}" if "kb_per_token" in row else "-",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    for row in rows:
        if "matmul_ms" in row:
            parts = ", ".join(f"{name} {row[f'{name}_ms']:.1f} ms" for name in ("matmul", "attention", "memory"))
            lines += ["", f"Bound of {row['case']}: {parts}. Rates (TFLOP/s):", ""]
            lines += [f"- {name}: {rate:,.0f}" for name, rate in row["rates"].items()]
    return "\n".join(lines) + "\n"


def ratio(over: float | None, under: float | None) -> str:
    """`over` / `under`, or a dash where one of them is missing."""
    return f"{over / under:.3f}" if over is not None and under is not None else "-"


if __name__ == "__main__":
    main()
