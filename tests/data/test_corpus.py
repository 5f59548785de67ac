"""Mixing datasets: limits, weights as repeats, prefixes, captions, and what a resumed run must have in common."""

from collections import Counter

import numpy as np
import pytest

from adaptiveload.data.corpus import SourceConfig, open_corpus
from adaptiveload.data.latent_codecs import DctCodec
from adaptiveload.data.shard_writer import DatasetWriter
from adaptiveload.data.text import HashTextEncoder
from adaptiveload.models.flow_matching import FlowMatchingConfig
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.shapes import LatentGeometry, Shape
from adaptiveload.training.feed import MicroBatchDataset, PlannedSample

GEOMETRY = LatentGeometry()


def write(root, prefix, shapes, captions=None, encoder=None):
    """Dataset of one sample a shape, 4 a shard; every latent frame holds its own number."""
    root.mkdir()
    writer = DatasetWriter(root, DctCodec(), encoder or HashTextEncoder(16, 8), samples_per_shard=4)
    for i, shape in enumerate(shapes):
        latents = np.zeros(GEOMETRY.latent_size(shape), np.float16) + np.arange((shape.frames + 3) // 4)[:, None, None]
        meta = {"frames": shape.frames, "height": shape.height, "width": shape.width, "fps": 16}
        writer.write(f"{prefix}{i}", f"{prefix}-file{i}", latents.astype(np.float16), f"{prefix} {i}", meta, captions)
    writer.finish()
    return str(root)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    shapes = [Shape(17, 32, 32), Shape(9, 32, 48), Shape(5, 32, 32), Shape(33, 64, 64), Shape(17, 16, 64)]
    captions = {"short": "a", "tags": "b c d e"}
    return write(tmp_path_factory.mktemp("clips") / "data", "c", shapes, captions)


@pytest.fixture(scope="module")
def stills(tmp_path_factory):
    return write(tmp_path_factory.mktemp("stills") / "data", "s", [Shape(1, 32, 32)] * 10)


def shapes(corpus):
    return [str(corpus.place(i).served) for i in range(len(corpus.table))]


def test_one_source_is_the_index_as_it_is(clips):
    corpus = open_corpus([SourceConfig(clips)], GEOMETRY)
    assert list(corpus.table.keys) == [f"c{i}" for i in range(5)]
    assert corpus.repeats.tolist() == [1] * 5
    corpus.verify()
    assert [corpus.reader().read(corpus.place(i)).caption for i in range(5)] == [f"c {i}" for i in range(5)]


def test_limits_leave_samples_out_and_say_how_many(clips):
    source = SourceConfig(clips, min_frames=9, max_frames=17, min_side=32)
    corpus = open_corpus([source], GEOMETRY)
    assert shapes(corpus) == ["17x32x32", "9x32x48"]
    assert [line.split(": ", 1)[1] for line in corpus.left_out] == [
        "1 samples left out: fewer than 9 frames (min_frames)",
        "1 samples left out: more than 17 frames (max_frames)",
        "1 samples left out: a side below 32 pixels (min_side)",
    ]
    corpus = open_corpus([SourceConfig(clips, max_pixels=1024)], GEOMETRY)
    assert shapes(corpus) == ["17x32x32", "5x32x32", "17x16x64"]
    with pytest.raises(ValueError, match=r"no sample is left.*min_frames"):
        open_corpus([SourceConfig(clips, min_frames=81)], GEOMETRY)


def test_prefixes_are_samples_of_their_own_with_their_first_frames(clips):
    corpus = open_corpus([SourceConfig(clips, prefix_frames=[1, 9], max_frames=17, min_side=32)], GEOMETRY)
    # The clip of 33 frames is too long to be served whole, but not its beginning.
    expected = ["17x32x32", "1x32x32", "9x32x32", "9x32x48", "1x32x48", "5x32x32", "1x32x32", "1x64x64", "9x64x64"]
    assert shapes(corpus) == expected
    reader = corpus.reader()
    names = [corpus.place(i).name for i in range(len(expected))]
    assert names == ["c0", "c0/1", "c0/9", "c1", "c1/1", "c2", "c2/1", "c3/1", "c3/9"]
    for i in range(len(expected)):
        latents = reader.read(corpus.place(i)).latents
        assert latents.shape == GEOMETRY.latent_size(corpus.place(i).served)
        np.testing.assert_array_equal(latents[0, :, 0, 0], np.arange(latents.shape[1]))
    # A prefix has noise of its own: it is another sample than the whole clip.
    dataset = MicroBatchDataset(reader, GEOMETRY, Shape(1, 32, 32), FlowMatchingConfig(), seed=0)
    whole, prefix = (dataset[(PlannedSample(i, corpus.place(i), 0, 0),)].packed.noise for i in (0, 2))
    assert not np.allclose(whole[: len(prefix)], prefix)


def test_weights_become_repeats_and_every_sample_comes(clips, stills):
    corpus = open_corpus([SourceConfig(clips, weight=3), SourceConfig(stills, weight=1)], GEOMETRY)
    # 5 clips shall be drawn three times as often as 10 stills: each comes 6 times.
    assert corpus.repeats.tolist() == [6] * 5 + [1] * 10
    corpus = open_corpus([SourceConfig(clips, weight=0.5), SourceConfig(stills, weight=0.73)], GEOMETRY)
    assert corpus.repeats[5:].tolist() == [1] * 10
    assert sorted(corpus.repeats[:5].tolist()) == [1, 1, 1, 2, 2]  # 10 * .5 / .73 = 6.8 draws of 5 samples
    order = EndlessOrder(np.arange(15), seed=3, repeats=corpus.repeats)
    for epoch in range(3):
        draws = order.window(epoch * order.epoch_size, order.epoch_size)
        assert Counter(draws.ids.tolist()) == Counter(dict(enumerate(corpus.repeats.tolist())))
        assert len(set(zip(draws.ids.tolist(), draws.repeats.tolist(), strict=True))) == order.epoch_size


def test_repeats_by_number(clips, stills):
    corpus = open_corpus([SourceConfig(clips), SourceConfig(stills, repeats=4)], GEOMETRY)
    assert corpus.repeats.tolist() == [1] * 5 + [4] * 10
    assert "10 samples, 40 draws an epoch (88.9%)" in corpus.describe()


def test_samples_of_a_mix_are_read_from_their_own_dataset(clips, stills):
    corpus = open_corpus([SourceConfig(clips), SourceConfig(stills)], GEOMETRY)
    reader = corpus.reader()
    assert [reader.read(corpus.place(i)).caption for i in (4, 5, 14)] == ["c 4", "s 0", "s 9"]
    names = corpus.source_names
    assert [names[code] for code in corpus.source_codes[[0, 14]]] == ["c-file0", "s-file9"]


def test_captions_are_chosen_with_their_probabilities(clips, stills):
    source = SourceConfig(clips, captions={"caption": 1, "short": 2, "tags": 1})
    corpus = open_corpus([source, SourceConfig(stills)], GEOMETRY)
    objective = FlowMatchingConfig(text_dropout=0.0)
    dataset = MicroBatchDataset(corpus.reader(), GEOMETRY, Shape(1, 32, 32), objective, seed=0)
    lengths = Counter(len(dataset[(PlannedSample(0, corpus.place(0), epoch, 0),)].packed.text) for epoch in range(400))
    # "c 0", "a", "b c d e", and the end mark each; 400 draws of p = 1/2 stay within 4 standard deviations of 10.
    assert lengths.keys() == {3, 2, 5}
    assert abs(lengths[2] - 200) < 40
    assert abs(lengths[3] - 100) < 35
    again = [len(dataset[(PlannedSample(0, corpus.place(0), epoch, 0),)].packed.text) for epoch in range(9)]
    assert again == [len(dataset[(PlannedSample(0, corpus.place(0), epoch, 0),)].packed.text) for epoch in range(9)]
    # A sample that lacks the named captions takes its first; held-out samples always do.
    assert len(dataset[(PlannedSample(5, corpus.place(5), 0, 0),)].packed.text) == 3
    held_out = MicroBatchDataset(corpus.reader(), GEOMETRY, Shape(1, 32, 32), objective, 0, is_training=False)
    assert {len(held_out[(PlannedSample(0, corpus.place(0), -1, r),)].packed.text) for r in range(20)} == {3}


def test_dropped_captions_are_the_null_embedding(clips):
    corpus = open_corpus([SourceConfig(clips)], GEOMETRY)
    objective = FlowMatchingConfig(text_dropout=1.0)
    dataset = MicroBatchDataset(corpus.reader(), GEOMETRY, Shape(1, 32, 32), objective, seed=0)
    text = dataset[(PlannedSample(0, corpus.place(0), 0, 0),)].packed.text
    assert text.equal(corpus.reader().null_text())


def test_the_fingerprint_sees_the_mix_but_not_the_place(clips, stills, tmp_path):
    import shutil

    def fingerprint(*sources):
        return open_corpus(sources, GEOMETRY).fingerprint

    base = fingerprint(SourceConfig(clips), SourceConfig(stills))
    moved = shutil.copytree(clips, tmp_path / "elsewhere")
    assert fingerprint(SourceConfig(str(moved)), SourceConfig(stills)) == base
    others = [
        fingerprint(SourceConfig(clips)),
        fingerprint(SourceConfig(stills), SourceConfig(clips)),
        fingerprint(SourceConfig(clips, repeats=2), SourceConfig(stills)),
        fingerprint(SourceConfig(clips, prefix_frames=[1]), SourceConfig(stills)),
        fingerprint(SourceConfig(clips, captions={"short": 1}), SourceConfig(stills)),
    ]
    assert len({base, *others}) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": ""}, "no path"),
        ({"weight": 0}, "weight=0 must be positive"),
        ({"weight": 1, "repeats": 2}, "repeats"),
        ({"repeats": 0}, "repeats=0"),
        ({"prefix_frames": [8]}, r"prefix_frames=8 is not 4k\+1"),
        ({"prefix_frames": [1, 49], "max_frames": 33}, "prefix_frames=49 is above max_frames=33"),
        ({"prefix_frames": [17, 1], "min_frames": 5}, "prefix_frames=1 is below min_frames=5"),
        ({"min_frames": 33, "max_frames": 17}, "max_frames=17 is below min_frames=33"),
        ({"min_frames": 0}, "min_frames=0 must be at least 1"),
        ({"max_frames": 0}, "max_frames=0 must be at least 1"),
        ({"max_pixels": 0}, "max_pixels=0 must be at least 1"),
        ({"min_side": -1}, "min_side=-1 must be at least 0"),
        ({"captions": {"short": -1}}, "captions"),
        ({"captions": {"long": 1}}, "no caption is named"),
    ],
)
def test_bad_settings_name_the_key(clips, changes, message):
    with pytest.raises(ValueError, match=message):
        open_corpus([SourceConfig(**{"path": clips, **changes})], GEOMETRY)


def test_datasets_that_do_not_fit_together_are_refused(clips, stills, tmp_path):
    other = write(tmp_path / "other", "o", [Shape(1, 32, 32)], encoder=HashTextEncoder(32, 8))
    with pytest.raises(ValueError, match=r"text_encoder 'hash-32-8', but .* has 'hash-16-8'"):
        open_corpus([SourceConfig(clips), SourceConfig(other)], GEOMETRY)
    with pytest.raises(ValueError, match="every source a weight, or none"):
        open_corpus([SourceConfig(clips, weight=1), SourceConfig(stills)], GEOMETRY)
