"""The commands of docs/finetune.md, run as they stand on a tiny pipeline folder, up to a video by diffusers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from adaptiveload.data.video import write_mp4
from adaptiveload.models.flow_matching import timesteps
from adaptiveload.models.packing import PackedSample, pack, patchify
from adaptiveload.models.wan import WanTransformer
from adaptiveload.training.config import load_config
from adaptiveload.training.trained_weights import TrainedWeights
from scripts.export import export_run
from tests.launching import ROOT, environment
from tests.tiny_wan import TEXT_DIM, save_pipeline

SIZES = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 48, "num_layers": 2, "freq_dim": 16}
# What a toy needs beside the documented words: sizes of the folder's model, and minutes less.
TINY = [f"model.{key}={value}" for key, value in SIZES.items()]
TINY += [f"model.text_dim={TEXT_DIM}", "max_steps=3", "data.num_workers=0", "data.held_out_share=0"]
TINY += ["tracking.wandb=disabled", "optimizer.lr=0.05", "optimizer.warmup_steps=0"]


def documented_commands() -> list[str]:
    block = re.search(r"```bash\n(.*?)```", (ROOT / "docs" / "finetune.md").read_text(), re.DOTALL)
    assert block is not None
    commands = [line for line in block[1].splitlines() if not line.startswith("#")]
    assert [line.split()[0] for line in commands] == ["export", "python", "accelerate", "python"]
    return commands


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the documented commands were run."""
    from diffusers import WanTransformer3DModel

    folder = tmp_path_factory.mktemp("finetune")
    torch.manual_seed(0)
    save_pipeline(folder / "Wan2.1-T2V-1.3B-Diffusers", WanTransformer3DModel(**SIZES, text_dim=TEXT_DIM))
    (folder / "clips").mkdir()
    for k in range(4):
        shade = np.linspace(40 * k, 255, 12 * 32 * 48 * 3).reshape(12, 32, 48, 3).astype(np.uint8)
        write_mp4(folder / "clips" / f"clip{k}.mp4", shade, fps=16)
        (folder / "clips" / f"clip{k}.txt").write_text("a shade that grows")
    for name in ("configs", "scripts", "train.py", "adaptiveload"):  # as in a checkout
        (folder / name).symlink_to(ROOT / name)
    given, prepare, train, export = documented_commands()
    prepare = re.sub(r'--shapes "[^"]*"', '--shapes "9,32,48;5,32,32"', prepare)
    shell = "\n".join(["set -e", given, prepare, " ".join([train, *TINY]), export])
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-c", shell],
        cwd=folder,
        env=environment() | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_file_of_the_documented_commands_makes_a_video_in_diffusers(folder: Path, monkeypatch) -> None:
    from diffusers import WanPipeline, WanTransformer3DModel

    monkeypatch.chdir(folder)  # paths of the commands are relative
    run_dir, wan = Path("runs/wan_1_3b_lora"), Path("Wan2.1-T2V-1.3B-Diffusers")
    pipeline = WanPipeline.from_pretrained(wan)
    generator = torch.Generator().manual_seed(0)
    latents, text = torch.randn(1, 16, 2, 4, 6, generator=generator), torch.randn(1, 512, TEXT_DIM, generator=generator)
    inputs = (latents, torch.tensor([700.0]), text)
    with torch.no_grad():
        before = pipeline.transformer(*inputs, return_dict=False)[0]
        pipeline.load_lora_weights(str(folder / "lora"))
        loaded = pipeline.transformer(*inputs, return_dict=False)[0]
    assert (loaded - before).abs().max() > 1e-2, "three steps at a high rate must show"

    # Merged into a folder, and by our own model: the same.
    export_run(run_dir, folder / "merged", ema=True, merge=True)
    merged = WanTransformer3DModel.from_pretrained(folder / "merged")
    config = load_config(run_dir / "config.yaml")
    ours, weights = WanTransformer(config.model), TrainedWeights(run_dir, config, averaged=True)
    ours.load_state_dict(weights.read(list(weights.shapes)))
    assert weights.step == 3
    sample = PackedSample("k", (2, 2, 3), patchify(latents[0], (1, 2, 2)), torch.zeros(12, 64), 0.7, text[0])
    batch = pack([sample])
    with torch.no_grad():
        torch.testing.assert_close(merged(*inputs, return_dict=False)[0], loaded, rtol=0, atol=1e-5)
        found = ours(batch.latents, timesteps(batch), batch)
    torch.testing.assert_close(found, patchify(loaded[0], (1, 2, 2)), rtol=0, atol=1e-5)

    made = pipeline("a shade", num_frames=5, height=32, width=32, num_inference_steps=2, output_type="np").frames[0]
    assert made.shape == (5, 32, 32, 3)
    assert np.isfinite(made).all()
    with pytest.raises(ValueError, match="exists"):
        export_run(run_dir, Path("lora"), ema=True)
