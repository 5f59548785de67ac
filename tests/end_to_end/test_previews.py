"""Previews and scripts.sample: spread over ranks that do not divide the samples, and no trace of them in the run."""

import json
from pathlib import Path

import av
import numpy as np
import pytest
import yaml
from PIL import Image

from adaptiveload.training.distributed import Ranks
from scripts.report import write_report
from scripts.sample import parse_args, sample
from tests.launching import launch, run_script

# Every block meets the other rank's in every call, and a rank samples one clip at a time.
OPTIONS = ("max_steps=4", "evaluation.max_samples=0", "schedule.memory_limit_tokens=64", "schedule.meet=slot")
PREVIEWS = ("previews.every_steps=3", "previews.num_samples=3", "previews.steps=3", "tracking.wandb=offline")


@pytest.fixture(scope="module")
def run_dir(run_config: Path) -> Path:
    launch(run_config, "name=previewed", *OPTIONS, *PREVIEWS, ranks=2)
    return Path(yaml.safe_load(run_config.read_text())["output_dir"]) / "previewed"


def frames_of(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        assert float(container.streams.video[0].average_rate) == 16.0
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).astype(float)


def rows_of(run_dir: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]  # the last checkpoint has a line of its own


def test_three_previews_on_two_ranks_leave_the_run_as_it_is(run_dir: Path, run_config: Path) -> None:
    launch(run_config, "name=unseen", *OPTIONS, ranks=2)
    previewed, unseen = (
        [[row["train/loss"], row["train/grad_norm"]] for row in rows_of(folder)]
        for folder in (run_dir, run_dir.parent / "unseen")
    )
    assert previewed == unseen
    assert len(unseen) == 4
    names = sorted(path.name for path in (run_dir / "previews").iterdir())
    for step in (3, 4):
        assert [name for name in names if name.startswith(f"step_{step:08d}") and name.endswith(".png")] == [
            f"step_{step:08d}.png"
        ]
    assert sum(name.endswith(".mp4") for name in names) == 6
    assert len(list(run_dir.glob("wandb/offline-run-*/files/media/videos/previews/*.mp4"))) == 6
    assert len(list(run_dir.glob("wandb/offline-run-*/files/media/images/previews/*.png"))) == 2
    page = write_report(run_dir, 4).read_text()
    assert page.split("Previews, first and last")[1].count("data:image/png;base64,") == 2


def test_the_script_makes_what_the_last_preview_shows(run_dir: Path, ranks: Ranks, tmp_path: Path) -> None:
    options = ("--run", run_dir, "--num-samples", 3, "--steps", 3, "--guidance", 5, "--output", tmp_path)
    launch("scripts.sample", *options, ranks=2, script="-m")
    alone_options = (*options[:-1], tmp_path / "alone", "--num-samples", 1)
    sample(parse_args([str(option) for option in alone_options]), ranks)
    last = sorted((run_dir / "previews").glob("step_00000004_*.mp4"))
    assert len(last) == 3
    for path in last:
        made = frames_of(tmp_path / path.name.removeprefix("step_00000004_"))
        # Other ranks made them, in other packs: float32 sums, then bytes, then H.264.
        assert np.abs(made - frames_of(path)).mean() < 0.5
    (alone,) = (tmp_path / "alone").glob("*.mp4")
    assert np.abs(frames_of(alone) - frames_of(tmp_path / alone.name)).mean() < 0.5


def test_new_prompts_in_shapes_of_their_own_and_from_a_given_picture(run_dir: Path, tmp_path: Path) -> None:
    Image.new("RGB", (60, 50), (200, 40, 40)).save(tmp_path / "red.png")
    options = ("--shape", "5x32x48", "--first-frame", tmp_path / "red.png", "--steps", 2, "--scheduler", "euler")
    prompts = ("--prompt", "clip number 3", "clip number 4", "--weights", "last", "--output", tmp_path)
    run_script("sample", "--run", run_dir, *options, *prompts)
    clips = sorted(tmp_path.glob("*.mp4"))
    assert [path.name for path in clips] == ["prompt00_5x32x48.mp4", "prompt01_5x32x48.mp4"]
    for path in clips:
        first = frames_of(path)[0].mean((0, 1))
        assert np.abs(first - (200, 40, 40)).max() < 12, "the given frame, as codec and H.264 leave it"
    with Image.open(tmp_path / "contact_sheet.png") as sheet:
        assert sheet.width > 200
