"""Fault injection: whatever is killed, every sample is trained exactly once an epoch, and the weights are the same.

On as many ranks as before to the bit, on others to rounding; a kill costs no more than what was not committed.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint import FileSystemReader

from adaptiveload.training.checkpoint_files import committed, latest, step_of
from tests.launching import PLAIN, ROOT, data_workers, environment, kill_all, launch, launch_command

NUM_SAMPLES, SAMPLES_PER_STEP, EPOCHS = 60, 4, 3
MAX_STEPS = NUM_SAMPLES * EPOCHS // SAMPLES_PER_STEP
SAVE_EVERY = 2
# Other ranks add in another order, 1e-7 of a gradient; AdamW's division by small second moments amplifies it.
WEIGHT_TOLERANCE = 1e-5


def start(run_config: Path, *overrides: str, ranks: int, log: Path) -> subprocess.Popen:
    command = launch_command(run_config, *overrides, ranks=ranks, launcher=PLAIN)
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), start_new_session=True, stdout=log.open("a"), stderr=subprocess.STDOUT
    )


def used_samples(run_dir: Path) -> list[tuple[int, str]]:
    """(step, key) of every sample that was trained and not rolled back."""
    used = []
    for path in (run_dir / "samples_used").glob("rank-*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            used += [(record["step"], key) for key in record["keys"]]
    return used


def num_steps(path: Path) -> int:
    """Steps in a `metrics.jsonl`, whose other lines are of saves and evaluations."""
    return path.read_text().count('"train/loss":') if path.exists() else 0


def options(name: str) -> tuple[str, ...]:
    return (
        f"name={name}",
        f"max_steps={MAX_STEPS}",
        f"schedule.samples_per_step={SAMPLES_PER_STEP}",
        "data.held_out_share=0",
        "data.log_samples=true",
        f"checkpoint.every_steps={SAVE_EVERY}",
        f"checkpoint.keep_every={SAVE_EVERY}",
        "evaluation.max_samples=0",
    )


def first_step_of(log: Path) -> int | None:
    """Where a launch began, if it came so far."""
    found = re.search(r"the run begins at step (\d+)", log.read_text(errors="replace"))
    return int(found[1]) if found else None


def committed_steps(run_dir: Path) -> int:
    newest = latest(run_dir / "checkpoints")
    return step_of(newest) if newest else 0


@dataclass
class Faults:
    """What was done to a run.

    Attributes:
        kills: How often it was killed.
        kills_of_one: How many of these killed a single rank, and left the rest to the launcher.
        kills_while_saving: How many found a checkpoint half written.
        steps_on_two_ranks: Steps that were committed before it ran on any other number of ranks.
    """

    kills: int = 0
    kills_of_one: int = 0
    kills_while_saving: int = 0
    steps_on_two_ranks: int = 0


def inject_faults(run_config: Path, run_dir: Path, trials: int, seed: int) -> Faults:
    """A kill in each of up to `trials` launches, first on two ranks and then on changing numbers; then to the end."""
    rng, done = random.Random(seed), Faults()
    for trial in range(trials):
        ranks = 2 if trial < trials // 2 else (1, 3)[trial % 2]
        log, before = run_dir.with_name(f"{run_dir.name}-{trial}.log"), committed_steps(run_dir)
        keys = (*options(run_dir.name), f"data.num_workers={trial % 2}")
        process = start(run_config, *keys, ranks=ranks, log=log)
        metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 120
        # Mostly some steps in, so that the run gets on; now and then while it starts.
        if rng.random() < 0.2:
            time.sleep(rng.uniform(0.5, 6))
        else:
            # Lines of steps after the checkpoint are dropped at the start, so the count may fall first.
            until = before + rng.randint(1, 5)
            while process.poll() is None and deadline > time.monotonic():
                if first_step_of(log) is not None and num_steps(metrics) >= until:
                    break
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.05))  # a step or two where nothing else runs: the run must not end before
        if process.poll() is not None:
            assert process.returncode == 0, log.read_text()[-4000:]
            break
        if rng.random() < 0.4 and (victims := ranks_of(process)):
            rng.choice(victims).kill()
            done.kills_of_one += 1
            assert process.wait(timeout=60) != 0
        else:
            kill_all(process)
        done.kills += 1
        done.kills_while_saving += bool(list((run_dir / "checkpoints").glob("*.partial")))
        assert first_step_of(log) in (None, before), "every launch goes on from the newest checkpoint"
        # One save may be under way; the one before it is committed before it begins.
        assert committed_steps(run_dir) >= max(num_steps(metrics) - 1 - 2 * SAVE_EVERY, before)
        if trial < trials // 2:
            done.steps_on_two_ranks = committed_steps(run_dir)
    launch(run_config, *options(run_dir.name), "data.num_workers=2", ranks=rng.choice((1, 3)))
    return done


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    """The processes of a launch that have begun to run train.py."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process(process.pid).children() if "train.py" in child.cmdline()]
    return []


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole."""
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in stored.items()}
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


def check_weights(run_dir: Path, unbroken: Path, done: Faults) -> None:
    """Hold checkpoints of a run that was killed against those of one that was not, on two ranks: to the bit while
    it had two ranks too, and at the end to rounding.
    """
    paths = committed(run_dir / "checkpoints")
    assert [path.name for path in paths] == [path.name for path in committed(unbroken / "checkpoints")]
    for path in (*(path for path in paths if step_of(path) <= done.steps_on_two_ranks), paths[-1]):
        found, expected = read_tensors(path), read_tensors(unbroken / "checkpoints" / path.name)
        assert found.keys() == expected.keys()
        if path != paths[-1]:
            assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    for kind in ("model", "ema"):
        a, b = (torch.cat([x[name].flatten() for name in x if name.startswith(f"{kind}/")]) for x in (found, expected))
        error = float((a - b).norm() / b.norm())
        print(f"{done}; relative error of {kind} at the end {error:.1e}")
        assert error < WEIGHT_TOLERANCE


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


@pytest.fixture(scope="module")
def unbroken(run_config: Path, runs: Path) -> Path:
    launch(run_config, *options("unbroken"), ranks=2)
    return runs / "unbroken"


def test_killed_runs_train_every_sample_once_an_epoch_to_the_same_weights(
    run_config: Path, runs: Path, unbroken: Path
) -> None:
    done = inject_faults(run_config, runs / "faults", trials=8, seed=0)
    assert done.kills >= 6, "the run ended before it could be killed often enough: this test would show little"
    assert 0 < done.kills_of_one < done.kills
    assert 0 < done.steps_on_two_ranks < MAX_STEPS
    check_exactly_once(runs / "faults")
    check_weights(runs / "faults", unbroken, done)
    state = json.loads(sorted((runs / "faults" / "checkpoints").glob("step-*/state.json"))[-1].read_text())
    assert (state["position"], state["position_is"]) == (180, "epoch 3, 0 of 60 samples")


@pytest.mark.stress
def test_thirty_kills(run_config: Path, runs: Path, unbroken: Path) -> None:
    all_done: list[Faults] = []
    while sum(done.kills for done in all_done) < 30:
        run_dir = runs / f"stress{len(all_done)}"
        all_done.append(inject_faults(run_config, run_dir, trials=10, seed=len(all_done) + 1))
        check_exactly_once(run_dir)
        check_weights(run_dir, unbroken, all_done[-1])
    assert any(done.kills_while_saving for done in all_done)


def test_a_killed_data_worker_ends_all_ranks_with_the_cause(run_config: Path, runs: Path, tmp_path: Path) -> None:
    """One worker of one of two ranks is killed, as the kernel does for want of memory."""
    log = tmp_path / "log"
    overrides = ("name=dead-worker", "max_steps=100000", "data.num_workers=1", "evaluation.max_samples=0")
    process = start(run_config, *overrides, ranks=2, log=log)
    run_dir, deadline = runs / "dead-worker", time.monotonic() + 120
    # The checkpoint of step 2 is committed beside training, some steps later.
    while num_steps(run_dir / "metrics.jsonl") < 7 or not committed_steps(run_dir):
        assert process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < deadline
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
    text = log.read_text(errors="replace")
    assert "a data worker died" in text
    assert "for memory: lower data.prefetch_mib" in text
    # The last checkpoint is usable.
    done = committed_steps(run_dir)
    launch(run_config, *overrides[:1], f"max_steps={done + 1}", *overrides[2:], ranks=1)
