"""Copies of the model on groups of ranks train the same run, and checkpoints go from one layout to another."""

import json
from pathlib import Path

import numpy as np
import pytest

from adaptiveload.training.checkpoint_files import committed, step_of
from tests.launching import launch
from tests.training.hsdp_cases import BORDER, LAYOUTS, MAX_STEPS

# Other groups add in another order, 1e-7 a step; AdamW's division by small second moments amplifies it.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def results(run_config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    output = tmp_path_factory.mktemp("hsdp") / "results.json"
    launch(run_config, output, ranks=4, script="tests/training/hsdp_cases.py")
    rows = {
        name: list(
            map(json.loads, (output.parent / "runs" / f"layout-{name}" / "metrics.jsonl").read_text().splitlines())
        )
        for name in LAYOUTS
    }
    saved = {
        name: [step_of(path) for path in committed(output.parent / "runs" / f"layout-{name}" / "checkpoints")]
        for name in LAYOUTS
    }
    return {**json.loads(output.read_text()), "rows": rows, "saved": saved}


def test_every_layout_trains_the_same_run(results: dict) -> None:
    rows = {name: {row["step"]: row for row in each if "train/loss" in row} for name, each in results["rows"].items()}
    assert list(rows["fsdp"]) == list(range(MAX_STEPS))
    for name, (_, _, origin) in LAYOUTS.items():
        assert list(rows[name]) == list(range(BORDER if origin else 0, MAX_STEPS))
        for key in ("train/loss", "train/grad_norm"):
            found = [row[key] for row in rows[name].values()]
            expected = [rows["fsdp"][step][key] for step in rows[name]]
            np.testing.assert_allclose(found, expected, rtol=TOLERANCE, err_msg=f"{name} {key}")
    assert results["placements"]["fsdp"] == ["S(0)"]
    assert results["placements"]["hsdp"] == ["R", "S(0)"]


def test_all_ranks_save_by_one_clock(results: dict) -> None:
    by_steps, both = [BORDER, MAX_STEPS], [MAX_STEPS - 1, MAX_STEPS]
    assert results["saved"] == {
        "fsdp": by_steps, "hsdp": by_steps, "hsdp-from-fsdp": [MAX_STEPS], "fsdp-from-hsdp": both
    }  # fmt: skip


def test_figures_of_saves(results: dict) -> None:
    """Each with the step after it, or the last one's on a line of its own."""
    saves = [row for row in results["rows"]["hsdp"] if "checkpoint/background_s" in row]
    assert len(saves) == 2
    assert saves[0]["step"] >= BORDER
    assert saves[-1]["step"] == MAX_STEPS - 1
    assert all(0 < row["checkpoint/held_s"] < 5 for row in saves)


def test_a_rank_never_holds_more_than_its_shard_at_the_start(results: dict) -> None:
    """Weights and averages of its shard, and one whole parameter at a time while weights are drawn."""
    for memory in results["memory"]:
        assert memory["weights"] == pytest.approx(memory["whole"] / 4, rel=0.1)
        assert memory["peak"] < 1.5 * 2 * memory["weights"], memory
