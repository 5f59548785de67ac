"""VideoMMDiT: diffusers' numbers for pictures and clips, no padding, independence of the packing."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from adaptiveload.models.flow_matching import noisy_latents, timesteps, weighted_losses
from adaptiveload.models.layers import sinusoid
from adaptiveload.models.mmdit import MMDiTConfig, VideoMMDiT
from adaptiveload.models.packing import filler_sample, pack
from adaptiveload.models.rope import joint_rotary_tables

# Of the last block: read by nothing, and text queries whose answers nothing reads.
UNUSED = ("attn.to_add_out.", "txt_mlp.")
UNHEARD = ("attn.add_q_proj.", "attn.norm_added_q.")


@pytest.fixture
def mmdit(make_mmdit) -> VideoMMDiT:
    return make_mmdit()


@pytest.fixture(scope="module")
def diffusers_class():
    from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel


@pytest.fixture
def plain_reference(mmdit, diffusers_class):
    """A diffusers model with the weights of `mmdit`."""
    reference = diffusers_class(**mmdit.config.to_diffusers())
    reference.load_state_dict(mmdit.state_dict(), strict=True)
    return reference


class PreciseSinusoid(torch.nn.Module):
    def forward(self, timestep: torch.Tensor) -> torch.Tensor:
        return sinusoid(1000 * timestep, 256)


@pytest.fixture
def reference(plain_reference):
    """As `plain_reference`, but its angle 1000 * t, float32 there and off by up to 1e-4, is float64 as ours is."""
    plain_reference.time_text_embed.time_proj = PreciseSinusoid()
    return plain_reference


def run_reference(reference, sample, tokens: torch.Tensor | None = None) -> torch.Tensor:
    """Velocity tokens of one sample by diffusers, in whose pipelines a token is (channels, rows, columns) too."""
    return reference(
        (sample.latents if tokens is None else tokens).unsqueeze(0),
        encoder_hidden_states=sample.text.unsqueeze(0),
        encoder_hidden_states_mask=torch.ones(1, len(sample.text)),
        timestep=torch.tensor([sample.sigma]),
        img_shapes=[[sample.grid]],
        return_dict=False,
    )[0][0]


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def is_last_blocks(name: str, parts: tuple[str, ...]) -> bool:
    return name.startswith("transformer_blocks.2.") and any(part in name for part in parts)


def run(model: VideoMMDiT, samples, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss sum and its gradient."""
    model.zero_grad()
    batch = pack(samples)
    loss = weighted_losses(batch, model(noisy_latents(batch), timesteps(batch), batch, **options)).sum()
    loss.backward()
    grads = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return loss.detach(), torch.cat(grads)


def by_sample(batch, velocity) -> dict[int, torch.Tensor]:
    return dict(zip(batch.sample_ids, velocity.split(batch.seq_offsets.diff().tolist()), strict=True))


def test_packed_batch_equals_diffusers_sample_by_sample(mmdit, samples, reference):
    """Pictures, and clips too: Qwen-Image's rope counts frames, so its class runs them as well."""
    batch = pack(samples)
    assert {grid[0] for grid in batch.grids} == {1, 2, 3}
    velocity = mmdit(batch.latents, timesteps(batch), batch)
    assert velocity.dtype == torch.float32
    for sample in samples:
        expected = run_reference(reference, sample)
        assert expected.abs().mean() > 0.1  # the comparison is not one of zeros
        # Float32 rounding of sums in another order, and of angles, which diffusers computes in float32.
        torch.testing.assert_close(by_sample(batch, velocity)[sample.sample_id], expected, rtol=0, atol=1e-5)


def test_diffusers_own_sinusoid_is_less_precise(mmdit, samples, plain_reference):
    """Nothing of diffusers replaced. The float32 angle of up to 1,000 is off by 1e-4; measured here: 2.6e-5."""
    batch = pack(samples)
    velocity = mmdit(batch.latents, timesteps(batch), batch)
    for sample in samples:
        expected = run_reference(plain_reference, sample)
        torch.testing.assert_close(by_sample(batch, velocity)[sample.sample_id], expected, rtol=0, atol=1e-4)


def test_gradients_equal_diffusers(mmdit, samples, reference):
    batch = pack(samples)
    mmdit(batch.latents, timesteps(batch), batch).square().sum().backward()
    sum(run_reference(reference, sample).square().sum() for sample in samples).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in mmdit.named_parameters():
        grad = expected.pop(name)
        if is_last_blocks(name, UNUSED):
            assert parameter.grad is None
            assert grad is None
        elif is_last_blocks(name, UNHEARD):
            assert parameter.grad.abs().max() == grad.abs().max() == 0
        else:
            assert grad.norm() > 0
            # Sums over all tokens in another order.
            assert relative(parameter.grad, grad) < 2e-5, name
    assert not expected


def test_state_dict_loads_both_ways(mmdit, reference, diffusers_class):
    state = diffusers_class(**mmdit.config.to_diffusers()).state_dict()
    mmdit.load_state_dict(state, strict=True)
    for name, tensor in mmdit.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert set(mmdit.diffusers_parameters()) == set(state)


def test_config_of_a_diffusers_checkpoint(mmdit):
    config = mmdit.config
    loaded = MMDiTConfig.from_diffusers(config.to_diffusers() | {"_class_name": "x", "guidance_embeds": False})
    assert loaded == replace(config, text_len=512)
    with pytest.raises(ValueError, match="zero_cond_t is True"):
        MMDiTConfig.from_diffusers(config.to_diffusers() | {"zero_cond_t": True})


def test_text_has_the_noisy_segments_row_and_given_frames_their_own(mmdit, samples, reference):
    """As Qwen-Image's `zero_cond_t` does it: two timesteps in the image, the noisy one in the text."""
    sample = replace(samples[1], clean_frames=1)
    batch = pack([sample, samples[0]])
    velocity = by_sample(batch, mmdit(noisy_latents(batch), timesteps(batch), batch))[1]
    tokens = noisy_latents(pack([sample]))
    assert relative(velocity, run_reference(reference, sample, tokens)) > 1e-3  # one timestep for all is another model
    rows = []
    mmdit.transformer_blocks[1].register_forward_pre_hook(lambda _, inputs: rows.append(inputs))
    mmdit(noisy_latents(batch), timesteps(batch), batch)
    embedding, text_embedding = rows[0][6:8]
    assert batch.is_clean == (False, True, False)
    assert torch.equal(text_embedding, embedding[[0, 2]])
    # With equal timesteps, two segments are one.
    same = torch.full((3,), 300.0)
    one = pack([samples[0], samples[1]])
    torch.testing.assert_close(
        mmdit(tokens_of(one), same, batch), mmdit(tokens_of(one), same[:2], one), rtol=0, atol=1e-5
    )


def tokens_of(batch) -> torch.Tensor:
    return batch.latents


def test_texts_are_neither_padded_nor_mixed(mmdit, samples):
    """A sample's own output does not change with a neighbour's text, and linear layers see sum(T) rows."""
    seen = []
    mmdit.txt_in.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    first, second = samples[0], samples[1]
    other = replace(second, text=torch.randn(7, 16))
    outputs = [
        by_sample(batch, mmdit(batch.latents, timesteps(batch), batch))[0]
        for batch in (pack([first, second]), pack([first, other]))
    ]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-6)
    assert [shape[0] for shape in seen] == [len(first.text) + len(second.text), len(first.text) + 7]


def test_gradient_does_not_depend_on_the_partition_nor_on_fillers(mmdit, samples):
    loss, grads = run(mmdit, samples)
    filler = filler_sample((1, 1, 2), token_size=16, text_dim=16)
    for partition in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[7], [1, 0], [5, 4, 2, 6, 3]]):
        parts = [run(mmdit, [*(samples[index] for index in part), filler]) for part in partition]
        # Float32 sums in another order.
        assert relative(sum(part for part, _ in parts), loss) < 1e-6
        assert relative(sum(part for _, part in parts), grads) < 1e-6
    loss, grads = run(mmdit, [filler])
    assert loss == grads.abs().max() == 0


def test_recomputation_gives_the_same_gradients(mmdit, samples):
    loss, grads = run(mmdit, samples)
    for options in ({"recompute": "full"}, {"recompute": "attention"}, {"recompute": "attention", "permille": 500}):
        again_loss, again_grads = run(mmdit, samples, **options)
        assert torch.equal(loss, again_loss)
        assert torch.equal(grads, again_grads)  # the same operations on the same numbers


def test_bf16_weights_keep_the_fp32_parts(mmdit, samples):
    batch = pack(samples)
    expected = mmdit(batch.latents, timesteps(batch), batch)
    half = copy.deepcopy(mmdit)
    for module in (half.img_in, half.txt_in, half.txt_norm, half.transformer_blocks):
        module.bfloat16()
    streams = []
    half.transformer_blocks[1].register_forward_pre_hook(lambda _, inputs: streams.append(inputs))
    velocity = half(batch.latents, timesteps(batch), batch)
    x, y, gate, text_x, text_y, text_gate, embedding, text_embedding, rotary, _ = streams[0]
    assert {t.dtype for t in (x, gate, text_x, text_gate, embedding, text_embedding, velocity)} == {torch.float32}
    assert {t.dtype for t in (y, text_y)} == {torch.bfloat16}
    assert {t.dtype for t in rotary} == {torch.complex64}
    # bfloat16 has 8 bits: each product is off by 2**-9, and a dozen of them follow one another.
    assert relative(velocity, expected) < 2e-2


def test_image_positions_are_centred_and_text_follows_them():
    image, text = joint_rotary_tables(((2, 5, 4), (1, 2, 2)), [3, 1], (4, 10, 10), torch.device("cpu"))
    assert image.shape == (44, 12)
    angles = torch.angle(image[:40].unflatten(0, (2, 5, 4)))
    # The first pair of an axis turns by one radian a place.
    assert angles[:, 0, 0, 0].tolist() == [0, 1]
    torch.testing.assert_close(angles[0, :, 0, 2], torch.tensor([-3.0, -2, -1, 0, 1]))
    torch.testing.assert_close(angles[0, 0, :, 7], torch.tensor([-2.0, -1, 0, 1]))
    torch.testing.assert_close(torch.angle(text[:, 0]), torch.tensor([2.0, 3, 4 - 2 * math.pi, 1]))


def test_user_mistakes_are_named(mmdit, samples):
    batch = pack([replace(samples[0], text=torch.zeros(0, 16))])
    with pytest.raises(ValueError, match="sample sample0: 0 text rows"):
        mmdit(batch.latents, timesteps(batch), batch)
    batch = pack(samples)
    with pytest.raises(ValueError, match="recompute is 'some'"):
        mmdit(batch.latents, timesteps(batch), batch, recompute="some")
    with pytest.raises(ValueError, match=r"axes_dims_rope=\[16, 56, 56\] must be even and add up to"):
        MMDiTConfig(attention_head_dim=64)


def test_a_new_model_predicts_zero_and_learns(mmdit, samples):
    torch.manual_seed(0)
    model = VideoMMDiT(mmdit.config)
    batch = pack(samples)
    assert model(batch.latents, timesteps(batch), batch).abs().max() == 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = weighted_losses(batch, model(noisy_latents(batch), timesteps(batch), batch)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
