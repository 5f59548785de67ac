"""Cases from public bug reports of other trainers, by number: inputs as users have them, through `prepare` and index.

c15, c16, c18, c22 and c23 of streams are in training/test_stream.py; c22, c23, c25 and c33 of indexed training in
training/test_feed.py and end_to_end/test_exactly_once.py; a dead worker (c10b) there too; memory of a long clip (c10)
and media swapped under the same name, size and time (c56) in test_prepare_resumed.py.
"""

import io
import json
import struct
import tarfile
import time
from fractions import Fraction

import av
import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from adaptiveload.data.cuts import CutConfig
from adaptiveload.data.index import ShardIndex, write_index
from adaptiveload.data.indexer import index_shards
from adaptiveload.data.latent_codecs import DctCodec
from adaptiveload.data.prepare import PrepareConfig, prepare
from adaptiveload.data.reader import SampleReader
from adaptiveload.data.text import HashTextEncoder
from adaptiveload.scheduling.shapes import LatentGeometry, Shape
from tests.data.media_files import (
    TURNS,
    find_box,
    grey,
    level,
    picture_bytes,
    set_display_matrix,
    write_clip,
    write_tar,
)


class Prepared:
    """A preparation's samples by source, decoded again, and why other items were skipped."""

    def __init__(self, inputs, output, **cuts):
        cuts = CutConfig(**{"max_crop": 0.5, **cuts})
        self.index, self.report = prepare(
            inputs, output, cuts, DctCodec(), HashTextEncoder(16, 32), PrepareConfig(overwrite=True)
        )
        self.index.verify()
        self.skipped = {problem["key"]: problem["reason"] for problem in self.report["skipped"]}
        self.damaged = {problem["key"]: problem["reason"] for problem in self.report["damaged"]}
        reader = SampleReader(self.index)
        self.samples = [reader.read(self.index.place(i)) for i in range(len(self.index))]
        self.frames = [DctCodec().decode(sample.latents) for sample in self.samples]

    def of(self, source):
        """Frames of the samples of a source."""
        return [f for sample, f in zip(self.samples, self.frames, strict=True) if sample.source.endswith(source)]


def with_captions(root):
    for path in list(root.iterdir()):
        path.with_suffix(".txt").write_text(f"this is {path.stem}")
    return root


@pytest.fixture
def media(tmp_path):
    root = tmp_path / "media"
    root.mkdir()
    return root


def test_c01_variable_frame_rate_at_a_bucket_edge(media, tmp_path):
    """The header promises 46 frames by its duration, the pictures span 40 ticks of 16 per second."""
    pts = [round(k * 1000 / 24) for k in range(20)]
    pts += [pts[-1] + 500 + 60 * k for k in range(1, 21)]
    with av.open(str(media / "vfr.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.options = {"crf": "4", "g": "10", "bf": "0"}
        stream.codec_context.time_base = Fraction(1, 1000)
        packets = []
        for k in range(40):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 20 + 5 * k, np.uint8), format="rgb24")
            frame.pts, frame.time_base = pts[k], Fraction(1, 1000)
            packets += stream.encode(frame)
        packets += stream.encode(None)
        max(packets, key=lambda packet: packet.pts).duration = 420
        container.mux(packets)
    num_ticks = pts[-1] * 16 // 1000 + 1
    usable = (num_ticks - 1) // 4 * 4 + 1
    expected = [max(i for i, t in enumerate(pts) if t <= k * 62.5) for k in range(num_ticks)]
    # A bucket of just the frames that there are, and one that only the header's duration would fill.
    shapes = (Shape(usable, 48, 64), Shape(usable + 4, 48, 64))
    prepared = Prepared([with_captions(media)], tmp_path / "out", shapes=shapes)
    assert prepared.report["buckets"] == {str(shapes[0]): 1}
    found = [round((float(np.median(frame)) - 20) / 5) for frame in prepared.frames[0]]
    # The codec mixes four frames; jumps of the hole blur by less than a picture's step of 5 levels each.
    assert np.abs(np.array(found) - expected[:usable]).max() <= 2
    assert found[0] == 0
    assert abs(found[-1] - expected[usable - 1]) <= 1


CORNERS = (200, 30, 30), (30, 200, 30), (30, 30, 200), (220, 220, 220)


def test_c03_phone_clips_and_pictures_are_upright_in_their_upright_bucket(media, tmp_path):
    """Rotated, and the mirrored kinds beside them: display matrices of clips, EXIF of pictures."""
    rgb = np.zeros((48, 80, 3), np.uint8)
    rgb[:24, :40], rgb[:24, 40:], rgb[24:, :40], rgb[24:, 40:] = CORNERS
    for matrix, orientation, _ in TURNS.values():
        set_display_matrix(write_clip(media / f"clip{orientation}.mp4", [rgb] * 5), matrix, 48, 80)
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(rgb).save(media / f"picture{orientation}.png", exif=exif)
    shapes = tuple(Shape(frames, *size) for frames in (1, 5) for size in ((48, 80), (80, 48)))
    prepared = Prepared([with_captions(media)], tmp_path / "out", shapes=shapes, max_crop=0.1)
    assert prepared.report["buckets"] == {str(shape): 4 for shape in sorted(shapes)}
    for _, orientation, turned in TURNS.values():
        for source in (f"clip{orientation}.mp4", f"picture{orientation}.png"):
            (frames,) = prepared.of(source)
            expected = turned(rgb)
            assert frames.shape[1:] == expected.shape
            for y, x in ((8, 8), (8, -9), (-9, 8), (-9, -9)):
                # Coefficients of one block of flat colour, behind H.264 in yuv420p.
                assert np.abs(frames[-1][y, x].astype(int) - expected[y, x]).max() < 20


def test_c04_headers_that_promise_more_than_there_is(media, tmp_path):
    noise = np.random.default_rng(0).integers(-4, 5, (60, 96, 128, 3))
    frames = [
        np.clip(np.full((96, 128, 3), 20 + 3 * k, np.uint8) + noise[k], 0, 255).astype(np.uint8) for k in range(60)
    ]
    whole = write_clip(media / "whole.mp4", frames, fps=30).read_bytes()
    start, size = find_box(whole, "mdat")
    for name, share in (("cut60", 0.6), ("cut05", 0.05)):
        (media / f"{name}.mp4").write_bytes(whole[: start + 8 + int((size - 8) * share)])
    long = bytearray(whole)
    for box, place in (("moov/mvhd", 24), ("moov/trak/tkhd", 28), ("moov/trak/mdia/mdhd", 24)):
        at = find_box(long, box)[0] + place
        long[at : at + 4] = struct.pack(">I", 5 * struct.unpack(">I", long[at : at + 4])[0])
    at = find_box(long, "moov/trak/mdia/minf/stbl/stts")[0]
    assert struct.unpack(">II", long[at + 12 : at + 20]) == (1, 60)
    long[at + 16 : at + 20] = struct.pack(">I", 86)  # the time table has 86 entries, the pictures are 60
    (media / "long_header.mp4").write_bytes(long)
    began = time.monotonic()
    prepared = Prepared([with_captions(media)], tmp_path / "out", shapes=(Shape(1, 96, 128), Shape(5, 96, 128)), fps=30,
                        clips_per_shape=100)  # fmt: skip
    assert time.monotonic() - began < 40  # four clips, ten seconds each at most
    assert prepared.damaged.keys() == {"media/cut60.mp4", "media/cut05.mp4"}
    for source in ("whole.mp4", "cut60.mp4", "long_header.mp4"):
        starts = [round((float(np.median(frames[0])) - 20) / 3) for frames in prepared.of(source)]
        ends = [round((float(np.median(frames[-1])) - 20) / 3) for frames in prepared.of(source)]
        assert all(abs(end - start - 4) <= 1 for start, end in zip(starts, ends, strict=True)), "no repeated frames"
        assert max(ends) >= (56 if source != "cut60.mp4" else 20)
    assert [len(frames) for frames in prepared.of("cut05.mp4")] == [1]  # two pictures: too short for 5 frames


@pytest.mark.parametrize("size", [[480, 854], [920, 1376], [724, 1280]])
def test_c06_bucket_sizes_that_are_no_multiple_of_16_are_refused(size):
    with pytest.raises(ValueError, match="is not a multiple of 16"):
        CutConfig(shapes=(Shape(5, *size),))


def test_c06_odd_sizes_become_whole_tokens(media, tmp_path):
    sizes = [(75, 101), (479, 853), (480, 854), (720, 405), (33, 33), (17, 240), (15, 240)]
    for height, width in sizes:
        path = media / f"{width}x{height}.mp4"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx264", rate=16)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv444p"
            stream.options = {"crf": "10", "preset": "ultrafast"}
            for k in range(5):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(grey(k, height, width), format="rgb24")))
            container.mux(stream.encode(None))
    for height, width in ((63, 97), (563, 1000)):
        (media / f"{width}x{height}.jpg").write_bytes(picture_bytes(3, height, width, "JPEG"))
    prepared = Prepared([with_captions(media)], tmp_path / "out", budgets=(32 * 32, 64 * 64, 240 * 16), frames=(1, 5),
                        max_aspect=15.0, max_crop=0.3)  # fmt: skip
    assert prepared.skipped.keys() == {"media/240x15.mp4"}  # 15 rows give no token without enlarging
    assert "too small" in prepared.skipped["media/240x15.mp4"]
    table = prepared.index.sample_table(LatentGeometry())
    assert len({sample.source for sample in prepared.samples}) == len(sizes) - 1 + 2
    for i, sample in enumerate(prepared.samples):
        shape = prepared.index.shape(i)
        assert shape.height % 16 == shape.width % 16 == 0
        # What the scheduler counts is what the model gets: 2x2 patches of every latent frame.
        assert sample.latents[0].size // 4 == table.num_tokens[i]


def test_c07_clips_round_the_four_n_plus_one_rule(tmp_path):
    lengths = [1, 2, 4, 5, 6, 12, 13, 16, 17, 18, 33]
    members = []
    for n in lengths:
        clip = write_clip(tmp_path / "x.mp4", (grey(k) for k in range(n))).read_bytes()
        members += [(f"f{n:02d}.mp4", clip), (f"f{n:02d}.txt", b"grey")]
    shard = write_tar(tmp_path / "shard-000000.tar", members)
    prepared = Prepared([shard], tmp_path / "out", shapes=(Shape(1, 48, 64), Shape(17, 48, 64)))
    for n in lengths:
        (frames,) = prepared.of(f"f{n:02d}.mp4")
        assert len(frames) == (17 if n >= 17 else 1)
    prepared = Prepared([shard], tmp_path / "out", shapes=(Shape(17, 48, 64),))
    assert prepared.skipped.keys() == {f"shard-000000.tar/f{n:02d}.mp4" for n in lengths if n < 17}
    assert "16 frames at 16 fps, the shortest shape has 17" in prepared.skipped["shard-000000.tar/f16.mp4"]
    every = tuple(Shape(n, 48, 64) for n in range(1, 34, 4))
    prepared = Prepared([shard], tmp_path / "out", shapes=every, lengths="longest")
    for n in lengths:
        (frames,) = prepared.of(f"f{n:02d}.mp4")
        assert [level(frame) for frame in frames] == list(range(4 * ((n - 1) // 4) + 1))


def test_c11_and_c13_picture_modes(media, tmp_path):
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(64, 0)
    Image.fromarray(ramp).save(media / "ramp16.png")
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (128, 128, 128)]
    strip = np.concatenate([np.full((32, 32, 3), colour, np.uint8) for colour in colours], 1)
    Image.fromarray(strip).convert("CMYK").save(media / "cmyk.jpg", quality=98, subsampling=0)
    Image.fromarray(strip).convert("L").save(media / "grey.jpg", quality=98)
    prepared = Prepared(
        [with_captions(media)], tmp_path / "out", shapes=(Shape(1, 64, 256), Shape(1, 32, 192)), max_crop=0
    )
    (frames,) = prepared.of("ramp16.png")
    # Blocks of 8 pixels keep the lowest frequencies; a ramp has nothing else but rounding.
    assert np.abs(frames[0][32].astype(int) - (ramp[32] >> 8)[:, None]).max() <= 2
    (frames,) = prepared.of("cmyk.jpg")
    for i, colour in enumerate(colours):
        assert np.abs(frames[0][16, 16 + 32 * i].astype(int) - colour).max() < 40
    assert len(prepared.of("grey.jpg")) == 1


def pictures(*keys):
    return [
        member for k in keys for member in ((f"{k:04d}.png", picture_bytes(k)), (f"{k:04d}.txt", b"picture %d" % k))
    ]


def test_c15_cut_and_damaged_shards_cost_only_what_is_behind_and_are_named(tmp_path):
    whole = write_tar(tmp_path / "good.tar", pictures(*range(10))).read_bytes()
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        member = tar.getmember("0006.png")
    hurt = bytearray(whole)
    hurt[member.offset + 148 : member.offset + 156] = b"\xff" * 8
    kinds = {
        "cut_payload": whole[: member.offset_data + member.size // 2],
        "cut_header": whole[: member.offset + 200],
        "bad_checksum": bytes(hurt),
        "empty": b"",
    }
    for name, data in kinds.items():
        (tmp_path / f"{name}.tar").write_bytes(data)
    inputs = [tmp_path / f"{name}.tar" for name in ("cut_payload", "cut_header", "good", "bad_checksum", "empty")]
    prepared = Prepared(inputs, tmp_path / "out", shapes=(Shape(1, 48, 64),))
    assert len(prepared.samples) == 10 + 3 * 6
    for name in ("cut_payload", "cut_header", "bad_checksum"):
        found = sorted(sample.source for sample in prepared.samples if sample.source.startswith(name))
        assert found == [f"{name}.tar/{k:04d}.png" for k in range(6)]
        assert "6 whole samples before it" in prepared.damaged[f"{name}.tar"]
    assert "0 whole samples" in prepared.damaged["empty.tar"]
    assert set(prepared.damaged) == {f"{name}.tar" for name in kinds}


def test_c16_the_same_key_twice(tmp_path):
    first = [*pictures(0, 1, 2), *pictures(2), *pictures(3)]
    shards = [write_tar(tmp_path / "a.tar", first), write_tar(tmp_path / "b.tar", pictures(1, 4))]
    prepared = Prepared(shards, tmp_path / "out", shapes=(Shape(1, 48, 64),))
    expected = [*(f"a.tar/{k:04d}.png" for k in range(4)), "b.tar/0001.png", "b.tar/0004.png"]
    assert sorted(sample.source for sample in prepared.samples) == expected
    assert prepared.skipped.keys() == {"a.tar/0002"}
    # Last key of one shard, first of the next: two samples, also of the cache's keys.
    shards = [write_tar(tmp_path / f"same-{i}.tar", pictures(1)) for i in range(2)]
    prepared = Prepared(shards, tmp_path / "out", shapes=(Shape(1, 48, 64),))
    assert len({sample.key for sample in prepared.samples}) == 2


def test_c18_missing_parts(tmp_path):
    clip = write_clip(tmp_path / "x.mp4", (grey(k) for k in range(5))).read_bytes()
    members = [("0000.mp4", clip), ("0000.txt", b"fine"), ("0001.mp4", clip), ("0002.txt", b"no media")]
    members += [("0003.mp4", clip), ("0003.json", b'{"fps": 16}'), ("0004.mp4", clip)]
    members += [("0004.json", b'{"caption": "from json"}'), ("0005.mp4", clip), ("0005.json", b'{"caption": null}')]
    members += [
        ("0006.mp4", clip),
        ("0006.json", b'{"caption": "broken json'),
        ("0007.mp4", clip),
        ("0007.txt", b"too"),
    ]
    prepared = Prepared([write_tar(tmp_path / "s.tar", members)], tmp_path / "out", shapes=(Shape(5, 48, 64),))
    assert [sample.caption for sample in prepared.samples] == ["fine", "from json", "too"]
    reasons = {key.removeprefix("s.tar/"): reason for key, reason in prepared.skipped.items()}
    assert reasons.keys() == {"0001", "0002", "0003", "0005", "0006"}
    for key, part in (("0001", "no caption"), ("0002", "no media"), ("0003", "no field"), ("0005", "null")):
        assert part in reasons[key]
    assert "broken" in reasons["0006"]


def test_c20_captions_in_other_encodings(tmp_path):
    captions = {
        "utf8": "a café at night".encode(),
        "utf8_bom": "a café".encode("utf-8-sig"),
        "cp1252": b"the dog\x92s ball",
        "latin1": "café".encode("latin-1"),
        "utf16_bom": "a cat".encode("utf-16"),
        "gbk": "女孩在跳舞".encode("gbk"),
        "cut_utf8": "café".encode()[:-1],
        "emoji": "\U0001f436 runs".encode(),
    }
    members = [
        member for key, data in captions.items() for member in ((f"{key}.png", picture_bytes(2)), (f"{key}.txt", data))
    ]
    prepared = Prepared([write_tar(tmp_path / "s.tar", members)], tmp_path / "out", shapes=(Shape(1, 48, 64),))
    assert sorted(sample.caption for sample in prepared.samples) == ["a café", "a café at night", "\U0001f436 runs"]
    assert {key.removeprefix("s.tar/") for key in prepared.skipped} == {
        "cp1252",
        "latin1",
        "utf16_bom",
        "gbk",
        "cut_utf8",
    }


def test_c56_latents_that_no_longer_belong(tmp_path):
    """Old size, old frames, wrong channels are refused by key; other number types are cast; a key counts once."""
    latents = torch.randn(16, 5, 8, 12, generator=torch.Generator().manual_seed(0))
    meta = {"frames": 17, "height": 64, "width": 96, "source": "s", "caption": "c", "codec": "dct"}
    meta |= {"normalization_hash": "abc", "text_encoder": "hash", "format_version": 1}
    variants = {
        "k0": latents,
        "k0_again_f16": latents.half(),
        "k1_old_size": latents[:, :, :6, :8],
        "k2_wrong_channels": torch.cat([latents, latents]),
        "k3_old_frames": latents[:, :3],
        "k5_float64": latents.double(),
    }
    members = []
    for key, value in [*variants.items(), ("k0", latents.half())]:
        tensors = safetensors.torch.save({"latents": value.contiguous(), "text": torch.zeros(1, 16)})
        members += [(f"{key}.json", json.dumps(meta).encode()), (f"{key}.latents.safetensors", tensors)]
    write_tar(tmp_path / "latents-000000.tar", members)
    write_tar(tmp_path / "latents-000001.tar", members[:2])
    safetensors.torch.save_file({"text": torch.zeros(1, 16)}, tmp_path / "null_text.safetensors")
    index, problems = index_shards(tmp_path)
    write_index(index)
    index = ShardIndex.read(tmp_path)
    found = [f"{shard}/{key}" for shard, key in zip(index.shards, index.keys, strict=True)]
    assert found == [
        *(f"latents-000000.tar/{key}" for key in ("k0", "k0_again_f16", "k5_float64")),
        "latents-000001.tar/k0",
    ]
    refused = {problem.key.rpartition("/")[2] for problem in problems}
    assert refused == {"k0", "k1_old_size", "k2_wrong_channels", "k3_old_frames"}
    reader = SampleReader(index)
    for i in range(4):
        sample = reader.read(index.place(i))
        assert sample.latents.dtype == np.float32
        np.testing.assert_allclose(sample.latents, latents.numpy(), atol=1e-2)  # one variant is fp16
