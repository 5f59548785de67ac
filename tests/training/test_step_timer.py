"""Busy time is a rank's own work: the wait for a slower rank is in its wall time alone."""

import json
from pathlib import Path

from tests.launching import launch
from tests.training.busy_time import SLEEP_S


def test_busy_time_leaves_waiting_out_and_counts_recompute(tmp_path: Path) -> None:
    launch(tmp_path / "times.json", ranks=2, script="tests/training/busy_time.py")
    slow, waiting = json.loads((tmp_path / "times.json").read_text())
    slept = 2 * SLEEP_S  # two blocks
    assert slow[0]["busy_s"] >= slept
    # Under FSDP the other rank's step takes as long, for it waits; sleeping is exact however busy the machine is.
    assert waiting[0]["wall_s"] >= 0.5 * slept
    assert waiting[0]["busy_s"] < 0.25 * slept
    # The recomputed forward runs inside the backward span.
    assert slow[1]["busy_s"] >= 2 * slept
    assert waiting[1]["busy_s"] < 0.25 * slept
    # So it does where the first block's inputs have no gradient: nothing before its feed-forward is trained.
    assert slow[2]["busy_s"] >= 2 * slept
    assert waiting[2]["busy_s"] < 0.25 * slept
