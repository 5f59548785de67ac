"""Busy time is a rank's own work: the wait for a slower rank is in its wall time alone."""

import json
from pathlib import Path

from tests.launching import launch


def test_busy_time_leaves_waiting_out_and_counts_recompute(tmp_path: Path) -> None:
    launch(tmp_path / "times.json", ranks=2, script="tests/training/busy_time.py")
    long, short = json.loads((tmp_path / "times.json").read_text())
    (busy_long, wall_long), (busy_short, wall_short) = long[1], short[1]
    # Under FSDP both take as long as the slower one ...
    assert wall_short > 0.8 * wall_long
    # ... but rank 1 works on a quarter of the tokens; on a shared machine half is safely different.
    assert busy_short < 0.5 * busy_long
    assert 0.3 * wall_long < busy_long < wall_long
    # The recomputed forward runs inside the backward span.
    assert long[2][0] > 1.1 * busy_long
