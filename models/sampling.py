"""Sampling: Euler steps from noise to latents, many samples of any shapes at once, with classifier-free guidance.

Legend: `C` latent channels, `f`, `h`, `w` latent frames, rows, columns, `S` tokens of one sample.
"""

from collections.abc import Sequence

import numpy as np
import torch

from adaptiveload.models.architectures import VideoTransformer
from adaptiveload.models.flow_matching import FlowMatchingConfig, noise_shift, sample_generator
from adaptiveload.models.packing import Grid, PackedBatch, PackedSample, pack, patchify, unpatchify


@torch.no_grad()
def euler_sample(
    model: VideoTransformer,
    grids: Sequence[Grid],
    texts: Sequence[torch.Tensor],
    null_text: torch.Tensor,
    seeds: Sequence[int],
    *,
    num_steps: int = 50,
    guidance_scale: float = 5.0,
    flow: FlowMatchingConfig | None = None,
    first_frames: Sequence[torch.Tensor | None] | None = None,
) -> list[torch.Tensor]:
    """Latents [C, f, h, w] of each sample, float32 on the CPU.

    A sample depends on its own grid, text and seed, not on the others. Under FSDP all ranks must call this with equal
    `num_steps`.

    Args:
        model: Predicts the velocity; on the device where it should run.
        grids: Tokens of each sample along frames, rows, columns.
        texts: Text embedding of each sample [T, text_dim].
        null_text: Text embedding of the empty prompt [T, text_dim].
        seeds: Of the noise of each sample.
        num_steps: Model evaluations per sample.
        guidance_scale: 1 follows the text alone; above 1 moves away from the null text, at twice the cost.
        flow: The shift of the noise schedule is that of training.
        first_frames: For image-to-video: the first latent frame [C, 1, h, w] of each sample, or None where it is free.

    Raises:
        ValueError: If the lists differ in length or are empty, or `num_steps` is less than 1.
    """
    if not len(grids) == len(texts) == len(seeds) or not grids:
        raise ValueError(f"{len(grids)} grids, {len(texts)} texts and {len(seeds)} seeds: give one of each per sample")
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}; it must be at least 1")
    flow = flow or FlowMatchingConfig()
    tokens = [_initial_noise(model, grid, seed) for grid, seed in zip(grids, seeds, strict=True)]
    schedulers = [_scheduler(noise_shift(len(noise), flow), num_steps) for noise in tokens]
    all_texts = [*texts, *[null_text] * len(texts)] if guidance_scale != 1 else list(texts)
    device = next(model.parameters()).device
    given = [
        None if frame is None else patchify(frame.float(), model.config.patch_size).to(device)
        for frame in first_frames or [None] * len(grids)
    ]
    batch = _conditions(grids, all_texts, tokens[0].shape[1], [frame is not None for frame in given]).to(device)
    tokens = [_keep(noise.to(device), frame) for noise, frame in zip(tokens, given, strict=True)]
    for step in range(num_steps):
        timesteps = [scheduler.timesteps[step] for scheduler in schedulers]
        velocities = _velocities(model, batch, tokens, timesteps, guidance_scale)
        tokens = [
            _keep(scheduler.step(velocity, timestep, noisy).prev_sample, frame)
            for scheduler, velocity, timestep, noisy, frame in zip(
                schedulers, velocities, timesteps, tokens, given, strict=True
            )
        ]
    patch = model.config.patch_size
    return [unpatchify(clean.cpu(), grid, patch) for clean, grid in zip(tokens, grids, strict=True)]


def _initial_noise(model: VideoTransformer, grid: Grid, seed: int) -> torch.Tensor:
    """Gaussian tokens float32 [S, token_size], drawn in the latent layout as in training."""
    patch = model.config.patch_size
    latent_size = (model.config.out_channels, *(count * size for count, size in zip(grid, patch, strict=True)))
    rng = sample_generator(seed, source="sampling", key="", epoch=0, repeat=0)
    return patchify(torch.from_numpy(rng.standard_normal(latent_size, dtype=np.float32)), patch)


def _keep(tokens: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    """The tokens, with the given ones, if any, at their start."""
    return tokens if given is None else torch.cat([given, tokens[len(given) :]])


def _scheduler(shift: float, num_steps: int):
    # Imported here because diffusers takes seconds to import, and training can do without it.
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    # Given explicitly: by default diffusers shifts the last level twice, and ends at sigma .009 for 5 steps of shift 3.
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / num_steps, num_steps))
    return scheduler


def _conditions(
    grids: Sequence[Grid], texts: Sequence[torch.Tensor], token_size: int, have_first_frame: Sequence[bool]
) -> PackedBatch:
    """Shapes and texts as a batch; `sample_ids` counts the texts, grids repeat for the null texts; no latents."""
    samples = []
    for index, text in enumerate(texts):
        grid = grids[index % len(grids)]
        unset = torch.zeros(grid[0] * grid[1] * grid[2], token_size)
        clean_frames = int(have_first_frame[index % len(grids)])
        samples.append(
            PackedSample(str(index), grid, unset, unset, 1.0, text, sample_id=index, clean_frames=clean_frames)
        )
    return pack(samples)


def _velocities(
    model: VideoTransformer,
    batch: PackedBatch,
    tokens: list[torch.Tensor],
    timesteps: list[torch.Tensor],
    guidance_scale: float,
) -> list[torch.Tensor]:
    """Guided velocity of each sample, float32 [S, token_size]: null + guidance_scale * (text - null)."""
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
    return [null + guidance_scale * (text - null) for text, null in pairs]
