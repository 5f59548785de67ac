import numpy as np
import pytest

from adaptiveload.data.latent_codecs import DctCodec, psnr_db


def moving_gradient(frames, height, width):
    t, y, x = np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), indexing="ij")
    red = 128 + 100 * np.sin((x + 2 * t) / 12)
    green = 128 + 100 * np.cos((y - t) / 15)
    blue = 40 + 2 * t + y / 2
    return np.clip(np.stack([red, green, blue], -1), 0, 255).astype(np.uint8)


@pytest.mark.parametrize("shape", [(1, 16, 16), (5, 32, 48), (33, 64, 16)])
def test_round_trip_of_a_smooth_clip(shape):
    codec = DctCodec()
    frames = moving_gradient(*shape)
    latents = codec.encode(frames)
    assert latents.dtype == np.float32
    assert latents.shape == (16, (shape[0] - 1) // 4 + 1, shape[1] // 8, shape[2] // 8)
    decoded = codec.decode(latents)
    assert decoded.dtype == np.uint8
    assert decoded.shape == frames.shape
    # Waves of 75 pixels and more lie within the kept frequencies up to blocking; white noise would give about 9 dB.
    assert psnr_db(frames, decoded) > 30


def test_one_colour_is_kept_to_rounding():
    frames = np.empty((9, 16, 16, 3), np.uint8)
    frames[:] = (200, 90, 17)
    codec = DctCodec()
    # A constant block is its DC coefficient alone; fp16 storage of about 2 * 441 / 2^11 costs below half a level.
    decoded = codec.decode(codec.encode(frames).astype(np.float16).astype(np.float32))
    assert np.abs(decoded.astype(int) - frames.astype(int)).max() <= 1


def test_decoding_is_the_inverse_on_latents():
    codec = DctCodec()
    rng = np.random.default_rng(0)
    # Small latents, so that no pixel leaves 0..255 and only rounding to bytes is lost.
    latents = (0.1 * rng.standard_normal((16, 3, 4, 5))).astype(np.float32)
    again = codec.encode(codec.decode(latents))
    # Rounding noise has std 0.29 per pixel and an orthonormal basis keeps it; the smallest std of a channel is 18.
    assert np.abs(again - latents).max() < 6 * 0.29 * np.sqrt(3) / 18


def test_prefix_of_latents_is_the_encoding_of_the_prefix():
    codec = DctCodec()
    frames = np.random.default_rng(1).integers(0, 256, (17, 16, 32, 3), np.uint8)
    latents = codec.encode(frames)
    for k in range(5):
        prefix = codec.encode(frames[: 4 * k + 1])
        # Equal up to the order of float32 sums of 256 pixels.
        np.testing.assert_allclose(prefix, latents[:, : k + 1], atol=1e-4)


def test_a_still_clip_has_the_motion_channels_of_zero_motion():
    frames = np.repeat(np.random.default_rng(2).integers(0, 256, (1, 16, 16, 3), np.uint8), 5, axis=0)
    moving = frames.copy()
    moving[1:3] = 255 - moving[1:3]
    codec = DctCodec()
    still, changed = codec.encode(frames)[:, 1], codec.encode(moving)[:, 1]
    assert np.ptp(still[6]) < 1e-4  # temporal frequency 1 is 0 everywhere, up to float32 rounding
    assert np.ptp(changed[6]) > 0.1


def test_normalization_hash_is_stable_and_depends_on_the_constants(monkeypatch):
    before = DctCodec().normalization_hash
    assert before == DctCodec().normalization_hash
    monkeypatch.setattr("adaptiveload.data.latent_codecs._LATER_STD", np.full(16, 2, np.float32))
    assert DctCodec().normalization_hash != before


@pytest.mark.parametrize("shape", [(2, 16, 16, 3), (5, 12, 16, 3), (5, 16, 20, 3), (5, 16, 16, 4), (0, 16, 16, 3)])
def test_wrong_sizes_are_refused(shape):
    with pytest.raises(ValueError, match="frames"):
        DctCodec().encode(np.zeros(shape, np.uint8))


def test_wrong_latents_are_refused():
    with pytest.raises(ValueError, match="latents"):
        DctCodec().decode(np.zeros((4, 1, 2, 2), np.float32))


def test_psnr():
    black = np.zeros((1, 8, 8, 3), np.uint8)
    assert psnr_db(black, black) == 100
    assert psnr_db(black, black + 255) == pytest.approx(0)
    assert psnr_db(black, black + 1) == pytest.approx(48.13, abs=0.01)  # 20 log10(255)
