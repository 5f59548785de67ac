"""`data.mode: stream` through train.py on two FSDP2 ranks: both policies train, a killed run goes on exactly."""

import json
import shutil
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.conftest import NUM_SAMPLES
from tests.end_to_end.test_exactly_once import num_steps, start, used_samples
from tests.launching import kill_all, launch

EPOCHS = 2


@pytest.fixture(scope="module")
def stream(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small dataset's shards without its index."""
    folder = shutil.copytree(dataset, tmp_path_factory.mktemp("stream") / "shards")
    for name in ("index.parquet", "dataset.json"):
        (folder / name).unlink()
    return folder


def overrides(stream: Path, policy: str, steps: int) -> tuple[str, ...]:
    return (
        "data.mode=stream",
        f"data.path={stream}",
        "data.held_out_share=0",
        "data.num_workers=1",
        "data.log_samples=true",
        f"schedule.policy={policy}",
        "schedule.slots_per_step=2",
        "checkpoint.every_steps=1",
        f"max_steps={steps}",
    )


def idle_share(run_dir: Path) -> float:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return float(np.mean([row["imbalance/idle_share_planned"] for row in rows if "train/loss" in row]))


@pytest.fixture(scope="module")
def runs(run_config: Path) -> Path:
    return Path(yaml.safe_load(run_config.read_text())["output_dir"])


def test_unindexed_shards_train_with_both_policies(run_config: Path, runs: Path, stream: Path) -> None:
    for policy in ("dual_constraint", "local"):
        launch(run_config, f"name=stream-{policy}", *overrides(stream, policy, 8), ranks=2)
        rows = [json.loads(line) for line in (runs / f"stream-{policy}" / "metrics.jsonl").read_text().splitlines()]
        losses = [row["train/loss"] for row in rows if "train/loss" in row]
        assert len(losses) == 8
        assert np.isfinite(losses).all()
    launch(run_config, "name=indexed", "data.held_out_share=0", "max_steps=8", "evaluation.max_samples=0", ranks=2)
    shares = {name: round(idle_share(runs / name), 4) for name in ("stream-dual_constraint", "stream-local", "indexed")}
    print("planned idle share:", shares)
    assert shares["indexed"] < shares["stream-dual_constraint"]


def test_a_killed_stream_goes_on_with_another_number_of_ranks(run_config: Path, runs: Path, stream: Path) -> None:
    run_dir = runs / "stream-killed"
    arguments = ("name=stream-killed", *overrides(stream, "local", 1000))
    process = start(run_config, *arguments, ranks=2, log=run_dir.with_suffix(".log"))
    deadline = time.monotonic() + 90
    while num_steps(run_dir / "metrics.jsonl") < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert process.poll() is None
    kill_all(process)
    state = json.loads(sorted((run_dir / "checkpoints").glob("step-*/state.json"))[-1].read_text())
    assert state["position_is"].startswith(f"epoch {state['stream']['epoch']}, ")
    launch(run_config, "name=stream-killed", *overrides(stream, "local", state["step"] + 30), ranks=1)
    used = Counter(key.rpartition("/")[2] for _, key in used_samples(run_dir))
    assert len(used) == NUM_SAMPLES
    # Whole epochs and the one under way: counts differ by one at most.
    assert max(used.values()) - min(used.values()) <= 1
    assert min(used.values()) >= EPOCHS
