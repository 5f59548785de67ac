"""From a folder of media to a contact sheet whose first strip is the clip itself, cut as it was for training."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from adaptiveload.data.video import write_mp4
from adaptiveload.training.distributed import Ranks
from scripts.sample import parse_args, sample
from tests.launching import launch, run_script


def test_media_become_a_dataset_a_run_and_a_sheet(
    run_config: Path, ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    media = tmp_path / "media"
    media.mkdir()
    rng = np.random.default_rng(0)
    for k in range(3):
        shade = np.linspace(40 * k, 255, 20 * 64 * 64 * 3).reshape(20, 64, 64, 3).astype(np.uint8)
        write_mp4(media / f"clip{k}.mp4", shade, fps=16)
        (media / f"clip{k}.txt").write_text(f"shade number {k}")
        Image.fromarray(rng.integers(0, 255, (64, 64, 3), np.uint8)).save(media / f"picture{k}.png")
        (media / f"picture{k}.txt").write_text(f"noise number {k}")
    latents = tmp_path / "latents"
    run_script("prepare", "--input", media, "--output", latents, "--codec", "dct", "--shapes", "1,32,32;9,32,48")
    report = json.loads((latents / "report.json").read_text())
    assert report["used"] == 6
    assert report["skipped"] == []
    assert sorted(report["buckets"]) == ["1x32x32", "9x32x48"]
    keys = (
        f"data.path={latents}",
        "model.text_dim=64",
        "model.text_len=32",
        "schedule.samples_per_step=4",
        "max_steps=2",
    )
    output = tmp_path / "runs"
    launch(run_config, "name=media", f"output_dir={output}", *keys, "data.held_out_share=0.3", ranks=1)
    sheets = []
    options = ["--run", str(output / "media"), "--num-samples", "2", "--steps", "2"]
    for arguments in ([], ["--media", str(media)]):
        sample(parse_args([*options, *arguments]), ranks)
        with Image.open(output / "media" / "samples" / "contact_sheet.png") as sheet:
            sheets.append(sheet.size)
    assert sheets[1][1] > sheets[0][1], "a strip more for each sample"
    sample(parse_args([*options, "--media", str(latents)]), ranks)
    assert "holds none of the sources" in capsys.readouterr().err
    config = yaml.safe_load((output / "media" / "config.yaml").read_text())
    assert (config["schedule"]["meet"], config["cost"]["gpu"]) == ("step", "cpu"), (
        "autos are saved as what they came to"
    )
