"""scripts.compare_runs: curves of equal steps, held against the first run."""

import json
from pathlib import Path

import pytest
from PIL import Image

from scripts.compare_runs import main


def write_run(folder: Path, losses: list[float]) -> Path:
    folder.mkdir()
    rows = [{"step": step, "train/loss": loss} for step, loss in enumerate(losses)] + [{"step": 1, "train/lr": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_differences_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first = write_run(tmp_path / "first", [2.0] * 10)
    other = write_run(tmp_path / "other", [2.0, 2.1, *[2.0] * 10])
    main(["--runs", str(first), str(other), "--window", "5", "--output", str(tmp_path / "curves.png")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == ["| first | 10 | 2.0000 | 0.000% | 0.000% |", "| other | 10 | 2.0000 | 5.000% | 1.000% |"]
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.width > 500


def test_runs_without_losses_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [])
    with pytest.raises(SystemExit, match="train first"):
        main(["--runs", str(tmp_path / "run"), "--output", str(tmp_path / "curves.png")])
    write_run(tmp_path / "short", [1.0] * 3)
    with pytest.raises(SystemExit, match="3 steps in common"):
        main(["--runs", str(tmp_path / "short"), "--output", str(tmp_path / "curves.png")])
