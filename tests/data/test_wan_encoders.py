import json
import shutil

import numpy as np
import pytest
import torch

from adaptiveload.data.corpus import SourceConfig, open_corpus
from adaptiveload.data.index import ShardIndex
from adaptiveload.data.indexer import index_shards
from adaptiveload.data.media import iter_frames
from adaptiveload.data.stream import Progress, read_stream
from adaptiveload.data.wan_encoders import Umt5TextEncoder, WanVaeCodec
from adaptiveload.models.flow_matching import FlowMatchingConfig
from adaptiveload.scheduling.shapes import LatentGeometry, Shape
from adaptiveload.training.feed import MicroBatchDataset, PlannedSample
from scripts import prepare
from tests.data.media_files import grey, write_clip
from tests.tiny_wan import new_text_encoder, new_vae


@pytest.fixture(scope="module")
def vae_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    new_vae().save_pretrained(folder)
    return folder


def test_latents_are_the_normalised_mean_of_the_posterior(vae_dir):
    from diffusers import AutoencoderKLWan

    codec = WanVaeCodec(vae_dir)
    frames = np.random.default_rng(0).integers(0, 256, (9, 16, 32, 3), np.uint8)
    latents = codec.encode(frames)
    assert latents.shape == (16, 3, 2, 4)
    assert latents.dtype == np.float32
    vae = AutoencoderKLWan.from_pretrained(vae_dir).eval()
    pixels = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    with torch.no_grad():
        mean = vae.encode(pixels).latent_dist.mode()[0].numpy()
    for channel in range(16):
        expected = (mean[channel] - vae.config.latents_mean[channel]) / vae.config.latents_std[channel]
        np.testing.assert_allclose(latents[channel], expected, atol=1e-5)  # float32 rounding only
    with torch.no_grad():
        pixels = vae.decode(torch.from_numpy(mean)[None]).sample[0].permute(1, 2, 3, 0).clamp(-1, 1).numpy()
    decoded = codec.decode(latents)
    assert decoded.shape == frames.shape
    # Rounding to bytes, and to the neighbour where float32 falls on the edge.
    assert np.abs(decoded.astype(float) - (pixels + 1) * 127.5).max() < 0.51


@pytest.fixture(scope="module")
def vae_2_2_dir(tmp_path_factory):
    """As Wan 2.2 TI2V's: 48 channels of 16x16 pixels."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    blocks = {"base_dim": 4, "decoder_base_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    patches = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
    means, stds = np.linspace(-1, 1, 48).tolist(), np.linspace(0.5, 2, 48).tolist()
    vae = AutoencoderKLWan(z_dim=48, latents_mean=means, latents_std=stds, **blocks, **patches)
    folder = tmp_path_factory.mktemp("vae_2_2")
    vae.save_pretrained(folder)
    return folder


def test_wan_2_2_latents_from_media_to_a_batch(vae_2_2_dir, tmp_path):
    """Prepared, indexed again, packed, and streamed: tokens of 32x32 pixels, 192 numbers each."""
    media = tmp_path / "media"
    media.mkdir()
    for name in ("a", "b"):
        write_clip(media / f"{name}.mp4", (grey(i, 64, 96) for i in range(5))).with_suffix(".txt").write_text(name)
    arguments = ["--input", str(media), "--output", str(tmp_path / "out"), "--codec", "wan_vae"]
    arguments += ["--vae-dir", str(vae_2_2_dir)]
    with pytest.raises(SystemExit, match="height 48 is not a multiple of 32"):
        prepare.main([*arguments, "--shapes", "5,48,96"])
    prepare.main([*arguments, "--shapes", "5,64,96"])
    geometry = LatentGeometry(48, spatial_stride=16)
    index = ShardIndex.read(tmp_path / "out")
    assert index.info.geometry == geometry
    assert [index.shape(i) for i in range(2)] == [Shape(5, 64, 96)] * 2
    again, problems = index_shards(str(tmp_path / "out"))
    assert problems == []
    assert again.fingerprint == index.fingerprint
    corpus = open_corpus([SourceConfig(str(tmp_path / "out"))], geometry)
    assert corpus.table.num_tokens.tolist() == [2 * 2 * 3] * 2
    dataset = MicroBatchDataset(corpus.reader(), geometry, Shape(5, 64, 96), FlowMatchingConfig(), 0)
    batch = dataset[tuple(PlannedSample(i, corpus.place(i), 0, 0) for i in range(2))]
    assert batch.lost == []
    assert batch.packed.latents.shape == (24, 192)
    frames = np.stack([picture.rgb() for _, picture in iter_frames(media / "a.mp4", 16)])
    expected = WanVaeCodec(vae_2_2_dir).encode(frames)
    sample = corpus.reader().read(corpus.place(0))
    assert sample.latents.shape == (48, 2, 4, 6)
    # Stored as fp16; float32 sums of a batch of two have another order.
    np.testing.assert_allclose(sample.latents, expected, atol=2e-3, rtol=2e-3)
    urls = [str(path) for path in (tmp_path / "out").glob("*.tar")]
    known = (corpus.info.text_dim, corpus.info.normalization_hash, geometry)
    streamed = [found for found in read_stream(urls, 0, 1, Progress(), *known) if isinstance(found, tuple)]
    assert [shape for _, shape, _ in streamed] == [Shape(5, 64, 96)] * 2


def test_bf16_is_near_and_is_another_setting_of_the_same_latents(vae_dir):
    exact, rounded = WanVaeCodec(vae_dir), WanVaeCodec(vae_dir, precision="bf16")
    clips = list(np.random.default_rng(2).integers(0, 256, (3, 5, 16, 16, 3), np.uint8))
    for latents, expected in zip(rounded.encode_batch(clips), exact.encode_batch(clips), strict=True):
        assert latents.dtype == np.float32
        # Eight bits of mantissa through some twenty layers.
        assert np.linalg.norm(latents - expected) < 0.03 * np.linalg.norm(expected)
        assert not np.array_equal(latents, expected)
    assert rounded.settings != exact.settings
    assert rounded.normalization_hash == exact.normalization_hash


def test_large_frames_are_decoded_in_tiles_and_never_encoded_so(vae_dir):
    class SmallTiles(WanVaeCodec):
        tile_side, tile_overlap = 32, 16

    whole, tiled = WanVaeCodec(vae_dir), SmallTiles(vae_dir)
    assert tiled.normalization_hash == whole.normalization_hash
    frames = np.kron(np.random.default_rng(2).integers(0, 256, (5, 6, 8, 3)), np.ones((1, 8, 8, 1))).astype(np.uint8)
    latents = whole.encode(frames)
    np.testing.assert_array_equal(tiled.encode(frames), latents)
    seamless, blended = whole.decode(latents).astype(float), tiled.decode(latents).astype(float)
    assert blended.shape == seamless.shape == frames.shape
    # Attention over a tile is not attention over the frame; measured 2.1 of 255 on average, std 23.
    assert 0 < np.abs(blended - seamless).mean() < 5
    small = latents[:, :, :4, :4]
    np.testing.assert_array_equal(tiled.decode(small), whole.decode(small))


def test_a_prefix_of_the_frames_has_a_prefix_of_the_latents(vae_dir):
    codec = WanVaeCodec(vae_dir)
    frames = np.random.default_rng(1).integers(0, 256, (9, 16, 16, 3), np.uint8)
    np.testing.assert_allclose(codec.encode(frames[:5]), codec.encode(frames)[:, :2], atol=1e-4)  # causal VAE


def test_frames_that_the_vae_would_drop_are_refused(vae_dir):
    with pytest.raises(ValueError, match=r"4k\+1"):
        WanVaeCodec(vae_dir).encode(np.zeros((6, 16, 16, 3), np.uint8))


def test_the_hash_follows_the_constants(vae_dir, tmp_path):
    other = shutil.copytree(vae_dir, tmp_path / "vae")
    config = json.loads((other / "config.json").read_text())
    config["latents_std"][3] = 2.0
    (other / "config.json").write_text(json.dumps(config))
    assert WanVaeCodec(other).normalization_hash != WanVaeCodec(vae_dir).normalization_hash


def test_missing_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match="no VAE in"):
        WanVaeCodec(tmp_path)
    with pytest.raises(ValueError, match="tokenizer/ is missing"):
        Umt5TextEncoder(tmp_path)


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan")
    model, tokenizer = new_text_encoder()
    model.save_pretrained(folder / "text_encoder")
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


def test_text_is_cleaned_and_trimmed_and_equals_the_padded_run(text_dir):
    encoder = Umt5TextEncoder(text_dir)
    null, cat, entity = encoder.encode(["", " a   cat ", "cat &amp;amp; dog"])
    assert null.shape == (1, 16)
    np.testing.assert_array_equal(cat, encoder.encode(["a cat"])[0])
    np.testing.assert_array_equal(entity, encoder.encode(["cat & dog"])[0])
    tokens = encoder._tokenizer("a cat", padding="max_length", max_length=40, return_tensors="pt")
    with torch.no_grad():
        padded = encoder._model(tokens.input_ids, tokens.attention_mask).last_hidden_state[0]
    # The same rows up to the order of float32 sums.
    np.testing.assert_allclose(cat, padded[: len(cat)].numpy(), atol=1e-5)
    assert int(tokens.attention_mask.sum()) == len(cat)


def test_long_text_is_cut_at_512(text_dir):
    assert Umt5TextEncoder(text_dir).encode(["x " * 600])[0].shape == (512, 16)
