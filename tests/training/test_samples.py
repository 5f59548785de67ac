"""What is sampled and decoded: choice of captions, codecs and text encoders that belong to the data, the dealing."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from adaptiveload.data.corpus import SourceConfig, open_corpus
from adaptiveload.data.latent_codecs import DctCodec
from adaptiveload.data.wan_encoders import WanVaeCodec
from adaptiveload.models.sampling import SamplerConfig
from adaptiveload.scheduling.order import held_out_mask
from adaptiveload.scheduling.shapes import LatentGeometry, Shape
from adaptiveload.training.contact_sheet import shown_frames
from adaptiveload.training.distributed import Ranks
from adaptiveload.training.previews import PreviewConfig
from adaptiveload.training.samples import (
    Wanted,
    choose_samples,
    deal,
    fit_picture,
    open_codec,
    open_text_encoder,
)
from scripts.sample import give_first_frame
from tests.tiny_wan import new_text_encoder, new_vae

CPU = torch.device("cpu")


def wanted(key: str, shape: Shape) -> Wanted:
    text = torch.zeros(2, 4)
    return Wanted(key, shape, "", text, text, 0, 16.0)


def test_the_longest_captions_of_different_sources_are_chosen_by_turns(dataset: Path) -> None:
    corpus = open_corpus([SourceConfig(path=str(dataset))], LatentGeometry())
    held_out = held_out_mask(corpus.source_names, 0.4, 0)[corpus.source_codes]
    rows = choose_samples(corpus, 0.4, 0, 5)
    assert len(set(corpus.source_codes[rows].tolist())) == 5
    assert [bool(held_out[row]) for row in rows] == [False, True, False, True, False]
    for side in (False, True):
        tokens = corpus.table.num_tokens[held_out == side]
        assert corpus.table.num_tokens[rows[int(side)]] == tokens.max()
    assert len(choose_samples(corpus, 0.4, 0, 100)) == len(corpus.source_names)
    assert not held_out_mask(corpus.source_names, 0, 0).any()
    assert len(choose_samples(corpus, 0, 0, 3)) == 3


def test_the_codec_must_be_that_of_the_latents(dataset: Path, tmp_path: Path) -> None:
    info = open_corpus([SourceConfig(path=str(dataset))], LatentGeometry()).info
    assert open_codec(info, None, CPU, "--vae-dir").name == "dct"
    with pytest.raises(ValueError, match=r"--vae-dir=vae, but the latents are dct's"):
        open_codec(info, "vae", CPU, "--vae-dir")
    with pytest.raises(ValueError, match=r"are of dct \(0000\), --vae-dir=None is dct"):
        open_codec(replace(info, normalization_hash="0000"), None, CPU, "--vae-dir")
    new_vae().save_pretrained(tmp_path)
    codec = WanVaeCodec(tmp_path)
    latents = replace(info, codec="wan_vae", normalization_hash=codec.normalization_hash)
    assert open_codec(latents, tmp_path, CPU, "x").normalization_hash == codec.normalization_hash
    with pytest.raises(ValueError, match=r"latents are wan_vae's: name the folder of its VAE with previews\.vae_dir"):
        open_codec(latents, None, CPU, "previews.vae_dir")
    with pytest.raises(ValueError, match=r"--vae-dir=.* is wan_vae"):
        open_codec(replace(latents, normalization_hash="0000"), tmp_path, CPU, "--vae-dir")


def test_the_text_encoder_must_be_that_of_the_data(tmp_path: Path) -> None:
    encoder = open_text_encoder("hash-16-8", None, CPU)
    assert (encoder.name, encoder.dim, encoder.max_len) == ("hash-16-8", 16, 8)
    with pytest.raises(ValueError, match=f"--text-encoder-dir {tmp_path}, but .* by hash-16-8, which needs none"):
        open_text_encoder("hash-16-8", tmp_path, CPU)
    with pytest.raises(ValueError, match="umt5-4096-512: name its folder with --text-encoder-dir"):
        open_text_encoder("umt5-4096-512", None, CPU)
    model, tokenizer = new_text_encoder()
    model.save_pretrained(tmp_path / "text_encoder")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert open_text_encoder("umt5-16-512", tmp_path, CPU).dim == 16
    with pytest.raises(ValueError, match=r"by umt5-4096-512, but .* holds umt5-16-512"):
        open_text_encoder("umt5-4096-512", tmp_path, CPU)


def test_a_picture_is_cut_to_its_middle() -> None:
    picture = np.zeros((40, 100, 3), np.uint8)
    picture[:, 25:75] = 200  # wider than the cut: the filter looks over its edge
    assert (fit_picture(picture, Shape(9, 16, 16)) == 200).all()
    whole = fit_picture(picture, Shape(1, 16, 48))
    assert whole.shape == (1, 16, 48, 3)
    assert whole[0, 8, 0].max() == 0
    assert whole[0, 8, 24].min() == 200


def test_a_picture_has_no_first_frame_to_give() -> None:
    with pytest.raises(ValueError, match="one frame"):
        give_first_frame([wanted("picture", Shape(1, 32, 32))], "data", DctCodec())
    with pytest.raises(ValueError, match="in their own shapes"):
        give_first_frame([wanted("clip", Shape(5, 32, 32))], "data", DctCodec())


@pytest.mark.parametrize(("count", "ranks"), [(3, 2), (1, 4), (5, 4), (8, 2)])
def test_ranks_have_equally_many_rounds_and_every_sample_one_place(count: int, ranks: int) -> None:
    samples = [wanted(str(i), Shape(1 + 4 * (i % 2), 32, 32)) for i in range(count)]
    every = [Ranks(rank, ranks, CPU, None) for rank in range(ranks)]  # type: ignore[arg-type]
    for limit in (1, 30, 1000):
        dealt = [deal(samples, SamplerConfig(), LatentGeometry(), 24, rank, limit) for rank in every]
        assert len({len(rounds) for rounds in dealt}) == 1
        assert sorted(i for rounds in dealt for numbers in rounds for i in numbers) == list(range(count))


def test_mistakes_of_the_configuration_are_named() -> None:
    for change, message in (
        ({"every_steps": -1}, "every_steps=-1"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"steps": 0}, "previews: steps=0"),
        ({"guidance": float("nan")}, "previews: guidance=nan"),
        ({"scheduler": "ddim"}, "previews: scheduler='ddim'"),
    ):
        with pytest.raises(ValueError, match=message):
            PreviewConfig(**change).check()


def test_a_sheet_shows_six_frames_of_a_side_that_fits() -> None:
    frames = np.zeros((81, 480, 832, 3), np.uint8)
    frames[80] = 255
    shown = shown_frames(frames)
    assert shown.shape == (6, 185, 320, 3)
    assert shown[-1].min() == 255
    np.testing.assert_array_equal(shown_frames(shown), shown)
    small = frames[:4, :96, :128]
    np.testing.assert_array_equal(shown_frames(small), small)
