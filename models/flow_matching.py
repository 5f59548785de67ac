"""Flow matching: noise levels, noisy inputs, targets and the loss that every partition of a step agrees on.

`x_t = (1 - sigma) * latents + sigma * noise`, target `noise - latents`, the model sees `timestep = 1000 * sigma`
(Wan 2.1, SD3). Random numbers are keyed by the sample, not by the rank, so that a step's gradient does not depend
on who computes what.

Legend: `B` samples, `S` tokens of one sample, `N` = sum of S.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from adaptiveload.kernels.segments import equal_runs
from adaptiveload.models.packing import PackedBatch, to_device

# Weight w(sigma) of a sample's loss, by the name in `objective.loss_weighting`. The loss is that of the velocity, whose
# errors differ little between noise levels: weights only say which levels matter, and have a mean near 1.
LOSS_WEIGHTINGS: dict[str, Callable[[float], float]] = {
    "none": lambda sigma: 1.0,
    # SD3, section 3.1: twice as much at .5 as at either end.
    "cosmap": lambda sigma: 2 / (math.pi * (1 - 2 * sigma + 2 * sigma * sigma)),
    # DiffSynth-Studio's for Wan: nothing at either end, mean 1 over uniform sigma.
    "bell": lambda sigma: (math.exp(-2 * (sigma - 0.5) ** 2) - _BELL_EDGE) / (_BELL_MEAN - _BELL_EDGE),
}
_BELL_EDGE = math.exp(-0.5)
_BELL_MEAN = math.sqrt(math.pi / 2) * math.erf(math.sqrt(0.5))
SIGMA_SAMPLINGS = ("logit_normal", "uniform", "mode")
SHIFT_RULES = ("tokens", "constant")

# The model embeds sigma on Wan's scale of 1,000 training steps.
TIMESTEP_SCALE = 1000.0


@dataclass
class FlowMatchingConfig:
    """How training draws noise levels and drops captions.

    Attributes:
        sigma_sampling: Distribution of sigma before the shift: "logit_normal", "uniform", or "mode", SD3's heavy-tailed
            one.
        logit_mean: Of "logit_normal": mean of logit(sigma).
        logit_std: Standard deviation of logit(sigma); 1 is SD3's choice.
        mode_scale: Of "mode": weight of the middle levels; 1.29 is SD3's choice.
        uniform_share: Share of samples whose sigma is uniform before the shift instead, so that both ends, which the
            logit-normal hardly visits, are trained too.
        shift_rule: "tokens": the shift grows with sqrt(tokens) and is never below 1; "constant": `shift` for all.
        shift: Shift of sigma, for a sample of `shift_tokens` tokens.
        shift_tokens: Tokens at which `shift` holds. The defaults give Wan's own 3 at 81x480x832 and 4.6 at 81x720x1280.
        loss_weighting: Factor of a sample's loss by its sigma: "none", "cosmap" (SD3: twice as much at .5 as at either
            end) or "bell" (DiffSynth-Studio's for Wan: nothing at either end). Z does not know of it; held-out loss
            goes without.
        text_dropout: Share of samples that are trained with the null text, for classifier-free guidance.
        clean_first_frame: Share of clips whose first latent frame is given and not predicted: image-to-video, as
            Wan 2.2 TI2V is used. It needs no new weights.
    """

    sigma_sampling: str = "logit_normal"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    uniform_share: float = 0.1
    shift_rule: str = "tokens"
    shift: float = 3.0
    shift_tokens: int = 32_760
    loss_weighting: str = "none"
    text_dropout: float = 0.1
    clean_first_frame: float = 0.0

    def __post_init__(self) -> None:
        for name in ("uniform_share", "text_dropout", "clean_first_frame"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"objective.{name} is {getattr(self, name)}; it is a share and lies in [0, 1]")
        for name in ("logit_std", "shift", "shift_tokens"):
            if not getattr(self, name) > 0:
                raise ValueError(f"objective.{name} is {getattr(self, name)}; it must be positive")
        for name, known in (
            ("sigma_sampling", SIGMA_SAMPLINGS),
            ("shift_rule", SHIFT_RULES),
            ("loss_weighting", LOSS_WEIGHTINGS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"objective.{name} is {getattr(self, name)!r}; it is one of {', '.join(known)}")
        if not 0 <= self.mode_scale <= 2 / (math.pi - 2):
            raise ValueError(
                f"objective.mode_scale is {self.mode_scale}; above {2 / (math.pi - 2):.3f} or below 0 sigma "
                "would leave [0, 1]"
            )


class Draw(NamedTuple):
    """All random numbers of one sample.

    Attributes:
        sigma: Noise level in [0, 1].
        drops_text: Whether the null text replaces the caption.
        noise: float32, in the latent layout [C, f, h, w].
        clean_frames: First latent frames that are given, not predicted; 0 for a picture.
        loss_weight: w(sigma), a factor of the sample's loss.
    """

    sigma: float
    drops_text: bool
    noise: np.ndarray
    clean_frames: int
    loss_weight: float


def sample_generator(seed: int, source: str, key: str, epoch: int, repeat: int) -> np.random.Generator:
    """Random generator of one draw of one sample: the same on every rank, machine and partition.

    Philox on the CPU, because CUDA generators differ between GPU models.
    """
    words = "\0".join((str(seed), source, key, str(epoch), str(repeat)))
    digest = hashlib.blake2b(words.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def noise_shift(num_tokens: int, config: FlowMatchingConfig) -> float:
    """Shift s of `shift_sigma` for a sample of `num_tokens` tokens; by tokens max(1, shift * sqrt(S / shift_tokens)).

    The resolution rule of SD3, section 5.3.2: more tokens of one picture need more noise to hide it equally well.
    """
    if config.shift_rule == "constant":
        return config.shift
    return max(1.0, config.shift * math.sqrt(num_tokens / config.shift_tokens))


def shift_sigma(sigma: float, shift: float) -> float:
    """Sigma of a shifted schedule, s * sigma / (1 + (s - 1) * sigma): adds ln(s) to logit(sigma). SD3, eq. 23."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def draw_sigma(rng: np.random.Generator, num_tokens: int, config: FlowMatchingConfig) -> float:
    """Noise level of a sample of `num_tokens` tokens, in [0, 1]. Takes the same numbers from `rng` in every case."""
    choice, uniform = rng.random(2)
    normal = rng.standard_normal()
    if config.sigma_sampling == "uniform" or choice < config.uniform_share:
        sigma = uniform
    elif config.sigma_sampling == "mode":
        sigma = mode_sigma(uniform, config.mode_scale)
    else:
        sigma = 1 / (1 + math.exp(-(config.logit_mean + config.logit_std * normal)))
    return shift_sigma(float(sigma), noise_shift(num_tokens, config))


def mode_sigma(uniform: float, scale: float) -> float:
    """Sigma with most mass in the middle and heavy tails, from a uniform number. SD3, eq. 20."""
    return 1 - uniform - scale * (math.cos(math.pi / 2 * uniform) ** 2 - 1 + uniform)


def draw(rng: np.random.Generator, latent_size: Sequence[int], num_tokens: int, config: FlowMatchingConfig) -> Draw:
    """Noise level, text dropout, noise and clean frames of one sample, always in this order.

    Args:
        rng: From `sample_generator`, fresh.
        latent_size: C, f, h, w of the sample's latents.
        num_tokens: S of the sample.
        config: Distribution of the noise level, and the shares of dropped texts and of clean first frames.
    """
    sigma = draw_sigma(rng, num_tokens, config)
    drops_text = bool(rng.random() < config.text_dropout)
    noise = rng.standard_normal(tuple(latent_size), dtype=np.float32)
    is_given = rng.random() < config.clean_first_frame and latent_size[1] > 1
    return Draw(sigma, drops_text, noise, int(is_given), LOSS_WEIGHTINGS[config.loss_weighting](sigma))


def token_sigma(batch: PackedBatch) -> torch.Tensor:
    """Noise level of every token: float32 [N, 1] on the device of the batch."""
    lengths = to_device(batch.segment_offsets.diff(), batch.sigma.device)
    return batch.sigma.repeat_interleave(lengths, output_size=batch.num_tokens).unsqueeze(1)


def noisy_latents(batch: PackedBatch) -> torch.Tensor:
    """x_t of every token, which of given ones is the clean latent: float32 [N, token_size] on the batch's device."""
    sigma = token_sigma(batch)
    return (1 - sigma) * batch.latents + sigma * batch.noise


def velocity_target(batch: PackedBatch) -> torch.Tensor:
    """What the model should predict: float32 [N, token_size]."""
    return batch.noise - batch.latents


def timesteps(batch: PackedBatch) -> torch.Tensor:
    """Of each segment, float32 [G] in [0, 1000]. Never rounded to bfloat16, in which 998.4 is 1000."""
    return TIMESTEP_SCALE * batch.sigma


def per_sample_loss(velocity: torch.Tensor, target: torch.Tensor, seq_offsets: torch.Tensor) -> torch.Tensor:
    """Mean squared error of each sample over its own elements.

    Args:
        velocity: Prediction [N, token_size].
        target: float32 [N, token_size].
        seq_offsets: First token of each sample, and N: [B + 1], CPU.

    Returns:
        float32 [B].
    """
    per_token = (velocity.float() - target).square().mean(1)  # [N]
    runs = equal_runs(seq_offsets)
    parts = per_token.split([count * length for count, length in runs])
    return torch.cat([part.unflatten(0, (count, -1)).mean(1) for part, (count, _) in zip(parts, runs, strict=True)])


def weighted_losses(batch: PackedBatch, velocity: torch.Tensor) -> torch.Tensor:
    """w_i * l_i of each real sample of a micro-batch, in its order: float32 [real samples].

    Sum them and divide by the weights of the whole step; a mean per micro-batch would make a sample's weight depend on
    its neighbours. l_i is the mean over the elements that the sample predicts: given frames are left out of it, and w_i
    stays. Fillers are cut away before any arithmetic, so that not even a NaN of theirs reaches a gradient. With
    nothing but fillers there is no number, and yet the sum depends on `velocity`, so that backward runs on every rank.

    Args:
        batch: The micro-batch that was predicted.
        velocity: Prediction [N, token_size].
    """
    if all(batch.is_filler):
        return velocity[:0].float().sum(1)
    # Every sample has exactly one segment that is not clean.
    lengths, weights = batch.segment_offsets.diff(), batch.weights
    samples = iter(batch.is_filler)
    counts = torch.tensor([not is_clean and not next(samples) for is_clean in batch.is_clean])
    target = velocity_target(batch)
    if not counts.all():
        velocity, target = (_select(tokens, lengths, counts) for tokens in (velocity, target))
        lengths, weights = lengths[counts], weights[~torch.tensor(batch.is_filler)]
    seq_offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    losses = per_sample_loss(velocity, target, seq_offsets)
    return losses * to_device(weights.float(), losses.device)


def _select(tokens: torch.Tensor, lengths: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    parts = tokens.split(lengths.tolist())
    return torch.cat([part for part, is_kept in zip(parts, keep.tolist(), strict=True) if is_kept])
