"""Euler sampling: an exact model arrives at its data, and packing, guidance and seeds do what they say."""

import pytest
import torch

from adaptiveload.models.flow_matching import FlowMatchingConfig
from adaptiveload.models.packing import patchify
from adaptiveload.models.sampling import euler_sample

GRIDS = [(1, 2, 3), (3, 2, 2), (1, 3, 2)]
SEEDS = [5, 6, 7]


@pytest.fixture
def texts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(length, 16, generator=generator) for length in (3, 5, 3)]


@pytest.fixture
def null_text():
    return torch.randn(1, 16, generator=torch.Generator().manual_seed(4))


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
def test_an_exact_model_arrives_at_its_data(config, texts, null_text, num_steps):
    exact = ExactModel(config)
    results = euler_sample(exact, GRIDS, texts, null_text, SEEDS, num_steps=num_steps, guidance_scale=3)
    for grid, result in zip(GRIDS, results, strict=True):
        # Straight paths: Euler is exact, up to float32 rounding of each step.
        torch.testing.assert_close(result, exact.data[grid], rtol=0, atol=1e-5)


def test_each_sample_is_that_of_a_call_of_its_own(model, texts, null_text):
    together = euler_sample(model, GRIDS, texts, null_text, SEEDS, num_steps=3)
    for index, (grid, text, seed) in enumerate(zip(GRIDS, texts, SEEDS, strict=True)):
        (alone,) = euler_sample(model, [grid], [text], null_text, [seed], num_steps=3)
        assert alone.shape == (4, grid[0], 2 * grid[1], 2 * grid[2])
        # Float32 sums in another order, magnified by guidance and three steps.
        torch.testing.assert_close(together[index], alone, rtol=0, atol=1e-4)


def test_the_mmdit_samples_by_the_same_code(make_mmdit, texts, null_text):
    mmdit = make_mmdit()
    together = euler_sample(mmdit, GRIDS, texts, null_text, SEEDS, num_steps=2)
    (alone,) = euler_sample(mmdit, GRIDS[1:2], texts[1:2], null_text, SEEDS[1:2], num_steps=2)
    torch.testing.assert_close(together[1], alone, rtol=0, atol=1e-4)  # as above


def test_a_given_first_frame_stays_and_changes_the_rest(model, texts, null_text):
    """Between a sample with a free first frame and a picture; diffusers' TI2V pipeline overwrites it as well."""
    grids = [(3, 2, 2), (3, 2, 2), (1, 3, 2)]
    first = torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(8))
    free = euler_sample(model, grids, texts, null_text, SEEDS, num_steps=3)
    given = euler_sample(model, grids, texts, null_text, SEEDS, num_steps=3, first_frames=[None, first, None])
    assert torch.equal(given[1][:, :1], first)
    assert (given[1][:, 1:] - free[1][:, 1:]).abs().max() > 1e-3
    for index in (0, 2):
        torch.testing.assert_close(given[index], free[index], rtol=0, atol=1e-4)  # float32 sums in another order


def test_guidance_is_a_line_through_the_null_and_the_text_prediction(model, texts, null_text):
    """One step is linear in the velocity: x(g) = x(0) + g * (x(1) - x(0))."""

    def sample(guidance_scale: float) -> torch.Tensor:
        return euler_sample(
            model, GRIDS[:1], texts[:1], null_text, SEEDS[:1], num_steps=1, guidance_scale=guidance_scale
        )[0]

    torch.testing.assert_close(sample(5), sample(0) + 5 * (sample(1) - sample(0)), rtol=0, atol=1e-5)
    (null_alone,) = euler_sample(model, GRIDS[:1], [null_text], null_text, SEEDS[:1], num_steps=1, guidance_scale=1)
    torch.testing.assert_close(sample(0), null_alone, rtol=0, atol=1e-5)  # float32 rounding
    assert not torch.allclose(sample(0), sample(1), atol=1e-3)


def test_seeds_decide(model, texts, null_text):
    def sample(seed: int) -> torch.Tensor:
        return euler_sample(model, GRIDS[:1], texts[:1], null_text, [seed], num_steps=1)[0]

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))


def test_noise_levels_are_those_of_training_for_each_shape(config, texts, null_text):
    """Shift 3 at 6 tokens and 3 * sqrt(2) at 12, in one call; diffusers' UniPC has the same levels for shift 3."""
    seen = []

    class Recorder(ExactModel):
        def forward(self, latents, timestep, batch):
            seen.append({len_: t.item() for len_, t in zip(batch.seq_offsets.diff().tolist(), timestep, strict=True)})
            return super().forward(latents, timestep, batch)

    flow = FlowMatchingConfig(shift=3, shift_tokens=6)
    euler_sample(Recorder(config), GRIDS[:2], texts[:2], null_text, SEEDS[:2], num_steps=5, guidance_scale=1, flow=flow)
    assert [levels[6] for levels in seen] == pytest.approx([1000, 12000 / 13, 9000 / 11, 2000 / 3, 3000 / 7])
    shift = 3 * 2**0.5
    expected = [1000 * shift * s / (1 + (shift - 1) * s) for s in (1, 0.8, 0.6, 0.4, 0.2)]
    assert [levels[12] for levels in seen] == pytest.approx(expected)


def test_mistakes_are_named(model, texts, null_text):
    with pytest.raises(ValueError, match="3 grids, 2 texts and 3 seeds"):
        euler_sample(model, GRIDS, texts[:2], null_text, SEEDS)
    with pytest.raises(ValueError, match="num_steps is 0"):
        euler_sample(model, GRIDS, texts, null_text, SEEDS, num_steps=0)
