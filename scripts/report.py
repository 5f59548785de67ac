"""Write `report.html` of a run: who holds the others back, what each rank did, imbalance, loss, shape mix."""

import argparse
import base64
import html
import io
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure

from adaptiveload.scheduling.metrics import idle_share, load_cv
from adaptiveload.scheduling.policies import POLICIES
from adaptiveload.training.config import load_config
from adaptiveload.training.figures import (
    busy_figure,
    imbalance_figure,
    loss_figure,
    schedule_figure,
    shape_mix_figure,
)
from adaptiveload.training.schedule import build_schedule, model_geometry
from adaptiveload.training.stragglers import seconds_by_rank, straggler_line

_STYLE = """
body { font-family: system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; }
td, th { padding: .3em .9em; border-bottom: 1px solid #ddd; text-align: right; }
td:first-child, th:first-child { text-align: left; } img { max-width: 100%; } .note { color: #666; font-size: .9em; }
.straggler { border-left: 4px solid #d1603d; padding: .3em .8em; background: #faf3f0; }
"""
_SIMULATED_STEPS = 20


def write_report(run_dir: Path, num_steps: int) -> Path:
    """Write the report of the run in `run_dir` from its metrics, schedule and configuration.

    Args:
        run_dir: Folder with `config.yaml`, `metrics.jsonl` and `schedule.jsonl`.
        num_steps: Steps that the schedule picture shows.

    Raises:
        ValueError: If the folder holds no trained step.
    """
    # Whatever the cost file was fitted for, here it only prices a picture.
    config = load_config(run_dir / "config.yaml", ["cost.allow_mismatch=true"])
    metrics, records = _read_lines(run_dir / "metrics.jsonl"), _read_lines(run_dir / "schedule.jsonl")
    steps = [row for row in metrics if "train/loss" in row]
    if not steps or not records:
        raise ValueError(f"{run_dir}: metrics.jsonl or schedule.jsonl holds no step; train first")
    ranks = len(records[-1]["costs_us"][0])
    shown = list(takewhile(lambda record: len(record["costs_us"][0]) == ranks, reversed(records[-num_steps:])))[::-1]
    schedule = build_schedule(config, ranks, torch.device("cpu"), None)
    table = schedule.table
    counts = np.bincount(table.shape_ids[schedule.train_ids], minlength=len(table.shapes))
    mix = {shape: int(count) for shape, count in zip(table.shapes, counts, strict=True) if count}
    geometry = model_geometry(config.model)
    summary = f"{len(steps)} steps on {ranks} rank{'s' * (ranks > 1)}, {len(schedule.train_ids)} training samples of "
    summary += f"{len(mix)} shapes, {len(schedule.held_out_ids)} held out"
    body = [
        f"<h1>{html.escape(config.name)}</h1>",
        f"<p>{summary}</p>",
        f"<p class=straggler>{html.escape(straggler_line(steps, records))}</p>",
        _figures_table(metrics, steps),
        *_busy_picture(steps),
        "<h2>What each rank did</h2>",
        _image(schedule_figure(shown)),
        "<h2>Planned and measured imbalance</h2>",
        _image(imbalance_figure(steps)),
        "<h2>What the other policies would do here</h2>",
        f"<p class=note>Simulated on this data set, {_SIMULATED_STEPS} steps each, with the cost model of the run.</p>",
        _policies_table(config, ranks),
        "<h2>Loss</h2>",
        _image(loss_figure(metrics)),
        "<h2>Shape mix</h2>",
        _image(shape_mix_figure(mix, geometry)),
    ]
    sheet = run_dir / "samples" / "contact_sheet.png"
    if sheet.is_file():
        body += ["<h2>Clip, codec reconstruction, sample</h2>", _embed(sheet.read_bytes())]
    previews = sorted((run_dir / "previews").glob("step_" + "[0-9]" * 8 + ".png"))
    if previews:
        first_and_last = dict.fromkeys((previews[0], previews[-1]))
        body += ["<h2>Previews, first and last</h2>", *(_embed(sheet.read_bytes()) for sheet in first_and_last)]
    path = run_dir / "report.html"
    path.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(config.name)}</title>"
        f"<style>{_STYLE}</style><body>{''.join(body)}</body></html>"
    )
    return path


def _busy_picture(steps: list[dict[str, Any]]) -> list[str]:
    """The heat map of the steps that have figures of each rank: of many ranks not all have."""
    known = [row for row in steps if "rank/000/busy_s" in row]
    if not known:
        return []
    figure = busy_figure([row["step"] for row in known], seconds_by_rank(known))
    return ["<h2>Busy seconds of each rank</h2>", _image(figure)]


def _figures_table(metrics: list[dict[str, Any]], steps: list[dict[str, Any]]) -> str:
    """Medians over the second half of the run, past start-up."""
    late = steps[len(steps) // 2 :]

    def median(key: str, form: str) -> str:
        values = [row[key] for row in late if row.get(key) is not None]
        return format(float(np.median(values)), form) if values else "-"

    held_out = [row for row in metrics if row.get("train/loss_heldout") is not None]
    rows = [
        ("load CV, planned", median("imbalance/load_cv", ".4f")),
        ("load CV, measured", median("imbalance/measured_cv", ".4f")),
        ("step-time CV, measured", median("imbalance/step_time_cv", ".4f")),
        ("idle share, planned", median("imbalance/idle_share_planned", ".4f")),
        ("idle share, measured", median("imbalance/idle_share", ".4f")),
        ("tokens/s, all ranks", median("perf/tokens_per_s", ",.0f")),
        ("seconds a step", median("perf/step_s", ".3f")),
        ("share of it waiting for data", median("perf/data_wait_share", ".4f")),
        ("training loss", median("train/loss", ".4f")),
        ("samples lost", f"{int(steps[-1].get('data/num_lost', 0))}"),
    ]
    if held_out:
        loss, linear = (held_out[-1][f"train/loss_heldout{suffix}"] for suffix in ("", "_linear"))
        rows.append(("held-out loss, averaged weights", f"{loss:.4f}"))
        rows.append(("best per-channel linear predictor", f"{linear:.4f}"))
        rows.append(("held-out loss below it by", f"{1 - loss / linear:.1%}"))
    return _table(("median over the second half", ""), rows)


def _policies_table(config: Any, ranks: int) -> str:
    rows = []
    for policy in POLICIES:
        schedule_config = replace(config.schedule, policy=policy, lookahead="1")
        schedule = build_schedule(replace(config, schedule=schedule_config), ranks, torch.device("cpu"), None)
        plans = [schedule.policy.plan(step) for step in range(_SIMULATED_STEPS)]
        rows.append(
            (
                policy,
                f"{np.mean([load_cv(plan.costs_us, plan.meet, plan.replicas) for plan in plans]):.4f}",
                f"{np.mean([idle_share(plan.costs_us, plan.meet, plan.replicas) for plan in plans]):.4f}",
                f"{np.mean([plan.num_samples for plan in plans]):.1f}",
            )
        )
    return _table(("policy", "load CV", "idle share", "samples a step"), rows)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _image(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    return _embed(buffer.getvalue())


def _embed(png: bytes) -> str:
    return f'<img src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def main() -> None:
    """Command line of the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run, for example runs/quickstart")
    parser.add_argument("--steps", type=int, default=4, help="steps that the schedule picture shows (default 4)")
    options = parser.parse_args()
    try:
        print(f"report: {write_report(options.run, options.steps)}")
    except ValueError as error:
        sys.exit(f"report: {error}")


if __name__ == "__main__":
    main()
