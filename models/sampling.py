"""Sampling: from noise to latents, many samples of any shapes at once, with classifier-free guidance.

The solvers are diffusers': Wan's UniPC, and Euler. Each sample has a schedule of its own, shifted as its length was in
training.

Legend: `C` latent channels, `f`, `h`, `w` latent frames, rows, columns, `S` tokens of one sample.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from adaptiveload.models.architectures import VideoTransformer
from adaptiveload.models.flow_matching import FlowMatchingConfig, noise_shift, sample_generator
from adaptiveload.models.packing import Grid, PackedBatch, PackedSample, filler_sample, pack, patchify, unpatchify

SCHEDULERS = ("unipc", "euler")


@dataclass(frozen=True)
class SamplerConfig:
    """How latents are sampled.

    Attributes:
        scheduler: "unipc", with which Wan samples, or "euler".
        num_steps: Model evaluations per sample.
        guidance_scale: 1 follows the text alone; above 1 moves away from the negative text, at twice the cost.
        shift: Of the noise schedule, for all samples; None takes that of training, which depends on their lengths.
    """

    scheduler: str = "unipc"
    num_steps: int = 50
    guidance_scale: float = 5.0
    shift: float | None = None

    def __post_init__(self) -> None:
        # Messages name the keys of `previews` and the options of scripts.sample.
        if self.scheduler not in SCHEDULERS:
            raise ValueError(f"scheduler={self.scheduler!r}: use one of {', '.join(SCHEDULERS)}")
        if self.num_steps < 1:
            raise ValueError(f"steps={self.num_steps} must be at least 1")
        if not math.isfinite(self.guidance_scale):
            raise ValueError(f"guidance={self.guidance_scale} must be finite")
        if self.shift is not None and not 0 < self.shift < math.inf:
            raise ValueError(f"shift={self.shift} must be positive and finite")


@dataclass(frozen=True)
class SampleRequest:
    """One sample to make. It depends on nothing but this, not on the other samples.

    Attributes:
        grid: Tokens along frames, rows and columns.
        text: Text embedding [T, text_dim].
        negative_text: What guidance moves away from [T, text_dim]: the embedding of the empty or of a negative prompt.
        seed: Of the noise.
        first_frame: For image-to-video: the first latent frame [C, 1, h, w]; None leaves it free.
        noise: Latents to begin from [C, f, h, w] in place of those of `seed`.
    """

    grid: Grid
    text: torch.Tensor
    negative_text: torch.Tensor
    seed: int = 0
    first_frame: torch.Tensor | None = None
    noise: torch.Tensor | None = None


@torch.no_grad()
def sample_latents(
    model: VideoTransformer,
    requests: Sequence[SampleRequest],
    config: SamplerConfig,
    flow: FlowMatchingConfig | None = None,
) -> list[torch.Tensor]:
    """Latents [C, f, h, w] of each request, float32 on the CPU.

    The model runs `num_steps` times, whatever is requested, nothing included: under FSDP all ranks call this together,
    each with its own requests.

    Args:
        model: Predicts the velocity; on the device where it should run.
        requests: What to make.
        config: How.
        flow: Training's objective, for the shift.
    """
    device = next(model.parameters()).device
    if not requests:
        _run_along(model, config.num_steps, device)
        return []
    flow = flow or FlowMatchingConfig()
    patch = model.config.patch_size
    tokens = [patchify(_initial_noise(model, request), patch).to(device) for request in requests]
    given = [None if r.first_frame is None else patchify(r.first_frame.float(), patch).to(device) for r in requests]
    schedulers = [_scheduler(config, noise_shift(len(noise), flow)) for noise in tokens]
    batch = _conditions(requests, tokens[0].shape[1], with_negative=config.guidance_scale != 1).to(device)
    tokens = [_keep(noise, frame) for noise, frame in zip(tokens, given, strict=True)]
    for step in range(config.num_steps):
        timesteps = [scheduler.timesteps[step] for scheduler in schedulers]
        velocities = _velocities(model, batch, tokens, timesteps, config.guidance_scale)
        tokens = [
            _keep(scheduler.step(velocity, timestep, noisy, return_dict=False)[0], frame)
            for scheduler, velocity, timestep, noisy, frame in zip(
                schedulers, velocities, timesteps, tokens, given, strict=True
            )
        ]
    return [unpatchify(clean.cpu(), request.grid, patch) for clean, request in zip(tokens, requests, strict=True)]


def _run_along(model: VideoTransformer, num_steps: int, device: torch.device) -> None:
    """Run the model on next to nothing, so that the ranks that sample find their peer in every collective."""
    token_size = model.config.in_channels * model.config.patch_volume
    batch = pack([filler_sample((1, 1, 1), token_size, model.config.text_dim)]).to(device)
    for _ in range(num_steps):
        model(batch.noise, torch.zeros(1, device=device), batch)


def _initial_noise(model: VideoTransformer, request: SampleRequest) -> torch.Tensor:
    """Latents [C, f, h, w] of Gaussian noise, float32, drawn as in training."""
    if request.noise is not None:
        return request.noise.float()
    patch = model.config.patch_size
    size = (model.config.out_channels, *(count * side for count, side in zip(request.grid, patch, strict=True)))
    rng = sample_generator(request.seed, source="sampling", key="", epoch=0, repeat=0)
    return torch.from_numpy(rng.standard_normal(size, dtype=np.float32))


def _keep(tokens: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    """The tokens, with the given ones, if any, at their start."""
    return tokens if given is None else torch.cat([given, tokens[len(given) :]])


def _scheduler(config: SamplerConfig, trained_shift: float) -> Any:
    """One sample's solver, which keeps its history."""
    # Imported here because diffusers takes seconds to import, and training can do without it.
    shift = trained_shift if config.shift is None else config.shift
    scheduler: Any
    if config.scheduler == "unipc":
        from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

        # As in the folders of Wan 2.1 and 2.2. Timesteps are whole numbers there, rounded down.
        scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, num_train_timesteps=1000
        )
        scheduler.set_timesteps(config.num_steps)
    else:
        from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        # Given explicitly: by default diffusers shifts the last level twice, and ends at .009 for 5 steps of shift 3.
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / config.num_steps, config.num_steps))
    scheduler.set_begin_index(0)
    return scheduler


def _conditions(requests: Sequence[SampleRequest], token_size: int, *, with_negative: bool) -> PackedBatch:
    """Shapes and texts as a batch; `sample_ids` counts the texts, then the negative ones; no latents."""
    texts = [request.text for request in requests]
    if with_negative:
        texts += [request.negative_text for request in requests]
    samples = []
    for index, text in enumerate(texts):
        request = requests[index % len(requests)]
        unset = torch.zeros(request.grid[0] * request.grid[1] * request.grid[2], token_size)
        clean_frames = int(request.first_frame is not None)
        samples.append(
            PackedSample(str(index), request.grid, unset, unset, 1.0, text, sample_id=index, clean_frames=clean_frames)
        )
    return pack(samples)


def _velocities(
    model: VideoTransformer,
    batch: PackedBatch,
    tokens: list[torch.Tensor],
    timesteps: list[torch.Tensor],
    guidance_scale: float,
) -> list[torch.Tensor]:
    """Guided velocity of each sample, float32 [S, token_size]: negative + guidance_scale * (text - negative)."""
    owners = [index % len(tokens) for index in batch.sample_ids]
    latents = torch.cat([tokens[owner] for owner in owners])
    noisy = iter(owners)
    timestep = torch.tensor([0.0 if is_clean else float(timesteps[next(noisy)]) for is_clean in batch.is_clean])
    timestep = timestep.to(latents.device)
    parts = model(latents, timestep, batch).split(batch.seq_offsets.diff().tolist())
    by_index = dict(zip(batch.sample_ids, parts, strict=True))
    if len(by_index) == len(tokens):
        return [by_index[index] for index in range(len(tokens))]
    pairs = [(by_index[index], by_index[index + len(tokens)]) for index in range(len(tokens))]
    return [negative + guidance_scale * (text - negative) for text, negative in pairs]
