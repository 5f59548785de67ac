"""Fault injection: whatever is killed, every sample is trained exactly once an epoch, on any number of ranks."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import yaml

from tests.launching import PLAIN, ROOT, data_workers, environment, launch, launch_command

NUM_SAMPLES, SAMPLES_PER_STEP, EPOCHS = 60, 4, 3
MAX_STEPS = NUM_SAMPLES * EPOCHS // SAMPLES_PER_STEP


def start(run_config: Path, *overrides: str, ranks: int, log: Path) -> subprocess.Popen:
    command = launch_command(run_config, *overrides, ranks=ranks, launcher=PLAIN)
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), start_new_session=True, stdout=log.open("a"), stderr=subprocess.STDOUT
    )


def kill_all(process: subprocess.Popen) -> None:
    """SIGKILL to launcher, ranks and workers at once, as when a node goes.

    Except to Python's resource trackers, which end by themselves and then remove the semaphores of the dead.
    """
    for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("resource_tracker" in word for word in child.cmdline()):
                child.kill()
    process.wait()


def used_samples(run_dir: Path) -> list[tuple[int, str]]:
    """(step, key) of every sample that was trained and not rolled back."""
    used = []
    for path in (run_dir / "samples_used").glob("rank-*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            used += [(record["step"], key) for key in record["keys"]]
    return used


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def inject_faults(run_config: Path, run_dir: Path, trials: int, seed: int) -> int:
    """A kill in each of up to `trials` launches, on other ranks and workers each time, then to the end; kills done."""
    rng = random.Random(seed)
    overrides = (
        f"name={run_dir.name}",
        f"max_steps={MAX_STEPS}",
        f"schedule.samples_per_step={SAMPLES_PER_STEP}",
        "data.held_out_share=0",
        "data.log_samples=true",
        "checkpoint.every_steps=2",
        "evaluation.max_samples=0",
    )
    kills = 0
    for trial in range(trials):
        ranks = (1, 2, 3)[trial % 3]
        log = run_dir.with_suffix(".log")
        process = start(run_config, *overrides, f"data.num_workers={trial % 2}", ranks=ranks, log=log)
        metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 120
        # Mostly some steps in, so that the run gets on; now and then while it starts.
        if rng.random() < 0.2:
            time.sleep(rng.uniform(0.5, 6))
        else:
            # Lines of steps after the checkpoint are dropped at the start, so the count may fall first.
            until = num_lines(metrics) + rng.randint(1, 8)
            while process.poll() is None and num_lines(metrics) < until and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.2))
        if process.poll() is None:
            kill_all(process)
            kills += 1
        else:
            assert process.returncode == 0, log.read_text()[-4000:]
            break
    launch(run_config, *overrides, "data.num_workers=2", ranks=rng.choice((1, 2, 3)))
    return kills


def check_exactly_once(run_dir: Path) -> None:
    used = used_samples(run_dir)
    assert Counter(key for _, key in used) == Counter({f"sample{i:03d}": EPOCHS for i in range(NUM_SAMPLES)})
    for epoch in range(EPOCHS):
        # An epoch is a whole number of steps here.
        steps = range(epoch * NUM_SAMPLES // SAMPLES_PER_STEP, (epoch + 1) * NUM_SAMPLES // SAMPLES_PER_STEP)
        assert len({key for step, key in used if step in steps}) == NUM_SAMPLES
    assert all(count == SAMPLES_PER_STEP for count in Counter(step for step, _ in used).values())
    epochs = [[key for step, key in sorted(used) if step // 15 == epoch] for epoch in range(EPOCHS)]
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.fixture(scope="module")
def runs(run_config: Path) -> Path:
    return Path(yaml.safe_load(run_config.read_text())["output_dir"])


def test_killed_runs_train_every_sample_once_an_epoch(run_config: Path, runs: Path) -> None:
    kills = inject_faults(run_config, runs / "faults", trials=8, seed=0)
    assert kills >= 6, "the run ended before it could be killed often enough: this test would show little"
    check_exactly_once(runs / "faults")
    state = json.loads(sorted((runs / "faults" / "checkpoints").glob("step-*/state.json"))[-1].read_text())
    assert (state["position"], state["position_is"]) == (180, "epoch 3, 0 of 60 samples")


@pytest.mark.stress
def test_fifty_kills(run_config: Path, runs: Path) -> None:
    kills, number = 0, 0
    while kills < 50:
        kills += inject_faults(run_config, runs / f"stress{number}", trials=10, seed=number + 1)
        check_exactly_once(runs / f"stress{number}")
        number += 1


def test_a_killed_data_worker_ends_all_ranks_with_the_cause(run_config: Path, runs: Path, tmp_path: Path) -> None:
    """One worker of one of two ranks is killed, as the kernel does for want of memory."""
    log = tmp_path / "log"
    overrides = ("name=dead-worker", "max_steps=100000", "data.num_workers=1", "evaluation.max_samples=0")
    process = start(run_config, *overrides, ranks=2, log=log)
    metrics, deadline = runs / "dead-worker" / "metrics.jsonl", time.monotonic() + 60
    while num_lines(metrics) < 7 and time.monotonic() < deadline:
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    workers = data_workers(family)
    assert len(workers) == 2, "one worker a rank"
    killed = time.monotonic()
    os.kill(workers[1].pid, signal.SIGKILL)
    assert process.wait(timeout=60) != 0
    seconds = time.monotonic() - killed
    print(f"all ranks ended {seconds:.1f} s after the worker was killed")
    assert seconds < 60
    assert psutil.wait_procs(family, timeout=15)[1] == []
    text = log.read_text()
    assert "a data worker died" in text
    assert "for memory: lower data.prefetch_mib" in text
    # The last checkpoint is usable.
    done = max(int(path.name[5:]) for path in (runs / "dead-worker" / "checkpoints").glob("step-????????"))
    launch(run_config, *overrides[:1], f"max_steps={done + 1}", *overrides[2:], ranks=1)
