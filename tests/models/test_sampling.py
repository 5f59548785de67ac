"""Sampling: an exact model arrives at its data, and packing, guidance and seeds do what they say."""

import math

import pytest
import torch

from adaptiveload.models.flow_matching import FlowMatchingConfig
from adaptiveload.models.packing import patchify
from adaptiveload.models.sampling import SamplerConfig, SampleRequest, sample_latents

GRIDS = [(1, 2, 3), (3, 2, 2), (1, 3, 2)]
SCHEDULERS = ["unipc", "euler"]


@pytest.fixture
def requests_() -> list[SampleRequest]:
    generator = torch.Generator().manual_seed(3)
    null_text = torch.randn(1, 16, generator=generator)
    return [
        SampleRequest(grid, torch.randn(length, 16, generator=generator), null_text, seed)
        for grid, length, seed in zip(GRIDS, (3, 5, 3), (5, 6, 7), strict=True)
    ]


def euler(num_steps: int, guidance_scale: float = 5.0) -> SamplerConfig:
    return SamplerConfig("euler", num_steps, guidance_scale)


def changed(request: SampleRequest, **changes) -> SampleRequest:
    return SampleRequest(**(vars(request) | changes))


class ExactModel(torch.nn.Module):
    """The true velocity of a data set of one clip per shape, (x_t - x_0) / sigma."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.device_holder = torch.nn.Parameter(torch.zeros(()))
        self.data = {grid: torch.randn(4, grid[0], 2 * grid[1], 2 * grid[2]) for grid in GRIDS}

    def forward(self, latents, timestep, batch):
        clean = torch.cat([patchify(self.data[grid], (1, 2, 2)) for grid in batch.grids])
        sigma = (timestep / 1000).repeat_interleave(batch.seq_offsets.diff()).unsqueeze(1)
        return (latents - clean) / sigma


@pytest.mark.parametrize("num_steps", [1, 7])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_an_exact_model_arrives_at_its_data(config, requests_, scheduler, num_steps):
    exact = ExactModel(config)
    results = sample_latents(exact, requests_, SamplerConfig(scheduler, num_steps, 3))
    # Straight paths: both solvers are exact, Euler up to float32 rounding of each step. UniPC shows the model levels
    # that are rounded down to thousandths, and this one believes them.
    tolerance = 1e-5 if scheduler == "euler" else 0.02
    for grid, result in zip(GRIDS, results, strict=True):
        torch.testing.assert_close(result, exact.data[grid], rtol=0, atol=tolerance)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_each_sample_is_that_of_a_call_of_its_own(model, requests_, scheduler):
    config = SamplerConfig(scheduler, num_steps=3)
    together = sample_latents(model, requests_, config)
    for request, result in zip(requests_, together, strict=True):
        (alone,) = sample_latents(model, [request], config)
        assert alone.shape == (4, request.grid[0], 2 * request.grid[1], 2 * request.grid[2])
        # Float32 sums in another order, magnified by guidance and three steps.
        torch.testing.assert_close(result, alone, rtol=0, atol=1e-4)


def test_the_mmdit_samples_by_the_same_code(make_mmdit, requests_):
    mmdit = make_mmdit()
    together = sample_latents(mmdit, requests_, euler(2))
    (alone,) = sample_latents(mmdit, requests_[1:2], euler(2))
    torch.testing.assert_close(together[1], alone, rtol=0, atol=1e-4)  # as above


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_given_first_frame_stays_and_changes_the_rest(model, requests_, scheduler):
    """Between a sample with a free first frame and a picture; diffusers' TI2V pipeline overwrites it as well."""
    free = [changed(requests_[0], grid=(3, 2, 2)), *requests_[1:]]
    first = torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(8))
    given = [free[0], changed(free[1], first_frame=first), free[2]]
    config = SamplerConfig(scheduler, num_steps=3)
    without, made = sample_latents(model, free, config), sample_latents(model, given, config)
    assert torch.equal(made[1][:, :1], first)
    assert (made[1][:, 1:] - without[1][:, 1:]).abs().max() > 1e-3
    for index in (0, 2):
        torch.testing.assert_close(made[index], without[index], rtol=0, atol=1e-4)  # float32 sums in another order


def test_guidance_is_a_line_through_the_null_and_the_text_prediction(model, requests_):
    """One step is linear in the velocity: x(g) = x(0) + g * (x(1) - x(0))."""
    request = requests_[0]

    def sample(guidance_scale: float) -> torch.Tensor:
        return sample_latents(model, [request], euler(1, guidance_scale))[0]

    torch.testing.assert_close(sample(5), sample(0) + 5 * (sample(1) - sample(0)), rtol=0, atol=1e-5)
    (null_alone,) = sample_latents(model, [changed(request, text=request.negative_text)], euler(1, 1))
    torch.testing.assert_close(sample(0), null_alone, rtol=0, atol=1e-5)  # float32 rounding
    assert not torch.allclose(sample(0), sample(1), atol=1e-3)


def test_seeds_decide_unless_the_noise_is_given(model, requests_):
    def sample(**changes) -> torch.Tensor:
        return sample_latents(model, [changed(requests_[0], **changes)], euler(1))[0]

    assert torch.equal(sample(seed=1), sample(seed=1))
    assert not torch.equal(sample(seed=1), sample(seed=2))
    noise = torch.randn(4, 1, 4, 6, generator=torch.Generator().manual_seed(9))
    assert torch.equal(sample(seed=1, noise=noise), sample(seed=2, noise=noise))


def levels_seen(config, requests, sampler, flow) -> list[dict[int, float]]:
    """Timesteps that the model sees at each step, by tokens of the sample."""
    seen = []

    class Recorder(ExactModel):
        def forward(self, latents, timestep, batch):
            seen.append({len_: t.item() for len_, t in zip(batch.seq_offsets.diff().tolist(), timestep, strict=True)})
            return super().forward(latents, timestep, batch)

    sample_latents(Recorder(config), requests, sampler, flow)
    return seen


def shifted(shift: float, levels) -> list[float]:
    return [1000 * shift * s / (1 + (shift - 1) * s) for s in levels]


def test_noise_levels_are_those_of_training_for_each_shape(config, requests_):
    """Shift 3 at 6 tokens and 3 * sqrt(2) at 12, in one call."""
    flow, levels = FlowMatchingConfig(shift=3, shift_tokens=6), (1, 0.8, 0.6, 0.4, 0.2)
    seen = levels_seen(config, requests_[:2], euler(5, 1), flow)
    assert [level[6] for level in seen] == pytest.approx([1000, 12000 / 13, 9000 / 11, 2000 / 3, 3000 / 7])
    assert [level[12] for level in seen] == pytest.approx(shifted(3 * 2**0.5, levels))
    # UniPC begins just below 1, ends just above 0 and rounds down.
    levels = [1 - k * (1 - 0.001) / 5 for k in range(5)]
    seen = levels_seen(config, requests_[:2], SamplerConfig("unipc", 5, 1), flow)
    for num_tokens, shift in ((6, 3), (12, 3 * 2**0.5)):
        assert [level[num_tokens] for level in seen] == [999, *(int(level) for level in shifted(shift, levels)[1:])]
    seen = levels_seen(config, requests_[:2], SamplerConfig("euler", 2, 1, shift=2), flow)
    assert [list(level.values()) for level in seen] == [[1000, 1000], pytest.approx([2000 / 3, 2000 / 3])]


def test_a_rank_without_requests_runs_the_model_as_often(model, make_mmdit):
    for either in (model, make_mmdit()):
        calls = []
        either.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        assert sample_latents(either, [], SamplerConfig(num_steps=3)) == []
        assert len(calls) == 3


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="steps=0"):
        SamplerConfig(num_steps=0)
    with pytest.raises(ValueError, match="scheduler='dpm': use one of unipc, euler"):
        SamplerConfig(scheduler="dpm")
    for shift in (0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"shift={shift} must be positive and finite"):
            SamplerConfig(shift=shift)
    for guidance_scale in (math.nan, -math.inf):
        with pytest.raises(ValueError, match=f"guidance={guidance_scale} must be finite"):
            SamplerConfig(guidance_scale=guidance_scale)
