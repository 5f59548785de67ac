"""One rank of a real launch runs out of memory, later one stands still: all end in words, and the run loses nothing."""

import json
import pickle
import re
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

from adaptiveload.training.checkpoint_files import latest, read_state
from adaptiveload.training.config import load_config
from adaptiveload.training.memory_limits import read_records
from adaptiveload.training.schedule import build_schedule
from tests.launching import ROOT, environment, launch_command


@pytest.fixture(scope="module")
def output_dir(run_config: Path) -> Path:
    return Path(yaml.safe_load(run_config.read_text())["output_dir"])


def test_out_of_memory_lowers_the_limit_and_a_rank_that_stands_still_is_named(
    run_config: Path, output_dir: Path
) -> None:
    """In one launch: it fails of memory, is started again by the launcher, goes on, and is ended for a rank's sleep."""
    run_dir = output_dir / "failing"
    keys = ("name=failing", "data.log_samples=true", "checkpoint.every_steps=2", "watch.timeout_s=6")
    command = launch_command(
        run_config, *keys, ranks=2, script="tests/end_to_end/failing_ranks.py", launcher=("scripts.launch",)
    )
    faults = {"FAULT_TOKENS": "110", "FAULT_STOP": "9", "FAULT_MARK": str(run_dir / "limits.yaml")}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment() | faults, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seen: dict[str, float] = {}
    lines = []
    for line in process.stdout:
        lines.append(line)
        for mark in ("out of memory in a micro-batch", "scripts.launch: starts again"):
            if mark in line:
                seen.setdefault(mark, time.monotonic())
    assert process.wait() == 1
    output = "".join(lines)

    # Out of memory: recorded, all ranks end at once, started again under the lower limit, of which it says so.
    failed, restarted = seen.values()
    print(f"all ranks had ended {restarted - failed:.1f} s after one was out of memory")
    assert restarted - failed < 15
    (record,) = read_records(run_dir / "limits.yaml")
    assert (record["rank"], record["memory_limit_tokens"]) == (1, int(0.85 * record["num_tokens"]))
    assert 110 < record["num_tokens"] <= 128
    assert len(record["keys"]) == record["num_samples"] == sum(record["shapes"].values())
    assert record["text_rows"] > 0
    step, tokens, limit = record["step"], record["num_tokens"], record["memory_limit_tokens"]
    assert f"rank 1, step {step}, slot {record['micro_batch']} of" in output
    # By the broken connection, or by the watch where the rank that failed stays long to finish its checkpoint.
    assert re.search(r"rank 0 ends( too: |; for \d+ s it was here: )step", output)
    assert (
        f"schedule.memory_limit_tokens 128 -> {limit}: {tokens} tokens did not fit on rank 1 in step {step}" in output
    )
    assert f" of {limit} tokens\n" in output
    assert f"the run begins at step {step - step % 2}" in output, "the last checkpoint"

    # A rank that sleeps: both say where they stand, with their samples, and torch's record of collectives is there.
    stood = r"rank \d has stood still for over watch\.timeout_s=6 s: step \d+, slot \d of \d \(sample\d+"
    assert len(set(re.findall(stood, output))) == 1, "one reason, whichever rank was first to see it"
    here = r"step \d+, slot \d of \d \(sample\d+"
    assert re.search(rf"rank 1 ends; for \d+ s it was here: {here}", output)
    # Its connection breaks where rank 1 was the first to see it, and so the first to go.
    assert re.search(rf"rank 0 ends(; for \d+ s it was here| too): {here}", output)
    assert "time.sleep(600)" in output, "the line where it stands"
    for rank in (0, 1):
        recorded = pickle.loads((run_dir / f"collectives_rank_{rank}").read_bytes())
        assert len(recorded["entries"]) > 10

    # What was trained up to the last checkpoint is what the plan of an undisturbed run has.
    done = read_state(latest(run_dir / "checkpoints"))["step"]
    assert done > step, "it has gone on under the lower limit"
    config = load_config(run_config)
    policy = build_schedule(config, 2, torch.device("cpu"), None).policy
    table = policy.assembler.table
    planned = Counter((i, str(key)) for i in range(done) for key in table.keys[policy.plan(i).sample_ids])
    used: Counter[tuple[int, str]] = Counter()
    for path in (run_dir / "samples_used").glob("rank-*.jsonl"):
        for row in map(json.loads, path.open()):
            used.update((row["step"], key) for key in row["keys"] if row["step"] < done)
    assert used == planned
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["schedule"]["memory_limit_tokens"] == 128
