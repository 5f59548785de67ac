"""Keyed random numbers, the distribution of noise levels, and the loss that leaves fillers out."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from adaptiveload.models.flow_matching import (
    LOSS_WEIGHTINGS,
    SIGMA_SAMPLINGS,
    FlowMatchingConfig,
    draw,
    draw_sigma,
    mode_sigma,
    noise_shift,
    noisy_latents,
    per_sample_loss,
    sample_generator,
    shift_sigma,
    timesteps,
    velocity_target,
    weighted_losses,
)
from adaptiveload.models.packing import PackedSample, pack

KEY = {"seed": 3, "source": "clips", "key": "a/1", "epoch": 0, "repeat": 0}


def test_draws_depend_on_every_part_of_the_key_and_on_nothing_else():
    config = FlowMatchingConfig()
    first = draw(sample_generator(**KEY), (4, 1, 2, 2), 1, config)
    np.random.default_rng(0).random(10)  # other generators do not matter
    again = draw(sample_generator(**KEY), (4, 1, 2, 2), 1, config)
    assert first.sigma == again.sigma
    assert np.array_equal(first.noise, again.noise)
    for name, value in (("seed", 4), ("source", "stills"), ("key", "a/2"), ("epoch", 1), ("repeat", 1)):
        other = draw(sample_generator(**(KEY | {name: value})), (4, 1, 2, 2), 1, config)
        assert other.sigma != first.sigma, name
        assert not np.array_equal(other.noise, first.noise), name


def test_key_parts_cannot_run_into_each_other():
    one = sample_generator(0, "ab", "c", 1, 11).random()
    assert one != sample_generator(0, "a", "bc", 1, 11).random()
    assert one != sample_generator(0, "ab", "c", 11, 1).random()


def test_keyed_numbers_are_the_same_on_every_machine():
    """Frozen: a change here would change every resumed run."""
    result = draw(sample_generator(**KEY), (1, 1, 1, 2), 32_760, FlowMatchingConfig())
    assert result.sigma == pytest.approx(0.43531624829798754, rel=1e-12)  # exp differs by an ulp between C libraries
    assert result.noise.dtype == np.float32
    np.testing.assert_allclose(result.noise.ravel(), [-0.59423375, 0.7993096], rtol=1e-6)


def test_options_do_not_move_the_noise():
    noises = [
        draw(
            sample_generator(**KEY), (1, 1, 2, 2), 1, FlowMatchingConfig(uniform_share=share, text_dropout=share)
        ).noise
        for share in (0.0, 1.0)
    ]
    assert np.array_equal(*noises)


def test_shift_follows_the_square_root_of_tokens_and_never_falls_below_one():
    config = FlowMatchingConfig()
    assert noise_shift(32_760, config) == 3
    assert noise_shift(75_600, config) == pytest.approx(4.557, abs=1e-3)  # 81x720x1280; Wan's own is 5
    assert noise_shift(1_560, config) == 1  # a picture of 480x832
    sigma = 0.3
    logit = math.log(shift_sigma(sigma, 3) / (1 - shift_sigma(sigma, 3)))
    assert logit == pytest.approx(math.log(sigma / (1 - sigma)) + math.log(3))


def test_sigma_distribution():
    """20,000 draws: a share has a standard error below .0036; the bounds are four of them."""
    rng = np.random.default_rng(0)

    def draws(**options) -> np.ndarray:
        config = FlowMatchingConfig(**options)
        return np.array([draw_sigma(rng, 1_560, config) for _ in range(20_000)])

    normal = draws(uniform_share=0)
    # P(logit < 1) = .8413 and P(logit < -1) = .1587 of a standard normal.
    assert np.mean(normal < 1 / (1 + math.exp(-1))) == pytest.approx(0.8413, abs=0.0145)
    assert np.mean(normal < 1 / (1 + math.exp(1))) == pytest.approx(0.1587, abs=0.0145)
    uniform = draws(uniform_share=1)
    assert np.mean(uniform < 0.1) == pytest.approx(0.1, abs=0.0145)
    assert np.mean(uniform > 0.75) == pytest.approx(0.25, abs=0.0145)
    mixed = draws()
    # Below .02, logit -3.9, the logit-normal has 5e-5 of its mass and a tenth of the uniform has .002.
    assert 0.001 < np.mean(mixed < 0.02) < 0.004


def test_mode_sampling_is_sd3s():
    """The formula of diffusers' training_utils, and against the distribution of its own draws."""
    from diffusers.training_utils import compute_density_for_timestep_sampling

    config = FlowMatchingConfig(sigma_sampling="mode", uniform_share=0)
    rng = np.random.default_rng(0)
    ours = np.array([draw_sigma(rng, 1_560, config) for _ in range(20_000)])
    generator = torch.Generator().manual_seed(0)
    theirs = compute_density_for_timestep_sampling("mode", 20_000, mode_scale=1.29, generator=generator).numpy()
    for level in (0.1, 0.3, 0.5, 0.7, 0.9):
        # Two shares of 20,000 draws differ by a standard error of .005 at most; four of them.
        assert np.mean(ours < level) == pytest.approx(np.mean(theirs < level), abs=0.02), level
    assert (mode_sigma(0.0, 1.29), mode_sigma(1.0, 1.29)) == pytest.approx((1, 0))
    with pytest.raises(ValueError, match=r"mode_scale is 2; above 1\.752"):
        FlowMatchingConfig(mode_scale=2)


def test_constant_shift_and_uniform_sampling():
    config = FlowMatchingConfig(sigma_sampling="uniform", shift_rule="constant", shift=5)
    assert noise_shift(1, config) == noise_shift(10**6, config) == 5
    rng = np.random.default_rng(0)
    draws = np.array([draw_sigma(rng, 1, config) for _ in range(20_000)])
    # P(shifted < s') = P(u < s' / (5 - 4 s')); at s' = .5 that is a sixth.
    assert np.mean(draws < 0.5) == pytest.approx(1 / 6, abs=0.0145)
    # Every option takes as many numbers: what is drawn afterwards stays.
    left = set()
    for sampling in SIGMA_SAMPLINGS:
        rng = sample_generator(**KEY)
        draw_sigma(rng, 1, FlowMatchingConfig(sigma_sampling=sampling))
        left.add(rng.random())
    assert len(left) == 1


def test_loss_weightings():
    from diffusers.training_utils import compute_loss_weighting_for_sd3

    sigmas = np.linspace(0, 1, 1001)
    weights = {name: np.array([weight(sigma) for sigma in sigmas]) for name, weight in LOSS_WEIGHTINGS.items()}
    expected = compute_loss_weighting_for_sd3("cosmap", torch.from_numpy(sigmas)).numpy()
    np.testing.assert_allclose(weights["cosmap"], expected, rtol=1e-12)
    for name, values in weights.items():
        assert np.trapezoid(values, sigmas) == pytest.approx(1, abs=1e-5), name  # a mean of 1 over uniform sigma
        assert (values >= -1e-12).all(), name
    assert weights["bell"][[0, -1]] == pytest.approx(0, abs=1e-12)
    drawn = draw(sample_generator(**KEY), (1, 1, 1, 1), 1, FlowMatchingConfig(loss_weighting="cosmap"))
    assert drawn.loss_weight == LOSS_WEIGHTINGS["cosmap"](drawn.sigma)
    assert draw(sample_generator(**KEY), (1, 1, 1, 1), 1, FlowMatchingConfig()).loss_weight == 1


def test_text_dropout_share():
    config = FlowMatchingConfig(text_dropout=0.25)
    dropped = [draw(sample_generator(0, "s", str(key), 0, 0), (1,), 1, config).drops_text for key in range(4000)]
    assert np.mean(dropped) == pytest.approx(0.25, abs=0.028)  # four standard errors


def test_clean_first_frames_of_clips_alone():
    config = FlowMatchingConfig(clean_first_frame=0.25)
    draws = [draw(sample_generator(0, "s", str(key), 0, 0), (1, 2, 1, 1), 1, config) for key in range(4000)]
    assert np.mean([drawn.clean_frames for drawn in draws]) == pytest.approx(0.25, abs=0.028)  # four standard errors
    always = FlowMatchingConfig(clean_first_frame=1)
    assert draw(sample_generator(**KEY), (1, 1, 2, 2), 1, always).clean_frames == 0, (
        "of a picture nothing would be left"
    )
    # Other numbers do not move with it.
    assert draw(sample_generator(**KEY), (1, 2, 2, 2), 1, always).sigma == pytest.approx(
        draw(sample_generator(**KEY), (1, 2, 2, 2), 1, FlowMatchingConfig()).sigma
    )


def test_given_frames_stay_clean_and_out_of_the_loss(samples):
    samples = [replace(s, clean_frames=s.grid[0] - 1) for s in samples]
    batch = pack(samples)
    noisy, target = noisy_latents(batch), velocity_target(batch)
    velocity = torch.randn(batch.latents.shape, generator=torch.Generator().manual_seed(0))
    times = dict(zip(batch.segment_offsets.tolist(), timesteps(batch).tolist(), strict=False))
    start, expected = 0, 0.0
    for row, sample_id in enumerate(batch.sample_ids):
        sample = samples[sample_id]
        end, given = start + len(sample.latents), sample.clean_frames * sample.grid[1] * sample.grid[2]
        assert torch.equal(noisy[start : start + given], sample.latents[:given])
        assert not torch.equal(noisy[start + given : end], sample.latents[given:])
        if given:
            assert times[start] == 0
        assert times[start + given] == 1000 * torch.tensor(sample.sigma)
        error = (velocity - target)[start + given : end].square().mean()
        expected += batch.weights[row].float() * error
        start = end
    # Another order of sums.
    torch.testing.assert_close(weighted_losses(batch, velocity).sum(), expected, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="3 clean frames of 3"):
        pack([replace(samples[1], clean_frames=3)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_dropout": 1.5}, "text_dropout is 1.5"),
        ({"shift": 0}, "shift is 0"),
        ({"logit_std": -1}, "logit_std is -1"),
        ({"sigma_sampling": "normal"}, "sigma_sampling is 'normal'; it is one of logit_normal, uniform, mode"),
        ({"loss_weighting": "snr"}, "loss_weighting is 'snr'; it is one of none, cosmap, bell"),
        ({"shift_rule": "flux"}, "shift_rule is 'flux'"),
    ],
)
def test_config_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        FlowMatchingConfig(**options)


def test_interpolation_target_and_timestep(samples):
    batch = pack(samples)
    start = 0
    noisy = noisy_latents(batch)
    for row, sample_id in enumerate(batch.sample_ids):
        sample = samples[sample_id]
        rows = slice(start, start := start + len(sample.latents))
        sigma = torch.tensor(sample.sigma)
        assert torch.equal(noisy[rows], (1 - sigma) * sample.latents + sigma * sample.noise)
        assert torch.equal(velocity_target(batch)[rows], sample.noise - sample.latents)
        assert timesteps(batch)[row] == 1000 * sigma
    assert timesteps(batch).dtype == torch.float32
    # The target is the derivative of the path.
    torch.testing.assert_close(
        noisy + (1 - batch.sigma.repeat_interleave(batch.seq_offsets.diff())).unsqueeze(1) * velocity_target(batch),
        batch.noise,
        rtol=0,
        atol=1e-6,  # float32 rounding of numbers near 1
    )


def test_loss_is_a_mean_per_sample_and_a_sum_over_samples(samples):
    batch = pack(samples)
    velocity = torch.randn(batch.latents.shape, generator=torch.Generator().manual_seed(0))
    target = velocity_target(batch)
    lengths = batch.seq_offsets.diff().tolist()
    expected = torch.stack(
        [(v - t).square().mean() for v, t in zip(velocity.split(lengths), target.split(lengths), strict=True)]
    )
    losses = per_sample_loss(velocity, target, batch.seq_offsets)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)  # float32 means in another order
    weighted = (batch.weights.float() * expected).sum()
    torch.testing.assert_close(weighted_losses(batch, velocity).sum(), weighted, rtol=1e-6, atol=0)


def test_loss_of_a_bf16_velocity_is_computed_in_fp32(samples):
    batch = pack(samples)
    velocity = torch.randn(batch.latents.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert weighted_losses(batch, velocity).sum() == weighted_losses(batch, velocity.float()).sum()


def with_filler(samples, value: float):
    """The samples, and among them a filler whose own numbers are `value`."""
    tokens = torch.full((12, 16), value)
    filler = PackedSample("bad", (1, 3, 4), tokens, tokens, 0.5, torch.zeros(0, 16), weight=value, is_filler=True)
    return pack([*samples, filler])


def test_nan_of_a_filler_reaches_neither_loss_nor_gradient(samples):
    batch, clean = with_filler(samples, math.nan), pack(samples)
    is_filler = torch.tensor(batch.is_filler).repeat_interleave(batch.seq_offsets.diff())
    velocity = torch.randn(clean.latents.shape, generator=torch.Generator().manual_seed(0))
    dirty = torch.full(batch.latents.shape, math.nan)
    dirty[~is_filler] = velocity
    velocity.requires_grad_()
    dirty.requires_grad_()
    loss = weighted_losses(batch, dirty).sum()
    assert loss == weighted_losses(clean, velocity).sum()
    loss.backward()
    weighted_losses(clean, velocity).sum().backward()
    assert torch.equal(dirty.grad[~is_filler], velocity.grad)
    assert torch.equal(dirty.grad[is_filler], torch.zeros(12, 16))


def test_nothing_but_fillers_is_a_zero_with_a_graph():
    batch = with_filler([], math.nan)
    velocity = torch.full((12, 16), math.nan, requires_grad=True)
    loss = weighted_losses(batch, velocity).sum()
    assert loss == 0
    loss.backward()
    assert torch.equal(velocity.grad, torch.zeros(12, 16))
