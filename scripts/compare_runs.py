"""Loss curves of runs that saw the same samples, in one picture, and how far they lie apart.

    python -m scripts.compare_runs --runs runs/bf16-reference runs/bf16-cuda --output curves.png

The first run is the one that the others are held against. Samples, noise and timesteps of a step do not depend on
kernels, precision or the number of ranks, so that curves of equal training differ by rounding alone.

With `--seeds`, folders `WAY-seedN` are the runs of one way to train (`scripts.loss_congruence`): curves are means over
seeds, and a second table holds the ways' held-out losses against the first way's, in standard deviations of a seed.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from adaptiveload.training.figures import loss_curves_figure

_SEEDED = re.compile(r"(?P<way>.+)-seed(?P<seed>\d+)")
MOST_DEVIATIONS = 2.0  # of a seed, that a way's held-out loss may be off


def read_losses(run_dir: Path, key: str = "train/loss") -> dict[int, float]:
    """Training loss, or another metric, by step. Raises ValueError if the run has none."""
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    losses = {row["step"]: row[key] for row in rows if row.get(key) is not None}
    if not losses:
        raise ValueError(f"{path}: no {key} there: train first")
    return losses


def run_names(run_dirs: Sequence[Path]) -> dict[str, Path]:
    """Each run by its folder's name, or by its whole path where several folders have the name.

    Raises:
        ValueError: If a run is given twice.
    """
    resolved = [run_dir.resolve() for run_dir in run_dirs]
    if twice := sorted({str(path) for path in resolved if resolved.count(path) > 1}):
        raise ValueError(f"given more than once: {', '.join(twice)}")
    names = [path.name for path in resolved]
    return {
        name if names.count(name) == 1 else str(run_dir): run_dir for name, run_dir in zip(names, run_dirs, strict=True)
    }


def describe(curves: dict[str, np.ndarray], window: int) -> str:
    """Markdown table: last losses, and differences to the first run, step by step and of means over `window` steps."""
    first = next(iter(curves.values()))
    smooth_first = _means(first, window)
    lines = [
        f"| run | steps | loss of the last {window} | largest difference of a step | of means of {window} |",
        "|---|---|---|---|---|",
    ]
    for name, losses in curves.items():
        apart = np.abs(losses / first - 1).max()
        smooth_apart = np.abs(_means(losses, window) / smooth_first - 1).max()
        lines.append(f"| {name} | {len(losses)} | {losses[-window:].mean():.4f} | {apart:.3%} | {smooth_apart:.3%} |")
    return "\n".join(lines)


def by_way(run_dirs: Sequence[Path]) -> dict[str, list[Path]]:
    """Runs of each way to train, in the order of the seeds in their names.

    Raises:
        ValueError: If a folder is not named WAY-seedN, or the ways do not have the same two seeds or more.
    """
    found: dict[str, dict[int, Path]] = {}
    for run_dir in run_dirs:
        match = _SEEDED.fullmatch(run_dir.resolve().name)
        if match is None:
            raise ValueError(f"{run_dir}: with --seeds a run's folder is named WAY-seedN")
        found.setdefault(match["way"], {})[int(match["seed"])] = run_dir
    seeds = [sorted(of_way) for of_way in found.values()]
    if len(seeds[0]) < 2 or any(each != seeds[0] for each in seeds):
        raise ValueError("every way needs a run of the same seeds, two at least")
    return {way: [of_way[seed] for seed in sorted(of_way)] for way, of_way in found.items()}


def describe_seeds(held_out: dict[str, np.ndarray], samples: dict[str, float]) -> str:
    """Markdown table of held-out losses, and whether they lie within `MOST_DEVIATIONS` of the first way's.

    The standard deviation of a seed is that within ways, all ways together. Seeds share their initial weights and order
    between ways, so the mean of their differences is told as well.

    Args:
        held_out: Final held-out loss by way, [seeds].
        samples: Mean samples of a step by way.
    """
    first = next(iter(held_out.values()))
    deviation = float(np.sqrt(np.mean([losses.var(ddof=1) for losses in held_out.values()])))
    lines = [
        f"Held-out loss of {len(first)} seeds; standard deviation of a seed {deviation:.5f}.",
        "",
        "| way | samples a step | held-out loss | of each seed | gap to the first | in deviations | gap seed by seed |",
        "|---|---|---|---|---|---|---|",
    ]
    gaps = []
    for way, losses in held_out.items():
        gap = float(losses.mean() - first.mean())
        gaps.append(abs(gap) / deviation if deviation else float(gap != 0) * np.inf)
        each = " ".join(f"{loss:.4f}" for loss in losses)
        paired = losses - first
        lines.append(
            f"| {way} | {samples[way]:.1f} | {losses.mean():.5f} | {each} | {gap:+.5f} | {gaps[-1]:.2f} | "
            f"{paired.mean():+.5f} +- {paired.std(ddof=1):.5f} |"
        )
    verdict = "within" if max(gaps) <= MOST_DEVIATIONS else "NOT within"
    lines += ["", f"Largest gap {max(gaps):.2f} standard deviations of a seed: {verdict} {MOST_DEVIATIONS:.0f}."]
    return "\n".join(lines)


def _means(losses: np.ndarray, window: int) -> np.ndarray:
    return np.convolve(losses, np.ones(window) / window, mode="valid")


def _last(run_dir: Path, key: str) -> float:
    values = read_losses(run_dir, key)
    return values[max(values)]


def _mean_of(run_dirs: Sequence[Path], key: str) -> float:
    return float(np.mean([list(read_losses(run_dir, key).values()) for run_dir in run_dirs]))


def compare(run_dirs: Sequence[Path], window: int, seeds: bool) -> tuple[list[int], dict[str, np.ndarray], str]:
    """Steps that all runs have, the curve of each run or way over them, and the tables.

    Raises:
        ValueError: If runs cannot be compared.
    """
    runs = run_names(run_dirs)
    ways = by_way(list(runs.values())) if seeds else {name: [run_dir] for name, run_dir in runs.items()}
    losses = {name: [read_losses(run_dir) for run_dir in of_way] for name, of_way in ways.items()}
    steps = sorted(set.intersection(*(set(of_run) for of_way in losses.values() for of_run in of_way)))
    if len(steps) < window:
        raise ValueError(f"the runs have {len(steps)} steps in common, --window is {window}")
    curves = {
        name: np.mean([[of_run[step] for step in steps] for of_run in of_way], axis=0)
        for name, of_way in losses.items()
    }
    text = describe(curves, window)
    if seeds:
        held_out = {way: np.array([_last(run, "train/loss_heldout") for run in of_way]) for way, of_way in ways.items()}
        samples = {way: _mean_of(of_way, "batch/num_samples") for way, of_way in ways.items()}
        text += "\n\n" + describe_seeds(held_out, samples)
    return steps, curves, text


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="folders of runs; the first is the measure")
    parser.add_argument("--output", type=Path, required=True, help="picture to write")
    parser.add_argument("--title", default="Training loss", help="heading of the picture")
    parser.add_argument("--window", type=int, default=20, help="steps of a mean (default 20)")
    parser.add_argument("--seeds", action="store_true", help="runs are WAY-seedN: compare ways, over their seeds")
    options = parser.parse_args(argv)
    try:
        steps, curves, text = compare(options.runs, options.window, options.seeds)
    except ValueError as error:
        sys.exit(f"compare_runs: {error}")
    loss_curves_figure(np.array(steps), curves, options.window, options.title).savefig(options.output, dpi=110)
    print(text)


if __name__ == "__main__":
    main()
