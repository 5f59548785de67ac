"""The batch scripts on a real Slurm of two nodes: preempted, requeued and resumed, a run is the unbroken one."""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from adaptiveload.data.index import ShardIndex
from tests.data.media_files import picture_bytes
from tests.slurm import Slurm, install, running_slurm


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    install()
    root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    root.chmod(0o711)  # munged refuses a socket that not all can reach
    try:
        with running_slurm(root) as running:
            yield running
    finally:
        shutil.rmtree(root)


def rows(run_dir: Path) -> list[dict]:
    return [row for row in map(json.loads, (run_dir / "metrics.jsonl").open()) if "train/loss" in row]


def submit_others(slurm: Slurm, run_config: Path, folder: Path) -> list[tuple[str, Path]]:
    """A scan of two shapes, and a preparation of three pictures by two array tasks; jobs and their outputs."""
    scan = ("scripts/slurm/benchmark_shapes.sbatch", run_config, "--output", folder / "scan.parquet")
    scan += ("--points", "1x1x32x32", "2x1x32x32", "--budget-minutes", 1)
    media = folder / "media"
    media.mkdir()
    for number in range(3):
        (media / f"{number}.png").write_bytes(picture_bytes(number))
        (media / f"{number}.txt").write_text(f"picture {number}")
    array = ("--array=0-1", "scripts/slurm/prepare_array.sbatch", "--input", media, "--output", folder / "prepared")
    array += ("--shapes", "1,32,32", "--items-per-unit", 1)
    outputs = [folder / "scan.out", folder / "array.out"]
    return [(slurm.submit(output, *script), output) for output, script in zip(outputs, (scan, array), strict=True)]


def test_a_preempted_job_of_two_nodes_is_the_unbroken_one(slurm: Slurm, run_config: Path, tmp_path: Path) -> None:
    """Two nodes of a rank each, against one node of two ranks, both by train.sbatch."""
    output_dir = Path(yaml.safe_load(run_config.read_text())["output_dir"])
    slurm.environment["NUM_PROCESSES"] = "2"
    keys = ("scripts/slurm/train.sbatch", run_config, "data.log_samples=true", "checkpoint.every_steps=100")
    unbroken = slurm.submit(tmp_path / "unbroken.out", *keys, "name=slurm-unbroken")
    slurm.environment["NUM_PROCESSES"] = "1"
    preempted = slurm.submit(tmp_path / "preempted.out", "--nodes=2", *keys, "name=slurm-preempted", "max_steps=20")

    metrics, deadline = output_dir / "slurm-preempted" / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert time.monotonic() < deadline, slurm.job(preempted)
        time.sleep(0.02)
    slurm.call("scancel", "--signal=USR1", "--batch", preempted)

    others = submit_others(slurm, run_config, tmp_path)  # while the requeued job waits
    ended = slurm.wait(preempted, within_s=180)
    said = (tmp_path / "preempted.out").read_text(errors="replace")  # a signal may cut a progress bar
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), said
    assert "2 ranks on CPU" in said
    assert "ends with code 85" in said
    assert f"train.sbatch: stopped by a signal, requeueing job {preempted}" in said
    assert slurm.wait(unbroken, within_s=120)["JobState"] == "COMPLETED", (tmp_path / "unbroken.out").read_text()

    for job, output in others:
        assert slurm.wait(job, within_s=120)["JobState"] == "COMPLETED", output.read_text()
    assert pq.read_table(tmp_path / "scan.parquet").num_rows > 1
    assert set(ShardIndex.read(tmp_path / "prepared").heights.tolist()) == {32}

    whole, parts = rows(output_dir / "slurm-unbroken"), rows(output_dir / "slurm-preempted")
    assert [row["step"] for row in parts] == list(range(20)), "every step once, in order"
    assert [row["train/loss"] for row in parts] == [row["train/loss"] for row in whole], "to the last bit"
