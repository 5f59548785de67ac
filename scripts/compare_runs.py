"""Loss curves of runs that saw the same samples, in one picture, and how far they lie apart.

    python -m scripts.compare_runs --runs runs/bf16-reference runs/bf16-cuda --output curves.png

The first run is the one that the others are held against. Samples, noise and timesteps of a step do not depend on
kernels, precision or the number of ranks, so that curves of equal training differ by rounding alone.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from adaptiveload.training.figures import loss_curves_figure


def read_losses(run_dir: Path) -> dict[int, float]:
    """Training loss by step. Raises ValueError if the run has none."""
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    losses = {row["step"]: row["train/loss"] for row in rows if row.get("train/loss") is not None}
    if not losses:
        raise ValueError(f"{path}: no training loss there: train first")
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


def _means(losses: np.ndarray, window: int) -> np.ndarray:
    return np.convolve(losses, np.ones(window) / window, mode="valid")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="folders of runs; the first is the measure")
    parser.add_argument("--output", type=Path, required=True, help="picture to write")
    parser.add_argument("--title", default="Training loss", help="heading of the picture")
    parser.add_argument("--window", type=int, default=20, help="steps of a mean (default 20)")
    options = parser.parse_args(argv)
    try:
        losses = {name: read_losses(run_dir) for name, run_dir in run_names(options.runs).items()}
        steps = sorted(set.intersection(*(set(of_run) for of_run in losses.values())))
        if len(steps) < options.window:
            raise ValueError(f"the runs have {len(steps)} steps in common, --window is {options.window}")
        curves = {name: np.array([of_run[step] for step in steps]) for name, of_run in losses.items()}
    except ValueError as error:
        sys.exit(f"compare_runs: {error}")
    loss_curves_figure(np.array(steps), curves, options.window, options.title).savefig(options.output, dpi=110)
    print(describe(curves, options.window))


if __name__ == "__main__":
    main()
