"""scripts.compare_runs: curves of equal steps, held against the first run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from adaptiveload.models.architectures import new_transformer
from adaptiveload.models.pretrained import load_pretrained
from adaptiveload.training.config import load_config
from scripts import loss_congruence
from scripts.compare_runs import describe_seeds, main
from scripts.loss_congruence import WAYS, environment_of, mean_samples, with_slots, write_initial_weights


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


def test_ways_are_held_against_the_spread_of_their_seeds(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    runs = []
    for way, held_out in (("a", (1.0, 1.2)), ("b", (1.1, 1.3))):
        for seed, loss in enumerate(held_out):
            run = write_run(tmp_path / f"{way}-seed{seed}", [2.0 + seed] * 6)
            rows = [{"step": 3, "train/loss_heldout": 9.0}, {"step": 5, "train/loss_heldout": loss}]
            rows += [{"step": step, "batch/num_samples": 4 + step % 2} for step in range(6)]
            with (run / "metrics.jsonl").open("a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
            runs.append(str(run))
    command = ["--seeds", "--window", "3", "--output", str(tmp_path / "curves.png"), "--runs"]
    main([*command, *runs])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| a | 6 | 2.5000 | 0.000% | 0.000% |"  # the mean of both seeds
    # Each way's two seeds lie 0.2 apart: sqrt(0.02) = 0.1414 of a seed.
    assert "| b | 4.5 | 1.20000 | 1.1000 1.3000 | +0.10000 | 0.71 | +0.10000 +- 0.00000 |" in lines
    assert lines[-1] == "Largest gap 0.71 standard deviations of a seed: within 2."
    far = describe_seeds({"a": np.array([1.0, 1.1]), "b": np.array([2.0, 2.1])}, {"a": 1.0, "b": 1.0})
    assert "NOT within 2" in far
    for some, error in ((runs[:3], "same seeds"), ([str(write_run(tmp_path / "c", [1.0])), *runs], "WAY-seedN")):
        with pytest.raises(SystemExit, match=error):
            main([*command, *some])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "1"], "--seeds 1: must be at least 2"),
        (["--seeds", "0"], "--seeds 0: must be at least 2"),
        (["--at-once", "0"], "--at-once 0: must be at least 1"),
        (["--window", "0"], "--window 0: must be at least 1"),
        (["max_steps=20", "--window", "21"], "max_steps=20 is below --window 21"),
        (["--window", "9", "data.held_out_share=0"], "data.held_out_share=0"),
        (["--window", "9", "evaluation.max_samples=0"], "evaluation.max_samples=0"),
    ],
)
def test_what_could_not_be_compared_is_refused_before_it_is_trained(
    arguments: list[str], message: str, run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        loss_congruence.main([str(run_config), *arguments, "--output", str(tmp_path / "out")])
    assert message in f"{ended.value.code}{capsys.readouterr().err}"
    assert not (tmp_path / "out").exists()


def test_ways_get_equal_samples_their_kernels_and_a_seeds_weights(
    run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(run_config, ["cost.gpu=h200", "schedule.memory_limit_tokens=64"])
    slots = {way.policy: count for way, count in with_slots(config)}
    assert slots["balanced"] == 1
    config.schedule.policy, config.schedule.slots_per_step = "equal_token", slots["equal_token"]
    assert mean_samples(config) == pytest.approx(config.schedule.samples_per_step, rel=0.2)
    monkeypatch.setenv("ADAPTIVELOAD_KERNELS", "cuda")
    assert [environment_of(way).get("ADAPTIVELOAD_KERNELS") for way in WAYS] == ["reference", "cuda_dtile", None]
    for seed in (0, 1):
        write_initial_weights(config, seed, tmp_path / str(seed))
    first, second = (new_transformer(config.model) for _ in range(2))
    load_pretrained(first, tmp_path / "0")
    load_pretrained(second, tmp_path / "1")
    torch.manual_seed(1)
    drawn = new_transformer(config.model)  # as written
    assert not torch.equal(first.blocks[0].attn1.to_q.weight, second.blocks[0].attn1.to_q.weight)
    for name, parameter in drawn.named_parameters():
        assert torch.equal(second.get_parameter(name), parameter), name
