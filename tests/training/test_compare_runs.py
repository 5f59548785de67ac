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


def test_runs_of_one_name_are_told_apart_by_their_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, loss in (("a", 2.0), ("b", 3.0)):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name / "wan", [loss] * 5)
    write_run(tmp_path / "c", [1.0] * 5)
    monkeypatch.chdir(tmp_path)
    tail = ["--window", "5", "--output", "curves.png"]
    main(["--runs", "a/wan", "b/wan", "c", *tail])
    rows = [line.split(" | ")[:3] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [["| a/wan", "5", "2.0000"], ["| b/wan", "5", "3.0000"], ["| c", "5", "1.0000"]]
    monkeypatch.chdir(tmp_path / "c")  # whose name a path may leave out
    main(["--runs", ".", "../a/wan", *tail])
    assert [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["| c", "| wan"]
    with pytest.raises(SystemExit, match="more than once"):
        main(["--runs", ".", "../c", *tail])
