import io
import struct
import tracemalloc
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from adaptiveload.data.media import MediaError, iter_frames, probe_video, read_picture
from adaptiveload.data.video import write_mp4
from tests.data.media_files import TURNS, find_box, grey, level, set_display_matrix, write_clip

CORNERS = {"tl": (200, 30, 30), "tr": (30, 200, 30), "bl": (30, 30, 200), "br": (220, 220, 220)}


def quadrants(height, width):
    rgb = np.zeros((height, width, 3), np.uint8)
    rgb[: height // 2, : width // 2], rgb[: height // 2, width // 2 :] = CORNERS["tl"], CORNERS["tr"]
    rgb[height // 2 :, : width // 2], rgb[height // 2 :, width // 2 :] = CORNERS["bl"], CORNERS["br"]
    return rgb


def levels(path, fps=16):
    return [level(picture.rgb()) for _, picture in iter_frames(path, fps)]


def test_frames_are_chosen_by_time_stamp_in_a_clip_of_variable_rate(tmp_path):
    # 8 pictures at 25/s, a hole of 400 ms, then 6 pictures 70 ms apart.
    pts = [40 * i for i in range(8)] + [680 + 70 * i for i in range(6)]
    path = write_clip(tmp_path / "vfr.mp4", (grey(i) for i in range(14)), fps=25, pts_ms=pts)
    num_ticks = pts[-1] * 16 // 1000 + 1
    expected = [max(i for i, t in enumerate(pts) if t <= k * 62.5) for k in range(num_ticks)]
    assert levels(path) == expected
    assert probe_video(path, 16).num_frames == num_ticks


@pytest.mark.parametrize(("source_fps", "fps"), [(16, 16), (32, 16), (8, 16), (16, 8)])
def test_constant_rates(tmp_path, source_fps, fps):
    path = write_clip(tmp_path / "clip.mp4", (grey(i) for i in range(17)), fps=source_fps)
    expected = [int(k * source_fps / fps) for k in range(int(16 * fps / source_fps) + 1)]
    assert levels(path, fps) == expected


def test_time_stamps_rounded_to_milliseconds_do_not_shift_frames(tmp_path):
    # At 16 frames per second matroska stores 62.5 ms as 62 or 63.
    path = write_clip(tmp_path / "clip.mkv", (grey(i) for i in range(17)), fps=16)
    assert levels(path) == list(range(17))


@pytest.mark.parametrize("turn", TURNS)
def test_a_clip_is_turned_and_mirrored_as_its_track_header_says(tmp_path, turn):
    matrix, _, expected = TURNS[turn]
    path = write_clip(tmp_path / "phone.mp4", [quadrants(48, 80)] * 5)
    set_display_matrix(path, matrix, 48, 80)
    expected = expected(quadrants(48, 80))
    info = probe_video(path, 16)
    assert (info.height, info.width) == expected.shape[:2]
    rgb = next(iter_frames(path, 16))[1].rgb()
    assert rgb.shape == expected.shape
    for corner in ((4, 4), (4, -5), (-5, 4), (-5, -5)):
        # H.264 in yuv420p moves a flat colour by a few levels.
        assert np.abs(rgb[corner].astype(int) - expected[corner]).max() < 12


@pytest.mark.parametrize("kind", ["png", "jpeg", "tiff", "webp"])
@pytest.mark.parametrize("turn", TURNS)
def test_a_picture_is_turned_and_mirrored_as_its_exif_says(tmp_path, turn, kind):
    _, orientation, expected = TURNS[turn]
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "webp" else {"subsampling": 0, "quality": 98} if kind == "jpeg" else {}
    Image.fromarray(quadrants(32, 64)).save(tmp_path / f"phone.{kind}", exif=exif, **options)
    rgb = read_picture(tmp_path / f"phone.{kind}")
    # Blocks of JPEG have one colour each here; its rounding remains.
    np.testing.assert_allclose(rgb, expected(quadrants(32, 64)), atol=4 if kind == "jpeg" else 0)


@pytest.mark.parametrize("color_range", [1, 2], ids=["limited", "full"])
@pytest.mark.parametrize("matrix", [5, 1, 9], ids=["BT.601", "BT.709", "BT.2020"])
def test_colours_are_of_the_range_and_matrix_that_the_clip_says(tmp_path, matrix, color_range):
    colours = [(200, 30, 30), (30, 200, 30), (30, 30, 200), (250, 250, 250), (6, 6, 6), (255, 255, 0)]
    strip = np.concatenate([np.full((64, 32, 3), colour, np.uint8) for colour in colours], 1)
    path, pixels = tmp_path / "clip.mp4", "yuv444p10le" if matrix == 9 else "yuv444p"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=16)
        stream.height, stream.width, stream.pix_fmt = *strip.shape[:2], pixels
        stream.options = {"crf": "1"}
        stream.codec_context.colorspace, stream.codec_context.color_range = matrix, color_range
        frame = av.VideoFrame.from_ndarray(strip, format="rgb24")
        frame = frame.reformat(format=pixels, dst_colorspace=matrix, dst_color_range=color_range)
        frame.colorspace, frame.color_range, frame.pts = matrix, color_range, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    rgb = next(iter_frames(path, 16))[1].rgb()
    # Flat colours at the best quality: rounding. Read with another matrix or range they are off by 5 to 20.
    assert np.abs(rgb[32, 16::32].astype(int) - colours).max() <= 2


@pytest.mark.parametrize("kind", ["bgra", "yuva420p"])
def test_transparent_parts_of_clips_become_white(tmp_path, kind):
    rgba = np.zeros((32, 64, 4), np.uint8)
    rgba[..., :3], rgba[:, :32, 3] = (200, 30, 30), 255
    with av.open(str(tmp_path / "clip.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=16)
        stream.height, stream.width, stream.pix_fmt = 32, 64, kind
        container.mux(stream.encode(av.VideoFrame.from_ndarray(rgba, format="rgba").reformat(format=kind)))
        container.mux(stream.encode(None))
    rgb = next(iter_frames(tmp_path / "clip.mkv", 16))[1].rgb()
    # Rounding of YUV.
    assert np.abs(rgb[16, 8].astype(int) - (200, 30, 30)).max() <= 3
    assert np.abs(rgb[16, 56].astype(int) - 255).max() <= 1


def test_pixels_that_are_not_square_are_stretched(tmp_path):
    path = tmp_path / "wide.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=16)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(3, 2)
        for i in range(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(grey(i), format="rgb24")))
        container.mux(stream.encode(None))
    info = probe_video(path, 16)
    assert (info.height, info.width) == (48, 96)
    assert next(iter_frames(path, 16))[1].rgb().shape == (48, 96, 3)


def test_a_cut_file_is_used_up_to_the_cut(tmp_path):
    noise = np.random.default_rng(0).integers(-4, 5, (30, 96, 128, 3))
    frames = (np.clip(grey(i, 96, 128) + noise[i], 0, 255).astype(np.uint8) for i in range(30))
    path = write_clip(tmp_path / "cut.mp4", frames)
    data = path.read_bytes()
    offset, size = find_box(data, "mdat")
    path.write_bytes(data[: offset + size * 6 // 10])
    info = probe_video(path, 16)
    assert "decoding stopped after" in info.damage
    assert 10 < info.num_frames < 25
    got = []
    with pytest.raises(MediaError):
        got.extend(level(picture.rgb()) for _, picture in iter_frames(path, 16))
    assert got == list(range(info.num_frames))  # no filler frames


def test_a_header_that_promises_too_much_does_not_matter(tmp_path):
    path = write_clip(tmp_path / "long.mp4", (grey(i) for i in range(20)))
    data = bytearray(path.read_bytes())
    for box, place in (("moov/mvhd", 24), ("moov/trak/tkhd", 28), ("moov/trak/mdia/mdhd", 24)):
        offset = find_box(data, box)[0] + place
        (duration,) = struct.unpack(">I", data[offset : offset + 4])
        data[offset : offset + 4] = struct.pack(">I", 5 * duration)
    path.write_bytes(data)
    assert levels(path) == list(range(20))


@pytest.mark.parametrize("content", [b"", b"not a video at all", b"\0" * 4096])
def test_files_without_pictures_are_refused(tmp_path, content):
    path = tmp_path / "broken.mp4"
    path.write_bytes(content)
    with pytest.raises(MediaError):
        probe_video(path, 16)


def test_a_long_clip_is_streamed(tmp_path):
    path = write_clip(tmp_path / "long.mp4", (grey(i % 30, 96, 128) for i in range(600)), preset="ultrafast")
    tracemalloc.start()
    assert probe_video(path, 16).num_frames == 600
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20  # all frames as RGB would be 21 MiB


def test_clips_can_be_read_from_memory_twice(tmp_path):
    data = io.BytesIO(write_clip(tmp_path / "clip.mp4", (grey(i) for i in range(5))).read_bytes())
    assert levels(data) == levels(data) == list(range(5))


def test_sixteen_bit_grey_is_scaled(tmp_path):
    values = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(8, 0)
    Image.fromarray(values).save(tmp_path / "ramp.png")
    rgb = read_picture(tmp_path / "ramp.png")
    assert rgb.shape == (8, 256, 3)
    np.testing.assert_array_equal(rgb[3], (values[3] >> 8)[:, None].repeat(3, 1))


def test_cmyk_and_grey_jpeg(tmp_path):
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (128, 128, 128)]
    strip = np.concatenate([np.full((32, 32, 3), colour, np.uint8) for colour in colours], 1)
    Image.fromarray(strip).convert("CMYK").save(tmp_path / "cmyk.jpg", quality=98, subsampling=0)
    rgb = read_picture(tmp_path / "cmyk.jpg")
    for i, colour in enumerate(colours):
        # CMYK has no ICC profile here, so colours are near, not equal; order of channels must be right.
        assert np.abs(rgb[16, 16 + 32 * i].astype(int) - colour).max() < 40
    Image.fromarray(strip).convert("L").save(tmp_path / "grey.jpg")
    assert read_picture(tmp_path / "grey.jpg").shape == (32, 192, 3)


def test_transparent_parts_become_white(tmp_path):
    rgba = np.zeros((8, 8, 4), np.uint8)
    rgba[:, :4] = (10, 20, 30, 255)
    Image.fromarray(rgba).save(tmp_path / "clear.png")
    rgb = read_picture(tmp_path / "clear.png")
    assert tuple(rgb[0, 0]) == (10, 20, 30)
    assert tuple(rgb[0, 7]) == (255, 255, 255)


@pytest.mark.parametrize("cut", [0, 30, 200])
def test_a_cut_picture_is_refused(tmp_path, cut):
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:cut])
    with pytest.raises(MediaError, match="not a readable picture"):
        read_picture(tmp_path / "a.png")


def test_written_mp4_reads_back(tmp_path):
    frames = np.stack([grey(i) for i in range(9)])
    write_mp4(tmp_path / "out.mp4", frames, fps=16)
    assert levels(tmp_path / "out.mp4") == list(range(9))
    assert [path.name for path in tmp_path.iterdir()] == ["out.mp4"]
    with pytest.raises(ValueError, match="even"):
        write_mp4(tmp_path / "odd.mp4", frames[:, :47], fps=16)
    with pytest.raises(ValueError, match="uint8"):
        write_mp4(tmp_path / "odd.mp4", frames.astype(np.float32), fps=16)
