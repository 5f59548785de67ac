"""train.py as users start it: the same losses on any number of ranks, and through a kill and a resume."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from adaptiveload.data.corpus import SourceConfig, open_corpus
from adaptiveload.data.index import ShardIndex
from adaptiveload.scheduling.order import held_out_mask
from adaptiveload.scheduling.shapes import LatentGeometry
from adaptiveload.training.checkpoint_files import latest, read_state
from adaptiveload.training.config import load_config
from adaptiveload.training.distributed import Ranks
from adaptiveload.training.run import build_run
from adaptiveload.training.schedule import build_schedule
from tests.conftest import write_dataset
from tests.launching import ACCELERATE, ROOT, environment, kill_all, launch, launch_command

# Ranks and slots change the order of fp32 sums: 1e-7 a step, which AdamW's division by small second moments amplifies.
LOSS_TOLERANCE = 1e-4


def read_metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path, key: str = "train/loss") -> np.ndarray:
    rows = [row for row in read_metrics(run_dir) if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(20)), "every step once, in order"
    return np.array([row[key] for row in rows])


@pytest.fixture(scope="module")
def output_dir(run_config: Path) -> Path:
    return Path(yaml.safe_load(run_config.read_text())["output_dir"])


@pytest.fixture(scope="module")
def one_rank(run_config: Path, output_dir: Path) -> Path:
    """The run that the others are held against: one rank, where meeting means nothing."""
    result = launch(run_config, "name=one", ranks=1, launcher=ACCELERATE)
    assert result.stdout.splitlines()[0].startswith("1 rank on CPU")
    return output_dir / "one"


@pytest.mark.parametrize(("meet", "recompute"), [("slot", "full"), ("step", "auto")])
def test_two_ranks_train_the_same_run(
    run_config: Path, output_dir: Path, one_rank: Path, meet: str, recompute: str
) -> None:
    levels = (f"schedule.recompute={recompute}", "schedule.kept_tokens=20", "schedule.most_tokens=200")
    keys = (f"schedule.meet={meet}", *levels, "data.num_workers=2")
    launch(run_config, f"name=two-{meet}", *keys, ranks=2)
    np.testing.assert_allclose(losses(output_dir / f"two-{meet}"), losses(one_rank), rtol=LOSS_TOLERANCE)
    # The norm is that of the whole gradient, not of a rank's shards (case c57).
    for key in ("train/grad_norm", "train/grad_norm_matrices", "train/grad_norm_spared"):
        np.testing.assert_allclose(
            losses(output_dir / f"two-{meet}", key), losses(one_rank, key), rtol=10 * LOSS_TOLERANCE, err_msg=key
        )
    # The learning rate goes by the step, however many processes count it (case c41).
    np.testing.assert_array_equal(losses(output_dir / f"two-{meet}", "train/lr"), losses(one_rank, "train/lr"))


def test_evaluation_leaves_training_alone(run_config: Path, output_dir: Path, one_rank: Path) -> None:
    """Weights gathered for an evaluation of the averages were once what the next step trained on."""
    launch(run_config, "name=no-evaluation", "evaluation.max_samples=0", ranks=1)
    np.testing.assert_array_equal(losses(output_dir / "no-evaluation"), losses(one_rank))


@pytest.fixture(scope="module")
def killed(run_config: Path, output_dir: Path) -> Path:
    """A two-rank run, killed without warning between its checkpoint of step 10 and its end."""
    run_dir = output_dir / "killed"
    command = launch_command(run_config, "name=killed", "schedule.meet=step", "data.num_workers=2", ranks=2)
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 12:  # the last line may be half written
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kill_all(process)
    return run_dir


@pytest.mark.parametrize(("ranks", "meet"), [(2, "slot"), (1, "step")])
def test_killed_run_resumes_exactly(
    run_config: Path, output_dir: Path, one_rank: Path, killed: Path, ranks: int, meet: str
) -> None:
    """On other ranks or with other meetings than before; test_exactly_once.py resumes as it was, to the bit."""
    name = f"resumed-{ranks}-{meet}"
    shutil.copytree(killed, output_dir / name)
    launch(run_config, f"name={name}", f"schedule.meet={meet}", "data.num_workers=1", ranks=ranks)
    np.testing.assert_allclose(losses(output_dir / name), losses(one_rank), rtol=LOSS_TOLERANCE)
    # The averaged weights came through too.
    held_out = [
        [row["train/loss_heldout"] for row in read_metrics(run_dir) if "train/loss_heldout" in row]
        for run_dir in (output_dir / name, one_rank)
    ]
    assert len(held_out[0]) == 2
    np.testing.assert_allclose(*held_out, rtol=LOSS_TOLERANCE)


def start_and_wait(run_dir: Path, command: list[str], steps: int) -> subprocess.Popen:
    """A launch that has trained so many steps."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count('"perf/step_s"') < steps:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def test_signals_save_at_the_next_step_and_end_for_a_requeue(
    run_config: Path, output_dir: Path, one_rank: Path
) -> None:
    """To the launcher, as a batch script sends them, or to one rank and its data workers (case c37).

    The second time between steps that are all saved and evaluated, so most likely during one of these.
    """
    run_dir = output_dir / "stopped"
    keys = (run_config, "name=stopped", "data.num_workers=1", "checkpoint.every_steps=100")
    command = launch_command(*keys, ranks=2, launcher=("scripts.launch",))
    process = start_and_wait(run_dir, command, steps=3)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 85, output
    first = latest(run_dir / "checkpoints")
    assert first is not None
    step = read_state(first)["step"]
    assert 3 <= step < 20
    assert f"SIGUSR1 after step {step}: saved {first}" in output

    busy = (*keys[:-1], "checkpoint.every_steps=1", "evaluation.every_steps=1")
    process = start_and_wait(run_dir, launch_command(*busy, ranks=2), steps=step + 3)
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2
    os.killpg(ranks[1].pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, "of `accelerate launch`, whatever its ranks end with"
    assert "exitcode  : 85" in output
    second = latest(run_dir / "checkpoints")
    assert second is not None
    assert step + 3 <= read_state(second)["step"] < 20

    launch(*keys, ranks=2)
    np.testing.assert_allclose(losses(run_dir), losses(one_rank), rtol=LOSS_TOLERANCE)


def test_ctrl_c_ends_all_ranks_at_once_with_one_line(run_config: Path, output_dir: Path) -> None:
    """A terminal sends it to every process of the launch."""
    command = launch_command(run_config, "name=interrupted", "max_steps=10000", ranks=2, launcher=("scripts.launch",))
    process = start_and_wait(output_dir / "interrupted", command, steps=2)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert output.count("train.py: interrupted; start") == 1
    assert "Traceback" not in output


def test_resume_refuses_another_dataset(
    run_config: Path, dataset: Path, output_dir: Path, killed: Path, ranks: Ranks, tmp_path: Path
) -> None:
    other = write_dataset(tmp_path / "other")
    index = other / "index.parquet"
    table = pq.read_table(index)
    pq.write_table(table.set_column(table.schema.get_field_index("source"), "source", table["key"]), index)
    shutil.copytree(killed, output_dir / "other-data")
    before = (output_dir / "other-data" / "config.yaml").read_text()
    with pytest.raises(ValueError, match="data_fingerprint"):
        build_run(load_config(run_config, ["name=other-data", f"data.path={other}"]), ranks)
    assert (output_dir / "other-data" / "config.yaml").read_text() == before, "a refused launch changed the run"


@pytest.mark.parametrize("override", ["model.num_layers=1", "schedule.lookahead=2", "seed=1"])
def test_resume_refuses_another_model_or_schedule(
    run_config: Path, output_dir: Path, killed: Path, ranks: Ranks, override: str
) -> None:
    name = f"other-{override.partition('=')[0]}"
    shutil.copytree(killed, output_dir / name)
    with pytest.raises(ValueError, match=f"made with.*{override.split('.')[0].split('=')[0]}"):
        build_run(load_config(run_config, [f"name={name}", override]), ranks)


def test_paper_policy_resumes_only_where_it_stood(run_config: Path, output_dir: Path) -> None:
    """Its batches follow from ranks and limits, so on other ranks it would repeat and leave out samples."""
    keys = (run_config, "name=paper", "schedule.policy=equal_token", "schedule.memory_limit_tokens=96")
    launch(*keys, "max_steps=4", "checkpoint.every_steps=2", ranks=2)
    launch(*keys, "max_steps=6", "checkpoint.every_steps=2", ranks=2)
    assert [row["step"] for row in read_metrics(output_dir / "paper") if "train/loss" in row] == list(range(6))
    result = launch(*keys, "max_steps=8", ranks=1, check=False)
    assert result.returncode != 0
    assert "made with ranks=2, this run has 1" in result.stderr


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
        ("model.in_channels=8", "model.in_channels"),
    ],
)
def test_bad_input_is_named(run_config: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build_schedule(load_config(run_config, [override, "name=bad"]), 2, torch.device("cpu"), None)


def test_missing_or_changed_shard_stops_all_ranks_before_training(
    run_config: Path, dataset: Path, tmp_path: Path
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(dataset, changed)
    shard = sorted(changed.glob("*.tar"))[1]
    with shard.open("ab") as file:
        file.write(b"x")
    result = launch(run_config, f"data.path={changed}", "name=changed", ranks=2, check=False)
    assert result.returncode != 0
    assert shard.name in result.stderr
    assert "Traceback" not in result.stderr.split("train.py:")[0]
    shard.unlink()
    with pytest.raises(ValueError, match=shard.name):
        open_corpus([SourceConfig(str(changed))], LatentGeometry()).verify()


def damage_samples(root: Path, keys: list[str]) -> None:
    """Overwrite the head of the latents of some samples in their shards."""
    index = pq.read_table(root / "index.parquet").to_pydict()
    for key in keys:
        row = index["key"].index(key)
        shard = root / index["shard"][row]
        content = bytearray(shard.read_bytes())
        start = index["offset"][row] + 512  # after the tar header
        content[start : start + 64] = b"\xff" * 64
        shard.write_bytes(content)


def test_unreadable_samples_become_fillers_until_there_are_too_many(
    run_config: Path, dataset: Path, output_dir: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(dataset, damaged)
    index = ShardIndex.read(damaged)
    held_out = held_out_mask(index.sources, share=0.1, seed=0)
    trained, kept_back = str(index.keys[~held_out][3]), str(index.keys[held_out][0])
    damage_samples(damaged, [trained, kept_back])
    base = (run_config, f"data.path={damaged}", "data.num_workers=1")
    launch(*base, "name=lost", "data.max_lost_share=0.2", "max_steps=10", ranks=2)
    result = launch(*base, "name=lost", "data.max_lost_share=0.2", "max_steps=15", ranks=1)
    lost = [json.loads(line) for line in (output_dir / "lost" / "lost.jsonl").read_text().splitlines()]
    assert {row["key"] for row in lost} == {trained}
    rows = [row for row in read_metrics(output_dir / "lost") if "train/loss" in row]
    assert rows[-1]["data/num_lost"] == len(lost) > 1, "counted through the resume"
    assert all(np.isfinite(row["train/loss"]) for row in rows)
    assert kept_back in result.stderr, "a held-out sample that is left out is named"
    result = launch(*base, "name=too-many", "data.max_lost_share=0", ranks=2, check=False)
    assert result.returncode != 0
    assert "data.max_lost_share" in result.stderr
