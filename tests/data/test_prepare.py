import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from adaptiveload.data.cuts import Cut, CutConfig
from adaptiveload.data.encode import EncodeConfig, ItemResult, _BatchEncoder
from adaptiveload.data.latent_codecs import DctCodec
from adaptiveload.data.prepare import PrepareConfig, prepare
from adaptiveload.data.reader import SampleReader
from adaptiveload.data.text import HashTextEncoder
from adaptiveload.scheduling.shapes import Shape
from tests.data.media_files import grey, level, picture_bytes, write_clip, write_tar

CONFIG = CutConfig(shapes=(Shape(1, 48, 64), Shape(5, 48, 64), Shape(9, 48, 64)), clips_per_shape=3)


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """Two clips, one picture, and one of each kind of trouble."""
    root = tmp_path_factory.mktemp("raw") / "media"
    root.mkdir()
    write_clip(root / "long.mp4", (grey(i) for i in range(22)))
    write_clip(root / "short.mp4", (grey(i) for i in range(3)))
    (root / "still.png").write_bytes(picture_bytes(7))
    (root / "broken.mp4").write_bytes(b"nothing")
    (root / "tiny.png").write_bytes(picture_bytes(1, 16, 16))
    for name in ("long", "short", "still", "broken", "tiny", "alone"):
        (root / f"{name}.txt").write_text(f"this is {name}")
    (root / "mute.png").write_bytes(picture_bytes(2))
    return root


def run(inputs, output, config=CONFIG, num_threads=1, **options):
    options = PrepareConfig(EncodeConfig(num_threads=num_threads), **options)
    return prepare(inputs, output, config, DctCodec(), HashTextEncoder(16), options)


def items(output):
    return [json.loads(line) for line in (output / "items.jsonl").read_text().splitlines()]


def test_every_input_is_used_or_skipped_with_a_reason(media, tmp_path):
    _, report = run([media], tmp_path / "out")
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    lines = items(tmp_path / "out")
    assert {line["item"]: line["num_samples"] for line in lines if "num_samples" in line} == {
        "media/long.mp4": 6,
        "media/short.mp4": 1,
        "media/still.png": 1,
    }
    reasons = {entry["key"]: entry["reason"] for entry in report["skipped"]}
    assert reasons == {line["item"]: line["skipped"] for line in lines if "skipped" in line}
    assert reasons.keys() == {"media/broken.mp4", "media/tiny.png", "media/alone", "media/mute"}
    assert "too small" in reasons["media/tiny.png"]
    assert report["num_inputs"] == 7
    assert report["buckets"] == {"1x48x64": 2, "5x48x64": 3, "9x48x64": 3}
    assert report["num_samples"] == 8
    # Flat grey is one coefficient; fp16 storage costs less than the rounding to bytes.
    assert report["psnr_db"]["min"] > 45


def test_samples_hold_the_right_frames(media, tmp_path):
    index, _ = run([media], tmp_path / "out")
    index.verify()
    reader, codec = SampleReader(index), DctCodec()
    starts = Counter()
    for i in range(len(index)):
        sample = reader.read(index.place(i))
        assert sample.caption == f"this is {sample.source.removeprefix('media/').split('.')[0]}"
        levels = [level(frame) for frame in codec.decode(sample.latents)]
        if sample.source == "media/still.png":
            assert levels == [7]
        else:
            assert levels == list(range(levels[0], levels[0] + index.frames[i]))
        starts[int(index.frames[i]), levels[0]] += 1
    assert starts == Counter({(1, 7): 1, (1, 0): 1, (5, 0): 1, (5, 8): 1, (5, 17): 1, (9, 0): 1, (9, 6): 1, (9, 13): 1})


def test_shards_of_media_and_worker_processes_give_the_same_samples(media, tmp_path):
    members = [(path.name, path.read_bytes()) for path in sorted(media.iterdir())]
    shard = write_tar(tmp_path / "raw.tar", members)
    folder_index, _ = run([media], tmp_path / "a")
    shard_index, report = run([shard], tmp_path / "b", num_threads=3, samples_per_shard=3)
    assert report["num_inputs"] == 7
    assert len(shard_index.info.shards) == 3
    latents = []
    for index in (folder_index, shard_index):
        reader = SampleReader(index)
        # The hash in a key differs with the name of the input; file, shape and number do not.
        names = [(source.split("/")[1], key[-11:]) for source, key in zip(index.sources, index.keys, strict=True)]
        latents.append({name: reader.read(index.place(i)).latents for i, name in enumerate(names)})
    assert len(latents[0]) == 8
    assert latents[0].keys() == latents[1].keys()
    for name, value in latents[0].items():
        np.testing.assert_array_equal(value, latents[1][name])


def test_preparing_again_gives_the_same_bytes(media, tmp_path):
    first, _ = run([media], tmp_path / "a")
    second, _ = run([media], tmp_path / "b")
    assert first.fingerprint == second.fingerprint
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_existing_output_is_kept_unless_told(media, tmp_path):
    output = tmp_path / "out"
    first, _ = run([media], output)
    with pytest.raises(ValueError, match="exists; pass --overwrite"):
        run([media], output)
    shorter = CutConfig(shapes=(Shape(1, 48, 64),))
    second, _ = run([media], output, shorter, overwrite=True)
    assert len(second) < len(first)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not a dataset"):
        run([media], tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_a_failure_keeps_what_was_there_and_can_go_on(media, tmp_path):
    class FailingCodec(DctCodec):
        def encode(self, frames):
            if len(frames) == 9:
                raise RuntimeError("out of disk")
            return super().encode(frames)

    with pytest.raises(RuntimeError, match="out of disk"):
        prepare([media], tmp_path / "out", CONFIG, FailingCodec(), HashTextEncoder(16))
    assert [path.name for path in tmp_path.iterdir()] == [".out.unfinished"]
    before, _ = run([media], tmp_path / "out")
    with pytest.raises(RuntimeError, match="out of disk"):
        prepare([media], tmp_path / "out", CONFIG, FailingCodec(), HashTextEncoder(16), PrepareConfig(overwrite=True))
    before.verify()


def test_no_sample_at_all_is_an_error_with_reasons(media, tmp_path):
    with pytest.raises(ValueError, match=r"no input gave a sample \(7 skipped\)"):
        run([media], tmp_path / "out", CutConfig(shapes=(Shape(33, 48, 64),)))
    (tmp_path / "junk.tar").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"\(0 skipped\)\n +junk\.tar: .*; 0 whole samples"):
        run([tmp_path / "junk.tar"], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["junk.tar"]


def test_a_cut_clip_is_used_and_named(tmp_path):
    root = tmp_path / "media"
    root.mkdir()
    rng = np.random.default_rng(0)
    frames = (grey(i).astype(int) + rng.integers(-9, 10, (48, 64, 3)) for i in range(30))
    path = write_clip(root / "cut.mp4", (np.clip(frame, 0, 255).astype(np.uint8) for frame in frames))
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 7 // 10])
    (root / "cut.txt").write_text("a cut clip")
    index, report = run([root], tmp_path / "out")
    assert len(index) == 6
    assert [entry["key"] for entry in report["damaged"]] == ["media/cut.mp4"]
    assert "the part before it is used" in report["damaged"][0]["reason"]


def test_forgotten_clips_give_their_bytes_back():
    """Or every clip after 512 MiB of them would be encoded alone."""
    sizes = []

    class Codec(DctCodec):
        def encode_batch(self, frames):
            sizes.append(len(frames))
            return super().encode_batch(frames)

    cut = Cut(Shape(1, 512, 512), 0, (0, 0, 512, 512))
    frames = np.zeros((1, 512, 512, 3), np.uint8)  # 3/4 MiB
    encoder = _BatchEncoder(Codec(), EncodeConfig(batch_mib=3, waiting_mib=4, psnr_every=10**6))
    for _ in range(8):
        unusable = ItemResult(item=None)
        encoder.add(unusable, cut, frames)
        encoder.forget(unusable)
    for _ in range(8):
        encoder.add(ItemResult(item=None), cut, frames)
    encoder.flush()
    assert sizes == [4, 4]


def test_latents_keep_the_picture(tmp_path):
    root = tmp_path / "media"
    root.mkdir()
    y, x = np.meshgrid(np.arange(100), np.arange(150), indexing="ij")
    rgb = np.stack([128 + 100 * np.sin(x / 20), 128 + 100 * np.cos(y / 25), 60 + x / 2], -1).astype(np.uint8)
    Image.fromarray(rgb).save(root / "a.png")
    (root / "a.txt").write_text("waves")
    index, report = run([root], tmp_path / "out", CutConfig(shapes=(Shape(1, 48, 64),)))
    assert report["psnr_db"]["mean"] > 30  # smooth, so within the kept frequencies
    decoded = DctCodec().decode(SampleReader(index).read(index.place(0)).latents)[0]
    box = (150 - 100 * 64 / 48) / 2, 0, (150 + 100 * 64 / 48) / 2, 100
    expected = np.asarray(Image.fromarray(rgb).resize((64, 48), Image.Resampling.BICUBIC, box=box))
    assert np.abs(decoded.astype(int) - expected).mean() < 8
