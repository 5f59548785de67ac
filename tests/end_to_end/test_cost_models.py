"""Benchmark, fit, policy table and adaptation on two CPU ranks, as a user runs them."""

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image

from adaptiveload.scheduling.cost import analytic_prior
from adaptiveload.scheduling.cost_file import CostFile
from adaptiveload.scheduling.fit import fit_two_term, held_out_errors, points_of
from adaptiveload.scheduling.flops import WAN_1_3B
from adaptiveload.scheduling.shapes import LatentGeometry
from adaptiveload.training.config import load_config
from adaptiveload.training.schedule import build_schedule
from adaptiveload.training.startup_report import describe_schedule
from scripts import benchmark_policies, benchmark_shapes
from tests.launching import launch, run_script


def launch_module(module: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess:
    """Run a script of the package on two ranks."""
    return launch(f"scripts.{module}", *arguments, ranks=2, script="-m", check=check)


SCAN = ("--shapes", "1x64x64", "5x128x128", "9x128x256", "17x256x256", "--max-tokens", 2560, "--repeats", 2)


@pytest.fixture(scope="module")
def measurements(run_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scan that was cut by its budget and gone on with."""
    path = tmp_path_factory.mktemp("scan") / "measurements.parquet"
    first = launch_module("benchmark_shapes", run_config, "--output", path, *SCAN, "--budget-minutes", 2)
    assert "wants a GPU" in first.stdout
    assert "Pearson R of busy time" in first.stdout
    table = pq.read_table(path)
    kept = table.slice(0, 2 * 5 * 4)  # ranks, runs, points
    pq.write_table(kept, path)
    again = launch_module("benchmark_shapes", run_config, "--output", path, *SCAN, "--budget-minutes", 2)
    assert "4 points are there already" in again.stdout
    assert pq.read_table(path).num_rows == table.num_rows
    return path


def test_scan_covers_lengths_and_batch_sizes_on_all_ranks(measurements: Path) -> None:
    rows = pq.read_table(measurements).to_pylist()
    assert {row["rank"] for row in rows} == {0, 1}
    assert {row["repeat"] for row in rows} == {0, 1, 2, 3, 4}  # short micro-batches: twice as many
    assert {row["seq_len"] for row in rows} == {16, 128, 384, 1280}
    assert {row["batch_size"] for row in rows if row["seq_len"] == 16} == {1, 40, 80, 160}
    assert {row["batch_size"] for row in rows if row["seq_len"] == 128} == {1, 5, 10}
    assert all(row["busy_s"] > 0 and row["step_s"] >= row["busy_s"] for row in rows)
    assert all(row["reserved_bytes"] is None for row in rows)  # no GPU: not measured, and not made up
    about = json.loads(pq.read_schema(measurements).metadata[b"provenance"])
    assert about["gpu"] == "cpu"
    layout = {"precision": "fp32", "meet": "step", "ranks": 2, "trained": "all", "compile": False}
    assert about["layout"] == layout
    assert about["model"]["num_layers"] == 2


@pytest.mark.parametrize("seed", range(4))
def test_chosen_points_predict_a_length_that_was_left_out(seed: int) -> None:
    """As 2 H200s measured Wan 1.3B: the law, a soft launch floor under which repeats scatter, points off by 1 %."""
    options = benchmark_shapes.parse_arguments(["run.yaml", "--output", "out", "--max-tokens", "105600"])
    prior, rng = analytic_prior(WAN_1_3B, "h200", "full"), np.random.default_rng(seed)
    rows = []
    for point in benchmark_shapes.choose_points(options, LatentGeometry(), prior):
        law_s = 0.041 + 1.24e-3 * point.batch_size + point.num_tokens * (26.2e-6 + 1.476e-9 * point.seq_len)
        seconds = (0.285**4 + law_s**4) ** 0.25 * rng.normal(1, 0.01)
        scatter = 0.4 if seconds < 2 * 0.29 else 0.003
        repeats = range(2 * benchmark_shapes.num_runs(point, prior, options.repeats))
        rows += [(point.batch_size, point.seq_len, r, seconds * rng.lognormal(0, scatter)) for r in repeats]
    assert sum(row[3] for row in rows) / 2 < 200  # seconds on each of two ranks
    points = points_of(*np.array(rows).T)
    floor_s = fit_two_term(points).cost.launch_floor_us / 1e6
    held_out = held_out_errors(points, lambda p: fit_two_term(p).cost)
    assert floor_s == pytest.approx(0.29, rel=0.2)
    assert np.abs(held_out[points.seconds > 2 * floor_s]).max() < 0.08


@pytest.fixture(scope="module")
def cost_file(measurements: Path) -> Path:
    path = measurements.with_name("cost.yaml")
    result = run_script("fit_cost_model", measurements, "--output", path)
    assert "exponent_interval" in result.stdout
    assert "<- best" in result.stdout
    assert path.with_suffix(".png").stat().st_size > 10_000
    return path


def plan_with(run_config: Path, *keys: str) -> str:
    """The start-up report of a run on two ranks, without a launch."""
    config = load_config(run_config, [*keys, "schedule.meet=step"])
    return describe_schedule(build_schedule(config, 2, torch.device("cpu"), None), 2)


def test_fitted_file_plans_here_and_is_refused_elsewhere(cost_file: Path, run_config: Path) -> None:
    assert CostFile.read(cost_file).layout["recompute"] == "none"
    for law in ("two_term", "power"):
        for policy in ("balanced", "dual_constraint", "equal_token"):
            report = plan_with(run_config, f"cost.file={cost_file}", f"cost.law={law}", f"schedule.policy={policy}")
            assert f"{cost_file}, law {law}" in report
    other = (f"cost.file={cost_file}", "schedule.recompute=full")
    with pytest.raises(ValueError, match=r"recompute none, here full.*cost\.allow_mismatch=true"):
        plan_with(run_config, *other)
    assert "load CV" in plan_with(run_config, *other, "cost.allow_mismatch=true")
    refused = launch(run_config, *other, "schedule.meet=step", ranks=1, check=False)
    assert refused.returncode != 0
    assert "was fitted for something else" in refused.stderr


def test_report_counts_text_as_the_limit_does(run_config: Path) -> None:
    keys = ("schedule.memory_limit_tokens=2048", "schedule.text_memory_tokens=1500")
    (most,) = re.findall(r"largest micro-batch (\d+) of 2048 tokens", plan_with(run_config, *keys))
    assert 1500 < int(most) <= 2048  # one sample, of which at most 548 tokens are not text


@pytest.mark.parametrize("recompute", ["none", "full", "auto"])
def test_report_warns_of_a_limit_above_the_memory(run_config: Path, recompute: str) -> None:
    """With `auto` alone it once did; the presets of 14B and 20B have `full`."""
    warned = re.compile(
        r"WARNING: schedule\.memory_limit_tokens=\d+ is above the \d+ tokens that fit by the memory model"
    )
    keys = (f"schedule.recompute={recompute}", "cost.gpu=h200")
    assert not warned.search(plan_with(run_config, *keys))
    assert warned.search(plan_with(run_config, *keys, "schedule.memory_limit_tokens=1_000_000_000"))


def test_lookahead_asks_nothing_of_the_papers_policies(run_config: Path) -> None:
    """Their steps are slots: `samples_per_step`, which `balanced` could not split over two ranks, is not theirs."""
    keys = ("schedule.policy=equal_token", "schedule.lookahead=auto", "schedule.samples_per_step=1")
    assert "equal_token, meeting every step, lookahead 1:" in plan_with(run_config, *keys)


def test_scan_of_another_model_is_not_mixed_in(measurements: Path, run_config: Path) -> None:
    result = launch_module(
        "benchmark_shapes", run_config, "model.num_layers=1", "--output", measurements, *SCAN, check=False
    )
    assert result.returncode != 0
    assert "measurements of another model" in result.stderr


def write_mix(folder: Path) -> Path:
    shapes = ((1, 64, 64, 5), (5, 128, 128, 3), (9, 128, 256, 2))
    mix = {"shapes": [dict(zip(("frames", "height", "width", "share"), shape, strict=True)) for shape in shapes]}
    (folder / "mix.yaml").write_text(yaml.safe_dump(mix))
    return folder / "mix.yaml"


def test_policies_are_measured_side_by_side(cost_file: Path, run_config: Path, tmp_path: Path) -> None:
    options = ("schedule.memory_limit_tokens=1024", "--mix", write_mix(tmp_path), "--cost", cost_file)
    # A budget that is used up at once still gives each policy its row, of a single step.
    short = (*options, "--steps", 3, "--warmup", 1, "--budget-minutes", 0.01, "--output", tmp_path)
    assert "balanced: the budget ends its steps at 1" in launch_module("benchmark_policies", run_config, *short).stdout
    rows = json.loads((tmp_path / "policies.json").read_text())["policies"]
    assert [row["num_steps"] for row in rows] == [1, 1, 1]
    whole = (*options, "--steps", 3, "--warmup", 1, "--samples-per-rank", 8, "--same-samples", "--output", tmp_path)
    arms = ("--recompute", "none", "full", "--policies", "equal_token", "balanced", "--peer", "precision=bf16")
    launch_module("benchmark_policies", run_config, *whole, *arms)
    rows = json.loads((tmp_path / "policies.json").read_text())["policies"]
    ours = ["equal_token", "balanced"]
    assert [row["policy"] for row in rows] == [*ours, *ours, "equal_token"]
    assert [row["recompute"] for row in rows] == [*["none"] * 2, *["full"] * 3]
    assert [row["model"] for row in rows] == [*["adaptiveload"] * 4, "diffusers"]
    samples = [sorted(itertools.chain(*(step["seq_lens"] for step in row["steps"]))) for row in rows]
    assert len(samples[0]) == 3 * 8 * 2
    for row, of_row in zip(rows, samples, strict=True):
        assert of_row == samples[0]
        assert row["is_complete"]
        assert 0 <= row["load_cv"] < 1
        assert 0 <= row["step_time_cv"] < 1
        assert row["useful_share"] > 0
        # Of the same samples: what they are worth on the mix is one factor for all rows that share a law.
        peer = next(other for other in rows if all(other[key] == row[key] for key in ("model", "recompute")))
        factors = [each["tokens_per_s_on_mix"] / each["tokens_per_s"] for each in (row, peer)]
        assert factors[0] == pytest.approx(factors[1], rel=1e-4)  # microseconds are rounded
    assert (tmp_path / "policies.md").read_text().count("|\n") == 2 * (2 + 5)
    with Image.open(tmp_path / "policies.png") as picture:
        assert picture.height > 500
    wrong = (*options, "--steps", 17, "--policies", "balanced", "--scale-b2", 30, "--adaptive", "--output", tmp_path)
    launch_module("benchmark_policies", run_config, *wrong)
    (row,) = json.loads((tmp_path / "policies.json").read_text())["policies"]
    errors = row["cost_error_by_step"]
    assert row["updates"]
    assert sorted(errors[-8:])[4] < sorted(errors[1:9])[4]  # medians: single steps of a shared machine jump


def test_training_adapts_logs_it_and_resumes_with_its_history(run_config: Path, tmp_path: Path) -> None:
    base = (run_config, f"output_dir={tmp_path}", "name=adaptive", "cost.gpu=h200", "cost.adaptive=true")
    result = launch(*base, "max_steps=15", ranks=2)
    assert "cost law from step" in result.stdout + result.stderr
    state = json.loads((tmp_path / "adaptive" / "checkpoints" / "step-00000015" / "state.json").read_text())
    saved = state["adaptation"]
    assert saved["updates"]
    assert saved["observations"]
    metrics = (tmp_path / "adaptive" / "metrics.jsonl").read_text().splitlines()
    errors = [json.loads(line)["imbalance/cost_error"] for line in metrics if "imbalance/cost_error" in line]
    assert errors[0] > 0.5  # an H200's prior on a CPU
    launch(*base, "max_steps=18", ranks=1)  # and on another number of ranks
    state = json.loads((tmp_path / "adaptive" / "checkpoints" / "step-00000018" / "state.json").read_text())
    assert state["adaptation"]["updates"][: len(saved["updates"])] == saved["updates"]


def test_startup_report_warns_of_small_steps_and_names_dropped_files(
    run_config: Path, dataset: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "latents"
    shutil.copytree(dataset, copy)
    (copy / "report.json").write_text(json.dumps({"skipped": [{"source": "cut.mp4", "reason": "no frame decodes"}]}))
    report = plan_with(run_config, f"data.path={copy}", "schedule.samples_per_step=2")
    for words in ("cut.mp4: no frame decodes", "WARNING", "schedule.samples_per_step=2", "hours", "GiB"):
        assert words in report
    assert "WARNING" not in plan_with(run_config, "schedule.samples_per_step=40")
    assert "a step trains on some of them more than once" in plan_with(run_config, "schedule.samples_per_step=70")
    auto = plan_with(run_config, "schedule.memory_limit_tokens=null", "schedule.lookahead=auto")
    assert "largest micro-batch" in auto


def test_a_table_is_predicted_for_more_ranks_than_there_are(
    cost_file: Path, run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, without a launch: what the plans of real ranks would cost by the same file."""
    keys = (str(run_config), "schedule.memory_limit_tokens=1024", "cost.gpu=h200", "--cost", str(cost_file))
    options = (
        *keys,
        "--mix",
        str(write_mix(tmp_path)),
        "--samples-per-rank",
        "8",
        "--steps",
        "3",
        "--output",
        str(tmp_path),
        "--dry-run",
    )
    benchmark_policies.main([*options, "--ranks", "16", "--recompute", "none", "auto", "--meet", "slot", "step"])
    written = json.loads((tmp_path / "policies.json").read_text())
    assert (written["world_size"], written["is_predicted"], written["device"]) == (16, True, "h200, predicted")
    assert "16 x h200, predicted" in capsys.readouterr().out
    rows = written["policies"]
    assert len(rows) == 2 * 2 * 3
    for row in rows:
        assert row["num_steps"] == 3
        assert len(row["steps"][0]["costs_us"][0]) == 16
        costs = [np.array(step["costs_us"]) for step in row["steps"]]  # [G, R]
        if row["meet"] == "slot":
            assert row["step_s"] == pytest.approx(np.mean([each.max(1).sum() / 1e6 for each in costs]))
        else:  # never before the rank with most to do, and no later than if all waited in each slot
            assert row["step_s"] >= np.mean([each.sum(0).max() / 1e6 for each in costs]) - 1e-9
        tokens = row["tokens_per_sample"] * row["samples_per_step"]
        assert row["tokens_per_s"] == pytest.approx(tokens / row["step_s"])
        assert 0 < row["memory_share"] < 1
        assert 0 < row["mfu_on_mix"] < 1
    for more, message in (((), "--dry-run and --ranks N go together"), (("--ranks", "16", "--peer"), "no --peer")):
        with pytest.raises(SystemExit):
            benchmark_policies.main([*options, *more])
        assert message in capsys.readouterr().err
