"""train.py as users start it: the same losses on any number of ranks, and through a kill and a resume."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.launching import ROOT, environment, launch, launch_command

# Ranks and slots change the order of fp32 sums: 1e-7 a step, which AdamW's division by small second moments amplifies.
LOSS_TOLERANCE = 1e-4


def read_metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> np.ndarray:
    rows = [row for row in read_metrics(run_dir) if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(20)), "every step once, in order"
    return np.array([row["train/loss"] for row in rows])


@pytest.fixture(scope="module")
def output_dir(run_config: Path) -> Path:
    return Path(yaml.safe_load(run_config.read_text())["output_dir"])


@pytest.fixture(scope="module")
def one_rank(run_config: Path, output_dir: Path) -> Path:
    """The run that the others are held against: one rank, where meeting means nothing."""
    result = launch(run_config, "name=one", ranks=1)
    assert result.stdout.splitlines()[0].startswith("1 rank on CPU")
    return output_dir / "one"


@pytest.mark.parametrize("meet", ["slot", "step"])
def test_two_ranks_train_the_same_run(run_config: Path, output_dir: Path, one_rank: Path, meet: str) -> None:
    launch(run_config, f"name=two-{meet}", f"schedule.meet={meet}", ranks=2)
    np.testing.assert_allclose(losses(output_dir / f"two-{meet}"), losses(one_rank), rtol=LOSS_TOLERANCE)


def test_evaluation_leaves_training_alone(run_config: Path, output_dir: Path, one_rank: Path) -> None:
    """Weights gathered for an evaluation of the averages were once what the next step trained on."""
    launch(run_config, "name=no-evaluation", "evaluation.max_samples=0", ranks=1)
    np.testing.assert_array_equal(losses(output_dir / "no-evaluation"), losses(one_rank))


@pytest.fixture(scope="module")
def killed(run_config: Path, output_dir: Path) -> Path:
    """A two-rank run, killed without warning between its checkpoint of step 10 and its end."""
    run_dir = output_dir / "killed"
    command = launch_command(run_config, "name=killed", "schedule.meet=step", ranks=2)
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (run_dir / "metrics.jsonl").exists() or len(read_metrics(run_dir)) < 12:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return run_dir


@pytest.mark.parametrize("ranks", [2, 1])
def test_killed_run_resumes_exactly(
    run_config: Path, output_dir: Path, one_rank: Path, killed: Path, ranks: int
) -> None:
    name = f"resumed-{ranks}"
    shutil.copytree(killed, output_dir / name)
    launch(run_config, f"name={name}", "schedule.meet=step", ranks=ranks)
    np.testing.assert_allclose(losses(output_dir / name), losses(one_rank), rtol=LOSS_TOLERANCE)
    # The averaged weights came through too.
    held_out = [
        [row["train/loss_heldout"] for row in read_metrics(run_dir) if "train/loss_heldout" in row]
        for run_dir in (output_dir / name, one_rank)
    ]
    assert len(held_out[0]) == 2
    np.testing.assert_allclose(*held_out, rtol=LOSS_TOLERANCE)


def test_resume_refuses_another_dataset(
    run_config: Path, dataset: Path, output_dir: Path, killed: Path, tmp_path: Path
) -> None:
    from tests.conftest import write_dataset

    other = write_dataset(tmp_path / "other")
    index = other / "index.parquet"
    import pyarrow.parquet as pq

    table = pq.read_table(index)
    pq.write_table(table.set_column(table.schema.get_field_index("source"), "source", table["key"]), index)
    shutil.copytree(killed, output_dir / "other-data")
    result = launch(run_config, "name=other-data", f"data.path={other}", ranks=1, check=False)
    assert result.returncode != 0
    assert "data_fingerprint" in result.stderr


def test_finished_run_says_so(run_config: Path, one_rank: Path) -> None:
    before = (one_rank / "metrics.jsonl").read_text()
    result = launch(run_config, "name=one", ranks=1)
    assert "nothing left to train" in result.stdout
    assert (one_rank / "metrics.jsonl").read_text() == before


def test_dry_run_trains_nothing(run_config: Path, output_dir: Path) -> None:
    result = launch(run_config, "name=dry", "--dry-run", "--ranks", "4", ranks=1)
    assert "load CV" in result.stdout
    assert "4 ranks" in result.stdout
    assert not (output_dir / "dry").exists()


def test_one_process_instead_of_two_is_refused(run_config: Path) -> None:
    command = launch_command(run_config, ranks=1)
    at = command.index("--config_file")
    command[at : at + 2] = ["--cpu", "--num_processes", "2"]
    result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "asked for 2 processes and started one" in result.stderr
    assert "configs/accelerate/cpu.yaml" in result.stderr


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.memory_limit_tokens=40", "schedule.memory_limit_tokens"),
        ("schedule.samples_per_step=1", "schedule.samples_per_step"),
        ("optimizer.lrr=1", "optimizer.lr"),
        ("data.path=nowhere", "nowhere"),
        ("model.text_dim=32", "model.text_dim"),
    ],
)
def test_bad_input_stops_before_training(run_config: Path, override: str, message: str) -> None:
    result = launch(run_config, override, "name=bad", ranks=2, check=False)
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr.split("train.py:")[0]


def test_missing_or_changed_shard_stops_before_training(run_config: Path, dataset: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(dataset, changed)
    shard = sorted(changed.glob("*.tar"))[1]
    with shard.open("ab") as file:
        file.write(b"x")
    result = launch(run_config, f"data.path={changed}", "name=changed", ranks=1, check=False)
    assert result.returncode != 0
    assert shard.name in result.stderr
    shard.unlink()
    result = launch(run_config, f"data.path={changed}", "name=changed", ranks=1, check=False)
    assert result.returncode != 0
    assert shard.name in result.stderr


def test_unreadable_samples_become_fillers_until_there_are_too_many(
    run_config: Path, dataset: Path, output_dir: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(dataset, damaged)
    import pyarrow.parquet as pq

    index = pq.read_table(damaged / "index.parquet").to_pydict()
    row = index["key"].index("sample007")
    shard = damaged / index["shard"][row]
    content = bytearray(shard.read_bytes())
    start = index["offset"][row] + 512
    content[start : start + 64] = b"\xff" * 64  # the safetensors header, after the tar header
    shard.write_bytes(content)
    base = (run_config, f"data.path={damaged}", "evaluation.max_samples=0", "max_steps=10")
    launch(*base, "name=lost", "data.max_lost_share=0.2", ranks=2)
    lost = [json.loads(line) for line in (output_dir / "lost" / "lost.jsonl").read_text().splitlines()]
    assert {row["key"] for row in lost} == {"sample007"}
    assert read_metrics(output_dir / "lost")[-1]["data/num_lost"] == len(lost) > 1
    assert all(np.isfinite(row["train/loss"]) for row in read_metrics(output_dir / "lost"))
    result = launch(*base, "name=too-many", "data.max_lost_share=0", ranks=2, check=False)
    assert result.returncode != 0
    assert "data.max_lost_share" in result.stderr
