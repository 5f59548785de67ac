"""Traces of chosen steps: they tell what the timer measured, and neither they nor their failure touch the run."""

import gzip
import json
from pathlib import Path

import pytest

from adaptiveload.training.config import load_config
from adaptiveload.training.distributed import Ranks
from adaptiveload.training.group_watch import GroupWatch
from adaptiveload.training.profiling import ProfileConfig
from adaptiveload.training.run import build_run
from adaptiveload.training.stop_signals import StopSignals
from scripts.busy_of_trace import busy_of_trace, main
from train import train

STEPS = "profile.steps=[2, 3]"


def train_here(run_config: Path, ranks: Ranks, *keys: str) -> tuple[Path, list[dict]]:
    """A run of 5 steps in this process, and its rows of metrics.jsonl."""
    config = load_config(run_config, ["max_steps=5", "evaluation.max_samples=0", "cost.adaptive=true", *keys])
    run = build_run(config, ranks)
    watch = GroupWatch(ranks.rank, config.watch, config.run_dir)
    assert train(run, StopSignals(), watch)
    watch.stop()
    run.feed.close()
    run.profiler.close()
    run.tracker.close()
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    return config.run_dir, [row for row in rows if "train/loss" in row]  # the last checkpoint has a line of its own


def test_the_trace_of_two_steps_tells_what_the_timer_measured(
    run_config: Path, ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, rows = train_here(run_config, ranks, f"output_dir={tmp_path}", STEPS)
    (trace,) = (run_dir / "profile").iterdir()
    assert trace.name == "steps_00000002-00000003_rank_000.trace.json.gz"
    assert f"profile: {trace}" in capsys.readouterr().out
    found = busy_of_trace(trace)
    plans = {row["step"]: row["batch/num_slots"] for row in rows}
    assert [(row["step"], row["micro_batch"]) for row in found] == [(s, g) for s in (2, 3) for g in range(plans[s])]
    # The marks lie around the timer's own, some microseconds each on blocks of some hundred. On a busy machine others
    # may run in one of these gaps, for milliseconds: so not in each micro-batch, but in most.
    ratios = sorted(row["trace_s"] / row["timer_s"] for row in found)
    assert ratios[0] >= 1
    assert ratios[len(ratios) // 2] < 1.5, ratios
    main([str(trace)])
    assert "apart" in capsys.readouterr().out

    # Under the profiler steps take longer: their times are in no figure, no refit and no picture.
    assert ["perf/step_s" in row for row in rows] == ["rank/000/busy_s" in row for row in rows]
    assert [row["step"] for row in rows if "perf/step_s" not in row] == [2, 3]
    assert all("train/loss" in row and "imbalance/load_cv" in row for row in rows)
    schedule = [json.loads(line)["step"] for line in (run_dir / "schedule.jsonl").read_text().splitlines()]
    assert schedule == [0, 1, 4]
    state = json.loads((run_dir / "checkpoints" / "step-00000005" / "state.json").read_text())
    micro_batches = sum(plans[step] for step in (0, 1, 4))
    assert len(state["adaptation"]["observations"]) == micro_batches


def test_what_the_profiler_cannot_do_does_not_stop_the_run(
    run_config: Path, ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("a file where the folder should be")
    _, rows = train_here(run_config, ranks, f"output_dir={tmp_path}", "name=run", STEPS)
    assert [row["step"] for row in rows] == list(range(5))
    assert "the profiler of rank 0 could not start" in capsys.readouterr().out

    # A run that ends within the steps leaves what there is; what would be too large is not kept.
    for max_mib, count, said in (
        (100, 1, "open it at ui.perfetto.dev"),
        (0.01, 0, "is not kept (profile.max_mib=0.01)"),
    ):
        keys = (f"name=ended-{max_mib}", f"profile.max_mib={max_mib}", "profile.steps=[4, 9]")
        run_dir, _ = train_here(run_config, ranks, f"output_dir={tmp_path}", *keys)
        assert len(list((run_dir / "profile").iterdir())) == count
        assert said in capsys.readouterr().out


def test_kernels_count_where_their_span_launched_them(tmp_path: Path) -> None:
    """A trace as Kineto writes it of a GPU: spans of two threads, kernels later than their launches."""

    def event(category: str, name: str, start: float, end: float, number: int = 0, thread: int = 1) -> dict:
        times = {"ts": start, "dur": end - start}
        return {"ph": "X", "cat": category, "name": name, "tid": thread, "args": {"correlation": number}, **times}

    events = [
        event("user_annotation", "step 7", 0, 100),
        event("user_annotation", "micro_batch 0", 10, 90),
        event("user_annotation", "busy", 20, 30),
        event("user_annotation", "busy", 40, 50, thread=2),
        event("cuda_runtime", "cudaLaunchKernel", 21, 22, 1),
        event("cuda_runtime", "cudaLaunchKernel", 22, 23, 2),
        event("cuda_runtime", "cudaLaunchKernel", 32, 33, 3),  # between the spans: the gradients' reduce
        event("cuda_driver", "cuLaunchKernelEx", 41, 42, 4, thread=2),
        event("cuda_runtime", "cudaLaunchKernel", 42, 43, 5, thread=2),
        event("cuda_runtime", "cudaLaunchKernel", 45, 46, 6, thread=1),  # another thread's, at the same time
        event("kernel", "gemm", 1000, 3000, 1),
        event("kernel", "gemm", 3500, 4000, 2),
        event("kernel", "reduce", 4000, 9000, 3),
        event("kernel", "gemm", 9000, 9500, 4),
        event("kernel", "ncclDevKernel_AllGather", 9000, 20000, 5),
        event("kernel", "other", 9000, 30000, 6),
    ]
    trace = tmp_path / "t.trace.json.gz"
    with gzip.open(trace, "wt") as file:
        json.dump({"traceEvents": events, "busy_s": {"7": [0.0036]}}, file)
    expected = {"step": 7, "micro_batch": 0, "timer_s": 0.0036, "trace_s": 0.0035, "kernel_s": 0.003}
    assert busy_of_trace(trace) == [pytest.approx(expected)]
    trace.write_bytes(trace.read_bytes()[:-20])
    with pytest.raises(ValueError, match="not a whole trace"):
        busy_of_trace(trace)


def test_steps_and_ranks_that_cannot_be_profiled_are_refused(run_config: Path, ranks: Ranks) -> None:
    for steps in ([3], [5, 3], [0, 10], [-1, 2]):
        with pytest.raises(ValueError, match=r"profile\.?:? ?.*steps"):
            ProfileConfig(steps=steps).check()
    with pytest.raises(ValueError, match=r"profile\.ranks=\[0, 1\]: this run has 1 ranks"):
        build_run(load_config(run_config, ["name=no-rank", STEPS, "profile.ranks=[0, 1]"]), ranks)
