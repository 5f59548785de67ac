"""Round trips with diffusers' pipelines: the same noise and texts give the same latents, there and here."""

from pathlib import Path

import av
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from adaptiveload.data.video import write_mp4
from adaptiveload.data.wan_encoders import Umt5TextEncoder, WanVaeCodec
from adaptiveload.models.architectures import VideoTransformer, new_transformer
from adaptiveload.models.layers import sinusoid
from adaptiveload.models.mmdit import MMDiTConfig, VideoMMDiT
from adaptiveload.models.packing import unpatchify
from adaptiveload.models.pretrained import load_pretrained, read_model_config
from adaptiveload.models.sampling import SamplerConfig, SampleRequest, sample_latents
from scripts.export import export_run
from tests.launching import launch, run_script
from tests.tiny_wan import save_pipeline

GRID, SHAPE = (3, 2, 3), (9, 32, 48)
SAMPLER = SamplerConfig("unipc", num_steps=4, guidance_scale=5.0, shift=3.0)


@pytest.fixture(scope="module")
def pipeline_dir(run_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny `WanPipeline` whose transformer is of the sizes of `run_config`."""
    from diffusers import WanTransformer3DModel

    from adaptiveload.models.wan import WanConfig

    config = WanConfig(**yaml.safe_load(run_config.read_text())["model"])
    torch.manual_seed(7)
    return save_pipeline(tmp_path_factory.mktemp("pipeline"), WanTransformer3DModel(**config.to_diffusers()))


@pytest.fixture(scope="module")
def noise() -> torch.Tensor:
    return torch.randn(16, 3, 4, 6, generator=torch.Generator().manual_seed(1))


def load(folder: Path) -> VideoTransformer:
    model = new_transformer(read_model_config(folder))
    load_pretrained(model, folder)
    return model


def run_pipeline(pipe, noise: torch.Tensor, **options) -> torch.Tensor:
    """Latents that `pipe` makes, with the sizes and the sampler of this file."""
    pipe.set_progress_bar_config(disable=True)
    frames, height, width = SHAPE
    sizes = {"num_frames": frames, "height": height, "width": width}
    steps = {"num_inference_steps": SAMPLER.num_steps, "guidance_scale": SAMPLER.guidance_scale}
    return pipe(latents=noise[None], output_type="latent", **sizes, **steps, **options).frames[0]


def requested(folder: Path, noise: torch.Tensor | None, **options) -> SampleRequest:
    text, null = map(torch.from_numpy, Umt5TextEncoder(folder).encode(["a cat", ""]))
    return SampleRequest(GRID, text, null, noise=noise, **options)


def assert_equal_latents(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    # Float32 sums in another order, magnified by guidance over the steps; measured 2e-6 at most.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_sampling_equals_wan_pipeline(pipeline_dir: Path, noise: torch.Tensor) -> None:
    from diffusers import WanPipeline

    theirs = run_pipeline(WanPipeline.from_pretrained(pipeline_dir), noise, prompt="a cat")
    (ours,) = sample_latents(load(pipeline_dir), [requested(pipeline_dir, noise)], SAMPLER)
    assert_equal_latents(ours, theirs)
    assert (ours - noise).abs().mean() > 0.1, "the model has a say"


def test_image_to_video_equals_diffusers_with_expanded_timesteps(pipeline_dir: Path, noise: torch.Tensor) -> None:
    from diffusers import WanImageToVideoPipeline, WanPipeline

    text_to_video = WanPipeline.from_pretrained(pipeline_dir)
    text, null = text_to_video.encode_prompt("a cat", max_sequence_length=512)
    parts = ("tokenizer", "text_encoder", "vae", "scheduler", "transformer")
    pipe = WanImageToVideoPipeline(**{name: getattr(text_to_video, name) for name in parts}, expand_timesteps=True)
    picture = np.random.default_rng(3).integers(0, 256, (*SHAPE[1:], 3), np.uint8)
    theirs = run_pipeline(pipe, noise, image=Image.fromarray(picture), prompt_embeds=text, negative_prompt_embeds=null)
    first = torch.from_numpy(WanVaeCodec(pipeline_dir / "vae").encode(picture[None]))
    (ours,) = sample_latents(load(pipeline_dir), [requested(pipeline_dir, noise, first_frame=first)], SAMPLER)
    assert_equal_latents(ours, theirs)
    (free,) = sample_latents(load(pipeline_dir), [requested(pipeline_dir, noise)], SAMPLER)
    assert (ours - free)[:, 1:].abs().mean() > 1e-2


def test_trained_and_exported_weights_sample_alike_in_the_pipeline(
    pipeline_dir: Path, run_config: Path, noise: torch.Tensor, tmp_path: Path
) -> None:
    from diffusers import WanPipeline, WanTransformer3DModel

    options = (f"output_dir={tmp_path}", "name=tuned", "max_steps=3", "evaluation.max_samples=0", "optimizer.lr=0.02")
    launch(run_config, *options, f"model.pretrained={pipeline_dir}", ranks=1)
    export_run(tmp_path / "tuned", tmp_path / "exported", ema=False)
    transformer = WanTransformer3DModel.from_pretrained(tmp_path / "exported")
    pipe = WanPipeline.from_pretrained(pipeline_dir, transformer=transformer)
    theirs = run_pipeline(pipe, noise, prompt="a cat")
    (ours,) = sample_latents(load(tmp_path / "exported"), [requested(pipeline_dir, noise)], SAMPLER)
    assert_equal_latents(ours, theirs)
    (before,) = sample_latents(load(pipeline_dir), [requested(pipeline_dir, noise)], SAMPLER)
    assert (ours - before).abs().max() > 1e-2, "three steps have changed something"
    # The whole tuned pipeline as one folder, by the command line.
    pipe.save_pretrained(tmp_path / "whole")
    shape = "x".join(map(str, SHAPE))
    command = ("--model", tmp_path / "whole", "--prompt", "a cat", "--shape", shape, "--output", tmp_path / "samples")
    run_script("sample", *command, "--steps", 4, "--guidance", 5, "--shift", 3, "--fps", 24)
    request = requested(pipeline_dir, noise=None)
    (latents,) = sample_latents(load(tmp_path / "whole"), [request], SAMPLER)
    write_mp4(tmp_path / "expected.mp4", WanVaeCodec(pipeline_dir / "vae").decode(latents.numpy()), 24)
    made, expected = read_mp4(tmp_path / "samples" / f"prompt00_{shape}.mp4"), read_mp4(tmp_path / "expected.mp4")
    assert made.shape == (*SHAPE, 3)
    assert np.abs(made - expected).mean() < 0.5  # bytes that were rounded the other way, through H.264


def read_mp4(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        assert float(container.streams.video[0].average_rate) == 24
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).astype(float)


def test_the_mmdit_equals_qwen_image_pipeline_for_a_picture(tmp_path: Path) -> None:
    """Without guidance, whose result that pipeline scales to the norm of the prediction without."""
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline, QwenImageTransformer2DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "axes_dims_rope": (4, 4, 4), "num_layers": 2}
    torch.manual_seed(7)
    transformer = QwenImageTransformer2DModel(**MMDiTConfig(**sizes, text_dim=16).to_diffusers())
    transformer.save_pretrained(tmp_path / "transformer")
    model = load(tmp_path)
    assert isinstance(model, VideoMMDiT)
    # Its angle 1000 * t is float32 and off by up to 1e-4; ours is float64.
    transformer.time_text_embed.time_proj = PreciseSinusoid()
    pipe = QwenImagePipeline(FlowMatchEulerDiscreteScheduler(shift=3.0), None, None, None, transformer)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(2)
    text = torch.randn(5, 16, generator=generator)
    tokens = torch.randn(6, 64, generator=generator)
    theirs = pipe(
        prompt_embeds=text[None],
        prompt_embeds_mask=torch.ones(1, 5),
        latents=tokens[None],
        height=32,
        width=48,
        num_inference_steps=4,
        output_type="latent",
    ).images[0]
    noise = unpatchify(tokens, (1, 2, 3), (1, 2, 2))
    sampler = SamplerConfig("euler", num_steps=4, guidance_scale=1.0, shift=3.0)
    (ours,) = sample_latents(model, [SampleRequest((1, 2, 3), text, text, noise=noise)], sampler)
    assert_equal_latents(ours, unpatchify(theirs, (1, 2, 3), (1, 2, 2)))


class PreciseSinusoid(torch.nn.Module):
    def forward(self, timestep: torch.Tensor) -> torch.Tensor:
        return sinusoid(1000 * timestep, 256)
