"""Token layout, packing, and what a packed batch says about itself."""

from dataclasses import replace

import pytest
import torch
from einops import rearrange

from adaptiveload.models.flow_matching import noisy_latents, velocity_target
from adaptiveload.models.packing import PackedSample, filler_sample, pack, pad_text, patchify, unpatchify


def test_patchify_layout_is_row_major_tokens_of_channel_major_patches():
    latents = torch.arange(2 * 2 * 4 * 6).reshape(2, 2, 4, 6)
    tokens = patchify(latents, (1, 2, 2))
    assert tokens.shape == (2 * 2 * 3, 8)
    # Token 4 is frame 0, row 1, column 1: latent rows 2-3, columns 2-3 of both channels.
    assert torch.equal(tokens[4], latents[:, 0, 2:4, 2:4].reshape(-1))
    assert torch.equal(tokens[6], latents[:, 1, 0:2, 0:2].reshape(-1))
    assert torch.equal(unpatchify(tokens, (2, 2, 3), (1, 2, 2)), latents)


def test_patchify_equals_the_patch_embedding_convolution():
    latents, kernel = torch.randn(3, 4, 4, 6), torch.randn(5, 3, 2, 2, 2)
    expected = torch.nn.functional.conv3d(latents, kernel, stride=(2, 2, 2)).flatten(1).T
    actual = patchify(latents, (2, 2, 2)) @ kernel.flatten(1).T
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)  # float32 sums of 24 products in another order


def test_patchify_refuses_what_does_not_fill_patches():
    with pytest.raises(ValueError, match=r"\[3, 1, 4, 5\].*multiples of patch \(1, 2, 2\)"):
        patchify(torch.zeros(3, 1, 4, 5), (1, 2, 2))


def test_pack_sorts_by_seq_len_text_len_grid_and_keeps_every_value(samples):
    batch = pack(samples)
    order = sorted(samples, key=lambda sample: (len(sample.latents), len(sample.text), sample.grid, sample.sample_id))
    assert batch.sample_ids == tuple(sample.sample_id for sample in order)
    assert batch.keys == tuple(sample.key for sample in order)
    assert batch.grids == tuple(sample.grid for sample in order)
    assert batch.num_tokens == sum(len(sample.latents) for sample in samples)
    for name, offsets in (("latents", batch.seq_offsets), ("noise", batch.seq_offsets), ("text", batch.text_offsets)):
        parts = getattr(batch, name).split(offsets.diff().tolist())
        for part, sample in zip(parts, order, strict=True):
            assert torch.equal(part, getattr(sample, name))
    assert torch.equal(batch.sigma, torch.tensor([sample.sigma for sample in order]))
    assert torch.equal(batch.weights, torch.tensor([sample.weight for sample in order], dtype=torch.float64))
    assert {offsets.dtype for offsets in (batch.seq_offsets, batch.text_offsets, batch.segment_offsets)} == {
        torch.int32
    }
    assert torch.equal(batch.segment_offsets, batch.seq_offsets)


def test_order_of_the_input_does_not_matter(samples):
    batch, reversed_batch = pack(samples[:6]), pack([samples[index] for index in (5, 3, 1, 0, 2, 4)])
    assert reversed_batch.keys == batch.keys
    assert torch.equal(reversed_batch.latents, batch.latents)


def test_to_moves_values_and_leaves_offsets_on_the_cpu(samples):
    batch = pack(samples).to("meta")
    assert {tensor.device.type for tensor in (batch.latents, batch.noise, batch.sigma, batch.text)} == {"meta"}
    assert {tensor.device.type for tensor in (batch.seq_offsets, batch.text_offsets, batch.weights)} == {"cpu"}


def test_filler_is_finite_weightless_and_marked():
    batch = pack([filler_sample((1, 2, 2), 16, 8, key="lost", sample_id=7)])
    assert batch.is_filler == (True,)
    assert (batch.keys, batch.sample_ids) == (("lost",), (7,))
    assert batch.weights.item() == 0
    assert batch.latents.abs().max() == 0
    assert batch.text.shape == (1, 8)
    assert batch.text.abs().max() == 0


def test_samples_that_do_not_fit_are_named(samples):
    with pytest.raises(ValueError, match="without samples"):
        pack([])
    short = PackedSample("clip7", (1, 2, 3), torch.zeros(5, 16), torch.zeros(5, 16), 0.5, torch.zeros(1, 16))
    with pytest.raises(ValueError, match=r"clip7: latents is .* \[5, 16\], expected float32 \[6, 16\]"):
        pack([samples[0], short])
    half = PackedSample("clip8", (1, 1, 1), torch.zeros(1, 16), torch.zeros(1, 16).half(), 0.5, torch.zeros(1, 16))
    with pytest.raises(ValueError, match=r"clip8: noise is torch.float16"):
        pack([samples[0], half])
    text = PackedSample("clip9", (1, 1, 1), torch.zeros(1, 16), torch.zeros(1, 16), 0.5, torch.zeros(1, 17))
    with pytest.raises(ValueError, match=r"clip9: text is \[1, 17\], expected \[T, 16\]"):
        pack([samples[0], text])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_types_give_the_same_numbers_as_float32(samples, dtype):
    """Latents and text cross to the GPU in 16 bits; nothing may be rounded on the way."""
    rounded = [replace(s, latents=s.latents.to(dtype), text=s.text.bfloat16()) for s in samples]
    wide = [replace(s, latents=s.latents.float(), text=s.text.float()) for s in rounded]
    stored, expected = (
        pack([*rounded, filler_sample((1, 1, 1), 16, 16)]),
        pack([*wide, filler_sample((1, 1, 1), 16, 16)]),
    )
    assert stored.text.dtype == torch.bfloat16
    for function in (noisy_latents, velocity_target):
        assert function(stored).dtype == torch.float32
        assert torch.equal(function(stored), function(expected))
    assert torch.equal(pad_text(stored, 32, torch.float32), pad_text(expected, 32, torch.float32))


@pytest.mark.parametrize("patch", [(1, 2, 2), (1, 1, 1), (2, 1, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tokens_have_the_documented_order_whatever_the_memory_order(patch, dtype):
    latents = torch.randn(3, 4, 6, 8).to(dtype)
    pattern = "c (f pf) (y py) (x px) -> (f y x) (c pf py px)"
    expected = rearrange(latents, pattern, **dict(zip(("pf", "py", "px"), patch, strict=True)))
    for stored in (latents, latents.mT.contiguous().mT, torch.cat([latents[:1], latents])[1:]):
        assert torch.equal(patchify(stored, patch), expected)
    grid = tuple(side // size for side, size in zip((4, 6, 8), patch, strict=True))
    assert torch.equal(unpatchify(expected, grid, patch), latents)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_pinned_batch_copies_without_blocking(samples):
    batch = pack(samples).pin_memory()
    assert batch.latents.is_pinned()
    assert torch.equal(batch.to("cuda", non_blocking=True).latents.cpu(), batch.latents)
