"""Figures reach metrics.jsonl whatever wandb does, and a resumed run does not log a step twice."""

import json
import time
from pathlib import Path

import pytest

from adaptiveload.training.config import RunConfig
from adaptiveload.training.tracker import Tracker, TrackingConfig


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def log_steps(run_dir: Path, steps: range, config: TrackingConfig) -> None:
    tracker = Tracker(run_dir, config, RunConfig(), steps.start, steps.stop)
    for step in steps:
        tracker.log(step, {"train/loss": 1.0 / (step + 1), "imbalance/step_time_cv": float("nan")})
        tracker.log_schedule({"step": step})
    tracker.close()


def test_without_a_key_wandb_is_offline_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no netrc
    log_steps(tmp_path / "run", range(3), TrackingConfig())
    assert steps_in(tmp_path / "run" / "metrics.jsonl") == [0, 1, 2]
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))


def test_wandb_that_cannot_be_reached_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    log_steps(tmp_path / "run", range(2), TrackingConfig(init_timeout_s=3))
    assert steps_in(tmp_path / "run" / "metrics.jsonl") == [0, 1]
    assert "wandb could not start online" in capsys.readouterr().out


def test_resumed_run_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    config = TrackingConfig(wandb="disabled")
    log_steps(tmp_path, range(5), config)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "train/lo')  # torn by a kill
    log_steps(tmp_path, range(3, 6), config)
    assert steps_in(tmp_path / "metrics.jsonl") == list(range(6))
    assert steps_in(tmp_path / "schedule.jsonl") == list(range(6))


def test_figures_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1), TrackingConfig(wandb="disabled"))
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert row == {"step": 0, "train/loss": 1.0, "imbalance/step_time_cv": None}


def test_progress_bar_waits_for_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed between, the start-up report, comes first."""
    tracker = Tracker(tmp_path / "run", TrackingConfig(wandb="disabled"), RunConfig(), 0, 2)
    assert capsys.readouterr().err == ""
    time.sleep(0.01)
    tracker.log(0, {"train/loss": 1.0})
    assert "1/2" in capsys.readouterr().err
    tracker.close()
